"""Tables as rows of texts, the header first: the paper's five, ours beside its numbers, and two beside figures.

The first argument of each is a found.Found. Read next: panels.py.
"""

from pathlib import Path

import numpy as np

from common.data import Tokenizer, load_manifest
from common.report import plus_minus, with_interval
from common.sizes import count_parameters
from common.statistics import mean_interval
from common.tasks import TABLE1
from configurator import UserError
from paper import claims
from paper.claims import critical
from paper.scales import SCALES, VOCAB, Job, train_settings
from prepare import PAPER_MIXTURE
from train import TrainConfig

# Numbers that the paper prints: Tables 1 (accuracies) and 5 (validation losses); domains and tasks in its order.
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


def beside(ours, paper):
    """A cell: the mean of our numbers, and the paper's number, a text or None, in brackets."""
    text = "-" if np.isnan(ours).any() else f"{np.mean(ours):.4f}"
    return text if paper is None else f"{text} ({paper})"


def settings_row(ours, paper):
    """Cells of settings: ours, and the paper's in brackets."""
    pairs = [[f"{x:,}" if isinstance(x, int) else x for x in pair] for pair in zip(ours, paper, strict=True)]
    return ["{} ({})".format(*pair) for pair in pairs]


# -- the paper's tables


def table1(found):
    """Accuracies, means over seeds, the paper's in brackets; a task that a model could not be scored on has none."""
    yield ["", *TABLE1, "Avg"]
    for (mode, length), paper in PAPER_ACCURACIES.items():
        job = Job(mode, length=length)
        rows = np.stack([claims.accuracies(job, found, seed) for seed in found.seeds])  # (seeds, tasks)
        rows = rows[~np.isnan(rows).all(axis=1)]
        if not len(rows):
            raise UserError(f"no task is scored at length {length:,}; without the hub, name files by --eval_dir")
        means = rows.mean(axis=0)
        means = [*means, means.mean()]  # no average where a task is missing
        cells = [beside(mean, f"{accuracy:.3f}") for mean, accuracy in zip(means, paper, strict=True)]
        yield [found.in_words("{0.mode}, length {0.length}", job), *cells]


def table2(found):
    """Shares of the domains, as prepared here and in the paper."""
    yield ["domain", "share", "training tokens", "the paper's share", "its tokens"]
    manifest = load_manifest(found.scale.data_dir, verify=False)
    for domain in dict.fromkeys([*PAPER_MIXTURE, *manifest["mixture"]]):
        row = [domain, "-", "-", "-", "-"]
        if domain in manifest["mixture"]:
            row[1:3] = f"{manifest['mixture'][domain]:.1%}", f"{manifest['splits']['train'][domain]['tokens']:,}"
        if domain in PAPER_MIXTURE:
            row[3:] = f"{PAPER_MIXTURE[domain]:.0%}", f"{20 * PAPER_MIXTURE[domain]:.0f}B"
        yield row


def table3(found):
    """Batches by length, the paper's in brackets. Its 32 steps of accumulation are a slip: its other numbers give 4."""
    yield ["length", "tokens", "sequences per step", "GPUs", "per GPU", "accumulation", "tokens per step"]
    for length, (tokens, batch, micro) in found.scale.lengths.items():
        _, sequences, each = SCALES["paper"].lengths[length]
        gpus = found.scale.gpus
        ours = (tokens, batch, gpus, micro, batch // (micro * max(1, gpus)), tokens * batch)
        yield [f"{length:,}", *settings_row(ours, (length, sequences, 8, each, 32, length * sequences))]


def table4(found):
    """Shapes and recipe by size, the paper's in brackets. The paper does not give the shape of its 320M."""
    names = ["", "layers", "heads", "width", "FFN width"]
    names += ["vocabulary", "peak learning rate", "warmup steps", "steps", "tokens per step", "parameters"]
    vocab, columns = Tokenizer.load(Path(found.scale.data_dir) / "tokenizer.json").n_vocab, []
    for size in found.scale.sizes:
        recipes = []
        for scale, n_vocab in ((SCALES["paper"], VOCAB), (found.scale, vocab)):
            cfg = TrainConfig(**train_settings(Job(size=size), scale, 0, ""))
            model = cfg.model_config(n_vocab)
            shape = [model.n_layer, model.n_head, model.n_embd, model.n_hidden, n_vocab]
            recipes.append([*shape, cfg.learning_rate, cfg.warmup_steps, cfg.max_steps, cfg.batch_tokens])
        theirs, ours = recipes
        theirs[:4] = ["-"] * 4 if size == "320M" else theirs[:4]
        columns.append([size, *settings_row(ours, theirs), f"{count_parameters(model):,}"])
    yield from map(list, zip(names, *columns, strict=True))


def table5(found):
    """Validation losses by domain, means over seeds; the paper's in brackets where the domain is one of its own."""
    jobs = {Job(*key): paper for key, paper in PAPER_LOSSES.items()}
    names = list(found.domains(Job(), found.seeds[0]))  # each data set has its own
    yield ["", *names, "Avg"]
    for job, paper in jobs.items():
        domains = [found.domains(job, seed) for seed in found.seeds]
        *of_domains, average = (f"{loss:.4f}" for loss in paper)
        theirs = dict(zip(DOMAINS, of_domains, strict=True))
        cells = [beside([losses[name] for losses in domains], theirs.get(name)) for name in names]
        yield [found.in_words("{0.mode} {0.size}", job), *cells, beside(found.final_losses(job), average)]


# -- tables beside figures. lines: [(label, Job)]


def critical_table(found, lines):
    """When vanilla overtakes for the last time."""
    yield ["", "overtaken at step", "in seeds"]
    for label, job in found.labels(lines):
        points = [critical(job, found, seed) for seed in found.seeds]
        crossed = [point for point in points if 0 < point <= found.scale.steps]
        yield [label, plus_minus(*mean_interval(crossed), digits=0), f"{len(crossed)} of {len(points)}"]


def concentration_table(found, lines):
    """Losses, and how concentrated the attention is: the first token's quantities are extremes over layers. Cells are
    means and 95 % intervals over seeds."""
    measured = (claims.ENTROPY, *claims.EXTREMES)
    yield ["mode", "loss", *measured]
    for label, job in found.labels(lines):
        quantities = [claims.MEASURED[what][-1] for what in measured]
        columns = [[quantity(job, found, seed) for seed in found.seeds] for quantity in (claims.loss, *quantities)]
        yield [label, *(with_interval(*mean_interval(values)) for values in columns)]
