"""How often is compare.py's verdict right? Its own functions on made-up runs for which we know the truth.

    python -m bench.coverage                       2,000 comparisons a row
    python -m bench.coverage --repetitions=200     a first look

A mode's loss is a curve over log2(rate): a parabola as steep as vanilla's in results/night, a lopsided one, or one of
those recorded there. A run adds its seed's shift, which all modes share, and noise. To try what isn't here, add a row
to NULLS, with curves of your own, or with a new field of Case that `draw_curve` or `draw_runs` uses.
results/coverage.md has the tables.
"""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from common.report import markdown, progress
from common.verdict import Tuned, judge, noisy, search
from configurator import check_fields, run, setting

NOISE, SHIFT = 0.0095, 0.006  # standard deviations of a run and of a seed, in nats: those of results/night
SQUARE = 0.055  # nats per octave squared: vanilla's in results/night
BASE, SEEDS, RATE = "vanilla", range(10), 3e-3
OWN, OTHER = 2.469, 2.2134  # vanilla's losses at 12.3M and 49.2M tokens
# mean losses at rates of 7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2: results/night/README.md, figure rates
RECORDED = {
    "vanilla": (2.6055, 2.4947, 2.4689, 2.5481, 3.0705),
    "resformer": (2.5912, 2.5004, 2.4731, 2.5250, 2.7027),
    "svformer": (2.7071, 2.5074, 2.4550, 2.4365, 2.5470),
    "resformer_lambda": (2.5160, 2.4051, 2.3996, 2.4144, 2.4927),
    "resformer_plus": (2.5643, 2.4354, 2.3943, 2.4162, 2.5116),
    "neutreno": (2.5868, 2.4841, 2.4564, 2.4687, 3.0145),
    "denseformer": (2.6057, 2.4734, 2.4277, 2.4511, 2.7330),
}


@dataclass(frozen=True)
class CoverageConfig:
    repetitions: int = setting(2000, "comparisons per row", least=1)

    def __post_init__(self):
        check_fields(self)


def parabola(x):
    return SQUARE * x**2


def lopsided(k):
    """A curve over octaves from its lowest point: near it SQUARE x**2, then steeper towards higher rates."""
    return lambda x: SQUARE * 2 / k**2 * (math.exp(k * x) - k * x - 1)


def recorded(mode):
    """A curve over octaves from a mode's best recorded rate, through its recorded losses. Between them it is a cubic
    that goes only up or only down (Fritsch and Butland), beyond them a straight line."""
    losses = RECORDED[mode]
    best = losses.index(min(losses))
    steps = np.diff(losses)
    inner = [2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in itertools.pairwise(steps)]
    slopes = [steps[0], *inner, steps[-1]]

    def curve(x):
        at = x + best
        inside = min(max(at, 0.0), len(steps))
        i = min(int(inside), len(steps) - 1)
        u, step, left, right = inside - i, steps[i], slopes[i], slopes[i + 1]
        cubic = u * (left + u * (3 * step - 2 * left - right + u * (left + right - 2 * step)))
        return losses[i] - losses[best] + cubic + (at - inside) * (left if at < 0 else right)

    return curve


@dataclass(frozen=True)
class Case:
    """A kind of comparison. Best rates are in octaves from the middle one of three."""

    n_modes: int = 2
    n_seeds: int = 3
    best_rates: str = "at the grid"  # or "half an octave off" for vanilla alone, or "random": up to 1.5 octaves off
    ratio: float = 2.0  # between the grid's rates
    curves: tuple = (parabola,)  # losses over octaves from the best rate, one of which is drawn for each mode
    cliff: float = 0.0  # how much a loss jumps above the best rate
    cliff_at: tuple = (0.5, 0.5)  # between how many octaves above it
    is_cliff_of_base: bool = False  # vanilla alone has that cliff; else all other modes
    gap: float = 0.0  # true difference of each mode from vanilla, both at their best rates
    noisier: float = 1.0  # vanilla's noise, in that of the others
    tails: int = 0  # noise with the tails of Student's t with this many degrees of freedom, at least 3; 0 = normal
    shift: float = 0.0  # what vanilla's processor adds to each of its losses
    length: float = 0.0  # vanilla's other schedule, in tokens of this one; 0 = none
    m: float = 1.0  # how many times its tokens vanilla needs for each mode's loss


