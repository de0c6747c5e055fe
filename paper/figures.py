"""The paper's figures and tables as data: the runs of each, how we draw it, and what the paper claims.

The paper is https://arxiv.org/abs/2410.17897; "v5" is its last version, which has more variants and other names.
Read next: results.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from paper import claims, panels, tables
from paper.claims import HIGHER, LABELS, LOWER, Claim, gap_change, loss_gap, lower_loss, mode_claims
from paper.panels import page_of_panels
from paper.runs import DEEP, INSPECTED, ONE_RATE, SCALES, Job


@dataclass(frozen=True)
class Panel:
    """A part of a figure. Labels and titles may hold [length], [size], [rate] and [warmup], see Found.in_words."""

    draw: Callable  # of panels.py
    title: str = ""
    lines: tuple = ()  # pairs (label, Job)
    key: str | dict = ""  # the quantity of their analysis, or one for each label
    label: str = ""  # of the y axis

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
    page: Callable = page_of_panels  # how the panels share a page
    same_y: bool = False  # the panels have one y axis, so that a reader can compare them
    scale: str = ""  # the only one that it is made for
    title: str = ""  # where the paper has no number for it

    @property
    def needs(self):
        """{Job: parts of its record that we need besides the last loss}; see panels.NEEDS."""
        needed = {job: {"scores"} if self.scored else set() for job in self.runs}
        for panel in self.panels:
            for job in panel.jobs:
                needed.setdefault(job, set()).update(panels.NEEDS.get(panel.draw, ()))
        for panel in self.panels:
            for job in panel.jobs if panel.draw in panels.MINUS_VANILLA else ():
                needed.setdefault(job.baseline, set()).update(panels.NEEDS.get(panel.draw, ()))
        return needed

    @property
    def jobs(self):
        return list(self.needs)

    def at(self, scale):
        """The figure without the lines and runs that a Scale does not have. A panel with a single line left compares
        nothing, so it goes."""
        kept = []
        for panel in self.panels:
            lines = tuple((label, job) for label, job in panel.lines if scale.has(job))
            if lines == panel.lines or len(lines) > 1:
                kept.append(replace(panel, lines=lines))
        return replace(self, panels=tuple(kept), runs=tuple(filter(scale.has, self.runs)))


# -- lines of panels


def named(*modes, **settings):
    """(the paper's label, Job) of modes."""
    return tuple((LABELS[mode], Job(mode, **settings)) for mode in modes)


def by_size(*modes, sizes):
    return tuple((f"{LABELS[mode]} [size]", Job(mode, size)) for mode in modes for size in sizes)


def by_length(*modes, lengths, lr=None):
    return tuple((f"{LABELS[mode]}, length [length]", Job(mode, length=n, lr=lr)) for n in lengths for mode in modes)


def relative(modes, title=""):
    """A panel of training losses minus vanilla's. modes: {label: mode}."""
    return Panel(panels.relative, title, tuple((label, Job(mode)) for label, mode in modes.items()))


def compared(caption, modes, paper, *pairs):
    """A figure of one such panel, and what the paper says of pairs of its modes."""
    return Figure(caption, (relative(modes),), mode_claims(paper, *pairs))


FOUR = ("vanilla", "neutreno", "resformer", "svformer")
SIZES = ("82M", "180M", "320M", "468M")
LENGTHS = tuple(SCALES["paper"].lengths)
SV = Job("svformer")
SV_LENGTHS = by_length("svformer", lengths=LENGTHS, lr=ONE_RATE)
SV_RATES = tuple(("rate [rate]", Job("svformer", lr=lr)) for lr in (1e-4, 3e-4, 6e-4))
SV_WARMUPS = tuple(("[warmup] steps of warmup", Job("svformer", warmup=n)) for n in (120, 1200))
INSPECTED_FOUR = named(*FOUR, size=INSPECTED)
ENTROPY = "entropy of token importance (nats)"
FIRST = {
    "first": "importance of the first token",
    "value_norm": "norm of the first token's value\nrelative to other tokens",
    "hidden_norm": "norm of the first token's hidden state\nrelative to other tokens",
}
HEAT = {"importance": "importance", "value_norm": "norm of the value", "hidden_norm": "norm of the hidden state"}
TOP = {f"TOP-{k}": f"top_{k}" for k in ("1", "2", "3", "10", "1%")}
EQUATIONS = {"Current Attention (Eq 4)": "eq4", "Identity Mapping (Eq 6)": "eq6"}
LAMBDAS = {f"λ = {x}": f"resformer_lambda_{x}" for x in ("0.2", "0.5", "0.8", "1", "2", "5")}
LAMBDAS["λ = 2"] = "resformer_lambda"  # the paper's λ has the plain name
NEUTRENOS = {f"λ = {x}": f"neutreno_{x}" for x in ("0.2", "0.4", "0.6", "0.8")}
NEUTRENOS["λ = 0.4"] = "neutreno"
SAVED = claims.saving(tables.size_and_loss("resformer"), tables.size_and_loss("vanilla"))


def sweep_pairs(sweep, best):
    """Every mode of a sweep of λ beats vanilla, and `best` beats the others."""
    others = [mode for mode in sweep.values() if mode != best]
    return [f"{mode} vanilla" for mode in (best, *others)] + [f"{best} {mode}" for mode in others]


def longer_claims(*pairs):
    """Claims that one mode ends below another at a length. pairs: (lower, higher, length)."""
    for low, high, n in pairs:
        what = f"{LABELS[low]} − {LABELS[high]} at length [length {n}]"
        yield lower_loss(Job(low, length=n), Job(high, length=n), what)


# fmt: off
FIGURES = {
    "fig1": Figure(
        "Entropy of token importance by layer, before training, in public models and in ours: lower is concentrated. "
        "Uniform causal attention itself favours early tokens, so that a model can lie above it.",
        (Panel(panels.initial, "before training", label=ENTROPY),
         Panel(panels.public, "public models", key="entropy", label=ENTROPY),
         Panel(panels.layers, "trained", INSPECTED_FOUR, "entropy", ENTROPY)),
        (Claim("468M before training: entropy at l = 2,048, mean over layers (nats)", "7.194–7.204",
               lambda found, seed: found.initial(seed), claims.PAPER_ENTROPY),
         claims.more_entropy("resformer", INSPECTED), claims.more_entropy("svformer", INSPECTED)),
    ),
    "fig2": Figure(
        "The first token by layer: what attention it gets, and how long its value and its hidden state are, relative "
        "to other tokens.",
        tuple(Panel(panels.layers, "", INSPECTED_FOUR, key, label) for key, label in FIRST.items()),
        tuple(claims.fewer_extremes(INSPECTED)),
        table=lambda found: tables.concentration_table(found, [job for _, job in INSPECTED_FOUR]),
    ),
    "fig4": Figure(
        "How near two cheap substitutes come to true cross-layer attention (Eq 2) in a trained Transformer.",
        (Panel(panels.layers, "", tuple((name, Job()) for name in EQUATIONS), EQUATIONS, "cosine similarity to Eq 2"),),
        (Claim("similarity to Eq 2: Eq 4's − Eq 6's, mean over layers", "higher",
               lambda found, seed: claims.EQ4(Job(), found, seed) - claims.EQ6(Job(), found, seed), HIGHER),),
    ),
    "fig5": compared(
        "Sharing keys, values or both between every two layers.",
        {"CLAttention": "cla2", "Only Share Keys": "share_k2", "Only Share Values": "share_v2"},
        "of every two layers, sharing values hurts least", "share_v2 share_k2", "share_v2 cla2"),
    "fig6": Figure(
        "Validation loss against parameters, and along one cosine schedule against tokens: how many of each ResFormer "
        "saves.",
        (Panel(panels.scaling, "loss at the end, by size", by_size("vanilla", "resformer", sizes=SIZES)),
         Panel(panels.tokens, "loss along training\n(in the paper ResFormer saves 13.6 % of the tokens)",
               named("vanilla", "resformer", size="468M")),
         Panel(panels.paper, f"the paper's Table 5:\nResFormer needs {SAVED:.1%} fewer parameters")),
        (Claim("share of parameters that ResFormer saves", "0.104",
               claims.saved_parameters("resformer", *SIZES), HIGHER),
         Claim("share of tokens that ResFormer saves at [size 468M]", "0.136", claims.saved_tokens, HIGHER)),
    ),
    "fig7": Figure(
        "ResFormer by length, and beside other ways to pass information up.",
        (Panel(panels.relative, "by length", by_length("resformer", lengths=(2048, 32000, 64000))),
         Panel(panels.relative, "by mode", named("denseformer", "neutreno", "resformer", "resformer_neutreno"))),
        (*mode_claims("ResFormer beats DenseFormer and NeuTRENO; with NeuTRENO it is better still",
                      "resformer vanilla", "resformer denseformer", "resformer neutreno",
                      "resformer_neutreno resformer"),
         *longer_claims(("resformer", "vanilla", 32000), ("resformer", "vanilla", 64000))),
    ),
    "fig8": compared(
        "ResFormer with other weights λ of the first layer's values.", LAMBDAS | {"ResFormer": "resformer"},
        "every λ beats vanilla, 2 is best", *sweep_pairs(LAMBDAS, "resformer_lambda")),
    "fig9": compared(
        "A residual from layer 1 on values, keys or queries.", {"Value": "resformer", "Key": "key", "Query": "query"},
        "a residual helps on values, not on queries or keys", "resformer vanilla", "vanilla query", "vanilla key"),
    "fig10": compared(
        "Layer 1's values by a layer's own attention, by identity, or by true cross-layer attention.",
        {"Current Attention": "resformer", "Identity Mapping": "identity", "Cross Layer Attention": "cross"},
        "identity mapping harms, cross-layer attention ends above ResFormer", "vanilla identity", "resformer cross"),
    "fig11": compared(
        "Which earlier layers' values a layer adds.",
        {"Only First layer": "resformer", "One Adjacent layer": "resformer_prev",
         "All Previous layer": "resformer_all"},
        "the first layer is the source, not the one before or all",
        "resformer resformer_prev", "resformer resformer_all"),
    "fig12": Figure(
        "Spectra of value states: eigenvalues of layer 1, and the largest one of each layer.",
        (Panel(panels.spectrum, "eigenvalues of layer 1", by_size("vanilla", "resformer", sizes=tables.PARAMETERS)),
         Panel(panels.layers, "largest eigenvalue of each layer",
               by_size("vanilla", "resformer", sizes=("180M", "468M")), "value_largest", "largest eigenvalue")),
        tuple(claims.over_vanilla("resformer", size, "ln of a layer's largest eigenvalue, mean over layers", "larger",
                           claims.LOG_EIGENVALUE, HIGHER) for size in ("180M", "468M")),
    ),
    "fig13": Figure(
        "SVFormer beside other methods with a smaller KV cache.",
        (Panel(panels.relative, "about 1/2 of the KV cache",
               by_length("svformer", "gqa2", "cla2", lengths=(2048, 64000))),
         Panel(panels.relative, "about 1/8 of the KV cache",
               named("svformer_gqa4", "gqa8", "cla2_gqa4", length=64000))),
        (*mode_claims("at length 2,048 GQA2 beats SVFormer", "gqa2 svformer"),
         *longer_claims(("svformer", "gqa2", 64000), ("svformer", "cla2", 64000),
                        ("svformer_gqa4", "gqa8", 64000), ("svformer_gqa4", "cla2_gqa4", 64000))),
    ),
    "fig14": Figure(
        "SVFormer by length, and the step at which vanilla overtakes it.",
        (Panel(panels.relative, "SVFormer, both at rate [rate]", SV_LENGTHS),
         Panel(panels.critical_points, "the step at which vanilla overtakes it", SV_LENGTHS)),
        # a noisy point spoils four of ten pairs, so most of them are enough
        (Claim("share of pairs of lengths whose longer one has the later critical point", "all",
               claims.later_when_longer, (0.5, claims.math.inf)),
         Claim("SVFormer − Transformer, at length [length 64000] minus at [length 512]", "lower",
               gap_change(*(Job("svformer", length=n, lr=ONE_RATE) for n in (64000, 512))), LOWER)),
        table=lambda found: tables.critical_table(found, found.labels(SV_LENGTHS)),
    ),
    "fig15": Figure(
        "What SVFormer's loss against vanilla's depends on: learning rate, warmup, architecture, size.",
        (Panel(panels.relative, "SVFormer by learning rate", SV_RATES),
         Panel(panels.relative, "SVFormer by steps of warmup", SV_WARMUPS),
         Panel(panels.relative, "SVFormer by architecture", (("Llama", SV), ("GPT2", Job("svformer", arch="gpt2")))),
         Panel(panels.scaling, "by size\n(in the paper SVFormer needs 12.2 % more parameters)",
               by_size("vanilla", "svformer", sizes=("2M", *tables.PARAMETERS)))),
        (*(Claim(f"SVFormer − Transformer, at rate [rate {lr}] minus at [rate 6e-4]", "lower",
                 gap_change(Job("svformer", lr=float(lr)), Job("svformer", lr=6e-4)), LOWER)
           for lr in ("1e-4", "3e-4")),
         Claim("SVFormer − Transformer, at [warmup 1200] warmup steps minus at [warmup 120]", "about 0",
               gap_change(Job("svformer", warmup=1200), SV)),
         Claim("SVFormer − Transformer, GPT2's minus Llama's", "about 0", gap_change(Job("svformer", arch="gpt2"), SV)),
         Claim("share of parameters that SVFormer saves", "-0.122",
               claims.saved_parameters("svformer", *tables.PARAMETERS), LOWER)),
        table=lambda found: tables.critical_table(found, found.labels((*SV_RATES, *SV_WARMUPS))),
    ),
    "fig16": compared(
        "Layer 1's values, queries or keys for all layers.",
        {"Value": "svformer", "Query": "share_q", "Key": "share_k"},
        "layer 1's queries or keys for all layers hurt, more than its values",
        "vanilla share_q", "vanilla share_k", "svformer share_q", "svformer share_k"),
    "fig17": compared(
        "SVFormer with its values renewed in more layers.",
        {"First Layer": "svformer", "First + Last Layer": "svformer_2anchors",
         "First + One Middle + Last": "svformer_3anchors", "First + Two Middle + Last": "svformer_4anchors"},
        "the more anchors, the better", "svformer_4anchors svformer_3anchors", "svformer_3anchors svformer_2anchors",
        "svformer_2anchors svformer"),
    "fig18": Figure(
        "Token similarity of hidden states by layer: in public models, or where there are none in ours.",
        (Panel(panels.public, "", INSPECTED_FOUR, "hidden_similarity", "token similarity"),),
    ),
    "fig19": Figure(
        "Importance, value norm and hidden norm of the first hundred tokens, by layer.",
        tuple(Panel(panels.heat, "", INSPECTED_FOUR, key, label) for key, label in HEAT.items()),
        (*claims.start_token("resformer"), *claims.start_token("vanilla")),
        page=panels.page_of_maps,
    ),
    "fig20": Figure(
        "The quantities of Figures 1 and 2 in the base model, with cross-layer attention.",
        tuple(Panel(panels.layers, "", named(*FOUR, "cross"), key, label)
              for key, label in ({"entropy": ENTROPY} | FIRST).items()),
        (claims.more_entropy("resformer", "82M"), *claims.fewer_extremes("82M"), claims.more_entropy("cross", "82M"),
         Claim("Cross Layer Attention − ResFormer: first token's least value norm over layers, relative to other "
               "tokens", "lower: drains stay",
               claims.minus(claims.LEAST_VALUE, Job("cross"), Job("resformer")), LOWER)),
    ),
    "fig21": Figure(
        "The largest token importances of a sequence, by rank and layer.",
        tuple(Panel(panels.layers, LABELS[mode], tuple((name, Job(mode, INSPECTED)) for name in TOP), TOP, "importance")
              for mode in FOUR),
        tuple(claims.over_vanilla(mode, INSPECTED, "largest importance, mean over layers", "lower", claims.TOP_1, LOWER)
              for mode in ("resformer", "svformer")),
        same_y=True,
    ),
    "fig22": compared(
        "NeuTRENO with other λ.", NEUTRENOS, "every λ beats vanilla, 0.4 is best", *sweep_pairs(NEUTRENOS, "neutreno")),
    "tab1": Figure(
        "Zero-shot accuracy on six tasks.",
        claims=tuple(
            Claim(f"ResFormer − Transformer at length [length {n}], mean accuracy of the tasks that both are scored on",
                  "+0.022", claims.accuracy_gap(n), HIGHER) for n in (2048, 64000)),
        table=tables.table1,
        runs=tuple(Job(mode, length=length) for mode, length in tables.PAPER_ACCURACIES),
        scored=True,
    ),
    "tab2": Figure("What the training data consists of.", table=tables.table2),
    "tab3": Figure("Batches by sequence length.", table=tables.table3),
    "tab4": Figure("Models by size.", table=tables.table4),
    "tab5": Figure(
        "Validation loss by domain (nats per token).",
        claims=(*mode_claims("-0.0272", "resformer vanilla"),  # as in Figure 7, so that it counts once
                *(lower_loss(Job("resformer", size), Job(size=size), f"ResFormer − Transformer at [size {size}]", gap)
                  for size, gap in {"180M": "-0.0323", "468M": "-0.0269"}.items())),
        table=tables.table5,
        runs=tuple(Job(mode, size) for mode, size in tables.PAPER_LOSSES),
    ),
}
PAPER = tuple(FIGURES)  # the paper's own, which `all` draws. We draw those below where somebody names them

# -- figures that the paper does not have: first every mode, in the groups in which the paper compares them

MODE_GROUPS = {
    "Figure 5: shared by pairs of layers": "share_v2 share_k2 cla2",
    "Figure 7: ways to pass information up":
        "resformer denseformer neutreno resformer_neutreno resformer_neutreno_literal resformer_denseformer "
        "denseformer_2x2",
    "Figure 8: weight λ of layer 1's values": " ".join((*LAMBDAS.values(), "resformer")),
    "Figure 9: a residual on values, queries or keys": "resformer query key",
    "Figure 10: how layer 1's values are mapped": "resformer identity cross identity_all cross_prev",
    "Figure 11: source of the values": "resformer resformer_prev resformer_all",
    "Figure 13: smaller KV caches": "svformer gqa2 cla2 svformer_gqa4 cla2_gqa4 gqa8",
    "Figure 16: shared by all layers": "svformer share_q share_k",
    "Figure 17: anchors of SVFormer": "svformer svformer_2anchors svformer_3anchors svformer_4anchors",
    "Figure 22: λ of NeuTRENO": " ".join(NEUTRENOS.values()),
    "variants of the paper's last version (v5)":
        "resformer_plus resformer_sparse resformer_lambda resformer_learned resformer hidden probs "
        "resformer_plus_deep resformer_dense scores scaled resformer_v2 resformer_v3 cut resformer_v2_cut "
        "resformer_v3_cut",
    "more sharing of keys and values": "share_q2 cla2_svformer cla4 gqa4 mqa mlkv",
    "variants in other public code":
        "resformer_lerp resformer_head resformer_relu hidden_learned value_embed value_embed_unet value_embed_cycle "
        "value_embed_gated value_embed_gated2",
    "successors":
        "resformer_zero resformer_unit skipv1 fusedkv_lite share_last k_eq_v value_embed_shared xsa gated_attention "
        "gated_attention_heads",
}
FIGURES["modes"] = Figure(
    "Every mode's validation loss minus vanilla's: the paper's modes in the groups in which it compares them, then "
    "others. A mark without a bar is of one seed; inside the band it says little.",
    tuple(Panel(panels.dots, title, tuple((mode, Job(mode)) for mode in modes.split()))
          for title, modes in MODE_GROUPS.items()),
    table=lambda found: tables.modes_table(found, FIGURES["modes"].at(found.scale).jobs),
    page=panels.page_of_dots,
    scale="night",
    title="All modes",
)

# Rates in the paper's units. We leave out 2.4e-3 at 82M: vanilla's loss was 6.1 after 1,200 steps.
RATES = {"82M": (0.75e-4, 1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3)}
TUNED = ("vanilla", "resformer", "svformer", "resformer_lambda", "resformer_plus", "neutreno", "denseformer")
GRIDS = {(size, mode): [Job(mode, size, lr=lr) for lr in RATES[size]] for size in RATES for mode in TUNED}


def claims_on_rates():
    """Each mode against vanilla, each at its best rate; the paper compares them at one rate. Then ResFormer and
    SVFormer against vanilla, both at the same rate."""
    for (size, mode), jobs in GRIDS.items():
        paper, side = "lower, at one rate", LOWER
        if mode == "svformer":
            paper, side = "higher, at one rate", HIGHER
        elif size == "2M":
            paper, side = "", None  # the paper has no other mode of this size
        if mode != "vanilla":
            what = f"{LABELS[mode]} − Transformer at [size {size}], each at its best rate"
            yield Claim(what, paper, claims.gap_at_best(jobs), side)
    for mode, size, lr in (("resformer", "82M", 0.75e-4), ("resformer", "82M", 6e-4), ("svformer", "82M", 0.75e-4),
                           ("svformer", "82M", 3e-4), ("svformer", "82M", 6e-4), ("svformer", "2M", 6e-4)):
        paper, side = ("lower", LOWER) if mode == "resformer" else ("higher", HIGHER)
        what = f"{LABELS[mode]} − Transformer at [size {size}], both at rate [rate {lr}]"
        yield Claim(what, paper, loss_gap(Job(mode, size, lr=lr), Job(size=size, lr=lr)), side)


def rate_lines(size, modes=TUNED):
    return tuple((LABELS[mode], job) for mode in modes for job in GRIDS[size, mode])


FIGURES["rates"] = Figure(
    "Validation loss against the learning rate, and training loss minus vanilla's with each mode at its best rate. The "
    "paper trained every mode at one rate. Here each mode's best of five is chosen by the seed that all rates have; "
    "that seed is also among those that are compared, or the only one. Rates are a factor of 2 apart. Losses more than "
    "0.45 above a panel's lowest are cut off.",
    (Panel(panels.rates, "", rate_lines("82M")),
     Panel(panels.best, "each at its best rate, 95 % intervals", rate_lines("82M", TUNED[1:])),
     Panel(panels.relative, "each mode at its best rate", named(*TUNED[1:])),
     Panel(panels.rates, "", rate_lines("2M"))),
    tuple(claims_on_rates()),
    table=lambda found: tables.rates_table(found, GRIDS),
    scale="night",
    title="Learning rates",
)

# What the paper's last version claims, and a control: does λ = 2 gain only because its values are larger?
FIGURES["v5"] = Figure(
    "Variants of the paper's last version, and a control: vanilla with √5 times its values, which at the start are as "
    "large as the sums of λ = 2.",
    (relative({"ResFormer": "resformer", "Constant (λ = 2)": "resformer_lambda", "Learnable": "resformer_learned",
               "Learnable-Plus": "resformer_plus", "Sparse": "resformer_sparse", "control: √5 V": "scaled"}),),
    (*mode_claims("lower, in notes on v5", "resformer_plus resformer_sparse", "resformer_sparse resformer_lambda",
                  "resformer_lambda resformer_learned", "resformer_learned resformer", "vanilla hidden",
                  "vanilla probs"),
     *(Claim(f"{a} − {b}, validation loss", "", loss_gap(Job(a), Job(b)))  # not the paper's
       for a, b in (("resformer_lambda", "scaled"), ("scaled", "vanilla")))),
    runs=(Job("hidden"), Job("probs")),
    table=lambda found: tables.modes_table(found, FIGURES["v5"].jobs),
    scale="night",
    title="The paper's last version",
)

# What may move the sign of a gain: one thing at a time, at the same number of tokens. Smaller and larger models and
# longer sequences want another rate than the base, so these have two; the others have the base's.
TUNED_RATE, LOWEST_RATES, LOW_RATES, HIGH_RATES = (None,), (0.75e-4, 1.5e-4), (1.5e-4, 3e-4), (3e-4, 6e-4)


def at_rates(rows):
    """Rows (label, Job, its rates) -> pairs (label, Job), one for each rate."""
    return tuple((label, replace(job, lr=lr)) for label, job, rates in rows for lr in rates)


def changed(change):
    return Job("resformer", change=change)


REGIME_LINES = at_rates((
    ("base", Job("resformer"), TUNED_RATE),
    ("width 64, 2 heads", changed("n_embd=64,n_head=2"), HIGH_RATES),
    ("width 160, 5 heads", Job("resformer", "180M"), LOW_RATES),
    ("width 192, 6 heads, 8 layers", Job("resformer", "468M"), LOWEST_RATES),
    ("3 layers", changed("n_layer=3"), HIGH_RATES),
    ("12 layers", changed(DEEP), LOW_RATES),
    ("2 wider heads", changed("n_head=2"), TUNED_RATE),
    ("8 narrower heads", changed("n_head=8"), TUNED_RATE),
    ("shorter: length [length]", Job("resformer", length=512), TUNED_RATE),
    ("longer: length [length]", Job("resformer", length=32000), LOW_RATES),
    ("no weight decay", changed("weight_decay=0.0"), TUNED_RATE),
    ("weight decay 0.5", changed("weight_decay=0.5"), TUNED_RATE),
    ("half the batch, twice the steps",  # night's have 2,048 tokens and 6,000 steps
     changed("batch_tokens=1024,micro_batch=8,max_steps=12000,warmup_steps=200"), TUNED_RATE),
))
FIGURES["regime"] = Figure(
    "What moves ResFormer's gain: its validation loss minus vanilla's, when one thing differs from the base. Where "
    "there are arrows, each mode has the better of two rates, a factor of 2 apart, and arrows have both modes at the "
    "lower or at the higher one. Elsewhere both have the base's. With the width the number of heads differs. Bars are "
    "95 % intervals, where there are several seeds.",
    (Panel(panels.regime, lines=REGIME_LINES),),
    (Claim("ResFormer − Transformer with 12 layers, each at its better rate, validation loss", "lower",
           claims.gap_at_best([replace(changed(DEEP), lr=lr) for lr in LOW_RATES]), LOWER),
     Claim("ResFormer − Transformer, with 12 layers minus with 6, each at its rate", "",
           gap_change(replace(changed(DEEP), lr=1.5e-4), Job("resformer")))),
    table=lambda found: tables.regime_table(found, REGIME_LINES),
    scale="night",
    title="What moves the sign",
)

# Do the gains last when training does? Each run has a schedule of its own: a quarter of night's steps, as many, four
# times as many. The longest sees nearly all of the data.
SCALED = ("resformer", "resformer_lambda", "svformer")
LONG = "max_steps=24000"
LONGER_LINES = at_rates((
    *(("3.1M tokens", Job(mode, change="max_steps=1500"), HIGH_RATES) for mode in SCALED),
    *(("12.3M tokens", Job(mode), TUNED_RATE) for mode in SCALED),
    *(("49.2M tokens", Job(mode, change=LONG), TUNED_RATE) for mode in SCALED),
))
FIGURES["longer"] = Figure(
    "Whether the gains last in longer training: validation loss minus vanilla's at the end of three schedules, and "
    "training loss minus vanilla's along the longest. In the shortest each mode has the better of two rates, in the "
    "others its best at 12.3M tokens. Bars are 95 % intervals, where there are several seeds.",
    (Panel(panels.regime, "at the end of each schedule", LONGER_LINES),
     Panel(panels.relative, "along 49.2M tokens", named(*SCALED, change=LONG))),
    table=lambda found: tables.regime_table(found, LONGER_LINES),
    scale="night",
    title="Longer training",
)

# Do the gains last in larger models?
SIZE_LINES = tuple(
    ("{0} layers, width {2}".format(*SCALES["night"].sizes[size]), Job(mode, size))
    for size in ("82M", "180M", "468M") for mode in SCALED
)


def claims_on_sizes():
    """Two modes against vanilla at each larger size, each at its rate (ResFormer's claims are Table 5's). Then how each
    mode's difference changes from the base size to the largest, of which the paper says nothing."""
    for mode, paper, side in (("resformer_lambda", "lower", LOWER), ("svformer", "higher, at one rate", HIGHER)):
        for size in ("180M", "468M"):
            what = f"{LABELS[mode]} − Transformer at [size {size}], each at its rate"
            yield Claim(what, paper, loss_gap(Job(mode, size), Job(size=size)), side)
    for mode in SCALED:
        what = f"{LABELS[mode]} − Transformer, at [size 468M] minus at [size 82M], each at its rate"
        yield Claim(what, "", gap_change(Job(mode, "468M"), Job(mode)))


FIGURES["sizes"] = Figure(
    "Validation loss minus vanilla's, by size. At the larger sizes vanilla and ResFormer have the best of two or three "
    "rates; λ = 2 and SVFormer were tuned at the smallest alone, and have half of that rate. Bars are 95 % intervals, "
    "where there are several seeds.",
    (Panel(panels.regime, lines=SIZE_LINES),),
    tuple(claims_on_sizes()),
    table=lambda found: tables.regime_table(found, SIZE_LINES),
    scale="night",
    title="Larger models",
)

# What half an hour of a GPU is for, the most valuable runs first
ON_GPU = tuple(
    (f"{LABELS[job.mode]}, rate [rate]", job)
    for job in (Job(), Job("resformer"), Job(lr=2.4e-3), Job("resformer", lr=2.4e-3), SV, Job("neutreno"))
)
FIGURES["gpu"] = Figure(
    "The paper's 82M model, by mode and learning rate, on the same batches.",
    (Panel(panels.tokens, "validation loss", ON_GPU),
     Panel(panels.relative, "training loss", tuple(line for line in ON_GPU if line[1].mode != "vanilla"))),
    tuple(lower_loss(Job(mode, lr=lr), Job(lr=lr), f"{LABELS[mode]} − Transformer, rate [rate {lr}]")
          for mode, lr in (("resformer", 6e-4), ("resformer", 2.4e-3), ("neutreno", 6e-4))),
    scale="gpu",
    title="82M on one GPU",
)
# fmt: on
