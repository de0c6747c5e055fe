"""README.md and docs/ tell the truth: commands parse, files and links exist, tables are those of the results."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import typing

import pytest
from conftest import ROOT, finished, in_process

from common.report import mean_std, with_interval
from configurator import UserError, load_settings
from docs import tables
from paper.found import read_kept
from value_modes import TABLE, ModelConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results/README.md"]
LIMITS = {"README.md": 150}  # lines; other pages have 250
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
SCRIPTS = "model train prepare sample eval analyze plot".split()
WINGS = ["paper.reproduce", "bench.training", "bench.decoding", "examples.vit"]
NOT_OURS = {"venv", "pip", "pytest"}
MISTAKES = {"python train.py --max_iters=5"}  # which a page makes on purpose


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


def split_command(command):
    """(module, its words) of a command; the module is None if it is not ours."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word == "-m":
            return None if words[i + 1] in NOT_OURS else words[i + 1], words[i + 2 :]
        if word.endswith(".py"):
            return word.removesuffix(".py").replace("/", "."), words[i + 1 :]
    raise AssertionError(f"{command} starts no script")


def check_command(module, words):
    """Raise UserError if a module of ours does not take these words."""
    if module == "model":
        words = [word.replace("resformer_linear", "resformer") for word in words]  # the patch of the last test adds it
        given = [word for word in words if word != "table"]
        settings = ModelConfig
        load_settings(settings, given, skip_unknown=True)
        return
    settings = typing.get_type_hints(importlib.import_module(module).main)["cfg"]
    load_settings(settings, words)


