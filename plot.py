"""Figures and tables of runs, from their metrics.jsonl and from what eval.py and analyze.py write beside it.

    python plot.py relative out/demo/vanilla out/demo/resformer   training loss minus that of the baseline, by seed
    python plot.py loss out/demo/vanilla out/demo/resformer       training loss, and validation loss as markers
    python plot.py compare out/demo/*                             a Markdown table, and the figure of `relative`
    python plot.py eval out/demo/vanilla out/demo/resformer       accuracies with errors and chance, loss by domain
    python plot.py analysis out/demo/vanilla out/demo/resformer   attention concentration, sinks and drains by layer

Runs are named by their folders, and grouped by value_mode. The seeds of a mode become one line with a band: from the
lowest to the highest of two seeds, mean ± standard deviation (n - 1) of three or more. The figure is written into the
folder that holds the runs, or where --out_file says.

How lines look is in looks.py, for all figures of this repository. The paper's figures are in paper/.
"""

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from configurator import UserError, check_ranges, command_line, run_main, setting
from files import read_json, read_records, write_json
from looks import COLORS, DASHES, MARKERS, count_range, legend, page, short_count, style_of, styles_of  # noqa: F401  bench/ takes them from here
from report import markdown, mean_std, plus_minus
from tasks import TASKS

# What is read of the start record and of each step's record in metrics.jsonl.
START = ("value_mode", "seed", "parameters", "kv_bytes_per_token", "data", "block_size", "dtype", "device", "max_steps")
STEP = ("step", "loss", "tokens", "tokens_per_s")
EARLY = 0.1  # share of the steps that may leave the y axis: the first losses would squash all others


@dataclass(frozen=True)
class PlotConfig:
    """Every setting of plot.py."""

    words: tuple[str, ...] = setting(
        (), "what to draw (relative, loss, compare, eval or analysis), then the runs", positional=True
    )
    baseline: str = setting("vanilla", "value_mode that the others are compared with")
    window: int = setting(0, "steps of the moving average; 0 = 100, or 10 if a run has fewer than 200 steps", least=0)
    metric: Literal["acc", "acc_norm"] = setting("acc", "eval: the accuracy to draw, see eval.py")
    out_file: str = setting("", "PNG to write; empty = <what is drawn>.png in the folder that holds the runs")
    json_file: str = setting("", "compare: also write the numbers of the table here")

    def __post_init__(self):
        check_ranges(self)
        if not self.words:
            raise ValueError("say what to draw and of which runs, as in `python plot.py relative out/demo/*`")
        kind = self.words[0]
        known = [*KINDS, *FROM_FILES]
        if kind not in known:
            raise ValueError(f"cannot draw {kind!r}; the first word is one of {', '.join(known)}, the others are runs")
        if not self.words[1:]:
            raise ValueError(f"no runs are named, as in `python plot.py {kind} out/demo/*`")
        if self.json_file and kind != "compare":
            raise ValueError(f"json_file is for the table of compare, and {kind} has none")
        if self.out_file and not self.out_file.endswith(".png"):
            raise ValueError(f"out_file={self.out_file} must end in .png")


# -- runs


@dataclass(frozen=True)
class Curves:
    """What one metrics.jsonl says."""

    name: str  # as the user wrote it
    mode: str
    seed: int
    max_steps: int
    start: dict  # what START lists, from the last start record: a resumed run has several
    steps: dict[str, np.ndarray]  # what STEP lists, for each step: loss in nats per token, tokens so far
    val: dict[int, float]  # step -> validation loss, mean over the domains, nats per token

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
    def progress(self):
        """Where an unfinished run is."""
        text = f"step {self.last}/{self.max_steps}"
        return text + ", not evaluated" if self.last >= self.max_steps else text


def read_run(name):
    """The Curves of a folder or metrics.jsonl; raises UserError if there is none, or no step in it yet."""
    path = Path(name, "metrics.jsonl") if Path(name).is_dir() else Path(name)
    if not path.exists():
        what = "has no metrics.jsonl" if Path(name).exists() else "does not exist"
        raise UserError(f"{name} {what}; name the folder of a run of train.py")
    records = {"start": [], "eval": [], "step": []}
    try:
        for record in read_records(path):
            records[record.get("event", "step")].append(record)
        start = {key: record[key] for record in records["start"] for key in START}
        steps = {key: np.array([record[key] for record in records["step"]], float) for key in STEP}
        val = {record["step"]: record["val_mean"] for record in records["eval"]}
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not a metrics.jsonl of train.py: {type(e).__name__} {e}") from None
    if not start or not records["step"]:
        raise UserError(f"{path} has no steps yet; wait until the run has made some")
    if (np.diff(steps["step"]) != 1).any():
        raise UserError(f"{path} is not a metrics.jsonl of train.py: steps are missing or repeated")
    return Curves(name, start["value_mode"], start["seed"], start["max_steps"], start, steps, val)


