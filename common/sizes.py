"""A model in numbers: parameters, FLOPs, bytes, mixing weights. And what `python model.py` prints, plans and tables."""

import dataclasses
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from common.ranks import pick_dtype
from common.report import markdown
from configurator import UserError, setting
from model import GPT, MixingWeights
from value_modes import TABLE, ModelConfig, beside_the_plan, equation_of, kv_floats_per_token, plan_layers


@dataclass(frozen=True)
class PlanConfig(ModelConfig):
    """Settings of `python model.py`: what to print, and a model's shape."""

    what: str = setting("plan", "a mode's name or file, for its plan; or table, for all modes", positional=True)

    def __post_init__(self):
        if self.what != "plan" and self.value_mode != "vanilla":
            raise UserError(f"{self.what} and value_mode both say what to print; leave one of them out")
        if self.what == "table" and self.n_kv_head:
            raise UserError("each row of the table sets its own number of key heads; leave out n_kv_head")
        if self.what not in ("plan", "table"):
            self.fill("value_mode", self.what)
        super().__post_init__()


def meta_model(cfg):
    """The GPT of a config on the meta device: shapes without tensors."""
    with torch.device("meta"):
        return GPT(cfg)


def count_parameters(cfg):
    """All parameters of a model. No tensor is allocated."""
    return sum(p.numel() for p in meta_model(cfg).parameters())


def refuse_too_large(what, cfg, bytes_per_parameter, remedy):
    """Raise UserError if the machine lacks the memory for a model: the system would kill us, or somebody else."""
    needed = count_parameters(cfg) * bytes_per_parameter / 1e9
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if needed > there:
        raise UserError(f"{what} takes {needed:.1f} GB, but this machine has {there:.1f} GB; {remedy}")


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


def in_numbers(weight):
    """A mixing weight as people read it: a number, or a list if it has several, such as one for each head."""
    return weight.squeeze().tolist() if isinstance(weight, torch.Tensor) else weight


@torch.no_grad()
def mixing_weights(model):
    """[residual][layer] -> [w_self, w_source, …], as `in_numbers` has them."""
    found = [{n: list(map(in_numbers, weights)) for n, weights in mixing().items()} for mixing in model.mixing]
    # None where the layer lacks the residual, a Gate computes the weights, or map="cross" needs none
    return [[of_residual.get(n) for n in range(model.cfg.n_layer)] for of_residual in found]


def in_short(weight):
    """A weight as the plan shows it: `0.5`, or `0.1 to 0.9` if its numbers differ."""
    low, high = (f"{number:.4g}" for number in (np.min(in_numbers(weight)), np.max(in_numbers(weight))))
    return low if low == high else f"{low} to {high}"


def describe_mix(mix, weights, own):
    """`v: 0.5 own + 0.5 layer 0, learn=lerp`: what a residual mixes in a layer, with the weights that it has or starts
    from, then map and learn if they are not the defaults. A gate's weights are its factors; map="cross" has none."""
    r = mix.residual
    names = [own, *(f"layer {s}" if isinstance(s, int) else s for s in mix.sources)]
    if r.map != "cross":
        weights = r.starts(len(mix.sources)) if r.is_gated else weights
        names = [f"{in_short(weight)} {name}" for weight, name in zip(weights, names, strict=True)]
    how = [f", {name}={getattr(r, name)}" for name in ("map", "learn") if getattr(r, name) not in ("own", "fixed")]
    return f"{r.of}: {' + '.join(names)}{''.join(how)}"


def describe(cfg):
    """The plan as text: the equation, per layer who owns q, k, v and what is mixed in, then sizes."""
    mode, plan = cfg.value_mode, plan_layers(cfg)
    equation, source = equation_of(mode)
    lines = [f"{mode.name}: {equation}  {source}".rstrip()]

    # per layer: owners, then mixes with the weights at the start, which are MixingWeights' own
    starts = [MixingWeights(r, j, plan).requires_grad_(False)() for j, r in enumerate(mode.residuals)]
    for n, layer in enumerate(plan):
        owners = {t: "own" if owner == n else f"of layer {owner}" for t, owner in layer.owner.items()}
        words = [f"{t} {owners[t]:10}" for t in "qkv"]
        for i, mix in enumerate(layer.mixes):  # each on what the one before it made
            is_first = all(other.residual.of != mix.residual.of for other in layer.mixes[:i])
            words.append(describe_mix(mix, starts[mix.index].get(n), "own" if is_first else "of the mix"))
        lines.append(f"layer {n:2}  " + "  ".join(words).rstrip())

    lines += beside_the_plan(mode)

    n_parameters = count_parameters(cfg)
    kv, full = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_head * cfg.head_dim
    lines += [
        f"parameters      {n_parameters:,} ({count_multiplying(cfg):,} in matmuls), vocabulary {cfg.vocab_size:,}",
        f"training bytes  {4 * n_parameters:,} for weights, as many for gradients, twice that for AdamW, in fp32",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} floats per token = {2 * kv:,} bytes in bf16, {kv / full:.4f} × full attention's",
    ]
    return "\n".join(lines)


def notes_of(cfg, corpus, n_ranks):
    """Lines on what may be a surprise in a run with these settings of train.py, such as how often it reads its text."""
    n = cfg.max_steps * cfg.batch_tokens // cfg.block_size  # sequences
    windows = {domain: corpus.windows("train", domain) for domain in corpus.domains}
    epochs = n / sum(windows.values())
    # a domain with a large weight comes more often than the rest
    often = {domain: n * weight / windows[domain] for domain, weight in corpus.mixture.items()}
    words = [f"{times:.3g} of {domain}" for domain, times in often.items() if times > max(1, 2 * epochs)]
    more = f" ({', '.join(words)})" if words else ""
    yield f"{cfg.max_steps:,} steps read {epochs:.3g} epochs of the training text{more}"
    if cfg.warmup_steps >= cfg.max_steps:
        steps = f"the warmup takes {cfg.warmup_steps} steps, but the run has only {cfg.max_steps}"
        yield f"note: {steps}, so the rate never reaches its peak; set a smaller --warmup_steps"
    is_cpu = cfg.device == "cpu" or (cfg.device == "auto" and not torch.cuda.is_available())
    if is_cpu and cfg.dtype == "bfloat16" and pick_dtype("auto", "cpu") == torch.float32:
        yield "note: this processor has no bfloat16 arithmetic, so bfloat16 is slow here; --dtype=float32 is faster"
    if cfg.shard != "none" and n_ranks == 1:
        yield f"shard={cfg.shard} needs several ranks, and there is one; continuing without it"


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
    header = ["mode", "equation", "from", "parameters", "KV floats per token", "× vanilla's"]
    return markdown(header, rows, left=3)


def main(cfg: PlanConfig):
    if cfg.what == "table":
        shape = ModelConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(ModelConfig)})
        print(mode_table(shape))
    else:
        print(describe(cfg))
