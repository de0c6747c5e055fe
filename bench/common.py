"""What all benchmarks share: turns, ratios, tables, and the file of results. Read next: training.py."""

import contextlib
import statistics
import sys
from importlib import metadata

import torch

from oldconfig import UserError, first_line
from oldfiles import write_json
from report import markdown
from runtime import clock, environment


def timed(function, device):
    """(seconds that a function takes, what it returns)."""
    start = clock(device)
    result = function()
    return clock(device) - start, result


def order_of_round(sides, n):
    """The keys of `sides` in an order that turns around from round to round. torch.utils.benchmark cannot alternate."""
    return list(sides) if n % 2 == 0 else list(reversed(sides))


@contextlib.contextmanager
def failure_in(row):
    """Turns what goes wrong on one side, in a compiler or for want of memory, into a field of its row."""
    try:
        yield
    except UserError:  # of what was asked for, such as a package that is not installed
        raise
    except Exception as e:
        row["error"] = f"{type(e).__name__}: {first_line(e)}"
        print(f"{row['name']}: {row['error']}", file=sys.stderr, flush=True)


def product_flops(device, dtype):
    """FLOP/s of a large matrix product: what this GPU gives at most, beside what its maker says. None on a CPU."""
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device).to(dtype)
    _ = a @ a
    took = [timed(lambda: a @ a, device)[0] for _ in range(10)]
    return 2 * len(a) ** 3 / statistics.median(took)


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


def measured(what, cases, table, out_file, **about):
    """Run cases, functions of keep that return rows, and print a table of all rows. They are written to out_file with
    commit, versions and command, whenever a case calls keep(rows)."""
    path, done = out_file or f"results/bench_{what}.json", []
    with contextlib.suppress(metadata.PackageNotFoundError):
        about["transformers"] = metadata.version("transformers")

    def keep(rows):
        write_json(path, {"what": what, **environment(), **about, "rows": [*done, *rows]})

    for case in cases:
        done += case(keep)
    keep([])
    print(f"{table(done)}\nwrote {path}")
