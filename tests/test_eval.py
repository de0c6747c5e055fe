"""Evaluation: what is asked, what is scored, what is written. test_lm_eval.py compares it with the harness itself."""

import gzip
import itertools
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, in_process, make_data, refused, tiny
from test_train import command, ended, fork, records

import eval as e
import train
from common import checkpoint, scoring, tasks
from common.data import Corpus
from common.ranks import Distributed
from common.scoring import Request
from common.tasks import Question
from configurator import UserError
from model import GPT
from value_modes import ModelConfig

ARC = {"id": "x", "question": "What is wet?", "choices": {"text": ["sand", "rain", "dust"], "label": ["A", "B", "C"]}}
ROWS = {
    "hellaswag": {"activity_label": "Fly", "ctx_a": " [header] First [title] Jump [step] high.", "label": "1"}
    | {"ctx_b": "then YOU", "endings": ["fall.", "[step] stay  up [note].", "  swim. ", "x  [a]  y"]},
    "piqa": {"goal": "open it", "sol1": "push", "sol2": "pull hard ", "label": 1},
    "arc_easy": ARC | {"answerKey": "B"},
    "arc_challenge": ARC | {"choices": {"text": ["sand", "rain"], "label": ["1", "2"]}, "answerKey": "2"},
    "openbookqa": {"id": "1", "question_stem": "rain is", "choices": ARC["choices"], "answerKey": " C"},
    "winogrande": {"sentence": "Ann paid Bea because _ owed her.", "option1": "Ann", "option2": "Bea", "answer": "1"},
    "lambada": {"text": "he came, he saw, he  left"},
}
ASKED = {
    "hellaswag": Question(("Fly:  First. Jump high. Then you",) * 4, ("fall.", " stay up .", "swim.", "x  y"), 1),
    "piqa": Question(("Question: open it\nAnswer:",) * 2, ("push", "pull hard "), 1),
    "arc_easy": Question(("Question: What is wet?\nAnswer:",) * 3, ("sand", "rain", "dust"), 1),
    "arc_challenge": Question(("Question: What is wet?\nAnswer:",) * 2, ("sand", "rain"), 1),
    "openbookqa": Question(("rain is",) * 3, ("sand", "rain", "dust"), 2),
    "winogrande": Question(("Ann paid Bea because Ann", "Ann paid Bea because Bea"), ("owed her.",) * 2, 0),
    "lambada": Question(("he came, he saw, he ",), (" left",), 0, delimiter=""),
}
MORE = {name: [row, row] for name, row in ROWS.items()} | {
    "piqa": [ROWS["piqa"] | {"goal": f"{i} of", "sol2": "bcdefg"[i % 4 :], "label": i % 2} for i in range(30)],
    "openbookqa": [ROWS["openbookqa"] | {"question_stem": "abcdefghij" * i} for i in range(12)],  # some are too long
}


