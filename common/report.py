"""What every stage shows: numbers with their errors, Markdown tables, progress.

No torch and no numpy here: prepare.py's worker processes and plot.py import this file.
"""

import contextlib
import math
import os
import re
import signal
import sys
import time


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
    """The mean of a numpy array, and its standard error from the sample's deviation (n - 1); None for one value."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def side_by_side(labels, values, averaged=()):
    """Rows of a table: mean ± standard error of each column, then the mean over the columns `averaged`, if there are
    any. A row for each label, then their differences from the first, paired by document.

    values: for each label {column: array with a number for each document}. A loss is an array of one number.
    """
    first = values[0]
    named = list(zip(labels, values, strict=True))
    for label, numbers in named[1:]:
        named.append((f"{label} − {labels[0]}", {column: numbers[column] - first[column] for column in first}))
    rows = []
    for i, (label, numbers) in enumerate(named):
        pairs = {column: mean_error(numbers[column]) for column in first}
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
    """Print a line. If the terminal, or `| tee`, is gone, work goes on without it: the files have all the numbers."""
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
            os.write(2, f"\n{what}\n".encode())  # not print, which the signal may have interrupted
