"""What a model is, as data: the axes of a value mode, the table of modes, a model's shape, and the plan of its layers.

No torch here: a plan exists before any tensor.
"""

import dataclasses
import difflib
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Literal, get_type_hints

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
