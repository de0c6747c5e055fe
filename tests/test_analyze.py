"""Analysis: every quantity against its definition on matrices that exist whole, and analyze.py as a user runs it."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import COVER, Largest, byte_tokenizer, hf_folder, in_process, make_data, refused, tiny, tokens, widths
from test_equations import VALUES, A, cross, linear, norm

import analyze
import train
from analyze import Recorder, importance, inside_of, received, uniform_entropy
from common import checkpoint
from common.data import Corpus
from common.files import read_record
from common.tokenizer import HFTokenizer
from configurator import UserError
from net.layers import attend
from value_modes import Residual, ValueMode

EXACT = dict(rtol=0, atol=1e-10)

COMBINED = {  # more than one residual that changes A_n: no row has that
    "probs_then_identity": ValueMode((Residual(of="probs"), Residual(map="identity", lam=(0.5, 1.0)))),
    "identity_then_probs": ValueMode((Residual(map="identity", lam=(0.5, 1.0)), Residual(of="probs", lam=(1.0, 3.0)))),
    "delta_then_probs": ValueMode((Residual(map="delta", lam=(3.0, 1.0)), Residual(of="probs", source="all"))),
    "cross_and_probs": ValueMode((Residual(map="cross"), Residual(of="probs", source="prev", lam=(1.0, 2.0)))),
    "scores_and_probs": ValueMode((Residual(of="probs"), Residual(of="scores", lam=(2.0, -1.0)))),
    "probs_twice": ValueMode((Residual(of="probs", source="all", lam=(1.0, 2.0)), Residual(of="probs"))),
    "cross_prev_and_first": ValueMode((Residual(map="cross", source="prev"), Residual(map="cross", layers=(3,)))),
}


@torch.no_grad()
def watched(model, idx, modules=()):
    """(module, its arguments, what it returned) in a forward pass, by default of each layer's attention."""
    seen, modules = [], modules or [block.attn for block in model.blocks]
    hooks = [module.register_forward_hook(lambda *call: seen.append(call)) for module in modules]
    model.hidden(idx)
    for hook in hooks:
        hook.remove()
    return seen


def attention(attn, args, output):
    """A_n (B, H, T, T) as the layer applies it: its output where all values are the columns of an identity matrix. A
    position that is in several parts of one softmax has the same row of it in each, so that its columns add up."""
    weights, attended, used = args[2], args[4], output[2]
    B, G, T, D = used["v"].shape
    in_softmax = [(m, weights[m.index]) for m in attn.mixes if m.residual.map == "cross" or m.residual.of == "scores"]
    after = [m for m in attn.mixes if m.residual.of == "probs" or m.residual.map in ("identity", "delta")]
    columns = []
    for some in torch.eye(T, dtype=used["v"].dtype).split(D, dim=1):
        v = F.pad(some, (0, D - some.size(1))).expand(B, G, T, D)
        attended_v = {i: tensors | {"v": v} for i, tensors in attended.items()}
        y = attn.attend_with_mixes(used | {"v": v}, in_softmax, attended_v, None)
        for m in after:
            own, *others = weights[m.index]
            y = own * y
            if m.residual.of == "probs":
                for w, i in zip(others, m.sources, strict=True):
                    y = y + w * attend(attended[i]["q"], attended[i]["k"], v, attn.kernel)
        columns.append(y[..., : some.size(1)])
    return torch.cat(columns, dim=-1)


def recorded(model, *batches):
    recorder = Recorder(model)
    with torch.inference_mode():
        for idx in batches:
            model.hidden(idx)
    return recorder


# ---- importance


APPLIED = [*((mode, 0) for mode in COVER), ("vanilla", 1), *((mode, 2) for mode in COMBINED)]


@pytest.mark.parametrize("mode, n_kv_head", APPLIED)
@torch.no_grad()
def test_importance_is_the_column_sums_of_the_attention_applied(monkeypatch, mode, n_kv_head):
    monkeypatch.setattr(analyze, "BLOCK", 600)  # up to 4 queries at a time
    model = tiny(COMBINED.get(mode, mode), n_kv_head=n_kv_head)
    for call in watched(model, tokens((2, 9))):
        sums = attention(*call).sum(dim=2)  # over queries: (B, H, T)
        mixes, _, used = inside_of(*call)
        found = sum(w * received(q, keys, 4**-0.5) for w, q, keys in analyze.softmaxes(mixes, used))
        torch.testing.assert_close(found, sums, **EXACT)
        torch.testing.assert_close(importance(mixes, used), sums / sums.sum(dim=-1, keepdim=True), **EXACT)


