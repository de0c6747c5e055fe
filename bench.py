"""The one place where speed is claimed: our code against peers, on the same weights and data, in turn in one run.

    python bench.py eval out/vanilla --data_dir=evals --limit=200       documents/s against lm-eval's Hugging Face class

Peers are packages (pip install -r requirements-peers.txt). Each round times ours and the peer's in changing order.
Reported are medians, and the median, least and greatest ratio of a round; results/bench_<what>_<machine>.json gets all.
"""

import platform
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import eval as ours
from configurator import UserError, load, run, setting
from data import write_json
from sample import load_tokenizer
from train import World, environment


@dataclass(frozen=True)
class BenchConfig:
    """Every setting of bench.py."""

    words: tuple[str, ...] = setting((), "what to time (eval), then the vanilla run or checkpoint to time it on")
    task: tuple[str, ...] = setting(ours.TABLE1, "tasks, with commas")
    data_dir: str = setting("", "folder of local task files; empty = from the hub")
    limit: int = setting(200, "documents of each task, spread over all of it; 0 = all")
    rounds: int = setting(3, "times that each side runs")
    batch_tokens: int = setting(0, "eval.py's setting; 0 = its own choice")
    batch_sizes: tuple[int, ...] = setting((4, 16, 64), "the peer's to choose the fastest from, beside its default, 1")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of both sides' weights")
    out_file: str = setting("", "JSON to write; empty = results/bench_<what>_<machine>.json")

    def __post_init__(self):
        if len(self.words) != 2 or self.words[0] not in KINDS:
            raise ValueError(
                f"say what to time ({', '.join(KINDS)}) and on which run: python bench.py eval out/vanilla"
            )
        if self.rounds < 1 or self.limit < 0 or min(self.batch_sizes, default=0) < 1:
            raise ValueError("rounds and batch_sizes must be at least 1, limit at least 0")
        if "loss" in self.evaluation().task:
            raise ValueError("loss is no task of the harness; name some of " + ", ".join(ours.TASKS))

    def evaluation(self):
        """The same as settings of eval.py; raises ValueError if they are none."""
        names = ("task", "data_dir", "batch_tokens", "dtype")
        return ours.EvalConfig(**{name: getattr(self, name) for name in names})


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


def in_turn(sides, rounds, device):
    """{name: seconds of each round} of functions, in an order that turns around from round to round, and {name: what it
    returned last}."""
    seconds, results = {name: [] for name in sides}, {}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 == 0 else -1]:
            start = clock(device)
            results[name] = sides[name]()
            seconds[name].append(clock(device) - start)
    return seconds, results


def ratio(seconds, of, to):
    """How many times as fast `of` is as `to`: median, least and greatest of the rounds."""
    found = [b / a for a, b in zip(seconds[of], seconds[to], strict=True)]
    return {"ratio": statistics.median(found), "least": min(found), "greatest": max(found)}


def as_llama(model, tokenizer):
    """transformers' LlamaForCausalLM with the weights of a vanilla model of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = model.cfg
    if cfg.arch != "llama" or checkpoint.mode_name(cfg.value_mode) != "vanilla":
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
        bos_token_id=tokenizer.eot,
        eos_token_id=tokenizer.eot,
    )
    peer = LlamaForCausalLM(llama).to(model.head.weight)
    weights = {name: parameter[rows].detach() for name, parameter, rows in checkpoint.hf_parts(model)}
    missing, extra = peer.load_state_dict(weights, strict=False)
    assert not extra and all("rotary" in name for name in missing), (missing, extra)
    return peer.eval()


def harness_class(model, tokenizer, batch_size):
    """lm-eval's Hugging Face model class on the same weights. Its tokenizer is ours, which is the faster one."""
    from lm_eval.models.huggingface import HFLM

    class Peer(HFLM):
        def _create_tokenizer(self, *args, **kw):
            self.tokenizer = type("Tokenizer", (), {})()
            self.tokenizer.vocab_size, self.tokenizer.name_or_path = model.cfg.vocab_size, tokenizer.name
            for name in ("pad", "eos", "bos"):
                setattr(self.tokenizer, f"{name}_token_id", tokenizer.eot)
                setattr(self.tokenizer, f"{name}_token", "<|endoftext|>")
            self.tokenizer.chat_template = None

        def tok_encode(self, string, *args, **kw):
            return tokenizer.encode(string)

    llama = as_llama(model, tokenizer)
    return Peer(llama, backend="causal", batch_size=batch_size, max_length=model.cfg.block_size)


