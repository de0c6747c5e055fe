"""The one place where speed is claimed: our code against peers, on the same weights and data, in turn in one run.

    python bench.py eval out/vanilla --data_dir=evals --limit=200       documents/s against lm-eval's Hugging Face class
    python bench.py prepare --memory_megabytes=1000,10000               tokens/s of prepare.py against tiktoken, memory
    python bench.py load                                                tokens/s of batches against nanoGPT's way

Peers are packages (pip install -r requirements-peers.txt). Each round times ours and the peer's in changing order.
Reported are medians, and the median, least and greatest ratio of a round; results/bench_<what>_<machine>.json gets all.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
import configurator
import eval as ours
import hf
import prepare
import reading
import value_modes
from checkpoint import load_tokenizer
from configurator import UserError, command_line, run_main, setting
from data import EOT, Corpus, Tokenizer
from describe import count_parameters, flops_per_token
from files import read_json, write_json
from model import GPT
from runtime import Distributed, environment, peak_flops
from sample import generate
from train import adamw
from value_modes import ModelConfig, get_mode, kv_floats_per_token

DTYPES, SWITCH = ("float32", "bfloat16", "float16"), ("off", "on")
KINDS_OF_ATTENTION = ("sdpa", "eager", "flash")
SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "180M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
MICRO_BATCH = {  # sequences of 256 tokens on a CPU, of 2,048 on a GPU
    "cpu": {"tiny": 8, "82M": 4, "180M": 2, "468M": 1},
    "cuda": {"tiny": 64, "82M": 32, "180M": 16, "468M": 8},
}
LONG = 20e9  # tokens: the paper's training data
RIVALS = YARDSTICK, LLAMA, X, X_VALUE = (
    "GPT-2 block",
    "transformers' Llama",
    "x-transformers",
    "x-transformers with value residual",
)
CARDS = (24, 40, 80, 141)  # GB of memory of GPUs


@dataclass(frozen=True)
class BenchConfig:
    """Every setting of bench.py."""

    words: tuple[str, ...] = setting(
        (), "what to time (eval), then the vanilla run or checkpoint to time it on", positional=True
    )
    shape: tuple[str, ...] = setting(("tiny",), "of random models (all but eval): tiny, the demo's; 82M, 180M, 468M")
    block_size: int = setting(0, "tokens per sequence; 0 = 2,048 on a GPU, 256 on a CPU")
    micro_batch: int = setting(0, "sequences per step of training; 0 = the shape's own, see MICRO_BATCH")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes of ours, vanilla first")
    attn: tuple[str, ...] = setting(("sdpa",), "train, memory: attention of ours: sdpa, eager, flash; sdpa first")
    compile: tuple[str, ...] = setting(("off", "on"), "torch.compile: off, on, or both")
    recompute: tuple[str, ...] = setting(("off",), "memory: activation checkpointing of ours: off, on, or both")
    batch: tuple[int, ...] = setting((1, 8), "decode: rows")
    prompt: tuple[int, ...] = setting((32,), "decode: tokens of each prompt")
    new: int = setting(128, "decode: tokens to add to each")
    kv_gib: float = setting(10.0, "decode: memory for keys and values, of which to say how many rows fit")
    peers: bool = setting(False, "time rivals too, of which all but the first are in requirements-peers.txt")
    rivals: tuple[str, ...] = setting(RIVALS, "train, memory: which, with --peers")
    seconds: float = setting(2.0, "least time of a side's turn")
    clock: Literal["wall", "processor"] = setting(
        "wall", "train: processor = seconds of this process alone, for a busy CPU; set OMP_NUM_THREADS=1 with it"
    )
    task: tuple[str, ...] = setting(ours.TABLE1, "tasks, with commas")
    data_dir: str = setting("", "folder of local task files; empty = from the hub")
    limit: int = setting(200, "documents of each task, spread over all of it; 0 = all")
    rounds: int = setting(3, "times that each side runs")
    batch_tokens: int = setting(0, "eval.py's setting; 0 = its own choice")
    batch_sizes: tuple[int, ...] = setting((4, 16, 64), "the peer's to choose the fastest from, beside its default, 1")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    dtype: tuple[str, ...] = setting(("float32",), "float32, bfloat16, float16: of weights, in training of autocast")
    text: str = setting("", "prepare: file or folder of texts, as prepare.py's files; empty = the standard library's")
    megabytes: float = setting(0.0, "prepare: of text, repeated up to there, 0 = 300; load: of token files, 0 = 1,000")
    memory_megabytes: tuple[float, ...] = setting((), "prepare: longer inputs, on which its memory is measured")
    tokenizer: str = setting("bpe:4096", "prepare: bpe:<vocabulary size>, gpt2 or neox")
    tokenizer_file: str = setting("", "prepare: see prepare.py --help; neox needs it, for the peer reads it too")
    out_file: str = setting("", "JSON to write; empty = results/bench_<what>_<machine>.json")

    def __post_init__(self):
        if not self.words or self.words[0] not in KINDS:
            raise ValueError(f"say what to time, one of {', '.join(KINDS)}: python bench.py eval out/vanilla")
        if len(self.words) != 1 + (self.words[0] == "eval"):
            raise ValueError("`bench.py eval` wants one run or checkpoint of mode vanilla, all others none")
        if self.rounds < 1 or self.limit < 0 or min(self.batch_sizes, default=0) < 1 or not self.seconds > 0:
            raise ValueError("rounds and batch_sizes must be at least 1, limit at least 0, seconds above 0")
        if min(self.block_size, self.micro_batch) < 0:
            raise ValueError("block_size and micro_batch must be at least 0")
        if self.clock == "processor" and self.words[0] != "train":
            raise ValueError("clock=processor is for `bench.py train`; the others go by the wall clock")
        for name, known in (
            ("shape", SHAPES),
            ("dtype", DTYPES),
            ("compile", SWITCH),
            ("recompute", SWITCH),
            ("rivals", RIVALS),
            ("attn", KINDS_OF_ATTENTION),
        ):
            if not getattr(self, name) or not set(getattr(self, name)) <= set(known):
                raise ValueError(f"{name} must be some of {', '.join(known)}, with commas")
        if min(*self.batch, *self.prompt, self.new - 1) < 1 or not self.kv_gib > 0:
            raise ValueError("batch and prompt must be at least 1, new at least 2, kv_gib above 0")
        if self.modes[:1] != ("vanilla",) or self.attn[:1] != ("sdpa",):
            raise ValueError("modes must begin with vanilla and attn with sdpa, which the others are compared with")
        for mode in self.modes:
            get_mode(mode)
        if not 0 <= self.megabytes < math.inf or not all(0 < m < math.inf for m in self.memory_megabytes):
            raise ValueError("megabytes must be at least 0 and memory_megabytes above 0")
        if self.words[0] == "prepare" and self.preparation().tokenizer == "neox" and not self.tokenizer_file:
            raise ValueError("neox needs --tokenizer_file=<GPT-NeoX's tokenizer.json>, for the peer reads it too")
        if self.words[0] == "eval" and "loss" in self.evaluation().task:
            raise ValueError("loss is no task of the harness; name some of " + ", ".join(ours.TASKS))

    @property
    def now(self):
        """The clock, a function of the device."""
        return clock if self.clock == "wall" else lambda device: time.process_time()

    def preparation(self, source="files", input_dir="text", **where):
        """Settings of prepare.py, all text being train text; raises ValueError if they are none."""
        names = dict(tokenizer=self.tokenizer, tokenizer_file=self.tokenizer_file)
        return prepare.PrepareConfig(source, input_dir=input_dir, val_fraction=0.0, **names, **where)

    def evaluation(self):
        """The same as settings of eval.py; raises ValueError if they are none."""
        names = ("task", "data_dir", "batch_tokens")
        return ours.EvalConfig(**{name: getattr(self, name) for name in names}, dtype=self.dtype[0])


def machine(device):
    """Name of what computes here, for a file's name: the GPU's, or the processor's and how many of its cores."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
        name = f"{found[1] if found else platform.processor() or platform.machine()} x{torch.get_num_threads()}"
    return re.sub(r"\W+", "_", re.sub(r"\((R|TM)\)|CPU|Processor", "", name)).strip("_").lower()


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(function, device):
    """Seconds that a function takes."""
    start = clock(device)
    function()
    return clock(device) - start


