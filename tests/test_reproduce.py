"""The command paper.reproduce: plans, runs that are small but real, records, and what it says of bad input."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, finished, in_process, refused
from test_paper import SIX, Fake
from test_plot import make_run
from test_scales import N, asked, jobs_at

import plot
import prepare
from analyze import AnalyzeConfig
from eval import EvalConfig
from oldconfig import UserError, load_settings
from paper import claims, figures, panels, reproduce, tables
from paper import found as found_runs
from paper import results as results_page
from paper.claims import claim_cells
from paper.figures import FIGURES, Figure, Panel
from paper.found import Found
from paper.runs import SCALES, Job, train_settings, units_in_words
from runtime import processor_name
from train import TrainConfig

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def command(*words):
    """`python -m paper.reproduce …` in this process."""
    return in_process(reproduce, *words)


# ---- plans


def table_of(text):
    """{run: cells} of the plan that is printed."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if re.match(r"\d+M-", row[0])}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """What --dry_run prints at each scale; in an empty folder."""
    said, folder = {}, tmp_path_factory.mktemp("empty")
    for scale in SCALES:
        result = in_process(reproduce, "all", f"--scale={scale}", "--dry_run", cwd=folder)
        assert result.returncode == 0, result.stderr
        said[scale] = result.stdout
    assert not list(folder.iterdir())  # nothing is written
    return said


@pytest.mark.parametrize("scale", SCALES)
def test_dry_run_prints_the_commands(scale, planned):
    """Each is one that its script takes, and makes exactly the run that paper.reproduce would."""
    text, cfg = planned[scale], asked("all", f"--scale={scale}")
    plans = {str(plan.folder): plan for plan in reproduce.make_plans(cfg, {})}
    assert list(plans) == [f"out/{scale}/{job.name}-{seed}" for job in jobs_at(scale) for seed in cfg.seeds_of(job)]
    assert cfg.units.prepare in text.splitlines()
    start = "torchrun --nproc_per_node=8 train.py" if scale == "paper" else "python train.py"
    trained, analysed, scored = set(), set(), set()
    for line in text.splitlines():
        command, _, words = line.partition(".py ")
        if command.endswith((" train", " analyze", " eval")):  # even where a GPU would be picked
            assert ("--device=cpu" in words) == (cfg.units.gpus == 0), line
        if command + ".py" == start:
            given = load_settings(TrainConfig, shlex.split(words))
            assert given == TrainConfig(**plans[given.out_dir].values, resume="auto")
            trained.add(given.out_dir)
        elif command == "python analyze":
            given = load_settings(AnalyzeConfig, shlex.split(words))
            assert given.data_dir == cfg.units.data_dir and given.chunks == (cfg.units.chunks if given.runs else 16)
            analysed |= set(given.runs)
        elif command == "python eval":
            scored |= set(load_settings(EvalConfig, shlex.split(words)).runs)
    assert trained == plans.keys()
    every = cfg.figures.values()
    needed = {cfg.units.here(job).name for of in every for job in of.analysed}
    assert analysed == {name for name in plans if Path(name).name.rpartition("-")[0] in needed}
    wanted = {f"{cfg.units.here(job).name}-42" for of in every if of.scored for job in of.runs}
    assert {Path(name).name for name in scored} == wanted


@pytest.mark.parametrize("scale, hours", [("paper", 3312.2), ("small", 82.8)])
def test_sums_of_the_plan(scale, hours, planned):
    """GPU-hours by FLOPs at 40 % of an A100: those of the frozen plan. Of a 468M run the last checkpoint and the best
    stay on disk."""
    table, last = table_of(planned[scale]), planned[scale].splitlines()[-1]
    assert len(table) == 64 and last.startswith("64 runs, 0 of them done; training takes ")
    total = float(re.search(r"([\d,.]+) GPU-hours", last)[1].replace(",", ""))
    assert total == pytest.approx(sum(float(row[-1].replace(",", "")) for row in table.values()), abs=0.5)
    assert total == pytest.approx(hours, abs=0.06)
    state, size, tokens, disk, cost = table["82M-2048-vanilla-42"]
    n_tokens = SCALES[scale].steps * 2048 * SCALES[scale].lengths[2048][1]
    assert (state, size, tokens) == ("to do", f"{N['82M']:,}", f"{n_tokens:,}")
    multiply = N["82M"] - 50277 * 512 - 17 * 512  # without the embedding and gains: 6 N + 12 L d T FLOPs a token
    flops = (6 * multiply + 12 * 8 * 512 * 2048) * n_tokens
    assert float(cost) == pytest.approx(flops / (0.4 * 312e12) / 3600, abs=0.006)
    assert float(disk) == pytest.approx(12 * N["82M"] / 1e9, abs=0.006)
    assert float(table["468M-2048-vanilla-42"][3]) == pytest.approx(24 * N["468M"] / 1e9, abs=0.006)
    assert "takes" not in planned["cpu"].splitlines()[-1]


def test_as_a_user_types_it(tmp_path):
    words = [sys.executable, "-m", "paper.reproduce", "fig5", "tab3", "--scale=paper", "--dry_run"]
    result = finished(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert len(table_of(result.stdout)) == 4 and not list(tmp_path.iterdir())
    assert "4 runs, 0 of them done; training takes 80.5 GPU-hours" in result.stdout


def test_no_torch():
    """A typo is answered before torch is imported."""
    code = "import sys, paper.figures, paper.found; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_public_models_train_nothing():
    public = "--public=models/Llama-3.1-8B"
    for words, n in ((("fig18", public), 0), (("fig18",), 4), (("fig1", public), 4)):
        assert len(reproduce.make_plans(asked(*words, "--scale=paper"), {})) == n, words


# ---- the command, on runs that are small but real


def shrink(monkeypatch, data):
    """Make the scales cpu and night tiny, and few figures of two runs each."""
    shape = dict(sizes={"82M": (2, 2, 16), "468M": (2, 2, 16)}, lengths={2048: (16, 8, 8)}, steps=4)
    shape["n_seeds"] = lambda job: 1
    shape |= dict(
        window=2, evals=2, chunks=4, core_speed=1e4, settings={"eval_tokens": 512, "dtype": "float32", "compile": False}
    )
    tiny = dataclasses.replace(SCALES["cpu"], what="tiny", data_dir=str(data), **shape)
    value, one = figures.relative_losses("", {"Value": "resformer"}), figures.named("resformer")
    few = {
        "fig4": FIGURES["fig4"],
        "fig9": Figure("Values.", (value,), FIGURES["fig9"].claims[:1]),
        "tab5": dataclasses.replace(FIGURES["tab5"], runs=(Job(), Job("resformer")), claims=FIGURES["tab5"].claims[:1]),
        "modes": dataclasses.replace(FIGURES["modes"], panels=(Panel("dots", "one", one),), claims=()),
    }
    monkeypatch.setattr(reproduce, "FIGURES", few)
    monkeypatch.setattr(figures, "FIGURES", few)
    monkeypatch.setattr(reproduce, "PAPER", ("fig4", "fig9", "tab5"))
    monkeypatch.setattr(reproduce, "SCALES", {"cpu": tiny, "paper": SCALES["paper"], "night": tiny})
    losses = {key: values for key, values in tables.PAPER_LOSSES.items() if key[1] == "82M"}
    monkeypatch.setattr(tables, "PAPER_LOSSES", losses)


@pytest.fixture
def small(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    shrink(monkeypatch, data_dir)
    return tmp_path


@pytest.fixture(scope="module")
def real(tmp_path_factory, data_dir):
    """A folder in which all of the shrunken figures were made by one command, and what it said."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("OMP_NUM_THREADS", "1")
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        shrink(m, data_dir)
        result = command("all", "--jobs=2")
    assert result.returncode == 0, (result.stdout, result.stderr)
    return folder, result.stdout


