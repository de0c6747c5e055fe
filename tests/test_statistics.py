"""Intervals, corrections and token multipliers, equal to scipy's and statsmodels'. How often they hold the truth:
test_compare.py, by bench/coverage.py."""

import math

import numpy as np
import pytest

from common.statistics import Fit, holm, lowest, mean_interval, multiplier, t_95, t_tail

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


def test_holm():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.6, "e": 1e-7}
    right = multitest.multipletests(list(ps.values()), method="holm")[1]
    assert holm(ps) == pytest.approx(dict(zip(ps, right, strict=True))) and holm({}) == {}


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
