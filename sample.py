"""Continue a prompt with a trained model, token by token from a KV cache.

    python sample.py out/demo/svformer --prompt="def main(" --num_samples=3 --temperature=0.8 --top_k=50
    python sample.py out/demo/svformer --prompt="<|endoftext|>"            a new document
    python sample.py out/demo/svformer --prompt_file=prompts.txt           continue each line, all as one batch

Prompts of several lengths go through one prefill, padded on the right, and are decoded as one batch from a RaggedCache.
Read before: model.py, checkpoint.py.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oldconfig import UserError, check_ranges, command_line, first_line, require, run_main, setting


@dataclass(frozen=True)
class SampleConfig:
    """Every setting of sample.py."""

    run: str = setting(
        "", "a run, a checkpoint's file or a Hugging Face folder; empty = the newest run below out/", positional=True
    )
    which: Literal["last", "best"] = setting("last", "which checkpoint of a run: last, or best in validation")
    prompt: str = setting("\n", "text to continue; '<|endoftext|>' in it ends a document", group="Text")
    prompt_file: str = setting("", "file with one prompt per line, instead of prompt")
    max_new_tokens: int = setting(
        200, "at most so many new tokens; fewer if the document ends or the block is full", least=1
    )
    num_samples: int = setting(1, "continuations of each prompt, all in one batch", least=1)
    temperature: float = setting(0.8, "of the softmax; 0 = always the likeliest token", least=0, group="Sampling")
    top_k: int = setting(0, "draw from the k likeliest tokens only; 0 = from all", least=0)
    top_p: float = setting(1.0, "draw from the likeliest tokens that together have this probability; 1 = from all")
    seed: int = setting(1, "the same seed and the same prompts give the same text")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "of weights and cache; auto = bf16 on a GPU that has it, else fp32"
    )
    compile: bool = setting(False, "torch.compile of decoding, with CUDA graphs on GPUs: for long texts on GPUs")

    def __post_init__(self):
        check_ranges(self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(SampleConfig, __doc__)

import torch

import checkpoint
from model import to_fp32
from runtime import clock, enough_memory, only_process, weights_dtype
from value_modes import stored_tensors

BETWEEN_CHECKS = {"cuda": 16}  # steps after which to look whether all rows have ended: a GPU waits for all work so far


class KVCache:
    """Preallocated keys and values of one batch: a (B, G, length, D) tensor for each K and V that a layer owns, where G
    is the heads of it that the layer owns.

    It stores what is attended over: keys rotated, values mixed. `nbytes` is what was really allocated.
    """

    mask = None  # causal

    def __init__(self, cfg, batch_size, length, device=None, dtype=None):
        self.length = length  # tokens there is room for
        self.pos = 0  # tokens stored
        self.tensors = {}
        for place, heads in stored_tensors(cfg).items():
            self.tensors[place] = torch.zeros(batch_size, heads, self.length, cfg.head_dim, device=device, dtype=dtype)

    def extend(self, t, n, new):
        """Append `new` (B, G, T, D) to tensor t of layer n; returns all of it, (B, G, pos + T, D)."""
        end = self.end(new.size(2))
        store = self.tensors[t, n]
        if end > self.length:
            raise ValueError(f"the KV cache holds {self.length} tokens, not {end}")
        store.narrow(2, self.pos, new.size(2)).copy_(new)
        return store.narrow(2, 0, end)

    def end(self, T):
        """One more than the last position of the next T tokens."""
        return self.pos + T

    def positions(self, T):
        """The positions of the next T tokens."""
        return slice(self.pos, self.pos + T)

    def advance(self, T):
        self.pos += T

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())


class RaggedCache(KVCache):
    """A KVCache after its prefill, to continue by one token per step with each row at a position of its own.

    lengths: how many tokens of each row are its own. The prefill stored padding behind them, which `extend` overwrites.
    No shape and no Python number changes from step to step, so one compiled graph serves all steps. A row at the end of
    the cache stays in the last slot; its output is ignored from then on.
    """

    def __init__(self, cache, lengths):
        store = next(iter(cache.tensors.values()))
        B, _, self.length, _ = store.shape
        self.tensors = cache.tensors
        self.lengths = torch.tensor(lengths, device=store.device)[:, None]  # (B, 1)
        self.batch = torch.arange(B, device=store.device)
        self.slots = torch.arange(self.length, device=store.device)
        self.next = self.lengths.clone()  # (B, 1): where each row's next token goes
        self.mask = store.new_empty(B, 1, 1, self.length)  # added to the scores
        self.reset()

    def reset(self):
        """Back to the end of the prefill."""
        self.next.copy_(self.lengths)
        self.mask.fill_(-math.inf)
        self.advance(0)  # which opens the mask up to there

    def extend(self, t, n, new):
        """Store `new` (B, G, 1, D), each row in its own slot; returns all slots, (B, G, length, D)."""
        store = self.tensors[t, n]
        heads = torch.arange(new.size(1), device=new.device)
        store[self.batch[:, None], heads, self.next] = new[:, :, 0].to(store.dtype)  # (B, G, D)
        return store

    def end(self, T):
        if T != 1:
            raise ValueError(f"rows at positions of their own take one token a step, not {T}")
        return self.length

    def positions(self, T):
        return self.next

    def advance(self, T):
        self.next.add_(T).clamp_(max=self.length - 1)
        self.mask.masked_fill_(self.slots <= self.next[:, None, None], 0)  # a row sees the slots it has reached


def sample_token(logits, generator, temperature=1.0, top_k=0, top_p=1.0):
    """One token id for each row of logits (B, V), fp32 -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-6)  # finite at any temperature
    if top_k:
        values, order = logits.topk(min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, values)
    probs = logits.softmax(dim=-1)
    if top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True)
        before = ranked.cumsum(dim=-1) - ranked
        ranked[before >= top_p] = 0  # the tokens before it already have top_p; the first token always stays
        probs = torch.zeros_like(probs).scatter(1, order, ranked)
    # what torch.multinomial computes, without its check of probs, which makes a GPU wait
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(dim=-1, keepdim=True)


