"""Token data on disk: a tokenizer, a uint16 memmap per domain and split, and batches as a function of (seed, step).

A data folder, as prepare.py makes it:

    manifest.json            what is in it and how it was made (see `load_manifest`)
    tokenizer.json           the vocabulary, as JSON (see `Tokenizer`)
    train/<domain>.bin       little-endian uint16 token ids, each document followed by the end-of-text id
    val/<domain>.bin         the same for held-out documents

No torch here: prepare.py's worker processes import this file too.
"""

import base64
import hashlib
import json
import math
import mmap
from pathlib import Path

import numpy as np

from configurator import UserError
from files import read_json, sha256, write_json

EOT = "<|endoftext|>"
_CHUNK = 2**16  # sequences whose domains are drawn together; part of the definition of the data order


class Tokenizer:
    """text <-> token ids through a tiktoken.Encoding built from a JSON-able spec.

    spec: name (as prepare.py's --tokenizer), pattern (the regex that cuts text into pieces), ranks (list of
    [base64 of the token's bytes, id]; ids rise in merge order; of two with the same bytes text is encoded with the
    later), special (name -> id, holds '<|endoftext|>'),
    normalize ('NFC' or null), n_vocab (ids are below it).
    `hash` identifies the vocabulary: data, checkpoints and samples that should go together carry the same one.
    """

    def __init__(self, spec):
        import tiktoken

        self.spec = spec
        self.name, self.n_vocab, self.eot = spec["name"], spec["n_vocab"], spec["special"][EOT]
        ranks = [(base64.b64decode(b), i) for b, i in spec["ranks"]]
        self._bytes = {i: b for b, i in ranks} | {i: name.encode() for name, i in spec["special"].items()}
        self.encoding = tiktoken.Encoding(
            self.name,
            pat_str=spec["pattern"],
            mergeable_ranks=dict(ranks),
            special_tokens=spec["special"],
        )
        content = {k: spec[k] for k in ("pattern", "ranks", "special", "normalize", "n_vocab")}
        self.hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, path):
        """From a tokenizer.json that prepare.py wrote; raises UserError if it is missing or damaged."""
        spec = read_json(path, "a vocabulary written by prepare.py")
        try:
            return cls(spec)
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{path} is not a vocabulary written by prepare.py: {type(e).__name__} {e}") from None

    def save(self, path):
        write_json(path, self.spec)

    def encode(self, text, allow_eot=False):
        """Ids of `text`. A literal '<|endoftext|>' in it is plain text, unless `allow_eot` (prompts)."""
        text = self._normalized(text)
        if allow_eot:
            return self.encoding.encode(text, allowed_special={EOT}, disallowed_special=())
        return self.encoding.encode_ordinary(text)

    def encode_document(self, text):
        """(tokens + 1,) uint16, as in a token file: the ids that `encode` gives, and end-of-text.

        tiktoken hands over its buffer: making a Python number of each id, to make an array of them, takes a fifth of
        the time. Half a surrogate pair, which is no text, raises UnicodeEncodeError.
        """
        found = self.encoding.encode_to_numpy(self._normalized(text), disallowed_special=())
        ids = np.empty(len(found) + 1, "<u2")
        ids[:-1], ids[-1] = found, self.eot
        return ids

    def _normalized(self, text):
        if self.spec["normalize"] and not text.isascii():
            import unicodedata

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


