"""Every number of the results, computed again from the records, by other code than the pages were written with."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
from conftest import ROOT

from bench import coverage
from common.files import read_record_lines
from common.runs import read_run
from common.statistics import Fit, multiplier, t_95, t_tail
from common.verdict import judge, search


def page(path):
    """The words of a page, on one line."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").replace("−", "-").split())


PAGE, NIGHT, README = page("results/README.md"), page("results/night/README.md"), page("README.md")
RUNS = list(read_record_lines(ROOT / "results/night/runs.jsonl", "a run's record"))
RUNS = [run for run in RUNS if run["start"]["max_steps"] > 1]  # the model before training is none
SHAPE = {"n_layer": 6, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_tokens": 2048, "max_steps": 6000}
SHAPE |= {"bos": False, "weight_decay": 0.1}
SMALL, MID = dict(n_head=2, n_layer=4, n_embd=64), dict(n_head=5, n_embd=160)
LARGE, DEEP = dict(n_layer=8, n_head=6, n_embd=192), dict(n_layer=12)
LONG, SHORT = dict(max_steps=24000), dict(max_steps=1500)


def setting(changes):
    return tuple((SHAPE | changes).items())


def losses():
    """{(setting, mode, rate): {seed: validation loss at the end}}"""
    found = {}
    for run in RUNS:
        of = run["settings"]
        where = tuple((name, of.get(name, default)) for name, default in SHAPE.items())
        cell = found.setdefault((where, of["value_mode"], of["learning_rate"]), {})
        cell[of["seed"]] = run["val"][str(run["start"]["max_steps"])]
    return found


LOSSES = losses()
BASE = setting({})


def loss(mode, rate=0.003, seed=42, **changes):
    return LOSSES[setting(changes), mode, rate][seed]


def mean(mode, rate=0.003, **changes):
    of = LOSSES[setting(changes), mode, rate]
    return sum(of.values()) / len(of)


def planned():
    """{(mode, steps): validation loss at the end} of the plan's pairs, which have an error like night's."""
    runs = read_record_lines(ROOT / "results/plan.jsonl", "a run's record")
    lengths = [(run["settings"]["value_mode"], run["settings"]["max_steps"]) for run in runs]
    return {of: run["val"][str(of[1])] for of, run in zip(lengths, runs, strict=True)}


def family():
    """The fit of all cells with several seeds, at the modes' own rate or vanilla's, without the smallest models."""
    cells = {}
    for (where, mode, rate), of in LOSSES.items():
        is_own = where != BASE or rate == 0.003 or (mode, rate) == ("svformer", 0.006)
        if len(of) > 1 and is_own and where != setting(SMALL):
            cells[where, mode, rate] = {(where, seed): value for seed, value in of.items()}
    return Fit(cells)


FIT = family()


def gap(mode, rate=0.003, base=0.003, **changes):
    """(difference from vanilla, half of its interval, p)."""
    where = setting(changes)
    return FIT.contrast({(where, mode, rate): 1, (where, "vanilla", base): -1})


def at_rate(mode, rate):
    """The same, of the three modes with three seeds at a rate, which have an error of their own."""
    cells = {mode: LOSSES[BASE, mode, rate] for mode in ("vanilla", "resformer", "svformer")}
    return Fit(cells).contrast({mode: 1, "vanilla": -1})


def gain(mode, rate, **changes):
    """How much lower than at `rate` a parabola through that rate and those beside it is. At a rate with seed 42 alone
    its loss counts without what that seed adds, on average, where all three ran."""
    cells = [LOSSES[cell] for cell in FIT.cells if cell[0] == BASE]
    of_42 = sum(of[42] - sum(of.values()) / 3 for of in cells) / len(cells)
    losses = [LOSSES[setting(changes), mode, x] for x in (rate / 2, rate, rate * 2)]
    levels = [sum(of.values()) / 3 if len(of) == 3 else of[42] - of_42 for of in losses]
    square, slope, level = np.polyfit((-1, 0, 1), levels, 2)
    return levels[1] - (level - slope**2 / (4 * square))


def difference(mode, rate, vanillas, **changes):
    """A gap in another setting minus that of the base."""
    own = {"svformer": 0.006}.get(mode, 0.003)
    weights = {(setting(changes), mode, rate): 1, (setting(changes), "vanilla", vanillas): -1}
    return FIT.contrast(weights | {(BASE, mode, own): -1, (BASE, "vanilla", 0.003): 1})


def g(mode, *rates, **changes):
    return f"{gap(mode, *rates, **changes)[0]:+.3f}"


def tokens(where, other):
    """How many times its tokens vanilla needs for λ = 2's loss: the range's two ends."""
    cells = [(where, "resformer_lambda"), (where, "vanilla"), (other, "vanilla")]
    errors = [FIT.noise / len(LOSSES[setting(of), mode, 0.003]) ** 0.5 for of, mode in cells]
    points = [((SHAPE | of)["max_steps"] * 2048, mean("vanilla", **of)) for of in (where, other)]
    ends = multiplier(mean("resformer_lambda", **where), *points, errors, FIT.df)
    return [f"{end:.3g}" if end > 2 else f"{end:.2f}" for end in ends]


def holm(ps):
    """Holm's correction, which the finished plans name: {mode: p} -> {mode: p}."""
    largest, left, corrected = 0.0, len(ps), {}
    for mode in sorted(ps, key=ps.get):
        largest = max(largest, min(1.0, left * ps[mode]))
        corrected[mode], left = largest, left - 1
    return corrected


def judge_by_plan(cells, tuned):
    """compare.py's `judge` by the rules of the finished plans: no floor, and Holm's correction."""
    answers, fit = judge(cells, tuned, floor=0.0)
    ps = {a.mode: t_tail(abs(a.gap) * t_95(fit.df) / a.interval, fit.df) for a in answers[1:]}
    return [dataclasses.replace(a, p=holm(ps).get(a.mode)) for a in answers], fit


ENGLISH = ROOT / "results/english"
NOVELS, RATES = page("results/english/README.md"), (1.5e-3, 3e-3, 6e-3)


def english():
    """({(mode, rate, seed): Curves} of the kept English runs, {(mode, rate): {seed: loss}}, the Answers, the Fit)."""
    runs = {}
    for folder in sorted(ENGLISH.glob("*-*-*-*/")):
        mode, _, rate, seed = folder.name.split("-")
        runs[mode, float(rate), int(seed)] = read_run(folder)
    cells, tuned = {}, {}
    for (mode, rate, seed), run in runs.items():
        cells.setdefault((mode, rate), {})[seed] = run.final_loss
    for mode in ("vanilla", "resformer", "resformer_lambda", "svformer"):
        loss_of = lambda rate, seed, mode=mode: cells.get((mode, rate), {}).get(seed)  # noqa: E731
        missing, tuned[mode] = search(loss_of, RATES, (42, 1, 2))
        assert not missing
    return runs, cells, *judge_by_plan(cells, tuned)


RUNS_IN_ENGLISH, CELLS_IN_ENGLISH, ANSWERS, FIT_IN_ENGLISH = english()
IN_ENGLISH = {answer.mode: answer for answer in ANSWERS}


def in_english(mode, seed):
    """(steps, training losses) of a mode's run at its best rate."""
    steps = RUNS_IN_ENGLISH[mode, IN_ENGLISH[mode].tuned.rate, seed].steps
    return steps["step"], steps["loss"]


def in_python(mode, seed):
    name = f"82M-2048-{mode}" if mode == "svformer" else f"82M-2048-{mode}-lr0.0003"  # each at its best rate
    (run,) = (run for run in RUNS if run["name"] == f"{name}-{seed}")
    return run["every"] * np.arange(1, 1 + len(run["losses"])), np.array(run["losses"])


def over(losses_of, mode, seed, end):
    """The mean training loss of a run over the 200 steps up to `end`."""
    steps, losses = losses_of(mode, seed)
    return losses[(steps > end - 200) & (steps <= end)].mean()


def lead(mode, losses_of):
    """How much lower a mode's training loss is than vanilla's after a tenth of the training, in steps 501 to 700."""
    return np.mean([over(losses_of, "vanilla", seed, 700) - over(losses_of, mode, seed, 700) for seed in (42, 1, 2)])


def fall(losses_of):
    """How much vanilla's training loss falls in the second half of the training."""
    return np.mean(
        [over(losses_of, "vanilla", seed, 3000) - over(losses_of, "vanilla", seed, 6000) for seed in (42, 1, 2)]
    )


def spread(losses):
    return np.std(list(losses.values()), ddof=1)


def cochran(variances):
    """Cochran's p that the largest variance of groups of three belongs to the others. F's tail at 2 degrees of freedom
    is a power."""
    k, largest = len(variances), max(variances) / sum(variances)
    f, df = largest * (k - 1) / (1 - largest), 2 * (k - 1)
    return k * (1 + 2 * f / df) ** (-df / 2)


def gap_in_english(mode):
    return f"{IN_ENGLISH[mode].gap:+.3f} ± {IN_ENGLISH[mode].interval:.3f}"


def alone_in_english(mode):
    """The Answer on a mode from its own runs and vanilla's only."""
    tuned = {name: IN_ENGLISH[name].tuned for name in ("vanilla", mode)}
    return judge_by_plan({cell: of for cell, of in CELLS_IN_ENGLISH.items() if cell[0] in tuned}, tuned)[0][1]


def worse_in_english(mode, rate):
    """(by how much a mode's gap is larger on English than on Python, half of its interval)."""
    python = gap(mode, rate)
    return IN_ENGLISH[mode].gap - python[0], math.hypot(IN_ENGLISH[mode].interval, python[1])


MEAN_42 = (2.4592 + 2.4812) / 2  # vanilla's seed 42 on both processors
CHOSEN = [("resformer", 0.003), ("svformer", 0.006), ("resformer_lambda", 0.003), ("resformer_plus", 0.003)]
CHOSEN += [("neutreno", 0.003), ("denseformer", 0.003)]


def sentences():
    """What results/README.md must say."""
    half, one = gap("resformer")[1], t_95(FIT.df) * FIT.noise * 2**0.5
    yield f"so three seeds measure a difference to ± {half:.3f}, and a single one to ± {one:.3f} at best."
    for name, mode, rate, others in (
        ("ResFormer", "resformer", 0.003, (0.0015, 0.0015)),
        ("λ = 2", "resformer_lambda", 0.003, (None, 0.0015)),
        ("SVFormer", "svformer", 0.006, (None, 0.003)),
    ):
        gaps = [
            f"{g(mode, at, 0.0015, **of)} ± {half:.3f}" if at else "-"
            for at, of in zip(others, (DEEP, LARGE), strict=True)
        ]
        late = loss(mode, rate, **LONG) - loss("vanilla", **LONG)
        yield f" | {g(mode, rate)} ± {half:.3f} | {gaps[0]} | {gaps[1]} | {late:+.3f}* |"
        yield f"| {name} | {gap_in_english(mode)} | {g(mode, rate)}"
    value, interval, _ = gap("resformer")
    novels = IN_ENGLISH["resformer"]
    is_excluded = value - interval > -0.027 and novels.gap - novels.interval > -0.027
    yield "At the base size, both intervals exclude a gain that large, if" if is_excluded else "no such finding"
    yield f"ends {gap('scaled')[0]:.2f} nats above vanilla. We only tried it at vanilla's rate"
    middle = gap("resformer_lambda", 0.0015, 0.0015, **MID)[0]
    yield f"With 2.9M parameters λ = 2 ends {-middle:.2f} nats below vanilla."
    early, late = ([float(end) for end in tokens(*of)] for of in (({}, LONG), (LONG, {})))
    novels, code = (lead("resformer_lambda", losses_of) for losses_of in (in_english, in_python))
    yield f"λ = 2's training loss is {novels:.2f} nats lower than vanilla's on English, and {code:.2f} lower on Python"
    for losses_of, most in ((in_english, novels), (in_python, code)):
        assert all(0 < lead(mode, losses_of) < most for mode in ("resformer", "svformer"))
    both = [worse_in_english(*of) for of in (("resformer_lambda", 0.003), ("svformer", 0.006))]
    (ours,) = {f"{more:.2f} ± {half:.2f}" for more, half in both}
    yield f"Against vanilla, both do worse on English than on Python, by {ours} nats,"
    (p,) = {f"{IN_ENGLISH[mode].p:.3f}" for mode in ("resformer_lambda", "svformer")}
    yield f"p is {p} for both, and [the plan](PLAN.md) wants it below 0.05."
    cells = {mode: (mode, IN_ENGLISH[mode].tuned.rate) for mode in IN_ENGLISH}
    others = [mode for mode in cells if mode != "vanilla"]
    ps = holm({mode: FIT_IN_ENGLISH.contrast({cells[mode]: 1, cells["vanilla"]: -1})[2] for mode in others})
    yield f"Without the parabolas, p is {ps['resformer_lambda']:.3f} for λ = 2 and {ps['svformer']:.3f} for SVFormer."
    less, more = IN_ENGLISH["resformer_lambda"], IN_ENGLISH["svformer"]
    yield f"λ = 2 (V_n + 2 V_1) finishes {-less.gap:.2f} nats lower there, and SVFormer {more.gap:.2f} higher"
    is_beside_0 = less.gap + less.interval < 0 < more.gap - more.interval
    yield "λ = 2's interval lies below zero, and SVFormer's above" if is_beside_0 else "no such finding"
    yield f"the vanilla base model needs {early[0]:.1f} to {early[1]:.1f} times as many tokens."
    twice = planned()["vanilla", 12000] - planned()["resformer_lambda", 12000]
    four_times = loss("vanilla", **LONG) - loss("resformer_lambda", **LONG)
    yield f"With twice the training, a single run of λ = 2 ends {twice:.2f} nats below vanilla,"
    yield f"with four times, another ends {four_times:.2f} below."
    yield f"At that length vanilla needs {late[0]:.1f} to {late[1]:.1f} times as many tokens."
    yield f"**SVFormer ends {-gap('svformer', 0.006)[0]:.2f} nats below vanilla, with 58% of the cache.**"
    assert all(LOSSES[BASE, mode, 0.006][42] - loss("vanilla", 0.006) < gap(mode, rate)[0] for mode, rate in CHOSEN)
    yield "all six modes that we tuned for the base model look better at twice vanilla's best rate."
    seems = [-at_rate(mode, 0.006)[0] for mode in ("resformer", "svformer")]
    yield "ResFormer seems to win by {:.2f} nats, and SVFormer by {:.2f}.".format(*seems)
    yield f"ends {-gap('denseformer')[0]:.2f} nats below vanilla, and NeuTRENO's {-gap('neutreno')[0]:.2f} could"
    shared = [loss(mode) - MEAN_42 for mode in ("share_q", "share_k")]
    yield "sharing keys or queries costs about 0.3 nats" if all(0.25 < x < 0.35 for x in shared) else "no such finding"
    assert abs(gap("svformer")[0]) < half  # sharing values, at the same rate
    between = gap("svformer", 0.006)[0] - gain("svformer", 0.006) + gain("vanilla", 0.003)
    others = [gain(mode, rate) - gain("vanilla", 0.003) for mode, rate in CHOSEN if mode != "svformer"]
    yield f"moves SVFormer to {between:.3f} and the others by at most {max(map(abs, others)):.3f}."


def certainty():
    """What results/README.md must say of how sure it is."""
    pairs = [abs(a - b) for cell in FIT.cells for a, b in itertools.combinations(LOSSES[cell].values(), 2)]
    yield f"two runs that differ only in their seed end {np.mean(pairs):.3f} nats apart on average"
    deep, *wider = -gap("resformer", 0.0015, 0.0015, **DEEP)[0], gap("resformer", 0.0015, 0.0015, **LARGE)[0]
    wider = [-wider[0] - gain("vanilla", 0.0015, **LARGE), -wider[0]]
    yield "by {:.2f} nats with 12 layers and by {:.2f} to {:.2f} with 8 wider ones".format(deep, *wider)
    yield f"With 5.1M a parabola puts vanilla {gain('vanilla', 0.0015, **LARGE):.3f} lower"
    tried = {
        of: [rate for where, mode, rate in LOSSES if (where, mode) == of]
        for of in ((setting(LARGE), "resformer"), (setting(MID), "vanilla"))
    }
    best = [min(rates, key=lambda rate: LOSSES[(*of, rate)][42]) for of, rates in tried.items()]
    are_edges = all(at in (min(rates), max(rates)) for at, rates in zip(best, tried.values(), strict=True))
    yield (
        "best one with 5.1M parameters is at the edge, and so is vanilla's with 2.9M"
        if are_edges
        else "no such finding"
    )
    falls = fall(in_python), fall(in_english)
    yield "vanilla's training loss still falls by {:.2f} nats there, and by {:.2f} on English".format(*falls)
    both = {where for where, mode, _ in LOSSES if mode == "resformer"} & {
        where for where, mode, _ in LOSSES if mode == "vanilla"
    }
    assert gap("resformer", 0.0015, 0.0015, **DEEP)[2] * len(both) < 0.05
    yield f"a correction for all {len(both)} settings in which it ran against vanilla"
    less, more = IN_ENGLISH["resformer_lambda"], IN_ENGLISH["svformer"]
    ps = sorted(t_tail(abs(a.gap) * t_95(FIT_IN_ENGLISH.df) / a.interval, FIT_IN_ENGLISH.df) for a in (less, more))
    assert 3 * ps[0] == pytest.approx(less.p) and 3 * ps[0] > 2 * ps[1]
    yield f"SVFormer's own would be {2 * ps[1]:.3f}."
    spreads = {mode: spread(answer.losses) for mode, answer in IN_ENGLISH.items()}
    (others,) = {f"{spreads[mode]:.3f}" for mode in spreads if mode != "vanilla"}
    yield f"Its three seeds spread by {spreads['vanilla']:.3f} nats, those of each other mode by {others},"
    yield f"Cochran's p is {cochran([x**2 for x in spreads.values()]):.2f}"
    groups = {
        is_vanilla: [spread(LOSSES[c]) for c in FIT.cells if (c[1] == "vanilla") == is_vanilla]
        for is_vanilla in (True, False)
    }
    assert len(groups[True]) == 5
    pooled = [np.mean(np.square(groups[is_vanilla])) ** 0.5 for is_vanilla in (True, False)]
    yield "on Python vanilla's seeds spread by {:.3f} in five groups, and the others' by {:.3f},".format(*pooled)
    for end in range(1000, 6001, 1000):
        assert over(in_english, "vanilla", 42, end) < min(over(in_english, "vanilla", seed, end) for seed in (1, 2))
    ahead, behind = (
        np.mean([of.losses[seed] - IN_ENGLISH["vanilla"].losses[seed] for seed in (1, 2)]) for of in (less, more)
    )
    yield f"Without it λ = 2 would lead by {-ahead:.3f}, and SVFormer be behind by {behind:.3f}."


def evidence():
    """What results/night/README.md must say of noise."""
    half, one = (t_95(FIT.df) * FIT.noise * (2 / n) ** 0.5 for n in (3, 1))
    yield f"It is {FIT.noise:.4f} nats, the standard deviation left in {len(FIT.cells)} cells"
    yield f"each seed's shift, and {FIT.df} degrees of freedom are"
    yield f"{t_95(FIT.df):.2f} × {FIT.noise:.4f} × √(2/3) = ± {half:.3f}, and one seed measures it to ± {one:.3f}"
    yield f"estimate of their own, which gives ± {at_rate('resformer', 0.006)[1]:.3f}."
    yield f"compare them with {MEAN_42:.3f}, the mean"


def readmes():
    """What README must say."""
    value, interval, _ = gap("resformer")
    yield "**ResFormer doesn't help our base model**" if abs(value) < interval else "no such finding"
    assert abs(IN_ENGLISH["resformer"].gap) < IN_ENGLISH["resformer"].interval
    assert all(answer.p is None or answer.p > 0.05 for answer in ANSWERS)  # "may be luck"
    deep = gap("resformer", 0.0015, 0.0015, **DEEP)[0]
    yield f"With 12 layers it ends about {-deep:.2f} nats below vanilla on Python"
    least, most = (f"{float(times):.1f}" for times in tokens({}, LONG))
    yield f"V_n + 2 V_1 ends about {-IN_ENGLISH['resformer_lambda'].gap:.2f} nats lower, which may be luck."
    yield f"On Python it's {-gap('resformer_lambda')[0]:.2f} lower, worth {least} to {most} times as many tokens."
    yield f"On English it ends about {IN_ENGLISH['svformer'].gap:.2f} nats higher, which may be luck, too."
    yield f"On Python it ends about {-gap('svformer', 0.006)[0]:.2f} lower."


def rows():
    """What the lecture's table must have."""
    late = {mode: loss(mode, rate, **LONG) - loss("vanilla", **LONG) for mode, rate in CHOSEN[1:3]}
    yield f"|ResFormer|{g('resformer')}||"
    yield f"|ResFormer with 12 layers|{g('resformer', 0.0015, 0.0015, **DEEP)}||"
    yield f"|V_n + V_1|{g('resformer_lambda_1')}||"
    yield f"|V_n + 2 V_1|{g('resformer_lambda')}|{late['resformer_lambda']:+.3f}*|"
    yield f"|SVFormer|{g('svformer', 0.006)}|{late['svformer']:+.3f}*|"
    yield f"|all layers share the first one's queries|{loss('share_q') - MEAN_42:+.2f}*||"
    yield f"|all layers share the first one's keys|{loss('share_k') - MEAN_42:+.2f}*||"


SAID = (
    [(page("docs/lecture.md"), s) for s in rows()]
    + [(PAGE, s) for s in [*sentences(), *certainty()]]
    + [(NIGHT, s) for s in evidence()]
    + [(README, s) for s in readmes()]
)


@pytest.mark.parametrize("page,sentence", SAID)
def test_the_page_says(page, sentence):
    assert sentence in page


def test_holm():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.6, "e": 1e-7}
    right = multitest.multipletests(list(ps.values()), method="holm")[1]
    assert holm(ps) == pytest.approx(dict(zip(ps, right, strict=True)))


