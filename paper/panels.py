"""How we draw each kind of panel of the paper's figures, from what `found` (a found.Found) reads of the runs.

A panel is a figures.Panel. Titles and labels say what is really drawn: parameters, length and rate at this scale. Bars
and bands are 95 % intervals. Read next: figures.py.
"""

import math
from types import SimpleNamespace

import numpy as np

import plot
from common.statistics import mean_interval
from configurator import UserError
from paper.claims import best_pair, best_rate, critical, is_edge, multipliers
from paper.runs import CONTROL, WITH_BOS
from paper.tables import by_rate
from plot import COLORS, LEGEND, count_range, legend, page, short_count, style_of, styles_of
from value_modes import ValueMode, get_mode, row_and_number

LOSS, GAP = "validation loss (nats per token)", "validation loss minus vanilla's\n(nats per token)"
MOST = 0.13  # nats: greater gaps stand at the edge of a forest, so that the others keep their room
TRIANGLES = "\ntriangle: on another processor"
LEVEL = "uniform attention, equal norms"
EXTREMES = {"first": np.argmax, "value_norm": np.argmin, "hidden_norm": np.argmax}  # what a table quotes of these


def heading(panel, found):
    """A panel's title, the size of its runs, and whether their sequences begin with end-of-text."""
    lengths = count_range([found.scale.lengths[job.length][0] for job in panel.jobs], "{:,}".format)
    size = f"{count_range([found.parameters(job) for job in panel.jobs])} parameters, length {lengths}"
    if found.scale.here(panel.jobs[0]).change == WITH_BOS:  # of all runs of a panel but a control
        size += ",\ntrained with end-of-text first"
    if panel.draw is rates:
        return panel.title
    title = panel.title(found) if callable(panel.title) else found.in_words(panel.title, panel.jobs[0])
    return f"{title}\n{size}".strip()


# -- kinds of panels: functions (ax, panel, found)


def relative(ax, panel, found):
    """Training loss over tokens, minus vanilla's with the same seed, from a share `key` of the tokens on. Records
    without training losses have no line."""
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
    plot.relative_panel(ax, pairs, styles_of(modes), since=panel.key or plot.SHOWN)


def layers(ax, panel, found):
    """A quantity of the analysis over layers; the extreme that a table quotes is filled, a control grey."""
    lines, modes, level = {}, {}, None
    for label, job in found.labels(panel.lines):
        key = panel.key[label] if isinstance(panel.key, dict) else panel.key
        lines[label] = [found.by_layer(job, seed, key) for seed in found.seeds(job)]
        modes[label] = job.mode
    analysis = found.analysis(job, found.seeds(job)[0])
    levels = {"entropy": analysis["entropy_uniform"], "value_norm": 1.0, "hidden_norm": 1.0}
    levels["first"] = sum(1 / n for n in range(1, 1 + analysis["length"])) / analysis["length"]  # uniform, causal
    level = (levels[key], LEVEL) if key in levels else None
    styles, first = styles_of(modes), 0 if key in ("hidden_norm", "hidden_similarity") else 1  # state 0: embedding
    for label, job in found.labels(panel.lines):
        styles[label] |= {"color": "0.6"} if job.size == CONTROL else {}
    plot.layer_panel(ax, lines, styles, panel.label, first, level)
    for label, rows in lines.items() if key in EXTREMES else ():
        means = np.mean(rows, axis=0)
        at = EXTREMES[key](means)
        ax.plot(first + at, means[at], **styles[label] | {"markerfacecolor": styles[label]["color"]})


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


# -- points over a logarithmic axis, and what they may be: functions (found, job) -> [(x, y, its bar or None, seeds)]


def loss_by_size(found, job):
    return [(found.parameters(job), np.mean(found.losses(job)), None, found.losses(job))]


def loss_by_tokens(found, job):
    return [(found.tokens(job), np.mean(found.losses(job)), None, found.losses(job))]


def losses_along(found, job):
    x, y = plot.align([found.validation(job, seed) for seed in found.seeds(job)])
    return [(tokens, np.mean(losses), None, losses) for tokens, losses in zip(x, y.T, strict=True)]


def gap_by_size(found, job):
    gap, interval, _ = found.gap(job)
    return [(found.parameters(job.baseline), gap, interval, [])]


