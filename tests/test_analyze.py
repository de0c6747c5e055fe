"""Analysis: every quantity against its definition on matrices that exist whole, and analyze.py as a user runs it."""

import json
import math
import runpy
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import MODES, ROOT, byte_tokenizer, config, in_process, make_data, refused, script, tiny, tokens, widths
from safetensors.torch import save_file
from test_equations import A, cross, linear, norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import analyze
import checkpoint
import configurator
import data
import hf
from analyze import Averages, Recorder, Subject, importance, received, softmaxes, uniform_entropy, value_gradients
from data import Corpus
from model import GPT, attend
from value_modes import Residual, ValueMode

EXACT = dict(rtol=0, atol=1e-10)
COMBINED = {  # what changes A_n, more than one at a time: no row does that
    "probs_then_identity": ValueMode((Residual(of="probs"), Residual(map="identity", lam=(0.5, 1.0)))),
    "identity_then_probs": ValueMode((Residual(map="identity", lam=(0.5, 1.0)), Residual(of="probs", lam=(1.0, 3.0)))),
    "delta_then_probs": ValueMode((Residual(map="delta", lam=(3.0, 1.0)), Residual(of="probs", source="all"))),
    "cross_and_probs": ValueMode((Residual(map="cross"), Residual(of="probs", source="prev", lam=(1.0, 2.0)))),
    "scores_and_probs": ValueMode((Residual(of="probs"), Residual(of="scores", lam=(2.0, -1.0)))),
    "probs_twice": ValueMode((Residual(of="probs", source="all", lam=(1.0, 2.0)), Residual(of="probs"))),
    "cross_prev_and_first": ValueMode((Residual(map="cross", source="prev"), Residual(map="cross", layers=(3,)))),
}


def config_of(mode):
    return COMBINED.get(mode, mode)


def watched(model, idx):
    """(attention module, its arguments, what it returned) of each layer in a forward pass."""
    seen = []
    hooks = [b.attn.register_forward_hook(lambda *call: seen.append(call)) for b in model.blocks]
    model.hidden(idx)
    for hook in hooks:
        hook.remove()
    return seen


def attention(attn, args, output):
    """A_n (B, H, T, T) as the layer applies it: what it gives where all values are the columns of an identity matrix.
    A position that is in several parts of one softmax has the same row of it in each, so that its columns add up."""
    lam, useds, used = args[2], args[4], output[2]
    (B, G, T, D), columns = used["v"].shape, []
    for some in torch.eye(T, dtype=used["v"].dtype).split(D, dim=1):
        v = F.pad(some, (0, D - some.size(1))).expand(B, G, T, D)
        useds_v = {i: of | {"v": v} for i, of in useds.items()}
        late = [(r, i, lam[j], None) for j, r, i in attn.residuals if r.of in ("scores", "probs") or r.map != "own"]
        y = attn.attend(used | {"v": v}, late, useds_v)
        for r, sources, w, _ in late:
            if r.of == "probs":
                y = w[0] * y
                for wi, i in zip(w[1:], sources, strict=True):
                    y = y + wi * attend(useds[i]["q"], useds[i]["k"], v, attn.kind)
            elif r.map in ("identity", "delta"):
                y = w[0] * y
        columns.append(y[..., : some.size(1)])
    return torch.cat(columns, dim=-1)


# ---- importance: the column sums of what is applied, in every mode


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("mode,n_kv_head", [*widths(*MODES), *((m, n) for m in COMBINED for n in (8, 2))])
def test_importance_is_the_column_sums_of_the_attention_applied(mode, n_kv_head, kind):
    model, idx = tiny(config_of(mode), attn=kind, n_kv_head=n_kv_head), tokens((2, 9))
    with torch.no_grad():
        layers = watched(model, idx)
        assert len(layers) == 4
        for attn, args, output in layers:
            sums = attention(attn, args, output).sum(dim=2)  # over queries: (B, H, T)
            _, _, used = output
            parts = softmaxes(attn, used, args[4], args[2])
            for rows in (1, 3, 9, 0):
                found = sum(w * received(q, keys, 4**-0.5, rows) for w, q, keys in parts)
                torch.testing.assert_close(found, sums, **EXACT)
            share = importance(attn, used, args[4], args[2])
            assert share.shape == (2, 8, 9)
            torch.testing.assert_close(share, sums / sums.sum(dim=-1, keepdim=True), **EXACT)
            torch.testing.assert_close(share.sum(dim=-1), torch.ones(2, 8).double(), **EXACT)


def test_received_by_hand():
    """Two parts: query i sees keys up to i of both, and a position's columns of both count."""
    q, *keys = (torch.randn(t, generator=torch.Generator().manual_seed(0)).double() for t in [(1, 1, 5, 3)] * 3)
    wanted = torch.zeros(5).double()
    for i in range(5):
        scores = torch.cat([k[0, 0, : i + 1] for k in keys]) @ q[0, 0, i] * 0.7
        wanted[: i + 1] += scores.softmax(0)[: i + 1] + scores.softmax(0)[i + 1 :]
    for rows in (1, 2, 5, 0):
        torch.testing.assert_close(received(q, keys, 0.7, rows)[0, 0], wanted, **EXACT)


@pytest.mark.parametrize("own", [1.0, 0.0, -1.0])
def test_the_weight_of_attention_does_not_change_where_it_goes(own):
    model = tiny(ValueMode((Residual(map="identity", lam=(own, 1.0)),)))
    attn, args, output = watched(model, tokens((2, 9)))[1]
    _, _, used = output
    sums = received(used["q"], [used["k"]], 4**-0.5)
    torch.testing.assert_close(importance(attn, used, args[4], args[2]), sums / 9, **EXACT)


