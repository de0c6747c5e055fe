"""Token data on disk: one uint16 file per domain and split, and batches as a function of (seed, step).

A data folder, as prepare.py makes it:

    manifest.json        what is in it: splits {split: {domain: {file, tokens, documents, bytes (of text), sha256}}},
                         mixture {domain: weight in training, sum 1}, tokenizer
    settings.json        how prepare.py was called
    tokenizer.json       the vocabulary (see tokenizer.py)
    train/<domain>.bin   little-endian uint16 token ids, each document followed by the end-of-text id
    val/<domain>.bin     the same for held-out documents

Read next: checkpoint.py.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import math
from pathlib import Path

import numpy as np

from common.files import read_record, reading, sha256
from common.tokenizer import EOT, Tokenizer  # noqa: F401 (for those who import them from here)
from configurator import UserError

MANIFEST = "prepare.py's manifest"
_CHUNK = 2**16  # sequences whose domains are drawn together; part of the definition of the data order


def load_manifest(data_dir, verify=True, splits=("train", "val")):
    """The manifest of a data folder. Raises UserError if the folder's files are not those that it describes.

    verify: read every file of these splits and compare its sha256 (about 1 GB/s). Otherwise we compare only sizes.
    """
    data_dir = Path(data_dir)
    if not (data_dir / "manifest.json").exists():
        existing = sorted(manifest.parent.as_posix() for manifest in Path("data").glob("*/manifest.json"))
        those = f", or use a folder that has some: {', '.join(existing)}" if existing else ""
        raise UserError(f"there is no prepared data in {data_dir}; make it with prepare.py{those}")

    # The manifest is sealed, so its numbers are right; the token files have to be what they say.
    manifest = read_record(data_dir / "manifest.json", MANIFEST)
    for about in (about for split in splits for about in manifest["splits"][split].values()):
        file = data_dir / about["file"]
        with reading(file, "the file that the manifest describes", f"delete {data_dir} and prepare it again"):
            if file.stat().st_size != 2 * about["tokens"]:
                raise ValueError(f"it has {file.stat().st_size} bytes instead of {2 * about['tokens']}")
            if verify and sha256(file) != about["sha256"]:
                raise ValueError("it was altered: its sha256 does not match")
    return manifest


def plain_sum(numbers):
    """Their sum, rounded after each term: the same in every Python. Since 3.12 sum() is more exact, and a weight's last
    bit would change the hash of the data."""
    total = 0
    for number in numbers:
        total += number
    return total


def raw_bits(seed, *names, n, start=0):
    """n uint64 of the Philox stream that (seed, names) selects, from element `start` (a multiple of 4).

    The generator's definition fixes this stream. What numpy makes of it, such as shuffles, may change between versions,
    so the order of the data does not use that. Philox: https://www.thesalmons.org/john/random123/papers/random123sc11.pdf
    """
    label = "/".join(str(part) for part in (seed, *names))
    name = label.encode("utf-8", "surrogateescape")  # a folder, and so a domain, may have any bytes
    key = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
    return np.random.Philox(key=key, counter=start // 4).random_raw(n)


def allow_open_files(n):
    """Raise this process's own limit on open files, often 1,024, if n more would not fit."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        resource = importlib.import_module("resource")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < n + 256:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (n + 256, hard))
            except ValueError:
                few = f"this data needs {n} open files, but the system allows {hard}"
                raise UserError(f"{few}; raise that with `ulimit -n`, or prepare it with --domains=one") from None


