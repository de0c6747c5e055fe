"""Hugging Face's layout: transformers' own logits, shards, bad files refused, and our model as a Llama of theirs."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MODES, ROOT, SHARED, change, config, needs_shared, tiny, tokens
from safetensors.torch import load_file, save_file

import hf
import sample
import tasks
from layers import Rope
from model import GPT
from oldconfig import UserError

LLAMA31 = (8.0, 1.0, 4.0, 8192.0)
SMALL = (8.0, 1.0, 4.0, 32.0)  # at theta 10000 and width 16: one pair is unchanged, one between, six slowed in full
SHARDS = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]


def scaled(scaling, **more):
    """A rope_scaling of config.json."""
    factor, low, high, original = scaling
    factors = dict(factor=factor, low_freq_factor=low, high_freq_factor=high)
    return factors | dict(original_max_position_embeddings=int(original), rope_type="llama3") | more


def hf_folder(folder, model, shards=False, extra=None, **changes):
    """Write our model as a Hugging Face folder, in one file or three; a change to None takes a field out."""
    folder.mkdir(exist_ok=True)
    c = {theirs: getattr(model.cfg, ours) for ours, theirs in hf.FIELDS.items()}
    c |= dict(model_type="llama", num_key_value_heads=model.cfg.n_kv_head) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in c.items() if v is not None}))
    parts = {name: p[rows].detach().clone() for name, p, rows in hf.hf_parts(model)} | (extra or {})
    files = SHARDS if shards else ["model.safetensors"]
    for i, file in enumerate(files):  # the parts of a product lie in different shards
        save_file({name: parts[name] for name in list(parts)[i :: len(files)]}, folder / file)
    return folder


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
    shape = dict(vocab_size=61, hidden_size=32, intermediate_size=112, num_hidden_layers=4, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, max_position_embeddings=32, rms_norm_eps=1e-5, initializer_range=0.15)
    torch.manual_seed(0)
    cfg = getattr(transformers, f"{kind}Config")(**shape | settings, attn_implementation="eager")
    return getattr(transformers, f"{kind}ForCausalLM")(cfg).to(dtype).eval()


LONG = dict(max_position_embeddings=128, rope_theta=10000.0, rope_scaling=scaled(SMALL))
GROUPED = dict(num_attention_heads=4, num_key_value_heads=2)
PEERS = (
    ("Llama", LONG | GROUPED | dict(hidden_size=64)),
    ("Llama", dict(tie_word_embeddings=True, rope_theta=500000.0)),
    ("Mistral", GROUPED | dict(sliding_window=None)),
    ("Mistral", GROUPED | dict(sliding_window=12)),
    ("Mistral", dict(sliding_window=4096, rope_theta=1000000.0)),
)


def test_logits_are_those_of_transformers(tmp_path):
    for i, (kind, settings) in enumerate(PEERS):
        right = peer(kind, **settings)
        length = min(settings.get("sliding_window") or 1000, settings.get("max_position_embeddings", 32))
        idx = tokens((2, length))
        with torch.no_grad():
            expected = right(idx).logits
        assert expected.std() > 0.5
        for shards in (False, True):
            folder = tmp_path / f"{i}{shards}"
            right.save_pretrained(folder, **(dict(max_shard_size="15KB") if shards else {}))
            assert (len(list(folder.glob("*.safetensors"))) >= 3) == shards
            for attn in ("eager", "sdpa"):
                model = hf.load_hf(folder)
                for block in model.blocks:
                    block.attn.kernel = attn
                assert model.cfg.block_size == length and not model.training
                torch.testing.assert_close(model(idx)[0].detach(), expected, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=f"block_size={length}"):
            model(tokens((1, length + 1)))


def test_half_precision_files(tmp_path):
    """Weights in half precision are computed with in fp32, as transformers does on demand; or stay in half."""
    peer("Llama", torch.bfloat16, **LONG).save_pretrained(tmp_path)
    right = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, half, idx = hf.load_hf(tmp_path), hf.load_hf(tmp_path, dtype=torch.bfloat16), tokens((2, 128))
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0], right(idx).logits, rtol=0, atol=1e-5)
        assert (half(idx)[0].float() - right(idx).logits).abs().mean() < 0.03
    for (name, p), q in zip(model.named_parameters(), half.parameters(), strict=True):
        assert q.dtype == torch.bfloat16 and torch.equal(p, q.float()), name
    assert half.rope.cos.dtype == torch.float32 and torch.equal(half.rope.cos, model.rope.cos)


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


def test_to_llama_and_back(tmp_path):
    """Logits of transformers, and the exported folder gives our weights bit for bit."""
    pytest.importorskip("transformers")
    idx = tokens((2, 32))
    wide = dict(head_dim=8, rope_scaling=SMALL)
    for mode, shape in (("vanilla", dict(n_kv_head=2, norm_eps=1e-3, rope_theta=5e5)), ("gqa2", {}), ("gqa4", wide)):
        model = tiny(mode, **shape).float()
        peer = hf.to_llama(model, eot=7)
        torch.testing.assert_close(peer(idx).logits, model(idx)[0], rtol=0, atol=1e-5)
        peer.save_pretrained(tmp_path / mode)
        again = hf.load_hf(tmp_path / mode)
        plain = dataclasses.replace(model.cfg, value_mode="vanilla", n_kv_head=model.cfg.n_kv_head)
        assert again.cfg == dataclasses.replace(plain, init_std=again.cfg.init_std)
        assert hf.hf_token(tmp_path / mode, "bos_token_id") == 7
        for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q), (mode, name)
    for other in (tiny("resformer"), tiny("svformer"), tiny(arch="gpt2")):
        with pytest.raises(UserError, match="is not plain Llama; give vanilla"):
            hf.to_llama(other)


# ---- names


def test_every_parameter_has_a_name_or_is_refused():
    for name in MODES:
        model = tiny(name)
        mode = model.cfg.value_mode
        has_more = any(r.learn != "fixed" or r.source == "token" for r in mode.residuals)
        has_more = has_more or mode.dense or mode.output != "plain"
        if has_more:
            with pytest.raises(UserError, match="no names for the weights that .* adds"):
                hf.hf_parts(model)
            continue
        parts = hf.hf_parts(model)
        assert len({part for part, _, _ in parts}) == len(parts), name
        assert sum(p[rows].numel() for _, p, rows in parts) == sum(p.numel() for p in model.parameters()), name
    with pytest.raises(UserError, match="such as positions.weight"):
        hf.hf_parts(tiny(arch="gpt2"))
    model = tiny()
    model.blocks[1].attn.out.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(UserError, match="such as blocks.1.attn.out.o.bias"):
        hf.hf_parts(model)


# ---- Llama 3.1's scaling


def test_tables_are_those_of_transformers():
    """Bit for bit, at far positions too: there one bit of a rate would be 1e-3 of an angle."""
    how = dict(max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=scaled(LLAMA31))
    right = peer("Llama", hidden_size=256, **how)
    cos, sin = right.model.rotary_emb(torch.zeros(1), torch.arange(16384)[None])
    rope = Rope(128, 16384, 500000.0, LLAMA31)
    assert torch.equal(rope.cos, cos[0, :, :64]) and torch.equal(rope.sin, sin[0, :, :64])


# ---- files


def test_whole_and_in_shards(tmp_path):
    """All weights come back, from one file or three, beside buffers and files of another layout."""
    idx = tokens((1, 9))
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(4)}
    for mode in ("vanilla", "resformer", "svformer", "share_k2"):
        model = tiny(mode, n_kv_head=2).float()
        for shards in (False, True):
            folder = hf_folder(tmp_path / f"{mode}{shards}", model, shards, buffers, value_mode=mode)
            save_file({"layers.0.wq": torch.ones(1)}, folder / "consolidated.safetensors")
            found = hf.load_hf(folder)
            assert found.cfg == config(mode, n_kv_head=2) and torch.equal(found(idx)[0], model(idx)[0]), mode
            for name, p in model.named_parameters():
                assert torch.equal(found.get_parameter(name), p), (mode, name)
    other = tiny(n_kv_head=2, seed=3).float()  # one file goes before shards that were left over
    assert torch.equal(hf.load_hf(hf_folder(tmp_path / "vanillaTrue", other))(idx)[0], other(idx)[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process's memory")
def test_peak_memory(tmp_path):
    """The model in the dtype asked for, and one shard: 59 and 20 MB, not twice that for fp32 or for all shards."""
    large = GPT(config(n_embd=1024, n_hidden=1024)).bfloat16()
    large, small = hf_folder(tmp_path / "large", large, shards=True), hf_folder(tmp_path / "small", tiny().float())
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, hf
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
hf.load_hf({str(small)!r})  # what torch imports on the way does not count
before = peak()
model = hf.load_hf({str(large)!r}, dtype=torch.bfloat16)
assert "transformers" not in sys.modules
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert 0.9 < float(result.stdout) < 1.5


# ---- bad input


def pickled(folder):
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))


def rewritten(path, change):
    """Change all tensors of a file."""
    save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)


def test_damaged_folders_are_refused(tmp_path):
    model, first = tiny(n_kv_head=2).float(), SHARDS[0]
    damages = [
        (lambda d: (d / first).unlink(), ["has no tensor", "is a shard missing"]),
        (lambda d: (d / first).write_bytes((d / first).read_bytes()[:-100]), [first, "is truncated"]),
        (pickled, ["no model.safetensors", "pickle (.bin) is never loaded"]),
        (lambda d: change(d / "config.json", vocab_size=60), ["(61, 32) has no place in the model"]),
        (lambda d: change(d / "config.json", value_mode="svformer"), ["v_proj.weight", "has no place in the model"]),
        (lambda d: change(d / "config.json", value_mode="resformer_lerp"), ["no names for the weights"]),
        (lambda d: (d / "config.json").unlink(), ["config.json is missing"]),
        (lambda d: rewritten(d / first, lambda t: t / 0), ["has NaN or infinity in it"]),
        (lambda d: rewritten(d / first, lambda t: t.int()), [first, "is of type I32; weights are floats"]),
        (lambda d: shutil.copy(d / first, d / "model-4.safetensors"), ["in two files; remove the file"]),
    ]
    for i, (damage, says) in enumerate(damages):
        folder = hf_folder(tmp_path / str(i), model, shards=True)
        damage(folder)
        refuses(folder, *says)


def test_configs_of_other_models_are_refused(tmp_path):
    for fields, says in (
        (dict(model_type="mamba"), "model_type='mamba'"),
        (dict(head_dim=5), "heads are 5 wide"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config="),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling of type 'yarn'"),
        (dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "rope_scaling of type 'longrope'"),
        (dict(rope_scaling={"factor": 4.0}), "rope_scaling of type None"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 4.0}), "has no 'low_freq_factor'"),
        (dict(rope_scaling=scaled(LLAMA31, low_freq_factor=4.0)), "low factor must be below"),
        (dict(max_position_embeddings="32"), "block_size takes int"),
        (dict(value_mode="svfomer"), "did you mean 'svformer'"),
    ):
        refuses(hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields), "config.json", says)


def test_fields_of_config(tmp_path):
    for fields, changed in (
        (dict(head_dim=4), {}),
        (dict(model_type=None, architecture="llama"), {}),
        (dict(rope_scaling={"type": "default"}), {}),
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=1.0), dict(rope_theta=5e5)),
        (dict(rope_scaling=scaled(LLAMA31), rope_theta=500000), dict(rope_theta=5e5, rope_scaling=LLAMA31)),
        (dict(rope_scaling=scaled(LLAMA31, rope_type="llama3", type="llama3")), dict(rope_scaling=LLAMA31)),
        (dict(rope_parameters=scaled(LLAMA31, rope_theta=5e5)), dict(rope_theta=5e5, rope_scaling=LLAMA31)),
        (dict(sliding_window=8), {}),  # transformers' Llama does not read it
        (dict(value_mode="neutreno_resformer"), dict(value_mode=MODES["resformer_neutreno"])),  # the authors' name
        (dict(model_type="mistral", sliding_window=8), dict(block_size=8)),
        (dict(model_type="mistral", max_position_embeddings=8192), dict(block_size=4096)),  # the default of the field
    ):
        folder = hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields)
        assert hf.is_hf_folder(folder) and hf.load_hf(folder).cfg == config(n_kv_head=2, **changed), fields
    nulls = dict(sliding_window=None, num_key_value_heads=None, head_dim=None, rope_scaling=None)
    hf_folder(tmp_path, tiny().float(), model_type="mistral", max_position_embeddings=8192)
    change(tmp_path / "config.json", **nulls)  # fields that are there, and null
    assert hf.load_hf(tmp_path).cfg == config(block_size=8192)


def test_fields_left_out_have_transformers_defaults(tmp_path):
    transformers = pytest.importorskip("transformers")
    for right in (transformers.LlamaConfig(), transformers.MistralConfig()):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": right.model_type}))
        found = hf.hf_config(tmp_path)
        for ours, theirs in (hf.FIELDS | {"n_kv_head": "num_key_value_heads"}).items():
            theirs = "sliding_window" if (right.model_type, ours) == ("mistral", "block_size") else theirs
            assert getattr(found, ours) == getattr(right, theirs), (right.model_type, ours)


# ---- tokenizer


@needs_shared
def test_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    hf_folder(tmp_path, tiny().float(), bos_token_id=0)
    change(tmp_path / "config.json", eos_token_id=2)
    path = tmp_path / "tokenizer.json"
    path.write_bytes((SHARED / "data" / "tokenizers" / "gpt-neox-20b.tokenizer.json").read_bytes())
    tokenizer = hf.HFTokenizer(tmp_path)
    assert tokenizer.encode("Hello world") == [12092, 1533] and tokenizer.decode([12092, 1533]) == "Hello world"
    assert tokenizer.encode("<|endoftext|>", allow_eot=True) == [0] == [tokenizer.eot] and tokenizer.end == 2
    assert len(tokenizer.encode("<|endoftext|>")) > 1 and tokenizer.hash is None
    path.write_bytes(path.read_bytes()[:-100])
    refuses(tmp_path, "tokenizer.json is not the tokenizer of a Hugging Face model", read=hf.HFTokenizer)
    path.unlink()
    refuses(tmp_path, "tokenizer.json", "No such file", read=hf.HFTokenizer)


def test_llamas_tokenizer_puts_a_token_before_each_text(tmp_path):
    """Texts are scored and continued after it, and keep the space that the decoder drops at the beginning."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "▁The": 3, "▁cat": 4}, "?"))
    made.add_special_tokens(["<s>", "</s>"])
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    both = [("<s>", 0), ("</s>", 1)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(dict(bos_token_id=0, eos_token_id=1)))
    tokenizer = hf.HFTokenizer(tmp_path)
    assert (tokenizer.prefix, tokenizer.encode("The cat")) == ([0], [3, 4])
    assert tasks.encode_pair(tokenizer, "The", " cat") == ([0, 3], [4])
    assert tasks.encode_pair(tokenizer, "", "The") == ([0], [3])
    (prompt,) = sample.encode_prompts(["The"], tokenizer, 9)
    assert prompt == [0, 3] and tokenizer.decode([4]) == "cat"
    assert sample.continued("The", prompt, [4], tokenizer) == "The cat"


def test_tokens_that_start_and_end_a_sequence(tmp_path):
    both = ("bos_token_id", "eos_token_id")
    for fields, first, last in (
        (dict(bos_token_id=0, eos_token_id=2), 0, 2),
        (dict(bos_token_id=None, eos_token_id=2), 2, 2),
        (dict(eos_token_id=[128001, 128009]), 128001, 128001),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert (hf.hf_token(tmp_path, *both), hf.hf_token(tmp_path, *both[::-1])) == (first, last), fields
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, "config.json", *both, read=lambda folder: hf.hf_token(folder, *both))
