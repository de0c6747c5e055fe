"""Evaluate checkpoints: loss per domain, and zero-shot tasks as the field's reference harness scores them (lm-eval).

    python eval.py --task hellaswag                                     the latest checkpoint of out/resformer
    python eval.py out/vanilla out/resformer --task=table1,table5       the paper's tables, side by side
    torchrun --nproc_per_node=8 eval.py out/resformer --task=all        documents split over the ranks
    python eval.py out/resformer --task=piqa --data_dir=evals           local files, no network
    python eval.py out/resformer --task=mmlu --backend=lm_eval          any task of the harness, by the harness

Tasks: loss (validation loss per domain), hellaswag openbookqa winogrande arc_challenge arc_easy piqa, lambada;
table1 = the six multiple-choice tasks, table5 = loss, all = everything. Prints Markdown tables and writes them to
out_file; writes eval.json beside each checkpoint. A rerun after an interruption goes on from what is already scored.
"""

import contextlib
import hashlib
import json
import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

import checkpoint
from checkpoint import load_tokenizer, trained_on
from configurator import UserError, command_line, run_main, setting
from data import Corpus, Tokenizer
from files import read_json, sha256, write_atomic, write_json
from model import to_fp32
from report import markdown, plus_minus, progress
from runtime import Distributed, environment
from sample import generate
from tasks import GROUPS, HARNESS_NAMES, SHOT_SEED, TABLE1, TASKS, question, read_rows

FORMAT = "nanoresformer-eval/1"


@dataclass(frozen=True)
class EvalConfig:
    """Every setting of eval.py."""

    runs: tuple[str, ...] = setting(
        ("out/resformer",), "runs' folders, or checkpoints' files; the first is the baseline", positional=True
    )
    task: tuple[str, ...] = setting(("all",), "one or several with commas, see above")
    which: Literal["last", "best"] = setting("last", "which checkpoint of a run: last, or best in validation")
    data_dir: str = setting("", "folder of local task files, see README; empty = from the hub through `datasets`")
    corpus: str = setting("", "prepared data for the loss; empty = what the run was trained on")
    limit: int = setting(0, "only the first documents of each task; 0 = all")
    num_fewshot: int | None = setting(
        None, "solved examples before each question, drawn as the harness does; none = 0, in lm_eval what the task says"
    )
    batch_tokens: int = setting(0, "tokens of a forward pass; 0 = 2,048 on a CPU (more is slower), 65,536 on a GPU")
    share: bool = setting(True, "compute what the choices of a question have in common once; it changes no score")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of weights; log-probabilities are fp32")
    log_samples: str = setting("", "file that gets one JSON line for each choice of each document")
    out_file: str = setting(
        "", "the tables as Markdown; empty = eval.md in the run's folder, of several in their parent"
    )
    backend: Literal["native", "lm_eval"] = setting("native", "lm_eval: the harness itself, see README")

    def __post_init__(self):
        for name in ("limit", "num_fewshot", "batch_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not self.runs or not self.task:
            raise ValueError("name at least one run and one task")
        names = tuple(dict.fromkeys(t for name in self.task for t in GROUPS.get(name, (name,))))
        object.__setattr__(self, "task", names)
        if self.backend == "native":
            object.__setattr__(self, "num_fewshot", self.num_fewshot or 0)
            if unknown := [t for t in names if t not in GROUPS["all"]]:
                known = ", ".join((*GROUPS["all"], *GROUPS))
                raise ValueError(f"unknown task {unknown[0]!r}; known are {known}; --backend=lm_eval has the harness's")
        elif "loss" in names or self.log_samples:
            raise ValueError("loss and log_samples are of --backend=native; name the harness's tasks, as --task=table1")

    def tokens_per_pass(self, world):
        return self.batch_tokens or (65536 if world.kind == "cuda" else 2048)


def questions(name, cfg):
    """(the Questions of a task, few-shot examples in their contexts, where its rows are from)."""
    task = TASKS[name]
    rows, where = read_rows(name, task.split, cfg.data_dir)
    found = [question(name, row, f"{where}, row {i}") for i, row in enumerate(rows[: cfg.limit or None])]
    if cfg.num_fewshot:
        pool, origin = read_rows(name, task.shots_from, cfg.data_dir)
        if len(pool) <= cfg.num_fewshot:
            raise UserError(f"{name} has {len(pool)} examples, not the {cfg.num_fewshot + 1} that num_fewshot asks for")
        draw = random.Random(SHOT_SEED)
        for i, (row, q) in enumerate(zip(rows, found, strict=False)):
            shots = draw_shots(draw, pool, row, cfg.num_fewshot, task.split)
            found[i] = add_shots(q, [question(name, pool[k], f"{origin}, row {k}") for k in shots])
    return found, where


def draw_shots(draw, pool, row, n, split):
    """n places in the pool. For tasks without a test split, the harness draws one more and drops the row itself."""
    everything = range(len(pool))
    if split == "test":
        return draw.sample(everything, n)
    kept = [k for k in draw.sample(everything, n + 1) if pool[k] != row][:n]
    return kept if len(kept) == n else draw.sample([k for k in everything if pool[k] != row], n)


def add_shots(q, shots):
    """The Question q after solved ones, which the harness joins by a space in every task: LAMBADA's have two there."""
    text = "".join(f"{s.contexts[s.gold]} {s.choices[s.gold]}\n\n" for s in shots)
    return q._replace(contexts=tuple(text + context for context in q.contexts))


class PrefixTree:
    """For `GPT.hidden` in a cache's place: rows of tokens that fork, a beginning and then each of its continuations.

    positions, forks: (B, T) int64: where a token is in its own sequence, and the number of its continuation, 0 in the
    beginning that all share. A token attends to the beginning and to what is before it in its own continuation, as if
    each sequence stood alone. It changes no number beyond rounding, and a beginning is computed once.
    """

    def __init__(self, positions, forks):
        self.token_positions, self.last = positions, int(positions.max())
        here, there = forks[:, :, None], forks[:, None, :]  # (B, T, 1), (B, 1, T)
        seen = ((here == there) | (there == 0)).tril()[:, None]  # (B, 1, T, T)
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)  # to be added to scores

    def end(self, T):
        return self.last + 1

    def positions(self, T):
        return self.token_positions

    def extend(self, t, n, new):
        return new

    def advance(self, T):
        pass


