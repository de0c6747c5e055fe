"""Figures and tables of runs, from their metrics.jsonl, or from what eval.py and analyze.py left beside it.

    python plot.py relative out/vanilla out/resformer out/svformer   training loss minus the baseline's of the same seed
    python plot.py loss out/vanilla out/resformer                    training loss, and validation loss as markers
    python plot.py compare out/vanilla* out/resformer*               prints a Markdown table, and draws `relative`
    python plot.py ablations out/modes/*                             the paper's claims, figure by figure, on our runs
    python plot.py eval out/vanilla out/resformer                    accuracies with errors and chance, loss by domain
    python plot.py analysis out/vanilla out/resformer                attention concentration, sinks, drains by layer
    python plot.py decode results/bench_decode_*.json                decoding speed and rows that fit, as bench.py found

Runs are named by their folders, or for the first four kinds by metrics.jsonl files, and grouped by value_mode. The
seeds of a mode become one line with a band: from lowest to highest of two seeds, mean ± standard deviation (n - 1) of
three or more.
"""

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from configurator import UserError, command_line, run_main, setting
from files import read_json, write_atomic, write_json

# Okabe and Ito's colours, which colour-blind readers tell apart, without yellow, which is lost on white. The numbers of
# colours, dashes and markers have no common factor, so that many modes pass before a combination comes back.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = [(0, gaps or None) for gaps in ((), (6, 3), (8, 2.5, 1.5, 2.5), (1.5, 1.5), (14, 3), (8, 2, 1.5, 2, 1.5, 2))]
MARKERS = "os^Dv"
LOOK = {"font.size": 9, "legend.fontsize": 8, "legend.frameon": False, "lines.linewidth": 1.2, "lines.markersize": 5}
LOOK |= {"lines.markeredgewidth": 0.9, "axes.spines.top": False, "axes.spines.right": False}
START = ("value_mode", "seed", "parameters", "kv_bytes_per_token", "data", "block_size", "dtype", "device", "max_steps")
STEP = ("step", "loss", "tokens", "tokens_per_s")
# The paper's ablations: figure -> what its text says, that as pairs of modes (lower loss, higher loss), and modes that
# are shown beside them. "v5" are the validation losses of the paper's last version; the last two claim nothing.
LAMBDAS = ["resformer_lambda", *(f"resformer_lambda_{x}" for x in ("0.2", "0.5", "0.8", "1", "5"))]
NEUTRENOS = ["neutreno", *(f"neutreno_{x}" for x in ("0.2", "0.6", "0.8"))]
ANCHORS = ["svformer_4anchors", "svformer_3anchors", "svformer_2anchors", "svformer"]
FIGURES = {
    "5": ("of every two layers, sharing values hurts least", [("share_v2", "share_k2"), ("share_v2", "cla2")], []),
    "7": (
        "ResFormer beats DenseFormer and NeuTRENO; with NeuTRENO it is better still",
        [("resformer", x) for x in ("vanilla", "denseformer", "neutreno")] + [("resformer_neutreno", "resformer")],
        ["resformer_neutreno_literal", "resformer_denseformer", "denseformer_2x2"],
    ),
    "8": (
        "every λ beats vanilla, 2 is best",
        [(x, "vanilla") for x in LAMBDAS] + [(LAMBDAS[0], x) for x in LAMBDAS[1:]],
        ["resformer"],
    ),
    "9": (
        "a residual helps on values, not on queries or keys",
        [("resformer", "vanilla"), ("vanilla", "query"), ("vanilla", "key")],
        [],
    ),
    "10": (
        "identity mapping harms, cross-layer attention ends above ResFormer",
        [("vanilla", "identity"), ("resformer", "cross")],
        ["identity_all", "cross_prev"],
    ),
    "11": (
        "the first layer is the source, not the one before or all",
        [("resformer", "resformer_prev"), ("resformer", "resformer_all")],
        [],
    ),
    "13": (
        "at length 2,048 GQA2 beats SVFormer",
        [("gqa2", "svformer")],
        ["cla2", "svformer_gqa4", "cla2_gqa4", "gqa8"],
    ),
    "16": (
        "layer 1's queries or keys for all layers hurt, more than its values",
        [(low, high) for low in ("vanilla", "svformer") for high in ("share_q", "share_k")],
        [],
    ),
    "17": ("the more anchors, the better", list(zip(ANCHORS, ANCHORS[1:], strict=False)), []),
    "22": (
        "every λ beats vanilla, 0.4 is best",
        [(x, "vanilla") for x in NEUTRENOS] + [(NEUTRENOS[0], x) for x in NEUTRENOS[1:]],
        [],
    ),
    "v5": (
        "Plus < Sparse < Constant < Learnable < ResFormer; on hidden states or A it hurts",
        [("resformer_plus", "resformer_sparse"), ("resformer_sparse", "resformer_lambda")]
        + [("resformer_lambda", "resformer_learned"), ("resformer_learned", "resformer")]
        + [("vanilla", "hidden"), ("vanilla", "probs")],
        ["resformer_plus_deep", "resformer_dense", "scores"],
    ),
    "more sharing": ("", [], ["share_q2", "cla2_svformer", "cla4", "gqa4", "mqa", "mlkv"]),
    "other code": (
        "",
        [],
        ["resformer_lerp", "resformer_head", "resformer_channel", "resformer_relu", "resformer_unet", "hidden_learned"]
        + ["value_embed", "value_embed_unet", "value_embed_cycle", "value_embed_gated", "value_embed_gated2"],
    ),
}
TASKS = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa", "lambada")  # those of eval.py
FOR_CACHE = 10 * 2**30  # bytes of memory for keys and values, to say how many rows fit
EARLY = 0.1  # share of the steps that may run out of the y axis: the first losses would squash all others


