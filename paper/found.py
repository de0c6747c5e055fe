"""What finished runs have left on disk, by Job and seed. Read next: claims.py."""

from pathlib import Path

import numpy as np

import plot
from configurator import UserError
from files import read_json
from paper.runs import SEEDS, UNIT, Job, train_settings

INITIAL = "init-468M"  # folder of the analysis of a model before training
# settings of a run that its result does not depend on
MAY_DIFFER = ("data_dir", "out_dir", "device", "compile", "eval_every", "save_every", "log_every", "keep")


def read_arrays(path):
    """{name: array} of an .npz file; raises UserError if it is missing or damaged."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except Exception as e:  # zipfile and zlib raise many kinds
        raise UserError(f"{path} is missing or damaged ({e}); make it again with analyze.py") from None


class NoSeed(KeyError):
    """A run is not made with that seed."""


class Found:
    """What the runs of a scale have left, read when it is asked for. root: folder of the runs; seeds: function Job ->
    its seeds; public: folders of analyses of public models."""

    def __init__(self, root, scale, seeds, public=()):
        self.root, self.scale, self.seeds, self.public = Path(root), scale, seeds, public
        self.curves, self.analyses = {}, {}  # what has been read, by folder

    def folder(self, job, seed):
        name = self.scale.here(job).name
        if seed not in self.seeds(job):
            raise NoSeed(f"{name} has no seed {seed}")
        return self.root / f"{name}-{seed}"

    def run(self, job, seed):
        """The plot.Curves of a run. Raises UserError if it is not finished, or of other settings or data."""
        folder = self.folder(job, seed)
        if folder not in self.curves:
            run = plot.read_run(folder) if (folder / "metrics.jsonl").exists() else None
            if not run or not run.finished:
                raise UserError(f"{folder} is missing or not finished; leave out --run=false, or see its train.log")
            first = next(iter(self.curves.values()), run)
            made = read_json(folder / "config.json", "settings of train.py") | {"data": run.start["data"]}
            asked = train_settings(job, self.scale, seed, folder) | {"data": first.start["data"]}
            asked["value_mode_name"] = asked.pop("value_mode")
            for name, value in asked.items():
                if name not in MAY_DIFFER and made.get(name) != value:
                    raise UserError(
                        f"{folder} has {name}={made.get(name)} instead of {value}; remove it, or set another --out_dir"
                    )
            self.curves[folder] = run
        return self.curves[folder]

    def parameters(self, job):
        return self.run(job, self.seeds(job)[0]).start["parameters"]

    def labels(self, lines):
        """[(label, Job)] of lines, with what the Jobs are here for {length}, {size}, {rate} and {warmup}."""
        filled = []
        for label, job in lines:
            units = {
                "length": f"{self.scale.lengths[job.length][0]:,}",
                "size": plot.short_count(self.parameters(job)),
                "rate": f"{self.scale.here(job).lr * self.scale.lr_factor:.4g}",
                "warmup": self.scale.warmups[job.warmup],
            }
            filled.append((label.format(**units), job))
        return filled

    def rate_in_words(self, job):
        """ ", rate 0.006" if a Job's rate is not that of its baseline, else nothing."""
        rate, other = self.scale.here(job).lr, self.scale.here(job.baseline).lr
        return "" if rate == other else f", rate {rate * self.scale.lr_factor:.4g}"

    def in_words(self, text):
        """Text in which [size 468M], [length 64000], [rate 1e-4] and [warmup 1200] become what they are here. A size is
        vanilla's parameters, and the steps of a run that has more than others."""

        def here(match):
            unit, paper = match.groups()
            if unit == "size":
                run = self.run(Job(size=paper), SEEDS[0])
                steps = f", {run.max_steps:,} steps" if run.max_steps != self.scale.steps else ""
                return f"{plot.short_count(run.start['parameters'])} parameters{steps}"
            if unit == "length":
                return f"{self.scale.lengths[int(paper)][0]:,}"
            if unit == "warmup":
                return f"{self.scale.warmups[int(paper)]:,}"
            return f"{float(paper) * self.scale.lr_factor:.4g}"

        return UNIT.sub(here, text)

    def common_seeds(self, *jobs):
        """The seeds that all of several Jobs have."""
        first, *others = map(self.seeds, jobs)
        return [seed for seed in first if all(seed in seeds for seeds in others)]

    def loss(self, job, seed):
        """Validation loss at the end of a run."""
        return self.run(job, seed).final_loss

    def validation(self, job, seed):
        """(tokens, validation losses) of a run's evaluations."""
        return self.run(job, seed).validation

    def analysis(self, folder):
        """(analysis.json, arrays of analysis.npz) of a folder."""
        if folder not in self.analyses:
            self.analyses[folder] = plot.read_analysis(folder), read_arrays(folder / "analysis.npz")
        return self.analyses[folder]

    def mean(self, folder, key):
        """Means of a quantity over layers or states, from a folder's analysis.json; None in layers without it."""
        numbers, _ = self.analysis(folder)
        part = "states" if key in numbers["states"] else "layers"
        return numbers[part][key]["mean"]

    def by_layer(self, job, seed, key):
        return self.mean(self.folder(job, seed), key)

    def arrays(self, job, seed):
        """The arrays of a run's analysis."""
        return self.analysis(self.folder(job, seed))[1]

    def initial(self, seed):
        """Mean over layers of the entropy before training, which is measured with one seed."""
        if seed != SEEDS[0]:
            raise NoSeed(seed)
        return np.mean(self.mean(self.root / INITIAL, "entropy"))

    def evaluation(self, job, seed, task):
        """The record of a task in a run's eval.json, or None."""
        folder = self.folder(job, seed)
        return plot.read_eval(folder)["results"].get(task) if (folder / "eval.json").exists() else None
