"""eval.py against lm-eval, the field's harness, where that is installed: equal texts, token ids, log-probabilities and
metrics. The harness reads its own task files and scores a folder of export.py with its own class, HFLM."""

import importlib
import json
import os
import textwrap
from unittest import mock

import pytest
from conftest import SHARED, in_process, needs_shared
from test_eval import write_rows

import eval as evaluate
import export
import prepare
import sample
import train
from common import checkpoint, tasks
from common.scoring import encode_pair

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LMEVAL_LOG_LEVEL": "ERROR"}
with mock.patch.dict(os.environ, OFFLINE):  # read as they are imported
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    importlib.import_module("lm_eval.evaluator")  # which `lm_eval` itself puts off

pytestmark = needs_shared
FILES = {
    "hellaswag": "hellaswag/hellaswag_val_10042.normalized.jsonl",
    "piqa": "piqa/hf_piqa_validation.jsonl",
    "arc_easy": "arc/ARC-Easy-Test.hf.jsonl",
    "arc_challenge": "arc/ARC-Challenge-Test.hf.jsonl",
    "openbookqa": "openbookqa/test.hf.jsonl",
    "winogrande": "winogrande/hf_winogrande_xl_validation.jsonl",
}
YAML = {name: f"{name}/{name}.yaml" for name in FILES}  # in the harness's folder of tasks
YAML |= {"arc_easy": "arc/arc_easy.yaml", "arc_challenge": "arc/arc_challenge.yaml"}
YAML |= {"winogrande": "winogrande/default.yaml", "lambada": "lambada/lambada_openai.yaml"}
LIMIT = 100  # documents of each task that are scored
BLOCK = 490  # PIQA's longest answer has 485 of the test's tokens, its longest rows are cut
LAMBADA = [  # texts whose borders are hard
    "There  were  two  spaces  between  all  of  these  words",
    "Word",
    "東京の駅で彼は待っていた。 彼女は来なかった。 それでも彼は 待っていた。",
    " a leading space opens this text, and a space ends it ",
    "A non-breaking space\u00a0does not split\u00a0here, and the last word holds one\u00a0too",
    "the end of a document <|endoftext|> in a text is text, also as its last <|endoftext|>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/: a play, prepared. evals/: task files, first/: their beginnings. tasks/: the harness's definitions, told to
    read evals/."""
    folder = tmp_path_factory.mktemp("lm_eval")
    play = (SHARED / "data/text/tinyshakespeare.txt").read_text(encoding="utf-8")
    (folder / "play.txt").write_text(textwrap.fill(play, 5000))  # else it would only learn where lines end
    words = ("files", f"--input_dir={folder / 'play.txt'}", "--tokenizer=bpe:1024", "--workers=1")
    assert in_process(prepare, *words, f"--out_dir={folder / 'data'}").returncode == 0
    rows = {name: tasks.local_rows(SHARED / "data/eval" / file, name) for name, file in FILES.items()}
    tagged = tasks.local_rows(SHARED / "data/eval/hellaswag/hellaswag_val_wikihow_tagged10.jsonl", "hellaswag")
    columns = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    rows["hellaswag"] = [{c: row[c] for c in columns} for row in tagged + rows["hellaswag"]]
    passages = [" ".join(play.split()[i : i + 25]) for i in range(0, 50_000, 250)]
    rows["lambada"] = [{"text": text} for text in (*LAMBADA, *passages, " ".join(play.split()[:1000]))]
    packaged = importlib.import_module("lm_eval.tasks").__path__[0]
    (folder / "tasks").mkdir()
    for name, of_task in rows.items():
        of_task.sort(key=lambda row: len(json.dumps(row)) < 2000)  # the longest first, some of which are cut
        write_rows(folder / "evals", {name: of_task})
        write_rows(folder / "first", {name: of_task[:LIMIT]})
        split, files = tasks.TASKS[name].split, str(folder / "evals" / f"{name}.jsonl")
        about = {"include": f"{packaged}/{YAML[name]}", "task": name, "dataset_path": "json", "dataset_name": None}
        about |= {f"{other}_split": None for other in ("training", "validation", "test") if other != split}
        about["dataset_kwargs"] = {"data_files": {split: files}, "cache_dir": str(folder / "cache")}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(about))  # JSON is YAML
    return folder


def harness(folder):
    return TaskManager(include_path=str(folder / "tasks"), include_defaults=False)


@pytest.fixture(scope="module")
def run(folder):
    """A run, trained long enough that scores are not all alike."""
    shape = f"--block_size={BLOCK} --n_layer=3 --n_head=4 --n_kv_head=2 --n_embd=64 --batch_tokens={2 * BLOCK}"
    how = f"{shape} --micro_batch=2 --max_steps=120 --warmup_steps=20 --learning_rate=5e-3 --eval_tokens={5 * BLOCK}"
    words = (*how.split(), "--device=cpu", "--compile=false", "--value_mode=resformer_plus")
    assert in_process(train, *words, f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'run'}").returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def lm(folder, run):
    """The harness's own class over the export."""
    assert in_process(export, run, f"--out_dir={folder / 'hf'}").returncode == 0
    lm = HFLM(str(folder / "hf"), trust_remote_code=True, batch_size=16, max_length=BLOCK, device="cpu")
    lm.tokenizer.split_special_tokens = True  # <|endoftext|> in a text is text, as in eval.py
    lm.logits_cache = False  # it takes the wrong ones where rows with equal ids score different numbers of them
    return lm


@pytest.mark.parametrize("name", tasks.TASKS)
def test_texts_and_token_ids_of_whole_splits(folder, run, lm, monkeypatch, name):
    task = harness(folder).load([name])["tasks"][name]
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    ours = []
    for i, q in enumerate(tasks.questions(name, folder / "evals")[0]):
        ours += [(i, j, q.contexts[j], q.delimiter + choice) for j, choice in enumerate(q.choices)]
    assert ours == [(request.doc_id, request.idx, *request.args) for request in task.instances]

    # What the harness would score: (text pair, ids of the context, ids of the continuation).
    found, tokenizer = [], checkpoint.load_tokenizer(checkpoint.find(run))
    monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda requests, **kw: found.extend(requests))
    lm.loglikelihood(task.instances, disable_tqdm=True)
    assert len(found) == len(ours)
    for pair, context, scored in found:
        assert encode_pair(tokenizer, *pair) == (context, scored) and context and scored, pair


