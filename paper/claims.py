"""What the paper claims, as numbers computed from finished runs, and what ours say of it.

A Claim is a function (found, seed) -> number, with the paper's bounds; `found` is a found.Found. `claim_rows` computes
the claims of a figure with every seed and gives verdicts, `claim_cells` puts them in words, `tally` counts them.
figures.py lists the claims of each figure. Read next: figures.py.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import combinations

import numpy as np

import plot
from paper.found import NoSeed
from paper.runs import INSPECTED, ONE_RATE, SCALES, Job
from report import mean_interval, with_interval
from tasks import TABLE1

LABELS = {
    "vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "neutreno": "NeuTRENO",
    "denseformer": "DenseFormer", "resformer_neutreno": "ResFormer+NeuTRENO", "cross": "Cross Layer Attention",
    "cla2": "CLA2", "gqa2": "GQA2", "gqa8": "GQA8", "svformer_gqa4": "SVFormer+GQA4", "cla2_gqa4": "CLA2+GQA4",
    "resformer_lambda": "ResFormer, λ = 2", "resformer_plus": "Learnable-Plus ResFormer",
    "resformer_learned": "Learnable ResFormer", "resformer_sparse": "Sparse ResFormer",
    "share_v2": "shared values of 2 layers", "share_k2": "shared keys of 2 layers", "share_q": "Layer 1's queries",
    "share_k": "Layer 1's keys", "svformer_2anchors": "SVFormer, 2 anchors", "svformer_3anchors": "SVFormer, 3 anchors",
    "svformer_4anchors": "SVFormer, 4 anchors",
}  # fmt: skip
LENGTHS = tuple(SCALES["paper"].lengths)
HEADER = ["claim", "the paper", "verdict", "ours", "seeds"]  # three columns of texts, two of numbers
CONFIRMED, CONTRADICTED, UNDETERMINED = "confirmed", "contradicted", "undetermined"
PAPERS_WAY, OTHER_WAY = "one seed: the paper's way", "one seed: the other way"
PAPER_ENTROPY = (7.194, 7.204)  # before training: the range of the curve in the paper's Figure 1


@dataclasses.dataclass(frozen=True)
class Claim:
    """A number that says whether our runs go the paper's way. `what` may hold the paper's units in brackets, see
    Found.in_words. value(found, seed) -> float, or None if undefined; the paper's way is `above` a number, `below` one,
    both, or neither where the paper only gives a value. `jobs`: the two runs of a claim that is about their validation
    losses alone, the lower one first. `needs`: of any other claim, the runs that some scale does not make. A scale
    without one of `jobs` or `needs` leaves the claim out."""

    what: str
    paper: str
    value: Callable
    above: float = -math.inf
    below: float = math.inf
    jobs: tuple[Job, ...] = ()
    needs: tuple[Job, ...] = ()


# -- losses


def loss_gap(low, high):
    """A value (found, seed) -> validation loss of Job `low` minus that of Job `high`."""
    return lambda found, seed: found.loss(low, seed) - found.loss(high, seed)


def gaps_to_vanilla(found, job):
    """`loss_gap` of a Job and its baseline with each of the seeds that both have."""
    return [loss_gap(job, job.baseline)(found, seed) for seed in found.common_seeds(job, job.baseline)]


def gap_in_words(found, job):
    """Mean and 95 % interval of `gaps_to_vanilla`, with a * if a run was on another processor than vanilla's."""
    words = with_interval(*mean_interval(gaps_to_vanilla(found, job)), sign=True)
    for seed in found.common_seeds(job, job.baseline):
        if found.record(job, seed)["processor"] != found.record(job.baseline, seed)["processor"]:
            return f"{words} *"
    return words


def lower_loss(low, high, what, paper="lower"):
    """The claim that Job `low` ends at a lower validation loss than Job `high`."""
    return Claim(f"{what}, validation loss", paper, loss_gap(low, high), below=0.0, jobs=(low, high))


def mode_claims(paper, pairs):
    """Claims on pairs of modes, (lower loss, higher loss), at 82M and length 2,048, from one sentence of the paper."""
    return tuple(lower_loss(Job(low), Job(high), f"{low} − {high}", paper) for low, high in pairs)


def gap_change(a, b):
    """A value (found, seed) -> Job a's loss minus its baseline's, minus the same for Job b."""
    gap_a, gap_b = loss_gap(a, a.baseline), loss_gap(b, b.baseline)
    return lambda found, seed: gap_a(found, seed) - gap_b(found, seed)


