"""Attention concentration in a model: what each layer attends to, and the norms, spectra and likeness of its states.

    python analyze.py out/vanilla out/resformer                    1,000 validation chunks through each model
    python analyze.py --init=config/size_468m.py --chunks=4        the same of a model before its training
    python analyze.py path/to/Llama-3.1-8B --length=2048 --data_dir=data/demo     Llama or Mistral, Hugging Face layout

Each chunk is the end-of-text token (training text has no other beginning), then consecutive tokens of validation text.
Writes analysis.json (numbers by layer) and analysis.npz (by token position, and spectra) into the run's folder, and
prints the main ones. What is measured is defined at the function that measures it; the paper is arXiv 2410.17897.
"""

import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import hf
from checkpoint import load_tokenizer, trained_on
from configurator import UserError, command_line, load_settings, run_main, setting
from data import EOT, Corpus, Tokenizer, raw_bits
from describe import count_parameters
from files import read_json, write_atomic, write_json
from model import GPT, attend, to_fp32
from report import markdown, plus_minus, progress
from runtime import Distributed, environment, peak_bytes
from train import TrainConfig
from value_modes import mode_name

FORMAT = "nanoresformer-analysis/1"
BLOCK = 2**24  # probabilities of a block of queries held at a time: memory grows with the length, not its square
POSITIONS = 256  # positions, from the first, that analysis.npz keeps
# what the flags in analysis.json mean
SINK = 0.3  # a position gets more than this share of the attention of the queries that see it (Gu et al. 2410.10781)
DRAIN = 0.5  # the first token's values are shorter than this times the others' (the paper's A.2: ResFormer's are not)
PEAK = 3.0  # its hidden state is longer than this times the others' (the same: ResFormer's is not)
MASSIVE = (100.0, 1000.0)  # an activation is above the first, and above the second times the median (Sun 2402.17762)


@dataclass(frozen=True)
class AnalyzeConfig:
    """Every setting of analyze.py."""

    runs: tuple[str, ...] = setting(
        (), "runs' folders, checkpoints' files, or folders in Hugging Face layout", positional=True
    )
    init: tuple[str, ...] = setting((), "config files of train.py: their model as training would start from")
    data_dir: str = setting("", "prepared data, for its validation text; empty = what the run was trained on")
    chunks: int = setting(1000, "chunks to average over, drawn from the domains as the mixture says")
    length: int = setting(0, "tokens per chunk; 0 = the model's block_size")
    first_token: int = setting(-1, "id that each chunk starts with; -1 = end-of-text, the beginning for Hugging Face's")
    grad_chunks: int = setting(16, "chunks for the gradient of layer 1's values; 0 = leave that out")
    seed: int = setting(42, "of the choice of chunks")
    batch_tokens: int = setting(8192, "tokens of a forward pass")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "of weights and states; softmax and sums are fp32")
    out_dir: str = setting("", "folder of the results; empty = the run's own, out/init-<name> with --init")

    def __post_init__(self):
        for name, least in dict(chunks=1, length=0, grad_chunks=0, batch_tokens=1, first_token=-1).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.length == 1:
            raise ValueError("length=1 leaves nothing to attend to; it must be at least 2, or 0 for the block_size")
        if bool(self.runs) == bool(self.init):
            raise ValueError("name runs, as in `python analyze.py out/vanilla out/resformer`, or else --init=FILE")
        if self.out_dir and len(self.runs) > 1:
            raise ValueError(f"out_dir={self.out_dir} is one folder for {len(self.runs)} runs; leave it empty")


def uniform_entropy(T):
    """Entropy of token importance in nats if each of T tokens attends to all it sees alike: row i of A is 1/i."""
    importance = (1 / np.arange(1, T + 1))[::-1].cumsum()[::-1] / T
    return float(-(importance * np.log(importance)).sum())


def entropy(p):
    """Entropy in nats of distributions p (..., n) -> (...); p need not sum to 1, and has none where it is all 0."""
    p = p / p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return -torch.xlogy(p, p).sum(dim=-1)


