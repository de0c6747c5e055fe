"""A Llama-like decoder in which every value-residual variant is a row of one table, VALUE_MODES.

Layers are counted from 0 here: the paper's layer 1 is layer 0, its V_1 is raws[0]["v"]. Paper: arXiv 2410.17897.
Shapes: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim = C / H, V vocab_size. U_n is the output of
layer n's attention before its output projection, A_n its causal softmax(q k^T / sqrt(D)).

    python model.py --value_mode=svformer --n_layer=4      print a mode's plan: who owns and who reads what, and sizes
    python model.py table                                  all modes: equation, source, parameters, KV cache
"""

import dataclasses
import difflib
import hashlib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_type_hints

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from configurator import convert, type_name


def refuse(wrong, sentence):
    if wrong:
        raise ValueError(sentence)


def typed(of):
    """Give each field of a frozen dataclass the exact type it says (lists become tuples), or refuse it."""
    for field, hint in get_type_hints(type(of)).items():
        value = getattr(of, field)
        try:
            object.__setattr__(of, field, convert(value, hint))
        except TypeError:
            raise ValueError(f"{type(of).__name__}({field}={value!r}): {field} takes {type_name(hint)}") from None


@dataclass(frozen=True)
class Residual:
    """One extra path from earlier layers i into layer n.

    of: what is mixed. "q", "k", "v" as projected, q and k rotated (a layer that borrows the tensor, see ValueMode, has
        no residual on it); "hidden", the input of the layer (layer 0's is the embedding); "scores", q k^T before the
        softmax; "probs", A itself after it.
    source: "first" layer, the one before ("prev"), "all" before, the one at the same distance from the other end
        ("mirror", upper half only), or a learned table of values for each token id ("token"). Sources are read unmixed
        and never detached. Layers take tables by `tables`: "each" its own, "mirror" 0 1 2 2 1 0, "cycle" 0 1 2 0 1 2.
    map: "own" mixes before attention, so that A_n carries the mix:  U_n = A_n (l_own V_n + sum_i l_i V_i)
         "identity" adds after attention, token by token:            U_n = l_own A_n V_n + sum_i l_i V_i       (Eq 6)
         "delta" adds the difference (NeuTRENO, Eq 8):               U_n = l_own A_n V_n + sum_i l_i (V_i - V_n)
            where V_n is mixed by the residuals listed before this one, and not by those after it
         "cross" attends over both layers (Eq 2):                    U_n = softmax(Q_n [K_n; K_i]^T) [V_n; V_i]
    lam: (own, sources together); None is the plain mean of the layer's own tensor and its sources.
    learn: "fixed"; or learned from there: "scalar", one weight for the layer and for each source; "lerp", (1 - l, l);
        "softmax" (Learnable-Plus), l_n = scale * softmax over layers of logits that rise by lam[1] a layer; or computed
        from the layer's normed input x for each token, see Gate: "head", "channel", "sigmoid", "relu".
    layers: only in these, see `pick`; () = in every layer that has a source.
    """

    of: Literal["q", "k", "v", "hidden", "scores", "probs"] = "v"
    source: Literal["first", "prev", "all", "mirror", "token"] = "first"
    map: Literal["own", "identity", "delta", "cross"] = "own"
    lam: tuple[float, float] | None = None
    learn: Literal["fixed", "scalar", "lerp", "softmax", "head", "channel", "sigmoid", "relu"] = "fixed"
    layers: str | tuple[int | float, ...] = ()
    tables: Literal["each", "mirror", "cycle"] = "each"

    def __post_init__(self):
        typed(self)
        v, own, mine = self.of == "v", self.map == "own", f"learn={self.learn!r}"
        pair = self.lam is None or len(self.lam) == 2 and all(map(math.isfinite, self.lam))
        refuse(not pair, f"Residual(lam={self.lam!r}): two weights, (own, sources together), or None for the mean")
        refuse(not own and not v, f"map={self.map!r} concerns values: of must be 'v', not {self.of!r}")
        if self.source == "token":
            refuse(not v, f"a table of values has no {self.of}: of must be 'v'")
            refuse(self.map == "cross", "a table of values has no keys to attend to: map cannot be 'cross'")
        if self.map == "cross":
            fixed = self.lam is None and self.learn == "fixed"
            refuse(not fixed, "one softmax sets the weights of map='cross': neither lam nor learn applies")
        if self.learn not in ("fixed", "scalar"):
            refuse(self.source == "all", f"{mine} weighs one source against the layer's own: not source='all'")
        if self.per_token:
            refuse(not (v and own), f"{mine} makes a weight per token, for of='v' and map='own' alone")
        if self.learn in ("head", "channel"):
            refuse(self.lam, f"{mine} divides 1 between own and source: lam stays None")
        if self.learn == "lerp" and self.lam:
            refuse(abs(sum(self.lam) - 1) > 1e-6, f"{mine} has weights 1 - l and l: lam={self.lam} must sum to 1")
        refuse(self.tables != "each" and self.source != "token", f"tables={self.tables!r} is for source='token'")
        pick(self.layers, 1)

    @property
    def per_token(self):
        return self.learn in ("head", "channel", "sigmoid", "relu")

    def weights(self, n_sources):
        """(weight of the layer's own tensor, weight of each source, …): fixed, or what learned scalars start from."""
        own, together = self.lam or (1 / (n_sources + 1), n_sources / (n_sources + 1))
        return own, *(together / n_sources for _ in range(n_sources))


