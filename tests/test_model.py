"""What must hold in every mode; test_equations.py says that each computes what its row says."""

import copy
import dataclasses
import gc
import itertools
import math
import os
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from conftest import COMPILED, COVER, MODES, config, fewest_layers, same, tiny, tokens, widths
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import checkpoint
import describe
import value_modes
from eval import PrefixTree
from layers import Linear
from loss import LinearCrossEntropy
from model import GPT, KVCache
from value_modes import TABLE, ModelConfig, Residual, ValueMode, get_mode

MINUTE = timedelta(minutes=1)


def weight(model, n, t):
    """W of tensor t in layer n, cut from the fused projection, or None where the layer has none."""
    row = 0
    for name, rows in model.blocks[n].attn.proj.parts.items():
        if name == t:
            return model.blocks[n].attn.proj.weight[row : row + rows]
        row += rows


# ---- every mode: a row added to the table is tested here without another line


def test_causal():
    idx = tokens((1, 12))
    other = idx.clone()
    other[0, 7] = (idx[0, 7] + 1) % 61
    for mode in MODES:
        model = tiny(mode)
        before, after = model(idx)[0], model(other)[0]
        assert before.shape == (1, 12, 61)
        same(before[:, :7], after[:, :7], mode)
        assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4, mode


def gradients(model, idx):
    """{name: gradient} of the loss on idx, the fused products taken apart."""
    model.zero_grad()
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        parts = getattr(model.get_submodule(name.rpartition(".")[0]), "parts", {"": len(p)})
        found |= {f"{name} {t}": g for t, g in zip(parts, p.grad.clone().split(list(parts.values())), strict=True)}
    return found


def test_every_parameter_gets_gradient():
    """And the same one, bit for bit, with activation checkpointing."""
    for case in widths(*MODES):
        mode, n_kv_head = case
        model, idx = tiny(mode, n_kv_head=n_kv_head), tokens((2, 13))
        plain = gradients(model, idx)
        model.recompute = True
        for name, grad in gradients(model, idx).items():
            assert grad.abs().max() > 0 and torch.equal(grad, plain[name]), (case, name)


def test_every_parameter_moves_from_its_initial_value():
    """Some start where a factor is 0 (a low rank's second one): after a step all of them learn."""
    for mode in MODES:
        model, idx = GPT(config(mode)), tokens((4, 25))
        at_first = gradients(model, idx)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        for name, grad in gradients(model, idx).items():
            assert (at_first[name].abs() + grad.abs()).max() > 0, (mode, name)


def test_cached_decoding_equals_the_full_forward():
    idx = tokens((2, 14))
    cuts = [0, 5, 6, 7, 11, 14]  # a prompt, single tokens, and pieces behind a filled cache
    for case in widths(*MODES):
        model = tiny(case[0], n_kv_head=case[1])
        cache = KVCache(model.cfg, [0] * 2, 16, dtype=torch.float64)
        pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in zip(cuts, cuts[1:], strict=False)]
        same(torch.cat(pieces, 1), model(idx)[0], case)
        assert cache.nbytes == 2 * 16 * 8 * value_modes.kv_floats_per_token(model.cfg), case


def forked(rows):
    """Rows of (beginning, continuations) -> (ids, positions, forks) as tensors filled up to one width, and for each row
    and continuation the places of its whole sequence."""
    wide = max(len(start) + sum(map(len, ends)) for start, ends in rows)
    ids, positions, forks = torch.zeros(3, len(rows), wide, dtype=torch.int64)
    where = {}
    for b, (start, ends) in enumerate(rows):
        at = len(start)
        ids[b, :at], positions[b, :at] = torch.tensor(start), torch.arange(at)
        for k, end in enumerate(ends):
            places = range(at, at + len(end))
            ids[b, places], forks[b, places] = torch.tensor(end), k + 1
            positions[b, places] = torch.arange(len(start), len(start) + len(end))
            where[b, k], at = [*range(len(start)), *places], at + len(end)
    return (ids, positions, forks), where


