"""The tables of numbers in docs/ and results/README.md, made from results/ and from the table of modes.

    python -m docs.tables            write them into the pages
    python -m docs.tables --check    end with code 1, and name the pages that differ from the results

A page holds each table between `<!-- table: NAME -->` and `<!-- end -->`. To add one, write these two lines into one
page, and a function that returns the table into MAKERS below, under that NAME.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import LLAMA
from bench.decoding import decoding_table
from bench.training import memory_table, training_table
from common.files import read_record, write_text
from common.plan import mode_table
from common.report import markdown
from configurator import run, setting
from examples import vit
from paper.claims import LABELS, best_pair, best_rate, tally
from paper.figures import GRIDS, RATES, TUNED
from paper.found import Found, read_kept
from paper.results import RESULTS
from paper.runs import NIGHT_LR, SCALES, SEEDS, Job
from paper.tables import gap_in_words, interval
from value_modes import TABLE, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- table: (\S+) -->\n)(?:(?!<!-- table:).)*?(<!-- end -->)", re.S)
NIGHT = SCALES["night"]


@dataclass(frozen=True)
class TablesConfig:
    """Every setting of docs.tables."""

    check: bool = setting(False, "only compare: write nothing, end with code 1 if a page differs")


def recorded():
    """The records of scale night."""
    kept = read_kept(ROOT / "results/night/runs.jsonl")
    return Found(kept, NIGHT, lambda job: SEEDS[: NIGHT.n_seeds(NIGHT.here(job))])


def grid_table(size):
    """Vanilla's losses at each rate, and those of other modes minus vanilla's: means over seeds with their 95 %
    intervals. A mode's best rate is bold. The last column has each mode, and vanilla, at its best."""
    found, rows = recorded(), []
    for mode in TUNED:
        jobs = GRIDS[size, mode]
        best = best_rate(found, jobs)
        if mode == "vanilla":
            cells = [interval(found.losses(job)) for job in (*jobs, best)]
        else:
            pairs = [(job, job.baseline) for job in jobs] + [best_pair(found, jobs)]
            cells = [interval(found.gaps(*pair), sign=True) for pair in pairs]
        at = jobs.index(best)
        cells[at] = f"**{cells[at]}**"
        rows.append([LABELS[mode] + (", minus that" if mode != "vanilla" else ""), *cells])
    rates = [f"{lr * NIGHT.lr_factor:.3g}" for lr in RATES[size]]
    return markdown(["rate", *rates, "each at its best"], rows)


def weights_table(*modes):
    """What modes with learned weights have learned: the weights of V_n and V_1 at the end, by seed and layer."""
    found, rows = recorded(), []
    for mode in modes:
        for seed in found.seeds(Job(mode)):
            (layers,) = found.record(Job(mode), seed)["lam"]
            rows.append([LABELS[mode], str(seed), *(f"{own:.2f} + {first:.2f}" for own, first in layers[1:])])
    return markdown(["V_n + V_1", "seed", *(f"layer {n}" for n in range(2, len(rows[0])))], rows)


def bench_rows(*names, **shown):
    """The rows of results/<name>.json that have what is `shown`, without sides that do not exist any more."""
    rows = [row for name in names for row in json.loads((ROOT / f"results/{name}.json").read_text())["rows"]]
    exist = [row for row in rows if row["name"].partition(", attn=")[0] in TABLE or row["name"].startswith(LLAMA)]
    return [row for row in exist if row | shown == row]


def digits_table():
    """Accuracies and losses of the vision experiment."""
    found = json.loads((ROOT / "results/vit_digits.json").read_text())
    return vit.table(found["runs"], found["settings"]["value_mode"])


def group_of_modes(first, after=None):
    """The rows from one mode to the one before `after`, at the paper's 82M shape, and what our small models lost or
    gained, both at vanilla's best rate; "-" if we did not train that."""
    header, line, *rows = mode_table(ModelConfig()).splitlines()
    found, modes = recorded(), list(TABLE)
    lines = [f"{header} our loss minus vanilla's |", f"{line}---:|"]
    for i in range(modes.index(first), modes.index(after) if after else len(modes)):
        job = Job(modes[i], lr=NIGHT_LR)
        is_trained = job != job.baseline and f"{job.name}-{SEEDS[0]}" in found.records
        lines.append(f"{rows[i]} {gap_in_words(found, job) if is_trained else '-'} |")
    return "\n".join(lines)


MAKERS = {
    "modes-resformer": lambda: group_of_modes("vanilla", "svformer"),
    "modes-sharing": lambda: group_of_modes("svformer", "neutreno"),
    "modes-neutreno": lambda: group_of_modes("neutreno", "resformer_lerp"),
    "modes-other": lambda: group_of_modes("resformer_lerp", "resformer_zero"),
    "modes-successors": lambda: group_of_modes("resformer_zero"),
    "vit": digits_table,
    "claims-night": lambda: tally(read_record(ROOT / "results/night.json", RESULTS)["figures"]),
    "night-grid": lambda: grid_table("82M"),
    "night-weights": lambda: weights_table("resformer_learned", "resformer_plus"),
    "gpu-training": lambda: training_table(bench_rows("gpu_train_82m_modes", "gpu_train_82m", "gpu_train_468m")),
    "gpu-memory": lambda: memory_table(bench_rows("gpu_memory_82m")),
    "gpu-decoding": lambda: decoding_table(bench_rows("gpu_decode_82m", "gpu_decode_468m", batch=1)),
    "cpu-training": lambda: training_table(bench_rows("bench_train_intel_xeon_x1_tiny")),
    "cpu-decoding": lambda: decoding_table(
        bench_rows("bench_decode_intel_xeon_x2_sweep", "bench_decode_intel_xeon_x2_cla", batch=16, prompt=4096)
    ),
}


def with_tables(text):
    """The text of a page with its tables as the results have them."""

    def fill(place):
        table = re.sub(r" *\| *", "|", MAKERS[place[2]]())  # a page does not need the spaces
        return f"{place[1]}\n{table}\n\n{place[3]}"

    return PLACE.sub(fill, text)


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
        sys.exit(f"{', '.join(changed)} differ from the results; run `python -m docs.tables`")
    print(f"pages changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    run(main, __doc__)
