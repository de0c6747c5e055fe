"""export.py: transformers makes our model of the folder; every mode, there and back, and our stages on the folder."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    COVER,
    MODES,
    SHARED,
    byte_tokenizer,
    change,
    in_process,
    make_data,
    needs_shared,
    refused,
    tiny,
    tokens,
    widths,
)
from safetensors import SafetensorError
from safetensors.torch import load_file

import analyze
import checkpoint
import eval as evaluate
import export
import hf
import prepare
import sample
import train
from data import Tokenizer
from oldfiles import write_json
from value_modes import kv_floats_per_token

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from modeling_nanoresformer import NanoResFormerConfig, NanoResFormerForCausalLM  # noqa: E402

SHAPE = dict(n_layer=4, n_head=4, n_embd=32, block_size=96, batch_tokens=192, micro_batch=2, warmup_steps=1)
SHAPE |= dict(max_steps=2, eval_every=2, eval_tokens=192, dtype="float32", learning_rate=1e-2)


def trained(data, out, **settings):
    words = [f"--{key}={value}" for key, value in {**SHAPE, "data_dir": data, "out_dir": out, **settings}.items()]
    result = in_process(train, *words)
    assert result.returncode == 0, result.stderr
    return out


def exported(run, out, *words):
    result = in_process(export, run, f"--out_dir={out}", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def peer_of(folder, **settings):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings).eval()


def wrapped(model, **settings):
    """A model of ours inside the class that goes with the export."""
    peer = NanoResFormerForCausalLM(NanoResFormerConfig(shape=dataclasses.asdict(model.cfg), **settings)).eval()
    peer.model.load_state_dict(model.state_dict())
    return peer


def greedy(model, ids, n):
    """(n tokens after ids by full forward passes of our model, each the likeliest)."""
    for _ in range(n):
        ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], dim=1)
    return ids


def nbytes(cache):
    """Bytes of keys and values in a cache of transformers."""
    return sum(t.nbytes for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values))


# ---- the class, in every mode


@pytest.mark.parametrize(("mode", "n_kv_head"), widths(*MODES), ids=str)
def test_every_mode(mode, n_kv_head):
    """Logits, cached greedy text, and the bytes of its cache, at one row and at padded rows."""
    model = tiny(mode, n_kv_head=n_kv_head, block_size=48).float()
    peer, idx = wrapped(model), tokens((2, 8))
    with torch.inference_mode():
        assert (peer(idx).logits - model(idx)[0]).abs().max() <= 1e-5
        how = dict(max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        found = peer.generate(idx, attention_mask=torch.ones_like(idx), return_dict_in_generate=True, **how)
        assert torch.equal(found.sequences, greedy(model, idx, 32))
        assert nbytes(found.past_key_values) == 2 * 39 * 4 * kv_floats_per_token(model.cfg)
        padded = torch.cat([tokens((1, 3), seed=1), idx[:1, :5]], dim=1)  # 3 tokens of padding, whatever they are
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        alone = peer.generate(idx[:1, :5], attention_mask=mask[:, 3:], **how)
        assert torch.equal(peer.generate(padded, attention_mask=mask, **how)[:, 3:], alone)


@pytest.mark.parametrize("mode", COVER)
def test_beams_and_training(mode):
    model = tiny(mode, block_size=48).float()
    peer, idx = wrapped(model), tokens((2, 8))
    how = dict(attention_mask=torch.ones_like(idx), max_new_tokens=8, num_beams=3, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        assert torch.equal(peer.generate(idx, **how), peer.generate(idx, use_cache=False, **how))
        loss = peer(idx, labels=idx).loss
        assert abs(loss - model(idx[:, :-1], idx[:, 1:])[1]) < 1e-5
    grads = []
    for recompute in (False, True):
        peer.zero_grad()
        if recompute:
            peer.gradient_checkpointing_enable()
        peer.train()(idx, labels=idx).loss.backward()
        assert peer.model.recompute == recompute
        grads.append({name: p.grad.clone() for name, p in peer.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])


def test_padding_in_eager_attention():
    """Rows of padding alone, where nothing is seen, would be NaN."""
    peer, idx, mask = wrapped(tiny().float(), attn_implementation="eager"), tokens((1, 8)), torch.ones(1, 8).long()
    mask[:, :3] = 0
    torch.testing.assert_close(peer(idx, attention_mask=mask).logits[:, 3:], peer(idx[:, 3:]).logits)
    with pytest.raises(ValueError, match=r"attention_mask \(1, 8\) must be \(batch, 7\)"):
        peer(idx[:, 1:], attention_mask=mask)


def test_angles_are_made_anew(tmp_path):
    """They are in no file, and another theta and scaling than the usual ones give others."""
    model, idx = tiny(rope_theta=5e5, rope_scaling=(8.0, 1.0, 4.0, 32.0)).float(), tokens((1, 32))
    wrapped(model).save_pretrained(tmp_path)
    torch.testing.assert_close(NanoResFormerForCausalLM.from_pretrained(tmp_path)(idx).logits, model(idx)[0])


def test_names_that_other_code_asks_for():
    model = tiny(n_kv_head=2).float()
    peer, idx = wrapped(model), tokens((1, 8))
    assert (peer.config.num_hidden_layers, peer.config.num_attention_heads) == (4, 8)
    assert (peer.config.num_key_value_heads, peer.config.hidden_size) == (2, 32)
    assert (peer.config.vocab_size, peer.config.max_position_embeddings) == (61, 32)
    assert peer.get_input_embeddings() is peer.model.embed and peer.get_output_embeddings() is peer.model.head
    torch.testing.assert_close(peer(idx, logits_to_keep=3).logits, peer(idx).logits[:, -3:])


# ---- folders


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{mode: (its run, its export)} of a plain Llama, and of models that bring their code."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for mode in ("vanilla", "svformer", "resformer_plus"):
        run = trained(data, folder / mode, value_mode=mode)
        found[mode] = run, folder / f"hf_{mode}"
        assert " 0 of " in exported(run, found[mode][1])
    return found


def test_what_transformers_makes_of_it(runs, tmp_path):
    for mode, (run, folder) in runs.items():
        model, peer, idx = checkpoint.load(run), peer_of(folder), tokens((2, 20), vocab=257)
        is_llama = isinstance(peer, transformers.LlamaForCausalLM)
        assert is_llama == (mode == "vanilla")
        with torch.inference_mode():
            assert (peer(idx).logits - model(idx)[0]).abs().max() <= 1e-5, mode
        peer.save_pretrained(tmp_path / mode)
        again = peer_of(tmp_path / mode)
        assert all(torch.equal(p, peer.state_dict()[name]) for name, p in again.state_dict().items()), mode
        assert torch.equal(again(idx).logits, peer(idx).logits), mode
        half = peer_of(folder, dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert (half(idx).logits - peer(idx).logits).abs().max() < 0.1, mode
        assert transformers.AutoTokenizer.from_pretrained(folder).padding_side == "left", mode
        words = dict(max_new_tokens=8, do_sample=False)
        generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
        text = generate("abcabc", **words)[0]["generated_text"]
        both = generate(["abcabc", "abcdefghij"], batch_size=2, **words)
        assert text.startswith("abcabc") and both[0][0]["generated_text"] == text, mode


def test_config_names_no_other_model(runs):
    """A model that is not a Llama cannot be loaded as one."""
    for mode, (_, folder) in runs.items():
        about = json.loads((folder / "config.json").read_text())
        assert (about["model_type"] == "llama") == (mode == "vanilla")
        names = {path.name for path in folder.iterdir()}
        assert ("model.py" in names) == ("auto_map" in about) == (mode != "vanilla")
        card = (folder / "README.md").read_text()
        assert f"# {mode}" in card and "library_name: transformers" in card and "--value_mode" in card
        assert ("trust_remote_code" in card) == (mode != "vanilla") and "nats per token" in card


def test_grouped_heads_keep_their_name(data, tmp_path):
    """gqa2 is a plain Llama for transformers, and gqa2 again for us. The step was not evaluated: the card says so."""
    run = trained(data, tmp_path / "run", value_mode="gqa2", save_every=1, keep=0)
    exported(run / "step_00000001.safetensors", tmp_path / "hf")
    assert "LlamaForCausalLM" in (tmp_path / "hf" / "config.json").read_text()
    assert checkpoint.load(tmp_path / "hf").cfg.value_mode.name == "gqa2"
    assert "mean validation loss unknown" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_and_types(runs, tmp_path, dtype):
    run, _ = runs["resformer_plus"]
    exported(run, tmp_path / "hf", f"--dtype={dtype}", "--max_shard_size=20KB")
    assert len(list(tmp_path.glob("hf/model-*.safetensors"))) > 2
    model, again = checkpoint.load(run), checkpoint.load(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(getattr(torch, dtype)).float()), name
    path = checkpoint.find(tmp_path / "hf")
    digests = {checkpoint.digest(path)}
    for file in (max(tmp_path.glob("hf/model-*.safetensors")), path.parent / "config.json"):
        file.write_bytes(file.read_bytes() + b" ")
        digests.add(checkpoint.digest(path))
    assert len(digests) == 3


def test_every_mode_comes_back(tmp_path):
    """load_hf reads what export.py writes, bit for bit; the number of parameters written is the model's."""
    tokenizer = Tokenizer.load(make_data(tmp_path / "data") / "tokenizer.json")
    for i, (mode, arch) in enumerate([*((mode, "llama") for mode in MODES), ("svformer", "gpt2")]):
        kw = dict(n_kv_head=4) if MODES[mode].kv_group == 1 else {}
        model = tiny(mode, vocab_size=257, arch=arch, **kw).float()
        path = checkpoint.save(tmp_path / f"run{i}", 3, model, tokenizer.hash, val_loss=1.5)
        tokenizer.save(path.with_name("tokenizer.json"))
        write_json(path.with_name("config.json"), {"bos": i == 0})
        export.write_folder(tmp_path / f"hf{i}", path, model, tokenizer, export.ExportConfig())
        assert checkpoint.trained_with_bos(tmp_path / f"hf{i}") == (i == 0)
        assert ("begin each prompt with it" in (tmp_path / f"hf{i}" / "README.md").read_text()) == (i == 0)
        found = checkpoint.find(tmp_path / f"hf{i}")
        header = checkpoint.read_header(found)
        assert header["config"].value_mode == model.cfg.value_mode or hf.is_plain_llama(model.cfg), mode
        assert (header["step"], header["val_loss"], header["tokenizer"]) == (3, 1.5, tokenizer.hash)
        again = checkpoint.load(found)
        assert all(torch.equal(again.state_dict()[name], p) for name, p in model.state_dict().items()), mode
        assert torch.equal(again(tokens((1, 8)))[0], model(tokens((1, 8)))[0]), mode
        assert checkpoint.load_tokenizer(found).encode("abc <|endoftext|>") == tokenizer.encode("abc <|endoftext|>")


