"""The network: a Llama-like decoder in which every value-residual variant is a value of one setting, `value_mode`.

    python model.py --value_mode=svformer --n_layer=4      print a mode's plan: who owns and who reads what, and sizes
    python model.py table                                  all modes: equation, source, parameters, KV cache
    python model.py budget config/size_468m.py --gpus=64   memory, traffic, time and disk of a run

Shapes: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim, V vocab_size. Layers count from 0, so
the paper's V_1 is raw[0]["v"], and attended[0]["v"] where it is borrowed. A_n is layer n's causal softmax(q k^T /
sqrt(D)); U_n is the output of its attention before the output projection. Modes as data, and the table of them, are in
value_modes.py. Paper: arXiv 2410.17897.

Read top to bottom: Linear, Rope, attend, the weights of residuals (Lambdas, Gate), OutputGate, Attention (where values
are mixed), MLP, Block, DepthAverage, the loss, GPT. Read next: train.py.
"""

import hashlib
import math

if __name__ == "__main__":  # prints what is asked for, and ends the process
    import budget

    budget.command(__doc__)

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from value_modes import plan_layers, tensors_to_keep


def to_fp32(x):
    """x in fp32, or unchanged if it is float64: for what must not be computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Linear):
    """A Linear that computes several named tensors in one product. parts: {name: width}, in the order of the rows.
    std: spread of the initial weights; None = the model's init_std."""

    def __init__(self, n_in, parts, bias=False, std=None):
        self.parts, self.std = parts, std
        super().__init__(n_in, sum(parts.values()), bias=bias)

    def reset_parameters(self):
        pass  # GPT.init_weights sets every weight

    def forward(self, x):
        is_bf16_on_cpu = x.dtype == self.weight.dtype == torch.bfloat16 and x.device.type == "cpu"
        few_by_large = x.numel() <= 16 * self.in_features and self.weight.numel() >= 2**18
        if is_bf16_on_cpu and few_by_large and not torch.is_grad_enabled():
            return few_rows_product(x, self.weight, self.bias)
        return super().forward(x)


def few_rows_product(x, w, bias):
    """x W^T + b as (W x^T)^T for up to 16 rows on a CPU. In bf16, 82M decodes 1.2-1.5 x as fast; fp32 does not gain."""
    rows = x.flatten(0, -2)  # (rows, n_in)
    y = torch.mv(w, rows[0])[None] if len(rows) == 1 else (w @ rows.T).T  # (rows, n_out)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class Rope(nn.Module):
    """Rotary positions in Llama's rotate-half layout.

    Pair i rotates by r_i = theta^(-2 i / D) radians per position. Llama 3.1's scaling = (factor, low, high, original)
    slows the slow pairs: by `factor` below `low` turns in `original` positions, not at all above `high` turns:

        r_i <- (1 - s_i) r_i / factor + s_i r_i,   s_i = (turns_i - low) / (high - low), clipped to 0..1
    """

    def __init__(self, head_dim, length, theta, scaling=()):
        super().__init__()
        # rounded as transformers rounds it: the last bit of r moves the angle at position 10,000 by 1e-3 radians
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
    ba = ab.flip(-2)  # by chunk and cat torch.compile would write the gradient twice, in fp32 and packed with v's
    return torch.addcmul(ab * cos, ba, signed_sin).flatten(-2).to(x.dtype)


