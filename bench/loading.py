"""Batches from token files against nanoGPT's way, and prepare.py against a plain tiktoken loop: tokens/s.

    python -m bench.loading --data_dir=data/demo    Corpus.batch, as train.py asks for batches
    python -m bench.loading prepare                 text to a token file, from where prepare.py has its tokenizer

The token files of the first are in memory by then if they fit: Corpus has read them to verify them. A disk that must be
read first is slower.
"""

from dataclasses import dataclass
from typing import Literal

from bench import SHAPES, BenchConfig
from configurator import UserError, command_line, load_settings, run_main, setting


@dataclass(frozen=True)
class LoadingConfig(BenchConfig):
    """Every setting of this benchmark."""

    what: Literal["load", "prepare"] = setting("load", "load batches, or prepare text", positional=True, group="Work")
    data_dir: str = setting("data/demo", "load: a folder that prepare.py made")
    block_size: int = setting(2048, "load: tokens per sequence", least=1)
    tokenizer: str = setting("bpe:4096", "prepare: bpe:<vocabulary size>, gpt2 or neox")
    tokenizer_file: str = setting("", "prepare: see prepare.py --help")
    megabytes: float = setting(300, "prepare: of text", least=0)


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(LoadingConfig, __doc__)

import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

import prepare
import reading
from bench.common import in_turn, lines_table, ratio, spread, write_results
from data import Corpus
from describe import flops_per_token
from files import write_json
from value_modes import ModelConfig

CPU = torch.device("cpu")
STEP = 1024  # sequences of a step, the paper's
NANOGPT = "nanoGPT's way"


# ---- loading


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

    def load_steps(steps, rows):
        for step in steps:
            for first in range(0, rows, 32):
                corpus.batch(int(step), STEP, first, first + 32)
        return len(steps) * rows

    def in_order():
        return load_steps([next(next_step) for _ in range(16)], STEP)

    def at_random(rows=STEP):
        return load_steps(rng.integers(epoch, size=16), rows)

    def nanogpt():
        for i in range(16 * STEP // 32):
            nanogpt_batch(files[i % len(files)], 32, corpus.block_size, rng)
        return 16 * STEP

    one_rank = functools.partial(at_random, STEP // 8)
    sides = {"steps in order": in_order, "random steps": at_random, "random steps, one rank of 8": one_rank}
    return {**sides, NANOGPT: nanogpt}


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


# ---- preparing


def write_library(path, size):
    """The standard library's Python files as a .jsonl, over and over until it has `size` bytes of text, which it
    returns."""
    path.parent.mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written = 0
    with open(path, "w", encoding="utf-8") as f:
        for source in itertools.cycle(sources):
            text = source.read_text(encoding="utf-8", errors="ignore")
            f.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
            if written >= size:
                return written


def write_ids(ids, file):
    np.array(ids, "<u2").tofile(file)


def prepare_rows(cfg):
    """Tokens/s from a .jsonl to a token file: prepare.py as its users start it, and one document after the other in
    this process. Raises UserError if their ids differ."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        text, out, plain = Path(folder, "text/text.jsonl"), Path(folder, "ours"), Path(folder, "plain.bin")
        size = write_library(text, 1e6 * cfg.megabytes)
        words = ["files", f"--input_dir={text.parent}", f"--out_dir={out}", "--val_fraction=0"]
        words += [f"--tokenizer={cfg.tokenizer}", f"--tokenizer_file={cfg.tokenizer_file}"]
        settings = load_settings(prepare.PrepareConfig, words)
        inputs = reading.find_inputs(settings)
        tokenizer = prepare.make_tokenizer(settings, inputs)

        def ours():
            shutil.rmtree(out, ignore_errors=True)
            write_json(out / "progress.json", prepare.open_output(settings, inputs))
            tokenizer.save(out / "tokenizer.json")
            subprocess.run([sys.executable, prepare.__file__, *words], stdout=subprocess.DEVNULL, check=True)

        def loop():
            with open(text, encoding="utf-8") as documents, open(plain, "wb") as file:
                for line in documents:
                    write_ids([*tokenizer.encode(json.loads(line)["text"]), tokenizer.eot], file)

        seconds, _ = in_turn({"prepare.py": ours, "tiktoken": loop}, cfg.rounds, CPU)
        ids = np.fromfile(out / "train/text.bin", "<u2")
        if not np.array_equal(ids, np.fromfile(plain, "<u2")):
            raise UserError("prepare.py and tiktoken make other ids of the same text")
    rows = []
    for side, processes in (("prepare.py", settings.workers), ("tiktoken", 1)):
        row = dict(side=side, processes=processes, bytes=size, tokens=len(ids), seconds=seconds[side])
        row["faster"] = ratio(seconds, "prepare.py", side)
        rows.append(row)
    return rows


def prepare_table(rows):
    """Markdown of MB/s of text and tokens/s, and how many times as fast prepare.py is."""
    lines = []
    for row in rows:
        took = statistics.median(row["seconds"])
        line = {"side": row["side"], "processes": row["processes"], "MB/s": f"{row['bytes'] / took / 1e6:,.1f}"}
        line["tokens/s"] = f"{row['tokens'] / took:,.0f}"
        per_core = " per core" if row["side"] == "tokenizers" else ""  # a side of the committed results
        line["prepare.py's speed to its"] = spread(row["faster"]) + per_core
        lines.append(line)
    return lines_table(lines)


def main(cfg: LoadingConfig):
    measure, table = loading_rows, loading_table
    if cfg.what == "prepare":
        measure, table = prepare_rows, prepare_table
    rows = measure(cfg)
    print(table(rows))
    write_results(cfg.what, {"rows": rows}, CPU, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
