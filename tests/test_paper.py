"""Figures, claims and tables of the paper's wing, on made-up runs whose numbers can be worked out by hand."""

import contextlib
import dataclasses
import json
import math
import re
import zlib
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest
from test_plot import make_run
from test_scales import JOBS, LENGTHS, N_SV, N, asked, here

import plot
import report
from oldconfig import UserError
from paper import claims, figures, panels, tables
from paper import found as found_runs
from paper.claims import Claim, claim_cells, claim_rows
from paper.figures import FIGURES, PAPER, Figure, Panel
from paper.found import Found, NoSeed
from paper.panels import draw_figure
from paper.runs import INSPECTED, SCALES, Job, train_settings
from train import TrainConfig
from value_modes import TABLE, get_mode, row_and_number

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
        about = {"mode": job.mode, "parameters": 7, "length": 2048, "entropy_uniform": 7.2025}
        both = {"layers": layers, "states": states}
        numbers = about | {where: {k: {"mean": v} for k, v in of.items()} for where, of in both.items()}
        shapes = dict(importance=(L, 256), value_norm=(L, 256), hidden_norm=(L + 1, 256), value_spectrum=(L, 64))
        return numbers, {name: rng.random(shape) for name, shape in shapes.items()}

    def layers(self, job, seed, key):
        """Means of a quantity over layers or states, norms relative to other tokens."""
        numbers = self.analysis(job, seed)[0]
        of = numbers["states" if key.startswith("hidden") else "layers"]
        if key.endswith("_norm"):
            parts = zip(of[f"{key}_first"]["mean"], of[f"{key}_rest"]["mean"], strict=True)
            return [first / rest for first, rest in parts]
        return of[key]["mean"]

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
    """Each mode is one that train.py takes; every row of the table that says where it is from is in figure modes."""
    assert list(PAPER) == [f"fig{i}" for i in (1, 2, *range(4, 23))] + [f"tab{i}" for i in range(1, 6)]
    assert list(FIGURES) == [*PAPER, "modes", "rates", "v5", "regime", "longer", "sizes", "gpu"]
    modes = FIGURES["modes"]
    for job in [*JOBS, *modes.jobs]:
        assert get_mode(job.mode).name == job.mode
    assert {job.mode for job in modes.jobs} >= {name for name, (_, _, source) in TABLE.items() if source}
    claimed = {claim.jobs for figure in FIGURES.values() for claim in figure.claims if claim.jobs}
    of_modes = [jobs for jobs in claimed if all(job == Job(job.mode) for job in jobs)]
    assert len(of_modes) == 44 and {job.mode for jobs in of_modes for job in jobs} <= {job.mode for job in modes.jobs}


