"""Bad input of every kind, tried in one process: `make fuzz`, or

    python tests/fuzz.py                          30,000 inputs, a table, results/fuzz.json
    python tests/fuzz.py --only=manifest --first=17 --inputs=1        one input again, by its number

docs/reliability.md says what counts as a failure. Input i of a class follows from (class, i) alone; `Accepted` says how
an accepted one is proved right. tests/test_fuzz.py tries the first of each class.
"""

import contextlib
import copy
import dataclasses
import io
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
import types
import typing
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import conftest  # noqa: F401 - puts the repository on sys.path
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import analyze
import bench.decoding
import bench.training
import checkpoint
import configurator
import data
import eval as evaluate
import export
import hf
import oldconfig
import oldfiles as files
import plot
import prepare
import reading
import sample
import tasks
import train
from data import Corpus, Tokenizer
from model import GPT
from oldconfig import UserError, load_settings, require, setting
from report import markdown
from runtime import environment
from sample import KVCache
from value_modes import VALUE_MODES, ModelConfig, Residual, ValueMode, kv_floats_per_token, plan_layers

INPUTS = {  # of a class, of 30,000
    "flags": 4000,
    "config files": 1000,
    "modes and shapes": 4000,
    "manifest.json": 3000,
    "tokenizer.json": 3000,
    "token files": 1000,
    "weights": 3000,
    "training state": 2000,
    "metrics.jsonl": 2000,
    "results": 2500,
    "task files": 2000,
    "texts": 1500,
    "progress.json": 500,
    "Hugging Face": 500,
}


class Wrong(AssertionError):
    """Something wrong was accepted."""


def demand(ok, what):
    if not ok:
        raise Wrong(what)


# ---- values and damages


WORDS = ["", "x", "0", "1", "-1", "3", "7", "1e3", "0.5", "1e999", "-1e400", "nan", "inf", "1e-320", "9" * 400]
WORDS += ["true", "false", "none", "None", "(1,2)", "(0,-1)", "[1]", "{'code': 1}", "{'code': 'x'}", "{1: 1}", "(("]
WORDS += ["a\0b", "a\nb", "é", "\udc80", "../..", "svformer", "neutreno_0.6", "gpt2", "bfloat16", "cuda", "16", "4096"]
VALUES = [None, True, False, 0, -1, 1, 2, 0.5, 2**31, 2**63, 10**400, 1e308, -1e308, math.nan, math.inf, "", "x", "7"]
VALUES += ["a\0b", "\udc80", [], [[]], [1, 2], ["x"], {}, {"x": 1}, [[[[[[[[]]]]]]]]]
TEXTS = ["", "{", "[]", "null", "7", '"x"', "[" * 100_000, '{"a":' * 50_000, "\ufeff{}", "NaN", "{} {}", "{'a': 1}"]


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 20)):
            found += places(value[i], (*path, i))
    return found


def mutated(value, rng):
    """A JSON object with one or two of its values changed, taken out, renamed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice(places(value))
        if not path:
            if rng.random() < 0.7:
                value[rng.choice(["x", "", "format", "sha256"])] = rng.choice(VALUES)
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        key, old = path[-1], parent[path[-1]]
        kind = rng.random()
        if kind < 0.15:
            del parent[key]
        elif kind < 0.25 and isinstance(parent, dict):
            parent[str(key) + "x"] = parent.pop(key)
        elif kind < 0.45 and isinstance(old, (int, float)) and not isinstance(old, bool) and abs(old) < 1e300:
            parent[key] = rng.choice((old + 1, old - 1, -old, old * 1000, old + 0.5, str(old)))
        elif kind < 0.55 and isinstance(old, str):
            parent[key] = rng.choice((old[:-1], old + "x", old.upper(), old * 2))
        else:
            parent[key] = rng.choice(VALUES)
    return value


def damaged(content, rng):
    """Bytes with one damage: a flipped bit, a cut, something more, a hole, or other content."""
    kind = rng.random()
    at = rng.randrange(len(content))
    if kind < 0.6:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind < 0.75:
        return content[:at]
    if kind < 0.85:
        return content + rng.randbytes(rng.choice((1, 2, 100)))
    if kind < 0.95:
        return content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    return rng.choice(TEXTS).encode("utf-8", "replace")


def damaged_json(path, rng):
    """Damage a JSON file; returns whether it has the original's checksum, but other content."""
    before = path.read_text()
    if rng.random() < 0.3:
        path.write_bytes(damaged(before.encode(), rng))
    else:
        value = mutated(json.loads(before), rng)
        if rng.random() < 0.7 and isinstance(value, dict):
            value = files.sealed(value)
        path.write_text(json.dumps(value))
    try:
        value = files.parse_object(path.read_bytes(), {}, path)
    except UserError:
        return True
    right = json.loads(before)
    return value.get("sha256") == right["sha256"] and value != right


