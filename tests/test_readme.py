"""The README tells the truth: its commands parse, its files exist, its table of modes is what the plan gives."""

import importlib
import json
import re
import shlex
import statistics

import pytest
from conftest import ROOT, script

import bench
from configurator import load_settings
from tasks import TABLE1
from value_modes import TABLE

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```[a-z]*\n(.*?)```", README, re.S)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if ".py " in line]
COMMANDS += re.findall(r"`(python \w+\.py [^`]+)`", README)
STAGES = {
    "train.py": ("TrainConfig", None),
    "prepare.py": ("PrepareConfig", "source"),
    "sample.py": ("SampleConfig", "run"),
    "plot.py": ("PlotConfig", "words"),
    "eval.py": ("EvalConfig", "runs"),
    "analyze.py": ("AnalyzeConfig", "runs"),
    "bench.py": ("BenchConfig", "words"),
    "model.py": ("ModelConfig", None),
}


MINE = next(block for block in BLOCKS if block.startswith("from model import Residual"))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, monkeypatch, tmp_path):
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word in STAGES)
    cls, positional = STAGES[words[script]]
    module = importlib.import_module(words[script].removesuffix(".py"))
    given = [word for word in words[script + 1 :] if (words[script], word) != ("model.py", "table")]
    load_settings(getattr(module, cls), given)


def test_there_are_commands_of_every_stage():
    assert {stage for stage in STAGES if any(stage in command for command in COMMANDS)} >= STAGES.keys() - {"model.py"}


def test_mode_table_is_current():
    own = [f"| `{name}` |" for name, (_, _, source) in TABLE.items() if not source]  # a user's rows need not be in it
    lines = script("model.py", "table").stdout.splitlines()
    table = "\n".join(line for line in lines if not line.startswith(tuple(own)))
    assert len(lines) == len(TABLE) + 2 and table in README, (
        "paste the output of `python model.py table` into the README"
    )


@pytest.mark.parametrize("file", ["x1_tiny", "x2_82m", "x1_modes"])
def test_tables_of_speed_are_the_results(file):
    rows = json.loads((ROOT / f"results/bench_train_intel_xeon_{file}.json").read_text(encoding="utf-8"))["rows"]
    assert "\n".join(bench.training_table(rows)) in README


def test_table_of_decoding_is_the_results():
    lines = []
    for file in ("x2_82m", "x1_tiny"):
        rows = json.loads((ROOT / f"results/bench_decode_intel_xeon_{file}.json").read_text(encoding="utf-8"))["rows"]
        for row in (row for row in rows if row["name"] == "vanilla"):
            how = f"{row['dtype']}, {row['batch']}" + ", `--compile`" * (row["compile"] == "on")
            cells = [row["shape"], how, f"{row['tokens_per_s']:,.0f}"]
            cells += [bench.spread(row[f"to {bench.LLAMA}, {kind}"]["decode"]) for kind in ("dynamic", "static")]
            lines.append("| " + " | ".join(cells) + " |")
    assert "\n".join(lines) in README


def test_printed_plan_is_current():
    block = next(block for block in BLOCKS if block.startswith("svformer: "))
    printed = script("model.py", "--value_mode=svformer", "--n_layer=4").stdout
    assert block.splitlines() == [line.rstrip() for line in printed.splitlines()]


def test_file_map_is_complete():
    """Each file at the top is in the map, with its number of lines, give or take a tenth."""
    for path in ROOT.glob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        said = re.search(rf"\| `{path.name}` \| (\d+) \|", README)
        assert said and abs(int(said[1]) / lines - 1) < 0.1, (path.name, lines)


def test_links_and_files_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"config/\w+\.py", README):
        assert (ROOT / name).exists(), name


def test_evaluation_tables_are_the_results():
    found = json.loads((ROOT / "results" / "eval_demo.json").read_text())
    for mode, evaluation in found.items():
        results = evaluation["checkpoints"]["step_00000600.safetensors"]["results"]
        tasks = [f"{results[t]['acc']:.4f} ± {results[t]['acc_stderr']:.4f}" for t in TABLE1]
        assert f"| {mode} | {' | '.join(tasks)} | " in README
        losses = [*results["loss"]["val"].values(), results["loss"]["val_mean"], results["loss"]["val_mixture"]]
        assert f"| {mode} | {' | '.join(f'{x:.4f}' for x in losses)} |" in README


def test_ratios_of_the_evaluation_are_the_results():
    rows = [json.loads(path.read_text())["tasks"] for path in sorted((ROOT / "results").glob("bench_eval_*"))]
    assert len(rows) == 2
    for of in zip(*rows, strict=True):
        cells = [f"| {of[0]['task']} "]
        for row in of:
            rate = row["documents"] / statistics.median(row["seconds"]["eval.py"])
            ratios = [row[key] for key in ("to_batch_1", "to_best")]
            cells += [f"| {rate:,.0f} "]
            cells += [f"| {r['ratio']:.1f} × ({r['least']:.1f}–{r['greatest']:.1f}) " for r in ratios]
        assert "".join(cells) + "|" in README
