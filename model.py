"""A Llama-like decoder in which every value-residual variant is a row of one table, VALUE_MODES.

Layers are counted from 0 here: the paper's layer 1 is layer 0, its V_1 is raws[0]["v"]. Paper: arXiv 2410.17897.
Shapes: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim = C / H, V vocab_size. U_n is the output of
layer n's attention before its output projection, A_n its causal softmax(q k^T / sqrt(D)).

    python model.py --value_mode=svformer --n_layer=4      print a mode's plan: who owns and who reads what, and sizes
"""

import dataclasses
import difflib
import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Residual:
    """One extra path from earlier layers i into layer n.

    Sources are read as projected (V_i = x_i W_i, never mixed, never detached) and all of a layer's sources share one
    weight: lam = (own, sources together); None is the plain mean of the layer's own tensor and its sources. A layer
    that borrows the tensor `of` (see ValueMode) has no residual on it.
    map: "own" mixes before attention, so that A_n carries the mix:   U_n = A_n (l_own V_n + sum_i l_i V_i)
         "identity" adds after attention, token by token:             U_n = l_own A_n V_n + sum_i l_i V_i
         "delta" adds the difference (NeuTRENO, Eq 8):                U_n = l_own A_n V_n + sum_i l_i (V_i - V_n)
    In "delta" V_n is the value attended over: after a ResFormer mix it is the mixed one, as in the authors' code.
    """

    of: Literal["q", "k", "v"] = "v"
    source: Literal["first", "prev", "all"] = "first"
    map: Literal["own", "identity", "delta"] = "own"
    lam: tuple[float, float] | None = None
    layers: tuple[int, ...] = ()  # only in these layers; () = in every layer that has a source

    def __post_init__(self):
        for field in ("of", "source", "map"):
            known = get_args(get_type_hints(Residual)[field])
            if getattr(self, field) not in known:
                raise ValueError(f"Residual({field}={getattr(self, field)!r}): {field} is one of {', '.join(known)}")
        if self.map != "own" and self.of != "v":
            raise ValueError(
                f"a residual after attention (map={self.map!r}) adds values: of must be 'v', not {self.of!r}"
            )

    def weights(self, n_sources):
        """(weight of the layer's own tensor, weight of each source)."""
        if self.lam is None:
            return 1 / (n_sources + 1), 1 / (n_sources + 1)
        return self.lam[0], self.lam[1] / n_sources


@dataclass(frozen=True)
class ValueMode:
    """A variant: residuals, which layers own their q, k and v, and averaging of the residual stream over depth.

    share_q, share_k, share_v: 1 = every layer owns it, c > 1 = the first of every c layers does (CLA), 0 = layer 0 does
    for all (SVFormer), (0, 4, 7) = these do, and the rest read the nearest one below. A layer that reads another's
    tensor reads it as used there (mixed, cached), has no weights for it and no residual on it.
    dense: (dilation, period) of DenseFormer's depth-weighted average, or None.
    """

    residuals: tuple[Residual, ...] = ()
    share_q: int | tuple[int, ...] = 1
    share_k: int | tuple[int, ...] = 1
    share_v: int | tuple[int, ...] = 1
    dense: tuple[int, int] | None = None

    def __post_init__(self):
        for t in "qkv":
            share = getattr(self, f"share_{t}")
            if isinstance(share, tuple) and (not share or share[0] != 0 or list(share) != sorted(set(share))):
                raise ValueError(f"share_{t}={share}: the owning layers must rise and begin with 0, as (0, 4, 7)")
            if isinstance(share, int) and share < 0:
                raise ValueError(
                    f"share_{t}={share}: use 1 (own), 0 (layer 0 for all), or the length of a run of layers"
                )
        if self.dense and min(self.dense) < 1:
            raise ValueError(f"dense={self.dense}: dilation and period are at least 1")

    def owner(self, t, n):
        """The layer whose tensor t ("q", "k" or "v") layer n uses."""
        share = getattr(self, f"share_{t}")
        if isinstance(share, tuple):
            return max(i for i in share if i <= n)
        return n - n % share if share else 0

    @classmethod
    def from_dict(cls, d):
        """Inverse of dataclasses.asdict, after a trip through JSON (which makes lists of tuples)."""
        frozen = {k: tuple(v) if isinstance(v, list) else v for k, v in d.items()}
        residuals = [{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()} for r in d["residuals"]]
        return cls(**frozen | {"residuals": tuple(Residual(**r) for r in residuals)})