def test_what_a_scale_leaves_out():
    """At scale night: gqa8, for which four heads are too few, the longest length, and runs that would say little; their
    claims too, and panels of which one line is left."""
    shown, claimed, panels = {}, {}, {}
    for scale in ("cpu", "night"):
        figures = asked("all", f"--scale={scale}").figures
        assert set(PAPER) - set(figures) == ({"fig12", "tab1"} if scale == "night" else set())
        shown[scale] = {job for figure in figures.values() for job in figure.jobs}
        claimed[scale] = {claim.what for figure in figures.values() for claim in figure.claims}
        panels[scale] = {panel.title for name in ("fig13", "fig15") for panel in figures[name].panels}
    gone = {"about 1/8 of the KV cache", "SVFormer by steps of warmup", "SVFormer by architecture"}
    assert panels["cpu"] - panels["night"] == gone and panels["night"] < panels["cpu"]
    longest = {job for job in shown["cpu"] if job.length == 64000}
    svformer = {Job("svformer", **what) for what in ({"lr": 1e-4}, {"warmup": 1200}, {"arch": "gpt2"})}
    baselines = {job.baseline for job in svformer}
    others = {Job(size="320M"), Job("resformer", size="320M")}
    assert shown["cpu"] - shown["night"] == longest | svformer | baselines | others
    assert shown["night"] <= shown["cpu"]
    gone = "\n".join(sorted(claimed["cpu"] - claimed["night"]))
    words = (
        "GQA8",
        "CLA2+GQA4",
        "ResFormer − Transformer at length [length 64000], validation loss",
        "rate 1e-4",
        "warmup 1200",
        "GPT2's",
        "mean accuracy",
        "largest eigenvalue",
    )
    assert all(word in gone for word in words) and len(gone.splitlines()) == 13, gone
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
        ("fig15", 1, ["20 steps of warmup", "60 steps of warmup"]),
    ):
        assert [label for label, _ in found.labels(FIGURES[name].panels[i].lines)] == labels
    titles = [ax.get_legend().get_title().get_text() for ax in axes_of(FIGURES["fig7"], found)]
    assert titles == [
        "by length\n81.9M parameters, length 128–1,024",
        "by mode\n81.9M parameters, length 128, 2 seeds ± std",
    ]
    night = Fake(scale=SCALES["night"], parameters=lambda job: 1_951_360)
    assert panels.real_size([Job()], night) == "1.95M parameters, length 128"
    size = "1.95M parameters, length 128,\ntrained with end-of-text first"
    assert panels.real_size([Job(size=INSPECTED)], night) == size


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
            assert len(expected) == len(panel.lines) and "vanilla" in ax.get_ylabel(), name
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
            modes = {row_and_number(job.mode)[0] for job in panel.jobs if panel.kind != "dots"}
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
        record = {"name": job.name, "processor": None, "start": start, "step_tokens": 2048.0, "every": every}
        return record | {"val": val, "domains": {"a": 2.0}, "losses": 2 + rng.random(steps // every)}


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
    """Losses minus vanilla's by seed, their mean and its interval, the lowest on top; one scale and one band for all
    groups."""
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
    mean, _, (bar,) = first.containers[0].lines
    assert mean.get_xdata().tolist() == pytest.approx([0.6])
    assert bar.get_segments()[0][:, 0].tolist() == pytest.approx([0.6 - 1.2706, 0.6 + 1.2706])  # 12.706 × 0.1
    (band,) = second.patches
    assert (band.get_x(), band.get_width()) == (-10, 20)  # vanilla's seeds end at 5 and 15
    (legend,) = first.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "a seed", "mean", "95 % interval", "vanilla", "as far as two of vanilla's seeds differ"
    ]  # fmt: skip
    assert legend.get_title().get_text() == "7 parameters, length 128, 6,000 steps"


def test_gaps_at_the_best_rates():
    """A row for each mode, the first one on top: its best rate against vanilla's best, with the seeds of both."""
    losses = {("vanilla", 1.0): [5.0, 5.2], ("vanilla", 2.0): [6.0], ("resformer", 1.0): [4.9, 4.9],
              ("resformer", 2.0): [4.8, 5.2, 9.0]}  # fmt: skip
    found = Fake(
        scale=SCALES["night"],
        loss=lambda job, seed: losses[job.mode, job.lr][seed],
        seeds=lambda job: range(len(losses[job.mode, job.lr])),
        parameters=lambda job: 7,
        labels=lambda lines: lines,
    )
    lines = [("base", Job(lr=lr)) for lr in (1.0, 2.0)] + [("ours", Job("resformer", lr=lr)) for lr in (1.0, 2.0)]
    figure = Figure("x", (Panel("best", "", tuple(lines)),))
    assert len(figure.jobs) == 4
    (ax,) = axes_of(figure, found)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["base", "ours"]
    dots = [line.get_xydata().round(9).tolist() for line in ax.lines if line.get_color() == "0.65"]
    assert dots == [[[0, 2], [0, 2]], [[-0.1, 1], [-0.3, 1]]]


def test_what_moves_the_sign():
    """A row for each difference, from the base down: a mark for each mode at its better rate, with the seeds that both
    have there; where there are two rates, arrows for both modes at one."""
    losses = {  # by mode and rate, of seeds 0 and 1
        ("vanilla", 1e-4): [5.0], ("vanilla", 2e-4): [4.0, 4.2],
        ("resformer", 1e-4): [4.5], ("resformer", 2e-4): [4.6, 4.6],
        ("svformer", 1e-4): [4.9], ("svformer", 2e-4): [3.5, 3.9],
    }  # fmt: skip
    found = Fake(
        scale=SCALES["night"],
        loss=lambda job, seed: losses[job.mode, job.lr][seed] + (job.mode == "resformer" and job.change != ""),
        losses=lambda job: losses[job.mode, job.lr],
        seeds=lambda job: (0,) if job.change else range(len(losses[job.mode, job.lr])),
        parameters=lambda job: 7,
        labels=lambda lines: lines,
        unit=lambda name, job: f"{job.lr:g}",
        rate_in_words=lambda job: ", rate 1" * (job.change != ""),
        record=lambda job, seed: {"processor": "another" if (job.mode, seed) == ("svformer", 1) else None},
    )
    half = "batch_tokens=1024"
    rows = [("base", Job("resformer", lr=lr)) for lr in (1e-4, 2e-4)]
    rows += [("base", Job("svformer", lr=lr)) for lr in (1e-4, 2e-4)]
    rows.append(("half", Job("resformer", lr=2e-4, change=half)))
    figure = Figure("x", (Panel("regime", "", tuple(rows)),))
    assert {job.mode for job in figure.jobs} == {"vanilla", "resformer", "svformer"} and len(figure.jobs) == 8
    (ax,) = axes_of(figure, found)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["base", "half"]
    marks = [line for line in ax.lines if line.get_color() == "0.65" and line.get_label() != "a seed"]
    dots = [line.get_xydata().round(9).tolist() for line in marks]
    assert dots == [[[0.5, 2.125]], [[-0.5, 1.875], [-0.3, 1.875]], [[1.6, 1.125]]]
    arrows = {}
    for line in ax.lines:
        if line.get_marker() in ("<", ">") and len(line.get_xdata()):
            arrows.setdefault(line.get_marker(), []).append(round(float(line.get_xdata()[0]), 9))
    assert arrows == {"<": [-0.5, -0.1], ">": [0.5, -0.4]}
    means = [box.lines[0].get_xdata()[0] for box in ax.containers]
    assert means == pytest.approx([0.5, -0.4, 1.6])
    bars = [[bar.get_segments()[0] for bar in box.lines[2]] for box in ax.containers]
    width = 12.7062 * 0.1  # Student's quantile for two seeds, times the standard error of -0.5 and -0.3
    assert (
        bars[1][0][:, 0] == pytest.approx([-0.4 - width, -0.4 + width], abs=1e-4) and not bars[0]
    )  # one seed has none
    _, base, shared, last = tables.regime_table(found, tuple(rows))
    assert shared[4:] == ["-0.1000", "-0.4 ± 1.3 *", "-0.4 ± 1.3"]  # one of its runs had another processor
    assert base == ["base", "ResFormer", "0.0001 and 0.0002", "4.1 ± 1.3", "-0.5000", "+0.5 ± 1.3", "+0.5000"]
    assert last == ["half", "ResFormer", "0.0002, vanilla 0.0002", "4.1 ± 1.3", "-", "-", "+1.6000"]
    figures = FIGURES["regime"], FIGURES["longer"]
    for job in dict.fromkeys(job for figure in figures for job in figure.jobs):  # as many tokens as its label says
        cfg = TrainConfig(**train_settings(job, SCALES["night"], 42, "x"))
        cfg.model_config(2048)
        labels = [label for figure in figures for label, run in figure.panels[0].lines if run.change == job.change]
        tokens = {float(label.split("M")[0]) for label in labels if label.endswith("M tokens")} or {12.3}
        assert {round(cfg.max_steps * cfg.batch_tokens / 1e6, 1)} == tokens, job


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
    """Losses are means of 20 steps, and the window has 300: of -1 until step 1,500 and 3 after it, a window's mean is 0
    if it begins 225 steps before."""

    def run(mode):
        steps = np.arange(1, 6001)
        losses = 5 + np.where(steps <= 1500, -1.0, 3.0) * (mode == "svformer")
        start = dict.fromkeys(plot.START) | {"value_mode": mode, "seed": 42, "max_steps": 6000, "data": "d"}
        record = {"start": start, "losses": found_runs.means(losses, 20), "every": 20, "val": {}, "domains": {}}
        return found_runs.curves_of({"name": mode, "step_tokens": 2048.0, **record})

    found = Fake(run=lambda job, seed: run(job.mode), scale=SCALES["night"])
    middle = np.mean([1276, 1575])
    assert claims.critical(found, Job("svformer"), 42) == (pytest.approx(middle), False)


def test_whether_longer_ones_are_overtaken_later(monkeypatch):
    """The third: of ten pairs six are in order, one level. Those with None have no crossing to compare, or all the
    same."""
    found, inf = Fake(scale=SCALES["paper"]), math.inf
    for steps, share in (
        ((1, 2, 3, 4, inf), 1),
        ((5, 4, 3, 2, 1), 0),
        ((2, 1, inf, inf, 3), 6 / 9),
        ((0, 0, 0, 0, 0), None),
        ((6000, 6000, 6000, 6000, 6000), None),
        ((0, inf, inf, inf, inf), None),
    ):
        at = dict(zip(LENGTHS, steps, strict=True))
        monkeypatch.setattr(claims, "critical", lambda found, job, seed, at=at: (at[job.length], False))
        assert claims.later_when_longer(found, 42) == (share if share is None else pytest.approx(share)), steps


def test_counts_of_claims():
    """Of several seeds: two confirmed, one contradicted, one undetermined; of one: two and one. What two figures say is
    counted once, also in other words."""
    one_way, other_way = "one seed: the paper's way", "one seed: the other way"
    kinds = [(3, "confirmed"), (3, "confirmed"), (3, "contradicted"), (2, "undetermined")]
    kinds += [(1, one_way), (1, one_way), (1, other_way), (1, ""), (0, "undetermined")]
    table = [{"what": str(i), "values": [i], "n": n, "verdict": verdict} for i, (n, verdict) in enumerate(kinds)]
    again = [row | {"what": "in other words"} for row in table[3:]]
    said = claims.tally({"fig1": {"rows": table[:5]}, "fig2": {"rows": again}, "fig3": {"rows": []}})
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
        common_seeds=lambda *jobs: range(min(len(losses[job.mode][job.lr]) for job in jobs)),
        parameters=lambda job: 1_200_000,
        scale=SimpleNamespace(lr_factor=10),
    )
    jobs, vanilla = grid["resformer"], grid["vanilla"]
    assert claims.best_rate(found, vanilla).lr == 2 and claims.best_rate(found, jobs).lr == 1
    assert [claims.gap_at_best(jobs)(found, seed) for seed in (0, 1)] == pytest.approx([-0.1, 1.2])
    header, first, second = tables.rates_table(found, {("82M", mode): grid[mode] for mode in grid})
    assert len(header) == len(first) == 7 and first[:3] == ["1.2M", "Transformer", "20"]
    assert first[4:] == ["2", "-", "-"]
    gaps = ["+0.6 ± 8.3", "+0.5000"]
    assert second == ["1.2M", "ResFormer", "10 (end of the grid)", "3.7 ± 9.5", "2", *gaps]
    two = {("82M", mode): grid[mode][:2] for mode in grid}  # both rates are ends
    assert [row[2] for row in tables.rates_table(found, two)] == ["best rate", "20", "10"]
    backwards = {("82M", mode): grid[mode][::-1] for mode in grid}  # the best is the last one
    assert list(tables.rates_table(found, backwards))[2] == second
    ax = matplotlib.figure.Figure().subplots()
    panels.draw_rates(ax, Panel("rates", "", tuple((mode, job) for mode in grid for job in grid[mode])), found)
    assert [y.tolist() for y in lines(ax)["Transformer"]] == [[10, 20, 40], [5.0, 3.0, 4.0]]  # through seed 0
    dots = [line.get_xydata().tolist() for line in ax.lines if line.get_linestyle() == "None"]
    assert [[20, 3.0], [20, 3.2]] in dots and [[10, 2.9], [10, 4.4]] in dots and len(dots) == 6


