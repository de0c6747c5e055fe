"""How we draw each kind of panel of the paper's figures, from what `found` (a found.Found) reads of the runs.

A panel is a figures.Panel. Titles and labels say what is really drawn: parameters, length and rate at this scale.
Read next: figures.py.
"""

import math
from types import SimpleNamespace

import numpy as np

import plot
from common.statistics import mean_interval
from configurator import UserError
from paper.claims import LABELS, best_pair, critical, mean_losses, semi_log
from paper.runs import WITH_BOS
from paper.tables import by_rate
from plot import ZERO, count_range, legend, page, short_count, style_of, styles_of

CUT = 0.25  # nats above the lowest loss: higher ones leave a panel of losses against rates
CLIP = 0.15  # nats: larger gaps stand as numbers at the edge, so that the others keep their room
NOISE = 0.03  # nats, by which a single seed at 1.95M can be off
LOSS = "validation loss (nats per token)"
GAP = "validation loss minus vanilla's\n(nats per token)"


def heading(panel, found):
    """A panel's title, the size of its runs, and whether their sequences begin with end-of-text."""
    lengths = count_range([found.scale.lengths[job.length][0] for job in panel.jobs], "{:,}".format)
    size = f"{count_range([found.parameters(job) for job in panel.jobs])} parameters, length {lengths}"
    if found.scale.here(panel.jobs[0]).change == WITH_BOS:  # of all runs of a panel, or of none
        size += ",\ntrained with end-of-text first"
    return f"{found.in_words(panel.title, panel.jobs[0])}\n{size}".strip()


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
            rate = found.rate(job)
            label += f", rate {rate}" if rate != found.rate(job.baseline) else ""
            pairs[label], modes[label] = both, job.mode
    if not pairs:
        raise UserError("no run of this panel has training losses; leave out --kept to make them again")
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
    first = 0 if panel.key in ("hidden_norm", "hidden_similarity") else 1  # state 0 is the embedding
    plot.layer_panel(ax, lines, styles_of(modes), panel.label, first, level)


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


def points_over(ax, points, lines, text):
    """Marks of seeds over a logarithmic x axis, {mode: [(x, [y of each seed])]}, and a line for each mode, (x, y)."""
    for mode, of_mode in points.items():
        style = style_of(mode)
        ax.plot(*lines[mode], markevery=[], label=LABELS[mode], **style)
        for x, values in of_mode:
            ax.plot([x] * len(values), values, **style | {"linestyle": ""})
    ax.set_xscale("log")
    every = sorted({x for of_mode in points.values() for x, _ in of_mode})
    ticks(ax, every, list(map(text, every)))
    ax.set_xlim(every[0] / 1.15, every[-1] * 1.15)
    legend(ax)


def scaling(ax, panel, found):
    """Validation losses at the end over parameters, with lines over ln N. These leave the 2M out, as the claims do."""
    least = min(found.parameters(job) for job in panel.jobs if job.size != "2M")
    points, lines = {}, {}
    for mode in dict.fromkeys(job.mode for job in panel.jobs):
        jobs = [job for job in panel.jobs if job.mode == mode]
        points[mode] = [(found.parameters(job), found.losses(job)) for job in jobs]
        a, c = semi_log([(n, np.mean(losses)) for n, losses in points[mode] if n >= least])
        n = np.array([max(min(points[mode])[0], least), max(points[mode])[0]])
        lines[mode] = n, a + c * np.log(n)  # a straight line, because the axis is logarithmic
    # vanilla's sizes alone are ticks: SVFormer's, a little smaller, would stand on top of them
    ax.set(xlabel="parameters", ylabel=LOSS)
    points_over(ax, points, lines, short_count)
    sizes = [n for n, _ in points["vanilla"]]
    ticks(ax, sizes, list(map(short_count, sizes)))


def tokens(ax, panel, found):
    """Validation losses along training."""
    lines = found.labels(panel.lines)
    styles = styles_of({label: job.mode for label, job in lines})
    # seeds of a run were evaluated at the same steps, so their losses align
    for label, job in lines:
        x, y = plot.align([found.validation(job, seed) for seed in found.seeds(job)])
        plot.draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)))
    ax.set(xlabel="training tokens", ylabel=LOSS, xlim=(0, None))
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.locator_params(axis="x", nbins=5)
    legend(ax)


def rates(ax, panel, found):
    """Validation losses at the end over rates; lines are means over the seeds that all rates of a mode have."""
    factor, points, lines = found.scale.lr_factor, {}, {}
    for mode in dict.fromkeys(job.mode for job in panel.jobs):
        jobs = [job for job in panel.jobs if job.mode == mode]
        points[mode] = [(job.lr * factor, found.losses(job)) for job in jobs]
        lines[mode] = [lr for lr, _ in points[mode]], mean_losses(found, jobs)
    ax.set(xlabel="peak learning rate", ylabel=LOSS)
    points_over(ax, points, lines, "{:.2g}".format)
    lowest = min(loss for job in panel.jobs for loss in found.losses(job))
    ax.set_ylim(lowest - CUT / 20, lowest + CUT)  # a failed run would squash all others


