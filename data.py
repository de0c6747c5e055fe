"""Token data on disk: the tokenizer, one uint16 file per domain and split, and batches as a function of (seed, step).

A data folder, as prepare.py makes it:

    manifest.json            what is in it and how it was made (see MANIFEST)
    tokenizer.json           the vocabulary (see VOCABULARY)
    train/<domain>.bin       little-endian uint16 token ids, each document followed by the end-of-text id
    val/<domain>.bin         the same for held-out documents

No torch here: prepare.py's worker processes import this file too. Read next: checkpoint.py.
"""

import base64
import functools
import hashlib
import json
import math
import os
import unicodedata
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from oldconfig import UserError, require
from oldfiles import read_record, sha256, write_record

EOT = "<|endoftext|>"
_CHUNK = 2**16  # sequences whose domains are drawn together; part of the definition of the data order
_COMMANDS = {  # what makes the folders of the defaults and of the demo
    "data/slimpajama": "python prepare.py slimpajama",
    "data/demo": "python prepare.py pysource --out_dir=data/demo --tokenizer=bpe:4096 --tokens=8e6",
}


COUNT = Annotated[int, (0, math.inf)]
VOCABULARY = {
    "name": str,  # as prepare.py's --tokenizer
    "pattern": str,  # the regex that cuts text into pieces
    "ranks": list,  # [base64 of a token's bytes, id]; ids rise in merge order; of equal bytes the last id is used
    "special": dict[str, COUNT],  # name -> id, with '<|endoftext|>'
    "normalize": Literal["NFC"] | None,
    "n_vocab": Annotated[int, (1, 2**16)],  # all ids are below it
}
TOKEN_FILE = {"file": str, "tokens": COUNT, "documents": COUNT, "bytes": COUNT}  # bytes: of text in UTF-8
MANIFEST = {
    "format": Literal[1],
    "source": str,
    "seed": int,
    "settings": dict,  # of prepare.py
    "inputs": str,  # hash of the input files' names and sizes
    "skipped": COUNT,  # unreadable documents
    "tokenizer": {"name": str, "hash": str, "n_vocab": COUNT, "eot": COUNT},
    "mixture": dict[str, float],  # domain -> weight in training, sum 1
    "splits": dict.fromkeys(("train", "val"), dict[str, TOKEN_FILE | {"sha256": str}]),  # split -> domain -> its file
}


def check_vocabulary(spec):
    """Raise ValueError for a VOCABULARY that tiktoken would panic at, or that has ambiguous ids."""
    pairs = all(isinstance(rank, list) and list(map(type, rank)) == [str, int] for rank in spec["ranks"])
    require(pairs, "ranks are pairs of base64 text and an id")
    ids = [*spec["special"].values(), *(i for _, i in spec["ranks"])]
    require(len(set(ids)) == len(ids), "two tokens have the same id")
    require(0 <= min(ids) and max(ids) < spec["n_vocab"], f"ids are not all in 0..{spec['n_vocab'] - 1}")
    require(EOT in spec["special"], f"it has no {EOT}")
    in_utf8 = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]
    single = {base64.b64encode(bytes([b])).decode() for b in in_utf8}
    require(single <= {b for b, _ in spec["ranks"]}, "some bytes of UTF-8 have no token")


