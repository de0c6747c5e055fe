"""Hugging Face: our modes inside transformers, folders that we write and read, tokenizers, and our stages on them."""

import copy
import dataclasses
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import (
    COVER,
    MODES,
    SHARDS,
    SHARED,
    byte_tokenizer,
    config,
    gpt2_json,
    hf_folder,
    in_process,
    make_data,
    needs_shared,
    refused,
    tiny,
    tokens,
    widths,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import analyze
import eval as evaluate
import export
import prepare
import sample
import train
from common import checkpoint, hf, scoring
from common.layers import Rope
from common.tokenizer import Tokenizer
from configurator import UserError
from value_modes import kv_floats_per_token

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from common.modeling_nanoresformer import NanoResFormerConfig, NanoResFormerForCausalLM  # noqa: E402

SHAPE = dict(n_layer=4, n_head=4, n_embd=32, block_size=96, batch_tokens=192, micro_batch=2, warmup_steps=1)
SHAPE |= dict(max_steps=2, eval_every=2, eval_tokens=192, dtype="float32", learning_rate=1e-2)


def ran(module, *words):
    result = in_process(module, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def trained(data, out, **settings):
    ran(train, *(f"--{key}={value}" for key, value in {**SHAPE, "data_dir": data, "out_dir": out, **settings}.items()))
    return out


def wrapped(model, **settings):
    """A model of ours inside the class that goes with the export."""
    peer = NanoResFormerForCausalLM(NanoResFormerConfig(shape=dataclasses.asdict(model.cfg), **settings)).eval()
    peer.model.load_state_dict(model.state_dict())
    return peer


def peer_of(folder, **settings):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings).eval()


def close(found, right, atol=1e-5):
    torch.testing.assert_close(found, right, rtol=0, atol=atol)


def same_weights(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())


# ---- the class for transformers


@pytest.mark.parametrize(("mode", "n_kv_head"), widths(*MODES), ids=str)
def test_every_mode_decodes_with_transformers_cache_and_with_padding(mode, n_kv_head):
    model = tiny(mode, n_kv_head=n_kv_head, block_size=48).float()
    peer, idx, full = wrapped(model), tokens((2, 8)), tokens((2, 8))
    with torch.inference_mode():
        close(peer(idx).logits, model(idx)[0])
        for _ in range(32):
            full = torch.cat([full, model(full)[0][:, -1:].argmax(-1)], dim=1)
        how = dict(max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        made = peer.generate(idx, attention_mask=torch.ones_like(idx), return_dict_in_generate=True, **how)
        assert torch.equal(made.sequences, full)
        layers = [layer for layer in made.past_key_values.layers if layer.is_initialized]
        assert sum(x.keys.nbytes + x.values.nbytes for x in layers) == 2 * 39 * 4 * kv_floats_per_token(model.cfg)
        padded = torch.cat([tokens((1, 3), seed=1), idx[:1, :5]], dim=1)  # 3 tokens of padding, whatever they are
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        alone = peer.generate(idx[:1, :5], attention_mask=mask[:, 3:], **how)
        assert torch.equal(peer.generate(padded, attention_mask=mask, **how)[:, 3:], alone)


@pytest.mark.parametrize("mode", COVER)
def test_beams_and_loss_and_gradients_with_recomputing(mode):
    model = tiny(mode, block_size=48).float()
    peer, idx, grads = wrapped(model), tokens((2, 8)), []
    how = dict(attention_mask=torch.ones_like(idx), max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0)
    assert torch.equal(peer.generate(idx, **how), peer.generate(idx, use_cache=False, **how))
    close(peer(idx, labels=idx).loss, model(idx[:, :-1], idx[:, 1:])[1])
    for recompute in (False, True):
        peer.zero_grad()
        if recompute:
            peer.gradient_checkpointing_enable()
        peer.train()(idx, labels=idx).loss.backward()
        assert peer.model.recompute == recompute
        grads.append({name: p.grad.clone() for name, p in peer.named_parameters() if p.grad is not None})
    assert len(grads[0]) > 10
    close(grads[0], grads[1], atol=1e-6)


def test_padding_in_eager_attention_is_not_nan():
    peer, idx, mask = wrapped(tiny().float(), attn_implementation="eager"), tokens((1, 8)), torch.ones(1, 8).long()
    mask[:, :3] = 0
    close(peer(idx, attention_mask=mask).logits[:, 3:], peer(idx[:, 3:]).logits)
    with pytest.raises(ValueError, match=r"attention_mask \(1, 8\) must be \(batch, 7\)"):
        peer(idx[:, 1:], attention_mask=mask)


def test_the_angles_which_are_in_no_file_are_made_anew(tmp_path):
    model, idx = tiny(rope_theta=5e5, rope_scaling=(8.0, 1.0, 4.0, 32.0)).float(), tokens((1, 32))
    wrapped(model).save_pretrained(tmp_path)
    close(NanoResFormerForCausalLM.from_pretrained(tmp_path)(idx).logits, model(idx)[0])


def test_what_other_code_asks_for():
    model = tiny("svformer", n_kv_head=2).float()
    peer, idx, widths = wrapped(model), tokens((1, 8)), []
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    assert [getattr(peer.config, name) for name in names] == [4, 8, 2, 32, 61]
    assert peer.config.max_position_embeddings == 32
    assert peer.get_input_embeddings() is peer.model.embed and peer.get_output_embeddings() is peer.model.head
    close(peer(idx, logits_to_keep=3).logits, peer(idx).logits[:, -3:])
    with pytest.raises(ValueError, match="position_ids are not supported"):
        peer(idx, position_ids=torch.zeros_like(idx))
    # trl calls the base model, and computes the loss by itself
    base = peer.base_model(input_ids=idx, attention_mask=torch.ones_like(idx), use_cache=False)
    close(peer.get_output_embeddings()(base.last_hidden_state), model(idx)[0])
    assert base.past_key_values is None
    # transformers 5.24 calls the cache by another name
    cache = peer(idx[:, :5]).past_key_values
    close(peer(idx[:, 5:], cache=cache).logits, model(idx)[0][:, 5:])
    peer.config.use_cache = False
    assert peer(idx).past_key_values is None
    peer.get_output_embeddings().register_forward_hook(lambda head, args, logits: widths.append(logits.size(1)))
    peer.generate(idx, max_new_tokens=2, do_sample=False, use_cache=True)
    assert widths == [1, 1]  # no logits of the prompt


def test_torch_traces_it_with_a_mask_of_any_length():
    peer, idx, free = wrapped(tiny("svformer").float()), tokens((2, 12)), {1: torch.export.Dim("T", min=9, max=32)}
    how = dict(input_ids=idx, attention_mask=torch.ones_like(idx), use_cache=False)
    shapes = dict(input_ids=free, attention_mask=free, use_cache=None)
    graph = torch.export.export(peer, (), how, dynamic_shapes=shapes).module()
    how |= dict(input_ids=tokens((2, 20)), attention_mask=torch.ones(2, 20).long())
    how["attention_mask"][1, :4] = 0
    close(graph(**how).logits, peer(**how).logits)


# ---- folders that we write


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{mode: (its run, its export)} of a plain Llama, and of models that bring their code."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for mode in ("vanilla", "svformer", "resformer_plus"):
        run, out = trained(data, folder / mode, value_mode=mode), folder / f"hf_{mode}"
        assert " 0 of " in ran(export, run, f"--out_dir={out}")
        found[mode] = run, out
    return found


@pytest.mark.parametrize("mode", ["vanilla", "svformer", "resformer_plus"])
def test_what_transformers_makes_of_it(runs, tmp_path, mode):
    run, folder = runs[mode]
    model, peer, idx = checkpoint.load(run), peer_of(folder), tokens((2, 20), vocab=257)
    assert isinstance(peer, transformers.LlamaForCausalLM) == (mode == "vanilla")
    close(peer(idx).logits, model(idx)[0])
    peer.save_pretrained(tmp_path)
    same_weights(peer_of(tmp_path), peer)
    half = peer_of(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and (half(idx).logits - peer(idx).logits).abs().max() < 0.1
    assert transformers.AutoTokenizer.from_pretrained(folder).padding_side == "left"
    generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    words = dict(max_new_tokens=8, do_sample=False)
    text = generate("abcabc", **words)[0]["generated_text"]
    both = generate(["abcabc", "abcdefghij"], batch_size=2, **words)
    assert text.startswith("abcabc") and both[0][0]["generated_text"] == text

    # a model that is not a Llama cannot be loaded as one
    about = json.loads((folder / "config.json").read_text())
    assert (about["model_type"] == "llama") == (mode == "vanilla")
    assert ("auto_map" in about) == (folder / "model.py").exists() == (mode != "vanilla")
    card = (folder / "README.md").read_text()
    assert f"# {mode}" in card and f"--value_mode={mode}" in card and "nats per token" in card
    assert ("trust_remote_code" in card) == (mode != "vanilla")
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all may be read by the same users


def test_its_code_needs_none_of_our_files(runs, tmp_path):
    """Elsewhere `from model import GPT` would find nothing, so here it must not find ours."""
    code = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    command = [sys.executable, "-c", code, str(runs["svformer"][1])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_and_dtypes(runs, tmp_path, dtype):
    run, _ = runs["resformer_plus"]
    ran(export, run, f"--out_dir={tmp_path / 'hf'}", f"--dtype={dtype}", "--max_shard_size=20KB")
    assert len(list(tmp_path.glob("hf/model-*.safetensors"))) > 2
    same_weights(checkpoint.load(tmp_path / "hf"), checkpoint.load(run).to(getattr(torch, dtype)).float())


@pytest.mark.parametrize(("mode", "arch"), [*((mode, "llama") for mode in MODES), ("svformer", "gpt2")])
def test_every_mode_comes_back_bit_for_bit(data, tmp_path, mode, arch):
    kw = dict(n_kv_head=4) if MODES[mode].kv_group == 1 else {}
    model, tokenizer = tiny(mode, vocab_size=257, arch=arch, **kw).float(), Tokenizer.load(data / "tokenizer.json")
    path, folder = checkpoint.save(tmp_path, 3, model, tokenizer.hash, val_loss=1.5), tmp_path / "hf"
    export.write_folder(folder, path, model, tokenizer, export.ExportConfig())
    found = checkpoint.find(folder)
    header = checkpoint.read_header(found)
    assert header["config"].value_mode == model.cfg.value_mode
    assert (header["step"], header["val_loss"], header["tokenizer"]) == (3, 1.5, tokenizer.hash)
    same_weights(checkpoint.load(found), model)
    assert checkpoint.load_tokenizer(found).encode("abc <|endoftext|>") == tokenizer.encode("abc <|endoftext|>")


def test_grouped_heads_keep_their_name_and_bos_is_told(data, tmp_path):
    """gqa2 is a plain Llama for transformers, and gqa2 again for us. Step 1 was not evaluated: the card says so."""
    run = trained(data, tmp_path / "run", value_mode="gqa2", bos=True, save_every=1, keep=0)
    ran(export, run / "step_00000001.safetensors", f"--out_dir={tmp_path / 'hf'}")
    assert "LlamaForCausalLM" in (tmp_path / "hf" / "config.json").read_text()
    assert checkpoint.load(tmp_path / "hf").cfg.value_mode.name == "gqa2"
    assert checkpoint.trained_with_bos(tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "mean validation loss unknown" in card and "begin each prompt with it" in card


def test_exports_are_refused(runs, data, tmp_path):
    run, folder = runs["svformer"]
    out = f"--out_dir={tmp_path / 'hf'}"
    other = make_data(data / "other", tokenizer=byte_tokenizer("(?s:..?)"))
    for words, says in (
        ((tmp_path, out), "holds no checkpoint"),
        ((folder, out), "is a Hugging Face folder already"),
        ((run, f"--out_dir={folder}"), "exists; choose another --out_dir, or replace it"),
        ((run, f"--out_dir={run}", "--overwrite"), "exists and is no Hugging Face folder"),
        ((run, "--out_dir=."), "cannot be replaced as a whole; choose a new folder"),
        ((run, out, f"--data_dir={other}"), "was made with another tokenizer than"),
        ((run, out, "--max_shard_size=big"), "not a size such as 500MB"),
    ):
        refused(in_process(export, *words), says)
    refused(in_process(train, f"--data_dir={data}", f"--out_dir={folder}"), "not train.py's settings")
    huge, path = checkpoint.load(run), checkpoint.find(run)
    huge.norm.weight.data.fill_(1e5)
    shutil.copytree(run, tmp_path / "huge")
    path = checkpoint.save(tmp_path / "huge", 1, huge, checkpoint.read_header(path)["tokenizer"])
    refused(in_process(export, path, out, "--dtype=float16"), "has NaN or infinity in it as float16")
    assert not (tmp_path / "hf").exists()


def replaced(file, old, new):
    """export.write_code, but with a change in one of the files."""

    def write_code(folder, write=export.write_code):
        write(folder)
        source = (folder / file).read_text()
        assert old in source
        (folder / file).write_text(source.replace(old, new))

    return "write_code", write_code


def other_tokenizer(tokenizer, right=hf.tokenizer_json):
    other = {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}}
    return json.dumps(json.loads(right(tokenizer)) | other)


FAULTS = {
    "scale": replaced("layers.py", "to_fp32(x).unflatten(-1, (2", "to_fp32(3 * x).unflatten(-1, (2"),
    "nan": replaced("layers.py", "to_fp32(x).unflatten(-1, (2", "to_fp32(float('nan') * x).unflatten(-1, (2"),
    "lost cache": replaced("modeling_nanoresformer.py", "past = cache if", "past = None if True else cache if"),
    "token ids": ("tokenizer_json", other_tokenizer),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_is_another_model_is_not_kept(runs, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(export, *FAULTS[fault])
    result = in_process(export, runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}")
    refused(result, "makes another model of the folder")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_without_transformers_there_is_no_check(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = (runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}")
    refused(in_process(export, *words), "transformers cannot be imported")
    ran(export, *words, "--check=false")


def test_an_export_that_is_cut_off_leaves_what_was_there(runs, tmp_path, monkeypatch):
    words = (runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}", "--check=false")
    out = tmp_path / "hf"

    def there():
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir())

    def no_room(*args, **settings):
        raise SafetensorError("no space left on device")

    ran(export, *words)
    (out / "mine.txt").write_text("first")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.save_torch_state_dict", no_room)
        refused(in_process(export, *words, "--overwrite"), "cannot be written", "free some space")
    assert there() == ["hf"] and (out / "mine.txt").exists()
    out.rename(tmp_path / ".hf.old")  # what a kill -9 between the two renames leaves
    refused(in_process(export, *words), "exists")
    shutil.copytree(out, tmp_path / ".hf.old")  # what one leaves behind them
    ran(export, *words, "--overwrite")
    assert there() == ["hf"] and not (out / "mine.txt").exists()


# ---- folders of other people

LLAMA31 = (8.0, 1.0, 4.0, 8192.0)
SMALL = (8.0, 1.0, 4.0, 32.0)  # at theta 10000 and width 16: one pair is unchanged, one between, six slowed in full
SCALED = dict(zip(hf.SCALING, SMALL, strict=True), rope_type="llama3")
GROUPED = dict(num_attention_heads=4, num_key_value_heads=2)
LONG = dict(max_position_embeddings=128, rope_theta=10000.0, rope_scaling=SCALED)


def peer(kind, dtype=torch.float32, **settings):
    """A random model of transformers, with weights large enough that logits are about 1."""
    shape = dict(vocab_size=61, hidden_size=32, intermediate_size=112, num_hidden_layers=4, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, max_position_embeddings=32, rms_norm_eps=1e-5, initializer_range=0.15)
    torch.manual_seed(0)
    shape |= copy.deepcopy(settings)  # transformers adds to the dict of rope_scaling
    cfg = getattr(transformers, f"{kind}Config")(**shape, attn_implementation="eager")
    return getattr(transformers, f"{kind}ForCausalLM")(cfg).to(dtype).eval()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings", "length"),
    [
        ("Llama", LONG | GROUPED | dict(hidden_size=64), 128),
        ("Llama", dict(tie_word_embeddings=True, rope_theta=500000.0), 32),
        ("Mistral", GROUPED | dict(sliding_window=None), 32),
        ("Mistral", GROUPED | dict(sliding_window=12), 12),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, settings, length, shards):
    right, idx = peer(kind, **settings), tokens((2, length))
    right.save_pretrained(tmp_path, **(dict(max_shard_size="15KB") if shards else {}))
    model, logits = hf.load_hf(tmp_path), right(idx).logits
    assert logits.std() > 0.5 and model.cfg.block_size == length and not model.training
    close(model(idx)[0], logits)


def test_files_in_half_precision(tmp_path):
    peer("Llama", torch.bfloat16, **LONG).save_pretrained(tmp_path)
    model, half, idx = hf.load_hf(tmp_path), hf.load_hf(tmp_path, dtype=torch.bfloat16), tokens((2, 128))
    close(model(idx)[0], peer_of(tmp_path, dtype=torch.float32)(idx).logits)
    assert half.rope.cos.dtype == torch.float32 and half.head.weight.dtype == torch.bfloat16
    same_weights(model, half.float())


@pytest.mark.parametrize("head", [torch.clone, lambda embed: embed.flip(0)], ids=["equal", "another"])
def test_a_head_in_the_file_is_not_tied(tmp_path, head):
    """Old files repeat the embedding as the head. Where another head lies in the file, transformers 5 believes it."""
    peer("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors, idx = load_file(tmp_path / "model.safetensors"), tokens((1, 9))
    tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    close(hf.load_hf(tmp_path)(idx)[0], peer_of(tmp_path)(idx).logits)


def test_angles_are_those_of_transformers_bit_for_bit():
    """At far positions too: there one bit of a rate would be 1e-3 of an angle."""
    scaling = dict(zip(hf.SCALING, LLAMA31, strict=True), rope_type="llama3")
    right = peer("Llama", hidden_size=256, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=scaling)
    cos, sin = right.model.rotary_emb(torch.zeros(1), torch.arange(16384)[None])
    rope = Rope(128, 16384, 500000.0, LLAMA31)
    assert torch.equal(rope.cos, cos[0, :, :64]) and torch.equal(rope.sin, sin[0, :, :64])


@pytest.mark.parametrize(
    "shape", [dict(n_kv_head=2, norm_eps=1e-3, rope_theta=5e5), dict(head_dim=8, rope_scaling=SMALL)], ids=str
)
def test_to_llama_and_back(tmp_path, shape):
    model, idx = tiny(**shape).float(), tokens((2, 32))
    theirs = hf.to_llama(model, eot=7)
    close(theirs(idx).logits, model(idx)[0])
    theirs.save_pretrained(tmp_path)
    again = hf.load_hf(tmp_path)
    same_weights(again, model)
    assert again.cfg == dataclasses.replace(model.cfg, init_std=again.cfg.init_std)


@pytest.mark.parametrize(("mode", "shards"), [("resformer", False), ("svformer", True), ("share_k2", True)])
def test_the_authors_layout_beside_buffers_and_other_files(tmp_path, mode, shards):
    model = tiny(mode, n_kv_head=2).float()
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(4)}
    hf_folder(tmp_path, model, shards, buffers, value_mode=mode)
    save_file({"layers.0.wq": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    found = hf.load_hf(tmp_path)
    assert found.cfg == config(mode, n_kv_head=2)
    same_weights(found, model)


def refuses(folder, says):
    with pytest.raises(UserError) as e:
        hf.load_hf(folder)
    assert says in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / SHARDS[0]).unlink(), "is missing, but config.json makes it"),
        (lambda d: (d / SHARDS[0]).write_bytes((d / SHARDS[0]).read_bytes()[:-100]), f"{SHARDS[0]} is damaged"),
        (lambda d: [file.rename(file.with_suffix(".bin")) for file in d.glob("*.safe*")], "(.bin) is never loaded"),
        (lambda d: shutil.copy(d / SHARDS[0], d / "model-4.safetensors"), "in two files; remove the one"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, says):
    damage(hf_folder(tmp_path, tiny(n_kv_head=2).float(), shards=True))
    refuses(tmp_path, says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(vocab_size=60), "(61, 32), but config.json makes it (60, 32)"),
        (dict(value_mode="svformer"), "but config.json makes it missing"),
        (dict(value_mode="resformer_lerp"), "no names for the weights that resformer_lerp adds"),
        (dict(model_type="mamba"), "model_type='mamba'"),
        (dict(model_type="mistral"), "KeyError: 'sliding_window'"),
        (dict(head_dim=5), "config.json: heads are 5 wide"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(quantization_config={}), "quantization_config={}"),
        (dict(rope_scaling={"rope_type": "yarn"}), "rope_scaling of type 'yarn'"),
        (dict(rope_parameters={"factor": 4.0}), "rope_scaling of type None"),
        (dict(rope_scaling={"rope_type": "llama3"}), "KeyError: 'factor'"),
        (dict(max_position_embeddings="32"), "block_size takes int"),
        (dict(value_mode="svfomer"), "did you mean 'svformer'"),
    ],
    ids=str,
)
def test_configs_of_other_models_are_refused(tmp_path, fields, says):
    refuses(hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields), says)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        (dict(model_type=None, architecture="llama"), {}),
        (dict(num_key_value_heads=None, head_dim=None), dict(n_kv_head=8)),
        (dict(rope_scaling={"type": "default"}), {}),
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=1.0), dict(rope_theta=5e5)),
        (dict(rope_scaling=SCALED, rope_theta=500000), dict(rope_theta=5e5, rope_scaling=SMALL)),
        (dict(rope_parameters=SCALED | dict(rope_theta=5e5)), dict(rope_theta=5e5, rope_scaling=SMALL)),
        (dict(sliding_window=8), {}),  # transformers' Llama does not read it
        (dict(model_type="mistral", sliding_window=8), dict(block_size=8)),
    ],
    ids=str,
)
def test_fields_of_config(tmp_path, fields, changed):
    changed = {"n_kv_head": 2, **changed}
    hf_folder(tmp_path, tiny(n_kv_head=changed["n_kv_head"]).float(), **fields)
    assert hf.is_hf_folder(tmp_path) and hf.load_hf(tmp_path).cfg == config(**changed)