def test_half_precision_is_summed_in_fp32():
    q, k = (t.bfloat16() for t in torch.randn(2, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0)))
    found = received(q, [k], 0.3, 7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), received(q.double(), [k.double()], 0.3), rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes while this is active."""

    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("layers", [1, 3])
def test_memory_is_linear_in_the_length(monkeypatch, layers):
    monkeypatch.setattr(analyze, "BLOCK", 2**10)
    found = []
    for T in (128, 256):
        q, k = torch.randn(2, 1, 4, T, 4)
        with Largest() as largest:
            received(q, [k] * layers, 0.5)
        assert largest.numel < T * T  # H = 4 times less than there are probabilities
        found.append(largest.numel)
    assert found[1] <= 2 * found[0]


def test_memory_of_a_whole_pass(monkeypatch):
    monkeypatch.setattr(analyze, "BLOCK", 2**10)
    model = tiny(n_layer=2, n_head=4, n_embd=8, block_size=256)
    with Largest() as largest:
        recorded(model, tokens((1, 256)))
    assert largest.numel < 256 * 256


# ---- a pass with a Recorder


def recorded(model, *batches):
    recorder = Recorder(model)
    with torch.inference_mode():
        for idx in batches:
            model.hidden(idx)
    recorder.close()
    return recorder.averages


def by_hand(model, idx, reads=lambda n, raws, useds: (raws, useds)):
    """(states 0 to L, the last one normed), block by block; reads: what layer n gets of what earlier layers gave."""
    B, T = idx.shape
    x = model.embed(idx) + (model.positions.weight[:T] if model.positions else 0)
    raws, useds, states, outputs = {}, {}, [x], [x]
    for t, table in enumerate(model.tables):
        raws[-1 - t] = {"v": table(idx).view(B, T, model.cfg.n_kv_head, -1).transpose(1, 2)}
    for n, block in enumerate(model.blocks):
        lam = [weights()[n] for weights in model.lambdas]
        x, raws[n], useds[n] = block(x, model.rope and model.rope(slice(T)), lam, *reads(n, raws, useds))
        outputs.append(x)
        if model.dense:
            x = model.dense(n + 1, outputs)
        states.append(x)
    return states, model.norm(x)


def measures(found, name, n, x):
    """Norms, and the cosines of all pairs, of x (T, E)."""
    norms = x.square().sum(dim=1).sqrt()
    unit = x / norms[:, None]
    cosines = (unit @ unit.T).numpy()
    found[f"{name}_norm", n] = norms.numpy()
    found[f"{name}_norm_first", n], found[f"{name}_norm_rest", n] = norms[0].item(), norms[1:].mean().item()
    found[f"{name}_similarity", n] = cosines[~np.eye(len(x), dtype=bool)].mean()


def spectra(found, name, n, v):
    """Eigenvalues of the whole d x d second moment of v (T, d), the largest, and the rank from their entropy."""
    measures(found, name, n, v)
    values = np.linalg.eigvalsh((v.T @ v / len(v)).numpy())[::-1]
    share = values[values > 1e-12 * values[0]] / values.sum()
    found[f"{name}_spectrum", n], found[f"{name}_largest", n] = values, values[0]
    found[f"{name}_rank", n] = math.exp(-sum(p * math.log(p) for p in share))


VALUES = {  # what layer n (from 0) attends over, given all layers' projected values
    "vanilla": lambda n, V: V[n],
    "resformer": lambda n, V: (V[n] + V[0]) / 2 if n else V[0],
    "resformer_all": lambda n, V: sum(V[i] for i in range(n + 1)) / (n + 1),
    "svformer": lambda n, V: V[0],
    "share_v2": lambda n, V: V[n - n % 2],
}
ATTENDED = (
    "cross",
    "neutreno",
    "probs",
    "scores",
    "key",
    "hidden",
    "denseformer",
    "gqa2",
    "share_q",
)  # over V[n], all these


@torch.no_grad()
def naive(model, mode, idx, sink):
    """{(name, layer or state): value} of one chunk, idx (1, T)."""
    (states, last), P, found = by_hand(model, idx), dict(model.named_parameters()), {}
    for n, x in enumerate(states):
        measures(found, "hidden", n, x[0])
        found["activation_max", n] = x.abs().max().item()
    measures(found, "normed", 0, last[0])
    gpt2, T, H, D = model.cfg.arch == "gpt2", idx.size(1), model.cfg.n_head, model.cfg.head_dim
    G, V, of_layer, k_before = model.cfg.n_kv_head, {}, VALUES["vanilla" if mode in ATTENDED else mode], None
    for n, (attn, args, output) in enumerate(watched(model, idx)):
        a = attention(attn, args, output)[0].sum(dim=1) / T  # (H, T)
        found["importance", n] = total = a.mean(dim=0).numpy()
        found["entropy", n] = -sum(p * math.log(p) for p in total / total.sum() if p > 0)
        found["first", n], found["sink_heads", n] = total[0], np.mean([head[0] > sink for head in a.numpy()])
        for name, rank in {"top_1": 1, "top_2": 2, "top_3": 3, "top_10": 10, "top_1%": -(-T // 100)}.items():
            if rank <= T:
                found[name, n] = sorted(total)[-rank]
        q, k = output[2]["q"][0], output[2]["k"][0]
        measures(found, "key", n, torch.cat(list(k), dim=1))
        x = (states[n] + states[0])[0] / 2 if mode == "hidden" and n else states[n][0]
        y = linear(norm(x, P, f"blocks.{n}.norm1", gpt2), P, f"blocks.{n}.attn.proj", gpt2)
        if "v" in attn.proj.parts:
            V[n] = y[:, -G * D :]
            spectra(found, "raw_value", n, V[n])
        spectra(found, "value", n, of_layer(n, V))
        if n:
            values = [of_layer(i, V) for i in range(n + 1)]
            outputs = [[], [], []]  # by head: Eq 2, 4 and 6
            for h in range(H):
                g = h // (H // G)
                v = [t[:, g * D : g * D + D] for t in values]
                outputs[0].append(cross(q[h], [k[g], k_before[g]], [v[n], v[n - 1]]))
                outputs[1].append(A(q[h], k[g]) @ (v[n] + v[n - 1]) / 2)
                outputs[2].append(A(q[h], k[g]) @ v[n] + sum(v[:n]) / n)  # layer n is the paper's n + 1
            two, four, six = (torch.cat(heads, dim=1) for heads in outputs)
            for name, u in (("eq4", four), ("eq6", six)):
                cosines = (u * two).sum(dim=1) / u.square().sum(dim=1).sqrt() / two.square().sum(dim=1).sqrt()
                found[name, n] = cosines.mean().item()
        k_before = k
    return found


def compare(averages, chunks):
    """A Recorder's means are those of naive chunks, and it has nothing that they have not but what is named here."""
    others = ("activation_median", "massive", "gate_0")
    assert {key for key in averages.sums if key[0] not in others} == chunks[0].keys()
    for name, n in chunks[0]:
        wanted = np.mean([chunk[name, n] for chunk in chunks], axis=0)
        np.testing.assert_allclose(averages.mean(name, n), wanted, rtol=1e-9, atol=1e-10, err_msg=f"{name} {n}")


@pytest.mark.parametrize("T,sink", [(9, 0.314), (21, 0.174)])  # fewer and more tokens than a value has dimensions
@pytest.mark.parametrize("mode,n_kv_head", widths(*VALUES, *ATTENDED))
def test_a_pass_equals_the_definitions(monkeypatch, mode, n_kv_head, T, sink):
    monkeypatch.setattr(analyze, "SINK", sink)  # about half of these models' heads give the first token more
    model, idx = tiny(mode, n_kv_head=n_kv_head), tokens((2, T))
    chunks = [naive(model, mode, row[None], sink) for row in idx]
    assert 0 < np.mean([chunk["sink_heads", n] for chunk in chunks for n in range(4)]) < 1
    compare(recorded(model, idx), chunks)


@pytest.mark.parametrize("n_kv_head", [8, 2])
@pytest.mark.parametrize("mode", ["vanilla", "resformer"])
def test_a_pass_over_gpt2(mode, n_kv_head):
    model, idx = tiny(mode, n_kv_head=n_kv_head, arch="gpt2", attn="eager"), tokens((2, 12))
    compare(recorded(model, idx), [naive(model, mode, row[None], analyze.SINK) for row in idx])


def test_one_percent_is_a_rank():
    model, idx = tiny(n_layer=1, n_head=2, n_embd=8, block_size=250), tokens((1, 250))
    found = recorded(model, idx)
    total = np.sort(found.mean("importance", 0))
    assert found.mean("top_1%", 0) == total[-3] and found.mean("top_10", 0) == total[-10]
    assert [analyze.ranks(T)["top_1%"] for T in (2, 100, 101, 1000, 2048)] == [1, 1, 2, 10, 21]
    assert list(analyze.ranks(2)) == ["top_1", "top_2", "top_1%"]


