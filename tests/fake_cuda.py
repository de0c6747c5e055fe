"""The GPU path without a GPU: models train and decode on tensors that say "cuda" and hold nothing.

    python tests/fake_cuda.py        what tests/test_gpu.py runs: modes that together take every branch

torch's FakeTensorMode checks devices, dtypes and shapes as a GPU would. A torch without CUDA has no autograd for that
device, so a few lines of C++ register a CUDA that does nothing. They must be loaded before torch, hence this process.

What it finds: CPU tensors mixed in, wrong dtypes under autocast, branches on `is_cuda`, reads of a result that make a
GPU wait, calls of scaled_dot_product_attention that no fused kernel takes, a device without an index.
What it cannot find: wrong numbers, memory, speed, what torch.compile makes.
"""

import ctypes
import subprocess
import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CPP = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device cuda0(DeviceType::CUDA, 0);
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return cuda0; }
  Device getDevice() const override { return cuda0; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, cuda0); }
  Stream getDefaultStream(Device) const override { return getStream(cuda0); }
  Stream getNewStream(Device, int) const override { return getStream(cuda0); }
  Stream exchangeStream(Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
struct CUDAHooks final : at::CUDAHooksInterface {  // the registry looks for this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
namespace { impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard()); }
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
"""


def build(folder):
    """The shared library with a CUDA that does nothing, for the torch of this Python."""
    torch = Path(find_spec("torch").origin).parent
    source, library = Path(folder, "fake_cuda.cpp"), Path(folder, "fake_cuda.so")
    source.write_text(CPP)
    words = f"g++ -std=c++20 -O0 -w -shared -fPIC -I{torch}/include {source} -o {library}"
    words += f" -L{torch}/lib -Wl,-rpath,{torch}/lib -lc10 -ltorch_cpu"
    subprocess.run(words.split(), check=True)
    return library


def load():
    """torch with the library, loaded before it, and with what Python asks of a CUDA device: an H100."""
    with tempfile.TemporaryDirectory() as folder:
        ctypes.CDLL(str(build(folder)))
    import torch
    import torch.cuda.amp.common

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9)
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.pin_memory = lambda self: self
    torch._C._cuda_setDevice = lambda index: None
    real_tensor = torch.tensor  # which allocates on the device past FakeTensorMode
    torch.tensor = lambda data, device=None, **kw: real_tensor(data, **kw).to(device or "cpu")
    return torch


tried, failed = [], {}  # every case, and {what happened: cases}: one fault does not hide the next


def attempt(key, function, *args):
    tried.append(key)
    try:
        function(*args)
    except Exception as e:
        ours = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).parent in (ROOT, ROOT / "common")]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
        failed.setdefault(f"{where} {type(e).__name__}: {str(e)[:200]}", []).append(key)


def watch_attention():
    """Every call of scaled_dot_product_attention must be one that a fused kernel of CUDA takes without cuDNN."""
    real = F.scaled_dot_product_attention

    def checked(q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        half = q.dtype in (torch.float16, torch.bfloat16)
        assert q.dtype == k.dtype == v.dtype, f"attention of {q.dtype}, {k.dtype}, {v.dtype}"
        assert q.size(-1) == k.size(-1) == v.size(-1), "fused kernels take one width of heads"
        assert half or not enable_gqa, "in fp32 no fused kernel takes groups"
        assert mask is None or mask.dtype == q.dtype, f"a mask of {mask.dtype} for {q.dtype}"
        assert mask is None or not enable_gqa, "no kernel but cuDNN's takes groups and a mask"
        assert mask is None or mask.stride(-2) % 8 == 0 or mask.size(-2) == 1, "rows of a mask are not aligned"
        assert all(t.stride(-1) == 1 for t in (q, k, v)), "the last dimension is not contiguous"
        return real(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    F.scaled_dot_product_attention = checked


def configs():
    """(key, ModelConfig, dtype): each mode in one of five ways, and vanilla in all."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    ways = [("llama", 0, bf16), ("llama", 1, bf16), ("gpt2", 0, bf16), ("llama", 0, fp16), ("llama", 4, fp32)]
    for i, mode in enumerate(COMPILED):
        for arch, n, dtype in ways if mode == "vanilla" else [ways[i % 5]]:
            n_kv_head = n if fits(mode, n_kv_head=n) else 0
            cfg = config(mode, arch=arch, n_kv_head=n_kv_head, n_layer=fewest_layers(mode))
            yield (mode, arch, n_kv_head, str(dtype)), cfg, dtype


def new_model(cfg, dtype=None, **settings):
    """A GPT on the GPU. (FakeTensorMode cannot do all of Module.to.)"""
    model = GPT(cfg, init=False, **settings)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(p, dtype=dtype, device="cuda"))
        for name, tensor in module._buffers.items():  # Rope's, which stay fp32
            module._buffers[name] = torch.empty_like(tensor, device="cuda")
    return model


