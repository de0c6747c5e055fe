"""Hugging Face: our modes inside transformers, folders that we write and read, tokenizers, and our stages on them."""

import dataclasses
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import COMPILED, MODES, SHARED, config, hf_folder, in_process, needs_shared, refused, tiny, tokens
from safetensors.torch import load_file, save_file
from test_data import hostile, reference
from test_eval import write_rows

import analyze
import eval as evaluate
import export
import prepare
import sample
import train
from common import checkpoint, files, scoring
from common.data import Corpus
from common.runs import ANALYSIS, read_run
from common.tokenizer import HFTokenizer, Tokenizer, read_vocabulary
from configurator import UserError, load_settings
from model import GPT
from value_modes import Residual, ValueMode, kv_floats_per_token

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from transformers.models.auto import modeling_auto  # noqa: E402

from hf import layout  # noqa: E402
from hf.modeling_nanoresformer import NanoResFormerConfig, NanoResFormerForCausalLM  # noqa: E402

SHAPE = dict(n_layer=4, n_head=4, n_embd=32, block_size=96, batch_tokens=192, micro_batch=2, warmup_steps=1)
SHAPE |= dict(max_steps=2, eval_every=2, eval_tokens=192, dtype="float32", learning_rate=1e-2)


def ran(module, *words):
    result = in_process(module, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def trained(data, out, **settings):
    return in_process(train, *(f"--{k}={v}" for k, v in (SHAPE | dict(data_dir=data, out_dir=out) | settings).items()))


def wrapped(model, **ids):
    """A model of ours inside the class that goes with the export."""
    peer = NanoResFormerForCausalLM(NanoResFormerConfig(shape=dataclasses.asdict(model.cfg), **ids)).eval()
    peer.model.load_state_dict(model.state_dict())
    return peer


@pytest.fixture
def peer():
    return wrapped(tiny("svformer").float())


def close(found, right, atol=1e-5):
    torch.testing.assert_close(found, right, rtol=0, atol=atol)


def same_weights(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())


# ---- the class for transformers

IDX = tokens((2, 8))


@pytest.mark.parametrize(("mode", "arch"), [*((mode, "llama") for mode in COMPILED), ("svformer", "gpt2")])
def test_it_decodes_with_transformers_cache_and_with_padding(mode, arch):
    model = tiny(mode, arch=arch).float()
    peer = wrapped(model)
    with torch.inference_mode():
        close(peer(IDX).logits, model(IDX)[0])
        how = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        made = peer.generate(IDX, attention_mask=torch.ones_like(IDX), return_dict_in_generate=True, **how)
        assert torch.equal(made.sequences[:, 8:], model(made.sequences)[0][:, 7:-1].argmax(-1))
        layers = [layer for layer in made.past_key_values.layers if layer.is_initialized]
        assert sum(x.keys.nbytes + x.values.nbytes for x in layers) == 2 * 23 * 4 * kv_floats_per_token(model.cfg)
        padded = torch.cat([tokens((1, 3), seed=1), IDX[:1, :5]], dim=1)  # 3 tokens of padding, whatever they are
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        close(peer(padded, mask).logits[:, 3:], model(IDX[:1, :5])[0])
        alone = peer.generate(IDX[:1, :5], attention_mask=mask[:, 3:], **how)
        assert torch.equal(peer.generate(padded, attention_mask=mask, **how)[:, 3:], alone)


@pytest.mark.parametrize("mode", ["svformer", "everything"])
def test_beams_and_loss_and_recomputing(mode):
    model = tiny(mode).float()
    peer = wrapped(model)
    how = dict(attention_mask=torch.ones_like(IDX), max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0)
    assert torch.equal(peer.generate(IDX, **how), peer.generate(IDX, use_cache=False, **how))
    close(peer(IDX, labels=IDX).loss, model(IDX[:, :-1], IDX[:, 1:])[1])
    peer.gradient_checkpointing_enable()
    peer.train()(IDX, labels=IDX, use_cache=True).loss.backward()
    assert peer.model.recompute and all(p.grad.any() for p in peer.parameters())


def test_what_other_code_asks_for():
    model = tiny("svformer", n_kv_head=2).float()
    peer, widths = wrapped(model), []
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    assert [getattr(peer.config, name) for name in names] == [4, 8, 2, 32, 61]
    assert peer.get_input_embeddings() is peer.model.embed and peer.get_output_embeddings() is peer.model.head
    # adapters look for linear layers, and Trainer for the class by its name before it shifts and smooths labels
    assert sum(type(module) is torch.nn.Linear for module in peer.modules()) == 4 * 4 + 1
    assert type(peer).__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    # trl calls the base model, and computes the loss by itself
    base = peer.base_model(input_ids=IDX, attention_mask=torch.ones_like(IDX), use_cache=False)
    close(peer.get_output_embeddings()(base.last_hidden_state), model(IDX)[0])
    assert base.get("past_key_values") is None
    peer.get_output_embeddings().register_forward_hook(lambda head, args, logits: widths.append(logits.size(1)))
    peer.generate(IDX, max_new_tokens=2, do_sample=False, use_cache=True)
    assert widths == [1, 1]  # no logits of the prompt


CAUSAL = torch.ones(2, 1, 8, 8).tril()
SAME = {  # what changes nothing
    "names of trainers": dict(num_items_in_batch=3, output_attentions=False, shift_labels=None, return_dict=True),
    "last positions": dict(position_ids=torch.arange(24, 32)[None], cu_seq_lens_q=torch.tensor([0, 8])),
    "float mask": dict(attention_mask=torch.ones(2, 8)),
    "4-D mask": dict(attention_mask=CAUSAL.long()),
    "added 4-D mask": dict(attention_mask=(1 - CAUSAL) * torch.finfo().min),
}


@pytest.mark.parametrize("words", SAME.values(), ids=SAME)
def test_keywords_that_change_nothing(words, peer):
    close(peer(IDX, **words).logits, peer(IDX).logits)


def test_keywords_and_settings_that_pick(peer):
    close(peer(IDX, logits_to_keep=torch.tensor([2, 5])).logits, peer(IDX).logits[:, [2, 5]])
    peer.set_attn_implementation("eager")
    peer.config.use_cache, peer.config.return_dict = False, False
    assert len(peer(IDX)) == 1  # logits alone, in a tuple
    assert {block.attn.kernel for block in peer.model.blocks} == {"eager"}


REFUSED = {  # what another model would do, and ours would leave undone in silence
    "output_attentions": True, "attention_masks": CAUSAL, "is_causal": False, "cu_seq_lens_q": torch.tensor([0, 3]),
    "past_key_values": transformers.StaticCache(transformers.LlamaConfig(), max_cache_len=8),
    "inputs_embeds": torch.zeros(2, 8, 32), "attention_mask": torch.ones(2, 5),
    "position_ids": torch.arange(25, 33)[None],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_keywords_without_effect_are_refused(name, peer):
    with pytest.raises(ValueError, match=f"{name}|StaticCache"):
        peer(IDX, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_two_names(name, peer):
    cache = transformers.DynamicCache()
    parts = [peer(part, **{name: cache}).logits for part in IDX.split(5, dim=1)]
    close(torch.cat(parts, dim=1), peer(IDX).logits)


def test_training_has_a_cache_only_if_asked(peer):
    past = peer.train()(IDX[:, :5], use_cache=True).past_key_values
    close(peer(IDX[:, 5:], past_key_values=past).logits, peer(IDX).logits[:, 5:])
    assert peer(IDX).past_key_values is None


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_mask_of_any_numbers(kernel, peer):
    """As packers give it: 1 and 2 for two documents, 0 for padding, which makes no NaN."""
    peer.set_attn_implementation(kernel)
    mask = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]])
    close(peer(IDX[:1], mask).logits, peer(IDX[:1], mask.clamp(max=1)).logits)


