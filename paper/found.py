"""What finished runs have left, by Job and seed: in their folders, or as records in results/<scale>/runs.jsonl.

A record has what most figures need of a run, in 4 kB: settings, losses, learned weights, the means of its
analysis. Where the folders are gone, records alone are enough to draw most figures and to continue a campaign. A record
stays valid when model.py changes; `commit` says which code made the run. Read next: claims.py.
"""

import json
from pathlib import Path

import numpy as np

import plot
from oldconfig import UserError
from oldfiles import read_json, read_records, write_text
from paper.runs import SEEDS, UNIT, UNITS, Job, train_settings

INITIAL = "init-468M"  # folder of the analysis of a model before training
RECORD = {
    "name": str,  # of the run's folder
    "commit": str | None,
    "processor": str | None,  # None = not known
    "settings": {},
    "start": plot.START,
    "step_tokens": float,
    "every": int,  # number of steps that each of the losses is the mean of
    "losses": tuple[float, ...],  # of training
    "val": dict[str, float],  # step -> validation loss, mean over the domains
    "domains": dict[str, float],  # the last validation loss of each
    "seconds": float | None,  # of the training steps; None = not known
}


def is_compared(name):
    """Whether a setting of train.py changes more than rounding."""
    from train import MAY_DIFFER  # it imports torch

    return name not in MAY_DIFFER


def means(values, every):
    """Means of `every` values at a time, in their order. Values that are left over at the end do not count."""
    n = len(values) // every * every
    return np.array(values[:n]).reshape(-1, every).mean(axis=1)


def settings_of(folder):
    """{setting: value} of a run as it was last started, and "data", the hash of its data."""
    config = read_json(folder / "config.json", "settings of train.py")
    config["value_mode"] = config.get("value_mode_name")  # the file has the mode's fields under value_mode
    return config


def difference(made, asked):
    """`name=value instead of value` of the first setting that a run was not made with as `asked`, or ""."""
    for name, value in asked.items():
        if is_compared(name) and made.get(name) != value:
            return f"{name}={made.get(name)} instead of {value}"
    return ""


def check_settings(folder, made, asked):
    """Raise UserError if the run in a folder was made with other settings or data than are `asked` for."""
    wrong = difference(made, asked)
    if wrong:
        raise UserError(f"{folder} has {wrong}; remove it, or set another --out_dir")


def fresh_analysis(folder):
    """What analyze.py found of a run's last weights. None if it is missing, or if the weights that are there are
    others."""
    path = folder / "analysis.json"
    if not path.exists():
        return None
    analysis = plot.read_analysis(folder)
    weights = sorted(file for file in folder.glob("step_*.safetensors") if not file.stem.endswith(".state"))
    if not weights:  # they were removed since
        return analysis
    is_older = path.stat().st_mtime < weights[-1].stat().st_mtime
    return None if is_older or weights[-1].name != analysis["checkpoint"] else analysis


def make_record(folder, asked, every):
    """The record of a finished run, with the settings that are `asked` and matter. asked: {setting: value}, and "data",
    the hash of the data. Raises UserError if the run is missing, unfinished, or made with others."""
    run = plot.read_run(folder) if (folder / "metrics.jsonl").exists() else None
    if not run or not run.finished:
        raise UserError(f"{folder} is missing or not finished; leave out --run=false, or see its train.log")
    made = settings_of(folder)
    check_settings(folder, made | {"data": run.start["data"]}, asked)
    path = folder / "env.json"
    environment = read_json(path, "of train.py") if path.exists() else {}
    record = {
        "name": folder.name,
        "commit": environment.get("commit"),
        "processor": environment.get("processor"),
        "settings": {name: made[name] for name in asked if name != "data" and is_compared(name)},
        "start": {name: run.start[name] for name in plot.START},
        "step_tokens": run.step_tokens,
        "every": every,
        "losses": means(run.steps["loss"], every).round(5).tolist(),
        "val": {str(step): loss for step, loss in run.val.items()},
        "domains": run.domains,
        "seconds": round(float(np.sum(run.step_tokens / run.steps["tokens_per_s"])), 1),
    }
    last = [line for line in read_records(folder / "metrics.jsonl") if line.get("event") == "eval"][-1]
    if last.get("lam"):
        record["lam"] = last["lam"]  # the learned weights of residuals, see GPT.mixing_weights
    analysis = fresh_analysis(folder)
    if analysis is not None:
        record["analysis"] = analysis
    return record


