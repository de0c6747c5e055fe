"""Speed and memory of training steps: forward, backward, clipped gradients, AdamW; ours and transformers' Llama.

    python -m bench.training --shape=tiny,82M --dtype=float32,bfloat16 --peers=llama
    python -m bench.training memory --shape=82M --recompute=off,on --peers=llama

memory: the peak of steps of two micro-batches. It is linear in the tokens.
Read before: common.py. Read next: decoding.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench import PEERS, SHAPES, BenchConfig
from oldconfig import UserError, command_line, run_main, setting


@dataclass(frozen=True)
class TrainingConfig(BenchConfig):
    """Every setting of this benchmark. The sides are all combinations of modes, attn, dtype and compile, and peers."""

    what: Literal["train", "memory"] = setting("train", "train: tokens/s; memory: peak bytes", positional=True)
    attn: tuple[Literal["sdpa", "eager", "flash"], ...] = setting(("sdpa",), "kinds of our attention")
    recompute: tuple[Literal["off", "on"], ...] = setting(("off",), "memory: our activation checkpointing")
    peers: tuple[Literal[*PEERS], ...] = setting(
        (), "llama: transformers' Llama with vanilla's weights; llama_no_mask: the same without the mask that it makes"
    )
    block_size: int = setting(256, "tokens per sequence", least=1, group="Work")
    micro_batch: int = setting(8, "sequences per step", least=1)
    seconds: float = setting(2.0, "least time of a side's turn", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.recompute != ("off",) and self.what != "memory":
            raise ValueError("recompute is of memory; put the word memory before it, or leave it out")
        if "flash" in self.attn and "float32" in self.dtype:
            raise ValueError("attn=flash needs dtype bfloat16 or float16")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(TrainingConfig, __doc__)

import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import unittest.mock
from concurrent.futures import ProcessPoolExecutor

import torch

from bench.common import failure_in, lines_table, measured, order_of_round, product_flops, ratio, spread, timed
from describe import count_parameters, flops_per_token
from hf import to_llama
from model import GPT
from runtime import need_flash_attn, only_process, peak_bytes, peak_flops
from train import adamw
from value_modes import ModelConfig


class Side(NamedTuple):
    """Who trains, a value mode of ours with a kind of attention or one of PEERS, and how it runs."""

    model: str
    attn: str
    dtype: str
    compile: str

    @property
    def name(self):
        return self.model if self.attn == "sdpa" else f"{self.model}, attn={self.attn}"

    @property
    def is_peer(self):
        return self.model in PEERS.values()


def sides_by_model(cfg):
    """A list of Sides for each model, one for each dtype and setting of torch.compile. Vanilla comes first."""
    models = [(mode, attn) for attn in cfg.attn for mode in cfg.modes]
    models += [(PEERS[peer], "sdpa") for peer in cfg.peers]
    return [[Side(*model, *way) for way in itertools.product(cfg.dtype, cfg.compile)] for model in models]


def new_model(side, shape, block_size, device, recompute=False):
    """A Side's model and its AdamW."""
    cfg = ModelConfig(**SHAPES[shape], block_size=block_size, value_mode="vanilla" if side.is_peer else side.model)
    model = GPT(cfg, attn=side.attn, recompute=recompute).to(device)
    if side.is_peer:
        model = to_llama(model)
    return model, adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)


def mean_loss(side, model, idx, targets):
    """Mean cross-entropy in nats. idx, targets: (B, T)."""
    if not side.is_peer:
        return model(idx, targets)[1]
    with contextlib.ExitStack() as stack:
        if side.model == PEERS["llama_no_mask"]:  # under torch.compile it makes a mask that only says "causal"
            llama = "transformers.models.llama.modeling_llama.create_causal_mask"
            stack.enter_context(unittest.mock.patch(llama, lambda *args, **kw: None))
        return model(input_ids=idx, labels=targets, shift_labels=targets, use_cache=False).loss


