"""reproduce.py and the paper's figures: what is drawn and claimed, on made-up runs whose numbers can be worked out by
hand, and the command itself on runs that are small but real."""

import base64
import contextlib
import dataclasses
import fcntl
import functools
import html.parser
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, in_process, make_data, refused, script
from PIL import Image
from test_plot import make_run

import describe
import figures
import plot
import prepare
import reproduce
from analyze import AnalyzeConfig
from configurator import UserError, load_settings
from describe import count_parameters
from eval import EvalConfig
from figures import FIGURES, Claim, Figure, Found, Job
from model import GPT
from reproduce import SCALES, ReproduceConfig, Workers, analysis_seconds, settings
from train import TrainConfig
from value_modes import mode_name

N = {"2M": 1_623_856, "82M": 81_901_056, "180M": 179_874_048, "320M": 331_064_320, "468M": 467_921_920}
N_SV = {"2M": 1_623_088, "82M": 80_066_048, "180M": 173_385_984, "468M": 443_804_672}
TABLE5 = {  # averages, as the paper prints them
    "vanilla": {"82M": 2.7389, "180M": 2.5015, "468M": 2.2806},
    "resformer": {"82M": 2.7117, "180M": 2.4692, "468M": 2.2537},
}
LENGTHS = (512, 2048, 8192, 32000, 64000)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """The command sets handlers and threads for itself; a stray SIGTERM must not end the tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    threads, old = torch.get_num_threads(), {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    torch.set_num_threads(threads)
    for s, handler in old.items():
        signal.signal(s, handler)


def command(*words):
    """`python reproduce.py …` in this process."""
    return in_process(reproduce, *words)


def asked(*words):
    return load_settings(ReproduceConfig, list(map(str, words)))


# ---- the panels and their numbers


def axes():
    from matplotlib.figure import Figure as Paper

    return Paper().subplots()


def lines(ax):
    """{label without its seeds: (x, y)} of the lines that the legend shows."""
    found = {}
    for line in ax.lines:
        if not line.get_label().startswith("_"):
            found[re.sub(r", (1 seed|\d+ seeds.*)$", "", line.get_label())] = (line.get_xdata(), line.get_ydata())
    return found


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_saving_gives_the_papers_ten_percent():
    """PAPER 2.7: straight lines over ln N through Table 5's averages give 10.5, 10.4 and 10.3 %."""
    res, van = ([(N[size], loss) for size, loss in TABLE5[mode].items()] for mode in ("resformer", "vanilla"))
    assert [round(100 * x, 1) for x in plot.saving(res, van)] == [10.5, 10.4, 10.3]
    assert round(np.mean(plot.saving(res, van)), 3) == 0.104
    assert max(plot.saving(van, res)) < 0 and plot.saving(van, van) == pytest.approx([0, 0, 0], abs=1e-12)


def test_saving_of_exact_lines():
    def line(factor, sizes=(1e6, 3e6, 9e6)):  # of a model as good as vanilla with `factor` times the parameters
        return [(n, 5 - 0.2 * math.log(factor * n)) for n in sizes]

    assert plot.saving(line(1.25), line(1)) == pytest.approx([0.2] * 3)
    assert plot.saving(line(1 / 1.122), line(1)) == pytest.approx([-0.122] * 3)  # it needs 12.2 % more
    assert plot.saving(line(1.25, sizes=(2e6, 7e7)), line(1)) == pytest.approx([0.2] * 3)  # at sizes of its own


def test_saving_that_cannot_be_told():
    """Losses that do not fall with size have no line to measure along, and a flat one has no end."""
    flat, higher = [(1e6, 2.0), (2e6, 2.0), (3e6, 2.0)], [(1e6, 2.1), (2e6, 2.1), (3e6, 2.1)]
    rising, falling = [(1e6, 2.0), (2e6, 2.1)], [(1e6, 2.2), (2e6, 2.1)]
    assert plot.saving(flat, higher) == [None] * 3
    assert plot.saving(rising, falling) == plot.saving(falling, rising) == [None] * 2
    assert plot.saving([(1e6, 2.0), (2e6, 1.99)], falling) == [None] * 2  # 2**-20 of the parameters is no measurement
    assert plot.saving([(1e6, 2.15), (2e6, 2.05)], falling) == pytest.approx([1 - 2**-0.5] * 2)


def test_tokens_saved():
    x, target = [10, 20, 30, 40], ([10, 20, 30, 40], [9, 5, 3, 2.0])
    assert plot.tokens_saved((x, [4, 3, 1.5, 1]), target) == pytest.approx(1 - (20 + 10 * (3 - 2) / 1.5) / 40)
    # ends above it, at 2.1, where the target was after 39: it needs 40 instead
    assert plot.tokens_saved((x, [4, 3, 2.5, 2.1]), target) == pytest.approx(1 - 40 / 39)
    assert plot.tokens_saved((x, [9, 9, 9, 9.5]), target) == 1 - 40 / 10
    assert plot.tokens_saved((x, [1.9, 1, 1, 1]), target) == 0.75
    assert plot.tokens_saved((x, [4, 3, 2.5, 2.0]), target) == 0
    assert plot.tokens_saved((x, [4, 2, 2.5, 1]), target) == 0.5  # when it is there for the first time
    assert plot.tokens_saved((x, [4, 3, 1.5, 1]), ([40, 80], [3, 2.0])) == pytest.approx(1 - (80 / 3) / 80)
    assert plot.tokens_saved(target, target) == 0


def test_critical_point():
    x = np.arange(1.0, 101)
    assert plot.critical_point(x, (x - 30.25) * 0.01) == (pytest.approx(30.25), False)
    waves = np.where(x < 40, (x - 20.5) * 0.01, (x - 70.5) * 0.01)  # above at 20.5, below again at 40, above at 70.5
    assert plot.critical_point(x, waves) == (pytest.approx(70.5), False)
    assert plot.critical_point(x, np.full(100, -60.0)) == (math.inf, True)  # level
    assert plot.critical_point(x, (x - 150.0) * 0.01) == (pytest.approx(150), True)
    assert plot.critical_point(x, np.where(x < 95, x, -x)) == (math.inf, True)  # ends below and falls
    assert plot.critical_point(x, x) == (0, False) and plot.critical_point(x, -x) == (math.inf, True)
    bent = np.where(x <= 90, -50.0, (x - 120) * 1.0)  # the last tenth alone is the line
    assert plot.critical_point(x, bent) == (pytest.approx(120), True)
    assert plot.critical_point(np.array([1.0, 2]), np.array([-2.0, -1])) == (pytest.approx(3), True)


def test_layer_panel():
    ax = axes()
    rows = {"a": [[None, 1.0, 2.0], [None, 3.0, 5.0]], "b": [[1.0, 2.0, 4.0]]}
    plot.layer_panel(ax, rows, "height", 1, (2.5, "uniform"))
    found = lines(ax)
    assert found.keys() == {"a", "b", "uniform"} and legend_of(ax) == ["a, 2 seeds, min–max", "b, 1 seed", "uniform"]
    np.testing.assert_array_equal(found["a"], [[2, 3], [2, 3.5]])
    np.testing.assert_array_equal(found["b"], [[1, 2, 3], [1, 2, 4]])
    np.testing.assert_array_equal(found["uniform"][1], [2.5, 2.5])
    markers = [line for line in ax.lines if line.get_linestyle() == "None"]
    np.testing.assert_array_equal(markers[0].get_xydata(), [[2, 2], [3, 3.5]])
    corners = ax.collections[0].get_paths()[0].vertices
    assert set(corners[corners[:, 0] == 3][:, 1]) == {2, 5}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "height")
    other = axes()
    plot.layer_panel(other, {"a": [[1.0, 2.0]]}, "norm", 0)
    np.testing.assert_array_equal(lines(other)["a"], [[0, 1], [1, 2]])
    assert other.get_xlabel() == "state (0 = embedding)" and lines(other).keys() == {"a"}


def test_spectrum_panel():
    ax = axes()
    plot.spectrum_panel(ax, {"a": [[8.0, 4.0, 0.0], [4.0, 2.0, 0.0]], "b": [[2.0, 1.0]]})
    np.testing.assert_allclose(lines(ax)["a"], [[1, 2, 3], [6, 3, 1e-12]])
    np.testing.assert_allclose(lines(ax)["b"], [[1, 2], [2, 1]])
    low, high = ax.get_ylim()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and 0 < low < 1 and high > 8


