"""Figures and tables of runs, from their metrics.jsonl and from what eval.py and analyze.py write beside it.

    python plot.py relative out/demo/vanilla out/demo/svformer    training loss minus that of the baseline, by seed
    python plot.py loss out/demo/vanilla out/demo/svformer        training loss, and validation loss as markers
    python plot.py compare out/demo/*                             a Markdown table, and the figure of `relative`
    python plot.py eval out/demo/vanilla out/demo/svformer        accuracies with errors and chance, loss by domain
    python plot.py analysis out/demo/vanilla out/demo/svformer    attention concentration, sinks and drains by layer

Runs are named by their folders, and grouped by value_mode. The seeds of a mode become one line, their mean, with a band
of one standard deviation (n - 1) on each side. The figure is written beside the first run, or where --out_file says.

paper/ draws the paper's figures with the styles and the page of this file.
"""

import contextlib
import functools
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from oldconfig import UserError, check_ranges, command_line, convert, need, run_main, setting
from oldfiles import read_json, read_records, write_atomic
from report import markdown, mean_std, plus_minus
from tasks import EVALUATIONS, TASKS
from value_modes import TABLE, row_and_number

# what is read of the files of other stages
START = dict.fromkeys(("value_mode", "data", "device", "dtype"), str)
START |= dict.fromkeys(("seed", "parameters", "block_size", "max_steps", "kv_bytes_per_token"), int)
LOSSES = {"val": dict[str, float], "val_mean": float}  # by domain, and their mean
METRICS = {
    "start": START,
    "step": {"step": int, "loss": float, "lr": float, "tokens": int, "tokens_per_s": float},
    "eval": {"step": int} | LOSSES,
}
SCORES = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "chance")  # of another task, as far as it has them
MEANS = {"mean": tuple[float | None, ...]}  # of a quantity, by layer or state
ANALYSED = {"mode": str, "parameters": int, "length": int, "layers": dict[str, MEANS], "states": dict[str, MEANS]}
EARLY = 0.1  # share of the training that may leave the y axis: the first losses would squash all others
GROWTH = 1.15  # of the windows that relative losses are averaged over: the end of each relative to its beginning
SHOWN = 1 / 40  # share of the training after which figures over tokens begin
SQUASHED = 4  # how much longer than its later part the first losses may make the y axis


@dataclass(frozen=True)
class PlotConfig:
    """Every setting of plot.py."""

    words: tuple[str, ...] = setting(
        (), "what to draw (relative, loss, compare, eval or analysis), then the runs", positional=True
    )
    baseline: str = setting("vanilla", "value_mode that the others are compared with")
    metric: Literal["acc", "acc_norm"] = setting("acc", "eval: the accuracy to draw, see eval.py")
    out_file: str = setting("", "PNG to write; empty = <what is drawn>.png in the folder that holds the first run")

    def __post_init__(self):
        check_ranges(self)
        known = [*KINDS, *FROM_FILES]
        if len(self.words) < 2 or self.words[0] not in known:
            raise ValueError(
                f"say what to draw ({', '.join(known)}), then of which runs: `python plot.py relative out/demo/*`"
            )
        if self.out_file and not self.out_file.endswith(".png"):
            raise ValueError(f"out_file={self.out_file} must end in .png")


# -- looks: one colour, dash and marker for each value mode, and the page

