"""The zero-shot tasks: where their documents are, how they are read, and what is asked in one."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from configurator import UserError, need
from files import sha256


class Question(NamedTuple):
    """What a task asks in one document. Choice j is text contexts[j], of which nothing is scored, then delimiter, then
    choices[j]. gold: the right one."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "


def clean(text):
    """HellaSwag's texts without the tags of its WikiHow part. Source: lm_eval/tasks/hellaswag/utils.py."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def which(label):
    """A label that counts choices from 0: an int, or its digits; raises ValueError."""
    if isinstance(label, str) and label.isdecimal() or isinstance(label, int) and not isinstance(label, bool):
        return int(label)
    raise ValueError(f"its label {label!r} is not a whole number")


def ask_hellaswag(row):
    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    endings = tuple(clean(ending) for ending in row["endings"])
    return Question((context,) * len(endings), endings, which(row["label"]))


def ask_piqa(row):
    return Question((f"Question: {row['goal']}\nAnswer:",) * 2, (row["sol1"], row["sol2"]), which(row["label"]))


def options(row, key):
    """(texts of the choices, which of their labels "A", "B", … or "1", "2", … is the key, -1 if none)."""
    texts, labels = row["choices"]["text"], row["choices"]["label"]
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
        raise ValueError("its choices are not a list of texts and as many labels")
    return tuple(texts), labels.index(key) if key in labels else -1


def ask_arc(row):
    choices, gold = options(row, row["answerKey"])
    return Question((f"Question: {row['question']}\nAnswer:",) * len(choices), choices, gold)


def ask_openbookqa(row):
    choices, gold = options(row, row["answerKey"].lstrip())
    return Question((row["question_stem"],) * len(choices), choices, gold)


def ask_winogrande(row):
    """The options stand in the context, and what follows the gap is scored."""
    before, gap, after = row["sentence"].partition("_")
    if not gap:
        raise ValueError("its sentence has no gap '_'")
    contexts = (before + row["option1"], before + row["option2"])
    return Question(contexts, (after.strip(),) * 2, {"1": 0, "2": 1}.get(row["answer"], -1))


def ask_lambada(row):
    words = row["text"].split(" ")
    return Question((" ".join(words[:-1]),), (" " + words[-1],), 0, delimiter="")


@dataclass(frozen=True)
class Task:
    """Where a task's documents are on the hub, and how one becomes a Question. Source: lm_eval/tasks (0.4.13)."""

    hub: str
    config: str | None
    revision: str
    split: str
    ask: Callable
    columns: dict[str, type]
    metrics: tuple[str, ...] = ("acc", "acc_norm")
    shots_from: str = "train"  # the split that few-shot examples are drawn from


ARC = {"question": str, "choices": dict, "answerKey": str}


