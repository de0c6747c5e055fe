"""Tokenizers: the same ids as the `tokenizers` package gives, and text that is never taken for a special token."""

import base64
import io
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import SHARED, in_process, needs_shared, refused

import prepare
from data import EOT, Tokenizer
from oldconfig import UserError

regex = pytest.importorskip("regex")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as OpenAI published it
SPACES = "\n|\r\n|\t|\x0b|\x0c|\x1c|\x85|\u00a0|\u1680|\u2003|\u2028|\u200b|\u3000".split("|")
LETTERS = "a|B|é|e\u0301|\u0301|A\u030a|中文|\u1112\u1161\u11ab|1|23|²|½|٣|ﬁ|İ".split("|")
ATOMS = SPACES + LETTERS + ". ' \" !! - _ … 😀 's 'll 'RE \ufeff \ufffd \x00".split(" ") + [" the", "def "]


def hostile(seed, n):
    """n strings of up to 16 parts: 1 to 60 spaces, other whitespace, letters, digits, punctuation, accents."""
    rng = random.Random(seed)
    for _ in range(n):
        parts = rng.choices(ATOMS, k=rng.randint(1, 16))
        yield "".join(" " * rng.choice((1, 2, 3, rng.randint(4, 60))) if rng.random() < 0.35 else p for p in parts)


def cut(pattern, text):
    return regex.findall(pattern, text)


