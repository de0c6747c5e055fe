"""Speed and memory of training steps: forward, backward, clipped gradients, AdamW; ours and peers'.

    python -m bench.training --shape=tiny,82M --dtype=float32,bfloat16 --peers=llama,x_transformers
    python -m bench.training memory --shape=82M --recompute=off,on --peers=llama

memory: the peak of three micro-batches, each in a process of its own. A peak is linear in the tokens, since attention
is fused and the logits come in chunks: the line through the first two, GB + kB per token, should predict the third.
Read before: common.py. Read next: decoding.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench import PEERS, Dtype, Peer, Shape, Switch, check_modes
from configurator import UserError, check_ranges, command_line, need, run_main, setting


@dataclass(frozen=True)
class TrainingConfig:
    """Every setting of this benchmark. The sides are all combinations of modes, attn, dtype and compile, and peers."""

    what: Literal["train", "memory"] = setting("train", "train: tokens/s; memory: peak bytes", positional=True)
    shape: tuple[Shape, ...] = setting(("tiny",), "of the models: tiny (the demo's), 82M, 180M, 468M", group="Sides")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes, vanilla first")
    attn: tuple[Literal["sdpa", "eager", "flash"], ...] = setting(("sdpa",), "kinds of our attention")
    dtype: tuple[Dtype, ...] = setting(("float32",), "of autocast")
    compile: tuple[Switch, ...] = setting(("off", "on"), "torch.compile: off, on, or both")
    recompute: tuple[Switch, ...] = setting(("off",), "memory: our activation checkpointing: off, on, or both")
    peers: tuple[Peer, ...] = setting((), "llama, x_transformers (with its value residual)")
    block_size: int = setting(0, "tokens per sequence; 0 = 2,048, or 256 for train on a CPU", least=0, group="Work")
    micro_batch: int = setting(0, "sequences per step; 0 = as MICRO_BATCH says", least=0)
    rounds: int = setting(3, "times that each side runs", least=1)
    seconds: float = setting(2.0, "least time of a side's turn", least=0)
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    out_file: str = setting("", "JSON to write; empty = results/bench_<what>_<machine>.json")

    def __post_init__(self):
        check_ranges(self)
        check_modes(self.modes)


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
import torch.nn.functional as F

from bench import SHAPES
from bench.common import in_turn, only_process, ratio, spread, timed, write_results
from describe import flops_per_token
from hf import to_llama
from model import GPT
from report import markdown
from runtime import peak_bytes, peak_flops
from train import adamw
from value_modes import ModelConfig

MICRO_BATCH = {  # sequences of 256 tokens on a CPU, of 2,048 on a GPU
    "cpu": {"tiny": 8, "82M": 4, "180M": 2, "468M": 1},
    "cuda": {"tiny": 64, "82M": 32, "180M": 16, "468M": 8},
}


class Side(NamedTuple):
    """Who trains, a peer or a value mode of ours with a kind of attention, and how it runs."""

    mode: str = "vanilla"
    attn: str = "sdpa"
    peer: str = ""
    dtype: str = "float32"
    compile: str = "off"

    @property
    def name(self):
        if self.peer:
            return PEERS[self.peer]
        return self.mode if self.attn == "sdpa" else f"{self.mode}, attn={self.attn}"


def contenders(cfg):
    """A Side for each model; the first is vanilla, which the others are compared with."""
    ours = [Side(mode, attn) for attn in cfg.attn for mode in cfg.modes]
    return ours + [Side(peer=peer) for peer in cfg.peers]


def ways_to_run(contender, cfg):
    """The contender's Sides, one for each dtype and setting of torch.compile."""
    return [contender._replace(dtype=d, compile=c) for d, c in itertools.product(cfg.dtype, cfg.compile)]


# ---- models and their losses: (model, idx (B, T), targets (B, T)) -> mean cross-entropy


def our_loss(model, idx, targets):
    return model(idx, targets)[1]


def llama_loss(model, idx, targets):
    return model(input_ids=idx, labels=targets, shift_labels=targets).loss


def x_transformers_loss(model, idx, targets):
    return F.cross_entropy(model(idx).flatten(0, 1).float(), targets.flatten())


