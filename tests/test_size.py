"""Nothing grows by itself: the size of each file and folder, and what README promises.

A change that grows a file edits this table, in a line of its own, with a reason in its commit. What shrinks a file
lowers its number.
"""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

BUDGETS = {  # lines
    "model.py": 446, "value_modes.py": 556, "train.py": 519, "prepare.py": 505, "eval.py": 294, "sample.py": 183,
    "analyze.py": 391, "plot.py": 418, "compare.py": 423, "export.py": 185, "configurator.py": 247, "minimal.py": 200,
    "net": 361, "hf": 490, "common": 3652, "paper": 1429, "bench": 679, "examples": 435, "docs": 61, "config": 47,
    "exercises": 455, "tests": 10478,
}  # fmt: skip
CODE = 11_976  # all of it but tests/: a file may grow by what another one lost
ROOT_FILES = {name for name in BUDGETS if name.endswith(".py")}


@functools.cache
def ours():
    """The Python files that git knows: a user's own mode is not ours. Without git, all that are there."""
    known = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, encoding="utf-8").stdout.split()
    there = map(Path, known) if known else [path for glob in ("*.py", "[!.]*/**/*.py") for path in ROOT.glob(glob)]
    return sorted(ROOT / name for name in there if (ROOT / name).exists())


def rows_of_a_user():
    """How many lines of value_modes.py are rows of TABLE without a source."""
    tree = ast.parse((ROOT / "value_modes.py").read_text(encoding="utf-8"))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "TABLE")
    rows = [(name, row) for name, row in zip(table.keys, table.values, strict=True) if not row.elts[-1].value]
    return sum(row.end_lineno - name.lineno + 1 for name, row in rows)


def lines(path):
    """How many lines a file or folder has. A user's own rows don't count."""
    files = [file for file in ours() if path in (file, *file.parents)]
    not_ours = rows_of_a_user() if ROOT / "value_modes.py" in files else 0
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) - not_ours


@pytest.mark.parametrize("name", BUDGETS)
def test_size(name):
    assert lines(ROOT / name) <= BUDGETS[name], f"{name} has grown: take something away, or edit the table"


def test_a_row_of_a_user_does_not_count(tmp_path, monkeypatch):
    text, n = (ROOT / "value_modes.py").read_text(encoding="utf-8"), lines(ROOT / "value_modes.py")
    row = 'TABLE = {\n    "a_users": (mode_with(source="prev"),\n        "an equation", ""),\n'
    (tmp_path / "value_modes.py").write_text(text.replace("TABLE = {\n", row), encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "ours", lambda: [tmp_path / "value_modes.py"])
    assert lines(tmp_path) == n


def test_all_of_it():
    assert sum(lines(ROOT / name) for name in BUDGETS if name != "tests") <= CODE


def test_the_table_has_every_file_and_folder():
    assert {path.name for path in ours() if path.parent == ROOT} == ROOT_FILES
    assert {path.relative_to(ROOT).parts[0] for path in ours() if path.parent != ROOT} == set(BUDGETS) - ROOT_FILES


@functools.cache
def imports_of(path):
    """The files of ours that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return {file for file in found if file.exists()}


def reached(path):
    """All files of ours that a file imports, directly or not."""
    found, new = set(), {path}
    while new:
        found |= new
        new = set().union(*map(imports_of, new)) - found
    return found - {path}


def test_what_readme_promises():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    heart, all_of_train = re.search(r"model.py have (\S+) lines. A training run imports (\S+) lines", text).groups()
    assert lines(ROOT / "model.py") + lines(ROOT / "value_modes.py") <= int(heart.replace(",", ""))
    files = {ROOT / "train.py", *reached(ROOT / "train.py")}
    assert sum(map(lines, files)) <= int(all_of_train.replace(",", ""))


ROOMS = ("", "common", "hf", "net")
FILES = [path for path in ours() if path.parent in [ROOT / room for room in ROOMS]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_imports_itself_through_others(path):
    assert not [file for file in imports_of(path) if path in reached(file)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_downwards(path):
    """Stages import all rooms, and no file a wing. Below them: common/ with hf/, model.py, value_modes.py, net/,
    configurator.py. hf/ knows common/; of common/ only checkpoint.py, which reads all kinds of models, knows hf/."""
    floors = {"configurator.py": 0, "net": 1, "value_modes.py": 2, "model.py": 3, "common": 4, "hf": 4}

    def floor(file):
        room = file.relative_to(ROOT).parts[0]
        assert file.parent == ROOT or room in ROOMS, f"{file} is a wing"
        return floors.get(room, 5)

    for file in imports_of(path):
        assert floor(file) <= floor(path), f"{file} is above {path}"
        assert floor(path) == 5 or file.parent != ROOT / "hf" or path.parent.name == "hf" or path.stem == "checkpoint"
