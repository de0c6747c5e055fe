"""Weights, gradients and optimizer divided among ranks (--shard), and several nodes: the numbers of one process.

The ranks are forked from one process that imports torch once: `python tests/test_shard.py FOLDER` is that process.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from conftest import MODES, ROOT, finished, make_data
from safetensors import safe_open

import checkpoint
import train
from model import GPT
from oldconfig import UserError
from oldfiles import read_records
from runtime import Distributed, whole

# Learned weights, gates, token tables, DenseFormer, sharing, attention to other layers: parameters in and outside of
# blocks, and blocks that read what others have made.
SHARDED = ["vanilla", "everything", "two_gates", "value_embed", "value_embed_gated", "value_embed_unet", "svformer"]
SHARDED += ["resformer_plus", "resformer_dense", "denseformer_2x2", "cross", "mlkv"]
SMALL = dict(n_layer=4, n_head=8, n_embd=16, block_size=8, batch_tokens=48, micro_batch=2, seed=1, dtype="float32")
SMALL |= dict(learning_rate=3e-3, final_lr=1, warmup_steps=0, eval_tokens=24, eval_every=3, save_every=1, keep=0)
SMALL |= dict(resume="auto", log_every=1000)
# Ranks, and what they do with each run: shard, and until which step. Each goes on where the one before stopped.
PARTS = {1: [("zero3", 1)], 2: [("none", 2), ("zero2", 3)], 3: [("zero3", 4)]}
LAST = 5  # on one rank again


# ---- in the forked processes


def config_of(mode, folder, out="parts", **kw):
    settings = SMALL | dict(data_dir=str(folder / "data"), out_dir=str(folder / out / mode)) | kw
    return train.TrainConfig(value_mode=MODES[mode], **settings)


def sharded_run(world, cfg):
    """A Run, divided among the ranks as train.set_up does it."""
    run = train.build(cfg, world)
    train.resumed(run)
    world.shard(run.model, run.optimizer, keep_gathered=cfg.shard == "zero2")
    return run


def parts(world, folder):
    for shard, until in PARTS[world.size]:
        for mode in SHARDED:
            train.start(config_of(mode, folder, shard=shard, max_steps=until), world)


def saved_again(world, folder):
    """A checkpoint that is read, divided, gathered and written is the same file as before."""
    for mode in SHARDED:
        run = sharded_run(world, config_of(mode, folder, shard="zero3"))
        header, is_main = checkpoint.read_header(checkpoint.find(run.cfg.out_dir)), world.rank == 0
        about = (header["tokenizer"], header["val_loss"], run.optimizer, run.scaler, 0, is_main)
        checkpoint.save(folder / "again" / mode, header["step"], run.model, *about)


def averages(world, folder):
    """Where rank 0 alone has targets, a gradient is its own divided by the number of ranks."""
    for shard in ("zero2", "zero3"):
        run = sharded_run(world, config_of("resformer", folder, "new", shard=shard))
        x, y = map(torch.from_numpy, run.corpus.batch(0, 2))
        run.model(x, y if world.rank == 0 else torch.full_like(y, -1))[1].backward()
        alone = GPT(run.model.cfg, run.cfg.seed)
        alone(x, y)[1].backward()
        for p, right in zip(run.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), right.grad / world.size, rtol=1e-5, atol=1e-8)


def overflow(world, folder):
    """fp16: where the part of one rank overflows, all ranks skip the step and halve the scale."""
    run = sharded_run(world, config_of("vanilla", folder, "new", shard="zero3", dtype="float16"))
    unscale, before = run.scaler.unscale_, [p.to_local().clone() for p in run.model.parameters()]

    def spoiled(optimizer):
        if world.rank == 1:
            run.model.head.weight.grad.to_local()[0] = torch.inf
        unscale(optimizer)

    run.scaler.unscale_ = spoiled
    _, norm, *_ = train.train_step(run, run.model, 0, train.training_batches(run, 0))
    assert norm is None and run.scaler.get_scale() == 2.0**15
    assert all(torch.equal(p.to_local(), b) for p, b in zip(run.model.parameters(), before, strict=True))


def memory(world, folder):
    """A rank holds its rows alone, of the weights (also after an evaluation) and of the optimizer's state."""
    for shard in ("zero2", "zero3"):
        run = sharded_run(world, config_of("resformer_plus", folder, shard=shard))
        train.validate(run)
        n_here = 0
        for p in run.model.parameters():
            n_here += p.to_local().numel()
            for moment in ("exp_avg", "exp_avg_sq"):
                local = run.optimizer.state[p][moment].to_local()
                assert local.shape == p.to_local().shape and local.untyped_storage().nbytes() == 4 * local.numel()
        assert n_here < 0.52 * sum(p.numel() for p in run.model.parameters())