def random_batch(shape, B, T, device):
    """idx and targets (B, T)."""
    ids = torch.randint(SHAPES[shape]["vocab_size"], (B, T + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def autocast(batch, side):
    """What a Side computes a batch under."""
    return torch.autocast(batch[0].device.type, getattr(torch, side.dtype), enabled=side.dtype != "float32")


def trainer(side, model, optimizer, batch, micro_batches=1):
    """A function that does n training steps, each of some micro-batches that are all the same, and returns n."""
    scaler = torch.amp.GradScaler(batch[0].device.type, enabled=side.dtype == "float16")
    if side.compile == "on":
        model = torch.compile(model, dynamic=False, fullgraph=not side.is_peer)

    def steps(n):
        for _ in range(n):
            for _ in range(micro_batches):
                with autocast(batch, side):
                    loss = mean_loss(side, model, *batch)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return n

    return steps


# ---- speed


def training_rows(cfg, shape, device, keep):
    """The rows of one shape, one for each side, which all train on the same batch of random tokens. keep(rows) is
    called after each warm-up and each round, so that a limit of time loses little. A side that fails is a row too."""
    batch = random_batch(shape, cfg.micro_batch, cfg.block_size, device)
    check_losses(cfg, shape, batch)
    products = {dtype: product_flops(device, getattr(torch, dtype)) for dtype in cfg.dtype}
    rows, turns = {}, {}
    with torch._dynamo.config.patch(recompile_limit=1000):  # one forward pass, many models
        for sides in sides_by_model(cfg):
            model = None
            for side in sides:
                rows[side] = new_row(side, shape, batch, device, products[side.dtype])
                with failure_in(rows[side]):
                    if model is None:
                        model, optimizer = new_model(side, shape, cfg.block_size, device)
                    turns[side] = warmed_up(trainer(side, model, optimizer, batch), rows[side], cfg.seconds, device)
                keep(compared(rows, cfg))
        for n in range(cfg.rounds):
            for side in order_of_round(turns, n):
                with failure_in(rows[side]):
                    took, steps = timed(turns[side], device)
                    rows[side]["seconds"].append(took / steps)
            turns = {side: steps for side, steps in turns.items() if "error" not in rows[side]}
            keep(compared(rows, cfg))
    return list(rows.values())


def check_losses(cfg, shape, batch):
    """Raise UserError if vanilla and a peer, whose weights are the same, differ in their loss: before anything is
    compiled, which takes minutes."""
    dtype, most = ("bfloat16", 1e-2) if cfg.attn[0] == "flash" else ("float32", 1e-3)  # flash has no float32
    losses = {}
    for name in ("vanilla", *(PEERS[peer] for peer in cfg.peers)):
        side = Side(name, cfg.attn[0], dtype, "off")
        model, _ = new_model(side, shape, cfg.block_size, batch[0].device)
        with torch.no_grad(), autocast(batch, side):
            losses[name] = mean_loss(
                side, model, *(x[:1] for x in batch)
            ).item()  # one sequence: a peer holds all logits
        if not abs(losses[name] - losses["vanilla"]) < most:
            raise UserError(f"vanilla's loss is {losses['vanilla']}, that of {name} {losses[name]}: not the same work")


def new_row(side, shape, batch, device, product):
    """What is known of a side before it runs."""
    mode = "vanilla" if side.is_peer else side.model
    row = dict(shape=shape, name=side.name, dtype=side.dtype, compile=side.compile, tokens=batch[0].numel())
    config = ModelConfig(**SHAPES[shape], block_size=batch[0].size(1), value_mode=mode)
    row.update(parameters=count_parameters(config), flops_per_token=flops_per_token(config))
    row.update(peak=peak_flops(device, getattr(torch, side.dtype)), product=product, seconds=[])
    return row


def warmed_up(steps, row, least_seconds, device):
    """A function of as many training steps as take least_seconds. The row gets the first step's time and the next."""
    row["first_step_s"], *row["warm_up_s"] = [timed(lambda: steps(1), device)[0] for _ in range(4)]
    side = ", ".join(row[key] for key in ("shape", "name", "dtype", "compile"))
    print(f"{side}: {row['first_step_s']:.1f} s, then {min(row['warm_up_s']):.3f} s", file=sys.stderr, flush=True)
    return functools.partial(steps, max(1, math.ceil(least_seconds / min(row["warm_up_s"]))))


def compared(rows, cfg):
    """The rows of {Side: row}, with what follows from their seconds so far, or from their warm-up before there are any:
    tokens/s, ratios to vanilla and to each peer, shares of the GPU's peak (mfu) and of a measured matrix product."""
    seconds = {s: row["seconds"] or row["warm_up_s"] for s, row in rows.items() if "error" not in row}
    for side in seconds:
        row, flops = rows[side], rows[side]["flops_per_token"]
        row["tokens_per_s"] = row["tokens"] / statistics.median(seconds[side])
        row["of_product"] = row["tokens_per_s"] * flops / row["product"] if row["product"] else None
        row["mfu"] = row["tokens_per_s"] * flops / row["peak"] if row["peak"] else None
        vanilla = side._replace(model="vanilla", attn=cfg.attn[0])
        row["computed"] = rows[vanilla]["flops_per_token"] / flops
        others = {f"to {PEERS[peer]}": side._replace(model=PEERS[peer], attn="sdpa") for peer in cfg.peers}
        for name, other in {"to_vanilla": vanilla, **others}.items():
            if len(seconds.get(other, ())) == len(seconds[side]):
                row[name] = ratio(seconds, side, other)
    return list(rows.values())


def training_table(rows):
    """Markdown of tokens/s by model and way to run it, a table for each shape, with the ratio to vanilla's (median,
    least–greatest of a round) beside what the FLOPs alone would make of it, and the share of a measured product."""
    shapes = {}  # {shape: {model: line}}
    for row in rows:
        lines = shapes.setdefault(row["shape"], {})
        line = lines.setdefault(row["name"], {row["shape"]: row["name"], "parameters": f"{row['parameters']:,}"})
        line[f"{row['dtype']}, compiled" if row["compile"] == "on" else row["dtype"]] = cell_of(row)
    for row in rows:  # the last column
        shapes[row["shape"]][row["name"]]["computed"] = f"{row['computed']:.3f}" if row.get("computed") else ""
    return "\n\n".join(lines_table(lines.values()) for lines in shapes.values())


def cell_of(row):
    if "error" in row:
        return row["error"]
    cell = f"{row['tokens_per_s']:,.0f}"
    if row["name"] != "vanilla" and "to_vanilla" in row:
        cell += f" = {spread(row['to_vanilla'])}"
    if row.get("of_product"):
        cell += f", {row['of_product']:.0%} of a product"
    if row.get("mfu"):
        cell += f", MFU {row['mfu']:.1%}"
    return cell


# ---- memory


def memory_rows(cfg, shape, device, keep):
    """The peak of each side, with and without activation checkpointing of ours, in a process of its own. keep(rows) is
    called after each."""
    # a process inherits its starter's peak on Linux: the fork server's is small
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "torch._dynamo"])
    B, T, rows = cfg.micro_batch, cfg.block_size, []
    for side in itertools.chain(*sides_by_model(cfg)):
        for recompute in ("off",) if side.is_peer else cfg.recompute:
            print(f"{shape}, {side.name}, {side.dtype}, recompute {recompute}", file=sys.stderr, flush=True)
            row = dict(shape=shape, name=side.name, dtype=side.dtype, compile=side.compile, recompute=recompute)
            with failure_in(row), ProcessPoolExecutor(1, mp_context=context) as process:
                row["peak"] = process.submit(training_peak, str(device), shape, side, recompute, B, T).result()
            rows.append(row | {"micro_batch": B, "length": T})
            keep(rows)
    return rows


def training_peak(device, shape, side, recompute, B, T):
    """The most bytes that two steps, each of two micro-batches, take beyond what the process has before the model."""
    device = only_process(device, fixed_lengths=True).device
    before = peak_bytes(device)
    model, optimizer = new_model(side, shape, T, device, recompute == "on")
    trainer(side, model, optimizer, random_batch(shape, B, T, device), micro_batches=2)(2)
    return peak_bytes(device) - before


def memory_table(rows):
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "side": row["name"]}
        line.update({key: row[key] for key in ("dtype", "compile", "recompute")})
        line["micro-batch x length"] = f"{row['micro_batch']} x {row['length']:,}"
        line["peak, GB"] = row.get("error") or f"{row['peak'] / 1e9:.2f}"
        lines.append(line)
    return lines_table(lines, left=5)


def main(cfg: TrainingConfig):
    device = only_process(cfg.device, fixed_lengths=True).device
    if "flash" in cfg.attn:
        need_flash_attn()
    measure, table = training_rows, training_table
    if cfg.what == "memory":
        measure, table = memory_rows, memory_table
        # on a CPU what is freed shall leave the process at once; read when one starts
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
    measured(cfg.what, [functools.partial(measure, cfg, shape, device) for shape in cfg.shape], table, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
