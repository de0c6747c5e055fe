"""Checkpoints: weights in safetensors with the mode and plan in the header, training state beside them, no pickle.

A run's folder holds, for each saved step,

    step_00000400.safetensors          weights, with a HEADER
    step_00000400.state.safetensors    optimizer, random generators, loss scaler: what --resume needs besides

Both carry checksums of their tensors and of their header, which are compared when they are read.

The weights are written last, each file atomically: a step whose .safetensors exists is complete, whatever happened.
Read before: model.py, train.py. Models in Hugging Face layout are read by hf.py.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from data import COUNT, Tokenizer
from hf import HFTokenizer, hf_config, hf_files, is_hf_folder, load_hf, made_by_us, parts_of
from model import GPT
from oldconfig import UserError, convert
from oldfiles import (
    OBJECT,
    parse_object,
    read_json,
    read_tensors,
    sealed,
    sha256,
    unsealed,
    write_atomic,
    writing_tensors,
)
from runtime import whole
from value_modes import ModelConfig, plan_layers

HEADER = {
    "format": Literal["nanoresformer/1"],
    "step": COUNT,
    "val_loss": float | None,
    "mode": str,
    "config": ModelConfig,
    "plan": list,  # see `plan_as_json`
    "tokenizer": str,  # its hash
}
RUN = {"data_dir": str, "mixture": dict[str, float], "max_steps": COUNT}  # of a run's config.json


def checksum(tensors):
    """sha256 of {name: tensor}: their names, types, shapes and numbers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def write_tensors(path, tensors, metadata):
    """A safetensors file, written atomically. metadata: a dict, stored as JSON in the file's header, with checksums."""
    text = json.dumps(sealed({**metadata, "tensors": checksum(tensors)}))

    # one entry: the library writes several in an order that changes from process to process
    metadata = {"nanoresformer": text}
    with writing_tensors(path):
        write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata))


def read_metadata(path):
    """The dict that `write_tensors` stored in a file's header; raises UserError if it is damaged or not there."""
    text = (read_tensors(path, lambda f: f.metadata()) or {}).get("nanoresformer")
    if text is None:
        raise UserError(f"{path} is not a checkpoint of train.py")
    return unsealed(parse_object(text, OBJECT, f"the header of {path}"), path)


def source_number(source):
    """A Mix's source as files have it: the number of a layer, or -1 - t for token table t."""
    if isinstance(source, int):
        return source
    return -1 - int(source.removeprefix("table "))


def plan_as_json(cfg):
    """The plan of each layer: its owners and, for each residual, the numbers of its sources."""
    layers = []
    for layer in plan_layers(cfg):
        sources = [[] for _ in cfg.value_mode.residuals]
        for mix in layer.mixes:
            sources[mix.index] = [source_number(source) for source in mix.sources]
        layers.append({"owner": layer.owner, "sources": sources})
    return layers


def read_header(path):
    """The HEADER of a weights file; for a Hugging Face folder it has no format and no plan. Raises UserError if it is
    damaged, or if this version of the code plans its layers in another way."""
    if is_hf_file(path):
        found, config = made_by_us(path.parent), hf_config(path.parent)
        return found | {"tokenizer": found["tokenizer_hash"], "mode": config.value_mode.name, "config": config}
    header = convert(read_metadata(path), HEADER, f"the header of {path}")
    if header["plan"] != plan_as_json(header["config"]):
        message = f"{path} was trained with another layer plan than this code makes of its config; use that version"
        raise UserError(message)
    return header


def steps(run):
    """{step: weights file} of a run's folder, in rising order."""
    found = {}
    for path in Path(run).glob("step_*.safetensors"):
        if match := re.fullmatch(r"step_(\d+)", path.stem):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def runs_in_out():
    """The folders below out/ that hold a checkpoint, the one with the newest last."""
    newest = {}
    for path in Path("out").glob("**/step_*[0-9].safetensors"):
        with contextlib.suppress(FileNotFoundError):  # that run has just replaced it
            newest[path.parent] = max(newest.get(path.parent, 0), path.stat().st_mtime)
    return sorted(newest, key=newest.get)


