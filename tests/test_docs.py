"""README.md and docs/ tell the truth: commands parse, files and links exist, tables are those of the results."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import textwrap
import typing

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from common.sizes import PlanConfig
from configurator import UserError, load_settings
from docs import tables
from value_modes import TABLE

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results/README.md"]
LIMITS = {"README.md": 160, "docs/stages.md": 310}  # lines; other pages have 260
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
SCRIPTS = "model train prepare sample eval analyze plot".split()
WINGS = ["paper.reproduce", "bench.training", "bench.decoding", "examples.novels", "examples.rename", "examples.vit"]
NOT_OURS = {"docs.tables", "minimal", "venv", "pip", "pytest"}  # minimal.py has argparse alone
MISTAKES = {"python train.py --max_iters=5"}  # which a page makes on purpose


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    """Pages name files from there, wherever pytest was started."""
    monkeypatch.chdir(ROOT)


def commands():
    """[(page, command)]: lines of code blocks that start one of our scripts, and commands within sentences."""
    found = []
    for page, text in TEXTS.items():
        for _, block in BLOCK.findall(text):
            for line in block.splitlines():
                if line.startswith(("python ", "torchrun ")):
                    found.append((page, line.split("  #")[0].strip()))
        for command in re.findall(r"`(python [^`]+)`", BLOCK.sub("", text)):
            found.append((page, " ".join(command.split())))
    return found


def check(command):
    """The module that a command starts, which takes its words. None if it is not ours."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    if words[at] == "-m":
        at += 1
    module, words = words[at].removesuffix(".py").replace("/", "."), words[at + 1 :]
    if module in NOT_OURS:
        return None
    settings = PlanConfig if module == "model" else typing.get_type_hints(importlib.import_module(module).main)["cfg"]
    if words not in ([], ["--help"]):  # without words, a sentence names the script
        load_settings(settings, words, skip_unknown=module == "model")
    return module


def test_commands_parse(monkeypatch, tmp_path):
    for folder in ("config", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    mine = [block for _, block in BLOCK.findall(TEXTS["README.md"]) if block.startswith("from value_modes import")]
    (tmp_path / "mine.py").write_text(mine[0])
    monkeypatch.chdir(tmp_path)
    started = set()
    for page, command in commands():
        try:
            started.add(check(command))
        except (UserError, ImportError) as e:
            assert command in MISTAKES, f"{page}: {command}: {e}"
    assert started >= {*SCRIPTS, *WINGS}, "some script is in no page"


def commands_of(script, folder, *words):
    """What a script of runs/ starts when it is called in another folder, as a page would have it. Nothing runs: the
    Python that it gets prints its words, and quotes them."""
    python = folder / "python"
    python.write_text("#!/bin/bash\nprintf '%q ' python \"$@\"\necho\n")
    python.chmod(0o755)
    result = subprocess.run(
        ["bash", ROOT / "runs" / script, *words], cwd=folder, env={**os.environ, "PY": str(python), "GPUS": "8"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    launcher = "-m torch.distributed.run --standalone --nproc_per_node=8 "
    return [line.strip().replace(launcher, "") for line in result.stdout.splitlines()]


@pytest.mark.parametrize("script, word", [("demo.sh", "all"), ("paper_82m.sh", "")])
def test_a_script_tells_the_whole_story(script, word, tmp_path):
    """Its commands parse, and start every stage."""
    started = [check(command) for command in commands_of(script, tmp_path, word)]
    assert {*started} - {"train", "compare"} == {"prepare", "eval", "sample", "analyze", "plot", "export"}
    assert ("compare" if script == "demo.sh" else "train") in started


def test_the_miniseries_compares_at_each_depth(tmp_path):
    """Width follows depth, and rates fall as it grows."""
    prepare, *comparisons = commands_of("miniseries.sh", tmp_path, "--max_steps=9")
    assert check(prepare) == "prepare" and [check(command) for command in comparisons] == ["compare"] * 4
    words = shlex.split(comparisons[-1])
    assert {"--n_layer=12", "--n_embd=192", "--n_head=6", "--rates=0.001,0.002,0.004"} < {*words}
    assert all(command.endswith("--max_steps=9") for command in comparisons)


def test_make_demo_is_what_readme_says(tmp_path):
    recipe = re.search(r"^demo: .*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]
    assert recipe == "PY=$(PY) bash runs/demo.sh"
    commands = commands_of("demo.sh", tmp_path)
    assert [check(command) for command in commands] == ["prepare", "compare", "sample"]
    assert f"`{commands[1]}`" in " ".join(TEXTS["README.md"].split())


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page, text in TEXTS.items():
        for target in re.findall(r"(?:`|^)make ([\w-]+)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page}: make {target}"


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_files_exist():
    for page in PAGES:
        text = BLOCK.sub("", TEXTS[page.relative_to(ROOT).as_posix()])
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page.name}: {target}"
        for name in re.findall(r"`((?:bench|config|docs|examples|paper|results|tests)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    for _, command in commands():
        for name in re.findall(r"config/\w+\.py", command):
            assert (ROOT / name).exists(), command


def test_pages_are_short_and_their_python_is_python():
    for page, text in TEXTS.items():
        assert len(text.splitlines()) <= LIMITS.get(page, 260), page
        for language, block in BLOCK.findall(text):
            if language == "python":
                assert ast.parse(textwrap.dedent(block)), page


# ---- tables


def test_the_tables_of_modes_are_current():
    """And a wrong number is put right."""
    right = TEXTS["docs/modes.md"]
    assert tables.with_tables(right) == right, "run `python -m docs.tables`"
    assert tables.with_tables(right.replace("|+14|", "|+15|")) == right != right.replace("|+14|", "|+15|")
    assert right.count("\n|`") == len(TABLE)


def test_pages_count_the_modes():
    """Those with a source: a row of a user's own has none."""
    n = sum(bool(source) for _, _, source in TABLE.values())
    assert f"with {n} variants behind one setting" in TEXTS["README.md"]
    assert f"has these five modes and {n - 5} more in one table" in TEXTS["docs/lecture.md"]


@pytest.mark.parametrize("name", tables.PICTURES)
def test_pictures_are_current(name, tmp_path):
    """Each is in a page, is small, and shows what `python -m docs.tables` would draw now."""
    path = ROOT / f"docs/pictures/{name}.png"
    assert any(f"pictures/{name}.png)" in text for text in TEXTS.values()) and path.stat().st_size < 120_000
    tables.draw_picture(name, tmp_path / "now.png")
    then, now = (np.asarray(Image.open(file).convert("L"), int) for file in (path, tmp_path / "now.png"))
    assert then.shape == now.shape and (abs(then - now) > 100).sum() < 50, "run `python -m docs.tables`"
