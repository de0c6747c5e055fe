"""Continue a prompt with a trained model, token by token from a KV cache.

python sample.py out/resformer --prompt="def main(" --num_samples=3 --temperature=0.8 --top_k=50
python sample.py out/svformer --prompt="<|endoftext|>"            a new document
python sample.py out/svformer --prompt_file=prompts.txt           each line's continuation, all as one batch
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
from checkpoint import load_tokenizer
from configurator import UserError, command_line, run_main, setting
from model import to_fp32
from runtime import Distributed
from value_modes import plan_layers, refuse

LOOK = {"cuda": 16}  # steps after which to look whether all rows have ended: a GPU has to wait for whoever looks


@dataclass(frozen=True)
class SampleConfig:
    """Every setting of sample.py."""

    run: str = setting("out/resformer", "a run's folder, or a checkpoint's file", positional=True)
    which: Literal["last", "best"] = setting("last", "which checkpoint of a run: last, or best in validation")
    prompt: str = setting("\n", "text to continue; '<|endoftext|>' in it is the end of a document")
    prompt_file: str = setting("", "file of prompts, one in each line, instead of prompt")
    max_new_tokens: int = setting(200, "tokens to add, at most; a sample also ends with its document")
    num_samples: int = setting(1, "continuations of each prompt, made at once as one batch")
    temperature: float = setting(0.8, "of the softmax; 0 = always the likeliest token")
    top_k: int = setting(0, "draw from the k likeliest tokens only; 0 = from all")
    top_p: float = setting(1.0, "draw from the likeliest tokens that together have this probability; 1 = from all")
    seed: int = setting(1, "same seed, same text")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of weights and cache")
    compile: bool = setting(False, "torch.compile of decoding, with CUDA graphs on GPUs: for long texts on GPUs")

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.num_samples < 1:
            raise ValueError("max_new_tokens and num_samples must be at least 1")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature and top_k must be at least 0, and top_p above 0 and at most 1")


class KVCache:
    """Preallocated keys and values of one batch: one (B, G, length, D) tensor for each K and V that a layer owns.

    What is stored is what is attended over: keys rotated, values mixed. `nbytes` is what was really allocated.
    """

    mask = None  # causal

    def __init__(self, cfg, batch_size, length=None, device=None, dtype=None):
        self.length, self.pos = length or cfg.block_size, 0  # tokens there is room for, tokens stored
        shape = (batch_size, cfg.n_kv_head, self.length, cfg.head_dim)
        self.tensors = {
            (t, n): torch.zeros(shape, device=device, dtype=dtype)
            for n, layer in enumerate(plan_layers(cfg))
            for t in "kv"
            if layer.owner[t] == n
        }

    def extend(self, t, n, new):
        """Store `new` (B, G, T, D) behind what layer n's tensor t holds; returns all of it, (B, G, pos + T, D)."""
        end, store = self.end(new.size(2)), self.tensors[t, n]
        if end > self.length:
            raise ValueError(f"the KV cache holds {self.length} tokens, not {end}")
        store.narrow(2, self.pos, new.size(2)).copy_(new)
        return store.narrow(2, 0, end)

    def end(self, T):
        """One more than the last position of the T tokens that come next."""
        return self.pos + T

    def positions(self, T):
        """Their positions."""
        return slice(self.pos, self.pos + T)

    def advance(self, T):
        self.pos += T

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())


