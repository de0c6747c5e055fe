"""The paper's five tables, ours beside its numbers: functions (found: runs.Found) -> rows of texts, the header first.

Read next: panels.py.
"""

from pathlib import Path

import numpy as np

from configurator import UserError
from data import Tokenizer
from files import read_json
from paper.claims import LABELS, scored
from paper.runs import Job, model_of
from tasks import TABLE1

# Numbers that the paper prints: Table 1 (accuracies), 3, 4, 5 (validation losses); domains and tasks in its order.
PAPER_ACCURACIES = {
    ("vanilla", 2048): (0.263, 0.142, 0.492, 0.199, 0.331, 0.572, 0.333),
    ("resformer", 2048): (0.273, 0.148, 0.512, 0.182, 0.414, 0.604, 0.355),
    ("vanilla", 64000): (0.267, 0.142, 0.485, 0.179, 0.322, 0.570, 0.328),
    ("resformer", 64000): (0.274, 0.136, 0.513, 0.184, 0.407, 0.588, 0.350),
}
DOMAINS = ("CommonCrawl", "C4", "Github", "StackExchange", "Wikipedia", "Book", "ArXiv")
PAPER_LOSSES = {
    ("vanilla", "82M"): (3.3595, 3.5388, 1.4247, 2.3872, 2.9047, 3.3797, 2.1779, 2.7389),
    ("vanilla", "180M"): (3.0961, 3.2834, 1.2451, 2.1651, 2.5897, 3.1309, 2.0001, 2.5015),
    ("vanilla", "468M"): (2.8514, 3.0430, 1.0908, 1.9628, 2.2821, 2.8979, 1.8362, 2.2806),
    ("resformer", "82M"): (3.3362, 3.5191, 1.3941, 2.3592, 2.8646, 3.3572, 2.1518, 2.7117),
    ("resformer", "180M"): (3.0631, 3.2504, 1.2200, 2.1350, 2.5435, 3.0994, 1.9732, 2.4692),
    ("resformer", "468M"): (2.8214, 3.0115, 1.0730, 1.9388, 2.2477, 2.8696, 1.8142, 2.2537),
}
PAPER_BATCHES = {
    512: (4096, 128),
    2048: (1024, 32),
    8192: (256, 8),
    32000: (64, 2),
    64000: (32, 1),
}  # sequences, per GPU
SHAPE = ("layers", "heads", "width")
PAPER_SHAPES = {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}
PARAMETERS = {"82M": 81_901_056, "180M": 179_874_048, "468M": 467_921_920}


def size_and_loss(mode):
    """[(parameters, the paper's validation loss, mean over domains)] of a mode, from Table 5."""
    return [(PARAMETERS[size], losses[-1]) for (name, size), losses in PAPER_LOSSES.items() if name == mode]


def setting_text(x):
    """A number of a table: whole ones with commas."""
    if isinstance(x, str):
        return x
    return f"{x:,}" if isinstance(x, int) else f"{x:g}"


def beside(ours, paper):
    """A cell: our number, and the paper's in brackets."""
    text = "-" if ours is None else f"{ours:.4f}"
    return text if paper is None else f"{text} ({paper})"


def both(ours, paper):
    """A cell of two settings: ours, and the paper's in brackets."""
    return f"{setting_text(ours)} ({setting_text(paper)})"


def table1(found):
    """Accuracies, the paper's in brackets; Avg is over the tasks that both models of a length can be scored on."""
    yield ["", *TABLE1, "Avg"]
    for (mode, length), paper in PAPER_ACCURACIES.items():
        accuracies, common = [], []
        for seed in found.seeds(Job(mode, length=length)):
            accuracy, together = scored(found, length, seed)
            if together:
                accuracies.append(accuracy[mode])
                common = common or together
        if not accuracies:
            raise UserError(f"no task is scored at length {length:,}; `{found.make}`, if need be with --eval_dir")
        columns = [[of[task] for of in accuracies if task in of] for task in TABLE1]
        columns.append([of[task] for of in accuracies for task in common])
        cells = []
        for values, theirs in zip(columns, paper, strict=True):
            cells.append(beside(np.mean(values) if values else None, f"{theirs:.3f}"))
        if len(common) < len(TABLE1):
            cells[-1] += f" of {len(common)}"
        yield [f"{LABELS[mode]} {length:,}", *cells]


