"""compare.py: its procedure on made-up losses, its answer on made-up runs, and a real comparison that is stopped."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, config, in_process, make_data, refused, script

import compare
import train
from bench import coverage
from common import checkpoint, files
from common.files import hold, record_line, write_record
from common.jobs import lanes_of, last_words, steps_done
from common.ranks import code_of_results
from common.runs import differences, read_kept, read_run
from common.verdict import Tuned, in_times, judge, search
from configurator import load_settings
from model import GPT
from train import settings_of

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=128, micro_batch=8, warmup_steps=2)
SMALL |= dict(eval_tokens=256, max_steps=12, eval_every=12, save_every=12, dtype="float32", learning_rate=3e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d")


def words_of(data, out, *words, **kw):
    return [*words, *(f"--{name}={value}" for name, value in (SMALL | dict(data_dir=data, out_dir=out) | kw).items())]


# -- the procedure


def followed(loss, rates, seeds):
    """(all runs that the procedure asks for, the best rate, whether it is at the edge), where loss(rate, seed)."""
    losses = {}

    def known(*run):
        return losses.get(run)

    while missing := search(known, rates, seeds)[0]:
        losses.update({run: loss(*run) for run in missing})
    tuned = search(known, rates, seeds)[1]
    return list(losses), tuned.rate, tuned.is_edge


def valley(at, width=1.0):
    return lambda rate, seed=0: 2 + width * abs(math.log2(rate / at))


def test_a_bracketed_rate_gets_all_seeds():
    runs, best, is_edge = followed(valley(2), (1, 2, 4), (42, 1, 2))
    assert runs == [(1, 42), (2, 42), (4, 42), (2, 1), (2, 2)] and best == 2 and not is_edge


@pytest.mark.parametrize("at,rates,runs", [(8, (1, 2, 4), (1, 2, 4, 8, 16)), (0.5, (1, 2, 4), (1, 2, 4, 0.5, 0.25))])
def test_the_grid_grows_at_its_edge(at, rates, runs):
    asked, best, is_edge = followed(valley(at), rates, (42,))
    assert [rate for rate, _ in asked] == list(runs) and best == at and not is_edge


@pytest.mark.parametrize("at,best", [(64, 16), (1 / 64, 0.25)])
def test_a_grid_that_grew_twice_is_marked(at, best):
    asked, found, is_edge = followed(valley(at), (1, 2, 4), (42,))
    assert len(asked) == 5 and found == best and is_edge


def test_what_a_parabola_promises_is_tried():
    """The best rate is 0.4 octaves above the middle one, whose neighbour there is hardly higher."""
    asked, best, is_edge = followed(lambda rate, seed: math.log2(rate / 2**1.4) ** 2, (1, 2, 4), (42, 1))
    assert asked == [(1, 42), (2, 42), (4, 42), (2.64, 42), (2.64, 1)] and best == 2.64 and not is_edge


def test_a_cliff_beside_a_rate_is_no_valley_on_its_other_side():
    losses = {}
    while missing := search(lambda *run: losses.get(run), (1, 2, 4), (42, 1))[0]:
        losses.update({run: 2.5 + 0.05 * math.log2(run[0] / 2) ** 2 + (run[0] > 3) for run in missing})
    tuned = search(lambda *run: losses.get(run), (1, 2, 4), (42, 1))[1]
    cells = {("vanilla", 2): {42: 2.5, 1: 2.5}} | {("m", rate): {} for rate, _ in losses}
    for (rate, seed), loss in losses.items():
        cells["m", rate][seed] = loss
    base, mode = judge(cells, {"vanilla": Tuned(2), "m": tuned})[0]
    assert tuned.rate == 2 and len(losses) == 7 and mode.best.gain < 0.01  # from three rates alone it is 0.11


def test_a_first_seed_that_diverged_at_every_rate_ends_the_search():
    asked, best, is_edge = followed(lambda rate, seed: math.inf if seed == 42 else 2.5, (1, 2), (42, 1))
    assert asked == [(1, 42), (2, 42), (0.5, 42), (0.25, 42)] and best == 0.25 and not is_edge


def test_one_rate_is_not_tuned():
    assert followed(valley(8), (1,), (42, 1)) == ([(1, 42), (1, 1)], 1, False)


def test_a_rate_that_diverges_ends_the_grid():
    asked, best, is_edge = followed(lambda rate, _: math.inf if rate > 4 else -rate, (1, 2, 4), (42,))
    assert asked[-1] == (8, 42) and best == 4 and not is_edge
    asked, best, _ = followed(lambda rate, _: math.inf, (1, 2), (42,))
    assert [rate for rate, _ in asked] == [1, 2, 0.5, 0.25]


@pytest.mark.parametrize("at,rates,around", [
    (2, (1, 2, 4), (1, 2, 4)), (8, (1, 2, 4), (4, 8, 16)), (64, (1, 2, 4), ()),
    (1, (1,), ()), (2, (1, 2, 5), (1, 2, 5)),
])  # fmt: skip
def test_the_rates_of_the_parabola(at, rates, around):
    losses = {}
    while missing := search(lambda *run: losses.get(run), rates, (42, 1))[0]:
        losses.update({run: valley(at)(*run) for run in missing})
    assert search(lambda *run: losses.get(run), rates, (42, 1))[1].around == around


def test_no_parabola_beside_a_rate_that_diverged():
    losses = {(1, 42): 2.5, (2, 42): 2.4, (4, 42): math.inf}
    assert search(lambda *run: losses.get(run), (1, 2, 4), (42,)) == ([], Tuned(2))


# -- the answer, from runs that a made-up trainer leaves


def trainer(loss, monkeypatch):
    """In place of train.py: each job leaves a folder with the loss(mode, rate, seed); infinite means diverged."""
    trained = []

    def run_jobs(wanted, ended, lanes, later):
        while jobs := wanted():
            for job in jobs:
                cfg = load_settings(compare.TrainConfig, job.words[1:])
                trained.append((cfg.value_mode.name, cfg.learning_rate, cfg.seed))
                make_run(cfg, loss(*trained[-1]))
                ended(job, 0, "step 3: the loss is nan")

    monkeypatch.setattr(compare, "run_jobs", run_jobs)
    return trained


def make_run(cfg, loss, **changed):
    """A run's folder as train.py leaves it: config.json, env.json and metrics.jsonl."""
    corpus = compare.Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, False, cfg.bos)
    folder, config = Path(cfg.out_dir), settings_of(cfg, corpus, None)[0]
    write_record(folder / "config.json", "train.py's settings", config)
    write_record(folder / "env.json", train.ENVIRONMENT, {"commit": "c", "processor": "p"})
    start = {"event": "start", "step": 0, "code": code_of_results(), "dtype": "float32", "rounding": {"threads": 1}}
    mode = {"definition": config["value_mode"], "value_mode": config["value_mode_name"]}
    start |= {"max_steps": cfg.max_steps} | mode | changed
    records = [start]
    for step in range(start["step"] + 1, 1 + cfg.max_steps):
        records.append({"step": step, "loss": 3.0 - 0.01 * step, "tokens": step * 128, "tokens_per_s": 100.0})
    if math.isfinite(loss):
        records.append({"event": "eval", "step": cfg.max_steps, "val_mean": loss, "val": {"a": loss}})
    else:
        records.append({"event": "diverged", "step": cfg.max_steps, "why": "the loss is nan"})
    (folder / "metrics.jsonl").write_text("".join(record_line("train.py's metrics", r) for r in records))
    return folder


