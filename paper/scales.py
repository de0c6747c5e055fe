"""Runs in the paper's units, and what these units are at each scale.

A Job says "ResFormer, 82M, length 64,000". A Scale says that this is a model of 738k parameters at length 1,024 on two
cores. Read next: found.py.
"""

import dataclasses
from dataclasses import dataclass, field

LABELS = {  # the paper's names of modes
    "vanilla": "Transformer", "resformer": "ResFormer", "svformer": "SVFormer", "neutreno": "NeuTRENO",
    "denseformer": "DenseFormer", "resformer_neutreno": "ResFormer+NeuTRENO", "cross": "Cross Layer Attention",
    "cla2": "CLA2", "gqa2": "GQA2", "gqa8": "GQA8", "svformer_gqa4": "SVFormer+GQA4", "cla2_gqa4": "CLA2+GQA4",
}  # fmt: skip
PAPER_LR = 6e-4
VOCAB = 50277  # tokens of the paper's tokenizer
# Settings that save a model as it is at initialization: a step at rate 0 moves no weight.
UNTRAINED = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 0.0, "eval_tokens": 1}


@dataclass(frozen=True)
class Job:
    """A training run in the paper's units. With is_trained=False the model is saved at initialization."""

    mode: str = "vanilla"
    size: str = "82M"
    length: int = 2048
    lr: float = PAPER_LR
    warmup: int = 120
    arch: str = "llama"
    is_trained: bool = True

    @property
    def baseline(self):
        """The vanilla run with the same settings."""
        return dataclasses.replace(self, mode="vanilla")


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
    settings: dict = field(default_factory=dict)  # of train.py, in place of those that train_settings computes
    micro: dict = field(default_factory=dict)  # size -> what the micro-batch is divided by

    def rate(self, job):
        """A Job's peak learning rate."""
        return float(f"{job.lr * self.lr_factor:.6g}")

    def name(self, job):
        """The name of a run's folder without its seed, in this scale's own numbers: the model, the mode, and what
        differs from the base."""
        n_layer, _, n_embd = self.sizes[job.size]
        parts = ["base" if job.size == "82M" else f"{n_layer}x{n_embd}", job.mode]
        parts += [f"length{self.lengths[job.length][0]}"] * (job.length != 2048)
        parts += [f"rate{self.rate(job):g}"] * (job.lr != PAPER_LR)
        parts += [f"warmup{self.warmups[job.warmup]}"] * (job.warmup != 120)
        parts += [job.arch] * (job.arch != "llama")
        parts += ["untrained"] * (not job.is_trained)
        return "-".join(parts)


PAPER_SIZES = {
    "2M": (4, 2, 16),
    "82M": (8, 8, 512),
    "180M": (12, 12, 768),
    "320M": (15, 16, 1024),  # the paper names a 320M without its shape: this one has 331M
    "468M": (24, 16, 1024),
}
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
}  # fmt: skip


def train_settings(job, scale, seed, folder):
    """{setting of train.py: value} of a Job."""
    block, batch, micro = scale.lengths[job.length]
    n_layer, n_head, n_embd = scale.sizes[job.size]
    values = {
        "value_mode": job.mode, "arch": job.arch, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd,
        "block_size": block, "batch_tokens": block * batch, "micro_batch": micro // scale.micro.get(job.size, 1) or 1,
        "max_steps": scale.steps, "warmup_steps": scale.warmups[job.warmup],
        "learning_rate": scale.rate(job),
        "eval_every": scale.steps // (scale.evals if job.size == "468M" else 1),
        "save_every": scale.steps // (10 if scale.gpus else 2) or 1, "log_every": scale.steps // 10 or 1, "keep": 1,
        "data_dir": scale.data_dir, "seed": seed, "out_dir": str(folder),
    }  # fmt: skip
    return values | scale.settings | ({} if job.is_trained else UNTRAINED)