def test_it_trains_analyses_and_draws(real, data_dir):
    folder, said = real
    runs = {mode: folder / "out" / "cpu" / f"82M-2048-{mode}-42" for mode in ("vanilla", "resformer")}
    assert set((folder / "out" / "cpu").iterdir()) == set(runs.values())
    val, domains = {}, {}
    for mode, run in runs.items():
        found, config = plot.read_run(run), json.loads((run / "config.json").read_text())
        assert found.finished and (found.mode, found.last, found.seed) == (mode, 4, 42)
        assert (config["n_layer"], config["learning_rate"], config["block_size"]) == (2, 3e-3, 16)
        assert config["data_dir"] == str(data_dir)
        val[mode], domains[mode] = found.final_loss, found.domains
        assert f"out/cpu/82M-2048-{mode}-42: validation loss {val[mode]:.4f}" in said
    assert plot.read_analysis(runs["vanilla"])["chunks"] == 4 and not (runs["resformer"] / "analysis.json").exists()

    results = json.loads((folder / "results" / "cpu.json").read_text())
    assert list(results["figures"]) == ["fig4", "fig9", "tab5"] and results["scale"] == "tiny"
    assert "2 layers, 2 heads, width 16 for 82M" in results["units"]
    four, nine, table = results["figures"].values()
    (row,) = nine["rows"]
    assert row["values"] == [val["resformer"] - val["vanilla"]]
    assert row["verdict"] == (claims.PAPERS_WAY if row["mean"] < 0 else claims.OTHER_WAY)
    assert f"| {row['verdict']} | {row['mean']:+.4f} | 1 |" in said
    assert nine["runs"] == {f"82M-2048-{mode}-42": val[mode] for mode in val} and nine["caption"] in said
    assert four["rows"][0]["n"] == 1 and four["commits"] == [four["environment"]["commit"]]
    assert table["rows"][0]["values"] == row["values"]
    assert table["table"][1][-1] == f"{val['vanilla']:.4f} (2.7389)" and "png" not in table
    assert f"| ResFormer, 15.7k parameters | {domains['resformer']['prose']:.4f} |" in said
    for record in (four, nine):
        assert (folder / "results" / record["png"]).read_bytes().startswith(PNG)


