"""configurator.py and files.py: flags, config files, types, ranges, --help; seals, reading, atomic writes, locks."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from conftest import ROOT, in_process, refused
from safetensors.torch import save_file

import train
from common import files
from common.plan import count_parameters
from configurator import UserError, check_fields, load_settings, need, setting
from train import TrainConfig
from value_modes import VALUE_MODES, ValueMode, get_mode


@dataclass
class Config:
    learning_rate: float = setting(6e-4, "peak", least=0)
    max_steps: int = setting(10, "steps", least=1, most=9999)
    compile: bool = setting(False, "compile")
    maybe: bool | None = setting(None, "three ways")
    name: str = setting("x", "a name")
    kind: Literal["sdpa", "flash"] = setting("sdpa", "kernel")
    layers: tuple[int, ...] = setting((), "some layers", least=-4)
    words: tuple[str, ...] = setting((), "runs", positional=True)
    mixture: dict[str, float] = setting({}, "weights")
    mode: str | ValueMode = setting("vanilla", "mode")

    def __post_init__(self):
        check_fields(self)


# ---- flags and config files


def test_the_last_word_wins(tmp_path):
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("import math\nfrom dataclasses import dataclass\n_half = .5\nlearning_rate = _half\nmax_steps = 3\n")
    b.write_text("max_steps = 4\nname = 'b'\n")
    assert load_settings(Config, []) == Config()
    got = load_settings(Config, [str(a), "--name=flag", str(b), "--max-steps", "5"])
    assert (got.learning_rate, got.max_steps, got.name) == (0.5, 5, "b")


@pytest.mark.parametrize(
    "words,name,value",
    [
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning_rate 1e-3", "learning_rate", 1e-3),
        ("--max_steps=1e3", "max_steps", 1000),
        ("--compile", "compile", True),
        ("--compile False", "compile", False),
        ("--compile=on", "compile", True),
        ("--maybe=none", "maybe", None),
        ("--name=off", "name", "off"),
        ("--name=a=b", "name", "a=b"),
        ("--name=", "name", ""),
        ("--layers=(1,2)", "layers", (1, 2)),
        ("--layers=-1,2", "layers", (-1, 2)),
        ("--layers=8", "layers", (8,)),
        ("run1 --compile run2", "words", ("run1", "run2")),
        ("--mixture={'a':1}", "mixture", {"a": 1.0}),
    ],
)
def test_flags(words, name, value):
    got = getattr(load_settings(Config, words.split(" ")), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "word,says",
    [
        ("--learning_rate=abc", "--learning_rate=abc: learning_rate takes float, not 'abc'"),
        ("--learning_rate=nan", "learning_rate takes float, not 'nan'"),
        ("--learning_rate=1e999", "learning_rate takes float, not inf"),
        ("--learning_rate=-1", "learning_rate=-1.0 must be at least 0"),
        ("--learning_rte=1", "unknown setting 'learning_rte'; did you mean 'learning_rate'?"),
        ("--max_steps=1.5", "max_steps takes int, not 1.5"),
        ("--max_steps=1e16", "must be at most 9999"),
        ("--max_steps=1e300", "max_steps takes int, not 1e+300"),
        ("--max_steps", "max_steps takes int, not 'true'"),
        ("--compile=maybe", "compile takes bool, not 'maybe'"),
        ("--kind=eager", "kind takes Literal['sdpa', 'flash'], not 'eager'"),
        ("--layers=0,-5", "layers=-5 must be at least -4"),
        ("--mixture={'a':'x'}", "mixture takes dict[str, float], not {'a': 'x'}"),
        ("nowhere.py", "nowhere.py: no such config file"),
        ("max_steps = '5'", "bad.py: max_steps takes int, not '5'"),
        ("import numpy\nlayers = numpy.arange(3)", "bad.py: layers takes tuple[int, ...], not array([0, 1, 2])"),
        ("x = (", "bad.py: SyntaxError"),
        ("raise SystemExit(3)", "bad.py: SystemExit: 3"),
    ],
)
def test_bad_flags_and_config_files(word, says, tmp_path):
    if not word.startswith(("--", "nowhere")):
        (tmp_path / "bad.py").write_text(word)
        word = str(tmp_path / "bad.py")
    with pytest.raises(UserError, match=re.escape(says)):
        load_settings(Config, [word])


def test_a_default_is_not_shared():
    load_settings(Config, []).mixture["a"] = 1
    assert load_settings(Config, []).mixture == {}


# ---- scripts


def test_help_lists_every_setting_and_its_default():
    result = in_process(train, "--help")
    assert result.returncode == 0
    for name, field in TrainConfig.__dataclass_fields__.items():
        assert f"--{name}=" in result.stdout and len(field.metadata["help"]) > 5, name
    assert "--learning_rate=0.0006  (float)" in result.stdout and "torchrun --nproc_per_node=8" in result.stdout


def test_bad_input_of_a_script_is_one_sentence(monkeypatch):
    refused(in_process(train, "--value_mode=resfomer"), "unknown value_mode 'resfomer'", "did you mean 'resformer'")
    refused(in_process(train, "--n_embd=500", "--n_head=3"), "n_embd=500", "n_head=3")
    refused(in_process(train, "resformer"), "unexpected word 'resformer'; settings are --key=value")
    monkeypatch.setenv("RANK", "3")
    assert in_process(train, "--seed=x").stderr == "rank 3: error: --seed=x: seed takes int, not 'x'\n"


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_builds(path):
    cfg = load_settings(TrainConfig, [str(path)])
    assert cfg.split_batch(1)[0] >= 1 and count_parameters(cfg.model_config(50277)) > 0


@pytest.mark.parametrize(
    "size,right", [("2m", 1_623_856), ("82m", 81_901_056), ("180m", 179_874_048), ("468m", 467_921_920)]
)
def test_configs_compose(size, right):
    cfg = load_settings(TrainConfig, [f"{ROOT}/config/size_{size}.py", f"{ROOT}/config/resformer.py", "--seed=1"])
    assert count_parameters(cfg.model_config(50277)) == right
    assert cfg.value_mode == get_mode("resformer") and cfg.seed == 1 and cfg.out_dir == "out/resformer"
    assert 8 * math.prod(cfg.split_batch(8)) == 1024  # the paper's global batch
    for mode in VALUE_MODES:
        if (mode, size) != ("gqa8", "180m"):  # 12 heads are no groups of 8
            load_settings(TrainConfig, [f"{ROOT}/config/size_{size}.py", f"--value_mode={mode}"])


def test_packages(tmp_path, monkeypatch):
    """One that is not there, and one whose own imports fail."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("from math import nothing")
    with pytest.raises(UserError, match="broken cannot be imported .cannot import name 'nothing'.*pip install broken"):
        need("broken")
    with pytest.raises(UserError, match="no_such.part cannot be imported .*; run `pip install no-such`"):
        need("no_such.part", "no-such")
    assert need("math") is math