def test_hidden_states_of_several_threads_do_not_mix(peer):
    ids = [tokens((1, 8), seed=seed) for seed in range(4)]
    right = [peer(idx, output_hidden_states=True).hidden_states for idx in ids]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda idx: peer(idx, output_hidden_states=True).hidden_states, ids * 8))
    assert all(all(map(torch.equal, states, right[i % 4])) and len(states) == 5 for i, states in enumerate(found))


def test_hidden_states_are_what_layers_read_and_the_head_reads():
    peer, read = wrapped(tiny("denseformer").float()), []
    for norm in (*(block.norm1 for block in peer.model.blocks), peer.model.norm):
        norm.register_forward_hook(lambda norm, args, out: read.append((args[0], out)))
    states = peer(IDX, output_hidden_states=True).hidden_states
    assert all(map(torch.equal, states, [*(x for x, _ in read[:4]), read[4][1]])) and len(states) == 5
    assert peer(IDX).hidden_states is None


def test_embeddings_in_place_of_ids(peer):
    x = peer.model.embed(IDX)
    close(peer(inputs_embeds=x).logits, peer(IDX).logits)
    how = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(IDX))
    assert torch.equal(peer.generate(inputs_embeds=x, **how), peer.generate(IDX, **how)[:, 8:])
    with pytest.raises(ValueError, match="needs input_ids"):
        wrapped(tiny("value_embed").float())(inputs_embeds=x)


def test_packed_documents_do_not_see_each_other():
    peer = wrapped(tiny("everything").float())
    packed = peer(IDX, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])).logits
    close(packed, torch.cat([peer(part).logits for part in IDX.split([3, 5], dim=1)], dim=1))


def test_new_tokens(tmp_path):
    peer, idx = wrapped(tiny("value_embed").float()), IDX.clone()
    right = peer(idx).logits
    peer.resize_token_embeddings(64)
    close(peer(idx).logits[..., :61], right)
    peer.save_pretrained(tmp_path)
    idx[0, 0] = 63
    close(checkpoint.load(tmp_path)(idx)[0], peer(idx).logits)
    # its config.json still names the old tokenizer
    with pytest.raises(UserError, match="differs from this one in vocab_size"):
        checkpoint.start_from(checkpoint.find(tmp_path), tiny("value_embed").float(), None)


