"""How we draw each kind of panel of the paper's figures, from what `found` (a found.Found) reads of the runs.

A panel is a figures.Panel. Titles and labels say what is really drawn: parameters, length and rate at this scale.
Read next: figures.py.
"""

import math
from types import SimpleNamespace

import numpy as np

import plot
from common.report import mean_interval
from configurator import UserError
from paper.claims import LABELS, PAPER_ENTROPY, best_pair, critical, mean_losses, semi_log
from paper.found import INITIAL, means_of
from paper.tables import regime_rows, size_and_loss
from plot import COLORS, HEADLINE, LEVEL, ZERO, count_range, legend, page, short_count, style_of, styles_of

CUT = 0.45  # nats above the lowest loss: higher ones leave a panel of losses against rates
SEED = {"marker": "o", "linestyle": "", "color": "0.65", "markersize": 4, "markeredgewidth": 0}
KEY = {"marker": "|", "color": "0.35", "markersize": 9, "markeredgewidth": 1.6}
BAND = {"color": "0.92", "linewidth": 0, "zorder": 0}
LOSS = "validation loss (nats per token)"
GAP = "validation loss minus vanilla's (nats per token)"


def real_size(jobs, found):
    """Parameters and length of what is drawn, and how the inspected model differs: all jobs are of it, or none is."""
    lengths = count_range([found.scale.lengths[job.length][0] for job in jobs], "{:,}".format)
    size = f"{count_range([found.parameters(job) for job in jobs])} parameters, length {lengths}"
    return size + found.change_in_words(jobs[0]).replace(", ", ",\n")


def heading(panel, found):
    """A panel's title and the size of its runs; [rate] becomes that of the first one."""
    if not panel.lines:
        return panel.title
    return f"{found.in_words(panel.title, panel.jobs[0])}\n{real_size(panel.jobs, found)}".strip()


def first_row(key):
    """The number of an analysis's first row: state 0 is the embedding, layers count from 1."""
    return 0 if key in ("hidden_norm", "hidden_similarity") else 1


def by_mode(jobs):
    """{mode: its Jobs}"""
    modes = {}
    for job in jobs:
        modes.setdefault(job.mode, []).append(job)
    return modes


def ticks(ax, places, labels):
    """These ticks alone on an x axis, which may be logarithmic."""
    ax.set_xticks(places, labels)
    ax.set_xticks([], minor=True)


# -- kinds of panels: functions (ax, panel, found)


def relative(ax, panel, found):
    """Training loss over tokens, minus vanilla's with the same seed. Records without training losses have no line."""
    pairs, modes = {}, {}
    for label, job in found.labels(panel.lines):
        both = []
        for seed in found.common_seeds(job, job.baseline):
            steps = [found.steps(of, seed) for of in (job, job.baseline)]
            if all(len(of["loss"]) for of in steps):
                both.append([SimpleNamespace(steps=of) for of in steps])
        if both:
            label += found.rate_in_words(job)
            pairs[label], modes[label] = both, job.mode
    if not pairs:
        raise UserError("no run of this panel has training losses; leave out --run=false to make them")
    plot.relative_panel(ax, pairs, styles_of(modes))


def layers(ax, panel, found):
    """A quantity of the analysis over layers."""
    lines, modes, level = {}, {}, None
    for label, job in found.labels(panel.lines):
        key = panel.key[label] if isinstance(panel.key, dict) else panel.key
        lines[label] = [found.by_layer(job, seed, key) for seed in found.seeds(job)]
        modes[label] = job.mode
        if key == "entropy":
            level = found.analysis(job, found.seeds(job)[0])["entropy_uniform"], "uniform causal attention"
    plot.layer_panel(ax, lines, styles_of(modes), panel.label, first_row(panel.key), level)


def public(ax, panel, found):
    """The same of models in Hugging Face layout, or of ours where there are none."""
    if not found.public:
        layers(ax, panel, found)
        return
    lines = {folder.name: [means_of(plot.read_analysis(folder), panel.key)] for folder in found.public}
    styles = styles_of({name: "vanilla" for name in lines})
    plot.layer_panel(ax, lines, styles, panel.label, first_row(panel.key))


