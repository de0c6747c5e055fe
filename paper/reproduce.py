"""Every figure and table of the paper by one command: train what it needs, analyse, draw, set beside the paper.

    python -m paper.reproduce fig7 --dry_run        what would run here: commands, GPU-hours
    python -m paper.reproduce fig7                  run it and draw it; what is finished does not run again
    python -m paper.reproduce report                results/cpu/README.md, from results/cpu.json

docs/reproduction.md says what the names stand for, figures.py what each is made of. A run is an ordinary run of
train.py in out/<scale>/<its name>-<seed>. Figures go to results/<scale>/, the numbers beside the paper's to
results/<scale>.json. After a kill the same command goes on.
"""

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import plot
from common.data import Corpus, Tokenizer
from common.files import hold
from common.plan import count_parameters, flops_per_token
from common.ranks import PEAK_FLOPS
from common.report import markdown
from common.tasks import TABLE1
from configurator import UserError, check_fields, need, run, setting
from paper.figures import FIGURES, PAPER
from paper.found import Found, difference, fresh_analysis, make_record, read_kept, write_kept
from paper.results import publish, write_report
from paper.runs import SCALES, SEEDS, train_settings
from train import TrainConfig

MFU = 0.4  # we compute GPU-hours with this share of an A100's bf16 peak


@dataclass(frozen=True)
class ReproduceConfig:
    """Every setting of paper.reproduce."""

    words: tuple[str, ...] = setting(
        (), "fig1 … fig22, tab1 … tab5, all, modes, rates, v5, regime, longer, sizes, or report", positional=True
    )
    scale: Literal["", "cpu", "night", "paper"] = setting(
        "", "what the paper's sizes, lengths and tokens are here; empty = cpu, or night for our own figures"
    )
    seeds: int = setting(0, "seeds of every run; 0 = as many as the scale says", least=0, most=len(SEEDS))
    dry_run: bool = setting(False, "only say what would run")
    run: bool = setting(True, "train and analyse what is missing; false = only draw what is there")
    kept: bool = setting(False, "take runs from results/<scale>/runs.jsonl where it has them, and add new ones to it")
    jobs: int = setting(0, "runs at a time; 0 = one per core at a scale without GPUs, else one", least=0)
    eval_dir: str = setting("", "local files of tab1's tasks, see eval.py; empty = from the hub")
    out_dir: str = setting("", "folder of the runs; empty = out/<scale>")
    data_dir: str = setting(
        "", "prepared data; empty = the scale's own, which is made where it is missing if it is pysource"
    )
    results_dir: str = setting("results", "folder of the figures and numbers")

    def __post_init__(self):
        check_fields(self)
        if not self.words:
            raise UserError("say which figure, as in `python -m paper.reproduce fig7 --dry_run`")
        for word in self.words:
            if word not in (*FIGURES, "all", "report"):
                raise UserError(f"cannot reproduce {word!r}; there are {', '.join(FIGURES)}, all, report")
        if "report" in self.words and len(self.words) > 1:
            raise UserError("report stands alone: it shows all that has been drawn")
        # we made the figures that the paper does not have for scale night
        own = [word for word in self.words if word in FIGURES and word not in PAPER]
        object.__setattr__(self, "scale", self.scale or ("night" if own else "cpu"))
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.scale}")
        if own and self.scale != "night":
            raise UserError(f"{own[0]} is for scale=night, not for scale={self.scale}")

    @property
    def figures(self):
        """{name: Figure} in the order in which they were asked for."""
        of_all = [name for name in PAPER if name not in self.units.without]
        names = [name for word in self.words for name in (of_all if word == "all" else [word])]
        return {name: FIGURES[name].at(self.units) for name in names}

    @property
    def units(self):
        """The Scale, with the data folder that was asked for."""
        scale = SCALES[self.scale]
        data_dir = self.data_dir or scale.data_dir
        prepare = f"{scale.prepare} --out_dir={shlex.quote(data_dir)}"
        return dataclasses.replace(scale, data_dir=data_dir, prepare=prepare)

    @property
    def records_file(self):
        """Where we keep records of runs, see found.py."""
        return Path(self.results_dir, self.scale, "runs.jsonl")

    def seeds_of(self, job):
        """The seeds of a Job: as many as were asked for, or as the scale says."""
        return SEEDS[: self.seeds or self.units.n_seeds(self.units.here(job))]


# -- the plan


@dataclass
class Plan:
    """A run that the figures need."""

    folder: Path
    values: dict  # settings of train.py
    needs: set  # parts of its record, see Figure.needs
    record: dict | None = None  # the kept one, made with these settings: then the run need not be there
    done: bool = False


