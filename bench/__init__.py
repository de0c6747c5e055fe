"""Speed against transformers' Llama: training.py times training steps, decoding.py times decoding.

Here is what both need. A side is one of the models that we compare; it has a row in the results. docs/performance.md
says how we measure, and has the tables.
"""

import contextlib
import itertools
import statistics
import sys
import unittest.mock
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from common.files import write_json
from common.ranks import environment
from common.report import markdown
from configurator import check_fields, setting
from hf.layout import to_llama
from model import GPT
from net.loss import chunked_cross_entropy
from value_modes import ModelConfig

SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
LLAMA = "transformers' Llama"
NO_MASK = f"{LLAMA} without its mask"
OUR_LOSS = f"{NO_MASK}, with our loss"


@dataclass(frozen=True)
class BenchConfig:
    """Settings of both benchmarks."""

    rounds: int = setting(3, "how many times each side runs", least=1, group="Measuring")
    out_file: str = setting("", "JSON file to write; empty = results/bench_<what>.json")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    modes: tuple[str, ...] = setting(("resformer", "svformer"), "value modes to compare with vanilla", group="Sides")
    shape: Literal[*SHAPES] = setting("tiny", "shape of the models; tiny has 8 layers of width 128")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the matrix products")
    compile: bool = setting(False, "torch.compile")

    def __post_init__(self):
        check_fields(self)
        # a mode that does not exist, or does not fit the shape, is told before anything runs
        for mode in self.modes:
            model_config(mode, self.shape)


# ---- equal weights, equal data


def model_config(name, shape, block_size=2048):
    """The ModelConfig of one of our modes. Llama's is that of vanilla."""
    mode = "vanilla" if name.startswith(LLAMA) else name
    return ModelConfig(**SHAPES[shape], block_size=block_size, value_mode=mode)


def new_model(name, shape, block_size, device):
    """One of our modes, or transformers' Llama with the weights of our vanilla. They all follow from seed 0."""
    model = GPT(model_config(name, shape, block_size)).to(device)
    if name == OUR_LOSS:
        return WithOurLoss(to_llama(model))
    return to_llama(model) if name.startswith(LLAMA) else model


class WithOurLoss(nn.Module):
    """Llama's layers, and our loss in place of its own: what is left of a difference in speed comes from the layers."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def forward(self, idx, targets):
        x = self.llama.model(input_ids=idx, use_cache=False).last_hidden_state  # (B, T, C)
        return chunked_cross_entropy(x.flatten(0, 1), self.llama.lm_head.weight, targets.flatten())


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
    with without if name in (NO_MASK, OUR_LOSS) else contextlib.nullcontext():
        if name == OUR_LOSS:
            return model(idx, targets)
        return model(input_ids=idx, labels=targets, shift_labels=targets, use_cache=False).loss


# ---- turns and results


def new_rows(cfg, peers):
    """The row of each side, with what it is: vanilla, the other modes, the peers."""
    about = {"shape": cfg.shape, "dtype": cfg.dtype, "compile": "on" if cfg.compile else "off"}
    return [{"name": name, **about, "seconds": []} for name in dict.fromkeys(["vanilla", *cfg.modes, *peers])]


def race(what, cfg, rows, start, derive):
    """Let all sides, given by their rows, run in turn: A B C, C B A, … A machine that slows down slows them all.

    start(row) warms a side up and returns its turn, a function that adds to row["seconds"]. derive(row) adds to a row
    what follows from these. We write the results after each round, so a kill leaves what was measured.
    """
    path = cfg.out_file or f"results/bench_{what}.json"
    # Warm every side up, which compiles it.
    turns = []
    for row in rows:
        print(row["name"], file=sys.stderr, flush=True)
        turns.append((row, attempt(row, start, row)))
    # Then the rounds, forwards and backwards.
    for n in range(cfg.rounds):
        for row, turn in turns if n % 2 == 0 else reversed(turns):
            if "error" not in row:
                attempt(row, turn)
        finished = [row for row in rows if "error" not in row]
        compare(finished)
        for row in finished:
            derive(row)
        transformers = getattr(sys.modules.get("transformers"), "__version__", None)
        write_json(path, {"what": what, **environment(), "transformers": transformers, "rows": rows})
    print(f"wrote {path}")


def attempt(row, function, *args):
    """A side that fails, in a compiler or for want of memory, gets the error into its row. The others go on."""
    try:
        return function(*args)
    except Exception as e:
        row["error"] = " ".join(f"{type(e).__name__}: {e}".split())[:200]


def compare(rows):
    """Add the ratios of each row to vanilla, and to each peer."""
    for row, other in itertools.product(rows, rows):
        if other["name"] == "vanilla":
            row["to_vanilla"] = ratio(row["seconds"], other["seconds"])
        elif other["name"].startswith(LLAMA):
            row[f"to {other['name']}"] = ratio(row["seconds"], other["seconds"])


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