def load_manifest(data_dir, verify=True):
    """The manifest of a data folder, after checking the folder against it; raises UserError that says what is wrong.

    manifest: format (1), source, seed, settings, tokenizer {name, hash, n_vocab, eot}, mixture {domain: weight, sum 1},
    splits {'train' | 'val': {domain: {file, tokens, documents, bytes (of UTF-8 text), sha256}}}.
    verify: read every file and compare its sha256 (about 1 GB/s); without it, sizes only.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise UserError(f"no data folder {data_dir}; make it with `python prepare.py pysource --out_dir={data_dir}`")
    if not (data_dir / "manifest.json").exists():
        raise UserError(f"{data_dir} has no manifest.json: prepare.py has not finished there; run it again")
    manifest = read_json(data_dir / "manifest.json", "a manifest written by prepare.py")
    try:
        for files in manifest["splits"].values():
            for about in files.values():
                check_file(data_dir / about["file"], about, verify)
        tokenizer = Tokenizer.load(data_dir / "tokenizer.json")
        if not manifest["mixture"].keys() <= manifest["splits"]["train"].keys():
            raise KeyError("train file for a domain of the mixture")
        if tokenizer.hash != manifest["tokenizer"]["hash"]:
            raise UserError(
                f"{data_dir}/tokenizer.json ({tokenizer.name}) is not the tokenizer the data was made with "
                f"({manifest['tokenizer']['name']}); prepare the data again or restore its file"
            )
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{data_dir}/manifest.json is not a manifest written by prepare.py: no {e}") from None
    return manifest


def check_file(path, about, verify):
    """Raise UserError unless file `path` has the size, and with `verify` the sha256, that its manifest entry says."""
    if not path.exists():
        raise UserError(f"{path} is missing; prepare the data again")
    size, right = path.stat().st_size, 2 * about["tokens"]
    if size != right:
        what = "truncated" if size < right else "changed"
        raise UserError(f"{path} was {what}: it has {size} bytes instead of {right}; prepare the data again")
    if verify and sha256(path) != about["sha256"]:
        raise UserError(f"{path} was altered: its sha256 is not the manifest's; prepare the data again")


def raw_bits(seed, *names, start=0, n=0):
    """n uint64 of the Philox stream that (seed, names) selects, from element `start` (a multiple of 4).

    The raw stream of a counter-based generator is fixed by its definition, so the order of the data does not depend on
    the version of numpy; its derived distributions might.
    """
    key = int.from_bytes(hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()[:16], "little")
    return np.random.Philox(key=key, counter=start // 4).random_raw(n)


class Corpus:
    """Windows of block_size + 1 tokens of a data folder.

    Training: sequence s = 0, 1, 2, … belongs to a domain drawn with the mixture's probability; the k-th sequence of a
    domain is the k-th of its windows in an order shuffled anew each epoch, so no window comes twice in one. Everything
    follows from (seed, s): any step can be asked for at any time, by any rank, and nothing has to be saved to resume.
    Validation: the first windows of each domain, in file order.
    """

    def __init__(self, data_dir, block_size, seed=0, mixture=None, verify=True):
        self.dir, self.block_size, self.seed = Path(data_dir), block_size, seed
        self.manifest = load_manifest(data_dir, verify)
        self.tokenizer = Tokenizer.load(self.dir / "tokenizer.json")
        self.mixture = self._weights(mixture or self.manifest["mixture"])
        self.domains = list(self.mixture)
        files = {d: self.manifest["splits"]["train"][d]["sha256"] for d in self.domains}
        self.hash = hashlib.sha256(json.dumps([files, self.mixture]).encode()).hexdigest()[:16]  # what is trained on
        self._files = {split: self._open(split) for split in ("train", "val")}
        self._bounds = np.cumsum(list(self.mixture.values()))[:-1]  # (domains-1,): where [0, 1) is cut
        self._counts = [np.zeros(len(self.domains), np.int64)]  # sequences per domain before each chunk
        self._drawn = (-1, None, None)  # the last chunk drawn: its number, domain and k of each sequence
        self._orders = {}  # domain -> (epoch, order of its windows)

    def _weights(self, mixture):
        known = self.manifest["splits"]["train"]
        for domain, weight in mixture.items():
            if domain not in known:
                raise UserError(f"mixture names domain {domain!r}; {self.dir} has {', '.join(known)}")
            if not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
                raise UserError(f"mixture gives {domain} the weight {weight!r}; weights are numbers of at least 0")
        weights = {d: float(w) for d, w in mixture.items() if w}
        if not weights:
            raise UserError(f"mixture {mixture} must have a weight above 0")
        return {d: w / sum(weights.values()) for d, w in weights.items()}

    def _open(self, split):
        files = {}
        for domain in self.domains:
            about = self.manifest["splits"][split].get(domain, {"tokens": 0})
            if about["tokens"] <= self.block_size:
                raise UserError(
                    f"{split} data of domain {domain!r} in {self.dir} has {about['tokens']} tokens, less than one "
                    f"window of block_size + 1 = {self.block_size + 1}; prepare more of it, or lower block_size "
                    "(analyze.py: --length)"
                )
            files[domain] = np.memmap(self.dir / about["file"], "<u2", "r")
            if split == "train" and hasattr(mmap, "MADV_RANDOM"):  # else the system reads far around each window
                files[domain]._mmap.madvise(mmap.MADV_RANDOM)
        return files

    def windows(self, split, domain):
        """How many windows a domain has; they share their border token, so that each token is a target once."""
        return (len(self._files[split][domain]) - 1) // self.block_size

    def _read(self, split, places):
        """places: list of (domain, window) -> x, y (n, block_size) int64, y one token after x."""
        T = self.block_size
        rows = np.empty((len(places), T + 1), np.int64)
        for row, (domain, window) in zip(rows, places, strict=True):
            row[:] = self._files[split][domain][window * T : window * T + T + 1]
        return rows[:, :-1].copy(), rows[:, 1:].copy()  # contiguous, so that a compiled model sees one layout

    def _draw(self, chunk):
        """Domain index and running number k within the domain of each of a chunk's sequences, two (_CHUNK,) arrays."""
        u = (raw_bits(self.seed, "domain", start=chunk * _CHUNK, n=_CHUNK) >> 11) * 2.0**-53
        domain = np.searchsorted(self._bounds, u, side="right")
        k = np.empty(_CHUNK, np.int64)
        after = self._counts[chunk].copy()
        for d in range(len(self.domains)):
            mine = np.flatnonzero(domain == d)
            k[mine] = after[d] + np.arange(len(mine))
            after[d] += len(mine)
        if len(self._counts) == chunk + 1:
            self._counts.append(after)
        return domain, k

    def place(self, s):
        """(domain, window) of training sequence s."""
        chunk, i = divmod(s, _CHUNK)
        if self._drawn[0] != chunk:
            for earlier in range(len(self._counts) - 1, chunk):
                self._draw(earlier)
            self._drawn = (chunk, *self._draw(chunk))
        domain, k = self.domains[self._drawn[1][i]], int(self._drawn[2][i])
        epoch, j = divmod(k, self.windows("train", domain))
        if self._orders.get(domain, (None,))[0] != epoch:
            bits = raw_bits(self.seed, "order", domain, epoch, n=self.windows("train", domain))
            self._orders[domain] = epoch, np.argsort(bits, kind="stable")
        return domain, int(self._orders[domain][1][j])

    def batch(self, step, size, first=0, last=None):
        """Rows first..last-1 of the global batch of `size` sequences of a step: x, y (rows, block_size) int64.

        A rank or a micro-batch asks for its rows only: the batch is the same however it is cut.
        """
        return self._read("train", [self.place(step * size + i) for i in range(first, size if last is None else last)])

    def val_batch(self, domain, first, last):
        """Validation windows first..last-1 of a domain: x, y (rows, block_size) int64."""
        return self._read("val", [(domain, i) for i in range(first, last)])

    @property
    def val_hash(self):
        """Of what is validated on: tokenizer, domains and their files, in whatever order."""
        files = {d: self.manifest["splits"]["val"][d]["sha256"] for d in self.domains}
        return hashlib.sha256(json.dumps([self.tokenizer.hash, files], sort_keys=True).encode()).hexdigest()[:16]

    def val_rest(self, domain):
        """What validation windows leave over: x, y (1, fewer than block_size, maybe 0) int64, y one token after x."""
        rest = self._files["val"][domain][self.windows("val", domain) * self.block_size :].astype(np.int64)
        return rest[None, :-1], rest[None, 1:]


def domain_losses(corpus, sums):
    """The loss summary of a validation pass. sums: (domains, 3) float64 array of nats, tokens and bytes of text, in the
    order of corpus.domains.

    Returns {val: {domain: nats per token}, val_mean: their plain mean (the paper's "Avg"), val_mixture: their mean with
    the weights of training, bpb: {domain: bits per byte of text}, bpb_mean: the plain mean of those}.
    """
    nats, tokens, n_bytes = sums.T
    val = nats / tokens
    bpb = nats / n_bytes / math.log(2)
    weights = np.array([corpus.mixture[domain] for domain in corpus.domains])
    return {
        "val": dict(zip(corpus.domains, val.tolist(), strict=True)),
        "val_mean": float(val.mean()),
        "val_mixture": float((weights * val).sum()),
        "bpb": dict(zip(corpus.domains, bpb.tolist(), strict=True)),
        "bpb_mean": float(bpb.mean()),
    }