def test_a_folder_that_says_two_things_is_refused(data, tmp_path, monkeypatch):
    """Its config, its records and its checkpoints are of one run, or nobody knows whose loss it is."""
    trainer(lambda mode, rate, seed: {"vanilla": 2.5, "svformer": 2.4}[mode], monkeypatch)
    words = words_of(data, tmp_path, "vanilla", "svformer", rates="3e-3", seeds=1)
    assert in_process(compare, *words).returncode == 0
    vanilla, svformer = sorted(tmp_path.glob("*-0.003-42"), key=lambda path: path.name[0] != "v")
    records = {path: (path / "metrics.jsonl").read_bytes() for path in (vanilla, svformer)}
    # another run's losses
    (vanilla / "metrics.jsonl").write_bytes(records[svformer])
    refused(in_process(compare, *words), "value_mode", "remove it, or set another --out_dir")
    # a step less
    lines = records[vanilla].splitlines(keepends=True)
    (vanilla / "metrics.jsonl").write_bytes(b"".join(lines[:2] + lines[3:]))
    refused(in_process(compare, *words), "it lacks steps, or has some twice")
    (vanilla / "metrics.jsonl").write_bytes(records[vanilla])
    # another model's weights
    cfg = config("svformer", vocab_size=257, n_layer=2, n_head=2, n_embd=32, block_size=64)
    path = checkpoint.save(vanilla, 4, GPT(cfg), "tokenizer")
    refused(in_process(compare, *words), f"{path.name} of svformer, and records of vanilla")
    path.unlink()
    path = checkpoint.save(vanilla, 12, GPT(dataclasses.replace(cfg, value_mode="vanilla")), "tokenizer", val_loss=1.0)
    refused(in_process(compare, *words), f"{path.name}, whose validation loss is not that of the records")
    path.unlink()
    # a loss twice
    (vanilla / "metrics.jsonl").write_bytes(records[vanilla] + lines[-1])
    refused(in_process(compare, *words), "it has an evaluation twice")
    (vanilla / "metrics.jsonl").write_bytes(b"".join(lines[1:]))
    refused(in_process(compare, *words), "it has no record of a start")
    (vanilla / "metrics.jsonl").write_bytes(records[vanilla])
    # settings of another seed
    kept = files.read_record(vanilla / "config.json", "train.py's settings")
    write_record(vanilla / "config.json", "train.py's settings", kept | {"seed": 7})
    refused(in_process(compare, *words), "was made with seed=7 instead of 42")
    # no settings
    (vanilla / "config.json").unlink()
    refused(in_process(compare, *words), "vanilla-", "has lost its config.json; remove it")
    # a kill before config.json was written leaves an empty file, and the run begins anew
    (vanilla / "metrics.jsonl").write_bytes(b"")
    assert in_process(compare, *words).returncode == 0


