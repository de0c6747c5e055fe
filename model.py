"""A Llama-like decoder in which every value-residual variant is a row of one table, VALUE_MODES.

Layers are counted from 0 here: the paper's layer 1 is layer 0, its V_1 is raws[0]["v"]. Paper: arXiv 2410.17897.
Shapes: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim = C / H, V vocab_size. U_n is the output of
layer n's attention before its output projection, A_n its causal softmax(q k^T / sqrt(D)).

    python model.py --value_mode=svformer --n_layer=4      print a mode's plan: who owns and who reads what, and sizes
    python model.py table                                  all modes: equation, source, parameters, KV cache
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from value_modes import VALUE_MODES, ModelConfig, Residual, ValueMode, active, plan_layers, read_later  # noqa: F401 - names users find here


def to_fp32(x):
    """x in fp32, or as it is in float64: for what must not be computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Linear):
    """A Linear that computes several named tensors in one product: parts = {name: width}, rows in order."""

    def __init__(self, n_in, parts, bias=False):
        self.parts = parts
        super().__init__(n_in, sum(parts.values()), bias=bias)

    def reset_parameters(self):
        pass  # GPT.init_weights fills every weight

    def forward(self, x):
        """In decoding on a CPU a few rows meet a large matrix. W x^T is then up to 1.5 times as fast as x W^T: the
        libraries share work out over the rows of the first factor. (Not for 1 to 3 rows in fp32.)"""
        if self.in_features * self.out_features < 2**18 or torch.is_grad_enabled() or x.device.type != "cpu":
            return super().forward(x)
        rows = x.numel() // x.size(-1)
        if rows > 16 or rows < 4 and x.dtype != torch.bfloat16:
            return super().forward(x)
        flat = x.reshape(rows, -1)  # (rows, n_in)
        y = (self.weight @ flat.T).T if rows > 1 else torch.mv(self.weight, flat[0])
        return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], -1)  # (…, n_out)