def read_runs(names):
    """The Curves of the runs among `names`. Says what is left out: out/demo/* also matches the tables and pictures
    beside the runs. Raises UserError if no run is left."""
    runs = []
    for name in names:
        path = Path(name)
        is_run = (path / "metrics.jsonl").exists() or path.suffix == ".jsonl"
        if is_run or not path.exists():
            runs.append(read_run(name))
        else:
            print(f"note: {name} is left out: it has no metrics.jsonl, so it is not a run")
    if not runs:
        raise UserError(f"none of {', '.join(names)} is a run; name folders that train.py has written")
    for run in runs:
        if not run.finished:
            print(f"note: {run.name} is not finished: {run.progress}")
    return runs


def by_mode(runs, baseline):
    """{value_mode: its runs}, the baseline first; raises UserError if runs of a mode are not seeds of one model."""
    groups = {}
    for run in sorted(runs, key=lambda run: run.mode != baseline):
        for other in groups.setdefault(run.mode, []):
            if other.seed == run.seed:
                raise UserError(f"{other.name} and {run.name} are both {run.mode}, with seed {run.seed}; name one")
            if other.start["parameters"] != run.start["parameters"]:
                raise UserError(f"{other.name} and {run.name} are both {run.mode}, but differ in size; name one")
        groups[run.mode].append(run)
    return groups


def plan_of(run):
    """How a run was trained, in words: two runs can be compared if these are equal."""
    tokens = f"{run.step_tokens:,.0f} tokens, {run.start['block_size']} at a time"
    return f"{run.max_steps} steps of {tokens}, of data {run.start['data']}"


def pair(groups, baseline):
    """{value_mode: [(run, the baseline's run of its seed)]}: both saw the same batches, so their noise cancels.

    Raises UserError if there is no such partner, or it was trained differently.
    """
    partners = {run.seed: run for run in groups.get(baseline, [])}
    pairs = {}
    for mode, runs in groups.items():
        if mode == baseline:
            continue
        for run in runs:
            base = partners.get(run.seed)
            if base is None:
                raise UserError(
                    f"{run.name} ({run.mode}) needs a {baseline} run with its seed, {run.seed}; name that run too, or "
                    f"train it with --value_mode={baseline} and all other settings of {run.name}"
                )
            if plan_of(run) != plan_of(base):
                raise UserError(
                    f"{run.name} was set to {plan_of(run)}, {base.name} to {plan_of(base)}: their losses say nothing "
                    "about the modes"
                )
            pairs.setdefault(mode, []).append((run, base))
    if not pairs:
        raise UserError(f"all runs are {baseline}; name runs of other modes to compare with them")
    return pairs


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
    common = functools.reduce(np.intersect1d, [x for x, _ in curves])
    return common, np.stack([y[np.isin(x, common)] for x, y in curves])


def smooth(x, y, window):
    """Moving average of y over `window` steps, at the first x of each. Source: the authors' plot_relative_loss.py."""
    if window > len(y):
        raise UserError(f"window={window} is longer than the {len(y)} steps that can be drawn; set a smaller --window")
    return x[: len(x) - window + 1], np.convolve(y, np.ones(window) / window, "valid")


def pick_window(runs, asked):
    """Steps of the moving average, as asked for or by the shortest run. Says which, and what it leaves of a run."""
    shortest = min(len(run.steps["step"]) for run in runs)
    window = asked or (100 if shortest >= 200 else 10)
    left = max(0, shortest - window + 1)
    print(f"moving average over {window} steps: a run of {shortest} steps becomes a line of {left} points")
    return window


