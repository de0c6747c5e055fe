"""Scores: the log-probability of each choice, computed once for what choices share, and the loss of each domain."""

import math
import os
from typing import NamedTuple

import numpy as np
import torch

from configurator import UserError
from model import to_fp32
from tasks import Request

MAX_BRANCHES = 8  # most Rows in a Bundle: its mask grows with the square of its width


class PrefixTree:
    """Stands in for a KVCache in `GPT.hidden`: one row of tokens that branches, a prefix and then its continuations.

    positions, branches: (B, T) int64: the place of each token in its own sequence, below `length`, and the number of
    its continuation, 0 for the prefix. A token attends to the prefix and to what precedes it in its own continuation,
    as if each sequence stood alone. So the prefix is computed once, and no number changes beyond rounding.
    """

    def __init__(self, positions, branches, length):
        self.token_positions, self.length = positions, length
        own, other = branches[:, :, None], branches[:, None, :]  # (B, T, 1), (B, 1, T)
        seen = ((own == other) | (other == 0)).tril()[:, None]  # (B, 1, T, T)
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)  # is added to the scores

    def end(self, T):
        return self.length

    def positions(self, T):
        return self.token_positions

    def extend(self, t, n, new):
        return new

    def advance(self, T):
        pass


class Bundle(NamedTuple):
    """Requests of one document that begin with the same tokens, computed as one row: those `shared` tokens once, then
    the rest of each Request. slots: (document, choice) of each Request."""

    shared: int
    requests: list[Request]
    slots: list[tuple[int, int]]

    @property
    def width(self):
        own = sum(len(request.ids) - 1 - self.shared for request in self.requests)  # the last token is not read
        return self.shared + own


def bundles_of(documents):
    """The Bundles of documents, which are lists of Requests. Those that share less than an eighth of the longest one
    stand alone: there the mask costs more than it saves."""
    bundles = []
    for i, requests in enumerate(documents):
        inputs = [request.ids[:-1] for request in requests]
        shared = len(os.path.commonprefix(inputs))  # of any lists, not only of paths
        size = MAX_BRANCHES if 8 * shared >= max(map(len, inputs)) else 1
        for k in range(0, len(requests), size):
            some = requests[k : k + size]
            bundles.append(Bundle(shared, some, [(i, k + j) for j in range(len(some))]))
    return bundles


def pack(bundles, batch_tokens):
    """Lists of Bundles of similar width, one list for each forward pass. The widest come first: what needs too much
    memory fails at once."""
    batch = []
    for bundle in sorted(bundles, key=lambda b: b.width, reverse=True):
        if batch and (len(batch) + 1) * batch[0].width > batch_tokens:
            yield batch
            batch = []
        batch.append(bundle)
    if batch:
        yield batch


def lay_out(batch):
    """Bundles as rows of one width, padded at the end with token 0, which no token of a Request sees.

    Returns token ids, positions and branches (see PrefixTree), each (B, T) int64; then for the n scored tokens, each
    (n,): the place in the flattened rows that predicts it, its id, and the number of its Request."""
    width = max(bundle.width for bundle in batch)
    ids, positions, branches = np.zeros((3, len(batch), width), np.int64)
    places, targets, owners = [], [], []
    for b, (shared, requests, _) in enumerate(batch):
        ids[b, :shared] = requests[0].ids[:shared]
        positions[b, :shared] = range(shared)
        start = shared
        for k, request in enumerate(requests, 1):
            own = request.ids[shared:-1]
            end = start + len(own)
            ids[b, start:end] = own
            positions[b, start:end] = range(shared, shared + len(own))
            branches[b, start:end] = k
            columns = [*range(shared), *range(start, end)]  # of the request's tokens
            n = request.n_scored
            places.append(b * width + np.array(columns[-n:]))
            targets.append(request.ids[-n:])
            owners.append(np.full(n, len(owners)))
            start = end
    return ids, positions, branches, np.concatenate(places), np.concatenate(targets), np.concatenate(owners)


