"""What a model is, as data: its value mode, the table of all modes, its shape, and the plan of its layers.

A value mode says which tensors of earlier layers a layer reads, how they are mixed in, and which layers own a
projection at all. `plan_layers` turns a mode and a shape into a LayerPlan for each layer. model.py builds the network.

Layers are counted from 0 here: the paper's layer 1 is layer 0. Paper: arXiv 2410.17897. Read next: model.py.
No torch here, so a plan exists before any tensor does.
"""

import dataclasses
import difflib
import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import Literal, get_type_hints

from oldconfig import check_ranges, convert, require, setting


def coerce_fields(config):
    """Convert each field of a frozen dataclass to its exact type (lists become tuples); raises ValueError."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        object.__setattr__(config, name, convert(value, hint, f"{type(config).__name__}: {name}"))


@dataclass(frozen=True)
class Residual:
    """One extra path from earlier layers i into layer n. A_n = softmax(q k^T / sqrt(D)); U_n is what attention makes of
    the values, A_n V_n in vanilla, before the output projection.

    of: what is mixed. "q", "k", "v" as projected (q and k rotated); "hidden", the layer's input (layer 0's is the
        embedding); "scores", q k^T before the softmax; "probs", A itself. A layer that borrows all the tensors that
        the residual reads (see ValueMode) does not have it.
    source: the "first" layer, the one before ("prev"), "all" before, the layer with this number, or a learned table of
        values for each token id ("token"). Gradients flow into a source. It is read as projected, before its own mixes;
        map="cross", of="scores" and of="probs" read it after them.
    map: "own" changes the tensor before it is used; U_n = A_n V' of: V' = l_own V_n + sum_i l_i V_i              (Eq 7)
         "identity" adds after attention, at the same position:       U_n = l_own A_n V' + sum_i l_i V_i          (Eq 6)
         "delta" adds the difference after attention (NeuTRENO):      U_n = l_own A_n V' + sum_i l_i (V_i - V_n') (Eq 8)
            V' has all mixes before attention, V_n' only those that are listed before this residual
         "cross" attends to both layers under one softmax:            U_n = softmax(Q_n [K_n; K_i]^T) [V_n; V_i]  (Eq 2)
    lam: the weights (own, all sources together), or None for the plain mean of own tensor and sources.
    learn: "fixed" weights, or learned ones that start from lam:
         "scalar"   one for the layer's own tensor and one for each source
         "sources"  one for each source; the own weight stays lam[0]
         "lerp"     (1 - l, l)
         "unit"     s (a, b) / sqrt(a^2 + b^2), where s starts from 1
         "softmax"  (Learnable-Plus) the own weight starts from lam[0], and l_n = scale * softmax over layers of logits
                    that start with a rise of lam[1] per layer
         "head", "sigmoid", "relu": a model.Gate computes them from each token
    layers: the layers that have it, see `pick_layers`; () = every layer that has a source.
    tables: with source="token": "each" layer has its own table, or they share them in the order "mirror" (0 1 2 2 1 0)
        or "cycle" (0 1 2 0 1 2), or all share "one", which starts from 0.
    """

    of: Literal["q", "k", "v", "hidden", "scores", "probs"] = "v"
    source: Literal["first", "prev", "all", "token"] | int = "first"
    map: Literal["own", "identity", "delta", "cross"] = "own"
    lam: tuple[float, float] | None = None
    learn: Literal["fixed", "scalar", "sources", "lerp", "unit", "softmax", "head", "sigmoid", "relu"] = "fixed"
    layers: str | tuple[int | float, ...] = ()
    tables: Literal["each", "mirror", "cycle", "one"] = "each"

    def __post_init__(self):
        coerce_fields(self)
        is_value = self.of == "v"
        learns = f"learn={self.learn!r}"
        if self.lam is not None:
            two_weights = len(self.lam) == 2
            require(two_weights, f"lam={self.lam!r}: two weights, (own, sources together), or None for the mean")
        if self.map != "own":
            require(is_value, f"map={self.map!r} concerns values: of must be 'v', not {self.of!r}")
        if self.source == "token":
            require(is_value, f"a table of values has no {self.of}: of must be 'v'")
            require(self.map != "cross", "a table of values has no keys to attend to: map cannot be 'cross'")
        else:
            require(self.tables == "each", f"tables={self.tables!r} is for source='token'")
        if isinstance(self.source, int):
            require(self.source >= 0, f"source={self.source}: a layer's number, counted from 0")
        if self.map == "cross":
            plain = self.lam is None and self.learn == "fixed"
            require(plain, "one softmax sets the weights of map='cross': neither lam nor learn applies")
        if self.learn not in ("fixed", "scalar", "sources"):
            require(self.source != "all", f"{learns} weighs one source against the layer's own: not source='all'")
        if self.per_token:
            before = is_value and self.map == "own"
            require(before, f"{learns} makes a weight per token, for of='v' and map='own' alone")
        own_weight, source_weight = self.weights(1)
        if self.learn == "unit":
            has_direction = own_weight != 0 or source_weight != 0
            require(has_direction, f"lam={self.lam}: {learns} has no direction to start from")
        if self.learn in ("sigmoid", "relu"):
            require(source_weight != 0, f"lam={self.lam}: the gate would multiply 0")
        starts_from_0 = self.tables == "one"
        if self.source == "token" and self.learn != "softmax" and (starts_from_0 or self.learn == "fixed"):
            require(source_weight != 0, f"lam={self.lam}: a table with weight 0 never learns")
        if self.learn == "head":
            require(self.lam is None, f"{learns} divides 1 between own and source: lam stays None")
        if self.learn == "lerp" and self.lam:
            require(abs(sum(self.lam) - 1) <= 1e-6, f"{learns} has weights 1 - l and l: lam={self.lam} must sum to 1")
        pick_layers(self.layers, 1)  # raises if it is no slice

    @property
    def per_token(self):
        """Whether a Gate computes the weights from the token."""
        return self.learn in ("head", "sigmoid", "relu")

    @property
    def reads_attended(self):
        """Whether it reads its sources as they attended (mixed, cached) rather than as projected."""
        return self.map == "cross" or self.of in ("scores", "probs")

    @property
    def reads(self):
        """The names of the projections that it reads from its sources; none for hidden states."""
        if self.map == "cross":
            return ("k", "v")
        if self.of in ("scores", "probs"):
            return ("q", "k")
        return () if self.of == "hidden" else (self.of,)

    def weights(self, n_sources):
        """(weight of the own tensor, weight of each source, …): fixed, or what learned scalars start from."""
        own, together = self.lam or (1 / (n_sources + 1), n_sources / (n_sources + 1))
        return (own,) + (together / n_sources,) * n_sources


def pick_layers(spec, n_layer):
    """Layer numbers, rising. spec: a slice as text ("-3:" the last three, "::-2" every second from the last), or a
    tuple in which negative numbers count from the end and fractions go by depth (0.5 is layer n_layer // 2)."""
    if isinstance(spec, str):
        try:
            parts = [int(part) if part else None for part in spec.split(":")]
            require(len(parts) in (2, 3), spec)
            return sorted(range(n_layer)[slice(*parts)])
        except ValueError:
            raise ValueError(f"layers={spec!r} is not a slice of layers, as '-3:' or '::2'") from None
    found = set()
    for i in spec:
        if isinstance(i, float):
            found.add(math.floor(i * n_layer))
        else:
            found.add(i + n_layer if i < 0 else i)
    return sorted(found)


@dataclass(frozen=True)
class ValueMode:
    """A variant: its residuals, which layers own their q, k and v, what is done to U_n, and averaging over depth.

    residuals: each acts at one place: on the layer's input (of="hidden"), on q, k, v before attention (map="own"), in
        the softmax (map="cross", of="scores"), else after attention. At one place they act in this order, each on what
        the one before it made.
    share_q, share_k, share_v: which layers own that tensor. 1 = every layer; c > 1 = the first of every c layers (CLA);
        0 = one group of all layers: layer 0 owns it (SVFormer); 0.5 = the lower half; (0, 4, 7) = these, see
        `pick_layers`, where 0.5 is the layer half-way. Others borrow from the nearest owner below: they read the tensor
        as attended there (mixed, cached), and have no weights for it. share_v="keys": values are the layer's keys
        before rope, over their RMS in each head.
    borrow_v: whose values a layer without its own reads: those of the "nearest" owner below, or of the "first" layer.
    first_heads: share of the value heads that layers above 0 read from layer 0, the last ones; they own the others.
    kv_group: query heads that share a key and value head (GQA), capped at n_head; 0 = all (MQA).
    output: what is done to U_n before the output projection: nothing ("plain"), or what model.OutputGate says.
    cut_first: layer 0 has no skip around its attention (its MLP has one).
    dense: (dilation, period) of DenseFormer's depth-weighted average of the residual stream, or None.
    name: what it is called on screen, in files and in folders; "" = the table's row that equals it, or custom_….
    """

    residuals: tuple[Residual, ...] = ()
    share_q: int | float | tuple[int | float, ...] = 1
    share_k: int | float | tuple[int | float, ...] = 1
    share_v: int | float | tuple[int | float, ...] | Literal["keys"] = 1
    borrow_v: Literal["nearest", "first"] = "nearest"
    first_heads: float = setting(0.0, "share of heads", least=0, most=1)
    kv_group: int = setting(1, "0 = all", least=0)
    output: Literal["plain", "exclusive", "gate", "gate_heads"] = "plain"
    cut_first: bool = False
    dense: tuple[int, int] | None = None
    name: str = field(default="", compare=False, repr=False)

    def __post_init__(self):
        coerce_fields(self)
        check_ranges(self)
        for t in "qkv":
            share = getattr(self, f"share_{t}")
            if share == "keys":
                require(self.share_k == 1, "share_v='keys' makes values of a layer's own keys: share_k must be 1")
            elif isinstance(share, tuple):
                require(share[:1] == (0,), f"share_{t}={share}: the owning layers begin with 0, as in (0, 4, 7)")
            else:
                fits = share >= 0 and (isinstance(share, int) or share < 1)
                require(
                    fits, f"share_{t}={share}: 1 (own), 0 (layer 0 for all), layers in a group, or a share of layers"
                )
        if self.dense is not None:
            pair = len(self.dense) == 2 and min(self.dense) >= 1
            require(pair, f"dense={self.dense}: (dilation, period), both at least 1, or None")
        has_cross = any(r.map == "cross" for r in self.residuals)
        has_scores = any(r.of == "scores" for r in self.residuals)
        both = "map='cross' and of='scores' both replace the softmax's input: use one of them"
        require(not (has_cross and has_scores), both)
        if self.first_heads:
            plain = self.share_v == 1 and not any(r.of == "v" for r in self.residuals)
            require(plain, "first_heads divides the value heads: share_v must be 1, and no residual may be of='v'")
        if self.output == "exclusive":
            owns_v = self.share_v in (1, "keys") and not self.first_heads
            message = "output='exclusive' takes out a layer's own values: share_v must be 1 or 'keys', first_heads 0"
            require(owns_v, message)
        if self.borrow_v == "first":
            borrows = self.share_v not in (0, 1, "keys")
            require(borrows, "borrow_v='first' does nothing: no layer borrows from another one")
        plain_name = re.fullmatch(r"(\w[\w.+-]*)?", self.name)
        how = "begin with a letter or digit, and use letters, digits and _ . + -"
        require(plain_name, f"name={self.name!r} names folders too: {how}")

    def owner(self, t, n, n_layer):
        """The layer whose tensor t ("q", "k" or "v") layer n uses."""
        share = getattr(self, f"share_{t}")
        if share == "keys":
            owner = n
        elif isinstance(share, tuple):
            owner = max(i for i in pick_layers(share, n_layer) if i <= n)
        elif isinstance(share, float):
            n_owning = max(1, int(share * n_layer))
            owner = min(n, n_owning - 1)
        else:
            owner = n - n % share if share else 0
        if t == "v" and owner != n and self.borrow_v == "first":
            return 0
        return owner

    def with_lam(self, value):
        """This mode with `value` as the weight of the sources, in its last residual that has a settable one."""
        settable = [j for j, r in enumerate(self.residuals) if r.lam and r.learn != "softmax"]
        require(settable, "it has no weight to set")
        residuals = list(self.residuals)
        last = residuals[settable[-1]]
        residuals[settable[-1]] = dataclasses.replace(last, lam=(last.lam[0], value))
        return dataclasses.replace(self, residuals=tuple(residuals))


def residual(**axes):
    """A mode with one Residual."""
    return ValueMode((Residual(**axes),))


# fmt: off
# name: (mode, equation of layers n >= 2 in the paper's count, where it is from; "v5" is the paper's last version).
# V' is the mixed V_n: U_n = A_n V'.
TABLE = {
    "vanilla": (ValueMode(), "A_n V_n", "baseline"),
    # -- ResFormer and its weights
    "resformer": (residual(), "½ A_n (V_n + V_1)", "Eq 7"),
    "resformer_lambda": (residual(lam=(1.0, 2.0)), "A_n (V_n + λ V_1), λ = 2", "Fig 8; v5 Constant"),
    "scaled": (residual(lam=(5**0.5, 0.0)), "√5 A_n V_n, at the start as large as with λ = 2", ""),
    "resformer_learned": (residual(learn="scalar"), "A_n (a_n V_n + b_n V_1), from ½, ½", "v5 Learnable"),
    "resformer_plus": (residual(learn="softmax", lam=(0.5, 0.0)),
        "A_n (a_n V_n + s softmax_n(b) V_1), from a = ½, s = L, b = 0", "v5 Learnable-Plus"),
    "resformer_plus_deep": (residual(learn="softmax", lam=(0.5, 1.0)),
        "the same from b_n = n: deeper layers start with more V_1", "v5, other reading"),
    "resformer_sparse": (residual(lam=(1.0, 5.0), layers="-3:"), "A_n (V_n + 5 V_1) in the last 3 layers", "v5 Sparse"),
    "resformer_dense": (residual(source="all", lam=(1.0, 0.0), learn="scalar"),
        "A_n (a_n V_n + Σ_{i<n} b_ni V_i), from 1, 0", "v5 Dense"),
    # -- other sources, mappings and targets
    "resformer_prev": (residual(source="prev"), "½ A_n (V_n + V_{n-1})", "Fig 11"),
    "resformer_all": (residual(source="all"), "1/n A_n Σ_{i≤n} V_i", "Eq 5, Fig 11"),
    "identity": (residual(map="identity", lam=(1.0, 1.0)), "A_n V_n + λ V_1, λ = 1", "Fig 10"),
    "identity_all": (residual(map="identity", source="all", lam=(1.0, 1.0)), "A_n V_n + 1/(n-1) Σ_{i<n} V_i", "Eq 6"),
    "cross": (residual(map="cross"), "softmax(Q_n [K_n; K_1]ᵀ) [V_n; V_1]", "Eq 2, Fig 10"),
    "cross_prev": (residual(map="cross", source="prev"), "softmax(Q_n [K_n; K_{n-1}]ᵀ) [V_n; V_{n-1}]", "Eq 2, Fig 4"),
    "query": (residual(of="q"), "½ (Q_n + Q_1) for Q_n", "Fig 9"),
    "key": (residual(of="k"), "½ (K_n + K_1) for K_n", "Fig 9"),
    "hidden": (residual(of="hidden"), "½ (H_{n-1} + H_0) for H_{n-1}", "v5, scale ours"),
    "scores": (residual(of="scores"), "½ (Q_n K_nᵀ + Q_1 K_1ᵀ) for Q_n K_nᵀ", "v5, or the next"),
    "probs": (residual(of="probs"), "½ (A_n + A_1) V_n", "v5, attention matrix"),
    # -- sharing
    "svformer": (ValueMode(share_v=0), "A_n V_1", "Eq 10"),
    "svformer_2anchors": (ValueMode(share_v=(0, -1)), "A_n V_a(n), a = first and last layer", "Fig 17"),
    "svformer_3anchors": (ValueMode(share_v=(0, 0.5, -1)), "… first, middle, last", "Fig 17"),
    "svformer_4anchors": (ValueMode(share_v=(0, 0.375, 0.625, -1)), "… first, two of the middle, last", "Fig 17"),
    "share_q": (ValueMode(share_q=0), "softmax(Q_1 K_nᵀ) V_n", "Fig 16"),
    "share_k": (ValueMode(share_k=0), "softmax(Q_n K_1ᵀ) V_n", "Fig 16"),
    "share_q2": (ValueMode(share_q=2), "Q_n of the first layer in each pair", "as Fig 5"),
    "share_k2": (ValueMode(share_k=2), "K_n of the first layer in each pair", "Fig 5"),
    "share_v2": (ValueMode(share_v=2), "V_n of the first layer in each pair", "Fig 5"),
    "cla2": (ValueMode(share_k=2, share_v=2), "K_n, V_n of the first layer in each pair", "Fig 5, 13; CLA"),
    "cla4": (ValueMode(share_k=4, share_v=4), "K_n, V_n of the first in every 4 layers", "CLA"),
    "gqa2": (ValueMode(kv_group=2), "2 query heads per key and value head", "Fig 13"),
    "gqa4": (ValueMode(kv_group=4), "4 query heads per key and value head", "GQA"),
    "gqa8": (ValueMode(kv_group=8), "8 query heads per key and value head", "Fig 13"),
    "mqa": (ValueMode(kv_group=0), "one key and value head", "MQA"),
    "mlkv": (ValueMode(share_k=4, share_v=4, kv_group=0), "one key and value head for every 4 layers", "MLKV"),
    "svformer_gqa4": (ValueMode(share_v=0, kv_group=4), "A_n V_1, 4 query heads per key and value head", "Fig 13"),
    "cla2_gqa4": (ValueMode(share_k=2, share_v=2, kv_group=4), "cla2, 4 query heads per key and value head", "Fig 13"),
    "cla2_svformer": (ValueMode(share_k=2, share_v=0), "K_n of the first layer in each pair, V_1", "combination"),
    # -- NeuTRENO and DenseFormer
    "neutreno": (residual(map="delta", lam=(1.0, 0.4)), "A_n V_n + λ (V_1 − V_n), λ = 0.4", "Eq 8, Fig 22"),
    "resformer_neutreno": (ValueMode((Residual(), Residual(map="delta", lam=(1.0, 0.2)))),
        "A_n V' + λ (V_1 − V'), λ = 0.2, V' = ½ (V_n + V_1)", "Fig 7, authors' code"),
    "resformer_neutreno_literal": (ValueMode((Residual(map="delta", lam=(1.0, 0.2)), Residual())),
        "½ A_n (V_n + V_1) + λ (V_1 − V_n), λ = 0.2", "Fig 7, Eq 7 + Eq 8"),
    "denseformer": (ValueMode(dense=(1, 1)), "H_n = Σ_{j≤n} α_nj X_j, from α_nn = 1", "Eq 9, Fig 7"),
    "denseformer_2x2": (ValueMode(dense=(2, 2)), "the same after every 2nd block, over every 2nd j", "DenseFormer"),
    "resformer_denseformer": (ValueMode((Residual(),), dense=(1, 1)), "both", "combination"),
    # -- what public code does beyond the paper
    "resformer_lerp": (residual(learn="lerp"), "A_n ((1 − λ_n) V_n + λ_n V_1), from ½", "modded-nanogpt"),
    "resformer_head": (residual(learn="head"), "V' = g V_n + (1 − g) V_1, g = σ(W x + b) per head", "x-transformers"),
    "resformer_relu": (residual(learn="relu", lam=(1.0, 1.0)), "V' = V_n + relu(W x) V_1 per head", "SATFormer"),
    "hidden_learned": (residual(of="hidden", lam=(1.0, 0.0), learn="scalar"),
        "a_n H_{n-1} + b_n H_0 for H_{n-1}, from 1, 0", "modded-nanogpt, nanochat"),
    "value_embed": (residual(source="token", learn="lerp"), "A_n ((1 − λ_n) V_n + λ_n E_n[token])", "modded-nanogpt"),
    "value_embed_unet": (residual(source="token", learn="scalar", tables="mirror"),
        "A_n (a_n V_n + b_n E[token]), layers n, L+1-n share E", "modded-nanogpt"),
    "value_embed_cycle": (residual(source="token", learn="scalar", tables="cycle", layers=(0, 1, 2, -3, -2, -1)),
        "the same in the first and last 3 layers, E in the order 012 012", "modded-nanogpt"),
    "value_embed_gated": (residual(source="token", learn="sigmoid", lam=(1.0, 3.0), layers="::-2"),
        "V' = V_n + 3 σ(W x[:12]) E_n[token] per head, every 2nd layer", "nanochat"),
    "value_embed_gated2": (residual(source="token", learn="sigmoid", lam=(1.0, 2.0), layers=(1, 2, -3, -2, -1)),
        "V' = V_n + 2 σ(W x[:12]) E_n[token] in layers 2, 3 and the last 3", "modded-nanogpt"),
    # -- successors
    "resformer_zero": (residual(learn="sources", lam=(1.0, 0.0)), "A_n (V_n + λ_n V_1), from 0", "parameter-golf"),
    "resformer_unit": (residual(learn="unit", lam=(1.0, 0.0)),
        "A_n s_n (a_n V_n + b_n V_1) / √(a_n² + b_n²), from s, a, b = 1, 1, 0", "IMU-1 Eq 4"),
    "skipv1": (ValueMode(first_heads=0.5), "A_n V_n in half of the heads, A_n V_1 in the others", "SkipV1Former"),
    "fusedkv_lite": (ValueMode(share_k=0.5, share_v=0.5, borrow_v="first"),
        "upper half: softmax(Q_n K_{L/2}ᵀ) V_1", "FusedKV-Lite"),
    "share_last": (ValueMode(share_k=0.5, share_v=0.5), "upper half: softmax(Q_n K_{L/2}ᵀ) V_{L/2}", "Gemma 3n"),
    "k_eq_v": (ValueMode(share_v="keys"), "V_n = K_n before rope / its RMS in each head", "Gemma 4"),
    "value_embed_shared": (residual(source="token", tables="one", lam=(1.0, 1.0), layers=(0, -1)),
        "A_n (V_n + E[token]) in the first and last layer, E from 0", "NeoMME"),
    "xsa": (ValueMode(output="exclusive"), "U − tanh(a) (U·u) u, U = A_n V_n, u = V_n/‖V_n‖, a from 0", "XSA; NeoMME"),
    "gated_attention": (ValueMode(output="gate"), "σ(W x) ⊙ A_n V_n, a gate per channel", "Qwen G1"),
    "gated_attention_heads": (ValueMode(output="gate_heads"), "σ(W x) A_n V_n, a gate per query head", "Qwen G1"),
    "resformer_v2": (residual(source=1), "½ A_n (V_n + V_2), n > 2", "v5"),
    "resformer_v3": (residual(source=2), "½ A_n (V_n + V_3), n > 3", "v5"),
    "cut": (ValueMode(cut_first=True), "A_n V_n, layer 1 without the skip around its attention", "v5"),
    "resformer_v2_cut": (ValueMode((Residual(source=1),), cut_first=True), "resformer_v2 and cut", "v5"),
    "resformer_v3_cut": (ValueMode((Residual(source=2),), cut_first=True), "resformer_v3 and cut", "v5"),
}
# fmt: on
VALUE_MODES = {name: dataclasses.replace(mode, name=name) for name, (mode, _, _) in TABLE.items()}


def row_and_number(mode):
    """("neutreno", "0.6") of neutreno_0.6; (mode, "") of a name that does not end in a number."""
    name, _, number = mode.rpartition("_")
    is_number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", number, re.ASCII)
    return (name, number) if name in TABLE and is_number else (mode, "")


def get_mode(mode):
    """A ValueMode with its name, from a name in VALUE_MODES or from a ValueMode; raises ValueError on an unknown name.
    A name may end in the weight of the sources: resformer_lambda_0.5, neutreno_0.6 (see ValueMode.with_lam)."""
    if isinstance(mode, ValueMode):
        return named_mode(mode)
    if mode in VALUE_MODES:
        return VALUE_MODES[mode]
    name, number = row_and_number(mode)
    if number:
        value = float(number)
        try:
            found = VALUE_MODES[name].with_lam(value)
        except ValueError as e:
            raise ValueError(f"unknown value_mode {mode!r}: {name} does not take this number: {e}") from None
        if found == VALUE_MODES[name]:
            return VALUE_MODES[name]
        number = repr(value).removesuffix(".0").replace("e+", "e")
        return dataclasses.replace(found, name=f"{name}_{number}")
    near = difflib.get_close_matches(mode, VALUE_MODES, 1, 0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown value_mode {mode!r}; {guess}known: {', '.join(VALUE_MODES)}")


def named_mode(mode):
    """`mode` with a name: its own, or that of the row which equals it, or "custom_" and digits that follow from it.
    Raises ValueError if it has the name of a row that differs from it."""
    if mode.name:
        try:
            row = get_mode(mode.name)  # the table's, or one with a number
        except ValueError:
            return mode
        require(row == mode, f"name={mode.name!r} already means another mode; choose another name")
        return mode
    for row in VALUE_MODES.values():
        if row == mode:
            return row
    digest = hashlib.sha256(repr(mode).encode()).hexdigest()
    return dataclasses.replace(mode, name=f"custom_{digest[:6]}")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Defaults: the paper's 82M (Table 4). Raises ValueError on an impossible shape."""

    vocab_size: int = setting(50277, "token ids", least=1, most=2**26)
    block_size: int = setting(2048, "tokens per sequence", least=1, most=2**20)
    n_layer: int = setting(8, "layers", least=1, most=1000)
    n_head: int = setting(8, "query heads", least=1, most=2**16)
    n_kv_head: int = setting(0, "key and value heads; 0 = as value_mode says, else n_head", least=0)
    n_embd: int = setting(512, "width of the residual stream", least=1, most=2**16)
    head_dim: int = setting(0, "width of a head; 0 = n_embd / n_head", least=0, most=2**12)
    n_hidden: int = setting(0, "width of the MLP; 0 = 3.5 n_embd, with arch=gpt2 4 n_embd", least=0, most=2**18)
    arch: Literal["llama", "gpt2"] = setting("llama", "RMSNorm, RoPE, SwiGLU; gpt2: LayerNorm, positions, GELU, biases")
    rope_theta: float = setting(10000.0, "of RoPE, see model.Rope", least=1)
    rope_scaling: tuple[float, ...] = setting((), "Llama 3.1's factor, low, high, original, see model.Rope; () = none")
    norm_eps: float = setting(1e-5, "added to the mean square by the norms", least=0, most=1)
    init_std: float = setting(0.02, "spread of the initial weights", least=0, most=100)
    value_mode: str | ValueMode = setting("vanilla", "a row of `python model.py table`, or a ValueMode")

    def __post_init__(self):
        coerce_fields(self)
        check_ranges(self)
        object.__setattr__(self, "value_mode", get_mode(self.value_mode))
        self.fill_heads()
        if not self.n_hidden:
            n_hidden = 4 * self.n_embd if self.arch == "gpt2" else 7 * self.n_embd // 2
            object.__setattr__(self, "n_hidden", n_hidden)
        self.check_widths()
        check_mode(self)

    def fill_heads(self):
        """Set n_kv_head where the mode gives it, and head_dim."""
        H, kv_group = self.n_head, self.value_mode.kv_group
        group = min(kv_group or H, H)  # query heads to a key head
        require(H % group == 0, f"value_mode has {group} query heads to a key head: n_head={H} is not a multiple of it")
        if kv_group != 1 and self.n_kv_head not in (0, H // group):
            raise ValueError(f"n_kv_head={self.n_kv_head}, but value_mode makes it {H // group}; leave it at 0")
        object.__setattr__(self, "n_kv_head", self.n_kv_head or H // group)
        if not self.head_dim:
            require(self.n_embd % H == 0, f"n_embd={self.n_embd} must be a multiple of n_head={H}, or set head_dim")
            object.__setattr__(self, "head_dim", self.n_embd // H)

    def check_widths(self):
        H = self.n_head
        if self.arch == "llama":
            require(self.head_dim % 2 == 0, f"heads are {self.head_dim} wide: RoPE rotates pairs, so it must be even")
        require(H % self.n_kv_head == 0, f"n_head={H} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.rope_scaling:
            scaling = f"rope_scaling={self.rope_scaling}"
            positive = len(self.rope_scaling) == 4 and all(0 < x < math.inf for x in self.rope_scaling)
            require(positive, f"{scaling}: four positive numbers (factor, low factor, high factor, length), or none")
            low, high = self.rope_scaling[1:3]
            require(low < high, f"{scaling}: the low factor must be below the high one")
            require(self.arch == "llama", f"{scaling} is for arch='llama': {self.arch} learns its positions")


def check_mode(cfg):
    """Raise ValueError if a mode names layers that do not exist, has a residual that would do nothing, or leaves a
    layer without any projection of its own."""
    mode, n_layer = cfg.value_mode, cfg.n_layer
    named = set()
    for r in mode.residuals:
        named.update(pick_layers(r.layers, n_layer))
        if isinstance(r.source, int):
            named.add(r.source)
    for share in (mode.share_q, mode.share_k, mode.share_v):
        if isinstance(share, tuple):
            named.update(pick_layers(share, n_layer))
    whole = mode.first_heads < 1 and mode.first_heads * cfg.n_kv_head % 1 == 0
    what = f"first_heads={mode.first_heads} of {cfg.n_kv_head} value heads"
    require(whole, f"{what}: it must be a whole number of them, and not all")
    exist = all(0 <= n < n_layer for n in named)
    require(exist, f"value_mode names layers {sorted(named)}, but there are only 0..{n_layer - 1}")
    if mode.dense:
        dilation, period = mode.dense
        averages = any(i >= dilation for i in range(period, n_layer + 1, period))  # else of no block but itself
        require(averages, f"dense={mode.dense} would average nothing: there are only {n_layer} blocks")
    plan = plan_layers(cfg)
    for index, r in enumerate(mode.residuals):
        layers = pick_layers(r.layers or ":", n_layer)
        require(layers, f"{r}: its layers are none of 0..{n_layer - 1}")
        acting = {n for n, layer in enumerate(plan) if index in [mix.index for mix in layer.mixes]}
        idle = [n for n in layers if n not in acting]
        is_listed = isinstance(r.layers, tuple) and r.layers  # each listed layer must have it; of a slice, any one
        if idle and (is_listed or idle == layers):
            why = "no source, or what it reads is borrowed"
            raise ValueError(f"{r} does nothing in layer {max(idle)}: {why}")
    for n, layer in enumerate(plan):
        message = f"layer {n} would own none of q, k, v: its attention would read nothing of its input"
        require(layer.heads, message)


@dataclass(frozen=True)
class Mix:
    """One residual as it acts in one layer.

    index: its place in ValueMode.residuals. sources: what it reads, layer numbers, or "table 0" for a token table.
    """

    index: int
    residual: Residual
    sources: tuple[int | str, ...]


@dataclass(frozen=True)
class LayerPlan:
    """What a layer reads. owner["q" | "k" | "v"]: the layer whose tensor it uses. heads: {"q", "k" or "v" that it owns:
    how many heads}. mixes: its residuals, in order."""

    owner: dict[str, int]
    heads: dict[str, int]
    mixes: tuple[Mix, ...]


def plan_layers(cfg):
    """The LayerPlan of each layer of a ModelConfig: who owns, who borrows, what is mixed. What `output`, `dense`,
    `cut_first`, `first_heads` and share_v="keys" do besides, the model reads from the mode."""
    mode, n_layer = cfg.value_mode, cfg.n_layer
    owners = [{t: mode.owner(t, n, n_layer) for t in "qkv"} for n in range(n_layer)]
    mixes = [[] for _ in range(n_layer)]
    n_tables = 0
    for index, r in enumerate(mode.residuals):
        layers = pick_layers(r.layers or ":", n_layer)
        lowest = lowest_layers_sharing(r.reads, owners)
        if r.reads:  # a layer that borrows all of them has nothing of its own to mix
            layers = [n for n in layers if any(owners[n][t] == n for t in r.reads)]
        if r.source == "token":
            tables = assign_tables(r.tables, len(layers))
            for n, table in zip(layers, tables, strict=True):
                mixes[n].append(Mix(index, r, (f"table {n_tables + table}",)))
            n_tables += len(set(tables))
            continue
        for n in layers:
            sources = {lowest[i] for i in source_layers(r.source, n)}
            if sources:
                mixes[n].append(Mix(index, r, tuple(sorted(sources))))
    plan = []
    v_heads = cfg.n_kv_head - int(mode.first_heads * cfg.n_kv_head)  # that layers above 0 own
    for n, owner in enumerate(owners):
        heads = {"q": cfg.n_head, "k": cfg.n_kv_head, "v": v_heads if n else cfg.n_kv_head}
        plan.append(LayerPlan(owner, {t: h for t, h in heads.items() if owner[t] == n}, tuple(mixes[n])))
    return plan


def source_layers(source, n):
    """The layers below n that a residual of layer n reads."""
    if source == "all":
        return range(n)
    if source == "first":
        source = 0
    elif source == "prev":
        source = n - 1
    return [source] if 0 <= source < n else []


def lowest_layers_sharing(tensors, owners):
    """For each layer, the lowest layer with the same `tensors` (such as q and k): so a shared tensor counts once."""
    if not tensors:
        return range(len(owners))
    owned_by = [tuple(owner[t] for t in tensors) for owner in owners]
    return [owned_by.index(by) for by in owned_by]


def assign_tables(order, n):
    """The number of the token table of each of n layers, see Residual.tables."""
    if order == "mirror":
        return [min(j, n - 1 - j) for j in range(n)]
    if order == "cycle":
        return [j % ((n + 1) // 2) for j in range(n)]
    if order == "one":
        return [0] * n
    return list(range(n))


def tensors_to_keep(cfg):
    """Which tensors of each layer later layers read: (raw, attended), two lists of sets of names, one set per layer."""
    raw = [set() for _ in range(cfg.n_layer)]
    attended = [set() for _ in range(cfg.n_layer)]
    if cfg.value_mode.first_heads:
        attended[0].add("v")
    for n, layer in enumerate(plan_layers(cfg)):
        for t, owner in layer.owner.items():
            if owner != n:
                attended[owner].add(t)
        for mix in layer.mixes:
            for source in mix.sources:
                if mix.residual.reads_attended:
                    attended[source].update(mix.residual.reads)
                elif mix.residual.source != "token":
                    raw[source].add(mix.residual.of)
    return raw, attended


def stored_tensors(cfg):
    """{("k" or "v", layer): heads} of what a KV cache stores: the tensors that a layer owns."""
    stored = {}
    for n, layer in enumerate(plan_layers(cfg)):
        for t, heads in layer.heads.items():
            if t != "q":
                stored[t, n] = heads
    return stored


def kv_floats_per_token(cfg):
    """Numbers that a KV cache stores per token: head_dim for each head of each stored tensor."""
    return sum(stored_tensors(cfg).values()) * cfg.head_dim