def fits(value, hint):
    """Whether a value is of a type: a second opinion on oldconfig.convert."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        return type(value) is tuple and all(fits(v, args[0]) for v in value)
    if origin is dict:
        return type(value) is dict and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if hint is float:
        return type(value) is float and math.isfinite(value)
    if origin is typing.Annotated:
        return fits(value, args[0]) and args[1][0] <= value <= args[1][1]
    if isinstance(hint, dict):
        return type(value) is dict and all(fits(value.get(name), of) for name, of in hint.items())
    if dataclasses.is_dataclass(hint):
        return type(value) is hint and check_fields(value) is None
    return type(value) is (origin or hint)


def check_record(record, schema):
    """Demand that a dict has the fields of a schema, each of its type."""
    for name, hint in schema.items():
        demand(fits(record.get(name), hint), f"{name}={record.get(name)!r} as {hint}")


def check_fields(record):
    """Demand that each field of a dataclass has its type and lies in its range."""
    hints = typing.get_type_hints(type(record))
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        demand(fits(value, hints[f.name]), f"{f.name}={value!r} as {hints[f.name]}")
        least, most = f.metadata.get("least"), f.metadata.get("most")
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                demand(least is None or number >= least, f"{f.name}={number} below {least}")
                demand(most is None or number <= most, f"{f.name}={number} above {most}")


# ---- what is damaged: one small run of everything


class World:
    """A folder with data, a run, its results and a Hugging Face folder, made once. `restore` undoes a damage."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.data = conftest.make_data(self.folder / "data", {"prose": 4000, "code": 3000})
        self.run = self.folder / "run"
        shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_tokens=64, micro_batch=2, warmup_steps=1)
        shape |= dict(max_steps=3, eval_every=3, save_every=3, eval_tokens=64, value_mode="resformer_learned")
        self.words = [f"--{key}={value}" for key, value in shape.items()]
        self.words += [f"--data_dir={self.data}", f"--out_dir={self.run}", "--dtype=float32"]
        self.call(train, *self.words)
        rows = {"piqa": [dict(goal=f"g{i}", sol1="a", sol2="bc", label=i % 2) for i in range(3)]}
        (self.folder / "evals").mkdir()
        (self.folder / "evals/piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["piqa"]))
        self.call(evaluate, self.run, "--task=piqa,loss", f"--data_dir={self.folder / 'evals'}")
        self.call(analyze, self.run, "--chunks=2")
        self.weights = checkpoint.find(self.run)
        self.state = checkpoint.state_file(self.weights)
        self.header = checkpoint.read_header(self.weights)
        self.tensors = load_file(self.state)
        self.hf = self.folder / "hf"
        self.make_hf()
        self.exported = self.folder / "exported"
        self.call(export, self.run, f"--out_dir={self.exported}", "--check=false")
        self.originals = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def call(self, module, *words):
        result = conftest.in_process(module, *words)
        assert result.returncode == 0, result.stderr

    def make_hf(self):
        self.hf.mkdir()
        model = GPT(ModelConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16))
        config = {theirs: getattr(model.cfg, ours) for ours, theirs in hf.FIELDS.items()}
        config |= {"model_type": "llama", "num_key_value_heads": 2, "rope_theta": 1e4, "tie_word_embeddings": False}
        (self.hf / "config.json").write_text(json.dumps(config | {"hidden_act": "silu", "rope_scaling": None}))
        tensors = {name: parameter.detach()[rows].clone() for name, parameter, rows in hf.hf_parts(model)}
        save_file(tensors, self.hf / "model.safetensors")

    def restore(self):
        for path, content in self.originals.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)


