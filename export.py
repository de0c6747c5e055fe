"""Write a trained model as a Hugging Face folder, for transformers, lm-eval and whatever else reads such folders.

    python export.py out/svformer --out_dir=exports/svformer
    python export.py out/vanilla --out_dir=exports/vanilla --dtype=bfloat16

vanilla, gqa2, gqa4, gqa8 and mqa become plain Llamas, unless they have arch=gpt2 or rope_scaling. Every other model
brings its code along. transformers writes the folder and loads it again. We compare its logits (of a full pass, and as
it generates) and its token ids with ours before the folder gets its name.
Read first: hf/layout.py and hf/modeling_nanoresformer.py.
"""

import dataclasses
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import checkpoint
from common.files import write_text, writing
from configurator import UserError, check_fields, need, run, setting
from hf.layout import fast_tokenizer, is_plain_llama, is_tied, to_llama
from value_modes import TABLE

HERE = Path(__file__).parent
# The wrapper for transformers, and all that it imports of ours. It lands in one flat folder.
CODE = (
    "configurator.py", "value_modes.py", "model.py", "net/rules.py",
    "net/layers.py", "net/loss.py", "hf/modeling_nanoresformer.py",
)  # fmt: skip
CLASSES = {
    "AutoConfig": "modeling_nanoresformer.NanoResFormerConfig",
    "AutoModelForCausalLM": "modeling_nanoresformer.NanoResFormerForCausalLM",
    "AutoModel": "modeling_nanoresformer.NanoResFormerModel",
}


@dataclass(frozen=True)
class ExportConfig:
    """Every setting of export.py."""

    run: str = setting("", "run or checkpoint file; empty = the newest run in out/", positional=True, group="Model")
    which: Literal["last", "best"] = setting("last", "a run's last checkpoint, or its best by validation loss")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the weights")
    out_dir: str = setting("", "the new folder; empty = exports/<name of the run>", group="Result")

    def __post_init__(self):
        check_fields(self)


def to_transformers(model, start, end):
    """A model of transformers with our weights: LlamaForCausalLM if that can express the mode, else our own class.
    start, end: the ids that begin a sequence and that end it."""
    if is_plain_llama(model.cfg):
        return to_llama(model, start, end)
    wrapper = need("hf.modeling_nanoresformer", "transformers")
    shape = dataclasses.asdict(model.cfg)
    config = wrapper.NanoResFormerConfig(shape=shape, bos_token_id=start, eos_token_id=end, auto_map=CLASSES)
    peer = wrapper.NanoResFormerForCausalLM(config)
    peer.model.load_state_dict(model.state_dict())
    return peer


def write_code(folder):
    """Our files as transformers' loader wants them: one flat folder, in which they import each other relatively."""
    names = [Path(file).stem for file in CODE]
    for file in CODE:
        source = (HERE / file).read_text(encoding="utf-8")
        source = re.sub(rf"^from (?:net\.|hf\.)?({'|'.join(names)}) import", r"from .\1 import", source, flags=re.M)
        if file == CODE[-1]:  # the wrapper: early releases of version 5 take along what it imports itself, and no more
            source += "\n" + "".join(f"from .{name} import __name__ as _  # noqa\n" for name in names[:-1])
        write_text(folder / Path(file).name, source)


