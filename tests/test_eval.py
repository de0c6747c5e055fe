"""Evaluation: what is asked, what is scored, what is printed; test_lm_eval.py compares it with the harness itself."""

import contextlib
import dataclasses
import json
import math
import os
import random
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import COVER, ROOT, byte_tokenizer, finished, in_process, make_data, refused, script, tiny
from test_train import torchrun

import checkpoint
import eval as e
import plot
import scoring
import tasks
import train
from data import Corpus
from model import GPT
from oldconfig import UserError
from oldfiles import read_records
from runtime import Distributed
from value_modes import ModelConfig

ARC = {"id": "x", "question": "What is wet?", "choices": {"text": ["sand", "rain", "dust"], "label": ["A", "B", "C"]}}
ROWS = {
    "hellaswag": dict(
        activity_label="How to fly",
        ctx_a=" [header] First [title] Jump [step] high.",
        ctx_b="then YOU",
        endings=["fall.", "[step] stay  up [note].", "  swim. ", "x  [a]  y"],
        label="1",
    ),
    "piqa": dict(goal="open it", sol1="push", sol2="pull hard ", label=1),
    "arc_easy": ARC | {"answerKey": "B"},
    "arc_challenge": ARC | {"choices": {"text": ["sand", "rain"], "label": ["1", "2"]}, "answerKey": "2"},
    "openbookqa": dict(id="1", question_stem="rain is", choices=ARC["choices"], answerKey=" C"),
    "winogrande": dict(sentence="Ann paid Bea because _ owed her.", option1="Ann", option2="Bea", answer="1"),
    "lambada": dict(text="he came, he saw, he  left"),
}
ASKED = {
    "hellaswag": tasks.Question(
        ("How to fly:  First. Jump high. Then you",) * 4, ("fall.", " stay up .", "swim.", "x  y"), 1
    ),
    "piqa": tasks.Question(("Question: open it\nAnswer:",) * 2, ("push", "pull hard "), 1),
    "arc_easy": tasks.Question(("Question: What is wet?\nAnswer:",) * 3, ("sand", "rain", "dust"), 1),
    "arc_challenge": tasks.Question(("Question: What is wet?\nAnswer:",) * 2, ("sand", "rain"), 1),
    "openbookqa": tasks.Question(("rain is",) * 3, ("sand", "rain", "dust"), 2),
    "winogrande": tasks.Question(("Ann paid Bea because Ann", "Ann paid Bea because Bea"), ("owed her.",) * 2, 0),
    "lambada": tasks.Question(("he came, he saw, he ",), (" left",), 0, delimiter=""),
}


# ---- what is asked


def test_rows_become_questions():
    for name in tasks.TASKS:
        assert tasks.question(name, ROWS[name], "row 0") == ASKED[name], name


def write_rows(folder, rows=ROWS):
    """A folder of local task files; rows: {task: one row, or a list}."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of in rows.items():
        lines = [json.dumps(row) + "\n" for row in (of if isinstance(of, list) else [of])]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_task_names():
    six = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")  # the paper's order
    groups = {"table1": six, "table5": ("loss",), "all": ("loss", *six, "lambada")}
    groups |= {"piqa,loss,piqa": ("piqa", "loss"), "table1,lambada": (*six, "lambada")}
    for words, names in groups.items():
        assert e.EvalConfig(task=tuple(words.split(","))).task == names, words


# ---- where rows come from


HUB_CARD = """---
configs:
- config_name: ARC-Challenge
  data_files: [{split: test, path: parts/challenge-*}]
- config_name: ARC-Easy
  data_files: [{split: test, path: parts/easy-*}]