def write_rows(folder, rows):
    """A folder of local task files. rows: {task: its rows}."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_row_becomes_a_question(name, tmp_path):
    folder = write_rows(tmp_path, {name: [ROWS[name]]})
    assert tasks.questions(name, folder)[0] == [ASKED[name]]


def test_a_missing_file_says_how_it_is_made(tmp_path):
    with pytest.raises(UserError, match=r"hellaswag.jsonl is missing.*`python -c .*Rowan/hellaswag.*to_json\("):
        tasks.questions("hellaswag", tmp_path)


FORMS = {"piqa.jsonl": b"%b\r\n\r\n%b\r\n", "piqa.json": b"[\n%b,\n%b]", "piqa.jsonl.gz": b"%b\n%b\n"}


@pytest.mark.parametrize("file", FORMS)
def test_task_files_of_others(file, tmp_path):
    content = FORMS[file] % ((json.dumps(ROWS["piqa"]).encode(),) * 2)
    (tmp_path / file).write_bytes(gzip.compress(content) if file.endswith("gz") else content)
    assert tasks.questions("piqa", tmp_path)[0] == [ASKED["piqa"]] * 2


BAD = {"label is not one of 2 choices": {"label": -1}, "choice is empty": {"sol1": ""}, "TypeError": {"sol1": 5}}


@pytest.mark.parametrize("says", BAD)
def test_rows_that_ask_nothing(says, tmp_path):
    folder = write_rows(tmp_path, {"piqa": [ROWS["piqa"], ROWS["piqa"] | BAD[says]]})
    with pytest.raises(UserError, match=f"row 1.*{says}"):
        tasks.questions("piqa", folder)


def test_an_unknown_task_is_answered_with_all_names():
    refused(in_process(e, "--task=piqa,mmlu"), "unknown task mmlu; choose from loss, hellaswag, ", "table1")


# ---- token ids and scores


class Merging:
    """A tokenizer with the words "ab" and " c", else of characters, in which borders of texts can vanish."""

    start, prefix = 0, [7]

    def encode(self, text):
        text = text.replace("ab", "\ue000").replace(" c", "\ue001")
        return [{"\ue000": 1000, "\ue001": 1001}.get(letter, ord(letter)) for letter in text]


def test_border_of_context_and_continuation():
    for pair, ids in {
        ("xy", " cd"): ([7, 120, 121], [1001, 100]),
        ("xy ", "cd"): ([7, 120, 121], [1001, 100]),  # the space goes over, and into a word
        ("xy\n ", "c"): ([7, 120, 121], [10, 1001]),  # any white space
        ("xa", "bc"): ([7, 120, 97], [99]),  # "ab" is one token of the whole, which has one less
        ("", " c"): ([0], [1001]),  # no context: the end of a document
        ("  ", "c"): ([0], [32, 1001]),
    }.items():
        assert scoring.encode_pair(Merging(), *pair) == ids, pair


def test_what_is_longer_than_the_block_loses_its_beginning():
    asked = [Question(("xyz",), ("de",), 0, delimiter="")]
    for block_size, ids in ((5, [7, 120, 121, 122, 100, 101]), (4, [120, 121, 122, 100, 101])):
        assert scoring.requests_of("piqa", asked, Merging(), block_size) == [[Request(ids, 2)]]  # one is not read
    with pytest.raises(UserError, match="piqa, document 0: 2 tokens are to be scored, but the model's block takes 1"):
        scoring.requests_of("piqa", asked, Merging(), 1)


def documents(n, block_size, vocab):
    """Questions of all shapes: choices that share a context or only its beginning or nothing, cut and single ones, one
    inside another."""
    g, found = random.Random(0), []

    def new(low, high):
        return [g.randrange(vocab) for _ in range(g.randint(low, high))]

    for i in range(n):
        context, ends = new(1, 20), [new(1, 9) for _ in range(g.randint(2, 5))]
        pairs = [(context + new(0, i % 3), end) for end in ends] + [(context, ends[0] + ends[1])]
        if i % 3 == 1:
            pairs = [(new(1, 30), end) for end in ends]
        if i % 6 == 2:
            pairs = [(new(28, 40), ends[0])]
        found.append([Request((start + end)[-block_size - 1 :], len(end)) for start, end in pairs])
    return found


def naive(model, docs):
    """[(sum, greedy)] of all choices one at a time, by the definition."""
    found = []
    for request in itertools.chain(*docs):
        log_probs = model(torch.tensor([request.ids[:-1]]))[0][0].double().log_softmax(-1)[-request.n_scored :]
        target = torch.tensor(request.ids[-request.n_scored :])
        greedy = (log_probs.argmax(-1) == target).all().item()
        found.append((log_probs[range(len(target)), target].sum().item(), greedy))
    return np.array(found)


def scored(model, docs, batch_tokens):
    return np.concatenate(e.score_task(model, "", docs, e.EvalConfig(batch_tokens=batch_tokens), Distributed("cpu")))


@pytest.mark.parametrize("mode", ["vanilla", "everything", "every_place"])
def test_scores_equal_the_definition_whatever_the_batch(mode):
    model, docs = tiny(mode), documents(12, 32, 61)
    docs.append([Request([5, 6, 7, i], 1) for i in range(61)])  # one is what the model itself would say
    wanted = naive(model, docs)
    for batch_tokens in (1, 64, 10_000):
        np.testing.assert_allclose(scored(model, docs, batch_tokens), wanted, atol=1e-9)
    assert wanted[:, 1].any()


def test_a_shared_beginning_is_computed_once():
    """The layers see no last token, and the head only what predicts a scored one."""
    model, layers, head = tiny(), [], []
    docs = [[Request([1, 2, 3, 4, 5], 2), Request([1, 2, 3, 4, 6], 2), Request([1, 2, 3, 7, 8], 2)]]
    model.blocks[0].register_forward_hook(lambda _, inputs, out: layers.append(inputs[0].shape[:2].numel()))
    model.head.register_forward_hook(lambda _, inputs, out: head.append(len(inputs[0])))
    scored(model, [*docs, [Request([9, 9, 9], 1)]], 1)  # a batch for each question
    assert layers == [6, 2] and head == [6, 1]  # 1 2 3, 4, 4, 7


def test_half_precision_keeps_log_probabilities_in_full():
    found = scored(tiny().bfloat16(), [[Request([5, 6, 7, i], 1) for i in range(61)]], 100)
    assert abs(np.exp(found[:, 0]).sum() - 1) < 1e-6 and found[:, 1].sum() == 1


# ---- metrics, losses


def test_accuracies_by_hand():
    """Characters, not bytes, without the space before a choice; the first of equal sums."""
    asked = [
        Question(("c",) * 2, ("long answer", "no"), 0),  # sums say 1, per character 0
        Question(("c",) * 2, ("ääää", "yes?!"), 0),  # 4 characters in 8 bytes
        Question(("c",) * 3, ("a", "b", "c"), 1),  # a tie of all
        Question(("c",) * 2, ("ab", "abc"), 1),  # with the space before them it would be the first
    ]
    scores = [np.array([[x, 0] for x in of]) for of in ([-6, -3], [-4, -4.5], [-1, -1, -1], [-2, -2.9])]
    found = tasks.per_document("arc_easy", asked, scores)
    assert found["acc"].tolist() == [0, 1, 0, 0] and found["acc_norm"].tolist() == [1, 0, 0, 1]
    assert list(tasks.per_document("winogrande", asked, scores)) == ["acc"]
    record = tasks.task_record(found)
    assert record["n"] == 4 and record["acc"] == 1 / 4
    assert record["acc_stderr"] == pytest.approx(math.sqrt(1 / 4 * 3 / 4 / 3))  # p (1 - p)


def test_lambadas_perplexity():
    found = tasks.per_document("lambada", [ASKED["lambada"]] * 2, [np.array([[-1, 1]]), np.array([[-3, 0]])])
    record = tasks.task_record(found)
    assert record["acc"] == 0.5 and record["perplexity"] == pytest.approx(math.exp(2))
    assert record["perplexity_stderr"] == pytest.approx(math.exp(2))  # times the error of the mean of 1 and 3


def test_the_loss_takes_every_token(data_dir):
    model = GPT(ModelConfig(257, block_size=32, n_layer=2, n_head=2, n_embd=16, init_std=0.3)).double().eval()
    corpus = Corpus(data_dir, 32, mixture={"prose": 1, "code": 3})
    losses, bits = {}, {}
    for domain in ("prose", "code"):
        ids = torch.from_numpy(np.fromfile(data_dir / "val" / f"{domain}.bin", "<u2").astype(np.int64))
        nats = 0.0
        for start in range(0, len(ids) - 1, 32):  # the last window is shorter: 2,999 = 93 x 32 + 23
            x, y = ids[start : start + 32][: len(ids) - 1 - start], ids[start + 1 : start + 33]
            nats -= model(x[None])[0][0].log_softmax(-1)[range(len(y)), y].sum().item()
        losses[domain] = nats / 2999
        bits[domain] = nats / (ids[1:] < 256).sum().item() / math.log(2)  # an end of document has no bytes
    found = e.loss_record("loss", corpus, model, e.EvalConfig(batch_tokens=500), Distributed("cpu"))
    assert found["val"] == pytest.approx(losses) and found["bpb"] == pytest.approx(bits)
    assert found["val_mean"] == pytest.approx(sum(losses.values()) / 2)
    assert found["bpb_mean"] == pytest.approx(sum(bits.values()) / 2)
    assert found["val_mixture"] == pytest.approx(losses["prose"] / 4 + losses["code"] * 3 / 4)


# ---- runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data, task files and two trained runs, a and b. Some questions are longer than their block."""
    folder = tmp_path_factory.mktemp("runs")
    make_data(folder / "data")
    write_rows(folder / "evals", MORE)
    shape = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_tokens=256 --micro_batch=4 --bos=true"
    steps = "--max_steps=8 --warmup_steps=2 --learning_rate=5e-3 --eval_tokens=0 --dtype=float32"
    for name, mode in (("a", "vanilla"), ("b", "svformer")):
        words = [f"--data_dir={folder / 'data'}", f"--out_dir={folder / name}", f"--value_mode={mode}"]
        assert in_process(train, *shape.split(), *steps.split(), *words).returncode == 0
    return folder