@pytest.mark.parametrize("own", (1.0, 0.0, -1.0))
def test_the_weight_of_attention_does_not_change_where_it_goes(own):
    call = watched(tiny(ValueMode((Residual(map="identity", lam=(own, 1.0)),))), tokens((2, 9)))[1]
    mixes, _, used = inside_of(*call)
    torch.testing.assert_close(importance(mixes, used), received(used["q"], [used["k"]], 4**-0.5) / 9, **EXACT)


def test_weights_may_differ_by_head():
    """Each head has the importance that it would have if its weights were all heads'. One ignores all attention."""
    layer, source = ({"q": x, "k": x, "v": x} for x in torch.randn(2, 3, 4, 9, 4))
    own, first = torch.tensor([1.0, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.5, 1.0, 0.0])
    residual = Residual(of="probs")
    found = importance([(residual, (own[:, None, None], first[:, None, None]), [source])], layer)
    for h in range(4):
        alike = importance([(residual, (own[h], first[h]), [source])], layer)
        torch.testing.assert_close(found[:, h], alike[:, h])


def test_negative_shares_of_attention_are_refused():
    with pytest.raises(UserError, match="an attention residual has a negative weight"):
        recorded(tiny(ValueMode((Residual(of="probs", lam=(1.0, -0.9)),))), tokens((2, 9)))


def test_no_tensor_has_the_length_twice(monkeypatch):
    monkeypatch.setattr(analyze, "BLOCK", 2**10)
    q, k = torch.randn(2, 1, 4, 64, 4)
    with Largest() as largest:
        received(q, [k] * 3, 0.5)
        recorded(tiny(n_layer=2, n_head=4, n_embd=8, block_size=64), tokens((1, 64)))
    assert largest.numel < 64 * 64  # H = 4 times less than a layer has probabilities


# ---- a pass against naive definitions


def vectors(name, n, x):
    """Norms, and the cosines of all pairs, of x (T, E)."""
    norms = x.square().sum(dim=1).sqrt()
    cosines = (x @ x.T / norms[:, None] / norms).numpy()[~np.eye(len(x), dtype=bool)]
    found = {"norm": norms.numpy(), "norm_first": norms[0], "norm_rest": norms[1:].mean(), "similarity": cosines.mean()}
    return {(f"{name}_{key}", n): value for key, value in found.items()}


def spectra(name, n, v):
    """`vectors` of v (T, d), eigenvalues of its d x d second moment, the largest, the rank from their entropy."""
    values = np.linalg.eigvalsh((v.T @ v / len(v)).numpy())[::-1]
    share = values[values > 1e-12 * values[0]] / values.sum()
    rank = math.exp(-sum(p * math.log(p) for p in share))
    found = {"spectrum": values, "largest": values[0], "rank": rank}
    return vectors(name, n, v) | {(f"{name}_{key}", n): value for key, value in found.items()}