---
"""


def layouts(folder):
    """The same two rows in all the layouts that are read: (rows, {name: data_dir})."""
    import datasets

    def write(file, n):
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows[:n]).to_parquet(file)

    rows = [ROWS["arc_easy"], ARC | {"answerKey": "C"}]
    found = {name: folder / name for name in ("jsonl", "parquet", "hub", "card", "shards")}
    write_rows(found["jsonl"], {"arc_easy": rows})
    write(found["parquet"] / "arc_easy.parquet", 2)
    for config, n in (("ARC-Easy", 2), ("ARC-Challenge", 1)):  # as `hf download` leaves them
        hub = found["hub"] / "arc_easy"
        write(hub / config / "test-00000-of-00001.parquet", n)
        write(hub / config / "train-00000-of-00001.parquet", 1)
        (hub / ".cache/huggingface/download" / config).mkdir(parents=True)
        (hub / ".cache/huggingface/download" / config / "test.parquet.metadata").write_text("x")
    card = found["card"] / "arc_easy"
    write(card / "parts/easy-0.parquet", 2)
    write(card / "parts/challenge-0.parquet", 1)
    (card / "README.md").write_text(HUB_CARD)
    shards = {f"test-0000{i}-of-00002": row for i, row in enumerate(rows)}
    write_rows(found["shards"] / "arc_easy", shards | {"train": rows[:1]})
    return rows, found


def test_local_layouts(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows, found = layouts(tmp_path)
    for name, data_dir in found.items():
        assert tasks.local_rows("arc_easy", data_dir)[0] == rows, name
    first, where = tasks.local_rows("arc_easy", found["shards"])
    path = found["shards"] / "arc_easy" / "test-00000-of-00002.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("sand", "salt"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, now = tasks.local_rows("arc_easy", found["shards"])
    assert changed != first and now != where and where.startswith("arc_easy (sha256 ")
    odd = found["jsonl"] / "piqa.jsonl"
    odd.write_text('\ufeff{"goal": "\u2028"}\n\n', encoding="utf-8")  # an empty line at the end is none
    rows, where = tasks.local_rows("piqa", found["jsonl"])
    assert rows == [{"goal": "\u2028"}] and where.startswith("piqa.jsonl (sha256 ")


def test_the_hub_is_asked_for_a_fixed_revision(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(tasks, "hub_is_there", lambda task: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: asked.append((*a, kw)) or [ROWS["piqa"]])
    found, where = tasks.questions("piqa", e.EvalConfig(task=("piqa",)))
    revision = "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1"
    assert asked == [("baber/piqa", None, dict(revision=revision, split="validation"))]
    assert found == [ASKED["piqa"]] and where == "baber/piqa@142f6d73"
    assert all(len(task.revision) == 40 for task in tasks.TASKS.values())


def test_without_network(tmp_path):
    """One request, no retries, one sentence: the host's name leads nowhere."""
    env = {"HF_ENDPOINT": "http://nowhere.invalid", "HF_HOME": str(tmp_path)}
    code = "import tasks, oldconfig; oldconfig.run_main(tasks.hub_rows, 'hellaswag')"
    result = finished([sys.executable, "-c", code], cwd=ROOT, env=os.environ | env)
    refused(result, "Rowan/hellaswag cannot be read from the hub", "--local-dir=evals/hellaswag", "--data_dir=evals")
    assert len(result.stderr.splitlines()) == 1


# ---- token ids


class Merging:
    """Token ids of a tokenizer with the words "ab" and " c", else of characters: borders of texts can vanish in it."""

    eot, prefix = 0, []

    def encode(self, text):
        ids = []
        while text:
            n = 2 if text[:2] in ("ab", " c") else 1
            ids.append(1000 if text[:n] == "ab" else 1001 if n == 2 else ord(text[0]))
            text = text[n:]
        return ids


def test_border_of_context_and_continuation():
    pairs = {
        ("xy", " cd"): ([120, 121], [1001, 100]),
        ("xy ", "cd"): ([120, 121], [1001, 100]),  # the space goes over, and into a word
        ("xy\n ", "c"): ([120, 121], [10, 1001]),  # any white space
        ("xa", "bc"): ([120, 97], [99]),  # "ab" is one token of the whole, which has one less
        ("", " c"): ([0], [1001]),  # no context: the end of a document
        ("  ", "c"): ([0], [32, 1001]),
    }
    for pair, ids in pairs.items():
        assert tasks.encode_pair(Merging(), *pair) == ids, pair


def test_too_long_is_cut_on_the_left():
    assert tasks.cut_to_block([1, 2, 3], [4, 5], 4) == tasks.Request(
        [1, 2, 3, 4, 5], 2, False
    )  # the last one is not read
    assert tasks.cut_to_block([1, 2, 3], [4, 5], 3) == tasks.Request([2, 3, 4, 5], 2, True)
    assert tasks.cut_to_block([1, 2], [3, 4], 2) == tasks.Request([2, 3, 4], 2, True)
    with pytest.raises(ValueError, match="3 tokens are to be scored, but the model's block has 2; leave this task out"):
        tasks.cut_to_block([1], [2, 3, 4], 2)
    with pytest.raises(ValueError, match="no tokens of its own to score"):
        tasks.cut_to_block([1], [], 2)


# ---- scores


