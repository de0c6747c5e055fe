"""The paper's wing: what is drawn and claimed, on made-up runs whose numbers can be worked out by hand, and the command
itself on runs that are small but real."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest
from conftest import ROOT, finished, in_process, refused
from test_plot import make_run

import plot
import prepare
import report
from analyze import AnalyzeConfig
from configurator import UserError, load_settings
from describe import count_parameters
from eval import EvalConfig
from paper import claims, figures, panels, reproduce, tables
from paper import found as found_runs
from paper import results as results_page
from paper.claims import Claim, claim_cells, claim_rows
from paper.figures import FIGURES, PAPER, Figure, Panel
from paper.found import Found, NoSeed
from paper.panels import draw_figure
from paper.reproduce import ReproduceConfig
from paper.runs import INSPECTED, ONE_RATE, SCALES, Job, train_settings, units_in_words
from train import TrainConfig
from value_modes import TABLE, get_mode

N = {"2M": 1_623_856, "82M": 81_901_056, "180M": 179_874_048, "320M": 331_064_320, "468M": 467_921_920}
N_SV = {"2M": 1_623_088, "82M": 80_066_048, "180M": 173_385_984, "468M": 443_804_672}
LENGTHS = (512, 2048, 8192, 32000, 64000)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def command(*words):
    """`python -m paper.reproduce …` in this process."""
    return in_process(reproduce, *words)


def asked(*words):
    return load_settings(ReproduceConfig, list(map(str, words)))


# ---- the numbers of panels and claims


SEEDS = r", (1 seed|\d+ seeds.*)$"


def lines(ax):
    """{label without its seeds: (x, y)} of the lines that the legend shows."""
    return {re.sub(SEEDS, "", line.get_label()): line.get_data() for line in ax.lines if line.get_label()[0] != "_"}


def test_saving():
    def line(factor, sizes=(1e6, 3e6, 9e6)):  # of a model as good as vanilla with `factor` times the parameters
        return [(n, 5 - 0.2 * math.log(factor * n)) for n in sizes]

    assert claims.saving(line(1.25), line(1)) == pytest.approx(0.2)
    assert claims.saving(line(1 / 1.122), line(1)) == pytest.approx(-0.122)  # it needs 12.2 % more
    assert claims.saving(line(1.25, sizes=(2e6, 7e7)), line(1)) == pytest.approx(0.2)  # at sizes of its own
    rising, falling = [(1e6, 2.0), (2e6, 2.1)], [(1e6, 2.2), (2e6, 2.1)]
    assert claims.saving(rising, falling) is claims.saving(falling, rising) is None  # there is no line to follow
    assert claims.saving([(1e6, 2.0), (2e6, 1.99)], falling) is None  # 2**-20 of the parameters is no measurement
    assert claims.saving([(1e6, 2.15), (2e6, 2.05)], falling) == pytest.approx(1 - 2**-0.5)
    assert round(figures.SAVED, 3) == 0.104  # PAPER 2.7: the lines through Table 5's averages give 10.4 %


def test_tokens_saved():
    x, target = [10, 20, 30, 40], ([10, 20, 30, 40], [9, 5, 3, 2.0])
    assert claims.tokens_saved((x, [4, 3, 1.5, 1]), target) == pytest.approx(1 - (20 + 10 * (3 - 2) / 1.5) / 40)
    # ends above it, at 2.1, where the target was after 39: it needs 40 instead
    assert claims.tokens_saved((x, [4, 3, 2.5, 2.1]), target) == pytest.approx(1 - 40 / 39)
    assert claims.tokens_saved((x, [9, 9, 9, 9.5]), target) is None  # the target was there before its first evaluation
    assert claims.tokens_saved((x, [1.9, 1, 1, 1]), target) is None
    assert claims.tokens_saved((x, [4, 3, 1.9, 2.5]), target) == pytest.approx(1 - 40 / 35)  # it ends above it
    assert claims.tokens_saved((x, [4, 3, 2.5, 2.0]), target) == 0
    assert claims.tokens_saved((x, [4, 2, 2.5, 1]), target) == 0.5  # when it is there for the first time
    assert claims.tokens_saved((x, [4, 3, 1.5, 1]), ([40, 80], [3, 2.0])) == pytest.approx(1 - (80 / 3) / 80)
    assert claims.tokens_saved(target, target) == 0


def test_critical_point():
    x = np.arange(1.0, 101)
    for window in (1, 4):  # averages of a line are those of the middle of their window
        assert claims.critical_point(x, (x - 30.25) * 0.01, window) == (pytest.approx(30.25), False)
        assert claims.critical_point(x, (x - 150.0) * 0.01, window) == (pytest.approx(150), True)
    by_four = found_runs.means(x, 4)  # means of four steps at a time: 2.5, 6.5, …
    assert by_four[:2].tolist() == [2.5, 6.5] and len(found_runs.means(x, 30)) == 3
    assert claims.critical_point(by_four, (by_four - 30.25) * 0.01, 5) == (pytest.approx(30.25), False)
    waves = np.where(x < 40, (x - 20.5) * 0.01, (x - 70.5) * 0.01)  # above at 20.5, below again at 40, above at 70.5
    assert claims.critical_point(x, waves, 1) == (pytest.approx(70.5), False)
    one_low = np.append(waves[:-1], -0.01)  # the last point alone is below
    assert claims.critical_point(x, one_low, 1) == (pytest.approx(70.5), False)
    assert claims.critical_point(x, np.full(100, -60.0), 1) == (math.inf, True)  # level
    assert claims.critical_point(x, x, 1) == (0, False) and claims.critical_point(x, -x, 1) == (math.inf, True)
    bent = np.where(x <= 90, -50.0, (x - 120) * 1.0)  # the last tenth alone is the line
    assert claims.critical_point(x, bent, 1) == (pytest.approx(120), True)
    # a slope of 0.003 and steps of ±0.04 about it: ten points have a slope of 0.0054 with an error of 0.0049
    noisy = bent * 0.003 + np.where(x % 2, -0.04, 0.04)
    assert claims.critical_point(x, noisy, 1) == (math.inf, True)
    assert claims.critical_point(x[:3], np.array([-3.0, -2, -1]), 1) == (pytest.approx(4), True)


# ---- runs: settings, scales, names


def jobs_at(scale):
    """The runs of `all`, or of the only figure of a scale, as they are there."""
    units = SCALES[scale]
    names = units.figures or [name for name in PAPER if name not in units.without]
    return list(dict.fromkeys(units.here(job) for name in names for job in FIGURES[name].at(units).jobs))


here = SCALES["cpu"].here
JOBS = jobs_at("cpu")  # all runs of the paper's figures


def test_default_job_is_the_papers_recipe():
    """train.py's defaults are Table 4; only how often it is evaluated, logged and saved may differ."""
    assert dataclasses.astuple(SCALES["paper"].here(Job())) == ("vanilla", "82M", 2048, 6e-4, 120, "llama", "")
    values = train_settings(Job(), SCALES["paper"], 42, "x")
    mine, default = (dataclasses.asdict(TrainConfig(**of)) for of in (values, {}))
    assert {k for k in default if mine[k] != default[k]} <= {"out_dir", "eval_every", "log_every", "keep", "save_every"}
    assert mine["max_steps"] % mine["eval_every"] == 0 == mine["max_steps"] % mine["save_every"]


def test_paper_scale_is_tables_3_and_4():
    scale = SCALES["paper"]
    for length, batch, each in ((512, 4096, 128), (2048, 1024, 32), (8192, 256, 8), (32000, 64, 2), (64000, 32, 1)):
        cfg = TrainConfig(**train_settings(Job(length=length), scale, 42, "x"))
        assert (cfg.block_size, cfg.batch_tokens, cfg.micro_batch) == (length, batch * length, each)
        assert cfg.split_batch(8) == (each, 4) and cfg.max_steps == 10_000
    for size, shape in {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}.items():
        for mode, total in (("vanilla", N[size]), ("svformer", N_SV[size])):
            cfg = TrainConfig(**train_settings(Job(mode, size), scale, 42, "x"))
            assert (cfg.n_layer, cfg.n_head, cfg.n_embd) == shape
            assert count_parameters(cfg.model_config(50277)) == total
    middle = TrainConfig(**train_settings(Job(size="320M"), scale, 42, "x"))
    assert count_parameters(middle.model_config(50277)) == N["320M"]
    gpt2 = TrainConfig(**train_settings(Job(arch="gpt2"), scale, 42, "x"))
    assert count_parameters(gpt2.model_config(50277)) == 77_752_320  # the paper's 78M
    big = TrainConfig(**train_settings(Job(size="468M"), scale, 42, "x"))
    assert big.eval_every * big.batch_tokens == 2_097_152_000  # every 2B tokens, Figure 6


