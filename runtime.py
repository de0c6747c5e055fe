"""The machine: ranks, device, precision, environment, progress."""

import datetime
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from configurator import UserError

# dense bf16/fp16 peak of a GPU in FLOP/s, by words of its name, the first that fits (makers' data sheets, no sparsity)
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12}
PEAK_FLOPS |= {"A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12}


class World:
    """The processes of this run: rank, size, this one's device, and sums over all of them."""

    def __init__(self, device):
        self.began = time.perf_counter()
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.first_of_node = local == 0
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and self.size > 1:
            device = f"cuda:{local}"
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as e:
            raise UserError(f"device={device} cannot be used here: {str(e).splitlines()[0]}") from None
        self.kind = self.device.type
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            try:
                dist.init_process_group("nccl" if self.kind == "cuda" else "gloo")
            except ValueError as e:  # a variable that torchrun sets is missing
                lacking = str(e).splitlines()[0]
                raise UserError(f"WORLD_SIZE={self.size} without torchrun ({lacking}); use it, or unset it") from None

    def pin(self, arrays):
        """numpy arrays -> tensors in the host's memory, for a GPU where it can fetch them from while it computes."""
        tensors = [torch.from_numpy(a) for a in arrays]
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: else pinning would wake up the first GPU
            tensors = [t.pin_memory() for t in tensors]
        return tensors

    def put(self, tensors):
        """Tensors that `pin` made -> tensors on this rank's device; to a GPU without waiting for the copy."""
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def sum(self, values):
        """Sum over the ranks of a list or array of numbers -> float64 tensor on the CPU."""
        total = torch.as_tensor(values, dtype=torch.float64)
        if self.size > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        return total.cpu()

    def wait(self):
        if self.size > 1:
            dist.barrier()

    def close(self):
        """End the process. When all is long written, gloo's threads may still abort the interpreter as it ends, or wait
        for it while it waits for them (pytorch/pytorch#179291, #56297); so a rank that has succeeded leaves without
        either's own clean-up. But not before the others: a rank that leaves early pulls their connections down."""
        if self.size > 1:
            dist.barrier()
            if self.kind == "cuda":
                dist.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def pick_dtype(name, kind):
    """The torch.dtype of autocast: what is asked for, or with "auto" bf16 where the processor computes in it."""
    if name == "auto":
        if kind == "cuda":
            name = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        else:
            fast = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
            has = kind == "cpu" and any(getattr(torch.cpu, f, lambda: False)() for f in fast)
            name = "bfloat16" if has else "float32"
    return getattr(torch, name)


def peak_flops(device, dtype):
    """FLOP/s that MFU is a share of, or None where we do not know it (then MFU is null, not wrong)."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)  # such as "NVIDIA A100-SXM4-80GB"
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def environment():
    """What a reader needs to know to repeat the run: code, versions, machine, command."""

    def git(*words):
        try:
            result = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
        except OSError:  # no git here
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed_files": git("status", "--porcelain", "--untracked-files=no"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "machine": f"{platform.system()} {platform.machine()}, {cores}",
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "command": " ".join(sys.argv),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


class Progress:
    """A bar on a terminal, else a line every ten seconds; both say what time is left."""

    def __init__(self, name, total, on=True):
        self.name, self.total, self.done, self.began = name, total, 0, time.time()
        self.on, self.said = on and total > 0, self.began
        self.bar = None
        if self.on and sys.stderr.isatty():
            self.bar = tqdm(total=total, desc=name, unit="tok", unit_scale=True, dynamic_ncols=True, leave=False)

    def update(self, n):
        self.done, now = self.done + n, time.time()
        if self.bar:
            self.bar.update(n)
        elif self.on and now - self.said > 10:
            left = (now - self.began) * (self.total / self.done - 1)
            print(f"{self.name}: {self.done / self.total:.0%}, {left:.0f} s left", file=sys.stderr, flush=True)
            self.said = now

    def close(self):
        if self.bar:
            self.bar.close()


def peak_bytes(device):
    """Most memory that this process has had: on a GPU in this run's tensors; else as a whole, in all runs so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
