"""What a run needs: memory of a rank, speed, network and disk, computed from its config and from train.py's own rules.

python model.py budget config/size_468m.py --gpus=64 --card=H100
"""

import functools
import sys
from dataclasses import dataclass

from describe import count_parameters, describe, flops_per_token, meta_model, mode_table
from oldconfig import UserError, load_settings, run_main, setting
from report import markdown
from value_modes import ModelConfig


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


def command(usage):
    """`python model.py …`: a plan; after the word `table` all modes, after `budget` a budget. Ends the process. The
    settings are checked before torch is imported."""
    words, what, settings = sys.argv[1:], describe, ModelConfig
    if words[:1] == ["table"]:
        words, what = words[1:], mode_table
    elif words[:1] == ["budget"]:
        words, what, settings = words[1:], budget, BudgetConfig

    def answer():
        print(what(load_settings(settings, words, usage, ignore_unknown_in_files=True)))

    run_main(answer)
    sys.exit(0)


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


def rank_memory(cfg):
    """A Markdown table of what each rank holds, for each number of ranks and each --shard."""
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
    n_parameters, n_tokens = count_parameters(cfg), cfg.tokens or cfg.max_steps * cfg.batch_tokens
    lines = [
        f"{cfg.value_mode.name}: {n_parameters:,} parameters, {n_tokens:,} tokens in steps of {cfg.batch_tokens:,}. "
        "All figures are computed, none is measured.",
        "Memory of a rank. Kept from forward to backward: activations, and the weights in bf16.",
        rank_memory(cfg),
        f"Speed at {cfg.utilisation:.0%} of peak, {flops_per_token(cfg):,} FLOPs per token. GB/s are sent by a rank.",
        speed_table(cfg, n_tokens),
        f"Disk: {2 * n_tokens / 1e9:.3g} GB of tokens, {12 * n_parameters / 1e9:.3g} GB for each checkpoint.",
    ]
    return "\n\n".join(lines)
