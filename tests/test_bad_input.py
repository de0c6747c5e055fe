"""Bad input of every kind, made from a seed: each ends with exit code 2 and one sentence, and nothing saved is lost.

By chance some of it is right. Then it must be accepted rightly: each kind says what that means. `make fuzz` tries
30,000. A failure names its kind and number, and FUZZ="files 17" tries that one again.
"""

import contextlib
import dataclasses
import fnmatch
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from conftest import InThisProcess, in_process, make_data, refused
from test_eval import ROWS, write_rows
from tqdm import tqdm

import prepare
from configurator import UserError, types_of
from model import GPT
from value_modes import ModelConfig, Residual, ValueMode

SCRIPTS = "train prepare eval sample export analyze plot compare common.sizes bench.decoding bench.training"
SCRIPTS = {name: importlib.import_module(name) for name in [*SCRIPTS.split(), "examples.vit", "paper.reproduce"]}
SHAPE = "--data_dir=data --n_layer=2 --n_head=2 --n_embd=16 --block_size=32 --batch_tokens=64 --eval_tokens=64"
SHAPE += " --dtype=float32 --save_every=2 --eval_every=2 --warmup_steps=1 --keep=0"
TRAIN = f"train {SHAPE} --resume=auto"
RESUME, PREPARE = f"{TRAIN} --out_dir=run --max_steps=3", "prepare files --input_dir=texts --tokenizer=bpe:260"
EVAL = "eval run --task=winogrande,arc_easy --data_dir=evals"
BUILD = f"""{TRAIN} --out_dir=run --max_steps=2
{TRAIN} --out_dir=other --max_steps=2 --value_mode=svformer
{TRAIN} --out_dir=cmp/vanilla-2-0.0006-42 --max_steps=2
eval run --task=loss,piqa --data_dir=evals
analyze run --chunks=2
export run --out_dir=hf"""
RUN = "run/step_*2.safetensors run/config.json run/tokenizer.json"
OF_OURS = {  # calls, and the files of ours that they read
    RESUME: "run/step* run/config.json run/metrics.jsonl data/*",
    f"{TRAIN} --out_dir=new --max_steps=1 --init_from=run": f"{RUN} data/*",
    "eval run --task=loss": f"{RUN} run/eval.json data/*.json data/val/*",
    "sample run --max_new_tokens=4": RUN,
    "analyze run --chunks=2 --out_dir=new": f"{RUN} data/*.json data/val/*",
    "export run --out_dir=new": f"{RUN} run/env.json",
    "plot run --out_file=new.png": "run/analysis.json",
    f"compare vanilla svformer {SHAPE} --max_steps=2 --out_dir=cmp --dry_run": "data/*.json",
    f"{PREPARE} --out_dir=cut": "cut/*",
}
OF_USERS = {  # calls, and the files of a user that they read
    "sample hf --max_new_tokens=4 --prompt_file=prompts": "hf/* prompts",
    f"{PREPARE} --out_dir=new": "texts/*",
    EVAL: "evals/winogrande.jsonl evals/arc_easy.jsonl",
}
CALLS = OF_OURS | OF_USERS
VALUES = "x 0 1 -1 3 1e3 .5 nan 1e-320 true none [1] (1,2) (.5,) {'code':1} {'code':'x'} {1:1} (( é .. svformer cuda"
VALUES += " a=b '1' True 0x10 float('nan') 2**2000 {1} b'x' 1j range(3) ... __import__('numpy').arange(3)"
VALUES = [*VALUES.split(), "", "9" * 400, "[" * 999]
LINES = "||import math|def f(): return 1|x = (|raise SystemExit(3)|import no_such|\0|z = 1".split("|")
# what an empty setting is completed to
COMPLETED = "out_dir value_mode mixture task tokens workers tokenizer n_kv_head head_dim n_hidden rates".split()


def called(script, words, folder):
    """The result of `python script.py WORDS`, which accepts them, or refuses them with one sentence."""
    try:
        result = in_process(script, *words, cwd=folder)
        if result.returncode:
            refused(result)
    except Exception as e:
        raise AssertionError(f"{script.__name__} {words}: {e!r}") from e
    return result


