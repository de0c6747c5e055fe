"""Benchmarks: the one place where speed is claimed. Our code against peers, on the same weights and data.

    python -m bench.training --shape=tiny,82M --peers=llama         training steps, tokens/s
    python -m bench.training memory --shape=82M --recompute=off,on  training steps, peak memory
    python -m bench.decoding --shape=82M --peers=dynamic,static     decoding, tokens/s and bytes of the cache
    python -m bench.scoring out/vanilla --data_dir=evals            eval.py, documents/s
    python -m bench.loading                                         batches from token files, tokens/s
    python -m bench.loading prepare                                 prepare.py, text to token files
    make bench-gpu                                                  what is to be measured on a GPU

The sides of a comparison take turns in one process, in an order that changes from round to round. Reported are medians,
and of ratios the median, least and greatest of the rounds. Before a side is timed its result is compared with ours.
Each run writes results/bench_<what>_<machine>.json; the `…_table` functions make the Markdown tables of docs/ from such
files. Peers are packages: pip install -r requirements-peers.txt. Read next: common.py.

Here is only what the settings need. Nothing heavy is imported, so that a typo is answered at once.
"""

from typing import Literal

from value_modes import get_mode

SHAPES = {
    "tiny": dict(n_layer=8, n_head=4, n_embd=128, vocab_size=4096),  # the demo's
    "82M": dict(n_layer=8, n_head=8, n_embd=512, vocab_size=50277),
    "180M": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50277),
    "468M": dict(n_layer=24, n_head=16, n_embd=1024, vocab_size=50277),
}
LLAMA = "transformers' Llama"
PEERS = {"llama": LLAMA, "x_transformers": "x-transformers with value residual"}
Shape = Literal[*SHAPES]
Peer = Literal[*PEERS]
Dtype = Literal["float32", "bfloat16", "float16"]
Switch = Literal["off", "on"]


def check_modes(modes):
    """Raise ValueError unless all are value modes and the first is vanilla, which the others are compared with."""
    if modes[:1] != ("vanilla",):
        raise ValueError("modes must begin with vanilla, which the others are compared with")
    for mode in modes:
        get_mode(mode)