def evaluate(runs, *words):
    result = in_process(e, *words, f"--data_dir={runs / 'evals'}")
    assert result.returncode == 0, result.stderr
    return result.stdout


def samples_of(run):
    """{(samples file, document, choice): its line there}"""
    lines = {path.name: map(json.loads, path.read_text().splitlines()) for path in run.glob("samples_*")}
    return {(name, line["document"], line["choice"]): line for name in lines for line in lines[name]}


def results(run):
    return e.read_results(run)["step_00000008.safetensors"]["results"]


def test_tables_records_and_samples_say_the_same(runs):
    out, found, samples = evaluate(runs, runs / "a", "--task=all"), results(runs / "a"), samples_of(runs / "a")
    assert found.keys() == {"loss", *tasks.TASKS}
    for name in tasks.TASKS:
        best = {}  # {document: whether its likeliest choice is right, of equal ones the first}
        for (file, document, choice), line in sorted(samples.items(), key=lambda s: (s[1]["log_prob"], -s[0][2])):
            if file == f"samples_{name}.step_00000008.jsonl":
                best[document] = choice == line["gold"]
        if name != "lambada":
            assert found[name]["acc"] == np.mean([*best.values()])
        assert found[name]["n"] == len(best) == len(MORE[name])
        assert f"| {found[name]['acc']:.4f} ± {found[name]['acc_stderr']:.4f} |" in out
    *_, in_training = records(runs / "a", "eval")
    for key in ("val", "val_mean", "val_mixture", "bpb", "bpb_mean"):
        assert found["loss"][key] == pytest.approx(in_training[key], abs=1e-6)  # bos and all


