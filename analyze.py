"""Attention concentration: where each layer's attention goes, and norms, spectra and similarity of its states.

    python analyze.py out/vanilla out/resformer                    1,000 validation chunks through each model
    python analyze.py --init=config/size_468m.py --chunks=4        the same of a model before its training
    python analyze.py path/to/Llama-3.1-8B --length=2048 --data_dir=data/demo     Llama or Mistral, Hugging Face layout

Each chunk is the end-of-text token, as before a first document, then consecutive tokens of validation text.
Writes analysis.json (numbers by layer) and analysis.npz (by token position, and spectra) into the run's folder, and
prints the main ones. Each quantity is defined at the function that measures it. Paper: arXiv 2410.17897.

Read model.py first; `python plot.py analysis` draws the results.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oldconfig import UserError, check_ranges, command_line, load_settings, run_main, setting


@dataclass(frozen=True)
class AnalyzeConfig:
    """Every setting of analyze.py."""

    runs: tuple[str, ...] = setting(
        (), "runs' folders, checkpoints, Hugging Face folders; empty = the newest run", group="Models", positional=True
    )
    init: tuple[str, ...] = setting((), "config files of train.py: the model that training would start from")
    out_dir: str = setting("", "folder of the results; empty = the run's own, out/init-<name> with --init")

    data_dir: str = setting("", "prepared data with validation text; empty = the run's own data", group="Text")
    verify: bool = setting(True, "compare the sha256 of the data with the manifest at the start")
    chunks: int = setting(1000, "chunks to average over, divided among the domains as the mixture is", least=1)
    length: int = setting(0, "tokens per chunk; 0 = the model's block_size", least=0)
    first_token: int = setting(-1, "id that each chunk starts with; -1 = end-of-text, or Hugging Face's bos", least=-1)
    seed: int = setting(42, "of the choice of chunks")

    batch_tokens: int = setting(8192, "tokens per forward pass", least=1, group="Machine")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "of weights and states; softmax and sums are fp32")

    def __post_init__(self):
        check_ranges(self)
        if self.length == 1:
            raise ValueError("length=1 leaves nothing to attend to; it must be at least 2, or 0 for the block_size")
        if self.runs and self.init:
            raise ValueError("runs and --init exclude each other: name either runs or config files")
        if self.out_dir and len(self.runs) > 1:
            raise ValueError(f"out_dir={self.out_dir} is one folder for {len(self.runs)} runs; leave it empty")


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(AnalyzeConfig, __doc__)

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
from data import EOT, Corpus, Tokenizer, raw_bits
from describe import count_parameters
from layers import attend, attend_across, repeat_heads, to_fp32
from model import GPT, join_scores
from oldfiles import write_atomic, write_json
from report import markdown, plus_minus, progress
from runtime import enough_memory, environment, only_process, pick_dtype
from train import TrainConfig

BLOCK = 2**24  # attention probabilities, or entries of a mask, at a time: no memory grows with the length's square
POSITIONS = 256  # analysis.npz keeps the first so many positions

# thresholds of the flags in analysis.json
SINK = 0.3  # a sink gets more than this share of the attention of the queries that see it (Gu et al. 2410.10781)
DRAIN = 0.5  # value drain: the first token's values are shorter than this times those of other tokens (the paper's A.2)
PEAK = 3.0  # hidden peak: the first token's hidden state is longer than this times those of other tokens (A.2)
MASSIVE = (100.0, 1000.0)  # an activation above the first, and above the second times the median (Sun 2402.17762)

# names in analysis.json: quantities of layers, and of states between layers (see Recorder)
VECTORS = ("norm_first", "norm_rest", "similarity")
LAYER = ["entropy", "first", "top_1", "top_2", "top_3", "top_10", "top_1%", "sink_heads", "eq4", "eq6"]
LAYER += [f"{tensor}_{quantity}" for tensor in ("key", "value", "raw_value") for quantity in VECTORS]
LAYER += ["value_largest", "value_rank", "raw_value_largest", "raw_value_rank"]
STATE = ["hidden_norm_first", "hidden_norm_rest", "hidden_similarity", "activation_max", "activation_median"]
NORMED = ["normed_norm_first", "normed_norm_rest", "normed_similarity"]
# arrays in analysis.npz, a row for each layer (or state): by token position, and eigenvalues
BY_POSITION = ["importance", "value_norm", "raw_value_norm", "key_norm", "hidden_norm"]
SPECTRA = ["value_spectrum", "raw_value_spectrum"]

HEADER = ["layer", "entropy", "above uniform", "importance of the first token"]
HEADER += ["norm of its value, relative to other tokens", "norm of its hidden state, relative to other tokens"]
HEADER += ["token similarity", "effective rank of values", "flags"]


# ---- quantities


def uniform_entropy(T):
    """Entropy of token importance in nats, if each of T tokens attends alike to all it sees."""
    weights = 1 / np.arange(1, T + 1)  # row i of A has 1/i at each position up to i
    importance = weights[::-1].cumsum()[::-1] / T  # position j is in rows j to T
    return float(-(importance * np.log(importance)).sum())


def entropy(p):
    """Entropy in nats of distributions p (..., n) -> (...). p is normalized here; all zeros have entropy 0."""
    p = p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return -torch.xlogy(p, p).sum(dim=-1)


def received(q, keys, scale):
    """Attention that each position receives: column sums of softmax(q [k_1; k_2; …]^T * scale). One softmax runs over
    the keys of all layers given, those of each up to the query. A position's columns of all layers are added.
    q (B, H, T, D), each k (B, G, T, D) -> (B, H, T), fp32 or float64.
    """
    B, H, T, _ = q.shape
    keys = [repeat_heads(to_fp32(k), H) for k in keys]  # (B, H, T, D)
    rows = max(1, BLOCK // (B * H * T * len(keys)))  # queries whose probabilities exist at a time
    total = torch.zeros(B, H, T, dtype=to_fp32(q).dtype, device=q.device)
    for first in range(0, T, rows):
        last = min(T, first + rows)
        later = torch.ones(last - first, last, dtype=torch.bool, device=q.device).triu(first + 1)
        block = to_fp32(q[:, :, first:last]) * scale
        scores = [(block @ k[:, :, :last].mT).masked_fill_(later, -math.inf) for k in keys]
        sums = torch.cat(scores, dim=-1).softmax(dim=-1).sum(dim=2)  # (B, H, parts * last)
        total[..., :last] += sums.view(B, H, len(keys), last).sum(dim=2)
    return total


def softmaxes(attn, now, attended, lambdas):
    """A_n of layer `attn` as a weighted sum of softmaxes: [(weight, q, [k of each layer under this softmax])].
    `received` computes one of them.

    now: the q, k, v that the layer attends with. attended, lambdas: see model.Attention. What is added after attention
    (identity, delta) is not in A_n, but that residual's own weight scales A_n.
    """
    q, k, others = now["q"], now["k"], []
    for m in attn.mixes:
        if m.residual.map == "cross":
            others += [attended[i]["k"] for i in m.sources]
        elif m.residual.of == "scores":
            q, k = join_scores(q, k, lambdas[m.index], [attended[i] for i in m.sources])
    parts = [(1.0, q, [k, *others])]
    for m in attn.mixes:
        if m.residual.of == "probs" or m.residual.map in ("identity", "delta"):
            own_weight, *weights = [float(w) for w in lambdas[m.index]]
            parts = [(own_weight * weight, q, keys) for weight, q, keys in parts]
            if m.residual.of == "probs":
                for w, i in zip(weights, m.sources, strict=True):
                    parts.append((w, attended[i]["q"], [attended[i]["k"]]))
    return parts


def importance(attn, now, attended, lambdas):
    """Token importance of each head: the share of all attention in layer `attn` that goes to a position, (B, H, T)."""
    parts = softmaxes(attn, now, attended, lambdas)
    if all(weight == 0 for weight, _, _ in parts):  # a layer that ignores its attention still has one
        parts = [(1.0, q, keys) for _, q, keys in parts]
    scale = attn.head_dim**-0.5
    total = sum(weight * received(q, keys, scale) for weight, q, keys in parts)
    shares = total / total.sum(dim=-1, keepdim=True)
    if (shares < 0).any():
        raise UserError("a residual of attention has a negative weight, so that some tokens get less than none of it")
    return shares


def measure_importance(heads):
    """{name: (B, …)} of token importance by head (B, H, T): its mean a' over heads, the entropy of a' (Eq 11), a' of
    the first token, the largest a' (Figure 21), and the share of heads in which the first token is a sink."""
    a = heads.mean(dim=1)  # (B, T)
    found = {"importance": a, "entropy": entropy(a), "first": a[:, 0]}
    found["sink_heads"] = (heads[:, :, 0] > SINK).double().mean(dim=1)
    largest = a.sort(dim=1, descending=True).values
    T = a.size(1)
    for name, rank in {"top_1": 1, "top_2": 2, "top_3": 3, "top_10": 10, "top_1%": math.ceil(0.01 * T)}.items():
        if rank <= T:
            found[name] = largest[:, rank - 1]
    return found


