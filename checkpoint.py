"""Checkpoints: weights in safetensors with the mode and plan in the header, training state beside them, no pickle.

A run's folder holds, per saved step,

    step_00000400.safetensors          weights; header: format, step, val_loss, mode, config, plan, tokenizer (hash)
    step_00000400.state.safetensors    optimizer, random generator, loss scaler: what only --resume needs

The weights are written last, each file atomically: a step whose .safetensors exists is complete, whatever happened.
"""

import contextlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from configurator import UserError
from data import Tokenizer
from files import read_json, read_tensors, write_atomic
from hf import load_hf  # noqa: F401 - checkpoint.load_hf is its public name
from model import GPT
from value_modes import ModelConfig, mode_name, plan_layers

FORMAT = "nanoresformer/1"


def _write(path, tensors, metadata):
    def save(temporary):
        try:
            # in one entry: the library writes several in an order that changes from process to process
            save_file(tensors, temporary, metadata={"nanoresformer": json.dumps(metadata)})
        except SafetensorError as e:
            raise UserError(
                f"cannot write {path}: {e}; free some space, the checkpoints before it are intact"
            ) from None

    write_atomic(path, save)


def _metadata(path):
    """The dict that `_write` stored in the header of a file, {} if it is not one of ours."""
    try:
        return json.loads((read_tensors(path, lambda f: f.metadata()) or {})["nanoresformer"])
    except (KeyError, json.JSONDecodeError):
        return {}


def plan_dict(cfg):
    """The layer plan as JSON-able values."""
    layers = []
    for layer in plan_layers(cfg):
        sources = [[] for _ in cfg.value_mode.residuals]
        for mix in layer.mixes:
            sources[mix.index] = [s if isinstance(s, int) else -1 - int(s.removeprefix("table ")) for s in mix.sources]
        layers.append({"owner": layer.owner, "sources": sources})
    return layers


def read_header(path):
    """What a weights file says of itself: format, step, val_loss (or None), mode, config, plan, tokenizer (its hash).
    Raises UserError if it is not one of ours or its plan is not what this code makes of its config."""
    header = _metadata(path)
    if header.get("format") != FORMAT:
        raise UserError(f"{path} is not a {FORMAT} checkpoint of train.py (for Hugging Face folders there is load_hf)")
    try:
        same = header["plan"] == plan_dict(ModelConfig.from_dict(header["config"]))
    except (KeyError, TypeError, ValueError):  # a setting that this code does not know, or no longer allows
        same = False
    if not same:
        raise UserError(
            f"{path} was trained with another layer plan than this model.py makes of its config; use that version"
        )
    return header


def steps(run):
    """{step: weights file} of a run's folder, in rising order."""
    found = {int(m[1]): p for p in Path(run).glob("step_*.safetensors") if (m := re.fullmatch(r"step_(\d+)", p.stem))}
    return dict(sorted(found.items()))


def find(run_or_file, which="last"):
    """The weights file that is meant: a file itself, or the "last" or "best" (lowest validation loss) one of a run."""
    path = Path(run_or_file)
    if path.is_file():
        return path
    files = steps(path)
    if not files:
        raise UserError(
            f"{path} holds no checkpoint (step_*.safetensors); train one with `python train.py --out_dir={path}`"
        )
    return (best(path) if which == "best" else None) or list(files.values())[-1]


def best(run):
    """The weights file of a run with the lowest validation loss, or None; damaged ones do not count."""
    losses = {}
    for path in steps(run).values():
        with contextlib.suppress(UserError):
            losses[path] = read_header(path)["val_loss"]
    return min((p for p, loss in losses.items() if loss is not None), key=losses.get, default=None)


def state_file(weights_file):
    return weights_file.with_suffix(".state.safetensors")


def load(run_or_file, which="last", device="cpu", attn="sdpa"):
    """The model of a checkpoint, in eval mode, fp32, on `device`. run_or_file, which: see `find`."""
    path = find(run_or_file, which)
    cfg = ModelConfig.from_dict(read_header(path)["config"])
    model = GPT(cfg, attn=attn, init=False)
    load_weights(model, path)
    return model.to(device).eval()


def load_weights(model, path):
    """Fill `model` from a weights file; raises UserError unless names and shapes are the model's own."""
    tensors = read_tensors(path, lambda f: {k: f.get_tensor(k) for k in f.keys()})
    mine = {k: v.shape for k, v in model.state_dict().items()}
    wrong = sorted(k for k in mine.keys() | tensors.keys() if k not in tensors or mine.get(k) != tensors[k].shape)
    if wrong:
        raise UserError(f"{path} does not fit the model: tensors {', '.join(wrong[:3])} differ ({len(wrong)} in all)")
    model.load_state_dict(tensors)


