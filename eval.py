"""Evaluate checkpoints: loss by domain, and zero-shot tasks as the field's reference harness (lm-eval) scores them.

    python eval.py --task hellaswag                                     the newest run below out/
    python eval.py out/vanilla out/resformer --task=table1,table5       the paper's tables, side by side
    torchrun --nproc_per_node=8 eval.py out/resformer --task=all        documents split over the ranks
    python eval.py out/resformer --task=piqa --data_dir=evals           local files, no network
    lm_eval --model hf --model_args pretrained=hf/svformer,trust_remote_code=True …    by the harness, see export.py

Tasks: loss (validation loss by domain), hellaswag openbookqa winogrande arc_challenge arc_easy piqa, lambada;
table1 = the six multiple-choice tasks, table5 = loss, all = everything. Prints Markdown tables and writes them to
out_file; writes eval.json and the score of every choice (samples_*.jsonl) beside each checkpoint. A call that was
interrupted goes on from these samples. Read next: tasks.py, for what is asked.
"""

from dataclasses import dataclass, field
from typing import Literal

from oldconfig import UserError, check_ranges, command_line, convert, run_main, setting
from tasks import (
    GROUPS,
    TABLE1,
    TASKS,
    Request,
    average,
    per_document,
    questions,
    requests_of,
    standard_error,
    task_record,
)


@dataclass(frozen=True)
class EvalConfig:
    """Every setting of eval.py."""

    runs: tuple[str, ...] = setting(
        (), "runs or checkpoint files, first the baseline; empty = the newest run", group="Models", positional=True
    )
    which: Literal["last", "best"] = setting("last", "checkpoint of a run: the last, or the best in validation")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "of the weights, auto = bf16 on a GPU that has it, else fp32; the softmax over logits is in fp32"
    )
    task: tuple[str, ...] = setting(("all",), "one or several with commas, see above", group="Tasks")
    data_dir: str = setting("", "folder of local task files; empty = from the hub through `datasets`")
    corpus: str = setting("", "prepared data for the loss; empty = what the run was trained on")
    limit: int = setting(0, "only so many documents of each task, from the first; 0 = all", least=0)
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", group="Machine")
    batch_tokens: int = setting(0, "tokens of a forward pass; 0 = 65,536 on a CUDA GPU, else 2,048", least=0)
    out_file: str = setting(
        "", "the tables; empty = eval.md in the run's folder, for several runs in its parent", group="Results"
    )

    def __post_init__(self):
        check_ranges(self)
        if not self.task:
            raise ValueError("name at least one --task, or leave it out for all")
        names = [name for group in self.task for name in GROUPS.get(group, (group,))]
        object.__setattr__(self, "task", tuple(dict.fromkeys(names)))  # each once
        unknown = [name for name in names if name not in GROUPS["all"]]
        if unknown:
            raise ValueError(f"unknown task {unknown[0]!r}; choose from {', '.join((*GROUPS['all'], *GROUPS))}")

    def tokens_per_pass(self, world):
        if self.batch_tokens:
            return self.batch_tokens
        return 65536 if world.kind == "cuda" else 2048  # more is slower on a CPU


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(EvalConfig, __doc__)

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import checkpoint
from checkpoint import load_tokenizer, trained_on, trained_with_bos
from data import COUNT, Corpus, Tokenizer, domain_losses
from layers import to_fp32
from oldfiles import append, hold, read_json, read_records, sha256, write_json, write_text
from report import markdown, plus_minus, progress
from runtime import Distributed, enough_memory, environment, weights_dtype
from tasks import EVALUATIONS

# files whose code decides scores
CODE = ("data.py", "eval.py", "hf.py", "model.py", "tasks.py", "value_modes.py")
SAMPLE = {"document": COUNT, "choice": COUNT, "log_prob": float, "greedy": bool}  # what is read of sample files
MAX_BRANCHES = 8  # most Rows in a Bundle: its mask grows with the square of its width


# ---- scores