@pytest.mark.parametrize("mode", MODES)
def test_raw_values_are_those_that_a_layer_projects(mode):
    """raw_value is there where a layer owns its values; value is another where they are mixed."""
    model, idx = tiny(mode), tokens((2, 9))
    found = recorded(model, idx)
    for n, (attn, _, (_, raw, used)) in enumerate(watched(model, idx)):
        assert (found.mean("raw_value_norm", n) is not None) == ("v" in attn.heads)
        assert found.mean("value_norm", n) is not None
        if "v" in attn.heads:
            same = found.mean("raw_value_largest", n) == found.mean("value_largest", n)
            assert same == torch.equal(raw["v"], used["v"])
    layers = range(1, 4)
    if mode == "vanilla":
        assert all((found.mean("raw_value_norm", n) == found.mean("value_norm", n)).all() for n in layers)
    if mode == "resformer":
        assert not any((found.mean("raw_value_norm", n) == found.mean("value_norm", n)).any() for n in layers)
    if mode == "svformer":
        assert all((found.mean("value_spectrum", n) == found.mean("raw_value_spectrum", 0)).all() for n in layers)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_what_blocks_read(mode):
    model, idx = tiny(mode), tokens((2, 9))
    found = recorded(model, idx)
    with torch.no_grad():
        states, last = by_hand(model, idx)
    torch.testing.assert_close(last, model.hidden(idx), **EXACT)
    assert len(states) == 5 and found.mean("hidden_norm", 5) is None
    for name, n, x in (*(("hidden", n, x) for n, x in enumerate(states)), ("normed", 0, last)):
        np.testing.assert_allclose(found.mean(f"{name}_norm", n), x.norm(dim=-1).mean(dim=0).numpy(), rtol=1e-10)


def test_a_recorder_leaves_nothing_behind():
    model, idx = tiny("two_gates"), tokens((2, 9))
    before = model(idx)[0]
    recorder = Recorder(model)
    torch.testing.assert_close(model(idx)[0], before, rtol=0, atol=0)
    recorder.close()
    seen = set(recorder.averages.sums), recorder.averages.mean("entropy", 1)
    model(tokens((2, 9), seed=3))
    assert (set(recorder.averages.sums), recorder.averages.mean("entropy", 1)) == seen
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_averages_over_uneven_batches():
    rng = np.random.default_rng(0)
    numbers, rows, averages = rng.normal(3, 2, 7), rng.normal(3, 2, (7, 4)), Averages()
    for batch in ([0], [1, 2, 3], [4, 5], [6]):
        averages.add("number", 1, torch.from_numpy(numbers[batch]).float())
        averages.add("row", 1, torch.from_numpy(rows[batch]))
    numbers = numbers.astype(np.float32).astype(np.float64)
    assert averages.mean("number", 1) == pytest.approx(numbers.mean(), rel=1e-12)
    assert averages.std("number", 1) == pytest.approx(numbers.std(ddof=1), rel=1e-12)
    np.testing.assert_allclose(averages.mean("row", 1), rows.mean(axis=0), rtol=1e-12)
    assert isinstance(averages.mean("number", 1), float) and averages.mean("row", 1).dtype == np.float64
    assert averages.mean("number", 0) is averages.std("number", 0) is averages.mean("other", 1) is None
    averages.add("one", 0, torch.ones(1))
    assert averages.mean("one", 0) == 1 and averages.std("one", 0) is None
    for _ in range(3):
        averages.add("alike", 0, torch.full((2,), 0.1))
    assert averages.std("alike", 0) < 1e-8  # rounding does not take it below 0, where there is no root


