"""The plan of a mode as a picture: which layer reads what from which earlier layer, and what the KV cache stores.

`lines_of` says what to draw, as data. `draw` draws it, layer 0 at the bottom, for `python plot.py plan`.
"""

import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass

from configurator import need
from value_modes import beside_the_plan, equation_of, kv_floats_per_token, plan_layers, stored_tensors


@dataclass(eq=False)
class Line:
    """A line from the boxes `of` in `sources`, layers or token tables, to `readers`. A reader takes what lies below it.

    of: "q", "k", "v", "attention", or "input", what enters a layer. place: where it arrives, as in Residual.place, or
    "instead" of the reader's own tensor. readers: {layer: its weights (own, source), as text}. is_used: see
    Residual.from_used. word: "learned" or "gate".
    """

    of: str
    place: str
    sources: tuple[int | str, ...]
    readers: dict[int, tuple[str, str]]
    is_used: bool = False
    word: str = ""


def lines_of(cfg):
    """The Lines of a ModelConfig: what layers borrow, then what they mix in, then DenseFormer's averages."""
    mode, plan, lines = cfg.value_mode, plan_layers(cfg), []
    for t in ("q", "k", "v"):
        borrowers = defaultdict(dict)
        for n, layer in enumerate(plan):
            takes_heads = t == "v" and n and mode.heads_from_layer_0
            if takes_heads or layer.owner[t] != n:
                borrowers[0 if takes_heads else layer.owner[t]][n] = ("", "")
        lines += [Line(t, "instead", (owner,), readers, is_used=True) for owner, readers in borrowers.items()]

    # readers of the same sources share a line, and so do readers of all layers below: n² arrows would hide everything
    for index, r in enumerate(mode.residuals):
        mixes = {n: m for n, layer in enumerate(plan) for m in layer.mixes if m.index == index}
        groups = defaultdict(dict)
        for n, mix in mixes.items():
            prime = "′" if r.subtract == "mixed" and is_mixed(plan[n], "v") else ""
            groups["all" if r.source == "all" else mix.sources][n] = weights_as_text(mix, n, prime)
        boxes = {"hidden": ["input"], "scores": ["attention"], "probs": ["attention"]}.get(r.of, r.reads)
        word = "" if r.learn == "fixed" else "learned"
        word = "gate" if r.is_gated else word
        for readers in groups.values():
            sources = mixes[max(readers)].sources
            lines += [Line(box, r.place, sources, readers, r.from_used, word) for box in boxes]

    if mode.dense:  # layers.DepthAverage: H_n of X_j, j ≡ n (mod dilation), is what layer n reads, or the head if last
        dilation, period = mode.dense
        groups = defaultdict(dict)
        for n in range(period, cfg.n_layer + 1, period):
            groups[n % dilation][n] = ("", "")
        for j, readers in groups.items():
            lines.append(Line("input", "input", tuple(range(j, max(readers), dilation)), readers, word="learned"))
    return lines


def is_mixed(layer, t):
    """Whether a layer mixes its keys or values before the softmax, so that V′ is not V."""
    return any(mix.residual.of == t and mix.residual.place == "before" for mix in layer.mixes)


def weights_as_text(mix, n, prime):
    """What the picture writes at a Mix in layer n: its weights (own, source), "" for learned ones and where own is 1.
    prime: ′ if "delta" subtracts V′, or nothing."""
    r = mix.residual
    if r.learn != "fixed" or r.map == "cross":
        return "", ""
    own, source = (f"{weight:.3g}" for weight in r.starts(len(mix.sources))[:2])
    if not r.lam:
        count = len(mix.sources) + 1
        own = source = {2: "½", 3: "⅓", 4: "¼"}.get(count, f"1/{count}")
    if r.map == "delta":  # in the paper's count, as in the equation
        first = {"all": "V_i", "token": "E"}.get(r.source) or f"V_{mix.sources[0] + 1}"
        source += f" ({first}−V_{n + 1}{prime})"
    return "" if own == "1" else own, source


