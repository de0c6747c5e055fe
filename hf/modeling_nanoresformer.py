"""Our model as transformers sees it. export.py puts this file, and ours that it imports, into the folder it writes.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("exports/svformer", trust_remote_code=True)

The network is model.py's own. Its cache is transformers' DynamicCache, which holds only the keys and values that layers
own: SVFormer's holds the values of one layer.
"""

import contextlib
import dataclasses
import math
import threading

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from model import GPT
from net.layers import Linear, Rope
from value_modes import ModelConfig, stored_tensors

NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head"}
NAMES |= {"vocab_size": "vocab_size", "hidden_size": "n_embd", "max_position_embeddings": "block_size"}
# What transformers and trainers pass along too: for the loss, or what the tokens and their positions say already.
IGNORED = {"num_items_in_batch", "shift_labels", "ignore_index", "cache_position", "token_type_ids"}
IGNORED |= {"tokenizer", "assistant_tokenizer"}  # which generate(stop_strings=…) leaves there
IGNORED_IF_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}

# Trainer shifts labels by itself, as for label smoothing, if it knows a class by name.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["nanoresformer"] = "NanoResFormerForCausalLM"


class NanoResFormerConfig(PreTrainedConfig):
    """shape: the fields of a ModelConfig. Other code asks for some by transformers' names, so they are here twice."""

    model_type = "nanoresformer"

    def __init__(self, shape=None, use_cache=True, **kwargs):
        self.shape, self.use_cache = shape or dataclasses.asdict(ModelConfig()), use_cache
        super().__init__(**kwargs | {theirs: self.shape[ours] for theirs, ours in NAMES.items()})


class Tokens:
    """A DynamicCache with the methods that GPT.hidden calls: the positions of T new tokens, what they see, and the keys
    and values so far. cache=None keeps none. attention_mask: (B, S), 0 = padding, or (B, 1 or H, T, S), all that each
    token sees. position_ids: (B, T). Where they do not count on, another document begins, which sees itself alone.

    A layer of a DynamicCache has one tensor of keys and one of values. Our layers do not, because they borrow. So we
    number the tensors that the plan stores, and two of them make a layer of the DynamicCache.
    """

    def __init__(self, cfg, cache, attention_mask, position_ids, x):
        if not isinstance(cache, DynamicCache | None):
            raise ValueError(f"keys and values only go into a DynamicCache, not a {type(cache).__name__}")
        self.cache, T = cache, x.size(1)
        self.past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None and self.past + T > cfg.block_size:
            raise ValueError(f"{self.past + T} tokens do not fit in block_size={cfg.block_size}")
        if attention_mask is not None and attention_mask.size(-1) != self.past + T:
            raise ValueError(f"attention_mask is for {attention_mask.size(-1)} tokens, not for {self.past + T}")
        self.stored = list(stored_tensors(cfg).items())  # [(place, heads)]
        self.where = slice(self.past, self.past + T) if position_ids is None else position_ids
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # a graph that is traced cannot look
        if position_ids is not None and self.past == 0 and not is_traced and position_ids.max() >= cfg.block_size:
            raise ValueError(f"position_ids go up to {position_ids.max()}, but block_size is {cfg.block_size}")

        # What new tokens may see, if that is not simply all before them.
        seen = None
        if attention_mask is not None and attention_mask.ndim == 4:
            seen = attention_mask
        elif attention_mask is not None and (is_traced or not attention_mask.all()):
            causal = torch.ones(T, self.past + T, dtype=torch.bool, device=x.device).tril(self.past)
            own = causal.triu(self.past)  # padding sees itself, because a softmax over nothing is NaN
            seen = (attention_mask[:, None, None].bool() & causal) | own  # (B, 1, T, S)
            if position_ids is None:  # they count from the first token that is no padding
                self.where = (attention_mask.bool().cumsum(1) - 1).clamp(min=0)[:, -T:]  # (B, T)
        elif attention_mask is None and position_ids is not None and self.past == 0:
            begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
            if is_traced or begins.any():
                document = begins.cumsum(1)  # (B, T)
                seen = (document[:, None, :, None] == document[:, None, None]).tril()
        if seen is not None and not seen.is_floating_point():
            seen = torch.zeros(seen.shape, device=x.device).masked_fill(~seen.bool(), -math.inf)
        self.mask = seen  # added to the scores

    def positions(self, T):
        return self.where

    def extend(self, t, n, new):
        """Append `new` (B, G, T, D) to tensor t of layer n; returns all of it, (B, G, past + T, D)."""
        if self.cache is None:
            return new
        # The other half of the pair gets nothing new now: an empty tensor leaves it as it is.
        layer, side = divmod([place for place, _ in self.stored].index((t, n)), 2)
        pair = self.stored[2 * layer : 2 * layer + 2]  # DynamicCache does not mind which of them is a key or a value
        _, other_heads = pair[0 if side else -1]  # the last one may be alone, then it is its own partner
        update = [new.new_empty(new.size(0), other_heads, 0, new.size(3))] * 2
        update[side] = new
        return self.cache.update(*update, layer)[side]

    def advance(self, T):
        pass


