"""Benchmarks: the one place where speed is claimed. Our code against peers, on the same weights and data.

docs/speed.md has the commands, what is measured and how, and the figures. The `…_table` functions make its tables from
the JSON files that the benchmarks write. Read next: common.py.

Here is only what the settings need. Nothing heavy is imported, so that a typo is answered at once.
"""

from dataclasses import dataclass
from typing import Literal

from oldconfig import check_ranges, setting
from value_modes import ModelConfig

SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),  # the demo's
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "180M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
LLAMA = "transformers' Llama"
PEERS = {"llama": LLAMA, "llama_no_mask": f"{LLAMA} without its mask"}


@dataclass(frozen=True)
class BenchConfig:
    """Settings of every benchmark. A side runs with every dtype, with torch.compile off, on, or both."""

    rounds: int = setting(3, "times that each side runs", least=1, group="Measuring")
    out_file: str = setting("", "JSON to write; empty = results/bench_<what>.json")
    shape: tuple[Literal[*SHAPES], ...] = setting(("tiny",), "of the models: tiny is the demo's", group="Sides")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes, vanilla first")
    dtype: tuple[Literal["float32", "bfloat16", "float16"], ...] = setting(("float32",), "of autocast, or of decoding")
    compile: tuple[Literal["off", "on"], ...] = setting(("off", "on"), "torch.compile")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")

    def __post_init__(self):
        check_ranges(self)
        if self.out_file and not self.out_file.endswith(".json"):
            raise ValueError(f"out_file={self.out_file} must end in .json")
        if self.modes[:1] != ("vanilla",):
            raise ValueError("modes must begin with vanilla, which the others are compared with")
        for shape in self.shape:
            for mode in self.modes:
                ModelConfig(**SHAPES[shape], value_mode=mode)  # raises ValueError for a mode that does not fit