@pytest.mark.parametrize("mode", ["vanilla", "resformer", "cross", "everything"])
def test_the_size_of_a_batch_does_not_matter(mode):
    model, idx = tiny(mode), tokens((5, 9))
    whole = recorded(model, idx)
    for sizes in ([2, 2, 1], [1] * 5):
        parts = recorded(model, *idx.split(sizes))
        assert parts.sums.keys() == whole.sums.keys()
        for name, n in whole.sums:
            np.testing.assert_allclose(parts.mean(name, n), whole.mean(name, n), rtol=1e-9, err_msg=name)
            if not np.ndim(whole.mean(name, n)):
                assert parts.std(name, n) == pytest.approx(whole.std(name, n), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", ["resformer_head", "resformer_channel", "resformer_relu", "value_embed_gated"])
def test_the_size_of_a_batch_does_not_matter_to_gates(mode):
    model, idx = tiny(mode), tokens((5, 9))
    whole, parts = recorded(model, idx), recorded(model, *idx.split([2, 2, 1]))
    for n in (1, 3):
        np.testing.assert_allclose(parts.mean("gate_0", n), whole.mean("gate_0", n), rtol=1e-9)


def test_gates_are_means_over_tokens():
    model, idx = tiny("two_gates"), tokens((2, 9))
    lam = analyze.learned(model, recorded(model, idx))["lam"]
    with torch.no_grad():
        for n, (attn, args, _) in enumerate(watched(model, idx)):
            x, P = args[0], dict(attn.named_parameters())
            for j, known in enumerate([n >= 1, n >= 2]):
                assert (lam[j][n] is not None) == known
            if n >= 1:
                own = torch.sigmoid(x @ P["gates.0.w.weight"].T + P["gates.0.w.bias"]).mean().item()
                assert lam[0][n] == pytest.approx([own, 1 - own], rel=1e-6)
            if n >= 2:
                assert lam[1][n] == pytest.approx([0.5, 0.5 * (x @ P["gates.1.w.weight"].T).relu().mean().item()])


def test_learned_weights():
    models = {mode: tiny(mode) for mode in ("vanilla", "resformer", "cross", "resformer_lerp", "probs_all")}
    of = {mode: analyze.learned(model, recorded(model, tokens((1, 9)))) for mode, model in models.items()}
    assert of["vanilla"] == {} and of["resformer"]["lam"] == [[None, *[[0.5, 0.5]] * 3]]
    assert of["cross"]["lam"] == [[None] * 4]
    share = models["resformer_lerp"].lambdas[0].share[1].item()
    assert of["resformer_lerp"]["lam"][0][2] == pytest.approx([1 - share, share], rel=1e-6)
    assert of["probs_all"]["lam"][0][3] == pytest.approx(models["probs_all"].lambdas[0].scalars[2].tolist(), rel=1e-6)
    json.dumps(of)


@pytest.mark.parametrize("mode", ["denseformer", "denseformer_2x2"])
def test_learned_weights_of_denseformer(mode):
    model = tiny(mode)
    found = analyze.learned(model, recorded(model, tokens((1, 9))))
    assert len(found["alpha"]) == (2 if mode == "denseformer_2x2" else 4)
    for row, alpha in zip(found["alpha"], model.dense.alphas, strict=True):
        assert row == pytest.approx(alpha.tolist(), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_summarized(mode):
    model, cfg = tiny(mode), analyze.AnalyzeConfig(runs=("x",), grad_chunks=2, batch_tokens=18)
    averages, gradients = analyze.measure(model, tokens((3, 9)), cfg, torch.device("cpu"))
    of = Subject(model, mode, None, None, None, 7, None, {"mode": mode})
    numbers, arrays = analyze.summarize(of, averages, gradients, 3, 9)
    assert json.loads(json.dumps(numbers, allow_nan=False))["config"] == json.loads(json.dumps(model.cfg.to_dict()))
    head, _, *rows, end = analyze.table(numbers)
    assert [row.split()[1] for row in rows] == ["1", "2", "3", "4"] and end == ""
    assert {row.count("|") for row in (head, *rows)} == {10} and len(arrays) == 7


# ---- closed forms, and what is planted is found


@pytest.mark.parametrize(
    "T,wanted", [(20, 2.623), (100, 4.194), (500, 5.794), (512, 5.818), (1024, 6.510), (2048, 7.2025)]
)
def test_uniform_entropy(T, wanted):
    rows = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    share = rows.sum(axis=0) / T
    assert uniform_entropy(T) == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert abs(uniform_entropy(T) - wanted) < 6e-4 and round(uniform_entropy(2048), 4) == 7.2025


def test_queries_of_zero_attend_alike():
    model = tiny(n_layer=1, n_head=2, n_embd=8, block_size=2048)
    model.blocks[0].attn.proj.weight.data[:8] = 0
    entropy = recorded(model, tokens((1, 2048))).mean("entropy", 0)
    assert entropy == pytest.approx(uniform_entropy(2048), rel=1e-12) and round(entropy, 4) == 7.2025


def test_similarity_of_equal_and_of_orthogonal_states():
    model = tiny(n_layer=1)
    model.embed.weight.data[:32] = torch.diag(torch.arange(1, 33.0))
    found = recorded(model, torch.full((1, 12), 5)), recorded(model, torch.arange(12)[None])
    equal, orthogonal = (averages.mean("hidden_similarity", 0) for averages in found)
    assert equal == pytest.approx(1, abs=1e-12) and orthogonal == pytest.approx(0, abs=1e-12)
    model.embed.weight.data[7] = -model.embed.weight[3]
    assert recorded(model, torch.tensor([[3, 7]])).mean("hidden_similarity", 0) == pytest.approx(-1, abs=1e-12)


@pytest.mark.parametrize("T", [9, 32])
def test_values_along_one_direction_have_one_eigenvalue(T):
    model = tiny(n_layer=1, n_head=4, n_embd=16)
    weight = model.blocks[0].attn.proj.weight.data
    weight[-16:] = torch.outer(torch.arange(1, 17.0), weight[-1])
    found = recorded(model, tokens((1, T)))
    values, norms = found.mean("value_spectrum", 0), found.mean("value_norm", 0)
    assert values.shape == (16,) and values[0] == pytest.approx((norms**2).mean(), rel=1e-10)
    assert abs(values[1:]).max() < 1e-10 * values[0] and found.mean("value_largest", 0) == values[0]
    assert found.mean("value_rank", 0) == pytest.approx(1, abs=1e-9)


def test_eigenvalues_are_exact_from_single_precision():
    """A ratio of 10^10, which fp32 products would bury: the states are fp32, the spectrum is float64."""
    x = torch.diag_embed(torch.tensor([[1.0, 1e-5]]))
    np.testing.assert_allclose(analyze.spectrum(x @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))[0, 1], 0.5e-10, rtol=0.1)
    assert analyze.spectrum(x).dtype == torch.float64


def planted(position, T=24):
    """A model without positions whose queries all want the key of token 60, and ids that have it there alone."""
    model = tiny(arch="gpt2", n_layer=1, n_head=2, n_embd=8)
    P = dict(model.named_parameters())
    P["positions.weight"].data.zero_()
    idx = torch.full((1, T), 1)
    idx[0, position] = 60
    x = norm(P["embed.weight"].detach(), P, "blocks.0.norm1", True)
    W, b, differ = P["blocks.0.attn.proj.weight"].data, P["blocks.0.attn.proj.bias"].data, x[60] - x[1]
    W[:16], b[:16] = 0, 0
    b[[0, 4]], W[[8, 12]] = 1.0, 100 * differ / differ.dot(differ)  # scores of token 60 are 50 above the others'
    return model, idx


@pytest.mark.parametrize("position", [0, 3, 11, 12, 23])
def test_a_planted_sink_is_found(position):
    model, idx = planted(position)
    found = recorded(model, idx)
    assert analyze.flags(found, 1, 24)["sinks"] == [[position] * (position < 12)]  # of those that half the queries see
    assert found.mean("sink_heads", 0) == (position == 0)
    assert found.mean("top_1", 0) >= (24 - position) / 24 - 1e-9
    if position == 0:
        assert found.mean("first", 0) == pytest.approx(1, abs=1e-9) and found.mean("entropy", 0) < 1e-6


def test_the_table_says_what_was_found():
    (model, idx), cfg = planted(0), analyze.AnalyzeConfig(runs=("x",), grad_chunks=0)
    model.blocks[0].attn.proj.weight.data[16:] *= torch.arange(1.0, 9)  # the norms of two values are not alike
    of = Subject(model, "it", None, None, None, 1, None, {})
    averages, gradients = analyze.measure(model, idx, cfg, torch.device("cpu"))
    numbers, _ = analyze.summarize(of, averages, gradients, 1, 24)
    cells = analyze.table(numbers)[2].strip("| ").split(" | ")
    ratios = [averages.mean(f"{t}_norm_first", 0) / averages.mean(f"{t}_norm_rest", 0) for t in ("value", "hidden")]
    right = [averages.mean("hidden_similarity", 0), averages.mean("value_rank", 0)]
    assert cells[0] == "1" and [float(c) for c in cells[3:8]] == pytest.approx([1.0, *ratios, *right], abs=0.05)
    assert cells[8] == "sinks at [0]"
    for name, says in {"value_drains": "value drain", "hidden_peaks": "value drain, hidden peak"}.items():
        numbers["flags"][name][0] = True
        assert analyze.table(numbers)[2].endswith(f"| sinks at [0], {says} |")


def test_a_sink_of_one_head_is_one():
    model, idx = planted(0)
    model.blocks[0].attn.proj.bias.data[4] = 0  # the other head attends to all alike
    found = recorded(model, idx)
    assert found.mean("sink_heads", 0) == 0.5
    assert found.mean("first", 0) == pytest.approx((1 + 3.776 / 24) / 2, abs=1e-4)
    heads = np.stack([np.eye(24)[0], (1 / np.arange(1, 25))[::-1].cumsum()[::-1] / 24])
    mean = heads.mean(axis=0)  # before the entropy, which of the heads' own entropies would be another
    assert found.mean("entropy", 0) == pytest.approx(-(mean * np.log(mean)).sum(), rel=1e-9)


QUIET = dict(sinks=[[]], value_drains=[False], hidden_peaks=[False, False], massive=[0, 0])


def flags_of(plant):
    """Flags of a model of one layer after `plant` changed it, on two chunks of which the first has token 60 at 0."""
    model, idx = tiny(n_layer=1), tokens((2, 24), vocab=40)
    idx[0, 0] = 60
    idx[1, 0] = 61 - 2
    plant(model, idx)
    return analyze.flags(recorded(model, idx), 1, 24)


def no_values(model, idx):  # of tokens 59 and 60: what they project is taken out of W_v
    W = model.blocks[0].attn.proj.weight.data[64:]
    x = model.blocks[0].norm1(model.embed.weight[59:61]).detach()
    W -= 0.9 * W @ torch.linalg.pinv(x) @ x


def long_states(model, idx):
    model.embed.weight.data[59:61] *= 60


def huge_activation(model, idx):
    model.embed.weight.data[60, 3] = 5000.0
    idx[0, [0, 20]] = idx[0, [20, 0]]


@pytest.mark.parametrize(
    "plant,raised",
    [
        (lambda *_: None, {}),
        (no_values, dict(value_drains=[True])),
        (long_states, dict(hidden_peaks=[True, True])),
        (huge_activation, dict(massive=[0.5, 0.5])),
    ],
)
def test_what_is_planted_raises_its_flag_alone(plant, raised):
    assert flags_of(plant) == QUIET | raised


def test_flags_at_their_thresholds():
    """T = 8: the share of position j is of the 8 - j queries that see it, and half of the positions are judged."""
    averages = Averages()
    for n, share in enumerate([[0.31, 0.29, 0.31, 0.29], [0.29, 0.31, 0.29, 0.31]]):
        seen = torch.tensor(share + [0.9] * 4) * torch.arange(8, 0, -1) / 8
        averages.add("importance", n, seen[None])
    for name, values in {
        "value_norm_first": (0.99, 1.01),
        "value_norm_rest": (2.0, 2.0),
        "hidden_norm_first": (5.9, 6.1, 6.1),
        "hidden_norm_rest": (2.0, 2.0, 2.0),
        "massive": (0.0, 0.25, 1.0),
    }.items():
        for n, x in enumerate(values):
            averages.add(name, n, torch.tensor([x]))
    assert analyze.flags(averages, 2, 8) == dict(
        sinks=[[0, 2], [1, 3]],
        value_drains=[True, False],
        hidden_peaks=[False, True, True],
        massive=[0.0, 0.25, 1.0],
    )


@pytest.mark.parametrize(
    "top,rest,massive",
    [(99.0, 0.01, 0), (101.0, 0.1, 1), (101.0, 0.102, 0), (-101.0, 0.1, 1), (150.0, -0.1, 1), (5000.0, 5.1, 0)],
)
def test_massive_activations(top, rest, massive):
    """Above 100, and above 1000 times the median of their sizes."""
    x = torch.full((3, 6, 5), 0.01)
    x[1] = rest
    x[1, 4, 2] = top
    recorder = Recorder(tiny(n_layer=1))
    recorder.state(0, None, (x.double(),))
    averages = recorder.averages
    assert averages.mean("massive", 0) == pytest.approx(massive / 3)
    assert averages.mean("activation_max", 0) == pytest.approx((abs(top) + 0.02) / 3)
    assert averages.mean("activation_median", 0) == pytest.approx((abs(rest) + 0.02) / 3)


# ---- gradients of layer 0's values


def contributions(model, idx, own=1.0):
    """Gradients of the loss on idx (1, T) by a copy of V_1 for each layer: V_1 itself stays, and each layer reads it
    plus zeros of its own. own: the weight of V_1 in what layer 0 attends over."""
    T, G, D = idx.size(1), model.cfg.n_kv_head, model.cfg.head_dim
    zeros = [torch.zeros(1, G, T, D, dtype=torch.float64, requires_grad=True) for _ in model.blocks]
    first, project = model.blocks[0].attn, model.blocks[0].attn.project
    first.project = lambda *args: (of := project(*args)) | {"v": of["v"] + zeros[0]}

    def reads(n, *stores):
        more = [(zeros[n] - zeros[0]) * w for w in (1.0, own)]  # in place of layer 0's own zeros
        put = zip(stores, more, strict=True)
        return [s | {0: s[0] | {"v": s[0]["v"] + m}} if "v" in s.get(0, {}) else s for s, m in put]

    logits = model.head(by_hand(model, idx, reads)[1])
    loss = F.cross_entropy(logits[0, :-1], idx[0, 1:])
    del first.project
    return torch.autograd.grad(loss, zeros, allow_unused=True)


def whole_gradient(model, idx):
    """Gradient of the loss by V_1, wherever it goes."""
    first, project, v = model.blocks[0].attn, model.blocks[0].attn.project, []

    def keep(*args):
        of = project(*args)
        v.append(of["v"])
        return of

    first.project = keep
    loss = F.cross_entropy(model(idx)[0][0, :-1], idx[0, 1:])
    del first.project
    return torch.autograd.grad(loss, v)[0]


def readers(mode):
    """Layers that read layer 0's values, from what the mode says, by name."""
    return {"vanilla": {0}, "resformer": {0, 1, 2, 3}, "svformer": {0, 1, 2, 3}, "cla2": {0, 1}, "gqa2": {0}}.get(mode)


@pytest.mark.parametrize("mode,n_kv_head", [*((m, 0) for m in MODES), ("neutreno", 2), ("cross", 2), ("resformer", 1)])
def test_value_gradients_by_layer(mode, n_kv_head):
    model, idx = tiny(mode, n_kv_head=n_kv_head), tokens((1, 12))
    parts = contributions(model, idx)
    whole = whole_gradient(model, idx)
    torch.testing.assert_close(sum(g for g in parts if g is not None), whole, rtol=0, atol=1e-12)
    found = value_gradients(model, idx)
    assert [g is None for g in found] == [g is None for g in parts] and len(found) == 4
    for a, b in zip(found, parts, strict=True):
        if b is not None:
            assert a == pytest.approx(b.norm().item(), rel=1e-9) and a > 0
    wanted = readers(mode)
    assert wanted is None or {n for n, g in enumerate(found) if g is not None} == wanted


def test_value_gradients_through_what_layer_0_mixes():
    mode = ValueMode((Residual(source="token", lam=(0.5, 0.5)),), share_v=0)
    model, idx = tiny(mode), tokens((1, 12))
    parts = contributions(model, idx, own=0.5)
    torch.testing.assert_close(sum(parts), whole_gradient(model, idx), rtol=0, atol=1e-12)
    assert value_gradients(model, idx) == pytest.approx([g.norm().item() for g in parts], rel=1e-9)


def test_value_gradients_leave_the_model_as_it_was():
    model, idx = tiny("resformer"), tokens((1, 12))
    wanted = value_gradients(model, idx)
    model.requires_grad_(False)
    assert value_gradients(model, idx) == wanted and not any(p.requires_grad for p in model.parameters())
    model.head.weight.requires_grad_()
    model.embed.weight.grad = mark = torch.ones_like(model.embed.weight)
    with torch.no_grad():
        assert value_gradients(model, idx) == wanted
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight"]
    assert model.embed.weight.grad is mark and (mark == 1).all()
    assert all(p.grad is None for p in model.parameters() if p is not model.embed.weight)
    with pytest.raises(IndexError):
        value_gradients(model, torch.tensor([[1, 2, 61]]))  # not among the ids
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- chunks


THREE = {"prose": 5_000, "code": 3_000, "maths": 2_000}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("three"), THREE)


