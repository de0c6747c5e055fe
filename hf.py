"""Hugging Face's layout of Llama and Mistral: a folder read as a model of ours, and our vanilla model as theirs.

Reading a folder needs no transformers package. Read model.py first.
"""

import dataclasses
from pathlib import Path

import torch

from configurator import UserError, need, require
from files import read_json, read_tensors
from model import GPT, Rope
from value_modes import ModelConfig, ValueMode

FIELDS = {  # of ModelConfig, and their names in config.json
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
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


def hf_parts(model):
    """[(name of a tensor in Llama's layout, our parameter, its rows)]: our fused products, taken apart.
    Raises UserError if any parameter of the model has no name there."""
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head.head": "lm_head"}
    for n in range(model.cfg.n_layer):
        for ours, theirs in LAYER_NAMES.items():
            names[f"blocks.{n}.{ours}"] = f"model.layers.{n}.{theirs}"
    found = []
    for full_name, parameter in model.named_parameters():
        path, _, kind = full_name.rpartition(".")
        row = 0
        for part, width in getattr(model.get_submodule(path), "parts", {"": len(parameter)}).items():
            name = names.get(f"{path}.{part}" if part else path)
            if name is None or kind != "weight":
                mode = model.cfg.value_mode.name
                raise UserError(f"Llama's layout has no names for the weights that {mode} adds, such as {full_name}")
            found.append((f"{name}.weight", parameter, slice(row, row + width)))
            row += width
    return found


def read_hf_config(folder):
    return read_json(Path(folder) / "config.json", "the config of a Hugging Face model")


def is_hf_folder(folder):
    """Whether a folder is in Hugging Face's layout. Runs of ours have a config.json too."""
    exists = (Path(folder) / "config.json").exists()
    return exists and not {"model_type", "architectures", "architecture"}.isdisjoint(read_hf_config(folder))


def hf_config(folder):
    """ModelConfig of a Llama or Mistral folder, with the mode that "value_mode" in its config.json names.
    Raises UserError, with the field, if it asks for what our model does not have."""
    c = read_hf_config(folder)
    try:
        kind = c.get("model_type", c.get("architecture"))
        require(kind in ("llama", "mistral"), f"model_type={kind!r} is not supported, only 'llama' and 'mistral'")
        fields = {ours: c[theirs] for ours, theirs in FIELDS.items()}
        supported = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
        supported["head_dim"] = fields["n_embd"] // fields["n_head"]
        for field, value in supported.items():
            found = c.get(field)
            require(found in (None, value), f"{field}={found!r} is not supported, only {value!r}")
        window = c.get("sliding_window", 4096) if kind == "mistral" else None  # 4096 is transformers' default
        if window is not None:
            fields["block_size"] = min(fields["block_size"], window)  # so that no token leaves the window
        fields["rope_theta"], fields["rope_scaling"] = hf_rope(c)
        fields["n_kv_head"] = c.get("num_key_value_heads") or 0
        mode = c.get("value_mode", "vanilla")
        if mode == "neutreno_resformer":  # the authors' name
            mode = "resformer_neutreno"
        return ModelConfig(value_mode=mode, **fields)
    except KeyError as e:
        raise UserError(f"{folder}/config.json has no {e}") from None
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(f"{folder}/config.json: {e}") from None


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


def hf_files(folder):
    """The weights files: model.safetensors, or all shards. (Mistral's folders repeat the model in other files.)"""
    whole = Path(folder) / "model.safetensors"
    files = [whole] if whole.exists() else sorted(Path(folder).glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model.safetensors and no model-*.safetensors; pickle (.bin) is never loaded")
    return files


def load_hf(folder, device="cpu", attn="sdpa", dtype=torch.float32):
    """A Llama or Mistral folder (config.json, model.safetensors or its shards) as a model of ours, in eval mode, its
    weights in `dtype`. The peak of memory is the model and one shard.

    Our modes are read too: "value_mode" in config.json, and no tensor for what a layer does not own.
    """
    cfg = hf_config(folder)
    with torch.device("meta"):
        model = GPT(cfg, attn=attn, init=False)
    model.to(dtype).to_empty(device=device)
    model.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling).to(device)  # not in the files
    places = {name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)}
    missing = set(places)

    def copy_tensors(f):
        for name in f.keys():
            if name.endswith("rotary_emb.inv_freq"):  # older files have this buffer
                continue
            shape = tuple(f.get_slice(name).get_shape())
            if name not in places or shape != tuple(places[name].shape):
                raise UserError(f"{folder}: {name} {shape} has no place in the model of config.json")
            places[name].copy_(f.get_tensor(name))
            missing.discard(name)

    for path in hf_files(folder):
        read_tensors(path, copy_tensors)
    if "lm_head.weight" in missing and read_hf_config(folder).get("tie_word_embeddings"):
        places["lm_head.weight"].copy_(model.embed.weight.detach())
        missing.discard("lm_head.weight")
    if missing:
        raise UserError(f"{folder} has no tensor {min(missing)}: is a shard missing, or config.json another model's?")
    return model.eval()


def hf_tokenizer(folder):
    """The tokenizers.Tokenizer in a folder's tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    tokenizers = need("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the package has no class of its own for it
        raise UserError(f"{path} is not the tokenizer of a Hugging Face model: {e}") from None


def hf_first_token(folder):
    """The id that each sequence starts with: config.json's bos_token_id, else its (first) eos_token_id."""
    c = read_hf_config(folder)
    token = c.get("bos_token_id")
    if token is None:
        token = c.get("eos_token_id")
    if isinstance(token, list):
        token = token[0]
    if token is None:
        raise UserError(f"{folder}/config.json has neither bos_token_id nor eos_token_id")
    return token


def to_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a vanilla model (or GQA); its save_pretrained exports them.
    eot: the id of end-of-text. Raises UserError for a model that is not plain Llama."""
    transformers = need("transformers")
    cfg = model.cfg
    is_vanilla = dataclasses.replace(cfg.value_mode, kv_group=1) == ValueMode()
    if cfg.arch != "llama" or cfg.rope_scaling or not is_vanilla:
        raise UserError(f"{cfg.value_mode.name} of arch={cfg.arch} is not plain Llama; give vanilla of arch=llama")
    llama = transformers.LlamaConfig(
        **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
        num_key_value_heads=cfg.n_kv_head,
        rope_theta=cfg.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    peer = transformers.LlamaForCausalLM(llama).to(model.head.weight)
    peer.load_state_dict({name: parameter.detach()[rows] for name, parameter, rows in hf_parts(model)})
    return peer.eval()