def draw_curve(rng, case, mode, level):
    """A mode's loss over its learning rate, `level` at the best one."""
    at, steepness, edge = 0.0, 1.0, rng.uniform(*case.cliff_at)
    if case.best_rates == "half an octave off" and mode == BASE:
        at = 0.5
    if case.best_rates == "random":
        at, steepness = rng.uniform(-1.5, 1.5), 2 ** rng.uniform(-1, 1)
    shape = case.curves[rng.integers(len(case.curves))]

    def curve(rate):
        x = math.log2(rate / RATE) - at
        jump = case.cliff if x > edge and (mode == BASE) == case.is_cliff_of_base else 0.0
        return level + steepness * shape(x) + jump

    return curve


def modes_of(case):
    return [BASE, *(f"mode {i}" for i in range(1, case.n_modes))]


def draw_runs(rng, case, curves):
    """All runs that compare.py would make: ({(mode, rate): {seed: loss}}, {mode: Tuned})."""
    cells, tuned, shifts = defaultdict(dict), {}, dict(zip(SEEDS, SHIFT * rng.standard_normal(len(SEEDS)), strict=True))
    rates = (RATE / case.ratio, RATE, RATE * case.ratio)
    draw_noise = rng.standard_normal
    if case.tails:  # scaled to the same standard deviation
        draw_noise = lambda: rng.standard_t(case.tails) * (1 - 2 / case.tails) ** 0.5  # noqa: E731
    for mode, curve in curves.items():
        noise, shift = (NOISE * case.noisier, case.shift) if mode == BASE else (NOISE, 0.0)
        loss_of = lambda rate, seed, mode=mode: cells[mode, rate].get(seed)  # noqa: E731
        while True:
            missing, tuned[mode] = search(loss_of, rates, SEEDS[: case.n_seeds])
            if not missing:
                break
            for rate, seed in missing:
                cells[mode, rate][seed] = curve(rate) + shift + shifts[seed] + noise * draw_noise()
    return {cell: losses for cell, losses in cells.items() if losses}, tuned


def draw(rng, case):
    """A comparison: ({mode: its true loss}, what else is counted, its Answers, those without parabola and floor)."""
    steepness = rng.choice((0.05, 1.0))  # losses fall as E + B / D^b; a range from both ends is the least sure there
    fall = (OWN - OTHER) / (1 - 4**-steepness)

    def level(tokens):
        return OWN - fall * (1 - tokens**-steepness)

    levels = {mode: level(1.0) if mode == BASE else level(case.m) + case.gap for mode in modes_of(case)}
    cells, tuned = draw_runs(rng, case, {mode: draw_curve(rng, case, mode, at) for mode, at in levels.items()})
    schedules = []
    if case.length:
        longer = draw_runs(rng, case, {BASE: draw_curve(rng, case, BASE, level(case.length))})
        schedules = [(case.length, judge(*longer)[0][0])]
    tried = {mode: Tuned(t.rate, t.is_edge) for mode, t in tuned.items()}
    answers, fit = judge(cells, tuned, 1.0, schedules)
    seen = {"named": bool(noisy(fit)), "runs": sum(map(len, cells.values())) / case.n_modes}
    return levels, seen, answers, judge(cells, tried, 1.0, schedules, floor=0.0)[0]


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
                seen[f"finds{which}"].append(a.differs and a.gap < 0)
            # with a true difference, a verdict is false if it has the wrong sign
            wrong = [a.differs and a.gap * case.gap <= 0 for a in answers]
            seen[f"false{which}"].append(any(wrong))
        for a in both[0]:
            if a.times:
                seen["m covers"].append(a.times[0] <= case.m <= a.times[1])
                seen["contradicts"].append(not a.differs and not a.times[0] <= 1 <= a.times[1])
    return {name: float(np.median(x) if "±" in name else np.mean(x)) for name, x in seen.items()}


