"""The paper's figures and tables: which runs each is made of, how it is drawn, and what the paper says it shows.

reproduce.py makes the runs and calls `draw`, `table` and `rows`; plot.py has the panels. Paper: arXiv 2410.17897.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import plot
from configurator import UserError
from data import Tokenizer
from describe import count_parameters
from files import read_json
from prepare import PAPER_MIXTURE
from value_modes import ModelConfig


@dataclass(frozen=True)
class Job:
    """A training run in the paper's units; a Scale says what they are on this machine."""

    mode: str = "vanilla"
    size: str = "82M"
    length: int = 2048
    lr: float = 6e-4
    warmup: int = 120
    arch: str = "llama"

    @property
    def name(self):
        """Of its folder: size, length and mode, and what else is not the paper's default."""
        odd = [f"lr{self.lr:g}"] * (self.lr != 6e-4) + [f"warmup{self.warmup}"] * (self.warmup != 120)
        return "-".join([self.size, str(self.length), self.mode, *odd, *[self.arch] * (self.arch != "llama")])

    @property
    def baseline(self):
        """The vanilla run of the same settings."""
        return dataclasses.replace(self, mode="vanilla")


# Numbers that the paper prints: Table 1 (accuracies), 3, 4, 5 (validation losses); domains and tasks in its order.
TABLE1 = {
    ("vanilla", 2048): (0.263, 0.142, 0.492, 0.199, 0.331, 0.572, 0.333),
    ("resformer", 2048): (0.273, 0.148, 0.512, 0.182, 0.414, 0.604, 0.355),
    ("vanilla", 64000): (0.267, 0.142, 0.485, 0.179, 0.322, 0.570, 0.328),
    ("resformer", 64000): (0.274, 0.136, 0.513, 0.184, 0.407, 0.588, 0.350),
}
DOMAINS = ("CommonCrawl", "C4", "Github", "StackExchange", "Wikipedia", "Book", "ArXiv")
TABLE5 = {
    ("vanilla", "82M"): (3.3595, 3.5388, 1.4247, 2.3872, 2.9047, 3.3797, 2.1779, 2.7389),
    ("vanilla", "180M"): (3.0961, 3.2834, 1.2451, 2.1651, 2.5897, 3.1309, 2.0001, 2.5015),
    ("vanilla", "468M"): (2.8514, 3.0430, 1.0908, 1.9628, 2.2821, 2.8979, 1.8362, 2.2806),
    ("resformer", "82M"): (3.3362, 3.5191, 1.3941, 2.3592, 2.8646, 3.3572, 2.1518, 2.7117),
    ("resformer", "180M"): (3.0631, 3.2504, 1.2200, 2.1350, 2.5435, 3.0994, 1.9732, 2.4692),
    ("resformer", "468M"): (2.8214, 3.0115, 1.0730, 1.9388, 2.2477, 2.8696, 1.8142, 2.2537),
}
TABLE3 = {512: (4096, 128), 2048: (1024, 32), 8192: (256, 8), 32000: (64, 2), 64000: (32, 1)}  # sequences, per GPU
SHAPE = ("layers", "heads", "width")
TABLE4 = {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}
PARAMETERS = {"82M": 81_901_056, "180M": 179_874_048, "468M": 467_921_920}

LINES = ("resformer", "vanilla")


def averages(mode):
    """[(parameters, the paper's validation loss, mean over domains)] of a mode, from Table 5."""
    return [(PARAMETERS[size], losses[-1]) for (of, size), losses in TABLE5.items() if of == mode]


