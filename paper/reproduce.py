"""Every figure and table of the paper by one command: train what it needs, analyse, draw, set beside the paper.

    python -m paper.reproduce fig7 --dry_run        what would be run here: commands, disk, GPU-hours
    python -m paper.reproduce fig7                  run it and draw it; what is finished is not run again
    python -m paper.reproduce report                results/cpu/README.md, from results/cpu.json

docs/reproduction.md says what the names stand for, figures.py what each is made of. A run is an ordinary run of
train.py in out/<scale>/<its name>-<seed>. Figures go to results/<scale>/, the numbers beside the paper's to
results/<scale>.json. After a kill the same command goes on.
"""

import contextlib
import dataclasses
import functools
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import plot
from oldconfig import UserError, check_ranges, command_line, need, run_main, setting
from oldfiles import hold
from paper.figures import FIGURES, PAPER
from paper.found import (
    INITIAL,
    Found,
    check_settings,
    difference,
    fresh_analysis,
    made_with,
    make_record,
    read_kept,
    settings_of,
    write_kept,
)
from paper.runs import SCALES, SEEDS, train_settings
from report import markdown
from tasks import TABLE1

MFU = 0.4  # the share of an A100's bf16 peak that GPU-hours are computed with
HERE = Path(__file__).parent.parent


@dataclass(frozen=True)
class ReproduceConfig:
    """Every setting of paper.reproduce."""

    words: tuple[str, ...] = setting(
        (), "fig1 … fig22, tab1 … tab5, all, modes, rates, v5, regime, longer, sizes, gpu, or report", positional=True
    )
    scale: Literal["", "cpu", "night", "gpu", "small", "paper"] = setting(
        "",
        "what the paper's sizes, lengths and tokens are here; empty = cpu, or the one that a figure is made for",
    )
    seeds: int = setting(0, "seeds of every run; 0 = as many as the scale says", least=0, most=len(SEEDS))
    dry_run: bool = setting(False, "only say what would be run")
    run: bool = setting(True, "train and analyse what is missing; false = only draw what is there")
    kept: bool = setting(False, "take runs from results/<scale>/runs.jsonl where it has them, and add new ones to it")
    jobs: int = setting(0, "runs at a time; 0 = one per core at a scale without GPUs, else one", least=0)
    public: tuple[str, ...] = setting((), "Llama or Mistral folders in Hugging Face layout, for fig1 and fig18")
    eval_dir: str = setting("", "local files of tab1's tasks, see eval.py; empty = from the hub")
    out_dir: str = setting("", "folder of the runs; empty = out/<scale>")
    data_dir: str = setting(
        "", "prepared data; empty = the scale's own, which is made where it is missing if it is pysource"
    )
    results_dir: str = setting("results", "folder of the figures and numbers")

    def __post_init__(self):
        check_ranges(self)
        if not self.words:
            raise ValueError("say which figure, as in `python -m paper.reproduce fig7 --dry_run`")
        for word in self.words:
            if word not in (*FIGURES, "all", "report"):
                raise ValueError(f"cannot reproduce {word!r}; there are {', '.join(FIGURES)}, all, report")
        if "report" in self.words and len(self.words) > 1:
            raise ValueError("report stands alone: it shows all that has been drawn")
        if not self.scale:
            own = [FIGURES[word].scale for word in self.words if word in FIGURES and FIGURES[word].scale]
            object.__setattr__(self, "scale", own[0] if own else "cpu")
        for word in self.words:
            if word in FIGURES and FIGURES[word].scale not in ("", self.scale):
                raise ValueError(f"{word} is for scale={FIGURES[word].scale}, not for scale={self.scale}")
        only = self.units.figures
        if only and set(self.words) - {*only, "all", "report"}:
            raise ValueError(f"scale={self.scale} is for {', '.join(only)} alone; set another --scale")
        if self.jobs > 1 and self.units.gpus:
            raise ValueError(f"jobs={self.jobs} would share the GPUs of one run; leave it out at scale={self.scale}")
        if len(self.public_folders) < len(self.public):
            raise ValueError("two folders of --public have the same name, which figures call them by")
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.scale}")

    @property
    def figures(self):
        """{name: Figure} of what was asked for, in that order. Public models take the places of ours."""
        names = []
        for word in self.words:
            if word == "all":
                names += self.units.figures or [name for name in PAPER if name not in self.units.without]
            else:
                names.append(word)
        asked = {}
        for name in names:
            figure = FIGURES[name]
            if self.public:
                panels = [dataclasses.replace(p, lines=()) if p.kind == "public" else p for p in figure.panels]
                figure = dataclasses.replace(figure, panels=tuple(panels))
            asked[name] = figure.at(self.units)
        return asked

    @property
    def records_file(self):
        """Where records of runs are kept, see found.py."""
        return Path(self.results_dir, self.scale, "runs.jsonl")

    @property
    def units(self):
        """The Scale, with the data folder that was asked for."""
        scale = SCALES[self.scale]
        data_dir = self.data_dir or scale.data_dir
        prepare = f"{scale.prepare} --out_dir={shlex.quote(data_dir)}"
        return dataclasses.replace(scale, data_dir=data_dir, prepare=prepare)

    @property
    def public_folders(self):
        """{folder of a public model's analysis: the model's folder}"""
        return {Path(self.out_dir, "public", Path(folder).name): folder for folder in self.public}

    def seeds_of(self, job):
        """The seeds of a Job: as many as were asked for, or as the scale says."""
        return SEEDS[: self.seeds or self.units.n_seeds(self.units.here(job))]


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(ReproduceConfig, __doc__)

