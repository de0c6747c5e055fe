"""Speed and memory against transformers' Llama: training.py times training steps, decoding.py times decoding.

Here is what both need: settings, equal weights, turns, results. docs/performance.md says how we measure, and has the
tables. A side is one of those that we compare. It has a row in the results.
"""

import contextlib
import itertools
import statistics
import sys
import unittest.mock
from dataclasses import dataclass
from typing import Literal

import torch

from common.files import write_json
from common.hf import to_llama
from common.ranks import environment
from common.report import markdown
from configurator import UserError, check_fields, setting
from model import GPT
from value_modes import ModelConfig

SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),  # the demo's
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "180M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
LLAMA = "transformers' Llama"
NO_MASK = f"{LLAMA} without its mask"


@dataclass(frozen=True)
class BenchConfig:
    """Settings of both benchmarks. Each dtype runs with torch.compile off, on, or both."""

    rounds: int = setting(3, "times that each side runs", least=1, group="Measuring")
    out_file: str = setting("", "JSON file to write; empty = results/bench_<what>.json")
    shape: tuple[Literal[*SHAPES], ...] = setting(("tiny",), "shapes of the models; tiny is the demo's", group="Sides")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes, vanilla first")
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = setting(("float32",), "dtypes of the products")
    compile: tuple[Literal["off", "on"], ...] = setting(("off", "on"), "torch.compile")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")

    def __post_init__(self):
        check_fields(self)
        if self.modes[:1] != ("vanilla",):
            raise UserError("modes must begin with vanilla, because we compare the others with it")
        # A mode that does not exist, or does not fit a shape, is told before anything runs
        for shape in self.shape:
            for mode in self.modes:
                model_config(mode, shape)


# ---- equal weights, equal data


def model_config(name, shape, block_size=2048):
    """The ModelConfig of one of our modes. Llama's is that of vanilla."""
    mode = "vanilla" if name.startswith(LLAMA) else name
    return ModelConfig(**SHAPES[shape], block_size=block_size, value_mode=mode)


def new_model(name, shape, block_size, device, **options):
    """One of our modes, or transformers' Llama with the weights of our vanilla. They all follow from seed 0."""
    model = GPT(model_config(name, shape, block_size), **options).to(device)
    return to_llama(model) if name.startswith(LLAMA) else model


def random_batch(shape, B, T, device):
    """idx and targets, (B, T) each."""
    ids = torch.randint(SHAPES[shape]["vocab_size"], (B, T + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def mean_loss(name, model, idx, targets):
    """Mean cross-entropy in nats."""
    if not name.startswith(LLAMA):
        return model(idx, targets)[1]
    # Under torch.compile Llama makes a mask that only says "causal", and so computes twice as much attention
    make_mask = "transformers.models.llama.modeling_llama.create_causal_mask"
    without = unittest.mock.patch(make_mask, lambda *args, **kw: None)
    with without if name == NO_MASK else contextlib.nullcontext():
        return model(input_ids=idx, labels=targets, shift_labels=targets, use_cache=False).loss


# ---- turns and results


class Results:
    """The rows of a benchmark, and their file. derive(rows) adds to them what follows from their seconds."""

    def __init__(self, what, out_file, derive):
        self.path, self.derive, self.rows = out_file or f"results/bench_{what}.json", derive, []
        self.about = {"what": what, **environment()}

    def write(self):
        self.derive([row for row in self.rows if "error" not in row])
        transformers = getattr(sys.modules.get("transformers"), "__version__", None)
        write_json(self.path, {**self.about, "transformers": transformers, "rows": self.rows})


def race(rows, start, rounds, results):
    """Let all sides, given by their rows, run in turn: A B C, C B A, … A machine that slows down slows them all.
    start(row) warms a side up and returns its turn, a function that adds to row["seconds"]. We write after each side
    and each round, so a kill leaves what was measured."""
    # Warm every side up, which compiles it.
    turns = []
    for row in rows:
        print(*(row[key] for key in ("shape", "name", "dtype", "compile")), sep=", ", file=sys.stderr, flush=True)
        results.rows.append(row)
        turns.append((row, attempt(row, start, row)))
        results.write()
    # Then the rounds, forwards and backwards.
    for n in range(rounds):
        for row, turn in turns if n % 2 == 0 else reversed(turns):
            if "error" not in row:
                attempt(row, turn)
        results.write()


def attempt(row, function, *args):
    """A side that fails, in a compiler or for want of memory, gets the error into its row. The others go on."""
    try:
        return function(*args)
    except Exception as e:
        row["error"] = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        print(f"{row['name']}: {row['error']}", file=sys.stderr, flush=True)


def compare(rows, conditions, seconds_of):
    """Add the ratios of each row to vanilla, and to each peer, under the same conditions. seconds_of(row): a list."""
    for row, other in itertools.product(rows, rows):
        ours, others = seconds_of(row), seconds_of(other)
        is_like = all(row[key] == other[key] for key in conditions)
        if is_like and len(ours) == len(others):
            if other["name"] == "vanilla" and other["compile"] == row["compile"]:
                row["to_vanilla"] = ratio(ours, others)
            if other["name"].startswith(LLAMA):
                row[f"to {other['name']}"] = ratio(ours, others)


def ratio(seconds, others):
    """How many times as fast as another side, from the seconds of both in each round: median, least and greatest."""
    ratios = [b / a for a, b in zip(seconds, others, strict=True)]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def spread(found):
    """A ratio as text: its median (least–greatest)."""
    return f"{found['ratio']:.2f} ({found['least']:.2f}–{found['greatest']:.2f})"


def table(lines, left=1):
    """Markdown of lines = [{column: cell}]. A cell that a line lacks is empty."""
    header = list(dict.fromkeys(column for line in lines for column in line))
    return markdown(header, [[line.get(column, "") for column in header] for line in lines], left)