# ---- classes of input: each makes one from a random generator, tries it, and proves what is accepted


STAGES = (train.TrainConfig, sample.SampleConfig, evaluate.EvalConfig, analyze.AnalyzeConfig, plot.PlotConfig)
STAGES += (prepare.PrepareConfig, ModelConfig)
STAGES += (export.ExportConfig, bench.training.TrainingConfig, bench.decoding.DecodingConfig)


def try_flags(rng, world):
    cls = rng.choice(STAGES)
    names = [f.name for f in dataclasses.fields(cls)]
    words = []
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(names)
        if rng.random() < 0.1:
            name = name[:-1] or "x"
        value = rng.choice(WORDS)
        words += rng.choice(([f"--{name}={value}"], [f"--{name}", value], [f"--{name}"], [value]))
    words = [word for word in words if word not in ("-h", "--help") and not word.endswith(".py")]
    check_fields(load_settings(cls, words))


def try_config_files(rng, world):
    cls = rng.choice(STAGES)
    names = [f.name for f in dataclasses.fields(cls)] + ["x", "_x"]
    right = ["1", "'x'", "(1, 2)", "{'code': 1.0}", "True", "None", "float('nan')", "10**400", "lambda: 1", "1 / 0"]
    lines = [f"{rng.choice(names)} = {rng.choice(right)}\n" for _ in range(rng.randint(1, 4))]
    text = "".join(lines) if rng.random() < 0.9 else rng.choice(TEXTS)
    path = world.folder / "config.py"
    path.write_text(text, encoding="utf-8")
    check_fields(load_settings(cls, [str(path)]))


def random_residual(rng):
    axes = {f.name: typing.get_type_hints(Residual)[f.name] for f in dataclasses.fields(Residual)}
    kw = {}
    for name in rng.sample(sorted(axes), rng.randint(0, 4)):
        literal = [a for a in (axes[name], *typing.get_args(axes[name])) if typing.get_origin(a) is typing.Literal]
        choices = list(typing.get_args(literal[0])) if literal else []
        choices += {"source": [0, 1, 5, -1, 2**40], "lam": [None, (1.0, 2.0), (1, 1, 1), (math.inf, 0)]}.get(name, [])
        choices += {"layers": ["-1:", "::2", "x", (0,), (1, -1), (0.5,), (9,), (1e300,), (2**70,)]}.get(name, [])
        kw[name] = rng.choice([*choices * 3, *VALUES])
    return Residual(**kw)


def try_modes(rng, world):
    shares = [1, 1, 0, 2, 3, (0,), (0, 1), (0, -1), (0, 0.5), (1,), (), -1, 10**9, (0, 10**9), 0.5, "x", None]
    shares += [0.5, 0.01, 1.5, -0.5, "keys"]
    others = {"dense": [(1, 1), (2, 2), (0, 1)], "kv_group": [2, 0], "borrow_v": ["first"], "cut_first": [True, False]}
    others |= {"first_heads": [0.5, 0.25, 0.3, 1.0], "output": ["exclusive", "gate", "gate_heads"], "name": ["x", ""]}
    kw = {f"share_{t}": rng.choice(shares) for t in "qkv" if rng.random() < 0.3}
    kw["residuals"] = tuple(random_residual(rng) for _ in range(rng.choice((0, 1, 1, 2))))
    for name in others:
        if rng.random() < 0.05:
            kw[name] = rng.choice([*others[name] * 5, *VALUES])
    mode = ValueMode(**kw) if rng.random() < 0.8 else rng.choice([*VALUE_MODES, *WORDS])
    shape = dict(vocab_size=61, block_size=16, n_layer=4, n_head=4, n_embd=16)
    sizes = [1, 2, 3, 5, 8, 0, -1, 2**31, 10**8, 10**400, 0.5, math.nan, "x", None]
    for name in rng.sample([*shape, "n_kv_head", "n_hidden", "arch"], rng.choice((0, 0, 1, 2))):
        shape[name] = rng.choice(sizes + ["gpt2"])
    for name, numbers in dict(rope_theta=[1e6, 0, -1], norm_eps=[0.1, -1], init_std=[0.0, 5, -1]).items():
        if rng.random() < 0.05:
            shape[name] = rng.choice([*numbers, *VALUES])
    cfg = ModelConfig(**shape, value_mode=mode)
    check_fields(cfg)
    plan_layers(cfg)
    again = oldconfig.convert(json.loads(json.dumps(dataclasses.asdict(cfg))), ModelConfig, "JSON")
    demand(again == cfg, "another config after JSON")
    is_small = cfg.vocab_size <= 100 and cfg.n_layer <= 8 and cfg.n_embd <= 64 and 4 <= cfg.block_size <= 64
    if is_small and cfg.n_hidden <= 256:
        prove_model(GPT(dataclasses.replace(cfg, init_std=min(cfg.init_std, 0.2))).double().eval())