def table(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0] == "|"]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


LEVELS = {"vanilla": 2.5, "resformer": 2.49, "resformer_lambda": 2.40, "svformer": 2.6}


def losses(mode, rate, seed):
    """Each mode has its own level and its own best rate; seeds move all alike, and each run by a little."""
    noise = {42: 0.001, 1: -0.002, 2: 0.001}[seed] * (1 if mode == "vanilla" else -2)
    at = 6e-3 if mode == "svformer" else 3e-3
    return LEVELS[mode] + 0.1 * abs(math.log2(rate / at)) + 0.02 * (seed == 1) + noise


def test_a_fair_comparison(data, tmp_path, monkeypatch):
    trained = trainer(losses, monkeypatch)
    words = words_of(data, tmp_path, *LEVELS, rates="1.5e-3,3e-3,6e-3", seeds=3)
    done = in_process(compare, *words)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert list(rows) == list(LEVELS) and len(trained) == len(set(trained)) == 4 * 3 + 1 + 4 * 2  # 1: svformer's edge
    assert rows["svformer"]["rate"] == "0.006" and rows["vanilla"]["val loss"] == f"{2.5 + 0.02 / 3:.4f}"
    # by hand: vanilla's residuals are 9/4 of the noise, the others' 3/4: 6 (81 + 27) / 16 squares, 6 degrees of freedom
    assert rows["resformer_lambda"]["vs vanilla"] == "-0.1000 ± 0.0052"
    assert "resformer_lambda is better than vanilla by 0.1000 ± 0.0052 nats." in done.stdout
    assert "svformer is worse than vanilla by 0.1000 ± 0.0052 nats." in done.stdout
    assert "resformer is better than vanilla by 0.0100 ± 0.0052 nats." in done.stdout
    assert (tmp_path / "compare.png").exists()
    # again: nothing is trained twice
    trained.clear()
    assert in_process(compare, *words).stdout.endswith(done.stdout[done.stdout.index("| mode") :]) and not trained


def test_what_cannot_be_told_apart(data, tmp_path, monkeypatch):
    trainer(lambda mode, rate, seed: 2.5 + 0.03 * (len(mode) * (seed + 3) % 7 - 3), monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path, "resformer", "vanilla", seeds=3)).stdout
    assert re.search(r"resformer cannot be told apart from vanilla: [+-]0\.\d+ ± 0\.\d+ nats, p = [\d.]+\.", said)


def test_one_seed_says_what_it_cannot_say(data, tmp_path, monkeypatch):
    trainer(losses, monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", rates="3e-3,6e-3")).stdout
    says = "svformer ends 0.097 nats above vanilla; one seed says nothing about noise: add --seeds=3"
    assert f"{says}." in said
    assert table(said)["svformer"]["vs vanilla"] == "+0.0970"
    trainer(lambda *_: 2.5, monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path / "equal", "vanilla", "svformer")).stdout
    assert "svformer ends level with vanilla; one seed says nothing" in said
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")).stdout
    assert "One rate, 0.003, favours the mode that it suits best" in said


def curved(levels, bests, noise=0.0):
    """loss(mode, rate, seed): a parabola over log2(rate); of seeds 1 and 2 the noise cancels."""

    def loss(mode, rate, seed):
        signs = {42: 0, 1: 1, 2: -1}[seed] * (1 if mode == "vanilla" else -1)
        return levels[mode] + 0.05 * math.log2(rate / bests[mode]) ** 2 + signs * noise

    return loss


RATES = "1.5e-3,3e-3,6e-3"


def test_a_parabola_finds_the_rate_between_those_tried(data, tmp_path, monkeypatch):
    """Vanilla's best rate is 0.2 octaves above the middle of the grid, where it loses 0.002."""
    trainer(
        curved({"vanilla": 2.5, "svformer": 2.49}, {"vanilla": 3e-3 * 2**0.2, "svformer": 3e-3}, 0.003), monkeypatch
    )
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", rates=RATES, seeds=3)).stdout
    rows = table(said)
    numbers = [rows["vanilla"][name] for name in ("rate", "val loss", "parabola's rate", "its loss")]
    assert numbers == ["0.003", "2.5020", "0.0034", "2.5000"]
    assert rows["svformer"]["its loss"] == rows["svformer"]["val loss"] == "2.4900"
    assert "vanilla is what the others are compared with; a parabola puts its best rate at 0.0034, 0.002 lower." in said
    # by hand: residuals are 4 × 0.003² with 2 degrees of freedom. Vanilla's three rates count -0.08, 0.96 and 0.12. The
    # outer two have the first seed alone, so its shift, the mean of both modes' deviations, is taken off them.
    of_42 = 0.12 - 0.08
    vanilla = [-0.96 / 3 + of_42 / 3, -0.96 / 3 - of_42 / 6, -0.96 / 3 - of_42 / 6, 0.08, -0.12]
    svformer = [1 / 3 + of_42 / 3, 1 / 3 - of_42 / 6, 1 / 3 - of_42 / 6]
    error = (18e-6 * sum(weight**2 for weight in vanilla + svformer)) ** 0.5
    half = math.hypot(4.3027 * error, 1.96 * 0.05 * 0.2**2)  # the gain, which nobody has trained
    assert rows["svformer"]["vs vanilla"] == f"-0.010 ± {half:.3f}"


