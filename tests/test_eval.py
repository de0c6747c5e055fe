"""Evaluation: what is asked, what is scored, what is printed; test_lm_eval.py compares it with the harness itself."""

import dataclasses
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import MODES, byte_tokenizer, make_data, refused, script, tiny
from test_train import torchrun

import checkpoint
import eval as e
import tasks
from configurator import UserError
from data import Corpus
from model import GPT
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


@pytest.mark.parametrize("name", tasks.TASKS)
def test_rows_become_questions(name):
    assert tasks.question(name, ROWS[name], "row 0") == ASKED[name]


def write_rows(folder, rows=ROWS):
    """A folder of local task files; rows: {task: one row, or a list}."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of in rows.items():
        lines = [json.dumps(row) + "\n" for row in (of if isinstance(of, list) else [of])]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("task", ["table1", "table5", "all", "piqa,loss,piqa", "table1,lambada"])
def test_task_names(task):
    names = e.EvalConfig(task=tuple(task.split(","))).task
    six = ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "piqa")  # the paper's order
    wanted = {"table1": six, "table5": ("loss",), "all": ("loss", *six, "lambada")}
    assert names == wanted.get(task, ("piqa", "loss") if "loss" in task else (*six, "lambada"))


def pool(n):
    return [dict(goal=f"g{i}", sol1=f"a{i}", sol2=f"b{i}", label=i % 2) for i in range(n)]


def test_examples_come_before_the_question(tmp_path):
    write_rows(tmp_path, {"piqa": pool(9)[6:], "piqa.train": pool(8)})
    cfg = e.EvalConfig(task=("piqa",), data_dir=str(tmp_path), num_fewshot=3)
    found, _ = e.questions("piqa", cfg)
    draw = random.Random(1234)
    for i, q in zip((6, 7, 8), found, strict=True):
        shots = [shot for shot in draw.sample(pool(8), 4) if shot["goal"] != f"g{i}"][:3]  # one more than are needed
        text = "".join(f"Question: {s['goal']}\nAnswer: {s[('sol1', 'sol2')[s['label']]]}\n\n" for s in shots)
        assert q.contexts == (f"{text}Question: g{i}\nAnswer:",) * 2 and q.choices == (f"a{i}", f"b{i}")
    assert e.questions("piqa", dataclasses.replace(cfg, limit=2))[0] == found[:2]


def test_examples_where_the_pool_repeats_the_question():
    row, other = pool(2)
    draws = [e.draw_shots(random.Random(seed), [row] * 5 + [other] * 2, row, 2, "validation") for seed in range(20)]
    assert {tuple(sorted(places)) for places in draws} == {(5, 6)}
    assert [0] in [e.draw_shots(random.Random(seed), [row, other], row, 1, "test") for seed in range(9)]


def test_lambadas_examples_have_two_spaces():
    q = e.add_shots(ASKED["lambada"], [tasks.question("lambada", dict(text="a b c"), "row 0")])
    assert q.contexts == ("a b  c\n\nhe came, he saw, he ",)


# ---- where rows come from


def layouts(folder):
    """The same two rows in all the layouts that are read: {name: data_dir}."""
    import datasets

    rows = [ROWS["arc_easy"], ARC | {"answerKey": "C"}]
    table, found = datasets.Dataset.from_list(rows), {}
    for name in ("jsonl", "split", "parquet", "hub", "own folder", "saved", "saved dict"):
        found[name] = at = folder / name
        at.mkdir()
    write_rows(found["jsonl"], {"arc_easy": rows})
    write_rows(found["split"], {"arc_easy.test": rows, "arc_easy.train": rows[:1]})
    table.to_parquet(found["parquet"] / "arc_easy.parquet")
    for config, part in (("ARC-Easy", table), ("ARC-Challenge", table.select([0]))):
        for split in ("test", "train"):
            (found["hub"] / "ai2_arc" / config).mkdir(parents=True, exist_ok=True)
            keep = part if split == "test" else part.select([0])
            keep.to_parquet(found["hub"] / "ai2_arc" / config / f"{split}-00000-of-00001.parquet")
    for i in (0, 1):
        write_rows(found["own folder"] / "arc_easy", {f"arc-test-0000{i}-of-00002": rows[i]})
    write_rows(found["own folder"] / "arc_easy", {"contest": rows, "test_old": rows, "validation": rows})
    table.save_to_disk(found["saved"] / "arc_easy")
    datasets.DatasetDict(test=table, train=table.select([0])).save_to_disk(found["saved dict"] / "arc_easy")
    return rows, found


def test_local_layouts(tmp_path):
    rows, found = layouts(tmp_path)
    for name, data_dir in found.items():
        assert tasks.read_rows("arc_easy", "test", str(data_dir))[0] == rows, name
    for name in ("split", "hub", "saved dict"):
        assert tasks.read_rows("arc_easy", "train", str(found[name]))[0] == rows[:1], name
    with pytest.raises(UserError, match="hf download allenai/ai2_arc --repo-type=dataset --revision=210d026"):
        tasks.read_rows("arc_easy", "train", str(found["jsonl"]))
    with pytest.raises(UserError, match="not a dataset with the split train: it is one split alone"):
        tasks.read_rows("arc_easy", "train", str(found["saved"]))
    write_rows(found["own folder"] / "arc_easy", {"test": rows})
    with pytest.raises(UserError, match="has several files of the test split: .*; keep one"):
        tasks.read_rows("arc_easy", "test", str(found["own folder"]))


def test_what_was_read_is_on_record(tmp_path):
    write_rows(tmp_path)
    (tmp_path / "piqa.jsonl").write_text(json.dumps(pool(1)[0]) + "\n\n")  # an empty line at the end is none
    rows, where = tasks.read_rows("piqa", "validation", str(tmp_path))
    assert rows == pool(1) and where.startswith("piqa.jsonl (sha256 ") and str(tmp_path) not in where


def test_the_hub_is_asked_for_a_fixed_revision(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: asked.append((*a, kw)) or pool(2))
    rows, where = tasks.read_rows("piqa", "validation", "")
    assert asked == [
        ("baber/piqa", None, dict(revision="142f6d7367fd9877f0fb3b5734ea6a545f54cdd1", split="validation"))
    ]
    assert rows == pool(2) and where == "baber/piqa@142f6d73"
    assert all(len(task.revision) == 40 for task in tasks.TASKS.values())


# ---- token ids


class Merging:
    """Token ids of a tokenizer with the words "ab" and " c", else of characters: borders of texts can vanish in it."""

    eot = 0

    def encode(self, text):
        ids = []
        while text:
            n = 2 if text[:2] in ("ab", " c") else 1
            ids.append(1000 if text[:n] == "ab" else 1001 if n == 2 else ord(text[0]))
            text = text[n:]
        return ids


@pytest.mark.parametrize(
    "context,scored,ids",
    [
        ("xy", " cd", ([120, 121], [1001, 100])),
        ("xy ", "cd", ([120, 121], [1001, 100])),  # the space goes over, and into a word
        ("xy\n ", "c", ([120, 121], [10, 1001])),  # any white space
        ("xa", "bc", ([120, 97], [99])),  # "ab" is one token of the whole, which has one less
        ("", " c", ([0], [1001])),  # no context: the end of a document
        ("  ", "c", ([0], [32, 1001])),
    ],
)
def test_border_of_context_and_continuation(context, scored, ids):
    assert e.encode(Merging(), context, scored) == ids


def test_too_long_is_cut_on_the_left():
    assert e.fit([1, 2, 3], [4, 5], 4) == e.Row([1, 2, 3, 4, 5], 2, False)  # the last one is not read
    assert e.fit([1, 2, 3], [4, 5], 3) == e.Row([2, 3, 4, 5], 2, True)
    assert e.fit([1, 2], [3, 4], 2) == e.Row([2, 3, 4], 2, True)
    with pytest.raises(ValueError, match="3 tokens are scored, but the block has 2; take a model of a longer one"):
        e.fit([1], [2, 3, 4], 2)
    with pytest.raises(ValueError, match="no token of it is left"):
        e.fit([1], [], 2)


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
        found.append([e.fit(*pair, block_size) for pair in pairs])
    return found


def naive(model, rows):
    """[(sum, greedy)] of rows, one at a time, by the definition."""
    found = []
    for row in rows:
        log_probs = model(torch.tensor([row.ids[:-1]]))[0][0].double().log_softmax(-1)[-row.n :]
        target = torch.tensor(row.ids[-row.n :])
        found.append((log_probs[range(row.n), target].sum().item(), bool((log_probs.argmax(-1) == target).all())))
    return found


def scored(model, docs, *how, **kw):
    pairs = [pair for done in e.score(model, docs, *how, **kw) for pair in done]
    assert sorted(i for i, _ in pairs) == list(range(len(docs)))  # each once
    return [scores for _, scores in sorted(pairs)]


def greedy_ends(model, docs):
    """The same questions, the first choice of every other one replaced by what the model itself would say."""
    for rows in docs[::2]:
        row = rows[0]
        ids = row.ids[: -row.n]
        while len(ids) < len(row.ids):
            ids = [*ids, model(torch.tensor([ids]))[0][0, -1].argmax().item()]
        rows[0] = row._replace(ids=ids)
    return docs


@pytest.mark.parametrize("mode", MODES)
def test_scores_of_every_mode_equal_the_definition(mode):
    model = tiny(mode)
    docs = greedy_ends(model, documents())
    wanted = [naive(model, rows) for rows in docs]
    flags = [g for scores in wanted for _, g in scores]
    assert any(flags) and not all(flags) and any(row.cut for rows in docs for row in rows)
    for share in (True, False):
        for found, want in zip(scored(model, docs, 64, share=share), wanted, strict=True):
            np.testing.assert_allclose([s for s, _ in found], [s for s, _ in want], rtol=0, atol=1e-9)
            assert [g for _, g in found] == [g for _, g in want]


def test_scores_depend_on_nothing_else():
    """On batch size, filling up, order, and the shortcut: in fp32, at sums of 10 to 50 nats."""
    model = GPT(ModelConfig(997, block_size=64, n_layer=4, n_head=4, n_embd=64, init_std=0.1), seed=1).eval()
    docs = documents(60, block_size=64, vocab=997)
    first = scored(model, docs, 2048)
    assert max(abs(s) for scores in first for s, _ in scores) > 50
    order = random.Random(1).sample(range(60), 60)
    shuffled = scored(model, [docs[i] for i in order], 500)
    others = [scored(model, docs, n, share=share) for n in (1, 100, 10_000) for share in (True, False)]
    for other in (*others, [shuffled[order.index(i)] for i in range(60)]):
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose([s for s, _ in a], [s for s, _ in b], rtol=0, atol=1e-5)
            assert [g for _, g in a] == [g for _, g in b]


def test_nothing_is_computed_twice_or_for_nothing(monkeypatch):
    """Tokens through the layers: a beginning once, ends without their last token; the head: once for each place that
    predicts a scored token, and no more than its chunk at a time."""
    model, seen, head = tiny(), [], []
    docs = [[e.Row([1, 2, 3, 4, 5], 2), e.Row([1, 2, 3, 4, 6], 2), e.Row([1, 2, 3, 7, 8], 2)], [e.Row([9, 9, 9], 1)]]
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
    rows = [e.Row([5, 6, 7, i], 1) for i in range(61)]
    (scores,) = scored(model, [rows], 100)
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
    found = e.right("arc_easy", asked, results)
    assert found["acc"].tolist() == [0, 1, 0] and found["acc_norm"].tolist() == [1, 0, 0]
    close = [tasks.Question(("c",) * 2, ("ab", "abc"), 1)]  # with the space before them it would be the first
    assert e.right("arc_easy", close, [[(-2.0, False), (-2.9, False)]])["acc_norm"].tolist() == [1]
    assert list(e.right("winogrande", asked, results)) == ["acc"]
    record = e.summarize(asked, [[e.Row([1], 1), e.Row([1], 1, True)]] * 2 + [[e.Row([1], 1)]], found)
    assert record["n"] == 3 and record["cut"] == 2 and record["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)
    assert record["acc"] == pytest.approx(1 / 3)
    assert record["acc_stderr"] == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2))  # sqrt(p (1 - p) / (n - 1))


def test_lambadas_metrics():
    rng = np.random.default_rng(0)
    nats = rng.gamma(2, 1.5, 400)
    found = e.right("lambada", [ASKED["lambada"]] * 400, [[(-x, x < 1)] for x in nats])
    record = e.summarize([ASKED["lambada"]] * 400, [[e.Row([1], 1)]] * 400, found)
    assert record["acc"] == (nats < 1).mean() and record["perplexity"] == pytest.approx(math.exp(nats.mean()))
    bootstrap = np.exp(rng.choice(nats, (2000, 400)).mean(axis=1)).std()
    assert record["perplexity_stderr"] == pytest.approx(bootstrap, rel=0.1) and record["chance"] == 0


# ---- loss


@pytest.mark.parametrize("batch_tokens", [1, 500])
def test_loss_takes_every_token(data_dir, tmp_path, batch_tokens):
    model = GPT(ModelConfig(257, block_size=32, n_layer=2, n_head=2, n_embd=16, init_std=0.3)).double().eval()
    corpus = Corpus(data_dir, 32, mixture={"prose": 1, "code": 3})
    found = e.run_loss(model, corpus, FakeStore(), Distributed("cpu"), batch_tokens)
    losses, bits = [], []
    for domain in ("prose", "code"):
        ids = torch.from_numpy(np.fromfile(data_dir / "val" / f"{domain}.bin", "<u2").astype(np.int64))
        nats = 0.0
        for start in range(0, len(ids) - 1, 32):  # the last window is shorter: 2,999 = 93 x 32 + 23
            x, y = ids[start : start + 32][: len(ids) - 1 - start], ids[start + 1 : start + 33]
            nats -= model(x[None])[0][0].log_softmax(-1)[range(len(y)), y].sum().item()
        losses.append(nats / 2999)
        bits.append(nats / (ids[1:] < 256).sum().item() / math.log(2))  # an end of document has no bytes
    assert found["tokens"] == {"prose": 2999, "code": 2999}
    np.testing.assert_allclose([found["val"]["prose"], found["val"]["code"]], losses, rtol=1e-6)
    np.testing.assert_allclose([found["bpb"]["prose"], found["bpb"]["code"]], bits, rtol=1e-6)
    assert found["val_mean"] == pytest.approx(sum(losses) / 2) and found["bpb_mean"] == pytest.approx(sum(bits) / 2)
    assert found["val_mixture"] == pytest.approx(losses[0] / 4 + losses[1] * 3 / 4)
    assert found["perplexity"]["code"] == pytest.approx(math.exp(losses[1]))


class FakeStore:
    """A Store that keeps nothing."""

    def __init__(self):
        self.known = {}

    def key(self, *what):
        return str(what)

    def put(self, pairs):
        pass


def test_what_windows_leave_over(data_dir):
    corpus = Corpus(data_dir, 32)
    x, y = corpus.val_rest("code")
    assert x.shape == y.shape == (1, 2999 - 93 * 32)
    last = corpus.val_batch("code", 92, 93)[1][0, -1]
    assert x[0, 0] == last and (x[0, 1:] == y[0, :-1]).all()
    assert Corpus(data_dir, 2999).val_rest("code")[1].shape == (1, 0)


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
        assert script("train.py", *shape, *steps, *words).returncode == 0
    return folder


def evaluate(runs, *words, **kw):
    result = script("eval.py", *words, f"--data_dir={runs / 'evals'}", **kw)
    assert result.returncode == 0, result.stderr
    return result.stdout


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
    lines = tmp_path / "samples.jsonl"
    out = evaluate(runs, runs / "a", "--task=all", f"--log_samples={lines}")
    found = results(runs / "a")
    assert list(found) == ["loss", *tasks.TASKS]
    for name in tasks.TASKS:
        of = [json.loads(line) for line in lines.read_text().splitlines()]
        of = [line for line in of if line["task"] == name]
        best = {}
        for line in of:
            if line["log_prob"] > best.get(line["document"], {"log_prob": -math.inf})["log_prob"]:
                best[line["document"]] = line
        if name != "lambada":
            assert found[name]["acc"] == np.mean([line["choice"] == line["gold"] for line in best.values()])
        assert found[name]["n"] == len(best) == len(MORE[name])
        assert f"| {found[name]['acc']:.4f} ± {found[name]['acc_stderr']:.4f} |" in out
        for line in of:
            text = byte_tokenizer().decode(line["ids"])
            assert line["context"] + line["continuation"] == line["context"].rstrip() + text
    assert (
        found["openbookqa"]["cut"] == 5 and "cut on the left were 5 of openbookqa" in out  # 10 i + 5 > 64 + 1
    )  # "…" * i + " sand": i >= 6
    model, corpus = checkpoint.load(runs / "a"), Corpus(runs / "data", 64)
    assert found["loss"]["val"] == e.run_loss(model, corpus, FakeStore(), Distributed("cpu"), 2048)["val"]
    assert (runs / "a" / "eval.md").read_text() == out and not list(runs.glob("*/eval_partial*"))
    assert "| chance | 0.2500 | 0.3333 | 0.5000 | 0.5000 | 0.3333 | 0.5000 |" in out


def test_runs_side_by_side(runs, tmp_path):
    out = evaluate(runs, runs / "a", runs / "b", "--task=table1,table5", f"--out_file={tmp_path}/t.md")
    rows = {line.split(" | ")[0].strip("| "): line for line in out.splitlines() if "−" in line}
    assert list(rows) == ["svformer − vanilla"] and (tmp_path / "t.md").read_text() == out
    a, b = results(runs / "a"), results(runs / "b")
    assert out.count("| vanilla |") == out.count("| svformer |") == 5  # acc, acc_norm, loss, perplexity, bits per byte
    acc = [b[name]["acc"] - a[name]["acc"] for name in tasks.TABLE1]
    (line,) = [line for line in out.splitlines() if "−" in line and line.count("±") == 7]
    assert [cell.split()[0] for cell in line.split(" | ")[1:]] == [f"{x:+.4f}" for x in (*acc, np.mean(acc))]
    gap = b["loss"]["val_mean"] - a["loss"]["val_mean"]
    assert f"{gap:+.4f} |" in out


def test_differences_are_paired(runs, tmp_path):
    """Two runs that answer alike differ by 0 ± 0, however wide the error of each."""
    out = evaluate(
        runs, runs / "a", runs / "a" / "step_00000008.safetensors", "--task=piqa", f"--out_file={tmp_path}/t.md"
    )
    assert "+0.0000 ± 0.0000" in out and "0.0000 ± 0.0000" not in out.replace("+0.0000 ± 0.0000", "")


def test_results_are_kept_apart(runs):
    evaluate(runs, runs / "b", "--task=piqa")
    whole = results(runs / "b")["piqa"]
    evaluate(runs, runs / "b", "--task=piqa", "--limit=5")
    evaluate(runs, runs / "b", "--task=winogrande", "--dtype=bfloat16")
    found = results(runs / "b")
    assert found["piqa"] == whole and found["piqa limit=5"]["n"] == 5 and "winogrande dtype=bfloat16" in found


def test_results_of_other_data_are_kept_apart(runs, tmp_path):
    make_data(tmp_path / "other", seed=9)
    write_rows(tmp_path, {"piqa": ROWS["piqa"]})
    evaluate(runs, runs / "b", "--task=loss,piqa")
    old = results(runs / "b")
    words = ["--task=loss,piqa", f"--corpus={tmp_path / 'other'}", f"--data_dir={tmp_path}"]
    assert script("eval.py", runs / "b", *words).returncode == 0
    new = results(runs / "b")
    more = {key.split(" data=")[0]: new[key] for key in new.keys() - old.keys()}
    assert new.items() >= old.items() and more["piqa"]["n"] == 1 and more["loss"]["val"] != old["loss"]["val"]


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


def test_domains_in_another_order(capsys):
    """Runs of mixtures that list the domains in different orders: each number under its domain."""
    found = {"val": {"x": 1.0, "y": 2.0}}, {"val": {"y": 4.0, "x": 8.0}}
    entries = [e.Entry(None, None, None, {}, name, {"loss": r}, {}) for name, r in zip("ab", found, strict=True)]
    lines = e.loss_table(entries, "loss", "val", {})
    assert lines[0] == "| loss | x | y |" and lines[3:5] == ["| b | 8.0000 | 4.0000 |", "| b − a | +7.0000 | +2.0000 |"]


def test_beginnings_that_are_worth_it():
    """Rows of a wide question come in units of eight at most, and rows with little in common alone."""
    rows = [e.Row([1] * 9 + [k] * 9, 9) for k in range(2, 22)]
    assert [(u.shared, len(u.rows), u.width) for u in e.units_of([rows], True)] == [(9, 8, 73), (9, 8, 73), (9, 4, 41)]
    rows = [e.Row([1] + [k] * 20, 20) for k in range(2, 22)]
    assert [(u.shared, len(u.rows), u.width) for u in e.units_of([rows], True)] == [(20, 1, 20)] * 20


def test_two_ranks_equal_one(runs, tmp_path):
    words = ["--task=table5,table1,lambada", f"--data_dir={runs / 'evals'}", f"--log_samples={tmp_path}/s.jsonl"]
    evaluate(runs, runs / "b", words[0], words[2])
    one, lines = results(runs / "b"), (tmp_path / "s.jsonl").read_text().splitlines()
    result = torchrun(2, runs / "b", *words, of="eval.py")
    assert result.returncode == 0, result.stderr
    two = results(runs / "b")
    for a, b in zip(lines, (tmp_path / "s.jsonl").read_text().splitlines(), strict=True):
        a, b = json.loads(a), json.loads(b)
        assert abs(a.pop("log_prob") - b.pop("log_prob")) < 1e-5 and a == b
    same(two, one)
    assert not list(runs.glob("*/eval_partial*"))


class Stopped(Exception):
    pass


def interrupted(monkeypatch, cfg, after):
    """Run eval.py in this process until `after` batches are scored; returns the batches scored."""
    score_batch, done = e.score_batch, []

    def count(*args):
        if len(done) == after:
            raise Stopped
        done.append(args)
        return score_batch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(e, "score_batch", count)
        try:
            e.native(cfg, Distributed("cpu"))
        except Stopped:
            assert len(done) == after
    return done


def test_an_interrupted_call_goes_on(runs, monkeypatch, capsys):
    cfg = e.EvalConfig(runs=(str(runs / "a"),), task=("loss", "piqa", "arc_easy"), data_dir=str(runs / "evals"))
    cfg = dataclasses.replace(cfg, batch_tokens=64)
    whole = interrupted(monkeypatch, cfg, after=math.inf)
    printed, wanted = capsys.readouterr().out, results(runs / "a")
    n = len(whole) // 2
    assert len(interrupted(monkeypatch, cfg, after=n)) == n
    (partial,) = (runs / "a").glob("eval_partial.*.jsonl")
    with open(partial, "a") as f:
        f.write('["cut off in wri')
    other = dataclasses.replace(cfg, share=False)  # another call: nothing of this one serves it, or is removed by it
    assert len(interrupted(monkeypatch, other, after=math.inf)) > len(whole) and partial.exists()
    losses = []
    monkeypatch.setattr(GPT, "forward", lambda *a, **kw: losses.append(a))
    assert 0 < len(interrupted(monkeypatch, cfg, after=math.inf)) <= len(whole) - n + 1  # + a batch of another make-up
    assert not losses and not partial.exists()  # the loss was whole
    assert capsys.readouterr().out.endswith(printed)
    same(results(runs / "a"), wanted)


def test_interrupted_loss_goes_on(runs, monkeypatch):
    model, corpus = checkpoint.load(runs / "a"), Corpus(runs / "data", 64)
    cfg = e.EvalConfig(runs=(str(runs / "a"),), task=("loss",))
    path = checkpoint.find(runs / "a")
    store, forward, calls = e.Store(path, cfg, Distributed("cpu")), GPT.forward, []
    whole = e.run_loss(model, corpus, FakeStore(), Distributed("cpu"), 640)

    def some(*args, **kw):
        calls.append(args)
        if len(calls) == 6:
            raise Stopped
        return forward(*args, **kw)

    monkeypatch.setattr(GPT, "forward", some)
    with pytest.raises(Stopped):
        e.run_loss(model, corpus, store, Distributed("cpu"), 640)
    again = e.Store(path, cfg, Distributed("cpu"))
    assert (
        e.run_loss(model, corpus, again, Distributed("cpu"), 640) == whole and len(calls) == 6 + 7
    )  # 12 parts in all, the 6th again
    again.remove()
    assert not list((runs / "a").glob("eval_partial*"))


# ---- bad input


@pytest.mark.parametrize(
    "row,says",
    [
        ({k: v for k, v in ROWS["piqa"].items() if k != "sol2"}, "row 1 has no column sol2; piqa takes"),
        (ROWS["piqa"] | {"label": 2}, "row 1: its label is none of its 2 choices"),
        (ROWS["piqa"] | {"label": -1}, "row 1: its label is none of its 2 choices"),
        (ROWS["piqa"] | {"sol2": ""}, "row 1: choice 1 is empty"),
        (ROWS["piqa"] | {"label": ""}, "row 1 is not a row of piqa: ValueError"),
        (ROWS["piqa"] | {"label": True}, "its label True is not a whole number"),
        (ROWS["piqa"] | {"label": 0.7}, "its label 0.7 is not a whole number"),
        (ROWS["piqa"] | {"sol1": None, "goal": ["x"]}, r"row 1 is not a row of piqa: goal is \['x'\], sol1 is None"),
        (["goal"], "row 1 has a list, no columns"),
    ],
)
def test_bad_rows(tmp_path, row, says):
    write_rows(tmp_path, {"piqa": [ROWS["piqa"], row]})
    with pytest.raises(UserError, match=says) as found:
        e.questions("piqa", e.EvalConfig(task=("piqa",), data_dir=str(tmp_path)))
    assert "piqa.jsonl" in str(found.value)


@pytest.mark.parametrize(
    "name,row,says",
    [
        ("arc_easy", ARC | {"answerKey": "D"}, "its label is none of its 3 choices"),
        ("winogrande", ROWS["winogrande"] | {"sentence": "no gap"}, "no gap '_'"),
        ("winogrande", ROWS["winogrande"] | {"sentence": "at the end _"}, "choice 0 is empty"),
        ("hellaswag", ROWS["hellaswag"] | {"endings": ["[all] ", "x"]}, "choice 0 is empty"),
        ("hellaswag", ROWS["hellaswag"] | {"ctx_b": None}, "ctx_b is None"),
        ("hellaswag", ROWS["hellaswag"] | {"endings": "four"}, "endings is 'four'"),
        ("hellaswag", ROWS["hellaswag"] | {"endings": ["a", 2]}, "AttributeError"),
        ("openbookqa", ROWS["openbookqa"] | {"choices": ["a", "b"]}, "choices is"),
        ("openbookqa", ROWS["openbookqa"] | {"choices": {"text": "abc", "label": list("ABC")}}, "not a list of texts"),
        ("arc_easy", ARC | {"answerKey": "A", "choices": {"text": ["a", "b"], "label": ["A"]}}, "as many labels"),
        ("arc_easy", ARC | {"answerKey": "A", "choices": {"text": ["a", ["b"]], "label": ["A", "B"]}}, "TypeError"),
        ("winogrande", ROWS["winogrande"] | {"answer": "3"}, "none of its 2 choices"),
    ],
)
def test_bad_rows_of_other_tasks(name, row, says):
    with pytest.raises(UserError, match=says):
        tasks.question(name, row, "row 0")


def test_bad_files(tmp_path):
    write_rows(tmp_path, {"piqa": pool(3)})
    (tmp_path / "piqa.jsonl").write_text((tmp_path / "piqa.jsonl").read_text()[:-20])
    (tmp_path / "arc_easy.parquet").write_bytes(b"PAR1 cut")
    (tmp_path / "openbookqa.jsonl").write_text("\n")
    (tmp_path / "winogrande").mkdir()
    (tmp_path / "winogrande" / "dataset_info.json").write_text("{}")
    for name, says in {
        "piqa": "piqa.jsonl, line 3: not JSON, or cut short",
        "arc_easy": "is not a parquet file, or cut short",
        "openbookqa": "has no rows",
        "winogrande": "winogrande is not a dataset with the split validation",
        "hellaswag": "has no hellaswag.jsonl, hellaswag.validation.jsonl or .parquet, nor a folder hellaswag",
    }.items():
        with pytest.raises(UserError, match=says):
            tasks.read_rows(name, tasks.TASKS[name].split, str(tmp_path))


def test_too_few_examples(tmp_path):
    write_rows(tmp_path, {"piqa": pool(2), "piqa.train": pool(2)})
    cfg = e.EvalConfig(task=("piqa",), data_dir=str(tmp_path), num_fewshot=2)
    with pytest.raises(UserError, match="piqa has 2 examples, not the 3 that num_fewshot asks for"):
        e.questions("piqa", cfg)
    write_rows(tmp_path, {"piqa.train": [pool(1)[0] | {"label": 5}] * 4})
    with pytest.raises(UserError, match=r"piqa.train.jsonl \(sha256 .*\), row [0-3]: its label is none of its 2"):
        e.questions("piqa", cfg)
    with pytest.raises(UserError, match="nowhere is no folder; it should hold piqa.jsonl"):
        e.questions("piqa", e.EvalConfig(task=("piqa",), data_dir="nowhere"))


def test_bad_calls(runs, tmp_path):
    evals = f"--data_dir={runs / 'evals'}"
    call = lambda *words, **kw: script("eval.py", *words, **kw)  # noqa: E731
    known = "known are loss, hellaswag, openbookqa, winogrande, arc_challenge, arc_easy, piqa, lambada, table1"
    refused(call(runs / "a", "--task=helaswag"), "unknown task 'helaswag'", known)
    refused(call(runs / "none", "--task=piqa"), "holds no checkpoint")
    refused(call(runs / "a", "--task=piqa", "--limit=-1"), "limit=-1 must be at least 0")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    refused(call(runs / "a", "--task=piqa", env=offline), "baber/piqa cannot be had from the hub", "--data_dir=evals")
    refused(call(runs / "a", "--task=loss", f"--corpus={tmp_path}"), "has no manifest.json")
    under_a_file = runs / "a" / "config.json" / "x"
    refused(call(runs / "a", "--task=piqa", evals, f"--log_samples={under_a_file}"), "config.json")
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in (runs / "a").glob("step_00000008.safetensors"):
        (alone / file.name).write_bytes(file.read_bytes())
    refused(call(alone, "--task=piqa", evals), "tokenizer.json is missing")
    (alone / "tokenizer.json").write_bytes((runs / "a" / "tokenizer.json").read_bytes())
    refused(call(alone, "--task=loss"), "does not say what it was trained on", "--corpus")
    assert call(alone, "--task=loss", f"--corpus={runs / 'data'}").returncode == 0
    for text in ("[]", '{"format": "nanoresformer-eval/1"}', '{"format": "nanoresformer-eval/1", "checkpoints": [1]}'):
        (alone / "eval.json").write_text(text)
        refused(call(alone, "--task=piqa", evals), "eval.json is not a file of this eval.py")
    (alone / "eval.json").unlink()
    make_data(tmp_path / "other", seed=9)
    shutil.copytree(runs / "b", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"data_dir": str(tmp_path / "other")}))
    refused(call(runs / "a", tmp_path / "b", "--task=loss"), "are of different data", "--corpus")
    refused(call(runs / "a", "--backend=lm_eval"), "loss and log_samples are of --backend=native")
    long = write_rows(tmp_path / "long", {"piqa": [ROWS["piqa"], ROWS["piqa"] | {"sol1": "x" * 70}]})
    refused(call(runs / "a", "--task=piqa", f"--data_dir={long}"), "piqa, document 1: 71 tokens are scored", "block")


def test_a_failed_model_is_not_scored(runs, tmp_path):
    model = checkpoint.load(runs / "a")
    model.norm.weight.data.fill_(math.nan)
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    refused(script("eval.py", tmp_path, "--task=piqa", f"--data_dir={runs / 'evals'}"), "not finite")
    refused(script("eval.py", tmp_path, "--task=loss", f"--corpus={runs / 'data'}"), "not finite")


def test_the_harness_is_asked_for_by_name(runs):
    result = script("eval.py", runs / "a", "--task=piqa", "--backend=lm_eval", env={"PYTHONPATH": str(runs / "block")})
    if "needs the harness" not in result.stderr:  # it is installed here
        (runs / "block" / "lm_eval").mkdir(parents=True)
        (runs / "block" / "lm_eval" / "__init__.py").write_text("raise ImportError")
        result = script(
            "eval.py", runs / "a", "--task=piqa", "--backend=lm_eval", env={"PYTHONPATH": str(runs / "block")}
        )
    refused(result, "pip install lm-eval")
