"""What a comparison does with losses: which rate each mode needs next, and which mode is better, by how much.

compare.py makes the runs. This file knows only numbers, so that bench/coverage.py can count how often it is right.
"""

import itertools
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np

from common.report import with_interval
from common.statistics import Fit, dunnett, lowest, multiplier, t_95

GROWTHS = 2  # how often a grid may grow by another rate, because its best one is at its edge
LOOKS, MUCH = 3, 0.25  # how often it may get a rate between two others, and what `promised` calls much
# Share of the noise that stays in each difference of two tuned modes, however many seeds there are. Curves are no
# parabolas: on the recorded ones of results/night a parabola misses the lowest point by 0.002 nats, so the difference
# of two modes by 0.003, a third of the noise there (bench/coverage.py, tests/test_compare.py).
FLOOR = 1 / 3
MOST = 0.45  # share of the squares behind the noise common to all modes, above which we name the mode that has it


@dataclass(frozen=True)
class Tuned:
    """Where the search for a mode's learning rate has ended."""

    rate: float  # the best one that was tried; all seeds train there, unless the first one diverged everywhere
    is_edge: bool = False  # a better one may lie beyond the grid
    around: tuple = ()  # that rate between those beside it; empty if it has none on one side, or that one diverged


def search(loss_of, rates, seeds):
    """The whole procedure: ([(rate, seed)] that a mode needs now, its Tuned once there are none).

    loss_of: function (rate, seed) -> loss, None before it is known. All rates get the first seed. Where the best one is
    at the grid's edge, the grid gets a rate 2 times further, at most twice. Where a parabola promises much between
    two rates, the first seed trains there, too, at most three times, because a cliff beside a rate looks like a deep
    valley on the other side. Then all seeds train at the best rate.
    """
    rates, first = list(rates), seeds[0]
    grown = looks = 0
    while True:
        missing = [(rate, first) for rate in rates if loss_of(rate, first) is None]
        if missing:
            return missing, None
        losses = [loss_of(rate, first) for rate in rates]
        i = losses.index(min(losses))
        best = rates[i]
        is_edge = len(rates) > 1 and i in (0, len(rates) - 1)
        is_inside = 0 < i < len(rates) - 1 and all(map(math.isfinite, losses[i - 1 : i + 2]))
        around = tuple(rates[i - 1 : i + 2]) if is_inside else ()
        between = promised(around, losses[i - 1 : i + 2]) if is_inside else None
        if is_edge and grown < GROWTHS:
            rates = sorted([*rates, best / 2 if i == 0 else best * 2])
            grown += 1
        elif between and between not in rates and looks < LOOKS:
            rates = sorted([*rates, between])
            looks += 1
        else:
            break
    if is_edge and math.isinf(losses[i]):  # at every rate: other seeds would not tell which is best
        return [], Tuned(best)
    missing = [(best, seed) for seed in seeds if loss_of(best, seed) is None]
    return missing, None if missing else Tuned(best, is_edge, around)


def promised(around, losses):
    """Where a parabola through the losses at three rates, the middle one the lowest, is lowest, to three digits; None
    if it gains on the middle one less than a quarter (MUCH) of the climb from there to the lower of the outer two."""
    at, _, gain = lowest([math.log2(rate) for rate in around], losses)
    is_much = gain > MUCH * (min(losses[0], losses[2]) - losses[1])
    return float(f"{2**at:.3g}") if is_much else None


@dataclass(frozen=True)
class Best:
    """A mode's loss at its best rate: a sum over cells (mode, rate) of a Fit."""

    rate: float
    weights: dict  # {cell: weight}
    gain: float = 0.0  # how much lower it is than at the best rate that was tried


def at_best(fit, cells, rates):
    """The Best of a mode. cells: of a Fit, at its best rate, or at that and those beside it; then Best is the lowest
    point of a parabola in log2(rate)."""
    if len(cells) == 1:
        return Best(rates[0], {cells[0]: 1.0})
    at, weights, gain = lowest([math.log2(rate) for rate in rates], [fit.level(cell) for cell in cells])
    return Best(2**at, dict(zip(cells, weights, strict=True)), gain)


