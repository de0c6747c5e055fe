"""Attention concentration: where each layer's attention goes, and norms, spectra and similarity of its states.

    python analyze.py out/vanilla out/resformer                    1,000 validation chunks through each model
    python analyze.py models/Llama-3.1-8B --length=2048 --dtype=bfloat16 --data_dir=data/demo --out_dir=out/llama

A chunk is the start token (ours is end-of-text), then consecutive tokens of validation text. We
write analysis.json (numbers by layer) and analysis.npz (by token position, and spectra) into the run's folder, print
the main ones, and `python plot.py` draws them. Each is defined in the function that measures it. Read model.py first.
"""

import functools
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import checkpoint
from common.data import EOT, Corpus, raw_bits
from common.files import write_atomic, write_record
from common.ranks import enough_memory, environment, only_process
from common.report import markdown, plus_minus, progress
from common.runs import ANALYSIS
from common.sizes import count_parameters
from configurator import UserError, check_fields, run, setting
from model import join_scores
from net.layers import attend, attend_across, repeat_heads, to_fp32

BLOCK = 2**24  # attention probabilities at a time, so that memory does not grow with the square of the length
SEED = 42  # for the choice of chunks
SINK = 0.3  # a sink gets more than this share of a head's attention (arXiv 2410.10781)
SHOWN = ("entropy", "entropy_minus_uniform", "first", "value_norm_first", "value_norm_rest", "value_rank")  # printed


@dataclass(frozen=True)
class AnalyzeConfig:
    """Every setting of analyze.py."""

    runs: tuple[str, ...] = setting((), "runs, weights files or exports; empty = the newest run", positional=True)
    out_dir: str = setting("", "folder of the results; empty = the run's own")

    data_dir: str = setting("", "prepared data with validation text; empty = the run's own data", group="Text")
    chunks: int = setting(1000, "chunks to average over, divided among the domains like the mixture", least=1)
    length: int = setting(0, "tokens per chunk; 0 = the model's block_size", least=0)

    batch_tokens: int = setting(8192, "tokens per forward pass", least=1, group="Machine")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of weights and states; we measure in float32")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")

    def __post_init__(self):
        check_fields(self)


# -- where attention goes


def inside_of(attn, args, output):
    """What we read from a layer: [(residual, its weights, what its sources used)], projected and used q, k, v.

    This is the only place that knows the arguments and the result of Attention.forward, and what a Mix is.
    """
    _, _, weights, _, attended, _ = args
    _, projected, used = output
    mixes = []
    for m in attn.mixes:
        sources = [attended[i] for i in m.sources] if m.residual.from_used else []
        mixes.append((m.residual, weights[m.index], [widened(tensors) for tensors in sources]))
    return mixes, widened(projected), widened(used)


def widened(tensors):
    """{name: tensor} in float32, or wider if it is: bf16 would drown sums over thousands of tokens in its rounding."""
    return {name: to_fp32(x) for name, x in tensors.items()}


