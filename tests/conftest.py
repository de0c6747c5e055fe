"""Shared by the tests: modes, a small model, the reference folder, and running our scripts as a user does."""

import base64
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A user's environment decides nothing here. We take it away before anything reads it.
THEIRS = r"RANK|WORLD_SIZE|COLUMNS|LINES|MFLAGS|\w+_COLORS?|PYTHON(SAFEPATH|OPTIMIZE|WARNINGS|IOENCODING)"
THEIRS += r"|(LOCAL|MASTER|GIT|HF|HUGGINGFACE|TRANSFORMERS|WANDB|MALLOC|CUDNN|JUPYTER|TORCH|PYTORCH|MPL|MAKE)\w+"
for name in [name for name in os.environ if re.fullmatch(THEIRS, name)]:
    del os.environ[name]
CACHE = tempfile.TemporaryDirectory()  # of transformers and the hub: a user's may be full, old or read-only
os.environ |= {"HF_HOME": CACHE.name, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
os.environ["PYTHONUTF8"] = "1"  # of what we start, whatever the locale
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # the tests are about CPUs, and one thread of each
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background deaf to Ctrl-C

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))

from common.cores import cores  # noqa: E402
from configurator import run  # noqa: E402
from model import GPT  # noqa: E402
from value_modes import VALUE_MODES, ModelConfig, Residual, ValueMode  # noqa: E402


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers(config):
    """How many processes --numprocesses=auto means. More than four gain nothing."""
    return min(4, cores())


# The rows of the table, and combinations of its axes that no row uses: the frame has to carry them all.
MODES = VALUE_MODES | {
    "numbered_source": ValueMode((Residual(source=2, layers="-1:"), Residual(of="hidden", source=1, learn="scalar"))),
    "all_learned_keys": ValueMode((Residual(of="k", source="all", learn="scalar"),)),
    "scores_twice": ValueMode((Residual(of="scores", source="all"), Residual(of="scores", lam=(1.0, -0.5)))),
    "hidden_all": ValueMode((Residual(of="hidden", source="all"), Residual())),
    "cross_all": ValueMode((Residual(map="cross", source="all"), Residual())),
    "scores_share_q": ValueMode((Residual(of="scores", source="prev"),), share_q="every 2"),
    "prev_of_anchors": ValueMode((Residual(source="prev"), Residual(map="delta", source="all")), share_v=(0, 2, 3)),
    "two_gates": ValueMode((Residual(learn="head"), Residual(source="token", learn="relu", layers="2:"))),
    "keys_resformer": ValueMode((Residual(),), values="keys"),
    "skip_queries": ValueMode((Residual(of="q"),), share_k="lower half", heads_from_layer_0=0.25),
    "everything": ValueMode((
        Residual(learn="scalar"), Residual(of="k"), Residual(map="delta", lam=(1.0, 0.2)), Residual(of="scores"),
    ), share_q=(0, -2), dense=(2, 2)),
    "every_learn": ValueMode((
        Residual(learn="sources"), Residual(learn="lerp"), Residual(learn="unit"), Residual(learn="softmax"),
        Residual(learn="head"), Residual(learn="relu", lam=(1.0, 2.0)),
        Residual(learn="sigmoid", lam=(1.0, 2.0), source="token"),
    )),
    "every_place": ValueMode((
        Residual(of="hidden", source="prev"), Residual(map="cross"), Residual(of="probs", source="all"),
        Residual(map="identity", source="prev"), Residual(map="delta", subtract="projected"),
    ), kv_group=2, cut_first=True),
}  # fmt: skip


def config(mode="vanilla", **kw):
    """A model small enough for float64 on two cores: 4 layers, 8 heads of 4, 61 tokens of vocabulary."""
    return ModelConfig(
        **dict(vocab_size=61, block_size=32, n_layer=4, n_head=8, n_embd=32, value_mode=MODES.get(mode, mode)) | kw
    )


def kind(value):
    """A value of a field, with all tuples counted as one value, and all numbers other than 0 and 1."""
    if isinstance(value, tuple) or (type(value) in (int, float) and value not in (0, 1)):
        return type(value).__name__
    return value


def axis_values(mode):
    """Every field of a mode with its value, so a new field joins by itself; and pairs that meet in the code."""
    found = set()
    for part in (mode, *mode.residuals):
        found |= {(name, kind(value)) for name, value in vars(part).items() if name != "name"}
    for r in mode.residuals:
        found |= {(r.of, r.map), (r.learn, kind(r.source)), (r.of, kind(r.source))}
        found.add((r.of, len(mode.residuals) > 1, mode.share_v != "each"))
    return found


def branches(mode):
    """The fields that model.py reads, with their values. It leaves sharing and the choice of layers to the plan."""
    planned = {"name", "residuals", "kv_group", "borrow_v", "source", "layers", "tables", "lam"}
    found = {("token", any(r.source == "token" for r in mode.residuals))}
    for part in (mode, *mode.residuals):
        for name, value in vars(part).items():
            if name.startswith("share"):
                found.add((name, value != "each"))
            elif name not in planned:
                found.add((name, kind(value)))
    return found


def cover(modes, values):
    """A small set of modes that has every value of every axis (greedy): enough for slow tests. A new row with a new
    value enters by itself."""
    missing = set().union(*map(values, modes.values()))
    chosen = ["vanilla"]
    while missing := missing - set().union(*(values(modes[name]) for name in chosen)):
        chosen.append(max(modes, key=lambda name: len(values(modes[name]) & missing)))
    return chosen


COVER = cover(MODES, axis_values)
COMPILED = cover(MODES, branches)  # for tests that trace a graph, which takes seconds