def as_x_transformers(cfg):
    """x-transformers' decoder of the shape of a ModelConfig, with Llama's parts and its own value residual."""
    x = need("x_transformers")
    shape = dict(dim=cfg.n_embd, depth=cfg.n_layer, heads=cfg.n_head, attn_dim_head=cfg.head_dim)
    mlp = dict(ff_glu=True, ff_swish=True, ff_no_bias=True, ff_mult=cfg.n_hidden / cfg.n_embd)
    rope = dict(rotary_pos_emb=True, rotary_emb_dim=cfg.head_dim)
    layers = x.Decoder(**shape, **mlp, **rope, use_rmsnorm=True, attn_flash=True, add_value_residual=True)
    size = dict(num_tokens=cfg.vocab_size, max_seq_len=cfg.block_size)
    return x.TransformerWrapper(**size, attn_layers=layers, use_abs_pos_emb=False)


def new_model(side, shape, block_size, device, recompute=False):
    """(model, its loss function) of a Side. Raises UserError if its package is not installed."""
    cfg = ModelConfig(**SHAPES[shape], block_size=block_size, value_mode=side.mode)
    if side.peer == "llama":
        return to_llama(GPT(cfg).to(device)), llama_loss
    if side.peer == "x_transformers":
        return as_x_transformers(cfg).to(device), x_transformers_loss
    return GPT(cfg, attn=side.attn, recompute=recompute).to(device), our_loss


def maybe_compile(model, side):
    if side.compile == "off":
        return model
    return torch.compile(model, dynamic=False, fullgraph=isinstance(model, GPT))


# ---- speed


def time_shape(cfg, shape, device):
    """The rows of one shape, one for each side, which all train on the same batch of random tokens."""
    T = cfg.block_size or (256 if device.type == "cpu" else 2048)
    B = cfg.micro_batch or MICRO_BATCH[device.type][shape]
    ids = torch.randint(SHAPES[shape]["vocab_size"], (B, T + 1), generator=torch.Generator().manual_seed(0))
    batch = [ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)]  # (B, T) each
    with torch._dynamo.config.patch(recompile_limit=1000):  # one forward pass, many models
        turns, rows = warm_sides(cfg, shape, batch, device)
        seconds, _ = in_turn(turns, cfg.rounds, device)
    for side, row in rows.items():
        seconds[side] = [s / row["steps"] for s in seconds[side]]  # of one step
    for side, row in rows.items():
        add_speeds(row, side, rows, seconds, cfg, device)
    return list(rows.values())


def warm_sides(cfg, shape, batch, device):
    """({Side: a function of some training steps}, {Side: its row so far}), compiled and warm. Raises UserError if
    vanilla and Llama, whose weights are the same, differ in their loss."""
    turns, rows, losses = {}, {}, {}
    reference = contenders(cfg)[0]
    for contender in contenders(cfg):
        model, loss = new_model(contender, shape, batch[0].size(1), device)
        with torch.no_grad():
            losses[contender] = loss(model, *batch).item()
        if contender.peer == "llama" and not abs(losses[contender] - losses[reference]) < 1e-3:
            raise UserError(f"vanilla's loss is {losses[reference]}, Llama's {losses[contender]}: not the same work")
        optimizer = adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)
        for side in ways_to_run(contender, cfg):
            steps = trainer(maybe_compile(model, side), loss, batch, getattr(torch, side.dtype), optimizer)
            first, *later = [timed(lambda steps=steps: steps(1), device) for _ in range(3)]
            say = f"{shape}, {side.name}, {side.dtype}, compile {side.compile}"
            print(f"{say}: first step {first:.1f} s, then {min(later):.3f} s", file=sys.stderr, flush=True)
            n = max(1, math.ceil(cfg.seconds / min(later)))
            turns[side] = functools.partial(steps, n)
            rows[side] = dict(shape=shape, name=side.name, dtype=side.dtype, compile=side.compile)
            rows[side].update(tokens=batch[0].numel(), first_step_s=first, steps=n)
            rows[side]["parameters"] = sum(p.numel() for p in model.parameters())
            rows[side]["flops_per_token"] = None if side.peer else flops_per_token(model.cfg)
    return turns, rows


def trainer(model, loss, batch, dtype, optimizer):
    """A function that does n training steps on one batch: autocast, gradients clipped to 1, AdamW."""
    kind = batch[0].device.type
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    parameters = list(model.parameters())

    def steps(n):
        for _ in range(n):
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                value = loss(model, *batch)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return steps


