"""Analysis: every quantity against its definition on matrices that exist whole, and analyze.py as a user runs it."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import COVER, MODES, byte_tokenizer, config, in_process, make_data, refused, script, tiny, tokens, widths
from test_equations import EXACT, VALUES, A, cross, linear, norm
from test_hf import hf_folder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import analyze
import checkpoint
import configurator
import data
import train
from analyze import LAYER, STATE, Averages, Recorder, Subject, importance, received, softmaxes, uniform_entropy
from hf import HFTokenizer
from layers import attend
from model import GPT
from value_modes import Residual, ValueMode

COMBINED = {  # more than one residual that changes A_n: no row has that
    "probs_then_identity": ValueMode((Residual(of="probs"), Residual(map="identity", lam=(0.5, 1.0)))),
    "identity_then_probs": ValueMode((Residual(map="identity", lam=(0.5, 1.0)), Residual(of="probs", lam=(1.0, 3.0)))),
    "delta_then_probs": ValueMode((Residual(map="delta", lam=(3.0, 1.0)), Residual(of="probs", source="all"))),
    "cross_and_probs": ValueMode((Residual(map="cross"), Residual(of="probs", source="prev", lam=(1.0, 2.0)))),
    "scores_and_probs": ValueMode((Residual(of="probs"), Residual(of="scores", lam=(2.0, -1.0)))),
    "probs_twice": ValueMode((Residual(of="probs", source="all", lam=(1.0, 2.0)), Residual(of="probs"))),
    "cross_prev_and_first": ValueMode((Residual(map="cross", source="prev"), Residual(map="cross", layers=(3,)))),
}


def watched(model, idx, modules=None):
    """(module, its arguments, what it returned) in a forward pass, by default of each layer's attention."""
    seen = []
    modules = modules or [b.attn for b in model.blocks]
    hooks = [module.register_forward_hook(lambda *call: seen.append(call)) for module in modules]
    with torch.no_grad():
        model.hidden(idx)
    for hook in hooks:
        hook.remove()
    return seen


def attention(attn, args, output):
    """A_n (B, H, T, T) as the layer applies it: its output where all values are the columns of an identity matrix.
    A position that is in several parts of one softmax has the same row of it in each, so that its columns add up."""
    lambdas, attended, now = args[2], args[4], output[2]
    B, G, T, D = now["v"].shape
    in_softmax, after = [], []
    for m in attn.mixes:
        if m.residual.map == "cross" or m.residual.of == "scores":
            in_softmax.append((m, lambdas[m.index]))
        elif m.residual.of == "probs" or m.residual.map in ("identity", "delta"):
            after.append((m, lambdas[m.index]))
    columns = []
    for some in torch.eye(T, dtype=now["v"].dtype).split(D, dim=1):
        v = F.pad(some, (0, D - some.size(1))).expand(B, G, T, D)
        attended_v = {i: tensors | {"v": v} for i, tensors in attended.items()}
        y = attn.attend_with_scores(now | {"v": v}, in_softmax, attended_v, None)
        for m, weights in after:
            y = weights[0] * y
            if m.residual.of == "probs":
                for w, i in zip(weights[1:], m.sources, strict=True):
                    y = y + w * attend(attended[i]["q"], attended[i]["k"], v, attn.kernel)
        columns.append(y[..., : some.size(1)])
    return torch.cat(columns, dim=-1)


# ---- importance: the column sums of what is applied


@torch.no_grad()
def test_importance_is_the_column_sums_of_the_attention_applied(monkeypatch):
    monkeypatch.setattr(analyze, "BLOCK", 600)  # up to 4 queries at a time
    cases = [*widths(*COVER), *((mode, n) for mode in COMBINED for n in (8, 2))]
    for (mode, n_kv_head), kind in itertools.product(cases, ("sdpa", "eager")):
        model = tiny(COMBINED.get(mode, mode), attn=kind, n_kv_head=n_kv_head)
        for attn, args, output in watched(model, tokens((2, 9))):
            what = f"{mode}, {n_kv_head} key heads, {kind}, layer {attn.n}"
            given = output[2], args[4], args[2]  # now, attended, lambdas
            sums = attention(attn, args, output).sum(dim=2)  # over queries: (B, H, T)
            found = sum(w * received(q, keys, 4**-0.5) for w, q, keys in softmaxes(attn, *given))
            assert torch.allclose(found, sums, **EXACT), what
            share = importance(attn, *given)
            assert share.shape == (2, 8, 9), what
            assert torch.allclose(share, sums / sums.sum(dim=-1, keepdim=True), **EXACT), what


def test_the_weight_of_attention_does_not_change_where_it_goes():
    for own in (1.0, 0.0, -1.0):
        model = tiny(ValueMode((Residual(map="identity", lam=(own, 1.0)),)))
        attn, args, (_, _, now) = watched(model, tokens((2, 9)))[1]
        sums = received(now["q"], [now["k"]], 4**-0.5)
        torch.testing.assert_close(importance(attn, now, args[4], args[2]), sums / 9, **EXACT)