def multiplier_by_tokens(found, job):
    """How many times its tokens vanilla needs."""
    ends, (least, most) = multipliers(found, job)
    middle = math.sqrt(math.prod(ends))
    return [(found.tokens(job), middle, [[middle - least], [most - middle]], [])]


def critical_point(found, job):
    """The table beside counts the seeds that have none."""
    steps = [critical(job, found, seed) for seed in found.common_seeds(job, job.baseline)]
    steps = [step for step in steps if 0 < step < math.inf]
    return [(found.scale.lengths[job.length][0], *mean_interval(steps), steps)] if steps else []


def points(ax, panel, found):
    """A line for each label, with bars and, as ticks, its seeds. A rate that is not vanilla's makes it thin. The names
    stand at the right ends, moved apart where they would overlap, or beside a mark that is alone."""
    lines, ticks, names = {}, [], []
    for label, job in found.labels(panel.lines):
        lines.setdefault(label, (job, []))[1].extend(panel.key(found, job))
    styles = styles_of({label: job.mode for label, (job, _) in lines.items()})
    has_bars = any(bar is not None for _, marks in lines.values() for _, _, bar, _ in marks)
    for i, (label, (job, marks)) in enumerate(lines.items()):
        style = styles[label] | {"linewidth": 1.6 if found.rate(job) == found.rate(job.baseline) else 0.8}
        beside = [x * (1 + 0.02 * i * has_bars) for x, *_ in marks]  # bars must not hide each other
        ax.plot(beside, [y for _, y, *_ in marks], **style)
        for aside, (x, y, bar, seeds) in zip(beside, marks, strict=True):
            ax.errorbar(aside, y, yerr=bar, **style)
            ax.plot([aside] * len(seeds), seeds, "_", color=style["color"], alpha=0.6)
            if all(abs(math.log(x / tick)) > 0.08 for tick in ticks):  # SVFormer's sizes are a little smaller
                ticks.append(x)
        if len(marks) == 1:
            ax.annotate(
                label, (aside, y), (6, 0), textcoords="offset points", va="center", fontsize=8, color=style["color"]
            )
        elif marks:
            names.append((y, label, style["color"]))
    ax.set(xlabel=panel.label[0], ylabel=panel.label[1])
    if panel.key is not losses_along:
        ax.set_xscale("log")
        ax.set_xticks(ticks)
        ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:.4g}" if x < 1000 else short_count(x))
    ax.margins(x=0.08)
    low, high = ax.get_ylim()
    last = low
    for y, label, color in sorted(names):
        last = max(y, last + 0.065 * (high - low))
        ax.text(1.02, last, label, transform=ax.get_yaxis_transform(), color=color, va="center", fontsize=8)


def rates(ax, panel, found):
    """Losses over the learning rate, vanilla's in grey; each at its best rate is filled."""
    for mode, color in (("vanilla", "0.6"), (panel.jobs[-1].mode, style_of(panel.jobs[-1].mode)["color"])):
        jobs = [job for job in panel.jobs if job.mode == mode]
        best = best_rate(found, jobs)
        ax.plot(
            [1000 * float(found.rate(job)) for job in jobs], [np.mean(found.losses(job)) for job in jobs], color=color
        )
        for job in jobs:
            x, losses = 1000 * float(found.rate(job)), found.losses(job)
            ax.plot([x] * len(losses), losses, "_", color=color, alpha=0.6)
            ax.plot(x, np.mean(losses), "o", color=color, markerfacecolor=color if job == best else "white")
    ax.set(xscale="log", ylim=(2.38, 2.62), xlabel=panel.label[0], ylabel=panel.label[1])
    ax.set_xticks([1000 * float(found.rate(job)) for job in jobs])
    ax.xaxis.set_major_formatter("{x:.4g}")
    ax.set_xticks([], minor=True)


def sizes(ax, panel, found):
    """Gaps by size, and how many tokens a parameter gets."""
    points(ax, panel, found)
    tokens = found.tokens(panel.jobs[0])
    ax.xaxis.set_major_formatter(lambda n, _: f"{short_count(n)}\n{tokens / n:.1f}")
    ax.axhline(0, **plot.ZERO)