def add_speeds(row, side, rows, seconds, cfg, device):
    """Add to a side's row what follows from the seconds of a step: {Side: those of each round}."""
    reference = Side(attn=cfg.attn[0], dtype=side.dtype, compile=side.compile)
    row["seconds"] = seconds[side]
    row["tokens_per_s"] = row["tokens"] / statistics.median(seconds[side])
    row["to_vanilla"] = ratio(seconds, side, reference)
    for peer in cfg.peers:
        row[f"to {PEERS[peer]}"] = ratio(seconds, side, reference._replace(attn="sdpa", peer=peer))
    flops, peak = row["flops_per_token"], peak_flops(device, getattr(torch, side.dtype))
    row["computed"] = rows[reference]["flops_per_token"] / flops if flops else None
    row["mfu"] = row["tokens_per_s"] * flops / peak if flops and peak else None


def training_table(rows):
    """Markdown of one shape's rows: tokens/s by contender and way to run it, with the ratio to vanilla's (median,
    least–greatest of a round) beside what the FLOPs alone would make of it."""
    ways = list(dict.fromkeys((row["dtype"], row["compile"]) for row in rows))
    header = [rows[0]["shape"], "parameters"]
    for dtype, switch in ways:
        header.append(f"{dtype}, compiled" if switch == "on" else dtype)
    header.append("computed")
    has_mfu = any(row["mfu"] for row in rows)
    if has_mfu:
        header.append("of the peak")
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        cells = [name, f"{mine[0]['parameters']:,}"]
        for row in mine:
            share = "" if name == "vanilla" else f" = {spread(row['to_vanilla'])}"
            cells.append(f"{row['tokens_per_s']:,.0f}{share}")
        cells.append(f"{mine[0]['computed']:.3f}" if mine[0]["computed"] else "")
        if has_mfu:
            cells.append(", ".join(f"{row['mfu']:.1%}" for row in mine if row["mfu"]))
        lines.append(cells)
    return markdown(header, lines)


# ---- memory


def memory_rows(cfg, shape, device):
    """The rows of one shape, one for each side, with and without activation checkpointing of ours."""
    rows = []
    for contender in contenders(cfg):
        for side in ways_to_run(contender, cfg):
            for recompute in ("off",) if side.peer else cfg.recompute:
                print(f"{shape}, {side.name}, {side.dtype}, recompute {recompute}", file=sys.stderr, flush=True)
                rows.append(memory_row(cfg, device, shape, side, recompute))
    return rows


def memory_row(cfg, device, shape, side, recompute):
    """The peaks of one side at a quarter, a half and all of the micro-batch, and the line through the first two."""
    T = cfg.block_size or 2048
    most = max(4, cfg.micro_batch or MICRO_BATCH[device.type][shape])
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
    model, loss = new_model(side, shape, T, device, recompute == "on")
    optimizer = adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)
    model = maybe_compile(model, side)
    idx = torch.randint(SHAPES[shape]["vocab_size"], (B, T), device=device)
    for _ in range(2):
        for _ in range(2):
            with torch.autocast(device.type, getattr(torch, side.dtype), enabled=side.dtype != "float32"):
                value = loss(model, idx, idx)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peak_bytes(device) - before


def memory_table(rows):
    """Markdown of the peaks, and of the lines through them as GB + kB per token."""
    header = ["shape", "side", "dtype", "compile", "recompute"]
    header += ["micro-batch x length", "peak, GB", "by the line", "GB + kB per token"]
    lines = []
    for row in rows:
        B, peak = list(row["peaks"].items())[-1]
        cells = [row[key] for key in ("shape", "name", "dtype", "compile", "recompute")]
        cells += [f"{B} x {row['length']:,}", f"{peak / 1e9:.2f}"]
        cells.append(f"{row['predicted'] / 1e9:.2f} ({row['off_by']:+.1%})")
        cells.append(f"{row['fixed'] / 1e9:.2f} + {row['per_token'] / 1e3:.0f}")
        lines.append(cells)
    return markdown(header, lines, left=5)


def main(cfg: TrainingConfig):
    device = only_process(cfg.device).device
    if cfg.what == "memory":  # on a CPU what is freed shall leave the process at once; read when one starts
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
    rows = []
    for shape in cfg.shape:
        if cfg.what == "train":
            found = time_shape(cfg, shape, device)
            table = training_table(found)
        else:
            found = memory_rows(cfg, shape, device)
            table = memory_table(found)
        print(f"\n{table}", flush=True)
        rows += found
    write_results(cfg.what, {"rows": rows}, device, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
