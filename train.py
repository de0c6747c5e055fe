"""Train a model on prepared data, on one CPU or GPU, or on many with torchrun.

    python train.py config/tiny.py config/resformer.py               a laptop, a minute or two
    torchrun --nproc_per_node=8 train.py config/resformer.py         the paper's 82M recipe on 8 GPUs
    python train.py config/resformer.py --resume=auto                continue where the run stopped

Writes into out_dir: metrics.jsonl (a record for the start, for each step and for each evaluation), config.json,
env.json, tokenizer.json and checkpoints (see checkpoint.py). Read before: model.py. Read next: data.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

from oldconfig import UserError, check_ranges, command_line, first_line, need, run_main, setting
from value_modes import ModelConfig, ValueMode, get_mode


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of train.py. The defaults are the paper's 82M recipe (Table 4)."""

    out_dir: str = setting("", "folder of the run; empty = out/<value_mode>", group="Run")
    resume: str = setting("never", "never, auto (the last checkpoint in out_dir, if any), or a checkpoint's path")
    init_from: str = setting("", "run, checkpoint or folder of export.py whose weights to start from, where they fit")
    seed: int = setting(42, "of the weights and of the order of the data", least=0)

    data_dir: str = setting("data/slimpajama", "folder made by prepare.py", group="Data")
    mixture: dict[str, float] = setting(
        {}, "sampling weight per domain, {'C4': 0.5, …}; others are left out; empty = the data's"
    )
    bos: bool = setting(False, "begin each sequence with end-of-text in place of its first token")
    verify: bool = setting(True, "compare the sha256 of the data with the manifest at the start")

    value_mode: str | ValueMode = setting(
        "vanilla",
        "a row of `python model.py table`; neutreno_0.6 = with λ 0.6; a ValueMode in a config file",
        group="Model",
    )
    block_size: int = setting(2048, "tokens per sequence", least=1)
    n_layer: int = setting(8, "layers")
    n_head: int = setting(8, "query heads")
    n_kv_head: int = setting(0, "key and value heads; 0 = as value_mode says, else n_head", least=0)
    n_embd: int = setting(512, "width of the residual stream")
    head_dim: int = setting(0, "width of a head; 0 = n_embd / n_head", least=0)
    n_hidden: int = setting(0, "width of the MLP; 0 = 3.5 n_embd, with arch=gpt2 4 n_embd", least=0)
    arch: Literal["llama", "gpt2"] = setting("llama", "RMSNorm, RoPE, SwiGLU; gpt2: LayerNorm, positions, GELU, biases")

    batch_tokens: int = setting(2_097_152, "tokens per optimizer step, over all ranks", least=1, group="Optimization")
    micro_batch: int = setting(32, "at most so many sequences per rank and forward pass; accumulation follows", least=1)
    max_steps: int = setting(10_000, "optimizer steps, the length of the schedule", least=1)
    warmup_steps: int = setting(120, "steps of linear warmup from 1e-7", least=0)
    learning_rate: float = setting(6e-4, "peak of the schedule", least=0, most=1e6)
    final_lr: float = setting(0.1, "end of the cosine, as a share of the peak", least=0)
    weight_decay: float = setting(0.1, "of matrices, embeddings included; vectors and scalars have none", least=0)
    beta1: float = setting(0.9, "of AdamW", least=0, most=0.999999)
    beta2: float = setting(0.95, "of AdamW", least=0, most=0.999999)
    grad_clip: float = setting(1.0, "norm that gradients are clipped to; 0 = no clipping", least=0)

    eval_every: int = setting(1000, "steps between evaluations; one more at the end", least=1, group="Records")
    eval_tokens: int = setting(1_048_576, "validation tokens of each domain, in whole windows; 0 = all", least=0)
    save_every: int = setting(1000, "steps between checkpoints; evaluated steps and the last are saved too", least=1)
    keep: int = setting(2, "checkpoints kept, besides the best; 0 = all", least=0)
    log_every: int = setting(10, "steps between lines on the screen; metrics.jsonl has every step", least=1)
    log: Literal["none", "wandb"] = setting("none", "wandb: send the metrics to Weights & Biases too")

    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "of autocast; auto = bf16 if fast")
    compile: bool | None = setting(None, "torch.compile; none = on GPUs only")
    attn: Literal["sdpa", "flash", "eager"] = setting("sdpa", "attention kernel: torch's, flash-attn's, or plain")
    half_stream: bool = setting(False, "residual stream in half precision too: faster on GPUs, rounds more")
    recompute: bool = setting(False, "activation checkpointing: less memory, more computing, the same numbers")
    shard: Literal["none", "zero2", "zero3"] = setting(
        "none", "divide among the ranks: nothing; gradients and optimizer; weights too, see docs/scale.md"
    )

    def __post_init__(self):
        check_ranges(self)
        if not self.resume:
            raise ValueError("resume is empty; set never, auto or a checkpoint's path")
        object.__setattr__(self, "value_mode", get_mode(self.value_mode))
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.value_mode.name}")
        self.model_config(vocab_size=1)  # raises on an impossible shape, whatever the vocabulary

    def model_config(self, vocab_size):
        """The ModelConfig of these settings; raises ValueError on an impossible shape."""
        names = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "n_hidden", "arch", "value_mode")
        return ModelConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in names})

    def split_batch(self, n_ranks):
        """(sequences per forward pass, forward passes per step) of each rank. The first is the largest divisor of the
        rank's sequences up to micro_batch. Raises UserError if batch_tokens does not split over the ranks."""
        n_sequences, rest = divmod(self.batch_tokens, self.block_size)
        if rest:
            nearest = [n * self.block_size for n in (n_sequences, n_sequences + 1) if n]
            tokens = f"batch_tokens={self.batch_tokens} is not a multiple of block_size={self.block_size}"
            raise UserError(f"{tokens}; nearest: {' or '.join(map(str, nearest))}")
        if n_sequences % n_ranks:
            fewer = max(n for n in range(1, n_ranks) if n_sequences % n == 0)
            unit = self.block_size * n_ranks
            raise UserError(
                f"{n_ranks} ranks cannot share the {n_sequences} sequences of a step equally; start {fewer} ranks, or "
                f"set batch_tokens to a multiple of {unit}, which changes the training"
            )
        per_rank = n_sequences // n_ranks
        micro_batch = max(n for n in range(1, min(self.micro_batch, per_rank) + 1) if per_rank % n == 0)
        return micro_batch, per_rank // micro_batch


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(TrainConfig, __doc__)

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from data import Corpus
from describe import count_parameters, flops_per_token
from model import GPT
from oldfiles import append, hold, read_json, read_records, write_json, write_text
from report import progress
from runtime import Distributed, enough_memory, environment, need_flash_attn, peak_flops, pick_dtype, whole
from scoring import domain_losses
from value_modes import kv_floats_per_token