def test_commands_parse(monkeypatch, tmp_path):
    for folder in ("config", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    mine = [block for _, block in BLOCK.findall(TEXTS["README.md"]) if block.startswith("from value_modes import")]
    (tmp_path / "mine.py").write_text(mine[0])
    monkeypatch.chdir(tmp_path)
    started = set()
    for page, command in commands():
        module, words = split_command(command)
        if module is None:
            continue
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{page}: {command}: no such script"
        started.add(module)
        if words in ([], ["--help"]) or command in MISTAKES:
            continue  # without words, a sentence names the script
        try:
            check_command(module, words)
        except UserError as e:
            pytest.fail(f"{page}: {command}: {e}")
    assert started >= {*SCRIPTS, *WINGS}, "some script is in no page"


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


def test_pages():
    """They are short, and their Python blocks are Python."""
    for page, text in TEXTS.items():
        assert len(text.splitlines()) <= LIMITS.get(page, 250), page
        for language, block in BLOCK.findall(text):
            if language == "python":
                assert ast.parse(textwrap.dedent(block)), page


# ---- tables


def test_tables_are_current():
    result = finished([sys.executable, "-m", "docs.tables", "--check"], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert TEXTS["docs/modes.md"].count("\n|`") == len(TABLE)
    used = [name for text in TEXTS.values() for _, name, _ in tables.PLACE.findall(text)]
    assert sorted(used) == sorted(tables.MAKERS)  # each in one page


def test_a_wrong_number_is_found_and_put_right(monkeypatch, tmp_path):
    page = tmp_path / "docs" / "modes.md"
    page.parent.mkdir()
    wrong = TEXTS["docs/modes.md"].replace("|+14|", "|+15|")
    page.write_text(wrong, encoding="utf-8")
    records = tmp_path / "results/night/runs.jsonl"
    records.parent.mkdir(parents=True)
    shutil.copy(ROOT / "results/night/runs.jsonl", records)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    result = in_process(tables, "--check")  # sys.exit with a text: exit code 1
    assert result.returncode.startswith("docs/modes.md differ") and page.read_text(encoding="utf-8") == wrong
    assert in_process(tables).returncode == 0 and page.read_text(encoding="utf-8") == TEXTS["docs/modes.md"] != wrong


# ---- the example of a variant that the axes do not have


OWN_MODE = """
import torch
from conftest import config, tiny, tokens
from model import GPT


def test_resformer_linear_starts_as_vanilla():
    assert torch.equal(GPT(config("resformer_linear"))(tokens((2, 12)))[0], GPT(config())(tokens((2, 12)))[0])


def test_resformer_linear_equals_its_equation():
    model, values = tiny("resformer_linear", n_kv_head=4), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda attn, args, out: values.append((out[1]["v"], out[2]["v"])))
    model(tokens((2, 12)))
    v_1, v_n, used = values[0][0], *values[2]
    maps = model.blocks[2].attn.maps["0"].weight.split(4)  # a 4 x 4 matrix for each of 4 value heads
    for head, matrix in enumerate(maps):
        right = v_n[:, head] + torch.einsum("ij,btj->bti", matrix, v_1[:, head])
        torch.testing.assert_close(used[:, head], right)
"""


@pytest.mark.skipif("resformer_linear" in TABLE, reason="the patch is applied here")
def test_the_patch_makes_a_mode(tmp_path):
    """Its plan is the page's, its mode is what the page says, and the generated tests of the new row pass."""
    blocks = BLOCK.findall(TEXTS["docs/own_mode.md"])
    patch = next(block for language, block in blocks if language == "diff")
    plan = next(block for _, block in blocks if block.startswith("resformer_linear: "))
    (tmp_path / "tests").mkdir()
    (tmp_path / "common").mkdir()
    for path in (
        *ROOT.glob("*.py"),
        *ROOT.glob("common/*.py"),
        ROOT / "tests/conftest.py",
        ROOT / "tests/test_modes.py",
    ):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "tests/test_own.py").write_text(OWN_MODE)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, text=True, check=True)
    words = [sys.executable, "model.py", "--value_mode=resformer_linear", "--n_layer=4"]
    result = finished(words, cwd=tmp_path)
    assert result.stdout.startswith(plan), result.stderr
    words = [sys.executable, "-m", "pytest", "tests", "-q", "-k", "resformer_linear and not compiles"]
    result = finished(words, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert result.returncode == 0 and passed > 12, result.stdout


SEED_1 = {"vanilla": "82M-2048-vanilla-lr0.0003-1", "svformer": "82M-2048-svformer-1"}


def test_numbers_of_the_results_page():
    """Every number of three or more decimals in its sentences is the final loss of a run, or one of its tables or a
    claim's or the paper's, rounded; with its sign, where it has one. Pairs of a mean and its interval are a claim's or
    a table's."""
    page, pattern = TEXTS["results/README.md"].replace("−", "-"), r"(?<!\w)[+-]?\d+\.\d{3,}"
    figures = json.loads((ROOT / "results/night.json").read_text())["figures"]
    record, rows = figures["rates"], [row for figure in figures.values() for row in figure["rows"]]
    cells = [cell for figure in figures.values() for row in figure.get("table", []) for cell in row]
    tabled = [*cells, *(place[0] for place in tables.PLACE.finditer(page))]
    known = [float(n) for text in tabled for n in re.findall(pattern, text)]
    kept = read_kept(ROOT / "results/night/runs.jsonl")
    repeats = read_kept(ROOT / "results/night/repeats.jsonl")  # on another processor
    losses = {f"{list(run['val'].values())[-1]:.4f}" for run in (*kept.values(), *repeats.values())}
    for name, run in repeats.items():
        assert run["settings"] == kept[name]["settings"] and run["processor"] != kept[name]["processor"]
        both = [f"{list(of['val'].values())[-1]:.4f}" for of in (run, kept[name])]
        assert all(loss in page for loss in both), name
    known += [*(row[key] or 0 for row in rows for key in ("mean", "interval"))]
    known += [float(n) for row in rows for n in re.findall(pattern, row["paper"])]
    numbers = re.findall(pattern, tables.PLACE.sub("", page))
    assert len(numbers) > 10
    for number in numbers:
        digits = len(number.partition(".")[2])
        signed = {f"{x:+.{digits}f}" for x in known}
        signs = number[0] if number[0] in "+-" else "+-"
        assert number in losses or signed & {sign + number.lstrip("+-") for sign in signs}, number
    noted = [name for name in record["runs"] if not kept[name]["losses"]]
    text = " ".join(page.split())
    assert f"make {len(record['runs'])} runs" in text and f"Of {len(noted)} runs with seed 42 only" in text
    drawn = {name for figure in figures.values() for name in figure["runs"]}
    timed = [kept[name]["seconds"] for name in drawn if kept[name]["seconds"]]
    assert f"the other figures add {len(drawn) - len(record['runs'])}," in text
    assert f"and {len(kept) - len(drawn)} more are in the records alone" in text
    assert f"Of the {len(drawn)} runs in figures the {len(timed)} whose time was kept took" in text
    assert f"took {sum(timed) / 3600:.0f} hours" in text
    cache = {mode: kept[name]["start"]["kv_bytes_per_token"] for mode, name in SEED_1.items()}
    assert f"{100 * cache['svformer'] / cache['vanilla']:.0f} % of the cache" in text
    intervals = {with_interval(abs(row["mean"]), row["interval"]) for row in rows if row["interval"]}
    pair = r"\d+\.\d+ ± \d+\.\d+"
    for text in tabled:
        intervals.update(re.findall(pair, text))
    pairs = re.findall(pair, tables.PLACE.sub("", page))
    assert len(pairs) > 2 and set(pairs) <= intervals
    best = [row for row in record["rows"] if row["what"].endswith("1.95M parameters, each at its best rate")]
    assert len(best) == 6
    for row in best:  # without the seed that the rate was chosen by
        two = sum(row["values"][1:]) / 2
        assert abs(two - row["mean"]) < 0.01 and two * row["mean"] > 0, row["what"]
    for row in best:  # README's
        if row["what"].startswith(("ResFormer −", "ResFormer, λ = 2 −")):
            assert with_interval(abs(row["mean"]), row["interval"]) in TEXTS["README.md"], row["what"]


def test_the_demos_numbers_are_the_committed_runs():
    """README's sentence on three seeds follows from the losses in results/demo.json."""
    losses = json.loads((ROOT / "results/demo.json").read_text())["val_mean"]
    for mode in ("resformer_lambda", "svformer"):
        mean, std = mean_std([losses["vanilla"][seed] - losses[mode][seed] for seed in ("42", "1", "2")])
        assert f"{mean:.3f} ± {std:.3f}" in TEXTS["README.md"], mode