def test_forks_equal_their_sequences_one_by_one():
    rows = [([3, 1, 4, 1, 5], [[9, 2, 6], [5], [9, 2, 7, 1]]), ([2, 7], [[1, 8, 2, 8, 1, 8], [2, 8, 4]])]
    (ids, *how), where = forked(rows)
    for case in widths(*MODES):
        for attn in ("sdpa", "eager"):
            model = tiny(case[0], attn=attn, n_kv_head=case[1])
            all_at_once = model.hidden(ids, PrefixTree(*how, int(how[0].max()) + 1))
            for (b, k), places in where.items():
                alone = model.hidden(torch.tensor([rows[b][0] + rows[b][1][k]]))
                same(all_at_once[b, places], alone[0], (case, attn))


def test_forks_end_with_the_block():
    model = tiny()
    (ids, *how), _ = forked([([1] * 30, [[2, 2], [3, 3], [4, 4]])])  # 36 tokens, none beyond position 31
    assert model.hidden(ids, PrefixTree(*how, int(how[0].max()) + 1)).shape == (1, 36, 32)
    (ids, *how), _ = forked([([1] * 30, [[2, 2, 2], [3]])])
    with pytest.raises(ValueError, match="33 tokens do not fit block_size=32"):
        model.hidden(ids, PrefixTree(*how, int(how[0].max()) + 1))


class NewMemory:
    """Counts the bytes behind the tensors that were made since, and are alive."""

    def __enter__(self):
        gc.freeze()  # what there is already is not looked at again
        return self

    def __exit__(self, *_):
        gc.unfreeze()

    def nbytes(self):
        gc.collect()
        storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype,size", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_decoding_takes_the_bytes_that_the_plan_says(dtype, size):
    """All memory that outlives the decoding of a token is the cache's, as many bytes as planned."""
    for mode in MODES:
        model, idx = GPT(config(mode)).to(dtype).eval(), tokens((3, 6))
        planned = 3 * 10 * size * value_modes.kv_floats_per_token(model.cfg)
        with torch.no_grad(), NewMemory() as new:
            cache = KVCache(model.cfg, [0] * 3, 10, dtype=dtype)
            for i in range(6):
                model(idx[:, i : i + 1], cache=cache)
            assert new.nbytes() == cache.nbytes == planned, mode
        for stored in cache.tensors.values():  # and it was used
            assert stored[:, :, :6].abs().amax(dim=(1, 3)).min() > 0, mode


def test_recomputing_keeps_less():
    """Between forward and backward only the inputs of the blocks are alive, and V_1 where it is read later."""
    idx = tokens((4, 33))
    for mode in ("vanilla", "resformer", "svformer"):
        model, held = GPT(config(mode)), []
        for model.recompute in (False, True):
            with NewMemory() as new:
                loss = model(idx[:, :-1], idx[:, 1:])[1]
                held.append(new.nbytes())
            del loss
        x, v1, head = 4 * 32 * 32 * 4, (mode != "vanilla") * 4 * 32 * 3 * 32 * 4, 61 * 32 * 4
        assert held[1] < 5 * x + v1 + 3 * x + 2 * head < 0.5 * held[0]


def test_a_block_hands_on_only_what_is_read_later():
    for mode, raw, used in (("vanilla", "", ""), ("resformer", "v", ""), ("cla2", "", "kv"), ("cross", "", "kv")):
        model, seen = tiny(mode), []
        model.blocks[0].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        model(tokens((1, 5)))
        assert seen[0][1].keys() == set(raw) and seen[0][2].keys() == set(used), mode