class House:
    """A folder with every kind of file that our stages read, in which they are called."""

    def __init__(self, folder):
        self.dir, self.files, self.written = folder, {}, {}
        make_data(self.dir / "data", {"prose": 400, "code": 300}, n_val=500)
        write_rows(self.dir / "evals", {name: [row] for name, row in ROWS.items()})
        write_rows(self.dir / "texts", {n: [{"text": f"value {n}{i} of it"} for i in range(40)] for n in "abc"})
        (self.dir / "prompts").write_text("one\nor two\n")
        for words in BUILD.splitlines():
            self.call(words)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare.Placement, "add", lambda *of: None)
            patch.setattr(prepare, "write_manifest", lambda *of: sys.exit(1))  # cut off there: its parts stay
            in_process(prepare, *PREPARE.split()[1:], "--out_dir=cut", cwd=self.dir)
        self.files, self.written, self.made = self.contents(), {}, {}
        for words in CALLS:
            self.renew()
            self.made[words] = self.results(self.call(words))
            self.written[words] = {file for file in self.files if not self.is_untouched(self.dir / file)}
        assert all(self.made.values())  # each call was accepted

    def is_untouched(self, path):
        """Files that `renew` has written are from 1970."""
        return os.path.lexists(path) and path.lstat().st_mtime_ns == 0

    def renew(self):
        """Take away what is new, and write again what is not as it was."""
        for folder, _, names in os.walk(self.dir, topdown=False):
            for path in (Path(folder, name) for name in names):
                if not self.is_untouched(path):
                    path.unlink()
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)
        for name, content in self.files.items():
            path = self.dir / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                os.utime(path, (0, 0))

    def contents(self):
        """{name: bytes} of the files, without temporary ones, which are hidden. We only read what was touched."""
        found, start = {}, len(f"{self.dir}/")
        for folder, _, names in os.walk(self.dir):
            for path in (Path(folder, name) for name in names):
                name = str(path)[start:]
                if path.is_file() and "/." not in f"/{name}":
                    found[name] = self.files[name] if self.is_untouched(path) else path.read_bytes()
        return found

    def call(self, words, *more):
        """The result of a call, which changes no file but those that it writes where all is right."""
        before, (script, *rest) = self.contents(), words.split()
        result = called(SCRIPTS[script], [*rest, *more], self.dir)
        now = self.contents()
        changed = {file for file in self.files.keys() & before.keys() if now.get(file) != before[file]}
        lost = changed - self.written.get(words, changed)
        assert not lost, f"{words} {more}: {lost} lost or changed"
        return result

    def results(self, result):
        """What a call has made: numbers in new files, or on the screen, without times."""
        new = {file: content for file, content in self.contents().items() if file not in self.files}
        made = {file: new[file] for file in new if file.endswith((".safetensors", ".png", ".npz", ".bin"))}
        return made or re.sub(r"[\d.,]+ tok.*", "", result.stdout)


# ---- kinds: each function makes an input from a random generator, and says whether it was refused


def typo(rng, word):
    i = rng.randrange(len(word))
    return word[:i] + rng.choice(("", word[i] * 2, "x", "0", "-")) + word[i + 1 :]


def options(hint):
    """The words that a type of settings takes."""
    return [word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)]


def settings(rng, house):
    """As flags or in a config file. What is accepted is what was written."""
    script, in_file, written = SCRIPTS[rng.choice(list(SCRIPTS))], rng.random() < 0.4, {}
    cls = get_type_hints(script.main)["cfg"]
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, hint = rng.choice(list(types_of(cls).items()))
        ends = cls.__dataclass_fields__[name].metadata
        outside = [str(ends[end] + d) for end, d in (("least", -1), ("most", 1)) if ends.get(end) is not None]
        text = rng.choice(rng.choice([texts for texts in (VALUES, VALUES, options(hint), outside) if texts]))
        name, text = rng.choice([(name, text)] * 2 + [(typo(rng, name), text), (name, typo(rng, text + " "))])
        words.append(f"{name} = {text}" if in_file else f"--{name}={text}")
        values = [] if in_file else [text, (text,), tuple(text.split(",")), {"true": True}.get(text.lower())]
        with contextlib.suppress(Exception):
            value = eval(text)
            values += [value, (value,)]
            values.append(tuple(value))
        written[name if in_file else name.replace("-", "_")] = [] if text in outside else values

    def main(cfg: cls):
        for name, values in written.items():
            value = getattr(cfg, name)
            is_right = any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)
            assert name in COMPLETED or is_right, f"{name} is {value!r}"

    if in_file:
        words.insert(rng.randrange(len(words) + 1), rng.choice(LINES))
        (house.dir / "bad.py").write_text("\n".join(words), encoding="utf-8")
        words = ["bad.py"]
    words = {"PlotConfig": ["run"], "CompareConfig": ["vanilla", "svformer"]}.get(cls.__name__, []) + words
    stand_in = SimpleNamespace(main=main, __doc__="", __file__="", __name__=script.__name__)
    return called(stand_in, words, house.dir).returncode == 2


