"""Tables as rows of texts, the header first: the paper's five, ours beside its numbers, and those of modes, rates,
critical points and regimes. The first argument of each is a found.Found.

Read next: panels.py.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

import plot
from data import Tokenizer
from oldconfig import UserError
from oldfiles import read_json
from paper import claims
from paper.claims import LABELS, critical, gap_in_words, gaps_to_vanilla
from paper.runs import SCALES, Job, train_settings
from report import mean_interval, plus_minus, with_interval
from tasks import TABLE1

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
PARAMETERS = {"82M": 81_901_056, "180M": 179_874_048, "468M": 467_921_920}


def size_and_loss(mode):
    """[(parameters, the paper's validation loss, mean over domains)] of a mode, from Table 5."""
    return [(PARAMETERS[size], losses[-1]) for (name, size), losses in PAPER_LOSSES.items() if name == mode]


def beside(ours, paper):
    """A cell: our number, and the paper's, a text or None, in brackets."""
    text = "-" if ours is None else f"{ours:.4f}"
    return text if paper is None else f"{text} ({paper})"


def settings_row(ours, paper):
    """Cells of settings, whole numbers with commas: ours, and the paper's in brackets."""
    return [f"{with_commas(our)} ({with_commas(its)})" for our, its in zip(ours, paper, strict=True)]


def with_commas(x):
    return f"{x:,}" if isinstance(x, int) else str(x)


def accuracy_cell(values, paper):
    """The mean of accuracies, "-" if there is none, and the paper's in brackets."""
    return beside(np.mean(values) if values else None, f"{paper:.3f}")


def table1(found):
    """Accuracies, the paper's in brackets; Avg is over the tasks that both models of a length can be scored on."""
    yield ["", *TABLE1, "Avg"]
    for (mode, length), paper in PAPER_ACCURACIES.items():
        accuracies, common = [], TABLE1
        for seed in found.seeds(Job(mode, length=length)):
            by_mode, tasks = claims.task_accuracies(found, length, seed)
            if tasks:  # else nothing is scored with this seed
                accuracies.append(by_mode[mode])
                common = [task for task in common if task in tasks]
        if not accuracies:
            raise UserError(f"no task is scored at length {length:,}; without the hub, set --eval_dir")
        cells = []
        for task, theirs in zip(TABLE1, paper[:-1], strict=True):
            cells.append(accuracy_cell([of[task] for of in accuracies if task in of], theirs))
        cells.append(accuracy_cell([of[task] for of in accuracies for task in common], paper[-1]))
        if len(common) < len(TABLE1):
            cells[-1] += f" of {len(common)}"
        yield [found.in_words(f"{LABELS[mode]}, length [length {length}]"), *cells]


def table2(found):
    """Shares of the domains, as prepared here and in the paper."""
    from prepare import PAPER_MIXTURE  # here, so that the names of figures are known without it

    yield ["domain", "share here", "training tokens here", "share in the paper", "tokens in the paper"]
    manifest = read_json(Path(found.scale.data_dir) / "manifest.json", "a manifest of prepare.py")
    for domain in dict.fromkeys([*PAPER_MIXTURE, *manifest["mixture"]]):
        row = [domain, "-", "-", "-", "-"]
        if domain in manifest["mixture"]:
            row[1:3] = f"{manifest['mixture'][domain]:.1%}", f"{manifest['splits']['train'][domain]['tokens']:,}"
        if domain in PAPER_MIXTURE:
            row[3:] = f"{PAPER_MIXTURE[domain]:.0%}", f"{20 * PAPER_MIXTURE[domain]:.0f}B"
        yield row


def table3(found):
    """Batches by length, the paper's in brackets. Its 32 steps of accumulation are a slip: the paper's other numbers
    give 4."""
    yield ["length", "tokens", "sequences per step", "per GPU", "accumulation", "tokens per step"]
    for length, (tokens, batch, micro) in found.scale.lengths.items():
        _, sequences, each = SCALES["paper"].lengths[length]
        ours = (tokens, batch, micro, batch // (micro * max(1, found.scale.gpus)), tokens * batch)
        yield [f"{length:,}", *settings_row(ours, (length, sequences, each, 32, length * sequences))]


def table4(found):
    """Shapes and recipe by size, the paper's in brackets; the paper does not give the shape of its 320M."""
    from describe import count_parameters  # imports torch

    vocab = Tokenizer.load(Path(found.scale.data_dir) / "tokenizer.json").n_vocab
    columns = []
    for size in found.scale.sizes:
        model, ours = recipe(found.scale, size, vocab)
        _, theirs = recipe(SCALES["paper"], size, SCALES["paper"].vocab)
        if size == "320M":
            theirs[:4] = ["-"] * 4
        columns.append([size, *settings_row(ours, theirs), f"{count_parameters(model):,}"])
    names = ["", "layers", "heads", "width", "FFN width"]
    names += ["vocabulary", "peak learning rate", "warmup steps", "steps", "tokens per step", "parameters"]
    yield from map(list, zip(names, *columns, strict=True))


def recipe(scale, size, vocab):
    """A model's ModelConfig, and what Table 4 says of it: shape, vocabulary, learning rate, warmup, steps, tokens of a
    step."""
    from train import TrainConfig  # imports torch

    cfg = TrainConfig(**train_settings(Job(size=size), scale, 0, ""))
    model = cfg.model_config(vocab)
    shape = [model.n_layer, model.n_head, model.n_embd, model.n_hidden, vocab]
    return model, [*shape, cfg.learning_rate, cfg.warmup_steps, cfg.max_steps, cfg.batch_tokens]


def table5(found):
    """Validation losses by domain, means over seeds; the paper's in brackets where the domain is one of its own."""
    asked = [(Job(*key), paper) for key, paper in PAPER_LOSSES.items() if found.scale.has(Job(*key))]
    for i, (job, paper) in enumerate(asked):
        runs = [found.run(job, seed) for seed in found.seeds(job)]
        domains = list(runs[0].domains)
        if i == 0:
            yield ["", *domains, "Avg"]
        *of_domains, average = (f"{loss:.4f}" for loss in paper)
        theirs = dict(zip(DOMAINS, of_domains, strict=True))
        cells = [beside(np.mean([run.domains[name] for run in runs]), theirs.get(name)) for name in domains]
        mean = np.mean(found.losses(job))
        yield [found.in_words(f"{LABELS[job.mode]}, [size {job.size}]"), *cells, beside(mean, average)]


def critical_table(found, lines):
    """When vanilla overtakes for the last time. lines: [(label, Job)]."""
    kinds = ["crossed in (seeds)", "extrapolated in", "never ahead in", "no crossing in sight in"]
    yield ["", "overtaken at step, ± 95 %, if crossed", *kinds]
    for label, job in lines:
        points = [critical(found, job, seed) for seed in found.common_seeds(job, job.baseline)]
        crossed = [step for step, extrapolated in points if step > 0 and not extrapolated]
        when = plus_minus(*mean_interval(crossed), digits=0)
        counts = [
            len(crossed),
            sum(extrapolated and step < math.inf for step, extrapolated in points),
            sum(step == 0 for step, _ in points),
            sum(step == math.inf for step, _ in points),
        ]
        yield [label, when, *map(str, counts)]


def rates_table(found, grids):
    """The best rates of modes. grids: {(size, mode): its Jobs, one for each rate}."""
    gaps = ["minus Transformer's, each at its best rate, ± 95 %", "both at Transformer's best rate"]
    yield ["parameters", "mode", "best rate", "loss there, ± 95 %", "seeds", *gaps]
    for (_, mode), jobs in grids.items():
        best, base = claims.best_pair(found, jobs)
        cells = [with_interval(*mean_interval(found.losses(best))), str(len(found.seeds(best)))]
        at_base = replace(best, lr=base.lr)
        for values in (claims.gaps_at_best(found, jobs), gaps_to_vanilla(found, at_base)):
            cells.append("-" if mode == "vanilla" else with_interval(*mean_interval(values), sign=True))
        rate = f"{best.lr * found.scale.lr_factor:.2g}"
        if len(jobs) > 2 and best in (jobs[0], jobs[-1]):
            rate += " (end of the grid)"
        yield [plot.short_count(found.parameters(best)), LABELS[mode], rate, *cells]


def regime_rows(found, lines):
    """{(label, mode): its Jobs, the lower rate first}"""
    rows = {}
    for label, job in found.labels(lines):
        rows.setdefault((label, job.mode), []).append(job)
    return rows


def regime_table(found, lines):
    """Vanilla's losses at its better rate. Then losses minus vanilla's: with both modes at each of two rates, where
    there are two, and with each mode at its better one."""
    gaps = ["both at the lower rate", "both at the higher", "each at its better one ± 95 %"]
    yield ["what differs", "mode", "rates", "vanilla's loss", *gaps]
    for (label, mode), jobs in regime_rows(found, lines).items():
        _, base = claims.best_pair(found, jobs)
        rates = " and ".join(found.unit("rate", job) for job in jobs)
        if len(jobs) == 1 and found.rate_in_words(jobs[0]):
            rates += f", vanilla {found.unit('rate', base)}"
        cells = ["-", "-"]
        if len(jobs) > 1:
            cells = [gap_in_words(found, job) for job in jobs]
        best = mean_interval(claims.gaps_at_best(found, jobs))
        losses = with_interval(*mean_interval(found.losses(base)))
        yield [label, LABELS[mode], rates, losses, *cells, with_interval(*best, sign=True)]


def concentration_table(found, jobs):
    """How concentrated the attention of modes is, and their losses. The first token's quantities are extremes over
    layers."""
    quantities = {
        "entropy in the deeper half (nats)": claims.deep_entropy,
        "first token's greatest importance": claims.most_importance,
        "its shortest value": claims.least_value,
        "its longest hidden state": claims.most_hidden,
    }
    yield ["mode", "validation loss ± 95 %", *quantities]
    for job in jobs:
        cells = [LABELS[job.mode], with_interval(*mean_interval(found.losses(job)))]
        for quantity in quantities.values():
            values = [quantity(job, found, seed) for seed in found.seeds(job)]
            cells.append(with_interval(*mean_interval(values)))
        yield cells


def modes_table(found, jobs):
    """Validation losses of runs, the lowest first."""
    yield ["mode", "validation loss ± 95 %", "minus vanilla's ± 95 %", "seeds", "parameters", "KV bytes per token"]
    rows = []
    for job in jobs:
        seeds = found.seeds(job)
        start = found.run(job, seeds[0]).start
        losses = mean_interval(found.losses(job))
        gap = "-" if job == job.baseline else gap_in_words(found, job)
        cells = [f"`{job.mode}`", with_interval(*losses), gap, str(len(seeds))]
        rows.append((losses[0], [*cells, f"{start['parameters']:,}", f"{start['kv_bytes_per_token']:,}"]))
    yield from (cells for _, cells in sorted(rows))
