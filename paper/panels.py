"""How we draw each kind of panel of the paper's figures, from what `found` (a found.Found) reads of the runs.

A panel is a figures.Panel. Titles and labels say what is really drawn: parameters, length and rate at this scale. Bars
and bands are 95 % intervals. Read next: figures.py.
"""

import math
from types import SimpleNamespace

import numpy as np

import plot
from analyze import uniform_entropy
from common.statistics import mean_interval
from configurator import UserError
from paper.claims import best_gaps, best_rate, critical, multipliers
from paper.runs import CONTROL, WITH_BOS
from plot import COLORS, LEGEND, LEVEL, ZERO, count_range, legend, page, short_count, style_of, styles_of
from value_modes import get_mode, row_and_number

MOST = 0.13  # nats: greater gaps stand at the edge of a forest, so that the others keep their room
UNIFORM = "uniform attention"
QUANTITIES = {
    "entropy": "entropy of token importance (nats)", "first": "importance of the first token",
    "value_norm_first": "norm of the first token's value",
    "hidden_norm_first": "norm of the first token's hidden state",
    "hidden_similarity": "token similarity", "value_largest": "largest eigenvalue",
    "eq6": "cosine similarity to Eq 2", "top_1%": "importance",
}  # fmt: skip


def heading(panel, found):
    """A panel's title, the size of its runs, and whether their sequences begin with end-of-text."""
    if not panel.jobs:
        return panel.title
    title = panel.title(found) if callable(panel.title) else found.in_words(panel.title, panel.jobs[-1])
    lengths = count_range([found.scale.lengths[job.length][0] for job in panel.jobs], "{:,}".format)
    size = f"\n{count_range([found.parameters(job) for job in panel.jobs])} parameters, length {lengths}"
    size += ",\ntrained with end-of-text first" * (found.scale.here(panel.jobs[0]).change == WITH_BOS)
    return title if panel.draw is rates else f"{title}{size}".strip()  # six panels of rates have one size


# -- kinds of panels: functions (ax, panel, found)


def relative(ax, panel, found):
    """Training loss over tokens, minus vanilla's with the same seed, from a share `key` of the tokens on."""
    pairs, modes = {}, {}
    for label, job in found.labels(panel.lines):
        label += f", rate {found.rate(job)}" if found.rate(job) != found.rate(job.baseline) else ""
        for seed in found.common_seeds(job, job.baseline):
            both = [SimpleNamespace(steps=found.steps(of, seed)) for of in (job, job.baseline)]
            if all(len(of.steps["loss"]) for of in both):  # a record may have none
                pairs.setdefault(label, []).append(both)
                modes[label] = job.mode
    if not pairs:
        raise UserError("no run of this panel has training losses; leave out --kept to make them again")
    plot.relative_panel(ax, pairs, styles_of(modes), since=panel.key or plot.SHOWN)


def layers(ax, panel, found):
    """A quantity of the analysis over layers, of our runs and of public models; a control is grey."""
    lines, modes, named, key = {}, {}, found.labels(panel.lines), panel.key
    for label, job in named:
        key = panel.key[label] if isinstance(panel.key, dict) else panel.key
        lines[label], modes[label] = [found.by_layer(job, seed, key) for seed in found.seeds(job)], job.mode
    lengths = {found.analysis(job, found.seeds(job)[0])["length"] for job in panel.jobs}
    for name, folder in found.public.items() if panel.has_public else ():
        analysis = plot.read_analysis(folder)
        lines[name], modes[name] = found.means(analysis, key), name  # a colour for each
        lengths.add(analysis["length"])
    if not lines:
        raise UserError("none of the public models is analysed; the notes above say why")
    level = {}
    if len(lengths) == 1:  # else there is no one level
        (T,) = lengths
        level["entropy"] = uniform_entropy(T), UNIFORM
        level["first"] = sum(1 / n for n in range(1, 1 + T)) / T, UNIFORM
    styles = styles_of(modes)
    for label, job in named:
        styles[label] |= {"color": "0.6"} if job.size == CONTROL else {}
    plot.layer_panel(ax, lines, styles, QUANTITIES[key], 0 if key.startswith("hidden") else 1, level.get(key))


