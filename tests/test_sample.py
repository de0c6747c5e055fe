"""Sampling: cached text equals uncached text, the filters do what they say, and bad prompts are refused."""

import functools
import runpy
import shutil
import sys

import pytest
import torch
from conftest import COMPILED, byte_tokenizer, config, fewest_layers, in_process, refused, same, tiny, tokens, widths
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sample
from common import checkpoint
from model import GPT, KVCache
from sample import generate, next_logits, sample_token
from value_modes import kv_floats_per_token

PROMPTS = [tokens((n,), seed=n).tolist() for n in (5, 1, 9)]


def decode(model, prompts, later, static=False, step=next_logits):
    """Logits (B, 1 + T, V) after prompts of several lengths and after each of the tokens later (B, T); the cache."""
    lengths = [len(ids) for ids in prompts]
    padded = torch.tensor([[0] * (max(lengths) - len(ids)) + ids for ids in prompts])
    cache = KVCache(model.cfg, lengths, max(lengths) + later.size(1), dtype=model.head.weight.dtype)
    logits = [next_logits(model, padded, cache)]
    cache.is_static = static
    logits += [step(model, idx, cache) for idx in later.split(1, dim=1)]
    return torch.stack(logits, dim=1), cache


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode,n_kv_head", widths(*COMPILED))
@torch.no_grad()
def test_rows_of_several_lengths_equal_each_alone(mode, n_kv_head, static):
    model, later = tiny(mode, n_kv_head=n_kv_head), tokens((3, 7), seed=99)
    found, cache = decode(model, PROMPTS, later, static)
    rows = [model(torch.tensor([ids + new.tolist()]))[0][0, -8:] for ids, new in zip(PROMPTS, later, strict=True)]
    same(found, torch.stack(rows))
    assert cache.nbytes == 3 * 16 * 8 * kv_floats_per_token(model.cfg)


