"""The GPU path on an imitated GPU, see fake_cuda.py, and what a machine lacks."""

import shutil
import sys

import pytest
import torch
from conftest import in_process, refused, script

import train
from common import ranks
from configurator import UserError


def test_every_command_runs_on_a_gpu():
    if not shutil.which("g++"):
        pytest.skip("there is no C++ compiler to make an imitated GPU with")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has a real CUDA, beside which no imitated one can be registered")
    result = script("tests/fake_cuda.py", timeout=600)
    assert result.returncode == 0 and "tried, 0 kinds of failures" in result.stdout, result.stdout + result.stderr


# ---- what needs no imitation


def test_a_device_that_is_not_there():
    for device in ("cuda", "cuda:7"):
        refused(in_process(train, f"--device={device}"), f"device={device}", "cannot be used here")


def test_flash_attn_that_cannot_be_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match="pip install flash-attn"):
        ranks.need_flash_attn("cuda", torch.bfloat16)
    with pytest.raises(UserError, match="needs a GPU"):
        ranks.need_flash_attn("cpu", torch.bfloat16)


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