def other_settings(world, folder):
    """Recomputed, and recomputed and compiled. Blocks become graphs, but no machine code, which takes a minute."""
    for mode in ("resformer_dense", "value_embed"):
        train.start(config_of(mode, folder, "recomputed", shard="zero3", recompute=True, max_steps=3), world)
    to_graph = torch.compile
    torch.compile = lambda *words, **kw: to_graph(*words, **kw, backend="eager")
    cfg = config_of("svformer", folder, "compiled", shard="zero3", recompute=True, compile=True, max_steps=3)
    train.start(cfg, world)


def refusals(world, folder):
    """What all ranks refuse: a fault of one, other data on another node, and a compiler that does not work."""
    with pytest.raises(UserError if world.rank == 0 else SystemExit, match="^rank 1: no such file$|^2$"):
        with world.together():
            if world.rank == 1:
                raise UserError("no such file")
    data = folder / ("data" if world.rank == 0 else "other_data")
    with pytest.raises(UserError, match="the ranks do not read the same data"):
        train.start(config_of("vanilla", folder, "refused", data_dir=str(data)), world)
    os.environ["PATH"] = ""
    with pytest.raises(UserError, match="no C.. compiler.; set --compile=false"):
        train.start(config_of("vanilla", folder, "refused", shard="zero2", compile=True), world)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(n, folder, *steps):
    """Fork n connected processes that do each of `steps`, which are called with (world, folder)."""
    port, pids = free_port(), []
    for rank in range(n):
        pids.append(os.fork())
        if pids[-1]:
            continue
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            world = Distributed("cpu")
            for step in steps:
                step(world, folder)
            world.wait()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    for _ in range(n):
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"one of {n} ranks has failed")


def on_one(world, folder):
    for mode in SHARDED:
        train.start(config_of(mode, folder, "one", max_steps=LAST, save_every=LAST), world)
    parts(world, folder)


def to_the_end(world, folder):
    for mode in SHARDED:
        train.start(config_of(mode, folder, max_steps=LAST), world)


def all_ranks(folder):
    import torch._dynamo
    import torch.distributed.fsdp  # here, and not in each of the ranks

    torch.set_num_threads(1)
    on_ranks(1, folder, on_one)
    on_ranks(2, folder, parts, averages, overflow, other_settings)
    on_ranks(3, folder, parts)
    on_ranks(1, folder, to_the_end)
    on_ranks(2, folder, saved_again, memory, refusals)


if __name__ == "__main__":
    all_ranks(Path(sys.argv[1]))