def new_world(device):
    with patch.object(torch.Tensor, "item", lambda self: 0.0):
        return ranks.Distributed(device, fixed_lengths=True)


# ---- cases


def case_imitation():
    """It refuses what a GPU or a fused kernel refuses; else the other cases would prove nothing."""
    gpu, attention = torch.zeros(1, 1, 8, 8, device="cuda:0"), F.scaled_dot_product_attention
    pytest.raises(RuntimeError, lambda: gpu + torch.zeros(8))
    pytest.raises(AssertionError, lambda: attention(gpu, gpu, gpu.half()))
    pytest.raises(AssertionError, lambda: attention(gpu.half(), gpu.half(), gpu.half(), gpu))
    pytest.raises(ValueError, lambda: torch.cuda.set_device("cuda"))


def case_device():
    """What `Distributed` makes of --device, as train.py and every other command does first, and what hangs on it."""

    def make(device):
        world = new_world(device)
        assert world.kind == "cuda" and world.device.index == 0, world.device
        assert ranks.peak_flops(world.device, torch.bfloat16) == 989e12
        assert ranks.pick_dtype("auto", "cuda") == ranks.weights_dtype("auto", "cuda") == torch.bfloat16

    def before_ampere():
        q = torch.empty(1, 4, 2, 8, dtype=torch.float16, device="cuda")
        assert layers.takes_groups(q, None)
        with patch.object(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(major=7)):
            assert not layers.takes_groups(q, None)
        with patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False):
            assert ranks.pick_dtype("auto", "cuda") == torch.float16
            assert ranks.weights_dtype("auto", "cuda") == torch.float32

    for device in ("auto", "cuda", "cuda:0"):
        attempt(device, make, device)
    attempt("before Ampere", before_ampere)


