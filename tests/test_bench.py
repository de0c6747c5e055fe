"""bench/: turns, failures, equal work, what it counts. No test asserts a time."""

import importlib
import json
import re
import statistics

import pytest
import torch
from conftest import ROOT, finished, in_process, refused

import bench
from bench import decoding, training
from common.plan import flops_per_token
from configurator import load_settings

SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=257)
TRAIN = ["--compile=off", "--block_size=32", "--micro_batch=2", "--seconds=0"]
LLAMAS = ["--peers=llama,llama_no_mask"] if importlib.util.find_spec("transformers") else []


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A benchmark in this process, with a small model. Returns what it wrote and what it printed."""
    monkeypatch.setitem(bench.SHAPES, "tiny", SMALL)

    def start(module, *words):
        result = in_process(module, *words, "--rounds=2", f"--out_file={tmp_path / 'b.json'}")
        assert result.returncode == 0, result.stderr
        return json.loads((tmp_path / "b.json").read_text()), result.stdout

    return start


def test_sides_take_turns_fail_alone_and_are_written_at_once(tmp_path):
    calls, file = [], tmp_path / "b.json"

    def start(row):
        calls.append((row["name"], len(json.loads(file.read_text())["rows"]) if file.exists() else 0))
        if row["name"] == "b":
            raise torch.OutOfMemoryError("CUDA out of\nmemory")
        return lambda: calls.append((row["name"], json.loads(file.read_text())["rounds"]))

    rows = [dict(shape="tiny", name=name, dtype="float32", compile="off") for name in "abc"]
    results = bench.Results("train", str(file), lambda rows: results.about.update(rounds=len(calls)))
    bench.race(rows, start, 3, results)
    assert calls == [("a", 0), ("b", 1), ("c", 2)] + [("a", 3), ("c", 3), ("c", 5), ("a", 5), ("a", 7), ("c", 7)]
    found = json.loads(file.read_text())["rows"]
    assert [row.get("error") for row in found] == [None, "OutOfMemoryError: CUDA out of memory", None]
    for row in found:
        row.update(recompute="off", micro_batch=1, length=1, peak=1, batch=1, prompt=1, tokens_per_s=1, parameters=1)
    for table in (training.training_table, training.memory_table, decoding.decoding_table):
        assert table(found).count("CUDA out of memory") == 1


@pytest.mark.parametrize("word, says", [("--shape=83M", "shape takes"), ("--modes=resformer", "begin with vanilla")])
def test_bad_input(word, says):
    refused(in_process(training, word), says)


def test_makefile_calls_are_valid():
    """And with NO_INSTALL they start the machine's own Python, without making an environment."""
    made = finished(["make", "-n", "bench-gpu", "NO_INSTALL=1", "PYTHON=python9"], cwd=ROOT).stdout.replace("\\\n", "")
    calls = re.findall(r"^timeout (\d+) python9 -m bench\.(\w+) (.*)$", made, re.M)
    assert len(calls) == 7 and "pip" not in made and "venv" not in made
    classes = {"training": training.TrainingConfig, "decoding": decoding.DecodingConfig}
    for limit, name, words in calls:
        assert int(limit) < 600
        load_settings(classes[name], words.split())


def test_training(call, monkeypatch):
    monkeypatch.setattr(training, "peak_flops", lambda device, dtype: 1e12)
    found, printed = call(training, *TRAIN, *LLAMAS, "--modes=vanilla,svformer", "--attn=sdpa,eager")
    rows = {row["name"]: row for row in found["rows"]}
    assert training.training_table(found["rows"]) in printed and "svformer, attn=eager" in rows and found["command"]
    vanilla, sv = rows["vanilla"], rows["svformer"]
    sizes = [flops_per_token(bench.model_config(mode, "tiny", 32)) for mode in ("vanilla", "svformer")]
    assert sv["computed"] == sizes[0] / sizes[1] > 1 and sv["mfu"] == sv["tokens_per_s"] * sizes[1] / 1e12
    assert vanilla["tokens"] == 64 and len(vanilla["seconds"]) == 2 and vanilla["to_vanilla"]["ratio"] == 1
    for name in (bench.LLAMA, bench.NO_MASK) if LLAMAS else ():
        assert rows[name]["parameters"] == vanilla["parameters"]
        by_round = [theirs / ours for ours, theirs in zip(sv["seconds"], rows[name]["seconds"], strict=True)]
        middle = statistics.median(by_round)
        assert sv[f"to {name}"] == {"ratio": middle, "least": min(by_round), "greatest": max(by_round)}


@pytest.mark.parametrize("name", [bench.LLAMA, bench.NO_MASK] if LLAMAS else [])
def test_a_peer_does_the_same_work(monkeypatch, name):
    monkeypatch.setitem(bench.SHAPES, "tiny", SMALL)
    idx, targets = bench.random_batch("tiny", 2, 32, "cpu")
    losses = [
        bench.mean_loss(side, bench.new_model(side, "tiny", 32, "cpu"), idx, targets) for side in ("vanilla", name)
    ]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)


def test_memory(call, monkeypatch):
    """Of a process of its own, which does not see `call`'s small model."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "100000000")  # coarser, and faster than what main sets
    words = ["memory", "--modes=vanilla", "--compile=off", "--block_size=64", "--micro_batch=4", "--recompute=on"]
    found, printed = call(training, *words)
    (row,) = found["rows"]
    assert 2_951_296 * 16 < row["peak"] < 5e8  # weights, gradients, AdamW's two moments
    assert "| tiny | vanilla | float32 | off | on | 4 | 64 |" in printed


def test_decoding(call):
    words = ["--modes=vanilla,svformer", "--batch=1,2", "--prompt=3,6", "--new=4", "--compile=off"]
    peers = [*decoding.PEERS] if LLAMAS else []
    found, printed = call(decoding, *words, *[f"--peers={','.join(peers)}"] * bool(peers))
    assert len(found["rows"]) == 4 * (2 + len(peers)) and decoding.decoding_table(found["rows"]) in printed
    rows = {(row["name"], row["batch"], row["prompt"]): row for row in found["rows"]}
    assert all(row["tokens_per_s"] > 0 < row["prefill_tokens_per_s"] for row in rows.values())
    assert {row.get("same_text", 1) for row in rows.values()} == {1}
    # 9 positions (the last new token needs none) of 4 or 3 times 16 numbers of 4 bytes, two rows
    assert rows["vanilla", 2, 6]["kv_bytes"] == 2 * 9 * 4 * 16 * 4
    assert rows["svformer", 2, 6]["kv_bytes"] == 2 * 9 * 3 * 16 * 4
    assert rows["vanilla", 2, 6]["batch_that_fits"] == 10 * 2**30 // (9 * 4 * 16 * 4)