def difference(fit, mine, theirs, floor):
    """`Fit.contrast` of two modes' Bests. Nobody has trained there, so a gain also counts as a standard error."""
    weights = mine.weights | {cell: -weight for cell, weight in theirs.weights.items()}
    return fit.contrast(weights, math.hypot(mine.gain, theirs.gain), floor)


def corrected(fit, best, found, floor):
    """{mode: p} of the modes in `found` with an interval, corrected for their number. best: {mode: Best}; found:
    {mode: its `difference` from the base}."""
    gaps = {mode: (gap, half) for mode, (gap, half, _) in found.items() if half is not None}
    if not gaps:
        return {}
    # two modes are apart by the difference of their differences: between² = a² + b² - 2 correlation a b
    correlation = np.eye(len(gaps))
    for (i, one), (j, two) in itertools.combinations(enumerate(gaps), 2):
        (_, a), (_, b), (_, between, _) = gaps[one], gaps[two], difference(fit, best[one], best[two], floor)
        correlation[i, j] = correlation[j, i] = (a**2 + b**2 - between**2) / (2 * a * b)
    ts = [abs(gap) * t_95(fit.df) / half for gap, half in gaps.values()]
    return dict(zip(gaps, dunnett(ts, correlation, fit.df), strict=True))


@dataclass(frozen=True)
class Answer:
    """What the runs say of a mode. Losses are in nats per token; None is what they cannot say."""

    mode: str
    tuned: Tuned
    losses: dict  # {seed: validation loss} at the best rate that was tried; empty if the mode diverged at every rate
    best: Best | None  # None if it diverged
    spread: float = 0.0  # standard error of its loss at the best rate, for a noise of 1
    gap: float | None = None  # its loss minus the base's, both at their best rates; None without a common seed
    interval: float | None = None  # half the width of its 95 % interval
    p: float | None = None  # corrected for the number of modes
    is_elsewhere: bool = False  # most of its seeds ran on another processor than the base's
    times: tuple = ()  # how many times as many tokens the base needs for this loss: (least, most), or empty

    @property
    def loss(self):
        """At the best rate, between those that were tried."""
        return statistics.mean(self.losses.values()) - self.best.gain

    @property
    def differs(self):
        """Whether it is better or worse than the base: neither luck nor the processor explains the gap."""
        return self.p is not None and self.p <= 0.05 and not self.is_elsewhere


def judge(cells, tuned, tokens=0, schedules=(), pool=None, floor=FLOOR, elsewhere=()):
    """The Answer of each mode, that of the base first, and the Fit behind them.

    cells: {(mode, rate): {seed: loss}} of runs that did not diverge; tuned: {mode: Tuned}, the base first; tokens: of
    each run; schedules: [(tokens, Answer)] of the base at other lengths; pool: a Fit of other runs, for the noise where
    these have one seed; floor: FLOOR, or 0 where no rates were searched; elsewhere: the modes that mostly ran on
    another processor than the base.
    """
    fit, base_mode = Fit(cells), next(iter(tuned))
    if pool and pool.df:
        fit.noise, fit.df = pool.noise, pool.df
        fit.rest = 0 * fit.rest  # our own runs leave only rounding, for which no mode is to blame
    best = {}
    for mode, at in tuned.items():
        if (mode, at.rate) in cells:
            rates = at.around or (at.rate,)
            best[mode] = at_best(fit, [(mode, rate) for rate in rates], rates)
    found = {}
    if base_mode in best:
        others = [mode for mode in best if mode != base_mode]
        found = {mode: difference(fit, best[mode], best[base_mode], floor) for mode in others}
    ps = corrected(fit, best, found, floor)
    answers = []
    for mode, at in tuned.items():
        spread = fit.spread(best[mode].weights) if mode in best else 0.0
        gap, interval, _ = found.get(mode, (None, None, None))
        losses = cells.get((mode, at.rate), {})
        answer = Answer(mode, at, losses, best.get(mode), spread, gap, interval, ps.get(mode), mode in elsewhere)
        if interval is not None:
            answer = replace(answer, times=times_of(answer, answers[0], tokens, schedules, fit))
        answers.append(answer)
    return answers, fit