def made_with(record):
    """What a kept run was made with, as `difference` compares it: settings, data, and the steps of a mean."""
    return record["settings"] | {"every": record["every"], "data": record["start"]["data"]}


def curves_of(record):
    """The plot.Curves of a record. Each mean stands at its last step."""
    start, losses = record["start"], np.array(record["losses"], float)
    step = record["every"] * np.arange(1.0, 1 + len(losses))
    steps = {"step": step, "loss": losses, "tokens": step * record["step_tokens"]}
    val = {int(step): loss for step, loss in record["val"].items()}
    return plot.Curves(record["name"], start, steps, val, record["domains"])


def read_kept(path):
    """{name: record} of a file of records; empty if there is no such file. Raises UserError if it is damaged."""
    if not Path(path).exists():
        return {}
    if Path(path).read_bytes()[-1:] not in (b"", b"\n"):  # read_records would leave out the unfinished line
        raise UserError(f"{path} ends within a line; take it from where it is whole, such as git")
    return {record["name"]: record for record in read_records(path, RECORD)}


def write_kept(path, kept):
    """Write {name: record} as a file, a line for each."""
    lines = [json.dumps(kept[name], separators=(",", ":"), allow_nan=False) + "\n" for name in sorted(kept)]
    write_text(path, "".join(lines))


def means_of(analysis, key):
    """Means of a quantity in an analysis, by layer or state; None in layers without it. key "value_norm" or
    "hidden_norm": the first token's norm relative to other tokens."""
    if key in ("value_norm", "hidden_norm"):
        first, rest = (np.array(means_of(analysis, f"{key}_{part}"), float) for part in ("first", "rest"))
        return (first / rest).tolist()
    part = "states" if key in analysis["states"] else "layers"
    return analysis[part][key]["mean"]