def test_data_of_less_than_a_window(data, tmp_path):
    """It is compared too."""
    tokenizer, model = Tokenizer.load(data / "tokenizer.json"), tiny(vocab_size=257, block_size=4000).float()
    path = checkpoint.save(tmp_path / "run", 3, model, tokenizer.hash)
    tokenizer.save(path.with_name("tokenizer.json"))
    assert "5,998 tokens" in exported(path, tmp_path / "hf", f"--data_dir={data}")


# ---- tokenizers

PIECES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003", "\u200b", "\u0085", "\x1c", "\x00", "\x7f", "\ufeff", "a"]
PIECES += ["Hello", "'s", "'LL", "don't", "1", "123", "٣", "½", "é", "e\u0301", "ﬁ", "ß", "İ", "漢字", "日本語"]
PIECES += ["한국어", "ไทย", "🙂", "👨\u200d👩\u200d👧", "\u0300", "\u202e", "__init__", "(self):", "==", "->", "//"]
PIECES += ["#include", "{}", "<|endoftext|>", "<|end", "\u2028", "\U0001d54f", "\ue000", "\uffff", "…", "“", "€"]
PIECES += ["a" * 50, " " * 30, "\n" * 12, "\t" * 5, "=" * 40]


def difficult(n):
    rng = random.Random(0)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12))) for _ in range(n)]


