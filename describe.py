"""A model before it is trained: its plan, parameters, FLOPs and KV cache, as `python model.py` prints them."""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

import model
from configurator import load_settings
from model import GPT, Lambdas
from value_modes import TABLE, ModelConfig, active, kv_floats_per_token, mode_name, plan_layers


def count_parameters(cfg):
    """(all parameters, those that multiply: matrices without the embeddings). Builds nothing but shapes."""
    with torch.device("meta"):
        model = GPT(cfg)
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    every = sum(p.numel() for p in model.parameters())
    return every, sum(p.numel() for p in model.parameters() if p.ndim == 2) - looked_up


def flops_per_token(cfg):
    """Training FLOPs per token, 6 N + 12 L C T with N the parameters that multiply (PaLM, appendix B: attention counted
    in full, not causal), at T = block_size. Half of 12 C T is q k^T, half A V; residuals on them add their own."""
    halves = 2 * cfg.n_layer
    for layer in plan_layers(cfg):
        for _, r, sources in active(cfg.value_mode, layer):
            halves += len(sources) * (2 * (r.map == "cross" or r.of == "probs") + (r.of == "scores"))
    return 6 * count_parameters(cfg)[1] + 6 * halves * cfg.n_embd * cfg.block_size


def describe_residual(r, sources, weights):
    """What residual r does in a layer, in words; weights: those it has or starts from, see Lambdas."""
    where = " ".join(f"layer {i}" if i >= 0 else f"table {-1 - i}" for i in sources)
    if r.map == "cross":
        return f"attends over {where} too"
    what = r.of if r.map == "own" else f"{r.of} {r.map}"
    if r.per_token:
        return f"{what}: {r.learn} gate between own and {where}"
    own, *each = (float(w) for w in weights)
    learned = f" ({r.learn}, learned)" if r.learn != "fixed" else ""
    return f"{what}: {own:.4g} own + {each[0]:.4g} {'of each ' * (len(each) > 1)}{where}{learned}"


def describe(cfg):
    """The plan as text: the equation, per layer who owns q, k, v and what is mixed in, then sizes."""
    mode, name = cfg.value_mode, mode_name(cfg.value_mode)
    _, equation, source = TABLE.get(name, (mode, "", ""))
    lines = [name + f": {equation}" * bool(equation) + f" ({source})" * bool(source)]
    plan = plan_layers(cfg)
    lambdas = [Lambdas(r, [layer.sources[j] for layer in plan]) for j, r in enumerate(mode.residuals)]
    start = [weights.requires_grad_(False)() for weights in lambdas]  # [residual][layer]
    for n, layer in enumerate(plan):
        words = [f"{t} {'own' if layer.owner[t] == n else f'of layer {layer.owner[t]}':10}" for t in "qkv"]
        words += [describe_residual(r, sources, start[j][n]) for j, r, sources in active(mode, layer)]
        lines.append(f"layer {n:2}  " + "  ".join(words).rstrip())
    if mode.dense:
        lines.append(f"after each {mode.dense[1]} blocks: weighted average over depth, dilation {mode.dense[0]}")
    every, multiply = count_parameters(cfg)
    kv, most = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_embd
    lines += [
        f"heads           {cfg.n_head} of width {cfg.head_dim}, {cfg.n_kv_head} of keys and values",
        f"parameters      {every:,} ({multiply:,} multiply)",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} numbers per token = {2 * kv:,} bytes in bf16, {kv / most:.4f} of full attention's",
    ]
    return "\n".join(lines)


def table(cfg):
    """All rows of TABLE at the shape of `cfg`, as Markdown."""
    vanilla = count_parameters(dataclasses.replace(cfg, value_mode="vanilla", n_kv_head=0))[0]
    lines = ["| mode | equation | from | parameters | KV numbers per token | of vanilla's | config |"]
    lines += ["|---|---|---|---:|---:|---:|---|"]
    for name, (_, equation, source) in TABLE.items():
        try:
            row = dataclasses.replace(cfg, value_mode=name, n_kv_head=0)
        except ValueError:
            continue  # not with so many layers or heads
        more, kv = count_parameters(row)[0] - vanilla, kv_floats_per_token(row)
        numbers = f"{more:+,} | {kv:,}" if more else f"±0 | {kv:,}"
        file = Path(__file__).with_name("config") / f"{name}.py"
        config = f"config/{name}.py" if file.exists() else f"--value_mode={name}"
        share = kv / (2 * cfg.n_layer * cfg.n_embd)
        lines.append(f"| `{name}` | {equation} | {source} | {numbers} | {share:.4g} | `{config}` |")
    return "\n".join(lines)


def main():
    from train import TrainConfig

    words = sys.argv[1:]
    names = TrainConfig.__dataclass_fields__  # a run's config file says more than a model's shape
    cfg = load_settings(ModelConfig, words[words[:1] == ["table"] :], usage=model.__doc__, skip=names)
    print(table(cfg) if words[:1] == ["table"] else describe(cfg))
