"""The order of the data: a pure function of (seed, step), without repeats, whoever asks; damaged folders are found."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
from conftest import ROOT, change, make_data

import data
import prepare
import scoring
from data import Corpus
from oldconfig import UserError, load_settings


def test_batch_is_a_function_of_seed_and_step(data_dir):
    a, b = Corpus(data_dir, 16, seed=1), Corpus(data_dir, 16, seed=1)
    later = a.batch(70, 8)  # b gets there step by step, a at once
    for step in range(71):
        last = b.batch(step, 8)
    for x, y in zip(later, last, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(later[0], Corpus(data_dir, 16, seed=2).batch(70, 8)[0])
    np.testing.assert_array_equal(later[0][:, 1:], later[1][:, :-1])
    for cuts in ([0, 4, 8], [0, 1, 3, 8]):  # ranks and micro-batches
        parts = [Corpus(data_dir, 16, seed=1).batch(70, 8, *rows)[0] for rows in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), later[0])


def test_sequences_that_begin_with_end_of_text(data_dir):
    """Only the first token that the model sees differs, in what is left of the validation text too."""
    plain, bos = Corpus(data_dir, 16, seed=1), Corpus(data_dir, 16, seed=1, bos=True)
    rest = plain.windows("val", "prose")
    for get in (
        lambda corpus: corpus.batch(70, 8),
        lambda corpus: corpus.val_batch("prose", 0, 3),
        lambda corpus: corpus.val_batch("prose", rest, rest + 1),
    ):
        (x, y), (with_bos, targets) = get(plain), get(bos)
        np.testing.assert_array_equal(targets, y)
        np.testing.assert_array_equal(with_bos[:, 1:], x[:, 1:])
        assert (with_bos[:, 0] == plain.tokenizer.eot).all() and not (x[:, 0] == plain.tokenizer.eot).all()


def test_each_window_once_per_epoch(data_dir):
    corpus = Corpus(data_dir, 16, seed=3)
    n = {d: corpus.windows("train", d) for d in corpus.domains}
    assert n == {"prose": 29_999 // 16, "code": 19_999 // 16}
    seen = {d: [] for d in corpus.domains}
    for s in range(3 * sum(n.values())):
        domain, window = corpus.place(s)
        seen[domain].append(window)
    for d in corpus.domains:
        first, second = seen[d][: n[d]], seen[d][n[d] : 2 * n[d]]
        assert sorted(first) == sorted(second) == list(range(n[d]))
        assert first != second and first != sorted(first)


def test_parts_of_a_validation_pass(tmp_path):
    """Of 3,000 tokens: two windows of 1,000 and a rest, one of 2,999 and no rest, or no window at all."""
    folder = make_data(tmp_path, {"a": 5000, "b": 5000})
    for block_size, size, most, expected in (
        (1000, 1, None, [(0, 1), (1, 2), (2, 3)]),
        (1000, 9, None, [(0, 2), (2, 3)]),
        (1000, 9, 1, [(0, 1)]),
        (2999, 1, None, [(0, 1)]),
        (4000, 1, None, [(0, 1)]),
        (4000, 1, 5, [(0, 1)]),
    ):
        corpus = Corpus(folder, block_size, verify=False)
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


def test_places_beyond_one_chunk(data_dir, monkeypatch):
    whole = [Corpus(data_dir, 16, seed=5).place(s) for s in range(100)]
    monkeypatch.setattr(data, "_CHUNK", 16)
    corpus = Corpus(data_dir, 16, seed=5)
    assert [corpus.place(s) for s in reversed(range(100))] == whole[::-1]


def test_order_does_not_depend_on_the_library_version():
    """The first draws, written down: a change here changes every run's data."""
    assert data.raw_bits(42, "domain", n=2).tolist() == [9947686430430168814, 10594182583085350699]
    assert data.raw_bits(42, "domain", start=4, n=2).tolist() == data.raw_bits(42, "domain", n=6)[4:].tolist()


def test_hashes_name_the_data(data_dir):
    corpus, other = Corpus(data_dir, 16), Corpus(data_dir, 16, mixture={"code": 1, "prose": 1})
    assert corpus.hash == Corpus(data_dir, 32, seed=1).hash != other.hash
    assert corpus.val_hash == other.val_hash != Corpus(data_dir, 16, mixture={"code": 1}).val_hash
    bos = Corpus(data_dir, 16, bos=True)
    assert bos.hash == corpus.hash and bos.val_hash != corpus.val_hash  # losses with and without it are not compared


def swap(file, old, new):
    """Change the text of a file."""
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def flip_a_token(folder):
    ids = np.fromfile(folder / "train/code.bin", "<u2")
    ids[1234] ^= 1
    ids.tofile(folder / "train/code.bin")


