"""How we draw each kind of panel of the paper's figures, from what `found` (a found.Found) reads of the runs.

A panel is a figures.Panel. Titles and labels say what is really drawn: parameters, length and rate at this scale. Bars
and bands are 95 % intervals. Read next: figures.py.
"""

import math

import numpy as np

import plot
from analyze import uniform_entropy
from common.runs import read_analysis
from common.statistics import mean_interval
from configurator import UserError
from paper.claims import critical
from plot import COLORS, LEGEND, LEVEL, count_range, legend, page, short_count, style_of, styles_of

UNIFORM = "uniform attention"
LOSS = "validation loss (nats per token)"
QUANTITIES = {
    "entropy": "entropy of token importance (nats)", "first": "importance of the first token",
    "value_norm_first": "norm of the first token's value",
    "hidden_norm_first": "norm of the first token's hidden state",
    "hidden_similarity": "token similarity", "value_largest": "largest eigenvalue",
    "eq6": "cosine similarity to Eq 2", "top_1%": "importance",
}  # fmt: skip


def heading(panel, found):
    """A panel's title, and the size of its runs."""
    if not panel.jobs:
        return panel.title
    title = found.in_words(panel.title, panel.jobs[-1])
    lengths = count_range([found.scale.lengths[job.length][0] for job in panel.jobs], "{:,}".format)
    size = f"{count_range([found.parameters(job) for job in panel.jobs])} parameters, length {lengths}"
    return f"{title}\n{size}".strip()


# -- kinds of panels: functions (ax, panel, found)


def relative(ax, panel, found):
    """Training loss over tokens, minus vanilla's with the same seed, from a share `key` of the tokens on."""
    pairs, modes = {}, {}
    for label, job in found.labels(panel.lines):
        pairs[label] = [[found.run(one, seed) for one in (job, job.baseline)] for seed in found.seeds]
        modes[label] = job.mode
    plot.relative_panel(ax, pairs, styles_of(modes), since=panel.key or plot.SHOWN)


def layers(ax, panel, found):
    """A quantity of the analysis over layers, of our runs and of public models."""
    lines, modes, key = {}, {}, panel.key
    for label, job in found.labels(panel.lines):
        key = panel.key[label] if isinstance(panel.key, dict) else panel.key
        lines[label], modes[label] = [found.by_layer(job, seed, key) for seed in found.seeds], job.mode
    lengths = {found.analysis(job, found.seeds[0])["length"] for job in panel.jobs}
    for name, folder in found.public.items() if panel.has_public else ():
        analysis = read_analysis(folder)
        lines[name], modes[name] = found.means(analysis, key), name  # a colour for each
        lengths.add(analysis["length"])
    if not lines:
        raise UserError("none of the public models has been analysed; the notes above say why")
    level = {}
    if len(lengths) == 1:  # else there is no one level
        (T,) = lengths
        level["entropy"] = uniform_entropy(T), UNIFORM
        level["first"] = sum(1 / n for n in range(1, 1 + T)) / T, UNIFORM
    plot.layer_panel(ax, lines, styles_of(modes), QUANTITIES[key], 0 if key.startswith("hidden") else 1, level.get(key))


def before_training(ax, panel, found):
    """The entropy of a model without training, and on the right axis how alike its hidden states are."""
    (job,), seed = panel.jobs, found.seeds[0]
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
        y = np.array([found.arrays(job, seed)["value_spectrum"][0] for seed in found.seeds])  # (seeds, rank)
        plot.draw_line(ax, 1 + np.arange(y.shape[1]), np.maximum(y, 1e-12), label, styles[label])
        top = max(top, y.max())
    ax.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue", xscale="log", yscale="log", ylim=(top / 1e6, top * 2))
    legend(ax)


def heat(ax, panel, found):
    """One quantity over tokens and layers, the models one above the other on one logarithmic colour scale."""
    maps = []  # (layers, positions) of each model, mean over its seeds
    for job in panel.jobs:
        maps.append(np.mean([found.arrays(job, seed)[panel.key][:, :100] for seed in found.seeds], 0))
    rows, height = np.concatenate(maps), len(maps[0])
    floor = max(rows[rows > 0].min(), rows.max() / 1e4)
    image = ax.imshow(np.maximum(rows, floor), norm="log", aspect="auto", interpolation="nearest")
    ends = height * np.arange(len(maps)) - 0.5  # rows count from 0, and each is centred on its number
    ax.hlines(ends[1:], *ax.get_xlim(), color="white")
    ax.set_yticks(ends + height / 2, [label for label, _ in found.labels(panel.lines)])
    ax.set(xlabel="token position, from 0", ylabel=f"{height} rows a model, the input side on top")
    ax.figure.colorbar(image, ax=ax, location="bottom", aspect=40, label=panel.key.replace("_", " "))