def pick(spec, n_layer):
    """Layer numbers, rising. spec: a slice as text ("-3:" the last three, "::-2" every second from the last), or a
    tuple in which negative numbers count from the end and fractions go by depth (0.5 is layer n_layer // 2)."""
    if isinstance(spec, str):
        try:
            first, last, *step = (int(part) if part else None for part in spec.split(":"))
            return sorted(range(n_layer)[slice(first, last, *step)])
        except (ValueError, TypeError):
            raise ValueError(f"layers={spec!r} is not a slice of layers, as '-3:' or '::2'") from None
    return sorted({int(i * n_layer) if isinstance(i, float) else i + n_layer * (i < 0) for i in spec})


@dataclass(frozen=True)
class ValueMode:
    """A variant: residuals, which layers own their q, k and v, and averaging of the residual stream over depth.

    residuals: applied in this order, each to what those before it made of the tensor.
    share_q, share_k, share_v: 1 = every layer owns it, c > 1 = the first of every c layers does (CLA), 0 = layer 0 does
    for all (SVFormer), (0, 4, 7) = these do (see `pick`), and the rest read the nearest one below. A layer that reads
    another's tensor reads it as used there (mixed, cached), has no weights for it and no residual on it.
    kv_group: query heads that share a key and value head (GQA), at most all of them; 0 = all (MQA).
    dense: (dilation, period) of DenseFormer's depth-weighted average, or None.
    """

    residuals: tuple[Residual, ...] = ()
    share_q: int | tuple[int | float, ...] = 1
    share_k: int | tuple[int | float, ...] = 1
    share_v: int | tuple[int | float, ...] = 1
    kv_group: int = 1
    dense: tuple[int, int] | None = None

    def __post_init__(self):
        typed(self)
        for t in "qkv":
            share = getattr(self, f"share_{t}")
            if isinstance(share, tuple):
                refuse(0 not in share[:1], f"share_{t}={share}: the owning layers begin with 0, as in (0, 4, 7)")
            else:
                refuse(share < 0, f"share_{t}={share}: 1 (own), 0 (layer 0 for all), or the length of a run of layers")
        pair = self.dense is None or len(self.dense) == 2 and min(self.dense) >= 1
        refuse(not pair, f"dense={self.dense}: (dilation, period), both at least 1, or None")
        refuse(self.kv_group < 0, f"kv_group={self.kv_group}: query heads per key and value head, or 0 for all")
        both = {"cross", "scores"} <= {word for r in self.residuals for word in (r.map, r.of)}
        refuse(both, "map='cross' and of='scores' are two answers to what the softmax sees: use one of them")

    def owner(self, t, n, n_layer):
        """The layer whose tensor t ("q", "k" or "v") layer n uses."""
        share = getattr(self, f"share_{t}")
        if isinstance(share, tuple):
            return max(i for i in pick(share, n_layer) if i <= n)
        return n - n % share if share else 0

    def with_lam(self, value):
        """This mode with the weight of the sources of its last residual that has a lam set to `value`."""
        j = max((j for j, r in enumerate(self.residuals) if r.lam and r.learn != "softmax"), default=None)
        if j is None:
            raise ValueError("it has no weight to set")
        r = dataclasses.replace(self.residuals[j], lam=(self.residuals[j].lam[0], value))
        return dataclasses.replace(self, residuals=(*self.residuals[:j], r, *self.residuals[j + 1 :]))

    @classmethod
    def from_dict(cls, d):
        """Inverse of dataclasses.asdict, after a trip through JSON (which makes lists of tuples)."""
        return cls(**d | {"residuals": tuple(Residual(**r) for r in d["residuals"])})


