"""Checkpoints: whole or not there, true to their header, and refused when they are something else."""

import json

import pytest
import torch
from conftest import config, tiny, tokens
from safetensors import safe_open
from safetensors.torch import save_file

import checkpoint
import hf
from configurator import UserError
from model import GPT


def test_round_trip_and_header(tmp_path):
    model = GPT(config("resformer"), seed=5)
    path = checkpoint.save(tmp_path, 7, model, "hash", val_loss=1.5)
    with safe_open(path, "pt") as f:
        raw = json.loads(f.metadata()["nanoresformer"])
    header = checkpoint.read_header(path)
    assert raw == header
    assert (header["step"], header["val_loss"], header["mode"], header["tokenizer"]) == (7, 1.5, "resformer", "hash")
    assert header["plan"][2] == {"owner": {"q": 2, "k": 2, "v": 2}, "sources": [[0]]}
    again = checkpoint.load(tmp_path)
    idx = tokens((1, 9))
    assert again.cfg == model.cfg and not again.training and torch.equal(again(idx)[0], model.eval()(idx)[0])


def test_last_best_and_keep(tmp_path):
    model = GPT(config())
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 2.5)):
        checkpoint.save(tmp_path, step, model, "hash", loss, keep=2)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5]  # the best and the last two
    assert checkpoint.find(tmp_path).stem == "step_00000005"
    assert checkpoint.find(tmp_path, "best").stem == "step_00000002"
    checkpoint.save(tmp_path, 6, model, "hash", keep=0)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5, 6]


def test_mode_comes_from_the_file_not_from_names(tmp_path):
    """ResFormer's tensors have vanilla's names and shapes; only the header tells them apart, and it is believed."""
    model = tiny("resformer").float()
    checkpoint.save(tmp_path, 1, model, "hash")
    idx = tokens((1, 9))
    torch.testing.assert_close(checkpoint.load(tmp_path)(idx)[0], model(idx)[0])
    vanilla = GPT(config("vanilla"))
    optimizer = torch.optim.AdamW(vanilla.parameters())
    with pytest.raises(UserError, match="is a resformer model, not vanilla"):
        checkpoint.resume(checkpoint.find(tmp_path), vanilla, optimizer, None, "hash")


def test_resume_puts_the_random_generator_back(tmp_path):
    model = GPT(config())
    optimizer = torch.optim.AdamW(model.parameters())
    path = checkpoint.save(tmp_path, 1, model, "hash", optimizer=optimizer)
    right = torch.rand(3)
    checkpoint.resume(path, model, optimizer, None, "hash")
    assert torch.equal(torch.rand(3), right)


def altered(path, **changes):
    with safe_open(path, "pt") as f:
        header, tensors = json.loads(f.metadata()["nanoresformer"]), {k: f.get_tensor(k) for k in f.keys()}
    save_file(tensors, path, metadata={"nanoresformer": json.dumps(header | changes)})


@pytest.mark.parametrize(
    "damage,says",
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated or not a safetensors file"),
        (lambda p: p.write_bytes(b"\x80\x02}q\x00."), "truncated or not a safetensors file"),
        (lambda p: save_file({"a": torch.zeros(1)}, p), "not a nanoresformer/1 checkpoint"),
        (lambda p: altered(p, format="nanoresformer/0"), "not a nanoresformer/1 checkpoint"),
        (lambda p: altered(p, plan=[]), "another layer plan"),
        (
            lambda p: altered(p, config=config("svformer").to_dict(), plan=checkpoint.plan_as_json(config("svformer"))),
            "differ",
        ),
        (lambda p: p.unlink(), "holds no checkpoint"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, says):
    damage(checkpoint.save(tmp_path, 1, GPT(config()), "hash"))
    with pytest.raises(UserError, match=says):
        checkpoint.load(tmp_path)


def test_hf_folder_round_trip(tmp_path):
    """Our fused products taken apart into Hugging Face's names and read back."""
    model = tiny("svformer", n_kv_head=2).float()
    parts = {name: p[rows].detach().clone() for name, p, rows in hf.hf_parts(model)}
    assert sum("v_proj" in name for name in parts) == 1 and len(parts) == 3 + 4 * 9 - 3
    about = dict(model_type="llama", vocab_size=61, hidden_size=32, intermediate_size=112, num_hidden_layers=4)
    about |= dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(about | {"value_mode": "svformer"}))
    save_file(parts, tmp_path / "model.safetensors")
    idx = tokens((1, 9))
    assert torch.equal(hf.load_hf(tmp_path)(idx)[0], model(idx)[0])
    mode = json.loads(json.dumps(model.cfg.to_dict()))["value_mode"]  # a mode without a name, spelled out
    (tmp_path / "config.json").write_text(json.dumps(about | {"value_mode": mode}))
    assert hf.load_hf(tmp_path).cfg.value_mode == model.cfg.value_mode
    for change, says in (
        (dict(), "has no tensor"),  # without value_mode it is a vanilla model, whose values are not there
        (dict(value_mode="resformer"), "has no tensor"),
        (dict(value_mode="svformer", intermediate_size=96), r"gate_proj.weight is \(112, 32\)"),
        (dict(value_mode="svformer", rope_scaling={"factor": 8}), "rope_scaling"),
        (dict(value_mode="denseformer"), "no names for the weights"),
        (dict(value_mode="resformer_learned"), "no names for the weights"),
        (dict(value_mode="value_embed"), "no names for the weights"),
        (dict(value_mode="svfomer"), "did you mean 'svformer'"),
        (dict(value_mode=5), "config.json: "),
        (dict(value_mode={"residuals": 3}), "config.json: "),
    ):
        (tmp_path / "config.json").write_text(json.dumps(about | change))
        with pytest.raises(UserError, match=says):
            hf.load_hf(tmp_path)