def test_cache_has_an_end():
    model = tiny()
    with pytest.raises(ValueError, match="holds 4 tokens"):
        model(tokens((1, 5)), cache=KVCache(model.cfg, [0] * 1, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="block_size=32"):
        model(tokens((1, 33)))


def test_attention_kinds_agree():
    idx = tokens((2, 12))
    for mode in MODES:
        same(tiny(mode)(idx)[0], tiny(mode, attn="eager")(idx)[0], mode)


@pytest.mark.parametrize("mode", COMPILED)
def test_compiled_equals_eager_without_graph_breaks(mode):
    model, idx = tiny(mode, n_layer=fewest_layers(mode)), tokens((2, 13))
    plain = model(idx[:, :-1], idx[:, 1:])[1]
    plain.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    loss = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    same(loss, plain, atol=1e-6)
    for p, grad in zip(model.parameters(), grads, strict=True):
        same(p.grad, grad, rtol=1e-5, atol=1e-7)


def test_checkpoint_of_every_mode(tmp_path):
    idx = tokens((1, 9))
    cases = [(mode, {}) for mode in MODES]
    cases += [("vanilla", dict(rope_scaling=[8, 1, 4, 8])), ("svformer", dict(arch="gpt2"))]
    for mode, kw in cases:
        model = tiny(mode, **kw).float()
        path = checkpoint.save(tmp_path, 1, model, "hash")
        again = checkpoint.load(path)
        assert again.cfg == model.cfg and torch.equal(again(idx)[0], model(idx)[0]), mode
        assert again.cfg.value_mode.name == model.cfg.value_mode.name == checkpoint.read_header(path)["mode"], mode


def ddp_worker(rank, folder):
    """Modes under DistributedDataParallel, which refuses a step after one that left a parameter unused."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", MINUTE, rank=rank, world_size=2)
    for name in COVER:
        model, idx = tiny(name), tokens((2, 13))
        whole = copy.deepcopy(model)
        whole(idx[:, :-1], idx[:, 1:])[1].backward()
        parallel, mine = torch.nn.parallel.DistributedDataParallel(model), idx[rank : rank + 1]
        for _ in range(2):
            parallel.zero_grad()
            parallel(mine[:, :-1], mine[:, 1:])[1].backward()
        for p, right in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, right.grad, rtol=1e-6, atol=1e-9, msg=name)
    torch.distributed.barrier()
    os._exit(0)  # as runtime.Distributed.close does, and says why


def test_two_ranks(tmp_path):
    ranks = torch.multiprocessing.spawn(ddp_worker, (tmp_path,), nprocs=2, join=False)
    both = [ranks.join(timeout=5 * 60) for _ in range(2)][-1]  # each waits for one of them
    for process in ranks.processes:
        process.kill()
    assert both, "a rank hangs"


# ---- reductions


def mode_of(*residuals, **kw):
    return ValueMode(tuple(residuals), **kw)


def test_reductions():
    idx = tokens((2, 12))
    for mode, other in (
        (mode_of(Residual(lam=(1.0, 0.0))), "vanilla"),
        (mode_of(Residual(lam=(1.0, 0.0), source="all")), "vanilla"),
        (mode_of(Residual(of="q", lam=(1.0, 0.0)), Residual(of="k", lam=(1.0, 0.0))), "vanilla"),
        (mode_of(Residual(of="hidden", lam=(1.0, 0.0))), "vanilla"),
        (mode_of(Residual(of="scores", lam=(1.0, 0.0))), "vanilla"),
        (mode_of(Residual(of="probs", lam=(1.0, 0.0))), "vanilla"),
        (mode_of(Residual(map="identity", lam=(1.0, 0.0))), "vanilla"),
        (get_mode("neutreno_0"), "vanilla"),
        (get_mode("resformer_lambda_0"), "vanilla"),
        (mode_of(share_v=(0, 1, 2, 3)), "vanilla"),
        (mode_of(Residual(lam=(0.0, 1.0))), "svformer"),
        (mode_of(share_v=(0,)), "svformer"),
        (mode_of(share_v="first"), "svformer"),
        (mode_of(share_v=(0, 2)), "share_v2"),
        (mode_of(Residual(of="k", lam=(0.0, 1.0))), "share_k"),
        (mode_of(Residual(of="q", lam=(0.0, 1.0))), "share_q"),
        (mode_of(Residual(of="scores", lam=(0.0, 1.0))), mode_of(share_q="first", share_k="first")),
        (mode_of(Residual(of="probs", lam=(0.0, 1.0))), mode_of(share_q="first", share_k="first")),
    ):
        same(tiny(mode)(idx)[0], tiny(other)(idx)[0], mode)


def test_learned_weights_start_where_the_row_says():
    idx = tokens((2, 12))
    neutreno = GPT(config("neutreno", init_std=0.2))(idx)[0]
    for mode, start in (
        ("denseformer", "vanilla"),
        ("denseformer_2x2", "vanilla"),
        ("resformer_dense", "vanilla"),
        ("hidden_learned", "vanilla"),
        ("resformer_denseformer", "resformer"),
        ("resformer_learned", "resformer"),
        ("resformer_lerp", "resformer"),
    ):
        a, b = (GPT(config(name, init_std=0.2))(idx)[0] for name in (mode, start))
        same(a, b, mode, atol=1e-5)
        assert (a - neutreno).abs().max() > 1e-2, mode


def test_learnable_plus_shares_its_scale_over_layers():
    """Source: the paper's v5. From equal logits each layer has L / (L - 1) of V_1; from rising ones the last most."""
    cfg = ModelConfig(vocab_size=5, n_embd=16, value_mode="resformer_plus")
    (weights,) = GPT(cfg).mixing_weights()
    assert weights[0] is None and weights[1:] == [[0.5, pytest.approx(8 / 7)]] * 7
    (deep,) = GPT(dataclasses.replace(cfg, value_mode="resformer_plus_deep")).mixing_weights()
    # PAPER: 0.01, 0.03, 0.09, 0.25, 0.69, 1.86, 5.06 for layers 2 to 8
    assert [round(w[1], 2) for w in deep[1:]] == [0.01, 0.03, 0.09, 0.25, 0.69, 1.86, 5.06]


def test_gates_start_where_their_authors_say():
    """nanochat's 3 sigmoid(0) = 1.5; x-transformers' even mix."""
    for learn, lam, start in (("sigmoid", (1.0, 3.0), 1.5), ("head", None, 0.5)):
        model = GPT(config(ValueMode((Residual(learn=learn, lam=lam),)), n_embd=64))
        _, source = model.blocks[2].attn.gates["0"](torch.randn(2, 5, 64))
        assert (source - start).abs().max() < 0.2 and source.shape == (2, 8, 5, 1), learn


def test_shared_values():
    """They are one tensor, not a copy per layer, and depend on the token alone."""
    model, idx = tiny("svformer"), tokens((1, 12))
    used = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, out: used.append(out[2]["v"]))
    model(idx)
    model(idx.flip(1))
    assert len(used) == 8 and all(v is used[0] for v in used[:4])
    same(used[0], used[4].flip(2))