def find(run_or_file="", which="last"):
    """The weights file that is meant: a file itself, the "last" or "best" (lowest validation loss) one of a run, or the
    first one of a Hugging Face folder. "" is the newest run below out/. Raises UserError, with the runs that do exist,
    if there is none."""
    if not run_or_file:
        runs = runs_in_out()
        run_or_file = runs[-1] if runs else "out"
    path = Path(run_or_file)
    if path.is_file():
        return path
    if is_hf_folder(path):
        return hf_files(path)[0]
    files = steps(path)
    if not files:
        runs = runs_in_out()
        there = ", ".join(str(run) for run in reversed(runs[-8:]))
        hint = f"runs that do: {there}" if runs else "no run is below out/ yet, `make demo` trains three small ones"
        raise UserError(f"{path} holds no checkpoint (step_*.safetensors); {hint}")
    last = list(files.values())[-1]
    if which == "best":
        return best(path) or last
    return last


def is_hf_file(path):
    return Path(path).name.startswith("model") and is_hf_folder(Path(path).parent)


def digest(path):
    """sha256 of the checkpoint that `find` returned; of a Hugging Face folder with its config and tokenizer."""
    if not is_hf_file(path):
        return sha256(path)
    files = [*hf_files(path.parent), path.parent / "config.json", path.parent / "tokenizer.json"]
    sums = [sha256(file) for file in files if file.exists()]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def best(run):
    """The weights file of a run with the lowest validation loss, or None; damaged ones do not count."""
    losses = {}
    for path in steps(run).values():
        with contextlib.suppress(UserError):
            loss = read_header(path)["val_loss"]
            if loss is not None:
                losses[path] = loss
    return min(losses, key=losses.get, default=None)


def state_file(weights_file):
    return weights_file.with_suffix(".state.safetensors")


def find_finished(name, which="last"):
    """`find`; raises UserError if the last checkpoint of a run is asked for, and the run is not finished."""
    path = find(name, which)
    config = path.parent / "config.json"
    if which == "last" and Path(name).is_dir() and config.exists() and not is_hf_file(path):
        step = read_header(path)["step"]
        max_steps = read_json(config, "the config of a run", RUN)["max_steps"]
        if step < max_steps:
            way_out = f"finish it with --resume=auto, or name {path} itself"
            raise UserError(f"{path.parent} is at step {step} of {max_steps}; {way_out}")
    return path


def load(run_or_file, device="cpu", dtype=torch.float32):
    """The model of a checkpoint, in eval mode, on `device`, its weights in `dtype`. run_or_file: see `find`."""
    path = find(run_or_file)
    if is_hf_file(path):
        return load_hf(path.parent, device, dtype)
    model = GPT(read_header(path)["config"], init=False)
    load_weights(model, path)
    return model.to(device, dtype).eval()


def read_checked(path):
    """(metadata, tensors) of a file of ours. Raises UserError if the checksum of the tensors is another one, or if they
    are not finite."""
    metadata = read_metadata(path)
    tensors = read_tensors(path, lambda f: {name: f.get_tensor(name) for name in f.keys()})
    if metadata.get("tensors") != checksum(tensors):
        raise UserError(f"{path} was altered: its tensors do not match their checksum; use another checkpoint")
    for name, tensor in tensors.items():
        require_finite(f"{path}: {name}", tensor)
    return metadata, tensors


def require_finite(name, tensor):
    """Raise UserError if a tensor has NaN or infinity in it."""
    if not (tensor.sum().isfinite() or tensor.isfinite().all()):  # the sum is faster, but may overflow
        raise UserError(f"{name} has NaN or infinity in it; use another checkpoint")


def check_forms(path, tensors, expected):
    """Raise UserError unless tensors have the names, types and shapes of those in `expected`."""
    theirs = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    mine = {name: (t.dtype, t.shape) for name, t in expected.items()}
    differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differ:
        few = ", ".join(differ[:3])
        raise UserError(f"{path} does not fit the model: tensors {few} differ ({len(differ)} in all)")


