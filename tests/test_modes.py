"""What holds in every mode, and the facts about some. test_equations.py says that each mode computes its equation.

`every_mode` and `every_width` hand a test all modes of conftest.MODES, so a row added to the table is tested without
another line. Slow tests take a cover set: a few modes that together have every value of every axis.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import json
import math
import re
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    COMPILED,
    COVER,
    MODES,
    SHARED,
    Largest,
    config,
    fewest_layers,
    in_process,
    needs_shared,
    refused,
    same,
    tiny,
    tokens,
    widths,
)
from torch import nn
from torch.utils._pytree import tree_leaves

import value_modes
from common import checkpoint, sizes
from common.data import Corpus
from common.ranks import only_process
from common.scoring import PrefixTree, Request, rows_of, score
from configurator import UserError
from hf.layout import hf_parts, load_hf
from model import GPT, KVCache, join_scores, weighted_sum
from net.layers import DepthAverage
from net.loss import LinearCrossEntropy
from sample import generate
from train import TrainConfig, adamw, learning_rate, validate
from value_modes import TABLE, VALUE_MODES, ModelConfig, Residual, ValueMode, get_mode, mode_with, plan_layers

every_mode = pytest.mark.parametrize("mode", MODES)
every_width = pytest.mark.parametrize("mode,n_kv_head", widths(*MODES))


def loss_of(model, idx):
    return model(idx[:, :-1], idx[:, 1:])[1]


def parts(model, tensor_of):
    """{"name part": tensor_of(parameter)}, the fused products taken apart."""
    found = {}
    for name, p in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        rows = getattr(module, "parts", {"": len(p)})
        pieces = tensor_of(p).detach().clone().split(list(rows.values()))
        found |= {f"{name} {part}": piece for part, piece in zip(rows, pieces, strict=True)}
    return found


def gradients(model, idx):
    model.zero_grad()
    loss_of(model, idx).backward()
    return parts(getattr(model, "_orig_mod", model), lambda p: p.grad)  # of what torch.compile wraps


# ---- every mode


@pytest.mark.parametrize("mode", COVER)
def test_recompute_gives_the_same_gradient(mode):
    model, idx = tiny(mode), tokens((2, 13))
    plain = gradients(model, idx)
    model.recompute = True
    same(gradients(model, idx), plain, atol=0)


@every_mode
def test_every_parameter_learns_from_its_start(mode):
    """Some start where a factor is 0: after one step all of them learn."""
    model, idx = GPT(config(mode)), tokens((4, 13))
    at_first = gradients(model, idx)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    for name, grad in gradients(model, idx).items():
        assert (at_first[name].abs() + grad.abs()).max() > 0, name


@every_width
def test_cached_decoding_equals_the_full_forward(mode, n_kv_head):
    model, idx = tiny(mode, n_kv_head=n_kv_head), tokens((2, 11))
    cuts = [0, 5, 6, 7, 11]  # a prompt, single tokens, and a piece behind a filled cache
    cache = KVCache(model.cfg, [0] * 2, 16, dtype=torch.float64)
    pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in itertools.pairwise(cuts)]
    same(torch.cat(pieces, 1), model(idx)[0])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", COVER)
def test_continuations_in_one_row_equal_each_alone(mode, attn):
    """A row with a prefix of 5 tokens and two continuations, as evaluation scores it. Alone they take sdpa: the kinds
    of attention agree, too."""
    model, plain, idx = tiny(mode, attn=attn), tiny(mode), tokens((1, 10))
    positions, branches = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6], [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]])[:, None]
    together = model.hidden(idx, PrefixTree(positions, branches))[0]
    for alone in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9]):
        same(together[alone], plain.hidden(idx[:, alone])[0])


@every_mode
def test_weights_of_equal_name_and_shape_are_vanillas(mode):
    model = GPT(config(mode), seed=3)
    vanilla = GPT(config(n_kv_head=model.cfg.n_kv_head), seed=3)
    ours, right = (parts(of, lambda p: p) for of in (model, vanilla))
    common = [name for name in ours if name in right and ours[name].shape == right[name].shape]
    assert len(common) >= 4 * 7 + 3  # in each layer o, gate, up, down, two norms, and one of q, k, v at least
    assert all(torch.equal(ours[name], right[name]) for name in common)


@pytest.fixture(scope="module")
def corpus(data_dir):
    return Corpus(data_dir, 32)


@every_mode
def test_the_plan_shows_the_weights_that_an_evaluation_records(mode, corpus):
    """Neither may fail in any mode: the first evaluation comes after hours of training."""
    model, cfg = GPT(config(mode, vocab_size=257)), TrainConfig(eval_tokens=32, block_size=32, batch_tokens=32)
    evaluation = validate(model, corpus, cfg, only_process("cpu"), contextlib.nullcontext, is_sharded=False)
    record = json.loads(json.dumps(evaluation, allow_nan=False))
    assert ("lam" in record) == any(r.learn != "fixed" and not r.is_gated for r in model.cfg.value_mode.residuals)
    layers = re.findall("^layer.*", sizes.describe(model.cfg), re.M)
    for weights in record.get("lam", []):
        for line, of_layer in zip(layers, weights, strict=True):
            assert all(f" {sizes.in_short(weight)} " in line for weight in of_layer or ())


MORE_SHAPES = [("vanilla", dict(rope_scaling=[8, 1, 4, 8])), ("svformer", dict(arch="gpt2"))]


@pytest.mark.parametrize("mode,kw", [*((mode, {}) for mode in MODES), *MORE_SHAPES])
def test_a_checkpoint_gives_the_model_back(mode, kw, tmp_path):
    model, idx = tiny(mode, **kw).float(), tokens((1, 9))
    path = checkpoint.save(tmp_path, 1, model, "hash")
    again = checkpoint.load(path)
    assert again.cfg == model.cfg and torch.equal(again(idx)[0], model(idx)[0])
    assert again.cfg.value_mode.name == model.cfg.value_mode.name == checkpoint.read_header(path)["mode"]


@pytest.mark.parametrize("mode,arch", [*((mode, "llama") for mode in MODES), ("everything", "gpt2")])
def test_the_residual_stream_stays_in_fp32(mode, arch):
    """Under autocast too, so that modes are compared at the same precision. The backward takes its dtypes as well."""
    model, found = GPT(config(mode, arch=arch)), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: found.append(output[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens((1, 5)))
    loss.backward()
    assert found == [torch.float32] * 4 and loss.isfinite()


@pytest.mark.parametrize("mode", COMPILED)
def test_compiles_without_a_graph_break(mode):
    model, idx = tiny(mode, n_layer=fewest_layers(mode)), tokens((2, 13))
    plain, right = loss_of(model, idx), gradients(model, idx)
    torch.compiler.reset()
    # AOTAutograd, which traces the backward too, takes most of the time: for one mode
    backend = "aot_eager" if mode == "everything" else "eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    same(loss_of(compiled, idx), plain, atol=1e-6)
    same(gradients(compiled, idx), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode,arch", [*((mode, "llama") for mode in COMPILED), ("every_place", "gpt2")])
def test_one_graph_serves_every_length(mode, arch):
    model = tiny(mode, arch=arch, n_layer=fewest_layers(mode))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (13, 7, 20):
            idx = tokens((2, length))
            same(compiled(idx)[0], model(idx)[0])


class Adapted(nn.Module):
    """What peft and quantizers put in the place of a linear layer or an embedding: it has none of a layer's attributes,
    and computes something else. Here it adds what a second layer makes of the same input."""

    def __init__(self, layer, added):
        super().__init__()
        self.layer = layer
        self.added = added

    def forward(self, x):
        return self.layer(x) + self.added(x)


@pytest.mark.parametrize("mode,arch", [*((mode, "llama") for mode in MODES), ("everything", "gpt2")])
def test_layers_may_be_replaced(mode, arch):
    """Whatever the model is used for, the result is that of a model with the sums in its weights."""
    model, right, idx = tiny(mode, arch=arch), tiny(mode, arch=arch), tokens((2, 9))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            added = copy.deepcopy(layer)
            for p, sums in zip(added.parameters(), right.get_submodule(name).parameters(), strict=True):
                p.data = 0.1 * p.data.flip(0)
                sums.data += p.data
            model.set_submodule(name, Adapted(layer, added))

    def results(model):
        targets = idx.masked_fill(idx < 5, -100)  # some are ignored
        ids, cache, _ = generate(model, [[1, 2, 3], [4]], 8, temperature=0)
        scored = list(score(model, rows_of([[Request([5, 6, 7, 8], 2), Request([5, 6, 9], 1)]]), 64))
        found = {"logits": model(idx)[0], "loss": model(idx, targets)[1], "cache": cache.tensors}
        return found | {"ids": ids, "log p": [log_p for _, log_p, _ in scored], "weights": sizes.mixing_weights(model)}

    same(results(model), results(right))


def test_a_replaced_head_has_no_loss_where_all_targets_are_ignored():
    """As ours: 0, and no NaN."""
    model, idx = tiny(), tokens((2, 9))
    ours = model(idx, torch.full_like(idx, -100))[1]
    model.head = Adapted(model.head, copy.deepcopy(model.head))
    assert model(idx, torch.full_like(idx, -100))[1] == ours == 0


# ---- memory


class NewMemory:
    """Counts the bytes behind the tensors that were made since, and are alive."""

    def __enter__(self):
        gc.freeze()  # what there is already is not looked at again
        return self

    def __exit__(self, *_):
        gc.unfreeze()

    def nbytes(self):
        gc.collect()
        storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@every_mode
def test_decoding_takes_the_bytes_that_the_plan_says(mode):
    """All memory that outlives the decoding of a token is the cache's."""
    model, idx = GPT(config(mode)).bfloat16().eval(), tokens((3, 6))
    with torch.no_grad(), NewMemory() as new:
        cache = KVCache(model.cfg, [0] * 3, 10, dtype=torch.bfloat16)
        for i in range(6):
            model(idx[:, i : i + 1], cache=cache)
        positions = 8 * (3 + 2)  # the padding of each row, and where the next token goes
        assert new.nbytes() - positions == cache.nbytes == 3 * 10 * 2 * value_modes.kv_floats_per_token(model.cfg)
    for stored in cache.tensors.values():  # and it was used
        assert stored[:, :, :6].abs().amax(dim=(1, 3)).min() > 0