def table2(found):
    """Shares of the domains, as prepared here and in the paper."""
    from prepare import PAPER_MIXTURE  # here, so that the names of figures are known without it

    yield ["domain", "share here", "training tokens here", "share in the paper", "tokens in the paper"]
    manifest = read_json(Path(found.scale.data_dir) / "manifest.json", "a manifest of prepare.py")
    for domain in dict.fromkeys([*PAPER_MIXTURE, *manifest["mixture"]]):
        row = [domain, "-", "-", "-", "-"]
        if domain in manifest["mixture"]:
            row[1] = f"{manifest['mixture'][domain]:.1%}"
        if domain in manifest["splits"]["train"]:
            row[2] = f"{manifest['splits']['train'][domain]['tokens']:,}"
        if domain in PAPER_MIXTURE:
            row[3:] = [f"{PAPER_MIXTURE[domain]:.0%}", f"{20 * PAPER_MIXTURE[domain]:.0f}B"]
        yield row


def table3(found):
    """Batches by length, the paper's in brackets. Its 32 steps of accumulation are a slip: its own numbers give 4."""
    yield ["length", "tokens", "sequences per step", "per GPU", "accumulation", "tokens per step"]
    for length, (tokens, batch, micro) in found.scale.lengths.items():
        sequences, each = PAPER_BATCHES[length]
        accumulation = batch // (micro * max(1, found.scale.gpus))
        ours = (tokens, batch, micro, accumulation, tokens * batch)
        paper = (length, sequences, each, 32, length * sequences)
        yield [f"{length:,}", *map(both, ours, paper)]


def table4(found):
    """Shapes and recipe by size, the paper's in brackets; it does not give the shape of its 320M."""
    from describe import count_parameters  # imports torch

    scale = found.scale
    vocab = Tokenizer.load(Path(scale.data_dir) / "tokenizer.json").n_vocab
    models = {size: model_of(Job(size=size), scale, vocab) for size in scale.sizes}
    unknown = ("-", "-", "-")
    yield ["", *scale.sizes]
    for i, name in enumerate(SHAPE):
        yield [name, *(both(scale.sizes[size][i], PAPER_SHAPES.get(size, unknown)[i]) for size in models)]
    hidden = {size: width * 7 // 2 for size, (_, _, width) in PAPER_SHAPES.items()}
    yield ["FFN width", *(both(model.n_hidden, hidden.get(size, "-")) for size, model in models.items())]
    tokens, batch, _ = scale.lengths[2048]
    for name, ours, paper in (
        ("vocabulary", vocab, 50277),
        ("peak learning rate", 6e-4 * scale.rate, 6e-4),
        ("warmup steps", scale.warmups[120], 120),
        ("steps", scale.steps, 10_000),
        ("tokens per step", tokens * batch, 2048 * 1024),
    ):
        yield [name, *[both(ours, paper) for _ in models]]
    yield ["parameters", *(f"{count_parameters(model)[0]:,}" for model in models.values())]


def mean_results(found, job):
    """({domain: validation loss}, their mean) over the seeds of a Job that have them; UserError if none has."""
    records = [found.evaluation(job, seed, "loss") for seed in found.seeds(job)]
    records = [record for record in records if record]
    if not records:
        raise UserError(f"{job.name} has no losses by domain; make them: `{found.make}`")
    domains = {name: float(np.mean([record["val"][name] for record in records])) for name in records[0]["val"]}
    return domains, float(np.mean([record["val_mean"] for record in records]))


def table5(found):
    """Validation losses by domain; the paper's in brackets where the domain is one of its own."""
    header = None
    for (mode, size), paper in PAPER_LOSSES.items():
        losses, mean = mean_results(found, Job(mode, size))
        if header is None:
            header = ["", *losses, "Avg"]
            yield header
        theirs = dict(zip(DOMAINS, paper, strict=False))
        cells = [beside(loss, theirs.get(domain)) for domain, loss in losses.items()]
        yield [f"{LABELS[mode]} {size}", *cells, beside(mean, paper[-1])]
