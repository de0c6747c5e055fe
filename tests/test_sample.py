"""Sampling: cached text equals uncached text, the filters do what they say, and bad prompts are refused."""

import pytest
import torch
from conftest import MODES, byte_tokenizer, config, refused, script, tiny

import checkpoint
from model import GPT, kv_floats_per_token
from sample import draw, generate


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_equals_the_full_forward(mode):
    model, ids = tiny(mode).float(), [3, 1, 4, 1, 5]
    rows, cache, *_ = generate(model, ids, 12, temperature=0)
    for new in rows[0]:
        logits = model(torch.tensor([ids]))[0][0, -1]
        assert logits.argmax() == new
        ids.append(new)
    assert len(rows[0]) == 12 and cache.nbytes == 16 * 4 * kv_floats_per_token(model.cfg)


def test_block_limits_the_text():
    rows, cache, *_ = generate(tiny().float(), [1] * 30, 100, temperature=0)
    assert len(rows[0]) == 3 and cache.pos == 32  # positions 30 and 31, and one token that needs none
    assert len(generate(tiny().float(), [1] * 32, 100, temperature=0)[0][0]) == 1


def test_samples_differ_and_seeds_repeat():
    def text(seed):
        return generate(tiny().float(), [7], 10, num_samples=3, seed=seed)[0]

    a = text(1)
    assert a == text(1) != text(2) and len({tuple(row) for row in a}) == 3


def test_end_of_text_ends_a_sample():
    model = tiny().float()
    plain = generate(model, [7], 20, num_samples=4)[0]
    eot = plain[0][5]
    rows = generate(model, [7], 20, num_samples=4, eot=eot)[0]
    for row, whole in zip(rows, plain, strict=True):
        assert eot not in row and row == whole[: len(row)]
        assert len(row) == 20 or whole[len(row)] == eot


def test_filters():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(4000, 1)

    def share(**how):
        drawn = draw(logits, torch.Generator().manual_seed(0), **how)
        return [(drawn == i).float().mean().item() for i in range(4)]

    torch.testing.assert_close(share(), [0.1, 0.4, 0.2, 0.3], rtol=0, atol=0.03)
    torch.testing.assert_close(share(top_k=2), [0.0, 4 / 7, 0.0, 3 / 7], rtol=0, atol=0.03)
    torch.testing.assert_close(share(top_p=0.5), [0.0, 4 / 7, 0.0, 3 / 7], rtol=0, atol=0.03)
    torch.testing.assert_close(share(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30], rtol=0, atol=0.03)
    for how in (dict(temperature=0), dict(top_k=1), dict(top_p=0.01), dict(temperature=0.001)):
        assert share(**how) == [0, 1, 0, 0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, tokenizer = tmp_path_factory.mktemp("run"), byte_tokenizer()
    checkpoint.save(out, 1, GPT(config("svformer", vocab_size=257)), tokenizer.hash)
    tokenizer.save(out / "tokenizer.json")
    return out


def test_command(run):
    words = ("sample.py", run, "--prompt=hello", "--num_samples=2", "--max_new_tokens=8", "--seed=3")
    first = script(*words)
    assert first.returncode == 0 and first.stdout.count("hello") == 2
    # 12 positions (the last new token needs none) of 5 x 32 numbers of 4 bytes, two samples
    assert "KV cache 15,360 bytes = 2 x 12 tokens x 640" in first.stdout
    assert first.stdout.split("[")[0] == script(*words).stdout.split("[")[0]


@pytest.mark.parametrize(
    "words,says",
    [
        (["--prompt="], "the prompt is empty"),
        (["--prompt=" + "x" * 33], "33 tokens, the model's block only 32"),
        (["--top_p=0"], "top_p above 0"),
        (["--max_new_tokens=0"], "at least 1"),
    ],
)
def test_bad_input(run, words, says):
    refused(script("sample.py", run, *words), says)


def test_no_run_or_tokenizer(run, tmp_path):
    refused(script("sample.py", tmp_path), "holds no checkpoint")
    (tmp_path / "step_00000001.safetensors").write_bytes((run / "step_00000001.safetensors").read_bytes())
    refused(script("sample.py", tmp_path), "tokenizer.json is missing")
    tokenizer = byte_tokenizer()
    tokenizer.spec["pattern"] = "(?s:..)"
    tokenizer.save(tmp_path / "tokenizer.json")
    refused(script("sample.py", tmp_path), "is not the tokenizer")