def mean_losses(found, jobs):
    """The validation loss of each of a mode's Jobs, which differ in their rate: the mean over the seeds that all of
    them have, so that rates are compared on the same seeds. Where that is one seed, it alone decides."""
    shared = found.common_seeds(*jobs)
    return [np.mean([found.loss(job, seed) for seed in shared]) for job in jobs]


def best_rate(found, jobs):
    """The one of a mode's Jobs with the lowest of `mean_losses`."""
    return jobs[np.argmin(mean_losses(found, jobs))]


def best_pair(found, jobs):
    """A mode's Job at its best rate and vanilla's at its own. jobs: the mode's, one for each rate."""
    return best_rate(found, jobs), best_rate(found, [job.baseline for job in jobs])


def gap_at_best(jobs):
    """A value (found, seed) -> the loss of a mode minus vanilla's, each at its best rate."""
    return lambda found, seed: loss_gap(*best_pair(found, jobs))(found, seed)


def gaps_at_best(found, jobs):
    """The loss of a mode minus vanilla's, each at its best rate, with each of the seeds that both have."""
    best, base = best_pair(found, jobs)
    return [loss_gap(best, base)(found, seed) for seed in found.common_seeds(best, base)]


def semi_log(points):
    """(a, c) of the straight line L = a + c ln N through points [(parameters N, loss L)], least squares."""
    n, losses = np.array(points, float).T
    c, a = np.polyfit(np.log(n), losses, 1)
    return a, c


def saving(points, others):
    """The share of parameters that `points` [(N, L)] save at the losses of `others`, mean over their N: the horizontal
    gap of two straight lines over ln N; below 0, they need more. This fit gives 10.4 % on the paper's Table 5. None
    where it is undefined: losses that do not fall with N, or a gap wider than all the sizes span."""
    (height, slope), (other_height, other_slope) = semi_log(points), semi_log(others)
    if slope >= 0 or other_slope >= 0:
        return None
    sizes = [n for n, _ in points + others]
    span = math.log(max(sizes) / min(sizes))
    gaps = []  # ln of the size at which `points` have a loss, minus ln of the size at which `others` have it
    for n, _ in others:
        loss = other_height + other_slope * math.log(n)
        gaps.append((loss - height) / slope - math.log(n))
    if max(map(abs, gaps)) > span:
        return None
    return np.mean([1 - math.exp(gap) for gap in gaps])


def saved_parameters(mode, sizes):
    """A value (found, seed) -> the share of parameters that `mode` saves at vanilla's losses over `sizes`, see
    `saving`."""

    def value(found, seed):
        points = {}
        for name in (mode, "vanilla"):
            jobs = [Job(name, size) for size in sizes if size in found.scale.sizes]
            points[name] = [(found.parameters(job), found.loss(job, seed)) for job in jobs]
        return saving(points[mode], points["vanilla"])

    return value


def reached(curve, loss):
    """The tokens after which curve (tokens, losses) is at a loss for the first time, between evaluations on a straight
    line. None if it never is, or already is at the first evaluation."""
    x, y = (np.array(part, float) for part in curve)
    below = np.flatnonzero(y <= loss)
    if not len(below) or below[0] == 0:
        return None
    i = below[0]
    return float(np.interp(loss, [y[i], y[i - 1]], [x[i], x[i - 1]]))


def tokens_saved(curve, target):
    """Share of tokens that curve (tokens, losses) saves on the way to the last loss of `target`. If it ends above that:
    minus the share of tokens that it takes beyond what `target` takes to its own last loss. None where `reached` is."""
    (tokens, losses), (target_tokens, target_losses) = curve, target
    if losses[-1] <= target_losses[-1]:
        at = reached(curve, target_losses[-1])
        return None if at is None else 1 - at / target_tokens[-1]
    at = reached(target, losses[-1])
    return None if at is None else 1 - tokens[-1] / at


def saved_tokens(found, seed):
    """The share of tokens that ResFormer saves at the largest size."""
    runs = [found.run_with_losses(Job(mode, "468M"), seed) for mode in ("resformer", "vanilla")]
    return tokens_saved(*(run.validation for run in runs))


