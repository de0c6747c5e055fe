"""Hugging Face's layouts: we read folders of Llama, Mistral and export.py, and we make their classes of ours.

Only `to_llama` needs the transformers package. Read before: model.py. Read next: export.py, which writes such folders.
"""

import base64
import dataclasses
import json
from pathlib import Path

import torch
from safetensors import safe_open

from common.files import reading
from common.layers import Rope
from common.tokenizer import byte_letters
from configurator import UserError, need
from model import GPT
from value_modes import ModelConfig, ValueMode

OURS = "nanoresformer"  # model_type of what plain Llama cannot express, see modeling_nanoresformer.py
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
SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # see layers.Rope
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


def named_tensors(model, model_type):
    """{name in a folder: tensor} of all weights, as views: with model_type OURS our own names, else Llama's."""
    if model_type == OURS:
        return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)}


def hf_files(folder):
    """The weights files: model.safetensors, or all shards. (Mistral's folders repeat the model in other files.)"""
    whole = Path(folder) / "model.safetensors"
    files = [whole] if whole.exists() else sorted(Path(folder).glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model.safetensors and no model-*.safetensors; pickle (.bin) is never loaded")
    return files


def load_hf(folder, device="cpu", dtype=torch.float32):
    """A folder of Llama, Mistral or export.py (config.json, model.safetensors or its shards) as a model of ours, in
    eval mode, its weights in `dtype`. The peak of memory is the model and one tensor.

    The authors' layout is read too: Llama's, with "value_mode" in config.json and no tensor for what a layer borrows.
    """
    cfg, c = hf_config(folder), read_hf_config(folder)
    kind = c.get("model_type")

    # We build it on "meta", because an fp32 model in between would double the peak of memory.
    with torch.device("meta"):
        model = GPT(cfg, init=False)
    model.to(dtype).to_empty(device=device)
    if model.rope:  # its angles are not in the files
        model.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling).to(device)

    # Each tensor goes to its place, and each place is taken once.
    places = named_tensors(model, kind)
    for path in hf_files(folder):
        with reading(path, "weights of a Hugging Face model"), safe_open(path, "pt") as file:
            for name in file.keys():
                if name.endswith("rotary_emb.inv_freq"):  # a buffer, in older files
                    continue
                tensor, place = file.get_tensor(name), places.pop(name, None)
                if place is None or place.shape != tensor.shape:
                    what = f"{name} of shape {tuple(tensor.shape)} has no place in the model of config.json"
                    raise UserError(f"{path}: {what}; is it another model's, or in two files?")
                place.copy_(tensor)
    if kind != OURS and c.get("tie_word_embeddings") and "lm_head.weight" in places:
        places.pop("lm_head.weight").copy_(model.embed.weight.detach())
    if places:
        raise UserError(f"{folder} has no tensor {min(places)}; is a shard missing, or config.json another model's?")
    return model.eval()


# ---- config.json


def read_hf_config(folder):
    path = Path(folder) / "config.json"
    with reading(path, "the config of a Hugging Face model"):
        return dict(json.loads(path.read_bytes()))


def is_hf_folder(folder):
    """Whether a folder is in Hugging Face's layout. Runs of ours have a config.json too."""
    if not (Path(folder) / "config.json").exists():
        return False
    c = read_hf_config(folder)
    return any(key in c for key in ("model_type", "architectures", "architecture"))


def made_by_us(folder):
    """What export.py adds to config.json; None in other folders."""
    c = read_hf_config(folder)
    return {name: c.get(name) for name in ("step", "val_loss", "tokenizer_hash", "bos")}


def hf_config(folder):
    """ModelConfig of a folder. Raises UserError, with the field, if it asks for what our model does not have."""
    c, path = read_hf_config(folder), Path(folder) / "config.json"
    with reading(path, "the config of a Hugging Face model"):
        try:
            kind = c.get("model_type", c.get("architecture"))
            return ModelConfig(**c["shape"]) if kind == OURS else llama_shape(c, kind)
        except ValueError as e:  # ModelConfig's own, and ours
            raise UserError(f"{path}: {e}") from None


