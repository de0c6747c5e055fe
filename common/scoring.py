"""What a model gives: the log-probability of each choice of a question, and the loss of each domain.

The choices of one question mostly begin with the same tokens. We lay them out as one row, the shared beginning once and
then the rest of each choice, and a mask keeps the choices apart.
"""

import math
import os
from typing import NamedTuple

import numpy as np
import torch

from configurator import UserError
from net.layers import to_fp32

MAX_BRANCHES = 8  # most choices in a row, because the mask grows with the square of the row's width


class Request(NamedTuple):
    """A choice as the model sees it: token ids, of which it scores the last n_scored."""

    ids: list[int]
    n_scored: int


def encode_pair(tokenizer, context, scored):
    """Token ids of a context and of the text scored after it. Source: lm_eval/api/model.py, TemplateLM.

    Spaces at the end of the context move to the scored text. We tokenize the context alone, then both together: what
    the second has beyond the length of the first is scored. An empty context becomes the start token.
    """
    bare = context.rstrip()
    scored = context[len(bare) :] + scored
    if not bare:
        return [tokenizer.start], tokenizer.encode(scored)
    ids = tokenizer.prefix + tokenizer.encode(bare)
    return ids, (tokenizer.prefix + tokenizer.encode(bare + scored))[len(ids) :]


def requests_of(name, asked, tokenizer, block_size):
    """For each Question of a task the Requests of its choices. They have at most block_size + 1 ids, because the last
    one is only predicted. A longer context loses its beginning."""
    documents = [[] for _ in asked]
    for i, q in enumerate(asked):
        for context, choice in zip(q.contexts, q.choices, strict=True):
            ids, scored = encode_pair(tokenizer, context, q.delimiter + choice)
            if not 0 < len(scored) <= block_size:
                here = f"{name}, document {i}: {len(scored)} tokens are to be scored, but the model's block takes"
                raise UserError(f"{here} 1 to {block_size}; leave this task out, or use a model with a longer block")
            documents[i].append(Request((ids + scored)[-(block_size + 1) :], len(scored)))
    return documents


class PrefixTree:
    """Scores several continuations of one prompt in a single row. Stands in for a KVCache in GPT.hidden.

    positions: (B, T) int64, each token's place in its own sequence
    branches: (B, T) int64, the continuation that a token belongs to, counted from 1; 0 is the prompt
    """

    def __init__(self, positions, branches):
        self.token_positions = positions
        # A token sees the prompt and what precedes it in its own continuation, as if each sequence stood alone.
        own, other = branches[:, :, None], branches[:, None, :]  # (B, T, 1), (B, 1, T)
        seen = ((own == other) | (other == 0)).tril()[:, None]  # (B, 1, T, T)
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)  # added to the scores

    # What GPT.hidden asks of a cache. No tokens came before, so there is nothing to store.
    def positions(self, T):
        return self.token_positions

    def extend(self, name, layer, new):
        return new

    def advance(self, T):
        pass


class Row(NamedTuple):
    """Requests of one document as one row of tokens: the beginning that they share, then the rest of each.

    tokens: (3, T) int64: token ids, positions and branches, see PrefixTree
    scored: (3, n) int64: for each scored token the column that predicts it, its id, and the number of its request
    """

    tokens: np.ndarray
    scored: np.ndarray


def lay_out(requests, shared, number):
    """The Row of Requests that share their first `shared` tokens. number: of the first of them."""
    # The shared beginning comes once. What follows it in a request is a branch of its own.
    ids, positions, branches = requests[0].ids[:shared], [*range(shared)], [0] * shared
    columns, targets, owners = [], [], []
    for branch, request in enumerate(requests, 1):
        start, end = len(ids), len(ids) + len(request.ids) - 1 - shared
        ids += request.ids[shared:-1]  # the last token is only predicted, never read
        positions += range(shared, len(request.ids) - 1)
        branches += [branch] * (end - start)
        of_request = [*range(shared), *range(start, end)]
        columns += of_request[-request.n_scored :]
        targets += request.ids[-request.n_scored :]
        owners += [number + branch - 1] * request.n_scored
    return Row(np.array([ids, positions, branches]), np.array([columns, targets, owners]))


