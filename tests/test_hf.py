"""Hugging Face folders of Llama's and Mistral's type: transformers' own logits, shards, and bad files refused."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHARED, config, needs_shared, refused, script, tiny, tokens
from safetensors.torch import load_file, save_file
from test_checkpoint import altered

import checkpoint
import hf
from configurator import UserError
from model import GPT, Rope
from value_modes import ModelConfig

LLAMA31, LLAMA32 = (8.0, 1.0, 4.0, 8192.0), (32.0, 1.0, 4.0, 8192.0)
SMALL = (8.0, 1.0, 4.0, 32.0)  # at theta 10000 and width 16: one pair as it was, one between, six slowed in full
NAMES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=112, num_hidden_layers=4, num_attention_heads=8)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5)


def scaled(scaling, **more):
    """A rope_scaling of config.json."""
    *factors, original = scaling
    return dict(zip(NAMES, (*map(float, factors), int(original)), strict=True)) | {"rope_type": "llama3"} | more


def hf_folder(path, model, shards=0, dtype=torch.float32, extra=None, **changes):
    """Write our model as a Hugging Face folder, in one file or so many shards; a change to None takes a field out."""
    path.mkdir(exist_ok=True)
    c = dict(model_type="llama") | SHAPE | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in c.items() if v is not None}))
    parts = {name: p[rows].detach().to(dtype, copy=True) for name, p, rows in hf.hf_parts(model)}
    parts |= extra or {}
    if not shards:
        save_file(parts, path / "model.safetensors")
        return path
    where = {name: shard_name(i % shards, shards) for i, name in enumerate(parts)}  # a product's parts lie apart
    for file in set(where.values()):
        save_file({name: parts[name] for name in where if where[name] == file}, path / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in parts.values())}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def shard_name(i, shards):
    return f"model-{i + 1:05}-of-{shards:05}.safetensors"


def change(path, **fields):
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refuses(folder, *fragments, read=hf.load_hf):
    """Assert that a folder ends in one sentence that holds all fragments."""
    with pytest.raises(UserError) as e:
        read(folder)
    assert "\n" not in str(e.value)
    for fragment in fragments:
        assert fragment in str(e.value), (fragment, str(e.value))


# ---- transformers


def peer(kind, dtype=torch.float32, **settings):
    """A random model of transformers, with weights large enough that logits are about 1."""
    transformers = pytest.importorskip("transformers")
    settings = dict(SHAPE, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.15) | settings
    torch.manual_seed(0)
    cfg = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    return getattr(transformers, f"{kind}ForCausalLM")(cfg).to(dtype).eval()


def old_style(folder):
    """Rewrite config.json as before transformers 5: the theta at the top, the scaling in rope_scaling."""
    c = json.loads((folder / "config.json").read_text())
    rope = c.pop("rope_parameters")
    c["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    c |= {"rope_scaling": None if kind == "default" else rope | {"type": kind}}
    c["torch_dtype"] = c.pop("dtype")
    (folder / "config.json").write_text(json.dumps(c))


LONG = dict(max_position_embeddings=128, rope_theta=10000.0, rope_scaling=scaled(SMALL))
PEERS = {
    "llama": ("Llama", {}),
    "llama3, four times its original length": ("Llama", LONG),
    "llama3, grouped": ("Llama", LONG | dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=64)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True, rope_theta=500000.0)),
    "llama3 tied": ("Llama", LONG | dict(tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=None)),
    "mistral, windowed": ("Mistral", dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=12)),
    "mistral, wide window": ("Mistral", dict(sliding_window=4096, rope_theta=1000000.0)),
}


@pytest.mark.parametrize("old", [False, True], ids=["new config", "old config"])
@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("name", PEERS)
def test_logits_are_those_of_transformers(name, shards, old, tmp_path):
    kind, settings = PEERS[name]
    right = peer(kind, **settings)
    right.save_pretrained(tmp_path, **(dict(max_shard_size="15KB") if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) >= 3) == shards
    if old:
        old_style(tmp_path)
    length = min(settings.get("sliding_window") or 1000, settings.get("max_position_embeddings", 32))
    idx = tokens((2, length))
    for attn in ("eager", "sdpa"):
        model = hf.load_hf(tmp_path, attn=attn)
        assert model.cfg.block_size == length and not model.training
        with torch.no_grad():
            expected, found = right(idx).logits, model(idx)[0]
        assert expected.std() > 0.5
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=f"block_size={length}"):
        model(tokens((1, length + 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files(dtype, tmp_path):
    """Weights in half precision are computed with in fp32, as transformers does if told so; or stay as they are."""
    peer("Llama", dtype, **LONG).save_pretrained(tmp_path)
    right = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, idx = hf.load_hf(tmp_path, attn="eager"), tokens((2, 128))
    with torch.no_grad():
        expected = right(idx).logits
        torch.testing.assert_close(model(idx)[0], expected, rtol=0, atol=1e-5)
        half = hf.load_hf(tmp_path, dtype=dtype)
        found = half(idx)[0]
    for (name, p), q in zip(model.named_parameters(), half.parameters(), strict=True):
        assert q.dtype == dtype and torch.equal(p, q.float()), name
    assert half.rope.cos.dtype == torch.float32 and torch.equal(half.rope.cos, model.rope.cos)
    assert found.dtype == dtype and (found.float() - expected).abs().mean() < 0.03


@pytest.mark.parametrize(
    "scaling", [LLAMA31, LLAMA32, (4.0, 2.0, 2.5, 4096.0), (1.0, 1.0, 4.0, 8192.0), (8.0, 1.0, 64.0, 131072.0)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_rates_are_those_of_transformers(theta, head_dim, scaling):
    how = dict(max_position_embeddings=262144, rope_theta=theta, rope_scaling=scaled(scaling))
    right = peer("Llama", hidden_size=2 * head_dim, **how)
    rope = Rope(head_dim, 2, theta, scaling)
    rate = torch.atan2(rope.sin[1], rope.cos[1])  # the angle at position 1; none is above 1
    torch.testing.assert_close(rate, right.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_tables_are_those_of_transformers():
    """Bit for bit, at far positions too: there one bit of a rate would be 1e-3 of an angle."""
    how = dict(max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=scaled(LLAMA31))
    right = peer("Llama", hidden_size=256, **how)
    cos, sin = right.model.rotary_emb(torch.zeros(1), torch.arange(16384)[None])
    rope = Rope(128, 16384, 500000.0, LLAMA31)
    assert torch.equal(rope.cos, cos[0, :, :64]) and torch.equal(rope.sin, sin[0, :, :64])


def test_a_head_in_the_file_is_not_tied(tmp_path):
    """Old files repeat the embedding as the head. Where another head lies in the file, transformers 5 believes it."""
    peer("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors, idx = load_file(tmp_path / "model.safetensors"), tokens((1, 9))
    assert "lm_head.weight" not in tensors
    tied = hf.load_hf(tmp_path)(idx)[0]
    embed = tensors["model.embed_tokens.weight"]
    for head, same in ((embed.clone(), True), (embed.flip(0), False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        right = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path)
        with torch.no_grad():
            found = hf.load_hf(tmp_path)(idx)[0]
            torch.testing.assert_close(found, right(idx).logits, rtol=0, atol=1e-5)
        assert torch.equal(found, tied) == same


# ---- Llama 3.1's scaling


def llama31_rate(rate, factor, low, high, original):
    """Meta's rule for one frequency, in words of wavelengths."""
    wavelength = 2 * math.pi / rate
    if wavelength < original / high:
        return rate
    if wavelength > original / low:
        return rate / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * rate / factor + smooth * rate