def test_as_much_is_generated_as_the_block_holds(peer):
    how = dict(max_new_tokens=25, eos_token_id=None, tokenizer=SimpleNamespace())  # which it leaves among the keywords
    assert peer.generate(IDX, **how).size(1) == 33  # no position for the last


@pytest.mark.parametrize(("how", "says"), [
    ({"max_new_tokens": 26}, "could reach 34, but the model's block is 32 tokens"),
    ({"max_new_tokens": 23, "prompt_lookup_num_tokens": 4}, "could reach 35"),  # candidates need positions
    ({"assistant_early_exit": 2}, "has no early exit"),
])  # fmt: skip
def test_what_generate_refuses_leaves_the_model_as_it_was(how, says, peer):
    right = peer(IDX).logits
    began = peer.model.register_forward_hook(lambda *call: pytest.fail("it began"))
    with pytest.raises(ValueError, match=says):
        peer.generate(IDX[:1], **how)
    began.remove()
    assert peer.config.num_hidden_layers == 4
    close(peer(IDX).logits, right)


def test_a_graph_of_any_length_with_padding(peer):
    idx, mask, dims = tokens((3, 20)), torch.ones(3, 20), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    peer.config.use_cache = False
    words = dict(input_ids=IDX, attention_mask=torch.ones(2, 8))
    graph = torch.export.export(peer, (), words, dynamic_shapes=dict.fromkeys(words, dims))
    mask[0, :7] = 0
    close(graph.module()(input_ids=idx, attention_mask=mask).logits, peer(idx, mask).logits)


def test_a_graph_of_any_length_without_a_mask(peer):
    """As torch.compile traces it, which is stricter."""
    peer.config.use_cache = False
    shapes = {"input_ids": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}
    graph = torch.export.export(peer, (), {"input_ids": IDX}, dynamic_shapes=shapes, strict=True).module()
    for shape in ((3, 5), (1, 20)):
        close(graph(input_ids=tokens(shape)).logits, peer(tokens(shape)).logits)


OWN_CODE = [mode for mode in MODES if not layout.is_plain_llama(config(mode))]


@pytest.mark.filterwarnings("ignore")  # torch warns that its next releases leave this to torchao
@pytest.mark.parametrize("mode,arch", [*((mode, "llama") for mode in OWN_CODE), ("vanilla", "gpt2")])
def test_int8_weights(mode, arch):
    peer = wrapped(tiny(mode, arch=arch, std=0.05).float())
    small, right = torch.ao.quantization.quantize_dynamic(peer, {torch.nn.Linear}), peer(IDX).logits
    assert not any(isinstance(module, torch.nn.Linear) for module in small.modules())
    assert (small(IDX).logits - right).norm() < 0.1 * right.norm()
    assert small.generate(IDX, max_new_tokens=4, eos_token_id=None).shape == (2, 12)