LR_START = 1e-7  # where the warmup begins, in the authors' scripts
REMEDY = "nothing of this step is saved; continue from a checkpoint before it with a lower learning_rate"
# Settings that change no result beyond rounding. A resumed run says nothing of them, and paper/ compares runs without.
MAY_DIFFER = ("resume", "verify", "device", "compile", "log", "log_every", "keep", "out_dir", "data_dir", "save_every",
              "recompute", "shard", "micro_batch", "attn")  # fmt: skip


def learning_rate(step, peak, end, warmup, steps):
    """Rate of step 0, 1, …: linear from 1e-7 to `peak` over `warmup` steps, then a cosine to `end` at `steps`.
    Source: the authors' train.py."""
    if step < warmup:
        return LR_START + (peak - LR_START) * step / warmup
    share_done = min(1, (step - warmup) / max(1, steps - warmup))
    return end + (peak - end) * (1 + math.cos(math.pi * share_done)) / 2


def adamw(model, lr, weight_decay, betas, device_type):
    """AdamW with decay on matrices (embeddings and head included) and none on vectors: norms, mixing weights."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=device_type == "cuda")


def numbers_by_path(value, path=""):
    """{"val/C4": 2.9, "lam/0/1/0": 0.5, …}: the numbers in nested dicts and lists, for wandb."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value} if isinstance(value, (int, float)) else {}
    found = {}
    for key, inner in value.items():
        found |= numbers_by_path(inner, f"{path}/{key}" if path else key)
    return found