def critical_points(ax, panel, found):
    """Critical points over lengths. The table beside counts the seeds that have none."""
    points = []
    for job in panel.jobs:
        steps = [critical(job, found, seed) for seed in found.common_seeds(job, job.baseline)]
        points.append((found.scale.lengths[job.length][0], [step for step in steps if 0 < step < math.inf]))
    ax.set(xlabel="sequence length (tokens)", ylabel="critical point (step)")
    points_over(ax, {panel.jobs[0].mode: points}, {panel.jobs[0].mode: ([], [])}, "{:,}".format)


def gaps(ax, panel, found):
    """Losses minus vanilla's, a row for each label, the input side on top: seeds in grey, their mean and 95 % interval.
    Each mode, and vanilla, is at the best of its rates. A single seed is hollow, because it says little."""
    rows = []
    for (label, mode), jobs in by_rate(found, panel.lines).items():
        seeds = found.gaps(*best_pair(found, jobs))
        rows.append((*mean_interval(seeds), label, mode, seeds))
    rows.sort(key=lambda row: -row[0])
    for y, (mean, interval, label, mode, seeds) in enumerate(rows):
        color = style_of(mode)["color"] if label != mode or mode in plot.HEADLINE else "0.35"
        # a few modes are so much worse that they would squeeze all others into a finger's width
        if mean > CLIP:
            ax.text(CLIP, y, f"{mean:+.2f} →", ha="right", va="center", fontsize=7, color=color)
            continue
        ax.plot(seeds, [y] * len(seeds), "o", color="0.65", markersize=3, markeredgewidth=0)
        face = color if interval else "white"
        ax.errorbar(mean, y, xerr=interval, color=color, marker="o", markerfacecolor=face)
    ax.axvspan(-NOISE, NOISE, color="0.93", linewidth=0, zorder=0)
    ax.axvline(0, **ZERO)
    xlabel = f"{GAP}; bars: 95 % of 3 seeds\nhollow: one seed, which can be off by the grey band"
    ax.set(xlabel=xlabel, yticks=range(len(rows)), yticklabels=[row[2] for row in rows], ylim=(-0.6, len(rows) - 0.4))
    ax.grid(axis="x", color="0.88", linewidth=0.6)
    ax.set_axisbelow(True)


def slopes(ax, panel, found):
    """Losses minus vanilla's over tokens or parameters, with 95 % intervals, each mode at the better of its rates."""
    points = {}
    for (_, mode), jobs in by_rate(found, panel.lines).items():
        best, base = best_pair(found, jobs)
        record = found.record(best, found.seeds(best)[0])
        sizes = {"parameters": found.parameters(base), "tokens": record["start"]["max_steps"] * record["step_tokens"]}
        points.setdefault(mode, []).append((sizes[panel.key], *mean_interval(found.gaps(best, base))))
    for i, (mode, of_mode) in enumerate(points.items()):
        x, means, intervals = map(np.array, zip(*of_mode, strict=True))
        beside = x * (x[-1] / x[0]) ** (0.02 * (i - 1))  # so that bars do not hide each other
        ax.plot(beside, means, label=LABELS[mode], **style_of(mode))
        bars = np.array(intervals, float)  # a single seed has None, which becomes NaN and is not drawn
        ax.errorbar(beside, means, bars, color=style_of(mode)["color"], linestyle="", capsize=3)
    ax.axhline(0, **ZERO)
    ax.set(xlabel=f"{panel.key}; bars: 95 % intervals of three seeds", ylabel=GAP, xscale="log")
    ticks(ax, x, list(map(short_count, x)))
    legend(ax)


def heat(ax, panel, found):
    """One quantity over tokens and layers, the models one above the other on one logarithmic colour scale."""
    maps = []  # (layers, positions) of each model, mean over its seeds
    for job in panel.jobs:
        maps.append(np.mean([found.arrays(job, seed)[panel.key][:, :100] for seed in found.seeds(job)], 0))
    rows, height = np.concatenate(maps), len(maps[0])
    floor = max(rows[rows > 0].min(), rows.max() / 1e4)
    image = ax.imshow(np.maximum(rows, floor), norm="log", aspect="auto", interpolation="nearest")
    ends = height * np.arange(len(maps)) - 0.5  # rows count from 0, and each is centred on its number
    ax.hlines(ends[1:], *ax.get_xlim(), color="white")
    ax.set_yticks(ends + height / 2, [label for label, _ in panel.lines])
    ax.set(xlabel="token position, from 0", ylabel=f"{height} rows a model, the input side on top")
    ax.figure.colorbar(image, ax=ax, location="bottom", aspect=40, label=panel.label)


MINUS_VANILLA = (relative, critical_points, gaps, slopes)  # these need vanilla's runs, too
OF_ANALYSES = (layers, spectrum, heat)


def page_of_panels(path, figure, found):
    """A whole figure: up to three panels in a row, more in two columns; a panel with many rows is taller."""
    panels = figure.panels
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    labels = max(len({label for label, _ in panel.lines}) if panel.draw is gaps else 0 for panel in panels)
    size = (4.5 * columns, 4 * rows) if len(panels) > 1 else (6, max(4.4, 1 + 0.15 * labels))
    with page(path, size) as fig:
        axes = fig.subplots(rows, columns, squeeze=False, sharey=figure.same_y)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.flat, panels, strict=False):
            ax.set_title(heading(panel, found), loc="left", fontsize=9)
            panel.draw(ax, panel, found)
