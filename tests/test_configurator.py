"""Settings: precedence, types in flags and files alike, and one sentence for what is wrong."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest
from conftest import ROOT, in_process, refused, script

import train
from describe import count_parameters
from oldconfig import UserError, check_ranges, load_settings, need, setting
from train import TrainConfig
from value_modes import ValueMode, get_mode


@dataclass
class Config:
    learning_rate: float = setting(6e-4, "peak")
    max_steps: int = setting(10, "steps")
    compile: bool = setting(False, "compile")
    maybe: bool | None = setting(None, "three ways")
    name: str = setting("x", "a name")
    kind: Literal["sdpa", "flash"] = setting("sdpa", "kernel")
    layers: tuple[int, ...] = setting((), "some layers")
    words: tuple[str, ...] = setting((), "runs")
    mixture: dict = setting({}, "weights")
    mode: str | ValueMode = setting("vanilla", "mode")

    def __post_init__(self):
        if self.max_steps < 0:
            raise ValueError("max_steps must not be negative")


def test_left_to_right(tmp_path):
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("import math\nfrom dataclasses import dataclass\n_half = .5\nlearning_rate = _half\nmax_steps = 3\n")
    b.write_text("max_steps = 4\nname = 'b'\n")
    assert load_settings(Config, []) == Config()
    got = load_settings(Config, [str(a), "--name=flag", str(b), "--max-steps", "5"])
    assert (got.learning_rate, got.max_steps, got.name) == (0.5, 5, "b")


def test_flags():
    for words, field, value in (
        (["--learning_rate=1"], "learning_rate", 1.0),
        (["--learning_rate", "-1e-3"], "learning_rate", -1e-3),
        (["--max_steps=1e3"], "max_steps", 1000),
        (["--max_steps=2_000"], "max_steps", 2000),
        (["--compile"], "compile", True),
        (["--compile=false"], "compile", False),
        (["--compile", "False"], "compile", False),
        (["--compile=on"], "compile", True),
        (["--compile", "OFF"], "compile", False),
        (["--name=off"], "name", "off"),
        (["--maybe=none"], "maybe", None),
        (["--maybe=true"], "maybe", True),
        (["--name=a=b"], "name", "a=b"),
        (["--name=12"], "name", "12"),
        (["--name="], "name", ""),
        (["--kind", "flash"], "kind", "flash"),
        (["--layers=(1,2)"], "layers", (1, 2)),
        (["--layers=1,2"], "layers", (1, 2)),
        (["--layers=8"], "layers", (8,)),
        (["--words=a,b"], "words", ("a", "b")),
        (["--mixture={'a': 1}"], "mixture", {"a": 1}),
        (["--mode=resformer"], "mode", "resformer"),
    ):
        got = getattr(load_settings(Config, words), field)
        assert got == value and type(got) is type(value), words
    load_settings(Config, []).mixture["a"] = 1
    assert load_settings(Config, []).mixture == {}  # defaults are not shared


@dataclass
class Many:
    runs: tuple[str, ...] = setting((), "runs", positional=True)
    max_steps: int = setting(10, "steps", least=1, most=20)


@dataclass
class One:
    source: str = setting("x", "what", positional=True)


def test_positional_words():
    assert load_settings(Many, ["run1", "--max_steps=2", "run2"]).runs == ("run1", "run2")
    assert load_settings(One, ["slimpajama"]).source == "slimpajama"
    with pytest.raises(UserError, match="unexpected word 'b'"):
        load_settings(One, ["a", "b"])


@dataclass
class Rate:
    rate: float = setting(0.0, "rate", least=0)
    rates: tuple[float, ...] = setting((), "rates", least=0)
    maybe: int | None = setting(None, "three ways", least=0)


def test_ranges():
    for value, says in ((0, "at least 1"), (21, "at most 20"), (-5, "at least 1")):
        with pytest.raises(ValueError, match=f"max_steps={value} must be {says}"):
            check_ranges(Many(max_steps=value))
    for bad in (Rate(rate=math.nan), Rate(rate=math.inf), Rate(rates=(1.0, -1.0)), Rate(maybe=-1)):
        with pytest.raises(ValueError, match="must be at least 0"):
            check_ranges(bad)
    check_ranges(Many())
    check_ranges(Rate())


def test_bad_flags():
    for word, says in (
        ("--learning_rate=abc", "--learning_rate=abc: learning_rate takes float, not 'abc'"),
        ("--learning_rte=1", "did you mean 'learning_rate'?"),
        ("--zzz=1", "--help lists all"),
        ("--max_steps=1.5", "max_steps takes int, not 1.5"),
        ("--max_steps=true", "max_steps takes int"),
        ("--max_steps=nan", "max_steps takes int"),
        ("--max_steps", "max_steps takes int, not True"),
        ("--compile=maybe", "compile takes true or false, not 'maybe'"),
        ("--kind=eager", "kind takes 'sdpa' or 'flash', not 'eager'"),
        ("--layers=(1,'a')", "layers[1] takes int, not 'a'"),
        ("--max_steps=-1", "max_steps must not be negative"),
        ("nowhere.py", "nowhere.py: no such config file"),
        ("resformer", "unexpected word 'resformer'"),
    ):
        with pytest.raises(UserError) as e:
            load_settings(Config, [word])
        assert says in str(e.value)


def test_bad_files(tmp_path):
    path = tmp_path / "bad.py"
    for text, says in (
        ("learning_rte = 1", "unknown setting 'learning_rte'; did you mean 'learning_rate'?"),
        ("max_steps = 5.5", "max_steps takes int, not 5.5"),
        ("max_steps = '5'", "max_steps takes int, not '5'"),
        ("learning_rate = None", "learning_rate takes float"),
        ("x = (", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("name = 1/0", "ZeroDivisionError"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as e:
            load_settings(Config, [str(path)])
        assert str(path) in str(e.value) and says in str(e.value)


def test_help_lists_every_setting_and_its_default():
    result = script("train.py", "--help")
    assert result.returncode == 0
    for name, field in TrainConfig.__dataclass_fields__.items():
        assert f"--{name}=" in result.stdout and len(field.metadata["help"]) > 5, name
    assert "--learning_rate=0.0006  (float)" in result.stdout and "torchrun --nproc_per_node=8" in result.stdout


def test_every_config_builds():
    for path in (ROOT / "config").glob("*.py"):
        cfg = load_settings(TrainConfig, [str(path)])
        cfg.split_batch(1)
        assert count_parameters(cfg.model_config(50277)) > 0, path


def test_configs_compose():
    sizes = {"2m": 1_623_856, "82m": 81_901_056, "180m": 179_874_048, "468m": 467_921_920}
    for size, right in sizes.items():
        cfg = load_settings(TrainConfig, [f"{ROOT}/config/size_{size}.py", f"{ROOT}/config/resformer.py", "--seed=1"])
        assert count_parameters(cfg.model_config(50277)) == right
        assert cfg.value_mode == get_mode("resformer") and cfg.seed == 1 and cfg.out_dir == "out/resformer"
        assert 8 * math.prod(cfg.split_batch(8)) == 1024  # the paper's global batch


def test_packages(tmp_path, monkeypatch):
    """One that is not there, and one whose own imports fail."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, code, says in (
        ("broken_a", "from math import nothing", "broken_a is installed, but cannot be imported: cannot import name"),
        ("broken_b", "import no_such_package", "broken_b is installed, but cannot be imported: No module named"),
        ("no_such_package", "", "no_such_package is not installed; run `pip install no_such_package`"),
        ("no_such_package.part", "", "no_such_package.part is not installed; run `pip install no_such_package`"),
    ):
        if code:
            (tmp_path / f"{name}.py").write_text(code)
        with pytest.raises(UserError, match=says):
            need(name)
    assert need("math") is math


def test_bad_input_of_a_script():
    refused(script("train.py", "--value_mode=resfomer"), "unknown value_mode 'resfomer'", "did you mean 'resformer'")
    refused(in_process(train, "--n_embd=500", "--n_head=3"), "n_embd=500", "n_head=3")