@pytest.mark.parametrize("mode", ["vanilla", "resformer", "svformer"])
def test_recompute_keeps_less(mode):
    """Between forward and backward only the inputs of the blocks are alive, and V_1 where it is read later."""
    model, idx, held = GPT(config(mode)), tokens((4, 33)), []
    for model.recompute in (False, True):
        with NewMemory() as new:
            loss = loss_of(model, idx)
            held.append(new.nbytes())
        del loss
    x, v1, head = 4 * 32 * 32 * 4, (mode != "vanilla") * 4 * 32 * 3 * 32 * 4, 61 * 32 * 4
    assert held[1] < 5 * x + v1 + 3 * x + 2 * head < 0.5 * held[0]


def test_a_loss_that_is_dropped_frees_its_graph():
    """Without a backward too. A dict that checkpoint keeps and a later layer fills would close a cycle through
    autograd's own graph, which not even the garbage collector can free."""
    model, made = GPT(config("resformer_dense"), recompute=True), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: made.extend(map(weakref.ref, tree_leaves(out))))
    loss = loss_of(model, tokens((2, 13)))
    assert all(ref() is not None for ref in made) and len(made) == 4 + 3  # x of each block, and three layers' values
    del loss
    gc.collect()
    assert all(ref() is None for ref in made)


