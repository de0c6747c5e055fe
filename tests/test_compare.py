"""compare.py: its procedure on made-up losses, its answer on made-up runs, and a real comparison that is stopped."""

import dataclasses
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, config, in_process, make_data, refused, script

import compare
import train
from bench import coverage
from common import checkpoint, files
from common.files import hold, record_line, write_record
from common.jobs import Command, lanes_of, last_words, run_jobs, steps_done
from common.ranks import code_of_results
from common.runs import RUN, differences, read_kept, read_run
from common.statistics import dunnett, t_95
from common.verdict import FLOOR, Tuned, in_words, judge, search
from configurator import load_settings
from model import GPT
from train import settings_of
from value_modes import TABLE

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=128, micro_batch=8, warmup_steps=2)
SMALL |= dict(eval_tokens=256, max_steps=12, eval_every=12, save_every=12, dtype="float32", learning_rate=3e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "d")


def words_of(data, out, *words, **kw):
    return [*words, *(f"--{name}={value}" for name, value in (SMALL | dict(data_dir=data, out_dir=out) | kw).items())]


# -- the procedure


def followed(loss, rates):
    """({(rate, seed): loss} that the procedure asks for, in its order, the Tuned at its end)."""
    losses = {}

    def loss_of(*run):
        return losses.get(run)

    while missing := search(loss_of, rates, (42, 1))[0]:
        losses.update({run: loss(*run) for run in missing})
    return losses, search(loss_of, rates, (42, 1))[1]


def valley(at):
    return lambda rate, _: 2 + abs(math.log2(rate / at))


@pytest.mark.parametrize("loss,rates,asked,tuned", [
    (valley(2), (1, 2, 4), (1, 2, 4), Tuned(2, around=(1, 2, 4))),
    (valley(2), (1, 2, 5), (1, 2, 5), Tuned(2, around=(1, 2, 5))),
    (valley(8), (1,), (1,), Tuned(1)),
    # the grid grows at its edge, twice
    (valley(8), (1, 2, 4), (1, 2, 4, 8, 16), Tuned(8, around=(4, 8, 16))),
    (valley(0.5), (1, 2, 4), (1, 2, 4, 0.5, 0.25), Tuned(0.5, around=(0.25, 0.5, 1))),
    (valley(64), (1, 2, 4), (1, 2, 4, 8, 16), Tuned(16, is_edge=True)),
    (valley(1 / 64), (1, 2, 4), (1, 2, 4, 0.5, 0.25), Tuned(0.25, is_edge=True)),
    # 0.4 octaves above the middle one, whose neighbour there is hardly higher, a parabola promises much
    (lambda rate, _: math.log2(rate / 2**1.4) ** 2, (1, 2, 4), (1, 2, 4, 2.64), Tuned(2.64, around=(2, 2.64, 4))),
    # a rate that diverges ends the grid, and has no parabola beside it
    (lambda rate, _: math.inf if rate > 4 else -rate, (1, 2, 4), (1, 2, 4, 8), Tuned(4)),
    # a first seed that diverged at every rate ends the search
    (lambda _, seed: math.inf if seed == 42 else 2.5, (1, 2), (1, 2, 0.5, 0.25), Tuned(0.25)),
])  # fmt: skip
def test_the_search_for_a_rate(loss, rates, asked, tuned):
    runs, found = followed(loss, rates)
    more = [(tuned.rate, 1)] * math.isfinite(loss(tuned.rate, 42))
    assert list(runs) == [(rate, 42) for rate in asked] + more and found == tuned


def test_a_cliff_beside_a_rate_is_no_valley_on_its_other_side():
    losses, tuned = followed(lambda rate, _: 2.5 + 0.05 * math.log2(rate / 2) ** 2 + (rate > 3), (1, 2, 4))
    cells = {("vanilla", 2): {42: 2.5, 1: 2.5}} | {("m", rate): {} for rate, _ in losses}
    for (rate, seed), loss in losses.items():
        cells["m", rate][seed] = loss
    _, mode = judge(cells, {"vanilla": Tuned(2), "m": tuned})[0]
    assert tuned.rate == 2 and len(losses) == 7 and mode.best.gain < 0.01  # from three rates alone it is 0.11


# -- the answer, from runs that a made-up trainer leaves


@pytest.fixture
def trained():
    """[(mode, rate, seed)] that `compared` has trained."""
    return []