def load_weights(model, path):
    """Fill `model` from a weights file; raises UserError if it is damaged or another model's."""
    _, tensors = read_checked(path)
    check_forms(path, tensors, model.state_dict())
    model.load_state_dict(tensors)


def read_state(path, model, step):
    """(tensors, the loss scaler's numbers) of a training state. Raises UserError unless it is whole, of an AdamW of
    `model`, and of this step."""
    metadata, tensors = read_checked(path)
    if metadata.get("step") != step:
        raise UserError(f"{path} is the training state of step {metadata.get('step')}; get the one of step {step}")
    expected = {"rng": torch.get_rng_state()}
    if "rng_cuda" in tensors:  # its form can be compared only where there is a GPU
        expected["rng_cuda"] = torch.cuda.get_rng_state() if torch.cuda.is_available() else tensors["rng_cuda"]
    has_moments = len(tensors) > len(expected)
    if has_moments:  # AdamW has none before its first step, and a scaler may have skipped all
        for name, p in model.named_parameters():
            expected |= {f"step/{name}": torch.zeros(()), f"exp_avg/{name}": p, f"exp_avg_sq/{name}": p}
    check_forms(path, tensors, expected)
    return tensors, convert(metadata, {"scaler": dict}, f"the header of {path}")["scaler"]


def gathered(tensors, is_main):
    """{name: tensor} as it is written: whole and on the CPU. The other ranks take part one tensor at a time, and keep
    nothing: {}."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if is_main:
            found[name] = full.contiguous().cpu()
    return found


def save(run, step, model, tokenizer_hash, val_loss=None, optimizer=None, scaler=None, keep=2, is_main=True):
    """Write a step's weights and training state into folder `run`, then delete all but the last `keep` and the best.
    Returns the weights file. All ranks call this, and the main one writes."""
    weights_file = Path(run) / f"step_{step:08d}.safetensors"
    if optimizer is not None:
        tensors, metadata = training_state(model, optimizer, scaler)
        tensors = gathered(tensors, is_main)
        if is_main:
            write_tensors(state_file(weights_file), tensors, {"step": step, **metadata})
    weights = gathered(model.state_dict(), is_main)
    if not is_main:
        return weights_file
    header = {
        "format": "nanoresformer/1",
        "step": step,
        "val_loss": val_loss,
        "mode": model.cfg.value_mode.name,
        "config": dataclasses.asdict(model.cfg),
        "plan": plan_as_json(model.cfg),
        "tokenizer": tokenizer_hash,
    }
    write_tensors(weights_file, weights, header)
    prune(run, keep)
    return weights_file


def prune(run, keep):
    """Delete all checkpoints of a run but the last `keep` and the best; none if `keep` is 0."""
    if keep == 0:
        return
    files = list(steps(run).values())
    kept = {best(run), *files[-keep:]}
    for old in files:
        if old not in kept:
            old.unlink()  # first the file that says the step is there
            state_file(old).unlink(missing_ok=True)


def clean(run):
    """Remove what a killed run has left: states without weights, and half-written files."""
    for path in Path(run).glob(".step_*.tmp"):
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
        for key, value in optimizer.state[p].items():
            tensors[f"{key}/{name}"] = value
    return tensors, {"scaler": scaler.state_dict() if scaler else {}}


def check_same_model(header, model, tokenizer_hash, path):
    """Raise UserError unless a checkpoint's header is that of `model`, trained with this tokenizer."""
    config = header["config"]
    if config.value_mode != model.cfg.value_mode:
        asked = model.cfg.value_mode.name
        raise UserError(f"{path} is a {header['mode']} model, not {asked}; set value_mode or another out_dir")
    theirs, mine = dataclasses.asdict(config), dataclasses.asdict(model.cfg)
    differ = []
    for key in mine:
        if key != "value_mode" and theirs[key] != mine[key]:
            differ.append(f"{key} {theirs[key]} instead of {mine[key]}")
    if differ:
        raise UserError(f"{path} is another model: {', '.join(differ)}; use its settings or another out_dir")
    if header["tokenizer"] != tokenizer_hash:
        message = f"{path} was trained with another tokenizer than this data; use its data or another out_dir"
        raise UserError(message)