R, M = Residual, ValueMode
# fmt: off
TABLE = {  # name: (mode, equation in layers n >= 2 of the paper's count, where from). V' is V_n as mixed: U_n = A_n V'.
    "vanilla": (M(), "A_n V_n", "baseline"),
    # -- ResFormer and its weights
    "resformer": (M((R(),)), "½ A_n (V_n + V_1)", "Eq 7"),
    "resformer_lambda": (M((R(lam=(1.0, 2.0)),)), "A_n (V_n + λ V_1), λ = 2", "Fig 8; v5 Constant"),
    "resformer_learned": (M((R(learn="scalar"),)), "A_n (a_n V_n + b_n V_1), from ½, ½", "v5 Learnable"),
    "resformer_plus": (M((R(learn="softmax", lam=(0.5, 0.0)),)),
                       "A_n (a_n V_n + s softmax_n(b) V_1), from a = ½, s = L, b = 0", "v5 Learnable-Plus"),
    "resformer_plus_deep": (M((R(learn="softmax", lam=(0.5, 1.0)),)),
                            "the same from b_n = n: deeper layers start with more V_1", "v5, other reading"),
    "resformer_sparse": (M((R(lam=(1.0, 5.0), layers="-3:"),)), "A_n (V_n + 5 V_1) in the last 3 layers", "v5 Sparse"),
    "resformer_dense": (M((R(source="all", lam=(1.0, 0.0), learn="scalar"),)),
                        "A_n (a_n V_n + Σ_{i<n} b_ni V_i), from 1, 0", "v5 Dense"),
    # -- other sources, mappings and targets
    "resformer_prev": (M((R(source="prev"),)), "½ A_n (V_n + V_{n-1})", "Fig 11"),
    "resformer_all": (M((R(source="all"),)), "1/n A_n Σ_{i≤n} V_i", "Eq 5, Fig 11"),
    "identity": (M((R(map="identity", lam=(1.0, 1.0)),)), "A_n V_n + λ V_1, λ = 1", "Fig 10"),
    "identity_all": (M((R(map="identity", source="all", lam=(1.0, 1.0)),)), "A_n V_n + 1/(n-1) Σ_{i<n} V_i", "Eq 6"),
    "cross": (M((R(map="cross"),)), "softmax(Q_n [K_n; K_1]ᵀ) [V_n; V_1]", "Eq 2, Fig 10"),
    "cross_prev": (M((R(map="cross", source="prev"),)), "softmax(Q_n [K_n; K_{n-1}]ᵀ) [V_n; V_{n-1}]", "Eq 2, Fig 4"),
    "query": (M((R(of="q"),)), "½ (Q_n + Q_1) for Q_n", "Fig 9"),
    "key": (M((R(of="k"),)), "½ (K_n + K_1) for K_n", "Fig 9"),
    "hidden": (M((R(of="hidden"),)), "½ (H_{n-1} + H_0) for H_{n-1}", "v5, scale ours"),
    "scores": (M((R(of="scores"),)), "½ (Q_n K_nᵀ + Q_1 K_1ᵀ) for Q_n K_nᵀ", "v5, or the next"),
    "probs": (M((R(of="probs"),)), "½ (A_n + A_1) V_n", "v5, attention matrix"),
    # -- sharing
    "svformer": (M(share_v=0), "A_n V_1", "Eq 10"),
    "svformer_2anchors": (M(share_v=(0, -1)), "A_n V_a(n), a = first and last layer", "Fig 17"),
    "svformer_3anchors": (M(share_v=(0, 0.5, -1)), "… first, middle, last", "Fig 17"),
    "svformer_4anchors": (M(share_v=(0, 0.375, 0.625, -1)), "… first, two of the middle, last", "Fig 17"),
    "share_q": (M(share_q=0), "softmax(Q_1 K_nᵀ) V_n", "Fig 16"),
    "share_k": (M(share_k=0), "softmax(Q_n K_1ᵀ) V_n", "Fig 16"),
    "share_q2": (M(share_q=2), "Q_n of the odd layer in each pair", "as Fig 5"),
    "share_k2": (M(share_k=2), "K_n of the odd layer in each pair", "Fig 5"),
    "share_v2": (M(share_v=2), "V_n of the odd layer in each pair", "Fig 5"),
    "cla2": (M(share_k=2, share_v=2), "K_n, V_n of the odd layer in each pair", "Fig 5, 13; CLA"),
    "cla4": (M(share_k=4, share_v=4), "K_n, V_n of the first in every 4 layers", "CLA"),
    "gqa2": (M(kv_group=2), "2 query heads per key and value head", "Fig 13"),
    "gqa4": (M(kv_group=4), "4 query heads per key and value head", "GQA"),
    "gqa8": (M(kv_group=8), "8 query heads per key and value head", "Fig 13"),
    "mqa": (M(kv_group=0), "one key and value head", "MQA"),
    "mlkv": (M(share_k=4, share_v=4, kv_group=0), "one key and value head for every 4 layers", "MLKV"),
    "svformer_gqa4": (M(share_v=0, kv_group=4), "A_n V_1, 4 query heads per key and value head", "Fig 13"),
    "cla2_gqa4": (M(share_k=2, share_v=2, kv_group=4), "cla2, 4 query heads per key and value head", "Fig 13"),
    "cla2_svformer": (M(share_k=2, share_v=0), "K_n of the odd layer in each pair, V_1", "combination"),
    # -- NeuTRENO and DenseFormer
    "neutreno": (M((R(map="delta", lam=(1.0, 0.4)),)), "A_n V_n + λ (V_1 − V_n), λ = 0.4", "Eq 8, Fig 22"),
    "resformer_neutreno": (M((R(), R(map="delta", lam=(1.0, 0.2)))),
                           "A_n V' + λ (V_1 − V'), λ = 0.2, V' = ½ (V_n + V_1)", "Fig 7, authors' code"),
    "resformer_neutreno_literal": (M((R(map="delta", lam=(1.0, 0.2)), R())),
                                   "½ A_n (V_n + V_1) + λ (V_1 − V_n), λ = 0.2", "Fig 7, Eq 7 + Eq 8"),
    "denseformer": (M(dense=(1, 1)), "H_n = Σ_{j≤n} α_nj X_j, from α_nn = 1", "Eq 9, Fig 7"),
    "denseformer_2x2": (M(dense=(2, 2)), "the same after every 2nd block, over every 2nd j", "DenseFormer"),
    "resformer_denseformer": (M((R(),), dense=(1, 1)), "both", "combination"),
    # -- what public code does beyond the paper
    "resformer_lerp": (M((R(learn="lerp"),)), "A_n ((1 − λ_n) V_n + λ_n V_1), from ½", "modded-nanogpt"),
    "resformer_head": (M((R(learn="head"),)), "V' = g V_n + (1 − g) V_1, g = σ(W x + b) per head", "x-transformers"),
    "resformer_channel": (M((R(learn="channel"),)), "V' = (1 − g) V_n + g V_1, g = σ(b + x W↓ W↑)", "RWKV-7"),
    "resformer_relu": (M((R(learn="relu", lam=(1.0, 1.0)),)), "V' = V_n + relu(W x) V_1 per head", "SATFormer"),
    "resformer_unet": (M((R(source="mirror"),)), "½ A_n (V_n + V_{L+1-n}) in the upper half", "U-net pairing"),
    "hidden_learned": (M((R(of="hidden", lam=(1.0, 0.0), learn="scalar"),)),
                       "a_n H_{n-1} + b_n H_0 for H_{n-1}, from 1, 0", "modded-nanogpt, nanochat"),
    "value_embed": (M((R(source="token", learn="lerp"),)), "A_n ((1 − λ_n) V_n + λ_n E_n[token])", "modded-nanogpt"),
    "value_embed_unet": (M((R(source="token", learn="scalar", tables="mirror"),)),
                         "A_n (a_n V_n + b_n E[token]), layers n, L+1-n share E", "modded-nanogpt"),
    "value_embed_cycle": (M((R(source="token", learn="scalar", tables="cycle", layers=(0, 1, 2, -3, -2, -1)),)),
                          "the same in the first and last 3 layers, E in the order 012 012", "modded-nanogpt"),
    "value_embed_gated": (M((R(source="token", learn="sigmoid", lam=(1.0, 3.0), layers="::-2"),)),
                          "V' = V_n + 3 σ(W x[:12]) E_n[token] per head, every 2nd layer", "nanochat"),
    "value_embed_gated2": (M((R(source="token", learn="sigmoid", lam=(1.0, 2.0), layers=(1, 2, -3, -2, -1)),)),
                           "V' = V_n + 2 σ(W x[:12]) E_n[token] in layers 2, 3 and the last 3", "modded-nanogpt"),
}
# fmt: on
VALUE_MODES = {name: mode for name, (mode, _, _) in TABLE.items()}


