"""How often is compare.py's verdict right? Its own functions on made-up runs for which we know the truth.

    python -m bench.coverage                       2,000 comparisons a row
    python -m bench.coverage --repetitions=200     a first look

A mode's loss is a parabola over log2(rate), as steep as vanilla's in results/night, or a lopsided curve through
vanilla's four rates there. A run adds its seed's shift, which all modes share, and noise. docs/own_mode.md has the
table.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from common.report import markdown, progress
from common.verdict import Tuned, judge, noisy, search
from configurator import check_fields, run, setting

NOISE, SHIFT = 0.0095, 0.006  # standard deviations of a run and of a seed, in nats: those of results/night
SQUARE, LOPSIDED = 0.055, 0.7  # nats per octave squared, and the k of `curve`: vanilla's in results/night
BASE, SEEDS, RATE = "vanilla", range(10), 3e-3
OWN, OTHER = 2.469, 2.2134  # vanilla's losses at 12.3M and 49.2M tokens


@dataclass(frozen=True)
class CoverageConfig:
    repetitions: int = setting(2000, "comparisons per row", least=1)

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class Case:
    """A kind of comparison. Best rates are in octaves from the middle one of three."""

    n_modes: int = 2
    n_seeds: int = 3
    best_rates: str = "at the grid"  # or "half an octave off" for vanilla alone, or "random": up to 1.5 octaves off
    ratio: float = 2.0  # between the grid's rates
    lopsided: float = 0.0  # the k of a curve that is steeper towards higher rates
    cliff: float = 0.0  # how much a mode's loss jumps half an octave above its best rate; vanilla has none
    gap: float = 0.0  # true difference of each mode from vanilla, both at their best rates
    noisier: float = 1.0  # vanilla's noise, in that of the others
    length: float = 0.0  # vanilla's other schedule, in tokens of this one; 0 = none
    m: float = 1.0  # how many times its tokens vanilla needs for each mode's loss


def draw_curve(rng, case, mode, level):
    """A mode's loss over its learning rate, `level` at the best one."""
    at, square = 0.0, SQUARE
    if case.best_rates == "half an octave off" and mode == BASE:
        at = 0.5
    if case.best_rates == "random":
        at, square = rng.uniform(-1.5, 1.5), SQUARE * 2 ** rng.uniform(-1, 1)

    def curve(rate):
        x = math.log2(rate / RATE) - at
        jump = case.cliff if x > 0.5 and mode != BASE else 0.0
        k = case.lopsided
        if k:  # x**2 at its lowest point, then steeper towards higher rates
            return level + square * 2 / k**2 * (math.exp(k * x) - k * x - 1) + jump
        return level + square * x**2 + jump

    return curve


def draw_runs(rng, case, curves):
    """All runs that compare.py would make: ({(mode, rate): {seed: loss}}, {mode: Tuned})."""
    cells, tuned, shifts = defaultdict(dict), {}, dict(zip(SEEDS, SHIFT * rng.standard_normal(len(SEEDS)), strict=True))
    rates = (RATE / case.ratio, RATE, RATE * case.ratio)
    for mode, curve in curves.items():
        noise = NOISE * (case.noisier if mode == BASE else 1)
        loss_of = lambda rate, seed, mode=mode: cells[mode, rate].get(seed)  # noqa: E731
        while True:
            missing, tuned[mode] = search(loss_of, rates, SEEDS[: case.n_seeds])
            if not missing:
                break
            for rate, seed in missing:
                cells[mode, rate][seed] = curve(rate) + shifts[seed] + noise * rng.standard_normal()
    return {cell: losses for cell, losses in cells.items() if losses}, tuned


def draw(rng, case):
    """A comparison: ({mode: its true loss}, what else is counted, its Answers, those without parabola)."""
    steepness = rng.choice((0.05, 1.0))  # losses fall as E + B / D^b; a range from both ends is the least sure there
    fall = (OWN - OTHER) / (1 - 4**-steepness)

    def level(tokens):
        return OWN - fall * (1 - tokens**-steepness)

    modes = [BASE, *(f"mode {i}" for i in range(1, case.n_modes))]
    levels = {mode: level(1.0) if mode == BASE else level(case.m) + case.gap for mode in modes}
    cells, tuned = draw_runs(rng, case, {mode: draw_curve(rng, case, mode, levels[mode]) for mode in modes})
    schedules = []
    if case.length:
        longer = draw_runs(rng, case, {BASE: draw_curve(rng, case, BASE, level(case.length))})
        schedules = [(case.length, judge(*longer)[0][0])]
    as_it_is = {mode: Tuned(t.rate, t.is_edge) for mode, t in tuned.items()}
    answers, fit = judge(cells, tuned, 1.0, schedules)
    seen = {"named": bool(noisy(fit)), "runs": sum(map(len, cells.values())) / len(modes)}
    return levels, seen, answers, judge(cells, as_it_is, 1.0, schedules)[0]


