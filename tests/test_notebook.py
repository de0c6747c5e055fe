"""value_residual.ipynb shows what it computes. `make notebook` runs it again and stores what comes out."""

import re
import shutil
import subprocess

import nbclient
import nbformat
import pytest
from conftest import ROOT
from test_docs import anchors

NAME = "value_residual.ipynb"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
STORED = nbformat.read(ROOT / NAME, as_version=4)
CODE = [cell for cell in STORED.cells if cell.cell_type == "code"]
WORDS = "\n\n".join(cell.source for cell in STORED.cells if cell.cell_type == "markdown")


@pytest.fixture(autouse=True)
def nobodys_settings(tmp_path, monkeypatch):
    """The kernel reads no settings of whoever runs the tests."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # where a kernel of theirs may be called python3


def execute(cells, folder):
    """The cells again, with what they put out in a fresh kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.source) for cell in cells])
    how = {"kernel_name": "python3", "timeout": 800, "coalesce_streams": True}
    return nbclient.execute(notebook, cwd=str(folder), **how).cells


def printed(cell):
    """What a cell prints. What it samples is its value, which another text or processor changes."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]


# ---- as it is stored


def test_every_cell_ran_once_in_order():
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))
    assert all(cell.outputs for cell in CODE)


def test_nothing_in_it_changes_with_each_run():
    assert set(STORED.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in STORED.cells)


def test_it_has_no_path_of_a_machine_and_is_small():
    text = (ROOT / NAME).read_text(encoding="utf-8")
    without_images = re.sub(r'"image/png": "[^"]*"', "", text).replace("\\n", " ")
    assert re.findall(r"[\"' (=]/\w+/|\b[A-Z]:\\\\", without_images) == []
    assert len(text) < 500_000 and len(WORDS.split()) <= 600


def test_its_links_exist():
    for file, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", WORDS):
        assert (ROOT / file).exists(), file
        assert not anchor or anchor in anchors((ROOT / file).read_text(encoding="utf-8")), anchor


def test_its_findings_are_those_of_the_results_page():
    found, page = (text.replace("−", "-") for text in (WORDS, (ROOT / "results/README.md").read_text(encoding="utf-8")))
    numbers = re.findall(r"[-+]0\.\d+", found)
    assert len(numbers) == 2 and all(number in page for number in numbers)


# ---- as it runs


@pytest.mark.slow
def test_a_run_prints_and_draws_what_is_stored(tmp_path):
    for path in (*ROOT.glob("*.py"), ROOT / "results/night/runs.jsonl"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for stored, cell in zip(CODE, execute(CODE, tmp_path), strict=True):
        kinds, wanted = ([(out.output_type, sorted(out.get("data", {}))) for out in c.outputs] for c in (cell, stored))
        assert kinds == wanted, cell.source
        assert re.sub(NUMBER, "N", printed(cell)) == re.sub(NUMBER, "N", printed(stored)), cell.source
        # its text is this repository's code, so losses drift as it changes
        assert numbers(printed(cell)) == pytest.approx(numbers(printed(stored)), rel=0.15, abs=0.02), cell.source


def test_alone_it_asks_for_the_repository(tmp_path):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="set address to the repository's"):
        execute(CODE[:1], tmp_path)


@pytest.mark.slow
def test_alone_it_clones_the_repository(tmp_path):
    source, cloud = tmp_path / "source", tmp_path / "cloud"
    cloud.mkdir()
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    shutil.copy(ROOT / "minimal.py", source)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    first = nbformat.v4.new_code_cell(CODE[0].source.replace('address = ""', f'address = "file://{source}"'))
    look = nbformat.v4.new_code_cell("import minimal\nprint(minimal.__file__)")
    # a second time it is there, also after the kernel has started anew
    for _ in range(2):
        assert printed(execute([first, look], cloud)[1]).strip() == str(cloud / "nanoresformer/minimal.py")