def join_heads(t):
    """Heads side by side: (B, h, T, D) -> (B, T, h * D), fp32 or float64."""
    return to_fp32(t).transpose(1, 2).flatten(2)


def similarity(x):
    """Mean cosine similarity of two different tokens (Eq 13), x (B, T, E) -> (B,), without the T x T products:
    (|sum of unit vectors|^2 - T) / (T (T - 1))."""
    unit = F.normalize(x, dim=-1)
    T = x.size(1)
    return (unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))) / (T * (T - 1))


def spectrum(x):
    """Eigenvalues of (1/T) sum_i x_i x_i^T (Eq 12, not centred), largest first, x (B, T, E) -> (B, E), float64."""
    device = "cpu" if x.device.type == "mps" else x.device  # mps has no float64
    x = x.to(device, torch.float64)
    _, T, E = x.shape
    products = x @ x.mT if T < E else x.mT @ x  # both have the same eigenvalues, but for zeros
    found = torch.linalg.eigvalsh(products / T).flip(-1).clamp(min=0)
    return F.pad(found, (0, E - found.size(-1)))


def measure_vectors(x, what):
    """{name: (B, …)} of x (B, T, E): norms |x_t| by position, of the first token and of the others, and similarity.
    Raises UserError, which names `what`, if a norm is not finite."""
    norms = x.norm(dim=-1)
    if not norms.isfinite().all():
        raise UserError(f"{what} has NaN or infinity in it: the weights are damaged, or --dtype is too narrow")
    found = {"norm": norms, "norm_first": norms[:, 0], "norm_rest": norms[:, 1:].mean(dim=1)}
    found["similarity"] = similarity(x)
    return found