@pytest.mark.parametrize("scaling", [LLAMA31, LLAMA32, (4.0, 2.0, 3.0, 4096.0)])
def test_scaling_formula(scaling):
    rope, kinds = Rope(128, 2, 500000.0, scaling), set()
    for i, rate in enumerate(torch.atan2(rope.sin[1], rope.cos[1]).tolist()):
        plain = 500000.0 ** (-2 * i / 128)
        right = llama31_rate(plain, *scaling)
        assert abs(rate / right - 1) < 2e-6, i
        kinds.add("as it was" if right == plain else "slowed" if right == plain / scaling[0] else "between")
    assert len(kinds) == 3


def test_no_scaling_is_plain_rope():
    plain = Rope(64, 100, 10000.0)
    for same in (Rope(64, 100, 10000.0, ()), Rope(64, 100, 10000.0, (1.0, 1.0, 4.0, 10.0))):
        torch.testing.assert_close(same.cos, plain.cos, rtol=0, atol=1e-5)
    assert (Rope(64, 100, 10000.0, SMALL).cos - plain.cos).abs().max() > 0.5


@pytest.mark.parametrize(
    "scaling,says",
    [
        ((8.0, 1.0, 4.0), "four positive numbers"),
        ((8.0, 1.0, 4.0, 8192.0, 1.0), "four positive numbers"),
        ((0.0, 1.0, 4.0, 8192.0), "four positive numbers"),
        ((8.0, 1.0, 4.0, -1.0), "four positive numbers"),
        ((8.0, 1.0, math.inf, 8192.0), "four positive numbers"),
        ((math.nan, 1.0, 4.0, 8192.0), "four positive numbers"),
        ((8.0, 4.0, 4.0, 8192.0), "low factor must be below"),
        ((8.0, "1", 4.0, 8192.0), "rope_scaling takes tuple of float"),
        (8.0, "rope_scaling takes tuple of float"),
    ],
)
def test_bad_scaling_is_refused(scaling, says):
    with pytest.raises(ValueError, match=says):
        config(rope_scaling=scaling)


