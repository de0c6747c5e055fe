"""Pictures of attention concentration, and of what a mode is.

    python plot.py out/demo/vanilla-320-0.002-42 out/demo/svformer-320-0.002-42     by layer, from analyze.py's numbers
    python plot.py relative out/vanilla out/resformer          training loss minus vanilla's: the paper's relative loss
    python plot.py copying out/vanilla out/resformer           what is gained by copying, from eval.py's numbers
    python plot.py plan vanilla resformer svformer mine.py     which layer reads what, and what the cache stores

compare.py and paper/ draw with the functions below.
"""

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import picture
from common.files import write_atomic
from common.runs import read_analysis, read_results, read_run
from common.statistics import t_95
from configurator import UserError, check_fields, need, run, setting
from value_modes import ModelConfig, read_mode

GROWTH = 1.15  # a point averages the losses over the last 1 - 1/1.15 = 13 % of the tokens so far
SHOWN, EARLY = 1 / 40, 1 / 10  # the x axis begins at 1/40 of training; losses before 1/10 may leave the y axis


@dataclass(frozen=True)
class PlotConfig:
    """Every setting of plot.py."""

    words: tuple[str, ...] = setting(
        (),
        "runs' folders, alone or after relative or copying; or plan and modes",
        positional=True,
        files_with="value_mode",
    )
    out_file: str = setting("", "PNG to write; empty = plan.png here; other pictures go beside the first run")
    n_layer: int = setting(4, "layers", least=1, most=48, group="With `plan`")
    n_head: int = setting(8, "query heads", least=1, most=2**16)
    n_kv_head: int = setting(0, "key and value heads; 0 = what the mode says, or n_head", least=0)
    n_embd: int = setting(512, "width of the residual stream", least=1, most=2**16)

    def __post_init__(self):
        check_fields(self)
        # what compare.py and we write lies beside the runs, so out/* names it too
        beside = (".png", "report.md", "runs.jsonl", "answers.json")
        object.__setattr__(self, "words", tuple(name for name in self.words if not name.endswith(beside)))
        if not self.words:
            raise UserError("name runs that analyze.py has analysed: `python plot.py out/a out/b`")
        if self.words[0] in ("relative", "copying") and len(self.words) < 3:
            raise UserError(f"name two runs or more: `python plot.py {self.words[0]} out/vanilla out/resformer`")
        if self.words == ("plan",):
            raise UserError("name modes: `python plot.py plan vanilla resformer`; for a run in plan/, write ./plan")
        if self.words[0] == "plan" and len(self.words) * self.n_layer > 700:
            n_modes = len(self.words) - 1
            raise UserError(f"{n_modes} modes of {self.n_layer} layers do not fit into one picture: draw fewer")
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

    The same drawing gives the same bytes, because neither a date nor the user's matplotlibrc gets into them.
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
    """A number of parameters or tokens to three digits: 738k, 2.95M, 468M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= 0.9995 * unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:,.0f}"


def count_range(numbers, text=short_count):
    """The numbers' common value, or their range: 738k, 706k–738k."""
    low, high = text(min(numbers)), text(max(numbers))
    return low if low == high else f"{low}–{high}"


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


def draw_line(ax, x, y, label, style, points=None, is_run=True):
    """The mean of y (seeds, n) over x (n,), a band of its 95 % interval, and `points` (x, y) as markers. is_run: the
    legend says how many seeds it has."""
    # matplotlib would hide a name that begins with _, and take what is between two $ for a formula
    label = (" " if label.startswith("_") else "") + label.replace("$", r"\$")
    mean, seeds = y.mean(0), "1 seed"
    if len(y) > 1:
        half, seeds = t_95(len(y) - 1) * y.std(0, ddof=1) / len(y) ** 0.5, f"{len(y)} seeds, 95%"
        ax.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.14, linewidth=0)
    if points is not None:
        ax.plot(*points, **style | {"linestyle": ""})
    # a marker of the line itself is only in the legend
    marker = "" if points is None else style["marker"]
    ax.plot(x, mean, markevery=[], label=f"{label}, {seeds}" if is_run else label, **style | {"marker": marker})


def tokens_on(ax, end, since=SHOWN):
    """An x axis of training tokens that begins at a share of them, linear if that is half or more."""
    if since < 0.5:
        ax.set_xscale("log", subs=())
        ax.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    ax.set_xlim(since * end, end)
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))


def token_axis(ax, since=SHOWN):
    """The axis of `tokens_on`, and a y axis that fits what is drawn there, and 0."""
    lines = [line.get_xydata() for line in ax.lines]
    bands = [path.vertices for collection in ax.collections for path in collection.get_paths()]
    x, y = np.concatenate(lines + bands).T
    end = x.max()
    shown, late = (np.append(y[x >= share * end], 0) for share in (since, max(since, EARLY)))
    # the first losses would squash all others
    if np.ptp(shown) > 4 * np.ptp(late):
        shown = late
    pad = 0.05 * np.ptp(shown) or 1
    ax.set_ylim(shown.min() - pad, shown.max() + pad)
    tokens_on(ax, end, since)
    ax.set_xlabel(f"training tokens (a point averages the {1 - 1 / GROWTH:.0%} before it)")


