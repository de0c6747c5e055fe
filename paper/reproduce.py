"""Every figure and table of the paper with one command: train what it needs, analyse, draw, compare with the paper.

    python -m paper.reproduce fig7 --dry_run        the commands that it would run
    python -m paper.reproduce fig7                  run it and draw it; what is finished does not run again

docs/reproduction.md says what the names stand for. A run is train.py's, in out/<scale>/<its name>-<seed>. Figures go to
results/<scale>/, where README.md shows all, numbers to results/<scale>.json. After a kill the same command continues.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.data import Corpus
from common.files import hold, read_record, write_record, write_text
from common.jobs import Command, flags_of, lanes_of, run_jobs
from common.ranks import PEAK_FLOPS, environment
from common.report import compact, markdown
from common.sizes import count_parameters, flops_per_token
from common.tasks import TABLE1
from common.tokenizer import HFTokenizer
from compare import SEEDS
from configurator import UserError, check_fields, need, run, setting
from hf.layout import hf_config, is_hf_folder
from paper.claims import HEADER, claim_cells, claim_row
from paper.figures import FIGURES
from paper.found import Found, finished, scores
from paper.panels import page_of_panels
from paper.scales import SCALES, VOCAB, train_settings
from plot import short_names
from train import TrainConfig

RESULTS = "results of paper.reproduce"
MFU = 0.4  # the share of a GPU's peak with which a plan counts


@dataclass(frozen=True)
class ReproduceConfig:
    """Every setting of paper.reproduce."""

    words: tuple[str, ...] = setting((), "fig1, tab5, …, see docs/reproduction.md; or all", positional=True)
    scale: Literal["cpu", "paper"] = setting("cpu", "cpu: small models, which show that it works; paper: the paper's")
    seeds: int = setting(1, "seeds per run", least=1, most=len(SEEDS))
    dry_run: bool = setting(False, "only say what would run")
    run: bool = setting(True, "train and analyse what is missing; false = only draw what is there")
    public: tuple[str, ...] = setting((), "folders of Llama and Mistral models, for fig1 and fig18")
    public_dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of the public models")
    eval_dir: str = setting("", "folder with files of tab1's tasks, see eval.py; empty = from the hub")
    out_dir: str = setting("", "folder of the runs; empty = out/<scale>")
    data_dir: str = setting("", "prepared data; empty = the scale's own, which is made if it is pysource")
    results_dir: str = setting("results", "folder of the figures and numbers")

    def __post_init__(self):
        check_fields(self)
        if not self.words:
            raise UserError("say which figure, as in `python -m paper.reproduce fig7 --dry_run`")
        for word in self.words:
            if word not in (*FIGURES, "all"):
                raise UserError(f"cannot reproduce {word!r}; choose from {', '.join(FIGURES)}, all")
        object.__setattr__(self, "out_dir", self.out_dir or f"out/{self.scale}")
        if self.public and not any(figure.has_public for figure in self.figures.values()):
            raise UserError(f"{self.words[0]} draws no public models; fig1 and fig18 do")

    @property
    def figures(self):
        """{name: Figure} in the order in which they were asked for."""
        names = [name for word in self.words for name in (FIGURES if word == "all" else [word])]
        return {name: FIGURES[name].shown(bool(self.public)) for name in names}

    @property
    def analyses(self):
        """{name of a public model: (its folder, the folder of its analysis)}"""
        found = {}
        for folder, name in short_names(tuple(str(Path(folder)) for folder in self.public)).items():
            # another model, other text or another dtype is another analysis
            what = (str(Path(folder).resolve()), self.units.data_dir, self.units.chunks, self.public_dtype)
            digest = hashlib.sha256(repr(what).encode()).hexdigest()[:8]
            found[name] = folder, Path(self.out_dir, "public", f"{Path(folder).name}-{digest}")
        return found

    @property
    def units(self):
        """The Scale, with the data folder that was asked for."""
        scale = SCALES[self.scale]
        data_dir = self.data_dir or scale.data_dir
        prepare = f"{scale.prepare} --out_dir={shlex.quote(data_dir)}"
        return dataclasses.replace(scale, data_dir=data_dir, prepare=prepare)


# -- the plan


def runs_of(cfg, figures):
    """{name: (settings of train.py, what else we need of it: "analysis", "scores")} of all runs of the figures."""
    runs = {}
    for figure in figures:
        for job in figure.jobs:
            for seed in SEEDS[: cfg.seeds]:
                name = f"{cfg.units.name(job)}-{seed}"
                settings = train_settings(job, cfg.units, seed, Path(cfg.out_dir, name))
                _, needs = runs.setdefault(name, (settings, set()))
                if job in figure.analysed:
                    needs.add("analysis")
                if figure.scored:
                    needs.add("scores")
    return runs


def commands(settings, needs, cfg):
    """{what it makes: words of a command} of what a run lacks: its training, its analysis, its scores on tasks."""
    folder, gpus, missing = settings["out_dir"], cfg.units.gpus, {}
    # at a scale without GPUs we compute on cores everywhere, so that all numbers are alike
    device = [] if gpus else ["--device=cpu"]
    if not finished(settings):
        launcher = ["torchrun", f"--nproc_per_node={gpus}"] if gpus else ["python"]
        missing["train"] = [*launcher, "train.py", *flags_of(TrainConfig, settings), "--resume=auto"]
    if "analysis" in needs and not Path(folder, "analysis.json").exists():
        words = [f"--chunks={cfg.units.chunks}", f"--data_dir={cfg.units.data_dir}"]
        missing["analyze"] = ["python", "analyze.py", folder, *words, *device]
    # tasks one by one, because one of them may have longer texts than the model takes
    tasks = [task for task in TABLE1 if "scores" in needs and task not in scores(Path(folder))]
    where = ["--dtype=float32", *([f"--data_dir={cfg.eval_dir}"] if cfg.eval_dir else []), *device]
    return missing | {task: ["python", "eval.py", folder, f"--task={task}", *where] for task in tasks}


def public_commands(cfg):
    """{folder: words of the command that makes the analysis there} of those that public models lack."""
    missing = {}
    for folder, out in cfg.analyses.values():
        if not is_hf_folder(folder):
            raise UserError(f"{folder} is not a model in Hugging Face layout; --public takes Llamas and Mistrals")
        if HFTokenizer.of_folder(folder).is_ours:
            raise UserError(f"{folder} is one of our exports; --public takes other people's models")
        length = min(cfg.units.lengths[2048][0], hf_config(folder).block_size)
        if not (out / "analysis.json").exists():
            words = ["python", "analyze.py", folder, f"--length={length}", f"--chunks={cfg.units.chunks}"]
            words += [f"--data_dir={cfg.units.data_dir}", f"--dtype={cfg.public_dtype}", f"--out_dir={out}"]
            missing[out] = [*words, *([] if cfg.units.gpus else ["--device=cpu"])]
    return missing


def cost(settings):
    """What runs with these settings of scale paper take, in words. Hours are counted FLOPs over a share of an A100's
    bf16 peak, without evaluations. A run keeps its last checkpoint and its best: weights, and AdamW's two moments."""
    flops = disk = 0
    for values in settings:
        cfg = TrainConfig(**values)
        model = cfg.model_config(VOCAB)
        flops += flops_per_token(model) * cfg.max_steps * cfg.batch_tokens
        disk += 2 * 3 * 4 * count_parameters(model)
    hours = flops / (MFU * PEAK_FLOPS["A100"]) / 3600
    takes = f"{hours:,.0f} GPU-hours at {MFU:.0%} of an A100's peak, without evaluations"
    return f"to train: {takes}, and at most {disk / 1e9:,.0f} GB of checkpoints"


