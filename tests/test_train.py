"""train.py learns what a naive loop learns, resumes bit for bit, computes the same on any number of ranks, refuses what
does not belong together, and loses nothing that was saved."""

import contextlib
import dataclasses
import functools
import importlib
import math
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import MODES, ROOT, byte_tokenizer, config, finished, in_process, make_data, refused
from safetensors.torch import load_file

import configurator
import train
from common import checkpoint, files, report
from common.data import Corpus
from common.ranks import Distributed, code_of_results
from common.runs import METRICS, Metrics, read_run
from common.sizes import count_parameters, mixing_weights, notes_of
from model import GPT
from train import TrainConfig, learning_rate

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=128, micro_batch=8, warmup_steps=5, seed=1)
SMALL |= dict(learning_rate=3e-3, eval_tokens=512, max_steps=12, eval_every=6, save_every=6, dtype="float32")
TIMES = ("seconds", "tokens_per_s", "input_s")


def flags(data, out, **kw):
    return [f"--{name}={value}" for name, value in (SMALL | dict(data_dir=data, out_dir=out) | kw).items()]


def called(data, out, **kw):
    return in_process(train, *flags(data, out, **kw))


def trained(data, out, **kw):
    result = called(data, out, **kw)
    assert result.returncode == 0, result.stderr
    return result.stdout


def records(out, event=None):
    """The records of a run's steps, or of its "eval"s or "start"s, without times."""
    found = [r for r in files.read_record_lines(out / "metrics.jsonl", METRICS) if r.get("event") == event]
    return [{key: value for key, value in r.items() if key not in TIMES} for r in found]


def assert_same_runs(one, two):
    """Bit for bit: metrics, last weights, last training state."""
    assert records(one) == records(two) and records(one, "eval") == records(two, "eval")
    last = checkpoint.find(one)
    for path in (last, checkpoint.state_file(last)):
        assert (two / path.name).read_bytes() == path.read_bytes()


def assert_close_runs(one, two, tolerance=1e-5):
    """The same losses and norms at each step, and the same at the evaluations that both have."""
    pairs = list(zip(records(one), records(two), strict=True))
    pairs += [(r, s) for r in records(one, "eval") for s in records(two, "eval") if r["step"] == s["step"]]
    for r, s in pairs:
        for key in {"loss", "grad_norm", "val_mean", "bpb_mean"} & r.keys():
            assert r[key] == pytest.approx(s[key], rel=tolerance), (key, r, s)


@pytest.fixture(scope="module")
def base(data_dir, tmp_path_factory):
    """A finished run that several tests compare with."""
    out = tmp_path_factory.mktemp("base") / "run"
    trained(data_dir, out)
    return out


@pytest.fixture
def copy(base, tmp_path):
    """A copy of it, to continue or to damage."""
    return shutil.copytree(base, tmp_path / "copy")


# ---- ranks: a server imports torch once and forks, so they begin at once

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_train", "torch._dynamo", "torch.distributed.fsdp"])


def forked(said, environment, function, args):
    os.environ.update({name: str(value) for name, value in environment.items()})
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    function(*args)


