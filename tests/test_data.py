"""The order of the data: a pure function of (seed, step), without repeats, whoever asks; damaged folders are found."""

import json
import shutil

import numpy as np
import pytest
from conftest import make_data

import data
import files
from configurator import UserError
from data import Corpus


def test_batch_is_a_function_of_seed_and_step(data_dir):
    a, b = Corpus(data_dir, 16, seed=1), Corpus(data_dir, 16, seed=1)
    later = a.batch(70, 8)  # b gets there step by step, a at once
    for step in range(71):
        last = b.batch(step, 8)
    for x, y in zip(later, last, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(later[0], Corpus(data_dir, 16, seed=2).batch(70, 8)[0])
    np.testing.assert_array_equal(later[0][:, 1:], later[1][:, :-1])


@pytest.mark.parametrize("cuts", [[0, 8], [0, 4, 8], [0, 1, 3, 8]])
def test_ranks_and_micro_batches_cut_one_batch(data_dir, cuts):
    corpus = Corpus(data_dir, 16, seed=1)
    parts = [Corpus(data_dir, 16, seed=1).batch(5, 8, a, b)[0] for a, b in zip(cuts, cuts[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate(parts), corpus.batch(5, 8)[0])


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


def test_windows_hold_every_target_once(data_dir):
    corpus = Corpus(data_dir, 16)
    text = np.fromfile(data_dir / "val" / "code.bin", "<u2")
    x, y = corpus.val_batch("code", 0, corpus.windows("val", "code"))
    np.testing.assert_array_equal(y.ravel(), text[1 : 1 + y.size])
    np.testing.assert_array_equal(x.ravel(), text[: x.size])


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
    assert data.raw_bits(42, "domain", n=2).tolist() == PHILOX
    assert data.raw_bits(42, "domain", start=4, n=2).tolist() == data.raw_bits(42, "domain", n=6)[4:].tolist()


PHILOX = [9947686430430168814, 10594182583085350699]


def damaged(data_dir, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(data_dir, folder)
    damage(folder)
    with pytest.raises(UserError) as e:
        Corpus(folder, 16)
    return str(e.value)


def edit(name, **changes):
    def change(folder):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(value | changes))

    return change


def flip_a_token(folder):
    ids = np.fromfile(folder / "train/code.bin", "<u2")
    ids[1234] ^= 1
    ids.tofile(folder / "train/code.bin")


@pytest.mark.parametrize(
    "damage,says",
    [
        (lambda f: (f / "train/code.bin").write_bytes((f / "train/code.bin").read_bytes()[:-2]), "was truncated"),
        (lambda f: (f / "train/code.bin").write_bytes((f / "train/code.bin").read_bytes() + b"ab"), "was changed"),
        (lambda f: (f / "val/prose.bin").unlink(), "is missing"),
        (flip_a_token, "was altered"),
        (lambda f: (f / "manifest.json").unlink(), "has not finished"),
        (lambda f: (f / "manifest.json").write_text("{"), "is not a manifest"),
        (edit("manifest.json", splits={"train": {"x": {}}}), "is not a manifest"),
        (lambda f: (f / "tokenizer.json").unlink(), "is missing"),
        (edit("tokenizer.json", n_vocab=300), "is not the tokenizer the data was made with"),
        (edit("tokenizer.json", ranks=3), "is not a vocabulary"),
    ],
)
def test_damaged_folders_are_refused(data_dir, tmp_path, damage, says):
    assert says in damaged(data_dir, tmp_path, damage)


def test_verify_can_be_left_out(data_dir, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(data_dir, folder)
    flip_a_token(folder)
    assert Corpus(folder, 16, verify=False).windows("train", "code")


@pytest.mark.parametrize(
    "kw,says",
    [
        (dict(block_size=5000), "less than one window"),
        (dict(block_size=16, mixture={"C4": 1.0}), "mixture names domain 'C4'"),
        (dict(block_size=16, mixture={"code": -1.0}), "at least 0"),
    ],
)
def test_impossible_settings_are_refused(data_dir, kw, says):
    with pytest.raises(UserError, match=says):
        Corpus(data_dir, **kw)


def test_no_folder():
    with pytest.raises(UserError, match="prepare.py pysource --out_dir=nowhere"):
        Corpus("nowhere", 16)


def test_write_atomic_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})

    def half(temporary):
        with open(temporary, "w") as f:
            f.write("half")
        raise OSError("disk")

    with pytest.raises(OSError):
        files.write_atomic(path, half)
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_tiny_domains_repeat_in_epochs(tmp_path):
    corpus = Corpus(make_data(tmp_path, {"a": 40, "b": 4000}, {"a": 0.5, "b": 0.5}), 16, seed=1)
    assert corpus.windows("train", "a") == 2
    windows = [w for d, w in map(corpus.place, range(64)) if d == "a"]
    assert all(sorted(windows[i : i + 2]) == [0, 1] for i in range(0, len(windows) - 1, 2))