def before_training(ax, panel, found):
    """The entropy of a model without training, and on the right axis how alike its hidden states are."""
    (job,), (seed, *_) = panel.jobs, found.seeds(panel.jobs[0])
    entropy, similarity = (found.by_layer(job, seed, key) for key in ("entropy", "hidden_similarity"))
    other, x = ax.twinx(), 1 + np.arange(len(entropy))
    ax.plot(x, entropy, "o-", color=COLORS[0], markerfacecolor="none", label="entropy")
    ax.axhline(found.analysis(job, seed)["entropy_uniform"], label=UNIFORM, **LEVEL)
    other.plot(x, similarity[1:], "s--", color=COLORS[2], markerfacecolor="none")  # what leaves each layer
    ax.plot([], [], "s--", color=COLORS[2], markerfacecolor="none", label="token similarity, on the right axis")
    ax.set(xlabel="layer", ylabel=QUANTITIES["entropy"])
    other.set(ylabel=QUANTITIES["hidden_similarity"], ylim=(0, 1))
    other.spines["right"].set_visible(True)
    legend(ax)


def spectrum(ax, panel, found):
    """Eigenvalues of layer 1's values, from the largest down."""
    named, top = found.labels(panel.lines), 0
    styles = styles_of({label: job.mode for label, job in named})
    for label, job in named:
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
    ax.set_yticks(ends + height / 2, [label for label, _ in found.labels(panel.lines)])
    ax.set(xlabel="token position, from 0", ylabel=f"{height} rows a model, the input side on top")
    ax.figure.colorbar(image, ax=ax, location="bottom", aspect=40, label=panel.key.replace("_", " "))


# -- points over another axis: its name, the name of y, a level to compare with, and a function (found, job) ->
# [(x, y, half of its 95 % interval or None, numbers of its seeds)]


def losses_along(found, job):
    x, y = plot.align([found.validation(job, seed) for seed in found.seeds(job)])
    return [(tokens, np.mean(losses), None, losses) for tokens, losses in zip(x, y.T, strict=True)]


def times_tokens(found, job):
    ends, (least, most) = multipliers(found, job)
    middle = math.sqrt(math.prod(ends))
    return [(found.tokens(job), middle, [[middle - least], [most - middle]], [])]


def critical_point(found, job):
    """The table beside counts the seeds that have none. Beyond the last step it is a prediction."""
    every = (critical(job, found, seed) for seed in found.common_seeds(job, job.baseline))
    steps = [step for step in every if 0 < step < math.inf]
    return [(found.scale.lengths[job.length][0], *mean_interval(steps), steps)] if steps else []


def losses_at(x):
    return lambda found, job: [(x(found, job), np.mean(found.losses(job)), None, found.losses(job))]


# fmt: off
LOSS, TOKENS, N = "validation loss (nats per token)", "training tokens", "parameters"
LOSS_BY_SIZE = N, LOSS, None, losses_at(lambda found, job: found.parameters(job))
LOSS_BY_RATE = "peak learning rate / 0.001", LOSS, None, losses_at(lambda found, job: 1000 * float(found.rate(job)))
LOSS_BY_TOKENS = TOKENS, LOSS, None, losses_at(lambda found, job: found.tokens(job))
LOSS_ALONG = TOKENS, LOSS, None, losses_along
GAP_BY_SIZE = (f"{N}, and tokens for each", "validation loss minus vanilla's\n(nats per token)", 0,
               lambda found, job: [(found.parameters(job.baseline), *found.gap(job)[:2], [])])
MULTIPLIER_BY_TOKENS = TOKENS, "× tokens that vanilla needs for that loss", 1, times_tokens
CRITICAL = "sequence length (tokens)", "critical point (step)", None, critical_point
# fmt: on