@pytest.mark.parametrize("name", SCALES)
def test_every_run_of_every_figure_is_valid(name):
    scale, every = SCALES[name], jobs_at(name)
    for job in every:
        values = train_settings(job, scale, 7, f"out/{job.name}")
        cfg = TrainConfig(**values)
        assert cfg.split_batch(max(1, scale.gpus))[0] == cfg.micro_batch
        assert cfg.value_mode.name == job.mode and cfg.arch == job.arch and cfg.seed == 7
        assert cfg.block_size == scale.lengths[job.length][0] and 1 <= cfg.warmup_steps < cfg.max_steps
        assert cfg.save_every <= cfg.max_steps / 2  # a kill costs half of a run at most
    assert len({job.name for job in every}) == len(every)
    assert len({str(train_settings(job, scale, 7, "same")) for job in every}) == len(every)
    tokens = {length: block * batch for length, (block, batch, _) in scale.lengths.items()}
    assert max(tokens.values()) / min(tokens.values()) < 1.03 and scale.steps > 2 * scale.window
    assert tuple(tokens) == ((2048,) if scale.figures else LENGTHS)


def test_config_file_of_scale_night():
    """A run with the config file has the settings of a run at the scale, so on its data the same numbers."""
    mine = TrainConfig(**train_settings(Job("cla2"), SCALES["night"], 1, "x"))
    file = load_settings(TrainConfig, [str(ROOT / "config/night.py"), "--value_mode=cla2", "--seed=1", "--out_dir=x"])
    free = ("save_every", "log_every", "keep", "compile", "device", "data_dir")
    mine, file = ({k: v for k, v in dataclasses.asdict(of).items() if k not in free} for of in (mine, file))
    assert mine == file


def test_seeds():
    cfg = asked("all")
    assert cfg.seeds_of(Job("key")) == (42, 1, 2) and cfg.seeds_of(Job(length=512)) == (42,)
    assert cfg.seeds_of(Job(size="180M")) == (42,) and cfg.seeds_of(Job(lr=1e-4)) == (42, 1, 2)
    assert {asked("all", "--scale=paper").seeds_of(job) for job in JOBS} == {(42,)}
    two = asked("fig4", "tab5", "--seeds=2", "--out_dir=o")
    assert {two.seeds_of(job) for job in JOBS} == {(42, 1)}
    plans = {str(plan.folder): plan for plan in reproduce.make_plans(two, {})}
    assert len(plans) == 2 * 2 * 3 and {plan.values["seed"] for plan in plans.values()} == {42, 1}
    assert list(plans)[:3] == ["o/82M-2048-vanilla-42", "o/82M-2048-vanilla-1", "o/180M-2048-vanilla-42"]
    assert [name for name, plan in plans.items() if plan.analyse] == list(plans)[:2]
    assert not any(plan.score for plan in plans.values())


def test_what_a_scale_decides():
    """At scale night: each mode's own rate, the rate that all have, the model that is inspected, a run that differs in
    one setting, attention of long blocks."""
    night = dataclasses.replace(SCALES["night"], tuned={("82M", "gqa2"): 2e-4, ("2M", "gqa2"): 1e-3})
    assert night.here(Job("gqa2", "180M")).lr == 2e-4 and night.here(Job("gqa2", "2M")).lr == 1e-3
    assert night.here(Job("gqa2")).lr == 2e-4 and night.here(Job("gqa2", lr=1e-4)).lr == 1e-4
    assert night.here(Job("gqa2").baseline).lr == 3e-4  # vanilla's
    assert night.here(Job("gqa2", lr=ONE_RATE)).lr == night.here(Job("gqa2", lr=ONE_RATE).baseline).lr == 1.5e-4
    assert SCALES["cpu"].here(Job("gqa2", lr=ONE_RATE)) == SCALES["cpu"].here(Job("gqa2"))
    attn = {length: train_settings(Job(length=length), night, 42, "x")["attn"] for length in LENGTHS}
    assert attn == {512: "eager", 2048: "eager", 8192: "eager", 32000: "sdpa", 64000: "sdpa"}
    found = Found("out", night, lambda job: (42,))
    assert found.rate_in_words(Job("gqa2")) == ", rate 0.002" and not found.rate_in_words(Job("cla2"))
    values = train_settings(Job("gqa2", INSPECTED), night, 42, "x")
    assert (values["max_steps"], values["n_embd"], values["learning_rate"]) == (30_000, 128, 2e-3)
    job = Job(change="weight_decay=0.3,batch_tokens=4096")
    values = train_settings(job, night, 42, "x")
    assert (values["weight_decay"], values["batch_tokens"]) == (0.3, 4096)
    assert job.name == "82M-2048-vanilla-weight_decay0.3-batch_tokens4096"
    cfg = asked("all", "--scale=night")
    three = (Job(), Job("svformer"), Job("cross"), Job("resformer", "468M"), Job(length=512, lr=ONE_RATE))
    at_other_rates = Job("resformer", lr=6e-4), Job("svformer", lr=3e-4)
    assert {len(cfg.seeds_of(job)) for job in (*three, *at_other_rates)} == {3}
    one = (
        Job("mqa"),
        Job("resformer", lr=1.2e-3),
        Job("cross", lr=6e-4),
        Job("svformer", "468M"),
        Job("gqa2", "2M"),
        Job(length=512),
        job,
        Job("gqa2", INSPECTED),
    )
    assert {len(cfg.seeds_of(job)) for job in one} == {1}


def test_the_control_is_no_claim_of_the_paper():
    """Of the figure of v5's variants: it is shown with its numbers, but gets no verdict."""
    bounds = {claim.what: (claim.above, claim.below) for claim in FIGURES["v5"].claims if "scaled" in claim.what}
    none = (-math.inf, math.inf)
    assert bounds == dict.fromkeys(
        ["resformer_lambda − scaled, validation loss", "scaled − vanilla, validation loss"], none
    )


def test_units_in_words():
    said = units_in_words(SCALES["night"])
    assert "6 layers, 4 heads, width 128 for 82M" in said and "128 for 2,048" in said and "100 for 120" in said
    assert (
        "In place of its learning rates: 10 times as much; the usual one is 0.003, of svformer at 82M 0.006, " in said
    )
    assert "of resformer at 2M 0.006, of svformer at 2M 0.006. A run has 6,000 steps." in said


# ---- figures, on made-up runs


def crc(*words):
    return zlib.crc32(" ".join(map(str, words)).encode())


STEPS, WINDOW, QUARTERS = 40, 5, (10, 20, 30, 40)
CROSSINGS = {512: 10.5, 2048: 15.5, 8192: 20.5, 32000: 30.5, 64000: 50.5}  # the last one only by extrapolation
LAYERS = {"2M": 4, "82M": 8, "180M": 12, "320M": 15, "468M": 24}
DOMAINS = ("CommonCrawl", "ArXiv", "mine")
SIX = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")
NEEDS = {"vanilla": 1, "resformer": 0.9, "svformer": 1.122}  # parameters for equal losses


def parameters(job):
    return (N_SV if job.mode == "svformer" else N)[job.size]


