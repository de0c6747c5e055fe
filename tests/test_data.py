"""Tokenizers give the ids of the `tokenizers` package. The order of the data is a pure function of (seed, step)."""

import base64
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import unicodedata

import numpy as np
import pytest
from conftest import ROOT, SHARED, byte_tokenizer, finished, gpt2_json, in_process, make_data, needs_shared, refused

import prepare
from common import data, scoring
from common.data import EOT, Corpus, Tokenizer
from common.tokenizer import PATTERN, PUBLIC, HFTokenizer, byte_level_spec, read_vocabulary, vocabulary_file
from configurator import UserError

SPACES = "\n|\r\n|\t|\x0b|\x0c|\x1c|\x85|\u00a0|\u1680|\u2003|\u2028|\u200b|\u3000".split("|")
LETTERS = "a|B|é|e\u0301|\u0301|A\u030a|中文|\u1112\u1161\u11ab|1|23|²|½|٣|ﬁ|İ".split("|")
ATOMS = SPACES + LETTERS + ". ' \" !! - _ … 😀 's 'll 'RE \ufeff \ufffd \x00".split(" ") + [" the", "def "]


def hostile(seed, n):
    """n strings of up to 16 parts: 1 to 60 spaces, other whitespace, letters, digits, punctuation, accents."""
    rng = random.Random(seed)
    for _ in range(n):
        parts = rng.choices(ATOMS, k=rng.randint(1, 16))
        yield "".join(" " * rng.choice((1, 2, 3, rng.randint(4, 60))) if rng.random() < 0.35 else p for p in parts)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tokenizer.json of GPT-NeoX's kind, with its NFC and added runs of spaces: (theirs, ours, file)."""
    hf = pytest.importorskip("tokenizers")
    theirs = hf.Tokenizer(hf.models.BPE())
    theirs.normalizer = hf.normalizers.NFC()
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = dict(vocab_size=600, special_tokens=[EOT, "<|padding|>"], show_progress=False)
    trainer = hf.trainers.BpeTrainer(initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(), **words)
    theirs.train_from_iterator(hostile(9, 3000), trainer)
    theirs.add_tokens([hf.AddedToken(" " * n, special=False, normalized=True) for n in range(24, 1, -1)])
    file = tmp_path_factory.mktemp("neox") / "tokenizer.json"
    theirs.save(str(file))
    return theirs, Tokenizer(byte_level_spec(json.loads(file.read_bytes()))), file


def reference(name, folder):
    """(the package's, ours) of GPT-NeoX's or GPT-2's own tokenizer."""
    file = gpt2_json(folder) if name == "gpt2" else SHARED / "data/tokenizers/gpt-neox-20b.tokenizer.json"
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(file))
    return theirs, Tokenizer(byte_level_spec(json.loads(file.read_bytes())))


@functools.cache
def documents():
    """Every 30th of the real documents, without the two special tokens, which `tokenizers` would take as such."""
    zstandard, found = pytest.importorskip("zstandard"), []
    for file in sorted((SHARED / "data/text").rglob("*.jsonl.zst")):
        with open(file, "rb") as f:
            found += io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(f))
    texts = [json.loads(line)["text"] for line in found[::30]]
    return [re.sub(r"<\|endoftext\|>|<\|padding\|>", "", text)[:20_000] for text in texts]


def check_texts(theirs, ours, texts):
    """Ours gives their ids, as a list and as prepare.py does it (uint16, with end-of-text), and the text again."""
    for text, right in zip(texts, theirs.encode_batch_fast(texts), strict=True):
        ids = ours.encode(text)
        assert ids == right.ids, ascii(text[:1000])
        document = ours.encode_document(text)
        assert document.dtype == "<u2" and document.tolist() == [*ids, ours.start], ascii(text[:1000])
        form = ours.spec["normalize"]
        assert ours.decode(ids) == (unicodedata.normalize(form, text) if form else text), ascii(text[:1000])