def test_the_recorded_curves_of_coverage():
    for mode, of in coverage.RECORDED.items():
        assert of == tuple(round(mean(mode, rate), 4) for rate in (0.00075, 0.0015, 0.003, 0.006, 0.012))


def test_one_family_of_cells():
    assert len(FIT.cells) == 26 and {len(LOSSES[cell]) for cell in FIT.cells} == {3}


def test_who_differs_from_vanilla():
    ps = holm({mode: gap(mode, rate)[2] for mode, rate in CHOSEN})
    found = {mode for mode, p in ps.items() if p < 0.05}
    assert found == {"resformer_lambda", "resformer_plus", "denseformer", "svformer"}
    both = [difference(mode, 0.0015, 0.0015, **LARGE)[0] for mode in ("resformer", "resformer_lambda")]
    assert f"{both[0]:.3f}" == f"{both[1]:.3f}"


def test_seeds_1_and_2_alone_say_the_same():
    """Without seed 42 no difference at the base moves by more than 0.006."""
    assert "no tuned mode's difference at the base moves by more than 0.006" in NIGHT
    for mode, rate in CHOSEN:
        of, base = LOSSES[BASE, mode, rate], LOSSES[BASE, "vanilla", 0.003]
        assert abs(sum(of[s] - base[s] for s in (1, 2)) / 2 - gap(mode, rate)[0]) <= 0.006