# ---- tokenizers

PIECES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003", "\u200b", "\u0085", "\x1c", "\x00", "\x7f", "\ufeff", "a"]
PIECES += ["Hello", "'s", "'LL", "don't", "1", "123", "٣", "½", "é", "e\u0301", "ﬁ", "ß", "İ", "漢字", "日本語"]
PIECES += ["한국어", "ไทย", "🙂", "👨\u200d👩\u200d👧", "\u0300", "\u202e", "__init__", "(self):", "==", "->", "//"]
PIECES += ["#include", "{}", "<|endoftext|>", "<|end", "\u2028", "\U0001d54f", "\ue000", "\uffff", "…", "“", "€"]
PIECES += ["a" * 50, " " * 30, "\n" * 12, "\t" * 5, "=" * 40]


def ours(folder, kind):
    """A tokenizer of ours: of a public vocabulary, or trained on difficult texts."""
    if kind == "neox":
        return Tokenizer(prepare.public_spec(kind, SHARED / "data/tokenizers/gpt-neox-20b.tokenizer.json"))
    if kind == "gpt2":
        return Tokenizer(prepare.public_spec(kind, gpt2_json(folder)))
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_bytes("\n".join(difficult()).encode("utf-8", "replace"))
    words = ("files", f"--input_dir={folder / 'texts'}", f"--out_dir={folder / 'data'}", "--tokenizer=bpe:700")
    ran(prepare, *words, "--workers=1")
    return Tokenizer.load(folder / "data/tokenizer.json")