import torch

from data import Corpus, Tokenizer
from describe import count_parameters, flops_per_token
from paper.results import publish, write_report
from runtime import PEAK_FLOPS
from train import TrainConfig

# -- the plan


@dataclass
class Plan:
    """A run that the figures need: its settings, and what is computed from it."""

    folder: Path
    values: dict  # settings of train.py
    analyse: bool = False
    score: bool = False  # on the tasks of Table 1
    needs_losses: bool = False  # of training
    needs_arrays: bool = False  # of the analysis
    kept: bool = False  # its record is enough, so that it is not run

    @functools.cached_property
    def done(self):
        if self.kept:
            return True
        with contextlib.suppress(UserError):  # there is no such run, or it has no steps yet
            return plot.read_run(self.folder).finished
        return False


def make_plans(cfg, kept):
    """The Plans of all runs that the figures need, in the order in which the figures name them. kept: {name: record}"""
    plans = {}
    for figure in cfg.figures.values():
        for job in figure.jobs:
            real = cfg.units.here(job)
            for seed in cfg.seeds_of(job):
                folder = Path(cfg.out_dir, f"{real.name}-{seed}")
                new = Plan(folder, train_settings(real, cfg.units, seed, folder))
                plan = plans.setdefault(folder, new)
                plan.analyse |= job in figure.analysed
                plan.needs_arrays |= job in figure.with_arrays
                plan.needs_losses |= job in figure.with_curves
                if figure.scored and (seed == SEEDS[0] or cfg.seeds):  # tasks cost more than small runs: one seed
                    plan.score = True
    for folder, plan in plans.items():
        record = kept.get(folder.name)
        plan.kept = record is not None and is_enough(record, plan, cfg.units.every, cfg.units.chunks)
        if record is not None and not plan.kept:
            plan.analyse |= "analysis" in record  # its next record is to have it too
    return list(plans.values())


def is_enough(record, plan, every, chunks):
    """Whether a record has all that the figures need of a run. every, chunks: the Scale's"""
    if plan.score or plan.needs_arrays:  # records have neither
        return False
    if difference(made_with(record), plan.values | {"every": every}):
        return False
    if plan.needs_losses and not record["losses"]:
        return False
    return not plan.analyse or is_as_asked(record.get("analysis"), plan, chunks)