def received(q, keys, scale):
    """Attention that each position receives: column sums of softmax(q [k_1; k_2; …]^T * scale).

    One softmax runs over the keys of all layers given, those of each up to the query. We add a position's columns of
    all layers. q (B, H, T, D), each k (B, G, T, D) -> (B, H, T).
    """
    B, H, T, _ = q.shape
    keys = [repeat_heads(k, H) for k in keys]  # (B, H, T, D)
    # the probabilities of this many queries exist at a time
    rows = max(1, BLOCK // (B * H * T * len(keys)))
    total = torch.zeros(B, H, T, dtype=q.dtype, device=q.device)
    for first in range(0, T, rows):
        # no query sees a later token, so the block ends where its last query stands
        last = min(T, first + rows)
        later = torch.ones(last - first, last, dtype=torch.bool, device=q.device).triu(first + 1)
        block = q[:, :, first:last] * scale
        scores = [(block @ k[:, :, :last].mT).masked_fill_(later, -math.inf) for k in keys]
        sums = torch.cat(scores, dim=-1).softmax(dim=-1).sum(dim=2)  # (B, H, parts * last)
        total[..., :last] += sums.view(B, H, len(keys), last).sum(dim=2)
    return total


def softmaxes(mixes, used):
    """A_n as a weighted sum of softmaxes: [(weight, q, [k of each layer under this softmax])], see `received`.

    What a residual adds after attention (identity, delta) is not in A_n, but its own weight scales A_n.
    """
    # what changes the softmax itself: keys of other layers under it, or scores of several layers added up
    q, k, others = used["q"], used["k"], []
    for residual, weights, sources in mixes:
        if residual.map == "cross":
            others += [source["k"] for source in sources]
        elif residual.of == "scores":
            q, k = join_scores(q, k, weights, sources)
    parts = [(1.0, q, [k, *others])]
    # what changes its output: its own weight, and softmaxes of other layers
    for residual, weights, sources in mixes:
        if residual.of == "probs" or residual.map in ("identity", "delta"):
            # a weight is a number, or (H, 1, 1) if each head has its own: a factor of (B, H, T)
            own, *of_sources = [to_fp32(w).squeeze(-1) if isinstance(w, torch.Tensor) else w for w in weights]
            parts = [(own * weight, q, keys) for weight, q, keys in parts]
            if residual.of == "probs":
                parts += [(w, source["q"], [source["k"]]) for w, source in zip(of_sources, sources, strict=True)]
    return parts


def importance(mixes, used):
    """Token importance of each head: the share of a layer's attention that goes to each position, (B, H, T)."""
    scale = used["v"].size(-1) ** -0.5
    parts = [(weight, received(q, keys, scale)) for weight, q, keys in softmaxes(mixes, used)]
    total = sum(weight * attention for weight, attention in parts)
    # a head that ignores its attention still has one
    is_ignored = (total == 0).all(dim=-1, keepdim=True)  # (B, H, 1)
    total = torch.where(is_ignored, sum(attention for _, attention in parts), total)
    shares = total / total.sum(dim=-1, keepdim=True)
    if (shares < 0).any():
        raise UserError("an attention residual has a negative weight, so some tokens get negative attention")
    return shares


def entropy(p):
    """Entropy in nats of distributions p (..., n) -> (...). We normalize p; all zeros have entropy 0."""
    p = p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return -torch.xlogy(p, p).sum(dim=-1)


def uniform_entropy(T):
    """Entropy of token importance in nats, if each of T tokens attends alike to all it sees.

    Even then early tokens get more. We print the entropy minus this, so that lengths can be compared.
    """
    weights = 1 / np.arange(1, T + 1)  # row i of A has 1/i at each position up to i
    shares = weights[::-1].cumsum()[::-1] / T  # position j is in rows j to T
    return float(-(shares * np.log(shares)).sum())


def measure_importance(heads):
    """{name: (B, …)} of token importance by head (B, H, T), with a' its mean over heads: the entropy of a' (Eq 11 of
    https://arxiv.org/abs/2410.17897, as the authors' code has it: as printed it is a constant), a' of the first token,
    the largest a' (Figure 21), and the share of heads in which the first token is a sink."""
    a = heads.mean(dim=1)  # (B, T)
    found = {"importance": a, "entropy": entropy(a), "first": a[:, 0]}
    found["sink_heads"] = (heads[:, :, 0] > SINK).float().mean(dim=1)
    largest = a.sort(dim=1, descending=True).values
    T = a.size(1)
    for name, rank in {"top_1": 1, "top_2": 2, "top_3": 3, "top_10": 10, "top_1%": math.ceil(0.01 * T)}.items():
        if rank <= T:
            found[name] = largest[:, rank - 1]
    return found


# -- norms, similarity, spectra


def join_heads(t):
    """Heads side by side: (B, h, T, D) -> (B, T, h * D)."""
    return t.transpose(1, 2).flatten(2)


def spectrum(x):
    """Eigenvalues of (1/T) sum_i x_i x_i^T (Eq 12 of https://arxiv.org/abs/2410.17897, not centred), largest first.

    x (B, T, E) -> (B, E), float64, because fp32 would bury the small ones.
    """
    device = "cpu" if x.device.type == "mps" else x.device  # mps has no float64
    x = x.to(device, torch.float64)
    return torch.linalg.eigvalsh(x.mT @ x / x.size(1)).flip(-1).clamp(min=0)


def measure_vectors(x):
    """{name: (B, …)} of x (B, T, E): norms |x_t| by position, of the first token and of the others, and similarity: the
    mean cosine of two different tokens (Eq 13 of https://arxiv.org/abs/2410.17897)."""
    norms = x.norm(dim=-1)
    if not norms.isfinite().all():
        raise UserError("the model computes NaN or infinity: its weights are damaged, or too large for bfloat16")
    # (|sum of unit vectors|^2 - T) / (T (T - 1)) needs no T x T products
    T, unit = x.size(1), F.normalize(x, dim=-1)
    cosines = (unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))) / (T * (T - 1))
    return {"norm": norms, "norm_first": norms[:, 0], "norm_rest": norms[:, 1:].mean(dim=1), "similarity": cosines}


def measure_values(v):
    """`measure_vectors` of values (B, G, T, D), heads side by side, and of their spectrum: (B, G * D), its largest
    eigenvalue, and rank, the effective rank (exp of the spectrum's entropy: Roy and Vetterli 2007)."""
    x = join_heads(v)
    found = measure_vectors(x)
    eigenvalues = spectrum(x)
    return found | {"spectrum": eigenvalues, "largest": eigenvalues[:, 0], "rank": entropy(eigenvalues).exp()}


