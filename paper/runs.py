"""Runs in the paper's units, and what these units are at each scale.

A Job says "ResFormer, 82M, length 64,000". A Scale says that this is a model of 738k parameters at length 1,024 on two
cores. Read next: found.py.
"""

import ast
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

LABELS = {  # the paper's names of modes
    "vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "neutreno": "NeuTRENO",
    "denseformer": "DenseFormer", "resformer_neutreno": "ResFormer+NeuTRENO", "cross": "Cross Layer Attention",
    "cla2": "CLA2", "gqa2": "GQA2", "gqa8": "GQA8", "svformer_gqa4": "SVFormer+GQA4", "cla2_gqa4": "CLA2+GQA4",
    "resformer_lambda": "ResFormer, λ = 2", "resformer_plus": "Learnable-Plus ResFormer",
    "resformer_learned": "Learnable ResFormer",
}  # fmt: skip
PAPER_LR = 6e-4
VOCAB = 50277  # tokens of the paper's tokenizer
# Sizes that Scale.stands_for resolves: the model in Figures 1, 2, 18, 19 and 21, and one without end-of-text beside it.
INSPECTED, CONTROL = "inspected", "control"
ONE_RATE = "one"  # Figure 14's rate, the same for all modes: Scale.one_rate says which it is
# The change with which a model is saved as it begins: a step at rate 0 moves no weight.
UNTRAINED = "max_steps=1,warmup_steps=0,learning_rate=0.0,eval_tokens=1"


@dataclass(frozen=True)
class Job:
    """A training run in the paper's units."""

    mode: str = "vanilla"
    size: str = "82M"
    length: int = 2048
    lr: float | Literal["one"] | None = None  # None: the rate that the scale has for the mode
    warmup: int = 120
    arch: str = "llama"
    change: str = ""  # what else differs: settings of train.py as `name=value,name=value`

    @property
    def name(self):
        """The name of its folder without the seed: size, length, mode, and what is not the paper's default."""
        lr = "" if self.lr in (None, PAPER_LR) else f"lr{self.lr:g}"
        warmup, arch = f"warmup{self.warmup}" * (self.warmup != 120), self.arch * (self.arch != "llama")
        parts = (self.size, str(self.length), self.mode, lr, warmup, arch, self.change.replace("=", ""))
        return "-".join(filter(None, parts)).replace(",", "-")

    @property
    def baseline(self):
        """The vanilla run with the same settings. If lr is None, vanilla has its own rate."""
        return dataclasses.replace(self, mode="vanilla")


# -- scale night

NIGHT_LR = 3e-4  # in the paper's units
WITH_BOS = "bos=True"  # the inspected model's change: without it no sink forms in so few steps
DEEP = "n_layer=12"  # the change with which plain ResFormer leads most clearly
# The modes that have another rate, by size or change. A mode without one there has 82M's.
NIGHT_RATES = {
    ("82M", "svformer"): 6e-4,
    ("2M", "vanilla"): 6e-4, ("2M", "resformer"): 6e-4, ("2M", "svformer"): 6e-4,
    ("180M", "vanilla"): 1.5e-4, ("180M", "resformer"): 1.5e-4, ("180M", "svformer"): 3e-4,
    ("468M", "vanilla"): 1.5e-4, ("468M", "resformer"): 1.5e-4, ("468M", "svformer"): 3e-4,
    # vanilla's and ResFormer's; we tried no other
    ("180M", "resformer_lambda"): 1.5e-4, ("468M", "resformer_lambda"): 1.5e-4,
    (DEEP, "vanilla"): 1.5e-4, (DEEP, "resformer"): 1.5e-4,
}  # fmt: skip
# The modes that have three seeds at length 2,048, by size and rate. All others have one, because a run takes up to
# 45 minutes.
THREE_SEEDS = {
    ("82M", 0.75e-4): "vanilla resformer svformer",
    ("82M", 3e-4): "vanilla resformer svformer resformer_lambda resformer_lambda_1 resformer_plus neutreno denseformer "
    "resformer_sparse resformer_learned scaled cross",
    ("82M", 6e-4): "vanilla resformer svformer",
    ("2M", 6e-4): "vanilla resformer svformer resformer_lambda resformer_plus neutreno denseformer",
    ("2M", 1.2e-3): "vanilla",
    ("180M", 1.5e-4): "vanilla resformer resformer_lambda",
    ("468M", 1.5e-4): "vanilla resformer resformer_lambda",
    ("468M", 3e-4): "svformer",
}


