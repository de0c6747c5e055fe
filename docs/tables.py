"""The tables of numbers in docs/ and results/README.md, made from results/*.json and from the table of modes.

    python docs/tables.py            write them into the pages
    python docs/tables.py --check    end with code 1, and name the pages that differ from the results

A page holds each table between `<!-- table: NAME -->` and `<!-- end -->`. To add one, write these two lines into one
page, and a function that returns the table into MAKERS below, under that NAME.
"""

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from oldconfig import command_line, run_main, setting


@dataclass(frozen=True)
class TablesConfig:
    """Every setting of docs/tables.py."""

    check: bool = setting(False, "only compare: write nothing, end with code 1 if a page differs")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(TablesConfig, __doc__)

from bench import LLAMA
from bench.decoding import decoding_table
from bench.training import training_table
from describe import mode_table
from examples import vit
from oldfiles import read_json, write_text
from paper.claims import LABELS, best_rate, gap_in_words, gaps_at_best, gaps_to_vanilla, tally
from paper.figures import GRIDS, RATES, TUNED
from paper.found import Found, read_kept
from paper.runs import NIGHT_LR, SCALES, SEEDS, Job
from report import markdown, mean_interval, with_interval
from value_modes import TABLE, ModelConfig

PLACE = re.compile(r"(<!-- table: (\S+) -->\n)(?:(?!<!-- table:).)*?(<!-- end -->)", re.S)


def bench_rows(name):
    """The rows of results/bench_<name>.json."""
    return read_json(ROOT / f"results/bench_{name}.json", "a file of bench/")["rows"]


def current_training_table(name):
    """Without sides that do not exist any more: each is a mode of the table, or transformers' Llama."""
    rows = bench_rows(f"train_intel_xeon_{name}")
    return training_table([row for row in rows if row["name"].partition(", attn=")[0] in (*TABLE, LLAMA)])


def figures_of(scale):
    """{name: what results/<scale>.json says of a figure}"""
    return read_json(ROOT / f"results/{scale}.json", "results of paper.reproduce")["figures"]


def recorded(scale):
    """The records of a scale."""
    units, kept = SCALES[scale], read_kept(ROOT / f"results/{scale}/runs.jsonl")
    return Found("", units, lambda job: SEEDS[: units.n_seeds(units.here(job))], kept=kept)


def grid_table(scale, size):
    """Vanilla's losses at each rate, and those of other modes minus vanilla's: means over seeds with their 95 %
    intervals. A mode's best rate is bold. The last column has each mode, and vanilla, at its best."""
    found, rows = recorded(scale), []
    for mode in TUNED:
        jobs = GRIDS[size, mode]
        best = best_rate(found, jobs)
        if mode == "vanilla":
            label = LABELS[mode]
            losses = [found.losses(job) for job in (*jobs, best)]
            cells = [with_interval(*mean_interval(values)) for values in losses]
        else:
            label = f"{LABELS[mode]}, minus that"
            gaps = [gaps_to_vanilla(found, job) for job in jobs]
            gaps.append(gaps_at_best(found, jobs))
            cells = [with_interval(*mean_interval(values), sign=True) for values in gaps]
        at = jobs.index(best)
        cells[at] = f"**{cells[at]}**"
        rows.append([label, *cells])
    rates = [f"{lr * SCALES[scale].lr_factor:.3g}" for lr in RATES[size]]
    return markdown(["rate", *rates, "each at its best"], rows)


def weights_table(scale, modes):
    """What modes with learned weights have learned: the weights of V_n and V_1 at the end, by seed and layer."""
    found, rows = recorded(scale), []
    for mode in modes:
        for seed in found.seeds(Job(mode)):
            (layers,) = found.record(Job(mode), seed)["lam"]
            cells = [f"{own:.2f} + {first:.2f}" for own, first in layers[1:]]
            rows.append([LABELS[mode], str(seed), *cells])
    return markdown(["V_n + V_1", "seed", *(f"layer {n}" for n in range(2, 2 + len(cells)))], rows)


def decoding_of_vanilla():
    rows = bench_rows("decode_intel_xeon_x2_82m") + bench_rows("decode_intel_xeon_x1_tiny")
    return decoding_table([row for row in rows if row["name"] == "vanilla"])


def decoding_of_modes():
    """The longest contexts and largest batches that were measured."""
    rows = bench_rows("decode_intel_xeon_x2_sweep") + bench_rows("decode_intel_xeon_x2_cla")
    return decoding_table([row for row in rows if row["batch"] == 16 and row["prompt"] == 4096])


def digits_table():
    """Accuracies and losses of the vision experiment."""
    found = read_json(ROOT / "results/vit_digits.json", "results of examples/vit.py")
    return vit.table(found["runs"], found["settings"]["value_mode"])


GROUPS = {  # of the table of modes: their first rows
    "modes-resformer": "vanilla",
    "modes-sharing": "svformer",
    "modes-neutreno": "neutreno",
    "modes-other": "resformer_lerp",
    "modes-successors": "resformer_zero",
}


def gap_in_our_runs(found, mode):
    """A cell: a mode's loss minus vanilla's, both at vanilla's best rate; "-" if it was not trained at that rate."""
    job = Job(mode, lr=NIGHT_LR)
    seeds = [seed for seed in found.seeds(job) if found.folder(job, seed).name in found.kept]
    if mode == "vanilla" or not seeds:
        return "-"
    return gap_in_words(found, job)


def group_of_modes(name):
    """The rows of one group at the paper's 82M shape, and what our small models lost or gained by it."""
    header, line, *rows = mode_table(ModelConfig()).splitlines()
    starts = [list(TABLE).index(first) for first in GROUPS.values()] + [len(rows)]
    place = list(GROUPS).index(name)
    found = recorded("night")
    lines = [f"{header} our loss minus vanilla's |", f"{line}---:|"]
    for mode, row in list(zip(TABLE, rows, strict=True))[starts[place] : starts[place + 1]]:
        lines.append(f"{row} {gap_in_our_runs(found, mode)} |")
    return "\n".join(lines)


MAKERS = {
    "vit": digits_table,
    "claims-night": lambda: tally(figures_of("night")),
    "night-grid": lambda: grid_table("night", "82M"),
    "night-weights": lambda: weights_table("night", ("resformer_learned", "resformer_plus")),
    "training-tiny": lambda: current_training_table("x1_tiny"),
    "training-82M": lambda: current_training_table("x2_82m"),
    "decoding-vanilla": decoding_of_vanilla,
    "decoding-modes": decoding_of_modes,
}
for group in GROUPS:
    MAKERS[group] = functools.partial(group_of_modes, group)


def with_tables(text):
    """The text of a page with its tables as the results have them."""
    return PLACE.sub(lambda place: f"{place[1]}\n{MAKERS[place[2]]()}\n\n{place[3]}", text)


def main(cfg: TablesConfig):
    changed = []
    for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("results/README.md")]):
        before = page.read_text(encoding="utf-8")
        after = with_tables(before)
        if after != before:
            changed.append(str(page.relative_to(ROOT)))
            if not cfg.check:
                write_text(page, after)
    if cfg.check and changed:
        sys.exit(f"{', '.join(changed)} differ from the results; run `python docs/tables.py`")
    print(f"pages changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    run_main(main, SETTINGS)