def relative_panel(ax, pairs, styles, base="vanilla", since=SHOWN):
    """pairs: {label: [(run, base's run of its seed)]} -> training loss minus base's, over tokens."""
    for label, both in pairs.items():
        runs = [run for run, _ in both] + [run for _, run in both]
        x, losses = align([(run.steps["tokens"], run.steps["loss"]) for run in runs])
        gaps = losses[: len(both)] - losses[len(both) :]  # (seeds, steps)
        draw_line(ax, *growing_means(x, gaps), label, styles[label])
    token_axis(ax, since)
    ax.axhline(0, **ZERO)
    ax.set_ylabel(f"training loss minus {base}'s\n(nats per token)")
    legend(ax)


def layer_panel(ax, lines, styles, ylabel, first=1, level=None):
    """lines: {label: (seeds, n), or (n,) of a model that is not a seeded run} of a quantity over layers, counted from
    `first`; level: (height, name) to mark."""
    for label, values in lines.items():
        y = np.atleast_2d(np.array(values, float))  # a layer without the quantity has None, which becomes NaN
        there = np.isfinite(y).all(0)
        x, y = (first + np.arange(y.shape[1]))[there], y[:, there]
        draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)), is_run=np.ndim(values) > 1)
    if level:
        ax.axhline(level[0], label=level[1], **LEVEL)
    ax.set(xlabel="layer" if first else "state (0 = embedding)", ylabel=ylabel)
    if all(np.nanmin(np.array(values, float)) >= 0 for values in lines.values()):  # then a band ends at 0, too
        ax.set_ylim(bottom=max(0, ax.get_ylim()[0]))
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend(ax)


def short_names(folders):
    """{folder: what a figure calls it}: its own name, unless two have the same."""
    is_short = len({Path(name).name for name in folders}) == len(folders)
    return {name: Path(name).name if is_short else name for name in folders}


def relative(path, names):
    """Draw training losses of runs minus those of a base, over tokens: the paper's relative loss (4.1.2). The base is
    vanilla's run, or the first named if vanilla has none or several."""
    if len({Path(name).resolve() for name in names}) < len(names):
        raise UserError("name each run once: a run minus itself is 0")
    curves = {name: read_run(name) for name in names}
    for name, curve in curves.items():
        if not len(curve.steps["loss"]):
            why = "diverged at once; leave it out" if curve.final_loss else "has no training losses yet; train it first"
            raise UserError(f"{name} {why}")
    modes = {name: curve.start["value_mode"] for name, curve in curves.items()}
    vanillas = [name for name in names if modes[name] == "vanilla"]
    base = vanillas[0] if len(vanillas) == 1 else names[0]
    # what they trained on has to be the same, token for token
    for name, curve in curves.items():
        for what in ("data", "seed", "batch_tokens", "block_size", "bos", "max_steps"):
            own, bases = curve.start[what], curves[base].start[what]
            if own != bases:
                raise UserError(f"{name} has {what}={own} and {base} has {bases}, so their losses can't be subtracted")
        if not np.intersect1d(curve.steps["step"], curves[base].steps["step"]).size:
            raise UserError(f"{name} and {base} have no step in common")
    labels = short_names(names)
    pairs = {labels[name]: [(curve, curves[base])] for name, curve in curves.items() if name != base}
    styles = styles_of({labels[name]: modes[name] for name in names if name != base})
    with page(path, (6.5, 4)) as fig:
        relative_panel(fig.subplots(), pairs, styles, labels[base])


# -- copying


def results_of(name, task):
    """[(training tokens, mode, record of a task)] of the checkpoints of a run that eval.py has evaluated."""
    batch_tokens = read_run(name).start["batch_tokens"]
    found = [(of["step"] * batch_tokens, of["mode"], of["results"].get(task)) for of in read_results(name).values()]
    found = sorted((point for point in found if point[2]), key=lambda point: point[0])
    if not found:
        raise UserError(f"{name} has no results of {task}; make them: `python eval.py {name} --task=copying,repeat`")
    return found


