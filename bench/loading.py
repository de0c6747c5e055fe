"""Batches from token files, as train.py asks Corpus for them, against nanoGPT's way: tokens/s.

    python -m bench.loading --data_dir=data/demo

The token files are in memory by then if they fit: Corpus has read them to verify them. A disk that must be read first
is slower. Read before: common.py.
"""

from dataclasses import dataclass

from bench import SHAPES, BenchConfig
from configurator import command_line, run_main, setting


@dataclass(frozen=True)
class LoadingConfig(BenchConfig):
    """Every setting of this benchmark."""

    data_dir: str = setting("data/demo", "a folder that prepare.py made", group="Work")
    block_size: int = setting(2048, "tokens per sequence", least=1)


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(LoadingConfig, __doc__)

import itertools
import statistics

import numpy as np
import torch

from bench.common import in_turn, lines_table, ratio, spread, write_results
from data import Corpus
from describe import flops_per_token
from value_modes import ModelConfig

CPU = torch.device("cpu")
STEP = 1024  # sequences of a step, the paper's
NANOGPT = "nanoGPT's way"


def nanogpt_batch(path, rows, block_size, rng):
    """A batch as nanoGPT's get_batch makes it, from one file: opened anew, a tensor per row, stacked."""
    ids = np.memmap(path, "<u2", "r")
    starts = rng.integers(len(ids) - block_size, size=rows)
    cut = [torch.from_numpy(ids[i : i + block_size + 1].astype(np.int64)) for i in starts]
    return torch.stack([row[:-1] for row in cut]), torch.stack([row[1:] for row in cut])


def load_sides(corpus):
    """{side: a function that loads 16 steps, 32 sequences at a time as train.py does, and returns how many}. Steps in
    order go on from round to round; random ones are of the first epoch."""
    rng = np.random.default_rng(0)
    next_step = itertools.count()
    epoch = max(1, sum(corpus.windows("train", domain) for domain in corpus.domains) // STEP)
    files = [corpus.dir / corpus.manifest["splits"]["train"][domain]["file"] for domain in corpus.domains]

    def ours(steps, rows=STEP):
        for step in steps:
            for first in range(0, rows, 32):
                corpus.batch(int(step), STEP, first, first + 32)
        return len(steps) * rows

    def nanogpt():
        for i in range(16 * STEP // 32):
            nanogpt_batch(files[i % len(files)], 32, corpus.block_size, rng)
        return 16 * STEP

    return {
        "steps in order": lambda: ours([next(next_step) for _ in range(16)]),
        "random steps": lambda: ours(rng.integers(epoch, size=16)),
        "random steps, one rank of 8": lambda: ours(rng.integers(epoch, size=16), STEP // 8),
        NANOGPT: nanogpt,
    }


def loading_rows(cfg):
    """Tokens/s of one process, and what share of its need that is: of what the paper's 82M model takes at 40 % of an
    A100's peak."""
    need = 0.4 * 312e12 / flops_per_token(ModelConfig(**SHAPES["82M"], block_size=2048))
    corpus = Corpus(cfg.data_dir, cfg.block_size)
    sides = load_sides(corpus)
    seconds, counts = in_turn(sides, cfg.rounds, CPU)
    per_token = {side: [s / counts[side][0] / cfg.block_size for s in seconds[side]] for side in sides}
    rows = []
    for side in sides:
        speed = 1 / statistics.median(per_token[side])
        row = {"data": f"{len(corpus.domains)} domains of {cfg.data_dir}", "side": side, "seconds": seconds[side]}
        row.update(tokens_per_second=speed, of_need=speed / need, faster=ratio(per_token, side, NANOGPT))
        rows.append(row)
    return rows


def loading_table(rows):
    """Markdown of tokens/s; how many A100s they would feed with 82M; the ratio to nanoGPT's way."""
    lines = []
    for row in rows:
        line = {"data": row["data"], "side": row["side"], "tokens/s": f"{row['tokens_per_second']:,.0f}"}
        line["of one A100's need"] = f"{row['of_need']:,.0f}"
        line["to nanoGPT's way"] = spread(row["faster"])
        lines.append(line)
    return lines_table(lines, left=2)


def main(cfg: LoadingConfig):
    rows = loading_rows(cfg)
    print(loading_table(rows))
    write_results("load", {"rows": rows}, CPU, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