# ---- initialisation and sizes


def test_modes_share_their_common_weights():
    for mode in MODES:
        other = GPT(config(mode), seed=3)
        vanilla = GPT(config("vanilla", n_kv_head=other.cfg.n_kv_head), seed=3)
        for n in range(4):
            for t in "qkv":
                w, same_name = weight(other, n, t), weight(vanilla, n, t)
                assert w is None or w.shape != same_name.shape or torch.equal(w, same_name), mode
        common = {k for k in vanilla.state_dict() if not k.endswith("proj.weight")}
        assert len(common) == 4 * 5 + 3
        assert all(torch.equal(other.state_dict()[k], vanilla.state_dict()[k]) for k in common), mode


def test_rows_that_start_as_vanilla():
    """Bit for bit, and what starts at 0 has a gradient."""
    idx, right = tokens((2, 12)), GPT(config(), seed=3)(tokens((2, 12)))[0]
    for mode in ("resformer_zero", "resformer_unit", "value_embed_shared", "xsa", "resformer_dense", "denseformer"):
        model = GPT(config(mode), seed=3)
        logits = model(idx)[0]
        assert torch.equal(logits, right), mode
        logits.square().sum().backward()
        new = [p for name, p in model.named_parameters() if name not in dict(GPT(config()).named_parameters())]
        assert new and all(p.grad.any() for p in new), mode


