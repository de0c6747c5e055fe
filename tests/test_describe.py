"""What `python model.py` prints."""

import sys

import pytest
from conftest import ROOT, refused, script

import describe
from configurator import run


@pytest.fixture
def plan(monkeypatch, capsys):
    """`python model.py …` in this process: what it prints."""

    def printed(*words):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["model.py", *words])
        run(describe.main, "usage", skip_unknown=True)
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


def test_command():
    assert "A_n V_1 (Eq 10)" in script("model.py", "--value_mode=svformer").stdout
    refused(script("model.py", "--value_mode=resfromer"), "did you mean 'resformer'?")
