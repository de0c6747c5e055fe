"""How sure a mean or a difference is: Student's t, one error for many cells, and Holm's correction."""

import functools
import math
import statistics

import numpy as np


def t_tail(t, df):
    """P(|T| > t) of Student's t with a whole number `df` of degrees of freedom. From Abramowitz and Stegun, 26.7."""
    angle, is_odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(1 + is_odd, df, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    inside = 2 / math.pi * (angle + inside) if is_odd else inside
    return max(0.0, 1 - inside)  # of a large t rounding is all that is left


@functools.cache
def t_95(df):
    """In 95 % of samples the true value is within this many standard errors of the estimate."""
    low, high = 0.0, 13.0  # 12.7 with one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 0.05 else (low, middle)
    return high


def mean_interval(values):
    """Mean of a list of numbers, and half the width of its 95 % interval (Student's t). Of no number: (None, None). Of
    one: (it, None)."""
    if not values:
        return None, None
    mean, n = math.fsum(values) / len(values), len(values)
    return mean, t_95(n - 1) * statistics.stdev(map(float, values)) / math.sqrt(n) if n > 1 else None


class Fit:
    """Fits number = cell + seed + noise by least squares, to {cell: {seed: number}}, which may have gaps.

    All cells share one error, because two or three seeds of one cell alone know theirs badly. Equal to a two-way
    analysis of variance without interaction.
    """

    def __init__(self, cells):
        self.cells = list(cells)
        rows = [(self.cells.index(cell), seed, number) for cell in cells for seed, number in cells[cell].items()]
        seeds = sorted({seed for _, seed, _ in rows}, key=str)
        design = np.zeros((len(rows), len(self.cells) + len(seeds)))
        for i, (cell, seed, _) in enumerate(rows):
            design[i, cell] = design[i, len(self.cells) + seeds.index(seed)] = 1
        y = np.array([number for *_, number in rows])
        self.inverse = np.linalg.pinv(design.T @ design)
        self.values = self.inverse @ design.T @ y
        self.df = len(y) - np.linalg.matrix_rank(design)
        self.design, rest = design, y - design @ self.values
        # equal losses leave rounding, which is no noise
        self.noise = max(math.sqrt((rest**2).sum() / self.df), 1e-9 * abs(y).max()) if self.df else None

    def contrast(self, weights):
        """(value, half of its 95 % interval, p) of a sum {cell: weight}. The last two are None where nothing is left to
        know the noise from, all three where no seeds connect the cells."""
        c = np.zeros(len(self.values))
        for cell, weight in weights.items():
            c[self.cells.index(cell)] += weight
        if not np.allclose(c @ self.inverse @ self.design.T @ self.design, c):
            return None, None, None
        value = float(c @ self.values)
        if not self.df:
            return value, None, None
        error = self.noise * math.sqrt(c @ self.inverse @ c)
        return value, t_95(self.df) * error, t_tail(abs(value) / max(error, 1e-300), self.df)


def holm(ps):
    """Holm's correction: {name: p} -> {name: p} that bound the chance of even one false finding."""
    corrected, last = {}, 0.0
    for i, name in enumerate(sorted(ps, key=ps.get)):
        last = max(last, min(1.0, (len(ps) - i) * ps[name]))
        corrected[name] = last
    return corrected


def multiplier(loss, own, other, error=0.0):
    """(least, most): how many times its tokens vanilla needs for `loss`.

    own, other: (tokens, vanilla's loss) of two schedules, the first of the mode's length. Losses fall as E + B / D^b
    over tokens D. Two points leave b open, so we take both ends: b = 1, the steepest that we have seen, and b -> 0, a
    straight line over ln D. error: standard deviation of each loss; then the ends are those of a 95 % interval.
    """
    rng, (tokens, base), (other_tokens, other_base) = np.random.default_rng(0), own, other
    loss, base, other_base = np.array([[loss], [base], [other_base]]) + error * rng.standard_normal((3, 10_000))
    with np.errstate(all="ignore"):
        straight = (base - loss) / (base - other_base) * math.log(other_tokens / tokens)
        floor = (other_tokens * other_base - tokens * base) / (other_tokens - tokens)
        steep = np.log((base - floor) / (loss - floor))
    ends = np.sort([straight, steep], axis=0)  # of a mode that is worse, the steep one is nearer to 1 as well
    ends = np.exp(np.where(np.isnan(ends), math.inf, ends))  # below vanilla's floor no number of tokens is enough
    return tuple(float(np.quantile(end, q, method="nearest")) for end, q in zip(ends, (0.025, 0.975), strict=True))
