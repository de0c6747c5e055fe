"""The zero-shot tasks: where their documents are, what each one asks, and how the answers are counted.

Texts, choices and boundaries are those of lm-eval 0.4.13, the field's harness
(https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/tasks). Documents come from the hub at a fixed revision,
or from local files of JSON lines, `<task>.jsonl`. Read next: eval.py.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files import reading, sha256
from common.report import mean_error
from common.texts import unpacked
from configurator import UserError, need


class Question(NamedTuple):
    """What a task asks in one document. The text of choice j is contexts[j] + delimiter + choices[j]. We score only
    what follows the context. gold: the number of the right choice."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "


def clean_wikihow(text):
    """A text of HellaSwag without the tags of its WikiHow part. Source: lm_eval/tasks/hellaswag/utils.py."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def texts_of(values):
    """The choices of a row. A text would be taken apart into letters."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list of choices")
    return tuple(values)


def ask_hellaswag(row):
    context = clean_wikihow(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
    endings = tuple(clean_wikihow(ending) for ending in texts_of(row["endings"]))
    return Question((context,) * len(endings), endings, int(str(row["label"])))


def ask_openbookqa(row):
    gold = row["choices"]["label"].index(row["answerKey"].lstrip())
    choices = texts_of(row["choices"]["text"])
    return Question((row["question_stem"],) * len(choices), choices, gold)


def ask_winogrande(row):
    # The two options complete the context, and we score the same rest of the sentence after each.
    before, after = row["sentence"].split("_", 1)
    contexts = (before + row["option1"], before + row["option2"])
    return Question(contexts, (after.strip(),) * 2, {"1": 0, "2": 1}.get(row["answer"], -1))


def ask_arc(row):
    choices = texts_of(row["choices"]["text"])
    contexts = ("Question: " + row["question"] + "\nAnswer:",) * len(choices)
    return Question(contexts, choices, row["choices"]["label"].index(row["answerKey"]))


def ask_piqa(row):
    context = "Question: " + row["goal"] + "\nAnswer:"
    return Question((context,) * 2, (row["sol1"], row["sol2"]), int(str(row["label"])))


def ask_lambada(row):
    words = row["text"].split(" ")
    return Question((" ".join(words[:-1]),), (" " + words[-1],), 0, delimiter="")


class Task(NamedTuple):
    """A dataset on the hub (its configuration, its split), how its rows become Questions, and what is measured."""

    hub: str
    config: str | None
    split: str
    ask: Callable
    metrics: tuple[str, ...] = ("acc", "acc_norm")


# The paper's Table 1 in its order, then LAMBADA as OpenAI cut it.
TASKS = {
    "hellaswag": Task("Rowan/hellaswag", None, "validation", ask_hellaswag),
    "openbookqa": Task("allenai/openbookqa", "main", "test", ask_openbookqa),
    "winogrande": Task("allenai/winogrande", "winogrande_xl", "validation", ask_winogrande, ("acc",)),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge", "test", ask_arc),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "test", ask_arc),
    "piqa": Task("baber/piqa", None, "validation", ask_piqa),
    "lambada": Task("EleutherAI/lambada_openai", "default", "test", ask_lambada, ("acc", "perplexity")),
}
TABLE1 = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")
GROUPS = {"table1": TABLE1, "table5": ("loss",), "all": ("loss", *TASKS)}

# Fixed, because a dataset on the hub can change.
REVISIONS = {
    "Rowan/hellaswag": "218ec52e09a7e7462a5400043bb9a69a41d06b76",
    "allenai/openbookqa": "388097ea7776314e93a529163e0fea805b8a6454",
    "allenai/winogrande": "01e74176c63542e6b0bcb004dcdea22d94fb67b5",
    "allenai/ai2_arc": "210d026faf9955653af8916fad021475a3f00453",
    "baber/piqa": "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
    "EleutherAI/lambada_openai": "900124bf3b8235c6daf21033af9948b3f07346c4",
}


def hub_rows(name):
    """The rows of a task's split from the hub, or without network from the cache that `datasets` keeps."""
    task, datasets = TASKS[name], need("datasets")
    with reading(task.hub, "reachable on the hub", "without a network, name a folder of local files with --data_dir"):
        return list(datasets.load_dataset(task.hub, task.config, revision=REVISIONS[task.hub], split=task.split))


def local_rows(path, name):
    """The rows of a task's split in a file of JSON lines or of one JSON array, plain or compressed."""
    task = TASKS[name]
    how = f"{task.hub!r}, {task.config!r}, split={task.split!r}, revision={REVISIONS[task.hub]!r}"
    command = f'python -c "import datasets; datasets.load_dataset({how}).to_json({str(path)!r})"'
    with reading(path, f"the {task.split} split of {name} as JSON lines", f"with a network, `{command}` makes it"):
        with unpacked(path) as file:
            content = file.read()
        if content.lstrip().startswith(b"["):
            return json.loads(content)
        # We split bytes, because text would also be split at separators inside a JSON string.
        return [json.loads(line) for line in content.split(b"\n") if line.strip()]


def questions(name, data_dir="", limit=0):
    """(a task's Questions, where they are from: dataset and revision, or file and hash). limit: only the first ones."""
    if data_dir:
        path = Path(data_dir, f"{name}.jsonl")
        if not path.exists():  # compressed, or an array in .json
            path = next(Path(data_dir).glob(f"{name}.json*"), path)
        rows, where = local_rows(path, name), f"{path.name} (sha256 {sha256(path)[:16]})"
    else:
        rows, where = hub_rows(name), f"{TASKS[name].hub}@{REVISIONS[TASKS[name].hub][:8]}"
    if not rows:
        raise UserError(f"{where} has no rows")
    asked = []
    for i, row in enumerate(rows[: limit or None]):
        with reading(f"{where}, row {i}", f"a row in the format of {TASKS[name].hub}"):
            q = TASKS[name].ask(row)
            "".join((*q.contexts, *q.choices))  # a TypeError if one is not a string
            if "" in q.choices or not 0 <= q.gold < len(q.choices):
                raise ValueError(f"a choice is empty, or the label is not one of {len(q.choices)} choices")
            asked.append(q)
    return asked, where


def per_document(name, asked, scores):
    """{metric: (documents,) array}: 1 where the model is right, else 0; for perplexity nats. As the harness counts:
    acc takes the choice with the highest log-probability, acc_norm the one with the highest per character."""
    # LAMBADA has one choice; it is right if each of its tokens is the likeliest.
    if "perplexity" in TASKS[name].metrics:
        only = np.concatenate(scores)
        return {"acc": only[:, 1], "perplexity": -only[:, 0]}
    found = {metric: np.zeros(len(asked)) for metric in TASKS[name].metrics}
    for i, (q, of_choices) in enumerate(zip(asked, scores, strict=True)):
        log_p = of_choices[:, 0]
        by_metric = {"acc": log_p, "acc_norm": log_p / [len(choice) for choice in q.choices]}
        for metric in found:
            found[metric][i] = by_metric[metric].argmax() == q.gold
    return found


def task_record(correct):
    """The record of a task in eval.json, from what `per_document` returns."""
    record = {"n": len(correct["acc"])}
    for metric, values in correct.items():
        mean, error = mean_error(values)
        if metric == "perplexity":
            mean = math.exp(mean)
            error = error and error * mean  # the delta method; the harness draws bootstrap samples
        record |= {metric: mean, f"{metric}_stderr": error}
    return record
