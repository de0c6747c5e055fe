"""bench.py: what it does with times; no test asserts one."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, byte_tokenizer, finished, refused, tiny
from test_eval import MORE, write_rows
from test_tokenizer import small_neox

import bench.__main__
import checkpoint
import configurator
import plot
from bench import common, decoding, loading, training
from configurator import UserError, load_settings
from data import Corpus
from describe import flops_per_token
from files import write_json
from model import GPT
from prepare import PAPER_MIXTURE
from runtime import Distributed
from sample import generate
from value_modes import ModelConfig


def bench_script(*words):
    return finished([sys.executable, "-m", "bench", *map(str, words)], cwd=ROOT)


@pytest.fixture
def run(tmp_path):
    """A folder with an untrained vanilla model and task files."""
    model = GPT(ModelConfig(257, block_size=128, n_layer=2, n_head=2, n_embd=16))
    checkpoint.save(tmp_path / "run", 1, model, byte_tokenizer().hash)
    byte_tokenizer().save(tmp_path / "run" / "tokenizer.json")
    write_rows(tmp_path / "evals", MORE)
    return tmp_path / "run"


def test_sides_take_turns():
    order = []
    sides = {"a": lambda: order.append("a") or 1, "b": lambda: order.append("b") or 2}
    seconds, results = common.in_turn(sides, 3, torch.device("cpu"))
    assert "".join(order) == "abbaab" and results == {"a": 1, "b": 2}
    assert [len(s) for s in seconds.values()] == [3, 3]


def test_ratio_is_that_of_each_round():
    seconds = {"ours": [1.0, 2.0, 4.0], "peer": [3.0, 10.0, 8.0]}  # a machine that slows down
    assert common.ratio(seconds, "ours", "peer") == {"ratio": 3.0, "least": 2.0, "greatest": 5.0}


def test_eval_against_the_harness(run, tmp_path):
    words = ["eval", run, "--task=piqa,winogrande", f"--data_dir={tmp_path / 'evals'}", "--limit=10", "--rounds=2"]
    result = bench_script(*words, f"--out_file={tmp_path / 'b.json'}", "--batch_sizes=2,4")
    if "pip install -r requirements-peers.txt" in result.stderr:
        refused(result, "the peer is missing")
        pytest.skip("lm-eval is not installed")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["task"] for row in found["tasks"]] == ["piqa", "winogrande"] and found["tasks"][0]["documents"] == 10
    assert all(row["largest_gap"] < 1e-4 and row["to_best"]["ratio"] > 0 for row in found["tasks"])
    assert found["lm-eval"] and found["command"] and found["shape"]["n_embd"] == 16


def test_decoding(tmp_path, monkeypatch):
    words = ["decode", "--modes=vanilla,svformer", "--batch=1,2", "--prompt=3,6", "--new=4", "--rounds=2"]
    result = bench_script(*words, "--peers", f"--out_file={tmp_path / 'b.json'}", "--compile=off")
    if "pip install -r requirements-peers.txt" in result.stderr:
        refused(result, "the peer is missing")
        result = bench_script(*words, f"--out_file={tmp_path / 'b.json'}", "--compile=off")
    assert result.returncode == 0, result.stderr
    rows = [row for row in json.loads((tmp_path / "b.json").read_text())["rows"] if "kv_bytes" in row]
    found = {(row["name"], row["batch"], row["prompt"]): row for row in rows}
    assert len(found) == 8 and all(row["tokens_per_s"] > 0 < row["prefill_tokens_per_s"] for row in rows)
    vanilla, svformer = found["vanilla", 2, 6], found["svformer", 2, 6]
    # 9 positions (the last new token needs none) of 16 or 9 times 128 numbers of 4 bytes, two rows
    assert vanilla["kv_bytes"] == 2 * 9 * 16 * 128 * 4 and svformer["kv_bytes"] == 2 * 9 * 9 * 128 * 4
    assert vanilla["batch_that_fits"] == 10 * 2**30 // (9 * 16 * 128 * 4)
    weights = 8 * (4 * 128 * 128 + 3 * 128 * 448) + 128 * 4096
    assert vanilla["bytes_per_step"] == {way: 4 * (weights + 2 * 8 * 16 * 128) for way in ("least", "most")}
    fewer = weights - 7 * 128 * 128  # SVFormer stores one V, and reads it in each layer
    assert svformer["bytes_per_step"]["least"] == 4 * (fewer + 2 * 8 * 9 * 128)
    assert svformer["bytes_per_step"]["most"] == 4 * (fewer + 2 * 8 * 16 * 128)
    monkeypatch.chdir(tmp_path)
    drawn, draw = [], plot.decoding_panel
    monkeypatch.setattr(plot, "decoding_panel", lambda ax, *of: drawn.append((ax, of)) or draw(ax, *of))
    about = json.loads((tmp_path / "b.json").read_text())
    about["rows"] = [row | {"tokens_per_s": 2 * row["tokens_per_s"]} for row in about["rows"]]
    (tmp_path / "before.json").write_text(json.dumps(about))
    plot.decoding(plot.PlotConfig(words=("decode", "b.json"), out_file="a.png"), ["before.json", "b.json"])
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and len(drawn) == 3
    for (ax, (of_mode, x, _, _)), fixed in zip(drawn, ({"batch": 2}, {"prompt": 6}, {"batch": 2}), strict=True):
        assert list(of_mode) == ["vanilla", "svformer"] and len(ax.lines) == 2
        for line, mode in zip(ax.lines, of_mode, strict=True):  # measured twice, drawn once, as in the last file
            rows = [row for row in found.values() if row["name"] == mode and fixed.items() <= row.items()]
            fits = {r["prompt"] + 4: 10 * 2**30 * r["batch"] // r["kv_bytes"] for r in rows}
            speed = {r["batch"] if x == "batch" else r["prompt"] + 4: r["tokens_per_s"] for r in rows}
            assert dict(line.get_xydata().tolist()) == (fits if ax is drawn[2][0] else speed)
            assert len(line.get_xdata()) == 2
    (tmp_path / "b.json").write_text("{}")
    plot_decode = [sys.executable, "plot.py", "decode", tmp_path / "b.json"]
    refused(finished(plot_decode, cwd=ROOT), "is not a file of bench.py decode")


def test_other_text_is_refused():
    model = tiny().float()
    ids = [[1, 2, 3], [4, 5, 6]]
    text = generate(model, ids, 5, temperature=0)[0]
    assert decoding.same_text(model, ids, text, [list(row) for row in text])
    other = [text[0], [*text[1][:3], (text[1][3] + 1) % 61, text[1][4]]]
    assert not decoding.same_text(model, ids, text, other)
    model.head.weight.data.zero_()  # whatever it says is a tie
    assert decoding.same_text(model, ids, text, other)


def test_refused():
    refused(bench_script("decode", "--batch=0,"), "batch and prompt must be at least 1")
    refused(bench_script(), "python -m bench eval out/vanilla")
    refused(bench_script("eval", "out/vanilla", "--rounds=0"), "must be at least 1")
    refused(bench_script("eval", "out/vanilla", "--task=all"), "loss is no task of the harness")
    refused(bench_script("eval", "out/vanilla", "--task=helaswag"), "unknown task 'helaswag'")


@pytest.fixture
def texts(tmp_path):
    """Flags for a small text and a tokenizer.json of GPT-NeoX's kind."""
    small_neox(tmp_path)
    rows = [{"text": f"Value {i}  re\u0301sidual\n" + " of the first layer" * (i % 7)} for i in range(60)]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"text": str(tmp_path / "texts"), "tokenizer": "neox", "tokenizer_file": str(tmp_path / "tokenizer.json")}


