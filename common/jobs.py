"""Commands run by this Python side by side, one on each GPU or core: what compare.py and paper/ start runs with."""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.cores import cores
from common.ranks import clock, need_flash_attn, only_process, pick_dtype, refuse_ranks
from common.report import heard, progress
from model import GPT


@dataclass(frozen=True)
class Command:
    """A command for this Python, whose output goes into a file."""

    words: tuple  # such as train.py, --seed=1
    log: Path
    folder: Path | None = None  # of the run that it trains
    steps: int = 0  # of that run


def flags_of(cls, values):
    """The flags that set `values` of a settings dataclass, without its defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    return [f"--{name}={value}" for name, value in values.items() if value not in (defaults[name], {})]


def lanes_of(device, jobs, n_runs):
    """The environment of each job that runs at the same time: one of the GPUs, which jobs share if there are too few,
    and an equal share of the cores. jobs: how many run at a time; 0 = one on each GPU, or else on each core."""
    refuse_ranks()
    gpus = []
    if device in ("auto", "cuda") and torch.cuda.is_available():
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    n_cores = cores() if device in ("auto", "cpu") else 1
    n = min(jobs or len(gpus) or n_cores, n_runs)
    # otherwise each job would start as many threads, and as many compilers, as there are cores
    share = str(max(1, cores() // n))
    lane = {name: os.environ.get(name, share) for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    return [lane | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}) for i in range(n)]


def steps_done(folder):
    """The last step in a run's metrics.jsonl, read from its end."""
    with contextlib.suppress(OSError, IndexError), open(Path(folder, "metrics.jsonl"), "rb") as file:
        file.seek(max(0, os.path.getsize(file.name) - 2**20))  # no record is longer
        return json.loads(file.read().split(b"\n")[-2])["step"]  # after the last line break there may be half a line
    return 0


def last_words(log, begin):
    """The last error in the output of a job from byte `begin` on, else its last line."""
    lines = [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def end_with_parent():
    """In a new process: have Linux send it a SIGTERM, on which train.py saves, if a kill -9 ends its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def run_jobs(wanted, ended, lanes, later=lambda: 0):
    """Run jobs, one at a time on each lane, until `wanted()` has no new one.

    wanted: function -> the Commands that are needed as far as we know now; it is asked again whenever a job has ended.
    ended: function (job, exit code, its last words). If it raises, or at Ctrl-C or a kill, all others are
    stopped by SIGTERM, at which train.py saves.
    later: function -> steps of the jobs that `wanted` will name when others have ended, for the bar.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)  # as at Ctrl-C
    running, seen = {}, {}  # {lane: (job, process, where its output begins)}, {log: job}
    earlier = 0  # steps of resumed runs, which say nothing about today's pace
    bar = progress("training", 0, "step")
    try:
        while True:
            todo = [job for job in wanted() if job.log not in seen]
            free = [lane for lane in range(len(lanes)) if lane not in running]
            for lane, job in zip(free, todo, strict=False):
                job.log.parent.mkdir(parents=True, exist_ok=True)
                with open(job.log, "a", encoding="utf-8") as out:  # a session of its own, so that Ctrl-C is ours alone
                    how = {"stdout": out, "stderr": out, "start_new_session": True, "stdin": subprocess.DEVNULL}
                    how["preexec_fn"] = end_with_parent
                    begin = out.tell()  # before the process can write
                    process = subprocess.Popen([sys.executable, *job.words], env={**os.environ, **lanes[lane]}, **how)
                    running[lane], seen[job.log] = (job, process, begin), job
                if job.steps:
                    earlier += steps_done(job.folder)
            if not running:
                return
            # until one ends, show how far along they all are
            known = {job.log: job for job in todo} | seen
            bar.total = sum(job.steps for job in known.values()) + later() - earlier
            while all(process.poll() is None for _, process, _ in running.values()):
                left = sum(job.steps - steps_done(job.folder) for job, *_ in running.values() if job.steps)
                bar.update(sum(job.steps for job in seen.values()) - left - earlier - bar.n)
                time.sleep(0.5)
            for lane, (job, process, begin) in list(running.items()):
                if process.poll() is not None:
                    del running[lane]
                    bar.clear()  # what `ended` prints must not land on its line
                    ended(job, process.returncode, last_words(job.log, begin))
    except KeyboardInterrupt:
        heard("stopping; running jobs save first, but a second Ctrl-C doesn't wait for that")
        raise
    finally:
        bar.close()
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


def tokens_per_s(cfg, corpus, runs):
    """Tokens per second of training with these settings of train.py: the median of Curves, else a guess."""
    if runs:
        return float(np.median(np.concatenate([curves.steps["tokens_per_s"] for curves in runs])))
    return guess_tokens_per_s(cfg, corpus)


def guess_tokens_per_s(cfg, corpus):
    """Tokens per second of training with these settings of train.py, from a forward and a backward pass of vanilla."""
    world = only_process(cfg.device, fixed_lengths=True)
    dtype = pick_dtype(cfg.dtype, world.kind)
    if cfg.attn == "flash":
        need_flash_attn(world.kind, dtype)
    shape = cfg.model_config(corpus.tokenizer.n_vocab)
    model = GPT(shape, attn=cfg.attn, recompute=cfg.recompute).to(world.device)
    n = cfg.split_batch(1)[0] if world.kind == "cuda" else max(1, 2048 // cfg.block_size)
    x, y = world.to_device(corpus.batch(0, n, 0, n))
    for _ in range(3):  # the last one counts
        began = clock(world.device)
        with torch.autocast(world.kind, dtype, enabled=dtype != torch.float32):
            loss = model(x, y)[1]
        loss.backward()
        seconds = clock(world.device) - began
    return x.numel() / seconds
