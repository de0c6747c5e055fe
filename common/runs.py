"""The folder of a run: its settings, the metrics that train.py writes and we read again as curves, what eval.py and
analyze.py add, and what is kept of a run where its folder is gone.

No torch here, so that plot.py starts fast. The weights are checkpoint.py's.
"""

import dataclasses
import datetime
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.files import read_record, read_record_lines, reading, record_line, write_text, writing
from common.report import say, some
from configurator import UserError, need

# kinds of records: config.json, each line of metrics.jsonl, eval.json, analysis.json, each line of a file of kept runs
RUN, METRICS, RESULTS = "train.py's settings", "train.py's metrics", "eval.py's results"
ANALYSIS, KEPT = "analyze.py's numbers", "a run's record"


# ---- metrics.jsonl, written


class Metrics:
    """metrics.jsonl of a run, wandb if asked for, and the lines on the screen. Only rank 0 writes.

    done: steps that the checkpoint has. We drop later records: they are from a run that was cut off after it.
    """

    def __init__(self, cfg, world, done):
        self.cfg, self.is_main, self.wandb, self.wandb_id = cfg, world.rank == 0, None, None
        self.path = path = Path(cfg.out_dir, "metrics.jsonl")
        if not self.is_main:
            return
        records = [r for r in read_record_lines(path, METRICS) if r["step"] <= done] if path.exists() else []
        steps = [r["step"] for r in records if "event" not in r]
        # The first record is a start. Its step is that of the checkpoint it went on from, or 0. A new folder has no
        # records, though it may go on from a checkpoint elsewhere.
        is_new = not any(path.parent.glob("step_*.safetensors"))
        first = records[0]["step"] if records else 0
        if steps != list(range(first + 1, done + 1)) and not (is_new and not records):
            remedy = f"copy it again, or continue elsewhere with --resume={path.parent}/step_{done:08d}.safetensors"
            raise UserError(f"{path} lacks steps before {done}, or has some twice; {remedy}")
        write_text(path, "".join(record_line(METRICS, r) for r in records))
        # a resumed run goes on in wandb, too: its records of starts have the id
        self.wandb_id = next((r["wandb"] for r in reversed(records) if r.get("wandb")), None)
        if cfg.log == "wandb":
            wandb, how = need("wandb"), {"name": Path(cfg.out_dir).name, "dir": cfg.out_dir, "resume": "allow"}
            how |= {"project": os.environ.get("WANDB_PROJECT", "nanoresformer"), "config": dataclasses.asdict(cfg)}
            self.wandb = self.tried(lambda: wandb.init(id=self.wandb_id, **how))
            self.wandb_id = self.wandb.id if self.wandb else self.wandb_id

    def tried(self, call):
        """What a call to wandb returns. If it fails we say so and go on without wandb: metrics.jsonl has it all."""
        try:
            return call()
        except Exception as e:  # its server, its login and its own process can fail in many ways
            self.wandb = None
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            self.say(f"note: wandb failed ({why}); the run continues. Try `wandb login` or WANDB_MODE=offline")

    def write(self, record):
        """Append a record. All have "step"; all but steps have "event": "start", "eval" or "diverged"."""
        if self.is_main:
            # not "a", which would begin a new file in a folder that somebody has emptied
            with writing(self.path), open(os.open(self.path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8") as file:
                file.write(record_line(METRICS, record))
        if self.wandb and record.get("event") != "start":
            self.tried(lambda: self.wandb.log(record, step=record["step"]))

    def sync(self):
        """Let all records reach the disk, so that after a power cut they reach as far as the checkpoint saved next."""
        if self.is_main:
            with writing(self.path), open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def say(self, text):
        if self.is_main:
            say(text)

    def step(self, record):
        """Record a step, and say so now and then."""
        self.write(record)
        n = record["step"]
        if n % self.cfg.log_every and n not in (1, self.cfg.max_steps):
            return
        # in fp16 an overflow has no norm, and a device whose peak we do not know has no mfu
        norm = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] else ""
        left = datetime.timedelta(seconds=round((self.cfg.max_steps - n) * record["seconds"]))
        self.say(
            f"step {n}/{self.cfg.max_steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  norm {norm}  "
            f"{record['tokens_per_s']:,.0f} tok/s{mfu}  input {record['input_s'] / record['seconds']:.1%}  left {left}"
        )

    def evaluation(self, step, result):
        """Record an evaluation after `step` steps, and say its means. result: what train.validate returns."""
        self.write({"event": "eval", "step": step, **result})
        means = [f"{key} {result[key]:.4f}" for key in ("val_mean", "val_mixture", "bpb_mean")]
        self.say(f"step {step}  " + "  ".join(means))

    def close(self):
        self.sync()
        if self.wandb:
            self.tried(self.wandb.finish)


# ---- and read


@dataclass(frozen=True)
class Curves:
    """What the metrics.jsonl of a run says. Losses are in nats per token."""

    starts: list  # what train.py knew at each start
    steps: dict  # arrays over training: step, loss, tokens (so far), tokens_per_s
    val: dict  # {step: validation loss, mean over the domains}
    evaluation: dict  # the record of the last one; {} before the first
    final_loss: float | None  # the validation loss at the end, infinite if the run diverged; None before its end

    @property
    def start(self):
        return self.starts[-1]  # a resumed run has several, and the last one's max_steps counts


def read_run(folder):
    """The Curves of a run's folder."""
    path, events = Path(folder, "metrics.jsonl"), {"start": [], "eval": [], "step": [], "diverged": []}
    with reading(path, METRICS):
        for record in read_record_lines(path, METRICS):
            events[record.get("event", "step")].append(record)
        # steps count on evenly from the first start, one by one or, in a run that was kept, in fifties
        steps = [record["step"] for record in events["step"]]
        begin = events["start"][0]["step"] if events["start"] else 0
        by = steps[0] - begin if steps else 1
        if by < 1 or steps != [begin + by * n for n in range(1, 1 + len(steps))]:
            raise ValueError("it lacks steps, or has some twice")
        if not events["start"] and events["step"]:
            raise ValueError("it has no record of a start")
        if len({record["step"] for record in events["eval"]}) < len(events["eval"]):
            raise ValueError("it has the same evaluation twice")
        names, val = ("step", "loss", "tokens", "tokens_per_s"), {r["step"]: r["val_mean"] for r in events["eval"]}
        steps = {name: np.array([record[name] for record in events["step"]], float) for name in names}
        final = val.get(events["start"][-1]["max_steps"]) if val else None
        evaluation = events["eval"][-1] if val else {}
        return Curves(events["start"], steps, val, evaluation, math.inf if events["diverged"] else final)


# ---- what other stages add


def read_results(folder):
    """{checkpoint's file: {mode, step, sha256, env, results {task: record}}} from eval.json; {} without one."""
    path = Path(folder, "eval.json")
    return read_record(path, RESULTS) if path.exists() else {}


def read_analysis(folder):
    """What analyze.py found, from the analysis.json of a folder."""
    path = Path(folder, "analysis.json")
    if not path.exists():
        raise UserError(f"{folder} has no analysis.json; make it: `python analyze.py {folder}`")
    return read_record(path, ANALYSIS)


# ---- runs beside each other


def differences(made, wanted, prefix=""):
    """`name=value instead of value` for each setting that differs, and for each field of a value_mode."""
    what = []
    for name in wanted:
        pair = made.get(name), wanted[name]
        one, two = (dict(enumerate(value)) if isinstance(value, list) else value for value in pair)
        if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            what += differences(one, two, f"{prefix}{name}.")
        elif one != two:
            what.append("{}={:.60} instead of {:.60}".format(f"{prefix}{name}", *map(str, pair)))
    return what


def rounded_otherwise(runs):
    """Yields a sentence on how the machines of these runs {name: Curves} differ, or nothing."""
    made_with = defaultdict(lambda: defaultdict(set))  # {what: {which: names of runs}}
    for name, curves in runs.items():
        for start in curves.starts:  # a resumed run may have several machines
            for what, which in start["rounding"].items():
                made_with[what][which].add(name)
    differ = []
    for what, names in made_with.items():
        if len(names) > 1:
            kinds = (f"{which}: {some(sorted(names[which]))}" for which in names)
            differ.append(f"{what} ({'; '.join(kinds)})")
    if differ:
        yield f"The runs differ in {' and in '.join(differ)}. Rounding alone has moved one of our losses by 0.02."


# ---- what is kept of finished runs


def as_kept(run, folder, settings, environment):
    """What is kept of a finished run, the Curves of a folder, in 4 kB. A training loss is a mean of 50 steps."""
    every = 50
    n = len(run.steps["loss"]) // every * every  # a last mean of fewer steps would be noisier than the others
    losses = run.steps["loss"][:n].reshape(-1, every).mean(axis=1)
    step_tokens = float(run.start["batch_tokens"])
    return {
        "name": Path(folder).name, "commit": environment["commit"], "processor": environment["processor"],
        "settings": settings, "start": run.start, "step_tokens": step_tokens, "every": every,
        "losses": losses.round(5).tolist(),  # of training
        "val": {str(step): loss for step, loss in run.val.items()},  # mean over the domains
        "domains": run.evaluation.get("val", {}),  # the last validation loss of each
        "seconds": round(float(np.sum(step_tokens / run.steps["tokens_per_s"])), 1),  # of training steps
    }  # fmt: skip


def read_kept(path):
    """{name: record} of a file of kept runs; empty if there is none."""
    return {record["name"]: record for record in read_record_lines(path, KEPT)} if Path(path).exists() else {}


def write_kept(path, kept):
    """Write {name: record} as a file, a line for each."""
    write_text(path, "".join(record_line(KEPT, kept[name]) for name in sorted(kept)))
