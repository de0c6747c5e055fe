"""A model before it is trained: parameters, FLOPs, and what `python model.py` prints: its plan, the table of all modes,
and what a run of it needs."""

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, load_settings, run_main, say_error, setting
from report import markdown
from value_modes import TABLE, ModelConfig, kv_floats_per_token, plan_layers


def command():
    """`python model.py …`; ends the process. The settings are checked before torch is imported."""
    words, usage = sys.argv[1:], Path(__file__).with_name("model.py").read_text(encoding="utf-8").split('"""')[1]
    what, settings = describe, ModelConfig
    if words[:1] == ["table"]:
        what = mode_table
    if words[:1] == ["budget"]:
        what, settings = budget, BudgetConfig
    try:
        cfg = load_settings(settings, words if what is describe else words[1:], usage, ignore_unknown_in_files=True)
    except UserError as e:
        say_error(e)
    run_main(lambda: print(what(cfg)))
    sys.exit(0)


@dataclass(frozen=True)
class BudgetConfig(ModelConfig):
    """Every setting of `python model.py budget`: a model's shape, a run of it with train.py's names, and machines."""

    batch_tokens: int = setting(2_097_152, "tokens per optimizer step, over all ranks", least=1, group="Budget")
    micro_batch: int = setting(32, "most sequences per rank and forward pass", least=1)
    max_steps: int = setting(10_000, "optimizer steps", least=1)
    tokens: int = setting(0, "tokens to train on; 0 = max_steps x batch_tokens", least=0)
    gpus: tuple[int, ...] = setting((8,), "numbers of ranks to compare, such as 8,64", least=1)
    card: tuple[str, ...] = setting(("H100",), "GPUs to compare, of runtime.PEAK_FLOPS, such as A100,H100")
    utilisation: float = setting(0.4, "share of a GPU's peak that a run reaches", least=1e-3, most=1)


def meta_model(cfg):
    """The GPT of a config on the meta device: shapes without tensors."""
    import torch

    from model import GPT

    with torch.device("meta"):
        return GPT(cfg)


def count_parameters(cfg):
    """(all parameters, those that multiply: matrices other than embeddings). No tensor is allocated."""
    import torch

    model = meta_model(cfg)
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    return sum(p.numel() for p in model.parameters()), matrices - embeddings


def flops_per_token(cfg):
    """Training FLOPs per token at T = block_size: 6 N + 12 L H D T, with N the parameters that multiply. Attention
    counts in full, not causally: half of 12 H D T is q k^T, half A V. Residuals add theirs. Source: PaLM, app. B."""
    halves = 2 * cfg.n_layer  # of attention, each 6 H D T
    for layer in plan_layers(cfg):
        for mix in layer.mixes:
            if mix.residual.map == "cross" or mix.residual.of == "probs":
                halves += 2 * len(mix.sources)
            elif mix.residual.of == "scores":
                halves += len(mix.sources)
    return 6 * count_parameters(cfg)[1] + 6 * halves * cfg.n_head * cfg.head_dim * cfg.block_size


def describe_mix(mix, weights):
    """What a residual does in a layer, in words. weights: those it has or starts from, see model.Lambdas."""
    r = mix.residual
    where = " ".join(f"layer {s}" if isinstance(s, int) else s for s in mix.sources)
    if r.map == "cross":
        return f"attends over {where} too"
    what = r.of if r.map == "own" else f"{r.of} {r.map}"
    if r.per_token:
        return f"{what}: {r.learn} gate between own and {where}"
    own, each = float(weights[0]), float(weights[1])
    if len(mix.sources) > 1:
        where = f"of each {where}"
    text = f"{what}: {own:.4g} own + {each:.4g} {where}"
    return text if r.learn == "fixed" else f"{text} ({r.learn}, learned)"


def describe(cfg):
    """The plan as text: the equation, per layer who owns q, k, v and what is mixed in, then sizes."""
    from model import new_lambdas

    mode = cfg.value_mode
    title = mode.name
    if mode.name in TABLE:
        _, equation, source = TABLE[mode.name]
        title = f"{mode.name}: {equation}"
        if source:
            title += f" ({source})"
    lines = [title]
    start = [lambdas.requires_grad_(False)() for lambdas in new_lambdas(cfg)]  # [residual][layer]
    for n, layer in enumerate(plan_layers(cfg)):
        words = []
        for t in "qkv":
            owner = "own" if layer.owner[t] == n else f"of layer {layer.owner[t]}"
            words.append(f"{t} {owner:10}")
        words += [describe_mix(mix, start[mix.index][n]) for mix in layer.mixes]
        lines.append(f"layer {n:2}  " + "  ".join(words).rstrip())
    if mode.dense:
        dilation, period = mode.dense
        lines.append(f"after each {period} blocks: weighted average over depth, dilation {dilation}")
    every, multiply = count_parameters(cfg)
    kv, full = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_embd
    lines += [
        f"heads           {cfg.n_head} of width {cfg.head_dim}, {cfg.n_kv_head} of keys and values",
        f"parameters      {every:,} ({multiply:,} multiply)",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} floats per token = {2 * kv:,} bytes in bf16, {kv / full:.4f} of full attention's",
    ]
    return "\n".join(lines)


