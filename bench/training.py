"""Training steps: forward, backward, clipped gradients, AdamW. Ours against transformers' Llama.

    python -m bench.training --shape=tiny,82M --dtype=float32,bfloat16 --peers=llama
    python -m bench.training memory --shape=82M --recompute=off,on --peers=llama

memory: the peak of two steps of two micro-batches each. Every side has a process of its own.
"""

import functools
import itertools
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

import bench
from common.plan import count_parameters, flops_per_token
from common.ranks import clock, only_process, peak_bytes, peak_flops
from configurator import run, setting
from train import adamw

PEERS = {"llama": bench.LLAMA, "llama_no_mask": bench.NO_MASK}


@dataclass(frozen=True)
class TrainingConfig(bench.BenchConfig):
    """The sides are all combinations of modes, attn, dtype and compile, and the peers."""

    what: Literal["train", "memory"] = setting("train", "train: tokens/s; memory: peak bytes", positional=True)
    attn: tuple[Literal["sdpa", "eager", "flash"], ...] = setting(("sdpa",), "kinds of our attention")
    recompute: tuple[Literal["off", "on"], ...] = setting(("off",), "memory: our activation checkpointing")
    peers: tuple[Literal[*PEERS], ...] = setting(
        (), "llama: transformers' Llama; llama_no_mask: without the mask that it makes under torch.compile"
    )
    block_size: int = setting(256, "tokens per sequence", least=1, group="Work")
    micro_batch: int = setting(8, "sequences per step", least=1)
    seconds: float = setting(2.0, "least time of a turn", least=0)


def new_rows(cfg, shape):
    """A row of the results for each side, vanilla first."""
    names = [m if attn == "sdpa" else f"{m}, attn={attn}" for attn in cfg.attn for m in cfg.modes]
    names += [PEERS[peer] for peer in cfg.peers]
    sides = itertools.product(names, cfg.dtype, cfg.compile)
    return [{"shape": shape, "name": name, "dtype": dtype, "compile": compile} for name, dtype, compile in sides]


def new_trainee(name, shape, block_size, device, recompute=False):
    """A model and its AdamW."""
    mode, _, attn = name.partition(", attn=")
    model = bench.new_model(mode, shape, block_size, device, attn=attn or "sdpa", recompute=recompute)
    return model, adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)


def new_step(model, optimizer, row, cfg, device):
    """A function that takes a training step of some micro-batches, which are all the same random tokens."""
    # fp16's small gradients would become 0 without a scaler; for other dtypes it does nothing.
    batch = bench.random_batch(row["shape"], cfg.micro_batch, cfg.block_size, device)
    is_llama = row["name"].startswith(bench.LLAMA)
    dtype = getattr(torch, row["dtype"])
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if row["compile"] == "on":
        model = torch.compile(model, dynamic=False, fullgraph=not is_llama)

    def step(micro_batches=1):
        for _ in range(micro_batches):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = bench.mean_loss(row["name"], model, *batch)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_speed(cfg, shape, device, results):
    """Time all sides of one shape, on the same batch."""
    # What follows from the shape alone: tokens, parameters, FLOPs, and the ratio to vanilla that these would give.
    vanilla = flops_per_token(bench.model_config("vanilla", shape, cfg.block_size))
    rows = new_rows(cfg, shape)
    for row in rows:
        config = bench.model_config(row["name"].partition(", attn=")[0], shape, cfg.block_size)
        flops, peak = flops_per_token(config), peak_flops(device, getattr(torch, row["dtype"]))
        row.update(tokens=cfg.micro_batch * cfg.block_size, parameters=count_parameters(config), seconds=[])
        row.update(flops_per_token=flops, computed=vanilla / flops, peak=peak)

    # Ways to run share a model, because a small machine has no memory for all of them
    trainee = functools.cache(lambda name: new_trainee(name, shape, cfg.block_size, device))

    def start(row):
        step = new_step(*trainee(row["name"]), row, cfg, device)

        def seconds_per_step(n):
            began = clock(device)
            for _ in range(n):
                step()
            return (clock(device) - began) / n

        # A turn has as many steps as fit into cfg.seconds at the best speed of three.
        row["first_step_s"] = seconds_per_step(1)  # it compiles
        row["warm_up_s"] = [seconds_per_step(1) for _ in range(3)]
        n = max(1, math.ceil(cfg.seconds / min(row["warm_up_s"])))
        return lambda: row["seconds"].append(seconds_per_step(n))

    bench.race(rows, start, cfg.rounds, results)