def part(rng, cls, often):
    """Some fields of a mode or of a residual."""
    chosen = [(name, options(hint)) for name, hint in types_of(cls).items() if rng.random() < often]
    others = [None, 0, 1, 2, -1, 0.5, (0,), (0, 2), (1.0, 0.5), (0.5, 0.5), "2:", "-1:", True, "x", [], {}, 10**400]
    return {name: rng.choice(words if words and rng.random() < 0.9 else others) for name, words in chosen}


def modes(rng, house):
    """A model has a finite loss, sees no later token, learns with every weight, and its config comes back from JSON."""
    mode = part(rng, ValueMode, 0.15)
    mode["residuals"] = [part(rng, Residual, 0.25) for _ in range(rng.choice((0, 1, 1, 2)))]
    shape = {"n_layer": rng.choice((2, 4)), "n_head": rng.choice((2, 4, 4, 3)), "n_kv_head": rng.choice((0, 0, 2))}
    try:
        cfg = ModelConfig(11, 8, **shape, n_embd=16, arch=rng.choice(("llama", "gpt2")), value_mode=mode)
    except UserError:
        return True
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg
    model, idx = GPT(cfg), torch.arange(16).view(2, 8) % 11
    logits, loss = model(idx)[0], model(idx, idx)[1]
    loss.backward()
    later = model(torch.cat((idx[:, :7], idx[:, :1]), dim=1))[0]
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    is_causal = torch.allclose(later[:, :7], logits[:, :7], atol=1e-5)
    assert loss.isfinite() and is_causal and not idle, f"{mode} {shape} {loss} {is_causal} {idle}"
    return False


def damaged(rng, content):
    at, junk = rng.randrange(len(content) + 1), rng.randbytes(99)
    flipped = content[:at] + bytes(b ^ 1 << rng.randrange(8) for b in content[at : at + 1]) + content[at + 1 :]
    hole = content[:at] + bytes(9) + content[at + 9 :]
    return rng.choice((flipped, flipped, flipped, content[:at], hole, content + junk, b"", junk, b"[" * 99_999))


def files(rng, house):
    """Of a damaged file of ours, a stage makes what it makes of the right one. A user's file may be another one."""
    words = rng.choice(list(CALLS))
    file = rng.choice([f for f in house.files if any(fnmatch.fnmatch(f, pattern) for pattern in CALLS[words].split())])
    path, damage = house.dir / file, rng.choice(("bytes", "bytes", "bytes", "another", "folder", "missing", "wrong"))
    path.unlink()
    if damage == "another":
        path.write_bytes(house.files[rng.choice([f for f in house.files if f.split("/")[-1] != path.name])])
    elif damage == "folder" or (damage == "missing" and file.startswith("run/step")):  # else it begins anew
        path.mkdir()
    elif damage == "wrong" and path.suffix == ".bin":  # ids beyond the vocabulary
        path.write_bytes(house.files[file][:50] + b"\xff\xff" + house.files[file][52:])
    elif damage == "wrong" and words == RESUME:  # of another mode
        path.write_bytes(house.files[file.replace("run/", "other/")])
    elif damage != "missing":
        path.write_bytes(damaged(rng, house.files[file]))
    result = house.call(words, *["--verify=false"] * (damage == "wrong" and words.startswith("train")))
    # a kill may cut metrics.jsonl anywhere: then the run is one that has not finished
    lines = path.read_bytes().split(b"\n")[:-1] if file == "run/metrics.jsonl" and path.is_file() else None
    is_cut = lines is not None and lines == house.files[file].split(b"\n")[: len(lines)]
    is_right = words in OF_USERS or is_cut or house.results(result) == house.made[words]
    assert result.returncode or is_right, f"{words} takes {file}, {damage}"
    return result.returncode == 2


