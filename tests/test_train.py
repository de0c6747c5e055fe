"""train.py as a user runs it: it learns, resumes bit for bit, is the same on two ranks, and refuses what is wrong."""

import dataclasses
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import COVER, MODES, ROOT, byte_tokenizer, change, finished, in_process, make_data, refused, script
from safetensors.torch import load_file, save_file

import checkpoint
import configurator
import data
import train
from model import GPT
from oldconfig import load_settings
from oldfiles import read_records, sealed
from runtime import Distributed
from train import TrainConfig, build, learning_rate
from value_modes import VALUE_MODES

SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_tokens=128, micro_batch=8, warmup_steps=5, seed=1)
SMALL |= dict(learning_rate=3e-3, eval_tokens=512, max_steps=12, eval_every=6, save_every=6, dtype="float32")


def flags(data, out, **kw):
    settings = SMALL | dict(data_dir=data, out_dir=out) | kw
    return [f"--{k}={v}" for k, v in settings.items()]


def trained(data, out, **kw):
    result = in_process(train, *flags(data, out, **kw))
    assert result.returncode == 0, result.stderr
    return result


def built(data, out, world=None, **kw):
    """The Run of these settings, in this process."""
    settings = SMALL | dict(data_dir=str(data), out_dir=str(out)) | kw
    return build(TrainConfig(**settings), world or Distributed("cpu"))


def steps_of(out):
    return [r for r in read_records(out / "metrics.jsonl") if "event" not in r]