def resume(weights_file, model, optimizer, scaler, tokenizer_hash):
    """Restore model, optimizer, scaler and random generators as `save` found them; returns the header.

    Raises UserError if the checkpoint is of another model (mode or shape) or another tokenizer.
    """
    if is_hf_file(weights_file):
        raise UserError(f"{weights_file} has no training state to resume; start from its weights with --init_from")
    header = read_header(weights_file)
    check_same_model(header, model, tokenizer_hash, weights_file)
    load_weights(model, weights_file)
    tensors, scaler_state = read_state(state_file(weights_file), model, header["step"])
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]  # the optimizer's numbering
    state = {}
    for i, name in enumerate(ordered):
        if f"step/{name}" in tensors:
            state[i] = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler and scaler_state:
        schema = {name: type(value) for name, value in scaler.state_dict().items()}
        scaler.load_state_dict(convert(scaler_state, schema, f"the scaler of {state_file(weights_file)}"))
    torch.set_rng_state(tensors["rng"])
    if torch.cuda.is_available() and "rng_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng_cuda"])
    return header


def start_from(path, model, tokenizer_hash):
    """Copy the weights of a checkpoint into `model` where names and shapes are the same; returns a line that names what
    is new. Raises UserError if the checkpoint has another vocabulary, arch, n_embd or head_dim."""
    header = read_header(path)
    if header["tokenizer"] is None:
        raise UserError(
            f"{path.parent} does not say which tokenizer it has; a run starts from folders of export.py only"
        )
    if header["tokenizer"] != tokenizer_hash:
        raise UserError(f"{path} has another tokenizer than this data; use data prepared with its tokenizer")
    for name in ("arch", "n_embd", "head_dim"):
        there, here = getattr(header["config"], name), getattr(model.cfg, name)
        if there != here:
            raise UserError(f"{path} has {name}={there}, this model {here}; they must be the same")
    theirs = {name: parameter.detach()[rows] for name, parameter, rows in parts_of(load(path))}
    mine = parts_of(model)
    new = []
    for name, parameter, rows in mine:
        place, found = parameter.detach()[rows], theirs.pop(name, None)
        if found is not None and found.shape == place.shape:
            place.copy_(found)
        else:
            new.append(name)
    line = f"weights from {path}: {len(mine) - len(new)} of {len(mine)} tensors"
    if new:
        line += f"; new: {', '.join(new)}"
    if theirs:
        line += f"; {len(theirs)} of that model's are not used"
    return line


def load_tokenizer(weights_file):
    """The tokenizer beside a checkpoint; raises UserError if it is missing or not the one of the training data."""
    path = Path(weights_file).parent / "tokenizer.json"
    if is_hf_file(weights_file):
        return HFTokenizer(path.parent)
    tokenizer = Tokenizer.load(path)
    if tokenizer.hash != read_header(weights_file)["tokenizer"]:
        raise UserError(f"{path} is not the tokenizer that {weights_file} was trained with")
    return tokenizer


def trained_on(folder, given, instead):
    """(data folder, mixture or None) that a run in `folder` was trained on, or `given` if that is not empty. Raises
    UserError, which asks for `instead`, if it is unknown or missing."""
    if given:
        if not Path(given).is_dir():
            raise UserError(f"{given} is no folder; name {instead}")
        return given, None
    config = folder / "config.json"
    trained = {"data_dir": ""}
    if config.exists() and not is_hf_folder(folder):
        trained = read_json(config, "the config of a run", RUN)
    data_dir = trained["data_dir"]
    if not data_dir:  # Path("") would be the current folder
        raise UserError(f"{folder} does not say what it was trained on; name {instead}")
    if not Path(data_dir).is_dir():
        raise UserError(f"{folder} was trained on {data_dir}, which is missing; name {instead}")
    return data_dir, trained["mixture"]


def trained_with_bos(folder):
    """Whether the sequences that a run in `folder` was trained on begin with end-of-text. Runs that do not say so were
    made before train.py had that setting, or come from elsewhere."""
    config = folder / "config.json"
    return config.exists() and read_json(config, "the config of a run").get("bos", False) is True