# -- running


def has_data(cfg):
    return Path(cfg.units.data_dir, "manifest.json").exists()


def command_of(words, log, steps=0):
    """The Command of words as we print them. steps: of a training run."""
    launcher = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    return Command((*launcher, *words[1:]), log, log.parent if steps else None, steps)


def check_data(finished_runs, cfg):
    """Raise UserError if runs have seen different data, because nobody could compare them."""
    seen = {run.start["data"]: name for name, run in finished_runs.items()}
    if cfg.run and has_data(cfg):
        seen[Corpus(cfg.units.data_dir, 1, verify=False).hash] = cfg.units.data_dir
    if len(seen) > 1:
        raise UserError(f"{' and '.join(seen.values())} have different data; set another --out_dir")


def make_all(runs, public, cfg):
    """Make the runs that are missing, see runs_of, and the analyses of `public`, see public_commands. Returns ({name:
    Curves} of those that are there, {name: why it failed})."""
    made, failed = {}, {}  # names of runs, and logs of what a run is still a run without: a task's score, an analysis

    def note(what, error):
        print(f"note: {error}", flush=True)
        failed[what] = error

    def next_job(name, settings, needs):
        """The first command of a run that is neither done nor has failed; after the last one the run is made."""
        folder = settings["out_dir"]
        run = finished(settings)
        if run and run.final_loss == math.inf:
            raise UserError(f"the run in {folder} diverged; remove it to train it again")
        for what, words in (commands(settings, needs, cfg) if cfg.run else {}).items():
            log = Path(folder, f"{what}.log")
            if log not in failed:
                return command_of(words, log, settings["max_steps"] if what == "train" else 0)
        if run is None:
            raise UserError(f"{folder} is missing or not finished; leave out --run=false, or see its train.log")
        made[name] = run
        print(f"{len(made)} of {len(runs)}, {folder}: validation loss {run.final_loss:.4f}", flush=True)

    def wanted():
        if cfg.run and not has_data(cfg):
            return [command_of(shlex.split(cfg.units.prepare), Path(cfg.out_dir, "prepare.log"))]
        jobs = [command_of(words, out / "analyze.log") for out, words in public.items() if cfg.run]
        jobs = [job for job in jobs if job.log not in failed]
        for name, (settings, needs) in runs.items():
            if name not in made and name not in failed:
                try:
                    jobs.append(next_job(name, settings, needs))
                except UserError as e:
                    note(name, e)
        check_data(made, cfg)  # before anything trains
        return list(filter(None, jobs))

    def ended(job, code, last_words):
        if code:
            error = UserError(f"{job.log.stem} failed for {job.log.parent} (code {code}): {last_words}; see {job.log}")
            if job.log.stem == "prepare":
                raise error
            note(job.log.parent.name if job.log.stem == "train" else job.log, error)

    # a run on GPUs takes all of them
    run_jobs(wanted, ended, [{}] if cfg.units.gpus else lanes_of("cpu", 0, len(runs) or 1))
    return made, failed


