"""What the paper claims, as numbers of finished runs, and what ours say of it.

A Claim is a row of data: two runs, a quantity of them, and the side on which the paper sees the difference. One
function judges all of them. `found` is a found.Found. figures.py lists the claims of each figure. Read next: tables.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

import plot
from common.report import with_interval
from common.statistics import mean_interval
from common.tasks import TABLE1
from paper.scales import Job

HEADER = ["claim", "paper", "here", "ours", "n"]  # three columns of texts, two of numbers
LOWER, HIGHER = (-math.inf, 0.0), (0.0, math.inf)  # sides of a number


# -- claims and verdicts


def loss(job, found, seed):
    """The validation loss at the end."""
    return found.final_loss(job, seed)


def gap(job, found, seed):
    """That loss minus vanilla's."""
    return found.final_loss(job, seed) - found.final_loss(job.baseline, seed)


@dataclass(frozen=True)
class Claim:
    """The quantity of Job a, minus that of Job b if there is one, is on the paper's side."""

    a: Job
    b: Job | None
    paper: str = ""  # the paper's word or number
    side: tuple[float, float] | None = None  # the paper's, between two numbers; None: it takes no side
    value: Callable = loss  # (job, found, seed) -> number, None where it is undefined
    what: str = ""  # the value in words


def claim_row(claim, found):
    """{what, paper, seeds, values: of each of them, mean, interval: half of its 95 %, n, verdict}. A value that is
    undefined or infinite is None."""
    jobs, values = [job for job in (claim.a, claim.b) if job], []
    for seed in found.seeds:
        numbers = [claim.value(job, found, seed) for job in jobs]
        is_known = all(number is not None and math.isfinite(number) for number in numbers)
        values.append(float(numbers[0] - sum(numbers[1:])) if is_known else None)
    # seeds pair two runs on the same batches, so their noise cancels in each value before we average
    known = [value for value in values if value is not None]
    mean, interval = mean_interval(known)
    row = {"what": found.names_of(claim.a, claim.b) + claim.what, "paper": claim.paper, "seeds": list(found.seeds)}
    row |= {"values": values, "mean": mean, "interval": interval, "n": len(known)}
    return row | {"verdict": verdict(claim.side, row)}


def verdict(side, row):
    """Whether the whole interval is on the paper's side or on the other one. Equal values decide nothing, because their
    spread says nothing. One seed only points to a side."""
    if side is None:
        return ""
    mean, interval, (low, high) = row["mean"], row["interval"], side
    if None in row["values"] or interval == 0:
        return "cannot tell"
    if interval is None:
        return "same side?" if low < mean < high else "other side?"
    if low < mean - interval and mean + interval < high:
        return "same side"
    return "other side" if mean + interval < low or mean - interval > high else "cannot tell"


def claim_cells(row):
    """The texts of a row in a table under HEADER."""
    n = f"{row['n']}" if row["n"] == len(row["values"]) else f"{row['n']} of {len(row['values'])}"
    ours = with_interval(row["mean"], row["interval"], "−" in row["what"])
    return [row["what"], row["paper"], row["verdict"], ours, n]


# -- quantities: functions (job, found, seed) -> number. First parameters and tokens saved


def saving(points, others):
    """The share of parameters that `points` [(N, L)] save at the losses of `others`, mean over their N: the horizontal
    gap of two lines over ln N, least squares. Below 0, they need more. On the paper's Table 5 this gives its 10.4 %.
    None where it is undefined: losses that do not fall with N, or a gap wider than all sizes span."""
    lines = [np.polyfit(np.log(n), losses, 1) for n, losses in (np.transpose(points), np.transpose(others))]
    (slope, height), other = lines
    if slope >= 0 or other[0] >= 0:
        return None
    logs, log_sizes = np.log([n for n, _ in others]), np.log([n for n, _ in points + others])
    # ln of how many times the parameters `points` need for each loss of `others`
    gaps = (np.polyval(other, logs) - height) / slope - logs
    return None if abs(gaps).max() > np.ptp(log_sizes) else np.mean(1 - np.exp(gaps))


def saved_parameters(*sizes):
    """A quantity: the share of parameters that a mode saves at vanilla's losses."""

    def quantity(job, found, seed):
        jobs = [replace(job, size=size) for size in sizes]
        bases = [job.baseline for job in jobs]
        points = ([(found.parameters(job), found.final_loss(job, seed)) for job in side] for side in (jobs, bases))
        return saving(*points)

    return quantity


def tokens_saved(curve, target):
    """The share of tokens that curve (tokens, losses) saves on the way to the last loss of `target`; if it ends above
    that, minus the share by which it is late. None if the better one is there at its first evaluation."""
    better, worse = (curve, target) if curve[1][-1] <= target[1][-1] else (target, curve)
    (x, y), (end, loss) = better, (worse[0][-1], worse[1][-1])
    i = next(i for i in range(len(y)) if y[i] <= loss)
    if i == 0:
        return None
    at = np.interp(loss, [y[i], y[i - 1]], [x[i], x[i - 1]])  # on a straight line between evaluations
    return 1 - at / end if better is curve else 1 - end / at


