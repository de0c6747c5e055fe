"""The paper's figures: scales, made-up runs whose numbers follow by hand, runs that are small but real."""

import contextlib
import dataclasses
import math
import operator
import re
import shlex
import shutil
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, hf_folder, in_process, refused, tiny
from matplotlib.figure import Figure as Paper

import analyze
import plot
import train
from analyze import AnalyzeConfig
from common import jobs
from common.files import read_record, read_record_lines, record_line
from common.runs import METRICS, read_kept, read_run
from common.sizes import count_parameters
from configurator import UserError, load_settings
from eval import EvalConfig
from paper import claims, figures, found, panels, reproduce, tables
from paper.claims import Claim, claim_cells, claim_row
from paper.figures import FIGURES
from paper.found import Found, finished
from paper.reproduce import ReproduceConfig, runs_of
from paper.scales import SCALES, Job, train_settings
from prepare import PrepareConfig
from train import TrainConfig

N = {"2M": 1_623_856, "82M": 81_901_056, "180M": 179_874_048, "320M": 331_064_320, "468M": 467_921_920}
SIX = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")


def asked(*words):
    return load_settings(ReproduceConfig, list(map(str, words)))


# ---- scales


def at_paper(*job, **settings):
    return TrainConfig(**train_settings(Job(*job, **settings), SCALES["paper"], 42, "x"))


def test_a_default_job_is_the_papers_recipe():
    """train.py's defaults are Table 4. Only how, and how often, a run is evaluated, logged and saved may differ."""
    mine, default = at_paper(), TrainConfig()
    free = {"out_dir", "eval_every", "eval_tokens", "log_every", "keep", "save_every"}
    assert {k for k, value in vars(default).items() if vars(mine)[k] != value} <= free
    assert mine.eval_tokens == 0  # the whole validation split, as in Table 5


def test_scale_paper_is_tables_3_and_4():
    for length, batch, each in ((512, 4096, 128), (2048, 1024, 32), (8192, 256, 8), (32000, 64, 2), (64000, 32, 1)):
        cfg = at_paper(length=length)
        assert (cfg.block_size, cfg.batch_tokens, cfg.micro_batch) == (length, batch * length, each)
        assert cfg.split_batch(8) == (each, 4) and cfg.max_steps == 10_000
    for mode, size, total in (*(("vanilla", *pair) for pair in N.items()), ("svformer", "468M", 443_804_672)):
        assert count_parameters(at_paper(mode, size).model_config(50277)) == total


@pytest.mark.parametrize("name", SCALES)
def test_every_run_of_every_figure_is_valid(name):
    scale, every = SCALES[name], {job for figure in asked("all").figures.values() for job in figure.jobs}
    for job in every:
        cfg = TrainConfig(**train_settings(job, scale, 7, "x"))
        assert cfg.split_batch(max(1, scale.gpus))[0] == cfg.micro_batch
        assert cfg.value_mode.name == job.mode and cfg.arch == job.arch and cfg.seed == 7
        assert not job.is_trained or (1 <= cfg.warmup_steps < cfg.max_steps and cfg.save_every <= cfg.max_steps / 2)
    assert len({str(train_settings(job, scale, 7, "same")) for job in every}) == len({scale.name(job) for job in every})
    tokens = [block * batch for block, batch, _ in scale.lengths.values()]
    assert max(tokens) / min(tokens) < 1.03 and scale.steps >= 10 * scale.window


def test_names_of_runs_are_in_this_scales_numbers():
    jobs = {
        "base-vanilla": Job(),
        "base-svformer-rate0.0005": Job("svformer", lr=1e-4),
        "12x128-cla2-length1024": Job("cla2", "468M", 64000),
        "base-svformer-warmup60-gpt2": Job("svformer", warmup=1200, arch="gpt2"),
        "base-vanilla-untrained": Job(is_trained=False),
    }
    assert [SCALES["cpu"].name(job) for job in jobs.values()] == list(jobs)


def test_all_figures_are_there():
    assert list(DRAWN) == [f"fig{i}" for i in (1, 2, *range(4, 23))]
    assert list(FIGURES) == [*DRAWN, *(f"tab{i}" for i in range(1, 6))]
    assert sum(len(figure.claims) for figure in FIGURES.values()) == 82


# ---- what the paper draws: how it draws each of its panels, and of which quantity; the runs in the legend


def of(modes, *settings, **same):
    """Jobs of modes with each of several settings."""
    return {Job(mode, **{**same, **each}) for mode in modes.split() for each in settings or ({},)}


def each(name, *values):
    return [{name: value} for value in values]