def fork(folder, n, function, *args):
    """Start n ranks that call the function. They meet in a store of this process, as torchrun's do in its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = dict(WORLD_SIZE=n, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, TORCHELASTIC_USE_AGENT_STORE=True)
    ranks = []
    for rank in range(n):
        said, environment = folder / f"said{rank}", where | dict(RANK=rank, LOCAL_RANK=rank)
        ranks.append(FORKS.Process(target=forked, args=(said, environment, function, args)))
        ranks[-1].start()
        ranks[-1].said, ranks[-1].store = said, store
    return ranks


def ended(ranks, *codes):
    """What each rank has printed. Asserts their exit codes."""
    for rank in ranks:
        rank.join(timeout=800)
        rank.kill()
    said = [rank.said.read_text() for rank in ranks]
    assert [rank.exitcode for rank in ranks] == list(codes), "".join(said)
    return said


def command(script, *words):
    """`python SCRIPT.py WORDS` in a rank; RANK in the words is its number."""
    sys.argv = [script, *(word.replace("RANK", os.environ["RANK"]) for word in words)]
    module = importlib.import_module(script)
    configurator.run(module.main, module.__doc__)


# ---- what a run computes, and leaves


def test_a_run_equals_a_naive_loop(data_dir, tmp_path):
    """Every setting of the recipe reaches the step; none is at its default."""
    kw = dict(seed=7, weight_decay=0.3, beta1=0.8, beta2=0.9, grad_clip=0.5, final_lr_ratio=0.3, warmup_steps=3)
    kw |= dict(bos=True, mixture="{'code': 3, 'prose': 1}")
    trained(data_dir, tmp_path, **kw, micro_batch=3)  # becomes 2, which divides the 8 sequences of a step
    corpus = Corpus(data_dir, 16, 7, {"code": 3, "prose": 1}, bos=True)
    model = GPT(checkpoint.load(tmp_path).cfg, seed=7)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)
    optimizer = torch.optim.AdamW([dict(params=matrices), vectors], betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3)
    for t, record in enumerate(records(tmp_path)):
        rate = 3e-3 * (0.3 + 0.7 * (1 + math.cos(math.pi * (t - 3) / 9)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate if t >= 3 else 1e-7 + (3e-3 - 1e-7) * t / 3
        x, y = map(torch.from_numpy, corpus.batch(t, 8))
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert norm > 0.5  # so that clipping does something
        assert record["loss"] == pytest.approx(loss.item(), abs=1e-4)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert record["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert checkpoint.load_tokenizer(checkpoint.find(tmp_path)).prefix == [256]  # a text begins as a sequence did
    for a, b in zip(checkpoint.load(tmp_path).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_what_a_run_leaves(base, data_dir):
    (start,), steps = records(base, "start"), records(base)
    assert {"value_mode": "vanilla", "seed": 1, "parameters": 46_304, "ranks": 1, "step": 0}.items() <= start.items()
    here = {"ranks": 1, "threads": torch.get_num_threads(), "torch": torch.__version__}
    assert here.items() <= start["rounding"].items()
    made = files.read_record(base / "config.json", checkpoint.RUN)
    of_result = {"val_hash": Corpus(data_dir, 16).val_hash, "eval_tokens": 512, "init_from": "", "learning_rate": 3e-3}
    assert of_result.items() <= start.items() and of_result.items() <= made.items()
    assert list(steps[-1]) == ["step", "loss", "lr", "grad_norm", "tokens", "mfu"] and steps[-1]["mfu"] is None
    assert [(r["step"], r["tokens"]) for r in steps] == [(n, 128 * n) for n in range(1, 13)]
    assert [(r["step"], list(r["val"])) for r in records(base, "eval")] == [(n, ["prose", "code"]) for n in (6, 12)]
    assert files.read_record(base / "env.json", train.ENVIRONMENT)["torch"] == torch.__version__
    assert checkpoint.load_tokenizer(checkpoint.find(base)).hash == byte_tokenizer().hash
    assert checkpoint.trained_on(base, "", "") == (str(data_dir), {}) and not checkpoint.trained_with_bos(base)
    assert list(checkpoint.steps(base)) == [6, 12]


ROUNDING = [(dict(compile=True, attn="eager"), 1e-5), (dict(dtype="bfloat16"), 1e-2), (dict(dtype="float16"), 1e-2)]


@pytest.mark.parametrize("kw,tolerance", ROUNDING, ids=str)
def test_what_changes_a_run_by_rounding_only(kw, tolerance, base, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no machine code
    said = trained(data_dir, tmp_path, **kw)
    assert ("compiled in" in said) == ("compile" in kw)
    assert_close_runs(base, tmp_path, tolerance)


class Dropping(train.GPT):
    """A mode of somebody's own, which draws in training."""

    def hidden(self, idx, cache=None):
        return F.dropout(super().hidden(idx, cache), 0.5, self.training)