def n_seeds_at_night(job):
    """How many seeds a Job has at scale night: three where we judge a claim by it."""
    if job == Job(job.mode, job.size, lr=job.lr):
        return 3 if job.mode in THREE_SEEDS.get((job.size, job.lr), "").split() else 1
    is_deep = job.change == DEEP and job.lr == 1.5e-4
    return 3 if is_deep or job.change == WITH_BOS else 1


def left_out_at_night(job):
    """Whether scale night does without a Job. Its models have too few heads for gqa8, and gqa4 would be mqa. GQA4's
    combinations, the rate 1e-4 and GPT-2 would each be one seed at a rate that nobody tuned."""
    is_gqa4_or_8 = job.mode in ("gqa8", "gqa4", "svformer_gqa4", "cla2_gqa4")
    return is_gqa4_or_8 or job.lr == 1e-4 or job.arch == "gpt2"


# -- scales


@dataclass(frozen=True)
class Scale:
    """What the paper's units are here."""

    what: str
    sizes: dict  # the paper's size -> layers, heads, width
    lengths: dict  # the paper's length -> tokens, sequences a step, micro-batch
    steps: int
    lr_factor: float  # our rate is the paper's times this
    warmups: dict  # the paper's steps of warmup -> ours
    gpus: int  # ranks of a run; 0: no GPU
    data_dir: str
    prepare: str  # the command that makes the data, without --out_dir
    window: int  # steps in the moving average of training losses, at most a tenth of all (claims.critical_point)
    evals: int  # evaluations of a 468M run (Figure 6); other runs are evaluated at their end
    chunks: int  # of text in an analysis
    n_seeds: Callable = lambda job: 1
    settings: dict = field(default_factory=dict)  # of train.py, in place of those that train_settings computes
    micro: dict = field(default_factory=dict)  # size -> what the micro-batch is divided by
    every: int = 1  # steps that one loss of a figure or a record averages
    lr: float = PAPER_LR  # the usual rate, in the paper's units
    tuned: dict = field(default_factory=dict)  # (size or change, mode) -> another rate
    one_rate: float = PAPER_LR  # every mode's in Figure 14
    of_length: dict = field(default_factory=dict)  # length -> settings of train.py that differ there
    stands_for: dict = field(default_factory=lambda: {INSPECTED: {"size": "468M"}})  # what models of Figure 2 are
    without: tuple[str, ...] = ()  # figures that `all` leaves out
    leaves_out: Callable = lambda job: False

    def has(self, job):
        """Whether this scale makes a Job."""
        has_size = job.size in self.sizes or job.size in self.stands_for
        has_plan = job.length in self.lengths and job.warmup in self.warmups
        return has_size and has_plan and not self.leaves_out(job)

    def here(self, job):
        """The Job with what this scale decides: which model is inspected, and the learning rate."""
        job = dataclasses.replace(job, **self.stands_for.get(job.size, {}))
        of_82m = self.tuned.get(("82M", job.mode), self.lr)
        lr = {None: self.tuned.get((job.change or job.size, job.mode), of_82m), ONE_RATE: self.one_rate}
        return dataclasses.replace(job, lr=lr.get(job.lr, job.lr))


