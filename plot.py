"""Pictures and tables of runs, from their metrics.jsonl and from what analyze.py writes beside it.

    python plot.py compare out/demo/vanilla out/demo/svformer     a table, and training loss minus vanilla's
    python plot.py analysis out/demo/vanilla out/demo/svformer    attention concentration by layer

`compare` draws runs that differ only in their seed as one line, their mean, with a band of one standard deviation
(n - 1) on each side. A mode's runs with other settings are lines of their own. Without vanilla we subtract the first
line named. paper/ draws its figures with the functions below.
"""

import contextlib
import functools
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.files import read_record, read_record_lines, reading, write_atomic
from common.report import METRICS, markdown, mean_std, plus_minus
from configurator import UserError, check_fields, need, run, setting

GROWTH = 1.15  # a point averages the losses over the last 1 - 1/1.15 = 13 % of the tokens so far
# Where records of starts may differ without a word: a run's own, what is compared, and what changes only rounding.
OWN = {"event", "step", "ranks", "device", "wandb", "code", "seed", "value_mode", "definition", "parameters",
       "kv_bytes_per_token"}  # fmt: skip
SHOWN, EARLY = 1 / 40, 1 / 10  # the x axis begins at 1/40 of training; losses before 1/10 may leave the y axis


@dataclass(frozen=True)
class PlotConfig:
    """Every setting of plot.py."""

    words: tuple[str, ...] = setting((), "what to draw, see above, then the runs", positional=True)
    out_file: str = setting("", "PNG to write; empty = <what is drawn>.png in the folder that holds the first run")

    def __post_init__(self):
        check_fields(self)
        # our own pictures lie beside the runs, so out/* names them too
        object.__setattr__(self, "words", tuple(word for word in self.words if not word.endswith(".png")))
        if len(self.words) < 2 or self.words[0] not in ("compare", "analysis"):
            raise UserError("say compare or analysis, then name runs: `python plot.py compare out/a out/b`")
        if self.out_file and not self.out_file.endswith(".png"):
            raise UserError(f"out_file={self.out_file} must end in .png")


# -- looks and the page

# The colours of Okabe and Ito, which colour-blind readers tell apart, without yellow, which is lost on white.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
HEADLINE = ("vanilla", "resformer", "svformer", "neutreno", "denseformer", "resformer_lambda", "resformer_plus")
DASHES = ("-", (0, (6, 3)), (0, (8, 2.5, 1.5, 2.5)), (0, (1.5, 1.5)), (0, (14, 3)), (0, (8, 2, 1.5, 2, 1.5, 2)))
MARKERS = "os^DvPX"
LEVEL = {"color": "0.5", "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 0}  # a height to compare with
ZERO = {"color": "0.5", "linewidth": 0.8, "zorder": 0}  # where a difference is 0
LOOK = {"font.size": 9, "lines.linewidth": 1.2, "lines.markersize": 5, "lines.markeredgewidth": 0.9}
LOOK |= {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}
LEGEND = {"handlelength": 3.2, "fontsize": 7, "title_fontsize": 9, "alignment": "left", "labelspacing": 0.3}


def styles_of(modes):
    """{label: mode} -> {label: look of its line, as keywords of matplotlib's `plot`}.

    A headline mode has a colour of its own, and vanilla's is black. Any other mode gets the colour that this figure
    has used least so far. Lines of one colour differ in dash and marker.
    """
    colors = {mode: COLORS[HEADLINE.index(mode)] for mode in modes.values() if mode in HEADLINE}
    for mode in modes.values():
        if mode not in colors:
            colors[mode] = min(COLORS[1:], key=list(colors.values()).count)
    # the n-th line of a colour has another dash and marker than the first one
    styles, drawn = {}, []
    for label, mode in modes.items():
        look = COLORS.index(colors[mode]) + drawn.count(colors[mode])
        drawn.append(colors[mode])
        dash, marker = DASHES[look % len(DASHES)], MARKERS[look % len(MARKERS)]
        styles[label] = {"color": colors[mode], "linestyle": dash, "marker": marker, "markerfacecolor": "none"}
    return styles


def style_of(mode):
    """The look of a mode's line where it is alone, which a headline mode has in every figure."""
    return styles_of({mode: mode})[mode]


@contextlib.contextmanager
def page(path, size):
    """An empty matplotlib figure of `size` inches, which we write as a PNG at the end.

    The same lines give the same bytes, because neither a date nor the user's matplotlibrc gets into them.
    """
    os.environ.pop("MPLBACKEND", None)  # a notebook's backend may not be installed here, and we need none
    with need("matplotlib.style").context(["default", LOOK]):
        fig = need("matplotlib.figure").Figure(figsize=size, dpi=150, layout="constrained")
        yield fig
        how = {"format": "png", "metadata": {"Software": None}, "bbox_inches": "tight"}  # tight cuts no legend off
        write_atomic(path, lambda temporary: fig.savefig(temporary, **how))
    print(f"wrote {path}")


def legend(ax):
    """The legend of `ax`, above it, where it hides nothing. The title at the left becomes the legend's."""
    _, labels = ax.get_legend_handles_labels()
    columns = 2 if len(labels) > 2 and max(map(len, labels)) <= 26 else 1
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "columnspacing": 1.2}
    ax.legend(title=ax.get_title(loc="left"), ncols=columns, **place, **LEGEND)
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
    """What the metrics.jsonl of a run says. Losses are in nats per token."""

    name: str  # the run's folder, as the user wrote it
    starts: list  # what train.py knew at each start
    start: dict  # the last of them
    steps: dict  # arrays over training: step, loss, lr, tokens (so far), tokens_per_s
    val: dict  # {step: validation loss, mean over the domains}
    domains: dict  # {domain: its last validation loss}
    step_tokens: float  # tokens of one optimizer step
    final_loss: float | None  # the validation loss at the end; None if the run has not come that far


