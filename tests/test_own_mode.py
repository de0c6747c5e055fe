"""docs/own_mode.md's example, applied to a copy of the tree: each head learns a weight of its own, and all scripts take
that. So nothing takes a weight for a single number, and no run of a reader's fails at its first evaluation."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, finished, make_data, script
from safetensors.torch import load_file
from test_size import ours

from common import checkpoint
from common.runs import read_run
from value_modes import TABLE

NAME = "resformer_per_head"
pytestmark = pytest.mark.skipif(NAME in TABLE, reason="the example has been applied already")
SETTINGS = dict(value_mode=NAME, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, block_size=16, batch_tokens=128)
SETTINGS |= dict(micro_batch=2, warmup_steps=0, eval_tokens=256, max_steps=4, dtype="float32")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the page's lines, and data."""
    folder = tmp_path_factory.mktemp("copy")
    for path in (*ours(), ROOT / "pytest.ini", ROOT / "hf/card.md"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    page = (ROOT / "docs/own_mode.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, re.S | re.M)
    done = subprocess.run(["git", "apply"], input=diff, cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, f"the lines in docs/own_mode.md have no place: {done.stderr}"
    make_data(folder / "data")
    return folder


def ran(tree, *words):
    done = script(*words, cwd=tree)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags(**settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def test_its_row_passes_the_tests_of_rows(tree):
    """Among them an evaluation, a comparison, a checkpoint, an export, an analysis and a picture."""
    files = [f"tests/test_{name}.py" for name in ("modes", "compare", "export", "analyze", "plot")]
    done = finished([sys.executable, "-m", "pytest", *files, "-k", "per_head and not compiles"], cwd=tree)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 15


@pytest.fixture(scope="module")
def run(tree):
    """The folder of a run there."""
    ran(tree, tree / "train.py", *flags(**SETTINGS, data_dir="data", out_dir="run"))
    return tree / "run"


@pytest.mark.slow
def test_the_record_has_a_number_for_each_head(run):
    (learned,) = read_run(run).evaluation["lam"]
    tensors = load_file(checkpoint.find(run))
    assert learned == [None, *([1.0, tensors[f"mixing.0.heads.{i}"].tolist()] for i in range(2))]
    assert len({*learned[1][1], *learned[2][1]}) == 4  # two heads in each of two layers have learned


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "zero2", "zero3"])
def test_two_ranks_learn_the_same(shard, tree, run):
    start = "-m torch.distributed.run --nproc_per_node=2 --standalone --local_addr=127.0.0.1".split()
    words = flags(**SETTINGS, data_dir="data", out_dir=shard, shard=shard)
    done = finished([sys.executable, *start, "train.py", *words], cwd=tree)
    assert done.returncode == 0, done.stderr
    (one,), (two,) = (read_run(folder).evaluation["lam"] for folder in (run, tree / shard))
    for n in (1, 2):
        assert two[n][1] == pytest.approx(one[n][1], rel=1e-4)


@pytest.mark.slow
def test_every_script_takes_it(tree, run):
    assert "v: 1 own + 0 layer 0, learn=per_head" in ran(tree, tree / "model.py", NAME, "--n_layer=4")
    words = flags(**SETTINGS | dict(value_mode="vanilla"), data_dir="data", out_dir="compared")
    assert f"\n| {NAME} |" in ran(tree, tree / "compare.py", "vanilla", NAME, *words)
    assert "logits: at most" in ran(tree, tree / "export.py", run, "--out_dir=exported")
    assert "wrote" in ran(tree, tree / "analyze.py", run, "--chunks=2")
    ran(tree, tree / "plot.py", "plan", "vanilla", NAME)
    assert (tree / "plan.png").exists()
    assert ran(tree, tree / "sample.py", run, "--max_new_tokens=5")
