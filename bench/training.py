"""Speed and memory of training steps: forward, backward, clipped gradients, AdamW; ours and transformers' Llama.

    python -m bench.training --shape=tiny,82M --dtype=float32,bfloat16 --peers=llama
    python -m bench.training memory --shape=82M --recompute=off,on --peers=llama

memory: the peak of three micro-batches, each in a process of its own. A peak is linear in the tokens, since attention
is fused and the logits come in chunks: the line through the first two, GB + kB per token, should predict the third.
Read before: common.py. Read next: decoding.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench import LLAMA, SHAPES, ModelBenchConfig
from configurator import UserError, command_line, need, run_main, setting


@dataclass(frozen=True)
class TrainingConfig(ModelBenchConfig):
    """Every setting of this benchmark. The sides are all combinations of modes, attn, dtype and compile, and peers."""

    what: Literal["train", "memory"] = setting("train", "train: tokens/s; memory: peak bytes", positional=True)
    attn: tuple[Literal["sdpa", "eager", "flash"], ...] = setting(("sdpa",), "kinds of our attention")
    recompute: tuple[Literal["off", "on"], ...] = setting(("off",), "memory: our activation checkpointing")
    peers: tuple[Literal["llama"], ...] = setting((), "llama: transformers' Llama with vanilla's weights")
    block_size: int = setting(256, "tokens per sequence", least=1, group="Work")
    micro_batch: int = setting(8, "sequences per step; memory: also a half and a quarter of it, so at least 4", least=1)
    seconds: float = setting(2.0, "least time of a side's turn", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.recompute != ("off",) and self.what != "memory":
            raise ValueError("recompute is of memory; put the word memory before it, or leave it out")
        if "flash" in self.attn and "float32" in self.dtype:
            raise ValueError("attn=flash needs dtype bfloat16 or float16")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(TrainingConfig, __doc__)

import functools
import itertools
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from bench.common import in_turn, lines_table, ratio, spread, timed, write_results
from describe import flops_per_token
from hf import to_llama
from model import GPT
from runtime import only_process, peak_bytes
from train import adamw
from value_modes import ModelConfig


class Side(NamedTuple):
    """Who trains, a value mode of ours with a kind of attention or LLAMA, and how it runs."""

    model: str
    attn: str
    dtype: str
    compile: str

    @property
    def name(self):
        return self.model if self.attn == "sdpa" else f"{self.model}, attn={self.attn}"


def sides_by_model(cfg):
    """A list of Sides for each model, one for each dtype and setting of torch.compile. Vanilla comes first."""
    models = [(mode, attn) for attn in cfg.attn for mode in cfg.modes]
    models += [(LLAMA, "sdpa")] * len(cfg.peers)
    return [[Side(*model, *way) for way in itertools.product(cfg.dtype, cfg.compile)] for model in models]


def new_model(side, shape, block_size, device, recompute=False):
    """A Side's model and its AdamW."""
    mode = "vanilla" if side.model == LLAMA else side.model
    cfg = ModelConfig(**SHAPES[shape], block_size=block_size, value_mode=mode)
    model = GPT(cfg, attn=side.attn, recompute=recompute).to(device)
    if side.model == LLAMA:
        model = to_llama(model)
    return model, adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)


def mean_loss(side, model, idx, targets):
    """Mean cross-entropy in nats. idx, targets: (B, T)."""
    if side.model == LLAMA:
        return model(input_ids=idx, labels=targets, shift_labels=targets, use_cache=False).loss
    return model(idx, targets)[1]


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
        model = torch.compile(model, dynamic=False, fullgraph=side.model != LLAMA)

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


def training_rows(cfg, shape, device):
    """The rows of one shape, one for each side, which all train on the same batch of random tokens."""
    batch = random_batch(shape, cfg.micro_batch, cfg.block_size, device)
    with torch._dynamo.config.patch(recompile_limit=1000):  # one forward pass, many models
        turns, rows = warm_sides(cfg, shape, batch, device)
        seconds, steps = in_turn(turns, cfg.rounds, device)
    for side in rows:
        seconds[side] = [s / n for s, n in zip(seconds[side], steps[side], strict=True)]  # of one step
    for side, row in rows.items():
        vanilla = side._replace(model="vanilla", attn=cfg.attn[0])
        row["seconds"] = seconds[side]
        row["tokens_per_s"] = row["tokens"] / statistics.median(seconds[side])
        row["to_vanilla"] = ratio(seconds, side, vanilla)
        if cfg.peers:
            row[f"to {LLAMA}"] = ratio(seconds, side, side._replace(model=LLAMA, attn="sdpa"))
        flops = row["flops_per_token"]
        row["computed"] = rows[vanilla]["flops_per_token"] / flops if flops else None
    return list(rows.values())


