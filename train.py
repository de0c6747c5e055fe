"""Train a model on prepared data, on one CPU or GPU, or on many with torchrun.

    python train.py config/tiny.py config/resformer.py               a laptop, two minutes
    torchrun --nproc_per_node=8 train.py config/resformer.py         the paper's 82M recipe on 8 GPUs
    python train.py config/resformer.py --resume=auto                go on where the run stopped

Writes into out_dir: metrics.jsonl (a record for the start, each step and each evaluation), config.json, env.json,
tokenizer.json and checkpoints (see checkpoint.py).
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
from configurator import UserError, command_line, run_main, setting
from data import Corpus
from describe import count_parameters, flops_per_token
from files import read_json, write_atomic, write_json
from model import GPT, attend
from runtime import Distributed, environment, peak_flops, pick_dtype
from value_modes import ModelConfig, ValueMode, get_mode, kv_floats_per_token, mode_name

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
EXPLODED = "nothing of this step is saved; go on from a checkpoint before it with a lower learning_rate"
LR_START = 1e-7  # where the warmup begins, in the authors' scripts


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of train.py. The defaults are the paper's 82M recipe (Table 4)."""

    out_dir: str = setting("", "folder of the run; empty = out/<value_mode>")
    resume: str = setting("never", "never, auto (the last checkpoint in out_dir, if any), or a checkpoint's path")
    seed: int = setting(42, "of the weights and of the order of the data")
    data_dir: str = setting("data/slimpajama", "folder made by prepare.py")
    mixture: dict = setting(
        {}, "sampling weight of domains, {'C4': 0.5, …}, others are left out; empty = the data's own"
    )
    verify: bool = setting(True, "compare the sha256 of the data with the manifest at the start")

    value_mode: str | ValueMode = setting(
        "vanilla", "a row of `python model.py table`, neutreno_0.6 for its λ = 0.6; a ValueMode in a config file"
    )
    block_size: int = setting(2048, "tokens per sequence")
    n_layer: int = setting(8, "layers")
    n_head: int = setting(8, "query heads")
    n_kv_head: int = setting(0, "key and value heads, fewer = grouped queries; 0 = as value_mode says, else n_head")
    n_embd: int = setting(512, "width of the residual stream")
    n_hidden: int = setting(0, "width of the MLP; 0 = 3.5 n_embd, with arch=gpt2 4 n_embd")
    arch: Literal["llama", "gpt2"] = setting("llama", "RMSNorm, RoPE, SwiGLU; gpt2: LayerNorm, positions, GELU, biases")

    batch_tokens: int = setting(2_097_152, "tokens per optimizer step, over all ranks")
    micro_batch: int = setting(32, "sequences per rank and forward pass; accumulation follows from batch_tokens")
    max_steps: int = setting(10_000, "optimizer steps, the length of the schedule")
    warmup_steps: int = setting(120, "steps of linear warmup from 1e-7")
    learning_rate: float = setting(6e-4, "peak of the schedule")
    final_lr: float = setting(0.1, "end of the cosine, as a share of the peak")
    weight_decay: float = setting(0.1, "of matrices, embeddings included; vectors and scalars have none")
    beta1: float = setting(0.9, "of AdamW")
    beta2: float = setting(0.95, "of AdamW")
    grad_clip: float = setting(1.0, "norm that gradients are clipped to; 0 = no clipping")

    eval_every: int = setting(1000, "steps between evaluations; one more at the end")
    eval_tokens: int = setting(1_048_576, "validation tokens of each domain; 0 = all")
    save_every: int = setting(1000, "steps between checkpoints; evaluated steps and the last are saved too")
    keep: int = setting(2, "checkpoints kept, besides the best; 0 = all")
    log_every: int = setting(10, "steps between lines on the screen; metrics.jsonl has every step")
    log: Literal["none", "wandb", "tensorboard"] = setting("none", "send the metrics there too")

    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "of autocast; auto = bf16 if fast here")
    compile: bool | None = setting(None, "torch.compile; none = on GPUs only")
    attn: Literal["sdpa", "flash", "eager"] = setting("sdpa", "attention kernel: torch's, flash-attn's, or plain")
    pad_vocab: int = setting(
        0, "rows of the head's product are filled up to a multiple of this; 0 = 64 on GPUs, else 1"
    )
    recompute: bool = setting(False, "activation checkpointing: less memory, more computing, the same numbers")

    def __post_init__(self):
        object.__setattr__(self, "value_mode", get_mode(self.value_mode))
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{mode_name(self.value_mode)}")
        least = dict(micro_batch=1, max_steps=1, eval_every=1, save_every=1, log_every=1, batch_tokens=1)
        least |= dict(eval_tokens=0, keep=0, warmup_steps=0, grad_clip=0, learning_rate=0, seed=0)
        least |= dict(weight_decay=0, final_lr=0, beta1=0, beta2=0, n_kv_head=0, n_hidden=0, pad_vocab=0)
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"beta1={self.beta1} and beta2={self.beta2} must be below 1")
        if self.learning_rate > 1e6:
            raise ValueError(f"learning_rate={self.learning_rate} is out of the range of fp32 weights")
        self.model(vocab_size=1)

    def model(self, vocab_size):
        """The ModelConfig of these settings; raises ValueError on an impossible shape."""
        names = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "arch", "value_mode")
        return ModelConfig(vocab_size=vocab_size, **{k: getattr(self, k) for k in names})

    def accumulation(self, ranks):
        """Micro-batches per optimizer step and rank; raises UserError, naming what would do, if it is not whole."""
        unit = self.micro_batch * self.block_size * ranks
        if self.batch_tokens % unit:
            near = [n for n in (self.batch_tokens // unit * unit, (self.batch_tokens // unit + 1) * unit) if n]
            raise UserError(
                f"batch_tokens={self.batch_tokens} is not a multiple of {unit} = {ranks} ranks x micro_batch="
                f"{self.micro_batch} x block_size={self.block_size}; nearest: {' or '.join(map(str, near))}"
            )
        return self.batch_tokens // unit


def learning_rate(step, peak, end, warmup, steps):
    """Rate of step 0, 1, …: linear from 1e-7 to `peak` over `warmup` steps, then a cosine to `end` at `steps`.
    Source: the authors' train.py."""
    if step < warmup:
        return LR_START + (peak - LR_START) * step / warmup
    progress = min(1, (step - warmup) / max(1, steps - warmup))
    return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2


def adamw(model, lr, weight_decay, betas, device_type):
    """AdamW with decay on matrices (embeddings and head included) and none on vectors: norms, mixing weights."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=device_type == "cuda")


class Metrics:
    """metrics.jsonl of a run, and what shows on the screen. Only rank 0 writes."""

    def __init__(self, cfg, world, done):
        """done: steps finished before; later records, of a run that was cut off after its checkpoint, are dropped."""
        self.on, self.log_every, self.max_steps = world.rank == 0, cfg.log_every, cfg.max_steps
        self.bar = None
        if not self.on:
            return
        path = Path(cfg.out_dir) / "metrics.jsonl"
        if path.exists() and not done:  # of a run without a checkpoint: nothing to go on with, but not ours to delete
            os.replace(path, path.with_suffix(".old.jsonl"))
        kept = [json.dumps(r) + "\n" for r in read_metrics(path) if r["step"] <= done] if path.exists() else []
        write_atomic(path, lambda temporary: Path(temporary).write_text("".join(kept), encoding="utf-8"))
        self.file = open(path, "a", encoding="utf-8")
        if sys.stderr.isatty():
            self.bar = tqdm(total=cfg.max_steps, initial=done, unit="step", dynamic_ncols=True)
        other = {"wandb": start_wandb, "tensorboard": start_tensorboard}.get(cfg.log)
        self.others = [other(cfg)] if other else []  # (write, close) functions

    def write(self, record):
        if self.on:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
            flat = record | {f"{k}/{d}": v for k in ("val", "bpb") for d, v in record.get(k, {}).items()}
            for j, layers in enumerate(record.get("lam", ())):
                flat |= {f"lam/{j}/{n}/{i}": x for n, w in enumerate(layers) for i, x in enumerate(w or ())}
            for write, _ in self.others if record.get("event") != "start" else ():
                write({k: v for k, v in flat.items() if isinstance(v, (int, float))}, record["step"])

    def say(self, text):
        if self.on:
            tqdm.write(text) if self.bar else print(text, flush=True)

    def step(self, record):
        self.write(record)
        if self.bar:
            self.bar.update()
        n, steps = record["step"], self.max_steps
        if n % self.log_every == 0 or n in (1, steps):
            norm = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
            mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] else ""
            left = datetime.timedelta(seconds=round((steps - n) * record["seconds"]))
            share = record["input_s"] / record["seconds"]
            self.say(
                f"step {n}/{steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  norm {norm}  "
                f"{record['tokens_per_s']:,.0f} tok/s{mfu}  input {share:.1%}  left {left}"
            )

    def evaluation(self, step, result):
        """Record an evaluation; returns its val_mean. Raises UserError if that is not finite."""
        if not math.isfinite(result["val_mean"]):
            raise UserError(f"step {step}: the validation loss is {result['val_mean']}; {EXPLODED}")
        self.write({"event": "eval", "step": step} | result)
        self.say(f"step {step}  " + "  ".join(f"{k} {result[k]:.4f}" for k in ("val_mean", "val_mixture", "bpb_mean")))
        return result["val_mean"]

    def close(self):
        if self.on:
            self.file.close()
            if self.bar:
                self.bar.close()
            for _, close in self.others:
                close()


def read_metrics(path):
    """Records of a metrics.jsonl; a last line that was cut off in writing is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as e:
        raise UserError(f"{path} is damaged ({e}); repair it or move it away") from None


def start_wandb(cfg):
    try:
        import wandb
    except ImportError:
        raise UserError("log=wandb needs the wandb package: pip install wandb") from None
    wandb.init(project="nanoresformer", name=Path(cfg.out_dir).name, dir=cfg.out_dir, config=dataclasses.asdict(cfg))
    return (lambda record, step: wandb.log(record, step=step)), wandb.finish


def start_tensorboard(cfg):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("log=tensorboard needs the tensorboard package: pip install tensorboard") from None
    writer = SummaryWriter(cfg.out_dir)
    return (lambda record, step: [writer.add_scalar(key, value, step) for key, value in record.items()]), writer.close


@dataclass
class Run:
    """What the parts of a run share. `raw` is the model itself; what steps is `raw`, compiled and wrapped."""

    cfg: TrainConfig
    world: Distributed
    corpus: Corpus
    raw: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    dtype: torch.dtype

    @property
    def amp(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.kind, self.dtype)


def build(cfg, world):
    """The Run of a config: data checked, model and optimizer on this rank's device."""
    dtype = pick_dtype(cfg.dtype, world.kind)
    check_attention(cfg, world, dtype)
    cfg.accumulation(world.size)
    corpus = Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, cfg.verify and world.is_first_of_node)
    torch.manual_seed(cfg.seed)
    raw = GPT(cfg.model(corpus.tokenizer.n_vocab), cfg.seed, cfg.attn, recompute=cfg.recompute)
    raw = raw.to(world.device)
    optimizer = adamw(raw, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2), world.kind)
    scaler = torch.amp.GradScaler(world.kind, enabled=dtype == torch.float16)
    return Run(cfg, world, corpus, raw, optimizer, scaler, dtype)