def best_batch_size(lm, requests, sizes, device):
    """The peer's fastest batch size, on a part of the requests, spread over all of them."""
    part, times = requests[:: max(1, len(requests) // 64)], {}
    for size in sizes:
        lm.batch_size_per_gpu = size
        lm.loglikelihood(part[:size], disable_tqdm=True)  # warm
        start = clock(device)
        lm.loglikelihood(part, disable_tqdm=True)
        times[size] = clock(device) - start
    return min(times, key=times.get)


def bench_eval(cfg, world):
    """Documents per second from texts to scores: tokens, forward passes, sums. Raises UserError if scores differ."""
    try:
        from lm_eval.api.instance import Instance
    except ImportError:
        raise UserError("the peer is missing: pip install -r requirements-peers.txt") from None
    path = checkpoint.find(cfg.words[1])
    tokenizer, model = load_tokenizer(path), checkpoint.load(path, device=world.device)
    model = model.to(getattr(torch, cfg.dtype))
    lm, rows = harness_class(model, tokenizer, 1), []
    about = cfg.evaluation()
    print(
        "| task | documents | eval.py, documents/s | HFLM, batch 1 | ratio | HFLM, best batch | ratio | largest gap |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in about.task:
        asked, where = ours.questions(name, about)
        asked = asked[:: max(1, len(asked) // cfg.limit)][: cfg.limit] if cfg.limit else asked
        pairs = [(c, q.delimiter + choice) for q in asked for c, choice in zip(q.contexts, q.choices, strict=True)]
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        best = best_batch_size(lm, requests, cfg.batch_sizes, world.device)

        def mine(asked=asked, name=name):
            documents = ours.rows_of(name, asked, tokenizer, model.cfg.block_size)
            done = [pair for part in ours.score(model, documents, about.tokens_per_pass(world)) for pair in part]
            return [s for _, scores in sorted(done) for s in scores]

        def theirs(size, requests=requests):
            lm.batch_size_per_gpu = size
            return lm.loglikelihood(requests, disable_tqdm=True)

        sides = {"eval.py": mine, "HFLM 1": lambda run=theirs: run(1), "HFLM": lambda run=theirs, n=best: run(n)}
        seconds, found = in_turn(sides, cfg.rounds, world.device)
        gap = max(abs(a[0] - b[0]) for a, b in zip(found["eval.py"], found["HFLM"], strict=True))
        if cfg.dtype == "float32" and not gap < 1e-3:
            raise UserError(f"{name}: the two sides' scores differ by {gap}, which is no rounding: nothing to compare")
        row = {"task": name, "documents": len(asked), "data": where, "batch_size": best, "largest_gap": gap}
        row |= {"seconds": seconds, "to_batch_1": ratio(seconds, "eval.py", "HFLM 1")}
        rows.append(row | {"to_best": ratio(seconds, "eval.py", "HFLM")})
        print(line(rows[-1]), flush=True)
    shape = {k: v for k, v in model.cfg.to_dict().items() if k != "value_mode"}
    return {"shape": shape, "dtype": cfg.dtype, "batch_tokens": about.tokens_per_pass(world), "tasks": rows}


def line(row):
    """A row of bench_eval's table."""
    rate = {side: f"{row['documents'] / statistics.median(times):,.1f}" for side, times in row["seconds"].items()}
    one, best = (
        f"{r['ratio']:.2f} ({r['least']:.2f}–{r['greatest']:.2f})" for r in (row["to_batch_1"], row["to_best"])
    )
    cells = [row["task"], f"{row['documents']:,}", rate["eval.py"], rate["HFLM 1"], one]
    cells += [f"{rate['HFLM']} ({row['batch_size']})", best, f"{row['largest_gap']:.0e}"]
    return "| " + " | ".join(cells) + " |"


KINDS = {"eval": bench_eval}


def versions(*names):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main():
    cfg = load(BenchConfig, positional="words", usage=__doc__)
    world = World(cfg.device)
    if world.size > 1:
        raise UserError("bench.py runs in one process; leave torchrun out")
    what, name = cfg.words[0], machine(world.device)
    result = KINDS[what](cfg, world)
    about = {"what": what, "processor": name} | environment() | versions("transformers", "lm-eval", "tiktoken")
    write_json(cfg.out_file or f"results/bench_{what}_{name}.json", about | result)


if __name__ == "__main__":
    run(main)