RANDOM = {"best_rates": "random"}  # and steepness
CLIFF = {**RANDOM, "cliff": 1.0, "cliff_at": (0.1, 1.5)}
NULLS = {
    "same curve": {},
    "vanilla's best rate half an octave off the grid": {"best_rates": "half an octave off"},
    "random best rates and steepness": RANDOM,
    "the same, grid of √2": {**RANDOM, "ratio": 2**0.5},
    "the same, lopsided curves": {**RANDOM, "curves": (lopsided(0.7),)},
    "the same, twice as lopsided": {**RANDOM, "curves": (lopsided(1.4),)},
    "the same, vanilla's recorded curve": {**RANDOM, "curves": (recorded(BASE),)},
    "the same, all recorded curves": {**RANDOM, "curves": tuple(map(recorded, RECORDED))},
    "random, a cliff of 1 nat 0.1 to 1.5 octaves above the best rate of all but vanilla": CLIFF,
    "random, such a cliff above that of vanilla alone": {**CLIFF, "is_cliff_of_base": True},
    "same curve, but a cliff of 1 nat beside the best rate of all but vanilla": {"cliff": 1.0},
    "same curve, tails of t with 3 degrees of freedom": {"tails": 3},
    "same curve, vanilla three times as noisy": {"noisier": 3.0},
    "same curve, vanilla alone on a processor that adds 0.011": {"shift": 0.011},
}
SIZES = [(2, 3), (2, 5), (4, 3), (4, 5)]
FOUND = ("same curve", "random best rates and steepness", "the same, all recorded curves")
GAPS = (-0.02, -0.03, -0.05)
LENGTHS, MULTIPLES = (0.5, 2.0), (1.0, 1.1, 1.3)


def fooled(repetitions):
    """What part of equal modes, with random best rates and steepness, look different (to whoever decides beforehand on
    ten seeds, to whoever looks after each from the third to the tenth, for one pair out of six modes, for any of the
    five pairs with vanilla)."""
    rng, seen = np.random.default_rng(0), []
    for _ in range(repetitions):
        cells, tuned = draw_equal(rng, Case(n_seeds=10, **RANDOM))
        looks = [differ(cells, tuned, "mode 1", n) for n in range(3, 11)]
        cells, tuned = draw_equal(rng, Case(n_modes=6, n_seeds=5, **RANDOM))
        pairs = [differ(cells, tuned, mode, 5) for mode in tuned if mode != BASE]
        seen.append((looks[-1], any(looks), pairs[0], any(pairs)))
    return np.mean(seen, axis=0)


def draw_equal(rng, case):
    """What `draw_runs` returns, of modes that are equal at their best rates."""
    return draw_runs(rng, case, {mode: draw_curve(rng, case, mode, OWN) for mode in modes_of(case)})


def differ(cells, tuned, mode, n_seeds):
    """Whether a mode and vanilla look different, from the first n_seeds of their own runs."""
    pair, seeds = {name: tuned[name] for name in (BASE, mode)}, SEEDS[:n_seeds]
    own = {cell: {s: of[s] for s in of if s in seeds} for cell, of in cells.items() if cell[0] in pair}
    return judge(own, pair)[0][1].differs


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
        for what in FOUND:
            for modes, seeds in SIZES:
                c = counted(n_modes=modes, n_seeds=seeds, gap=gap, **NULLS[what])
                rows.append([f"{gap}", what, f"{modes}", f"{seeds}", f"{c['finds before']:.2f}", f"{c['finds']:.2f}"])
    header = ["true difference", "curves", "modes", "seeds", "found, best tried", "found, parabola"]
    yield markdown(header, rows, left=2)

    rows = []
    for length in LENGTHS:
        for m in MULTIPLES:
            for modes, seeds in SIZES:
                c = counted(n_modes=modes, n_seeds=seeds, m=m, length=length)
                numbers = [f"{c[name]:.3f}" for name in ("m covers", "contradicts")]
                rows.append([f"{m}", f"{length:g}", f"{modes}", f"{seeds}", *numbers])
    yield markdown(["true m", "other length", "modes", "seeds", "range covers m", "contradicts the difference"], rows)

    bar.update()
    ten, looks, pair, pairs = fooled(repetitions)
    rows = [["two modes, seeds added from 3 to 10 until they differ", f"{ten:.3f}", f"{looks:.3f}"]]
    rows += [["a pair chosen out of six modes with 5 seeds", f"{pair:.3f}", f"{pairs:.3f}"]]
    yield markdown(["equal modes", "false if fixed beforehand", "false"], rows)


def main(cfg: CoverageConfig):
    n = 1 + (len(NULLS) + len(FOUND) * len(GAPS) + len(LENGTHS) * len(MULTIPLES)) * len(SIZES)
    with progress("simulating", n, "row") as bar:
        for table in tables(cfg.repetitions, bar):
            print(table, flush=True)


if __name__ == "__main__":
    run(main, __doc__)