def repeat_heads(x, n):
    """(B, G, T, D) -> (B, n, T, D): each key and value head for the n / G query heads of its group."""
    return x.repeat_interleave(n // x.size(1), dim=1)


def attend(q, k, v, kernel="sdpa", scale=None, mask=None):
    """A V: causal softmax attention of the last T of S positions.

    q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E). scale: 1 / sqrt(D) if None.
    kernel: "sdpa" (torch's fused kernels), "flash" (the flash-attn package; sdpa with a mask), "eager" (the formula,
    softmax in fp32). mask: (B, 1, T, S) or (T, S), added to the scores instead of the causal mask.
    """
    T, S = q.size(2), k.size(2)
    if kernel == "flash" and mask is None:
        from flash_attn import flash_attn_func

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, heads, D)
        return flash_attn_func(q, k, v, causal=True, softmax_scale=scale).transpose(1, 2)
    is_causal = mask is None and T == S and T > 1  # the kernels' own causal flag is enough
    needs_mask = mask is None and T > 1 and not is_causal  # a single last position sees every key
    if needs_mask or (mask is None and kernel == "eager"):
        mask = torch.full((T, S), -math.inf, device=q.device).triu(S - T + 1)
    if mask is not None:
        mask = mask.to(q.dtype)
    if kernel == "eager":
        k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))  # (B, H, S, …)
        scores = to_fp32(q @ k.mT) * (scale or q.size(-1) ** -0.5)  # (B, H, T, S)
        return (scores + mask).softmax(dim=-1).to(v.dtype) @ v
    return fused_attention(q, k, v, mask, is_causal, scale)


def fused_attention(q, k, v, mask, is_causal, scale):
    """torch's scaled_dot_product_attention with grouped heads, in a form that its fused kernels take."""
    heads_as_rows = q.size(2) == 1 and mask is not None
    if heads_as_rows:  # one token each: the heads of a group become the rows of one query, and no key is repeated
        q = q.unflatten(1, (k.size(1), -1)).squeeze(3)  # (B, H, 1, D) -> (B, G, H/G, D)
    elif q.is_cuda and k.size(1) < q.size(1) and not takes_groups(q, mask):
        k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))
    shares_keys = q.size(1) != k.size(1)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=shares_keys)
    if heads_as_rows:
        return y.flatten(1, 2).unsqueeze(2)  # (B, G, H/G, E) -> (B, H, 1, E)
    return y


def takes_groups(q, mask):
    """Whether a fused kernel of a GPU takes fewer key heads than query heads: FlashAttention and cuDNN do, in half
    precision since Ampere. With a mask only cuDNN does, which we do not count on."""
    is_ampere = torch.cuda.get_device_properties(q.device).major >= 8
    return mask is None and q.dtype in (torch.float16, torch.bfloat16) and is_ampere


def attend_across(q, keys, values, kernel="sdpa", mask=None):
    """softmax(q [K_1; K_2; …]^T) [V_1; V_2; …] (Eq 2): causal attention to several layers under one softmax.

    q (B, H, T, D); keys, values: one (B, G, S, D) of each layer. The keys of n layers take turns, position by position,
    so n queries in a row for each token make one causal mask right: the last of them sees all n keys of its position.
    So the fused kernels' causal flag is enough, and no T x n S mask exists.
    """
    n = len(keys)
    k, v = (torch.stack(x, dim=3).flatten(2, 3) for x in (keys, values))  # (B, G, S, n, D) -> (B, G, S * n, D)
    if mask is not None:
        return attend(q, k, v, kernel, mask=mask.repeat_interleave(n, dim=-1))
    if q.size(2) == 1:  # a single last position sees every key
        return attend(q, k, v, kernel)
    return attend(q.repeat_interleave(n, dim=2), k, v, kernel)[:, :, n - 1 :: n]


def mix(weights, own, others):
    """w_0 * own + w_1 * others_1 + …. Weights are numbers, learned scalars, or tensors that broadcast."""
    own_weight, *other_weights = weights
    keeps_own = isinstance(own_weight, float) and own_weight == 1  # spares a product
    total = own if keeps_own else own_weight * own
    for w, other in zip(other_weights, others, strict=True):
        total = total + w * other.to(own.dtype)  # under autocast embeddings are fp32
    return total


def join_scores(q, k, weights, others):
    """(q, k) of wider heads, whose product is a mix of scores: l_own q k^T + sum_i l_i q_i k_i^T.
    others: {"q": q_i, "k": k_i} of each layer i."""
    own_weight, *other_weights = weights
    q_others = [w * other["q"] for w, other in zip(other_weights, others, strict=True)]
    k_others = [other["k"] for other in others]
    return torch.cat([own_weight * q, *q_others], dim=-1), torch.cat([k, *k_others], dim=-1)


