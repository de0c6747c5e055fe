"""minimal.py computes what model.py does, and runs as its first lines say."""

import contextlib
import io
import re
import runpy
import sys
import textwrap

import pytest
import torch
from conftest import ROOT, script, tokens

import minimal
from model import GPT
from value_modes import ModelConfig, kv_floats_per_token

SHAPE = {"vocab_size": 50, "block_size": 24, "n_layer": 4, "n_head": 2, "n_embd": 32}
X, Y = (tokens((2, 24), vocab=50, seed=seed) for seed in (0, 1))


@pytest.fixture(params=minimal.MODES)
def two(request):
    """minimal.py's model of a mode, and model.py's with the same weights."""
    small = minimal.GPT(minimal.Config(**SHAPE, value_mode=request.param))
    big = GPT(ModelConfig(**SHAPE, value_mode=request.param))
    with torch.no_grad():
        for p in small.parameters():
            p.add_(0.2 * torch.randn_like(p))  # the first ones are so small that no attention would matter
    big.load_state_dict(as_in_model_py(small.state_dict()))
    return small, big


def as_in_model_py(weights):
    """Tensors under minimal.py's names -> under model.py's, where q, k, v and gate, up are one matrix each."""
    fused, found = {"q": "attn.proj", "k": "attn.proj", "v": "attn.proj", "gate": "mlp.up", "up": "mlp.up"}, {}
    for name, tensor in weights.items():
        path, _, what = name.removesuffix(".weight").rpartition(".")
        block = path.removesuffix(".attn")
        if what in fused:
            found.setdefault(f"{block}.{fused[what]}.weight", []).append(tensor)
        else:
            found[name.replace(".down.", ".mlp.down.")] = [tensor]
    return {name: torch.cat(parts) for name, parts in found.items()}


def test_loss_and_gradients_are_those_of_model_py(two):
    small, big = two
    losses = [model(X, Y)[1] for model in (small, big)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    grads = as_in_model_py({name: p.grad for name, p in small.named_parameters()})
    for name, p in big.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, atol=1e-5, rtol=1e-4)


def test_cached_decoding_equals_the_whole_text(two):
    small, big = two
    cache = {}
    parts = [small(part, cache=cache)[0] for part in X.split([10] + 14 * [1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), small(X)[0], atol=1e-5, rtol=1e-5)
    assert sum(t.numel() for t in cache.values()) == 2 * 24 * kv_floats_per_token(big.cfg)


def test_modes_start_from_the_same_weights():
    models = [minimal.GPT(minimal.Config(value_mode=mode)).state_dict() for mode in minimal.MODES]
    for weights in models[1:]:
        assert all(torch.equal(weights[name], models[0][name]) for name in weights)


def test_readme_shows_its_lines():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "v_1" in block)
    assert textwrap.indent(shown, 8 * " ") in (ROOT / "minimal.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_it_trains_both_modes_and_writes(tmp_path):
    text = tmp_path / "input.txt"
    text.write_text("the cat sat on the mat. " * 200)
    result = script("minimal.py", text, "--max_steps=12", "--value_mode=svformer")
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"vanilla (\S+)   svformer (\S+)", result.stdout)
    assert [float(loss) < 2 for loss in losses[-1]] == [True, True] and "svformer writes: t" in result.stdout


def refusal(*words):
    """The sentence with which minimal.py refuses its words, in this process, which has torch already."""
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(err), pytest.raises(SystemExit, match="2"):
        patch.setattr(sys, "argv", ["minimal.py", *map(str, words)])
        runpy.run_path(str(ROOT / "minimal.py"), run_name="__main__")
    return err.getvalue()


@pytest.mark.parametrize("text, says", [
    (b"too short", "has 9 characters; it needs 2560 or more"),
    (b"\xff" * 3000, "as UTF-8 text"),
    (None, "cannot read"),
])  # fmt: skip
def test_a_text_that_is_none(text, says, tmp_path):
    if text is not None:
        (tmp_path / "input.txt").write_bytes(text)
    assert says in refusal(tmp_path / "input.txt")


@pytest.mark.parametrize("flag", ["--learning_rate=nan", "--learning_rate=1", "--max_steps=0", "--seed=-1"])
def test_a_number_out_of_range(flag):
    assert "max_steps must be at least 1" in refusal("input.txt", flag)