def byte_letters():
    """{byte: the printable character that spells it in byte-level vocabularies}, GPT-2's and others'."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


class Tokenizer:
    """Text <-> token ids, through a tiktoken.Encoding that is built from a dict like VOCABULARY.

    `hash` identifies the vocabulary: data, checkpoints and exports that belong together have the same one.
    """

    def __init__(self, spec):
        import tiktoken

        self.spec = spec
        self.name = spec["name"]
        self.n_vocab = spec["n_vocab"]
        self.eot = self.end = spec["special"][EOT]  # it separates documents, so it starts and ends them
        self.prefix = []  # ids that a text of its own begins with; other models' tokenizers have some
        ranks = [(base64.b64decode(b), i) for b, i in spec["ranks"]]
        self.encoding = tiktoken.Encoding(
            self.name, pat_str=spec["pattern"], mergeable_ranks=dict(ranks), special_tokens=spec["special"]
        )
        special = {i: name.encode() for name, i in spec["special"].items()}
        self._bytes = {i: b for b, i in ranks} | special
        content = {k: spec[k] for k in ("pattern", "ranks", "special", "normalize", "n_vocab")}
        self.hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, path):
        """From a tokenizer.json that prepare.py wrote; raises UserError if it is missing or damaged."""
        spec = read_record(path, "a vocabulary written by prepare.py", VOCABULARY)
        try:
            check_vocabulary(spec)
            return cls(spec)
        except ValueError as e:  # cls(spec) raises it for bad base64 or a bad pattern
            raise UserError(f"{path} is not a vocabulary: {e}") from None

    def save(self, path):
        write_record(path, self.spec)

    def encode(self, text, allow_eot=False):
        """List of the ids of `text`. '<|endoftext|>' in it is plain text, unless `allow_eot` (for prompts)."""
        text = self._normalized(text)
        if allow_eot:
            return self.encoding.encode(text, allowed_special={EOT}, disallowed_special=())
        return self.encoding.encode_ordinary(text)

    def encode_document(self, text):
        """(tokens + 1,) uint16, as in a token file: the ids that `encode` gives, and end-of-text.
        Raises UnicodeEncodeError if `text` has half a surrogate pair."""
        ids = self.encoding.encode_to_numpy(self._normalized(text), disallowed_special=())
        return np.append(ids, self.eot).astype("<u2")

    def _normalized(self, text):
        if self.spec["normalize"] and not text.isascii():
            return unicodedata.normalize(self.spec["normalize"], text)
        return text

    def decode(self, ids):
        """Text of `ids`; bytes that are not UTF-8 (a token cut inside a character) become U+FFFD, unused ids ''."""
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", "replace")

    def token_bytes(self):
        """(n_vocab,) int64: the exact number of bytes of text each id stands for; 0 for special and unused ids."""
        n = np.zeros(self.n_vocab, np.int64)
        for b, i in self.spec["ranks"]:
            n[i] = len(base64.b64decode(b))
        n[list(self.spec["special"].values())] = 0
        return n


def damaged(wrong, data_dir):
    """The UserError of data that is not as prepare.py left it. prepare.py alone would call the folder complete."""
    return UserError(f"{wrong}; delete {data_dir} and prepare it again")


def load_manifest(data_dir, verify=True):
    """The MANIFEST of a data folder, after checking the files against it; raises UserError that says what is wrong.

    verify: read every file and compare its sha256 (about 1 GB/s); without it, compare sizes only.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        command = _COMMANDS.get(data_dir.as_posix(), "prepare.py")
        existing = sorted(manifest.parent.as_posix() for manifest in Path("data").glob("*/manifest.json"))
        those = f", or use one that exists, with --data_dir=: {', '.join(existing)}" if existing else ""
        raise UserError(f"no data folder {data_dir}; make it with `{command}`{those}")
    what = "prepare.py's manifest, which it writes when it has finished"
    manifest = read_record(data_dir / "manifest.json", what, MANIFEST)
    for split in manifest["splits"].values():
        for about in split.values():
            path = data_dir / about["file"]
            if not path.exists():
                raise damaged(f"{path} is missing", data_dir)
            size = path.stat().st_size
            if size != 2 * about["tokens"]:
                raise damaged(f"{path} has {size} bytes instead of {2 * about['tokens']}", data_dir)
            if verify and sha256(path) != about["sha256"]:
                raise damaged(f"{path} was altered: its sha256 is not the manifest's", data_dir)
    return manifest