class PrefixTree:
    """Stands in for a KVCache in `GPT.hidden`: one row of tokens that branches, a prefix and then its continuations.

    positions, branches: (B, T) int64: the place of each token in its own sequence, below `length`, and the number of
    its continuation, 0 for the prefix. A token attends to the prefix and to what precedes it in its own continuation,
    as if each sequence stood alone. So the prefix is computed once, and no number changes beyond rounding.
    """

    def __init__(self, positions, branches, length):
        self.token_positions, self.length = positions, length
        own, other = branches[:, :, None], branches[:, None, :]  # (B, T, 1), (B, 1, T)
        seen = ((own == other) | (other == 0)).tril()[:, None]  # (B, 1, T, T)
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)  # is added to the scores

    def end(self, T):
        return self.length

    def positions(self, T):
        return self.token_positions

    def extend(self, t, n, new):
        return new

    def advance(self, T):
        pass


class Bundle(NamedTuple):
    """Requests of one document that begin with the same tokens, computed as one row: those `shared` tokens once, then
    the rest of each Request. slots: (document, choice) of each Request."""

    shared: int
    requests: list[Request]
    slots: list[tuple[int, int]]

    @property
    def width(self):
        own = sum(len(request.ids) - 1 - self.shared for request in self.requests)  # the last token is not read
        return self.shared + own


def bundles_of(documents):
    """The Bundles of documents, which are lists of Requests. Those that share less than an eighth of the longest one
    stand alone: there the mask costs more than it saves."""
    bundles = []
    for i, requests in enumerate(documents):
        inputs = [request.ids[:-1] for request in requests]
        shared = len(os.path.commonprefix(inputs))  # of any lists, not only of paths
        size = MAX_BRANCHES if 8 * shared >= max(map(len, inputs)) else 1
        for k in range(0, len(requests), size):
            some = requests[k : k + size]
            bundles.append(Bundle(shared, some, [(i, k + j) for j in range(len(some))]))
    return bundles


def pack(bundles, batch_tokens):
    """Lists of Bundles of similar width, one list for each forward pass. The widest come first: what needs too much
    memory fails at once."""
    batch = []
    for bundle in sorted(bundles, key=lambda b: b.width, reverse=True):
        if batch and (len(batch) + 1) * batch[0].width > batch_tokens:
            yield batch
            batch = []
        batch.append(bundle)
    if batch:
        yield batch


def lay_out(batch):
    """Bundles as rows of one width, padded at the end with token 0, which no token of a Request sees.

    Returns token ids, positions and branches (see PrefixTree), each (B, T) int64; then for the n scored tokens, each
    (n,): the place in the flattened rows that predicts it, its id, and the number of its Request."""
    width = max(bundle.width for bundle in batch)
    ids, positions, branches = np.zeros((3, len(batch), width), np.int64)
    places, targets, owners = [], [], []
    for b, (shared, requests, _) in enumerate(batch):
        ids[b, :shared] = requests[0].ids[:shared]
        positions[b, :shared] = range(shared)
        start = shared
        for k, request in enumerate(requests, 1):
            own = request.ids[shared:-1]
            end = start + len(own)
            ids[b, start:end] = own
            positions[b, start:end] = range(shared, shared + len(own))
            branches[b, start:end] = k
            columns = [*range(shared), *range(start, end)]  # of the request's tokens
            n = request.n_scored
            places.append(b * width + np.array(columns[-n:]))
            targets.append(request.ids[-n:])
            owners.append(np.full(n, len(owners)))
            start = end
    return ids, positions, branches, np.concatenate(places), np.concatenate(targets), np.concatenate(owners)