def test_a_gain_counts_as_unsure_as_it_is_large():
    losses = {
        "vanilla": curved({"vanilla": 2.5}, {"vanilla": 1.0}, 0.003),
        "m": curved({"m": 2.5}, {"m": 2**0.2}, 0.003),
    }
    cells = {(mode, rate): {42: loss(mode, rate, 42)} for mode, loss in losses.items() for rate in (0.5, 1, 2)}
    for mode, loss in losses.items():
        cells[mode, 1] = {seed: loss(mode, 1, seed) for seed in (42, 1, 2)}
    (base, mode), fit = judge(cells, {"vanilla": Tuned(1, around=(0.5, 1, 2)), "m": Tuned(1, around=(0.5, 1, 2))})
    of_noise = fit.contrast(mode.best.weights | {cell: -x for cell, x in base.best.weights.items()})[1]
    assert mode.best.gain == pytest.approx(0.05 * 0.2**2) and base.best.gain == pytest.approx(0)
    assert mode.interval == pytest.approx(math.hypot(of_noise, 1.96 * 0.002))


@pytest.mark.parametrize("seed,seeds", [(42, [42, 1, 2]), (11, [11, 12, 13])])
def test_fresh_seeds_are_none_of_the_usual_ones(seed, seeds):
    assert (
        load_settings(compare.CompareConfig, ["vanilla", "svformer", f"--seed={seed}", "--seeds=3"]).all_seeds == seeds
    )


def test_what_no_parabola_corrects_is_said(data, tmp_path, monkeypatch):
    trainer(lambda mode, rate, seed: 2.5 - rate if mode == "svformer" else 2.5, monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path / "a", "vanilla", "svformer", rates="1e-3,2e-3")).stdout
    assert "0.008 is the edge of its rates, so a better one may lie beyond, where no parabola reaches" in said
    assert table(said)["svformer"]["rate"] == "0.008 (edge)" and table(said)["svformer"]["its loss"] == "-"
    trainer(lambda mode, rate, seed: 2.5 - rate if rate < 4e-3 else math.inf, monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path / "b", "vanilla", "svformer", rates="1e-3,2e-3")).stdout
    assert "; beside 0.002 it diverged, so no parabola corrects its rate." in said


def test_a_base_that_is_not_tuned_well_is_said_beside_each_difference(data, tmp_path, monkeypatch):
    trainer(
        lambda mode, rate, seed: 2.5 - rate if mode == "vanilla" else curved({mode: 2.5}, {mode: 2e-3})(mode, rate, 42),
        monkeypatch,
    )
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", rates="1e-3,2e-3,4e-3")).stdout
    assert "; and vanilla: 0.016 is the edge of its rates, so a better one may lie beyond" in said


def test_a_base_that_diverges_leaves_the_others_losses(data, tmp_path, monkeypatch):
    trainer(lambda mode, rate, seed: math.inf if mode == "vanilla" else 2.5, monkeypatch)
    done = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", "resformer", seeds=3))
    assert done.returncode == 0, done.stderr
    assert "vanilla diverged at every rate down to 0.003: name lower --rates." in done.stdout
    assert "svformer ends at 2.5000 nats." in done.stdout and "× tokens needs" not in done.stdout
    rows = table(done.stdout)
    assert rows["vanilla"]["val loss"] == "diverged" and rows["svformer"]["vs vanilla"] == "-"
    trainer(lambda *run: math.inf, monkeypatch)
    done = in_process(compare, *words_of(data, tmp_path / "all", "vanilla", "svformer"))
    assert done.returncode == 0 and "svformer diverged at every rate down to 0.003" in done.stdout


def test_one_seed_borrows_the_noise_of_runs_that_are_there(data, tmp_path, monkeypatch):
    """Of two modes with three seeds, one of which this comparison does not name."""
    trainer(losses, monkeypatch)
    assert in_process(compare, *words_of(data, tmp_path, "vanilla", "resformer", seeds=3)).returncode == 0
    other = of_run(data, tmp_path, seed=1, n_embd=64)
    make_run(dataclasses.replace(other, out_dir=str(tmp_path / "other")), 9.0)  # it says nothing of these
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")).stdout
    noise = (2 * (2 * 0.0015**2 + 0.003**2) / 2) ** 0.5  # by hand, with 2 degrees of freedom
    assert f"That noise, {noise:.4f} nats, is of other runs in {tmp_path}, which have several seeds." in said
    half = 4.303 * noise * 2**0.5
    assert table(said)["svformer"]["vs vanilla"].endswith(f"± {half:.3f}")
    assert "svformer is worse than vanilla by" in said