@torch.no_grad()
def naive(model, mode, idx, sink):
    """{(name, layer or state): value} of one chunk, idx (1, T)."""
    calls, P, found = watched(model, idx, [*model.blocks, model.norm]), dict(model.named_parameters()), {}
    states = [args[0] for _, args, _ in calls]
    for n, x in enumerate(states):
        found |= vectors("hidden", n, x[0])
    gpt2, T, H, D = model.cfg.arch == "gpt2", idx.size(1), model.cfg.n_head, model.cfg.head_dim
    G, V, values, k_before = model.cfg.n_kv_head, {}, [], None  # V[n] is projected, values[n] used
    for n, call in enumerate(watched(model, idx)):
        a = attention(*call)[0].sum(dim=1) / T  # (H, T)
        found["importance", n] = total = a.mean(dim=0).numpy()
        found["entropy", n] = -sum(p * math.log(p) for p in total / total.sum() if p > 0)
        found["first", n], found["sink_heads", n] = total[0], np.mean([head[0] > sink for head in a.numpy()])
        for name, rank in {"top_1": 1, "top_2": 2, "top_3": 3, "top_10": 10, "top_1%": -(-T // 100)}.items():
            if rank <= T:
                found[name, n] = sorted(total)[-rank]
        _, projected, used = inside_of(*call)
        q, k = used["q"][0], used["k"][0]
        found |= vectors("key", n, torch.cat(list(k), dim=1))
        x = (states[n] + states[0])[0] / 2 if mode == "hidden" and n else states[n][0]
        if "v" in projected:
            y = linear(norm(x, P, f"blocks.{n}.norm1", gpt2), P, f"blocks.{n}.attn.proj", gpt2)
            V[n + 1] = y[:, -G * D :]  # counted from 1, as in VALUES
            found |= vectors("raw_value", n, V[n + 1])
        values.append(VALUES.get(mode, VALUES["vanilla"])(n + 1, V, None))
        found |= spectra("value", n, values[n])
        heads = []  # outputs of Eq 2, 4 and 6
        for h in range(H if n else 0):
            g = h // (H // G)
            v, a = [t[:, g * D : g * D + D] for t in values], A(q[h], k[g])
            two, four = cross(q[h], [k[g], k_before[g]], [v[n], v[n - 1]]), a @ (v[n] + v[n - 1]) / 2
            heads.append((two, four, a @ v[n] + sum(v[:n]) / n))  # layer n is the paper's n + 1
        if n:
            two, *others = (torch.cat(of_head, dim=1) for of_head in zip(*heads, strict=True))
            for name, u in zip(("eq4", "eq6"), others, strict=True):
                found[name, n] = ((u * two).sum(dim=1) / u.norm(dim=1) / two.norm(dim=1)).mean()
        k_before = k
    return found


PASSES = "vanilla resformer resformer_all svformer share_v2 cross neutreno probs scores key hidden denseformer".split()
CASES = [(10, 0.3, mode, dict(n_kv_head=n)) for mode, n in widths(*PASSES, "gqa2", "share_q")]
CASES += [(21, 0.174, mode, dict(n_kv_head=n)) for mode, n in (("share_v2", 8), ("resformer", 1))]
CASES += [(12, 0.25, mode, dict(n_kv_head=2, arch="gpt2", attn="eager")) for mode in ("vanilla", "resformer")]


@pytest.mark.parametrize("T, sink, mode, shape", CASES)
def test_a_pass_equals_the_definitions(monkeypatch, T, sink, mode, shape):
    """With fewer and with more tokens than a value has dimensions, every name that goes into analysis.json."""
    monkeypatch.setattr(analyze, "SINK", sink)  # about half of these models' heads give the first token more
    monkeypatch.setattr(analyze, "BLOCK", 10 * T)  # 1 query at a time in `received`
    model, idx = tiny(mode, **shape), tokens((2, T))
    chunks = [naive(model, mode, row[None], sink) for row in idx]
    assert 0 < np.mean([chunk["sink_heads", n] for chunk in chunks for n in range(4)]) < 1
    recorder = recorded(model, idx)
    found = {(name, n): recorder.mean(name, n) for name, sums in recorder.sums.items() for n in sums}
    assert found.keys() == chunks[0].keys()
    for key, value in found.items():
        wanted = np.mean([np.asarray(chunk[key]) for chunk in chunks], axis=0)
        np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-10, err_msg=str(key))


@pytest.mark.parametrize("mode", COVER)
def test_every_mode_has_finite_numbers(mode):
    numbers, _ = analyze.summarize(recorded(tiny(mode), tokens((2, 9))), 4, 9)
    json.dumps(numbers, allow_nan=False)


@pytest.mark.parametrize("T, rank", [(2, 1), (100, 1), (101, 2), (250, 3)])
def test_one_percent_is_a_rank(T, rank):
    found = recorded(tiny(n_layer=1, n_head=2, n_embd=8, block_size=250), tokens((1, T)))
    assert found.mean("top_1%", 0) == np.sort(found.mean("importance", 0))[-rank]


# ---- closed forms, and what is planted is found


@pytest.mark.parametrize("T, wanted", ((20, 2.623), (512, 5.818), (1024, 6.510), (2048, 7.2025)))
def test_uniform_entropy(T, wanted):
    model = tiny(n_layer=1, n_head=2, n_embd=8, block_size=T)
    model.blocks[0].attn.proj.weight.data[:8] = 0  # queries of zero attend alike
    assert recorded(model, tokens((1, T))).mean("entropy", 0) == pytest.approx(uniform_entropy(T), rel=1e-12)
    assert uniform_entropy(T) == pytest.approx(wanted, abs=6e-4)


def test_eigenvalues_are_exact_from_single_precision():
    """A ratio of 10^10, which fp32 products would bury."""
    x = torch.diag_embed(torch.tensor([[1.0, 1e-5]]))
    np.testing.assert_allclose(analyze.spectrum(x @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))[0, 1], 0.5e-10, rtol=0.1)


# ---- chunks

THREE = {"prose": 5_000, "code": 3_000, "maths": 2_000}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("three"), THREE)


def chunks(data_dir, n, T, mixture=None, tokenizer=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "trained_on", lambda *asked: (data_dir, mixture))
        patch.setattr(checkpoint, "load_tokenizer", lambda path: tokenizer or byte_tokenizer())
        return analyze.read_chunks(analyze.Path("it/weights"), T, analyze.AnalyzeConfig(chunks=n))