class Rope(nn.Module):
    """Rotary positions in the rotate-half layout (Llama's). at, the positions of T tokens, a slice or a tensor (B, T)
    -> the cosines and the sines that `apply_rope` takes, (1 or B, 1, T, D/2) each, fp32 whatever the model is.

    Pair i turns by r_i = theta^(-2 i / D) radians a position. Llama 3.1's scaling = (factor, low, high, original) slows
    the pairs that turn fewer than `high` times within `original` positions, those below `low` by all of `factor`:

        r_i <- (1 - s_i) r_i / factor + s_i r_i;  s_i = (turns_i - low) / (high - low), at least 0 and at most 1
    """

    def __init__(self, head_dim, length, theta, scaling=()):
        super().__init__()
        # rounded as in transformers: one bit of r is 1e-3 of an angle at position 10,000
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
        """What .to() and .cuda() call: the tables go along to another device, but never to half precision."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        if self.cos.dtype in (torch.float16, torch.bfloat16):
            self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, at):
        return tuple(t[at].unsqueeze(-3) for t in (self.cos, self.sin))


def apply_rope(x, angles):
    """x (B, h, T, D) with its pairs (a, b) = (x_i, x_(i + D/2)) turned by what a Rope returned, to
    (a cos - b sin, b cos + a sin); as it is if angles is None."""
    if angles is None:
        return x
    (cos, sin), (a, b) = angles, to_fp32(x).chunk(2, dim=-1)  # a, b (B, h, T, D/2)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1).to(x.dtype)


def attend(q, k, v, kind="sdpa", scale=None, layers=1, mask=None):
    """A V: softmax attention of the last T of S positions, each over itself and those before it, or over those where
    `mask` (B, 1, T, S), added to the scores, is not -inf.

    q (B, H, T, D); k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E). kind: "sdpa" (torch's fused kernels), "flash" (the
    flash-attn package), "eager" (the formula, softmax in fp32). scale: 1/sqrt(D) if None. With layers > 1, k and v hold
    the S positions of so many layers one after another, (B, G, layers * S, …), under one softmax.
    """
    T, S = q.size(2), k.size(2) // layers
    if kind == "flash" and layers == 1 and mask is None:
        from flash_attn import flash_attn_func

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flash_attn_func(q, k, v, causal=True, softmax_scale=scale).transpose(1, 2)
    causal = mask is None and T == S and layers == 1
    if mask is None and (kind == "eager" or not (causal or T == 1)):
        mask = torch.full((T, S), -math.inf, device=q.device).triu(S - T + 1)
    if mask is not None:
        mask = torch.cat([mask.to(q.dtype)] * layers, dim=-1)  # (…, T, layers * S)
    if kind != "eager":
        if one := T == 1 and mask is not None:  # heads of a group are so many rows over the same keys: none is repeated
            q = q.unflatten(1, (k.size(1), -1)).squeeze(3)  # (B, G, H/G, D)
        gqa = q.size(1) != k.size(1)
        if gqa and q.is_cuda and (mask is not None or not fused_kernel(q)):  # no fused kernel of torch's takes both
            k, v, gqa = *(t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v)), False
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and T > 1, scale=scale, enable_gqa=gqa
        )
        return y.flatten(1, 2).unsqueeze(2) if one else y  # (B, H, T, E)
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))  # (B, H, layers * S, …)
    scores = to_fp32(q @ k.mT) * (scale or q.size(-1) ** -0.5)  # (B, H, T, layers * S)
    return (scores + mask).softmax(dim=-1).to(v.dtype) @ v


@torch.compiler.assume_constant_result
def flash_gpu():
    return torch.cuda.get_device_capability() >= (8, 0)  # Ampere; before it there is no such kernel


def fused_kernel(q):
    """Whether `causal_forward` and `causal_backward` serve tensors like q."""
    half, D = q.dtype in (torch.float16, torch.bfloat16), q.size(-1)
    return q.device.type == "cpu" or q.device.type == "cuda" and half and D % 8 == 0 and D <= 256 and flash_gpu()


def causal_forward(q, k, v):
    """A V (B, H, T, D), the log-sum-exp of its scores (B, H, T), and the random states that CUDA's backward wants."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True), ()
    y, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return y, lse, rest[4:6]


def causal_backward(grad, q, k, v, y, lse, states):
    """Gradients of q, k and v."""
    aten, T = torch.ops.aten, q.size(2)
    if not states:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, y, lse, 0.0, True)
    packing = (None, None, T, T)  # no table of lengths: all sequences have T tokens
    return aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, y, lse, *packing, 0.0, True, *states)


class MergedAttention(torch.autograd.Function):
    """softmax(Q [K_1; K_2; …]^T / sqrt(D)) [V_1; V_2; …], each part causal, by one fused call for each part.

    q, each k, each v (B, H, T, D) -> (B, H, T, D). A part's output O_i counts as exp(lse_i - lse), lse_i being the
    log-sum-exp of its scores and lse that of all. Given the merged output and lse, the fused kernel's own backward
    yields each part's share of the gradient: with them P_ij = exp(s_ij - lse) and dS = P * (dP - rowsum(dO * O)) are
    those of the one softmax. (torch gives an lse no gradient of its own, so merging outside of this would be wrong.)
    """

    @staticmethod
    def forward(ctx, q, *kv):
        n = len(kv) // 2
        ys, lses, states = zip(*(causal_forward(q, k, v) for k, v in zip(kv[:n], kv[n:], strict=True)), strict=True)
        lse = torch.stack(lses).logsumexp(dim=0)  # (B, H, T)
        y = sum((part - lse).exp()[..., None].to(q.dtype) * y for part, y in zip(lses, ys, strict=True))
        ctx.save_for_backward(q, *kv, y, lse, *(t for pair in states for t in pair))
        ctx.n = n
        return y

    @staticmethod
    def backward(ctx, grad):
        n, (q, *saved) = ctx.n, ctx.saved_tensors
        kv, (y, lse, *states) = saved[: 2 * n], saved[2 * n :]
        parts = enumerate(zip(kv[:n], kv[n:], strict=True))
        grads = [causal_backward(grad, q, k, v, y, lse, states[2 * i : 2 * i + 2]) for i, (k, v) in parts]
        return sum(g[0] for g in grads), *(g[1] for g in grads), *(g[2] for g in grads)


