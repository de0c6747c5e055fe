"""bench.py: what it does with times; no test asserts one."""

import json

import pytest
import torch
from conftest import byte_tokenizer, refused, script
from test_eval import MORE, write_rows

import bench
import checkpoint
from model import GPT, ModelConfig


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
    seconds, results = bench.in_turn(sides, 3, torch.device("cpu"))
    assert "".join(order) == "abbaab" and results == {"a": 1, "b": 2}
    assert [len(s) for s in seconds.values()] == [3, 3]


def test_ratio_is_that_of_each_round():
    seconds = {"ours": [1.0, 2.0, 4.0], "peer": [3.0, 10.0, 8.0]}  # a machine that slows down
    assert bench.ratio(seconds, "ours", "peer") == {"ratio": 3.0, "least": 2.0, "greatest": 5.0}


def test_eval_against_the_harness(run, tmp_path):
    words = ["eval", run, "--task=piqa,winogrande", f"--data_dir={tmp_path / 'evals'}", "--limit=10", "--rounds=2"]
    result = script("bench.py", *words, f"--out_file={tmp_path / 'b.json'}", "--batch_sizes=2,4")
    if "pip install -r requirements-peers.txt" in result.stderr:
        refused(result, "the peer is missing")
        pytest.skip("lm-eval is not installed")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    assert [row["task"] for row in found["tasks"]] == ["piqa", "winogrande"] and found["tasks"][0]["documents"] == 10
    assert all(row["largest_gap"] < 1e-4 and row["to_best"]["ratio"] > 0 for row in found["tasks"])
    assert found["lm-eval"] and found["command"] and found["shape"]["n_embd"] == 16


def test_refused():
    refused(script("bench.py"), "python bench.py eval out/vanilla")
    refused(script("bench.py", "eval", "out/vanilla", "--rounds=0"), "must be at least 1")
    refused(script("bench.py", "eval", "out/vanilla", "--task=all"), "loss is no task of the harness")
    refused(script("bench.py", "eval", "out/vanilla", "--task=helaswag"), "unknown task 'helaswag'")