def measure_values(v, what):
    """`measure_vectors` of values (B, G, T, D), heads side by side, and of their spectrum: spectrum (B, G * D), its
    largest eigenvalue, and rank, the effective rank (exp of the spectrum's entropy: Roy and Vetterli 2007)."""
    x = join_heads(v)
    found = measure_vectors(x, what)
    eigenvalues = spectrum(x)
    found["spectrum"] = eigenvalues
    found["largest"] = eigenvalues[:, 0]
    found["rank"] = entropy(eigenvalues).exp()
    return found


def cosine_to_cross(now, before, n, kernel):
    """How well Eq 4 and Eq 6 approximate cross-layer attention in layer n, counted from 0 (Figure 4): the cosine
    similarity of their outputs to that of Eq 2 with the layer before, mean over tokens: {"eq4": (B,), "eq6": (B,)}.
    Outputs have their heads side by side, before the output projection. before: see Recorder."""
    q, k, v = now["q"], now["k"], now["v"]
    cross = join_heads(attend_across(q, (k, before["k"]), (v, before["v"]), kernel))
    own = attend(q, k, v, kernel)
    eq4 = (own + attend(q, k, before["v"], kernel)) / 2
    eq6 = own + repeat_heads(before["v_sum"] / n, q.size(1))
    outputs = {"eq4": eq4, "eq6": eq6}
    return {name: F.cosine_similarity(join_heads(u), cross, dim=-1).mean(dim=1) for name, u in outputs.items()}