def same_ids(tokenizer, texts):
    theirs = tokenizers.Tokenizer.from_str(json.dumps(hf.tokenizer_json(tokenizer)))
    theirs.encode_special_tokens = True
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text
        assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids), text
    theirs.encode_special_tokens = False
    assert theirs.encode("a<|endoftext|>").ids[-1] == tokenizer.eot


@needs_shared
def test_token_ids_of_public_tokenizers():
    folder = SHARED / "data/tokenizers"
    play = (SHARED / "data/text/tinyshakespeare.txt").read_text()
    texts = difficult(1000) + [play[i : i + 5000] for i in range(0, len(play), 5000)]
    same_ids(Tokenizer(prepare.neox_spec(str(folder / "gpt-neox-20b.tokenizer.json"))), texts)
    same_ids(Tokenizer(prepare.gpt2_spec(str(folder / "gpt2"))), texts)


def test_token_ids_of_ours(tmp_path):
    (tmp_path / "texts").mkdir()
    texts = difficult(1000)
    (tmp_path / "texts/a.txt").write_bytes("\n".join(texts).encode("utf-8", "replace"))
    words = ("files", f"--input_dir={tmp_path / 'texts'}", f"--out_dir={tmp_path / 'data'}", "--tokenizer=bpe:700")
    assert in_process(prepare, *words, "--workers=1").returncode == 0
    same_ids(Tokenizer.load(tmp_path / "data/tokenizer.json"), texts)