# Okabe and Ito's colours, which colour-blind readers tell apart, without yellow, which is lost on white.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GAPS = (None, (6, 3), (8, 2.5, 1.5, 2.5), (1.5, 1.5), (14, 3), (8, 2, 1.5, 2, 1.5, 2))
DASHES = [(0, gaps) for gaps in GAPS]
MARKERS = "os^DvPX"
HEADLINE = ("vanilla", "resformer", "svformer", "neutreno", "denseformer", "resformer_lambda", "resformer_plus")
NEXT = (  # in an order in which modes of one figure of the paper differ in colour
    "identity", "svformer_2anchors", "svformer_3anchors", "resformer_prev", "resformer_neutreno", "share_k",
    "resformer_sparse", "scaled", "cla2", "share_q", "svformer_4anchors", "resformer_learned", "gqa2", "cross",
    "resformer_all", "share_v2", "query", "key",
)  # fmt: skip
ORDER = list(dict.fromkeys((*HEADLINE, *NEXT, *TABLE)))  # in which modes get their looks
LEVEL = {"color": "0.5", "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 0}  # a height to compare with
ZERO = {"color": "0.5", "linewidth": 0.8, "zorder": 0}  # where a difference is 0
LOOK = {
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "lines.markeredgewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def style_of(mode):
    """Colour, dash and marker of a mode's line, the same in every figure: keywords of matplotlib's `plot`.

    Black is the baseline's alone. A mode that the table does not have gets a look by its name.
    """
    name, _ = row_and_number(mode)  # neutreno for neutreno_0.6
    place = ORDER.index(name) if name in ORDER else len(ORDER) + zlib.crc32(name.encode()) % 180  # 252 looks differ
    if place == 0:
        color, dash = COLORS[0], DASHES[0]
    else:
        turn, i = divmod(place - 1, len(COLORS) - 1)  # each turn through the colours shifts them against the dashes
        color, dash = COLORS[1 + (i + turn) % (len(COLORS) - 1)], DASHES[(1 + i) % len(DASHES)]
    return {"color": color, "linestyle": dash, "marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none"}


def shade(color, share):
    """A colour "#rrggbb" mixed with that share of white, or of black if the share is negative."""
    target = 255 if share > 0 else 0
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + abs(share) * (target - c)):02X}" for c in channels)


def styles_of(modes):
    """{label: mode} -> {label: style}. Several lines of one mode keep its colour, from light to dark, and differ in
    dash and marker."""
    styles, rows = {}, {label: row_and_number(mode)[0] for label, mode in modes.items()}
    for label, mode in modes.items():
        same = [other for other in modes if rows[other] == rows[label]]
        styles[label] = style_of(mode)
        if len(same) > 1:
            i = same.index(label)
            styles[label]["color"] = shade(style_of(mode)["color"], 0.4 - 0.7 * i / (len(same) - 1))
            styles[label]["linestyle"] = DASHES[i % len(DASHES)]
            styles[label]["marker"] = MARKERS[i % len(MARKERS)]
    return styles


@contextlib.contextmanager
def page(path, size):
    """An empty matplotlib figure of `size` inches to draw on, written as a PNG at the end.

    The same lines give the same bytes: no date, no version, nothing from the user's matplotlibrc.
    """
    style, figure = need("matplotlib.style"), need("matplotlib.figure")
    with style.context(["default", LOOK]):
        fig = figure.Figure(figsize=size, dpi=150, layout="constrained")
        yield fig
        how = {"format": "png", "metadata": {"Software": None}, "bbox_inches": "tight"}  # tight: no legend is cut off
        write_atomic(path, lambda temporary: fig.savefig(temporary, **how))
    print(f"wrote {path}")


def legend(ax):
    """The legend of `ax`, above it, where it hides nothing. The title at the left becomes the legend's, with the seeds
    if they are the same for all lines."""
    handles, labels = ax.get_legend_handles_labels()
    title = ax.get_title(loc="left")
    endings = set()
    for label in labels:
        match = re.search(r", (1 seed|\d+ seeds.*)$", label)
        if match:
            endings.add(match[0])
    if len(endings) == 1:
        ending = endings.pop()
        labels = [label.removesuffix(ending) for label in labels]
        title = (title + ending).removeprefix(", ")
    longest = max(map(len, labels), default=0)
    columns = 2 if longest <= 24 and len(labels) > 2 else 1
    look = {"handlelength": 3.2, "fontsize": 7, "labelspacing": 0.3, "columnspacing": 1.2, "borderaxespad": 0.2}
    look |= {"title": title, "title_fontsize": 9, "alignment": "left"}
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **look)
    ax.set_title("", loc="left")


def short_count(n):
    """A number of parameters or tokens in three digits: 738k, 2.95M, 468M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= 0.9995 * unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:,.0f}"


def count_range(numbers, text=short_count):
    """The numbers' common value, or their range: 738k, 706k–738k."""
    low, high = text(min(numbers)), text(max(numbers))
    return low if low == high else f"{low}–{high}"


# -- runs