def band(y):
    """y (seeds, n) -> mean, low and high, (n,) each, and what they are, for the legend."""
    mean = y.mean(0)
    if len(y) == 1:
        return mean, mean, mean, "1 seed"
    if len(y) == 2:
        return mean, y.min(0), y.max(0), "2 seeds, min–max"
    std = y.std(0, ddof=1)
    return mean, mean - std, mean + std, f"{len(y)} seeds ± std"


def draw_line(ax, x, y, label, style, points=None):
    """A line and band of y (seeds, n) over x (n,), and `points` (x, y) as markers, in a style of `style_of`."""
    if not len(x):
        raise UserError(f"the runs of {label} and what they are compared with have no steps in common")
    mean, low, high, seeds = band(y)
    line = dict(style)
    if points is None:
        line["marker"] = ""
    else:
        ax.plot(*points, **style | {"linestyle": ""})
    ax.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=0)
    ax.plot(x, mean, markevery=[], label=f"{label}, {seeds}", **line)  # so that only the legend shows the marker


def fit_axes(ax, zero):
    """End the x axis with the data, and fit the y axis to it, and to 0 if `zero`. The first EARLY steps may leave the y
    axis if they would squash the rest to less than half of it; then it says so."""
    shapes = [line.get_xydata() for line in ax.lines]
    for collection in ax.collections:
        shapes += [path.vertices for path in collection.get_paths()]
    x, y = np.concatenate(shapes).T
    late = y[x >= x.min() + EARLY * np.ptp(x)]
    if zero:
        late = np.append(late, 0.0)
        y = np.append(y, 0.0)
    if np.ptp(y) > 2 * np.ptp(late):
        print(f"the y axis fits what follows the first {EARLY:.0%} of the steps; what comes earlier may leave it")
        y = late
    pad = 0.05 * np.ptp(y) or 1
    ax.set(xlim=(0, x.max()), ylim=(y.min() - pad, y.max() + pad))


def relative_panel(ax, pairs, styles, window, baseline="Transformer"):
    """pairs: {label: [(run, the baseline's run of its seed)]} -> training loss minus the baseline's over steps."""
    for label, both in pairs.items():
        seeds = []
        for two in both:
            x, y = align([(run.steps["step"], run.steps["loss"]) for run in two])
            seeds.append(smooth(x, y[0] - y[1], window))
        draw_line(ax, *align(seeds), label, styles[label])
    fit_axes(ax, zero=True)
    ax.axhline(0, color="0.5", linewidth=0.8, zorder=0)
    label = f"training step s (mean over s to s + {window - 1})"
    ax.set(xlabel=label, ylabel=f"loss minus {baseline}'s (nats per token)")
    legend(ax)


def layer_panel(ax, lines, styles, ylabel, first=1, level=None):
    """lines: {label: (seeds, n)} of a quantity over layers, counted from `first`; level: (height, name) to mark."""
    for label, values in lines.items():
        y = np.array(values, float)  # a layer without the quantity has None, which becomes NaN
        there = np.isfinite(y).all(0)
        x, y = (first + np.arange(y.shape[1]))[there], y[:, there]
        draw_line(ax, x, y, label, styles[label], points=(x, y.mean(0)))
    if level:
        ax.axhline(level[0], color="0.5", linewidth=0.8, linestyle=(0, (3, 2)), zorder=0, label=level[1])
    ax.set(xlabel="layer" if first else "state (0 = embedding)", ylabel=ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)
    legend(ax)


# -- what is drawn of runs


def relative(path, cfg, groups, window):
    """Training loss of each run minus that of the baseline's run of its seed, averaged over seeds."""
    pairs = pair(groups, cfg.baseline)
    with page(path, (6, 4.4)) as paper:
        ax = paper.subplots()
        ax.set_title(size_of(sum(groups.values(), [])), loc="left")
        relative_panel(ax, pairs, {mode: style_of(mode) for mode in pairs}, window, cfg.baseline)


def loss(path, cfg, groups, window):
    """Training loss of each mode; averages stand in the middle of their window, as validation losses do."""
    with page(path, (6, 4.4)) as paper:
        ax = paper.subplots()
        for mode, runs in groups.items():
            x, y = align([smooth(run.steps["step"], run.steps["loss"], window) for run in runs])
            at, val = align([np.array([*run.val.items()]).reshape(-1, 2).T for run in runs])
            draw_line(ax, x + (window - 1) / 2, y, mode, style_of(mode), points=(at, val.mean(0)))
        fit_axes(ax, zero=False)
        ax.set_xlim(0, 1.02 * ax.get_xlim()[1])  # room for the last marker
        label = f"training step (lines: training loss, mean over {window} steps; markers: validation loss)"
        ax.set(xlabel=label, ylabel="loss (nats per token)")
        ax.set_title(size_of(sum(groups.values(), [])), loc="left")
        legend(ax)