def make_plans(cfg, kept):
    """The Plans of all runs in the order in which the figures name them. kept: {name: record}"""
    plans = {}
    for figure in cfg.figures.values():
        for job, needs in figure.needs.items():
            for seed in cfg.seeds_of(job):
                folder = Path(cfg.out_dir, f"{cfg.units.here(job).name}-{seed}")
                plan = plans.setdefault(folder, Plan(folder, train_settings(job, cfg.units, seed, folder), set()))
                # tasks cost more than small runs, so one seed is enough unless somebody asks for more
                plan.needs |= needs if seed == SEEDS[0] or cfg.seeds else needs - {"scores"}
    for plan in plans.values():
        record = kept.get(plan.folder.name)
        if record and not difference(record["settings"], plan.values):
            plan.record = record
        with contextlib.suppress(UserError):  # there is no such run, or it has no steps yet
            plan.done = bool(plan.record) or plot.read_run(plan.folder).finished
    return list(plans.values())


def show_plan(plans, cfg):
    """Print the runs, their sizes, whether they are done, and hours of training where we know the speed."""
    scale, path = cfg.units, Path(cfg.units.data_dir, "tokenizer.json")
    vocab = Tokenizer.load(path).n_vocab if path.exists() else scale.vocab
    unit, speed, how = "core", scale.core_speed, f"{scale.core_speed / 1e9:,.0f} GFLOP/s a core"
    if scale.gpus:
        unit, speed, how = "GPU", PEAK_FLOPS["A100"] * MFU, f"{MFU:.0%} of an A100's bf16 peak"

    rows, hours = [], []
    for plan in plans:
        settings = TrainConfig(**plan.values)
        model, n_tokens = settings.model_config(vocab), settings.max_steps * settings.batch_tokens
        hours.append(flops_per_token(model) * n_tokens / speed / 3600 if speed and not plan.done else 0.0)
        state = "done" if plan.done else "to do"
        rows.append([plan.folder.name, state, f"{count_parameters(model):,}", f"{n_tokens:,}", f"{hours[-1]:,.2f}"])
    print(f"scale {cfg.scale}: {scale.what}\n")
    print(markdown(["run", "state", "parameters", "tokens", f"{unit}-hours"], rows))
    if cfg.dry_run:
        print(*map(shlex.join, commands(plans, cfg)), "", sep="\n")
    takes = f"; training takes {sum(hours):,.1f} {unit}-hours at {how}, without analyses" if speed else ""
    print(f"{len(plans)} runs, {sum(plan.done for plan in plans)} of them done{takes}", flush=True)


# -- commands, as lists of words


def train_command(plan, cfg):
    """Of train.py, without the settings that are its defaults."""
    launcher = ["torchrun", f"--nproc_per_node={cfg.units.gpus}"] if cfg.units.gpus > 1 else ["python"]
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    words = [f"--{key}={value}" for key, value in plan.values.items() if value != defaults[key]]
    return [*launcher, "train.py", *words, "--resume=auto"]


def analyze_command(plan, cfg):
    """Of analyze.py. At a scale without GPUs we compute on cores everywhere, so that all numbers are alike."""
    device = [] if cfg.units.gpus else ["--device=cpu"]
    words = [f"--chunks={cfg.units.chunks}", f"--data_dir={cfg.units.data_dir}"]
    return ["python", "analyze.py", str(plan.folder), *words, *device]


def eval_command(plan, task, cfg):
    """Of eval.py; task: one of them, or "table1" for all."""
    files = [f"--data_dir={cfg.eval_dir}"] if cfg.eval_dir else []
    device = [] if cfg.units.gpus else ["--device=cpu"]
    return ["python", "eval.py", str(plan.folder), f"--task={task}", "--dtype=float32", *files, *device]


def commands(plans, cfg):
    """The commands of the plan, also those of finished runs: data, runs, analyses, tasks."""
    if not Path(cfg.units.data_dir, "manifest.json").exists():
        yield shlex.split(cfg.units.prepare)
    plans = [plan for plan in plans if not plan.record]
    yield from (train_command(plan, cfg) for plan in plans)
    yield from (analyze_command(plan, cfg) for plan in plans if "analysis" in plan.needs)
    yield from (eval_command(plan, "table1", cfg) for plan in plans if "scores" in plan.needs)


# -- running


def run_logged(words, log, threads=""):
    """Run a command by this Python, its output in a file. threads: OMP_NUM_THREADS, where several commands share the
    cores."""
    python = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else [sys.executable]
    env = os.environ | ({"OMP_NUM_THREADS": threads} if threads else {})
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as out:
        code = subprocess.run([*python, *words[1:]], stdout=out, stderr=out, env=env).returncode
    if code:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"])[-1]
        raise UserError(f"`{shlex.join(words)}` failed ({code}): {last}; all of it is in {log}")


