"""Every figure and table of the paper by one command: train what it needs, analyse, draw, set beside the paper.

    python reproduce.py fig7 --dry_run                       what would run here: commands, time, disk, memory
    python reproduce.py fig7                                 run it (what is finished is not run again), and draw it
    python reproduce.py all                                  everything at --scale=cpu, on a laptop
    python reproduce.py all --scale=paper --dry_run          the paper's own settings: commands, GPU-hours, disk
    python reproduce.py report                               report.html of all that has been drawn

Names: fig1 fig2 fig4 … fig22, tab1 … tab5 (Figure 3 is a schematic); figures.py says what each is made of. Runs are
described in the paper's units, such as 82M at length 2,048, and a scale says what those are. A run is an ordinary run
of train.py in out/<scale>/<its name>-<seed>. Figures go to results/<scale>/, the numbers beside the paper's to
results/<scale>.json. After a kill the same command goes on.
"""

import base64
import contextlib
import dataclasses
import html
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import plot
from analyze import AnalyzeConfig, Recorder
from configurator import UserError, command_line, run_main, setting
from data import Corpus, Tokenizer
from describe import count_parameters, flops_per_token
from figures import FIGURES, INITIAL, SEEDS, Found, Job, draw, rows
from files import read_json, write_atomic, write_json
from model import GPT
from report import markdown
from runtime import PEAK_FLOPS, Distributed, environment, peak_bytes, pick_dtype
from train import TrainConfig
from value_modes import get_mode, mode_name

MFU = 0.4  # the share of an A100's peak that GPU-hours are computed with, where none is measured
ENOUGH = 3  # failures before anything has worked: something is wrong with the machine, not with a run
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Scale:
    """What the paper's units are: sizes -> (layers, heads, width), lengths -> (tokens, sequences a step, micro-batch).
    The learning rate is the paper's times `rate`; warmups: the paper's steps of warmup -> ours."""

    what: str
    sizes: dict
    lengths: dict
    steps: int
    rate: float
    warmups: dict
    seeds: int  # of each 82M run at length 2,048, the ablations; other runs have one
    gpus: int  # ranks of a run; 0 = no GPU
    data_dir: str
    prepare: str  # the command that makes it, but for --out_dir
    window: int  # steps of the moving average of training losses
    evals: int  # evaluations of a 468M run (Figure 6, right); other runs are evaluated at their end
    chunks: int  # of an analysis
    settings: dict = field(default_factory=dict)  # of train.py, besides
    micro: dict = field(default_factory=dict)  # size -> what the micro-batch is divided by
    tokens: float = 20e9  # of the data
    vocab: int = 50277  # of its tokenizer