def mode_table(cfg):
    """All rows of TABLE at the shape of `cfg`, as Markdown. Rows that do not fit the shape are left out."""
    vanilla = count_parameters(dataclasses.replace(cfg, value_mode="vanilla", n_kv_head=0))[0]
    rows = []
    for name, (_, equation, source) in TABLE.items():
        try:
            model_config = dataclasses.replace(cfg, value_mode=name, n_kv_head=0)
        except ValueError:
            continue  # not with so many layers or heads
        more = count_parameters(model_config)[0] - vanilla
        kv = kv_floats_per_token(model_config)
        share = f"{kv / (2 * cfg.n_layer * cfg.n_embd):.4g}"
        rows.append([f"`{name}`", equation, source, f"{more:+,}" if more else "±0", f"{kv:,}", share])
    header = ["mode", "equation", "from", "parameters", "KV floats per token", "of vanilla's"]
    return markdown(header, rows, left=3)


@functools.cache
def bytes_kept(cfg, batch):
    """Bytes that autograd keeps from the forward to the backward of `batch` sequences in bf16, without the parameters:
    activations, and copies of weights in bf16. Counted with torch's fake tensors, which have shapes and no content."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from model import GPT

    kept = {}
    with FakeTensorMode():
        model = GPT(cfg, init=False)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor):
            storage = tensor.untyped_storage()  # which several kept tensors may share
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage
            return tensor

        idx = torch.zeros(batch, cfg.block_size, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(idx, idx.clone())
    return sum(storage.nbytes() for storage in kept.values())


def needs(cfg, n_ranks):
    """{shard: bytes on a rank of (weights, gradients, AdamW, what is kept), and bytes that a rank sends in a step}.

    Weights are fp32, as in train.py. Collectives are rings: a rank sends (W - 1) / W of what is gathered or scattered.
    """
    from train import TrainConfig

    run = TrainConfig(batch_tokens=cfg.batch_tokens, block_size=cfg.block_size, micro_batch=cfg.micro_batch)
    micro_batch, accumulation = run.split_batch(n_ranks)
    model, kept = meta_model(cfg), bytes_kept(cfg, micro_batch)
    whole = 4 * sum(p.numel() for p in model.parameters())
    blocks = [4 * sum(p.numel() for p in block.parameters()) for block in model.blocks]
    at_work = min(whole, whole - sum(blocks) + 2 * max(blocks))  # gathered: what is in no block, a block, the next one
    part, moved = whole / n_ranks, whole * (n_ranks - 1) / n_ranks
    gradients = whole if accumulation > 1 else part
    if n_ranks == 1:
        return dict.fromkeys(("none", "zero2", "zero3"), ((whole, whole, 2 * whole, kept), 0))
    return {
        "none": ((whole, whole, 2 * whole, kept), 2 * moved),  # gradients scattered and gathered
        "zero2": ((part + whole, gradients, 2 * part, kept), 2 * moved),  # gradients scattered, weights gathered
        "zero3": ((part + at_work, part, 2 * part, kept), 3 * accumulation * moved),  # weights twice, each micro-batch
    }


def memory_table(cfg):
    rows = []
    for n_ranks in cfg.gpus:
        for shard, (parts, _) in needs(cfg, n_ranks).items():
            rows.append([n_ranks, shard, *(f"{n / 1e9:.3g}" for n in (*parts, sum(parts)))])
    return markdown(["ranks", "shard", "weights", "gradients", "AdamW", "kept", "sum, GB"], rows, left=2)


def speed_table(cfg, n_tokens):
    """Tokens/s at cfg.utilisation of the peak, and the GB/s that each rank sends if nothing waits for the network."""
    from runtime import PEAK_FLOPS

    rows = []
    for n_ranks in cfg.gpus:
        sent = {shard: sent for shard, (_, sent) in needs(cfg, n_ranks).items()}
        for card in cfg.card:
            if card not in PEAK_FLOPS:
                raise UserError(f"card={card!r} is unknown; known: {', '.join(PEAK_FLOPS)}")
            rate = n_ranks * PEAK_FLOPS[card] * cfg.utilisation / flops_per_token(cfg)
            seconds = cfg.batch_tokens / rate
            traffic = [f"{sent[shard] / seconds / 1e9:.3g}" for shard in ("zero2", "zero3")]
            rows.append([n_ranks, card, f"{rate:,.0f}", f"{seconds:.3g}", f"{n_tokens / rate / 86400:.3g}", *traffic])
    header = ["ranks", "card", "tokens/s", "seconds per step", "days", "none, zero2: GB/s", "zero3: GB/s"]
    return markdown(header, rows, left=2)


def budget(cfg):
    """What a run needs, as text. All of it is computed."""
    n_parameters, n_tokens = count_parameters(cfg)[0], cfg.tokens or cfg.max_steps * cfg.batch_tokens
    lines = [
        f"{cfg.value_mode.name}: {n_parameters:,} parameters, {n_tokens:,} tokens in steps of {cfg.batch_tokens:,}. "
        "All figures are computed, none is measured.",
        "Memory of a rank. Kept from forward to backward: activations, and the weights in bf16.",
        memory_table(cfg),
        f"Speed at {cfg.utilisation:.0%} of peak, {flops_per_token(cfg):,} FLOPs per token. GB/s are sent by a rank.",
        speed_table(cfg, n_tokens),
        f"Disk: {2 * n_tokens / 1e9:.3g} GB of tokens, {12 * n_parameters / 1e9:.3g} GB for each checkpoint.",
    ]
    return "\n\n".join(lines)