def points(ax, panel, found, is_small=False):
    """A line for each label, thin if its rate is not vanilla's, with bars and, as ticks, its seeds. A small panel has a
    grey vanilla and no names."""
    (xlabel, ylabel, level, points_of), lines, colors = panel.key, {}, {}
    for label, job in found.labels(panel.lines):
        lines.setdefault(label, (job, []))[1].extend(points_of(found, job))
    styles = styles_of({label: job.mode for label, (job, _) in lines.items()})
    for i, (label, (job, marks)) in enumerate(lines.items()):
        style = styles[label] | {"linewidth": 1.6 if found.rate(job) == found.rate(job.baseline) else 0.8}
        style |= {"color": "0.6"} if is_small and job.mode == "vanilla" else {}
        colors[label] = style["color"]
        if any(bar is not None for _, _, bar, _ in marks):  # bars must not hide each other
            marks[:] = [(x * (1 + 0.02 * i), *rest) for x, *rest in marks]
        ax.plot([x for x, *_ in marks], [y for _, y, *_ in marks], **style)
        for x, y, bar, seeds in marks:
            ax.errorbar(x, y, yerr=bar, **style)
            ax.plot([x] * len(seeds), seeds, "_", color=style["color"], alpha=0.6)
    if points_of is not losses_along:
        ax.set_xscale("log")
        ax.set_xticks([x for x, *_ in next(iter(lines.values()))[1]])
        ax.set_xticks([], minor=True)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    tokens = found.tokens(panel.jobs[0])  # of all sizes
    per_n = (lambda n: f"\n{tokens / n:.1f}") if panel.key == GAP_BY_SIZE else (lambda n: "")
    ax.xaxis.set_major_formatter(lambda x, _: (f"{x:.4g}" if x < 1000 else short_count(x)) + per_n(x))
    if level is not None:
        ax.axhline(level, **ZERO)
    ax.margins(x=0.08)
    if not is_small:
        name_ends(ax, {label: marks for label, (_, marks) in lines.items() if marks}, colors)


def name_ends(ax, lines, colors):
    """Write the name of each line at its right end, moved apart, or beside a mark that is alone."""
    last, (low, high) = -math.inf, ax.get_ylim()
    for label, marks in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        x, y, *_ = marks[-1]
        text = {"color": colors[label], "va": "center", "fontsize": 8, "bbox": {"fc": "w", "ec": "w", "pad": 0}}
        if len(marks) == 1:
            ax.annotate(label, (x, y), (0, 28), textcoords="offset points", **text | {"ha": "center"})
        else:
            last = max(y, last + 0.065 * (high - low))
            ax.text(1.02, last, label, transform=ax.get_yaxis_transform(), **text)


def critical_points(ax, panel, found):
    """Critical points; those that all seeds have reached are filled."""
    points(ax, panel, found)
    for job in panel.jobs:
        style = style_of(job.mode)
        for x, y, _, steps in critical_point(found, job):
            if max(steps) <= found.scale.steps:
                ax.plot(x, y, **style | {"markerfacecolor": style["color"]})


def by_size(ax, panel, found):
    """Losses over parameters, and the lines over ln N by which claims.saving measures; they leave out the smallest
    model, which is nearly all embeddings."""
    points(ax, panel, found)
    for mode in dict.fromkeys(job.mode for job in panel.jobs):
        jobs = [job for job in panel.jobs if job.mode == mode and job.size != "2M"]
        n = np.array([found.parameters(job) for job in jobs])
        line = np.polyfit(np.log(n), [np.mean(found.losses(job)) for job in jobs], 1)
        ax.plot(n, np.polyval(line, np.log(n)), color=style_of(mode)["color"], linewidth=0.8, linestyle=":")


def rates(ax, panel, found):
    """Losses over the learning rate beside vanilla's; each at its best rate is filled."""
    points(ax, panel, found, is_small=True)
    for mode in ("vanilla", panel.jobs[-1].mode):
        best = best_rate(found, [job for job in panel.jobs if job.mode == mode])
        ((x, y, *_),) = panel.key[-1](found, best)
        ax.plot(x, y, "o", color="0.6" if mode == "vanilla" else style_of(mode)["color"], markersize=6)
    ax.set_ylim(2.38, 2.62)


# -- gaps