@torch.inference_mode()
def prove_model(model):
    """Cached decoding equals the full forward; the cache has the plan's bytes; no output depends on later tokens."""
    idx = torch.arange(8).view(2, 4) % model.cfg.vocab_size
    full = model(idx)[0]
    if not full.isfinite().all():  # weights of 1e308 overflow rightly
        return
    cache = KVCache(model.cfg, 2, 4, dtype=torch.float64)
    parts = [model(idx[:, :3], cache=cache)[0], model(idx[:, 3:], cache=cache)[0]]
    size = full.abs().max().item()
    demand((torch.cat(parts, dim=1) - full).abs().max().item() <= 1e-9 * max(1.0, size), "cached decoding differs")
    demand(cache.nbytes == 2 * 4 * 8 * kv_floats_per_token(model.cfg), "the cache has other bytes than the plan")
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1) % model.cfg.vocab_size
    demand(torch.equal(model(other)[0][:, :-1], full[:, :-1]), "an output depends on a later token")


def prove_corpus(corpus, world):
    """Batches are ids of the vocabulary; weights are a distribution."""
    check_record(corpus.manifest, data.MANIFEST)
    demand(abs(sum(corpus.mixture.values()) - 1) < 1e-9, "weights do not sum to 1")
    for step in range(2):
        x, y = corpus.batch(step, 4)
        demand(max(x.max(), y.max()) < corpus.tokenizer.n_vocab, "an id beyond the vocabulary")


def try_manifest(rng, world):
    is_altered = damaged_json(world.data / "manifest.json", rng)
    corpus = Corpus(world.data, 16, verify=rng.random() < 0.5)
    demand(not is_altered, "an altered manifest.json")
    prove_corpus(corpus, world)


def try_tokenizer(rng, world):
    path = world.data / "tokenizer.json"
    is_altered = damaged_json(path, rng)
    tokenizer = Tokenizer.load(path)
    demand(not is_altered, "an altered tokenizer.json")
    check_record(tokenizer.spec, data.VOCABULARY)
    for text in ("plain text", "Ünïcödé 漢字 \t\n<|endoftext|>"):
        ids = tokenizer.encode(text)
        demand(all(0 <= i < tokenizer.n_vocab for i in ids), "an id beyond the vocabulary")
        tokenizer.decode([*ids, tokenizer.eot])
    demand(len(tokenizer.token_bytes()) == tokenizer.n_vocab, "bytes of another number of tokens")


def try_token_files(rng, world):
    path = world.data / rng.choice(("train/prose.bin", "train/code.bin", "val/code.bin"))
    before = path.read_bytes()
    path.write_bytes(damaged(before, rng))
    verify = rng.random() < 0.5
    corpus = Corpus(world.data, 16, verify=verify)
    demand(not verify or path.read_bytes() == before, f"an altered {path.name}")
    if rng.random() < 0.3:  # cut while it is read
        path.write_bytes(before[: rng.randrange(len(before))])
    for step in range(6):
        demand(corpus.batch(step, 8)[0].max() < corpus.tokenizer.n_vocab, "an id beyond the vocabulary")
    for domain in corpus.domains:
        x, _ = corpus.val_batch(domain, 0, corpus.windows("val", domain))
        demand(x.max() < corpus.tokenizer.n_vocab, "an id beyond the vocabulary")


