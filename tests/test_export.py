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
from common import checkpoint, files, hf, scoring
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


def test_its_code_needs_none_of_our_files(runs, tmp_path):
    """Elsewhere `from model import GPT` would find nothing, so here it must not find ours."""
    code = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    command = [sys.executable, "-c", code, str(runs["svformer"][1])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_weights_in_half_precision(runs, tmp_path):
    run, _ = runs["resformer_plus"]
    ran(export, run, f"--out_dir={tmp_path / 'hf'}", "--dtype=bfloat16")
    same_weights(checkpoint.load(tmp_path / "hf"), checkpoint.load(run).bfloat16().float())


@pytest.mark.parametrize(("mode", "arch"), [*((mode, "llama") for mode in MODES), ("svformer", "gpt2")])
def test_every_mode_comes_back_bit_for_bit(data, tmp_path, mode, arch):
    """Under the name of its mode. gqa2, too, which transformers takes for a plain Llama."""
    kw = dict(n_kv_head=4) if MODES[mode].kv_group == 1 else {}
    kw |= dict(rope_theta=5e5, head_dim=8) if arch == "llama" else {}
    model = tiny(mode, vocab_size=257, arch=arch, norm_eps=1e-3, **kw).float()
    tokenizer, folder = Tokenizer.load(data / "tokenizer.json"), tmp_path / "hf"
    path = checkpoint.save(tmp_path, 3, model, tokenizer.hash, val_loss=1.5)
    files.write_record(tmp_path / "config.json", checkpoint.RUN, {"bos": True})
    export.write_folder(folder, path, model, tokenizer)
    found = checkpoint.find(folder)
    header = checkpoint.read_header(found)
    assert header["config"] == dataclasses.replace(model.cfg, init_std=header["config"].init_std)
    assert header["mode"] == model.cfg.value_mode.name and checkpoint.trained_with_bos(folder)
    assert (header["step"], header["val_loss"], header["tokenizer"]) == (3, 1.5, tokenizer.hash)
    same_weights(checkpoint.load(found), model)
    assert checkpoint.load_tokenizer(found).encode("abc <|endoftext|>") == tokenizer.encode("abc <|endoftext|>")


def test_exports_are_refused(runs, data, tmp_path, monkeypatch):
    run, folder = runs["svformer"]
    out = f"--out_dir={tmp_path / 'hf'}"
    refused(in_process(export, tmp_path, out), "holds no checkpoint")
    refused(in_process(export, folder, out), "is a Hugging Face folder already")
    refused(in_process(export, run, f"--out_dir={folder}"), "exists; remove it, or choose another --out_dir")
    refused(in_process(train, f"--data_dir={data}", f"--out_dir={folder}"), "not train.py's settings")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(in_process(export, run, out), "transformers cannot be imported")
    assert not (tmp_path / "hf").exists()


def replaced(file, old, new):
    """export.write_code, but with a change in one of the files."""

    def write_code(folder, write=export.write_code):
        write(folder)
        source = (folder / file).read_text()
        assert old in source
        (folder / file).write_text(source.replace(old, new))

    return "write_code", write_code


def other_tokenizer(tokenizer):
    made = hf.fast_tokenizer(tokenizer)
    made.normalizer = tokenizers.normalizers.Replace("a", "b")
    return made


FAULTS = {
    "scale": replaced("layers.py", "to_fp32(x).unflatten(-1, (2", "to_fp32(3 * x).unflatten(-1, (2"),
    "nan": replaced("layers.py", "to_fp32(x).unflatten(-1, (2", "to_fp32(float('nan') * x).unflatten(-1, (2"),
    "lost cache": replaced("modeling_nanoresformer.py", "past = cache if", "past = None if True else cache if"),
    "token ids": ("fast_tokenizer", other_tokenizer),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_is_another_model_is_not_kept(runs, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(export, *FAULTS[fault])
    result = in_process(export, runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}")
    refused(result, "makes another model of the folder")
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_nothing(runs, tmp_path, monkeypatch):
    def no_room(*args, **settings):
        raise SafetensorError("no space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", no_room)
    refused(in_process(export, runs["svformer"][0], f"--out_dir={tmp_path / 'hf'}"), "cannot be written")
    assert not [*tmp_path.iterdir()]


# ---- folders of other people

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


@pytest.mark.parametrize(
    ("kind", "settings", "length"),
    [
        ("Llama", LONG | GROUPED | dict(hidden_size=64), 128),
        ("Llama", dict(tie_word_embeddings=True, rope_theta=500000.0), 32),
        ("Mistral", GROUPED | dict(sliding_window=None), 32),
        ("Mistral", GROUPED | dict(sliding_window=12), 12),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, settings, length):
    right, idx = peer(kind, **settings), tokens((2, length))
    right.save_pretrained(tmp_path, max_shard_size="15KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 2
    model, logits = hf.load_hf(tmp_path), right(idx).logits
    assert logits.std() > 0.5 and model.cfg.block_size == length and not model.training
    close(model(idx)[0], logits)


def test_files_in_half_precision(tmp_path):
    peer("Llama", torch.bfloat16, **LONG).save_pretrained(tmp_path)
    model, half, idx = hf.load_hf(tmp_path), hf.load_hf(tmp_path, dtype=torch.bfloat16), tokens((2, 128))
    close(model(idx)[0], peer_of(tmp_path, dtype=torch.float32)(idx).logits)
    assert half.rope.cos.dtype == torch.float32 and half.head.weight.dtype == torch.bfloat16
    same_weights(model, half.float())


def test_a_head_in_the_file_is_not_tied(tmp_path):
    """Old files repeat the embedding as the head. Where another head lies in the file, transformers 5 believes it."""
    peer("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors, idx = load_file(tmp_path / "model.safetensors"), tokens((1, 9))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    close(hf.load_hf(tmp_path)(idx)[0], peer_of(tmp_path)(idx).logits)


def test_the_authors_layout_beside_buffers_and_other_files(tmp_path):
    model = tiny("svformer", n_kv_head=2).float()
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(4)}
    hf_folder(tmp_path, model, shards=True, extra=buffers, value_mode="svformer")
    save_file({"layers.0.wq": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    same_weights(hf.load_hf(tmp_path), model)


def refuses(folder, says):
    with pytest.raises(UserError) as e:
        hf.load_hf(folder)
    assert says in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / SHARDS[0]).unlink(), "is a shard missing"),
        (lambda d: (d / SHARDS[0]).write_bytes((d / SHARDS[0]).read_bytes()[:-100]), f"{SHARDS[0]} is damaged"),
        (lambda d: [file.rename(file.with_suffix(".bin")) for file in d.glob("*.safe*")], "(.bin) is never loaded"),
        (lambda d: shutil.copy(d / SHARDS[0], d / "model-4.safetensors"), "or in two files?"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, says):
    damage(hf_folder(tmp_path, tiny(n_kv_head=2).float(), shards=True))
    refuses(tmp_path, says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(vocab_size=60), "of shape (61, 32) has no place in the model of config.json"),
        (dict(value_mode="svformer"), "has no place in the model of config.json"),
        (dict(value_mode="resformer_lerp"), "no names for the weights that resformer_lerp adds"),
        (dict(model_type="mamba"), "model_type='mamba'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(rope_scaling={"rope_type": "yarn"}), "rope_scaling of type 'yarn'"),
        (dict(max_position_embeddings="32"), "block_size takes int"),
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
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=1.0), dict(rope_theta=5e5)),
        (dict(rope_parameters=SCALED | dict(rope_theta=5e5)), dict(rope_theta=5e5, rope_scaling=SMALL)),
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
    theirs = hf.fast_tokenizer(tokenizer)
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


@pytest.mark.parametrize(
    ("fields", "both"), [(dict(bos_token_id=0, eos_token_id=2), (0, 2)), (dict(eos_token_id=[7, 9]), (7, 7))], ids=str
)
def test_tokens_that_start_and_end_a_sequence(tmp_path, fields, both):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    names = ("bos_token_id", "eos_token_id")
    assert (hf.hf_token(tmp_path, *names), hf.hf_token(tmp_path, *names[::-1])) == both


# ---- our stages on a folder


@pytest.mark.parametrize("mode", ["vanilla", "svformer"])
def test_our_stages_make_the_same_of_a_folder_and_its_run(runs, data, tmp_path, mode):
    rows = [dict(goal=f"g{i}", sol1="ab", sol2="bcd", label=i % 2) for i in range(20)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts, numbers = [], []
    for name in runs[mode]:
        texts.append(ran(sample, name, "--prompt=abc", "--max_new_tokens=20").split("\n\n[")[0])
        ran(analyze, name, f"--data_dir={data}", "--chunks=2")
        ran(evaluate, name, "--task=piqa,loss", f"--data_dir={tmp_path}", f"--corpus={data}")
        (record,) = evaluate.read_results(name).values()
        results = record["results"]
        entropy = json.loads((name / "analysis.json").read_text())["layers"]["entropy"]["mean"]
        numbers.append([*entropy, results["piqa"]["acc_norm"], results["loss"]["val_mean"]])
    assert texts[0] == texts[1] and "abc" in texts[0]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


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
    assert "new:" not in fewer and "3 of that model's are not used" in fewer
    other = make_data(tmp_path / "other", tokenizer=byte_tokenizer(r"[\s\S]{1,2}"))
    for word, says in (
        ("--n_embd=64", "has n_embd=32, this model 64"),
        (f"--data_dir={other}", "another tokenizer"),
    ):
        refused(in_process(train, *words, f"--out_dir={tmp_path / 'none'}", word), says)