@pytest.mark.parametrize("mode", ["cross", "cross_all"])
def test_attention_across_layers_takes_memory_linear_in_the_length(mode):
    """Forward and backward: no mask of T x 2T exists. We compare the largest tensor with that at half the length."""

    def largest(T):
        model = GPT(config(mode, block_size=T, n_layer=2))
        with Largest() as seen:
            model(tokens((1, T)), tokens((1, T)))[1].backward()
        return seen.numel

    assert largest(1024) <= 2 * largest(512)


# ---- the authors' numbers: ../shared/goldens, computed by their code


GOLDEN = ["vanilla", "resformer", "svformer", "neutreno", "neutreno_resformer"]


def golden(mode):
    """(the authors' model, what their code computed of it). Its config.json has their name of the mode."""
    folder = SHARED / "goldens" / mode
    return load_hf(folder), np.load(folder / "expected.npz")


@needs_shared
@pytest.mark.parametrize("mode", GOLDEN)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_logits_loss_and_gradients_are_the_authors(mode, attn):
    model, expected = golden(mode)
    for block in model.blocks:
        block.attn.kernel = attn
    idx = torch.from_numpy(expected["tokens"])
    np.testing.assert_allclose(model(idx)[0].detach().numpy(), expected["logits"], rtol=0, atol=1e-5)
    loss = loss_of(model, idx)
    assert abs(loss.item() - expected["loss"]) < 1e-5
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert abs(norm.item() / expected["grad_norm"] - 1) < 1e-4
    ours = {name: p.grad[rows].numpy() for name, p, rows in hf_parts(model)}
    names = [key.removeprefix("grad/") for key in expected.files if key.startswith("grad/")]
    assert len(names) >= 4 * 3 + 2  # v_proj in one layer at least, o_proj and norms in all four, and the last norm
    for name in names:
        right = expected[f"grad/{name}"]
        assert np.linalg.norm(ours[name] - right) < 1e-4 * np.linalg.norm(right), name