# -- figures, numbers and the report


def publish(name, figure, cfg, found):
    """Draw a figure or print a table, write its numbers into results/<scale>.json, and the report anew."""
    print(f"{name}: {figure.caption}")
    record = {"caption": figure.caption, "environment": environment()}  # before it changes files of the repository
    record["runs"] = {found.name(job, s): found.final_loss(job, s) for job in figure.jobs for s in found.seeds}
    if figure.table:
        record["table"] = list(figure.table(found))
    record["rows"] = [claim_row(claim, found) for claim in figure.claims]
    print(*tables_of(record), sep="\n", flush=True)
    folder = Path(cfg.results_dir, cfg.scale)
    if figure.panels:  # last, so that an error leaves the old picture beside the old numbers
        page_of_panels(folder / f"{name}.png", figure, found)
        record["png"] = f"{cfg.scale}/{name}.png"
    # other figures of this scale keep their records, in the order of figures.py
    path = Path(cfg.results_dir, f"{cfg.scale}.json")
    figures = read_record(path, RESULTS)["figures"] if path.exists() else {}
    old = figures.get(name, {})
    if old == json.loads(json.dumps(record)) | {"environment": old.get("environment")}:
        record = old  # the same numbers keep the commit and the versions that first gave them
    figures[name] = record
    results = {"scale": cfg.units.what, "figures": {key: figures[key] for key in FIGURES if key in figures}}
    write_record(path, RESULTS, results)
    write_text(folder / "README.md", report_text(results, cfg.scale))


