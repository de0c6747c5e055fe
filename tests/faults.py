"""Faults of machines, one after another: `make faults`, 23 minutes on two busy cores.

    python tests/faults.py                     all, with a table
    python tests/faults.py --only="kill -9"    one kind

docs/reliability.md says what is tried, and what must come out.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from conftest import ROOT, make_data

import oldfiles as files
from oldconfig import UserError, command_line, require, run_main, setting
from report import markdown, progress
from runtime import environment

SHAPE = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_tokens=512", "--micro_batch=8"]
SHAPE += ["--warmup_steps=2", "--eval_tokens=512", "--eval_every=20", "--log_every=1000", "--keep=1", "--dtype=float32"]
TIMES = {"seconds", "tokens_per_s", "input_s", "mfu", "environment", "env", "time"}  # in which two runs may differ


class Failed(AssertionError):
    """A fault that lost something, or that was not said in one sentence."""


def demand(ok, what):
    if not ok:
        raise Failed(what)


# ---- running, and what a run leaves


def start(words, folder, injected=""):
    """A process of one of our scripts in a session of its own, which `end` kills whole. injected: Python that runs
    in it before the script."""
    words = list(map(str, words))
    if words[0] == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            str(ROOT / words[1]),
            *words[2:],
        ]
    elif injected:
        code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {words!r}\n{injected}\n"
        code += f"runpy.run_path({str(ROOT / words[0])!r}, run_name='__main__')"
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)


def ranks_of(process):
    """The pids of the ranks that a torchrun has started, which are in sessions of their own."""
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return list(map(int, listed.stdout.split()))


def end(process, number=signal.SIGKILL):
    """Send a signal to a process and its children; its output."""
    for pid in (process.pid, *ranks_of(process)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), number)
    return process.communicate(timeout=120)[0]


def completed(words, folder, injected=""):
    """(exit code, output) of a script."""
    process = start(words, folder, injected)
    try:
        output = process.communicate(timeout=300)[0]
        return process.returncode, output
    except subprocess.TimeoutExpired:
        raise Failed(f"{words[0]} hangs: {end(process)[-300:]}") from None


def without_times(value):
    """A JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def content(folder):
    """{file: what it holds} below a folder: bytes, and of JSON the values without times."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if not path.is_file() or path.name in ("env.json", "eval.md", "metrics.old.jsonl"):
            continue
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in data.splitlines()]
            data = [without_times(r) for r in records if r.get("event") != "start"]
            if path.name.startswith("samples"):
                data = {(r["document"], r["choice"]): r["log_prob"] for r in data if "document" in r}
        elif path.suffix == ".json":
            data = without_times(json.loads(data))
        elif path.suffix == ".npz":
            data = {name: array.tobytes() for name, array in np.load(path).items()}
        found[str(path.relative_to(folder))] = data
    return found


def is_same(name, now, right):
    """Whether two of `content`'s values are equal; scores up to rounding, for what a killed eval.py has left to do is
    scored in other batches."""
    if now is None or right is None or not name.startswith("samples"):
        return now == right
    return now.keys() == right.keys() and all(abs(now[slot] - right[slot]) < 1e-4 for slot in right)


def one_sentence(output):
    """Demand that a failed script said one sentence, and no traceback before it."""
    errors = [line for line in output.splitlines() if "error: " in line]
    demand(errors, f"no sentence: {output[-300:]}")
    demand("Traceback" not in output.split(errors[0])[0], f"a traceback first: {output[:300]}")
    demand(len([line for line in errors if line.startswith(("error: ", "rank "))]) == 1, f"several sentences: {errors}")


@dataclasses.dataclass
class Stage:
    """A command, the folder it writes into, and what an uninterrupted run leaves there."""

    name: str
    words: list
    out: Path
    before: Path | None = None  # what the folder holds before
    right: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def clean(self):
        shutil.rmtree(self.out, ignore_errors=True)
        if self.before:
            shutil.copytree(self.before, self.out)

    def measure(self, folder):
        self.clean()
        began = time.monotonic()
        code, output = completed(self.words, folder)
        demand(code == 0, f"{self.name} fails without a fault: {output[-500:]}")
        self.seconds = time.monotonic() - began
        self.right = content(self.out)

    def check(self, what):
        """Demand that the folder holds what an uninterrupted run leaves, and nothing more."""
        now = content(self.out)
        names = sorted(now.keys() | self.right.keys())
        differ = [name for name in names if not is_same(name, now.get(name), self.right.get(name))]
        demand(not differ, f"{self.name}, {what}: {', '.join(differ[:4])} differ from an uninterrupted run")


def stages(folder):
    """The Stages, each measured once."""
    texts = folder / "texts"
    texts.mkdir()
    rng = random.Random(0)
    for name in "abc":
        lines = [" ".join(rng.choice(["one", "two", "three", "four"]) for _ in range(2000)) for _ in range(60)]
        (texts / f"{name}.txt").write_text("\n".join(lines))
    data = make_data(folder / "data")
    rows = [dict(goal=f"goal {i}", sol1=f"a {i}", sol2=f"b {i} c", label=i % 2) for i in range(3000)]
    (folder / "evals").mkdir()
    (folder / "evals/piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, train = folder / "trained", ["train.py", *SHAPE, f"--data_dir={data}", "--save_every=10", "--resume=auto"]
    prepare = ["prepare.py", "files", f"--input_dir={texts}", "--tokenizer=bpe:300", "--workers=1"]
    one = Stage("train", [*train, "--max_steps=60", f"--out_dir={folder / 'one'}"], folder / "one")
    two = Stage("train, 2 ranks", ["torchrun", *train, "--max_steps=60", f"--out_dir={folder / 'two'}"], folder / "two")
    found = [Stage("prepare", [*prepare, f"--out_dir={folder / 'out'}"], folder / "out"), one, two]
    one.measure(folder)
    shutil.copytree(one.out, run)
    scored = ["eval.py", folder / "scored", "--task=piqa,loss", f"--data_dir={folder / 'evals'}", "--batch_tokens=256"]
    analysed = ["analyze.py", folder / "analysed", "--chunks=90", "--batch_tokens=64"]
    found.append(Stage("eval", scored, folder / "scored", run))
    found.append(Stage("analyze", analysed, folder / "analysed", run))
    export = ["export.py", run, f"--out_dir={folder / 'exported'}", "--overwrite"]
    found.append(Stage("export", export, folder / "exported"))
    for stage in found:
        stage.measure(folder)
    return {stage.name: stage for stage in found}


# ---- faults: each yields a line for each try


def kill(folder, known, rng):
    """kill -9 of all processes of a stage at a random moment; the same command goes on."""
    for name, tries in {"prepare": 10, "train": 10, "train, 2 ranks": 6, "eval": 8, "analyze": 6, "export": 4}.items():
        stage = known[name]
        for _ in range(tries):
            stage.clean()
            process = start(stage.words, folder)
            moment = rng.uniform(0.2, 1.0) * stage.seconds
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            end(process)
            code, output = completed(stage.words, folder)
            demand(code == 0, f"{name}, killed after {moment:.1f} s: {output[-300:]}")
            stage.check(f"killed after {moment:.1f} s")
            yield f"{name} after {moment:.1f} s"


FULL_DISK = """
import atexit, contextlib, errno, oldfiles as files
count, original = 0, files.writing
@contextlib.contextmanager
def writing(path):
    global count
    with original(path):
        yield
        count += 1
        if count == {n}:
            raise OSError(errno.ENOSPC, "No space left on device")