def subject(data, mixture=None, first=256, tokenizer=None):
    return Subject(None, "it", None, data, mixture, first, tokenizer or byte_tokenizer(), {})


def places(data, idx, T):
    """(domain, window) of each row of idx (N, T), which begins with the end of text."""
    where = {}
    for domain in THREE:
        text = np.fromfile(data / "val" / f"{domain}.bin", "<u2")
        for w in range(len(text) // (T - 1)):
            where.setdefault(tuple(text[w * (T - 1) : (w + 1) * (T - 1)].tolist()), (domain, w))
    assert (idx[:, 0] == 256).all() and idx.shape[1] == T and idx.dtype == torch.int64
    return [where[tuple(row[1:].tolist())] for row in idx]


MIXTURES = [None, {"maths": 3, "prose": 1}, {"code": 1, "prose": 0}]
MIXTURES += [{"prose": 0.1, "code": 0.1, "maths": 0.6}]  # whose shares add up to 1 - 1e-16


@pytest.mark.parametrize("mixture", MIXTURES)
def test_chunks_are_drawn_as_the_mixture_says(three, mixture):
    share = {d: n / 10_000 for d, n in THREE.items()} if mixture is None else mixture
    total = sum(share.values())
    for n in (1, 4, 40):
        found = places(three, analyze.chunks(subject(three, mixture), n, 33, 1), 33)
        assert len(found) == len(set(found)) == n
        for domain in THREE:
            count = [d for d, _ in found].count(domain)
            assert abs(count - n * share.get(domain, 0) / total) < (1 if n < 40 else 1e-9)
    order = [w for d, w in found if d == found[0][0]]
    assert order != sorted(order) and max(order) > 2 * len(order) > 0  # not just the first ones


def test_chunks_follow_from_the_seed(three):
    a, same, other = (analyze.chunks(subject(three), 20, 33, seed) for seed in (1, 1, 2))
    assert torch.equal(a, same) and not torch.equal(a, other)
    assert set(places(three, a, 33)) != set(places(three, other, 33))
    more = analyze.chunks(subject(three), 40, 33, 1)
    assert set(places(three, a, 33)) < set(places(three, more, 33))
    assert (analyze.chunks(subject(three, first=7), 3, 33, 1)[:, 0] == 7).all()


def test_gradients_are_of_text_of_all_domains(three, monkeypatch):
    idx, of = analyze.chunks(subject(three), 40, 33, 1), []
    monkeypatch.setattr(analyze, "value_gradients", lambda model, row: of.append(row) or [1.0])
    cfg = analyze.AnalyzeConfig(runs=("x",), grad_chunks=20)
    analyze.measure(tiny(n_layer=1, vocab_size=257, block_size=33), idx, cfg, torch.device("cpu"))
    found = places(three, torch.cat(of), 33)
    assert len(set(found)) == 20 and {d for d, _ in found} == THREE.keys()


def test_fewer_chunks_than_asked(three):
    """93 windows of 32 in each domain's 3,000 tokens: none comes twice, and another domain does not stand in."""
    found = places(three, analyze.chunks(subject(three), 200, 33, 1), 33)
    assert len(set(found)) == len(found) == 93 + 60 + 40
    assert len({w for d, w in found if d == "prose"}) == 93


def hf_tokenizer():
    """Of the tokenizers package: a byte as its value, as in byte_tokenizer, and two letters that are one token."""
    tokenizers = pytest.importorskip("tokenizers")
    byte = dict(zip(range(256), sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), strict=True))
    byte = {ord(c): c for c in byte.values() if ord(c) < 256} | {10: "Ċ", 32: "Ġ"}
    vocab = {c: i for i, c in byte.items()} | {"ab": 200 + 50}
    vocab = {c: i for c, i in vocab.items() if c == "ab" or i < 200}
    of = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    of.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 97)])
    return of