def documents(n=24, block_size=32, seed=0, vocab=61):
    """Questions of all shapes: choices that share a context, contexts that differ in the middle or from the start,
    single choices, choices of one token, of equal and of one inside another."""
    g, found = random.Random(seed), []
    new = lambda low, high: [g.randrange(vocab) for _ in range(g.randint(low, high))]  # noqa: E731
    for i in range(n):
        context, k = new(1, 20), g.randint(2, 5)
        ends = [new(1, 9) for _ in range(k)]
        pairs = {
            0: [(context, end) for end in ends],
            1: [(context + new(1, 2), end) for end in ends],
            2: [(new(1, 30), end) for end in ends],
            3: [(new(28, 40), ends[0])],
            4: [(context, end[:1]) for end in ends],
            5: [(context, ends[0] + end) for end in (ends[1][:3], ends[2 % k][:2], ends[1][:3])],
        }[i % 6]
        found.append([tasks.cut_to_block(*pair, block_size) for pair in pairs])
    return found


def naive(model, docs):
    """{(document, choice): (sum, greedy)}, one at a time, by the definition."""
    found = {}
    for i, rows in enumerate(docs):
        for j, row in enumerate(rows):
            log_probs = model(torch.tensor([row.ids[:-1]]))[0][0].double().log_softmax(-1)[-row.n_scored :]
            target = torch.tensor(row.ids[-row.n_scored :])
            total = log_probs[range(row.n_scored), target].sum().item()
            found[i, j] = (total, bool((log_probs.argmax(-1) == target).all()))
    return found


def scored(model, docs, batch_tokens):
    found = [choice for done in scoring.score(model, docs, batch_tokens) for choice in done]
    assert len(found) == sum(map(len, docs))  # each once
    return {slot: (total, greedy) for slot, total, greedy in found}


def greedy_ends(model, docs):
    """The same questions, the first choice of every fourth one replaced by what the model itself would say."""
    for rows in docs[::4]:
        row = rows[0]
        ids = row.ids[: -row.n_scored]
        while len(ids) < len(row.ids):
            ids = [*ids, model(torch.tensor([ids]))[0][0, -1].argmax().item()]
        rows[0] = row._replace(ids=ids)
    return docs


def same_scores(found, wanted, atol, what):
    assert found.keys() == wanted.keys()
    for slot, (total, greedy) in wanted.items():
        assert abs(found[slot][0] - total) < atol and found[slot][1] == greedy, (what, slot)


def test_scores_equal_the_definition():
    for mode in COVER:
        model = tiny(mode)
        docs = greedy_ends(model, documents(12))
        wanted = naive(model, docs)
        assert {greedy for _, greedy in wanted.values()} == {True, False}
        assert any(row.cut for rows in docs for row in rows)
        same_scores(scored(model, docs, 64), wanted, 1e-9, mode)


def test_scores_depend_on_nothing_else():
    """On batch size, padding, order: in fp32, at sums of 10 to 50 nats."""
    model = GPT(ModelConfig(997, block_size=64, n_layer=4, n_head=4, n_embd=64, init_std=0.1), seed=1).eval()
    docs = documents(60, block_size=64, vocab=997)
    wanted = naive(model, docs)
    assert min(total for total, _ in wanted.values()) < -50
    order = random.Random(1).sample(range(60), 60)
    shuffled = scored(model, [docs[i] for i in order], 500)
    same_scores({(order[i], j): scores for (i, j), scores in shuffled.items()}, wanted, 1e-5, "order")
    for batch_tokens in (1, 100, 2048, 10_000):
        same_scores(scored(model, docs, batch_tokens), wanted, 1e-5, batch_tokens)


def test_nothing_is_computed_twice_or_for_nothing(monkeypatch):
    """Tokens through the layers: a beginning once, ends without their last token; the head: once for each place that
    predicts a scored token, and no more than its chunk at a time."""
    model, seen, head = tiny(), [], []
    docs = [
        [tasks.Request([1, 2, 3, 4, 5], 2), tasks.Request([1, 2, 3, 4, 6], 2), tasks.Request([1, 2, 3, 7, 8], 2)],
        [tasks.Request([9, 9, 9], 1)],
    ]
    hook = model.blocks[0].register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].shape[:2].numel()))
    model.head.register_forward_hook(lambda _, inputs, out: head.append(len(inputs[0])))
    scored(model, docs, 1)  # a batch for each question
    assert seen == [6, 2] and head == [4, 1]  # 1 2 3, 4, 4, 7; after 3 (for 4, 4, 7), after each 4, after 7
    hook.remove()
    head.clear()
    model.cfg = dataclasses.replace(model.cfg, vocab_size=2**25)  # rows of the head in chunks of 2^26 / V
    scored(model, docs, 100)
    assert head == [2, 2, 1]


def test_half_precision():
    """Weights and layers in bf16, log-probabilities not: each row's probabilities still add up to 1."""
    model = tiny().bfloat16()
    rows = [tasks.Request([5, 6, 7, i], 1) for i in range(61)]
    scores = scored(model, [rows], 100).values()
    assert abs(sum(math.exp(s) for s, _ in scores) - 1) < 1e-6 and sum(g for _, g in scores) == 1