def attend_layers(q, ks, vs, kind, mask=None):
    """Attention of q over the keys of several layers under one softmax (Eq 2). Shapes as in `attend`."""
    if mask is None and kind != "eager" and q.size(2) == ks[0].size(2) > 1 and fused_kernel(q):
        groups = q.size(1) // ks[0].size(1)
        return MergedAttention.apply(q, *(t.to(q.dtype).repeat_interleave(groups, dim=1) for t in (*ks, *vs)))
    return attend(q, torch.cat(ks, dim=2), torch.cat(vs, dim=2), kind, layers=len(ks), mask=mask)


def mix(weights, own, others):
    """w_0 * own + w_1 * others_1 + …: numbers, learned scalars or tensors that broadcast."""
    total = own if isinstance(weights[0], float) and weights[0] == 1 else weights[0] * own
    for w, other in zip(weights[1:], others, strict=True):
        total = total + w * other.to(own.dtype)  # under autocast embeddings are fp32
    return total


class Lambdas(nn.Module):
    """The weights of one residual: forward() -> for each layer (own, one for each source), or None where the residual
    does nothing or a Gate computes them. Learned ones are vectors, so the optimizer leaves them out of weight decay."""

    def __init__(self, r, sources):
        super().__init__()
        self.r, self.sources = r, sources
        there, new = [s for s in sources if s], lambda n: nn.Parameter(torch.empty(n))
        if r.learn == "scalar":
            self.scalars = nn.ParameterList(new(1 + len(s)) for s in there)
        elif r.learn == "lerp":
            self.share = new(len(there))
        elif r.learn == "softmax":
            self.own, self.logits, self.scale = new(len(there)), new(len(there)), new(1)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        if self.r.learn == "scalar":
            for p, s in zip(self.scalars, filter(None, self.sources), strict=True):
                p.copy_(torch.tensor(self.r.weights(len(s))))
        elif self.r.learn == "lerp":
            self.share.fill_(self.r.weights(1)[1])
        elif self.r.learn == "softmax":
            own, rise = self.r.lam or (0.5, 0.0)
            self.own.fill_(own)
            self.logits.copy_(rise * torch.arange(len(self.logits)))
            self.scale.fill_(len(self.sources))

    def forward(self):
        if self.r.learn == "scalar":
            found = iter([tuple(p) for p in self.scalars])
        elif self.r.learn == "lerp":
            found = iter([(1 - share, share) for share in self.share])
        elif self.r.learn == "softmax":
            found = iter(list(zip(self.own, self.scale * self.logits.softmax(0), strict=True)))
        elif self.r.per_token or self.r.map == "cross":
            return [None] * len(self.sources)
        else:
            return [self.r.weights(len(s)) if s else None for s in self.sources]
        return [next(found) if s else None for s in self.sources]


