"""configurator.py and files.py: flags, config files, sentences, --help; seals and atomic writes."""

import contextlib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import ROOT, in_process
from safetensors.numpy import save_file

import train
from common import files
from common.report import progress
from common.sizes import PlanConfig, count_parameters
from configurator import UserError, check_fields, load_settings, need, setting
from eval import EvalConfig
from plot import PlotConfig
from sample import SampleConfig
from train import TrainConfig
from value_modes import get_mode


@dataclass
class Config:
    learning_rate: float = setting(6e-4, "peak", least=0)
    max_steps: int = setting(10, "steps", least=1, most=9999)
    compile: bool | None = setting(None, "three ways")
    name: str = setting("x", "a name")
    kind: Literal["sdpa", "flash"] = setting("sdpa", "kernel")
    layers: tuple[int, ...] = setting((), "some layers", least=-4)
    words: tuple[str, ...] = setting((), "runs", positional=True)
    mixture: dict[str, float] = setting({}, "weights")

    def __post_init__(self):
        check_fields(self)


# ---- flags and config files


def test_the_last_word_wins(tmp_path):
    (tmp_path / "a.py").write_text("import math\nfrom re import sub\n_half = .5\nlearning_rate = _half\nmax_steps = 3")
    (tmp_path / "b.py").write_text("max_steps = 4\nname = 'b'\n")
    assert load_settings(Config, []) == Config()
    got = load_settings(Config, [f"{tmp_path}/a.py", "--name=flag", f"{tmp_path}/b.py", "--max_steps", "5"])
    assert (got.learning_rate, got.max_steps, got.name) == (0.5, 5, "b")