# ---- files


HOLDER = """
import sys, time
from common import files
with files.hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_has_one_holder(tmp_path):
    """Until it is killed: the system releases its lock."""
    command = [sys.executable, "-c", HOLDER, tmp_path / "new"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"another process is writing into {tmp_path}/new; wait"):
            with files.hold(tmp_path / "new"):
                pytest.fail("held twice")
        process.kill()
    with files.hold(tmp_path / "new"):
        pass


def full(temporary):
    temporary.write_text("half")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write,error", [(full, OSError), (lambda _: save_file({}, "/dev/full/x"), UserError)])
def test_a_failed_write_names_its_file_and_leaves_the_old_one(write, error, tmp_path):
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(error) as caught:
        files.write_atomic(tmp_path / "a", write)
    assert str(tmp_path / "a") in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_half_a_surrogate_pair_is_escaped(tmp_path):
    files.write_text(tmp_path / "a", "é\ud800")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "é\\ud800"


def test_a_record_comes_back(tmp_path):
    """Whatever the order of its keys."""
    record = {"b": [1, 2.5, None], "a": {"é": "x"}}
    files.write_record(tmp_path / "a.json", "a test's record", record)
    assert files.read_record(tmp_path / "a.json", "a test's record") == record
    assert files.sealed("k", {"a": 1, "b": 2}) == files.sealed("k", {"b": 2, "a": 1})
    (tmp_path / "a.jsonl").write_text(files.record_line("k", record) + files.record_line("k", {}) + '{"kin')
    assert files.read_record_lines(tmp_path / "a.jsonl", "k") == [record, {}]  # a kill has cut the last line


def test_every_changed_byte_of_a_record_is_noticed(tmp_path):
    path, record = tmp_path / "a.json", {"loss": 1.5, "steps": [10, 20], "name": "run"}
    files.write_record(path, "a test's record", record)
    text = path.read_bytes().rstrip()
    for i in range(len(text)):
        if not text[i : i + 1].isspace():  # another space changes no number
            path.write_bytes(text[:i] + bytes([text[i] ^ 1]) + text[i + 1 :])
            with pytest.raises(UserError, match=f"^{path} is damaged or not a test's record"):
                files.read_record(path, "a test's record")


DAMAGED = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[1]"),
    "no seal": lambda path: path.write_text('{"kind": "a test\'s record"}'),
    "another kind": lambda path: files.write_record(path, "another", {}),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_records_are_one_sentence(damage, tmp_path):
    path = tmp_path / "a.json"
    files.write_record(path, "a test's record", {"n": 1})
    DAMAGED[damage](path)
    with pytest.raises(UserError, match=f"^{path} is (damaged or not|missing; it should be) a test's record"):
        files.read_record(path, "a test's record")


@pytest.mark.parametrize("use", [lambda: {}["n"], lambda: [][1], lambda: 1 / 0, lambda: torch.ones(2).view(3)])
def test_an_error_in_the_use_of_a_file_is_one_sentence_too(use):
    with pytest.raises(UserError, match="^x is damaged or not a file of ours .*; copy it again, or make it again$"):
        with files.reading("x", "a file of ours"):
            use()
    with pytest.raises(UserError, match="^said already$"), files.reading("x", "a file of ours"):
        raise UserError("said already")
