"""Hugging Face's layouts: folders of Llama, Mistral and export.py read as models of ours, and our tokenizer as theirs.

None of this needs the transformers package, except `to_llama`. Read model.py first; export.py writes such folders.
"""

import base64
import dataclasses
import functools
import math
from pathlib import Path

import torch

from data import COUNT, byte_letters
from layers import Rope
from model import GPT
from oldconfig import UserError, convert, need, require
from oldfiles import read_json, read_tensors
from value_modes import ModelConfig, ValueMode

FIELDS = {  # of ModelConfig, and their names in config.json
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "n_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
LLAMA = {
    "vocab_size": 32000, "max_position_embeddings": 2048, "num_hidden_layers": 32, "num_attention_heads": 32,
    "hidden_size": 4096, "head_dim": None, "intermediate_size": 11008, "rms_norm_eps": 1e-6,
    "num_key_value_heads": None, "sliding_window": None,
}  # fmt: skip
MISTRAL = {"max_position_embeddings": 131072, "intermediate_size": 14336, "num_key_value_heads": 8}
MISTRAL["sliding_window"] = 4096
DEFAULTS = {"llama": LLAMA, "mistral": LLAMA | MISTRAL}  # transformers', for what a config.json leaves out
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # see model.Rope
LAYER_NAMES = {  # our modules in a layer, with the part of a fused product, and their names
    "norm1": "input_layernorm",
    "attn.proj.q": "self_attn.q_proj",
    "attn.proj.k": "self_attn.k_proj",
    "attn.proj.v": "self_attn.v_proj",
    "attn.out.o": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.up.gate": "mlp.gate_proj",
    "mlp.up.up": "mlp.up_proj",
    "mlp.down.down": "mlp.down_proj",
}


# ---- weights


def parts_of(model):
    """[(name, its parameter, its rows there)] of all weights, with fused products taken apart: blocks.0.attn.proj.q."""
    found = []
    for full_name, parameter in model.named_parameters():
        path, _, kind = full_name.rpartition(".")
        parts = getattr(model.get_submodule(path), "parts", {"": len(parameter)})
        row = 0
        for part, width in parts.items():
            name = ".".join(word for word in (path, part, kind) if word)
            found.append((name, parameter, slice(row, row + width)))
            row += width
    return found


def hf_parts(model):
    """`parts_of` a model with the names of Llama's layout. Raises UserError if a weight has no name there."""
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head.head": "lm_head"}
    for n in range(model.cfg.n_layer):
        for ours, theirs in LAYER_NAMES.items():
            names[f"blocks.{n}.{ours}"] = f"model.layers.{n}.{theirs}"
    found = []
    for ours, parameter, rows in parts_of(model):
        path, _, kind = ours.rpartition(".")
        if path not in names or kind != "weight":
            mode = model.cfg.value_mode.name
            raise UserError(f"Llama's layout has no names for the weights that {mode} adds, such as {ours}")
        found.append((f"{names[path]}.weight", parameter, rows))
    return found


def hf_files(folder):
    """The weights files: model.safetensors, or all shards. (Mistral's folders repeat the model in other files.)"""
    whole = Path(folder) / "model.safetensors"
    files = [whole] if whole.exists() else sorted(Path(folder).glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model.safetensors and no model-*.safetensors; pickle (.bin) is never loaded")
    return files


def tensor_shapes(folder):
    """{name: shape} of the tensors in all files of a folder. Raises UserError if a name is in two files, or if a tensor
    does not hold floats."""
    found = {}
    for path in hf_files(folder):
        for name, kind, shape in read_tensors(path, describe_tensors):
            if name in found:
                raise UserError(f"{folder} has the tensor {name} in two files; remove the file that is not its own")
            if kind not in ("F64", "F32", "F16", "BF16"):
                raise UserError(f"{path}: {name} is of type {kind}; weights are floats")
            if not name.endswith("rotary_emb.inv_freq"):  # a buffer, in older files
                found[name] = shape
    return found


def describe_tensors(file):
    """[(name, type, shape)] of an open safetensors file."""
    slices = {name: file.get_slice(name) for name in file.keys()}
    return [(name, found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()]


def load_hf(folder, device="cpu", dtype=torch.float32):
    """A folder of Llama, Mistral or export.py (config.json, model.safetensors or its shards) as a model of ours, in
    eval mode, its weights in `dtype`. The peak of memory is the model and one tensor.

    The authors' layout is read too: Llama's, with "value_mode" in config.json and no tensor for what a layer borrows.
    """
    cfg, c = hf_config(folder), read_hf_config(folder)
    with torch.device("meta"):
        model = GPT(cfg, init=False)

    def places():
        if c.get("model_type") == OURS:
            return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
        return {name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)}

    missing = missing_tensors(folder, places())  # before memory is taken for what config.json says
    is_tied = c.get("tie_word_embeddings") and "lm_head.weight" in missing
    if is_tied:
        missing.remove("lm_head.weight")
    if missing:
        raise UserError(f"{folder} has no tensor {min(missing)}: is a shard missing, or config.json another model's?")
    model.to(dtype).to_empty(device=device)  # which makes new parameters
    if model.rope:  # its angles are not in the files
        model.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling).to(device)
    new_places = places()
    for path in hf_files(folder):
        read_tensors(path, functools.partial(copy_tensors, new_places, path))
    if is_tied:
        model.head.weight.detach().copy_(model.embed.weight.detach())
    return model.eval()


def missing_tensors(folder, places):
    """The names in `places`, {name: tensor}, that a folder has no tensor of. Raises UserError if it has a tensor of
    another name or shape."""
    shapes = tensor_shapes(folder)
    for name, shape in shapes.items():
        if name not in places or shape != tuple(places[name].shape):
            raise UserError(f"{folder}: {name} {shape} has no place in the model of config.json")
    return places.keys() - shapes.keys()


def copy_tensors(places, path, file):
    """Copy the tensors of a file, open as `file`, to their places. Raises UserError if one is not finite."""
    for name in places.keys() & set(file.keys()):
        places[name].copy_(file.get_tensor(name))
        require_finite(f"{path}: {name}", places[name])


def require_finite(name, tensor):
    """Raise UserError if a tensor has NaN or infinity in it."""
    if not (tensor.sum().isfinite() or tensor.isfinite().all()):  # the sum is faster, but may overflow
        raise UserError(
            f"{name} has NaN or infinity in it; use another checkpoint, or a dtype that can hold its weights"
        )


# ---- config.json

OURS = "nanoresformer"  # model_type of what plain Llama cannot express, see modeling_nanoresformer.py


def read_hf_config(folder):
    return read_json(Path(folder) / "config.json", "the config of a Hugging Face model")


def is_hf_folder(folder):
    """Whether a folder is in Hugging Face's layout. Runs of ours have a config.json too."""
    if not (Path(folder) / "config.json").exists():
        return False
    c = read_hf_config(folder)
    return any(key in c for key in ("model_type", "architectures", "architecture"))


def made_by_us(folder):
    """What export.py adds to config.json: step, val_loss, tokenizer_hash; None in other folders."""
    schema = {"step": COUNT | None, "val_loss": float | None, "tokenizer_hash": str | None}
    c = read_hf_config(folder)
    return convert({name: c.get(name) for name in schema}, schema, f"{folder}/config.json")


def hf_config(folder):
    """ModelConfig of a folder. Raises UserError, with the field, if it asks for what our model does not have."""
    c, where = read_hf_config(folder), f"{folder}/config.json"
    kind = c.get("model_type", c.get("architecture"))
    if kind == OURS:
        return convert(c, {"shape": ModelConfig}, where)["shape"]
    try:
        require(kind in DEFAULTS, f"model_type={kind!r} is not supported, only {', '.join(DEFAULTS)}, {OURS}")
        c = DEFAULTS[kind] | c
        fields = {ours: c[theirs] for ours, theirs in FIELDS.items()}
        fields["head_dim"] = c["head_dim"] or 0  # null in many files
        fields["n_kv_head"] = c["num_key_value_heads"] or 0
        supported = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
        for field, value in supported.items():
            found = c.get(field)
            require(found in (None, value), f"{field}={found!r} is not supported, only {value!r}")
        if kind == "mistral" and c["sliding_window"] is not None:  # so that no token leaves the window
            fields["block_size"] = min(fields["block_size"], c["sliding_window"])
        fields["rope_theta"], fields["rope_scaling"] = hf_rope(c)
        mode = c.get("value_mode", "vanilla")
        if mode == "neutreno_resformer":  # the authors' name
            mode = "resformer_neutreno"
        return ModelConfig(value_mode=mode, **fields)
    except KeyError as e:
        raise UserError(f"{where} has no {e}") from None
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(f"{where}: {e}") from None


def hf_rope(c):
    """(rope_theta, rope_scaling) of a ModelConfig, from the dict of a config.json."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # newer files have rope_theta in there too
    rope_theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3":
        return rope_theta, tuple(rope[name] for name in SCALING)
    is_plain = kind == "default" or rope.keys() <= {"rope_theta"}
    require(is_plain, f"rope_scaling of type {kind!r} is not supported, only 'llama3'")
    return rope_theta, ()


def is_plain_llama(cfg):
    """Whether Llama's layout can express a model: vanilla, or with fewer key and value heads."""
    return cfg.arch == "llama" and dataclasses.replace(cfg.value_mode, kv_group=1) == ValueMode()


def llama_config(cfg, eot):
    """What config.json says of a plain Llama. eot: the id of end-of-text."""
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        rope |= {"rope_type": "llama3", **dict(zip(SCALING, cfg.rope_scaling, strict=True))}
    return {
        **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
        "num_key_value_heads": cfg.n_kv_head,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
    }


def to_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a vanilla model (or GQA).
    Raises UserError for a model that is not plain Llama."""
    transformers, cfg = need("transformers"), model.cfg
    if not is_plain_llama(cfg):
        raise UserError(f"{cfg.value_mode.name} of arch={cfg.arch} is not plain Llama; give vanilla of arch=llama")
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_config(cfg, eot))).to(model.head.weight)
    peer.load_state_dict({name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)})
    return peer.eval()


# ---- tokenizers


def hf_token(folder, *fields):
    """A token id in config.json: of the first of `fields` that is set; of a list, its first."""
    c = read_hf_config(folder)
    for field in fields:
        token = c.get(field)
        if isinstance(token, list):
            token = token[0] if token else None
        if token is not None:
            return convert(token, COUNT, f"{folder}/config.json: {field}")
    raise UserError(f"{folder}/config.json has neither {' nor '.join(fields)}")


class HFTokenizer:
    """A folder's tokenizer.json with the methods of data.Tokenizer. `eot`: the token that starts a sequence; `end`: the
    one that ends it; `prefix`: the ids that the file itself puts before a text, [bos] in Llama's. `hash`: our
    tokenizer's, if export.py made the folder; else None, and our data does not fit it."""

    def __init__(self, folder):
        path = Path(folder) / "tokenizer.json"
        tokenizers = need("tokenizers")
        try:
            self.encoding = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the package has no class of its own for it
            raise UserError(f"{path} is not the tokenizer of a Hugging Face model: {e}") from None
        self.hash = made_by_us(folder)["tokenizer_hash"]
        self.eot = hf_token(folder, "bos_token_id", "eos_token_id")
        self.end = hf_token(folder, "eos_token_id", "bos_token_id")
        text = self.encoding.encode("a")
        self.prefix = text.ids[: [*text.special_tokens_mask, 0].index(0)]

    def encode(self, text, allow_eot=False):
        self.encoding.encode_special_tokens = not allow_eot  # else '<|endoftext|>' in a text becomes its id
        return self.encoding.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.encoding.decode(ids, skip_special_tokens=False)


def merge_of(token, ranks):
    """The two parts that tiktoken merges last when it makes a token, or None if merges do not make it."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        lowest = min(pairs, key=lambda pair: ranks.get(pair, math.inf))
        if ranks.get(lowest, ranks[token]) >= ranks[token]:
            return None
        i = pairs.index(lowest)
        parts[i : i + 2] = [lowest]
    return parts


def tokenizer_json(tokenizer):
    """A data.Tokenizer as the dict of a tokenizer.json: byte-level BPE that takes whole pieces first, as tiktoken."""
    spec, letters = tokenizer.spec, byte_letters()
    ranks = {base64.b64decode(b): i for b, i in spec["ranks"]}

    def spell(some):
        return "".join(letters[b] for b in some)

    # the special names too: an added token that the vocabulary does not have would get another id
    vocab = {spell(token): i for token, i in ranks.items()} | spec["special"]
    merges = [merge_of(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": spec["pattern"]}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **special} for name, i in spec["special"].items()],
        "normalizer": {"type": spec["normalize"]} if spec["normalize"] else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [[spell(part) for part in parts] for parts in merges if parts],
            "ignore_merges": True,
        },
    }