def test_who_makes_most_of_the_noise_is_said(data, tmp_path, monkeypatch):
    def noisy(mode, rate, seed):
        return 2.5 + {42: 0, 1: 1, 2: -1}[seed] * {"vanilla": 0.03, "svformer": 0.001}.get(mode, 0.002)

    trainer(noisy, monkeypatch)
    words = words_of(data, tmp_path, "vanilla", "svformer", "resformer", seeds=3)
    assert "vanilla makes 67% of that noise. If its runs are noisier" in in_process(compare, *words).stdout
    alone = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", seeds=3)).stdout
    assert "of that noise" not in alone


def test_a_report_has_what_a_page_needs(data, tmp_path, monkeypatch):
    trainer(losses, monkeypatch)
    words = words_of(data, tmp_path, "vanilla", "svformer", rates=RATES, seeds=3)
    said = in_process(compare, *words, "--report").stdout
    page = (tmp_path / "report/README.md").read_text(encoding="utf-8")
    lines = said[said.index("| mode") :].splitlines()
    assert all(line in page for line in lines if not line.startswith("wrote ")) and "](compare.png)" in page
    kept = read_kept(tmp_path / "report/runs.jsonl")
    assert len(kept) == len(list(tmp_path.glob("*/metrics.jsonl"))) and (tmp_path / "report/compare.png").exists()
    of = kept["svformer-12-0.006-1"]
    assert of["val"] == {"12": pytest.approx(losses("svformer", 6e-3, 1))} and of["settings"]["learning_rate"] == 6e-3
    assert of["settings"]["value_mode_name"] == "svformer" and of["domains"] == {"a": pytest.approx(of["val"]["12"])}


def test_the_bar_counts_seeds_that_will_be_asked_for(data, tmp_path, monkeypatch):
    seen = []

    def run_jobs(wanted, ended, lanes, later):
        while jobs := wanted():
            seen.append((len(jobs), later() // 12))
            for job in jobs:
                cfg = load_settings(compare.TrainConfig, job.words[1:])
                make_run(cfg, 2.0 + abs(math.log2(cfg.learning_rate / 3e-3)))

    monkeypatch.setattr(compare, "run_jobs", run_jobs)
    in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", rates=RATES, seeds=3))
    assert seen[0] == (6, 4) and seen[-1] == (4, 0)


def test_a_mode_that_diverges_has_an_infinite_loss(data, tmp_path, monkeypatch):
    trainer(lambda mode, rate, seed: math.inf if mode == "svformer" else losses(mode, rate, seed), monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", "resformer", rates="3e-3,6e-3")).stdout
    assert "svformer-12-0.003-42: diverged, so its loss counts as infinite: step 3: the loss is nan" in said
    assert (
        "svformer diverged at every rate down to 0.00075: name lower --rates." in said
        and table(said)["svformer"]["val loss"] == "diverged"
    )
    assert "resformer ends" in said


def test_one_seed_that_diverges_is_said(data, tmp_path, monkeypatch):
    trainer(lambda *run: math.inf if run[0] == "svformer" and run[2] == 1 else losses(*run), monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", seeds=3)).stdout
    assert "; 1 of its 3 seeds diverged." in said and table(said)["svformer"]["seeds"] == "2"


def test_tokens_are_counted_by_vanillas_other_length(data, tmp_path, monkeypatch):
    trainer(losses, monkeypatch)
    words = words_of(data, tmp_path, "vanilla", "resformer_lambda", seeds=3)
    assert ": run this with --max_steps=24," in in_process(compare, *words).stdout
    make_run(of_run(data, tmp_path, max_steps=48), 2.3)  # one of its seeds alone
    assert "× tokens needs vanilla" in in_process(compare, *words).stdout
    for seed in (1, 2):
        make_run(of_run(data, tmp_path, seed=seed, max_steps=48), 2.3)
    said = in_process(compare, *words).stdout
    least, most = map(float, table(said)["resformer_lambda"]["× tokens"].split(" to "))
    # vanilla's 2.5067 falls to 2.3 in 4 x the tokens: a straight line over ln D reaches 2.4067 at 1.96 x
    assert 1.3 < least < 1.6 and 1.96 < most < 2.2
    assert f"vanilla needs {least:.2f} to {most:.2f} times as many tokens for that loss" in said
    # the nearest longer length counts, whatever shorter ones say; vanilla's row has no numbers of a difference
    for steps, loss in ((11, 2.6), (96, 2.1)):
        for seed in (42, 1, 2):
            make_run(of_run(data, tmp_path, seed=seed, max_steps=steps), loss)
    rows = table(in_process(compare, *words).stdout)
    assert rows["resformer_lambda"]["× tokens"] == f"{least:.2f} to {most:.2f}"
    assert [rows["vanilla"][name] for name in ("vs vanilla", "Holm's p", "× tokens")] == ["-"] * 3


def test_a_length_that_is_nearly_the_same_says_nothing(data, tmp_path, monkeypatch):
    trainer(losses, monkeypatch)
    for seed in (42, 1, 2):
        make_run(of_run(data, tmp_path, seed=seed, max_steps=16), 2.3)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "resformer_lambda", seeds=3)).stdout
    assert table(said)["resformer_lambda"]["× tokens"] == "-"


def test_a_range_without_end_in_words():
    assert in_times((1.234, math.inf)) == "1.23 or more" and in_times((0.5, 2)) == "0.50 to 2.00"


def test_a_length_at_which_vanilla_is_no_better_says_nothing(data, tmp_path, monkeypatch):
    trainer(losses, monkeypatch)
    for seed in (42, 1, 2):
        make_run(of_run(data, tmp_path, seed=seed, max_steps=48), 2.7)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "resformer_lambda", seeds=3)).stdout
    assert table(said)["resformer_lambda"]["× tokens"] == "-" and "× tokens needs vanilla at another length" in said