def test_scaling_panel():
    ax = axes()
    points = {"a": [(100, [3.0, 5.0]), (10_000, [2.0])], "b": [(100, [3.5]), (1_000, [3.0]), (10_000, [2.5])]}
    plot.scaling_panel(ax, points)
    found = lines(ax)
    for label, first, last in (("a", 4, 2), ("b", 3.5, 2.5)):  # a's line goes through the mean of its seeds
        x, y = found[label]
        assert (x[0], x[-1]) == (pytest.approx(100), pytest.approx(10_000))
        np.testing.assert_allclose(y, first + (last - first) * np.log(x / 100) / np.log(100))
    marks = [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_linestyle() == "None" for _ in [0]]
    assert (100, 3) in marks and ax.get_xscale() == "log"
    assert sum(len(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None") == 6
    assert legend_of(ax) == ["a", "b"]


def test_critical_panel():
    ax = axes()
    points = {512: [(10.0, False), (0.0, False)], 2048: [(20.0, False)], 64000: [(99.0, True), (math.inf, True)]}
    plot.critical_panel(ax, points)
    crossed, predicted, never, always = ax.lines
    np.testing.assert_array_equal(crossed.get_xydata(), [[512, 10], [2048, 20]])
    np.testing.assert_array_equal(predicted.get_xydata(), [[64000, 99]])
    assert never.get_xdata().tolist() == [64000] and always.get_xdata().tolist() == [512]
    assert never.get_ydata()[0] > 0.9 and never.get_transform() == ax.get_xaxis_transform()  # at the top of the panel
    assert always.get_ydata()[0] < 0.1 and always.get_label() == "never ahead"
    assert predicted.get_markerfacecolor() == "none" != crossed.get_markerfacecolor()
    assert "extrapolated" in predicted.get_label() and (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    empty = axes()
    plot.critical_panel(empty, {512: [(math.inf, True)]})
    (line,) = empty.lines
    assert line.get_label() == "its lead does not shrink" == empty.get_legend().texts[0].get_text()


def test_heat_maps():
    from matplotlib.figure import Figure as Paper

    maps = {"importance": np.arange(6.0).reshape(2, 3), "norm of the hidden state": np.arange(9.0).reshape(3, 3)}
    paper = Paper()
    plot.heat_maps(paper, {"one": maps, "two": {name: 2 * of for name, of in maps.items()}})
    images = [ax.images[0] for ax in paper.axes if ax.images]
    for image, (factor, of) in zip(images, ((1, maps), (1, maps), (2, maps), (2, maps)), strict=True):
        hidden = "hidden" in image.axes.get_title(loc="left")
        expected = factor * of["norm of the hidden state" if hidden else "importance"]
        np.testing.assert_array_equal(image.get_array(), expected)
        assert image.get_extent() == [0.5, 3.5, -0.5, 2.5] if hidden else [0.5, 3.5, 0.5, 2.5]
        assert image.origin == "lower"  # row 0 is the first layer, below
    assert [image.axes.get_title(loc="left") for image in images] == [
        f"{label}: {name}" for label in ("one", "two") for name in maps
    ]


# ---- runs: settings, scales, names


def jobs():
    return list(dict.fromkeys(job for figure in FIGURES.values() for job in figure.jobs))


def test_default_job_is_the_papers_recipe():
    """train.py's defaults are Table 4; only how often it is evaluated, logged and saved may differ."""
    assert dataclasses.astuple(Job()) == ("vanilla", "82M", 2048, 6e-4, 120, "llama")
    values = settings(Job(), SCALES["paper"], 42, "x")
    mine, default = (dataclasses.asdict(TrainConfig(**of)) for of in (values, {}))
    assert {k for k in default if mine[k] != default[k]} <= {"out_dir", "eval_every", "log_every", "keep", "save_every"}
    assert mine["max_steps"] % mine["eval_every"] == 0 == mine["max_steps"] % mine["save_every"]
    words = reproduce.words(values)
    assert "--resume=auto" in words and not any(w.startswith(("--n_layer", "--seed", "--value_mode")) for w in words)


def test_paper_scale_is_tables_3_and_4():
    scale = SCALES["paper"]
    for length, batch, each in ((512, 4096, 128), (2048, 1024, 32), (8192, 256, 8), (32000, 64, 2), (64000, 32, 1)):
        cfg = TrainConfig(**settings(Job(length=length), scale, 42, "x"))
        assert (cfg.block_size, cfg.batch_tokens, cfg.micro_batch) == (length, batch * length, each)
        assert cfg.accumulation(8) == 4 and cfg.max_steps == 10_000
    for size, shape in {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}.items():
        for mode, total in (("vanilla", N[size]), ("svformer", N_SV[size])):
            cfg = TrainConfig(**settings(Job(mode, size), scale, 42, "x"))
            assert (cfg.n_layer, cfg.n_head, cfg.n_embd) == shape
            assert count_parameters(cfg.model(50277))[0] == total
    middle = TrainConfig(**settings(Job(size="320M"), scale, 42, "x"))
    assert count_parameters(middle.model(50277))[0] == N["320M"]
    gpt2 = TrainConfig(**settings(Job(arch="gpt2"), scale, 42, "x"))
    assert count_parameters(gpt2.model(50277))[0] == 77_752_320  # the paper's 78M
    big = TrainConfig(**settings(Job(size="468M"), scale, 42, "x"))
    assert big.eval_every * big.batch_tokens == 2_097_152_000  # every 2B tokens, Figure 6


def test_rates_and_warmups():
    """Rates are the paper's times one number; the paper's two lengths of warmup, Figure 15, are two here."""
    for name, steps, rate in (("paper", 10_000, 1), ("small", 1000, 1), ("cpu", 400, 5)):
        scale = SCALES[name]
        assert settings(Job(), scale, 1, "x")["max_steps"] == steps
        short, long = (settings(Job(warmup=n), scale, 1, "x")["warmup_steps"] for n in (120, 1200))
        assert (short, long) == (120, 1200) if name == "paper" else 1.2 * steps / 100 <= short < long <= steps / 4
        rates = [settings(Job(lr=lr), scale, 1, "x")["learning_rate"] for lr in (1e-4, 3e-4, 6e-4)]
        assert rates == pytest.approx([1e-4 * rate, 3e-4 * rate, 6e-4 * rate], rel=1e-12)


@pytest.mark.parametrize("name", SCALES)
def test_every_run_of_every_figure_is_valid(name):
    scale, folders = SCALES[name], set()
    for job in jobs():
        cfg = TrainConfig(**settings(job, scale, 7, f"out/{job.name}"))
        assert cfg.accumulation(max(1, scale.gpus)) >= 1
        assert mode_name(cfg.value_mode) == job.mode and cfg.arch == job.arch and cfg.seed == 7
        assert cfg.block_size == scale.lengths[job.length][0] and 1 <= cfg.warmup_steps < cfg.max_steps
        assert cfg.save_every <= cfg.max_steps / 2  # a kill costs half of a run at most
        cfg.model(2048)
        folders.add(job.name)
    assert len(folders) == len(jobs())
    assert len({cfg for cfg in (str(settings(job, scale, 7, "same")) for job in jobs())}) == len(jobs())
    tokens = {length: block * batch for length, (block, batch, _) in scale.lengths.items()}
    assert max(tokens.values()) / min(tokens.values()) < 1.03 and tuple(tokens) == LENGTHS
    assert scale.steps > 2 * scale.window


def test_the_command_for_data_makes_the_data_that_is_asked_for():
    for scale in SCALES:
        for given in ("", "elsewhere"):
            units = asked("all", f"--scale={scale}", f"--data_dir={given}").units
            python, file, *words = shlex.split(units.prepare)
            assert (python, file) == ("python", "prepare.py")
            cfg = load_settings(prepare.PrepareConfig, words)
            assert cfg.out_dir == units.data_dir == (given or SCALES[scale].data_dir)
    with pytest.raises(UserError, match="--out_dir=elsewhere"):
        reproduce.prepare(asked("fig9", "--data_dir=elsewhere"))


def test_names():
    odd = Job("svformer", lr=1e-4, warmup=1200, arch="gpt2")
    assert Job().name == "82M-2048-vanilla" and Job("cla2", "2M", 512).name == "2M-512-cla2"
    assert odd.name == "82M-2048-svformer-lr0.0001-warmup1200-gpt2"
    assert odd.baseline == Job("vanilla", lr=1e-4, warmup=1200, arch="gpt2")
    axis = itertools.product(("vanilla", "svformer"), ("2M", "82M"), (512, 2048), (1e-4, 6e-4), (120, 1200))
    every = [Job(*of, arch) for of in axis for arch in ("llama", "gpt2")]
    assert len({job.name for job in every}) == len(every) == 64


def test_seeds():
    cfg = asked("all")
    assert cfg.seeds_of(Job("key")) == (42, 1, 2) and cfg.seeds_of(Job(length=512)) == (42,)
    assert cfg.seeds_of(Job(size="180M")) == (42,) and cfg.seeds_of(Job(lr=1e-4)) == (42, 1, 2)
    two = asked("all", "--seeds=2")
    assert {two.seeds_of(job) for job in jobs()} == {(42, 1)}
    assert {asked("all", "--scale=paper").seeds_of(job) for job in jobs()} == {(42,)}
    plans = reproduce.plans(asked("fig4", "fig6", "--seeds=2", "--out_dir=o"))
    names = [str(of.folder) for of in plans]
    assert names[:3] == ["o/82M-2048-vanilla-42", "o/82M-2048-vanilla-1", "o/180M-2048-vanilla-42"]
    assert len(set(names)) == len(names) == 2 * 2 * 4 and {of.values["seed"] for of in plans} == {42, 1}
    assert {of.folder.name for of in plans if of.analyse} == {"82M-2048-vanilla-42", "82M-2048-vanilla-1"}
    for words, seeds in (((), {42}), (("--seeds=2",), {42, 1})):  # tasks cost more than small runs do
        scored = [of for of in reproduce.plans(asked("tab1", "tab5", *words)) if of.tasks]
        assert {of.seed for of in scored} == seeds and {of.job for of in scored} == {*RUNS["tab1"], *RUNS["tab5"]}
        assert all(of.tasks == {"table1", "table5"} for of in scored if of.job in (Job(), Job("resformer")))


# ---- figures, on made-up runs


def crc(*words):
    return zlib.crc32(" ".join(map(str, words)).encode())


def least_squares(size_and_loss):
    """(a, c) of L = a + c ln N, from the normal equations."""
    x, y = np.log([n for n, _ in size_and_loss]), np.array([loss for _, loss in size_and_loss])
    c = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return y.mean() - c * x.mean(), c


FITS = {mode: least_squares([(N[size], loss) for size, loss in of.items()]) for mode, of in TABLE5.items()}
STEPS, WINDOW, QUARTERS = 40, 5, (10, 20, 30, 40)
CROSSINGS = {512: 10.5, 2048: 15.5, 8192: 20.5, 32000: 30.5, 64000: 50.5}  # the last one only by extrapolation
LAYERS = {"2M": 4, "82M": 8, "180M": 12, "320M": 15, "468M": 24}
T = 2048
SIX = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")


class Made:
    """Runs of all figures: losses of Table 5 where it has them, an SVFormer that needs 12.2 % more parameters and
    crosses vanilla at CROSSINGS, and else numbers that differ from run to run."""

    def __init__(self, root):
        self.root = root
        for job, seed in [(of, i) for of in jobs() for i in self.seeds(of)]:
            folder = root / f"{job.name}-{seed}"
            total = (N_SV if job.mode == "svformer" else N)[job.size]
            val = dict(zip(QUARTERS[-len(self.val(job, seed)) :], self.val(job, seed), strict=True))
            make_run(folder, job.mode, seed, self.training(job, seed), val, parameters=total)
            numbers, arrays = self.analysis(job, seed)
            (folder / "analysis.json").write_text(json.dumps(numbers))
            np.savez(folder / "analysis.npz", **arrays)
            if results := self.results(job, seed):
                of = {"step_x": {"step": STEPS, "mode": job.mode, "results": results}}
                (folder / "eval.json").write_text(json.dumps({"checkpoints": of}))
        (root / "init-468M").mkdir()
        (root / "init-468M" / "analysis.json").write_text(json.dumps(self.analysis(Job("init", "468M"), 0)[0]))
        np.savez(root / "init-468M" / "analysis.npz", none=0)

    def seeds(self, job):
        return (42, 1) if (job.size, job.length) == ("82M", 2048) else (42,)

    def loss(self, job, seed):
        """Validation loss at the end."""
        plain = dataclasses.replace(job, size="82M", mode="vanilla") == Job()
        if plain and seed == 42 and job.mode in ("vanilla", "resformer"):
            a, c = FITS[job.mode]
            if job.size in ("320M", *TABLE5[job.mode]):
                return TABLE5[job.mode].get(job.size, a + c * math.log(N["320M"]))
        if plain and seed == 42 and job.mode == "svformer" and job.size != "2M":
            a, c = FITS["vanilla"]
            return a + c * math.log(N_SV[job.size] / 1.122)
        return 2.5 + crc("loss", job.name, seed) % 1000 / 1000

    def val(self, job, seed):
        """At each quarter of the 468M runs, at the end of others."""
        if job.size != "468M":
            return [self.loss(job, seed)]
        return [*((3.0, 2.6, 2.4) if job.mode == "vanilla" else (2.9, 2.5, 2.3)), self.loss(job, seed)]

    def training(self, job, seed):
        noise = np.random.default_rng(crc("train", job.baseline.name, seed)).random(STEPS) + 3
        if job.mode == "svformer":
            at = CROSSINGS[job.length] if job.lr == 6e-4 and job.arch == "llama" else 25.5
            return noise + 0.01 * (np.arange(1, STEPS + 1) - at)
        return noise + (job.mode != "vanilla") * np.random.default_rng(crc("of", job.name, seed)).random(STEPS)

    def analysis(self, job, seed):
        rng, L = np.random.default_rng(crc("analysis", job.name, seed)), LAYERS[job.size]
        names = ("first", "top_1", "top_2", "top_3", "top_10", "top_1%", "eq4", "eq6", "value_largest")
        layers = {name: rng.random(L).tolist() for name in names + ("value_norm_first", "value_norm_rest")}
        layers["entropy"] = (2 + 5 * rng.random(L)).tolist()
        layers["eq4"][0] = layers["eq6"][0] = None
        states = {k: rng.random(L + 1).tolist() for k in ("hidden_norm_first", "hidden_norm_rest", "hidden_similarity")}
        about = {"length": T, "entropy_uniform": 7.2025, "chunks_asked": 1000}
        both = {"layers": layers, "states": states}
        numbers = about | {where: {k: {"mean": v} for k, v in of.items()} for where, of in both.items()}
        shapes = dict(importance=(L, 256), value_norm=(L, 256), hidden_norm=(L + 1, 256), value_spectrum=(L, 64))
        return numbers, {name: rng.random(shape) for name, shape in shapes.items()}

    def layers(self, job, seed, key):
        numbers = self.analysis(job, seed)[0]
        return numbers["states" if key.startswith("hidden") else "layers"][key]["mean"]

    def results(self, job, seed):
        found, rng = {}, np.random.default_rng(crc("eval", job.name, seed))
        if job.mode in TABLE5 and job.size == "82M" and job.length in (2048, 64000):
            found |= {task: {"acc": float(rng.random())} for task in SIX}
        if job.mode in TABLE5 and job.length == 2048 and job.size != "320M":
            val = dict(zip(("CommonCrawl", "ArXiv", "mine"), rng.random(3).tolist(), strict=True))
            found["loss"] = {"val": val, "val_mean": sum(val.values()) / 3}
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture
def found(made, data_dir):
    scale = dataclasses.replace(SCALES["cpu"], window=WINDOW, data_dir=str(data_dir))
    return Found(made.root, scale, made.seeds, (), "python reproduce.py this")


def four(size, *more):
    names = {"Transformer": "vanilla", "NeuTRENO": "neutreno", "ResFormer": "resformer", "SVFormer": "svformer"}
    return {label: Job(mode, size) for label, mode in (names | dict(more)).items()}


def sized(*sizes, modes=("vanilla", "resformer")):
    labels = {"vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer"}
    return {(labels[mode], size): Job(mode, size) for mode in modes for size in sizes}


def modes(**labels):
    return {label.replace("_", " "): Job(mode) for label, mode in labels.items()}


CROSS = ("Cross Layer Attention", "cross")
TOPS = {"TOP-1": "top_1", "TOP-2": "top_2", "TOP-3": "top_3", "TOP-10": "top_10", "TOP-1%": "top_1%"}
# PAPER 2.2 and its section 1: what each panel shows, {legend: run}. A legend in several parts may have other words
# between them.
PANELS = {
    "fig1": [("initial", "", {}), ("public", "entropy", {}), ("layers", "entropy", four("468M"))],
    "fig2": [("layers", key, four("468M")) for key in ("first", "value_norm_first", "hidden_norm_first")],
    "fig4": [("layers", {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"},
              {"Current Attention (Eq 4)": Job(), "Identity Mapping (Eq 6)": Job()})],
    "fig5": [("relative", "", modes(CLAttention="cla2", Only_Share_Keys="share_k2", Only_Share_Values="share_v2"))],
    "fig6": [("scaling", "", sized("82M", "180M", "320M", "468M")),
             ("tokens", "", {"Transformer": Job(size="468M"), "ResFormer": Job("resformer", "468M")}),
             ("paper", "", {})],
    "fig7": [("relative", "", {("2,048",): Job("resformer"), ("32,000",): Job("resformer", length=32000),
                               ("64,000",): Job("resformer", length=64000)}),
             ("relative", "", modes(DenseFormer="denseformer", NeuTRENO="neutreno", ResFormer="resformer")
              | {"ResFormer+NeuTRENO": Job("resformer_neutreno")})],
    "fig8": [("relative", "", {f"λ = {x}": Job(f"resformer_lambda_{x}") for x in ("0.2", "0.5", "0.8", "1", "5")}
              | {"λ = 2": Job("resformer_lambda"), "ResFormer": Job("resformer")})],
    "fig9": [("relative", "", modes(Value="resformer", Key="key", Query="query"))],
    "fig10": [("relative", "", modes(Current_Attention="resformer", Identity_Mapping="identity",
                                     Cross_Layer_Attention="cross"))],
    "fig11": [("relative", "", modes(Only_First_layer="resformer", One_Adjacent_layer="resformer_prev",
                                     All_Previous_layer="resformer_all"))],
    "fig12": [("spectrum", "", sized("82M", "180M", "468M")), ("layers", "value_largest", sized("180M", "468M"))],
    "fig13": [("relative", "", {(name, f"{n:,}"): Job(mode, length=n) for n in (2048, 64000) for name, mode in
                                (("SVFormer", "svformer"), ("GQA2", "gqa2"), ("CLA2", "cla2"))}),
              ("relative", "", {"SVFormer+GQA4": Job("svformer_gqa4", length=64000), "GQA8": Job("gqa8", length=64000),
                                "CLA2+GQA4": Job("cla2_gqa4", length=64000)})],
    "fig14": [("relative", "", {(f"{n:,}",): Job("svformer", length=n) for n in LENGTHS}),
              ("critical", "", {str(n): Job("svformer", length=n) for n in LENGTHS})],
    "fig15": [("relative", "", {f"{x}": Job("svformer", lr=lr) for x, lr in (("0.0001", 1e-4), ("0.0003", 3e-4),
                                                                             ("0.0006", 6e-4))}),
              ("relative", "", {"120": Job("svformer"), "1200": Job("svformer", warmup=1200)}),
              ("relative", "", {"Llama 82M": Job("svformer"), "GPT2 78M": Job("svformer", arch="gpt2")}),
              ("scaling", "", sized("2M", "82M", "180M", "468M", modes=("vanilla", "svformer")))],
    "fig16": [("relative", "", modes(Value="svformer", Query="share_q", Key="share_k"))],
    "fig17": [("relative", "", {
        "First Layer": Job("svformer"), "First + Last Layer": Job("svformer_2anchors"),
        "First + One Middle + Last": Job("svformer_3anchors"), "First + Two Middle + Last": Job("svformer_4anchors")})],
    "fig18": [("public", "hidden_similarity", four("468M"))],
    "fig19": [("heat", "", four("468M"))],
    "fig20": [("layers", key, four("82M", CROSS)) for key in
              ("entropy", "first", "value_norm_first", "hidden_norm_first")],
    "fig21": [("layers", TOPS, dict.fromkeys(TOPS, job)) for job in four("468M").values()],
    "fig22": [("relative", "", {f"λ = {x}": Job(f"neutreno_{x}") for x in ("0.2", "0.6", "0.8")}
               | {"λ = 0.4": Job("neutreno")})],
    "tab1": [], "tab2": [], "tab3": [], "tab4": [], "tab5": [],
}  # fmt: skip
RUNS = {"tab1": [Job(m, length=n) for n in (2048, 64000) for m in TABLE5]}
RUNS["tab5"] = [Job(m, size) for m in TABLE5 for size in ("82M", "180M", "468M")]


def fits(label, paper):
    return set(paper) <= set(re.split(r",? ", label)) if isinstance(paper, tuple) else label == paper


def test_all_figures_are_there():
    assert list(FIGURES) == [f"fig{i}" for i in (1, 2, *range(4, 23))] + [f"tab{i}" for i in range(1, 6)]
    assert {name: bool(figure.panels) for name, figure in FIGURES.items()} == {n: bool(p) for n, p in PANELS.items()}
    assert all(figure.caption.endswith(".") for figure in FIGURES.values())


@pytest.mark.parametrize("name", PANELS)
def test_panels_show_what_the_papers_do(name):
    for panel, (kind, key, expected) in zip(FIGURES[name].panels, PANELS[name], strict=True):
        assert panel.kind == kind and panel.key == key
        assert len(panel.jobs) == len(expected)
        for label, job in panel.jobs.items():
            assert [of for paper, of in expected.items() if fits(label, paper)] == [job], label
    assert set(FIGURES[name].runs) == set(RUNS.get(name, ()))


class Spy(Found):
    """A Found that notes what it is asked for."""

    def __init__(self, *of):
        self.runs, self.analysed, self.scored = set(), set(), {}
        super().__init__(*of)

    def run(self, job, seed):
        self.runs.add(job)
        return super().run(job, seed)

    def analysis(self, job, seed):
        self.analysed.add(job)
        return super().analysis(job, seed)

    def evaluation(self, job, seed, task):
        self.scored.setdefault(job, set()).add(task)
        return super().evaluation(job, seed, task)


@contextlib.contextmanager
def papers():
    """What figures are drawn on, kept instead of being rendered."""
    from matplotlib.figure import Figure as Paper

    kept = []

    @contextlib.contextmanager
    def page(path, size):
        kept.append(Paper(figsize=size))
        yield kept[-1]

    with pytest.MonkeyPatch.context() as m:
        m.setattr(plot, "page", page)
        yield kept


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_names_all_that_it_needs_and_no_more(name, found):
    figure, spy = FIGURES[name], Spy(found.root, found.scale, found.seeds, (), found.make)
    with papers():
        if figure.panels:
            figures.draw("x.png", figure, spy)
    if figure.table:
        list(figure.table(spy))
    table = figures.rows(figure, spy)
    assert len(table) == len(figure.claims) and all(row["n"] for row in table)
    assert spy.runs | spy.analysed | spy.scored.keys() == set(figure.jobs) and spy.analysed == set(figure.analysed)
    tasks = {"table1": set(SIX), "table5": {"loss"}}.get(figure.tasks, set())
    assert set().union(*spy.scored.values()) == tasks and spy.scored.keys() == set(RUNS.get(name, ()))
    assert not spy.scored or set(figure.runs) == spy.scored.keys()


def test_what_a_figure_compares_with_is_among_its_runs():
    job = Job("svformer", "180M", 512, 1e-4, 1200, "gpt2")
    twin = dataclasses.replace(job, mode="vanilla")
    for kind in ("relative", "critical"):
        assert Figure("x", (figures.Panel(kind, jobs={"a": job}),)).jobs == [job, twin]
    for kind in ("layers", "spectrum", "heat", "public", "scaling", "tokens"):
        figure = Figure("x", (figures.Panel(kind, jobs={"a": job, "b": job}),), runs=(Job(),))
        assert figure.jobs == [Job(), job]
        assert figure.analysed == ([] if kind in ("scaling", "tokens") else [job])


def moving(y, window=WINDOW):
    return [sum(y[i : i + window]) / window for i in range(len(y) - window + 1)]


@pytest.mark.parametrize("name", [n for n, panels in PANELS.items() if any(p[0] == "relative" for p in panels)])
def test_relative_panels(name, made, found):
    """Each line is the run's loss minus that of vanilla with the same size, length, rate, warmup, architecture and
    seed, smoothed, and the mean over seeds."""
    with papers() as kept:
        figures.draw("x.png", FIGURES[name], found)
    for ax, panel, (kind, _, expected) in zip(kept[0].axes, FIGURES[name].panels, PANELS[name], strict=False):
        drawn = lines(ax)
        if kind == "relative":
            assert drawn.keys() == set(panel.jobs) and "Transformer" in ax.get_ylabel()
            low, high = ax.get_ylim()
            assert low < 0 < high and any(set(line.get_ydata()) == {0} for line in ax.lines)
            for label, (x, y) in drawn.items():
                (job,) = (of for paper, of in expected.items() if fits(label, paper))
                twin = Job("vanilla", job.size, job.length, job.lr, job.warmup, job.arch)
                gaps = [moving(made.training(job, s) - made.training(twin, s)) for s in made.seeds(job)]
                np.testing.assert_array_equal(x, np.arange(1, STEPS - WINDOW + 2))
                np.testing.assert_allclose(y, np.mean(gaps, axis=0), rtol=1e-9, atol=1e-12)
                seeds = {1: "1 seed", 2: "2 seeds, min–max"}[len(gaps)]
                assert any(text == f"{label}, {seeds}" for text in legend_of(ax))


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig4", "fig12", "fig18", "fig20", "fig21"])
def test_layer_panels(name, made, found):
    with papers() as kept:
        figures.draw("x.png", FIGURES[name], found)
    for ax, (kind, key, expected) in zip(kept[0].axes, PANELS[name], strict=False):
        if kind == "spectrum":
            for label, (x, y) in lines(ax).items():
                (job,) = (of for paper, of in expected.items() if fits(label, paper))
                values = [made.analysis(job, s)[1]["value_spectrum"][0] for s in made.seeds(job)]
                np.testing.assert_allclose(y, np.mean(values, axis=0))
                assert x.tolist() == list(range(1, 65))
        if kind not in ("layers", "public") or not expected:
            continue
        drawn = lines(ax)
        assert ("uniform attention" in drawn) == (key == "entropy")
        if key == "entropy":
            assert set(drawn.pop("uniform attention")[1]) == {7.2025}
        assert len(drawn) == len(expected)
        for label, (x, y) in drawn.items():
            (job,) = (of for paper, of in expected.items() if fits(label, paper))
            mine = key[label] if isinstance(key, dict) else key
            values = np.array([made.layers(job, s, mine) for s in made.seeds(job)], float).mean(axis=0)
            first = 0 if mine.startswith("hidden") else 1
            there = np.isfinite(values)
            np.testing.assert_array_equal(x, (first + np.arange(len(values)))[there])
            np.testing.assert_allclose(y, values[there])


def test_panels_of_their_own(made, found):
    """Figure 1's left, 6, 14's right, 15's last, 19: right x and y."""
    with papers() as kept:
        for name in ("fig1", "fig6", "fig14", "fig15", "fig19"):
            figures.draw("x.png", FIGURES[name], found)
    one, six, fourteen, fifteen, nineteen = kept
    left, twin = one.axes[0], one.axes[3]
    init = made.analysis(Job("init", "468M"), 0)[0]
    np.testing.assert_allclose(left.lines[0].get_xydata().T, [range(1, 25), init["layers"]["entropy"]["mean"]])
    np.testing.assert_allclose(twin.lines[0].get_ydata(), init["states"]["hidden_similarity"]["mean"][1:])
    np.testing.assert_array_equal(twin.lines[0].get_xdata(), range(1, 25))
    assert set(left.lines[1].get_ydata()) == {7.2025}
    assert "--public" in one.axes[1].texts[0].get_text()

    ours, tokens, paper = six.axes[:3]
    for ax, sizes in ((ours, ("82M", "180M", "320M", "468M")), (paper, ("82M", "180M", "468M"))):
        for label, mode in (("Transformer", "vanilla"), ("ResFormer", "resformer")):
            x, y = lines(ax)[label]
            assert (x[0], x[-1]) == (pytest.approx(N["82M"]), pytest.approx(N["468M"]))
            points = [(N[s], np.mean([made.loss(Job(mode, s), i) for i in made.seeds(Job(mode, s))])) for s in sizes]
            a, c = least_squares(points) if ax is ours else FITS[mode]
            np.testing.assert_allclose(y, a + c * np.log(x))
    np.testing.assert_allclose(lines(tokens)["ResFormer"], [[5120, 10240, 15360, 20480], [2.9, 2.5, 2.3, 2.2537]])
    np.testing.assert_allclose(lines(tokens)["Transformer"][1], [3.0, 2.6, 2.4, 2.2806])

    crossed, predicted = fourteen.axes[1].lines
    at = [[512, 8.5], [2048, 13.5], [2048, 13.5], [8192, 18.5], [32000, 28.5]]  # means over s to s + 4: 2 steps before
    np.testing.assert_allclose(crossed.get_xydata(), at)
    np.testing.assert_allclose(predicted.get_xydata(), [[64000, 48.5]])

    marks = [line.get_xydata()[0] for line in fifteen.axes[3].lines if line.get_linestyle() == "None"]
    expected = [
        (total, made.loss(Job(m, s), 42)) for m, of in (("vanilla", N), ("svformer", N_SV)) for s, total in of.items()
    ]
    for point in (p for p in expected if p[0] != N["320M"]):
        assert any(np.allclose(point, mark) for mark in marks), point

    images = [ax.images[0] for ax in nineteen.axes if ax.images]
    keys = ("importance", "value_norm", "hidden_norm")
    for image, (mode, key) in zip(
        images, itertools.product(("vanilla", "neutreno", "resformer", "svformer"), keys), strict=True
    ):
        whole = made.analysis(Job(mode, "468M"), 42)[1][key]
        np.testing.assert_allclose(image.get_array(), whole[:, :100])
        assert image.get_extent() == [0.5, 100.5, -0.5 if key == "hidden_norm" else 0.5, 24.5]


def test_the_line_of_figure_15_is_that_of_its_claim(made, found):
    """12.2 % is the gap of lines through 82M to 468M, and those are what a reader measures in the figure."""
    with papers() as kept:
        figures.draw("x.png", FIGURES["fig15"], found)
    x, y = lines(kept[0].axes[3])["Transformer"]
    losses = [
        (N[s], np.mean([made.loss(Job(size=s), i) for i in made.seeds(Job(size=s))])) for s in ("82M", "180M", "468M")
    ]
    assert (y[-1] - y[0]) / np.log(x[-1] / x[0]) == pytest.approx(least_squares(losses)[1])
    assert x[0] == pytest.approx(N_SV["82M"]) and x[-1] == pytest.approx(N["468M"])  # and goes no further


def test_public_models(made, data_dir, tmp_path):
    """Hugging Face models take the places of ours in Figure 18, and of the hint in Figure 1."""
    folders = []
    for i, name in enumerate(("Llama-8B", "Mistral-7B")):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "analysis.json").write_text(json.dumps(made.analysis(Job(name), i)[0]))
        np.savez(folders[-1] / "analysis.npz", none=0)
    found = Found(made.root, SCALES["cpu"], made.seeds, folders)
    found.window = WINDOW
    with papers() as kept:
        figures.draw("x.png", FIGURES["fig18"], found)
        figures.draw("x.png", FIGURES["fig1"], found)
    for ax, where, key, first in (
        (kept[0].axes[0], "states", "hidden_similarity", 0),
        (kept[1].axes[1], "layers", "entropy", 1),
    ):
        drawn = lines(ax)
        assert list(drawn) == ["Llama-8B", "Mistral-7B"]
        for i, (name, (x, y)) in enumerate(drawn.items()):
            values = made.analysis(Job(name), i)[0][where][key]["mean"]
            np.testing.assert_allclose(y, values)
            assert x.tolist() == list(range(first, first + len(values)))


# ---- claims


def expected_claims(made):
    """{figure: [(the paper's way, seed -> our number)]}, from the paper's text; the number of a "" has no way."""

    def gap(low, high, **kw):
        return "<0", lambda s: made.loss(Job(low, **kw), s) - made.loss(Job(high, **kw), s)

    def deep(mode, size, s):
        values = made.layers(Job(mode, size), s, "entropy")
        return np.mean(values[len(values) // 2 :])

    def ratio(mode, size, s, of):
        first, rest = (made.layers(Job(mode, size), s, f"{of}_norm_{part}") for part in ("first", "rest"))
        return [a / b for a, b in zip(first, rest, strict=True)]

    def over_vanilla(way, f, mode, size):
        return way, lambda s: f(mode, size, s) - f("vanilla", size, s)

    def entropy(mode, size):
        return over_vanilla(">0", deep, mode, size)

    def first(mode, size):
        return [
            over_vanilla("<0", lambda m, z, s: max(made.layers(Job(m, z), s, "first")), mode, size),
            over_vanilla(">0", lambda m, z, s: min(ratio(m, z, s, "value")), mode, size),
            over_vanilla("<0", lambda m, z, s: max(ratio(m, z, s, "hidden")), mode, size),
        ]

    def mean_top(mode, size, s):
        return np.mean(made.layers(Job(mode, size), s, "top_1"))

    def importance(mode, s):
        rows = made.analysis(Job(mode, "468M"), s)[1]["importance"]
        return max(row[0] / (sum(row[1:100]) / len(row[1:100])) for row in rows.tolist())

    def similarity(s):
        eq4, eq6 = (made.layers(Job(), s, key)[1:] for key in ("eq4", "eq6"))
        return np.mean(eq4) - np.mean(eq6)

    def most(size):
        def share(s):
            a, b = (made.layers(Job(m, size), s, "value_largest") for m in ("resformer", "vanilla"))
            return np.mean([x > y for x, y in zip(a, b, strict=True)])

        return ">0.5", share

    def only_42(value):
        def f(s):
            if s != 42:
                raise LookupError  # one of its runs has one seed
            return value

        return f

    def sv(**kw):
        return lambda s: made.loss(Job("svformer", **kw), s) - made.loss(Job(**kw), s)

    def change(**kw):
        return lambda s: sv(**kw)(s) - sv()(s)

    def accuracy(n):
        def mean(mode, s):
            return np.mean([made.results(Job(mode, length=n), s)[task]["acc"] for task in SIX])

        return ">0", lambda s: mean("resformer", s) - mean("vanilla", s)

    def domains(size):
        def mean(mode, s):
            return made.results(Job(mode, size), s)["loss"]["val_mean"]

        return "<0", lambda s: mean("resformer", s) - mean("vanilla", s)

    init = made.analysis(Job("init", "468M"), 0)[0]["layers"]["entropy"]["mean"]
    (a, c), (b, d) = FITS["resformer"], FITS["vanilla"]
    saved = np.mean([1 - math.exp((b + d * math.log(N[s]) - a) / c) / N[s] for s in ("82M", "180M", "320M", "468M")])
    step = 30 + 10 * (2.3 - 2.2806) / (2.3 - 2.2537)  # where ResFormer is at vanilla's last loss
    lam = "resformer_lambda"
    lams = [f"{lam}_{x}" for x in ("0.2", "0.5", "0.8", "1", "5")]
    neus = [f"neutreno_{x}" for x in ("0.2", "0.6", "0.8")]
    long = dict(length=64000)
    return {
        "fig1": [(">7.194<7.204", lambda s: np.mean(init)), (">7.1935", lambda s: min(init))]
        + [("<7.2045", lambda s: max(init))]
        + [entropy("resformer", "468M")]
        + [entropy("svformer", "468M")],
        "fig2": first("resformer", "468M"),
        "fig4": [(">0", similarity)],
        "fig5": [gap("share_v2", "share_k2"), gap("share_v2", "cla2")],
        "fig6": [(">0", only_42(saved)), (">0", lambda s: 1 - step / 40)],
        "fig7": [gap("resformer", x) for x in ("vanilla", "denseformer", "neutreno")]
        + [gap("resformer_neutreno", "resformer")]
        + [gap("resformer", "vanilla", length=n) for n in (32000, 64000)],
        "fig8": [gap(x, "vanilla") for x in (lam, *lams)] + [gap(lam, x) for x in lams],
        "fig9": [gap("resformer", "vanilla"), gap("vanilla", "query"), gap("vanilla", "key")],
        "fig10": [gap("vanilla", "identity"), gap("resformer", "cross")],
        "fig11": [gap("resformer", "resformer_prev"), gap("resformer", "resformer_all")],
        "fig12": [most("180M"), most("468M")],
        "fig13": [gap("gqa2", "svformer"), gap("svformer", "gqa2", **long), gap("svformer", "cla2", **long)]
        + [gap("svformer_gqa4", "gqa8", **long), gap("svformer_gqa4", "cla2_gqa4", **long)],
        "fig14": [(">0.5", only_42(1.0)), ("<0", lambda s: sv(length=64000)(s) - sv(length=512)(s))],
        "fig15": [("<0", change(lr=1e-4)), ("", change(warmup=1200)), ("", change(arch="gpt2"))]
        + [("<0", only_42(-0.122))],
        "fig16": [gap(a, b) for a in ("vanilla", "svformer") for b in ("share_q", "share_k")],
        "fig17": [gap("svformer_4anchors", "svformer_3anchors"), gap("svformer_3anchors", "svformer_2anchors")]
        + [gap("svformer_2anchors", "svformer")],
        "fig18": [],
        "fig19": [
            row
            for mode, (a, b, c) in {"resformer": ("<10", ">0.5", "<3"), "vanilla": ("", "", "")}.items()
            for row in (
                (a, lambda s, mode=mode: importance(mode, s)),
                (b, lambda s, mode=mode: min(ratio(mode, "468M", s, "value"))),
                (c, lambda s, mode=mode: max(ratio(mode, "468M", s, "hidden"))),
            )
        ],
        "fig20": [entropy("resformer", "82M"), *first("resformer", "82M"), entropy("cross", "82M")]
        + [("<0", lambda s: min(ratio("cross", "82M", s, "value")) - min(ratio("resformer", "82M", s, "value")))],
        "fig21": [over_vanilla("<0", mean_top, mode, "468M") for mode in ("resformer", "svformer")],
        "fig22": [gap(x, "vanilla") for x in ("neutreno", *neus)] + [gap("neutreno", x) for x in neus],
        "tab1": [accuracy(2048), accuracy(64000)],
        "tab2": [],
        "tab3": [],
        "tab4": [],
        "tab5": [domains(size) for size in ("82M", "180M", "468M")],
    }


@pytest.mark.parametrize("name", FIGURES)
def test_claims(name, made, found):
    """What each claim measures and which way the paper says it goes; of each seed that all of its runs have."""
    figure = FIGURES[name]
    for claim, row, (way, value) in zip(
        figure.claims, figures.rows(figure, found), expected_claims(made)[name], strict=True
    ):
        bounds = {">": claim.above, "<": claim.below}
        assert "".join(f"{sign}{x:g}" for sign, x in bounds.items() if x is not None) == way, claim.what
        numbers = []
        for seed in max((made.seeds(job) for job in figure.jobs), key=len):
            with contextlib.suppress(LookupError, FileNotFoundError):
                if all((made.root / f"{job.name}-{seed}").exists() for job in jobs_of(claim, found, seed)):
                    numbers.append(float(value(seed)))
        assert row["values"] == pytest.approx(numbers, abs=1e-9), claim.what
        assert row["mean"] == pytest.approx(np.mean(numbers)) and row["n"] == len(numbers) >= 1
        if way:
            limits = re.findall(r"([<>])([-.\d]+)", way)
            right = all((np.mean(numbers) > float(x)) == (sign == ">") for sign, x in limits)
            assert row["same"] == right, claim.what
        else:
            assert row["same"] is None is row["within"]


@pytest.mark.parametrize(
    "steps, share",
    [((1, 2, 3, 4, math.inf), 1), ((5, 4, 3, 2, 1), 0), ((2, 1, math.inf, math.inf, 3), 6 / 9)]
    + [((0, 0, 0, 0, 0), None), ((0, math.inf, math.inf, math.inf, math.inf), None)],
)
def test_whether_longer_ones_are_overtaken_later(monkeypatch, steps, share):
    """The third: of ten pairs six are in order, one level. The last two have seen no crossing, and foresee none."""
    at = dict(zip(LENGTHS, steps, strict=True))
    monkeypatch.setattr(figures, "critical", lambda found, job, seed: (at[job.length], False))
    assert figures.later_when_longer(None, 42) == (share if share is None else pytest.approx(share))


def test_counts_of_claims():
    """Told by several seeds: two the same way, one the other way, one within their spread; by one: two and one. What
    two figures say is counted once."""
    kinds = [(3, True, False), (3, True, False), (3, False, False), (2, False, True)]
    kinds += [(1, True, None), (1, True, None), (1, False, None), (1, None, None), (0, None, None)]
    table = [{"what": str(i), "n": n, "same": same, "within": within} for i, (n, same, within) in enumerate(kinds)]
    said = reproduce.tally({"fig1": {"rows": table[:5]}, "fig2": {"rows": table[3:]}, "fig3": {"rows": []}})
    assert re.findall(r"\d+", said) == ["7", "4", "2", "1", "1", "3", "2", "1"]


def jobs_of(claim, found, seed):
    """The runs that a claim reads with seed 42."""
    spy = Spy(found.root, found.scale, found.seeds, (), found.make)
    claim.value(spy, 42)
    return spy.runs | spy.analysed | spy.scored.keys()


def test_numbers_of_the_paper():
    """As the paper prints them: what claims show beside ours, Tables 1 and 5."""
    said = {name: [claim.paper for claim in figure.claims] for name, figure in FIGURES.items()}
    assert said["fig1"][:3] == ["7.194–7.204", "7.194", "7.204"] and said["fig6"] == ["0.104", "0.136"]
    assert said["fig15"][-1] == "-0.122" and said["fig19"] == ["below 10", "above 0.5", "below 3", "", "", ""]
    assert said["tab1"] == ["+0.022"] * 2 and said["tab5"] == ["-0.0272", "-0.0323", "-0.0269"]
    for (mode, size), losses in figures.TABLE5.items():
        assert losses[-1] == TABLE5[mode][size] == round(sum(losses[:7]) / 7, 4)
    assert figures.TABLE5["resformer", "180M"][:4] == (3.0631, 3.2504, 1.2200, 2.1350)
    assert figures.TABLE5["vanilla", "82M"][4:7] == (2.9047, 3.3797, 2.1779)
    assert figures.TABLE5["vanilla", "468M"][:7] == (2.8514, 3.0430, 1.0908, 1.9628, 2.2821, 2.8979, 1.8362)
    assert figures.DOMAINS == ("CommonCrawl", "C4", "Github", "StackExchange", "Wikipedia", "Book", "ArXiv")
    for accuracies in figures.TABLE1.values():
        assert accuracies[-1] == pytest.approx(sum(accuracies[:6]) / 6, abs=0.00051)
    assert figures.TABLE1["resformer", 64000] == (0.274, 0.136, 0.513, 0.184, 0.407, 0.588, 0.350)
    assert figures.TABLE1["resformer", 2048][:6] == (0.273, 0.148, 0.512, 0.182, 0.414, 0.604)
    assert [figures.TABLE1["vanilla", n][0] for n in (2048, 64000)] == [0.263, 0.267]
    assert figures.PARAMETERS == {size: N[size] for size in ("82M", "180M", "468M")}


def fake(values, **bounds):
    """The row of a claim that has these values by seed; LookupError stands for a run that a seed does not have."""

    def value(found, seed):
        if isinstance(values[seed], Exception):
            raise values[seed]
        return values[seed]

    figure = Figure("x", claims=(Claim("what", "paper", value, **bounds),), runs=(Job(), Job(length=512)))
    seeds = SimpleNamespace(seeds=lambda job: tuple(range(len(values))) if job == Job() else (0,))
    (row,) = figures.rows(figure, seeds)
    return row


def test_rows():
    row = fake([1.0, 2.0, 3.0], above=0.0)
    assert (row["mean"], row["std"], row["n"], row["same"], row["within"]) == (2, 1, 3, True, False)
    assert row["values"] == [1, 2, 3] and (row["what"], row["paper"]) == ("what", "paper")
    row = fake([1.0, 2.0, 3.0], below=0.0)
    assert (row["same"], row["within"]) == (False, False)
    row = fake([-1.0, 2.0, 0.5], above=0.0)  # mean 0.5, std 1.5
    assert (row["same"], row["within"]) == (True, True)
    row = fake([-1.0, 2.0, 0.5], above=2.1)  # 1.6 below the bound
    assert (row["same"], row["within"]) == (False, False)
    row = fake([-1.0, 2.0, 0.5], below=1.9)  # 1.4 below it
    assert (row["same"], row["within"]) == (True, True)
    row = fake([0.3], below=0.0)
    assert (row["same"], row["within"], row["std"]) == (False, None, None)
    row = fake([0.3, 0.5])
    assert (row["same"], row["within"], row["mean"]) == (None, None, pytest.approx(0.4))
    row = fake([None, None], above=1.0)
    assert (row["same"], row["within"], row["mean"], row["std"], row["n"]) == (None, None, None, None, 0)
    row = fake([0.3, figures.NoSeed("no seed 1"), 0.5], above=0.0)
    assert row["values"] == [0.3, 0.5] and row["seeds"] == [0, 2] and row["n"] == 2 and row["same"]
    row = fake([math.inf, 0.5, math.nan], above=0.0)  # JSON has no such numbers
    assert row["values"] == [None, 0.5, None] and row["n"] == 1 and row["mean"] == 0.5
    between = dict(above=1.0, below=2.0)
    rows = [fake(values, **between) for values in ([1.5, 1.6], [1.0, 1.9], [2.5, 2.6], [0.5, 0.6])]
    assert [(row["same"], row["within"]) for row in rows] == [
        (True, False),
        (True, True),
        (False, False),
        (False, False),
    ]
    for e in (UserError("missing"), KeyError("eq4")):  # what is damaged is no seed that is not there
        with pytest.raises(type(e)):
            fake([e], above=0.0)


def test_words_for_rows():
    for values, bounds, said, ours in (
        ([1.0, 2.0, 3.0], dict(above=0.0), "same way", "2.0000 ± 1.0000"),
        ([1.0, 2.0, 3.0], dict(below=0.0), "the other way", "2.0000 ± 1.0000"),
        ([-1.0, 2.0, 0.5], dict(above=0.0), "same way, within the seeds' spread", "0.5000 ± 1.5000"),
        ([-0.25], dict(below=0.0), "same way, one seed", "-0.2500"),
        ([0.25], {}, "", "0.2500"),
        ([None], dict(above=0.0), "not to be told", "-"),
    ):
        row = fake(values, **bounds)
        assert reproduce.verdict(row) == said
        assert reproduce.cells(row) == ["what", ours, str(row["n"]), "paper", said]
    assert reproduce.cells(fake([0.25, 0.75]) | {"what": "a − b"})[1] == "+0.5000 ± 0.3536"
    kinds = {"same way": "same", "the other way": "other", "same way, one seed": "same", "": "open"}
    kinds |= {"the other way, within the seeds' spread": "open", "not to be told": "open"}
    assert {said: reproduce.colour(said) for said in kinds} == kinds


def test_a_resformer_that_never_gets_there_is_no_success(tmp_path):
    """Of two seeds one saves a quarter of the tokens and one ends above vanilla: that is not "same way, one seed"."""
    curves = {("vanilla", 42): [3.0, 2.5, 2.4, 2.0], ("resformer", 42): [3.0, 2.5, 2.0, 1.9]}
    curves |= {("vanilla", 1): [3.0, 2.5, 2.4, 2.0], ("resformer", 1): [3.5, 3.4, 3.3, 3.2]}
    for (mode, seed), of in curves.items():
        folder = tmp_path / f"468M-2048-{mode}-{seed}"
        make_run(folder, mode, seed, np.ones(STEPS), dict(zip(QUARTERS, of, strict=True)))
    found = Found(tmp_path, SCALES["cpu"], lambda job: (42, 1))
    claim = FIGURES["fig6"].claims[1]
    assert claim.value(found, 42) == pytest.approx(0.25)
    (row,) = figures.rows(dataclasses.replace(FIGURES["fig6"], claims=(claim,)), found)
    assert row["values"] == pytest.approx([0.25, 1 - 40 / 10]) and row["same"] is False and row["within"]


def test_one_model_before_training_is_one_seed(made, found):
    found.seeds = lambda job: (42, 1, 2)  # --seeds=3
    for row in figures.rows(dataclasses.replace(FIGURES["fig1"], claims=FIGURES["fig1"].claims[:2]), found):
        assert row["n"] == 1 and row["std"] is None


# ---- tables


def test_tables(made, found, data_dir):
    one = list(FIGURES["tab1"].table(found))
    assert one[0] == ["", *SIX, "Avg"] and len(one) == 5
    for line, (mode, n, paper) in zip(
        one[1:],
        [("vanilla", 2048, "0.333"), ("resformer", 2048, "0.355"), ("vanilla", 64000, "0.328")]
        + [("resformer", 64000, "0.350")],
        strict=True,
    ):
        job = Job(mode, length=n)
        ours = [np.mean([made.results(job, s)[task]["acc"] for s in found.seeds(job)]) for task in SIX]
        assert line[0] == f"{dict(vanilla='Transformer', resformer='ResFormer')[mode]} {n:,}"
        assert [cell.split()[0] for cell in line[1:]] == [f"{x:.4f}" for x in [*ours, np.mean(ours)]]
        assert line[-1].endswith(f"({paper})")
    assert one[2][5].endswith("(0.414)")

    two = list(FIGURES["tab2"].table(found))
    shares = {line[0]: line[1:] for line in two[1:]}
    assert shares["prose"] == ["60.0%", "30,000", "-", "-"] and shares["code"][:2] == ["40.0%", "20,000"]
    paper = dict(CommonCrawl=50, C4=20, Github=10, Book=5, ArXiv=5, Wikipedia=5, StackExchange=5)
    assert {k: v[2:] for k, v in shares.items() if k in paper} == {
        k: [f"{v}%", f"{v / 5:.0f}B"] for k, v in paper.items()
    }

    found.scale = dataclasses.replace(SCALES["paper"], data_dir=str(data_dir))
    three = list(FIGURES["tab3"].table(found))
    paper = [
        ["512", "512", "4,096", "128", "4", "2,097,152"],
        ["2,048", "2,048", "1,024", "32", "4", "2,097,152"],
        ["8,192", "8,192", "256", "8", "4", "2,097,152"],
        ["32,000", "32,000", "64", "2", "4", "2,048,000"],
        ["64,000", "64,000", "32", "1", "4", "2,048,000"],
    ]
    for line, row in zip(three[1:], paper, strict=True):  # the paper prints 32 steps of accumulation, and 4 are meant
        assert line == [row[0], *(f"{x} ({'32' if i == 3 else x})" for i, x in enumerate(row[1:]))]
    four = {line[0]: line[1:] for line in FIGURES["tab4"].table(found)}  # with data of 257 tokens
    total = 2 * 257 * 512 + 8 * (4 * 512**2 + 3 * 512 * 1792 + 2 * 512) + 512
    assert four[""] == ["2M", "82M", "180M", "320M", "468M"] and four["parameters"][1] == f"{total:,}"
    for name, values in {
        "layers": ("4", "8", "12", "24"),
        "heads": ("2", "8", "12", "16"),
        "width": ("16", "512", "768", "1,024"),
        "FFN width": ("56", "1,792", "2,688", "3,584"),
    }.items():
        assert [four[name][i] for i in (0, 1, 2, 4)] == [f"{x} ({x})" for x in values] and four[name][3].endswith(
            " (-)"
        )
    assert four["vocabulary"] == ["257 (50,277)"] * 5 and four["peak learning rate"] == ["0.0006 (0.0006)"] * 5
    assert four["warmup steps"][0] == "120 (120)" and four["steps"][0] == "10,000 (10,000)"
    assert four["tokens per step"][0] == "2,097,152 (2,097,152)"
    found.scale = SCALES["cpu"]
    assert list(FIGURES["tab3"].table(found))[-1][1:4] == ["1,024 (64,000)", "1 (32)", "1 (1)"]
    found.scale = dataclasses.replace(SCALES["paper"], data_dir=str(data_dir))

    five = list(FIGURES["tab5"].table(found))
    assert five[0] == ["", "CommonCrawl", "ArXiv", "mine", "Avg"] and len(five) == 7
    loss = made.results(Job("resformer", "180M"), 42)["loss"]
    line = next(line for line in five if line[0] == "ResFormer 180M")
    values = [f"{x:.4f}" for x in [*loss["val"].values(), loss["val_mean"]]]
    assert line[1:] == [f"{values[0]} (3.0631)", f"{values[1]} (1.9732)", values[2], f"{values[3]} (2.4692)"]


def test_averages_are_of_tasks_that_all_models_of_a_length_have(made, found, monkeypatch):
    evaluation = Found.evaluation

    def without(self, job, seed, task):
        too_long = job == Job("resformer") and task in ("piqa", "hellaswag")
        return None if too_long else evaluation(self, job, seed, task)

    monkeypatch.setattr(Found, "evaluation", without)
    lines = {line[0]: line[1:] for line in FIGURES["tab1"].table(found)}
    ours, seeds = SIX[1:5], found.seeds(Job())
    mean = np.mean([made.results(Job(), s)[task]["acc"] for s in seeds for task in ours])
    assert lines["Transformer 2,048"][-1] == f"{mean:.4f} (0.333) of 4" and lines["ResFormer 2,048"][0] == "- (0.273)"
    assert lines["Transformer 2,048"][0][0] != "-" and " of " not in lines["ResFormer 64,000"][-1]
    row, _ = figures.rows(FIGURES["tab1"], found)
    both = [[made.results(Job(m), 42)[task]["acc"] for task in ours] for m in ("resformer", "vanilla")]
    assert row["values"][row["seeds"].index(42)] == pytest.approx(np.mean(both[0]) - np.mean(both[1]))


def test_tables_of_what_is_not_scored(made, found, tmp_path):
    bare = Found(tmp_path, found.scale, made.seeds, (), "python reproduce.py tab5")
    with pytest.raises(
        UserError, match="no task is scored at length 2,048; `python reproduce.py tab5`, if need be with"
    ):
        list(FIGURES["tab1"].table(bare))
    assert [row["n"] for row in figures.rows(FIGURES["tab1"], bare)] == [0, 0]
    with pytest.raises(UserError, match="no losses by domain; make them: `python reproduce.py tab5`"):
        list(FIGURES["tab5"].table(bare))


# ---- plans


def formula(job, shape, vocab, length):
    """(parameters, training FLOPs per token) of a Llama: 6 N + 12 L d T, N without the embedding and gains."""
    L, _, d = shape
    f, owners = 3.5 * d, {"q": L, "k": L, "v": L}
    owners |= {"svformer": {"v": 1}, "share_q": {"q": 1}, "share_k": {"k": 1}}.get(job.mode, {})
    owners |= {"share_v2": {"v": L // 2}, "share_k2": {"k": L // 2}, "cla2": {"k": L // 2, "v": L // 2}}.get(
        job.mode, {}
    )
    group = {"gqa2": 2, "gqa8": 8, "svformer_gqa4": 4, "cla2_gqa4": 4}.get(job.mode, 1)
    owners |= {"svformer_gqa4": {"v": 1}, "cla2_gqa4": {"k": L // 2, "v": L // 2}}.get(job.mode, {})
    owners |= {f"svformer_{n}anchors": {"v": n} for n in (2, 3, 4)}.get(job.mode, {})
    projections = (owners["q"] + (owners["k"] + owners["v"]) / group) * d * d + L * d * d
    multiply = vocab * d + projections + L * 3 * d * f
    attention = 12 * L * d * length + (job.mode == "cross") * 12 * (L - 1) * d * length
    return multiply + vocab * d + (2 * L + 1) * d, 6 * multiply + attention


def table_of(text):
    """{run: cells} of the plan that is printed."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| 8"]
    rows += [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:3] in ("| 4", "| 1", "| 2", "| 3")
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """What --dry_run prints at each scale, without the seconds that it takes to time shapes; in an empty folder."""
    said, folder = {}, tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setattr(reproduce, "step_seconds", lambda values, device, vocab: 0.5)
        m.setattr(reproduce, "analysis_seconds", lambda values, device, vocab, chunks: 10.0)
        m.setattr(reproduce, "start_seconds", lambda: 6.0)
        for module in (reproduce, describe):  # which builds the shapes of a hundred models
            m.setattr(module, "count_parameters", functools.cache(count_parameters))
        for scale in SCALES:
            said[scale] = command("all", f"--scale={scale}", "--dry_run", *["--jobs=4"] * (scale == "cpu"))
            assert said[scale].returncode == 0, said[scale].stderr
    assert not list(folder.iterdir())  # nothing is written
    return {scale: result.stdout for scale, result in said.items()}


@pytest.mark.parametrize("scale", SCALES)
def test_dry_run_prints_the_commands(scale, planned):
    """Each is one that its script takes, and makes exactly the run that reproduce.py would."""
    text, cfg = planned[scale], asked("all", f"--scale={scale}")
    plans = {str(of.folder): of for of in reproduce.plans(cfg)}
    assert list(plans) == [f"out/{scale}/{job.name}-{seed}" for job in jobs() for seed in cfg.seeds_of(job)]
    assert cfg.units.prepare in text.splitlines()
    start = {"cpu": "python train.py ", "small": "python train.py "}.get(scale, "torchrun --nproc_per_node=8 train.py ")
    seen = set()
    for line in (line for line in text.splitlines() if " train.py " in line):
        assert line.startswith(start)
        given = load_settings(TrainConfig, shlex.split(line.removeprefix(start)))
        of = plans[given.out_dir]
        assert given == TrainConfig(**of.values, resume="auto")
        seen.add(given.out_dir)
    assert seen == plans.keys()
    analysed = {job for figure in FIGURES.values() for job in figure.analysed}
    found = {"analyze.py": set(), "eval.py": set()}
    for line in text.splitlines():
        for name, cls, words in (("analyze.py", AnalyzeConfig, "runs"), ("eval.py", EvalConfig, "runs")):
            if line.startswith(f"python {name} "):
                given = load_settings(cls, shlex.split(line)[2:], positional=words)
                found[name] |= {(run, getattr(given, "task", None)) for run in given.runs}
                if name == "analyze.py" and given.runs:
                    assert given.chunks == SCALES[scale].chunks and given.data_dir == SCALES[scale].data_dir
    assert {name for name, _ in found["analyze.py"]} >= {p for p, of in plans.items() if of.job in analysed}
    assert {(plans[p].job, plans[p].seed) for p, _ in found["eval.py"]} == {
        (job, 42) for name in ("tab1", "tab5") for job in RUNS[name]
    }


def test_dry_run_names_the_analyses_of_other_models(planned, monkeypatch, tmp_path):
    (line,) = (line for line in planned["cpu"].splitlines() if "size_468m" in line)
    given = load_settings(AnalyzeConfig, shlex.split(line)[2:])
    assert line.startswith("python analyze.py ") and given.out_dir == "out/cpu/init-468M" and given.length == 2048
    monkeypatch.chdir(tmp_path)
    said = command("fig18", "--scale=paper", "--dry_run", "--public=models/a b").stdout
    (line,) = (line for line in said.splitlines() if line.startswith("python analyze.py"))
    assert load_settings(AnalyzeConfig, shlex.split(line)[2:]).runs == ("models/a b",)


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_gpu_hours_are_flops_over_40_percent_of_an_a100(scale, planned):
    table, total, gpus = table_of(planned[scale]), 0.0, {"paper": 8, "small": 1}[scale]
    plans = reproduce.plans(asked("all", f"--scale={scale}"))
    assert table.keys() == {of.folder.name for of in plans}
    for of in plans:
        block, batch, _ = SCALES[scale].lengths[of.job.length]
        tokens = block * batch * SCALES[scale].steps
        parameters, flops = formula(of.job, SCALES[scale].sizes[of.job.size], 50277, block)
        hours = flops * tokens / (0.4 * 312e12) / 3600
        state, size, n, cost, disk = table[of.folder.name]
        if of.job.arch == "llama":
            assert state == "new" and int(n.replace(",", "")) == tokens
            assert float(cost.replace(",", "")) == pytest.approx(hours, abs=0.006 + 1e-4 * hours)
            if "dense" not in of.job.mode:
                assert int(size.replace(",", "")) == parameters
            copies = 2 if of.job.size == "468M" else 1  # the last checkpoint and the best
            assert float(disk) == pytest.approx(12 * parameters * copies / 1e9, abs=0.006)
        total += float(cost.replace(",", ""))
    last = planned[scale].splitlines()[-1]
    assert last.startswith(f"{len(plans)} runs, 0 of them done; ")
    said = float(re.search(r"([\d,.]+) GPU-hours", last)[1].replace(",", ""))
    assert said == pytest.approx(total, rel=1e-3)
    minutes = float(re.search(r"([\d,.]+) minutes with 1 at a time", last)[1].replace(",", ""))
    assert minutes == pytest.approx(total * 60 / gpus, rel=1e-3)


def test_memory_of_all_runs_at_a_time(planned):
    """What a process that has imported all, and tried the shapes, has taken, times 4."""
    said = float(re.search(r"; memory ([\d.]+) GB$", planned["cpu"].strip())[1])
    had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    assert (
        4 * 0.1 < said <= max(4 * (had + 8 * 3.5e6 / 1e9), had + 4 * 369.1e6 / 1e9) + 0.1
    )  # or the 468M before training
    assert "memory" not in planned["paper"]


def test_seconds_on_a_cpu_go_by_flops_from_one_timed_model(monkeypatch, planned):
    """0.5 s a step of vanilla is what `planned` was told: 400 of them, and other modes by their FLOPs."""
    table, (block, _, _), shape = table_of(planned["cpu"]), SCALES["cpu"].lengths[2048], SCALES["cpu"].sizes["82M"]
    for mode in ("vanilla", "resformer", "svformer", "cross", "gqa2"):
        ratio = formula(Job(mode), shape, 2048, block)[1] / formula(Job(), shape, 2048, block)[1]
        assert float(table[f"82M-2048-{mode}-42"][3]) == pytest.approx(400 * 0.5 * ratio / 3600, abs=0.0051)
    timed = []
    monkeypatch.setattr(reproduce, "step_seconds", lambda values, *_: timed.append(values) or 1.0)
    monkeypatch.setattr(reproduce, "analysis_seconds", lambda values, device, vocab, chunks: 10.0)
    plans = reproduce.plans(asked("fig9", "fig14"))
    assert "5 shapes" in reproduce.estimate(plans, asked("fig9", "fig14"), torch.device("cpu"))
    assert sorted(of["block_size"] for of in timed) == [64, 128, 256, 512, 1024]
    assert {of.analysis for of in plans} == {0}  # neither figure needs one
    (vanilla, *_), cfg = reproduce.plans(asked("fig4")), asked("fig4")
    reproduce.estimate([vanilla], cfg, torch.device("cpu"))
    assert (vanilla.seconds, vanilla.analysis) == (pytest.approx(400), pytest.approx(10))
    assert 0 < analysis_seconds(settings(Job(), tiny_scale("d"), 42, "x"), torch.device("cpu"), 257, 4) < 60


def test_a_step_is_timed_for_all_of_its_micro_batches(monkeypatch, data_dir):
    """By a clock that ticks once per look, forward and backward of a vanilla model take one second."""
    seen, precision, clock = [], [], itertools.count()

    class Watched(GPT):
        def forward(self, idx, *more):
            seen.append((tuple(idx.shape), mode_name(self.cfg.value_mode), self.cfg.vocab_size, int(idx.max()) < 257))
            precision.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return super().forward(idx, *more)

    monkeypatch.setattr(reproduce, "GPT", Watched)
    monkeypatch.setattr(reproduce, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    values = settings(Job("resformer"), tiny_scale(data_dir), 42, "x")
    cpu = torch.device("cpu")
    for micro, accumulation in ((8, 1), (2, 4)):
        assert reproduce.step_seconds(values | {"micro_batch": micro}, cpu, 257) == accumulation
        assert set(seen) == {((micro, 16), "vanilla", 257, True)} and set(precision) == {None}
        seen.clear()
    reproduce.step_seconds(values | {"dtype": "bfloat16"}, cpu, 257)
    assert precision[-1] == torch.bfloat16  # as train.py would compute


def test_a_dry_run_as_a_user_types_it(tmp_path):
    result = script("reproduce.py", "fig5", "tab3", "--scale=paper", "--dry_run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(table_of(result.stdout)) == 4 and not list(tmp_path.iterdir())
    assert "4 runs, 0 of them done; training takes 80.5 GPU-hours" in result.stdout


def test_one_run_takes_its_own_time(monkeypatch, tmp_path, data_dir):
    """200 s, however many could be run side by side."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "step_seconds", lambda values, device, vocab: 0.5)
    monkeypatch.setattr(reproduce, "analysis_seconds", lambda values, device, vocab, chunks: 0.0)
    monkeypatch.setattr(reproduce, "start_seconds", lambda: 0.0)
    said = command("fig4", "--seeds=1", "--dry_run", "--jobs=16", f"--data_dir={data_dir}").stdout
    assert re.search(r"([\d,.]+) minutes", said)[1] == "3"


def test_the_first_plan_is_of_the_data_that_it_makes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    scale = tiny_scale("later")
    monkeypatch.setattr(reproduce, "SCALES", {"cpu": scale})
    monkeypatch.setattr(reproduce, "prepare", lambda cfg: make_data(Path(cfg.units.data_dir)))
    monkeypatch.setattr(reproduce, "step_seconds", lambda *_: 1.0)

    def enough(*_):
        raise UserError("enough")

    monkeypatch.setattr(reproduce, "make", enough)
    parameters, _ = formula(Job(), (2, 2, 16), 257, 16)
    assert f"{parameters:,.0f}" in command("fig4").stdout
    assert reproduce.vocabulary(scale) == 257 and reproduce.vocabulary(tiny_scale("nowhere")) == 2048


def test_figure_18_of_public_models_trains_nothing():
    assert not reproduce.plans(asked("fig18", "--scale=paper", "--public=models/Llama-3.1-8B"))
    assert len(reproduce.plans(asked("fig18", "--scale=paper"))) == 4
    assert len(reproduce.plans(asked("fig1", "--scale=paper", "--public=models/Llama-3.1-8B"))) == 4


# ---- the command, on runs that are small but real


def tiny_scale(data, **kw):
    of = dict(sizes={"82M": (2, 2, 16), "468M": (2, 2, 16)}, lengths={2048: (16, 8, 8)}, steps=4, rate=5.0, seeds=1)
    of |= dict(gpus=0, data_dir=str(data), prepare="python prepare.py files --out_dir=d", window=2, evals=2, chunks=4)
    of |= dict(settings={"eval_tokens": 512, "dtype": "float32", "compile": False})
    return dataclasses.replace(SCALES["cpu"], what="tiny", **of | kw)


def shrink(put, data, only=(), **kw):
    """Make --scale=cpu tiny, and three figures of two runs, or fig9 of the runs `only`: put(object, name, value), as
    monkeypatch.setattr."""
    value = figures.relative("", {"Value": "resformer"})
    few = {"fig4": FIGURES["fig4"], "fig9": dataclasses.replace(FIGURES["fig9"], panels=(value,))}
    few["fig9"] = dataclasses.replace(few["fig9"], claims=few["fig9"].claims[:1])
    if only:
        few["fig9"] = Figure("Runs alone.", runs=only)
    few["tab5"] = dataclasses.replace(FIGURES["tab5"], runs=(Job(), Job("resformer")))
    few["tab5"] = dataclasses.replace(few["tab5"], claims=few["tab5"].claims[:1])
    put(reproduce, "start_seconds", lambda: 0.0)
    put(reproduce, "FIGURES", few)
    put(figures, "TABLE5", {key: of for key, of in figures.TABLE5.items() if key[1] == "82M"})
    put(reproduce, "SCALES", {"cpu": tiny_scale(data, **kw), "paper": SCALES["paper"]})


@pytest.fixture
def small(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    shrink(monkeypatch.setattr, data_dir)
    return tmp_path


@pytest.fixture(scope="module")
def real(tmp_path_factory, data_dir):
    """A folder in which all of the shrunken figures were made by one command, and what it said."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("OMP_NUM_THREADS", "1")
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        shrink(m.setattr, data_dir)
        result = command("all", "--jobs=2")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_trains_analyses_scores_and_draws(real, data_dir):
    folder, said = real
    out = folder / "out" / "cpu"
    assert {p.name for p in out.iterdir()} == {"82M-2048-vanilla-42", "82M-2048-resformer-42"}
    val = {}
    for mode in TABLE5:
        at = out / f"82M-2048-{mode}-42"
        found = plot.read_run(str(at))
        assert found.finished and (found.mode, found.last, found.seed) == (mode, 4, 42)
        config = json.loads((at / "config.json").read_text())
        assert (config["n_layer"], config["learning_rate"], config["block_size"]) == (2, 3e-3, 16)
        assert config["data_dir"] == str(data_dir)
        val[mode] = found.val[4]
        assert f"out/cpu/82M-2048-{mode}-42: validation loss {val[mode]:.4f}, " in said
    assert json.loads((out / "82M-2048-vanilla-42" / "analysis.json").read_text())["chunks"] == 4
    assert not (out / "82M-2048-resformer-42" / "analysis.json").exists()
    scored = {mode: plot.read_eval(str(out / f"82M-2048-{mode}-42"))[1]["loss"] for mode in val}

    results = json.loads((folder / "results" / "cpu.json").read_text())
    assert list(results["figures"]) == ["fig4", "fig9", "tab5"] and results["scale"] == "tiny"
    four, nine, table = results["figures"].values()
    (row,) = nine["rows"]
    assert row["values"] == [val["resformer"] - val["vanilla"]] and row["same"] == (row["mean"] < 0)
    assert nine["runs"] == ["82M-2048-resformer-42", "82M-2048-vanilla-42"] and nine["caption"] in said
    assert four["rows"][0]["n"] == 1 and {"commit", "torch"} <= four["environment"].keys()
    assert four["commits"] == [four["environment"]["commit"]] and "82M = 2 layers of 2 heads" in results["units"]
    assert table["rows"][0]["mean"] == pytest.approx(scored["resformer"]["val_mean"] - scored["vanilla"]["val_mean"])
    assert table["table"][0] == ["", *scored["vanilla"]["val"], "Avg"]
    assert table["table"][1][-1] == f"{scored['vanilla']['val_mean']:.4f} (2.7389)"
    assert f"| ResFormer 82M | {scored['resformer']['val']['prose']:.4f} |" in said and "png" not in table
    for name, record in (("fig4", four), ("fig9", nine)):
        assert record["png"] == f"cpu/{name}.png" and f"wrote results/cpu/{name}.png" in said
        assert (folder / "results" / record["png"]).read_bytes().startswith(PNG)
    assert f"| {row['what']} | {row['mean']:+.4f} | 1 | " in said


def test_what_a_run_leaves_on_disk_is_what_was_planned(real, small, data_dir):
    (of,) = (of for of in reproduce.plans(asked("fig4", f"--out_dir={real[0]}/out/cpu")))
    files = [p.stat().st_size for p in of.folder.glob("step_*")]
    assert of.state == "done" and 0.95 < sum(files) / of.disk < 1.3  # headers weigh on a model of 15,000 parameters


def test_a_second_call_trains_nothing(real, small, monkeypatch):
    def none(*_):
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(Workers, "call", none)
    monkeypatch.chdir(real[0])
    before, image = (real[0] / "results" / "cpu.json").read_text(), (real[0] / "results/cpu/fig9.png").read_bytes()
    for words in (("all",), ("all", "--run=false")):
        result = command(*words)
        assert result.returncode == 0, result.stderr
        kept = [[of[k] for of in json.loads(text)["figures"].values() for k in ("caption", "rows", "runs")] for text in
                (before, (real[0] / "results" / "cpu.json").read_text())]  # fmt: skip
        assert kept[0] == kept[1]
        assert (real[0] / "results/cpu/fig9.png").read_bytes() == image
        if words == ("all",):
            assert "2 runs, 2 of them done; training takes 0.0 core-hours" in result.stdout
            assert table_of(result.stdout)["82M-2048-vanilla-42"][0] == "done"
    assert "core-hours" not in result.stdout


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and text, of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag, name):
        return [attrs[name] for kind, attrs in self.tags if kind == tag and name in attrs]


def whole(path):
    """A report's text and page, after checking that a browser fetches nothing for it."""
    text = path.read_text()
    page = Page(text)
    bare = re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)
    assert "http" not in bare and "//" not in bare and "@import" not in bare and "url(" not in bare
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base")
        assert attrs.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attrs
        assert not re.match(r"[a-z]+:|/", attrs.get("href", "#"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {h[1:] for h in page.all("a", "href") if h[0] == "#"} == set(ids)
    return text, page


def test_report(real, small, monkeypatch):
    monkeypatch.chdir(real[0])
    result = command("report")
    assert result.returncode == 0 and "wrote report.html: 3 figures and tables" in result.stdout
    text, page = whole(Path("report.html"))
    assert text.startswith("<!DOCTYPE html>") and 'charset="utf-8"' in text
    images = [base64.b64decode(src.partition(",")[2]) for src in page.all("img", "src")]
    assert images == [Path(f"results/cpu/{name}.png").read_bytes() for name in ("fig4", "fig9")]
    for width, image in zip(page.all("img", "width"), images, strict=True):  # as wide as it is drawn, at 96 to the inch
        assert int(width) == pytest.approx(Image.open(io.BytesIO(image)).width / 150 * 96, abs=1)
    folders = [href for href in page.all("a", "href") if href[0] != "#"]
    assert len(folders) == 1 + 2 + 2 and all(Path(folder, "metrics.jsonl").exists() for folder in folders)
    for words in ("Figure 4", "Figure 9", "Table 5", "ResFormer 82M", "resformer − vanilla, validation loss"):
        assert words in page.text
    results = json.loads(Path("results/cpu.json").read_text())["figures"]
    for record in results.values():
        assert record["caption"] in page.text
    said = [row["same"] for record in results.values() for row in record["rows"]]
    counts = (
        f"{len(said)} are told by one seed only: {said.count(True)} go the same way, {said.count(False)} the other."
    )
    assert (
        f"Of the {len(said)} claims" in page.text and "0 are told by several seeds" in page.text and counts in page.text
    )


def test_report_of_all_figures(made, found, data_dir, monkeypatch, tmp_path):
    """Every figure and table with its caption and claims, whatever characters these hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "environment", lambda: {"machine": "M", "torch": "2", "commit": None})

    def draw(path, *_):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 150)).save(path)

    monkeypatch.setattr(reproduce, "draw", draw)
    cfg, odd = asked("all", f"--data_dir={data_dir}"), '<b>"A & B"</b> − lower'
    with contextlib.redirect_stdout(io.StringIO()):
        for name in reversed(FIGURES):  # in whatever order they are drawn
            figure = FIGURES[name]
            if name == "fig9":
                claim = dataclasses.replace(figure.claims[0], what=odd, paper="<i>less</i>")
                figure = dataclasses.replace(figure, caption='"<u>one</u>" & two.', claims=(claim,))
            reproduce.publish(name, figure, cfg, found)
        reproduce.report(cfg)
    text, page = whole(tmp_path / "report.html")
    assert [h for h in page.all("a", "href") if h[0] == "#"] == [f"#{name}" for name in FIGURES]
    assert len(page.all("img", "src")) == 21
    assert all(figure.caption in page.text for name, figure in FIGURES.items() if name != "fig9")
    assert all(claim.what in page.text for name, f in FIGURES.items() if name != "fig9" for claim in f.claims)
    assert odd in page.text and "<i>less</i>" in page.text and '"<u>one</u>" & two.' in page.text
    assert not {"b", "u", "i"} & {tag for tag, _ in page.tags}
    assert 'Figure 9: "<u>one</u>" & two.' in page.all("img", "alt")
    for figure in FIGURES.values():
        n = sum(len(cfg.seeds_of(job)) for job in figure.jobs)
        assert not n or f"<summary>{n} runs</summary>" in text


def test_report_links_to_where_the_runs_are(real, small, monkeypatch):
    monkeypatch.chdir(small)
    assert command("fig9", "--run=false", f"--out_dir={real[0]}/out/cpu").returncode == 0
    assert command("report").returncode == 0
    page = Page(Path("report.html").read_text())
    assert all(Path(href).exists() for href in page.all("a", "href") if href[0] != "#")


# ---- the command, interrupted


def numbers(folder):
    """What a run computed, and its last weights."""
    keep = [
        {k: r.get(k) for k in ("step", "loss", "grad_norm", "val_mean")}
        for r in records(folder)
        if r.get("event") != "start"
    ]
    return keep, sorted(folder.glob("step_*.safetensors"))[0].read_bytes()


def wait_for(condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def steps_in(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"lr"') if path.exists() else 0


def trainers(folder):
    """Process ids of the train.py that work in a folder, by Linux's /proc."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if any(w.endswith("train.py") for w in words) and any(w == f"--out_dir={folder}" for w in words):
                found.add(int(path.parent.name))
    return found


LONG = dict(only=(Job("resformer"),), steps=400, evals=1)
DRIVER = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import test_reproduce as t
t.shrink(setattr, {data!r}, **t.LONG)
t.run(t.reproduce.main)
"""


@pytest.fixture(scope="module")
def orphan(tmp_path_factory, data_dir):
    """A run whose reproduce.py was killed while train.py worked, and that a second reproduce.py brought to its end:
    (folder, what the second one said, the most processes that were seen to train in the folder)."""
    at = tmp_path_factory.mktemp("orphan")
    folder, most = at / "out" / "82M-2048-resformer-42", 0
    words = ["fig9", f"--out_dir={at / 'out'}", "--jobs=1"]
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    code = DRIVER.format(root=str(ROOT), data=str(data_dir))
    done, watch = threading.Event(), Path("/proc/self/cmdline").exists()

    def look():
        nonlocal most
        while not done.is_set():
            most = max(most, len(trainers(folder)))
            time.sleep(0.05)

    with subprocess.Popen([sys.executable, "-c", code, *words], cwd=at, env=env, stdout=subprocess.DEVNULL) as first:
        wait_for(lambda: steps_in(folder) > 5)
        first.kill()
    watcher = threading.Thread(target=look)
    if watch:
        assert len(trainers(folder)) == 1  # it outlives its parent
        watcher.start()
    with pytest.MonkeyPatch.context() as m:
        m.chdir(at)
        m.setenv("OMP_NUM_THREADS", "1")
        m.setenv("CUDA_VISIBLE_DEVICES", "")
        shrink(m.setattr, data_dir, **LONG)
        try:
            second = command(*words)
        finally:
            done.set()
            if watch:
                watcher.join()
    return folder, second, most


def test_killed_and_called_again(orphan):
    folder, second, most = orphan
    assert second.returncode == 0, second.stderr
    assert f"{folder}: another process is at work there, waiting for it" in second.stdout and most <= 1
    steps = [r["step"] for r in records(folder) if "event" not in r]
    assert steps == list(range(1, 401)) and sum(r.get("event") == "start" for r in records(folder)) == 1
    assert "already finished" in (folder / "train.log").read_text()
    assert plot.read_run(str(folder)).finished


def test_sigterm_saves_and_the_same_command_goes_on(orphan, small, data_dir, monkeypatch):
    """The interrupted run ends with the numbers and bytes of the one that no one touched."""
    shrink(monkeypatch.setattr, data_dir, **LONG)
    folder = small / "out" / "cpu" / "82M-2048-resformer-42"

    def stop():
        wait_for(lambda: steps_in(folder) > 20)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    result = command("fig9")
    thread.join()
    refused(result, "stopped, what was running has saved its state; go on with `python reproduce.py fig9")
    reached = steps_in(folder)
    assert 20 < reached < 400 and [p.stem[-8:] for p in folder.glob("step_*[0-9].safetensors")] == [f"{reached:08d}"]
    (plan,) = reproduce.plans(asked("fig9"))
    assert plan.state == "begun" and "stopped and saved" in (folder / "train.log").read_text()
    again = command("fig9")
    assert again.returncode == 0 and table_of(again.stdout)["82M-2048-resformer-42"][0] == "begun"
    assert sum(r.get("event") == "start" for r in records(folder)) == 2
    assert numbers(folder) == numbers(orphan[0])


def test_a_failing_command(tmp_path):
    workers = Workers(1, True)
    code = "import sys; print('first'); print('boom', file=sys.stderr); sys.exit(3)"
    with pytest.raises(UserError, match=r"failed \(3\): boom; all of it is in .*run/train.log"):
        workers.call([sys.executable, "-c", code], tmp_path / "run", "train.log")
    assert "first" in (tmp_path / "run" / "train.log").read_text()
    with pytest.raises(UserError, match=r"failed \(1\): nothing"):
        workers.call([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "run", "empty.log")
    workers.call([sys.executable, "-c", "print('fine')"], tmp_path / "run", "train.log")
    assert (tmp_path / "run" / "train.log").read_text().splitlines()[-1] == "fine"


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert Workers(4, True).env["OMP_NUM_THREADS"] == "2" and Workers(16, True).env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert Workers(1, True).env["OMP_NUM_THREADS"] == "7" == Workers(4, False).env["OMP_NUM_THREADS"]


def failing(monkeypatch, word):
    """Commands with that word end with exit code 1."""
    call, fails = Workers.call, [sys.executable, "-c", "raise SystemExit('it exploded')"]

    def made(self, command, *given):
        return call(self, fails if word in str(command) else command, *given)

    monkeypatch.setattr(Workers, "call", made)


def test_one_failing_run_does_not_keep_others_from_being_made(small, monkeypatch):
    failing(monkeypatch, "82M-2048-resformer")
    result = command("all", "--jobs=2")
    log = "out/cpu/82M-2048-resformer-42/train.log"
    refused(result, "not drawn: fig9, tab5; 1 commands failed, the first: `", f"exploded; all of it is in {log}")
    assert f"note: `{sys.executable}" in result.stdout and "82M-2048-vanilla-42: validation loss" in result.stdout
    assert list(json.loads((small / "results/cpu.json").read_text())["figures"]) == ["fig4"]


def test_failures_before_any_success_stop_all(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    shrink(monkeypatch.setattr, data_dir, only=tuple(map(Job, ("vanilla", "resformer", "key", "query", "cla2"))))
    failing(monkeypatch, "82M")
    result = command("fig9", "--jobs=1")
    refused(result, "3 commands failed, the first: `", "it exploded")
    assert len(list((tmp_path / "out/cpu").glob("*/train.log"))) == 3
    workers = Workers(1, True)
    for f in (lambda: None, *[lambda: workers.call(["false"], tmp_path / "x", "x.log")] * 5):
        workers.attempt(f)
    assert len(workers.failed) == 5 and not workers.stopped  # it has worked before


def test_stop_while_a_command_starts(monkeypatch, tmp_path):
    workers, popen, started = Workers(1, True), subprocess.Popen, []

    def meanwhile(*args, **kw):
        started.append(popen(*args, **kw))
        workers.stop()
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", meanwhile)
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    thread = threading.Thread(target=workers.call, args=(code, tmp_path / "run", "x.log"), daemon=True)
    thread.start()
    thread.join(5)
    works = thread.is_alive()
    started[0].kill()
    thread.join(10)
    assert not works


def test_stop_ends_the_wait_for_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    workers, run = Workers(1, True), tmp_path / "run"
    run.mkdir()
    with open(run / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code = ["-c", "open('ran', 'w')"]
        with contextlib.redirect_stdout(io.StringIO()):
            thread = threading.Thread(target=workers.call, args=([sys.executable, *code], run, "x.log"), daemon=True)
            thread.start()
            time.sleep(0.3)
            workers.stop()
            thread.join(5)
            waits = thread.is_alive()
    thread.join(10)
    assert not waits and not Path("ran").exists()


def test_locked_folders_are_waited_for(tmp_path):
    workers, run = Workers(1, True), tmp_path / "run"
    run.mkdir()
    with contextlib.redirect_stdout(io.StringIO()) as said, open(run / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code = [sys.executable, "-c", "print('ran')"]
        thread = threading.Thread(target=workers.call, args=(code, run, "x.log"), daemon=True)
        thread.start()
        wait_for(lambda: "waiting" in said.getvalue(), 5)
        assert thread.is_alive() and (run / "x.log").read_text() == ""
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join(10)
    assert (run / "x.log").read_text() == "ran\n" and said.getvalue().count("another process is at work there") == 1
    code = "import time; print('in', flush=True); time.sleep(0.3); print('out')"
    with contextlib.redirect_stdout(io.StringIO()):
        two = [threading.Thread(target=workers.call, args=([sys.executable, "-c", code], run, "two.log")) for _ in "ab"]
        for thread in two:
            thread.start()
        for thread in two:
            thread.join()
    assert (run / "two.log").read_text().split() == ["in", "out", "in", "out"]  # one after the other
    stopped = Workers(1, True)
    stopped.stop()
    stopped.call([sys.executable, "-c", "print('ran')"], tmp_path / "late", "x.log")
    assert (tmp_path / "late" / "x.log").read_text() == ""


# ---- the parts that run other scripts


class Recorded:
    """Workers that note their commands, and fail as they are told."""

    stopped = False

    def __init__(self, **fails):
        self.calls, self.fails = [], fails

    def call(self, command, folder, log):
        self.calls.append((Path(command[1]).name, *command[2:]))
        for word, message in self.fails.items():
            if any(word in part for part in command):
                raise UserError(message)


def plan(cfg, mode="resformer"):
    return next(of for of in reproduce.plans(cfg) if of.job.mode == mode)


def test_the_longest_runs_are_first(small, monkeypatch):
    order = []
    monkeypatch.setattr(reproduce, "make_run", lambda of, *_: order.append(of.seconds))
    monkeypatch.setattr(plot, "read_run", lambda folder: SimpleNamespace(val={1: 2.0}, last=1))
    todo = [SimpleNamespace(seconds=s, analysis=0.0, folder=Path("x")) for s in (3.0, 9.0, 1.0, 5.0)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        reproduce.make(todo, asked("fig9"), 1)
    assert order == [9, 5, 3, 1]
    assert said.getvalue().splitlines()[-1] == "x: validation loss 2.0000, 0 min left"


def test_torchrun_where_there_are_many_gpus(small, monkeypatch):
    cfg, workers = asked("fig9", "--scale=paper"), Recorded()
    monkeypatch.setattr(reproduce, "FIGURES", FIGURES)
    reproduce.make_run(plan(cfg), cfg, workers)
    ((_, *words),) = workers.calls
    assert words[:2] == ["torch.distributed.run", "--nproc_per_node=8"] and words[2].endswith("/train.py")
    assert load_settings(TrainConfig, words[3:]).out_dir == "out/paper/82M-2048-resformer-42"


def test_tasks_of_the_tables(small, tmp_path):
    cfg = asked("tab5", "--eval_dir=tasks")
    of, long = plan(cfg), "take a model of a longer one"

    def scored(group, of=of, **fails):
        workers = Recorded(**fails)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            reproduce.evaluate(of, group, cfg, workers)
        given = [load_settings(EvalConfig, list(words)) for name, *words in workers.calls if name == "eval.py"]
        assert len(given) == len(workers.calls) and all(g.runs == (str(of.folder),) for g in given)
        return given, said.getvalue()

    given, _ = scored("table5")
    assert [g.task for g in given] == [("loss",)] and given[0].corpus == cfg.units.data_dir
    given, _ = scored("table1")
    assert [g.task for g in given] == [(task,) for task in SIX] and {g.data_dir for g in given} == {"tasks"}
    given, said = scored("table1", winogrande=f"12 tokens, but {long}")  # this one is left out
    assert [g.task for g in given] == [(task,) for task in SIX] and "resformer-42 has no winogrande: 12 tokens" in said
    given, said = scored("table1", openbookqa="no file, no network")  # so are all that come after
    assert [g.task for g in given] == [("hellaswag",), ("openbookqa",)] and "no file, no network" in said
    of.folder.mkdir(parents=True)
    results = {"hellaswag": {"acc": 0.3}, "piqa": {"acc": 0.5}, "loss": {}}
    done = {"checkpoints": {"x": {"step": 4, "mode": "resformer", "results": results}}}
    (of.folder / "eval.json").write_text(json.dumps(done))
    given, _ = scored("table1")
    assert [g.task for g in given] == [(t,) for t in SIX if t not in results] and scored("table5")[0] == []


def test_stale_analyses(tmp_path):
    assert reproduce.stale(tmp_path, 10)
    path, weights = tmp_path / "analysis.json", tmp_path / "step_1.safetensors"
    for text, old, expected in (
        ('{"chunks_asked": 10}', True, False),
        ('{"chunks_asked": 20}', True, False),
        ('{"chunks_asked": 9}', True, True),
        ('{"chunks_asked": 10}', False, True),  # the weights are newer
        ("{}", True, True),
    ):
        path.write_text(text)
        weights.write_text("")
        os.utime(weights, ns=(path.stat().st_mtime_ns + (-1 if old else 1) * 10**9,) * 2)
        assert reproduce.stale(tmp_path, 10) == expected, text
    path.write_text("{")
    with pytest.raises(UserError, match="analysis.json is not a file of analyze.py"):
        reproduce.stale(tmp_path, 10)


def test_analyses_besides_the_runs(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    cfg = asked("fig1", "--public=models/Llama-8B,models/Mistral", f"--data_dir={data_dir}")
    commands, folders = zip(*reproduce.extra(cfg), strict=True)
    given = [load_settings(AnalyzeConfig, list(words)) for _, *words in commands]
    assert {name for name, *_ in commands} == {"analyze.py"} and {g.data_dir for g in given} == {str(data_dir)}
    assert [g.out_dir for g in given] == [str(folder) for folder in folders]
    init, *public = given
    shape = load_settings(TrainConfig, [str(ROOT / init.init[0])])
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.block_size) == (24, 16, 1024, 2048)
    assert init.length in (0, 2048) and init.chunks <= 16 and init.out_dir == "out/cpu/init-468M"
    assert [g.runs for g in public] == [("models/Llama-8B",), ("models/Mistral",)]
    assert [g.out_dir for g in public] == ["out/cpu/public/Llama-8B", "out/cpu/public/Mistral"]
    assert list(cfg.public_folders.values()) == [Path(g.out_dir) for g in public]
    assert {(g.chunks, g.dtype) for g in public} == {(SCALES["cpu"].chunks, "bfloat16")}
    for g in given:
        Path(g.out_dir).mkdir(parents=True)
        Path(g.out_dir, "analysis.json").write_text('{"chunks_asked": 200}')
    assert not reproduce.extra(cfg) and not reproduce.extra(asked("fig7", "--public=models/Phi"))
    same = asked("fig18", "--public=a/8B,b/8B")
    assert len({str(folder) for _, folder in reproduce.extra(same)}) == 2 == len(set(same.public_folders.values()))


def test_those_analyses_come_last_and_alone(small, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    calls = []
    monkeypatch.setattr(Workers, "call", lambda self, *of: calls.append((*of, self.env.get("OMP_NUM_THREADS"))))
    monkeypatch.setattr(
        reproduce, "extra", lambda cfg: [(["analyze.py", "--init=config/x.py", "--chunks=1"], Path("o"))]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        reproduce.make([], asked("fig9"), 2)
    ((words, folder, log, threads),) = calls
    assert words == [sys.executable, str(ROOT / "analyze.py"), f"--init={ROOT}/config/x.py", "--chunks=1"]
    assert (folder, log, threads) == (Path("o"), "analyze.log", None)


def test_a_users_threads_are_the_users(small, monkeypatch):

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    calls = []
    monkeypatch.setattr(Workers, "call", lambda self, *of: calls.append(self.env.get("OMP_NUM_THREADS")))
    monkeypatch.setattr(reproduce, "extra", lambda cfg: [(["analyze.py", "--init=config/x.py"], Path("o"))])
    with contextlib.redirect_stdout(io.StringIO()):
        reproduce.make([], asked("fig9"), 1)
    assert calls == ["3"]


def test_a_table_of_settings_needs_no_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr(reproduce, "prepare", made.append)
    result = command("tab3")
    assert result.returncode == 0 and not made and "| 64,000 | 1,024 (64,000) | 1 (32) | 1 (1) | " in result.stdout
    refused(command("tab4"), "data/small/tokenizer.json")
    assert len(made) == 1


def test_a_scale_without_gpus_uses_none(monkeypatch, tmp_path, data_dir):
    """Training, analyses and tasks name the processor, also where a GPU would be picked."""
    calls, cfg = [], asked("tab5", "fig20", "fig1", f"--out_dir={tmp_path}", f"--data_dir={data_dir}")
    monkeypatch.setattr(Workers, "call", lambda self, words, *of: calls.append([*map(str, words)]))
    with contextlib.redirect_stdout(io.StringIO()):
        of = next(of for of in reproduce.plans(cfg) if of.analyse and of.tasks)
        reproduce.make_run(of, cfg, Workers(1, True))
    calls += [words for words, _ in reproduce.extra(cfg)]
    files = [next(Path(word).name for word in words if word.endswith(".py")) for words in calls]
    assert files == ["train.py", "analyze.py", "eval.py", "analyze.py"]
    assert all("--device=cpu" in words for words in calls)
    paper = asked("fig1", "--scale=paper", f"--out_dir={tmp_path}", f"--data_dir={data_dir}")
    (of, *_), ((words, _),) = reproduce.plans(paper), reproduce.extra(paper)
    assert "device" not in of.values and "--device=cpu" not in [*words, *reproduce.chunk_words(paper)]


def test_data_is_made_at_scale_cpu_alone(monkeypatch, tmp_path, data_dir):
    monkeypatch.chdir(tmp_path)
    called, code = [], 0
    monkeypatch.setattr(subprocess, "call", lambda words: called.append(words) or code)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        reproduce.prepare(asked("fig9"))
    ((python, file, *words),) = called
    assert python == sys.executable and Path(file) == ROOT / "prepare.py" and SCALES["cpu"].prepare in said.getvalue()
    assert load_settings(prepare.PrepareConfig, words).out_dir == "data/small"
    code = 2
    with (
        pytest.raises(UserError, match=r"prepare.py pysource .* failed \(2\)"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        reproduce.prepare(asked("fig9"))
    reproduce.prepare(asked("fig9", f"--data_dir={data_dir}"))
    assert len(called) == 2  # what is there is not made again
    with pytest.raises(
        UserError, match="data/slimpajama has no manifest.json; make the data: `python prepare.py slimpa"
    ):
        reproduce.prepare(asked("fig9", "--scale=small"))
    with pytest.raises(UserError, match="elsewhere has no manifest.json"):
        reproduce.prepare(asked("fig9", "--data_dir=elsewhere"))


# ---- what is wrong is said in a sentence


def test_refused_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words, says in (
        ((), ("cannot reproduce 'nothing'", "fig1", "fig22", "tab5", "all", "report")),
        (("fig3",), ("cannot reproduce 'fig3'",)),
        (("fig4", "figure5"), ("cannot reproduce 'figure5'",)),
        (("report", "fig4"), ("report stands alone",)),
        (("fig4", "--seeds=11"), ("seeds=11", "10")),
        (("fig4", "--seeds=-1"), ("seeds=-1",)),
        (("fig4", "--jobs=-1"), ("jobs=-1",)),
        (("fig4", "--jobs=2", "--scale=paper"), ("jobs=2 would share the GPUs", "scale=paper")),
        (("fig4", "--scale=huge"), ("scale", "'cpu'", "'paper'")),
        (("fig4", "--figs=3"), ("unknown setting 'figs'",)),
        (("report",), ("results/cpu.json is missing", "python reproduce.py all --scale=cpu")),
        (("report", "--scale=paper"), ("results/paper.json is missing", "--scale=paper")),
        (("fig4", "--scale=paper"), ("scale=paper wants GPUs", "--dry_run", "--scale=cpu")),
        (("fig4", "--scale=small"), ("scale=small wants GPUs",)),
        (("fig4", "--data_dir=missing"), ("missing has no manifest.json", "python prepare.py")),
    ):
        refused(command(*words), *says)
    assert not list(tmp_path.iterdir())


def test_runs_that_are_missing(small):
    refused(
        command("fig9", "--run=false"), "out/cpu/82M-2048-resformer-42 is missing", "`python reproduce.py fig9 --sc"
    )
    make_run(small / "out/cpu/82M-2048-resformer-42", "resformer", 42, np.ones(3), val={}, max_steps=4)
    refused(command("fig9", "--run=false"), "is not finished (step 3/4)", "go on with it: `python reproduce.py fig9")
    make_run(small / "out/cpu/82M-2048-vanilla-42", "vanilla", 42, np.ones(4))
    refused(command("fig4", "--run=false"), "analysis.json is missing; make it: `python reproduce.py fig4 --scale=cpu`")
    refused(command("tab5", "--run=false"), "no losses by domain")


def test_a_figure_without_its_runs_does_not_keep_others_from_being_drawn(small):
    for mode in ("vanilla", "resformer"):
        make_run(small / f"out/cpu/82M-2048-{mode}-42", mode, 42, np.ones(4))
    result = command("all", "--run=false")
    refused(
        result, "not drawn: fig4, tab5; ", "analysis.json is missing; make it: `python reproduce.py all --scale=cpu`"
    )
    assert "no losses by domain" in result.stdout and (small / "results/cpu/fig9.png").exists()
    assert list(json.loads((small / "results/cpu.json").read_text())["figures"]) == ["fig9"]


def test_the_command_that_is_named_makes_what_is_missing(small):
    """The command that a sentence names is the one that was called, but for --run=false."""
    given = ["fig9", "--out_dir=else where", "--seeds=2", "--data_dir=d", "--results_dir=r", "--public=a,b/c"]
    given += ["--eval_dir=tasks"]
    said = re.search(r"`python reproduce.py (.*)`", command(*given, "--run=false").stderr)[1]
    assert asked(*shlex.split(said)) == asked(*given)
    assert asked("fig9", "fig4").command == "python reproduce.py fig9 fig4 --scale=cpu"


def other_settings(folder, mode="resformer", **kw):
    """A finished run's folder, its config.json with some settings changed."""
    make_run(folder, mode, 42, np.ones(4))
    values = settings(Job(mode), reproduce.SCALES["cpu"], 42, str(folder)) | kw
    config = dataclasses.asdict(TrainConfig(**values)) | {"value_mode_name": mode}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_run_of_other_settings(small, tmp_path):
    at = "82M-2048-resformer-42"
    for i, (key, value, was) in enumerate(
        (("learning_rate", 0.5, 0.003), ("max_steps", 8, 4), ("n_layer", 3, 2), ("seed", 1, 42))
    ):
        other_settings(tmp_path / str(i) / at, **{key: value})
        for words in ((), ("--run=false",), ("--dry_run",)):
            refused(
                command("fig9", f"--out_dir={i}", *words), f"{i}/{at} was trained with {key}={value} instead of {was}"
            )
    other_settings(tmp_path / "same" / at)
    other_settings(tmp_path / "same" / "82M-2048-vanilla-42", "vanilla", save_every=1, log_every=9, keep=5)
    assert command("fig9", "--out_dir=same", "--run=false").returncode == 0


def test_a_run_of_another_mode(small, tmp_path):
    other_settings(tmp_path / "o" / "82M-2048-resformer-42", "svformer")
    other_settings(tmp_path / "o" / "82M-2048-vanilla-42", "vanilla")
    refused(command("fig9", "--out_dir=o", "--run=false"), "82M-2048-resformer-42")


def test_runs_on_other_data(small, tmp_path, data_dir):
    other_settings(tmp_path / "o" / "82M-2048-resformer-42")
    other_settings(tmp_path / "o" / "82M-2048-vanilla-42", "vanilla")
    file = tmp_path / "o" / "82M-2048-vanilla-42" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"data": "d"', '"data": "e"'))
    refused(command("fig9", "--out_dir=o", "--run=false"), "data")


def test_all_runs_on_other_data(small, real, tmp_path):
    other = make_data(tmp_path / "other", seed=1)
    refused(command("fig9", f"--out_dir={real[0]}/out/cpu", f"--data_dir={other}"), "data")


def test_damaged_files(small, tmp_path):
    at = tmp_path / "out/cpu/82M-2048-vanilla-42"
    make_run(at, "vanilla", 42, np.ones(4))
    (at / "analysis.json").write_text("{")
    np.savez(at / "analysis.npz", none=0)
    refused(command("fig4", "--run=false"), "analysis.json is not a file of analyze.py")
    (at / "metrics.jsonl").write_text("{\n")
    make_run(tmp_path / "out/cpu/82M-2048-resformer-42", "resformer", 42, np.ones(4))
    refused(command("fig9", "--run=false"), "vanilla-42/metrics.jsonl is not a metrics.jsonl of train.py")
    (tmp_path / "results").mkdir()
    for text in ("[", "[]", "{}"):
        (tmp_path / "results" / "cpu.json").write_text(text)
        refused(command("report"), "results/cpu.json is not results of reproduce.py")
    (tmp_path / "results" / "cpu.json").write_text(
        json.dumps(
            {"scale": "x", "units": "u", "figures": {"fig9": dict(png="cpu/fig9.png", caption="c", rows=[], runs=[])}}
        )
    )
    refused(command("report"), "results/cpu/fig9.png is missing", "`python reproduce.py fig9 --scale=cpu`")


@pytest.mark.parametrize("text", ["{}", "[]", '{"layers": {}, "states": {}}'])
def test_analyses_of_another_shape(small, tmp_path, text):
    at = tmp_path / "out/cpu/82M-2048-vanilla-42"
    make_run(at, "vanilla", 42, np.ones(4))
    (at / "analysis.json").write_text(text)
    np.savez(at / "analysis.npz", none=0)
    refused(command("fig4", "--run=false"), "analysis.json")


def test_damaged_arrays(small, tmp_path):
    at = tmp_path / "out/cpu/82M-2048-vanilla-42"
    make_run(at, "vanilla", 42, np.ones(4))
    about = {"layers": {}, "states": {}, "length": 8, "entropy_uniform": 1.8}
    (at / "analysis.json").write_text(json.dumps(about))
    (at / "analysis.npz").write_text("half a file")
    refused(command("fig4", "--run=false"), "analysis.npz")


def test_arrays_of_another_shape(made, found, tmp_path):

    job = Job(size="468M")
    numbers, _ = made.analysis(job, 42)
    (tmp_path / f"{job.name}-42").mkdir()
    (tmp_path / f"{job.name}-42" / "analysis.json").write_text(json.dumps(numbers))
    np.savez(tmp_path / f"{job.name}-42" / "analysis.npz", none=0)
    one = dataclasses.replace(FIGURES["fig19"], panels=(figures.Panel("heat", jobs={"Transformer": job}),))
    with papers(), pytest.raises(UserError, match="analysis.npz"):
        figures.draw("x.png", one, Found(tmp_path, found.scale, lambda job: (42,)))


def test_a_folder_with_odd_characters(small):

    record = {"caption": "c", "rows": [], "runs": ["82M-2048-vanilla-42"], "out_dir": '"my" runs & #1', "commits": []}
    record["environment"] = {"machine": "M", "torch": "2", "commit": None}
    page = Page(reproduce.section("fig9", record, asked("report")))
    assert page.all("a", "href") == ["%22my%22%20runs%20%26%20%231/82M-2048-vanilla-42/"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"scale": "x", "figures": {"fig9": {}}}'])
def test_results_of_another_shape(small, tmp_path, text):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cpu.json").write_text(text)
    refused(command("report"), "results/cpu.json")


def test_public_models_without_a_figure_of_them(small, real, monkeypatch):
    monkeypatch.setattr(reproduce, "make", lambda *_: None)
    assert command("fig9", "--public=models/Llama-8B", f"--out_dir={real[0]}/out/cpu").returncode == 0


def test_without_matplotlib(small, real, monkeypatch):
    """It is missed before anything is made; a plan and a table do without."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(command("fig9"), "pip install matplotlib")
    assert not list(small.iterdir())
    assert command("fig9", "--dry_run").returncode == 0
    assert command("tab5", "--run=false", f"--out_dir={real[0]}/out/cpu").returncode == 0
    shutil.rmtree("results")
    refused(command("fig9", "--run=false", f"--out_dir={real[0]}/out/cpu"), "pip install matplotlib")
    assert not (small / "results").exists()