DAMAGES = {
    "code.bin has 39998 bytes instead of 40000": lambda f: os.truncate(f / "train/code.bin", 39_998),
    "code.bin has 40002 bytes instead of 40000": lambda f: os.truncate(f / "train/code.bin", 40_002),
    "prose.bin is missing; delete .* and prepare it again": lambda f: (f / "val/prose.bin").unlink(),
    "manifest.json is missing; it should be prepare.py": lambda f: (f / "manifest.json").unlink(),
    "is not JSON: .*should be prepare.py's manifest": lambda f: (f / "manifest.json").write_text("{"),
    "manifest.json takes object, not": lambda f: (f / "manifest.json").write_text("[1]"),
    "manifest.json.format takes 1, not 2": lambda f: change(f / "manifest.json", format=2),
    "manifest.json lacks the field 'splits'": lambda f: change(f / "manifest.json", "splits"),
    "manifest.json has an unknown field 'x'": lambda f: change(f / "manifest.json", x=1),
    "manifest.json.mixture.code takes float, not 'x'": lambda f: change(f / "manifest.json", mixture={"code": "x"}),
    "manifest.json.splits lacks the field 'val'": lambda f: change(f / "manifest.json", splits={"train": {}}),
    "manifest.json was altered": lambda f: swap(f / "manifest.json", '"seed": 0', '"seed": 1'),
    "tokenizer.json is missing": lambda f: (f / "tokenizer.json").unlink(),
    "is not the one that the data was made with": lambda f: change(f / "tokenizer.json", n_vocab=300),
    "tokenizer.json lacks the field 'ranks'": lambda f: change(f / "tokenizer.json", "ranks"),
    "tokenizer.json.n_vocab takes int, not '257'": lambda f: change(f / "tokenizer.json", n_vocab="257"),
    "n_vocab takes int from 1 to 65536, not 65537": lambda f: change(f / "tokenizer.json", n_vocab=2**16 + 1),
    "normalize takes 'NFC'.*, not 'NFKC'": lambda f: change(f / "tokenizer.json", normalize="NFKC"),
    "two tokens have the same id": lambda f: change(f / "tokenizer.json", special={"<|endoftext|>": 7}),
    "it has no <.endoftext.>": lambda f: change(f / "tokenizer.json", special={"<|pad|>": 256}),
    "ids are not all in 0..255": lambda f: change(f / "tokenizer.json", n_vocab=256),
    "ranks are pairs of base64 text and an id": lambda f: change(f / "tokenizer.json", ranks=[["AA=="]]),
    "some bytes of UTF-8 have no token": lambda f: change(f / "tokenizer.json", ranks=[["AA==", 0]]),
    "is not a vocabulary: ": lambda f: change(f / "tokenizer.json", pattern="("),
    "tokenizer.json was altered": lambda f: swap(f / "tokenizer.json", '"name": "bytes"', '"name": "bytfs"'),
    "code.bin was altered": flip_a_token,
}


def test_damaged_folders_are_refused(data_dir, tmp_path):
    for i, (message, damage) in enumerate(DAMAGES.items()):
        folder = shutil.copytree(data_dir, tmp_path / str(i))
        damage(folder)
        with pytest.raises(UserError, match=message):
            Corpus(folder, 16)
    assert Corpus(folder, 16, verify=False).windows("train", "code")  # to find the last one takes reading everything


def test_an_id_outside_of_the_vocabulary_is_refused(data_dir, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    np.full(3000, 257, "<u2").tofile(folder / "val/code.bin")
    with pytest.raises(UserError, match="holds the token id 257, but the vocabulary has 257"):
        Corpus(folder, 16, verify=False).val_batch("code", 0, 1)


def test_a_domain_without_a_target_is_refused(tmp_path):
    """One validation token predicts nothing; two are enough."""
    for n in (2, 1):
        folder = make_data(tmp_path / str(n), {"a": 3000})
        os.truncate(folder / "val/a.bin", 2 * n)
        splits = json.loads((folder / "manifest.json").read_text())["splits"]
        splits["val"]["a"]["tokens"] = n
        change(folder / "manifest.json", splits=splits)
        if n == 2:
            assert Corpus(folder, 16, verify=False).val_batch("a", 0, 1)[1].shape == (1, 1)
    with pytest.raises(UserError, match="val data of domain 'a' in .* has 1 tokens, but needs 2"):
        Corpus(folder, 16, verify=False)


def test_impossible_settings_are_refused(data_dir):
    for block_size, mixture, message in (
        (25_000, None, "has 20000 tokens, but needs 25001"),
        (16, {"C4": 1.0}, "mixture names domain 'C4'"),
        (16, {"code": -1.0}, "at least 0"),
        (16, {"code": 0}, "a weight above 0"),
    ):
        with pytest.raises(UserError, match=message):
            Corpus(data_dir, block_size, mixture=mixture)


def test_a_missing_folder_is_made_or_replaced(tmp_path, monkeypatch):
    """The hint fits the folder asked for, and the folders that exist are listed."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path / "data/mine", {"a": 3000})
    (tmp_path / "data/unfinished").mkdir()
    for folder, hint in (("nowhere", "prepare.py"), ("data/slimpajama", "python prepare.py slimpajama")):
        with pytest.raises(UserError) as e:
            Corpus(folder, 16)
        there = "or use one that exists, with --data_dir=: data/mine"
        assert str(e.value) == f"no data folder {folder}; make it with `{hint}`, {there}"


def test_commands_for_missing_data_are_those_that_we_use():
    assert data._COMMANDS["data/demo"] + "\n" in (ROOT / "Makefile").read_text().replace("$(PY)", "python")
    for folder, command in data._COMMANDS.items():
        assert load_settings(prepare.PrepareConfig, command.split()[2:]).out_dir == folder


def test_tiny_domains_repeat_in_epochs(tmp_path):
    corpus = Corpus(make_data(tmp_path, {"a": 40, "b": 4000}, {"a": 0.5, "b": 0.5}), 16, seed=1)
    assert corpus.windows("train", "a") == 2
    windows = [w for d, w in map(corpus.place, range(64)) if d == "a"]
    assert all(sorted(windows[i : i + 2]) == [0, 1] for i in range(0, len(windows) - 1, 2))
