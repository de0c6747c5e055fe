"""Standard layers, and parts of other papers: products, rotary positions, softmax(q k^T) v by the fastest kernel,
MLP, DenseFormer."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

try:  # optional. Not need(): torch.compile cannot trace it, and transformers skips imports inside a try in an export
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None  # train.py says how to get it


def to_fp32(x):
    """x in fp32, or unchanged if it is float64: for what must not be computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normal(seed, name, shape, std):
    """N(0, std^2) in fp32, zeros for std 0, from a random stream of (seed, name) alone, whatever else is drawn."""
    if std == 0:
        return torch.zeros(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(key % 2**63)
    return torch.randn(shape, generator=generator) * std


class Linear(nn.Linear):
    """A Linear that computes several named tensors in one product. parts: {name: width}, in the order of the rows.
    std: spread of the initial weights; None = the model's init_std."""

    def __init__(self, n_in, parts, bias=False, std=None):
        self.parts, self.std = parts, std
        super().__init__(n_in, sum(parts.values()), bias=bias)

    def reset_parameters(self):
        pass  # GPT.init_weights sets every weight


class Rope(nn.Module):
    """Rotary positions in Llama's rotate-half layout.

    Pair i rotates by r_i = theta^(-2 i / D) radians per position. With Llama 3.1's scaling = (factor, low, high,
    original) a pair that makes fewer than `low` turns in `original` positions is slowed by `factor`; one with more than
    `high` turns is left alone; between them s_i = (turns_i - low) / (high - low) blends the two.
    """

    def __init__(self, head_dim, length, theta, scaling=()):
        super().__init__()
        # rounded as transformers rounds it: the last bit of r moves the angle at position 10,000 by up to 6e-4 radians
        rate = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if scaling:
            factor, low, high, original = scaling
            turns = original / (2 * math.pi / rate)
            s = ((turns - low) / (high - low)).clamp(0, 1)
            rate = (1 - s) * rate / factor + s * rate
        angle = torch.outer(torch.arange(length, dtype=torch.float32), rate)  # (length, D/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _apply(self, fn, recurse=True):
        """What .to() and .cuda() call: the tables move to another device, but are never rounded to half precision."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        if self.cos.dtype in (torch.float16, torch.bfloat16):
            self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, positions):
        """What `apply_rope` reads, in fp32. positions: a slice -> cos (T, 1, 1, D/2) and (-sin, sin) (T, 1, 2, D/2); a
        tensor (B, T) -> (B, T, 1, 1, D/2) and (B, T, 1, 2, D/2)."""
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)  # (…, T, 1, D/2)
        return cos.unsqueeze(-2), torch.stack((-sin, sin), dim=-2)


def apply_rope(x, angles):
    """x (B, T, heads, D) with its pairs (a, b) = (x_i, x_{i + D/2}) rotated to (a cos - b sin, b cos + a sin).
    angles: what a Rope returned, or None for a model with learned positions."""
    if angles is None:
        return x
    cos, signed_sin = angles
    ab = to_fp32(x).unflatten(-1, (2, -1))  # (B, T, heads, 2, D/2)
    ba = ab.flip(-2)  # with chunk and cat torch.compile writes the gradient twice
    return torch.addcmul(ab * cos, ba, signed_sin).flatten(-2).to(x.dtype)


def repeat_heads(x, n):
    """(B, G, T, D) -> (B, n, T, D): repeats each key and value head for the n / G query heads of its group."""
    return x.repeat_interleave(n // x.size(1), dim=1)


def attend(q, k, v, kernel="sdpa", scale=None, mask=None):
    """A V: causal softmax attention of the last T of S positions.

    q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E). scale: 1 / sqrt(D) if None.
    kernel: "sdpa" (torch's fused kernels), "flash" (the flash-attn package; sdpa with a mask, and in fp32, which that
    package lacks), "eager" (the formula, softmax in fp32). mask: (B, 1 or H, T, S) or (T, S), added to the scores
    instead of the causal mask.
    """
    T, S = q.size(2), k.size(2)
    if kernel == "flash" and mask is None and q.dtype != torch.float32:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, heads, D)
        return flash_attn_func(q, k, v, causal=True, softmax_scale=scale).transpose(1, 2)
    # the kernels' own causal flag is enough; `if`, because T > 1 is no bool while a graph of any length is traced
    is_causal = True if mask is None and T == S and T > 1 else False
    needs_mask = mask is None and T > 1 and not is_causal  # a single last position sees every key
    if needs_mask or (mask is None and kernel == "eager"):
        mask = torch.full((T, S), -math.inf, device=q.device).triu(S - T + 1)
    if mask is not None:
        mask = mask.to(q)  # a model may be split over devices
        if mask.is_cuda and mask.stride(-2) % 8:  # fused kernels read the rows of a mask 16 bytes at a time
            mask = F.pad(mask, (0, -S % 8))[..., :S]
    if kernel == "eager":
        k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))  # (B, H, S, …)
        scores = to_fp32(q @ k.mT) * (scale or q.size(-1) ** -0.5)  # (B, H, T, S)
        return (scores + mask).softmax(dim=-1).to(v.dtype) @ v
    return fused_attention(q, k, v, mask, is_causal, scale)


def fused_attention(q, k, v, mask, is_causal, scale):
    """torch's scaled_dot_product_attention with grouped heads, in a form that its fused kernels take."""
    # one token each: the heads of a group become the rows of one query, and no key is repeated
    is_for_all_heads = mask is None or mask.ndim == 2 or mask.size(1) == 1
    if q.size(2) == 1 and is_for_all_heads:
        q = q.unflatten(1, (k.size(1), -1)).squeeze(3)  # (B, H, 1, D) -> (B, G, H/G, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return y.flatten(1, 2).unsqueeze(2)  # (B, G, H/G, E) -> (B, H, 1, E)
    # not every fused kernel of a GPU takes fewer key heads than query heads
    shares_keys = bool(k.size(1) < q.size(1))
    if q.is_cuda and shares_keys:
        k, v, shares_keys = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1)), False
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=shares_keys)