def test_the_attention_sink():
    """By the analyses that the report keeps."""
    figures = json.loads((ROOT / "results/night.json").read_text(encoding="utf-8"))["figures"]
    sink = next(row for row in figures["fig2"]["rows"] if "importance" in row["what"])
    assert sink["mean"] < 0 and f"the uncertainty is ± {sink['interval']:.2f}" in PAGE


PYTHON, NOVEL = (ROOT / "docs/RECORDS.md").read_text(encoding="utf-8").split("## The board for English")
ROW = re.compile(r"^\|(.+)\|`(\w+)`\|(.+)\|(.+)\|(.+)\|.+\|\w{7}\|$", re.M)


def test_the_board_of_records():
    """docs/RECORDS.md: a mode has a number if its interval against the record before it excludes 0."""
    rows = ROW.findall(PYTHON)
    half, record, n = t_95(FIT.df) * FIT.noise / 3**0.5, None, 0
    for number, mode, loss, against, rate in rows:
        cell = BASE, mode, float(rate)
        assert loss == f"{mean(mode, float(rate)):.3f} ± {half:.3f}"
        gap, error, _ = FIT.contrast({cell: 1, record: -1}) if record else (-1, 0, 0)
        assert against == (f"{gap:+.3f} ± {error:.3f}" if record else "-")
        if gap + error < 0:
            record, n = cell, n + 1
        assert number == (str(n) if record == cell else "-")
    tuned = {mode: mean(mode, rate) for mode, rate in [("vanilla", 0.003), *CHOSEN]}
    below = [mode for mode in tuned if tuned[mode] <= tuned["vanilla"]]
    assert [row[1] for row in rows] == sorted(below, key=tuned.get, reverse=True)