@pytest.mark.parametrize(
    "backend,mode", [*(("eager", mode) for mode in COMPILED), pytest.param("inductor", "cross", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_one_graph_serves_all_steps(backend, mode):
    """torch.compile's own code generation takes most of the time: for one mode."""
    model, later = tiny(mode, n_layer=fewest_layers(mode)), tokens((3, 7), seed=99)
    plain, _ = decode(model, PROMPTS, later)
    torch.compiler.reset()
    step = torch.compile(next_logits, fullgraph=True, dynamic=False, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):  # and another batch, in a cache of its own
            found, cache = decode(model, PROMPTS, later, True, step)
            same(found, plain, atol=1e-6)


def replayed(step, generator):
    """What as_graph does on a GPU, here: the operations of one step again and again, with the numbers that Python gave
    them the first time. What a step keeps on the host stays as it was then."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            calls.append((op, args, kwargs or {}, result))
            return result

    def replay():
        if len(waiting) > 0:  # recording has run the step, which a GPU does not do
            return waiting.pop()
        new = {}  # id of a recorded tensor: the tensor of this replay
        for op, args, kwargs, recorded in calls:
            args, kwargs = tree_map(lambda x: new.get(id(x), x), (args, kwargs))
            results = tree_leaves(op(*args, **kwargs))
            new.update(zip(map(id, tree_leaves(recorded)), results, strict=True))

    with Recorder():
        step()
    waiting = [None]
    return replay


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("mode", COMPILED)
def test_one_recorded_step_is_all_steps(mode, how, monkeypatch):
    """Two texts of each prompt, until all have ended or the block is full; torch.compile is another test's."""
    model = tiny(mode).float()
    how = how | {"num_samples": 2, "eot": generate(model, PROMPTS, 30, num_samples=2, **how)[0][0][9]}
    plain, _, _ = generate(model, PROMPTS, 30, **how)
    monkeypatch.setattr(torch, "compile", lambda function, **words: function)
    monkeypatch.setattr(sample, "as_graph", replayed)
    found, _, _ = generate(model, PROMPTS, 30, compile=True, **how)
    assert found == plain


def test_greedy_text_equals_the_full_forward():
    model = tiny("resformer").float()
    rows, _, _ = generate(model, PROMPTS, 30, temperature=0, num_samples=2)
    assert [len(row) for row in rows] == [28, 28, 30, 30, 24, 24]  # the block is full, or 30 are there
    for ids, row in zip(PROMPTS, rows[::2], strict=True):
        logits = model(torch.tensor([ids + row[:-1]]))[0][0]
        assert row == logits[len(ids) - 1 :].argmax(-1).tolist()
    assert rows[::2] == rows[1::2]


def test_a_text_that_ends_at_the_block_says_so(run):
    said = [in_process(sample, run, "--temperature=0", f"--max_new_tokens={n}").stdout for n in (31, 99)]
    assert ["the block of 32 tokens is full" in text for text in said] == [False, True]


def test_samples_differ_and_seeds_repeat():
    a, again, other = (generate(tiny().float(), [[7]], 10, num_samples=3, seed=seed)[0] for seed in (1, 1, 2))
    assert a == again != other and len({tuple(row) for row in a}) == 3


def test_end_of_text_ends_a_sample():
    model = tiny().float()
    plain = generate(model, [[7]], 20, num_samples=4)[0]
    eot = plain[0][5]
    cut = [row[: row.index(eot)] if eot in row else row for row in plain]
    assert generate(model, [[7]], 20, num_samples=4, eot=eot)[0] == cut


def test_generation_ends_when_all_rows_have(monkeypatch):
    model, steps = tiny().float(), []
    eot = generate(model, [[7]], 1, temperature=0)[0][0][0]
    monkeypatch.setattr(sample, "next_logits", lambda *args: steps.append(1) or next_logits(*args))
    assert generate(model, [[7]], 30, temperature=0, eot=eot)[0] == [[]]
    assert len(steps) == 1 + sample.CHECK_EVERY - 1  # the prompt, and the steps before we look


def test_filters():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(4000, 1)

    def share(**how):
        drawn = sample_token(logits, torch.Generator().manual_seed(0), **how)
        return [(drawn == i).float().mean().item() for i in range(4)]

    torch.testing.assert_close(share(), [0.1, 0.4, 0.2, 0.3], rtol=0, atol=0.03)
    torch.testing.assert_close(share(top_k=2), [0.0, 4 / 7, 0.0, 3 / 7], rtol=0, atol=0.03)
    torch.testing.assert_close(share(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30], rtol=0, atol=0.03)
    for how in (dict(temperature=0), dict(top_k=1), dict(temperature=0.001)):
        assert share(**how) == [0, 1, 0, 0]
    assert share(top_k=9) == share()  # there are four


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, tokenizer = tmp_path_factory.mktemp("run"), byte_tokenizer()
    checkpoint.save(out, 1, GPT(config("svformer", vocab_size=257, init_std=0.2)), tokenizer.hash)
    tokenizer.save(out / "tokenizer.json")
    return out


def test_command(run, monkeypatch, capsys):
    words = [str(run), "--prompt=hello", "--num_samples=2", "--max_new_tokens=8", "--seed=3"]
    first = in_process(sample, *words)
    assert first.returncode == 0 and first.stdout.count("hello") == 2
    # 12 positions (the last new token needs none) of 5 x 32 numbers of 4 bytes, two samples
    assert "KV cache 15,360 bytes = 2 x 12 tokens x 640 in float32]" in first.stdout
    monkeypatch.setattr(sys, "argv", ["sample.py", *words])
    runpy.run_path(sample.__file__, run_name="__main__")  # as `python sample.py` does
    assert capsys.readouterr().out.split("[")[0] == first.stdout.split("[")[0]


def test_command_with_a_file_of_prompts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", mode=None))
    (tmp_path / "prompts.txt").write_text("hello\nhi there\n\n")
    words = [run, f"--prompt_file={tmp_path / 'prompts.txt'}", "--max_new_tokens=8"]
    found, plain = (in_process(sample, *words, *more).stdout for more in (["--compile"], []))
    assert found.split("\n[")[0] == plain.split("\n[")[0]
    assert "--- 1\nhello" in found and "--- 2\nhi there" in found
    assert "KV cache 19,200 bytes = 2 x 15 tokens x 640" in found


BAD = {
    "prompt 2 is empty": b"a\n\nb\n",
    "prompt 2: 33 tokens": b"x\n" + 33 * b"y",
    "name a text file": b"\xff\xfea\0",
}


@pytest.mark.parametrize("says", BAD)
def test_prompts_that_the_model_cannot_continue(run, tmp_path, says):
    (tmp_path / "prompts.txt").write_bytes(BAD[says])
    refused(in_process(sample, run, f"--prompt_file={tmp_path / 'prompts.txt'}"), says)


def test_prompts_as_nanogpt_takes_them(run):
    refused(in_process(sample, run, "--prompt=FILE:a.txt"), "is a nanoGPT setting; here, set --prompt_file=a.txt")
    assert r"note: \n in the prompt is two characters" in in_process(sample, run, r"--prompt=\n").stdout


def test_a_text_begins_as_in_training_and_ends_with_the_tokenizers_end(run, monkeypatch):
    calls, tokenizer = [], byte_tokenizer()
    tokenizer.start, tokenizer.end, tokenizer.prefix = 1, 2, [3]
    monkeypatch.setattr(checkpoint, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(sample, "generate", lambda *words, **how: calls.append(words) or generate(*words, **how))
    assert in_process(sample, run, "--prompt=a", "--max_new_tokens=1").returncode == 0
    assert calls[0][1] == [[3, ord("a")]] and calls[0][5] == 2


def test_the_newest_run_is_named(run, tmp_path, monkeypatch, capsys):
    """Which one is the newest is a matter of clocks, and of how it was copied."""
    shutil.copytree(run, tmp_path / "out/a")
    monkeypatch.chdir(tmp_path)
    sample.main(sample.SampleConfig(prompt="a", max_new_tokens=2))
    assert capsys.readouterr().out.startswith("the newest run is out/a\n")


def test_another_tokenizer_is_refused(run, tmp_path):
    (tmp_path / "step_00000001.safetensors").write_bytes((run / "step_00000001.safetensors").read_bytes())
    byte_tokenizer("(?s:..)").save(tmp_path / "tokenizer.json")
    refused(in_process(sample, tmp_path), "is not the tokenizer")