def critical_point(x, y, window):
    """(step, extrapolated?) where a relative loss y over steps x rises through 0 for the last time.

    If the mean of the last tenth of y is at least 0, it is the last upward crossing of the moving average over `window`
    points, in the middle of its window. It is 0 if there is none.
    Else it is where a line through the last tenth reaches 0, and never before the last step. It is infinity if the
    line's slope is not above two standard errors. That error takes the noise of steps as independent.
    `window` must not be longer than the last tenth. Sources: the paper's Figure 14, whose last tenth is 1,000 steps,
    and the authors' plot_relative_loss.py.
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
    two = [found.run_with_losses(job, seed), found.run_with_losses(job.baseline, seed)]
    x, y = plot.align([(run.steps["step"], run.steps["loss"]) for run in two])
    every = found.scale.every  # each loss is the mean of as many steps, the last of which is x
    return critical_point(x - (every - 1) / 2, y[0] - y[1], found.scale.window // every)


def later_when_longer(found, seed):
    """Of the pairs of lengths whose critical points differ, the share in which the longer one has the later; None if no
    length has one that is finite and above 0, or if all are equal."""
    points = [critical(found, Job("svformer", length=n, lr=ONE_RATE), seed)[0] for n in found.scale.lengths]
    if not any(0 < point < math.inf for point in points):
        return None
    in_order = [a < b for a, b in combinations(points, 2) if a != b]
    return np.mean(in_order) if in_order else None


# -- what analyze.py measured: quantities (job, found, seed) -> number


def minus(quantity, a, b):
    """A value (found, seed) -> the quantity of Job a minus that of Job b."""
    return lambda found, seed: quantity(a, found, seed) - quantity(b, found, seed)


def deep_entropy(job, found, seed):
    """Mean entropy of token importance in the deeper half of the layers."""
    values = found.by_layer(job, seed, "entropy")
    return np.mean(values[len(values) // 2 :])


def layer_mean(key, job, found, seed):
    return np.mean([x for x in found.by_layer(job, seed, key) if x is not None])


def most_importance(job, found, seed):
    """The first token's greatest importance over layers."""
    return max(found.by_layer(job, seed, "first"))


def least_value(job, found, seed):
    """The first token's least value norm over layers, relative to other tokens."""
    return min(found.by_layer(job, seed, "value_norm"))


def most_hidden(job, found, seed):
    """The first token's greatest hidden norm over states, relative to other tokens."""
    return max(found.by_layer(job, seed, "hidden_norm"))


def importance_ratio(job, found, seed):
    """The first token's importance over the mean of the next 99 tokens' (later ones are seen by few), the greatest over
    layers."""
    importance = found.arrays(job, seed)["importance"][:, :100]
    return (importance[:, 0] / importance[:, 1:].mean(axis=1)).max()


def start_token(mode):
    """Claims on how far the first token stands out: the paper's A.2 bounds it for ResFormer; vanilla's is for
    comparison."""
    claims = []
    for what, paper, quantity, bound in (
        ("greatest importance", "below 10", importance_ratio, {"below": 10.0}),
        ("least value norm", "above 0.5", least_value, {"above": 0.5}),
        ("greatest hidden norm", "below 3", most_hidden, {"below": 3.0}),
    ):
        if mode != "resformer":
            paper, bound = "", {}
        what = f"{LABELS[mode]}: {what} of the first token, relative to other tokens"
        claims.append(Claim(what, paper, partial(quantity, Job(mode, INSPECTED)), **bound))
    return tuple(claims)


def log_eigenvalue(job, found, seed):
    """ln of the largest eigenvalue of a layer's values, mean over layers."""
    return np.log(found.by_layer(job, seed, "value_largest")).mean()


def over_vanilla(mode, size, what, paper, quantity, **bound):
    """The claim on how a quantity of `mode` differs from vanilla's."""
    difference = minus(quantity, Job(mode, size), Job("vanilla", size))
    return Claim(f"{LABELS[mode]} − Transformer at [size {size}]: {what}", paper, difference, **bound)


def more_entropy(mode, size):
    """The claim that `mode` concentrates its attention less than vanilla."""
    what = "entropy in the deeper half of the layers (nats)"
    return over_vanilla(mode, size, what, "higher", deep_entropy, above=0.0)


def fewer_extremes(mode, size):
    """Claims that the first token stands out less in `mode` than in vanilla."""
    claim = partial(over_vanilla, mode, size)
    return (
        claim("first token's greatest importance over layers", "lower", most_importance, below=0.0),
        claim("first token's least value norm over layers, relative to other tokens",
              "higher: no value-state drain", least_value, above=0.0),
        claim("first token's greatest hidden norm over states, relative to other tokens",
              "lower: no hidden-state peak", most_hidden, below=0.0),
    )  # fmt: skip