def read_run(folder):
    """The Curves of a run's folder."""
    path = Path(folder, "metrics.jsonl")
    with reading(path, METRICS):
        events = {"start": [], "eval": [], "step": [], "diverged": []}
        for record in read_record_lines(path, METRICS):
            events[record.get("event", "step")].append(record)
        if not events["step"]:
            raise UserError(f"{path} has no steps yet; wait until the run has made some")
        names = ("step", "loss", "lr", "tokens", "tokens_per_s")
        steps = {name: np.array([record[name] for record in events["step"]], float) for name in names}
        # a resumed run has several starts, and the last one's max_steps counts
        start, val = events["start"][-1], {record["step"]: record["val_mean"] for record in events["eval"]}
        return Curves(
            name=str(folder),
            starts=events["start"],
            start=start,
            steps=steps,
            val=val,
            domains=events["eval"][-1]["val"] if val else {},
            step_tokens=float(steps["tokens"][-1] / steps["step"][-1]),
            final_loss=val.get(start["max_steps"]),
        )


def differing(*starts):
    """The settings in which records of starts differ, of those that all of them have: older ones have few."""
    names = [name for name in starts[0] if name not in OWN and all(name in start for start in starts)]
    return [name for name in names if any(start[name] != starts[0][name] for start in starts)]


def plan_of(run):
    """How a run was trained, in words. Runs can be compared if these are equal, and their data."""
    bos = ", end-of-text first" if run.start["bos"] else ""
    return f"length {run.start['block_size']}{bos}, {run.start['max_steps']:,} steps of {run.step_tokens:,.0f} tokens"