def in_turn(sides, rounds, device, now=clock):
    """{name: seconds of each round} of functions, in an order that turns around from round to round, and {name: what it
    returned last}."""
    seconds, results = {name: [] for name in sides}, {}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            start = now(device)
            results[name] = sides[name]()
            seconds[name].append(now(device) - start)
    return seconds, results


def ratio(seconds, of, to):
    """How many times as fast `of` is as `to`: median, least and greatest of the rounds."""
    found = [b / a for a, b in zip(seconds[of], seconds[to], strict=True)]
    return {"ratio": statistics.median(found), "least": min(found), "greatest": max(found)}


class Plain(nn.Module):
    """A yardstick: GPT-2's block as most small repositories write it (LayerNorm, fused q k v, GELU MLP of 4 C, learned
    positions, the head's weights those of the embedding) and torch's own cross-entropy. idx, target (B, T) -> loss."""

    def __init__(self, n_layer, n_head, n_embd, vocab_size, block_size):
        super().__init__()
        self.n_head, C = n_head, n_embd
        self.embed, self.positions = nn.Embedding(vocab_size, C), nn.Embedding(block_size, C)
        self.blocks, self.norm = nn.ModuleList(self.block(C) for _ in range(n_layer)), nn.LayerNorm(C)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    @staticmethod
    def block(C):
        parts = {"norm1": nn.LayerNorm(C), "qkv": nn.Linear(C, 3 * C, bias=False), "out": nn.Linear(C, C, bias=False)}
        parts |= {"norm2": nn.LayerNorm(C), "up": nn.Linear(C, 4 * C, bias=False)}
        return nn.ModuleDict(parts | {"down": nn.Linear(4 * C, C, bias=False)})

    def forward(self, idx, target):
        B, T = idx.shape
        x = self.embed(idx) + self.positions.weight[:T]
        for b in self.blocks:
            qkv = b["qkv"](b["norm1"](x)).view(B, T, 3, self.n_head, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
            x = x + b["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + b["down"](F.gelu(b["up"](b["norm2"](x))))
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def spread(found):
    """A ratio as text: its median (least–greatest)."""
    return f"{found['ratio']:.2f} ({found['least']:.2f}–{found['greatest']:.2f})"


def as_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a vanilla model of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = model.cfg
    if cfg.arch != "llama" or value_modes.mode_name(cfg.value_mode) != "vanilla":
        raise UserError("the peer is Hugging Face's Llama: give a vanilla run of arch=llama")
    llama = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_hidden,
        num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head,
        max_position_embeddings=cfg.block_size,
        rms_norm_eps=cfg.norm_eps,
        rope_theta=cfg.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    peer = LlamaForCausalLM(llama).to(model.head.weight)
    weights = {name: parameter[rows].detach() for name, parameter, rows in hf.hf_parts(model)}
    missing, extra = peer.load_state_dict(weights, strict=False)
    assert not extra and all("rotary" in name for name in missing), (missing, extra)
    return peer.eval()


def as_x_transformers(model, value_residual):
    """x-transformers' decoder of the shape of a model of ours, RMSNorm, SwiGLU and full rotary positions too."""
    from x_transformers import Decoder, TransformerWrapper

    cfg = model.cfg
    layers = Decoder(
        dim=cfg.n_embd,
        depth=cfg.n_layer,
        heads=cfg.n_head,
        attn_dim_head=cfg.head_dim,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=cfg.head_dim,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=cfg.n_hidden / cfg.n_embd,
        add_value_residual=value_residual,
    )
    return TransformerWrapper(
        num_tokens=cfg.vocab_size, max_seq_len=cfg.block_size, attn_layers=layers, use_abs_pos_emb=False
    )


def names(cfg):
    """The contenders in training: our modes, with each kind of attention, the yardstick and the peers."""
    ours = [mode + f", attn={kind}" * (kind != "sdpa") for kind in cfg.attn for mode in cfg.modes]
    return [*ours, *cfg.rivals * cfg.peers]


def contender(name, shape, block_size, device, recompute=False):
    """(model, its loss as a function (model, idx, target) -> scalar) of one of `names`. Raises UserError if its package
    is not installed."""
    shape = dict(SHAPES[shape], block_size=block_size)
    if name == YARDSTICK:
        return Plain(**shape).to(device), lambda model, idx, target: model(idx, target)
    if name not in RIVALS:
        (mode, _, kind), pad = name.partition(", attn="), 64 if device.type == "cuda" else 1
        model = GPT(ModelConfig(**shape, value_mode=mode), attn=kind or "sdpa", recompute=recompute, pad_vocab=pad)
        return model.to(device), lambda model, idx, target: model(idx, target)[1]
    vanilla = GPT(ModelConfig(**shape)).to(device)
    try:
        if name == LLAMA:
            return as_llama(vanilla), lambda model, i, t: model(input_ids=i, labels=t, shift_labels=t).loss
        peer = as_x_transformers(vanilla, value_residual=name == X_VALUE).to(device)
        return peer, lambda model, i, t: F.cross_entropy(model(i).flatten(0, 1).float(), t.flatten())
    except ImportError:
        raise UserError("a peer is missing: pip install -r requirements-peers.txt") from None


def trainer(model, loss, batch, dtype, optimizer):
    """A function that does n training steps on one batch: autocast, gradients clipped to 1, AdamW."""
    kind, idx, target = batch[0].device.type, *batch
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    parameters = list(optimizer.param_groups[0]["params"] + optimizer.param_groups[1]["params"])

    def steps(n):
        for _ in range(n):
            with torch.autocast(kind, dtype, enabled=dtype != torch.float32):
                value = loss(model, idx, target)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return steps


def bench_train(cfg, world):
    """Tokens per second of training steps, all sides of a shape in turn, each on the same batch of random tokens."""
    if cfg.clock == "processor" and world.kind != "cpu":
        raise UserError("clock=processor is for a CPU; a GPU computes while its process waits: use clock=wall")
    rows = []
    with torch._dynamo.config.patch(recompile_limit=1000):  # one forward pass, many models
        for shape in cfg.shape:
            rows += (found := train_shape(cfg, shape, world.device))
            print("\n".join(["", *training_table(found)]), flush=True)
    return {"clock": cfg.clock, "rows": rows}


def train_shape(cfg, shape, device):
    """The rows of one shape: one for each contender, dtype and compile."""
    T = cfg.block_size or (2048 if device.type == "cuda" else 256)
    B = cfg.micro_batch or MICRO_BATCH[device.type][shape]
    tokens = torch.randint(SHAPES[shape]["vocab_size"], (B, T + 1), generator=torch.Generator().manual_seed(0))
    batch = [part.contiguous().to(device) for part in (tokens[:, :-1], tokens[:, 1:])]  # (B, T) each
    sides, rows = training_sides(cfg, shape, T, batch, device)
    seconds, _ = in_turn(sides, cfg.rounds, device, cfg.now)
    seconds = {side: [s / rows[side]["steps"] for s in times] for side, times in seconds.items()}  # of a step
    for (name, dtype, compiled), row in rows.items():
        mine, flops, peak = (
            seconds[name, dtype, compiled],
            row["flops_per_token"],
            peak_flops(device, getattr(torch, dtype)),
        )
        row |= {"seconds": mine, "tokens_per_s": B * T / statistics.median(mine)}
        row["to_vanilla"] = ratio(seconds, (name, dtype, compiled), ("vanilla", dtype, compiled))
        for peer in (peer for peer in names(cfg) if peer in RIVALS):
            row[f"to {peer}"] = ratio(seconds, (name, dtype, compiled), (peer, dtype, compiled))
            if (peer, "float32", "off") in seconds:
                row[f"to {peer}, fp32, eager"] = ratio(seconds, (name, dtype, compiled), (peer, "float32", "off"))
        row["computed"] = rows["vanilla", dtype, compiled]["flops_per_token"] / flops if flops else None
        row["mfu"] = row["tokens_per_s"] * flops / peak if peak and flops else None
    return list(rows.values())


def training_sides(cfg, shape, T, batch, device):
    """({(name, dtype, compile): a function that does some steps}, {the same: what is known of it before it is timed}),
    compiled and warm. Raises UserError if vanilla's loss is not that of the peer with the same weights."""
    sides, rows, losses = {}, {}, {}
    for name in names(cfg):
        model, loss = contender(name, shape, T, device)
        optimizer = adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)
        with torch.no_grad():
            losses[name] = loss(model, *batch).item()
        about = {"shape": shape, "name": name, "tokens": batch[0].numel(), "flops_per_token": flops_of(model, T)}
        about["parameters"] = sum(p.numel() for p in model.parameters())
        for dtype, compiled in itertools.product(cfg.dtype, cfg.compile):
            runs = model
            if compiled == "on":
                runs = torch.compile(model, dynamic=False, fullgraph=isinstance(model, GPT))
            steps = trainer(runs, loss, batch, getattr(torch, dtype), optimizer)
            first, *took = (timed(functools.partial(steps, 1), device) for _ in range(3))
            say = f"{shape}, {name}, {dtype}, compile {compiled}: first step {first:.1f} s, then {min(took):.3f} s"
            print(say, file=sys.stderr, flush=True)
            n = max(1, math.ceil(cfg.seconds / min(took)))
            sides[name, dtype, compiled] = functools.partial(steps, n)
            rows[name, dtype, compiled] = about | {
                "dtype": dtype,
                "compile": compiled,
                "first_step_s": first,
                "steps": n,
            }
    if LLAMA in losses and not abs(losses["vanilla"] - losses[LLAMA]) < 1e-3:
        raise UserError(f"the losses of vanilla and {LLAMA} differ, {losses}: not the same work")
    return sides, rows


def flops_of(model, T):
    """Training FLOPs per token of ours and of the yardstick (as model.flops_per_token counts); None of packages."""
    if isinstance(model, GPT):
        return flops_per_token(model.cfg)
    if isinstance(model, Plain):
        matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.positions.weight.numel()
        return 6 * matrices + 12 * len(model.blocks) * model.embed.embedding_dim * T
    return None


def training_table(rows):
    """The lines of a table: tokens/s by contender and way to run it, and in brackets the share of vanilla's, median,
    least and greatest of a round, beside what the FLOPs alone would make of it."""
    ways = list(dict.fromkeys((row["dtype"], row["compile"]) for row in rows))
    heads = [f"{dtype}, compiled" if compiled == "on" else dtype for dtype, compiled in ways]
    mfu = any(row["mfu"] for row in rows)
    heads = [rows[0]["shape"], "parameters", *heads, "computed", *["of the peak"] * mfu]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        cells = [name, f"{mine[0]['parameters']:,}"]
        for row in mine:
            share = f" = {spread(row['to_vanilla'])}" if name != "vanilla" else ""
            cells.append(f"{row['tokens_per_s']:,.0f}{share}")
        cells.append(f"{mine[0]['computed']:.3f}" if mine[0]["computed"] else "")
        cells += [", ".join(f"{row['mfu']:.1%}" for row in mine if row["mfu"])] * mfu
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def bench_memory(cfg, world):
    """Peak memory of training steps, each in a process of its own: at a quarter, a half and all of the micro-batch. The
    line through the first two says what the third should be, and what fits on cards of other sizes."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")  # on a CPU what is freed leaves the process at once
    rows = []
    print(
        "| shape | | dtype | compile | recompute | micro-batch x length | peak, GB | by the line | GB + kB per token |"
    )
    print("|---|---|---|---|---|---:|---:|---:|---:|")
    for shape, name, dtype, compiled in itertools.product(cfg.shape, names(cfg), cfg.dtype, cfg.compile):
        for recompute in cfg.recompute if name not in RIVALS else ("off",):
            rows.append(memory_row(cfg, world.device, shape, name, dtype, compiled, recompute))
    show_cards(rows)
    return {"cards_gb": CARDS, "rows": rows}


def memory_row(cfg, device, *how):
    """What one contender takes. Peaks are linear in the tokens: attention is fused, the logits come in chunks."""
    shape, T = how[0], cfg.block_size or 2048
    most = max(4, cfg.micro_batch or MICRO_BATCH[device.type][shape])
    sizes = [most // 4, most // 2, most]
    spawn = multiprocessing.get_context("spawn")
    peaks = []
    for B in sizes:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            peaks.append(process.submit(training_peak, str(device), B, T, *how).result())
    per_token = (peaks[1] - peaks[0]) / ((sizes[1] - sizes[0]) * T)
    fixed = peaks[0] - per_token * sizes[0] * T
    line = fixed + per_token * sizes[2] * T
    row = dict(zip(("shape", "name", "dtype", "compile", "recompute"), how, strict=True), length=T)
    row |= {"peaks": dict(zip(sizes, peaks, strict=True)), "predicted": line, "off_by": line / peaks[2] - 1}
    row |= {"fixed": fixed, "per_token": per_token}
    row["fits"] = {n: {gb: max(0, int((gb * 1e9 - fixed) / per_token / n)) for gb in CARDS} for n in (T, 64_000)}
    cells = [*how, f"{sizes[2]} x {T:,}", f"{peaks[2] / 1e9:.2f}", f"{line / 1e9:.2f} ({row['off_by']:+.1%})"]
    print("| " + " | ".join(cells) + f" | {fixed / 1e9:.2f} + {per_token / 1e3:.0f} |", flush=True)
    return row


def training_peak(device, B, T, shape, name, dtype, compiled, recompute):
    """The most bytes that two steps, each of two micro-batches, take beyond what the process has before the model."""
    device, dtype = torch.device(device), getattr(torch, dtype)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    model, loss = contender(name, shape, T, device, recompute == "on")
    optimizer = adamw(model, 6e-4, 0.1, (0.9, 0.95), device.type)
    idx = torch.randint(SHAPES[shape]["vocab_size"], (B, T), device=device)
    runs = torch.compile(model, dynamic=False, fullgraph=isinstance(model, GPT)) if compiled == "on" else model
    for _ in range(2):
        for _ in range(2):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                value = loss(runs, idx, idx)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def show_cards(rows):
    """The largest micro-batch that fits by each row's line, if a card gave all of its memory."""
    lengths = list(rows[0]["fits"])
    heads = " | ".join(f"{gb} GB, length {n:,}" for n in lengths for gb in CARDS)
    print(f"\nLargest micro-batch by the line:\n\n| shape | | dtype | compile | recompute | {heads} |")
    print("|---|---|---|---|---|" + "---:|" * len(lengths) * len(CARDS))
    for row in rows:
        cells = [row[key] for key in ("shape", "name", "dtype", "compile", "recompute")]
        print("| " + " | ".join(cells + [str(row["fits"][n][gb]) for n in lengths for gb in CARDS]) + " |")


GPU_PLAN = {  # what `bench.py gpu` runs, one after the other
    "82M": "train --shape=82M --modes=vanilla,resformer,svformer,neutreno,denseformer,cross --peers",
    "180M": "train --shape=180M --modes=vanilla,resformer,svformer,denseformer",
    "468M": "train --shape=468M --modes=vanilla,resformer,svformer,denseformer --peers",
    "fp16": "train --shape=82M --modes=vanilla --dtype=bfloat16,float16",
    "memory": "memory --shape=82M --modes=vanilla --peers",
    "decode": "decode --shape=468M --modes=vanilla,svformer --batch=1,8 --prompt=1024 --peers",
    "small": "decode --shape=82M --modes=vanilla,svformer --batch=1 --prompt=1024 --peers",
}


def targets(found):
    """(what, least, measured or None) of the targets for a GPU. found: {name in GPU_PLAN: the JSON of that run}."""

    def row(of, name, **more):
        rows = found.get(of, {}).get("rows", ())
        return next((r for r in rows if r["name"] == name and more.items() <= r.items()), {})

    def times(of, to):
        return of / to if of and to else None

    def share(found):
        return (found or {}).get("ratio")

    for shape, least in (("82M", 0.42), ("468M", 0.5)):
        yield f"share of the peak, {shape}, bf16", least, row(shape, "vanilla").get("mfu")
        yield f"tokens/s to compiled Llama's, {shape}", 1.3, share(row(shape, "vanilla").get(f"to {LLAMA}"))
    bars = {"resformer": (0.98,) * 3, "svformer": (1.015, 1.025, 1.035), "denseformer": (0.95, 0.94, 0.9)}
    for (mode, least), (i, shape) in itertools.product(bars.items(), enumerate(("82M", "180M", "468M"))):
        yield f"{mode} to vanilla, {shape}", least[i], share(row(shape, mode).get("to_vanilla"))
    yield "neutreno to vanilla, 82M", 0.96, share(row("82M", "neutreno").get("to_vanilla"))
    half, full = (row("fp16", "vanilla", dtype=dtype).get("tokens_per_s") for dtype in ("float16", "bfloat16"))
    yield "fp16 to bf16, 82M", 0.95, times(half, full)
    ours, theirs = (max(row("memory", name).get("peaks", {"": 0}).values()) for name in ("vanilla", LLAMA))
    yield "Llama's peak memory to ours, 82M", 2.0, times(theirs, ours)
    eight = row("decode", "vanilla", batch=8)
    yield "decoding to the copy rate, 468M, batch 8", 0.7, eight.get("of_copy_rate", {}).get("most")
    for kind, least in (("dynamic", 3.0), ("static", 1.0)):
        measured = share(eight.get(f"to {LLAMA}, {kind}", {}).get("decode"))
        yield f"decoding to generate's with a {kind} cache, 468M, batch 8", least, measured


def bench_gpu(cfg, world):
    """All targets for a GPU in one call of under ten minutes: the runs of GPU_PLAN, each in a process of its own, after
    the training ones have filled the compiler's cache side by side. On a CPU the same at the shapes of --shape, which
    proves that it runs; its figures are no targets'."""
    small = world.kind != "cuda"
    with tempfile.TemporaryDirectory() as folder:

        def command(name, *more):
            shape = [f"--shape={cfg.shape[0]}"] * small
            common = ["--compile=on", f"--rounds={cfg.rounds}", f"--seconds={cfg.seconds}", f"--device={world.device}"]
            common += [f"--rivals={YARDSTICK},{LLAMA}", "--dtype=bfloat16", f"--out_file={folder}/{name}.json"]
            kind, *words = GPU_PLAN[name].split()
            return [sys.executable, __file__, kind, *common, *words, *shape, *more]

        if not small:
            quick = ["--rounds=1", "--seconds=0.01"]
            training = [name for name in GPU_PLAN if GPU_PLAN[name].startswith("train")]
            for process in [subprocess.Popen(command(name, *quick), stdout=subprocess.DEVNULL) for name in training]:
                process.wait()
        found = {}
        for name in GPU_PLAN:
            print(f"\n{name}: {GPU_PLAN[name]}", flush=True)
            if subprocess.call(command(name)):
                print(f"{name} failed; its targets are not measured")
            else:
                found[name] = read_json(f"{folder}/{name}.json", "what bench.py wrote")
    rows = []
    print("\n| target | least | measured | |\n|---|---:|---:|---|")
    for what, least, measured in targets(found):
        rows.append({"target": what, "least": least, "measured": measured})
        verdict = "" if small or measured is None else "met" if measured >= least else "missed"
        print(f"| {what} | {least} | {'' if measured is None else f'{measured:.3f}'} | {verdict} |")
    return {"targets": rows, "runs": found}


def harness_class(model, tokenizer, batch_size):
    """lm-eval's Hugging Face model class on the same weights. Its tokenizer is ours, which is the faster one."""
    from lm_eval.models.huggingface import HFLM

    class Peer(HFLM):
        def _create_tokenizer(self, *args, **kw):
            self.tokenizer = type("Tokenizer", (), {})()
            self.tokenizer.vocab_size, self.tokenizer.name_or_path = model.cfg.vocab_size, tokenizer.name
            for name in ("pad", "eos", "bos"):
                setattr(self.tokenizer, f"{name}_token_id", tokenizer.eot)
                setattr(self.tokenizer, f"{name}_token", "<|endoftext|>")
            self.tokenizer.chat_template = None

        def tok_encode(self, string, *args, **kw):
            return tokenizer.encode(string)

    llama = as_llama(model, tokenizer.eot)
    return Peer(llama, backend="causal", batch_size=batch_size, max_length=model.cfg.block_size)


def best_batch_size(lm, requests, sizes, device):
    """The peer's fastest batch size, on a part of the requests, spread over all of them."""
    part, times = requests[:: max(1, len(requests) // 64)], {}
    for size in sizes:
        lm.batch_size_per_gpu = size
        lm.loglikelihood(part[:size], disable_tqdm=True)  # warm
        start = clock(device)
        lm.loglikelihood(part, disable_tqdm=True)
        times[size] = clock(device) - start
    return min(times, key=times.get)


def bench_eval(cfg, world):
    """Documents per second from texts to scores: tokens, forward passes, sums. Raises UserError if scores differ."""
    try:
        from lm_eval.api.instance import Instance
    except ImportError:
        raise UserError("the peer is missing: pip install -r requirements-peers.txt") from None
    path, about = checkpoint.find(cfg.words[1]), cfg.evaluation()
    tokenizer, model = load_tokenizer(path), checkpoint.load(path, device=world.device)
    model = model.to(getattr(torch, about.dtype))
    lm, rows = harness_class(model, tokenizer, 1), []
    print(
        "| task | documents | eval.py, documents/s | HFLM, batch 1 | ratio | HFLM, best batch | ratio | largest gap |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in about.task:
        asked, where = ours.questions(name, about)
        asked = asked[:: max(1, len(asked) // cfg.limit)][: cfg.limit] if cfg.limit else asked
        pairs = [(c, q.delimiter + choice) for q in asked for c, choice in zip(q.contexts, q.choices, strict=True)]
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        best = best_batch_size(lm, requests, cfg.batch_sizes, world.device)

        def mine(asked=asked, name=name):
            documents = ours.rows_of(name, asked, tokenizer, model.cfg.block_size)
            done = [pair for part in ours.score(model, documents, about.tokens_per_pass(world)) for pair in part]
            return [s for _, scores in sorted(done) for s in scores]

        def theirs(size, requests=requests):
            lm.batch_size_per_gpu = size
            return lm.loglikelihood(requests, disable_tqdm=True)

        sides = {"eval.py": mine, "HFLM 1": lambda run=theirs: run(1), "HFLM": lambda run=theirs, n=best: run(n)}
        seconds, found = in_turn(sides, cfg.rounds, world.device)
        gap = max(abs(a[0] - b[0]) for a, b in zip(found["eval.py"], found["HFLM"], strict=True))
        if about.dtype == "float32" and not gap < 1e-3:
            raise UserError(f"{name}: the two sides' scores differ by {gap}, which is no rounding: nothing to compare")
        row = {"task": name, "documents": len(asked), "data": where, "batch_size": best, "largest_gap": gap}
        row |= {"seconds": seconds, "to_batch_1": ratio(seconds, "eval.py", "HFLM 1")}
        rows.append(row | {"to_best": ratio(seconds, "eval.py", "HFLM")})
        print(line(rows[-1]), flush=True)
    shape = {k: v for k, v in model.cfg.to_dict().items() if k != "value_mode"}
    return {"shape": shape, "dtype": about.dtype, "batch_tokens": about.tokens_per_pass(world), "tasks": rows}


def line(row):
    """A row of bench_eval's table."""
    rate = {side: f"{row['documents'] / statistics.median(times):,.1f}" for side, times in row["seconds"].items()}
    one, best = spread(row["to_batch_1"]), spread(row["to_best"])
    cells = [row["task"], f"{row['documents']:,}", rate["eval.py"], rate["HFLM 1"], one]
    cells += [f"{rate['HFLM']} ({row['batch_size']})", best, f"{row['largest_gap']:.0e}"]
    return "| " + " | ".join(cells) + " |"


def copy_rate(device, megabytes=256):
    """Bytes per second that a copy reads and writes: the best of five, which is what memory can do."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def our_decoder(model, ids, new, compiled):
    """A function that continues each of ids -> ids of the new tokens, bytes of the cache, seconds by part."""

    def decode():
        rows, cache, seconds = generate(model, ids, new, temperature=0, compile=compiled)
        return rows, cache.nbytes, seconds

    return decode


def peers_decoder(peer, ids, new, device, **how):
    """The same with transformers' generate. Its prefill is timed as that of one token."""
    idx = torch.tensor(ids, device=device)  # (B, T)
    peer.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(n):
        about = dict(attention_mask=torch.ones_like(idx), do_sample=False, pad_token_id=0, max_new_tokens=n)
        return peer.generate(idx, **about, **how)[:, idx.size(1) :]

    def decode():
        prefill, start = timed(lambda: run(1), device), clock(device)
        rows = run(new)
        return rows.tolist(), None, {"prefill": prefill, "decode": clock(device) - start - prefill}

    return decode


def decoders(cfg, shape, dtype, B, T, device):
    """{(name, compile): (a decoder, its model's ModelConfig or None)}, our vanilla model, and the prompts, B of T."""
    ids = torch.randint(SHAPES[shape]["vocab_size"], (B, T), generator=torch.Generator().manual_seed(0)).tolist()
    sides, vanilla = {}, None
    for mode in cfg.modes:
        model = GPT(ModelConfig(**SHAPES[shape], block_size=T + cfg.new, value_mode=mode)).eval()
        model = model.to(device, getattr(torch, dtype))
        vanilla = vanilla or model
        for how in cfg.compile:
            sides[mode, how] = our_decoder(model, ids, cfg.new, how == "on"), model.cfg
    if cfg.peers:
        for kind in ("dynamic", "static"):
            how = {"cache_implementation": "static"} if kind == "static" else {}
            sides[f"{LLAMA}, {kind}", "off"] = peers_decoder(as_llama(vanilla), ids, cfg.new, device, **how), None
    return sides, vanilla, ids


def same_text(model, prompts, ours, theirs):
    """Whether two sides' greedy tokens agree, up to a place where the model gives both of them the same logit."""
    for ids, a, b in zip(prompts, ours, theirs, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            with torch.inference_mode():
                idx = torch.tensor([ids + a[:at]], device=model.head.weight.device)
                logits = model.head(model.hidden(idx)[0, -1])
            if not (logits[a[at]] - logits[b[at]]).abs() < 1e-4:
                return False
    return True


def decode_rows(cfg, shape, dtype, B, T, device, copies):
    """The rows of one shape, dtype, batch and length of prompt. Raises UserError if a cache took other bytes than the
    plan says, or if in fp32 vanilla's text, compiled or by a peer, is another."""
    sides, vanilla, prompts = decoders(cfg, shape, dtype, B, T, device)
    found, first = {side: run() for side, (run, _) in sides.items()}, ("vanilla", cfg.compile[0])
    for (name, how), (text, _, _) in found.items():
        if dtype == "float32" and name not in cfg.modes[1:] and not same_text(vanilla, prompts, found[first][0], text):
            raise UserError(f"{name}, compile={how}: another text than ours in fp32 with the same weights")
    seconds = {part: {side: [] for side in sides} for part in ("prefill", "decode", "both")}
    for i in range(cfg.rounds):
        order = list(sides)[:: 1 if i % 2 == 0 else -1]
        for side, (_, _, took) in in_turn({side: sides[side][0] for side in order}, 1, device)[1].items():
            for part in seconds:
                seconds[part][side].append(took[part] if part in took else took["prefill"] + took["decode"])
    rows = []
    for side, (_, config) in sides.items():
        about = {"shape": shape, "dtype": dtype, "batch": B, "prompt": T, "new": cfg.new}
        row = about | {"name": side[0], "compile": side[1], "seconds": {part: seconds[part][side] for part in seconds}}
        row["prefill_tokens_per_s"] = B * T / statistics.median(seconds["prefill"][side])
        row["tokens_per_s"] = B * (cfg.new - 1) / statistics.median(seconds["decode"][side])
        row["to_vanilla"] = ratio(seconds["decode"], side, ("vanilla", side[1]) if config else first)
        for peer in (peer for peer in sides if sides[peer][1] is None):
            row[f"to {peer[0]}"] = {part: ratio(seconds[part], side, peer) for part in ("decode", "both")}
        rows.append(row | (memory_of(cfg, config, row, found[side][1], copies) if config else {}))
    return rows


def memory_of(cfg, config, row, allocated, copies):
    """What a row of ours stores and reads. A step reads each weight that multiplies, and the keys and values stored so
    far: once if a layer's that others use too stay in a cache of the processor ("least"), else once in each layer."""
    size = torch.finfo(getattr(torch, row["dtype"])).bits // 8
    length, each = row["prompt"] + cfg.new - 1, kv_floats_per_token(config) * size
    if allocated != row["batch"] * length * each:
        raise UserError(f"{row['name']}: the cache took {allocated:,} bytes, {row['batch'] * length * each:,} planned")
    middle = row["prompt"] + cfg.new / 2
    weights, every = count_parameters(config)[1] * size, 2 * config.n_layer * config.n_kv_head * config.head_dim * size
    reads = {"least": weights + row["batch"] * middle * each, "most": weights + row["batch"] * middle * every}
    per_s = row["tokens_per_s"] / row["batch"]
    return {
        "kv_bytes": allocated,
        "bytes_per_step": reads,
        "of_copy_rate": {name: n * per_s / copies for name, n in reads.items()},
        "batch_that_fits": int(cfg.kv_gib * 2**30 // (length * each)),
    }


def show_decoding(rows):
    """The table of what decode_rows found."""
    for row in rows:
        cells = [row["shape"], row["dtype"], f"{row['batch']}", f"{row['prompt']:,}", row["name"], row["compile"]]
        cells += [f"{row['prefill_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}", spread(row["to_vanilla"])]
        cells += [spread(value["decode"]) for key, value in row.items() if key.startswith(f"to {LLAMA}")]
        if share := row.get("of_copy_rate"):
            cells += [f"{share['least']:.0%}–{share['most']:.0%}"]
            cells += [f"{row[key]:,}" for key in ("kv_bytes", "batch_that_fits")]
        else:
            cells += [""] * 3
        print("| " + " | ".join(cells) + " |", flush=True)


def bench_decode(cfg, world):
    """Tokens per second of greedy decoding from a prompt of random tokens, random weights, no end of text."""
    if cfg.peers and not versions("transformers")["transformers"]:
        raise UserError("the peer is missing: pip install -r requirements-peers.txt")
    copies, rows = copy_rate(world.device), []
    print(f"a copy reads and writes {copies / 1e9:,.1f} GB/s\n")
    heads = ["shape", "dtype", "batch", "prompt", "side", "compile"]
    heads += ["prefill tokens/s", "decode tokens/s", "decode to vanilla"]
    heads += [f"decode to {LLAMA}, {kind}" for kind in ("dynamic", "static") if cfg.peers]
    heads += ["of copy rate", "KV bytes", f"rows in {cfg.kv_gib:g} GiB"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * 6 + "---:|" * (len(heads) - 6))
    with torch._dynamo.config.patch(recompile_limit=1000):  # one step function, many models
        for shape, dtype, T, B in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
            try:
                found = decode_rows(cfg, shape, dtype, B, T, world.device, copies)
            except torch.cuda.OutOfMemoryError:
                print(f"| {shape} | {dtype} | {B} | {T:,} | does not fit |" + " |" * (len(heads) - 5), flush=True)
                continue
            finally:
                torch.compiler.reset()
            show_decoding(found)
            rows += found
    return {"copy_bytes_per_s": copies, "kv_gib": cfg.kv_gib, "rows": rows}


def texts_of(cfg):
    """Yield the documents of cfg.text as prepare.py reads them, or those of the standard library's Python sources."""
    if cfg.text and not Path(cfg.text).exists():
        raise UserError(f"no file or folder {cfg.text}; --text is where the texts are")
    about = prepare.PrepareConfig("files" if cfg.text else "pysource", input_dir=cfg.text)
    library = itertools.takewhile(lambda place: place.domain == "stdlib", reading.python_files())
    for place in reading.text_files(about) if cfg.text else library:
        for number, raw, _ in reading.raw_items(place, about, 0):
            try:
                found = reading.to_documents(place, raw, about)
            except ValueError as e:
                raise UserError(f"{place.path}, item {number + 1}: {e}") from None
            yield from (text.encode(errors="replace").decode() for _, text in found)  # half surrogate pairs become ?


def write_texts(texts, path, size):
    """A .jsonl of documents, over and over up to `size` bytes of text; returns how many documents and bytes it has."""
    documents = written = 0
    with open(path, "w", encoding="utf-8") as f:
        for text in itertools.cycle(texts):
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents, written = documents + 1, written + len(text.encode())
            if written >= size:
                break
    return documents, written


def resident(pid):
    """{process: the most bytes it ever held in memory}, of a process and its children; {} where there is no /proc."""
    found, family = {}, [pid]
    with contextlib.suppress(OSError):  # it ends while we look
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            family += children.read_text().split()
        for process in family:
            if peak := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text()):
                found[int(process)] = 1024 * int(peak[1])
    return found


def run_prepare(about, tokenizer):
    """Run prepare.py with settings `about` as its users do, from where it has its tokenizer; returns the sum of its
    processes' peak memory, in bytes: no less than they held at any time."""
    out, peaks = Path(about.out_dir), {}
    shutil.rmtree(out, ignore_errors=True)
    write_json(out / "progress.json", prepare.open_output(about, reading.find_inputs(about)))
    tokenizer.save(out / "tokenizer.json")
    names = ("input_dir", "out_dir", "tokenizer", "tokenizer_file", "val_fraction", "workers")
    command = [sys.executable, prepare.__file__, about.source, *(f"--{name}={getattr(about, name)}" for name in names)]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said) as process:
            while process.poll() is None:
                peaks |= resident(process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        said.seek(0)
        if process.returncode:
            raise UserError(f"prepare.py failed: {said.read().strip().splitlines()[-1].removeprefix('error: ')}")
    return sum(peaks.values())


def with_tiktoken(text, tokenizer, out):
    """One document after the other in one process: the loop that one would write without prepare.py."""
    with open(text, "rb") as lines, open(out, "wb") as f:
        for line in lines:
            np.array([*tokenizer.encode(json.loads(line)["text"]), tokenizer.eot], "<u2").tofile(f)


def with_datasets(data, tokenizer, out, workers):
    """What nanoGPT's prepare.py does: Dataset.map, then a memmap that is filled from the result, piece after piece."""

    def encode(batch):
        ids = [[*tokenizer.encode(text), tokenizer.eot] for text in batch["text"]]
        return {"ids": ids, "len": [len(i) for i in ids]}

    done = data.map(encode, batched=True, remove_columns=["text"], num_proc=workers, load_from_cache_file=False)
    ids, at, pieces = np.memmap(out, "<u2", "w+", shape=(sum(done["len"]),)), 0, min(1024, len(done))
    for i in range(pieces):
        piece = np.concatenate(done.shard(pieces, i, contiguous=True).with_format("numpy")[:]["ids"])
        ids[at : at + len(piece)] = piece
        at += len(piece)
    ids.flush()


def metered(sides):
    """The same functions, and {name: processor seconds of each call}, those of processes that it started included."""
    spent = {name: [] for name in sides}

    def turn(name):
        before = sum(os.times()[:4])
        result = sides[name]()
        spent[name].append(sum(os.times()[:4]) - before)
        return result

    return {name: functools.partial(turn, name) for name in sides}, spent


def beginning(text, size):
    """The first documents of a .jsonl, `size` bytes of text or a little more."""
    found = []
    with open(text, "rb") as lines:
        while size > 0 and (line := next(lines, None)):
            found.append(json.loads(line)["text"])
            size -= len(found[-1].encode())
    return found


def prepare_sides(about, tokenizer, folder):
    """{name: (function, the token file it writes, or None where it returns the ids of `part`)} and part: texts."""
    text, workers, datasets = Path(about.input_dir) / "text.jsonl", about.workers, configurator.need("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_json(str(text), cache_dir=str(folder / "cache"))  # to Arrow, before its turn
    plain, mapped = folder / "plain.bin", folder / "mapped.bin"
    sides = {
        "prepare.py": (lambda: run_prepare(about, tokenizer), Path(about.out_dir) / "train/text.bin"),
        "tiktoken": (lambda: with_tiktoken(text, tokenizer, plain), plain),
        "datasets.map": (lambda: with_datasets(data, tokenizer, mapped, workers), mapped),
    }
    if about.tokenizer != "neox":
        return sides, []
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread
    part, peer = beginning(text, 1e7), configurator.need("tokenizers").Tokenizer.from_file(about.tokenizer_file)
    sides["tokenizers"] = lambda: [e.ids for e in peer.encode_batch_fast(part, add_special_tokens=False)], None
    return sides, part


def race(cfg, about, tokenizer, size, folder):
    """Rows {side, processes, bytes (of text), tokens, seconds, processor_seconds, faster: prepare.py than it, per core
    where it is tokenizers} and prepare.py's peak memory in bytes. Raises UserError if the sides' ids differ."""
    sides, part = prepare_sides(about, tokenizer, folder)
    turns, spent = metered({name: side for name, (side, _) in sides.items()})
    seconds, found = in_turn(turns, cfg.rounds, torch.device("cpu"))
    ours, rows = np.fromfile(sides["prepare.py"][1], "<u2"), []
    for name, (_, file) in sides.items():
        ids = np.fromfile(file, "<u2") if file else np.concatenate([[*ids, tokenizer.eot] for ids in found[name]])
        if not np.array_equal(ids, ours if file else ours[: len(ids)]):
            raise UserError(f"{name} makes other ids of the text than prepare.py: nothing to compare")
        processes = about.workers if name in ("prepare.py", "datasets.map") else 1
        row = {"side": name, "processes": processes, "tokens": len(ids), "seconds": seconds[name]}
        row |= {"bytes": size if file else sum(len(text.encode()) for text in part), "processor_seconds": spent[name]}
        scale = 1 if file else size / row["bytes"] / about.workers  # to as much text, on as many cores
        costs = {"prepare.py": seconds["prepare.py"]} | {name: [scale * s for s in seconds[name]]}
        rows.append(row | {"faster": ratio(costs, "prepare.py", name)})
    return rows, found["prepare.py"]


def prepare_table(rows):
    """What race found, as a table."""
    print("| side | processes | MB/s | tokens/s | processor s/100 MB | prepare.py's speed to its |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        took = statistics.median(row["seconds"])
        cells = [row["side"], row["processes"], f"{row['bytes'] / took / 1e6:,.1f}", f"{row['tokens'] / took:,.0f}"]
        cells += [f"{1e8 * statistics.median(row['processor_seconds']) / row['bytes']:,.1f}"]
        cells += [spread(row["faster"]) + " per core" * (row["side"] == "tokenizers")]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def flatness(cfg, about, tokenizer, size, folder):
    """Yield {bytes (of text), seconds, peak_bytes} of prepare.py on each input of cfg.memory_megabytes: one file under
    many names, so that only what is made of it takes space."""
    for megabytes in cfg.memory_megabytes:
        many, n = folder / f"{megabytes}", math.ceil(1e6 * megabytes / size)
        many.mkdir()
        for i in range(n):
            os.link(Path(about.input_dir) / "text.jsonl", many / f"{i}.jsonl")
        start = time.perf_counter()
        peak = run_prepare(dataclasses.replace(about, input_dir=str(many)), tokenizer)
        yield {"bytes": n * size, "seconds": time.perf_counter() - start, "peak_bytes": peak}


def bench_prepare(cfg, world):
    """Tokens per second from a .jsonl file to a token file: prepare.py as its users start it, against plain tiktoken,
    datasets.map in as many processes and, for neox, the tokenizers package; and prepare.py's memory on long inputs."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        folder, memory = Path(folder), []
        (folder / "text").mkdir()
        documents, size = write_texts(texts_of(cfg), folder / "text" / "text.jsonl", 1e6 * (cfg.megabytes or 300))
        if not documents:
            raise UserError(f"no text in {cfg.text}: there should be files {', '.join(reading.SUFFIXES)}")
        about = cfg.preparation(input_dir=str(folder / "text"), out_dir=str(folder / "ours"))
        tokenizer = prepare.make_tokenizer(about, reading.find_inputs(about))
        rows, peak = race(cfg, about, tokenizer, size, folder)
        prepare_table(rows)
        first = {"bytes": size, "seconds": statistics.median(rows[0]["seconds"]), "peak_bytes": peak}
        print("\n| text, MB | prepare.py, s | peak memory of its processes, MB |\n|---:|---:|---:|")
        for row in itertools.chain([first], flatness(cfg, about, tokenizer, size, folder)):
            memory.append(row)
            print(f"| {row['bytes'] / 1e6:,.0f} | {row['seconds']:,.1f} | {row['peak_bytes'] / 1e6:,.0f} |", flush=True)
    about = {"text": cfg.text or "the standard library's", "tokenizer": tokenizer.name, "documents": documents}
    return about | {"rows": rows, "memory": memory}


def token_files(folder, sizes, block_size, fill):
    """A data folder, of a byte vocabulary and {domain: train tokens}, that Corpus takes with verify=False; fill(path,
    tokens) makes a token file."""
    ranks, splits = [(bytes([i]), i) for i in range(256)], {"train": {}, "val": {}}
    tokenizer = Tokenizer(prepare.tokenizer_spec("bytes", "(?s:.)", ranks, {EOT: 256}))
    for domain, size in sizes.items():
        for split, tokens in (("train", size), ("val", block_size + 1)):
            path = folder / split / f"{domain}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            fill(path, tokens)
            splits[split][domain] = {"file": f"{split}/{domain}.bin", "tokens": tokens, "sha256": ""}
    tokenizer.save(folder / "tokenizer.json")
    mixture = {domain: size / sum(sizes.values()) for domain, size in sizes.items()}
    about = {"name": tokenizer.name, "hash": tokenizer.hash}
    write_json(folder / "manifest.json", {"tokenizer": about, "mixture": mixture, "splits": splits})


def random_tokens(path, tokens):
    np.random.default_rng(tokens).integers(0, 256, tokens, np.uint16).astype("<u2").tofile(path)


def no_tokens(path, tokens):
    """A file of that size which takes no space, where the file system can do that."""
    path.touch()
    os.truncate(path, 2 * tokens)


def nano_batch(path, rows, block_size, rng):
    """A batch as nanoGPT's get_batch makes it, from one file: opened anew, a tensor per row, stacked."""
    ids = np.memmap(path, "<u2", "r")
    starts = rng.integers(len(ids) - block_size, size=rows)
    cut = [torch.from_numpy(ids[i : i + block_size + 1].astype(np.int64)) for i in starts]
    return torch.stack([row[:-1] for row in cut]), torch.stack([row[1:] for row in cut])


def load_sides(corpus):
    """{what: (function, sequences it loads)}: 16 steps of 1,024 sequences (the paper's), asked for as train.py does, 32
    at a time, in order going on from round to round; random ones are of the first epoch."""
    T, rng, size, following = corpus.block_size, np.random.default_rng(0), 1024, itertools.count()
    epoch = max(1, sum(corpus.windows("train", domain) for domain in corpus.domains) // size)
    files = [corpus.dir / corpus.manifest["splits"]["train"][domain]["file"] for domain in corpus.domains]

    def load(steps, rows):
        for step in map(int, steps):
            for first in range(0, rows, 32):
                corpus.batch(step, size, first, first + 32)

    def nano():
        for i in range(16 * size // 32):
            nano_batch(files[i % len(files)], 32, T, rng)

    return {
        "steps in order": (lambda: load(itertools.islice(following, 16), size), 16 * size),
        "random steps": (lambda: load(rng.integers(epoch, size=16), size), 16 * size),
        "random steps, one rank of 8": (lambda: load(rng.integers(epoch, size=16), size // 8), 2 * size),
        "nanoGPT's way": (nano, 16 * size),
    }


def first_batch(folder, block_size):
    """A Corpus, and {open_seconds, first_seconds (from then to the first batch), order_bytes (of its windows),
    peak_bytes (the most that it held until then, 0 where there is no /proc)}."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = sum(resident(os.getpid()).values()), time.perf_counter()
    corpus = Corpus(folder, block_size, verify=False)
    opened = time.perf_counter()
    corpus.batch(0, 32)
    found = {"open_seconds": opened - start, "first_seconds": time.perf_counter() - opened}
    found["order_bytes"] = 8 * sum(corpus.windows("train", domain) for domain in corpus.domains)
    return corpus, found | {"peak_bytes": sum(resident(os.getpid()).values()) - before}


def load_rows(what, corpus, need, rounds):
    """Print and return the rows of one data folder: {data, side, tokens_per_second, of_need: how many times `need`,
    faster: than nanoGPT's way, seconds}."""
    sides, rows = load_sides(corpus), []
    seconds, _ = in_turn({name: side for name, (side, _) in sides.items()}, rounds, torch.device("cpu"))
    costs = {name: [s / sides[name][1] / corpus.block_size for s in times] for name, times in seconds.items()}
    for name, times in costs.items():
        rate, faster = 1 / statistics.median(times), ratio(costs, name, "nanoGPT's way")
        row = {"data": what, "side": name, "tokens_per_second": rate, "of_need": rate / need, "faster": faster}
        rows.append(row | {"seconds": seconds[name]})
        needs = f"{rate / need:,.0f} | {rate / need / 8:,.0f}"
        print(f"| {what} | {name} | {rate:,.0f} | {needs} | {spread(faster)} |", flush=True)
    return rows


def bench_load(cfg, world):
    """Tokens per second of Corpus.batch in one process, against nanoGPT's way and what the paper's 82M model takes at
    40 % of the peak of one A100, and of eight; and what 20B tokens cost before their first batch."""
    T = cfg.block_size or 2048
    need = 0.4 * 312e12 / flops_per_token(ModelConfig(block_size=2048, **SHAPES["82M"]))
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        made, long = Path(folder) / "made", Path(folder) / "long"
        size = int(1e6 * (cfg.megabytes or 1000) / 2 / 100)
        if not cfg.data_dir:
            token_files(made, {f"domain{i}": size for i in range(100)}, T, random_tokens)
        token_files(long, {d: int(LONG * share) for d, share in prepare.PAPER_MIXTURE.items()}, T, no_tokens)
        print("| data | side | tokens/s | of one A100's need | of eight's | of nanoGPT's way |")
        print("|---|---|---:|---:|---:|---:|")
        what = cfg.data_dir or f"100 domains, {200 * size / 1e6:,.0f} MB in memory"
        rows = load_rows(what, Corpus(cfg.data_dir or made, T, verify=False), need, cfg.rounds)
        corpus, first = first_batch(long, T)
        rows += load_rows(f"7 domains, {LONG / 1e9:,.0f}B tokens not in memory", corpus, need, cfg.rounds)
    took = f"opened in {first['open_seconds']:.2f} s, order drawn in {first['first_seconds']:.2f} s"
    held = f"{first['order_bytes'] / 1e6:,.0f} MB, at most {first['peak_bytes'] / 1e6:,.0f} MB on the way"
    print(f"\nThe first batch of {LONG / 1e9:,.0f}B tokens: {took}; the order takes {held}")
    return {"block_size": T, "need": need, "rows": rows, "first": first}


def versions(*names):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main(cfg: BenchConfig):
    world = Distributed(cfg.device)
    if world.size > 1:
        raise UserError("bench.py runs in one process; leave torchrun out")
    what, name = cfg.words[0], machine(world.device)
    result = KINDS[what](cfg, world)
    peers = versions("transformers", "lm-eval", "tiktoken", "datasets", "tokenizers")
    about = {"what": what, "processor": name} | environment() | peers
    write_json(cfg.out_file or f"results/bench_{what}_{name}.json", about | result)


KINDS = {
    "gpu": bench_gpu,
    "train": bench_train,
    "memory": bench_memory,
    "decode": bench_decode,
    "eval": bench_eval,
    "prepare": bench_prepare,
    "load": bench_load,
}


if __name__ == "__main__":
    run_main(main, command_line(BenchConfig, __doc__))
