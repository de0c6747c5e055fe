"""What all benchmarks share: settings, turns, ratios, peers, and the record that one leaves."""

import math
import platform
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import eval as ours
import hf
import prepare
import value_modes
from configurator import UserError, setting
from value_modes import get_mode

DTYPES, SWITCH = ("float32", "bfloat16", "float16"), ("off", "on")
KINDS_OF_ATTENTION = ("sdpa", "eager", "flash")
SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "180M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
MICRO_BATCH = {  # sequences of 256 tokens on a CPU, of 2,048 on a GPU
    "cpu": {"tiny": 8, "82M": 4, "180M": 2, "468M": 1},
    "cuda": {"tiny": 64, "82M": 32, "180M": 16, "468M": 8},
}
LONG = 20e9  # tokens: the paper's training data
RIVALS = YARDSTICK, LLAMA, X, X_VALUE = (
    "GPT-2 block",
    "transformers' Llama",
    "x-transformers",
    "x-transformers with value residual",
)
CARDS = (24, 40, 80, 141)  # GB of memory of GPUs


KINDS = ("gpu", "train", "memory", "decode", "eval", "prepare", "load")


@dataclass(frozen=True)
class BenchConfig:
    """Every setting of bench.py."""

    words: tuple[str, ...] = setting(
        (), "what to time (eval), then the vanilla run or checkpoint to time it on", positional=True
    )
    shape: tuple[str, ...] = setting(("tiny",), "of random models (all but eval): tiny, the demo's; 82M, 180M, 468M")
    block_size: int = setting(0, "tokens per sequence; 0 = 2,048 on a GPU, 256 on a CPU")
    micro_batch: int = setting(0, "sequences per step of training; 0 = the shape's own, see MICRO_BATCH")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes of ours, vanilla first")
    attn: tuple[str, ...] = setting(("sdpa",), "train, memory: attention of ours: sdpa, eager, flash; sdpa first")
    compile: tuple[str, ...] = setting(("off", "on"), "torch.compile: off, on, or both")
    recompute: tuple[str, ...] = setting(("off",), "memory: activation checkpointing of ours: off, on, or both")
    batch: tuple[int, ...] = setting((1, 8), "decode: rows")
    prompt: tuple[int, ...] = setting((32,), "decode: tokens of each prompt")
    new: int = setting(128, "decode: tokens to add to each")
    kv_gib: float = setting(10.0, "decode: memory for keys and values, of which to say how many rows fit")
    peers: bool = setting(False, "time rivals too, of which all but the first are in requirements-peers.txt")
    rivals: tuple[str, ...] = setting(RIVALS, "train, memory: which, with --peers")
    seconds: float = setting(2.0, "least time of a side's turn")
    clock: Literal["wall", "processor"] = setting(
        "wall", "train: processor = seconds of this process alone, for a busy CPU; set OMP_NUM_THREADS=1 with it"
    )
    task: tuple[str, ...] = setting(ours.TABLE1, "tasks, with commas")
    data_dir: str = setting("", "folder of local task files; empty = from the hub")
    limit: int = setting(200, "documents of each task, spread over all of it; 0 = all")
    rounds: int = setting(3, "times that each side runs")
    batch_tokens: int = setting(0, "eval.py's setting; 0 = its own choice")
    batch_sizes: tuple[int, ...] = setting((4, 16, 64), "the peer's to choose the fastest from, beside its default, 1")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    dtype: tuple[str, ...] = setting(("float32",), "float32, bfloat16, float16: of weights, in training of autocast")
    text: str = setting("", "prepare: file or folder of texts, as prepare.py's files; empty = the standard library's")
    megabytes: float = setting(0.0, "prepare: of text, repeated up to there, 0 = 300; load: of token files, 0 = 1,000")
    memory_megabytes: tuple[float, ...] = setting((), "prepare: longer inputs, on which its memory is measured")
    tokenizer: str = setting("bpe:4096", "prepare: bpe:<vocabulary size>, gpt2 or neox")
    tokenizer_file: str = setting("", "prepare: see prepare.py --help; neox needs it, for the peer reads it too")
    out_file: str = setting("", "JSON to write; empty = results/bench_<what>_<machine>.json")

    def __post_init__(self):
        if not self.words or self.words[0] not in KINDS:
            raise ValueError(f"say what to time, one of {', '.join(KINDS)}: python -m bench eval out/vanilla")
        if len(self.words) != 1 + (self.words[0] == "eval"):
            raise ValueError("`bench.py eval` wants one run or checkpoint of mode vanilla, all others none")
        if self.rounds < 1 or self.limit < 0 or min(self.batch_sizes, default=0) < 1 or not self.seconds > 0:
            raise ValueError("rounds and batch_sizes must be at least 1, limit at least 0, seconds above 0")
        if min(self.block_size, self.micro_batch) < 0:
            raise ValueError("block_size and micro_batch must be at least 0")
        if self.clock == "processor" and self.words[0] != "train":
            raise ValueError("clock=processor is for `bench.py train`; the others go by the wall clock")
        for name, known in (
            ("shape", SHAPES),
            ("dtype", DTYPES),
            ("compile", SWITCH),
            ("recompute", SWITCH),
            ("rivals", RIVALS),
            ("attn", KINDS_OF_ATTENTION),
        ):
            if not getattr(self, name) or not set(getattr(self, name)) <= set(known):
                raise ValueError(f"{name} must be some of {', '.join(known)}, with commas")
        if min(*self.batch, *self.prompt, self.new - 1) < 1 or not self.kv_gib > 0:
            raise ValueError("batch and prompt must be at least 1, new at least 2, kv_gib above 0")
        if self.modes[:1] != ("vanilla",) or self.attn[:1] != ("sdpa",):
            raise ValueError("modes must begin with vanilla and attn with sdpa, which the others are compared with")
        for mode in self.modes:
            get_mode(mode)
        if not 0 <= self.megabytes < math.inf or not all(0 < m < math.inf for m in self.memory_megabytes):
            raise ValueError("megabytes must be at least 0 and memory_megabytes above 0")
        if self.words[0] == "prepare" and self.preparation().tokenizer == "neox" and not self.tokenizer_file:
            raise ValueError("neox needs --tokenizer_file=<GPT-NeoX's tokenizer.json>, for the peer reads it too")
        if self.words[0] == "eval" and "loss" in self.evaluation().task:
            raise ValueError("loss is no task of the harness; name some of " + ", ".join(ours.TASKS))

    @property
    def now(self):
        """The clock, a function of the device."""
        return clock if self.clock == "wall" else lambda device: time.process_time()

    def preparation(self, source="files", input_dir="text", **where):
        """Settings of prepare.py, all text being train text; raises ValueError if they are none."""
        names = dict(tokenizer=self.tokenizer, tokenizer_file=self.tokenizer_file)
        return prepare.PrepareConfig(source, input_dir=input_dir, val_fraction=0.0, **names, **where)

    def evaluation(self):
        """The same as settings of eval.py; raises ValueError if they are none."""
        names = ("task", "data_dir", "batch_tokens")
        return ours.EvalConfig(**{name: getattr(self, name) for name in names}, dtype=self.dtype[0])