VALUE_MODES = {
    "vanilla": ValueMode(),
    # Eq 7: U_n = 1/2 A_n (V_n + V_1)
    "resformer": ValueMode((Residual(),)),
    # Eq 10: U_n = A_n V_1; no value projection and no value cache above layer 1
    "svformer": ValueMode(share_v=0),
    # Eq 8: U_n = A_n V_n + 0.4 (V_1 - V_n)
    "neutreno": ValueMode((Residual(map="delta", lam=(1.0, 0.4)),)),
    # the authors' code: V' = 1/2 (V_n + V_1), U_n = A_n V' + 0.2 (V_1 - V'), so the effective strength is 0.1
    "resformer_neutreno": ValueMode((Residual(), Residual(map="delta", lam=(1.0, 0.2)))),
    # DenseFormer: the input of block n + 1 is a learned average of the embedding and the outputs of blocks 1..n
    "denseformer": ValueMode(dense=(1, 1)),
}


def get_mode(mode):
    """The ValueMode of a name in VALUE_MODES (or `mode` itself if it is one); raises ValueError on another name."""
    if isinstance(mode, ValueMode):
        return mode
    if mode not in VALUE_MODES:
        near = difflib.get_close_matches(mode, VALUE_MODES, 1, 0.4)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown value_mode {mode!r}; {guess}known: {', '.join(VALUE_MODES)}")
    return VALUE_MODES[mode]


