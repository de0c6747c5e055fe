"""Our model as transformers sees it. export.py puts this file, and ours that it imports, into the folder it writes.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("hf/svformer", trust_remote_code=True)

The network is model.py's own. Its cache is transformers' DynamicCache, which holds only the keys and values that layers
own: SVFormer's holds the values of one layer.
"""

import dataclasses
import math

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from common.layers import Rope
from model import GPT
from value_modes import ModelConfig, stored_tensors

NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head"}
NAMES |= {"vocab_size": "vocab_size", "hidden_size": "n_embd", "max_position_embeddings": "block_size"}


class NanoResFormerConfig(PreTrainedConfig):
    """shape: the fields of a ModelConfig. Other code asks for some by transformers' names, so they are here twice."""

    model_type = "nanoresformer"

    def __init__(self, shape=None, use_cache=True, **kwargs):
        self.shape, self.use_cache = shape or dataclasses.asdict(ModelConfig()), use_cache
        super().__init__(**kwargs | {theirs: self.shape[ours] for theirs, ours in NAMES.items()})


class Tokens:
    """A DynamicCache with the methods that GPT.hidden calls: the positions of T new tokens, what they see, and the keys
    and values so far. cache=None keeps none. attention_mask: (B, S), 0 = padding.

    A layer of a DynamicCache has one tensor of keys and one of values. Our layers do not, because they borrow. So we
    number the tensors that the plan stores, and two of them make a layer of the DynamicCache.
    """

    def __init__(self, cfg, cache, attention_mask, T):
        self.cache, self.mask = cache, None
        self.past = 0 if cache is None else cache.get_seq_length()
        if self.past + T > cfg.block_size:
            raise ValueError(f"{self.past + T} tokens do not fit block_size={cfg.block_size}")
        self.stored = list(stored_tensors(cfg).items())  # [(place, heads)]
        self.where = slice(self.past, self.past + T)
        if attention_mask is not None and not attention_mask.all():
            # Positions count from the first token that is no padding.
            self.where = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -T:]  # (B, T)
            causal = torch.ones(T, self.past + T, dtype=torch.bool, device=attention_mask.device).tril(self.past)
            own = causal.triu(self.past)  # padding sees itself, because a softmax over nothing is NaN
            seen = (attention_mask[:, None].bool() & causal) | own  # (B, T, S)
            self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)[:, None]

    def positions(self, T):
        return self.where

    def extend(self, t, n, new):
        """Append `new` (B, G, T, D) to tensor t of layer n; returns all of it, (B, G, past + T, D)."""
        if self.cache is None:
            return new
        # The other half of the pair gets nothing new now: an empty tensor leaves it as it is.
        layer, side = divmod([place for place, _ in self.stored].index((t, n)), 2)
        pair = self.stored[2 * layer : 2 * layer + 2]  # DynamicCache does not mind which of them is a key or a value
        _, other_heads = pair[0 if side else -1]
        update = [new.new_empty(new.size(0), other_heads, 0, new.size(3))] * 2
        update[side] = new
        return self.cache.update(*update, layer)[side]

    def advance(self, T):
        pass


class Body(GPT):
    """GPT with the call that trainers expect of a base model: transformers', and trl's, which skip the head."""

    gradient_checkpointing = False  # transformers sets it

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, **kw):
        """Token ids (B, T) -> the last hidden state (B, T, C)."""
        if kw.get("position_ids") is not None:  # such as those of several documents in one row
            raise ValueError("position_ids are not supported; positions follow from attention_mask")
        if past_key_values is None and use_cache and not self.training:
            past_key_values = DynamicCache()
        # Recomputing is ours, so transformers only says whether it wants it.
        self.recompute = self.training and self.gradient_checkpointing
        x = self.hidden(input_ids, Tokens(self.cfg, past_key_values, attention_mask, input_ids.size(1)))
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class NanoResFormerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoResFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _input_embed_layer = "embed"

    def __init__(self, config):
        super().__init__(config)
        self.model = Body(ModelConfig(**config.shape))
        self.post_init()

    def _init_weights(self, module):
        """GPT sets its weights itself, but its angles are in no file: transformers leaves them to this method."""
        if isinstance(module, Rope):
            cfg = self.model.cfg
            rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
            module.cos, module.sin = rope.cos.to(module.cos.device), rope.sin.to(module.sin.device)

    def get_output_embeddings(self):
        return self.model.head

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, logits_to_keep=0, **kw):
        """Token ids (B, T) -> logits (B, T, V), or (B, n, V) with logits_to_keep=n; with labels (B, T), -100 = ignored,
        also the mean cross-entropy of the next tokens."""
        # generate asks for the last logits alone, because those of a whole prompt would fill the memory.
        use_cache = self.config.use_cache if use_cache is None else use_cache
        body = self.model(input_ids, attention_mask, use_cache=use_cache, **kw)
        logits = self.model.head(body.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.size(-1), **kw)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=body.past_key_values)