def test_a_second_call_trains_nothing(real, small, monkeypatch):
    """The figure of modes has a table besides; the report shows what has been drawn."""
    monkeypatch.setattr(reproduce, "run_logged", None)  # nothing is left to run
    monkeypatch.chdir(real[0])
    before, image = json.loads(Path("results/cpu.json").read_text()), Path("results/cpu/fig9.png").read_bytes()
    result = command("all")
    assert result.returncode == 0 and "2 runs, 2 of them done; " in result.stdout
    state, *_, hours = table_of(result.stdout)["82M-2048-vanilla-42"]
    assert (state, hours) == ("done", "0.00") and "training takes 0.0 core-hours" in result.stdout
    result = command("all", "--run=false")
    assert result.returncode == 0 and "2 runs" not in result.stdout
    for name, record in json.loads(Path("results/cpu.json").read_text())["figures"].items():
        for key in ("caption", "rows", "runs"):
            assert record[key] == before["figures"][name][key], (name, key)
    assert Path("results/cpu/fig9.png").read_bytes() == image
    assert "wrote results/cpu/README.md: 3 figures and tables" in command("report").stdout
    report = Path("results/cpu/README.md").read_text()
    found = json.loads(Path("results/cpu.json").read_text())
    found["figures"]["fig3"] = found["figures"]["fig9"]  # of a figure that is no longer made
    assert results_page.report_text(found, "cpu") == report

    assert command("modes", "--out_dir=out/cpu").returncode == command("report", "--scale=night").returncode == 0
    runs = json.loads(Path("results/night.json").read_text())["figures"]["modes"]["runs"]
    vanilla, resformer = (runs[f"82M-2048-{mode}-42"] for mode in ("vanilla", "resformer"))
    ours = f"| `resformer` | {resformer:.4f} | {resformer - vanilla:+.4f} |"
    first, second = re.findall("^[|] `.*$", Path("results/night/README.md").read_text(), re.MULTILINE)
    assert (first if resformer < vanilla else second).startswith(ours)
    assert Path("results/night/modes.png").read_bytes().startswith(PNG)


def test_kept_runs(real, small, tmp_path, monkeypatch):
    """Records say of runs what their folders do. They are enough where the folders are gone, and only for the settings
    that they were made with."""
    shutil.copytree(real[0], tmp_path, dirs_exist_ok=True)
    before = json.loads(Path("results/cpu.json").read_text())["figures"]
    monkeypatch.setattr(reproduce, "run_logged", None)  # nothing is left to run
    assert "2 runs, 2 of them done" in command("all", "--kept=true").stdout
    kept = found_runs.read_kept("results/cpu/runs.jsonl")
    assert list(kept) == ["82M-2048-resformer-42", "82M-2048-vanilla-42"]
    assert "analysis" in kept["82M-2048-vanilla-42"] and "analysis" not in kept["82M-2048-resformer-42"]
    assert kept["82M-2048-vanilla-42"]["processor"] == processor_name() != ""
    shutil.rmtree("out")
    for path in Path("results/cpu").glob("*.png"):
        path.unlink()
    assert command("all", "--kept=true").returncode == 0
    for name, record in json.loads(Path("results/cpu.json").read_text())["figures"].items():
        assert {**record, "environment": None} == {**before[name], "environment": None}
    for name in ("fig4", "fig9"):
        assert Path(f"results/cpu/{name}.png").read_bytes() == Path(real[0], f"results/cpu/{name}.png").read_bytes()
    refused(command("fig9", "--run=false"), "82M-2048-resformer-42 is missing or not finished")  # they are asked for
    text = Path("results/cpu/runs.jsonl").read_text()
    other = text.replace('"learning_rate":0.003', '"learning_rate":0.03', 1)  # a record of another run does not count
    Path("results/cpu/runs.jsonl").write_text(other)
    wrong = "the record of 82M-2048-resformer-42 has learning_rate=0.03 instead of 0.003"
    refused(command("fig9", "--kept=true", "--run=false"), wrong)
    shown = command("fig9", "--kept=true", "--dry_run").stdout
    assert "2 runs, 1 of them done" in shown
    assert re.findall("train.py .*out_dir=out/cpu/(\\S+)", shown) == ["82M-2048-resformer-42"]  # the other has a record
    Path("results/cpu/runs.jsonl").write_text(re.sub('"data":"[^"]*"', '"data":"other"', text))
    refused(command("fig9", "--kept=true"), "results/cpu/runs.jsonl has runs on other data than")
    Path("results/cpu/runs.jsonl").write_text(text.replace('"every":1', '"every":"one"', 1))
    refused(command("fig9", "--kept=true"), "runs.jsonl, line 1", "every")
    Path("results/cpu/runs.jsonl").write_text(text.rstrip())
    refused(command("fig9", "--kept=true"), "runs.jsonl ends within a line")


