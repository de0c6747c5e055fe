"""Text <-> token ids: byte-level BPE through tiktoken, from a vocabulary that prepare.py trains or imports.

No torch here: prepare.py's worker processes import this file.
"""

import base64
import hashlib
import json
import math
import unicodedata
from typing import Annotated, Literal

import numpy as np

from oldconfig import UserError, require
from oldfiles import read_record, write_record

EOT = "<|endoftext|>"
COUNT = Annotated[int, (0, math.inf)]
VOCABULARY = {
    "name": str,  # as prepare.py's --tokenizer
    "pattern": str,  # the regex that cuts text into pieces
    "ranks": list,  # [base64 of a token's bytes, id]; ids rise in merge order; of equal bytes the last id is used
    "special": dict[str, COUNT],  # name -> id, with '<|endoftext|>'
    "normalize": Literal["NFC"] | None,
    "n_vocab": Annotated[int, (1, 2**16)],  # all ids are below it
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
