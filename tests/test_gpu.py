"""The GPU path without a GPU: devices, dtypes and what a fused kernel takes, on tensors that hold nothing."""

import sys

import pytest
import torch
import torch._dynamo  # it keeps torch's functions as they are when it is imported: not those of a patch below
import torch.nn.functional as F
from conftest import COMPILED, config, fewest_layers, in_process, refused

import train
from common import ranks, scoring
from configurator import UserError
from model import GPT, KVCache
from net.layers import attend
from sample import next_logits, sample_token


@pytest.fixture
def gpu(monkeypatch):
    """The meta device as a GPU: `is_cuda` is true there, and attention must be such that a fused kernel takes it.
    It finds CPU tensors mixed in and wrong dtypes, but no wrong numbers, and nothing of what torch.compile makes."""
    attention = F.scaled_dot_product_attention

    def checked(q, k, v, mask=None, is_causal=False, scale=None, enable_gqa=False):
        assert q.dtype == k.dtype == v.dtype and q.size(-1) == k.size(-1) == v.size(-1) and not enable_gqa
        assert mask is None or (mask.dtype == q.dtype and (mask.size(-2) == 1 or mask.stride(-2) % 8 == 0))
        assert all(t.stride(-1) == 1 for t in (q, k, v)) and (mask is None or mask.device == q.device)
        return attention(q, k, v, mask, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)


def on_gpu(mode, dtype, attn="sdpa"):
    with torch.device("meta"):
        model = GPT(config(mode, n_layer=fewest_layers(mode)), attn=attn).to(dtype)
    return model, torch.zeros(2, 5, dtype=torch.int64, device="meta")


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_mode = pytest.mark.parametrize("mode", [*COMPILED, "gqa2"])


@every_dtype
@every_mode
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_step(mode, attn, dtype, gpu):
    model, idx = on_gpu(mode, dtype, attn)
    _, loss = model(idx, idx)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.is_cuda
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {idx.device}


@every_dtype
@every_mode
@pytest.mark.parametrize("lengths", [(5, 5), (5, 2)])
def test_decoding(mode, lengths, dtype, gpu):
    model, idx = on_gpu(mode, dtype)
    with torch.inference_mode():
        cache = KVCache(model.cfg, lengths, 16, "meta", dtype)
        logits = next_logits(model, idx, cache)
        cache.is_static = lengths == (5, 2)
        logits = next_logits(model, sample_token(logits, None, temperature=0), cache)
    assert logits.is_cuda and logits.dtype == torch.float32


@every_mode
def test_continuations_of_one_prompt(mode, gpu):
    model, idx = on_gpu(mode, torch.bfloat16)
    with torch.inference_mode():
        assert model.hidden(idx, scoring.PrefixTree(idx, idx)).dtype == torch.bfloat16


def test_a_mask_from_another_device(gpu):
    """Where accelerate splits an export, the mask stays on the first one."""
    q = torch.zeros(1, 2, 3, 4, device="meta")
    assert attend(q, q, q, mask=torch.zeros(1, 1, 3, 3)).shape == q.shape


def test_before_ampere_it_is_fp16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert ranks.pick_dtype("auto", "cuda") == torch.float16
    assert ranks.weights_dtype("auto", "cuda") == torch.float32


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there(device):
    refused(in_process(train, f"--device={device}"), f"device={device}", "cannot be used here")


FLASH = [("cuda", "bfloat16", "pip install flash-attn"), ("cpu", "bfloat16", "a GPU"), ("cuda", "float32", "a GPU and")]


@pytest.mark.parametrize("kind,dtype,says", FLASH)
def test_flash_attn_that_cannot_be_used(kind, dtype, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=says):
        ranks.need_flash_attn(kind, getattr(torch, dtype))


def test_flash_leaves_fp32_to_torch(monkeypatch):
    """The package takes 16 bits only, and train.py's own samples are drawn in fp32."""
    monkeypatch.setattr("net.layers.flash_attn_func", None)
    q = torch.randn(1, 2, 3, 8)
    assert torch.equal(attend(q, q, q, "flash"), attend(q, q, q, "sdpa"))


def test_one_token_under_a_mask_for_each_head():
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.zeros(1, 4, 1, 5).masked_fill(torch.rand(1, 4, 1, 5) < 0.5, -torch.inf)
    mask[..., 0] = 0
    torch.testing.assert_close(attend(q, k, v, mask=mask), attend(q, k, v, "eager", mask=mask))


PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10": 125e12, "NVIDIA A10G": None, "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200 NVL": 835e12, "NVIDIA GB200": 2500e12, "NVIDIA H800 PCIe": 756e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA RTX 6000 Ada Generation": 364e12,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_by_name(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert ranks.peak_flops(torch.device("cuda:0"), torch.bfloat16) == PEAKS[name]
    assert ranks.peak_flops(torch.device("cuda:0"), torch.float32) is None
