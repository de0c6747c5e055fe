"""docs/lecture.md's code prints what stands below it."""

import contextlib
import io
import re

import pytest
from conftest import ROOT

NUMBER = r"-?\d+\.\d+|\d+"


def blocks():
    """(code, what it prints) in order."""
    return re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", (ROOT / "docs/lecture.md").read_text(), re.S)


def numbers(text):
    return [float(x) for x in re.findall(NUMBER, text)]


@pytest.mark.slow
def test_each_block_prints_what_stands_below_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for code, said in blocks():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "lecture.md", "exec"), names)
        print(out.getvalue())  # shown if the test fails
        assert re.sub(NUMBER, "N", out.getvalue()) == re.sub(NUMBER, "N", said), code
        # its text is this repository's code, so losses drift as it changes
        printed, stored = (numbers(re.sub(r"\d+ s\b", "", text)) for text in (out.getvalue(), said))
        assert printed == pytest.approx(stored, rel=0.15, abs=0.06), code
