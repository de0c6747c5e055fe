"""Train a model on prepared data, on one CPU or GPU, or on many with torchrun.

    python train.py config/tiny.py config/resformer.py               a laptop, a minute or two
    torchrun --nproc_per_node=8 train.py config/resformer.py         the paper's 82M recipe on 8 GPUs
    python train.py config/resformer.py --resume=auto                continue where the run stopped

Writes into out_dir: metrics.jsonl (a record for the start, for each step, for each evaluation, and for the end of a run
that diverged), config.json, env.json, tokenizer.json and checkpoints (see common/checkpoint.py). The story is in
`train`, at the bottom.
Read first: model.py. Read next: common/data.py.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from common import checkpoint, ranks
from common.data import Corpus
from common.files import hold, read_record, write_record
from common.optimizers import optimizer_state
from common.report import heard
from common.runs import RUN, Metrics, read_run
from common.scoring import domain_losses
from common.sizes import count_parameters, flops_per_token, mixing_weights, notes_of, refuse_too_large
from configurator import UserError, check_fields, run, setting
from model import GPT
from sample import generate
from value_modes import ModelConfig, ValueMode, get_mode, kv_floats_per_token

ENVIRONMENT = "train.py's environment"  # the kind of record in env.json
LR_START = 1e-7  # where the warmup begins, in the authors' scripts
# Settings that change no result beyond rounding: a resumed run may change them without a word, and compare.py compares
# runs that differ in them. A run may never change MUST_STAY, and may change the rest, with a note, until it has ended.
MAY_DIFFER = ("resume", "verify", "device", "compile", "log", "log_every", "keep", "out_dir", "data_dir", "save_every",
              "recompute", "shard", "micro_batch", "attn", "sample_every")  # fmt: skip
MUST_STAY = {"seed", "batch_tokens", "data", "bos", "init_from", "val_hash", "eval_tokens"}


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of train.py. The defaults are the paper's 82M recipe (Table 4)."""

    out_dir: str = setting("", "folder of the run; empty = out/<value_mode>", group="Run")
    resume: str = setting("never", "never, auto (the last checkpoint in out_dir, if any), or a checkpoint's path")
    init_from: str = setting("", "run, checkpoint or Hugging Face folder whose weights to start from, where they fit")
    seed: int = setting(42, "random seed for weights and data order", least=0)

    data_dir: str = setting("data/slimpajama", "folder made by prepare.py", group="Data")
    mixture: dict[str, float] = setting({}, "weights, as in {'C4': 0.5, …}; others are left out; empty = the data's")
    bos: bool = setting(False, "replace the first token of each sequence with end-of-text")
    verify: bool = setting(True, "at the start, check the data's sha256 against the manifest")

    value_mode: str | ValueMode = setting("vanilla", "a row of `python model.py table`, or a ValueMode", group="Model")
    block_size: int = setting(2048, "tokens per sequence", least=1)
    n_layer: int = setting(8, "layers")
    n_head: int = setting(8, "query heads")
    n_kv_head: int = setting(0, "key and value heads; 0 = what value_mode says, or n_head", least=0)
    n_embd: int = setting(512, "width of the residual stream")
    head_dim: int = setting(0, "width of a head; 0 = n_embd / n_head", least=0)
    n_hidden: int = setting(0, "width of the MLP; 0 = 3.5 n_embd (4 n_embd with arch=gpt2)", least=0)
    arch: Literal["llama", "gpt2"] = setting("llama", "RMSNorm, RoPE, SwiGLU; gpt2: LayerNorm, positions, GELU, biases")
    rope_theta: float = setting(10000.0, "base of the rotary angles", least=1)
    rope_scaling: tuple[float, ...] = setting((), "Llama 3.1's (factor, low, high, original); () = none")
    norm_eps: float = setting(1e-5, "what the norms add to the mean square", least=0, most=1)
    scaled_init: bool | None = setting(None, "divide output projections' spread by √(2 n_layer); none = only gpt2")

    batch_tokens: int = setting(2_097_152, "tokens per optimizer step, over all ranks", 1, 2**40, group="Optimization")
    micro_batch: int = setting(32, "at most this many sequences per rank and pass; the rest accumulates", least=1)
    max_steps: int = setting(10_000, "optimizer steps, the length of the schedule", least=1, most=10**9)
    warmup_steps: int = setting(120, "steps of linear warmup from 1e-7", least=0)
    learning_rate: float = setting(6e-4, "peak of the schedule", least=0, most=1e6)
    final_lr_ratio: float = setting(0.1, "end of the cosine, as a share of the peak", least=0)
    weight_decay: float = setting(0.1, "of matrices and embeddings; vectors and scalars have none", least=0)
    beta1: float = setting(0.9, "AdamW's first-moment decay", least=0, most=0.999999)
    beta2: float = setting(0.95, "AdamW's second-moment decay", least=0, most=0.999999)
    grad_clip: float = setting(1.0, "maximum norm of the gradients; 0 = no clipping", least=0)

    eval_every: int = setting(1000, "steps between evaluations; one more at the end", least=1, group="Records")
    eval_tokens: int = setting(1_048_576, "validation tokens of each domain, in whole windows; 0 = all", least=0)
    save_every: int = setting(1000, "steps between checkpoints; evaluated steps and the last are saved too", least=1)
    keep: int = setting(2, "checkpoints kept, besides the best; 0 = all", least=0)
    log_every: int = setting(10, "steps between lines on the screen; metrics.jsonl has every step", least=1)
    sample_every: int = setting(0, "steps between samples of 100 tokens on the screen; 0 = none", least=0)
    log: Literal["none", "wandb"] = setting("none", "wandb: send the metrics to Weights & Biases too")

    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "autocast's dtype; auto = bf16 if fast")
    compile: bool | None = setting(None, "torch.compile; none = on GPUs only")
    attn: Literal["sdpa", "flash", "eager"] = setting("sdpa", "attention kernel: torch's, flash-attn's, or plain")
    recompute: bool = setting(False, "activation checkpointing: less memory, more compute, the same numbers")
    shard: Literal["none", "zero2", "zero3"] = setting("none", "zero2: divide the optimizer state; zero3: weights, too")

    def __post_init__(self):
        check_fields(self)
        if self.resume not in ("never", "auto") and not os.path.exists(self.resume):
            raise UserError(f"resume={self.resume!r} does not exist; it takes never, auto or a checkpoint's path")
        if self.sample_every and self.shard != "none":
            raise UserError(f"sample_every needs unsharded weights: leave it at 0 with shard={self.shard}")
        object.__setattr__(self, "value_mode", get_mode(self.value_mode))
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.value_mode.name}")
        if self.resume == "never" and not self.init_from:  # else `with_shape` may still change it
            self.model_config(vocab_size=1)  # raises on an impossible shape, whatever the vocabulary

    def model_config(self, vocab_size):
        """The ModelConfig of these settings; raises ValueError on an impossible shape."""
        shared = [f.name for f in dataclasses.fields(ModelConfig) if f.name in self.__dataclass_fields__]
        return ModelConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in shared})

    def split_batch(self, n_ranks):
        """(sequences per forward pass, forward passes per step) of each rank. The first is the largest divisor of the
        rank's sequences up to micro_batch. Raises UserError if batch_tokens does not split over the ranks."""
        unit = self.block_size * n_ranks
        if self.batch_tokens % unit:
            nearest = unit * max(1, round(self.batch_tokens / unit))
            raise UserError(
                f"batch_tokens={self.batch_tokens} is not a multiple of {unit} = block_size={self.block_size} x "
                f"{n_ranks} ranks; set --batch_tokens={nearest}, or start a different number of ranks"
            )
        per_rank = self.batch_tokens // unit
        micro_batch = max(n for n in range(1, min(self.micro_batch, per_rank) + 1) if per_rank % n == 0)
        return micro_batch, per_rank // micro_batch