def small_neox(folder):
    """A tokenizer.json of GPT-NeoX's kind, with its NFC and added runs of spaces, and the package's tokenizer."""
    hf = pytest.importorskip("tokenizers")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.normalizer = hf.normalizers.NFC()
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=600, special_tokens=[EOT, "<|padding|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(hostile(9, 3000), trainer)
    tokenizer.add_tokens([hf.AddedToken(" " * n, special=False, normalized=True) for n in range(24, 1, -1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


class Pair(NamedTuple):
    theirs: object  # the package's tokenizer
    ours: Tokenizer
    file: Path  # what both were made from


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("neox")
    theirs = small_neox(folder)
    return Pair(theirs, Tokenizer(prepare.neox_spec(folder / "tokenizer.json")), folder / "tokenizer.json")


def documents():
    """All text of the reference folder, without the two special tokens, which `tokenizers` would take as such."""
    zstandard = pytest.importorskip("zstandard")
    for file in sorted((SHARED / "data/text").rglob("*.jsonl.zst")):
        with open(file, "rb") as f:
            for line in io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(f)):
                yield re.sub(r"<\|endoftext\|>|<\|padding\|>", "", json.loads(line)["text"])
    for file in [SHARED / "data/text/tinyshakespeare.txt", *sorted((SHARED / "data/eval").rglob("*.jsonl"))]:
        yield file.read_text(encoding="utf-8")


def reference(name):
    """GPT-NeoX's or GPT-2's own."""
    hf = pytest.importorskip("tokenizers")
    if name == "neox":
        path = SHARED / "data/tokenizers/gpt-neox-20b.tokenizer.json"
        return Pair(hf.Tokenizer.from_file(str(path)), Tokenizer(prepare.neox_spec(path)), path)
    folder = SHARED / "data/tokenizers/gpt2"
    theirs = hf.Tokenizer(hf.models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Pair(theirs, Tokenizer(prepare.gpt2_spec(folder)), folder)


def check_texts(pair, texts):
    """Ours gives their ids, as a list and as prepare.py does it (uint16, with end-of-text), and the text again."""
    theirs = pair.theirs.encode_batch_fast(texts)
    for text, right in zip(texts, theirs, strict=True):
        ids = pair.ours.encode(text)
        assert ids == right.ids, ascii(text[:1000])
        document = pair.ours.encode_document(text)
        assert document.dtype == "<u2" and document.tolist() == [*ids, pair.ours.eot], ascii(text[:1000])
        form = pair.ours.spec["normalize"]
        assert pair.ours.decode(ids) == (unicodedata.normalize(form, text) if form else text), ascii(text[:1000])


@needs_shared
def test_equal_to_tokenizers():
    """On hostile text, on every 30th real document, and around the first long run of spaces, combining accent or odd
    whitespace of each document that has one."""
    real = list(documents())
    odd = re.compile("[\\u0300-\\u036f\\u00a0\\u2000-\\u200b\\u2028\\u3000\\x0b\\x0c]| {25}")
    found = [(text, odd.search(text)) for text in real]
    sample = [text[max(0, m.start() - 500) :][:2000] for text, m in found if m]
    sample += [text[:20_000] for text in real[::30]]
    assert len(sample) > 250
    for name, size in (("neox", 50277), ("gpt2", 50257)):
        pair = reference(name)
        assert pair.ours.n_vocab == size
        check_texts(pair, [*sample, *hostile(1, 4000)])


def test_documents_are_encoded_alike(small):
    ours = small.ours
    assert ours.n_vocab == small.theirs.get_vocab_size() and ours.spec["normalize"] == "NFC" and ours.eot == 0
    check_texts(small, list(hostile(2, 4000)))
    for text in ("", "a" + EOT):
        assert ours.encode_document(text).tolist() == [*ours.encode(text), ours.eot]


def test_pieces_are_gpt2s_cut_at_runs_of_spaces(small):
    """The patterns against their definition: GPT-2's on all text, and on what lies between the runs."""
    for text in hostile(3, 5000):
        assert cut(prepare.PATTERN, text) == cut(GPT2, text), ascii(text)
        right = []
        for part in re.split("( {2,24})", text):
            right += [part] if part[:2] == "  " else cut(GPT2, part)
        assert cut(small.ours.spec["pattern"], text) == right, ascii(text)


def test_literal_special_tokens_stay_text(small):
    text = "a<|endoftext|><|padding|>  b"
    ids = small.ours.encode(text)
    assert not {0, 1} & set(ids) and small.ours.decode(ids) == text
    prompt = small.ours.encode(text, allow_eot=True)  # only the end-of-text token can be asked for
    assert prompt.count(0) == 1 and 1 not in prompt and small.ours.decode(prompt) == text


def test_every_id_decodes(small):
    ours = small.ours
    hidden = [i for b, i in ours.spec["ranks"] if base64.b64decode(b) == b"  "]
    assert len(hidden) == 2 and ours.encode("  ") == [max(hidden)]  # the vocabulary's own pair of spaces is not used,
    assert [ours.decode([i]) for i in hidden] == ["  ", "  "]  # but a model may still sample it
    assert ours.decode(range(70_000)) == ours.decode(range(ours.n_vocab)) and ours.decode([1, 0]) == "<|padding|>" + EOT


def test_million_whitespaces():
    """tiktoken's regex engine runs out of stack on GPT-2's pattern as published."""
    ranks = [(bytes([i]), i) for i in range(256)]
    ours = Tokenizer(prepare.tokenizer_spec("bytes", prepare.PATTERN, ranks, {EOT: 256}))
    for text in (" " * 2_000_000 + "x", "\t\u3000" * 500_000):
        assert ours.decode(ours.encode(text)) == text


def test_vocabulary_has_to_fit_uint16():
    ranks = [(bytes([i]) if i < 256 else b"%d" % i, i) for i in range(2**16)]
    with pytest.raises(UserError, match="65,537 entries.*uint16.*65,536"):
        prepare.tokenizer_spec("large", prepare.PATTERN, ranks, {EOT: 2**16})
    assert prepare.tokenizer_spec("fits", prepare.PATTERN, ranks[:-1], {EOT: 2**16 - 1})["n_vocab"] == 2**16


def test_bad_tokenizer_files(small, tmp_path):
    for damage in (
        lambda about: about["model"]["merges"].reverse(),
        lambda about: about["pre_tokenizer"].update(type="Whitespace"),
        lambda about: about["added_tokens"].pop(),
        lambda about: about.pop("model"),
        lambda about: about["model"]["vocab"].update({"▁the": 60000}),
        lambda about: about["model"]["vocab"].update(a="97"),
    ):
        about = json.loads(small.file.read_text(encoding="utf-8"))
        damage(about)
        (tmp_path / "changed.json").write_text(json.dumps(about), encoding="utf-8")
        with pytest.raises(UserError, match="changed.json"):
            prepare.neox_spec(tmp_path / "changed.json")
    (tmp_path / "a.txt").write_text("text\n" * 9)
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "encoder.json").write_text(json.dumps({"<|endoftext|>": 1, "a": 0}))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "encoder.json").write_text(json.dumps({"<|endoftext|>": 1, "▁the": 0}), encoding="utf-8")
    words = ("files", f"--input_dir={tmp_path / 'a.txt'}", f"--out_dir={tmp_path / 'out'}")
    for tokenizer, file, fragments in (
        ("neox", tmp_path / "changed.json", ["changed.json", "--tokenizer_file"]),
        ("neox", "no.json", ["no.json is missing"]),
        ("gpt2", tmp_path, ["encoder.json is missing"]),
        ("gpt2", tmp_path / "letters", ["encoder.json is no byte-level vocabulary: its token '▁the'"]),
        ("gpt2", tmp_path / "few", ["gpt2 is not a vocabulary that we can use: some bytes of UTF-8 have no token"]),
    ):
        result = in_process(prepare, *words, f"--tokenizer={tokenizer}", f"--tokenizer_file={file}")
        refused(result, *fragments)