class Metrics:
    """metrics.jsonl of a run, wandb if asked for, and the lines on the screen. Only rank 0 writes.

    done: steps finished before. Later records, of a run that was cut off after its checkpoint, are dropped.
    """

    def __init__(self, cfg, world, done):
        self.is_main = world.rank == 0
        self.log_every = cfg.log_every
        self.max_steps = cfg.max_steps
        self.wandb = None
        on_terminal = self.is_main and sys.stderr.isatty()
        self.bar = progress("train", cfg.max_steps - done, "step", on_terminal)
        if not self.is_main:
            return
        path = Path(cfg.out_dir) / "metrics.jsonl"
        if path.exists() and not checkpoint.steps(cfg.out_dir):  # of a run that died before its first checkpoint
            os.replace(path, path.with_suffix(".old.jsonl"))
        records = read_records(path, {"step": int}) if path.exists() else []
        write_text(path, "".join(json.dumps(r) + "\n" for r in records if r["step"] <= done))
        self.file = open(path, "a", encoding="utf-8")
        if cfg.log == "wandb":
            self.wandb = need("wandb")
            name, settings = Path(cfg.out_dir).name, dataclasses.asdict(cfg)
            self.wandb.init(project="nanoresformer", name=name, dir=cfg.out_dir, config=settings)

    def write(self, record):
        """Append a record. All have "step"; those of evaluations and starts also have "event": "eval" or "start"."""
        if not self.is_main:
            return
        append(self.file, json.dumps(record, allow_nan=False) + "\n")
        if self.wandb and record.get("event") != "start":
            self.wandb.log(numbers_by_path(record), step=record["step"])

    def say(self, text):
        if self.is_main:
            self.bar.clear()
            print(text, flush=True)
            self.bar.refresh()

    def step(self, record):
        """Record a step, and say so now and then."""
        self.write(record)
        self.bar.update(1)
        n = record["step"]
        is_shown = n % self.log_every == 0 or n in (1, self.max_steps)
        if not is_shown:
            return
        norm = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] else ""
        left = datetime.timedelta(seconds=round((self.max_steps - n) * record["seconds"]))
        self.say(
            f"step {n}/{self.max_steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  norm {norm}  "
            f"{record['tokens_per_s']:,.0f} tok/s{mfu}  input {record['input_s'] / record['seconds']:.1%}  left {left}"
        )

    def evaluation(self, step, result):
        """Record an evaluation; returns its val_mean. Raises UserError if that is not finite."""
        if not math.isfinite(result["val_mean"]):
            raise UserError(f"step {step}: the validation loss is {result['val_mean']}; {REMEDY}")
        self.write({"event": "eval", "step": step, **result})
        means = [f"{key} {result[key]:.4f}" for key in ("val_mean", "val_mixture", "bpb_mean")]
        self.say(f"step {step}  " + "  ".join(means))
        return result["val_mean"]

    def close(self):
        self.bar.close()
        if self.is_main:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


@dataclass
class Run:
    """What the parts of a run share. `model` is the bare GPT, which is clipped, evaluated and saved; a function's
    argument `model` is the same one compiled and wrapped, which computes the loss. micro_batch, accumulation: see
    TrainConfig.split_batch. is_sharded: see Distributed.shard."""

    cfg: TrainConfig
    world: Distributed
    corpus: Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    dtype: torch.dtype
    micro_batch: int
    accumulation: int
    is_sharded: bool

    @property
    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        # the cache would keep a copy of every weight, also of those that are gathered for a moment
        return torch.autocast(self.world.kind, self.dtype, cache_enabled=not self.is_sharded)


