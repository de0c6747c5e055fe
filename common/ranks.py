"""Ranks, device, dtype: what a stage runs on, and a record of it."""

import ast
import contextlib
import ctypes
import datetime
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from configurator import UserError, need

# Dense bf16/fp16 peak of GPUs in FLOP/s, from the makers' data sheets: no sparsity, sums in fp32. Longer names first.
PEAK_FLOPS = {
    "GB300": 2500e12, "B300": 2250e12, "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12,
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H800 PCIe": 756e12, "H800": 989e12,
    "A100": 312e12, "A800": 312e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX 6000 Ada": 364e12, "RTX A6000": 155e12, "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
    "V100": 125e12, "T4": 65e12,
}  # fmt: skip


class Distributed:
    """The processes of a run as torchrun starts them: this one's rank and device, and sums over all ranks.
    fixed_lengths: attention always has the same few shapes, as in training; see `choose_kernels`."""

    def __init__(self, device, fixed_lengths=False):
        self.size, self.rank, local_rank = int(os.environ.get("WORLD_SIZE") or 1), 0, 0
        if self.size > 1:  # clusters set RANK in each worker, even where there is only one process
            self.rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.is_first_of_node = local_rank == 0
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{local_rank}"  # set_device wants an index
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as e:
            raise UserError(f"device={device} cannot be used here: {str(e)[:200]}") from None
        self.kind = self.device.type  # "cpu", "cuda" or "mps"
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            choose_kernels(fixed_lengths)
        if self.kind == "cpu":
            keep_freed_memory()
        if self.size > 1:
            hour = datetime.timedelta(hours=1)  # others wait while rank 0 hashes data or writes a checkpoint
            try:
                dist.init_process_group("nccl" if self.kind == "cuda" else "gloo", timeout=hour)
            except ValueError as e:  # a variable is missing
                raise UserError(f"WORLD_SIZE={self.size}, but {e}; use torchrun, or unset WORLD_SIZE") from None

    def gather(self, value):
        """The values of all ranks, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def sum(self, values):
        """Sum over the ranks of a list, array or tensor of numbers -> float64 tensor on the CPU. A GPU's tensor is read
        once, at the end, which waits for all work that was launched before."""
        total = values if torch.is_tensor(values) else torch.as_tensor(values, dtype=torch.float64)
        if self.size > 1:
            total = total.to(self.device, torch.float64)
            dist.all_reduce(total)
        return total.cpu().double()

    def to_device(self, arrays):
        """numpy arrays -> tensors on this rank's device, without waiting for the copy to a GPU."""
        tensors = [torch.from_numpy(a) for a in arrays]
        if self.kind == "cuda":  # only from pinned memory can a GPU copy while it computes
            tensors = [t.pin_memory() for t in tensors]
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def shard(self, model, keep_gathered):
        """Divide a model's parameters among the ranks, by rows, with torch's FSDP2; the optimizer's state follows
        them. Until then the whole model is on the CPU of every rank; its blocks move to the GPU one at a time.

        Each block is a unit, the rest of the model another. A unit's weights are gathered for its forward and its
        backward, and its gradients are averaged over the ranks. keep_gathered: weights stay from the first forward of a
        step to its last backward (ZeRO-2); else each unit frees them after use (ZeRO-3).
        """
        # FSDP2 warns of blocks that return views, such as V_1. Nothing writes into them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        mesh = dist.init_device_mesh(self.kind, (self.size,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=not keep_gathered)

    def close(self):
        """Under torchrun wait for all ranks, then end this process; else do nothing. gloo's threads can abort or hang
        the interpreter's own exit (pytorch/pytorch#179291, #56297), and a rank that leaves early breaks the others'
        connections."""
        if self.size > 1:
            dist.barrier()
            if self.kind == "cuda":
                dist.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