def saved_tokens(job, found, seed):
    return tokens_saved(found.validation(job, seed), found.validation(job.baseline, seed))


# -- critical points


def critical_point(x, y, window):
    """The step where a relative loss y over steps x rises through 0 for the last time: the crossing of its moving
    average over `window` points, in the middle of the window; 0 if there is none. If the mean of the last tenth of y is
    below 0, the run ended too early: then the step at which the line through that tenth, least squares, would cross,
    infinity if it falls. As in the paper's Figure 14 and the authors' plot_relative_loss.py."""
    last = slice(-max(3, len(x) // 10), None)
    if y[last].mean() < 0:
        slope, height = np.polyfit(x[last], y[last], 1)
        return max(float(x[-1]), float(-height / slope)) if slope > 0 else math.inf
    # the loss of one step is noisy, so we look where its moving average crosses
    middle, means = (np.convolve(part, np.ones(window) / window, "valid") for part in (x, y))
    rises = np.flatnonzero((means[:-1] < 0) & (means[1:] >= 0))
    return float(np.interp(0, means[rises[-1] :][:2], middle[rises[-1] :][:2])) if len(rises) else 0.0


def critical(job, found, seed):
    """critical_point of a Job's relative loss."""
    two = [found.run(one, seed).steps for one in (job, job.baseline)]
    x, y = plot.align([(steps["step"], steps["loss"]) for steps in two])
    return critical_point(x, y[0] - y[1], found.scale.window)


def later_when_longer(job, found, seed):
    """Of the pairs of lengths whose critical points differ, the share in which the longer one has the later. None if no
    length has one that is finite and above 0, or if all are equal."""
    points = [critical(replace(job, length=n), found, seed) for n in found.scale.lengths]
    in_order = [a < b for a, b in combinations(points, 2) if a != b]
    return np.mean(in_order) if in_order and any(0 < point < math.inf for point in points) else None


# -- what analyze.py measured


def of_layers(key, reduce):
    """A quantity: `reduce` of what a run's layers or states have under `key`, see Found.by_layer."""
    return lambda job, found, seed: reduce([x for x in found.by_layer(job, seed, key) if x is not None])


LEAST_VALUE, MOST_HIDDEN = of_layers("value_norm", min), of_layers("hidden_norm", max)  # the first token's extremes
ENTROPY_MINUS_UNIFORM = of_layers("entropy_minus_uniform", np.mean)

ENTROPY = "entropy in the deeper layers"
# no sink, no drain and no peak at the first token
EXTREMES = ("first token's importance", "first token's value", "first token's hidden state")
MEASURED = {  # how the paper sees a value residual beside vanilla: its word, its side, the quantity
    ENTROPY: ("higher", HIGHER, of_layers("entropy", lambda x: np.mean(x[len(x) // 2 :]))),
    EXTREMES[0]: ("lower", LOWER, of_layers("first", max)),
    EXTREMES[1]: ("higher", HIGHER, LEAST_VALUE),
    EXTREMES[2]: ("lower", LOWER, MOST_HIDDEN),
    "largest importance": ("lower", LOWER, of_layers("top_1", np.mean)),
    "ln of a layer's largest eigenvalue": ("larger", HIGHER, of_layers("value_largest", lambda x: np.log(x).mean())),
}


def over_vanilla(mode, what, size):
    """The claim on how a quantity of MEASURED differs from vanilla's."""
    return Claim(Job(mode, size), Job("vanilla", size), *MEASURED[what], f": {what}")


def eq4_minus_eq6(job, found, seed):
    eq4, eq6 = (of_layers(key, np.mean)(job, found, seed) for key in ("eq4", "eq6"))
    return eq4 - eq6


def importance_ratio(job, found, seed):
    """The first token's importance over the mean of the next 99's, which many queries see; the greatest over layers."""
    importance = found.arrays(job, seed)["importance"][:, :100]  # (layers, tokens)
    return (importance[:, 0] / importance[:, 1:].mean(axis=1)).max()


START_TOKEN = {  # how far the first token stands out of the others; the paper's A.2 bounds it for ResFormer
    ": importance": ("below 10", (-math.inf, 10.0), importance_ratio),
    ": value norm": ("above 0.5", (0.5, math.inf), LEAST_VALUE),
    ": hidden norm": ("below 3", (-math.inf, 3.0), MOST_HIDDEN),
}


# -- what eval.py scored


def accuracies(job, found, seed):
    """A run's accuracies on the tasks of Table 1, NaN where one is not scored."""
    records = [found.evaluation(job, seed, task) for task in TABLE1]
    return np.array([record["acc"] if record else math.nan for record in records])


def accuracy_gap(job, found, seed):
    """A mode's accuracy minus vanilla's, mean over the tasks that both are scored on."""
    gaps = accuracies(job, found, seed) - accuracies(job.baseline, found, seed)
    # some tasks have texts that are too long for a small model
    return None if np.isnan(gaps).all() else np.nanmean(gaps)