def test_what_a_record_is_enough_for(small, real):
    """Where a figure needs more than a record has, the run is made again."""
    folder = Path(real[0], "out/cpu/82M-2048-vanilla-42")
    full = found_runs.make_record(folder, train_settings(Job(), reproduce.SCALES["cpu"], 42, folder), 1)
    bare = {key: value for key, value in full.items() if key != "analysis"}
    noted = full | {"losses": []}
    steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    seconds = sum(8 * 16 / step["tokens_per_s"] for step in steps if "loss" in step)
    assert full["seconds"] == pytest.approx(seconds, abs=0.05)

    def is_kept(name, record):
        plans = reproduce.make_plans(asked(name), {folder.name: record})
        (kept,) = [plan.kept for plan in plans if plan.values["value_mode"] == "vanilla"]
        return kept

    assert [is_kept(name, full) for name in ("fig4", "fig9", "tab5")] == [True, True, True]
    assert [is_kept(name, bare) for name in ("fig4", "fig9", "tab5")] == [False, True, True]  # its analysis is drawn
    assert [is_kept(name, noted) for name in ("fig4", "fig9", "tab5")] == [True, False, True]  # its losses are
    assert not is_kept("tab5", full | {"every": 2})
    assert not is_kept("fig4", full | {"analysis": full["analysis"] | {"chunks_asked": 1000}})
    spectra = Figure("x", (Panel("spectrum", "", (("vanilla", Job()),)),))
    figures.FIGURES["fig4"] = spectra
    assert not is_kept("fig4", full)
    tokens = Figure("x", (Panel("tokens", "", (("vanilla", Job()),)),))
    figures.FIGURES["fig4"] = tokens
    assert is_kept("fig4", full) and not is_kept("fig4", noted)
    how = {"max_steps": 4, "out_dir": "elsewhere", "data": full["start"]["data"]}
    by_two = found_runs.make_record(folder, how, 2)
    assert len(by_two["losses"]) == 2 and by_two["losses"][0] == pytest.approx(np.mean(full["losses"][:2]), abs=1e-5)
    assert by_two["settings"] == {"max_steps": 4}
    steps = found_runs.curves_of(by_two).steps
    assert (steps["step"].tolist(), steps["tokens"].tolist()) == ([2, 4], [256, 512])
    shutil.copytree(folder, "learned")
    metrics = Path("learned/metrics.jsonl")
    lam = [[None, [0.3, 1.7]]]  # as train.py writes it for modes with learned weights
    metrics.write_text(metrics.read_text().replace('"event": "eval"', f'"event": "eval", "lam": {json.dumps(lam)}'))
    assert found_runs.make_record(Path("learned"), {}, 1)["lam"] == lam and "lam" not in full

    def found_of(record):
        return Found("out", reproduce.SCALES["cpu"], lambda job: (42,), kept={folder.name: record})

    with pytest.raises(UserError, match="the record of 82M-2048-vanilla-42 has no training losses"):
        claims.critical(found_of(noted), Job(), 42)
    with pytest.raises(UserError, match="the record of 82M-2048-vanilla-42 has no training losses"):
        panels.draw_tokens(None, tokens.panels[0], found_of(noted))
    with pytest.raises(UserError, match="no run of this panel has training losses"):
        panels.draw_relative(None, figures.relative_losses("", {"Transformer": "vanilla"}), found_of(noted))
    with pytest.raises(UserError, match="has no analysis.json of its last weights; make it: `python analyze.py"):
        found_of(bare).by_layer(Job(), 42, "entropy")


