"""Continue prompts with a trained model.

    python sample.py                                                           the newest run under out/
    python sample.py out/demo/svformer-320-0.002-42 --prompt="def f(" --num_samples=3
    python sample.py out/demo/svformer-320-0.002-42 --prompt="<|endoftext|>"   a new document
    python sample.py out/demo/svformer-320-0.002-42 --prompt_file=prompts.txt  continue each line, all as one batch

Read first: model.py, for the KVCache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import checkpoint
from common.files import reading
from common.ranks import clock, enough_memory, only_process, weights_dtype
from configurator import UserError, check_fields, run, setting
from model import KVCache
from net.layers import to_fp32

CHECK_EVERY = 16  # steps. Checking whether all rows have ended makes a GPU wait


@dataclass(frozen=True)
class SampleConfig:
    """Every setting of sample.py."""

    run: str = setting("", "run, checkpoint or Hugging Face folder; empty = the newest run in out/", positional=True)
    prompt: str = setting("\n", "text to continue; '<|endoftext|>' in it ends a document", group="Text")
    prompt_file: str = setting("", "file with one prompt per line, instead of prompt")
    max_new_tokens: int = setting(200, "how many new tokens; fewer if the document or the block ends", 1, 10**6)
    num_samples: int = setting(1, "continuations of each prompt, all in one batch", least=1, most=10**5)
    temperature: float = setting(0.8, "temperature of the softmax; 0 = always the likeliest token", 0, group="Sampling")
    top_k: int = setting(0, "draw from the k likeliest tokens only; 0 = from all", least=0)
    seed: int = setting(1, "random seed; the same seed and prompts give the same text")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "of weights; auto = bf16 on newer GPUs")
    compile: bool = setting(False, "torch.compile each step, with CUDA graphs on GPUs; worth it for long texts on GPUs")

    def __post_init__(self):
        check_fields(self)


def sample_token(logits, generator, temperature=1.0, top_k=0):
    """One token id for each row of logits (B, V), fp32 -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-6)  # finite at any temperature
    # top_k: all but the k likeliest tokens get no probability.
    if top_k:
        values, order = logits.topk(min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, values)

    probs = logits.softmax(dim=-1)
    # This is what torch.multinomial computes, without its check of probs, which makes a GPU wait.
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(dim=-1, keepdim=True)


def next_logits(model, idx, cache):
    """Logits (B, V), at least fp32, of the token after idx (B, T)."""
    return to_fp32(model.head(model.hidden(idx, cache)[:, -1]))


def as_graph(step, generator):
    """On a GPU, step() as a CUDA graph: one launch in place of a hundred. It repeats the same kernels on the same
    memory, so whatever changes from step to step must be in tensors there. A Python number would stay as it was."""
    if generator.device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)  # else each replay would draw the same numbers
    with torch.cuda.graph(graph):  # records the step and does not run it
        step()
    return graph.replay


@torch.inference_mode()
def generate(model, prompts, n_new, num_samples=1, seed=1, eot=None, compile=False, **sampling):
    """Continue prompts by at most n_new tokens, each num_samples times, all as one batch: one pass over the prompts,
    then one token a step from the KV cache.

    prompts: lists of token ids, of any lengths. sampling: temperature and top_k of `sample_token`.
    A row ends with its first `eot`, or where the model's block is full. Returns (the list of new ids, without eot, for
    each prompt and sample; the cache; seconds of the "prefill", of the first step with compiling ("compile") and of the
    others ("decode")).
    """
    device, block_size = model.norm.weight.device, model.cfg.block_size
    prompts = [ids for ids in prompts for _ in range(num_samples)]
    lengths = [len(ids) for ids in prompts]
    assert 1 <= min(lengths) and max(lengths) <= block_size, f"prompts have 1 to {block_size} tokens, not {lengths}"
    limits = [min(n_new, block_size - n + 1) for n in lengths]  # the last new token needs no position of its own
    generator = torch.Generator(device).manual_seed(seed)
    began = clock(device)

    # All tokens lie in one tensor, prompts and then what we append. We pad on the left, because then every row's next
    # token goes into the same column. cache.next is the newest token's column; running the model moves it to the next.
    start, n_most = max(lengths), max(limits)
    padded = [[0] * (start - len(ids)) + ids + [0] * n_most for ids in prompts]
    text = torch.tensor(padded, device=device)  # (B, start + n_most)
    cache = KVCache(model.cfg, lengths, start + n_most - 1, device, model.norm.weight.dtype)

    def append(to_logits, idx):
        logits = to_logits(model, idx, cache)
        text.index_copy_(1, cache.next, sample_token(logits, generator, **sampling))

    # One pass over the prompts fills the cache and gives the first new token of each row.
    append(next_logits, text[:, :start])
    seconds = {"prefill": clock(device) - began, "compile": 0.0}

    # A step has the same shapes each time if it reads all slots of the cache.
    cache.is_static = compile
    to_logits = torch.compile(next_logits, fullgraph=True, dynamic=False) if compile else next_logits

    def step():
        append(to_logits, text.index_select(1, cache.next))

    # Then one token a step. A row that has ended goes on until all have, and we cut it below.
    began = clock(device)
    for i in range(1, n_most):
        if eot is not None and i % CHECK_EVERY == 0 and (text[:, start : start + i] == eot).any(dim=1).all():
            break
        step()
        if i == 1:
            step = as_graph(step, generator) if compile else step
            seconds["compile"], began = clock(device) - began, clock(device)
    seconds["decode"] = clock(device) - began

    # Each row ends where its block is full, or with its first end-of-text.
    rows = [row[:limit] for row, limit in zip(text[:, start:].tolist(), limits, strict=True)]
    rows = [row[: row.index(eot)] if eot in row else row for row in rows]
    return rows, cache, seconds