def test_looks_at_a_model_that_draws_change_nothing(data_dir, tmp_path, monkeypatch):
    """Evaluations and samples are of the whole model, and take nothing from the run's random numbers."""
    monkeypatch.setattr(train, "GPT", Dropping)
    for name, every in (("often", 1), ("rarely", 4)):
        trained(data_dir, tmp_path / name, max_steps=4, eval_every=every, sample_every=every, save_every=4)
    assert records(tmp_path / "often") == records(tmp_path / "rarely")
    assert records(tmp_path / "often", "eval")[-1] == records(tmp_path / "rarely", "eval")[-1]


FAILURES = {  # of a compiled model. With too little memory it must not go on without compiling
    "torch.compile does not work here (OSError: no compiler); set --compile=false": OSError("no compiler"),
    "ran out of memory; set a smaller --micro_batch, or --recompute": torch.OutOfMemoryError("CUDA out of memory"),
}


@pytest.mark.parametrize("says", FAILURES)
def test_where_compiling_fails_it_says_what_helps(says, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *of, **how: mock.Mock(side_effect=FAILURES[says]))
    refused(called(data_dir, tmp_path, compile=True), says)


def test_wandb_gets_the_metrics(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(called(data_dir, tmp_path, log="wandb"), "pip install wandb")
    logged, ids = [], []
    of_run = SimpleNamespace(id="x7", log=lambda r, step: logged.append((step, r)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kw: ids.append(kw["id"]) or of_run))
    trained(data_dir, tmp_path, log="wandb")
    assert [step for step, r in logged if "loss" in r] == list(range(1, 13))
    assert [step for step, r in logged if "val" in r] == [6, 12] and len(logged) == 14
    trained(data_dir, tmp_path, log="wandb", max_steps=13, resume="auto")
    assert ids == [None, "x7"]  # a resumed run goes on in its run


@pytest.mark.parametrize("part", ["init", "log", "finish"])
def test_where_wandb_fails_it_says_so_once_and_goes_on(part, data_dir, tmp_path, monkeypatch):
    of_run = SimpleNamespace(id="x7", log=lambda *of, **how: None, finish=lambda: None)
    fake = SimpleNamespace(init=lambda **kw: of_run)
    setattr(fake if part == "init" else of_run, part, lambda *of, **how: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said = trained(data_dir, tmp_path, log="wandb")
    assert said.count("note: wandb failed (ZeroDivisionError: division by zero)") == 1 and len(records(tmp_path)) == 12


def test_a_terminal_that_is_gone_does_not_end_a_run():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone, contextlib.redirect_stdout(gone):
        Metrics.say(SimpleNamespace(is_main=True), "step 1")


def test_what_may_surprise_is_said(monkeypatch):
    cfg = TrainConfig(max_steps=20, batch_tokens=320, block_size=16, warmup_steps=20, device="cpu", dtype="bfloat16")
    monkeypatch.setattr("common.sizes.pick_dtype", lambda *_: torch.float32)  # of a processor without bf16
    corpus = SimpleNamespace(domains=["big", "tiny"], mixture={"big": 0.1, "tiny": 0.9})
    corpus.windows = lambda split, domain: {"big": 900, "tiny": 100}[domain]
    epochs, warmup, slow = notes_of(cfg, corpus, 1)
    assert epochs == "20 steps read 0.4 epochs of the training text (3.6 of tiny)"
    assert "the warmup takes 20 steps, but the run has only 20, so the rate never reaches its peak" in warmup
    assert "--dtype=float32 is faster" in slow
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for other in ({"device": "cuda"}, {"device": "auto"}, {"dtype": "float32"}):
        assert len(list(notes_of(dataclasses.replace(cfg, **other), corpus, 1))) == 2


def test_a_rank_counts_only_among_several(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # clusters set it in each worker
    trained(data_dir, tmp_path, max_steps=1)
    assert len(records(tmp_path)) == 1
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(called(data_dir, tmp_path / "new"), "WORLD_SIZE=2, but", "RANK expected", "or unset WORLD_SIZE")


def test_a_step_is_cut_into_equal_parts_as_large_as_allowed():
    cfg = dict(block_size=16, batch_tokens=192)
    splits = [TrainConfig(**cfg, micro_batch=n).split_batch(n_ranks=2) for n in (1, 5, 6, 99)]
    assert splits == [(1, 6), (3, 2), (6, 1), (6, 1)]


# ---- a run that was interrupted


@pytest.mark.parametrize(
    "mode,dtype,scale", [("resformer_plus", "float32", 1), ("denseformer", "float16", 1), ("vanilla", "float16", 2048)]
)
def test_stopped_and_resumed_equals_uninterrupted(mode, dtype, scale, data_dir, tmp_path, monkeypatch):
    """With the largest scale all steps until the stop overflow, so AdamW has no moments to save."""

    def rate(step, *of):
        torch.rand(1)  # a model with dropout would draw too
        if step == 3 and (tmp_path / "whole/step_00000012.safetensors").exists():
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(step, *of)

    ignored = []
    monkeypatch.setattr(train, "learning_rate", rate)
    monkeypatch.setattr(train.Stop, "ignore", lambda stop: ignored.append(stop))
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**16 * scale)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    trained(data_dir, tmp_path / "whole", value_mode=mode, dtype=dtype)
    said = trained(data_dir, tmp_path / "stopped", value_mode=mode, dtype=dtype)
    assert ignored  # there is nothing left to lose
    assert "stopped and saved at step 4; to continue, run the same command with --resume=auto" in said
    assert all(r["grad_norm"] is None for r in records(tmp_path / "stopped")) == (scale > 1)
    trained(data_dir, tmp_path / "stopped", value_mode=mode, dtype=dtype, resume="auto")
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped")
    learned = mixing_weights(checkpoint.load(tmp_path / "whole")) or None
    assert records(tmp_path / "whole", "eval")[-1].get("lam") == learned


@pytest.fixture
def handlers(monkeypatch):
    """{signal: its handler}, as far as they are set here."""
    found = {}
    monkeypatch.setattr(signal, "signal", found.__setitem__)
    return found


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_ctrl_c_is_heard_and_only_a_later_one_kills(rank, handlers, monkeypatch, capfd):
    """A second one within a second is the same press. After the step is saved none does anything. Rank 0 speaks."""
    now = [100.0]
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    stop = train.Stop()

    def press():
        handlers[signal.SIGINT](signal.SIGINT, None)

    press()
    says = "saving after this step; Ctrl-C again quits without saving" if rank == "0" else ""
    assert stop.asked and capfd.readouterr().err.strip() == says
    now[0] += 0.9
    press()
    now[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        press()
    stop.ignore()
    assert handlers[signal.SIGINT] is signal.SIG_IGN


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_hangups_and_batch_systems_stop_a_run_unless_nohup_ignores_them(before, handlers, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: before)
    train.Stop()
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} < handlers.keys()
    assert (signal.SIGHUP in handlers) == (before == signal.SIG_DFL)


def test_a_kill_at_any_rename_or_deletion(data_dir, tmp_path, monkeypatch):
    """Copies of the folder just before each of them are what kills there would leave."""
    kw, out, moments = dict(max_steps=4, save_every=2, eval_every=4, keep=1), tmp_path / "whole", []

    def noting(function):
        def call(*of, **how):
            moments.append(shutil.copytree(out, tmp_path / str(len(moments))))
            return function(*of, **how)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", noting(os.replace))
        patch.setattr(Path, "unlink", noting(Path.unlink))
        trained(data_dir, out, **kw)
    assert len(moments) >= 10
    for moment in moments:
        trained(data_dir, moment, **kw, resume="auto")
        assert_same_runs(out, moment)
        assert not list(moment.glob("*.tmp")) and len(list(moment.glob("*.state.*"))) == len(checkpoint.steps(moment))


# ---- what a run refuses, or says


LAST, STATE = "step_00000012.safetensors", "step_00000012.state.safetensors"


def edit_records(change):
    """Edit the lines of a run's metrics.jsonl."""

    def edit(run):
        path = run / "metrics.jsonl"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return edit


DAMAGE = [  # what happens to a run's folder, and the sentence; test_bad_input.py tries other damage
    (edit_records(lambda lines: lines[:5] + lines[6:]), "lacks steps before 12"),
    (
        edit_records(lambda lines: lines + lines),
        "or has some twice; copy it again, or continue elsewhere with --resume=",
    ),
    (edit_records(lambda lines: []), "lacks steps before 12"),  # a new beginning would be another run's curve
    (edit_records(lambda lines: ["{'no"]), "lacks steps before 12"),  # half a line
    (lambda run: (run / "metrics.jsonl").unlink(), "lacks steps before 12"),
    (lambda run: (run / "config.json").unlink(), "config.json is missing"),
    (lambda run: (run / STATE).unlink(), f"{STATE} is missing (train.py's training state"),
    (lambda run: (run / STATE.replace("12", "06")).rename(run / STATE), "it does not belong to"),
]


@pytest.mark.parametrize("damage,says", DAMAGE)
def test_a_damaged_run_is_not_continued(damage, says, copy, data_dir):
    damage(copy)
    refused(called(data_dir, copy, resume="auto", max_steps=14), says)


def test_a_finished_run_without_its_last_evaluation(copy, data_dir):
    """train.py says how to get it, and after that the loss is the same."""
    before = read_run(copy).final_loss
    edit_records(lambda lines: lines[:-1])(copy)
    refused(called(data_dir, copy, resume="auto"), "lacks the last evaluation; delete step_00000012.safetensors")
    (copy / LAST).unlink()
    trained(data_dir, copy, resume="auto")
    assert read_run(copy).final_loss == before


def test_a_power_cut_leaves_the_records_of_each_checkpoint(data_dir, tmp_path, monkeypatch):
    """What no fsync has reached is gone: whenever a checkpoint gets its name, metrics.jsonl has all records up to it on
    the disk."""
    synced, lost, fsync, replace = {}, [], os.fsync, os.replace

    def noting(number):
        synced[os.readlink(f"/proc/self/fd/{number}")] = os.fstat(number).st_size
        return fsync(number)

    def named(old, new):
        path = tmp_path / "run/metrics.jsonl"
        if Path(new).name.startswith("step_"):
            lost.append(path.stat().st_size - synced.get(str(path), 0))
        return replace(old, new)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", named)
    trained(data_dir, tmp_path / "run", max_steps=4, save_every=2, eval_every=4)
    assert len(lost) >= 4 and not any(lost)


@pytest.mark.parametrize("step", [2, 4], ids=["in the middle", "at the end"])
def test_a_folder_that_is_removed_ends_the_run(step, data_dir, tmp_path, monkeypatch):
    """It does not come back as half a run."""
    save = checkpoint.save

    def remove(run, n, *args):
        path = save(run, n, *args)
        if n == step:
            shutil.rmtree(run)
        return path

    monkeypatch.setattr(checkpoint, "save", remove)
    said = called(data_dir, tmp_path / "run", max_steps=4, save_every=2, eval_every=4)
    refused(said, "metrics.jsonl cannot be read or written: No such file or directory")
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.parametrize("name", ["file", "file/sub", "broken"])
def test_a_file_where_the_folder_of_a_run_should_be(name, data_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to("nowhere")
    says = f"{name}: there is a file or a broken link where a folder should be; name another"
    refused(called(data_dir, tmp_path / name), says)
    assert (tmp_path / "file").read_text() == "mine"


def test_records_without_checkpoints_take_no_other_run(base, data_dir, tmp_path):
    """As somebody leaves them who deletes checkpoints to save room."""
    shutil.copy(base / "metrics.jsonl", tmp_path)
    edit_records(lambda lines: lines[:4])(tmp_path)
    said = called(data_dir, tmp_path, resume=base / LAST, max_steps=14)
    refused(said, "lacks steps before 12, or has some twice; copy it again, or continue elsewhere")


def test_records_of_a_run_that_has_ended_are_not_replaced(copy, data_dir):
    """Its losses are all there, so nobody trains it again by mistake."""
    for path in copy.glob("step_*"):
        path.unlink()
    before = (copy / "metrics.jsonl").read_bytes()
    refused(called(data_dir, copy, resume="never"), "has the records of a finished run, but not its weights")
    assert (copy / "metrics.jsonl").read_bytes() == before


OTHERS = [
    (dict(value_mode="resformer"), "is a vanilla model that differs from this one in value_mode"),
    (dict(n_embd=64), "that differs from this one in n_embd, head_dim, n_hidden"),
    (dict(arch="gpt2"), "that differs from this one in n_hidden, arch"),
    (dict(seed=2), "was started with different settings: seed (was 1), max_steps (was 12)"),
    (dict(bos=True), "bos (was False)"),
    (dict(mixture="{'code': 1}"), "data (was "),
    (dict(init_from="elsewhere"), "init_from (was empty)"),
    (dict(eval_tokens=64), "eval_tokens (was 512)"),
    (dict(max_steps=12, learning_rate=1e-4), "learning_rate (was 0.003)"),  # a finished run with other settings
    (dict(max_steps=12, value_mode="resformer"), "with different settings: value_mode_name (was vanilla); use them"),
    (dict(resume="never"), "already holds a run; --resume=auto continues it"),
    (dict(resume="nowhere"), "resume='nowhere' does not exist; it takes never, auto or a"),
    (dict(resume=""), "resume='' does not exist"),
    (
        dict(batch_tokens=100),
        "batch_tokens=100 is not a multiple of 16 = block_size=16 x 1 ranks; set --batch_tokens=96",
    ),
]


@pytest.mark.parametrize("kw,says", OTHERS, ids=lambda value: str(value)[:30])
def test_what_does_not_belong_together_is_refused(kw, says, base, data_dir):
    refused(called(data_dir, base, **dict(resume="auto", max_steps=14) | kw), says)


def test_another_tokenizer_is_refused(base, tmp_path):
    data = make_data(tmp_path / "data", tokenizer=byte_tokenizer("(?s:..?)"))
    refused(called(data, base, resume="auto", max_steps=14), "val_hash (was ")
    refused(called(data, tmp_path / "new", init_from=base), "differs from this one in tokenizer")


def test_changed_settings_are_named(copy, data_dir):
    said = trained(data_dir, copy, max_steps=14, weight_decay=0.2, micro_batch=4, resume="auto")
    assert "changed since the run was last started: max_steps (was 12), weight_decay (was 0.1)\n" in said


def test_a_run_goes_on_in_another_folder(base, data_dir, tmp_path):
    trained(data_dir, tmp_path, resume=base / LAST.replace("12", "06"), max_steps=8)
    trained(data_dir, tmp_path, resume="auto", max_steps=9)
    assert [record["step"] for record in records(tmp_path)] == [7, 8, 9]
    said = called(data_dir, tmp_path, resume=base, max_steps=16)
    refused(said, "already holds", "so it cannot continue from")


def test_two_processes_in_one_folder(base, data_dir):
    with files.hold(base):
        refused(called(data_dir, base, resume="auto"), f"another process is writing into {base}")


@pytest.mark.parametrize("dtype,what", [("float32", "the gradient norm is nan"), ("float16", "the loss is nan")])
def test_a_run_that_explodes_is_not_saved(dtype, what, copy, data_dir, monkeypatch):
    kw = dict(max_steps=400, learning_rate=1e6, weight_decay=1e6, save_every=400, eval_every=400, grad_clip=0)
    refused(called(data_dir, copy, resume="auto", dtype=dtype, **kw), f"{what}; this step was not saved")
    monkeypatch.setattr(train, "validate", lambda *of: {"val_mean": math.inf})
    refused(called(data_dir, copy, resume="auto", dtype="float32", max_steps=14), "step 14: the validation loss is inf")
    assert list(checkpoint.steps(copy)) == [6, 12]
    (record,) = records(copy, "diverged")  # of the last try, because a resumed run drops what was not saved
    assert record["step"] == 14 and record["why"] == "the validation loss is inf"


@pytest.mark.parametrize("file,old,new,is_other", [
    ("model.py", "import torch\n", "import torch  # a comment\n", False),
    ("model.py", '"""w_self * here + ', '"""here w_self + ', False),
    ("common/data.py", "_CHUNK = 2**16", "_CHUNK = 2**15", True),
    ("value_modes.py", "TABLE = {\n", 'TABLE = {\n    "mine": (mode_with(lam=(1.0, 9.0)), "", ""),\n', False),
    ("value_modes.py", '"spread of the initial weights"', '"other words"', False),
    ("value_modes.py", "init_std: float = setting(0.02,", "init_std: float = setting(0.03,", True),
    ("train.py", "LR_START = 1e-7", "LR_START = 1e-6", True),
])  # fmt: skip
def test_what_makes_another_code(file, old, new, is_other, tmp_path):
    """Another statement does; words, and a new row of the table, do not."""
    before = code_of_results()
    for name in before:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    assert [name for name, digest in code_of_results(tmp_path).items() if digest != before[name]] == [file] * is_other


# ---- which checkpoints stay, and which one is meant


def test_last_best_and_keep(tmp_path):
    model = GPT(config())
    (tmp_path / "step_3_backup.state.safetensors").touch()  # a user's
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 2.5)):
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(enabled=False)
        checkpoint.save(tmp_path, step, model, "hash", loss, optimizer, scaler, keep=2)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5] and len(list(tmp_path.iterdir())) == 2 * 3 + 1
    assert checkpoint.find(tmp_path).stem == "step_00000005"
    assert checkpoint.find(tmp_path, "best").stem == "step_00000002"
    checkpoint.save(tmp_path, 6, model, "hash", keep=0)
    assert list(checkpoint.steps(tmp_path)) == [2, 4, 5, 6]
    checkpoint.find(tmp_path, "best").write_text("damaged")
    assert checkpoint.find(tmp_path, "best").stem == "step_00000004"