class Corpus:
    """Windows of block_size + 1 tokens of a data folder.

    Training: sequence s = 0, 1, 2, … belongs to a domain drawn with the mixture's probability. The k-th sequence of a
    domain is the k-th of its windows, in an order shuffled anew each epoch, so no window comes twice in an epoch.
    Everything follows from (seed, s): any rank can ask for any step at any time, and resuming needs no saved state.
    Validation: the first windows of each domain, in file order.

    bos: whether each sequence begins with end-of-text in place of its first token. Targets stay as they are.
    splits: those that will be read.
    """

    def __init__(self, data_dir, block_size, seed=0, mixture=None, verify=True, bos=False, splits=("train", "val")):
        self.dir = Path(data_dir)
        self.block_size = block_size
        self.seed = seed
        self.bos = bos
        self.manifest = load_manifest(data_dir, verify, splits)
        self.tokenizer = Tokenizer.load(self.dir / "tokenizer.json")
        if self.tokenizer.hash != self.manifest["tokenizer"]["hash"]:
            wrong = f"{self.dir}/tokenizer.json is not the one that the data was made with"
            raise UserError(f"{wrong}; delete {self.dir} and prepare it again")
        self.mixture = self._normalized_weights(mixture or self.manifest["mixture"])  # {domain: weight}, sum 1
        self.domains = list(self.mixture)
        # A whole window to train on; to validate, at least one token and its target.
        least = {"train": block_size + 1, "val": 2}
        allow_open_files(2 * len(self.domains))
        self._files = {split: {d: self._open(split, d, least[split]) for d in self.domains} for split in splits}

        # Both caches below serve neighbouring sequences, which belong to one chunk and, in each domain, to one epoch.
        self._bounds = np.cumsum(list(self.mixture.values()))[:-1]  # (domains - 1,): where [0, 1) is cut
        self._counts = [np.zeros(len(self.domains), np.int64)]  # (domains,): sequences of each before chunk 0, 1, …
        self._cached_draw = functools.lru_cache(maxsize=1)(self._draw)
        self._cached_order = functools.lru_cache(maxsize=len(self.domains))(self._order)

    def _normalized_weights(self, mixture):
        known = self.manifest["splits"]["train"]
        for domain in mixture:
            if domain not in known:
                raise UserError(f"mixture names domain {domain!r}, but {self.dir} has {', '.join(known)}")
        total = plain_sum(mixture.values())
        if min(mixture.values()) < 0 or total in (0, math.inf):
            raise UserError(f"mixture takes weights of 0 or more with a finite sum above 0, not {mixture}")
        return {d: w / total for d, w in mixture.items() if w > 0}

    def _open(self, split, domain, least):
        """The token ids of a file, (tokens,) uint16. They stay on disk until we use them."""
        about = self.manifest["splits"][split].get(domain, {"tokens": 0})
        if about["tokens"] < least:
            how = "prepare more of it, or set a smaller block_size or --length" if split == "train" else "prepare more"
            short = f"{split} data of domain {domain!r} in {self.dir} has {about['tokens']} tokens"
            raise UserError(f"{short}, but needs {least}; {how}")
        return np.memmap(self.dir / about["file"], "<u2", "r")

    @property
    def hash(self):
        """Identifies the training data: the files of the domains and their weights."""
        files = {d: self.manifest["splits"]["train"][d]["sha256"] for d in self.domains}
        return hashlib.sha256(json.dumps([files, self.mixture]).encode()).hexdigest()[:16]

    @property
    def val_hash(self):
        """Identifies the validation data: tokenizer, domains and their files, in any order, and bos."""
        files = {d: self.manifest["splits"]["val"][d]["sha256"] for d in self.domains}
        parts = [self.tokenizer.hash, files, *(["bos"] if self.bos else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def windows(self, split, domain):
        """How many windows a domain has. Neighbours share their border token, so no token is a target twice."""
        return (len(self._files[split][domain]) - 1) // self.block_size

    def _read(self, split, places):
        """places: list of (domain, window) -> x, y (n, block_size) int64, y one token after x. The last window of a
        validation file may be incomplete, with fewer tokens."""
        rows = []
        for domain, window in places:
            start = window * self.block_size
            rows.append(self._files[split][domain][start : start + self.block_size + 1].astype(np.int64))
        rows = np.stack(rows)
        # Without verify nobody has checked, and on a GPU an id beyond the vocabulary ends the process.
        if rows.max() >= self.tokenizer.n_vocab:
            wrong = f"{self.dir} holds the token id {rows.max()}, but its vocabulary has {self.tokenizer.n_vocab}"
            raise UserError(f"{wrong}; delete it and prepare it again")
        # As copies x and y are contiguous, so that a compiled model sees one layout.
        x, y = rows[:, :-1].copy(), rows[:, 1:].copy()
        if self.bos:
            x[:, 0] = self.tokenizer.start
        return x, y

    def _draw_domains(self, chunk):
        """The domain, by its index, of each sequence of a chunk: (_CHUNK,) array."""
        bits = raw_bits(self.seed, "domain", start=chunk * _CHUNK, n=_CHUNK)
        # 53 random bits make a number in [0, 1), which falls into the share of a domain.
        uniform = (bits >> 11) * 2.0**-53
        return np.searchsorted(self._bounds, uniform, side="right")

    def _draw(self, chunk):
        """Domain index, and running number k within the domain, of each sequence of a chunk: two (_CHUNK,) arrays."""
        # How many sequences of each domain came before? We count each chunk once.
        while len(self._counts) <= chunk:
            earlier = self._draw_domains(len(self._counts) - 1)
            self._counts.append(self._counts[-1] + np.bincount(earlier, minlength=len(self.domains)))
        domain = self._draw_domains(chunk)
        is_of = domain[:, None] == np.arange(len(self.domains))  # (_CHUNK, domains)
        k = (self._counts[chunk] + is_of.cumsum(0))[is_of] - 1  # each row of is_of has one True
        return domain, k

    def _order(self, domain, epoch):
        """The windows of a domain in the order of an epoch."""
        # Sorting random numbers gives a random permutation.
        bits = raw_bits(self.seed, "order", domain, epoch, n=self.windows("train", domain))
        return np.argsort(bits, kind="stable")

    def place(self, s):
        """(domain, window) of training sequence s."""
        chunk, i = divmod(s, _CHUNK)
        domains, ks = self._cached_draw(chunk)
        domain = self.domains[domains[i]]
        epoch, position = divmod(int(ks[i]), self.windows("train", domain))
        return domain, int(self._cached_order(domain, epoch)[position])

    def batch(self, step, size, first=0, last=None):
        """Rows first..last-1 of the global batch of `size` sequences of a step: x, y (rows, block_size) int64.

        A rank or a micro-batch asks for its rows only: the batch is the same however it is cut.
        """
        rows = range(first, size if last is None else last)
        return self._read("train", [self.place(step * size + row) for row in rows])

    def val_batch(self, domain, first, last):
        """Validation windows first..last-1 of a domain: x, y (rows, block_size) int64. The window with number
        windows("val", domain) is the last, incomplete one, and comes alone: x, y (1, fewer)."""
        return self._read("val", [(domain, window) for window in range(first, last)])

    def val_parts(self, size, most=None):
        """[(number of the domain, first window, last)], the arguments of val_batch for a pass over all domains, up to
        `size` windows in a part. most: windows of a domain; None = all, and what is left after them. A domain without
        a whole window gives what it has, whatever `most` is."""
        parts = []
        for d, domain in enumerate(self.domains):
            n = self.windows("val", domain)
            shown = n if most is None else min(n, most)
            parts += [(d, first, min(first + size, shown)) for first in range(0, shown, size)]
            # What is left needs a token and its target.
            has_rest = len(self._files["val"][domain]) - n * self.block_size > 1
            if has_rest and (most is None or n == 0):
                parts.append((d, n, n + 1))
        return parts
