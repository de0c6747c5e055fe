"""examples/vit.py: equations, all modes, shared weights, runs, bad input."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import in_process, refused

from examples import vit
from value_modes import VALUE_MODES


def small(mode, **shape):
    """A float64 ViT with large random weights, so that nothing hides in rounding or at its initial value."""
    model = vit.ViT(vit.model_config(mode, **shape)).double().eval()
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def pixels(n=2):
    return torch.rand(n, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1


def naive(image, w, mode):
    """The logits of one image (8, 8), written from the paper's equations. w: a state dict."""

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(dim=-1, keepdim=True)
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    corners = [image[top : top + 2, left : left + 2].reshape(-1) for top in (0, 2, 4, 6) for left in (0, 2, 4, 6)]
    x = torch.stack([w["class_token.weight"][0], *(linear(patch, "patches") for patch in corners)])
    x, v_1 = x + w["positions.weight"], None
    for n in range(3):
        of_head = [t.split(4, dim=1) for t in linear(norm(x, f"blocks.{n}.norm1"), f"blocks.{n}.attn.proj").split(8, 1)]
        v_1 = v_1 or of_head[2]
        heads = []
        for h in range(2):
            A = torch.softmax(of_head[0][h] @ of_head[1][h].T / math.sqrt(4), dim=1)  # no mask
            V = v_1[h] if mode == "svformer" else of_head[2][h]
            if mode == "resformer" and n > 0:
                V = V / 2 + v_1[h] / 2
            heads.append(A @ V + (0.4 * (v_1[h] - V) if mode == "neutreno" else 0))
        x = x + linear(torch.cat(heads, dim=1), f"blocks.{n}.attn.out")
        z = linear(norm(x, f"blocks.{n}.norm2"), f"blocks.{n}.mlp.up")
        x = x + linear(z * (1 + torch.erf(z / math.sqrt(2))) / 2, f"blocks.{n}.mlp.down")
    return linear(norm(x, "norm")[0], "head")


@pytest.mark.parametrize("mode", vit.MODES)
def test_equations(mode):
    model, images = small(mode, n_layer=3, n_head=2, n_embd=8), pixels()
    expected = torch.stack([naive(image, model.state_dict(), mode) for image in images])
    assert expected.std() > 0.1
    torch.testing.assert_close(model(images).detach(), expected, rtol=0, atol=1e-10)


LOOK_UP = {name for name, mode in VALUE_MODES.items() if any(r.source == "token" for r in mode.residuals)}


@pytest.mark.parametrize("mode", sorted(VALUE_MODES.keys() - LOOK_UP))
def test_tokens_read_all_tokens(mode):
    images = pixels().requires_grad_()
    small(mode, n_layer=8, n_head=4, n_embd=16)(images)[0].sum().backward()
    assert (images.grad[0] != 0).all() and not images.grad[1].any()


def train(mode, seed, epochs=2):
    """The record of a run on 24 images that are lighter above or below, by class."""
    labels = torch.arange(24) % 2
    images = pixels(24).float() / 4
    images[labels == 0, :4] += 0.7
    images[labels == 1, 4:] += 0.7
    splits = (images, labels), (images, 1 - labels)  # what it learns is wrong in the test
    return vit.train_and_test(mode, seed, epochs, splits, SimpleNamespace(update=lambda n: None))


def test_it_learns_and_the_seed_decides():
    record = train("svformer", 0, epochs=25)
    assert (record["train_accuracy"], record["accuracy"]) == (100, 0)
    assert record["train_loss"] < math.log(2) < record["loss"]
    assert train("resformer", 3) == train("resformer", 3) != train("resformer", 4)


def test_the_table_compares_with_the_first_mode():
    numbers = {"loss": 1.5, "train_loss": 1.0, "accuracy": 90.0, "parameters": 7}
    runs = [numbers | {"value_mode": mode, "loss": loss} for mode, loss in (("vanilla", 1.5), ("svformer", 1.25))]
    assert "| svformer | 90.00 | +0.00 | 1.2500 | -0.2500 | 1.0000 | +0.0000 | 7 |" in vit.table(
        runs, ("vanilla", "svformer")
    )


def test_digits(tmp_path, monkeypatch):
    pytest.importorskip("sklearn.datasets")
    monkeypatch.setattr(vit, "SHAPE", vit.SHAPE | dict(n_layer=2, n_head=2, n_embd=8))
    (images, labels), (_, held_out) = vit.read_digits()
    assert images.shape == (1437, 8, 8) and images.min() == -1 and images.max() == 1 and len(held_out) == 360
    result = in_process(vit, "--epochs=1", "--seeds=1,2", "--value_mode=vanilla,svformer", cwd=tmp_path)
    assert result.returncode == 0 and "nothing about ImageNet" in result.stdout, result.stderr
    runs = json.loads((tmp_path / "out/vit.json").read_text())["runs"]
    assert [(r["value_mode"], r["seed"]) for r in runs] == [(m, s) for s in (1, 2) for m in ("vanilla", "svformer")]


def test_a_mode_that_reads_token_ids_is_refused():
    refused(in_process(vit, "--value_mode=value_embed"), "images have none")