def cosine_to_cross(used, before, n, kernel):
    """How well Eq 4 and Eq 6 of https://arxiv.org/abs/2410.17897 approximate cross-layer attention, Eq 2 (Figure 4).

    For layer n, counted from 0: the cosine similarity of their outputs to that of Eq 2 with the layer before, mean over
    tokens, {"eq4": (B,), "eq6": (B,)}. Outputs have their heads side by side. before: see Recorder.
    """
    q, k, v = used["q"], used["k"], used["v"]
    cross = join_heads(attend_across(q, (k, before["k"]), (v, before["v"]), kernel))
    own = attend(q, k, v, kernel)
    outputs = {
        "eq4": (own + attend(q, k, before["v"], kernel)) / 2,
        "eq6": own + repeat_heads(before["v_sum"] / n, q.size(1)),
    }
    return {name: F.cosine_similarity(join_heads(u), cross, dim=-1).mean(dim=1) for name, u in outputs.items()}


# -- a forward pass


class Recorder:
    """Measures a model while it runs, by hooks on its blocks, and adds up what it measures.

    Layers are 0 … L-1, states 0 … L: layer n reads state n, and the last layer leaves state L. In a layer we measure
    token importance, keys, the values that its softmax uses ("value": mixed or borrowed) and those that it projects
    ("raw_value"), eq4 and eq6. Names of what we measure in a state begin with "hidden_".
    """

    def __init__(self, model):
        self.chunks = 0
        self.sums = {}  # {name: {layer or state: sum over chunks, a number or (width,)}}
        self.before = None  # k and v of the layer before, and v_sum, the sum of the values of all layers so far
        for n, block in enumerate(model.blocks):
            block.register_forward_pre_hook(functools.partial(self.state, n))
            block.attn.register_forward_hook(functools.partial(self.layer, n))
        model.norm.register_forward_pre_hook(functools.partial(self.state, len(model.blocks)))

    def add(self, n, found, prefix=""):
        """found: {name: (B, …)} of B chunks. Sums are float64 on the CPU, so they stay exact over many chunks."""
        for name, x in found.items():
            sums = self.sums.setdefault(prefix + name, {})
            sums[n] = sums.get(n, 0) + x.cpu().double().sum(dim=0)

    def mean(self, name, n):
        """Mean over the chunks, a float or a numpy array; None if layer n does not have it."""
        if n not in self.sums[name]:
            return None
        mean = self.sums[name][n] / self.chunks
        return mean.numpy() if mean.ndim else mean.item()

    def state(self, n, block, args):
        """Before a block, and before the final norm."""
        x = to_fp32(args[0])  # (B, T, C)
        self.chunks += len(x) if n == 0 else 0
        self.add(n, measure_vectors(x), "hidden_")

    def layer(self, n, attn, args, output):
        """After the attention of a layer."""
        mixes, projected, used = inside_of(attn, args, output)
        self.add(n, measure_importance(importance(mixes, used)))
        self.add(n, measure_vectors(join_heads(used["k"])), "key_")

        self.add(n, measure_values(used["v"]), "value_")
        if "v" in projected:
            self.add(n, measure_vectors(join_heads(projected["v"])), "raw_value_")

        # Eq 6 needs the sum over all layers before, so we carry it along.
        v_sum = used["v"]
        if n:
            self.add(n, cosine_to_cross(used, self.before, n, attn.kernel))
            v_sum = v_sum + self.before["v_sum"]
        self.before = {"k": used["k"], "v": used["v"], "v_sum": v_sum}


# -- text


def choose_windows(corpus, n):
    """[(domain, window)] of n validation windows, divided among the domains by their weight, in random order. A domain
    that has too few gives all of them."""
    bounds = np.rint(n * np.cumsum([0, *corpus.mixture.values()])).astype(int)
    found = []
    for domain, quota in zip(corpus.domains, np.diff(bounds), strict=True):
        order = np.argsort(raw_bits(SEED, "analysis", domain, n=corpus.windows("val", domain)), kind="stable")
        found += [(domain, int(window)) for window in order[:quota]]
    # each batch has text of all domains
    order = np.argsort(raw_bits(SEED, "analysis", n=len(found)), kind="stable")
    return [found[i] for i in order]


