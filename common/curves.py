"""The curves of a run, from its metrics.jsonl. No torch here: plot.py imports this file."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.files import read_record_lines, reading
from common.report import METRICS


@dataclass(frozen=True)
class Curves:
    """What the metrics.jsonl of a run says. Losses are in nats per token."""

    starts: list  # what train.py knew at each start
    steps: dict  # arrays over training: step, loss, tokens (so far), tokens_per_s
    val: dict  # {step: validation loss, mean over the domains}
    evaluation: dict  # the record of the last one, {} before it
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
            raise ValueError("it has an evaluation twice")
        names, val = ("step", "loss", "tokens", "tokens_per_s"), {r["step"]: r["val_mean"] for r in events["eval"]}
        steps = {name: np.array([record[name] for record in events["step"]], float) for name in names}
        final = val.get(events["start"][-1]["max_steps"]) if val else None
        evaluation = events["eval"][-1] if val else {}
        return Curves(events["start"], steps, val, evaluation, math.inf if events["diverged"] else final)