class Lambdas(nn.Module):
    """The weights of one residual in all layers. forward() -> for each layer (own, one per source), or None where they
    are not set here: the layer lacks the residual, or a Gate or the softmax (map="cross") weighs. Learned ones are
    vectors, so AdamW does not decay them.

    n_sources: the number of sources in each layer, 0 where the residual does nothing.
    """

    def __init__(self, residual, n_sources):
        super().__init__()
        self.residual, self.n_sources = residual, n_sources
        self.layers = [n for n in range(len(n_sources)) if n_sources[n]]
        count = len(self.layers)
        if residual.learn in ("scalar", "sources", "unit"):
            first = 1 if residual.learn == "sources" else 0  # the layer's own weight is not learned
            self.scalars = nn.ParameterList(torch.tensor(residual.weights(n_sources[n])[first:]) for n in self.layers)
            self.scale = nn.Parameter(torch.ones(count)) if residual.learn == "unit" else None
        elif residual.learn == "lerp":
            self.share = nn.Parameter(torch.full((count,), residual.weights(1)[1]))
        elif residual.learn == "softmax":
            own, rise = residual.lam or (0.5, 0.0)
            self.own = nn.Parameter(torch.full((count,), own))
            self.logits = nn.Parameter(rise * torch.arange(count))
            self.scale = nn.Parameter(torch.tensor([float(len(n_sources))]))

    def forward(self):
        r = self.residual
        starts = [r.weights(self.n_sources[n]) for n in self.layers]
        if r.per_token or r.map == "cross":
            weights = [None] * len(self.layers)
        elif r.learn == "scalar":
            weights = [tuple(scalars) for scalars in self.scalars]
        elif r.learn == "sources":
            weights = [(start[0], *scalars) for start, scalars in zip(starts, self.scalars, strict=True)]
        elif r.learn == "unit":
            weights = [tuple(s * ab / ab.norm()) for s, ab in zip(self.scale, self.scalars, strict=True)]
        elif r.learn == "lerp":
            weights = [(1 - share, share) for share in self.share]
        elif r.learn == "softmax":
            weights = zip(self.own, self.scale * self.logits.softmax(0), strict=True)
        else:
            weights = starts
        of_layer = dict(zip(self.layers, weights, strict=True))
        return [of_layer.get(n) for n in range(len(self.n_sources))]


class Gate(nn.Module):
    """Weights that depend on the token: a layer's normed input x (B, T, C) -> (own, source), each a number or
    (B, G, T, 1). Heads are key and value heads.

    "head":    (g, 1 - g), g = sigmoid(W x + b) for each head                        x-transformers
    "sigmoid": (l_own, l sigmoid(W x[..., :12])) for each head, from W = 0           modded-nanogpt, nanochat
    "relu":    (l_own, l relu(W x)) for each head                                    SATFormer
    """

    def __init__(self, cfg, residual):
        super().__init__()
        self.residual = residual
        self.n_in = min(12, cfg.n_embd) if residual.learn == "sigmoid" else cfg.n_embd
        std = 0.0 if residual.learn == "sigmoid" else None
        self.w = Linear(self.n_in, {"gate": cfg.n_kv_head}, bias=residual.learn == "head", std=std)

    def forward(self, x):
        z = self.w(x[..., : self.n_in])  # (B, T, G)
        z = z.transpose(1, 2).unsqueeze(-1)  # (B, G, T, 1)
        if self.residual.learn == "head":
            g = z.sigmoid()
            return g, 1 - g
        activation = {"sigmoid": torch.sigmoid, "relu": torch.relu}[self.residual.learn]
        own, factor = self.residual.weights(1)
        return own, factor * activation(z)