class RaggedCache(KVCache):
    """A KVCache after its prefill, to go on from by one token a step, each row at a position of its own.

    lengths: how many tokens of each row are its own; what the prefill stored behind them is filling, which `extend`
    overwrites. No shape and no number in Python changes from step to step, so that one compiled graph serves them all.
    Nor does a row's end stop the others: it stays in the last slot, and what the model says there from then on is void.
    """

    def __init__(self, cache, lengths):
        store = next(iter(cache.tensors.values()))
        refuse(len(lengths) != len(store), f"{len(lengths)} lengths for a KV cache of {len(store)} rows")
        shortest, longest = min(lengths), max(lengths)
        wrong = not 0 < shortest <= longest <= cache.pos
        refuse(wrong, f"rows of {shortest} to {longest} tokens in a KV cache that holds {cache.pos}")
        B, G, self.length, _ = store.shape
        self.tensors, self.lengths = cache.tensors, torch.tensor(lengths, device=store.device)[:, None]  # (B, 1)
        self.batch, self.heads, self.slots = (torch.arange(n, device=store.device) for n in (B, G, self.length))
        self.rows = self.lengths.clone()  # where each row's next token stands
        self.mask = store.new_empty(B, 1, 1, self.length)
        self.reset()

    def reset(self):
        """Back to the end of the prefill."""
        self.rows.copy_(self.lengths)
        self.mask.fill_(-math.inf)
        self.advance(0)

    def extend(self, t, n, new):
        """Store `new` (B, G, 1, D), each row in its own slot; returns all slots, (B, G, length, D)."""
        store = self.tensors[t, n]
        store[self.batch[:, None], self.heads, self.rows] = new[:, :, 0].to(store.dtype)  # (B, G, D)
        return store

    def end(self, T):
        refuse(T != 1, f"rows at positions of their own take one token a step, not {T}")
        return self.length

    def positions(self, T):
        return self.rows

    def advance(self, T):
        self.rows.add_(T).clamp_(max=self.length - 1)
        self.mask.masked_fill_(self.slots <= self.rows[:, None, None], 0)  # open what a row has reached


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
    # what torch.multinomial computes, without its check of probs, for which a GPU would have to wait
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(dim=-1, keepdim=True)


def prefill(model, prompts, length):
    """Logits (B, V), at least fp32, of the token that follows each of B prompts (lists of ids), and their KVCache with
    room for `length` tokens. Shorter ones are filled up on the right, where causal attention hides it from them."""
    device, lengths = model.head.weight.device, [len(ids) for ids in prompts]
    cache = KVCache(model.cfg, len(prompts), length, device, model.head.weight.dtype)
    idx = torch.tensor([ids + [0] * (max(lengths) - len(ids)) for ids in prompts], device=device)  # (B, T)
    x = model.hidden(idx, cache)[torch.arange(len(prompts)), torch.tensor(lengths) - 1]  # (B, C): at each one's last
    return to_fp32(model.head(x)), cache


def step(model, idx, cache):
    """Logits (B, V), at least fp32, of the token that follows idx (B, 1)."""
    return to_fp32(model.head(model.hidden(idx, cache)[:, -1]))


def compiled(model, idx, rows):
    """`step` as one graph (a CUDA graph on GPUs) for this model and this RaggedCache, which it leaves as they were.
    Raises UserError where torch.compile does not work."""
    for tensor in (*rows.tensors.values(), *vars(rows).values()):
        if isinstance(tensor, torch.Tensor):  # a graph may then write to it in its place, and need not copy it
            torch._dynamo.mark_static_address(tensor)
    run = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
    try:
        for _ in range(3):  # compiles, records, replays
            run(model, idx, rows)
    except Exception as e:  # a compiler's failure can be anything
        reason = next(iter(str(e).splitlines()), "")
        raise UserError(f"torch.compile does not work here ({type(e).__name__}: {reason}); leave --compile out") from e
    rows.reset()
    return run