@contextlib.contextmanager
def enough_memory(remedy):
    """Turns three failures into a sentence: a GPU whose memory is full, a rank that has ended, and an optimizer with an
    operation that torch cannot do on sharded weights."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(f"the GPU ran out of memory; {remedy}") from None
    except RuntimeError as e:
        if any(word in str(e) for word in ("DTensor", "Sharding", "sharding")):
            why = str(e).splitlines()[0][:100]
            raise UserError(f"torch cannot train like this with sharded weights ({why}); set --shard=none") from e
        is_connection = any(word in str(e).lower() for word in ("gloo", "nccl", "connection", "tcpstore"))
        if not (dist.is_initialized() and is_connection):
            raise
        way_out = "what was saved is intact: run the command again (train.py with --resume=auto)"
        raise UserError(f"another rank has ended or cannot be reached; {way_out}") from None


def refuse_ranks():
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("this command runs in one process; start it without torchrun, or unset WORLD_SIZE")


def only_process(device, fixed_lengths=False):
    """The Distributed of a command that runs in one process; raises UserError under torchrun."""
    refuse_ranks()
    return Distributed(device, fixed_lengths)


def choose_kernels(fixed_lengths):
    """The one place that decides whether torch may take cuDNN's attention. On Hopper it is the fastest, but it builds a
    plan for each new shape, which takes up to a second: worth it for training's few shapes, a disaster where each token
    or batch has another length (pytorch/pytorch#154602). CUDNN_ATTENTION=1 or 0 in the environment overrides this."""
    torch.backends.cuda.enable_cudnn_sdp(os.environ.get("CUDNN_ATTENTION", str(int(fixed_lengths))) == "1")


def keep_freed_memory():
    """Let the C library keep memory that is freed. glibc gives it back to the system, which clears it again, page by
    page, when the next step asks for it. That costs about a quarter of the processor time of a small model's step.
    Does nothing without glibc, or if a variable such as MALLOC_TRIM_THRESHOLD_ is set: the user knows better."""
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith("MALLOC_") for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the most that it takes: a larger block is always given back
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def whole(tensor):
    """A tensor that `Distributed.shard` has divided, gathered; every rank must call this. Any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def has_bf16():
    """Whether the current GPU computes in bf16: since Ampere."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def pick_dtype(name, kind):
    """The torch.dtype of autocast. "auto": with CUDA bf16, or fp16 before Ampere; on CPUs bf16 where the processor
    computes in it, else fp32. Raises UserError for bf16 on a GPU that has none."""
    if name == "bfloat16" and kind == "cuda" and not has_bf16():
        raise UserError("this GPU does not support bfloat16; set --dtype=float16, or leave it at auto")
    if name != "auto":
        return getattr(torch, name)
    if kind == "cuda":
        return torch.bfloat16 if has_bf16() else torch.float16
    if kind == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.bfloat16
    return torch.float32


def weights_dtype(name, kind):
    """The torch.dtype of a finished model's weights. "auto": bf16 on a GPU that has it, else fp32."""
    if name == "auto":
        return torch.bfloat16 if kind == "cuda" and has_bf16() else torch.float32
    return pick_dtype(name, kind)


def need_flash_attn(kind, dtype):
    """Refuse attn=flash where the flash-attn package cannot compute, or is not the one that layers.attend calls."""
    if kind != "cuda" or dtype == torch.float32:
        raise UserError("attn=flash needs a GPU and dtype bfloat16 or float16; use attn=sdpa")
    version = getattr(need("flash_attn", "flash-attn"), "__version__", "?")
    if not version.startswith("2."):
        raise UserError(f"attn=flash needs flash-attn 2, not {version}; pip install 'flash-attn<3', or set --attn=sdpa")


def peak_flops(device, dtype):
    """Peak FLOP/s of a GPU, or None where we do not know it or for fp32; then MFU is null instead of wrong."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)  # such as "NVIDIA A100-SXM4-80GB"
    found = re.search(rf"\b({'|'.join(PEAK_FLOPS)})\b(?! (Laptop|Ti|D|SUPER)\b)", name)  # the first that fits
    return PEAK_FLOPS[found[1]] if found else None


def clock(device):
    """Seconds on a steady clock, after a GPU has finished what was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def without_words(tree):
    """A syntax tree without docstrings, the rows of TABLE and the strings in setting(…). What these decide is in the
    config.json of a run, and runs are compared by that, too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            del node.body[0]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TABLE":
            node.value = ast.Constant(None)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setting":
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    part.value = None
    return tree


def as_text(node):
    """A syntax tree as text that is the same in every Python: ast.unparse and ast.dump change. Empty fields are left
    out, because new Pythons add some."""
    if isinstance(node, list):
        return f"[{' '.join(map(as_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # 3.12 has empty constants in f-strings
        node.values = [part for part in node.values if getattr(part, "value", None) != ""]
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"({type(node).__name__} {' '.join(f'{name}={as_text(value)}' for name, value in sorted(fields))})"


@functools.cache
def code_of_results(root=Path(__file__).parent.parent):
    """{file at the heart of a run's numbers: a digest of its statements}. Comments, docstrings and help texts do not
    count; error messages do."""
    digests = {}
    for name in ("model", "value_modes", "train", "net/layers", "net/loss", "common/data", "common/scoring"):
        tree = without_words(ast.parse(Path(root, f"{name}.py").read_text(encoding="utf-8")))
        digests[f"{name}.py"] = hashlib.sha256(as_text(tree).encode()).hexdigest()[:8]
    return digests


def processor():
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux; platform.processor() is empty there
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()  # Linux on ARM names none


def what_rounds(world):
    """{name: value} of what may round a run's numbers differently on another machine."""
    device = f"the {world.kind} of {processor()}"
    if world.kind == "cuda":
        device = torch.cuda.get_device_name(world.device)
    found = {"device": device, "ranks": world.size, "torch": torch.__version__, "Python": platform.python_version()}
    if world.kind == "cpu":
        found["threads"] = torch.get_num_threads()
    return found


def environment():
    """What a reader needs to repeat a run: commit, versions, processor, command."""
    here = Path(__file__).parent.parent
    commit = here / "COMMIT"  # of a copy that travels without git

    def git(*words):
        with contextlib.suppress(OSError):  # there may be no git here
            result = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
            return result.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD") or (commit.read_text().strip() if commit.exists() else None),
        "changed_files": git("status", "--porcelain", "--untracked-files=no"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processor": processor(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "command": " ".join(sys.orig_argv[1:]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