class OutputGate(nn.Module):
    """What is done to y = U_n (B, H, T, D) before the output projection. x: the layer's normed input (B, T, C).
    v: V' of the same tokens (B, G, T, D).

    "exclusive":  y - tanh(a) (y·u) u, u = v / |v|, a from 0 for each query head     Exclusive self-attention
    "gate":       sigmoid(W x) y, a number for each channel                          gated attention (Qwen)
    "gate_heads": the same with a number for each query head
    """

    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.kind = cfg.n_head, cfg.value_mode.output
        if self.kind == "exclusive":
            self.strength = nn.Parameter(torch.zeros(cfg.n_head))
        else:
            per_head = cfg.head_dim if self.kind == "gate" else 1
            self.w = Linear(cfg.n_embd, {"gate": cfg.n_head * per_head})

    def forward(self, y, v, x):
        if self.kind == "exclusive":
            unit = repeat_heads(F.normalize(to_fp32(v), dim=-1).to(y.dtype), self.n_head)  # (B, H, T, D)
            along = (y * unit).sum(dim=-1, keepdim=True) * unit
            return y - self.strength.tanh().to(y.dtype)[:, None, None] * along
        gate = self.w(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, D or 1)
        return gate.sigmoid() * y


class Attention(nn.Module):
    """One layer's attention, the place where q, k, v and scores of earlier layers come in. (Their hidden states come in
    in Block, and DenseFormer's average in GPT.hidden.)

    forward: x (B, T, C) -> U_n W_o (B, T, C), this layer's own q, k, v as projected, and its q, k, v as they attend
    (mixed or borrowed; with a cache, keys and values of all tokens so far). The arguments `raw` and `attended` map
    earlier layers, `raw` also token tables, to these tensors. `raw` has those of this call's tokens alone: mixes before
    attention act at each position, and the cache stores what they made. They are arguments and results, not attributes,
    so that activation checkpointing and torch.compile see every dependency.
    """

    def __init__(self, cfg, n, plan, kernel):
        super().__init__()
        self.n, self.plan, self.kernel = n, plan, kernel
        self.n_head, self.head_dim, self.norm_eps = cfg.n_head, cfg.head_dim, cfg.norm_eps
        self.n_first = 0  # value heads that are layer 0's
        if "v" in plan.heads:
            self.n_first = cfg.n_kv_head - plan.heads["v"]
        self.projected = dict(plan.heads)  # {tensor that has weights here: its heads}
        if cfg.value_mode.share_v == "keys":
            del self.projected["v"]
        is_gpt2 = cfg.arch == "gpt2"
        self.proj = Linear(cfg.n_embd, {t: h * cfg.head_dim for t, h in self.projected.items()}, bias=is_gpt2)
        self.out = Linear(cfg.n_head * cfg.head_dim, {"o": cfg.n_embd}, bias=is_gpt2, std=into_stream_std(cfg))
        self.mixes = [m for m in plan.mixes if m.residual.of != "hidden"]  # those are Block's
        self.gates = nn.ModuleDict({str(m.index): Gate(cfg, m.residual) for m in self.mixes if m.residual.per_token})
        self.output_gate = None if cfg.value_mode.output == "plain" else OutputGate(cfg)

    def project(self, x, angles):
        """The tensors that this layer owns, from one product: {t: (B, heads of t, T, D)}, q and k rotated."""
        B, T, _ = x.shape
        y = self.proj(x).view(B, T, -1, self.head_dim)  # (B, T, heads * D) -> (B, T, heads, D)
        parts = y.split(list(self.projected.values()), dim=2)  # (B, T, heads of t, D) each
        own = dict(zip(self.projected, parts, strict=True))
        if "v" in self.plan.heads and "v" not in own:  # share_v="keys": before rope
            own["v"] = F.rms_norm(own["k"], (self.head_dim,), eps=self.norm_eps).to(y.dtype)  # else fp32 in autocast
        for t in ("q", "k"):
            if t in own:
                own[t] = apply_rope(own[t], angles)
        # Only now (B, heads, T, D), as a view: attention's output and gradient then have the layout that `out` reads
        return {t: part.transpose(1, 2) for t, part in own.items()}

    def forward(self, x, angles, lambdas, raw, attended, cache=None):
        """lambdas[j]: the weights of residual j in this layer, see Lambdas. angles: see Rope."""
        B, T, _ = x.shape
        own = self.project(x, angles)
        now = dict(own)  # what this layer attends with
        in_softmax, after = [], []  # mixes that act there
        for m in self.mixes:
            of = m.residual.of
            weights = self.gates[str(m.index)](x) if m.residual.per_token else lambdas[m.index]
            if m.residual.map == "own" and of in "qkv":
                # ResFormer (Eq 7): V' = l_own V_n + l V_1. The source is raw and not detached.
                now[of] = mix(weights, now[of], [raw[i][of] for i in m.sources])
            elif m.residual.map == "cross" or of == "scores":
                in_softmax.append((m, weights))
            else:
                after.append((m, weights, now.get("v")))  # V_n of this call's tokens, as mixed so far
        v_new = now.get("v")  # of this call's tokens, as mixed
        for t in "qkv":
            if t not in self.plan.heads:
                # Borrowed (SVFormer's V_1, Eq 10; CLA): read as the owner attends with it. The owner has cached it.
                now[t] = attended[self.plan.owner[t]][t]
            elif t != "q" and cache is not None:
                now[t] = cache.extend(t, self.n, now[t])  # (B, G, tokens so far, D)
        if self.n_first:
            now["v"] = torch.cat([now["v"], attended[0]["v"][:, -self.n_first :]], dim=1)  # (B, G, tokens so far, D)
        mask = None if cache is None else cache.mask
        y = self.attend_with_scores(now, in_softmax, attended, mask)  # (B, H, T, D)
        for m, weights, v in after:
            y = self.mix_after(y, m, weights, v, now, raw, attended, mask)
        if self.output_gate:
            y = self.output_gate(y, v_new, x)
        return self.out(y.transpose(1, 2).reshape(B, T, -1)), own, now  # (B, H, T, D) -> (B, T, H * D)

    def attend_with_scores(self, now, in_softmax, attended, mask):
        """A_n V' (B, H, T, D). Residuals may act in the softmax: by keys of other layers beside its own (Eq 2),
        or by their scores, added in one product: l_own q k^T + l q_i k_i^T = [l_own q; l q_i] [k; k_i]^T."""
        q, k, v = now["q"], now["k"], now["v"]
        cross = [i for m, _ in in_softmax if m.residual.map == "cross" for i in m.sources]
        if cross:  # Eq 2
            keys, values = [k, *(attended[i]["k"] for i in cross)], [v, *(attended[i]["v"] for i in cross)]
            return attend_across(q, keys, values, self.kernel, mask)
        for m, weights in in_softmax:
            q, k = join_scores(q, k, weights, [attended[i] for i in m.sources])
        wider = q.size(-1) - self.head_dim
        if not wider:
            return attend(q, k, v, self.kernel, mask=mask)
        v = F.pad(v, (0, wider))  # fused kernels want one width for q, k and v
        return attend(q, k, v, self.kernel, self.head_dim**-0.5, mask=mask)[..., : self.head_dim]

    def mix_after(self, y, m, weights, v, now, raw, attended, mask):
        """y (B, H, T, D), mixed with what residual m adds after attention. v: V_n as mixed by the residuals that are
        listed before m, (B, G, T, D)."""
        if m.residual.of == "probs":
            others = [attend(attended[i]["q"], attended[i]["k"], now["v"], self.kernel, mask=mask) for i in m.sources]
        elif m.residual.map == "identity":  # U_n = A_n V_n + l V_1 (Fig 10); with all sources Eq 6
            others = [repeat_heads(raw[i]["v"], self.n_head) for i in m.sources]
        else:  # "delta", NeuTRENO (Eq 8): U_n = A_n V_n + l (V_1 - V_n)
            others = [repeat_heads(raw[i]["v"] - v, self.n_head) for i in m.sources]
        return mix(weights, y, others)