def is_as_asked(analysis, plan, chunks):
    """Whether an analysis, None if there is none, has as many chunks as are asked for, at the run's length."""
    if analysis is None:
        return False
    return analysis["chunks_asked"] == chunks and analysis["length"] == plan.values["block_size"]


def show_plan(plans, cfg):
    """Print runs, their sizes and whether they are done, disk, and the hours of training where the speed is known."""
    scale, path = cfg.units, Path(cfg.units.data_dir, "tokenizer.json")
    vocab = Tokenizer.load(path).n_vocab if path.exists() else scale.vocab
    if scale.gpus:
        unit, speed, how = "GPU", PEAK_FLOPS["A100"] * MFU, f"{MFU:.0%} of an A100's bf16 peak"
    else:
        unit, speed, how = "core", scale.core_speed, f"{scale.core_speed / 1e9:,.0f} GFLOP/s a core"
    rows = [plan_row(plan, vocab, speed) for plan in plans]
    print(f"scale {cfg.scale}: {scale.what}\n")
    header = ["run", "state", "parameters", "tokens", "disk (GB)", f"{unit}-hours"]
    print(markdown(header, [cells for cells, _, _ in rows]))
    if cfg.dry_run:
        for words in commands(plans, cfg):
            print(shlex.join(words))
        print()
    said = f"{len(plans)} runs, {sum(plan.done for plan in plans)} of them done; "
    if speed:
        said += f"training takes {sum(hours for _, _, hours in rows):,.1f} {unit}-hours at {how}; "
    disk = 2 * scale.tokens + sum(size for _, size, _ in rows)  # token ids are uint16
    print(f"{said}analyses and tasks come on top; disk {disk / 1e9:,.1f} GB with the data", flush=True)


def plan_row(plan, vocab, speed):
    """(cells, bytes on disk, hours left) of a run. speed: FLOP/s, 0 = not known."""
    settings = TrainConfig(**plan.values)
    model = settings.model_config(vocab)
    size, tokens = count_parameters(model), settings.max_steps * settings.batch_tokens
    checkpoints = 2 if settings.eval_every < settings.max_steps else 1  # the last, and the best of several
    disk = 12 * checkpoints * size  # weights and optimizer in fp32
    hours = 0.0
    if speed and not plan.done:
        hours = flops_per_token(model) * tokens / speed / 3600
    cells = [plan.folder.name, "done" if plan.done else "to do", f"{size:,}", f"{tokens:,}", f"{disk / 1e9:.2f}"]
    cells.append(f"{hours:,.2f}" if speed else "-")
    return cells, disk, hours


# -- commands, as lists of words


def train_command(plan, cfg):
    """Of train.py: settings that are its defaults are left out."""
    launcher = ["torchrun", f"--nproc_per_node={cfg.units.gpus}"] if cfg.units.gpus > 1 else ["python"]
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    words = [f"--{key}={value}" for key, value in plan.values.items() if value != defaults[key]]
    return [*launcher, "train.py", *words, "--resume=auto"]


def device_words(cfg):
    """At a scale without GPUs even a machine that has one computes on its cores, all runs alike."""
    return [] if cfg.units.gpus else ["--device=cpu"]


def analyze_command(cfg, *words):
    """Of analyze.py; words: which model, and how many chunks."""
    return ["python", "analyze.py", *words, f"--data_dir={cfg.units.data_dir}", *device_words(cfg)]


def analyze_run(plan, cfg):
    return analyze_command(cfg, str(plan.folder), f"--chunks={cfg.units.chunks}")


def eval_command(plan, task, cfg):
    """Of eval.py: which task or "table1", from which files, and where."""
    files = [f"--data_dir={cfg.eval_dir}"] if cfg.eval_dir else []
    return ["python", "eval.py", str(plan.folder), f"--task={task}", "--dtype=float32", *files, *device_words(cfg)]