def initial(ax, panel, found):
    """Before training: entropy on the left axis, token similarity of the hidden states on the right one."""
    numbers = plot.read_analysis(found.root / INITIAL)
    entropy = means_of(numbers, "entropy")
    similarity = means_of(numbers, "hidden_similarity")[1:]  # state 0 is the embedding
    x = 1 + np.arange(len(entropy))
    other = ax.twinx()
    ax.plot(x, entropy, "o-", color=COLORS[0], markerfacecolor="none", label="entropy (left axis)")
    other.plot(x, similarity, "s--", color="0.55", markerfacecolor="none")
    ax.plot([], [], "s--", color="0.55", markerfacecolor="none", label="token similarity (right axis)")
    least, most = PAPER_ENTROPY
    ax.axhspan(least, most, color="0.9", zorder=0, label="the paper's entropy (left axis)")
    ax.axhline(numbers["entropy_uniform"], label="uniform causal attention (left axis)", **LEVEL)
    ax.set(xlabel="layer", ylabel=panel.label, ylim=(min(*entropy, least) - 0.004, max(*entropy, most) + 0.004))
    other.set(ylabel="token similarity of the layer's output", ylim=(0, 1))
    other.spines["right"].set_visible(True)
    size = f"{short_count(numbers['parameters'])} parameters, length {numbers['length']:,}"
    ax.set_title(f"{panel.title}\n{size}", loc="left")
    legend(ax)


def spectrum(ax, panel, found):
    """Eigenvalues of layer 1's values, from the largest down."""
    lines = found.labels(panel.lines)
    styles, top = styles_of({label: job.mode for label, job in lines}), 0
    for label, job in lines:
        y = np.array([found.arrays(job, seed)["value_spectrum"][0] for seed in found.seeds(job)])  # (seeds, rank)
        plot.draw_line(ax, 1 + np.arange(y.shape[1]), np.maximum(y, 1e-12), label, styles[label])
        top = max(top, y.max())
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue", xscale="log", yscale="log", ylim=(top / 1e6, top * 2))
    legend(ax)


def scaling(ax, panel, found):
    """Validation losses at the end over parameters. The fitted lines leave the 2M out, as the claims do."""
    modes = {}
    for mode, jobs in by_mode(panel.jobs).items():
        modes[mode] = [(found.parameters(job), found.losses(job)) for job in jobs]
    scaling_panel(ax, modes, min(found.parameters(job) for job in panel.jobs if job.size != "2M"))


def paper(ax, panel, found):
    """The same from averages of the paper's Table 5."""
    scaling_panel(ax, {mode: [(n, [loss]) for n, loss in size_and_loss(mode)] for mode in ("vanilla", "resformer")})


def scaling_panel(ax, modes, least=0):
    """modes: {mode: [(parameters, [loss of each seed])]}, and lines over ln N through those from `least` on."""
    for mode, points in modes.items():
        style = style_of(mode)
        a, c = semi_log([(n, np.mean(losses)) for n, losses in points if n >= least])
        x = [n for n, _ in points]
        grid = np.geomspace(max(min(x), least), max(x), 50)
        ax.plot(grid, a + c * np.log(grid), markevery=[], label=LABELS[mode], **style)
        for n, losses in points:
            ax.plot([n] * len(losses), losses, **style | {"linestyle": ""})
    ax.set(xlabel="parameters", ylabel=LOSS, xscale="log")
    sizes = [n for n, _ in next(iter(modes.values()))]
    ticks(ax, sizes, [short_count(n) for n in sizes])
    legend(ax)


def tokens(ax, panel, found):
    """Validation losses along training."""
    lines = found.labels(panel.lines)
    styles = styles_of({label: job.mode for label, job in lines})
    for label, job in lines:
        x, y = plot.align([found.validation(job, seed) for seed in found.seeds(job)])
        plot.draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)))
    ax.set(xlabel="training tokens", ylabel=LOSS, xlim=(0, None))
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.locator_params(axis="x", nbins=5)
    legend(ax)


def rates(ax, panel, found):
    """Validation losses at the end over learning rates: a dot for each seed, a line through the means over the seeds
    that all rates of a mode have."""
    factor = found.scale.lr_factor
    for mode, jobs in by_mode(panel.jobs).items():
        style = style_of(mode)
        ax.plot([job.lr * factor for job in jobs], mean_losses(found, jobs), markevery=[], label=LABELS[mode], **style)
        for job in jobs:
            losses = found.losses(job)
            ax.plot([job.lr * factor] * len(losses), losses, **style | {"linestyle": ""})
    lowest = min(loss for job in panel.jobs for loss in found.losses(job))
    if ax.get_ylim()[1] > lowest + CUT:  # a failed run would squash all others
        ax.set_ylim(top=lowest + CUT)
    ax.set(xlabel="peak learning rate", ylabel=LOSS, xscale="log")
    every = sorted({job.lr * factor for job in panel.jobs})
    ticks(ax, every, [f"{rate:.2g}" for rate in every])
    legend(ax)


