"""Whatever optimizer a reader puts in the place of AdamW: a resumed run has its whole state, or is refused."""

import math
import shutil

import pytest
import torch
from conftest import config, make_data, refused
from test_train import assert_close_runs, assert_same_runs, called, command, ended, flags, fork, mini, records, trained

import train
from common import checkpoint
from common.optimizers import placed
from common.ranks import Distributed
from model import GPT


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers as one, because a loss scaler must skip a step of both or of none."""

    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Own(torch.optim.Optimizer):
    """Keeps numbers, words, float64 and transposed tensors, counts in its groups, and decays whatever the rate."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, best=math.inf, switch=True))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["steps"] = [*group.get("steps", []), group["k"]]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= dict(age=0, scale=1.0, least=math.inf, is_odd=False, word=None)
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                state |= dict(age=state["age"] + 1, scale=state["scale"] / 3, is_odd=not state["is_odd"])
                state["word"] = "odd" if state["is_odd"] else None
                state["mean"].lerp_(p.grad.double(), 1 / 3)
                state["turned"] = p.clone().t()
                speed = 1 / group["k"] + 1 / state["age"] + state["scale"] + 0.1 * state["is_odd"]
                p.mul_(0.999).add_(state["mean"].float(), alpha=-group["lr"] * speed)


