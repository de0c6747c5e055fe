"""eval.py against the field's reference harness, lm-eval, where that is installed: the same questions, token ids,
log-probabilities and metrics, on whole splits. The harness scores folders of export.py with its own class, HFLM."""

import functools
import importlib
import json
import os
import random
import shutil
import textwrap
from unittest import mock

import numpy as np
import pytest
from conftest import SHARED, in_process, needs_shared

import checkpoint
import eval as ours
import export
import prepare
import tasks
import train
from hf import HFTokenizer

OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
OFFLINE |= dict(HF_DATASETS_DISABLE_PROGRESS_BARS="1", LMEVAL_LOG_LEVEL="ERROR")
with mock.patch.dict(os.environ, OFFLINE):  # read as they are imported
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    importlib.import_module("lm_eval.evaluator")  # which `lm_eval` itself puts off

pytestmark = needs_shared
EVAL = SHARED / "data/eval"
SHAKESPEARE = SHARED / "data/text/tinyshakespeare.txt"
CASES = {  # name of ours: task, file
    "hellaswag": ("hellaswag", "hellaswag/hellaswag_val_10042.normalized.jsonl"),  # scored on the first 1,000
    "hellaswag_head10": ("hellaswag", "hellaswag/hellaswag_val_head10.jsonl"),
    "hellaswag_tagged10": ("hellaswag", "hellaswag/hellaswag_val_wikihow_tagged10.jsonl"),
    "piqa": ("piqa", "piqa/hf_piqa_validation.jsonl"),
    "arc_easy": ("arc_easy", "arc/ARC-Easy-Test.hf.jsonl"),
    "arc_challenge": ("arc_challenge", "arc/ARC-Challenge-Test.hf.jsonl"),
    "openbookqa": ("openbookqa", "openbookqa/test.hf.jsonl"),
    "winogrande": ("winogrande", "winogrande/hf_winogrande_xl_validation.jsonl"),
    "lambada": ("lambada", None),
    "lambada_odd": ("lambada", None),
}
YAML = {name: f"{name}/{name}.yaml" for name in tasks.TASKS}  # in the harness's folder of tasks
YAML |= {name: f"arc/{name}.yaml" for name in ("arc_easy", "arc_challenge")}
YAML |= dict(winogrande="winogrande/default.yaml", lambada="lambada/lambada_openai.yaml")
BLOCK = 490  # PIQA's longest answer has 485 of the test's tokens, its longest rows are cut
LAMBADA = [
    '"Where did you put the lantern?" he asked. "In the barn," she said. "Then go and fetch the lantern."',
    "The dog barked twice.  The cat hissed.  Nobody in the house knew who had opened the door for the dog",
    "There  were  two  spaces  between  all  of  these  words",
    "Two spaces only at the very end came before the last  word",
    "Word",
    "Two words",
    "A tab\there and a newline\nthere do not split this text, only spaces do",
    "the last token of this one carries a newline\nword",
    "the context ends in a newline\n word",
    "東京の駅で彼は待っていた。 彼女は来なかった。 それでも彼は 待っていた。",
    "The combining accent in cafe\u0301 and the composed one in café differ, yet both are a cafe\u0301",
    "The emoji 🙂 was the only thing in the message, so she answered with the same 🙂",
    " a leading space opens this text and the harness keeps it in the context",
    "This text ends in a space so the last piece is empty ",
    "Use {{braces}} and {% percent %} freely: the template must not render the {{braces}}",
    "Back\\slash and quote' and double\" quote, then again a quote'",
    "A non-breaking space\u00a0does not split\u00a0here, and the last word holds one\u00a0too",
    "the end of a document <|endoftext|> in a text is text, also as its last <|endoftext|>",
]


# ---- documents


def play():
    return SHAKESPEARE.read_text(encoding="utf-8")


def passages(n, length=25):
    """n LAMBADA-like texts of a play, the last words short: the harder they are, the less sure is a standard error."""
    words = play().split()
    ends = [i for i in range(length, len(words)) if len(words[i - 1]) < 5]
    return [" ".join(words[i - length : i]) for i in random.Random(0).sample(ends, n)]


@functools.cache
def rows_of_case(case):
    _, file = CASES[case]
    if file:
        return tasks.jsonl_rows(EVAL / file)
    texts = LAMBADA if case == "lambada_odd" else [*passages(2000), *passages(1, 1000)]  # that one exceeds the block
    return [{"text": text} for text in texts]


def lay(folder, case, limit=None):
    """The rows of a case in a folder for --data_dir. Returns {split: file}, as harness_tasks takes it."""
    task, _ = CASES[case]
    folder.mkdir(exist_ok=True)
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_case(case)[:limit]), encoding="utf-8")
    return {tasks.TASKS[task].split: str(path)}