def raw_bits(seed, *names, n, start=0):
    """n uint64 of the Philox stream that (seed, names) selects, from element `start` (a multiple of 4).

    The generator's definition fixes this stream. What numpy makes of it, such as shuffles, may change between versions,
    so the order of the data does not use that.
    """
    label = "/".join(str(part) for part in (seed, *names))
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:16], "little")
    return np.random.Philox(key=key, counter=start // 4).random_raw(n)


class Corpus:
    """Windows of block_size + 1 tokens of a data folder.

    Training: sequence s = 0, 1, 2, … belongs to a domain drawn with the mixture's probability; the k-th sequence of a
    domain is the k-th of its windows in an order shuffled anew each epoch, so no window comes twice in an epoch.
    Everything follows from (seed, s): any rank can ask for any step at any time, and resuming needs no saved state.
    Validation: the first windows of each domain, in file order.

    bos: whether each sequence begins with end-of-text in place of its first token. Targets stay as they are.
    """

    def __init__(self, data_dir, block_size, seed=0, mixture=None, verify=True, bos=False):
        self.dir = Path(data_dir)
        self.block_size = block_size
        self.seed = seed
        self.bos = bos
        self.manifest = load_manifest(data_dir, verify)
        self.tokenizer = Tokenizer.load(self.dir / "tokenizer.json")
        if self.tokenizer.hash != self.manifest["tokenizer"]["hash"]:
            raise damaged(f"{self.dir}/tokenizer.json is not the one that the data was made with", self.dir)
        self.mixture = self._normalized_weights(mixture or self.manifest["mixture"])  # {domain: weight}, sum 1
        self.domains = list(self.mixture)
        self._files = {split: self._open(split) for split in ("train", "val")}  # split -> domain -> (file, its tokens)
        self._bounds = np.cumsum(list(self.mixture.values()))[:-1]  # (domains - 1,): where [0, 1) is cut
        self._counts = [np.zeros(len(self.domains), np.int64)]  # (domains,): sequences of each before chunk 0, 1, …
        self._cached_draw = functools.lru_cache(maxsize=1)(self._draw)
        self._cached_order = functools.lru_cache(maxsize=len(self.domains))(self._order)

    @property
    def hash(self):
        """Identifies the training data: the files of the domains and their weights."""
        files = {d: self.manifest["splits"]["train"][d]["sha256"] for d in self.domains}
        return hashlib.sha256(json.dumps([files, self.mixture]).encode()).hexdigest()[:16]

    @property
    def val_hash(self):
        """Identifies the validation data: tokenizer, domains and their files, in any order, and bos."""
        files = {d: self.manifest["splits"]["val"][d]["sha256"] for d in self.domains}
        parts = [self.tokenizer.hash, files]
        if self.bos:
            parts.append("bos")
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _normalized_weights(self, mixture):
        known = self.manifest["splits"]["train"]
        for domain, weight in mixture.items():
            if domain not in known:
                raise UserError(f"mixture names domain {domain!r}; {self.dir} has {', '.join(known)}")
            if weight < 0:
                raise UserError(f"mixture gives {domain} the weight {weight}; weights are at least 0")
        total = sum(mixture.values())
        if not 0 < total < math.inf:
            raise UserError(f"mixture {mixture} must have a weight above 0, and a finite sum")
        return {d: w / total for d, w in mixture.items() if w > 0}

    def _open(self, split):
        files = {}
        for domain in self.domains:
            about = self.manifest["splits"][split].get(domain, {"tokens": 0})
            least = self.block_size + 1 if split == "train" else 2  # validation can do with a part of a window
            if about["tokens"] < least:
                short = f"{split} data of domain {domain!r} in {self.dir} has {about['tokens']} tokens"
                how = "prepare more of it"
                if split == "train":
                    how += ", or set a smaller block_size or --length"
                raise UserError(f"{short}, but needs {least}; {how}")
            file = open(self.dir / about["file"], "rb", buffering=0)
            if split == "train" and hasattr(os, "posix_fadvise"):  # else the system reads far around each window
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            files[domain] = file, about["tokens"]
        return files

    def windows(self, split, domain):
        """How many windows a domain has; they share their border token, so that no token is a target twice."""
        return (self._files[split][domain][1] - 1) // self.block_size

    def _ids(self, split, domain, start, n):
        """n token ids of a file from `start` on, (n,) uint16. Raises UserError if the file was cut since it was opened
        (which would end a process that maps it into memory), or if an id is not in the vocabulary."""
        file, _ = self._files[split][domain]
        content = os.pread(file.fileno(), 2 * n, 2 * start)
        if len(content) < 2 * n:
            raise damaged(f"{file.name} was cut while it was in use", self.dir)
        ids = np.frombuffer(content, "<u2")
        if n and ids.max() >= self.tokenizer.n_vocab:
            wrong = f"{file.name} holds the token id {ids.max()}, but the vocabulary has {self.tokenizer.n_vocab}"
            raise damaged(wrong, self.dir)
        return ids

    def _read(self, split, places):
        """places: list of (domain, window) -> x, y (n, block_size) int64, y one token after x."""
        T = self.block_size
        rows = np.empty((len(places), T + 1), np.int64)
        for row, (domain, window) in enumerate(places):
            rows[row] = self._ids(split, domain, window * T, T + 1)
        x, y = rows[:, :-1].copy(), rows[:, 1:].copy()  # contiguous, so that a compiled model sees one layout
        if self.bos:
            x[:, 0] = self.tokenizer.eot
        return x, y

    def _draw_domains(self, chunk):
        """The domain, by its index, of each sequence of a chunk: (_CHUNK,) array."""
        bits = raw_bits(self.seed, "domain", start=chunk * _CHUNK, n=_CHUNK)
        uniform = (bits >> 11) * 2.0**-53  # in [0, 1)
        return np.searchsorted(self._bounds, uniform, side="right")

    def _draw(self, chunk):
        """Domain index, and running number k within the domain, of each sequence of a chunk: two (_CHUNK,) arrays."""
        while len(self._counts) <= chunk:
            earlier = self._draw_domains(len(self._counts) - 1)
            self._counts.append(self._counts[-1] + np.bincount(earlier, minlength=len(self.domains)))
        domain = self._draw_domains(chunk)
        k = np.empty(_CHUNK, np.int64)
        for d, count in enumerate(self._counts[chunk]):
            mine = np.flatnonzero(domain == d)
            k[mine] = count + np.arange(len(mine))
        return domain, k

    def _order(self, domain, epoch):
        """The windows of a domain in the order of an epoch."""
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
        if last is None:
            last = size
        return self._read("train", [self.place(step * size + row) for row in range(first, last)])

    def val_batch(self, domain, first, last):
        """Validation windows first..last-1 of a domain: x, y (rows, block_size) int64. The window with number
        windows("val", domain) is the last, incomplete one: x, y (1, fewer)."""
        if first < self.windows("val", domain):
            return self._read("val", [(domain, window) for window in range(first, last)])
        start = first * self.block_size
        rest = self._ids("val", domain, start, self._files["val"][domain][1] - start).astype(np.int64)
        if self.bos:
            rest[0] = self.tokenizer.eot
        return rest[None, :-1], rest[None, 1:]

    def val_parts(self, size, most=None):
        """[(number of the domain, first window, last)], the arguments of val_batch for a pass over all domains, up to
        `size` windows in a part. most: windows of a domain; None = all, and what is left after them. A domain without
        a whole window gives what it has, whatever `most` is."""
        parts = []
        for d, domain in enumerate(self.domains):
            n = self.windows("val", domain)
            shown = n if most is None else min(n, most)
            parts += [(d, first, min(first + size, shown)) for first in range(0, shown, size)]
            has_rest = self._files["val"][domain][1] - n * self.block_size > 1
            if has_rest and (most is None or n == 0):
                parts.append((d, n, n + 1))
        return parts
