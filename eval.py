"""Evaluate checkpoints: loss by domain, and zero-shot tasks as the field's standard harness (lm-eval) scores them.

    python eval.py --task=hellaswag                                     the newest run under out/
    python eval.py out/vanilla out/resformer --task=table1,table5       the paper's tables, side by side
    torchrun --nproc_per_node=8 eval.py out/resformer --task=all        documents split across the ranks
    python eval.py out/resformer --task=piqa --data_dir=evals           local files, no network
    python eval.py out/vanilla out/resformer --task=copying,repeat      what a model gains by copying

Tasks: loss (validation loss by domain), hellaswag openbookqa winogrande arc_challenge arc_easy piqa, lambada;
table1 = the six multiple-choice tasks, table5 = loss, all = all of these. copying and repeat are not in all.
Prints Markdown tables, writes eval.json beside each checkpoint, and the score of each choice into
samples_<task>.<checkpoint>.jsonl. Read first: common/tasks.py.
"""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from common import checkpoint
from common.copying import WINDOWS, group_table, groups_of, record_of, repeated, token_losses
from common.data import Corpus, Tokenizer, allow_open_files
from common.files import hold, sha256, write_record, write_text
from common.ranks import Distributed, enough_memory, environment, weights_dtype
from common.report import markdown, progress, side_by_side
from common.runs import RESULTS, read_results
from common.scoring import domain_losses, requests_of, rows_of, score
from common.tasks import GROUPS, TABLE1, TASKS, per_document, questions, task_record
from configurator import UserError, check_fields, run, setting

WINDOWED = ("copying", "repeat")  # tasks that score every token of some windows


@dataclass(frozen=True)
class EvalConfig:
    """Every setting of eval.py."""

    runs: tuple[str, ...] = setting((), "runs, files or exports, the baseline first", group="Models", positional=True)
    which: Literal["last", "best"] = setting("last", "a run's last checkpoint, or its best by validation loss")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "of weights; auto = bf16 on newer GPUs")
    task: tuple[str, ...] = setting(("all",), "tasks, see above", group="Tasks")
    data_dir: str = setting("", "folder of local task files; empty = from the hub through `datasets`")
    corpus: str = setting("", "prepared data for loss and copying; empty = what the run was trained on")
    limit: int = setting(0, "documents or windows of each task except loss, for a trial that writes nothing", least=0)
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    batch_tokens: int = setting(0, "tokens in a forward pass; 0 = 65,536 on a CUDA GPU, else 2,048", least=0)

    def __post_init__(self):
        check_fields(self)
        names = [name for group in self.task for name in GROUPS.get(group, (group,))]
        for name in names:
            if name not in (*GROUPS["all"], *WINDOWED):
                raise UserError(f"unknown task {name}; choose from {', '.join((*GROUPS['all'], *WINDOWED, *GROUPS))}")
        object.__setattr__(self, "task", tuple(dict.fromkeys(names)))  # each once
        if self.data_dir and not set(self.task) & TASKS.keys():
            raise UserError("data_dir is for the files of zero-shot tasks; loss and copying use --corpus")


@dataclass
class Entry:
    """A checkpoint, and what was found about it."""

    path: Path
    header: dict
    tokenizer: Tokenizer
    digest: str
    corpus: Corpus | None = None  # of the tasks loss and copying
    correct: dict = field(default_factory=dict)  # {task: what `per_document` returns}
    scored: dict = field(default_factory=dict)  # {task: what `score_windows` returns}
    records: dict = field(default_factory=dict)  # {task: what eval.json says}


def refuse_tokenizers(entries):
    """Losses that cannot be compared are refused before the work."""
    names = ", ".join(str(entry.path) for entry in entries)
    if len({entry.tokenizer.hash for entry in entries}) > 1:
        how = "name one at a time, and compare bits per byte (bpb in eval.json)"
        raise UserError(f"{names} have different tokenizers, so their losses per token cannot be compared; {how}")


def open_corpora(entries, cfg, world):
    """Give each Entry the data of loss and copying: --corpus, or what its run was trained on. It must be the same."""
    for entry in entries:
        folder, block_size = entry.path.parent, entry.header["config"].block_size
        data_dir, mixture = checkpoint.trained_on(folder, cfg.corpus, "prepared data with --corpus")
        verify, bos = world.is_first_of_node, checkpoint.trained_with_bos(folder)
        entry.corpus = Corpus(data_dir, block_size, mixture=mixture, verify=verify, bos=bos, splits=("val",))
        if entry.corpus.tokenizer.hash != entry.tokenizer.hash:
            raise UserError(f"{data_dir} and {folder} have different tokenizers; name other data with --corpus")
        allow_open_files(2 * len(entry.corpus.domains) * len(entries))  # all of them stay open
    if len({entry.corpus.val_hash for entry in entries}) > 1:
        names = ", ".join(str(entry.path) for entry in entries)
        how = "compare their losses on one --corpus, and only if all or none were trained with --bos"
        raise UserError(f"{names} have different validation data: {how}")


