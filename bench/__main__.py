"""The one place where speed is claimed: our code against peers, on the same weights and data, in turn in one run.

    python -m bench eval out/vanilla --data_dir=evals --limit=200       documents/s against lm-eval's Hugging Face class
    python -m bench prepare --memory_megabytes=1000,10000               tokens/s of prepare.py against tiktoken, memory
    python -m bench load                                                tokens/s of batches against nanoGPT's way

Peers are packages (pip install -r requirements-peers.txt). Each round times ours and the peer's in changing order.
Reported are medians, and the median, least and greatest ratio of a round; results/bench_<what>_<machine>.json gets all.
"""

from bench.common import BenchConfig, machine, versions
from bench.decoding import bench_decode
from bench.loading import bench_load, bench_prepare
from bench.scoring import bench_eval
from bench.training import bench_gpu, bench_memory, bench_train
from configurator import UserError, command_line, run_main
from files import write_json
from runtime import Distributed, environment


def main(cfg: BenchConfig):
    world = Distributed(cfg.device)
    if world.size > 1:
        raise UserError("bench.py runs in one process; leave torchrun out")
    what, name = cfg.words[0], machine(world.device)
    result = KINDS[what](cfg, world)
    peers = versions("transformers", "lm-eval", "tiktoken", "datasets", "tokenizers")
    about = {"what": what, "processor": name} | environment() | peers
    write_json(cfg.out_file or f"results/bench_{what}_{name}.json", about | result)


KINDS = {
    "gpu": bench_gpu,
    "train": bench_train,
    "memory": bench_memory,
    "decode": bench_decode,
    "eval": bench_eval,
    "prepare": bench_prepare,
    "load": bench_load,
}


if __name__ == "__main__":
    run_main(main, command_line(BenchConfig, __doc__))