class Gate(nn.Module):
    """Weights from the token: a layer's normed input x (B, T, C) -> (own, source), that broadcast over (B, G, T, D).
    A head is a key and value head.

    "head":    (g, 1 - g), g = sigmoid(W x + b) for each head                        x-transformers
    "channel": (1 - g, g), g = sigmoid(b + W_up W_down x) for each channel           RWKV-7, without its token shift
    "sigmoid": (l_own, l sigmoid(W x[:12])) for each head, from W = 0                modded-nanogpt, nanochat
    "relu":    (l_own, l relu(W x)) for each head                                    SATFormer
    """

    def __init__(self, cfg, r):
        super().__init__()
        C, self.n_kv_head, self.r = cfg.n_embd, cfg.n_kv_head, r
        self.n_in = min(12, C) if r.learn == "sigmoid" else C
        if r.learn == "channel":
            width, rank = cfg.n_kv_head * cfg.head_dim, max(32, round(1.7 * C**0.5 / 32) * 32)
            self.down, self.up = Linear(C, {"down": rank}), Linear(rank, {"up": width}, bias=True)
        else:
            self.w = Linear(self.n_in, {"gate": cfg.n_kv_head}, bias=r.learn == "head")

    @torch.no_grad()
    def init_weights(self, seed, name):
        """What is not as in every Linear. RWKV-7: a gate of 0.72 falling to 0.63 over the channels."""
        if self.r.learn == "channel":
            self.down.weight.zero_()
            nn.init.orthogonal_(self.up.weight.T, 0.1, generator=generator(seed, name))
            self.up.bias.copy_(0.93 - 0.4 * torch.linspace(0, 1, len(self.up.bias)))
        elif self.r.learn == "sigmoid":
            self.w.weight.zero_()

    def forward(self, x):
        B, T, _ = x.shape
        z = self.up(self.down(x)) if self.r.learn == "channel" else self.w(x[..., : self.n_in])
        z = z.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, G, T, D or 1)
        if self.r.learn in ("head", "channel"):
            g = z.sigmoid()
            return (g, 1 - g) if self.r.learn == "head" else (1 - g, g)
        own, top = self.r.weights(1)
        return own, top * (z.sigmoid() if self.r.learn == "sigmoid" else z.relu())