def rows_of(documents):
    """The Rows of documents, which are lists of Requests. The widest come first: too little memory shows at once."""
    rows, number = [], 0
    for requests in documents:
        inputs = [request.ids[:-1] for request in requests]
        shared = len(os.path.commonprefix(inputs))  # works on lists as on paths
        # Where they share less than an eighth, the mask costs more than it saves.
        size = MAX_BRANCHES if 8 * shared >= max(map(len, inputs)) else 1
        for first in range(0, len(requests), size):
            rows.append(lay_out(requests[first : first + size], shared, number + first))
        number += len(requests)
    return sorted(rows, key=lambda row: row.tokens.shape[1], reverse=True)


def log_probs(model, x, targets):
    """The log-probability in nats of each token in `targets`, and whether it is the likeliest one. Arrays (n,).

    x: hidden states (n, C), each of which predicts its target (n,).
    """
    # The head is the widest product here, so we cut it: at most 256 MiB of fp32 logits at a time.
    size = max(1, 2**26 // model.cfg.vocab_size)
    log_p, greedy = [], []
    for states, ids in zip(x.split(size), targets.split(size), strict=True):
        logits = to_fp32(model.head(states))  # (size, V)
        largest, likeliest = logits.max(dim=1)
        greedy.append((likeliest == ids).cpu().numpy())
        of_target = logits.gather(1, ids[:, None])[:, 0]
        # In place, because these logits are the largest tensor here. Sums of hundreds of nats need float64.
        total = logits.sub_(largest[:, None]).exp_().sum(dim=1)
        of_target, largest, total = torch.stack((of_target, largest, total)).cpu().double().numpy()
        log_p.append(of_target - largest - np.log(total))
    return np.concatenate(log_p), np.concatenate(greedy)


@torch.inference_mode()
def score(model, rows, batch_tokens):
    """Yields three arrays for each forward pass, over its scored tokens: the number of the request that each belongs
    to, its log-probability in nats, and whether it is the likeliest token. rows: from `rows_of`."""
    device = model.norm.weight.device
    while rows:
        # We pad a batch at the end with token 0, where nothing sees it, to its widest row, the first one.
        width = rows[0].tokens.shape[1]
        n_rows = max(1, batch_tokens // width)
        batch, rows = rows[:n_rows], rows[n_rows:]
        tokens = np.zeros((3, len(batch), width), np.int64)
        scored = []
        for b, row in enumerate(batch):
            tokens[:, b, : row.tokens.shape[1]] = row.tokens
            scored.append(row.scored + [[b * width], [0], [0]])  # places in the flattened batch
        has_branches = tokens[2].max() > 1
        places, targets, owners = np.concatenate(scored, axis=1)  # (n,) each
        idx, positions, branches = torch.from_numpy(tokens).to(device)  # (B, T) each
        x = model.hidden(idx, PrefixTree(positions, branches) if has_branches else None)  # (B, T, C)
        x = x.flatten(0, 1)[torch.from_numpy(places).to(device)]  # (n, C)
        yield owners, *log_probs(model, x, torch.from_numpy(targets).to(device))


def domain_losses(corpus, sums):
    """The losses of a validation pass, from (domains, 3) float64 sums of nats, tokens and bytes of text.

    Returns {val: {domain: nats per token}, val_mean: their plain mean (the paper's "Avg"), val_mixture: their mean with
    the weights of the corpus's mixture, bpb: {domain: bits per byte of text}, bpb_mean}.
    """
    nats, tokens, n_bytes = sums.T
    if not n_bytes.all():
        empty = corpus.domains[int(n_bytes.argmin())]
        raise UserError(f"the validation tokens of domain {empty!r} have no text; prepare more of it")
    val, bpb = nats / tokens, nats / n_bytes / math.log(2)
    weights = np.array([corpus.mixture[domain] for domain in corpus.domains])
    return {
        "val": dict(zip(corpus.domains, val.tolist(), strict=True)),
        "val_mean": float(val.mean()),
        "val_mixture": float((weights * val).sum()),
        "bpb": dict(zip(corpus.domains, bpb.tolist(), strict=True)),
        "bpb_mean": float(bpb.mean()),
    }
