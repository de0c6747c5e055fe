"""What a model is, as data: the axes of a value mode, the table of all modes, a model's shape, the plan of its layers.

    python model.py --value_mode=svformer --n_layer=4      prints a plan: which layer owns, borrows and mixes what

A mode of your own is a file for `python train.py mine.py`, or a row of TABLE:

    from value_modes import Residual, ValueMode
    value_mode = ValueMode((Residual(lam=(1.0, 0.5), layers="0.5:"),), name="half_above")

A value mode says which tensors of earlier layers a layer reads, how it mixes them in, and which layers have
projections of their own. `plan_layers` turns a mode and a shape into a LayerPlan for each layer, which model.py builds.

We count layers from 0: the paper's layer 1 is layer 0. Paper: https://arxiv.org/abs/2410.17897. Next: model.py.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from configurator import UserError, check_fields, read_config, setting
from net.rules import problems_of_mode, problems_of_residual, refuse


@dataclass(frozen=True)
class Residual:
    """One extra path from earlier layers i into layer n. A_n = softmax(Q_n K_n^T / sqrt(D)); U_n is the output of layer
    n's attention before its output projection, A_n V_n in vanilla. Equations are those of arxiv.org/abs/2410.17897.

    of: what is mixed. "q", "k", "v" right after their projection (and rotation); "hidden", the layer's input (layer 0's
        is the embedding); "scores", Q K^T before the softmax; "probs", A itself.
    source: the "first" layer, the one before ("prev"), "all" before, the layer with this number, or a learned table of
        values for each token id ("token"). We never detach a source: gradients flow into it.
    map: "own" changes the tensor before it is used: U_n = A_n V' with  V' = w_self V_n + sum_i l_i V_i           (Eq 7)
         "identity" adds after attention, at the same position:     U_n = w_self A_n V' + sum_i l_i V_i         (Eq 6)
         "delta" adds a difference after attention (NeuTRENO):      U_n = w_self A_n V' + sum_i l_i (V_i - V')  (Eq 8)
         "cross" attends to both layers under one softmax:          U_n = softmax(Q_n [K_n; K_i]^T) [V_n; V_i] (Eq 2)
         A new map: its name here, its place and what it reads below, and its line in model.Attention.
    subtract: what "delta" subtracts: the "mixed" V', or V_n as "projected".
    lam: the weights (w_self, sum of all l_i), the sum in equal parts for all sources; None = the plain mean of the
        layer's own tensor and its sources.
    learn: "fixed" weights, or learned ones that start from lam, separate in each layer:
         "scalar"   one for the layer's own tensor and one for each source
         "sources"  one for each source; w_self stays lam[0]
         "lerp"     (1 - l, l)
         "unit"     s (a, b) / sqrt(a^2 + b^2), from s = 1
         "softmax"  (Learnable-Plus) a_n and s softmax_n(b) over the layers that have it, from a_n = 1/2, s = n_layer,
                    b = slope (0, 1, 2, …). Each layer has a b, and all share one s.
         "head", "sigmoid", "relu": a model.Gate computes them for each token
         A new one: its name here and below, its parameters and its formula in model.MixingWeights, or in Gate and
         `is_gated` if it depends on the token; what it cannot go with in net/rules.py. docs/own_mode.md has an example
    slope: how fast b rises with depth at the start of "softmax".
    layers: the layers that have it, see `pick_layers`; () = each layer that has a source. It acts only in layers that
        own a tensor that it reads (q, k or v): NeuTRENO's would act in no layer of SVFormer's.
    tables: for source="token": "each" layer has its own table, or they share tables in the order "mirror" (0 1 2 2 1 0)
        or "cycle" (0 1 2 0 1 2), or all share "one", which starts from 0.
    """

    of: Literal["q", "k", "v", "hidden", "scores", "probs"] = "v"
    source: Literal["first", "prev", "all", "token"] | int = "first"
    map: Literal["own", "identity", "delta", "cross"] = "own"
    subtract: Literal["mixed", "projected"] = "mixed"
    lam: tuple[float, ...] | None = None
    learn: Literal[
        "fixed", "scalar", "sources", "lerp", "unit", "softmax", "head", "sigmoid", "relu",
    ] = "fixed"  # fmt: skip
    slope: float = 0.0
    layers: str | tuple[int | float, ...] = ()
    tables: Literal["each", "mirror", "cycle", "one"] = "each"

    def __post_init__(self):
        check_fields(self)
        refuse(problems_of_residual(self))

    @property
    def place(self):
        """Where in the layer it acts: on its "input", "before" the softmax, in the "softmax", or "after" it."""
        if self.of == "hidden":
            return "input"
        if self.map == "cross" or self.of == "scores":
            return "softmax"
        if self.map in ("identity", "delta") or self.of == "probs":
            return "after"
        is_known = self.map == "own" and self.of in ("q", "k", "v")
        assert is_known, f"map={self.map!r} of {self.of!r}: add it to Residual.place and to Attention.forward"
        return "before"

    @property
    def reads(self):
        """The names of the projections that it reads from its sources; none for hidden states."""
        if self.of == "hidden":
            return ()
        if self.of in ("scores", "probs"):
            return ("q", "k")
        if self.map == "cross":
            return ("k", "v")
        assert self.of in ("q", "k", "v"), f"of={self.of!r}: add it to Residual.reads, place and Attention.forward"
        return (self.of,)

    @property
    def from_used(self):
        """Whether it reads what its sources used in their softmax (mixed, cached) instead of what they projected."""
        return self.place == "softmax" or self.of == "probs"

    @property
    def is_gated(self):
        """Whether a model.Gate computes the weights from each token."""
        return self.learn in ("head", "sigmoid", "relu")

    def starts(self, n_sources):
        """(w_self, one l_i for each source): fixed weights, or what learned ones start from, except "softmax"."""
        w_self, together = self.lam or (1 / (n_sources + 1), n_sources / (n_sources + 1))
        return (w_self,) + (together / n_sources,) * n_sources


Share = Literal["each", "first", "every 2", "every 4", "lower half"] | tuple[int | float, ...]


@dataclass(frozen=True)
class ValueMode:
    """A variant: its residuals, which layers own their q, k and v, and averaging over depth.

    residuals: where several act at one `place`, they act in this order, each on what the one before it made.
    share_q, share_k, share_v: which layers own that tensor: "each"; the "first" alone (SVFormer: share_v="first"); the
        lowest of "every 2" or "every 4" (CLA); those in the "lower half"; or these, as in (0, 4, 7), see `pick_layers`.
        The others have no weights for it: they borrow the tensor of the nearest owner below, as that layer used it.
    borrow_v: whose values a layer without its own reads: those of the "nearest" owner below, or of the "first" layer.
    values: "projected", or the layer's "keys" before rope, over their RMS in each head.
    heads_from_layer_0: fraction of the value heads that each layer above 0 takes from layer 0. These are the last
        heads; the layer computes the others itself.
    kv_group: query heads per key and value head (GQA), at most n_head; 0 = all (MQA); 1 = as n_kv_head says.
    cut_first: layer 0 has no skip around its attention (its MLP has one).
    dense: (dilation, period) of DenseFormer's depth-weighted average of the residual stream, or None.
    name: what we call it on screen and in files; "" = the table's row that equals it, or custom_….
    """

    residuals: tuple[Residual, ...] = ()
    share_q: Share = "each"
    share_k: Share = "each"
    share_v: Share = "each"
    borrow_v: Literal["nearest", "first"] = "nearest"
    values: Literal["projected", "keys"] = "projected"
    heads_from_layer_0: float = setting(0.0, "fraction of the value heads, below 1", least=0)
    kv_group: int = setting(1, "0 = all", least=0)
    cut_first: bool = False
    dense: tuple[int, ...] | None = None
    name: str = field(default="", compare=False, repr=False)

    def __post_init__(self):
        check_fields(self)
        refuse(problems_of_mode(self))

    def owner(self, t, n, n_layer):
        """The layer whose tensor t ("q", "k" or "v") layer n uses."""
        share = getattr(self, f"share_{t}")
        if share == "each":
            owner = n
        elif share == "first":
            owner = 0
        elif share in ("every 2", "every 4"):
            owner = n - n % int(share[-1])
        elif share == "lower half":
            owner = min(n, max(1, n_layer // 2) - 1)
        else:
            assert isinstance(share, tuple), f"share_{t}={share!r}: add it to ValueMode.owner"
            owner = max(i for i in pick_layers(share, n_layer) if i <= n)
        return 0 if t == "v" and owner != n and self.borrow_v == "first" else owner

    def with_lam(self, value):
        """This mode with `value` as the weight of the sources, in its last residual whose `lam` is not None."""
        settable = [j for j, r in enumerate(self.residuals) if r.lam]
        if not settable:
            raise UserError(f"{self.name} does not take a number: none of its residuals has a weight that can be set")
        residuals, last = list(self.residuals), settable[-1]
        residuals[last] = dataclasses.replace(residuals[last], lam=(residuals[last].lam[0], value))
        return dataclasses.replace(self, residuals=tuple(residuals))


def mode_with(**fields):
    """A ValueMode with one Residual."""
    return ValueMode((Residual(**fields),))


def pick_layers(spec, n_layer):
    """Layer numbers, ascending. spec: a slice as text ("-3:" the last three, "0.5:" the upper half, "::-2" every second
    from the last), or a tuple. Negative numbers count from the end, fractions by depth (0.5 is layer n_layer // 2)."""

    def number(i):
        return math.floor(i * n_layer) if isinstance(i, float) else i

    if isinstance(spec, str):
        ends = (number(ast.literal_eval(part)) if part else None for part in spec.split(":"))
        return sorted(range(n_layer)[slice(*ends)])
    return sorted({number(i) + n_layer if i < 0 else number(i) for i in spec})


# name: (mode, equation of layers n >= 2 in the paper's count, where it is from; "v5" is the paper's latest version).
# V' is the mixed V_n: U_n = A_n V'.
# fmt: off
TABLE = {
    "vanilla": (ValueMode(), "A_n V_n", "baseline"),
    # -- ResFormer and its weights
    "resformer": (mode_with(), "½ A_n (V_n + V_1)", "Eq 7"),
    "resformer_lambda": (mode_with(lam=(1.0, 2.0)), "A_n (V_n + λ V_1), λ = 2", "Fig 8; v5 Constant"),
    "scaled": (mode_with(lam=(5**0.5, 0.0)), "√5 A_n V_n, as large at the start as with λ = 2", "control"),
    "resformer_learned": (mode_with(learn="scalar"), "A_n (a_n V_n + b_n V_1), from ½, ½", "v5 Learnable"),
    "resformer_plus": (mode_with(learn="softmax"),
        "A_n (a_n V_n + s softmax_n(b) V_1), from a = ½, s = L, b = 0", "v5 Learnable-Plus"),
    "resformer_plus_deep": (mode_with(learn="softmax", slope=1.0),
        "the same from b_n = n: deeper layers start with more V_1", "v5, other reading"),
    "resformer_sparse": (mode_with(lam=(1.0, 5.0), layers="-3:"),
        "A_n (V_n + 5 V_1) in the last 3 layers", "v5 Sparse"),
    "resformer_dense": (mode_with(source="all", lam=(1.0, 0.0), learn="scalar"),
        "A_n (a_n V_n + Σ_{i<n} b_ni V_i), from 1, 0", "v5 Dense"),
    # -- other sources, mappings and targets
    "resformer_prev": (mode_with(source="prev"), "½ A_n (V_n + V_{n-1})", "Fig 11"),
    "resformer_all": (mode_with(source="all"), "1/n A_n Σ_{i≤n} V_i", "Eq 5, Fig 11"),
    "identity": (mode_with(map="identity", lam=(1.0, 1.0)), "A_n V_n + λ V_1, λ = 1", "Fig 10"),
    "identity_all": (mode_with(map="identity", source="all", lam=(1.0, 1.0)), "A_n V_n + 1/(n-1) Σ_{i<n} V_i", "Eq 6"),
    "cross": (mode_with(map="cross"), "softmax(Q_n [K_n; K_1]ᵀ) [V_n; V_1]", "Eq 2, Fig 10"),
    "cross_prev": (mode_with(map="cross", source="prev"), "softmax(Q_n [K_n; K_{n-1}]ᵀ) [V_n; V_{n-1}]", "Eq 2, Fig 4"),
    "query": (mode_with(of="q"), "½ (Q_n + Q_1) for Q_n", "Fig 9"),
    "key": (mode_with(of="k"), "½ (K_n + K_1) for K_n", "Fig 9"),
    "hidden": (mode_with(of="hidden"), "½ (H_{n-1} + H_0) for H_{n-1}", "v5, our scale"),
    "scores": (mode_with(of="scores"), "½ (Q_n K_nᵀ + Q_1 K_1ᵀ) for Q_n K_nᵀ", "v5, or the next row"),
    "probs": (mode_with(of="probs"), "½ (A_n + A_1) V_n", "v5, attention matrix"),
    # -- sharing
    "svformer": (ValueMode(share_v="first"), "A_n V_1", "Eq 10"),
    "svformer_2anchors": (ValueMode(share_v=(0, -1)), "A_n V_a(n), a = first and last layer", "Fig 17"),
    "svformer_3anchors": (ValueMode(share_v=(0, 0.5, -1)), "… first, middle, last", "Fig 17"),
    "svformer_4anchors": (ValueMode(share_v=(0, 0.375, 0.625, -1)), "… first, two of the middle, last", "Fig 17"),
    "share_q": (ValueMode(share_q="first"), "softmax(Q_1 K_nᵀ) V_n", "Fig 16"),
    "share_k": (ValueMode(share_k="first"), "softmax(Q_n K_1ᵀ) V_n", "Fig 16"),
    "share_q2": (ValueMode(share_q="every 2"), "Q_n of the first layer in each pair", "like Fig 5"),
    "share_k2": (ValueMode(share_k="every 2"), "K_n of the first layer in each pair", "Fig 5"),
    "share_v2": (ValueMode(share_v="every 2"), "V_n of the first layer in each pair", "Fig 5"),
    "cla2": (ValueMode(share_k="every 2", share_v="every 2"),
        "K_n, V_n of the first layer in each pair", "Fig 5, 13; CLA"),
    "cla4": (ValueMode(share_k="every 4", share_v="every 4"), "K_n, V_n of the first in every 4 layers", "CLA"),
    "gqa2": (ValueMode(kv_group=2), "2 query heads per key and value head", "Fig 13"),
    "gqa4": (ValueMode(kv_group=4), "4 query heads per key and value head", "GQA"),
    "gqa8": (ValueMode(kv_group=8), "8 query heads per key and value head", "Fig 13"),
    "mqa": (ValueMode(kv_group=0), "one key and value head", "MQA"),
    "mlkv": (ValueMode(share_k="every 4", share_v="every 4", kv_group=0),
        "one key and value head for every 4 layers", "MLKV"),
    "svformer_gqa4": (ValueMode(share_v="first", kv_group=4),
        "A_n V_1, 4 query heads per key and value head", "Fig 13"),
    "cla2_gqa4": (ValueMode(share_k="every 2", share_v="every 2", kv_group=4),
        "cla2, 4 query heads per key and value head", "Fig 13"),
    "cla2_svformer": (ValueMode(share_k="every 2", share_v="first"),
        "K_n of the first layer in each pair, V_1", "combination"),
    # -- NeuTRENO and DenseFormer
    "neutreno": (mode_with(map="delta", lam=(1.0, 0.4)), "A_n V_n + λ (V_1 − V_n), λ = 0.4", "Eq 8, Fig 22"),
    "resformer_neutreno": (ValueMode((Residual(), Residual(map="delta", lam=(1.0, 0.2)))),
        "A_n V' + λ (V_1 − V'), λ = 0.2, V' = ½ (V_n + V_1)", "Fig 7, authors' code"),
    "resformer_neutreno_literal": (ValueMode((Residual(), Residual(map="delta", lam=(1.0, 0.2), subtract="projected"))),
        "½ A_n (V_n + V_1) + λ (V_1 − V_n), λ = 0.2", "Fig 7, Eq 7 + Eq 8"),
    "denseformer": (ValueMode(dense=(1, 1)), "H_n = Σ_{j≤n} α_nj X_j, from α_nn = 1", "Eq 9, Fig 7"),
    "denseformer_2x2": (ValueMode(dense=(2, 2)), "the same after every 2nd block, over every 2nd j", "DenseFormer"),
    "resformer_denseformer": (ValueMode((Residual(),), dense=(1, 1)), "both", "combination"),
    # -- what public code does beyond the paper
    "resformer_lerp": (mode_with(learn="lerp"), "A_n ((1 − λ_n) V_n + λ_n V_1), from ½", "modded-nanogpt"),
    "resformer_head": (mode_with(learn="head"), "V' = g V_n + (1 − g) V_1, g = σ(W x + b) per head", "x-transformers"),
    "resformer_relu": (mode_with(learn="relu", lam=(1.0, 1.0)), "V' = V_n + relu(W x) V_1 per head", "SATFormer"),
    "hidden_learned": (mode_with(of="hidden", lam=(1.0, 0.0), learn="scalar"),
        "a_n H_{n-1} + b_n H_0 for H_{n-1}, from 1, 0", "modded-nanogpt, nanochat"),
    "value_embed": (mode_with(source="token", learn="lerp"), "A_n ((1 − λ_n) V_n + λ_n E_n[token])", "modded-nanogpt"),
    "value_embed_unet": (mode_with(source="token", learn="scalar", tables="mirror"),
        "A_n (a_n V_n + b_n E[token]), layers n, L+1-n share E", "modded-nanogpt"),
    "value_embed_cycle": (mode_with(source="token", learn="scalar", tables="cycle", layers=(0, 1, 2, -3, -2, -1)),
        "the same in the first and last 3 layers, E in the order 012 012", "modded-nanogpt"),
    "value_embed_gated": (mode_with(source="token", learn="sigmoid", lam=(1.0, 3.0), layers="::-2"),
        "V' = V_n + 3 σ(W x[:12]) E_n[token] per head, every 2nd layer", "nanochat"),
    "value_embed_gated2": (mode_with(source="token", learn="sigmoid", lam=(1.0, 2.0), layers=(1, 2, -3, -2, -1)),
        "V' = V_n + 2 σ(W x[:12]) E_n[token] in layers 2, 3 and the last 3", "modded-nanogpt"),
    # -- successors
    "resformer_zero": (mode_with(learn="sources", lam=(1.0, 0.0)), "A_n (V_n + λ_n V_1), from 0", "parameter-golf"),
    "resformer_unit": (mode_with(learn="unit", lam=(1.0, 0.0)),
        "A_n s_n (a_n V_n + b_n V_1) / √(a_n² + b_n²), from s, a, b = 1, 1, 0", "IMU-1 Eq 4"),
    "skipv1": (ValueMode(heads_from_layer_0=0.5),
        "A_n V_n in half of the heads, A_n V_1 in the others", "SkipV1Former"),
    "fusedkv_lite": (ValueMode(share_k="lower half", share_v="lower half", borrow_v="first"),
        "upper half: softmax(Q_n K_{L/2}ᵀ) V_1", "FusedKV-Lite"),
    "share_last": (ValueMode(share_k="lower half", share_v="lower half"),
        "upper half: softmax(Q_n K_{L/2}ᵀ) V_{L/2}", "Gemma 3n"),
    "k_eq_v": (ValueMode(values="keys"), "V_n = K_n before rope / its RMS in each head", "Gemma 4"),
    "value_embed_shared": (mode_with(source="token", tables="one", lam=(1.0, 1.0), layers=(0, -1)),
        "A_n (V_n + E[token]) in the first and last layer, E from 0", "NeoMME"),
    "resformer_v2": (mode_with(source=1), "½ A_n (V_n + V_2), n > 2", "v5"),
    "resformer_v3": (mode_with(source=2), "½ A_n (V_n + V_3), n > 3", "v5"),
    "cut": (ValueMode(cut_first=True), "A_n V_n, layer 1 without the skip around its attention", "v5"),
    "resformer_v2_cut": (ValueMode((Residual(source=1),), cut_first=True), "resformer_v2 and cut", "v5"),
    "resformer_v3_cut": (ValueMode((Residual(source=2),), cut_first=True), "resformer_v3 and cut", "v5"),
}
# fmt: on
VALUE_MODES = {name: dataclasses.replace(mode, name=name) for name, (mode, _, _) in TABLE.items()}


def row_and_number(name):
    """("neutreno", "0.6") for neutreno_0.6; (name, "") if it is not a row of TABLE and a number."""
    row, _, number = name.rpartition("_")
    is_number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", number, re.ASCII)
    return (row, number) if row in TABLE and is_number else (name, "")


def get_mode(mode):
    """A ValueMode with its name, from a name in the table or from a ValueMode.
    A name may end in the weight of the sources: resformer_lambda_0.5, neutreno_0.6 (see ValueMode.with_lam)."""
    if isinstance(mode, ValueMode):
        return named(mode)
    mode = "resformer_neutreno" if mode == "neutreno_resformer" else mode  # the authors' name
    if mode in VALUE_MODES:
        return VALUE_MODES[mode]
    row, number = row_and_number(mode)
    if not number:
        near = difflib.get_close_matches(mode, VALUE_MODES, 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if mode.endswith(".py"):
            hint = f"give a file without --value_mode=, as in `python train.py {mode}`; "
        raise UserError(f"unknown value_mode {mode!r}; {hint}`python model.py table` shows all")
    found = VALUE_MODES[row].with_lam(float(number))
    if found == VALUE_MODES[row]:
        return VALUE_MODES[row]
    number = repr(float(number)).removesuffix(".0").replace("e+", "e")  # 0.50 and 0.5 have one name
    return dataclasses.replace(found, name=f"{row}_{number}")


def named(mode):
    """`mode` with a name: its own, or that of the row that equals it, or "custom_" and six digits of its hash."""
    if not mode.name:
        same = [row for row in VALUE_MODES.values() if row == mode]
        digest = hashlib.sha256(repr(mode).encode()).hexdigest()[:6]
        return same[0] if same else dataclasses.replace(mode, name=f"custom_{digest}")
    row, number = row_and_number(mode.name)
    taken = VALUE_MODES.get(row)
    if taken and number:
        with contextlib.suppress(UserError):  # the row may take no number
            taken = get_mode(mode.name)
    if taken in (None, mode):
        return mode
    raise UserError(f"name={mode.name!r} reads as a mode of the table; choose another")


def read_mode(word):
    """The ValueMode of a word: a name, or a config file that sets value_mode and nothing else."""
    values = read_config(word) if word.endswith(".py") else {"value_mode": word}
    if not isinstance(value := values.pop("value_mode", None), str | ValueMode):
        raise UserError(f"{word}: value_mode takes a name or a ValueMode, not {value!r:.80}")
    mode = get_mode(value)
    if values:
        remedy = "put settings for all modes into flags or another file, and start the names of helpers with _"
        raise UserError(f"{word} sets {', '.join(values)} besides its mode; {remedy}")
    return mode


def equation_of(mode):
    """(the equation of a mode, where it is from), or what we say instead if the table has no row of that name."""
    row, number = row_and_number(mode.name)
    other = f"{row} with the weight {number}" if number else "a mode of your own"
    _, equation, source = TABLE.get(mode.name, (mode, other, ""))
    return equation, source


def beside_the_plan(mode):
    """`name = value` of each field that differs from vanilla's and that the lines of the layers do not show."""
    names = ("kv_group", "values", "heads_from_layer_0", "cut_first", "dense")
    return [f"{name} = {getattr(mode, name)}" for name in names if getattr(mode, name) != getattr(ValueMode(), name)]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model. Defaults: the paper's 82M (Table 4). Raises UserError on an impossible shape."""

    vocab_size: int = setting(50277, "token ids", least=1, most=2**26)
    block_size: int = setting(2048, "tokens per sequence", least=1, most=2**20)
    n_layer: int = setting(8, "layers", least=1, most=1000)
    n_head: int = setting(8, "query heads", least=1, most=2**16)
    n_kv_head: int = setting(0, "key and value heads; 0 = what value_mode says, or n_head", least=0)
    n_embd: int = setting(512, "width of the residual stream", least=1, most=2**16)
    head_dim: int = setting(0, "width of a head; 0 = n_embd / n_head", least=0, most=2**12)
    n_hidden: int = setting(0, "width of the MLP; 0 = 3.5 n_embd (4 n_embd with arch=gpt2)", least=0, most=2**18)
    arch: Literal["llama", "gpt2"] = setting("llama", "RMSNorm, RoPE, SwiGLU; gpt2: LayerNorm, positions, GELU, biases")
    rope_theta: float = setting(10000.0, "base of the rotary angles, see layers.Rope", least=1)
    rope_scaling: tuple[float, ...] = setting((), "Llama 3.1's (factor, low, high, original); () = none")
    norm_eps: float = setting(1e-5, "what the norms add to the mean square", least=0, most=1)
    init_std: float = setting(0.02, "spread of the initial weights", least=0, most=100)
    scaled_init: bool | None = setting(None, "divide output projections' spread by √(2 n_layer); none = only gpt2")
    value_mode: str | ValueMode = setting("vanilla", "a row of `python model.py table`, or a ValueMode")

    def __post_init__(self):
        check_fields(self)
        self.fill("value_mode", get_mode(self.value_mode))
        H, mode, is_llama = self.n_head, self.value_mode, self.arch == "llama"
        group = min(mode.kv_group or H, H)  # query heads to a key head
        G = self.n_kv_head or H // group
        scaling, value_heads = self.rope_scaling, mode.heads_from_layer_0 * G
        is_ordered = len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2]
        # what 0 stands for
        self.fill("n_kv_head", G)
        self.fill("n_hidden", self.n_hidden or (7 * self.n_embd // 2 if is_llama else 4 * self.n_embd))
        if not self.head_dim:
            refuse([(self.n_embd % H, f"n_embd={self.n_embd} must be a multiple of n_head={H}")])
        self.fill("head_dim", self.head_dim or self.n_embd // H)
        refuse([
            (H % group, f"value_mode has {group} query heads to a key head: n_head={H} is not a multiple of {group}"),
            (mode.kv_group != 1 and G != H // group, f"n_kv_head={G}, but value_mode makes it {H // group}"),
            (H % G, f"n_head={H} must be a multiple of n_kv_head={G}"),
            (is_llama and self.head_dim % 2, f"heads are {self.head_dim} wide: RoPE needs an even width"),
            (scaling and not is_ordered, f"rope_scaling={scaling} must be factor, low < high, original, all positive"),
            (self.rope_theta != 10000.0 and not is_llama, f"rope_theta is for arch='llama': {self.arch} has no angles"),
            (scaling and not is_llama, f"rope_scaling is for arch='llama': {self.arch} learns its positions"),
            (value_heads % 1 or value_heads >= G,
             f"heads_from_layer_0={mode.heads_from_layer_0} of {G} value heads must be a whole number, and not all"),
        ])  # fmt: skip
        refuse(problems_of_layers(self))

    @classmethod
    def of_record(cls, fields):
        """The ModelConfig in a checkpoint or an export. Before 28 November 2026 modes had a field `output`, and
        `slope` was lam[1]."""
        fields = copy.deepcopy(fields)
        mode = fields["value_mode"]
        if mode.get("output") == "plain":
            del mode["output"]
            for r in mode["residuals"]:
                if r["learn"] == "softmax" and r["lam"]:
                    r["slope"] = r["lam"][1]
                    r["lam"] = None
        return cls(**fields)

    def fill(self, name, value):
        object.__setattr__(self, name, value)  # the class is frozen


# fmt: off
def problems_of_layers(cfg):
    """Layers that do not exist, a dense period too long, residuals that do nothing, layers that own nothing."""
    mode, n_layer = cfg.value_mode, cfg.n_layer
    shares = [share for share in (mode.share_q, mode.share_k, mode.share_v) if isinstance(share, tuple)]
    there = [n for spec in (*shares, *(r.layers for r in mode.residuals)) for n in pick_layers(spec, n_layer)]
    there += [r.source for r in mode.residuals if isinstance(r.source, int)]
    outside = sorted(n for n in there if not 0 <= n < n_layer)
    yield outside, f"value_mode names layers {outside}, but there are only 0..{n_layer - 1}"
    yield mode.dense and mode.dense[1] > n_layer, f"dense={mode.dense}: its period is above n_layer={n_layer}"
    plan = plan_layers(cfg)
    for index, r in enumerate(mode.residuals):
        acts = any(mix.index == index for layer in plan for mix in layer.mixes)
        yield not acts, f"residual {index + 1} (of={r.of!r}) acts in no layer: none has a source and its own tensor"
    for n, layer in enumerate(plan):
        yield not layer.heads, f"layer {n} would own none of q, k, v: its attention would ignore its input"
# fmt: on


@dataclass(frozen=True)
class Mix:
    """One residual as it acts in one layer. index: its position in ValueMode.residuals. sources: what it reads: layer
    numbers, or "table 0" for a token table."""

    index: int
    residual: Residual
    sources: tuple[int | str, ...]


@dataclass
class LayerPlan:
    """What a layer reads, and what it hands on.

    owner["q" | "k" | "v"]: the layer whose tensor it uses. heads: {tensor that it owns: how many heads}. mixes: its
    residuals, in order. keep_projected, keep_used: names of its tensors that later layers read, straight from the
    projection or as its softmax used them. A block hands on no others, so that no tensor stays in memory needlessly:
    recompute and inference free the rest.
    """

    owner: dict[str, int]
    heads: dict[str, int]
    mixes: list[Mix] = field(default_factory=list)
    keep_projected: set[str] = field(default_factory=set)
    keep_used: set[str] = field(default_factory=set)


def plan_layers(cfg):
    """The LayerPlan of each layer of a ModelConfig: who owns, who borrows, what is mixed, what is kept. The plan leaves
    out dense, cut_first and values="keys"; model.py reads those from the mode."""
    mode, plan = cfg.value_mode, []
    own_v_heads = cfg.n_kv_head - int(mode.heads_from_layer_0 * cfg.n_kv_head)  # in layers above 0
    for n in range(cfg.n_layer):
        owner = {t: mode.owner(t, n, cfg.n_layer) for t in ("q", "k", "v")}
        heads = {"q": cfg.n_head, "k": cfg.n_kv_head, "v": own_v_heads if n else cfg.n_kv_head}
        plan.append(LayerPlan(owner, {t: h for t, h in heads.items() if owner[t] == n}))
    n_tables = 0
    for index, r in enumerate(mode.residuals):
        for n, sources in sources_of(r, plan).items():
            if r.source == "token":
                sources = [f"table {n_tables + t}" for t in sources]
            plan[n].mixes.append(Mix(index, r, tuple(sources)))
        n_tables = len({i for layer in plan for mix in layer.mixes for i in mix.sources if isinstance(i, str)})
    for layer in plan:
        for t, owner in layer.owner.items():
            if plan[owner] is not layer:
                plan[owner].keep_used.add(t)
        for mix in layer.mixes:
            for i in mix.sources:
                if mix.residual.from_used:
                    plan[i].keep_used.update(mix.residual.reads)
                elif mix.residual.source != "token":
                    plan[i].keep_projected.add(mix.residual.of)
    if mode.heads_from_layer_0:
        plan[0].keep_used.add("v")
    return plan


def sources_of(r, plan):
    """{layer: what residual r reads there}, for the layers that have it. Numbers of layers, or of r's token tables."""
    # owners[n]: who owns what r reads, as layer n sees it; for of="v" in cla2 [[0], [0], [2], [2]]
    owners = [[layer.owner[t] for t in r.reads] for layer in plan]
    layers = pick_layers(r.layers or ":", len(plan))
    # a layer that owns none of the tensors that r reads has no such residual
    if r.reads:
        layers = [n for n in layers if n in owners[n]]
    count = len(layers)
    if r.source == "token":
        orders = {
            "each": list(range(count)),
            "mirror": [min(j, count - 1 - j) for j in range(count)],
            "cycle": [j % ((count + 1) // 2) for j in range(count)],
            "one": [0] * count,
        }
        return {n: [t] for n, t in zip(layers, orders[r.tables], strict=True)}
    found = {}
    for n in layers:
        asked = {"all": range(n), "first": [0], "prev": [n - 1]}.get(r.source, [r.source])
        below = [i for i in asked if 0 <= i < n]
        # layers that share what is read count once, as the lowest of them: 0 1 2 3 become 0 2 in cla2
        if r.reads:
            below = sorted({owners.index(owners[i]) for i in below})
        if below:
            found[n] = below
    return found


def stored_tensors(cfg):
    """{("k" or "v", layer): heads} of what a KV cache stores: the tensors that a layer owns. SVFormer's cache is
    smaller, because its layers above 0 own no values."""
    plan = plan_layers(cfg)
    return {(t, n): heads for n, layer in enumerate(plan) for t, heads in layer.heads.items() if t != "q"}


def kv_floats_per_token(cfg):
    """Numbers that a KV cache stores per token: head_dim for each head of each stored tensor."""
    return sum(stored_tensors(cfg).values()) * cfg.head_dim
