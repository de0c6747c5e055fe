"""What finished runs have left, and how sure a difference of their losses is.

A record has what the figures need of a run, in 4 kB: settings, losses, learned weights, the means of its analysis. We
make it from the run's folder. results/<scale>/runs.jsonl keeps it, so that we can draw most figures where the folders
are gone. Read next: claims.py.
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import plot
from common.files import read_record, reading
from common.runs import as_kept, made_as
from common.statistics import Fit, t_95
from configurator import UserError
from eval import read_results
from paper.runs import INSPECTED, LABELS, UNTRAINED, Job
from train import ENVIRONMENT, MAY_DIFFER

START = ("value_mode", "data", "device", "dtype", "seed", "parameters", "block_size", "max_steps", "kv_bytes_per_token")


# -- records


def decisive(settings):
    """Those settings of train.py that change a result: a record with these is of that run."""
    return {name: value for name, value in settings.items() if name not in MAY_DIFFER}


def finished(settings):
    """The Curves of the run with these settings, None before its end. UserError if its folder has another run."""
    wanted = decisive(settings)
    wanted["value_mode_name"] = wanted.pop("value_mode")
    run = made_as(wanted, settings["out_dir"])
    return None if run is None or run.final_loss in (None, math.inf) else run


def make_record(settings, every):
    """The record of the finished run with these settings. Each of its losses averages `every` steps."""
    run, folder = finished(settings), Path(settings["out_dir"])
    if run is None:
        raise UserError(f"{folder} is missing or not finished; leave out --run=false, or see its train.log")
    record = as_kept(run, folder, decisive(settings), read_record(folder / "env.json", ENVIRONMENT), every)
    record["start"] = {name: run.start[name] for name in START}
    if run.evaluation.get("lam"):
        record["lam"] = run.evaluation["lam"]  # the learned weights of residuals
    if (folder / "analysis.json").exists():
        record["analysis"] = plot.read_analysis(folder)
    return record


def scores(folder):
    """{task: what eval.py found of it} of the last checkpoint in a run's folder; empty if nothing is scored."""
    checkpoints = read_results(folder).values()
    return max(checkpoints, key=lambda checkpoint: checkpoint["step"], default={"results": {}})["results"]


# -- all runs of a scale


