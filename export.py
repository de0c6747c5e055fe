"""Write a trained model as a Hugging Face folder, for transformers, lm-eval and whatever reads such folders.

    python export.py out/svformer --out_dir=hf/svformer
    python export.py out/vanilla --out_dir=hf/vanilla --dtype=bfloat16 --max_shard_size=2GB

vanilla of arch=llama becomes a plain Llama; every other model brings its code along. Before the folder gets its name,
transformers loads it, and we compare its logits, its generated text and its token ids with ours, unless --check=false.
Read before: hf.py.
"""

import dataclasses
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import checkpoint
from common.data import Corpus
from common.files import hold, read_record, write_json, write_text, writing
from common.hf import OURS, is_hf_folder, is_plain_llama, llama_config, named_tensors, tokenizer_json
from common.tokenizer import EOT
from configurator import UserError, check_fields, need, run, setting
from train import ENVIRONMENT
from value_modes import TABLE

HERE = Path(__file__).parent
# The wrapper for transformers, and all that it imports of ours. It lands in one flat folder.
CODE = (
    "configurator.py", "value_modes.py", "model.py", "common/problems.py",
    "common/layers.py", "common/loss.py", "common/modeling_nanoresformer.py",
)  # fmt: skip
CLASSES = {
    "AutoConfig": "modeling_nanoresformer.NanoResFormerConfig",
    "AutoModelForCausalLM": "modeling_nanoresformer.NanoResFormerForCausalLM",
}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [nanoresformer]
---

# {mode}

{equation}. Value modes are explained in arXiv 2410.17897.
{parameters:,} parameters, {cfg.n_layer} layers, {cfg.n_head} heads, width {cfg.n_embd}, length {cfg.block_size}.
Step {step:,}, mean validation loss {val_loss}.
Trained on {data_dir} (hash {data}), last started with `{command}`, commit {commit}, torch {torch}.

```python
from transformers import pipeline

generate = pipeline("text-generation", "<this folder>"{trust})
```

{start}`<|endoftext|>` in a text becomes the end-of-text id, unless the tokenizer gets split_special_tokens=True.
"""
BOS = "Each sequence of its training began with `<|endoftext|>`, so begin each prompt with it.\n"


@dataclass(frozen=True)
class ExportConfig:
    """Every setting of export.py."""

    run: str = setting("", "run or checkpoint file; empty = the newest run in out/", positional=True, group="Model")
    which: Literal["last", "best"] = setting("last", "a run's last checkpoint, or its best in validation")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the weights")
    out_dir: str = setting("", "the new folder; empty = hf/<name of the run>", group="Result")
    max_shard_size: str = setting("5GB", "a weights file is split above this size")
    overwrite: bool = setting(False, "replace out_dir if it exists")
    check: bool = setting(True, "load the folder in transformers and compare", group="Check")
    data_dir: str = setting("", "prepared data for the check; empty = what the run was trained on")

    def __post_init__(self):
        check_fields(self)
        if not re.fullmatch(r"[1-9]\d*[KMG]B", self.max_shard_size):
            raise UserError(f"max_shard_size={self.max_shard_size} is not a size such as 500MB or 5GB")


def config_of(model, header, tokenizer, dtype):
    """The dict of config.json."""
    if is_plain_llama(model.cfg):
        about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **llama_config(model.cfg, tokenizer.eot)}
    else:
        about = {"model_type": OURS, "architectures": ["NanoResFormerForCausalLM"], "auto_map": CLASSES}
        about |= {"shape": dataclasses.asdict(model.cfg), "bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    about |= {"dtype": dtype, "tokenizer_hash": tokenizer.hash}
    about |= {name: header[name] for name in ("step", "val_loss", "bos")}
    if header["mode"] in TABLE:
        about["value_mode"] = header["mode"]  # gqa4 and its like are plain Llamas too
    return about


def card(run, model, header):
    """README.md: what the model is, and how it was trained, as far as the run's folder says it."""
    facts = dict.fromkeys(("data_dir", "data", "command", "commit", "torch"), "unknown")
    facts |= checkpoint.run_settings(run)
    if (run / "env.json").exists():
        facts |= read_record(run / "env.json", ENVIRONMENT)
    facts |= header | {"cfg": model.cfg, "parameters": sum(p.numel() for p in model.parameters())}
    facts["val_loss"] = "unknown" if header["val_loss"] is None else f"{header['val_loss']:.4f} nats per token"
    facts["equation"] = "The value mode is in config.json, under shape"
    if header["mode"] in TABLE:
        _, equation, source = TABLE[header["mode"]]
        facts["equation"] = f"Value mode, for layers n >= 2: {equation} ({source})"
    facts["start"] = BOS if header["bos"] else ""
    facts["trust"] = "" if is_plain_llama(model.cfg) else ", trust_remote_code=True"
    return CARD.format(**facts)


def write_weights(folder, model, cfg):
    tensors = {}
    for name, tensor in named_tensors(model, "llama" if is_plain_llama(model.cfg) else OURS).items():
        tensors[name] = tensor.to(getattr(torch, cfg.dtype), copy=True)
        if not tensors[name].isfinite().all():
            raise UserError(f"{name} has NaN or infinity in it as {cfg.dtype}; choose another --dtype or checkpoint")
    with writing(folder):
        need("huggingface_hub").save_torch_state_dict(tensors, folder, max_shard_size=cfg.max_shard_size)