def test_negative_shares_of_attention_are_refused():
    model = tiny(ValueMode((Residual(of="probs", lam=(1.0, -0.9)),)))
    attn, args, (_, _, now) = watched(model, tokens((2, 9)))[1]
    with pytest.raises(configurator.UserError, match="a residual of attention has a negative weight"):
        importance(attn, now, args[4], args[2])


def test_half_precision_is_summed_in_fp32():
    q, k = (t.bfloat16() for t in torch.randn(2, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0)))
    found = received(q, [k], 0.3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), received(q.double(), [k.double()], 0.3), rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes while this is active."""

    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


def test_no_tensor_has_the_length_twice(monkeypatch):
    monkeypatch.setattr(analyze, "BLOCK", 2**10)
    q, k = torch.randn(2, 1, 4, 256, 4)
    with Largest() as largest:
        received(q, [k] * 3, 0.5)
        recorded(tiny(n_layer=2, n_head=4, n_embd=8, block_size=256), tokens((1, 256)))
    assert largest.numel < 256 * 256  # H = 4 times less than a layer has probabilities


# ---- a pass with a Recorder


def recorded(model, *batches):
    recorder = Recorder(model)
    with torch.inference_mode():
        for idx in batches:
            model.hidden(idx)
    recorder.close()
    return recorder.averages


def states_of(model, idx):
    """(states 0 to L: what each block and the last norm read; what that norm returns)."""
    calls = watched(model, idx, [*model.blocks, model.norm])
    return [args[0] for _, args, _ in calls], calls[-1][2]


def vectors(found, name, n, x):
    """Norms, and the cosines of all pairs, of x (T, E)."""
    norms = x.square().sum(dim=1).sqrt()
    unit = x / norms[:, None]
    cosines = (unit @ unit.T).numpy()
    found[f"{name}_norm", n] = norms.numpy()
    found[f"{name}_norm_first", n], found[f"{name}_norm_rest", n] = norms[0].item(), norms[1:].mean().item()
    found[f"{name}_similarity", n] = cosines[~np.eye(len(x), dtype=bool)].mean()


def spectra(found, name, n, v):
    """Eigenvalues of the whole d x d second moment of v (T, d), the largest, and the rank from their entropy."""
    vectors(found, name, n, v)
    values = np.linalg.eigvalsh((v.T @ v / len(v)).numpy())[::-1]
    share = values[values > 1e-12 * values[0]] / values.sum()
    found[f"{name}_spectrum", n], found[f"{name}_largest", n] = values, values[0]
    found[f"{name}_rank", n] = math.exp(-sum(p * math.log(p) for p in share))


PASSES = "vanilla resformer resformer_all svformer share_v2 cross neutreno probs scores key hidden denseformer".split()
PASSES += ["gqa2", "share_q"]


@torch.no_grad()
def naive(model, mode, idx, sink):
    """{(name, layer or state): value} of one chunk, idx (1, T)."""
    (states, last), P, found = states_of(model, idx), dict(model.named_parameters()), {}
    for n, x in enumerate(states):
        vectors(found, "hidden", n, x[0])
        found["activation_max", n] = x.abs().max().item()
    vectors(found, "normed", 0, last[0])
    gpt2, T, H, D = model.cfg.arch == "gpt2", idx.size(1), model.cfg.n_head, model.cfg.head_dim
    G, V, values, k_before = model.cfg.n_kv_head, {}, [], None  # V[n] is projected, values[n] attended over
    for n, (attn, args, output) in enumerate(watched(model, idx)):
        a = attention(attn, args, output)[0].sum(dim=1) / T  # (H, T)
        found["importance", n] = total = a.mean(dim=0).numpy()
        found["entropy", n] = -sum(p * math.log(p) for p in total / total.sum() if p > 0)
        found["first", n], found["sink_heads", n] = total[0], np.mean([head[0] > sink for head in a.numpy()])
        for name, rank in {"top_1": 1, "top_2": 2, "top_3": 3, "top_10": 10, "top_1%": -(-T // 100)}.items():
            if rank <= T:
                found[name, n] = sorted(total)[-rank]
        q, k = output[2]["q"][0], output[2]["k"][0]
        vectors(found, "key", n, torch.cat(list(k), dim=1))
        x = (states[n] + states[0])[0] / 2 if mode == "hidden" and n else states[n][0]
        y = linear(norm(x, P, f"blocks.{n}.norm1", gpt2), P, f"blocks.{n}.attn.proj", gpt2)
        if "v" in attn.proj.parts:
            V[n + 1] = y[:, -G * D :]  # counted from 1, as in VALUES
            spectra(found, "raw_value", n, V[n + 1])
        values.append(VALUES.get(mode, VALUES["vanilla"])(n + 1, V, None))
        spectra(found, "value", n, values[n])
        if n:
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


def test_a_pass_equals_the_definitions(monkeypatch):
    """With fewer and with more tokens than a value has dimensions. A Recorder's means are those of naive chunks, and
    only `others` are not checked here."""
    cases = [(9, 0.314, mode, dict(n_kv_head=n)) for mode, n in widths(*PASSES)]
    cases += [
        (21, 0.174, mode, dict(n_kv_head=n)) for mode in ("vanilla", "resformer", "share_v2", "cross") for n in (8, 1)
    ]
    cases += [(12, 0.25, mode, dict(n_kv_head=2, arch="gpt2", attn="eager")) for mode in ("vanilla", "resformer")]
    others = ("activation_median", "massive", "gate_0")
    for T, sink, mode, kw in cases:
        monkeypatch.setattr(analyze, "SINK", sink)  # about half of these models' heads give the first token more
        monkeypatch.setattr(analyze, "BLOCK", 10 * T)  # 1 query at a time in `received`
        model, idx = tiny(mode, **kw), tokens((2, T))
        chunks = [naive(model, mode, row[None], sink) for row in idx]
        assert 0 < np.mean([chunk["sink_heads", n] for chunk in chunks for n in range(4)]) < 1, (mode, T)
        averages = recorded(model, idx)
        assert {key for key in averages.sums if key[0] not in others} == chunks[0].keys(), (mode, kw)
        for name, n in chunks[0]:
            wanted = np.mean([chunk[name, n] for chunk in chunks], axis=0)
            message = f"{mode} {kw} {T}: {name} {n}"
            np.testing.assert_allclose(averages.mean(name, n), wanted, rtol=1e-9, atol=1e-10, err_msg=message)


def test_one_percent_is_a_rank():
    model = tiny(n_layer=1, n_head=2, n_embd=8, block_size=250)
    for T, rank in ((2, 1), (100, 1), (101, 2), (250, 3)):
        found = recorded(model, tokens((1, T)))
        assert found.mean("top_1%", 0) == np.sort(found.mean("importance", 0))[-rank], T


def test_every_mode():
    """States are what blocks read. A layer that owns its values has a raw_value; value is another where they are mixed.
    The results are JSON, and have a row for each layer."""
    for mode in MODES:
        model, idx = tiny(mode), tokens((2, 9))
        found = recorded(model, idx)
        states, last = states_of(model, idx)
        assert len(states) == 5 and found.mean("hidden_norm", 5) is None
        for name, n, x in (*(("hidden", n, x) for n, x in enumerate(states)), ("normed", 0, last)):
            wanted = x.norm(dim=-1).mean(dim=0).numpy()
            np.testing.assert_allclose(found.mean(f"{name}_norm", n), wanted, rtol=1e-10, err_msg=f"{mode} {name} {n}")
        for n, (attn, _, (_, own, now)) in enumerate(watched(model, idx)):
            assert (found.mean("raw_value_norm", n) is not None) == ("v" in attn.plan.heads), (mode, n)
            assert found.mean("value_norm", n) is not None, (mode, n)
            if "v" in attn.plan.heads:
                same = found.mean("raw_value_largest", n) == found.mean("value_largest", n)
                assert same == torch.equal(own["v"], now["v"]), (mode, n)
        numbers, arrays = analyze.summarize_layers(model, found, 9)
        json.dumps(numbers, allow_nan=False)
        head, _, *rows = analyze.layer_table(numbers).splitlines()
        assert [row.split()[1] for row in rows] == ["1", "2", "3", "4"], mode
        assert {row.count("|") for row in (head, *rows)} == {10} and len(arrays) == 7, mode


def test_a_layer_with_fewer_value_heads_has_a_shorter_row():
    model = tiny("skipv1")  # 8 heads of 4: layers above 0 own half of them
    _, arrays = analyze.summarize_layers(model, recorded(model, tokens((2, 32))), 32)
    missing = np.isnan(arrays["raw_value_spectrum"])
    assert not missing[0].any() and not missing[1:, :16].any() and missing[1:, 16:].all()
    assert (arrays["raw_value_spectrum"][1, :16] > 0).all()


def test_a_recorder_leaves_nothing_behind():
    model, idx = tiny("two_gates"), tokens((2, 9))
    before = model(idx)[0]
    recorder = Recorder(model)
    torch.testing.assert_close(model(idx)[0], before, rtol=0, atol=0)
    recorder.close()
    seen = set(recorder.averages.sums), recorder.averages.mean("entropy", 1)
    model(tokens((2, 9), seed=3))
    assert (set(recorder.averages.sums), recorder.averages.mean("entropy", 1)) == seen
    analyze.record(model, idx, 18, "cpu")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_averages_over_uneven_batches():
    numbers, averages = np.random.default_rng(0).normal(3, 2, (7, 4)), Averages()
    for batch in ([0], [1, 2, 3], [4, 5], [6]):
        rows = torch.from_numpy(numbers[batch])
        averages.add(1, {"number": rows[:, 0], "row": rows}, "a_")
    assert averages.mean("a_number", 1) == pytest.approx(numbers[:, 0].mean(), rel=1e-12)
    assert averages.std("a_number", 1) == pytest.approx(numbers[:, 0].std(ddof=1), rel=1e-12)
    np.testing.assert_allclose(averages.mean("a_row", 1), numbers.mean(axis=0), rtol=1e-12)
    assert averages.mean("a_number", 0) is averages.std("a_number", 0) is averages.mean("other", 1) is None
    averages.add(0, {"one": torch.ones(1)})
    assert averages.mean("one", 0) == 1 and averages.std("one", 0) is None
    for _ in range(3):
        averages.add(0, {"alike": torch.full((2,), 0.1)})
    assert averages.std("alike", 0) < 1e-8  # rounding does not take it below 0, where there is no root


# ---- closed forms, and what is planted is found


def test_uniform_entropy():
    for T, wanted in ((20, 2.623), (512, 5.818), (1024, 6.510), (2048, 7.2025)):
        share = (np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]).sum(axis=0) / T
        assert uniform_entropy(T) == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
        assert abs(uniform_entropy(T) - wanted) < 6e-4
    model = tiny(n_layer=1, n_head=2, n_embd=8, block_size=2048)
    model.blocks[0].attn.proj.weight.data[:8] = 0  # queries of zero attend alike
    assert recorded(model, tokens((1, 2048))).mean("entropy", 0) == pytest.approx(uniform_entropy(2048), rel=1e-12)


def test_eigenvalues_are_exact_from_single_precision():
    """A ratio of 10^10, which fp32 products would bury: the states are fp32, the spectrum is float64."""
    x = torch.diag_embed(torch.tensor([[1.0, 1e-5]]))
    np.testing.assert_allclose(analyze.spectrum(x @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))[0, 1], 0.5e-10, rtol=0.1)
    assert analyze.spectrum(x).dtype == torch.float64


def test_the_table_says_what_was_found():
    model, idx = tiny(n_layer=1), tokens((2, 24))
    averages = recorded(model, idx)
    numbers, _ = analyze.summarize_layers(model, averages, 24)
    cells = analyze.layer_table(numbers).splitlines()[2].strip("| ").split(" | ")
    ratios = [averages.mean(f"{t}_norm_first", 0) / averages.mean(f"{t}_norm_rest", 0) for t in ("value", "hidden")]
    right = [averages.mean(name, 0) for name in ("first", "hidden_similarity", "value_rank")]
    right[1:1] = ratios
    assert cells[0] == "1" and [float(c) for c in cells[3:8]] == pytest.approx(right, abs=0.05)
    numbers["flags"]["sinks"][0] = [0, 2]
    for name, says in {"value_drains": "value drain", "hidden_peaks": "value drain, hidden peak"}.items():
        numbers["flags"][name][0] = True
        assert analyze.layer_table(numbers).endswith(f"| sinks at [0, 2], {says} |")


def test_flags_at_their_thresholds():
    """T = 8: the share of position j is of the 8 - j queries that see it, and half of the positions are judged."""
    averages = Averages()
    for n, share in enumerate([[0.31, 0.29, 0.31, 0.29], [0.29, 0.31, 0.29, 0.31]]):
        seen = torch.tensor(share + [0.9] * 4) * torch.arange(8, 0, -1) / 8
        averages.add(n, {"importance": seen[None]})
    for name, values in {
        "value_norm_first": (0.99, 1.01),
        "value_norm_rest": (2.0, 2.0),
        "hidden_norm_first": (5.9, 6.1, 6.1),
        "hidden_norm_rest": (2.0, 2.0, 2.0),
        "massive": (0.0, 0.25, 1.0),
    }.items():
        for n, x in enumerate(values):
            averages.add(n, {name: torch.tensor([x])})
    assert analyze.find_flags(averages, 2, 8) == dict(
        sinks=[[0, 2], [1, 3]],
        value_drains=[True, False],
        hidden_peaks=[False, True, True],
        massive=[0.0, 0.25, 1.0],
    )


def test_massive_activations():
    """Above 100, and above 1000 times the median of their sizes."""
    for top, rest, massive in ((99, 0.01, 0), (101, 0.1, 1), (101, 0.102, 0), (-101, 0.1, 1), (150, -0.1, 1)):
        x = torch.full((3, 6, 5), 0.01).double()
        x[1] = rest
        x[1, 4, 2] = top
        recorder = Recorder(tiny(n_layer=1))
        recorder.state(0, None, (x,))
        found = {name: recorder.averages.mean(name, 0) for name in ("massive", "activation_max", "activation_median")}
        wanted = {"massive": massive, "activation_max": abs(top) + 0.02, "activation_median": abs(rest) + 0.02}
        assert found == pytest.approx({name: x / 3 for name, x in wanted.items()}), (top, rest)


# ---- chunks


THREE = {"prose": 5_000, "code": 3_000, "maths": 2_000}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("three"), THREE)


def subject(data_dir, mixture=None, first_token=256, tokenizer=None):
    return Subject(None, analyze.Path("it"), data_dir, mixture, first_token, tokenizer or byte_tokenizer())


def places(data_dir, idx, T):
    """(domain, window) of each row of idx (N, T), which begins with the end of text."""
    where = {}
    for domain in THREE:
        text = np.fromfile(data_dir / "val" / f"{domain}.bin", "<u2")
        for w in range(len(text) // (T - 1)):
            where.setdefault(tuple(text[w * (T - 1) : (w + 1) * (T - 1)].tolist()), (domain, w))
    assert (idx[:, 0] == 256).all() and idx.shape[1] == T and idx.dtype == torch.int64
    return [where[tuple(row[1:].tolist())] for row in idx]


def test_chunks_are_drawn_as_the_mixture_says(three):
    mixtures = [None, {"maths": 3, "prose": 1}, {"code": 1, "prose": 0}]
    mixtures += [{"prose": 0.1, "code": 0.1, "maths": 0.6}]  # whose shares add up to 1 - 1e-16
    for mixture in mixtures:
        share = {d: n / 10_000 for d, n in THREE.items()} if mixture is None else mixture
        total = sum(share.values())
        for n in (1, 4, 40):
            found = places(three, analyze.read_chunks(subject(three, mixture), n, 33, 1), 33)
            assert len(found) == len(set(found)) == n
            for domain in THREE:
                count = [d for d, _ in found].count(domain)
                assert abs(count - n * share.get(domain, 0) / total) < (1 if n < 40 else 1e-9), mixture
        order = [w for d, w in found if d == found[0][0]]
        assert order != sorted(order) and max(order) > 2 * len(order) > 0  # not just the first ones


def test_chunks_follow_from_the_seed(three):
    a, same, other = (analyze.read_chunks(subject(three), 20, 33, seed) for seed in (1, 1, 2))
    assert torch.equal(a, same) and set(places(three, a, 33)) != set(places(three, other, 33))
    more = places(three, analyze.read_chunks(subject(three), 40, 33, 1), 33)
    assert set(places(three, a, 33)) < set(more)
    assert {domain for domain, _ in places(three, a[:12], 33)} == THREE.keys()  # each batch has text of all domains
    # 93 windows of 32 in each domain's 3,000 tokens: none comes twice, and another domain does not stand in
    most = places(three, analyze.read_chunks(subject(three), 200, 33, 1), 33)
    assert len(set(most)) == len(most) == 93 + 60 + 40


def other_tokenizer():
    """Of the tokenizers package: a byte as its value, as in byte_tokenizer, and two letters that are one token."""
    tokenizers = pytest.importorskip("tokenizers")
    byte = {ord(c): c for c in tokenizers.pre_tokenizers.ByteLevel.alphabet() if ord(c) < 200} | {10: "Ċ", 32: "Ġ"}
    vocab = {c: i for i, c in byte.items()} | {"ab": 250}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 97)])
    return made


def as_read(encoding):
    """A tokenizer of that package as analyze.py has it from a folder."""
    tokenizer = object.__new__(HFTokenizer)
    tokenizer.encoding, tokenizer.hash = encoding, None
    return tokenizer


def test_chunks_in_another_models_tokens(three):
    """The text of the data, three times what should be needed, without what its tokenizer adds before or after."""
    corpus = data.Corpus(three, 3 * 32)
    found = analyze.read_chunks(subject(three, first_token=3, tokenizer=as_read(other_tokenizer())), 20, 33, 1)
    assert found.shape == (20, 33) and (found[:, 0] == 3).all() and (found == 250).any()
    for row, (domain, w) in zip(found, analyze.choose_windows(corpus, 20, 1), strict=True):
        text = np.fromfile(three / "val" / f"{domain}.bin", "<u2")[w * 96 : w * 96 + 96].tolist()
        wanted = "".join("\n\n" if i == 256 else chr(i) for i in text)
        assert wanted.startswith("".join("ab" if i == 250 else chr(i) for i in row[1:].tolist()))


def test_chunks_that_are_too_short_in_another_models_tokens(three):
    """A token a word: only the text around the end of a document has two."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 5}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    other = subject(three, None, 3, as_read(words))
    found = analyze.read_chunks(other, 300, 3, 1).tolist()
    assert 0 < len(found) < 100 and found == [[3, 5, 5]] * len(found)
    with pytest.raises(configurator.UserError, match="has no chunk of 9 tokens; set a smaller --length"):
        analyze.read_chunks(other, 100, 9, 1)