class Body(GPT):
    """GPT with the call that trainers expect of a base model: transformers', and trl's, which skip the head."""

    gradient_checkpointing = False  # transformers sets it

    def __init__(self, config):
        # from_pretrained(…, max_position_embeddings=4096) changes the copies alone
        config.shape = config.shape | {ours: getattr(config, theirs) for theirs, ours in NAMES.items()}
        super().__init__(ModelConfig(**config.shape))
        self.config = config
        for module in self.modules():
            if isinstance(module, Linear):
                module.__class__ = nn.Linear  # torch's quantize_dynamic replaces no class that is made of it

    @contextlib.contextmanager
    def keeping(self, states):
        """Append the input of each layer to `states`."""
        thread = threading.get_ident()

        def keep(block, args):
            if threading.get_ident() == thread:  # a server may call one model from several threads
                states.append(args[0])

        with contextlib.ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(keep))
            yield

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None, cache=None,
        past_key_values=None, output_hidden_states=None, **kw,
    ):  # fmt: skip
        """Token ids (B, T), or their embeddings (B, T, C) -> the last hidden state (B, T, C)."""
        # A keyword that we do not know would change something in another model, and nothing here.
        config, known = self.config, IGNORED if position_ids is None else IGNORED | IGNORED_IF_PACKED
        for name, value in {"output_attentions": config.output_attentions, **kw}.items():
            is_off = value is None or (value is False and name.startswith("output_"))
            if not is_off and name not in known:
                raise ValueError(f"this model does not accept {name}; modeling_nanoresformer.py lists what it accepts")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if input_ids is None and self.tables:
            raise ValueError(f"{self.cfg.value_mode.name} needs input_ids, because it has values for each token id")
        x = inputs_embeds if input_ids is None else input_ids
        cache = past_key_values if cache is None else cache  # its name until transformers 5.24
        is_recomputed = self.training and self.gradient_checkpointing  # a cache would be filled twice
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        if cache is None and use_cache and not is_recomputed:
            cache = DynamicCache()

        # What transformers only asks for: recomputing, and a kernel.
        self.recompute = is_recomputed
        for block in self.blocks:
            block.attn.kernel = "eager" if config._attn_implementation == "eager" else "sdpa"

        # As in transformers: the input of each layer, and at the end the normed output of the last.
        wants_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [] if wants_states else None
        with self.keeping(states) if wants_states else contextlib.nullcontext():
            x = self.hidden(x, Tokens(self.cfg, cache, attention_mask, position_ids, x))
        states = (*states, x) if wants_states else None
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=states)


class NanoResFormerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoResFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _input_embed_layer = "embed"

    def __init__(self, config):
        super().__init__(config)
        self.model = Body(config)
        self.post_init()

    def _init_weights(self, module):
        """GPT sets its weights itself, but its angles are in no file: transformers leaves them to this method."""
        if isinstance(module, Rope):
            cfg = self.model.cfg
            rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
            module.cos, module.sin = rope.cos.to(module.cos.device), rope.sin.to(module.sin.device)

    def get_output_embeddings(self):
        return self.model.head

    def set_output_embeddings(self, new):
        self.model.head = new

    def resize_token_embeddings(self, *args, **how):
        """Also the tables of values for each token id, and what config.json says."""
        made = super().resize_token_embeddings(*args, **how)
        self.config.shape = self.config.shape | {"vocab_size": made.num_embeddings}
        self.model.cfg = dataclasses.replace(self.model.cfg, vocab_size=made.num_embeddings)
        for t, table in enumerate(self.model.tables):
            self.model.tables[t] = self._get_resized_embeddings(table, made.num_embeddings)
        return made

    @classmethod
    def from_pretrained(cls, *args, tp_plan=None, **how):
        if tp_plan:  # transformers would take it and divide nothing
            raise ValueError("this model has no tensor parallelism; leave out tp_plan")
        return super().from_pretrained(*args, **how)

    def _prepare_generation_config(self, generation_config, *args, **how):
        """Before anything runs. Our default length is the block's; if max_new_tokens is given, too, it counts, as
        always, but transformers would warn at each call."""
        made, others = super()._prepare_generation_config(generation_config, *args, **how)
        if made.assistant_early_exit:
            raise ValueError("this model has no early exit; leave out assistant_early_exit")
        if made.max_new_tokens is not None:
            made.max_length = None
        return made, others

    def _validate_generated_length(self, generation_config, *args):
        """Called before the first step: text that has no room is better refused now than when the block is full."""
        super()._validate_generated_length(generation_config, *args)
        # prompt lookup tries so many tokens beyond the end
        length = generation_config.max_length + (generation_config.prompt_lookup_num_tokens or 0)
        most = self.model.cfg.block_size
        if length > most + 1:  # the last new token needs no position of its own
            what = f"prompt plus new tokens could reach {length}, but the model's block is {most} tokens long"
            raise ValueError(f"{what}; set a smaller max_new_tokens")

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None,
        logits_to_keep=0, **kw,
    ):  # fmt: skip
        """Token ids (B, T), or their embeddings (B, T, C) -> logits (B, T, V), or (B, n, V) with logits_to_keep=n; with
        labels (B, T), -100 = ignored, also the mean cross-entropy of the next tokens."""
        body = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kw)
        # generate asks for the last logits alone, because those of a whole prompt would fill the memory.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(body.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.size(-1), **kw)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=body.get("past_key_values"), hidden_states=body.hidden_states
        )


class NanoResFormerModel(NanoResFormerForCausalLM):
    """What AutoModel and the pipeline "feature-extraction" load: the same weights, without logits."""

    def forward(self, *args, **kw):
        """-> the last hidden state (B, T, C)."""
        return self.model(*args, **kw)