def test_scaling_belongs_to_llama():
    with pytest.raises(ValueError, match="gpt2 learns its positions"):
        config(arch="gpt2", rope_scaling=SMALL)


def test_scaling_survives_our_checkpoints(tmp_path):
    cfg = config("resformer", rope_scaling=(8, 1, 4, 8))
    assert ModelConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg and cfg.rope_scaling == (8.0, 1, 4, 8)
    model, idx = tiny("resformer", rope_scaling=[8, 1, 4, 8], block_size=64).float(), tokens((1, 64))
    checkpoint.save(tmp_path, 1, model, "hash")
    again = checkpoint.load(tmp_path)
    assert again.cfg == model.cfg and torch.equal(again(idx)[0], model(idx)[0])
    plain = GPT(dataclasses.replace(model.cfg, rope_scaling=()), init=False)
    plain.load_state_dict(model.state_dict())
    assert (plain(idx)[0] - model(idx)[0]).abs().max() > 0.01


def test_headers_older_than_the_field(tmp_path):
    """A run from before it loads and goes on, unless the model to go on with has a scaling."""
    model = GPT(config())
    optimizer = torch.optim.AdamW(model.parameters())
    path = checkpoint.save(tmp_path, 1, model, "hash", optimizer=optimizer)
    old = model.cfg.to_dict()
    assert old.pop("rope_scaling") == ()
    altered(path, config=old)
    assert "rope_scaling" not in checkpoint.read_header(path)["config"]
    assert checkpoint.load(path).cfg == model.cfg
    checkpoint.resume(path, model, optimizer, None, "hash")
    other = GPT(config(rope_scaling=SMALL))
    with pytest.raises(UserError, match=r"rope_scaling \(\) instead of \(8.0, 1.0, 4.0, 32.0\)"):
        checkpoint.resume(path, other, optimizer, None, "hash")


# ---- files


@pytest.mark.parametrize("mode", ["vanilla", "svformer"])
@pytest.mark.parametrize("shards", [2, 7])
def test_shards_equal_one_file(mode, shards, tmp_path):
    model, idx = tiny(mode, n_kv_head=2).float(), tokens((1, 9))
    whole = hf.load_hf(hf_folder(tmp_path / "whole", model, value_mode=mode))
    parts = hf.load_hf(hf_folder(tmp_path / "parts", model, shards, value_mode=mode))
    assert parts.cfg == whole.cfg == config(mode, n_kv_head=2)
    assert torch.equal(parts(idx)[0], model(idx)[0]) and torch.equal(whole(idx)[0], model(idx)[0])
    for name, p in model.named_parameters():
        assert torch.equal(parts.get_parameter(name), p) and torch.equal(whole.get_parameter(name), p), name