def check_attention(cfg, world, dtype):
    if cfg.attn == "flash":
        try:
            import flash_attn  # noqa: F401
        except ImportError:
            raise UserError("attn=flash needs flash-attn: pip install flash-attn, or use attn=sdpa") from None
        if world.kind != "cuda" or dtype == torch.float32:
            raise UserError("attn=flash needs a GPU and dtype bfloat16 or float16; use attn=sdpa")
    if cfg.attn == "sdpa" and world.kind in ("cpu", "cuda"):
        shape = cfg.model(vocab_size=1)
        q, k = (torch.zeros(1, h, 16, shape.head_dim, dtype=dtype) for h in (shape.n_head, shape.n_kv_head))
        try:
            with sdpa_kernel(FUSED):
                attend(q.to(world.device), *[k.to(world.device)] * 2)
        except RuntimeError:  # else torch would take its plain path without a word, slow and with T x T scores
            raise UserError(
                f"torch has no fused attention for heads of width {shape.head_dim} in {str(dtype)[6:]} here; use a "
                "multiple of 8 for it, another dtype, or attn=eager"
            ) from None


def start_point(run):
    """Steps already done: 0, or those of the checkpoint to go on from, which is loaded into the run."""
    cfg, files, done = run.cfg, checkpoint.steps(run.cfg.out_dir), 0
    if cfg.resume == "never" and files:
        raise UserError(f"{cfg.out_dir} already holds a run; --resume=auto goes on with it, or set another --out_dir")
    if cfg.resume not in ("never", "auto") or files:
        path = checkpoint.find(cfg.out_dir if cfg.resume == "auto" else cfg.resume)
        done = checkpoint.resume(path, run.raw, run.optimizer, run.scaler, run.corpus.tokenizer.hash)["step"]
    if done < max(files, default=0):
        raise UserError(f"{cfg.out_dir} holds step {max(files)}, later than {path}; set another --out_dir to go back")
    if run.world.sum([done]).item() != done * run.world.size:
        raise UserError(f"the ranks do not see the same checkpoints in {cfg.out_dir}; put it on a disk that all share")
    return done


