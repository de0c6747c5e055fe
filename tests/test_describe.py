"""What `python model.py` prints."""

import dataclasses
import sys

import pytest
import torch
from conftest import ROOT, refused, script

import budget
from model import GPT
from oldconfig import UserError
from train import TrainConfig


@pytest.fixture
def plan(monkeypatch, capsys):
    """`python model.py …` in this process: what it prints."""

    def printed(*words):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["model.py", *words])
        with pytest.raises(SystemExit):
            budget.command("usage")
        return capsys.readouterr().out

    return printed


def test_plan_is_printed(plan):
    out = plan("--value_mode=svformer", "--n_layer=4")
    assert "layer  3  q own         k own         v of layer 0" in out and "0.6250 of full" in out
    assert "v: 0.25 own + 0.25 (layer 0 + layer 1 + layer 2)" in plan("--value_mode=resformer_all")
    assert "v: 0.5 own + 1.143 layer 0 (softmax, learned)" in plan("--value_mode=resformer_plus")
    assert "v: head gate between own and layer 0" in plan("--value_mode=resformer_head")
    assert "heads           12 of width 64" in plan("config/size_180m.py", "config/resformer.py")
    wide = plan("--n_layer=4", "--n_head=8", "--head_dim=128")
    assert "heads           8 of width 128" in wide and "1.0000 of full attention's" in wide
    assert "gqa2" in plan("table", "--n_layer=2", "--n_kv_head=2")  # rows that do not fit are left out
    assert "v: 0.5 own + 0.5 layer 0" in plan("--value_mode=resformer")
    assert "k own         v own in heads 0 to 3, of layer 0 in the others\n" in plan("--value_mode=skipv1")
    assert "v made of its k\n" in plan("--value_mode=k_eq_v")
    assert "attention's output: gate_heads" in plan("--value_mode=gated_attention_heads")
    assert "layer 0 has no skip around its attention" in plan("--value_mode=cut")
    assert "k of layer 3  v of layer 0" in plan("--value_mode=fusedkv_lite")


def test_a_numbered_source_and_its_own_name(plan, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from value_modes import Residual, ValueMode\n"
        'value_mode = ValueMode((Residual(source=2, layers="-1:"),), name="third_into_last")\n'
        "max_steps = 5\n"  # a run's setting, which a plan ignores
    )
    out = plan(str(mine))
    assert (
        out.startswith("third_into_last\n") and "layer  7  q own         k own         v own         v: 0.5 own" in out
    )
    assert out.count("layer 2") == 1


def rows_of(out):
    """{(ranks, shard or card): the numbers of its row} of the tables that `budget` prints."""
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line[:3].strip("| ").isdigit()]
    return {(int(ranks), name): [float(n.replace(",", "")) for n in numbers] for ranks, name, *numbers in rows}


def test_budget(plan):
    shape = ("--n_layer=24", "--n_head=16", "--n_embd=2048", "--value_mode=resformer", "--micro_batch=8")
    out = plan("budget", *shape, "--tokens=200e9", "--gpus=1,8", "--card=A100,H100", "--utilisation=0.5")
    rows, C, L, V = rows_of(out), 2048, 24, 50277
    block = 4 * C * C + 3 * C * 7 * C // 2 + 2 * C
    weights = 4 * (L * block + 2 * V * C + C) / 1e9
    at_work = 4 * (2 * block + 2 * V * C + C) / 1e9  # two blocks, and what is in none
    *whole, kept, total = rows[1, "zero3"]  # one rank has nothing to divide
    assert whole == pytest.approx([weights, weights, 2 * weights], rel=5e-3)
    assert total == pytest.approx(4 * weights + kept, rel=5e-3)
    part = weights / 8
    assert rows[8, "none"][:3] == pytest.approx([weights, weights, 2 * weights], rel=5e-3)
    assert rows[8, "zero2"][:3] == pytest.approx([part + weights, weights, 2 * part], rel=5e-3)  # 16 micro-batches
    assert rows[8, "zero3"][:3] == pytest.approx([part + at_work, part, 2 * part], rel=5e-3)
    multiply = L * (4 * C * C + 3 * C * 7 * C // 2) + V * C
    rate = 8 * 312e12 * 0.5 / (6 * multiply + 12 * L * C * 2048)
    seconds, sent = 2_097_152 / rate, 7 / 8 * weights
    right = [rate, seconds, 200e9 / rate / 86400, 2 * sent / seconds, 3 * 16 * sent / seconds]
    assert rows[8, "A100"] == pytest.approx(right, rel=5e-3)
    assert "400 GB of tokens, 20 GB for each checkpoint" in out
    one_micro_batch = plan("budget", "config/size_82m.py", "--gpus=32")
    assert "20,971,520,000 tokens in steps" in one_micro_batch
    assert rows_of(one_micro_batch)[32, "zero2"][1] == pytest.approx(4 * 81_901_056 / 32 / 1e9, rel=5e-3)


def test_budget_of_bad_input():
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=64)
    with pytest.raises(UserError, match="card='H10' is unknown; known: GB300"):
        budget.budget(budget.BudgetConfig(**shape, card=("H10",)))
    with pytest.raises(UserError, match="3 ranks cannot share the 32768 sequences"):
        budget.budget(budget.BudgetConfig(**shape, gpus=(3,)))


def test_budget_starts_from_the_settings_of_train():
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    for f in dataclasses.fields(budget.BudgetConfig):
        if f.name in ("batch_tokens", "micro_batch", "max_steps"):
            assert f.default == defaults[f.name]


def test_kept_bytes_are_those_of_a_real_forward():
    shape, kept = dict(vocab_size=257, n_layer=2, n_head=2, n_embd=64, block_size=32), {}
    cfg = budget.BudgetConfig(**shape, batch_tokens=12 * 32, micro_batch=3)
    model = GPT(cfg)
    parameters = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that nothing else takes its place
        return tensor

    idx = torch.zeros(3, 32, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(idx, idx.clone())
    assert budget.bytes_kept(cfg, 3) == sum(storage.nbytes() for storage in kept.values())
    assert all(parts[3] == budget.bytes_kept(cfg, 3) for parts, _ in budget.needs(cfg, n_ranks=2).values())


def test_command():
    assert "A_n V_1 (Eq 10)" in script("model.py", "--value_mode=svformer").stdout
    refused(script("model.py", "--value_mode=resfromer"), "did you mean 'resformer'?")
