"""Folders in Hugging Face layout, of Llama's type: read as models of ours."""

from pathlib import Path

import torch

from configurator import UserError
from files import read_json, read_tensors
from model import GPT, Rope
from value_modes import ModelConfig, ValueMode, mode_name, require

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
    require(isinstance(rope, dict), f"{field}={rope!r} is not supported")
    kind = rope.get("rope_type", rope.get("type", None if rope.keys() - {"rope_theta"} else "default"))
    require(kind in ("default", "llama3"), f"{field} of type {kind!r} is not supported, only 'llama3'")
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
        require(not odd, f"{', '.join(f'{k}={c[k]!r}' for k in odd)} is not supported")
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

    return read_tensors(path, fill)


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
