import torch


def entropy(a):
    importance = a.mean(dim=1).mean(dim=1)  # over heads, then over queries: (B, T), with the sum 1
    return -torch.xlogy(importance, importance).sum(dim=-1)