PAPER_SIZES = {
    "2M": (4, 2, 16),
    "82M": (8, 8, 512),
    "180M": (12, 12, 768),
    "320M": (15, 16, 1024),  # the paper names a 320M without its shape: this one has 331M
    "468M": (24, 16, 1024),
}
# We name night's packages, so that the text stays the same when somebody installs another package.
PYSOURCE_NIGHT = (
    "python prepare.py pysource --tokenizer=bpe:2048 --packages=datasets,fontTools,fsspec,huggingface_hub,"
    "matplotlib,mpmath,networkx,numpy,pandas,PIL,pyarrow,sympy,torch,torchgen"
)
ON_CORES = {"eval_tokens": 8192, "dtype": "float32", "compile": False, "device": "cpu"}
SCALES = {
    "paper": Scale(
        "the paper's settings: 8 A100s, 20.97B tokens a run",
        PAPER_SIZES,
        {512: (512, 4096, 128), 2048: (2048, 1024, 32), 8192: (8192, 256, 8), 32000: (32000, 64, 2),
         64000: (64000, 32, 1)},
        steps=10_000, lr_factor=1.0, warmups={120: 120, 1200: 1200}, gpus=8,
        data_dir="data/slimpajama", prepare="python prepare.py slimpajama",
        window=100, evals=10, chunks=1000, micro={"180M": 2, "320M": 4, "468M": 4}, settings={"eval_tokens": 0}),
    "cpu": Scale(
        "a quick look: models of 0.1 to 3.4M parameters on 0.15M tokens each, for 2 cores without a GPU",
        {"2M": (4, 2, 16), "82M": (8, 8, 64), "180M": (8, 8, 96), "320M": (8, 8, 128), "468M": (12, 8, 128)},
        {512: (64, 16, 16), 2048: (128, 8, 8), 8192: (256, 4, 4), 32000: (512, 2, 2), 64000: (1024, 1, 1)},
        steps=150, lr_factor=5.0, warmups={120: 20, 1200: 60}, gpus=0,
        data_dir="data/small", prepare="python prepare.py pysource --tokenizer=bpe:2048 --tokens=12e6",
        window=15, evals=5, chunks=50, settings=ON_CORES),
    "night": Scale(
        "models of 0.5 to 5.1M parameters on 12M tokens each, for 2 cores without a GPU",
        {"2M": (4, 2, 64), "82M": (6, 4, 128), "180M": (6, 5, 160), "468M": (8, 6, 192)},
        # no 64000: at length 1,024 models learn too little in 6,000 steps to be compared
        {512: (32, 64, 64), 2048: (128, 16, 16), 8192: (256, 8, 8), 32000: (512, 4, 4)},
        steps=6000, lr_factor=10.0, warmups={120: 100}, gpus=0,
        data_dir="data/night", prepare=PYSOURCE_NIGHT,
        window=300, every=20, evals=5, chunks=200,
        n_seeds=n_seeds_at_night, leaves_out=left_out_at_night,
        # one_rate: there vanilla overtakes SVFormer, but not at either mode's best rate
        lr=NIGHT_LR, tuned=NIGHT_RATES, one_rate=1.5e-4,
        # tasks are longer than its sequences; spectra need the weights of 18 runs at once
        without=("tab1", "fig12"),
        stands_for={INSPECTED: {"size": "82M", "change": WITH_BOS}, CONTROL: {"size": "82M"}},
        settings=ON_CORES | {"eval_tokens": 0, "dtype": "bfloat16", "compile": True, "attn": "eager",
                             "save_every": 500},
        of_length={32000: {"attn": "sdpa"}},  # there eager attention takes up to twice as long
    ),
}  # fmt: skip


def train_settings(job, scale, seed, folder):
    """{setting of train.py: value} of a Job."""
    job = scale.here(job)
    block, batch, micro = scale.lengths[job.length]
    n_layer, n_head, n_embd = scale.sizes[job.size]
    values = {
        "value_mode": job.mode, "arch": job.arch, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd,
        "block_size": block, "batch_tokens": block * batch, "micro_batch": micro // scale.micro.get(job.size, 1) or 1,
        "max_steps": scale.steps, "warmup_steps": scale.warmups[job.warmup],
        "learning_rate": float(f"{job.lr * scale.lr_factor:.6g}"),
        "eval_every": scale.steps // (scale.evals if job.size == "468M" else 1),
        "save_every": scale.steps // (10 if scale.gpus else 2) or 1, "log_every": scale.steps // 10 or 1, "keep": 1,
        "data_dir": scale.data_dir, "seed": seed, "out_dir": str(folder),
    }  # fmt: skip
    values |= scale.settings | scale.of_length.get(job.length, {})
    for change in filter(None, job.change.split(",")):
        name, value = change.split("=")
        values[name] = ast.literal_eval(value)
    return values
