"""Checkpoints: weights in safetensors with the mode in the header, training state beside them, no pickle.

A run's folder holds, for each saved step,

    step_00000400.safetensors          weights, and what they are: the mode is in the header, because ResFormer has
                                       the same tensors as vanilla
    step_00000400.state.safetensors    optimizer, random generators, loss scaler: what else --resume needs

Each file is either complete or absent, and the weights come last: a step whose .safetensors is there is complete.
Models in Hugging Face layout are read by hf/layout.py.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as dcp

from common.files import read_record, reading, sealed, unsealed, write_atomic
from common.optimizers import optimizer_state, restore_optimizer
from common.ranks import code_of_results
from common.runs import RUN, differences, read_run
from common.sizes import refuse_too_large
from common.tokenizer import HFTokenizer, Tokenizer
from configurator import UserError
from hf.layout import hf_config, hf_files, is_hf_folder, is_tied, load_hf, made_by_us, named_parts
from model import GPT
from value_modes import ModelConfig

WEIGHTS, STATE = "train.py's weights", "train.py's training state"  # kinds of records
STEP = f"step_{'[0-9]' * 8}.safetensors"  # the names of weights files
AGAIN = "copy it again, or move this step's files away to go back to the previous checkpoint"
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # rank 0 gets tensors as if there were one rank


# ---- files


def checksum(tensors):
    """sha256 of {name: tensor}: their names, types, shapes and numbers."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def write_tensors(path, kind, tensors, record):
    """A safetensors file with a sealed record in its header. record["tensors"]: their checksum."""
    text = json.dumps(sealed(kind, record))
    write_atomic(path, lambda temporary: save_file(tensors, temporary, {"nanoresformer": text}))