def read_arrays(path):
    """{name: array} of an .npz file; raises UserError if it is missing or damaged."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except Exception as e:  # zipfile and zlib raise many kinds
        raise UserError(f"{path} is missing or damaged ({e}); make it again with analyze.py") from None


class NoSeed(Exception):
    """There is no number with that seed."""


class Found:
    """What the runs of a scale have left, read when it is asked for. root: folder of the runs; seeds: function Job ->
    its seeds; public: folders of analyses of public models; kept: {name: record}, which are looked up before folders.
    """

    def __init__(self, root, scale, seeds, public=(), kept=None):
        self.root, self.scale, self.seeds, self.public = Path(root), scale, seeds, public
        self.kept = kept or {}
        self.records = {}  # what has been read, by folder
        self.data = None  # hash of the data, which is the same for all of them

    def folder(self, job, seed):
        name = self.scale.here(job).name
        if seed not in self.seeds(job):
            raise NoSeed(f"{name} has no seed {seed}")
        return self.root / f"{name}-{seed}"

    def record(self, job, seed):
        """The record of a run. Raises UserError if there is no run, or only one that is not finished or of other
        settings or data."""
        folder = self.folder(job, seed)
        if folder not in self.records:
            asked = train_settings(job, self.scale, seed, folder)
            if self.data:
                asked["data"] = self.data
            self.records[folder] = self.find(folder, asked)
            self.data = self.records[folder]["start"]["data"]
        return self.records[folder]

    def find(self, folder, asked):
        """The kept record of a run if it has the settings that are asked for, else a record of its folder."""
        kept = self.kept.get(folder.name)
        if kept is not None:
            wrong = difference(made_with(kept), asked | {"every": self.scale.every})
            if not wrong:
                return kept
            if not folder.exists():
                raise UserError(f"the record of {folder.name} has {wrong}; leave out --run=false to make the run again")
        return make_record(folder, asked, self.scale.every)

    def run(self, job, seed):
        """The plot.Curves of a run; raises UserError as `record` does."""
        return curves_of(self.record(job, seed))

    def run_with_losses(self, job, seed):
        """The same with its training losses; raises UserError if only its validation loss was kept."""
        run = self.run(job, seed)
        if not len(run.steps["loss"]):
            raise UserError(f"the record of {run.name} has no training losses; leave out --run=false to make them")
        return run

    def parameters(self, job):
        return self.run(job, self.seeds(job)[0]).start["parameters"]

    def unit(self, name, job):
        """A Job's length, size, rate or warmup, as it is at this scale, in words."""
        if name == "length":
            return f"{self.scale.lengths[job.length][0]:,}"
        if name == "size":
            return plot.short_count(self.parameters(job))
        if name == "warmup":
            return f"{self.scale.warmups[job.warmup]:,}"
        return f"{self.scale.here(job).lr * self.scale.lr_factor:.4g}"

    def labels(self, lines):
        """[(label, Job)] of the lines that the scale has; {length}, {size}, {rate} and {warmup} become what they are
        here."""
        there = []
        for label, job in lines:
            if self.scale.has(job):
                units = {name: self.unit(name, job) for name in UNITS}
                there.append((label.format(**units), job))
        return there

    def rate_in_words(self, job):
        """ ", rate 0.006" if a Job's rate is not that of its baseline, else nothing."""
        rate, other = self.unit("rate", job), self.unit("rate", job.baseline)
        return "" if rate == other else f", rate {rate}"

    def in_words(self, text):
        """Text in which [size 468M], [length 64000], [rate 1e-4] and [warmup 1200] become what they are here. A size
        becomes vanilla's parameters; how the inspected model differs is added."""

        def replacement(match):
            name, value = match.groups()
            field, kind = UNITS[name]
            job = Job(**{field: kind(value)})
            words = self.unit(name, job)
            if name == "size":
                words += " parameters"
                change = self.scale.change_in_words(job)
                if change:
                    words += f", {change}"
            return words

        return UNIT.sub(replacement, text)

    def common_seeds(self, *jobs):
        """The seeds that all of several Jobs have."""
        first, *others = map(self.seeds, jobs)
        return [seed for seed in first if all(seed in seeds for seeds in others)]

    def loss(self, job, seed):
        """Validation loss at the end of a run."""
        run = self.run(job, seed)
        return run.val[run.max_steps]

    def losses(self, job):
        """The same with each of its seeds."""
        return [self.loss(job, seed) for seed in self.seeds(job)]

    def analysis(self, job, seed):
        """What analyze.py found of a run: the content of its analysis.json."""
        folder, record = self.folder(job, seed), self.record(job, seed)
        if "analysis" not in record:
            raise UserError(f"{folder} has no analysis.json of its last weights; make it: `python analyze.py {folder}`")
        return record["analysis"]

    def by_layer(self, job, seed, key):
        """See `means_of`."""
        return means_of(self.analysis(job, seed), key)

    def arrays(self, job, seed):
        """The arrays of a run's analysis, which records do not have."""
        return read_arrays(self.folder(job, seed) / "analysis.npz")

    def initial(self, seed):
        """Mean over layers of the entropy before training, which is measured with one seed."""
        if seed != SEEDS[0]:
            raise NoSeed(seed)
        return np.mean(means_of(plot.read_analysis(self.root / INITIAL), "entropy"))

    def evaluation(self, job, seed, task):
        """The record of a task in a run's eval.json, or None."""
        folder = self.folder(job, seed)
        return plot.read_eval(folder)["results"].get(task) if (folder / "eval.json").exists() else None
