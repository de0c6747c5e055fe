"""What the paper claims, as numbers of finished runs, and what ours say of it.

A Claim is a row: a text, the paper's words, a function (found, seed) -> number, and the side of it on which the paper
is. `found` is a found.Found. figures.py lists the claims of each figure. Read next: tables.py.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

import plot
from common.report import mean_interval, with_interval
from common.tasks import TABLE1
from paper.found import NoSeed, NotHere
from paper.runs import INSPECTED, ONE_RATE, Job

LABELS = {
    "vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "neutreno": "NeuTRENO",
    "denseformer": "DenseFormer", "resformer_neutreno": "ResFormer+NeuTRENO", "cross": "Cross Layer Attention",
    "cla2": "CLA2", "gqa2": "GQA2", "gqa8": "GQA8", "svformer_gqa4": "SVFormer+GQA4", "cla2_gqa4": "CLA2+GQA4",
    "resformer_lambda": "ResFormer, λ = 2", "resformer_plus": "Learnable-Plus ResFormer",
    "resformer_learned": "Learnable ResFormer",
}  # fmt: skip
HEADER = ["claim", "the paper", "verdict", "ours", "seeds"]  # three columns of texts, two of numbers
PAPER_ENTROPY = (7.194, 7.204)  # before training: the range of the curve in the paper's Figure 1
VERDICTS = ("confirmed", "contradicted", "undetermined", "one seed: the paper's way", "one seed: the other way")
CONFIRMED, CONTRADICTED, UNDETERMINED, PAPERS_WAY, OTHER_WAY = VERDICTS
LOWER, HIGHER = (-math.inf, 0.0), (0.0, math.inf)  # sides of a number


@dataclass(frozen=True)
class Claim:
    """A row of claims. `what` may hold the paper's units, see Found.in_words."""

    what: str
    paper: str
    value: Callable  # (found, seed) -> number; None where it is undefined
    side: tuple[float, float] | None = None  # the paper's, between two numbers; None: it takes no side


# -- verdicts


def claim_row(claim, found, seeds):
    """{what, paper, seeds, values: of each of them, mean, interval, n, verdict}. interval: half the width of the mean's
    95 % interval over seeds. A value that is undefined or infinite is None."""
    values = {}
    for seed in seeds:
        with suppress(NoSeed):  # a run or a score of this claim has fewer seeds
            value = claim.value(found, seed)
            values[seed] = None if value is None or not math.isfinite(value) else float(value)
    known = [value for value in values.values() if value is not None]
    mean, interval = mean_interval(known)
    row = {"what": found.in_words(claim.what), "paper": claim.paper, "seeds": list(values)}
    row |= {"values": list(values.values()), "mean": mean, "interval": interval, "n": len(known)}
    return row | {"verdict": verdict(claim.side, row)}


def verdict(side, row):
    """CONFIRMED if the whole interval is on the paper's side, CONTRADICTED if all of it is on the other side. Equal
    values decide nothing, because their spread says nothing. One seed only points to a side."""
    if side is None:
        return ""
    mean, interval = row["mean"], row["interval"]
    if not row["values"] or None in row["values"] or interval == 0:
        return UNDETERMINED
    low, high = side
    if interval is None:
        return PAPERS_WAY if low < mean < high else OTHER_WAY
    if low < mean - interval and mean + interval < high:
        return CONFIRMED
    return CONTRADICTED if mean + interval < low or mean - interval > high else UNDETERMINED


def claim_rows(figure, found):
    """The rows of a figure's claims, without those on runs that the scale does not make."""
    seeds = max((found.seeds(job) for job in figure.jobs), key=len, default=())
    rows = []
    for claim in figure.claims:
        with suppress(NotHere):
            rows.append(claim_row(claim, found, seeds))
    return rows


def claim_cells(row):
    """The texts of a row in a table under HEADER."""
    n = str(row["n"])
    if row["n"] < len(row["values"]):
        n += f" of {len(row['values'])}"
    is_difference = "−" in row["what"]
    return [row["what"], row["paper"], row["verdict"], with_interval(row["mean"], row["interval"], is_difference), n]