def test_prepare_against_its_peers(texts, tmp_path):
    pytest.importorskip("datasets")
    flags = ["--megabytes=0.02", "--memory_megabytes=0.05,0.1", "--rounds=1", f"--out_file={tmp_path / 'b.json'}"]
    result = bench_script("prepare", *(f"--{k}={v}" for k, v in texts.items()), *flags)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["side"] for row in found["rows"]] == ["prepare.py", "tiktoken", "datasets.map", "tokenizers"]
    assert len({(row["tokens"], row["bytes"]) for row in found["rows"]}) == 1  # the last one's part is all of so little
    ours, its = found["rows"][0], found["rows"][3]
    assert ours["faster"]["ratio"] == 1 and found["documents"] > 60 and its["processes"] == 1
    per_core = its["seconds"][0] / ours["seconds"][0] / ours["processes"]
    assert its["faster"]["ratio"] == pytest.approx(per_core)
    assert all(len(row["seconds"]) == len(row["processor_seconds"]) == 1 for row in found["rows"])
    first, *longer = (row["bytes"] for row in found["memory"])
    assert 20_000 <= first == found["rows"][0]["bytes"] < 21_000 and longer == [3 * first, 5 * first]
    if sys.platform == "linux":  # prepare.py and its workers: each holds a Python with numpy
        assert all(row["peak_bytes"] > 60e6 for row in found["memory"])
    assert "per core" in result.stdout and not list(tmp_path.glob("bench_*"))