def write_folder(folder, path, model, tokenizer, dtype):
    """Write all files of the export of a checkpoint, `path`."""
    peer = to_transformers(model, tokenizer.start, tokenizer.end).to(getattr(torch, dtype))

    # What our own stages ask of such a folder is in its config.json. gqa4 and the like are plain Llamas to others.
    header = checkpoint.read_header(path)
    about = {"step": header["step"], "val_loss": header["val_loss"], "tokenizer_hash": tokenizer.hash}
    about["bos"] = checkpoint.trained_with_bos(path.parent)
    about |= {} if tokenizer.is_ours else {"foreign_tokens": True}
    if header["mode"] in TABLE:
        about["value_mode"] = header["mode"]
    if is_plain_llama(model.cfg):
        about["rope_theta"] = model.cfg.rope_theta  # transformers 4 reads it here, 5 among rope_parameters
    vars(peer.config).update(about)

    peer.generation_config.pad_token_id = tokenizer.end
    if not is_plain_llama(model.cfg):  # pipelines and a bare generate() stop where the block is full
        peer.generation_config.max_length = model.cfg.block_size
    names = {i: name for name, i in tokenizer.special.items()}
    special = {"bos_token": names[tokenizer.start]} | dict.fromkeys(("eos_token", "pad_token"), names[tokenizer.end])
    how = {"model_max_length": model.cfg.block_size, "padding_side": "left", "clean_up_tokenization_spaces": False}
    made = fast_tokenizer(tokenizer, about["bos"])
    fast = need("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **special, **how)
    with writing(folder):
        peer.save_pretrained(folder)
        fast.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # safetensors makes files that nobody else may read
            weights.chmod((folder / "config.json").stat().st_mode)
    named = folder / "tokenizer_config.json"  # version 4 of transformers knows the class by its old name alone
    write_text(named, named.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    if not is_plain_llama(model.cfg):
        write_code(folder)
    start = special["bos_token"] if about["bos"] else ""
    write_text(folder / "README.md", card(folder.name, header, start, special["eos_token"], dtype))


def card(name, header, start, end, dtype):
    """The text of README.md, from a checkpoint's header: hf/card.md, for a Llama without what our own code needs.
    start, end: the tokens that begin its sequences (or "") and that end them."""
    cfg, text = header["config"], (HERE / "hf/card.md").read_text(encoding="utf-8")
    about = {"name": name, "mode": cfg.value_mode.name, "step": header["step"], "dtype": dtype, "end": end}
    about |= {"version": need("transformers").__version__, "block_size": cfg.block_size}
    about["bos"] = f"each begins with `{start}`, as in training" if start else "nothing is put before them"
    return (text.split("\nIts code")[0] if is_plain_llama(cfg) else text).format(**about)


@torch.inference_mode()
def check_export(folder, model, tokenizer, dtype):
    """Load the folder in transformers and compare it with our model on random tokens; prints the differences.
    Raises UserError if they are more than rounding, or if any token id differs."""
    transformers, how = need("transformers"), {"trust_remote_code": True}
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(folder, **how)

    model.to(getattr(torch, dtype)).float()  # rounded as the files are
    idx = torch.randint(tokenizer.n_vocab, (2, model.cfg.block_size), generator=torch.Generator().manual_seed(0))
    largest = largest_difference(model, peer, idx)

    # Random ids make words that are not tokens, so merges are compared too. transformers reads the text of a special
    # token as its id, and we do not, so we cut there.
    cuts = "|".join(map(re.escape, tokenizer.special))
    texts = [text for row in idx.tolist() for text in re.split(cuts, tokenizer.decode(row))]
    n_differ = sum(theirs.encode(text, add_special_tokens=False) != tokenizer.encode(text) for text in texts)
    print(f"logits: at most {largest:.1e} apart; token ids: {n_differ} of {len(texts)} texts differ")
    if largest > 1e-3 or n_differ:
        what = f"transformers {transformers.__version__} loads a different model from the folder, so we did not keep it"
        raise UserError(f"{what}; try version 5.23.0, or another --dtype if a weight overflows in {dtype}")


def largest_difference(model, peer, idx):
    """The largest difference in logits for token ids (B, T): in a full pass, and while transformers generates the end
    of a row. Only the latter shows that its cache arrives: releases differ in how they pass it on."""
    n_new = min(8, idx.size(1) // 2)
    how = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    prompt = idx[:1, :-n_new]
    made = peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n_new, **how)
    generated = torch.stack(made.logits, dim=1)  # (1, n_new, V)
    pairs = [(model(idx)[0], peer(idx).logits), (model(made.sequences)[0][:, -n_new - 1 : -1], generated)]
    return max((ours - theirs).abs().nan_to_num(math.inf).max().item() for ours, theirs in pairs)


def main(cfg: ExportConfig):
    path = checkpoint.find(cfg.run, cfg.which)
    if checkpoint.is_hf_file(path):
        raise UserError(f"{path.parent} is already a Hugging Face folder; name a run of train.py")
    out = Path(cfg.out_dir or Path("exports", path.parent.resolve().name))
    if out.exists():
        raise UserError(f"{out} already exists; remove it, or choose another --out_dir")
    transformers = need("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = checkpoint.load(path), checkpoint.load_tokenizer(path)

    # The folder gets its name at the end, so nobody finds half an export, or one that is another model.
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as work:
        new = Path(work, out.name)
        write_folder(new, path, model, tokenizer, cfg.dtype)
        check_export(new, model, tokenizer, cfg.dtype)
        new.rename(out)
    origin = checkpoint.run_settings(path.parent).get("init_from", "")
    if origin and is_tied(origin):
        print(f"note: {origin} ties its head to its embeddings; {out} does not, because they were trained separately")
    print(f"{out} is ready: {model.cfg.value_mode.name}, step {checkpoint.read_header(path)['step']}, {cfg.dtype}")


if __name__ == "__main__":
    run(main, __doc__)