def log_probs(model, x, places, targets):
    """Log-probability in nats of token targets[i] after hidden state x[places[i]], and whether it is the likeliest one,
    as arrays (n,). x: (N, C). The head is computed once for each place that is needed, some places at a time."""
    device = x.device
    needed, place_of_target = np.unique(places, return_inverse=True)
    x = x[torch.from_numpy(needed).to(device)]
    size = max(1, 2 ** (26 if device.type == "cpu" else 28) // model.cfg.vocab_size)  # 256 MiB or 1 GiB of fp32
    log_p = np.empty(len(targets))  # float64: sums of hundreds of nats are compared
    greedy = np.empty(len(targets), bool)
    for first in range(0, len(needed), size):
        logits = to_fp32(model.head(x[first : first + size]))  # (size, V)
        mine = np.flatnonzero((first <= place_of_target) & (place_of_target < first + size))  # targets predicted here
        rows = torch.from_numpy(place_of_target[mine] - first).to(device)
        ids = torch.from_numpy(targets[mine]).to(device)
        largest, likeliest = logits.max(dim=1)
        of_target = logits[rows, ids]
        total = logits.sub_(largest[:, None]).exp_().sum(dim=1)  # in place: logits are the largest tensor here
        of_target, shift, total = torch.stack((of_target, largest[rows], total[rows])).cpu().double().numpy()
        log_p[mine] = of_target - shift - np.log(total)
        greedy[mine] = (likeliest[rows] == ids).cpu().numpy()
    return log_p, greedy


@torch.inference_mode()
def score_batch(model, batch):
    """[((document, choice), sum of log-probabilities in nats, all tokens likeliest)] of a list of Bundles, in fp32 or
    better; sums are float64."""
    *inputs, places, targets, owners = lay_out(batch)
    length = int(inputs[1].max()) + 1  # before the copy: reading it from a GPU would wait for all work there
    idx, positions, branches = (torch.from_numpy(a).to(model.head.weight.device) for a in inputs)
    has_branches = any(len(bundle.requests) > 1 for bundle in batch)
    x = model.hidden(idx, PrefixTree(positions, branches, length) if has_branches else None)  # (B, T, C)
    each, greedy = log_probs(model, x.flatten(0, 1), places, targets)
    slots = [slot for bundle in batch for slot in bundle.slots]
    sums = np.bincount(owners, each, len(slots)).tolist()  # float64
    misses = np.bincount(owners, ~greedy, len(slots)).tolist()
    return [(slot, total, not missed) for slot, total, missed in zip(slots, sums, misses, strict=True)]


def score(model, documents, batch_tokens):
    """Yields, for each forward pass, what `score_batch` returns, the widest first. documents: the Requests of each."""
    for batch in pack(bundles_of(documents), batch_tokens):
        yield score_batch(model, batch)


# ---- samples: scores on disk


def json_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def collect_samples(path, header):
    """The records of a task's sample files, `path` and those of other ranks, if they have this header. They are moved
    into `path`, in place of what it held under another header."""
    records = []
    merged = []
    of_ranks = rf"{re.escape(path.stem)}(\.\d+)?\.jsonl"
    for file in path.parent.iterdir():
        if not re.fullmatch(of_ranks, file.name):
            continue
        found = read_records(file)
        if found and found[0] == header:
            records += [convert(record, SAMPLE, str(file)) for record in found[1:]]
            merged.append(file)
    write_text(path, json_lines([header, *records]))
    for file in merged:
        if file != path:
            file.unlink()
    return records


def gathered_scores(world, records):
    """{(document, choice): (sum of log-probabilities in nats, greedy)} of all ranks' sample records, on all ranks."""
    mine = {(r["document"], r["choice"]): (r["log_prob"], r["greedy"]) for r in records}
    scores = {}
    for of_rank in world.gather(mine):
        scores |= of_rank
    return scores


# ---- tasks


@dataclass
class Entry:
    """A checkpoint and its results. records: {task: what eval.json says of it}; correct: {task: what `per_document`
    returns}."""

    path: Path
    digest: str
    header: dict
    tokenizer: Tokenizer
    corpus: Corpus | None  # of --task=loss
    label: str = ""
    records: dict = field(default_factory=dict)
    correct: dict = field(default_factory=dict)


def open_samples(entry, name, where, cfg, world):
    """(this rank's file of samples, to be added to, the scores that earlier calls have left, as in `gathered_scores`).

    Scores are kept beside the checkpoint as JSON lines, one for each choice, after a hash of all that they follow from.
    Each rank has its own file; rank 0 of the next call collects them.
    """
    code = [sha256(Path(__file__).with_name(file)) for file in CODE]
    facts = json.dumps([entry.digest, where, cfg.dtype, world.kind, code])
    header = {"scores_follow_from": hashlib.sha256(facts.encode()).hexdigest()}
    path = entry.path.with_name(f"samples_{name}.{entry.path.stem}.jsonl")
    scores = gathered_scores(world, collect_samples(path, header) if world.rank == 0 else [])
    if world.rank > 0:
        path = path.with_suffix(f".{world.rank}.jsonl")
        write_text(path, json_lines([header]))
    return path, scores


def task_scores(entry, model, name, asked, documents, where, cfg, world):
    """[(sum of log-probabilities in nats, greedy) of each choice] of each document, on all ranks. What an earlier call
    has scored is not scored again, see `open_samples`."""
    path, scores = open_samples(entry, name, where, cfg, world)
    sizes = [sum(len(request.ids) for request in requests) for requests in documents]
    left = [i for i, requests in enumerate(documents) if any((i, j) not in scores for j in range(len(requests)))]
    mine = sorted(left, key=lambda i: sizes[i])[world.rank :: world.size]
    what = f"{entry.label}, {name}"
    if world.rank == 0:
        print(f"{what}: {sum(sizes[i] for i in left):,} of {sum(sizes):,} tokens to score", file=sys.stderr)
    records = []
    with progress(what, sum(sizes[i] for i in mine), "tok", world.rank == 0) as bar, open(path, "a") as file:
        for done in score(model, [documents[i] for i in mine], cfg.tokens_per_pass(world)):
            for (k, j), total, greedy in done:
                i = mine[k]
                bar.update(len(documents[i][j].ids))
                if (i, j) in scores:  # from before a kill
                    continue
                if not math.isfinite(total):
                    failed = f"{name}: the model's log-probabilities are not finite"
                    raise UserError(f"{failed}; its training failed, or {cfg.dtype} overflows: try --dtype=float32")
                record = sample_record(entry.label, name, i, j, asked[i], documents[i][j])
                record |= {"log_prob": total, "greedy": greedy}
                records.append(record)
                append(file, json_lines([record]))
    scores |= gathered_scores(world, records)
    return [[scores[i, j] for j in range(len(requests))] for i, requests in enumerate(documents)]


def sample_record(label, name, i, j, q, request):
    """What is kept of choice j of document i, before its score."""
    return {
        "checkpoint": label,
        "task": name,
        "document": i,
        "choice": j,
        "context": q.contexts[j],
        "continuation": q.delimiter + q.choices[j],
        "ids": request.ids[-request.n_scored :],
        "gold": q.gold,
    }


# ---- loss


@torch.inference_mode()
def run_loss(entry, model, cfg, world):
    """Sets the Entry's record of the loss over the whole validation split: every token but the first of each domain is
    predicted once.

    The record is what `domain_losses` returns, with perplexity {domain: exp(val)} and tokens {domain: number} added.
    """
    corpus = entry.corpus
    n_windows = max(1, cfg.tokens_per_pass(world) // corpus.block_size)  # in a forward pass
    parts = corpus.val_parts(n_windows)[world.rank :: world.size]
    n_bytes = corpus.tokenizer.token_bytes()
    sums = np.zeros((len(corpus.domains), 3))  # nats, tokens, bytes of text
    with progress(f"{entry.label}, loss", len(parts), "batch", world.rank == 0) as bar:
        for d, first, last in parts:
            x, y = corpus.val_batch(corpus.domains[d], first, last)
            _, loss = model(*world.to_device(world.pin_memory((x, y))))
            sums[d] += [loss.item() * y.size, y.size, n_bytes[y].sum()]
            bar.update(1)
    sums = world.sum(sums).numpy()
    if not np.isfinite(sums).all():
        failed = "loss: the model's loss is not finite; its training failed"
        raise UserError(f"{failed}, or {cfg.dtype} overflows: try --dtype=float32")
    record = domain_losses(corpus, sums)
    record["perplexity"] = {domain: float(np.exp(loss)) for domain, loss in record["val"].items()}
    record["tokens"] = {domain: int(n) for domain, n in zip(corpus.domains, sums[:, 1], strict=True)}
    entry.records["loss"] = record | {"data": corpus.val_hash}


# ---- checkpoints


def open_corpus(path, tokenizer, header, cfg, world):
    """The data of --task=loss: --corpus, or what the run was trained on."""
    data_dir, mixture = trained_on(path.parent, cfg.corpus, "the prepared data for --task=loss by --corpus")
    verify, bos = world.is_first_of_node, trained_with_bos(path.parent)
    corpus = Corpus(data_dir, header["config"].block_size, mixture=mixture, verify=verify, bos=bos)
    if corpus.tokenizer.hash != tokenizer.hash:
        raise UserError(f"{data_dir} was made with another tokenizer than {path}; name data of its own by --corpus")
    return corpus


def open_entries(cfg, world):
    """The Entries of all checkpoints, without results: what is wrong with one shows before any is scored."""
    entries = []
    paths = [checkpoint.find(name, cfg.which) for name in cfg.runs or ("",)]
    for path in paths:
        read_results(path.parent)  # fails now rather than after hours
        header, tokenizer = checkpoint.read_header(path), load_tokenizer(path)
        corpus = open_corpus(path, tokenizer, header, cfg, world) if "loss" in cfg.task else None
        entries.append(Entry(path, checkpoint.digest(path), header, tokenizer, corpus))
        if corpus and corpus.val_hash != entries[0].corpus.val_hash:
            how = "compare their losses on one --corpus, and only if both or none were trained with --bos"
            raise UserError(f"{paths[0]} and {path} have different data: {how}")
    for entry, label in zip(entries, short_labels(entries), strict=True):
        entry.label = label
    return entries


def short_labels(entries):
    """Names for the tables: the first of modes, folder names and paths that are all different."""
    for labels in ([e.header["mode"] for e in entries], [e.path.parent.name for e in entries]):
        if len(set(labels)) == len(labels):
            return labels
    return [str(e.path) for e in entries]


# ---- tables


def task_cells(pairs, averaged, sign=False):
    """Cells of {task: (mean, standard error)}, then of the mean over the tasks `averaged`, if there are any."""
    shown = list(pairs.values())
    if averaged:
        shown.append(average([pairs[t] for t in averaged]))
    return [plus_minus(*pair, sign=sign) for pair in shown]


def task_table(entries, metric, names):
    """The paper's Table 1 for one metric: checkpoints, differences from the first (paired by document), chance. "Avg"
    is the mean of the six tasks, or of those that have the metric, where all of them were asked for."""
    averaged = [t for t in TABLE1 if metric in TASKS[t].metrics]  # none of them has a perplexity
    if not set(averaged) <= set(names):
        averaged = []
    first, *others = entries
    rows = []
    for e in entries:
        pairs = {t: (e.records[t][metric], e.records[t][f"{metric}_stderr"]) for t in names}
        rows.append([e.label, *task_cells(pairs, averaged)])
    if metric != "perplexity":
        for e in others:
            gaps = {t: e.correct[t][metric] - first.correct[t][metric] for t in names}
            pairs = {t: (gap.mean(), standard_error(gap)) for t, gap in gaps.items()}
            rows.append([f"{e.label} − {first.label}", *task_cells(pairs, averaged, sign=True)])
        chance = {t: (first.records[t]["chance"], None) for t in names}
        rows.append(["chance", *task_cells(chance, averaged)])
    header = [metric, *names]
    documents = ["documents", *(f"{first.records[t]['n']:,}" for t in names)]
    if averaged:
        header.append("Avg")
        documents.append("")
    return markdown(header, [*rows, documents])


def loss_table(labels, title, found):
    """A table of losses: checkpoints, then differences from the first. found: {column: value} of each."""
    names = list(found[0])  # in the order of the first, whatever another mixture's is
    rows = [[label, *(plus_minus(values[c]) for c in names)] for label, values in zip(labels, found, strict=True)]
    for label, values in zip(labels[1:], found[1:], strict=True):
        gaps = [plus_minus(values[c] - found[0][c], sign=True) for c in names]
        rows.append([f"{label} − {labels[0]}", *gaps])
    return markdown([title, *names], rows)


def loss_tables(entries):
    """The paper's Table 5, then the same as perplexity and as bits per byte."""
    nats, perplexity, bits = [], [], []
    for e in entries:
        loss = e.records["loss"]
        nats.append(loss["val"] | {"Avg": loss["val_mean"], "mixture": loss["val_mixture"]})
        means = {"exp(Avg)": math.exp(loss["val_mean"]), "exp(mixture)": math.exp(loss["val_mixture"])}
        perplexity.append(loss["perplexity"] | means)
        bits.append(loss["bpb"] | {"Avg": loss["bpb_mean"]})
    labels = [e.label for e in entries]
    return [
        loss_table(labels, "loss (nats per token)", nats),
        loss_table(labels, "perplexity", perplexity),
        loss_table(labels, "bits per byte", bits),
    ]


def all_tables(entries, names):
    """All tables, as Markdown."""
    tables = []
    tasks = [t for t in TASKS if t in names]
    for metric in ("acc", "acc_norm", "perplexity"):
        having = [t for t in tasks if metric in TASKS[t].metrics]
        if having:
            tables.append(task_table(entries, metric, having))
    if "loss" in names:
        tables += loss_tables(entries)
    for e in entries:
        cut = [f"{e.records[t]['cut']:,} of {t}" for t in tasks if e.records[t]["cut"]]
        if cut:
            tables.append(f"{e.label}: longer than the block and cut on the left: {', '.join(cut)}")
    return "".join(table + "\n\n" for table in tables)


# ---- eval.json


def record_key(name, record):
    """The name of a task's record in eval.json, with --limit and --dtype where they are not the default: no result
    replaces one of another kind."""
    if record.get("limit"):  # a loss has none
        name += f" limit={record['limit']}"
    if record.get("dtype", "float32") != "float32":
        name += f" dtype={record['dtype']}"
    return name


def read_results(folder):
    """{checkpoint's file: {mode, step, sha256, results {task: record}, env}} from a run's eval.json, {} without one."""
    path = Path(folder) / "eval.json"
    if not path.exists():
        return {}
    return read_json(path, "a file of results of eval.py", EVALUATIONS)["checkpoints"]


def store_results(entry):
    """Add an Entry's records to the eval.json of its folder. Results of other weights under its name are dropped;
    those of other data are kept under a longer name."""
    about = {"mode": entry.header["mode"], "step": entry.header["step"], "sha256": entry.digest, "env": environment()}
    with hold(entry.path.parent, ".eval.lock", seconds=60):  # another call may score other tasks at the same time
        known = read_results(entry.path.parent)
        before = known.get(entry.path.name, {})
        results = before["results"] if before.get("sha256") == entry.digest else {}
        for name, record in entry.records.items():
            key = record_key(name, record)
            older = results.get(key, record)
            if older.get("data") != record["data"]:
                results[f"{key} data={older.get('data')}"] = older
            results[key] = record
        known[entry.path.name] = about | {"results": results}
        write_json(entry.path.parent / "eval.json", {"format": "nanoresformer-eval/1", "checkpoints": known})


def out_path(cfg, entries):
    """Where the tables go."""
    folder = entries[0].path.parent
    if any(e.path.parent != folder for e in entries):
        folder = folder.parent
    return cfg.out_file or folder / "eval.md"


# ---- a whole call


@enough_memory("set a smaller --batch_tokens")
def evaluate_checkpoint(entry, asked, cfg, world):
    """Score all tasks for an Entry. asked: {task: (Questions, where they are from)}."""
    model = checkpoint.load(entry.path, device=world.device, dtype=getattr(torch, cfg.dtype))
    documents = {}  # of all tasks before any is scored, because a choice may be longer than the model's block
    for name in asked:
        documents[name] = requests_of(name, asked[name][0], entry.tokenizer, model.cfg.block_size)
    for name in cfg.task:
        began = time.time()
        if name == "loss":
            run_loss(entry, model, cfg, world)
        else:
            task_questions, source = asked[name]
            results = task_scores(entry, model, name, task_questions, documents[name], source, cfg, world)
            entry.correct[name] = per_document(name, task_questions, results)
            entry.records[name] = task_record(task_questions, documents[name], entry.correct[name])
            entry.records[name] |= {"data": source, "limit": cfg.limit}
        entry.records[name] |= {"dtype": cfg.dtype, "seconds": round(time.time() - began, 3)}


def evaluate(entries, cfg, world):
    """All checkpoints on all tasks; returns the tables."""
    if not world.is_first_of_node:
        world.wait()  # until the first rank of each node has downloaded what all will read
    asked = {name: questions(name, cfg) for name in cfg.task if name != "loss"}
    if world.is_first_of_node:
        world.wait()
    for entry in entries:
        evaluate_checkpoint(entry, asked, cfg, world)
        if world.rank == 0:
            store_results(entry)
    return all_tables(entries, cfg.task)


def main(cfg: EvalConfig):
    world = Distributed(cfg.device)
    with world.connected():
        with world.together():
            cfg = dataclasses.replace(cfg, dtype=str(weights_dtype(cfg.dtype, world.kind)).removeprefix("torch."))
            entries = open_entries(cfg, world)
        tables = evaluate(entries, cfg, world)
        if world.rank == 0:
            print(tables, end="")
            write_text(out_path(cfg, entries), tables)
    world.close()


if __name__ == "__main__":
    run_main(main, SETTINGS)