def test_weights_that_could_not_be_saved_are_said(data, tmp_path, monkeypatch):
    def run_jobs(wanted, ended, lanes, later):
        for job in wanted():
            make_run(load_settings(compare.TrainConfig, job.words[1:]), 2.0)
            ended(job, 2, "step_00000012.safetensors cannot be written: No space left on device")

    monkeypatch.setattr(compare, "run_jobs", run_jobs)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")).stdout
    assert "vanilla-12-0.003-42: 2.0000, but its weights may not be saved: step_00000012" in said


# -- how often it holds, in short; `python -m bench.coverage` has the long form


@pytest.mark.parametrize("seeds,of,least,before", [
    (3, {}, 0.93, 1.0), (5, {"best_rates": "half an octave off"}, 0.92, 0.97),
    (5, {"best_rates": "random", "n_modes": 4}, 0.92, 0.93),
    (5, {"cliff": 1.0}, 0.9, 1.0),
])  # fmt: skip
def test_intervals_hold_the_difference_at_the_best_rates(seeds, of, least, before):
    found = coverage.count(coverage.Case(n_seeds=seeds, **of), 300)
    assert least <= found["covers"] <= 0.98 and found["covers before"] < before and found["false"] <= 0.09


@pytest.mark.parametrize("length,m", [(2.0, 1.0), (2.0, 1.1), (0.5, 1.3)])
def test_ranges_of_tokens_hold_and_do_not_contradict(length, m):
    found = coverage.count(coverage.Case(length=length, m=m), 100)
    assert 0.92 <= found["m covers"] and found["contradicts"] == 0


def test_a_noisy_base_is_named_or_covered():
    assert coverage.count(coverage.Case(n_modes=4, noisier=3.0), 300)["named"] >= 0.75


def test_the_long_form_prints_its_tables(monkeypatch):
    monkeypatch.setattr(coverage, "NULLS", {"same curve": {}})
    monkeypatch.setattr(coverage, "SIZES", [(2, 2)])
    said = in_process(coverage, "--repetitions=2").stdout
    assert "| same curve | 2 | 2 |" in said and "| -0.05 | random | 5 |" in said and "| 1.3 | 2 | 2 | 2 |" in said


# -- what is there, and what is refused


def test_the_last_start_of_a_resumed_run_counts(data, tmp_path):
    """It was set to 12 steps, then to 20."""
    folder = make_run(of_run(data, tmp_path, max_steps=12), 2.0)
    more = make_run(of_run(data, tmp_path / "more", max_steps=20), 1.5)
    text, rest = ((path / "metrics.jsonl").read_text() for path in (folder, more))
    start, *others = rest.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(text + start)
    assert read_run(folder).final_loss is None and len(read_run(folder).starts) == 2
    (folder / "metrics.jsonl").write_text(text + start + "".join(others[12:]))
    assert read_run(folder).final_loss == 1.5 and read_run(folder).steps["step"].tolist() == list(range(1, 21))


def of_run(data, out, seed=42, **kw):
    words = words_of(data, out, "vanilla", "svformer", **kw)
    return load_settings(compare.CompareConfig, list(map(str, words))).of_run("vanilla", 3e-3, seed)


@pytest.mark.parametrize("says,setting,start", [
    ("was made with n_embd=64 instead of 32; remove it, or set another --out_dir", {"n_embd": 64}, {}),
    ("was made with another model.py", {}, {"code": code_of_results() | {"model.py": "0"}}),
    ("was made with another model.py", {}, {"code": {}}),
    ("was made with weight_decay=0.5 instead of 0.1", {}, {"weight_decay": 0.5}),  # and resumed with 0.1
    ("was made with the first 6 steps of another run", {}, {"step": 6}),
])  # fmt: skip
def test_a_run_of_other_settings_or_code_is_refused(says, setting, start, data, tmp_path):
    run = of_run(data, tmp_path, **setting)
    make_run(run, 2.0, **start)
    refused(in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")), says)


def test_what_changes_rounding_alone_may_differ(data, tmp_path, monkeypatch):
    make_run(of_run(data, tmp_path, attn="eager", micro_batch=4), 2.0)
    trained = trainer(losses, monkeypatch)
    assert in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")).returncode == 0
    assert [mode for mode, *_ in trained] == ["svformer"]


def test_other_data_is_refused(data, tmp_path):
    run = of_run(data, tmp_path)
    folder = make_run(run, 2.0)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("kind", "seal")} | {"data": "0" * 16}
    write_record(folder / "config.json", "train.py's settings", config)
    refused(
        in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")), "was made with data=0000000000000000"
    )


