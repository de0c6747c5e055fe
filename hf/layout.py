"""Hugging Face's layouts: we read folders of Llama and export.py, and we make their classes of ours.

Only `to_llama` needs the transformers package. Read before: model.py. Read next: export.py, which writes such folders.
"""

import base64
import dataclasses
import json
from pathlib import Path

import torch
from safetensors import safe_open

from common.files import reading
from common.sizes import refuse_too_large
from common.tokenizer import ARCHITECTURES, HFTokenizer, byte_letters
from configurator import UserError, need
from model import GPT
from value_modes import ModelConfig, ValueMode

OURS = "nanoresformer"  # model_type of what plain Llama cannot express, see modeling_nanoresformer.py
# Fields of ModelConfig, and their names in config.json.
FIELDS = {"vocab_size": "vocab_size", "block_size": "max_position_embeddings", "n_layer": "num_hidden_layers"}
FIELDS |= {"n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size"}
FIELDS |= {"head_dim": "head_dim", "n_hidden": "intermediate_size", "norm_eps": "rms_norm_eps"}
SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
BUFFER = "rotary_emb.inv_freq"  # of old files, Llama-2's among them: we compute it
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


def named_parts(model):
    """[(name, its parameter, its rows there)] of all weights, with fused products taken apart:
    blocks.0.attn.proj.q.weight."""
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
    """`named_parts` of a model with the names of Llama's layout. Raises KeyError if a weight has no name there."""
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head.head": "lm_head"}
    for n in range(model.cfg.n_layer):
        for ours, theirs in LAYER_NAMES.items():
            names[f"blocks.{n}.{ours}"] = f"model.layers.{n}.{theirs}"
    return [(f"{names[ours.removesuffix('.weight')]}.weight", p, rows) for ours, p, rows in named_parts(model)]


def named_tensors(model, model_type):
    """{name in a folder: tensor} of all weights, as views: with model_type OURS our own names, else Llama's."""
    if model_type == OURS:
        return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)}


def hf_files(folder):
    """The weights files: model.safetensors, or all shards."""
    whole = Path(folder) / "model.safetensors"
    files = [whole] if whole.exists() else sorted(Path(folder).glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model.safetensors and no model-*.safetensors; pickle (.bin) is never loaded")
    return files


def load_hf(folder, device="cpu", dtype=torch.float32):
    """A folder of Llama or export.py (config.json, model.safetensors or its shards) as a model of ours, in eval mode,
    its weights in `dtype`.

    The authors' layout is read too: Llama's, with "value_mode" in config.json and no tensor for what a layer borrows.
    A head that is tied to the embeddings becomes a copy of them.
    """
    cfg = hf_config(folder)
    remedy = "if the command has --dtype, bfloat16 needs half as much as float32"
    refuse_too_large(f"{folder} in {str(dtype).removeprefix('torch.')}", cfg, dtype.itemsize, remedy)
    model = GPT(cfg, init=False).to(device, dtype)
    with reading(folder, "a model with Llama's weights"):
        places = named_tensors(model, read_hf_config(folder).get("model_type"))

    # Each tensor goes to its place, and each place is taken once.
    for path in hf_files(folder):
        with reading(path, "weights of the model in config.json"), safe_open(path, "pt") as file:
            for name in file.keys():
                if name.endswith(BUFFER):
                    continue
                tensor, place = file.get_tensor(name), places.pop(name)
                if place.shape != tensor.shape:
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(place.shape)}")
                place.copy_(tensor)
    if is_tied(folder) and "lm_head.weight" in places:
        places.pop("lm_head.weight").copy_(model.embed.weight.detach())
    if places:
        raise UserError(f"{folder} has no tensor {min(places)}; is a shard missing, or is config.json another model's?")
    return model.eval()


# ---- config.json


def read_hf_config(folder):
    path = Path(folder) / "config.json"
    with reading(path, "the config of a run or of a Hugging Face model"):
        return dict(json.loads(path.read_bytes()))


def is_tied(path):
    """Whether the model of a folder, or of a file in it, has one matrix for its embeddings and its head. Ours has
    two."""
    folder = Path(path).parent if Path(path).is_file() else path
    return is_hf_folder(folder) and bool(read_hf_config(folder).get("tie_word_embeddings"))