def warm_sides(cfg, shape, batch, device):
    """({Side: a function of some training steps}, {Side: its row so far}), compiled and warm. Raises UserError if
    vanilla and Llama, whose weights are the same, differ in their loss."""
    turns, rows, losses = {}, {}, {}
    for sides in sides_by_model(cfg):
        model, optimizer = new_model(sides[0], shape, batch[0].size(1), device)
        check = sides[0]
        if check.attn != "flash":  # which has no float32
            check = check._replace(dtype="float32")
        with torch.no_grad(), autocast(batch, check):
            losses[check.name] = mean_loss(check, model, *batch).item()
        for side in sides:
            steps = trainer(side, model, optimizer, batch)
            first, *later = [timed(lambda steps=steps: steps(1), device)[0] for _ in range(3)]
            say = f"{shape}, {side.name}, {side.dtype}, compile {side.compile}"
            print(f"{say}: first step {first:.1f} s, then {min(later):.3f} s", file=sys.stderr, flush=True)
            turns[side] = functools.partial(steps, max(1, math.ceil(cfg.seconds / min(later))))
            rows[side] = dict(shape=shape, name=side.name, dtype=side.dtype, compile=side.compile)
            rows[side].update(tokens=batch[0].numel(), first_step_s=first)
            rows[side]["parameters"] = sum(p.numel() for p in model.parameters())
            rows[side]["flops_per_token"] = flops_per_token(model.cfg) if isinstance(model, GPT) else None
    if cfg.peers:
        ours, theirs = next(iter(losses.values())), losses[LLAMA]
        if not abs(ours - theirs) < (1e-2 if cfg.attn[0] == "flash" else 1e-3):
            raise UserError(f"vanilla's loss is {ours}, Llama's {theirs}: not the same work")
    return turns, rows


def training_table(rows):
    """Markdown of one shape's rows: tokens/s by model and way to run it, with the ratio to vanilla's (median,
    least–greatest of a round) beside what the FLOPs alone would make of it."""
    lines = {}
    for row in rows:
        line = lines.setdefault(row["name"], {row["shape"]: row["name"], "parameters": f"{row['parameters']:,}"})
        way = f"{row['dtype']}, compiled" if row["compile"] == "on" else row["dtype"]
        share = "" if row["name"] == "vanilla" else f" = {spread(row['to_vanilla'])}"
        line[way] = f"{row['tokens_per_s']:,.0f}{share}"
    for row in rows:  # the last column
        lines[row["name"]]["computed"] = f"{row['computed']:.3f}" if row["computed"] else ""
    return lines_table(lines.values())


# ---- memory


def memory_rows(cfg, shape, device):
    """The rows of one shape, one for each side, with and without activation checkpointing of ours."""
    rows = []
    for side in itertools.chain(*sides_by_model(cfg)):
        for recompute in ("off",) if side.model == LLAMA else cfg.recompute:
            print(f"{shape}, {side.name}, {side.dtype}, recompute {recompute}", file=sys.stderr, flush=True)
            rows.append(memory_row(cfg, device, shape, side, recompute))
    return rows


def memory_row(cfg, device, shape, side, recompute):
    """The peaks of one side at a quarter, a half and all of the micro-batch, and the line through the first two."""
    T, most = cfg.block_size, max(4, cfg.micro_batch)
    # a process inherits its starter's peak on Linux: the fork server's is small
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "torch._dynamo"])
    peaks = {}
    for B in (most // 4, most // 2, most):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            peaks[B] = process.submit(training_peak, str(device), shape, side, recompute, B, T).result()
    few, more, _ = peaks
    per_token = (peaks[more] - peaks[few]) / ((more - few) * T)
    fixed = peaks[few] - per_token * few * T
    predicted = fixed + per_token * most * T
    row = dict(shape=shape, name=side.name, dtype=side.dtype, compile=side.compile, recompute=recompute, length=T)
    row.update(peaks={str(B): peak for B, peak in peaks.items()}, fixed=fixed, per_token=per_token)
    row.update(predicted=predicted, off_by=predicted / peaks[most] - 1)
    return row


def training_peak(device, shape, side, recompute, B, T):
    """The most bytes that two steps, each of two micro-batches, take beyond what the process has before the model."""
    device = torch.device(device)
    before = peak_bytes(device)
    model, optimizer = new_model(side, shape, T, device, recompute == "on")
    trainer(side, model, optimizer, random_batch(shape, B, T, device), micro_batches=2)(2)
    return peak_bytes(device) - before


def memory_table(rows):
    """Markdown of the peaks, and of the lines through them as GB + kB per token."""
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "side": row["name"]}
        line.update({key: row[key] for key in ("dtype", "compile", "recompute")})
        B, peak = list(row["peaks"].items())[-1]
        line["micro-batch x length"] = f"{B} x {row['length']:,}"
        line["peak, GB"] = f"{peak / 1e9:.2f}"
        line["by the line"] = f"{row['predicted'] / 1e9:.2f} ({row['off_by']:+.1%})"
        line["GB + kB per token"] = f"{row['fixed'] / 1e9:.2f} + {row['per_token'] / 1e3:.0f}"
        lines.append(line)
    return lines_table(lines, left=5)


def main(cfg: TrainingConfig):
    device = only_process(cfg.device).device
    if "flash" in cfg.attn:
        need("flash_attn")
    measure, table = training_rows, training_table
    if cfg.what == "memory":
        measure, table = memory_rows, memory_table
        # on a CPU what is freed shall leave the process at once; read when one starts
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
    rows = []
    for shape in cfg.shape:
        found = measure(cfg, shape, device)
        print(f"\n{table(found)}", flush=True)
        rows += found
    write_results(cfg.what, {"rows": rows}, device, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