def compare_settings(run, done):
    """config.json as it should be now, and a sentence on what changed since the run was started (or "").

    Raises UserError if the order of the data changed, or anything of a run that is finished: then it is another run.
    """
    cfg, path, old = run.cfg, Path(run.cfg.out_dir) / "config.json", {}
    new = dataclasses.asdict(cfg) | {"value_mode_name": mode_name(cfg.value_mode), "data": run.corpus.hash}
    new = json.loads(json.dumps(new))
    if done and path.exists():
        old = read_json(path, "the config of a run")
        if not isinstance(old, dict):
            raise UserError(f"{path} is not the config of a run; repair it or move it away")
    free = ("resume", "verify", "device", "compile", "log", "log_every", "keep", "out_dir", "data_dir", "save_every")
    free += ("recompute", "pad_vocab")
    changed = {k: old[k] for k in new if k not in free and k in old and old[k] != new[k]}
    what = ", ".join(f"{k} (was {str(v)[:40]})" for k, v in changed.items())
    if changed.keys() & {"seed", "batch_tokens", "data"} or (changed and done >= cfg.max_steps):
        raise UserError(f"{cfg.out_dir} was started with other settings: {what}; use them, or another --out_dir")
    return new, what and f"note: not what the run was started with: {what}"


def announce(run, done, metrics):
    """The start record, and the line that says what is about to run."""
    cfg, world, model = run.cfg, run.world, run.raw.cfg
    name, every, dtype = mode_name(model.value_mode), count_parameters(model)[0], str(run.dtype).removeprefix("torch.")
    record = {"event": "start", "step": done, "value_mode": name, "seed": cfg.seed, "parameters": every}
    record |= {"arch": cfg.arch, "block_size": cfg.block_size, "data": run.corpus.hash}
    record |= {"kv_bytes_per_token": 2 * kv_floats_per_token(model)}  # in bf16
    metrics.write(record | {"dtype": dtype, "device": world.kind, "ranks": world.size, "max_steps": cfg.max_steps})
    metrics.say(
        f"{name}: {every:,} parameters, {cfg.max_steps - done} steps of {cfg.batch_tokens:,} tokens = {world.size} x "
        f"{cfg.accumulation(world.size)} x {cfg.micro_batch} x {cfg.block_size}, {dtype} on {world.kind}"
    )