files.writing = writing
atexit.register(lambda: print("writes:", count))
"""


def full_disk(folder, known, rng):
    """No space at the n-th write of a run, for each n."""
    for name in ("prepare", "train", "eval", "analyze", "export"):
        stage = known[name]
        words = [word for word in stage.words if not str(word).startswith("--max_steps")]
        if name == "train":  # shorter: each of its steps writes
            words += ["--max_steps=6", "--save_every=3"]
        stage = Stage(name, words, stage.out, stage.before)
        stage.measure(folder)
        stage.clean()
        _, output = completed(words, folder, FULL_DISK.format(n=0))
        writes = int(output.rsplit("writes:", 1)[1])
        chosen = range(1, writes + 1) if writes <= 30 else sorted(rng.sample(range(1, writes + 1), 20))
        for n in chosen:
            stage.clean()
            code, output = completed(words, folder, FULL_DISK.format(n=n))
            demand(code == 2, f"{name}, write {n} of {writes}: exit code {code}: {output[-300:]}")
            one_sentence(output)
            code, output = completed(words, folder)
            demand(code == 0, f"{name} after write {n}: {output[-300:]}")
            stage.check(f"no space at write {n}")
            yield f"{name}, write {n} of {writes}"


def read_only(folder, known, rng):
    """A path that cannot be written to (a file where a folder should be: root may write into any folder)."""
    (folder / "file").write_text("")
    for name, word in (("prepare", "--out_dir="), ("train", "--out_dir=")):
        words = [w for w in known[name].words if not str(w).startswith("--out_dir")]
        code, output = completed([*words, f"{word}{folder / 'file' / 'x'}"], folder)
        demand(code == 2, f"{name} into a file: exit code {code}")
        one_sentence(output)
        yield f"{name} below a file"


SLOW = """
import oldfiles as files, time
writing = files.writing
def slow_writing(path):
    time.sleep({n})
    return writing(path)