def rewrite(path, rng):
    """Change a safetensors file through its library: its metadata, or its tensors' names, types, shapes or numbers.
    Returns whether its checksums are still those of the original; else they are right, or missing as in old files."""
    about = json.loads(files.read_tensors(path, lambda f: f.metadata())["nanoresformer"])
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor, kind = tensors[name], rng.random()
    if kind < 0.4:
        about = mutated(about, rng)
    elif kind < 0.5:
        del tensors[name]
    elif kind < 0.6:
        tensors[name + "x"] = tensors.pop(name)
    elif kind < 0.7:
        tensors[name] = tensor.to(rng.choice((torch.int8, torch.int64, torch.bool, torch.bfloat16, torch.float64)))
    elif kind < 0.8:
        tensors[name] = rng.choice((tensor.flatten(), tensor[None], tensor.flatten()[:-1].clone(), torch.zeros(0)))
    else:
        flat = tensor.clone().flatten()
        flat[0] = rng.choice((math.nan, math.inf, -math.inf, 3.0)) if flat.is_floating_point() else 7
        tensors[name] = flat.view(tensor.shape)
    kind = rng.random()
    if kind < 0.5:
        about = files.sealed(about | {"tensors": checkpoint.checksum(tensors)})
    elif kind < 0.7:
        about = {key: value for key, value in about.items() if key not in ("tensors", "sha256")}
    save_file(tensors, path, metadata={"nanoresformer": json.dumps(about)})
    return kind >= 0.7 and "sha256" in about  # without it, it passes for an old file


def damage_checkpoint(path, rng):
    """Damage a checkpoint's file; returns whether its checksums are those of the original."""
    if rng.random() < 0.5:
        return rewrite(path, rng)
    path.write_bytes(damaged(path.read_bytes(), rng))
    return True


def try_weights(rng, world):
    before = load_file(world.weights)
    is_foreign = damage_checkpoint(world.weights, rng)
    model = checkpoint.load(world.weights)
    header = checkpoint.read_header(world.weights)
    if is_foreign:
        demand(header == world.header, "an altered header")
        state = model.state_dict()
        demand(all(torch.equal(state[name], tensor) for name, tensor in before.items()), "altered weights")
    check_record(header, checkpoint.HEADER)
    logits = model(torch.arange(8)[None])[0]
    demand(logits.isfinite().all(), "logits that are not finite")


def try_state(rng, world):
    is_foreign = damage_checkpoint(world.state, rng)
    cfg = load_settings(train.TrainConfig, world.words)
    model = GPT(cfg.model_config(257))
    optimizer = train.adamw(model, 1e-3, 0.1, (0.9, 0.95), "cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    checkpoint.resume(world.weights, model, optimizer, scaler, world.header["tokenizer"])
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        if is_foreign:
            same = all(torch.equal(tensor, world.tensors[f"{key}/{name}"]) for key, tensor in state.items())
            demand(same, "an altered training state")
        demand(state.keys() == {"step", "exp_avg", "exp_avg_sq"}, "an incomplete optimizer state")
        demand(state["exp_avg"].shape == state["exp_avg_sq"].shape == p.shape, "another shape")
        demand(all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in state.values()), "numbers")


def damage_lines(path, rng):
    """Damage a JSON-lines file."""
    lines = path.read_text().splitlines()
    i, kind = rng.randrange(len(lines)), rng.random()
    if kind < 0.3:
        path.write_bytes(damaged(path.read_bytes(), rng))
        return
    if kind < 0.6:
        lines[i] = json.dumps(mutated(json.loads(lines[i]), rng))
    elif kind < 0.8:
        lines[i] = rng.choice(TEXTS).replace("\n", "")
    elif kind < 0.9:
        del lines[i]
    else:
        rng.shuffle(lines)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def try_metrics(rng, world):
    damage_lines(world.run / "metrics.jsonl", rng)
    run = plot.read_run(world.run)
    check_record(run.start, plot.METRICS["start"])
    demand(all(np.isfinite(numbers).all() for numbers in run.steps.values()), "numbers that are not finite")


def read_arrays(path):
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except Exception as e:  # zipfile and zlib raise many kinds
        raise UserError(f"{path} is missing or damaged ({e})") from None


