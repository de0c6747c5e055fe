"""Text <-> token ids: byte-level BPE through tiktoken, with a vocabulary that prepare.py trains or imports, or with the
tokenizer of another model through the tokenizers package.

No torch here: prepare.py's worker processes import this file. Read next: data.py.
"""

import base64
import functools
import hashlib
import json
import re
import unicodedata
from pathlib import Path

import numpy as np

from common.files import read_record, reading, write_record
from configurator import UserError, need

EOT = "<|endoftext|>"
VOCABULARY = "prepare.py's vocabulary"
PUBLIC = {"5a90c42525bd6047": "gpt2", "99ee2de5ef94ce93": "neox"}  # vocabularies by the beginning of their hash
ARCHITECTURES = ("llama", "mistral")  # model_type of models that we read: Mistral without its window is a Llama
# GPT-2's pattern ends with `\s+(?!\S)|\s+`. Ours matches the same up to 99,999 characters, because the regex engine's
# stack overflows in a million characters of whitespace.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
PATTERN = WORDS + r"|(?:\s(?!\S)){1,99999}|\s"


def byte_letters():
    """{byte: the printable character that spells it in byte-level vocabularies}, GPT-2's and others'."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


class Tokenizer:
    """Text <-> token ids. It is made from a dict `spec`, which tokenizer.json holds:

    name: as in prepare.py's --tokenizer.
    pattern: the regex that cuts text into pieces. BPE merges bytes inside a piece only.
    ranks: [[base64 of a token's bytes, id], …]. A smaller id merges first; of equal bytes the last id is used.
    special: {name: id}, with '<|endoftext|>'.
    normalize: "NFC" or None, what is done to text first.
    n_vocab: all ids are below it.

    `hash` identifies the vocabulary: data, checkpoints and exports that belong together have the same one.
    """

    def __init__(self, spec):
        self.spec = spec
        self.name = spec["name"]
        self.n_vocab = spec["n_vocab"]
        # End-of-text separates documents, so it starts and ends them.
        self.start = self.end = spec["special"][EOT]
        # The ids that every separate text begins with. Ours has none; other models' tokenizers have some.
        self.prefix = []
        self.special = dict(spec["special"])  # {name: id}
        self.is_ours = True

        ranks = [(base64.b64decode(b), i) for b, i in spec["ranks"]]
        self.encoding = need("tiktoken").Encoding(
            self.name, pat_str=spec["pattern"], mergeable_ranks=dict(ranks), special_tokens=spec["special"]
        )
        special = {i: name.encode() for name, i in spec["special"].items()}
        self._bytes = {i: b for b, i in ranks} | special

        # The name is left out, because it changes no id.
        content = {k: spec[k] for k in ("pattern", "ranks", "special", "normalize", "n_vocab")}
        self.hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, path):
        """From a tokenizer.json that prepare.py wrote: a HFTokenizer if it has another model's tokens. Raises UserError
        if the file is missing or damaged."""
        spec = read_record(path, VOCABULARY)
        return HFTokenizer(spec) if "tokenizer" in spec else cls(spec)

    def save(self, path):
        write_record(path, VOCABULARY, self.spec)

    def encode(self, text, allow_eot=False):
        """List of the ids of `text`. '<|endoftext|>' in it is plain text, unless `allow_eot` (for prompts)."""
        text = self._normalized(text)
        if allow_eot:
            return self.encoding.encode(text, allowed_special={EOT}, disallowed_special=())
        return self.encoding.encode_ordinary(text)

    def encode_document(self, text):
        """(tokens + 1,) uint16, as in a token file: the ids that `encode` gives, and end-of-text.
        Raises UnicodeEncodeError if `text` has a lone surrogate."""
        ids = self.encoding.encode_to_numpy(self._normalized(text), disallowed_special=())
        return np.append(ids, self.end).astype("<u2")

    def _normalized(self, text):
        if self.spec["normalize"] and not text.isascii():
            return unicodedata.normalize(self.spec["normalize"], text)
        return text

    def decode(self, ids):
        """Text of `ids`. Bytes that are not UTF-8 (a token cut inside a character) become U+FFFD, unused ids ''."""
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", "replace")

    def token_bytes(self):
        """(n_vocab,) int64: the exact number of bytes of text each id stands for; 0 for special and unused ids."""
        n = np.zeros(self.n_vocab, np.int64)
        for b, i in self.spec["ranks"]:
            n[i] = len(base64.b64decode(b))
        return n


class HFTokenizer:
    """Another model's tokenizer, with the methods of ours. It is made from a dict `spec`:

    name: of the model's folder.
    tokenizer: the content of its tokenizer.json, which the tokenizers package reads.
    start, end: the ids that begin a sequence and that end it, <s> and </s> in Llama's.
    n_vocab: all ids are below it.
    hash: the one that export.py stored, or None to hash the spec. is_ours: whether this is our own tokenizer.
    """

    def __init__(self, spec):
        self.spec, self.name, self.n_vocab, self.is_ours = spec, spec["name"], spec["n_vocab"], spec["is_ours"]
        self.start, self.end = spec["start"], spec["end"]
        self.encoding = need("tokenizers").Tokenizer.from_str(json.dumps(spec["tokenizer"]))
        self.encoding.no_truncation()  # the file may keep the truncation of its training, which would cut our texts
        self.encoding.no_padding()
        added = self.encoding.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.special |= {self.encoding.id_to_token(i): i for i in (self.start, self.end)}
        # what the file itself puts before a text, [<s>] in Llama's
        text = self.encoding.encode("a")
        self.prefix = text.ids[: [*text.special_tokens_mask, 0].index(0)]
        content = {k: spec[k] for k in ("tokenizer", "start", "end", "n_vocab")}
        self.hash = spec["hash"] or hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def of_folder(cls, folder):
        """The tokenizer of a model in Hugging Face layout."""
        with reading(folder, "a Hugging Face model with a tokenizer"):
            about = json.loads(Path(folder, "tokenizer.json").read_bytes())
            c = json.loads(Path(folder, "config.json").read_bytes())
            end = c["eos_token_id"]
            end = end[0] if isinstance(end, list) else end  # a chat model has several
            start = end if c["bos_token_id"] is None else c["bos_token_id"]
            spec = {"name": Path(folder).resolve().name, "tokenizer": about, "start": start, "end": end}
            n_vocab = c.get("shape", c)["vocab_size"]  # export.py's own class has our names in its shape
            if not all(type(i) is int and 0 <= i < n_vocab for i in (start, end)):
                raise ValueError(f"bos_token_id={c['bos_token_id']} or eos_token_id={c['eos_token_id']} is not an id")
            is_ours = "tokenizer_hash" in c and not c.get("foreign_tokens")
            made = cls(spec | {"n_vocab": n_vocab, "hash": c.get("tokenizer_hash"), "is_ours": is_ours})
            if None in made.special:
                raise ValueError("tokenizer.json lacks the token for bos_token_id or eos_token_id")
            return made

    def save(self, path):
        write_record(path, VOCABULARY, self.spec)

    def encode(self, text, allow_eot=False):
        self.encoding.encode_special_tokens = not allow_eot  # else '<|endoftext|>' in a text becomes its id
        ids = self.encoding.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) >= self.n_vocab:  # a token was added, but the model was not resized
            token = self.encoding.id_to_token(max(ids))
            raise UserError(f"{self.name}'s model has {self.n_vocab:,} tokens and cannot read {token!r}, id {max(ids)}")
        return ids

    def encode_document(self, text):
        return np.array([*self.encode(text), self.end], "<u2")

    def decode(self, ids):
        return self.encoding.decode(ids, skip_special_tokens=False)

    def token_bytes(self):
        """(n_vocab,) int64: bytes of text of each id; the space that some vocabularies put before a text counts."""
        vocab, added = self.encoding.get_vocab(), self.encoding.get_added_tokens_decoder()
        n = np.zeros(1 + max(*vocab.values(), self.n_vocab), np.int64)  # the file may have more than the model
        for i, token in added.items():
            n[i] = 0 if token.special else len(token.content.encode())
        # a byte-level vocabulary spells each byte as a letter; others have ▁ for a space and <0x0A> for a byte
        letters = set(byte_letters().values())
        own = {token: i for token, i in vocab.items() if i not in added}
        is_byte_level = all(letters.issuperset(token) for token in own)
        for token, i in own.items():
            n[i] = len(token) if is_byte_level else len(token.replace("▁", " ").encode())
            if re.fullmatch("<0x[0-9A-F]{2}>", token) and not is_byte_level:
                n[i] = 1
        return n[: self.n_vocab]


def make_spec(name, pattern, ranks, special, normalize=None):
    """The dict that Tokenizer takes. ranks: [(bytes, id)] in merge order."""
    n_vocab = 1 + max(i for _, i in [*ranks, *special.items()])
    ranks = [[base64.b64encode(b).decode(), i] for b, i in ranks]
    return dict(name=name, pattern=pattern, ranks=ranks, special=special, normalize=normalize, n_vocab=n_vocab)


# ---- vocabularies to use again: of data that prepare.py made, of runs and exports, of GPT-2 and GPT-NeoX


def vocabulary_file(path):
    """The file with the vocabulary in a folder: prepared data, a run, an export, or a model as the hub has it."""
    files = [Path(path, name) for name in ("tokenizer.json", "vocab.json", "encoder.json")]
    return next((file for file in files if file.exists()), files[0]) if Path(path).is_dir() else Path(path)


def is_of_llama(folder):
    """Whether a folder has a Llama's or Mistral's own tokens: another program's, or our export's of such a model."""
    config = Path(folder, "config.json")
    if not config.exists():
        return False
    with reading(config, "the config of a run or a model"):
        c = dict(json.loads(config.read_bytes()))
    if "tokenizer_hash" in c:
        return bool(c.get("foreign_tokens"))
    kind = c.get("model_type")
    if kind not in (None, *ARCHITECTURES, "gpt2", "gpt_neox", "nanoresformer"):
        raise UserError(f"{folder} is a {kind} model; only {' and '.join(ARCHITECTURES)} are supported")
    return kind in ARCHITECTURES


@functools.cache
def read_vocabulary(path):
    """The Tokenizer in a file of ours, of an export, of GPT-2, of GPT-NeoX, or in the folder of a Llama."""
    if is_of_llama(Path(path).parent):
        tokenizer = HFTokenizer.of_folder(Path(path).parent)
        if tokenizer.n_vocab > 2**16:
            limit = "token files hold 16-bit ids, so at most 65,536 of them"
            raise UserError(f"{path} has {tokenizer.n_vocab:,} tokens, and {limit}; choose a model with fewer")
        return tokenizer
    remedy = "no others are supported; --tokenizer=bpe:<size> trains one"
    with reading(path, "a tokenizer.json of ours, of GPT-2, of GPT-NeoX or from a Llama's folder", remedy):
        about = json.loads(Path(path).read_bytes())
        if about.get("kind") == VOCABULARY:
            return Tokenizer.load(path)
        tokenizer = Tokenizer(byte_level_spec(about))
        # An export cuts text by our pattern, which nobody else has.
        cuts = about.get("pre_tokenizer") or {}
        is_ours = cuts.get("type") == "Sequence" and cuts["pretokenizers"][0]["pattern"]["Regex"] == PATTERN
        name = PUBLIC.get(tokenizer.hash[:16]) or (is_ours and f"bpe:{tokenizer.n_vocab}")
        if not name:
            raise ValueError("it is a different vocabulary")
        tokenizer.name = tokenizer.spec["name"] = name
        return tokenizer


def byte_level_spec(about):
    """Spec of GPT-2's or GPT-NeoX's tokenizer.json: byte-level BPE whose tokens' ids rise in the order of the merges.

    GPT-NeoX's has added tokens that are not special: runs of 2 to n spaces. GPT-2's older vocab.json has the ids alone.
    """
    if EOT in about:
        eot = {"content": EOT, "id": about[EOT], "special": True}
        about = {"model": {"vocab": about}, "added_tokens": [eot], "normalizer": None}
    vocab, added = about["model"]["vocab"], about["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    runs = sorted((token["content"].encode(), token["id"]) for token in added if not token["special"])

    # The vocabulary spells each byte as a printable letter. tiktoken looks up a whole piece before it merges. So an
    # added run of spaces, listed last, hides the vocabulary's own entry for that run.
    byte_of = {letter: b for b, letter in byte_letters().items()}
    plain = sorted((i, token) for token, i in vocab.items() if token not in special)
    ranks = [(bytes(byte_of[letter] for letter in token), i) for i, token in plain] + runs
    normalize = about["normalizer"] and about["normalizer"]["type"]

    # Text has to be cut at the runs before anything else. So the pattern starts with runs of spaces, and other
    # whitespace ends where a run begins.
    pattern = PATTERN
    if runs:
        pattern = f" {{2,{len(runs) + 1}}}|" + WORDS + r"|(?:(?!  )\s(?!\S)){1,99999}|\s"
    return make_spec("", pattern, ranks, special, normalize)