def two(model, lr, weight_decay, betas, device_type):
    """Muon for the matrices of blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr, betas, weight_decay=weight_decay)
    return MuonAndAdamW(torch.optim.Muon(matrices, lr, weight_decay), adamw)


def muon_alone(model, lr, *of):
    """The other parameters stay as they are. They have gradients, too."""
    return torch.optim.Muon([p for p in model.blocks.parameters() if p.ndim == 2], lr)


OPTIMIZERS = {
    "AdamW": train.adamw,
    "amsgrad": lambda model, lr, *of: torch.optim.AdamW(model.parameters(), lr, amsgrad=True),
    "SGD": lambda model, lr, *of: torch.optim.SGD(model.parameters(), lr),
    "momentum": lambda model, lr, *of: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
    "Adafactor": lambda model, lr, *of: torch.optim.Adafactor(model.parameters(), lr),
    "Adagrad": lambda model, lr, *of: torch.optim.Adagrad(model.parameters(), lr),  # has a state before its first step
    "Muon": muon_alone,
    "Muon, AdamW": two,
    "own": lambda model, lr, *of: Own(model.parameters(), lr),
}


def cut(run):
    """Delete all checkpoints of a run but the first."""
    for path in list(checkpoint.steps(run).values())[1:]:
        path.unlink()
        checkpoint.state_file(path).unlink()
    return run


@pytest.fixture
def runs(data_dir, tmp_path, monkeypatch):
    """A function: train with an optimizer -> the folder of the whole run, and one in which half of it is left."""

    def train_with(make):
        monkeypatch.setattr(train, "adamw", make)
        trained(data_dir, tmp_path / "whole")
        return tmp_path / "whole", cut(shutil.copytree(tmp_path / "whole", tmp_path / "half"))

    return train_with


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_equals_uninterrupted(name, runs, data_dir):
    whole, half = runs(OPTIMIZERS[name])
    trained(data_dir, half, resume="auto")
    assert_same_runs(whole, half)


@pytest.fixture
def older(runs):
    """A whole run, and half of it as train.py wrote it before: the same tensors, and no word about the optimizer."""
    whole, half = runs(train.adamw)
    (path,) = checkpoint.steps(half).values()
    record, tensors = checkpoint.read_tensors(checkpoint.state_file(path), checkpoint.STATE)
    names = dict(checkpoint.load(path).named_parameters())
    assert tensors.keys() == {"rng", *(f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in names)}
    older = {key: record[key] for key in ("tensors", "weights", "scaler")}
    checkpoint.write_tensors(checkpoint.state_file(path), checkpoint.STATE, tensors, older)
    return whole, half


def test_an_older_checkpoint_goes_on(older, data_dir):
    whole, half = older
    trained(data_dir, half, resume="auto")
    assert_same_runs(whole, half)


def test_an_older_checkpoint_is_of_adamw(older, data_dir, monkeypatch):
    monkeypatch.setattr(train, "adamw", OPTIMIZERS["momentum"])
    refused(called(data_dir, older[1], resume="auto"), "was trained with AdamW; this run's SGD is another optimizer")


# ---- what a resumed run takes over


def saved_and_restored(one, other, folder):
    """An optimizer that has taken a step, saved, and put into another one of a new model; the note about that."""
    model, copy, scaler = GPT(config()), GPT(config()), torch.amp.GradScaler(enabled=False)
    one, other = one(model.parameters()), other(copy.parameters())
    model(torch.ones(1, 4, dtype=torch.int64))[0].sum().backward()
    one.step()
    path = checkpoint.save(folder, 1, model, "hash", optimizer=one, scaler=scaler)
    return one, other, checkpoint.resume(path, copy, other, scaler, "hash")[1]


def test_every_type_comes_back_as_it_was(tmp_path):
    one, other, _ = saved_and_restored(lambda ps: Own(ps, 1e-3), lambda ps: Own(ps, 1e-3), tmp_path)
    for before, after in zip(one.state.values(), other.state.values(), strict=True):
        assert {key: type(value) for key, value in before.items()} == {key: type(value) for key, value in after.items()}
        for key in ("mean", "turned"):
            torch.testing.assert_close(before.pop(key), after.pop(key), rtol=0, atol=0)  # and the dtype
        assert before == after


def test_settings_are_the_new_ones_and_other_values_of_groups_the_saved_ones(tmp_path):
    settings = dict(lr=2.0, weight_decay=0.2, betas=(0.5, 0.6), foreach=True)
    _, other, note = saved_and_restored(
        lambda ps: torch.optim.AdamW(ps, eps=1e-5, amsgrad=True), lambda ps: torch.optim.AdamW(ps, **settings), tmp_path
    )
    assert (settings | dict(eps=1e-5, amsgrad=True)).items() <= other.param_groups[0].items()
    assert note == "note: the optimizer goes on with eps=1e-05 instead of 1e-08, amsgrad=True instead of False"


def test_the_note_is_on_the_screen(runs, data_dir, monkeypatch):
    _, half = runs(OPTIMIZERS["momentum"])
    monkeypatch.setattr(train, "adamw", lambda model, lr, *of: torch.optim.SGD(model.parameters(), lr, momentum=0.8))
    said = trained(data_dir, half, resume="auto")
    assert "note: the optimizer goes on with momentum=0.9 instead of 0.8\n" in said


@pytest.mark.parametrize("switch,device", [("foreach", "cpu"), ("fused", "meta"), ("capturable", "meta")])
def test_a_count_of_steps_is_where_the_kernel_reads_it(switch, device):
    parameter = torch.empty(2, device="meta")
    assert placed("step", torch.tensor(1.0), parameter, {switch: True}).device.type == device
    assert placed("norm", torch.tensor(1.0), parameter, {switch: True}).device.type == "meta"


# ---- what is refused


def other_groups(model, lr, *of):
    """`two`, with one matrix more for AdamW."""
    optimizer = two(model, lr, 0.1, (0.9, 0.95), "cpu")
    muon, adamw = optimizer.param_groups
    adamw["params"].append(muon["params"].pop())
    return optimizer


OTHERS = [  # optimizers of a run and of the process that goes on, and the sentence
    ("AdamW", OPTIMIZERS["momentum"], "was trained with AdamW; this run's SGD is another optimizer"),
    ("SGD", OPTIMIZERS["AdamW"], "was trained with SGD; this run's AdamW is another optimizer"),
    ("Muon, AdamW", other_groups, "is another optimizer, or has other parameters in its groups"),
]


@pytest.mark.parametrize("name,other,says", OTHERS, ids=lambda value: str(value)[:12])
def test_another_optimizer_is_refused(name, other, says, runs, data_dir, monkeypatch):
    _, half = runs(OPTIMIZERS[name])
    before = {path: path.read_bytes() for path in half.iterdir()}
    monkeypatch.setattr(train, "adamw", other)
    remedy = "use the same, or start a new run from these weights with --init_from="
    refused(called(data_dir, half, resume="auto"), says, remedy)
    assert before == {path: path.read_bytes() for path in half.iterdir()}


class WithList(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["factors"] = [p.clone()]


class Hiding(MuonAndAdamW):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.parts[0].state = self.state.copy()


def hiding(*of):
    return Hiding(*two(*of).parts)


def of_tensor(model, lr, *of):
    return torch.optim.SGD([dict(params=list(model.parameters()), grown=torch.ones(()))], lr)


def of_another_model(model, lr, *of):
    return torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2))], lr)


class Everywhere(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.state["all"] = {"n": 1}


UNSAVED = [
    (of_another_model, "SGD has parameters, or a state of something, that the model does not have"),
    (lambda model, lr, *of: Everywhere(model.parameters(), lr), "Everywhere has parameters, or a state of something"),
    (lambda model, lr, *of: WithList(model.parameters(), lr), "WithList keeps a list as factors/"),
    (hiding, "Hiding has an optimizer inside with a state of its own"),
    (of_tensor, "SGD has a tensor or another object in a group"),
]


@pytest.mark.parametrize("make,says", UNSAVED, ids=["other", "all", "list", "hidden", "tensor"])
def test_what_a_checkpoint_cannot_hold_is_refused_at_the_first_step(make, says, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "adamw", make)
    refused(called(data_dir, tmp_path), says)
    assert not records(tmp_path)


def test_it_is_refused_at_the_first_step_that_fp16_does_not_skip(data_dir, tmp_path, monkeypatch):
    """The scaler skips steps while its scale is too large. Then there is no state to look at yet."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *of, **kw: scaler(*of, init_scale=2.0**40, **kw))
    monkeypatch.setattr(train, "adamw", lambda model, lr, *of: WithList(model.parameters(), lr))
    refused(called(data_dir, tmp_path, dtype="float16", max_steps=60), "WithList keeps a list as factors/")
    skipped = records(tmp_path)
    assert skipped and all(record["grad_norm"] is None for record in skipped)