def test_a_mode_that_changed_is_named_by_its_field():
    made, wanted = ({"mode": {"residuals": [{"lam": [1, x], "of": "v"}]}, "n": 1} for x in (3, 2))
    assert differences(made, wanted) == ["mode.residuals.0.lam.1=3 instead of 2"]
    assert differences({"n": [1]}, {"n": [1, 2]}) == ["n=[1] instead of [1, 2]"] and not differences(made, made)


def test_runs_in_two_precisions_are_not_compared(data, tmp_path, monkeypatch):
    make_run(of_run(data, tmp_path, dtype="auto"), 2.0, dtype="bfloat16")
    trainer(losses, monkeypatch)
    refused(
        in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", dtype="auto")),
        "are in bfloat16 and float32; set --dtype",
    )


def test_a_precision_is_what_auto_became(data, tmp_path, monkeypatch):
    """--dtype is what the message above advises."""
    make_run(of_run(data, tmp_path, dtype="auto"), 2.0, dtype="float32")
    trained = trainer(losses, monkeypatch)
    words = words_of(data, tmp_path, "vanilla", "svformer")
    assert in_process(compare, *words, "--dtype=float32").returncode == 0 and [mode for mode, *_ in trained] == [
        "svformer"
    ]
    says = "vanilla-12-0.003-42 was made with dtype=float32 instead of bfloat16; remove it"
    refused(in_process(compare, *words, "--dtype=bfloat16"), says)
    assert in_process(compare, *words, "--dtype=auto").returncode == 0


def test_machines_that_differ_are_said(data, tmp_path, monkeypatch):
    run, words = of_run(data, tmp_path), words_of(data, tmp_path, "vanilla", "svformer")
    trainer(losses, monkeypatch)
    make_run(run, 2.0, rounding={"threads": 1})
    assert "The runs differ" not in in_process(compare, *words).stdout
    make_run(run, 2.0, rounding={"threads": 2, "torch": "2"})
    says = "The runs differ in threads (2: vanilla-0.003-42; 1: svformer-0.003-42). Rounding alone"
    assert says in in_process(compare, *words).stdout


def test_modes_without_a_common_seed_have_no_difference(data, tmp_path, monkeypatch):
    trainer(lambda mode, _, seed: math.inf if (mode == "vanilla") == (seed == 42) else 2.0, monkeypatch)
    said = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", seeds=3)).stdout
    assert "svformer and vanilla have no seed in common that did not diverge; 2 of its 3 seeds diverged." in said
    assert table(said)["svformer"]["vs vanilla"] == "-"
    assert "vanilla is what the others are compared with; 1 of its 3 seeds diverged." in said


@pytest.mark.parametrize("words,says", [
    (["vanilla"], "name two modes or more"),
    (["vanilla", "svformer", "--value_mode=resformer"], "leave out value_mode, and name modes without --"),
    (["vanilla", "svformer", "--resume=auto"], "leave out resume"),
    (["vanilla", "svformer", "--init_from=x"], "leave out init_from"),
    (["vanilla", "svformer", "--rates=1e-3,1.0000000001e-3"], "and each 1.2 times the one before or more"),
    (["vanilla", "svformr"], "unknown value_mode 'svformr'; did you mean 'svformer'?"),
    (["vanilla", "svformer", "--value_mode=m.py"], "a file stands alone, as in `python train.py m.py`"),
    (["vanilla", "svformer", "--block_size=100", "--dry_run"], "is not a multiple of 100"),
    (["vanilla", "vanilla"], "vanilla is vanilla, which is there already; name each mode once"),
    (["vanilla", "svformer", "--rates=1e-3,1e-3"], "must be above 0, and each 1.2 times"),
    (["vanilla", "svformer", "--rates=0"], "must be above 0"),
    (["vanilla", "svformer", "--seeds=11"], "seeds=11 must be at most 10"),
    (["vanilla", "resformer", "--n_layer=1"], "acts in no layer of 0..0"),
])  # fmt: skip
def test_what_is_refused(words, says, data, tmp_path):
    refused(in_process(compare, *words_of(data, tmp_path / "out"), *words), says)


