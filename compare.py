"""Is my mode better than vanilla? One command trains both, tunes both, and says what the numbers can bear.

    python compare.py vanilla resformer_lambda svformer config/tiny.py                      one rate, one seed: a look
    python compare.py vanilla mine.py config/night.py --rates=1.5e-3,3e-3,6e-3 --seeds=3    a fair comparison
    python compare.py vanilla mine.py config/night.py --rates=1.5e-3,3e-3,6e-3 --dry_run    its runs, tokens and hours

A word is a mode: a name, or a config file that sets value_mode. All other settings are train.py's, and hold for every
mode. A run is a folder out_dir/<mode>-<steps>-<rate>-<seed>. One that is there is used; if its settings, data or code
(comments do not count) differ, the command says so and stops. Ctrl-C saves all runs; the same command goes on.
What the numbers mean: docs/own_mode.md.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from common.data import Corpus
from common.files import hold
from common.jobs import Job, flags_of, lanes_of, run_jobs, tokens_per_s
from common.modes import read_mode
from common.plan import count_parameters, notes_of
from common.report import markdown, say, some, with_interval
from common.runs import made_as, read_run
from common.statistics import Fit, holm, multiplier
from configurator import UserError, need, run, setting
from plot import align, comparison, growing_means, short_count
from train import MAY_DIFFER, TrainConfig, settings_of
from value_modes import get_mode, kv_floats_per_token

SEEDS = (42, *range(1, 10))  # 42 is the paper's
GROWTHS = 2  # how often a grid may grow by another rate, because its best one is at its edge


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    """Every setting of compare.py: train.py's, and its own."""

    modes: tuple[str, ...] = setting((), "names, or files", None, None, "Comparison", True, files_with="value_mode")
    rates: tuple[float, ...] = setting((), "learning rates, as in 1.5e-3,3e-3; empty = learning_rate alone", most=1e5)
    seeds: int = setting(1, "runs of each mode at its best rate; they differ in weights and batches", least=1, most=10)
    neighbours: bool = setting(False, "all seeds at the rates beside the best one too, which then choose")
    jobs: int = setting(0, "runs at a time; 0 = one for each GPU or core; small ones can share a GPU", least=0)
    dry_run: bool = setting(False, "only say what would run")

    def __post_init__(self):
        object.__setattr__(self, "out_dir", self.out_dir or "out/compare")
        super().__post_init__()
        for name, own in (("value_mode", get_mode("vanilla")), ("resume", "never"), ("init_from", "")):
            if getattr(self, name) != own:
                raise UserError(f"leave out {name}, and name modes without --: `python compare.py vanilla svformer`")
        if len(self.named) < 2:
            raise UserError("name two modes or more: `python compare.py vanilla svformer config/tiny.py`")
        if len({f"{rate:g}" for rate in self.rates}) < len(self.rates) or min(self.rates, default=1) <= 0:
            raise UserError(f"rates={self.rates} must be above 0, each named once")
        object.__setattr__(self, "rates", tuple(sorted(self.rates or (self.learning_rate,))))

    @functools.cached_property
    def named(self):
        """{mode's name: (the word of train.py that makes it, the ValueMode)}, vanilla first, if it is there."""
        found = {}
        for word in self.modes:
            mode = read_mode(word)
            if mode.name in found:
                raise UserError(f"{word} is {mode.name}, which is there already; name each mode once")
            found[mode.name] = (word if word.endswith(".py") else f"--value_mode={word}"), mode
        return dict(sorted(found.items(), key=lambda item: item[0] != "vanilla"))

    @property
    def all_seeds(self):
        return list(dict.fromkeys((self.seed, *SEEDS)))[: self.seeds]

    def of_run(self, mode, rate, seed):
        """The TrainConfig of a run."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(TrainConfig)}
        values |= {"value_mode": self.named[mode][1], "learning_rate": rate, "seed": seed, "resume": "auto"}
        values["verify"] = False  # Study's Corpus has verified the data
        values["out_dir"] = str(Path(self.out_dir, f"{mode}-{self.max_steps}-{rate:g}-{seed}"))
        return TrainConfig(**values)


# -- the procedure


def search(known, rates, seeds, neighbours=False):
    """The whole procedure: ([(rate, seed)] that a mode needs now, its best rate, whether a better one may lie beyond).

    known: function (rate, seed) -> loss, None before it is known. All rates get the first seed. Where the best one is
    at the grid's edge, the grid grows there by a factor of 2, at most twice. Then all seeds train at the best rate.
    With `neighbours` they also do at the rates beside it, and the mean over seeds chooses.
    """
    rates, first = list(rates), seeds[0]
    for growth in range(GROWTHS + 1):
        missing = [(rate, first) for rate in rates if known(rate, first) is None]
        if missing:
            return missing, None, False
        best = min(rates, key=lambda rate: known(rate, first))
        is_edge = len(rates) > 1 and best in (rates[0], rates[-1])
        if not is_edge or growth == GROWTHS:
            break
        rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]
    i = rates.index(best)
    tried = rates[max(0, i - 1) : i + 2] if neighbours else [best]
    missing = [(rate, seed) for rate in tried for seed in seeds if known(rate, seed) is None]
    if missing:
        return missing, None, False

    def by_mean(rate):  # first by how many diverged
        finite = [loss for loss in (known(rate, seed) for seed in seeds) if math.isfinite(loss)]
        return len(seeds) - len(finite), statistics.mean(finite or [0])

    best = min(tried, key=by_mean)
    return [], best, len(rates) > 1 and best in (rates[0], rates[-1])


class Study:
    """The runs of a comparison: {(mode, rate, seed): Curves} of those that have ended."""

    def __init__(self, cfg, corpus):
        self.cfg, self.corpus, self.runs = cfg, corpus, {}

    def known(self, mode, rate, seed):
        """The loss of a run, infinite if it diverged, None before its end."""
        key = (mode, rate, seed)
        if key not in self.runs:
            settings = self.cfg.of_run(*key)
            found = made_as(self.decisive(settings), settings.out_dir)
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

    def search(self, mode, known=None):
        known = known or functools.partial(self.known, mode)
        return search(known, self.cfg.rates, self.cfg.all_seeds, self.cfg.neighbours)

    def wanted(self):
        return [self.job(mode, *run) for mode in self.cfg.named for run in self.search(mode)[0]]

    def job(self, mode, rate, seed):
        settings = self.cfg.of_run(mode, rate, seed)
        flags = flags_of(TrainConfig, vars(settings) | {"value_mode": "vanilla"})  # a word of its own says the mode
        words = (str(Path(__file__).with_name("train.py")), self.cfg.named[mode][0], *flags)
        return Job(words, Path(settings.out_dir, "train.log"), Path(settings.out_dir), settings.max_steps)

    def ended(self, job, code, last_words):
        """Say how a run has ended. Raises UserError if it failed otherwise than by diverging."""
        run = read_run(job.folder) if (job.folder / "metrics.jsonl").exists() else None
        if run is None or run.final_loss is None:
            raise UserError(f"{job.folder} failed ({code}): {last_words}; see {job.log}")
        loss = f"{run.final_loss:.4f}"
        if run.final_loss == math.inf:
            loss = f"diverged, so its loss counts as infinite: {last_words.split(';')[0]}"
        elif code:
            loss += f", but its weights may not be saved: {last_words}"
        say(f"{job.folder.name}: {loss}")

    def schedules(self, mode):
        """[(tokens, loss)] of a mode at other lengths that this command has finished here; means over seeds."""
        points, cfg = [], self.cfg
        lengths = {path.name.removeprefix(f"{mode}-").partition("-")[0] for path in Path(cfg.out_dir).glob(f"{mode}-*")}
        for steps in map(int, filter(str.isdecimal, lengths - {str(cfg.max_steps)})):
            with contextlib.suppress(UserError):  # of other settings or other code
                other = Study(dataclasses.replace(cfg, max_steps=steps), self.corpus)
                missing, rate, _ = other.search(mode)
                loss = math.inf if missing else statistics.mean(other.known(mode, rate, seed) for seed in cfg.all_seeds)
                if math.isfinite(loss):
                    points.append((steps * cfg.batch_tokens, loss))
        return points


# -- the answer


@dataclass(frozen=True)
class Answer:
    """What the runs say of a mode. Losses are in nats per token; None is what one seed cannot say."""

    mode: str
    rate: float
    is_edge: bool  # a better rate may lie beyond the grid
    losses: dict  # {seed: validation loss}; empty if the mode diverged at every rate
    gap: float | None = 0.0  # minus the base's loss; None without a common seed
    interval: float | None = None  # half of 95 %
    p: float | None = None  # after Holm's correction
    n_diverged: int = 0  # of its seeds
    tokens: tuple = ()  # how many times its tokens the base needs for this loss: (least, most), or empty

    def sentence(self, base, cfg):
        below, better = ("below", "better") if (self.gap or 0) < 0 else ("above", "worse")
        if not self.losses:
            return f"{self.mode} diverged at every rate down to {self.rate:g}: name lower --rates."
        if self.mode == base:
            words = "is what the others are compared with"
        elif self.gap is None:
            return f"{self.mode} and {base} have no seed in common that did not diverge."
        elif self.interval is None:
            least = 0.1 if cfg.max_steps * cfg.batch_tokens < 5e6 else 0.03  # what seeds of our small models were off
            more = ": add --seeds=3" if cfg.seeds == 1 else " (others diverged)"
            ends = f"{abs(self.gap):.3f} nats {below}" if abs(self.gap) >= 0.0005 else "level with"
            words = f"ends {ends} {base}; with one seed less than {least} may be noise{more}"
        elif self.p > 0.05:
            gap = with_interval(self.gap, self.interval, sign=True)
            words = f"cannot be told apart from {base}: {gap} nats, p = {self.p:.2g}"
        else:
            words = f"is {better} than {base} by {with_interval(abs(self.gap), self.interval)} nats"
        if self.tokens:
            words += "; {} needs {:.2f} to {:.2f} times as many tokens for that loss".format(base, *self.tokens)
        if self.is_edge:
            words += f"; {self.rate:g} is the edge of its rates, so a better one may lie beyond"
        if self.n_diverged:
            words += f"; {self.n_diverged} of its {cfg.seeds} seeds diverged"
        return f"{self.mode} {words}."


def answers(study):
    """The Answer of each mode, that of the base first."""
    modes, seeds = list(study.cfg.named), study.cfg.all_seeds
    best = {mode: study.search(mode)[1:] for mode in modes}
    cells = {}  # also those that --neighbours trained
    for (mode, rate, seed), curves in study.runs.items():
        if math.isfinite(curves.final_loss):
            cells.setdefault((mode, rate), {})[seed] = curves.final_loss
    base = modes[0], best[modes[0]][0]
    if base not in cells:
        raise UserError(f"{base[0]} diverged at every rate down to {base[1]:g}, name lower --rates")
    fit = Fit({cell: cells[cell] for cell in cells if len(cells[cell]) > 1 or cell[1] == best[cell[0]][0]})
    pairs = {mode: {(mode, best[mode][0]): 1, base: -1} for mode in modes[1:] if (mode, best[mode][0]) in cells}
    found = {mode: fit.contrast(weights) for mode, weights in pairs.items()}
    ps = holm({mode: p for mode, (*_, p) in found.items() if p is not None})
    # vanilla's nearest longer schedule, else the nearest shorter one, from which we have to guess how the curve goes on
    own, level = study.cfg.max_steps * study.cfg.batch_tokens, statistics.mean(cells[base].values())
    others = [point for point in study.schedules(modes[0]) if (point[0] - own) * (level - point[1]) > 0]
    others.sort(key=lambda point: (point[0] < own, abs(point[0] - own)))
    error = (fit.noise or 0) / math.sqrt(len(cells[base]))
    answer = []
    for mode in modes:
        losses, tokens = cells.get((mode, best[mode][0]), {}), ()
        gap, interval, _ = found.get(mode, (0.0, None, None))
        if others and interval is not None:
            tokens = multiplier(level + gap, (own, level), others[0], error)
        answer.append(Answer(mode, *best[mode], losses, gap, interval, ps.get(mode), len(seeds) - len(losses), tokens))
    return answer


def rounded_otherwise(runs):
    """Yields a sentence, or nothing: in what the machines of these runs {(mode, rate, seed): Curves} differ."""
    made_with = defaultdict(lambda: defaultdict(list))  # {what: {which: names of runs}}
    for (mode, rate, seed), curves in runs.items():
        for start in curves.starts:  # a resumed run may have several machines
            for what, which in start["rounding"].items():
                made_with[what][which].append(f"{mode}-{rate:g}-{seed}")
    differ = []
    for what, names in made_with.items():
        if len(names) > 1:
            kinds = (f"{which}: {some(sorted(set(names[which])))}" for which in names)
            differ.append(f"{what} ({'; '.join(kinds)})")
    if differ:
        yield f"The runs differ in {' and in '.join(differ)}. Rounding alone has moved a loss of ours by 0.02."


def report(study, answer):
    """Print the table, a sentence for each mode, and what a reader must know of all."""
    base, cfg, rows = answer[0].mode, study.cfg, []
    for a in answer:
        shape = cfg.of_run(a.mode, a.rate, cfg.seed).model_config(study.corpus.tokenizer.n_vocab)
        loss = f"{statistics.mean(a.losses.values()):.4f}" if a.losses else "diverged"
        gap = "-" if a.mode == base or not a.losses or a.gap is None else with_interval(a.gap, a.interval, sign=True)
        cells = ["-" if a.p is None else f"{a.p:.2g}", "{:.2f} to {:.2f}".format(*a.tokens) if a.tokens else "-"]
        cells += [f"{count_parameters(shape):,}", f"{2 * kv_floats_per_token(shape):,}", f"{len(a.losses)}"]
        rows.append([a.mode, f"{a.rate:g}{' (edge)' * a.is_edge}", loss, gap, *cells])
    header = ["mode", "rate", "val loss", f"vs {base}", "Holm's p", "× tokens", "parameters"]
    header += ["KV bytes/token (bf16)", "seeds"]
    says = [a.sentence(base, cfg) for a in answer if a.mode != base or a.is_edge or a.n_diverged]
    print(markdown(header, rows), *says, *rounded_otherwise(study.runs), sep="\n")
    if len(cfg.rates) == 1:
        print(f"One rate, {cfg.rates[0]:g}, favours the mode that it suits best: name several --rates to be fair.")
    if cfg.seeds > 1:
        print("±: half of a 95 % interval. Differences are of equal seeds, and all modes share one noise.")
    if not any(a.tokens for a in answer):
        how = f"run this with --max_steps={2 * cfg.max_steps}, then as now" + ", both with --seeds=3" * (cfg.seeds == 1)
        print(f"× tokens needs {base} at another length: {how}.")


def picture(study, answer):
    """The figure: effects, and training losses over tokens at the best rates, means over the seeds."""
    base, cfg, curves, effects = answer[0], study.cfg, {}, []
    for a in answer:
        steps = [study.runs[a.mode, a.rate, seed].steps for seed in a.losses]
        if steps and a.gap is not None:
            tokens, means = growing_means(*align([(of["tokens"], of["loss"]) for of in steps]))
            curves[a.mode] = a.mode, tokens, means.mean(axis=0)
            seeds = [a.losses[seed] - base.losses[seed] for seed in a.losses.keys() & base.losses]
            effects.append((a.mode, a.mode, a.gap, a.interval, seeds, a.p is None or a.p <= 0.05))
    rate = "each at its best rate" if len(cfg.rates) > 1 else f"rate {cfg.rates[0]:g}"
    seeds = f"{cfg.seeds} seeds (ticks), 95 % intervals" if cfg.seeds > 1 else "one seed"
    title = f"{short_count(cfg.max_steps * cfg.batch_tokens)} tokens, {rate}\n{seeds}"
    comparison(Path(cfg.out_dir, "compare.png"), effects[1:], curves, title, base.mode)


def runs_to_come(study, taste):
    """How many runs the procedure still needs, if the losses that we do not know yet are `taste`(rate)."""
    asked = set()
    for mode in study.cfg.named:

        def known(rate, seed, mode=mode):
            there = study.known(mode, rate, seed)
            return taste(rate) if there is None and (mode, rate, seed) in asked else there

        while missing := study.search(mode, known)[0]:
            asked.update((mode, *run) for run in missing)
    return len(asked)


def plan(study, lanes):
    """Lines that say the procedure, and how many runs, tokens and hours it takes from here."""
    cfg, rates = study.cfg, ", ".join(f"{rate:g}" for rate in study.cfg.rates)
    yield from notes_of(cfg, study.corpus, 1)
    yield f"{len(cfg.named)} modes on the same batches: {', '.join(cfg.named)}"
    tuned = f"with seed {cfg.seed}; up to {GROWTHS} more where the best is at the edge"
    yield f"rates: {f'{rates} {tuned}' if len(cfg.rates) > 1 else f'only {rates}, not tuned'}"
    beside = " and at those beside it, which then choose" if cfg.neighbours else ""
    where = f"at the best rate of each mode{beside}" if len(cfg.rates) > 1 else "for each mode"
    yield f"seeds: {', '.join(map(str, cfg.all_seeds))} {where}"
    tokens, best = cfg.max_steps * cfg.batch_tokens, [cfg.rates[0] / 8, *cfg.rates, cfg.rates[-1] * 8]
    counts = sorted(runs_to_come(study, lambda rate, at=at: 1 + abs(math.log(rate / at))) for at in best)
    speed = tokens_per_s(cfg, study.corpus, list(study.runs.values())) if cfg.dry_run else None
    guess = "; hours are a guess from one pass without compile" if speed and not study.runs else ""

    def amount(n):
        hours = f", about {n * tokens / speed / 3600 / len(lanes):.1f} hours" if speed else ""
        return f"{n} run{'s' * (n != 1)}, {short_count(n * tokens)} tokens{hours}"

    most = f" (at most {amount(counts[-1])})" if counts[-1] > counts[0] else ""
    yield f"to come: {amount(counts[0])}{most}, {len(lanes)} at a time{guess}"


def main(cfg: CompareConfig):
    need("matplotlib")  # before hours of training
    for mode in cfg.named:
        cfg.of_run(mode, cfg.rates[0], cfg.seed).split_batch(1)  # an impossible shape or batch is refused here
    lanes = lanes_of(cfg.device, cfg.jobs, len(cfg.named) * max(len(cfg.rates), cfg.seeds))
    with contextlib.nullcontext() if cfg.dry_run else hold(cfg.out_dir):
        study = Study(cfg, Corpus(cfg.data_dir, cfg.block_size, cfg.seed, cfg.mixture, cfg.verify, cfg.bos))
        for line in plan(study, lanes):
            print(line, flush=True)  # the last one takes a while
        if not cfg.dry_run:
            run_jobs(study.wanted, study.ended, lanes)
            answer = answers(study)
            report(study, answer)
            picture(study, answer)


if __name__ == "__main__":
    run(main, __doc__)