# ---- our stages on the folder


def test_our_stages_read_it(runs, data, tmp_path):
    rows = [dict(goal=f"g{i}", sol1="ab", sol2="bcd", label=i % 2) for i in range(20)]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for mode, (run, folder) in runs.items():
        said = [in_process(sample, name, "--prompt=abc", "--max_new_tokens=20").stdout for name in (run, folder)]
        assert said[0].split("\n\n[")[0] == said[1].split("\n\n[")[0] and "abc" in said[0], mode
        for name in (run, folder):
            words = (name, "--task=piqa,loss", f"--data_dir={tmp_path}", f"--corpus={data}")
            assert in_process(evaluate, *words).returncode == 0
            assert in_process(analyze, name, f"--data_dir={data}", "--chunks=2").returncode == 0
        found = [next(iter(evaluate.read_results(name).values()))["results"] for name in (run, folder)]
        assert found[0]["piqa"]["acc_norm"] == found[1]["piqa"]["acc_norm"]
        assert abs(found[0]["loss"]["val_mean"] - found[1]["loss"]["val_mean"]) < 1e-6
        layers = [
            json.loads((name / "analysis.json").read_text())["layers"]["entropy"]["mean"] for name in (run, folder)
        ]
        assert layers[0] == pytest.approx(layers[1], abs=1e-5)


def test_tied_embeddings_are_no_matter_of_our_own_layout(runs, tmp_path):
    """It always has a head."""
    _, folder = runs["svformer"]
    shutil.copytree(folder, tmp_path / "tied")
    change(tmp_path / "tied" / "config.json", tie_word_embeddings=True)
    tied, plain = (hf.load_hf(of).state_dict() for of in (tmp_path / "tied", folder))
    assert all(torch.equal(tied[name], plain[name]) for name in plain)