def tested(figures):
    """The rows that have a verdict and a value. A comparison in several figures has the same values and counts once."""
    rows = {}
    for row in (row for record in figures.values() for row in record["rows"]):
        if row["verdict"] and row["n"]:
            rows.setdefault(tuple(row["values"]), row)
    return list(rows.values())


def tally(figures):
    """Sentences that count the verdicts."""
    counts = Counter(row["verdict"] for row in tested(figures))
    yes, no, unknown, same, other = (counts[word] for word in VERDICTS)
    return (
        f"These runs test {counts.total()} of the paper's claims, {yes + no + unknown} of them with several "
        f"seeds: {yes} confirmed here, {no} contradicted, {unknown} undetermined. "
        f"With one seed: {same} the paper's way, {other} the other way."
    )


# -- losses


def loss_gap(low, high):
    """A value (found, seed) -> validation loss of Job `low` minus that of Job `high`."""
    return lambda found, seed: found.loss(low, seed) - found.loss(high, seed)


def gap_change(a, b):
    """A value: Job a's loss minus its baseline's, minus the same for Job b."""
    gap_a, gap_b = loss_gap(a, a.baseline), loss_gap(b, b.baseline)
    return lambda found, seed: gap_a(found, seed) - gap_b(found, seed)


def lower_loss(low, high, what, paper="lower"):
    """The claim that Job `low` ends at a lower validation loss than Job `high`."""
    return Claim(f"{what}, validation loss", paper, loss_gap(low, high), LOWER)


def mode_claims(paper, *pairs):
    """Claims from one sentence of the paper, on "lower higher": two modes at 82M and length 2,048."""
    modes = [pair.split() for pair in pairs]
    return tuple(lower_loss(Job(low), Job(high), f"{low} − {high}", paper) for low, high in modes)


def mean_losses(found, jobs):
    """The losses of a mode's Jobs, one for each rate: means over the seeds that all rates have, often a single one."""
    shared = found.common_seeds(*jobs)
    return [np.mean([found.loss(job, seed) for seed in shared]) for job in jobs]


def best_rate(found, jobs):
    """The one of a mode's Jobs with the lowest of `mean_losses`."""
    return jobs[np.argmin(mean_losses(found, jobs))]


def best_pair(found, jobs):
    """A mode's Job at its best rate, and vanilla's at its own. jobs: the mode's, one for each rate."""
    return best_rate(found, jobs), best_rate(found, [job.baseline for job in jobs])


def gap_at_best(jobs):
    """A value: the loss of a mode minus vanilla's, each at its best rate."""
    return lambda found, seed: loss_gap(*best_pair(found, jobs))(found, seed)


# -- parameters and tokens saved


def semi_log(points):
    """(a, c) of the line L = a + c ln N through points [(parameters N, loss L)], least squares."""
    n, losses = np.array(points, float).T
    c, a = np.polyfit(np.log(n), losses, 1)
    return a, c


def saving(points, others):
    """The share of parameters that `points` [(N, L)] save at the losses of `others`, mean over their N: the horizontal
    gap of two lines over ln N. Below 0, they need more. On the paper's Table 5 this gives its 10.4 %. None where it is
    undefined: losses that do not fall with N, or a gap wider than all sizes span."""
    (height, slope), (other_height, other_slope) = semi_log(points), semi_log(others)
    if slope >= 0 or other_slope >= 0:
        return None
    logs, log_sizes = np.log([n for n, _ in others]), np.log([n for n, _ in points + others])
    gaps = (other_height + other_slope * logs - height) / slope - logs  # ln N at which each is at a loss
    return None if abs(gaps).max() > np.ptp(log_sizes) else np.mean(1 - np.exp(gaps))