# -- points over another axis


def draw_points(ax, panel, found, points_of, xlabel, ylabel):
    """A line for each label, with bars and, as ticks, its seeds. points_of: function (job, found) -> [(x, y, half of
    its 95 % interval or None, numbers of its seeds)]."""
    lines = {}  # {label: (mode, points)}
    for label, job in found.labels(panel.lines):
        lines.setdefault(label, (job.mode, []))[1].extend(points_of(job, found))
    styles = styles_of({label: mode for label, (mode, _) in lines.items()})
    for label, (_, marks) in lines.items():
        style = styles[label]
        ax.plot([x for x, *_ in marks], [y for _, y, *_ in marks], **style)
        for x, y, bar, seeds in marks:
            ax.errorbar(x, y, yerr=bar, **style)
            ax.plot([x] * len(seeds), seeds, "_", color=style["color"], alpha=0.6)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.xaxis.set_major_formatter(lambda x, _: short_count(x))
    ax.margins(x=0.08)
    name_ends(ax, {label: marks for label, (_, marks) in lines.items() if marks}, styles)


def logarithmic(ax, ticks, text=short_count):
    ax.set_xscale("log")
    ax.set_xticks(ticks)
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda x, _: text(x))


def name_ends(ax, lines, styles):
    """Write the name of each line at its right end, moved apart."""
    last, (low, high) = -math.inf, ax.get_ylim()
    for label, marks in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        _, y, *_ = marks[-1]
        last = max(y, last + 0.065 * (high - low))
        look = {"color": styles[label]["color"], "bbox": {"fc": "w", "ec": "w", "pad": 0}}
        ax.text(1.02, last, label, transform=ax.get_yaxis_transform(), va="center", fontsize=8, **look)


def along(ax, panel, found):
    """Validation losses along training."""

    def points_of(job, found):
        x, y = plot.align([found.validation(job, seed) for seed in found.seeds])
        return [(tokens, np.mean(losses), None, losses) for tokens, losses in zip(x, y.T, strict=True)]

    draw_points(ax, panel, found, points_of, "training tokens", LOSS)


def at_the_end(job, found):
    return [(found.parameters(job), np.mean(found.final_losses(job)), None, found.final_losses(job))]


def by_size(ax, panel, found):
    """Losses over parameters, and the lines over ln N by which claims.saving measures; they leave out the smallest
    model, which is nearly all embeddings."""
    draw_points(ax, panel, found, at_the_end, "parameters", LOSS)
    for mode in dict.fromkeys(job.mode for job in panel.jobs):
        jobs = [job for job in panel.jobs if job.mode == mode and job.size != "2M"]
        n = np.array([found.parameters(job) for job in jobs])
        line = np.polyfit(np.log(n), [np.mean(found.final_losses(job)) for job in jobs], 1)
        ax.plot(n, np.polyval(line, np.log(n)), color=style_of(mode)["color"], linewidth=0.8, linestyle=":")
    logarithmic(ax, [found.parameters(job) for job in panel.jobs if job.mode == panel.jobs[0].mode])


def critical_point(job, found):
    """The table beside counts the seeds that have none. Beyond the last step it is a prediction."""
    every = (critical(job, found, seed) for seed in found.seeds)
    steps = [step for step in every if 0 < step < math.inf]
    return [(found.scale.lengths[job.length][0], *mean_interval(steps), steps)] if steps else []


def critical_points(ax, panel, found):
    """Critical points by length; those that all seeds have reached are filled."""
    draw_points(ax, panel, found, critical_point, "sequence length (tokens)", "critical point (step)")
    for job in panel.jobs:
        style = style_of(job.mode)
        for x, y, _, steps in critical_point(job, found):
            if max(steps) <= found.scale.steps:
                ax.plot(x, y, **style | {"markerfacecolor": style["color"]})
    logarithmic(ax, [found.scale.lengths[job.length][0] for job in panel.jobs], "{:,.0f}".format)


MINUS_VANILLA = (relative, critical_points)  # these need vanilla's runs, too
OF_ANALYSES = (layers, before_training, spectrum, heat)


def page_of_panels(path, figure, found):
    """A whole figure: up to three panels in a row, more in two columns. If all panels have the same lines, one legend
    serves them."""
    panels = figure.panels
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    with page(path, (4.5 * columns, 4 * rows) if len(panels) > 1 else (6, 4.4)) as fig:
        axes = [fig.add_subplot(rows, columns, n) for n in range(1, 1 + len(panels))]
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