class MLP(nn.Module):
    """x (B, T, C) -> (B, T, C): SwiGLU, (silu(x W_gate) * x W_up) W_down, or GPT-2's gelu(x W_up) W_down."""

    def __init__(self, cfg):
        super().__init__()
        is_gpt2 = cfg.arch == "gpt2"
        parts = {"up": cfg.n_hidden} if is_gpt2 else {"gate": cfg.n_hidden, "up": cfg.n_hidden}
        self.is_gpt2 = is_gpt2
        self.up = Linear(cfg.n_embd, parts, bias=is_gpt2)
        self.down = Linear(cfg.n_hidden, {"down": cfg.n_embd}, bias=is_gpt2, std=into_stream_std(cfg))

    def forward(self, x):
        if self.is_gpt2:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).chunk(2, dim=-1)  # (B, T, n_hidden) each
        return self.down(F.silu(gate) * up)


def into_stream_std(cfg):
    """Initial spread of the projections into the residual stream: GPT-2's are smaller by sqrt(2 n_layer)."""
    return cfg.init_std / math.sqrt(2 * cfg.n_layer) if cfg.arch == "gpt2" else None


def new_norm(cfg):
    norm = nn.LayerNorm if cfg.arch == "gpt2" else nn.RMSNorm
    return norm(cfg.n_embd, cfg.norm_eps)