# ---- the script


SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=64)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data and runs: a was trained, b is another model in a's place; stopped is a at half its way."""
    folder = tmp_path_factory.mktemp("runs")
    words = "--batch_tokens=256 --micro_batch=4 --max_steps=8 --warmup_steps=2 --learning_rate=5e-3".split()
    words += [f"--{k}={v}" for k, v in SHAPE.items()] + ["--dtype=float32", "--device=cpu"]
    words += [f"--data_dir={make_data(folder / 'data')}", "--mixture={'prose': 1, 'code': 3}"]
    assert in_process(train, f"--out_dir={folder / 'a'}", *words).returncode == 0
    model = GPT(config("svformer", vocab_size=257, **SHAPE))
    checkpoint.save(copied(folder / "a", folder / "b"), 8, model, byte_tokenizer().hash)
    copied(folder / "a", folder / "stopped", max_steps=16)
    return folder


def copied(run, to, **changed):
    shutil.copytree(run, to)
    settings = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(settings | changed))
    return to


def call(*words, **kw):
    """analyze.py in this process."""
    return in_process(analyze, *words, "--device=cpu", **kw)


def analysis_of(folder, *words):
    """(analysis.json, the arrays of analysis.npz) that a call writes into `folder`."""
    result = call(*words, f"--out_dir={folder}")
    assert result.returncode == 0, result.stderr
    return written(folder)