def prefill(model, prompts, length):
    """Logits (B, V), at least fp32, of the token after each of B prompts (lists of ids), and their KVCache with room
    for `length` tokens. Shorter prompts are padded on the right, where causal attention hides the padding from them."""
    device, lengths = model.head.weight.device, [len(ids) for ids in prompts]
    cache = KVCache(model.cfg, len(prompts), length, device, model.head.weight.dtype)
    padded = [ids + [0] * (max(lengths) - len(ids)) for ids in prompts]
    x = model.hidden(torch.tensor(padded, device=device), cache)  # (B, T, C)
    ends = torch.tensor(lengths, device=device) - 1
    last = x[torch.arange(len(prompts), device=device), ends]  # (B, C)
    return to_fp32(model.head(last)), cache


def decode_step(model, idx, cache):
    """Logits (B, V), at least fp32, of the token after idx (B, 1)."""
    return to_fp32(model.head(model.hidden(idx, cache)[:, -1]))


def compile_decoding(model, idx, cache):
    """`decode_step` as one graph (a CUDA graph on GPUs) for this model and this RaggedCache, which is reset.
    Raises UserError where torch.compile does not work."""
    for tensor in (*cache.tensors.values(), *vars(cache).values()):
        if isinstance(tensor, torch.Tensor):  # lets a graph write to it in place instead of copying it
            torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(decode_step, mode="reduce-overhead", fullgraph=True, dynamic=False)
    try:
        for _ in range(3):  # compiles, records, replays
            compiled(model, idx, cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # a compiler's failure can be anything
        message = f"torch.compile does not work here ({type(e).__name__}: {first_line(e)}); set compile off"
        raise UserError(message) from e
    cache.reset()
    return compiled


def cut_rows(rows, limits, eot):
    """Lists of ids, each cut at its limit and before its first `eot`."""
    cut = [row[:limit] for row, limit in zip(rows, limits, strict=True)]
    return [row[: row.index(eot)] if eot in row else row for row in cut]


@torch.inference_mode()
def generate(model, prompts, n_new, num_samples=1, seed=1, eot=None, compile=False, **sampling):
    """Continue prompts by at most n_new tokens, each num_samples times, all as one batch.

    prompts: lists of token ids of any lengths, or one such list. sampling: temperature, top_k, top_p of `sample_token`.
    A row ends with its first `eot`, and where the model's block is full.
    Returns (the list of new ids, without eot, for each prompt and sample; the cache; {"prefill", "compile", "decode":
    seconds}). Raises ValueError for a prompt that is empty or longer than the block.
    """
    device, block_size = model.head.weight.device, model.cfg.block_size
    if prompts and not isinstance(prompts[0], list):
        prompts = [prompts]
    prompts = [ids for ids in prompts for _ in range(num_samples)]
    require(prompts, "no prompt is given")
    lengths = [len(ids) for ids in prompts]
    fits = 0 < min(lengths) and max(lengths) <= block_size
    message = f"prompts of {min(lengths)} to {max(lengths)} tokens; block_size={block_size} takes 1 to {block_size}"
    require(fits, message)
    limits = [min(n_new, block_size - n + 1) for n in lengths]  # the last new token needs no position of its own
    generator = torch.Generator(device).manual_seed(seed)
    began = clock(device)
    is_ragged = compile or min(lengths) < max(lengths)
    length = max(lengths) + n_new - 1
    if is_ragged and device.type == "cuda":  # its mask has rows of this length, which kernels read 16 bytes at a time
        length = math.ceil(length / 128) * 128
    logits, cache = prefill(model, prompts, min(length, block_size))
    new = [sample_token(logits, generator, **sampling)]  # (B, 1) each
    prefilled = clock(device)
    if is_ragged:
        cache = RaggedCache(cache, lengths)
    next_logits = compile_decoding(model, new[0], cache) if compile else decode_step
    compiled = clock(device)
    between_checks = BETWEEN_CHECKS.get(device.type, 1)
    ended = torch.zeros_like(new[0], dtype=torch.bool)  # (B, 1)
    for i in range(1, max(limits)):
        if eot is not None:
            ended |= new[-1] == eot
            if i % between_checks == 0 and ended.all():
                break
        new.append(sample_token(next_logits(model, new[-1], cache), generator, **sampling))
    rows = cut_rows(torch.cat(new, dim=1).tolist(), limits, eot)
    seconds = {"prefill": prefilled - began, "compile": compiled - prefilled, "decode": clock(device) - compiled}
    return rows, cache, seconds


def read_prompts(cfg):
    """The texts to continue; raises UserError if one is empty."""
    texts = [cfg.prompt.encode("utf-8", "replace").decode()]  # bytes that are not UTF-8 become "?"
    if cfg.prompt_file:
        try:
            texts = Path(cfg.prompt_file).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise UserError(f"{cfg.prompt_file} is not text in UTF-8") from None
    if "" in texts:
        where = f"line {texts.index('') + 1} of {cfg.prompt_file}" if cfg.prompt_file else "the prompt"
        raise UserError(f"{where} is empty; give some text, or '<|endoftext|>' to start a document")
    return texts


def encode_prompts(texts, tokenizer, block_size):
    """Token ids of each text, after the tokenizer's prefix. Raises UserError if one is longer than the block."""
    prompts = []
    for text in texts:
        ids = tokenizer.prefix + tokenizer.encode(text, allow_eot=True)
        if len(ids) > block_size:
            start = f"the prompt that begins {text[:20]!r} has {len(ids)} tokens"
            raise UserError(f"{start}, the model's block only {block_size}; shorten it")
        prompts.append(ids)
    return prompts


def continued(text, prompt, row, tokenizer):
    """A text and what `row` adds to it. prompt: the text's ids. Some tokenizers drop a space at the beginning of what
    they decode, so both are decoded together."""
    return text + tokenizer.decode(prompt + row)[len(tokenizer.decode(prompt)) :]


@enough_memory("set fewer --num_samples, a shorter prompt or fewer --max_new_tokens")
def main(cfg: SampleConfig):
    device = only_process(cfg.device).device
    path = checkpoint.find(cfg.run, cfg.which)
    tokenizer = checkpoint.load_tokenizer(path)
    texts = read_prompts(cfg)
    sampling = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p}
    model = checkpoint.load(path, device=device, dtype=weights_dtype(cfg.dtype, device.type))
    prompts = encode_prompts(texts, tokenizer, model.cfg.block_size)
    rows, cache, seconds = generate(
        model, prompts, cfg.max_new_tokens, cfg.num_samples, cfg.seed, tokenizer.end, cfg.compile, **sampling
    )
    for i, row in enumerate(rows):
        if len(rows) > 1:
            print(f"--- {i + 1}")
        n = i // cfg.num_samples
        print(continued(texts[n], prompts[n], row, tokenizer))
    n_read = cfg.num_samples * sum(len(ids) for ids in prompts)
    n_decoded = sum(max(0, len(row) - 1) for row in rows)  # the prefill makes the first
    parts = [f"prefill {n_read:,} tokens, {n_read / max(seconds['prefill'], 1e-9):,.0f} tokens/s"]
    if cfg.compile:
        parts.append(f"compiled in {seconds['compile']:.1f} s")
    parts.append(f"decode {n_decoded:,} tokens, {n_decoded / max(seconds['decode'], 1e-9):,.0f} tokens/s")
    per_token = cache.nbytes // (len(rows) * cache.length)
    parts.append(f"KV cache {cache.nbytes:,} bytes = {len(rows)} x {cache.length} tokens x {per_token}")
    print(f"\n[{'; '.join(parts)}]")


if __name__ == "__main__":
    run_main(main, SETTINGS)
