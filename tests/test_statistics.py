"""Intervals, corrections and token multipliers, equal to scipy's and statsmodels'. How often they hold the truth:
test_compare.py, by bench/coverage.py."""

import math

import numpy as np
import pytest

from common.statistics import Fit, dunnett, lowest, mean_interval, multiplier, t_95, t_tail

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 24, 101])
def test_students_t(df):
    assert t_95(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    for t in (0, 0.3, 2.0, 5.0):
        assert t_tail(t, df) == pytest.approx(2 * stats.t.sf(t, df), abs=1e-12)


def test_interval_of_a_mean():
    values = [2.1, 2.4, 2.2, 2.25]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    mean, half = mean_interval(values)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert mean_interval([1.5]) == (1.5, None) and mean_interval([]) == (None, None)


@pytest.mark.parametrize("n_cells,n_seeds,gaps", [(3, 2, 0), (5, 3, 0), (4, 3, 2), (6, 5, 3)])
def test_one_error_for_all_cells_is_statsmodels_two_way_model(n_cells, n_seeds, gaps):
    smf, pandas = pytest.importorskip("statsmodels.formula.api"), pytest.importorskip("pandas")
    losses = np.random.default_rng(n_cells).normal(0, 0.02, (n_cells, n_seeds))
    cells = {cell: dict(enumerate(row)) for cell, row in enumerate(losses)}
    for k in range(gaps):
        del cells[n_cells - 1 - k][k % n_seeds]
    rows = [(f"c{cell}", f"s{seed}", loss) for cell in cells for seed, loss in cells[cell].items()]
    right = smf.ols("loss ~ cell + seed", pandas.DataFrame(rows, columns=["cell", "seed", "loss"])).fit()
    fit = Fit(cells)
    assert fit.df == right.df_resid and fit.noise == pytest.approx(math.sqrt(right.scale))
    for cell in range(1, n_cells):
        value, half, p = fit.contrast({cell: 1, 0: -1})
        low, high = right.conf_int().loc[f"cell[T.c{cell}]"]
        assert (value - half, value + half) == pytest.approx((low, high))
        assert p == pytest.approx(right.pvalues[f"cell[T.c{cell}]"], abs=1e-12)
    value, half, _ = fit.contrast({2: 1, 1: -1})  # of two cells neither of which is the first
    test = right.t_test("cell[T.c2] - cell[T.c1] = 0")
    assert (value - half, value + half) == pytest.approx(tuple(test.conf_int()[0]))


def test_what_too_few_seeds_cannot_say():
    assert Fit({"a": {1: 2.0}, "b": {1: 2.5}}).contrast({"b": 1, "a": -1}) == (pytest.approx(0.5), None, None)
    fit = Fit({"a": {1: 2.0, 2: 2.1}, "b": {3: 1.0}, "c": {1: 2.5, 2: 2.4}})
    assert fit.contrast({"b": 1, "a": -1}) == (None, None, None)
    assert fit.contrast({"c": 1, "a": -1})[0] == pytest.approx(0.4)
    linked = Fit({"a": {1: 2.0}, "b": {2: 1.0}, "c": {1: 2.5, 2: 1.7}})  # seed 2 is 0.8 lower
    assert linked.contrast({"b": 1, "a": -1})[0] == pytest.approx(-0.2)


@pytest.mark.parametrize("n_modes", range(2, 9))
def test_groups_that_share_no_seed_do_not_disturb_each_other(n_modes):
    """Each group lacks a rank of its own. With numpy 2.5's own bound for it, this fails."""
    groups = [{c: {k: math.sin(7 * c + 3 * k + w) for k in range(3)} for c in range(n_modes)} for w in range(7)]
    fit = Fit({(w, c): {(w, k): x for k, x in of.items()} for w, group in enumerate(groups) for c, of in group.items()})
    assert fit.df * fit.noise**2 == pytest.approx(sum(Fit(group).df * Fit(group).noise ** 2 for group in groups))
    gap, _, _ = fit.contrast({(3, 1): 1, (3, 0): -1})
    assert gap == pytest.approx(sum(groups[3][1][k] - groups[3][0][k] for k in range(3)) / 3)


@pytest.mark.parametrize("n", [2, 5, 10])
def test_a_mode_that_changes_nothing_does_not_differ(n):
    losses = {seed: 3 + 0.1 * math.sin(seed) for seed in range(n)}
    gap, _, p = Fit({"a": losses, "b": dict(losses)}).contrast({"a": 1, "b": -1})
    assert abs(gap) < 1e-9 and p > 0.9


def test_a_floor_is_a_share_of_the_noise_that_no_seed_makes_smaller():
    fit = Fit({cell: {seed: cell * seed**2 for seed in range(4)} for cell in (1, 2)})
    _, half, p = fit.contrast({1: 1, 2: -1}, floor=0.5)
    assert half == pytest.approx(t_95(3) * fit.noise * (2 / 4 + 0.25) ** 0.5)
    assert p == pytest.approx(t_tail(3.5 * t_95(3) / half, 3))  # 3.5: the mean of 0, 1, 4 and 9


# -- several differences from one base


def alike(n, correlation=0.5):
    return np.full((n, n), correlation) + (1 - correlation) * np.eye(n)


# two-sided, 5 %, for 1 to 4 differences: table II of C. W. Dunnett, New tables for multiple comparisons with a control,
# Biometrics 20 (1964)
@pytest.mark.parametrize("df,critical", [
    (5, (2.57, 3.03, 3.29, 3.48)), (10, (2.23, 2.57, 2.76, 2.89)), (20, (2.09, 2.38, 2.54, 2.65)),
])  # fmt: skip
def test_dunnetts_table(df, critical):
    for n, t in enumerate(critical, 1):
        assert dunnett([t] * n, alike(n), df)[0] == pytest.approx(0.05, abs=0.001)  # t has two decimals


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_dunnett_is_scipys_for_unequal_samples(seed):
    """The smallest p. scipy's correction doesn't step down, so the others are larger there."""
    rng, sizes = np.random.default_rng(seed), (9, 4, 3)
    samples, base = [rng.normal(0.8 * i, 1, size) for i, size in enumerate(sizes)], rng.normal(0, 1, 5)
    right = stats.dunnett(*samples, control=base, rng=np.random.default_rng(0))
    share = np.array([(size / (size + 5)) ** 0.5 for size in sizes])
    correlation = np.outer(share, share) + np.diag(1 - share**2)
    found = dunnett(abs(right.statistic), correlation, sum(sizes) + 5 - 4)
    assert min(found) == pytest.approx(min(right.pvalue), abs=0.001)


@pytest.mark.parametrize("ts", [(2.3,), (3.1, 2.2, 2.5), (0.2, 0.1), (9.0, 30.0, 1.0, 9.1)])
def test_dunnett_lies_between_no_correction_and_holms(ts):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    plain = [t_tail(t, 8) for t in ts]
    found, most = dunnett(ts, alike(len(ts)), 8), multitest.multipletests(plain, method="holm")[1]
    assert all(p <= q <= r * (1 + 1e-12) for p, q, r in zip(plain, found, most, strict=True))
    by_size = [found[i] for i in np.argsort(ts)[::-1]]
    assert by_size == sorted(by_size)


def test_dunnett_corrects_for_the_differences_that_are_left():
    """Of one alone p is the plain one, to the last bit."""
    assert dunnett([2.3], np.eye(1), 8) == [t_tail(2.3, 8)]
    assert dunnett([2.3, 9.0], alike(2), 8)[0] == t_tail(2.3, 8)
    assert dunnett([2.3, 2.4], alike(2), 8)[0] == dunnett([2.3, 2.4], alike(2), 8)[1] > t_tail(2.3, 8)


def test_dunnett_of_differences_that_always_go_together():
    """Two modes that are one count once, though their correlation has no Cholesky root."""
    assert dunnett([2.3, 2.3], alike(2, 1.0), 8) == pytest.approx([t_tail(2.3, 8)] * 2)


# -- the best rate between those tried


@pytest.mark.parametrize("x,y", [((0, 1, 2), (3, 2, 2.5)), ((-1, 0, 1.6), (0.3, 0.1, 0.7)), ((1, 2, 3), (2, 1, 1.9))])
def test_the_lowest_point_is_numpys(x, y):
    square, slope, level = np.polyfit(x, y, 2)
    at, weights, gain = lowest(x, y)
    assert at == pytest.approx(-slope / (2 * square)) and sum(weights) == pytest.approx(1)
    assert weights @ np.array(y) == pytest.approx(level - slope**2 / (4 * square)) == pytest.approx(y[1] - gain)
    for i in range(3):  # each weight is the derivative of that value
        moved = np.array(y, float)
        moved[i] += 1e-6
        a, b, c = np.polyfit(x, moved, 2)
        assert (c - b**2 / (4 * a) - weights @ np.array(y)) / 1e-6 == pytest.approx(weights[i], abs=1e-4)


def test_a_lowest_point_stays_near_the_middle():
    assert lowest((0, 1, 2), (1.0, 1.1, 1.4))[0] == 0.5  # the middle one is not the lowest
    assert lowest((0, 1, 2), (1.0, 1.2, 1.3)) == (1, (0.0, 1.0, 0.0), 0.0)  # a parabola with a highest point


def test_shares_of_the_noise():
    cells = {"a": {1: 0.0, 2: 0.6, 3: -0.6}, "b": dict.fromkeys((1, 2, 3), 0.0), "d": {1: 5.0}}
    cells["c"] = cells["b"]
    shares = Fit(cells).shares(lambda cell: cell)  # residuals 0.4, -0.2 and -0.2 of 0.6
    assert shares == pytest.approx({"a": 2 / 3, "b": 1 / 6, "c": 1 / 6, "d": 0})
    assert Fit(cells).spread({"a": 0.5, "d": -2}) == pytest.approx((0.25 / 3 + 4) ** 0.5)


# -- the token multiplier


@pytest.mark.parametrize("beta", [0.15, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("own,other,wanted", [(10, 40, 20), (10, 40, 5), (10, 20, 30), (40, 10, 60), (40, 10, 20)])
def test_the_multiplier_holds_any_power_law(beta, own, other, wanted):
    def vanilla(tokens):
        return 2.0 + 3.0 * tokens**-beta

    least, most = multiplier(vanilla(wanted), (own, vanilla(own)), (other, vanilla(other)))
    assert least - 1e-9 <= wanted / own <= most + 1e-9 and (wanted > own or most < 1)


def test_noise_widens_the_multiplier_to_an_interval():
    exact = multiplier(2.40, (12.3e6, 2.469), (49.2e6, 2.2134))
    noisy = multiplier(2.40, (12.3e6, 2.469), (49.2e6, 2.2134), errors=(0.005,) * 3)
    assert exact == pytest.approx((1.254, 1.454), abs=0.002) and noisy[0] < exact[0] < exact[1] < noisy[1]
    assert multiplier(1.0, (12.3e6, 2.469), (49.2e6, 2.2134))[1] == math.inf  # below vanilla's floor


def test_a_noise_known_from_few_runs_widens_it():
    """A straight line over ln D, whose ends are Student's t: the base's loss is known, the mode's is not."""
    points = (1, 2.4), (math.e, 2.3)
    for df, quantile in ((2, 4.303), (6, 2.447), (math.inf, 1.96)):
        least, _ = multiplier(2.4, *points, errors=(0.01, 0, 0), df=df)
        assert math.log(least) == pytest.approx(-0.1 * quantile, rel=0.05)