class Made:
    """Runs of all figures: a ResFormer that needs 10 % fewer parameters than vanilla, an SVFormer that needs 12.2 %
    more and crosses vanilla at CROSSINGS, and else numbers that differ from run to run."""

    def __init__(self, root):
        self.root = root
        for job, seed in [(of, i) for of in JOBS for i in self.seeds(of)]:
            folder = root / f"{job.name}-{seed}"
            val = dict(zip(QUARTERS[-len(self.val(job, seed)) :], self.val(job, seed), strict=True))
            about = dict(parameters=parameters(job), block_size=SCALES["cpu"].lengths[job.length][0], domains=DOMAINS)
            make_run(folder, job.mode, seed, self.training(job, seed), val, **about)
            settings = train_settings(job, made_scale(), seed, folder)
            (folder / "config.json").write_text(json.dumps(settings | {"value_mode_name": job.mode}))
            self.write_analysis(folder, job, seed)
            if results := self.results(job, seed):
                of = {"step_x": {"step": STEPS, "mode": job.mode, "results": results}}
                (folder / "eval.json").write_text(json.dumps({"checkpoints": of}))
        self.write_analysis(root / "init-468M", Job("init", "468M"), 0)

    def write_analysis(self, folder, job, seed):
        folder.mkdir(exist_ok=True)
        numbers, arrays = self.analysis(job, seed)
        (folder / "analysis.json").write_text(json.dumps(numbers))
        np.savez(folder / "analysis.npz", **arrays)

    def seeds(self, job):
        return (42, 1) if (job.size, job.length) == ("82M", 2048) else (42,)

    def loss(self, job, seed):
        """Validation loss at the end; with seed 42, straight lines over the logarithm of the size."""
        job = here(job)
        if seed == 42 and job == here(Job(job.mode, job.size)) and job.mode in NEEDS and job.size != "2M":
            return 5 - 0.15 * math.log(parameters(job) / NEEDS[job.mode])
        return 2.5 + crc("loss", job.name, seed) % 1000 / 1000

    def val(self, job, seed):
        """At each quarter of the 468M runs, at the end of others."""
        if job.size != "468M":
            return [self.loss(job, seed)]
        return [*((3.0, 2.6, 2.4) if job.mode == "vanilla" else (2.9, 2.5, 2.3)), self.loss(job, seed)]

    def training(self, job, seed):
        job = here(job)
        noise = np.random.default_rng(crc("train", job.baseline.name, seed)).random(STEPS) + 3
        if job.mode == "svformer":
            at = CROSSINGS[job.length] if job.lr == 6e-4 and job.arch == "llama" else 25.5
            return noise + 0.01 * (np.arange(1, STEPS + 1) - at)
        return noise + (job.mode != "vanilla") * np.random.default_rng(crc("of", job.name, seed)).random(STEPS)

    def analysis(self, job, seed):
        job = here(job)
        rng, L = np.random.default_rng(crc("analysis", job.name, seed)), LAYERS[job.size]
        names = ("first", "top_1", "top_2", "top_3", "top_10", "top_1%", "eq4", "eq6", "value_largest")
        layers = {name: rng.random(L).tolist() for name in names + ("value_norm_first", "value_norm_rest")}
        layers["entropy"] = (2 + 5 * rng.random(L)).tolist()
        layers["eq4"][0] = layers["eq6"][0] = None
        states = {k: rng.random(L + 1).tolist() for k in ("hidden_norm_first", "hidden_norm_rest", "hidden_similarity")}
        about = {"mode": job.mode, "length": 2048, "entropy_uniform": 7.2025}
        both = {"layers": layers, "states": states}
        numbers = about | {where: {k: {"mean": v} for k, v in of.items()} for where, of in both.items()}
        shapes = dict(importance=(L, 256), value_norm=(L, 256), hidden_norm=(L + 1, 256), value_spectrum=(L, 64))
        return numbers, {name: rng.random(shape) for name, shape in shapes.items()}

    def layers(self, job, seed, key):
        """Means of a quantity over layers or states."""
        numbers = self.analysis(job, seed)[0]
        return numbers["states" if key.startswith("hidden") else "layers"][key]["mean"]

    def results(self, job, seed):
        job = here(job)
        found, rng = {}, np.random.default_rng(crc("eval", job.name, seed))
        if job in map(here, FIGURES["tab1"].runs):
            found |= {task: {"acc": float(rng.random())} for task in SIX}
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


def made_scale(**changes):
    return dataclasses.replace(SCALES["cpu"], steps=STEPS, window=WINDOW, **changes)


@pytest.fixture
def found(made, data_dir):
    return Found(made.root, made_scale(data_dir=str(data_dir)), made.seeds)


def test_all_figures_are_there():
    """Each mode is one that train.py takes; every row of the table with a source is in the figure of modes, and so is
    every mode that a claim is about."""
    assert list(PAPER) == [f"fig{i}" for i in (1, 2, *range(4, 23))] + [f"tab{i}" for i in range(1, 6)]
    assert list(FIGURES) == [*PAPER, "modes", "rates", "rates2", "v5", "regime", "gpu"]
    modes = FIGURES["modes"]
    for job in [*JOBS, *modes.jobs]:
        assert get_mode(job.mode).name == job.mode
    names = list(TABLE)
    not_trained = names[names.index("resformer_zero") :]  # the successors
    shown = {job.mode for job in modes.jobs}
    assert shown >= {name for name, (_, _, source) in TABLE.items() if source} - set(not_trained)
    claimed = {claim.jobs for figure in FIGURES.values() for claim in figure.claims if claim.jobs}
    of_modes = [jobs for jobs in claimed if all(job == Job(job.mode) for job in jobs)]
    assert len(of_modes) == 44 and shown >= {job.mode for jobs in of_modes for job in jobs}


def test_what_a_scale_leaves_out():
    """At scale night: gqa8, for which four heads are too few, and runs that would say little; their claims too."""
    shown, claimed = {}, {}
    for scale in ("cpu", "night"):
        figures = asked("all", f"--scale={scale}").figures
        assert set(PAPER) - set(figures) == ({"tab1", "fig22"} if scale == "night" else set())
        shown[scale] = {job for figure in figures.values() for job in figure.jobs}
        claimed[scale] = {claim.what for figure in figures.values() for claim in figure.claims}
    sweep = {Job(f"neutreno_{lam}") for lam in (0.2, 0.6, 0.8)}  # Figure 22
    at_64000 = {Job(mode, length=64000) for mode in ("gqa8", "svformer_gqa4", "cla2_gqa4")}
    svformer = {Job("svformer", **what) for what in ({"lr": 1e-4}, {"warmup": 1200}, {"arch": "gpt2"})}
    baselines = {job.baseline for job in svformer}
    others = {Job(size="320M"), Job("resformer", size="320M")}
    assert shown["cpu"] - shown["night"] == sweep | at_64000 | svformer | baselines | others
    assert shown["night"] <= shown["cpu"]
    gone = "\n".join(sorted(claimed["cpu"] - claimed["night"]))
    words = ("GQA8", "CLA2+GQA4", "neutreno_0.2", "rate 1e-4", "warmup 1200", "GPT2's", "mean accuracy")
    assert all(word in gone for word in words) and len(gone.splitlines()) == 14, gone
    assert asked("rates").scale == asked("rates", "fig7").scale == "night" and asked("fig7").scale == "cpu"


class Spy(Found):
    """A Found that notes what it is asked for."""

    def __init__(self, found):
        self.asked, self.analysed, self.scored = set(), set(), {}
        super().__init__(found.root, found.scale, found.seeds)

    def record(self, job, seed):
        self.asked.add(here(job))
        return super().record(job, seed)

    def analysis(self, job, seed):
        self.analysed.add(here(job))
        return super().analysis(job, seed)

    def arrays(self, job, seed):
        self.analysed.add(here(job))
        return super().arrays(job, seed)

    def evaluation(self, job, seed, task):
        self.scored.setdefault(here(job), set()).add(task)
        return super().evaluation(job, seed, task)


def axes_of(figure, found):
    """What a figure is drawn on; it is not rendered."""
    from matplotlib.figure import Figure as Paper

    kept = []

    @contextlib.contextmanager
    def page(path, size):
        kept.append(Paper(figsize=size))
        yield kept[-1]

    with pytest.MonkeyPatch.context() as m:
        m.setattr(panels, "page", page)
        draw_figure("x.png", figure, found)
    return kept[0].axes


def test_a_figure_names_all_that_it_needs_and_no_more(found):
    for name in PAPER:
        figure, spy, runs = FIGURES[name], Spy(found), set(map(here, FIGURES[name].jobs))
        if figure.panels:
            axes_of(figure, spy)
        if figure.table:
            list(figure.table(spy))
        rows = claim_rows(figure, spy)
        assert len(rows) == len(figure.claims) and all(row["n"] for row in rows), name
        assert spy.asked | spy.analysed | spy.scored.keys() == runs, name
        assert spy.analysed == set(map(here, figure.analysed)), name
        assert set().union(*spy.scored.values()) == (set(SIX) if figure.scored else set()), name
        assert spy.scored.keys() == (set(map(here, figure.runs)) if figure.scored else set()), name


def test_labels_and_titles_say_what_is_drawn(found):
    """Lengths, rates, warmups and sizes are those of the scale, not the paper's."""
    for name, i, labels in (
        ("fig7", 0, ["ResFormer, length 128", "ResFormer, length 512", "ResFormer, length 1,024"]),
        ("fig12", 1, ["Transformer 180M", "Transformer 468M", "ResFormer 180M", "ResFormer 468M"]),
        ("fig15", 0, ["rate 0.0005", "rate 0.0015", "rate 0.003"]),
        ("fig15", 1, ["20 steps of warmup", "100 steps of warmup"]),
    ):
        assert [label for label, _ in found.labels(FIGURES[name].panels[i].lines)] == labels
    titles = [ax.get_legend().get_title().get_text() for ax in axes_of(FIGURES["fig7"], found)]
    assert titles == [
        "by length\n81.9M parameters, length 128–1,024",
        "by mode\n81.9M parameters, length 128, 2 seeds ± std",
    ]
    night = Fake(scale=SCALES["night"], parameters=lambda job: 1_951_360)
    assert panels.real_size([Job()], night) == "1.95M parameters, length 128"
    assert panels.real_size([Job(size=INSPECTED)], night) == "1.95M parameters, length 128, 30,000 steps"


