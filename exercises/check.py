"""Checks of docs/exercises.md.

    python -m exercises.check 3        exercise 3, as you wrote it in exercises/answers.py
    python -m exercises.check          all eight

A check computes the right numbers once more, naively and in float64, and the numbers of typical mistakes, so it can say
which mistake gives yours. Equal means to 1e-6.
"""

import dataclasses
import math
import runpy
import sys
import traceback
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F

import analyze
from common.sizes import describe
from configurator import UserError, check_fields, run, setting
from model import GPT, KVCache
from value_modes import ModelConfig, Residual, ValueMode, kv_floats_per_token

ANSWERS = "exercises/answers.py"
B, H, T, D, V = 2, 4, 12, 8, 61  # sequences, heads, tokens, width of a head, vocabulary


class Wrong(Exception):
    """What is wrong with an answer."""


def same(a, b):
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=1e-6)


def compare(answer, right, mistakes, v_1=None, name="what it returns"):
    """Raise Wrong if a tensor is not the right one, or sends another gradient to v_1. mistakes: {what someone did: the
    numbers that it gives}."""
    if not isinstance(answer, torch.Tensor) or answer.shape != right.shape:
        found = getattr(answer, "shape", type(answer))
        raise Wrong(f"{name} is {found}; right is a tensor of shape {tuple(right.shape)}")
    if not same(answer, right):
        known = [f"this is what you get if {what}" for what, wrong in mistakes.items() if same(answer, wrong)]
        raise Wrong([*known, f"it differs from the equation by up to {(answer - right).abs().max():.2g}"][0])
    if v_1 is not None and not same(gradient(answer, v_1), gradient(right, v_1)):
        raise Wrong("the numbers are right, but V_1 lacks its gradient: detach nothing, because layer 1 learns by it")


def gradient(x, v):
    """Of the sum of x to v. Zeros where nothing of x comes from v."""
    return torch.autograd.grad(x.sum() + 0 * v.sum(), v, retain_graph=True)[0]


# -- 1 to 4: equations


def config(mode, n_layer):
    return ModelConfig(vocab_size=V, block_size=32, n_layer=n_layer, n_head=H, n_embd=H * D, value_mode=mode)


def tensors():
    """Q, K, A, V_n and V_1, and a function for A v."""
    q, k, v_n, v_1 = torch.randn(4, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = torch.zeros(B, H, T, T, dtype=q.dtype)
    for t in range(T):  # t sees keys 0 to t
        scores = torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, : t + 1]) / D**0.5
        a[:, :, t, : t + 1] = torch.softmax(scores, dim=-1)
    return q, k, a, v_n, v_1.requires_grad_(), lambda v: torch.einsum("bhts,bhsd->bhtd", a, v)


def check_1(mine):
    _, _, a, v_n, v_1, attend = tensors()
    u_n, u_1 = attend(v_n), attend(v_1)
    mistakes = {
        "the ½ is missing: U_n is twice as large": u_n + u_1,
        "the ½ stands before V_1 alone; it belongs to the sum": u_n + u_1 / 2,
        "V_1 comes in after attention; it has to go through A_n, as V_n does": (u_n + v_1) / 2,
        "V_1 comes in after attention and the ½ is missing; V_1 has to go through A_n, as V_n does": u_n + v_1,
        "V_1 comes in after attention and alone has the ½; it has to go through A_n, as V_n does": u_n + v_1 / 2,
        "V_1 replaces V_n: that is SVFormer, and ResFormer has the mean of both": u_1,
        "A_n is missing": (v_n + v_1) / 2,
        "V_1 is missing: that is vanilla": u_n,
    }
    compare(mine.resformer(a, v_n, v_1), (u_n + u_1) / 2, mistakes, v_1)


def entropies(a):
    """Entropy of token importance (B,), by loops."""
    shares = [[float(heads[:, :, s].mean()) for s in range(T)] for heads in a]
    return torch.tensor([-sum(p * math.log(p) for p in row if p) for row in shares], dtype=a.dtype)