def seconds_of(row):
    """Seconds of a step in each round so far, or in the warm-up before there are any."""
    return row["seconds"] or row["warm_up_s"]


def derive(rows):
    bench.compare(rows, ("shape", "dtype", "compile"), seconds_of)
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / statistics.median(seconds_of(row))
        row["mfu"] = row["tokens_per_s"] * row["flops_per_token"] / row["peak"] if row["peak"] else None


def training_table(rows):
    """Markdown, a table for each shape: a line for each model, a column for each way to run it. "computed": the ratio
    to vanilla that the FLOPs alone would give."""
    shapes = {}  # {shape: {model: line}}
    for row in rows:
        lines = shapes.setdefault(row["shape"], {})
        line = lines.setdefault(row["name"], {row["shape"]: row["name"], "parameters": f"{row['parameters']:,}"})
        cell = row.get("error") or f"{row['tokens_per_s']:,.0f}"
        if row["name"] != "vanilla" and "to_vanilla" in row and "error" not in row:
            cell += f" = {bench.spread(row['to_vanilla'])}"
        if row.get("mfu") and "error" not in row:
            cell += f", MFU {row['mfu']:.1%}"
        line[f"{row['dtype']}, compiled" if row["compile"] == "on" else row["dtype"]] = cell
    for row in rows:  # the last column
        shapes[row["shape"]][row["name"]]["computed"] = f"{row['computed']:.3f}" if row.get("computed") else ""
    return "\n\n".join(bench.table(lines.values()) for lines in shapes.values())


def measure_memory(cfg, shape, device, results):
    """Find the peak of each side, with and without recomputing the activations of ours."""
    # On Linux a process inherits the peak of the one that starts it: here a fork server, which imports and no more
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.training", "torch._dynamo"])
    size = {"micro_batch": cfg.micro_batch, "length": cfg.block_size}
    rows = [{**row, "recompute": kind, **size} for row in new_rows(cfg, shape) for kind in cfg.recompute]
    # Recomputing is an option of ours, so Llama runs once.
    rows = [row for row in rows if row["recompute"] == "off" or not row["name"].startswith(bench.LLAMA)]

    def start(row):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            row["peak"] = process.submit(training_peak, row, cfg, str(device)).result()

    bench.race(rows, start, 0, results)


def training_peak(row, cfg, device):
    """The most bytes that two steps take, beyond what the process has before there is a model."""
    device = only_process(device, fixed_lengths=True).device
    before = peak_bytes(device)
    trainee = new_trainee(row["name"], row["shape"], cfg.block_size, device, row["recompute"] == "on")
    step = new_step(*trainee, row, cfg, device)
    step(micro_batches=2)  # the second one meets the gradients of the first
    step(micro_batches=2)
    return peak_bytes(device) - before


def memory_table(rows):
    lines = []
    for row in rows:
        line = {key: row[key] for key in ("shape", "name", "dtype", "compile", "recompute", "micro_batch", "length")}
        lines.append({**line, "peak, GB": row.get("error") or f"{row['peak'] / 1e9:.2f}"})
    return bench.table(lines, left=5)


def main(cfg: TrainingConfig):
    torch._dynamo.config.recompile_limit = 1000  # one forward pass, many models
    device = only_process(cfg.device, fixed_lengths=True).device
    measure, table, results = measure_speed, training_table, bench.Results("train", cfg.out_file, derive)
    if cfg.what == "memory":
        measure, table, results = measure_memory, memory_table, bench.Results("memory", cfg.out_file, lambda rows: None)
        # What a side frees shall leave its process at once. The C library reads this when a process starts
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
    for shape in cfg.shape:
        measure(cfg, shape, device, results)
    print(f"{table(results.rows)}\nwrote {results.path}")


if __name__ == "__main__":
    run(main, __doc__)
