import torch
import torch.nn.functional as F
from torch import nn


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