def compiled(run, say):
    """torch.compile of the model, warmed up, or the model itself, with a line that says why, where that fails."""
    cfg, world, raw = run.cfg, run.world, run.raw
    if not (world.kind == "cuda" if cfg.compile is None else cfg.compile):
        return raw
    start, reason = time.time(), None
    model = torch.compile(raw, dynamic=False, fullgraph=True)
    if world.kind == "cpu" and not any(map(shutil.which, ("g++", "clang++", "cl"))):
        reason = "there is no C++ compiler"
    else:
        try:
            idx = torch.zeros(cfg.micro_batch, cfg.block_size, dtype=torch.int64, device=world.device)
            with run.amp:
                loss = model(idx, idx.clone())[1]  # two tensors, as in training: aliases would be compiled for apart
            loss.backward()
        except Exception as e:  # a compiler's failure can be anything; it must not stop the run
            reason = f"{type(e).__name__}: {(str(e).strip() or '?').splitlines()[0]}"
        raw.zero_grad(set_to_none=True)
    if world.sum([reason is not None]).item():
        say(f"torch.compile does not work here ({reason or 'on another rank'}); going on without")
        return raw
    say(f"compiled in {time.time() - start:.0f} s")
    return model


def feed(run, done):
    """This rank's micro-batches from step `done` on, without end: x, y (micro_batch, block_size), and the seconds that
    was waited for them. A thread reads the next one while the model computes."""
    cfg, world = run.cfg, run.world
    accum, size = cfg.accumulation(world.size), cfg.batch_tokens // cfg.block_size
    places = (
        (step, (world.rank * accum + i) * cfg.micro_batch) for step in itertools.count(done) for i in range(accum)
    )

    def read(step, first):
        return world.pin_memory(run.corpus.batch(step, size, first, first + cfg.micro_batch))

    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(read, *next(places))
        while True:
            began, batch = time.perf_counter(), ahead.result()
            ahead = thread.submit(read, *next(places))
            x, y = world.to_device(batch)
            yield x, y, time.perf_counter() - began


