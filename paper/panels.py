"""How each kind of panel of the paper's figures is drawn, from what `found` (a found.Found) reads of the runs.

Titles and labels say what is really drawn: parameters, length and rate at this scale.
Read next: results.py.
"""

import math

import numpy as np

import plot
from oldconfig import UserError
from paper.claims import LABELS, PAPER_ENTROPY, critical, gaps_at_best, gaps_to_vanilla, mean_losses, semi_log
from paper.found import INITIAL, means_of
from paper.tables import regime_rows, size_and_loss
from plot import COLORS, HEADLINE, LEVEL, ZERO, count_range, legend, page, short_count, style_of, styles_of
from report import mean_interval

HEAT = {"importance": "importance", "value_norm": "norm of the value", "hidden_norm": "norm of the hidden state"}
CUT = 0.45  # nats above the lowest loss: higher ones leave a panel of losses against rates
SEED = {"marker": "o", "linestyle": "", "color": "0.65", "markersize": 4, "markeredgewidth": 0}
KEY = {"marker": "|", "color": "0.35", "markersize": 9, "markeredgewidth": 1.6}
BAND = {"color": "0.92", "linewidth": 0, "zorder": 0}


# -- what is drawn, in words


def real_size(jobs, found):
    """Parameters and length of what is drawn, and how the inspected model differs; all jobs are of it, or none is."""
    lengths = count_range([found.scale.lengths[job.length][0] for job in jobs], "{:,}".format)
    parameters = count_range([found.parameters(job) for job in jobs])
    size, change = f"{parameters} parameters, length {lengths}", found.scale.change_in_words(jobs[0])
    return f"{size},\n{change}" if change else size


# -- kinds of panels


def by_label(panel, found, get):
    """({label: [get(job, seed) of each seed]}, {label: style}) of a panel's lines."""
    lines, modes = {}, {}
    for label, job in found.labels(panel.lines):
        lines[label] = [get(job, seed) for seed in found.seeds(job)]
        modes[label] = job.mode
    return lines, styles_of(modes)


def draw_relative(ax, panel, found):
    """Training loss over tokens, minus that of the Job's `baseline` with the same seed. Runs of which only the
    validation loss was kept have no line."""
    pairs, modes = {}, {}
    for label, job in found.labels(panel.lines):
        label += found.rate_in_words(job)
        seeds = found.common_seeds(job, job.baseline)
        both = [(found.run(job, seed), found.run(job.baseline, seed)) for seed in seeds]
        both = [(run, base) for run, base in both if len(run.steps["loss"]) and len(base.steps["loss"])]
        if both:
            pairs[label], modes[label] = both, job.mode
    if not pairs:
        raise UserError("no run of this panel has training losses; leave out --run=false to make them")
    plot.relative_panel(ax, pairs, styles_of(modes))


def first_row(key):
    """The number of an analysis's first row: state 0 is the embedding, layers count from 1."""
    return 0 if key in ("hidden_norm", "hidden_similarity") else 1


def draw_layers(ax, panel, found):
    """A quantity of the analysis over layers; with several quantities of one run, those that are equal are one line."""
    drawn = []  # ([labels of equal lines], mode, values); at length 128 TOP-1% is TOP-2
    for label, job in found.labels(panel.lines):
        key = panel.key[label] if isinstance(panel.key, dict) else panel.key
        values = [found.by_layer(job, seed, key) for seed in found.seeds(job)]
        twins = [labels for labels, mode, other in drawn if (mode, other) == (job.mode, values)]
        if twins:
            twins[0].append(label)
        else:
            drawn.append(([label], job.mode, values))
    lines = {" = ".join(labels): values for labels, _, values in drawn}
    styles = styles_of({" = ".join(labels): mode for labels, mode, _ in drawn})
    level = None
    if panel.key == "entropy":
        job = panel.jobs[0]
        level = found.analysis(job, found.seeds(job)[0])["entropy_uniform"], "uniform causal attention"
    plot.layer_panel(ax, lines, styles, panel.label, first_row(panel.key), level)


def draw_public(ax, panel, found):
    """Models in Hugging Face layout, or our own instead where there are none."""
    if not found.public:
        draw_layers(ax, panel, found)
        return
    lines = {folder.name: [means_of(plot.read_analysis(folder), panel.key)] for folder in found.public}
    styles = styles_of({name: "vanilla" for name in lines})
    plot.layer_panel(ax, lines, styles, panel.label, first_row(panel.key))


def draw_initial(ax, panel, found):
    """Entropy on the left axis, token similarity of the hidden states on the right one."""
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