@needs_shared
@pytest.mark.parametrize(("name", "size"), [("neox", 50277), ("gpt2", 50257)])
def test_ids_of_public_tokenizers(tmp_path, name, size):
    """On hostile and on real text."""
    theirs, ours = reference(name, tmp_path)
    assert ours.n_vocab == size and PUBLIC[ours.hash[:16]] == name and len(documents()) > 100
    check_texts(theirs, ours, [*documents(), *hostile(1, 4000)])


def test_ids_of_a_small_vocabulary(small):
    theirs, ours, _ = small
    assert ours.n_vocab == theirs.get_vocab_size() and ours.spec["normalize"] == "NFC" and ours.start == 0
    check_texts(theirs, ours, ["", *hostile(2, 4000)])


def test_literal_special_tokens_stay_text(small):
    ours, text = small[1], "a<|endoftext|><|padding|>  b"
    ids = ours.encode(text)
    assert not {0, 1} & set(ids) and ours.decode(ids) == text and ours.encode_document(text).tolist() == [*ids, 0]
    prompt = ours.encode(text, allow_eot=True)  # only the end-of-text token can be asked for
    assert prompt.count(0) == 1 and 1 not in prompt and ours.decode(prompt) == text


def test_every_id_decodes(small):
    ours = small[1]
    hidden = [i for b, i in ours.spec["ranks"] if base64.b64decode(b) == b"  "]
    assert len(hidden) == 2 and ours.encode("  ") == [max(hidden)]  # the vocabulary's own pair of spaces is not used,
    assert [ours.decode([i]) for i in hidden] == ["  ", "  "]  # but a model may still sample it
    assert ours.decode(range(70_000)) == ours.decode(range(ours.n_vocab)) and ours.decode([1, 0]) == "<|padding|>" + EOT


def test_million_whitespaces():
    """tiktoken's regex engine runs out of stack on GPT-2's pattern as published."""
    ours = byte_tokenizer(PATTERN)
    for text in (" " * 2_000_000 + "x", "\t\u3000" * 500_000):
        assert ours.decode(ours.encode(text)) == text


def test_another_vocabulary_is_refused(small, tmp_path):
    (tmp_path / "a.txt").write_text("text\n" * 9)
    (tmp_path / "llama.json").write_text(json.dumps({"model": {"vocab": {"▁the": 0}}, "added_tokens": []}))
    words = ("files", f"--input_dir={tmp_path / 'a.txt'}", f"--out_dir={tmp_path / 'out'}", "--tokenizer=neox")
    ours = "(a tokenizer.json of ours, of GPT-2, of GPT-NeoX or from"
    for file, says in (
        (tmp_path / "no.json", f"no.json is missing {ours}"),
        (tmp_path / "llama.json", "llama.json is damaged or not a tokenizer.json of ours"),
        (small[2], "tokenizer.json is damaged or not a tokenizer.json of ours"),
    ):
        refused(in_process(prepare, *words, f"--tokenizer_file={file}"), says)


def test_bytes_of_a_letter_that_is_not_ascii():
    """In a vocabulary that spells text as it is, with ▁ for a space."""
    hf = pytest.importorskip("tokenizers")
    words = hf.models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "▁é": 3}, "?")
    spec = dict(name="x", start=0, end=1, n_vocab=4, hash=None, is_ours=False)
    tokenizer = HFTokenizer(spec | {"tokenizer": json.loads(hf.Tokenizer(words).to_str())})
    assert tokenizer.token_bytes()[3] == len(" é".encode())


@needs_shared
def test_ids_alone_as_in_gpt2s_older_files(tmp_path):
    shutil.copy(SHARED / "data/tokenizers/gpt2/encoder.json", tmp_path / "vocab.json")
    found = read_vocabulary(vocabulary_file(tmp_path))
    assert (found.name, PUBLIC[found.hash[:16]]) == ("gpt2", "gpt2")


# ---------------------------------------------------------------------------------------------------------------- data