def times_of(answer, base, tokens, schedules, fit):
    """How many times as many tokens `base` needs for the Answer's loss: (least, most), or () if no length helps."""
    # the base's nearest longer schedule; else the nearest shorter one, and then we guess how the curve goes on
    far = [(length, answer) for length, answer in schedules if max(length / tokens, tokens / length) >= 1.5]
    falling = [(length, answer) for length, answer in far if (length - tokens) * (base.loss - answer.loss) > 0]
    if not falling:
        return ()
    length, other = min(falling, key=lambda point: (point[0] < tokens, abs(point[0] - tokens)))
    errors = [fit.noise * each for each in (answer.spread, base.spread, other.spread)]
    least, most = multiplier(base.loss + answer.gap, (tokens, base.loss), (length, other.loss), errors, fit.df)
    if not answer.differs:  # the verdict asks more of a difference than this range does
        return min(least, 1.0), max(most, 1.0)
    return least, most


def noisy(fit):
    """{mode: its part of the squares behind the noise} of each mode above MOST; none of two, as each has half."""
    shares = fit.shares(lambda cell: cell[0]) if fit.df else {}
    return {mode: share for mode, share in shares.items() if share > MOST and len(shares) > 2}


def in_words(times):
    """A range of multipliers in words."""
    least, most = times
    return f"{least:.2f} to {most:.2f}" if math.isfinite(most) else f"{least:.2f} or more"


def said_of(a, base, n_seeds, is_tuned):
    """Yields sentences on an Answer. base: that of the mode that all are compared with; n_seeds: asked for; is_tuned:
    whether there are several rates."""
    below, better = ("below", "better") if (a.gap or 0) < 0 else ("above", "worse")
    if not a.losses:
        yield f"{a.mode} diverged at every rate down to {a.tuned.rate:g}. Try lower --rates."
        return
    if a.mode == base.mode:
        pass  # the others are compared with it
    elif not base.losses:
        yield f"{a.mode} ends at {a.loss:.4f} nats."
    elif a.gap is None:
        yield f"For every seed, {a.mode} or {base.mode} diverged, so they can't be compared."
    elif a.interval is None:
        ends = f"{abs(a.gap):.3f} nats {below}" if abs(a.gap) >= 0.0005 else "level with"
        yield f"{a.mode} ends {ends} {base.mode}."
    elif a.p > 0.05:
        gap = with_interval(a.gap, a.interval, sign=True)
        yield f"{a.mode} cannot be told apart from {base.mode} ({gap} nats, p = {a.p:.2g})."
    elif a.is_elsewhere:
        gap = with_interval(abs(a.gap), a.interval)
        yield f"{a.mode} ends {gap} nats {below} {base.mode}, but mostly on another processor, which may be why."
    else:
        yield f"{a.mode} is {better} than {base.mode} by {with_interval(abs(a.gap), a.interval)} nats."
    if a.times:
        yield f"To reach the loss of {a.mode}, {base.mode} needs {in_words(a.times)} times as many tokens."
    if a.best.gain >= 0.0005:
        yield f"A parabola puts the best rate of {a.mode} at {a.best.rate:.2g}, with a loss {a.best.gain:.3f} lower."
    if is_tuned and a.tuned.is_edge:
        so = ", so the others look better than they are" if a.mode == base.mode else ""
        yield f"The best rate of {a.mode}, {a.tuned.rate:g}, is at the edge, and a better one may lie beyond it{so}."
    elif is_tuned and not a.tuned.around:
        yield f"{a.mode} diverged at a rate next to {a.tuned.rate:g}, so no parabola corrects its rate."
    if len(a.losses) < n_seeds:
        yield f"{n_seeds - len(a.losses)} of the {n_seeds} seeds of {a.mode} diverged."


def sentences(answers, n_seeds, is_tuned):
    """A line of sentences for each mode about which there is something to say."""
    said = [" ".join(said_of(a, answers[0], n_seeds, is_tuned)) for a in answers]
    return [line for line in said if line]