def build(cfg, world):
    """The Run of a config: data checked, model and optimizer on this rank's device."""
    dtype = pick_dtype(cfg.dtype, world.kind)
    if cfg.attn == "flash":
        if world.kind != "cuda" or dtype == torch.float32:
            raise UserError("attn=flash needs a GPU and dtype bfloat16 or float16; use attn=sdpa")
        need_flash_attn()
    is_sharded = cfg.shard != "none" and world.size > 1
    micro_batch, accumulation = cfg.split_batch(world.size)
    verify = cfg.verify and world.is_first_of_node
    corpus = Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, verify, cfg.bos)
    torch.manual_seed(cfg.seed)
    shape = cfg.model_config(corpus.tokenizer.n_vocab)
    model = GPT(shape, cfg.seed, cfg.attn, recompute=cfg.recompute, half_stream=cfg.half_stream)
    if not is_sharded:  # else the device may have no room for all of it
        model = model.to(world.device)
    optimizer = adamw(model, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2), world.kind)
    scaler = torch.amp.GradScaler(world.kind, enabled=dtype == torch.float16)
    return Run(cfg, world, corpus, model, optimizer, scaler, dtype, micro_batch, accumulation, is_sharded)


def resumed(run):
    """Steps already done: 0, or those of the checkpoint to continue from, which is loaded into the run."""
    cfg, files = run.cfg, checkpoint.steps(run.cfg.out_dir)
    if cfg.resume == "never" and files:
        raise UserError(f"{cfg.out_dir} already holds a run; --resume=auto continues it, or set another --out_dir")
    if cfg.resume == "never" or (cfg.resume == "auto" and not files):
        return 0
    path = checkpoint.find(cfg.out_dir if cfg.resume == "auto" else cfg.resume)
    done = checkpoint.resume(path, run.model, run.optimizer, run.scaler, run.corpus.tokenizer.hash)["step"]
    if files and path.parent.resolve() != Path(cfg.out_dir).resolve():
        raise UserError(f"{cfg.out_dir} already holds a run, and {path} is of another; set another --out_dir")
    if files and done < max(files):
        raise UserError(f"{cfg.out_dir} holds step {max(files)}, later than {path}; set another --out_dir to go back")
    if not files and done >= cfg.max_steps:
        raise UserError(f"{path} is at step {done}, so nothing is left to train; set --max_steps above that")
    return done


def compare_settings(run, done):
    """(config.json as it should be now, a sentence on what changed since the run was last started or "").

    Raises UserError if the first weights, the data or its order changed, or, in a finished run, anything that changes
    results.
    """
    cfg, folder = run.cfg, Path(run.cfg.out_dir)
    if done and not checkpoint.steps(folder):  # it continues from a checkpoint elsewhere
        folder = checkpoint.find(cfg.resume).parent
    path = folder / "config.json"
    settings = dataclasses.asdict(cfg)
    settings["value_mode_name"] = settings["value_mode"].pop("name")
    settings["data"] = run.corpus.hash
    new = json.loads(json.dumps(settings))  # as it is read back
    if not (done and path.exists()):
        return new, ""
    old = {"bos": False, "half_stream": False} | read_json(
        path, "the config of a run", checkpoint.RUN
    )  # older runs do not say it
    new["init_from"] = cfg.init_from or old.get("init_from", "")  # a resumed run need not name it again
    changed = [k for k in new if k in old and old[k] != new[k] and k not in MAY_DIFFER]
    what = ", ".join(f"{k} (was {str(old[k])[:40] or 'empty'})" for k in changed)
    must_stay = {"seed", "batch_tokens", "data", "bos", "init_from"}
    is_finished = done >= cfg.max_steps
    if must_stay.intersection(changed) or (changed and is_finished):
        remedy = "use them, or start anew in another --out_dir"
        raise UserError(f"{folder} was started with other settings: {what}; {remedy}")
    note = f"note: changed since the run was last started: {what}" if changed else ""
    return new, note