class Attention(nn.Module):
    """x (B, T, C) -> U_n W_o (B, T, C), raw, used: this layer's q, k, v as projected, and as attended over.

    raws[i], useds[i] are those of the layers i < n in this forward pass, and raws[-1 - t] the values of token table t.
    They come as arguments and go as results, so that activation checkpointing and torch.compile see every dependency.
    lam[j]: the weights of residual j here, see Lambdas.
    """

    def __init__(self, cfg, n, plan, kind):
        super().__init__()
        self.n, self.plan, self.kind = n, plan, kind
        self.head_dim, self.groups = cfg.head_dim, cfg.n_head // cfg.n_kv_head
        heads = {"q": cfg.n_head, "k": cfg.n_kv_head, "v": cfg.n_kv_head}
        self.heads = {t: heads[t] for t in "qkv" if plan.owner[t] == n}  # a borrowed tensor has no weights here
        bias = cfg.arch == "gpt2"
        self.proj = Linear(cfg.n_embd, {t: h * cfg.head_dim for t, h in self.heads.items()}, bias)
        self.out = Linear(cfg.n_embd, {"o": cfg.n_embd}, bias)
        self.residuals = [found for found in active(cfg.value_mode, plan) if found[1].of != "hidden"]
        self.gates = nn.ModuleDict({str(j): Gate(cfg, r) for j, r, _ in self.residuals if r.per_token})

    def project(self, x, angles):
        """The tensors this layer owns: {t: (B, heads of t, T, D)}, q and k rotated. One product for all."""
        B, T, _ = x.shape
        all_heads = self.proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, D), q before k before v
        rotated = sum(h for t, h in self.heads.items() if t != "v")
        qk = apply_rope(all_heads[:, :rotated], angles).split([h for t, h in self.heads.items() if t != "v"], dim=1)
        v = (all_heads[:, rotated:],) if "v" in self.heads else ()
        return dict(zip(self.heads, (*qk, *v), strict=True))

    def forward(self, x, angles, lam, raws, useds, cache=None):
        B, T, C = x.shape
        raw = self.project(x, angles)
        used, late, mask = dict(raw), [], cache.mask if cache else None
        for j, r, sources in self.residuals:
            w = self.gates[str(j)](x) if r.per_token else lam[j]
            if r.of in "qkv" and r.map == "own":
                used[r.of] = mix(w, used[r.of], [raws[i][r.of] for i in sources])
            else:
                late.append((r, sources, w, used.get("v")))  # V_n of the tokens of this call, as mixed so far
        for t in "qkv":
            if t not in self.heads:
                used[t] = useds[self.plan.owner[t]][t]
            elif t != "q" and cache:
                used[t] = cache.extend(t, self.n, used[t])
        y = self.attend(used, late, useds, mask)  # (B, H, T, D)
        for r, sources, w, v_now in late:
            if r.of == "probs":
                old = [attend(useds[i]["q"], useds[i]["k"], used["v"], self.kind, mask=mask) for i in sources]
                y = mix(w, y, old)
            elif r.map in ("identity", "delta"):
                values = [raws[i]["v"] - v_now if r.map == "delta" else raws[i]["v"] for i in sources]
                y = mix(w, y, [v.repeat_interleave(self.groups, dim=1) for v in values])
        return self.out(y.transpose(1, 2).reshape(B, T, C)), raw, used

    def attend(self, used, late, useds, mask=None):
        """A_n V_n, with what residuals make of A_n: the keys of other layers under the same softmax, or their scores
        added; those are one product: l_own q_n k_n^T + l q_i k_i^T = [l_own q_n; l q_i] [k_n; k_i]^T."""
        q, k, v = (used[t] for t in "qkv")
        cross = [i for r, sources, _, _ in late if r.map == "cross" for i in sources]
        if cross:
            ks, vs = [k, *(useds[i]["k"] for i in cross)], [v, *(useds[i]["v"] for i in cross)]
            return attend_layers(q, ks, vs, self.kind, mask)
        for r, sources, w, _ in late:
            if r.of == "scores":
                q = torch.cat([w[0] * q, *(wi * useds[i]["q"] for wi, i in zip(w[1:], sources, strict=True))], dim=-1)
                k = torch.cat([k, *(useds[i]["k"] for i in sources)], dim=-1)
        if q.size(-1) == self.head_dim:
            return attend(q, k, v, self.kind, mask=mask)
        v = F.pad(v, (0, q.size(-1) - self.head_dim))  # fused kernels want one width
        return attend(q, k, v, self.kind, self.head_dim**-0.5, mask=mask)[..., : self.head_dim]


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C): SwiGLU, (silu(x W_gate) * x W_up) W_down, or GPT-2's gelu(x W_up) W_down."""

    def __init__(self, cfg):
        super().__init__()
        self.gated, bias = cfg.arch == "llama", cfg.arch == "gpt2"
        self.up = Linear(cfg.n_embd, ({"gate": cfg.n_hidden} if self.gated else {}) | {"up": cfg.n_hidden}, bias)
        self.down = Linear(cfg.n_hidden, {"down": cfg.n_embd}, bias)

    def forward(self, x):
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def new_norm(cfg):
    return (nn.LayerNorm if cfg.arch == "gpt2" else nn.RMSNorm)(cfg.n_embd, cfg.norm_eps)