class Row(NamedTuple):
    """A choice as the model sees it: token ids, the last n of which are scored; cut: it was longer than the block."""

    ids: list[int]
    n: int
    cut: bool = False


def fit(context, scored, block_size):
    """A Row of context and scored ids; the block holds block_size + 1, the last of which is only predicted. The context
    loses what is too much on its left. Raises ValueError if the scored ids alone are too many."""
    if len(scored) > block_size:
        raise ValueError(
            f"{len(scored)} tokens are scored, but the block has {block_size}; take a model of a longer one"
        )
    if not scored:
        raise ValueError("no token of it is left to be scored")
    ids = context + scored
    return Row(ids[-(block_size + 1) :], len(scored), len(ids) > block_size + 1)


def encode(tokenizer, context, scored):
    """Token ids of a context and of the text scored after it, which the two share at their border as the harness does:
    spaces that end the context belong to the scored text, and its tokens are those of both minus as many as the context
    has alone. Without a context, the end of a document is one. Source: lm_eval/api/model.py, TemplateLM."""
    bare = context.rstrip()
    scored, context = context[len(bare) :] + scored, bare
    if not context:
        return [tokenizer.eot], tokenizer.encode(scored)
    ids, whole = tokenizer.encode(context), tokenizer.encode(context + scored)
    return ids, whole[len(ids) :]


def rows_of(name, asked, tokenizer, block_size):
    """For each Question the Rows of its choices."""
    found = []
    for i, q in enumerate(asked):
        try:
            pairs = [(c, q.delimiter + choice) for c, choice in zip(q.contexts, q.choices, strict=True)]
            found.append([fit(*encode(tokenizer, *pair), block_size) for pair in pairs])
        except ValueError as e:
            raise UserError(f"{name}, document {i}: {e}") from None
    return found


class Unit(NamedTuple):
    """Rows that begin with the same `shared` tokens, to be computed as one: those, then each row's own tokens."""

    shared: int
    rows: list[Row]
    slots: list[tuple[int, int]]  # (document, choice) of each row

    @property
    def width(self):
        return self.shared + sum(len(row.ids) - 1 - self.shared for row in self.rows)  # the last token is not read


def units_of(documents, share):
    """Units of documents, a list of lists of Rows: what a document's rows have in common at their start is `shared`, if
    that is an eighth of the longest or more; else rows stand alone, all shared. Eight rows at most: each token's mask
    spans the unit."""
    units = []
    for i, rows in enumerate(documents):
        ends = [row.ids[:-1] for row in rows]
        low, high = min(ends), max(ends)  # in the order of lists: these two have the least in common
        same = next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
        slots = [(i, j) for j in range(len(rows))]
        if share and 8 * same >= max(map(len, ends)):
            units += [Unit(same, rows[k : k + 8], slots[k : k + 8]) for k in range(0, len(rows), 8)]
        else:
            units += [Unit(len(end), [row], [slot]) for end, row, slot in zip(ends, rows, slots, strict=True)]
    return units


