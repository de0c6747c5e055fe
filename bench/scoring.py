"""eval.py against lm-eval's Hugging Face class."""

import statistics

import torch

import checkpoint
import eval as ours
from bench.common import as_llama, clock, in_turn, ratio, spread
from checkpoint import load_tokenizer
from configurator import UserError


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

    llama = as_llama(model, tokenizer.eot)
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
    path, about = checkpoint.find(cfg.words[1]), cfg.evaluation()
    tokenizer, model = load_tokenizer(path), checkpoint.load(path, device=world.device)
    model = model.to(getattr(torch, about.dtype))
    lm, rows = harness_class(model, tokenizer, 1), []
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
        if about.dtype == "float32" and not gap < 1e-3:
            raise UserError(f"{name}: the two sides' scores differ by {gap}, which is no rounding: nothing to compare")
        row = {"task": name, "documents": len(asked), "data": where, "batch_size": best, "largest_gap": gap}
        row |= {"seconds": seconds, "to_batch_1": ratio(seconds, "eval.py", "HFLM 1")}
        rows.append(row | {"to_best": ratio(seconds, "eval.py", "HFLM")})
        print(line(rows[-1]), flush=True)
    shape = {k: v for k, v in model.cfg.to_dict().items() if k != "value_mode"}
    return {"shape": shape, "dtype": about.dtype, "batch_tokens": about.tokens_per_pass(world), "tasks": rows}


def line(row):
    """A row of bench_eval's table."""
    rate = {side: f"{row['documents'] / statistics.median(times):,.1f}" for side, times in row["seconds"].items()}
    one, best = spread(row["to_batch_1"]), spread(row["to_best"])
    cells = [row["task"], f"{row['documents']:,}", rate["eval.py"], rate["HFLM 1"], one]
    cells += [f"{rate['HFLM']} ({row['batch_size']})", best, f"{row['largest_gap']:.0e}"]
    return "| " + " | ".join(cells) + " |"
