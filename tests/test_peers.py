"""What the card of an export promises of peft, trl, ONNX and pipelines. `make test-peers` installs them."""

import warnings

import pytest
import torch
from conftest import byte_tokenizer, tiny, tokens

import export
from common import checkpoint

transformers = pytest.importorskip("transformers")

from test_export import OWN_CODE, close, wrapped  # noqa: E402


@pytest.fixture(params=("svformer", "resformer_learned", "denseformer"))
def model(request):
    return wrapped(tiny(request.param).float(), bos_token_id=0, eos_token_id=0)


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.parametrize("mode,arch", [*((mode, "llama") for mode in OWN_CODE), ("vanilla", "gpt2")])
def test_lora(mode, arch, tmp_path):
    """An adapter of all linear layers begins as the model and learns. It can be saved and loaded, and so can the model
    that it merges into, by us too."""
    peft, tokenizer, idx = pytest.importorskip("peft"), byte_tokenizer(), tokens((2, 8))
    of_run = tiny(mode, arch=arch, vocab_size=tokenizer.n_vocab).float()
    path = checkpoint.save(tmp_path, 1, of_run, tokenizer.hash)
    export.write_folder(tmp_path / "hf", path, of_run, tokenizer, "float32")
    model = loaded(tmp_path / "hf")
    right, before = model(idx).logits, model(idx, labels=idx).loss
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}

    torch.manual_seed(0)  # A starts from numbers of torch's own stream
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
    found = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert found == linear - {"model.head"}  # which peft leaves out
    close(adapted(idx).logits, right)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(4):
        adapted(idx, labels=idx).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert adapted(idx, labels=idx).loss < before

    learned = adapted.eval()(idx).logits
    adapted.save_pretrained(tmp_path / "adapter")
    close(peft.PeftModel.from_pretrained(loaded(tmp_path / "hf"), tmp_path / "adapter")(idx).logits, learned)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    close(loaded(tmp_path / "merged")(idx).logits, learned, atol=1e-4)  # W + B A is rounded
    close(checkpoint.load(tmp_path / "merged")(idx)[0], learned, atol=1e-4)


def word_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 61)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **names)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sft(model, packing, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{1 + (i + j) % 9}" for j in range(12)) for i in range(16)]}
    )
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    how = dict(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, max_length=16, packing=packing)
    how |= dict(report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, learning_rate=1e-2)
    trainer = trl.SFTTrainer(model, trl.SFTConfig(**how), train_dataset=texts, processing_class=word_tokenizer())
    assert trainer.train().training_loss > 0
    assert any(not torch.equal(before[name], parameter.cpu()) for name, parameter in model.named_parameters())


def test_onnx(model, tmp_path):
    """The logits of onnxruntime, for rows and lengths that the export did not see."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids):
            return self.inner(input_ids, use_cache=False).logits

    path, dims = tmp_path / "model.onnx", {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Logits(), (tokens((2, 8)),), str(path), dynamo=True, dynamic_shapes=(dims,), verbose=False)
    session, idx = runtime.InferenceSession(str(path)), tokens((3, 20))
    (found,) = session.run(None, {session.get_inputs()[0].name: idx.numpy()})
    close(torch.from_numpy(found), model(idx).logits.detach())


def test_a_pipeline_writes_until_the_block_is_full(model):
    """And says nothing about lengths; nor does generate(), with max_new_tokens or without."""
    model.generation_config.max_length = model.model.cfg.block_size  # as export.py writes it
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # a random model may end early
    tokenizer, said = word_tokenizer(), []
    tokenizer.eos_token_id = None
    handler = transformers.logging.logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    transformers.logging.add_handler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
            assert model.generate(ids, do_sample=False).size(1) == 32
            assert model.generate(ids, do_sample=False, max_new_tokens=4).size(1) == 7
            pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
            (made,) = pipe("w1 w2 w3", do_sample=False, return_tensors=True)
            assert len(made["generated_token_ids"]) == 32
    finally:
        transformers.logging.remove_handler(handler)
    assert not [text for text in (*said, *(str(w.message) for w in warned)) if "max_" in text]


def test_a_graph_without_breaks(model):
    """Of any length: the second call finds that lengths differ."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (8, 5, 20):
        idx = tokens((2, length))
        close(compiled(idx).logits, model(idx).logits)