def with_shape(cfg):
    """Fill in every setting of the shape that is still at its default: from the Hugging Face folder that the run starts
    from or, when it is resumed, from the run's own config.json, because that folder may be gone."""
    before, shape = {}, {}
    if cfg.resume != "never":
        run = cfg.out_dir if cfg.resume == "auto" else checkpoint.find(cfg.resume).parent
        before = checkpoint.run_settings(run)
    if before.get("init_from"):
        shape = {name: before[name] for name in checkpoint.SHAPE if name in before}
    elif cfg.init_from:
        shape = checkpoint.shape_of(cfg.init_from)
        if shape:  # few machines could train on blocks as long as public models'
            shape["block_size"] = min(shape["block_size"], cfg.block_size)
    if cfg.value_mode.kv_group != 1:
        shape.pop("n_kv_head", None)  # the mode decides it
    is_open = {f.name: getattr(cfg, f.name) == f.default for f in dataclasses.fields(cfg)}
    return dataclasses.replace(cfg, **{name: value for name, value in shape.items() if is_open[name]})


def learning_rate(step, peak, end, warmup, steps):
    """Rate of step 0, 1, …: linear from 1e-7 to `peak` over `warmup` steps, then a cosine to `end` at `steps`. It may
    depend on the step alone, because a resumed run knows no more. Source: the authors' train.py."""
    # a small rate first, because AdamW's second moments are still noise
    if step < warmup:
        return LR_START + (peak - LR_START) * step / warmup
    share_done = (step - warmup) / (steps - warmup)
    return end + (peak - end) * (1 + math.cos(math.pi * share_done)) / 2


