"""The zero-shot tasks: where their documents are, and the question that each one asks.

Texts, choices and borders are those of lm-eval 0.4.13, the field's reference harness (lm_eval/tasks); eval.py scores
them. A task's documents come from the hub at a fixed revision, or from a folder of local files: `<task>.jsonl`,
`<task>.parquet`, or a folder `<task>` with the files of the hub. Read next: eval.py.
"""

import hashlib
import json
import math
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oldconfig import UserError, need
from oldfiles import sha256


class Question(NamedTuple):
    """What a task asks in one document. The text of choice j is contexts[j] + delimiter + choices[j], and only what
    follows the context is scored. gold: the number of the right choice."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "


def clean_wikihow(text):
    """A text of HellaSwag without the tags of its WikiHow part. Source: lm_eval/tasks/hellaswag/utils.py."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def ask_hellaswag(row):
    context = clean_wikihow(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
    endings = tuple(clean_wikihow(ending) for ending in row["endings"])
    return Question((context,) * len(endings), endings, int(row["label"]))


def ask_openbookqa(row):
    choices = row["choices"]
    gold = choices["label"].index(row["answerKey"].lstrip())
    return Question((row["question_stem"],) * len(choices["text"]), tuple(choices["text"]), gold)


def ask_winogrande(row):
    """The two options complete the context; the same rest of the sentence is scored after each."""
    before, after = row["sentence"].split("_", 1)
    contexts = (before + row["option1"], before + row["option2"])
    return Question(contexts, (after.strip(),) * 2, {"1": 0, "2": 1}.get(row["answer"], -1))


def ask_arc(row):
    choices = row["choices"]
    contexts = ("Question: " + row["question"] + "\nAnswer:",) * len(choices["text"])
    return Question(contexts, tuple(choices["text"]), choices["label"].index(row["answerKey"]))


def ask_piqa(row):
    context = "Question: " + row["goal"] + "\nAnswer:"
    return Question((context,) * 2, (row["sol1"], row["sol2"]), int(row["label"]))


def ask_lambada(row):
    words = row["text"].split(" ")
    return Question((" ".join(words[:-1]),), (" " + words[-1],), 0, delimiter="")


@dataclass(frozen=True)
class Task:
    """A task: its dataset on the hub, and how a row of it becomes a Question."""

    hub: str
    revision: str
    split: str
    ask: Callable
    config: str | None = None
    metrics: tuple[str, ...] = ("acc", "acc_norm")


_ARC = Task(
    hub="allenai/ai2_arc",
    config="ARC-Challenge",
    revision="210d026faf9955653af8916fad021475a3f00453",
    split="test",
    ask=ask_arc,
)
TASKS = {  # the paper's Table 1 in its order, then LAMBADA as OpenAI cut it
    "hellaswag": Task(
        hub="Rowan/hellaswag",
        revision="218ec52e09a7e7462a5400043bb9a69a41d06b76",
        split="validation",
        ask=ask_hellaswag,
    ),
    "openbookqa": Task(
        hub="allenai/openbookqa",
        config="main",
        revision="388097ea7776314e93a529163e0fea805b8a6454",
        split="test",
        ask=ask_openbookqa,
    ),
    "winogrande": Task(
        hub="allenai/winogrande",
        config="winogrande_xl",
        revision="01e74176c63542e6b0bcb004dcdea22d94fb67b5",
        split="validation",
        ask=ask_winogrande,
        metrics=("acc",),
    ),
    "arc_challenge": _ARC,
    "arc_easy": replace(_ARC, config="ARC-Easy"),
    "piqa": Task(
        hub="baber/piqa",
        revision="142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
        split="validation",
        ask=ask_piqa,
    ),
    "lambada": Task(
        hub="EleutherAI/lambada_openai",
        config="default",
        revision="900124bf3b8235c6daf21033af9948b3f07346c4",
        split="test",
        ask=ask_lambada,
        metrics=("acc", "perplexity"),
    ),
}
TABLE1 = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")
EVALUATED = {"mode": str, "step": int | None, "results": dict[str, dict]}  # what eval.json says of a checkpoint
EVALUATIONS = {"checkpoints": dict[str, EVALUATED]}
GROUPS = {"table1": TABLE1, "table5": ("loss",), "all": ("loss", *TASKS)}


def download_command(name, folder):
    """The command that puts a task's files where `local_rows` looks for them."""
    task = TASKS[name]
    local = shlex.quote(str(Path(folder) / name))
    return f"hf download {task.hub} --repo-type=dataset --revision={task.revision} --local-dir={local}"


def hub_is_there(task):
    """Whether the hub answers. load_dataset alone would ask six times, and say so, before it gives up after 30 s."""
    hub = need("huggingface_hub")
    try:
        hub.HfApi().dataset_info(task.hub, revision=task.revision, timeout=5)
    except hub.errors.HfHubHTTPError:
        return True  # an answer, such as 503: load_dataset says what it means
    except Exception:  # of the network: the library below has its own classes
        return False
    return True


def hub_rows(name):
    """Rows of a task's split from the hub, or from the cache that `datasets` keeps of it."""
    task, datasets = TASKS[name], need("datasets")
    if not hub_is_there(task):
        need("huggingface_hub").constants.HF_HUB_OFFLINE = True  # then the cache is read, without a request
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return list(datasets.load_dataset(task.hub, task.config, revision=task.revision, split=task.split))
    except Exception as e:  # network, hub, disk: each library below has its own
        raise UserError(
            f"{task.hub} cannot be read from the hub ({e}); without network, run "
            f"`{download_command(name, 'evals')}` on a machine that has it and use --data_dir=evals"
        ) from None


def jsonl_rows(path):
    """The rows of a file of JSON lines, read as one list: so an error has the number of its line."""
    lines = path.read_text(encoding="utf-8-sig").strip().split("\n")  # a JSON string may hold other ends of lines
    return json.loads("[" + ",\n".join(lines) + "]")


def folder_rows(folder, task):
    """The rows of a task's split in a folder with the files of the hub."""
    datasets = need("datasets")
    if task.config and (folder / task.config).is_dir():  # the hub's folder of several datasets: this one's
        folder = folder / task.config
    datasets.disable_progress_bars()
    config = task.config if task.config in datasets.get_dataset_config_names(str(folder)) else None
    with tempfile.TemporaryDirectory() as cache:  # the library's own cache may be of files that have changed since
        return list(datasets.load_dataset(str(folder), config, split=task.split, cache_dir=cache))


def local_rows(name, data_dir):
    """(rows of a task's split in a folder of local files, name and hash of what was read)."""
    task = TASKS[name]
    paths = [Path(data_dir) / file for file in (f"{name}.jsonl", f"{name}.parquet", name)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        remedy = f"with network: `{download_command(name, data_dir)}`"
        raise UserError(f"{data_dir} has no {name}.jsonl, no {name}.parquet and no folder {name}; {remedy}")
    try:
        if path.is_dir():
            rows = folder_rows(path, task)
            digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        else:
            rows = jsonl_rows(path) if path.suffix == ".jsonl" else need("pyarrow.parquet").read_table(path).to_pylist()
            digest = sha256(path)
    except Exception as e:  # each library has its own
        raise UserError(f"{path} is not readable as the {task.split} split of {name}: {e}") from None
    return rows, f"{path.name} (sha256 {digest[:16]})"


def question(name, row, where):
    """The Question of a row. Raises UserError that says what is wrong with the row. where: its file and number."""
    try:
        asked = TASKS[name].ask(row)
        "".join((*asked.contexts, *asked.choices))  # a TypeError where one is no text
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        what = f"{where} is not a row of {TASKS[name].hub}, which {name} reads"
        raise UserError(f"{what}: {type(e).__name__} {e}") from None
    if not 0 <= asked.gold < len(asked.choices):
        raise UserError(f"{where}: its label is not one of its {len(asked.choices)} choices")
    if "" in asked.choices:
        raise UserError(f"{where}: choice {asked.choices.index('')} is empty; there is nothing to score")
    return asked


def questions(name, cfg):
    """(the Questions of a task, where its rows are from: dataset and revision, or file and hash).
    cfg: the settings data_dir and limit."""
    if cfg.data_dir:
        rows, where = local_rows(name, cfg.data_dir)
    else:
        rows, where = hub_rows(name), f"{TASKS[name].hub}@{TASKS[name].revision[:8]}"
    if not rows:
        raise UserError(f"{where} has no rows")
    if cfg.limit:
        rows = rows[: cfg.limit]
    return [question(name, row, f"{where}, row {i}") for i, row in enumerate(rows)], where


class Request(NamedTuple):
    """A choice as the model sees it: token ids, the last n_scored of which are scored; cut: it was longer than the
    block."""

    ids: list[int]
    n_scored: int
    cut: bool = False


def encode_pair(tokenizer, context, scored):
    """Token ids of a context and of the text scored after it, cut where the harness cuts. Spaces at the end of the
    context move to the scored text. The context is tokenized alone, then both together, each with the tokenizer's
    prefix: what the second has beyond the length of the first is scored. An empty context becomes an end of document.
    Source: lm_eval/api/model.py, TemplateLM."""
    bare = context.rstrip()
    scored = context[len(bare) :] + scored
    if not bare:
        return [tokenizer.eot], tokenizer.encode(scored)
    ids = tokenizer.prefix + tokenizer.encode(bare)
    whole = tokenizer.prefix + tokenizer.encode(bare + scored)
    return ids, whole[len(ids) :]


def cut_to_block(context, scored, block_size):
    """A Request of context and scored ids. It has at most block_size + 1 ids, the last of which is only predicted; a
    longer context loses its beginning. Raises ValueError if there are no scored ids, or too many of them."""
    if len(scored) > block_size:
        long = f"{len(scored)} tokens are to be scored, but the model's block has {block_size}"
        raise ValueError(f"{long}; leave this task out, or use a model with a longer block")
    if not scored:
        raise ValueError("a choice has no tokens of its own to score")
    ids = context + scored
    return Request(ids[-(block_size + 1) :], len(scored), len(ids) > block_size + 1)


def requests_of(name, asked, tokenizer, block_size):
    """For each Question the Requests of its choices."""
    documents = []
    for i, q in enumerate(asked):
        try:
            requests = []
            for context, choice in zip(q.contexts, q.choices, strict=True):
                ids, scored = encode_pair(tokenizer, context, q.delimiter + choice)
                requests.append(cut_to_block(ids, scored, block_size))
            documents.append(requests)
        except ValueError as e:
            raise UserError(f"{name}, document {i}: {e}") from None
    return documents


def per_document(name, asked, results):
    """{metric: (documents,) array: 1 where the model is right, else 0; for perplexity nats}. As the harness counts: acc
    takes the choice with the highest log-probability, acc_norm the one with the highest per character; LAMBADA is right
    if every token is the likeliest."""
    if "perplexity" in TASKS[name].metrics:
        greedy = [scores[0][1] for scores in results]
        nats = [-scores[0][0] for scores in results]
        return {"acc": np.array(greedy, float), "perplexity": np.array(nats)}
    found = {"acc": [], "acc_norm": []}
    for q, scores in zip(asked, results, strict=True):
        log_probs = np.array([total for total, _ in scores])
        lengths = np.array([len(choice) for choice in q.choices])  # characters
        found["acc"].append(log_probs.argmax() == q.gold)
        found["acc_norm"].append((log_probs / lengths).argmax() == q.gold)
    return {metric: np.array(found[metric], float) for metric in TASKS[name].metrics}


def standard_error(values):
    """Standard error of a mean, from the sample's standard deviation (n - 1); None of a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def task_record(asked, documents, correct):
    """The record of a task in eval.json, from what `per_document` returns."""
    has_choices = len(asked[0].choices) > 1
    record = {
        "n": len(asked),
        "cut": sum(any(row.cut for row in rows) for rows in documents),
        "chance": float(np.mean([1 / len(q.choices) for q in asked])) if has_choices else 0.0,
    }
    for metric, values in correct.items():
        mean = float(values.mean())
        error = standard_error(values)
        if metric == "perplexity":
            mean = math.exp(mean)
            if error is not None:
                error *= mean  # by the delta method; the harness draws bootstrap samples
        record[metric] = mean
        record[f"{metric}_stderr"] = error
    return record


def average(pairs):
    """Mean of several tasks' means, and its standard error. pairs: [(mean, standard error)]"""
    means, errors = zip(*pairs, strict=True)
    error = None if None in errors else math.sqrt(sum(e**2 for e in errors)) / len(errors)
    return np.mean(means), error