ABOUT = """Losses are in nats per token. "82M" and the like are the paper's sizes, see Tables 3 and 4. A claim is on the
base unless it says more: "82M" and the paper's length 2,048; "a − b" is a's loss minus b's. ± is half of a 95 %
interval over n seeds, by Student's t; one seed has none. "here": on which side of the paper's sign or bound the whole
interval is; "?": one seed. We don't correct for the number of verdicts."""


def tables_of(record):
    """The table and the claims of a figure as Markdown, those that it has."""
    if "table" in record:
        yield markdown(record["table"][0], record["table"][1:])
    if record["rows"]:
        yield markdown(HEADER, map(claim_cells, record["rows"]), left=3)


def section(name, record):
    """A figure or table of the report, as Markdown."""
    title = f"{'Table' if name.startswith('tab') else 'Figure'} {name.removeprefix('fig').removeprefix('tab')}"
    picture = [f"![{name}]({Path(record['png']).name})"] if "png" in record else []
    return "\n\n".join([f"## {title}", record["caption"], *picture, *map(compact, tables_of(record))])


def report_text(results, scale):
    """The text of results/<scale>/README.md, from what results/<scale>.json holds."""
    made = f"Written by `python -m paper.reproduce` from [{scale}.json](../{scale}.json), with runs and commits: "
    made += f"{results['scale']}. {ABOUT}"
    sections = [section(name, record) for name, record in results["figures"].items()]
    return "\n\n".join([f"# The paper's figures and tables at scale `{scale}`", made, *sections]) + "\n"


def main(cfg: ReproduceConfig):
    if cfg.eval_dir and not Path(cfg.eval_dir).is_dir():
        raise UserError(f"eval_dir={cfg.eval_dir} is not a folder; it takes one with <task>.jsonl files")
    runs = runs_of(cfg, cfg.figures.values())
    public = public_commands(cfg)  # refuses what is no Llama before anything runs
    if cfg.dry_run:
        if not has_data(cfg):
            print(cfg.units.prepare)
        missing = {name: commands(*run, cfg) for name, run in runs.items()}
        missing = {name: of_run for name, of_run in missing.items() if of_run}
        every_word = [*public.values(), *(words for of_run in missing.values() for words in of_run.values())]
        print(*map(shlex.join, every_word), f"{len(missing)} runs at scale {cfg.scale} ({cfg.units.what})", sep="\n")
        if cfg.units.gpus:
            print(cost([runs[name][0] for name, of_run in missing.items() if "train" in of_run]))
        return
    if cfg.run and cfg.units.gpus and not torch.cuda.is_available():
        raise UserError(f"scale={cfg.scale} needs GPUs, and there are none; see --run=false, --dry_run and --scale=cpu")
    if any(figure.panels for figure in cfg.figures.values()):
        need("matplotlib")  # before hours of training
    # data that needs no download is made
    if cfg.run and not has_data(cfg) and (cfg.data_dir or " pysource " not in cfg.units.prepare):
        raise UserError(f"{cfg.units.data_dir} has no manifest.json; make the data: `{cfg.units.prepare}`")
    with hold(cfg.out_dir) if cfg.run else contextlib.nullcontext():
        made, failed = make_all(runs, public, cfg)
    analyses = {name: out for name, (_, out) in cfg.analyses.items() if (out / "analysis.json").exists()}
    found = Found(made, cfg.units, SEEDS[: cfg.seeds], cfg.out_dir, failed, analyses)
    # a figure that lacks a run is skipped with a note, so that the others are still drawn
    missing = {}
    for name, figure in cfg.figures.items():
        try:
            publish(name, figure, cfg, found)
        except UserError as e:
            print(f"note: {e}", flush=True)
            missing[name] = e
    if missing:
        raise UserError(f"not drawn: {', '.join(missing)}, the first one because {next(iter(missing.values()))}")


if __name__ == "__main__":
    run(main, __doc__)