@pytest.mark.parametrize(
    "function,side,instead",
    [
        ("with_tiktoken", "tiktoken", lambda *about: np.arange(9, dtype="<u2").tofile(about[2])),
        ("with_datasets", "datasets.map", lambda *about: np.arange(9, dtype="<u2").tofile(about[2])),
        ("beginning", "tokenizers", lambda *about: ["other"]),
    ],
)
def test_prepare_refuses_peers_with_other_ids(texts, monkeypatch, function, side, instead):
    pytest.importorskip("datasets")
    monkeypatch.setattr(loading, function, instead)
    with pytest.raises(configurator.UserError, match=f"^{side} makes other ids"):
        loading.bench_prepare(common.BenchConfig(("prepare",), megabytes=0.01, rounds=1, **texts), None)


def test_prepare_reads_the_standard_library():
    texts = loading.texts_of(common.BenchConfig(("prepare",)))
    assert all(isinstance(next(texts), str) for _ in range(3))


def test_peak_memory_of_a_process():
    found = loading.resident(os.getpid())
    assert not found or list(found) == [os.getpid()] and found[os.getpid()] > 50e6
    assert sys.platform != "linux" or found
    assert loading.resident(2**30) == {}


def test_load_from_made_folders_and_from_ones_own(data_dir, monkeypatch, capsys):
    monkeypatch.setattr(loading, "LONG", 1e5)
    for flags in ({"megabytes": 0.2}, {"data_dir": str(data_dir)}):
        found = loading.bench_load(common.BenchConfig(("load",), block_size=16, rounds=1, **flags), None)
        assert len(found["rows"]) == 8 and all(row["tokens_per_second"] > 0 for row in found["rows"])
        assert abs(found["need"] - 285_000) < 1000  # tokens per second of one A100
        assert found["first"]["order_bytes"] == 8 * sum((int(1e5 * w) - 1) // 16 for w in PAPER_MIXTURE.values())
    assert "100 domains, 0 MB in memory" in capsys.readouterr().out


def test_load_counts_what_it_loads(data_dir, monkeypatch):
    corpus, rows = Corpus(data_dir, 16), []
    batch, nano_batch = corpus.batch, loading.nano_batch
    monkeypatch.setattr(corpus, "batch", lambda *about: rows.append(batch(*about)[0]))
    monkeypatch.setattr(loading, "nano_batch", lambda *about: rows.append(nano_batch(*about)[0]))
    for side, count in loading.load_sides(corpus).values():
        rows.clear()
        side()
        assert sum(map(len, rows)) == count


def test_nanogpts_batch_is_a_window_and_the_next_token(data_dir):
    x, y = loading.nano_batch(data_dir / "train/code.bin", 3, 16, np.random.default_rng(0))
    assert x.shape == y.shape == (3, 16) and x.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize(
    "words,says",
    [
        (["prepare", "--megabytes=-1"], "megabytes must be at least 0"),
        (["prepare", "--memory_megabytes=5,0"], "memory_megabytes above 0"),
        (["prepare", "--tokenizer=neox"], "neox needs --tokenizer_file"),
        (["prepare", "--tokenizer=gpt3"], "unknown tokenizer 'gpt3'"),
        (["prepare", "--text=nowhere"], "no file or folder nowhere"),
        (["prepare", "--text=."], "no text in ."),
        (["load", "--data_dir=nowhere"], "no data folder nowhere"),
    ],
)
def test_prepare_and_load_refused(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(configurator.UserError, match=says):
        bench.__main__.main(configurator.load_settings(common.BenchConfig, words))


SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=257)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """bench.py's main in this process, on shapes that take no time; what it wrote."""
    monkeypatch.setitem(common.SHAPES, "tiny", SMALL)
    out = tmp_path / "b.json"

    def call(*words):
        words = [*words, "--seconds=0.001", "--rounds=2", f"--out_file={out}"]
        bench.__main__.main(configurator.load_settings(common.BenchConfig, words))
        return json.loads(out.read_text())

    return call


def test_training(small, capsys):
    found = small("train", "--compile=off", "--dtype=float32,bfloat16", "--block_size=32", "--micro_batch=2")
    assert {(r["name"], r["dtype"]) for r in found["rows"]} == {
        (mode, dtype) for mode in ("vanilla", "resformer", "svformer") for dtype in ("float32", "bfloat16")
    }
    vanilla, _, _, _, sv, _ = found["rows"]
    assert vanilla["to_vanilla"] == {"ratio": 1.0, "least": 1.0, "greatest": 1.0} and len(vanilla["seconds"]) == 2
    sizes = [ModelConfig(**SMALL, block_size=32, value_mode=mode) for mode in ("vanilla", "svformer")]
    assert sv["computed"] == flops_per_token(sizes[0]) / flops_per_token(sizes[1]) > 1 and sv["mfu"] is None
    assert vanilla["tokens"] == 64 and vanilla["first_step_s"] > 0 and found["command"]
    table = training.training_table(found["rows"])
    assert table == [line for line in capsys.readouterr().out.splitlines() if line] and len(table) == 5
    assert table[0] == "| tiny | parameters | float32 | bfloat16 | computed |" and " = 1.00" not in table[2]


def test_clocks(small, monkeypatch):
    """processor: what other work on the machine takes does not count."""
    ticks = itertools.count(step=1000)
    with monkeypatch.context() as m:
        m.setattr(time, "process_time", lambda: next(ticks))
        for name in ("wall", "processor"):
            found = small("train", "--compile=off", "--block_size=8", "--micro_batch=1", f"--clock={name}")
            timed = [s == 1000 / row["steps"] for row in found["rows"] for s in row["seconds"]]
            assert found["clock"] == name and len(timed) == 6 and set(timed) == {name == "processor"}
    sleep, cpu = {"sleep": lambda: time.sleep(0.2)}, torch.device("cpu")
    for name, low, high in (("wall", 0.2, 60), ("processor", 0, 0.1)):
        seconds, _ = common.in_turn(sleep, 1, cpu, common.BenchConfig(("train",), clock=name).now)
        assert low <= seconds["sleep"][0] < high
    with pytest.raises(configurator.UserError, match="is for a CPU"):  # also where device=auto finds a GPU
        training.bench_train(common.BenchConfig(("train",), clock="processor"), SimpleNamespace(kind="cuda"))
    with pytest.raises(ValueError, match="go by the wall clock"):
        common.BenchConfig(("decode",), clock="processor")


def test_training_against_peers(small):
    pytest.importorskip("transformers")
    rivals = [common.YARDSTICK, common.LLAMA]
    rivals += [common.X, common.X_VALUE] * bool(importlib.util.find_spec("x_transformers"))
    words = ["--modes=vanilla", "--compile=off", "--block_size=32", "--micro_batch=2"]
    found = small("train", "--peers", f"--rivals={','.join(rivals)}", "--attn=sdpa,eager", *words)
    assert [r["name"] for r in found["rows"]] == ["vanilla", "vanilla, attn=eager", *rivals]
    assert found["rows"][0][f"to {common.LLAMA}"]["ratio"] > 0
    parameters = {r["name"]: r["parameters"] for r in found["rows"]}
    assert parameters["vanilla"] == parameters[common.LLAMA]


def test_a_peer_that_does_other_work_is_no_peer(small, monkeypatch):
    pytest.importorskip("transformers")
    as_llama = common.as_llama

    def other(model):
        model.blocks[0].mlp.down.weight.data += 0.5
        return as_llama(model)

    monkeypatch.setattr(training, "as_llama", other)
    words = ["train", "--peers", f"--rivals={common.LLAMA}", "--modes=vanilla", "--compile=off", "--block_size=16"]
    with pytest.raises(UserError, match="not the same work"):
        small(*words, "--micro_batch=1")


def test_memory(tmp_path):
    """In processes of their own; a line through two sizes, and what it leaves room for."""
    words = ["memory", "--modes=vanilla", "--compile=off", "--block_size=64", "--micro_batch=4", "--recompute=off,on"]
    result = bench_script(*words, f"--out_file={tmp_path / 'b.json'}")
    assert result.returncode == 0, result.stderr
    off, on = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert (off["recompute"], on["recompute"]) == ("off", "on") and list(off["peaks"]) == ["1", "2", "4"]
    line = off["fixed"] + off["per_token"] * 4 * 64
    assert off["predicted"] == pytest.approx(line) and off["off_by"] == pytest.approx(line / off["peaks"]["4"] - 1)
    assert max(off["peaks"].values()) > 2_951_296 * 16  # weights, gradients, AdamW's two moments


def test_lines_through_peaks(monkeypatch):
    """5.05 GB and 100 kB a token: 18.95 GB, 34.95 GB … are left for tokens."""
    monkeypatch.setattr(training, "training_peak", lambda device, B, T, *how: 5.05e9 + 1e5 * B * T)
    monkeypatch.setattr(training, "ProcessPoolExecutor", lambda *_, **kw: ThreadPoolExecutor(1))
    cfg = common.BenchConfig(("memory",), micro_batch=8, block_size=1000)
    row = training.memory_row(cfg, torch.device("cpu"), "tiny", "vanilla", "float32", "off", "off")
    assert (
        row["fixed"] == pytest.approx(5.05e9) and row["per_token"] == pytest.approx(1e5) and abs(row["off_by"]) < 1e-9
    )
    assert row["fits"] == {1000: {24: 189, 40: 349, 80: 749, 141: 1359}, 64_000: {24: 2, 40: 5, 80: 11, 141: 21}}


def test_targets_of_runs_that_failed_are_not_measured():
    assert all(measured is None for _, _, measured in training.targets({}))
    rows = [
        {"name": "vanilla", "mfu": 0.43, f"to {common.LLAMA}": {"ratio": 1.4}},
        {"name": "svformer", "to_vanilla": {"ratio": 1.02}},
    ]
    found = {what: measured for what, _, measured in training.targets({"82M": {"rows": rows}})}
    assert found["share of the peak, 82M, bf16"] == 0.43 and found["svformer to vanilla, 82M"] == 1.02
    assert found["tokens/s to compiled Llama's, 82M"] == 1.4 and found["share of the peak, 468M, bf16"] is None


def test_the_plan_for_a_gpu_is_of_valid_calls(monkeypatch, tmp_path, capsys):
    """Each call is one that bench.py takes; on a CPU at a small shape, a failing one leaves its targets open."""
    called = []

    def call(words):
        cfg = load_settings(common.BenchConfig, words[3:])
        called.append((cfg.words[0], cfg.shape, cfg.dtype))
        write_json(cfg.out_file, {"rows": [{"name": "vanilla", "mfu": 0.5}]})
        return len(called) == 1

    monkeypatch.setattr(subprocess, "call", call)
    found = training.bench_gpu(common.BenchConfig(("gpu",)), Distributed("cpu"))
    assert [words for words, *_ in called] == [plan.split()[0] for plan in training.GPU_PLAN.values()]
    assert {shape for _, shape, _ in called} == {("tiny",)} and ("train", ("tiny",), common.DTYPES[1:]) in called
    assert set(found["runs"]) == set(training.GPU_PLAN) - {"82M"} and "82M failed" in capsys.readouterr().out
    measured = {row["target"]: row["measured"] for row in found["targets"]}
    assert measured["share of the peak, 468M, bf16"] == 0.5 and measured["share of the peak, 82M, bf16"] is None