def received(q, keys, scale, rows=0):
    """Attention that each position gets: column sums of softmax(q [k_1; k_2; …]^T * scale), each part causal, where a
    position's columns in all parts count together. q (B, H, T, D), each k (B, G, T, D) -> (B, H, T), fp32 or float64.

    The probabilities exist for `rows` queries at a time only.
    """
    B, H, T, _ = q.shape
    keys = [to_fp32(k).repeat_interleave(H // k.size(1), dim=1) for k in keys]  # (B, H, T, D)
    rows = rows or max(1, BLOCK // (B * H * T * len(keys)))
    total = torch.zeros(B, H, T, dtype=to_fp32(q).dtype, device=q.device)
    for first in range(0, T, rows):
        last = min(T, first + rows)
        later = torch.ones(last - first, last, dtype=torch.bool, device=q.device).triu(first + 1)
        block = to_fp32(q[:, :, first:last]) * scale
        scores = torch.cat([(block @ k[:, :, :last].mT).masked_fill_(later, -math.inf) for k in keys], dim=-1)
        sums = scores.softmax(dim=-1).sum(dim=2)  # (B, H, parts * last)
        total[..., :last] += sums.view(B, H, len(keys), last).sum(dim=2)
    return total


def softmaxes(attn, used, useds, lam):
    """[(weight, q, [k_1, …])]: layer `attn`'s A_n as a weighted sum of softmaxes over those keys, see `received`.
    used, useds, lam: as in model.Attention. What is added after attention (identity, delta) is no part of A_n."""
    q, keys = used["q"], [used["k"]]
    for m in attn.mixes:
        j, r, sources = m.index, m.residual, m.sources
        if r.map == "cross":
            keys += [useds[i]["k"] for i in sources]
        elif r.of == "scores":  # one product of concatenated heads, as in model.Attention.attend
            q = torch.cat([w * t for w, t in zip(lam[j], [q, *(useds[i]["q"] for i in sources)], strict=True)], dim=-1)
            keys = [torch.cat([*keys, *(useds[i]["k"] for i in sources)], dim=-1)]
    parts = [(1.0, q, keys)]
    for m in attn.mixes:
        j, r, sources = m.index, m.residual, m.sources
        if r.of == "probs" or r.map in ("identity", "delta"):
            own, *others = (float(w) for w in lam[j])
            parts = [(own * w, *of) for w, *of in parts]
            if r.of == "probs":
                parts += [(w, useds[i]["q"], [useds[i]["k"]]) for w, i in zip(others, sources, strict=True)]
    return parts


def importance(attn, used, useds, lam):
    """Token importance of each head: the share of all attention in layer `attn` that goes to a position, (B, H, T)."""
    scale = attn.head_dim**-0.5
    parts = softmaxes(attn, used, useds, lam)
    if not any(w for w, *_ in parts):  # a layer may give its attention no weight at all: where it goes is still a fact
        parts = [(1.0, *of) for _, *of in parts]
    total = sum(w * received(q, keys, scale) for w, q, keys in parts)
    return total / total.sum(dim=-1, keepdim=True)


def join(t):
    """Heads side by side: (B, h, T, D) -> (B, T, h * D), fp32 or float64."""
    return to_fp32(t).transpose(1, 2).flatten(2)


def similarity(x):
    """Mean cosine similarity of two different tokens (Eq 13), x (B, T, E) -> (B,), without the T x T products:
    (|sum of unit vectors|^2 - T) / (T (T - 1))."""
    unit = F.normalize(x, dim=-1)
    T = x.size(1)
    return (unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))) / (T * (T - 1))


def spectrum(x):
    """Eigenvalues of (1/T) sum_i x_i x_i^T (Eq 12, not centred) from the largest down, x (B, T, E) -> (B, E), float64.
    With fewer tokens than dimensions those of x x^T / T, the same but for zeros."""
    x = x.to("cpu" if x.device.type == "mps" else x.device, torch.float64)
    (_, T, E), wide = x.shape, x.size(1) < x.size(2)
    found = torch.linalg.eigvalsh((x @ x.mT if wide else x.mT @ x) / T).flip(-1).clamp(min=0)
    return F.pad(found, (0, E - found.size(-1)))


def likeness(q, ks, vs, v_sum, n, kind):
    """Cosine similarity of the outputs of layer n (counted from 0) under Eq 4 and Eq 6 to cross-layer attention's, Eq 2
    with the layer before (Figure 4): two (B,), means over tokens; heads side by side, before the output projection.
    ks, vs: this layer's and the one before's, as attended over; v_sum: sum of the values of all layers before."""
    cross = join(attend(q, torch.cat(ks, dim=2), torch.cat(vs, dim=2), kind, layers=len(ks)))
    own, before = (attend(q, ks[0], v, kind) for v in vs)
    each = (v_sum / n).repeat_interleave(q.size(1) // v_sum.size(1), dim=1)  # (B, H, T, D)
    return [F.cosine_similarity(join(u), cross, dim=-1).mean(dim=1) for u in ((own + before) / 2, own + each)]


def finite(x, what):
    """Raise UserError if x has NaN or infinity in it."""
    if not x.isfinite().all():
        raise UserError(f"{what}: not all is finite; the weights are damaged, or --dtype is too narrow")


class Averages:
    """Means and standard deviations over chunks of named quantities of layers."""

    def __init__(self):
        self.sums = {}  # (name, layer) -> number of chunks, sum, sum of squares

    def add(self, name, n, x):
        """x (B, …): of B chunks. Kept in float64 on the CPU: sums over many chunks stay exact, and small."""
        x = x.cpu().double()
        count, total, squares = self.sums.get((name, n), (0, 0, 0))
        self.sums[name, n] = count + len(x), total + x.sum(dim=0), squares + x.square().sum(dim=0)

    def mean(self, name, n):
        """A float or numpy array, or None if it was not measured."""
        if (name, n) in self.sums:
            count, total, _ = self.sums[name, n]
            return (total / count).numpy() if total.ndim else (total / count).item()

    def std(self, name, n):
        """Standard deviation over chunks (n - 1) of a number, or None."""
        count, total, squares = self.sums.get((name, n), (0, 0, 0))
        if count > 1:
            return math.sqrt(max(0.0, (squares - total**2 / count).item() / (count - 1)))


class Recorder:
    """Measures a model while it runs, by hooks on its blocks: layers 0 … L-1, and states 0 … L, of which state n is
    what layer n reads and L what the last one leaves (before the final norm; "normed" is after it).

    Of each layer: `entropy` of token importance a' (Eq 11: mean over heads first, then its sum over queries); a' of the
    `first` token and the largest (`top_1`, 2, 3, 10, and the one at 1 % of the length); share of heads that are
    sinks; and `measure` of its keys and values. "value" is what is attended over (mixed, borrowed), "raw_value" what
    the layer projects. Of each state `measure` and its activations' greatest and median size.
    """

    def __init__(self, model):
        self.model, self.averages, self.before, self.handles = model, Averages(), None, []
        for n, block in enumerate(model.blocks):
            self.handles.append(block.register_forward_pre_hook(functools.partial(self.state, n)))
            self.handles.append(block.attn.register_forward_hook(functools.partial(self.layer, n)))
            for j, gate in block.attn.gates.items():
                self.handles.append(gate.register_forward_hook(functools.partial(self.gate, j, n)))
        self.handles.append(model.norm.register_forward_pre_hook(functools.partial(self.state, len(model.blocks))))
        self.handles.append(model.norm.register_forward_hook(self.normed))

    def close(self):
        for handle in self.handles:
            handle.remove()

    def measure(self, names, n, x):
        """Norms |x_t| by position and of the first token and the rest, and similarity, of x (B, T, E)."""
        finite(x, f"the states before layer {n + 1}" if names == ["hidden"] else names[0])
        norms = x.norm(dim=-1)
        for name in names:
            self.averages.add(f"{name}_norm", n, norms)
            self.averages.add(f"{name}_norm_first", n, norms[:, 0])
            self.averages.add(f"{name}_norm_rest", n, norms[:, 1:].mean(dim=1))
            self.averages.add(f"{name}_similarity", n, similarity(x))

    def measure_values(self, names, n, v):
        """`measure`, and spectrum, largest eigenvalue and effective rank (exp of the spectrum's entropy: Roy and
        Vetterli 2007), of values (B, G, T, D)."""
        v = join(v)
        self.measure(names, n, v)
        values = spectrum(v)
        for name in names:
            self.averages.add(f"{name}_spectrum", n, values)
            self.averages.add(f"{name}_largest", n, values[:, 0])
            self.averages.add(f"{name}_rank", n, entropy(values).exp())

    def state(self, n, block, args):
        """Before a block, and before the final norm."""
        x = to_fp32(args[0])  # (B, T, C)
        self.measure(["hidden"], n, x)
        size = x.abs().flatten(1)
        top, median = size.amax(dim=1), size.median(dim=1).values
        self.averages.add("activation_max", n, top)
        self.averages.add("activation_median", n, median)
        self.averages.add("massive", n, ((top > MASSIVE[0]) & (top > MASSIVE[1] * median)).double())

    def normed(self, norm, args, x):
        self.measure(["normed"], 0, to_fp32(x))

    def gate(self, j, n, gate, args, weights):
        """Weights that a Gate computes for each token: their mean, (own, source)."""
        means = [to_fp32(w).flatten(1).mean(dim=1).cpu() if torch.is_tensor(w) else torch.tensor(w) for w in weights]
        self.averages.add(f"gate_{j}", n, torch.stack(torch.broadcast_tensors(*means), dim=1))

    def layer(self, n, attn, args, output):
        """After the attention of a layer."""
        (_, _, lam, _, useds, _), (_, raw, used) = args, output
        for t in used.values():
            finite(t, f"layer {n + 1}")
        heads = importance(attn, used, useds, lam)  # (B, H, T)
        a = heads.mean(dim=1)  # (B, T)
        add, T = self.averages.add, a.size(1)
        add("importance", n, a)
        add("entropy", n, entropy(a))
        add("first", n, a[:, 0])
        add("sink_heads", n, (heads[:, :, 0] > SINK).double().mean(dim=1))
        largest = a.sort(dim=1, descending=True).values
        for name, rank in ranks(T).items():
            add(name, n, largest[:, rank - 1])
        self.measure(["key"], n, join(used["k"]))
        same = raw.get("v") is used["v"]
        self.measure_values(["value", "raw_value"] if same else ["value"], n, used["v"])
        if "v" in raw and not same:
            self.measure_values(["raw_value"], n, raw["v"])
        q, k, v = (used[t] for t in "qkv")
        if n:
            k_before, v_before, v_sum = self.before
            eq4, eq6 = likeness(q, (k, k_before), (v, v_before), v_sum, n, attn.kind)
            add("eq4", n, eq4)
            add("eq6", n, eq6)
        self.before = k, v, v + self.before[2] if n else v


def ranks(T):
    """{name: rank} of Figure 21's largest importances, counted from 1, as far as T tokens have them."""
    found = {f"top_{i}": i for i in (1, 2, 3, 10)} | {"top_1%": math.ceil(0.01 * T)}
    return {name: rank for name, rank in found.items() if rank <= T}


def value_gradients(model, idx):
    """Norms of the gradient of one chunk's mean loss, idx (1, T), with respect to layer 0's values as projected: by the
    layer through which it comes, one number for each, None where a layer does not read them. In all of the modes that
    share or mix V_1 it is used undetached by many layers, and its weights learn from the sum of these."""
    first, read, handles = model.blocks[0].attn, {}, []
    frozen = [p for p in model.parameters() if p.requires_grad]

    def project(module, args, output):
        read["leaf"] = output.detach().requires_grad_()
        return read["leaf"]

    def reads(n, module, args):
        """Layer n gets its own view of layer 0's values, as projected and as used, so that each has its gradient."""
        x, angles, lam, *stores, cache = args
        for s, store in enumerate(stores):  # raws, useds
            if "v" in store.get(0, {}):
                alias = store[0]["v"].view_as(store[0]["v"])
                alias.retain_grad()
                read[n, s] = store[0]["v"], alias
                stores[s] = {**store, 0: {**store[0], "v": alias}}
        return x, angles, lam, *stores, cache

    try:
        for p in frozen:
            p.requires_grad_(False)
        handles.append(first.proj.register_forward_hook(project))
        for n, block in enumerate(model.blocks[1:], 1):
            handles.append(block.attn.register_forward_pre_hook(functools.partial(reads, n)))
        target = torch.cat([idx[:, 1:], torch.full_like(idx[:, :1], -1)], dim=1)
        with torch.enable_grad():
            model(idx, target)[1].backward(retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
        for p in frozen:
            p.requires_grad_()
    leaf, width = read.pop("leaf"), first.heads["v"] * first.head_dim
    through = {}
    for (n, _), (source, alias) in read.items():
        if alias.grad is not None:  # what is used may be a mix of layer 0's values and others
            (g,) = torch.autograd.grad(source, leaf, alias.grad, retain_graph=True)
            through[n] = through.get(n, 0) + to_fp32(g)
    through[0] = to_fp32(leaf.grad) - sum(through.values())  # what is left came through layer 0 itself
    norms = {n: g[..., -width:].norm().item() for n, g in through.items()}  # (1, T, G * D): v comes last
    return [norms.get(n) for n in range(len(model.blocks))]


@dataclass
class Subject:
    """A model to analyse, and where its chunks come from."""

    model: GPT
    label: str
    out_dir: Path
    data_dir: str
    mixture: dict | None
    first_token: int
    tokenizer: object  # a data.Tokenizer, whose ids the data must have, or a tokenizers.Tokenizer, which reads its text
    about: dict  # what analysis.json says of it


def finished(path, named_file):
    """Raise UserError if the run of a checkpoint is not at its end, unless the file itself was named."""
    config = path.parent / "config.json"
    steps = read_json(config, "the config of a run").get("max_steps") if config.exists() else None
    step = checkpoint.read_header(path)["step"]
    if steps and step < steps and not named_file:
        raise UserError(
            f"{path.parent} is at step {step} of {steps}; finish it with --resume=auto, or name {path} itself"
        )


def open_run(name, cfg, device):
    """The Subject of a run's folder or a checkpoint's file."""
    path = checkpoint.find(name)
    finished(path, Path(name).is_file())
    header, tokenizer = checkpoint.read_header(path), load_tokenizer(path)
    data_dir, mixture = trained_on(path.parent, cfg.data_dir, "the prepared data by --data_dir")
    model = checkpoint.load(path, device=device).to(getattr(torch, cfg.dtype))
    about = {"mode": header["mode"], "step": header["step"], "checkpoint": path.name}
    return Subject(model, path.parent.name, path.parent, data_dir, mixture, tokenizer.eot, tokenizer, about)


def is_hugging_face(name):
    path = Path(name) / "config.json"
    kinds = {"model_type", "architectures", "architecture"}
    return path.exists() and not kinds.isdisjoint(read_json(path, "the config of a model"))


def open_hugging_face(name, cfg, device):
    """The Subject of a Llama or Mistral folder; it reads the text of prepared data in its own tokens."""
    if not cfg.data_dir:
        raise UserError(f"{name} does not say what it was trained on; name prepared data, for its text, by --data_dir")
    tokenizer, first = hf.hf_tokenizer(name), hf.hf_first_token(name)
    model = hf.load_hf(name, device=device, dtype=getattr(torch, cfg.dtype))
    about = {"mode": mode_name(model.cfg.value_mode), "step": None, "checkpoint": Path(name).name}
    return Subject(model, Path(name).name, Path(name), cfg.data_dir, None, first, tokenizer, about)


def open_initial(cfg, device):
    """The Subject of a config of train.py: the model before its first step."""
    words = [*cfg.init, *([f"--data_dir={cfg.data_dir}"] if cfg.data_dir else [])]
    trained = load_settings(TrainConfig, words)
    tokenizer = Tokenizer.load(Path(trained.data_dir) / "tokenizer.json")
    model = GPT(trained.model_config(tokenizer.n_vocab), trained.seed).to(device, getattr(torch, cfg.dtype)).eval()
    label = "-".join(["init", *(Path(file).stem for file in cfg.init)])
    about = {"mode": mode_name(model.cfg.value_mode), "step": 0, "checkpoint": None}
    mixture = trained.mixture or None
    return Subject(model, label, Path("out", label), trained.data_dir, mixture, tokenizer.eot, tokenizer, about)


def windows(corpus, n, seed):
    """[(domain, window)] of n validation windows, so many of each domain as the mixture gives it, in an order that
    follows from the seed and mixes the domains; fewer where a domain does not have them."""
    bounds = np.rint(n * np.cumsum([0, *corpus.mixture.values()])).astype(int)
    found = []
    for domain, quota in zip(corpus.domains, np.diff(bounds), strict=True):
        order = np.argsort(raw_bits(seed, "analysis", domain, n=corpus.windows("val", domain)), kind="stable")
        found += [(domain, int(w)) for w in order[:quota]]
    return [found[i] for i in np.argsort(raw_bits(seed, "analysis", n=len(found)), kind="stable")]


def chunks(subject, n, T, seed):
    """(at most n, T) token ids: the first token, then T - 1 of validation text."""
    ours = isinstance(subject.tokenizer, Tokenizer)
    # text in another tokenizer's ids: three times as much as should be needed, cut to length afterwards
    corpus = Corpus(subject.data_dir, (T - 1) * (1 if ours else 3), mixture=subject.mixture, verify=False)
    if ours and corpus.tokenizer.hash != subject.tokenizer.hash:
        raise UserError(f"{subject.data_dir} was made with another tokenizer than {subject.label}; name its own data")
    rows = [corpus.val_batch(domain, w, w + 1)[0][0] for domain, w in windows(corpus, n, seed)]
    if not ours:
        texts = [corpus.tokenizer.decode(row.tolist()).replace(EOT, "\n\n") for row in rows]
        rows = [found.ids[: T - 1] for found in subject.tokenizer.encode_batch(texts, add_special_tokens=False)]
        rows = [row for row in rows if len(row) == T - 1]
    if not rows:
        raise UserError(f"the validation text of {subject.data_dir} has no chunk of {T} tokens; set a smaller --length")
    idx = np.full((len(rows), T), subject.first_token, np.int64)
    idx[:, 1:] = rows
    return torch.from_numpy(idx)


def measure(model, idx, cfg, device):
    """(Averages over all chunks idx (N, T), gradient norms by layer of the first grad_chunks of them), see
    `value_gradients`."""
    per_pass, recorder = max(1, cfg.batch_tokens // idx.size(1)), Recorder(model)
    n_grad = min(cfg.grad_chunks, len(idx))
    bar = progress("analysis", idx.numel() + 3 * n_grad * idx.size(1))
    try:
        with torch.inference_mode():
            for rows in idx.split(per_pass):
                model.hidden(rows.to(device))
                bar.update(rows.numel())
    finally:
        recorder.close()
    gradients = []
    for row in idx[:n_grad]:
        gradients.append(value_gradients(model, row[None].to(device)))
        bar.update(3 * idx.size(1))
    bar.close()
    means = [np.mean(of) if None not in of else None for of in zip(*gradients, strict=True)]
    return recorder.averages, means


def short(x):
    """A number for JSON, in seven digits; None stays."""
    return None if x is None else float(f"{x:.7g}")


def by_layer(averages, names, n):
    """{name: {mean: a number for each of n layers, std: over chunks}}."""
    columns = {"mean": averages.mean, "std": averages.std}
    return {name: {key: [short(f(name, i)) for i in range(n)] for key, f in columns.items()} for name in names}


def flags(averages, L, T):
    """What passes the thresholds at the top of this file, by layer (sinks, drains) and by state (peaks, massive)."""
    seen_by = T - np.arange(T // 2)  # queries that see a position; later ones are seen by too few to tell
    shares = [averages.mean("importance", n)[: T // 2] * T / seen_by for n in range(L)]
    first, rest = ([averages.mean(f"value_norm_{of}", n) for n in range(L)] for of in ("first", "rest"))
    state, others = ([averages.mean(f"hidden_norm_{of}", n) for n in range(L + 1)] for of in ("first", "rest"))
    return {
        "sinks": [np.flatnonzero(share > SINK).tolist() for share in shares],
        "value_drains": [a < DRAIN * b for a, b in zip(first, rest, strict=True)],
        "hidden_peaks": [a > PEAK * b for a, b in zip(state, others, strict=True)],
        "massive": [averages.mean("massive", n) for n in range(L + 1)],
    }


def learned(model, averages):
    """Weights that the mode has learned: of residuals [residual][layer] (a Gate's are means over tokens), and
    DenseFormer's [block]."""
    found = {}
    if model.lambdas:
        weights = model.mixing_weights()
        for j, layers in enumerate(weights):
            gates = [averages.mean(f"gate_{j}", n) for n in range(len(layers))]
            weights[j] = [w if g is None else g.tolist() for w, g in zip(layers, gates, strict=True)]
        found["lam"] = [[w and [short(x) for x in w] for w in layers] for layers in weights]
    if model.dense:
        found["alpha"] = [[short(x) for x in alpha.tolist()] for alpha in model.dense.alphas]
    return found


LAYER = ("entropy", "first", "top_1", "top_2", "top_3", "top_10", "top_1%", "sink_heads", "eq4", "eq6")
LAYER += tuple(f"{t}_{of}" for t in ("key", "value", "raw_value") for of in ("norm_first", "norm_rest", "similarity"))
LAYER += tuple(f"{t}_{of}" for t in ("value", "raw_value") for of in ("largest", "rank"))
STATE = ("hidden_norm_first", "hidden_norm_rest", "hidden_similarity", "activation_max", "activation_median")


def summarize(subject, averages, gradients, N, T):
    """(what analysis.json holds, the arrays of analysis.npz)."""
    L, level = subject.model.cfg.n_layer, uniform_entropy(T)
    layers = by_layer(averages, LAYER, L)
    above = [short(e - level) for e in layers["entropy"]["mean"]]
    layers["entropy_minus_uniform"] = {"mean": above, "std": layers["entropy"]["std"]}
    thresholds = dict(sink=SINK, drain=DRAIN, peak=PEAK, massive=MASSIVE)
    numbers = {
        "format": FORMAT,
        **subject.about,
        "parameters": count_parameters(subject.model.cfg)[0],
        "config": subject.model.cfg.to_dict(),
        "chunks": N,
        "length": T,
        "first_token": subject.first_token,
        "entropy_uniform": level,
        "layers": layers,
        "states": by_layer(averages, STATE, L + 1),
        "normed": by_layer(averages, ("normed_norm_first", "normed_norm_rest", "normed_similarity"), 1),
        "flags": flags(averages, L, T),
        "thresholds": thresholds,
        "learned": learned(subject.model, averages),
        "value_gradient": [short(x) for x in gradients],
    }
    arrays = {}
    for name, n in {"importance": L, "value_norm": L, "raw_value_norm": L, "key_norm": L, "hidden_norm": L + 1}.items():
        rows = [averages.mean(name, i) for i in range(n)]
        arrays[name] = np.stack([np.full(min(T, POSITIONS), np.nan) if r is None else r[:POSITIONS] for r in rows])
    for name in ("value_spectrum", "raw_value_spectrum"):
        rows = [averages.mean(name, i) for i in range(L)]
        width = len(averages.mean("value_spectrum", 0))
        arrays[name] = np.stack([np.full(width, np.nan) if r is None else r for r in rows])
    return numbers, {name: array.astype(np.float32) for name, array in arrays.items()}


def table(numbers):
    """Lines of a Markdown table of the main numbers by layer, counted from 1 as in the paper."""
    layers, states, found = numbers["layers"], numbers["states"], numbers["flags"]
    rows = []
    for n in range(len(layers["entropy"]["mean"])):
        row = {key: layers[key]["mean"][n] for key in layers} | {key: states[key]["mean"][n] for key in states}
        said = [f"sinks at {found['sinks'][n][:3]}"] * bool(found["sinks"][n])
        said += ["value drain"] * found["value_drains"][n] + ["hidden peak"] * found["hidden_peaks"][n]
        ratios = [f"{row[f'{t}_norm_first'] / row[f'{t}_norm_rest']:.3f}" for t in ("value", "hidden")]
        columns = [
            plus_minus(row[key], sign=bool(sign)) for key, sign in (("entropy", ""), ("entropy_minus_uniform", "+"))
        ]
        columns += [plus_minus(row["first"]), *ratios, plus_minus(row["hidden_similarity"]), f"{row['value_rank']:.1f}"]
        rows.append([str(n + 1), *columns, ", ".join(said)])
    head = ["layer", "entropy", "minus uniform", "first token's importance", "its value's norm / the rest's"]
    head += ["its hidden state's / the rest's", "token similarity", "effective rank of values", "flags"]
    return [markdown(head, rows), ""]


def analyze(subject, cfg, device):
    """Measure a Subject, write analysis.json and .npz, print the table."""
    block, began = subject.model.cfg.block_size, time.time()
    T = cfg.length or block
    if T > block:
        raise UserError(f"length={T} is more than {subject.label}'s block_size={block}; set --length={block} or less")
    if cfg.first_token >= 0:
        subject.first_token = cfg.first_token
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    idx = chunks(subject, cfg.chunks, T, cfg.seed)
    if idx.max() >= (vocab := subject.model.cfg.vocab_size):
        raise UserError(
            f"{subject.label} has {vocab} token ids, but its chunks hold {idx.max()}: first_token="
            f"{subject.first_token} or the tokenizer is not its own"
        )
    if len(idx) < cfg.chunks:
        print(f"note: {subject.data_dir} has only {len(idx)} of {cfg.chunks} chunks for {subject.label}")
    numbers, arrays = summarize(subject, *measure(subject.model, idx, cfg, device), len(idx), T)
    numbers |= {"dtype": cfg.dtype, "device": device.type, "seconds": round(time.time() - began, 1)}
    numbers |= {"chunks_asked": cfg.chunks, "peak_bytes": peak_bytes(device), "environment": environment()}
    out = Path(cfg.out_dir or subject.out_dir)

    def save(temporary):
        with open(temporary, "wb") as f:
            np.savez_compressed(f, **arrays)

    write_atomic(out / "analysis.npz", save)
    write_json(out / "analysis.json", numbers)
    print(f"{subject.label} ({numbers['mode']}): {len(idx)} chunks of {T} tokens; wrote {out}/analysis.json and .npz")
    print("\n".join(table(numbers)), flush=True)


def main(cfg: AnalyzeConfig):
    world = Distributed(cfg.device)
    if world.size > 1:
        raise UserError("analyze.py runs in one process; leave torchrun out")
    if cfg.init:
        return analyze(open_initial(cfg, world.device), cfg, world.device)
    for name in cfg.runs:
        opened = open_hugging_face if is_hugging_face(name) else open_run
        analyze(opened(name, cfg, world.device), cfg, world.device)


if __name__ == "__main__":
    run_main(main, command_line(AnalyzeConfig, __doc__))
