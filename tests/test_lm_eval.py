"""eval.py against the field's reference harness, lm-eval, where that is installed: the same questions, token ids,
log-probabilities and metrics, on whole splits. Reference: HFLM, its class for transformers' models."""

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
import torch
from conftest import SHARED, in_process, needs_shared, tiny

import checkpoint
import eval as ours
import prepare
import tasks
import train
from bench.scoring import harness_model
from checkpoint import load_tokenizer
from data import Tokenizer

OFFLINE = dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
OFFLINE |= dict(HF_DATASETS_DISABLE_PROGRESS_BARS="1", LMEVAL_LOG_LEVEL="ERROR")
with mock.patch.dict(os.environ, OFFLINE):  # read as they are imported
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    importlib.import_module("lm_eval.evaluator")  # which `lm_eval` itself puts off

    import harness

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


# ---- token ids


def request(*args, kind="loglikelihood"):
    return Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("task", 0, 1))


@pytest.fixture(scope="module")
def neox():
    return Tokenizer(prepare.neox_spec(str(SHARED / "data/tokenizers/gpt-neox-20b.tokenizer.json")))


@pytest.mark.parametrize("case", CASES)
def test_token_ids(tmp_path, neox, case):
    lay(tmp_path, case)
    pairs, found = [pair[2:] for pair in pairs_of(questions(tmp_path, case))], []
    lm = our_lm(tiny(), neox)
    lm._loglikelihood_tokens = lambda requests, **kw: found.extend(requests)
    lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    assert [pair for pair, *_ in found] == pairs and len(pairs) >= len(rows_of_case(case))
    for pair, context, scored in found:
        assert tasks.encode_pair(neox, *pair) == (context, scored), pair
        assert context and scored, pair


# ---- models


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a play, long enough that scores are not all alike."""
    pytest.importorskip("rustbpe")
    folder = tmp_path_factory.mktemp("run")
    (folder / "play.txt").write_text(textwrap.fill(play(), 5000))  # else it would only learn where lines end
    words = ("files", f"--input_dir={folder / 'play.txt'}", "--tokenizer=bpe:1024", "--workers=1")
    assert in_process(prepare, *words, f"--out_dir={folder / 'data'}").returncode == 0
    how = dict(block_size=BLOCK, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, batch_tokens=2 * BLOCK, micro_batch=2)
    how |= dict(max_steps=240, warmup_steps=20, learning_rate=5e-3, eval_tokens=5 * BLOCK, device="cpu", compile=False)
    how |= dict(data_dir=folder / "data", out_dir=folder / "run")
    assert in_process(train, *(f"--{key}={value}" for key, value in how.items())).returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model(run):
    return checkpoint.load(run)


@pytest.fixture(scope="module")
def vocabulary(run):
    return load_tokenizer(checkpoint.find(run))


def our_lm(model, vocabulary):
    return harness.Adapter(model, vocabulary, ours.score, 2048)


def llama_lm(model, vocabulary):
    """The harness's own class over transformers' Llama with our weights and our tokenizer."""
    pytest.importorskip("accelerate")
    lm = harness_model(model, vocabulary)
    lm.batch_size_per_gpu = 16
    lm.logits_cache = False  # it takes the wrong ones where rows with equal ids score different numbers of them
    return lm


# ---- scores


def native(model, tokenizer, name, asked):
    """(Questions, Rows, results) as eval.py has them."""
    documents = tasks.rows_of(name, asked, tokenizer, model.cfg.block_size)
    found = {}
    for done in ours.score(model, documents, 2048):
        found |= {slot: scores for slot, *scores in done}
    return asked, documents, [[found[i, j] for j in range(len(rows))] for i, rows in enumerate(documents)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evals")


@pytest.fixture(scope="module")
def mine(folder, model, vocabulary):
    """What eval.py finds, of each case."""
    found = {}
    for case, (name, _) in CASES.items():
        lay(folder / case, case, 1000 if case == "hellaswag" else None)
        found[case] = native(model, vocabulary, name, questions(folder / case, case))
    return found


@pytest.fixture(scope="module", params=[our_lm, llama_lm], ids=["ours in the harness", "transformers' in the harness"])
def theirs(request, mine, folder, model, vocabulary):
    """{case: (samples in the order of documents, metrics)} of the harness's simple_evaluate."""
    files = {case: {tasks.TASKS[name].split: str(folder / case / f"{name}.jsonl")} for case, (name, _) in CASES.items()}
    manager = harness_tasks(folder / "tasks", files)
    with mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"):  # of the bootstrap
        lm = request.param(model, vocabulary)
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


# ---- the rest