FOUR, LOSS, LENGTHS = "vanilla neutreno resformer svformer", "relative", (512, 2048, 8192, 32000, 64000)
INSPECTED, FIRST = of(FOUR, size="468M"), ("first", "value_norm_first", "hidden_norm_first")
RANKS = {f"TOP-{k}": f"top_{k}" for k in ("1", "2", "3", "10", "1%")}
EQUATIONS = {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"}
DRAWN = {
    "fig1": [
        ("before_training", of("vanilla", size="468M", is_trained=False)),
        ("layers of entropy", "public"), ("layers of entropy", INSPECTED),
    ],
    "fig2": [(f"layers of {key}", INSPECTED) for key in FIRST],
    "fig4": [(f"layers of {EQUATIONS}", of("vanilla"))],
    "fig5": [(LOSS, of("cla2 share_k2 share_v2"))],
    "fig6": [
        ("by_size", of("vanilla resformer", *each("size", "82M", "180M", "320M", "468M"))),
        ("along", of("vanilla resformer", size="468M")),
    ],
    "fig7": [
        (LOSS, of("resformer", *each("length", 2048, 32000, 64000))),
        (LOSS, of("denseformer neutreno resformer resformer_neutreno")),
    ],
    "fig8": [(LOSS, of("resformer resformer_lambda resformer_lambda_0.2 resformer_lambda_0.5 resformer_lambda_0.8 "
                       "resformer_lambda_1 resformer_lambda_5"))],
    "fig9": [(LOSS, of("resformer key query"))],
    "fig10": [(LOSS, of("resformer identity cross"))],
    "fig11": [(LOSS, of("resformer resformer_prev resformer_all"))],
    "fig12": [
        ("spectrum", of("vanilla resformer", *each("size", "82M", "180M", "468M"))),
        ("layers of value_largest", of("vanilla resformer", *each("size", "180M", "468M"))),
    ],
    "fig13": [
        (LOSS, of("svformer gqa2 cla2", *each("length", 2048, 64000))),
        (LOSS, of("svformer_gqa4 gqa8 cla2_gqa4", length=64000)),
    ],
    "fig14": [
        (LOSS, of("svformer", *each("length", *LENGTHS))),
        ("critical_points", of("svformer", *each("length", *LENGTHS))),
    ],
    "fig15": [
        (LOSS, of("svformer", *each("lr", 1e-4, 3e-4, 6e-4))), (LOSS, of("svformer", *each("warmup", 120, 1200))),
        (LOSS, of("svformer", *each("arch", "llama", "gpt2"))),
        ("by_size", of("vanilla svformer", *each("size", "2M", "82M", "180M", "468M"))),
    ],
    "fig16": [(LOSS, of("svformer share_q share_k"))],
    "fig17": [(LOSS, of("svformer svformer_2anchors svformer_3anchors svformer_4anchors"))],
    "fig18": [("layers of hidden_similarity", INSPECTED), ("layers of hidden_similarity", "public")],
    "fig19": [(f"heat of {key}", INSPECTED) for key in ("importance", "value_norm", "hidden_norm")],
    "fig20": [(f"layers of {key}", of(f"{FOUR} cross")) for key in ("entropy", *FIRST)],
    "fig21": [(f"layers of {RANKS}", of(mode, size="468M")) for mode in FOUR.split()],
    "fig22": [(LOSS, of("neutreno neutreno_0.2 neutreno_0.6 neutreno_0.8"))],
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_has_all_panels_and_lines_of_the_papers(name):
    """A line more is ours; a line or a panel less is the paper's, and lost."""
    shown = FIGURES[name].shown(is_public_named=True).panels
    for what, wanted in DRAWN[name]:
        alike = [p for p in shown if what in (p.draw.__name__, f"{p.draw.__name__} of {p.key}")]
        is_there = [panel.has_public if wanted == "public" else wanted <= set(panel.jobs) for panel in alike]
        assert any(is_there), f"{name} has no panel {what} with all these: {wanted}"
        for panel in alike:
            assert not isinstance(panel.key, dict) or [label for label, _ in panel.lines] == list(panel.key)


# ---- made-up runs

CPU = dataclasses.replace(SCALES["cpu"], steps=40, window=5)
ANALYSIS = read_kept(ROOT / "results/night/runs.jsonl")["82M-2048-vanilla-lr0.0003-bosTrue-42"]["analysis"]
LAYERS, STATES = ({key: x["mean"] for key, x in ANALYSIS[part].items()} for part in ("layers", "states"))


def rng(*words):
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


class Made(Found):
    """Runs with random losses, arrays and scores. It notes what it is asked for."""

    def __init__(self, scale=CPU, seeds=(42, 1)):
        super().__init__({}, scale, seeds)
        self.asked, self.analysed, self.scored = set(), set(), set()

    def run(self, job, seed):
        self.asked.add(job)
        n, numbers = train_settings(job, self.scale, seed, "x")["max_steps"], rng("run", self.name(job, seed))
        step, loss = np.arange(1.0, 1 + n), numbers.random()
        steps = {"step": step, "tokens": step * 1024, "loss": numbers.random(n) + 3}
        val, start = {max(1, n // 2): 3.0} | {n: loss}, {"parameters": N[job.size] + len(job.mode)}
        evaluation = {"val": {"C4": loss, "mine": loss + 0.2}}
        return SimpleNamespace(start=start, steps=steps, val=val, evaluation=evaluation, final_loss=loss)

    def analysis(self, job, seed):
        self.analysed.add(job)
        return ANALYSIS

    def arrays(self, job, seed):
        self.analysed.add(job)
        numbers, shapes = rng("arrays", self.name(job, seed)), {"hidden_norm": (7, 256), "value_spectrum": (6, 64)}
        return {key: numbers.random(shapes.get(key, (6, 256))) for key in (*shapes, "importance", "value_norm")}

    def evaluation(self, job, seed, task):
        self.scored.add(job)
        return {"acc": rng("eval", self.name(job, seed), task).random()}


@pytest.fixture
def made(data_dir):
    return Made(dataclasses.replace(CPU, data_dir=str(data_dir)))


def axes_of(figure, found):
    """What a figure is drawn on; it is not rendered."""
    paper = Paper()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(panels, "page", lambda path, size: contextlib.nullcontext(paper))
        panels.page_of_panels("x.png", figure, found)
    return paper.axes


def lines(ax):
    """{label without its seeds: (x, y)} of the lines that the legend shows."""
    labels = {line: re.sub(r", (1 seed|\d+ seeds.*)$", "", line.get_label()) for line in ax.lines}
    return {label: line.get_data() for line, label in labels.items() if label[0] != "_"}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_names_all_runs_that_it_needs_and_no_more(name, made):
    figure = FIGURES[name].shown()
    if figure.panels:
        axes_of(figure, made)
    if figure.table:
        assert list(figure.table(made))[1:]
    for claim in figure.claims:
        claim_row(claim, made)
    assert made.asked | made.analysed | made.scored == set(figure.jobs)
    assert made.analysed == set(figure.analysed)
    assert made.scored == (set(figure.jobs) if figure.scored else set())


def test_relative_panels(made):
    """Each line is the run's loss minus vanilla's with its seed and all its settings, averaged over growing windows."""
    panel, ax = FIGURES["fig15"].panels[2], axes_of(FIGURES["fig15"], made)[2]
    for label, job in made.labels(panel.lines):
        gaps = [made.run(job, s).steps["loss"] - made.run(job.baseline, s).steps["loss"] for s in made.seeds]
        x, (y,) = plot.growing_means(made.run(job, 42).steps["tokens"], np.mean(gaps, 0)[None])
        np.testing.assert_allclose(lines(ax)[label], [x, y], atol=1e-9)


@pytest.mark.parametrize("name", ["fig4", "fig18", "fig21"])
def test_layer_panels(name, made):
    """Means over seeds; layers count from 1, states from 0; layers without the quantity are left out."""
    for ax, panel in zip(axes_of(FIGURES[name].shown(), made), FIGURES[name].panels, strict=True):
        for label, job in made.labels(panel.lines):
            key = panel.key[label] if isinstance(panel.key, dict) else panel.key
            y = np.array([made.by_layer(job, s, key) for s in made.seeds], float).mean(0)
            x = np.flatnonzero(np.isfinite(y))
            np.testing.assert_allclose(lines(ax)[label], [x + (not key.startswith("hidden")), y[x]])


def test_panels_of_arrays(made):
    """Eigenvalues are layer 1's, the map's rows those of each model in turn; both are means over seeds."""
    (label, job), *_ = made.labels(FIGURES["fig12"].panels[0].lines)
    eigenvalues = np.mean([made.arrays(job, s)["value_spectrum"][0] for s in made.seeds], 0)
    np.testing.assert_allclose(lines(axes_of(FIGURES["fig12"], made)[0])[label][1], eigenvalues)
    rows = [
        np.mean([made.arrays(job, s)["value_norm"] for s in made.seeds], 0) for job in FIGURES["fig19"].panels[1].jobs
    ]
    (image,) = axes_of(FIGURES["fig19"], made)[1].images
    np.testing.assert_allclose(image.get_array(), np.concatenate(rows)[:, :100], atol=1e-3)  # up to the scale's floor


def test_before_training(made):
    """On the right axis is what leaves each layer, so the embedding is left out."""
    entropy, *_, similarity = axes_of(FIGURES["fig1"].shown(), made)
    assert entropy.lines[0].get_ydata().tolist() == LAYERS["entropy"]
    assert similarity.lines[0].get_ydata().tolist() == STATES["hidden_similarity"][1:]


def test_public_models_are_drawn(made, monkeypatch):
    monkeypatch.setattr(panels, "read_analysis", lambda folder: ANALYSIS)
    made.public = {"Llama-3.1-8B": "there"}
    for name, n, y in (("fig1", 1, LAYERS["entropy"]), ("fig18", 0, STATES["hidden_similarity"])):
        drawn = lines(axes_of(FIGURES[name].shown(is_public_named=True), made)[n])
        assert drawn["Llama-3.1-8B"][1].tolist() == y and len(drawn) == {"fig1": 2, "fig18": 5}[name]


def test_one_legend_serves_only_panels_with_the_same_lines(made):
    for name, n in (("fig8", 0), ("fig7", 2)):
        assert sum(ax.get_legend() is not None for ax in axes_of(FIGURES[name], made)) == n


def test_the_level_of_uniform_attention(made):
    """Row i of A gives its first token 1/i."""
    (level,) = [line for line in axes_of(FIGURES["fig2"], made)[0].lines if line.get_label() == panels.UNIFORM]
    assert level.get_ydata()[0] == pytest.approx(np.mean(1 / np.arange(1, 1 + ANALYSIS["length"])))


def test_lines_over_sizes_are_those_between_which_we_measure_parameters(made):
    """Of Figure 15, whose smallest model is not on the line."""
    ax = axes_of(FIGURES["fig15"], made)[3]
    for mode in ("vanilla", "svformer"):
        jobs = [Job(mode, size) for size in ("82M", "180M", "468M")]
        n, losses = np.transpose([(made.parameters(job), np.mean(made.final_losses(job))) for job in jobs])
        slope, height = np.polyfit(np.log(n), losses, 1)
        found = [line.get_ydata() for line in ax.lines if line.get_linestyle() == ":" and line.get_xdata()[0] == n[0]]
        np.testing.assert_allclose(found, [height + slope * np.log(n)])


@pytest.mark.parametrize("step, is_filled", [(20, True), (40, True), (41, False), (900, False)])
def test_a_critical_point_beyond_training_is_hollow(step, is_filled, made, monkeypatch):
    monkeypatch.setattr(panels, "critical", lambda job, found, seed: step)
    ax = axes_of(FIGURES["fig14"], made)[1]
    style = plot.style_of("svformer")
    faces = [line.get_markerfacecolor() for line in ax.lines if line.get_marker() == style["marker"]]
    assert (style["color"] in faces) == is_filled and "none" in faces
    monkeypatch.setattr(tables, "critical", lambda job, found, seed: step)
    table = {row[0]: row[1:] for row in tables.critical_table(made, figures.SV_LENGTHS[:1])}
    assert table["SVFormer, length 64"] == [f"{step} ± 0" if is_filled else "-", f"{2 * is_filled} of 2"]


# ---- tables of the paper


def table(name, found):
    """{first cell: the others} of its rows."""
    return {row[0]: row[1:] for row in FIGURES[name].table(found)}


def test_accuracies(made):
    """Means over seeds, the paper's numbers in brackets."""
    for accuracies in tables.PAPER_ACCURACIES.values():
        assert accuracies[-1] == pytest.approx(sum(accuracies[:6]) / 6, abs=0.00051)
    one = table("tab1", made)
    mean = np.mean([made.evaluation(Job("resformer"), s, task)["acc"] for s in (42, 1) for task in SIX])
    assert one[""] == [*SIX, "Avg"] and one["ResFormer, length 128"][-1] == f"{mean:.4f} (0.355)"
    made.evaluation = lambda job, seed, task: None if task == "piqa" or seed == 1 else {"acc": 0.5}
    assert table("tab1", made)["ResFormer, length 128"][-3:] == ["0.5000 (0.414)", "- (0.604)", "- (0.355)"]
    assert claims.accuracy_gap(Job("resformer"), made, 42) == 0
    made.evaluation = lambda job, seed, task: None
    with pytest.raises(UserError, match="no task is scored at length 2,048; without the hub, name files by --eval_dir"):
        table("tab1", made)


def test_losses_by_domain(made):
    for losses in tables.PAPER_LOSSES.values():
        assert losses[-1] == round(sum(losses[:7]) / 7, 4)
    five, loss = table("tab5", made), np.mean(made.final_losses(Job("resformer")))
    cells = [f"{loss:.4f} (3.5191)", f"{loss + 0.2:.4f}", f"{loss:.4f} (2.7117)"]
    assert five[""] == ["C4", "mine", "Avg"] and five["ResFormer 81.9M"] == cells


def test_tables_of_settings(made, data_dir):
    """Tables 2 to 4. At scale paper ours and its numbers are equal."""
    shares = table("tab2", made)
    assert shares["prose"] == ["60.0%", "30,000", "-", "-"] and shares["C4"] == ["-", "-", "20%", "4B"]
    made.scale = dataclasses.replace(SCALES["paper"], data_dir=str(data_dir))  # with data of 257 tokens
    last = table("tab3", made)["64,000"]  # the paper prints 32 steps of accumulation, and 4 are meant
    assert last == ["64,000 (64,000)", "32 (32)", "8 (8)", "1 (1)", "4 (32)", "2,048,000 (2,048,000)"]
    four = table("tab4", made)
    total = 2 * 257 * 512 + 8 * (4 * 512**2 + 3 * 512 * 1792 + 2 * 512) + 512
    assert four["parameters"][1] == f"{total:,}" and four["peak learning rate"] == ["0.0006 (0.0006)"] * 5
    assert [four[name][3] for name in ("layers", "width", "FFN width")] == ["15 (-)", "1,024 (-)", "3,584 (-)"]


# ---- claims


def test_parameters_that_are_saved():
    def line(factor, sizes=(1e6, 3e6, 9e6)):  # of a model as good as vanilla with `factor` times the parameters
        return [(n, 5 - 0.2 * math.log(factor * n)) for n in sizes]

    assert claims.saving(line(1.25), line(1)) == pytest.approx(0.2)
    assert claims.saving(line(1 / 1.122, sizes=(2e6, 7e7)), line(1)) == pytest.approx(-0.122)  # it needs 12.2 % more
    rising, falling = [(1e6, 2.14), (2e6, 2.16)], [(1e6, 2.2), (2e6, 2.1)]
    assert claims.saving(rising, falling) is claims.saving(falling, rising) is None  # there is no line to follow
    assert claims.saving([(1e6, 2.0), (2e6, 1.99)], falling) is None  # 2**-20 of the parameters is no measurement
    points = [(N[size], losses[-1]) for (_, size), losses in tables.PAPER_LOSSES.items()]  # three of vanilla, ResFormer
    assert round(claims.saving(points[3:], points[:3]), 3) == 0.104  # the paper's


def test_tokens_that_are_saved():
    x, target = [10, 20, 30, 40], ([10, 20, 30, 40], [9, 5, 3, 2.0])
    assert claims.tokens_saved((x, [4, 3, 1.5, 1]), target) == pytest.approx(1 - (20 + 10 * (3 - 2) / 1.5) / 40)
    # ends above it, at 2.1, where the target was after 39: it needs 40 instead
    assert claims.tokens_saved((x, [4, 3, 2.5, 2.1]), target) == pytest.approx(1 - 40 / 39)
    assert claims.tokens_saved((x, [9, 9, 9, 9.5]), target) is None  # the target was there before its first evaluation
    assert claims.tokens_saved((x, [1.9, 1, 1, 1]), target) is None


def test_critical_points():
    x = np.arange(1.0, 101)
    for window in (1, 4):  # averages of a line are those of the middle of their window
        assert claims.critical_point(x, (x - 30.25) * 0.01, window) == pytest.approx(30.25)
        assert claims.critical_point(x, (x - 150.0) * 0.01, window) == pytest.approx(150)  # a line predicts it
        assert claims.critical_point(x, -0.01 * x, window) == math.inf  # and one that falls never crosses
    # the line goes through the last tenth alone
    bent = np.where(x > 90, 0.005 * (x - 130), -5.0)
    assert claims.critical_point(x, bent, 1) == pytest.approx(130)
    waves = np.where(x < 40, (x - 20.5) * 0.01, (x - 70.5) * 0.01)  # above at 20.5, below again at 40, above at 70.5
    assert claims.critical_point(x, waves, 1) == pytest.approx(70.5)
    assert claims.critical_point(x, x, 1) == 0


@pytest.mark.parametrize("name", "fig5 fig7 fig8 fig9 fig10 fig11 fig13 fig16 fig17 fig20 fig22".split())
def test_a_claim_is_as_in_the_finished_experiment(name, made):
    then = read_record(ROOT / "results/night.json", reproduce.RESULTS)["figures"][name]["rows"]
    now = {(made.names_of(claim.a, claim.b) + claim.what, claim.paper) for claim in FIGURES[name].claims}
    assert {(row["what"], row["paper"]) for row in then if "length" not in row["what"]} <= now


def test_the_longer_is_overtaken_later(made, monkeypatch):
    monkeypatch.setattr(claims, "critical", lambda job, found, seed: {512: 1, 2048: 0, 64000: 3}.get(job.length, 2))
    assert claims.later_when_longer(Job(), made, 42) == 8 / 9  # of ten pairs one is equal, one the wrong way round


def test_losses_and_differences_of_a_claim(made):
    vanilla, key, query = (np.array(made.final_losses(Job(mode))) for mode in ("vanilla", "key", "query"))
    row = claim_row(Claim(Job("key"), Job("query"), "lower", claims.LOWER), made)
    assert row["values"] == (key - query).tolist() and row["mean"] == pytest.approx((key - query).mean())
    assert claims.gap(Job("key"), made, 1) == (key - vanilla)[1]


NAIVE = {  # what the claims take from an analysis of six layers, a second time
    "entropy in the deeper layers": sum(LAYERS["entropy"][3:]) / 3,
    "first token's importance": max(LAYERS["first"]),
    "first token's value": min(map(operator.truediv, LAYERS["value_norm_first"], LAYERS["value_norm_rest"])),
    "first token's hidden state": max(map(operator.truediv, STATES["hidden_norm_first"], STATES["hidden_norm_rest"])),
    "largest importance": sum(LAYERS["top_1"]) / 6,
    "ln of a layer's largest eigenvalue": math.log(math.prod(LAYERS["value_largest"])) / 6,
    "above uniform": sum(LAYERS["entropy_minus_uniform"]) / 6,
    "Eq 4's − Eq 6's": sum(LAYERS["eq4"][1:]) / 5 - sum(LAYERS["eq6"][1:]) / 5,  # layer 1 has none
}


QUANTITIES = {what: quantity for what, (*_, quantity) in claims.MEASURED.items()}
QUANTITIES |= {"above uniform": claims.ENTROPY_MINUS_UNIFORM, "Eq 4's − Eq 6's": claims.eq4_minus_eq6}


@pytest.mark.parametrize("what", QUANTITIES)
def test_quantities_of_an_analysis(what, made):
    assert QUANTITIES[what](Job(), made, 42) == pytest.approx(NAIVE[what])


def test_importance_ratio(made):
    row = max(row[0] / (sum(row[1:100]) / 99) for row in made.arrays(Job(), 42)["importance"].tolist())
    assert claims.importance_ratio(Job(), made, 42) == pytest.approx(row)


def test_evaluations_stand_at_tokens(made):
    assert made.validation(Job(), 42)[0] == [20 * 1024, 40 * 1024]


def test_every_seed_is_scored():
    cfg = asked("tab1", "--seeds=2")
    runs = runs_of(cfg, cfg.figures.values())
    assert len(runs) == 8 and all(needs == {"scores"} for _, needs in runs.values())


def row_of(values, job, side):
    claim = Claim(job, None, "paper", side, lambda job, found, seed: values[seed], ": a − b")
    return claim_row(claim, Made(seeds=tuple(values)))


@pytest.mark.parametrize("values, verdict", [
    ([0.5, 0.51], "same side"), ([-0.5, -0.51], "other side"), ([0.9, 0.91], "other side"),
    ([0.5], "same side?"), ([-0.5], "other side?"), ([0.9], "other side?"), ([0.5, -0.4], "cannot tell"),
    ([0.5, 0.5], "cannot tell"), ([0.1, 0.1001, None], "cannot tell"),  # no spread; a value that is missing
])  # fmt: skip
def test_verdicts(values, verdict):
    """The paper's side is between 0 and 0.8; the interval of two is wide."""
    assert row_of(dict(enumerate(values)), Job(), (0, 0.8))["verdict"] == verdict


def test_a_row_has_json_numbers(made):
    row = row_of({0: 0.25, 2: 0.75, 3: math.inf}, Job("cla2", "180M"), None)
    assert (row["seeds"], row["values"], row["n"]) == ([0, 2, 3], [0.25, 0.75, None], 2)
    assert claim_cells(row) == ["cla2 180M: a − b", "paper", "", "+0.5 ± 3.2", "2 of 3"]
    assert made.names_of(Job("cla2", lr=3e-4), Job(lr=3e-4)) == "cla2 − vanilla rate 0.0015"
    assert made.names_of(Job("gqa2", length=512), Job("gqa2", arch="gpt2")) == "gqa2 length 64 − gqa2 gpt2"


# ---- plans


@pytest.mark.parametrize("scale", SCALES)
def test_dry_run_prints_commands_that_make_the_runs(scale, tmp_path):
    result = in_process(reproduce, "all", f"--scale={scale}", "--dry_run", cwd=tmp_path)
    assert result.returncode == 0 and not list(tmp_path.iterdir())
    cfg = asked("all", f"--scale={scale}")
    runs = {settings["out_dir"]: (settings, needs) for settings, needs in runs_of(cfg, cfg.figures.values()).values()}
    assert len(runs) == 65  # as README.md says
    kinds = {"train": TrainConfig, "analyze": AnalyzeConfig, "eval": EvalConfig, "prepare": PrepareConfig}
    made = {name: set() for name in kinds}
    for command, name, words in re.findall(r"^(python|torchrun \S+) (\w+)\.py (.*)", result.stdout, re.M):
        given = load_settings(kinds[name], shlex.split(words))
        assert not getattr(given, "tokenizer_file", ""), "a file that a reader does not have"
        made[name] |= {given.out_dir} if name in ("train", "prepare") else set(given.runs)
        if name == "train":
            assert given == TrainConfig(**runs[given.out_dir][0], resume="auto")
        assert (command != "python") == (scale == "paper" and name == "train")
        assert name != "analyze" or given.chunks == cfg.units.chunks
        if name != "prepare":  # at a scale of cores even where a GPU would be picked
            assert ("--device=cpu" in words) == (cfg.units.gpus == 0)
    assert made["train"] == runs.keys() and made["prepare"] == {cfg.units.data_dir}
    assert made["analyze"] == {name for name, (_, needs) in runs.items() if "analysis" in needs}
    scored = {name for name, (_, needs) in runs.items() if "scores" in needs}
    assert made["eval"] == scored and len(scored) == 4
    # what docs/reproduction.md says
    assert bool(re.search("3,312 GPU-hours .* 187 GB", result.stdout)) == (scale == "paper")


@pytest.mark.parametrize("words, says", [
    ("", "say which figure, as in `python -m paper.reproduce fig7 --dry_run`"),
    ("fig3", "cannot reproduce 'fig3'; choose from fig1, "),
    ("tab5 --scale=paper", "scale=paper needs GPUs, and there are none; see --run=false, --dry_run and --scale=cpu"),
    ("fig4 --data_dir=missing", "missing has no manifest.json; make the data: `python prepare.py pysource"),
    ("fig7 --public=m --dry_run", "fig7 draws no public models; fig1 and fig18 do"),
    ("tab1 --eval_dir=no --dry_run", "eval_dir=no is not a folder; it takes one with <task>.jsonl files"),
    ("fig18 --public=m --dry_run", "m is not a model in Hugging Face layout; --public takes Llamas and Mistrals"),
])  # fmt: skip
def test_what_is_refused(words, says, tmp_path):
    refused(in_process(reproduce, *words.split(), cwd=tmp_path), says)


def test_each_public_model_has_an_analysis_of_its_own():
    """Whatever its folder is called, and of each text and dtype."""
    words = "fig18", "--public=a/b,a-b,c/b/,../c/b"
    every = [asked(*words), asked(*words, "--data_dir=d"), asked(*words, "--public_dtype=bfloat16")]
    folders = {out for cfg in every for _, out in cfg.analyses.values()}
    assert len(folders) == 12 and list(every[0].analyses) == ["a/b", "a-b", "c/b", "../c/b"]


def test_a_public_model_is_read_at_its_own_length(tmp_path, monkeypatch):
    """And an export of ours is none."""
    cfg, whose = asked("fig18", f"--public={hf_folder(tmp_path / 'llama', tiny())}"), SimpleNamespace(is_ours=False)
    monkeypatch.setattr(reproduce.HFTokenizer, "of_folder", lambda folder: whose)
    assert "--length=32" in next(iter(reproduce.public_commands(cfg).values()))
    whose.is_ours = True
    with pytest.raises(UserError, match="llama is one of our exports; --public takes other people's models"):
        reproduce.public_commands(cfg)


# ---- runs that are small but real

RUNS = ("base-vanilla-42", "base-resformer-42")


def shrink(monkeypatch):
    """Make scale cpu tiny, with few figures of two runs."""
    shape = dict(sizes={"82M": (2, 2, 16)}, lengths={2048: (16, 8, 8)}, steps=4, window=2, evals=2, chunks=4)
    small = dataclasses.replace(SCALES["cpu"], settings=SCALES["cpu"].settings | {"eval_tokens": 512}, **shape)
    value = figures.compared("Values.", {"Value": "resformer"}, "resformer vanilla")
    five = figures.Figure("Losses.", claims=value.claims, table=tables.table5, runs=(Job(), Job("resformer")))
    few = {"fig4": FIGURES["fig4"], "fig9": value, "tab5": five}
    monkeypatch.setattr(tables, "PAPER_LOSSES", {k: v for k, v in tables.PAPER_LOSSES.items() if k[1] == "82M"})
    monkeypatch.setattr(reproduce, "SCALES", SCALES | {"cpu": small})
    monkeypatch.setattr(reproduce, "FIGURES", few)
    monkeypatch.chdir(ROOT)


def folders(folder, data_dir):
    return f"--out_dir={folder}/out", f"--results_dir={folder}/results", f"--data_dir={data_dir}"


def run_jobs_here(wanted, ended, lanes):
    """Stands in for run_jobs, without the seconds to import torch."""
    while jobs := wanted():
        script, *words = jobs[0].words
        result = in_process({"train.py": train, "analyze.py": analyze}[script], *words)
        ended(jobs[0], result.returncode, result.stderr)


@pytest.fixture(scope="module")
def real(tmp_path_factory, data_dir):
    """A folder in which all of the shrunken figures were made by one command, and what it said."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as m:
        shrink(m)
        m.setattr(reproduce, "run_jobs", run_jobs_here)
        result = in_process(reproduce, "all", *folders(folder, data_dir))
    assert result.returncode == 0, (result.stdout, result.stderr)
    return folder, result.stdout


@pytest.fixture
def copied(real, tmp_path, monkeypatch, data_dir):
    """A copy of that folder, and how to call the command in it."""
    shutil.copytree(real[0], tmp_path, dirs_exist_ok=True)
    shrink(monkeypatch)
    return tmp_path, lambda *words: in_process(reproduce, *words, *folders(tmp_path, data_dir))


def numbers_in(folder):
    """{figure: its record}"""
    return read_record(folder / "results/cpu.json", reproduce.RESULTS)["figures"]


def test_it_trains_analyses_and_draws(real):
    folder, said = real
    losses = {name: read_run(folder / "out" / name).final_loss for name in RUNS}
    assert all(f"out/{name}: validation loss {loss:.4f}" in said for name, loss in losses.items())
    assert not (folder / "out" / RUNS[1] / "analysis.json").exists()  # Figure 4 is of vanilla
    drawn = numbers_in(folder)
    assert list(drawn) == ["fig4", "fig9", "tab5"] and drawn["fig9"]["runs"] == losses
    row = drawn["fig9"]["rows"][0]
    assert row["values"] == drawn["tab5"]["rows"][0]["values"] == [losses[RUNS[1]] - losses[RUNS[0]]]
    assert f"| {row['verdict']} | {row['mean']:+.4f} | 1 |" in said
    assert drawn["tab5"]["table"][1][-1] == f"{losses[RUNS[0]]:.4f} (2.7389)" and "png" not in drawn["tab5"]
    assert (folder / "results" / drawn["fig9"]["png"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_is_finished_does_not_run_again_and_drawing_changes_nothing(copied, monkeypatch):
    folder, call = copied
    before = (folder / "results/cpu.json").read_bytes()
    monkeypatch.setattr(reproduce, "run_jobs", lambda wanted, ended, lanes: wanted() and pytest.fail("it runs"))
    monkeypatch.setattr(reproduce, "environment", lambda: {"time": "now"})
    assert call("all").returncode == 0 and (folder / "results/cpu.json").read_bytes() == before
    report = (folder / "results/cpu/README.md").read_text()
    assert "![fig9](fig9.png)" in report and "|resformer − vanilla|lower|" in report.split("## Table")[0]


def test_what_is_missing_or_of_other_data_is_refused(copied):
    folder, call = copied
    path = folder / "out" / RUNS[1] / "metrics.jsonl"
    first, *others = read_record_lines(path, METRICS)  # the first says which data
    path.write_text("".join(record_line(METRICS, line) for line in (first | {"data": "x"}, *others)))
    refused(call("fig9"), RUNS[1], "have different data; set another --out_dir")
    shutil.rmtree(folder / "out" / RUNS[1])
    refused(call("fig9", "--run=false"), f"{RUNS[1]} is missing or not finished; leave out --run=false")


def test_a_finished_run_has_the_settings_that_we_ask_for(copied):
    folder = copied[0] / "out" / RUNS[0]
    wanted = {"max_steps": 4, "value_mode": "vanilla", "out_dir": folder}
    assert finished(wanted).final_loss == read_run(folder).final_loss
    with pytest.raises(UserError, match="holds another run .max_steps=4 instead of 8.; remove it, or set another"):
        finished(wanted | {"max_steps": 8})
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:-2]))  # killed before its last step and evaluation
    assert finished(wanted) is None


def test_scores_are_of_the_last_checkpoint(monkeypatch):
    checkpoints = {name: {"step": int(name), "results": {"piqa": name}} for name in "132"}
    monkeypatch.setattr(found, "read_results", lambda folder: checkpoints)
    assert found.scores("run") == {"piqa": "3"}


def test_a_run_is_one_without_its_analysis(copied, monkeypatch):
    """Figures that need only its loss are drawn."""
    folder, call = copied
    (folder / "out" / RUNS[0] / "analysis.json").unlink()
    (folder / "results/cpu.json").unlink()
    fails = ("-c", "raise SystemExit('exploded')")
    monkeypatch.setattr(reproduce, "command_of", lambda words, log, steps: jobs.Command(fails, log))
    refused(call("all"), "not drawn: fig4, the first one because", "has no analysis.json")
    assert list(numbers_in(folder)) == ["fig9", "tab5"]


def test_a_run_that_diverged_is_not_trained_again(copied, monkeypatch):
    folder, call = copied
    path = folder / "out" / RUNS[1] / "metrics.jsonl"
    *others, last = read_record_lines(path, METRICS)
    diverged = {"event": "diverged", "step": last["step"], "why": "the loss is nan"}
    path.write_text("".join(record_line(METRICS, line) for line in (*others, diverged)))
    for weights in path.parent.glob("step_*"):
        weights.unlink()
    monkeypatch.setattr(reproduce, "run_jobs", lambda wanted, ended, lanes: wanted() and pytest.fail("it runs"))
    refused(call("fig9"), "not drawn: fig9", f"{RUNS[1]} diverged; remove it to train it again")


def test_one_failure_does_not_stop_the_rest(copied, monkeypatch):
    folder, call = copied
    shutil.rmtree(folder / "out" / RUNS[1])
    (folder / "results/cpu.json").unlink()
    fails = ("-c", "raise SystemExit('exploded')")
    monkeypatch.setattr(reproduce, "command_of", lambda words, log, steps: jobs.Command(fails, log))
    refused(call("all"), "not drawn: fig9, tab5, the first one because", "exploded", "train.log")
    assert list(numbers_in(folder)) == ["fig4"]