def draw_spectrum(ax, panel, found):
    """Eigenvalues of layer 1's values, from the largest down."""
    lines, styles = by_label(panel, found, lambda job, seed: found.arrays(job, seed)["value_spectrum"][0])
    for label, y in lines.items():
        y = np.array(y, float)
        plot.draw_line(ax, 1 + np.arange(y.shape[1]), np.maximum(y, 1e-12), label, styles[label])
    top = max(np.array(y).max() for y in lines.values())
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue", xscale="log", yscale="log", ylim=(top / 1e6, top * 2))
    legend(ax)


def draw_scaling(ax, panel, found):
    """Validation losses at the end over parameters; the fitted lines leave the 2M out, as the claims do."""
    modes = {}
    for job in panel.jobs:
        modes.setdefault(job.mode, []).append((found.parameters(job), found.losses(job)))
    scaling_panel(ax, modes, min(found.parameters(job) for job in panel.jobs if job.size != "2M"))


def scaling_panel(ax, modes, least=0):
    """modes: {mode: [(parameters, [loss of each seed])]}, straight lines over ln N through those from `least` on."""
    for mode, points in modes.items():
        style = style_of(mode)
        a, c = semi_log([(n, np.mean(losses)) for n, losses in points if n >= least])
        x = [n for n, _ in points]
        grid = np.geomspace(max(min(x), least), max(x), 50)
        name = LABELS[mode] if c < 0 else f"{LABELS[mode]} (does not fall with size)"
        ax.plot(grid, a + c * np.log(grid), markevery=[], label=name, **style)
        for n, losses in points:
            ax.plot([n] * len(losses), losses, **style | {"linestyle": ""})
    ax.set(xlabel="parameters", ylabel="validation loss (nats per token)", xscale="log")
    ticks = [n for n, _ in next(iter(modes.values()))]
    ax.set_xticks(ticks, [short_count(n) for n in ticks])
    ax.set_xticks([], minor=True)
    legend(ax)


def draw_paper(ax, panel, found):
    """Averages of the paper's Table 5."""
    modes = {mode: [(n, [loss]) for n, loss in size_and_loss(mode)] for mode in ("vanilla", "resformer")}
    scaling_panel(ax, modes)


def draw_tokens(ax, panel, found):
    """Validation losses along training."""
    lines, styles = by_label(panel, found, lambda job, seed: found.run_with_losses(job, seed).validation)
    for label, curves in lines.items():
        x, y = plot.align(curves)
        plot.draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)))
    ax.set(xlabel="training tokens", ylabel="validation loss (nats per token)", xlim=(0, None))
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.locator_params(axis="x", nbins=5)
    legend(ax)


def draw_rates(ax, panel, found):
    """Validation losses at the end over learning rates: a dot for each seed, a line through the means over the seeds
    that all rates of a mode have."""
    modes = {}
    for job in panel.jobs:
        modes.setdefault(job.mode, []).append(job)
    for mode, jobs in modes.items():
        style, rates = style_of(mode), [job.lr * found.scale.lr_factor for job in jobs]
        ax.plot(rates, mean_losses(found, jobs), markevery=[], label=LABELS[mode], **style)
        for rate, job in zip(rates, jobs, strict=True):
            losses = found.losses(job)
            ax.plot([rate] * len(losses), losses, **style | {"linestyle": ""})
    lowest = min(loss for job in panel.jobs for loss in found.losses(job))
    if ax.get_ylim()[1] > lowest + CUT:  # a failed run would squash all others
        ax.set_ylim(top=lowest + CUT)
    ax.set(xlabel="peak learning rate", ylabel="validation loss (nats per token)", xscale="log")
    rates = sorted({job.lr * found.scale.lr_factor for job in panel.jobs})
    ax.set_xticks(rates, [f"{rate:.2g}" for rate in rates])
    ax.set_xticks([], minor=True)
    legend(ax)


def draw_best(ax, panel, found):
    """Losses minus vanilla's, each mode at the best of its rates: a row for each."""
    modes = {}
    for label, job in found.labels(panel.lines):
        modes.setdefault(label, []).append(job)
    heights = range(len(modes), 0, -1)
    for y, jobs in zip(heights, modes.values(), strict=True):
        draw_gaps(ax, gaps_at_best(found, jobs), y, style_of(jobs[0].mode))
    ax.axvline(0, **ZERO)
    ax.set(yticks=heights, yticklabels=list(modes), ylim=(0.5, len(modes) + 0.5))
    ax.set_xlabel("validation loss minus vanilla's (nats per token)")