def family(found, job):
    """What kind of variant a mode is, for its colour."""
    residuals = get_mode(job.mode).residuals
    if found.start(job)["kv_bytes_per_token"] < found.start(job.baseline)["kv_bytes_per_token"]:
        return "smaller KV cache"
    if any(r.source == "token" for r in residuals):
        return "adds values of a token table"
    is_of_values = residuals and residuals[0].of == "v" and job.mode != "scaled"
    return "adds values of earlier layers" if is_of_values else "another change"


def forest(ax, panel, found):
    """Losses minus vanilla's, the lowest on top, each mode at the best of its rates. Grey: cannot be told from vanilla;
    where seeds are single, in the band. A triangle ran on another processor. key: function of a Job's family."""
    rows, colors, band = [], {}, found.one_seed()
    for at in best_gaps(found, panel.lines):
        is_grey = abs(at.gap) < (at.interval or band)
        color = "0.5" if is_grey else style_of(row_and_number(at.mode)[0])["color"]
        if panel.key:
            color = colors.setdefault(panel.key(found, at.best), COLORS[1 + len(colors)])
        seeds = at.seeds.values() if at.interval else ()
        marker = "^" if "‡" in at.marks else "o"
        rows.append((at.label, color, marker, at.gap, at.interval, list(seeds), " edge" if any(at.edges) else ""))
    rows.sort(key=lambda row: -row[3])
    plot.forest(ax, rows)
    if not all(row[4] for row in rows):
        ax.axvspan(-band, band, color="0.93", linewidth=0, zorder=0)
        hint = "hollow: one seed, which cannot tell those in the band from vanilla"
        hint += "\ntriangle: on another processor" if "^" in [row[2] for row in rows] else ""
        ax.set_xlabel(f"{ax.get_xlabel()}\n{hint}")
    for y, (_, color, _, gap, *_) in enumerate(rows):
        if gap > MOST:
            ax.set_xlim(right=MOST + 0.01)
            ax.plot(MOST, y, ">", color=color)
    for kind, color in colors.items():
        ax.plot([], [], "o", color=color, label=kind)
    if colors:
        legend(ax)


MINUS_VANILLA = (relative, forest, GAP_BY_SIZE, MULTIPLIER_BY_TOKENS, CRITICAL)  # these need vanilla's runs, too
OF_ANALYSES = (layers, before_training, spectrum, heat)


def page_of_panels(path, figure, found):
    """A whole figure: up to three panels in a row, more in two columns, or as figure.mosaic says. If all panels have
    the same lines, one legend serves them."""
    panels, names = figure.panels, "ABCDEFGHI"[: len(figure.panels)]
    columns = len(panels) if len(panels) < 4 else 2
    rows = [names[i : i + columns].ljust(columns, ".") for i in range(0, len(panels), columns)]
    size = (4.5 * columns, 4 * len(rows)) if len(panels) > 1 else (6, 4.4)
    with page(path, figure.size or size) as fig:
        places = fig.subplot_mosaic(figure.mosaic or "\n".join(rows))
        axes = [places[name] for name in names]
        for ax, panel in zip(axes, panels, strict=True):
            ax.set_title(heading(panel, found), loc="left", fontsize=9)
            panel.draw(ax, panel, found)
            if panel.draw is layers and panel.key == panels[0].key and ax is not axes[0]:
                ax.sharey(axes[0])  # so that a reader can compare them
        legends, (handles, labels) = [ax.get_legend() for ax in axes], axes[0].get_legend_handles_labels()
        looks = [[(line.get_label(), line.get_color()) for line in ax.get_legend_handles_labels()[0]] for ax in axes]
        if len(axes) > 1 and all(legends) and all(look == looks[0] for look in looks):
            titles = [old.get_title().get_text() for old in legends]
            title = titles[0] if len(set(titles)) == 1 else None
            fig.legend(handles, labels, loc="outside upper left", ncols=4, title=title, **LEGEND)
            for ax, old, own in zip(axes, legends, titles, strict=True):
                ax.set_title("" if title else own, loc="left", fontsize=9)
                old.remove()