def announce(run, done, metrics):
    """Write the start record, and say what is about to run."""
    cfg, world, config = run.cfg, run.world, run.model.cfg
    name = config.value_mode.name
    n_parameters = count_parameters(config)
    record = {
        "event": "start",
        "step": done,
        "value_mode": name,
        "seed": cfg.seed,
        "parameters": n_parameters,
        "arch": cfg.arch,
        "block_size": cfg.block_size,
        "data": run.corpus.hash,
        "bos": cfg.bos,
        "kv_bytes_per_token": 2 * kv_floats_per_token(config),  # in bf16
        "dtype": str(run.dtype).removeprefix("torch."),
        "device": world.kind,
        "ranks": world.size,
        "max_steps": cfg.max_steps,
    }
    metrics.write(record)
    if run.micro_batch < cfg.micro_batch:
        metrics.say(f"micro_batch is {run.micro_batch} instead of {cfg.micro_batch}, so that it divides a rank's share")
    if cfg.shard != "none" and not run.is_sharded:
        metrics.say(f"shard={cfg.shard} has one rank to divide the model among; continuing without it")
    sizes = f"{world.size} x {run.accumulation} x {run.micro_batch} x {cfg.block_size}"
    metrics.say(
        f"{name}: {n_parameters:,} parameters, {cfg.max_steps - done} steps of {cfg.batch_tokens:,} tokens = {sizes}, "
        f"{record['dtype']} on {world.kind}"
    )


def compiled_parts(run):
    """torch.compile of the model as one graph; if it is sharded, of each block: no graph can gather what it reads."""
    if not run.is_sharded:
        return torch.compile(run.model, dynamic=False, fullgraph=True)
    torch._dynamo.config.recompile_limit = max(8, run.model.cfg.n_layer)  # blocks share code, and may all differ
    for block in run.model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
    return run.model


def compiled(run, say):
    """torch.compile of the model, warmed up; where that fails the model itself, with a line that says why. Raises
    UserError if a sharded one fails, for the other ranks wait in the middle of it."""
    cfg, world = run.cfg, run.world
    wanted = world.kind == "cuda" if cfg.compile is None else cfg.compile
    if not wanted:
        return run.model
    start, reason = time.time(), None
    model = compiled_parts(run)
    if world.kind == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        reason = "there is no C++ compiler"
    else:
        try:
            idx = torch.zeros(run.micro_batch, cfg.block_size, dtype=torch.int64, device=world.device)
            with run.autocast:
                loss = model(idx, idx.clone())[1]  # two tensors, as in training: an alias would be another graph
            loss.backward()
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # a compiler's failure can be anything; it must not stop the run
            reason = f"{type(e).__name__}: {first_line(e)}"
        run.model.zero_grad(set_to_none=True)
    if reason and run.is_sharded:
        raise UserError(f"torch.compile does not work here ({reason}); set --compile=false")
    if world.sum([reason is not None]).item():
        say(f"torch.compile does not work here ({reason or 'on another rank'}); continuing without it")
        return run.model
    say(f"compiled in {time.time() - start:.0f} s")
    return model


def training_batches(run, done):
    """This rank's micro-batches from step `done` on, without end: x, y (micro_batch, block_size), and the seconds spent
    waiting for them. A thread reads the next one while the model computes."""
    cfg, world = run.cfg, run.world
    n_sequences = cfg.batch_tokens // cfg.block_size
    first_of_rank = world.rank * run.accumulation * run.micro_batch

    def read(step, i):
        first = first_of_rank + i * run.micro_batch
        return world.pin_memory(run.corpus.batch(step, n_sequences, first, first + run.micro_batch))

    places = ((step, i) for step in itertools.count(done) for i in range(run.accumulation))
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(read, *next(places))
        while True:
            began = time.perf_counter()
            batch = ahead.result()
            ahead = thread.submit(read, *next(places))
            x, y = world.to_device(batch)
            yield x, y, time.perf_counter() - began


def accumulate(run, model, batches):
    """Add the gradients of this rank's micro-batches to the parameters'; returns (the sum of their losses, the seconds
    spent waiting for data)."""
    total, waited = torch.zeros((), device=run.world.device), 0.0
    for i in range(run.accumulation):
        x, y, seconds = next(batches)
        waited += seconds
        is_last = i == run.accumulation - 1
        if run.is_sharded:  # zero3 has no room for whole gradients and weights between micro-batches
            sync = is_last or run.cfg.shard == "zero3"
            run.model.set_requires_gradient_sync(sync)
            run.model.set_reshard_after_backward(sync)
        elif run.world.size > 1:
            model.require_backward_grad_sync = is_last  # must be set before the forward
        with run.autocast:
            loss = model(x, y)[1]
        run.scaler.scale(loss / run.accumulation).backward()
        total += loss.detach()
    return total, waited


