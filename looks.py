"""The looks of all figures: one colour, dash and marker for each value mode, and the page that is drawn on.

plot.py draws a user's runs with these, paper/ the paper's figures, bench/ measurements. Read next: plot.py.
"""

import contextlib
import re
import zlib

from configurator import need
from files import write_atomic
from value_modes import TABLE

# Okabe and Ito's colours, which colour-blind readers tell apart, without yellow, which is lost on white.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GAPS = (None, (6, 3), (8, 2.5, 1.5, 2.5), (1.5, 1.5), (14, 3), (8, 2, 1.5, 2, 1.5, 2))
DASHES = [(0, gaps) for gaps in GAPS]
MARKERS = "os^Dv"
HEADLINE = ("vanilla", "resformer", "svformer", "neutreno", "denseformer", "resformer_neutreno", "cross")
NEXT = (*HEADLINE, "identity", "gqa2")  # early, so that modes of one figure of the paper differ in colour
ORDER = [*NEXT, *(name for name in TABLE if name not in NEXT)]  # in which modes get their looks
LOOK = {
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "lines.markeredgewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def family(mode):
    """The row of the table that a mode belongs to: neutreno for neutreno_0.6."""
    base, _, weight = mode.rpartition("_")
    is_number = weight.replace(".", "", 1).isdigit()
    return base if is_number and base in TABLE and mode not in TABLE else mode


def style_of(mode):
    """Colour, dash and marker of a mode's line, the same in every figure: keywords of matplotlib's `plot`.

    Black is the baseline's alone. A mode that the table does not have gets a look by its name.
    """
    name = family(mode)
    place = ORDER.index(name) if name in ORDER else len(ORDER) + zlib.crc32(name.encode()) % 180
    if place == 0:
        color, dash = COLORS[0], DASHES[0]
    else:
        turn, i = divmod(place - 1, len(COLORS) - 1)  # each turn through the colours shifts them against the dashes
        color, dash = COLORS[1 + (i + turn) % (len(COLORS) - 1)], DASHES[(1 + i) % len(DASHES)]
    return {"color": color, "linestyle": dash, "marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none"}


def lighten(color, share):
    """A colour "#rrggbb" mixed with that share of white."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + share * (255 - c)):02X}" for c in channels)


def styles_of(modes):
    """{label: mode} -> {label: style}. Several lines of one mode keep its colour, from light to full, and differ in
    dash and marker."""
    styles = {}
    for label, mode in modes.items():
        same = [other for other in modes if family(modes[other]) == family(mode)]
        styles[label] = style_of(mode)
        if len(same) > 1:
            i = same.index(label)
            styles[label]["color"] = lighten(style_of(mode)["color"], 0.6 * (1 - i / (len(same) - 1)))
            styles[label]["linestyle"] = DASHES[i % len(DASHES)]
            styles[label]["marker"] = MARKERS[i % len(MARKERS)]
    return styles


@contextlib.contextmanager
def page(path, size):
    """An empty matplotlib figure of `size` inches to draw on, written as a PNG at the end.

    The same lines give the same bytes: no date, no version, nothing from the user's matplotlibrc.
    """
    style, figure = need("matplotlib.style"), need("matplotlib.figure")
    with style.context(["default", LOOK]):
        paper = figure.Figure(figsize=size, dpi=150, layout="constrained")
        yield paper
        write_atomic(path, lambda temporary: paper.savefig(temporary, format="png", metadata={"Software": None}))
    print(f"wrote {path}")


def legend(ax):
    """The legend of `ax`, above it, where it hides nothing. The title at the left becomes the legend's, with the seeds
    if they are the same for all lines."""
    handles, labels = ax.get_legend_handles_labels()
    title = ax.get_title(loc="left")
    seeds = {found[0] for found in (re.search(r", (1 seed|\d+ seeds.*)$", label) for label in labels) if found}
    if len(seeds) == 1:
        (suffix,) = seeds
        labels = [label.removesuffix(suffix) for label in labels]
        title = (title + suffix).removeprefix(", ")
    longest = max(map(len, labels), default=0)
    columns = 2 if longest <= 24 and len(labels) > 2 else 1
    look = {"handlelength": 3.2, "fontsize": 7, "labelspacing": 0.3, "columnspacing": 1.2, "borderaxespad": 0.2}
    look |= {"title": title, "title_fontsize": 9, "alignment": "left"}
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **look)
    ax.set_title("", loc="left")


def short_count(n):
    """A number of parameters or tokens in three digits: 738k, 2.95M, 468M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= 0.9995 * unit:
            return f"{n / unit:.3g}{name}"
    return f"{n:,.0f}"


def count_range(numbers, text=short_count):
    """The numbers' common value, or their range: 738k, 706k–738k."""
    low, high = text(min(numbers)), text(max(numbers))
    return low if low == high else f"{low}–{high}"
