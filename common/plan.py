"""A model before it is trained: parameters, FLOPs, bytes, and what `python model.py` prints: a plan, or all modes."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from common.report import markdown
from configurator import setting
from model import GPT, MixingWeights
from value_modes import TABLE, ModelConfig, kv_floats_per_token, plan_layers


@dataclass(frozen=True)
class PlanConfig(ModelConfig):
    """Settings of `python model.py`: what to print, and a model's shape."""

    what: Literal["plan", "table"] = setting("plan", "the plan of one mode, or the table of all", positional=True)


def meta_model(cfg):
    """The GPT of a config on the meta device: shapes without tensors."""
    with torch.device("meta"):
        return GPT(cfg)


def count_parameters(cfg):
    """All parameters of a model. No tensor is allocated."""
    return sum(p.numel() for p in meta_model(cfg).parameters())


def count_multiplying(cfg):
    """The parameters that multiply: those of matrices other than embeddings. No tensor is allocated."""
    model = meta_model(cfg)
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    return sum(p.numel() for p in model.parameters() if p.ndim == 2) - embeddings


def flops_per_token(cfg):
    """Training FLOPs of one token at T = block_size: 6 for each parameter that multiplies, and 6 H D T for each product
    of attention. A layer has two, q k^T and A V; residuals may add some. Masked positions count too. Source: PaLM,
    app. B."""
    products = 2 * cfg.n_layer
    for layer in plan_layers(cfg):
        for mix in layer.mixes:
            if mix.residual.map == "cross" or mix.residual.of == "probs":
                products += 2 * len(mix.sources)
            elif mix.residual.of == "scores":
                products += len(mix.sources)
    return 6 * count_multiplying(cfg) + 6 * products * cfg.n_head * cfg.head_dim * cfg.block_size


def describe_mix(mix, weights):
    """What a residual does in a layer, in words. weights: what it has or starts from, (own, one for each source)."""
    r = mix.residual
    names = [f"layer {s}" if isinstance(s, int) else s for s in mix.sources]
    if r.map == "cross":
        return f"attends over {', '.join(names)} too"
    if r.learn == "head":
        return f"{r.of}: head gate between own and {names[0]}"
    if r.is_gated:
        own, each = r.starts(1)
        return f"{r.of}: {own:.4g} own + {each:.4g} {r.learn}(W x) {names[0]}"
    own, each = float(weights[0]), float(weights[1])
    if r.map == "delta":
        names = [f"({name} - own)" for name in names]
    where = names[0] if len(names) == 1 else f"({' + '.join(names)})"
    if r.map == "own":
        text = f"{r.of}: {own:.4g} own + {each:.4g} {where}"
    else:
        text = f"after attention: {own:.4g} A V + {each:.4g} {where}"
    if r.learn == "sources":
        return f"{text} (learned)"
    return text if r.learn == "fixed" else f"{text} ({r.learn}, learned)"


def owner_in_words(mode, layer, n, t):
    """Where layer n has its q, k or v from. t: which of them."""
    if t == "v" and mode.values == "keys":
        return "made of its k"
    if t == "v" and n and mode.heads_from_layer_0:
        return f"own in heads 0 to {layer.heads['v'] - 1}, of layer 0 in the others"
    return "own" if layer.owner[t] == n else f"of layer {layer.owner[t]}"


def describe(cfg):
    """The plan as text: the equation, per layer who owns q, k, v and what is mixed in, then sizes."""
    mode = cfg.value_mode
    title = mode.name
    if mode.name in TABLE:
        _, equation, source = TABLE[mode.name]
        title = f"{mode.name}: {equation}"
        if source:
            title += f" ({source})"
    lines = [title]
    plan = plan_layers(cfg)
    start = [
        MixingWeights(r, j, plan).requires_grad_(False)() for j, r in enumerate(mode.residuals)
    ]  # [residual] {layer}
    for n, layer in enumerate(plan):
        words = [f"{t} {owner_in_words(mode, layer, n, t):10}" for t in "qkv"]
        words += [describe_mix(mix, start[mix.index].get(n)) for mix in layer.mixes]
        lines.append(f"layer {n:2}  " + "  ".join(words).rstrip())
    if mode.output != "plain":
        lines.append(f"attention's output: {mode.output}")
    if mode.cut_first:
        lines.append("layer 0 has no skip around its attention")
    if mode.dense:
        dilation, period = mode.dense
        when = "every block" if period == 1 else f"every {period} blocks"
        lines.append(f"after {when}: weighted average over depth, dilation {dilation}")
    n_parameters = count_parameters(cfg)
    kv, full = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_head * cfg.head_dim
    lines += [
        f"heads           {cfg.n_head} of width {cfg.head_dim}, {cfg.n_kv_head} of keys and values",
        f"vocabulary      {cfg.vocab_size:,} tokens; train.py takes that of its data",
        f"parameters      {n_parameters:,} ({count_multiplying(cfg):,} multiply)",
        f"training bytes  {4 * n_parameters:,} of weights, as many of gradients, twice that of AdamW, in fp32",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} floats per token = {2 * kv:,} bytes in bf16, {kv / full:.4f} of full attention's",
    ]
    return "\n".join(lines)


def mode_table(cfg):
    """All rows of TABLE at the shape of `cfg`, as Markdown. Rows that do not fit the shape are left out."""
    vanilla = count_parameters(dataclasses.replace(cfg, value_mode="vanilla", n_kv_head=0))
    rows = []
    for name, (_, equation, source) in TABLE.items():
        try:
            model_config = dataclasses.replace(cfg, value_mode=name, n_kv_head=0)
        except ValueError:
            continue  # not with so many layers or heads
        more = count_parameters(model_config) - vanilla
        kv = kv_floats_per_token(model_config)
        share = f"{kv / (2 * cfg.n_layer * cfg.n_head * cfg.head_dim):.4g}"
        rows.append([f"`{name}`", equation, source, f"{more:+,}" if more else "±0", f"{kv:,}", share])
    header = ["mode", "equation", "from", "parameters", "KV floats per token", "of vanilla's"]
    return markdown(header, rows, left=3)


def main(cfg: PlanConfig):
    """`python model.py …`"""
    print(mode_table(cfg) if cfg.what == "table" else describe(cfg))