def draw_critical(ax, panel, found):
    """Critical points over lengths. Seeds without one are counted in the legend, not drawn."""
    color = style_of(panel.jobs[0].mode)["color"]
    points = {}  # length -> (step, extrapolated?) of each seed
    for job in panel.jobs:
        length = found.scale.lengths[job.length][0]
        points[length] = [critical(found, job, seed) for seed in found.common_seeds(job, job.baseline)]
    for is_extrapolated, name, face in ((False, "crossed", color), (True, "extrapolated from the last tenth", "none")):
        there = []
        for n, seeds in points.items():
            there += [(n, step) for step, how in seeds if how == is_extrapolated and 0 < step < math.inf]
        if there:
            ax.plot(*zip(*there, strict=True), "o", color=color, markerfacecolor=face, label=name)
    for missing, name in ((math.inf, "no crossing in sight"), (0.0, "never ahead")):
        for n, seeds in points.items():
            count = sum(step == missing for step, _ in seeds)
            if count:
                ax.plot([], [], " ", label=f"length {n:,}: {name} ({count} of {len(seeds)} seeds)")
    lengths = list(points)
    ax.set(xlabel="sequence length (tokens)", ylabel="critical point (step)", xscale="log")
    ax.set(xlim=(lengths[0] / 1.4, lengths[-1] * 1.4), xticks=lengths, xticklabels=[f"{n:,}" for n in lengths])
    ax.set_xticks([], minor=True)
    legend(ax)


def draw_gaps(ax, gaps, y, style):
    """Gaps of seeds at height y: a grey dot for each, their mean with its 95 % interval. style: of the mean"""
    mean, interval = mean_interval(gaps)
    ax.plot(gaps, [y] * len(gaps), **SEED)
    ax.errorbar(mean, y, xerr=interval, **style | {"linestyle": ""})


def draw_regime(ax, panel, found):
    """Losses minus vanilla's, a row for each label: a mark with each mode at its better rate, and where there are two
    rates, arrows with both modes at the lower and at the higher one."""
    groups = regime_rows(found, panel.lines)
    rows = list(dict.fromkeys(label for label, _ in groups))
    modes = list(dict.fromkeys(mode for _, mode in groups))
    heights = {label: len(rows) - i for i, label in enumerate(rows)}
    step = 0.5 / len(modes)  # between the modes of a row
    shifts = {mode: step * ((len(modes) - 1) / 2 - i) for i, mode in enumerate(modes)}
    for (label, mode), jobs in groups.items():
        y = heights[label] + shifts[mode]
        style = style_of(mode)
        if len(jobs) > 1:
            for arrow, job in zip("<>", jobs, strict=True):
                ax.plot(np.mean(gaps_to_vanilla(found, job)), y, arrow, color=style["color"], alpha=0.4, markersize=5)
        draw_gaps(ax, gaps_at_best(found, jobs), y, style)
    for mode in modes:
        ax.plot([], [], label=LABELS[mode], **style_of(mode) | {"linestyle": ""})
    if any(len(jobs) > 1 for jobs in groups.values()):
        for arrow, rate in (("<", "lower"), (">", "higher")):
            ax.plot([], [], arrow, color="0.5", alpha=0.4, markersize=5, label=f"both at the {rate} rate")
    ax.plot([], [], label="a seed", **SEED)
    ax.axvline(0, **ZERO)
    ax.set(yticks=range(len(rows), 0, -1), yticklabels=rows)
    ax.set_xlabel("validation loss minus vanilla's (nats per token)")
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    legend(ax)


PANEL_KINDS = {
    "relative": draw_relative,
    "layers": draw_layers,
    "public": draw_public,
    "initial": draw_initial,
    "spectrum": draw_spectrum,
    "scaling": draw_scaling,
    "paper": draw_paper,
    "tokens": draw_tokens,
    "critical": draw_critical,
    "rates": draw_rates,
    "best": draw_best,
    "regime": draw_regime,
}


# -- whole figures


def draw_figure(path, figure, found):
    """Draw a figure's panels into a PNG: up to three in a row, more in two columns. Heat maps and dots have a
    layout of their own."""
    kind = figure.panels[0].kind
    if kind == "heat":
        heat_figure(path, figure, found)
        return
    if kind == "dots":
        dots_figure(path, figure, found)
        return
    # a panel of public models is left out where it would be empty
    panels = [panel for panel in figure.panels if panel.kind != "public" or panel.jobs or found.public]
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    size = (4.5 * columns, 4 * rows) if len(panels) > 1 else (6, 4.4)
    with page(path, size) as fig:
        axes = fig.subplots(rows, columns, squeeze=False, sharey=figure.same_y)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.flat, panels, strict=False):
            ax.set_title(heading(panel, found), loc="left")
            PANEL_KINDS[panel.kind](ax, panel, found)


def heading(panel, found):
    """A panel's title and the size of its runs; {rate} becomes that of the first one."""
    if not panel.lines:
        return panel.title
    ((title, _),) = found.labels([(panel.title, panel.jobs[0])])
    return f"{title}\n{real_size(panel.jobs, found)}".strip()