@contextlib.contextmanager
def noted(errors, name):
    """Print a UserError as a note and keep it in errors[name], so that one failure does not stop the rest."""
    try:
        yield
    except UserError as e:
        print(f"note: {e}", flush=True)
        errors[name] = e


def make_data(cfg):
    """Make the data if it is missing and is pysource, which needs no download."""
    folder = Path(cfg.units.data_dir)
    if (folder / "manifest.json").exists():
        return
    if cfg.data_dir or " pysource " not in cfg.units.prepare:
        raise UserError(f"{folder} has no manifest.json; make the data: `{cfg.units.prepare}`")
    print(f"making the data: {cfg.units.prepare}", flush=True)
    run_logged(shlex.split(cfg.units.prepare), Path(cfg.out_dir, "prepare.log"))


def check_data(records, cfg):
    """Raise UserError if runs have seen different data, because nobody could compare them."""
    seen = {record["start"]["data"]: name for name, record in records.items()}
    if cfg.run:
        seen[Corpus(cfg.units.data_dir, 1, verify=False).hash] = cfg.units.data_dir
    if len(seen) > 1:
        raise UserError(f"the data of {' and '.join(seen.values())} differ; leave out --kept, or set another --out_dir")


def make_run(plan, cfg, threads):
    """Train, analyse and evaluate one run, as far as that is asked for and not done. Returns its record."""
    if cfg.run and not plan.done:
        run_logged(train_command(plan, cfg), plan.folder / "train.log", threads)
    if cfg.run and "analysis" in plan.needs and not fresh_analysis(plan.folder):
        run_logged(analyze_command(plan, cfg), plan.folder / "analyze.log", threads)
    if cfg.run and "scores" in plan.needs:
        scored = plot.read_eval(plan.folder)["results"] if (plan.folder / "eval.json").exists() else ()
        # one by one, because a task may have longer texts than the model takes
        for task in [task for task in TABLE1 if task not in scored]:
            with noted({}, task):
                run_logged(eval_command(plan, task, cfg), plan.folder / "eval.log", threads)
    return make_record(plan.folder, plan.values, cfg.units.every)


def make_all(plans, cfg):
    """Make all runs that have no record yet, some side by side. Returns {name: record} and {name: why it failed}."""
    records, errors = {plan.folder.name: plan.record for plan in plans if plan.record}, {}
    check_data(records, cfg)
    plans = [plan for plan in plans if not plan.record]
    # models this small cannot use two cores well, so without GPUs each core has a run of its own
    cores = os.cpu_count() or 1
    at_once = cfg.jobs or (1 if cfg.units.gpus else cores)
    threads = str(max(1, cores // at_once)) if at_once > 1 else ""
    pool = ThreadPoolExecutor(at_once)
    futures = {pool.submit(make_run, plan, cfg, threads): plan.folder for plan in plans}
    try:
        for done, future in enumerate(as_completed(futures), 1):
            folder = futures[future]
            with noted(errors, folder.name):
                record = records[folder.name] = future.result()
                loss = list(record["val"].values())[-1]
                print(f"{done} of {len(plans)}, {folder}: validation loss {loss:.4f}", flush=True)
                if cfg.run and cfg.kept:
                    write_kept(cfg.records_file, read_kept(cfg.records_file) | {folder.name: record})
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further run begins
    check_data(records, cfg)
    return records, errors


def main(cfg: ReproduceConfig):
    if cfg.words == ("report",):
        write_report(cfg)
        return
    plans = make_plans(cfg, read_kept(cfg.records_file) if cfg.kept else {})
    if cfg.run or cfg.dry_run:
        show_plan(plans, cfg)
    if cfg.dry_run:
        return
    if cfg.run and cfg.units.gpus and not torch.cuda.is_available():
        raise UserError(f"scale={cfg.scale} needs GPUs, and there is none; add --dry_run, or set --scale=cpu")
    if any(figure.panels for figure in cfg.figures.values()):
        need("matplotlib")  # before hours of training
    if cfg.run:
        make_data(cfg)
    with hold(cfg.out_dir) if cfg.run else contextlib.nullcontext():
        records, failed = make_all(plans, cfg)
    found = Found(records, cfg.units, cfg.seeds_of, cfg.out_dir, failed)
    # a figure that lacks a run is skipped with a note, so that the others are still drawn
    missing = {}
    for name, figure in cfg.figures.items():
        with noted(missing, name):
            publish(name, figure, cfg, found)
    said = []
    if missing:
        said.append(f"not drawn: {', '.join(missing)}, the first because {next(iter(missing.values()))}")
    if failed and cfg.run:
        said.append(f"{len(failed)} runs failed, the first: {next(iter(failed.values()))}")
    if said:
        raise UserError("; ".join(said))


if __name__ == "__main__":
    run(main, __doc__)
