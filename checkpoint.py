"""Checkpoints: weights in safetensors with the mode and plan in the header, training state beside them, no pickle.

A run's folder holds, per saved step,

    step_00000400.safetensors          weights; header: format, step, val_loss, mode, config, plan, tokenizer (hash)
    step_00000400.state.safetensors    optimizer, random generator, loss scaler: what only --resume needs

The weights are written last, each file atomically: a step whose .safetensors exists is complete, whatever happened.
"""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import UserError
from data import read_json, write_atomic
from model import GPT, ModelConfig, Rope, ValueMode, mode_name, plan_layers, refuse

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


def _read(path, reader):
    """reader(open safetensors file); raises UserError if the file is missing, cut short or something else."""
    try:
        with safe_open(path, "pt") as f:
            return reader(f)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is truncated or not a safetensors file ({e})") from None


def _metadata(path):
    """The dict that `_write` stored in the header of a file, {} if it is not one of ours."""
    try:
        return json.loads((_read(path, lambda f: f.metadata()) or {})["nanoresformer"])
    except (KeyError, json.JSONDecodeError):
        return {}


def plan_dict(cfg):
    """The layer plan as JSON-able values."""
    return json.loads(json.dumps([dataclasses.asdict(layer) for layer in plan_layers(cfg)]))


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
    tensors = _read(path, lambda f: {k: f.get_tensor(k) for k in f.keys()})
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
    tensors = _read(state_file(weights_file), lambda f: {k: f.get_tensor(k) for k in f.keys()})
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


HF_NAMES = {  # our module and part -> Hugging Face's name of the tensor, for Llama's architecture
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head.head": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.proj.q": "self_attn.q_proj",
    "attn.proj.k": "self_attn.k_proj",
    "attn.proj.v": "self_attn.v_proj",
    "attn.out.o": "self_attn.o_proj",
    "mlp.up.gate": "mlp.gate_proj",
    "mlp.up.up": "mlp.up_proj",
    "mlp.down.down": "mlp.down_proj",
}


def hf_parts(model):
    """Yields (name in a Hugging Face Llama file, our parameter, rows of it): our fused products, taken apart."""
    for name, module in model.named_modules():
        parts = getattr(module, "parts", None) or ({"": None} if hasattr(module, "weight") else {})
        row = 0
        for part, rows in parts.items():
            full = f"{name}.{part}".rstrip(".")
            block, _, inner = (
                full.removeprefix("blocks.").partition(".") if full.startswith("blocks.") else ("", "", full)
            )
            prefix = f"model.layers.{block}." if block else ""
            rows = rows or module.weight.size(0)
            yield f"{prefix}{HF_NAMES[inner]}.weight", module.weight, slice(row, row + rows)
            row += rows


def hf_json(folder):
    """The dict in a Hugging Face folder's config.json; raises UserError if it is missing or something else."""
    path, what = Path(folder) / "config.json", "the config of a Hugging Face model"
    c = read_json(path, what)
    if not isinstance(c, dict):
        raise UserError(f"{path} is not {what}")
    return c


def hf_rope(c):
    """(rope_theta, rope_scaling) of a ModelConfig, from a config.json's dict. Raises ValueError if the scaling is not
    Llama 3.1's, KeyError if one of its numbers is not there."""
    field = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"  # newer files have the theta in there too
    rope = c.get(field) or {}
    refuse(not isinstance(rope, dict), f"{field}={rope!r} is not supported")
    kind = rope.get("rope_type", rope.get("type", None if rope.keys() - {"rope_theta"} else "default"))
    refuse(kind not in ("default", "llama3"), f"{field} of type {kind!r} is not supported, only 'llama3'")
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = tuple(rope[k] for k in numbers) if kind == "llama3" else ()
    return rope.get("rope_theta", c.get("rope_theta", 10000.0)), scaling


def hf_config(folder):
    """ModelConfig of a Hugging Face folder of Llama's or Mistral's type, with "value_mode" if its config.json has one.
    Raises UserError, naming the field, if it asks for what our model does not have."""
    c = hf_json(folder)
    kind = c.get("model_type", c.get("architecture"))
    if kind not in ("llama", "mistral"):
        raise UserError(f"{folder}/config.json: model_type={kind!r} is not supported, only 'llama' and 'mistral'")
    # the authors' code and ours name this combination in opposite orders
    mode = c.get("value_mode", "vanilla")
    mode = "resformer_neutreno" if mode == "neutreno_resformer" else mode
    try:
        odd = [k for k in ("attention_bias", "mlp_bias", "quantization_config") if c.get(k)]
        odd += ["hidden_act"] * (c.get("hidden_act", "silu") != "silu")
        wide = c.get("head_dim")  # of one head; ours share n_embd evenly
        odd += ["head_dim"] * (wide is not None and wide * c["num_attention_heads"] != c["hidden_size"])
        refuse(odd, f"{', '.join(f'{k}={c[k]!r}' for k in odd)} is not supported")
        length, (theta, scaling) = c["max_position_embeddings"], hf_rope(c)
        window = c.get("sliding_window", 4096) if kind == "mistral" else None  # 4096 is transformers' default
        cfg = ModelConfig(
            vocab_size=c["vocab_size"],
            block_size=length if window is None else min(length, window),  # no token in it is out of another's window
            n_layer=c["num_hidden_layers"],
            n_head=c["num_attention_heads"],
            n_kv_head=c.get("num_key_value_heads") or 0,
            n_embd=c["hidden_size"],
            n_hidden=c["intermediate_size"],
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=c["rms_norm_eps"],
            value_mode=ValueMode.from_dict(mode) if isinstance(mode, dict) else mode,
        )
    except KeyError as e:
        raise UserError(f"{folder}/config.json has no {e}") from None
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(f"{folder}/config.json: {e}") from None
    if cfg.value_mode.dense or any(r.learn != "fixed" or r.source == "token" for r in cfg.value_mode.residuals):
        raise UserError(f"{folder}/config.json: this layout has no names for the weights that {mode} adds to Llama's")
    return cfg