# ---- folders that we write


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """{mode: (its run, its export)} of a plain Llama, and of a model that brings its code."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for mode in ("vanilla", "svformer"):
        run, out = folder / mode, folder / f"hf_{mode}"
        trained(data_dir, run, value_mode=mode)
        assert " 0 of " in ran(export, run, f"--out_dir={out}")
        found[mode] = run, out
    return found


@pytest.mark.parametrize("mode", ["vanilla", "svformer"])
def test_what_transformers_makes_of_it(runs, mode):
    folder, how, is_llama = str(runs[mode][1]), {"trust_remote_code": True}, mode == "vanilla"
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    # a model that is not a Llama cannot be loaded as one
    assert isinstance(peer, transformers.LlamaForCausalLM) == is_llama == (peer.config.model_type == "llama")
    assert hasattr(peer.config, "auto_map") != is_llama
    assert peer.generation_config.max_length in ((None, 20) if is_llama else (96,))  # 20 is transformers 4's
    generate = transformers.pipeline("text-generation", folder, **how)
    words = dict(max_new_tokens=8, do_sample=False)
    text = generate("abcabc", **words)[0]["generated_text"]
    both = generate(["abcabc", "abcdefghij"], batch_size=2, **words)
    assert text.startswith("abcabc") and both[0][0]["generated_text"] == text
    features = transformers.pipeline("feature-extraction", folder, **how)("abc")
    assert len(features[0]) == 3 and len(features[0][0]) == 32


def test_a_longer_block(runs):
    how = dict(trust_remote_code=True, max_position_embeddings=200)
    peer = transformers.AutoModelForCausalLM.from_pretrained(runs["svformer"][1], **how)
    assert peer(tokens((1, 200))).logits.size(1) == peer.config.shape["block_size"] == 200


def test_its_code_needs_none_of_our_files(runs, tmp_path, monkeypatch):
    """Elsewhere `from model import GPT` would find nothing, so here it must not find ours."""
    rooms = ("", "common", "hf", "net", "tests")  # but not .venv, which is in there too
    ours = [export.HERE / room for room in rooms]
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent in ours:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder) not in ours])
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(runs["svformer"][1], tmp_path / "elsewhere")  # under another name it is loaded again
    transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not {"model", "value_modes", "common", "net"} & sys.modules.keys()
    # early releases of version 5 take along what the wrapper itself imports
    source = (folder / "modeling_nanoresformer.py").read_text()
    assert all(f"from .{Path(file).stem} import" in source for file in export.CODE[:-1])


def test_weights_in_half_precision(runs, tmp_path):
    run, _ = runs["svformer"]
    ran(export, run, f"--out_dir={tmp_path / 'hf'}", "--dtype=bfloat16")
    same_weights(checkpoint.load(tmp_path / "hf"), checkpoint.load(run).bfloat16().float())
    refused(in_process(export, run, f"--out_dir={tmp_path / 'hf'}"), "exists; remove it, or choose another --out_dir")


@pytest.mark.parametrize(("mode", "arch"), [*((mode, "llama") for mode in (*COMPILED, "gqa2")), ("svformer", "gpt2")])
def test_a_mode_comes_back_bit_for_bit(data_dir, tmp_path, mode, arch):
    """Under the name of its mode. gqa2, too, which transformers takes for a plain Llama."""
    kw = dict(rope_theta=5e5, head_dim=8) if arch == "llama" else {}
    model = tiny(mode, vocab_size=257, arch=arch, norm_eps=1e-3, **kw).float()
    tokenizer, folder = Tokenizer.load(data_dir / "tokenizer.json"), tmp_path / "hf"
    path = checkpoint.save(tmp_path, 3, model, tokenizer.hash, val_loss=1.5)
    files.write_record(tmp_path / "config.json", checkpoint.RUN, {"bos": True})
    export.write_folder(folder, path, model, tokenizer, "float32")
    found = checkpoint.find(folder)
    header = checkpoint.read_header(found)
    assert header["config"] == dataclasses.replace(model.cfg, init_std=header["config"].init_std)
    assert header["mode"] == model.cfg.value_mode.name and checkpoint.trained_with_bos(folder)
    assert (header["step"], header["val_loss"], header["tokenizer"]) == (3, 1.5, tokenizer.hash)
    same_weights(checkpoint.load(found), model)
    read = checkpoint.load_tokenizer(found)
    assert read.encode("abc <|endoftext|>") == tokenizer.encode("abc <|endoftext|>") and read.prefix == [
        tokenizer.start
    ]
    # version 4 of transformers reads rope_theta there, and knows the tokenizer's class by this name
    assert "PreTrainedTokenizerFast" in (folder / "tokenizer_config.json").read_text()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    is_llama, about = layout.is_plain_llama(model.cfg), json.loads((folder / "config.json").read_text())
    assert about.get("rope_theta") == (5e5 if is_llama else None)
    assert ("trust_remote_code" in (folder / "README.md").read_text()) != is_llama


FAULTS = {  # a file of the folder, what stands there, and what is wrong
    "scale": ("layers.py", "to_fp32(x).unflatten(-1, (2", "to_fp32(3 * x).unflatten(-1, (2"),
    "lost cache": ("modeling_nanoresformer.py", "self.cfg, cache,", "self.cfg, DynamicCache(),"),
    "token ids": ("tokenizer.json", '"normalizer": null', '"normalizer": {"type": "Lowercase"}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_is_another_model_is_not_kept(runs, tmp_path, monkeypatch, fault):
    file, right, wrong = FAULTS[fault]

    def write_folder(folder, *about, write=export.write_folder):
        write(folder, *about)
        source = (folder / file).read_text()
        assert right in source
        (folder / file).write_text(source.replace(right, wrong))

    monkeypatch.setattr(export, "write_folder", write_folder)
    result = in_process(export, runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}")
    refused(result, "loads a different model from the folder")
    assert not [*tmp_path.iterdir()]


# ---- folders of other people

SMALL = (8.0, 1.0, 4.0, 32.0)  # at theta 10000 and width 16: one pair is unchanged, one between, six slowed in full
SCALED = dict(zip(layout.SCALING, SMALL, strict=True), rope_type="llama3")


def other_model(kind, **fields):
    """A model of transformers with random weights, so wide that its logits are not all alike."""
    torch.manual_seed(0)
    shape = dict(vocab_size=61, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(max_position_embeddings=32, initializer_range=0.15) | fields
    config_class, model_class = (getattr(transformers, f"{kind}{of}") for of in ("Config", "ForCausalLM"))
    return model_class(config_class(**shape)).eval()


def test_an_export_of_our_own_class_keeps_scaled_angles():
    model = tiny("vanilla", rope_scaling=SMALL)  # which otherwise becomes a Llama
    peer = export.to_transformers(model, 0, 0).double()
    torch.testing.assert_close(peer.model.rope.sin, model.rope.sin, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "fields"), [
    ("Llama", dict(rope_scaling=SCALED, rope_theta=10000.0, max_position_embeddings=128)),
    *(("Mistral", dict(sliding_window=window)) for window in (None, 32, 4096)),  # none that is shorter than the block
])  # fmt: skip
def test_logits_are_those_of_transformers(kind, fields, tmp_path):
    right = other_model(kind, num_key_value_heads=2, **fields)
    right.save_pretrained(tmp_path, max_shard_size="15KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 2
    model, half = layout.load_hf(tmp_path), layout.load_hf(tmp_path, dtype=torch.bfloat16)
    idx = tokens((2, model.cfg.block_size))
    logits = right(idx).logits
    assert logits.std() > 0.5
    close(model(idx)[0], logits)
    assert half.rope.cos.dtype == torch.float32 and half.head.weight.dtype == torch.bfloat16
    same_weights(model.bfloat16(), half)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(UserError, match="has no tensor .*; is a shard missing"):
        layout.load_hf(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(vocab_size=60), "has shape (61, 32), not (60, 32)"),
        (dict(value_mode="svformer"), "KeyError"),
        (dict(model_type="qwen2"), "is a qwen2 model; only llama and mistral are supported"),
        (dict(model_type="mistral", sliding_window=31), "attention window of 31 tokens, shorter than its block of 32"),
        (dict(model_type="mistral", max_position_embeddings=5000), "uses an attention window of 4096 tokens"),
        (dict(attention_bias=True), "has attention_bias=True; only False is supported"),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling of type 'linear'"),
    ],
    ids=str,
)
def test_configs_of_other_models_are_refused(tmp_path, fields, says):
    with pytest.raises(UserError) as e:
        layout.load_hf(hf_folder(tmp_path, tiny(n_kv_head=2).float(), **fields))
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_tied_llama_of_old_files(tmp_path):
    """Its head is no tensor, and its rotary buffers are."""
    right, file = other_model("Llama", tie_word_embeddings=True), tmp_path / "model.safetensors"
    right.save_pretrained(tmp_path)
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file, {"format": "pt"})
    model = layout.load_hf(tmp_path)
    close(model(IDX)[0], right(IDX).logits)
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()


def test_a_model_larger_than_the_machines_memory(tmp_path, monkeypatch):
    """Before any of it is read."""
    folder = hf_folder(tmp_path / "m", tiny().float(), vocab_size=2**26)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 2_000_000}[name])
    with pytest.raises(UserError, match=r"m in float32 takes 17\.2 GB, but this machine has 2\.0 GB; "):
        layout.load_hf(folder)
    with pytest.raises(UserError, match=r"m in bfloat16 takes 8\.6 GB"):
        layout.load_hf(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "n_kv_head"), [("mistral", 8), ("llama", 16)])
def test_key_heads_where_a_file_says_nothing_are_transformers_default(kind, n_kv_head, tmp_path):
    hf_folder(tmp_path, tiny().float(), model_type=kind, num_key_value_heads=None, num_attention_heads=16)
    assert layout.hf_config(tmp_path).n_kv_head == n_kv_head


def test_widths_of_heads_may_be_missing(tmp_path):
    hf_folder(tmp_path, tiny().float(), num_key_value_heads=None, head_dim=None)
    assert layout.is_hf_folder(tmp_path) and layout.load_hf(tmp_path).cfg == config()


# ---- tokenizers


@needs_shared
@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_token_ids_are_ours_on_all_text(tmp_path, kind):
    _, tokenizer = reference(kind, tmp_path)
    play = (SHARED / "data/text/tinyshakespeare.txt").read_text()[:200_000]
    theirs = layout.fast_tokenizer(tokenizer)
    theirs.encode_special_tokens = True
    for text in (play, *hostile(3, 300), "a<|endoftext|><|end", "👨\u200d👩\u200d👧\u202e"):
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text[:200]
        assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids), text[:200]
    theirs.encode_special_tokens = False
    assert theirs.encode("a<|endoftext|>").ids[-1] == tokenizer.start


def test_llamas_tokenizer_puts_a_token_before_each_text(tmp_path):
    """Texts are scored and continued after it, and keep the space that the decoder drops at the beginning."""
    tokenizer = metaspace_tokenizer(tmp_path, bos_token_id=0, eos_token_id=[1, 0])
    the, cat = tokenizer.encode("the"), tokenizer.encode("cat")
    assert (tokenizer.prefix, tokenizer.end, tokenizer.is_ours) == ([0], 1, False)
    assert tokenizer.encode("the cat") == the + cat and len(the) == 1
    assert tokenizer.encode("<s>", allow_eot=True) == [0] != tokenizer.encode("<s>")
    assert scoring.encode_pair(tokenizer, "the", " cat") == ([0, *the], cat)
    assert scoring.encode_pair(tokenizer, "", "the") == ([0], the)
    assert tokenizer.decode(cat) == "cat" and tokenizer.decode([0, *the, *cat]) == tokenizer.decode([0, *the]) + " cat"


IDS = [(0, []), (0, -1e30), ([0], 1), (0, 99), (99, 1), (-1, 1), (0, True), ("<s>", 1)]


@pytest.mark.parametrize(("start", "end"), IDS)
def test_ids_that_are_no_tokens_are_refused(start, end, tmp_path):
    with pytest.raises(UserError, match="a Hugging Face model with a tokenizer"):
        metaspace_tokenizer(tmp_path, bos_token_id=start, eos_token_id=end, vocab_size=99)


def test_a_model_without_a_token_that_begins_takes_the_one_that_ends(tmp_path):
    tokenizer = metaspace_tokenizer(tmp_path, bos_token_id=None)
    assert tokenizer.start == tokenizer.end == 1
    tokenizer.encoding.add_special_tokens([f"<{i}>" for i in range(20)])  # and nobody resized the model
    (first,) = tokenizer.encoding.encode("<0>", add_special_tokens=False).ids
    tokenizer.n_vocab = first + 1
    assert tokenizer.encode("<0>", allow_eot=True) == [first]
    tokenizer.n_vocab = first
    assert len(tokenizer.token_bytes()) == first  # though the file has more
    with pytest.raises(UserError, match=f"has {first} tokens and cannot read '<0>', id {first}"):
        tokenizer.encode("a<0>", allow_eot=True)


# ---- value residuals for a model of somebody else


def byte_level_tokenizer(folder):
    """A vocabulary as small Llamas have: bytes as letters, <s> before each text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=letters, vocab_size=300)
    made.train_from_iterator([CHAPTER], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))


