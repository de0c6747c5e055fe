"""The tables of numbers in docs/ and results/README.md, made from results/ and the table of modes; pictures of modes.

    python -m docs.tables            write the tables into the pages, and draw docs/pictures/

A page holds each table between `<!--table:NAME-->` and `<!--end-->`. MAKERS has a function for each NAME.
"""

import functools
import json
import math
import re
from pathlib import Path

from PIL import Image

from bench import LLAMA
from bench.decoding import decoding_table
from bench.training import training_table
from common.files import write_text
from common.plan import mode_table
from common.report import markdown, with_interval
from common.runs import read_kept
from common.statistics import t_95
from compare import SEEDS
from examples import vit
from paper.figures import GRID, jobs_at
from paper.found import Found
from paper.reproduce import compact
from paper.runs import NIGHT_LR, SCALES, Job
from paper.tables import gap_in_words, gaps_table
from plot import plans
from value_modes import TABLE, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- ?table: ?([\w-]+) ?-->\n)(?:(?!<!-- ?table:).)*?(<!-- ?end ?-->)", re.S)
NIGHT = SCALES["night"]


def results(name):
    return json.loads((ROOT / f"results/{name}.json").read_text(encoding="utf-8"))


def bench_rows(*names, **shown):
    """The rows of results/<name>.json that have what is `shown`, without sides that do not exist any more."""
    rows = [row for name in names for row in results(name)["rows"]]
    return [r for r in rows if r | shown == r and (r["name"] in TABLE or r["name"].startswith(LLAMA))]


@functools.cache
def rows_of_modes():
    """The table of all modes at the paper's 82M shape: its lines. It makes each of 70 models, so we make it once."""
    return mode_table(ModelConfig()).splitlines()


@functools.cache
def night():
    """The records of scale night."""
    kept, repeats = (read_kept(ROOT / f"results/night/{name}.jsonl") for name in ("runs", "repeats"))
    return Found(kept, NIGHT, lambda job: SEEDS[: NIGHT.n_seeds(NIGHT.here(job))], jobs_at(NIGHT), repeats)


def group_of_modes(first, after=None):
    """The rows from one mode to the one before `after`, at the paper's 82M shape, and what our small models lost or
    gained, both at vanilla's best rate; "-" if we did not train that."""
    header, line, *rows = rows_of_modes()
    found = night()
    lines = [f"{header} our loss |", f"{line}---:|"]
    modes = list(TABLE)
    for i in range(modes.index(first), modes.index(after) if after else len(modes)):
        job = Job(modes[i], lr=NIGHT_LR)
        is_trained = job != job.baseline and f"{job.name}-{SEEDS[0]}" in found.records
        lines.append(f"{rows[i]} {gap_in_words(found, job) if is_trained else '-'} |")
    return "\n".join(lines)


# When the third seed at a tuned mode's best rate came into results/night/runs.jsonl, and with which commit.
# ResFormer's mean is above vanilla's.
ADDED = {
    "vanilla": ("2026-11-23", "a0bd7ad"),
    **dict.fromkeys(("neutreno", "svformer", "resformer_lambda", "resformer_plus"), ("2026-11-23", "b886f55")),
    "denseformer": ("2026-11-23", "353b7ef"),
}


def board():
    """The modes of ADDED by falling loss, each minus the record before it; no number where the interval has 0 in it."""
    found, record, rows, n = night(), None, [], 0
    fit = found.fit([Job()])
    for job in sorted(map(Job, ADDED), key=lambda job: -sum(found.losses(job))):
        losses, against, is_record = found.losses(job), "-", True
        if record:
            gap, half, _ = found.contrast({job: 1, record: -1})
            against, is_record = with_interval(gap, half, sign=True), gap + half < 0
        if is_record:
            record, n = job, n + 1
        half = t_95(fit.df) * fit.noise / math.sqrt(len(losses))
        loss = with_interval(sum(losses) / len(losses), half)
        rows.append([n if is_record else "-", f"`{job.mode}`", loss, against, found.rate(job), *ADDED[job.mode]])
    return markdown(["#", "mode", "validation loss", "minus the record before", "rate", "date", "commit"], rows, left=2)


def between():
    """What a parabola between the rates makes of the tuned modes' differences from vanilla."""
    header, *rows = gaps_table(night(), GRID["82M"])
    places = [header.index(name) for name in ("mode", "each at its best", "between the rates")]
    rows = [[row[i] for i in places] for row in rows if row[places[2]] != "-"]
    return markdown(["mode", "each at its best rate tried", "each between the rates"], rows)


MAKERS = {
    "records": board,
    "between-rates": between,
    "modes-resformer": lambda: group_of_modes("vanilla", "svformer"),
    "modes-sharing": lambda: group_of_modes("svformer", "neutreno"),
    "modes-neutreno": lambda: group_of_modes("neutreno", "resformer_lerp"),
    "modes-other": lambda: group_of_modes("resformer_lerp", "resformer_zero"),
    "modes-successors": lambda: group_of_modes("resformer_zero"),
    "vit": lambda: vit.table(results("vit_digits")["runs"], vit.MODES),
    "gpu-training": lambda: training_table(bench_rows("gpu_train_82m_modes", "gpu_train_82m", "gpu_train_468m")),
    "gpu-decoding": lambda: decoding_table(bench_rows("gpu_decode_82m", "gpu_decode_468m", batch=1)),
    "cpu-training": lambda: training_table(bench_rows("bench_train_intel_xeon_x1_tiny")),
    "cpu-decoding": lambda: decoding_table(
        bench_rows("bench_decode_intel_xeon_x2_sweep", "bench_decode_intel_xeon_x2_cla", batch=16, prompt=4096)
    ),
}


PICTURES = {  # docs/pictures/NAME.png: the modes that it shows
    "plan": "vanilla resformer svformer neutreno",
    "resformer": "resformer_lambda resformer_learned resformer_prev resformer_all identity cross query hidden",
    "sharing": "svformer svformer_2anchors share_k cla2 cla2_svformer gqa2 svformer_gqa4 mlkv",
    "neutreno": "resformer_neutreno denseformer denseformer_2x2 resformer_denseformer",
    "other": "resformer_head hidden_learned value_embed value_embed_unet",
    "successors": "skipv1 fusedkv_lite share_last value_embed_shared",
}


def draw_picture(name, path):
    """Draw the plans of PICTURES[name], with 4 layers."""
    plans(path, [ModelConfig(n_layer=4, value_mode=mode) for mode in PICTURES[name].split()])
    # so few colours take a third of the bytes
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def with_tables(text):
    """The text of a page with its tables as the results have them."""
    return PLACE.sub(lambda place: f"{place[1]}\n{compact(MAKERS[place[2]]())}\n\n{place[3]}", text)


if __name__ == "__main__":
    for page in (*ROOT.glob("docs/*.md"), ROOT / "results/README.md"):
        write_text(page, with_tables(page.read_text(encoding="utf-8")))
    for picture in PICTURES:
        draw_picture(picture, ROOT / f"docs/pictures/{picture}.png")