def test_chunks_in_another_models_tokens(three):
    """The text of the data, three times what should be needed, without what its tokenizer adds before or after."""
    corpus = Corpus(three, 3 * 32)
    found = analyze.chunks(subject(three, first=3, tokenizer=hf_tokenizer()), 20, 33, 1)
    assert found.shape == (20, 33) and (found[:, 0] == 3).all() and (found == 250).any()
    for row, (domain, w) in zip(found, analyze.windows(corpus, 20, 1), strict=True):
        text = np.fromfile(three / "val" / f"{domain}.bin", "<u2")[w * 96 : w * 96 + 96].tolist()
        wanted = "".join("\n\n" if i == 256 else chr(i) for i in text)
        assert wanted.startswith("".join("ab" if i == 250 else chr(i) for i in row[1:].tolist()))


def test_chunks_that_are_too_short_in_another_models_tokens(three):
    """A token a word: only the text around the end of a document has two."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 5}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found, windows = subject(three, first=3, tokenizer=words), analyze.windows(Corpus(three, 6), 300, 1)
    files = {d: np.fromfile(three / "val" / f"{d}.bin", "<u2") for d in THREE}
    inside = [256 in files[d][w * 6 + 1 : w * 6 + 5] for d, w in windows]
    assert 0 < sum(inside) < 100
    assert analyze.chunks(found, 300, 3, 1).tolist() == [[3, 5, 5]] * sum(inside)
    with pytest.raises(configurator.UserError, match="has no chunk of 9 tokens; set a smaller --length"):
        analyze.chunks(found, 100, 9, 1)


# ---- the script


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data and two runs: a was trained, b is another model in a's place; stopped is a at half its way."""
    folder = tmp_path_factory.mktemp("runs")
    data, shape = make_data(folder / "data"), dict(n_layer=2, n_head=2, n_embd=32, block_size=64)
    steps = "--batch_tokens=256 --micro_batch=4 --max_steps=8 --warmup_steps=2 --learning_rate=5e-3".split()
    words = [f"--data_dir={data}", f"--out_dir={folder / 'a'}", "--dtype=float32", "--mixture={'prose': 1, 'code': 3}"]
    assert script("train.py", *words, *steps, *(f"--{k}={v}" for k, v in shape.items())).returncode == 0
    model = GPT(config("svformer", vocab_size=257, **shape))
    checkpoint.save(copied(folder / "a", folder / "b"), 8, model, byte_tokenizer().hash)
    copied(folder / "a", folder / "stopped", max_steps=16)
    return folder


def copied(run, to, **changed):
    shutil.copytree(run, to)
    settings = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(settings | changed))
    return to


@pytest.fixture
def call():
    """analyze.py in this process."""

    def run(*words):
        return in_process(analyze, *words, "--device=cpu")

    return run


def near(found, wanted, **how):
    """Numbers agree, and where one is missing the other is too."""
    pairs = list(zip(found, wanted, strict=True))
    missing = [(a is None) == (b is None) for a, b in pairs]
    return all(missing) and all(a is None or a == pytest.approx(b, **how) for a, b in pairs)


def read(folder):
    """(analysis.json, the arrays of analysis.npz)"""
    with np.load(folder / "analysis.npz") as arrays:
        return json.loads((folder / "analysis.json").read_text()), dict(arrays)


KEYS = set("format mode step checkpoint parameters config chunks chunks_asked length first_token dtype device".split())
KEYS |= set("entropy_uniform layers states normed flags thresholds learned value_gradient".split())
KEYS |= {"seconds", "peak_bytes", "environment"}
LAYERS = set("entropy entropy_minus_uniform first top_1 top_2 top_3 top_10 top_1% sink_heads eq4 eq6".split())
LAYERS |= {f"{t}_{x}" for t in ("key", "value", "raw_value") for x in ("norm_first", "norm_rest", "similarity")}
LAYERS |= {f"{t}_{x}" for t in ("value", "raw_value") for x in ("largest", "rank")}
STATES = {"hidden_norm_first", "hidden_norm_rest", "hidden_similarity", "activation_max", "activation_median"}
ARRAYS = dict(importance=(2, 24), value_norm=(2, 24), raw_value_norm=(2, 24), key_norm=(2, 24), hidden_norm=(3, 24))
ARRAYS |= dict(value_spectrum=(2, 32), raw_value_spectrum=(2, 32))
TIMES = ("seconds", "peak_bytes", "environment")


