"""The loss: mean cross-entropy of logits that never exist all at once.

The obvious version, F.cross_entropy of each chunk under torch's checkpoint, gives the same numbers and costs 1.6 x
the time, because it computes the logits twice. Here the forward computes the gradients too, while a chunk exists.
"""

import math

import torch
import torch.nn.functional as F

# Logits at a time, in fp32: 256 MiB on a CPU, 1 GiB on a GPU. Compiled, in half precision they never exist in fp32.
MOST_LOGITS, MOST_LOGITS_CUDA, MOST_LOGITS_COMPILED = 2**26, 2**28, 2**30


def chunked_cross_entropy(x, w, targets):
    """Mean cross-entropy in nats (fp32, or float64 if w is) of the logits x w^T.

    x (N, C), w (V, C), targets (N,) int64, below 0 = ignored -> scalar.
    """
    is_one_kernel = x.is_cuda and torch.compiler.is_compiling()
    most_logits = MOST_LOGITS_CUDA if x.is_cuda else MOST_LOGITS
    if is_one_kernel and torch.is_autocast_enabled("cuda"):
        most_logits = MOST_LOGITS_COMPILED
    rows = max(1, most_logits // len(w))
    rows = math.ceil(len(x) / math.ceil(len(x) / rows))  # nearly even chunks, of whole tiles if they are long
    if rows > 128:
        rows = math.ceil(rows / 128) * 128
    multiple = 64 if x.is_cuda else 1
    grads = torch.is_grad_enabled()  # we ask here, because inside of an autograd.Function it is always off
    return LinearCrossEntropy.apply(x, w, targets, rows, multiple, not is_one_kernel, grads)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x w^T, `rows` rows at a time; the forward computes the gradients, the backward scales them.

    1/n and the loss scale are applied only in the backward: in fp16 a softmax divided by 65,536 targets would
    underflow. Products use autocast's dtype, sums fp32. w is padded to a multiple of `multiple` rows, which a GPU's
    kernels prefer.
    scatter: how the one-hot targets are subtracted. For a GPU torch.compile makes three kernels with a scatter, and one
    without, which moves a third of the bytes. Where nothing is compiled a scatter is faster (1.3 x on a CPU).
    """

    @staticmethod
    def forward(ctx, x, w, target, rows, multiple, scatter, grads):
        V, kind = w.size(0), x.device.type
        exact = torch.promote_types(w.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w.dtype
        padded = w.to(dtype)
        if V % multiple:
            padded = F.pad(padded, (0, 0, 0, -V % multiple))  # (V or a little more, C)
        total = torch.zeros((), dtype=exact, device=x.device)
        grad_w = torch.zeros_like(padded, dtype=exact) if grads else None
        grad_x = []
        keep = (target >= 0)[:, None].to(exact)  # (N, 1)
        target = target.clamp(min=0)[:, None]  # (N, 1)
        for xc, tc, kc in zip(x.split(rows), target.split(rows), keep.split(rows), strict=True):
            nats, grad_xc, grad_wc = LinearCrossEntropy.chunk(xc.to(dtype), padded, tc, kc, V, scatter, grads)
            total = total + nats
            if grads:
                grad_x.append(grad_xc.to(x.dtype))
                grad_w += grad_wc
        n = keep.sum().clamp(min=1)
        if grads:
            ctx.save_for_backward(torch.cat(grad_x), grad_w[:V], n)
            ctx.dtype = w.dtype
        return total / n

    @staticmethod
    def chunk(x, w, target, keep, V, scatter, grads):
        """x (rows, C), w (V or more, C), target, keep (rows, 1) -> summed nats, and the gradients for x and w, or None.
        Its temporaries are freed before the next chunk."""
        z = F.linear(x, w).to(keep.dtype)  # (rows, V or more); in place from here on: passes over it are the cost
        z[:, V:] = -math.inf
        z.sub_(z.amax(dim=1, keepdim=True))
        target_logit = z.gather(1, target)
        z.exp_()  # from here on z holds exponentials
        denominator = z.sum(dim=1, keepdim=True)
        nats = ((denominator.log() - target_logit) * keep).sum()
        if not grads:
            return nats, None, None
        z.mul_(keep / denominator)  # softmax - one-hot, 0 in ignored rows
        if scatter:
            z.scatter_add_(1, target, -keep)
        else:
            z = z - (torch.arange(z.size(1), device=z.device) == target) * keep
        g = z.to(x.dtype)
        return nats, g @ w, g.T @ x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w, n = ctx.saved_tensors
        grad = grad / n
        return grad_x * grad.to(grad_x.dtype), (grad_w * grad).to(ctx.dtype), None, None, None, None, None