def test_one_file_goes_before_an_index(tmp_path):
    """As in transformers: an index that a model.safetensors lies beside is left over."""
    model, other, idx = tiny(n_kv_head=2).float(), tiny(n_kv_head=2, seed=3).float(), tokens((1, 9))
    hf_folder(tmp_path, other, 3)
    assert torch.equal(hf.load_hf(hf_folder(tmp_path, model))(idx)[0], model(idx)[0])


@pytest.mark.parametrize("shards", [0, 3])
def test_rotary_buffers_are_ignored(shards, tmp_path):
    model, idx = tiny(n_kv_head=2).float(), tokens((1, 9))
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(4)}
    assert torch.equal(hf.load_hf(hf_folder(tmp_path, model, shards, extra=extra))(idx)[0], model(idx)[0])


def test_dtype(tmp_path):
    model = tiny(n_kv_head=2).float()
    hf_folder(tmp_path, model, 2, torch.float16)
    single, half = hf.load_hf(tmp_path), hf.load_hf(tmp_path, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        assert torch.equal(single.get_parameter(name), p.half().float())
        assert torch.equal(half.get_parameter(name), p.half().bfloat16())
    assert half.rope.cos.dtype == torch.float32 and torch.equal(half.rope.cos, model.rope.cos)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process's memory")
def test_peak_memory(tmp_path):
    """The model in the dtype asked for, and one shard: 118 and 17 MB, not twice that for fp32 or for all shards."""
    cfg = config(n_layer=8, n_head=8, n_embd=1024, n_hidden=1024, vocab_size=64)
    with torch.device("meta"):
        sizes = {name: p[rows].shape for name, p, rows in hf.hf_parts(GPT(cfg))}
    where = {name: f"{i // 8}.safetensors" for i, name in enumerate(sizes)}
    for file in set(where.values()):
        save_file({n: torch.zeros(sizes[n], dtype=torch.bfloat16) for n in where if where[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    about = dict(SHAPE, hidden_size=1024, num_hidden_layers=8, num_key_value_heads=8, intermediate_size=1024)
    (tmp_path / "config.json").write_text(json.dumps(about | dict(model_type="llama", vocab_size=64)))
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, hf
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
model = hf.load_hf({str(tmp_path)!r}, dtype=torch.bfloat16)
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert 0.9 < float(result.stdout) < 1.5


# ---- bad input


def drop(tensor):
    """Take a tensor out of the shard that has it; the index still names it."""

    def damage(folder):
        file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]
        save_file({k: v for k, v in load_file(file).items() if k != tensor}, file)

    return damage


def cut(folder, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def forget(folder, tensor):
    """Take a tensor out of the index and the shard."""
    drop(tensor)(folder)
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    del about["weight_map"][tensor]
    index.write_text(json.dumps(about))


def pickled(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x02}q\x00.")


INDEX, FIRST = "model.safetensors.index.json", shard_name(0, 3)
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "damage,says",
    [
        (lambda d: (d / FIRST).unlink(), [FIRST, "does not exist"]),
        (lambda d: cut(d, FIRST), [FIRST, "truncated or not a safetensors file"]),
        (lambda d: (d / FIRST).write_bytes(b"\x80\x02}q\x00."), [FIRST, "truncated or not a safetensors file"]),
        (lambda d: (d / INDEX).write_text("{"), [INDEX, "is not the index of a model's shards"]),
        (lambda d: (d / INDEX).write_text("[]"), [INDEX, "has no weight_map"]),
        (lambda d: (d / INDEX).write_text('{"weight_map": []}'), [INDEX, "has no weight_map"]),
        (lambda d: change(d / INDEX, weight_map={NORM: 1}), [INDEX, "has no weight_map"]),
        (lambda d: change(d / INDEX, weight_map={NORM: ""}), ["truncated or not a safetensors file"]),
        (drop("lm_head.weight"), [".safetensors has no tensor lm_head.weight, which the index says it has"]),
        (lambda d: forget(d, NORM), ["has no tensor model.norm.weight"]),
        (lambda d: change(d / INDEX, weight_map={}), ["has no tensor model.embed_tokens.weight"]),
        (lambda d: (d / INDEX).unlink(), ["model.safetensors does not exist"]),
        (pickled, ["pickle", "never loaded", "convert them to safetensors"]),
        (
            lambda d: change(d / "config.json", intermediate_size=96),
            [FIRST, "mlp.down_proj.weight is (32, 112)", "(32, 96)"],
        ),
        (lambda d: change(d / "config.json", vocab_size=60), ["(61, 32)", "(60, 32)"]),
        (lambda d: change(d / "config.json", num_hidden_layers=3), ["has no place for: model.layers.3."]),
        (lambda d: shutil.rmtree(d), ["config.json is missing"]),
    ],
)
def test_damaged_folders_are_refused(damage, says, tmp_path):
    hf_folder(tmp_path / "llama", tiny(n_kv_head=2).float(), 3)
    damage(tmp_path / "llama")
    refuses(tmp_path / "llama", *says)


def test_damaged_single_file_is_refused(tmp_path):
    model = tiny(n_kv_head=2).float()
    hf_folder(tmp_path, model)
    cut(tmp_path, "model.safetensors")
    refuses(tmp_path, "model.safetensors is truncated")
    hf_folder(tmp_path, model, extra={"score.weight": torch.ones(1)})
    refuses(tmp_path, "model.safetensors has tensors", "score.weight")
    hf_folder(tmp_path, tiny("svformer", n_kv_head=2).float(), tie_word_embeddings=True)
    refuses(tmp_path, "has no tensor model.layers.1.self_attn.v_proj.weight")
    (tmp_path / "model.safetensors").unlink()
    refuses(tmp_path, "model.safetensors does not exist")


@pytest.mark.parametrize(
    "fields,says",
    [
        (dict(model_type="mamba"), "model_type='mamba'"),
        (dict(model_type="qwen2"), "model_type='qwen2'"),
        (dict(model_type=None), "model_type=None"),
        (dict(head_dim=8), "head_dim=8 is not supported"),
        (dict(model_type="mistral", head_dim=5), "head_dim=5 is not supported"),
        (dict(head_dim="4"), "head_dim='4'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config="),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling of type 'yarn'"),
        (dict(rope_scaling={"type": "linear", "factor": 4.0}), "rope_scaling of type 'linear'"),
        (dict(rope_scaling={"type": "dynamic", "factor": 4.0}), "rope_scaling of type 'dynamic'"),
        (dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "rope_parameters of type 'longrope'"),
        (dict(rope_scaling={"factor": 4.0}), "rope_scaling of type None"),
        (dict(rope_scaling=[8.0, 1.0, 4.0, 8192]), "rope_scaling=[8.0"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 4.0}), "has no 'low_freq_factor'"),
        (dict(rope_scaling=scaled(LLAMA31, factor="8")), "rope_scaling takes tuple of float"),
        (dict(rope_scaling=scaled(LLAMA31, low_freq_factor=4.0)), "low factor must be below"),
        (dict(rope_scaling=scaled(LLAMA31, factor=0)), "four positive numbers"),
        (dict(rope_theta="1e4"), "rope_theta takes float"),
        (dict(model_type="mistral", sliding_window=0), "block_size=0"),
        (dict(model_type="mistral", sliding_window="8"), "config.json: "),
        (dict(hidden_size=None), "has no 'hidden_size'"),
        (dict(max_position_embeddings="32"), "block_size takes int"),
    ],
)
def test_what_we_do_not_have_is_refused(fields, says, tmp_path):
    refuses(hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields), "config.json", says)