@needs_shared
@pytest.mark.parametrize("mode", GOLDEN)
def test_thirty_steps_of_adamw_are_the_authors(mode):
    model, expected = golden(mode)
    model.train()
    optimizer = adamw(model, lr=6e-3, weight_decay=0.1, betas=(0.9, 0.95), device_type="cpu")
    for step, idx in enumerate(torch.from_numpy(expected["train_tokens"]).long()):
        lr = learning_rate(step, peak=6e-3, end=6e-4, warmup=int(expected["warmup"]), steps=30)
        assert abs(lr - expected["train_lrs"][step]) < 1e-9
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(model, idx)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert abs(loss.item() - expected["train_losses"][step]) < 1e-4, step
        assert abs(norm.item() / expected["train_grad_norms"][step] - 1) < 1e-3, step


@needs_shared
@pytest.mark.parametrize("dilation,period", [(1, 1), (2, 1), (1, 2)])
def test_depth_average_is_the_authors(dilation, period):
    expected = np.load(SHARED / "goldens" / "denseformer" / f"dilation{dilation}_period{period}.npz")
    W, n = torch.from_numpy(expected["W"]), len(expected["W"])
    average = DepthAverage(n, dilation, period).to(W.dtype)
    for alpha, i in zip(average.alphas, range(period, n + 1, period), strict=True):
        alpha.data.copy_(torch.from_numpy(expected[f"alpha/{i}"]))
    y = torch.from_numpy(expected["x0"])
    xs = [y]
    for i in range(1, n + 1):
        xs.append(y + torch.tanh(y @ W[i - 1]))
        y = average(i, xs)
        # both are fp32: processors differ in the last bit of a product, and nine blocks carry it on
        np.testing.assert_allclose(xs[-1].detach().numpy(), expected["block_out"][i - 1], rtol=1e-6, atol=5e-6)
        np.testing.assert_allclose(y.detach().numpy(), expected["y"][i - 1], rtol=1e-6, atol=5e-6)


# ---- formulas, reductions, and what weights start from


STARTS = {
    "vanilla": "resformer_zero resformer_unit value_embed_shared resformer_dense hidden_learned denseformer "
    "denseformer_2x2",
    "resformer": "resformer_denseformer resformer_learned resformer_lerp",
}


@pytest.mark.parametrize("mode,other", [(mode, other) for other in STARTS for mode in STARTS[other].split()])
def test_learned_weights_start_as_another_mode(mode, other):
    ours, right = (GPT(config(name, init_std=0.2))(tokens((2, 12)))[0] for name in (mode, other))
    assert torch.equal(ours, right)


def test_learnable_plus_shares_its_scale_over_layers():
    """Source: the paper's v5. From equal logits each layer has L / (L - 1) of V_1; from rising ones the last most."""
    cfg = ModelConfig(vocab_size=5, n_embd=16, value_mode="resformer_plus")
    (weights,) = sizes.mixing_weights(GPT(cfg))
    assert weights[0] is None and weights[1:] == [[0.5, pytest.approx(8 / 7)]] * 7
    (deep,) = sizes.mixing_weights(GPT(dataclasses.replace(cfg, value_mode="resformer_plus_deep")))
    # PAPER: 0.01, 0.03, 0.09, 0.25, 0.69, 1.86, 5.06 for layers 2 to 8
    assert [round(w[1], 2) for w in deep[1:]] == [0.01, 0.03, 0.09, 0.25, 0.69, 1.86, 5.06]


OF_HEADS = torch.tensor([0.25, -0.5])[:, None, None]  # a weight for each of two heads: (G, 1, 1)


def test_people_read_all_numbers_of_a_weight_or_their_range():
    model = GPT(config("resformer", n_layer=2))
    model.mixing[0].starts = {1: (1.0, OF_HEADS)}
    assert sizes.mixing_weights(model) == [[None, [1.0, [0.25, -0.5]]]]
    (mix,) = plan_layers(model.cfg)[1].mixes
    assert sizes.describe_mix(mix, (1.0, OF_HEADS), "own") == "v: 1 own + -0.5 to 0.25 layer 0"


def test_a_weight_of_several_numbers_leaves_the_precision_as_it_is():
    """In bf16, where it would turn values into fp32 ones: they take twice the memory, and kernels want one dtype."""
    v = torch.ones(3, 2, 4, 5).bfloat16()  # (B, G, T, D)
    same(weighted_sum((1.0, OF_HEADS), v, [v]), (1 + OF_HEADS).bfloat16().expand_as(v))
    q, _ = join_scores(v, v, (1.0, OF_HEADS), [{"q": v, "k": v}])
    same(q, torch.cat([v, OF_HEADS.bfloat16().expand_as(v)], dim=-1))


@pytest.mark.parametrize("learn,lam,start,spread", [("sigmoid", (1.0, 3.0), 1.5, 0.0), ("head", None, 0.5, 0.2)])
def test_gates_start_where_their_authors_say(learn, lam, start, spread):
    """nanochat's 3 sigmoid(0) = 1.5 for every token; x-transformers' even mix, about."""
    model = GPT(config(mode_with(learn=learn, lam=lam), n_embd=64))
    _, source = model.blocks[2].attn.gates["0"](torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)))
    assert (source - start).abs().max() <= spread and source.shape == (2, 8, 5, 1)