def save(run, step, model, tokenizer_hash, val_loss=None, optimizer=None, scaler=None, keep=2):
    """Write step's weights and training state into folder `run`, then delete all but the last `keep` and the best."""
    weights_file = Path(run) / f"step_{step:08d}.safetensors"
    if optimizer is not None:
        tensors, metadata = training_state(model, optimizer, scaler)
        _write(state_file(weights_file), tensors, metadata)
    header = dict(format=FORMAT, step=step, val_loss=val_loss, mode=mode_name(model.cfg.value_mode))
    header |= dict(config=model.cfg.to_dict(), plan=plan_dict(model.cfg), tokenizer=tokenizer_hash)
    _write(weights_file, {k: v.contiguous() for k, v in model.state_dict().items()}, header)
    kept = {weights_file, best(run), *list(steps(run).values())[-keep:]}
    for old in steps(run).values():
        if keep and old not in kept:
            old.unlink()  # first the file that says the step is there
            state_file(old).unlink(missing_ok=True)
    return weights_file


def clean(run):
    """Remove what a killed run left half-written in its folder."""
    for path in Path(run).glob(".*.tmp"):
        path.unlink()
    for path in Path(run).glob("step_*.state.safetensors"):
        if not path.with_name(path.name.replace(".state", "")).exists():
            path.unlink()


def training_state(model, optimizer, scaler):
    """(tensors, metadata): the optimizer's state by parameter name, the random generators, the scaler's numbers."""
    tensors = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng_cuda"] = torch.cuda.get_rng_state()
    for name, p in model.named_parameters():
        tensors |= {f"{key}/{name}": value.contiguous() for key, value in optimizer.state[p].items()}
    return tensors, {"scaler": scaler.state_dict() if scaler else {}}


def resume(weights_file, model, optimizer, scaler, tokenizer_hash):
    """Put model, optimizer, scaler and random generators back as `save` found them; returns the header.

    Raises UserError if the checkpoint is of another model (mode or shape) or another tokenizer.
    """
    header = read_header(weights_file)
    mine, its = model.cfg.to_dict(), ModelConfig.from_dict(header["config"]).to_dict()  # older ones lack newer settings
    differ = {k: (its[k], mine[k]) for k in mine if its[k] != mine[k]}
    if "value_mode" in differ:
        asked = mode_name(model.cfg.value_mode)
        raise UserError(f"{weights_file} is a {header['mode']} model, not {asked}; set value_mode or another out_dir")
    if differ:
        what = ", ".join(f"{k} {old} instead of {new}" for k, (old, new) in differ.items())
        raise UserError(f"{weights_file} is another model: {what}; use its settings or another out_dir")
    if header["tokenizer"] != tokenizer_hash:
        raise UserError(
            f"{weights_file} was trained with another tokenizer than this data; use its data or another out_dir"
        )
    load_weights(model, weights_file)
    tensors = read_tensors(state_file(weights_file), lambda f: {k: f.get_tensor(k) for k in f.keys()})
    state = {
        i: {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for i, name in enumerate(name_order(model, optimizer))
        if f"step/{name}" in tensors  # AdamW has no state before its first step, and a scaler may have skipped all
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler and (numbers := _metadata(state_file(weights_file))["scaler"]):
        scaler.load_state_dict(numbers)
    torch.set_rng_state(tensors["rng"])
    if torch.cuda.is_available() and "rng_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng_cuda"])
    return header


def name_order(model, optimizer):
    """Parameter names in the order in which the optimizer numbers its parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def load_tokenizer(weights_file):
    """The tokenizer beside a checkpoint; raises UserError if it is not there or not the one of the training data."""
    tokenizer = Tokenizer.load(Path(weights_file).parent / "tokenizer.json")
    if tokenizer.hash != read_header(weights_file)["tokenizer"]:
        raise UserError(
            f"{Path(weights_file).parent}/tokenizer.json is not the tokenizer {weights_file} was trained with"
        )
    return tokenizer


def trained_on(folder, given, instead):
    """(data folder, mixture or None) that a run in `folder` was trained on, or `given` if that is not empty. Raises
    UserError, which asks for `instead`, if it is unknown or not here."""
    config = folder / "config.json"
    trained = read_json(config, "the config of a run") if config.exists() else {}
    trained = trained if isinstance(trained, dict) else {}
    data_dir = given or str(trained.get("data_dir", ""))
    if not data_dir or not Path(data_dir).is_dir():
        what = f"was trained on {data_dir}, which is not here" if data_dir else "does not say what it was trained on"
        raise UserError(f"{folder} {what}; name {instead}")
    return data_dir, None if given else trained.get("mixture")