# -- what eval.py scored


def task_accuracies(found, length, seed):
    """({mode: {task: accuracy}}, the tasks that both models of a length have) with a seed, for Table 1."""
    accuracy = {}
    for mode in ("vanilla", "resformer"):
        records = {task: found.evaluation(Job(mode, length=length), seed, task) for task in TABLE1}
        accuracy[mode] = {task: record["acc"] for task, record in records.items() if record}
    return accuracy, [task for task in TABLE1 if all(task in of for of in accuracy.values())]


def accuracy_gap(length):
    def value(found, seed):
        accuracy, common = task_accuracies(found, length, seed)
        if not common:
            raise NoSeed(f"no task is scored with seed {seed}")
        return np.mean([accuracy["resformer"][task] - accuracy["vanilla"][task] for task in common])

    return value


# -- ours beside the paper's


def claim_row(claim, found, seeds):
    """{what, paper, seeds, values: of each of them, mean, interval, n, verdict} of a claim. interval: half the width of
    the mean's 95 % interval over seeds, None below two. A value that is undefined or infinite is None."""
    values = {}
    for seed in seeds:
        with suppress(NoSeed):  # a run or score that this claim needs has fewer seeds
            value = claim.value(found, seed)
            values[seed] = None if value is None or not math.isfinite(value) else float(value)
    known = [value for value in values.values() if value is not None]
    mean, interval = mean_interval(known)
    row = {"what": claim.what, "paper": claim.paper, "seeds": list(values), "values": list(values.values())}
    row |= {"mean": mean, "interval": interval, "n": len(known)}
    return row | {"verdict": verdict(claim, row)}


def verdict(claim, row):
    """What a row says of its claim: CONFIRMED if the whole interval is on the paper's side, CONTRADICTED if all of it
    is on the other side, else UNDETERMINED. Also UNDETERMINED: no seed has a value, one has an undefined value, or all
    values are equal, so that their spread says nothing. One seed is only on a side. "" if the paper names no side."""
    if (claim.above, claim.below) == (-math.inf, math.inf):
        return ""
    mean, interval = row["mean"], row["interval"]
    if not row["values"] or None in row["values"] or interval == 0:
        return UNDETERMINED
    if interval is None:
        return PAPERS_WAY if claim.above < mean < claim.below else OTHER_WAY
    low, high = mean - interval, mean + interval
    if claim.above < low and high < claim.below:
        return CONFIRMED
    return CONTRADICTED if high < claim.above or low > claim.below else UNDETERMINED


def claim_rows(figure, found):
    """The row of each of a figure's claims, see `claim_row`."""
    seeds = max((found.seeds(job) for job in figure.jobs), key=len, default=())
    rows = [claim_row(claim, found, seeds) for claim in figure.claims]
    for row in rows:
        row["what"] = found.in_words(row["what"])
    return rows


def claim_cells(row):
    """The texts of a row in a table under HEADER."""
    is_difference = "−" in row["what"]
    ours = with_interval(row["mean"], row["interval"], sign=is_difference)
    n = str(row["n"])
    if row["n"] < len(row["values"]):
        n += f" of {len(row['values'])}"
    return [row["what"], row["paper"], row["verdict"], ours, n]


def tested(figures):
    """The rows that have a verdict and a value. Some comparisons stand in several figures, worded differently: these
    have the same values, and count once."""
    rows = {}
    for record in figures.values():
        for row in record["rows"]:
            if row["verdict"] and row["n"]:
                rows.setdefault(tuple(row["values"]), row)
    return list(rows.values())


def tally(figures):
    """Sentences that count the verdicts; what one seed says is counted apart."""
    counts = Counter(row["verdict"] for row in tested(figures))
    yes, no, unknown = (counts[name] for name in (CONFIRMED, CONTRADICTED, UNDETERMINED))
    text = (
        f"These runs test {counts.total()} of the paper's claims, {yes + no + unknown} of them with several "
        f"seeds: {yes} confirmed here, {no} contradicted, {unknown} undetermined."
    )
    same, other = counts[PAPERS_WAY], counts[OTHER_WAY]
    if same + other:
        text += f" With one seed: {same} the paper's way, {other} the other way."
    return text