def rows(rng, house):
    """A task's row without one of its fields, or with another type there, is refused."""
    name = rng.choice(list(ROWS))
    row = json.loads(json.dumps(ROWS[name]))
    part = row["choices"] if "choices" in row and rng.random() < 0.4 else row
    field = rng.choice([field for field in part if field != "id"])
    value = part.pop(field)
    if rng.random() < 0.7:
        part[field] = rng.choice([v for v in (None, 1.5, "xyz", [], {}, True) if type(v) is not type(value)])
    write_rows(house.dir / "evals", {name: [row]})
    assert house.call(EVAL, f"--task={name}").returncode, row
    return True


def paths(rng, house):
    """What is accepted leaves alone what was there."""
    (house.dir / "loop").symlink_to("loop")
    words = rng.choice(list(OF_OURS))
    types = types_of(get_type_hints(SCRIPTS[words.split()[0]].main)["cfg"])
    names = [name for name, hint in types.items() if hint is str and re.search("dir|file$|from|resume|corpus", name)]
    bad = "nowhere run/config.json texts . .. run/config.json/x loop evals other data cut * /proc/none/x é/b".split()
    return house.call(words, f"--{rng.choice(names)}={rng.choice([*bad, 'x' * 300])}").returncode == 2


def machines(rng, house):
    """After a full disk or a kill, the same call makes what it makes without."""
    words, is_refused, (soft, hard) = rng.choice(list(CALLS)), False, resource.getrlimit(resource.RLIMIT_FSIZE)
    if rng.random() < 0.7:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(2 ** rng.uniform(0, 17)), hard))
        try:
            is_refused = house.call(words).returncode == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    elif not (process := os.fork()):
        # tqdm's lock is shared with children: killed while it holds it, this one would stop us for ever
        tqdm.set_lock(threading.RLock())
        with contextlib.suppress(BaseException):
            house.call(words)
        os._exit(0)
    else:
        time.sleep(rng.uniform(0, 0.2))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    result = house.call(words)
    # a finished export is not replaced
    is_done = result.returncode == 0 or "error: new already exists" in result.stderr
    assert is_done and house.results(result) == house.made[words], f"{words}: {result.stderr}"
    return is_refused


SHARES = {settings: 550, modes: 300, files: 380, rows: 80, paths: 100, machines: 90}
FUZZ = os.environ.get("FUZZ") or "1500"  # how many inputs, or a kind and a number


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    def lines(figure, path, **how):
        path.write_text(str([line.get_xydata() for axes in figure.axes for line in axes.lines]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ProcessPoolExecutor", InThisProcess)
        patch.setattr(prepare, "BATCH_BYTES", 500)
        patch.setattr("matplotlib.figure.Figure.savefig", lines)
        patch.setenv("GIT_DIR", "/nowhere")
        yield House(tmp_path_factory.mktemp("house"))


@pytest.mark.parametrize("kind", SHARES, ids=lambda kind: kind.__name__)
def test_bad_input(kind, house):
    name, _, number = FUZZ.partition(" ")
    numbers = [int(number)] if name == kind.__name__ else []
    if not number:
        numbers = range(int(FUZZ) * SHARES[kind] // sum(SHARES.values()))
    wrong, n_refused = [], 0
    for i in numbers:
        print(kind.__name__, i)  # the last one is what hangs, should one hang
        if kind not in (settings, modes):
            house.renew()
        try:
            n_refused += kind(random.Random(f"{kind.__name__} {i}"), house)
        except Exception as e:
            wrong.append(f"{kind.__name__} {i}: {type(e).__name__}: {e}"[:400])
    print(f"{kind.__name__}: {n_refused} of {len(numbers)} refused, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong[:50])