def mode_name(mode):
    """The name of a ValueMode in VALUE_MODES, or "custom"."""
    return next((name for name, row in VALUE_MODES.items() if row == mode), "custom")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Defaults: the paper's 82M (Table 4)."""

    vocab_size: int = 50277
    block_size: int = 2048  # tokens
    n_layer: int = 8
    n_head: int = 8
    n_kv_head: int = 0  # key and value heads; 0 = n_head
    n_embd: int = 512
    n_hidden: int = 0  # width of the SwiGLU; 0 = 3.5 n_embd
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    value_mode: str | ValueMode = "vanilla"

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("value_mode", get_mode(self.value_mode))
        put("n_kv_head", self.n_kv_head or self.n_head)
        put("n_hidden", self.n_hidden or 7 * self.n_embd // 2)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head or self.n_embd // self.n_head % 2:
            raise ValueError(
                f"n_embd={self.n_embd} must be n_head={self.n_head} times an even head size (RoPE turns pairs)"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        named = [i for r in self.value_mode.residuals for i in r.layers]
        named += [i for t in "qkv" if isinstance(s := getattr(self.value_mode, f"share_{t}"), tuple) for i in s]
        if named and not 0 <= min(named) <= max(named) < self.n_layer:
            raise ValueError(f"value_mode names layers {sorted(set(named))}, but there are only 0..{self.n_layer - 1}")
        plan = plan_layers(self)
        for r, used in zip(
            self.value_mode.residuals, zip(*(layer.sources for layer in plan), strict=True), strict=True
        ):
            idle = [n for n in r.layers or range(1, self.n_layer) if not used[n]]
            if idle and (r.layers or len(idle) == self.n_layer - 1):
                raise ValueError(
                    f"{r} does nothing in layer {idle[0]}: there is no earlier layer, or its {r.of} is borrowed"
                )
        for n, layer in enumerate(plan):
            if n not in layer.owner.values():
                raise ValueError(f"layer {n} would own none of q, k, v: its attention would read nothing of its input")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def to_dict(self):
        """All fields as JSON-able values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, d):
        return cls(**d | {"value_mode": ValueMode.from_dict(d["value_mode"])})


@dataclass(frozen=True)
class LayerPlan:
    """What layer n reads: owner["q" | "k" | "v"] is the layer whose tensor it uses, sources[j] the layers that
    residual j takes from (() = residual j does nothing in this layer)."""

    owner: dict[str, int]
    sources: tuple[tuple[int, ...], ...]


def plan_layers(cfg):
    """The LayerPlan of each layer of a ModelConfig: all that the mode means, before any tensor exists."""
    mode, plan = cfg.value_mode, []
    for n in range(cfg.n_layer):
        owner = {t: mode.owner(t, n) for t in "qkv"}
        before = {"first": (0,), "prev": (n - 1,), "all": tuple(range(n))}
        active = [n > 0 and owner[r.of] == n and (not r.layers or n in r.layers) for r in mode.residuals]
        plan.append(
            LayerPlan(
                owner, tuple(before[r.source] if on else () for r, on in zip(mode.residuals, active, strict=True))
            )
        )
    return plan


def kv_floats_per_token(cfg):
    """Numbers a KV cache keeps per token and sequence: n_kv_head * head_dim for each K and each V that a layer owns."""
    owned = sum(layer.owner[t] == n for n, layer in enumerate(plan_layers(cfg)) for t in "kv")
    return owned * cfg.n_kv_head * cfg.head_dim


class KVCache:
    """Preallocated keys and values of one batch: one (B, G, length, D) tensor for each K and V that a layer owns.

    What is stored is what is attended over: keys rotated, values mixed. `nbytes` is what was really allocated.
    """

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
        end, store = self.pos + new.size(2), self.tensors[t, n]
        if end > self.length:
            raise ValueError(f"the KV cache holds {self.length} tokens, not {end}")
        store[:, :, self.pos : end] = new
        return store[:, :, :end]

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())


def full(x):
    """x in fp32, or as it is in float64: for what must not be computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Linear):
    """A bias-free Linear that computes several named tensors in one product: parts = {name: width}, rows in order."""

    def __init__(self, n_in, parts):
        self.parts = parts
        super().__init__(n_in, sum(parts.values()), bias=False)

    def reset_parameters(self):
        pass  # GPT.init_weights fills every weight


class Rope(nn.Module):
    """Rotary positions in the rotate-half layout (Llama's): x (B, h, T, D), positions from `start` -> same shape."""

    def __init__(self, head_dim, length, theta):
        super().__init__()
        rate = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float32), rate)  # (length, D/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _apply(self, fn, recurse=True):
        """What .to() and .cuda() call: the tables go along to another device, but never to half precision."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        if self.cos.dtype in (torch.float16, torch.bfloat16):
            self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, x, start):
        cos, sin = (t[start : start + x.size(2)] for t in (self.cos, self.sin))  # (T, D/2), fp32 whatever x is
        a, b = full(x).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q, k, v, kind="sdpa"):
    """A V: softmax attention of the last T of S positions, each over itself and those before it.

    q (B, H, T, D); k, v (B, G, S, D) -> (B, H, T, D). kind: "sdpa" (torch's fused kernels), "flash" (the flash-attn
    package), "eager" (the formula, softmax in fp32).
    """
    T, S = q.size(2), k.size(2)
    if kind == "flash":
        from flash_attn import flash_attn_func

        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)
    seen = None if T == S or T == 1 else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if kind == "sdpa":
        gqa = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=T == S and T > 1, enable_gqa=gqa)
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))  # (B, H, S, D)
    scores = full(q @ k.mT) / math.sqrt(q.size(-1))  # (B, H, T, S)
    unseen = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    return scores.masked_fill(unseen, -math.inf).softmax(dim=-1).to(v.dtype) @ v


def mix(own, others, weights):
    """l_own * own + sum of l * others, for weights (l_own, l)."""
    own = own if weights[0] == 1 else weights[0] * own
    return own + weights[1] * sum(others[1:], others[0])


class Attention(nn.Module):
    """x (B, T, C) -> U_n W_o (B, T, C), raw, used: this layer's q, k, v as projected, and as attended over.

    raws[i], useds[i] are those of the layers i < n in this forward pass. They come as arguments and go as results, so
    that activation checkpointing and torch.compile see every dependency.
    """

    def __init__(self, cfg, n, plan, kind):
        super().__init__()
        self.n, self.plan, self.kind, self.residuals = n, plan, kind, cfg.value_mode.residuals
        self.head_dim, self.groups = cfg.head_dim, cfg.n_head // cfg.n_kv_head
        heads = {"q": cfg.n_head, "k": cfg.n_kv_head, "v": cfg.n_kv_head}
        self.heads = {t: heads[t] for t in "qkv" if plan.owner[t] == n}  # a borrowed tensor has no weights here
        self.proj = Linear(cfg.n_embd, {t: h * cfg.head_dim for t, h in self.heads.items()})
        self.out = Linear(cfg.n_embd, {"o": cfg.n_embd})

    def project(self, x, rope, start):
        """The tensors this layer owns: {t: (B, heads of t, T, D)}, q and k rotated. One product for all."""
        B, T, _ = x.shape
        all_heads = self.proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, D), q before k before v
        rotated = sum(h for t, h in self.heads.items() if t != "v")
        qk = rope(all_heads[:, :rotated], start).split([h for t, h in self.heads.items() if t != "v"], dim=1)
        v = (all_heads[:, rotated:],) if "v" in self.heads else ()
        return dict(zip(self.heads, (*qk, *v), strict=True))

    def forward(self, x, rope, raws, useds, cache=None):
        B, T, C = x.shape
        owner = self.plan.owner
        raw = self.project(x, rope, cache.pos if cache else 0)
        raw |= {t: raws[owner[t]][t] for t in "qkv" if owner[t] != self.n}
        used, late = dict(raw), []
        for r, sources in zip(self.residuals, self.plan.sources, strict=True):
            if sources and r.map == "own":
                used[r.of] = mix(used[r.of], [raws[i][r.of] for i in sources], r.weights(len(sources)))
            elif sources:
                late.append((r, sources))
        v_now = used["v"]  # of the tokens of this call; with a cache used["v"] becomes longer
        for t in "qkv":
            if owner[t] != self.n:
                used[t] = useds[owner[t]][t]
            elif t != "q" and cache:
                used[t] = cache.extend(t, self.n, used[t])
        y = attend(used["q"], used["k"], used["v"], self.kind)  # (B, H, T, D)
        for r, sources in late:
            values = [raws[i]["v"] - v_now if r.map == "delta" else raws[i]["v"] for i in sources]
            y = mix(y, [v.repeat_interleave(self.groups, dim=1) for v in values], r.weights(len(sources)))
        return self.out(y.transpose(1, 2).reshape(B, T, C)), raw, used


class MLP(nn.Module):
    """SwiGLU: x (B, T, C) -> (silu(x W_gate) * x W_up) W_down (B, T, C)."""

    def __init__(self, cfg):
        super().__init__()
        self.up = Linear(cfg.n_embd, {"gate": cfg.n_hidden, "up": cfg.n_hidden})
        self.down = Linear(cfg.n_hidden, {"down": cfg.n_embd})

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: x (B, T, C) -> x (B, T, C), raw, used. See Attention for raws, useds."""

    def __init__(self, cfg, n, plan, kind):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(cfg.n_embd, cfg.norm_eps), Attention(cfg, n, plan, kind)
        self.norm2, self.mlp = nn.RMSNorm(cfg.n_embd, cfg.norm_eps), MLP(cfg)

    def forward(self, x, rope, raws, useds, cache=None):
        y, raw, used = self.attn(self.norm1(x), rope, raws, useds, cache)
        x = x + y
        return x + self.mlp(self.norm2(x)), raw, used