@dataclass(frozen=True)
class Curves:
    """What one metrics.jsonl says, or one record of paper/."""

    name: str  # as the user wrote it, or the record's
    start: dict  # the last start record: a resumed run has several
    steps: dict[str, np.ndarray]  # step, loss (nats per token), tokens so far; of a file also lr and tokens_per_s
    val: dict[int, float]  # step -> validation loss, mean over the domains, nats per token
    domains: dict[str, float]  # the last validation loss of each

    @property
    def mode(self):
        return self.start["value_mode"]

    @property
    def seed(self):
        return self.start["seed"]

    @property
    def max_steps(self):
        return self.start["max_steps"]

    @property
    def last(self):
        return int(self.steps["step"][-1])

    @property
    def step_tokens(self):
        """Tokens of one optimizer step."""
        return float(self.steps["tokens"][-1] / self.last)

    @property
    def finished(self):
        return self.last >= self.max_steps and self.last in self.val

    @property
    def final_loss(self):
        """The validation loss of a finished run."""
        return self.val[self.last]

    @property
    def validation(self):
        """(tokens, validation losses) of its evaluations."""
        return [step * self.step_tokens for step in self.val], list(self.val.values())

    @property
    def progress(self):
        """Where an unfinished run is."""
        text = f"step {self.last}/{self.max_steps}"
        return text + ", not evaluated" if self.last >= self.max_steps else text


def read_run(folder):
    """The Curves of a run; raises UserError if its folder has no metrics.jsonl, or no step in it yet."""
    path = Path(folder, "metrics.jsonl")
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run of train.py")
    records = {"start": [], "eval": [], "step": []}
    for number, record in enumerate(read_records(path), 1):
        kind, where = str(record.get("event", "step")), f"{path}, line {number}"
        if kind not in METRICS:
            raise UserError(f"{where}: event is none of {', '.join(METRICS)}")
        records[kind].append(convert(record, METRICS[kind], where))
    if not records["step"] or not records["start"]:
        raise UserError(f"{path} has no steps yet; wait until the run has made some")
    start = records["start"][-1]
    steps = {key: np.array([record[key] for record in records["step"]], float) for key in METRICS["step"]}
    val = {record["step"]: record["val_mean"] for record in records["eval"]}
    domains = records["eval"][-1]["val"] if records["eval"] else {}
    return Curves(str(folder), start, steps, val, domains)


def read_runs(names):
    """The Curves of the runs among `names`. Says what is left out: out/demo/* also matches the tables and pictures
    beside the runs. Raises UserError if no run is left."""
    runs = []
    for name in names:
        if Path(name).exists() and not Path(name, "metrics.jsonl").exists():
            print(f"note: {name} is left out: it has no metrics.jsonl, so it is not a run")
            continue
        runs.append(read_run(name))
        if not runs[-1].finished:
            print(f"note: {name} is not finished: {runs[-1].progress}")
    if not runs:
        raise UserError(f"none of {', '.join(names)} is a run; name folders that train.py has written")
    return runs


def by_mode(runs, baseline):
    """{value_mode: its runs}, the baseline first; raises UserError if runs of a mode are not seeds of one model."""
    groups = {}
    for run in sorted(runs, key=lambda run: run.mode != baseline):
        for other in groups.setdefault(run.mode, []):
            if other.seed == run.seed or not same_but_for_seed(run, other):
                raise UserError(f"{other.name} and {run.name} are both {run.mode}, but do not differ in the seed alone")
        groups[run.mode].append(run)
    return groups


def same_but_for_seed(run, other):
    """Whether two runs have models of one size, and were trained alike, with the same learning rates as far as both
    have come."""
    n = min(len(run.steps["lr"]), len(other.steps["lr"]))
    same_rates = np.array_equal(run.steps["lr"][:n], other.steps["lr"][:n])
    return same_rates and run.start["parameters"] == other.start["parameters"] and plan_of(run) == plan_of(other)


def plan_of(run):
    """How a run was trained, in words: two runs can be compared if these are equal."""
    tokens = f"{run.step_tokens:,.0f} tokens, {run.start['block_size']} at a time"
    bos = " with end-of-text first" if run.start.get("bos") else ""  # older runs do not say it
    return f"{run.max_steps} steps of {tokens}{bos}, of data {run.start['data']}"


