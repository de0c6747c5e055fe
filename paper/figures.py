"""The paper's figures and tables as data: the runs of each, how we draw it, and what the paper claims.

The paper is https://arxiv.org/abs/2410.17897; "v5" is its last version, which has more variants and other names.
Read next: reproduce.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from paper import claims, panels, tables
from paper.claims import ENTROPY, EXTREMES, HIGHER, LOWER, Claim, over_vanilla
from paper.scales import SCALES, Job


@dataclass(frozen=True)
class Panel:
    """A part of a figure. Its title and labels may hold what Found.in_words knows of its last run or of the line's."""

    draw: Callable  # of panels.py
    title: str = ""
    lines: tuple = ()  # pairs (label, Job)
    key: object = ""  # what it draws, see panels.py
    has_public: bool = False  # beside these lines those of the public models that --public names

    @property
    def jobs(self):
        return [job for _, job in self.lines]


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper."""

    caption: str
    panels: tuple[Panel, ...] = ()
    claims: tuple[Claim, ...] = ()
    table: Callable | None = None  # found -> rows of texts
    runs: tuple[Job, ...] = ()  # that the table or the claims need and no panel draws
    scored: bool = False  # on the tasks of Table 1

    @property
    def jobs(self):
        """All runs that we need: of the table and the claims, those that we draw, then their baselines."""
        drawn = [job for panel in self.panels for job in panel.jobs]
        minus = [panel for panel in self.panels if panel.draw in panels.MINUS_VANILLA]
        return list(dict.fromkeys([*self.runs, *drawn, *(job.baseline for panel in minus for job in panel.jobs)]))

    @property
    def analysed(self):
        """Those of which we draw what analyze.py measured."""
        return {job for panel in self.panels if panel.draw in panels.OF_ANALYSES for job in panel.jobs}

    @property
    def has_public(self):
        return any(panel.has_public for panel in self.panels)

    def shown(self, is_public_named=False):
        """The figure without panels of public models alone, where nobody names any."""
        kept = [panel for panel in self.panels if panel.lines or is_public_named]
        return replace(self, panels=tuple(kept))


# -- lines of panels, and claims on pairs of modes


def lines(*modes, label="{0.mode}", **settings):
    """(label, Job) of modes with each combination of settings, which have a value or a tuple of them."""
    values = [value if isinstance(value, tuple) else (value,) for value in settings.values()]
    made = []
    for *point, mode in product(*values, modes):
        made.append((label, Job(mode, **dict(zip(settings, point, strict=True)))))
    return tuple(made)


def lower(*pairs, paper="lower", **settings):
    """Claims on "a b": mode a ends at a lower validation loss than mode b."""
    return tuple(Claim(*(Job(mode, **settings) for mode in pair.split()), paper, LOWER) for pair in pairs)


def compared(caption, modes, *pairs, parts=(("", ""),)):
    """A figure of training losses minus vanilla's, {label: mode}, and claims on pairs of modes. parts: (title, from
    which share of the tokens on) of each panel."""
    jobs = tuple((label, Job(mode)) for label, mode in modes.items())
    return Figure(caption, tuple(Panel(panels.relative, title, jobs, since) for title, since in parts), lower(*pairs))


def sweep_pairs(sweep, best):
    """Every mode of a sweep of λ beats vanilla, and `best` beats the others."""
    others = [mode for mode in sweep.values() if mode != best]
    return [f"{mode} vanilla" for mode in (best, *others)] + [f"{best} {mode}" for mode in others]


MINUS = {"value": claims.gap, "what": ": loss minus vanilla's"}
INSPECTED = "468M"  # the size of the models in Figures 1, 2, 18, 19 and 21
FOUR = ("vanilla", "neutreno", "resformer", "svformer")
SIZES, TABLE5_SIZES = ("82M", "180M", "320M", "468M"), ("82M", "180M", "468M")
SV, OF_LENGTH = Job("svformer"), "{0.mode}, length {0.length}"
SV_LENGTHS = lines("svformer", label=OF_LENGTH, length=tuple(SCALES["paper"].lengths))
SV_RATES = lines("svformer", label="rate {0.rate}", lr=(1e-4, 3e-4, 6e-4))
SV_WARMUPS = lines("svformer", label="{0.warmup} steps of warmup", warmup=(120, 1200))
INSPECTED_FOUR = lines(*FOUR, size=INSPECTED)
BEFORE = Job(size=INSPECTED, is_trained=False)
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
        (Claim(BEFORE, None, "-0.009 to +0.002", (-0.009, 0.002), claims.ENTROPY_MINUS_UNIFORM,
               ": entropy minus uniform attention's"),
         over_vanilla("resformer", ENTROPY, INSPECTED), over_vanilla("svformer", ENTROPY, INSPECTED))),
    "fig2": Figure(
        "The first token's importance, the norm of its value and of its hidden state. The table has each model's "
        "extreme over the layers, of the norms relative to other tokens.",
        tuple(Panel(panels.layers, "", INSPECTED_FOUR, key) for key in FIRST),
        tuple(over_vanilla("resformer", what, INSPECTED) for what in EXTREMES),
        table=lambda found: tables.concentration_table(found, INSPECTED_FOUR)),
    "fig4": Figure(
        "How close two cheap substitutes come to cross-layer attention (Eq 2).",
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
               lines("vanilla", "resformer", size=SIZES)),
         Panel(panels.along, "loss along training\n(in the paper ResFormer saves 13.6 % of the tokens)",
               lines("vanilla", "resformer", size="468M"))),
        (Claim(Job("resformer"), None, "0.104", HIGHER, claims.saved_parameters(*SIZES), ": share of parameters saved"),
         Claim(Job("resformer", "468M"), None, "0.136", HIGHER, claims.saved_tokens, ": share of tokens saved"))),
    "fig7": Figure(
        "ResFormer by length, and beside other modes.",
        (Panel(panels.relative, "by length", lines("resformer", label=OF_LENGTH, length=(2048, 32000, 64000))),
         Panel(panels.relative, "by mode", lines("denseformer", "neutreno", "resformer", "resformer_neutreno"))),
        (*lower("resformer vanilla", "resformer denseformer", "resformer neutreno", "resformer_neutreno resformer"),
         *lower("resformer vanilla", length=32000), *lower("resformer vanilla", length=64000))),
    "fig8": compared(
        "ResFormer with other weights λ of V_1. The paper: 2 is best.",
        LAMBDAS | {"ResFormer": "resformer"}, *sweep_pairs(LAMBDAS, "resformer_lambda"),
        parts=(("all of training", ""), ("the last half", 0.5))),
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
               tuple(("", job) for _, job in SV_LENGTHS))),
        # a noisy point spoils four of ten pairs, so most of them are enough
        (Claim(Job("svformer"), None, "all", (0.5, claims.math.inf), claims.later_when_longer,
               ": share of pairs of lengths whose longer one is overtaken later"),
         Claim(*(Job("svformer", length=n) for n in (64000, 512)), "lower", LOWER, **MINUS)),
        table=lambda found: tables.critical_table(found, SV_LENGTHS)),
    "fig15": Figure(
        "SVFormer by learning rate, warmup, architecture and size. Dotted: least squares over ln N, without the 2M.",
        (Panel(panels.relative, "SVFormer by learning rate", SV_RATES),
         Panel(panels.relative, "SVFormer by steps of warmup", SV_WARMUPS),
         Panel(panels.relative, "SVFormer by architecture", (("Llama", SV), ("GPT2", Job("svformer", arch="gpt2")))),
         Panel(panels.by_size, "by size\n(in the paper SVFormer needs 12.2 % more parameters)",
               lines("vanilla", "svformer", size=("2M", *TABLE5_SIZES)))),
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
        (*(Claim(Job("resformer", INSPECTED), None, *row, what) for what, row in claims.START_TOKEN.items()),
         *(Claim(Job("vanilla", INSPECTED), None, "", None, r[-1], what) for what, r in claims.START_TOKEN.items()))),
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
# fmt: on