# ---- a forward pass


class Averages:
    """Means and standard deviations over chunks of named quantities of layers."""

    def __init__(self):
        self.sums = {}  # (name, layer) -> (number of chunks, sum, sum of squares)

    def add(self, n, found, prefix=""):
        """found: {name: (B, …)} of B chunks. Sums are float64 on the CPU: they stay exact over many chunks."""
        for name, x in found.items():
            x = x.cpu().double()
            count, total, squares = self.sums.get((prefix + name, n), (0, 0, 0))
            self.sums[prefix + name, n] = (count + len(x), total + x.sum(dim=0), squares + x.square().sum(dim=0))

    def mean(self, name, n):
        """A float or a numpy array, None if it was not measured."""
        if (name, n) not in self.sums:
            return None
        count, total, _ = self.sums[name, n]
        mean = total / count
        return mean.numpy() if mean.ndim else mean.item()

    def std(self, name, n):
        """Standard deviation over chunks (n - 1) of a number, None below two chunks."""
        count, total, squares = self.sums.get((name, n), (0, 0, 0))
        if count < 2:
            return None
        variance = (squares - total**2 / count).item() / (count - 1)
        return math.sqrt(max(0.0, variance))  # rounding may take it below 0


class Recorder:
    """Measures a model while it runs, by hooks on its blocks, into `averages`.

    Layers are 0 … L-1, states 0 … L: layer n reads state n, and the last layer leaves state L; "normed" is state L
    after the final norm. Of a layer it measures token importance, keys, the values that it attends over ("value": mixed
    or borrowed) and those that it projects ("raw_value"), eq4 and eq6.
    """

    def __init__(self, model):
        self.averages = Averages()
        self.before = None  # k and v of the layer before, and v_sum, the sum of the values of all layers so far
        self.handles = []
        for n, block in enumerate(model.blocks):
            self.handles.append(block.register_forward_pre_hook(functools.partial(self.state, n)))
            self.handles.append(block.attn.register_forward_hook(functools.partial(self.layer, n)))
        self.handles.append(model.norm.register_forward_pre_hook(functools.partial(self.state, len(model.blocks))))
        self.handles.append(model.norm.register_forward_hook(self.normed))

    def close(self):
        for handle in self.handles:
            handle.remove()

    def state(self, n, block, args):
        """Before a block, and before the final norm."""
        x = to_fp32(args[0])  # (B, T, C)
        self.averages.add(n, measure_vectors(x, f"state {n}"), "hidden_")
        size = x.abs().flatten(1)
        top, median = size.amax(dim=1), size.median(dim=1).values
        is_massive = (top > MASSIVE[0]) & (top > MASSIVE[1] * median)
        found = {"activation_max": top, "activation_median": median, "massive": is_massive.double()}
        self.averages.add(n, found)

    def normed(self, norm, args, x):
        """After the final norm."""
        self.averages.add(0, measure_vectors(to_fp32(x), "the final norm"), "normed_")

    def layer(self, n, attn, args, output):
        """After the attention of a layer; args and output are those of Attention.forward."""
        _, _, lambdas, _, attended, _ = args
        _, own, now = output
        what = f"layer {n + 1}"
        heads = importance(attn, now, attended, lambdas)
        self.averages.add(n, measure_importance(heads))
        self.averages.add(n, measure_vectors(join_heads(now["k"]), what), "key_")
        values = measure_values(now["v"], what)
        self.averages.add(n, values, "value_")
        if "v" in own:
            is_mixed = own["v"] is not now["v"]
            self.averages.add(n, measure_values(own["v"], what) if is_mixed else values, "raw_value_")
        v_sum = now["v"]
        if n:
            self.averages.add(n, cosine_to_cross(now, self.before, n, attn.kernel))
            v_sum = v_sum + self.before["v_sum"]
        self.before = {"k": now["k"], "v": now["v"], "v_sum": v_sum}