def metaspace_tokenizer(folder, **about):
    """Llama's first kind: ▁ for a space, <0x0A> for a byte without a letter, <s> and </s> around each text. about:
    fields of a config.json, with which we read it."""
    vocab = {"<s>": 0, "</s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    for letter in ["▁", *"abcdefghijklmnopqrstuvwxyz.", "th", "the", "▁the"]:
        vocab[letter] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, byte_fallback=True))
    made.add_special_tokens(["<s>", "</s>"])
    both = [("<s>", 0), ("</s>", 1)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    steps = tokenizers.normalizers
    made.normalizer = steps.Sequence([steps.Prepend("▁"), steps.Replace(" ", "▁")])
    steps = tokenizers.decoders
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    made.save(str(folder / "tokenizer.json"))
    if about:
        (folder / "config.json").write_text(json.dumps(dict(eos_token_id=1, vocab_size=300) | about))
        return HFTokenizer.of_folder(folder)


CHAPTER = "the cat sat on the mat, the dog\non the cat and nobody on the dog. Émile said: no! " * 60
OTHERS = {  # model, config, tokenizer
    "tied Llama": ("Llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-6), byte_level_tokenizer),
    "Mistral": ("Mistral", dict(sliding_window=None, rope_theta=1e6, head_dim=8), metaspace_tokenizer),
}


@pytest.fixture(scope="module", params=OTHERS)
def retrofit(request, tmp_path_factory):
    """right: transformers' model; its folder, `data` of its tokens, a `run` that gave it value residuals, by the
    settings `words` and `start`, and what that `said`."""
    folder, (kind, more, make_tokenizer) = tmp_path_factory.mktemp("retrofit"), OTHERS[request.param]
    model, data, run = folder / "model", folder / "data", folder / "run"
    shape = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_key_value_heads=2)
    right = other_model(kind, **shape, max_position_embeddings=48, bos_token_id=0, eos_token_id=1, **more)
    right.save_pretrained(model)
    make_tokenizer(model)
    (folder / "texts").mkdir()
    for i in range(20):
        (folder / f"texts/{i}.txt").write_text(f"{i} {CHAPTER}")
    ran(prepare, "files", f"--input_dir={folder / 'texts'}", f"--tokenizer_file={model}", f"--out_dir={data}")
    words = "--value_mode=resformer_zero --bos=true --batch_tokens=192 --micro_batch=2 --warmup_steps=1 --max_steps=3"
    words = [*words.split(), "--learning_rate=1e-2", "--dtype=float32", "--device=cpu", f"--data_dir={data}"]
    start = f"--init_from={model}"
    said = ran(train, *words, start, f"--out_dir={run}")
    return SimpleNamespace(right=right, model=model, data=data, run=run, words=words, start=start, said=said)


def test_a_retrofit_starts_as_the_model(retrofit):
    """Bit for bit, because 1 V_n + 0 V_1 is V_n; but for its head nothing is new except λ, which has gradients."""
    path, right = checkpoint.find(retrofit.model), retrofit.right
    cfg = train.with_shape(load_settings(train.TrainConfig, [*retrofit.words, retrofit.start]))
    model, tokenizer = GPT(cfg.model_config(300)), Corpus(retrofit.data, 48).tokenizer
    note = checkpoint.start_from(path, model, tokenizer.hash)
    assert note.split("new: ")[1].startswith("mixing.0.scalars.0, mixing.0.scalars.1; not used: none")
    assert ("tied to the embeddings" in note) == right.config.tie_word_embeddings and "positions" not in note
    assert note in retrofit.said
    longer = GPT(dataclasses.replace(model.cfg, block_size=96))
    assert checkpoint.start_from(path, longer, tokenizer.hash).endswith("; it was trained on at most 48 positions")
    idx = tokens((2, 48), vocab=300)
    logits, _ = model(idx)
    assert torch.equal(logits, layout.load_hf(retrofit.model)(idx)[0])
    close(logits, right(idx).logits)
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert all(weights.grad.abs().max() > 0 for weights in model.mixing.parameters())


def test_a_retrofit_learns_and_goes_back_to_transformers(retrofit, tmp_path):
    curves = read_run(retrofit.run)
    assert curves.steps["loss"][-1] < curves.steps["loss"][0]
    (lam,) = curves.evaluation["lam"]
    assert all(own != 1 or first != 0 for own, first in lam[1:])  # λ has moved
    said = ran(export, retrofit.run, f"--out_dir={tmp_path / 'hf'}")
    ties = retrofit.right.config.tie_word_embeddings
    assert ("ties its head" in said) == ties
    assert layout.is_tied(checkpoint.find(retrofit.model)) == ties  # --init_from takes the file, too
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    prefix = checkpoint.load_tokenizer(checkpoint.find(retrofit.run)).prefix
    assert prefix == [0] == [peer.config.bos_token_id]
    assert (theirs.eos_token, peer.config.eos_token_id) == ("</s>", 1)


def changed_config(retrofit, folder, **fields):
    """A copy of the model whose config.json has other fields."""
    shutil.copytree(retrofit.model, folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | fields))
    return folder