def test_two_runs_as_a_user_does_it(runs):
    words = (runs / "a", runs / "b", "--chunks=10", "--length=24", "--grad_chunks=3", "--batch_tokens=100")
    result = script("analyze.py", *words)
    assert result.returncode == 0, result.stderr
    for name, mode in (("a", "vanilla"), ("b", "svformer")):
        found, arrays = read(runs / name)
        assert found.keys() == KEYS and found["layers"].keys() == LAYERS and found["states"].keys() == STATES
        assert (found["format"], found["mode"], found["step"]) == ("nanoresformer-analysis/1", mode, 8)
        assert (found["chunks"], found["length"], found["first_token"], found["dtype"]) == (10, 24, 256, "float32")
        assert found["checkpoint"] == "step_00000008.safetensors" and found["config"]["n_layer"] == 2
        assert found["parameters"] == sum(p.numel() for p in checkpoint.load(runs / name).parameters())
        assert found["thresholds"] == dict(sink=0.3, drain=0.5, peak=3.0, massive=[100.0, 1000.0])
        assert {k: a.shape for k, a in arrays.items()} == ARRAYS
        assert {a.dtype for a in arrays.values()} == {np.dtype("float32")}
        for columns, n in ((found["layers"], 2), (found["states"], 3), (found["normed"], 1)):
            assert all(len(column[key]) == n for column in columns.values() for key in ("mean", "std"))
        assert f"{name} ({mode}): 10 chunks of 24 tokens; wrote {runs / name}/analysis.json" in result.stdout
        assert "note:" not in result.stdout and found["peak_bytes"] > 2**20
        for n in range(2):
            number = found["layers"]["entropy"]["mean"][n]
            assert f"| {n + 1} | {number:.4f} | {number - uniform_entropy(24):+.4f} |" in result.stdout
            assert found["layers"]["entropy_minus_uniform"]["mean"][n] == pytest.approx(number - uniform_entropy(24))
    owned, borrowed = found["layers"]["raw_value_norm_first"]["mean"]
    assert owned > 0 and borrowed is None and np.isnan(arrays["raw_value_norm"][1]).all()
    assert np.isnan(arrays["raw_value_spectrum"][1]).all() and not np.isnan(arrays["value_spectrum"]).any()
    assert read(runs / "a")[0]["value_gradient"][1] is None and None not in found["value_gradient"]


def test_what_is_written_is_what_was_measured(runs, call, tmp_path):
    words = (runs / "b", "--chunks=7", "--length=24", "--grad_chunks=7", "--seed=3", f"--out_dir={tmp_path / 'x'}")
    assert call(*words).returncode == 0
    found, arrays = read(tmp_path / "x")
    assert not (set(tmp_path.glob("*")) - {tmp_path / "x"}) and len(list((tmp_path / "x").iterdir())) == 2
    assert call(*words[:-1], f"--out_dir={tmp_path / 'again'}", "--batch_tokens=50").returncode == 0
    again, others = read(tmp_path / "again")
    tokenizer, mixture = byte_tokenizer(), {"prose": 1, "code": 3}
    idx = analyze.chunks(subject(runs / "data", mixture, tokenizer.eot, tokenizer), 7, 24, 3)
    model = checkpoint.load(runs / "b")
    averages = recorded(model, idx)
    layers, states = (found["layers"], LAYERS - {"entropy_minus_uniform"}, 2), (found["states"], STATES, 3)
    for columns, names, n_of in (layers, states):
        for name in names:
            means, deviations = ([f(name, n) for n in range(n_of)] for f in (averages.mean, averages.std))
            assert near(columns[name]["mean"], means, rel=1e-4, abs=1e-6), name
            assert near(columns[name]["std"], deviations, rel=1e-2, abs=1e-5), name
    for name in ("norm_first", "norm_rest", "similarity"):
        wanted = averages.mean(f"normed_{name}", 0)
        assert found["normed"][f"normed_{name}"]["mean"] == [pytest.approx(wanted, rel=1e-4)]
    for name, array in arrays.items():
        for n, row in enumerate(array):
            wanted = averages.mean(name, n)
            wanted = np.full_like(row, np.nan) if wanted is None else wanted
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-6)
    gradients = [value_gradients(model, row[None]) for row in idx]
    assert found["value_gradient"] == pytest.approx(np.mean(gradients, axis=0).tolist(), rel=1e-4)
    assert again["value_gradient"] == pytest.approx(found["value_gradient"], rel=1e-4)
    ratio = [x["mean"][1] for x in (found["layers"]["value_norm_first"], found["layers"]["value_norm_rest"])]
    assert f"| {ratio[0] / ratio[1]:.3f} |" in call(*words).stdout


def test_the_same_command_gives_the_same_numbers(runs, call, tmp_path):
    words = (runs / "a", "--chunks=5", "--length=24", "--grad_chunks=2")
    for name in "xy":
        assert call(*words, f"--out_dir={tmp_path / name}").returncode == 0
    (a, arrays), (b, others) = (read(tmp_path / name) for name in "xy")
    assert {k: v for k, v in a.items() if k not in TIMES} == {k: v for k, v in b.items() if k not in TIMES}
    assert all(np.array_equal(arrays[k], others[k]) for k in ARRAYS)
    assert call(*words, "--seed=1", f"--out_dir={tmp_path / 'z'}").returncode == 0
    assert read(tmp_path / "z")[0]["layers"]["entropy"] != a["layers"]["entropy"]
    assert call(*words, "--first_token=0", f"--out_dir={tmp_path / 'z'}").returncode == 0
    found = read(tmp_path / "z")[0]
    assert found["first_token"] == 0 and found["layers"]["value_norm_first"] != a["layers"]["value_norm_first"]
    assert call(*words, "--dtype=bfloat16", f"--out_dir={tmp_path / 'z'}").returncode == 0
    found = read(tmp_path / "z")[0]
    assert found["dtype"] == "bfloat16" and found["layers"]["entropy"] != a["layers"]["entropy"]
    assert found["layers"]["entropy"]["mean"] == pytest.approx(a["layers"]["entropy"]["mean"], abs=0.01)


def test_few_chunks(runs, call, tmp_path):
    """A single one has no deviation; no gradients were asked for; and more than there are is said."""
    out = f"--out_dir={tmp_path}"
    assert call(runs / "a", "--chunks=1", "--grad_chunks=0", out).returncode == 0
    found, arrays = read(tmp_path)
    assert (found["chunks"], found["length"], found["value_gradient"]) == (1, 64, [])
    assert found["layers"]["entropy"]["std"] == [None, None] and arrays["importance"].shape == (2, 64)
    result = call(runs / "a", "--chunks=100", "--grad_chunks=0", out)
    assert f"note: {runs / 'data'} has only 72 of 100 chunks for a" in result.stdout  # 25 of prose, 2999 // 63 of code
    assert [read(tmp_path)[0][key] for key in ("chunks", "chunks_asked")] == [72, 100]
    assert call(runs / "a", "--chunks=2", "--length=2", out).returncode == 0
    assert read(tmp_path)[0]["layers"]["top_3"]["mean"] == [None, None]
    assert call(runs / "a", "--chunks=100", "--grad_chunks=0", f"--data_dir={runs / 'data'}", out).returncode == 0
    assert read(tmp_path)[0]["chunks"] == 47 + 40  # drawn as the data's own mixture says, not the run's


def test_only_the_first_positions_are_kept(runs, call, tmp_path, monkeypatch):
    monkeypatch.setattr(analyze, "POSITIONS", 16)
    assert call(runs / "a", "--chunks=2", "--grad_chunks=0", f"--out_dir={tmp_path}").returncode == 0
    _, arrays = read(tmp_path)
    assert arrays["importance"].shape == (2, 16) and arrays["hidden_norm"].shape == (3, 16)
    assert arrays["value_spectrum"].shape == (2, 32)