def test_starting_from_other_weights(runs, data, tmp_path):
    """A run, a checkpoint or a folder; of another mode what fits, and the rest is named."""
    run, folder = runs["vanilla"]
    start = checkpoint.load(run).state_dict()
    for source in (run, checkpoint.find(run), folder):
        words = [f"--{key}={value}" for key, value in {**SHAPE, "data_dir": data, "learning_rate": 0}.items()]
        words += [f"--init_from={source}", f"--out_dir={tmp_path / 'same'}", "--value_mode=resformer_learned"]
        result = in_process(train, *words)
        assert result.returncode == 0, result.stderr
        (line,) = [line for line in result.stdout.splitlines() if "weights from" in line]
        assert line.endswith("; new: mixing.0.scalars.0, mixing.0.scalars.1, mixing.0.scalars.2"), line
        found = checkpoint.load(tmp_path / "same").state_dict()
        assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in start.items())
        words[-2:-2] = ["--resume=auto", "--max_steps=6"]
        assert in_process(train, *words).returncode == 0
        words = [word for word in words if not word.startswith("--init_from")]
        assert in_process(train, *words).returncode == 0  # need not be named again, but stays on record
        assert json.loads((tmp_path / "same" / "config.json").read_text())["init_from"] == str(source)
        for more in ([], ["--max_steps=9"]):  # finished, and not yet
            says = "started with other settings: init_from (was "
            refused(in_process(train, *words, f"--init_from={tmp_path}", *more), says)
        for path in (tmp_path / "same").iterdir():
            path.unlink()
    words = [f"--init_from={run}", *words]
    fewer = in_process(train, *words, "--value_mode=svformer")
    assert fewer.returncode == 0 and "new:" not in fewer.stdout  # q and k of a fused projection fit without v
    assert "3 of that model's are not used" in fewer.stdout
    grouped = in_process(train, *words, "--value_mode=vanilla", "--n_kv_head=2", f"--out_dir={tmp_path / 'grouped'}")
    assert "; new: blocks.0.attn.proj.k.weight, blocks.0.attn.proj.v.weight, blocks.1." in grouped.stdout
    for more, message in (
        ("--n_embd=64", "has n_embd=32, this model 64"),
        ("--arch=gpt2", "has arch=llama, this model gpt2"),
        ("--n_head=8", "has head_dim=8, this model 4"),
        (f"--init_from={tmp_path / 'nowhere'}", "holds no checkpoint"),
    ):
        refused(in_process(train, *words, more, f"--out_dir={tmp_path / 'none'}"), message)
    other = make_data(tmp_path / "other", tokenizer=byte_tokenizer(r"[\s\S]{1,2}"))
    refused(in_process(train, *words, f"--data_dir={other}", f"--out_dir={tmp_path / 'none'}"), "another tokenizer")
    refused(in_process(train, *words, f"--resume={folder}"), "start from its weights with --init_from")
    shutil.copytree(folder, tmp_path / "other's")
    change(tmp_path / "other's" / "config.json", tokenizer_hash=None)
    words.append(f"--out_dir={tmp_path / 'none'}")
    refused(in_process(train, *words, f"--init_from={tmp_path / chr(34)}"), "holds no checkpoint")
    refused(in_process(train, *words, f"--init_from={tmp_path}/other's"), "does not say which tokenizer it has")


# ---- bad input