def get_mode(mode):
    """The ValueMode of a name in VALUE_MODES (or `mode` itself if it is one); raises ValueError on another name.
    A name may end in the weight of the sources: resformer_lambda_0.5, neutreno_0.6 (see ValueMode.with_lam)."""
    if isinstance(mode, ValueMode):
        return mode
    if mode in VALUE_MODES:
        return VALUE_MODES[mode]
    name, _, number = mode.rpartition("_")
    if name in VALUE_MODES and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", number, re.ASCII):
        try:
            return VALUE_MODES[name].with_lam(float(number))
        except ValueError as e:
            raise ValueError(f"unknown value_mode {mode!r}: {name} takes no number, {e}") from None
    near = difflib.get_close_matches(mode, VALUE_MODES, 1, 0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown value_mode {mode!r}; {guess}known: {', '.join(VALUE_MODES)}")


def mode_name(mode):
    """The name that get_mode takes for a ValueMode, or "custom_" and a few digits that tell it from others."""
    for name, row in VALUE_MODES.items():
        if row == mode:
            return name
    for name, row in VALUE_MODES.items():
        if any(r.lam and r.learn != "softmax" for r in row.residuals) and len(row.residuals) == len(mode.residuals):
            for value in {r.lam[1] for r in mode.residuals if r.lam}:
                if row.with_lam(value) == mode:
                    return f"{name}_{value!r}".removesuffix(".0").replace("e+", "e")
    return "custom_" + hashlib.sha256(repr(mode).encode()).hexdigest()[:6]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Defaults: the paper's 82M (Table 4)."""

    vocab_size: int = 50277
    block_size: int = 2048  # tokens
    n_layer: int = 8
    n_head: int = 8
    n_kv_head: int = 0  # key and value heads; 0 = as value_mode says, else n_head
    n_embd: int = 512
    n_hidden: int = 0  # width of the MLP; 0 = 3.5 n_embd (llama), 4 n_embd (gpt2)
    arch: Literal["llama", "gpt2"] = "llama"  # RMSNorm, RoPE, SwiGLU / LayerNorm, learned positions, GELU, biases
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, ...] = ()  # Llama 3.1's, see Rope: factor, low, high, original; () = none
    norm_eps: float = 1e-5
    init_std: float = 0.02
    value_mode: str | ValueMode = "vanilla"

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        refuse(self.arch not in ("llama", "gpt2"), f"arch={self.arch!r} is not one of llama, gpt2")
        typed(self)
        put("value_mode", get_mode(self.value_mode))
        H, mode = self.n_head, self.value_mode
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            refuse(getattr(self, name) < 1, f"{name}={getattr(self, name)} must be at least 1")
        group = min(mode.kv_group or H, H)
        refuse(H % group, f"value_mode has {group} query heads to a key head: n_head={H} is no multiple of it")
        other = mode.kv_group != 1 and self.n_kv_head not in (0, H // group)
        refuse(other, f"n_kv_head={self.n_kv_head}, but value_mode makes it {H // group}; leave it at 0")
        put("n_kv_head", self.n_kv_head or H // group)
        put("n_hidden", self.n_hidden or (4 * self.n_embd if self.arch == "gpt2" else 7 * self.n_embd // 2))
        refuse(self.n_embd % H, f"n_embd={self.n_embd} must be a multiple of n_head={H}")
        odd = self.arch == "llama" and self.n_embd // H % 2
        refuse(odd, f"n_embd={self.n_embd} must be n_head={H} times an even head size: RoPE turns pairs")
        for name in ("n_kv_head", "n_hidden"):
            refuse(getattr(self, name) < 1, f"{name}={getattr(self, name)} must be at least 1")
        refuse(H % self.n_kv_head, f"n_head={H} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.rope_scaling:
            mine, four = f"rope_scaling={self.rope_scaling}", "factor, low and high frequency factor, original length"
            positive = len(self.rope_scaling) == 4 and all(0 < x < math.inf for x in self.rope_scaling)
            refuse(not positive, f"{mine}: four positive numbers, {four}, or none")
            refuse(self.rope_scaling[1] >= self.rope_scaling[2], f"{mine}: the low factor must be below the high one")
            refuse(self.arch != "llama", f"{mine} is for arch='llama': {self.arch} learns its positions")
        self.check_layers()

    def check_layers(self):
        """Raises ValueError if the mode names layers that are not there, or a residual or a layer would do nothing."""
        mode, last = self.value_mode, self.n_layer - 1
        named = [pick(r.layers, self.n_layer) for r in mode.residuals]
        named += [pick(s, self.n_layer) for t in "qkv" if isinstance(s := getattr(mode, f"share_{t}"), tuple)]
        named = sorted({i for layers in named for i in layers})
        outside = named and not 0 <= named[0] <= named[-1] <= last
        refuse(outside, f"value_mode names layers {named}, but there are only 0..{last}")
        plan = plan_layers(self)
        for j, r in enumerate(mode.residuals):
            idle = [n for n in range(self.n_layer) if not plan[n].sources[j]]
            if isinstance(r.layers, tuple) and r.layers:  # each of them was meant
                idle = [n for n in pick(r.layers, self.n_layer) if n in idle]
            elif len(idle) < self.n_layer:
                continue
            refuse(
                idle, f"{r} does nothing in layer {max(idle, default=0)}: no source, or it would mix a borrowed tensor"
            )
        far = max(mode.dense or (0,))
        refuse(far > self.n_layer, f"dense={mode.dense} would average nothing: there are only {self.n_layer} blocks")
        for n, layer in enumerate(plan):
            idle = n not in layer.owner.values()
            refuse(idle, f"layer {n} would own none of q, k, v: its attention would read nothing of its input")

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
    residual j takes from (() = residual j does nothing in this layer); table t of token values is source -1 - t."""

    owner: dict[str, int]
    sources: tuple[tuple[int, ...], ...]


def plan_layers(cfg):
    """The LayerPlan of each layer of a ModelConfig: all that the mode means, before any tensor exists."""
    mode, L = cfg.value_mode, cfg.n_layer
    owners = [{t: mode.owner(t, n, L) for t in "qkv"} for n in range(L)]
    sources, n_tables = [], 0
    for r in mode.residuals:
        read = "kv" if r.map == "cross" else {"hidden": "", "scores": "qk", "probs": "qk"}.get(r.of, r.of)

        def first(i, read=read):
            """The first layer whose tensors are those of layer i."""
            return min(j for j in range(i + 1) if all(owners[j][t] == owners[i][t] for t in read)) if read else i

        layers = [n for n in pick(r.layers or ":", L) if first(n) == n]
        if r.source == "token":
            order = {
                "each": lambda j, m: j,
                "mirror": lambda j, m: min(j, m - 1 - j),
                "cycle": lambda j, m: j % ((m + 1) // 2),
            }
            tables = [n_tables + order[r.tables](j, len(layers)) for j in range(len(layers))]
            of_layer = {n: (-1 - t,) for n, t in zip(layers, tables, strict=True)}
            n_tables = max(tables, default=n_tables - 1) + 1
        else:
            before = {"first": lambda n: [0], "prev": lambda n: [n - 1], "all": range, "mirror": lambda n: [L - 1 - n]}
            of_layer = {n: sorted({first(i) for i in before[r.source](n) if i < n}) for n in layers if n}
        sources.append([tuple(of_layer.get(n, ())) for n in range(L)])
    return [LayerPlan(owners[n], tuple(s[n] for s in sources)) for n in range(L)]


def active(mode, layer):
    """(j, residual, its sources) for the residuals of a mode that do something in a layer, given its LayerPlan."""
    pairs = enumerate(zip(mode.residuals, layer.sources, strict=True))
    return [(j, r, sources) for j, (r, sources) in pairs if sources]


def read_later(cfg):
    """Which tensors of each layer later layers read: (raw, used), two lists of sets of names, one set per layer."""
    raw, used = ([set() for _ in range(cfg.n_layer)] for _ in range(2))
    for n, layer in enumerate(plan_layers(cfg)):
        for t, owner in layer.owner.items():
            if owner != n:
                used[owner].add(t)
        for _, r, sources in active(cfg.value_mode, layer):
            for i in sources:
                if r.map == "cross":
                    used[i] |= {"k", "v"}
                elif r.of in ("scores", "probs"):
                    used[i] |= {"q", "k"}
                elif i >= 0:
                    raw[i].add(r.of)
    return raw, used


def kv_floats_per_token(cfg):
    """Numbers a KV cache keeps per token and sequence: n_kv_head * head_dim for each K and each V that a layer owns."""
    owned = sum(layer.owner[t] == n for n, layer in enumerate(plan_layers(cfg)) for t in "kv")
    return owned * cfg.n_kv_head * cfg.head_dim


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
        end, store = self.stop(new.size(2)), self.tensors[t, n]
        if end > self.length:
            raise ValueError(f"the KV cache holds {self.length} tokens, not {end}")
        store.narrow(2, self.pos, new.size(2)).copy_(new)
        return store.narrow(2, 0, end)

    def stop(self, T):
        """One more than the last position of the T tokens that come next."""
        return self.pos + T

    def at(self, T):
        """Their positions."""
        return slice(self.pos, self.pos + T)

    def advance(self, T):
        self.pos += T

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())


class Rows(KVCache):
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

    def stop(self, T):
        refuse(T != 1, f"rows at positions of their own take one token a step, not {T}")
        return self.length

    def at(self, T):
        return self.rows

    def advance(self, T):
        self.rows.add_(T).clamp_(max=self.length - 1)
        self.mask.masked_fill_(self.slots <= self.rows[:, None, None], 0)  # open what a row has reached


class Forks:
    """For `GPT.hidden` in a cache's place: rows of tokens that fork, a beginning and then each of its continuations.

    positions, forks: (B, T) int64: where a token is in its own sequence, and the number of its continuation, 0 in the
    beginning that all share. A token attends to the beginning and to what is before it in its own continuation, as if
    each sequence stood alone. It changes no number beyond rounding, and a beginning is computed once.
    """

    def __init__(self, positions, forks):
        self.positions, self.last = positions, int(positions.max())
        here, there = forks[:, :, None], forks[:, None, :]  # (B, T, 1), (B, 1, T)
        seen = ((here == there) | (there == 0)).tril()[:, None]  # (B, 1, T, T)
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)  # to be added to scores

    def stop(self, T):
        return self.last + 1

    def at(self, T):
        return self.positions

    def extend(self, t, n, new):
        return new

    def advance(self, T):
        pass


def full(x):
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
    -> the cosines and the sines that `turn` takes, (1 or B, 1, T, D/2) each, fp32 whatever the model is.

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


def turn(x, angles):
    """x (B, h, T, D) with its pairs (a, b) = (x_i, x_(i + D/2)) turned by what a Rope returned, to
    (a cos - b sin, b cos + a sin); as it is if angles is None."""
    if angles is None:
        return x
    (cos, sin), (a, b) = angles, full(x).chunk(2, dim=-1)  # a, b (B, h, T, D/2)
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
    scores = full(q @ k.mT) * (scale or q.size(-1) ** -0.5)  # (B, H, T, layers * S)
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
        qk = turn(all_heads[:, :rotated], angles).split([h for t, h in self.heads.items() if t != "v"], dim=1)
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
        that follow cache.pos, and the cache moves on by T. With Forks they are as those say."""
        (B, T), stop = idx.shape, cache.stop(idx.size(1)) if cache else idx.size(1)
        if stop > self.cfg.block_size:
            raise ValueError(f"{stop} tokens do not fit block_size={self.cfg.block_size}")
        x, at = self.embed(idx), cache.at(T) if cache else slice(T)
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


def count_parameters(cfg):
    """(all parameters, those that multiply: matrices without the embeddings). Builds nothing but shapes."""
    with torch.device("meta"):
        model = GPT(cfg)
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    every = sum(p.numel() for p in model.parameters())
    return every, sum(p.numel() for p in model.parameters() if p.ndim == 2) - looked_up


def flops_per_token(cfg):
    """Training FLOPs per token, 6 N + 12 L C T with N the parameters that multiply (PaLM, appendix B: attention counted
    in full, not causal), at T = block_size. Half of 12 C T is q k^T, half A V; residuals on them add their own."""
    halves = 2 * cfg.n_layer
    for layer in plan_layers(cfg):
        for _, r, sources in active(cfg.value_mode, layer):
            halves += len(sources) * (2 * (r.map == "cross" or r.of == "probs") + (r.of == "scores"))
    return 6 * count_parameters(cfg)[1] + 6 * halves * cfg.n_embd * cfg.block_size


def describe_residual(r, sources, weights):
    """What residual r does in a layer, in words; weights: those it has or starts from, see Lambdas."""
    where = " ".join(f"layer {i}" if i >= 0 else f"table {-1 - i}" for i in sources)
    if r.map == "cross":
        return f"attends over {where} too"
    what = r.of if r.map == "own" else f"{r.of} {r.map}"
    if r.per_token:
        return f"{what}: {r.learn} gate between own and {where}"
    own, *each = (float(w) for w in weights)
    learned = f" ({r.learn}, learned)" if r.learn != "fixed" else ""
    return f"{what}: {own:.4g} own + {each[0]:.4g} {'of each ' * (len(each) > 1)}{where}{learned}"


def describe(cfg):
    """The plan as text: the equation, per layer who owns q, k, v and what is mixed in, then sizes."""
    mode, name = cfg.value_mode, mode_name(cfg.value_mode)
    _, equation, source = TABLE.get(name, (mode, "", ""))
    lines = [name + f": {equation}" * bool(equation) + f" ({source})" * bool(source)]
    plan = plan_layers(cfg)
    lambdas = [Lambdas(r, [layer.sources[j] for layer in plan]) for j, r in enumerate(mode.residuals)]
    start = [weights.requires_grad_(False)() for weights in lambdas]  # [residual][layer]
    for n, layer in enumerate(plan):
        words = [f"{t} {'own' if layer.owner[t] == n else f'of layer {layer.owner[t]}':10}" for t in "qkv"]
        words += [describe_residual(r, sources, start[j][n]) for j, r, sources in active(mode, layer)]
        lines.append(f"layer {n:2}  " + "  ".join(words).rstrip())
    if mode.dense:
        lines.append(f"after each {mode.dense[1]} blocks: weighted average over depth, dilation {mode.dense[0]}")
    every, multiply = count_parameters(cfg)
    kv, most = kv_floats_per_token(cfg), 2 * cfg.n_layer * cfg.n_embd
    lines += [
        f"heads           {cfg.n_head} of width {cfg.head_dim}, {cfg.n_kv_head} of keys and values",
        f"parameters      {every:,} ({multiply:,} multiply)",
        f"training FLOPs  {flops_per_token(cfg):,} per token at block_size {cfg.block_size}",
        f"KV cache        {kv:,} numbers per token = {2 * kv:,} bytes in bf16, {kv / most:.4f} of full attention's",
    ]
    return "\n".join(lines)


def table(cfg):
    """All rows of TABLE at the shape of `cfg`, as Markdown."""
    vanilla = count_parameters(dataclasses.replace(cfg, value_mode="vanilla", n_kv_head=0))[0]
    lines = ["| mode | equation | from | parameters | KV numbers per token | of vanilla's | config |"]
    lines += ["|---|---|---|---:|---:|---:|---|"]
    for name, (_, equation, source) in TABLE.items():
        try:
            row = dataclasses.replace(cfg, value_mode=name, n_kv_head=0)
        except ValueError:
            continue  # not with so many layers or heads
        more, kv = count_parameters(row)[0] - vanilla, kv_floats_per_token(row)
        numbers = f"{more:+,} | {kv:,}" if more else f"±0 | {kv:,}"
        file = Path(__file__).with_name("config") / f"{name}.py"
        config = f"config/{name}.py" if file.exists() else f"--value_mode={name}"
        share = kv / (2 * cfg.n_layer * cfg.n_embd)
        lines.append(f"| `{name}` | {equation} | {source} | {numbers} | {share:.4g} | `{config}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    import configurator
    import model  # a config file's ValueMode is model.ValueMode, while this file runs as __main__
    from train import TrainConfig

    def main():
        words = sys.argv[1:]
        names = TrainConfig.__dataclass_fields__  # a run's config file says more than a model's shape
        cfg = configurator.load(model.ModelConfig, words[words[:1] == ["table"] :], usage=__doc__, skip=names)
        if words[:1] == ["table"]:
            print(model.table(cfg))
        else:
            print(model.describe(cfg))

    configurator.run(main)
