import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from model import GPT
from value_modes import Residual, ValueMode


class PreviousToken(nn.Module):
    def __init__(self, attn, n_head):
        super().__init__()
        self.attn = attn
        self.g = nn.Parameter(torch.zeros(n_head, 1, 1))

    def forward(self, x, angles, weights, projected, used, cache=None):
        v_1 = used[0]["v"]  # (B, H, tokens so far, D)
        before = F.pad(v_1, (0, 0, 1, 0))[:, :, :-1]  # nothing comes before token 0
        source = self.g * before[:, :, -x.size(1) :]  # (B, H, T, D): this call's tokens
        return self.attn(x, angles, weights, projected | {0: {"v": source}}, used, cache)


def with_previous_token(cfg):
    """8. The GPT of a ModelConfig with a PreviousToken in each layer above 0. As in answers.py."""
    mode = ValueMode((Residual(lam=(1.0, 1.0)),))  # attention then uses V_n + projected[0]["v"]
    model = GPT(dataclasses.replace(cfg, value_mode=mode))
    model.blocks[0].keep_used.add("v")  # then used[0]["v"] is V_1 of all tokens so far, those in the cache too
    for block in model.blocks[1:]:
        block.attn = PreviousToken(block.attn, cfg.n_head)
    return model