def test_refused(runs, data, tmp_path, monkeypatch):
    run, folder = runs["svformer"]
    out = f"--out_dir={tmp_path / 'hf'}"
    refused(in_process(export, tmp_path, out), "holds no checkpoint")
    refused(in_process(export, folder, out), "is a Hugging Face folder already")
    refused(in_process(export, run, f"--out_dir={folder}"), "exists; choose another --out_dir, or replace it")
    refused(in_process(export, run, f"--out_dir={run}", "--overwrite"), "exists and is no Hugging Face folder")
    assert checkpoint.find(run).exists()
    refused(in_process(export, run, "--out_dir=."), "cannot be replaced as a whole; choose a new folder")
    refused(in_process(export, run, out, "--data_dir=nowhere"), "nowhere is no folder; name prepared data")
    other = make_data(data / "other", tokenizer=byte_tokenizer("(?s:..?)"))
    refused(in_process(export, run, out, f"--data_dir={other}"), "was made with another tokenizer than", "--data_dir")
    refused(in_process(train, f"--data_dir={data}", f"--out_dir={folder}"), "holds a Hugging Face model; set another")
    refused(in_process(export, run, out, "--max_shard_size=big"), "not a size such as 500MB")
    unfinished = trained(data, tmp_path / "unfinished", max_steps=4)
    for path in checkpoint.steps(unfinished).values():
        if "4" in path.name:
            path.unlink()
    refused(in_process(export, unfinished, out), "is at step 2 of 4; finish it with --resume=auto")
    assert "step 2" in exported(unfinished, tmp_path / "best", "--which=best")
    huge = checkpoint.load(run)
    huge.norm.weight.data.fill_(1e5)
    path = checkpoint.save(tmp_path / "huge", 1, huge, checkpoint.read_header(checkpoint.find(run))["tokenizer"])
    checkpoint.load_tokenizer(checkpoint.find(run)).save(path.with_name("tokenizer.json"))
    refused(in_process(export, path, out, f"--data_dir={data}", "--dtype=float16"), "as float16", "NaN or infinity")
    with monkeypatch.context() as patch:
        other = {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}}
        patch.setattr(export, "tokenizer_json", lambda t: hf.tokenizer_json(t) | other)
        refused(in_process(export, run, out), "makes another model of the folder")
    right = export.as_module
    for factor in ("3", "float('nan')"):
        with monkeypatch.context() as patch:
            patch.setattr(export, "as_module", lambda source, factor=factor: hf_damaged(right(source), factor))
            refused(in_process(export, run, f"{out}2"), "makes another model of the folder")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "transformers", None)
        refused(in_process(export, run, out), "the package transformers is not installed")
        assert in_process(export, run, out, "--check=false").returncode == 0
    assert "svformer" in exported(run, tmp_path / "hf", "--overwrite")
    assert {path.name for path in tmp_path.iterdir()} == {"unfinished", "best", "huge", "hf"}  # nothing half


def test_what_was_there_stays(runs, tmp_path, monkeypatch):
    """An export that is cut off, or that finds no room, leaves the folder as it was, and nothing else."""
    run, _ = runs["svformer"]
    out, rename = tmp_path / "hf", Path.rename

    def cut_off(path, target):
        if path.name == ".hf.new":
            raise KeyboardInterrupt
        return rename(path, target)

    def no_room(*args, **settings):
        raise SafetensorError("no space left on device")

    exported(run, out, "--check=false")
    (out / "mine.txt").write_text("first")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_off)
        assert in_process(export, run, f"--out_dir={out}", "--overwrite", "--check=false").returncode != 0
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.save_torch_state_dict", no_room)
        refused(in_process(export, run, f"--out_dir={out}", "--overwrite"), "cannot write", "free some space")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (out / "mine.txt").exists()
    out.rename(tmp_path / ".hf.old")  # what a kill -9 between the two renames leaves
    refused(in_process(export, run, f"--out_dir={out}"), "exists")
    shutil.copytree(out, tmp_path / ".hf.old")  # what one leaves behind them
    exported(run, out, "--overwrite", "--check=false")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and not (out / "mine.txt").exists()


def hf_damaged(source, factor):
    """A network whose attention is scaled otherwise."""
    right = "to_fp32(x).unflatten(-1, (2"
    assert right in source or "def apply_rope" not in source
    return source.replace(right, right.replace("(x)", f"({factor} * x)"))


def test_positions_of_packed_rows_are_refused():
    with pytest.raises(ValueError, match="position_ids are not supported"):
        wrapped(tiny().float())(tokens((1, 4)), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_generate_computes_no_logits_of_the_prompt():
    model, widths = wrapped(tiny().float()), []
    model.get_output_embeddings().register_forward_hook(lambda head, args, logits: widths.append(logits.size(1)))
    model.generate(tokens((1, 9)), max_new_tokens=2, do_sample=False)
    assert widths == [1, 1]


def test_files_are_those_of_the_model(runs):
    """The weights in the folder have our names, without Llama's; and all files may be read by the same users."""
    _, folder = runs["svformer"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    names = load_file(folder / "model.safetensors").keys()
    assert names == {f"model.{name}" for name, _ in checkpoint.load(folder).named_parameters()}
