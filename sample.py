"""Continue a prompt with a trained model, token by token from a KV cache.

python sample.py out/resformer --prompt="def main(" --num_samples=3 --temperature=0.8 --top_k=50
python sample.py out/svformer --prompt="<|endoftext|>"            a new document
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
from configurator import UserError, load, run, setting
from data import Tokenizer
from model import KVCache
from train import World


@dataclass(frozen=True)
class SampleConfig:
    """Every setting of sample.py."""

    run: str = setting("out/resformer", "a run's folder, or a checkpoint's file")
    which: Literal["last", "best"] = setting("last", "which checkpoint of a run: last, or best in validation")
    prompt: str = setting("\n", "text to continue; '<|endoftext|>' in it is the end of a document")
    max_new_tokens: int = setting(200, "tokens to add, at most; a sample also ends with its document")
    num_samples: int = setting(1, "continuations, made at once as one batch")
    temperature: float = setting(0.8, "of the softmax; 0 = always the likeliest token")
    top_k: int = setting(0, "draw from the k likeliest tokens only; 0 = from all")
    top_p: float = setting(1.0, "draw from the likeliest tokens that together have this probability; 1 = from all")
    seed: int = setting(1, "same seed, same text")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of weights and cache")

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.num_samples < 1:
            raise ValueError("max_new_tokens and num_samples must be at least 1")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature and top_k must be at least 0, and top_p above 0 and at most 1")


def draw(logits, generator, temperature=1.0, top_k=0, top_p=1.0):
    """One token id for each row of logits (B, V), fp32 -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-6)  # finite, however cold
    if top_k:
        values, order = logits.topk(min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, values)
    probs = logits.softmax(dim=-1)
    if top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True)
        ranked[ranked.cumsum(dim=-1) - ranked >= top_p] = 0  # those before it already have top_p: the first one stays
        probs = torch.zeros_like(probs).scatter(1, order, ranked)
    return torch.multinomial(probs, 1, generator=generator)


@torch.inference_mode()
def generate(model, ids, n_new, num_samples=1, seed=1, eot=None, **how):
    """Continue token ids (a list) by at most n_new tokens, num_samples times.

    how: temperature, top_k, top_p of `draw`. Ends early when all samples have drawn `eot`, and where the model's block
    is full. Returns (list of lists of new ids, without eot; the KVCache; seconds of prefill; seconds of decoding).
    """
    device, dtype = model.head.weight.device, model.head.weight.dtype

    def clock():
        if device.type == "cuda":  # whose work is otherwise only launched
            torch.cuda.synchronize()
        return time.perf_counter()

    n_new = min(n_new, model.cfg.block_size - len(ids) + 1)  # the last new token needs no position of its own
    cache = KVCache(model.cfg, num_samples, len(ids) + n_new - 1, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    idx, new, start = torch.tensor([ids] * num_samples, device=device), [], clock()
    ended = torch.zeros(num_samples, 1, dtype=torch.bool, device=device)
    for i in range(n_new):
        logits = model.head(model.hidden(idx, cache)[:, -1]).float()  # (B, V): the head at the last position only
        idx = draw(logits, generator, **how)
        new.append(idx)
        if i == 0:
            prefill = clock() - start
        if eot is not None:
            ended |= idx == eot
            if ended.all():
                break
    rows = torch.cat(new, dim=1).tolist()
    rows = [row[: row.index(eot)] if eot in row else row for row in rows]
    return rows, cache, prefill, clock() - start - prefill


def load_tokenizer(weights_file):
    """The tokenizer beside a checkpoint; raises UserError if it is not there or not the one of the training data."""
    tokenizer = Tokenizer.load(Path(weights_file).parent / "tokenizer.json")
    if tokenizer.hash != checkpoint.read_header(weights_file)["tokenizer"]:
        raise UserError(
            f"{Path(weights_file).parent}/tokenizer.json is not the tokenizer {weights_file} was trained with"
        )
    return tokenizer


def main():
    cfg = load(SampleConfig, positional="run", usage=__doc__)
    device, path = World(cfg.device).device, checkpoint.find(cfg.run, cfg.which)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(cfg.prompt, allow_eot=True)
    if not ids:
        raise UserError("the prompt is empty; give some text, or --prompt='<|endoftext|>' to start a document")
    model = checkpoint.load(path, device=device).to(getattr(torch, cfg.dtype))
    if len(ids) > model.cfg.block_size:
        raise UserError(f"the prompt has {len(ids)} tokens, the model's block only {model.cfg.block_size}; shorten it")
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    rows, cache, prefill, seconds = generate(
        model, ids, cfg.max_new_tokens, cfg.num_samples, cfg.seed, tokenizer.eot, **how
    )
    for i, row in enumerate(rows):
        print(f"--- {i + 1}\n" * (len(rows) > 1) + cfg.prompt + tokenizer.decode(row))
    n, each = sum(max(0, len(row) - 1) for row in rows), cache.nbytes // (len(rows) * cache.length)
    print(
        f"\n[{len(ids)} prompt tokens in {prefill:.3f} s, then {n / max(seconds, 1e-9):,.0f} tokens/s; "
        f"KV cache {cache.nbytes:,} bytes = {len(rows)} x {cache.length} tokens x {each}]"
    )


if __name__ == "__main__":
    run(main)