def harness_tasks(folder, cases):
    """The harness's own definitions of {case: {split: file}}, told to read these files."""
    folder.mkdir(exist_ok=True)
    packaged = importlib.import_module("lm_eval.tasks").__path__[0]
    for case, files in cases.items():
        about = {"include": f"{packaged}/{YAML[CASES[case][0]]}", "task": case, "dataset_path": "json"}
        about |= {"dataset_name": None, "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
        for split in ("training", "validation", "test"):
            if split not in files:
                about[f"{split}_split"] = None
        (folder / f"{case}.yaml").write_text(json.dumps(about))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def questions(folder, case):
    task, _ = CASES[case]
    return tasks.questions(task, ours.EvalConfig(task=(task,), data_dir=str(folder)))[0]


def pairs_of(asked):
    """[(document, choice, context, what is scored)] of all Questions, in order."""
    for i, q in enumerate(asked):
        for j, (context, choice) in enumerate(zip(q.contexts, q.choices, strict=True)):
            yield i, j, context, q.delimiter + choice


# ---- questions


@pytest.mark.parametrize("case", CASES)
def test_questions(tmp_path, case):
    files = lay(tmp_path / "rows", case)
    asked = questions(tmp_path / "rows", case)
    task = harness_tasks(tmp_path / "tasks", {case: files}).load([case])["tasks"][case]
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    theirs = [(request.doc_id, request.idx, *request.args) for request in task.instances]
    assert list(pairs_of(asked)) == theirs
    assert len(asked) == len(rows_of_case(case))
    docs = {request.doc_id: request.doc for request in task.instances}
    for i, q in enumerate(asked):  # what the harness counts as right, as it says itself
        if len(q.choices) > 1:
            only = [(0.0 if j == q.gold else -1.0, False) for j in range(len(q.choices))]
            assert task.process_results(docs[i], only)["acc"] == 1.0, i


# ---- models


def train_and_export(folder, mode):
    """(run, its export): long enough that scores are not all alike."""
    how = dict(block_size=BLOCK, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, batch_tokens=2 * BLOCK, micro_batch=2)
    how |= dict(max_steps=240, warmup_steps=20, learning_rate=5e-3, eval_tokens=5 * BLOCK, device="cpu", compile=False)
    how |= dict(data_dir=folder / "data", out_dir=folder / mode, value_mode=mode)
    assert in_process(train, *(f"--{key}={value}" for key, value in how.items())).returncode == 0
    result = in_process(export, folder / mode, f"--out_dir={folder / f'hf_{mode}'}")
    assert result.returncode == 0, result.stderr
    return folder / mode, folder / f"hf_{mode}"


@pytest.fixture(scope="module")
def play_data(tmp_path_factory):
    """A folder with a play as data."""
    pytest.importorskip("rustbpe")
    folder = tmp_path_factory.mktemp("run")
    (folder / "play.txt").write_text(textwrap.fill(play(), 5000))  # else it would only learn where lines end
    words = ("files", f"--input_dir={folder / 'play.txt'}", "--tokenizer=bpe:1024", "--workers=1")
    assert in_process(prepare, *words, f"--out_dir={folder / 'data'}").returncode == 0
    return folder


@pytest.fixture(scope="module", params=["vanilla", "resformer_plus"])  # a plain Llama, and one with code of its own
def folders(request, play_data):
    return train_and_export(play_data, request.param)


@pytest.fixture(scope="module")
def lm(folders):
    """The harness's own class over the export."""
    lm = HFLM(pretrained=str(folders[1]), trust_remote_code=True, batch_size=16, max_length=BLOCK, device="cpu")
    lm.tokenizer.split_special_tokens = True  # <|endoftext|> in a text is text, as in eval.py
    lm.logits_cache = False  # it takes the wrong ones where rows with equal ids score different numbers of them
    return lm


# ---- token ids


def request(*args, kind="loglikelihood"):
    return Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("task", 0, 1))


@pytest.mark.parametrize("case", CASES)
def test_token_ids(tmp_path, folders, lm, monkeypatch, case):
    """Of the exported tokenizer in the harness, and of ours."""
    lay(tmp_path, case)
    tokenizer = checkpoint.load_tokenizer(checkpoint.find(folders[0]))
    pairs, found = [pair[2:] for pair in pairs_of(questions(tmp_path, case))], []
    monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda requests, **kw: found.extend(requests))
    lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    assert [pair for pair, *_ in found] == pairs and len(pairs) >= len(rows_of_case(case))
    for pair, context, scored in found:
        assert tasks.encode_pair(tokenizer, *pair) == (context, scored), pair
        assert context and scored, pair