def test_batch_is_a_function_of_seed_and_step(data_dir):
    a, b = Corpus(data_dir, 16, seed=1), Corpus(data_dir, 16, seed=1)
    x, y = a.batch(70, 8)  # b gets there step by step, a at once
    for step in range(71):
        last = b.batch(step, 8)
    np.testing.assert_array_equal(last, (x, y))
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert not np.array_equal(x, Corpus(data_dir, 16, seed=2).batch(70, 8)[0])
    for cuts in ([0, 4, 8], [0, 1, 3, 8]):  # ranks and micro-batches
        parts = [Corpus(data_dir, 16, seed=1).batch(70, 8, *rows)[0] for rows in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), x)


def test_sequences_that_begin_with_end_of_text(data_dir):
    """Only the first token that the model sees differs, in what is left of the validation text too."""
    plain, bos = Corpus(data_dir, 16, seed=1), Corpus(data_dir, 16, seed=1, bos=True)
    rest = plain.windows("val", "prose")
    for get, rows in (("batch", (70, 8)), ("val_batch", ("prose", 0, 3)), ("val_batch", ("prose", rest, rest + 1))):
        (x, y), (with_bos, targets) = getattr(plain, get)(*rows), getattr(bos, get)(*rows)
        np.testing.assert_array_equal(targets, y)
        np.testing.assert_array_equal(with_bos[:, 1:], x[:, 1:])
        assert (with_bos[:, 0] == plain.tokenizer.start).all() and not (x[:, 0] == plain.tokenizer.start).all()