def read_chunks(path, block_size, cfg):
    """(at most cfg.chunks, T) token ids for the model of a weights file: the first token, then T - 1 of the text that
    it was trained on, or of cfg.data_dir."""
    folder, tokenizer, T = path.parent, checkpoint.load_tokenizer(path), cfg.length or block_size
    if not 2 <= T <= block_size:
        limits = f"at least 2 tokens, and at most {block_size}, its block_size"
        raise UserError(f"a chunk of {T} tokens does not fit {folder}; it takes {limits}")
    data_dir, mixture = checkpoint.trained_on(folder, cfg.data_dir, "the prepared data with --data_dir")
    corpus = Corpus(data_dir, T - 1, mixture=mixture, splits=("val",))
    has_its_tokens = corpus.tokenizer.hash == tokenizer.hash
    if not has_its_tokens:
        if tokenizer.is_ours:
            raise UserError(f"{data_dir} and {folder} have different tokenizers; name its own data with --data_dir")
        # a public model reads our text in its own tokens: three times as many of ours will do for its T - 1
        corpus = Corpus(data_dir, 3 * (T - 1), mixture=mixture, verify=False, splits=("val",))
    windows = choose_windows(corpus, cfg.chunks)
    rows = [corpus.val_batch(domain, w, w + 1)[0][0] for domain, w in windows]
    if not has_its_tokens:
        texts = [corpus.tokenizer.decode(row.tolist()).replace(EOT, "\n\n") for row in rows]
        rows = [ids[: T - 1] for ids in map(tokenizer.encode, texts) if len(ids) >= T - 1]
    if not rows:
        raise UserError(f"the validation text of {data_dir} has no chunk of {T} tokens; set a smaller --length")
    idx = np.full((len(rows), T), tokenizer.start, np.int64)
    idx[:, 1:] = rows
    return torch.from_numpy(idx)


# -- results


def summarize(recorder, L, T):
    """(the measured part of analysis.json, the arrays of analysis.npz: a row for each layer or state)."""
    layers, states, arrays = {}, {}, {}
    for name in recorder.sums:
        is_state = name.startswith("hidden_")
        table, n_rows = (states, L + 1) if is_state else (layers, L)
        means = [recorder.mean(name, n) for n in range(n_rows)]
        # a layer may lack a quantity; any layer that has it says whether it is a number or an array
        found = next(mean for mean in reversed(means) if mean is not None)
        if isinstance(found, float):
            table[name] = {"mean": [None if x is None else float(f"{x:.7g}") for x in means]}
        else:
            rows = [np.full_like(found, np.nan) if mean is None else mean for mean in means]
            arrays[name] = np.stack(rows).astype("f4")
    level = uniform_entropy(T)
    layers["entropy_minus_uniform"] = {"mean": [float(f"{x - level:.7g}") for x in layers["entropy"]["mean"]]}
    return {"entropy_uniform": level, "layers": layers, "states": states}, arrays


def analyze(path, cfg, device):
    """Measure the model of a weights file, write analysis.json and analysis.npz, print some numbers by layer."""
    header, out = checkpoint.read_header(path), Path(cfg.out_dir or path.parent)
    if out.exists() and not os.access(out, os.W_OK):  # said before the work, not after it
        raise UserError(f"{out} is not writable; set another --out_dir")
    idx = read_chunks(path, header["config"].block_size, cfg)
    N, T = idx.shape
    model = checkpoint.load(path, device, getattr(torch, cfg.dtype))
    recorder = Recorder(model)
    with torch.inference_mode(), progress("analysis", idx.numel(), "token") as bar:
        for rows in idx.split(max(1, cfg.batch_tokens // T)):
            model.hidden(rows.to(device))
            bar.update(rows.numel())

    numbers, arrays = summarize(recorder, model.cfg.n_layer, T)
    about = {"mode": header["mode"], "step": header["step"], "parameters": count_parameters(model.cfg)}
    about |= {"chunks": N, "length": T, "device": device.type, "dtype": cfg.dtype, "environment": environment()}
    archive = io.BytesIO()  # numpy would add .npz to the name of a temporary file
    np.savez_compressed(archive, **arrays)
    write_atomic(out / "analysis.npz", lambda temporary: temporary.write_bytes(archive.getvalue()))
    write_record(out / "analysis.json", ANALYSIS, about | numbers)

    print(f"{path.parent} ({about['mode']}): {N} of {cfg.chunks} chunks of {T} tokens; wrote {out}/analysis.json")
    print("layers n, counted from 1 as in the paper:")
    columns = [numbers["layers"][name]["mean"] for name in SHOWN]
    rows = [[n, *map(plus_minus, row)] for n, row in enumerate(zip(*columns, strict=True), start=1)]
    print(markdown(["n", *SHOWN], rows), flush=True)


@enough_memory("set a smaller --batch_tokens")
def main(cfg: AnalyzeConfig):
    device = only_process(cfg.device).device
    paths = [checkpoint.find(name) for name in cfg.runs or ("",)]
    if len({cfg.out_dir or path.parent.resolve() for path in paths}) < len(paths):
        raise UserError(
            "several of these models would write into one folder; name one at a time, each with an --out_dir of its own"
        )
    for path in paths:
        analyze(path, cfg, device)


if __name__ == "__main__":
    run(main, __doc__)