def same(a, b, case="", rtol=0, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{case}: {text}")


def fits(mode, **shape):
    """Whether a mode takes so many layers or heads: half of one head is none."""
    try:
        config(mode, **shape)
    except ValueError:
        return False
    return True


def fewest_layers(mode):
    """2, a layer that gives and one that takes, or 4 where the mode names more."""
    return 2 if fits(mode, n_layer=2) else 4


def widths(*modes):
    """(mode, n_kv_head): 4 key and value heads of 8 in every mode that takes them; 8 and 1 too in COVER's."""
    found = []
    for mode in modes:
        numbers = [n for n in ((8, 4, 1) if mode in COVER else (4,)) if fits(mode, n_kv_head=n)]
        found += [(mode, n) for n in numbers or [0]]
    return found


def tiny(mode="vanilla", seed=0, std=0.2, attn="sdpa", **kw):
    """A float64 model whose weights are large enough that nothing hides in rounding, and nothing is at its init."""
    model = GPT(config(mode, init_std=std, **kw), seed=seed, attn=attn).double().eval()
    g = torch.Generator().manual_seed(seed + 1)
    for name, p in model.named_parameters():
        if p.ndim == 1 or "gates" in name or not p.any():
            p.data += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return model


def tokens(shape, vocab=61, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes while this is active."""

    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


def finished(command, timeout=800, **kw):
    """The completed process of a command, with stdout and stderr as text. Past the time limit it is killed with all the
    processes that it has started: one that is left would keep the pipes open, and with them whoever reads to their end.
    """
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    with subprocess.Popen(command, start_new_session=True, **pipes, **kw) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def script(*words, cwd=None, env=None, **kw):
    """Run one of our scripts; the completed process, with stdout and stderr as text."""
    env = os.environ | (env or {})
    return finished([sys.executable, str(ROOT / words[0]), *map(str, words[1:])], cwd=cwd or ROOT, env=env, **kw)


def in_process(module, *words, cwd=None):
    """`python <module>.py …` in this process: what `script` returns, without the seconds to import torch."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in names}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or os.getcwd()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module.__file__, *map(str, words)])
            try:
                run(module.main, module.__doc__)
            except SystemExit as e:
                code = e.code
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


class InThisProcess(contextlib.nullcontext):
    """Stands in for prepare.py's ProcessPoolExecutor, without the seconds to start processes."""

    def __init__(self, *_):
        import prepare

        super().__init__(self)
        prepare.load_tokenizer.cache_clear()

    def map(self, function, *lists):
        return map(function, *lists)

    def shutdown(self, cancel_futures):
        self.is_cancelled = cancel_futures


def refused(result, *fragments):
    """Assert that a run ended as bad input should: exit code 2, one line on stderr that holds all fragments."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    for fragment in fragments:
        assert fragment in lines[0], (fragment, lines[0])


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not there")


def byte_tokenizer(pattern=r"[\s\S]"):
    """One token per byte, and end-of-text as 256. Another pattern encodes alike, but is another tokenizer."""
    from common.data import Tokenizer

    ranks = [[base64.b64encode(bytes([i])).decode(), i] for i in range(256)]
    special = {"<|endoftext|>": 256}
    return Tokenizer(dict(name="bytes", pattern=pattern, ranks=ranks, special=special, normalize=None, n_vocab=257))


def gpt2_json(folder):
    """GPT-2's tokenizer.json, which we make of the two files that OpenAI published."""
    import tokenizers as hf

    there = SHARED / "data/tokenizers/gpt2"
    made = hf.Tokenizer(hf.models.BPE.from_file(str(there / "encoder.json"), str(there / "vocab.bpe")))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "gpt2.json"))
    return folder / "gpt2.json"


def make_data(folder, sizes=None, mixture=None, seed=0, tokenizer=None, n_val=3_000):
    """A data folder as prepare.py makes it, of letters in a learnable order; sizes: {domain: train tokens}."""
    from common.data import MANIFEST
    from common.files import sha256, write_record

    tokenizer, splits, rng = tokenizer or byte_tokenizer(), {"train": {}, "val": {}}, np.random.default_rng(seed)
    sizes = sizes or {"prose": 30_000, "code": 20_000}
    for d, (domain, size) in enumerate(sizes.items()):
        for split, n in (("train", size), ("val", n_val)):
            ids = np.cumsum(rng.choice([1, 1, 1, 2], n)) % 20 + 97 + d  # mostly the next letter, a to t
            ids[99::100] = tokenizer.start
            file = folder / split / f"{domain}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            ids.astype("<u2").tofile(file)
            about = dict(file=f"{split}/{domain}.bin", tokens=n, documents=n // 100, bytes=n - n // 100)
            splits[split][domain] = about | {"sha256": sha256(file)}
    tokenizer.save(folder / "tokenizer.json")
    about = dict(name=tokenizer.name, hash=tokenizer.hash, n_vocab=tokenizer.n_vocab)
    mixture = mixture or {d: size / sum(sizes.values()) for d, size in sizes.items()}
    write_record(folder / "manifest.json", MANIFEST, dict(tokenizer=about, mixture=mixture, splits=splits))
    return folder


def hf_folder(folder, model, **changes):
    """Write our model as a Hugging Face folder; a change to None takes a field out."""
    from hf.layout import FIELDS, named_tensors

    folder.mkdir(exist_ok=True)
    c = {theirs: getattr(model.cfg, ours) for ours, theirs in FIELDS.items()}
    c |= dict(model_type="llama", bos_token_id=3, eos_token_id=3) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in c.items() if v is not None}))
    parts = {name: tensor.clone() for name, tensor in named_tensors(model, "llama").items()}
    save_file(parts, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))