@pytest.mark.skipif(not (ROOT / "analyze.py").exists(), reason="the script that takes such folders")
def test_a_script_refuses_in_one_line(tmp_path, data_dir):
    tokenizers = pytest.importorskip("tokenizers")
    hf_folder(tmp_path, tiny(n_kv_head=2).float(), 3, bos_token_id=1)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / FIRST).unlink()
    refused(script("analyze.py", tmp_path, f"--data_dir={data_dir}", "--device=cpu"), FIRST, "does not exist")


@pytest.mark.parametrize("text,says", [("{", "config.json is not the config"), ("[]", "config.json is not the config")])
@pytest.mark.parametrize("read", [hf.load_hf, hf.hf_first_token])
def test_config_that_is_none(read, text, says, tmp_path):
    (tmp_path / "config.json").write_text(text)
    refuses(tmp_path, says, read=read)


@pytest.mark.parametrize(
    "fields,cfg",
    [
        (dict(head_dim=4), {}),
        (dict(rope_scaling={"type": "default"}), {}),
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=1.0), dict(rope_theta=5e5)),
        (dict(rope_parameters={"rope_theta": 5e5}), dict(rope_theta=5e5)),
        (dict(rope_theta=500000), dict(rope_theta=5e5)),
        (dict(rope_scaling=scaled(LLAMA31), rope_theta=5e5), dict(rope_theta=5e5, rope_scaling=LLAMA31)),
        (dict(rope_scaling=dict(zip(NAMES, LLAMA31, strict=True), type="llama3")), dict(rope_scaling=LLAMA31)),
        (dict(rope_parameters=scaled(LLAMA32, rope_theta=5e5)), dict(rope_theta=5e5, rope_scaling=LLAMA32)),
        (dict(sliding_window=8), {}),  # transformers' Llama does not read it
        (dict(model_type="mistral", sliding_window=8), dict(block_size=8)),
        (dict(model_type="mistral", sliding_window=4096), {}),
        (dict(model_type="mistral", max_position_embeddings=8192), dict(block_size=4096)),  # the default of the field
    ],
)
def test_fields_of_config(fields, cfg, tmp_path):
    hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields)
    assert hf.load_hf(tmp_path).cfg == config(**dict(n_kv_head=2) | cfg)