def windows_of(name, entries, cfg):
    """The windows x, y (n, T) of a task that scores every token, as long as the shortest block of the models."""
    length = min(entry.header["config"].block_size for entry in entries)
    tokenizer, data = entries[0].tokenizer, entries[0].corpus
    if name == "repeat":
        return repeated(min(cfg.limit or WINDOWS, WINDOWS), length, tokenizer.n_vocab, tokenizer.end)
    corpus = Corpus(data.dir, length, mixture=data.mixture, verify=False, bos=data.bos, splits=("val",))
    numbers = {domain: corpus.windows("val", domain) for domain in corpus.domains}
    parts = [corpus.val_batch(d, 0, min(n, cfg.limit or n)) for d, n in numbers.items() if n]
    if not parts:
        raise UserError(f"the validation text of {data.dir} is shorter than a window of {length} tokens; prepare more")
    x, y = zip(*parts, strict=True)
    return np.concatenate(x), np.concatenate(y)


# ---- what a model answers


def require_finite(values, name):
    if not np.isfinite(values).all():
        remedy = "its training failed, or the dtype overflows: try --dtype=float32"
        raise UserError(f"{name}: the model's log-probabilities are not finite; {remedy}")


def score_task(model, name, documents, cfg, world):
    """For each document an array (choices, 2): the sum of log-probabilities in nats, and 1 if each token is the
    likeliest one, else 0. The ranks share the work, and all of them get the scores."""
    sizes = [len(requests) for requests in documents]
    rows = rows_of(documents)[world.rank :: world.size]

    # Rows hold parts of documents, so we add up by the number of the choice.
    sums = np.zeros((sum(sizes), 2))  # nats, and tokens that are not the likeliest ones
    with progress(name, sum(row.scored.shape[1] for row in rows), "tok", world.rank == 0) as bar:
        for owners, log_p, is_likeliest in score(model, rows, cfg.batch_tokens):
            require_finite(log_p, name)
            np.add.at(sums, owners, np.stack((log_p, ~is_likeliest), axis=1))
            bar.update(len(owners))
    # One rank has the sums of a choice, the others have zeros.
    sums = world.sum(sums).numpy()
    sums[:, 1] = sums[:, 1] == 0
    return np.split(sums, np.cumsum(sizes)[:-1])


def score_windows(model, name, windows, cfg, world):
    """Nats of each target of some windows, and whether it is the likeliest token: (2, n, T). The ranks share them."""
    x, y = windows
    mine = slice(world.rank, None, world.size)
    both = np.zeros((2, *y.shape))
    with progress(name, y[mine].size, "tok", world.rank == 0) as bar:
        both[:, mine] = token_losses(model, x[mine], y[mine], cfg.batch_tokens, bar)
    both = world.sum(both).numpy()
    require_finite(both, name)
    return both


def write_samples(path, asked, scores):
    """One JSON line for each choice."""
    lines = []
    for i, (q, of_choices) in enumerate(zip(asked, scores, strict=True)):
        for j, (log_prob, greedy) in enumerate(of_choices.tolist()):
            sample = {"document": i, "choice": j, "gold": q.gold, "context": q.contexts[j]}
            sample |= {"continuation": q.delimiter + q.choices[j], "log_prob": log_prob, "greedy": greedy == 1}
            lines.append(json.dumps(sample) + "\n")
    write_text(path, "".join(lines))