files.writing = slow_writing
"""


def two_processes(folder, known, rng):
    """A second process in a folder in use: one sentence, and the first is not disturbed."""
    for name, seconds in {"train": 0.2, "prepare": 2}.items():  # the first is still at work when the second begins
        stage = known[name]
        stage.clean()
        first = start(stage.words, folder, SLOW.format(n=seconds))
        while not (stage.out / ".lock").exists() and first.poll() is None:
            time.sleep(0.02)
        code, output = completed(stage.words, folder)
        demand(code == 2 and "is in use by process" in output, f"{name} twice: {code} {output[-300:]}")
        one_sentence(output)
        output = first.communicate(timeout=300)[0]
        demand(first.returncode == 0, f"the first {name}: {output[-300:]}")
        stage.check("two at once")
        yield f"{name} twice"


def lost_rank(folder, known, rng):
    """kill -9 of one rank: the other ends within a minute with one sentence."""
    stage = known["train, 2 ranks"]
    for victim in (0, 1):
        stage.clean()
        process = start(stage.words, folder)
        while not list(stage.out.glob("step_*.safetensors")) and process.poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(ranks_of(process)[victim], signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
        demand(time.monotonic() - began < 60 and process.returncode, f"rank {victim}: {process.returncode}")
        one_sentence(output)
        demand(f"rank {victim} of 2 has ended" in output, f"rank {victim}: {output[-300:]}")
        code, output = completed(stage.words, folder)
        demand(code == 0, f"after a lost rank: {output[-300:]}")
        stage.check(f"rank {victim} lost")
        yield f"rank {victim}"


def vanished(folder, known, rng):
    """out_dir is removed while a run writes to it."""
    stage = known["train"]
    stage.clean()
    process = start(stage.words, folder)
    while not list(stage.out.glob("step_*.safetensors")) and process.poll() is None:
        time.sleep(0.02)
    stage.out.rename(folder / "removed")  # at once, unlike the removal of its files
    output = process.communicate(timeout=120)[0]
    demand(process.returncode == 2, f"exit code {process.returncode}: {output[-300:]}")
    one_sentence(output)
    yield "train"


def sigterm_while_compiling(folder, known, rng):
    """SIGTERM while torch.compile is at work: the process ends soon, and a later run is whole."""
    stage = known["train"]
    stage.clean()
    process = start([*stage.words, "--compile=true"], folder)
    while not (stage.out / "env.json").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    began = time.monotonic()
    end(process, signal.SIGTERM)
    demand(time.monotonic() - began < 10, "it went on for more than 10 s")
    code, output = completed(stage.words, folder)
    demand(code == 0, output[-300:])
    stage.check("SIGTERM while compiling")
    yield "train"


CLOCK = "import time; real = time.time; time.time = lambda: real() + ({n} if int(real() * 50) % 2 else -{n})"


def clock_jumps(folder, known, rng):
    """The clock of the day jumps by a year, back and forth."""
    for name in ("train", "prepare", "eval", "analyze"):
        stage = known[name]
        stage.clean()
        code, output = completed(stage.words, folder, CLOCK.format(n=3e7))
        demand(code == 0, f"{name}: {output[-300:]}")
        stage.check("clock jumps")
        yield name


FAULTS = {
    "kill -9": kill,
    "no space": full_disk,
    "not a folder": read_only,
    "two in one folder": two_processes,
    "a lost rank": lost_rank,
    "out_dir removed": vanished,
    "SIGTERM in compiling": sigterm_while_compiling,
    "clock jumps": clock_jumps,
}


@dataclasses.dataclass(frozen=True)
class FaultsConfig:
    """Every setting of faults.py."""

    only: str = setting("", "one kind of fault; empty = all")
    seed: int = setting(0, "of the moments")
    out_file: str = setting("", "JSON file for the counts")


def main(cfg: FaultsConfig):
    kinds = {name: fault for name, fault in FAULTS.items() if cfg.only in ("", name)}
    require(kinds, f"only={cfg.only!r} is none of {', '.join(FAULTS)}")
    began, rng, counts, failures = time.monotonic(), random.Random(cfg.seed), {}, []
    with tempfile.TemporaryDirectory() as folder, progress("faults", 120, "try") as bar:
        known = stages(Path(folder))
        for name, fault in kinds.items():
            counts[name] = {"tried": 0, "failed": 0}
            tries = fault(Path(folder), known, rng)
            while True:
                try:
                    next(tries)
                except StopIteration:
                    break
                except Failed as e:
                    failures.append(f"{name}: {e}")
                    counts[name]["failed"] += 1
                counts[name]["tried"] += 1
                bar.update(1)
    print(*failures, sep="\n")
    print(markdown(["fault", "tried", "failed"], [[name, *of.values()] for name, of in counts.items()]))
    if cfg.out_file:
        seconds = round(time.monotonic() - began)
        files.write_json(cfg.out_file, {"counts": counts, "seconds": seconds, "environment": environment()})
    if failures:
        raise UserError(f"{len(failures)} faults lost something or were not said in one sentence")


if __name__ == "__main__":
    run_main(main, command_line(FaultsConfig, __doc__))