def train_step(run, model, step, batches):
    """One optimizer step; returns (mean loss over the global batch, gradient norm or None if fp16 overflowed, seconds
    spent waiting for data). batches: see `training_batches`.

    Raises UserError, and the caller saves nothing, if the loss is not finite, or if the norm is not and no scaler
    skipped the step.
    """
    cfg, world, scaler = run.cfg, run.world, run.scaler
    run.optimizer.zero_grad(set_to_none=True)
    total, waited = accumulate(run, model, batches)
    scaler.unscale_(run.optimizer)
    most = cfg.grad_clip or math.inf  # infinity: measure the norm, clip nothing
    norm = whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), most))
    scaler.step(run.optimizer)
    scaler.update()
    # All of the step is launched. Only now its results are read, so a GPU never waits for the next launch.
    total, norm = (world.sum(torch.stack((total, norm))) / world.size).tolist()
    loss = total / run.accumulation
    if not math.isfinite(loss):
        raise UserError(f"step {step + 1}: the loss is {loss}; {REMEDY}")
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise UserError(f"step {step + 1}: the gradient norm is {norm}; {REMEDY}")
    if scaler.is_enabled() and scaler.get_scale() < 2**-10:
        raise UserError(f"step {step + 1}: fp16 gradients overflow at any loss scale; use dtype=bfloat16")
    if not math.isfinite(norm):
        norm = None  # fp16 overflowed
    return loss, norm, waited