def test_token_ids_with_a_prefix(tmp_path, folders, monkeypatch):
    """A tokenizer that puts a token before each text, as Llama's does."""
    folder, eot = tmp_path / "llama", "<|endoftext|>"
    shutil.copytree(folders[1], folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    first, text = {"SpecialToken": {"id": eot, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ids = [token["id"] for token in spec["added_tokens"] if token["content"] == eot]
    special = {eot: {"id": eot, "ids": ids, "tokens": [eot]}}
    both = [first, text, {"Sequence": {"id": "B", "type_id": 1}}]
    spec["post_processor"] = {"type": "TemplateProcessing", "single": [first, text], "pair": both}
    spec["post_processor"]["special_tokens"] = special
    path.write_text(json.dumps(spec), encoding="utf-8")
    lm = HFLM(pretrained=str(folder), trust_remote_code=True, batch_size=16, max_length=BLOCK, device="cpu")
    pairs, found = [("the king", " and"), ("a ", "b"), ("", "no context")], []
    monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda requests, **kw: found.extend(requests))
    lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    tokenizer = HFTokenizer(folder)
    assert tokenizer.prefix == ids == [tokenizer.eot]
    for pair, context, scored in found:
        assert context[:1] == ids and tasks.encode_pair(tokenizer, *pair) == (context, scored), pair


# ---- scores


def native(model, tokenizer, name, asked):
    """(Questions, Requests, results) as eval.py has them."""
    documents = tasks.requests_of(name, asked, tokenizer, model.cfg.block_size)
    found = {}
    for done in ours.score(model, documents, 2048):
        found |= {slot: scores for slot, *scores in done}
    return asked, documents, [[found[i, j] for j in range(len(rows))] for i, rows in enumerate(documents)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evals")


@pytest.fixture(scope="module")
def mine(folder, folders):
    """What eval.py finds, of each case."""
    found, model = {}, checkpoint.load(folders[0])
    vocabulary = checkpoint.load_tokenizer(checkpoint.find(folders[0]))
    for case, (name, _) in CASES.items():
        lay(folder / case, case, 1000 if case == "hellaswag" else None)
        found[case] = native(model, vocabulary, name, questions(folder / case, case))
    return found


@pytest.fixture(scope="module")
def theirs(mine, folder, lm):
    """{case: (samples in the order of documents, metrics)} of the harness's simple_evaluate."""
    files = {case: {tasks.TASKS[name].split: str(folder / case / f"{name}.jsonl")} for case, (name, _) in CASES.items()}
    manager = harness_tasks(folder / "tasks", files)
    with mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"):  # of the bootstrap
        found = lm_eval.simple_evaluate(lm, tasks=list(CASES), task_manager=manager, bootstrap_iters=10_000)
    ordered = {case: sorted(samples, key=lambda s: s["doc_id"]) for case, samples in found["samples"].items()}
    return {case: (samples, found["results"][case]) for case, samples in ordered.items()}


def same_scores(results, samples):
    """Assert that all log-probabilities are within 1e-4 and all greedy flags equal. The harness adds up in fp32, in
    which numbers above 1,000 are 1.2e-4 apart."""
    assert len(results) == len(samples)
    for i, (scores, sample) in enumerate(zip(results, samples, strict=True)):
        for (total, greedy), [(reference, right)] in zip(scores, sample["resps"], strict=True):
            assert abs(total - reference) < 1e-4 + 1e-7 * abs(reference) and greedy == right, (i, total, reference)


def same_predictions(asked, results, samples, found):
    """Assert that a document is right here and wrong there only where its two best choices are as good as equal, and
    few are; {metric: values as the harness has them}."""
    agreed = {}
    for metric, values in found.items():
        agreed[metric] = np.array([sample[metric] for sample in samples])
        differ = np.flatnonzero(values != agreed[metric])
        assert len(differ) <= 3, (metric, differ)
        for i in differ:
            sums = np.array([total for total, _ in results[i]])
            sums = sums / [len(choice) for choice in asked[i].choices] if metric == "acc_norm" else sums
            assert np.diff(np.sort(sums)[-2:]) < 1e-4, (metric, i)
    return agreed


@pytest.mark.parametrize("case", CASES)
def test_scores_and_metrics(mine, theirs, case):
    name, _ = CASES[case]
    asked, documents, results = mine[case]
    samples, reference = theirs[case]
    same_scores(results, samples)
    found = tasks.per_document(name, asked, results)
    accuracies = {metric: values for metric, values in found.items() if metric != "perplexity"}
    agreed = same_predictions(asked, results, samples, accuracies)
    record = tasks.task_record(asked, documents, found | agreed)
    for metric in accuracies:
        for key in (metric, f"{metric}_stderr"):
            assert abs(record[key] - reference[f"{key},none"]) < 1e-12, key
    assert record["n"] == len(samples) and (record["cut"] > 0) == (case in ("piqa", "lambada"))
    totals = {round(total, 4) for scores in results for total, _ in scores}
    assert record["n"] < 20 or len(totals) > 0.9 * sum(map(len, results))  # nothing degenerate
    if name == "lambada":
        assert abs(record["perplexity"] / reference["perplexity,none"] - 1) < 1e-5
    if case == "lambada":  # of fewer documents, the two methods' errors differ more
        assert 0 < record["acc"] < 1
        assert abs(record["perplexity_stderr"] / reference["perplexity_stderr,none"] - 1) < 0.05
