"""Value residual learning in one file that needs only torch: a small GPT, its training, its KV cache.

    python minimal.py input.txt --value_mode=resformer      trains vanilla and ResFormer side by side, then writes text

The idea is the three ifs on value_mode in Attention.forward. The rest is a Llama, laid out like nanoGPT. From the same
weights model.py computes the same numbers; it has all the other variants. Paper: https://arxiv.org/abs/2410.17897.

Shapes: B sequences, T tokens, C n_embd, H heads, D = C / H, V characters.
"""

import argparse
import math
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

MODES = ("vanilla", "resformer", "svformer", "neutreno")


@dataclass
class Config:
    vocab_size: int = 65
    block_size: int = 128
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 96
    value_mode: str = "vanilla"
    seed: int = 1  # for the initial weights


def apply_rope(x, positions):
    """x (B, H, T, D): pair i, which is x_i and x_{i + D/2}, turns by position * 10000^(-2 i / D) radians
    (https://arxiv.org/abs/2104.09864)."""
    half = x.size(-1) // 2
    rates = 1 / 10000 ** (torch.arange(half, device=x.device) / half)  # (D/2,)
    angles = positions[:, None] * rates  # (T, D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def extend(cache, name, new):
    """Append the keys or values of these tokens, (B, H, T, D), to those of earlier ones. Returns them all."""
    old = cache.get(name)
    cache[name] = new if old is None else torch.cat([old, new], dim=2)
    return cache[name]


class Attention(nn.Module):
    def __init__(self, cfg, n):
        super().__init__()
        self.n, self.n_head, self.value_mode = n, cfg.n_head, cfg.value_mode
        self.q, self.k, self.v, self.out = (nn.Linear(cfg.n_embd, cfg.n_embd, bias=False) for _ in range(4))
        if cfg.value_mode == "svformer" and n > 0:
            self.v = None  # no weights, and nothing in the cache

    def heads(self, x):
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)

    def attention_weights(self, x, positions, cache):
        """A_n: how much each token takes from itself and from each one before it, (B, H, T, tokens so far)."""
        q = apply_rope(self.heads(self.q(x)), positions)
        k = extend(cache, f"k{self.n}", apply_rope(self.heads(self.k(x)), positions))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        future = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.size(2) - q.size(2))
        A = scores.masked_fill(future, -math.inf).softmax(-1)
        self.A = A.detach()  # for pictures
        return A

    def forward(self, x, positions, v_1, cache):
        """x (B, T, C) and layer 1's values v_1 (B, H, T, D), None in that layer itself -> (B, T, C) and v_1."""
        A = self.attention_weights(x, positions, cache)
        v = self.heads(self.v(x)) if self.v else None
        if v_1 is None:
            v_1 = v  # this is layer 1; all later layers get its values

        if self.value_mode == "resformer":
            v = (v + v_1) / 2  # Eq 7: half mine, half layer 1's
        if self.value_mode == "svformer" and self.n > 0:
            values = cache["v0"]  # Eq 10: layer 1's instead of mine; I cache none
        else:
            values = extend(cache, f"v{self.n}", v)  # mine, after those of earlier tokens
        u = A @ values  # Eq 1: attention averages values
        if self.value_mode == "neutreno":
            u = u + 0.4 * (v_1 - v)  # Eq 8: after attention, at the token's own position

        return self.out(u.transpose(1, 2).flatten(2)), v_1  # (B, H, T, D) -> (B, T, C)


class Block(nn.Module):
    def __init__(self, cfg, n):
        super().__init__()
        C, hidden = cfg.n_embd, 7 * cfg.n_embd // 2
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.attn = Attention(cfg, n)
        self.gate, self.up = nn.Linear(C, hidden, bias=False), nn.Linear(C, hidden, bias=False)
        self.down = nn.Linear(hidden, C, bias=False)

    def forward(self, x, positions, v_1, cache):
        y, v_1 = self.attn(self.norm1(x), positions, v_1, cache)
        x = x + y
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), v_1


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg, n) for n in range(cfg.n_layer))
        self.norm = nn.RMSNorm(cfg.n_embd, eps=1e-5)
        self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # a matrix depends on the seed and its name alone, so all modes start from the same weights
                torch.manual_seed(cfg.seed + zlib.crc32(name.encode()))
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets=None, cache=None):
        """Tokens (B, T) -> logits (B, T, V), and the loss in nats if there are targets (B, T). cache: a dict that
        keeps keys and values for the next call; the first call gets an empty one."""
        cache = {} if cache is None else cache
        start = cache["k0"].size(2) if cache else 0
        positions = torch.arange(start, start + idx.size(1), device=idx.device)
        x, v_1 = self.embed(idx), None
        for block in self.blocks:
            x, v_1 = block(x, positions, v_1, cache)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, n):
        """Tokens (1, T) -> (1, T + n): each new one is sampled, then is all the model reads besides its cache."""
        cache, new = {}, idx
        for _ in range(n):
            new = torch.multinomial(self(new, cache=cache)[0][:, -1].softmax(-1), 1)
            idx = torch.cat([idx, new], dim=1)
        return idx


def batch(data, generator):
    """16 windows at random places: inputs (B, T), and as targets the next tokens (B, T)."""
    starts = torch.randint(len(data) - Config.block_size, (16,), generator=generator).tolist()
    windows = torch.stack([data[i : i + Config.block_size + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model, data):
    generator = torch.Generator().manual_seed(0)  # the same windows each time
    return sum(model(*batch(data, generator))[1].item() for _ in range(20)) / 20


def train(models, train_data, val_data, args):
    """Train all models on the same batches, and print their losses side by side."""
    optimizers = [torch.optim.AdamW(m.parameters(), betas=(0.9, 0.95), weight_decay=0.1) for m in models]
    generator, began = torch.Generator().manual_seed(args.seed), time.time()
    for step in range(1, args.max_steps + 1):
        inputs, targets = batch(train_data, generator)
        # the rate rises for 20 steps, then falls to a tenth along a cosine
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.max_steps)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = args.learning_rate * cosine * min(1, step / 20)
            model(inputs, targets)[1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == args.max_steps:
            losses = [f"{m.cfg.value_mode} {evaluate(m, val_data):.4f}" for m in models]
            print(f"step {step:4}   {'   '.join(losses)}   {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file; its characters are the tokens")
    parser.add_argument("--value_mode", choices=MODES, default="resformer", help="mode to train beside vanilla")
    for name, default in (("max_steps", 200), ("learning_rate", 3e-3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    if not (args.max_steps > 0 and 0 < args.learning_rate <= 0.1 and 0 <= args.seed < 2**32):
        parser.error("max_steps must be at least 1, learning_rate above 0 and at most 0.1, seed from 0 to 2^32 - 1")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        parser.error(f"cannot read {args.text} as UTF-8 text: {e}")
    if len(text) < 20 * Config.block_size:  # its last tenth must hold two windows or so
        parser.error(f"{args.text} has {len(text)} characters; it needs {20 * Config.block_size} or more")
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([ids[character] for character in text])
    n = len(data) * 9 // 10  # the last tenth is for validation
    models = [GPT(Config(len(ids), value_mode=m, seed=args.seed)) for m in dict.fromkeys(["vanilla", args.value_mode])]
    train(models, data[:n], data[n:], args)
    tokens = models[-1].generate(data[None, :1], Config.block_size)
    print(f"{args.value_mode} writes: {''.join(list(ids)[i] for i in tokens[0].tolist())}")