def try_results(rng, world):
    name = rng.choice(("eval.json", "analysis.json", "analysis.npz", "config.json"))
    path = world.run / name
    if name == "analysis.npz":
        right = read_arrays(path)
        path.write_bytes(damaged(path.read_bytes(), rng))
        found = read_arrays(path)
        demand(all(np.array_equal(found.get(key), right[key]) for key in right), "altered arrays")
        return
    if rng.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), rng))
    else:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), rng)))
    if name == "eval.json":
        for task, result in plot.read_eval(world.run)["results"].items():
            scores = {name: float | None for name in plot.SCORES if name in result}
            check_record(result, plot.LOSSES if task.startswith("loss") else scores)
        evaluate.read_results(world.run)
    elif name == "analysis.json":
        check_record(plot.read_analysis(world.run), plot.ANALYSED)
    else:
        checkpoint.trained_on(world.run, "", "data")


TASK_ROWS = {
    "hellaswag": dict(activity_label="How to fly", ctx_a="a [title]", ctx_b="then", endings=["x", "y"], label="1"),
    "piqa": dict(goal="open it", sol1="push", sol2="pull hard", label=1),
    "arc_easy": dict(question="What?", choices={"text": ["sand", "rain"], "label": ["A", "B"]}, answerKey="B"),
    "openbookqa": dict(question_stem="rain is", choices={"text": ["a", "b"], "label": ["A", "B"]}, answerKey="A"),
    "winogrande": dict(sentence="Ann paid because _ owed.", option1="Ann", option2="Bea", answer="1"),
    "lambada": dict(text="he came, he saw, he left"),
}


def try_task_files(rng, world):
    name = rng.choice(list(TASK_ROWS))
    folder = world.folder / "evals"
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(TASK_ROWS[name]) + "\n" for _ in range(3)))
    damage_lines(path, rng)
    asked, _ = tasks.questions(name, types.SimpleNamespace(data_dir=str(folder), limit=0))
    documents = tasks.requests_of(name, asked, Tokenizer.load(world.data / "tokenizer.json"), 64)
    for question, rows in zip(asked, documents, strict=True):
        texts = (*question.contexts, *question.choices)
        demand(all(isinstance(text, str) for text in texts) and all(question.choices), "a choice that is no text")
        demand(0 <= question.gold < len(question.choices) == len(rows), "a label that is no choice")
        demand(all(0 < row.n_scored <= len(row.ids) <= 65 for row in rows), "rows of another length")


def try_texts(rng, world):
    """Raw items of every source become documents of text, or ValueError, which prepare.py reports with the place."""
    cfg = load_settings(prepare.PrepareConfig, ["files", "--input_dir=x"])
    row = {"text": rng.choice(["plain", "Ünïcödé", "", 7, None]), "meta": {"redpajama_set_name": "RedPajamaC4"}}
    kind = rng.choice((".txt", ".jsonl", ".py", "slimpajama"))
    source = reading.Input(f"a{kind}", 1, "train", None if kind == "slimpajama" else "d", world.folder / f"a{kind}")
    raw = json.dumps(mutated(row, rng)).encode()
    if rng.random() < 0.5:
        raw = damaged(raw, rng)
    if kind == ".py":
        code = b'"""Doc."""\ndef f(x):\n    "inner"\n    return x\n'
        source.path.write_bytes(damaged(code, rng))
        raw = source.path
    try:
        found = reading.to_documents(source, raw, cfg)
    except (ValueError, RecursionError) as e:  # prepare.encode_batch catches these two
        raise UserError(str(e) or type(e).__name__) from None
    for domain, text in found:
        demand(isinstance(domain, str) and isinstance(text, str) and text, "a document that is no text")


def try_progress(rng, world):
    out = world.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    cfg = load_settings(prepare.PrepareConfig, ["files", f"--input_dir={world.folder}", f"--out_dir={out}"])
    state = prepare.open_output(cfg, [])
    state["splits"]["train"]["d"] = dict(file="train/d.bin", tokens=3, documents=1, bytes=2)
    path = out / "progress.json"
    files.write_record(path, state)
    is_altered = damaged_json(path, rng)
    state = prepare.open_output(cfg, [])
    demand(not is_altered, "an altered progress.json")
    check_record(state, prepare.PROGRESS)


