"""examples/rename.py: what counts as a name, what it becomes, and that nothing else changes."""

import ast
import json
import keyword
import random
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import InThisProcess, in_process, refused

import prepare
from common import texts
from common.data import load_manifest
from common.texts import Input
from common.tokenizer import Tokenizer
from examples import rename

SOURCE = '''import os.path as osp  # os stays here
class Duck(Bird):
    """Not a name."""
    def __init__(self, size: int, *args, **kw):
        super().__init__(size=size, wingspan=2 * size, *args)
        self.size = size; match = [size for size in args if size is not None]
    async def quack(cls, ü=1):
        print(f"{self.size:>{ü}} {'a' 'b'}", r"size", end="")
        match ü:
            case {"size": Duck(size=one)} | _:
                return lambda size: size @ ü
'''
NAMES = "os path osp Duck Bird size args kw size size wingspan size args size size size size args size quack ü end"
NAMES += " ü Duck size one size size ü"


def test_what_counts_as_a_name():
    pieces = rename.pieces_of(SOURCE)
    assert "".join(pieces) == SOURCE
    assert pieces[1::2] == NAMES.split()


@pytest.mark.parametrize("text", ["def f(:", "print 'a'", "x = '\0'", "(" * 1000])
def test_what_python_cannot_parse_is_left_out(text):
    assert rename.pieces_of(text) is None


HOWS, REUSED = ("own", "each", "same"), "--tokenizer_file=data/pysource"
PATHS = sorted(Path(tokenize.__file__).parent.glob("*.py"))[20:80:6]  # ten files of the standard library
CUT = [rename.pieces_of(path.read_text(encoding="utf-8")) for path in PATHS]
COUNTS = Counter(name for pieces in CUT for name in pieces[1::2])
RENAMED = rename.Names(COUNTS, {name: len(name) for name in COUNTS})  # characters stand for tokens


def renamed(draw, seed=0):
    """The new names of each file."""
    return [draw(random.Random(f"{seed}/{i}"), pieces[1::2]) for i, pieces in enumerate(CUT)]


def with_names(pieces, names):
    new = list(pieces)
    new[1::2] = names
    return "".join(new)


@pytest.mark.parametrize("draw", [RENAMED.draw_each, RENAMED.draw_same])
def test_the_text_still_parses_and_only_names_differ(draw):
    for pieces, names in zip(CUT, renamed(draw), strict=True):
        text = with_names(pieces, names)
        ast.parse(text)
        assert rename.pieces_of(text)[::2] == pieces[::2]
        assert [len(name) for name in names] == [len(name) for name in pieces[1::2]]


def test_each_draws_from_the_frequencies_of_the_corpus():
    """Of names of one length, by the normal error of a count."""
    new, of_length = Counter(), defaultdict(int)
    for names in renamed(RENAMED.draw_each):
        new.update(names)
    for name, n in COUNTS.items():
        of_length[len(name)] += n
    for name, n in COUNTS.most_common(200):
        share = n / of_length[len(name)]
        assert abs(new[name] - n) <= 5 * (n * (1 - share)) ** 0.5, name


def test_no_name_is_kept_more_often_than_chance_allows():
    """Its chance is its own frequency among the names of its length."""
    of_length = Counter()
    for name, n in COUNTS.items():
        of_length[len(name)] += n
    chances = [COUNTS[name] / of_length[len(name)] for pieces in CUT for name in pieces[1::2]]
    pairs = zip(CUT, renamed(RENAMED.draw_each), strict=True)
    kept = sum(old == new for pieces, names in pairs for old, new in zip(pieces[1::2], names, strict=True))
    variance = sum(p * (1 - p) for p in chances)
    assert abs(kept - sum(chances)) < 5 * variance**0.5


def test_same_is_one_to_one_in_a_file_and_another_name_in_the_next():
    several = defaultdict(set)
    for pieces, names in zip(CUT, renamed(RENAMED.draw_same), strict=True):
        pairs = set(zip(pieces[1::2], names, strict=True))
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
        for old, new in pairs:
            several[old].add(new)
    assert len(several["name"]) > 2