def machine(device):
    """Name of what computes here, for a file's name: the GPU's, or the processor's and how many of its cores."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
        name = f"{found[1] if found else platform.processor() or platform.machine()} x{torch.get_num_threads()}"
    return re.sub(r"\W+", "_", re.sub(r"\((R|TM)\)|CPU|Processor", "", name)).strip("_").lower()


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(function, device):
    """Seconds that a function takes."""
    start = clock(device)
    function()
    return clock(device) - start


def in_turn(sides, rounds, device, now=clock):
    """{name: seconds of each round} of functions, in an order that turns around from round to round, and {name: what it
    returned last}."""
    seconds, results = {name: [] for name in sides}, {}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            start = now(device)
            results[name] = sides[name]()
            seconds[name].append(now(device) - start)
    return seconds, results


def ratio(seconds, of, to):
    """How many times as fast `of` is as `to`: median, least and greatest of the rounds."""
    found = [b / a for a, b in zip(seconds[of], seconds[to], strict=True)]
    return {"ratio": statistics.median(found), "least": min(found), "greatest": max(found)}


def spread(found):
    """A ratio as text: its median (least–greatest)."""
    return f"{found['ratio']:.2f} ({found['least']:.2f}–{found['greatest']:.2f})"


def as_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a vanilla model of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = model.cfg
    if cfg.arch != "llama" or value_modes.mode_name(cfg.value_mode) != "vanilla":
        raise UserError("the peer is Hugging Face's Llama: give a vanilla run of arch=llama")
    llama = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_hidden,
        num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head,
        max_position_embeddings=cfg.block_size,
        rms_norm_eps=cfg.norm_eps,
        rope_theta=cfg.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    peer = LlamaForCausalLM(llama).to(model.head.weight)
    weights = {name: parameter[rows].detach() for name, parameter, rows in hf.hf_parts(model)}
    missing, extra = peer.load_state_dict(weights, strict=False)
    assert not extra and all("rotary" in name for name in missing), (missing, extra)
    return peer.eval()


def versions(*names):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