def pair(groups, baseline):
    """{value_mode: [(run, the baseline's run of its seed)]}: both saw the same batches, so their noise cancels.

    Raises UserError if there is no such partner, or it was trained differently.
    """
    partners = {run.seed: run for run in groups.get(baseline, [])}
    pairs = {mode: [] for mode in groups if mode != baseline}
    if not pairs:
        raise UserError(f"all runs are {baseline}; name runs of other modes to compare with them")
    for mode in pairs:
        for run in groups[mode]:
            base = partners.get(run.seed)
            if base is None:
                raise UserError(
                    f"{run.name} ({run.mode}) needs a {baseline} run with its seed, {run.seed}; name that run too, or "
                    f"train it with --value_mode={baseline} and all other settings of {run.name}"
                )
            if plan_of(run) != plan_of(base):
                raise UserError(f"{run.name} had {plan_of(run)}, {base.name} had {plan_of(base)}: not comparable")
            pairs[mode].append((run, base))
    return pairs


def all_runs(groups):
    """The runs of {mode: [its runs]}."""
    return [run for of_mode in groups.values() for run in of_mode]


def size_of(runs):
    """Size and length of runs, for a title: 2.95M parameters, length 256, 300 steps of 2,048 tokens."""
    parts = [
        f"{count_range([run.start['parameters'] for run in runs])} parameters",
        f"length {count_range([run.start['block_size'] for run in runs], '{:,}'.format)}",
        f"{count_range([run.max_steps for run in runs], '{:,}'.format)} steps",
    ]
    return f"{', '.join(parts)} of {count_range([run.step_tokens for run in runs], '{:,.0f}'.format)} tokens"


# -- curves


def align(curves):
    """curves: [(x, y)] -> the x that all have, (n,), and their y there, (curves, n)."""
    curves = [(np.asarray(x, float), np.asarray(y, float)) for x, y in curves]
    common = functools.reduce(np.intersect1d, [x for x, _ in curves])
    return common, np.stack([y[np.isin(x, common)] for x, y in curves])


def growing_means(x, y):
    """Means of x (n,) and y (curves, n) over windows that are equally wide on a logarithmic axis. The last one is
    (x[-1] / GROWTH, x[-1]]; windows without a point are left out."""
    means_x, means_y, end = [], [], x[-1]
    while end >= x[0]:
        inside = (x > end / GROWTH) & (x <= end)
        if inside.any():
            means_x.append(x[inside].mean())
            means_y.append(y[:, inside].mean(axis=1))
        end /= GROWTH
    return np.array(means_x[::-1]), np.stack(means_y[::-1], axis=1)


def band(y):
    """y (seeds, n) -> mean, low and high, (n,) each, and what they are, for the legend."""
    mean = y.mean(0)
    if len(y) == 1:
        return mean, mean, mean, "1 seed"
    std = y.std(0, ddof=1)
    return mean, mean - std, mean + std, f"{len(y)} seeds ± std"


def draw_line(ax, x, y, label, style, points=None):
    """A line and band of y (seeds, n) over x (n,), and `points` (x, y) as markers, in a style of `style_of`."""
    mean, low, high, seeds = band(y)
    line = dict(style)
    if points is None:
        line["marker"] = ""
    else:
        ax.plot(*points, **style | {"linestyle": ""})
    ax.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=0)
    ax.plot(x, mean, markevery=[], label=f"{label}, {seeds}", **line)  # so that only the legend shows the marker


def fit_axes(ax, zero):
    """Let the x axis begin with the share SHOWN of the data and end with it, and fit the y axis to that part, and to 0
    if `zero`. What is before EARLY may leave the y axis if it made it more than SQUASHED times as long."""
    shapes = [line.get_xydata() for line in ax.lines]
    for collection in ax.collections:
        shapes += [path.vertices for path in collection.get_paths()]
    x, y = np.concatenate(shapes).T
    late = y[x >= x.min() + EARLY * np.ptp(x)]
    y = y[x >= SHOWN * x.max()]
    if zero:
        late = np.append(late, 0.0)
        y = np.append(y, 0.0)
    if np.ptp(y) > SQUASHED * np.ptp(late):
        y = late
    pad = 0.05 * np.ptp(y) or 1
    ax.set(xlim=(SHOWN * x.max(), x.max()), ylim=(y.min() - pad, y.max() + pad))


def token_axis(ax):
    """A logarithmic x axis of the tokens of training, for what `growing_means` returns."""
    ax.set_xscale("log", subs=())
    ax.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.set_xlabel(f"training tokens (a point averages the {1 - 1 / GROWTH:.0%} before it)")


