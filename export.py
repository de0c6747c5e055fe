"""Write a trained model as a Hugging Face folder, for transformers, lm-eval and whatever reads such folders.

    python export.py out/svformer --out_dir=hf/svformer
    python export.py out/vanilla --out_dir=hf/vanilla --dtype=bfloat16 --max_shard_size=2GB

vanilla of arch=llama becomes a plain Llama; every other model brings its code along (docs/stages.md). Before the folder
gets its name, transformers loads it, and logits and token ids are compared with ours, unless --check=false.
Read before: hf.py.
"""

import re
from dataclasses import dataclass
from typing import Literal

from oldconfig import UserError, command_line, need, run_main, setting


@dataclass(frozen=True)
class ExportConfig:
    """Every setting of export.py."""

    run: str = setting("", "run or checkpoint file; empty = the newest run below out/", positional=True, group="Model")
    which: Literal["last", "best"] = setting("last", "checkpoint of a run: the last, or the best in validation")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the weights")
    out_dir: str = setting("", "the new folder; empty = hf/<name of the run>", group="Result")
    max_shard_size: str = setting("5GB", "most of one weights file")
    overwrite: bool = setting(False, "replace out_dir if it exists")
    check: bool = setting(True, "load it in transformers and compare", group="Check")
    data_dir: str = setting("", "prepared data for the check; empty = what the run was trained on")

    def __post_init__(self):
        if not re.fullmatch(r"[1-9]\d*[KMG]B", self.max_shard_size):
            raise ValueError(f"max_shard_size={self.max_shard_size} is not a size such as 500MB or 5GB")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(ExportConfig, __doc__)

import dataclasses
import math
import shutil
from pathlib import Path

import torch

import checkpoint
from data import EOT, Corpus
from describe import count_parameters
from hf import OURS, hf_parts, is_hf_folder, is_plain_llama, llama_config, require_finite, tokenizer_json
from oldfiles import hold, read_json, write_json, write_text, writing_tensors
from value_modes import TABLE

HERE = Path(__file__).parent
MODULES = (
    "configurator",
    "oldconfig",
    "value_modes",
    "model",
    "modeling_nanoresformer",
)  # each imports only those before it
CLASSES = {"AutoConfig": "NanoResFormerConfig", "AutoModelForCausalLM": "NanoResFormerForCausalLM"}
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

{bos}`<|endoftext|>` in a text becomes the end-of-text id, unless the tokenizer gets split_special_tokens=True.
"""


def tensors_of(model):
    """{name in the folder: tensor} of every parameter."""
    if is_plain_llama(model.cfg):
        return {name: parameter.detach()[rows].clone() for name, parameter, rows in hf_parts(model)}
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def config_of(model, header, dtype):
    """The dict of config.json."""
    eot = header["eot"]
    if is_plain_llama(model.cfg):
        about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **llama_config(model.cfg, eot)}
    else:
        places = {auto: f"modeling_nanoresformer.{name}" for auto, name in CLASSES.items()}
        about = {"model_type": OURS, "architectures": [CLASSES["AutoModelForCausalLM"]], "auto_map": places}
        about |= {"shape": dataclasses.asdict(model.cfg), "bos_token_id": eot, "eos_token_id": eot}
    kept = {"tokenizer_hash": header["tokenizer"], "step": header["step"], "val_loss": header["val_loss"]}
    if header["mode"] in TABLE:
        kept["value_mode"] = header["mode"]  # gqa4 and its like are plain Llamas too
    return {**about, "dtype": dtype, **kept}


def as_module(source):
    """The text of one of our files as a file of a package that transformers loads: imports of our own files become
    relative; what needs files that are not there is cut (the command line, the flash kernel)."""
    source = re.sub(rf"^from ({'|'.join(MODULES)}) import", r"from .\1 import", source, flags=re.M)
    return source.partition('\n\nif __name__ == "__main__":')[0] + "\n"  # without its command line


def card(path, model, header):
    """README.md: what the model is, and how it was trained, as far as the run's folder says it."""
    facts = dict.fromkeys(("data_dir", "data", "command", "commit", "torch"), "unknown")
    for file in ("config.json", "env.json"):
        if (path.parent / file).exists():
            facts |= read_json(path.parent / file, "what train.py wrote")
    facts |= {**header, "cfg": model.cfg, "parameters": count_parameters(model.cfg)}
    facts["val_loss"] = "unknown" if header["val_loss"] is None else f"{header['val_loss']:.4f} nats per token"
    facts["equation"] = "The value mode is in config.json, under shape"
    if header["mode"] in TABLE:
        _, equation, source = TABLE[header["mode"]]
        facts["equation"] = f"Value mode, for layers n >= 2: {equation} ({source})"
    facts["bos"] = ""
    if checkpoint.trained_with_bos(path.parent):
        facts["bos"] = "Each sequence of its training began with `<|endoftext|>`, so begin each prompt with it.\n"
    facts["trust"] = "" if is_plain_llama(model.cfg) else ", trust_remote_code=True"
    return CARD.format(**facts)