def test_runs_side_by_side(runs):
    out = evaluate(runs, runs / "a", runs / "b", "--task=table1,lambada,table5")
    a, b = results(runs / "a"), results(runs / "b")
    assert out.count("| vanilla |") == out.count("| svformer |") == 3  # acc, acc_norm, loss
    differences = [line.split(" | ") for line in out.splitlines() if line.startswith("| svformer − vanilla |")]
    acc = [b[name]["acc"] - a[name]["acc"] for name in tasks.TASKS]
    average = np.mean(acc[:6])  # without LAMBADA, which is no task of Table 1
    assert [cell.split()[0] for cell in differences[0][1:]] == [f"{x:+.4f}" for x in (*acc, average)]
    assert f"{b['loss']['val_mean'] - a['loss']['val_mean']:+.4f}" in differences[2]
    same = evaluate(runs, *[runs / "a" / "step_00000008.safetensors"] * 2, "--task=piqa")
    assert "+0.0000 ± 0.0000" in same  # paired, so however wide the error of each
    assert "±" not in evaluate(runs, runs / "a", "--task=piqa", "--limit=1")


def test_different_lengths_of_training_are_said():
    entries = [e.Entry(None, {"mode": mode, "step": n}, None, "") for mode, n in (("vanilla", 8), ("svformer", 4))]
    assert list(e.tables(entries, (), {})) == ["note: these models trained for different numbers of steps: 8, 4"]
    assert list(e.tables(entries[:1] * 2, (), {})) == []