def is_hf_folder(folder):
    """Whether a folder is in Hugging Face's layout. Runs of ours have a config.json too."""
    if not (Path(folder) / "config.json").exists():
        return False
    c = read_hf_config(folder)
    return any(key in c for key in ("model_type", "architectures", "architecture"))


def made_by_us(folder):
    """What export.py says of the checkpoint in config.json. All are None in other folders."""
    c = read_hf_config(folder)
    return {name: c.get(name) for name in ("step", "val_loss", "tokenizer_hash", "bos")}


def hf_config(folder):
    """ModelConfig of a folder. Raises UserError, with the field, if it asks for what our model does not have."""
    c, path = read_hf_config(folder), Path(folder) / "config.json"
    with reading(path, "the config of a Hugging Face model"):
        if c.get("model_type") == OURS:
            return ModelConfig.of_record(c["shape"])
        # Real files leave out the widths of heads, and the authors' say "architecture".
        c = {"model_type": c.get("architecture"), "head_dim": None, "num_key_value_heads": None, **c}
        if c["model_type"] not in (None, *ARCHITECTURES):
            raise UserError(f"{folder} is a {c['model_type']} model; only {' and '.join(ARCHITECTURES)} are supported")
        if c["model_type"] == "mistral":  # what transformers takes where a file says nothing
            c = {"sliding_window": 4096, **c, "num_key_value_heads": c["num_key_value_heads"] or 8}
            window, block = c["sliding_window"], c["max_position_embeddings"]
            if window and window < block:
                what = f"uses an attention window of {window} tokens, shorter than its block of {block}"
                raise UserError(f"{folder} {what}; no mode here has one")
        for field, value in SUPPORTED.items():
            if c.get(field) not in (None, value):
                raise UserError(f"{folder} has {field}={c[field]!r}; only {value!r} is supported")
        fields = {ours: c[theirs] or 0 for ours, theirs in FIELDS.items()}
        # Newer files have rope_theta among rope_parameters.
        rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise UserError(f"{folder} has rope_scaling of type {kind!r}; only 'llama3' is supported")
        fields["rope_theta"] = rope.get("rope_theta", c.get("rope_theta", 10000.0))
        fields["rope_scaling"] = tuple(rope[name] for name in SCALING) if kind == "llama3" else ()
        return ModelConfig(value_mode=c.get("value_mode", "vanilla"), **fields)


def is_plain_llama(cfg):
    """Whether `to_llama` can express a model: vanilla, or with fewer key and value heads."""
    is_vanilla = dataclasses.replace(cfg.value_mode, kv_group=1) == ValueMode()
    return is_vanilla and cfg.arch == "llama" and not cfg.rope_scaling


def to_llama(model, start=0, end=0):
    """transformers' LlamaForCausalLM with the weights of a plain Llama of ours, see `is_plain_llama`."""
    cfg, transformers = model.cfg, need("transformers")
    fields = {theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}, "tie_word_embeddings": False}
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, bos_token_id=start, eos_token_id=end))
    peer.to(model.head.weight).load_state_dict(named_tensors(model, "llama"))
    return peer.eval()


# ---- tokenizers


def fast_tokenizer(tokenizer, bos=False):
    """Our tokenizer as one of the tokenizers package: byte-level BPE that takes whole pieces first, as tiktoken.
    bos: the token that begins a sequence goes before each text. Another model's tokenizer is one already."""
    tokenizers = need("tokenizers")
    made = tokenizer.encoding if isinstance(tokenizer, HFTokenizer) else byte_level_bpe(tokenizer)
    start = next(name for name, i in tokenizer.special.items() if i == tokenizer.start)
    parts = {"single": f"{start} $A", "pair": f"{start} $A $B:1", "special_tokens": [(start, tokenizer.start)]}
    if bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(**parts)
    elif isinstance(tokenizer, HFTokenizer):  # in training nothing came before a text
        made.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return made


def byte_level_bpe(tokenizer):
    """Our tokenizer's merges, pieces and names for the tokenizers package."""
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