def case_train():
    """train.py's own step. A GPU waits for its results once after the optimizer was launched, in fp16 once more for the
    loss scale, and never before."""
    events = []

    def seen(name, answer=None):
        real = getattr(torch.Tensor, name)

        def read(self, *args, **kw):
            if self.device.type == "cuda":
                events.append("sync")
            return answer(self) if answer else real(self, *args, **kw)

        return patch.object(torch.Tensor, name, read)

    def step(shape, dtype, attn, **settings):
        """One step of train.train, with stand-ins for the data, the files and the moves to the GPU."""
        shared = {name: getattr(shape, name) for name in vars(shape).keys() & TrainConfig.__dataclass_fields__}
        how = dict(eval_every=2, save_every=2, max_steps=1, warmup_steps=0, compile=False, attn=attn) | settings
        how |= dict(batch_tokens=4 * shape.block_size, micro_batch=2, dtype=str(dtype).removeprefix("torch."))
        cfg = TrainConfig(**shared, **how)
        zeros = np.zeros((2, shape.block_size), np.int64)
        corpus = SimpleNamespace(batch=lambda *rows: (zeros, zeros), tokenizer=SimpleNamespace(n_vocab=61, hash=""))
        models, nothing = [], SimpleNamespace(step=lambda record: None, evaluation=lambda *of: None, close=lambda: None)

        def made(shape, seed, attn, **how):
            models.append(new_model(shape, attn=attn, **how))
            models[0].to = lambda device: None
            return models[0]

        def adamw(*of, real=train.adamw):
            optimizer = real(*of)
            optimizer.register_step_post_hook(lambda *of: events.append("launched"))
            return optimizer

        stand_ins = dict(Corpus=lambda *of: corpus, GPT=made, adamw=adamw, start=lambda *of: nothing)
        stand_ins |= dict(validate=lambda *of: {"val_mean": 1.0}, checkpoint_to_resume=lambda cfg: None)
        stand_ins |= dict(Stop=lambda: SimpleNamespace(asked=False), settings_of=lambda *of: ({}, ""))
        stand_ins |= dict(checkpoint=SimpleNamespace(save=lambda *of: None))
        events.clear()
        with patch.multiple(train, **stand_ins), seen("__bool__", lambda t: True), seen("cpu"):
            with seen("item", lambda t: 1.0), seen("tolist", lambda t: [1.0] * t.numel()):
                train.train(cfg, WORLD)
        assert events == ["launched", "sync"] + ["sync"] * (dtype == torch.float16), events
        for name, p in models[0].named_parameters():
            assert p.grad is None or (p.grad.is_cuda and p.grad.dtype == torch.float32), name

    WORLD = new_world("cuda:0")
    WORLD.to_device = lambda arrays: [torch.zeros(a.shape, dtype=torch.int64, device="cuda") for a in arrays]
    for key, cfg, dtype in configs():
        attempt(key, step, cfg, dtype, "sdpa")
        if dtype == torch.float16:
            attempt((*key, "eager"), step, cfg, dtype, "eager")
            attempt((*key, "recompute"), lambda *of: step(*of, "sdpa", recompute=True), cfg, dtype)
            attempt((*key, "stream"), lambda *of: step(*of, "sdpa", half_stream=True), cfg, dtype)


def case_decode():
    """Prompts of one length and of several, then two tokens, greedy and drawn; and eval.py's rows of continuations."""

    @torch.inference_mode()
    def decode(cfg, dtype, lengths, static):
        model = new_model(cfg, dtype).eval()
        cache = model_file.KVCache(cfg, lengths, 16, "cuda", dtype)
        prompts = torch.ones(len(lengths), max(lengths), dtype=torch.int64, device="cuda")
        logits = sample.next_logits(model, prompts, cache)
        cache.is_static = static
        for how in ({"temperature": 0}, {"top_k": 3}):
            assert logits.dtype == torch.float32 and logits.is_cuda
            token = sample.sample_token(logits, None, **how)
            assert token.shape == (len(lengths), 1)
            logits = sample.next_logits(model, token, cache)

    @torch.inference_mode()
    def branches(cfg, dtype):
        positions, of = (torch.tensor([row]).to("cuda") for row in ([0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 1, 2]))
        x = new_model(cfg, dtype).eval().hidden(torch.zeros_like(of), scoring.PrefixTree(positions, of))
        assert x.is_cuda and x.dtype == dtype

    for key, cfg, dtype in configs():
        attempt((*key, "branches"), branches, cfg, dtype)
        for lengths, static in (((5, 5), False), ((5, 2), True)):
            attempt((*key, lengths, static), decode, cfg, dtype, lengths, static)


if __name__ == "__main__":
    torch = load()
    sys.path[:0] = [str(ROOT), str(HERE)]
    import numpy as np
    import pytest
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    import model as model_file
    import sample
    import train
    from common import layers, ranks, scoring
    from model import GPT
    from train import TrainConfig

    watch_attention()  # conftest comes after our own files, for it sets the path
    from conftest import COMPILED, config, fewest_layers, fits

    mode = FakeTensorMode()
    mode.may_turn_const = lambda tensor: False  # it would compute with small constants, on a GPU that is not there
    with mode:
        for case in (case_imitation, case_device, case_train, case_decode):
            case()
    for what, keys in failed.items():
        print(f"{len(keys)} x {what}: {keys[:4]}")
    print(f"{len(tried)} tried, {len(failed)} kinds of failures")
    sys.exit(bool(failed))