def write_code(folder):
    """Our files as transformers' loader wants them: one flat folder, in which they import each other relatively."""
    names = "|".join(Path(file).stem for file in CODE)
    for file in CODE:
        source = (HERE / file).read_text(encoding="utf-8")
        source = re.sub(rf"^from (?:common\.)?({names}) import", r"from .\1 import", source, flags=re.M)
        write_text(folder / Path(file).name, source)


def write_folder(folder, path, model, tokenizer, cfg):
    """Write all files of the export of a checkpoint, `path`."""
    header = checkpoint.read_header(path) | {"bos": checkpoint.trained_with_bos(path.parent)}
    length = model.cfg.block_size
    folder.mkdir(parents=True)
    write_weights(folder, model, cfg)
    write_json(folder / "config.json", config_of(model, header, tokenizer, cfg.dtype))
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # the library lets only their owner read them
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    write_json(folder / "generation_config.json", ids | {"max_length": length})
    write_text(folder / "tokenizer.json", tokenizer_json(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "padding_side": "left"}
    about |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT) | {"clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", about)
    write_text(folder / "README.md", card(path.parent, model, header))
    if not is_plain_llama(model.cfg):
        write_code(folder)


@torch.inference_mode()
def check_export(folder, model, tokenizer, corpus, dtype):
    """Load the folder in transformers and compare it with our model on validation text; prints the differences.
    Raises UserError if they are more than rounding, or if any token id differs."""
    transformers = need("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    how = {"trust_remote_code": True}
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
    model.to(getattr(torch, dtype)).float()  # rounded as the files are
    largest, n_tokens, n_differ, texts = 0.0, 0, 0, []
    for d, first, last in corpus.val_parts(2, most=2):
        x, _ = corpus.val_batch(corpus.domains[d], first, last)
        largest = max(largest, largest_difference(model, peer, torch.from_numpy(x)))
        n_tokens += x.size
        texts += tokenizer.decode(x.ravel().tolist()).split(EOT)
    for text in texts:
        ids = tokenizer.encode(text)
        same = their_tokenizer.encode(text, add_special_tokens=False) == ids
        if not same or their_tokenizer.decode(ids) != tokenizer.decode(ids):
            n_differ += 1
    logits = f"logits: at most {largest:.1e} apart, {n_tokens:,} tokens"
    print(f"{logits}; token ids: {n_differ} of {len(texts)} texts differ")
    if largest > 1e-3 or n_differ:
        version = transformers.__version__
        raise UserError(f"transformers {version} makes another model of the folder, so we did not keep it; try 5.23.0")


def largest_difference(model, peer, idx):
    """The largest difference in logits for token ids (B, T): in a full pass, and while transformers generates the end
    of a row. Only the latter shows that its cache arrives: releases differ in how they pass it on."""
    n_new = min(8, idx.size(1) // 2)
    how = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    made = peer.generate(idx[:1, :-n_new], max_new_tokens=n_new, **how)
    generated = torch.stack(made.logits, dim=1)  # (1, n_new, V)
    pairs = [(model(idx)[0], peer(idx).logits), (model(made.sequences)[0][:, -n_new - 1 : -1], generated)]
    return max((ours - theirs).abs().nan_to_num(math.inf).max().item() for ours, theirs in pairs)


def main(cfg: ExportConfig):
    path = checkpoint.find(cfg.run, cfg.which)
    if checkpoint.is_hf_file(path):
        raise UserError(f"{path.parent} is a Hugging Face folder already; name a run of train.py")
    out = Path(cfg.out_dir or Path("hf", path.parent.resolve().name))
    if not out.name:
        raise UserError(f"{out} cannot be replaced as a whole; choose a new folder as --out_dir")
    if out.exists() and not (out.is_dir() and is_hf_folder(out)):
        raise UserError(f"{out} exists and is no Hugging Face folder; choose another --out_dir")

    model, tokenizer, corpus = checkpoint.load(path), checkpoint.load_tokenizer(path), None
    if cfg.check:
        need("transformers")
        remedy = "prepared data by --data_dir, or --check=false"
        data_dir, mixture = checkpoint.trained_on(path.parent, cfg.data_dir, remedy)
        corpus = Corpus(data_dir, model.cfg.block_size, mixture=mixture)
        if corpus.tokenizer.hash != tokenizer.hash:
            raise UserError(f"{data_dir} was made with another tokenizer than {path}; name {remedy}")

    # We make the export in folder `new`. What is there becomes `old`, then `new` gets its name.
    new, old = (out.with_name(f".{out.name}.{kind}") for kind in ("new", "old"))
    with hold(out.parent, f".{out.name}.lock"):
        if old.exists() and not out.exists():  # a process was killed between its two renames
            old.rename(out)
        if out.exists() and not cfg.overwrite:
            raise UserError(f"{out} exists; choose another --out_dir, or replace it with --overwrite")
        for folder in (new, old):  # of a process that was killed
            shutil.rmtree(folder, ignore_errors=True)
        try:
            write_folder(new, path, model, tokenizer, cfg)
            if corpus:
                check_export(new, model, tokenizer, corpus, cfg.dtype)
            if out.exists():
                out.rename(old)
            new.rename(out)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    print(f"{out} is ready: {model.cfg.value_mode.name}, step {checkpoint.read_header(path)['step']}, {cfg.dtype}")


if __name__ == "__main__":
    run(main, __doc__)