def written(folder):
    with np.load(folder / "analysis.npz") as arrays:
        return json.loads((folder / "analysis.json").read_text()), dict(arrays)


def near(found, wanted, rtol, name):
    """Numbers agree, and where one is None the other is too."""
    np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), rtol, atol=1e-6, err_msg=name)


KEYS = set("format mode step checkpoint parameters config chunks chunks_asked length first_token dtype device".split())
KEYS |= set("entropy_uniform layers states normed flags thresholds environment".split())
ARRAYS = dict(importance=(2, 24), value_norm=(2, 24), raw_value_norm=(2, 24), key_norm=(2, 24), hidden_norm=(3, 24))
ARRAYS |= dict(value_spectrum=(2, 32), raw_value_spectrum=(2, 32))


def test_two_runs_as_a_user_does_it(runs):
    result = script("analyze.py", runs / "a", runs / "b", "--chunks=10", "--length=24", "--batch_tokens=100")
    assert result.returncode == 0, result.stderr
    for name, mode in (("a", "vanilla"), ("b", "svformer")):
        found, arrays = written(runs / name)
        assert found.keys() == KEYS
        assert found["layers"].keys() == {*LAYER, "entropy_minus_uniform"} and found["states"].keys() == set(STATE)
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
        assert "note:" not in result.stdout
        for n in range(2):
            number = found["layers"]["entropy"]["mean"][n]
            assert f"| {n + 1} | {number:.4f} | {number - uniform_entropy(24):+.4f} |" in result.stdout
            assert found["layers"]["entropy_minus_uniform"]["mean"][n] == pytest.approx(number - uniform_entropy(24))
    owned, borrowed = found["layers"]["raw_value_norm_first"]["mean"]
    assert owned > 0 and borrowed is None and np.isnan(arrays["raw_value_norm"][1]).all()
    assert np.isnan(arrays["raw_value_spectrum"][1]).all() and not np.isnan(arrays["value_spectrum"]).any()


