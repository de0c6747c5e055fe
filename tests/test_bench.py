"""bench/: what it does with times. No test asserts a time."""

import contextlib
import importlib
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finished, in_process, refused, tiny

import bench
from bench import common, decoding, training
from describe import flops_per_token
from oldconfig import UserError, load_settings
from sample import generate
from value_modes import ModelConfig

SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=257)
LLAMA = bench.LLAMA


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A benchmark's main in this process, on a model that takes no time; (what it wrote, what it printed)."""
    monkeypatch.setitem(bench.SHAPES, "tiny", SMALL)

    def start(module, *words):
        result = in_process(module, *words, "--rounds=2", f"--out_file={tmp_path / 'b.json'}")
        assert result.returncode == 0, result.stderr
        return json.loads((tmp_path / "b.json").read_text()), result.stdout

    return start


# ---- common


def test_sides_take_turns():
    assert [common.order_of_round({"a": 1, "b": 2}, n) for n in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_ratio_is_that_of_each_round():
    seconds = {"ours": [1.0, 2.0, 4.0], "peer": [3.0, 10.0, 8.0]}  # a machine that slows down
    assert common.ratio(seconds, "ours", "peer") == {"ratio": 3.0, "least": 2.0, "greatest": 5.0}


def test_bad_input():
    """One benchmark starts as a user starts it, and says what is wrong before it imports torch."""
    command = [sys.executable, "-X", "importtime", "-m", "bench.training", "--shape=83M"]
    result = finished(command, cwd=ROOT)
    assert not re.search(r"\| torch$", result.stderr, re.M)
    result.stderr = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("import time"))
    refused(result, "shape[0] takes 'tiny' or '82M'")
    for module, words, says in (
        (training, ["--modes=resformer"], "modes must begin with vanilla"),
        (decoding, ["--modes=vanilla,resfomer"], "unknown value_mode"),
        (training, ["--recompute=on"], "recompute is of memory"),
        (training, ["--attn=flash"], "attn=flash needs dtype bfloat16 or float16"),
        (decoding, ["--shape=180M", "--modes=vanilla,gqa8"], "n_head=12 is not a multiple of it"),
        (training, ["--out_file=results"], "out_file=results must end in .json"),
        (decoding, ["--batch=0"], "batch=0 must be at least 1"),
        (training, ["--rounds=0"], "rounds=0 must be at least 1"),
    ):
        refused(in_process(module, *words), says)


def test_makefile_calls_are_valid():
    """And with NO_INSTALL they start the machine's own Python, without making an environment."""
    made = finished(["make", "-n", "bench-gpu", "NO_INSTALL=1", "PYTHON=python9"], cwd=ROOT).stdout.replace("\\\n", "")
    calls = re.findall(r"^timeout (\d+) python9 -m bench\.(\w+) (.*)$", made, re.M)
    assert len(calls) == 7 and "pip" not in made and "venv" not in made
    classes = {"training": training.TrainingConfig, "decoding": decoding.DecodingConfig}
    for limit, name, words in calls:
        assert int(limit) < 600
        load_settings(classes[name], words.split())


# ---- training


def test_training(call):
    words = ["--compile=off", "--block_size=32", "--micro_batch=2", "--seconds=0"]
    found, printed = call(training, *words, "--dtype=float32,bfloat16")
    modes = ("vanilla", "resformer", "svformer")
    assert [(r["name"], r["dtype"]) for r in found["rows"]] == [(m, d) for m in modes for d in ("float32", "bfloat16")]
    vanilla, _, _, _, sv, _ = found["rows"]
    assert vanilla["to_vanilla"] == {"ratio": 1.0, "least": 1.0, "greatest": 1.0} and len(vanilla["seconds"]) == 2
    sizes = [flops_per_token(ModelConfig(**SMALL, block_size=32, value_mode=m)) for m in ("vanilla", "svformer")]
    assert sv["computed"] == sizes[0] / sizes[1] > 1
    assert vanilla["tokens"] == 64 and vanilla["first_step_s"] > 0 and found["command"]
    table = training.training_table(found["rows"])
    assert table in printed and len(table.splitlines()) == 5 and " = 1.00" not in table.splitlines()[2]
    assert table.startswith("| tiny | parameters | float32 | bfloat16 | computed |")