def copying(path, names):
    """Draw what eval.py found about copying. Left: which tokens make a run's loss differ from the first one's. Right:
    the loss on random text that repeats itself, of all checkpoints."""
    labels = short_names(names)
    last = {labels[name]: results_of(name, "copying")[-1] for name in names}
    texts = {(tokens, record["data"], record["n"], record["length"]) for tokens, _, record in last.values()}
    if len(texts) > 1:
        how = "evaluate checkpoints of one length of training together, with one --corpus"
        raise UserError(f"these losses are of different texts, windows or lengths of training; {how}")
    kinds = {label: record["token"] for label, (*_, record) in last.items()}
    repeat = {labels[name]: results_of(name, "repeat") for name in names}
    styles = styles_of({label: points[-1][1] for label, points in repeat.items()})
    base, *others = kinds
    with page(path, (9.6, 3.6)) as fig:
        left, right = fig.subplots(1, 2)
        # a kind's part: its share of the tokens times how much lower their loss is
        rows = [kind for kind in kinds[base] if kind != "all"]
        for i, label in enumerate(others):
            parts = [kinds[label][k]["share"] * (kinds[label][k]["loss"] - kinds[base][k]["loss"]) for k in rows]
            y = np.arange(len(rows)) + 0.8 * (i + 0.5) / len(others) - 0.4
            left.barh(y, parts, 0.8 / len(others), label=label, color=styles[label]["color"])
        left.axvline(0, **ZERO)
        left.set(yticks=range(len(rows)), yticklabels=rows, xlabel=f"part of the loss minus {base}'s (nats per token)")
        left.invert_yaxis()
        for label, points in repeat.items():
            losses = [record["half"]["second half"]["loss"] for *_, record in points]
            right.plot([tokens for tokens, *_ in points], losses, label=label, clip_on=False, **styles[label])
        right.axhline(repeat[base][-1][2]["ln_v"], label="a model that knows nothing", **LEVEL)
        right.set(xlabel="training tokens", ylabel="loss on repeated random text\n(nats per token)")
        right.set_ylim(0, 1.05 * right.get_ylim()[1])
        lengths = [tokens for points in repeat.values() for tokens, *_ in points]
        tokens_on(right, max(lengths), min(0.5, min(lengths) / max(lengths)))
        for ax in (left, right):
            legend(ax)


# -- a comparison


@dataclass(frozen=True)
class Effect:
    """What a mode changes: its validation loss minus the base's, in nats per token."""

    mode: str
    gap: float
    interval: float | None  # half of its 95 % interval; None where nothing tells the noise
    seeds: list  # the gap of each seed
    differs: bool  # whether it differs from the base


def comparison(path, effects, curves, title, base):
    """The picture of a comparison. Left: Effects, the best on top; grey where nothing differs, hollow without interval.
    Right: losses over tokens. curves: {mode: (tokens, losses)}."""
    with page(path, (9.6, max(3.2, 1.3 + 0.3 * len(effects)))) as fig:
        left, right = fig.subplots(1, 2, width_ratios=(1.15, 1))
        effects = sorted(effects, key=lambda effect: -effect.gap)
        styles = styles_of({mode: mode for mode in (*curves, *(e.mode for e in effects))})
        for y, e in enumerate(effects):
            color = styles[e.mode]["color"] if e.differs else "0.5"
            look = {"color": color, "marker": "o", "markerfacecolor": color if e.interval else "white"}
            left.errorbar(e.gap, y, xerr=e.interval, linewidth=2, **look)
            if len(e.seeds) > 1:
                left.plot(e.seeds, [y - 0.25] * len(e.seeds), "|", color="0.5", markersize=4)
            left.text(1.02, y, f"{e.gap:+.3f}", transform=left.get_yaxis_transform(), va="center", color=color)
        left.axvline(0, **ZERO)
        left.set(yticks=range(len(effects)), yticklabels=[e.mode for e in effects], ylim=(-0.6, len(effects) - 0.4))
        left.set(xlabel=f"validation loss minus {base}'s (nats per token)")
        left.locator_params(axis="x", nbins=6)
        left.set_title(title, loc="left", fontsize=9)
        for mode, (x, y) in curves.items():
            right.plot(x, y, label=mode, **styles[mode] | {"marker": ""})
        late = np.concatenate([y[x >= SHOWN * x[-1]] for x, y in curves.values()])
        pad = 0.05 * np.ptp(late) or 0.05  # a very short run may show a single point
        right.set(ylim=(late.min() - pad, late.max() + pad), xlabel="training tokens", ylabel="loss (nats per token)")
        tokens_on(right, max(x[-1] for x, _ in curves.values()))
        right.legend(**LEGEND)


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


def analysis(path, names):
    """Draw what analyze.py found about several models, by layer."""
    every = {name: read_analysis(name) for name in names}
    lengths = {found["length"] for found in every.values()}
    if len(lengths) > 1:
        those = " and ".join(map(str, sorted(lengths)))
        raise UserError(f"these analyses are of chunks of {those} tokens; run analyze.py on all with the same --length")
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


# -- what a mode is


def plans(path, configs):
    """Draw the plans of ModelConfigs of one depth, four in a row."""
    with page(path, picture.size_of(configs)) as fig:
        picture.draw(fig, configs)


def main(cfg: PlotConfig):
    if cfg.words[0] in ("relative", "copying"):
        draw, name = {"relative": relative, "copying": copying}[cfg.words[0]], f"{cfg.words[0]}.png"
        return draw(cfg.out_file or Path(cfg.words[1]).parent / name, cfg.words[1:])
    if cfg.words[0] != "plan":
        return analysis(cfg.out_file or Path(cfg.words[0]).parent / "analysis.png", cfg.words)
    configs, shape = [], {name: getattr(cfg, name) for name in ("n_layer", "n_head", "n_kv_head", "n_embd")}
    for mode in map(read_mode, cfg.words[1:]):
        try:
            configs.append(ModelConfig(value_mode=mode, **shape))
        except UserError as e:
            raise UserError(f"{mode.name}: {e}") from None
    plans(cfg.out_file or "plan.png", configs)


if __name__ == "__main__":
    run(main, __doc__, skip_unknown=True)
