"""Is my mode better than vanilla? One command trains both, tunes both, and says how sure the answer is.

    python compare.py vanilla resformer_lambda svformer config/tiny.py                      one rate, one seed
    python compare.py vanilla mine.py config/night.py --rates=1.5e-3,3e-3,6e-3 --seeds=5    a fair comparison
    python compare.py vanilla mine.py config/night.py --rates=1.5e-3,3e-3,6e-3 --dry_run    its runs, tokens and hours

A mode is a name, or a config file that sets value_mode. All other settings are train.py's, and apply to every mode. A
run is a folder out_dir/<mode>-<steps>-<rate>-<seed>. One that already exists is reused; if its settings, data or code
(comments do not count) differ, the command says so and stops. Ctrl-C saves all runs; the same command continues.
What the numbers mean: docs/own_mode.md.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint import checked_run
from common.data import Corpus
from common.files import hold, read_record, write_record, write_text
from common.jobs import Command, flags_of, lanes_of, run_jobs, tokens_per_s
from common.ranks import enough_memory, environment
from common.report import markdown, say, with_interval
from common.runs import RUN, as_kept, differences, read_run, rounded_otherwise, write_kept
from common.sizes import count_parameters, notes_of
from common.statistics import Fit
from common.verdict import FLOOR, GROWTHS, LOOKS, in_words, judge, noisy, search, sentences
from configurator import UserError, need, run, setting
from plot import Effect, align, comparison, growing_means, short_count
from train import ENVIRONMENT, MAY_DIFFER, TrainConfig, settings_of
from value_modes import get_mode, kv_floats_per_token, read_mode

SEEDS = (42, *range(1, 10))  # 42 is the paper's
ANSWERS = "compare.py's answers"  # the kind of record that answers.json is
OF_A_RUN = ("value_mode", "value_mode_name", "learning_rate", "seed")  # in what the runs of a comparison may differ


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    """Every setting of compare.py: train.py's, and its own."""

    modes: tuple[str, ...] = setting(
        (), "names, or files", group="Comparison", positional=True, files_with="value_mode"
    )
    rates: tuple[float, ...] = setting((), "learning rates, as in 1.5e-3,3e-3; empty = learning_rate alone", most=1e5)
    seeds: int = setting(1, "runs of each mode at its best rate; they differ in weights and batches", least=1, most=10)
    jobs: int = setting(0, "runs at a time; 0 = one for each GPU or core; small ones can share a GPU", least=0)
    dry_run: bool = setting(False, "only say what would run")
    report: bool = setting(False, "also write out_dir/report.md (a page) and runs.jsonl (a record of each run)")

    def __post_init__(self):
        object.__setattr__(self, "out_dir", self.out_dir or "out/compare")
        super().__post_init__()
        for name, own in (("value_mode", get_mode("vanilla")), ("resume", "never"), ("init_from", "")):
            if getattr(self, name) != own:
                raise UserError(f"leave out {name}, and name modes without --: `python compare.py vanilla svformer`")
        if len(self.named) < 2:
            raise UserError("name two modes or more: `python compare.py vanilla svformer config/tiny.py`")
        rates = tuple(sorted(self.rates or (self.learning_rate,)))
        if rates[0] <= 0 or any(high < 1.4 * low for low, high in itertools.pairwise(rates)):
            raise UserError(f"the rates {rates} must be above 0, and each at least 1.4 times the one before")
        object.__setattr__(self, "rates", rates)

    @functools.cached_property
    def named(self):
        """{mode's name: (the word of train.py that makes it, the ValueMode)}, vanilla first, if it is there."""
        found = {}
        for word in self.modes:
            mode = read_mode(word)
            if mode.name in found:
                raise UserError(f"{word} names {mode.name} a second time; name each mode once")
            found[mode.name] = (word if word.endswith(".py") else f"--value_mode={word}"), mode
        return dict(sorted(found.items(), key=lambda item: item[0] != "vanilla"))

    @property
    def base_mode(self):
        """The name of the mode that all others are compared with."""
        return next(iter(self.named))

    @property
    def all_seeds(self):
        """42, 1, 2, …; with --seed=11 that one and the next: 11, 12, 13, …"""
        seeds = SEEDS if self.seed == SEEDS[0] else range(self.seed, self.seed + self.seeds)
        return list(seeds[: self.seeds])

    def of_run(self, mode, rate, seed):
        """The TrainConfig of a run."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)}
        values |= {"value_mode": self.named[mode][1], "learning_rate": rate, "seed": seed, "resume": "auto"}
        values["verify"] = False  # Study's Corpus has verified the data
        values["out_dir"] = str(Path(self.out_dir, f"{mode}-{self.max_steps}-{rate:g}-{seed}"))
        return TrainConfig(**values)


# -- the runs


class Study:
    """The runs of a comparison: {(mode, rate, seed): Curves} of those that have ended."""

    def __init__(self, cfg, corpus):
        self.cfg, self.corpus, self.runs = cfg, corpus, {}

    def loss_of(self, mode, rate, seed):
        """The loss of a run, infinite if it diverged, None before its end."""
        key = (mode, rate, seed)
        if key not in self.runs:
            settings = self.cfg.of_run(*key)
            found = checked_run(self.decisive(settings), settings.out_dir)
            if found is None or found.final_loss is None:
                return None
            self.runs[key] = found
            dtypes = {run.start["dtype"] for run in self.runs.values()}  # those that dtype=auto has become
            if len(dtypes) > 1:
                raise UserError(f"the runs of {self.cfg.out_dir} are in {' and '.join(sorted(dtypes))}; set --dtype")
        return self.runs[key].final_loss

    def decisive(self, settings):
        """What config.json must have if a run is to be that of a TrainConfig."""
        config, _ = settings_of(settings, self.corpus, None)
        return {name: value for name, value in config.items() if name not in MAY_DIFFER}

    def search(self, mode):
        return search(functools.partial(self.loss_of, mode), self.cfg.rates, self.cfg.all_seeds)

    def wanted(self):
        return [self.job(mode, *run) for mode in self.cfg.named for run in self.search(mode)[0]]

    def job(self, mode, rate, seed):
        settings = self.cfg.of_run(mode, rate, seed)
        flags = flags_of(TrainConfig, vars(settings) | {"value_mode": "vanilla"})  # a word of its own says the mode
        words = (str(Path(__file__).with_name("train.py")), self.cfg.named[mode][0], *flags)
        return Command(words, Path(settings.out_dir, "train.log"), Path(settings.out_dir), settings.max_steps)

    def ended(self, job, code, last_words):
        """Say how a run has ended. Raises UserError if it failed other than by diverging."""
        run = read_run(job.folder) if (job.folder / "metrics.jsonl").exists() else None
        if run is None or run.final_loss is None:
            raise UserError(f"{job.folder} failed (exit code {code}): {last_words}; see {job.log}")
        loss = f"{run.final_loss:.4f}"
        if run.final_loss == math.inf:
            loss = f"diverged, so its loss counts as infinite: {last_words.split(';')[0]}"
        elif code:
            loss += f", but its weights may not have been saved: {last_words}"
        say(f"{job.folder.name}: {loss}")

    def counts(self):
        """How many runs the procedure still needs, from fewest to most: it depends on where the best rates will be."""
        rates = self.cfg.rates
        loss_of = functools.cache(self.loss_of)  # to read what a run has so far takes a while
        beyond = 2 ** (GROWTHS + 1)  # where no grid grows
        found = [self.count(best, loss_of) for best in (rates[0] / beyond, *rates, rates[-1] * beyond)]
        return min(found), max(found)

    def count(self, best, loss_of):
        """How many runs it still needs, if the losses that we do not know yet are lowest at rate `best`."""
        asked = set()
        for mode in self.cfg.named:

            def loss_or_guess(rate, seed, mode=mode):
                loss = loss_of(mode, rate, seed)
                if loss is None and (mode, rate, seed) in asked:
                    return 1 + abs(math.log(rate / best))
                return loss

            while missing := search(loss_or_guess, self.cfg.rates, self.cfg.all_seeds)[0]:
                asked.update((mode, *run) for run in missing)
        return len(asked)

    def later(self):
        """How many steps, at least, will be asked for once the runs that are asked for now have ended."""
        return (self.counts()[0] - len(self.wanted())) * self.cfg.max_steps

    def answers(self):
        """What `judge` returns: the Answer of each mode, and the Fit."""
        tuned = {mode: self.search(mode)[1] for mode in self.cfg.named}
        pool = self.pool() if self.cfg.seeds == 1 else None
        tokens, floor = self.cfg.max_steps * self.cfg.batch_tokens, FLOOR if len(self.cfg.rates) > 1 else 0.0
        return judge(self.cells(), tuned, tokens, self.schedules(), pool, floor, self.elsewhere(tuned))

    def elsewhere(self, tuned):
        """The modes most of whose deciding runs, at the best rate, were on another processor than the base's run of the
        same seed. A run that was resumed on another one has no processor of its own."""
        devices = defaultdict(dict)
        for (mode, rate, seed), curves in self.runs.items():
            if rate == tuned[mode].rate:
                used = {start["rounding"]["device"] for start in curves.starts}
                devices[mode][seed] = used.pop() if len(used) == 1 else None
        base, found = devices[self.cfg.base_mode], []
        for mode, of_seeds in devices.items():
            n_same = sum(device is not None and device == base.get(seed) for seed, device in of_seeds.items())
            if 2 * n_same < len(of_seeds):
                found.append(mode)
        return found

    def cells(self):
        """{(mode, rate): {seed: loss}} of the runs that did not diverge."""
        cells = defaultdict(dict)
        for (mode, rate, seed), curves in self.runs.items():
            if math.isfinite(curves.final_loss):
                cells[mode, rate][seed] = curves.final_loss
        return dict(cells)

    def schedules(self):
        """[(tokens, Answer)] of the base at other lengths that this command has finished here."""
        cfg, points = self.cfg, []
        for steps in {made["max_steps"] for _, made in self.made()} - {cfg.max_steps}:
            with contextlib.suppress(UserError):  # some have other settings or other code
                other = Study(dataclasses.replace(cfg, max_steps=steps), self.corpus)
                missing, tuned = other.search(cfg.base_mode)
                if not missing:
                    (answer,), _ = judge(other.cells(), {cfg.base_mode: tuned})
                    if len(answer.losses) == cfg.seeds:
                        points.append((steps * cfg.batch_tokens, answer))
        return points

    def made(self):
        """Yields (folder, what its config.json has) of each run in the folder of the comparison."""
        for path in sorted(Path(self.cfg.out_dir).glob("*/config.json")):
            with contextlib.suppress(UserError):  # another program's, or damaged
                yield path.parent, read_record(path, RUN)

    def pool(self):
        """A Fit of all runs in the folder that differ from these in mode, rate and seed alone."""
        cells = defaultdict(dict)
        own = self.decisive(self.cfg.of_run(self.cfg.base_mode, self.cfg.rates[0], self.cfg.seed))
        for folder, made in self.made():
            differs = {name: made.get(name) for name in OF_A_RUN}
            with contextlib.suppress(UserError):  # some have other settings or other code
                loss = checked_run(own | differs, folder).final_loss
                if loss is not None and math.isfinite(loss):
                    cells[str(made["value_mode"]), made["learning_rate"]][made["seed"]] = loss
        return Fit(cells)

    def other_modes(self):
        """The modes that this comparison leaves out, of runs in the folder with these settings."""
        own = self.decisive(self.cfg.of_run(self.cfg.base_mode, self.cfg.rates[0], self.cfg.seed))
        wanted = {name: value for name, value in own.items() if name not in (*OF_A_RUN, "dtype")}  # it may be auto
        found = {made["value_mode_name"] for _, made in self.made() if not differences(made, wanted)}
        return sorted(found - set(self.cfg.named))

    def earlier(self):
        """What answers.json has: the modes, rates, seeds, steps and verdicts of each answer given here."""
        path = Path(self.cfg.out_dir, "answers.json")
        return read_record(path, ANSWERS)["answers"] if path.exists() else []

    def answer(self, answers):
        """These answers as answers.json has them."""
        cfg = self.cfg
        own = {"modes": list(cfg.named), "rates": list(cfg.rates), "seeds": cfg.all_seeds, "steps": cfg.max_steps}
        return own | {"differ": [a.mode for a in answers if a.differs]}


# -- the answer in words


def is_another_look(other, own):
    """Whether an earlier answer was about two or more of the same modes, with other seeds or rates."""
    is_same = (other["seeds"], other["rates"]) == (own["seeds"], own["rates"])
    return len(set(other["modes"]) & set(own["modes"])) > 1 and other["steps"] == own["steps"] and not is_same


def remarks(study, answers, fit, earlier):
    """Sentences on all modes together. earlier: the answers that this folder has given."""
    cfg, base = study.cfg, answers[0]
    has_intervals = any(a.interval for a in answers)
    named = {f"{mode}-{rate:g}-{seed}": curves for (mode, rate, seed), curves in study.runs.items()}
    yield from rounded_otherwise(named)
    if cfg.seeds == 1 and not has_intervals:
        yield f"One seed says nothing about noise. Add --seeds={5 if len(answers) == 2 else 3}."
    if len(cfg.rates) == 1:
        yield "A single rate favours the mode that it suits best. Name several --rates to be fair."
    if not has_intervals:
        return
    where = ", at the lowest points of the parabolas" if any(a.best and a.tuned.around for a in answers) else ""
    yield f"± is half of a 95% interval. We subtract losses seed by seed{where}, and estimate one noise for all modes."
    if cfg.seeds == 1:
        yield f"That noise ({fit.noise:.4f} nats) comes from other runs in {cfg.out_dir}, which have several seeds."
    for mode, share in noisy(fit).items():
        yield (
            f"{mode} accounts for {share:.0%} of the squared noise. If it is noisier than the others, ± is wrong. Then "
            f"compare {base.mode} with one mode at a time (no new runs), and multiply each p by {len(answers) - 1}."
        )
    if any(a.interval and a.p > 0.05 and abs(a.gap) > a.interval for a in answers):
        yield "Of several intervals, one may exclude 0 by luck. p allows for that (Dunnett's test), so it decides."
    if others := study.other_modes():
        yield (
            f"{cfg.out_dir} also has runs of {', '.join(others)} with these settings; if you left them out because of "
            f"their results, multiply p by {len(answers) - 1 + len(others)}, or name all of them in one command."
        )
    if any(is_another_look(other, study.answer(answers)) for other in earlier):
        yield (
            "These modes were compared here before, with other seeds or rates (answers.json). If that answer made you "
            "look again, p is too small."
        )
    if not any(a.times for a in answers):
        how = f"run this with --max_steps={2 * cfg.max_steps}, and then once more unchanged"
        yield f"How many times as many tokens would {base.mode} need? To find out, {how}."


def table(study, answers):
    """The answers as Markdown. A column without any number is left out: without several rates there is no parabola."""
    cfg, base = study.cfg, answers[0]
    rows = []
    for a in answers:
        shape = cfg.of_run(a.mode, a.tuned.rate, cfg.seed).model_config(study.corpus.tokenizer.n_vocab)
        loss = f"{statistics.mean(a.losses.values()):.4f}" if a.losses else "diverged"
        cells = [f"{a.tuned.rate:g}{' (edge)' * a.tuned.is_edge}", loss]
        cells += [f"{a.best.rate:.2g}", f"{a.loss:.4f}"] if a.losses and a.tuned.around else ["-", "-"]
        cells += ["-" if a.gap is None else with_interval(a.gap, a.interval, sign=True)]
        cells += ["-" if a.p is None else f"{a.p:.2g}"]
        cells += [in_words(a.times) if a.times else "-"]
        cells += [f"{count_parameters(shape):,}", f"{2 * kv_floats_per_token(shape):,}", f"{len(a.losses)}"]
        rows.append([a.mode, *cells])
    header = ["mode", "rate", "val loss", "parabola's rate", "its loss", f"vs {base.mode}", "p, corrected", "× tokens"]
    header += ["parameters", "KV bytes/token (bf16)", "seeds"]
    columns = [column for column in zip(header, *rows, strict=True) if set(column[1:]) != {"-"}]
    header, *rows = zip(*columns, strict=True)
    return markdown(header, rows)


def picture(study, answers, path):
    """The figure: effects, and training losses over tokens at the best rates tried, means over the seeds."""
    cfg, base = study.cfg, answers[0]
    curves, effects = {}, []
    for a in answers:
        if a.losses:
            steps = [study.runs[a.mode, a.tuned.rate, seed].steps for seed in a.losses]
            tokens, means = growing_means(*align([(arrays["tokens"], arrays["loss"]) for arrays in steps]))
            curves[a.mode] = tokens, means.mean(axis=0)
        if a.gap is not None:
            gain = a.best.gain - base.best.gain
            seeds = [a.losses[seed] - base.losses[seed] - gain for seed in a.losses.keys() & base.losses]
            differs = a.differs or (a.p is None and not a.is_elsewhere)
            effects.append(Effect(mode=a.mode, gap=a.gap, interval=a.interval, seeds=seeds, differs=differs))
    rate = "each at its best rate" if len(cfg.rates) > 1 else f"rate {cfg.rates[0]:g}"
    seeds = f"{cfg.seeds} seeds (ticks)" if cfg.seeds > 1 else "one seed"
    seeds += ", 95% intervals" * any(e.interval for e in effects)
    title = f"{short_count(cfg.max_steps * cfg.batch_tokens)} tokens, {rate}\n{seeds}"
    if curves:
        comparison(path, effects, curves, title, base.mode)


def write_report(study, said):
    """What a page needs besides the figure, in out_dir: table and sentences, and a record of each run."""
    cfg, kept = study.cfg, {}
    for key in study.runs:
        settings = study.cfg.of_run(*key)
        path = Path(settings.out_dir)
        made_on = read_record(path / "env.json", ENVIRONMENT)
        kept[path.name] = as_kept(study.runs[key], path, study.decisive(settings), made_on)
    write_kept(Path(cfg.out_dir, "runs.jsonl"), kept)
    made = environment()
    text = f"# {', '.join(cfg.named)}: {short_count(cfg.max_steps * cfg.batch_tokens)} tokens\n\n{said[0]}\n\n"
    text += "".join(f"- {line}\n" for line in said[1:])
    text += f"\n![{' and '.join(cfg.named)}](compare.png)\n\n[runs.jsonl](runs.jsonl) has settings and losses of the "
    text += f"{len(kept)} runs. Made by `python {made['command']}`, commit {made['commit']}, on {made['processor']}.\n"
    write_text(Path(cfg.out_dir, "report.md"), text)


def plan(study, lanes):
    """Lines that describe the procedure, and how many runs, tokens and hours it takes from here."""
    cfg = study.cfg
    rates = ", ".join(f"{rate:g}" for rate in cfg.rates)
    yield from notes_of(cfg, study.corpus, 1)
    yield f"{len(cfg.named)} modes on the same batches: {', '.join(cfg.named)}"
    tuned = f"with seed {cfg.seed}; up to {GROWTHS} more at the edge, up to {LOOKS} where a parabola promises a lot"
    yield f"rates: {f'{rates} {tuned}' if len(cfg.rates) > 1 else f'only {rates}, not tuned'}"
    where = "at the best rate of each mode" if len(cfg.rates) > 1 else "for each mode"
    yield f"seeds: {', '.join(map(str, cfg.all_seeds))} {where}"
    tokens = cfg.max_steps * cfg.batch_tokens
    fewest, most = study.counts()
    speed = tokens_per_s(cfg, study.corpus, list(study.runs.values())) if cfg.dry_run else None
    guess = "; hours are a guess from one pass without compile" if speed and not study.runs else ""

    def amount(n):
        hours = f", about {n * tokens / speed / 3600 / len(lanes):.1f} hours" if speed else ""
        return f"{n} run{'s' * (n != 1)}, {short_count(n * tokens)} tokens{hours}"

    if most and len(cfg.rates) > 1:
        most += LOOKS * len(cfg.named)
    at_most = f" (at most {amount(most)})" if most > fewest else ""
    yield f"still to run: {amount(fewest)}{at_most}, {len(lanes)} at a time{guess}"


@enough_memory("set a smaller --micro_batch")
def main(cfg: CompareConfig):
    need("matplotlib")  # before hours of training
    for mode in cfg.named:
        settings = cfg.of_run(mode, cfg.rates[0], cfg.seed)
        try:
            settings.model_config(vocab_size=1)  # an impossible shape is refused here
        except UserError as e:
            raise UserError(f"{mode}: {e}") from None
        settings.split_batch(1)  # and an impossible batch
    lanes = lanes_of(cfg.device, cfg.jobs, len(cfg.named) * max(len(cfg.rates), cfg.seeds))
    with contextlib.nullcontext() if cfg.dry_run else hold(cfg.out_dir):
        study = Study(cfg, Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, cfg.verify, cfg.bos))
        for line in plan(study, lanes):
            print(line, flush=True)  # the last one takes a while
        earlier = study.earlier()  # before any work: a damaged file ends this
        if not cfg.dry_run:
            run_jobs(study.wanted, study.ended, lanes, study.later)
            study = Study(cfg, study.corpus)  # the plan has also read runs that might have been asked for
            answers, fit = study.answers()
            said = [table(study, answers), *sentences(answers, cfg.seeds, len(cfg.rates) > 1)]
            said += remarks(study, answers, fit, earlier)
            print(*said, sep="\n")
            if any(a.interval for a in answers):
                others = [other for other in earlier if other != study.answer(answers)]
                write_record(Path(cfg.out_dir, "answers.json"), ANSWERS, {"answers": [*others, study.answer(answers)]})
            picture(study, answers, Path(cfg.out_dir, "compare.png"))
            if cfg.report:
                write_report(study, said)


if __name__ == "__main__":
    run(main, __doc__)