@dataclass(frozen=True)
class PlotConfig:
    """Every setting of plot.py."""

    words: tuple[str, ...] = setting(
        (), "what to draw (relative, loss, compare, ablations, eval, analysis, decode), then the runs", positional=True
    )
    baseline: str = setting("vanilla", "value_mode that the others are compared with")
    window: int = setting(0, "steps of the moving average; 0 = 100, or 10 if a run has fewer than 200 steps")
    metric: Literal["acc", "acc_norm"] = setting("acc", "eval: the accuracy to draw, see eval.py")
    out_file: str = setting("", "PNG to write; empty = <what is drawn>.png")
    json_file: str = setting("", "compare, ablations: also write the numbers of the table here")

    def __post_init__(self):
        kind = self.words[0] if self.words else "nothing"
        if kind not in (known := [*KINDS, *FROM_FILES]):
            raise ValueError(f"cannot draw {kind!r}: the first word is {', '.join(known)}, the others name runs")
        if not self.words[1:]:
            raise ValueError(f"no runs are named, as in `python plot.py {kind} out/vanilla out/resformer`")
        if self.window < 0:
            raise ValueError(f"window={self.window} must be at least 0")
        if self.json_file and kind not in ("compare", "ablations"):
            raise ValueError(f"json_file is for the tables of compare and ablations, and {kind} has none")
        object.__setattr__(self, "out_file", self.out_file or f"{kind}.png")
        if not self.out_file.endswith(".png"):
            raise ValueError(f"out_file={self.out_file} must end in .png")


@dataclass(frozen=True)
class Run:
    """What one metrics.jsonl says."""

    name: str  # as the user wrote it
    start: dict  # what START lists, from the last start record: a resumed run has several
    steps: dict[str, np.ndarray]  # what STEP lists, for each step: loss in nats per token, tokens so far
    val: dict[int, float]  # step -> validation loss, mean over the domains, nats per token

    mode = property(lambda self: self.start["value_mode"])
    seed = property(lambda self: self.start["seed"])
    max_steps = property(lambda self: self.start["max_steps"])
    last = property(lambda self: int(self.steps["step"][-1]))
    finished = property(lambda self: self.last >= self.max_steps and self.last in self.val)

    @property
    def progress(self):
        """Where an unfinished run is."""
        return f"step {self.last}/{self.max_steps}" + ", not evaluated" * (self.last >= self.max_steps)