def test_the_board_for_english():
    rows = []
    for answer in sorted(ANSWERS, key=lambda answer: -answer.loss):
        number, gap = ("1", "-") if answer.gap is None else ("-", f"{answer.gap:+.3f} ± {answer.interval:.3f}")
        rows.append((number, answer.mode, f"{answer.loss:.3f}", gap, f"{answer.tuned.rate:g}"))
        assert answer.gap is None or answer.p > 0.05
    first = next(i for i, row in enumerate(rows) if row[1] == "vanilla")
    assert ROW.findall(NOVEL) == rows[first:]


def test_counts():
    assert f"we trained {len(RUNS)} transformers" in PAGE and f"of all {len(RUNS)} runs" in NIGHT
    assert f"on Python and {len(RUNS_IN_ENGLISH)} on English" in PAGE
    lost = sum(run["commit"] is None for run in RUNS)
    assert f"commit and curve of {len(RUNS) - lost} of them. The other {lost} are of seed 42" in NIGHT
    assert f"Those {len(RUNS) - lost} took {sum(run.get('seconds') or 0 for run in RUNS) / 3600:.0f} hours" in NIGHT
    base = next(run["start"]["parameters"] for run in RUNS if run["start"]["parameters"] // 1000 == 1951)
    assert f"Our base model has seen {12.288e6 / base:.1f} tokens per parameter" in PAGE
    lost = [run["val"][str(run["start"]["max_steps"])] for run in RUNS if run["start"]["block_size"] == 1024]
    assert f"{min(lost):.4f} to {max(lost):.4f}" in NIGHT
    assert f"in a run's metrics.jsonl, must be {RUNS[0]['start']['data']}." in NIGHT


def test_the_pairs_of_the_plan():
    plan = page("results/PLAN.md")
    one, ends = t_95(FIT.df) * FIT.noise * 2**0.5, planned()
    for steps, other, words in ((6000, 12000, "m is {:.2f} to {:.2f}, then"), (12000, 6000, "then {:.2f} to {:.2f} (")):
        vanilla, mine = ends["vanilla", steps], ends["resformer_lambda", steps]
        gap = f"{mine - vanilla:.3f}"
        assert f"vanilla ends at {vanilla:.4f}, λ = 2 at {mine:.4f}: {gap} ± {one:.3f}" in plan
        tokens = multiplier(mine, (steps, vanilla), (other, ends["vanilla", other]), [FIT.noise] * 3, FIT.df)
        assert words.format(*tokens) in plan


def test_the_demo_that_readme_shows():
    """With three rates and seeds, from the committed losses."""
    of = json.loads((ROOT / "results/demo.json").read_text(encoding="utf-8"))["losses"]
    cells = {(m, float(rate)): {int(s): x for s, x in at.items()} for m in of for rate, at in of[m].items()}
    tuned = {}
    for mode in ("vanilla", *of):
        loss_of = lambda rate, seed, mode=mode: cells.get((mode, rate), {}).get(seed)  # noqa: E731
        missing, tuned[mode] = search(loss_of, (2e-3, 4e-3, 8e-3), (42, 1, 2))
        assert not missing
    found = {answer.mode: answer for answer in judge(cells, tuned)[0]}
    assert all(a.gap < -a.interval for mode, a in found.items() if mode != "vanilla")
    assert "When [we ran that](results/demo.png), all three were still [clearly ahead](results/demo.json)." in README


def test_the_first_table_that_readme_shows():
    """With one rate and one seed: each loss, and what the sentences below the table say."""
    kept = read_record_lines(ROOT / "results/first.jsonl", "a run's record")
    ends = {run["settings"]["value_mode_name"]: run["val"]["320"] for run in kept}
    base = ends.pop("vanilla")
    assert len(ends) == 3 and f"| vanilla | 0.002 | {base:.4f} | - |" in README
    for mode, end in ends.items():
        assert f"| {mode} | 0.002 | {end:.4f} | {end - base:.4f} |" in README
        assert f"{mode} ends {base - end:.3f} nats below vanilla." in README


def earlier_error(answer):
    """Of a parabola's gain, by the formula before commit 1544113: what a cubic term a tenth as large would add."""
    x = np.log2(answer.tuned.around)
    square, *_ = np.polyfit(x, [FIT_IN_ENGLISH.level((answer.mode, rate)) for rate in answer.tuned.around], 2)
    return 0.1 * square * abs(np.prod(np.log2(answer.best.rate) - x))


def test_the_verdicts_of_the_plan():
    plan, (base, *others) = page("results/PLAN.md"), ANSWERS
    assert f"2026-11-28, {len(RUNS_IN_ENGLISH)} runs" in plan
    assert f"ResFormer's interval, {gap_in_english('resformer')}, includes 0" in plan
    assert f"λ = 2 is at {gap_in_english('resformer_lambda')} and SVFormer at {gap_in_english('svformer')}." in plan
    share = FIT_IN_ENGLISH.shares(lambda cell: cell[0])["vanilla"]
    assert (
        f"The noise is {FIT_IN_ENGLISH.noise:.4f}, below Python's {FIT.noise:.4f}, but {share:.0%} of the sum" in plan
    )
    ps = {}
    for answer in others:
        weights = answer.best.weights | {cell: -weight for cell, weight in base.best.weights.items()}
        error = math.hypot(earlier_error(answer), earlier_error(base))
        ps[answer.mode] = FIT_IN_ENGLISH.contrast(weights, error)[2]
    (p,) = {f"{holm(ps)[mode]:.3f}" for mode in ("resformer_lambda", "svformer")}
    assert f"With the old one Holm's p is {p} for both" in plan and f"(PLAN.md) both would be {p}." in PAGE


def test_english_modes_one_at_a_time():
    alone = [alone_in_english(mode) for mode in ("resformer", "resformer_lambda", "svformer")]
    assert min(answer.p for answer in alone) > 0.11 and "Then no p is below 0.11" in PAGE
    assert alone[0].gap - alone[0].interval < -0.027
    resformer, two, svformer = (f"± {answer.interval:.3f}" for answer in alone)
    said = f"ResFormer is at {resformer}, which reaches -0.027, λ = 2 at {two} and SVFormer at {svformer}."
    assert said in page("results/PLAN.md")


def test_the_page_has_all_english_runs():
    """A line for each fifty steps of kept runs is read like others. The page's grid has their losses."""
    assert all(len(run.steps["loss"]) == 120 for run in RUNS_IN_ENGLISH.values())
    above = np.mean([run.final_loss - run.steps["loss"][-4:].mean() for run in RUNS_IN_ENGLISH.values()])
    assert f"On them the loss is about {above:.2f} above that of the last training steps" in NOVELS
    rates = sorted({rate for _, rate, _ in RUNS_IN_ENGLISH})
    assert f"|mode|{'|'.join(f'{rate:g}' for rate in rates)}|seed 1|seed 2|" in NOVELS
    for mode in dict.fromkeys(mode for mode, *_ in RUNS_IN_ENGLISH):
        of = {(rate, seed): f"{run.final_loss:.4f}" for (m, rate, seed), run in RUNS_IN_ENGLISH.items() if m == mode}
        cells = [of.pop((rate, 42), "") for rate in rates]
        cells += [next((of.pop(key) for key in list(of) if key[1] == seed), "") for seed in (1, 2)]
        assert not of and f"|{mode}|{'|'.join(cells)}|" in NOVELS.replace("*", "")


def test_the_other_processor():
    again = (
        read_run(ENGLISH / "again/vanilla-6000-0.003-1").final_loss - RUNS_IN_ENGLISH["vanilla", 0.003, 1].final_loss
    )
    assert f"Vanilla's seed 1 ended {again:.3f} higher [on the Xeon](again)." in NOVELS


def test_the_answer_in_english():

    less, more = IN_ENGLISH["resformer_lambda"].gap, IN_ENGLISH["svformer"].gap
    assert f"finishes {-less:.2f} nats lower than vanilla, and SVFormer {more:.2f} higher" in NOVELS
    for mode, answer in IN_ENGLISH.items():
        row = [mode, f"{answer.tuned.rate:g}", f"{sum(answer.losses.values()) / 3:.4f}", f"{answer.best.rate:.2g}"]
        row += [f"{answer.loss:.4f}"]
        row += ["-", "-"] if mode == "vanilla" else [f"{answer.gap:+.3f} ± {answer.interval:.3f}", f"{answer.p:.2g}"]
        assert f"| {' | '.join(row)} |" in NOVELS


def test_the_first_runs_of_depth():
    runs = {folder.name: read_run(folder) for folder in (ROOT / "results/depth").glob("*-*-*-*/")}
    said = [f"{run.final_loss:.4f} with rate {name.split('-')[2]}" for name, run in sorted(runs.items())]
    assert f"Vanilla with seed 42 ends at {' and at '.join(said)}." in page("results/depth/README.md")


def why(name):
    """({(mode, rate): {seed: loss}}, the Answers, the Fit) of a set of the plan's experiment B, by its rules."""
    cells, tuned = {}, {}
    for run in read_record_lines(ROOT / f"results/why/{name}.jsonl", "a run's record"):
        of = run["settings"]
        cell = cells.setdefault((of["value_mode_name"], of["learning_rate"]), {})
        cell[of["seed"]] = run["val"][str(of["max_steps"])]
    for mode in ("vanilla", "resformer_lambda"):
        loss_of = lambda rate, seed, mode=mode: cells.get((mode, rate), {}).get(seed)  # noqa: E731
        missing, tuned[mode] = search(loss_of, RATES, range(11, 16))
        assert not missing
    return cells, *judge(cells, tuned)


def test_the_runs_of_why():
    text = page("results/why/README.md")
    cells, (base, mine), fit = why("own")
    assert f"{sum(map(len, cells.values()))} runs of 1,500 steps" in text
    assert f"λ = 2 ends at {mine.loss:.4f} and vanilla at {base.loss:.4f}" in text
    assert fit.noise < 0.05 and f"The noise of *own* is {fit.noise:.5f} nats" in text