def test_command(tmp_path, run, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    names = ("piqa", "winogrande", "lambada")
    manager = harness_tasks(tmp_path / "tasks", {name: lay(tmp_path / "evals", name) for name in names})
    simple_evaluate = lm_eval.simple_evaluate
    monkeypatch.setitem(os.environ, "DISABLE_MULTIPROC", "1")  # of the bootstrap
    monkeypatch.setattr(harness, "NAMES", {})
    monkeypatch.setattr(harness, "TaskManager", lambda: manager)
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda *a, **kw: simple_evaluate(*a, task_manager=manager, **kw))
    words = (tmp_path / "run", f"--task={','.join(names)}", "--limit=20")
    printed = in_process(ours, *words, "--backend=lm_eval")
    assert printed.returncode == 0, printed.stderr
    assert in_process(ours, *words, f"--data_dir={tmp_path / 'evals'}").returncode == 0
    (about,) = json.loads((tmp_path / "run/eval.json").read_text())["checkpoints"].values()
    lines = [line.split("|") for line in printed.stdout.splitlines() if line.startswith("|")]
    for name in names:
        here, there = (about["results"][f"{name} limit=20{more}"] for more in ("", " backend=lm_eval"))
        assert there.get("acc_norm,none") == here.get("acc_norm")
        assert there["acc,none"] == here["acc"] and abs(there["acc_stderr,none"] - here["acc_stderr"]) < 1e-12
        (start,) = [i for i, cells in enumerate(lines) if cells[1].strip() == name]
        rows = [cells for cells in lines[start : start + 2] if cells[5].strip() == "acc"]  # a task's name stands once
        assert [float(rows[0][7])] == [round(here["acc"], 4)]
    assert abs(there["perplexity,none"] / here["perplexity"] - 1) < 1e-5
    monkeypatch.undo()
    assert "the harness has no task mmlx" in in_process(ours, run, "--task=mmlx", "--backend=lm_eval").stderr


def test_rolling(model, vocabulary):
    """Texts shorter than the block, as long as it, one token longer, and of several blocks."""
    text = play()
    ids = vocabulary.encode(text[:20_000])
    cuts = [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + BLOCK // 2]
    texts = [vocabulary.decode(ids[:n]) for n in cuts] + [""]
    lengths = [len(vocabulary.encode(t)) for t in texts]
    assert min(lengths) == 0 and {BLOCK, BLOCK + 1} & set(lengths) and max(lengths) > 3 * BLOCK
    requests = [request(t, kind="loglikelihood_rolling") for t in texts]
    found = our_lm(model, vocabulary).loglikelihood_rolling(requests, disable_tqdm=True)
    reference = llama_lm(model, vocabulary).loglikelihood_rolling(requests, disable_tqdm=True)
    np.testing.assert_allclose(found, reference, rtol=1e-6, atol=1e-5)


class Letters:
    """A tokenizer of 61 characters, for a model whose text does not repeat itself."""

    def __init__(self, eot=60):
        self.eot = eot

    def encode(self, text):
        return [ord(c) - 64 for c in text]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


def generated(context, tokenizer=None, **how):
    lm = our_lm(tiny(block_size=64).float(), tokenizer or Letters())
    (text,) = lm.generate_until([request(context, how, kind="generate_until")], disable_tqdm=True)
    return text


@torch.inference_mode()
def greedy(ids, n):
    """n tokens after ids as text, each the likeliest, by full forward passes."""
    model = tiny(block_size=64).float()
    ids = list(ids)
    for _ in range(n):
        ids.append(model(torch.tensor([ids]))[0][0, -1].argmax().item())
    return Letters().decode(ids[-n:])


def test_generation():
    text = greedy(Letters().encode("HELLO"), 24)
    assert len(set(text)) > 10 and Letters().decode([Letters().eot]) not in text
    assert generated("HELLO", max_gen_toks=24) == text
    assert generated("HELLO", max_gen_toks=24, until=[], do_sample=False, temperature=0.0) == text
    early, late = text[8:11], text[16:20]
    for until in (early, [late, early], [early, late], ["", early, "never there"]):
        assert generated("HELLO", max_gen_toks=24, until=until) == text.split(early)[0] != text, until
    (eot,) = Letters().encode(text[12])
    assert generated("HELLO", Letters(eot), max_gen_toks=24) == text.split(text[12])[0]
    hot = dict(max_gen_toks=24, temperature=5.0)
    assert generated("HELLO", **hot, do_sample=False) == text
    assert generated("HELLO", **hot, do_sample=True) != text
    assert generated("HELLO", **hot) != text  # as the harness reads it: do_sample follows from the temperature


def test_generation_after_long_and_no_contexts():
    """A context that is too long loses its beginning, so that all new tokens have a place."""
    ids = torch.randint(60, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    assert generated(Letters().decode(ids), max_gen_toks=20) == greedy(ids[-44:], 20)
    assert generated("", max_gen_toks=20) == greedy([Letters().eot], 20)