def by_mode(runs):
    """{value_mode, and settings in which its runs differ: runs that differ only in their seed}, vanilla first."""
    groups, first = {}, runs[0]
    for one in sorted(runs, key=lambda run: run.start["value_mode"] != "vanilla"):
        its, wanted = (f"{plan_of(run)} of data {run.start['data']}" for run in (one, first))
        if its != wanted:
            raise UserError(f"{one.name} had {its}, {first.name} had {wanted}: not comparable")
        if {"val_hash", "eval_tokens"}.intersection(differing(one.start, first.start)):
            remedy = "compare them by `python eval.py --task=loss`"
            raise UserError(f"{one.name} and {first.name} were validated on different tokens; {remedy}")
        mode = one.start["value_mode"]
        own = differing(*(run.start for run in runs if run.start["value_mode"] == mode))
        mode = " ".join([mode, *(f"{name}={one.start[name]}" for name in own)])
        for other in groups.setdefault(mode, []):
            # an unfinished run has fewer steps, so we compare the learning rates of those that both have
            same_rates = all(a == b for a, b in zip(one.steps["lr"], other.steps["lr"], strict=False))
            same_model = all(one.start.get(name) == other.start.get(name) for name in ("parameters", "definition"))
            if one.start["seed"] == other.start["seed"] or not (same_rates and same_model):
                raise UserError(f"{other.name} and {one.name} are both {mode}, but do not differ in the seed alone")
        groups[mode].append(one)
    return groups


def pair(groups):
    """{value_mode: [(run, the first mode's run of its seed)]}. Both saw the same batches, so their noise cancels."""
    first, *others = groups
    base = {one.start["seed"]: one for one in groups[first]}
    if not others or not {one.start["seed"] for mode in others for one in groups[mode]} <= base.keys():
        raise UserError(f"name runs of {first} and of other modes, and for each of them {first}'s with its seed")
    return {mode: [(one, base[one.start["seed"]]) for one in groups[mode]] for mode in others}


# -- curves


def align(curves):
    """[(x, y) of each curve] -> the x that all have, (n,), and their y there, (curves, n)."""
    curves = [(np.asarray(x, float), np.asarray(y, float)) for x, y in curves]
    common = functools.reduce(np.intersect1d, [x for x, _ in curves])
    return common, np.stack([y[np.isin(x, common)] for x, y in curves])


def growing_means(x, y):
    """Means of x (n,) and y (curves, n) over windows (end / GROWTH, end], the last of which ends with x."""
    # losses fall ever more slowly, so windows that grow with the step lose nothing and smooth the most
    means_x, means_y, end = [], [], x[-1]
    while end >= x[0]:
        inside = (x > end / GROWTH) & (x <= end)
        if inside.any():
            means_x.append(x[inside].mean())
            means_y.append(y[:, inside].mean(axis=1))
        end /= GROWTH
    return np.array(means_x[::-1]), np.stack(means_y[::-1], axis=1)


def draw_line(ax, x, y, label, style, points=None):
    """The mean of y (seeds, n) over x (n,), a band of one standard deviation, and `points` (x, y) as markers."""
    # matplotlib would hide a name that begins with _, and take what is between two $ for a formula
    label = (" " if label.startswith("_") else "") + label.replace("$", r"\$")
    mean, seeds = y.mean(0), "1 seed"
    if len(y) > 1:
        std, seeds = y.std(0, ddof=1), f"{len(y)} seeds ± std"
        ax.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.14, linewidth=0)
    if points is not None:
        ax.plot(*points, **style | {"linestyle": ""})
    # a marker of the line itself is only in the legend
    marker = "" if points is None else style["marker"]
    ax.plot(x, mean, markevery=[], label=f"{label}, {seeds}", **style | {"marker": marker})


def token_axis(ax):
    """A logarithmic axis of training tokens, and a y axis that fits what is drawn, and 0."""
    lines = [line.get_xydata() for line in ax.lines]
    bands = [path.vertices for collection in ax.collections for path in collection.get_paths()]
    x, y = np.concatenate(lines + bands).T
    end = x.max()
    shown, late = (np.append(y[x >= share * end], 0) for share in (SHOWN, EARLY))
    # the first losses would squash all others
    if np.ptp(shown) > 4 * np.ptp(late):
        shown = late
    pad = 0.05 * np.ptp(shown) or 1
    ax.set(xlim=(SHOWN * end, end), ylim=(shown.min() - pad, shown.max() + pad))
    ax.set_xscale("log", subs=())
    ax.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.set_xlabel(f"training tokens (a point averages the {1 - 1 / GROWTH:.0%} before it)")


