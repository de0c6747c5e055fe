"""bench/: turns, failures, equal work, what it counts. No test asserts a time."""

import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finished, in_process

import bench
from bench import decoding, training
from common.sizes import flops_per_token
from configurator import load_settings

LLAMAS = [bench.LLAMA, bench.NO_MASK, bench.OUR_LOSS] if importlib.util.find_spec("transformers") else []


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A benchmark of a small model in this process. Returns its rows by name; the table is printed."""
    monkeypatch.setitem(bench.SHAPES, "tiny", dict(n_layer=2, n_head=2, n_embd=16, vocab_size=257))
    monkeypatch.setattr(training, "peak_flops", lambda device, dtype: 1e12)

    def start(module, table, *words):
        result = in_process(module, *words, "--modes=svformer", "--rounds=2", f"--out_file={tmp_path / 'b.json'}")
        assert result.returncode == 0, result.stderr
        rows = json.loads((tmp_path / "b.json").read_text())["rows"]
        assert table(rows) in result.stdout
        return {row["name"]: row for row in rows}

    return start


def test_sides_take_turns_and_fail_alone(tmp_path):
    calls, cfg = [], SimpleNamespace(rounds=3, out_file=str(tmp_path / "b.json"))

    def start(row):
        if row["name"] == "b":
            raise torch.OutOfMemoryError("CUDA out of\nmemory")
        return lambda: (calls.append(row["name"]), row["seconds"].append(2.0))

    rows = [dict(name=name, shape="tiny", dtype="float32", compile="off", seconds=[]) for name in ("vanilla", *"bc")]
    bench.race("train", cfg, rows, start, lambda row: row.update(tokens_per_s=1.0, mfu=None))
    assert calls == ["vanilla", "c", "c", "vanilla", "vanilla", "c"]
    found = [
        row | dict(computed=1, batch=1, prompt=1, parameters=1)
        for row in json.loads(open(cfg.out_file, encoding="utf-8").read())["rows"]
    ]
    for table in (training.training_table, decoding.decoding_table):
        assert table(found).count("OutOfMemoryError: CUDA out of memory") == 1


def test_makefile_calls_are_valid():
    """And with NO_INSTALL they start the machine's own Python, without making an environment."""
    made = finished(["make", "-n", "bench-gpu", "NO_INSTALL=1", "PYTHON=python9", "OUT=out"], cwd=ROOT).stdout.replace(
        "\\\n", ""
    )
    calls = re.findall(r"^timeout \d+ python9 -m bench\.(\w+) (.*)$", made, re.M)
    assert len(calls) == 7 and "pip install" not in made and "-m venv" not in made
    for name, words in calls:
        load_settings({"training": training.TrainingConfig, "decoding": decoding.DecodingConfig}[name], words.split())


def test_training(call):
    peers = ["--peers=llama,llama_no_mask,llama_our_loss"] * bool(LLAMAS)
    rows = call(training, training.training_table, *peers, "--block_size=32", "--micro_batch=2", "--seconds=0")
    vanilla, sv = rows["vanilla"], rows["svformer"]
    sizes = [flops_per_token(bench.model_config(mode, "tiny", 32)) for mode in ("vanilla", "svformer")]
    assert sv["computed"] == sizes[0] / sizes[1] > 1 and sv["mfu"] == sv["tokens_per_s"] * sizes[1] / 1e12
    assert vanilla["tokens"] == 64 and len(vanilla["seconds"]) == 2 and vanilla["to_vanilla"]["ratio"] == 1
    idx, targets = bench.random_batch("tiny", 2, 32, "cpu")
    losses = [bench.mean_loss(s, bench.new_model(s, "tiny", 32, "cpu"), idx, targets) for s in ("vanilla", *LLAMAS)]
    for name, loss in zip(LLAMAS, losses[1:], strict=True):  # a peer does the same work
        torch.testing.assert_close(loss, losses[0], rtol=0, atol=1e-5)
        assert rows[name]["parameters"] == vanilla["parameters"]
        least, greatest = sorted(b / a for a, b in zip(sv["seconds"], rows[name]["seconds"], strict=True))
        assert sv[f"to {name}"] == {"ratio": (least + greatest) / 2, "least": least, "greatest": greatest}


def test_decoding(call):
    peers = ["--peers=dynamic,static"] * bool(LLAMAS)
    rows = call(decoding, decoding.decoding_table, "--batch=2", "--prompt=6", "--new=4", *peers)
    assert len(rows) == 2 + 2 * bool(LLAMAS) and {row.get("same_text", 1) for row in rows.values()} == {1}
    # 9 positions (the last new token needs none) of 4 or 3 times 16 numbers of 4 bytes, two rows
    assert rows["vanilla"]["kv_bytes"] == 2 * 9 * 4 * 16 * 4 and rows["svformer"]["kv_bytes"] == 2 * 9 * 3 * 16 * 4


def test_our_first_step_counts_like_the_others(monkeypatch):
    timed = {"prefill": 1.0, "compile": 50.0, "decode": 6.0}  # of the steps after the first
    monkeypatch.setattr(decoding, "generate", lambda *_, **how: ([[0] * 5], SimpleNamespace(nbytes=0), dict(timed)))
    _, seconds = decoding.decode_ours(None, torch.zeros(1, 3), {"new": 5, "compile": "on"})
    assert seconds["decode"] == 8.0  # four steps, three of which took 6 s