class Block(nn.Module):
    """One layer: x (B, T, C) -> x (B, T, C), raw, used, of the last two only what later layers read. See Attention."""

    def __init__(self, cfg, n, plan, kind, keep):
        super().__init__()
        self.keep_raw, self.keep_used = keep
        self.norm1, self.attn = new_norm(cfg), Attention(cfg, n, plan, kind)
        self.norm2, self.mlp = new_norm(cfg), MLP(cfg)
        self.residuals = [(j, sources) for j, r, sources in active(cfg.value_mode, plan) if r.of == "hidden"]

    def forward(self, x, angles, lam, raws, useds, cache=None):
        h = x
        for j, sources in self.residuals:
            h = mix(lam[j], h, [raws[i]["hidden"] for i in sources])
        y, raw, used = self.attn(self.norm1(h), angles, lam, raws, useds, cache)
        raw = {"hidden": x} | raw
        h = h + y
        return h + self.mlp(self.norm2(h)), {t: raw[t] for t in self.keep_raw}, {t: used[t] for t in self.keep_used}


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
    sums in fp32. The V rows of w are filled up to a multiple of `pad`, for matrix kernels that want rows which begin at
    round addresses; the filling's logits are -inf, so that it has no part in loss and gradients.
    """

    @staticmethod
    def forward(ctx, x, w, target, rows, pad, grads):
        keep, V, kind = target >= 0, w.size(0), x.device.type
        exact = torch.promote_types(w.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w.dtype
        total = torch.zeros((), dtype=exact, device=x.device)
        wp = F.pad(w.to(dtype), (0, 0, 0, -V % pad)) if V % pad else w.to(dtype)  # (V or a little more, C)
        gw = torch.zeros_like(wp, dtype=exact) if grads else None
        gx = []
        for xc, tc, kc in zip(x.split(rows), target.clamp(min=0).split(rows), keep.split(rows), strict=True):
            nats, part, more = LinearCrossEntropy.chunk(xc.to(dtype), wp, tc[:, None], kc[:, None].to(exact), V, grads)
            total = total + nats
            if grads:
                gx.append(part.to(x.dtype))
                gw += more
        n = keep.sum().clamp(min=1)
        if grads:
            ctx.save_for_backward(torch.cat(gx), gw[:V], n)
            ctx.dtype = w.dtype
        return total / n

    @staticmethod
    def chunk(x, w, target, keep, V, grads):
        """x (rows, C), w (V or more, C), target, keep (rows, 1) -> summed nats, and their gradients of x and w or None.
        What is large here is gone before the next chunk."""
        z = F.linear(x, w).to(keep.dtype)  # (rows, V or more); in place from here on: passes over it are what costs
        z[:, V:] = -math.inf
        z.sub_(z.amax(dim=1, keepdim=True))
        right = z.gather(1, target)
        z.exp_()
        norm = z.sum(dim=1, keepdim=True)
        nats = ((norm.log() - right) * keep).sum()
        if not grads:
            return nats, None, None
        g = z.mul_(keep / norm).scatter_add_(1, target, -keep).to(x.dtype)  # softmax - one-hot, 0 in ignored rows
        return nats, g @ w, g.T @ x

    @staticmethod
    def backward(ctx, grad):
        gx, gw, n = ctx.saved_tensors
        grad = grad / n
        return gx * grad.to(gx.dtype), (gw * grad).to(ctx.dtype), None, None, None, None


def generator(seed, name):
    """A random generator that depends on (seed, name) alone, not on what else is drawn."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    return torch.Generator().manual_seed(key % 2**63)


def normal(seed, name, shape, std):
    """N(0, std), fp32."""
    return torch.randn(shape, generator=generator(seed, name)) * std