def attend_across(q, keys, values, kernel="sdpa", mask=None):
    """softmax(q [K_1; K_2; …]^T) [V_1; V_2; …] (Eq 2): causal attention to several layers under one softmax.

    q (B, H, T, D); keys, values: one (B, G, S, D) of each layer. We order the keys k_1(0) k_2(0) … k_1(1) …, repeat
    each query n = len(keys) times and keep the last copy: then the usual causal mask is right; no T x n S mask exists.
    """
    n = len(keys)
    k, v = (torch.stack(x, dim=3).flatten(2, 3) for x in (keys, values))  # (B, G, S, n, D) -> (B, G, S * n, D)
    if mask is not None:
        return attend(q, k, v, kernel, mask=mask.repeat_interleave(n, dim=-1))
    if q.size(2) == 1:  # a single last position sees every key
        return attend(q, k, v, kernel)
    return attend(q.repeat_interleave(n, dim=2), k, v, kernel)[:, :, n - 1 :: n]


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C): SwiGLU, (silu(x W_gate) * x W_up) W_down, or GPT-2's gelu(x W_up) W_down."""

    def __init__(self, cfg):
        super().__init__()
        is_gpt2 = cfg.arch == "gpt2"
        parts = {"up": cfg.n_hidden} if is_gpt2 else {"gate": cfg.n_hidden, "up": cfg.n_hidden}
        self.is_gpt2 = is_gpt2
        self.up = Linear(cfg.n_embd, parts, bias=is_gpt2)
        self.down = Linear(cfg.n_hidden, {"down": cfg.n_embd}, bias=is_gpt2, std=residual_proj_std(cfg))

    def forward(self, x):
        if self.is_gpt2:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).chunk(2, dim=-1)  # (B, T, n_hidden) each
        return self.down(F.silu(gate) * up)


def residual_proj_std(cfg):
    """Initial spread of the projections into the residual stream: GPT-2's are divided by sqrt(2 n_layer)."""
    is_scaled = cfg.arch == "gpt2" if cfg.scaled_init is None else cfg.scaled_init
    return cfg.init_std / math.sqrt(2 * cfg.n_layer) if is_scaled else None


def new_norm(cfg):
    norm = nn.LayerNorm if cfg.arch == "gpt2" else nn.RMSNorm
    return norm(cfg.n_embd, cfg.norm_eps)


class DepthAverage(nn.Module):
    """DenseFormer's depth-weighted average (arXiv 2402.02622): after block i = 1..L, if i is a multiple of period,

        H_i = sum of alpha_ij X_j over j <= i, j ≡ i (mod dilation);  X_0 = embedding, X_j = output of block j.

    X_j is the block's output before averaging; the next block reads H_i. Weights start at 0, and at 1 for X_i itself,
    so a new model equals vanilla. They are vectors, so AdamW does not decay them.
    """

    def __init__(self, n_layer, dilation, period):
        super().__init__()
        self.dilation, self.period = dilation, period
        self.alphas = nn.ParameterList()
        for i in range(period, n_layer + 1, period):
            n_others = len(range(i % dilation, i, dilation))
            self.alphas.append(torch.tensor([0.0] * n_others + [1.0]))

    def forward(self, i, xs):
        """H_i of xs = [X_0, …, X_i], all of the same shape."""
        if i % self.period:
            return xs[i]
        alpha = self.alphas[i // self.period - 1]
        return sum(a * x for a, x in zip(alpha, xs[i % self.dilation :: self.dilation], strict=True))