def relative_panel(ax, pairs, styles, baseline="vanilla"):
    """pairs: {label: [(run, the baseline's run of its seed)]} -> training loss minus the baseline's, over tokens on a
    logarithmic axis: each point is the mean of a growing window, then over seeds."""
    for label, both in pairs.items():
        runs = [run for run, _ in both] + [base for _, base in both]
        x, losses = align([(run.steps["tokens"], run.steps["loss"]) for run in runs])
        gaps = losses[: len(both)] - losses[len(both) :]  # (seeds, steps)
        draw_line(ax, *growing_means(x, gaps), label, styles[label])
    fit_axes(ax, zero=True)
    ax.axhline(0, **ZERO)
    token_axis(ax)
    ax.set_ylabel(f"training loss minus {baseline}'s\n(nats per token)")
    legend(ax)


def layer_panel(ax, lines, styles, ylabel, first=1, level=None):
    """lines: {label: (seeds, n)} of a quantity over layers, counted from `first`; level: (height, name) to mark."""
    for label, values in lines.items():
        y = np.array(values, float)  # a layer without the quantity has None, which becomes NaN
        there = np.isfinite(y).all(0)
        x, y = (first + np.arange(y.shape[1]))[there], y[:, there]
        draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)))
    if level:
        ax.axhline(level[0], label=level[1], **LEVEL)
    ax.set(xlabel="layer" if first else "state (0 = embedding)", ylabel=ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend(ax)


# -- what is drawn of runs


def relative(path, cfg, groups):
    """Training loss of each run minus that of the baseline's run of its seed, averaged over seeds."""
    pairs = pair(groups, cfg.baseline)
    with page(path, (6, 4.4)) as fig:
        ax = fig.subplots()
        ax.set_title(size_of(all_runs(groups)), loc="left")
        relative_panel(ax, pairs, styles_of({mode: mode for mode in groups}), cfg.baseline)


def loss(path, cfg, groups):
    """Training loss of each mode over tokens, a mean over growing windows, and validation losses as markers."""
    styles = styles_of({mode: mode for mode in groups})
    with page(path, (6, 4.4)) as fig:
        ax = fig.subplots()
        for mode, runs in groups.items():
            x, losses = align([(run.steps["tokens"], run.steps["loss"]) for run in runs])
            at, val = align([run.validation for run in runs])
            draw_line(ax, *growing_means(x, losses), mode, styles[mode], points=(at, val.mean(0)))
        fit_axes(ax, zero=False)
        ax.set_xlim(right=1.06 * ax.get_xlim()[1])  # room for the last marker
        token_axis(ax)
        ax.set_ylabel("loss (nats per token; markers: validation)")
        ax.set_title(size_of(all_runs(groups)), loc="left")
        legend(ax)


def losses_by_mode(groups, baseline):
    """Yields for each mode: its runs, mean and standard deviation of their final losses, and the same of their losses
    minus those of the baseline's runs with their seeds. Only finished runs count."""
    pairs = pair(groups, baseline)
    for mode, runs in groups.items():
        losses = [run.final_loss for run in runs if run.finished]
        gaps = []
        for run, base in pairs.get(mode, []):
            if run.finished and base.finished:
                gaps.append(run.final_loss - base.final_loss)
        yield runs, mean_std(losses), mean_std(gaps)


def compare(path, cfg, groups):
    """Print the table of modes, and draw the relative losses."""
    rows = []
    for runs, losses, gaps in losses_by_mode(groups, cfg.baseline):
        start = runs[0].start
        late = [run.progress for run in runs if not run.finished]
        speed = np.mean([np.median(run.steps["tokens_per_s"]) for run in runs])
        row = [runs[0].mode, f"{start['parameters']:,}", plus_minus(*losses), plus_minus(*gaps, sign=True)]
        row += [f"{speed:,.0f}", f"{start['kv_bytes_per_token']:,}", str(len(runs))]
        if late:
            row[-1] = f"{len(runs) - len(late)} of {len(runs)} ({'; '.join(late)})"
        rows.append(row)
    header = ["mode", "parameters", "val loss", f"vs {cfg.baseline}", "tokens/s", "KV bytes/token", "runs"]
    print(markdown(header, rows))
    places = {f"{run.start['device']} {run.start['dtype']}" for run in all_runs(groups)}
    print(f"losses: nats per token, of finished runs, ± standard deviation; tokens/s: {', '.join(sorted(places))}")
    relative(path, cfg, groups)


# -- what is drawn of eval.py's and analyze.py's files


def short_names(modes):
    """{run: its mode, or the run's own name where several have that mode}; modes: {run: mode}."""
    every = list(modes.values())
    return {name: mode if every.count(mode) == 1 else name for name, mode in modes.items()}


def read_eval(folder):
    """The record of the last checkpoint in a run's eval.json; raises UserError if there is none."""
    path, make = Path(folder, "eval.json"), f"what `python eval.py {folder} --task=arc_easy,table5` writes"
    found = read_json(path, make, EVALUATIONS)["checkpoints"]
    if not found:
        raise UserError(f"{path} has no results; it should be {make}")
    last = max(found.values(), key=lambda checkpoint: checkpoint["step"] or 0)
    results = {}
    for task, result in sorted(last["results"].items()):  # in fp32 before any other dtype, which eval.py has on GPUs
        scores = {name: float | None for name in SCORES if name in result}
        converted = convert(result, LOSSES if task.startswith("loss") else scores, f"{path}: {task}")
        results.setdefault(task.partition(" dtype=")[0], converted)
    return last | {"results": results}


def side_by_side(n):
    """Places of n marks around 0."""
    return (np.arange(n) - (n - 1) / 2) * min(0.16, 0.7 / n)


def accuracies(ax, runs, styles, tasks, metric):
    """Accuracy of each run on each task, ± one standard error, and chance."""
    for dx, (label, results) in zip(side_by_side(len(runs)), runs.items(), strict=True):
        there = [(x, results[task]) for x, task in enumerate(tasks) if metric in results.get(task, ())]
        y = [record[metric] for _, record in there]
        error = [record[f"{metric}_stderr"] or 0 for _, record in there]
        style = styles[label] | {"linestyle": ""}
        ax.errorbar([x + dx for x, _ in there], y, error, capsize=2, label=label, **style)
        for x, record in there:
            ax.hlines(record["chance"], x - 0.42, x + 0.42, color="0.6", linestyle=(0, (3, 2)), zorder=0)
    ax.plot([], [], color="0.6", linestyle=(0, (3, 2)), label="chance")
    ax.set(xticks=range(len(tasks)), xlim=(-0.6, len(tasks) - 0.4), ylim=(0, None))
    ax.set_xticklabels(tasks, rotation=30, ha="right", rotation_mode="anchor")
    ax.set_ylabel(f"{metric} ± standard error")
    ax.grid(axis="y", color="0.9", linewidth=0.6)


def losses_by_domain(ax, runs, styles):
    """Loss of each run in each domain, and the domains' mean."""
    losses = {}
    for label, results in runs.items():
        if "loss" in results:
            losses[label] = results["loss"]["val"] | {"mean": results["loss"]["val_mean"]}
    domains = list(dict.fromkeys(name for of in losses.values() for name in of if name != "mean"))
    names = [*domains, "mean"][::-1]
    for dy, (label, of) in zip(side_by_side(len(losses)), losses.items(), strict=True):
        at = [y - dy for y, name in enumerate(names) if name in of]
        ax.plot([of[name] for name in names if name in of], at, label=label, **styles[label] | {"linestyle": ""})
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4))
    ax.set_xlabel("validation loss (nats per token)\none run each: the error is unknown")
    ax.grid(color="0.9", linewidth=0.6)