def try_hugging_face(rng, world):
    folder, vocab_size = rng.choice(((world.hf, 61), (world.exported, 257)))
    config = json.loads((folder / "config.json").read_text())
    if rng.random() < 0.7:
        (folder / "config.json").write_text(json.dumps(mutated(config, rng)))
    else:
        path = folder / rng.choice(("config.json", "model.safetensors"))
        path.write_bytes(damaged(path.read_bytes(), rng))
    model = checkpoint.load(checkpoint.find(folder))
    check_fields(model.cfg)
    demand(model.cfg.block_size < 16 or model(torch.arange(4)[None])[0].shape == (1, 4, vocab_size), "other logits")
    if folder == world.exported:
        tokenizer = checkpoint.load_tokenizer(checkpoint.find(folder))
        demand(
            isinstance(tokenizer.eot, int) and tokenizer.decode(tokenizer.encode("abc")) == "abc", "another tokenizer"
        )


CLASSES = dict(
    zip(
        INPUTS,
        (try_flags, try_config_files, try_modes, try_manifest, try_tokenizer, try_token_files, try_weights, try_state)
        + (try_metrics, try_results, try_task_files, try_texts, try_progress, try_hugging_face),
        strict=True,
    )
)


# ---- trying


class Hang(BaseException):
    pass


def on_alarm(number, frame):
    raise Hang


def outcome(kind, number, world):
    """ "rejected", "accepted", or what went wrong, of input `number` of a class."""
    rng = random.Random(f"{kind}/{number}")
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 5)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            CLASSES[kind](rng, world)
    except Wrong as e:
        return f"silent: {e}"
    except UserError as e:
        return "rejected" if str(e).strip() else "an empty sentence"
    except ValueError as e:
        # of dataclasses that a program makes; load_settings turns them into UserErrors
        return "rejected" if kind == "modes and shapes" and str(e).strip() else f"traceback: {e!r}"
    except Hang:
        return "hang"
    except BaseException as e:
        return f"traceback: {type(e).__name__}: {e}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        world.restore()
    return "accepted"


def campaign(numbers):
    """({class: Counter of outcomes}, a line on each failure) of inputs {class: range}."""
    found, failures = {}, []
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder)
        for kind, tried in numbers.items():
            found[kind] = Counter()
            for number in tried:
                result = outcome(kind, number, world)
                found[kind][result.partition(":")[0]] += 1
                if result not in OUTCOMES[:2]:
                    again = f"python tests/fuzz.py --only='{kind}' --first={number} --inputs=1"
                    failures.append(f"{kind}: {result}; again: {again}")
    return found, failures


OUTCOMES = ("rejected", "accepted", "traceback", "hang", "silent", "an empty sentence")


@dataclasses.dataclass(frozen=True)
class FuzzConfig:
    """Every setting of fuzz.py."""

    only: str = setting("", "one class of input; empty = all")
    first: int = setting(0, "number of the first input of each class", least=0)
    inputs: int = setting(0, "inputs of each class; 0 = 30,000 in all", least=0)
    out_file: str = setting("", "JSON file for the counts")


def main(cfg: FuzzConfig):
    began = time.monotonic()
    numbers = {}
    for kind, n in INPUTS.items():
        if cfg.only in ("", kind):
            numbers[kind] = range(cfg.first, cfg.first + (cfg.inputs or n))
    require(numbers, f"only={cfg.only!r} is none of {', '.join(INPUTS)}")
    found, failures = campaign(numbers)
    print(*failures, sep="\n")
    counts = {kind: {"tried": of.total(), **{name: of[name] for name in OUTCOMES}} for kind, of in found.items()}
    print(markdown(["input", "tried", *OUTCOMES], [[kind, *of.values()] for kind, of in counts.items()]))
    if cfg.out_file:
        seconds = round(time.monotonic() - began)
        files.write_json(cfg.out_file, {"counts": counts, "seconds": seconds, "environment": environment()})
    tried = sum(of["tried"] for of in counts.values())
    print(f"{tried:,} inputs, {len(failures)} failures")
    if failures:
        raise UserError(f"{len(failures)} of {tried} inputs ended neither rejected nor proved right")


if __name__ == "__main__":
    oldconfig.run_main(main, configurator.command_line(FuzzConfig, __doc__))