def saved_parameters(mode, *sizes):
    """A value: the share of parameters that `mode` saves at vanilla's losses."""

    def value(found, seed):
        jobs = [Job(mode, size) for size in sizes if size in found.scale.sizes]
        points = [(found.parameters(job), found.loss(job, seed)) for job in jobs]
        others = [(found.parameters(job.baseline), found.loss(job.baseline, seed)) for job in jobs]
        return saving(points, others)

    return value


def reached(curve, loss):
    """The tokens after which curve (tokens, losses) first is at a loss, on a straight line between evaluations. None if
    it never is, or already is at the first evaluation."""
    x, y = (np.array(part, float) for part in curve)
    below = np.flatnonzero(y <= loss)
    if not len(below) or below[0] == 0:
        return None
    i = below[0]
    return float(np.interp(loss, [y[i], y[i - 1]], [x[i], x[i - 1]]))


def tokens_saved(curve, target):
    """The share of tokens that curve (tokens, losses) saves on the way to the last loss of `target`. If it ends above
    that: minus the share that it takes beyond what `target` takes to its own last loss."""
    (tokens, losses), (target_tokens, target_losses) = curve, target
    if losses[-1] <= target_losses[-1]:
        at = reached(curve, target_losses[-1])
        return None if at is None else 1 - at / target_tokens[-1]
    at = reached(target, losses[-1])
    return None if at is None else 1 - tokens[-1] / at


def saved_tokens(found, seed):
    """The share of tokens that ResFormer saves at the largest size."""
    return tokens_saved(*(found.validation(Job(mode, "468M"), seed) for mode in ("resformer", "vanilla")))


# -- critical points