class GPT(nn.Module):
    """The model. attn: "sdpa", "flash" or "eager" (see `attend`); it changes no number beyond rounding.
    recompute: activation checkpointing, each block's inside is computed again in the backward instead of being kept.
    pad_vocab: see LinearCrossEntropy. It touches no weight, no count, no file.
    init=False leaves the weights for a checkpoint to fill."""

    def __init__(self, cfg, seed=0, attn="sdpa", init=True, recompute=False, pad_vocab=1):
        super().__init__()
        self.cfg, self.recompute, self.pad_vocab, plan = cfg, recompute, pad_vocab, plan_layers(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        gpt2, kv = cfg.arch == "gpt2", cfg.n_kv_head * cfg.head_dim
        self.positions = nn.Embedding(cfg.block_size, cfg.n_embd) if gpt2 else None
        self.rope = None if gpt2 else Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
        n_tables = -min((i for layer in plan for s in layer.sources for i in s if i < 0), default=0)
        self.tables = nn.ModuleList(nn.Embedding(cfg.vocab_size, kv) for _ in range(n_tables))
        self.lambdas = nn.ModuleList(
            Lambdas(r, [layer.sources[j] for layer in plan]) for j, r in enumerate(cfg.value_mode.residuals)
        )
        keep = zip(*read_later(cfg), strict=True)
        self.blocks = nn.ModuleList(Block(cfg, n, plan[n], attn, kept) for n, kept in enumerate(keep))
        self.dense = DepthAverage(cfg.n_layer, *cfg.value_mode.dense) if cfg.value_mode.dense else None
        self.norm = new_norm(cfg)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size})
        if init and not self.embed.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, init_std) for every matrix, each from (seed, its name): modes share all the weights they have in common.
        A fused product is drawn part by part, so that it does not matter what it is fused with. Token tables are
        N(0, 1/sqrt(C)), nanochat's spread; GPT-2's projections into the residual stream are smaller by sqrt(2 L)."""
        cfg = self.cfg
        for name, module in self.named_modules():
            std = cfg.n_embd**-0.5 if name.startswith("tables.") else cfg.init_std
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                module.weight.fill_(1)
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(normal(seed, name, module.weight.shape, std))
            elif isinstance(module, Linear):
                if cfg.arch == "gpt2" and name.endswith((".out", ".mlp.down")):
                    std /= math.sqrt(2 * cfg.n_layer)
                parts = [
                    normal(seed, f"{name}.{p}", (rows, module.in_features), std) for p, rows in module.parts.items()
                ]
                module.weight.copy_(torch.cat(parts))
            elif isinstance(module, (DepthAverage, Lambdas)):
                module.init_weights()
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
        for name, module in self.named_modules():
            if isinstance(module, Gate):
                module.init_weights(seed, name)

    @torch.no_grad()
    def mixing_weights(self):
        """[residual][layer] -> its weights, [own, each source], or None: it does nothing there, or a Gate has them."""
        return [[w and [float(x) for x in w] for w in weights()] for weights in self.lambdas]

    def hidden(self, idx, cache=None):
        """Normed output of the last layer, (B, T, C), for token ids idx (B, T). With a KVCache these are the T tokens
        that follow cache.pos, and the cache moves on by T. With PrefixTree they are as those say."""
        (B, T), stop = idx.shape, cache.end(idx.size(1)) if cache else idx.size(1)
        if stop > self.cfg.block_size:
            raise ValueError(f"{stop} tokens do not fit block_size={self.cfg.block_size}")
        x, at = self.embed(idx), cache.positions(T) if cache else slice(T)
        if self.positions:
            x = x + self.positions.weight[at]
        angles = self.rope(at) if self.rope else None
        lam = [weights() for weights in self.lambdas]  # [residual][layer]
        raws, useds, xs = {}, {}, [x]
        for t, table in enumerate(self.tables):
            raws[-1 - t] = {"v": table(idx).view(B, T, self.cfg.n_kv_head, -1).transpose(1, 2)}  # (B, G, T, D)
        for n, block in enumerate(self.blocks):
            inputs = (x, angles, [weights[n] for weights in lam], raws, useds, cache)
            if self.recompute and torch.is_grad_enabled():
                x, raws[n], useds[n] = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x, raws[n], useds[n] = block(*inputs)
            if self.dense:
                xs.append(x)
                x = self.dense(n + 1, xs)
        if cache:
            cache.advance(T)
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> (logits (B, T, V), None), or with targets (B, T; below 0 = ignored) -> (None, loss).

        loss: mean cross-entropy in nats, fp32, computed in chunks of rows.
        """
        x = self.hidden(idx, cache)
        if targets is None:
            return self.head(x), None
        rows = 2 ** (28 if x.is_cuda else 26) // self.cfg.vocab_size  # chunks of 1 GiB or 256 MiB of fp32 logits
        rows = rows // 128 * 128 or max(1, rows)
        grads = torch.is_grad_enabled()  # inside of an autograd.Function it is always off
        x, targets = x.flatten(0, 1), targets.flatten()  # (B T, C), (B T,)
        return None, LinearCrossEntropy.apply(x, self.head.weight, targets, rows, self.pad_vocab, grads)


if __name__ == "__main__":
    import configurator
    import describe

    configurator.run_main(describe.main)