# ---- metrics


def test_accuracies_by_hand():
    """Characters, not bytes, without the space before a choice; the first of equal sums."""
    asked = [
        tasks.Question(("c",) * 2, ("long answer", "no"), 0),  # sums say 1, per character 0
        tasks.Question(("c",) * 2, ("ääää", "yes?!"), 0),  # 4 characters in 8 bytes
        tasks.Question(("c",) * 3, ("a", "b", "c"), 1),  # a tie of all
    ]
    results = [[(-6.0, False), (-3.0, False)], [(-4.0, False), (-4.5, True)], [(-1.0, False)] * 3]
    found = tasks.per_document("arc_easy", asked, results)
    assert found["acc"].tolist() == [0, 1, 0] and found["acc_norm"].tolist() == [1, 0, 0]
    close = [tasks.Question(("c",) * 2, ("ab", "abc"), 1)]  # with the space before them it would be the first
    assert tasks.per_document("arc_easy", close, [[(-2.0, False), (-2.9, False)]])["acc_norm"].tolist() == [1]
    assert list(tasks.per_document("winogrande", asked, results)) == ["acc"]
    record = tasks.task_record(
        asked, [[tasks.Request([1], 1), tasks.Request([1], 1, True)]] * 2 + [[tasks.Request([1], 1)]], found
    )
    assert record["n"] == 3 and record["cut"] == 2 and record["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)
    assert record["acc"] == pytest.approx(1 / 3)
    assert record["acc_stderr"] == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2))  # sqrt(p (1 - p) / (n - 1))


def test_lambadas_metrics():
    rng = np.random.default_rng(0)
    nats = rng.gamma(2, 1.5, 400)
    found = tasks.per_document("lambada", [ASKED["lambada"]] * 400, [[(-x, x < 1)] for x in nats])
    record = tasks.task_record([ASKED["lambada"]] * 400, [[tasks.Request([1], 1)]] * 400, found)
    assert record["acc"] == (nats < 1).mean() and record["perplexity"] == pytest.approx(math.exp(nats.mean()))
    bootstrap = np.exp(rng.choice(nats, (2000, 400)).mean(axis=1)).std()
    assert record["perplexity_stderr"] == pytest.approx(bootstrap, rel=0.1) and record["chance"] == 0


# ---- loss


def loss_of(model, corpus, folder, **how):
    """The record of run_loss, for a model that has no checkpoint."""
    entry = e.Entry(folder / "none.safetensors", str(random.random()), {}, corpus.tokenizer, corpus)
    e.run_loss(entry, model, e.EvalConfig(task=("loss",), **how), Distributed("cpu"))
    return entry.records["loss"]