def best(ax, panel, found):
    """Losses minus vanilla's, each mode at the best of its rates: a row for each."""
    modes = {}
    for label, job in found.labels(panel.lines):
        modes.setdefault(label, []).append(job)
    heights = range(len(modes), 0, -1)
    for y, jobs in zip(heights, modes.values(), strict=True):
        draw_gaps(ax, found.gaps(*best_pair(found, jobs)), y, style_of(jobs[0].mode))
    ax.axvline(0, **ZERO)
    ax.set(xlabel=GAP, yticks=heights, yticklabels=list(modes), ylim=(0.5, len(modes) + 0.5))


def critical_points(ax, panel, found):
    """Critical points over lengths. The table beside counts the seeds that have none."""
    color = style_of(panel.jobs[0].mode)["color"]
    crossed, extrapolated = [], []  # (length, step) of each seed
    for job in panel.jobs:
        for seed in found.common_seeds(job, job.baseline):
            step, is_extrapolated = critical(found, job, seed)
            if 0 < step < math.inf:
                (extrapolated if is_extrapolated else crossed).append((found.scale.lengths[job.length][0], step))
    for points, name, face in ((crossed, "crossed", color), (extrapolated, "extrapolated from the last tenth", "none")):
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=color, markerfacecolor=face, label=name)
    lengths = [found.scale.lengths[job.length][0] for job in panel.jobs]
    ax.set(xlabel="sequence length (tokens)", ylabel="critical point (step)", xscale="log")
    ax.set(xlim=(lengths[0] / 1.4, lengths[-1] * 1.4))
    ticks(ax, lengths, [f"{n:,}" for n in lengths])
    legend(ax)


def draw_gaps(ax, gaps, y, style):
    """Gaps of seeds at height y: a grey dot for each, their mean with its 95 % interval in a style."""
    mean, interval = mean_interval(gaps)
    ax.plot(gaps, [y] * len(gaps), **SEED)
    ax.errorbar(mean, y, xerr=interval, **style | {"linestyle": ""})


def regime(ax, panel, found):
    """Losses minus vanilla's, a row for each label: each mode at its better rate. Where there are two rates, arrows
    have both modes at the lower and at the higher one."""
    groups = regime_rows(found, panel.lines)
    rows = list(dict.fromkeys(label for label, _ in groups))
    modes = list(dict.fromkeys(mode for _, mode in groups))
    for (label, mode), jobs in groups.items():
        # the modes of a row stand around its height
        y = len(rows) - rows.index(label) + ((len(modes) - 1) / 2 - modes.index(mode)) * 0.5 / len(modes)
        style = style_of(mode)
        if len(jobs) > 1:
            for arrow, job in zip("<>", jobs, strict=True):
                ax.plot(np.mean(found.gaps(job)), y, arrow, color=style["color"], alpha=0.4, markersize=5)
        draw_gaps(ax, found.gaps(*best_pair(found, jobs)), y, style)
    for mode in modes:
        ax.plot([], [], label=LABELS[mode], **style_of(mode) | {"linestyle": ""})
    if any(len(jobs) > 1 for jobs in groups.values()):
        for arrow, rate in (("<", "lower"), (">", "higher")):
            ax.plot([], [], arrow, color="0.5", alpha=0.4, markersize=5, label=f"both at the {rate} rate")
    ax.plot([], [], label="a seed", **SEED)
    ax.axvline(0, **ZERO)
    ax.set(xlabel=GAP, yticks=range(len(rows), 0, -1), yticklabels=rows)
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    legend(ax)