def test_committed_results_are_those_of_the_code():
    """Captions, runs, claims and their verdicts, what is said of them, and the values of those on losses of modes."""
    results = json.loads((ROOT / "results/night.json").read_text())
    cfg = asked(*results["figures"], "--scale=night")
    assert (results["scale"], results["units"]) == (SCALES["night"].what, units_in_words(SCALES["night"]))
    assert (ROOT / "results/night/README.md").read_text() == results_page.report_text(results, "night"), (
        "write it again: python -m paper.reproduce report --scale=night"
    )
    for name, record in results["figures"].items():
        figure = cfg.figures[name]
        assert record["caption"] == figure.caption, name
        assert not re.search(r"[= ](/|~|[A-Z]:)", record["environment"]["command"]), f"{name}: a folder of one machine"
        assert "png" not in record or (ROOT / "results" / record["png"]).exists(), name
        jobs = [(cfg.units.here(job), cfg.seeds_of(job)) for job in figure.jobs]
        assert set(record["runs"]) == {f"{job.name}-{seed}" for job, seeds in jobs for seed in seeds}
        for claim, row in zip(figure.claims, record["rows"], strict=True):
            values = dict(zip(row["seeds"], row["values"], strict=True))
            template = re.sub(r"\\\[.*?\\\]", ".+", re.escape(claim.what))  # [length 64000] is what it is at the scale
            assert re.fullmatch(template, row["what"])
            again = dataclasses.replace(claim, what=row["what"], value=lambda found, seed, values=values: values[seed])
            assert claim_cells(claims.claim_row(again, None, row["seeds"])) == claim_cells(row), claim.what
            if claim.jobs:
                losses = Fake(loss=lambda job, seed, of=record["runs"]: of[f"{cfg.units.here(job).name}-{seed}"])
                assert {seed: claim.value(losses, seed) for seed in values} == values, claim.what


def test_night_follows_from_its_records(tmp_path, monkeypatch):
    """The numbers and verdicts of scale night are computed again from the committed records of its runs."""

    def figures_of(path):  # numpy's last digits depend on the processor
        return json.loads(path.read_text(), parse_float=lambda text: float(f"{float(text):.12g}"))["figures"]

    results = figures_of(ROOT / "results/night.json")
    need_files = {name for name in results if FIGURES[name].with_arrays or name in ("fig1", "tab2", "tab4")}
    (tmp_path / "night").mkdir()
    shutil.copy(ROOT / "results/night/runs.jsonl", tmp_path / "night")
    monkeypatch.setattr(results_page, "draw_figure", lambda *_: None)
    monkeypatch.chdir(tmp_path)  # no runs are here
    again = command(
        *(set(results) - need_files), "--scale=night", "--kept=true", "--run=false", f"--results_dir={tmp_path}"
    )
    assert again.returncode == 0, again.stderr
    for name, record in figures_of(tmp_path / "night.json").items():
        assert {**record, "environment": None} == {**results[name], "environment": None}, name


def test_the_rates_of_scale_night_are_the_best():
    """Of five at 82M, of those that another size's Figure 15 needs, and of those that were run at larger sizes, by the
    seed that all have. SVFormer and λ = 2 at larger sizes have no such runs, but half of their rate at 82M, as vanilla
    has."""
    kept = found_runs.read_kept(ROOT / "results/night/runs.jsonl")
    night = SCALES["night"]
    found = Found("out", night, lambda job: (42,), kept=kept)
    grids = dict(figures.GRIDS)
    for size, mode in itertools.product(("180M", "468M"), ("vanilla", "resformer")):
        grids[size, mode] = [Job(mode, size, lr=lr) for lr in figures.RATES["82M"]]
    for (size, mode), jobs in grids.items():
        jobs = [job for job in jobs if f"{job.name}-42" in kept]
        if (size, mode) in night.tuned or (size == "82M" and mode in figures.TUNED):
            assert claims.best_rate(found, jobs) == night.here(Job(mode, size)), (size, mode)
    halved = [(size, mode) for size in ("180M", "468M") for mode in ("vanilla", "svformer", "resformer_lambda")]
    assert set(night.tuned) - set(grids) == {(size, mode) for size, mode in halved if mode != "vanilla"}
    for size, mode in halved:
        assert night.tuned[size, mode] == night.here(Job(mode)).lr / 2


# ---- the command, interrupted or without what it needs