def read_run(name):
    """The Run of a folder or metrics.jsonl; raises UserError if there is none, or nothing in it to draw."""
    path = Path(name, "metrics.jsonl") if Path(name).is_dir() else Path(name)
    if not path.exists():
        what = "has no metrics.jsonl" if Path(name).exists() else "does not exist"
        raise UserError(f"{name} {what}; name the folder of a run of train.py")
    records = {"start": [], "eval": [], "step": []}
    try:
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # a run that goes on now, or was killed, may have half a last line
                record = json.loads(line)
                records[record.get("event", "step")].append(record)
        start = {key: r[key] for r in records["start"] for key in START}
        steps = {key: np.array([r[key] for r in records["step"]], float) for key in STEP}
        if (np.diff(steps["step"]) != 1).any():
            raise ValueError("steps are missing or repeated")
        val = {r["step"]: r["val_mean"] for r in records["eval"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not a metrics.jsonl of train.py: {type(e).__name__} {e}") from None
    if not start or not records["step"]:
        raise UserError(f"{path} has no steps yet; wait until the run has made some")
    return Run(name, start, steps, val)


def by_mode(runs, baseline):
    """{value_mode: its runs}, the baseline first; raises UserError if runs of a mode are not seeds of one model."""
    groups = {}
    for r in sorted(runs, key=lambda r: r.mode != baseline):
        for other in groups.setdefault(r.mode, []):
            if other.seed == r.seed or other.start["parameters"] != r.start["parameters"]:
                what = f"with seed {r.seed}" if other.seed == r.seed else "but not models of the same size"
                raise UserError(f"{other.name} and {r.name} are both {r.mode}, {what}; name only one of them")
        groups[r.mode].append(r)
    return groups


def pair(groups, baseline):
    """{value_mode: [(run, the baseline's run of its seed)]}: both saw the same batches, so their noise cancels.

    Raises UserError if there is no such partner, or it was trained differently.
    """
    partners = {r.seed: r for r in groups.get(baseline, [])}
    pairs = {mode: [(r, partners.get(r.seed)) for r in runs] for mode, runs in groups.items() if mode != baseline}
    for r, base in sum(pairs.values(), []):
        if base is None:
            raise UserError(
                f"{r.name} ({r.mode}) has no {baseline} run of its seed, {r.seed}, to be compared with: name that too, "
                f"or make it: `python train.py --value_mode={baseline} --seed={r.seed}`, and all else as in {r.name}"
            )
        rates = [q.steps["tokens"][-1] / q.last for q in (r, base)]
        plans = [
            f"{q.max_steps} steps of {n:,.0f} tokens, {q.start['block_size']} at a time, of data {q.start['data']}"
            for q, n in zip((r, base), rates, strict=True)
        ]
        if plans[0] != plans[1]:
            raise UserError(
                f"{r.name} was set to {plans[0]}, {base.name} to {plans[1]}: their losses say nothing about the modes"
            )
    if not pairs:
        raise UserError(f"all runs are {baseline}; name runs of other modes to compare with them")
    return pairs


def align(curves):
    """curves: [(x, y)] -> the x that all have, (n,), and their y there, (curves, n)."""
    common = functools.reduce(np.intersect1d, [x for x, _ in curves])
    return common, np.stack([y[np.isin(x, common)] for x, y in curves])


def smooth(x, y, window):
    """Moving average of y over `window` steps, at the first x of each. Source: the authors' plot_relative_loss.py."""
    if window > len(y):
        raise UserError(f"window={window} is longer than the {len(y)} steps that can be drawn; set a smaller --window")
    return x[: len(x) - window + 1], np.convolve(y, np.ones(window) / window, "valid")


def pick_window(runs, asked):
    """Steps of the moving average, as asked for or by the shortest run; says which."""
    shortest = min(len(r.steps["step"]) for r in runs)
    window = asked or (100 if shortest >= 200 else 10)
    why = "" if asked or shortest >= 200 else f" instead of 100, because a run has only {shortest} steps"
    print(f"moving average over {window} steps{why}")
    return window


def band(y):
    """y (seeds, n) -> mean, low and high, (n,) each, and what they are, for the legend."""
    mean = y.mean(0)
    if len(y) < 3:
        return mean, y.min(0), y.max(0), "2 seeds, min–max" if len(y) == 2 else "1 seed"
    std = y.std(0, ddof=1)
    return mean, mean - std, mean + std, f"{len(y)} seeds ± std"


def draw(ax, x, y, mode, modes, points=None):
    """A mode's line and band, y (seeds, n), and `points` (x, y) as markers, in the look of its place in `modes`."""
    if not len(x):
        raise UserError(f"the runs of {mode} and what they are compared with have no steps in common")
    i, (mean, low, high, what) = list(modes).index(mode), band(y)
    look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none"}
    dash = {"linestyle": DASHES[i % len(DASHES)], "label": f"{mode}, {what}"}
    if points is None:
        look["marker"] = ""
    else:
        ax.plot(*points, linestyle="", **look)
    ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(x, mean, markevery=[], **look, **dash)  # so that the legend alone shows the marker on the line


def fit(ax, zero):
    """Fit the y axis to what is drawn after the EARLY steps, and to 0 if `zero`; says so if that cuts anything off."""
    shapes = [line.get_xydata() for line in ax.lines] + [p.vertices for c in ax.collections for p in c.get_paths()]
    x, y = np.concatenate(shapes).T
    late = np.append(y[x >= x.min() + EARLY * np.ptp(x)], [0.0] * zero)
    pad = 0.05 * np.ptp(late) or 1
    ax.set(xlim=(0, None), ylim=(late.min() - pad, late.max() + pad))
    if y.min() < late.min() or y.max() > late.max():
        print(f"the y axis fits what follows the first {EARLY:.0%} of the steps; what comes earlier may leave it")


def matplotlib():
    """(Figure, its canvas, style, Image) of matplotlib; raises UserError if it is not there."""
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image  # comes with matplotlib
    except ImportError:
        raise UserError("figures need the matplotlib package: pip install matplotlib") from None
    return Figure, FigureCanvasAgg, style, Image


@contextlib.contextmanager
def page(path, size):
    """An empty matplotlib figure of `size` inches to draw on, then written as a PNG.

    The same lines give the same bytes: no date, no version, nothing from the user's matplotlibrc.
    """
    Figure, Canvas, style, Image = matplotlib()
    with style.context(["default", LOOK]):
        canvas = Canvas(Figure(figsize=size, dpi=150, layout="constrained"))
        yield canvas.figure
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128)  # a third of the bytes
        write_atomic(path, lambda temporary: image.save(temporary, "PNG", optimize=True, dpi=(150, 150)))
    print(f"wrote {path}")


@contextlib.contextmanager
def figure(path, xlabel, ylabel, zero=False):
    """Axes to draw lines over training steps on; zero: mark 0, for values that are differences."""
    with page(path, (6, 4)) as paper:
        ax = paper.subplots()
        yield ax
        fit(ax, zero)
        if zero:
            ax.axhline(0, color="0.5", linewidth=0.8, zorder=0)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        paper.legend(loc="outside upper left", ncols=2, handlelength=4.5)


def relative(cfg, groups, window):
    """Training loss of each run minus that of the baseline's run of its seed, averaged over seeds."""
    labels = f"training step s (mean over s to s + {window - 1})", f"loss difference to {cfg.baseline} (nats per token)"
    with figure(cfg.out_file, *labels, zero=True) as ax:
        for mode, both in pair(groups, cfg.baseline).items():
            pairs = [align([(r.steps["step"], r.steps["loss"]) for r in two]) for two in both]
            draw(ax, *align([smooth(x, y[0] - y[1], window) for x, y in pairs]), mode, groups)


def loss(cfg, groups, window):
    """Training loss of each mode; averages stand in the middle of their window, so as to meet the validation losses."""
    label = f"training step (lines: training loss, mean over {window} steps; markers: validation loss)"
    with figure(cfg.out_file, label, "loss (nats per token)") as ax:
        for mode, runs in groups.items():
            x, y = align([smooth(r.steps["step"], r.steps["loss"], window) for r in runs])
            at, val = align([np.array([*r.val.items()]).reshape(-1, 2).T for r in runs])
            draw(ax, x + (window - 1) / 2, y, mode, groups, points=(at, val.mean(0)))


def statistics(values):
    """Mean, standard deviation (n - 1; None for one value) and n of a list of numbers, or None if it is empty."""
    if values:
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return {"mean": float(np.mean(values)), "std": std, "n": len(values)}


def summary(groups, baseline):
    """A dict of numbers per mode; losses are of finished runs only, as those on the way are no results."""
    pairs = pair(groups, baseline)
    for mode, runs in groups.items():
        both = [(r, base) for r, base in pairs.get(mode, []) if r.finished and base.finished]
        row = {"mode": mode} | {key: runs[0].start[key] for key in ("parameters", "kv_bytes_per_token")}
        row["tokens_per_s"] = float(np.mean([np.median(r.steps["tokens_per_s"]) for r in runs]))
        row["val_loss"] = statistics([r.val[r.last] for r in runs if r.finished])
        row["difference"] = statistics([r.val[r.last] - base.val[base.last] for r, base in both])
        yield row | {"runs": len(runs), "unfinished": [r.progress for r in runs if not r.finished]}


def cells(row):
    """The texts of a row of the table."""
    losses = []
    for of, sign in ((row["val_loss"], ""), (row["difference"], "+")):
        spread = f" ± {of['std']:.4f}" if of and of["n"] > 1 else ""
        losses.append(f"{of['mean']:{sign}.4f}{spread}" if of else "-")
    late = row["unfinished"]
    runs = f"{row['runs'] - len(late)} of {row['runs']} ({'; '.join(late)})" if late else str(row["runs"])
    speed, cache = f"{row['tokens_per_s']:,.0f}", f"{row['kv_bytes_per_token']:,}"
    return [row["mode"], f"{row['parameters']:,}", *losses, speed, cache, runs]


def compare(cfg, groups, window):
    """Print the table of modes, write it as JSON if asked to, and draw the relative losses."""
    rows = list(summary(groups, cfg.baseline))
    head = ["mode", "parameters", "val loss", f"vs {cfg.baseline}", "tokens/s", "KV bytes/token", "runs"]
    lines = [head, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
    for first, *others in lines:
        print("|", " | ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]), "|")
    places = {f"{r.start['device']} {r.start['dtype']}" for runs in groups.values() for r in runs}
    print(f"losses: nats per token, of finished runs, ± standard deviation; tokens/s: {', '.join(sorted(places))}")
    if cfg.json_file:
        write_json(cfg.json_file, {"baseline": cfg.baseline, "modes": rows})
    relative(cfg, groups, window)


def difference(losses, low, high):
    """Loss of mode `low` minus that of `high`, for each seed that has both: losses is {mode: {seed: loss}}."""
    return [losses[low][seed] - losses[high][seed] for seed in sorted(losses[low].keys() & losses[high].keys())]


def verdict(gaps):
    """Whether losses that should be lower are so: the mean of their differences against one standard deviation."""
    if len(gaps) < 2:
        return "one seed"
    mean, std = np.mean(gaps), np.std(gaps, ddof=1)
    return "agree" if mean < -std else "disagree" if mean > std else "within the spread"


def claims(losses):
    """(figure, mode of the lower loss, of the higher, differences by seed, verdict) of each claim in FIGURES whose two
    modes have losses, {mode: {seed: loss}}."""
    for name, (_, pairs, _) in FIGURES.items():
        for low, high in pairs:
            if gaps := difference(losses, low, high) if low in losses and high in losses else []:
                yield name, low, high, gaps, verdict(gaps)


def plus_minus(gaps):
    of = statistics(gaps)
    return f"{of['mean']:+.3f}" + (f" ± {of['std']:.3f}" if of["n"] > 1 else "")


def figure_table(losses, baseline):
    """Markdown: for each figure what the paper says, our modes from the lowest loss up, and whether that agrees."""
    lines = [
        f"| figure | the paper | ours: loss minus {baseline}'s, lowest first | do they agree? |",
        "|---|---|---|---|",
    ]
    found = list(claims(losses))
    for name, (said, _, _) in FIGURES.items():
        mine = [claim for claim in found if claim[0] == name]
        modes = {mode for claim in mine for mode in claim[1:3]} - {baseline}
        gaps = {mode: difference(losses, mode, baseline) for mode in modes}
        order = ", ".join(
            f"`{mode}` {plus_minus(gaps[mode])}" for mode in sorted(modes, key=lambda m: np.mean(gaps[m]))
        )
        agree = sum(claim[4] == "agree" for claim in mine)
        other = {}
        for _, low, high, _, said_of in mine:
            if said_of != "agree":
                other.setdefault(said_of, []).append(f"`{low}` < `{high}`")
        rest = [f"{word}: {', '.join(what)}" for word, what in other.items()]
        if mine:
            lines.append(f"| {name} | {said} | {order} | {'; '.join([f'agree {agree} of {len(mine)}', *rest])} |")
    return lines


def panel(ax, title, modes, losses, baseline):
    """One figure's modes as a column of dots: seeds grey, mean and standard deviation black, lowest loss on top."""
    gaps = {m: difference(losses, m, baseline) for m in modes}
    order = sorted((m for m in gaps if gaps[m]), key=lambda m: -np.mean(gaps[m]))
    for y, mode in enumerate(order):
        of = statistics(gaps[mode])
        ax.plot(gaps[mode], [y] * of["n"], "o", color="0.65", markersize=4, markeredgewidth=0)
        ax.errorbar(of["mean"], y, xerr=of["std"], fmt="|", color=COLORS[1], markersize=9, markeredgewidth=1.6)
    ax.axvline(0, color="0.5", linewidth=0.8, zorder=0)
    ax.set(yticks=range(len(order)), yticklabels=order, ylim=(-0.6, len(order) - 0.4))
    ax.set_title(title, loc="left", fontsize=9)
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)


def ablations(cfg, groups, window):
    """Print the paper's claims beside our runs, write all losses as JSON if asked to, and draw them by figure."""
    pair(groups, cfg.baseline)  # that they are runs of one kind
    finished = {mode: {r.seed: r.val[r.last] for r in runs if r.finished} for mode, runs in groups.items()}
    losses = {mode: of for mode, of in finished.items() if of}
    if cfg.baseline not in losses:
        raise UserError(f"no run of {cfg.baseline} is finished, and losses are shown against it")
    panels = {}
    for name, (_, pairs, others) in FIGURES.items():
        modes = {mode for two in pairs for mode in two} | set(others)
        if modes := modes & (losses.keys() - {cfg.baseline}):
            panels[f"Figure {name}" if name.isdigit() else name] = modes
    if not panels:
        raise UserError("none of the finished runs is of a mode in the paper's figures; `compare` takes any mode")
    print("\n".join(figure_table(losses, cfg.baseline)), end="\n\n")
    print("| figure | the paper: lower loss | than | ours, difference | |\n|---|---|---|---:|---|")
    for name, low, high, gaps, said in claims(losses):
        print(f"| {name} | `{low}` | `{high}` | {plus_minus(gaps)} | {said} |")
    print(
        "validation loss, nats per token, ± standard deviation over seeds: what is within one of 0 is within the spread"
    )
    if cfg.json_file:
        rows = [row | {"losses": finished[row["mode"]]} for row in summary(groups, cfg.baseline)]
        write_json(cfg.json_file, {"baseline": cfg.baseline, "modes": rows})
    heights = [len(modes) + 2.5 for modes in panels.values()]
    half = min(range(len(heights)), key=lambda i: abs(sum(heights[:i]) - sum(heights) / 2))
    columns = [c for c in (slice(half), slice(half, None)) if heights[c]]
    tallest = max(sum(heights[c]) for c in columns)
    with page(cfg.out_file, (4.5 * len(columns), 0.17 * tallest + 0.5)) as paper:
        for part, column in zip(np.atleast_1d(paper.subfigures(1, len(columns))), columns, strict=True):
            names = list(panels)[column]
            axes = part.subplots(len(names), 1, height_ratios=heights[column], squeeze=False)[:, 0]
            for ax, name in zip(axes, names, strict=True):
                panel(ax, name, panels[name], losses, cfg.baseline)
            axes[-1].set_xlabel(f"validation loss minus {cfg.baseline}'s (nats per token)")


def read_eval(name):
    """(mode, {task: record}) of the last checkpoint in the eval.json of a run; raises UserError if there is none."""
    path = Path(name, "eval.json") if Path(name).is_dir() else Path(name)
    if not path.exists():
        raise UserError(f"{path} does not exist; make it: `python eval.py {name} --task=table1,table5`")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["checkpoints"].values()
        last = max(found, key=lambda c: c["step"])
        return last["mode"], last["results"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not a file of eval.py: {type(e).__name__} {e}") from None


def side_by_side(n):
    """Places of n marks around 0."""
    return (np.arange(n) - (n - 1) / 2) * min(0.16, 0.7 / n)


def accuracies(ax, runs, tasks, metric):
    """Accuracy of each run on each task, ± one standard error, and chance."""
    for i, (dx, (name, results)) in enumerate(zip(side_by_side(len(runs)), runs.items(), strict=True)):
        there = [(x, results[t]) for x, t in enumerate(tasks) if metric in results.get(t, ())]
        y, error = ([record[key] or 0 for _, record in there] for key in (metric, f"{metric}_stderr"))
        look = {"color": COLORS[i % len(COLORS)], "fmt": MARKERS[i % len(MARKERS)], "markerfacecolor": "none"}
        ax.errorbar([x + dx for x, _ in there], y, error, capsize=2, label=name, **look)
        for x, record in there:
            ax.hlines(record["chance"], x - 0.42, x + 0.42, color="0.6", linestyle=(0, (3, 2)), zorder=0)
    ax.plot([], [], color="0.6", linestyle=(0, (3, 2)), label="chance")
    ax.set(xticks=range(len(tasks)), xlim=(-0.6, len(tasks) - 0.4), ylim=(0, None))
    ax.set_xticklabels(tasks, rotation=30, ha="right", rotation_mode="anchor")
    ax.set_ylabel(f"{metric} ± standard error")
    ax.grid(axis="y", color="0.9", linewidth=0.6)


def losses_by_domain(ax, runs):
    """Loss of each run in each domain, and the domains' mean."""
    domains = list(dict.fromkeys(d for results in runs.values() for d in results.get("loss", {"val": ()})["val"]))
    rows = [*domains, "mean"][::-1]
    for i, (dy, (name, results)) in enumerate(zip(side_by_side(len(runs)), runs.items(), strict=True)):
        if "loss" in results:
            val = results["loss"]["val"] | {"mean": results["loss"]["val_mean"]}
            look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none"}
            at = [y - dy for y, row in enumerate(rows) if row in val]
            ax.plot([val[row] for row in rows if row in val], at, linestyle="", label=name, **look)
    ax.set(yticks=range(len(rows)), yticklabels=rows, ylim=(-0.6, len(rows) - 0.4))
    ax.set_xlabel("validation loss (nats per token)")
    ax.grid(color="0.9", linewidth=0.6)


def evaluation(cfg, names):
    """Draw what eval.py found of several runs: tasks on the left, losses on the right, as far as there are any."""
    found = [read_eval(name) for name in names]
    modes = [mode for mode, _ in found]
    labels = modes if len(set(modes)) == len(modes) else names
    runs = dict(zip(labels, (results for _, results in found), strict=True))
    tasks = [t for t in TASKS if any(cfg.metric in results.get(t, ()) for results in runs.values())]
    loss = any("loss" in results for results in runs.values())
    if not tasks and not loss:
        raise UserError(
            f"{names[0]} has no result of a whole task; make one: `python eval.py {names[0]}`, without --limit"
        )
    widths = [1.2 + 0.8 * len(tasks)] * bool(tasks) + [4.0] * loss
    with page(cfg.out_file, (sum(widths), 3.8)) as paper:
        axes = list(np.atleast_1d(paper.subplots(1, len(widths), width_ratios=widths)))
        handles = (axes[0] if tasks else axes[-1]).get_legend_handles_labels
        if tasks:
            accuracies(axes[0], runs, tasks, cfg.metric)
        if loss:
            losses_by_domain(axes[-1], runs)
        paper.legend(*handles(), loc="outside upper left", ncols=4)


# -- panels of the paper's figures, which reproduce.py fills with runs


def legend(ax):
    ax.legend(handlelength=3.5, fontsize=7, labelspacing=0.3, frameon=True, framealpha=0.7, edgecolor="none")


def relative_panel(ax, pairs, window, baseline="Transformer"):
    """pairs: {label: [(run, the baseline's run of its seed)]} -> training loss minus the baseline's over steps."""
    for label, both in pairs.items():
        seeds = [align([(r.steps["step"], r.steps["loss"]) for r in two]) for two in both]
        draw(ax, *align([smooth(x, y[0] - y[1], window) for x, y in seeds]), label, pairs)
    fit(ax, zero=True)
    ax.axhline(0, color="0.5", linewidth=0.8, zorder=0)
    ax.set(xlabel=f"training step (mean over {window})", ylabel=f"loss minus {baseline}'s (nats per token)")
    legend(ax)


def layer_panel(ax, lines, ylabel, first=1, level=None):
    """lines: {label: (seeds, n)} of a quantity over layers, counted from `first`; level: (height, name) to mark."""
    for label, y in lines.items():
        y = np.array([[np.nan if v is None else v for v in row] for row in y], float)
        x = first + np.arange(y.shape[1])
        there = np.isfinite(y).all(0)
        draw(ax, x[there], y[:, there], label, lines, points=(x[there], y[:, there].mean(0)))
    if level:
        ax.axhline(level[0], color="0.5", linewidth=0.8, linestyle=(0, (3, 2)), zorder=0, label=level[1])
    ax.set(xlabel="layer" if first else "state (0 = embedding)", ylabel=ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend(ax)


def spectrum_panel(ax, lines):
    """lines: {label: (seeds, n)}, eigenvalues from the largest down."""
    for label, y in lines.items():
        y = np.array(y, float)
        draw(ax, 1 + np.arange(y.shape[1]), np.maximum(y, 1e-12), label, lines)
    top = max(np.array(y).max() for y in lines.values())
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue", xscale="log", yscale="log", ylim=(top / 1e6, top * 2))
    legend(ax)


def semi_log(points):
    """(a, c) of the straight line L = a + c ln N through points [(parameters N, loss L)], least squares."""
    n, losses = np.array(points, float).T
    c, a = np.polyfit(np.log(n), losses, 1)
    return a, c


def saving(points, others):
    """[share of parameters that `points` [(N, L)] save at the losses of `others`, one for each N]: the horizontal gap
    of two straight lines over ln N; below 0, they need more. This fit gives 10.4 % on the paper's Table 5. None where
    it says nothing: losses that do not fall with N, or a gap wider than all the sizes span."""
    (a, c), (b, d) = semi_log(points), semi_log(others)
    gaps = [(b + d * math.log(n) - a) / c - math.log(n) if c < 0 and d < 0 else math.inf for n, _ in others]
    span = math.log(max(points + others)[0] / min(points + others)[0])
    return [1 - math.exp(gap) if abs(gap) <= span else None for gap in gaps]


def scaling_panel(ax, lines, least=0):
    """lines: {label: [(parameters, [loss of each seed])]}, straight lines over ln N through those from `least` on."""
    for i, (label, points) in enumerate(lines.items()):
        color, x = COLORS[i % len(COLORS)], np.array([n for n, _ in points], float)
        for n, losses in points:
            ax.plot([n] * len(losses), losses, MARKERS[i % len(MARKERS)], color=color, markerfacecolor="none")
        a, c = semi_log([(n, np.mean(losses)) for n, losses in points if n >= least])
        grid = np.geomspace(max(x.min(), least), x.max(), 50)
        ax.plot(grid, a + c * np.log(grid), color=color, linestyle=DASHES[i % len(DASHES)], label=label)
    ax.set(xlabel="parameters", ylabel="validation loss (nats per token)", xscale="log")
    legend(ax)


def reached(curve, loss):
    """The tokens after which curve (tokens, losses) is at a loss, between evaluations on a straight line; or None."""
    x, y = (np.array(part, float) for part in curve)
    below = np.flatnonzero(y <= loss)
    if len(below):
        i = below[0]
        return float(np.interp(loss, [y[i], y[i - 1]], [x[i], x[i - 1]]) if i else x[0])


def tokens_saved(curve, target):
    """Share of tokens that curve (tokens, losses) saves on the way to the last loss of `target`. Below 0 if it ends
    above that: then it needs at least as many more as `target` was earlier at the curve's last loss."""
    (x, y), (last_x, last_y) = curve, (target[0][-1], target[1][-1])
    if (at := reached(curve, last_y)) is not None:
        return 1 - at / last_x
    at = reached(target, y[-1])
    return None if at is None else 1 - x[-1] / at


def tokens_panel(ax, lines):
    """lines: {label: [(tokens, validation losses) of each seed]}."""
    for label, curves in lines.items():
        x, y = align([tuple(np.array(part, float) for part in curve) for curve in curves])
        draw(ax, x, y, label, lines, points=(x, y.mean(0)))
    ax.set(xlabel="training tokens", ylabel="validation loss (nats per token)")
    ax.xaxis.set_major_formatter("{x:.3g}")
    ax.locator_params(axis="x", nbins=5)
    fit(ax, zero=False)
    legend(ax)


def critical_point(x, y):
    """(step, extrapolated?) where a relative loss y over steps x goes from below 0 above it for good: the last such
    crossing, or where the line through the last tenth of the points will; infinity if that does not rise, 0 if y is
    never below 0. Source: the paper's Figure 14, whose last tenth is 1,000 steps."""
    rises = np.flatnonzero((y[:-1] < 0) & (y[1:] >= 0))
    if y[-1] >= 0:
        if not len(rises):
            return 0.0, False
        i = rises[-1]
        return float(np.interp(0, y[i : i + 2], x[i : i + 2])), False
    tail = slice(-max(2, len(x) // 10), None)
    slope, height = np.polyfit(x[tail], y[tail], 1)
    return max(float(x[-1]), float(-height / slope)) if slope > 0 else math.inf, True


def critical_panel(ax, points):
    """points: {length: [what critical_point found of each seed]}."""
    for kind, name, face in ((False, "crossed", COLORS[1]), (True, "extrapolated from the last tenth", "none")):
        there = [(n, at) for n, seeds in points.items() for at, of in seeds if of == kind and 0 < at < math.inf]
        if there:
            ax.plot(*zip(*there, strict=True), "o", color=COLORS[1], markerfacecolor=face, label=name)
    ax.set(xlabel="sequence length in the paper (tokens)", ylabel="critical point (step)", xscale="log")
    if ax.lines:
        ax.set_yscale("log")
    edge = {"color": COLORS[2], "markerfacecolor": "none", "transform": ax.get_xaxis_transform()}
    for at, mark, y, name in ((math.inf, "^", 0.96, "its lead does not shrink"), (0.0, "v", 0.04, "never ahead")):
        there = [n for n, seeds in points.items() for found in seeds if found[0] == at]
        if there:
            ax.plot(there, [y] * len(there), mark, label=name, **edge)
    legend(ax)


def heat_maps(paper, models):
    """models: {label: {quantity: (layers, positions)}}: one row of maps for each model, each with its own colour scale,
    as their ranges differ by an order of magnitude."""
    quantities = list(next(iter(models.values())))
    axes = paper.subplots(len(models), len(quantities), squeeze=False)
    for row, (label, maps) in zip(axes, models.items(), strict=True):
        for ax, quantity in zip(row, quantities, strict=True):
            rows, columns = maps[quantity].shape
            first = 0 if quantity.endswith("state") else 1  # state 0 is the embedding
            place = {"extent": (0.5, columns + 0.5, first - 0.5, first + rows - 0.5), "origin": "lower"}
            image = ax.imshow(maps[quantity], aspect="auto", cmap="viridis", interpolation="nearest", **place)
            paper.colorbar(image, ax=ax)
            ax.set_title(f"{label}: {quantity}", fontsize=8, loc="left")
            ax.yaxis.get_major_locator().set_params(integer=True)
    for ax in axes[:, 0]:
        ax.set_ylabel("layer")
    for ax in axes[-1]:
        ax.set_xlabel("token position")


def read_analysis(folder, make=""):
    """The analysis.json of a folder; raises UserError, which names the command that makes it, if there is none."""
    path, make = Path(folder, "analysis.json"), make or f"python analyze.py {folder}"
    if not path.exists():
        raise UserError(f"{path} is missing; make it: `{make}`")
    found = read_json(path, "a file of analyze.py")
    if not isinstance(found, dict) or not {"layers", "states", "length", "entropy_uniform"} <= found.keys():
        raise UserError(f"{path} is not a file of analyze.py; remove it, then `{make}`")
    return found


def analysis(cfg, names):
    """Draw what analyze.py found of several models, by layer. Runs that differ in their seed alone become a band."""
    groups, panels = {}, {}
    if again := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{again[0]} is named twice; name each run once")
    for name in names:
        found, config = read_analysis(name), Path(name, "config.json")
        same = read_json(config, "the config of a model") if config.exists() else {}
        same = {key: value for key, value in same.items() if key not in ("seed", "out_dir")}
        key = (found["mode"], found["length"], json.dumps(same) if "max_steps" in same else name)
        groups.setdefault(key, []).append((name, found))
    modes = [mode for mode, *_ in groups]
    for (mode, *_), runs in groups.items():
        label = mode if modes.count(mode) == 1 else runs[0][0]
        for title, where, key, over in ANALYSIS:
            try:
                of = [(found[where][key]["mean"], found[where][over]["mean"] if over else None) for _, found in runs]
            except (KeyError, TypeError):
                raise UserError(f"{runs[0][0]}/analysis.json has no {key}; make it again with analyze.py") from None
            lines = [[a / b for a, b in zip(*pair, strict=True)] if over else pair[0] for pair in of]
            panels.setdefault((title, where), {})[label] = lines
    with page(cfg.out_file, (12.5, 7)) as paper:
        for ax, ((title, where), lines) in zip(paper.subplots(2, 3).flat, panels.items(), strict=True):
            layer_panel(ax, lines, title, 0 if where == "states" else 1)


def read_decoding(path):
    """The rows of a file of `bench.py decode` that are of our models; raises UserError if it is none."""
    found = read_json(path, "a file of bench.py")
    if not isinstance(found, dict) or found.get("what") != "decode":
        raise UserError(f"{path} is not a file of bench.py decode; make it: `python bench.py decode`")
    return [row for row in found["rows"] if "kv_bytes" in row]


def decoding_panel(ax, rows, x, y, ylabel):
    """rows: {mode: [row of bench.py]}: y(row) over row[x], both axes with logarithmic scales."""
    for i, (mode, of_mode) in enumerate(rows.items()):
        look = {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)], "markerfacecolor": "none"}
        points = sorted({row[x]: y(row) for row in of_mode}.items())  # measured twice: the last file counts
        ax.plot(*zip(*points, strict=True), marker=MARKERS[i % len(MARKERS)], label=mode, **look)
    ax.set_xscale("log", base=2)
    ax.set(xlabel={"length": "tokens of context", "batch": "rows in the batch"}[x], ylabel=ylabel, yscale="log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}")
    ax.yaxis.set_minor_formatter("")


def decoding(cfg, names):
    """Draw what `bench.py decode` measured, for each shape, dtype and compile three panels: tokens/s over the context
    at the largest batch, over the batch at the longest context, and the rows whose keys and values fit into memory."""
    cases = {}
    for row in (row for name in names for row in read_decoding(name)):
        row["length"] = row["prompt"] + row["new"]
        title = f"{row['shape']}, {row['dtype']}" + ", compiled" * (row["compile"] == "on")
        cases.setdefault(title, {}).setdefault(row["name"], []).append(row)
    if not cases:
        raise UserError(f"there is no model of ours in {', '.join(names)}")
    speed, fitting = (lambda row: row["tokens_per_s"]), (lambda row: FOR_CACHE * row["batch"] // row["kv_bytes"])
    with page(cfg.out_file, (12.5, 3.6 * len(cases))) as paper:
        for axes, (title, modes) in zip(paper.subplots(len(cases), 3, squeeze=False), cases.items(), strict=True):
            for ax, x, key in zip(axes, ("length", "batch"), ("batch", "length"), strict=False):
                most = max(row[key] for rows in modes.values() for row in rows)
                there = {mode: [row for row in rows if row[key] == most] for mode, rows in modes.items()}
                ylabel = f"tokens/s, {'batch' if key == 'batch' else 'context'} {most:,}"
                decoding_panel(ax, {mode: rows for mode, rows in there.items() if rows}, x, speed, ylabel)
            decoding_panel(axes[2], modes, "length", fitting, f"rows whose KV cache fits into {FOR_CACHE >> 30} GiB")
            axes[0].set_title(title, loc="left", fontsize=9)
            legend(axes[2])


# What `analysis` draws: title, a part of analysis.json, its quantity there, and by which other one it is divided.
ANALYSIS = (
    ("entropy minus uniform attention's (nats)", "layers", "entropy_minus_uniform", None),
    ("importance of the first token", "layers", "first", None),
    ("norm of the first token's value, by the others'", "layers", "value_norm_first", "value_norm_rest"),
    ("norm of the first token's state, by the others'", "states", "hidden_norm_first", "hidden_norm_rest"),
    ("token similarity of the states", "states", "hidden_similarity", None),
    ("effective rank of the values", "layers", "value_rank", None),
)
KINDS = {"relative": relative, "loss": loss, "compare": compare, "ablations": ablations}
FROM_FILES = {"eval": evaluation, "analysis": analysis, "decode": decoding}  # of eval.py, analyze.py and bench.py


def main(cfg: PlotConfig):
    kind, *names = cfg.words
    if kind in FROM_FILES:
        return FROM_FILES[kind](cfg, names)
    runs = [read_run(name) for name in names]
    for r in runs:
        if not r.finished:
            print(f"note: {r.name} is not finished: {r.progress}")
    window = pick_window(runs, cfg.window) if kind != "ablations" else 0
    KINDS[kind](cfg, by_mode(runs, cfg.baseline), window)


if __name__ == "__main__":
    run_main(main, command_line(PlotConfig, __doc__))