def places(data_dir, idx):
    """(domain, window) of each row of idx (N, T), which begins with the end of text."""
    where, n = {}, idx.shape[1] - 1
    for domain in THREE:
        text = np.fromfile(data_dir / "val" / f"{domain}.bin", "<u2").tolist()
        where |= {tuple(text[w * n : (w + 1) * n]): (domain, w) for w in range(len(text) // n)}
    assert (idx[:, 0] == 256).all()
    return [where[tuple(row[1:].tolist())] for row in idx]


@pytest.mark.parametrize("mixture", [{}, {"maths": 3, "prose": 1}, {"prose": 0.1, "code": 0.1, "maths": 0.6}])
def test_chunks_are_drawn_as_the_mixture_says(three, mixture):
    """Of the last mixture the shares add up to 1 - 1e-16."""
    found, share = places(three, chunks(three, 40, 33, mixture=mixture)), mixture or THREE
    assert len(set(found)) == 40
    for domain in THREE:
        wanted = 40 * share.get(domain, 0) / sum(share.values())
        assert [d for d, _ in found].count(domain) == pytest.approx(wanted, abs=1e-9)


def test_no_chunk_comes_twice(three, monkeypatch):
    """And which ones come follows from SEED alone."""
    few, *more = (places(three, chunks(three, n, 33)) for n in (20, 20, 40, 200))
    assert few == more[0] and set(few) < set(more[1])
    assert {domain for domain, _ in few[:12]} == THREE.keys()  # each batch has text of all domains
    # 93 windows of 32 in each domain's 3,000 tokens: another domain does not stand in
    assert len(set(more[2])) == 93 + 60 + 40
    monkeypatch.setattr(analyze, "SEED", 1)
    assert set(few) != set(places(three, chunks(three, 20, 33)))


def other_tokenizer():
    """Of the tokenizers package: a byte as its value, as in byte_tokenizer, <s>, and two letters that are one token."""
    tokenizers = pytest.importorskip("tokenizers")
    byte = {ord(c): c for c in tokenizers.pre_tokenizers.ByteLevel.alphabet() if ord(c) < 200} | {10: "Ċ", 32: "Ġ"}
    vocab = {c: i for i, c in byte.items()} | {"ab": 250, "<s>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


@pytest.fixture
def other_folder(tmp_path):
    """A folder of a public model that has that tokenizer."""
    model = tiny(vocab_size=257, n_layer=2, n_kv_head=2, block_size=33)
    folder = hf_folder(tmp_path / "model", model.float(), bos_token_id=3)
    other_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_chunks_in_another_models_tokens(three, other_folder):
    """The text of the data, three times what should be needed."""
    found = chunks(three, 20, 33, tokenizer=HFTokenizer.of_folder(other_folder))
    assert found.shape == (20, 33) and (found[:, 0] == 3).all() and (found == 250).any()
    for row, (domain, w) in zip(found, analyze.choose_windows(Corpus(three, 96), 20), strict=True):
        text = np.fromfile(three / "val" / f"{domain}.bin", "<u2")[w * 96 : w * 96 + 96].tolist()
        wanted = "".join("\n\n" if i == 256 else chr(i) for i in text)
        assert wanted.startswith("".join("ab" if i == 250 else chr(i) for i in row[1:].tolist()))


# ---- the script

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=64)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data and runs: a was trained, b is another model in a's place."""
    folder = tmp_path_factory.mktemp("runs")
    words = "--batch_tokens=256 --micro_batch=4 --max_steps=8 --warmup_steps=2 --save_every=4 --device=cpu".split()
    words += ["--learning_rate=5e-3", "--dtype=float32", *(f"--{k}={v}" for k, v in SHAPE.items())]
    words += [f"--data_dir={make_data(folder / 'data')}", "--mixture={'prose': 1, 'code': 3}"]
    assert in_process(train, f"--out_dir={folder / 'a'}", *words).returncode == 0
    shutil.copytree(folder / "a", folder / "b")
    checkpoint.save(folder / "b", 8, tiny("svformer", vocab_size=257, **SHAPE).float(), byte_tokenizer().hash)
    return folder


def call(*words, **kw):
    return in_process(analyze, *words, "--device=cpu", **kw)


def written(folder, *words):
    """(analysis.json, the arrays of analysis.npz) in a folder, after a call that writes them, if there are words."""
    if words:
        result = call(*words, f"--out_dir={folder}")
        assert result.returncode == 0, result.stderr
    with np.load(folder / "analysis.npz") as arrays:
        return read_record(folder / "analysis.json", "analyze.py's numbers"), dict(arrays)


@pytest.mark.parametrize("name, mode", (("a", "vanilla"), ("b", "svformer")))
def test_what_is_written_and_printed_is_what_was_measured(runs, name, mode):
    result = call(runs / "a", runs / "b", "--chunks=7", "--batch_tokens=200")  # 3, 3 and 1 chunks
    assert result.returncode == 0, result.stderr
    found, arrays = written(runs / name)
    model, idx = checkpoint.load(runs / name), chunks(runs / "data", 7, 64, {"prose": 1, "code": 3})
    numbers, others = analyze.summarize(recorded(model, idx), 2, 64)
    for of, column in (numbers["layers"] | numbers["states"]).items():
        again = (found["layers"] | found["states"])[of]
        a, b = (np.array(column["mean"], float) for column in (again, column))
        np.testing.assert_allclose(a, b, 1e-4, atol=1e-6, err_msg=of)
    assert arrays.keys() == others.keys() and len(arrays["hidden_norm"]) == 1 + len(arrays["key_norm"]) == 3
    for of, array in arrays.items():
        np.testing.assert_allclose(array, others[of], rtol=1e-3, atol=1e-6)
    assert (found["mode"], found["step"]) == (mode, 8)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    entropy, above = (found["layers"][of]["mean"][1] for of in ("entropy", "entropy_minus_uniform"))
    assert above == pytest.approx(entropy - uniform_entropy(64), abs=1e-6)
    assert f"{name} ({mode}): 7 of 7 chunks of 64 tokens" in result.stdout and f"| 2 | {entropy:.4f} |" in result.stdout
    assert np.isnan(arrays["raw_value_norm"][1]).all() == (mode == "svformer")  # it borrows


def test_a_hugging_face_folder(runs, other_folder):
    assert call(other_folder, f"--data_dir={runs / 'data'}", "--chunks=6").returncode == 0
    found, _ = written(other_folder)
    assert (found["mode"], found["step"], found["chunks"], found["length"]) == ("vanilla", None, 6, 33)
    idx = chunks(runs / "data", 6, 33, tokenizer=HFTokenizer.of_folder(other_folder))
    recorder = recorded(checkpoint.load(other_folder), idx)
    assert found["layers"]["entropy"]["mean"] == pytest.approx([recorder.mean("entropy", n) for n in (0, 1)], rel=1e-5)
    refused(call(other_folder), "does not say what it was trained on", "--data_dir")


def test_a_model_in_bf16_is_measured_in_float32(runs, tmp_path):
    numbers, found = {}, {}
    for dtype in ("float32", "bfloat16"):
        numbers[dtype], found[dtype] = written(tmp_path / dtype, runs / "a", "--chunks=5", f"--dtype={dtype}")
        assert numbers[dtype]["dtype"] == dtype
    narrow, wide = found["bfloat16"], found["float32"]
    # shares of attention still sum to 1, as sums of bf16 would not
    np.testing.assert_allclose(narrow["importance"].sum(axis=1), 1, rtol=1e-6)
    # and weights of 8 bits move a norm by less than they are rounded
    for name in ("importance", "value_norm", "hidden_norm"):
        np.testing.assert_allclose(narrow[name], wide[name], rtol=0.01)
        assert (narrow[name] != wide[name]).any()


def test_what_cannot_be_analysed(runs, tmp_path, monkeypatch):
    other = make_data(tmp_path / "other", tokenizer=byte_tokenizer("(?s:..?)"))
    refused(call(runs / "a", runs / "b", f"--out_dir={tmp_path}"), "several of these models would write into one")
    refused(call(runs / "a", "--length=65"), "a chunk of 65 tokens does not fit", "at least 2 tokens, and at most 64")
    refused(call(runs / "a", f"--data_dir={other}"), "different tokenizers", str(other))
    (runs / "data").rename(runs / "moved")
    refused(call(runs / "a"), "data, which is not a folder here; name the prepared data with --data_dir")
    (runs / "moved").rename(runs / "data")
    monkeypatch.setattr("os.access", lambda *of: False)
    refused(call(runs / "a"), "a is not writable; set another --out_dir")


def test_a_model_that_is_not_finite(runs, tmp_path):
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    model = checkpoint.load(runs / "a")
    model.embed.weight.data.fill_(3e38)  # finite itself
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    refused(call(tmp_path, f"--data_dir={runs / 'data'}", "--chunks=2"), "NaN")
    assert not list(tmp_path.glob("analysis.*"))
