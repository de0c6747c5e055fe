"""Our model as transformers sees it. export.py puts this file, and those that it imports, into the folder it writes.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("hf/svformer", trust_remote_code=True)

The network is model.py's own. Its cache is transformers' DynamicCache, with the keys and values that layers own alone.
"""

import dataclasses
import math

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from layers import Rope
from model import GPT
from value_modes import ModelConfig, stored_tensors

NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head"}
NAMES |= {"vocab_size": "vocab_size", "hidden_size": "n_embd", "max_position_embeddings": "block_size"}


class NanoResFormerConfig(PreTrainedConfig):
    """shape: the fields of a ModelConfig. Those that other code asks for have transformers' names too."""

    model_type = "nanoresformer"

    def __init__(self, shape=None, **kwargs):
        self.shape = shape or dataclasses.asdict(ModelConfig())
        super().__init__(**kwargs | {theirs: self.shape[ours] for theirs, ours in NAMES.items()})


class Tokens:
    """What GPT.hidden asks of a cache (see sample.KVCache): where T new tokens are, what they see, and the keys and
    values before them, which are in a DynamicCache or, if that is None, not kept.

    DynamicCache pairs keys and values of a layer. Ours are not paired: layers borrow them. So the tensors that the plan
    stores are numbered, and two of them make a layer of the DynamicCache. attention_mask: (B, S), 0 = padding.
    """

    def __init__(self, cfg, cache, attention_mask, T):
        self.cache, self.past, self.mask = cache, 0 if cache is None else cache.get_seq_length(), None
        self.stored = list(stored_tensors(cfg).items())  # [(place, heads)]
        self.where = slice(self.past, self.past + T)
        if attention_mask is not None and not attention_mask.all():
            if attention_mask.shape[1:] != (self.past + T,):
                raise ValueError(f"attention_mask {tuple(attention_mask.shape)} must be (batch, {self.past + T})")
            self.where = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -T:]  # (B, T)
            causal = torch.ones(T, self.past + T, dtype=torch.bool, device=attention_mask.device).tril(self.past)
            own = causal & ~causal.tril(self.past - 1)
            seen = (attention_mask[:, None].bool() & causal) | own  # (B, T, S); padding sees itself: no NaN
            self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)[:, None]

    def end(self, T):
        return self.past + T

    def positions(self, T):
        return self.where

    def extend(self, t, n, new):
        """Append `new` (B, G, T, D) to tensor t of layer n; returns all of it, (B, G, past + T, D)."""
        if self.cache is None:
            return new
        layer, side = divmod([place for place, _ in self.stored].index((t, n)), 2)
        pair = self.stored[2 * layer : 2 * layer + 2]  # DynamicCache does not mind which of them is a key or a value
        _, other_heads = pair[0 if side else -1]
        update = [new.new_empty(new.size(0), other_heads, 0, new.size(3))] * 2
        update[side] = new
        return self.cache.update(*update, layer)[side]

    def advance(self, T):
        pass


class NanoResFormerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoResFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        kind = "eager" if config._attn_implementation == "eager" else "sdpa"
        self.model = GPT(ModelConfig(**config.shape), attn=kind)
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module):
        """GPT sets its weights itself, but its angles are in no file: transformers leaves them to this method."""
        if isinstance(module, Rope):
            cfg = self.model.cfg
            rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
            module.cos, module.sin = rope.cos.to(module.cos.device), rope.sin.to(module.sin.device)

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.model.head

    @can_return_tuple
    def forward(
        self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=True, logits_to_keep=0, **kw
    ):
        """Token ids (B, T) -> logits (B, T, V), or (B, n, V) with logits_to_keep=n; with labels (B, T), -100 = ignored,
        also the mean cross-entropy of the next tokens."""
        if kw.get("position_ids") is not None:  # such as those of several documents in one row
            raise ValueError("position_ids are not supported; positions follow from attention_mask")
        self.model.recompute = self.training and self.gradient_checkpointing
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache()
        tokens = Tokens(self.model.cfg, past_key_values, attention_mask, input_ids.size(1))
        x = self.model.hidden(input_ids, tokens)
        logits = self.model.head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.size(-1), **kw)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