@pytest.fixture
def compared(data, tmp_path, monkeypatch, trained):
    """A function that says what compare.py says. In place of train.py each job leaves a folder with the loss(mode,
    rate, seed), where infinite means diverged, and ends with a code and its last words. bar gets (runs, runs that will
    be asked for later) of each round."""

    def call(*words, loss=None, ends=(0, "step 3: the loss is nan"), bar=None, **settings):
        def run_jobs(wanted, ended, lanes, later):
            while jobs := wanted():
                if bar is not None:
                    bar.append((len(jobs), later() // 12))
                for job in jobs:
                    cfg = load_settings(compare.TrainConfig, job.words[1:])
                    trained.append((cfg.value_mode.name, cfg.learning_rate, cfg.seed))
                    make_run(cfg, (loss or losses)(*trained[-1]))
                    ended(job, *ends)

        monkeypatch.setattr(compare, "run_jobs", run_jobs)
        done = in_process(compare, *words_of(data, tmp_path, *words, **settings))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def make_run(cfg, loss, **changed):
    """A run's folder as train.py leaves it: config.json, env.json and metrics.jsonl."""
    corpus = compare.Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, False, cfg.bos)
    folder, config = Path(cfg.out_dir), settings_of(cfg, corpus, None)[0]
    write_record(folder / "config.json", RUN, config)
    write_record(folder / "env.json", train.ENVIRONMENT, {"commit": "c", "processor": "p"})
    start = {"event": "start", "step": 0, "code": code_of_results(), "dtype": "float32"}
    start["rounding"] = {"device": "the cpu of A", "threads": 1}
    mode = {"definition": config["value_mode"], "value_mode": config["value_mode_name"]}
    start |= {"max_steps": cfg.max_steps, "batch_tokens": cfg.batch_tokens} | mode | changed
    records = [start]
    for step in range(start["step"] + 1, 1 + cfg.max_steps):
        records.append({"step": step, "loss": 3.0 - 0.01 * step, "tokens": step * 128, "tokens_per_s": 100.0})
    if math.isfinite(loss):
        records.append({"event": "eval", "step": cfg.max_steps, "val_mean": loss, "val": {"a": loss}})
    else:
        records.append({"event": "diverged", "step": cfg.max_steps, "why": "the loss is nan"})
    (folder / "metrics.jsonl").write_text("".join(record_line("train.py's metrics", r) for r in records))
    return folder


def of_run(data, out, mode="vanilla", seed=42, **kw):
    """The TrainConfig of a run of a comparison."""
    words = words_of(data, out, "vanilla", "svformer", **kw)
    return load_settings(compare.CompareConfig, list(map(str, words))).of_run(mode, 3e-3, seed)


def test_a_folder_that_says_two_things_is_refused(data, tmp_path, compared):
    """Its config, its records and its checkpoints are of one run, or nobody knows whose loss it is."""
    compared("vanilla", "svformer")
    words = words_of(data, tmp_path, "vanilla", "svformer")
    vanilla, svformer = (tmp_path / f"{mode}-12-0.003-42" for mode in ("vanilla", "svformer"))
    lines = (vanilla / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for changed, *says in (
        ([(svformer / "metrics.jsonl").read_bytes()], "value_mode", "remove it, or set another --out_dir"),
        (lines[:2] + lines[3:], "it lacks steps, or has some twice"),
        ([*lines, lines[-1]], "it has the same evaluation twice"),
        (lines[1:], "it has no record of a start"),
    ):
        (vanilla / "metrics.jsonl").write_bytes(b"".join(changed))
        refused(in_process(compare, *words), *says)
    (vanilla / "metrics.jsonl").write_bytes(b"".join(lines))
    # another model's weights
    for mode, says in (
        ("svformer", " is svformer, but its records are vanilla"),
        ("vanilla", " and its records have different validation losses"),
    ):
        model = GPT(config(mode, vocab_size=257, n_layer=2, n_head=2, n_embd=32, block_size=64))
        path = checkpoint.save(vanilla, 12, model, "tokenizer", val_loss=1.0)
        refused(in_process(compare, *words), path.name + says)
        path.unlink()
    # settings of another seed, other data, or none
    settings = files.read_record(vanilla / "config.json", RUN)
    for name, value in (("data", "0" * 16), ("seed", 7)):
        write_record(vanilla / "config.json", RUN, settings | {name: value})
        refused(in_process(compare, *words), f"holds another run ({name}={value} instead of {settings[name]})")
    (vanilla / "config.json").unlink()
    refused(in_process(compare, *words), "vanilla-", "has lost its config.json; remove the folder")
    # a kill before config.json was written leaves an empty file, and the run begins anew
    (vanilla / "metrics.jsonl").write_bytes(b"")
    compared("vanilla", "svformer")


def table(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0] == "|"]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


LEVELS = {"vanilla": 2.5, "resformer": 2.49, "resformer_lambda": 2.40, "svformer": 2.6}
RATES = "1.5e-3,3e-3,6e-3"


def losses(mode, rate, seed):
    """Each mode has its own level and its own best rate; seeds move all alike, and each run by a little."""
    noise = {42: 0.001, 1: -0.002, 2: 0.001}[seed] * (1 if mode == "vanilla" else -2)
    at = 6e-3 if mode == "svformer" else 3e-3
    return LEVELS[mode] + 0.1 * abs(math.log2(rate / at)) + 0.02 * (seed == 1) + noise


def test_a_fair_comparison(tmp_path, compared, trained):
    said = compared(*LEVELS, rates=RATES, seeds=3)
    rows = table(said)
    assert list(rows) == list(LEVELS) and len(trained) == len(set(trained)) == 4 * 3 + 1 + 4 * 2  # 1: svformer's edge
    assert rows["svformer"]["rate"] == "0.006" and rows["vanilla"]["val loss"] == f"{2.5 + 0.02 / 3:.4f}"
    assert [rows[mode]["KV bytes/token (bf16)"] for mode in ("vanilla", "svformer")] == ["256", "192"]
    # by hand: vanilla's residuals are 9/4 of the noise, the others' 3/4: 6 (81 + 27) / 16 squares, 6 degrees of freedom
    # ± is 2.447 × 0.0026 × √(2/3 + 1/9), of which 1/9 is the floor
    assert rows["resformer_lambda"]["vs vanilla"] == "-0.1000 ± 0.0056"
    assert "resformer_lambda is better than vanilla by 0.1000 ± 0.0056 nats." in said
    assert "svformer is worse than vanilla by 0.1000 ± 0.0056 nats." in said
    assert (tmp_path / "compare.png").exists()
    # again: nothing is trained twice
    trained.clear()
    assert compared(*LEVELS, rates=RATES, seeds=3).endswith(said[said.index("| mode") :]) and not trained


def test_what_cannot_be_told_apart(compared):
    said = compared("resformer", "vanilla", seeds=3, loss=lambda mode, _, seed: 0.03 * (len(mode) * (seed + 3) % 7))
    assert re.search(r"resformer cannot be told apart from vanilla \([+-]0\.\d+ ± 0\.\d+ nats, p = [\d.]+\)\.", said)


def test_one_seed_says_what_it_cannot_say(tmp_path, compared):
    said = compared("vanilla", "svformer", rates="3e-3,6e-3")
    assert "svformer ends 0.097 nats above vanilla." in said
    assert "One seed says nothing about noise. Add --seeds=5." in said
    assert "Add --seeds=3." in compared("vanilla", "svformer", "resformer")
    assert table(said)["svformer"]["vs vanilla"] == "+0.0970" and "p, corrected" not in table(said)["svformer"]
    assert "A single rate favours the mode that it suits best." not in said
    assert "A single rate favours the mode that it suits best." in compared("vanilla", "svformer")
    said = compared("vanilla", "svformer", out_dir=tmp_path / "equal", loss=lambda *_: 2.5)
    assert "svformer ends level with vanilla." in said


def curved(levels, bests, noise=0.0):
    """loss(mode, rate, seed): a parabola over log2(rate); of seeds 1 and 2 the noise cancels."""

    def loss(mode, rate, seed):
        signs = {42: 0, 1: 1, 2: -1}[seed] * (1 if mode == "vanilla" else -1)
        return levels[mode] + 0.05 * math.log2(rate / bests[mode]) ** 2 + signs * noise

    return loss


def test_a_parabola_finds_the_rate_between_those_tried(compared, monkeypatch):
    """Vanilla's best rate is 0.2 octaves above the middle of the grid, where it loses 0.002."""
    drawn = []
    monkeypatch.setattr(compare, "comparison", lambda path, effects, *_: drawn.extend(effects))
    loss = curved({"vanilla": 2.5, "svformer": 2.49}, {"vanilla": 3e-3 * 2**0.2, "svformer": 3e-3}, 0.001)
    said = compared("vanilla", "svformer", rates=RATES, seeds=3, loss=loss)
    rows = table(said)
    numbers = [rows["vanilla"][name] for name in ("rate", "val loss", "parabola's rate", "its loss")]
    assert numbers == ["0.003", "2.5020", "0.0034", "2.5000"]
    assert rows["svformer"]["its loss"] == rows["svformer"]["val loss"] == "2.4900"
    assert "A parabola puts the best rate of vanilla at 0.0034, with a loss 0.002 lower." in said
    # by hand: residuals are 4 × 0.001² with 2 degrees of freedom. Vanilla's three rates count -0.08, 0.96 and 0.12. The
    # outer two have the first seed alone, so its shift, the mean of both modes' deviations, is taken off them.
    of_42 = 0.12 - 0.08
    vanilla = [-0.96 / 3 + of_42 / 3, -0.96 / 3 - of_42 / 6, -0.96 / 3 - of_42 / 6, 0.08, -0.12]
    svformer = [1 / 3 + of_42 / 3, 1 / 3 - of_42 / 6, 1 / 3 - of_42 / 6]
    error = (2e-6 * (sum(weight**2 for weight in vanilla + svformer) + 1 / 9)) ** 0.5  # 1/9: the floor
    half = math.hypot(4.3027 * error, 1.96 * 0.05 * 0.2**2)  # the gain, which nobody has trained
    assert rows["svformer"]["vs vanilla"] == f"-0.0100 ± {half:.4f}"
    # the figure has the same difference, of each seed too
    (effect,) = drawn
    assert effect.gap == pytest.approx(-0.01) == pytest.approx(statistics.mean(effect.seeds)) and effect.differs


@pytest.mark.parametrize("seed,seeds", [(42, [42, 1, 2]), (11, [11, 12, 13])])
def test_fresh_seeds_are_none_of_the_usual_ones(seed, seeds):
    words = ["vanilla", "svformer", f"--seed={seed}", "--seeds=3"]
    assert load_settings(compare.CompareConfig, words).all_seeds == seeds


def test_what_no_parabola_corrects_is_said(tmp_path, compared):
    def falls(mode, rate, _):
        return {"vanilla": 2.5, "svformer": 2.5 - rate, "resformer": 2.5 - rate if rate < 4e-3 else math.inf}[mode]

    said = compared("vanilla", "svformer", "resformer", rates="1e-3,2e-3", loss=falls)
    edge = "The best rate of svformer, 0.008, is at the edge, and a better one may lie beyond it."
    assert edge in said
    assert table(said)["svformer"]["rate"] == "0.008 (edge)" and "its loss" not in table(said)["svformer"]
    assert "resformer diverged at a rate next to 0.002, so no parabola corrects its rate." in said
    # and of a base
    said = compared("svformer", "resformer", rates="1e-3,2e-3", loss=falls)
    assert f"\n{edge[:-1]}, so the others look better than they are.\n" in said


def test_a_mode_that_diverges_has_an_infinite_loss(tmp_path, compared):
    def diverges(*run):
        return math.inf if run[0] == "vanilla" else losses(*run)

    said = compared("vanilla", "svformer", "resformer", rates="3e-3,6e-3", loss=diverges)
    assert "vanilla-12-0.003-42: diverged, so its loss counts as infinite: step 3: the loss is nan" in said
    assert "vanilla diverged at every rate down to 0.00075. Try lower --rates." in said
    assert "resformer ends at 2.4880 nats." in said and "as many tokens" not in said
    assert table(said)["vanilla"]["val loss"] == "diverged" and "vs vanilla" not in table(said)["svformer"]
    said = compared("svformer", "vanilla", "resformer", out_dir=tmp_path / "all", loss=lambda *run: math.inf)
    assert said.count("diverged at every rate down to 0.003") == 3


def test_a_run_that_diverged_at_once_is_in_the_report(data, tmp_path, compared):
    """train.py records that before the step, so its records have no step."""
    cfg = of_run(data, tmp_path, max_steps=1)
    start, _, diverged = (make_run(cfg, math.inf) / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (Path(cfg.out_dir) / "metrics.jsonl").write_bytes(start + diverged)
    compared("vanilla", "svformer", "--report", max_steps=1)
    assert read_kept(tmp_path / "runs.jsonl")["vanilla-1-0.003-42"]["losses"] == []


def test_without_a_base_no_noise_is_blamed(compared):
    """Nothing has an interval then, though seeds show a noise."""
    lost = lambda mode, rate, seed: math.inf if mode == "vanilla" else 2.5 + {"svformer": 0.1}.get(mode, 0) * seed  # noqa: E731
    said = compared("vanilla", "svformer", "resformer", "neutreno", seeds=3, loss=lost)
    assert "of the squared noise" not in said and "±" not in said


def test_the_figure_says_what_it_shows(compared, monkeypatch):
    """Its intervals too, where one seed borrows the noise of other runs."""
    titles = []
    monkeypatch.setattr(compare, "comparison", lambda path, effects, curves, title, base: titles.append(title))
    for seeds in (1, 3, 1):
        compared("vanilla", "svformer", seeds=seeds)
    said = ["one seed", "3 seeds (ticks), 95% intervals", "one seed, 95% intervals"]
    assert [title.split("\n")[1] for title in titles] == said


def test_seeds_that_diverge_are_said(tmp_path, compared):
    lost = lambda *run: math.inf if run[::2] == ("vanilla", 1) else losses(*run)  # noqa: E731
    said = compared("vanilla", "svformer", seeds=3, loss=lost)
    assert "1 of the 3 seeds of vanilla diverged." in said
    assert table(said)["vanilla"]["seeds"] == "2" and table(said)["svformer"]["vs vanilla"].startswith("+0.")
    lost = lambda mode, _, seed: math.inf if (mode == "vanilla") == (seed == 42) else 2.0  # noqa: E731
    said = compared("vanilla", "svformer", seeds=3, out_dir=tmp_path / "b", loss=lost)
    assert "For every seed, svformer or vanilla diverged, so they can't be compared. 2 of the 3 seeds" in said
    assert "vs vanilla" not in table(said)["svformer"]


def test_one_seed_borrows_the_noise_of_runs_that_are_there(data, tmp_path, compared):
    """Of two modes with three seeds, one of which this comparison does not name."""
    compared("vanilla", "resformer", seeds=3)
    other = of_run(data, tmp_path, seed=1, n_embd=64)
    make_run(dataclasses.replace(other, out_dir=str(tmp_path / "wider")), 9.0)  # it says nothing of these
    said = compared("vanilla", "svformer")
    noise = (2 * (2 * 0.0015**2 + 0.003**2) / 2) ** 0.5  # by hand, with 2 degrees of freedom
    assert f"That noise ({noise:.4f} nats) comes from other runs in {tmp_path}, which have several seeds." in said
    assert table(said)["svformer"]["vs vanilla"].endswith(f"± {4.303 * noise * 2**0.5:.3f}")
    # whose rounding is the largest says nothing
    said = compared("vanilla", "svformer", "resformer_lambda", rates=RATES)
    assert "That noise (" in said and "of the squared noise" not in said


def test_an_interval_without_0_that_is_no_proof_is_explained(compared):
    """svformer's p is 0.03, but there are three modes. With a single rate, ± has no floor."""

    def level(mode, rate, seed):
        noise = {42: 0.001, 1: -0.002, 2: 0.001}[seed] * (1 if mode == "vanilla" else -2)
        return 2.5 + 0.006 * (mode == "svformer") + noise

    said = compared(*LEVELS, seeds=3, loss=level)
    assert "svformer cannot be told apart from vanilla (+0.0060 ± 0.0052 nats, p = 0.07)." in said
    assert "Of several intervals, one may exclude 0 by luck." in said
    assert "by luck" not in compared("vanilla", "svformer", seeds=3, loss=level)


def test_modes_on_different_processors_are_not_told_apart(data, tmp_path, compared, monkeypatch):
    """Neither in words nor in the figure nor in tokens, though p is small. Most seeds must have run on the same one."""
    drawn = []
    monkeypatch.setattr(compare, "comparison", lambda path, effects, *_: drawn.append([e.differs for e in effects]))
    make_runs(data, tmp_path, 48, 2.3)
    there = {"device": "the cpu of B", "threads": 1}
    for seed in (42, 1, 2):
        make_run(of_run(data, tmp_path, "svformer", seed), losses("svformer", 6e-3, seed), rounding=there)
    said = compared("vanilla", "svformer", "resformer_lambda", seeds=3)
    assert "svformer ends 0.1000 ± 0.0068 nats above vanilla, but mostly on another processor" in said
    assert "resformer_lambda is better than vanilla" in said and drawn == [[False, True]]
    row = table(said)["svformer"]
    assert float(row["p, corrected"]) < 1e-3 and row["× tokens"].endswith(" to 1.00")
    make_run(of_run(data, tmp_path, "svformer", 2), losses("svformer", 6e-3, 2))
    assert "mostly on another processor" in compared("vanilla", "svformer", "resformer_lambda", seeds=3)
    make_run(of_run(data, tmp_path, "svformer", 1), losses("svformer", 6e-3, 1))
    assert "svformer is worse than vanilla by" in compared("vanilla", "svformer", "resformer_lambda", seeds=3)


def test_the_modes_that_are_left_out_are_said(data, tmp_path, compared):
    """But not those of other settings, or before there is a p."""
    compared("resformer_lambda", "svformer", max_steps=13)
    assert "also has runs" not in compared("vanilla", "resformer")
    assert "also has runs" not in compared("vanilla", "svformer", "resformer", seeds=3)
    said = compared("vanilla", "resformer_lambda", seeds=3)
    assert f"{tmp_path} also has runs of resformer, svformer with these settings; if you left them out" in said
    assert "because of their results, multiply p by 3, or name all of them in one command." in said


def test_whoever_looks_again_is_told(data, tmp_path, compared):
    """With more or other seeds, or other rates. Not whoever types the same again, or compares other modes."""
    says = "These modes were compared here before, with other seeds or rates (answers.json)."
    words, loss = ("vanilla", "svformer", "resformer"), lambda mode, _, seed: len(mode) + seed % 3  # noqa: E731
    compared(*words, loss=loss)  # one seed has no p
    for again in (dict(seeds=2), dict(seeds=2), dict(max_steps=13, seeds=3)):
        assert says not in compared(*words, loss=loss, **again)
    assert says in compared("vanilla", "svformer", loss=loss, seeds=3)
    assert says not in compared("vanilla", "neutreno", loss=loss, seeds=4)
    assert says in compared(*words, loss=loss, seed=11, seeds=2)
    assert says in compared(*words, loss=loss, rates=(3e-3, 6e-3), seeds=2)


def test_a_damaged_record_of_answers_ends_it_before_any_work(data, tmp_path, compared):
    compared("vanilla", "svformer", seeds=2)
    (tmp_path / "answers.json").write_text("{")
    refused(in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", seeds=3)), "answers.json is damaged")
    assert not list(tmp_path.glob("*-2"))


def test_the_same_command_gives_the_same_answer(compared):
    """Also where the folder has runs that the plan asks about, but that the search does not need."""
    compared("vanilla", "svformer", rates=(3e-3,), seeds=3)
    one, two = (compared("vanilla", "svformer", rates=RATES, seeds=3) for _ in range(2))
    assert one[one.index("| mode") :].split("These modes")[0] == two[two.index("| mode") :].split("These modes")[0]


def test_who_makes_most_of_the_noise_is_said(compared):
    def noisy(mode, rate, seed):
        return 2.5 + {42: 0, 1: 1, 2: -1}[seed] * {"vanilla": 0.03, "svformer": 0.001}.get(mode, 0.002)

    said = compared("vanilla", "svformer", "resformer", seeds=3, loss=noisy)
    assert "vanilla accounts for 67% of the squared noise. If it is noisier" in said and "multiply each p by 2." in said
    assert "of the squared noise" not in compared("vanilla", "svformer", seeds=3)


def test_a_report_has_what_a_page_needs(tmp_path, compared):
    said = compared("vanilla", "svformer", "--report", rates=RATES, seeds=3)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    lines = said[said.index("| mode") :].splitlines()
    assert all(line in page for line in lines if not line.startswith("wrote ")) and "](compare.png)" in page
    kept = read_kept(tmp_path / "runs.jsonl")
    assert len(kept) == len(list(tmp_path.glob("*/metrics.jsonl"))) and (tmp_path / "compare.png").exists()
    of = kept["svformer-12-0.006-1"]
    assert of["val"] == {"12": pytest.approx(losses("svformer", 6e-3, 1))} and of["settings"]["learning_rate"] == 6e-3
    assert of["settings"]["value_mode_name"] == "svformer" and of["domains"] == {"a": pytest.approx(of["val"]["12"])}


def test_the_bar_counts_seeds_that_will_be_asked_for(compared):
    bar = []
    compared("vanilla", "resformer", rates=RATES, seeds=3, bar=bar)
    assert bar == [(6, 4), (4, 0)]


def make_runs(data, out, steps, loss, seeds=(42, 1, 2)):
    """Vanilla's runs of another length."""
    for seed in seeds:
        make_run(of_run(data, out, seed=seed, max_steps=steps), loss)


def test_tokens_are_counted_by_vanillas_other_length(data, tmp_path, compared):
    words = ("vanilla", "resformer_lambda", "--seeds=3")
    asks = "would vanilla need? To find out, run this with --max_steps=24,"
    assert asks in compared(*words)
    make_runs(data, tmp_path, 48, 2.3, seeds=(42,))
    assert asks in compared(*words)
    make_runs(data, tmp_path, 48, math.inf, seeds=(1, 2))
    assert asks in compared(*words)
    make_runs(data, tmp_path, 48, 2.3, seeds=(1, 2))
    said = compared(*words)
    least, most = map(float, table(said)["resformer_lambda"]["× tokens"].split(" to "))
    # vanilla's 2.5067 falls to 2.3 in 4 x the tokens: a straight line over ln D reaches 2.4067 at 1.96 x
    assert 1.3 < least < 1.6 and 1.96 < most < 2.2
    assert (
        f"To reach the loss of resformer_lambda, vanilla needs {least:.2f} to {most:.2f} times as many tokens." in said
    )
    # the nearest longer length counts, whatever shorter ones say; vanilla's row has no numbers of a difference
    make_runs(data, tmp_path, 6, 2.6)
    make_runs(data, tmp_path, 96, 2.1)
    rows = table(compared(*words))
    assert rows["resformer_lambda"]["× tokens"] == f"{least:.2f} to {most:.2f}"
    assert [rows["vanilla"][name] for name in ("vs vanilla", "p, corrected", "× tokens")] == ["-"] * 3


@pytest.mark.parametrize("steps,loss", [(16, 2.3), (48, 2.7)])
def test_a_length_that_is_nearly_the_same_or_no_better_says_nothing(steps, loss, data, tmp_path, compared):
    make_runs(data, tmp_path, steps, loss)
    said = compared("vanilla", "resformer_lambda", seeds=3)
    assert "× tokens" not in table(said)["resformer_lambda"] and "would vanilla need?" in said


def test_a_range_without_end_in_words():
    assert in_words((1.234, math.inf)) == "1.23 or more" and in_words((0.5, 2)) == "0.50 to 2.00"


def test_weights_that_could_not_be_saved_are_said(compared):
    said = compared("vanilla", "svformer", ends=(2, "step_00000012.safetensors cannot be written: No space left"))
    assert "vanilla-12-0.003-42: 2.5010, but its weights may not have been saved: step_00000012" in said


# -- how often it holds, in short; `python -m bench.coverage` has the long form


@pytest.mark.parametrize("seeds,of,least,before", [
    (3, {}, 0.93, 1.0), (5, {"best_rates": "half an octave off"}, 0.92, 0.97),
    (5, {"best_rates": "random", "n_modes": 4}, 0.92, 0.93),
    (5, {"cliff": 1.0}, 0.9, 1.0),
])  # fmt: skip
def test_intervals_hold_the_difference_at_the_best_rates(seeds, of, least, before):
    found = coverage.count(coverage.Case(n_seeds=seeds, **of), 300)
    assert least <= found["covers"] <= 0.98 and found["covers before"] < before and found["false"] <= 0.09


def test_the_floor_is_what_parabolas_miss_of_the_recorded_curves(monkeypatch):
    """Of the difference of two modes, without noise, in that of the records."""
    noise, case = coverage.NOISE, coverage.Case(n_seeds=2, **coverage.NULLS["the same, all recorded curves"])
    monkeypatch.setattr(coverage, "NOISE", 0.0)
    monkeypatch.setattr(coverage, "SHIFT", 0.0)
    rng = coverage.np.random.default_rng(0)
    missed = [judge(*coverage.draw_equal(rng, case))[0][1].gap for _ in range(500)]
    assert statistics.fmean(gap**2 for gap in missed) ** 0.5 / noise == pytest.approx(FLOOR, abs=0.05)


def test_every_difference_of_tuned_modes_has_the_floor():
    """Also where there is no parabola. Half of its square is the base's, and so in all differences."""
    rng = coverage.np.random.default_rng(3)
    cells = {(mode, rate): {42: rate + rng.normal()} for mode in "abc" for rate in (1, 2, 4)}
    for mode, rate in (("a", 2), ("b", 4), ("c", 2)):
        cells[mode, rate] |= {1: rng.normal(), 2: rng.normal()}
    tuned = {"a": Tuned(2, around=(1, 2, 4)), "b": Tuned(4, is_edge=True), "c": Tuned(2)}
    (_, *answers), fit = judge(cells, tuned)
    (base, *without), _ = judge(cells, tuned, floor=0.0)
    for a, b in zip(answers, without, strict=True):
        assert a.interval**2 - b.interval**2 == pytest.approx((t_95(fit.df) * fit.noise) ** 2 / 9)
    # by the formula of results/PLAN.md, whose correlation is of the two sums over the cells
    b, c = (coverage.np.zeros(len(fit.values)) for _ in range(2))
    for mode, sums in (("b", [b]), ("c", [c]), ("a", [b, c])):
        for cell, weight in base.best.weights.items() if mode == "a" else [((mode, tuned[mode].rate), -1)]:
            for x in sums:
                x[fit.cells.index(cell)] -= weight
    both = (t_95(fit.df) * fit.noise) ** 2 * (b @ fit.inverse @ c + 1 / 18) + (1.96 * base.best.gain) ** 2
    ts = [abs(a.gap) * t_95(fit.df) / a.interval for a in answers]
    correlation = both / (answers[0].interval * answers[1].interval)
    assert [a.p for a in answers] == pytest.approx(dunnett(ts, [[1, correlation], [correlation, 1]], fit.df))


@pytest.mark.parametrize("length,m", [(2.0, 1.0), (2.0, 1.1), (0.5, 1.3)])
def test_ranges_of_tokens_hold_and_do_not_contradict(length, m):
    found = coverage.count(coverage.Case(length=length, m=m), 300)
    assert 0.92 <= found["m covers"] and found["contradicts"] == 0


@pytest.mark.parametrize("mode", coverage.RECORDED)
def test_a_recorded_curve_goes_through_the_records(mode):
    """Between them it only rises or only falls, as scipy's does."""
    interpolate, losses = pytest.importorskip("scipy.interpolate"), coverage.RECORDED[mode]
    curve, best = coverage.recorded(mode), losses.index(min(losses))
    found = [min(losses) + curve(octaves - best) for octaves in range(-1, 6)]
    assert found[1:-1] == pytest.approx(losses)
    assert (found[1] - found[0], found[-1] - found[-2]) == pytest.approx((losses[1] - losses[0], losses[4] - losses[3]))
    inside = coverage.np.linspace(1, 3, 21)  # where the slopes at both ends do not count
    right = interpolate.PchipInterpolator(range(5), losses)(inside)
    assert [min(losses) + curve(octaves - best) for octaves in inside] == pytest.approx(right)


def drawn(n, **of):
    """Losses of n comparisons with two flat curves: {mode: those at the lowest rate}."""
    rng, rate, found = coverage.np.random.default_rng(0), coverage.RATE / 2, {"vanilla": [], "m": []}
    for _ in range(n):
        cells, _ = coverage.draw_runs(rng, coverage.Case(n_seeds=2, **of), dict.fromkeys(found, lambda rate: 2.0))
        for mode in found:
            found[mode].append(cells[mode, rate][0])
    return found


def test_a_processor_adds_to_vanilla_alone():
    normal, moved = drawn(1), drawn(1, shift=0.5)
    assert moved == {"vanilla": pytest.approx([normal["vanilla"][0] + 0.5]), "m": normal["m"]}


def test_tails_leave_the_standard_deviation(monkeypatch):
    """Of t with 3 degrees of freedom half of the draws are within 0.765, which is 0.442 standard deviations."""
    monkeypatch.setattr(coverage, "SHIFT", 0.0)
    for of, quartile in (({}, 0.674), ({"tails": 3}, 0.442)):
        middle = statistics.median(abs(loss - 2) for loss in drawn(2000, **of)["m"])
        assert middle / coverage.NOISE == pytest.approx(quartile, rel=0.06)


@pytest.mark.parametrize("of_base", [False, True])
@pytest.mark.parametrize("mode", ["vanilla", "m"])
def test_a_cliff_is_where_it_is_drawn(of_base, mode):
    case = coverage.Case(cliff=1.0, cliff_at=(1.2, 1.3), is_cliff_of_base=of_base)
    curve = coverage.draw_curve(coverage.np.random.default_rng(0), case, mode, 2.0)
    above = [curve(coverage.RATE * 2**octaves) - coverage.parabola(octaves) for octaves in (1.2, 1.3)]
    assert above == pytest.approx([2, 3 if (mode == "vanilla") == of_base else 2])


def test_a_noisy_base_is_named_or_covered():
    assert coverage.count(coverage.Case(n_modes=4, noisier=3.0), 300)["named"] >= 0.75


def test_the_long_form_prints_its_tables(monkeypatch):
    for name, value in (("NULLS", {"same curve": {}}), ("FOUND", ["same curve"]), ("SIZES", [(2, 2)])):
        monkeypatch.setattr(coverage, name, value)
    said = in_process(coverage, "--repetitions=2").stdout
    for row in ("same curve | 2 | 2", "-0.05 | same curve | 2 | 2", "1.3 | 2 | 2 | 2", "a pair chosen out of six"):
        assert f"\n| {row}" in said


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


@pytest.mark.parametrize("says,setting,start", [
    ("holds another run (n_embd=64 instead of 32); remove it, or set another --out_dir", {"n_embd": 64}, {}),
    ("holds another run (a different model.py)", {}, {"code": code_of_results() | {"model.py": "0"}}),
    ("holds another run (a different model.py)", {}, {"code": {}}),
    ("holds another run (weight_decay=0.5 instead of 0.1)", {}, {"weight_decay": 0.5}),  # and resumed with 0.1
    ("holds another run (its first 6 steps are another run's)", {}, {"step": 6}),
])  # fmt: skip
def test_a_run_of_other_settings_or_code_is_refused(says, setting, start, data, tmp_path):
    make_run(of_run(data, tmp_path, **setting), 2.0, **start)
    refused(in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer")), says)


def test_what_changes_rounding_alone_may_differ(data, tmp_path, compared, trained):
    make_run(of_run(data, tmp_path, attn="eager", micro_batch=4), 2.0)
    compared("vanilla", "svformer")
    assert [mode for mode, *_ in trained] == ["svformer"]


def test_a_mode_that_changed_is_named_by_its_field():
    made, wanted = ({"mode": {"residuals": [{"lam": [1, x], "of": "v"}]}, "n": 1} for x in (3, 2))
    assert differences(made, wanted) == ["mode.residuals.0.lam.1=3 instead of 2"]
    assert differences({"n": [1]}, {"n": [1, 2]}) == ["n=[1] instead of [1, 2]"] and not differences(made, made)


def test_runs_in_two_precisions_are_not_compared(data, tmp_path):
    for mode, dtype in (("vanilla", "bfloat16"), ("svformer", "float32")):
        make_run(of_run(data, tmp_path, mode, dtype="auto"), 2.0, dtype=dtype)
    words = words_of(data, tmp_path, "vanilla", "svformer", dtype="auto")
    refused(in_process(compare, *words), "are in bfloat16 and float32; set --dtype")


def test_a_precision_is_what_auto_became(data, tmp_path, compared, trained):
    """--dtype is what the message above advises."""
    make_run(of_run(data, tmp_path, dtype="auto"), 2.0, dtype="float32")
    compared("vanilla", "svformer", dtype="float32")
    assert [mode for mode, *_ in trained] == ["svformer"]
    says = "vanilla-12-0.003-42 holds another run (dtype=float32 instead of bfloat16); remove it"
    refused(in_process(compare, *words_of(data, tmp_path, "vanilla", "svformer", dtype="bfloat16")), says)
    compared("vanilla", "svformer", dtype="auto")


def test_machines_that_differ_are_said(data, tmp_path, compared):
    assert "The runs differ" not in compared("vanilla", "svformer")
    make_run(of_run(data, tmp_path), 2.0, rounding={"device": "the cpu of A", "threads": 2, "torch": "2"})
    says = "The runs differ in threads (2: vanilla-0.003-42; 1: svformer-0.003-42). Rounding alone"
    assert says in compared("vanilla", "svformer")


@pytest.mark.parametrize("words,says", [
    (["vanilla"], "name two modes or more"),
    (["vanilla", "svformer", "--value_mode=resformer"], "leave out value_mode, and name modes without --"),
    (["vanilla", "svformer", "--resume=auto"], "leave out resume"),
    (["vanilla", "svformer", "--init_from=x"], "leave out init_from"),
    (["vanilla", "svformer", "--rates=1e-3,1.0000000001e-3"], "and each at least 1.4 times the one before"),
    (["vanilla", "svformr"], "unknown value_mode 'svformr'; did you mean 'svformer'?"),
    (["vanilla", "svformer", "--value_mode=m.py"], "give a file without --value_mode=, as in `python train.py m.py`"),
    (["vanilla", "svformer", "--block_size=100", "--dry_run"], "is not a multiple of 100"),
    (["vanilla", "vanilla"], "vanilla names vanilla a second time; name each mode once"),
    (["vanilla", "svformer", "--rates=0"], "must be above 0"),
    (["vanilla", "svformer", "--seeds=11"], "seeds=11 must be at most 10"),
    (["vanilla", "resformer", "--n_layer=1"], "residual 1 (of='v') acts in no layer"),
])  # fmt: skip
def test_what_is_refused(words, says, data, tmp_path):
    refused(in_process(compare, *words_of(data, tmp_path / "out"), *words), says)


def test_modes_differ_in_the_mode_alone(data, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("value_mode = 'svformer'\nblock_size = 8\ndata_dir = 'elsewhere'\n")
    says = "mine.py sets block_size, data_dir besides its mode; put settings for all modes into"
    refused(in_process(compare, *words_of(data, tmp_path / "out", "vanilla", mine)), says)


def test_two_compares_in_one_folder(data, tmp_path):
    with hold(tmp_path / "out"):
        says = f"another process is writing into {tmp_path / 'out'}; wait until it has finished"
        refused(in_process(compare, *words_of(data, tmp_path / "out", "vanilla", "svformer")), says)


def test_a_dry_run_counts_what_is_missing(data, tmp_path, compared, monkeypatch):
    monkeypatch.setattr("common.jobs.guess_tokens_per_s", lambda cfg, corpus: 1.0)

    def last_line(*more):
        return compared("vanilla", "svformer", "--dry_run", "--jobs=2", *more).splitlines()[-1]

    fair = ("--rates=1e-3,3e-3,9e-3", "--seeds=3")
    assert last_line(*fair).startswith("still to run: 10 runs, 15.4k tokens, about 2.1 hours (at most 20 runs,")
    assert last_line(*fair).endswith("2 at a time; hours are a guess from one pass without compile")
    make_run(of_run(data, tmp_path), 2.0)
    assert last_line(*fair).startswith("still to run: 9 runs") and "guess" not in last_line(*fair)
    assert last_line("--seeds=3").startswith("still to run: 5 runs")
    assert not list(tmp_path.glob("svformer*"))
    compared("vanilla", "svformer", *fair)
    assert last_line(*fair) == "still to run: 0 runs, 0 tokens, about 0.0 hours, 2 at a time"


def test_a_mode_that_does_not_fit_is_named(data, tmp_path):
    words = words_of(data, tmp_path, "vanilla", "resformer_v3", n_layer=2)
    refused(in_process(compare, *words), "resformer_v3: value_mode names layers [2], but there are only 0..1")


def test_the_last_words_are_of_this_attempt(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("error: too little memory\n")
    begin = log.stat().st_size
    assert last_words(log, 0) == "too little memory" and last_words(log, begin) == "it printed nothing"
    log.write_text(log.read_text() + "step 1\nerror: no disk\n\n")
    assert last_words(log, begin) == "no disk"


def test_small_runs_share_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("common.jobs.cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for jobs, n_runs, gpus in ((0, 9, "01"), (0, 1, "0"), (1, 9, "0"), (5, 9, "01010"), (8, 3, "010")):
        lanes = lanes_of("auto", jobs, n_runs)
        assert "".join(lane["CUDA_VISIBLE_DEVICES"] for lane in lanes) == gpus
        share = str(16 // len(gpus))
        assert {(lane["OMP_NUM_THREADS"], lane["TORCHINDUCTOR_COMPILE_THREADS"]) for lane in lanes} == {(share, share)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert [lane["CUDA_VISIBLE_DEVICES"] for lane in lanes_of("cuda", 4, 9)] == ["4", "6", "7", "4"]


@pytest.mark.parametrize("device,jobs,n_runs,n", [
    ("cpu", 0, 99, 16), ("auto", 0, 3, 3), ("cpu", 2, 9, 2), ("mps", 0, 9, 1),
])  # fmt: skip
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


def test_progress_is_read_behind_a_long_record(tmp_path):
    """An evaluation of many domains, or the weights of a deep model."""
    long = {"event": "eval", "step": 7, "val": {f"domain {i}": 1.0 for i in range(2000)}}
    (tmp_path / "metrics.jsonl").write_text(record_line("train.py's metrics", long))
    assert steps_done(tmp_path) == 7


def test_the_bar_leaves_out_what_a_resumed_run_had_done(tmp_path, monkeypatch):
    """Those steps took no time today, so with them the time that is left would look far too short."""
    bar = SimpleNamespace(total=0, n=0, clear=lambda: None, close=lambda: None)
    bar.update = lambda steps: setattr(bar, "n", bar.n + steps)
    monkeypatch.setattr("common.jobs.progress", lambda *_: bar)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "metrics.jsonl").write_text(record_line("train.py's metrics", {"step": 7}))
    job = Command(("-c", "pass"), tmp_path / "train.log", tmp_path, steps=10)
    run_jobs(lambda: [job], lambda *_: None, [{}])
    assert (bar.total, bar.n) == (3, 0)


def started(words, runs):
    """The process of compare.py once each run has made five steps."""
    process = subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.PIPE, text=True)
    while min(steps_done(run) for run in runs) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_it_trains_is_stopped_and_goes_on(data, tmp_path):
    """Two modes of files, side by side; Ctrl-C saves both; the numbers are those of an undisturbed run. Both wait after
    step 5 until they are asked to stop."""
    vanilla, mine = tmp_path / "vanilla.py", tmp_path / "mine.py"
    vanilla.write_text(UNTIL_ASKED + "value_mode = 'vanilla'")
    mode = "value_mode = ValueMode((Residual(lam=(1, 3)),), name='m')"
    mine.write_text(UNTIL_ASKED + mode)
    words = [ROOT / "compare.py", *words_of(data, tmp_path / "a", vanilla, mine, jobs=2)]
    runs = [tmp_path / "a" / f"{mode}-12-0.003-42" for mode in ("vanilla", "m")]
    process = started(words, runs)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and said.splitlines()[-1] == "stopped"
    assert "stopping; running jobs save first, but a second Ctrl-C doesn't wait for that" in said
    for run in runs:
        assert [path.name for path in run.glob("step_*[0-9].safetensors")] == ["step_00000005.safetensors"]
        assert read_run(run).final_loss is None
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
    run = tmp_path / "a/vanilla-12-0.003-42"
    process = started(words, [run])
    process.kill()
    process.communicate()
    with hold(run, seconds=60):
        assert (run / "step_00000005.safetensors").exists()


def run_here(wanted, ended, lanes, later):
    """In place of run_jobs: train.py in this process, which needs no seconds to start."""
    while jobs := wanted():
        for job in jobs:
            done = in_process(train, *job.words[1:])
            ended(job, done.returncode, done.stderr)


ROWS = ["resformer_plus", *(name for name, (_, _, source) in TABLE.items() if not source)]  # those of a user's own


@pytest.mark.parametrize("mode", ROWS)
def test_a_row_is_trained_and_compared(mode, data, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_jobs", run_here)
    done = in_process(compare, *words_of(data, tmp_path, "vanilla", mode, max_steps=2, n_layer=4))
    assert done.returncode == 0 and table(done.stdout).keys() == {"vanilla", mode}, done.stderr


def test_a_run_that_fails_ends_with_its_own_sentence(data, tmp_path):
    words = words_of(data, tmp_path / "out", "vanilla", "svformer", attn="flash", jobs=1)
    says = r"vanilla-12-0.003-42 failed \(exit code 2\): .*flash.*; see .*train.log"
    assert re.search(says, script("compare.py", *words).stderr)