def test_one_table_starts_from_0_and_others_do_not():
    each = Residual(source="token", learn="scalar", lam=(1.0, 0.0), layers=(2, 3))
    one = Residual(source="token", tables="one", layers=(0, -1))
    model = GPT(config(ValueMode((each, one))))  # tables are numbered by residual, but layer 0 reads the last one
    assert [bool(table.weight.any()) for table in model.tables] == [True, True, False]


@pytest.mark.parametrize("arch,scaled", [("llama", None), ("gpt2", None), ("llama", True), ("gpt2", False)])
def test_initial_values(arch, scaled):
    """N(0, 0.02), norms 1, biases 0. Token tables have nanochat's spread, GPT-2's projections into the stream less."""
    cfg = config("value_embed", arch=arch, scaled_init=scaled, n_embd=128, vocab_size=500)
    model = GPT(cfg, seed=1)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (p == (1 if name.endswith("weight") else 0)).all(), name
        elif p.ndim == 2:
            small = (scaled or (scaled is None and arch == "gpt2")) and name.endswith(("out.weight", "down.weight"))
            std = 128**-0.5 if name.startswith("tables") else 0.02 / math.sqrt(8) if small else 0.02
            assert abs(p.std() / std - 1) < 0.05 and abs(p.mean()) < std / 20, name
    assert not torch.equal(model.embed.weight, GPT(cfg, seed=2).embed.weight)
    q, k, _ = model.blocks[0].attn.proj.weight.chunk(3)
    assert not torch.equal(q, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_stays_in_fp32(dtype):
    """A model in half precision still turns positions exactly."""
    model = GPT(config())
    cos = model.rope.cos.clone()
    model.to(dtype)
    assert model.rope.cos.dtype == torch.float32 and torch.equal(model.rope.cos, cos)
    assert model(tokens((1, 5)))[0].dtype == dtype


# ---- the loss


def loss_inputs(n, width, vocab, spread=1):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, width, generator=g), torch.randn(vocab, width, generator=g) * spread, tokens((n,), vocab)