def test_a_model_before_training(runs, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = f"data_dir = {str(runs / 'data')!r}\nn_layer, n_head, n_embd, block_size, seed = 3, 2, 32, 128, 5\n"
    more = "value_mode, batch_tokens, micro_batch, mixture = 'resformer', 256, 1, {'code': 1}\n"
    (tmp_path / "small.py").write_text(settings + more)
    assert call("--init=small.py", "--chunks=4", "--grad_chunks=1").returncode == 0
    found, arrays = read(tmp_path / "out" / "init-small")
    assert (found["mode"], found["step"], found["checkpoint"]) == ("resformer", 0, None)
    assert (found["length"], found["first_token"], arrays["hidden_norm"].shape) == (128, 256, (4, 128))
    assert max(abs(x) for x in found["layers"]["entropy_minus_uniform"]["mean"]) < 1e-3  # as Figure 1 has it
    model = GPT(config("resformer", vocab_size=257, n_layer=3, n_head=2, n_embd=32, block_size=128), seed=5).eval()
    idx = analyze.chunks(subject(runs / "data", {"code": 1}), 4, 128, 42)
    wanted = [recorded(model, idx).mean("hidden_norm_rest", n) for n in range(4)]
    assert found["states"]["hidden_norm_rest"]["mean"] == pytest.approx(wanted, rel=1e-6)
    assert call("--init=small.py", "--chunks=2", "--grad_chunks=0", "--out_dir=there").returncode == 0
    assert read(tmp_path / "there")[0]["chunks"] == 2
    assert call("--init=small.py", f"--data_dir={tmp_path}").returncode == 2


def hf_folder(folder, model, tokenizer, **changed):
    """A Hugging Face folder of a model of ours."""
    cfg, folder = model.cfg, folder / "model"
    folder.mkdir(parents=True)
    tensors = {name: w.data[rows].contiguous() for name, w, rows in hf.hf_parts(model)}
    save_file(tensors, folder / "model.safetensors")
    about = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", bos_token_id=3)
    about |= dict(vocab_size=cfg.vocab_size, max_position_embeddings=cfg.block_size, num_hidden_layers=cfg.n_layer)
    about |= dict(num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, hidden_size=cfg.n_embd)
    about |= dict(intermediate_size=cfg.n_hidden, rms_norm_eps=cfg.norm_eps, rope_theta=cfg.rope_theta)
    (folder / "config.json").write_text(json.dumps(about | changed))
    if tokenizer:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def hf_model(**kw):
    return GPT(config(**dict(vocab_size=257, n_layer=2, n_kv_head=2, block_size=33, init_std=0.2) | kw)).eval()


def test_a_hugging_face_folder(runs, call, tmp_path):
    model, data = hf_model(), f"--data_dir={runs / 'data'}"
    folder = hf_folder(tmp_path, model, hf_tokenizer())
    result = call(folder, data, "--chunks=6", "--grad_chunks=2")
    assert result.returncode == 0, result.stderr
    found, arrays = read(folder)
    assert (found["mode"], found["step"], found["checkpoint"]) == ("vanilla", None, "model")
    assert (found["chunks"], found["length"], found["first_token"]) == (6, 33, 3)
    idx = analyze.chunks(subject(runs / "data", None, 3, hf_tokenizer()), 6, 33, 42)
    averages = recorded(model, idx)
    for name in ("entropy", "first", "value_rank", "eq4", "eq6"):
        assert near(found["layers"][name]["mean"], [averages.mean(name, n) for n in range(2)], rel=1e-5), name
    assert arrays["value_spectrum"].shape == (2, 8)
    assert call(folder, data, "--chunks=6", "--grad_chunks=0", "--dtype=bfloat16").returncode == 0
    wide, narrow = (of["layers"]["entropy"]["mean"] for of in (found, read(folder)[0]))
    assert narrow != wide and narrow == pytest.approx(wide, abs=0.05)
    refused(call(folder), "does not say what it was trained on", "--data_dir")
    refused(call(folder, data, "--length=34"), "length=34", "block_size=33", "--length=33")
    (folder / "tokenizer.json").unlink()
    refused(call(folder, data), "tokenizer.json is missing")


def test_a_hugging_face_folder_of_fewer_ids_than_its_tokenizer(runs, call, tmp_path):
    folder = hf_folder(tmp_path, hf_model(vocab_size=100), hf_tokenizer())
    refused(call(folder, f"--data_dir={runs / 'data'}", "--chunks=6"), "100")


def test_a_run_that_is_not_finished(runs, call, tmp_path):
    refused(call(runs / "stopped"), "is at step 8 of 16", "--resume=auto", "step_00000008.safetensors")
    file = runs / "stopped" / "step_00000008.safetensors"
    result = call(file, "--chunks=2", "--grad_chunks=0", f"--out_dir={tmp_path}")
    assert result.returncode == 0 and "stopped (vanilla): 2 chunks" in result.stdout


def test_the_file_itself_refuses(runs, capsys, monkeypatch):
    """As __main__, which `call` is not."""
    monkeypatch.setattr(sys, "argv", ["analyze.py", str(runs / "a"), "--length=65", "--device=cpu"])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(ROOT / "analyze.py"), run_name="__main__")
    said = SimpleNamespace(returncode=e.value.code, stdout="", stderr=capsys.readouterr().err)
    refused(said, "length=65", "block_size=64", "--length=64")


def test_bad_calls(runs, call, tmp_path, monkeypatch):
    a, b = runs / "a", runs / "b"
    refused(call(), "name runs", "--init")
    refused(call(a, "--init=config/tiny.py"), "name runs", "--init")
    refused(call(a, "--length=1"), "length=1", "at least 2")
    refused(call(a, "--length=-1"), "length=-1 must be at least 0")
    refused(call(a, "--chunks=0"), "chunks=0 must be at least 1")
    refused(call(a, "--batch_tokens=0"), "batch_tokens=0 must be at least 1")
    refused(call(a, "--first_token=257"), "first_token=257", "257 token ids")
    refused(call(a, "--first_token=-2"), "first_token=-2 must be at least -1")
    refused(call(a, "--lenght=5"), "unknown setting 'lenght'", "'length'")
    refused(call(a, "--dtype=float16"), "dtype takes 'float32' or 'bfloat16'")
    refused(call(a, b, f"--out_dir={tmp_path}"), f"out_dir={tmp_path}", "2 runs")
    refused(call(runs / "none"), "none holds no checkpoint")
    refused(call("--init=none.py"), "none.py: no such config file")
    other = make_data(tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text()) | {"pattern": "(?s:..?)"}
    (other / "tokenizer.json").write_text(json.dumps(spec))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["hash"] = data.Tokenizer(spec).hash
    (other / "manifest.json").write_text(json.dumps(manifest))
    refused(call(a, f"--data_dir={other}"), "another tokenizer", str(other))
    refused(call(a, f"--data_dir={tmp_path / 'nowhere'}"), "nowhere", "--data_dir")
    gone = copied(a, tmp_path / "gone", data_dir="long/gone")
    refused(call(gone), "long/gone, which is not here", "--data_dir")
    long = checkpoint.load(a)
    long = GPT(config(vocab_size=257, n_layer=1, block_size=4096))
    checkpoint.save(tmp_path / "long", 1, long, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "long" / "tokenizer.json")
    refused(call(tmp_path / "long", f"--data_dir={runs / 'data'}"), "3000 tokens", str(runs / "data"), "--length")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(call(a), "WORLD_SIZE=2 without torchrun", "RANK expected", "unset it")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: None)  # waits for the others
    refused(call(a), "one process", "torchrun")


@pytest.mark.parametrize("where", ["blocks.1.attn.proj", "blocks.1.mlp.down", "norm"])
def test_a_model_that_is_not_finite(runs, call, tmp_path, where):
    model = checkpoint.load(runs / "a")
    model.get_submodule(where).weight.data.fill_(math.nan)
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    refused(call(tmp_path, f"--data_dir={runs / 'data'}", "--chunks=2"), "finite")
    assert not list(tmp_path.glob("analysis.*"))