class OfOwnRows(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.to_local().clone()


SHARDED = {
    "torch cannot train like this with sharded weights (": OPTIMIZERS["Adafactor"],
    "OfOwnRows keeps a Tensor as rows/": lambda model, lr, *of: OfOwnRows(model.parameters(), lr),
}


def train_with(says, *words):
    """In a rank: `python train.py WORDS` with one of SHARDED."""
    train.adamw = SHARDED[says]
    command("train", *words)


@pytest.mark.slow
@pytest.mark.parametrize("says", SHARDED)
def test_what_shards_do_not_allow_is_refused(says, data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "out", shard="zero3")
    assert f"error: {says}" in ended(fork(tmp_path, 2, train_with, says, *words), 2, 2)[0]


# ---- several ranks

PAIRS = [(name, shard) for name in ("AdamW", "momentum", "Muon, AdamW", "own") for shard in ("none", "zero2", "zero3")]
PAIRS += [("amsgrad", "zero3"), ("SGD", "zero3"), ("Adafactor", "none")]


def train_each(folder, runs):
    """In a rank: for each (folder of runs, name of the optimizer, shard) 4 steps, or what of them is left."""
    world = Distributed("cpu", fixed_lengths=True)
    for out, name, shard in runs:
        train.adamw = OPTIMIZERS[name]
        train.train(mini("vanilla", folder, f"{out}/{name}/{shard}", max_steps=4, shard=shard), world)
    world.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs of one process ("one") and of two ranks ("two"). After a step the latter go on in as many ranks ("again") or
    in one process ("fewer"), and the former in two ranks ("more")."""
    folder = tmp_path_factory.mktemp("ranks")
    make_data(folder / "data")

    def start(n, *outs):
        ended(fork(folder, n, train_each, folder, [(out, *pair) for out in outs for pair in PAIRS]), *[0] * n)

    start(1, "one")
    start(2, "two")
    for out, of in (("again", "two"), ("fewer", "two"), ("more", "one")):
        shutil.copytree(folder / of, folder / out)
        for name, shard in PAIRS:
            cut(folder / out / name / shard / "vanilla")
    start(2, "again", "more")
    start(1, "fewer")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name,shard", PAIRS)
def test_two_ranks_resumed_equal_uninterrupted(name, shard, ranks):
    assert_same_runs(ranks / "two" / name / shard / "vanilla", ranks / "again" / name / shard / "vanilla")


@pytest.mark.slow
@pytest.mark.parametrize("name,shard", PAIRS)
@pytest.mark.parametrize("out", ["fewer", "more"])
def test_a_run_moves_between_ranks_and_one_process(out, name, shard, ranks):
    """Up to rounding. Muon rounds in bf16."""
    tolerance = 1e-3 if "Muon" in name else 1e-6
    assert_close_runs(ranks / "one" / name / shard / "vanilla", ranks / out / name / shard / "vanilla", tolerance)