def naive_loss(x, w, target):
    return F.cross_entropy((x @ w.T).float(), target, ignore_index=-1)


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("multiple", [1, 97, 128])
@pytest.mark.parametrize("scatter", [True, False])
def test_chunked_loss_equals_the_naive_one(rows, multiple, scatter):
    x, w, target = loss_inputs(50, 16, 97)
    target[[0, 13, 49]] = -1

    def results(loss_of, *more):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = loss_of(a, b, target, *more)
        (3 * loss).backward()  # an upstream gradient that is not 1, as accumulation and GradScaler have
        return loss, a.grad, b.grad

    same(results(LinearCrossEntropy.apply, rows, multiple, scatter, True), results(naive_loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype,is_compiled", [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)])
def test_chunked_loss_under_autocast_and_scaler(dtype, is_compiled):
    """Products in half precision, the loss in fp32; gradients under a loss scale of 65,536 neither clip nor vanish."""
    x, w, target = loss_inputs(512, 32, 1009, spread=0.1)
    ours, plain, exact = ((x.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(3))
    naive_loss(*exact, target).backward()

    def step(a, b):
        return LinearCrossEntropy.apply(a, b, target, 128, 64, not is_compiled, True)

    if is_compiled:
        torch.compiler.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype):
        loss, right = step(*ours), F.cross_entropy(F.linear(*plain).float(), target)
    (loss * 65536).backward()
    (right * 65536).backward()
    assert loss.dtype == torch.float32 and abs(loss - right) < 1e-5
    for a, b, best in zip(ours, plain, exact, strict=True):
        error, its = ((t.grad / 65536 - best.grad).norm() / best.grad.norm() for t in (a, b))
        assert error < 1.2 * its < 0.01  # as near to the fp32 gradient as the naive path gets in this precision


def test_loss_never_holds_all_logits(monkeypatch):
    """The logits of 200 tokens are cut into even pieces of at most so many numbers."""
    model, idx, sizes, linear = GPT(config()), tokens((8, 26)), [], F.linear

    def watched(*args):
        sizes.append(linear(*args).shape)
        return linear(*args)

    monkeypatch.setattr(F, "linear", watched)
    monkeypatch.setattr("net.loss.MOST_LOGITS", 2**12)
    loss_of(model, idx)
    assert [size[0] for size in sizes if size[-1] == 61] == [67, 67, 66]  # 68 rows would be too many


# ---- sizes


SIZES = {  # paper, Table 4: layers, heads, width, parameters
    "2m": (4, 2, 16, 1_623_856),
    "82m": (8, 8, 512, 81_901_056),
    "180m": (12, 12, 768, 179_874_048),
    "468m": (24, 16, 1024, 467_921_920),
}


def shape(size, **kw):
    n_layer, n_head, n_embd, _ = SIZES[size]
    return ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, **kw)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_and_flops_of_the_papers_sizes(size):
    cfg = shape(size)
    assert sizes.count_parameters(cfg) == SIZES[size][-1]
    d, ffn, V = cfg.n_embd, 7 * cfg.n_embd // 2, 50277
    multiply = cfg.n_layer * (4 * d * d + 3 * d * ffn) + d * V
    assert sizes.flops_per_token(cfg) == 6 * multiply + 12 * cfg.n_layer * d * 2048


@pytest.mark.parametrize("mode,more", [("cross", 7 / 8), ("probs", 7 / 8), ("scores", 7 / 16)])
def test_attention_that_costs_more_is_counted(mode, more):
    """Of the 12 L C T for attention: seven layers do it twice, or only the half that is q k^T."""
    flops = sizes.flops_per_token(ModelConfig(value_mode=mode)) - sizes.flops_per_token(ModelConfig())
    assert flops == 12 * 8 * 512 * 2048 * more


def cache_sizes(L, H):
    """{mode: keys and values per token, in units of the width} where that is not 2 L: PAPER section 1, by hand."""
    half, fourth = L // 2, math.ceil(L / 4)
    of_sizes = {
        "svformer share_k": L + 1,
        "svformer_2anchors": L + 2,
        "svformer_3anchors": L + 3,
        "svformer_4anchors": L + 4,
        "share_k2 share_v2": 2 * L - half,
        "cla2": 2 * math.ceil(L / 2),
        "cla4": 2 * fourth,
        "gqa2 fusedkv_lite share_last": L,
        "gqa4": L / 2,
        "gqa8": L / 4,
        "mqa": 2 * L / H,
        "mlkv": 2 * fourth / H,
        "svformer_gqa4": (L + 1) / 4,
        "cla2_gqa4": 2 * math.ceil(L / 2) / 4,
        "cla2_svformer": L - half + 1,
        "skipv1": (3 * L + 1) / 2,
    }
    return {mode: size for modes, size in of_sizes.items() for mode in modes.split()}


@pytest.mark.parametrize("mode", [name for name, (_, _, source) in TABLE.items() if source])  # not rows of a user's own
def test_cache_has_the_papers_size(mode):
    for cfg in (shape("82m", value_mode=mode), shape("468m", value_mode=mode)):
        right = cache_sizes(cfg.n_layer, cfg.n_head).get(mode, 2 * cfg.n_layer)
        assert value_modes.kv_floats_per_token(cfg) == right * cfg.n_embd


def test_groups_are_of_all_heads_at_most():
    """GQA8 of a model with 4 heads is MQA, as the paper's GQA8 is of its 82M with 8."""
    assert [ModelConfig(n_head=h, value_mode="gqa8").n_kv_head for h in (4, 8, 16)] == [1, 1, 2]


# ---- modes as data: names and plans


NAMED = "resformer_lambda_0.2 resformer_lambda_5 neutreno_0.6 resformer_neutreno_0.4 identity_0.5 resformer_sparse_2 "
NAMED += "resformer_lambda_1e-05 resformer_lambda_1e16 resformer_lambda_-0.5 neutreno_0.123456789"


@pytest.mark.parametrize("name", [*VALUE_MODES, *NAMED.split()])
def test_names_lead_to_modes_and_back(name):
    assert get_mode(name).name == name and get_mode(dataclasses.replace(get_mode(name))).name == name


def test_a_number_behind_a_name_is_the_weight_of_the_sources():
    assert get_mode("resformer_lambda_0.2").residuals == (Residual(lam=(1.0, 0.2)),)
    assert get_mode("resformer_neutreno_0.4").residuals == (Residual(), Residual(map="delta", lam=(1.0, 0.4)))
    assert get_mode("resformer_lambda_0.50").name == "resformer_lambda_0.5"
    assert get_mode("resformer_lambda_2.0").name == "resformer_lambda"
    assert get_mode("neutreno_resformer").name == "resformer_neutreno"  # the authors' name
    two = ValueMode((Residual(lam=(1.0, 0.5)), Residual(map="delta", lam=(1.0, 0.2))))
    assert [r.lam for r in two.with_lam(0.9).residuals] == [(1.0, 0.5), (1.0, 0.9)]  # the last


def test_a_mode_has_the_name_that_its_user_gave(monkeypatch):
    row = mode_with(lam=(1.0, 2.0))
    mine = dataclasses.replace(row, name="somebodys")
    assert ModelConfig(value_mode=mine).value_mode.name == "somebodys"
    assert ModelConfig(value_mode=row).value_mode.name == "resformer_lambda"
    assert mine == get_mode("resformer_lambda")  # the name says nothing of what it computes
    one, other = (get_mode(mode_with(lam=(0.7, x))).name for x in (0.3, 0.4))
    assert one != other and one.startswith("custom_")  # two models of a user's own are not seeds of one
    monkeypatch.setitem(value_modes.VALUE_MODES, "somebodys", mine)  # a row that equals another one keeps its name
    assert ModelConfig(value_mode="somebodys").value_mode.name == "somebodys"


PICKED = {"-3:": [5, 6, 7], "::-2": [1, 3, 5, 7], "2:4": [2, 3], "0.5:": [4, 5, 6, 7], ":0.5": [0, 1, 2, 3]}
PICKED |= {(0, 0.375, 0.5, -1): [0, 3, 4, 7], (3, 1, 1): [1, 3]}


@pytest.mark.parametrize("spec", PICKED)
def test_layers_are_picked(spec):
    assert value_modes.pick_layers(spec, 8) == PICKED[spec]


HALF = dict(share_k="lower half", share_v="lower half", borrow_v="first")
SOURCES = [  # what the last residual reads in each of 4 layers. Those that share what is read count once
    (ValueMode((Residual(source="all"),), share_v=(0, 2, 3)), [(), (), (0,), (0, 2)]),
    (ValueMode((Residual(source="all"), Residual(source="prev")), share_v=(0, 2, 3)), [(), (), (0,), (2,)]),
    (ValueMode((Residual(of="probs", source="all"),), share_q="every 2", share_k="every 2"), [(), (), (0,), ()]),
    (ValueMode((Residual(map="cross", source="all"),), share_k="every 2", share_v="every 2"), [(), (), (0,), ()]),
    (ValueMode((Residual(map="cross"),), share_k="every 2"), [(), (0,), (0,), (0,)]),  # all own values
    (ValueMode((Residual(map="cross"),), **HALF), [(), (0,), (), ()]),  # though nobody else reads k of 1 and v of 0
]


@pytest.mark.parametrize("mode,right", SOURCES)
def test_what_each_layer_reads(mode, right):
    last = len(mode.residuals) - 1
    found = [{mix.index: mix.sources for mix in layer.mixes} for layer in plan_layers(config(mode))]
    assert [sources.get(last, ()) for sources in found] == right


# ---- what is refused


IMPOSSIBLE = [  # what makes it, and the sentence; test_bad_input.py's modes find more
    (lambda: Residual(source=-1), "source=-1 must be a layer's number"),
    (lambda: Residual(of="k", source="token"), "a token table has only values"),
    (lambda: Residual(source="token", map="cross"), "map not 'cross'"),
    (lambda: Residual(tables="mirror"), "is only for source='token'"),
    (lambda: Residual(subtract="projected"), "is only for map='delta'"),
    (lambda: Residual(map="cross", lam=(1.0, 1.0)), "leave out lam and learn"),
    (lambda: Residual(source="all", learn="softmax"), "but 'all' is many"),
    (lambda: Residual(learn="head", lam=(1.0, 1.0)), "lam must be None"),
    (lambda: Residual(learn="lerp", lam=(5.0, 0.3)), "must sum to 1"),
    (lambda: ValueMode(share_v=(1, 2)), "begin with 0"),
    (lambda: ValueMode(values="keys", share_k="every 2"), "values='keys' needs share_k"),
    (lambda: ValueMode((Residual(),), heads_from_layer_0=0.5), "heads_from_layer_0 divides value heads"),
    (lambda: ValueMode((Residual(map="cross"), Residual(of="scores"))), "use one of them"),
    (lambda: ValueMode(borrow_v="first"), "share_v='each' borrows nothing"),
    (lambda: ValueMode(name="a/b"), "use letters, digits"),
    (lambda: config("resfromer"), "did you mean 'resformer'"),
    (lambda: config(n_embd=24), "RoPE needs an even width"),
    (lambda: config(n_embd=30), "n_embd=30"),
    (lambda: config(n_kv_head=3), "n_kv_head=3"),
    (lambda: config("gqa4", n_kv_head=4), "value_mode makes it 2"),
    (lambda: config(ValueMode(kv_group=3)), "n_head=8 is not a multiple"),
    (lambda: config("skipv1", n_kv_head=1), "heads_from_layer_0=0.5 of 1 value heads"),
    (lambda: config(ValueMode(heads_from_layer_0=1.0)), "must be a whole number, and not all"),
    (lambda: config(arch="gpt2", rope_scaling=(8.0, 1.0, 4.0, 32.0)), "gpt2 learns its positions"),
    (lambda: config(arch="gpt2", rope_theta=1e5), "gpt2 has no angles"),
    (lambda: config(rope_scaling=(8.0, 4.0, 4.0, 32.0)), "low < high"),
    (lambda: config(ValueMode(dense=(1, 9))), "its period is above n_layer=4"),
    (lambda: config(ValueMode(share_v=(0, 7))), "only 0..3"),
    (lambda: config(mode_with(source=4)), "only 0..3"),
    (lambda: config(mode_with(layers=(0,))), "acts in no layer"),
    (lambda: config(ValueMode((Residual(layers=(3,)),), share_v="every 2")), "acts in no layer"),
    (lambda: config(ValueMode(share_q="first", share_k="first", share_v="first")), "layer 1 would own none"),
]


@pytest.mark.parametrize("make,says", IMPOSSIBLE, ids=[says for _, says in IMPOSSIBLE])
def test_impossible_models_are_refused(make, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


@pytest.mark.parametrize("field", ["learn", "map", "of", "share_q", "share_v"])
def test_a_value_that_nothing_computes_names_the_places_to_edit(field):
    """As when somebody adds a new one to its Literal, and to nothing else: no model trains without it in silence."""
    residual = Residual()
    mode = ValueMode((residual,), name="somebodys")
    object.__setattr__(residual if hasattr(residual, field) else mode, field, "new")
    with pytest.raises(AssertionError, match=f"{field}='new'.*add it to"):
        GPT(config(mode))(tokens((1, 5)))


# ---- what `python model.py` prints


PRINTED = {
    "svformer": "layer  3  q own         k own         v of layer 0\n",
    "value_embed_gated": "v: 1 own + 3 table 0, learn=sigmoid\n",
    "neutreno": "v: 1 own + 0.4 layer 0, map=delta\n",
    "resformer_plus": "v: 0.5 own + 1.333 layer 0, learn=softmax\n",
    "skipv1": "heads_from_layer_0 = 0.5\n",
}


@pytest.mark.parametrize("mode", PRINTED)
def test_the_plan_says_what_a_mode_does(mode):
    assert PRINTED[mode] in sizes.describe(config(mode))


def test_a_second_residual_works_on_what_the_first_made():
    two = ValueMode((Residual(source=0, layers="2:"), Residual(source=1, layers="2:")))
    assert "  v: 0.5 own + 0.5 layer 0  v: 0.5 of the mix + 0.5 layer 1\n" in sizes.describe(config(two))


def test_the_table_has_all_modes():
    printed = in_process(sizes, "table", "--n_layer=8").stdout
    assert [row.split("`")[1] for row in printed.splitlines()[2:]] == list(TABLE)


def test_the_table_leaves_out_rows_that_do_not_fit():
    assert "| `value_embed_gated2` |" not in sizes.mode_table(config(n_layer=2))


def test_a_mode_is_printed_by_its_name():
    by_name, by_flag = (in_process(sizes, word, "--n_layer=4") for word in ("svformer", "--value_mode=svformer"))
    assert by_name.returncode == 0 and by_name.stdout == by_flag.stdout


@pytest.mark.parametrize("words,says", [
    (["svformer", "--value_mode=cla2"], "svformer and value_mode both say what to print"),
    (["table", "--value_mode=cla2"], "table and value_mode both say what to print"),
    (["table", "--n_kv_head=2"], "leave out n_kv_head"),
])  # fmt: skip
def test_a_word_that_would_change_nothing_is_refused(words, says):
    refused(in_process(sizes, *words), says)


def test_records_from_before_the_field_output_went():
    """Checkpoints of then are read, if their mode is one of those that we still have."""
    cfg = config("resformer_plus_deep")
    fields = dataclasses.asdict(cfg)
    fields["value_mode"]["output"] = "plain"
    fields["value_mode"]["residuals"] = [vars(cfg.value_mode.residuals[0]) | {"lam": [0.5, 1.0]}]
    del fields["value_mode"]["residuals"][0]["slope"]
    assert ModelConfig.of_record(fields) == cfg
    fields["value_mode"]["output"] = "gate"
    with pytest.raises(UserError, match="value_mode takes"):
        ModelConfig.of_record(fields)


@pytest.mark.parametrize("name", ["svformer_2", "resformer", "neutreno_0.5"])
def test_a_name_that_means_another_mode(name):
    """Also where the row takes no number."""
    with pytest.raises(UserError, match="reads as a mode of the table"):
        config(ValueMode((Residual(source=1),), name=name))