def test_modes_differ_in_the_mode_alone(data, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("value_mode = 'svformer'\nblock_size = 8\ndata_dir = 'elsewhere'\n")
    says = "mine.py sets block_size, data_dir besides its mode; give settings to all modes"
    refused(in_process(compare, *words_of(data, tmp_path / "out", "vanilla", mine)), says)


def test_two_compares_in_one_folder(data, tmp_path):
    with hold(tmp_path / "out"):
        says = f"another process is writing into {tmp_path / 'out'}; wait until it has ended"
        refused(in_process(compare, *words_of(data, tmp_path / "out", "vanilla", "svformer")), says)


def test_a_dry_run_counts_what_is_missing(data, tmp_path, monkeypatch):
    monkeypatch.setattr("common.jobs.guess_tokens_per_s", lambda cfg, corpus: 1.0)

    def last_line(*more):
        done = in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", *more), "--jobs=1")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    fair = ("--rates=1e-3,3e-3,9e-3", "--seeds=3", "--dry_run")
    assert last_line(*fair).startswith("to come: 10 runs, 15.4k tokens, about 4.3 hours (at most 20 runs, 30.7k tokens")
    assert last_line(*fair).endswith("; hours are a guess from one pass without compile")
    make_run(of_run(data, tmp_path), 2.0)
    assert last_line(*fair).startswith("to come: 9 runs") and "guess" not in last_line(*fair)
    assert last_line("--seeds=3", "--dry_run").startswith("to come: 5 runs")
    assert not list(tmp_path.glob("svformer*"))


def test_the_last_words_are_of_this_attempt(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("error: too little memory\n")
    begin = log.stat().st_size
    assert last_words(log, 0) == "too little memory" and last_words(log, begin) == "nothing was said"
    log.write_text(log.read_text() + "step 1\nerror: no disk\n\n")
    assert last_words(log, begin) == "no disk"


def test_small_runs_share_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("common.jobs.cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    for jobs, n_runs, gpus in ((0, 9, "01"), (0, 1, "0"), (1, 9, "0"), (5, 9, "01010"), (8, 3, "010")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        lanes = lanes_of("auto", jobs, n_runs)
        assert "".join(lane["CUDA_VISIBLE_DEVICES"] for lane in lanes) == gpus
        share = str(16 // len(gpus))
        assert {(lane["OMP_NUM_THREADS"], lane["TORCHINDUCTOR_COMPILE_THREADS"]) for lane in lanes} == {(share, share)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [lane["CUDA_VISIBLE_DEVICES"] for lane in lanes_of("cuda", 4, 9)] == ["4", "6", "7", "4"]


@pytest.mark.parametrize(
    "device,jobs,n_runs,n", [("cpu", 0, 99, 16), ("auto", 0, 3, 3), ("cpu", 2, 9, 2), ("mps", 0, 9, 1)]
)
def test_runs_at_a_time_without_gpus(device, jobs, n_runs, n, monkeypatch):
    monkeypatch.setattr("common.jobs.cores", lambda: 16)
    assert len(lanes_of(device, jobs, n_runs)) == n


# -- the real thing


UNTIL_ASKED = """
import signal, time
from common.runs import Metrics
from value_modes import Residual, ValueMode
def _step(self, record, step=Metrics.step):
    step(self, record)
    while record["step"] == 5 and not signal.getsignal(signal.SIGTERM).asked:
        time.sleep(0.01)
Metrics.step = _step
"""


@pytest.mark.slow
def test_it_trains_is_stopped_and_goes_on(data, tmp_path):
    """Two modes of files, side by side; Ctrl-C saves both; the numbers are those of an undisturbed run. Both wait after
    step 5 until they are asked to stop."""
    vanilla, mine = tmp_path / "vanilla.py", tmp_path / "mine.py"
    vanilla.write_text(UNTIL_ASKED + "value_mode = 'vanilla'")
    mode = "value_mode = ValueMode((Residual(lam=(1, 3)),), name='m')"
    mine.write_text(UNTIL_ASKED + mode)
    words = [ROOT / "compare.py", *words_of(data, tmp_path / "a", vanilla, mine, jobs=2)]
    process = subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.PIPE, text=True)
    runs = [tmp_path / "a" / f"{mode}-12-0.003-42" for mode in ("vanilla", "m")]
    while min(steps_done(run) for run in runs) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and said.splitlines()[-1] == "stopped"
    assert "stopping; runs that have begun save first, and Ctrl-C again does not wait for that" in said
    assert [[path.name for path in run.glob("step_*[0-9].safetensors")] for run in runs] == [
        ["step_00000005.safetensors"]
    ] * 2
    assert [read_run(run).final_loss for run in runs] == [None, None]
    done = script(*words)
    assert done.returncode == 0, done.stderr
    mine.write_text(f"from value_modes import Residual, ValueMode\n{mode}")
    whole = in_process(train, *words_of(data, tmp_path / "b", mine))
    assert whole.returncode == 0 and read_run(tmp_path / "b").final_loss == read_run(runs[1]).final_loss


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children of their parent's death")
def test_runs_end_with_the_comparison_that_started_them(data, tmp_path):
    """After a kill -9 of compare.py its run saves and ends, and the next start finds nobody writing."""
    mine = tmp_path / "mine.py"
    mine.write_text(UNTIL_ASKED + "value_mode = 'vanilla'")
    words = [ROOT / "compare.py", *words_of(data, tmp_path / "a", mine, "svformer", jobs=1)]
    process = subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.DEVNULL)
    run = tmp_path / "a/vanilla-12-0.003-42"
    while steps_done(run) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    with hold(run, seconds=60):
        assert (run / "step_00000005.safetensors").exists()


def test_a_run_that_fails_ends_with_its_own_sentence(data, tmp_path):
    words = words_of(data, tmp_path / "out", "vanilla", "svformer", attn="flash", jobs=1)
    says = r"vanilla-12-0.003-42 failed \(2\): .*flash.*; see .*train.log"
    assert re.search(says, script("compare.py", *words).stderr)