def critical_point(x, y, window):
    """(step, extrapolated?) where a relative loss y over steps x rises through 0 for the last time.

    If the mean of the last tenth of y is at least 0, this is the last upward crossing of the moving average over
    `window` points, in the middle of its window, or 0 if there is none. Else a line through the last tenth says where y
    will reach 0. It never does if the slope is not above two standard errors; these take the noise of steps as
    independent. Sources: the paper's Figure 14, and the authors' plot_relative_loss.py.
    """
    tail = slice(-max(3, len(x) // 10), None)
    if y[tail].mean() >= 0:
        weights = np.ones(window) / window
        middle, means = (np.convolve(part, weights, "valid") for part in (x, y))
        rises = np.flatnonzero((means[:-1] < 0) & (means[1:] >= 0))
        if not len(rises):
            return 0.0, False
        i = rises[-1]
        return float(np.interp(0, means[i : i + 2], middle[i : i + 2])), False
    (slope, height), covariance = np.polyfit(x[tail], y[tail], 1, cov=True)
    if slope <= 2 * math.sqrt(covariance[0, 0]):
        return math.inf, True
    return max(float(x[-1]), float(-height / slope)), True


def critical(found, job, seed):
    """critical_point of a Job's relative loss, a pair (step, extrapolated?)."""
    two = [found.steps(of, seed) for of in (job, job.baseline)]
    x, y = plot.align([(steps["step"], steps["loss"]) for steps in two])
    every = found.scale.every  # each loss is the mean of so many steps, and x is the last of them
    return critical_point(x - (every - 1) / 2, y[0] - y[1], found.scale.window // every)


def later_when_longer(found, seed):
    """Of the pairs of lengths whose critical points differ, the share in which the longer one has the later. None if no
    length has one that is finite and above 0, or if all are equal."""
    points = [critical(found, Job("svformer", length=n, lr=ONE_RATE), seed)[0] for n in found.scale.lengths]
    if not any(0 < point < math.inf for point in points):
        return None
    in_order = [a < b for a, b in combinations(points, 2) if a != b]
    return np.mean(in_order) if in_order else None


# -- what analyze.py measured: quantities (job, found, seed) -> number


def of_layers(key, reduce):
    """A quantity: `reduce` of what a run's layers or states have under `key`, see found.means_of."""
    return lambda job, found, seed: reduce([x for x in found.by_layer(job, seed, key) if x is not None])


DEEP_ENTROPY = of_layers("entropy", lambda x: np.mean(x[len(x) // 2 :]))  # in the deeper half of the layers
MOST_IMPORTANCE = of_layers("first", max)  # these three are the first token's extremes
LEAST_VALUE = of_layers("value_norm", min)
MOST_HIDDEN = of_layers("hidden_norm", max)
TOP_1 = of_layers("top_1", np.mean)
EQ4, EQ6 = of_layers("eq4", np.mean), of_layers("eq6", np.mean)
LOG_EIGENVALUE = of_layers("value_largest", lambda x: np.log(x).mean())


def importance_ratio(job, found, seed):
    """The first token's importance over the mean of the next 99 tokens', the greatest over layers. Few queries see
    later tokens."""
    importance = found.arrays(job, seed)["importance"][:, :100]  # (layers, tokens)
    return (importance[:, 0] / importance[:, 1:].mean(axis=1)).max()


def minus(quantity, a, b):
    """A value: the quantity of Job a minus that of Job b."""
    return lambda found, seed: quantity(a, found, seed) - quantity(b, found, seed)


def over_vanilla(mode, size, what, paper, quantity, side):
    """The claim on how a quantity of `mode` differs from vanilla's."""
    value = minus(quantity, Job(mode, size), Job("vanilla", size))
    return Claim(f"{LABELS[mode]} − Transformer at [size {size}]: {what}", paper, value, side)


def more_entropy(mode, size):
    """The claim that `mode` concentrates its attention less than vanilla."""
    what = "entropy in the deeper half of the layers (nats)"
    return over_vanilla(mode, size, what, "higher", DEEP_ENTROPY, HIGHER)


def fewer_extremes(size):
    """Claims that the first token stands out less in ResFormer than in vanilla."""
    for what, paper, quantity, side in (
        ("importance over layers", "lower", MOST_IMPORTANCE, LOWER),
        ("value norm over layers, relative to other tokens", "higher: no value-state drain", LEAST_VALUE, HIGHER),
        ("hidden norm over states, relative to other tokens", "lower: no hidden-state peak", MOST_HIDDEN, LOWER),
    ):
        extreme = "least" if quantity is LEAST_VALUE else "greatest"
        yield over_vanilla("resformer", size, f"first token's {extreme} {what}", paper, quantity, side)


def start_token(mode):
    """Claims on how far the first token stands out. The paper's A.2 bounds it for ResFormer; we show vanilla to
    compare."""
    for what, paper, quantity, side in (
        ("greatest importance", "below 10", importance_ratio, (-math.inf, 10.0)),
        ("least value norm", "above 0.5", LEAST_VALUE, (0.5, math.inf)),
        ("greatest hidden norm", "below 3", MOST_HIDDEN, (-math.inf, 3.0)),
    ):
        what = f"{LABELS[mode]}: {what} of the first token, relative to other tokens"
        if mode != "resformer":
            paper, side = "", None
        yield Claim(what, paper, partial(quantity, Job(mode, INSPECTED)), side)


# -- what eval.py scored


def accuracies(found, length):
    """({(mode, seed): {task: accuracy}}, the tasks that all of these have) at a length, for Table 1."""
    scored = {}
    for job in (Job("vanilla", length=length), Job("resformer", length=length)):
        for seed in found.seeds(job):
            records = {task: found.evaluation(job, seed, task) for task in TABLE1}
            scored[job.mode, seed] = {task: record["acc"] for task, record in records.items() if record}
    scored = {key: tasks for key, tasks in scored.items() if tasks}
    return scored, [task for task in TABLE1 if scored and all(task in tasks for tasks in scored.values())]


def accuracy_gap(length):
    """A value: ResFormer's accuracy minus vanilla's, mean over the tasks that all are scored on."""

    def value(found, seed):
        scored, common = accuracies(found, length)
        if not {("resformer", seed), ("vanilla", seed)} <= scored.keys():
            raise NoSeed(f"no task is scored with seed {seed}")
        return np.mean([scored["resformer", seed][task] - scored["vanilla", seed][task] for task in common])

    return value
