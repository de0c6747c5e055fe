"""Every row of VALUE_MODES against a naive float64 transcription of its equation.

The transcriptions share no code with model.py. They take a model's weights by name and go through heads and positions
one by one: complex numbers turn q and k, softmaxes run row by row, what an equation concatenates is concatenated.
Layers count from 1 here, as in the paper, so that V[1] is its V_1 and X[0] its H_0, the embedding.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MODES, same, tiny, tokens, widths

from net.layers import Rope
from value_modes import TABLE, VALUE_MODES

# ---- the parts that all equations share


def norm(x, P, name, gpt2):
    if gpt2:  # LayerNorm
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * P[name + ".weight"]
    return x + P[name + ".bias"] if gpt2 else x


def linear(x, P, name, gpt2):
    y = x @ P[name + ".weight"].T
    return y + P[name + ".bias"] if gpt2 else y


def mlp(x, P, name, gpt2):
    y = linear(x, P, name + ".up", gpt2)
    if gpt2:  # gelu_new
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    else:  # SwiGLU
        gate, up = y.chunk(2, dim=1)
        y = gate * torch.sigmoid(gate) * up
    return linear(y, P, name + ".down", gpt2)


def rotate(x, turn):  # one head, (T, D): pairs (i, i + D/2) as complex numbers, times turn (T, D/2)
    half = x.size(1) // 2
    pairs = [torch.complex(x[:, i], x[:, i + half]) * turn[: len(x), i] for i in range(half)]
    return torch.stack([p.real for p in pairs] + [p.imag for p in pairs], dim=1)


def softmax(scores, size):  # causal, row by row: scores (T, T) of heads of this size -> A (T, T)
    rows = [torch.softmax(row[: i + 1] / math.sqrt(size), dim=0) for i, row in enumerate(scores)]
    return torch.stack([torch.cat((row, row.new_zeros(len(rows) - len(row)))) for row in rows])


def A(q, k):  # one head, (T, D) each
    return softmax(q @ k.T, q.size(1))


def cross(q, ks, vs):  # softmax(q [k_1; k_2; ...]^T) [v_1; v_2; ...]: one softmax for each row
    rows = []
    for i in range(len(q)):
        seen = torch.cat([k[: i + 1] for k in ks]), torch.cat([v[: i + 1] for v in vs])
        rows.append(torch.softmax(seen[0] @ q[i] / math.sqrt(q.size(1)), dim=0) @ seen[1])
    return torch.stack(rows)


# ---- the parts that some equations share. s: what there is besides q, k and v in a layer, see naive


def weighted(weights, *tensors):
    return sum(w * t for w, t in zip(weights, tensors, strict=True))


def lerp(a, b, share):
    return weighted((1 - share, share), a, b)


def scalars(s, a):  # of the a-th layer, from 0, that has any
    return s.P[f"mixing.0.scalars.{a}"]


def gate(s, x, bias=False):  # per key and value head: (T, 1)
    z = x @ s.W("gates.0.w.weight").T + (s.W("gates.0.w.bias") if bias else 0)
    return z[:, s.head : s.head + 1]


def plus(n, V, s):
    share = torch.softmax(s.P["mixing.0.logits"], dim=0)[n - 2]  # over the layers that have a source, 2 to L
    return s.P["mixing.0.own"][n - 2] * V[n] + s.P["mixing.0.scale"] * share * V[1]


def E(s, t):  # values looked up in table t by token id
    return s.P[f"tables.{t}.weight"][s.tokens][:, s.columns]


def cycle(n, V, s):  # tables in the first and the last 3 layers; the second half of those has the tables of the first
    layers = sorted({1, 2, 3, s.L - 2, s.L - 1, s.L})
    a = layers.index(n) if n in layers else None
    return V[n] if a is None else weighted(scalars(s, a), V[n], E(s, a % math.ceil(len(layers) / 2)))


def gated(n, V, s, top, layers):
    layers = sorted(layers)
    return V[n] + top * torch.sigmoid(gate(s, s.x[:, :12])) * E(s, layers.index(n)) if n in layers else V[n]


def unit(n, V, s):  # IMU-1's Eq 4
    scale, (a, b) = s.P["mixing.0.scale"][n - 2], scalars(s, n - 2)
    return scale * (a * V[n] + b * V[1]) / torch.sqrt(a * a + b * b)


def upper_half(n, Q, K, V, s, values_of):
    k, v = (s.L // 2, values_of) if n > s.L // 2 else (n, n)
    return A(Q[n], K[k]) @ V[v]


def anchor(n, *anchors):
    return max(i for i in anchors if i <= n)


def first(n, c):  # of the c layers that n is in
    return n - (n - 1) % c


# ---- the equations, one head at a time. Layer 1 is plain in all but those of LAYER_1_TOO

VALUES = {  # V' of U_n = A_n V'
    "vanilla": lambda n, V, s: V[n],
    "resformer": lambda n, V, s: (V[n] + V[1]) / 2,
    "resformer_lambda": lambda n, V, s: V[n] + 2 * V[1],
    "scaled": lambda n, V, s: math.sqrt(5) * V[n],
    "resformer_learned": lambda n, V, s: weighted(scalars(s, n - 2), V[n], V[1]),
    "resformer_plus": plus,
    "resformer_plus_deep": plus,
    "resformer_sparse": lambda n, V, s: V[n] + 5 * V[1] if n > s.L - 3 else V[n],
    "resformer_dense": lambda n, V, s: weighted(scalars(s, n - 2), V[n], *(V[i] for i in range(1, n))),
    "resformer_prev": lambda n, V, s: (V[n] + V[n - 1]) / 2,
    "resformer_all": lambda n, V, s: sum(V[i] for i in range(1, n + 1)) / n,
    "svformer": lambda n, V, s: V[1],
    "svformer_2anchors": lambda n, V, s: V[anchor(n, 1, s.L)],
    "svformer_3anchors": lambda n, V, s: V[anchor(n, 1, 1 + s.L // 2, s.L)],  # 1, 5, 8 of 8
    "svformer_4anchors": lambda n, V, s: V[anchor(n, 1, 1 + s.L * 3 // 8, 1 + s.L * 5 // 8, s.L)],  # 1, 4, 6, 8 of 8
    "share_v2": lambda n, V, s: V[first(n, 2)],
    "resformer_lerp": lambda n, V, s: lerp(V[n], V[1], s.P["mixing.0.share"][n - 2]),
    "resformer_head": lambda n, V, s: lerp(V[1], V[n], torch.sigmoid(gate(s, s.x, bias=True))),
    "resformer_relu": lambda n, V, s: V[n] + gate(s, s.x).clamp(min=0) * V[1],
    "value_embed": lambda n, V, s: lerp(V[n], E(s, n - 1), s.P["mixing.0.share"][n - 1]),
    "value_embed_unet": lambda n, V, s: weighted(scalars(s, n - 1), V[n], E(s, min(n, s.L + 1 - n) - 1)),
    "value_embed_cycle": cycle,
    "value_embed_gated": lambda n, V, s: gated(n, V, s, 3, range(s.L, 0, -2)),
    "value_embed_gated2": lambda n, V, s: gated(n, V, s, 2, {2, 3, s.L - 2, s.L - 1, s.L}),
    "resformer_zero": lambda n, V, s: V[n] + scalars(s, n - 2)[0] * V[1],
    "resformer_unit": unit,
    "k_eq_v": lambda n, V, s: s.K_before_rope / torch.sqrt((s.K_before_rope**2).mean(1, keepdim=True) + 1e-5),
    "value_embed_shared": lambda n, V, s: V[n] + E(s, 0) if n in (1, s.L) else V[n],
    "resformer_v2": lambda n, V, s: (V[n] + V[2]) / 2 if n > 2 else V[n],
    "resformer_v3": lambda n, V, s: (V[n] + V[3]) / 2 if n > 3 else V[n],
}
OUTPUTS = {  # U_n
    "identity": lambda n, Q, K, V, s: A(Q[n], K[n]) @ V[n] + V[1],
    "identity_all": lambda n, Q, K, V, s: A(Q[n], K[n]) @ V[n] + sum(V[i] for i in range(1, n)) / (n - 1),
    "cross": lambda n, Q, K, V, s: cross(Q[n], [K[n], K[1]], [V[n], V[1]]),
    "cross_prev": lambda n, Q, K, V, s: cross(Q[n], [K[n], K[n - 1]], [V[n], V[n - 1]]),
    "query": lambda n, Q, K, V, s: A((Q[n] + Q[1]) / 2, K[n]) @ V[n],
    "key": lambda n, Q, K, V, s: A(Q[n], (K[n] + K[1]) / 2) @ V[n],
    "scores": lambda n, Q, K, V, s: softmax((Q[n] @ K[n].T + Q[1] @ K[1].T) / 2, Q[n].size(1)) @ V[n],
    "probs": lambda n, Q, K, V, s: (A(Q[n], K[n]) + A(Q[1], K[1])) / 2 @ V[n],
    "share_q": lambda n, Q, K, V, s: A(Q[1], K[n]) @ V[n],
    "share_k": lambda n, Q, K, V, s: A(Q[n], K[1]) @ V[n],
    "share_q2": lambda n, Q, K, V, s: A(Q[first(n, 2)], K[n]) @ V[n],
    "share_k2": lambda n, Q, K, V, s: A(Q[n], K[first(n, 2)]) @ V[n],
    "cla2": lambda n, Q, K, V, s: A(Q[n], K[first(n, 2)]) @ V[first(n, 2)],
    "cla4": lambda n, Q, K, V, s: A(Q[n], K[first(n, 4)]) @ V[first(n, 4)],
    "fusedkv_lite": lambda n, Q, K, V, s: upper_half(n, Q, K, V, s, 1),
    "share_last": lambda n, Q, K, V, s: upper_half(n, Q, K, V, s, s.L // 2),
    "cla2_svformer": lambda n, Q, K, V, s: A(Q[n], K[first(n, 2)]) @ V[1],
    "neutreno": lambda n, Q, K, V, s: A(Q[n], K[n]) @ V[n] + 0.4 * (V[1] - V[n]),
    "resformer_neutreno": lambda n, Q, K, V, s: A(Q[n], K[n]) @ (V[n] + V[1]) / 2 + 0.2 * (V[1] - (V[n] + V[1]) / 2),
    "resformer_neutreno_literal": lambda n, Q, K, V, s: A(Q[n], K[n]) @ (V[n] + V[1]) / 2 + 0.2 * (V[1] - V[n]),
}
OUTPUTS |= {"mlkv": OUTPUTS["cla4"], "cla2_gqa4": OUTPUTS["cla2"]}
STREAMS = {  # what enters layer i + 1, or the last norm if i = L; X[0] the embedding, X[i] what layer i puts out
    "hidden": lambda i, X, s: (X[i] + X[0]) / 2 if i < s.L else X[i],
    "hidden_learned": lambda i, X, s: weighted(scalars(s, i - 1), X[i], X[0]) if i < s.L else X[i],
    "denseformer": lambda i, X, s: weighted(s.P[f"dense.alphas.{i - 1}"], *X),
    "denseformer_2x2": lambda i, X, s: X[i] if i % 2 else weighted(s.P[f"dense.alphas.{i // 2 - 1}"], *X[::2]),
}
STREAMS["resformer_denseformer"] = STREAMS["denseformer"]
VALUES = dict.fromkeys((*STREAMS, "gqa2", "gqa4", "gqa8", "mqa", "skipv1", "cut"), VALUES["vanilla"]) | VALUES
VALUES |= {"resformer_v2_cut": VALUES["resformer_v2"], "resformer_v3_cut": VALUES["resformer_v3"]}
VALUES |= {"resformer_denseformer": VALUES["resformer"], "svformer_gqa4": VALUES["svformer"]}
LAYER_1_TOO = {"k_eq_v", *(name for name in VALUES if name.startswith("value_embed"))}  # a table is a source there too
QUERIES_PER_KEY = dict(gqa2=2, gqa4=4, gqa8=8, mqa=8, mlkv=8, svformer_gqa4=4, cla2_gqa4=4)  # 8 query heads in all
EQUATIONS = VALUES.keys() | OUTPUTS.keys()


def naive(model, mode, idx, queries_per_key=1):
    """Logits (T, V) of one sequence under the equation of a mode."""
    cfg, P = model.cfg, dict(model.named_parameters())
    gpt2, L, H, D = cfg.arch == "gpt2", cfg.n_layer, cfg.n_head, cfg.n_embd // cfg.n_head
    turn = None if gpt2 else torch.complex(model.rope.cos, model.rope.sin)  # test_rope_table is about these
    X = [P["embed.weight"][idx] + (P["positions.weight"][: len(idx)] if gpt2 else 0)]
    x, past = X[0], {"q": {}, "k": {}, "v": {}}  # past: tensor -> layer -> heads, each (T, D)
    for n in range(1, L + 1):
        name = f"blocks.{n - 1}."
        h = norm(x, P, name + "norm1", gpt2)
        y, row = linear(h, P, name + "attn.proj", gpt2), 0
        for t, rows in model.blocks[n - 1].attn.proj.parts.items():  # those that this layer projects
            past[t][n] = list(y[:, row : row + rows].split(D, dim=1))
            if mode == "skipv1" and t == "v" and n > 1:  # half of the value heads are layer 1's
                past[t][n] += past[t][1][len(past[t][n]) :]
            assert len(past[t][n]) == H // (1 if t == "q" else queries_per_key)
            if t == "k":
                keys = past[t][n]  # before rope, in modes whose layers all have keys of their own
            if t != "v" and not gpt2:
                past[t][n] = [rotate(head, turn) for head in past[t][n]]
            row += rows
        outputs = []
        for i in range(H):
            g = i // queries_per_key
            Q, K, V = ({j: heads[i if t == "q" else g] for j, heads in past[t].items()} for t in "qkv")
            s = SimpleNamespace(P=P, L=L, x=h, tokens=idx, head=g, query_head=i, columns=slice(g * D, g * D + D))
            s.K_before_rope = keys[g]
            s.W = lambda w, name=name: P[f"{name}attn.{w}"]
            if n == 1 and mode not in LAYER_1_TOO:
                outputs.append(A(Q[1], K[1]) @ V[1])
            elif mode in OUTPUTS:
                outputs.append(OUTPUTS[mode](n, Q, K, V, s))
            else:
                outputs.append(A(Q[n], K[n]) @ VALUES[mode](n, V, s))
        stream = 0 if n == 1 and mode.endswith("cut") else x  # cut: H_0 goes no further than into layer 1
        x = stream + linear(torch.cat(outputs, dim=1), P, name + "attn.out", gpt2)
        X.append(x + mlp(norm(x, P, name + "norm2", gpt2), P, name + "mlp", gpt2))
        x = STREAMS[mode](n, X, SimpleNamespace(P=P, L=L)) if mode in STREAMS else X[n]
    return norm(x, P, "norm", gpt2) @ P["head.weight"].T


# ---- the comparison


def check(mode, n_kv_head=0, gradients=True, **kw):
    """A model and its equation agree, in logits and gradients (a V_1 that is detached gives the same logits)."""
    model, idx = tiny(mode, n_kv_head=n_kv_head, **kw), tokens((7,))
    group = QUERIES_PER_KEY.get(mode, 8 // (n_kv_head or 8))
    logits, right = model(idx[None])[0][0], naive(model, mode, idx, group)
    assert right.dtype == torch.float64 and right.std() > 0.1  # the comparison is of something
    same(logits, right)
    if not gradients:  # they take most of the time
        return
    toward = torch.randn(right.shape, dtype=right.dtype, generator=torch.Generator().manual_seed(1))
    params = list(model.parameters())
    same(*(torch.autograd.grad((y * toward).sum(), params) for y in (logits, right)), rtol=1e-9, atol=1e-9)


def test_every_row_that_names_a_source_has_a_transcription():
    """Write it from the source and not from model.py: one line in VALUES if the equation says what A_n multiplies, in
    OUTPUTS if it says more, in STREAMS if it says what enters a layer (and LAYER_1_TOO, QUERIES_PER_KEY if they apply).
    A row of your own, without a source, may go without."""
    assert not [name for name, (_, _, source) in TABLE.items() if source and name not in EQUATIONS]


@pytest.mark.parametrize("mode,n_kv_head", widths(*(name for name in MODES if name in EQUATIONS)))
def test_mode_equals_its_equation(mode, n_kv_head):
    check(mode, n_kv_head)


@pytest.mark.parametrize("n_layer", [8, 5])
@pytest.mark.parametrize("mode", [name for name in VALUE_MODES if name in EQUATIONS])
def test_mode_equals_its_equation_at_other_depths(mode, n_layer):
    """8 layers, where the paper's anchors and the first and last 3 layers lie apart, and an odd number."""
    check(mode, gradients=False, n_layer=n_layer)


@pytest.mark.parametrize("n_kv_head", [8, 2])
@pytest.mark.parametrize("mode", ["vanilla", "resformer", "svformer", "neutreno", "cross"])
def test_mode_equals_its_equation_in_gpt2(mode, n_kv_head):
    check(mode, n_kv_head, arch="gpt2")


def test_rope_table():
    """Position t turns pair i by t * theta^(-2i/D): the fp32 tables against float64."""
    rope = Rope(8, 2048, 10000.0)
    angle = torch.arange(2048).double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    same(torch.complex(rope.cos, rope.sin), torch.exp(1j * angle).cfloat(), atol=2e-4)