def test_texts_that_it_generates_are_ours(run, lm):
    """Prompts of several lengths, so that transformers pads them, and reads its cache."""
    path, how = checkpoint.find(run), {"until": ["\n\n"], "max_gen_toks": 40, "do_sample": False}
    model, tokenizer = checkpoint.load(path), checkpoint.load_tokenizer(path)
    prompts = ["ROMEO:", "To be, or not to be, that is the", "My lord", "It is the east, and Juliet is the sun."]
    rows, *_ = sample.generate(
        model, [tokenizer.encode(text) for text in prompts], 40, temperature=0, eot=tokenizer.end
    )
    requests = [Instance("generate_until", {}, (text, how), i) for i, text in enumerate(prompts)]
    assert lm.generate_until(requests) == [tokenizer.decode(row).split("\n\n")[0] for row in rows]


@pytest.fixture(scope="module")
def theirs(folder, lm):
    with mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"):  # of the bootstrap
        how = {"task_manager": harness(folder), "limit": LIMIT, "bootstrap_iters": 10_000}
        return lm_eval.simple_evaluate(lm, tasks=[*tasks.TASKS], **how)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_scores_and_metrics(folder, run, theirs, name):
    words = (run, f"--task={name}", f"--data_dir={folder / 'first'}", "--dtype=float32")
    assert in_process(evaluate, *words).returncode == 0
    record = evaluate.read_results(run)["step_00000120.safetensors"]["results"][name]
    lines = [json.loads(line) for line in next(run.glob(f"samples_{name}.*")).read_text().splitlines()]
    resps = [resp for sample in theirs["samples"][name] for [resp] in sample["resps"]]
    for line, (right, greedy) in zip(lines, resps, strict=True):  # the harness adds up in fp32
        assert abs(line["log_prob"] - right) < 1e-4 + 1e-7 * abs(right) and line["greedy"] == greedy
    assert len({line["log_prob"] for line in lines}) > len(lines) / 2  # nothing degenerate
    for key in record.keys() & {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}:
        assert abs(record[key] - theirs["results"][name][f"{key},none"]) < 1e-12, key
    if name == "lambada":
        assert record["perplexity"] == pytest.approx(theirs["results"][name]["perplexity,none"], rel=1e-5)