def test_what_is_written_is_what_was_measured(runs, tmp_path):
    words = (runs / "b", "--chunks=7", "--length=24", "--seed=3")
    found, arrays = analysis_of(tmp_path, *words)
    _, others = analysis_of(tmp_path / "again", *words, "--batch_tokens=1")
    idx = analyze.read_chunks(subject(runs / "data", {"prose": 1, "code": 3}), 7, 24, 3)
    averages = recorded(checkpoint.load(runs / "b"), idx)
    for part, names, n_of in (("layers", LAYER, 2), ("states", STATE, 3), ("normed", analyze.NORMED, 1)):
        for name in names:
            near(found[part][name]["mean"], [averages.mean(name, n) for n in range(n_of)], 1e-4, name)
            near(found[part][name]["std"], [averages.std(name, n) for n in range(n_of)], 1e-2, name)
    for name, array in arrays.items():
        for n, row in enumerate(array):
            wanted = averages.mean(name, n)
            wanted = np.full_like(row, np.nan) if wanted is None else wanted
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-6)


def test_settings_change_what_they_should_alone(runs, tmp_path):
    words = (runs / "a", "--chunks=5", "--length=24")
    a, arrays = analysis_of(tmp_path, *words)
    again, others = analysis_of(tmp_path, *words)
    assert a | {"environment": 0} == again | {"environment": 0}
    assert all(np.array_equal(arrays[k], others[k]) for k in ARRAYS)
    found, _ = analysis_of(tmp_path, *words, "--seed=1")
    assert found["layers"]["entropy"] != a["layers"]["entropy"]
    found, _ = analysis_of(tmp_path, *words, "--first_token=0")
    assert found["first_token"] == 0 and found["layers"]["value_norm_first"] != a["layers"]["value_norm_first"]
    found, _ = analysis_of(tmp_path, *words, "--dtype=bfloat16")
    assert found["dtype"] == "bfloat16" and found["layers"]["entropy"] != a["layers"]["entropy"]
    assert found["layers"]["entropy"]["mean"] == pytest.approx(a["layers"]["entropy"]["mean"], abs=0.01)