def dots(ax, panel, found):
    """One group of modes, the lowest loss on top. The band is a scale for single seeds."""
    gaps = {job.mode: found.gaps(job) for job in panel.jobs}
    gaps = dict(sorted(gaps.items(), key=lambda item: -np.mean(item[1])))
    for y, (mode, seeds) in enumerate(gaps.items()):
        color = style_of(mode)["color"] if mode in HEADLINE else KEY["color"]
        draw_gaps(ax, seeds, y, KEY | {"color": color})
    vanilla = found.losses(panel.jobs[0].baseline)
    spread = max(vanilla) - min(vanilla)
    ax.axvspan(-spread, spread, label="as far as two of vanilla's seeds differ", **BAND)
    ax.axvline(0, label="vanilla", **ZERO)
    ax.plot([], [], label="a seed", **SEED)
    ax.errorbar([], [], xerr=[], label="mean, 95 % interval", linestyle="", **KEY)
    ax.set(yticks=range(len(gaps)), yticklabels=list(gaps), ylim=(-0.6, len(gaps) - 0.4))
    ax.set_title(panel.title, loc="left", fontsize=9)
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)


def heat(axes, panel, found):
    """One quantity over tokens and layers, one model on each of `axes`, all on one logarithmic colour scale."""
    from matplotlib.colors import LogNorm

    maps = []  # (layers, positions) of each model, mean over its seeds
    for job in panel.jobs:
        maps.append(np.mean([found.arrays(job, seed)[panel.key][:, :100] for seed in found.seeds(job)], 0))
    every = np.stack(maps)
    norm = LogNorm(max(every[every > 0].min(), every.max() / 1e4), every.max())
    first = first_row(panel.key) - 0.5
    for ax, values, (label, _) in zip(axes, maps, panel.lines, strict=True):
        rows, columns = values.shape
        extent = (0.5, columns + 0.5, first, first + rows)
        image = ax.imshow(values, norm=norm, extent=extent, aspect="auto", interpolation="nearest", origin="lower")
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_title(f"{label}: {panel.label}", fontsize=8, loc="left")
    places = np.geomspace(norm.vmin, norm.vmax, 4)
    bar = ax.figure.colorbar(image, ax=list(axes), location="bottom", aspect=40, ticks=places, format="{x:.3g}")
    bar.ax.minorticks_off()
    bar.set_label(f"{panel.label} (one scale)")
    ax.set_xlabel("token position")


MINUS_VANILLA = (relative, critical_points, dots, best, regime)  # these need vanilla's runs, too
# what a panel needs of a run besides its last validation loss; "arrays" are those of analysis.npz
NEEDS = {
    **dict.fromkeys((relative, critical_points, tokens), {"losses"}),
    **dict.fromkeys((layers, public), {"analysis"}),
    **dict.fromkeys((spectrum, heat), {"analysis", "arrays"}),
}


# -- whole pages


def page_of_panels(path, figure, found):
    """Up to three panels in a row, more in two columns."""
    # a panel of public models is left out where it would be empty
    panels = [panel for panel in figure.panels if panel.draw is not public or panel.jobs or found.public]
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    size = (4.5 * columns, 4 * rows) if len(panels) > 1 else (6, 4.4)
    with page(path, size) as fig:
        axes = fig.subplots(rows, columns, squeeze=False, sharey=figure.same_y)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.flat, panels, strict=False):
            ax.set_title(heading(panel, found), loc="left", fontsize=9)
            panel.draw(ax, panel, found)


def page_of_maps(path, figure, found):
    """A row for each model, a column for each quantity."""
    jobs = figure.panels[0].jobs
    with page(path, (3.6 * len(figure.panels), 2.1 * len(jobs) + 0.4)) as fig:
        fig.suptitle(real_size(jobs, found), x=0.01, ha="left", fontsize=9)
        axes = fig.subplots(len(jobs), len(figure.panels), squeeze=False)
        for column, panel in zip(axes.T, figure.panels, strict=True):
            panel.draw(column, panel, found)
        for ax in axes[:, 0]:
            ax.set_ylabel("layer")


def page_of_dots(path, figure, found):
    """Two columns of panels, all on one scale of losses."""
    panels = figure.panels
    sizes = [len(panel.lines) + 1 for panel in panels]
    heights = [max(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    title = f"{real_size(figure.jobs, found)}, {found.scale.steps:,} steps"
    with page(path, (9.5, 0.19 * sum(heights) + 0.9)) as fig:
        axes = fig.subplots(len(heights), 2, height_ratios=heights, sharex=True, squeeze=False).flat
        for ax, panel in zip(axes, panels, strict=False):
            panel.draw(ax, panel, found)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        for ax in axes[len(panels) - 2 : len(panels)]:
            ax.tick_params(labelbottom=True)
            ax.set_xlabel(GAP)
        key = axes[0].get_legend_handles_labels()
        fig.legend(*key, loc="outside upper left", ncols=4, title=title, alignment="left")