FLAGS = {
    "--learning_rate=1": ("learning_rate", 1.0), "--max_steps 1e3": ("max_steps", 1000), "--compile": ("compile", True),
    "--compile=False": ("compile", False), "--compile=none": ("compile", None), "--name=off": ("name", "off"),
    "--name=a=b": ("name", "a=b"), "--layers=-4,2": ("layers", (-4, 2)), "--layers=8": ("layers", (8,)),
    "run1 --compile run2": ("words", ("run1", "run2")), "--mixture={'a':1}": ("mixture", {"a": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("words", FLAGS)
def test_flags(words):
    name, value = FLAGS[words]
    got = getattr(load_settings(Config, words.split(" ")), name)
    assert got == value and type(got) is type(value)


BAD = {  # test_bad_input.py tries many more, but reads no sentence
    "--learning_rate=1e999": "learning_rate takes float, not inf",
    "--max_steps=1.5": "max_steps takes int, not 1.5",
    "--max_steps=true": "max_steps takes int, not True",
    "--learning_rte=1": "unknown setting 'learning_rte' (did you mean 'learning_rate'?); see",
    "--zzz=1": "unknown setting 'zzz'; see --help",
    "--lr=1": "unknown setting 'lr' (did you mean 'learning_rate'?)",
    "nowhere.py": "there is no config file nowhere.py",
    "refused.py": "refused.py: a rate of 0",
    "--max-iters=12": "max_iters is a nanoGPT setting; here, set max_steps",
    "--data_dir=a --data_dir=b": "--data_dir is given twice; it takes one folder",
    "--mixture=a:1": "mixture takes a dict such as {'text': 0.5}, not 'a:1'",
    "--kind --compile": "--kind needs a value: kernel",
    "--kind=eager": "kind takes 'sdpa' or 'flash', not 'eager'",
    "--layers=0,-5": "layers=-5 must be at least -4",
    "bad.py": "layers takes a tuple of int, not array([0, 1, 2]); a comma makes a tuple, as in (x,)",
    "wordless.py": "name takes str, not an object of class A",
}


@pytest.mark.parametrize("word", BAD)
def test_a_sentence_says_what_would_be_right(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("import numpy\nlayers = numpy.arange(3)", encoding="utf-8")
    Path("refused.py").write_text(
        "from configurator import UserError\nraise UserError('a rate of 0')", encoding="utf-8"
    )
    Path("wordless.py").write_text("class A:\n    __repr__ = None\nname = A()\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(BAD[word])):
        load_settings(Config, word.split())


@pytest.mark.parametrize("text, says", [
    ("n_layers = 3", "unknown setting 'n_layers' (did you mean 'n_layer'?)"),
    ("mode = 3", "sets none of this script's settings, such as value_mode"),
    ("max_steps = 3\nn_head = 4", ""),  # train.py's, which a plan does not need
])  # fmt: skip
def test_a_plan_knows_a_typo(text, says, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(says)) if says else contextlib.nullcontext():
        load_settings(PlanConfig, [str(tmp_path / "mine.py")], skip_unknown=True)


# ---- scripts


def test_help_lists_every_setting_and_its_default():
    result = in_process(train, "--help")
    assert result.returncode == 0
    for name, field in TrainConfig.__dataclass_fields__.items():
        assert f"--{name}=" in result.stdout and len(field.metadata["help"]) > 5, name
    assert "--learning_rate=0.0006  (float)" in result.stdout and "torchrun --nproc_per_node=8" in result.stdout


def test_a_value_of_nanogpts_is_answered_unless_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="init_from=resume is a nanoGPT setting; here, set resume=auto"):
        load_settings(TrainConfig, ["--init_from=resume"])
    Path("resume").mkdir()
    assert load_settings(TrainConfig, ["--init_from=resume"]).init_from == "resume"


def test_nanogpts_settings_are_answered_where_ours_exist():
    with pytest.raises(UserError, match="eval_only is a nanoGPT setting; here, run eval.py"):
        load_settings(TrainConfig, ["--eval_only=true"])
    with pytest.raises(UserError, match="unknown setting 'batch_size'"):
        load_settings(EvalConfig, ["--batch_size=8"])  # which has no micro_batch


def test_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert TrainConfig(out_dir="~/run").out_dir == "/home/me/run"
    assert TrainConfig(init_from="~/r").init_from == "/home/me/r"
    assert SampleConfig(run="~/r", prompt="~/r").run == "/home/me/r"  # a prompt is no path
    assert SampleConfig(run="~/r", prompt="~/r").prompt == "~/r"
    assert EvalConfig(runs=("~/a", "b")).runs == ("/home/me/a", "b")
    assert EvalConfig(corpus="~/data").corpus == "/home/me/data"
    assert PlotConfig(words=("relative", "~/a", "b")).words == ("relative", "/home/me/a", "b")


@pytest.mark.parametrize("words", ["--max_steps=1e16", "--batch_tokens=9223372036854775807"])
def test_numbers_that_nobody_can_mean(words):
    with pytest.raises(UserError, match="must be at most"):
        load_settings(TrainConfig, [words])


def test_without_stderr_a_bar_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    progress("loss", 2, "tok").update(1)


def test_help_without_docstrings(monkeypatch):
    monkeypatch.setattr(train, "__doc__", None)  # as python -OO leaves it
    assert "--learning_rate=" in in_process(train, "--help").stdout


def test_a_rank_says_which_one_it_is(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert in_process(train, "--seed=x").stderr == "rank 3: error: seed takes int, not 'x'\n"


def test_configs_compose():
    for path in (ROOT / "config").glob("*.py"):
        assert load_settings(TrainConfig, [str(path)]).split_batch(1)[0] >= 1, path
    cfg = load_settings(TrainConfig, [f"{ROOT}/config/size_82m.py", f"{ROOT}/config/resformer.py", "--seed=1"])
    assert count_parameters(cfg.model_config(50277)) == 81_901_056
    assert cfg.value_mode == get_mode("resformer") and cfg.seed == 1 and cfg.out_dir == "out/resformer"
    assert 8 * math.prod(cfg.split_batch(8)) == 1024  # the paper's global batch


def test_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("from math import nothing")
    with pytest.raises(UserError, match="broken cannot be imported .cannot import name 'nothing'.*pip install broken"):
        need("broken")
    with pytest.raises(UserError, match="no_such.part cannot be imported .*; run `pip install no-such`"):
        need("no_such.part", "no-such")


# ---- files


def test_a_failed_write_names_its_file_and_leaves_the_old_one(tmp_path):
    def full(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    files.write_text(tmp_path / "a", "old")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "a"))):
        files.write_atomic(tmp_path / "a", full)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_others_may_read_what_we_write(tmp_path):
    files.write_text(tmp_path / "a", "")
    (tmp_path / ".b.tmp").touch(mode=0o600)  # a kill has left it
    files.write_atomic(tmp_path / "b", lambda path: save_file({}, path))
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "a").symlink_to("/dev/null")
    with pytest.raises(UserError, match="a is not a file that can be replaced"):
        files.write_text(tmp_path / "a", "")


def test_a_librarys_own_error_keeps_its_reason():
    with pytest.raises(UserError, match="a gated dataset"), files.reading("x/y", "a data set", "ask for it"):
        raise FileNotFoundError("a gated dataset")  # those of `datasets` are of this kind, and name no file


def test_half_a_surrogate_pair_is_escaped(tmp_path):
    files.write_text(tmp_path / "a", "é\ud800")
    assert (tmp_path / "a").read_bytes().decode() == "é\\ud800"


def test_a_record_comes_back(tmp_path):
    record = {"b": [1, 2.5, None], "a": {"é": "x"}}
    files.write_record(tmp_path / "a.json", "a test's record", record)
    assert files.read_record(tmp_path / "a.json", "a test's record") == record
    assert files.sealed("k", {"a": 1, "b": 2}) == files.sealed("k", {"b": 2, "a": 1})
    (tmp_path / "a.jsonl").write_text(files.record_line("k", record) + files.record_line("k", {}) + '{"kin')
    assert files.read_record_lines(tmp_path / "a.jsonl", "k") == [record, {}]  # a kill has cut the last line