def test_relative_panels(made, found):
    """Each line is the run's loss minus that of vanilla with the same size, length, rate, warmup, architecture and
    seed, smoothed, and the mean over seeds, in the style of its mode."""
    for name in PAPER:
        figure = FIGURES[name]
        if not any(panel.kind == "relative" for panel in figure.panels):
            continue
        for ax, panel in zip(axes_of(figure, found), figure.panels, strict=True):
            if panel.kind != "relative":
                continue
            drawn, expected = lines(ax), dict(found.labels(panel.lines))
            assert len(expected) == len(panel.lines) and "Transformer" in ax.get_ylabel(), name
            low, high = ax.get_ylim()
            assert low < 0 < high and ax.get_xscale() == "log", name
            assert ax.get_xlim()[1] / ax.get_xlim()[0] == pytest.approx(40), name  # the first instants are left out
            colors = {re.sub(SEEDS, "", line.get_label()): line.get_color() for line in ax.lines}
            styles = plot.styles_of({label: job.mode for label, job in expected.items()})
            for label, job in expected.items():
                twin = Job("vanilla", job.size, job.length, job.lr, job.warmup, job.arch)
                gaps = np.mean([made.training(job, s) - made.training(twin, s) for s in made.seeds(job)], axis=0)
                steps = np.arange(1.0, STEPS + 1)
                x, (y,) = plot.growing_means(steps, gaps[None])
                np.testing.assert_allclose(drawn[label][0] / x, drawn[label][0][0])  # tokens of a step
                np.testing.assert_allclose(drawn[label][1], y, rtol=0, atol=1e-5)  # records are rounded
                assert colors[label] == styles[label]["color"], (name, label)


def test_modes_of_a_figure_differ_in_colour():
    """Weights of one mode share its colour."""
    for name, figure in FIGURES.items():
        for panel in figure.panels:
            modes = {
                plot.family(job.mode) for job in panel.jobs if panel.kind != "dots"
            }  # weights of one mode share it
            assert len({plot.style_of(mode)["color"] for mode in modes}) == len(modes), (name, panel.title)


def test_relative_panels_name_a_rate_of_their_own(found, monkeypatch):
    monkeypatch.setattr(found, "rate_in_words", lambda job: ", rate 0.006" if job.mode == "key" else "", raising=False)
    (ax,) = axes_of(FIGURES["fig9"], found)
    assert lines(ax).keys() == {"Value", "Key, rate 0.006", "Query"}


def test_layer_panels(made, found):
    for name in ("fig1", "fig2", "fig4", "fig12", "fig18", "fig20", "fig21"):
        drawn_panels = [panel for panel in FIGURES[name].panels if panel.lines or panel.kind == "initial"]
        for ax, panel in zip(axes_of(FIGURES[name], found), drawn_panels, strict=False):
            if panel.kind == "initial":
                continue
            drawn, key = lines(ax), panel.key
            if key == "entropy":
                assert set(drawn.pop("uniform causal attention")[1]) == {7.2025}
            assert drawn.keys() == dict(found.labels(panel.lines)).keys(), name
            for label, job in found.labels(panel.lines):
                if panel.kind == "spectrum":
                    seeds, first = [made.analysis(job, s)[1]["value_spectrum"][0] for s in made.seeds(job)], 1
                    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
                else:
                    mine = key[label] if isinstance(key, dict) else key
                    seeds, first = [made.layers(job, s, mine) for s in made.seeds(job)], int("hidden" not in mine)
                values = np.array(seeds, float).mean(axis=0)
                there = np.isfinite(values)
                np.testing.assert_allclose(drawn[label], [first + np.flatnonzero(there), values[there]])


def test_equal_lines_are_one(found, monkeypatch):
    """At length 128 the token at 1 % of the length is the second: one line that says so."""
    by_layer = Found.by_layer
    same = lambda self, job, seed, key: by_layer(self, job, seed, "top_2" if key == "top_1%" else key)  # noqa: E731
    monkeypatch.setattr(Found, "by_layer", same)
    axes = axes_of(FIGURES["fig21"], found)
    for ax in axes:
        assert list(lines(ax)) == ["TOP-1", "TOP-2 = TOP-1%", "TOP-3", "TOP-10"]
    assert len({ax.get_ylim() for ax in axes}) == 1


def test_before_training(made, found):
    left, trained, twin = axes_of(FIGURES["fig1"], found)  # no public models are given: no panel
    init = made.analysis(Job("init", "468M"), 0)[0]
    entropy, similarity = init["layers"]["entropy"]["mean"], init["states"]["hidden_similarity"]["mean"]
    np.testing.assert_allclose(left.lines[0].get_xydata().T, [range(1, 25), entropy])
    np.testing.assert_allclose(twin.lines[0].get_xydata().T, [range(1, 25), similarity[1:]])
    assert set(lines(left)["uniform causal attention (left axis)"][1]) == {7.2025} and "NeuTRENO" in lines(trained)


def test_scaling_panels(made, found):
    """Losses of each seed as marks, and straight lines through their means that leave the 2M out."""
    ours, tokens, paper = axes_of(FIGURES["fig6"], found)
    smaller = axes_of(FIGURES["fig15"], found)[3]
    for ax, other, sizes in (
        (ours, "resformer", ("82M", "180M", "320M", "468M")),
        (smaller, "svformer", ("2M", "82M", "180M", "468M")),
        (paper, "resformer", ()),
    ):
        marks = {tuple(point) for line in ax.lines if line.get_linestyle() == "None" for point in line.get_xydata()}
        for mode in ("vanilla", other):
            jobs = [Job(mode, size) for size in sizes]
            points = [(parameters(job), made.loss(job, seed)) for job in jobs for seed in made.seeds(job)]
            assert set(points or tables.size_and_loss(mode)) <= marks
            means = [(parameters(job), np.mean([made.loss(job, seed) for seed in made.seeds(job)])) for job in jobs]
            n, losses = zip(*[point for point in means or tables.size_and_loss(mode) if point[0] > 1e7], strict=True)
            slope, height = np.polyfit(np.log(n), losses, 1)
            x, y = lines(ax)[claims.LABELS[mode]]
            np.testing.assert_allclose(y, height + slope * np.log(x))
            assert x[-1] == pytest.approx(n[-1])
        assert x[0] == pytest.approx(n[0] if ax is not smaller else N_SV["82M"])
    res, van = (made.loss(Job(mode, "468M"), 42) for mode in ("resformer", "vanilla"))
    np.testing.assert_allclose(lines(tokens)["ResFormer"], [[5120, 10240, 15360, 20480], [2.9, 2.5, 2.3, res]])
    np.testing.assert_allclose(lines(tokens)["Transformer"][1], [3.0, 2.6, 2.4, van])


def test_critical_points_are_drawn(found):
    crossed, predicted = axes_of(FIGURES["fig14"], found)[1].lines
    at = [[64, 10.5], [128, 15.5], [128, 15.5], [256, 20.5], [512, 30.5]]
    np.testing.assert_allclose(crossed.get_xydata(), at)
    np.testing.assert_allclose(predicted.get_xydata(), [[1024, 50.5]])


def test_seeds_without_a_critical_point_are_counted(found, monkeypatch):
    at = {512: (0.0, False), 2048: (math.inf, True), 8192: (20.5, False)}
    monkeypatch.setattr(panels, "critical", lambda found, job, seed: at[2048 if seed == 1 else job.length])
    ax = matplotlib.figure.Figure().subplots()
    panels.draw_critical(ax, Panel("critical", "", tuple(figures.SV_LENGTHS[:3])), found)
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == [
        "crossed",
        "length 128: no crossing in sight (2 of 2 seeds)",
        "length 64: never ahead (1 of 1 seeds)",
    ]


def test_heat_maps(made, found):
    images = {ax.get_title(loc="left"): ax.images[0] for ax in axes_of(FIGURES["fig19"], found) if ax.images}
    for key, quantity in panels.HEAT.items():
        for label, job in FIGURES["fig19"].panels[0].lines:
            image = images[f"{label}: {quantity}"]
            assert image.norm is images[f"Transformer: {quantity}"].norm and image.origin == "lower"  # one scale
            np.testing.assert_allclose(image.get_array(), made.analysis(job, 42)[1][key][:, :100])
            assert image.get_extent() == [0.5, 100.5, -0.5 if key == "hidden_norm" else 0.5, 24.5]