def spread(values):
    """Mean, standard deviation (n - 1; None for one value) and n of a list of numbers, or None if it is empty."""
    if not values:
        return None
    mean, std = mean_std(values)
    return {"mean": mean, "std": std, "n": len(values)}


def mode_numbers(groups, baseline):
    """A dict of numbers for each mode; losses are of finished runs only, as those on the way are no results."""
    pairs, numbers = pair(groups, baseline), []
    for mode, runs in groups.items():
        gaps = []
        for run, base in pairs.get(mode, []):
            if run.finished and base.finished:
                gaps.append(run.val[run.last] - base.val[base.last])
        row = {
            "mode": mode,
            "parameters": runs[0].start["parameters"],
            "kv_bytes_per_token": runs[0].start["kv_bytes_per_token"],
            "tokens_per_s": float(np.mean([np.median(run.steps["tokens_per_s"]) for run in runs])),
            "val_loss": spread([run.val[run.last] for run in runs if run.finished]),
            "difference": spread(gaps),
            "runs": len(runs),
            "unfinished": [run.progress for run in runs if not run.finished],
        }
        numbers.append(row)
    return numbers


def mode_cells(row):
    """The texts of a mode's row in the table of `compare`."""
    empty = {"mean": None, "std": None}
    val, gap, late = row["val_loss"] or empty, row["difference"] or empty, row["unfinished"]
    runs = str(row["runs"])
    if late:
        runs = f"{row['runs'] - len(late)} of {row['runs']} ({'; '.join(late)})"
    return [
        row["mode"],
        f"{row['parameters']:,}",
        plus_minus(val["mean"], val["std"]),
        plus_minus(gap["mean"], gap["std"], sign=True),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['kv_bytes_per_token']:,}",
        runs,
    ]


def compare(path, cfg, groups, window):
    """Print the table of modes, write it as JSON if asked to, and draw the relative losses."""
    numbers = mode_numbers(groups, cfg.baseline)
    header = ["mode", "parameters", "val loss", f"vs {cfg.baseline}", "tokens/s", "KV bytes/token", "runs"]
    print(markdown(header, map(mode_cells, numbers)))
    places = {f"{run.start['device']} {run.start['dtype']}" for runs in groups.values() for run in runs}
    print(f"losses: nats per token, of finished runs, ± standard deviation; tokens/s: {', '.join(sorted(places))}")
    if cfg.json_file:
        write_json(cfg.json_file, {"baseline": cfg.baseline, "modes": numbers})
    relative(path, cfg, groups, window)


# -- what is drawn of eval.py's and analyze.py's files