@torch.no_grad()
def validate(run):
    """Validation on the first whole windows within eval_tokens of each domain, at least one, or on all text; the same
    whatever the number of ranks.

    Returns what scoring.domain_losses does, and where residuals have learned weights "lam", see GPT.mixing_weights.
    """
    cfg, world, corpus = run.cfg, run.world, run.corpus
    most = max(1, cfg.eval_tokens // cfg.block_size) if cfg.eval_tokens else None
    parts = corpus.val_parts(cfg.micro_batch, most)
    n_bytes = corpus.tokenizer.token_bytes()
    sums = np.zeros((len(corpus.domains), 3))  # nats, tokens, bytes of text
    n_rounds = math.ceil(len(parts) / world.size)
    for i in range(world.rank, n_rounds * world.size, world.size):
        d, first, last = parts[i % len(parts)]
        x, y = corpus.val_batch(corpus.domains[d], first, last)
        with run.autocast, torch.compiler.set_stance("force_eager"):  # a sharded model's blocks are compiled in place
            loss = run.model(*world.to_device(world.pin_memory((x, y))))[1]
        if i < len(parts):  # past them a rank only computes along: a sharded model is gathered by all ranks or none
            sums[d] += [loss.item() * y.size, y.size, n_bytes[y].sum()]
    result = domain_losses(corpus, world.sum(sums).numpy())
    if list(run.model.lambdas.parameters()):
        if run.is_sharded:
            run.model.unshard()
        result["lam"] = run.model.mixing_weights()
    if run.is_sharded:  # a forward without a backward has left weights gathered
        for module in (*run.model.blocks, run.model):
            module.reshard()
    return result


class Stop:
    """Set by SIGTERM or Ctrl-C, so that the current step is finished and saved; a second Ctrl-C kills."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGTERM, self)
        signal.signal(signal.SIGINT, self)

    def __call__(self, number, frame):
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def set_up(run, metrics, config, note, done):
    """Write the files that describe the run, say what is about to run; returns the model that computes the loss."""
    world, out = run.world, Path(run.cfg.out_dir)
    if world.rank == 0:
        checkpoint.clean(out)
        write_json(out / "config.json", config)
        write_json(out / "env.json", environment())
        run.corpus.tokenizer.save(out / "tokenizer.json")
    if note:
        metrics.say(note)
    announce(run, done, metrics)
    if run.is_sharded:
        world.shard(run.model, run.optimizer, keep_gathered=run.cfg.shard == "zero2")
    model = compiled(run, metrics.say)
    if world.size > 1 and not run.is_sharded:  # after compiling: one graph, and all its gradients in DDP's buckets
        device_ids = [world.device.index] if world.kind == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    return model


def evaluate_and_save(run, metrics, n, is_stopped):
    """Evaluate and save after n steps, each where it is time."""
    cfg, val_loss = run.cfg, None
    if n % cfg.eval_every == 0 or n == cfg.max_steps:
        val_loss = metrics.evaluation(n, validate(run))
    if n % cfg.save_every == 0 or is_stopped or val_loss is not None:
        tokenizer_hash, is_main = run.corpus.tokenizer.hash, run.world.rank == 0
        checkpoint.save(
            cfg.out_dir, n, run.model, tokenizer_hash, val_loss, run.optimizer, run.scaler, cfg.keep, is_main
        )


def train(run, done, config, note):
    """Steps, evaluations and checkpoints from step `done` on. config: for config.json; note: a line to show, or ""."""
    cfg, world = run.cfg, run.world
    with world.together():
        metrics = Metrics(cfg, world, done)
    model = set_up(run, metrics, config, note, done)
    stop = Stop()  # not earlier, for compiling can take minutes
    batches = training_batches(run, done)
    peak, flops = peak_flops(world.device, run.dtype), flops_per_token(run.model.cfg)
    for step in range(done, cfg.max_steps):
        n, began = step + 1, time.perf_counter()
        lr = learning_rate(step, cfg.learning_rate, cfg.final_lr * cfg.learning_rate, cfg.warmup_steps, cfg.max_steps)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        loss, norm, waited = train_step(run, model, step, batches)
        seconds = time.perf_counter() - began
        rate = cfg.batch_tokens / seconds
        mfu = rate * flops / (peak * world.size) if peak else None
        record = {"step": n, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": n * cfg.batch_tokens}
        record |= {"input_s": waited, "seconds": seconds, "tokens_per_s": rate, "mfu": mfu}
        metrics.step(record)
        if step == done:
            metrics.say(f"first step done after {time.perf_counter() - world.started:.1f} s")
        is_stopped = world.sum([stop.asked]).item() > 0
        evaluate_and_save(run, metrics, n, is_stopped)
        if is_stopped and n < cfg.max_steps:
            metrics.say(f"stopped and saved at step {n}; the same command with --resume=auto continues")
            break
    metrics.close()


def start(cfg, world):
    """Train the run of a config, from where it stands to its end."""
    with contextlib.ExitStack() as stack:
        with world.together():
            if checkpoint.is_hf_folder(cfg.out_dir):
                raise UserError(f"{cfg.out_dir} holds a Hugging Face model; set another --out_dir")
            run = build(cfg, world)
            if world.rank == 0:
                stack.enter_context(hold(cfg.out_dir))
            done = resumed(run)
            config, note = compare_settings(run, done)
            if cfg.init_from and not done:
                note = checkpoint.start_from(checkpoint.find(cfg.init_from), run.model, run.corpus.tokenizer.hash)
        if len(set(world.gather(done))) > 1:
            raise UserError(f"the ranks do not see the same checkpoints in {cfg.out_dir}; put it on a shared disk")
        if len(set(world.gather((run.corpus.hash, run.corpus.val_hash)))) > 1:
            raise UserError(f"the ranks do not read the same data in {cfg.data_dir}; copy one folder to all nodes")
        if done < cfg.max_steps:
            train(run, done, config, note)
        elif world.rank == 0:
            clean_up(Path(cfg.out_dir))
            print(f"{cfg.out_dir} is already finished, at step {done}")


def clean_up(out):
    """Finish what a kill after the last save has left, with the `keep` that the run had."""
    if (out / "config.json").exists():
        config = read_json(out / "config.json", "the config of a run", {"keep": int})
        checkpoint.prune(out, config["keep"])
        checkpoint.clean(out)


def main(cfg: TrainConfig):
    world = Distributed(cfg.device, fixed_lengths=True)
    remedy = "set a smaller --micro_batch, or --recompute=true, or on several GPUs --shard=zero2 or zero3"
    with world.connected(), enough_memory(remedy):
        start(cfg, world)
    world.close()


if __name__ == "__main__":
    run_main(main, SETTINGS)