def about_evaluated(found):
    """Sizes and steps of runs, {name: record of `read_eval`}, for a title, as far as they are known."""
    about = []
    sizes = [read_run(name).start["parameters"] for name in found if Path(name, "metrics.jsonl").exists()]
    if sizes:
        about.append(f"{count_range(sizes)} parameters")
    steps = [record["step"] for record in found.values() if record["step"] is not None]  # an exported folder has none
    if steps:
        about.append(f"step {count_range(steps, '{:,}'.format)}")
    return ", ".join(about)


def evaluation(path, cfg, names):
    """Draw what eval.py found of several runs: tasks on the left, losses on the right, as far as there are any."""
    found = {name: read_eval(name) for name in names}
    labels = short_names({name: record["mode"] for name, record in found.items()})
    styles = styles_of({labels[name]: record["mode"] for name, record in found.items()})
    runs = {labels[name]: record["results"] for name, record in found.items()}
    tasks = [task for task in TASKS if any(cfg.metric in results.get(task, ()) for results in runs.values())]
    widths = []
    if tasks:
        widths.append(1.2 + 0.8 * len(tasks))
    has_loss = any("loss" in results for results in runs.values())
    if has_loss:
        widths.append(4.0)
        if len({results["loss"].get("data") for results in runs.values() if "loss" in results}) > 1:
            raise UserError("these losses are on different data; evaluate the runs on one --corpus, or draw them apart")
    if not widths:
        raise UserError(
            f"{names[0]} has no result of a whole task; make one: `python eval.py {names[0]}`, without --limit"
        )
    with page(path, (sum(widths), 4)) as fig:
        axes = list(np.atleast_1d(fig.subplots(1, len(widths), width_ratios=widths)))
        if has_loss:
            losses_by_domain(axes[-1], runs, styles)
        if tasks:
            accuracies(axes[0], runs, styles, tasks, cfg.metric)
        fig.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside upper left",
            ncols=4,
            title=about_evaluated(found),
            alignment="left",
        )