@torch.inference_mode()
def loss_record(name, corpus, model, cfg, world):
    """The record of the loss in eval.json, over the whole validation split: every token once, but not a domain's first.
    name: what messages call this."""
    n_windows = max(1, cfg.batch_tokens // corpus.block_size)  # in a forward pass
    parts = corpus.val_parts(n_windows)[world.rank :: world.size]
    n_bytes = corpus.tokenizer.token_bytes()
    sums = np.zeros((len(corpus.domains), 3))  # nats, tokens, bytes of text
    with progress(name, len(parts), "batch", world.rank == 0) as bar:
        for d, first, last in parts:
            x, y = corpus.val_batch(corpus.domains[d], first, last)
            _, loss = model(*world.to_device((x, y)))
            sums[d] += [loss.item() * y.size, y.size, n_bytes[y].sum()]
            bar.update(1)

    # Each rank has its share of the windows.
    sums = world.sum(sums).numpy()
    require_finite(sums, name)
    return domain_losses(corpus, sums) | {"data": corpus.val_hash}


def store(entry, name):
    """Put a task's record into eval.json. Those of other tasks and checkpoints stay."""
    about = {"mode": entry.header["mode"], "step": entry.header["step"], "sha256": entry.digest, "env": environment()}
    with hold(entry.path.parent, ".eval.lock", seconds=60):
        found = read_results(entry.path.parent)
        before = found.get(entry.path.name, {})
        results = before["results"] if before.get("sha256") == entry.digest else {}  # else they are of other weights
        found[entry.path.name] = about | {"results": results | {name: entry.records[name]}}
        write_record(entry.path.with_name("eval.json"), RESULTS, found)


@enough_memory("set a smaller --batch_tokens")
def evaluate(entry, asked, groups, cfg, world):
    """Score the checkpoint of an Entry on all tasks. asked, groups: {task: its Questions or windows, and the windows'
    groups}. Each task is written as soon as it is done."""
    path, stores = entry.path, world.rank == 0 and not cfg.limit  # a trial must not replace a result
    if stores and not os.access(path.parent, os.W_OK):
        stores = False
        print(f"note: {path.parent} is not writable, so its results are not stored", flush=True)
    model = checkpoint.load(path, device=world.device, dtype=getattr(torch, cfg.dtype))
    for name in cfg.task:
        began = time.time()
        if name == "loss":
            record = loss_record(f"{path.parent}, loss", entry.corpus, model, cfg, world)
        elif name in WINDOWED:
            entry.scored[name] = score_windows(model, f"{path.parent}, {name}", asked[name], cfg, world)
            record = record_of(groups[name], *entry.scored[name])
            record["data"] = entry.corpus.val_hash if name == "copying" else "random"
            record["ln_v"] = math.log(entry.tokenizer.n_vocab)  # the loss of a model that knows nothing
        else:
            of_task, where = asked[name]
            documents = requests_of(name, of_task, entry.tokenizer, model.cfg.block_size)
            scores = score_task(model, f"{path.parent}, {name}", documents, cfg, world)
            entry.correct[name] = per_document(name, of_task, scores)
            record = task_record(entry.correct[name]) | {"data": where}
            if stores:
                write_samples(path.with_name(f"samples_{name}.{path.stem}.jsonl"), of_task, scores)
        entry.records[name] = record | {"dtype": cfg.dtype, "seconds": round(time.time() - began, 3)}
        if stores:
            store(entry, name)


# ---- the tables


def tables(entries, names, groups):
    """All tables, as Markdown. eval.json has more, such as bits per byte and LAMBADA's perplexity. groups: {task: those
    of its windows}."""
    # The modes name the rows, if they differ.
    labels = [e.header["mode"] for e in entries]
    if len(set(labels)) < len(labels):
        labels = [str(e.path) for e in entries]
    # The paper's Table 1. "Avg" is the mean over those of its six tasks that were asked for and have the metric.
    for metric in ("acc", "acc_norm"):
        having = [name for name in TASKS if name in names and metric in TASKS[name].metrics]
        averaged = [name for name in having if name in TABLE1]
        values = [{name: e.correct[name][metric] for name in having} for e in entries]
        if having:
            header = [metric, *having, *(["Avg"] if averaged else [])]
            yield markdown(header, side_by_side(labels, values, averaged))
    # Table 5: nats per token by domain, their plain mean, and their mean with the weights of the mixture.
    if "loss" in names:
        values = []
        for loss in (e.records["loss"] for e in entries):
            nats = loss["val"] | {"Avg": loss["val_mean"], "mixture": loss["val_mixture"]}
            values.append({column: np.array([number]) for column, number in nats.items()})
        yield markdown(["loss (nats per token)", *values[0]], side_by_side(labels, values))
    # Where copying helps, and whether a model copies.
    for name in [name for name in WINDOWED if name in names]:
        for title, of_title in groups[name].items():
            yield group_table(f"loss by {title}", of_title, labels, [e.scored[name][0] for e in entries])
            if name == "repeat":
                yield group_table(f"accuracy by {title}", of_title, labels, [e.scored[name][1] for e in entries])
    steps = [e.header["step"] for e in entries]
    if len(set(steps)) > 1:
        yield f"note: these models trained for different numbers of steps: {', '.join(map(str, steps))}"


def main(cfg: EvalConfig):
    world = Distributed(cfg.device)
    dtype = str(weights_dtype(cfg.dtype, world.kind)).removeprefix("torch.")
    batch_tokens = cfg.batch_tokens or (65536 if world.kind == "cuda" else 2048)  # on a CPU more is slower
    cfg = dataclasses.replace(cfg, dtype=dtype, batch_tokens=batch_tokens)
    paths = [checkpoint.find(name, cfg.which) for name in cfg.runs or ("",)]
    entries = [
        Entry(path, checkpoint.read_header(path), checkpoint.load_tokenizer(path), sha256(path)) for path in paths
    ]
    if {"loss", *WINDOWED} & set(cfg.task):
        refuse_tokenizers(entries)
    if {"loss", "copying"} & set(cfg.task):
        open_corpora(entries, cfg, world)
    asked = {name: questions(name, cfg.data_dir, cfg.limit) for name in cfg.task if name in TASKS}
    asked |= {name: windows_of(name, entries, cfg) for name in cfg.task if name in WINDOWED}
    groups = {name: groups_of(name, *asked[name]) for name in cfg.task if name in WINDOWED}
    for entry in entries:
        evaluate(entry, asked, groups, cfg, world)
    for table in tables(entries, cfg.task, groups):
        if world.rank == 0:
            print(table, end="\n\n")
    world.close()


if __name__ == "__main__":
    run(main, __doc__)