def test_weights_that_are_learned_for_sources_alone():
    model = GPT(config(ValueMode((Residual(source="all", learn="sources"),))))
    assert model.mixing_weights()[0][3] == pytest.approx([1 / 4] * 4) and model.mixing[0].scalars[2].shape == (3,)


def test_one_table_starts_from_0_and_others_do_not():
    model = GPT(config(ValueMode((Residual(source="token", tables="one"), Residual(source="token")))))
    assert [bool(table.weight.any()) for table in model.tables] == [False, True, True, True, True]
    each = Residual(source="token", learn="scalar", lam=(1.0, 0.0), layers=(2, 3))
    one = Residual(source="token", tables="one", layers=(0, -1))
    model = GPT(config(ValueMode((each, one))))  # tables are numbered by residual, but layer 0 reads the last one
    assert [bool(table.weight.any()) for table in model.tables] == [True, True, False]


def test_initial_values():
    model = GPT(config("value_embed", n_embd=64, vocab_size=500), seed=1)
    for name, p in model.named_parameters():
        if name.startswith("tables"):
            assert abs(p.std() * 8 - 1) < 0.05, name  # nanochat's
        elif p.ndim == 2:
            assert abs(p.std() / 0.02 - 1) < 0.05 and abs(p.mean()) < 1e-3, name
        elif "norm" in name:
            assert (p == 1).all(), name
    assert not torch.equal(model.embed.weight, GPT(model.cfg, seed=2).embed.weight)
    assert not torch.equal(weight(model, 0, "q"), weight(model, 0, "k"))


SIZES = {  # paper, Table 4: layers, heads, width, parameters
    "2m": (4, 2, 16, 1_623_856),
    "82m": (8, 8, 512, 81_901_056),
    "180m": (12, 12, 768, 179_874_048),
    "468m": (24, 16, 1024, 467_921_920),
}


def cache_sizes(L, H):
    """{mode: keys and values per token, in units of the width} where that is not 2 L: PAPER section 1, by hand."""
    half, fourth = L // 2, math.ceil(L / 4)
    return {
        "svformer": L + 1,
        "svformer_2anchors": L + 2,
        "svformer_3anchors": L + 3,
        "svformer_4anchors": L + 4,
        "share_k": L + 1,
        "share_k2": 2 * L - half,
        "share_v2": 2 * L - half,
        "cla2": 2 * math.ceil(L / 2),
        "cla4": 2 * fourth,
        "gqa2": L,
        "gqa4": L / 2,
        "gqa8": L / 4,
        "mqa": 2 * L / H,
        "mlkv": 2 * fourth / H,
        "svformer_gqa4": (L + 1) / 4,
        "cla2_gqa4": 2 * math.ceil(L / 2) / 4,
        "cla2_svformer": L - half + 1,
        "skipv1": (3 * L + 1) / 2,
        "fusedkv_lite": L,
        "share_last": L,
    }


def test_cache_of_every_mode():
    for size in ("82m", "468m"):
        n_layer, n_head, n_embd, _ = SIZES[size]
        right = cache_sizes(n_layer, n_head)
        for mode in (name for name, (_, _, source) in TABLE.items() if source):  # not rows of a user's own
            cfg = ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, value_mode=mode)
            assert value_modes.kv_floats_per_token(cfg) == right.get(mode, 2 * n_layer) * n_embd, (mode, size)


def test_sizes():
    for size, (n_layer, n_head, n_embd, right) in SIZES.items():
        cfg = ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        assert describe.count_parameters(cfg) == right, size
        d, ffn, V = n_embd, 7 * n_embd // 2, 50277
        multiply = n_layer * (4 * d * d + 3 * d * ffn) + d * V
        assert describe.flops_per_token(cfg) == 6 * multiply + 12 * n_layer * d * 2048, size