def test_each_window_once_per_epoch(data_dir):
    corpus = Corpus(data_dir, 16, seed=3)
    n = {d: corpus.windows("train", d) for d in corpus.domains}
    assert n == {"prose": 29_999 // 16, "code": 19_999 // 16}
    places = [corpus.place(s) for s in range(3 * sum(n.values()))]
    for d in corpus.domains:
        seen = [window for domain, window in places if domain == d]
        first, second = seen[: n[d]], seen[n[d] : 2 * n[d]]
        assert sorted(first) == sorted(second) == list(range(n[d]))
        assert first != second and first != sorted(first)


@pytest.mark.parametrize(("block_size", "size", "most", "expected"), [
    (1000, 1, None, [(0, 1), (1, 2), (2, 3)]),  # of 3,000 tokens: two windows of 1,000 and a rest
    (1000, 9, None, [(0, 2), (2, 3)]), (1000, 9, 1, [(0, 1)]),
    (2999, 1, None, [(0, 1)]),  # one window and no rest
    (4000, 1, None, [(0, 1)]), (4000, 1, 5, [(0, 1)]),  # no whole window
])  # fmt: skip
def test_parts_of_a_validation_pass(tmp_path, block_size, size, most, expected):
    corpus = Corpus(make_data(tmp_path, {"a": 5000, "b": 5000}), block_size, verify=False)
    parts = corpus.val_parts(size, most)
    assert parts == [(d, *windows) for d in (0, 1) for windows in expected]
    n_tokens = sum(corpus.val_batch("b", first, last)[1].size for d, first, last in parts if d == 1)
    assert n_tokens == (1000 if most == 1 else 2999)


def test_a_domain_without_text(data_dir):
    corpus = Corpus(data_dir, 16)
    sums = np.array([[3.0, 1.0, 5.0], [3.0, 1.0, 0.0]])
    with pytest.raises(UserError, match=f"tokens of domain '{corpus.domains[1]}' have no text; prepare more of it"):
        scoring.domain_losses(corpus, sums)


def test_mixture_is_what_is_drawn(data_dir):
    corpus = Corpus(data_dir, 16, seed=4, mixture={"prose": 1, "code": 3})
    drawn = [corpus.place(s)[0] for s in range(20_000)]
    assert abs(drawn.count("code") / 20_000 - 0.75) < 5 * (0.75 * 0.25 / 20_000) ** 0.5
    assert corpus.mixture == {"prose": 0.25, "code": 0.75}
    only = Corpus(data_dir, 16, mixture={"prose": 1, "code": 0})
    assert only.domains == ["prose"] and {only.place(s)[0] for s in range(100)} == {"prose"}


def test_a_domain_may_be_a_folder_whose_name_is_no_utf_8(tmp_path):
    name = os.fsdecode(b"a\xff")
    try:
        folder = make_data(tmp_path, {name: 5000})
    except OSError:
        pytest.skip("names are UTF-8 on this file system, as on a Mac")
    assert Corpus(folder, 16).batch(0, 4)[0].shape == (4, 16)


def test_places_beyond_one_chunk(data_dir, monkeypatch):
    whole = [Corpus(data_dir, 16, seed=5).place(s) for s in range(50)]
    monkeypatch.setattr(data, "_CHUNK", 16)
    corpus = Corpus(data_dir, 16, seed=5)
    assert [corpus.place(s) for s in reversed(range(50))] == whole[::-1]


def test_order_does_not_depend_on_the_library_version():
    """The first draws, written down: a change here changes every run's data."""
    assert data.raw_bits(42, "domain", n=2).tolist() == [9947686430430168814, 10594182583085350699]
    assert data.raw_bits(42, "domain", start=4, n=2).tolist() == data.raw_bits(42, "domain", n=6)[4:].tolist()


def test_hashes_name_the_data(data_dir, tmp_path):
    corpus, other = Corpus(data_dir, 16), Corpus(data_dir, 16, mixture={"prose": 1, "code": 1})
    assert corpus.hash == Corpus(data_dir, 32, seed=1).hash != other.hash
    assert corpus.val_hash == Corpus(data_dir, 16, mixture={"code": 1, "prose": 1}).val_hash
    assert corpus.val_hash != Corpus(data_dir, 16, mixture={"code": 1}).val_hash
    assert corpus.val_hash != Corpus(make_data(tmp_path, tokenizer=byte_tokenizer("[^a]|a")), 16).val_hash
    bos = Corpus(data_dir, 16, bos=True)
    assert bos.hash == corpus.hash and bos.val_hash != corpus.val_hash  # losses with and without it are not compared


def test_impossible_settings_are_refused(data_dir, tmp_path, monkeypatch):
    short = make_data(tmp_path / "data/short", {"a": 3000}, n_val=1)  # one validation token predicts nothing
    other = make_data(tmp_path / "other", {"a": 3000})
    byte_tokenizer("[^a]|a").save(other / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    for folder, block_size, mixture, message in (
        (data_dir, 25_000, None, "has 20000 tokens, but needs 25001"),
        (data_dir, 16, {"C4": 1.0}, "mixture names domain 'C4'"),
        (data_dir, 16, {"code": -1.0}, "of 0 or more"),
        (data_dir, 16, {"code": 0}, "a finite sum above 0"),
        (short, 16, None, "val data of domain 'a' in .* has 1 tokens, but needs 2"),
        (other, 16, None, "not the one that the data was made with"),
        ("nowhere", 16, None, "there is no prepared data in nowhere; make it with prepare.py, or .* data/short$"),
    ):
        with pytest.raises(UserError, match=message):
            Corpus(folder, block_size, mixture=mixture)


def test_validation_needs_no_train_text(tmp_path):
    """Whether it is too short for a window, or altered."""
    folder = make_data(tmp_path, {"a": 3000})
    np.full(3000, 7, "<u2").tofile(folder / "train/a.bin")
    with pytest.raises(UserError, match="a.bin is damaged or not"):
        Corpus(folder, 16)
    assert Corpus(folder, 5000, splits=("val",)).val_parts(1)


def test_an_id_beyond_the_vocabulary(tmp_path):
    folder = make_data(tmp_path, {"a": 3000})
    np.full(3000, 257, "<u2").tofile(folder / "train/a.bin")
    with pytest.raises(UserError, match="holds the token id 257, but its vocabulary has 257;"):
        Corpus(folder, 16, verify=False).batch(0, 1)


def test_many_domains_may_be_open_at_once():
    """Each has two files. The usual limit of a process is 1,024; here it is less."""
    code = """import resource
from common.data import allow_open_files
limit = resource.RLIMIT_NOFILE
resource.setrlimit(limit, (64, 800))
allow_open_files(300)
print(resource.getrlimit(limit)[0])
allow_open_files(600)"""
    result = finished([sys.executable, "-c", code], cwd=ROOT)
    assert result.stdout == "556\n" and "UserError: this data needs 600 open files" in result.stderr
