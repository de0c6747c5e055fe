"""Speed and memory of training steps, against peers."""

import functools
import itertools
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bench.common import (
    CARDS,
    LLAMA,
    MICRO_BATCH,
    RIVALS,
    SHAPES,
    X_VALUE,
    YARDSTICK,
    as_llama,
    in_turn,
    ratio,
    spread,
    timed,
)
from configurator import UserError
from describe import flops_per_token
from files import read_json
from model import GPT
from runtime import peak_flops
from train import adamw
from value_modes import ModelConfig


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
        (mode, _, kind) = name.partition(", attn=")
        model = GPT(ModelConfig(**shape, value_mode=mode), attn=kind or "sdpa", recompute=recompute)
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
            return [sys.executable, "-m", "bench", kind, *common, *words, *shape, *more]

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
