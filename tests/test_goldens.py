"""Equality with numbers that the authors' own code computed (../shared/goldens, see its README)."""

import numpy as np
import pytest
import torch
from conftest import SHARED, needs_shared

from hf import hf_parts, load_hf
from layers import DepthAverage
from train import adamw, learning_rate

pytestmark = needs_shared
MODES = ["vanilla", "resformer", "svformer", "neutreno", "neutreno_resformer"]


def golden(mode):
    folder = SHARED / "goldens" / mode
    return load_hf(folder), np.load(folder / "expected.npz")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_logits_loss_and_gradients(mode, attn):
    model, expected = golden(mode)
    for block in model.blocks:
        block.attn.kernel = attn
    tokens = torch.from_numpy(expected["tokens"])
    torch.testing.assert_close(model(tokens)[0].detach().numpy(), expected["logits"], rtol=0, atol=1e-5)
    loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    assert abs(loss.item() - expected["loss"]) < 1e-5
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert abs(norm.item() / expected["grad_norm"] - 1) < 1e-4
    ours = {name: p.grad[rows].numpy() for name, p, rows in hf_parts(model)}
    names = [key.removeprefix("grad/") for key in expected.files if key.startswith("grad/")]
    assert len(names) >= 4 * 3 + 2  # v_proj in one layer at least, o_proj and norms in all four, and the last norm
    for name in names:
        right = expected[f"grad/{name}"]
        assert np.linalg.norm(ours[name] - right) < 1e-4 * np.linalg.norm(right), name


@pytest.mark.parametrize("mode", MODES)
def test_thirty_steps_of_adamw(mode):
    model, expected = golden(mode)
    model.train()
    optimizer = adamw(model, lr=6e-3, weight_decay=0.1, betas=(0.9, 0.95), device_type="cpu")
    for step, tokens in enumerate(torch.from_numpy(expected["train_tokens"]).long()):
        lr = learning_rate(step, peak=6e-3, end=6e-4, warmup=int(expected["warmup"]), steps=30)
        assert abs(lr - expected["train_lrs"][step]) < 1e-9
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert abs(loss.item() - expected["train_losses"][step]) < 1e-4, step
        assert abs(norm.item() / expected["train_grad_norms"][step] - 1) < 1e-3, step


@pytest.mark.parametrize("dilation,period", [(1, 1), (2, 1), (1, 2)])
def test_depth_average(dilation, period):
    expected = np.load(SHARED / "goldens" / "denseformer" / f"dilation{dilation}_period{period}.npz")
    W, n = torch.from_numpy(expected["W"]), len(expected["W"])
    dwa = DepthAverage(n, dilation, period).to(W.dtype)
    with torch.no_grad():
        for alpha, i in zip(dwa.alphas, range(period, n + 1, period), strict=True):
            alpha.copy_(torch.from_numpy(expected[f"alpha/{i}"]))
    y = torch.from_numpy(expected["x0"])
    xs = [y]
    for i in range(1, n + 1):
        xs.append(y + torch.tanh(y @ W[i - 1]))
        y = dwa(i, xs)
        # both are fp32: processors differ in the last bit of a product, and nine blocks carry it on
        torch.testing.assert_close(xs[-1].detach().numpy(), expected["block_out"][i - 1], rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(y.detach().numpy(), expected["y"][i - 1], rtol=1e-6, atol=5e-6)
