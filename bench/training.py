"""Training steps: forward, backward, clipped gradients, AdamW. Ours against transformers' Llama.

python -m bench.training --shape=82M --dtype=bfloat16 --compile=on --peers=llama
"""

import math
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

import bench
from common.ranks import clock, only_process, peak_flops
from common.sizes import count_parameters, flops_per_token
from configurator import run, setting
from train import adamw

PEERS = {"llama": bench.LLAMA, "llama_no_mask": bench.NO_MASK, "llama_our_loss": bench.OUR_LOSS}


@dataclass(frozen=True)
class TrainingConfig(bench.BenchConfig):
    """The sides are the modes and the peers."""

    peers: tuple[Literal[*PEERS], ...] = setting(
        (), "transformers' Llama: as it is; without its mask; with our loss, too"
    )
    block_size: int = setting(256, "tokens per sequence", least=1, group="Work")
    micro_batch: int = setting(8, "sequences per step", least=1)
    seconds: float = setting(2.0, "minimum seconds per turn", least=0)


def new_step(name, cfg, device):
    """A function that takes a training step of a new model, always on the same random tokens."""
    model = bench.new_model(name, cfg.shape, cfg.block_size, device)
    optimizer = adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)
    batch = bench.random_batch(cfg.shape, cfg.micro_batch, cfg.block_size, device)
    # fp16's small gradients would become 0 without a scaler; for other dtypes it does nothing.
    dtype = getattr(torch, cfg.dtype)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if cfg.compile:
        model = torch.compile(model, dynamic=False, fullgraph=not name.startswith(bench.LLAMA))

    def step():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = bench.mean_loss(name, model, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def derive(row):
    row["tokens_per_s"] = row["tokens"] / statistics.median(row["seconds"])
    row["mfu"] = row["tokens_per_s"] * row["flops_per_token"] / row["peak"] if row["peak"] else None


def training_table(rows):
    """Markdown: a line for each model, and a column for each way to run it, with tokens/s, their ratio to vanilla
    (median, least–greatest of a round) and MFU. "computed": the ratio that the FLOPs alone would give."""
    lines = {}  # {(shape, model): line}
    for row in rows:
        line = lines.setdefault((row["shape"], row["name"]), {"shape": row["shape"], "model": row["name"]})
        line["parameters"] = f"{row['parameters']:,}"
        line["computed"] = f"{row['computed']:.3f}" if row["computed"] else ""  # old files lack Llama's
        way = f"{row['dtype']}, compiled" if row["compile"] == "on" else row["dtype"]
        if "error" in row:
            line[way] = row["error"]
            continue
        line[way] = f"{row['tokens_per_s']:,.0f}"
        if row["name"] != "vanilla":
            line[way] += f" = {bench.spread(row['to_vanilla'])}"
        if row["mfu"]:
            line[way] += f", MFU {row['mfu']:.1%}"
    return bench.table(lines.values(), left=2)


def main(cfg: TrainingConfig):
    torch._dynamo.config.recompile_limit = 1000  # one forward pass, many models
    device = only_process(cfg.device, fixed_lengths=True).device
    rows = bench.new_rows(cfg, [PEERS[peer] for peer in cfg.peers])
    # What follows from the shape alone. "computed" is the ratio to vanilla that the FLOPs would give.
    for row in rows:
        config = bench.model_config(row["name"], cfg.shape, cfg.block_size)
        row.update(tokens=cfg.micro_batch * cfg.block_size, parameters=count_parameters(config))
        row.update(flops_per_token=flops_per_token(config), peak=peak_flops(device, getattr(torch, cfg.dtype)))
        row["computed"] = rows[0]["flops_per_token"] / row["flops_per_token"]

    def start(row):
        step = new_step(row["name"], cfg, device)

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

    bench.race("train", cfg, rows, start, derive)
    print(training_table(rows))


if __name__ == "__main__":
    run(main, __doc__)