def adamw(model, lr, weight_decay, betas, device_type):
    """AdamW that decays parameters of two dimensions (embeddings, head and a Gate's, too), but not of one: norms,
    biases, mixing weights. A checkpoint holds the state of whatever optimizer this returns."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=device_type == "cuda")


class Stop:
    """After Ctrl-C, or a signal from a shell or batch system, the current step ends and is saved. Until then a second
    Ctrl-C ends the run at once, as `heard` arranges. After that nothing is left to lose, and Ctrl-C does nothing."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self)

    def __call__(self, number, frame):
        self.asked = True
        if number == signal.SIGINT:
            heard("saving after this step; Ctrl-C again quits without saving")

    def ignore(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def checkpoint_to_resume(cfg):
    """The weights file that the run continues from, or None. What would overwrite another run is refused."""
    # a folder holds one run: a new one may not begin beside it, nor replace the tokenizer of a folder of data
    files = list(checkpoint.steps(cfg.out_dir).values())
    config = Path(cfg.out_dir, "config.json")
    if not files and not config.exists() and config.with_name("tokenizer.json").exists():
        raise UserError(f"{cfg.out_dir} holds a tokenizer.json but no config.json: not a run; set another --out_dir")
    if cfg.resume == "never" and files:
        raise UserError(f"{cfg.out_dir} already holds a run; --resume=auto continues it, or set another --out_dir")
    if cfg.resume == "never" and Path(cfg.out_dir, "metrics.jsonl").exists() and read_run(cfg.out_dir).final_loss:
        remedy = "remove it, or set another --out_dir"
        raise UserError(f"{cfg.out_dir} has the records of a finished run, but not its weights; {remedy}")
    # with auto the run may have been killed before its first checkpoint: then it begins again
    if cfg.resume == "never" or (cfg.resume == "auto" and not files):
        return None
    path = checkpoint.find(cfg.out_dir if cfg.resume == "auto" else cfg.resume)
    if checkpoint.is_hf_file(path):
        raise UserError(f"{path} has no training state to resume; start from its weights with --init_from")
    if files and path.resolve() != files[-1].resolve():
        there = f"{cfg.out_dir} already holds {files[-1].name}"
        raise UserError(f"{there}, so it cannot continue from {path}; set another --out_dir")
    return path


def settings_of(cfg, corpus, path):
    """(config.json as it should be now, a note of the settings that changed since the run was last started, or "").

    path: the checkpoint that the run continues from, or None. What decides the initial weights, the data, its order or
    the evaluation must not change: MUST_STAY here (`data` hashes text and mixture), the shape in checkpoint.resume."""
    # this run's settings, as a file has them
    new = dataclasses.asdict(cfg)
    new["value_mode_name"] = new["value_mode"].pop("name")
    new |= {"data": corpus.hash, "val_hash": corpus.val_hash}
    new = json.loads(json.dumps(new))  # as it is read back
    old_path = Path(path.parent if path else cfg.out_dir, "config.json")
    old = read_record(old_path, RUN) if path or old_path.exists() else {}  # also refuses one that is not ours
    if not path:
        return new, ""
    # what has changed, and whether it may
    new["init_from"] = cfg.init_from or old.get("init_from", "")  # a resumed run need not name it again
    changed = [k for k in new if k in old and old[k] != new[k] and k not in MAY_DIFFER]
    shown = [k for k in changed if k != "value_mode" or "value_mode_name" not in changed]
    words = ", ".join(f"{k} (was {str(old[k])[:40] or 'empty'})" for k in shown)
    # in a finished run, nothing that changes results may change
    is_finished = checkpoint.read_header(path)["step"] >= cfg.max_steps
    if MUST_STAY.intersection(changed) or (changed and is_finished):
        remedy = "use them, or start anew in another --out_dir"
        raise UserError(f"{old_path.parent} was started with different settings: {words}; {remedy}")
    return new, f"note: changed since the run was last started: {words}" if words else ""


def compiled(model, cfg, world, autocast, is_sharded, say):
    """The model as torch.compile makes it, after a first forward and backward on zeros."""
    began, (micro_batch, _) = time.perf_counter(), cfg.split_batch(world.size)
    # a sharded model is compiled block by block, because no graph can gather what it reads
    if is_sharded:
        torch._dynamo.config.recompile_limit = max(8, model.cfg.n_layer)  # blocks share code, and may all differ
        for block in model.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
    net = model if is_sharded else torch.compile(model, dynamic=False, fullgraph=True)
    # compile on zeros of the shape of training, so that the first step of the run takes as long as the others
    try:
        idx = torch.zeros(micro_batch, cfg.block_size, dtype=torch.int64, device=world.device)
        with autocast():
            loss = net(idx, idx.clone())[1]  # two tensors, as in training: an alias would be another graph
        loss.backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # a compiler's failure can be anything
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"torch.compile does not work here ({why}); set --compile=false") from None
    # the zeros must leave no gradients behind
    model.zero_grad(set_to_none=True)
    say(f"compiled in {time.perf_counter() - began:.0f} s")
    return net