def write_folder(folder, path, model, tokenizer, cfg):
    """Write all files of the export; returns the step of the checkpoint."""
    header = checkpoint.read_header(path) | {"eot": tokenizer.eot}
    folder.mkdir(parents=True)
    tensors = {name: t.to(getattr(torch, cfg.dtype)) for name, t in tensors_of(model).items()}
    for name, tensor in tensors.items():
        require_finite(f"{path} as {cfg.dtype}: {name}", tensor)
    with writing_tensors(folder):
        need("huggingface_hub").save_torch_state_dict(tensors, folder, max_shard_size=cfg.max_shard_size)
    bos = checkpoint.trained_with_bos(path.parent)
    write_json(folder / "config.json", config_of(model, header, cfg.dtype) | {"bos": bos})
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # the library makes them private
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    write_json(folder / "generation_config.json", ids | {"max_length": model.cfg.block_size})
    write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOT)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.cfg.block_size, **names}
    about |= {"padding_side": "left", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", about)
    write_text(folder / "README.md", card(path, model, header))
    if not is_plain_llama(model.cfg):
        for name in MODULES:
            write_text(folder / f"{name}.py", as_module((HERE / f"{name}.py").read_text(encoding="utf-8")))
    return header["step"]


@torch.inference_mode()
def check_export(folder, model, tokenizer, corpus, dtype):
    """Load the folder in transformers and compare logits and token ids on validation text; prints the differences.
    Raises UserError if they are not those of rounding, or if any id differs."""
    transformers = need("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    how = {"trust_remote_code": True}
    try:
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
    except Exception as e:  # of the package, of tokenizers, of our own code inside of it
        why = f"{type(e).__name__}: {e}"
        raise UserError(f"transformers {transformers.__version__} cannot read the export: {why}") from None
    model.to(getattr(torch, dtype)).float()  # rounded as the files are
    largest, n_tokens, n_differ, texts = 0.0, 0, 0, []
    for d, first, last in corpus.val_parts(2, most=2):
        x, _ = corpus.val_batch(corpus.domains[d], first, last)
        idx = torch.from_numpy(x)
        largest = max(largest, (model(idx)[0] - peer(idx).logits).abs().nan_to_num(math.inf).max().item())
        n_tokens += idx.numel()
        texts += tokenizer.decode(x.ravel().tolist()).split(EOT)
    for text in texts:
        ids = tokenizer.encode(text)
        same = their_tokenizer.encode(text, add_special_tokens=False) == ids
        if not same or their_tokenizer.decode(ids) != tokenizer.decode(ids):
            n_differ += 1
    apart = f"logits: at most {largest:.1e} apart, {n_tokens:,} tokens"
    print(f"{apart}; token ids: {n_differ} of {len(texts)} texts differ")
    if largest > 1e-3 or n_differ:
        raise UserError(
            f"transformers {transformers.__version__} makes another model of the folder: nothing is written"
        )


def main(cfg: ExportConfig):
    path = checkpoint.find_finished(cfg.run, cfg.which)
    if checkpoint.is_hf_file(path):
        raise UserError(f"{path.parent} is a Hugging Face folder already; name a run of train.py")
    out = Path(cfg.out_dir or Path("hf", path.parent.resolve().name))
    if not out.name:
        raise UserError(f"{out} cannot be replaced as a whole; choose a new folder as --out_dir")
    new, old = (out.with_name(f".{out.name}.{kind}") for kind in ("new", "old"))
    with hold(out.parent, f".{out.name}.lock"):
        if old.exists() and not out.exists():  # a process was killed between its two renames
            old.rename(out)
        if out.exists() and not (out.is_dir() and is_hf_folder(out)):
            raise UserError(f"{out} exists and is no Hugging Face folder; choose another --out_dir")
        if out.exists() and not cfg.overwrite:
            raise UserError(f"{out} exists; choose another --out_dir, or replace it with --overwrite")
        export(path, cfg, out, new, old)


def export(path, cfg, out, new, old):
    """Make the export of a weights file in folder `new`, then give it the name `out`. What is there becomes `old`, and
    is removed at the end."""
    model, tokenizer, corpus = checkpoint.load(path), checkpoint.load_tokenizer(path), None
    if cfg.check:
        need("transformers")
        remedy = "prepared data by --data_dir, or --check=false"
        data_dir, mixture = checkpoint.trained_on(path.parent, cfg.data_dir, remedy)
        corpus = Corpus(data_dir, model.cfg.block_size, mixture=mixture)
        if corpus.tokenizer.hash != tokenizer.hash:
            raise UserError(f"{data_dir} was made with another tokenizer than {path}; name {remedy}")
    for folder in (new, old):  # of a process that was killed
        shutil.rmtree(folder, ignore_errors=True)
    try:
        step = write_folder(new, path, model, tokenizer, cfg)
        if corpus:
            check_export(new, model, tokenizer, corpus, cfg.dtype)
        if out.exists():
            out.rename(old)
        new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{out} is ready: {model.cfg.value_mode.name}, step {step}, {cfg.dtype}")


if __name__ == "__main__":
    run_main(main, SETTINGS)