def llama_shape(c, kind):
    """ModelConfig of the config.json of a Llama or a Mistral. Raises ValueError for what our model does not have."""
    if kind not in ("llama", "mistral"):
        raise ValueError(f"model_type={kind!r} is not supported, only llama, mistral and {OURS}")
    for field, value in SUPPORTED.items():
        if c.get(field) not in (None, value):
            raise ValueError(f"{field}={c[field]!r} is not supported, only {value!r}")
    # Real files leave these out. Mistral's own default of key and value heads is another, so there it must be given.
    c = {"head_dim": None, **({"num_key_value_heads": None} if kind == "llama" else {}), **c}
    fields = {ours: c[theirs] for ours, theirs in FIELDS.items()}
    fields["head_dim"] = c["head_dim"] or 0
    fields["n_kv_head"] = c["num_key_value_heads"] or 0
    if kind == "mistral" and c["sliding_window"] is not None:  # so that no token leaves the window
        fields["block_size"] = min(fields["block_size"], c["sliding_window"])
    fields["rope_theta"], fields["rope_scaling"] = hf_rope(c)
    return ModelConfig(value_mode=c.get("value_mode", "vanilla"), **fields)


def hf_rope(c):
    """(rope_theta, rope_scaling) of a ModelConfig, from the dict of a config.json."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # newer files have rope_theta in there too
    rope_theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3":
        return rope_theta, tuple(rope[name] for name in SCALING)
    if kind != "default" and rope.keys() - {"rope_theta"}:
        raise ValueError(f"rope_scaling of type {kind!r} is not supported, only 'llama3'")
    return rope_theta, ()


def is_plain_llama(cfg):
    """Whether `to_llama` can express a model: vanilla, or with fewer key and value heads."""
    is_vanilla = dataclasses.replace(cfg.value_mode, kv_group=1) == ValueMode()
    return is_vanilla and cfg.arch == "llama" and not cfg.rope_scaling


def to_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a plain Llama of ours, see `is_plain_llama`."""
    cfg, transformers = model.cfg, need("transformers")
    fields = {theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()}
    fields |= {"num_key_value_heads": cfg.n_kv_head, "tie_word_embeddings": False}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, bos_token_id=eot, eos_token_id=eot))
    peer.to(model.head.weight).load_state_dict(named_tensors(model, "llama"))
    return peer.eval()


# ---- tokenizers


def hf_token(folder, field, other):
    """A token id in config.json: of `field`, or where that is not set of `other`; of a list, its first."""
    c = read_hf_config(folder)
    token = c.get(field) if c.get(field) is not None else c.get(other)
    if token is None:
        raise UserError(f"{folder}/config.json has neither {field} nor {other}; add the id of one of them")
    return token[0] if isinstance(token, list) else token


class HFTokenizer:
    """A folder's tokenizer.json with the methods of ours. `eot`: the token that starts a sequence; `end`: the
    one that ends it; `prefix`: the ids that the file itself puts before a text, [bos] in Llama's. `hash`: our
    tokenizer's, if export.py made the folder; else None, and our data does not fit it."""

    def __init__(self, folder):
        path = Path(folder) / "tokenizer.json"
        tokenizers = need("tokenizers")
        with reading(path, "the tokenizer of a Hugging Face model"):
            self.encoding = tokenizers.Tokenizer.from_buffer(path.read_bytes())
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


def fast_tokenizer(tokenizer):
    """Our tokenizer as one of the tokenizers package: byte-level BPE that takes whole pieces first, as tiktoken."""
    tokenizers, spec, letters = need("tokenizers"), tokenizer.spec, byte_letters()
    ranks = {"".join(letters[b] for b in base64.b64decode(text)): i for text, i in spec["ranks"]}

    # tiktoken merges any two neighbours that make a token, the lowest rank first. So each way to cut a token in two
    # is a merge, in the order of ranks. Source: transformers/convert_slow_tokenizer.py, TikTokenConverter.
    cuts = [(token[:i], token[i:]) for token in sorted(ranks, key=ranks.get) for i in range(1, len(token))]
    merges = [(left, right) for left, right in cuts if left in ranks and right in ranks]
    # The special names are in the vocabulary too. Otherwise they would get new ids.
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ranks | spec["special"], merges, ignore_merges=True))

    if spec["normalize"]:
        made.normalizer = tokenizers.normalizers.NFC()
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(spec["pattern"]), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([pieces, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    special = sorted(spec["special"], key=spec["special"].get)
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in special])
    return made