@torch.no_grad()
def validate(model, corpus, cfg, world, autocast, is_sharded):
    """Validation on the first whole windows within eval_tokens of each domain, at least one, or on all text; the same
    whatever the number of ranks. Returns what `domain_losses` does, and "lam", the `mixing_weights`, where some learn.
    """
    # the parts are the same on any number of ranks, and each of n ranks takes every n-th. All make equally many forward
    # passes, because in each pass they gather a sharded model's weights together
    most = max(1, cfg.eval_tokens // cfg.block_size) if cfg.eval_tokens else None
    parts = corpus.val_parts(cfg.micro_batch, most)
    n_bytes = corpus.tokenizer.token_bytes()
    sums = np.zeros((len(corpus.domains), 3))  # nats, tokens, bytes of text
    n_rounds = math.ceil(len(parts) / world.size)
    model.eval()
    for i in range(world.rank, n_rounds * world.size, world.size):
        d, first, last = parts[i % len(parts)]
        x, y = corpus.val_batch(corpus.domains[d], first, last)
        # `model` is not compiled; only a sharded model's blocks are, and only for the shape of training
        with autocast(), torch.compiler.set_stance("force_eager"):
            loss = model(*world.to_device((x, y)))[1]
        if i < len(parts):
            sums[d] += [loss.item() * y.size, y.size, n_bytes[y].sum()]
    model.train()
    # sums of nats and tokens, not means of batches: so the result is the same however the parts were cut
    result = domain_losses(corpus, world.sum(sums).numpy())
    # what the mixing weights have learned; a sharded model gathers them first
    if is_sharded:
        model.unshard()
    if list(model.mixing.parameters()):
        result["lam"] = mixing_weights(model)
    # a forward without a backward has left weights gathered
    if is_sharded:
        for module in (*model.blocks, model):
            module.reshard()
    return result


def end_diverged(metrics, step, why):
    """End a run whose step has failed, and record that. The caller has saved nothing of the step."""
    metrics.write({"event": "diverged", "step": step, "why": why})
    remedy = "this step was not saved; continue from an earlier checkpoint with a lower learning_rate"
    raise UserError(f"step {step}: {why}; {remedy}")


def check_finite(metrics, step, what, value):
    if not math.isfinite(value):
        end_diverged(metrics, step, f"the {what} is {value}")


def start(cfg, world, corpus, shape, dtype, config, done, notes):
    """Record what runs from step `done` on, and print it. Returns the Metrics, or None if nothing is left to do."""
    # a rank that reads another folder would train a different model. This also waits for all ranks
    if len(set(world.gather((done, corpus.hash, corpus.val_hash)))) > 1:
        raise UserError(f"the ranks see different files in {cfg.data_dir} or {cfg.out_dir}; put them on a shared disk")
    if world.rank == 0:
        checkpoint.prune(cfg.out_dir, keep=0)  # keeps all checkpoints, and deletes what a kill has left of one
    if done >= cfg.max_steps:
        if checkpoint.steps(cfg.out_dir) and read_run(cfg.out_dir).final_loss is None:
            remedy = f"delete step_{done:08d}.safetensors to repeat the steps since the one before, or the whole folder"
            raise UserError(f"{cfg.out_dir} has all its steps, but metrics.jsonl lacks the last evaluation; {remedy}")
        if world.rank == 0:
            print(f"nothing is left to train: {done} of {cfg.max_steps} steps are done")
        return None
    # the records go on after step `done`, on rank 0 only; from now on the folder says what made it
    metrics = Metrics(cfg, world, done)
    if world.rank == 0:
        write_record(Path(cfg.out_dir, "config.json"), RUN, config)
        write_record(Path(cfg.out_dir, "env.json"), ENVIRONMENT, ranks.environment())
        corpus.tokenizer.save(Path(cfg.out_dir, "tokenizer.json"))
    # then a record of the start, and a line on the screen
    micro_batch, accumulation = cfg.split_batch(world.size)
    settings = {name: value for name, value in config.items() if name not in MAY_DIFFER}
    # here "value_mode" is the name, which is "value_mode_name" in config.json
    name = settings.pop("value_mode_name")
    definition = settings.pop("value_mode")
    record = settings | {
        "event": "start",
        "step": done,
        "ranks": world.size,
        "device": world.kind,
        "wandb": metrics.wandb_id,
        "code": ranks.code_of_results(),
        "rounding": ranks.what_rounds(world),
        "value_mode": name,
        "definition": definition,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": count_parameters(shape),
        "kv_bytes_per_token": 2 * kv_floats_per_token(shape),  # in bf16
    }
    metrics.write(record)
    for line in filter(None, (*notes, *notes_of(cfg, corpus, world.size))):
        metrics.say(line)
    metrics.say(
        f"{record['value_mode']}: {record['parameters']:,} parameters, {cfg.max_steps - done} steps of "
        f"{world.size} ranks x {accumulation} x {micro_batch} sequences x {cfg.block_size} tokens, "
        f"{record['dtype']} on {world.kind}"
    )
    return metrics


def train(cfg, world):
    """The story of a run."""
    # ---- machine and data: how a step's sequences are divided into ranks and micro-batches
    dtype = ranks.pick_dtype(cfg.dtype, world.kind)
    if cfg.attn == "flash":
        ranks.need_flash_attn(world.kind, dtype)
    verify = cfg.verify and world.is_first_of_node
    corpus = Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, verify, cfg.bos)
    n_sequences = cfg.batch_tokens // cfg.block_size
    micro_batch, accumulation = cfg.split_batch(world.size)

    # ---- the model: from a seed, or with another run's weights
    torch.manual_seed(cfg.seed)  # for modes of yours that draw random numbers (dropout); checkpoints have its state
    shape = cfg.model_config(corpus.tokenizer.n_vocab)
    # on a CPU, gradients and AdamW's two moments need this memory too; for a GPU only the weights are made here
    bytes_per_parameter = 16 if world.kind == "cpu" else 4
    refuse_too_large("training this model", shape, bytes_per_parameter, "set a smaller --n_layer or --n_embd")
    model = GPT(shape, cfg.seed, cfg.attn, recompute=cfg.recompute)
    path = checkpoint_to_resume(cfg)
    config, note = settings_of(cfg, corpus, path)  # before any weights are read, refuses what may not change
    if cfg.init_from and not path:
        note = checkpoint.start_from(checkpoint.find(cfg.init_from), model, corpus.tokenizer.hash)
    # whole on the device (one process, or DDP), or divided among the ranks (FSDP2)
    is_sharded = cfg.shard != "none" and world.size > 1
    if is_sharded:
        world.shard(model, keep_gathered=cfg.shard == "zero2")
    else:
        model.to(world.device)
    # ---- optimizer, and a loss scaler for fp16
    optimizer = adamw(model, cfg.learning_rate, cfg.weight_decay, (cfg.beta1, cfg.beta2), world.kind)
    scaler = torch.amp.GradScaler(world.kind, enabled=dtype == torch.float16)
    # ---- a checkpoint restores all of it as it was after its step: weights, optimizer, scaler
    done, kept = checkpoint.resume(path, model, optimizer, scaler, corpus.tokenizer.hash) if path else (0, "")
    metrics = start(cfg, world, corpus, shape, dtype, config, done, (note, kept))
    if metrics is None:
        return

    def autocast():  # its cache would keep a copy of each weight, even of those gathered only for a moment
        return torch.autocast(world.kind, dtype, enabled=dtype != torch.float32, cache_enabled=not is_sharded)

    # ---- net is the same model, compiled and under DDP: it computes the loss. We clip, evaluate and save the model
    net = model
    wants_compile = world.kind == "cuda" if cfg.compile is None else cfg.compile
    if wants_compile:
        net = compiled(model, cfg, world, autocast, is_sharded, metrics.say)
    # DDP after compiling: one graph, and all its gradients in DDP's buckets
    if world.size > 1 and not is_sharded:
        device_ids = [world.device.index] if world.kind == "cuda" else None
        net = DistributedDataParallel(net, device_ids=device_ids, gradient_as_bucket_view=True)

    # ---- the loop
    peak = ranks.peak_flops(world.device, dtype)
    flops = flops_per_token(shape)
    final = cfg.final_lr_ratio * cfg.learning_rate
    is_checked = False  # whether the optimizer's state can be saved
    stop = Stop()
    for step in range(done, cfg.max_steps):
        n = step + 1
        began = time.perf_counter()
        input_s = 0.0
        lr = learning_rate(step, cfg.learning_rate, final, cfg.warmup_steps, cfg.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # gradients of this rank's micro-batches add up. No older ones may stay, because all count in the norm
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=world.device)
        for i in range(accumulation):
            # a batch is a function of (seed, step): a rank takes its rows, and a resumed run needs no data-loader state
            asked = time.perf_counter()
            first = (world.rank * accumulation + i) * micro_batch
            x, y = world.to_device(corpus.batch(step, n_sequences, first, first + micro_batch))  # (micro_batch, T)
            input_s += time.perf_counter() - asked
            # the ranks average their sums in the last backward. zero3 reduces after every micro-batch, because
            # unsharded gradients do not fit
            averages = i == accumulation - 1 or cfg.shard == "zero3"
            if is_sharded:
                model.set_requires_gradient_sync(averages)
                model.set_reshard_after_backward(averages)
            elif world.size > 1:
                net.require_backward_grad_sync = averages  # DDP reads this in the forward
            # forward and backward; the step's loss is the mean of its micro-batches
            with autocast():
                loss = net(x, y)[1]
            scaler.scale(loss / accumulation).backward()
            total += loss.detach()

        # clip and step; a scaler skips a step whose gradients overflow, and scales less from then on
        scaler.unscale_(optimizer)
        norm = ranks.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf))
        scaler.step(optimizer)
        scaler.update()
        if not is_checked:  # what no checkpoint can hold is refused now, not when it is saved
            optimizer_state(model, optimizer, is_main=False)
            is_checked = bool(optimizer.state)  # a scaler may have skipped the step
        # means over the ranks (the norm is the same on all). This is the step's first wait for the GPU
        total, norm = (world.sum(torch.stack((total, norm))) / world.size).tolist()
        # a step that failed is not saved
        check_finite(metrics, n, "loss", total)
        if not scaler.is_enabled():
            check_finite(metrics, n, "gradient norm", norm)
        elif scaler.get_scale() < 2**-10:
            end_diverged(metrics, n, "fp16 gradients overflow at every loss scale; bfloat16 ones would not")

        # record
        seconds = time.perf_counter() - began
        record = {"step": n, "loss": total / accumulation, "lr": lr, "grad_norm": norm if math.isfinite(norm) else None}
        record |= {"tokens": n * cfg.batch_tokens, "input_s": input_s, "seconds": seconds}
        rate = record["tokens_per_s"] = cfg.batch_tokens / seconds
        metrics.step(record | {"mfu": rate * flops / (peak * world.size) if peak else None})
        # evaluate now and then
        val_loss = None
        if n % cfg.eval_every == 0 or n == cfg.max_steps:
            result = validate(model, corpus, cfg, world, autocast, is_sharded)
            val_loss = result["val_mean"]
            check_finite(metrics, n, "validation loss", val_loss)
            metrics.evaluation(n, result)
        # a look at what it writes. It draws from a generator of its own, so the run stays the same
        if cfg.sample_every and n % cfg.sample_every == 0 and world.rank == 0:
            model.eval()
            (ids,), *_ = generate(model, [[corpus.tokenizer.start]], 100, seed=n, eot=corpus.tokenizer.end)
            model.train()
            metrics.say(f"step {n} writes: {corpus.tokenizer.decode(ids)!r}")
        # save: after a signal too, at the same step on all ranks, although it reaches them at different times.
        # What is evaluated is saved, so that the best checkpoint is there
        is_stopped = world.sum([stop.asked]).item() > 0
        if n % cfg.save_every == 0 or is_stopped or val_loss is not None:
            metrics.sync()
            vocabulary, is_main = corpus.tokenizer.hash, world.rank == 0
            checkpoint.save(cfg.out_dir, n, model, vocabulary, val_loss, optimizer, scaler, cfg.keep, is_main)
        if is_stopped and n < cfg.max_steps:
            stop.ignore()
            metrics.say(f"stopped and saved at step {n}; to continue, run the same command with --resume=auto")
            break
    metrics.close()


def main(cfg: TrainConfig):
    if cfg.init_from and not os.path.exists(cfg.init_from) and not checkpoint.steps(cfg.out_dir):
        raise UserError(f"init_from={cfg.init_from} does not exist; it takes a run, a checkpoint or a folder")
    cfg = with_shape(cfg)
    cfg.model_config(vocab_size=1)  # an impossible shape is refused before any data is read
    world = ranks.Distributed(cfg.device, fixed_lengths=True)
    remedy = "set a smaller --micro_batch, or --recompute=true, or on several GPUs --shard=zero2 or zero3"
    with ranks.enough_memory(remedy), hold(cfg.out_dir) if world.rank == 0 else contextlib.nullcontext():
        train(cfg, world)
    world.close()


if __name__ == "__main__":
    run(main, __doc__)