# -- how it looks, in inches

WIDTH, ROW, MARGIN, HEAD, FOOT = 2.25, 0.93, 0.45, 0.76, 0.6  # of a mode, of a layer; margins left, above, below
SLOTS, FULL, HEIGHT = {"q": 0.46, "k": 0.81, "v": 1.16}, 0.27, 0.2  # middles of the boxes; width of n_head heads
LEFT, MIDDLE, RIGHT = 0.3, 0.81, 1.32  # the frame around a layer
LANE, CACHE = 0.08, {"k": 1.93, "v": 2.13}
# heights in a layer: frame, boxes, where lines leave them (as projected, as used), attention
BOTTOM, BOXES, LEAVE, USED, ATTENTION, TOP = 0.1, 0.13, 0.375, 0.535, 0.58, 0.885
ARRIVE = {"input": 0.05, "before": 0.475, "instead": 0.475, "softmax": 0.63, "after": 0.825}
BLUE, GREY = "#0072B2", "0.55"
FRAME, OTHER = {"facecolor": "0.955", "edgecolor": "none", "zorder": 1}, {"facecolor": "white", "edgecolor": GREY}
READ, VALUE = {"facecolor": BLUE, "edgecolor": BLUE}, {"facecolor": "#d3e6f3", "edgecolor": BLUE}
KEY, MISSING = OTHER | {"facecolor": "0.82"}, {"facecolor": "none", "edgecolor": "0.7", "linestyle": (0, (2, 2))}
EDGE = {-1: LEFT + 0.025, 1: RIGHT - 0.025}  # ends of the box of attention; lines are at the left or right
CAPTION = """Later layers read the dark boxes, along the blue lines; ⊕ adds. Where a box is dashed, the layer has none
of its own and uses the dark one. KV cache: what is stored for each token, in bf16, for {0.n_head} heads of width
{0.head_dim}; V′ is V after ⊕. Code counts layers from 0, the paper from 1."""


def write(ax, x, y, text, **look):
    """Text on the axes, if there is some, with the subscripts of V_1 and H_{n-1}, but not of resformer_v2."""
    text = re.sub(r"(?<!\w)(\w)_(?:{([^}]*)}|([a-zL0-9]+))", r"\1$_{\\mathrm{\2\3}}$", text)
    if text:
        ax.text(x, y, text, **{"fontsize": 7.5, "va": "center", "zorder": 6} | look)


