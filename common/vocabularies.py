"""Vocabularies to use again: of data that prepare.py made, of runs and exports, of GPT-2 and GPT-NeoX.

Read before: tokenizer.py.
"""

import functools
import json
from pathlib import Path

from common.files import reading
from common.tokenizer import (
    ARCHITECTURES,
    EOT,
    PATTERN,
    VOCABULARY,
    WORDS,
    HFTokenizer,
    Tokenizer,
    byte_letters,
    make_spec,
)
from configurator import UserError

PUBLIC = {"5a90c42525bd6047": "gpt2", "99ee2de5ef94ce93": "neox"}  # vocabularies by the beginning of their hash


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
        raise UserError(f"{folder} is a {kind} model; {' and '.join(ARCHITECTURES)} are supported")
    return kind in ARCHITECTURES


@functools.cache
def read_vocabulary(path):
    """The Tokenizer in a file of ours, of an export, of GPT-2, of GPT-NeoX, or in the folder of a Llama."""
    if is_of_llama(Path(path).parent):
        tokenizer = HFTokenizer.of_folder(Path(path).parent)
        if tokenizer.n_vocab > 2**16:
            limit = "token files hold ids of 16 bits, at most 65,536 of them"
            raise UserError(f"{path} has {tokenizer.n_vocab:,} tokens, and {limit}; take a model with fewer")
        return tokenizer
    remedy = "we read no others; --tokenizer=bpe:<size> trains one"
    with reading(path, "a tokenizer.json of ours, GPT-2's, GPT-NeoX's or in a Llama's folder", remedy):
        about = json.loads(Path(path).read_bytes())
        if about.get("kind") == VOCABULARY:
            return Tokenizer.load(path)
        tokenizer = Tokenizer(byte_level_spec(about))
        # An export cuts text by our pattern, which nobody else has.
        cuts = about.get("pre_tokenizer") or {}
        is_ours = cuts.get("type") == "Sequence" and cuts["pretokenizers"][0]["pattern"]["Regex"] == PATTERN
        name = PUBLIC.get(tokenizer.hash[:16]) or (is_ours and f"bpe:{tokenizer.n_vocab}")
        if not name:
            raise ValueError("it is another vocabulary")
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