def hf_files(folder):
    """{weights file: the tensors that the index says it has} of a Hugging Face folder; a single file needs no index."""
    folder = Path(folder)
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        if not whole.exists() and any(folder.glob("pytorch_model*.bin")):
            raise UserError(f"{folder} has its weights as pickle, which is never loaded: convert them to safetensors")
        return {whole: set()}
    about, files = read_json(index, "the index of a model's shards"), {}
    names = about.get("weight_map") if isinstance(about, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UserError(f"{index} has no weight_map that says which file each tensor is in")
    for name, file in names.items():
        files.setdefault(folder / file, set()).add(name)
    return files


def hf_fill(path, promised, places):
    """Copy a weights file into places = {tensor's name: (parameter, rows of it)}, and return all names in it. Raises
    UserError if a promised one is not there, or one has another shape than its place."""

    @torch.no_grad()
    def fill(f):
        names = set(f.keys())
        if promised - names:
            raise UserError(f"{path} has no tensor {min(promised - names)}, which the index says it has")
        for name in (name for name in places if name in names):
            part, (parameter, rows) = f.get_tensor(name), places[name]
            mine = parameter[rows]
            if part.shape != mine.shape:
                raise UserError(f"{path}: {name} is {tuple(part.shape)}, its config.json makes it {tuple(mine.shape)}")
            mine.copy_(part)
        return names

    return _read(path, fill)


def load_hf(folder, device="cpu", attn="sdpa", dtype=torch.float32):
    """A Llama- or Mistral-type model in Hugging Face layout (config.json, model.safetensors or its shards) as ours, in
    eval mode, its weights in `dtype`. They are read one at a time: the peak is the model and one shard at most.

    Our modes are read too: "value_mode" in config.json, and no tensor for what a layer does not own.
    """
    cfg, found = hf_config(folder), {}  # {name: the file that has it}
    with torch.device("meta"):
        model = GPT(cfg, attn=attn, init=False)
    model.to(dtype).to_empty(device=device)
    model.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling).to(device)  # no file has it
    places = {name: (parameter, rows) for name, parameter, rows in hf_parts(model)}
    for path, promised in hf_files(folder).items():
        found |= dict.fromkeys(hf_fill(path, promised, places), path)
    if hf_json(folder).get("tie_word_embeddings") and "lm_head.weight" not in found:
        model.head.weight.data.copy_(model.embed.weight)
        found["lm_head.weight"] = None
    for name in places:
        if name not in found:
            raise UserError(f"{folder} has no tensor {name}")
    # older files hold buffers of the rotary embedding
    extra = sorted(name for name in found.keys() - places.keys() if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        names, mode = ", ".join(extra[:3]), mode_name(cfg.value_mode)
        raise UserError(f"{found[extra[0]]} has tensors that mode {mode} has no place for: {names}")
    return model.eval()


def hf_tokenizer(folder):
    """The tokenizers.Tokenizer of a Hugging Face folder's tokenizer.json; raises UserError without file or package."""
    path = Path(folder) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(f"{path} needs the tokenizers package: pip install tokenizers") from None
    if not path.is_file():
        raise UserError(f"{path} is missing; it should be the tokenizer of a Hugging Face model")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the package has no class of its own for it
        raise UserError(f"{path} is not the tokenizer of a Hugging Face model: {e}") from None


def hf_first_token(folder):
    """The id that each sequence of a Hugging Face folder's model starts with: its config.json's bos_token_id or, for a
    tokenizer without one, the first eos_token_id. Raises UserError if there is neither."""
    c = hf_json(folder)
    ends = c.get("eos_token_id")
    for token in (c.get("bos_token_id"), *(ends[:1] if isinstance(ends, list) else [ends])):
        if type(token) is int and token >= 0:
            return token
    raise UserError(f"{folder}/config.json has neither bos_token_id nor eos_token_id")