def test_few_chunks(runs, tmp_path, monkeypatch):
    """A single chunk has no deviation, and fewer than asked are reported."""
    found, arrays = analysis_of(tmp_path, runs / "a", "--chunks=1")
    assert (found["chunks"], found["length"]) == (1, 64)
    assert found["layers"]["entropy"]["std"] == [None, None] and arrays["importance"].shape == (2, 64)
    result = call(runs / "a", "--chunks=100", f"--out_dir={tmp_path}")
    assert f"note: {runs / 'data'} has only 72 of 100 chunks for a" in result.stdout  # 25 of prose, 2999 // 63 of code
    assert [written(tmp_path)[0][key] for key in ("chunks", "chunks_asked")] == [72, 100]
    found, _ = analysis_of(tmp_path, runs / "a", "--chunks=2", "--length=2")
    assert found["layers"]["top_3"]["mean"] == [None, None]
    found, _ = analysis_of(tmp_path, runs / "a", "--chunks=100", f"--data_dir={runs / 'data'}")
    assert found["chunks"] == 47 + 40  # drawn as the data's own mixture says, not the run's
    monkeypatch.setattr(analyze, "POSITIONS", 16)
    _, arrays = analysis_of(tmp_path, runs / "a", "--chunks=2")
    assert arrays["importance"].shape == (2, 16) and arrays["hidden_norm"].shape == (3, 16)
    assert arrays["value_spectrum"].shape == (2, 32)