class Block(nn.Module):
    """One layer: x (B, T, C) -> x (B, T, C), raw, attended. The last two hold only what later layers read: names of
    `keep_raw` (its input "hidden" may be one of them) and `keep_attended`."""

    def __init__(self, cfg, n, plan, kernel, keep_raw, keep_attended):
        super().__init__()
        self.keep_raw, self.keep_attended = keep_raw, keep_attended
        self.is_cut = cfg.value_mode.cut_first and n == 0
        self.norm1, self.attn = new_norm(cfg), Attention(cfg, n, plan, kernel)
        self.norm2, self.mlp = new_norm(cfg), MLP(cfg)
        self.hidden_mixes = [m for m in plan.mixes if m.residual.of == "hidden"]

    def forward(self, x, angles, lambdas, raw, attended, cache=None):
        h = x
        for m in self.hidden_mixes:
            h = mix(lambdas[m.index], h, [raw[i]["hidden"] for i in m.sources])
        y, new_raw, new_attended = self.attn(self.norm1(h), angles, lambdas, raw, attended, cache)
        h = y.to(h.dtype) if self.is_cut else h + y  # under autocast y alone is bf16
        new_raw["hidden"] = x
        kept_raw = {t: new_raw[t] for t in self.keep_raw}
        kept_attended = {t: new_attended[t] for t in self.keep_attended}
        return h + self.mlp(self.norm2(h)), kept_raw, kept_attended


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
        """H_i of xs = [X_0, …, X_i], each of one shape."""
        if i % self.period:
            return xs[i]
        alpha = self.alphas[i // self.period - 1]
        return sum(a * x for a, x in zip(alpha, xs[i % self.dilation :: self.dilation], strict=True))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits x w^T, which never exist for more than `rows` rows at a time.

    x (N, C), w (V, C), target (N,), below 0 = ignored -> scalar in nats, fp32 (float64 if w is). The forward computes
    the gradients too, chunk by chunk while the chunk's logits exist; the backward only scales them. They carry neither
    the 1/n of the mean over n targets nor the loss scale until then: in fp16, a softmax over 65,536 targets would
    vanish. Products use autocast's dtype, sums in fp32. w is padded to a multiple of `multiple` rows, which matrix
    kernels on GPUs prefer; the padding's logits are -inf. scatter: whether the one-hot targets are subtracted by a
    scatter. Of a scatter torch.compile makes three kernels for a GPU, without it one, which moves a third of the bytes.
    Where nothing is compiled a scatter needs less time (1.3 x on a CPU) and memory. (torch's own linear_cross_entropy
    ignores autocast, and is slower on a CPU.)
    """

    @staticmethod
    def forward(ctx, x, w, target, rows, multiple, scatter, grads):
        V, kind = w.size(0), x.device.type
        exact = torch.promote_types(w.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w.dtype
        padded = w.to(dtype)
        if V % multiple:
            padded = F.pad(padded, (0, 0, 0, -V % multiple))  # (V or a little more, C)
        total = torch.zeros((), dtype=exact, device=x.device)
        grad_w = torch.zeros_like(padded, dtype=exact) if grads else None
        grad_x = []
        keep = (target >= 0)[:, None].to(exact)  # (N, 1)
        target = target.clamp(min=0)[:, None]  # (N, 1)
        for xc, tc, kc in zip(x.split(rows), target.split(rows), keep.split(rows), strict=True):
            nats, grad_xc, grad_wc = LinearCrossEntropy.chunk(xc.to(dtype), padded, tc, kc, V, scatter, grads)
            total = total + nats
            if grads:
                grad_x.append(grad_xc.to(x.dtype))
                grad_w += grad_wc
        n = keep.sum().clamp(min=1)
        if grads:
            ctx.save_for_backward(torch.cat(grad_x), grad_w[:V], n)
            ctx.dtype = w.dtype
        return total / n

    @staticmethod
    def chunk(x, w, target, keep, V, scatter, grads):
        """x (rows, C), w (V or more, C), target, keep (rows, 1) -> summed nats, and their gradients in x and w or None.
        Temporaries are freed before the next chunk."""
        z = F.linear(x, w).to(keep.dtype)  # (rows, V or more); in place from here on: passes over it are the cost
        z[:, V:] = -math.inf
        z.sub_(z.amax(dim=1, keepdim=True))
        target_logit = z.gather(1, target)
        z.exp_()  # from here on z holds exponentials
        denominator = z.sum(dim=1, keepdim=True)
        nats = ((denominator.log() - target_logit) * keep).sum()
        if not grads:
            return nats, None, None
        z.mul_(keep / denominator)  # softmax - one-hot, 0 in ignored rows
        if scatter:
            z.scatter_add_(1, target, -keep)
        else:
            z = z - (torch.arange(z.size(1), device=z.device) == target) * keep
        g = z.to(x.dtype)
        return nats, g @ w, g.T @ x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w, n = ctx.saved_tensors
        grad = grad / n
        return grad_x * grad.to(grad_x.dtype), (grad_w * grad).to(ctx.dtype), None, None, None, None, None


def normal(seed, name, shape, std):
    """N(0, std^2) in fp32, zeros for std 0, from a random stream of (seed, name) alone, whatever else is drawn."""
    if std == 0:
        return torch.zeros(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(key % 2**63)
    return torch.randn(shape, generator=generator) * std


class GPT(nn.Module):
    """The model. attn: "sdpa", "flash" or "eager" (see `attend`), which changes no number beyond rounding.
    recompute: activation checkpointing. The forward keeps each block's inputs (x, and what it reads of earlier layers),
    and the backward computes the inside of the block a second time. init=False: a checkpoint will set the weights.
    half_stream: under autocast the residual stream is in its dtype too, which moves less memory and rounds more."""

    def __init__(self, cfg, seed=0, attn="sdpa", init=True, recompute=False, half_stream=False):
        super().__init__()
        self.cfg, self.recompute, self.half_stream = cfg, recompute, half_stream
        plan = plan_layers(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        if cfg.arch == "gpt2":
            self.positions, self.rope = nn.Embedding(cfg.block_size, cfg.n_embd), None
        else:
            self.positions, self.rope = None, Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
        token_mixes = [m for layer in plan for m in layer.mixes if m.residual.source == "token"]
        starts_from_0 = {m.sources[0]: m.residual.tables == "one" for m in token_mixes}  # {"table 0": …}
        self.tables = nn.ModuleList()
        for t in range(len(starts_from_0)):
            self.tables.append(nn.Embedding(cfg.vocab_size, cfg.n_kv_head * cfg.head_dim))
            self.tables[t].std = 0.0 if starts_from_0[f"table {t}"] else cfg.n_embd**-0.5
        self.lambdas = nn.ModuleList(new_lambdas(cfg))
        self.blocks = nn.ModuleList()
        for n, (keep_raw, keep_attended) in enumerate(zip(*tensors_to_keep(cfg), strict=True)):
            self.blocks.append(Block(cfg, n, plan[n], attn, keep_raw, keep_attended))
        self.dense = DepthAverage(cfg.n_layer, *cfg.value_mode.dense) if cfg.value_mode.dense else None
        self.norm = new_norm(cfg)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size})
        if init and not self.embed.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, std) for every matrix, each from (seed, its name), so modes share the weights of equal name and shape.
        A fused product is drawn part by part, so its weights do not depend on what is fused. std is the config's
        init_std, but 1/sqrt(C) for token tables (nanochat's), 0 with tables="one", and Linear.std where that is set."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                module.weight.fill_(1)
            elif isinstance(module, nn.Embedding):
                std = getattr(module, "std", self.cfg.init_std)  # token tables have their own
                module.weight.copy_(normal(seed, name, module.weight.shape, std))
            elif isinstance(module, Linear):
                std = self.cfg.init_std if module.std is None else module.std
                drawn = []
                for part, width in module.parts.items():
                    drawn.append(normal(seed, f"{name}.{part}", (width, module.in_features), std))
                module.weight.copy_(torch.cat(drawn))
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()

    @torch.no_grad()
    def mixing_weights(self):
        """[residual][layer] -> its weights [own, each source], or None where the layer lacks it, a Gate
        computes them, or map="cross" has none."""
        found = []
        for lambdas in self.lambdas:
            found.append([None if w is None else [float(x) for x in w] for w in lambdas()])
        return found

    def hidden(self, idx, cache=None):
        """Token ids (B, T) -> normed output of the last layer (B, T, C). cache: a sample.KVCache, whose stored tokens
        come before these (it then stores these too), or another class with its methods, such as scoring.PrefixTree."""
        B, T = idx.shape
        end = T if cache is None else cache.end(T)
        if end > self.cfg.block_size:
            raise ValueError(f"{end} tokens do not fit block_size={self.cfg.block_size}")
        positions = slice(T) if cache is None else cache.positions(T)
        x = self.embed(idx)
        if self.half_stream and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.positions:
            x = x + self.positions.weight[positions].to(x.dtype)
        angles = self.rope(positions) if self.rope else None
        lambdas = [weights() for weights in self.lambdas]  # [residual][layer]
        raw, attended = {}, {}  # {layer: {name: tensor}}
        outputs = [x]  # the residual stream by depth
        for t, table in enumerate(self.tables):
            raw[f"table {t}"] = {"v": table(idx).view(B, T, self.cfg.n_kv_head, -1).transpose(1, 2)}  # (B, G, T, D)
        for n, block in enumerate(self.blocks):
            inputs = (x, angles, [of_layer[n] for of_layer in lambdas], raw, attended, cache)
            if self.recompute and torch.is_grad_enabled():
                x, raw[n], attended[n] = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x, raw[n], attended[n] = block(*inputs)
            if self.dense:
                outputs.append(x)
                x = self.dense(n + 1, outputs)
        if cache is not None:
            cache.advance(T)
        return self.norm(x)

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> (logits (B, T, V), None); with targets (B, T), below 0 = ignored, -> (None, loss).

        loss: mean cross-entropy in nats, fp32, in chunks of `rows` tokens: no more logits than theirs exist at once.
        """
        x = self.hidden(idx, cache)
        if targets is None:
            return self.head(x), None
        x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
        most_logits = 2**28 if x.is_cuda else 2**26  # at a time, in fp32: 1 GiB or 256 MiB
        is_one_kernel = x.is_cuda and torch.compiler.is_compiling()
        if is_one_kernel and torch.is_autocast_enabled("cuda"):  # then they never exist in fp32
            most_logits = 2**30
        rows = max(1, most_logits // self.cfg.vocab_size)
        rows = math.ceil(len(x) / math.ceil(len(x) / rows))  # even chunks have one shape to compile
        if rows > 128:
            rows = math.ceil(rows / 128) * 128
        multiple = 64 if x.is_cuda else 1
        grads = torch.is_grad_enabled()  # inside of an autograd.Function it is always off
        return None, LinearCrossEntropy.apply(x, self.head.weight, targets, rows, multiple, not is_one_kernel, grads)


def new_lambdas(cfg):
    """The Lambdas of each residual of a model."""
    plan = plan_layers(cfg)
    for index, residual in enumerate(cfg.value_mode.residuals):
        n_sources = []
        for layer in plan:
            here = [len(m.sources) for m in layer.mixes if m.index == index]
            n_sources.append(sum(here))
        yield Lambdas(residual, n_sources)