def test_what_is_at_its_default_comes_from_the_model(retrofit, tmp_path, monkeypatch):
    """But for the block, which would be too long for most machines, and key heads that a mode decides."""
    model = changed_config(retrofit, tmp_path / "model", max_position_embeddings=5000)

    def shape(**given):
        made = train.with_shape(train.TrainConfig(init_from=str(model), **given)).model_config(300)
        return made.n_layer, made.n_kv_head, made.block_size

    assert shape() == (3, 2, 2048) and shape(n_layer=2, block_size=4096) == (2, 2, 4096)
    assert shape(value_mode="mqa") == (3, 1, 2048)
    # a mode may need it
    deep, mode = changed_config(retrofit, tmp_path / "deep", num_hidden_layers=10), ValueMode((Residual(source=8),))
    with_it = train.TrainConfig(init_from=str(deep), value_mode=mode)
    assert train.with_shape(with_it).model_config(300).n_layer == 10
    refused(in_process(train, "--init_from=" + str(model), "--n_head=7"), "must be a multiple of n_")
    # a run that is resumed has its own, however long
    before = {"init_from": "gone", "n_layer": 5, "n_kv_head": 2, "n_head": 4, "block_size": 4096}
    monkeypatch.setattr(checkpoint, "run_settings", lambda folder: before)
    assert shape(resume="auto") == (5, 2, 4096)