def difficult(n=1000):
    rng = random.Random(0)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12))) for _ in range(n)]


@pytest.mark.parametrize("kind", [*(pytest.param(name, marks=needs_shared) for name in ("neox", "gpt2")), "bpe"])
def test_token_ids_are_ours_on_all_text(tmp_path, kind):
    tokenizer, texts = ours(tmp_path, kind), difficult()
    if SHARED.is_dir():
        texts.append((SHARED / "data/text/tinyshakespeare.txt").read_text())
    theirs = tokenizers.Tokenizer.from_str(hf.tokenizer_json(tokenizer))
    theirs.encode_special_tokens = True
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text[:200]
        assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids), text[:200]
    theirs.encode_special_tokens = False
    assert theirs.encode("a<|endoftext|>").ids[-1] == tokenizer.eot


def test_llamas_tokenizer_puts_a_token_before_each_text(tmp_path):
    """Texts are scored and continued after it, and keep the space that the decoder drops at the beginning."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "▁The": 3, "▁cat": 4}, "?"))
    made.add_special_tokens(["<s>", "</s>"])
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    both = [("<s>", 0), ("</s>", 1)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(dict(bos_token_id=0, eos_token_id=1)))
    tokenizer = hf.HFTokenizer(tmp_path)
    assert (tokenizer.prefix, tokenizer.encode("The cat"), tokenizer.hash) == ([0], [3, 4], None)
    assert tokenizer.encode("<s>", allow_eot=True) == [0] != tokenizer.encode("<s>")
    assert scoring.encode_pair(tokenizer, "The", " cat") == ([0, 3], [4])
    assert scoring.encode_pair(tokenizer, "", "The") == ([0], [3])
    assert tokenizer.decode([4]) == "cat" and tokenizer.decode([0, 3, 4]) == tokenizer.decode([0, 3]) + " cat"
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes()[:-100])
    with pytest.raises(UserError, match="tokenizer.json is damaged or not the tokenizer of a Hugging Face model"):
        hf.HFTokenizer(tmp_path)


def test_tokens_that_start_and_end_a_sequence(tmp_path):
    def start_and_end(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        both = ("bos_token_id", "eos_token_id")
        return hf.hf_token(tmp_path, *both), hf.hf_token(tmp_path, *both[::-1])

    assert start_and_end(bos_token_id=0, eos_token_id=2) == (0, 2)
    assert start_and_end(bos_token_id=None, eos_token_id=2) == (2, 2)
    assert start_and_end(eos_token_id=[128001, 128009]) == (128001, 128001)
    with pytest.raises(UserError, match="config.json has neither bos_token_id nor eos_token_id"):
        start_and_end()


# ---- our stages on a folder


@pytest.mark.parametrize("mode", ["vanilla", "svformer"])
def test_sample_and_analyze_make_the_same_of_a_folder_and_its_run(runs, data, mode):
    texts, entropy = [], []
    for name in runs[mode]:
        texts.append(ran(sample, name, "--prompt=abc", "--max_new_tokens=20").split("\n\n[")[0])
        ran(analyze, name, f"--data_dir={data}", "--chunks=2")
        entropy.append(json.loads((name / "analysis.json").read_text())["layers"]["entropy"]["mean"])
    assert texts[0] == texts[1] and "abc" in texts[0]
    assert entropy[0] == pytest.approx(entropy[1], abs=1e-5)


@pytest.mark.parametrize("mode", ["vanilla", "svformer"])
def test_eval_scores_a_folder_as_its_run(runs, data, tmp_path, mode):
    rows = [dict(goal=f"g{i}", sol1="ab", sol2="bcd", label=i % 2) for i in range(20)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = []
    for name in runs[mode]:
        ran(evaluate, name, "--task=piqa,loss", f"--data_dir={tmp_path}", f"--corpus={data}")
        (record,) = evaluate.read_results(name).values()
        scores.append((record["results"]["piqa"]["acc_norm"], record["results"]["loss"]["val_mean"]))
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_a_run_starts_from_a_run_or_a_folder(runs, data, tmp_path):
    """What fits is copied, and the rest is named."""
    run, folder = runs["vanilla"]
    start = checkpoint.load(run).state_dict()
    words = [f"--{key}={value}" for key, value in {**SHAPE, "data_dir": data, "learning_rate": 0}.items()]
    for source in (run, checkpoint.find(run), folder):
        out = tmp_path / source.name
        said = ran(train, *words, f"--init_from={source}", f"--out_dir={out}", "--value_mode=resformer_learned")
        assert "; new: mixing.0.scalars.0, mixing.0.scalars.1, mixing.0.scalars.2\n" in said
        found = checkpoint.load(out).state_dict()
        close({name: found[name] for name in start}, dict(start), atol=1e-6)
    words += [f"--init_from={folder}", f"--out_dir={tmp_path / 'new'}"]
    fewer = ran(train, *words, "--value_mode=svformer")  # q and k of a fused projection fit without v
    assert "; new: none" in fewer
    other = make_data(tmp_path / "other", tokenizer=byte_tokenizer(r"[\s\S]{1,2}"))
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"tokenizer_hash": None}))
    for word, says in (
        ("--n_embd=64", "another n_embd"),
        (f"--data_dir={other}", "another tokenizer"),
        (f"--init_from={theirs}", "another tokenizer"),
    ):
        refused(in_process(train, *words, f"--out_dir={tmp_path / 'none'}", word), says)