def test_two_digits_of_an_interval_are_shown():
    """So many decimals has the mean, too; alone it has four."""
    cases = {
        (0.0690, 0.01089): "0.069 ± 0.011", (22.2136, 5.0072): "22.2 ± 5.0", (36.2, 28.9): "36 ± 29",
        (2000.0, 12706.0): "2000 ± 12706", (2.5, None): "2.5000", (None, None): "-", (1.0, 0.0): "1.0000 ± 0.0000",
        (1.0, 1e-9): "1.000000 ± 0.000000", (0.5, 0.1): "0.50 ± 0.10",
    }  # fmt: skip
    for (mean, interval), text in cases.items():
        assert report.with_interval(mean, interval) == text
    assert report.with_interval(0.5, 0.1, sign=True) == "+0.50 ± 0.10"


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
    assert claim_cells(row) == ["what", "paper", "", "2.0 ± 2.5", "3"] and claim_cells(fake([None]))[3] == "-"
    assert claim_cells(fake([0.25, 0.75]) | {"what": "a − b"})[3] == "+0.5 ± 3.2"
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
    assert (
        row["seeds"] == [42] and row["verdict"] in (claims.PAPERS_WAY, claims.OTHER_WAY) and claim_cells(row)[4] == "1"
    )


def test_tables_of_what_is_not_scored(made, found, tmp_path):
    bare = Found(tmp_path, found.scale, made.seeds)
    with pytest.raises(UserError, match="no task is scored at length 2,048; without the hub, set --eval_dir"):
        list(FIGURES["tab1"].table(bare))
    assert [row["n"] for row in claim_rows(FIGURES["tab1"], bare)] == [0, 0]
