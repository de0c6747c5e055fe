"""How sure a mean or a difference is: Student's t, one error for many cells, Dunnett's correction, the best learning
rate between those that were tried, and losses turned into tokens. bench/coverage.py tells how often the answers hold.
"""

import functools
import math
import statistics
from collections import defaultdict

import numpy as np

NORMAL_95 = 1.96  # t_95 of a deviation that we know
DRAWS = 200_000  # they move a p of 0.05 by 0.0002


def t_tail(t, df):
    """P(|T| > t) of Student's t with a whole number `df` of degrees of freedom. From Abramowitz and Stegun, 26.7."""
    angle, is_odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(1 + is_odd, df, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    inside = math.sin(angle) * total
    inside = 2 / math.pi * (angle + inside) if is_odd else inside
    return max(0.0, 1 - inside)  # for a large t only rounding is left


@functools.cache
def t_95(df):
    """In 95 % of samples the true value is within this many standard errors of the estimate."""
    low, high = 0.0, 13.0  # 12.7 with one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 0.05 else (low, middle)
    return high


def mean_interval(values):
    """Mean of a list of numbers, and half the width of its 95 % interval (Student's t). Without
    numbers (None, None); for a single one (it, None)."""
    if not values:
        return None, None
    mean, n = math.fsum(values) / len(values), len(values)
    return mean, t_95(n - 1) * statistics.stdev(map(float, values)) / math.sqrt(n) if n > 1 else None


class Fit:
    """Fits number = cell + seed + noise by least squares, to {cell: {seed: number}}, which may have gaps.

    All cells share one error, because two or three seeds of one cell alone tell little of theirs. Equal to a two-way
    analysis of variance without interaction.
    """

    def __init__(self, cells):
        self.cells = list(cells)
        self.n_seeds = {cell: len(numbers) for cell, numbers in cells.items()}
        self.rows = [(cell, seed, number) for cell, numbers in cells.items() for seed, number in numbers.items()]
        seeds = sorted({seed for _, seed, _ in self.rows}, key=str)
        design = np.zeros((len(self.rows), len(self.cells) + len(seeds)))
        for i, (cell, seed, _) in enumerate(self.rows):
            design[i, self.cells.index(cell)] = design[i, len(self.cells) + seeds.index(seed)] = 1
        y = np.array([number for *_, number in self.rows])
        # Constants may move from seeds to cells, so the design lacks full rank. Rounding must count as 0 (docs/LOG.md).
        solve = np.linalg.pinv(design, rcond=1e-10)
        self.inverse, self.values = solve @ solve.T, solve @ y  # the inverse is that of design.T @ design
        self.df = len(y) - np.linalg.matrix_rank(design, tol=1e-10)
        self.design, self.rest = design, y - design @ self.values
        # equal losses leave rounding, which is no noise
        self.noise = max(math.sqrt((self.rest**2).sum() / self.df), 1e-9 * abs(y).max()) if self.df else None

    def level(self, cell):
        """A cell's number as if all seeds had been drawn for it, up to a constant, the same for all cells that seeds
        connect. So only differences of levels mean something."""
        return float(self.values[self.cells.index(cell)])

    def spread(self, weights):
        """The standard error of a sum {cell: weight} for a noise of 1, without the seeds' own share."""
        return math.sqrt(sum(weight**2 / self.n_seeds[cell] for cell, weight in weights.items()))

    def contrast(self, weights, besides=0.0, floor=0.0):
        """(value, half of its 95 % interval, p) of a sum {cell: weight}. The last two are None where nothing is left to
        tell the noise from, all three where no seeds connect the cells. Two standard deviations that no number of seeds
        makes smaller go into both: besides, in nats, and floor, a share of the noise."""
        c = np.zeros(len(self.values))
        for cell, weight in weights.items():
            c[self.cells.index(cell)] += weight
        if not np.allclose(c @ self.inverse @ self.design.T @ self.design, c):
            return None, None, None
        value = float(c @ self.values)
        if not self.df:
            return value, None, None
        error = self.noise * math.sqrt(c @ self.inverse @ c + floor**2)
        half = math.hypot(t_95(self.df) * error, NORMAL_95 * besides)
        return value, half, t_tail(abs(value) * t_95(self.df) / max(half, 1e-300), self.df)

    def shares(self, group):
        """{group(cell): its part of the squares from which the noise is computed}."""
        squares = defaultdict(float)
        for (cell, *_), rest in zip(self.rows, self.rest, strict=True):
            squares[group(cell)] += rest**2 / max((self.rest**2).sum(), 1e-300)
        return dict(squares)


@functools.cache
def draws(n, df):
    """DRAWS times n independent numbers of Student's t that share their noise. Always the same ones."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((DRAWS, n)) / np.sqrt(rng.chisquare(df, (DRAWS, 1)) / df)


def dunnett(ts, correlation, df):
    """Dunnett's step-down test: the p of several differences from one base that bound the chance of even one false
    finding. They lie between those of each difference alone and Holm's, which takes the differences for unrelated.

    ts: each difference, without its sign, in standard errors; correlation: of the differences, an (n, n) array.
    """
    n, (mix, share, _) = len(ts), np.linalg.svd(correlation)
    # mix sqrt(share) mix^T is the symmetric square root of the correlation, also where two differences are the same
    sizes = abs(draws(n, df) @ (mix * np.sqrt(share)) @ mix.T)  # (DRAWS, n): the ts that luck alone makes
    order = sorted(range(n), key=lambda i: -ts[i])
    corrected, last = [1.0] * n, 0.0
    for k, i in enumerate(order):
        # n - k differences are left. How likely does one of them reach this t? n - k times the chance of each counts a
        # draw once for each that does. The draws say how much too often that is, so even a tiny p is exact enough.
        reaches = sizes[:, order[k:]] >= ts[i]
        counted, once = reaches.sum(), reaches.any(axis=1).sum()
        overlap = float(once / counted) if counted else 1.0
        last = max(last, min(1.0, (n - k) * t_tail(ts[i], df) * overlap))
        corrected[i] = last
    return corrected


def lowest(x, y):
    """Where a parabola through three points is lowest: (x there, weights of the three y in its value there, how much
    lower that is than the middle one).

    The value is weights @ y. A y that moves a little moves the value by its weight, because at the lowest point a shift
    of x changes nothing (the delta method needs no more). x goes at most halfway from the middle point to the others;
    if the parabola has no lowest point, x is the middle one.
    """
    (a, b, c), left, right = x, (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    square = (right - left) / (c - a)
    if square <= 0:
        return b, (0.0, 1.0, 0.0), 0.0
    at = min(max((a + b) / 2 - left / (2 * square), (a + b) / 2), (b + c) / 2)
    to_a, to_b, to_c = at - a, at - b, at - c
    weights = (to_b * to_c / (a - b) / (a - c), to_a * to_c / (b - a) / (b - c), to_a * to_b / (c - a) / (c - b))
    return at, weights, y[1] - sum(weight * value for weight, value in zip(weights, y, strict=True))


def multiplier(loss, own, other, errors=(0, 0, 0), df=math.inf):
    """(least, most): how many times as many tokens vanilla needs for `loss`.

    own, other: (tokens, vanilla's loss) of two schedules, the first of the mode's length. Losses fall as E + B / D^b
    over tokens D. Two points leave b open, so we take both ends: b = 1, the steepest that we have seen, and b -> 0, a
    straight line over ln D. errors: standard errors of the three losses, from a noise with df degrees of freedom; then
    the ends are those of a 95 % interval.
    """
    rng, (tokens, base), (other_tokens, other_base) = np.random.default_rng(0), own, other
    draws = rng.standard_normal((3, 10_000))
    if math.isfinite(df):  # the noise is known no better than its own chi-square, so the losses have Student's t
        draws /= np.sqrt(rng.chisquare(df, 10_000) / df)
    loss, base, other_base = np.array([[loss], [base], [other_base]]) + np.reshape(errors, (3, 1)) * draws
    with np.errstate(all="ignore"):
        straight = (base - loss) / (base - other_base) * math.log(other_tokens / tokens)
        floor = (other_tokens * other_base - tokens * base) / (other_tokens - tokens)
        steep = np.log((base - floor) / (loss - floor))
        ends = np.sort([straight, steep], axis=0)  # which of the two is larger depends on the loss
        ends = np.exp(np.where(np.isnan(ends), math.inf, ends))  # below vanilla's floor no number of tokens is enough
    return tuple(float(np.quantile(end, q, method="nearest")) for end, q in zip(ends, (0.025, 0.975), strict=True))