def test_public_models(made, tmp_path):
    """Hugging Face models take the places of ours in Figure 18, and have a panel in Figure 1."""
    folders = {tmp_path / name: Job(name) for name in ("Llama-8B", "Mistral-7B")}
    for folder, job in folders.items():
        made.write_analysis(folder, job, 0)
    found = Found(made.root, made_scale(), made.seeds, folders)
    for name, i, key, first in (("fig18", 0, "hidden_similarity", 0), ("fig1", 1, "entropy", 1)):
        drawn = lines(axes_of(FIGURES[name], found)[i])
        assert list(drawn) == ["Llama-8B", "Mistral-7B"]
        for (x, y), job in zip(drawn.values(), folders.values(), strict=True):
            np.testing.assert_allclose(y, made.layers(job, 0, key))
            assert x.tolist() == list(range(first, first + len(y)))


class Invented(Found):
    """A Found of runs that were never made: each has random numbers."""

    def __init__(self, scale):
        super().__init__("out", scale, lambda job: (42,))
        self.asked = set()

    def record(self, job, seed):
        job = self.scale.here(job)
        self.asked.add(job)
        settings, rng = train_settings(job, self.scale, seed, "x"), np.random.default_rng(crc(job.name))
        steps, every = settings["max_steps"], self.scale.every
        start = dict(value_mode=job.mode, seed=seed, max_steps=steps, parameters=int(1e6 + 1e6 * rng.random()))
        start |= dict(block_size=settings["block_size"], data="d", kv_bytes_per_token=1)
        val = {str(steps // 2): 3 + rng.random(), str(steps): 2 + rng.random()}
        record = dict(name=job.name, start=start, step_tokens=2048.0, every=every, val=val, domains={"a": 2.0})
        return record | {"losses": 2 + rng.random(steps // every)}


def test_figures_of_scale_night():
    """Each is made of the runs that it names, without those that the scale does without."""
    for name, whole in FIGURES.items():
        figure = whole.at(SCALES["night"])
        if whole.scale == "gpu" or figure.analysed or figure.scored or name in ("tab2", "tab4"):  # it needs files
            continue
        found = Invented(SCALES["night"])
        if figure.panels:
            axes_of(figure, found)
        if figure.table:
            assert list(figure.table(found))[1:]
        assert len(claim_rows(figure, found)) == len(figure.claims), name
        assert found.asked == set(map(found.scale.here, figure.jobs)), name


class Fake(Found):
    """A Found that answers what it is given: attributes in the place of its methods."""

    def __init__(self, **given):
        vars(self).update(given)


def test_dots():
    """Losses minus vanilla's by seed, their mean and deviation, the lowest on top; one scale for all groups."""
    gaps = {"vanilla": (0.0, 0.0), "share_v2": (0.5, 0.7), "cla2": (-0.5, -0.3), "key": (1, 1)}
    levels = {1: 5, 42: 15}
    found = Fake(
        scale=SCALES["night"],
        parameters=lambda job: 7,
        seeds=lambda job: (1, 42),
        loss=lambda job, seed: levels[seed] + gaps[job.mode][seed == 42],
    )
    two, one = (("cla2", Job("cla2")), ("share_v2", Job("share_v2"))), (("key", Job("key")),)
    groups = (Panel("dots", "sharing", two), Panel("dots", "one", one))
    first, second = axes_of(Figure("x", groups), found)
    assert [label.get_text() for label in first.get_yticklabels()] == ["share_v2", "cla2"]
    assert sorted(first.lines[0].get_xdata()) == pytest.approx([0.5, 0.7]) and first.get_xlim() == second.get_xlim()
    assert first.containers[0].lines[0].get_xdata().tolist() == pytest.approx([0.6])
    (legend,) = first.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a seed", "mean", "± standard deviation", "vanilla"]
    assert legend.get_title().get_text() == "7 parameters, length 128, 6,000 steps"


def test_what_moves_the_sign():
    """A row for each difference, from the base down; each mode against vanilla with the same difference and seed."""
    night = dataclasses.replace(SCALES["night"], tuned={("82M", "resformer"): 3e-4})
    half = Job(change="batch_tokens=1024")
    losses = {"vanilla": [5.0, 5.5], "resformer": [4.9, 5.6], "svformer": [4.5, 4.5]}
    found = Fake(
        scale=night,
        loss=lambda job, seed: losses[job.mode][seed] + 2 * (job.mode == "resformer" and job.change != ""),
        seeds=lambda job: (0,) if job.change else (0, 1),
        parameters=lambda job: 7,
        labels=lambda lines: lines,
    )
    rows = [(label, dataclasses.replace(job, mode=mode)) for label, job in (("base", Job()), ("half", half))
            for mode in ("resformer", "svformer")]  # fmt: skip
    figure = Figure("x", (Panel("regime", "", tuple(rows)),))
    assert set(figure.jobs) == {dataclasses.replace(job, mode=mode) for job in (Job(), half) for mode in losses}
    (ax,) = axes_of(figure, found)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["base", "half"]
    dots = [line.get_xydata().round(9).tolist() for line in ax.lines if line.get_marker() == "."]
    assert dots == [
        [[-0.1, 2.15], [0.1, 2.15]],
        [[-0.5, 1.85], [-1.0, 1.85]],
        [[1.9, 1.15]],
        [[-0.5, 0.85]],
    ]
    means = [box.lines[0].get_xdata()[0] for box in ax.containers]
    assert means == pytest.approx([0.0, -0.75, 1.9, -0.5])
    bars = [[bar.get_segments()[0] for bar in box.lines[2]] for box in ax.containers]
    half = 12.7062 * 0.1  # Student's quantile for two seeds, times the standard error of -0.1 and 0.1
    assert bars[0][0][:, 0] == pytest.approx([-half, half], abs=1e-4) and not bars[2]  # one seed has none
    for job in FIGURES["regime"].jobs:  # each differs from the base as its label says, and sees as many tokens
        values = train_settings(job, night, 42, "x")
        cfg = TrainConfig(**values)
        cfg.model_config(2048)
        tokens = cfg.max_steps * cfg.batch_tokens / (6000 * 2048)
        assert tokens == (1 if "max_steps" not in job.change or "batch" in job.change else cfg.max_steps / 6000), job


# ---- claims


WAYS = {  # the paper's words, up to a colon -> the bounds of our number
    "higher": (0, None), "lower": (None, 0), "below 10": (None, 10), "above 0.5": (0.5, None), "below 3": (None, 3),
    "larger": (0, None), "all": (0.5, None), "about 0": (None, None), "": (None, None),
    "0.104": (0, None), "-0.122": (None, 0), "0.136": (0, None), "+0.022": (0, None),
    "7.194–7.204": (7.194, 7.204),
}  # fmt: skip


def ratios(made, job, seed, of):
    first, rest = (made.layers(job, seed, f"{of}_norm_{part}") for part in ("first", "rest"))
    return [a / b for a, b in zip(first, rest, strict=True)]


def outstanding(made, job, seed):
    """The first token's importance over the mean of the next 99, the greatest of a layer."""
    rows = made.analysis(job, seed)[1]["importance"].tolist()
    return max(row[0] / (sum(row[1:100]) / 99) for row in rows)


# words of claims -> (made, job, seed) -> the number of a run
QUANTITIES = {
    "entropy in the deeper half": lambda m, job, s: np.mean(m.layers(job, s, "entropy")[LAYERS[job.size] // 2 :]),
    "first token's greatest importance over layers": lambda m, job, s: max(m.layers(job, s, "first")),
    "greatest importance of the first token": outstanding,
    "least value norm": lambda m, job, s: min(ratios(m, job, s, "value")),
    "greatest hidden norm": lambda m, job, s: max(ratios(m, job, s, "hidden")),
    "largest importance, mean over layers": lambda m, job, s: np.mean(m.layers(job, s, "top_1")),
    "mean accuracy": lambda m, job, s: np.mean([m.results(job, s)[task]["acc"] for task in SIX]),
}


def gap(made, seed, **settings):
    return made.loss(Job("svformer", **settings), seed) - made.loss(Job(**settings), seed)


def eq4_minus_eq6(made, seed):
    return np.mean(made.layers(Job(), seed, "eq4")[1:]) - np.mean(made.layers(Job(), seed, "eq6")[1:])


def larger_in_resformer(made, seed, size):
    res, van = (made.layers(Job(mode, size), seed, "value_largest") for mode in ("resformer", "vanilla"))
    return sum(math.log(a) - math.log(b) for a, b in zip(res, van, strict=True)) / len(res)


def tokens_saved(made, seed):
    """ResFormer is at vanilla's last loss in its last quarter."""
    res, van = (made.loss(Job(mode, "468M"), seed) for mode in ("resformer", "vanilla"))
    return 1 - (30 + 10 * (2.3 - van) / (2.3 - res)) / 40


# beginnings of the other claims -> (made, seed) -> number
OTHERS = {
    "468M before training: entropy": lambda m, s: np.mean(m.layers(Job("init", "468M"), 0, "entropy")),
    "similarity to Eq 2": eq4_minus_eq6,
    "share of parameters that ResFormer": lambda m, s: 1 - NEEDS["resformer"],
    "share of parameters that SVFormer": lambda m, s: 1 - NEEDS["svformer"],
    "share of tokens": tokens_saved,
    "ResFormer − Transformer at [size 180M]: ln": lambda m, s: larger_in_resformer(m, s, "180M"),
    "ResFormer − Transformer at [size 468M]: ln": lambda m, s: larger_in_resformer(m, s, "468M"),
    "share of pairs of lengths": lambda m, s: 1.0,
    "SVFormer − Transformer, at length": lambda m, s: gap(m, s, length=64000) - gap(m, s, length=512),
    "SVFormer − Transformer, at rate [rate 1e-4]": lambda m, s: gap(m, s, lr=1e-4) - gap(m, s),
    "SVFormer − Transformer, at rate [rate 3e-4]": lambda m, s: gap(m, s, lr=3e-4) - gap(m, s),
    "SVFormer − Transformer, at [warmup": lambda m, s: gap(m, s, warmup=1200) - gap(m, s),
    "SVFormer − Transformer, GPT2": lambda m, s: gap(m, s, arch="gpt2") - gap(m, s),
}


def worked_out(made, claim, jobs, seed):
    """A claim's number from the made ones, by its words; jobs: the runs that it reads."""
    if claim.jobs:
        low, high = claim.jobs
        return made.loss(low, seed) - made.loss(high, seed)
    for words, value in OTHERS.items():
        if claim.what.startswith(words):
            return value(made, seed)
    (quantity,) = [quantity for words, quantity in QUANTITIES.items() if words in claim.what]
    names = re.match(r"([^−:]+?)(?: − ([^−:]+?))?(?::| at )", claim.what).groups()
    by_name = {claims.LABELS[job.mode]: quantity(made, job, seed) for job in jobs}
    assert by_name.keys() == set(names) - {None}, claim.what
    return by_name[names[0]] - by_name.get(names[1], 0)


def test_claims(made, found):
    """What each claim measures and which way the paper says it goes; of each seed that all of its runs have."""
    for name in PAPER:
        figure = FIGURES[name]
        for claim, row in zip(figure.claims, claim_rows(figure, found), strict=True):
            way = (None, 0) if claim.jobs else WAYS[claim.paper.split(":")[0]]
            bounds = [None if math.isinf(x) else x for x in (claim.above, claim.below)]
            assert bounds == list(way), claim.what
            spy = Spy(found)
            claim.value(spy, 42)
            jobs = spy.asked | spy.analysed | spy.scored.keys()
            if jobs:
                sizes = [here(Job(size=name)).size for name in re.findall(r"\[size (\w+)\]", claim.what)]
                assert set(sizes) <= {job.size for job in jobs}, claim.what
                lengths = re.findall(r"\[length (\d+)\]", claim.what)
                assert set(lengths) <= {str(job.length) for job in jobs}, claim.what
                assert "[" not in row["what"] and row["what"] == found.in_words(claim.what), claim.what
            seeds = [seed for seed in (42, 1) if all(seed in made.seeds(job) for job in jobs or [Job(length=512)])]
            numbers = [worked_out(made, claim, jobs, seed) for seed in seeds]
            assert row["seeds"] == seeds and row["values"] == pytest.approx(numbers, abs=1e-9), claim.what


def test_when_vanilla_overtakes(monkeypatch):
    """Mean and interval over the seeds in which a crossing was seen."""
    at = [(1000, False), (3000, False), (0.0, False), (math.inf, True), (9000, True)]
    monkeypatch.setattr(tables, "critical", lambda found, job, seed: at[seed])
    found = Fake(seeds=lambda job: [2, 9] if job.mode == "svformer" else range(5))
    header, first, second = tables.critical_table(found, [("a", Job()), ("b", Job("svformer"))])
    # the deviation is 1414 steps, over √2 and times 12.706
    assert first == ["a", "2000 ± 12706", "2", "1", "1", "1"] and len(header) == len(first)
    assert second == ["b", "-", "0", "0", "1", "0"]


def test_critical_points_of_records():
    """Losses are means of 20 steps, and the window has 100: of -1 until step 1,500 and 3 after it, a window's mean is 0
    if it begins 75 steps before."""

    def run(mode):
        steps = np.arange(1, 6001)
        losses = 5 + np.where(steps <= 1500, -1.0, 3.0) * (mode == "svformer")
        start = dict.fromkeys(plot.START) | {"value_mode": mode, "seed": 42, "max_steps": 6000, "data": "d"}
        record = {"start": start, "losses": found_runs.means(losses, 20), "every": 20, "val": {}, "domains": {}}
        return found_runs.curves_of({"name": mode, "step_tokens": 2048.0, **record})

    found = Fake(run=lambda job, seed: run(job.mode), scale=SCALES["night"])
    middle = np.mean([1426, 1525])
    assert claims.critical(found, Job("svformer"), 42) == (pytest.approx(middle), False)


def test_whether_longer_ones_are_overtaken_later(monkeypatch):
    """The third: of ten pairs six are in order, one level. The last two have seen no crossing, and foresee none."""
    inf = math.inf
    for steps, share in (
        ((1, 2, 3, 4, inf), 1),
        ((5, 4, 3, 2, 1), 0),
        ((2, 1, inf, inf, 3), 6 / 9),
        ((0, 0, 0, 0, 0), None),
        ((0, inf, inf, inf, inf), None),
    ):
        at = dict(zip(LENGTHS, steps, strict=True))
        monkeypatch.setattr(claims, "critical", lambda found, job, seed, at=at: (at[job.length], False))
        assert claims.later_when_longer(None, 42) == (share if share is None else pytest.approx(share)), steps


def test_counts_of_claims():
    """Of several seeds: two confirmed, one contradicted, one undetermined; of one: two and one. What two figures say is
    counted once."""
    one_way, other_way = "one seed: the paper's way", "one seed: the other way"
    kinds = [(3, "confirmed"), (3, "confirmed"), (3, "contradicted"), (2, "undetermined")]
    kinds += [(1, one_way), (1, one_way), (1, other_way), (1, ""), (0, "undetermined")]
    table = [{"what": str(i), "n": n, "verdict": verdict} for i, (n, verdict) in enumerate(kinds)]
    said = claims.tally({"fig1": {"rows": table[:5]}, "fig2": {"rows": table[3:]}, "fig3": {"rows": []}})
    assert re.findall(r"\d+", said) == ["7", "4", "2", "1", "1", "2", "1"]


def test_numbers_of_the_paper():
    """Tables 1 and 5, whose averages the paper prints too."""
    for (mode, size), losses in tables.PAPER_LOSSES.items():
        assert losses[-1] == round(sum(losses[:7]) / 7, 4), (mode, size)
    for accuracies in tables.PAPER_ACCURACIES.values():
        assert accuracies[-1] == pytest.approx(sum(accuracies[:6]) / 6, abs=0.00051)
    assert tables.PARAMETERS == {size: N[size] for size in ("82M", "180M", "468M")}


def fake(values, **bounds):
    """The row of a claim that has these values by seed, or raises them."""

    def value(found, seed):
        if isinstance(values[seed], Exception):
            raise values[seed]
        return values[seed]

    figure = Figure("x", claims=(Claim("what", "paper", value, **bounds),), runs=(Job(), Job(length=512)))
    found = Fake(seeds=lambda job: range(len(values)) if job == Job() else [0], in_words=lambda text: text)
    (row,) = claim_rows(figure, found)
    return row


def test_rates_are_tuned_for_each_mode():
    """vanilla is best at 2, the other mode at 1, by the seed that all rates have. Seed 1 is there at these alone."""
    losses = {
        "vanilla": {1.0: [5.0], 2.0: [3.0, 3.2], 4.0: [4.0]},
        "resformer": {1.0: [2.9, 4.4], 2.0: [3.5], 4.0: [9]},
    }
    grid = {mode: [Job(mode, lr=rate) for rate in of] for mode, of in losses.items()}
    found = Fake(
        loss=lambda job, seed: losses[job.mode][job.lr][seed] if seed < len(losses[job.mode][job.lr]) else fail(NoSeed),
        seeds=lambda job: range(len(losses[job.mode][job.lr])),
        parameters=lambda job: 1_200_000,
        scale=SimpleNamespace(lr_factor=10),
    )
    jobs, vanilla = grid["resformer"], grid["vanilla"]
    assert claims.best_rate(found, vanilla).lr == 2 and claims.best_rate(found, jobs).lr == 1
    assert [claims.gap_at_best(jobs, vanilla)(found, seed) for seed in (0, 1)] == pytest.approx([-0.1, 1.2])
    assert claims.gap_at_others_best(jobs, vanilla)(found, 0) == pytest.approx(0.5)
    header, first, second = tables.rates_table(found, {("82M", mode): grid[mode] for mode in grid})
    assert len(header) == len(first) == 7 and first[:3] == ["1.2M", "Transformer", "20"]
    assert first[4:] == ["2", "-", "-"]
    gaps = ["+0.5500 ± 8.2589", "+0.5000"]
    assert second == ["1.2M", "ResFormer", "10 (end of the grid)", "3.6500 ± 9.5295", "2", *gaps]
    backwards = {("82M", mode): grid[mode][::-1] for mode in grid}  # the best is the last one
    assert list(tables.rates_table(found, backwards))[2] == second
    ax = matplotlib.figure.Figure().subplots()
    panels.draw_rates(ax, Panel("rates", "", tuple((mode, job) for mode in grid for job in grid[mode])), found)
    assert [y.tolist() for y in lines(ax)["Transformer"]] == [[10, 20, 40], [5.0, 3.0, 4.0]]  # through seed 0
    dots = [line.get_xydata().tolist() for line in ax.lines if line.get_linestyle() == "None"]
    assert [[20, 3.0], [20, 3.2]] in dots and [[10, 2.9], [10, 4.4]] in dots and len(dots) == 6


def test_intervals_are_students():
    """The table of quantiles against scipy's."""
    stats = pytest.importorskip("scipy.stats")
    for n, quantile in report.T_95.items():
        assert quantile == pytest.approx(stats.t.ppf(0.975, n - 1), abs=5e-4), n


def fail(error):
    raise error


def test_verdicts():
    """[1, 2, 3]: 2 ± 4.303 / √3 = 2.48. [-1, 2, 0.5]: 0.5 ± 3.73. [2.5, 2.6]: 2.55 ± 0.635."""
    for values, bounds, said in (
        ([1.0, 2.0, 3.0], dict(above=0.0), "undetermined"),
        ([1.0, 2.0, 3.0], dict(above=-0.5), "confirmed"),
        ([1.0, 2.0, 3.0], dict(below=4.4), "undetermined"),
        ([1.0, 2.0, 3.0], dict(below=4.5), "confirmed"),
        ([-1.0, 2.0, 0.5], dict(above=4.3), "contradicted"),
        ([-1.0, 2.0, 0.5], dict(above=4.2), "undetermined"),
        ([0.3], dict(below=0.0), "one seed: the other way"),
        ([0.3], dict(above=0.0), "one seed: the paper's way"),
        ([0.3, 0.5], {}, ""),
        ([None, None], dict(above=1.0), "undetermined"),
        ([2.5, 2.6], dict(above=1.9, below=3.2), "confirmed"),
        ([2.5, 2.6], dict(above=1.0, below=2.0), "undetermined"),
        ([2.5, 2.6], dict(above=1.0, below=1.9), "contradicted"),
        ([2.5, 2.6], dict(above=3.2, below=9.0), "contradicted"),
        ([0.5, 0.5], dict(above=0.0), "undetermined"),  # shares that are equal show no spread
        ([0.1, 0.1001, None], dict(above=0.0), "undetermined"),
        ([0.3, None], dict(above=0.0), "undetermined"),
    ):
        assert fake(values, **bounds)["verdict"] == said, (values, bounds)
    low, high = (2.0 + way * fake([1.0, 2.0, 3.0])["interval"] for way in (-1, 1))  # the interval ends at the bound
    for bound in (dict(above=high), dict(below=low), dict(above=low), dict(below=high)):
        assert fake([1.0, 2.0, 3.0], **bound)["verdict"] == "undetermined", bound
    row = fake([1.0, 2.0, 3.0])
    assert (row["mean"], row["n"]) == (2, 3) and row["interval"] == pytest.approx(2.4843, abs=1e-3)
    assert claim_cells(row) == ["what", "paper", "", "2.0000 ± 2.4843", "3"] and claim_cells(fake([None]))[3] == "-"
    assert claim_cells(fake([0.25, 0.75]) | {"what": "a − b"})[3] == "+0.5000 ± 3.1765"
    row = fake([0.3, NoSeed("no seed 1"), 0.5])
    assert row["values"] == [0.3, 0.5] and row["seeds"] == [0, 2] and row["n"] == 2
    row = fake([math.inf, 0.5, math.nan])  # JSON has no such numbers
    assert row["values"] == [None, 0.5, None] and row["n"] == 1 and row["mean"] == 0.5
    assert claim_cells(row)[4] == "1 of 3"
    for e in (UserError("missing"), KeyError("eq4")):  # what is damaged is no seed that is not there
        with pytest.raises(type(e)):
            fake([e])


def test_one_model_before_training_is_one_seed(found):
    found.seeds = lambda job: (42, 1, 2)  # --seeds=3
    for row in claim_rows(dataclasses.replace(FIGURES["fig1"], claims=FIGURES["fig1"].claims[:1]), found):
        assert row["n"] == 1 and row["interval"] is None


# ---- tables


def test_accuracies_and_losses(made, found):
    """Tables 1 and 5: means over seeds, the paper's numbers in brackets."""
    one = {line[0]: line[1:] for line in FIGURES["tab1"].table(found)}
    assert list(one) == [
        "",
        *("Transformer, length 128", "ResFormer, length 128", "Transformer, length 1,024", "ResFormer, length 1,024"),
    ]
    assert one[""] == [*SIX, "Avg"]
    seeds = [made.results(Job("resformer"), seed) for seed in (42, 1)]
    ours = [np.mean([results[task]["acc"] for results in seeds]) for task in SIX]
    paper = ("0.273", "0.148", "0.512", "0.182", "0.414", "0.604", "0.355")
    assert one["ResFormer, length 128"] == [
        f"{x:.4f} ({y})" for x, y in zip([*ours, np.mean(ours)], paper, strict=True)
    ]

    five = {line[0]: line[1:] for line in FIGURES["tab5"].table(found)}
    assert five[""] == ["CommonCrawl", "ArXiv", "mine", "Avg"] and len(five) == 7
    loss = np.mean([made.loss(Job("resformer"), seed) for seed in (42, 1)])
    values = [f"{x:.4f}" for x in (loss, loss + 0.1, loss + 0.2)]
    cells = [f"{values[0]} (3.3362)", f"{values[1]} (2.1518)", values[2], f"{values[0]} (2.7117)"]
    assert five["ResFormer, 81.9M parameters"] == cells


def test_tables_of_settings(found, data_dir):
    """Tables 2 to 4. Of the paper's own recipe ours and its numbers are equal."""
    shares = {line[0]: line[1:] for line in FIGURES["tab2"].table(found)}
    assert shares["prose"] == ["60.0%", "30,000", "-", "-"] and shares["code"][:2] == ["40.0%", "20,000"]
    for name, share in dict(CommonCrawl=50, C4=20, Github=10, Book=5, ArXiv=5, Wikipedia=5, StackExchange=5).items():
        assert shares[name] == ["-", "-", f"{share}%", f"{share / 5:.0f}B"], name
    assert list(tables.table3(found))[-1][1:4] == ["1,024 (64,000)", "1 (32)", "1 (1)"]
    found.scale = dataclasses.replace(SCALES["paper"], data_dir=str(data_dir))  # with data of 257 tokens
    last = list(tables.table3(found))[-1]  # the paper prints 32 steps of accumulation, and 4 are meant
    both = [f"{x} ({x})" for x in ("64,000", "32", "1")]
    assert last == ["64,000", *both, "4 (32)", "2,048,000 (2,048,000)"]
    four = {line[0]: line[1:] for line in tables.table4(found)}
    total = 2 * 257 * 512 + 8 * (4 * 512**2 + 3 * 512 * 1792 + 2 * 512) + 512
    assert four[""] == ["2M", "82M", "180M", "320M", "468M"] and four["parameters"][1] == f"{total:,}"
    assert four["width"][1] == "512 (512)" and four["FFN width"][0] == "56 (56)"
    assert [four[name][3] for name in ("layers", "width", "FFN width")] == ["15 (-)", "1,024 (-)", "3,584 (-)"]
    assert four["vocabulary"] == ["257 (50,277)"] * 5 and four["peak learning rate"] == ["0.0006 (0.0006)"] * 5
    assert four["warmup steps"][0] == "120 (120)" and four["tokens per step"][3] == "2,097,152 (2,097,152)"


def test_averages_are_of_tasks_that_all_models_of_a_length_have(made, found, monkeypatch):
    evaluation = Found.evaluation

    def without(self, job, seed, task):
        too_long = job == Job("resformer") and task in ("piqa", "hellaswag")
        return None if too_long else evaluation(self, job, seed, task)

    monkeypatch.setattr(Found, "evaluation", without)
    lines = {line[0]: line[1:] for line in FIGURES["tab1"].table(found)}
    ours, seeds = SIX[1:5], found.seeds(Job())
    mean = np.mean([made.results(Job(), s)[task]["acc"] for s in seeds for task in ours])
    assert (
        lines["Transformer, length 128"][-1] == f"{mean:.4f} (0.333) of 4"
        and lines["ResFormer, length 128"][0] == "- (0.273)"
    )
    assert lines["Transformer, length 128"][0][0] != "-" and " of " not in lines["ResFormer, length 1,024"][-1]
    row, _ = claim_rows(FIGURES["tab1"], found)
    both = [[made.results(Job(m), 42)[task]["acc"] for task in ours] for m in ("resformer", "vanilla")]
    assert row["values"][row["seeds"].index(42)] == pytest.approx(np.mean(both[0]) - np.mean(both[1]))


def test_seeds_with_unlike_tasks(found, monkeypatch):
    """The average is over the tasks that all scored seeds have. A seed without any score takes no part."""
    evaluation, missing = Found.evaluation, {1: ("piqa",)}
    monkeypatch.setattr(
        Found,
        "evaluation",
        lambda self, job, seed, task: None if task in missing.get(seed, ()) else evaluation(self, job, seed, task),
    )
    lines = {line[0]: line[1:] for line in FIGURES["tab1"].table(found)}
    assert lines["ResFormer, length 128"][-1].endswith(" of 5")
    missing[1] = SIX
    assert " of " not in {line[0]: line[1:] for line in FIGURES["tab1"].table(found)}["ResFormer, length 128"][-1]
    row = claim_rows(FIGURES["tab1"], found)[0]
    assert row["seeds"] == [42] and row["verdict"] in claims.ONE_SEED.values() and claim_cells(row)[4] == "1"


def test_tables_of_what_is_not_scored(made, found, tmp_path):
    bare = Found(tmp_path, found.scale, made.seeds)
    with pytest.raises(UserError, match="no task is scored at length 2,048; without the hub, set --eval_dir"):
        list(FIGURES["tab1"].table(bare))
    assert [row["n"] for row in claim_rows(FIGURES["tab1"], bare)] == [0, 0]


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
    needed = {cfg.units.here(job) for of in every for job in of.analysed}
    assert analysed == {name for name, plan in plans.items() if plan.job in needed}
    assert {(plans[name].job, plans[name].seed) for name in scored} == {
        (cfg.units.here(job), 42) for of in every if of.scored for job in of.runs
    }


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
    assert row["verdict"] == claims.ONE_SEED[row["mean"] < 0]
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
    refused(command("fig9", "--kept=true", "--run=false"), "82M-2048-resformer-42 is missing or not finished")
    assert "2 runs, 1 of them done" in command("fig9", "--kept=true", "--dry_run").stdout
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
        (kept,) = [plan.kept for plan in plans if plan.job.mode == "vanilla"]
        return kept

    assert [is_kept(name, full) for name in ("fig4", "fig9", "tab5")] == [True, True, True]
    assert [is_kept(name, bare) for name in ("fig4", "fig9", "tab5")] == [False, True, True]  # its analysis is drawn
    assert [is_kept(name, noted) for name in ("fig4", "fig9", "tab5")] == [True, False, True]  # its losses are
    assert not is_kept("tab5", full | {"every": 2})
    spectra = Figure("x", (Panel("spectrum", "", (("vanilla", Job()),)),))
    figures.FIGURES["fig4"] = spectra
    assert not is_kept("fig4", full)
    tokens = Figure("x", (Panel("tokens", "", (("vanilla", Job()),)),))
    figures.FIGURES["fig4"] = tokens
    assert is_kept("fig4", full) and not is_kept("fig4", noted)
    by_two = found_runs.make_record(folder, {"max_steps": 4, "out_dir": "elsewhere"}, 2)
    assert len(by_two["losses"]) == 2 and by_two["losses"][0] == pytest.approx(np.mean(full["losses"][:2]), abs=1e-5)
    assert by_two["settings"] == {"max_steps": 4}
    steps = found_runs.curves_of(by_two).steps
    assert (steps["step"].tolist(), steps["tokens"].tolist()) == ([2, 4], [256, 512])
    with pytest.raises(UserError, match="the record of 82M-2048-vanilla-42 has no training losses"):
        given = found_runs.curves_of(noted | {"name": folder.name})
        claims.critical(Fake(run=lambda job, seed: given, scale=SCALES["night"]), Job(), 42)
    given = Found("out", reproduce.SCALES["cpu"], lambda job: (42,), kept={folder.name: bare})
    with pytest.raises(UserError, match="analysis.json is missing"):
        given.by_layer(Job(), 42, "entropy")


@pytest.mark.parametrize("scale", ["cpu", "night"])
def test_committed_results_are_those_of_the_code(scale):
    """Captions, runs, claims and their verdicts, what is said of them, and the values of those on losses of modes."""
    results = json.loads((ROOT / f"results/{scale}.json").read_text())
    cfg = asked(*results["figures"], f"--scale={scale}")
    assert (results["scale"], results["units"]) == (SCALES[scale].what, units_in_words(SCALES[scale]))
    assert (ROOT / f"results/{scale}/README.md").read_text() == results_page.report_text(results, scale), (
        f"write it again: python -m paper.reproduce report --scale={scale}"
    )
    for name, record in results["figures"].items():
        figure = cfg.figures[name]
        assert record["caption"] == figure.caption, name
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
    results = json.loads((ROOT / "results/night.json").read_text())["figures"]
    need_files = {name for name in results if FIGURES[name].with_arrays or name in ("fig1", "tab2", "tab4")}
    (tmp_path / "night").mkdir()
    shutil.copy(ROOT / "results/night/runs.jsonl", tmp_path / "night")
    monkeypatch.setattr(results_page, "draw_figure", lambda *_: None)
    monkeypatch.chdir(tmp_path)  # no runs are here
    again = command(
        *(set(results) - need_files), "--scale=night", "--kept=true", "--run=false", f"--results_dir={tmp_path}"
    )
    assert again.returncode == 0, again.stderr
    for name, record in json.loads((tmp_path / "night.json").read_text())["figures"].items():
        assert {**record, "environment": None} == {**results[name], "environment": None}, name


def test_the_rates_of_scale_night_are_the_best():
    """Of five at 82M, and of those that another size's Figure 15 needs, by the seed that all have."""
    kept = found_runs.read_kept(ROOT / "results/night/runs.jsonl")
    night = SCALES["night"]
    found = Found("out", night, lambda job: (42,), kept=kept)
    for (size, mode), jobs in figures.GRIDS.items():
        if size == "82M" or (size, mode) in night.tuned:
            assert claims.best_rate(found, jobs) == night.here(Job(mode, size)), (size, mode)
    for (size, mode), rate in night.tuned.items():
        assert Job(mode, size, lr=rate) in figures.GRIDS[size, mode]


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


# ---- the parts that run other scripts


def plan_of(cfg, mode="resformer"):
    return next(plan for plan in reproduce.make_plans(cfg, {}) if plan.job.mode == mode)


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
    given = scored("winogrande", "12 tokens, but take a model of a longer one")  # this one is left out
    assert len(given) == len(SIX) and "resformer-42 has no winogrande: 12 tokens" in capsys.readouterr().out
    given = scored("openbookqa", "no file, no network")  # so are all that come after
    assert [g.task for g in given] == [("hellaswag",), ("openbookqa",)]
    assert "no file, no network" in capsys.readouterr().out
    plan.folder.mkdir(parents=True)
    results = {"hellaswag": {"acc": 0.3}, "piqa": {"acc": 0.5}, "loss": {"val": {}, "val_mean": 1.0}}
    done = {"checkpoints": {"x": {"step": 4, "mode": "resformer", "results": results}}}
    (plan.folder / "eval.json").write_text(json.dumps(done))
    assert [g.task for g in scored()] == [(task,) for task in SIX if task not in results]


def test_stale_analyses(tmp_path):
    assert reproduce.is_stale(tmp_path)
    path, weights = tmp_path / "analysis.json", tmp_path / "step_1.safetensors"
    for file in (path, weights):
        file.write_text("{}")
    for age, expected in ((-1, False), (1, True)):
        os.utime(weights, ns=(path.stat().st_mtime_ns + age * 10**9,) * 2)
        assert reproduce.is_stale(tmp_path) == expected, age


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
        (again,) = [other for other in reproduce.make_plans(asked("fig9"), kept) if other.folder == plan.folder]
        assert again.analyse == expected  # if it is made again, its next record has what this one has
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
        result, "not drawn: fig4, the first because", "analysis.json is missing; it should be what `python analyze.py"
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