def train_step(run, model, step, batches):
    """Steps the weights once; returns (mean loss over the global batch, gradient norm or None if fp16 overflowed,
    seconds that were waited for data). batches: see `feed`.

    Raises UserError before the weights change if the loss is not finite, or the norm without a scaler to skip the step.
    """
    cfg, world, scaler = run.cfg, run.world, run.scaler
    accum, total, waited = cfg.accumulation(world.size), torch.zeros((), device=world.device), 0.0
    run.optimizer.zero_grad(set_to_none=True)
    for i in range(accum):
        x, y, seconds = next(batches)
        waited += seconds
        if world.size > 1:
            model.require_backward_grad_sync = i == accum - 1  # must be set before the forward
        with run.amp:
            loss = model(x, y)[1]
        scaler.scale(loss / accum).backward()
        total += loss.detach()
    scaler.unscale_(run.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(run.raw.parameters(), cfg.grad_clip or math.inf).item()
    loss = world.sum([total.item() / accum]).item() / world.size
    if not math.isfinite(loss) or not (math.isfinite(norm) or scaler.is_enabled()):
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        raise UserError(f"step {step + 1}: the {what}; {EXPLODED}")
    scaler.step(run.optimizer)
    scaler.update()
    if scaler.is_enabled() and scaler.get_scale() < 2**-10:
        raise UserError(f"step {step + 1}: fp16 gradients overflow at any loss scale; use dtype=bfloat16")
    return loss, norm if math.isfinite(norm) else None, waited


@torch.no_grad()
def evaluate(run):
    """Validation on the first eval_tokens of each domain, the same windows whatever the number of ranks.

    Returns {val: {domain: nats per token}, val_mean: their plain mean (the paper's "Avg"), val_mixture: weighted by the
    mixture, bpb: {domain: bits per byte of text}, bpb_mean, and of modes with learned scalars lam, see mixing_weights}.
    """
    cfg, world, corpus = run.cfg, run.world, run.corpus
    n_bytes, jobs = corpus.tokenizer.token_bytes(), []
    for d, domain in enumerate(corpus.domains):
        n = corpus.windows("val", domain)
        n = min(n, max(1, cfg.eval_tokens // cfg.block_size)) if cfg.eval_tokens else n
        jobs += [(d, domain, i, min(n, i + cfg.micro_batch)) for i in range(0, n, cfg.micro_batch)]
    sums = np.zeros((len(corpus.domains), 3))  # nats, tokens, bytes
    for d, domain, first, last in jobs[world.rank :: world.size]:
        x, y = corpus.val_batch(domain, first, last)
        with run.amp:
            loss = run.raw(*world.to_device(world.pin_memory((x, y))))[1]
        sums[d] += loss.item() * y.size, y.size, n_bytes[y].sum()
    nats, tokens, n_bytes = world.sum(sums).numpy().T
    val = dict(zip(corpus.domains, (nats / tokens).tolist(), strict=True))
    bpb = dict(zip(corpus.domains, (nats / n_bytes / math.log(2)).tolist(), strict=True))
    mixed = sum(corpus.mixture[d] * loss for d, loss in val.items())
    mean = {"val_mean": sum(val.values()) / len(val), "val_mixture": mixed, "bpb_mean": sum(bpb.values()) / len(bpb)}
    learned = any(True for weights in run.raw.lambdas for _ in weights.parameters())
    return {"val": val, "bpb": bpb} | mean | ({"lam": run.raw.mixing_weights()} if learned else {})


class Stop:
    """Becomes true on SIGTERM or Ctrl-C, so that the step in hand is finished and saved; a second Ctrl-C kills."""

    def __init__(self):
        self.asked = False
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, self)

    def __call__(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def train(run):
    """The whole run: steps, evaluations, checkpoints."""
    cfg, world, out = run.cfg, run.world, Path(run.cfg.out_dir)
    done = start_point(run)
    config, note = compare_settings(run, done)
    if done >= cfg.max_steps:
        if world.rank == 0:
            print(f"{out} is already finished, at step {done}")
        return
    out.mkdir(parents=True, exist_ok=True)
    metrics, stop = Metrics(cfg, world, done), Stop()
    if world.rank == 0:
        checkpoint.clean(out)
        write_json(out / "config.json", config)
        write_json(out / "env.json", environment())
        run.corpus.tokenizer.save(out / "tokenizer.json")
    if note:
        metrics.say(note)
    announce(run, done, metrics)
    model = compiled(run, metrics.say)
    if world.size > 1:  # after compiling: one graph, and the gradients of all of it in DDP's buckets
        ids = [world.device.index] if world.kind == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    batches = feed(run, done)
    peak, flops = peak_flops(world.device, run.dtype), flops_per_token(run.raw.cfg)
    for step in range(done, cfg.max_steps):
        began, n = time.perf_counter(), step + 1
        lr = learning_rate(step, cfg.learning_rate, cfg.final_lr * cfg.learning_rate, cfg.warmup_steps, cfg.max_steps)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        loss, norm, waited = train_step(run, model, step, batches)
        seconds = time.perf_counter() - began
        rate = cfg.batch_tokens / seconds
        record = {
            "step": n,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": n * cfg.batch_tokens,
            "input_s": waited,
        }
        mfu = rate * flops / (peak * world.size) if peak else None
        metrics.step(record | {"seconds": seconds, "tokens_per_s": rate, "mfu": mfu})
        if step == done:
            metrics.say(f"first step done after {time.perf_counter() - world.started:.1f} s")
        last, val_loss = n == cfg.max_steps or world.sum([stop.asked]).item() > 0, None
        if n % cfg.eval_every == 0 or n == cfg.max_steps:
            val_loss = metrics.evaluation(n, evaluate(run))
        if world.rank == 0 and (n % cfg.save_every == 0 or last or val_loss is not None):
            tokenizer = run.corpus.tokenizer.hash
            checkpoint.save(cfg.out_dir, n, run.raw, tokenizer, val_loss, run.optimizer, run.scaler, cfg.keep)
        if last and n < cfg.max_steps:
            metrics.say(f"stopped and saved at step {n}; the same command with --resume=auto goes on")
            break
    metrics.close()


def main(cfg: TrainConfig):
    world = Distributed(cfg.device)
    train(build(cfg, world))
    world.close()


if __name__ == "__main__":
    run_main(main, command_line(TrainConfig, __doc__))