def test_commands(tmp_path):
    """Output goes to the log, and an error is its last line; the command runs from any folder, also under torchrun."""
    log = tmp_path / "run" / "train.log"
    code = "import sys; print('first'); print('boom', file=sys.stderr); sys.exit(3)"
    with pytest.raises(UserError, match=r"failed \(3\): boom; all of it is in .*run/train.log"):
        reproduce.run_logged(["python", "-c", code], log)
    assert "first" in log.read_text()
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    for threads, seen in (("", "1"), ("3", "3")):
        reproduce.run_logged(["python", "-c", code], log, threads)
        assert log.read_text().splitlines()[-1] == seen
    cfg = asked("fig9", "--scale=paper")
    python, *words = reproduce.of_any_folder(reproduce.train_command(plan_of(cfg), cfg))
    assert python == sys.executable and words[:3] == ["-m", "torch.distributed.run", "--nproc_per_node=8"]
    assert words[3] == str(ROOT / "train.py")
    assert load_settings(TrainConfig, words[4:]).out_dir == "out/paper/82M-2048-resformer-42"


def test_one_failing_run_does_not_keep_others_from_being_made(real, small, monkeypatch):
    """ResFormer fails; vanilla, which is there, is analysed and drawn."""
    out = small / "out" / "cpu" / "82M-2048-vanilla-42"
    out.parent.mkdir(parents=True)
    out.symlink_to(real[0] / "out" / "cpu" / out.name)
    exploding = [sys.executable, "-c", "raise SystemExit('it exploded')"]
    monkeypatch.setattr(reproduce, "train_command", lambda plan, cfg: exploding)
    result = command("all", "--jobs=2")
    log = "out/cpu/82M-2048-resformer-42/train.log"
    refused(
        result, "not drawn: fig9, tab5, the first because", "1 runs or analyses failed, the first: `", "exploded", log
    )
    assert "82M-2048-vanilla-42: validation loss" in result.stdout
    assert list(json.loads((small / "results/cpu.json").read_text())["figures"]) == ["fig4"]


def test_a_stopped_run_is_not_finished(real, small, monkeypatch):
    """train.py returns 0 when it is told to stop. Here vanilla's run is left so: it is named, and the rest is made."""
    shutil.copytree(real[0] / "out", small / "out")
    metrics = small / "out/cpu/82M-2048-vanilla-42/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"step": 4' not in line))
    monkeypatch.setattr(reproduce, "train_command", lambda plan, cfg: [sys.executable, "-c", ""])
    result = command("all")
    refused(result, "1 runs or analyses failed, the first: out/cpu/82M-2048-vanilla-42 was stopped")
    assert "82M-2048-resformer-42: validation loss" in result.stdout


def test_a_run_of_other_settings_or_data_is_not_continued(real, small):
    shutil.copytree(real[0] / "out", small / "out")
    folder = small / "out/cpu/82M-2048-vanilla-42"
    config = json.loads((folder / "config.json").read_text())
    for is_begun in (False, True):
        if is_begun:
            for path in [*folder.glob("step_*"), folder / "metrics.jsonl"]:
                path.unlink()
        for name, value in (("learning_rate", 0.004), ("data", "other")):
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            says = f"the first: out/cpu/82M-2048-vanilla-42 has {name}={value} instead of {config[name]}; remove it"
            refused(command("fig9"), "1 runs or analyses failed", says)
    assert not list(folder.glob("step_*"))


# ---- the parts that run other scripts


def plan_of(cfg, mode="resformer"):
    return next(plan for plan in reproduce.make_plans(cfg, {}) if plan.values["value_mode"] == mode)


def test_tasks_of_table_1(small, monkeypatch, capsys):
    cfg = asked("fig9", "--eval_dir=tasks")
    plan = plan_of(cfg)

    def scored(fails="", message=""):
        """The settings of eval.py that are run, where one task fails."""
        given = []

        def run(words, log, threads):
            assert words[1:3] == ["eval.py", str(plan.folder)]
            given.append(load_settings(EvalConfig, words[2:]))
            if fails in given[-1].task:
                raise UserError(message)

        monkeypatch.setattr(reproduce, "run_logged", run)
        reproduce.score_table1(plan, cfg, "")
        return given

    given = scored()
    assert [g.task for g in given] == [(task,) for task in SIX] and {g.data_dir for g in given} == {"tasks"}
    given = scored("winogrande", "12 tokens is too long; leave this task out")  # this one is left out
    assert len(given) == len(SIX) and "resformer-42 has no winogrande: 12 tokens" in capsys.readouterr().out
    given = scored("openbookqa", "no file, no network")  # so are all that come after
    assert [g.task for g in given] == [("hellaswag",), ("openbookqa",)]
    assert "no file, no network" in capsys.readouterr().out
    plan.folder.mkdir(parents=True)
    results = {"hellaswag": {"acc": 0.3}, "piqa": {"acc": 0.5}, "loss": {"val": {}, "val_mean": 1.0}}
    done = {"checkpoints": {"x": {"step": 4, "mode": "resformer", "results": results}}}
    (plan.folder / "eval.json").write_text(json.dumps(done))
    assert [g.task for g in scored()] == [(task,) for task in SIX if task not in results]
    done["checkpoints"]["x"]["step"] = 3  # of an earlier checkpoint than the last
    (plan.folder / "eval.json").write_text(json.dumps(done))
    assert [g.task for g in scored()] == [(task,) for task in SIX]