class DepthAverage(nn.Module):
    """DenseFormer's depth-weighted average (arXiv 2402.02622): after block i = 1..L, where i is a multiple of period,

        Y_i = sum of alpha_ij X_j over j <= i with j = i mod dilation;  X_0 = embedding, X_j = output of block j.

    X_j is what block j returned, before averaging; the next block reads Y_i. Weights start at 0, 1 for X_i itself, so
    that a new model is the vanilla one. They are 1-D: the optimizer leaves them out of weight decay.
    """

    def __init__(self, n_layer, dilation, period):
        super().__init__()
        self.dilation, self.period = dilation, period
        self.alphas = nn.ParameterList(
            torch.zeros(len(range(i % dilation, i + 1, dilation))) for i in range(period, n_layer + 1, period)
        )
        self.init_weights()

    def init_weights(self):
        for alpha in self.alphas:
            with torch.no_grad():
                alpha.zero_()[-1] = 1

    def forward(self, i, xs):
        """Y_i of xs = [X_0, …, X_i], each of one shape."""
        if i % self.period:
            return xs[i]
        alpha = self.alphas[i // self.period - 1]
        return sum(a * x for a, x in zip(alpha, xs[i % self.dilation :: self.dilation], strict=True))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits x w^T, without ever holding the logits of more than `rows` rows.

    x (N, C), w (V, C), target (N,) below 0 = ignored -> scalar in nats, fp32 (float64 if w is). Each chunk's softmax
    gives its gradients at once, while its logits are at hand; the backward only scales them. They are kept free of 1/N
    and of the loss scale until then, because softmax / 65,536 would vanish in fp16. Products run in autocast's dtype,
    sums in fp32.
    """

    @staticmethod
    def forward(ctx, x, w, target, rows, grads):
        keep = target >= 0
        exact = torch.promote_types(w.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=x.device)
        gw = torch.zeros_like(w, dtype=exact) if grads else None
        gx = []
        for xc, tc, kc in zip(x.split(rows), target.clamp(min=0).split(rows), keep.split(rows), strict=True):
            z = F.linear(xc, w)  # (rows, V); in place from here on: passes over it are what costs
            tc, kc, dtype, z = tc[:, None], kc[:, None].to(exact), z.dtype, z.to(exact)
            z.sub_(z.amax(dim=1, keepdim=True))
            right = z.gather(1, tc)
            z.exp_()
            norm = z.sum(dim=1, keepdim=True)
            total = total + ((norm.log() - right) * kc).sum()
            if grads:  # softmax - one-hot, 0 in ignored rows
                g = z.mul_(kc / norm).scatter_add_(1, tc, -kc).to(dtype)
                gx.append((g @ w.to(dtype)).to(x.dtype))
                gw += g.T @ xc.to(dtype)
        n = keep.sum().clamp(min=1)
        if grads:
            ctx.save_for_backward(torch.cat(gx), gw, n)
            ctx.dtype = w.dtype
        return total / n

    @staticmethod
    def backward(ctx, grad):
        gx, gw, n = ctx.saved_tensors
        grad = grad / n
        return gx * grad.to(gx.dtype), (gw * grad).to(ctx.dtype), None, None, None


def normal(seed, name, shape, std):
    """N(0, std) fp32 of `shape` that depends on (seed, name) alone, not on what else is drawn."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(key % 2**63)) * std


class GPT(nn.Module):
    """The model. attn: "sdpa", "flash" or "eager" (see `attend`); it changes no number beyond rounding.
    init=False leaves the weights for a checkpoint to fill."""

    def __init__(self, cfg, seed=0, attn="sdpa", init=True):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta)
        self.blocks = nn.ModuleList(Block(cfg, n, plan, attn) for n, plan in enumerate(plan_layers(cfg)))
        self.dense = DepthAverage(cfg.n_layer, *cfg.value_mode.dense) if cfg.value_mode.dense else None
        self.norm = nn.RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size})
        if init and not self.embed.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, init_std) for every matrix, each from (seed, its name): modes share all the weights they have in common.
        A fused product is drawn part by part, so that it does not matter what it is fused with."""
        std = self.cfg.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.fill_(1)
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(normal(seed, name, module.weight.shape, std))
            elif isinstance(module, Linear):
                parts = [
                    normal(seed, f"{name}.{p}", (rows, module.in_features), std) for p, rows in module.parts.items()
                ]
                module.weight.copy_(torch.cat(parts))
            elif isinstance(module, DepthAverage):
                module.init_weights()

    def hidden(self, idx, cache=None):
        """Normed output of the last layer, (B, T, C), for token ids idx (B, T). With a KVCache these are the T tokens
        that follow cache.pos, and the cache moves on by T."""
        T, start = idx.size(1), cache.pos if cache else 0
        if start + T > self.cfg.block_size:
            raise ValueError(f"{start + T} tokens do not fit block_size={self.cfg.block_size}")
        x = self.embed(idx)
        raws, useds, xs = [], [], [x]
        for n, block in enumerate(self.blocks):
            x, raw, used = block(x, self.rope, raws, useds, cache)
            raws.append(raw)
            useds.append(used)
            if self.dense:
                xs.append(x)
                x = self.dense(n + 1, xs)
        if cache:
            cache.pos += T
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> (logits (B, T, V), None), or with targets (B, T; below 0 = ignored) -> (None, loss).

        loss: mean cross-entropy in nats, fp32, computed in chunks of rows.
        """
        x = self.hidden(idx, cache)
        if targets is None:
            return self.head(x), None
        rows = max(1, 2**26 // self.cfg.vocab_size)  # chunks of 256 MiB of fp32 logits
        grads = torch.is_grad_enabled()  # inside of an autograd.Function it is always off
        return None, LinearCrossEntropy.apply(x.flatten(0, 1), self.head.weight, targets.flatten(), rows, grads)


def count_parameters(cfg):
    """(all parameters, those that multiply: matrices without the input embedding). Builds nothing but shapes."""
    with torch.device("meta"):
        model = GPT(cfg)
    every = sum(p.numel() for p in model.parameters())
    return every, sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.embed.weight.numel()


def flops_per_token(cfg):
    """Training FLOPs per token, 6 N + 12 L C T with N the parameters that multiply (PaLM, appendix B: attention counted
    in full, not causal), at T = block_size."""
    return 6 * count_parameters(cfg)[1] + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


def describe(cfg):
    """The plan as text: per layer who owns q, k, v and what is mixed in, then parameters, FLOPs and KV cache."""
    mode, lines = cfg.value_mode, []
    for n, layer in enumerate(plan_layers(cfg)):
        words = [f"{t} {'own' if layer.owner[t] == n else f'of layer {layer.owner[t]}':10}" for t in "qkv"]
        for r, sources in zip(mode.residuals, layer.sources, strict=True):
            if sources:
                own, each = r.weights(len(sources))
                words.append(f"{r.of} {r.map}: {own:g} here + {each:g} of {', '.join(map(str, sources))}")
        lines.append(f"layer {n:2}  " + "  ".join(words))
    if mode.dense:
        lines.append(f"after each {mode.dense[1]} blocks: weighted average over depth, dilation {mode.dense[0]}")
    every, multiply = count_parameters(cfg)
    kv, most = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_embd
    lines += [
        f"parameters      {every:,} ({multiply:,} multiply)",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} numbers per token = {2 * kv:,} bytes in bf16, {kv / most:.4f} of full attention's",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import configurator
    import model  # a config file's ValueMode is model.ValueMode, while this file runs as __main__

    def main():
        cfg = configurator.load(model.ModelConfig, usage=__doc__)
        print(f"{model.mode_name(cfg.value_mode)}\n{model.describe(cfg)}")

    configurator.run(main)