def read_tensors(path, kind):
    """(record, {name: tensor}) of such a file, whose checksums are right."""
    with reading(path, kind, AGAIN), safe_open(path, "pt") as file:
        record = unsealed(kind, json.loads(file.metadata()["nanoresformer"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        if record["tensors"] != checksum(tensors):
            raise ValueError("its tensors do not match their checksum")
    return record, tensors


def read_header(path):
    """{step, val_loss, mode, config: a ModelConfig, tokenizer: its hash} of a weights file or Hugging Face folder."""
    if is_hf_file(path):
        found, config = made_by_us(path.parent), hf_config(path.parent)
        return found | {"tokenizer": found["tokenizer_hash"], "mode": config.value_mode.name, "config": config}
    with reading(path, WEIGHTS, AGAIN), safe_open(path, "pt") as file:
        header = unsealed(WEIGHTS, json.loads(file.metadata()["nanoresformer"]))
        return header | {"config": ModelConfig.of_record(header["config"])}


def steps(folder):
    """{step: weights file} of a run's folder, in ascending order."""
    return {int(path.stem.removeprefix("step_")): path for path in sorted(Path(folder).glob(STEP))}


def state_file(weights_file):
    return weights_file.with_suffix(".state.safetensors")


def is_hf_file(path):
    return Path(path).name.startswith("model") and is_hf_folder(Path(path).parent)


def find(run_or_file="", which="last"):
    """The weights file that is meant: a file itself, the "last" or "best" (lowest validation loss) one of a run, or the
    first one of a Hugging Face folder. "" is the newest run under out/."""
    path = Path(run_or_file or "out")
    if not run_or_file and (every := list(path.glob(f"**/{STEP}"))):
        path = max(every, key=os.path.getmtime).parent
        print(f"the newest run is {path}")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{path} is not a checkpoint; name a run's folder, or a step_*.safetensors in it")
        return path
    if (path / "adapter_config.json").exists():
        raise UserError(f"{path} is a peft adapter; first merge it into its model with merge_and_unload")
    if is_hf_folder(path):
        return hf_files(path)[0]
    files = list(steps(path).values())
    if not files:
        raise UserError(f"there is no checkpoint (step_*.safetensors) in {path}; name a run's folder, or train one")
    return best(files) if which == "best" else files[-1]


def best(files):
    """Of these weights files the one with the lowest validation loss, or the last one; damaged ones do not count."""
    losses = {}
    for path in files:
        with contextlib.suppress(UserError):
            losses[path] = read_header(path)["val_loss"]
    losses = {path: loss for path, loss in losses.items() if loss is not None}
    return min(losses, key=losses.get, default=files[-1])


# ---- loading and saving


def load(run_or_file, device="cpu", dtype=torch.float32):
    """The model of a checkpoint, in eval mode, on `device`, its weights in `dtype`. run_or_file: see `find`."""
    path = find(run_or_file)
    if is_hf_file(path):
        return load_hf(path.parent, device, dtype)
    cfg = read_header(path)["config"]
    refuse_too_large(path, cfg, 4, "name a smaller model")
    model = GPT(cfg, init=False)
    with reading(path, WEIGHTS):
        model.load_state_dict(read_tensors(path, WEIGHTS)[1])
    return model.to(device, dtype).eval()


def save(folder, step, model, tokenizer_hash, val_loss=None, optimizer=None, scaler=None, keep=2, is_main=True):
    """Write a step's weights and training state into a run's folder, then delete all but the last `keep` and the best.
    Returns the weights file. All ranks call this, because they gather what is divided; the main one writes."""
    path = Path(folder, f"step_{step:08d}.safetensors")
    weights = dcp.get_model_state_dict(model, options=WHOLE)
    about, tensors = optimizer_state(model, optimizer, is_main) if optimizer else ("", {})
    if not is_main:
        return path
    digest = checksum(weights)
    if optimizer:
        # the model draws no random numbers in training, but a mode of yours may, as dropout does
        tensors["rng"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["rng_cuda"] = torch.cuda.get_rng_state()
        # the checksum of the weights says which ones this state belongs to
        record = {"tensors": checksum(tensors), "weights": digest, "scaler": scaler.state_dict(), "optimizer": about}
        write_tensors(state_file(path), STATE, tensors, record)
    config = dataclasses.asdict(model.cfg)
    header = {"step": step, "val_loss": val_loss, "mode": model.cfg.value_mode.name, "config": config}
    write_tensors(path, WEIGHTS, weights, header | {"tokenizer": tokenizer_hash, "tensors": digest})
    prune(folder, keep)
    return path


def prune(folder, keep):
    """Delete all checkpoints of a run but the last `keep` and the best; none if `keep` is 0. Then delete what a kill
    has left: half-written files, and states without weights."""
    files = list(steps(folder).values())
    kept = [best(files), *files[-keep:]] if keep else files
    kept = {*kept, *map(state_file, kept)}
    # weights first: a step whose weights are there counts as complete
    for path in (*files, *Path(folder).glob(STEP.replace(".", ".state.")), *Path(folder).glob(".step_*.tmp")):
        if path not in kept:
            path.unlink()


def resume(path, model, optimizer, scaler, tokenizer_hash):
    """Restore model, optimizer, scaler and random generators as `save` found them; returns (step, a note or "")."""
    header = read_header(path)
    check_same(path, header, model, tokenizer_hash, vars(model.cfg))
    with reading(path, WEIGHTS):
        dcp.set_model_state_dict(model, read_tensors(path, WEIGHTS)[1], options=WHOLE)
    with reading(state_file(path), STATE, AGAIN):
        record, tensors = read_tensors(state_file(path), STATE)
        if record["weights"] != header["tensors"]:
            raise ValueError(f"it does not belong to {path.name}")
    note = restore_optimizer(path, model, optimizer, record.get("optimizer"), tensors)
    if record["scaler"]:
        scaler.load_state_dict(record["scaler"])
    torch.set_rng_state(tensors["rng"])
    if torch.cuda.is_available() and "rng_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng_cuda"])
    return header["step"], note


def check_same(path, header, model, tokenizer_hash, fields):
    """Refuse a checkpoint whose model differs in one of these fields of ModelConfig, or that has another tokenizer."""
    differ = [name for name in fields if getattr(header["config"], name) != getattr(model.cfg, name)]
    if header["tokenizer"] != tokenizer_hash:
        differ.append("tokenizer")
    if differ:
        what = f"{path} is a {header['mode']} model that differs from this one in {', '.join(differ)}"
        raise UserError(f"{what}; they must be the same")


def start_from(path, model, tokenizer_hash):
    """Copy the weights of a checkpoint into `model` where names and shapes are the same; returns a line that names what
    is new, and what of the checkpoint is unused. Tokens, arch, widths, rotary angles and norm_eps must be the same."""
    header = read_header(path)
    # another program's folder names no tokenizer of ours: its own must be the data's
    if header["tokenizer"] is None and path.with_name("tokenizer.json").exists():
        header["tokenizer"] = load_tokenizer(path).hash
        if header["tokenizer"] != tokenizer_hash:
            remedy = f"`python prepare.py files --input_dir=… --tokenizer_file={path.parent}` makes data of them"
            raise UserError(f"the data was not made with the tokenizer of {path.parent}; {remedy}")
    must_fit = ("vocab_size", "arch", "n_embd", "head_dim", "rope_theta", "rope_scaling", "norm_eps")
    is_unknown = header["tokenizer"] is None
    check_same(path, header, model, None if is_unknown else tokenizer_hash, must_fit)
    if is_unknown:
        raise UserError(
            f"{path.parent} has no tokenizer.json, so there is no telling whether its tokens match the data's"
        )
    theirs = {name: parameter.detach()[rows] for name, parameter, rows in named_parts(load(path))}
    new = []
    for name, parameter, rows in named_parts(model):
        if name in theirs and theirs[name].shape == parameter[rows].shape:
            parameter.detach()[rows].copy_(theirs.pop(name))
        else:
            new.append(name)
    seen = header["config"].block_size
    longer = f"; it was trained on at most {seen} positions" if model.cfg.block_size > seen else ""
    tied = "; its head is tied to the embeddings there, and a separate copy here" if is_tied(path.parent) else ""
    note = f"weights from {path}; new: {', '.join(new) or 'none'}; not used: {', '.join(theirs) or 'none'}"
    return note + tied + longer


SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "n_hidden", "arch", "rope_theta", "rope_scaling")
SHAPE += ("norm_eps", "block_size")


def shape_of(folder):
    """{field of ModelConfig: value} of a model in Hugging Face layout; {} of any other folder."""
    folder = Path(folder).parent if Path(folder).is_file() else folder
    if not is_hf_folder(folder):
        return {}
    cfg = hf_config(folder)
    return {name: getattr(cfg, name) for name in SHAPE}


# ---- what belongs to a checkpoint


def load_tokenizer(weights_file):
    """The tokenizer beside a checkpoint."""
    path = Path(weights_file).parent / "tokenizer.json"
    if is_hf_file(weights_file):
        return HFTokenizer.of_folder(path.parent)
    tokenizer = Tokenizer.load(path)
    if tokenizer.hash != read_header(weights_file)["tokenizer"]:
        raise UserError(f"{path} is not the tokenizer that {weights_file} was trained with")
    tokenizer.prefix = [tokenizer.start] if trained_with_bos(path.parent) else []
    return tokenizer


def run_settings(folder):
    """How the model in a folder was trained: config.json of train.py, what export.py took over from it, or {}."""
    if is_hf_folder(folder):
        return made_by_us(folder)
    path = Path(folder) / "config.json"
    return read_record(path, RUN) if path.exists() else {}


def trained_on(folder, given, instead):
    """(data folder, mixture or None) that a run in `folder` was trained on, or `given` if that is not empty.
    instead: what the user may name if it is unknown."""
    if given:
        return given, None
    trained = run_settings(folder)
    if "data_dir" not in trained:
        raise UserError(f"{folder} does not say what it was trained on; name {instead}")
    if not Path(trained["data_dir"]).is_dir():
        raise UserError(f"{folder} was trained on {trained['data_dir']}, which is not a folder here; name {instead}")
    return trained["data_dir"], trained["mixture"]


def trained_with_bos(folder):
    """Whether the sequences that a run in `folder` was trained on begin with end-of-text."""
    return bool(run_settings(folder).get("bos"))


# ---- whether a folder has the run that is wanted


def checked_run(wanted, folder):
    """The Curves of the run in a folder, None if there is none. wanted: what its config.json must have.

    Raises UserError if it is another run: other settings, other data, other code.
    """
    path = Path(folder, "metrics.jsonl")
    if not Path(folder, "config.json").exists():
        # train.py writes it before the first record
        if path.exists() and path.stat().st_size:
            raise UserError(f"{folder} has lost its config.json; remove the folder, or set another --out_dir")
        return None
    made, found = read_record(Path(folder, "config.json"), RUN), read_run(folder)
    # config.json may say auto; the records of starts say which dtype that became. Whoever asks for auto takes any
    wanted = {name: value for name, value in wanted.items() if (name, value) != ("dtype", "auto")}
    what = differences(made, {name: value for name, value in wanted.items() if name != "dtype"})  # there it may be auto
    for start in found.starts:  # a run that went on with other settings or other code belongs to neither
        then = start | {"value_mode": start["definition"], "value_mode_name": start["value_mode"]}
        what += differences(made | then, wanted)
        code = start.get("code", {})
        what += [f"a different {name}" for name, digest in code_of_results().items() if code.get(name) != digest]
    if found.final_loss is not None:
        what += other_checkpoints(folder, found)
    if found.starts and found.starts[0]["step"]:
        what.append(f"its first {found.starts[0]['step']} steps are another run's")
    if what:
        raise UserError(f"{folder} holds another run ({what[0]}); remove it, or set another --out_dir")
    return found


def other_checkpoints(folder, curves):
    """Yields each way in which the last checkpoint of a finished run disagrees with its Curves."""
    files = steps(folder)
    if not files:  # they may have been deleted: metrics.jsonl has all losses
        return
    step = max(files)
    try:
        header = read_header(files[step])
    except UserError:
        if files[step].exists():  # else the run that writes them has just replaced it
            raise
        return
    if header["mode"] != curves.start["value_mode"]:
        yield f"{files[step].name} is {header['mode']}, but its records are {curves.start['value_mode']}"
    if step > max(curves.steps["step"], default=0):
        yield f"its metrics.jsonl lacks the steps of {files[step].name}"
    if header["val_loss"] not in (None, curves.val.get(step)):
        yield f"{files[step].name} and its records have different validation losses"
