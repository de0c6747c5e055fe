"""Does a model copy? Its loss on tokens that it could copy from the window, and on random text that repeats itself.

"pair seen" is where copying helps: the token before was followed by the same token earlier. The second measure is that
of induction heads (Olsson et al. 2022, https://arxiv.org/abs/2209.11895). Read next: eval.py.
"""

import itertools
import math

import numpy as np
import torch

from common.data import raw_bits
from common.report import markdown, plus_minus
from common.scoring import log_probs
from configurator import UserError

WINDOWS = 256  # of random text
KINDS = ("pair seen", "token seen, pair not", "token new", "token new, previous seen")
RANGES = 8  # parts into which the positions of a window are divided


def kinds_of(x, y):
    """The kind of each target, as its number in KINDS. x, y: windows of token ids (rows, T), y one token after x.

    "pair seen": the pair of the previous token and this one stands earlier in the window. "token new, previous seen":
    only the previous token does, so a model that copied what followed it would be wrong.
    """
    T, kinds = x.shape[1], np.empty(x.shape, np.int8)
    is_before, is_read = np.tri(T, k=-1, dtype=bool), np.tri(T, dtype=bool)  # (T, T): place j < i, and j <= i
    for row, (read, target) in enumerate(zip(x, y, strict=True)):  # one at a time: a long window has T * T pairs
        previous = (read[:, None] == read) & is_before  # (T, T): the previous token of i stands at j, too
        pair = (previous & (target[:, None] == target)).any(1)  # (T,)
        token = ((target[:, None] == read) & is_read).any(1)
        kinds[row] = np.select([pair, token, previous.any(1)], [0, 1, 3], 2)
    return kinds


def repeated(n, length, n_vocab, eot, seed=0):
    """Windows x, y of random tokens, uniform over the vocabulary without end-of-text: (n, length - 1) each, or one less
    where `length` is odd. The second half of the tokens equals the first."""
    half = length // 2
    if half < 2:
        raise UserError(f"repeat needs windows of at least 4 tokens, but this model's block has {length}")
    bits = raw_bits(seed, "repeat", n=n * half)
    ids = (bits % np.uint64(n_vocab - 1)).astype(np.int64).reshape(n, half)
    ids += ids >= eot  # the ids from end-of-text on move up by one
    ids = np.concatenate((ids, ids), axis=1)  # (n, 2 half)
    return ids[:, :-1], ids[:, 1:]


@torch.inference_mode()
def token_losses(model, x, y, batch_tokens, bar):
    """Nats of each target in y, and whether it is the model's likeliest: arrays (rows, T). bar: a progress bar."""
    nats, is_likeliest = np.zeros(y.shape, np.float32), np.zeros(y.shape, bool)
    n_rows = max(1, batch_tokens // x.shape[1])
    for first in range(0, len(x), n_rows):
        rows = slice(first, first + n_rows)
        idx, targets = (torch.from_numpy(a[rows]).to(model.norm.weight.device) for a in (x, y))
        log_p, greedy = log_probs(model, model.hidden(idx).flatten(0, 1), targets.flatten())
        nats[rows], is_likeliest[rows] = -log_p.reshape(idx.shape), greedy.reshape(idx.shape)
        bar.update(idx.numel())
    return nats, is_likeliest


def groups_of(task, x, y):
    """{title: {name: (windows, T) bool}}: the groups of targets that a task tells apart."""
    place = np.broadcast_to(np.arange(y.shape[1]), y.shape)
    if task == "repeat":
        # nobody can know that the text begins to repeat itself, so the second half begins with its second token
        second = place > y.shape[1] // 2
        return {"half": {"first half": ~second, "second half": second}}
    kinds = kinds_of(x, y)
    by_kind = {name: kinds == i for i, name in enumerate(KINDS)} | {"all": kinds >= 0}
    ends = [y.shape[1] * i // RANGES for i in range(RANGES + 1)]
    by_place = {f"{a + 1} to {b}": (a <= place) & (place < b) for a, b in itertools.pairwise(ends) if a < b}
    return {"token": by_kind, "position": by_place}


def per_token(sums, counts):
    """(mean, standard error) per token, from the windows' sums and counts of tokens, (windows,) each."""
    n, n_tokens = len(sums), max(1, counts.sum())
    mean = sums.sum() / n_tokens
    rest = sums - mean * counts
    return float(mean), math.sqrt(n / max(1, n - 1) * (rest**2).sum()) / n_tokens


def record_of(groups, nats, is_likeliest):
    """What eval.json says of a task: {title: {group: its share of the tokens, loss, the loss's error, accuracy}}."""
    record = {"n": len(nats), "length": nats.shape[1]}
    for title, of_title in groups.items():
        record[title] = {}
        for name, is_in in of_title.items():
            loss, error = per_token((nats * is_in).sum(axis=1), is_in.sum(axis=1))
            about = {"share": float(is_in.mean()), "loss": loss, "loss_stderr": error}
            record[title][name] = about | {"acc": float((is_likeliest * is_in).sum() / max(1, is_in.sum()))}
    return record


def group_table(title, groups, labels, values):
    """Markdown: for each group its share of the tokens, each run's mean, and for each run but the first its difference
    from the first ± a standard error, paired by window, and the group's part of the whole difference. values: (windows,
    T) of each run."""
    gaps = {f"{label} − {labels[0]}": mine - values[0] for label, mine in zip(labels[1:], values[1:], strict=True)}
    header, rows = [title, "tokens", *labels], []
    for name in gaps:
        header += [name, "part of it"]
    for name, is_in in groups.items():
        counts = is_in.sum(axis=1)  # (windows,)
        means = [per_token((mine * is_in).sum(axis=1), counts)[0] for mine in values]
        row = [name, f"{is_in.mean():.1%}", *(f"{mean:.4f}" for mean in means)]
        for gap in gaps.values():
            of_group = (gap * is_in).sum(axis=1)
            part = of_group.sum() / gap.sum() if gap.sum() else math.nan
            row += [plus_minus(*per_token(of_group, counts), sign=True), f"{part:z.0%}"]
        rows.append(row)
    return markdown(header, rows)
