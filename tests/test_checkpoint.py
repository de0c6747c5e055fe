"""Checkpoints: whole or not there, true to their header, and refused when they are something else."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import config, tokens
from safetensors import safe_open
from safetensors.torch import save_file

import checkpoint
import oldfiles as files
from model import GPT
from oldconfig import UserError
from value_modes import Residual, ValueMode


def test_round_trip_and_header(tmp_path):
    model = GPT(config("resformer"), seed=5)
    path = checkpoint.save(tmp_path, 7, model, "hash", val_loss=1.5)
    with safe_open(path, "pt") as f:
        raw = json.loads(f.metadata()["nanoresformer"])
    (tmp_path / "new").write_text("")
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode  # who may read any new file may read it
    header = checkpoint.read_header(path)
    assert raw == files.sealed(header | {"config": json.loads(json.dumps(asdict(header["config"])))})
    assert (header["step"], header["val_loss"], header["mode"], header["tokenizer"]) == (7, 1.5, "resformer", "hash")
    assert header["plan"][2] == {"owner": {"q": 2, "k": 2, "v": 2}, "sources": [[0]]}
    again = checkpoint.load(tmp_path)
    idx = tokens((1, 9))
    assert again.cfg == model.cfg and not again.training and torch.equal(again(idx)[0], model.eval()(idx)[0])
    assert checkpoint.gathered(model.state_dict(), is_main=False) == {}  # the other ranks keep nothing


def test_a_mode_of_another_name_is_the_same_model(tmp_path):
    """A run goes on where the same mode is called otherwise; of another mode or shape it does not."""
    checkpoint.save(tmp_path, 1, GPT(config("resformer_lambda")), "t")
    path = checkpoint.find(tmp_path)
    mine = config(ValueMode((Residual(lam=(1.0, 2.0)),), name="mine"))
    header = checkpoint.read_header(path)
    checkpoint.check_same_model(header, GPT(mine), "t", path)
    with pytest.raises(UserError, match="is a resformer_lambda model, not resformer"):
        checkpoint.check_same_model(header, GPT(config("resformer")), "t", path)
    with pytest.raises(UserError, match="is another model: n_hidden .* instead of 64"):
        checkpoint.check_same_model(header, GPT(config("resformer_lambda", n_hidden=64)), "t", path)


def test_last_best_and_keep(tmp_path):
    model = GPT(config())
    optimizer = torch.optim.AdamW(model.parameters())
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 2.5)):
        checkpoint.save(tmp_path, step, model, "hash", loss, optimizer, keep=2)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5]  # the best and the last two
    assert len(list(tmp_path.iterdir())) == 2 * 3
    assert checkpoint.find(tmp_path).stem == "step_00000005"
    assert checkpoint.find(tmp_path, "best").stem == "step_00000002"
    checkpoint.save(tmp_path, 6, model, "hash", keep=0)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5, 6]
    checkpoint.find(tmp_path, "best").write_text("damaged")
    assert checkpoint.find(tmp_path, "best").stem == "step_00000004"


def test_resume_puts_the_random_generator_back(tmp_path):
    model = GPT(config())
    optimizer = torch.optim.AdamW(model.parameters())
    path = checkpoint.save(tmp_path, 1, model, "hash", optimizer=optimizer)
    right = torch.rand(3)
    checkpoint.resume(path, model, optimizer, None, "hash")
    assert torch.equal(torch.rand(3), right)


def test_a_state_of_another_step_is_refused(tmp_path):
    model = GPT(config())
    optimizer = torch.optim.AdamW(model.parameters())
    first, second = (checkpoint.save(tmp_path, step, model, "hash", optimizer=optimizer) for step in (1, 2))
    checkpoint.state_file(first).rename(checkpoint.state_file(second))
    with pytest.raises(UserError, match="is the training state of step 1; get the one of step 2"):
        checkpoint.resume(second, model, optimizer, None, "hash")


def altered(path, **changes):
    with safe_open(path, "pt") as f:
        header, tensors = json.loads(f.metadata()["nanoresformer"]), {k: f.get_tensor(k) for k in f.keys()}
    save_file(tensors, path, metadata={"nanoresformer": json.dumps(files.sealed(header | changes))})


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage,says",
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated or not a safetensors file"),
        (lambda p: p.write_bytes(b"\x80\x02}q\x00."), "truncated or not a safetensors file"),
        (lambda p: save_file({"a": torch.zeros(1)}, p), "not a checkpoint of train.py"),
        (lambda p: altered(p, format="nanoresformer/0"), "format takes 'nanoresformer/1'"),
        (lambda p: altered(p, step=-1), "step takes int from 0 to inf, not -1"),
        (lambda p: altered(p, tensors="0" * 64), "its tensors do not match their checksum"),
        (flip_a_bit, "altered"),
        (lambda p: altered(p, plan=[]), "another layer plan"),
        (
            lambda p: altered(p, config=asdict(config("svformer")), plan=checkpoint.plan_as_json(config("svformer"))),
            "differ",
        ),
        (lambda p: p.unlink(), "holds no checkpoint"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, says):
    damage(checkpoint.save(tmp_path, 1, GPT(config()), "hash"))
    with pytest.raises(UserError, match=says):
        checkpoint.load(tmp_path)


def test_without_a_run_the_newest_is_taken(tmp_path, monkeypatch):
    """The newest by the time of its files, wherever its name stands; a message lists the newest first too."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run is below out/ yet"):
        checkpoint.find()
    for name, age in (("a", 30), ("b", 10), ("c", 20)):
        Path("out", name).mkdir(parents=True)
        path = checkpoint.save(Path("out", name), 1, GPT(config()), "hash")
        os.utime(path, (time.time() - age,) * 2)
    assert checkpoint.find() == Path("out/b/step_00000001.safetensors")
    with pytest.raises(UserError, match="runs that do: out/b, out/c, out/a"):
        checkpoint.find("out/none")


def test_what_a_run_was_trained_on(tmp_path):
    """The mixture is of the run's own data, not of the data given instead."""
    here = str(tmp_path)
    files.write_json(tmp_path / "config.json", {"data_dir": here, "mixture": {"a": 1.0}, "max_steps": 1})
    assert checkpoint.trained_on(tmp_path, "", "data") == (here, {"a": 1.0})
    assert checkpoint.trained_on(tmp_path, here, "data") == (here, None)
    assert not checkpoint.trained_with_bos(tmp_path) and not checkpoint.trained_with_bos(tmp_path / "none")
    files.write_json(tmp_path / "config.json", {"bos": True})
    assert checkpoint.trained_with_bos(tmp_path)