def batches(units, batch_tokens):
    """Lists of units of similar width, one for each forward pass, widest first: what is too much fails at once."""
    batch = []
    for unit in sorted(units, key=lambda u: u.width, reverse=True):
        if batch and (len(batch) + 1) * batch[0].width > batch_tokens:
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def lay_out(batch):
    """Units as rows of one width: token ids, positions and forks (see PrefixTree), each (B, T) int64, and the scored
    places in the flattened rows (n,), the tokens to come there (n,), the number of the Row they belong to (n,). Token 0
    fills up the ends, where nothing that is scored attends to."""
    ids, positions, forks = np.zeros((3, len(batch), max(u.width for u in batch)), np.int64)
    places, targets, owners, number = [], [], [], 0
    for b, unit in enumerate(batch):
        ids[b, : unit.shared] = unit.rows[0].ids[: unit.shared]
        positions[b, : unit.shared] = range(unit.shared)
        end = unit.shared
        for k, row in enumerate(unit.rows):
            own = row.ids[unit.shared : -1]
            here = slice(end, end + len(own))
            ids[b, here], positions[b, here], forks[b, here] = own, range(unit.shared, unit.shared + len(own)), k + 1
            at = np.arange(len(row.ids) - 1 - row.n, len(row.ids) - 1)  # positions that predict the scored tokens
            places.append(b * ids.shape[1] + np.where(at < unit.shared, at, at - unit.shared + end))
            targets.append(row.ids[-row.n :])
            owners.append(np.full(row.n, number))
            end, number = end + len(own), number + 1
    return ids, positions, forks, *map(np.concatenate, (places, targets, owners))