def multiples(ax, panel, found):
    """Token multipliers."""
    points(ax, panel, found)
    ax.axhline(1, **plot.ZERO)


# -- gaps


def family(mode):
    """What kind of variant a mode is, for its colour."""
    mode, plain = get_mode(mode), ValueMode()
    kinds = ("share_q", "share_k", "share_v", "kv_group", "heads_from_layer_0", "values")
    if any(getattr(mode, kind) != getattr(plain, kind) for kind in kinds):
        return "shares queries, keys or values"
    if any(r.source == "token" for r in mode.residuals):
        return "adds values of a token table"
    if mode.residuals and all(r.of == "v" for r in mode.residuals):
        return "adds values of earlier layers"
    return "another change"


def forest(ax, panel, found):
    """Losses minus vanilla's, the lowest on top, each mode at the best of its rates. Grey: cannot be told from vanilla;
    where seeds are single, in the band. A triangle ran on another processor. key: function mode -> its family."""
    rows, colors, band = [], {}, found.one_seed()
    for (label, mode), jobs in by_rate(found, panel.lines).items():
        best, base = best_pair(found, jobs)
        gap, interval, seeds = found.contrast({best: 1, base: -1})
        if panel.key:
            color = colors.setdefault(panel.key(mode), COLORS[1 + len(colors)])
        else:
            color = "0.5" if abs(gap) < (interval or band) else style_of(row_and_number(mode)[0])["color"]
        marker = "^" if "*" in found.marks(best, base) else "o"
        remark = " edge" if is_edge(best, jobs) or is_edge(base, jobs) else ""
        rows.append((label, color, marker, gap, interval, list(seeds.values()) if interval else [], remark))
    rows.sort(key=lambda row: -row[3])
    plot.forest(ax, rows)
    if not all(interval for *_, interval, _, _ in rows):
        ax.axvspan(-band, band, color="0.93", linewidth=0, zorder=0)
        hint = "hollow: one seed, which cannot tell those in the band from vanilla"
        ax.set_xlabel(f"{ax.get_xlabel()}\n{hint}{TRIANGLES * ('^' in [row[2] for row in rows])}")
    for y, (_, color, _, gap, *_) in enumerate(rows):
        if gap > MOST:
            ax.set_xlim(right=MOST + 0.01)
            ax.plot(MOST, y, ">", color=color)
    for kind, color in colors.items():
        ax.plot([], [], "o", color=color, label=kind)
    if colors:
        legend(ax)


MINUS_VANILLA = (relative, forest, sizes, multiples, critical_point)  # kinds or keys that need vanilla's runs, too
OF_ANALYSES = (layers, spectrum, heat)


def page_of_panels(path, figure, found):
    """A whole figure: up to three panels in a row, more in two columns, or as figure.mosaic says. If all panels have
    the same lines, one legend serves them."""
    panels = figure.panels
    columns = len(panels) if len(panels) < 4 else 2
    names = "ABCDEFGHI"[: len(panels)]
    mosaic = figure.mosaic or "\n".join(names[i : i + columns] for i in range(0, len(panels), columns))
    rows = mosaic.split("\n")
    size = (4.5 * columns, 4 * len(rows)) if len(panels) > 1 else (6, 4.4)
    with page(path, figure.size or size) as fig:
        axes = fig.subplot_mosaic("\n".join(row.ljust(columns, ".") for row in rows))
        axes = [axes[name] for name in names]
        for ax, panel in zip(axes, panels, strict=True):
            ax.set_title(heading(panel, found), loc="left", fontsize=9)
            panel.draw(ax, panel, found)
            if figure.same_y:
                ax.sharey(axes[0])
        legends = [ax.get_legend() for ax in axes if ax.get_legend()]
        texts = [[text.get_text() for text in old.get_texts()] for old in legends]
        if len(texts) == len(axes) > 1 and all(of == texts[0] for of in texts):
            titles = [old.get_title().get_text() for old in legends]
            how = {"loc": "outside upper left", "ncols": 4} | LEGEND
            fig.legend(*axes[0].get_legend_handles_labels(), title=titles[0] if len(set(titles)) == 1 else None, **how)
            for ax, old, title in zip(axes, legends, titles, strict=True):
                ax.set_title(title if len(set(titles)) > 1 else "", loc="left", fontsize=9)
                old.remove()