# What `analysis` draws: title, a part of analysis.json, its quantity there, and by which other one it is divided.
ANALYSIS = (
    ("entropy minus uniform attention's (nats)", "layers", "entropy_minus_uniform", None),
    ("importance of the first token", "layers", "first", None),
    ("norm of the first token's value\nrelative to other tokens", "layers", "value_norm_first", "value_norm_rest"),
    ("norm of the first token's state\nrelative to other tokens", "states", "hidden_norm_first", "hidden_norm_rest"),
    ("token similarity of the states", "states", "hidden_similarity", None),
    ("effective rank of the values", "layers", "value_rank", None),
)


def read_analysis(folder):
    """The analysis.json of a folder; raises UserError, which names the command that makes it, if there is none."""
    return read_json(Path(folder, "analysis.json"), f"what `python analyze.py {folder}` writes", ANALYSED)


def analysis_groups(names):
    """{name of the first: [what analyze.py found]}: runs that differ in their seed alone are together, others apart."""
    first_of, groups = {}, {}  # what the runs of a group have in common -> its first run
    for name in names:
        found, config = read_analysis(name), Path(name, "config.json")
        settings = read_json(config, "the config of a model") if config.exists() else {}
        trained = name  # alone, unless it is a run of train.py
        if "seed" in settings:
            trained = json.dumps({key: value for key, value in settings.items() if key not in ("seed", "out_dir")})
        first = first_of.setdefault((found["mode"], found["length"], trained), name)
        groups.setdefault(first, []).append(found)
    return groups


def analysis(path, cfg, names):
    """Draw what analyze.py found of several models, by layer. Runs that differ in their seed alone become a band."""
    groups = analysis_groups(names)
    modes = {name: runs[0]["mode"] for name, runs in groups.items()}
    labels = {}
    for name, short in short_names(modes).items():
        first = groups[name][0]
        labels[name] = f"{short} ({short_count(first['parameters'])}, length {first['length']:,})"
    styles = styles_of({labels[name]: mode for name, mode in modes.items()})
    with page(path, (12.5, 7.5)) as fig:
        for ax, (title, part, key, over) in zip(fig.subplots(2, 3).flat, ANALYSIS, strict=True):
            lines = {}
            for name, runs in groups.items():
                y = np.array([found[part][key]["mean"] for found in runs], float)
                if over:
                    y /= [found[part][over]["mean"] for found in runs]
                lines[labels[name]] = y
            layer_panel(ax, lines, styles, title, 0 if part == "states" else 1)


KINDS = {"relative": relative, "loss": loss, "compare": compare}
FROM_FILES = {"eval": evaluation, "analysis": analysis}


def main(cfg: PlotConfig):
    kind, *names = cfg.words
    path = cfg.out_file or Path(names[0]).parent / f"{kind}.png"
    if kind in FROM_FILES:
        FROM_FILES[kind](path, cfg, list(dict.fromkeys(names)))
    else:
        runs = read_runs(names)
        KINDS[kind](path, cfg, by_mode(runs, cfg.baseline))


if __name__ == "__main__":
    run_main(main, command_line(PlotConfig, __doc__))