def test_null_is_no_window_and_no_groups(tmp_path):
    """Fields that are there, and null: Mistral 0.2's window, and the one head of keys for each of queries."""
    nulls = dict(sliding_window=None, num_key_value_heads=None, head_dim=None, rope_scaling=None)
    hf_folder(tmp_path, tiny().float(), model_type="mistral", max_position_embeddings=8192)
    change(tmp_path / "config.json", **nulls)
    assert hf.load_hf(tmp_path).cfg == config(block_size=8192)


# ---- tokenizer


def test_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"])
    made.train_from_iterator(["value residual learning, values and residuals"] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = hf.hf_tokenizer(tmp_path), "the values' residual: é"
    ids = tokenizer.encode(text).ids
    assert ids == made.encode(text).ids and tokenizer.decode(ids).strip() == text
    assert tokenizer.token_to_id("<s>") == 0 and tokenizer.get_vocab_size() == made.get_vocab_size()
    refused_as_tokenizer = "tokenizer.json is not the tokenizer of a Hugging Face model"
    for damaged in ((tmp_path / "tokenizer.json").read_text()[:-100], "{}", "[]", "", "\x80"):
        (tmp_path / "tokenizer.json").write_text(damaged)
        refuses(tmp_path, refused_as_tokenizer, read=hf.hf_tokenizer)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    refuses(tmp_path, refused_as_tokenizer, read=hf.hf_tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    refuses(tmp_path, "tokenizer.json is missing", read=hf.hf_tokenizer)


@needs_shared
def test_a_real_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    shutil.copy(SHARED / "data" / "tokenizers" / "gpt-neox-20b.tokenizer.json", tmp_path / "tokenizer.json")
    tokenizer = hf.hf_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world").ids == [12092, 1533] and tokenizer.token_to_id("<|endoftext|>") == 0


def test_tokenizers_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses(tmp_path, "tokenizer.json needs the tokenizers package", "pip install tokenizers", read=hf.hf_tokenizer)


@pytest.mark.parametrize(
    "fields,first",
    [
        (dict(bos_token_id=1, eos_token_id=2), 1),
        (dict(bos_token_id=0, eos_token_id=2), 0),
        (dict(bos_token_id=128000, eos_token_id=[128001, 128009]), 128000),
        (dict(bos_token_id=None, eos_token_id=2), 2),
        (dict(eos_token_id=[128001, 128009]), 128001),
    ],
)
def test_first_token(fields, first, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert hf.hf_first_token(tmp_path) == first


@pytest.mark.parametrize(
    "fields", [{}, dict(bos_token_id=None, eos_token_id=[]), dict(bos_token_id="<s>"), dict(bos_token_id=True)]
)
def test_no_first_token(fields, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    refuses(tmp_path, "config.json", "bos_token_id", "eos_token_id", read=hf.hf_first_token)