def relative_panel(ax, pairs, styles, base="vanilla"):
    """pairs: {label: [(run, base's run of its seed)]} -> training loss minus base's, over tokens."""
    for label, both in pairs.items():
        runs = [run for run, _ in both] + [run for _, run in both]
        x, losses = align([(run.steps["tokens"], run.steps["loss"]) for run in runs])
        gaps = losses[: len(both)] - losses[len(both) :]  # (seeds, steps)
        draw_line(ax, *growing_means(x, gaps), label, styles[label])
    token_axis(ax)
    ax.axhline(0, **ZERO)
    ax.set_ylabel(f"training loss minus {base}'s\n(nats per token)")
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


# -- what we draw of runs


def compare(path, groups):
    """Print the table of modes, and draw the training loss of each minus that of the first with the same seeds."""
    pairs, rows, base = pair(groups), [], next(iter(groups))
    for mode, runs in groups.items():
        # only finished runs have a loss in the table
        losses = [run.final_loss for run in runs if run.final_loss is not None]
        ended = [(run.final_loss, base.final_loss) for run, base in pairs.get(mode, [])]
        gaps = [loss - base for loss, base in ended if None not in (loss, base)]
        # a median, because the first steps of a run are slow
        speed = np.mean([np.median(run.steps["tokens_per_s"]) for run in runs])
        cells = [mode, f"{runs[0].start['parameters']:,}"]
        cells += [plus_minus(*mean_std(losses)), plus_minus(*mean_std(gaps), sign=True), f"{speed:,.0f}"]
        rows.append([*cells, f"{runs[0].start['kv_bytes_per_token']:,}", f"{len(losses)}"])
    print(markdown(["mode", "parameters", "val loss", f"vs {base}", "tokens/s", "KV bytes/token", "runs"], rows))
    print("losses: nats per token ± standard deviation over seeds, of the runs that have finished")
    drawn = [one for runs in groups.values() for one in runs]
    if names := differing(*(one.start for one in drawn)):
        print(f"note: the runs differ in {', '.join(names)}")
    for one in drawn:
        if one.starts[0]["step"]:
            print(f"note: {one.name} goes on from step {one.starts[0]['step']} of another run")
        for before, after in itertools.pairwise(one.starts):
            for name in differing(before, after):
                print(f"note: {one.name} had {name}={before[name]} until step {after['step']}")
    with page(path, (6, 4.4)) as fig:
        ax = fig.subplots()
        sizes = count_range([one.start["parameters"] for one in drawn])
        ax.set_title(f"{sizes} parameters, {plan_of(drawn[0])}", loc="left")
        relative_panel(ax, pairs, styles_of({mode: of[0].start["value_mode"] for mode, of in groups.items()}), base)


# -- what we draw of analyze.py's results

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
    """What analyze.py found, from the analysis.json of a folder."""
    return read_record(Path(folder, "analysis.json"), "analyze.py's numbers")


def analysis(path, names):
    """Draw what analyze.py found of several models, by layer."""
    every = {name: read_analysis(name) for name in names}
    styles = styles_of({name: found["mode"] for name, found in every.items()})
    with page(path, (12.5, 7.5)) as fig:
        for ax, (title, part, key, over) in zip(fig.subplots(2, 3).flat, ANALYSIS, strict=True):
            lines = {}
            for name, found in every.items():
                y = np.array([found[part][key]["mean"]], float)  # (1, layers): a single seed
                lines[name] = y / np.array(found[part][over]["mean"]) if over else y
            layer_panel(ax, lines, styles, title, 0 if part == "states" else 1)
            ax.get_legend().remove()
        # all panels have the same lines, so one legend serves them
        fig.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=4, **LEGEND)


def main(cfg: PlotConfig):
    kind, *names = cfg.words
    path = cfg.out_file or Path(names[0]).parent / f"{kind}.png"
    if kind == "analysis":
        analysis(path, names)
    else:
        compare(path, by_mode([read_run(name) for name in names]))


if __name__ == "__main__":
    run(main, __doc__)