class Found:
    """The records of a scale's runs, by Job and seed.

    records: {name: record}; seeds: function Job -> its seeds; jobs: all of the scale, whose noise we pool; repeats:
    {name: record} of runs that were made again; root: folder of the runs; errors: {name: why there is no record};
    public: {name of a public model: folder of its analysis}.
    """

    def __init__(self, records, scale, seeds, jobs=(), repeats=None, root="", errors=None, public=None):
        self.records, self.scale, self.seeds, self.jobs = records, scale, seeds, list(jobs)
        self.repeats, self.root, self.errors, self.public = repeats or {}, Path(root), errors or {}, public or {}

    def name(self, job, seed):
        return f"{self.scale.here(job).name}-{seed}"

    def record(self, job, seed):
        name = self.name(job, seed)
        if name not in self.records:
            raise self.errors.get(name) or UserError(f"there is no record of {name}")
        return self.records[name]

    def start(self, job):
        """What a Job's runs have in common: parameters, bytes of its cache and so on."""
        return self.record(job, self.seeds(job)[0])["start"]

    def parameters(self, job):
        return self.start(job)["parameters"]

    def tokens(self, job):
        """Training tokens of a run."""
        return self.start(job)["max_steps"] * self.record(job, self.seeds(job)[0])["step_tokens"]

    def common_seeds(self, *jobs):
        """The seeds that all of several Jobs have."""
        return [seed for seed in self.seeds(jobs[0]) if all(seed in self.seeds(job) for job in jobs)]

    def marks(self, *jobs):
        """‡ if the runs of these Jobs were on different processors, † if a record of them has no commit."""
        records = [self.record(job, seed) for job in jobs for seed in self.common_seeds(*jobs)]
        # a processor can move a loss as much as another seed, so a reader has to see it
        is_mixed, is_bare = (len({r["processor"] for r in records}) > 1, any(r["commit"] is None for r in records))
        return "‡" * is_mixed + "†" * is_bare

    # losses, in nats per token

    def steps(self, job, seed):
        """{"step", "tokens", "loss"}: arrays over training. Each mean stands at its last step."""
        record = self.record(job, seed)
        losses = np.array(record["losses"], float)
        step = record["every"] * np.arange(1.0, 1 + len(losses))
        return {"step": step, "tokens": step * record["step_tokens"], "loss": losses}

    def validation(self, job, seed):
        """(tokens, validation losses) of a run's evaluations."""
        record = self.record(job, seed)
        return [int(step) * record["step_tokens"] for step in record["val"]], list(record["val"].values())

    def loss(self, job, seed):
        """The validation loss at the end of a run."""
        return self.validation(job, seed)[1][-1]

    def losses(self, job):
        return [self.loss(job, seed) for seed in self.seeds(job)]

    def fit(self, jobs, besides=()):
        """The Fit that says how noisy differences of Jobs are. Most share one noise: all Jobs with several seeds but
        the smallest models, at their mode's own rate or vanilla's. If one of `jobs` is not of these, it is the noise of
        those with their settings and rates. Seeds shift all runs of a setting alike. Jobs `besides` these have a cell,
        too, with the first seed if there are no others."""

        def setting(job):
            return replace(job, mode="", lr=None)

        def is_of_most(job):
            own = [self.scale.here(replace(job, mode=mode, lr=None)).lr for mode in (job.mode, "vanilla")]
            return job.size != "2M" and job.lr in own and job.change != UNTRAINED

        jobs = [self.scale.here(job) for job in jobs]
        family = [*self.jobs, *jobs]
        if all(map(is_of_most, jobs)):
            family = filter(is_of_most, family)
        else:
            settings, rates = {setting(job) for job in jobs}, {job.lr for job in jobs}
            family = [job for job in family if setting(job) in settings and (job.size == "2M" or job.lr in rates)]
        cells = {}
        for job in family:
            seeds = self.seeds(job)
            if len(seeds) > 1 and all(f"{job.name}-{seed}" in self.records for seed in seeds):
                cells[job] = {(setting(job), seed): self.loss(job, seed) for seed in seeds}
        for job in map(self.scale.here, besides):
            seed = self.seeds(job)[0]
            cells.setdefault(job, {(setting(job), seed): self.loss(job, seed)})
        return Fit(cells)

    def contrast(self, weights):
        """(value, half of its 95 % interval, {seed: value}) of a sum {Job: weight} of validation losses at the end. One
        seed has no interval; then a run counts with the mean of it and its repeats."""
        here = Counter()
        for job, weight in weights.items():
            here[self.scale.here(job)] += weight
        seeds = self.common_seeds(*here)
        values = {seed: float(sum(here[job] * self.loss(job, seed) for job in here)) for seed in seeds}
        if len(seeds) > 1:
            return *self.fit(here).contrast(here)[:2], values
        for job, weight in here.items():
            again = self.repeats.get(self.name(job, seeds[0]), self.record(job, seeds[0]))
            values[seeds[0]] += weight * (list(again["val"].values())[-1] - self.loss(job, seeds[0])) / 2
        return values[seeds[0]], None, values

    def gap(self, job):
        """`contrast` of a Job and its baseline."""
        return self.contrast({job: 1, job.baseline: -1})

    def one_seed(self):
        """Half of the 95 % interval of a difference of two runs, 0 if nothing has several seeds."""
        fit = self.fit([Job()])
        return t_95(fit.df) * fit.noise * math.sqrt(2) if fit.noise else 0.0

    # what analyze.py and eval.py found

    def analysis(self, job, seed):
        record = self.record(job, seed)
        if "analysis" not in record:
            folder = self.root / record["name"]
            raise UserError(f"{folder} has no analysis.json; make it: `python analyze.py {folder}`")
        return record["analysis"]

    def by_layer(self, job, seed, key):
        """A quantity's means by layer or state; None in layers without it. key "value_norm" or "hidden_norm": the first
        token's norm relative to other tokens."""
        if key in ("value_norm", "hidden_norm"):
            first, rest = (np.array(self.by_layer(job, seed, f"{key}_{part}"), float) for part in ("first", "rest"))
            return (first / rest).tolist()
        return self.means(self.analysis(job, seed), key)

    @staticmethod
    def means(analysis, key):
        return analysis["states" if key in analysis["states"] else "layers"][key]["mean"]

    def arrays(self, job, seed):
        """{name: array} of a run's analysis. Records do not have them."""
        path = self.root / self.name(job, seed) / "analysis.npz"
        with reading(path, "what analyze.py writes"), np.load(path) as arrays:
            return dict(arrays)

    def evaluation(self, job, seed, task):
        """What eval.py found of a run on a task, or None."""
        return scores(self.root / self.name(job, seed)).get(task)

    # the paper's units in words, as they are here

    def rate(self, job):
        """A Job's peak learning rate."""
        return f"{self.scale.here(job).lr * self.scale.lr_factor:.4g}"

    def in_words(self, text, job):
        """A text whose {0.mode}, {0.rate}, {0.size}, {0.shape}, {0.length} and {0.warmup} become a Job's."""
        here = SimpleNamespace(mode=LABELS.get(job.mode, job.mode), rate=self.rate(job))
        here.size = plot.short_count(self.parameters(job))
        here.shape = "{0} layers, width {2}".format(*self.scale.sizes[self.scale.here(job).size])
        here.length, here.warmup = f"{self.scale.lengths[job.length][0]:,}", f"{self.scale.warmups[job.warmup]:,}"
        return text.format(here, job)

    def labels(self, lines):
        """[(label in words, Job)] of the lines that the scale has."""
        return [(self.in_words(label, job), job) for label, job in lines if self.scale.has(job)]

    def names_of(self, a, b):
        """Two Jobs as `resformer − vanilla 5.07M`; how both differ from the base is said once. b may be None."""
        base, words = Job(), {"length": "length {0.length}", "lr": "rate {0.rate}", "warmup": "{0.warmup} warmup steps"}
        words |= {"arch": "{1.arch}", "change": "{1.change}"}
        differs = {}
        for job in filter(None, (a, b)):
            has_size = job.size not in (base.size, INSPECTED)
            parts = ["{0.size}"] * has_size + [
                words[name] for name in words if getattr(job, name) != getattr(base, name)
            ]
            differs[job] = self.in_words(" ".join(parts), job.baseline if has_size else job)
            differs[job] = differs[job].replace(UNTRAINED, "before training")
        if len(set(differs.values())) == 1:
            return f"{' − '.join(job.mode for job in differs)} {differs[a]}".strip()
        return " − ".join(f"{job.mode} {differs[job]}".strip() for job in differs)