def test_a_model_before_training(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = f"data_dir = {str(runs / 'data')!r}\nn_layer, n_head, n_embd, block_size, seed = 3, 2, 32, 128, 5\n"
    more = "value_mode, batch_tokens, micro_batch, mixture = 'resformer', 256, 1, {'code': 1}\n"
    (tmp_path / "small.py").write_text(settings + more)
    assert call("--init=small.py", "--chunks=4").returncode == 0
    found, arrays = written(tmp_path / "out" / "init-small")
    assert (found["mode"], found["step"], found["checkpoint"]) == ("resformer", 0, None)
    assert (found["length"], found["first_token"], arrays["hidden_norm"].shape) == (128, 256, (4, 128))
    assert max(abs(x) for x in found["layers"]["entropy_minus_uniform"]["mean"]) < 1e-3  # as Figure 1 has it
    model = GPT(config("resformer", vocab_size=257, n_layer=3, n_head=2, n_embd=32, block_size=128), seed=5).eval()
    idx = analyze.read_chunks(subject(runs / "data", {"code": 1}), 4, 128, 42)
    wanted = [recorded(model, idx).mean("hidden_norm_rest", n) for n in range(4)]
    assert found["states"]["hidden_norm_rest"]["mean"] == pytest.approx(wanted, rel=1e-6)
    assert analysis_of(tmp_path / "there", "--init=small.py", "--chunks=2")[0]["chunks"] == 2
    assert call("--init=small.py", f"--data_dir={tmp_path}").returncode == 2


def test_a_hugging_face_folder(runs, tmp_path):
    model = GPT(config(vocab_size=257, n_layer=2, n_kv_head=2, block_size=33, init_std=0.2)).eval()
    folder, data_dir = hf_folder(tmp_path / "model", model, bos_token_id=3), f"--data_dir={runs / 'data'}"
    other_tokenizer().save(str(folder / "tokenizer.json"))
    result = call(folder, data_dir, "--chunks=6")
    assert result.returncode == 0, result.stderr
    found, arrays = written(folder)
    assert (found["mode"], found["step"], found["checkpoint"]) == ("vanilla", None, "model.safetensors")
    assert (found["chunks"], found["length"], found["first_token"]) == (6, 33, 3)
    idx = analyze.read_chunks(subject(runs / "data", None, 3, as_read(other_tokenizer())), 6, 33, 42)
    averages = recorded(model, idx)
    for name in ("entropy", "first", "value_rank", "eq4", "eq6"):
        wanted = [averages.mean(name, n) for n in range(2)]
        near(found["layers"][name]["mean"], wanted, 1e-5, name)
    assert arrays["value_spectrum"].shape == (2, 8)
    narrow, _ = analysis_of(tmp_path / "narrow", folder, data_dir, "--chunks=6", "--dtype=bfloat16")
    narrow, wide = narrow["layers"]["entropy"]["mean"], found["layers"]["entropy"]["mean"]
    assert narrow != wide and narrow == pytest.approx(wide, abs=0.05)
    refused(call(folder), "does not say what it was trained on", "--data_dir")
    refused(call(folder, data_dir, "--length=34"), "length=34", "block_size=33", "--length=33")
    few = GPT(config(vocab_size=100, n_layer=2, n_kv_head=2, block_size=33))
    other_tokenizer().save(str(hf_folder(tmp_path / "few", few, bos_token_id=3) / "tokenizer.json"))
    refused(call(tmp_path / "few", data_dir, "--chunks=6"), "has 100 token ids")


def test_a_run_that_is_not_finished(runs, tmp_path):
    refused(call(runs / "stopped"), "is at step 8 of 16", "--resume=auto", "step_00000008.safetensors")
    result = call(runs / "stopped" / "step_00000008.safetensors", "--chunks=2", f"--out_dir={tmp_path}")
    assert result.returncode == 0 and "stopped (vanilla): 2 chunks" in result.stdout


def test_data_is_verified(runs, tmp_path):
    shutil.copytree(runs / "data", tmp_path / "data")
    ids = np.fromfile(tmp_path / "data" / "val" / "prose.bin", "<u2")
    ids[::-1].tofile(tmp_path / "data" / "val" / "prose.bin")
    words = (runs / "a", f"--data_dir={tmp_path / 'data'}", "--chunks=2", f"--out_dir={tmp_path}")
    refused(call(*words), "prose.bin was altered")
    assert call(*words, "--verify=false").returncode == 0


def test_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(in_process(analyze), "runs in one process; start it without torchrun")


def test_bad_calls(runs, tmp_path):
    a, b = runs / "a", runs / "b"
    refused(in_process(analyze, cwd=tmp_path), "no run is below out/ yet")
    for words, says in (
        ((a, "--init=config/tiny.py"), ["runs and --init exclude each other"]),
        ((a, "--length=1"), ["length=1", "at least 2"]),
        ((a, "--length=65"), ["length=65", "block_size=64", "--length=64"]),
        ((a, "--first_token=257"), ["first_token=257", "257 token ids"]),
        ((a, "--dtype=float16"), ["dtype takes 'float32' or 'bfloat16'"]),
        ((a, b, f"--out_dir={tmp_path}"), [f"out_dir={tmp_path}", "2 runs"]),
        ((a, *a.glob("step_*[0-9].safetensors")), ["in one folder, which has one analysis.json"]),
        ((runs / "none",), ["none holds no checkpoint"]),
        (("--init=none.py",), ["none.py: no such config file"]),
        ((a, f"--data_dir={tmp_path / 'nowhere'}"), ["nowhere", "--data_dir"]),
    ):
        refused(call(*words), *says)
    other = make_data(tmp_path / "other", tokenizer=byte_tokenizer("(?s:..?)"))
    refused(call(a, f"--data_dir={other}"), "another tokenizer", str(other))
    gone = copied(a, tmp_path / "gone", data_dir="long/gone")
    refused(call(gone), "trained on long/gone, which is missing", "--data_dir")
    checkpoint.save(tmp_path / "long", 1, GPT(config(vocab_size=257, block_size=4096)), byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "long" / "tokenizer.json")
    refused(
        call(tmp_path / "long", f"--data_dir={runs / 'data'}"),
        "no chunk of 4096 tokens",
        str(runs / "data"),
        "--length",
    )


def test_a_model_that_is_not_finite(runs, tmp_path):
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    for where in ("embed", "blocks.1.attn.proj", "blocks.1.attn.out", "blocks.1.mlp.down", "norm"):
        model = checkpoint.load(runs / "a")
        model.get_submodule(where).weight.data.fill_(3e38)  # finite itself
        checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
        refused(call(tmp_path, f"--data_dir={runs / 'data'}", "--chunks=2"), "NaN")
    assert not list(tmp_path.glob("analysis.*"))


def test_values_of_zero_have_no_relative_norm(runs, tmp_path):
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    model = checkpoint.load(runs / "a")
    model.blocks[1].attn.proj.weight.data.zero_()
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    result = call(tmp_path, f"--data_dir={runs / 'data'}", "--chunks=2")
    assert result.returncode == 0, result.stderr
    cells = next(line for line in result.stdout.splitlines() if line.startswith("| 2 |")).split(" | ")
    assert cells[4] == "-" and float(cells[5]) > 0
    assert json.loads((tmp_path / "analysis.json").read_text())["flags"]["value_drains"][1] is False