def check_2(mine):
    q, k, a, *_ = tensors()
    right, rows, summed = entropies(a), a.mean(dim=1), a.mean(dim=1).sum(dim=1)
    ln_t = "you add up keys: rows of A sum to 1, so it is ln T, whatever attention does. Add up the queries, dim=-2"
    mistakes = {
        ln_t: torch.full_like(right, math.log(T)),
        "you average the entropies of heads; average A over heads first": sum(map(entropies, a.split(1, 1))) / H,
        "you average the entropies of rows; average the rows first": -torch.xlogy(rows, rows).sum(-1).mean(1),
        "you take the entropy of each row; average the rows first": -torch.xlogy(a, a).sum(-1).mean((1, 2)),
        "the sign is wrong: entropy is never negative": -right,
        "importance sums to T; divide it by T": -(summed * summed.log()).sum(dim=-1),
        "the logarithm has base 2; nats need the natural one": right / math.log(2),
    }
    compare(mine.entropy(a), right, mistakes)
    found = mine.entropy(F.one_hot(torch.zeros(B, H, T, dtype=torch.int64), T).double())
    if not same(found, torch.zeros_like(right)):
        raise Wrong(f"if all attend to token 0, entropy is 0, not {found[0]:.3g}; torch.xlogy knows that 0 ln 0 = 0")
    ours = analyze.measure_importance(analyze.received(q, [k], D**-0.5) / T)["entropy"]
    assert same(ours, right), "analyze.py computes the same measure"
    return f"analyze.py finds {ours[0]:.4f}, too; uniform attention would have {analyze.uniform_entropy(T):.4f}."