def heat_figure(path, figure, found):
    """Maps over the first hundred tokens and the layers: a row for each model, a column for each quantity. Those of a
    column share one logarithmic colour scale, so that models can be compared."""
    (panel,) = figure.panels
    with page(path, (3.6 * len(HEAT), 2.1 * len(panel.lines) + 0.4)) as fig:
        fig.suptitle(real_size(panel.jobs, found), x=0.01, ha="left", fontsize=9)
        axes = fig.subplots(len(panel.lines), len(HEAT), squeeze=False)
        for column, key in zip(axes.T, HEAT, strict=True):
            heat_column(fig, column, panel, found, key)
        for ax in axes[:, 0]:
            ax.set_ylabel("layer")


def heat_column(fig, axes, panel, found, key):
    """The maps of one quantity, one model on each of `axes`, and their colour scale."""
    from matplotlib.colors import LogNorm

    maps = []  # (layers, positions) of each model, mean over its seeds
    for job in panel.jobs:
        maps.append(np.mean([found.arrays(job, seed)[key][:, :100] for seed in found.seeds(job)], 0))
    every = np.stack(maps)
    norm = LogNorm(max(every[every > 0].min(), every.max() / 1e4), every.max())
    for ax, values, (label, _) in zip(axes, maps, panel.lines, strict=True):
        image = heat_map(ax, values, norm, first_row(key))
        ax.set_title(f"{label}: {HEAT[key]}", fontsize=8, loc="left")
    ticks = np.geomspace(norm.vmin, norm.vmax, 4)
    bar = fig.colorbar(image, ax=list(axes), location="bottom", aspect=40, ticks=ticks, format="{x:.3g}")
    bar.ax.minorticks_off()
    bar.set_label(f"{HEAT[key]} (one scale)")
    axes[-1].set_xlabel("token position")


def heat_map(ax, values, norm, first):
    """Draw values (layers, positions) as a map whose rows are counted from `first`. Returns the image."""
    rows, columns = values.shape
    extent = (0.5, columns + 0.5, first - 0.5, first + rows - 0.5)
    look = {"aspect": "auto", "cmap": "viridis", "interpolation": "nearest", "origin": "lower"}
    image = ax.imshow(values, norm=norm, extent=extent, **look)
    ax.yaxis.get_major_locator().set_params(integer=True)
    return image


def dots_figure(path, figure, found):
    """Losses of modes minus vanilla's, in two columns of panels, all on one scale of losses."""
    panels = figure.panels
    sizes = [len(panel.lines) + 1 for panel in panels]
    heights = [max(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    title = f"{real_size(figure.jobs, found)}, {found.scale.steps:,} steps"
    with page(path, (9.5, 0.19 * sum(heights) + 0.9)) as fig:
        axes = fig.subplots(len(heights), 2, height_ratios=heights, sharex=True, squeeze=False).flat
        for ax, panel in zip(axes, panels, strict=False):
            dots_panel(ax, panel, found)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        for ax in axes[len(panels) - 2 : len(panels)]:
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("validation loss minus vanilla's (nats per token)")
        fig.legend(handles=dots_key(), loc="outside upper left", ncols=5, title=title, alignment="left")


def dots_key():
    """What dot, tick, bar and band are, for the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], label="a seed", **SEED),
        Line2D([], [], linestyle="", label="mean", **KEY),
        Line2D([], [], color=KEY["color"], label="95 % interval"),
        Line2D([], [], color="0.5", linewidth=0.8, label="vanilla"),
        Patch(label="as far as two of vanilla's seeds differ", **BAND),
    ]


def dots_panel(ax, panel, found):
    """One group of modes: see `draw_gaps`, the lowest loss on top. The band is a scale for single seeds."""
    gaps = {}
    for job in panel.jobs:
        gaps[job.mode] = gaps_to_vanilla(found, job)
    gaps = dict(sorted(gaps.items(), key=lambda item: -np.mean(item[1])))
    for y, (mode, seeds) in enumerate(gaps.items()):
        color = style_of(mode)["color"] if mode in HEADLINE else KEY["color"]
        draw_gaps(ax, seeds, y, KEY | {"color": color})
    vanilla = found.losses(panel.jobs[0].baseline)
    spread = max(vanilla) - min(vanilla)
    ax.axvspan(-spread, spread, **BAND)
    ax.axvline(0, **ZERO)
    ax.set(yticks=range(len(gaps)), yticklabels=list(gaps), ylim=(-0.6, len(gaps) - 0.4))
    ax.set_title(panel.title, loc="left", fontsize=9)
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