SEEDS = (42, *range(1, 10))  # 42 is the paper's
INITIAL = "init-468M"  # folder of the analysis of a model before training
LABELS = {"vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "neutreno": "NeuTRENO"}
LABELS |= {"denseformer": "DenseFormer", "resformer_neutreno": "ResFormer+NeuTRENO", "cross": "Cross Layer Attention"}
LABELS |= {"cla2": "CLA2", "gqa2": "GQA2", "gqa8": "GQA8", "svformer_gqa4": "SVFormer+GQA4", "cla2_gqa4": "CLA2+GQA4"}
FOUR = ("vanilla", "neutreno", "resformer", "svformer")
LENGTHS = (512, 2048, 8192, 32000, 64000)


@dataclass(frozen=True)
class Panel:
    """A part of a figure: how it is drawn (see PANELS), of which runs {label: Job}, of which quantity of their
    analysis (one key of analysis.json, or one for each label)."""

    kind: str
    title: str = ""
    jobs: dict = field(default_factory=dict)
    key: str | dict = ""
    label: str = ""  # of the y axis


@dataclass(frozen=True)
class Claim:
    """A number that says whether our runs go the paper's way. value(found, seed) -> float, or None if it cannot be
    told; the paper's way is `above` a number, `below` one, both, or neither where the paper only gives a value."""

    what: str
    paper: str
    value: Callable
    above: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Figure:
    """A figure or table: what it shows, in one sentence; its panels; or for a table its rows, table(found), the header
    first, the runs that these read, the tasks of eval.py that they need, and whether they read the prepared data."""

    caption: str
    panels: tuple[Panel, ...] = ()
    claims: tuple[Claim, ...] = ()
    table: Callable | None = None
    runs: tuple[Job, ...] = ()
    tasks: str = ""
    reads_data: bool = False

    @property
    def jobs(self):
        """All runs that it needs."""
        jobs = [*self.runs, *(job for panel in self.panels for job in panel.jobs.values())]
        compared = [p for p in self.panels if p.kind in ("relative", "critical")]
        return list(dict.fromkeys([*jobs, *(job.baseline for panel in compared for job in panel.jobs.values())]))

    @property
    def analysed(self):
        """Those whose analysis it needs."""
        panels = [p for p in self.panels if p.kind in ("layers", "spectrum", "heat", "public")]
        return list(dict.fromkeys(job for panel in panels for job in panel.jobs.values()))


# -- what claims are about: functions (found, seed) -> number


def loss_gap(low, high):
    """Validation loss of Job `low` minus that of Job `high`."""
    return lambda found, seed: found.loss(low, seed) - found.loss(high, seed)


def lower(a, b, what):
    return Claim(f"{what}, validation loss", "lower", loss_gap(a, b), below=0.0)


def ablation(number):
    """What plot.py's table of ablations says of a figure, as Claims."""
    said, pairs, _ = plot.FIGURES[number]
    return tuple(Claim(f"{a} − {b}, validation loss", said, loss_gap(Job(a), Job(b)), below=0.0) for a, b in pairs)


def ratios(found, job, seed, of):
    """The first token's norm by the others', over layers (of="value") or states ("hidden")."""
    first, rest = (np.array(found.by_layer(job, seed, f"{of}_norm_{part}"), float) for part in ("first", "rest"))
    return first / rest


def least_value(found, job, seed):
    """The first token's least value norm over layers, by the others'."""
    return ratios(found, job, seed, "value").min()


def importance_ratios(found, job, seed):
    """The first token's importance by the mean of the next 99 tokens', over layers (later ones are seen by few)."""
    of = found.arrays(job, seed)["importance"][:, :100]
    return of[:, 0] / of[:, 1:].mean(axis=1)


def start_token(mode):
    """Claims on how far the first token stands out: the paper's A.2 bounds it for ResFormer; vanilla's is for
    comparison."""
    job, bound = Job(mode, "468M"), mode == "resformer"
    rows = (
        ("greatest importance", "below", 10.0, lambda f, s: importance_ratios(f, job, s).max()),
        ("least value norm", "above", 0.5, lambda f, s: least_value(f, job, s)),
        ("greatest hidden norm", "below", 3.0, lambda f, s: ratios(f, job, s, "hidden").max()),
    )
    return tuple(
        Claim(
            f"{LABELS[mode]}: {what} of the first token, by the others'",
            f"{way} {limit:g}" * bound,
            value,
            **{way: limit} if bound else {},
        )
        for what, way, limit, value in rows
    )


def deep_entropy(found, job, seed):
    values = found.by_layer(job, seed, "entropy")
    return float(np.mean(values[len(values) // 2 :]))


def mean_of(key):
    return lambda found, job, seed: float(np.mean([x for x in found.by_layer(job, seed, key) if x is not None]))


def minus(a, b, f):
    """f(found, Job a, seed) - f(found, Job b, seed)."""
    return lambda found, seed: float(f(found, a, seed) - f(found, b, seed))


def concentration(mode, size):
    """Claims on how `mode` differs from vanilla in what the paper calls attention concentration."""
    a, b, label = Job(mode, size), Job("vanilla", size), f"{LABELS[mode]} − Transformer"
    return {
        "entropy": Claim(
            f"{label}: entropy in the deeper half of the layers (nats)", "higher", minus(a, b, deep_entropy), above=0.0
        ),
        "first": Claim(
            f"{label}: first token's greatest importance over layers",
            "lower",
            minus(a, b, lambda found, job, seed: max(found.by_layer(job, seed, "first"))),
            below=0.0,
        ),
        "value_norm_first": Claim(
            f"{label}: first token's least value norm over layers, by the others'",
            "higher: no value-state drain",
            minus(a, b, least_value),
            above=0.0,
        ),
        "hidden_norm_first": Claim(
            f"{label}: first token's greatest hidden norm over states, by the others'",
            "lower: no hidden-state peak",
            minus(a, b, lambda found, job, seed: ratios(found, job, seed, "hidden").max()),
            below=0.0,
        ),
    }


def saved_parameters(mode, sizes):
    """The share of parameters that `mode` saves at vanilla's losses, mean over `sizes`, see plot.saving."""

    def value(found, seed):
        jobs = [[Job(m, size) for size in sizes] for m in (mode, "vanilla")]
        points = [[(found.run(job, seed).start["parameters"], found.loss(job, seed)) for job in of] for of in jobs]
        saved = plot.saving(*points)
        return None if None in saved else float(np.mean(saved))

    return value


def saved_tokens(found, seed):
    """The share of tokens that ResFormer saves at 468M."""
    return plot.tokens_saved(*(found.validation(Job(mode, "468M"), seed) for mode in ("resformer", "vanilla")))


def critical(found, job, seed):
    """plot.critical_point of a Job's relative loss, a pair (step, extrapolated?)."""
    two = [found.run(of, seed) for of in (job, job.baseline)]
    x, y = plot.align([(r.steps["step"], r.steps["loss"]) for r in two])
    return plot.critical_point(*plot.smooth(x, y[0] - y[1], found.window))


def later_when_longer(found, seed):
    """Share of the pairs of lengths with unlike critical points whose longer one has the later; None if no length has a
    finite one."""
    points = [critical(found, Job("svformer", length=n), seed)[0] for n in LENGTHS]
    pairs = [(a, b) for a, b in combinations(points, 2) if a != b]
    return float(np.mean([a < b for a, b in pairs])) if any(0 < a < math.inf for a in points) else None


def change(a, b):
    """How much more Job a's loss is above its baseline's than Job b's."""
    return lambda found, seed: loss_gap(a, a.baseline)(found, seed) - loss_gap(b, b.baseline)(found, seed)


def larger(size):
    """Share of layers whose largest eigenvalue is larger in ResFormer."""

    def value(found, seed):
        a, b = (found.by_layer(Job(mode, size), seed, "value_largest") for mode in ("resformer", "vanilla"))
        return float(np.mean(np.array(a) > np.array(b)))

    return value


# -- the figures


def named(*modes, **settings):
    """{the paper's label: Job} of modes."""
    return {LABELS.get(mode, mode): Job(mode, **settings) for mode in modes}


def relative(title, jobs):
    """Training losses minus vanilla's; jobs: {label: Job or mode}."""
    return Panel("relative", title, {k: Job(v) if isinstance(v, str) else v for k, v in jobs.items()})


def layers(title, jobs, key, label):
    return Panel("layers", title, jobs, key, label)


def by_size(*modes, sizes):
    return {f"{LABELS[m]} {size}": Job(m, size) for m in modes for size in sizes}


SIZES = ("82M", "180M", "320M", "468M")
SV = Job("svformer")
FIRST = {
    "first": "importance of the first token",
    "value_norm_first": "norm of its value",
    "hidden_norm_first": "norm of its hidden state",
}
TOP = {f"TOP-{k}": f"top_{k}" for k in ("1", "2", "3", "10", "1%")}
EQUATIONS = {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"}
LAMBDAS = {f"λ = {x}": f"resformer_lambda_{x}" for x in ("0.2", "0.5", "0.8", "1", "2", "5")}
LAMBDAS["λ = 2"] = "resformer_lambda"
NEUTRENOS = {f"λ = {x}": f"neutreno_{x}" for x in ("0.2", "0.4", "0.6", "0.8")} | {"λ = 0.4": "neutreno"}
# fmt: off
FIGURES = {
    "fig1": Figure(
        "Entropy of token importance by layer, before training, in public models and in ours: lower is concentrated.",
        (
            Panel("initial", "468M before training", label="entropy (nats)"),
            Panel("public", "public models", key="entropy", label="entropy (nats)"),
            layers("468M trained", named(*FOUR, size="468M"), "entropy", "entropy (nats)"),
        ),
        (
            Claim("468M before training: entropy at l = 2,048, mean over layers (nats)", "7.194–7.204",
                  lambda f, s: f.initial(np.mean, s), above=7.194, below=7.204),
            Claim("468M before training: lowest of a layer (nats)", "7.194", lambda f, s: f.initial(min, s),
                  above=7.1935),
            Claim("468M before training: highest of a layer (nats)", "7.204", lambda f, s: f.initial(max, s),
                  below=7.2045),
            concentration("resformer", "468M")["entropy"],
            concentration("svformer", "468M")["entropy"],
        ),
    ),
    "fig2": Figure(
        "The first token by layer: what attention it gets, and how long its value and its hidden state are.",
        tuple(layers("", named(*FOUR, size="468M"), key, label) for key, label in FIRST.items()),
        tuple(concentration("resformer", "468M")[key] for key in FIRST),
    ),
    "fig4": Figure(
        "How near two cheap substitutes come to true cross-layer attention (Eq 2) in a trained Transformer.",
        (layers("", dict.fromkeys(EQUATIONS, Job()), EQUATIONS, "cosine similarity to Eq 2"),),
        (Claim("similarity to Eq 2: Eq 4's − Eq 6's, mean over layers", "higher",
               lambda f, s: mean_of("eq4")(f, Job(), s) - mean_of("eq6")(f, Job(), s), above=0.0),),
    ),
    "fig5": Figure(
        "Sharing keys, values or both between every two layers.",
        (relative("", {"CLAttention": "cla2", "Only Share Keys": "share_k2", "Only Share Values": "share_v2"}),),
        ablation("5"),
    ),
    "fig6": Figure(
        "Validation loss against parameters, and along one cosine schedule against tokens: how many of each ResFormer "
        "saves.",
        (
            Panel("scaling", "ours", by_size("vanilla", "resformer", sizes=SIZES)),
            Panel("tokens", "ours, 468M (the paper's saves 13.6 %)", named("vanilla", "resformer", size="468M")),
            Panel("paper", f"the paper's Table 5: {np.mean(plot.saving(*map(averages, LINES))):.1%} fewer"),
        ),
        (
            Claim("share of parameters that ResFormer saves", "0.104", saved_parameters("resformer", SIZES), above=0.0),
            Claim("share of tokens that ResFormer saves at 468M", "0.136", saved_tokens, above=0.0),
        ),
    ),
    "fig7": Figure(
        "ResFormer at three lengths, and beside other ways to pass information up.",
        (
            relative("ResFormer", {f"length {n:,}": Job("resformer", length=n) for n in (2048, 32000, 64000)}),
            relative("82M", named("denseformer", "neutreno", "resformer", "resformer_neutreno")),
        ),
        ablation("7") + tuple(
            lower(Job("resformer", length=n), Job(length=n), f"ResFormer − Transformer at length {n:,}")
            for n in (32000, 64000)
        ),
    ),
    "fig8": Figure(
        "ResFormer with other weights λ of the first layer's values.",
        (relative("", LAMBDAS | {"ResFormer": "resformer"}),), ablation("8"),
    ),
    "fig9": Figure(
        "A residual from layer 1 on values, keys or queries.",
        (relative("", {"Value": "resformer", "Key": "key", "Query": "query"}),), ablation("9"),
    ),
    "fig10": Figure(
        "Layer 1's values by a layer's own attention, by identity, or by true cross-layer attention.",
        (relative("", {
            "Current Attention": "resformer", "Identity Mapping": "identity", "Cross Layer Attention": "cross",
        }),),
        ablation("10"),
    ),
    "fig11": Figure(
        "Which earlier layers' values a layer adds.",
        (relative("", {
            "Only First layer": "resformer", "One Adjacent layer": "resformer_prev",
            "All Previous layer": "resformer_all",
        }),),
        ablation("11"),
    ),
    "fig12": Figure(
        "Spectra of value states: eigenvalues of layer 1, and the largest one of each layer.",
        (
            Panel("spectrum", "layer 1", by_size("vanilla", "resformer", sizes=PARAMETERS)),
            layers("", by_size("vanilla", "resformer", sizes=("180M", "468M")), "value_largest", "largest eigenvalue"),
        ),
        tuple(
            Claim(f"share of {size}'s layers whose largest eigenvalue is larger in ResFormer", "most", larger(size),
                  above=0.5)
            for size in ("180M", "468M")
        ),
    ),
    "fig13": Figure(
        "SVFormer beside other methods with about a half and an eighth of the KV cache.",
        (
            relative("about 1/2", {
                f"{LABELS[m]}, {n:,}": Job(m, length=n) for n in (2048, 64000) for m in ("svformer", "gqa2", "cla2")
            }),
            relative("about 1/8, length 64,000", named("svformer_gqa4", "gqa8", "cla2_gqa4", length=64000)),
        ),
        ablation("13") + tuple(
            lower(Job(a, length=64000), Job(b, length=64000), f"{LABELS[a]} − {LABELS[b]} at length 64,000")
            for a, b in (("svformer", "gqa2"), ("svformer", "cla2"), ("svformer_gqa4", "gqa8"),
                         ("svformer_gqa4", "cla2_gqa4"))
        ),
    ),
    "fig14": Figure(
        "SVFormer at five lengths, and the step at which vanilla overtakes it.",
        (
            relative("SVFormer", {f"length {n:,}": Job("svformer", length=n) for n in LENGTHS}),
            Panel("critical", "critical point", {str(n): Job("svformer", length=n) for n in LENGTHS}),
        ),
        (
            Claim("share of pairs of lengths whose longer one has the later critical point", "all", later_when_longer,
                  above=0.5),
            Claim("SVFormer − Transformer, at length 64,000 minus at 512", "lower",
                  change(Job("svformer", length=64000), Job("svformer", length=512)), below=0.0),
        ),
    ),
    "fig15": Figure(
        "What SVFormer's loss against vanilla's depends on: learning rate, warmup, architecture, size.",
        (
            relative("learning rate", {f"{lr:g}": Job("svformer", lr=lr) for lr in (1e-4, 3e-4, 6e-4)}),
            relative("warmup steps", {str(n): Job("svformer", warmup=n) for n in (120, 1200)}),
            relative("architecture", {"Llama 82M": SV, "GPT2 78M": Job("svformer", arch="gpt2")}),
            Panel("scaling", "size (the paper's needs 12.2 % more)",
                  by_size("vanilla", "svformer", sizes=("2M", *PARAMETERS))),
        ),
        (
            Claim("SVFormer − Transformer, at rate 1e-4 minus at 6e-4", "lower", change(Job("svformer", lr=1e-4), SV),
                  below=0.0),
            Claim("SVFormer − Transformer, at 1,200 warmup steps minus at 120", "about 0",
                  change(Job("svformer", warmup=1200), SV)),
            Claim("SVFormer − Transformer, GPT2's minus Llama's", "about 0", change(Job("svformer", arch="gpt2"), SV)),
            Claim("share of parameters that SVFormer saves", "-0.122", saved_parameters("svformer", tuple(PARAMETERS)),
                  below=0.0),
        ),
    ),
    "fig16": Figure(
        "Layer 1's values, queries or keys for all layers.",
        (relative("", {"Value": "svformer", "Query": "share_q", "Key": "share_k"}),), ablation("16"),
    ),
    "fig17": Figure(
        "SVFormer with its values renewed in more layers.",
        (relative("", {
            "First Layer": "svformer", "First + Last Layer": "svformer_2anchors",
            "First + One Middle + Last": "svformer_3anchors", "First + Two Middle + Last": "svformer_4anchors",
        }),),
        ablation("17"),
    ),
    "fig18": Figure(
        "Token similarity of hidden states by layer: in public models, or where there are none in ours.",
        (Panel("public", "", named(*FOUR, size="468M"), "hidden_similarity", "token similarity"),),
    ),
    "fig19": Figure(
        "Importance, value norm and hidden norm of the first hundred tokens, by layer.",
        (Panel("heat", "", named(*FOUR, size="468M")),),
        (*start_token("resformer"), *start_token("vanilla")),
    ),
    "fig20": Figure(
        "The quantities of Figures 1 and 2 at 82M, with cross-layer attention.",
        tuple(
            layers("", named(*FOUR, "cross"), key, label)
            for key, label in ({"entropy": "entropy (nats)"} | FIRST).items()
        ),
        (
            *concentration("resformer", "82M").values(),
            concentration("cross", "82M")["entropy"],
            Claim("Cross Layer Attention − ResFormer: first token's least value norm over layers, by the others'",
                  "lower: drains stay", minus(Job("cross"), Job("resformer"), least_value), below=0.0),
        ),
    ),
    "fig21": Figure(
        "The largest token importances of a sequence, by rank and layer.",
        tuple(
            layers(LABELS[m], dict.fromkeys(TOP, Job(m, "468M")), TOP, "importance") for m in FOUR
        ),
        tuple(
            Claim(f"{LABELS[m]} − Transformer: largest importance, mean over layers", "lower",
                  minus(Job(m, "468M"), Job("vanilla", "468M"), mean_of("top_1")), below=0.0)
            for m in ("resformer", "svformer")
        ),
    ),
    "fig22": Figure("NeuTRENO with other λ.", (relative("", NEUTRENOS),), ablation("22")),
}
# fmt: on


class NoSeed(KeyError):
    """A run is not made with that seed."""


class Found:
    """What the runs of a scale left, read when it is asked for.

    root: folder of the runs; scale: a reproduce.Scale; seeds: function Job -> its seeds; public: folders of analyses of
    public models. A run that is not there or not finished is a UserError that names the command that makes it.
    """

    def __init__(self, root, scale, seeds, public=(), make="python reproduce.py"):
        self.root, self.scale, self.seeds, self.window, self.make = Path(root), scale, seeds, scale.window, make
        self.public, self.data = [Path(folder) for folder in public], None
        self.analyses, self.curves = {}, {}  # what has been read

    def folder(self, job, seed):
        if seed not in self.seeds(job):
            raise NoSeed(f"{job.name} has no seed {seed}")
        return self.root / f"{job.name}-{seed}"

    def read(self, folder):
        """The analysis of a folder and its arrays."""
        about, arrays = plot.read_analysis(folder, self.make), folder / "analysis.npz"
        try:
            return about, dict(np.load(arrays))
        except (OSError, ValueError, BadZipFile) as e:
            raise UserError(f"{arrays} is not a file of analyze.py: {e}; remove it and analysis.json") from None

    def analysis(self, job, seed):
        folder = self.folder(job, seed)
        if folder not in self.analyses:
            self.analyses[folder] = self.read(folder)
        return self.analyses[folder][0]

    def arrays(self, job, seed):
        self.analysis(job, seed)
        folder = self.folder(job, seed)
        if lacking := {*HEAT, "value_spectrum"} - self.analyses[folder][1].keys():
            raise UserError(f"{folder}/analysis.npz has no {min(lacking)}; remove its analysis, then `{self.make}`")
        return self.analyses[folder][1]

    def by_layer(self, job, seed, key):
        """Means of a quantity of `layers` or `states` in analysis.json, for each of them; None where there is none."""
        self.analysis(job, seed)
        return self.mean(self.folder(job, seed), key)

    def mean(self, folder, key):
        """The same of any folder with an analysis."""
        about = self.analyses.get(folder) or self.analyses.setdefault(folder, self.read(folder))
        of = about[0]["states"].get(key) or about[0]["layers"].get(key)
        if not isinstance(of, dict) or not of.get("mean"):
            raise UserError(f"{folder}/analysis.json has no {key}; remove it, then `{self.make}`")
        return of["mean"]

    def run(self, job, seed):
        """The plot.Run of a finished run."""
        folder = self.folder(job, seed)
        if folder in self.curves:
            return self.curves[folder]
        if not folder.exists():
            raise UserError(f"{folder} is missing; make it: `{self.make}`")
        found = plot.read_run(folder)
        if not found.finished:
            raise UserError(f"{folder} is not finished ({found.progress}); go on with it: `{self.make}`")
        data, first = self.data = self.data or (found.start["data"], folder)
        if found.start["data"] != data:
            raise UserError(f"{folder} was trained on other data than {first}: their losses cannot be compared")
        self.curves[folder] = found
        return found

    def loss(self, job, seed):
        found = self.run(job, seed)
        return found.val[found.last]

    def validation(self, job, seed):
        """(tokens, validation losses) of a run's evaluations."""
        found = self.run(job, seed)
        rate = found.steps["tokens"][-1] / found.last
        return [step * rate for step in found.val], list(found.val.values())

    def initial(self, of, seed):
        """min, max or mean over layers of the entropy before training, which is measured with one seed."""
        if seed not in (None, SEEDS[0]):
            raise NoSeed(seed)
        return of(self.mean(self.root / INITIAL, "entropy"))

    def evaluation(self, job, seed, task):
        """The record of a task in a run's eval.json, or None."""
        path = self.folder(job, seed) / "eval.json"
        return plot.read_eval(path)[1].get(task) if path.exists() else None


def rows(figure, found):
    """[{what, paper, seeds, values: of each of them, mean, std, n, same, within}] of a figure's claims; same: whether
    the mean goes the paper's way, None if there is no way or no value; within: whether the seeds' spread leaves that
    open. A value that cannot be told, or is beyond all numbers, is None."""
    table = []
    seeds = max((found.seeds(job) for job in figure.jobs), key=len, default=[None])
    for claim in figure.claims:
        values = {}
        for seed in seeds:
            with suppress(NoSeed):  # a run that this claim needs has fewer
                value = claim.value(found, seed)
                values[seed] = None if value is None or not math.isfinite(value) else float(value)
        of = plot.statistics([v for v in values.values() if v is not None]) or {"mean": None, "std": None, "n": 0}
        row = {"what": claim.what, "paper": claim.paper, "seeds": list(values), "values": list(values.values())}
        row |= of | {"same": None, "within": None}
        ways = [(claim.above, 1), (claim.below, -1)]
        if of["n"] and any(bound is not None for bound, _ in ways):
            off = min((of["mean"] - bound) * sign for bound, sign in ways if bound is not None)
            row |= {"same": off > 0, "within": None if of["std"] is None else abs(off) <= of["std"]}
        table.append(row)
    return table


# -- drawing


def by_label(panel, found, get):
    """{label: [get(job, seed) of each seed]}."""
    return {label: [get(job, seed) for seed in found.seeds(job)] for label, job in panel.jobs.items()}


def draw_relative(ax, panel, found):
    plot.relative_panel(
        ax, by_label(panel, found, lambda job, s: (found.run(job, s), found.run(job.baseline, s))), found.window
    )


def draw_layers(ax, panel, found):
    keys = panel.key if isinstance(panel.key, dict) else dict.fromkeys(panel.jobs, panel.key)
    lines = {
        label: [found.by_layer(job, seed, keys[label]) for seed in found.seeds(job)]
        for label, job in panel.jobs.items()
    }
    states = next(iter(keys.values())).startswith("hidden")
    levels = {found.analysis(job, found.seeds(job)[0])["entropy_uniform"] for job in panel.jobs.values()}
    level = (levels.pop(), "uniform attention") if panel.key == "entropy" else None
    plot.layer_panel(ax, lines, panel.label, 0 if states else 1, level)


def draw_public(ax, panel, found):
    """Models in Hugging Face layout, or our own instead where there are none."""
    if found.public:
        lines = {folder.name: [found.mean(folder, panel.key)] for folder in found.public}
        plot.layer_panel(ax, lines, panel.label, 0 if panel.key.startswith("hidden") else 1)
    elif panel.jobs:
        draw_layers(ax, panel, found)
    else:
        ax.text(0.5, 0.5, "none analysed:\n--public=FOLDER,…", ha="center", va="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[])


def draw_initial(ax, panel, found):
    """Entropy on the left axis, token similarity of the hidden states on the right one."""
    entropy, similar = (found.mean(found.root / INITIAL, key) for key in ("entropy", "hidden_similarity"))
    similar, of = similar[1:], found.analyses[found.root / INITIAL][0]
    other, x = ax.twinx(), 1 + np.arange(len(entropy))
    ax.plot(x, entropy, "o-", color=plot.COLORS[1], markerfacecolor="none", label="entropy (left)")
    other.plot(x, similar, "s--", color=plot.COLORS[2], markerfacecolor="none", label="token similarity (right)")
    paper = ax.axhspan(7.194, 7.204, color="0.9", zorder=0, label="the paper's entropy (left)")
    ax.axhline(of["entropy_uniform"], color="0.5", linestyle=(0, (3, 2)), linewidth=0.8)
    ax.set(xlabel="layer", ylabel=panel.label, ylim=(min(*entropy, 7.194) - 0.02, max(*entropy, 7.204) + 0.02))
    other.set(ylabel="token similarity of its output", ylim=(0, 1))
    other.spines["right"].set_visible(True)
    ax.legend(handles=[*ax.lines[:1], *other.lines, paper], loc="lower right", fontsize=7)


def draw_spectrum(ax, panel, found):
    plot.spectrum_panel(ax, by_label(panel, found, lambda job, seed: found.arrays(job, seed)["value_spectrum"][0]))


def draw_scaling(ax, panel, found):
    lines, least = {}, math.inf
    for label, job in panel.jobs.items():
        runs = [found.run(job, seed) for seed in found.seeds(job)]
        losses = [found.loss(job, seed) for seed in found.seeds(job)]
        lines.setdefault(label.removesuffix(f" {job.size}"), []).append((runs[0].start["parameters"], losses))
        if job.size in SIZES:  # the claims' lines leave the 2M out
            least = min(least, runs[0].start["parameters"])
    plot.scaling_panel(ax, lines, least)


def draw_paper(ax, panel, found):
    """Averages of the paper's Table 5."""
    lines = {mode: [(n, [loss]) for n, loss in averages(mode)] for mode in reversed(LINES)}
    plot.scaling_panel(ax, {LABELS[mode]: points for mode, points in lines.items()})


def draw_tokens(ax, panel, found):
    plot.tokens_panel(ax, by_label(panel, found, found.validation))


def draw_critical(ax, panel, found):
    points = by_label(panel, found, lambda job, seed: critical(found, job, seed))
    plot.critical_panel(ax, {int(length): seeds for length, seeds in points.items()})


PANELS = {"relative": draw_relative, "layers": draw_layers, "public": draw_public, "initial": draw_initial}
PANELS |= {"spectrum": draw_spectrum, "scaling": draw_scaling, "paper": draw_paper, "tokens": draw_tokens}
PANELS |= {"critical": draw_critical}
HEAT = {"importance": "importance", "value_norm": "norm of the value", "hidden_norm": "norm of the hidden state"}


def draw(path, figure, found):
    """Draw a figure's panels into a PNG."""
    n = len(figure.panels)
    if figure.panels[0].kind == "heat":
        arrays = by_label(figure.panels[0], found, found.arrays)
        maps = {
            label: {name: np.mean([of[key][:, :100] for of in seeds], 0) for key, name in HEAT.items()}
            for label, seeds in arrays.items()
        }
        with plot.page(path, (3.6 * len(HEAT), 2.2 * len(maps))) as paper:
            return plot.heat_maps(paper, maps)
    columns = n if n < 4 else 2
    height = -(-n // columns)
    with plot.page(path, (4.3 * columns, 3.5 * height) if n > 1 else (6, 4)) as paper:
        for ax, panel in zip(paper.subplots(height, columns, squeeze=False).flat, figure.panels, strict=False):
            PANELS[panel.kind](ax, panel, found)
            ax.set_title(panel.title, loc="left", fontsize=9)


# -- tables


def scores(found, job, task, key):
    """Means over those seeds of a Job that have a task's record in eval.json, or None."""
    records = [found.evaluation(job, seed, task) for seed in found.seeds(job)]
    records = [record[key] for record in records if record]
    if records and isinstance(records[0], dict):
        return {name: float(np.mean([of[name] for of in records])) for name in records[0]}
    return float(np.mean(records)) if records else None


def beside(ours, paper):
    """A cell: our number, and the paper's in brackets."""
    return ("-" if ours is None else f"{ours:.4f}") + (f" ({paper})" if paper is not None else "")


def scored(found, length, seed):
    """({mode: {task: accuracy}}, the tasks that all of Table 1's models of a length have) with a seed."""
    modes = [mode for mode, n in TABLE1 if n == length]
    records = {m: {t: found.evaluation(Job(m, length=length), seed, t) for t in plot.TASKS[:6]} for m in modes}
    common = [t for t in plot.TASKS[:6] if all(of[t] for of in records.values())]
    return {m: {t: record["acc"] for t, record in of.items() if record} for m, of in records.items()}, common


def table1(found):
    """Accuracies, the paper's in brackets; Avg is over the tasks that all models of a length can be scored on."""
    tasks = plot.TASKS[:6]
    lines = [["", *tasks, "Avg"]]
    for (mode, length), paper in TABLE1.items():
        seeds = [scored(found, length, seed) for seed in found.seeds(Job(mode, length=length))]
        seeds = [(of[mode], common) for of, common in seeds if common]
        if not seeds:
            raise UserError(f"no task is scored at length {length:,}; `{found.make}`, if need be with --eval_dir")
        common = seeds[0][1]
        ours = [[of[t] for of, _ in seeds if t in of] for t in tasks] + [[of[t] for of, _ in seeds for t in common]]
        cells = [beside(np.mean(x) if x else None, f"{of:.3f}") for x, of in zip(ours, paper, strict=True)]
        cells[-1] += f" of {len(common)}" * (len(common) < len(tasks))
        lines.append([f"{LABELS[mode]} {length:,}", *cells])
    return lines


def table2(found):
    """Shares of the domains, as prepared here and in the paper."""
    yield ["domain", "share here", "training tokens here", "share in the paper", "tokens in the paper"]
    manifest = read_json(Path(found.scale.data_dir) / "manifest.json", "a manifest of prepare.py")
    for domain in dict.fromkeys([*PAPER_MIXTURE, *manifest["mixture"]]):
        ours, tokens = manifest["mixture"].get(domain), manifest["splits"]["train"].get(domain, {}).get("tokens")
        paper = PAPER_MIXTURE.get(domain)
        cells = [f"{ours:.1%}" if ours else "-", f"{tokens:,}" if tokens else "-"]
        yield [domain, *cells, f"{paper:.0%}" if paper else "-", f"{20 * paper:.0f}B" if paper else "-"]


def table3(found):
    """Batches by length, the paper's in brackets. Its 32 steps of accumulation are a slip: its own numbers give 4."""
    yield ["length", "tokens", "sequences per step", "per GPU", "accumulation", "tokens per step"]
    for length, (tokens, batch, micro) in found.scale.lengths.items():
        sequences, each = TABLE3[length]
        numbers = (tokens, batch, micro, batch // (micro * max(1, found.scale.gpus)), tokens * batch)
        paper = (length, sequences, each, 32, length * sequences)
        yield [f"{length:,}", *(f"{x:,} ({y:,})" for x, y in zip(numbers, paper, strict=True))]


def table4(found):
    """Shapes and recipe by size, the paper's in brackets; it does not give the shape of its 320M."""
    scale = found.scale
    yield ["", *scale.sizes]
    vocab = Tokenizer.load(Path(scale.data_dir) / "tokenizer.json").n_vocab
    shapes = {size: (n_layer, n_head, n_embd) for size, (n_layer, n_head, n_embd) in scale.sizes.items()}
    of = {size: ModelConfig(n_layer=a, n_head=b, n_embd=c, vocab_size=vocab) for size, (a, b, c) in shapes.items()}
    rows = {name: [(shapes[s][i], TABLE4.get(s, ("-",) * 3)[i]) for s in of] for i, name in enumerate(SHAPE)}
    rows["FFN width"] = [(of[s].n_hidden, TABLE4[s][2] * 7 // 2 if s in TABLE4 else "-") for s in of]
    tokens, batch, _ = scale.lengths[2048]
    recipe = {"vocabulary": (vocab, 50277), "peak learning rate": (6e-4 * scale.rate, 6e-4)}
    recipe |= {"warmup steps": (scale.warmups[120], 120), "steps": (scale.steps, 10_000)}
    rows |= {name: [both] * len(of) for name, both in recipe.items()}
    rows["tokens per step"] = [(tokens * batch, 2048 * 1024)] * len(of)
    for name, cells in rows.items():
        yield [name, *(" ".join((short(ours), f"({short(paper)})")) for ours, paper in cells)]
    yield ["parameters", *(f"{count_parameters(cfg)[0]:,}" for cfg in of.values())]


def short(x):
    """A number of a table: whole ones with commas."""
    return x if isinstance(x, str) else f"{x:,}" if isinstance(x, int) else f"{x:g}"


def table5(found):
    """Validation losses by domain; the paper's in brackets where the domain is one of its own."""
    head = None
    for (mode, size), paper in TABLE5.items():
        job = Job(mode, size)
        losses = scores(found, job, "loss", "val")
        if losses is None:
            raise UserError(f"{job.name} has no losses by domain; make them: `{found.make}`")
        if head is None:
            yield (head := ["", *losses, "Avg"])
        theirs = dict(zip(DOMAINS, paper, strict=False))
        cells = [beside(x, theirs.get(domain)) for domain, x in losses.items()]
        yield [f"{LABELS[mode]} {size}", *cells, beside(scores(found, job, "loss", "val_mean"), paper[-1])]


def accuracy_gap(length):
    def value(found, seed):
        of, common = scored(found, length, seed)
        return np.mean([of["resformer"][t] - of["vanilla"][t] for t in common]) if common else None

    return value


def domain_gap(size):
    def value(found, seed):
        a, b = (found.evaluation(Job(mode, size), seed, "loss") for mode in ("resformer", "vanilla"))
        return a["val_mean"] - b["val_mean"] if a and b else None

    return value


FIGURES |= {
    "tab1": Figure(
        "Zero-shot accuracy on six tasks.",
        claims=tuple(
            Claim(
                f"ResFormer − Transformer at length {n:,}, mean accuracy of the tasks that both are scored on",
                "+0.022",
                accuracy_gap(n),
                above=0.0,
            )
            for n in (2048, 64000)
        ),
        table=table1,
        runs=tuple(Job(mode, length=length) for mode, length in TABLE1),
        tasks="table1",
    ),
    "tab2": Figure("What the training data consists of.", table=table2, reads_data=True),
    "tab3": Figure("Batches by sequence length.", table=table3),
    "tab4": Figure("Models by size.", table=table4, reads_data=True),
    "tab5": Figure(
        "Validation loss by domain (nats per token).",
        claims=tuple(
            Claim(f"ResFormer − Transformer at {size}, mean over domains", gap, domain_gap(size), below=0.0)
            for size, gap in {"82M": "-0.0272", "180M": "-0.0323", "468M": "-0.0269"}.items()
        ),
        table=table5,
        runs=tuple(Job(mode, size) for mode, size in TABLE5),
        tasks="table5",
    ),
}
