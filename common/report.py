"""What every stage shows: numbers with their errors, Markdown tables, progress, and the metrics of a training run.

No torch and no numpy here: prepare.py's worker processes and plot.py import this file.
"""

import contextlib
import dataclasses
import datetime
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

from common.files import read_record_lines, record_line, write_text, writing
from configurator import UserError, need

METRICS = "train.py's metrics"  # the kind of record in each line of metrics.jsonl


def plus_minus(value, error=None, digits=4, sign=False):
    """`0.1234 ± 0.0056`; without an error the value alone, "-" if there is none. sign: show a plus, for differences."""
    if value is None:
        return "-"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def with_interval(mean, interval=None, sign=False):
    """`-0.069 ± 0.011`: a mean and the half width of its interval, to the interval's second significant digit and at
    most six decimals. Without an interval the mean has four decimals, as in `plus_minus`."""
    digits = min(max(1 - math.floor(math.log10(interval)), 0), 6) if interval else 4
    return plus_minus(mean, interval, digits, sign)


def mean_error(values):
    """The mean of a numpy array, and its standard error from the sample's deviation (n - 1); None of a single value."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def side_by_side(labels, values, averaged=()):
    """Rows of a table: mean ± standard error of each column, then the mean over the columns `averaged`, if there are
    any. A row for each label, then their differences from the first, paired by document.

    values: for each label {column: array with a number for each document}. A loss is an array of one number.
    """
    first = values[0]
    named = list(zip(labels, values, strict=True))
    for label, of in named[1:]:
        named.append((f"{label} − {labels[0]}", {column: of[column] - first[column] for column in first}))
    rows = []
    for i, (label, of) in enumerate(named):
        pairs = {column: mean_error(of[column]) for column in first}
        if averaged:
            means, errors = zip(*(pairs[column] for column in averaged), strict=True)
            error = None if None in errors else math.hypot(*errors) / len(errors)
            pairs["Avg"] = math.fsum(means) / len(means), error
        rows.append([label, *(plus_minus(*pair, sign=i >= len(labels)) for pair in pairs.values())])
    return rows


def markdown(header, rows, left=1):
    """A Markdown table as text. Its first `left` columns are aligned to the left, the others, numbers, to the right."""
    # names come from outside: a bar would end their cell, a line break their row
    header, *rows = [[" ".join(str(cell).replace("|", r"\|").splitlines()) for cell in row] for row in (header, *rows)]
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(rule) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def compact(table):
    """A Markdown table without the spaces around its pipes."""
    return re.sub(r" *\| *", "|", table)


def some(names):
    """The first of some names, and how many others there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def progress(name, total, unit, show=True):
    """A tqdm bar over `total` units, with update(n) and close(). Off a terminal it prints a line every ten seconds."""
    from tqdm import tqdm  # here, because prepare.py's workers show nothing

    show = show and sys.stderr is not None  # a service may have none
    interval = 0.1 if show and sys.stderr.isatty() else 10
    look = {"desc": name, "unit": unit, "unit_scale": True, "leave": False, "disable": not show}
    return tqdm(total=total, mininterval=interval, delay=interval, **look)


def say(text):
    """Print a line. If the terminal, or `| tee`, is gone, the work goes on without, because files have all numbers."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def heard(what):
    """For a first Ctrl-C: say that it was heard, and take no second one within a second, because impatient fingers, and
    programs like uv, send it twice. After that Ctrl-C raises KeyboardInterrupt again."""
    began = time.monotonic()

    def again(number, frame):
        if time.monotonic() - began > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, again)
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks hear it
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{what}\n".encode())  # no print, in which the signal may have come


class Metrics:
    """metrics.jsonl of a run, wandb if asked for, and the lines on the screen. Only rank 0 writes.

    done: steps that the checkpoint has. We drop later records: they are of a run that was cut off after it.
    """

    def __init__(self, cfg, world, done):
        self.cfg, self.is_main, self.wandb, self.wandb_id = cfg, world.rank == 0, None, None
        self.path = path = Path(cfg.out_dir, "metrics.jsonl")
        if not self.is_main:
            return
        records = [r for r in read_record_lines(path, METRICS) if r["step"] <= done] if path.exists() else []
        steps = [r["step"] for r in records if "event" not in r]
        # The first record is of a start, after as many steps as the checkpoint had that it went on from. A new folder
        # has none, though it may go on from a checkpoint elsewhere.
        is_new = not any(path.parent.glob("step_*.safetensors"))
        first = records[0]["step"] if records else 0
        if steps != list(range(first + 1, done + 1)) and not (is_new and not records):
            remedy = f"copy it again, or go on in another folder by --resume={path.parent}/step_{done:08d}.safetensors"
            raise UserError(f"{path} lacks steps before {done}, or has some twice; {remedy}")
        write_text(path, "".join(record_line(METRICS, r) for r in records))
        # a resumed run goes on in wandb, too: its records of starts know under which id
        self.wandb_id = next((r["wandb"] for r in reversed(records) if r.get("wandb")), None)
        if cfg.log == "wandb":
            wandb, how = need("wandb"), {"name": Path(cfg.out_dir).name, "dir": cfg.out_dir, "resume": "allow"}
            how |= {"project": os.environ.get("WANDB_PROJECT", "nanoresformer"), "config": dataclasses.asdict(cfg)}
            self.wandb = self.tried(lambda: wandb.init(id=self.wandb_id, **how))
            self.wandb_id = self.wandb.id if self.wandb else self.wandb_id

    def tried(self, call):
        """What a call of wandb returns. If it fails we say so and go on without, because metrics.jsonl has it all."""
        try:
            return call()
        except Exception as e:  # its server, its login and its own process can fail in many ways
            self.wandb = None
            why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            self.say(f"note: wandb failed ({why}); the run goes on without it. See `wandb login`, WANDB_MODE=offline")

    def write(self, record):
        """Append a record. All have "step"; those of evaluations and starts also have "event": "eval" or "start"."""
        if self.is_main:
            # not "a", which would begin a new file in a folder that somebody has removed
            with writing(self.path), open(os.open(self.path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8") as file:
                file.write(record_line(METRICS, record))
        if self.wandb and record.get("event") != "start":
            self.tried(lambda: self.wandb.log(record, step=record["step"]))

    def sync(self):
        """Let all records reach the disk, so that a power cut leaves none behind the checkpoint that is saved next."""
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