def count(case, repetitions):
    """What part of a Case's comparisons, or of their differences, are as follows."""
    rng, seen = np.random.default_rng(0), defaultdict(list)
    for _ in range(repetitions):
        levels, found, *both = draw(rng, case)
        for name, value in found.items():
            seen[name].append(value)
        for which, (_, *answers) in zip(("", " before"), both, strict=True):
            for a in answers:
                seen[f"±{which}"].append(a.interval)
                true = levels[a.mode] - levels[BASE]
                seen[f"covers{which}"].append(abs(a.gap - true) <= a.interval)
                seen[f"finds{which}"].append(a.p <= 0.05 and a.gap < 0)
            # with a true difference, a verdict is false if it has the wrong sign
            wrong = [a.p <= 0.05 and (a.gap * case.gap <= 0) for a in answers]
            seen[f"false{which}"].append(any(wrong))
        for a in both[0]:
            if a.times:
                seen["m covers"].append(a.times[0] <= case.m <= a.times[1])
                seen["contradicts"].append(a.p > 0.05 and not a.times[0] <= 1 <= a.times[1])
    return {name: float(np.median(x) if "±" in name else np.mean(x)) for name, x in seen.items()}


NULLS = {
    "same curve": {},
    "vanilla's best rate half an octave off the grid": {"best_rates": "half an octave off"},
    "random best rates and steepness": {"best_rates": "random"},
    "the same, grid of √2": {"best_rates": "random", "ratio": 2**0.5},
    "the same, curves as lopsided as vanilla's": {"best_rates": "random", "lopsided": LOPSIDED},
    "the same, twice as lopsided": {"best_rates": "random", "lopsided": 2 * LOPSIDED},
    "same curve, but a cliff of 1 nat beside the best rate of all but vanilla": {"cliff": 1.0},
    "same curve, vanilla three times as noisy": {"noisier": 3.0},
}
SIZES = [(2, 3), (2, 5), (4, 3), (4, 5)]
GAPS = (-0.02, -0.03, -0.05)
LENGTHS, MULTIPLES = (0.5, 2.0), (1.0, 1.1, 1.3)


def tables(repetitions, bar):
    """Yields Markdown tables: of equal modes, of better ones, and of token multipliers."""

    def counted(**case):
        bar.update()
        return count(Case(**case), repetitions)

    rows = []
    for what, case in NULLS.items():
        for modes, seeds in SIZES:
            c = counted(n_modes=modes, n_seeds=seeds, **case)
            numbers = [f"{c[f'{name}{when}']:.3f}" for name in ("covers", "false") for when in (" before", "")]
            rows.append(
                [what, f"{modes}", f"{seeds}", f"{c['runs']:.1f}", f"{c['±']:.4f}", *numbers, f"{c['named']:.2f}"]
            )
    header = ["equal modes", "modes", "seeds", "runs a mode", "±", "covers, best tried", "covers, parabola"]
    yield markdown([*header, "any false, best tried", "any false, parabola", "names a mode"], rows)

    rows = []
    for gap in GAPS:
        for seeds in (3, 5):
            for best_rates in ("at the grid", "random"):
                c = counted(n_seeds=seeds, gap=gap, best_rates=best_rates)
                rows.append([f"{gap}", best_rates, f"{seeds}", f"{c['finds before']:.2f}", f"{c['finds']:.2f}"])
    yield markdown(["true difference", "best rates", "seeds", "found, best tried", "found, parabola"], rows)

    rows = []
    for length in LENGTHS:
        for m in MULTIPLES:
            for modes, seeds in SIZES:
                c = counted(n_modes=modes, n_seeds=seeds, m=m, length=length)
                numbers = [f"{c[name]:.3f}" for name in ("m covers", "contradicts")]
                rows.append([f"{m}", f"{length:g}", f"{modes}", f"{seeds}", *numbers])
    yield markdown(["true m", "other length", "modes", "seeds", "range covers m", "contradicts the difference"], rows)


def main(cfg: CoverageConfig):
    n = len(NULLS) * len(SIZES) + 4 * len(GAPS) + len(LENGTHS) * len(MULTIPLES) * len(SIZES)
    with progress("simulating", n, "row") as bar:
        for table in tables(cfg.repetitions, bar):
            print(table, flush=True)


if __name__ == "__main__":
    run(main, __doc__)