def log_probs(model, x, places, targets):
    """Log-probability in nats of token targets[i] after hidden state x[places[i]], and whether it is the likeliest, as
    arrays (n,). x (N, C). The head is computed once for each place, in chunks of rows, and nowhere else."""
    unique, which = np.unique(places, return_inverse=True)
    order, parts = np.argsort(which, kind="stable"), []
    which = which[order]  # targets by the place they come after
    x = x[torch.from_numpy(unique).to(x.device)]
    size = max(1, 2 ** (26 if x.device.type == "cpu" else 28) // model.cfg.vocab_size)  # 256 MiB or 1 GiB of fp32
    for first in range(0, len(unique), size):
        z = to_fp32(model.head(x[first : first + size]))  # (size, V)
        mine = slice(*np.searchsorted(which, (first, first + size)))
        rows, ids = (torch.from_numpy(a).to(x.device) for a in (which[mine] - first, targets[order[mine]]))
        top, picked = z.amax(dim=1), z[rows, ids]
        greedy = (picked == top[rows]).to(z.dtype)
        tied = greedy.nonzero()[:, 0]  # few; the first of equal ones is the likeliest
        greedy[tied] = (z[rows[tied]].argmax(dim=1) == ids[tied]).to(z.dtype)
        norm = z.sub_(top[:, None]).exp_().sum(dim=1)
        parts.append(torch.stack((picked, top[rows], norm[rows], greedy)))
    found = np.empty((4, len(places)))  # float64: what is compared are sums of hundreds of nats
    found[:, order] = torch.cat(parts, dim=1).cpu().numpy()
    picked, top, norm, greedy = found
    return picked - top - np.log(norm), greedy > 0


@torch.inference_mode()
def score_batch(model, batch):
    """[((document, choice), sum of log-probabilities in nats, all tokens likeliest)] of a list of units."""
    *inputs, places, targets, owners = lay_out(batch)
    idx, positions, forks = (torch.from_numpy(a).to(model.head.weight.device) for a in inputs)
    x = model.hidden(idx, PrefixTree(positions, forks) if any(len(u.rows) > 1 for u in batch) else None)  # (B, T, C)
    each, greedy = log_probs(model, x.flatten(0, 1), places, targets)
    slots = [slot for unit in batch for slot in unit.slots]
    sums = np.bincount(owners, each, len(slots))  # float64
    wrong = np.bincount(owners, ~greedy, len(slots))
    return [(slot, s, not w) for slot, s, w in zip(slots, sums.tolist(), wrong.tolist(), strict=True)]


def score(model, documents, batch_tokens, share=True):
    """Yields lists of (document, [(sum of log-probabilities in nats, all tokens likeliest) of each choice]) as they are
    done, longest first. documents: a list of Rows for each."""
    parts = [{} for _ in documents]
    for batch in batches(units_of(documents, share), batch_tokens):
        found = score_batch(model, batch)
        for (i, j), *result in found:
            parts[i][j] = tuple(result)
        done = dict.fromkeys(i for (i, _), *_ in found if len(parts[i]) == len(documents[i]))
        yield [(i, [parts[i][j] for j in range(len(documents[i]))]) for i in done]


class Store:
    """What an interrupted call has scored: JSON lines [key, scores] beside the checkpoint, one file for each rank, for
    the same call to read. A key is a hash of all that the scores follow from, so that nothing stale is ever used."""

    def __init__(self, weights_file, cfg, world):
        call = (cfg.task, cfg.limit, cfg.num_fewshot, cfg.data_dir, cfg.corpus, cfg.batch_tokens, cfg.share, cfg.dtype)
        digest = hashlib.sha256(f"{sha256(weights_file)} {world.kind} {call}".encode()).hexdigest()
        self.digest, self.known, self.name = digest, {}, f"eval_partial.{digest[:12]}"
        self.folder = folder = Path(weights_file).parent
        for path in sorted(folder.glob(f"{self.name}.*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # cut off in writing
                    key, scores = json.loads(line)
                    self.known[key] = scores
        if world.sum([len(self.known)]).item() != len(self.known) * world.size:
            raise UserError(f"the ranks do not see the same files in {folder}; put it on a disk that all share")
        self.file = open(folder / f"{self.name}.{world.rank}.jsonl", "a", encoding="utf-8")
        self.file.write("\n" * (self.file.tell() > 0))

    def key(self, *what):
        return hashlib.sha256(f"{self.digest} {what}".encode()).hexdigest()[:24]

    def put(self, pairs):
        """Keep (key, scores) pairs, as far as the operating system does."""
        self.file.write("".join(json.dumps(pair) + "\n" for pair in pairs))
        self.file.flush()

    def remove(self):
        self.file.close()
        for path in self.folder.glob(f"{self.name}.*.jsonl"):  # those of all ranks, and of an earlier call's
            path.unlink()


def gather(world, results, mine):
    """results (list of lists of (sum, greedy), None for those of other ranks) complete on every rank; `mine`: which
    of them this rank answers for."""
    sizes = [len(r) for r in results]
    offsets = np.cumsum([0, *sizes])
    flat = np.zeros((offsets[-1], 2))
    for i in mine:
        flat[offsets[i] : offsets[i + 1]] = results[i]
    flat = world.sum(flat).numpy()
    return [[(s, bool(g)) for s, g in flat[a:b].tolist()] for a, b in zip(offsets, offsets[1:], strict=False)]


def run_task(model, name, documents, store, world, batch_tokens, share):
    """[(sum of log-probabilities, greedy) of each choice] of each document, a list of Rows."""
    keys = [store.key([(row.ids, row.n) for row in rows]) for rows in documents]
    results = [store.known.get(key, [(0.0, False)] * len(rows)) for key, rows in zip(keys, documents, strict=True)]
    weight = [sum(len(row.ids) for row in rows) for rows in documents]
    mine = sorted((i for i, key in enumerate(keys) if key not in store.known), key=lambda i: weight[i])
    mine = mine[world.rank :: world.size]
    bar = progress(name, sum(weight[i] for i in mine), "tok", world.rank == 0)
    for done in score(model, [documents[i] for i in mine], batch_tokens, share):
        for k, scores in done:
            results[mine[k]] = scores
        store.put((keys[mine[k]], scores) for k, scores in done)
        bar.update(sum(weight[mine[k]] for k, _ in done))
    bar.close()
    known = [i for i, key in enumerate(keys) if key in store.known] if world.rank == 0 else []
    results = gather(world, results, [*mine, *known])
    if not all(math.isfinite(s) for scores in results for s, _ in scores):
        raise UserError(f"{name}: the model's log-probabilities are not finite; its training has failed, or its dtype")
    return results


def right(name, asked, results):
    """{metric: (documents,) array, whose mean is the metric; of perplexity the nats}. As the harness counts: acc takes
    the choice of the highest sum, acc_norm of the highest sum per character; LAMBADA is right if greedy decoding is."""
    if "perplexity" in TASKS[name].metrics:
        greedy = np.array([scores[0][1] for scores in results], float)
        return {"acc": greedy, "perplexity": np.array([-scores[0][0] for scores in results])}
    found = {"acc": [], "acc_norm": []}
    for q, scores in zip(asked, results, strict=True):
        sums = np.array([s for s, _ in scores])
        found["acc"].append(sums.argmax() == q.gold)
        found["acc_norm"].append((sums / [len(choice) for choice in q.choices]).argmax() == q.gold)
    return {metric: np.array(found[metric], float) for metric in TASKS[name].metrics}


def stderr(values):
    """Standard error of a mean, from the sample's standard deviation (n - 1); None of a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def summarize(asked, documents, found):
    """The record of a task in eval.json, from what `right` returns."""
    record = {"n": len(asked), "cut": sum(any(row.cut for row in rows) for rows in documents)}
    record["chance"] = float(np.mean([1 / len(q.choices) for q in asked])) if len(asked[0].choices) > 1 else 0.0
    for metric, values in found.items():
        mean, error = float(values.mean()), stderr(values)
        if metric == "perplexity":  # by the delta method; the harness draws bootstrap samples
            mean = math.exp(mean)
            error = error and error * mean
        record |= {metric: mean, f"{metric}_stderr": error}
    return record


def windows(corpus, batch_tokens):
    """Parts of the validation split: (domain, first window, last, or -1 for what the windows leave over)."""
    step = max(1, batch_tokens // corpus.block_size)
    for domain in corpus.domains:
        n = corpus.windows("val", domain)
        yield from ((domain, i, min(n, i + step)) for i in range(0, n, step))
        if corpus.val_rest(domain)[1].size:
            yield domain, n, -1


@torch.inference_mode()
def run_loss(model, corpus, store, world, batch_tokens):
    """Loss over the whole validation split: every token but the first of each domain is predicted once.

    Returns {val: {domain: nats per token}, val_mean: plain mean (the paper's "Avg"), val_mixture: weighted as in
    training, perplexity: {domain: exp(val)}, bpb: {domain: bits per byte of text}, bpb_mean, tokens: {domain: number}}.
    """
    n_bytes, parts = corpus.tokenizer.token_bytes(), list(windows(corpus, batch_tokens))
    about = {d: corpus.manifest["splits"]["val"][d]["sha256"] for d in corpus.domains}
    keys = [store.key("loss", about[d], corpus.block_size, first, last) for d, first, last in parts]
    sums = {d: np.zeros(3) for d in corpus.domains}  # nats, tokens, bytes
    bar = progress("loss", len(parts), "tok", world.rank == 0)
    for (domain, first, last), key in list(zip(parts, keys, strict=True))[world.rank :: world.size]:
        x, y = corpus.val_rest(domain) if last < 0 else corpus.val_batch(domain, first, last)
        if key not in store.known:
            store.known[key] = model(*world.to_device(world.pin_memory((x, y))))[1].item() * y.size
            store.put([(key, store.known[key])])
        sums[domain] += store.known[key], y.size, n_bytes[y].sum()
        bar.update(world.size)
    bar.close()
    nats, tokens, n_bytes = world.sum(np.array(list(sums.values()))).numpy().T
    if not np.isfinite(nats).all():
        raise UserError("loss: the model's loss is not finite; its training has failed, or its dtype")

    def by_domain(values):
        return dict(zip(corpus.domains, values.tolist(), strict=True))

    val, bpb = nats / tokens, nats / n_bytes / math.log(2)
    result = {"val": by_domain(val), "val_mean": val.mean()}
    result |= {"val_mixture": sum(corpus.mixture[d] * v for d, v in result["val"].items())}
    result |= {"perplexity": by_domain(np.exp(val)), "bpb": by_domain(bpb), "bpb_mean": bpb.mean()}
    return result | {"tokens": {d: int(n) for d, n in by_domain(tokens).items()}}


@dataclass
class Entry:
    """A checkpoint and what was found of it. correct: {task: {metric: array for each document}}, see `right`."""

    path: Path
    tokenizer: Tokenizer
    corpus: Corpus | None
    header: dict
    label: str
    records: dict
    correct: dict


def open_corpus(path, tokenizer, header, cfg, world):
    """The data of --task=loss: --corpus, or what the run was trained on."""
    data_dir, mixture = trained_on(path.parent, cfg.corpus, "the prepared data for --task=loss by --corpus")
    corpus = Corpus(data_dir, header["config"]["block_size"], mixture=mixture, verify=world.is_first_of_node)
    if corpus.tokenizer.hash != tokenizer.hash:
        raise UserError(f"{data_dir} was made with another tokenizer than {path}; give the run's own data by --corpus")
    return corpus


def open_runs(cfg, world):
    """The Entries of all checkpoints, still without results: what is wrong with one shows before any is scored."""
    entries, paths = [], [checkpoint.find(name, cfg.which) for name in cfg.runs]
    for path in paths:
        header, tokenizer, _ = checkpoint.read_header(path), load_tokenizer(path), read_results(path.parent)
        corpus = open_corpus(path, tokenizer, header, cfg, world) if "loss" in cfg.task else None
        entries.append(Entry(path, tokenizer, corpus, header, header["mode"], {}, {}))
        if corpus and corpus.val_hash != entries[0].corpus.val_hash:
            raise UserError(f"{paths[0]} and {path} are of different data: compare their losses on one --corpus")
    for entry, label in zip(entries, distinct(entries), strict=True):
        entry.label = label
    return entries


def distinct(entries):
    """Names for the table, the shortest that tell the checkpoints apart: mode, folder, file, or with their numbers."""
    modes, folders = [e.header["mode"] for e in entries], [e.path.parent.name for e in entries]
    files = [f"{e.path.parent.name}/{e.path.stem}" for e in entries]
    numbered = [f"{file} ({i})" for i, file in enumerate(files, 1)]
    return next(names for names in (modes, folders, files, numbered) if len(set(names)) == len(names))


def evaluate(entry, asked, cfg, world):
    """Fill an Entry; returns the Store to remove when all is written, and the lines of --log_samples."""
    model = checkpoint.load(entry.path, device=world.device).to(getattr(torch, cfg.dtype))
    store, lines = Store(entry.path, cfg, world), []
    world.wait()  # for all to have read the files of all
    batch_tokens = cfg.tokens_per_pass(world)
    for name in cfg.task:
        began = time.time()
        if name == "loss":
            record = run_loss(model, entry.corpus, store, world, batch_tokens) | {"data": entry.corpus.val_hash}
        else:
            found, where = asked[name]
            documents = rows_of(name, found, entry.tokenizer, model.cfg.block_size)
            results = run_task(model, name, documents, store, world, batch_tokens, cfg.share)
            entry.correct[name] = right(name, found, results)
            record = summarize(found, documents, entry.correct[name]) | {"data": where, "num_fewshot": cfg.num_fewshot}
            record |= {"limit": cfg.limit}
            if cfg.log_samples and world.rank == 0:
                lines += samples(entry.label, name, found, documents, results)
        entry.records[name] = record | {"dtype": cfg.dtype, "seconds": round(time.time() - began, 3)}
    return store, lines


def samples(label, name, asked, documents, results):
    """Lines of --log_samples: one for each choice."""
    for i, (q, rows, scores) in enumerate(zip(asked, documents, results, strict=True)):
        for j, (row, (total, greedy)) in enumerate(zip(rows, scores, strict=True)):
            line = {"checkpoint": label, "task": name, "document": i, "choice": j, "context": q.contexts[j]}
            line |= {"continuation": q.delimiter + q.choices[j], "ids": row.ids[-row.n :], "log_prob": total}
            yield json.dumps(line | {"greedy": greedy, "gold": q.gold}, ensure_ascii=False) + "\n"


def mean(values, errors):
    """Mean of some tasks' means, and its standard error."""
    return np.mean(values), math.sqrt(sum(e**2 for e in errors)) / len(errors) if None not in errors else None


def task_table(entries, metric, names):
    """The paper's Table 1 for one metric: checkpoints, differences from the first (paired by document), chance. "Avg"
    is the mean of the six tasks, of those that have the metric, where all were asked for."""
    six = [t for t in TABLE1 if metric in TASKS[t].metrics]
    six = six if set(six) <= set(names) else []

    def row(label, cells, sign=""):
        average = [plus_minus(*mean(*zip(*(cells[t] for t in six), strict=True)), sign=bool(sign))] if six else []
        return [label, *(plus_minus(*cells[t], sign=bool(sign)) for t in names), *average]

    rows = [row(e.label, {t: (e.records[t][metric], e.records[t][f"{metric}_stderr"]) for t in names}) for e in entries]
    first = entries[0]
    if metric != "perplexity":
        for e in entries[1:]:
            gaps = {t: e.correct[t][metric] - first.correct[t][metric] for t in names}
            cells = {t: (gap.mean(), stderr(gap)) for t, gap in gaps.items()}
            rows.append(row(f"{e.label} − {first.label}", cells, "+"))
        rows.append(row("chance", {t: (first.records[t]["chance"], None) for t in names}))
    rows.append(["documents", *(f"{first.records[t]['n']:,}" for t in names), *[""] * bool(six)])
    return [markdown([metric, *names, *["Avg"] * bool(six)], rows), ""]


def loss_table(entries, title, key, last):
    """The paper's Table 5: by domain, then `last` {column: function of the record}; differences from the first."""
    first, *others = [(e.label, e.records["loss"]) for e in entries]
    domains = list(first[1][key])

    def values(record):
        return np.array([*(record[key][d] for d in domains), *(f(record) for f in last.values())])

    rows = [[label, *map(plus_minus, values(record))] for label, record in (first, *others)]
    for label, record in others:
        rows.append(
            [f"{label} − {first[0]}", *(plus_minus(gap, sign=True) for gap in values(record) - values(first[1]))]
        )
    return [markdown([title, *domains, *last], rows), ""]


def report(entries, names):
    """All tables, as lines of Markdown."""
    lines, tasks = [], [t for t in TASKS if t in names]
    for metric in ("acc", "acc_norm", "perplexity"):
        if having := [t for t in tasks if metric in TASKS[t].metrics]:
            lines += task_table(entries, metric, having)
    if "loss" in names:
        both = {"Avg": lambda r: r["val_mean"], "mixture": lambda r: r["val_mixture"]}
        lines += loss_table(entries, "loss (nats per token)", "val", both)
        exps = {f"exp({name})": lambda r, f=f: math.exp(f(r)) for name, f in both.items()}
        lines += loss_table(entries, "perplexity", "perplexity", exps)
        lines += loss_table(entries, "bits per byte", "bpb", {"Avg": lambda r: r["bpb_mean"]})
    for e in entries:
        cut = [f"{e.records[t]['cut']:,} of {t}" for t in tasks if e.records[t]["cut"]]
        if cut:
            lines += [f"{e.label}: longer than the block and cut on the left were {', '.join(cut)}", ""]
    return lines


def record_key(name, record):
    """The name of a task's record in eval.json: what is not the default is part of it, so that nothing is replaced by a
    result of another kind."""
    odd = {"num_fewshot": 0, "limit": 0, "dtype": "float32", "backend": "native"}
    return name + "".join(f" {k}={record[k]}" for k, usual in odd.items() if record.get(k, usual) != usual)


def read_results(folder):
    """{checkpoint's file: {mode, step, sha256, results {task: record}, env}} from a run's eval.json, {} without one."""
    path = Path(folder) / "eval.json"
    if not path.exists():
        return {}
    found = read_json(path, "results of eval.py")
    try:
        if found["format"] == FORMAT and all(
            c["sha256"] and c["results"].keys() for c in found["checkpoints"].values()
        ):
            return found["checkpoints"]
    except (KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path} is not a file of this eval.py; move it away")


def write_results(entry):
    """Add an Entry's records to the eval.json of its folder."""
    known = read_results(entry.path.parent)
    mine, digest = known.get(entry.path.name, {}), sha256(entry.path)
    results = mine.get("results", {}) if mine.get("sha256") == digest else {}
    for name, record in entry.records.items():
        key = record_key(name, record)
        other = key in results and results[key].get("data") != record.get("data")
        results[f"{key} data={record['data']}" if other else key] = record
    about = {"mode": entry.header["mode"], "step": entry.header["step"], "sha256": digest, "results": results}
    known[entry.path.name] = about | {"env": environment()}
    write_json(entry.path.parent / "eval.json", {"format": FORMAT, "checkpoints": known})


def write_lines(path, lines):
    text = "".join(lines)
    write_atomic(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8", errors="backslashreplace"))


def out_file(cfg, entries):
    if cfg.out_file:
        return Path(cfg.out_file)
    folders = {e.path.parent for e in entries}
    return (folders.pop() if len(folders) == 1 else entries[0].path.parent.parent) / "eval.md"


def native(cfg, world):
    """Everything by our own code."""
    entries = open_runs(cfg, world)
    if not world.is_first_of_node:
        world.wait()  # for the first rank of each node to have downloaded what all will read
    asked = {name: questions(name, cfg) for name in cfg.task if name != "loss"}
    if world.is_first_of_node:
        world.wait()
    stores, lines = [], []
    for entry in entries:
        try:
            store, more = evaluate(entry, asked, cfg, world)
        except torch.OutOfMemoryError:
            raise UserError(f"out of the GPU's memory; set --batch_tokens below {cfg.tokens_per_pass(world)}") from None
        stores.append(store)
        lines += more
        if world.rank == 0:
            write_results(entry)
    if world.rank == 0:
        found = report(entries, cfg.task)
        print("\n".join(found))
        write_lines(out_file(cfg, entries), (line + "\n" for line in found))
        if cfg.log_samples:
            write_lines(cfg.log_samples, lines)
    world.wait()
    if world.rank == 0:
        for store in stores:
            store.remove()


def harness_model(model, tokenizer, batch_tokens):
    """The model as the harness wants one: an lm_eval.api.model.TemplateLM, which encodes pairs of texts itself."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    block_size = model.cfg.block_size

    class Ours(TemplateLM):
        eot_token_id = tokenizer.eot

        def tok_encode(self, string, add_special_tokens=None, **kw):
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kw):
            groups, results = {}, [None] * len(requests)
            for i, (_, context, _) in enumerate(requests):
                groups.setdefault(tuple(context), []).append(i)
            groups = list(groups.values())
            try:
                documents = [[fit(*requests[i][1:], block_size) for i in group] for group in groups]
            except ValueError as e:
                raise UserError(f"a request of the harness: {e}") from None
            bar = progress("lm_eval", len(requests), "request", not disable_tqdm)
            for done in score(model, documents, batch_tokens):
                for k, scores in done:
                    for i, found in zip(groups[k], scores, strict=True):
                        results[i] = found
                bar.update(sum(len(scores) for _, scores in done))
            bar.close()
            return results

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            parts, owners = [], []
            for i, (text,) in enumerate(request.args for request in requests):
                for window in get_rolling_token_windows(tokenizer.encode(text), tokenizer.eot, block_size, 1):
                    parts.append((None, *make_disjoint_window(window)))
                    owners.append(i)
            sums = [s for s, _ in self._loglikelihood_tokens(parts, disable_tqdm)]
            return np.bincount(owners, sums, len(requests)).tolist()

        def generate_until(self, requests, disable_tqdm=False):
            texts, bar = [], progress("lm_eval", len(requests), "request", not disable_tqdm)
            for context, asked in (request.args for request in requests):
                how = normalize_gen_kwargs(asked, min(256, block_size // 2))
                n = min(how["max_gen_toks"], block_size - 1)
                ids = (tokenizer.encode(context) or [tokenizer.eot])[n - block_size :]
                warm = how.get("temperature", 1.0) if how["do_sample"] else 0
                rows, *_ = generate(model, ids, n, eot=tokenizer.eot, temperature=warm)
                text = tokenizer.decode(rows[0])
                for stop in filter(None, how["until"]):
                    text = text.split(stop)[0]
                texts.append(text)
                bar.update(1)
            bar.close()
            return texts

    return Ours()


def local_tasks(cfg, known, folder):
    """Write the harness's task files on local rows into a folder: its own definitions, told to read JSON lines. known:
    its TaskManager's index of them."""
    for name in cfg.task:
        if name not in TASKS:
            raise UserError(f"--data_dir serves {', '.join(TASKS)}; {name} is read from the hub, leave --data_dir out")
        task, files = TASKS[name], {}
        for split in {task.split} | ({task.shots_from} if cfg.num_fewshot else set()):
            files[split] = str(folder / f"{name}.{split}.jsonl")
            rows, where = read_rows(name, split, cfg.data_dir)
            for i, row in enumerate(rows):
                question(name, row, f"{where}, row {i}")
            write_lines(files[split], (json.dumps(row) + "\n" for row in rows))
        include = str(known[HARNESS_NAMES.get(name, name)].yaml_path)
        about = {"include": include, "task": name, "dataset_path": "json", "dataset_name": None}
        about |= {"dataset_kwargs": {"data_files": files}}
        for key, split in (("training_split", "train"), ("validation_split", "validation"), ("test_split", "test")):
            about |= {} if split in files else {key: None}
        write_json(folder / f"{name}.yaml", about)  # JSON is YAML


def by_harness(cfg, world):
    """Everything by lm-eval, but the model and, with --data_dir, the rows."""
    try:
        import lm_eval
        import transformers  # noqa: F401 - whose version the harness records
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise UserError("--backend=lm_eval needs the harness: pip install lm-eval==0.4.13 transformers") from None
    if world.size > 1:
        raise UserError("--backend=lm_eval runs in one process; leave torchrun out, or use --backend=native")
    entries, batch_tokens, lines = open_runs(cfg, world), cfg.tokens_per_pass(world), []
    with tempfile.TemporaryDirectory() as folder:
        names, manager = [HARNESS_NAMES.get(name, name) for name in cfg.task], TaskManager()
        if cfg.data_dir:
            local_tasks(cfg, manager.task_index, Path(folder))
            names, manager = list(cfg.task), TaskManager(include_path=folder, include_defaults=False)
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise UserError(f"the harness has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them")
        for entry in entries:
            model = checkpoint.load(entry.path, device=world.device).to(getattr(torch, cfg.dtype))
            lm = harness_model(model, entry.tokenizer, batch_tokens)
            how = dict(num_fewshot=cfg.num_fewshot, limit=cfg.limit or None, task_manager=manager)
            try:
                found = lm_eval.simple_evaluate(lm, tasks=names, log_samples=False, **how)
            except OSError as e:  # of the network and the hub too
                raise UserError(f"the harness could not read its data: {str(e).splitlines()[0]}") from None
            lines.append(f"{entry.label}\n{make_table(found)}\n")
            print(lines[-1])
            for name, record in found["results"].items():
                settings = dict(num_fewshot=found["n-shot"].get(name, 0), limit=cfg.limit, dtype=cfg.dtype)
                finite = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
                entry.records[name] = finite | settings | {"backend": "lm_eval", "data": cfg.data_dir or "hub"}
            write_results(entry)
        write_lines(out_file(cfg, entries), lines)


def main(cfg: EvalConfig):
    world = Distributed(cfg.device)
    (native if cfg.backend == "native" else by_harness)(cfg, world)
    world.close()


if __name__ == "__main__":
    run_main(main, command_line(EvalConfig, __doc__))