def record(model, idx, batch_tokens, device):
    """Averages over all chunks idx (N, T), from passes of `batch_tokens` tokens."""
    recorder = Recorder(model)
    with torch.inference_mode(), progress("analysis", idx.numel(), "token") as bar:
        for rows in idx.split(max(1, batch_tokens // idx.size(1))):
            model.hidden(rows.to(device))
            bar.update(rows.numel())
    recorder.close()
    return recorder.averages


# ---- models and their text


@dataclass
class Subject:
    """A model to analyse, and the source of its chunks."""

    model: GPT
    out_dir: Path
    data_dir: str
    mixture: dict | None  # None = the data's own
    first_token: int
    tokenizer: object  # a data.Tokenizer or an hf.HFTokenizer; if its hash is None, it reads the data's text
    step: int | None = None
    checkpoint: str | None = None

    @property
    def label(self):
        return self.out_dir.resolve().name


def open_run(name, cfg, device):
    """The Subject of a run's folder, which must be finished, of a checkpoint file, or of a Hugging Face folder."""
    path = checkpoint.find_finished(name)
    folder = path.parent
    step = checkpoint.read_header(path)["step"]
    tokenizer = checkpoint.load_tokenizer(path)
    data_dir, mixture = checkpoint.trained_on(folder, cfg.data_dir, "the prepared data by --data_dir")
    model = checkpoint.load(path, device=device, dtype=pick_dtype(cfg.dtype, device.type))
    return Subject(model, folder, data_dir, mixture, tokenizer.eot, tokenizer, step=step, checkpoint=path.name)


def open_initial(cfg, device):
    """The Subject of a config of train.py: the model before its first step."""
    words = list(cfg.init)
    if cfg.data_dir:
        words.append(f"--data_dir={cfg.data_dir}")
    trained = load_settings(TrainConfig, words)
    tokenizer = Tokenizer.load(Path(trained.data_dir) / "tokenizer.json")
    model = GPT(trained.model_config(tokenizer.n_vocab), trained.seed)
    model = model.to(device, pick_dtype(cfg.dtype, device.type)).eval()
    folder = Path("out", "-".join(["init", *(Path(file).stem for file in cfg.init)]))
    return Subject(model, folder, trained.data_dir, trained.mixture, tokenizer.eot, tokenizer, step=0)


def choose_windows(corpus, n, seed):
    """[(domain, window)] of n validation windows, divided among the domains by their weight, in random order. A domain
    that has too few gives all of them."""
    bounds = np.rint(n * np.cumsum([0, *corpus.mixture.values()])).astype(int)
    found = []
    for domain, quota in zip(corpus.domains, np.diff(bounds), strict=True):
        order = np.argsort(raw_bits(seed, "analysis", domain, n=corpus.windows("val", domain)), kind="stable")
        found += [(domain, int(window)) for window in order[:quota]]
    order = np.argsort(raw_bits(seed, "analysis", n=len(found)), kind="stable")
    return [found[i] for i in order]


def read_chunks(subject, n, T, seed, verify=True):
    """(at most n, T) token ids: the first token, then T - 1 of validation text."""
    is_ours = subject.tokenizer.hash is not None
    # another tokenizer may need more of our tokens for its T - 1: three times as many, cut to length afterwards
    block_size = T - 1 if is_ours else 3 * (T - 1)
    corpus = Corpus(subject.data_dir, block_size, mixture=subject.mixture, verify=verify)
    if is_ours and corpus.tokenizer.hash != subject.tokenizer.hash:
        raise UserError(f"{subject.data_dir} was made with another tokenizer than {subject.label}; name its own data")
    rows = [corpus.val_batch(domain, w, w + 1)[0][0] for domain, w in choose_windows(corpus, n, seed)]
    if not is_ours:
        texts = [corpus.tokenizer.decode(row.tolist()).replace(EOT, "\n\n") for row in rows]
        encoded = [subject.tokenizer.encode(text) for text in texts]
        rows = [ids[: T - 1] for ids in encoded if len(ids) >= T - 1]
    if not rows:
        raise UserError(f"the validation text of {subject.data_dir} has no chunk of {T} tokens; set a smaller --length")
    idx = np.full((len(rows), T), subject.first_token, np.int64)
    idx[:, 1:] = rows
    return torch.from_numpy(idx)


# ---- results


def short(x):
    """A number for JSON, in seven digits; None stays."""
    return None if x is None else float(f"{x:.7g}")


def by_layer(averages, names, n):
    """{name: {mean: a number for each of n layers, std: over chunks}}."""
    found = {}
    for name in names:
        found[name] = {
            "mean": [short(averages.mean(name, i)) for i in range(n)],
            "std": [short(averages.std(name, i)) for i in range(n)],
        }
    return found


def stack_rows(averages, name, n, most=None):
    """The mean of an array for each of n layers, its first `most` numbers; NaN where it was not measured."""
    found = np.full((n, len(averages.mean(name, 0))), np.nan, np.float32)  # layer 0 owns all of its tensors
    for i in range(n):
        row = averages.mean(name, i)
        if row is not None:
            found[i, : len(row)] = row  # shorter where a layer owns fewer value heads
    return found[:, :most]


def find_flags(averages, L, T):
    """What passes the thresholds at the top of this file: the sinks' positions and whether there is a value drain, by
    layer; whether there is a hidden peak, and the share of chunks with a massive activation, by state."""
    seen_by = T - np.arange(T // 2)  # queries that see a position; too few see the later ones to judge them
    sinks = []
    for n in range(L):
        share = averages.mean("importance", n)[: T // 2] * T / seen_by
        sinks.append(np.flatnonzero(share > SINK).tolist())

    def norms(name, n):
        return [(averages.mean(f"{name}_norm_first", i), averages.mean(f"{name}_norm_rest", i)) for i in range(n)]

    return {
        "sinks": sinks,
        "value_drains": [first < DRAIN * rest for first, rest in norms("value", L)],
        "hidden_peaks": [first > PEAK * rest for first, rest in norms("hidden", L + 1)],
        "massive": [averages.mean("massive", n) for n in range(L + 1)],
    }


def summarize_layers(model, averages, T):
    """(the measured part of analysis.json, the arrays of analysis.npz)."""
    L = model.cfg.n_layer
    level = uniform_entropy(T)
    layers = by_layer(averages, LAYER, L)
    above = [short(x - level) for x in layers["entropy"]["mean"]]
    layers["entropy_minus_uniform"] = {"mean": above, "std": layers["entropy"]["std"]}
    numbers = {
        "entropy_uniform": level,
        "layers": layers,
        "states": by_layer(averages, STATE, L + 1),
        "normed": by_layer(averages, NORMED, 1),
        "flags": find_flags(averages, L, T),
        "thresholds": {"sink": SINK, "drain": DRAIN, "peak": PEAK, "massive": MASSIVE},
    }
    arrays = {}
    for name in BY_POSITION:
        arrays[name] = stack_rows(averages, name, L + 1 if name == "hidden_norm" else L, POSITIONS)
    for name in SPECTRA:
        arrays[name] = stack_rows(averages, name, L)
    return numbers, arrays


def norm_ratio(first, rest):
    """A cell: the first token's norm over other tokens'."""
    return plus_minus(first / rest if rest else None, digits=3)


def layer_table(numbers):
    """A Markdown table of the main numbers by layer, counted from 1 as in the paper."""
    columns = numbers["layers"] | numbers["states"]
    rows = []
    for n in range(len(columns["entropy"]["mean"])):
        mean = {name: column["mean"][n] for name, column in columns.items()}
        row = [
            n + 1,
            plus_minus(mean["entropy"]),
            plus_minus(mean["entropy_minus_uniform"], sign=True),
            plus_minus(mean["first"]),
            norm_ratio(mean["value_norm_first"], mean["value_norm_rest"]),
            norm_ratio(mean["hidden_norm_first"], mean["hidden_norm_rest"]),
            plus_minus(mean["hidden_similarity"]),
            plus_minus(mean["value_rank"], digits=1),
            flag_words(numbers["flags"], n),
        ]
        rows.append(row)
    return markdown(HEADER, rows)


def flag_words(flags, n):
    """The flags of layer n in words."""
    words = []
    if flags["sinks"][n]:
        words.append(f"sinks at {flags['sinks'][n][:3]}")
    if flags["value_drains"][n]:
        words.append("value drain")
    if flags["hidden_peaks"][n]:
        words.append("hidden peak")
    return ", ".join(words)


def choose_text(subject, cfg):
    """The chunks (N, T) that the settings ask for, after checking that the model can read them."""
    block_size, vocab_size = subject.model.cfg.block_size, subject.model.cfg.vocab_size
    T = cfg.length or block_size
    if T > block_size:
        limit = f"{subject.label}'s block_size={block_size}"
        raise UserError(f"length={T} is more than {limit}; set --length={block_size} or less")
    if cfg.first_token >= 0:
        subject.first_token = cfg.first_token
    idx = read_chunks(subject, cfg.chunks, T, cfg.seed, cfg.verify)
    if idx.max() >= vocab_size:
        cause = f"first_token={subject.first_token} or the tokenizer is not its own"
        raise UserError(f"{subject.label} has {vocab_size} token ids, but its chunks hold {idx.max()}: {cause}")
    if len(idx) < cfg.chunks:
        print(f"note: {subject.data_dir} has only {len(idx)} of {cfg.chunks} chunks for {subject.label}")
    return idx


def analyze_subject(subject, cfg, device):
    """Measure a Subject, write analysis.json and analysis.npz, print the table."""
    idx = choose_text(subject, cfg)
    N, T = idx.shape
    averages = record(subject.model, idx, cfg.batch_tokens, device)
    measured, arrays = summarize_layers(subject.model, averages, T)
    mode = subject.model.cfg.value_mode.name
    numbers = {
        "format": "nanoresformer-analysis/1",
        "mode": mode,
        "step": subject.step,
        "checkpoint": subject.checkpoint,
        "parameters": count_parameters(subject.model.cfg),
        "config": dataclasses.asdict(subject.model.cfg),
        "chunks": N,
        "chunks_asked": cfg.chunks,
        "length": T,
        "first_token": subject.first_token,
        **measured,
        "dtype": cfg.dtype,
        "device": device.type,
        "environment": environment(),
    }
    out = Path(cfg.out_dir or subject.out_dir)
    write_arrays(out / "analysis.npz", arrays)
    write_json(out / "analysis.json", numbers)
    print(f"{subject.label} ({mode}): {N} chunks of {T} tokens; wrote {out}/analysis.json and .npz")
    print(layer_table(numbers) + "\n", flush=True)


def write_arrays(path, arrays):
    def write(temporary):
        with open(temporary, "wb") as f:  # by its name, numpy would add .npz to it
            np.savez_compressed(f, **arrays)

    write_atomic(path, write)


@enough_memory("set a smaller --batch_tokens")
def main(cfg: AnalyzeConfig):
    device = only_process(cfg.device).device
    if cfg.init:
        return analyze_subject(open_initial(cfg, device), cfg, device)
    names = cfg.runs or ("",)
    folders = [checkpoint.find_finished(name).parent.resolve() for name in names]
    twice = [name for name, folder in zip(names, folders, strict=True) if folders.count(folder) > 1]
    if twice:
        raise UserError(f"{' and '.join(twice)} are in one folder, which has one analysis.json; name one of them")
    for name in names:
        analyze_subject(open_run(name, cfg, device), cfg, device)


if __name__ == "__main__":
    run_main(main, SETTINGS)