def size_of(configs):
    """(width, height) of the picture of ModelConfigs of one depth, four in a row."""
    rows, panel = -(-len(configs) // 4), configs[0].n_layer * ROW + HEAD + FOOT
    return MARGIN + min(4, len(configs)) * WIDTH, rows * panel + 0.3


def draw(fig, configs):
    """Draw the plans of ModelConfigs of one depth on a figure of their size."""
    (width, height), panel = size_of(configs), configs[0].n_layer * ROW + HEAD + FOOT
    fig.set_layout_engine("none")  # so that an inch is an inch
    for j, cfg in enumerate(configs):
        left, bottom = MARGIN + j % 4 * WIDTH, height - (j // 4 + 1) * panel
        ax = fig.add_axes([left / width, bottom / height, WIDTH / width, panel / height])
        ax.set(xlim=(0, WIDTH), ylim=(-FOOT, panel - FOOT))
        ax.axis("off")
        Panel(ax, cfg)
        for n in range(cfg.n_layer if j % 4 == 0 else 0):
            write(ax, -0.03, n * ROW + 0.48, f"layer {n}\nn = {n + 1}", ha="right")
    # `left` and `ax` are the last panel's
    caption = textwrap.wrap(CAPTION.format(configs[0]), int(15 * width))
    write(ax, LEFT + MARGIN - left, -FOOT, "\n".join(caption), va="top")


def lanes_of(lines):
    """[(line, side, lane)]: lines of queries and keys are on the left, -1, all others on the right, 1. Short lines are
    near the layers, in lane 0, and none lies on another."""
    spans, placed, taken = {}, [], defaultdict(set)  # taken: {(side, lane): layers}
    for line in lines:
        ends = [*line.readers, *(i for i in line.sources if isinstance(i, int))]
        spans[line] = {*range(min(ends), max(ends) + 1)}
    for line in sorted(lines, key=lambda line: len(spans[line])):
        side = -1 if line.of in ("q", "k") else 1
        lane = next(j for j in range(len(lines)) if not taken[side, j] & spans[line])
        taken[side, lane] |= spans[line]
        placed.append((line, side, lane))
    return placed


class Panel:
    """The plan of a ModelConfig on the axes `ax`."""

    def __init__(self, ax, cfg):
        self.ax, self.cfg, self.plan, lines = ax, cfg, plan_layers(cfg), lines_of(cfg)
        self.read = {(line.of, i) for line in lines for i in line.sources}  # boxes that lines leave from
        for n in range(cfg.n_layer):
            self.draw_layer(n)
        self.draw_cache()
        self.draw_words(sorted({f"weights: {line.word}" for line in lines if line.word}))
        for line, side, lane in lanes_of(lines):
            x = EDGE[side] + side * (0.225 + LANE * lane)
            heights = [self.leave(line, i, side, x) for i in line.sources]
            heights += [self.arrive(line, n, side, x) for n in line.readers]
            self.stroke([(x, min(heights)), (x, max(heights))])

    def box(self, x, y, width, look, name="", height=HEIGHT):
        patch = need("matplotlib.patches").Rectangle((x, y), width, height, linewidth=0.8, **{"zorder": 3} | look)
        self.ax.add_artist(patch)
        middle = y + height / 2 - 0.01
        if width > 0.12:
            write(self.ax, x + width / 2, middle, name, ha="center", color="white" if look is READ else "black")
        else:
            write(self.ax, x + width + 0.02, middle, name)

    def look(self, t, n, otherwise):
        return READ if (t, n) in self.read else VALUE if t == "v" else otherwise

    def slot(self, t, n):
        """Where the boxes of a tensor are in layer n: (left end, end of what it owns, right end)."""
        heads, unit = self.cfg.n_head if t == "q" else self.cfg.n_kv_head, FULL / self.cfg.n_head
        left = SLOTS[t] - unit * heads / 2
        return left, left + unit * self.plan[n].heads.get(t, 0), left + unit * heads

    def thread(self, x, low, high):
        self.ax.plot([x, x], [low, high], color=GREY, linewidth=0.8, zorder=2)

    def draw_layer(self, n):
        y = n * ROW
        self.box(LEFT, y + BOTTOM, RIGHT - LEFT, FRAME, height=TOP - BOTTOM)
        look = self.look("attention", n, OTHER)
        self.box(LEFT + 0.025, y + ATTENTION, RIGHT - LEFT - 0.05, look, f"attention A_{n + 1}", 0.17)
        self.thread(MIDDLE, y - 0.05, y + BOTTOM)
        self.thread(MIDDLE, y + ATTENTION + 0.17, y + ROW)
        for t in SLOTS:
            left, own, right = self.slot(t, n)
            if own < right:
                self.box(own, y + BOXES, right - own, MISSING)
            if own > left:
                self.box(left, y + BOXES, own - left, self.look(t, n, OTHER), f"{t.upper()}_{n + 1}")
                self.thread((left + own) / 2, y + BOXES + HEIGHT, y + ATTENTION)

    def draw_cache(self):
        top, unit = self.cfg.n_layer * ROW, 0.17 / self.cfg.n_head
        write(self.ax, sum(CACHE.values()) / 2, top + 0.15, "KV cache", ha="center")
        self.box(CACHE["k"] - 0.12, BOTTOM, 0.42, FRAME, height=top - ROW + TOP - BOTTOM)
        for (t, n), heads in stored_tensors(self.cfg).items():
            prime = "′" * is_mixed(self.plan[n], t)
            name = f"{t.upper()}_{n + 1}{prime}" if heads == self.cfg.n_head else ""
            self.box(CACHE[t] - unit * heads / 2, n * ROW + BOXES, unit * heads, self.look(t, n, KEY), name)
        kv, full = kv_floats_per_token(self.cfg), 2 * self.cfg.n_layer * self.cfg.n_head * self.cfg.head_dim
        size = f"{2 * kv:,} bytes per token\n{kv / full:.3g} × full attention's"
        write(self.ax, WIDTH, -0.05, size, ha="right", va="top")

    def draw_words(self, notes):
        """Name and equation above the layers, notes below."""
        mode, top = self.cfg.value_mode, self.cfg.n_layer * ROW
        self.ax.text(LEFT, top + 0.61, mode.name, fontsize=10, weight="bold", va="center")
        for line, text in enumerate(textwrap.wrap(equation_of(mode)[0], 37)):
            write(self.ax, LEFT, top + 0.46 - 0.14 * line, text, fontsize=8)
        notes = textwrap.wrap(", ".join([*notes, *beside_the_plan(mode)]), 40)
        write(self.ax, LEFT, -0.32, "\n".join(notes), va="top")

    def leave(self, line, i, side, lane):
        """Draw the path from source i to the x of its line. Returns its height."""
        y = i * ROW if isinstance(i, int) else min(line.readers) * ROW
        if isinstance(i, str):  # a token table, beside the lowest layer that reads it
            self.box(lane - 0.065, y + BOXES, 0.13, READ, "E")
            way = [(lane, y + BOXES + HEIGHT)]
        elif line.of == "attention":
            way = [(EDGE[side], y + ATTENTION + 0.12)]
        elif line.of == "input":
            way = [(MIDDLE, y - 0.01)]
        else:
            x = sum(self.slot(line.of, i)[:2]) / 2
            way = [(x, y + BOXES + HEIGHT), (x, y + (USED if line.is_used else LEAVE))]
        self.stroke([*way, (lane, way[-1][1])])
        return way[-1][1]

    def arrive(self, line, n, side, lane):
        """Draw the path from the x of a line to layer n: an arrow, a sum, its weights. Returns its height."""
        (own, weight), y = line.readers[n], n * ROW + ARRIVE[line.place]
        if line.place == "instead":
            x = sum(self.slot(line.of, n)[1:]) / 2
            self.stroke([(lane, y), (x, y), (x, n * ROW + ATTENTION)], True)
            return y
        x = EDGE[side] if line.place == "softmax" else MIDDLE
        if line.place == "before":
            x = sum(self.slot(line.of, n)[:2]) / 2
        is_sum = bool(weight or line.word)  # map="cross" has neither
        self.stroke([(lane, y), (x + side * 0.045 * is_sum, y)], True)
        if is_sum:
            self.ax.plot(x, y, "o", markersize=6.5, color=BLUE, markerfacecolor="white", zorder=7)
            self.ax.plot(x, y, "+", markersize=4.5, color=BLUE, zorder=8)
        look = {"ha": "right" if side > 0 else "left", "color": BLUE}
        write(self.ax, x - side * 0.06, y - 0.035, own, **look)
        write(self.ax, EDGE[side] + side * 0.2, y + 0.06, weight, **look)
        return y

    def stroke(self, points, is_arrow=False):
        self.ax.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.5, zorder=5, solid_capstyle="round")
        if is_arrow:
            head = {"arrowstyle": "-|>,head_width=0.16,head_length=0.3", "color": BLUE, "shrinkA": 0, "shrinkB": 0}
            self.ax.annotate("", points[-1], points[-2], arrowprops=head, zorder=5)