def test_sizes_of_the_papers_text():
    assert describe.count_parameters(ModelConfig(value_mode="svformer")) == 80_066_048
    gpt2 = ModelConfig(arch="gpt2")
    assert describe.count_parameters(gpt2) == 77_752_320
    d = 512  # SVFormer drops weights and bias of V in 7 of 8 layers
    assert describe.count_parameters(ModelConfig(arch="gpt2", value_mode="svformer")) == 77_752_320 - 7 * (d * d + d)


def test_groups_are_of_all_heads_at_most():
    """GQA8 of a model with 4 heads is MQA, as the paper's GQA8 is of its 82M with 8."""
    assert [ModelConfig(n_head=h, value_mode="gqa8").n_kv_head for h in (4, 8, 16)] == [1, 1, 2]


def test_attention_that_costs_more_is_counted():
    """Of the 12 L C T for attention: seven layers do it twice, or only the half that is q k^T."""
    attention = 12 * 8 * 512 * 2048
    for mode, more in (("cross", 7 / 8), ("probs", 7 / 8), ("scores", 7 / 16)):
        flops = describe.flops_per_token(ModelConfig(value_mode=mode))
        assert flops - describe.flops_per_token(ModelConfig()) == attention * more, mode


def test_gpt2_initial_values():
    """N(0, 0.02), projections into the residual stream smaller by sqrt(2 L), biases 0."""
    model = GPT(config(arch="gpt2", n_embd=128, vocab_size=500), seed=1)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (p == (1 if name.endswith("weight") else 0)).all(), name
        else:
            std = 0.02 / math.sqrt(8) if name.endswith(("out.weight", "down.weight")) else 0.02
            assert abs(p.std() / std - 1) < 0.05, name


def test_cross_attention_reads_a_cache_of_another_precision():
    model, idx = GPT(config("cross")).eval(), tokens((1, 9))
    full = model(idx)[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert (model(idx, cache=KVCache(model.cfg, [0] * 1, 9))[0] - full).abs().max() < 0.05


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", MODES)
def test_the_residual_stream_stays_float32(mode, arch):
    """Under autocast too, so that modes are compared at the same precision."""
    model, found = GPT(config(mode, arch=arch, n_layer=max(4, fewest_layers(mode)))), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: found.append(output[0].dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(tokens((1, 5)))
    assert set(found) == {torch.float32}
    found.clear()
    model.half_stream = True
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(tokens((1, 5)))
    assert set(found) == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["vanilla", "resformer", "svformer", "neutreno", "cross", "value_embed"])
def test_attention_s_output_and_gradient_are_never_copied(mode, monkeypatch):
    """The gradient has the layout of the output, and the output projection reads that layout as rows."""
    outputs, layouts, kernel = [], [], F.scaled_dot_product_attention

    def watched(*args, **kw):
        y = kernel(*args, **kw)
        y.register_hook(lambda grad: layouts.append(grad.stride() == y.stride()))
        outputs.append(y)
        return y

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model, idx = GPT(config(mode)), tokens((2, 32))
    model(idx, idx.roll(-1, 1))[1].backward()
    assert len(outputs) == len(layouts) == 4 and all(layouts)
    assert mode == "cross" or all(y.transpose(1, 2).is_contiguous() for y in outputs)


@pytest.mark.parametrize("mode", ["cross", "cross_prev", "cross_all"])
def test_attention_across_layers_takes_memory_linear_in_the_length(mode):
    """Forward and backward: no mask of T x 2T exists. Below, the largest tensor at twice the length."""

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(t.numel() for t in tree_leaves(made) if torch.is_tensor(t))])
            return made

    def largest(T):
        model, seen = GPT(config(mode, block_size=T)), Largest()
        seen.numel = 0
        with seen:
            model(tokens((1, T)), tokens((1, T)))[1].backward()
        return seen.numel

    assert largest(1024) <= 2 * largest(512)


# ---- the loss


def naive_loss(x, w, target):
    return F.cross_entropy((x @ w.T).float(), target, ignore_index=-1)