def clock(device):
    if device.type == "cuda":  # whose work is otherwise only launched
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def generate(model, prompts, n_new, num_samples=1, seed=1, eot=None, compile=False, **how):
    """Continue prompts (lists of token ids of any lengths, or one such list) by at most n_new tokens, each num_samples
    times, all as one batch.

    how: temperature, top_k, top_p of `draw`. A row ends with its first `eot` and where the model's block is full.
    Returns (for each prompt and sample the list of new ids, without eot; the KVCache; seconds by what took them:
    "prefill", "compile", "decode"). Raises ValueError for a prompt that is empty or longer than the block.
    """
    device, block = model.head.weight.device, model.cfg.block_size
    prompts = prompts if isinstance(next(iter(prompts), 0), list) else [prompts]
    prompts = [ids for ids in prompts for _ in range(num_samples)]
    lengths = [len(ids) for ids in prompts]
    if not 0 < min(lengths) <= max(lengths) <= block:
        raise ValueError(f"prompts of {min(lengths)} to {max(lengths)} tokens; block_size={block} takes 1 to {block}")
    limits = [min(n_new, block - n + 1) for n in lengths]  # the last new token needs no position of its own
    length = min(max(lengths) + n_new - 1, block)
    generator, times = torch.Generator(device).manual_seed(seed), [clock(device)]
    logits, cache = prefill(model, prompts, length)
    new = [draw(logits, generator, **how)]
    times.append(clock(device))
    if compile or min(lengths) < max(lengths):
        cache = RaggedCache(cache, lengths)
    run = compiled(model, new[0], cache) if compile else step
    times.append(clock(device))
    look = LOOK.get(device.type, 1)
    ended = torch.zeros_like(new[0], dtype=torch.bool)  # (B, 1)
    for i in range(1, max(limits)):
        if eot is not None:
            ended |= new[-1] == eot
            if i % look == 0 and ended.all():
                break
        new.append(draw(run(model, new[-1], cache), generator, **how))
    rows = [row[:limit] for row, limit in zip(torch.cat(new, dim=1).tolist(), limits, strict=True)]
    rows = [row[: row.index(eot)] if eot in row else row for row in rows]
    parts = zip(("prefill", "compile", "decode"), times, [*times[1:], clock(device)], strict=True)
    return rows, cache, {name: stop - start for name, start, stop in parts}


def read_prompts(cfg):
    """The texts to continue; raises UserError if one is empty."""
    if not cfg.prompt_file:
        if not cfg.prompt:
            raise UserError("the prompt is empty; give some text, or --prompt='<|endoftext|>' to start a document")
        return [cfg.prompt]
    try:
        texts = Path(cfg.prompt_file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{cfg.prompt_file} is not text in UTF-8") from None
    if "" in texts:
        where = f"line {texts.index('') + 1} of {cfg.prompt_file}"
        raise UserError(f"{where} is empty; give some text, or <|endoftext|> to start a document")
    return texts


def rate(tokens, seconds):
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"


def main(cfg: SampleConfig):
    device, path = Distributed(cfg.device).device, checkpoint.find(cfg.run, cfg.which)
    tokenizer = load_tokenizer(path)
    texts, model = read_prompts(cfg), checkpoint.load(path, device=device).to(getattr(torch, cfg.dtype))
    prompts, block = [tokenizer.encode(text, allow_eot=True) for text in texts], model.cfg.block_size
    for text, ids in zip(texts, prompts, strict=True):
        if len(ids) > block:
            start = f", which begins {text[:20]!r}," if cfg.prompt_file else ""
            raise UserError(f"the prompt{start} has {len(ids)} tokens, the model's block only {block}; shorten it")
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, compile=cfg.compile)
    rows, cache, seconds = generate(model, prompts, cfg.max_new_tokens, cfg.num_samples, cfg.seed, tokenizer.eot, **how)
    for i, row in enumerate(rows):
        print(f"--- {i + 1}\n" * (len(rows) > 1) + texts[i // cfg.num_samples] + tokenizer.decode(row))
    read, made = cfg.num_samples * sum(map(len, prompts)), sum(max(0, len(row) - 1) for row in rows)
    each = cache.nbytes // (len(rows) * cache.length)
    print(
        f"\n[prefill {read:,} tokens, {rate(read, seconds['prefill'])}; "
        + f"compiled in {seconds['compile']:.1f} s; " * cfg.compile
        + f"decode {made:,} tokens, {rate(made, seconds['decode'])}; "
        f"KV cache {cache.nbytes:,} bytes = {len(rows)} x {cache.length} tokens x {each}]"
    )


if __name__ == "__main__":
    run_main(main, command_line(SampleConfig, __doc__))