def numbers(out):
    """What a run computed: everything in metrics.jsonl but the time it took."""
    records = [r for r in read_records(out / "metrics.jsonl") if r.get("event") != "start"]
    return [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s", "input_s")} for r in records]


def weights(out, step):
    return (out / f"step_{step:08d}.safetensors").read_bytes()


@pytest.fixture(scope="module")
def base(data_dir, tmp_path_factory):
    """One finished run that several tests compare with; made by a process of its own, as a user makes it."""
    out = tmp_path_factory.mktemp("base") / "run"
    result = script("train.py", *flags(data_dir, out))
    assert result.returncode == 0, result.stderr
    return out


def test_what_a_run_leaves(base, data_dir):
    records = read_records(base / "metrics.jsonl")
    start, steps = records[0], steps_of(base)
    assert start["event"] == "start" and start["value_mode"] == "vanilla" and start["seed"] == 1
    assert start["kv_bytes_per_token"] == 2 * 2 * 2 * 32
    assert [r["step"] for r in steps] == list(range(1, 13)) and steps[-1]["tokens"] == 12 * 128
    assert abs(steps[0]["loss"] - math.log(257)) < 0.1 and steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert steps[0]["mfu"] is None and steps[0]["lr"] == 1e-7 and steps[0]["grad_norm"] > 0
    evals = [r for r in records if r.get("event") == "eval"]
    assert [r["step"] for r in evals] == [6, 12] and set(evals[0]["val"]) == {"prose", "code"}
    assert json.loads((base / "config.json").read_text())["learning_rate"] == 3e-3
    assert json.loads((base / "env.json").read_text())["torch"] == torch.__version__
    assert (base / "tokenizer.json").read_bytes() == (data_dir / "tokenizer.json").read_bytes()
    files = [p.name for p in checkpoint.steps(base).values()]
    assert files == ["step_00000006.safetensors", "step_00000012.safetensors"]
    stored = load_file(checkpoint.find(base))
    assert all(torch.equal(stored[name], p) for name, p in checkpoint.load(base).state_dict().items())


def test_same_seed_same_bytes(base, data_dir, tmp_path):
    trained(data_dir, tmp_path / "again")
    assert numbers(tmp_path / "again") == numbers(base)
    assert weights(tmp_path / "again", 12) == weights(base, 12)
    trained(data_dir, tmp_path / "other", seed=2)
    assert numbers(tmp_path / "other") != numbers(base)


def test_run_equals_a_naive_loop(data_dir, tmp_path):
    """Every setting of the recipe reaches the step: seed, rates, decay, betas, clipping, none at its default."""
    kw = dict(seed=7, weight_decay=0.3, beta1=0.8, beta2=0.9, grad_clip=0.5, final_lr=0.3, warmup_steps=3)
    trained(data_dir, tmp_path / "run", **kw)
    model, corpus = GPT(checkpoint.load(tmp_path / "run").cfg, seed=7), data.Corpus(data_dir, 16, seed=7)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [dict(params=[p for p in model.parameters() if p.ndim == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW([dict(params=matrices), *vectors], betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3)
    for t, record in enumerate(steps_of(tmp_path / "run")):
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
        assert abs(record["loss"] - loss.item()) < 1e-4 and abs(record["grad_norm"] / norm.item() - 1) < 1e-3
    for a, b in zip(checkpoint.load(tmp_path / "run").parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def interrupted(data_dir, out, number, **kw):
    """Start a run, send it signal `number` after some steps; returns (exit code, stdout)."""
    command = [sys.executable, str(ROOT / "train.py"), *flags(data_dir, out, **kw)]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, deadline = out / "metrics.jsonl", time.time() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 40:
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    return process.returncode, stdout


LONG = dict(max_steps=160, save_every=20, eval_every=80, keep=0)


def test_resumed_run_equals_an_uninterrupted_one(data_dir, tmp_path):
    kw = dict(dtype="float16", value_mode="denseformer")  # with a scaler, and with weights that are learned
    trained(data_dir, tmp_path / "whole", **LONG, **kw)
    for name, number in (("term", signal.SIGTERM), ("kill", signal.SIGKILL)):
        out = tmp_path / name
        code, stdout = interrupted(data_dir, out, number, **LONG, **kw)
        if number == signal.SIGTERM:
            assert code == 0 and "stopped and saved at step" in stdout and "--resume=auto" in stdout
        else:
            assert code == -signal.SIGKILL
        assert 0 < max(checkpoint.steps(out)) < 160
        trained(data_dir, out, **LONG, **kw, resume="auto")
        assert numbers(out) == numbers(tmp_path / "whole")
        assert weights(out, 160) == weights(tmp_path / "whole", 160)
        state = checkpoint.state_file(checkpoint.find(out))
        assert state.read_bytes() == checkpoint.state_file(checkpoint.find(tmp_path / "whole")).read_bytes()
    assert "already finished" in trained(data_dir, tmp_path / "term", **LONG, **kw, resume="auto").stdout


def test_only_the_second_ctrl_c_kills():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = train.Stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the first
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_what_a_kill_after_the_last_save_has_left(data_dir, tmp_path):
    """The next start of a finished run deletes what the run itself would have deleted, and no more."""
    out = tmp_path / "run"
    trained(data_dir, out, keep=0, save_every=3)
    every = list(checkpoint.steps(out))
    orphan = out / "step_00000001.state.safetensors"
    for keep, left in ((0, every), (1, every[-1:])):
        orphan.write_bytes(b"")
        change(out / "config.json", keep=keep)
        assert "already finished" in trained(data_dir, out, save_every=3, resume="auto").stdout
        assert set(left) <= set(checkpoint.steps(out)) <= {*left, int(checkpoint.best(out).stem[5:])}
        assert not orphan.exists() and len(list(out.glob("*.state.*"))) == len(checkpoint.steps(out)) < 10
    assert len(checkpoint.steps(out)) < len(every)


def torchrun(n, *words, of="train.py"):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", "--standalone"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    return finished([*command, str(ROOT / of), *map(str, words)], env=env)


def test_two_ranks_equal_one(data_dir, tmp_path):
    """With accumulation, and also where both go on from step 6."""
    kw = dict(value_mode="resformer_denseformer")
    trained(data_dir, tmp_path / "one", **kw)
    result = torchrun(2, *flags(data_dir, tmp_path / "two", **kw, micro_batch=2))
    assert result.returncode == 0, result.stderr
    assert "= 2 x 2 x 2 x 16" in result.stdout
    compare(tmp_path / "one", tmp_path / "two")
    for path in (tmp_path / "two").glob("step_00000012.*"):
        path.unlink()
    again = torchrun(2, *flags(data_dir, tmp_path / "two", **kw, micro_batch=2, resume="auto"))
    assert again.returncode == 0, again.stderr
    compare(tmp_path / "one", tmp_path / "two")


def test_batches_are_read_ahead(data_dir, tmp_path):
    """While the first is used, the second is being read. A fault in the thread that reads is not lost."""
    run = built(data_dir, tmp_path, micro_batch=1)
    read, asked, second = run.corpus.batch, [], threading.Event()

    def batch(*place):
        asked.append(place)
        if len(asked) == 2:
            second.set()
        return read(*place)

    run.corpus.batch = batch
    batches = train.training_batches(run, 0)
    next(batches)
    assert second.wait(timeout=60)
    run.corpus.batch = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        for _ in range(2):  # the first of them has been read before
            next(batches)


def compare(one, two):
    a, b = numbers(one), numbers(two)
    assert len(a) == len(b) == 14
    for r, s in zip(a, b, strict=True):
        for key in ("loss", "grad_norm", "val_mean", "val_mixture", "bpb_mean"):
            assert key not in r or abs(r[key] - s[key]) < 1e-4 * r[key], (key, r, s)


def test_half_precision_follows_fp32(base, data_dir, tmp_path):
    for dtype in ("bfloat16", "float16"):
        trained(data_dir, tmp_path / dtype, dtype=dtype)
        losses = [[record["loss"] for record in steps_of(run)] for run in (base, tmp_path / dtype)]
        assert np.allclose(*losses, rtol=0, atol=0.02) and losses[0] != losses[1], dtype
        state = checkpoint.read_metadata(checkpoint.state_file(checkpoint.find(tmp_path / dtype)))
        assert state["scaler"].get("scale") == (65536 if dtype == "float16" else None)


def test_fp16_overflow_skips_the_step(data_dir, tmp_path):
    """And says so. AdamW has no state to resume from when all steps so far were skipped."""
    run = built(data_dir, tmp_path, dtype="float16")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.clone() for p in run.model.parameters()]
    loss, norm, *_ = train.train_step(run, run.model, 0, train.training_batches(run, 0))
    assert math.isfinite(loss) and norm is None and run.scaler.get_scale() == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    checkpoint.save(tmp_path, 1, run.model, run.corpus.tokenizer.hash, optimizer=run.optimizer, scaler=run.scaler)
    again = built(data_dir, tmp_path, dtype="float16", resume="auto")
    assert train.resumed(again) == 1 and again.scaler.get_scale() == 2.0**39


def test_a_loss_that_explodes_stops_the_run(data_dir, tmp_path):
    out = tmp_path / "run"
    trained(data_dir, out, max_steps=4, save_every=4)
    good = weights(out, 4)
    kw = dict(resume="auto", max_steps=400, learning_rate=1e6, save_every=400, eval_every=400, grad_clip=0)
    kw |= dict(weight_decay=1e6)
    refused(in_process(train, *flags(data_dir, out, **kw)), "is nan; nothing of this step is saved")
    assert weights(out, 4) == good and list(checkpoint.steps(out)) == [4]


def test_a_validation_loss_that_is_not_finite_stops_the_run(data_dir, tmp_path, monkeypatch):
    run = built(data_dir, tmp_path)
    with torch.no_grad():
        run.model.head.weight[5] = math.inf
    with pytest.raises(configurator.UserError, match="step 3: the validation loss is nan"):
        train.Metrics(run.cfg, run.world, 0).evaluation(3, train.validate(run))


def test_going_back_needs_another_folder(data_dir, tmp_path):
    out = tmp_path / "run"
    trained(data_dir, out, keep=0, save_every=4)
    assert list(checkpoint.steps(out)) == [4, 6, 8, 12]  # and 6, which was evaluated
    back = dict(resume=out / "step_00000004.safetensors", keep=1, save_every=1, max_steps=7)
    refused(in_process(train, *flags(data_dir, out, **back)), "holds step 12, later than")
    same = out.parent / "run" / ".." / "run" / "step_00000012.safetensors"  # another way to write out_dir
    trained(data_dir, out, resume=same, keep=0, save_every=4, max_steps=12)
    trained(data_dir, tmp_path / "back", **back)
    assert max(checkpoint.steps(tmp_path / "back")) == 7 and max(checkpoint.steps(out)) == 12


def test_going_on_from_another_run_in_a_new_folder(base, data_dir, tmp_path):
    def on(**kw):
        return in_process(train, *flags(data_dir, tmp_path / "new", resume=base, **kw))

    refused(on(), "is at step 12, so nothing is left to train; set --max_steps above that")
    refused(on(max_steps=14, seed=7), f"{base} was started with other settings: seed (was 1), max_steps (was 12)")
    assert on(max_steps=14).returncode == 0
    assert [record["step"] for record in steps_of(tmp_path / "new")] == [13, 14]
    refused(on(max_steps=16), "already holds a run, and", "is of another; set another --out_dir")


def test_going_on_from_another_run_where_one_died_before_its_first_checkpoint(base, data_dir, tmp_path):
    """The dead run's records are not this one's."""
    out = tmp_path / "new"
    trained(data_dir, out, max_steps=2)
    for path in out.glob("step_*"):
        path.unlink()
    trained(data_dir, out, resume=base, max_steps=14)
    assert [record["step"] for record in steps_of(out)] == [13, 14]
    assert [r["step"] for r in read_records(out / "metrics.old.jsonl") if "loss" in r] == [1, 2]


def test_old_metrics_without_a_checkpoint_are_kept(data_dir, tmp_path):
    out = tmp_path / "run"
    trained(data_dir, out, max_steps=2)
    for path in out.glob("step_*"):
        path.unlink()
    (out / ".step_1.safetensors.tmp").write_bytes(b"half")
    trained(data_dir, out, max_steps=3)
    assert len(steps_of(out)) == 3 and len(read_records(out / "metrics.old.jsonl")) == 4
    assert not list(out.glob(".*.tmp"))


def test_evaluation_equals_the_naive_one(data_dir, tmp_path):
    run = built(data_dir, tmp_path, eval_tokens=0)
    got = train.validate(run)
    for domain in ("prose", "code"):
        ids = torch.from_numpy(np.fromfile(data_dir / f"val/{domain}.bin", "<u2").astype(np.int64))
        nats = 0.0
        for x, y in zip(ids[:-1].split(16), ids[1:].split(16), strict=True):  # the last window is shorter
            nats += F.cross_entropy(run.model(x[None])[0][0], y, reduction="sum").item()
        assert abs(got["val"][domain] - nats / (len(ids) - 1)) < 1e-5
        text_bytes = (ids[1:] != 256).sum().item()  # end-of-text is no byte of text
        assert abs(got["bpb"][domain] - nats / text_bytes / math.log(2)) < 1e-5
    assert abs(got["val_mean"] - sum(got["val"].values()) / 2) < 1e-9
    assert abs(got["val_mixture"] - (0.6 * got["val"]["prose"] + 0.4 * got["val"]["code"])) < 1e-9
    assert train.validate(built(data_dir, tmp_path, eval_tokens=512))["val"] != got["val"]


def test_learning_rate():
    rate = [learning_rate(t, peak=6e-4, end=6e-5, warmup=120, steps=10_000) for t in range(10_001)]
    assert rate[0] == 1e-7 and abs(rate[60] - (1e-7 + 6e-4) / 2) < 1e-12 and rate[120] == max(rate) == 6e-4
    assert abs(rate[5060] - 3.3e-4) < 1e-12 and abs(rate[-1] - 6e-5) < 1e-15
    assert learning_rate(0, 1.0, 0.1, 0, 10) == 1.0


def test_a_step_is_split_evenly():
    """micro_batch falls to the largest divisor of a rank's share, which changes no number."""
    assert TrainConfig(batch_tokens=2_097_152, micro_batch=32).split_batch(8) == (32, 4)
    small = TrainConfig(batch_tokens=2048, block_size=256, micro_batch=8)  # the demo's
    assert [small.split_batch(n) for n in (1, 2, 4, 8)] == [(8, 1), (4, 1), (2, 1), (1, 1)]
    assert TrainConfig(batch_tokens=384, block_size=32, micro_batch=8).split_batch(1) == (6, 2)


def test_a_batch_that_does_not_split():
    says = "batch_tokens=1000 is not a multiple of block_size=32; nearest: 992 or 1024"
    with pytest.raises(configurator.UserError, match=says):
        TrainConfig(batch_tokens=1000, block_size=32).split_batch(1)
    with pytest.raises(configurator.UserError, match="nearest: 512$"):
        TrainConfig(batch_tokens=200, block_size=512).split_batch(2)
    with pytest.raises(configurator.UserError, match="3 ranks cannot share the 8 sequences .* multiple of 768"):
        TrainConfig(batch_tokens=2048, block_size=256).split_batch(3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")
def test_compiled_run_equals_a_plain_one(base, data_dir, tmp_path):
    assert "compiled in" in trained(data_dir, tmp_path / "compiled", compile="true").stdout
    compare(base, tmp_path / "compiled")


def test_compile_without_a_compiler_goes_on(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = trained(data_dir, tmp_path / "run", compile="true", max_steps=2)
    assert "torch.compile does not work here (there is no C++ compiler); continuing without it" in result.stdout


def test_full_disk_leaves_the_last_checkpoint(base, data_dir, tmp_path):
    """A limit on the size of files stands in for a full disk: both make a write fail half-way."""
    out = tmp_path / "run"
    trained(data_dir, out, max_steps=4, save_every=4)
    good = weights(out, 4)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    result = script("train.py", *flags(data_dir, out, resume="auto", max_steps=6, save_every=2), preexec_fn=limit)
    refused(result, "cannot write", "free")
    assert weights(out, 4) == good and list(checkpoint.steps(out)) == [4] and not list(out.glob(".*tmp"))
    trained(data_dir, out, resume="auto", max_steps=6)
    assert list(checkpoint.steps(out)) == [4, 6]


def test_resume_refuses_another_model_or_tokenizer(base, data_dir, tmp_path):
    def resume(data=data_dir, **kw):
        return in_process(train, *flags(data, base, resume="auto", **kw))

    refused(resume(value_mode="resformer"), "is a vanilla model, not resformer")
    refused(resume(n_embd=64), "n_embd 32 instead of 64")
    refused(resume(arch="gpt2"), "arch llama instead of gpt2")
    refused(resume(learning_rate=1e-4), "learning_rate (was 0.003)")  # a finished run with other settings is another
    refused(resume(max_steps=20, seed=2), "seed (was 1)")
    refused(resume(data=make_data(tmp_path / "data", tokenizer=byte_tokenizer("(?s:..?)"))), "another tokenizer")
    refused(in_process(train, *flags(data_dir, base)), "already holds a run", "--resume=auto")
    refused(in_process(train, *flags(data_dir, base / "config.json")), "config.json")  # a file, not a folder


def test_changed_settings_are_named_on_resume(data_dir, tmp_path):
    trained(data_dir, tmp_path / "run", max_steps=4)
    result = trained(data_dir, tmp_path / "run", max_steps=6, weight_decay=0.2, resume="auto")
    assert "changed since the run was last started: max_steps (was 4), weight_decay (was 0.1)" in result.stdout
    change(tmp_path / "run" / "config.json", without="bos")  # a run that is older than the setting
    other = in_process(train, *flags(data_dir, tmp_path / "run", max_steps=8, resume="auto", bos=True))
    refused(other, "was started with other settings: ", "bos (was False)")
    assert [r["step"] for r in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_bad_input(data_dir, tmp_path):
    for kw, says in (
        (dict(data_dir="nowhere"), "no data folder nowhere"),
        (dict(attn="flash"), "attn=flash needs a GPU"),
        (dict(device="gpu"), "device=gpu cannot be used here"),
        (dict(max_steps=0), "max_steps=0 must be at least 1"),
        (dict(mixture="{'code': 'x'}"), "mixture.code takes float, not 'x'"),
        (dict(resume="nowhere"), "holds no checkpoint"),
        (dict(resume=""), "resume is empty; set never, auto or a checkpoint's path"),
    ):
        refused(in_process(train, *flags(data_dir, tmp_path / "run", **kw)), says)


def test_wandb_gets_every_number(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(in_process(train, *flags(data_dir, tmp_path / "run", log="wandb")), "pip install wandb")
    logged = []
    fake = SimpleNamespace(init=lambda **kw: None, log=lambda r, step: logged.append((step, r)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trained(data_dir, tmp_path / "run", log="wandb", value_mode="resformer_lerp")
    assert [step for step, r in logged if "loss" in r] == list(range(1, 13))
    evaluation = next(r for _, r in logged if "val_mean" in r)
    assert {"val/prose", "val/code", "bpb/code", "lam/0/1/0", "lam/0/1/1"} <= evaluation.keys()


# ---- every mode


def test_every_mode_trains(data_dir, tmp_path):
    """Two steps in bf16, accumulated and recomputed: no dtypes that clash, and the weights that mix are on record."""
    more = dict(n_layer=4, n_head=8, micro_batch=4, dtype="bfloat16", recompute=True, max_steps=2)
    for mode, arch in [*((mode, "llama") for mode in COVER), ("svformer", "gpt2")]:
        out = tmp_path / f"{mode} {arch}"
        run = built(data_dir, out, **more, value_mode=MODES[mode], arch=arch)
        assert run.model.recompute
        train.train(run, 0, *train.compare_settings(run, 0))
        assert [math.isfinite(r["loss"]) for r in steps_of(out)] == [True, True], mode
        (evaluation,) = [r for r in read_records(out / "metrics.jsonl") if r.get("event") == "eval"]
        learns = any(r.learn not in ("fixed", "head", "sigmoid", "relu") for r in MODES[mode].residuals)
        assert ("lam" in evaluation) == learns, mode
        if learns:
            assert evaluation["lam"] == run.model.mixing_weights(), mode
            assert len(evaluation["lam"]) == len(MODES[mode].residuals), mode


def test_every_mode_fits_the_demo_and_the_papers_sizes():
    for size in ("tiny", "size_2m", "size_82m", "size_180m", "size_468m"):
        for name in VALUE_MODES:
            if (name, size) != ("gqa8", "size_180m"):  # 12 heads are no groups of 8
                cfg = load_settings(TrainConfig, [str(ROOT / f"config/{size}.py"), f"--value_mode={name}"])
                assert cfg.out_dir == f"out/{name}", name


def test_a_checkpoint_from_before_a_setting_existed_goes_on(base, data_dir, tmp_path):
    """Headers of older versions lack newer fields, which have their defaults then."""
    out = tmp_path / "old"
    trained(data_dir, out, value_mode="resformer", max_steps=6, save_every=6)
    for path in checkpoint.steps(out).values():
        header = checkpoint.read_header(path)
        header["config"] = dataclasses.asdict(header["config"])
        for old in (header["config"], *header["config"]["value_mode"]["residuals"]):
            for field in ("arch", "rope_scaling", "learn", "tables"):
                old.pop(field, None)
        del header["config"]["value_mode"]["kv_group"]
        save_file(load_file(path), path, metadata={"nanoresformer": json.dumps(sealed(header))})
    trained(data_dir, out, value_mode="resformer", resume="auto", max_steps=8)
    assert len(steps_of(out)) == 8


# ---- memory that is freed

FAULTS = """
import resource, runpy, sys, train
faults, rate = [], train.learning_rate

def counting(*args):  # once a step
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return rate(*args)

train.learning_rate = counting
train.main(train.TrainConfig(**SETTINGS))
print("pages", faults[-1] - faults[5])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
def test_freed_memory_is_kept(data_dir, tmp_path):
    """A step of training asks the system for no new memory, unless a variable of glibc says otherwise."""
    big = dict(n_layer=2, n_head=4, n_embd=128, block_size=128, batch_tokens=2048, micro_batch=16, attn="eager")
    settings = SMALL | big | dict(data_dir=str(data_dir), max_steps=15, eval_every=15, save_every=15, device="cpu")
    new_pages = []
    for more in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        code = FAULTS.replace("SETTINGS", repr(settings | {"out_dir": str(tmp_path / str(len(more)))}))
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        env["OMP_NUM_THREADS"] = "1"
        out = finished([sys.executable, "-c", code], cwd=ROOT, env=env | more).stdout
        new_pages.append(int(out.split()[-1]))
    assert new_pages[0] < 10_000 < 100_000 < new_pages[1], new_pages