def test_stale_analyses(small, real):
    """An analysis is made again if it is missing, older than the weights, or of other ones, other chunks or lengths."""
    cfg = asked("fig4")
    plan = plan_of(cfg, "vanilla")

    def is_stale():
        """Whether analyze.py would be run."""
        analysis = found_runs.fresh_analysis(plan.folder)
        return not reproduce.is_as_asked(analysis, plan, cfg.units.chunks)

    assert is_stale()
    shutil.copytree(Path(real[0], plan.folder), plan.folder)
    (weights,) = plan.folder.glob("step_*4.safetensors")
    path = plan.folder / "analysis.json"
    for age, expected in ((-1, False), (1, True), (-1, False)):
        os.utime(weights, ns=(path.stat().st_mtime_ns + age * 10**9,) * 2)
        assert is_stale() == expected, age
    made = json.loads(path.read_text())
    for change in ({"chunks_asked": 1000}, {"length": made["length"] // 2}, {"checkpoint": "step_3.safetensors"}):
        path.write_text(json.dumps(made | change))
        assert is_stale(), change


def test_a_stale_analysis_is_not_recorded(small, real):
    cfg = asked("fig4")
    plan = plan_of(cfg, "vanilla")
    shutil.copytree(Path(real[0], plan.folder), plan.folder)
    (weights,) = plan.folder.glob("step_*4.safetensors")
    analysed = (plan.folder / "analysis.json").stat().st_mtime_ns
    for age, expected in ((-1, True), (1, False)):
        os.utime(weights, ns=(analysed + age * 10**9,) * 2)
        reproduce.keep_record(plan, cfg)
        kept = found_runs.read_kept(cfg.records_file)
        assert ("analysis" in kept[plan.folder.name]) == expected, age
        kept[plan.folder.name]["losses"] = []  # so that it is made again: its next record has what this one has
        (again,) = [other for other in reproduce.make_plans(asked("fig9"), kept) if other.folder == plan.folder]
        assert not again.kept and again.analyse == expected
    metrics = plan.folder / "metrics.jsonl"
    metrics.write_text(re.sub('"data": "[^"]*"', '"data": "other"', metrics.read_text()))
    with pytest.raises(UserError, match="has data=other instead of"):
        reproduce.keep_record(plan, cfg)


def test_analyses_besides_the_runs(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    cfg = asked("fig1", "--public=models/Llama-8B,models/Mistral", f"--data_dir={data_dir}")
    given = {f: load_settings(AnalyzeConfig, words[2:]) for f, words in reproduce.other_analyses(cfg).items()}
    assert list(map(str, given)) == ["out/cpu/init-468M", "out/cpu/public/Llama-8B", "out/cpu/public/Mistral"]
    assert list(map(str, given)) == [g.out_dir for g in given.values()]
    init, *public = given.values()
    shape = load_settings(TrainConfig, [str(ROOT / init.init[0])])
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.block_size) == (24, 16, 1024, 2048)
    assert init.length == 2048 and init.chunks <= 16
    assert [g.runs for g in public] == [("models/Llama-8B",), ("models/Mistral",)]
    assert {(g.chunks, g.dtype) for g in public} == {(SCALES["cpu"].chunks, "bfloat16")}
    for folder in given:
        folder.mkdir(parents=True)
        (folder / "analysis.json").write_text("{}")
    assert not reproduce.other_analyses(cfg) and not reproduce.other_analyses(asked("fig7", "--public=models/Phi"))


def test_a_data_folder_with_a_space():
    words = shlex.split(asked("fig7", "--data_dir=my data").units.prepare)
    assert words[-1] == "--out_dir=my data"


def test_data_is_made_at_scale_cpu_alone(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    called, code = [], 0
    monkeypatch.setattr(subprocess, "run", lambda words: called.append(words) or SimpleNamespace(returncode=code))
    reproduce.make_data(asked("fig9"))
    ((python, file, *words),) = called
    assert python == sys.executable and Path(file) == ROOT / "prepare.py"
    assert load_settings(prepare.PrepareConfig, words).out_dir == "data/small"
    code = 2
    with pytest.raises(UserError, match=r"prepare.py pysource .* failed \(2\)"):
        reproduce.make_data(asked("fig9"))
    reproduce.make_data(asked("fig9", f"--data_dir={data_dir}"))  # what is there is not made again
    for word, folder in (("--scale=small", "data/slimpajama"), ("--data_dir=elsewhere", "elsewhere")):
        with pytest.raises(UserError, match=f"{folder} has no manifest.json; make the data: `python prepare.py "):
            reproduce.make_data(asked("fig9", word))
    assert len(called) == 2


# ---- what is wrong is said in a sentence


def test_refused_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words, says in (
        ((), ("say which figure, as in `python -m paper.reproduce fig7 --dry_run`",)),
        (("fig3",), ("cannot reproduce 'fig3'", "fig1", "fig22", "tab5", "modes", "all", "report")),
        (("report", "fig4"), ("report stands alone",)),
        (("fig4", "--seeds=11"), ("seeds=11", "10")),
        (("fig4", "--jobs=-1"), ("jobs=-1",)),
        (("fig4", "--jobs=2", "--scale=paper"), ("jobs=2 would share the GPUs", "scale=paper")),
        (("fig4", "--scale=huge"), ("scale", "'cpu'", "'paper'")),
        (("fig4", "--scale=gpu"), ("scale=gpu is for gpu, fig2, fig19, fig20, fig21, tab5 alone",)),
        (("rates", "fig4", "--scale=cpu"), ("rates is for scale=night, not for scale=cpu",)),
        (("report",), ("results/cpu.json is missing; it should be what a figure at scale=cpu writes",)),
        (("fig18", "--public=a/8B,b/8B"), ("two folders of --public have the same name",)),
        (("fig4", "--scale=paper"), ("scale=paper needs GPUs", "--dry_run", "--scale=cpu")),
        (("fig4", "--data_dir=missing"), ("missing has no manifest.json", "python prepare.py")),
    ):
        refused(command(*words), *says)
    assert not list(tmp_path.iterdir())


def finished_run(folder, mode, **other):
    """A made-up run of the shrunken scale, or of other settings."""
    settings = train_settings(Job(mode), reproduce.SCALES["cpu"], 42, folder) | {"value_mode_name": mode} | other
    make_run(folder, mode, 42, np.ones(settings["max_steps"]), block_size=settings["block_size"])
    (folder / "config.json").write_text(json.dumps(settings))


def test_runs_that_are_missing(small):
    """Whatever is there is drawn; the rest is named."""
    says = "82M-2048-resformer-42 is missing or not finished; leave out --run=false, or see its train.log"
    resformer, vanilla = (small / f"out/cpu/82M-2048-{mode}-42" for mode in ("resformer", "vanilla"))
    refused(command("fig9", "--run=false"), says)
    make_run(resformer, "resformer", 42, np.ones(3), val={}, max_steps=4, block_size=16)
    refused(command("fig9", "--run=false"), says)
    (resformer / "metrics.jsonl").unlink()
    resformer.rmdir()
    finished_run(resformer, "resformer")
    finished_run(vanilla, "vanilla")
    result = command("all", "--run=false")
    refused(
        result,
        "not drawn: fig4, the first because",
        "has no analysis.json of its last weights; make it: `python analyze.py",
    )
    assert (small / "results/cpu/fig9.png").exists()
    assert list(json.loads((small / "results/cpu.json").read_text())["figures"]) == ["fig9", "tab5"]


def test_runs_of_other_settings_or_data(small, tmp_path):
    for name, value, mine in (("max_steps", 8, 4), ("learning_rate", 0.004, 0.003), ("n_embd", 8, 16)):
        out = tmp_path / name
        finished_run(out / "82M-2048-resformer-42", "resformer")
        finished_run(out / "82M-2048-vanilla-42", "vanilla", **{name: value})
        result = command("fig9", f"--out_dir={out}", "--run=false")
        refused(result, f"82M-2048-vanilla-42 has {name}={value} instead of {mine}")
    out = tmp_path / "data"
    finished_run(out / "82M-2048-resformer-42", "resformer")
    finished_run(out / "82M-2048-vanilla-42", "vanilla")
    file = Path(out, "82M-2048-vanilla-42", "metrics.jsonl")
    file.write_text(file.read_text().replace('"data": "d"', '"data": "e"'))
    refused(command("fig9", f"--out_dir={out}", "--run=false"), "82M-2048-vanilla-42 has data=e instead of d")


def test_without_matplotlib(small, real, monkeypatch):
    """It is missed before anything is made; a plan and a table do without."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(command("fig9"), "the package matplotlib is not installed")
    assert not list(small.iterdir())
    assert command("fig9", "--dry_run").returncode == 0
    assert command("tab5", "--run=false", f"--out_dir={real[0]}/out/cpu").returncode == 0