def test_loss_is_that_of_training_with_bos(data_dir, tmp_path):
    words = "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --batch_tokens=128 --max_steps=2".split()
    words += [f"--data_dir={data_dir}", "--eval_tokens=0", "--dtype=float32"]
    losses = []
    for bos in ("true", "false"):
        run = tmp_path / bos
        assert in_process(train, *words, f"--bos={bos}", f"--out_dir={run}").returncode == 0
        assert in_process(e, run, "--task=loss", "--dtype=float32").returncode == 0
        (found,) = json.loads((run / "eval.json").read_text())["checkpoints"].values()
        losses.append(plot.read_run(run).final_loss)
        assert plot.read_run(run).start["bos"] == (bos == "true")
        assert found["results"]["loss"]["val_mean"] == pytest.approx(losses[-1], abs=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-5
    both = in_process(e, tmp_path / "true", tmp_path / "false", "--task=loss")
    refused(both, "have different data", "only if both or none were trained with --bos")


def test_loss_takes_every_token(data_dir, tmp_path):
    model = GPT(ModelConfig(257, block_size=32, n_layer=2, n_head=2, n_embd=16, init_std=0.3)).double().eval()
    corpus = Corpus(data_dir, 32, mixture={"prose": 1, "code": 3})
    losses, bits = [], []
    for domain in ("prose", "code"):
        ids = torch.from_numpy(np.fromfile(data_dir / "val" / f"{domain}.bin", "<u2").astype(np.int64))
        nats = 0.0
        for start in range(0, len(ids) - 1, 32):  # the last window is shorter: 2,999 = 93 x 32 + 23
            x, y = ids[start : start + 32][: len(ids) - 1 - start], ids[start + 1 : start + 33]
            nats -= model(x[None])[0][0].log_softmax(-1)[range(len(y)), y].sum().item()
        losses.append(nats / 2999)
        bits.append(nats / (ids[1:] < 256).sum().item() / math.log(2))  # an end of document has no bytes
    for batch_tokens in (1, 500):
        found = loss_of(model, corpus, tmp_path, batch_tokens=batch_tokens)
        assert found["tokens"] == {"prose": 2999, "code": 2999}
        np.testing.assert_allclose([found["val"]["prose"], found["val"]["code"]], losses, rtol=1e-6)
        np.testing.assert_allclose([found["bpb"]["prose"], found["bpb"]["code"]], bits, rtol=1e-6)
        assert found["val_mean"] == pytest.approx(sum(losses) / 2) and found["bpb_mean"] == pytest.approx(sum(bits) / 2)
        assert found["val_mixture"] == pytest.approx(losses[0] / 4 + losses[1] * 3 / 4)
        assert found["perplexity"]["code"] == pytest.approx(math.exp(losses[1]))


# ---- runs


MORE = {name: [row, row] for name, row in ROWS.items()} | {
    "piqa": [dict(goal=f"{i} of", sol1="a" * (1 + i % 3), sol2="bcdefg"[i % 4 :], label=i % 2) for i in range(30)],
    "openbookqa": [ROWS["openbookqa"] | {"question_stem": "abcdefghij" * i} for i in range(12)],  # some too long
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data, task files and two trained runs, a and b; some questions are longer than their block."""
    folder = tmp_path_factory.mktemp("runs")
    make_data(folder / "data")
    write_rows(folder / "evals", MORE)
    for name, mode in (("a", "vanilla"), ("b", "svformer")):
        shape = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_tokens=256 --micro_batch=4".split()
        steps = "--max_steps=8 --warmup_steps=2 --learning_rate=5e-3 --eval_every=8 --dtype=float32".split()
        words = [f"--data_dir={folder / 'data'}", f"--out_dir={folder / name}", f"--value_mode={mode}"]
        assert in_process(train, *shape, *steps, *words).returncode == 0
    return folder


def evaluate(runs, *words):
    result = in_process(e, *words, f"--data_dir={runs / 'evals'}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def forget(*folders):
    """Remove what has been scored."""
    for folder in folders:
        for path in folder.glob("samples_*"):
            path.unlink()


def samples_of(run):
    """The records of all samples files, in the order of tasks, documents and choices."""
    found = [record for path in run.glob("samples_*") for record in read_records(path)[1:]]
    return sorted(found, key=lambda record: (record["task"], record["document"], record["choice"]))


def results(run, step=8):
    return json.loads((run / "eval.json").read_text())["checkpoints"][f"step_{step:08d}.safetensors"]["results"]


def same(found, wanted):
    """Records of tasks are equal but for rounding and the time they took."""
    for name, record in wanted.items():
        assert found[name].keys() == record.keys()
        for key in record.keys() - {"seconds"}:
            exact = record[key] is None or isinstance(record[key], str)
            close = record[key] if exact else pytest.approx(record[key], rel=1e-5)
            assert found[name][key] == close, (name, key)


def test_a_run_as_a_user_does_it(runs, tmp_path):
    result = script("eval.py", runs / "a", "--task=all", f"--data_dir={runs / 'evals'}")
    assert result.returncode == 0 and "vanilla, lambada: 50 of 50 tokens to score" in result.stderr, result.stderr
    out, found, samples = result.stdout, results(runs / "a"), samples_of(runs / "a")
    assert list(found) == ["loss", *tasks.TASKS]
    tokenizer = byte_tokenizer()
    for name in tasks.TASKS:
        best = {}  # {document: its likeliest choice, of equal ones the first}
        of_task = [line for line in samples if line["task"] == name]
        for line in sorted(of_task, key=lambda line: (line["log_prob"], -line["choice"])):
            best[line["document"]] = line
            text = line["context"].rstrip() + tokenizer.decode(line["ids"])
            assert line["context"] + line["continuation"] == text
        if name != "lambada":
            assert found[name]["acc"] == np.mean([line["choice"] == line["gold"] for line in best.values()])
        assert found[name]["n"] == len(best) == len(MORE[name])
        assert f"| {found[name]['acc']:.4f} ± {found[name]['acc_stderr']:.4f} |" in out
    assert found["openbookqa"]["cut"] == 5 and "cut on the left: 5 of openbookqa" in out  # 10 i + 5 > 64 + 1: i >= 6
    model, corpus = checkpoint.load(runs / "a"), Corpus(runs / "data", 64)
    assert found["loss"]["val"] == loss_of(model, corpus, tmp_path)["val"]
    assert (runs / "a" / "eval.md").read_text() == out
    assert "| chance | 0.2500 | 0.3333 | 0.5000 | 0.5000 | 0.3333 | 0.5000 |" in out


def test_runs_side_by_side(runs, tmp_path):
    out = evaluate(runs, runs / "a", runs / "b", "--task=table1,table5", f"--out_file={tmp_path}/t.md")
    differences = [line for line in out.splitlines() if "−" in line]
    assert {line.split(" | ")[0] for line in differences} == {"| svformer − vanilla"}
    assert (tmp_path / "t.md").read_text() == out
    a, b = results(runs / "a"), results(runs / "b")
    assert out.count("| vanilla |") == out.count("| svformer |") == 5  # acc, acc_norm, loss, perplexity, bits per byte
    acc = [b[name]["acc"] - a[name]["acc"] for name in tasks.TABLE1]
    (line,) = [line for line in differences if line.count("±") == 7]
    assert [cell.split()[0] for cell in line.split(" | ")[1:]] == [f"{x:+.4f}" for x in (*acc, np.mean(acc))]
    gap = b["loss"]["val_mean"] - a["loss"]["val_mean"]
    assert f"{gap:+.4f} |" in out

    same = evaluate(runs, *[runs / "a" / "step_00000008.safetensors"] * 2, "--task=piqa", f"--out_file={tmp_path}/t.md")
    assert "+0.0000 ± 0.0000" in same  # paired: however wide the error of each


def test_results_are_kept_apart(runs, tmp_path):
    """Of other settings and other data: the newest data have the plain name."""
    evaluate(runs, runs / "b", "--task=piqa,loss")
    scores, whole = {}, results(runs / "b")
    evaluate(runs, runs / "b", "--task=piqa", "--limit=5")
    for dtype in ("float32", "bfloat16"):
        evaluate(runs, runs / "b", "--task=winogrande", f"--dtype={dtype}")
        scores[dtype] = [record["log_prob"] for record in samples_of(runs / "b") if record["task"] == "winogrande"]
    assert scores["float32"] != scores["bfloat16"] == pytest.approx(scores["float32"], rel=0.05)
    make_data(tmp_path / "other", seed=9)
    write_rows(tmp_path, {"piqa": ROWS["piqa"]})
    words = ["--task=loss,piqa", f"--corpus={tmp_path / 'other'}", f"--data_dir={tmp_path}"]
    assert in_process(e, runs / "b", *words).returncode == 0
    found = results(runs / "b")
    for name in ("piqa", "loss"):
        assert found[f"{name} data={whole[name]['data']}"] == whole[name]
    assert "winogrande dtype=bfloat16" in found
    assert found["piqa limit=5"]["n"] == 5 and found["piqa"]["n"] == 1
    assert found["loss"]["val"] != whole["loss"]["val"]


def test_results_of_other_weights_are_dropped(runs, tmp_path):
    """A run made anew in its folder: what eval.json says of a checkpoint is of its bytes."""
    shutil.copytree(runs / "b", tmp_path / "run")
    evaluate(runs, tmp_path / "run", "--task=piqa")
    path = checkpoint.find(tmp_path / "run")
    model, header = checkpoint.load(path), checkpoint.read_header(path)
    model.norm.weight.data.mul_(2)
    checkpoint.save(path.parent, header["step"], model, header["tokenizer"])
    evaluate(runs, tmp_path / "run", "--task=winogrande")
    assert list(results(tmp_path / "run")) == ["winogrande"]


def test_domains_in_another_order():
    """Runs of mixtures that list the domains in different orders: each number under its domain."""
    lines = e.loss_table("ab", "loss", [{"x": 1.0, "y": 2.0}, {"y": 4.0, "x": 8.0}]).splitlines()
    assert lines[0] == "| loss | x | y |" and lines[3:5] == ["| b | 8.0000 | 4.0000 |", "| b − a | +7.0000 | +2.0000 |"]


def test_beginnings_that_are_worth_it():
    """Rows of a wide question come in units of eight at most, and rows with little in common alone."""
    rows = [tasks.Request([1] * 9 + [k] * 9, 9) for k in range(2, 22)]
    assert [(u.shared, len(u.requests), u.width) for u in scoring.bundles_of([rows])] == [
        (9, 8, 73),
        (9, 8, 73),
        (9, 4, 41),
    ]
    rows = [tasks.Request([1] + [k] * 20, 20) for k in range(2, 22)]
    assert [(u.shared, len(u.requests), u.width) for u in scoring.bundles_of([rows])] == [(1, 1, 20)] * 20


def test_two_ranks_equal_one(runs):
    words = ["--task=table5,table1,lambada", f"--data_dir={runs / 'evals'}"]
    forget(runs / "b")
    evaluate(runs, runs / "b", words[0])
    one, samples = results(runs / "b"), samples_of(runs / "b")
    forget(runs / "b")
    result = torchrun(2, runs / "b", *words, of="eval.py")
    assert result.returncode == 0, result.stderr
    same(results(runs / "b"), one)
    for a, b in zip(samples, samples_of(runs / "b"), strict=True):
        assert abs(a.pop("log_prob") - b.pop("log_prob")) < 1e-5 and a == b
    files = sorted((runs / "b").glob("samples_piqa.*"))
    shares = [{record.get("document") for record in read_records(path)} - {None} for path in files]
    assert len(shares) == 2 and all(shares) and sorted([*shares[0], *shares[1]]) == list(range(30))
    again = in_process(e, runs / "b", *words)
    assert again.stdout == result.stdout and again.stderr.count(" 0 of ") == 7, again.stderr  # both ranks' files


def test_samples_of_a_name_with_brackets(tmp_path):
    """glob takes them as a pattern, unless they are escaped."""
    path, record = tmp_path / "samples_piqa.a[1].jsonl", {"document": 0, "choice": 1, "log_prob": -1.0, "greedy": True}
    path.write_text(e.json_lines([{"scores_follow_from": "x"}, record]))
    assert e.collect_samples(path, {"scores_follow_from": "x"}) == [record]


class Stopped(Exception):
    pass


def interrupted(monkeypatch, cfg, after=math.inf):
    """Run eval.py in this process until `after` batches are scored; returns how many were. Then all their scores are on
    disk, so that a killed process loses none."""
    score_batch, done = scoring.score_batch, []

    def counted(*args):
        if len(done) == after:
            files = [path for run in cfg.runs for path in Path(run).glob("samples_*")]
            assert sum(len(read_records(path)) - 1 for path in files) == sum(map(len, done))
            raise Stopped
        done.append(score_batch(*args))
        return done[-1]

    with monkeypatch.context() as patch, contextlib.suppress(Stopped):
        patch.setattr(scoring, "score_batch", counted)
        e.main(cfg)
    return len(done)


def test_an_interrupted_call_goes_on(runs, monkeypatch, capsys):
    run = runs / "a"
    forget(run)
    cfg = e.EvalConfig(runs=(str(run),), task=("piqa", "arc_easy"), data_dir=str(runs / "evals"), batch_tokens=64)
    whole = interrupted(monkeypatch, cfg)
    printed, wanted = capsys.readouterr().out, results(run)
    assert interrupted(monkeypatch, cfg) == 0 and capsys.readouterr().out == printed
    assert interrupted(monkeypatch, dataclasses.replace(cfg, limit=1)) == 0  # scores of a document do not depend on it
    capsys.readouterr()
    forget(run)
    assert interrupted(monkeypatch, cfg, after=5) == 5
    for path in run.glob("samples_*"):
        with open(path, "a", encoding="utf-8") as f:
            f.write('{"checkpoint": "vanilla", "cut off in wri')
    assert whole - 5 <= interrupted(monkeypatch, cfg) <= whole - 4  # the left documents may need one batch more
    assert capsys.readouterr().out == printed
    same(results(run), wanted)
    assert interrupted(monkeypatch, cfg) == 0
    path = next(run.glob("samples_piqa.*"))
    samples = path.read_text(encoding="utf-8")
    path.write_text("".join(samples.splitlines(keepends=True)[:-1]), encoding="utf-8")  # half of a document is left
    assert interrupted(monkeypatch, cfg) == 1
    assert sorted(path.read_text(encoding="utf-8").splitlines()) == sorted(samples.splitlines())
    assert interrupted(monkeypatch, dataclasses.replace(cfg, dtype="bfloat16")) == whole
    assert interrupted(monkeypatch, cfg) == whole
    monkeypatch.setattr(e, "CODE", ("eval.py",))  # as if a file of ours had changed
    assert interrupted(monkeypatch, cfg) == whole


# ---- bad input


def test_bad_rows(tmp_path):
    columns = {column: value for column, value in ROWS["piqa"].items() if column != "sol2"}
    changes = [
        ("piqa", {"label": 2}, "its label is not one of its 2 choices"),
        ("piqa", {"label": ""}, "ValueError"),
        ("piqa", {"goal": ["x"]}, "TypeError"),
        ("piqa", {"sol2": ""}, "choice 1 is empty"),
        ("arc_easy", {"answerKey": "D"}, "ValueError 'D' is not in list"),
        ("arc_easy", {"choices": {"text": ["a", ["b"]], "label": ["A", "B"]}}, "TypeError"),
        ("winogrande", {"sentence": "no gap"}, "ValueError"),
        ("winogrande", {"answer": "3"}, "not one of its 2 choices"),
        ("hellaswag", {"endings": ["[all] ", "x"]}, "choice 0 is empty"),
        ("hellaswag", {"ctx_b": None}, "AttributeError"),
    ]
    cases = [(name, ROWS[name] | change, says) for name, change, says in changes]
    cases.append(("piqa", columns, "is not a row of baber/piqa, which piqa reads: KeyError 'sol2'"))
    cases.append(("piqa", ["goal"], "TypeError"))
    for name, bad, says in cases:
        write_rows(tmp_path, {name: [ROWS[name], bad]})
        with pytest.raises(UserError) as found:
            tasks.questions(name, e.EvalConfig(task=(name,), data_dir=str(tmp_path)))
        assert f"{name}.jsonl (sha256 " in str(found.value) and ", row 1" in str(found.value)
        assert says in str(found.value), (says, found.value)


def test_bad_files(tmp_path):
    write_rows(tmp_path, {"piqa": [ROWS["piqa"]] * 3})
    (tmp_path / "piqa.jsonl").write_text((tmp_path / "piqa.jsonl").read_text()[:-20])
    (tmp_path / "arc_easy.parquet").write_bytes(b"PAR1 cut")
    (tmp_path / "openbookqa.jsonl").write_text("\n")
    (tmp_path / "arc_challenge").mkdir()
    for name, says in {
        "piqa": "piqa.jsonl is not readable as the validation split of piqa: .* line 3 ",
        "arc_easy": "arc_easy.parquet is not readable as the test split",
        "openbookqa": "openbookqa.jsonl .* has no rows",
        "arc_challenge": "arc_challenge is not readable as the test split",
        "hellaswag": "has no hellaswag.jsonl, no hellaswag.parquet and no folder hellaswag; with network: `hf download",
    }.items():
        with pytest.raises(UserError, match=says):
            tasks.questions(name, e.EvalConfig(task=(name,), data_dir=str(tmp_path)))


def test_bad_calls(runs, tmp_path):
    evals = f"--data_dir={runs / 'evals'}"

    def call(*words):
        return in_process(e, *words)

    known = "choose from loss, hellaswag, openbookqa, winogrande, arc_challenge, arc_easy, piqa, lambada, table1"
    refused(script("eval.py", runs / "a", "--task=helaswag"), "unknown task 'helaswag'", known)
    refused(call(runs / "none", "--task=piqa"), "holds no checkpoint")
    refused(
        call(runs / "a", "--task=loss", f"--corpus={tmp_path}"), "manifest.json is missing; it should be prepare.py"
    )
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(runs / "a" / "step_00000008.safetensors", alone)
    refused(call(alone, "--task=piqa", evals), "tokenizer.json is missing")
    shutil.copy(runs / "a" / "tokenizer.json", alone)
    refused(call(alone, "--task=loss"), "does not say what it was trained on", "--corpus")
    assert call(alone, "--task=loss", f"--corpus={runs / 'data'}").returncode == 0
    (alone / "eval.json").write_text('{"format": "nanoresformer-eval/1"}')
    refused(call(alone, "--task=piqa", evals), "eval.json lacks the field 'checkpoints'")
    make_data(tmp_path / "other", seed=9)
    shutil.copytree(runs / "b", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"data_dir": str(tmp_path / "other")}))
    refused(call(runs / "a", tmp_path / "b", "--task=loss"), "have different data", "--corpus")
    rows = {"arc_easy": [ROWS["arc_easy"]], "piqa": [ROWS["piqa"], ROWS["piqa"] | {"sol1": "x" * 70}]}
    long, samples = write_rows(tmp_path / "long", rows), list((runs / "a").glob("samples_*"))
    result = call(runs / "a", "--task=arc_easy,piqa", f"--data_dir={long}")
    refused(result, "piqa, document 1: 71 tokens are to be scored", "block")
    assert "to score" not in result.stderr and list((runs / "a").glob("samples_*")) == samples  # before the first task


def test_a_failed_model_is_not_scored(runs, tmp_path):
    model = checkpoint.load(runs / "a")
    model.norm.weight.data.fill_(3e38)  # finite itself
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    refused(in_process(e, tmp_path, "--task=piqa", f"--data_dir={runs / 'evals'}"), "not finite")
    refused(in_process(e, tmp_path, "--task=loss", f"--corpus={runs / 'data'}"), "not finite")


def test_the_command_for_a_download_is_quoted():
    assert shlex.split(tasks.download_command("piqa", "my evals"))[-1] == "--local-dir=my evals/piqa"