PAPER_SIZES = {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "320M": (15, 16, 1024)}
PAPER_SIZES |= {"468M": (24, 16, 1024)}  # the paper names a 320M without its shape: this one has 331M
SLIMPAJAMA = "python prepare.py slimpajama --tokenizer_file=tokenizer.json"
SCALES = {
    "paper": Scale(
        "the paper's settings: 8 A100s, 20.97B tokens a run",
        PAPER_SIZES,
        {512: (512, 4096, 128), 2048: (2048, 1024, 32), 8192: (8192, 256, 8), 32000: (32000, 64, 2),
         64000: (64000, 32, 1)},
        steps=10_000, rate=1.0, warmups={120: 120, 1200: 1200}, seeds=1, gpus=8,
        data_dir="data/slimpajama", prepare=SLIMPAJAMA,
        window=100, evals=10, chunks=1000, micro={"180M": 2, "320M": 4, "468M": 4},
    ),
    "small": Scale(
        "the paper's models and lengths, 0.52B tokens a run on one GPU",
        PAPER_SIZES,
        {512: (512, 1024, 64), 2048: (2048, 256, 16), 8192: (8192, 64, 4), 32000: (32000, 16, 1), 64000: (64000, 8, 1)},
        steps=1000, rate=1.0, warmups={120: 40, 1200: 120}, seeds=1, gpus=1,
        data_dir="data/slimpajama", prepare=SLIMPAJAMA + " --tokens=2e9", tokens=2e9,
        window=100, evals=10, chunks=1000, micro={"180M": 2, "320M": 2, "468M": 4},
    ),
    "cpu": Scale(
        "models of 0.1 to 3.4M parameters on 0.4M tokens each, for 2 cores without a GPU",
        {"2M": (4, 2, 16), "82M": (8, 8, 64), "180M": (8, 8, 96), "320M": (8, 8, 128), "468M": (12, 8, 128)},
        {512: (64, 16, 16), 2048: (128, 8, 8), 8192: (256, 4, 4), 32000: (512, 2, 2), 64000: (1024, 1, 1)},
        steps=400, rate=5.0, warmups={120: 20, 1200: 100}, seeds=3, gpus=0,
        data_dir="data/small",
        prepare="python prepare.py pysource --tokenizer=bpe:2048 --tokens=12e6", tokens=12e6, vocab=2048,
        window=20, evals=5, chunks=200,
        settings={"eval_tokens": 8192, "dtype": "float32", "compile": False, "device": "cpu"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ReproduceConfig:
    """Every setting of reproduce.py."""

    words: tuple[str, ...] = setting((), "fig1 … fig22, tab1 … tab5, all, or report", positional=True)
    scale: Literal["cpu", "small", "paper"] = setting("cpu", "what the paper's sizes, lengths and tokens are here")
    seeds: int = setting(0, "seeds of every run; 0 = the scale's: cpu three for the ablations and one else, others one")
    dry_run: bool = setting(False, "only say what would be run")
    run: bool = setting(True, "train and analyse what is missing; false = only draw what is there")
    jobs: int = setting(0, "runs at a time; 0 = one per core at a scale without GPUs, else one")
    public: tuple[str, ...] = setting((), "Llama or Mistral folders in Hugging Face layout, for fig1 and fig18")
    eval_dir: str = setting("", "local files of tab1's tasks, see eval.py; empty = from the hub")
    out_dir: str = setting("", "folder of the runs; empty = out/<scale>")
    data_dir: str = setting("", "prepared data; empty = what the scale says, which cpu makes itself")
    results_dir: str = setting("results", "folder of the figures and numbers")

    def __post_init__(self):
        known = [*FIGURES, "all", "report"]
        if not self.words or set(self.words) - set(known):
            wrong = next((w for w in self.words if w not in known), "nothing")
            raise ValueError(f"cannot reproduce {wrong!r}; there are {', '.join(known)}")
        if "report" in self.words and len(self.words) > 1:
            raise ValueError("report stands alone: it shows all that has been drawn")
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.seeds > len(SEEDS):
            raise ValueError(f"seeds={self.seeds} is more than the {len(SEEDS)} there are")
        if self.jobs > 1 and self.units.gpus:
            raise ValueError(f"jobs={self.jobs} would share the GPUs of one run; leave it out at scale={self.scale}")
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.scale}")

    @property
    def figures(self):
        asked = {name: figure for name, figure in FIGURES.items() if name in self.words or "all" in self.words}
        if not self.public:
            return asked

        def without_ours(figure):
            panels = (dataclasses.replace(p, jobs={}) if p.kind == "public" else p for p in figure.panels)
            return dataclasses.replace(figure, panels=tuple(panels))

        return {name: without_ours(figure) for name, figure in asked.items()}

    @property
    def units(self):
        """The Scale, with the data folder that was asked for."""
        found = SCALES[self.scale]
        data_dir = self.data_dir or found.data_dir
        return dataclasses.replace(found, data_dir=data_dir, prepare=f"{found.prepare} --out_dir={data_dir}")

    @property
    def public_folders(self):
        """{public model's folder: that of its analysis}; models of one name are told apart by their paths."""
        names = [Path(folder).name for folder in self.public]
        if len(set(names)) < len(names):
            names = [folder.strip("/").replace("/", "-") for folder in self.public]
        return {folder: Path(self.out_dir, "public", name) for folder, name in zip(self.public, names, strict=True)}

    def seeds_of(self, job):
        """The seeds of a Job: of ablations as many as the scale says."""
        ablation = (job.size, job.length) == ("82M", 2048)
        return SEEDS[: self.seeds or (self.units.seeds if ablation else 1)]

    @property
    def command(self):
        """This call, for messages."""
        kept = {"out_dir": f"out/{self.scale}", "data_dir": "", "results_dir": "results", "seeds": 0, "eval_dir": ""}
        given = [f"--{key}={getattr(self, key)}" for key, value in kept.items() if getattr(self, key) != value]
        given += [f"--public={','.join(self.public)}"] * bool(self.public)
        return shlex.join(["python", "reproduce.py", *self.words, f"--scale={self.scale}", *given])


def settings(job, scale, seed, folder):
    """{setting of train.py: value} of a Job."""
    block, batch, micro = scale.lengths[job.length]
    n_layer, n_head, n_embd = scale.sizes[job.size]
    evals = scale.evals if job.size == "468M" else 1
    return {
        "value_mode": job.mode,
        "arch": job.arch,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_embd": n_embd,
        "block_size": block,
        "batch_tokens": block * batch,
        "micro_batch": max(1, micro // scale.micro.get(job.size, 1)),
        "max_steps": scale.steps,
        "warmup_steps": scale.warmups[job.warmup],
        "learning_rate": float(f"{job.lr * scale.rate:.6g}"),
        "eval_every": scale.steps // evals,
        "save_every": max(1, scale.steps // 2 if not scale.gpus else scale.steps // 10),
        "log_every": max(1, scale.steps // 10),
        "keep": 1,
        "data_dir": scale.data_dir,
        "seed": seed,
        "out_dir": str(folder),
    } | scale.settings


def words(values):
    """Settings as the words of a command, those that are train.py's defaults left out."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    return [f"--{key}={value}" for key, value in values.items() if value != defaults[key]] + ["--resume=auto"]


def launcher(scale):
    """What comes before `train.py`."""
    return ["torchrun", f"--nproc_per_node={scale.gpus}"] if scale.gpus > 1 else ["python"]


def vocabulary(scale):
    path = Path(scale.data_dir, "tokenizer.json")
    return Tokenizer.load(path).n_vocab if path.exists() else scale.vocab


@dataclass
class Plan:
    """A run that is to be made: its settings, and what it takes."""

    job: Job
    seed: int
    folder: Path
    values: dict
    analyse: bool
    tasks: set
    vocab: int
    data: str | None  # hash of the data, if it is there
    seconds: float = 0.0  # of training on this machine, or of 8 A100s
    analysis: float = 0.0  # seconds on this machine, where it is the scale's

    @property
    def state(self):
        """done, begun or new."""
        with contextlib.suppress(UserError):
            if plot.read_run(self.folder).finished:
                return "done"
        return "begun" if (self.folder / "metrics.jsonl").exists() else "new"

    def to_analyse(self, chunks):
        return self.analyse and stale(self.folder, chunks)

    def check(self):
        """Raise UserError if the folder holds a run of other settings. Where it lies, how often it saves and on which
        device it goes on may change."""
        path = self.folder / "config.json"
        free = ("out_dir", "data_dir", "device", "value_mode", "keep", "save_every", "log_every")
        old = read_json(path, "the config of a run") if path.exists() else self.values
        changed = [k for k, v in self.values.items() if k not in free and old.get(k) != v]
        if self.data and old.get("data", self.data) != self.data:
            raise UserError(f"{self.folder} was trained on other data; set another --out_dir, or its own --data_dir")
        if old.get("value_mode_name", self.job.mode) != mode_name(get_mode(self.job.mode)):
            raise UserError(f"{self.folder} is of mode {old['value_mode_name']}; set another --out_dir, or remove it")
        if changed:
            what = ", ".join(f"{k}={old.get(k)} instead of {self.values[k]}" for k in changed)
            raise UserError(f"{self.folder} was trained with {what}; set another --out_dir, or remove it")

    @property
    def model(self):
        return TrainConfig(**self.values).model(self.vocab)

    @property
    def tokens(self):
        return self.values["max_steps"] * self.values["batch_tokens"]

    @property
    def disk(self):
        """Bytes: the last checkpoint, with several evaluations the best too, weights and optimizer in fp32."""
        several = self.values["eval_every"] < self.values["max_steps"]
        return 12 * (1 + several) * count_parameters(self.model)[0]


def plans(cfg):
    """The Plans of all runs that the figures need, in the order in which the figures name them."""
    found, vocab, folder = {}, vocabulary(cfg.units), Path(cfg.units.data_dir)
    data = Corpus(folder, 1, verify=False).hash if (folder / "manifest.json").exists() else None
    for figure in cfg.figures.values():
        for job in figure.jobs:
            for seed in cfg.seeds_of(job):
                folder = Path(cfg.out_dir, f"{job.name}-{seed}")
                new = Plan(job, seed, folder, settings(job, cfg.units, seed, folder), False, set(), vocab, data)
                of = found.setdefault((job, seed), new)
                of.analyse |= job in figure.analysed
                if (
                    seed == SEEDS[0] or cfg.seeds
                ):  # tasks cost more than these runs: one seed, but if more are asked for
                    of.tasks |= {figure.tasks} - {""}
    for of in found.values():
        of.check()
    return list(found.values())


# -- what it takes


def step_seconds(values, device, vocab):
    """Seconds of one step of a vanilla model with these settings here, but for the optimizer: the best of three
    micro-batches of random tokens, in train.py's precision, and compiled where it compiles."""
    cfg = TrainConfig(**values | {"value_mode": "vanilla"})
    model, dtype = GPT(cfg.model(vocab)).to(device), pick_dtype(cfg.dtype, device.type)
    if device.type == "cuda" if cfg.compile is None else cfg.compile:
        model = torch.compile(model, dynamic=False)
    idx, best = torch.randint(vocab, (cfg.micro_batch, cfg.block_size), device=device), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(idx, idx.roll(-1, 1))[1]
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best * cfg.accumulation(1)


def analysis_seconds(values, device, vocab, chunks):
    """Seconds of analyze.py's pass over so many chunks with such a model, from one batch of random tokens."""
    cfg = TrainConfig(**values | {"value_mode": "vanilla"})
    model, n = GPT(cfg.model(vocab)).to(device), min(chunks, max(1, AnalyzeConfig.batch_tokens // cfg.block_size))
    recorder, began = Recorder(model), time.perf_counter()
    with torch.inference_mode():
        model.hidden(torch.randint(vocab, (n, cfg.block_size), device=device))
    recorder.close()
    return (time.perf_counter() - began) * chunks / n


def start_seconds():
    """Seconds until a script has imported what it needs."""
    began = time.perf_counter()
    subprocess.run(script("analyze.py", "--help"), capture_output=True)
    return time.perf_counter() - began


def is_here(scale, device):
    """Whether the scale's machine is this one."""
    return not scale.gpus or (scale.gpus == 1 and device.type == "cuda")


def estimate(todo, cfg, device):
    """Fill the Plans' seconds. Where the scale's machine is this one each shape is timed for a moment, and modes go by
    their FLOPs; else all goes by FLOPs, at 40 % of 8 A100s' peak. Returns how, in words."""
    scale, timed = cfg.units, {}
    for of in todo:
        shape = {k: v for k, v in of.values.items() if k not in ("value_mode", "seed", "out_dir", "learning_rate")}
        flops, vanilla, key = flops_per_token(of.model), TrainConfig(**shape).model(of.vocab), str(shape)
        if not is_here(scale, device):
            of.seconds = flops * of.tokens / (PEAK_FLOPS["A100"] * MFU * scale.gpus)
            continue
        if key not in timed:
            given = (of.values, device, of.vocab)
            both = step_seconds(*given), analysis_seconds(*given, scale.chunks)
            timed[key] = [x / flops_per_token(vanilla) for x in both]
        step, analysis = (x * flops for x in timed[key])
        of.seconds = step * of.values["max_steps"] * (of.state != "done")
        of.analysis = analysis * of.to_analyse(scale.chunks)
    how = f"computed: {MFU:.0%} of {scale.gpus} A100s' bf16 peak"
    return f"measured here on {len(timed)} shapes" if is_here(scale, device) else how


def chunk_words(cfg):
    return [f"--chunks={cfg.units.chunks}", f"--data_dir={cfg.units.data_dir}", *device_words(cfg)]


def task_words(tasks, cfg):
    """Of eval.py: which tasks, a table's or one, on which data, and where."""
    where = [f"--corpus={cfg.units.data_dir}"] if tasks in ("loss", "table5") else []
    where += [f"--data_dir={cfg.eval_dir}"] * bool(cfg.eval_dir and not where)
    return [f"--task={tasks}", *where, *device_words(cfg)]


def device_words(cfg):
    """At a scale without GPUs even a machine that has one computes on its cores, all runs alike."""
    return [] if cfg.units.gpus else ["--device=cpu"]


def show_plan(todo, cfg, device, at_once):
    """Print runs, settings, time, disk and memory."""
    how = estimate([of for of in todo if of.state != "done" or of.to_analyse(cfg.units.chunks)], cfg, device)
    print(f"scale {cfg.scale}: {cfg.units.what}; times are {how}\n")
    gpus, lines = max(1, cfg.units.gpus), []
    for of in todo:
        cost = "-" if of.state == "done" else f"{of.seconds * gpus / 3600:,.2f}"
        size = count_parameters(of.model)[0]
        lines.append(
            [f"{of.job.name}-{of.seed}", of.state, f"{size:,}", f"{of.tokens:,}", cost, f"{of.disk / 1e9:.2f}"]
        )
    unit = "GPU-hours" if cfg.units.gpus else "core-hours"
    print(markdown(["run", "state", "parameters", "tokens", unit, "disk (GB)"], lines))
    if cfg.dry_run:
        print(*commands(todo, cfg), "", sep="\n")
    print(totals(todo, cfg, device, at_once))


def totals(todo, cfg, device, at_once):
    """Time, disk and memory of all that is still to be made, in a line."""
    left, gpus, units = [of for of in todo if of.state != "done"], max(1, cfg.units.gpus), cfg.units
    hours, unit = sum(of.seconds for of in left) * gpus / 3600, "GPU-hours" if units.gpus else "core-hours"
    analyses = sum(of.to_analyse(units.chunks) for of in todo) + len(extra(cfg))
    said = [f"{len(todo)} runs, {len(todo) - len(left)} of them done; training takes {hours:,.1f} {unit}"]
    scored = sum(any(unscored(of, group) for group in of.tasks) for of in todo)
    said.append(f"{analyses} analyses and the tasks of {scored} runs come on top")
    start = start_seconds() if is_here(units, device) and left else 0
    seconds = [of.seconds + of.analysis + start * ((of.seconds > 0) + (of.analysis > 0)) for of in todo]
    minutes = max(sum(seconds) / at_once, max(seconds, default=0)) / 60
    said.append(f"{minutes:,.0f} minutes with {at_once} at a time, but for tasks")
    there, disk = Path(units.data_dir, "manifest.json").exists(), sum(of.disk for of in todo) / 1e9
    said.append(f"disk {disk:,.1f} GB" + f" and {units.tokens * 2 / 1e9:.2g} GB of data" * (not there))
    if is_here(units, device):
        said.append(f"memory {memory(left, cfg, device, at_once) / 1e9:.1f} GB")
    return "; ".join(said)


def memory(left, cfg, device, at_once):
    """Bytes of all runs at a time, each as much as their timing has had and twice its weights for the optimizer; or of
    the analysis of the paper's 468M before training, if that is more."""
    had, weights = peak_bytes(device), 4 * max((count_parameters(of.model)[0] for of in left), default=0)
    found = [at_once * (had + 2 * weights)]
    if any(out.name == INITIAL for _, out in extra(cfg)):
        large = TrainConfig(**settings(Job(size="468M"), SCALES["paper"], 0, "")).model(vocabulary(cfg.units))
        found.append(had + 4 * count_parameters(large)[0])
    return max(found)


def commands(todo, cfg):
    """What would be run, as lines of a shell: runs whether done or not, data and models from elsewhere where not."""
    if not Path(cfg.units.data_dir, "manifest.json").exists():
        yield cfg.units.prepare
    for of in todo:
        yield shlex.join([*launcher(cfg.units), "train.py", *words(of.values)])
    for command, _ in extra(cfg):
        yield shlex.join(["python", *command])
    for of in todo:
        if of.analyse:
            yield shlex.join(["python", "analyze.py", str(of.folder), *chunk_words(cfg)])
        for tasks in sorted(of.tasks):
            yield shlex.join(["python", "eval.py", str(of.folder), *task_words(tasks, cfg)])


# -- running


def say(line):
    """Print a line, above the progress bar if there is one."""
    tqdm.write(line)
    sys.stdout.flush()


class Workers:
    """Commands that run side by side, each with its log; stop() ends them, and they save what they have."""

    def __init__(self, at_once, cores):
        self.at_once, self.running, self.stopped = at_once, set(), False
        self.failed, self.worked, self.gave_up = [], 0, False
        self.env = dict(os.environ)
        if cores and at_once > 1:
            self.env |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}

    def call(self, command, folder, log):
        """Run a command in a folder that no other process works in; raises UserError with its last line if it fails."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock, open(folder / log, "a", encoding="utf-8") as out:
            self.wait_for(lock, folder)
            if self.stopped:
                return
            child = subprocess.Popen(command, stdout=out, stderr=out, env=self.env, pass_fds=[lock.fileno()])
            self.running.add(child)
            if self.stopped:  # between the look at it above and now
                child.terminate()
            code = child.wait()
            self.running.discard(child)
        if code and not self.stopped:
            last = (folder / log).read_text(encoding="utf-8").strip().splitlines() or ["nothing"]
            raise UserError(f"`{shlex.join(command)}` failed ({code}): {last[-1]}; all of it is in {folder / log}")

    def attempt(self, f, *given):
        """f(*given), and whether it came to its end. A UserError is noted; ENOUGH of them and no success stop all."""
        if self.stopped:
            return False
        try:
            f(*given)
        except UserError as e:
            say(f"note: {e}")
            self.failed.append(e)
            if len(self.failed) >= ENOUGH and not self.worked:
                self.gave_up = True
                self.stop()
            return False
        self.worked += not self.stopped
        return not self.stopped

    def wait_for(self, lock, folder):
        """Hold a folder's lock, once no other process does: a child outlives a parent that was killed."""
        import fcntl

        waiting = False
        while not self.stopped:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    say(f"{folder}: another process is at work there, waiting for it")
                waiting = True
                time.sleep(0.5)

    def stop(self, *_):
        self.stopped = True
        for child in list(self.running):
            child.terminate()


def script(name, *given):
    return [sys.executable, str(HERE / name), *map(str, given)]


def make_run(of, cfg, workers):
    """Train, analyse and evaluate one Plan, as far as that is not done."""
    if of.state != "done":
        begin = script("train.py")
        if cfg.units.gpus > 1:
            begin = [sys.executable, "-m", "torch.distributed.run", *launcher(cfg.units)[1:], str(HERE / "train.py")]
        workers.call([*begin, *words(of.values)], of.folder, "train.log")
    if of.analyse and stale(of.folder, cfg.units.chunks):
        workers.call(script("analyze.py", of.folder, *chunk_words(cfg)), of.folder, "analyze.log")
    for tasks in sorted(of.tasks):
        evaluate(of, tasks, cfg, workers)


def stale(folder, chunks):
    """Whether a folder's analysis is missing, older than its weights, or of fewer chunks."""
    path = folder / "analysis.json"
    weights = max((p.stat().st_mtime for p in folder.glob("step_*.safetensors")), default=0)
    if not path.exists() or path.stat().st_mtime < weights:
        return True
    return read_json(path, "a file of analyze.py").get("chunks_asked", 0) < chunks


def unscored(of, group):
    """The tasks of a table that a Plan's run has no result of."""
    known = plot.read_eval(of.folder)[1] if (of.folder / "eval.json").exists() else {}
    return [name for name in (["loss"] if group == "table5" else plot.TASKS[:6]) if name not in known]


def evaluate(of, group, cfg, workers):
    """The tasks of a table one by one: a model too short for a task leaves it out; without the files, all the rest."""
    for name in unscored(of, group):
        try:
            workers.call(script("eval.py", of.folder, *task_words(name, cfg)), of.folder, "eval.log")
        except UserError as e:
            say(f"note: {of.folder.name} has no {name}: {e}")
            if "take a model of a longer one" not in str(e):
                break


def prepare(cfg):
    """Make the data of --scale=cpu if it is not there; other scales' is the user's to make."""
    folder = Path(cfg.units.data_dir)
    if (folder / "manifest.json").exists():
        return
    if cfg.units.gpus or cfg.data_dir:
        raise UserError(f"{folder} has no manifest.json; make the data: `{cfg.units.prepare}`")
    print(f"making the data: {cfg.units.prepare}", flush=True)
    if code := subprocess.call([sys.executable, str(HERE / "prepare.py"), *cfg.units.prepare.split()[2:]]):
        raise UserError(f"`{cfg.units.prepare}` failed ({code})")


def extra(cfg):
    """[(command, folder)]: analyses of models that are not trained here, before training and public, as far as they are
    not made."""
    panels, found = {panel.kind for figure in cfg.figures.values() for panel in figure.panels}, []
    out = Path(cfg.out_dir, INITIAL)
    if "initial" in panels and not (out / "analysis.json").exists():
        # the paper's own size and length at any scale: before training few chunks tell the entropy
        given = ["--length=2048", "--chunks=16", "--grad_chunks=0", f"--data_dir={cfg.units.data_dir}"]
        given += [f"--out_dir={out}", *device_words(cfg)]
        found.append((["analyze.py", "--init=config/size_468m.py", *given], out))
    for folder, out in cfg.public_folders.items() if "public" in panels else ():
        if stale(out, cfg.units.chunks):
            given = ["--length=2048", *chunk_words(cfg), "--dtype=bfloat16", "--grad_chunks=0", f"--out_dir={out}"]
            found.append((["analyze.py", folder, *given], out))
    return found


def make(todo, cfg, at_once):
    """Make all runs, `at_once` of them side by side, the longest first. Returns the errors of those that failed, which
    does not keep the others from being made."""
    workers = Workers(at_once, not cfg.units.gpus)
    old = [signal.signal(s, workers.stop) for s in (signal.SIGTERM, signal.SIGINT)]
    side_by_side(sorted(todo, key=lambda of: -of.seconds - of.analysis), cfg, workers)
    workers.env = dict(os.environ)  # the last ones have the machine to themselves
    for (name, *given), folder in extra(cfg):
        if not workers.stopped:
            say(f"{folder}: {name} {given[0]}")
            given = [word.replace("=config/", f"={HERE}/config/") for word in given]
            workers.attempt(workers.call, script(name, *given), folder, "analyze.log")
    for s, handler in zip((signal.SIGTERM, signal.SIGINT), old, strict=True):
        signal.signal(s, handler)
    if workers.stopped and not workers.gave_up:
        raise UserError(f"stopped, what was running has saved its state; go on with `{cfg.command}`")
    return workers.failed


def side_by_side(todo, cfg, workers):
    """make_run of all, as many at a time as there are workers; says after each how much time is left."""
    done, total, began = 0.0, sum(of.seconds + of.analysis for of in todo), time.time()
    bar = tqdm(total=len(todo), unit="run", dynamic_ncols=True, disable=not sys.stderr.isatty())
    with ThreadPoolExecutor(workers.at_once) as pool:
        futures = {pool.submit(workers.attempt, make_run, of, cfg, workers): of for of in todo}
        try:
            for future in as_completed(futures):
                of, made = futures[future], future.result()
                done += of.seconds + of.analysis
                bar.update()
                if workers.stopped:
                    break
                if made:
                    loss = plot.read_run(of.folder)
                    left = (time.time() - began) * (total / done - 1) if done else 0
                    say(f"{of.folder}: validation loss {loss.val[loss.last]:.4f}, {left / 60:.0f} min left")
        except BaseException:
            workers.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            bar.close()


# -- results


def verdict(row):
    """Whether a row goes the paper's way, in words."""
    if row["same"] is None:
        return "" if row["n"] else "not to be told"
    spread = {None: ", one seed", True: ", within the seeds' spread", False: ""}[row["within"]]
    return ("same way" if row["same"] else "the other way") + spread


def cells(row):
    sign = "+" if "−" in row["what"] else ""  # of a difference
    ours = "-" if row["mean"] is None else f"{row['mean']:{sign}.4f}"
    return [
        row["what"],
        ours + (f" ± {row['std']:.4f}" if row["std"] is not None else ""),
        str(row["n"]),
        row["paper"],
        verdict(row),
    ]


CLAIMS = ["", "ours", "seeds", "the paper", "which way"]


def publish(name, figure, cfg, found):
    """Draw a figure or print a table, and write its numbers into the results of the scale."""
    folder, path = Path(cfg.results_dir, cfg.scale), Path(cfg.results_dir, f"{cfg.scale}.json")
    print(f"{name}: {figure.caption}")
    record = {"caption": figure.caption, "out_dir": cfg.out_dir}
    record["runs"] = [f"{job.name}-{seed}" for job in figure.jobs for seed in cfg.seeds_of(job)]
    record["commits"] = trained_by(Path(cfg.out_dir, run) for run in record["runs"])
    if figure.panels:
        draw(folder / f"{name}.png", figure, found)
        record["png"] = f"{cfg.scale}/{name}.png"
    if figure.table:
        header, *lines = figure.table(found)
        record["table"] = [header, *lines]
        print(markdown(header, lines))
    record["rows"] = rows(figure, found)
    if record["rows"]:
        print(markdown(CLAIMS, map(cells, record["rows"])), flush=True)
    known = read_results(path) if path.exists() else {"figures": {}}
    known["figures"][name] = record | {"environment": environment()}
    order = {key: known["figures"][key] for key in FIGURES if key in known["figures"]}
    write_json(path, {"scale": cfg.units.what, "units": units_in_words(cfg.units), "figures": order})


def trained_by(folders):
    """The commits of the code that made these runs."""
    files = [folder / "env.json" for folder in folders]
    return sorted({str(read_json(path, "of train.py").get("commit")) for path in files if path.exists()})


def read_results(path):
    """What `publish` wrote; raises UserError if it is anything else."""
    found = read_json(path, "results of reproduce.py")
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict):
        raise UserError(f"{path} is not results of reproduce.py; remove it, and draw them again")
    return found


def units_in_words(scale):
    """What a scale makes of the paper's units, in a sentence."""
    sizes = ", ".join(f"{name} = {a} layers of {b} heads, {c} wide" for name, (a, b, c) in scale.sizes.items())
    lengths = ", ".join(f"{n:,} = {tokens:,}" for n, (tokens, *_) in scale.lengths.items())
    warmups = ", ".join(f"{n:,} = {steps:,}" for n, steps in scale.warmups.items())
    return (
        f"Sizes, lengths, rates and warmups bear the paper's names. Here they are: sizes {sizes}; lengths in tokens "
        f"{lengths}; learning rates {scale.rate:g} times the paper's; warmup steps {warmups}; {scale.steps:,} steps."
    )


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 64rem; margin: 0 auto;
       padding: 1rem; overflow-wrap: break-word }
nav a { display: inline-block; padding: .15rem .5rem .15rem 0 }
h2 { margin: 2.5rem 0 .3rem; border-top: 1px solid #ccc; padding-top: 1rem }
img { max-width: max(100%, 36rem); height: auto; display: block; margin: .8rem 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td + td, th + th { white-space: nowrap }
td:first-child { min-width: 11rem }
td.paper { white-space: normal; min-width: 9rem }
.same { color: #00603c } .other { color: #a23b00 } .open { color: #555 }
a { color: #0059a0 } summary { cursor: pointer }
"""


def html_table(header, lines, kinds=()):
    """Texts as an HTML table; kinds: {column: class of its cells, or function cell -> class}."""
    kinds = dict(kinds)

    def cell(tag, i, text):
        kind = kinds.get(i, "") if tag == "td" else ""
        kind = kind(text) if callable(kind) else kind
        return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(str(text))}</{tag}>"

    rows_ = [(header, "th"), *((line, "td") for line in lines)]
    inside = "\n".join(
        "<tr>" + "".join(cell(tag, i, text) for i, text in enumerate(row)) + "</tr>" for row, tag in rows_
    )
    return f'<div class="wide"><table>\n{inside}\n</table></div>'


def colour(said):
    if "spread" in said or "told" in said or not said:
        return "open"
    return "same" if said.startswith("same") else "other"


def tally(figures):
    """A sentence that counts which claims go the paper's way; what one seed says is counted apart."""
    told = {row["what"]: row for record in figures.values() for row in record["rows"] if row["same"] is not None}
    told = list(told.values())  # some stand in two figures
    several, one = ([row for row in told if (row["n"] > 1) == many] for many in (True, False))
    clear = [row["same"] for row in several if not row["within"]]
    return (
        f"Of the {len(told)} claims of the paper that these runs can speak to, {len(several)} are told by several "
        f"seeds: {sum(clear)} go the same way here, {len(clear) - sum(clear)} the other way, and "
        f"{len(several) - len(clear)} are within the spread of the seeds. {len(one)} are told by one seed only: "
        f"{sum(row['same'] for row in one)} go the same way, {sum(not row['same'] for row in one)} the other."
    )


def section(name, record, cfg):
    """One figure or table of the report."""
    title = ("Figure " if name.startswith("fig") else "Table ") + name[3:]
    parts = [f'<h2 id="{name}">{title}</h2>', f"<p>{html.escape(record['caption'])}</p>"]
    if "png" in record:
        path = Path(cfg.results_dir, record["png"])
        if not path.exists():
            raise UserError(f"{path} is missing; draw it again: `python reproduce.py {name} --scale={cfg.scale}`")
        png = path.read_bytes()
        width = int.from_bytes(png[16:20], "big") * 96 // 150  # the header's pixels, drawn at 150 to the inch
        about = f'alt="{title}: {html.escape(record["caption"])}" width={width}'
        image = f'<img {about} src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        parts.append(f'<div class="wide">{image}</div>')
    if "table" in record:
        parts.append(html_table(record["table"][0], record["table"][1:]))
    if record["rows"]:
        parts.append(html_table(CLAIMS, [cells(row) for row in record["rows"]], {3: "paper", 4: colour}))
    if record["runs"]:
        root = html.escape(urllib.parse.quote(record["out_dir"]))
        links = ", ".join(f'<a href="{root}/{run}/">{run}</a>' for run in record["runs"])
        parts.append(f"<details><summary>{len(record['runs'])} runs</summary><p>{links}</p></details>")
    about = record["environment"]
    commits = ", ".join(commit[:10] for commit in record["commits"])
    made = f"{about['machine']}, torch {about['torch']}, drawn by commit {(about['commit'] or 'unknown')[:10]}"
    made += f", trained by {commits}" * bool(commits)
    return "\n".join([*parts, f"<p><small>{html.escape(made)}</small></p>"])


def report(cfg):
    """report.html: all that results/<scale>.json has, in one file that needs nothing else."""
    path = Path(cfg.results_dir, f"{cfg.scale}.json")
    if not path.exists():
        raise UserError(f"{path} is missing: nothing is drawn yet; `python reproduce.py all --scale={cfg.scale}`")
    found = read_results(path)
    try:
        page = whole_page(found, cfg)
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is not results of reproduce.py ({type(e).__name__} {e}); draw them again") from None
    write_atomic("report.html", lambda temporary: Path(temporary).write_text(page, encoding="utf-8"))
    print(f"wrote report.html: {len(found['figures'])} figures and tables, {len(page) / 1e6:.1f} MB")


def whole_page(found, cfg):
    """The report's HTML, from what results/<scale>.json holds."""
    links = " ".join(f'<a href="#{name}">{name}</a>' for name in found["figures"])
    summary = (
        f"Scale {cfg.scale}: {found['scale']}. {tally(found['figures'])} {found['units']} Losses are in nats per token."
    )
    body = "\n".join(section(name, record, cfg) for name, record in found["figures"].items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>nanoResFormer: the paper's figures at scale {cfg.scale}</title><style>{STYLE}</style></head><body>
<h1>Value residual learning: the paper's figures, ours beside its numbers</h1>
<p>{html.escape(summary)}</p>
<nav>{links}</nav>
{body}
</body></html>
"""


def main(cfg: ReproduceConfig):
    if cfg.words == ("report",):
        return report(cfg)
    device = Distributed("auto" if cfg.units.gpus else "cpu").device
    if not cfg.dry_run and any(figure.panels for figure in cfg.figures.values()):
        plot.matplotlib()  # that it is there, before hours of training
    at_once = cfg.jobs or (1 if cfg.units.gpus else os.cpu_count() or 1)
    if not cfg.units.gpus and at_once > 1:
        torch.set_num_threads(1)
    wanted = any(figure.jobs or figure.reads_data for figure in cfg.figures.values()) or extra(cfg)
    if wanted and cfg.run and not cfg.dry_run and (not cfg.units.gpus or device.type == "cuda"):
        prepare(cfg)
    todo, failed = plans(cfg), []
    if cfg.run or cfg.dry_run:
        if cfg.units.gpus and device.type != "cuda" and not cfg.dry_run:
            raise UserError(
                f"scale={cfg.scale} wants GPUs, and there is none; --dry_run only plans, --scale=cpu runs here"
            )
        show_plan(todo, cfg, device, at_once)
        if cfg.dry_run:
            return
        failed = make(todo, cfg, at_once)
    found = Found(cfg.out_dir, cfg.units, cfg.seeds_of, cfg.public_folders.values(), cfg.command)
    missing = []
    for name, figure in cfg.figures.items():
        try:
            publish(name, figure, cfg, found)
        except UserError as e:  # one figure without its runs should not keep the others from being drawn
            print(f"note: {e}", flush=True)
            missing.append((name, e))
    said = [f"not drawn: {', '.join(name for name, _ in missing)}"] * bool(missing)
    if failed:
        raise UserError("; ".join([*said, f"{len(failed)} commands failed, the first: {failed[0]}"]))
    if missing:
        raise UserError(f"{said[0]}; {missing[0][1]}")


if __name__ == "__main__":
    run_main(main, command_line(ReproduceConfig, __doc__))