def test_without_a_name_the_newest_run_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(configurator.UserError, match=r"there is no checkpoint .* in out"):
        checkpoint.find()
    for name, age in (("a", 30), ("b", 10), ("c", 20)):
        os.utime(checkpoint.save(Path("out", name), 1, GPT(config()), "hash"), (time.time() - age,) * 2)
    assert checkpoint.find() == Path("out/b/step_00000001.safetensors")


# ---- several ranks

SHARDED = ["everything", "two_gates", "cross"]  # what blocks read from one another
MINI = dict(n_layer=4, n_head=8, n_embd=16, block_size=8, batch_tokens=48, micro_batch=2, seed=1, dtype="float32")
MINI |= dict(learning_rate=3e-3, final_lr_ratio=1, warmup_steps=0, eval_tokens=56, eval_every=3, save_every=1, keep=0)


def mini(mode, folder, out, **kw):
    settings = MINI | dict(data_dir=str(folder / "data"), out_dir=str(folder / out / mode), resume="auto") | kw
    return TrainConfig(value_mode=MODES[mode], **settings)


def train_all(configs):
    """In a rank. Whenever it saves, also after an evaluation, it holds its rows alone where the model is sharded."""
    torch.compile = functools.partial(torch.compile, backend="eager")
    world, save = Distributed("cpu", fixed_lengths=True), checkpoint.save

    def checked(out_dir, step, model, *about):
        held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        share = sum(4 * p.numel() for p in model.parameters()) / (1 if cfg.shard == "none" else world.size)
        assert sum(p.untyped_storage().nbytes() for p in held) < 1.1 * share
        return save(out_dir, step, model, *about)

    checkpoint.save = checked
    for cfg in configs:
        train.train(cfg, world)
    world.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs of one process, and the same on 2, 2, 3 and 1 ranks in turn, with all ways to shard."""
    folder = tmp_path_factory.mktemp("ranks")
    make_data(folder / "data")
    for n, out, kw in (
        (1, "one", dict(max_steps=4)),
        (2, "parts", dict(max_steps=1)),
        (2, "parts", dict(max_steps=2, shard="zero2")),
        (3, "parts", dict(max_steps=3, shard="zero3", recompute=True)),
        (1, "parts", dict(max_steps=4)),
    ):
        compiled = [mode == "cross" and kw.get("shard") == "zero2" for mode in SHARDED]
        configs = [mini(mode, folder, out, **kw, compile=c) for mode, c in zip(SHARDED, compiled, strict=True)]
        (said, *_) = ended(fork(folder, n, train_all, configs), *[0] * n)
        assert "UserWarning" not in said
    return folder


@pytest.mark.parametrize("mode", SHARDED)
def test_any_ranks_and_shards_equal_one_process(mode, ranks):
    """The norm says that gradients are averaged: a sum over ranks would be 2 or 3 times as long."""
    assert_close_runs(ranks / "one" / mode, ranks / "parts" / mode, 1e-6)


@pytest.mark.slow
def test_two_ranks_of_torchrun_equal_one(base, data_dir, tmp_path):
    start = "-m torch.distributed.run --nproc_per_node=2 --standalone --local_addr=127.0.0.1".split()
    result = finished([sys.executable, *start, ROOT / "train.py", *flags(data_dir, tmp_path, micro_batch=2)])
    assert result.returncode == 0 and "2 ranks x 2 x 2 sequences x 16 tokens" in result.stdout, result.stderr
    assert_close_runs(base, tmp_path)


@pytest.mark.parametrize("n,shard", [(1, "none"), (2, "zero3")])
def test_init_from(n, shard, base, data_dir, tmp_path):
    """With a learning rate of 0 a run ends with the weights that it started from, and with those that are new."""
    out, kw = tmp_path / "new", dict(learning_rate=0, warmup_steps=0, value_mode="resformer_plus")
    words = flags(data_dir, out, **kw, max_steps=1, init_from=base, shard=shard)
    said = ended(fork(tmp_path, n, command, "train", *words), *[0] * n)[0]
    assert f"weights from {base / LAST}" in said and "; new: mixing.0" in said
    found, theirs = load_file(checkpoint.find(out)), load_file(base / LAST)
    assert found.keys() > theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)
    trained(data_dir, out, **kw, max_steps=2, resume="auto")  # need not name init_from again


def test_weights_that_find_no_place_are_named(base, data_dir, tmp_path):
    said = trained(data_dir, tmp_path, n_layer=1, init_from=base, max_steps=1)
    assert "; new: none; not used: blocks.1.norm1.weight, blocks.1.attn.proj.q.weight, " in said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_ends_the_other(victim, data_dir, tmp_path):
    out, kw = tmp_path / "out", dict(save_every=1, max_steps=10**6, eval_every=10**6)
    ranks = fork(tmp_path, 2, command, "train", *flags(data_dir, out, **kw))
    while ranks[0].is_alive() and len(checkpoint.steps(out)) < 2:
        time.sleep(0.01)
    ranks[victim].kill()
    said = ended(ranks, *((-signal.SIGKILL, 2) if victim == 0 else (2, -signal.SIGKILL)))[1 - victim]
    assert "error: another rank has ended or cannot be reached" in said and "Traceback" not in said
    trained(data_dir, out, **kw | dict(max_steps=max(checkpoint.steps(out)) + 1), resume="auto")


def test_ranks_that_see_other_data_are_refused(tmp_path):
    for rank in range(2):
        make_data(tmp_path / f"data{rank}", seed=rank)
    words = flags(tmp_path / "dataRANK", tmp_path / "out")
    assert "error: the ranks see different files in" in ended(fork(tmp_path, 2, command, "train", *words), 2, 2)[0]


def test_samples_while_training_change_nothing(base, data_dir, tmp_path):
    said = trained(data_dir, tmp_path, sample_every=5)
    assert re.findall("^step .* writes", said, re.M) == ["step 5 writes", "step 10 writes"]
    assert_same_runs(base, tmp_path)


def test_samples_need_whole_weights():
    with pytest.raises(configurator.UserError, match="sample_every needs unsharded weights"):
        TrainConfig(sample_every=1, shard="zero2")


def test_a_model_larger_than_the_machines_memory(base, data_dir, tmp_path, monkeypatch):
    """Neither trained nor read: the system would kill us. On a CPU training takes four times the weights."""
    n = count_parameters(checkpoint.read_header(base / LAST)["config"])
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": n, "SC_PAGE_SIZE": 15}[name])
    refused(called(data_dir, tmp_path / "new"), "training this model takes 0.")
    checkpoint.load(base)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": n, "SC_PAGE_SIZE": 3}[name])
    with pytest.raises(configurator.UserError, match="takes 0.*; name a smaller model"):
        checkpoint.load(base)