def test_training_against_llama(call, monkeypatch):
    pytest.importorskip("transformers")
    words = ["--peers=llama", "--modes=vanilla", "--compile=off", "--block_size=32", "--micro_batch=2", "--seconds=0"]
    found, _ = call(training, *words, "--attn=sdpa,eager")
    assert [r["name"] for r in found["rows"]] == ["vanilla", "vanilla, attn=eager", LLAMA]
    assert found["rows"][0][f"to {LLAMA}"]["ratio"] > 0
    assert found["rows"][0]["parameters"] == found["rows"][2]["parameters"]
    to_llama = training.to_llama

    def other(model):
        model.head.weight.data *= 20
        return to_llama(model)

    monkeypatch.setattr(training, "to_llama", other)
    monkeypatch.setattr(training, "warmed_up", None)  # found before anything is compiled
    refused(in_process(training, *words), "not the same work")


def test_llama_without_its_mask_does_the_same_work(call):
    pytest.importorskip("transformers")
    words = ["--peers=llama,llama_no_mask", "--modes=vanilla", "--compile=off", "--block_size=32", "--micro_batch=2"]
    found, _ = call(training, *words, "--seconds=0")
    assert [r["name"] for r in found["rows"]] == ["vanilla", *bench.PEERS.values()]
    assert len({r["parameters"] for r in found["rows"]}) == 1 and all(r["seconds"] for r in found["rows"])


def test_shares_of_the_peak_and_of_a_product(call, monkeypatch):
    """On a GPU, whose numbers stand here for a CPU's."""
    monkeypatch.setattr(training, "product_flops", lambda device, dtype: 800e12)
    monkeypatch.setattr(training, "peak_flops", lambda device, dtype: 1000e12)
    words = ["--modes=vanilla", "--compile=off", "--block_size=32", "--micro_batch=2", "--seconds=0"]
    (row,) = call(training, *words)[0]["rows"]
    flops = row["tokens_per_s"] * row["flops_per_token"]
    assert row["of_product"] == flops / 800e12 and row["mfu"] == flops / 1000e12
    cell = training.cell_of(row | {"of_product": 0.5, "mfu": 0.4})
    assert cell.endswith(", 50% of a product, MFU 40.0%")


def test_a_side_that_fails_is_a_row(call, monkeypatch):
    trainer = training.trainer

    def failing(side, *about):
        if side.model == "resformer":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trainer(side, *about)

    monkeypatch.setattr(training, "trainer", failing)
    words = ["--modes=vanilla,resformer,svformer", "--compile=off", "--block_size=32", "--micro_batch=2"]
    found, printed = call(training, *words, "--seconds=0")
    assert ["error" in row for row in found["rows"]] == [False, True, False]
    assert len(found["rows"][2]["seconds"]) == 2 and "OutOfMemoryError: CUDA out of memory" in printed


def test_results_are_written_after_each_side(monkeypatch, tmp_path):
    """What a kill would leave."""
    monkeypatch.setitem(bench.SHAPES, "tiny", SMALL)
    path, left, warmed_up = tmp_path / "b.json", [], training.warmed_up

    def seen(*about):
        left.append([r["name"] for r in json.loads(path.read_text())["rows"]] if path.exists() else [])
        return warmed_up(*about)

    monkeypatch.setattr(training, "warmed_up", seen)
    words = ["--modes=vanilla,resformer,svformer", "--compile=off", "--block_size=32", "--micro_batch=2", "--seconds=0"]
    in_process(training, *words, "--rounds=1", f"--out_file={path}")
    assert left == [[], ["vanilla"], ["vanilla", "resformer"]]