# ---- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `all_ranks` leaves."""
    folder = tmp_path_factory.mktemp("shard")
    make_data(folder / "data")
    make_data(folder / "other_data", seed=1)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:Guards may run slower"}  # on Python 3.13.0
    result = finished([sys.executable, __file__, str(folder)], env=env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no warnings either
    (folder / "said.txt").write_text(result.stdout)
    return folder


def records(out):
    """{(step, "step" or "eval"): its record} of a run."""
    found = [r for r in read_records(out / "metrics.jsonl") if r.get("event") != "start"]
    return {(r["step"], r.get("event", "step")): r for r in found}


def largest_difference(right, other):
    """The largest relative difference of two runs' losses and gradient norms, at the steps that both have."""
    found = []
    for place in right.keys() & other.keys():
        for key in {"loss", "grad_norm", "val_mean", "bpb_mean"} & right[place].keys():
            a, b = right[place][key], other[place][key]
            found.append(abs(a - b) / a)
    return max(found)


def weights_of(record):
    """The learned weights that a record has, see GPT.mixing_weights."""
    return [w for layers in record.get("lam", []) for weights in layers if weights for w in weights]


def test_losses_are_those_of_one_process(folder):
    """Over 1, 2 and 3 ranks and each way to shard, each resumed from the one before. The norm says that gradients are
    averaged: a sum over ranks would be 2 or 3 times as long."""
    for mode in SHARDED:
        right, other = records(folder / "one" / mode), records(folder / "parts" / mode)
        assert len(right) == LAST + 2 and right.keys() <= other.keys(), mode
        assert largest_difference(right, other) < 1e-6, mode
        for place in right:
            assert weights_of(other[place]) == pytest.approx(weights_of(right[place]), rel=1e-5), mode
    assert "shard=zero3 has one rank" in (folder / "said.txt").read_text()


def test_recomputed_and_compiled(folder):
    for out in [*(folder / "recomputed").iterdir(), *(folder / "compiled").iterdir()]:
        right, other = records(folder / "one" / out.name), records(out)
        assert len(other) == 4 and largest_difference(right, other) < 1e-6, out


def test_one_format(folder):
    for mode in SHARDED:
        names = ("step_00000005.safetensors", "step_00000005.state.safetensors")
        for name in names:
            before = (folder / "parts" / mode / name).read_bytes()
            assert (folder / "again" / mode / name).read_bytes() == before, (mode, name)
        forms = []
        for place in ("one", "parts"):
            with safe_open(folder / place / mode / names[1], "pt") as f:
                forms.append({key: (f.get_slice(key).get_dtype(), f.get_slice(key).get_shape()) for key in f.keys()})
        assert forms[0] == forms[1], mode


def test_a_broken_connection_names_the_ranks_that_have_ended(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ended, host = subprocess.Popen(["true"]), socket.gethostname()
    ended.wait()
    world, lost = Distributed("cpu"), RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(RuntimeError, match="gloo"), world.connected():
        raise lost  # of one rank alone
    world.size, world.processes = 3, [(host, os.getpid()), (host, ended.pid), ("elsewhere", ended.pid)]
    with pytest.raises(RuntimeError, match="shapes"), world.connected():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(UserError, match="^rank 1 of 3 has ended; what was saved is intact"), world.connected():
        raise lost
    world.processes[1] = (host, os.getpid())
    with pytest.raises(UserError, match=r"^another rank has ended or cannot be reached \(\[gloo"), world.connected():
        raise lost


def test_two_nodes(folder):
    """Two torchruns with two ranks each, as on two machines."""
    shape = SMALL | dict(shard="zero3", batch_tokens=64, micro_batch=1, max_steps=3, data_dir=str(folder / "data"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--rdzv_id=test"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.1"]
    command += [str(ROOT / "train.py"), "--value_mode=resformer_dense", f"--out_dir={folder / 'nodes'}"]
    command += [f"--{name}={value}" for name, value in shape.items()]
    env, nodes = os.environ | {"OMP_NUM_THREADS": "1"}, []
    try:
        for _ in range(2):
            nodes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        for node in nodes:
            error = node.communicate(timeout=120)[1]
            assert node.returncode == 0, error
    finally:
        for node in nodes:
            node.kill()
    one = train.TrainConfig(**shape, value_mode="resformer_dense", out_dir=str(folder / "node"))
    train.start(one, Distributed("cpu"))
    assert largest_difference(records(folder / "node"), records(folder / "nodes")) < 1e-6