def log_probs(model, x, places, targets):
    """Log-probability in nats of token targets[i] after hidden state x[places[i]], and whether it is the likeliest one,
    as arrays (n,). x: (N, C). The head is computed once for each place that is needed, some places at a time."""
    device = x.device
    needed, place_of_target = np.unique(places, return_inverse=True)
    x = x[torch.from_numpy(needed).to(device)]
    size = max(1, 2 ** (26 if device.type == "cpu" else 28) // model.cfg.vocab_size)  # 256 MiB or 1 GiB of fp32
    log_p = np.empty(len(targets))  # float64: sums of hundreds of nats are compared
    greedy = np.empty(len(targets), bool)
    for first in range(0, len(needed), size):
        logits = to_fp32(model.head(x[first : first + size]))  # (size, V)
        mine = np.flatnonzero((first <= place_of_target) & (place_of_target < first + size))  # targets predicted here
        rows = torch.from_numpy(place_of_target[mine] - first).to(device)
        ids = torch.from_numpy(targets[mine]).to(device)
        largest, likeliest = logits.max(dim=1)
        of_target = logits[rows, ids]
        total = logits.sub_(largest[:, None]).exp_().sum(dim=1)  # in place: logits are the largest tensor here
        of_target, shift, total = torch.stack((of_target, largest[rows], total[rows])).cpu().double().numpy()
        log_p[mine] = of_target - shift - np.log(total)
        greedy[mine] = (likeliest[rows] == ids).cpu().numpy()
    return log_p, greedy


@torch.inference_mode()
def score_batch(model, batch):
    """[((document, choice), sum of log-probabilities in nats, all tokens likeliest)] of a list of Bundles, in fp32 or
    better; sums are float64."""
    *inputs, places, targets, owners = lay_out(batch)
    length = int(inputs[1].max()) + 1  # before the copy: reading it from a GPU would wait for all work there
    idx, positions, branches = (torch.from_numpy(a).to(model.head.weight.device) for a in inputs)
    has_branches = any(len(bundle.requests) > 1 for bundle in batch)
    x = model.hidden(idx, PrefixTree(positions, branches, length) if has_branches else None)  # (B, T, C)
    each, greedy = log_probs(model, x.flatten(0, 1), places, targets)
    slots = [slot for bundle in batch for slot in bundle.slots]
    sums = np.bincount(owners, each, len(slots)).tolist()  # float64
    misses = np.bincount(owners, ~greedy, len(slots)).tolist()
    return [(slot, total, not missed) for slot, total, missed in zip(slots, sums, misses, strict=True)]


def score(model, documents, batch_tokens):
    """Yields, for each forward pass, what `score_batch` returns, the widest first. documents: the Requests of each."""
    for batch in pack(bundles_of(documents), batch_tokens):
        yield score_batch(model, batch)


def domain_losses(corpus, sums):
    """The loss summary of a validation pass. sums: (domains, 3) float64 array of nats, tokens and bytes of text, in the
    order of corpus.domains. Raises UserError if a domain has no text.

    Returns {val: {domain: nats per token}, val_mean: their plain mean (the paper's "Avg"), val_mixture: their mean with
    the weights of training, bpb: {domain: bits per byte of text}, bpb_mean: the plain mean of those}.
    """
    nats, tokens, n_bytes = sums.T
    if not n_bytes.all():
        empty = corpus.domains[int(n_bytes.argmin())]
        raise UserError(f"the validation tokens of domain {empty!r} have no text; prepare more of it")
    val = nats / tokens
    bpb = nats / n_bytes / math.log(2)
    weights = np.array([corpus.mixture[domain] for domain in corpus.domains])
    return {
        "val": dict(zip(corpus.domains, val.tolist(), strict=True)),
        "val_mean": float(val.mean()),
        "val_mixture": float((weights * val).sum()),
        "bpb": dict(zip(corpus.domains, bpb.tolist(), strict=True)),
        "bpb_mean": float(bpb.mean()),
    }