def test_a_decoder_that_fails_is_a_row(call, monkeypatch):
    def failing(model, *about, **how):
        if model.cfg.value_mode.name == "svformer":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(model, *about, **how)

    monkeypatch.setattr(decoding, "generate", failing)
    words = ["--modes=vanilla,svformer", "--batch=1", "--prompt=3", "--new=4", "--compile=off"]
    found, printed = call(decoding, *words)
    assert ["error" in row for row in found["rows"]] == [False, True] and "CUDA out of memory" in printed


def test_memory(call, monkeypatch):
    """In a process of its own, whose peak does not hold what this one has. It does not see `call`'s small shape."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "100000000")  # coarser, and faster than what main sets
    words = ["memory", "--modes=vanilla", "--compile=off", "--block_size=64", "--micro_batch=4", "--recompute=on"]
    found, printed = call(training, *words)
    (row,) = found["rows"]
    assert row["recompute"] == "on" and (row["micro_batch"], row["length"]) == (4, 64)
    assert 2_951_296 * 16 < row["peak"] < 5e8  # weights, gradients, AdamW's two moments
    assert "| tiny | vanilla | float32 | off | on | 4 x 64 |" in printed


def test_memory_of_every_side(monkeypatch):
    def submit(function, device, shape, side, recompute, B, T):
        if side.is_peer:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(result=lambda: 5e9 + 1e5 * B * T)

    process = contextlib.nullcontext(SimpleNamespace(submit=submit))
    monkeypatch.setattr(training, "ProcessPoolExecutor", lambda *args, **kw: process)
    words = ["memory", "--micro_batch=8", "--block_size=1000", "--modes=vanilla", "--compile=off", "--recompute=off,on"]
    cfg, kept = load_settings(training.TrainingConfig, [*words, "--peers=llama"]), []
    rows = training.memory_rows(cfg, "tiny", torch.device("cpu"), lambda rows: kept.append(len(rows)))
    assert [(row["name"], row["recompute"]) for row in rows] == [("vanilla", "off"), ("vanilla", "on"), (LLAMA, "off")]
    assert kept == [1, 2, 3]
    table = training.memory_table(rows)
    assert table.count("| 8 x 1,000 | 5.80 |") == 2 and table.count("OutOfMemoryError: CUDA out of memory") == 1


# ---- decoding


def test_decoding(call):
    words = ["--modes=vanilla,svformer", "--batch=1,2", "--prompt=3,6", "--new=4", "--compile=off"]
    peers = ["dynamic", "static"] if importlib.util.find_spec("transformers") else []
    found, printed = call(decoding, *words, f"--peers={','.join(peers)}" if peers else "--kv_gib=10")
    assert len(found["rows"]) == 4 * (2 + len(peers)) and decoding.decoding_table(found["rows"]) in printed
    rows = {(row["name"], row["batch"], row["prompt"]): row for row in found["rows"] if "kv_bytes" in row}
    assert len(rows) == 8 and all(row["tokens_per_s"] > 0 < row["prefill_tokens_per_s"] for row in rows.values())
    # 9 positions (the last new token needs none) of 4 or 3 times 16 numbers of 4 bytes, two rows
    assert rows["vanilla", 2, 6]["kv_bytes"] == 2 * 9 * 4 * 16 * 4
    assert rows["svformer", 2, 6]["kv_bytes"] == 2 * 9 * 3 * 16 * 4
    assert rows["vanilla", 2, 6]["batch_that_fits"] == 10 * 2**30 // (9 * 4 * 16 * 4)


def test_another_text_is_rejected():
    model = tiny().float()
    ids = [[1, 2, 3], [4, 5, 6]]
    text = generate(model, ids, 5, temperature=0)[0]
    other = [text[0], [*text[1][:3], (text[1][3] + 1) % 61, text[1][4]]]
    ours, peer = decoding.Decoder("vanilla"), decoding.Decoder(f"{LLAMA}, static")
    decoding.check_texts({ours: text, peer: text, decoding.Decoder("svformer"): other}, model, ids)
    with pytest.raises(UserError, match="another text"):
        decoding.check_texts({ours: text, peer: other}, model, ids)
    model.head.weight.data.zero_()  # whatever it says is a tie
    decoding.check_texts({ours: text, peer: other}, model, ids)
