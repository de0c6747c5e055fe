"""eval.py against HFLM, lm-eval's own class for Hugging Face models: documents/s from texts to scores.

    python -m bench.scoring out/vanilla --data_dir=evals --limit=200

Both have the same weights and our tokenizer. HFLM runs at its default batch size, 1, and at each of batch_sizes, of
which the fastest is taken.
"""

from dataclasses import dataclass
from typing import Literal

from bench import BenchConfig
from configurator import UserError, command_line, need, run_main, setting
from tasks import TABLE1, TASKS


@dataclass(frozen=True)
class ScoringConfig(BenchConfig):
    """Every setting of this benchmark."""

    run: str = setting("out/vanilla", "a run of mode vanilla, or a checkpoint's file", positional=True, group="Work")
    task: tuple[Literal[*TASKS], ...] = setting(TABLE1, "tasks, with commas")
    data_dir: str = setting("", "folder of local task files; empty = from the hub")
    limit: int = setting(200, "documents of each task, spread over all of it; 0 = all", least=0)
    batch_tokens: int = setting(0, "eval.py's setting; 0 = its own choice", least=0)
    batch_sizes: tuple[int, ...] = setting((4, 16, 64), "of HFLM, of which the fastest is taken", least=1)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of weights")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(ScoringConfig, __doc__)

import dataclasses
import functools
import statistics
import sys
from types import SimpleNamespace

import torch

import checkpoint
from bench.common import in_turn, lines_table, ratio, spread, write_results
from eval import EvalConfig, questions, requests_of, score
from hf import to_llama
from runtime import only_process


def harness_model(model, tokenizer):
    """An HFLM with the weights of a vanilla model of ours, and our tokenizer."""
    need("lm_eval")
    from lm_eval.models.huggingface import HFLM

    class Peer(HFLM):
        def _create_tokenizer(self, *args, **kw):
            ids = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), tokenizer.eot)
            self.tokenizer = SimpleNamespace(**ids, vocab_size=model.cfg.vocab_size, chat_template=None)
            self.tokenizer.pad_token = self.tokenizer.eos_token = self.tokenizer.name_or_path = "ours"

        def tok_encode(self, string, *args, **kw):
            return tokenizer.encode(string)

    llama = to_llama(model, tokenizer.eot)
    return Peer(llama, backend="causal", batch_size=1, max_length=model.cfg.block_size)


def harness_scores(lm, requests, batch_size):
    """[(sum of log-probabilities in nats, all tokens likeliest)] of the harness's requests."""
    lm.batch_size_per_gpu = batch_size
    return lm.loglikelihood(requests, disable_tqdm=True)


def our_scores(name, asked, model, tokenizer, batch_tokens):
    """The same of all choices of a task's Questions, by eval.py."""
    documents = requests_of(name, asked, tokenizer, model.cfg.block_size)
    done = [found for part in score(model, documents, batch_tokens) for found in part]
    return [(total, greedy) for _, total, greedy in sorted(done)]


def time_task(cfg, name, model, tokenizer, lm, settings, world):
    """The row of one task. Raises UserError if in fp32 the two sides' scores differ by more than rounding."""
    asked, where = questions(name, settings)
    if cfg.limit:
        n = min(cfg.limit, len(asked))
        asked = [asked[i * len(asked) // n] for i in range(n)]
    instance = need("lm_eval.api.instance").Instance
    pairs = [(c, q.delimiter + choice) for q in asked for c, choice in zip(q.contexts, q.choices, strict=True)]
    requests = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    tokens_per_pass = settings.tokens_per_pass(world)
    sides = {"eval.py": functools.partial(our_scores, name, asked, model, tokenizer, tokens_per_pass)}
    for size in (1, *cfg.batch_sizes):
        sides[f"HFLM {size}"] = functools.partial(harness_scores, lm, requests, size)
    seconds, results = in_turn(sides, cfg.rounds, world.device)
    gap = 0.0
    for size in (1, *cfg.batch_sizes):
        for ours, theirs in zip(results["eval.py"][-1], results[f"HFLM {size}"][-1], strict=True):
            gap = max(gap, abs(ours[0] - theirs[0]))
    if cfg.dtype == "float32" and not gap < 1e-3:
        raise UserError(f"{name}: the scores of eval.py and HFLM differ by {gap}, which is more than rounding")
    best = min(cfg.batch_sizes, key=lambda size: statistics.median(seconds[f"HFLM {size}"]))
    row = dict(task=name, documents=len(asked), data=where, batch_size=best, largest_gap=gap, seconds=seconds)
    row["to_batch_1"] = ratio(seconds, "eval.py", "HFLM 1")
    row["to_best"] = ratio(seconds, "eval.py", f"HFLM {best}")
    return row


def scoring_table(rows):
    """Markdown of documents/s by task, with the ratios (median, least–greatest of a round) to HFLM."""
    lines = []
    for row in rows:
        speed = row["documents"] / statistics.median(row["seconds"]["eval.py"])
        line = {"task": row["task"], "documents": f"{row['documents']:,}", "eval.py, documents/s": f"{speed:,.1f}"}
        line["to HFLM, batch 1"] = spread(row["to_batch_1"])
        line["to HFLM, best batch"] = f"{spread(row['to_best'])}, batch {row['batch_size']}"
        line["largest gap"] = f"{row['largest_gap']:.0e}"
        lines.append(line)
    return lines_table(lines)


def main(cfg: ScoringConfig):
    world = only_process(cfg.device)
    path = checkpoint.find(cfg.run)
    tokenizer = checkpoint.load_tokenizer(path)
    model = checkpoint.load(path, device=world.device).to(getattr(torch, cfg.dtype))
    lm = harness_model(model, tokenizer)
    settings = EvalConfig(task=cfg.task, data_dir=cfg.data_dir, batch_tokens=cfg.batch_tokens, dtype=cfg.dtype)
    rows = []
    for name in cfg.task:
        print(name, file=sys.stderr, flush=True)
        rows.append(time_task(cfg, name, model, tokenizer, lm, settings, world))
    print(scoring_table(rows))
    result = {
        "shape": dataclasses.asdict(model.cfg),
        "dtype": cfg.dtype,
        "batch_tokens": settings.tokens_per_pass(world),
    }
    write_results("eval", {**result, "tasks": rows}, world.device, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
