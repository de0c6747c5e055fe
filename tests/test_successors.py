"""Rows of the table that transformers has too: one layer of ours against its attention classes, with copied weights.

What those classes have besides (norms of queries and keys, their rotary positions) is switched off.
"""

import pytest
import torch
from conftest import config, tokens
from torch import nn

from model import Attention
from value_modes import plan_layers

transformers = pytest.importorskip("transformers")
neomme = pytest.importorskip("transformers.models.neomme.modeling_neomme")
gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
T = 9
CAUSAL = torch.full((T, T), -torch.inf).triu(1)
NO_ROTATION = torch.ones(2, T, 8), torch.zeros(2, T, 8)  # cos, sin


def layer_of(mode, n):
    """Layer n of a small model: 8 query heads of 8, 4 key and value heads. Random weights in all parameters."""
    cfg = config(mode, n_kv_head=4, head_dim=8)
    torch.manual_seed(n)
    layer = Attention(cfg, n, plan_layers(cfg)[n], "eager")
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    return layer


def copy_weights(layer, peer):
    """q_proj, k_proj, v_proj and o_proj of one of transformers' layers, where it has them, are ours."""
    rows = layer.proj.weight.detach().split(list(layer.proj.parts.values()))
    for t, weight in zip(layer.proj.parts, rows, strict=True):
        getattr(peer, f"{t}_proj").weight = nn.Parameter(weight)
    for name in ("q_norm", "k_norm"):
        setattr(peer, name, nn.Identity())
    peer.scaling = 8**-0.5


def neomme_layer(layer):
    settings = dict(hidden_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_hidden_layers=2)
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
    about = transformers.NeoMMEConfig(
        **settings, rope_parameters=rope, layer_types=["full_attention"] * 2, attn_implementation="eager"
    )
    peer = neomme.NeoMMEAttention(about, 0)
    copy_weights(layer, peer)
    peer.output_projection.o_proj.weight = layer.out.weight
    return peer


def compare(layer, theirs, x, lambdas=(), raw=None, attended=None):
    ours = layer(x, None, lambdas, raw or {}, attended or {})[0]
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_exclusive_self_attention_and_gate_are_neommes():
    for mode in ("xsa", "gated_attention", "value_embed_shared"):
        layer, x, tables = layer_of(mode, 0), torch.randn(2, T, 32), torch.randn(61, 4 * 8)
        peer, values = neomme_layer(layer), None
        open_gate = 2.0  # a gate without weights is one half
        nn.init.zeros_(peer.output_projection.gate_proj.weight)
        if mode == "xsa":
            peer.exclusive_self_attention.alpha = layer.output_gate.strength
        elif mode == "gated_attention":
            peer.output_projection.gate_proj.weight, open_gate = layer.output_gate.w.weight, 1.0
        else:
            values = tables[tokens((2, T))]
        theirs = open_gate * peer(x, NO_ROTATION, attention_mask=CAUSAL, value_embeds=values)[0]
        raw = {} if values is None else {"table 0": {"v": values.view(2, T, 4, 8).transpose(1, 2)}}
        compare(layer, theirs, x, lambdas=[(1.0, 1.0)], raw=raw)


def gemma4_layers(**settings):
    about = transformers.Gemma4TextConfig(
        **dict(hidden_size=32, num_attention_heads=8, num_key_value_heads=4, num_global_key_value_heads=4, head_dim=8),
        **dict(global_head_dim=8, num_hidden_layers=2, layer_types=["full_attention"] * 2),
        attn_implementation="eager",
        **settings,
    )
    return [gemma4.Gemma4TextAttention(about, n) for n in range(2)]


def test_values_made_of_keys_are_gemmas():
    peer, layer, x = gemma4_layers(attention_k_eq_v=True)[0], layer_of("k_eq_v", 0), torch.randn(2, T, 32)
    copy_weights(layer, peer)
    peer.o_proj.weight, peer.v_norm.eps = layer.out.weight, layer.norm_eps
    assert peer.v_proj is None
    compare(layer, peer(x, NO_ROTATION, CAUSAL, {})[0], x)


def test_keys_and_values_of_a_lower_layer_are_gemmas():
    peers, shared, attended = gemma4_layers(num_kv_shared_layers=1), {}, {}
    for n, peer in zip((1, 2), peers, strict=True):  # of 4 layers, 2 and 3 borrow from 1
        layer, x = layer_of("share_last", n), torch.randn(2, T, 32)
        copy_weights(layer, peer)
        peer.o_proj.weight, peer.v_norm = layer.out.weight, nn.Identity()
        theirs = peer(x, NO_ROTATION, CAUSAL, shared)[0]
        compare(layer, theirs, x, attended=attended)
        attended[n] = layer(x, None, (), {}, attended)[2]
    assert peers[1].is_kv_shared_layer and not hasattr(peers[1], "k_proj")