def check_3(mine):
    _, _, a, v_n, v_1, attend = tensors()
    mistakes = {"V_n is still there; SVFormer has none": attend(v_n + v_1) / 2, "A_n is missing": v_1}
    mistakes["it reads V_n: that is vanilla"] = attend(v_n)
    compare(mine.svformer(a, v_n, v_1), attend(v_1), mistakes, v_1)
    full, half = (2 * T * kv_floats_per_token(config(mode, 6)) for mode in ("vanilla", "svformer"))
    one = 2 * T * H * D  # the keys or the values of a layer
    assert (full, half) == (2 * 6 * one, (6 + 1) * one), "the plan counts what the equations need"
    mistakes = {
        (full, 6 * one): "V_1 is not counted, and one layer has to store it",
        (full // 2, half): "vanilla's values are not counted",
        (half, full): "vanilla's number comes first",
        (full // T, half // T): "that is for one token",
        (full // 2, half // 2): "these are numbers, and each takes 2 bytes",
        (full // H, half // H): "that is for one head",
    }
    found = mine.cache_bytes(6, H, D, T, 2)
    if not isinstance(found, tuple):
        raise Wrong(f"cache_bytes returns {found!r:.30}; return two numbers, vanilla's and SVFormer's")
    if found != (full, half):
        why = mistakes.get(found, "count the keys and the values that each layer has to store")
        raise Wrong(f"cache_bytes(6, {H}, {D}, {T}, 2) is not {found}: {why}")


def check_4(mine):
    _, _, a, v_n, v_1, attend = tensors()
    u = attend(v_n)
    mistakes = {
        "the difference goes through A_n; add it after attention": u + 0.4 * attend(v_1 - v_n),
        "V_n is not subtracted": u + 0.4 * v_1,
        "you subtract A_n V_n; subtract V_n itself": u + 0.4 * (v_1 - u),
        "the difference has the wrong sign": u - 0.4 * (v_1 - v_n),
    }
    if same(mine.neutreno(a, v_n, v_1, 0.7), mine.neutreno(a, v_n, v_1, 0.4)):
        raise Wrong("λ changes nothing; use `lam`")
    answer = mine.neutreno(a, v_n, v_1, 0.4)
    compare(answer, u + 0.4 * (v_1 - v_n), mistakes, v_1)
    here, through = (gradient(x[0, 0, 3], v_1)[0, 0].any(dim=-1).nonzero().flatten() for x in (answer, attend(v_1)))
    return f"By its gradients, token 3 reads V_1 of tokens {here.tolist()}, in ResFormer of {through.tolist()}."


# -- 5 to 7: modes as data


def compare_plans(mode, right):
    """Raise Wrong where a mode's plan differs from that of the right mode, in models of 6 and of 4 layers."""
    if not isinstance(mode, ValueMode):
        raise Wrong(f"it returns {mode!r:.30}…; return ValueMode((Residual(…),)), where the comma makes a tuple")
    for n_layer in (6, 4):
        try:
            plans = [describe(config(m, n_layer)).splitlines()[1:] for m in (mode, right)]
        except UserError as e:
            raise Wrong(f"in a model of {n_layer} layers {e}") from None
        for found, due in zip(*plans, strict=False):
            if found != due:
                line, right_line = (" ".join(x.split()) for x in (found, due))
                where = f"in a model of {n_layer} layers, counted from 0"
                raise Wrong(f"{where}, your plan says `{line}`; right is `{right_line}`")


def n_learned(mode):
    """How many numbers the residuals of a mode learn, in 6 layers."""
    return sum(p.numel() for p in GPT(config(mode, 6)).mixing.parameters())


def check_5(mine):
    if isinstance(mine.last_two(), ValueMode) and 0 < (n := n_learned(mine.last_two())) < 4:
        raise Wrong(f"two layers learn an a and a b each, 4 numbers in all; yours learns {n}")
    compare_plans(mine.last_two(), ValueMode((Residual(lam=(1.0, 2.0), learn="scalar", layers="-2:"),)))


def check_6(mine):
    compare_plans(mine.pairs(), ValueMode((Residual(),), share_k="every 2", share_v="every 2"))


def starts_as_vanilla(model):
    idx, vanilla = torch.arange(T)[None], GPT(config("vanilla", model.cfg.n_layer))
    if not torch.equal(model(idx)[0], vanilla(idx)[0]):
        raise Wrong("a new model does not equal vanilla: at the start V_1's weight must be 0, and the layer's own 1")


def check_7(mine):
    model, idx = GPT(config(mine.learned_neutreno(), 6)), torch.arange(T)[None]
    starts_as_vanilla(model)
    model(idx, idx)[1].backward()
    found = [float(p.grad.abs().max()) for p in model.mixing.parameters()]
    if not found or not all(found):
        raise Wrong("a new model equals vanilla and stays so, because no gradient moves a weight. See `learn`")
    if (n := n_learned(mine.learned_neutreno())) > 5:
        raise Wrong(f"5 layers learn a λ each; yours learns {n} numbers, the layers' own weights among them")
    compare_plans(mine.learned_neutreno(), ValueMode((Residual(map="delta", lam=(1.0, 0.0), learn="sources"),)))
    return f"The gradients of λ = 0 are up to {max(found):.2g}, because V_1 − V_n is not 0."


# -- 8: beyond the axes


def train(model):
    """The first and the last loss of 80 steps, on sequences in which each token follows from the last but one."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0), []
    starts = torch.randint(V, (80, 16, 1, 2), generator=torch.Generator().manual_seed(0))
    for x in (starts + 7 * torch.arange(12)[:, None]).flatten(2) % V:  # (16, 24) each: a b a+7 b+7 a+14 …
        optimizer.zero_grad()
        loss = model(x[:, 1:-1], x[:, 2:])[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def with_previous_token(cfg, previous_token):
    """The GPT of a ModelConfig with a reader's PreviousToken in each layer above 0."""
    mode = ValueMode((Residual(lam=(1.0, 1.0)),))  # attention then uses V_n + projected[0]["v"]
    model = GPT(dataclasses.replace(cfg, value_mode=mode))
    model.blocks[0].keep_used.add("v")  # then used[0]["v"] is V_1 of all tokens so far, those in the cache too
    for block in model.blocks[1:]:
        block.attn = previous_token(block.attn, cfg.n_head)
    return model


def check_8(mine):
    # one layer, around an attention that returns what it gets as layer 0's values. Parameters become 1, 2, 3, 4
    layer = mine.PreviousToken(lambda x, angles, weights, projected, *_: (projected[0]["v"], {}, {}), H)
    for p in layer.double().parameters():
        p.data = torch.arange(1, p.numel() + 1).view_as(p).double()
    v_1, g, no_token = tensors()[4], torch.arange(1, H + 1)[:, None, None], torch.zeros(B, H, 1, D)
    right = g * torch.cat((no_token, v_1[:, :, :-1]), dim=2)
    cache = "you take projected[0], which has the new tokens alone; used[0] has those in the cache, too"
    for n in (T, 2):  # all tokens, and 2 new ones after those in a cache
        new = v_1[:, :, -n:]
        mistakes = {
            "V_1 itself is still there; your g V_1[t - 1] has to replace it": new + right[:, :, -n:],
            "V_1 is not shifted: a token gets its own": g * new,
            "V_1 is shifted the wrong way: a token sees the next": g * torch.cat((new[:, :, 1:], no_token), dim=2),
            "V_1 goes round, as in torch.roll: token 0 sees the last": g * v_1.roll(1, 2)[:, :, -n:],
            "all heads have one g": right[:, :, -n:] / g,
            "g is no nn.Parameter, so nothing can learn it": 0 * new,
            cache: g * torch.cat((no_token, new[:, :, :-1]), dim=2),
            "you take the first tokens of `used`; the new ones are its last x.size(1)": right[:, :, :n],
        }
        x, projected = torch.zeros(B, n, H * D, dtype=v_1.dtype), {0: {"v": new}}
        found = layer(x, None, None, projected, {0: {"v": v_1}})
        if projected[0]["v"] is not new:
            raise Wrong("you change `projected` itself, and later layers read it; hand attention a copy")
        if not isinstance(found, tuple) or len(found) != 3:
            raise Wrong("forward has to return what attention returns, three things")
        compare(found[0], right[:, :, -n:], mistakes, v_1, f"projected[0]['v'] for {n} new tokens, the last of {T},")
    cfg = config("vanilla", 3)
    model = with_previous_token(cfg, mine.PreviousToken)
    starts_as_vanilla(model)
    # the model learns, and decodes with the cache that vanilla has
    (first, last), (_, vanilla_last) = train(model), train(GPT(cfg))
    if last > vanilla_last / 2:
        raise Wrong(f"in 80 steps its loss falls from {first:.2f} to {last:.2f} only, vanilla's to {vanilla_last:.2f}")
    model, idx, cache = model.double(), torch.arange(T).expand(B, T), KVCache(cfg, [0] * B, T, dtype=torch.float64)
    pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 5), (5, 6), (6, T))]
    if not same(torch.cat(pieces, dim=1), model(idx)[0]):
        raise Wrong("with a KV cache the logits differ: hand `cache` on, and take the last tokens of `used`")
    task = "sequences in which each token follows from the last but one"
    return f"On {task} its loss is {last:.2f} after 80 steps, vanilla's {vanilla_last:.2f}."


TOP = "the code at the top of README.md"
EXERCISES = {  # the check, what its reader has built, and where to look
    "1": (check_1, "ResFormer (Eq 7), the mode `resformer`", TOP),
    "2": (check_2, "the paper's measure of attention concentration (Eq 11)", "measure_importance in analyze.py"),
    "3": (check_3, "SVFormer (Eq 10), the mode `svformer`", f"{TOP}, and stored_tensors in value_modes.py"),
    "4": (check_4, "NeuTRENO (Eq 8; Nguyen et al., NeurIPS 2023), the mode `neutreno`", TOP),
    "5": (
        check_5,
        "the paper's Sparse and Learnable (v5), as `resformer_sparse` and `resformer_learned`, in one mode",
        "class Residual in value_modes.py",
    ),
    "6": (check_6, "CLA (Brandon et al. 2024) with ResFormer in it", "class ValueMode in value_modes.py"),
    "7": (check_7, "NeuTRENO with the start of `resformer_zero`", "class Residual in value_modes.py"),
    "8": (check_8, "RWKV's token shift (arXiv 2305.13048) for V_1", "Attention.forward in model.py"),
}


def verdict(number, mine):
    """(whether it is right, the sentences that we print)"""
    check, built, place = EXERCISES[number]
    try:
        note = check(mine)
    except NotImplementedError:
        return False, f"exercise {number}: nothing there yet"
    except (Wrong, UserError) as e:
        return False, f"exercise {number}: not yet: {e}. Look at {place}"
    except (Exception, SystemExit) as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == mine.__file__]
        where = f"your line {lines[-1]} ends with" if lines else "the check cannot use your answer,"
        return False, f"exercise {number}: not yet: {where} {type(e).__name__}: {e}"
    return True, f"exercise {number}: right. You have built {built}. {note or ''}".rstrip()


@dataclass(frozen=True)
class ExercisesConfig:
    """Settings of the checks."""

    exercise: Literal["all", "1", "2", "3", "4", "5", "6", "7", "8"] = setting("all", "its number", positional=True)
    file: str = setting(ANSWERS, "the Python file of your answers")

    def __post_init__(self):
        check_fields(self)


def main(cfg: ExercisesConfig):
    try:
        mine = SimpleNamespace(**runpy.run_path(cfg.file))
    except (Exception, SystemExit) as e:
        raise UserError(f"{cfg.file}: {type(e).__name__}: {e}") from None
    all_right = True
    for number in EXERCISES if cfg.exercise == "all" else [cfg.exercise]:
        is_right, sentences = verdict(number, mine)
        print(sentences, flush=True)
        all_right &= is_right
    sys.exit(0 if all_right else 1)


if __name__ == "__main__":
    run(main, __doc__)
