"""The paper's figures and tables as data: the runs of each, how we draw it, and what the paper claims.

The paper is https://arxiv.org/abs/2410.17897; "v5" is its last version, which has more variants and other names.
Read next: reproduce.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from paper import claims, panels, tables
from paper.claims import ENTROPY, EXTREMES, HIGHER, LOWER, SCHEDULES, Claim, over_vanilla
from paper.runs import CONTROL, DEEP, INSPECTED, ONE_RATE, SCALES, UNTRAINED, Job
from value_modes import TABLE


@dataclass(frozen=True)
class Panel:
    """A part of a figure. Its title and labels may hold what Found.in_words knows of its last run or of the line's."""

    draw: Callable  # of panels.py
    title: str | Callable = ""  # or a function of a found.Found
    lines: tuple = ()  # pairs (label, Job)
    key: object = ""  # what it draws, see panels.py
    has_public: bool = False  # beside these lines those of the public models that --public names

    @property
    def jobs(self):
        return [job for _, job in self.lines]


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper, or one that the paper does not have."""

    caption: str
    panels: tuple[Panel, ...] = ()
    claims: tuple[Claim, ...] = ()
    table: Callable | None = None  # found -> rows of texts
    runs: tuple[Job, ...] = ()  # that the table or the claims need and no panel draws
    scored: bool = False  # on the tasks of Table 1
    mosaic: str = ""  # rows of letters, one for each panel: which cells it takes
    size: tuple = ()  # inches

    @property
    def jobs(self):
        """All runs that we need: of the table and the claims, those that we draw, then their baselines."""
        drawn = [job for panel in self.panels for job in panel.jobs]
        minus = [of for of in self.panels if of.draw in panels.MINUS_VANILLA or of.key in panels.MINUS_VANILLA]
        return list(dict.fromkeys([*self.runs, *drawn, *(job.baseline for panel in minus for job in panel.jobs)]))

    @property
    def analysed(self):
        """Those of which we draw what analyze.py measured."""
        return {job for panel in self.panels if panel.draw in panels.OF_ANALYSES for job in panel.jobs}

    @property
    def has_public(self):
        return any(panel.has_public for panel in self.panels)

    def at(self, scale, is_public_named=False):
        """The figure as a Scale has it. A panel with a single line left compares nothing, so it goes, and one of public
        models alone where nobody names any."""
        here = [replace(of, lines=tuple(line for line in of.lines if scale.has(line[1]))) for of in self.panels]
        kept = [of for of, before in zip(here, self.panels, strict=True) if len(of.lines) > 1 or of == before]
        kept = [of for of in kept if of.lines or is_public_named]
        return replace(self, panels=tuple(kept), runs=tuple(filter(scale.has, self.runs)))


# -- lines of panels, and claims on pairs of modes


def lines(*modes, label="{0.mode}", **settings):
    """(label, Job) of modes with each combination of settings, which have a value or a tuple of them."""
    values = [value if isinstance(value, tuple) else (value,) for value in settings.values()]
    return tuple((label, Job(mode, **dict(zip(settings, of, strict=True)))) for *of, mode in product(*values, modes))


def labelled(modes):
    return tuple((label, Job(mode)) for label, mode in modes.items())


def lower(*pairs, paper="lower", **settings):
    """Claims on "a b": mode a ends at a lower validation loss than mode b."""
    return tuple(Claim(*(Job(mode, **settings) for mode in pair.split()), paper, LOWER) for pair in pairs)


def compared(caption, modes, *pairs, parts=(("", ""),), more=(), **others):
    """A figure of training losses minus vanilla's, {label: mode}, and claims on pairs of modes and `more`. parts:
    (title, from which share of the tokens on) of each panel."""
    shown = tuple(Panel(panels.relative, title, labelled(modes), since) for title, since in parts)
    return Figure(caption, shown, (*lower(*pairs), *more), **others)


ZOOMED = (("all of training", ""), ("the last half", 0.5))


def sweep_pairs(sweep, best):
    """Every mode of a sweep of λ beats vanilla, and `best` beats the others."""
    others = [mode for mode in sweep.values() if mode != best]
    return [f"{mode} vanilla" for mode in (best, *others)] + [f"{best} {mode}" for mode in others]


MINUS = {"minus_vanilla": True, "what": ": loss minus vanilla's"}
FOUR = ("vanilla", "neutreno", "resformer", "svformer")
SIZES, TABLE5_SIZES = ("82M", "180M", "320M", "468M"), ("82M", "180M", "468M")
SV, OF_LENGTH = Job("svformer"), "{0.mode}, length {0.length}"
SV_LENGTHS = lines("svformer", label=OF_LENGTH, length=tuple(SCALES["paper"].lengths), lr=ONE_RATE)
SV_RATES = lines("svformer", label="rate {0.rate}", lr=(1e-4, 3e-4, 6e-4))
SV_WARMUPS = lines("svformer", label="{0.warmup} steps of warmup", warmup=(120, 1200))
INSPECTED_FOUR = lines(*FOUR, size=INSPECTED)
BEFORE = Job(size="468M", change=UNTRAINED)
SINKS = (*INSPECTED_FOUR, *lines("vanilla", label="{0.mode}, without end-of-text first", size=CONTROL))
FIRST = ("first", "value_norm_first", "hidden_norm_first")
TOP = {f"TOP-{k}": f"top_{k}" for k in ("1", "2", "3", "10", "1%")}
EQUATIONS = {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"}
LAMBDAS = {f"λ = {x}": f"resformer_lambda_{x}" for x in ("0.2", "0.5", "0.8", "1", "2", "5")}
LAMBDAS["λ = 2"] = "resformer_lambda"  # the paper's λ has the plain name
NEUTRENOS = {f"λ = {x}": f"neutreno_{x}" for x in ("0.2", "0.4", "0.6", "0.8")}
NEUTRENOS["λ = 0.4"] = "neutreno"

# fmt: off
FIGURES = {
    "fig1": Figure(
        "Entropy of token importance; low is concentrated. A model can lie above uniform causal attention, because "
        "this favours early tokens. Before training the paper's lies between 7.194 and 7.204, uniform attention at "
        "7.2025. Its public models are Llama-3.1-8B, Mistral-7B v0.2 and their Instruct versions.",
        (Panel(panels.before_training, "before training", (("{0.mode}", BEFORE),)),
         Panel(panels.layers, "public models", key="entropy", has_public=True),
         Panel(panels.layers, "trained", INSPECTED_FOUR, "entropy")),
        (Claim(BEFORE, None, "-0.009 to +0.002", (-0.009, 0.002), claims.entropy_minus_uniform,
               ": entropy minus uniform attention's"),
         over_vanilla("resformer", ENTROPY, INSPECTED), over_vanilla("svformer", ENTROPY, INSPECTED))),
    "fig2": Figure(
        "The first token's importance, the norm of its value and of its hidden state. The table has each model's "
        "extreme over the layers, of the norms relative to other tokens.",
        tuple(Panel(panels.layers, "", SINKS, key) for key in FIRST),
        tuple(over_vanilla("resformer", what, INSPECTED) for what in EXTREMES),
        table=lambda found: tables.concentration_table(found, SINKS)),
    "fig4": Figure(
        "How near two cheap substitutes come to cross-layer attention (Eq 2).",
        (Panel(panels.layers, "", tuple((name, Job()) for name in EQUATIONS), EQUATIONS),),
        (Claim(Job(), None, "higher", HIGHER, claims.eq4_minus_eq6, ": similarity to Eq 2, Eq 4's − Eq 6's"),)),
    "fig5": compared(
        "Sharing in pairs of layers. The paper: values hurt least.",
        {"CLAttention": "cla2", "Only Share Keys": "share_k2", "Only Share Values": "share_v2"},
        "share_v2 share_k2", "share_v2 cla2"),
    "fig6": Figure(
        "Parameters saved by ResFormer, and tokens along one cosine schedule. Dotted: least squares over ln N, between "
        "which we measure the parameters.",
        (Panel(panels.by_size, "loss at the end, by size\n(in the paper ResFormer needs 10.4 % fewer parameters)",
               lines("vanilla", "resformer", size=SIZES), panels.LOSS_BY_SIZE),
         Panel(panels.points, "loss along training\n(in the paper ResFormer saves 13.6 % of the tokens)",
               lines("vanilla", "resformer", size="468M"), panels.LOSS_ALONG)),
        (Claim(Job("resformer"), None, "0.104", HIGHER, claims.saved_parameters(*SIZES), ": share of parameters saved"),
         Claim(Job("resformer", "468M"), None, "0.136", HIGHER, claims.saved_tokens, ": share of tokens saved"))),
    "fig7": Figure(
        "ResFormer by length, each at the base's rate, and beside other modes. At scale night this is too high for "
        "vanilla at length 512; Figure regime has the gap at each mode's best.",
        (Panel(panels.relative, "by length", lines("resformer", label=OF_LENGTH, length=(2048, 32000, 64000))),
         Panel(panels.relative, "by mode", lines("denseformer", "neutreno", "resformer", "resformer_neutreno"))),
        (*lower("resformer vanilla", "resformer denseformer", "resformer neutreno", "resformer_neutreno resformer"),
         *lower("resformer vanilla", length=32000), *lower("resformer vanilla", length=64000))),
    "fig8": compared(
        "ResFormer with other weights λ of V_1. The paper: 2 is best.",
        LAMBDAS | {"ResFormer": "resformer"}, *sweep_pairs(LAMBDAS, "resformer_lambda"), parts=ZOOMED),
    "fig9": compared(
        "A residual on values, keys or queries.", {"Value": "resformer", "Key": "key", "Query": "query"},
        "resformer vanilla", "vanilla query", "vanilla key"),
    "fig10": compared(
        "V_1 through a layer's own attention, by identity, or through cross-layer attention.",
        {"Current Attention": "resformer", "Identity Mapping": "identity", "Cross Layer Attention": "cross"},
        "vanilla identity", "resformer cross"),
    "fig11": compared(
        "Which earlier layers' values a layer adds.",
        {"Only First layer": "resformer", "One Adjacent layer": "resformer_prev",
         "All Previous layer": "resformer_all"}, "resformer resformer_prev", "resformer resformer_all"),
    "fig12": Figure(
        "Spectra of value states: eigenvalues of layer 1, and the largest one of each layer.",
        (Panel(panels.spectrum, "eigenvalues of layer 1",
               lines("vanilla", "resformer", label="{0.mode} {0.size}", size=TABLE5_SIZES)),
         Panel(panels.layers, "largest eigenvalue of each layer",
               lines("vanilla", "resformer", label="{0.mode} {0.size}", size=("180M", "468M")), "value_largest")),
        tuple(over_vanilla("resformer", "ln of a layer's largest eigenvalue", size) for size in ("180M", "468M"))),
    "fig13": Figure(
        "Smaller KV caches. The paper: GQA2 is better at length 2,048, SVFormer at 64,000.",
        (Panel(panels.relative, "about 1/2 of the KV cache",
               lines("svformer", "gqa2", "cla2", label=OF_LENGTH, length=(2048, 64000))),
         Panel(panels.relative, "about 1/8 of the KV cache",
               lines("svformer_gqa4", "gqa8", "cla2_gqa4", length=64000))),
        (*lower("gqa2 svformer"),
         *lower("svformer gqa2", "svformer cla2", "svformer_gqa4 gqa8", "svformer_gqa4 cla2_gqa4", length=64000))),
    "fig14": Figure(
        "When vanilla overtakes SVFormer, by length. The paper: the longer, the later. Hollow: not within training in "
        "every seed; then a line through the last tenth of the relative loss predicts the step.",
        (Panel(panels.relative, "SVFormer, both at rate {0.rate}", SV_LENGTHS),
         Panel(panels.critical_points, "the step at which vanilla overtakes it",
               tuple(("", job) for _, job in SV_LENGTHS), panels.CRITICAL)),
        # a noisy point spoils four of ten pairs, so most of them are enough
        (Claim(Job("svformer", lr=ONE_RATE), None, "all", (0.5, claims.math.inf), claims.later_when_longer,
               ": share of pairs of lengths whose longer one is overtaken later"),
         Claim(*(Job("svformer", length=n, lr=ONE_RATE) for n in (64000, 512)), "lower", LOWER, **MINUS)),
        table=lambda found: tables.critical_table(found, SV_LENGTHS)),
    "fig15": Figure(
        "SVFormer by learning rate, warmup, architecture and size. Dotted: least squares over ln N, without the 2M.",
        (Panel(panels.relative, "SVFormer by learning rate", SV_RATES),
         Panel(panels.relative, "SVFormer by steps of warmup", SV_WARMUPS),
         Panel(panels.relative, "SVFormer by architecture", (("Llama", SV), ("GPT2", Job("svformer", arch="gpt2")))),
         Panel(panels.by_size, "by size\n(in the paper SVFormer needs 12.2 % more parameters)",
               lines("vanilla", "svformer", size=("2M", *TABLE5_SIZES)), panels.LOSS_BY_SIZE)),
        (*(Claim(Job("svformer", lr=lr), Job("svformer", lr=6e-4), "lower", LOWER, **MINUS) for lr in (1e-4, 3e-4)),
         *(Claim(job, SV, "about 0", **MINUS) for job in (Job("svformer", warmup=1200), Job("svformer", arch="gpt2"))),
         Claim(SV, None, "-0.122", LOWER, claims.saved_parameters(*TABLE5_SIZES), ": share of parameters saved")),
        table=lambda found: tables.critical_table(found, (*SV_RATES, *SV_WARMUPS))),
    "fig16": compared(
        "Layer 1's values, queries or keys for all layers.",
        {"Value": "svformer", "Query": "share_q", "Key": "share_k"},
        "vanilla share_q", "vanilla share_k", "svformer share_q", "svformer share_k"),
    "fig17": compared(
        "SVFormer with its values renewed in more layers.",
        {"First Layer": "svformer", "First + Last Layer": "svformer_2anchors",
         "First + One Middle + Last": "svformer_3anchors", "First + Two Middle + Last": "svformer_4anchors"},
        "svformer_4anchors svformer_3anchors", "svformer_3anchors svformer_2anchors", "svformer_2anchors svformer"),
    "fig18": Figure(
        "Token similarity of hidden states by layer. The paper's are those of public models, see --public.",
        (Panel(panels.layers, "", INSPECTED_FOUR, "hidden_similarity", has_public=True),)),
    "fig19": Figure(
        "Importance, value norm and hidden norm of the first hundred tokens, by layer. Claims are on the first token, "
        "relative to others, in its extreme layer.",
        tuple(Panel(panels.heat, "", INSPECTED_FOUR, key) for key in ("importance", "value_norm", "hidden_norm")),
        (*(Claim(Job("resformer", INSPECTED), None, *of, what) for what, of in claims.START_TOKEN.items()),
         *(Claim(Job("vanilla", INSPECTED), None, "", None, of[-1], what) for what, of in claims.START_TOKEN.items()))),
    "fig20": Figure(
        "Entropy, and the first token's importance and norms, for the base model, with cross-layer attention.",
        tuple(Panel(panels.layers, "", lines(*FOUR, "cross"), key) for key in ("entropy", *FIRST)),
        (*(over_vanilla("resformer", what, "82M") for what in (ENTROPY, *EXTREMES)),
         over_vanilla("cross", ENTROPY, "82M"),
         Claim(Job("cross"), Job("resformer"), "lower", LOWER, claims.LEAST_VALUE, ": first token's value"))),
    "fig21": Figure(
        "The largest token importances, by rank and layer.",
        tuple(Panel(panels.layers, "{0.mode}", tuple((name, Job(mode, INSPECTED)) for name in TOP), TOP)
              for mode in FOUR),
        tuple(over_vanilla(mode, "largest importance", INSPECTED) for mode in ("resformer", "svformer"))),
    "fig22": compared(
        "NeuTRENO with other λ. The paper: 0.4 is best.", NEUTRENOS, *sweep_pairs(NEUTRENOS, "neutreno")),
    "tab1": Figure(
        "Zero-shot accuracy on six tasks.",
        claims=tuple(Claim(Job("resformer", length=n), None, "+0.022", HIGHER, claims.accuracy_gap,
                           " − vanilla: mean accuracy") for n in (2048, 64000)),
        table=tables.table1, runs=tuple(Job(mode, length=length) for mode, length in tables.PAPER_ACCURACIES),
        scored=True),
    "tab2": Figure("What the training data consists of.", table=tables.table2),
    "tab3": Figure("Batches by sequence length, the paper's in brackets.", table=tables.table3),
    "tab4": Figure("Models by size, the paper's in brackets.", table=tables.table4),
    "tab5": Figure(
        "Validation loss by domain (nats per token).",
        claims=(*lower("resformer vanilla", paper="-0.0272"), *lower("resformer vanilla", paper="-0.0323", size="180M"),
                *lower("resformer vanilla", paper="-0.0269", size="468M")),
        table=tables.table5, runs=tuple(Job(mode, size) for mode, size in tables.PAPER_LOSSES)),
}
PAPER = tuple(FIGURES)  # the paper's own, which `all` draws. Those below are for scale night, by name

# -- figures that the paper does not have: first our answer, then every mode, then what decides its sign

SCALED = ("resformer", "resformer_lambda", "svformer")
SCHEDULE_LINES = (*lines("vanilla", *SCALED[:2], change=SCHEDULES),
                  *lines("svformer", label="{0.mode}, rate {0.rate}", change=SCHEDULES))
OVER_TOKENS = Panel(panels.points, "", SCHEDULE_LINES, panels.LOSS_BY_TOKENS)


def in_tokens(found):
    """The title that says how many times its tokens vanilla needs for the loss of λ = 2."""
    (_, at_12m), (_, at_49m) = (claims.multipliers(found, Job("resformer_lambda", change=of)) for of in SCHEDULES[1:])
    ends = "{:.2f} to {:.2f} ×\nits 12.3M tokens, {:.2f} to {:.2f} × its 49.2M (95 %)"
    return "for the loss of λ = 2 vanilla needs " + ends.format(*at_12m, *at_49m)


FIGURES["first"] = Figure(
    "What value residuals gain. Left: each mode at its best rate, V_n + V_1 at vanilla's; grey cannot be told from "
    "vanilla. Right: three schedules, a run for each point, three for 12.3M tokens.",
    (Panel(panels.forest, "12.3M tokens, three seeds (ticks), 95 % intervals", labelled({
        "Plus: learned weights": "resformer_plus", "λ = 2: V_n + 2 V_1": "resformer_lambda",
        "λ = 1: V_n + V_1": "resformer_lambda_1", "DenseFormer": "denseformer",
        "SVFormer: V_1, 58 % of the cache": "svformer", "NeuTRENO": "neutreno",
        "ResFormer: ½ (V_n + V_1)": "resformer"})),
     replace(OVER_TOKENS, title=in_tokens)), size=(10.5, 4.2))

PUBLISHED = [mode for mode, (*_, source) in TABLE.items() if source and mode != "vanilla"]
MODES = dict.fromkeys([*PUBLISHED, *LAMBDAS.values(), *NEUTRENOS.values(), "scaled"])
FIGURES["modes"] = Figure(
    "Every mode's loss minus vanilla's. Hollow: one seed; in the grey band it tells nothing. Vanilla's ended at "
    "2.4592, and at 2.4812 on the processor of modes with ‡ (triangles); we subtract the mean. Arrows lie beyond the "
    "axis.",
    (Panel(panels.forest, "", labelled({mode: mode for mode in MODES}), panels.family),),
    table=lambda found: tables.modes_table(found, FIGURES["modes"].at(found.scale).jobs), size=(7.5, 13))

# Rates in the paper's units. We leave out 2.4e-3 at 82M: vanilla's loss was 6.1 after 1,200 steps.
RATES = {"82M": (0.75e-4, 1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3)}
TUNED = ("vanilla", "resformer", "svformer", "resformer_lambda", "resformer_plus", "neutreno", "denseformer")
GRID = {size: [line for mode in TUNED for line in lines(mode, label="{0.size}", size=size, lr=RATES[size])]
        for size in RATES}
FIGURES["rates"] = Figure(
    "Each mode at its best rate; losses by rate beside vanilla's (grey), the best filled, above 2.62 cut off. Ticks: "
    "seeds. Seed 42 names a mode's best two rates, and the seeds both have decide. The table has vanilla's "
    "losses, and the others minus vanilla's at the same rate.",
    (Panel(panels.forest, "each at its best rate", lines(*TUNED[1:], lr=RATES["82M"])),
     *(Panel(panels.rates, "{0.mode}", lines("vanilla", mode, lr=RATES["82M"]), panels.LOSS_BY_RATE) for mode in (
         "resformer", "resformer_lambda", "resformer_plus", "svformer", "neutreno", "denseformer"))),
    table=lambda found: tables.gaps_table(found, (*GRID["82M"], *GRID["2M"])),
    runs=tuple(job for _, job in (*GRID["82M"], *GRID["2M"])), mosaic="AABCD\nAAEFG", size=(12.5, 5.5))

# What the paper's last version claims, and a control: does λ = 2 gain only because its values are larger?
FIGURES["v5"] = compared(
    "Variants of v5, known from others' notes, and a control: √5 times vanilla's values, at the start as large as with "
    "λ = 2. The table has the learned weights.",
    {"ResFormer": "resformer", "Constant (λ = 2)": "resformer_lambda", "Learnable": "resformer_learned",
     "Learnable-Plus": "resformer_plus", "Sparse": "resformer_sparse", "control: √5 V": "scaled"},
    "resformer_plus resformer_sparse", "resformer_sparse resformer_lambda", "resformer_lambda resformer_learned",
    "resformer_learned resformer", "vanilla hidden", "vanilla probs", parts=ZOOMED,
    more=(Claim(Job("resformer_lambda"), Job("scaled")), Claim(Job("scaled"), Job())),
    runs=(Job("hidden"), Job("probs")), table=tables.weights_table)

# What may move the sign of a gain: one thing at a time, at the same number of tokens. Smaller and larger models and
# longer sequences want another rate than the base, so these have two or three; the others have the base's.
LOW_RATES, HIGH_RATES = (1.5e-4, 3e-4), (3e-4, 6e-4)
DEEPER = Job("resformer", change=DEEP)
REGIME_LINES = tuple(line for label, settings in {
    "base": {},
    "width 64, 2 heads": {"change": "n_embd=64,n_head=2", "lr": HIGH_RATES},
    "width 160, 5 heads": {"size": "180M", "lr": LOW_RATES},
    "width 192, 6 heads, 8 layers": {"size": "468M", "lr": (0.75e-4, 1.5e-4)},
    "3 layers": {"change": "n_layer=3", "lr": HIGH_RATES},
    "12 layers": {"change": DEEP, "lr": (0.75e-4, *LOW_RATES)},
    "2 wider heads": {"change": "n_head=2"},
    "8 narrower heads": {"change": "n_head=8"},
    "length 32": {"length": 512},
    "length 512": {"length": 32000, "lr": LOW_RATES},
    "no weight decay": {"change": "weight_decay=0.0"},
    "weight decay 0.5": {"change": "weight_decay=0.5"},
    "half the batch, twice the steps":  # night's have 2,048 tokens and 6,000 steps
        {"change": "batch_tokens=1024,micro_batch=8,max_steps=12000,warmup_steps=200"},
}.items() for line in lines("resformer", label=label, **settings))
FIGURES["regime"] = Figure(
    "ResFormer's loss minus vanilla's when one thing differs from the base, each at the best rate tried. Hollow: one "
    "seed; in the grey band it tells nothing.",
    (Panel(panels.forest, "", REGIME_LINES),),
    (Claim(DEEPER, DEEPER.baseline, "lower", LOWER), Claim(DEEPER, Job("resformer"), **MINUS)),
    table=lambda found: tables.gaps_table(found, REGIME_LINES), size=(7.5, 4.8))

# Do the gains last when training does? Each run has a schedule of its own: a quarter of night's steps, as many, four
# times as many. The longest sees nearly all of the data.
LONGER_LINES = tuple(
    line for label, change, lr in zip(
        ("3.1M tokens", "12.3M tokens", "49.2M tokens"), SCHEDULES, (HIGH_RATES, None, None), strict=True)
    for mode in SCALED for line in lines(mode, label=label, change=change, lr=lr))
FIGURES["longer"] = Figure(
    "Losses after three schedules, how many times its tokens vanilla needs for them, and training along the longest. "
    "Rates are the best at 12.3M tokens; the table has the better of two at 3.1M. Bars: 95 %, of the seeds' noise and "
    "of how vanilla's curve may go between two points.",
    (OVER_TOKENS, Panel(panels.points, "", tuple(line for line in SCHEDULE_LINES if line[1].mode != "vanilla"),
                        panels.MULTIPLIER_BY_TOKENS),
     Panel(panels.relative, "along 49.2M tokens", lines(*SCALED, change=SCHEDULES[-1]))),
    table=lambda found: tables.gaps_table(found, LONGER_LINES, in_tokens=True),
    runs=tuple(of for _, job in LONGER_LINES for of in (job, job.baseline)), mosaic="AC\nBC", size=(10.5, 7.5))

# Do the gains last in larger models?
FIGURES["sizes"] = Figure(
    "Loss minus vanilla's by size. Above the smallest, vanilla and ResFormer have the best of two or three rates, "
    "λ = 2 and SVFormer half of their rate at the smallest, untuned.",
    (Panel(panels.points, "", (*lines(*SCALED, size=TABLE5_SIZES), ("12 layers", DEEPER)), panels.GAP_BY_SIZE),),
    # of how a gain changes with size the paper says nothing
    tuple(Claim(Job(mode, "468M"), Job(mode), **MINUS) for mode in SCALED),
    table=lambda found: tables.gaps_table(found, lines(*SCALED, label="{0.shape}", size=TABLE5_SIZES)))
# fmt: on


def jobs_at(scale):
    """All Jobs of a Scale, as they are there."""
    return list(dict.fromkeys(scale.here(job) for figure in FIGURES.values() for job in figure.at(scale).jobs))