def read_prompts(cfg):
    """The texts to continue."""
    texts = [cfg.prompt]
    if cfg.prompt.startswith("FILE:"):
        raise UserError(f"prompt={cfg.prompt} is a nanoGPT setting; here, set --prompt_file={cfg.prompt[5:]}")
    if "\\n" in cfg.prompt:
        print("note: \\n in the prompt is two characters; in a shell, write $'\\n' for a line break")
    if cfg.prompt_file:
        with reading(cfg.prompt_file, "a UTF-8 file with one prompt per line", "name a text file"):
            texts = Path(cfg.prompt_file).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    if "" in texts:
        raise UserError(f"prompt {texts.index('') + 1} is empty; give text, or '<|endoftext|>' to start a document")
    return texts


@enough_memory("use fewer --num_samples, a shorter prompt or fewer --max_new_tokens")
def main(cfg: SampleConfig):
    device = only_process(cfg.device).device
    path = checkpoint.find(cfg.run)
    tokenizer = checkpoint.load_tokenizer(path)
    texts = read_prompts(cfg)
    model = checkpoint.load(path, device=device, dtype=weights_dtype(cfg.dtype, device.type))
    prompts = [tokenizer.prefix + tokenizer.encode(text, allow_eot=True) for text in texts]
    for number, ids in enumerate(prompts, 1):
        if len(ids) > model.cfg.block_size:
            raise UserError(f"prompt {number}: {len(ids)} tokens exceed the block's {model.cfg.block_size}; shorten it")

    how = {"temperature": cfg.temperature, "top_k": cfg.top_k, "compile": cfg.compile}
    rows, cache, seconds = generate(model, prompts, cfg.max_new_tokens, cfg.num_samples, cfg.seed, tokenizer.end, **how)
    for i, row in enumerate(rows):
        if len(rows) > 1:
            print(f"--- {i + 1}")
        text, ids = texts[i // cfg.num_samples], prompts[i // cfg.num_samples]
        # Some tokenizers drop a space where their text begins, so we decode prompt and continuation together.
        print(text + tokenizer.decode(ids + row)[len(tokenizer.decode(ids)) :])

    # The first two new tokens are the prefill's and the compiler's, so we leave them out of the rate.
    n_read, n_new = cfg.num_samples * sum(map(len, prompts)), sum(max(0, len(row) - 2) for row in rows)
    rate, per_token = n_new / max(seconds["decode"], 1e-9), cache.nbytes // (len(rows) * cache.length)
    print(f"\n[prefill {n_read:,} tokens, {seconds['prefill']:.2f} s; decode {n_new:,} tokens, {rate:,.0f} tokens/s]")
    dtype = str(model.head.weight.dtype).removeprefix("torch.")
    print(f"[KV cache {cache.nbytes:,} bytes = {len(rows)} x {cache.length} tokens x {per_token:,} in {dtype}]")
    if max(len(prompts[i // cfg.num_samples]) + len(row) for i, row in enumerate(rows)) > model.cfg.block_size:
        print(f"[the block of {model.cfg.block_size} tokens is full, so the text ends here]")


if __name__ == "__main__":
    run(main, __doc__)
