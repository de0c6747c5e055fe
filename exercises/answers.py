"""Your answers to docs/exercises.md. Fill in a function, then check it: python -m exercises.check 1

Equations count layers from 1, so V_1 is the first layer's; the code counts from 0. Shapes: B sequences, H heads, T
tokens, D numbers per head. a is the attention A_n of a layer n > 1: a[b, h, t, s] is the weight of token s for token t,
and 0 if s > t.
"""

import torch  # noqa: F401
import torch.nn.functional as F  # noqa: F401
from torch import nn

from value_modes import Residual, ValueMode  # noqa: F401


def resformer(a, v_n, v_1):
    """1. U_n of ResFormer. a (B, H, T, T), v_n and v_1 (B, H, T, D) -> (B, H, T, D)."""
    raise NotImplementedError


def entropy(a):
    """2. Entropy of token importance in nats, one number for each sequence. a (B, H, T, T) -> (B,)."""
    raise NotImplementedError


def svformer(a, v_n, v_1):
    """3. U_n of SVFormer. Shapes as in 1."""
    raise NotImplementedError


def cache_bytes(n_layer, n_head, head_dim, n_tokens, bytes_per_number):
    """3. Bytes of the KV cache of one sequence: (vanilla's, SVFormer's)."""
    raise NotImplementedError


def neutreno(a, v_n, v_1, lam):
    """4. U_n of NeuTRENO, lam is a number. Shapes as in 1."""
    raise NotImplementedError


def last_two():
    """5. A ValueMode: the last two layers use a V_n + b V_1. Each learns its a, from 1, and its b, from 2."""
    raise NotImplementedError


def pairs():
    """6. A ValueMode: layers 0 1, 2 3, … share keys and values. Those that own values use ½ (V_n + V_1)."""
    raise NotImplementedError


def learned_neutreno():
    """7. A ValueMode: each layer n > 1 learns the λ of NeuTRENO, and nothing else. A new model equals vanilla."""
    raise NotImplementedError


class PreviousToken(nn.Module):
    """8. One layer's attention with V'_n[t] = V_n[t] + g V_1[t - 1]. g: learned, one for each head, from 0; its shape
    must broadcast to (B, H, T, D). The check wraps the attention of each layer above 0 in one."""

    def __init__(self, attn, n_head):
        super().__init__()
        self.attn = attn
        raise NotImplementedError

    def forward(self, x, angles, weights, projected, used, cache=None):
        """Calls self.attn with other `projected`. Arguments and results are those of model.Attention.forward."""
        raise NotImplementedError