def other_analyses(cfg):
    """{folder: command} of analyses that are missing of models that are not trained here: a new one, public ones."""
    kinds = {panel.kind for figure in cfg.figures.values() for panel in figure.panels}
    asked = {}
    if "initial" in kinds:
        # the paper's own size and length at any scale: before training few chunks show the entropy
        asked[Path(cfg.out_dir, INITIAL)] = ["--init=config/size_468m.py", "--length=2048", "--chunks=16"]
    if "public" in kinds:
        for out, folder in cfg.public_folders.items():
            asked[out] = [folder, "--length=2048", f"--chunks={cfg.units.chunks}", "--dtype=bfloat16"]
    missing = {out: words for out, words in asked.items() if not (out / "analysis.json").exists()}
    return {out: [*analyze_command(cfg, *words), f"--out_dir={out}"] for out, words in missing.items()}


def commands(plans, cfg):
    """The commands of the plan: for every run without a kept record, also for finished ones; for data and analyses of
    other models where they are missing."""
    if not Path(cfg.units.data_dir, "manifest.json").exists():
        yield shlex.split(cfg.units.prepare)
    plans = [plan for plan in plans if not plan.kept]
    for plan in plans:
        yield train_command(plan, cfg)
    yield from other_analyses(cfg).values()
    for plan in plans:
        if plan.analyse:
            yield analyze_run(plan, cfg)
        if plan.score:
            yield eval_command(plan, "table1", cfg)


# -- running