def test_chunked_loss_equals_the_naive_one():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(50, 16, generator=g), torch.randn(97, 16, generator=g)
    target = torch.randint(97, (50,), generator=g)
    target[[0, 13, 49]] = -1

    def results(loss_of, *more):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = loss_of(a, b, target, *more)
        (3 * loss).backward()  # an upstream gradient that is not 1, as accumulation and GradScaler have
        return loss, a.grad, b.grad

    for case in itertools.product(
        [1, 7, 64, 1000], [1, 8, 97, 128], [True, False]
    ):  # rows of a chunk, padding, scatter
        for ours, right in zip(results(LinearCrossEntropy.apply, *case, True), results(naive_loss), strict=True):
            same(ours, right, case, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how,pad", [("eager", 1), ("eager", 64), ("compiled", 64)])
def test_chunked_loss_under_autocast_and_scaler(dtype, how, pad):
    """Products in half precision, the loss in fp32; gradients under a loss scale of 65,536 neither clip nor vanish."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 32, generator=g), torch.randn(1009, 32, generator=g) * 0.1
    target = torch.randint(1009, (512,), generator=g)
    exact = x.clone().requires_grad_(), w.clone().requires_grad_()
    naive_loss(*exact, target).backward()
    torch.compiler.reset()

    def step(a, b):
        return LinearCrossEntropy.apply(a, b, target, 128, pad, pad == 1, True)

    step = torch.compile(step, fullgraph=True, backend="aot_eager") if how == "compiled" else step
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        loss = step(a, b)
        naive = x.clone().requires_grad_(), w.clone().requires_grad_()
        right = F.cross_entropy(F.linear(*naive).float(), target)
    (loss * 65536).backward()
    (right * 65536).backward()
    assert loss.dtype == torch.float32 and abs(loss - right) < 1e-5
    for ours, plain, best in zip((a, b), naive, exact, strict=True):
        error, its = ((t.grad / 65536 - best.grad).norm() / best.grad.norm() for t in (ours, plain))
        assert error < 1.2 * its < 0.01  # as near to the fp32 gradient as the naive path gets in this precision


def test_loss_without_gradient(monkeypatch):
    model, idx = tiny(), tokens((2, 13))
    with_grad = model(idx[:, :-1], idx[:, 1:])[1].detach()
    seen = []
    for name in ("zeros", "zeros_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **kw: seen.append(make(*a, **kw)) or seen[-1])
    with torch.no_grad():
        loss = model(idx[:, :-1], idx[:, 1:])[1]
    assert model.head.weight.shape not in [t.shape for t in seen]  # no buffer for its gradient
    same(loss, with_grad)
    logits = model(idx[:, :-1])[0]
    right = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())
    same(loss, right)


def test_loss_never_holds_all_logits(monkeypatch):
    """With a vocabulary of 2^20 the logits of 200 tokens are cut into pieces of at most 2^26 numbers."""
    model, idx = GPT(config(vocab_size=2**20, n_layer=1, n_head=1, n_embd=4)), tokens((8, 26))
    sizes, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *a: sizes.append(linear(*a).numel()) or linear(*a))
    with torch.no_grad():
        model(idx[:, :-1], idx[:, 1:])
    assert [size for size in sizes if size >= 2**20] == [50 * 2**20] * 4  # and 64 tokens would have 2^26


def test_rope_stays_in_fp32():
    """A model in half precision still turns positions exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        model = GPT(config())
        cos = model.rope.cos.clone()
        model.to(dtype)
        assert model.rope.cos.dtype == torch.float32 and torch.equal(model.rope.cos, cos)
        assert model(tokens((1, 5)))[0].dtype == dtype


def test_one_row_by_a_large_matrix_under_autocast():
    """As in validation on a single last token: the weights are fp32, x is bf16."""
    layer = Linear(512, {"a": 601}, bias=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    torch.testing.assert_close(y.float(), layer(x.float()).detach(), rtol=2e-2, atol=0.5)
