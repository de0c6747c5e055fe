"""The paper's figures and tables as data: which runs each is made of, how it is drawn, and what the paper claims.

The value residual paper is arXiv 2410.17897; "v5" is its last version, which has more variants and other names.
Read next: tables.py, panels.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from paper import claims, tables
from paper.claims import LABELS, LENGTHS, Claim, gap_change, layer_mean, lower_loss, minus, mode_claims, over_vanilla
from paper.runs import DEEP, INSPECTED, ONE_RATE, SCALES, Job

MINUS_VANILLA = ("relative", "critical", "dots", "best", "regime")  # kinds of panels that need vanilla's runs, too


@dataclass(frozen=True)
class Panel:
    """A part of a figure: how it is drawn (see PANEL_KINDS and draw_figure in panels.py), and its lines, pairs of
    (label, Job). `key`: the quantity of their analysis, one key of analysis.json or one for each label. Labels and
    titles may hold {length}, {size}, {rate} and {warmup}: Found.labels fills in what these are at the scale."""

    kind: str
    title: str = ""
    lines: tuple = ()
    key: str | dict = ""
    label: str = ""  # of the y axis

    @property
    def jobs(self):
        return [job for _, job in self.lines]


@dataclass(frozen=True)
class Figure:
    """A figure or table: what it shows, in one sentence; its panels and claims; the rows of its table, table(found).

    runs: those that the table or the claims need and no panel draws. scored: whether these are scored on the tasks of
    Table 1. title: of one that has no number in the paper."""

    caption: str
    panels: tuple[Panel, ...] = ()
    claims: tuple[Claim, ...] = ()
    table: Callable | None = None
    runs: tuple[Job, ...] = ()
    scored: bool = False
    same_y: bool = False  # the panels have one y axis, so that they can be compared
    scale: str = ""  # the only one that it is made for
    title: str = ""

    @property
    def jobs(self):
        """All runs that it needs."""
        jobs = [*self.runs, *(job for panel in self.panels for job in panel.jobs)]
        jobs += [job.baseline for job in self.jobs_of(*MINUS_VANILLA)]
        return list(dict.fromkeys(jobs))

    def jobs_of(self, *kinds):
        """The runs that are drawn in some kinds of panels."""
        return [job for panel in self.panels if panel.kind in kinds for job in panel.jobs]

    def at(self, scale):
        """The figure without the lines, claims and runs that a Scale does not have. A panel that has lost lines is left
        out unless two are left: one alone compares nothing."""
        panels = []
        for panel in self.panels:
            lines = tuple((label, job) for label, job in panel.lines if scale.has(job))
            if lines == panel.lines or len(lines) > 1:
                panels.append(replace(panel, lines=lines))
        kept = []
        for claim in self.claims:
            if all(map(scale.has, (*claim.jobs, *claim.needs))):
                kept.append(claim)
        return replace(self, panels=tuple(panels), claims=tuple(kept), runs=tuple(filter(scale.has, self.runs)))

    @property
    def analysed(self):
        """The runs whose analysis it needs."""
        return set(self.jobs_of("layers", "spectrum", "heat", "public"))

    @property
    def with_arrays(self):
        """The runs whose analysis.npz it needs."""
        return set(self.jobs_of("spectrum", "heat"))

    @property
    def with_curves(self):
        """The runs whose training losses it needs."""
        jobs = self.jobs_of("relative", "critical", "tokens")
        return {*jobs, *(job.baseline for job in jobs)}


# -- lines of panels


def named(*modes, **settings):
    """(the paper's label, Job) of modes."""
    return tuple((LABELS[mode], Job(mode, **settings)) for mode in modes)


def by_size(*modes, sizes):
    return tuple((f"{LABELS[mode]} {{size}}", Job(mode, size)) for mode in modes for size in sizes)


def by_length(*modes, lengths, lr=None):
    return tuple((f"{LABELS[mode]}, length {{length}}", Job(mode, length=n, lr=lr)) for n in lengths for mode in modes)


def relative_losses(title, lines):
    """Training losses minus vanilla's; lines: pairs (label, Job), or {label: mode}."""
    if isinstance(lines, dict):
        lines = tuple((label, Job(mode)) for label, mode in lines.items())
    return Panel("relative", title, lines)


FOUR = ("vanilla", "neutreno", "resformer", "svformer")
SIZES = ("82M", "180M", "320M", "468M")
SV = Job("svformer")
SV_LENGTHS = by_length("svformer", lengths=LENGTHS, lr=ONE_RATE)
SV_RATES = tuple(("rate {rate}", Job("svformer", lr=lr)) for lr in (1e-4, 3e-4, 6e-4))
SV_WARMUPS = tuple(("{warmup} steps of warmup", Job("svformer", warmup=n)) for n in (120, 1200))
FIRST = {
    "first": "importance of the first token",
    "value_norm": "norm of the first token's value\nrelative to other tokens",
    "hidden_norm": "norm of the first token's hidden state\nrelative to other tokens",
}
ENTROPY = "entropy of token importance (nats)"
TOP = {f"TOP-{k}": f"top_{k}" for k in ("1", "2", "3", "10", "1%")}
EQUATIONS = {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"}
LAMBDAS = {f"λ = {x}": f"resformer_lambda_{x}" for x in ("0.2", "0.5", "0.8", "1", "2", "5")}
LAMBDAS["λ = 2"] = "resformer_lambda"  # the paper's λ has the plain name
NEUTRENOS = {f"λ = {x}": f"neutreno_{x}" for x in ("0.2", "0.4", "0.6", "0.8")}
NEUTRENOS["λ = 0.4"] = "neutreno"


def sweep_claims(sweep, best, paper):
    """Claims that every mode of a sweep of λ beats vanilla, and that `best` beats the others."""
    others = [mode for mode in sweep.values() if mode != best]
    return mode_claims(paper, [(mode, "vanilla") for mode in (best, *others)] + [(best, mode) for mode in others])


SAVED = claims.saving(tables.size_and_loss("resformer"), tables.size_and_loss("vanilla"))
# fmt: off
FIGURES = {
    "fig1": Figure(
        "Entropy of token importance by layer, before training, in public models and in ours: lower is concentrated. "
        "Uniform causal attention itself favours early tokens, so that a model can lie above it.",
        (
            Panel("initial", "before training", label=ENTROPY),
            Panel("public", "public models", key="entropy", label=ENTROPY),
            Panel("layers", "trained", named(*FOUR, size=INSPECTED), "entropy", ENTROPY),
        ),
        (
            Claim("468M before training: entropy at l = 2,048, mean over layers (nats)", "7.194–7.204",
                  lambda found, seed: found.initial(seed),
                  above=min(claims.PAPER_ENTROPY), below=max(claims.PAPER_ENTROPY)),
            claims.more_entropy("resformer", INSPECTED),
            claims.more_entropy("svformer", INSPECTED),
        ),
    ),
    "fig2": Figure(
        "The first token by layer: what attention it gets, and how long its value and its hidden state are, relative "
        "to other tokens.",
        tuple(Panel("layers", "", named(*FOUR, size=INSPECTED), key, label) for key, label in FIRST.items()),
        claims.fewer_extremes("resformer", INSPECTED),
        table=lambda found: tables.concentration_table(found, [Job(mode, INSPECTED) for mode in FOUR]),
    ),
    "fig4": Figure(
        "How near two cheap substitutes come to true cross-layer attention (Eq 2) in a trained Transformer.",
        (Panel("layers", "", tuple((label, Job()) for label in EQUATIONS), EQUATIONS, "cosine similarity to Eq 2"),),
        (Claim("similarity to Eq 2: Eq 4's − Eq 6's, mean over layers", "higher",
               lambda found, seed: layer_mean("eq4", Job(), found, seed) - layer_mean("eq6", Job(), found, seed),
               above=0.0),),
    ),
    "fig5": Figure(
        "Sharing keys, values or both between every two layers.",
        (relative_losses("", {"CLAttention": "cla2", "Only Share Keys": "share_k2", "Only Share Values": "share_v2"}),),
        mode_claims("of every two layers, sharing values hurts least",
                    [("share_v2", "share_k2"), ("share_v2", "cla2")]),
    ),
    "fig6": Figure(
        "Validation loss against parameters, and along one cosine schedule against tokens: how many of each ResFormer "
        "saves.",
        (
            Panel("scaling", "loss at the end, by size", by_size("vanilla", "resformer", sizes=SIZES)),
            Panel("tokens", "loss along training\n(in the paper ResFormer saves 13.6 % of the tokens)",
                  named("vanilla", "resformer", size="468M")),
            Panel("paper", f"the paper's Table 5:\nResFormer needs {SAVED:.1%} fewer parameters"),
        ),
        (
            Claim("share of parameters that ResFormer saves", "0.104",
                  claims.saved_parameters("resformer", SIZES), above=0.0),
            Claim("share of tokens that ResFormer saves at [size 468M]", "0.136", claims.saved_tokens, above=0.0),
        ),
    ),
    "fig7": Figure(
        "ResFormer by length, and beside other ways to pass information up.",
        (
            relative_losses("by length", by_length("resformer", lengths=(2048, 32000, 64000))),
            relative_losses("by mode", named("denseformer", "neutreno", "resformer", "resformer_neutreno")),
        ),
        mode_claims("ResFormer beats DenseFormer and NeuTRENO; with NeuTRENO it is better still",
                    [("resformer", "vanilla"), ("resformer", "denseformer"), ("resformer", "neutreno"),
                     ("resformer_neutreno", "resformer")])
        + tuple(
            lower_loss(Job("resformer", length=n), Job(length=n), f"ResFormer − Transformer at length [length {n}]")
            for n in (32000, 64000)
        ),
    ),
    "fig8": Figure(
        "ResFormer with other weights λ of the first layer's values.",
        (relative_losses("", LAMBDAS | {"ResFormer": "resformer"}),),
        sweep_claims(LAMBDAS, "resformer_lambda", "every λ beats vanilla, 2 is best"),
    ),
    "fig9": Figure(
        "A residual from layer 1 on values, keys or queries.",
        (relative_losses("", {"Value": "resformer", "Key": "key", "Query": "query"}),),
        mode_claims("a residual helps on values, not on queries or keys",
                    [("resformer", "vanilla"), ("vanilla", "query"), ("vanilla", "key")]),
    ),
    "fig10": Figure(
        "Layer 1's values by a layer's own attention, by identity, or by true cross-layer attention.",
        (relative_losses("", {
            "Current Attention": "resformer", "Identity Mapping": "identity", "Cross Layer Attention": "cross",
        }),),
        mode_claims("identity mapping harms, cross-layer attention ends above ResFormer",
                    [("vanilla", "identity"), ("resformer", "cross")]),
    ),
    "fig11": Figure(
        "Which earlier layers' values a layer adds.",
        (relative_losses("", {
            "Only First layer": "resformer", "One Adjacent layer": "resformer_prev",
            "All Previous layer": "resformer_all",
        }),),
        mode_claims("the first layer is the source, not the one before or all",
                    [("resformer", "resformer_prev"), ("resformer", "resformer_all")]),
    ),
    "fig12": Figure(
        "Spectra of value states: eigenvalues of layer 1, and the largest one of each layer.",
        (
            Panel("spectrum", "eigenvalues of layer 1", by_size("vanilla", "resformer", sizes=tables.PARAMETERS)),
            Panel("layers", "largest eigenvalue of each layer", by_size("vanilla", "resformer", sizes=("180M", "468M")),
                        "value_largest", "largest eigenvalue"),
        ),
        tuple(
            over_vanilla("resformer", size, "ln of a layer's largest eigenvalue, mean over layers", "larger",
                         claims.log_eigenvalue, above=0.0)
            for size in ("180M", "468M")
        ),
    ),
    "fig13": Figure(
        "SVFormer beside other methods with a smaller KV cache.",
        (
            relative_losses("about 1/2 of the KV cache", by_length("svformer", "gqa2", "cla2", lengths=(2048, 64000))),
            relative_losses("about 1/8 of the KV cache", named("svformer_gqa4", "gqa8", "cla2_gqa4", length=64000)),
        ),
        mode_claims("at length 2,048 GQA2 beats SVFormer", [("gqa2", "svformer")])
        + tuple(
            lower_loss(Job(a, length=64000), Job(b, length=64000),
                       f"{LABELS[a]} − {LABELS[b]} at length [length 64000]")
            for a, b in (("svformer", "gqa2"), ("svformer", "cla2"), ("svformer_gqa4", "gqa8"),
                         ("svformer_gqa4", "cla2_gqa4"))
        ),
    ),
    "fig14": Figure(
        "SVFormer by length, and the step at which vanilla overtakes it.",
        (
            relative_losses("SVFormer, both at rate {rate}", SV_LENGTHS),
            Panel("critical", "the step at which vanilla overtakes it", SV_LENGTHS),
        ),
        (
            # a noisy point spoils four of ten pairs, so most of them are enough
            Claim("share of pairs of lengths whose longer one has the later critical point", "all",
                  claims.later_when_longer, above=0.5),
            Claim("SVFormer − Transformer, at length [length 64000] minus at [length 512]", "lower",
                  gap_change(*(Job("svformer", length=n, lr=ONE_RATE) for n in (64000, 512))), below=0.0,
                  needs=(Job(length=64000),)),
        ),
        table=lambda found: tables.critical_table(found, found.labels(SV_LENGTHS)),
    ),
    "fig15": Figure(
        "What SVFormer's loss against vanilla's depends on: learning rate, warmup, architecture, size.",
        (
            relative_losses("SVFormer by learning rate", SV_RATES),
            relative_losses("SVFormer by steps of warmup", SV_WARMUPS),
            relative_losses("SVFormer by architecture", (("Llama", SV), ("GPT2", Job("svformer", arch="gpt2")))),
            Panel("scaling", "by size\n(in the paper SVFormer needs 12.2 % more parameters)",
                  by_size("vanilla", "svformer", sizes=("2M", *tables.PARAMETERS))),
        ),
        (
            *(
                Claim(f"SVFormer − Transformer, at rate [rate {rate}] minus at [rate 6e-4]", "lower",
                      gap_change(Job("svformer", lr=float(rate)), Job("svformer", lr=6e-4)), below=0.0,
                      needs=(Job("svformer", lr=float(rate)),))
                for rate in ("1e-4", "3e-4")
            ),
            Claim("SVFormer − Transformer, at [warmup 1200] warmup steps minus at [warmup 120]", "about 0",
                  gap_change(Job("svformer", warmup=1200), SV), needs=(Job("svformer", warmup=1200),)),
            Claim("SVFormer − Transformer, GPT2's minus Llama's", "about 0",
                  gap_change(Job("svformer", arch="gpt2"), SV), needs=(Job("svformer", arch="gpt2"),)),
            Claim("share of parameters that SVFormer saves", "-0.122",
                  claims.saved_parameters("svformer", tuple(tables.PARAMETERS)), below=0.0),
        ),
        table=lambda found: tables.critical_table(found, found.labels((*SV_RATES, *SV_WARMUPS))),
    ),
    "fig16": Figure(
        "Layer 1's values, queries or keys for all layers.",
        (relative_losses("", {"Value": "svformer", "Query": "share_q", "Key": "share_k"}),),
        mode_claims("layer 1's queries or keys for all layers hurt, more than its values",
                    [("vanilla", "share_q"), ("vanilla", "share_k"), ("svformer", "share_q"), ("svformer", "share_k")]),
    ),
    "fig17": Figure(
        "SVFormer with its values renewed in more layers.",
        (relative_losses("", {
            "First Layer": "svformer", "First + Last Layer": "svformer_2anchors",
            "First + One Middle + Last": "svformer_3anchors", "First + Two Middle + Last": "svformer_4anchors",
        }),),
        mode_claims("the more anchors, the better",
                    [("svformer_4anchors", "svformer_3anchors"), ("svformer_3anchors", "svformer_2anchors"),
                     ("svformer_2anchors", "svformer")]),
    ),
    "fig18": Figure(
        "Token similarity of hidden states by layer: in public models, or where there are none in ours.",
        (Panel("public", "", named(*FOUR, size=INSPECTED), "hidden_similarity", "token similarity"),),
    ),
    "fig19": Figure(
        "Importance, value norm and hidden norm of the first hundred tokens, by layer.",
        (Panel("heat", "", named(*FOUR, size=INSPECTED)),),
        (*claims.start_token("resformer"), *claims.start_token("vanilla")),
    ),
    "fig20": Figure(
        "The quantities of Figures 1 and 2 in the base model, with cross-layer attention.",
        tuple(
            Panel("layers", "", named(*FOUR, "cross"), key, label)
            for key, label in ({"entropy": ENTROPY} | FIRST).items()
        ),
        (
            claims.more_entropy("resformer", "82M"),
            *claims.fewer_extremes("resformer", "82M"),
            claims.more_entropy("cross", "82M"),
            Claim("Cross Layer Attention − ResFormer: first token's least value norm over layers, relative to other "
                  "tokens", "lower: drains stay", minus(claims.least_value, Job("cross"), Job("resformer")), below=0.0),
        ),
    ),
    "fig21": Figure(
        "The largest token importances of a sequence, by rank and layer.",
        tuple(
            Panel("layers", LABELS[mode], tuple((label, Job(mode, INSPECTED)) for label in TOP), TOP, "importance")
            for mode in FOUR
        ),
        tuple(
            over_vanilla(mode, INSPECTED, "largest importance, mean over layers", "lower",
                         partial(layer_mean, "top_1"), below=0.0)
            for mode in ("resformer", "svformer")
        ),
        same_y=True,
    ),
    "fig22": Figure(
        "NeuTRENO with other λ.",
        (relative_losses("", NEUTRENOS),),
        sweep_claims(NEUTRENOS, "neutreno", "every λ beats vanilla, 0.4 is best"),
    ),
    "tab1": Figure(
        "Zero-shot accuracy on six tasks.",
        claims=tuple(
            Claim(f"ResFormer − Transformer at length [length {n}], mean accuracy of the tasks that both are scored on",
                  "+0.022", claims.accuracy_gap(n), above=0.0)
            for n in (2048, 64000)
        ),
        table=tables.table1,
        runs=tuple(Job(mode, length=length) for mode, length in tables.PAPER_ACCURACIES),
        scored=True,
    ),
    "tab2": Figure("What the training data consists of.", table=tables.table2),
    "tab3": Figure("Batches by sequence length.", table=tables.table3),
    "tab4": Figure("Models by size.", table=tables.table4),
    "tab5": Figure(
        "Validation loss by domain (nats per token).",
        claims=(
            *mode_claims("-0.0272", [("resformer", "vanilla")]),  # as in Figure 7, so that it counts once
            *(
                lower_loss(Job("resformer", size), Job(size=size), f"ResFormer − Transformer at [size {size}]", gap)
                for size, gap in {"180M": "-0.0323", "468M": "-0.0269"}.items()
            ),
        ),
        table=tables.table5,
        runs=tuple(Job(mode, size) for mode, size in tables.PAPER_LOSSES),
    ),
}
PAPER = tuple(FIGURES)  # the paper's own, which `all` draws. Those below are drawn where they are named

# -- figures that the paper does not have. First every mode, in the groups in which the paper compares them, and modes
# from elsewhere in groups of their own

MODE_GROUPS = {
    "Figure 5: shared by pairs of layers": ("share_v2", "share_k2", "cla2"),
    "Figure 7: ways to pass information up": (
        "resformer", "denseformer", "neutreno", "resformer_neutreno", "resformer_neutreno_literal",
        "resformer_denseformer", "denseformer_2x2"),
    "Figure 8: weight λ of layer 1's values": (*LAMBDAS.values(), "resformer"),
    "Figure 9: a residual on values, queries or keys": ("resformer", "query", "key"),
    "Figure 10: how layer 1's values are mapped": ("resformer", "identity", "cross", "identity_all", "cross_prev"),
    "Figure 11: source of the values": ("resformer", "resformer_prev", "resformer_all"),
    "Figure 13: smaller KV caches": ("svformer", "gqa2", "cla2", "svformer_gqa4", "cla2_gqa4", "gqa8"),
    "Figure 16: shared by all layers": ("svformer", "share_q", "share_k"),
    "Figure 17: anchors of SVFormer": ("svformer", "svformer_2anchors", "svformer_3anchors", "svformer_4anchors"),
    "Figure 22: λ of NeuTRENO": tuple(NEUTRENOS.values()),
    "variants of the paper's last version (v5)": (
        "resformer_plus", "resformer_sparse", "resformer_lambda", "resformer_learned", "resformer", "hidden", "probs",
        "resformer_plus_deep", "resformer_dense", "scores", "scaled", "resformer_v2", "resformer_v3", "cut",
        "resformer_v2_cut", "resformer_v3_cut"),
    "more sharing of keys and values": ("share_q2", "cla2_svformer", "cla4", "gqa4", "mqa", "mlkv"),
    "variants in other public code": (
        "resformer_lerp", "resformer_head", "resformer_relu", "hidden_learned", "value_embed", "value_embed_unet",
        "value_embed_cycle", "value_embed_gated", "value_embed_gated2"),
    "successors": (
        "resformer_zero", "resformer_unit", "skipv1", "fusedkv_lite", "share_last", "k_eq_v", "value_embed_shared",
        "xsa", "gated_attention", "gated_attention_heads"),
}
# fmt: on


FIGURES["modes"] = Figure(
    "Every mode's validation loss minus vanilla's: the paper's modes in the groups in which it compares them, then "
    "others. A mark without a bar is of one seed; inside the band it says little.",
    tuple(Panel("dots", title, tuple((mode, Job(mode)) for mode in modes)) for title, modes in MODE_GROUPS.items()),
    table=lambda found: tables.modes_table(found, FIGURES["modes"].at(found.scale).jobs),
    scale="night",
    title="All modes",
)


# Rates in the paper's units. At 82M 2.4e-3 is left out: vanilla's loss was 6.1 after 1,200 steps.
RATES = {"82M": (0.75e-4, 1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3)}
TUNED = ("vanilla", "resformer", "svformer", "resformer_lambda", "resformer_plus", "neutreno", "denseformer")
GRIDS = {(size, mode): [Job(mode, size, lr=lr) for lr in RATES[size]] for size in RATES for mode in TUNED}


def claims_on_rates():
    """Each mode against vanilla, each at its best rate, beside what the paper says of both at one rate. Then ResFormer
    and SVFormer against vanilla, both at the same rate."""
    for (size, mode), jobs in GRIDS.items():
        if mode == "vanilla":
            continue
        paper, way = "lower, at one rate", {"below": 0.0}
        if mode == "svformer":
            paper, way = "higher, at one rate", {"above": 0.0}
        elif size == "2M":
            paper, way = "", {}  # the paper has no other mode of this size
        what = f"{LABELS[mode]} − Transformer at [size {size}], each at its best rate"
        yield Claim(what, paper, claims.gap_at_best(jobs), **way)
    lower, higher = ("lower", {"below": 0.0}), ("higher", {"above": 0.0})
    for mode, size, lr, (paper, way) in (
        ("resformer", "82M", 0.75e-4, lower),
        ("resformer", "82M", 6e-4, lower),
        ("svformer", "82M", 0.75e-4, higher),
        ("svformer", "82M", 3e-4, higher),
        ("svformer", "82M", 6e-4, higher),
        ("svformer", "2M", 6e-4, higher),
    ):
        what = f"{LABELS[mode]} − Transformer at [size {size}], both at rate [rate {lr}]"
        yield Claim(what, paper, claims.loss_gap(Job(mode, size, lr=lr), Job(size=size, lr=lr)), **way)


def rate_lines(size, modes=TUNED):
    return tuple((LABELS[mode], job) for mode in modes for job in GRIDS[size, mode])


FIGURES["rates"] = Figure(
    "Validation loss against the learning rate, and training loss minus vanilla's with each mode at its best rate. The "
    "paper trained every mode at one rate. Here each mode's best of five is chosen by the seed that all rates have; "
    "that seed is also among those that are compared, or the only one. Rates are a factor of 2 apart. Losses more than "
    "0.45 above a panel's lowest are cut off.",
    (
        Panel("rates", "", rate_lines("82M")),
        Panel("best", "each at its best rate, 95 % intervals", rate_lines("82M", TUNED[1:])),
        relative_losses("each mode at its best rate", named(*TUNED[1:])),
        Panel("rates", "", rate_lines("2M")),
    ),
    tuple(claims_on_rates()),
    table=lambda found: tables.rates_table(found, GRIDS),
    scale="night",
    title="Learning rates",
)

# What the paper's last version claims, and a control: does λ = 2 gain only because its values are larger?
# fmt: off
V5 = mode_claims("lower, in notes on v5", [
    ("resformer_plus", "resformer_sparse"), ("resformer_sparse", "resformer_lambda"),
    ("resformer_lambda", "resformer_learned"), ("resformer_learned", "resformer"), ("vanilla", "hidden"),
    ("vanilla", "probs"),
])
# fmt: on
FIGURES["v5"] = Figure(
    "Variants of the paper's last version, and a control: vanilla with √5 times its values, which at the start are as "
    "large as the sums of λ = 2.",
    (
        relative_losses(
            "",
            {
                "ResFormer": "resformer",
                "Constant (λ = 2)": "resformer_lambda",
                "Learnable": "resformer_learned",
                "Learnable-Plus": "resformer_plus",
                "Sparse": "resformer_sparse",
                "control: √5 V": "scaled",
            },
        ),
    ),
    (
        *V5,
        *(  # no claims of the paper
            Claim(f"{a} − {b}, validation loss", "", claims.loss_gap(Job(a), Job(b)))
            for a, b in (("resformer_lambda", "scaled"), ("scaled", "vanilla"))
        ),
    ),
    runs=(Job("hidden"), Job("probs")),
    table=lambda found: tables.modes_table(found, FIGURES["v5"].jobs),
    scale="night",
    title="The paper's last version",
)

# What may move the sign of a gain: one thing at a time, at the same number of tokens. Smaller and larger models and
# longer sequences want another rate than the base, so these have two; the others have the base's.
TUNED_RATE, LOWEST_RATES, LOW_RATES, HIGH_RATES = (None,), (0.75e-4, 1.5e-4), (1.5e-4, 3e-4), (3e-4, 6e-4)
REGIME = (
    ("base", Job("resformer"), TUNED_RATE),
    ("width 64, 2 heads", Job("resformer", change="n_embd=64,n_head=2"), HIGH_RATES),
    ("width 160, 5 heads", Job("resformer", "180M"), LOW_RATES),
    ("width 192, 6 heads, 8 layers", Job("resformer", "468M"), LOWEST_RATES),
    ("3 layers", Job("resformer", change="n_layer=3"), HIGH_RATES),
    ("12 layers", Job("resformer", change=DEEP), LOW_RATES),
    ("2 wider heads", Job("resformer", change="n_head=2"), TUNED_RATE),
    ("8 narrower heads", Job("resformer", change="n_head=8"), TUNED_RATE),
    ("shorter: length {length}", Job("resformer", length=512), TUNED_RATE),
    ("longer: length {length}", Job("resformer", length=32000), LOW_RATES),
    ("no weight decay", Job("resformer", change="weight_decay=0.0"), TUNED_RATE),
    ("weight decay 0.5", Job("resformer", change="weight_decay=0.5"), TUNED_RATE),
    ("half the batch, twice the steps",  # night's have 2,048 tokens and 6,000 steps
     Job("resformer", change="batch_tokens=1024,micro_batch=8,max_steps=12000,warmup_steps=200"), TUNED_RATE),
)  # fmt: skip


def at_rates(rows):
    """Rows (label, Job, its rates) -> pairs (label, Job), one for each rate."""
    return tuple((label, replace(job, lr=lr)) for label, job, rates in rows for lr in rates)


REGIME_LINES = at_rates(REGIME)
DEEPEST = [job for _, job in REGIME_LINES if job.change == DEEP]
FIGURES["regime"] = Figure(
    "What moves ResFormer's gain: its validation loss minus vanilla's, when one thing differs from the base. Where "
    "there are arrows, each mode has the better of two rates, a factor of 2 apart, and arrows have both modes at the "
    "lower or at the higher one. Elsewhere both have the base's. With the width the number of heads differs. Bars are "
    "95 % intervals, where there are several seeds.",
    (Panel("regime", lines=REGIME_LINES),),
    (
        Claim(
            "ResFormer − Transformer with 12 layers, each at its better rate, validation loss",
            "lower",
            claims.gap_at_best(DEEPEST),
            below=0.0,
        ),
        Claim(
            "ResFormer − Transformer, with 12 layers minus with 6, each at its rate",
            "",
            gap_change(Job("resformer", change=DEEP, lr=1.5e-4), Job("resformer")),
        ),
    ),
    table=lambda found: tables.regime_table(found, REGIME_LINES),
    scale="night",
    title="What moves the sign",
)

# Do the gains last when training does? Each run has a schedule of its own: a quarter of night's steps, as many, four
# times as many. The longest sees nearly all of the data.
SCALED = ("resformer", "resformer_lambda", "svformer")
SHORT, LONG = "max_steps=1500", "max_steps=24000"
LONGER_LINES = at_rates(
    [("3.1M tokens", Job(mode, change=SHORT), HIGH_RATES) for mode in SCALED]
    + [("12.3M tokens", Job(mode), TUNED_RATE) for mode in SCALED]
    + [("49.2M tokens", Job(mode, change=LONG), TUNED_RATE) for mode in SCALED]
)
FIGURES["longer"] = Figure(
    "Whether the gains last in longer training: validation loss minus vanilla's at the end of three schedules, and "
    "training loss minus vanilla's along the longest. In the shortest each mode has the better of two rates, in the "
    "others its best at 12.3M tokens. Bars are 95 % intervals, where there are several seeds.",
    (
        Panel("regime", "at the end of each schedule", LONGER_LINES),
        relative_losses("along 49.2M tokens", named(*SCALED, change=LONG)),
    ),
    table=lambda found: tables.regime_table(found, LONGER_LINES),
    scale="night",
    title="Longer training",
)

# Do the gains last in larger models?
BASE, LARGER = "82M", ("180M", "468M")


def claims_on_sizes():
    """Two modes against vanilla at each larger size, each at its rate (ResFormer's claims are Table 5's). Then how each
    mode's difference changes from the base size to the largest, which is no claim of the paper."""
    lower, higher = ("lower", {"below": 0.0}), ("higher, at one rate", {"above": 0.0})
    for mode, (paper, way) in (("resformer_lambda", lower), ("svformer", higher)):
        for size in LARGER:
            what = f"{LABELS[mode]} − Transformer at [size {size}], each at its rate"
            yield Claim(what, paper, claims.loss_gap(Job(mode, size), Job(size=size)), **way)
    for mode in SCALED:
        what = f"{LABELS[mode]} − Transformer, at [size {LARGER[-1]}] minus at [size {BASE}], each at its rate"
        yield Claim(what, "", claims.gap_change(Job(mode, LARGER[-1]), Job(mode, BASE)))


SIZE_LINES = ()
for size in (BASE, *LARGER):
    n_layer, _, width = SCALES["night"].sizes[size]
    SIZE_LINES += tuple((f"{n_layer} layers, width {width}", Job(mode, size)) for mode in SCALED)
FIGURES["sizes"] = Figure(
    "Validation loss minus vanilla's, by size. At the larger sizes vanilla and ResFormer have the best of two or three "
    "rates; λ = 2 and SVFormer were tuned at the smallest alone, and have half of that rate. Bars are 95 % intervals, "
    "where there are several seeds.",
    (Panel("regime", lines=SIZE_LINES),),
    tuple(claims_on_sizes()),
    table=lambda found: tables.regime_table(found, SIZE_LINES),
    scale="night",
    title="Larger models",
)

# What half an hour of a GPU is for, the most valuable runs first
ON_GPU = (
    ("Transformer, rate {rate}", Job()),
    ("ResFormer, rate {rate}", Job("resformer")),
    ("Transformer, rate {rate}", Job(lr=2.4e-3)),
    ("ResFormer, rate {rate}", Job("resformer", lr=2.4e-3)),
    ("SVFormer, rate {rate}", Job("svformer")),
    ("NeuTRENO, rate {rate}", Job("neutreno")),
)
FIGURES["gpu"] = Figure(
    "The paper's 82M model, by mode and learning rate, on the same batches.",
    (
        Panel("tokens", "validation loss", ON_GPU),
        relative_losses("training loss", tuple((label, job) for label, job in ON_GPU if job.mode != "vanilla")),
    ),
    tuple(
        lower_loss(Job(mode, lr=lr), Job(lr=lr), f"{LABELS[mode]} − Transformer, rate [rate {rate}]")
        for mode, lr, rate in (("resformer", None, "6e-4"), ("resformer", 2.4e-3, "2.4e-3"), ("neutreno", None, "6e-4"))
    ),
    scale="gpu",
    title="82M on one GPU",
)
