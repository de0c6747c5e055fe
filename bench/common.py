"""What all benchmarks share: turns, ratios, tables, and the file of results. Read next: training.py."""

import re
import statistics
from importlib import metadata

import torch

from files import write_json
from report import markdown
from runtime import clock, environment, processor_name

PEER_PACKAGES = ("transformers", "lm-eval")


def timed(function, device):
    """(seconds that a function takes, what it returns)."""
    start = clock(device)
    result = function()
    return clock(device) - start, result


def in_turn(sides, rounds, device):
    """Call each function of sides = {key: function} once a round, in an order that turns around from round to round.
    Returns {key: seconds of each round}, {key: result of each round}. torch.utils.benchmark cannot alternate."""
    seconds = {key: [] for key in sides}
    results = {key: [] for key in sides}
    order = list(sides)
    for _ in range(rounds):
        for key in order:
            took, result = timed(sides[key], device)
            seconds[key].append(took)
            results[key].append(result)
        order.reverse()
    return seconds, results


def ratio(seconds, side, other):
    """How many times as fast `side` is as `other`: median, least and greatest of the rounds."""
    ratios = [b / a for a, b in zip(seconds[side], seconds[other], strict=True)]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def spread(found):
    """A ratio as text: its median (least–greatest)."""
    return f"{found['ratio']:.2f} ({found['least']:.2f}–{found['greatest']:.2f})"


def lines_table(lines, left=1):
    """Markdown of lines = [{column: cell}]. A cell that a line lacks is empty."""
    header = list(dict.fromkeys(column for line in lines for column in line))
    return markdown(header, [[line.get(column, "") for column in header] for line in lines], left)


def machine_name(device):
    """What computes here, for a file's name: the GPU, or the processor and the number of threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{processor_name()} x{torch.get_num_threads()}"
    name = re.sub(r"\((R|TM)\)|CPU|Processor", "", name)
    return re.sub(r"\W+", "_", name).strip("_").lower()


def write_results(what, result, device, out_file=""):
    """Write {what, machine, versions, command, …, result's own keys} to out_file, or to the file that is named after
    what was measured and the machine."""
    path = out_file or f"results/bench_{what}_{machine_name(device)}.json"
    versions = {}
    for package in PEER_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    write_json(path, {"what": what, **environment(), **versions, **result})
    print(f"wrote {path}")