def read_eval(name):
    """(mode, {task: record}, step) of the last checkpoint in a run's eval.json; raises UserError if there is none."""
    path = Path(name, "eval.json") if Path(name).is_dir() else Path(name)
    if not path.exists():
        raise UserError(f"{path} does not exist; make it: `python eval.py {name} --task=table1,table5`")
    found = read_json(path, "a file of eval.py", ("checkpoints",))
    try:
        last = max(found["checkpoints"].values(), key=lambda checkpoint: checkpoint["step"])
        return last["mode"], last["results"], last["step"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not a file of eval.py: {type(e).__name__} {e}") from None


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


def evaluation(path, cfg, names):
    """Draw what eval.py found of several runs: tasks on the left, losses on the right, as far as there are any."""
    found = {name: read_eval(name) for name in names}
    modes = [mode for mode, *_ in found.values()]
    labels = {name: mode if modes.count(mode) == 1 else name for name, (mode, *_) in found.items()}
    styles = styles_of({labels[name]: mode for name, (mode, *_) in found.items()})
    runs = {labels[name]: results for name, (_, results, _) in found.items()}
    tasks = [task for task in TASKS if any(cfg.metric in results.get(task, ()) for results in runs.values())]
    has_loss = any("loss" in results for results in runs.values())
    if not tasks and not has_loss:
        raise UserError(
            f"{names[0]} has no result of a whole task; make one: `python eval.py {names[0]}`, without --limit"
        )
    title = f"step {count_range([step for *_, step in found.values()], '{:,}'.format)}"
    sizes = [read_run(name).start["parameters"] for name in names if Path(name, "metrics.jsonl").exists()]
    if sizes:
        title = f"{count_range(sizes)} parameters, {title}"
    widths = []
    if tasks:
        widths.append(1.2 + 0.8 * len(tasks))
    if has_loss:
        widths.append(4.0)
    with page(path, (sum(widths), 4)) as paper:
        axes = list(np.atleast_1d(paper.subplots(1, len(widths), width_ratios=widths)))
        if has_loss:
            losses_by_domain(axes[-1], runs, styles)
        if tasks:
            accuracies(axes[0], runs, styles, tasks, cfg.metric)
        paper.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, title=title, alignment="left"
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


def read_analysis(folder, make=""):
    """The analysis.json of a folder; raises UserError, which names the command that makes it, if there is none."""
    path = Path(folder, "analysis.json")
    make = make or f"python analyze.py {folder}"
    if not path.exists():
        raise UserError(f"{path} is missing; make it: `{make}`")
    return read_json(path, f"a file of analyze.py (remove it, then `{make}`)", ("layers", "states", "length"))


def analysis_groups(names):
    """{(mode, length, settings but the seed): [(name, what analyze.py found)]}: runs that differ in their seed alone
    are together, all others apart."""
    groups = {}
    for name in dict.fromkeys(names):
        found, config = read_analysis(name), Path(name, "config.json")
        settings = read_json(config, "the config of a model") if config.exists() else {}
        same = name
        if "max_steps" in settings:
            same = json.dumps({key: value for key, value in settings.items() if key not in ("seed", "out_dir")})
        groups.setdefault((found["mode"], found["length"], same), []).append((name, found))
    return groups


def analysis(path, cfg, names):
    """Draw what analyze.py found of several models, by layer. Runs that differ in their seed alone become a band."""
    groups = analysis_groups(names)
    modes = [mode for mode, *_ in groups]
    labels, panels = {}, {panel: {} for panel in ANALYSIS}
    for (mode, length, _), runs in groups.items():
        name, first = runs[0]
        size = f"{short_count(first['parameters'])}, " if "parameters" in first else ""
        label = f"{mode if modes.count(mode) == 1 else name} ({size}length {length:,})"
        labels[label] = mode
        for panel in ANALYSIS:
            _, part, key, over = panel
            try:
                lines = [np.array(found[part][key]["mean"], float) for _, found in runs]
                if over:
                    lines = [line / found[part][over]["mean"] for line, (_, found) in zip(lines, runs, strict=True)]
            except (KeyError, TypeError):
                raise UserError(f"{name}/analysis.json has no {key}; make it again with analyze.py") from None
            panels[panel][label] = lines
    styles = styles_of(labels)
    with page(path, (12.5, 7.5)) as paper:
        for ax, ((title, part, *_), lines) in zip(paper.subplots(2, 3).flat, panels.items(), strict=True):
            layer_panel(ax, lines, styles, title, 0 if part == "states" else 1)


KINDS = {"relative": relative, "loss": loss, "compare": compare}
FROM_FILES = {"eval": evaluation, "analysis": analysis}


def default_file(kind, names):
    """<kind>.png in the folder that holds what is drawn: in out/demo for out/demo/vanilla and out/demo/resformer."""
    folders = []
    for name in names:
        folder = Path(name) if Path(name).is_dir() else Path(name).parent
        is_run = (folder / "metrics.jsonl").exists() or (folder / "analysis.json").exists()
        folders.append(os.path.abspath(folder.parent if is_run else folder))
    return Path(os.path.relpath(os.path.commonpath(folders)), f"{kind}.png")


def main(cfg: PlotConfig):
    kind, *names = cfg.words
    path = cfg.out_file or default_file(kind, names)
    if kind in FROM_FILES:
        FROM_FILES[kind](path, cfg, names)
        return
    runs = read_runs(names)
    path = cfg.out_file or default_file(kind, [run.name for run in runs])
    KINDS[kind](path, cfg, by_mode(runs, cfg.baseline), pick_window(runs, cfg.window))


if __name__ == "__main__":
    run_main(main, command_line(PlotConfig, __doc__))