def test_every_name_of_a_length_may_be_taken():
    """Two names of one character, in one file: each becomes one of the two."""
    names = rename.Names(Counter("a" * 1000 + "b"), {"a": 1, "b": 1})
    assert sorted(names.draw_same(random.Random(0), ["a", "b", "a"])[:2]) == ["a", "b"]


def test_what_is_kept_is_the_same_in_every_python():
    assert {"None", "match", "type", "len", "self", "cls"} <= rename.KEPT
    assert not rename.KEPT & {"name", "PythonFinalizationError", "_IncompleteInputError", "np"}
    assert set(keyword.softkwlist) <= rename.KEPT and rename.is_kept("__dict__") and not rename.is_kept("__x")


def read(folder, how):
    """{file: its documents} of a text that rename.py wrote."""
    files = sorted((folder / how).rglob("*.jsonl"))
    lines = {file.relative_to(folder / how).as_posix(): file.read_text(encoding="utf-8").splitlines() for file in files}
    return {file: [json.loads(line)["text"] for line in of_file] for file, of_file in lines.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten files of the standard library as data/pysource, and what rename.py makes of it, as data again."""
    folder = tmp_path_factory.mktemp("rename")
    inputs = [Input(path.name, path.stat().st_size, "train", "stdlib", path) for path in PATHS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ProcessPoolExecutor", InThisProcess)
        patch.setattr(texts, "python_files", lambda packages: inputs)
        for module, *words in (
            (prepare, "pysource", "--tokenizer=bpe:600", "--val_fraction=0.1"),
            (rename, "data/pysource", "texts"),
            (rename, "data/pysource", "again"),
            (rename, "data/pysource", "other", "--seed=1"),
            *((prepare, "files", f"--input_dir=texts/{how}", f"--out_dir=data/{how}", REUSED) for how in HOWS),
        ):
            done = in_process(module, *words, cwd=folder)
            assert done.returncode == 0, done.stderr
    return folder


def test_the_three_texts_have_the_same_documents(folder):
    own, each, same = (read(folder / "texts", how) for how in HOWS)
    assert list(own) == ["stdlib/train.jsonl", "stdlib/val.jsonl"]
    for file, documents in own.items():
        for one, two, three in zip(documents, each[file], same[file], strict=True):
            assert len({one, two, three}) == 3
            assert rename.pieces_of(one)[::2] == rename.pieces_of(two)[::2] == rename.pieces_of(three)[::2]


def test_own_is_the_code_of_the_data(folder):
    tokenizer = Tokenizer.load(folder / "data/pysource/tokenizer.json")
    ids = np.fromfile(folder / "data/pysource/val/stdlib.bin", "<u2")
    wanted = tokenizer.decode(ids[ids != tokenizer.end])
    assert "".join(read(folder / "texts", "own")["stdlib/val.jsonl"]) == wanted


def test_a_seed_decides(folder):
    assert read(folder / "texts", "each") == read(folder / "again", "each") != read(folder / "other", "each")
    assert read(folder / "texts", "same") == read(folder / "again", "same") != read(folder / "other", "same")


def test_the_data_have_the_same_tokenizer_documents_and_nearly_as_many_tokens(folder):
    own, each, same = (load_manifest(folder / "data" / how)["splits"]["train"]["stdlib"] for how in HOWS)
    assert own["documents"] == each["documents"] == same["documents"] == 9
    assert abs(each["tokens"] / own["tokens"] - 1) < 0.03 and abs(same["tokens"] / own["tokens"] - 1) < 0.1
    assert load_manifest(folder / "data/each")["tokenizer"] == load_manifest(folder / "data/pysource")["tokenizer"]


def test_bad_input(folder):
    for words, says in (
        (["data"], "name the data and a new folder"),
        (["data/own", "new"], "data/own is not data of `prepare.py pysource`, so there are no names to replace"),
        (["data/pysource", "texts"], "texts exists; name a new folder"),
        (["none", "new"], "there is no prepared data in none"),
    ):
        refused(in_process(rename, *words, cwd=folder), says)
    assert not (folder / "new").exists()