def test_a_longer_block_goes_on(retrofit, tmp_path):
    """In the run's folder, and by a checkpoint's path in another one."""
    words, run, other = [*retrofit.words, "--batch_tokens=192"], tmp_path / "run", tmp_path / "other"
    ran(train, *words, retrofit.start, "--block_size=96", f"--out_dir={run}")
    ran(train, *words, "--max_steps=4", f"--resume={checkpoint.find(run)}", f"--out_dir={other}")
    ran(train, *words, "--max_steps=4", "--resume=auto", f"--out_dir={run}")
    for folder in (run, other):
        assert checkpoint.read_header(checkpoint.find(folder))["config"].block_size == 96


@pytest.mark.parametrize("names_it", [False, True])
def test_a_retrofit_goes_on_when_the_model_is_gone(retrofit, names_it, tmp_path):
    """Its shape is in its own settings, whether --init_from is given again or not; a new start is refused."""
    run, start = shutil.copytree(retrofit.run, tmp_path / "run"), [retrofit.start] * names_it
    moved = retrofit.model.rename(retrofit.model.with_name("moved"))
    try:
        ran(train, *retrofit.words, *start, "--max_steps=4", "--resume=auto", f"--out_dir={run}")
        new = in_process(train, *retrofit.words, retrofit.start, f"--out_dir={tmp_path / 'new'}")
    finally:
        moved.rename(retrofit.model)
    assert read_run(run).steps["step"].tolist() == [1, 2, 3, 4]
    refused(new, "model does not exist; it takes a run")


