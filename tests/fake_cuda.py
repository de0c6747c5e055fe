"""The GPU path without a GPU: models train and decode on tensors that say "cuda" and hold nothing.

    python tests/fake_cuda.py                       what tests/test_gpu.py runs: modes that together take every branch
    python tests/fake_cuda.py --all train decode    every mode, both architectures, three widths of keys, three dtypes

torch's FakeTensorMode checks devices, dtypes and shapes as a GPU would. A torch without CUDA has no autograd for that
device, so a few lines of C++ register a CUDA that does nothing. They must be loaded before torch, hence this process.

What it finds: CPU tensors mixed in, wrong dtypes under autocast, branches on `is_cuda`, reads of a result that make a
GPU wait, calls of scaled_dot_product_attention that no fused kernel takes, a device without an index.
What it cannot find: wrong numbers, memory, speed, what torch.compile makes.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("NANO_ROOT", HERE.parent))
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
    words = [
        "g++",
        "-std=c++20",
        "-O0",
        "-w",
        "-shared",
        "-fPIC",
        f"-I{torch}/include",
        str(source),
        "-o",
        str(library),
    ]
    words += [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(words, check=True)
    return library


def load():
    """torch with the library, loaded before it, and with what Python asks of a CUDA device: an H100."""
    ctypes.CDLL(os.environ.get("FAKE_CUDA") or str(build(tempfile.mkdtemp())))
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


class Failures:
    """Collects what failed, so that one fault does not hide the next."""

    def __init__(self):
        self.tried, self.found = 0, {}

    def attempt(self, key, function, *args):
        self.tried += 1
        try:
            function(*args)
        except Exception as e:
            ours = [
                f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).parent in (ROOT, ROOT / "common")
            ]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
            self.found.setdefault(f"{where} {type(e).__name__}: {str(e)[:200]}", []).append(key)

    def end(self):
        for what, keys in self.found.items():
            print(f"{len(keys)} x {what}: {keys[:4]}")
        print(json.dumps({"tried": self.tried, "kinds of failures": len(self.found)}))
        sys.exit(bool(self.found))


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
    """(key, ModelConfig, dtype). In short, or with --all everything."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    ways = [(arch, n, dtype) for arch in ("llama", "gpt2") for n in (0, 4, 1) for dtype in (bf16, fp16, fp32)]
    short = [("llama", 0, bf16), ("llama", 4, fp32), ("gpt2", 0, bf16), ("llama", 1, bf16), ("llama", 0, fp16)]
    for i, mode in enumerate(os.environ.get("MODES", "").split() or (MODES if ALL else COMPILED)):
        for arch, n, dtype in ways if ALL else {short[0], short[i % 5]}:
            takes = n == 0 or (MODES[mode].kv_group == 1 and fits(mode, n))
            if takes:
                cfg = config(mode, arch=arch, n_kv_head=n, n_layer=fewest_layers(mode))
                yield (mode, arch, n, str(dtype)), cfg, dtype


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
            try:
                ranks.pick_dtype("bfloat16", "cuda")
            except UserError as e:
                assert "does not compute in bfloat16" in str(e)
            else:
                raise AssertionError("bf16 was not refused")

    def kernels(fixed, override, wanted):
        with patch.dict(os.environ, {"CUDNN_ATTENTION": override} if override else {}):
            ranks.choose_kernels(fixed, say=False)
        assert torch.backends.cuda.cudnn_sdp_enabled() == wanted

    for device in ("auto", "cuda", "cuda:0"):
        failures.attempt(device, make, device)
    failures.attempt("before Ampere", before_ampere)
    for way in ((True, "", True), (False, "", False), (True, "0", False), (False, "1", True)):
        failures.attempt(way, kernels, *way)


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
        how = dict(recompute=False, half_stream=False) | settings
        cfg = SimpleNamespace(
            dtype=str(dtype).removeprefix("torch."), attn=attn, verify=False, data_dir="", seed=0, mixture={},
            block_size=shape.block_size, batch_tokens=4 * shape.block_size, shard="none", init_from="", resume="never",
            learning_rate=1e-3, final_lr=0.1, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
            bos=False, compile=False, max_steps=1, eval_every=2, save_every=2, keep=1, out_dir="", **how,
            split_batch=lambda n_ranks: (2, 2), model_config=lambda vocab: shape,
        )  # fmt: skip
        zeros = np.zeros((2, shape.block_size), np.int64)
        corpus = SimpleNamespace(batch=lambda *rows: (zeros, zeros), tokenizer=SimpleNamespace(n_vocab=0, hash=""))
        models, nothing = [], SimpleNamespace(step=lambda record: None, evaluation=lambda *of: None, close=lambda: None)

        def made(shape, seed, attn, **how):
            models.append(new_model(shape, attn=attn, **how))
            models[0].to = lambda device: None
            return models[0]

        def adamw(*of, real=train.adamw):
            optimizer = real(*of)
            optimizer.register_step_post_hook(lambda *of: events.append("launched"))
            return optimizer

        stand_ins = dict(Corpus=lambda *of: corpus, GPT=made, adamw=adamw, start=lambda *of: (0, nothing))
        stand_ins |= dict(validate=lambda *of: {"val_mean": 1.0}, checkpoint_to_resume=lambda cfg: None)
        stand_ins |= dict(Stop=lambda: SimpleNamespace(asked=False), checkpoint=SimpleNamespace(save=lambda *of: None))
        events.clear()
        with patch.multiple(train, **stand_ins), seen("__bool__", lambda t: True), seen("cpu"):
            with seen("item", lambda t: 1.0), seen("tolist", lambda t: [1.0] * t.numel()):
                train.train(cfg, WORLD)
        assert events == ["launched", "sync"] + ["sync"] * (dtype == torch.float16), events
        for name, p in models[0].named_parameters():
            assert p.grad is None or (p.grad.is_cuda and p.grad.dtype == torch.float32), name

    def loss_arguments():
        """Padded rows; compiled without a scatter, in half precision in larger chunks."""
        asked = []
        loss = SimpleNamespace(apply=lambda x, w, target, *how: asked.append(how))
        idx = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
        with patch.object(loss_file, "LinearCrossEntropy", loss):
            for compiling, half in ((False, True), (True, True), (True, False)):
                compile = patch.object(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
                with compile, torch.autocast("cuda", torch.bfloat16, enabled=half):
                    new_model(config(vocab_size=2**24))(idx, idx)
        assert asked == [(16, 64, True, True), (64, 64, False, True), (16, 64, False, True)], asked

    failures.attempt("loss", loss_arguments)
    WORLD = new_world("cuda:0")
    WORLD.to_device = lambda arrays: [torch.zeros(a.shape, dtype=torch.int64, device="cuda") for a in arrays]
    for key, cfg, dtype in configs():
        failures.attempt(key, step, cfg, dtype, "sdpa")
        if ALL or dtype == torch.float16 or key[0] == "vanilla":
            failures.attempt((*key, "eager"), step, cfg, dtype, "eager")
            failures.attempt((*key, "recompute"), lambda *of: step(*of, "sdpa", recompute=True), cfg, dtype)
            failures.attempt((*key, "stream"), lambda *of: step(*of, "sdpa", half_stream=True), cfg, dtype)


def case_decode():
    """A prefill of prompts of one length and of several, then two tokens, greedy and drawn."""

    @torch.inference_mode()
    def decode(cfg, dtype, lengths, static):
        model = new_model(cfg, dtype).eval()
        cache = model_file.KVCache(cfg, lengths, 16, "cuda", dtype)
        logits = sample.next_logits(
            model, torch.ones(len(lengths), max(lengths), dtype=torch.int64, device="cuda"), cache
        )
        cache.is_static = static
        for how in ({"temperature": 0}, {"top_k": 3}):
            assert logits.dtype == torch.float32 and logits.is_cuda
            token = sample.sample_token(logits, None, **how)
            assert token.shape == (len(lengths), 1)
            logits = sample.next_logits(model, token, cache)

    for key, cfg, dtype in configs():
        for lengths in ((5, 5), (5, 2)) if ALL or dtype == torch.bfloat16 else ((5, 2),):
            for static in (False, True):
                failures.attempt((*key, lengths, static), decode, cfg, dtype, lengths, static)


def case_branches():
    """eval.py's rows of several continuations."""

    @torch.inference_mode()
    def hidden(cfg, dtype):
        model = new_model(cfg, dtype).eval()
        positions = torch.tensor([[0, 1, 2, 2, 3, 3, 4, 4]]).to("cuda")
        branches = torch.tensor([[0, 0, 1, 2, 1, 2, 1, 2]]).to("cuda")
        x = model.hidden(torch.zeros_like(positions), scoring.PrefixTree(positions, branches))
        assert x.is_cuda and x.dtype == dtype

    for key, cfg, dtype in configs():
        failures.attempt(key, hidden, cfg, dtype)


CASES = {"device": case_device, "train": case_train, "decode": case_decode, "branches": case_branches}

if __name__ == "__main__":
    torch = load()
    sys.path[:0] = [str(ROOT), str(HERE)]
    import numpy as np
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    import model as model_file
    import sample
    import train
    from common import layers, ranks, scoring
    from common import loss as loss_file
    from configurator import UserError
    from model import GPT

    ALL = "--all" in sys.argv  # conftest comes after our own files, for it sets the path
    from conftest import COMPILED, MODES, config, fewest_layers, fits

    failures = Failures()
    watch_attention()
    mode = FakeTensorMode()
    mode.may_turn_const = lambda tensor: False  # it would compute with small constants, on a GPU that is not there
    with mode:
        for name, case in CASES.items():
            if name in sys.argv[1:] or not set(CASES).intersection(sys.argv[1:]):
                case()
    failures.end()
