"""Runs of train.py that are there: what their metrics.jsonl says, whether they are the runs that we want, in what their
machines differ, and what is kept of them where their folders are gone."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from common import checkpoint
from common.checkpoint import RUN
from common.curves import read_run
from common.files import read_record, read_record_lines, record_line, write_text
from common.ranks import code_of_results
from common.report import some
from configurator import UserError

KEPT = "a run's record"  # the kind of record in each line of a file of kept runs


def differences(made, wanted, of=""):
    """`name=value instead of value` for each setting that was made otherwise, and for each field of a value_mode."""
    what = []
    for name in wanted:
        pair = made.get(name), wanted[name]
        one, two = (dict(enumerate(value)) if isinstance(value, list) else value for value in pair)
        if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            what += differences(one, two, f"{of}{name}.")
        elif one != two:
            what.append("{}={:.60} instead of {:.60}".format(f"{of}{name}", *map(str, pair)))
    return what


def made_as(wanted, folder):
    """The Curves of the run in a folder, None if there is none. wanted: what its config.json must have.

    Raises UserError if it is another run: other settings, other data, other code.
    """
    path = Path(folder, "metrics.jsonl")
    if not Path(folder, "config.json").exists():
        # train.py writes it before the first record
        if path.exists() and path.stat().st_size:
            raise UserError(f"{folder} has lost its config.json; remove it, or set another --out_dir")
        return None
    made, found = read_record(Path(folder, "config.json"), RUN), read_run(folder)
    # dtype counts as what auto became, which the records of starts say. Whoever asks for auto takes any
    wanted = {name: value for name, value in wanted.items() if (name, value) != ("dtype", "auto")}
    what = differences(made, {name: value for name, value in wanted.items() if name != "dtype"})  # there it may be auto
    for start in found.starts:  # a run that went on with other settings or other code is of neither
        then = start | {"value_mode": start["definition"], "value_mode_name": start["value_mode"]}
        what += differences(made | then, wanted)
        code = start.get("code", {})
        what += [f"another {name}" for name, digest in code_of_results().items() if code.get(name) != digest]
    if found.final_loss is not None:
        what += other_checkpoints(folder, found)
    if found.starts and found.starts[0]["step"]:
        what.append(f"the first {found.starts[0]['step']} steps of another run")
    if what:
        raise UserError(f"{folder} was made with {what[0]}; remove it, or set another --out_dir")
    return found


def other_checkpoints(folder, run):
    """Yields each way in which the last checkpoint of a finished run disagrees with its Curves."""
    files = checkpoint.steps(folder)
    if not files:  # they may be deleted: the losses are all there
        return
    step = max(files)
    try:
        header = checkpoint.read_header(files[step])
    except UserError:
        if files[step].exists():  # else the run that writes them has just replaced it
            raise
        return
    if header["mode"] != run.start["value_mode"]:
        yield f"{files[step].name} of {header['mode']}, and records of {run.start['value_mode']}"
    if step > max(run.steps["step"], default=0):
        yield f"{files[step].name}, whose steps its metrics.jsonl lacks"
    if header["val_loss"] not in (None, run.val.get(step)):
        yield f"{files[step].name}, whose validation loss is not that of the records"


def rounded_otherwise(runs):
    """Yields a sentence, or nothing: in what the machines of these runs {name: Curves} differ."""
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
        yield f"The runs differ in {' and in '.join(differ)}. Rounding alone has moved a loss of ours by 0.02."


# -- what is kept of finished runs


def as_kept(run, folder, settings, environment, every=50):
    """What is kept of a finished run, the Curves of a folder, in 4 kB. A training loss is a mean of `every` steps."""
    n = len(run.steps["loss"]) // every * every  # a last mean of fewer steps would be noisier than the others
    losses = run.steps["loss"][:n].reshape(-1, every).mean(axis=1)
    step_tokens = float(run.steps["tokens"][-1] / run.steps["step"][-1])
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
