"""The same text becomes the same data, order and weights in every Python, and the same code has the same digest: else a
run that one Python began could not go on in another. Each number here is frozen; 3.11, 3.12 and 3.13 have to find it.
"""

import ast
import hashlib

import pytest
from conftest import InThisProcess, in_process

import prepare
from common.data import Corpus, plain_sum
from common.files import sealed
from common.ranks import as_text, without_words
from net.layers import normal
from value_modes import Residual, ValueMode, get_mode


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three domains whose weights sum() adds otherwise since Python 3.12, in each of the three places that add them."""
    root = tmp_path_factory.mktemp("every")
    for domain, words in (("a", "one two three"), ("b", "vier fünf sechs"), ("c", "семь восемь")):
        for i in range(9):
            path = root / "texts" / domain / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{words} {i}.{line}\n" for line in range(90)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "ProcessPoolExecutor", InThisProcess)
        words = (f"--input_dir={root / 'texts'}", "--tokenizer=bpe:290", "--mixture={'a':0.1,'b':0.4,'c':0.1}")
        done = in_process(prepare, "files", *words, f"--out_dir={root / 'data'}")
    assert done.returncode == 0, done.stderr
    return Corpus(root / "data", block_size=16, seed=42)


def test_sums(corpus):
    assert plain_sum([0.1] * 10) == 0.9999999999999999 and plain_sum({}.values()) == 0
    assert corpus.mixture == {"a": 0.16666666666666669, "b": 0.6666666666666667, "c": 0.16666666666666669}


def test_hashes_of_data(corpus):
    found = corpus.tokenizer.hash[:16], corpus.hash, corpus.val_hash
    assert found == ("8c62b086ccde12a5", "4087e1a02530e50b", "0316b4767f7e7398")


def test_order_of_data(corpus):
    x, y = corpus.batch(3, 64)
    assert hashlib.sha256(x.astype("<i8").tobytes() + y.astype("<i8").tobytes()).hexdigest()[:16] == "a7c684f40df0010b"


def test_weights():
    # other processors round the last digits otherwise
    assert normal(42, "blocks.0.mlp.up.weight", (3,), 0.02).tolist() == pytest.approx(
        [-0.019814827, -0.01173791, -0.013482567], abs=1e-7
    )


def test_names_of_modes():
    assert get_mode(ValueMode((Residual(lam=(0.1, 1e-7)),), share_q=(0, 0.5))).name == "custom_ca3ffe"


def test_seals():
    assert sealed("a record", {"numbers": [0.1, 1e-7, 1e22, 3], "text": "é"})["seal"] == "4749b77acae53bc3"


CODE = '''"""Words."""
import numpy as np

TABLE = {"vanilla": 1}

class Config:
    seed: int = setting(42, "random seed", least=0)

def f(x, *, y=1e-3, **kw):
    """Words."""
    @decorated
    def inner(): return lambda a, /, b: (a, b)
    text = f"{x!r:>{y}} {x + 1=} {x['b']}" 'end'
    return [z for z in x if (q := z) is not None], text
'''


def test_digests_of_code():
    assert hashlib.sha256(as_text(without_words(ast.parse(CODE))).encode()).hexdigest()[:16] == "3139fe54208f2e8f"