def test_analysis_and_loss_on_data_of_a_models_own_tokens(retrofit, tmp_path):
    """Its ids are read as they are; what is measured of them is what they are worth."""
    ran(analyze, retrofit.model, f"--data_dir={retrofit.data}", "--chunks=3", f"--out_dir={tmp_path}")
    assert files.read_record(tmp_path / "analysis.json", ANALYSIS)["chunks"] == 3
    ran(evaluate, retrofit.model, "--task=loss", f"--corpus={retrofit.data}")
    (record,) = evaluate.read_results(retrofit.model).values()
    assert 4 < record["results"]["loss"]["val_mean"] < 12


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a peft adapter; first merge it into its model"):
        checkpoint.find(tmp_path)


def test_what_a_saved_tokenizer_was_used_with_is_put_aside(tmp_path):
    """Truncation and padding are in tokenizer.json, too, and would cut texts or fill them up."""
    right, path = metaspace_tokenizer(tmp_path, bos_token_id=0), str(tmp_path / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(path)
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(path)
    found = HFTokenizer.of_folder(tmp_path)
    for text in ("a", CHAPTER):
        assert found.encode(text) == right.encode(text)


@pytest.mark.parametrize("bos", [True, False])
def test_the_tokenizer_of_an_exported_retrofit_begins_as_training_did(bos, retrofit, tmp_path):
    run, folder = retrofit.run, tmp_path / "hf"
    if not bos:
        run = tmp_path / "run"
        ran(train, *retrofit.words, "--bos=false", retrofit.start, f"--out_dir={run}")
    ran(export, run, f"--out_dir={folder}")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    card = (folder / "README.md").read_text()
    assert (theirs("the dog").input_ids[0] == 0) == bos == ("each begins with `<s>`" in card)
    assert "The text `</s>` becomes its id" in card
    # and its vocabulary serves a second text
    assert read_vocabulary(folder / "tokenizer.json").hash == checkpoint.load_tokenizer(checkpoint.find(run)).hash


def test_bytes_of_another_models_tokens(retrofit):
    tokenizer = HFTokenizer.of_folder(retrofit.model)
    for text in (CHAPTER[:200], "a\n\n  b", "Émile 東京"):
        ids = tokenizer.encode(text)
        added = tokenizer.encoding.normalizer is not None  # the space before a text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) + added
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[[0, 1]].tolist() == [0, 0]


def test_what_a_retrofit_cannot_be(retrofit, data_dir, tmp_path):
    words, out = retrofit.words, f"--out_dir={tmp_path / 'out'}"
    of_other_tokens = in_process(train, *words[:-1], retrofit.start, f"--data_dir={data_dir}", out)
    refused(of_other_tokens, "the data was not made with the tokenizer of", "--tokenizer_file=")
    large = changed_config(retrofit, tmp_path / "large", vocab_size=128256)
    texts = f"--input_dir={retrofit.model.parent / 'texts'}"
    too_large = in_process(prepare, "files", texts, f"--tokenizer_file={large}", out)
    refused(too_large, "has 128,256 tokens, and token files hold 16-bit ids")


# ---- our stages on a folder


def test_our_stages_make_the_same_of_a_folder_and_its_run(runs, data_dir, tmp_path):
    rows = [dict(goal=f"g{i}", sol1="ab", sol2="bcd", label=i % 2) for i in range(20)]
    write_rows(tmp_path, {"piqa": rows})
    texts, numbers = [], []
    for name in runs["svformer"]:
        texts.append(ran(sample, name, "--prompt=abc", "--max_new_tokens=20").split("\n\n[")[0])
        ran(analyze, name, f"--data_dir={data_dir}", "--chunks=2")
        ran(evaluate, name, "--task=piqa,loss", f"--data_dir={tmp_path}", f"--corpus={data_dir}")
        (record,) = evaluate.read_results(name).values()
        results = record["results"]
        entropy = json.loads((name / "analysis.json").read_text())["layers"]["entropy"]["mean"]
        numbers.append([*entropy, results["piqa"]["acc_norm"], results["loss"]["val_mean"]])
    assert texts[0] == texts[1] and "abc" in texts[0]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


def test_a_run_starts_from_a_folder(runs, data_dir, tmp_path):
    how = dict(init_from=runs["vanilla"][1], value_mode="svformer")
    # q and k of a fused projection fit without v
    said = trained(data_dir, tmp_path, **how).stdout
    assert "; new: none; not used: blocks.1.attn.proj.v.weight, " in said


FIT = dict(vocab_size=60, arch="gpt2", n_embd=64, head_dim=8, rope_theta=5e5, rope_scaling=SMALL, norm_eps=1e-3)


@pytest.mark.parametrize("field", FIT)
def test_what_a_model_that_starts_from_another_must_share(field, tmp_path):
    path = checkpoint.save(tmp_path, 1, tiny(), "hash")
    with pytest.raises(UserError, match=f"differs from this one in .*{field}.*; they must be the same"):
        checkpoint.start_from(path, tiny(**{field: FIT[field]}), "hash")