TASKS = {  # the paper's Table 1 in its order, then LAMBADA as OpenAI cut it
    "hellaswag": Task(
        *("Rowan/hellaswag", None, "218ec52e09a7e7462a5400043bb9a69a41d06b76", "validation", ask_hellaswag),
        {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": object},
    ),
    "openbookqa": Task(
        *("allenai/openbookqa", "main", "388097ea7776314e93a529163e0fea805b8a6454", "test", ask_openbookqa),
        {"question_stem": str, "choices": dict, "answerKey": str},
    ),
    "winogrande": Task(
        *("allenai/winogrande", "winogrande_xl", "01e74176c63542e6b0bcb004dcdea22d94fb67b5", "validation"),
        ask_winogrande,
        dict.fromkeys(("sentence", "option1", "option2", "answer"), str),
        metrics=("acc",),
    ),
    "arc_challenge": Task(
        *("allenai/ai2_arc", "ARC-Challenge", "210d026faf9955653af8916fad021475a3f00453", "test", ask_arc), ARC
    ),
    "arc_easy": Task(
        *("allenai/ai2_arc", "ARC-Easy", "210d026faf9955653af8916fad021475a3f00453", "test", ask_arc), ARC
    ),
    "piqa": Task(
        *("baber/piqa", None, "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1", "validation", ask_piqa),
        {"goal": str, "sol1": str, "sol2": str, "label": object},
    ),
    "lambada": Task(
        *("EleutherAI/lambada_openai", "default", "900124bf3b8235c6daf21033af9948b3f07346c4", "test", ask_lambada),
        {"text": str},
        metrics=("acc", "perplexity"),
        shots_from="test",
    ),
}


TABLE1 = tuple(TASKS)[:6]


HARNESS_NAMES = {"lambada": "lambada_openai"}  # where lm-eval calls a task otherwise


GROUPS = {"table1": TABLE1, "table5": ("loss",), "all": ("loss", *TASKS)}


def download(name, folder):
    """The command that puts a task's files where find_files finds them."""
    where = f"--repo-type=dataset --revision={TASKS[name].revision} --local-dir={Path(folder) / name}"
    return f"hf download {TASKS[name].hub} {where}"


def find_files(folder, name, split):
    """Files of a task's split in a folder of local ones: <task>.<split>.jsonl, for the split that is scored also
    <task>.jsonl, or in a folder <task>, or named as the hub's, a dataset saved to disk or a file whose name ends in the
    split, maybe in shards: the hub's own layout. .parquet as well as .jsonl."""
    task, folder = TASKS[name], Path(folder)
    if not folder.is_dir():
        raise UserError(f"--data_dir={folder} is no folder; it should hold {name}.jsonl, or see README")
    stems = [f"{name}.{split}"] + [name] * (split == task.split)
    for path in (folder / (stem + end) for stem in stems for end in (".jsonl", ".parquet")):
        if path.is_file():
            return [path]
    for inner in (folder / name, folder / task.hub.split("/")[1]):
        if any((inner / mark).exists() for mark in ("dataset_dict.json", "dataset_info.json")):
            return [inner]
        shards, named = re.compile(r"-\d+-of-\d+$"), re.compile(rf"(^|[^a-z]){split}$", re.IGNORECASE)
        found = [p for p in sorted(inner.rglob("*")) if p.suffix in (".jsonl", ".parquet")]
        found = [p for p in found if named.search(shards.sub("", p.stem))]
        found = [p for p in found if task.config in p.relative_to(inner).parts] or found
        if len({(p.parent, p.suffix, shards.sub("", p.stem)) for p in found}) > 1:
            raise UserError(f"{inner} has several files of the {split} split: {', '.join(map(str, found))}; keep one")
        if found:
            return found
    raise UserError(
        f"{folder} has no {name}.jsonl, {name}.{split}.jsonl or .parquet, nor a folder {name} with a file of its "
        f"{split} split; with network: `{download(name, folder)}`"
    )


def read_saved(path, split, scored):
    """Rows of a dataset saved to disk, which must be of the split; one that does not say must be `scored`."""
    found = need("datasets").load_from_disk(str(path))
    if isinstance(found, dict):
        return list(found[split])
    if (str(found.split) if found.split else scored) != split:
        raise ValueError(f"it is {found.split or 'one split'} alone")
    return list(found)


def read_file(path, split, scored):
    """Rows of one local file, or of a dataset saved to disk, as dicts. scored: the split that a task is scored on."""
    try:
        if path.is_dir():
            return read_saved(path, split, scored)
        if path.suffix == ".parquet":
            return need("pyarrow.parquet").read_table(path).to_pylist()
    except UserError:
        raise
    except Exception as e:  # of any of the libraries below them
        what = f"a dataset with the split {split}" if path.is_dir() else "a parquet file, or cut short"
        raise UserError(f"{path} is not {what}: {(str(e) or type(e).__name__).splitlines()[0]}") from None
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends may stand in a JSON string
    except ValueError as e:
        raise UserError(f"{path} is not UTF-8 text: {e}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as e:
            raise UserError(f"{path}, line {number}: not JSON, or cut short ({e})") from None
    return rows


def read_rows(name, split, data_dir):
    """(rows of a task's split, where they are from: dataset and revision, or file and hash)."""
    task = TASKS[name]
    if data_dir:
        paths = find_files(data_dir, name, split)
        rows = [row for path in paths for row in read_file(path, split, task.split)]
        known = [f"{p.name} (sha256 {sha256(p)[:16]})" if p.is_file() else p.name for p in paths]
        where = ", ".join(known)
    else:
        where = f"{task.hub}@{task.revision[:8]}"
        load_dataset = need("datasets").load_dataset
        try:
            rows = list(load_dataset(task.hub, task.config, revision=task.revision, split=split))
        except Exception as e:  # network, hub, disk: each library below has its own
            reason = f"{type(e).__name__}: {(str(e).strip() or '?').splitlines()[0][:200]}"
            raise UserError(
                f"{task.hub} cannot be had from the hub ({reason}); for a machine without network, fetch it on another "
                f"(`{download(name, 'evals')}`) and use --data_dir=evals"
            ) from None
    if not rows:
        raise UserError(f"{where} has no rows")
    return rows, where


def question(name, row, where):
    """The Question of a row; raises UserError that says what is wrong with it. where: file and number, for that."""
    task = TASKS[name]
    if not isinstance(row, dict) or (missing := [c for c in task.columns if c not in row]):
        has = f"no column {', '.join(missing)}" if isinstance(row, dict) else f"a {type(row).__name__}, no columns"
        raise UserError(f"{where} has {has}; {name} takes those of {task.hub}: {', '.join(task.columns)}")
    if odd := [f"{c} is {row[c]!r:.40}" for c, kind in task.columns.items() if not isinstance(row[c], kind)]:
        raise UserError(f"{where} is not a row of {name}: {', '.join(odd)}")
    try:
        asked = task.ask(row)
        lengths = [len("" + choice) for choice in asked.choices]  # of texts
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{where} is not a row of {name}: {type(e).__name__}: {e}") from None
    if not 0 <= asked.gold < len(lengths):
        raise UserError(f"{where}: its label is none of its {len(lengths)} choices")
    if not all(lengths):
        raise UserError(f"{where}: choice {lengths.index(0)} is empty; there is nothing to score")
    return asked


SHOT_SEED = 1234  # of the harness's few-shot examples
