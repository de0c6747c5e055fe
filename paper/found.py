"""What finished runs have left in their folders: losses, analyses, scores; and the paper's units in this scale's words.

Read next: claims.py.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

import plot
from common.checkpoint import checked_run
from common.files import reading
from common.runs import read_analysis, read_results
from configurator import UserError
from paper.scales import LABELS, Job
from train import MAY_DIFFER


def finished(settings):
    """The Curves of the run with these settings of train.py, None before its end; its final loss is infinite if it
    diverged. UserError if its folder has another run. Settings that change no result may differ."""
    wanted = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
    wanted["value_mode_name"] = wanted.pop("value_mode")
    run = checked_run(wanted, settings["out_dir"])
    return None if run is None or run.final_loss is None else run


def scores(folder):
    """{task: what eval.py found of it} of the last checkpoint in a run's folder; empty if nothing is scored."""
    checkpoints = read_results(folder).values()
    return max(checkpoints, key=lambda checkpoint: checkpoint["step"], default={"results": {}})["results"]


class Found:
    """The finished runs of a scale, by Job and seed.

    runs: {name: Curves}; seeds: those of every Job; root: folder of the runs; errors: {name: why a run is missing};
    public: {name of a public model: folder of its analysis}.
    """

    def __init__(self, runs, scale, seeds, root="", errors=None, public=None):
        self.runs, self.scale, self.seeds = runs, scale, seeds
        self.root, self.errors, self.public = Path(root), errors or {}, public or {}

    def name(self, job, seed):
        return f"{self.scale.name(job)}-{seed}"

    def run(self, job, seed):
        name = self.name(job, seed)
        if name not in self.runs:
            raise self.errors.get(name) or UserError(f"there is no run {name}")
        return self.runs[name]

    def parameters(self, job):
        return self.run(job, self.seeds[0]).start["parameters"]

    # losses, in nats per token

    def validation(self, job, seed):
        """(tokens, validation losses) of a run's evaluations."""
        run = self.run(job, seed)
        tokens = dict(zip(run.steps["step"], run.steps["tokens"], strict=True))
        return [tokens[step] for step in run.val], list(run.val.values())

    def final_loss(self, job, seed):
        """The validation loss at the end of a run."""
        return self.run(job, seed).final_loss

    def final_losses(self, job):
        return [self.final_loss(job, seed) for seed in self.seeds]

    def domains(self, job, seed):
        """{domain: validation loss at the end}"""
        return self.run(job, seed).evaluation["val"]

    # what analyze.py and eval.py found

    def analysis(self, job, seed):
        return read_analysis(self.root / self.name(job, seed))

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
        """{name: array} of a run's analysis."""
        path = self.root / self.name(job, seed) / "analysis.npz"
        with reading(path, "what analyze.py writes"), np.load(path) as arrays:
            return dict(arrays)

    def evaluation(self, job, seed, task):
        """What eval.py found of a run on a task, or None."""
        return scores(self.root / self.name(job, seed)).get(task)

    # the paper's units in words, as they are here

    def in_words(self, text, job):
        """A text whose {0.mode}, {0.rate}, {0.size}, {0.length} and {0.warmup} become a Job's."""
        here = SimpleNamespace(mode=LABELS.get(job.mode, job.mode), rate=f"{self.scale.rate(job):.4g}")
        here.size = plot.short_count(self.parameters(job))
        here.length, here.warmup = f"{self.scale.lengths[job.length][0]:,}", f"{self.scale.warmups[job.warmup]:,}"
        return text.format(here)

    def labels(self, lines):
        """[(label in words, Job)] of lines."""
        return [(self.in_words(label, job), job) for label, job in lines]

    def names_of(self, a, b):
        """Two Jobs as `resformer − vanilla 5.07M`; how both differ from the base is said once. b may be None."""
        base, differs = Job(), {}
        words = {"length": "length {0.length}", "lr": "rate {0.rate}", "warmup": "{0.warmup} warmup steps"}
        for job in filter(None, (a, b)):
            parts = ["{0.size}"] * (job.size != base.size)
            parts += [words[name] for name in words if getattr(job, name) != getattr(base, name)]
            parts += [job.arch] * (job.arch != base.arch) + ["before training"] * (not job.is_trained)
            differs[job] = self.in_words(" ".join(parts), job.baseline if job.size != base.size else job)
        if len(set(differs.values())) == 1:
            return f"{' − '.join(job.mode for job in differs)} {differs[a]}".strip()
        return " − ".join(f"{job.mode} {differs[job]}".strip() for job in differs)