def run_logged(words, log, threads=""):
    """Run a command with its output added to file `log`; raises UserError with the log's last line if it fails.
    threads: OMP_NUM_THREADS, where several commands share the cores."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": threads} if threads else None
    with open(log, "a", encoding="utf-8") as out:
        code = subprocess.run(of_any_folder(words), stdout=out, stderr=out, env=env).returncode
    if code:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"`{shlex.join(words)}` failed ({code}): {last}; all of it is in {log}")


def of_any_folder(words):
    """A command as it is shown -> as it runs from any folder, by this Python."""
    python = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else [sys.executable]
    scripts = {"train.py", "analyze.py", "eval.py", "prepare.py"}
    words = [str(HERE / word) if word in scripts else word for word in words[1:]]
    return [*python, *(word.replace("=config/", f"={HERE}/config/") for word in words)]


def make_run(plan, cfg, threads):
    """Train, analyse and evaluate one Plan, as far as that is not done. Returns its validation loss. Raises UserError
    if the run was begun with other settings or data, or does not come to its end."""
    if (plan.folder / "config.json").exists():
        check_settings(plan.folder, settings_of(plan.folder), plan.values | {"data": data_hash(cfg.units.data_dir)})
    if not plan.done:
        run_logged(train_command(plan, cfg), plan.folder / "train.log", threads)
        if not plot.read_run(plan.folder).finished:  # train.py was told to stop: it has saved, and returned 0
            raise UserError(f"{plan.folder} was stopped; the same command continues it")
    if plan.analyse and not is_as_asked(fresh_analysis(plan.folder), plan, cfg.units.chunks):
        run_logged(analyze_run(plan, cfg), plan.folder / "analyze.log", threads)
    if plan.score:
        score_table1(plan, cfg, threads)
    return plot.read_run(plan.folder).final_loss


def score_table1(plan, cfg, threads):
    """Run the tasks of Table 1 that a run has no result of, one by one. A task with texts longer than the model takes
    is skipped; any other failure skips the rest. Both are only noted."""
    known = {}
    if (plan.folder / "eval.json").exists():
        last = plot.read_eval(plan.folder)
        if last["step"] == plan.values["max_steps"]:
            known = last["results"]
    for name in TABLE1:
        if name in known:
            continue
        try:
            run_logged(eval_command(plan, name, cfg), plan.folder / "eval.log", threads)
        except UserError as e:
            print(f"note: {plan.folder.name} has no {name}: {e}", flush=True)
            if "leave this task out" not in str(e):  # what tasks.py says of texts that are too long
                break


@contextlib.contextmanager
def noted(errors, name):
    """Print a UserError as a note and keep it in errors[name]: one failure does not keep the rest from being made."""
    try:
        yield
    except UserError as e:
        print(f"note: {e}", flush=True)
        errors[name] = e


def kept_records(cfg):
    """{name: record} of the runs that need not be made again, if that is asked for."""
    return read_kept(cfg.records_file) if cfg.kept else {}


def keep_record(plan, cfg):
    """Add the record of a finished run to the file of records, see `make_record`."""
    record = make_record(plan.folder, plan.values | {"data": data_hash(cfg.units.data_dir)}, cfg.units.every)
    write_kept(cfg.records_file, read_kept(cfg.records_file) | {plan.folder.name: record})


def make_all(plans, cfg):
    """Make all runs, some of them side by side, then the other analyses. Returns {folder: error} of those that
    failed."""
    cores = os.cpu_count() or 1
    at_once = cfg.jobs or (1 if cfg.units.gpus else cores)
    threads = str(max(1, cores // at_once)) if at_once > 1 else ""
    failed = {}
    pool = ThreadPoolExecutor(at_once)
    futures = {pool.submit(make_run, plan, cfg, threads): plan for plan in plans}
    try:
        for done, future in enumerate(as_completed(futures), 1):
            plan = futures[future]
            with noted(failed, plan.folder):
                print(f"{done} of {len(plans)}, {plan.folder}: validation loss {future.result():.4f}", flush=True)
                if cfg.kept:
                    keep_record(plan, cfg)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further run begins
    for folder, words in other_analyses(cfg).items():  # these have the machine to themselves
        print(shlex.join(words), flush=True)
        with noted(failed, folder):
            run_logged(words, folder / "analyze.log")
    return failed


def make_data(cfg):
    """Make the data if it is not there and is pysource, for which nothing is to be downloaded."""
    folder = Path(cfg.units.data_dir)
    if (folder / "manifest.json").exists():
        return
    if cfg.data_dir or " pysource " not in cfg.units.prepare:
        raise UserError(f"{folder} has no manifest.json; make the data: `{cfg.units.prepare}`")
    print(f"making the data: {cfg.units.prepare}", flush=True)
    code = subprocess.run(of_any_folder(shlex.split(cfg.units.prepare))).returncode
    if code:
        raise UserError(f"`{cfg.units.prepare}` failed ({code})")


@functools.cache
def data_hash(data_dir):
    return Corpus(data_dir, 1, verify=False).hash


def check_data(plans, cfg):
    """Raise UserError if records are of runs on other data: new runs could not be compared with them."""
    kept = kept_records(cfg)
    data = {kept[plan.folder.name]["start"]["data"] for plan in plans if plan.kept}
    if data and data != {data_hash(cfg.units.data_dir)}:
        raise UserError(f"{cfg.records_file} has runs on other data than {cfg.units.data_dir}; leave out --kept")


def main(cfg: ReproduceConfig):
    if cfg.words == ("report",):
        write_report(cfg)
        return
    plans = make_plans(cfg, kept_records(cfg))
    if cfg.dry_run:
        show_plan(plans, cfg)
        return
    if any(figure.panels for figure in cfg.figures.values()):
        need("matplotlib")  # before hours of training
    failed, missing = {}, {}
    if cfg.run:
        if cfg.units.gpus and not torch.cuda.is_available():
            raise UserError(f"scale={cfg.scale} needs GPUs, and there is none; add --dry_run, or set --scale=cpu")
        make_data(cfg)
        check_data(plans, cfg)
        show_plan(plans, cfg)
        with hold(cfg.out_dir):
            failed = make_all([plan for plan in plans if not plan.kept], cfg)
    found = Found(cfg.out_dir, cfg.units, cfg.seeds_of, tuple(cfg.public_folders), kept_records(cfg))
    for name, figure in cfg.figures.items():
        with noted(missing, name):
            publish(name, figure, cfg, found)
    said = []
    if missing:
        said.append(f"not drawn: {', '.join(missing)}, the first because {next(iter(missing.values()))}")
    if failed:
        said.append(f"{len(failed)} runs or analyses failed, the first: {next(iter(failed.values()))}")
    if said:
        raise UserError("; ".join(said))


if __name__ == "__main__":
    run_main(main, SETTINGS)