def test_later_calls_keep_what_is_known(runs, tmp_path):
    """But not of a trial, nor of other weights. Nothing is scored before a wrong name is refused."""
    run = shutil.copytree(runs / "b", tmp_path / "run")
    (run / "eval.json").unlink(missing_ok=True)
    words = ("--task=piqa,winogrande", f"--data_dir={runs / 'evals'}")
    refused(in_process(e, run, tmp_path / "none", *words), "there is no checkpoint")
    assert not (run / "eval.json").exists()
    evaluate(runs, run, *words[:1])
    before = results(run)
    evaluate(runs, run, "--task=piqa", "--limit=5")
    assert list(before) == ["piqa", "winogrande"] and results(run) == before
    evaluate(runs, run, "--task=arc_easy")
    assert results(run).items() > before.items()
    path = checkpoint.find(run)
    model, header = checkpoint.load(path), checkpoint.read_header(path)
    model.norm.weight.data.mul_(2)
    checkpoint.save(run, header["step"], model, header["tokenizer"])
    evaluate(runs, run, "--task=winogrande")
    assert list(results(run)) == ["winogrande"]


def test_two_ranks_equal_one(runs, tmp_path):
    words = [str(runs / "b"), "--task=table5,table1,lambada"]
    out = evaluate(runs, *words)
    one, samples = results(runs / "b"), samples_of(runs / "b")
    said = ended(fork(tmp_path, 2, command, "eval", *words, f"--data_dir={runs / 'evals'}"), 0, 0)
    assert out in said[0] and "|" not in said[1]
    for name in ("loss", *tasks.TASKS):
        for key in one[name].keys() - {"seconds", "data", "dtype"}:
            assert results(runs / "b")[name][key] == pytest.approx(one[name][key], rel=1e-5), (name, key)
    for slot, line in samples_of(runs / "b").items():
        assert line == samples[slot] | {"log_prob": pytest.approx(samples[slot]["log_prob"], abs=1e-5)}


def test_a_run_that_cannot_be_written_has_its_table(runs, tmp_path, monkeypatch):
    run = shutil.copytree(runs / "b", tmp_path / "run", ignore=shutil.ignore_patterns("eval.json"))
    monkeypatch.setattr("os.access", lambda *of: False)
    out = evaluate(runs, run, "--task=piqa")
    assert "not stored" in out and "| svformer |" in out and not (run / "eval.json").exists()


def test_losses_on_different_data_are_not_compared(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(e, "evaluate", None)  # it is not called
    for name in ("step_00000008.safetensors", "tokenizer.json"):
        shutil.copy(runs / "a" / name, tmp_path)
    words = ("--task=loss", f"--corpus={runs / 'data'}")
    refused(in_process(e, runs / "a", tmp_path, *words), "different validation data", "--bos")
    other = byte_tokenizer("(?s:..?)")
    other.save(tmp_path / "tokenizer.json")
    checkpoint.save(tmp_path, 8, checkpoint.load(runs / "a"), other.hash)
    refused(in_process(e, runs / "a", tmp_path, *words), "different tokenizers", "name one at a time")
    refused(in_process(e, tmp_path, *words), "have different tokenizers", "name other data with --corpus")


@pytest.mark.parametrize("task", ["piqa", "loss"])
def test_a_failed_model_is_not_scored(runs, tmp_path, task):
    model = checkpoint.load(runs / "a")
    model.norm.weight.data.fill_(3e38)  # finite itself
    checkpoint.save(tmp_path, 1, model, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    where = f"--corpus={runs / 'data'}" if task == "loss" else f"--data_dir={runs / 'evals'}"
    refused(in_process(e, tmp_path, f"--task={task}", where), f"{tmp_path}, {task}: the model's", "not finite")


def test_a_file_that_is_no_checkpoint(runs):
    refused(in_process(e, runs / "a/config.json"), "config.json is not a checkpoint; name a run's folder")


def test_a_folder_of_tasks_is_no_data_for_the_loss(runs):
    refused(in_process(e, runs / "a", "--task=loss", f"--data_dir={runs / 'data'}"), "loss and copying use --corpus")
