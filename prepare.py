"""Text to tokens: read documents, train or load a tokenizer, write one uint16 file per domain and split.

    python prepare.py pysource --tokens=8e6                      # Python code and docstrings of this environment
    python prepare.py slimpajama --input_dir=/data/SlimPajama --tokenizer_file=tokenizer.json
    python prepare.py slimpajama --hub_id=DKYoon/SlimPajama-6B --tokens=5e9
    python prepare.py files --input_dir=texts                    # .txt, .jsonl, .jsonl.zst, .parquet, recursively

`pysource` needs no network: the standard library and the installed packages, domains stdlib, torch, sympy, numpy,
networkx, pandas, matplotlib, packages (all others) and prose (the docstrings, which the code is then without). Left
out: the standard library's own tests, which many systems do not install; vendored copies and exact duplicates, which
would put one text into both train and val; files over 1 MB, which are generated tables.
`slimpajama` keeps the documents' seven sets as domains. `files` takes as domain the first folder below input_dir; a
.txt file is cut at line ends into documents of about 64 KB.
Stop it at any time, even with kill -9: the same command goes on, and the result is the same to the byte. The layout
of the result is described in data.py.
"""

import ast
import base64
import gc
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import warnings
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from configurator import UserError, command_line, need, run_main, setting
from data import EOT, Tokenizer, check_file
from files import read_json, sha256, write_json

SAVE_S = 4  # seconds of work that a kill can lose
BATCH = 2**20  # bytes of raw text that a worker gets at a time
TEXT = 2**16  # bytes of a .txt file that make a document
HELD = 2**27  # tokens held in memory before they are written
SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
PAPER_MIXTURE = dict(CommonCrawl=0.5, C4=0.2, Github=0.1, Book=0.05, ArXiv=0.05, Wikipedia=0.05, StackExchange=0.05)
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
# GPT-2's, but for the last two alternatives, `\s+(?!\S)|\s+` there. These match the same up to 99,999 characters: the
# regex engine's stack overflows in a million of whitespace.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|(?:\s(?!\S)){1,99999}|\s"


@dataclass
class PrepareConfig:
    source: Literal["pysource", "slimpajama", "files"] = setting("pysource", "what to read", positional=True)
    out_dir: str = setting("", "where the result goes; data/<source> if empty")
    input_dir: str = setting("", "folder to read: of texts for files, in SlimPajama's layout for slimpajama")
    hub_id: str = setting("cerebras/SlimPajama-627B", "data set on the hub, for slimpajama without input_dir")
    revision: str = setting("", "commit of the hub's data set; give one to be able to get the same data again")
    tokenizer: str = setting("", "bpe:<vocabulary size>, gpt2 or neox; if empty bpe:4096, or neox for slimpajama")
    tokenizer_file: str = setting("", "neox: a tokenizer.json; gpt2: a folder with encoder.json and vocab.bpe")
    text_field: str = setting("text", "column of .jsonl and .parquet files that holds the text")
    tokens: int | None = setting(None, "train tokens over all domains, 0 for all there is; 20e9 for slimpajama")
    val_tokens: int = setting(0, "validation tokens per domain, 0 for all there is")
    val_fraction: float = setting(
        0.05, "share of documents held out (one in round(1 / share)) where the source has no validation split"
    )
    mixture: dict = setting({}, "domain: weight; splits `tokens`, drops other domains; if empty the shares of the text")
    bpe_bytes: int = setting(16_000_000, "bytes of train text that bpe is trained on")
    seed: int = setting(0, "orders the input files")
    skip_bad: bool = setting(False, "count unreadable documents instead of stopping at the first")
    workers: int = setting(0, "processes, 0 for one per core")

    def __post_init__(self):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        slimpajama = self.source == "slimpajama"
        self.out_dir = self.out_dir or f"data/{self.source}"
        self.tokenizer = self.tokenizer or ("neox" if slimpajama else "bpe:4096")
        self.tokens = (20 * 10**9 if slimpajama else 0) if self.tokens is None else self.tokens
        mixture = self.mixture or (PAPER_MIXTURE if slimpajama else {})
        if not all(isinstance(w, (int, float)) and 0 < w < math.inf for w in mixture.values()):
            raise ValueError(f"mixture takes weights above 0, not {mixture}")
        self.mixture = {d: w / sum(mixture.values()) for d, w in mixture.items()}
        if not re.fullmatch(r"bpe:\d+|gpt2|neox", self.tokenizer):
            raise ValueError(f"unknown tokenizer {self.tokenizer!r}; there are bpe:<vocabulary size>, gpt2 and neox")
        if self.tokenizer[:4] == "bpe:" and not 257 <= int(self.tokenizer[4:]) <= 2**16:
            raise ValueError(f"{self.tokenizer}: ids are uint16, so a vocabulary has 257 (all bytes, {EOT}) to 65,536")
        if not 0 <= self.val_fraction <= 0.5:
            raise ValueError(f"val_fraction must be from 0 to 0.5, not {self.val_fraction}")
        for key in ("tokens", "val_tokens", "bpe_bytes", "workers"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative, but is {getattr(self, key)}")
        self.workers = self.workers or cores
        if self.source == "files" and not self.input_dir:
            raise ValueError("files needs --input_dir=<folder with .txt, .jsonl, .jsonl.zst or .parquet files>")


# ---------------------------------------------------------------------------------------------------- what to read


class Input(NamedTuple):
    name: str  # the same on every machine, with / between folders
    size: int  # bytes, 0 if unknown
    split: str
    domain: str | None  # None: each document names its own
    path: Path | None  # None: on the hub


def python_files():
    """Inputs of pysource, without duplicates."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    sites = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    seen = {hashlib.sha256(b"").digest()}
    for root in (stdlib, *sites):
        skipped = {"_vendor", "_vendored"}
        if root == stdlib:
            skipped |= {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if skipped.isdisjoint(parts) and path.is_file() and path.stat().st_size <= 1_000_000:
                content = path.read_bytes()
                digest = hashlib.sha256(content).digest()
                if digest not in seen:
                    seen.add(digest)
                    domain = parts[0] if parts[0] in OWN_DOMAIN else "packages"
                    yield Input("/".join(parts), len(content), "train", "stdlib" if root == stdlib else domain, path)


def text_files(cfg):
    """Inputs of `files`, and of slimpajama from a folder; raises UserError where there are none."""
    root = Path(cfg.input_dir)
    if not root.exists():
        raise UserError(f"no folder {root}; --input_dir is where the texts are")
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        name = path.relative_to(root.parent if root.is_file() else root).as_posix()
        if not name.endswith(SUFFIXES) or path.name[0] == "." or not path.is_file():
            continue
        if cfg.source == "files":
            yield Input(name, path.stat().st_size, "train", name.split("/")[0] if "/" in name else "text", path)
        elif folder := re.search(r"(?:^|/)(train|val)", name):
            yield Input(name, path.stat().st_size, folder[1], None, path)


def find_inputs(cfg):
    """All Inputs, validation first, then in an order that the seed shuffles: any beginning is a fair sample."""
    if cfg.source == "slimpajama" and not cfg.input_dir:
        name = f"{cfg.hub_id}@{cfg.revision}"
        return [Input(f"{name}/validation", 0, "val", None, None), Input(f"{name}/train", 0, "train", None, None)]
    inputs = list(python_files() if cfg.source == "pysource" else text_files(cfg))
    if not any(i.split == "train" for i in inputs):
        layout = "train/ and validation/ folders with " if cfg.source == "slimpajama" else ""
        raise UserError(f"nothing to read in {cfg.input_dir}: there should be {layout}files {', '.join(SUFFIXES)}")
    return sorted(inputs, key=lambda i: (i.split != "val", hashlib.sha256(f"{cfg.seed}/{i.name}".encode()).digest()))


# ------------------------------------------------------------------------------------------- reading, in one process


def zst_lines(f):
    """Lines of an open .zst file, frame after frame; raises EOFError if its last frame is cut short."""
    new, frame, tail, empty = need("zstandard").ZstdDecompressor().decompressobj, None, b"", True
    while piece := f.read(2**17):
        empty = False
        while piece:
            frame = frame or new()
            *lines, tail = (tail + frame.decompress(piece)).split(b"\n")
            yield from (line + b"\n" for line in lines)
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame or empty:
        raise EOFError("it is truncated")
    if tail:
        yield tail


def rows(source, cfg, skip):
    """Raw items of an Input from number `skip` on: a JSON line or a piece of text (bytes), a row (dict), a path."""
    columns = [cfg.text_field] + ["meta"] * (source.domain is None)
    if source.path is None:
        split = {"train": "train", "val": "validation"}[source.split]
        data = need("datasets").load_dataset(cfg.hub_id, split=split, streaming=True, revision=cfg.revision or None)
        yield from ({c: row.get(c) for c in columns} for row in data.skip(skip))
    elif source.name.endswith(".py"):
        yield from [source.path][skip:]
    elif source.name.endswith(".parquet"):
        groups = need("pyarrow.parquet").ParquetFile(source.path).iter_batches(64, columns=columns)
        yield from itertools.islice((row for group in groups for row in group.to_pylist()), skip, None)
    else:
        with open(source.path, "rb") as f:
            if source.name.endswith(".zst"):
                lines = zst_lines(f)
            else:
                lines = f if source.name.endswith(".jsonl") else iter(lambda: b"".join(f.readlines(TEXT)), b"")
            yield from itertools.islice(lines, skip, None)


def items(source, cfg, skip):
    """(number, raw item, its rough size in bytes) as `rows` has them; raises UserError if it cannot go on."""
    try:
        for number, raw in enumerate(rows(source, cfg, skip), skip):
            text = raw.get(cfg.text_field) if isinstance(raw, dict) else raw
            yield number, raw, len(text) if isinstance(text, (str, bytes)) else source.size
    except UserError:
        raise
    except Exception as e:  # the libraries behind rows() raise errors of half a dozen packages
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        remedy = "get it again, or remove it and start over"
        if source.path is None:
            remedy = "run again to go on, or download the data and pass --input_dir=<folder>"
        raise UserError(f"cannot read {source.path or source.name + ' of the hub'} ({why}); {remedy}") from None


def read(cfg, inputs, position, done):
    """Yield batches (split, position after it, [(Input, item number, raw item)]) from `position` = [input, item] on.

    done(split): whether the split's budget is reached. It is asked ahead of the writer, which decides for itself: here
    it only saves work.
    """
    for split in ("val", "train"):
        batch, held = [], 0
        mine = [i for i in range(position[0], len(inputs)) if inputs[i].split == split]
        every = ((i, *item) for i in mine for item in items(inputs[i], cfg, position[1] if i == position[0] else 0))
        for i, number, raw, size in every:
            if done(split):
                break
            batch.append((inputs[i], number, raw))
            held, after = held + size, [i, number + 1]
            if held >= BATCH:
                yield split, after, batch
                batch, held = [], 0
        if batch:
            yield split, after, batch


# ------------------------------------------------------------------------------------------- documents, in all cores


def split_docstrings(source):
    """(code without its docstrings, the docstrings) of Python source; all of it, and nothing, if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, ""
    code, cuts = source.encode(), []  # ast counts columns in bytes
    starts = [0, *itertools.accumulate(len(line) + 1 for line in code.split(b"\n"))]
    nodes = [tree]
    for node in nodes:  # all statements; ast.walk goes through the expressions too, which takes longer than parsing
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, block, ())
        module = isinstance(node, ast.Module)
        if not module and not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            line, start = starts[doc.lineno - 1], starts[doc.lineno - 1] + doc.col_offset
            end, after = starts[doc.end_lineno - 1] + doc.end_col_offset, starts[doc.end_lineno]
            if (module or len(node.body) > 1) and not (code[line:start] + code[end:after]).strip():
                cuts.append((line, after, b"", doc.value.value))
            else:  # the only statement, or not alone on its line
                cuts.append((start, end, b"...", doc.value.value))
    pieces, at = [], 0
    for start, end, instead, _ in sorted(cuts):
        pieces += [code[at:start], instead]
        at = end
    return b"".join([*pieces, code[at:]]).decode(), "\n\n".join(inspect.cleandoc(doc) for *_, doc in sorted(cuts))


def documents(source, raw, cfg):
    """The documents [(domain, text)] of a raw item; raises ValueError, which says what is wrong with it."""
    if isinstance(raw, Path):
        try:
            with tokenize.open(raw) as f:
                code, prose = split_docstrings(f.read())
        except (SyntaxError, UnicodeDecodeError):  # an unknown encoding, or another than it says
            return []
        return [(domain, text) for domain, text in ((source.domain, code), ("prose", prose)) if text.strip()]
    if source.name.endswith(".txt"):
        return [(source.domain, raw.decode("utf-8-sig"))]
    if isinstance(raw, bytes) and not raw.strip():
        return []
    row = json.loads(raw) if isinstance(raw, bytes) else raw
    text = row.get(cfg.text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = f"it has {', '.join(row)}" if isinstance(row, dict) else "it is no object"
        raise ValueError(f"no text in field {cfg.text_field!r} ({has}); name the right one with --text_field")
    if source.domain is not None:
        return [(source.domain, text)] if text else []
    meta = row.get("meta")
    if not isinstance(meta, dict) or not isinstance(meta.get("redpajama_set_name"), str):
        raise ValueError("no meta.redpajama_set_name, which SlimPajama's documents have; for other texts use `files`")
    return [(meta["redpajama_set_name"].removeprefix("RedPajama"), text)] if text else []


def start_worker(cfg, spec):
    global _cfg, _tokenizer
    _cfg, _tokenizer = cfg, spec and Tokenizer(spec)
    gc.disable()  # a syntax tree has no cycles, and looking for them takes as long as parsing
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker waits for work forever if the main process was killed; then it has to end as well.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode(batch, closed):
    """For each item of a batch a list of (domain, uint16 ids or, without a tokenizer, text; bytes of text), or the
    sentence that says why it cannot be read. Domains out of the mixture, or `closed`, are left out."""
    results = []
    for source, number, raw in batch:
        try:
            docs = documents(source, raw, _cfg)
        except (ValueError, RecursionError) as e:
            kind = "line" if ".jsonl" in source.name else "item"
            results.append(f"{source.path or source.name}, {kind} {number + 1}: {e}")
            continue
        encoded = []
        for domain, text in docs:
            if domain in closed or domain not in (_cfg.mixture or [domain]):
                continue
            # JSON may hold half a surrogate pair, which is no text: it becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = _tokenizer.encode_document(text) if _tokenizer else text
            encoded.append((domain, ids, len(text.encode())))
        results.append(encoded)
    return results


def encoded(cfg, spec, batches, closed=lambda split: set()):
    """Yield (split, position, `encode`'s results) of each batch, in order. Few batches are under way at a time."""
    waiting = deque()
    with ProcessPoolExecutor(cfg.workers, multiprocessing.get_context("spawn"), start_worker, (cfg, spec)) as pool:
        try:
            for split, position, batch in batches:
                waiting.append((split, position, pool.submit(encode, batch, closed(split))))
                if len(waiting) > 2 * cfg.workers:
                    split, position, future = waiting.popleft()
                    yield split, position, future.result()
            for split, position, future in waiting:
                yield split, position, future.result()
        except BrokenProcessPool:
            raise UserError("a worker died, perhaps for lack of memory; run again with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def accept(cfg, results, state):
    """Yield each item that can be read; the others are counted in state["skipped"], or raise without --skip_bad."""
    for item in results:
        if isinstance(item, str):
            if not cfg.skip_bad:
                remedy = (
                    f"run again with --skip_bad to go on without it, or repair it, delete {cfg.out_dir} and start over"
                )
                raise UserError(f"{item}; {remedy}")
            state["skipped"] += 1
        elif item:
            yield item


def held_out(cfg, seen, docs):
    """Whether an item is for validation: evenly one in 1 / val_fraction of its domain. Counts it in `seen`."""
    domain = docs[0][0]
    seen[domain] = seen.get(domain, 0) + 1
    return cfg.val_fraction > 0 and (seen[domain] - 2) % round(1 / cfg.val_fraction) == 0


# --------------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_spec(name, pattern, ranks, special, normalize=None):
    """What data.Tokenizer takes; raises UserError if ids do not fit uint16. ranks: [(bytes, id)], by rising id."""
    n_vocab = max([i for _, i in ranks] + list(special.values())) + 1
    if n_vocab > 2**16:
        raise UserError(f"{name} has {n_vocab:,} entries, but ids are uint16: a vocabulary has at most 65,536")
    ranks = [[base64.b64encode(b).decode(), i] for b, i in ranks]
    return dict(name=name, pattern=pattern, ranks=ranks, special=special, normalize=normalize, n_vocab=n_vocab)


def byte_level(vocab, merges, path):
    """[(bytes, id)] of a byte-level BPE vocabulary, whose entries spell each byte as a printable character.

    tiktoken merges the pair with the lowest id first, so ids have to rise as the merges do: UserError if they do not.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    ids = [vocab.get("".join(merge)) for merge in merges]
    if None in ids or any(a >= b for a, b in itertools.pairwise(ids)):
        raise UserError(f"{path} has ids that are not in the order of its merges; take the tokenizer's original file")
    return sorted(((bytes(byte[c] for c in token), i) for token, i in vocab.items()), key=lambda pair: pair[1])


def neox(path):
    """Spec of a GPT-NeoX style tokenizer.json, whose added tokens are special ones and runs of 2 to n spaces."""
    about = read_json(path, "a tokenizer.json")
    try:
        model, normalizer, before = about["model"], about["normalizer"], about["pre_tokenizer"]
        special = {t["content"]: t["id"] for t in about["added_tokens"] if t["special"]}
        runs = sorted((t["content"], t["id"]) for t in about["added_tokens"] if not t["special"])
        known = model["type"] == "BPE" and before["type"] == "ByteLevel" and not before["add_prefix_space"]
        known = known and EOT in special and [r for r, _ in runs] == [" " * n for n in range(2, len(runs) + 2)]
        if not known or normalizer not in (None, {"type": "NFC"}):
            raise KeyError
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        vocab = {token: i for token, i in model["vocab"].items() if token not in special}
        ranks = byte_level(vocab, merges, path)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json like GPT-NeoX's; pass that with --tokenizer_file") from None
    # Text is to be cut at the runs before anything else. So a run of spaces is a piece, it comes first, and the end of
    # other whitespace is where one begins. tiktoken looks a whole piece up before it merges: it finds the added token,
    # which, listed last, hides the vocabulary's own entry for that run.
    pattern = f" {{2,{len(runs) + 1}}}|" + PATTERN.replace(r"(?:\s(?!\S))", r"(?:(?!  )\s(?!\S))") if runs else PATTERN
    return tokenizer_spec("neox", pattern, ranks + [(r.encode(), i) for r, i in runs], special, normalizer and "NFC")


def download(name, get, instead):
    """get(); raises UserError, whatever fails in it."""
    try:
        return get()
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"cannot download {name} ({type(e).__name__}); pass --tokenizer_file=<{instead}>") from None


def gpt2(folder):
    """Spec of GPT-2's tokenizer, from a folder with encoder.json and vocab.bpe or, if '', as tiktoken gets it."""
    if folder:
        vocab = read_json(Path(folder) / "encoder.json", "GPT-2's vocabulary")
        try:
            merges = (Path(folder) / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
            special = {EOT: vocab.pop(EOT)}
            ranks = byte_level(vocab, [merge.split(" ") for merge in merges], folder)
        except (OSError, KeyError, AttributeError) as e:
            raise UserError(f"{folder} does not hold GPT-2's encoder.json and vocab.bpe ({e})") from None
    else:
        encoding = download(
            "gpt2", lambda: need("tiktoken").get_encoding("gpt2"), "a folder with encoder.json, vocab.bpe"
        )
        special, ranks = {EOT: encoding.eot_token}, sorted(encoding._mergeable_ranks.items(), key=lambda pair: pair[1])
    return tokenizer_spec("gpt2", PATTERN, ranks, special)


def train_texts(cfg, inputs):
    """The first bpe_bytes of the text that will be train text."""
    count, seen = Counter(), {}
    train = [i for i in inputs if i.split == "train"]
    for _, _, results in encoded(cfg, None, read(cfg, train, [0, 0], lambda split: count["bytes"] >= cfg.bpe_bytes)):
        for docs in accept(cfg, results, count):
            if not held_out(cfg, seen, docs):
                for _, text, size in docs:
                    if count["bytes"] < cfg.bpe_bytes:
                        count["bytes"] += size
                        yield text


def make_tokenizer(cfg, inputs):
    """The Tokenizer that cfg.tokenizer names, loaded or trained."""
    need("tiktoken")
    if cfg.tokenizer == "gpt2":
        return Tokenizer(gpt2(cfg.tokenizer_file))
    if cfg.tokenizer == "neox":
        place = "EleutherAI/gpt-neox-20b", "tokenizer.json"
        path = cfg.tokenizer_file or download(
            "neox", lambda: need("huggingface_hub").hf_hub_download(*place), "GPT-NeoX's tokenizer.json"
        )
        return Tokenizer(neox(path))
    bpe = need("rustbpe").Tokenizer()
    print(f"training {cfg.tokenizer} on at most {cfg.bpe_bytes:,} bytes of text", flush=True)
    bpe.train_from_iterator(train_texts(cfg, inputs), int(cfg.tokenizer[4:]) - 1, pattern=PATTERN)
    ranks = sorted(((bytes(b), i) for b, i in bpe.get_mergeable_ranks()), key=lambda pair: pair[1])
    return Tokenizer(tokenizer_spec(cfg.tokenizer, PATTERN, ranks, {EOT: len(ranks)}))


# ------------------------------------------------------------------------------------------- writing, in one process


def open_output(cfg, inputs):
    """The state of the work in out_dir, new or as a killed run left it; None if it is finished. UserError if other."""
    out = Path(cfg.out_dir)
    settings = {k: v for k, v in asdict(cfg).items() if k not in ("out_dir", "input_dir", "skip_bad", "workers")}
    listing = hashlib.sha256(json.dumps([[i.name, i.size] for i in inputs]).encode()).hexdigest()
    for file in ("manifest.json", "progress.json"):
        if (out / file).exists():
            state = read_json(out / file, "a file that prepare.py wrote")
            old = state.get("settings", {})
            other = [f"{k} {old.get(k)!r} there, {v!r} now" for k, v in settings.items() if old.get(k) != v]
            if other or state["inputs"] != listing:
                what = f"other settings ({'; '.join(other)})" if other else "other input files"
                half = "half-" if file == "progress.json" else ""
                raise UserError(
                    f"{out} holds a {half}finished corpus of {what}; choose another --out_dir, or delete that folder"
                )
            return state if file == "progress.json" else None
    if any((out / name).exists() for name in ("train", "val", "tokenizer.json")):
        raise UserError(f"{out} holds files that prepare.py did not write; choose another --out_dir, or delete them")
    return dict(settings=settings, inputs=listing, position=[0, 0], skipped=0, seen={}, splits=dict(train={}, val={}))


def full(cfg, state, split, domain):
    """Whether a domain's budget of a split is reached; without a mixture all domains share that of train."""
    have = state["splits"][split]
    if split == "train" and not cfg.mixture:
        return sum(about["tokens"] for about in have.values()) >= (cfg.tokens or math.inf)
    limit = cfg.val_tokens if split == "val" else cfg.tokens * cfg.mixture[domain]
    return domain in have and have[domain]["tokens"] >= (limit or math.inf)


def save(out, state, pending):
    """Append the pending ids, {(split, domain): [arrays]}, then record how far we are: a kill loses what came since.

    What a killed run wrote and did not record comes again, to the same place, for everything here is in order.
    """
    for (split, domain), arrays in pending.items():
        about = state["splits"][split][domain]
        path, ids = out / about["file"], np.concatenate(arrays)
        path.parent.mkdir(exist_ok=True)
        try:
            with open(path, "r+b" if path.exists() else "wb") as f:
                if f.seek(0, os.SEEK_END) < 2 * (about["tokens"] - len(ids)):
                    raise UserError(f"{path} was cut since prepare.py stopped; delete {out} and start over")
                f.seek(2 * (about["tokens"] - len(ids)))
                f.write(ids.tobytes())
                f.truncate()
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            e.filename = path
            raise
    pending.clear()
    write_json(out / "progress.json", state)


def add(cfg, state, pending, split, docs, held):
    """Put an item's documents where they belong, unless that is full."""
    for domain, ids, size in docs:
        to = "val" if held and not full(cfg, state, "val", domain) else split
        if not full(cfg, state, to, domain):
            fresh = dict(file=f"{to}/{domain}.bin", tokens=0, documents=0, bytes=0)
            about = state["splits"][to].setdefault(domain, fresh)
            for key, n in (("tokens", len(ids)), ("documents", 1), ("bytes", size)):
                about[key] += n
            pending[to, domain].append(ids)


def total(state, key, splits=("train", "val")):
    return sum(about[key] for split in splits for about in state["splits"][split].values())


def write(cfg, inputs, state, tokenizer):
    """Do the work that `state` says is left; returns the bytes of text per second."""
    out, pending, before = Path(cfg.out_dir), defaultdict(list), total(state, "bytes")
    started = saved = time.monotonic()
    bar = need("tqdm").tqdm(total=cfg.tokens or None, unit="tok", unit_scale=True) if sys.stderr.isatty() else None

    def closed(split):  # these domains need no work any more; but train text may yet be held out
        return {d for d in cfg.mixture if full(cfg, state, split, d)} if not cfg.val_fraction else set()

    def done(split):
        if cfg.mixture:
            return all(full(cfg, state, split, domain) for domain in cfg.mixture)
        return split == "train" and full(cfg, state, split, None)

    for split, position, results in encoded(cfg, tokenizer.spec, read(cfg, inputs, state["position"], done), closed):
        if not done(split):  # else this was read ahead
            for docs in accept(cfg, results, state):
                add(cfg, state, pending, split, docs, split == "train" and held_out(cfg, state["seen"], docs))
        state["position"] = position
        now, tokens = time.monotonic(), total(state, "tokens")
        rate = (total(state, "bytes") - before) / (now - started)
        if bar:
            bar.update(tokens - bar.n)
        if now - saved > SAVE_S or sum(len(ids) for arrays in pending.values() for ids in arrays) > HELD:
            save(out, state, pending)
            saved = now
            if not bar:
                at = f"{tokens / 1e6:,.1f}M tokens, input {position[0] + 1} of {len(inputs)}"
                print(f"{at}, {rate / 1e6:.1f} MB/s", flush=True)
    save(out, state, pending)
    if bar:
        bar.close()
    return (total(state, "bytes") - before) / (time.monotonic() - started)


def notes(cfg, state):
    """Sentences on what the user may not expect of a finished corpus."""
    train, val = state["splits"]["train"], state["splits"]["val"]
    for domain in cfg.mixture or sorted(train):
        if domain not in train:
            yield f"no text of domain {domain}; the mixture goes without it"
        elif cfg.mixture and cfg.tokens and not full(cfg, state, "train", domain):
            budget = cfg.tokens * cfg.mixture[domain]
            yield f"the input ended at {train[domain]['tokens']:,} of {domain}'s {budget:,.0f} tokens"
        if domain in train and domain not in val:
            yield f"no validation text of domain {domain}; raise --val_fraction or prepare more"
    if state["skipped"]:
        yield f"{state['skipped']} unreadable documents were left out"


def finish(cfg, state, tokenizer):
    """Check and describe what was written; the manifest comes last, for it says that all is there."""
    out, train = Path(cfg.out_dir), state["splits"]["train"]
    if not train:
        raise UserError(f"no train text in the input{' of ' + ', '.join(cfg.mixture) if cfg.mixture else ''}")
    for split in state["splits"].values():
        for about in (split[domain] for domain in sorted(split)):
            check_file(out / about["file"], about, verify=False)
            about["sha256"] = sha256(out / about["file"])
            size = f"{about['tokens']:,} tokens, {about['documents']:,} documents, {about['bytes']:,} bytes of text"
            print(f"{about['file']}: {size}")
    for note in notes(cfg, state):
        print("note:", note)
    weights = {d: w for d, w in cfg.mixture.items() if d in train} or {d: train[d]["tokens"] for d in sorted(train)}
    about = dict(name=tokenizer.name, hash=tokenizer.hash, n_vocab=tokenizer.n_vocab, eot=tokenizer.eot)
    manifest = dict(format=1, source=cfg.source, seed=cfg.seed, tokenizer=about)
    manifest["mixture"] = {d: w / sum(weights.values()) for d, w in weights.items()}
    write_json(out / "manifest.json", manifest | {k: state[k] for k in ("settings", "inputs", "skipped", "splits")})
    for leftover in [out / "progress.json", *out.glob(".*.tmp")]:
        leftover.unlink(missing_ok=True)


def plain_speed(out, state, tokenizer):
    """Bytes per second of tiktoken alone, in one process, on the first million tokens of the largest train file."""
    largest = max(state["splits"]["train"].values(), key=lambda about: about["tokens"])
    ids = np.fromfile(out / largest["file"], "<u2", 2**20)
    texts = [tokenizer.decode(doc[:-1].tolist()) for doc in np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)]
    started = time.perf_counter()
    for text in texts:
        tokenizer.encoding.encode_ordinary(text)
    return sum(len(text.encode()) for text in texts) / (time.perf_counter() - started)


def main(cfg: PrepareConfig):
    out = Path(cfg.out_dir)
    if out.exists() and not out.is_dir():
        raise UserError(f"out_dir={out} is a file; name a folder")
    inputs = find_inputs(cfg)
    if any(i.split == "val" for i in inputs):
        cfg.val_fraction = 0.0  # the source has a validation split of its own
    state = open_output(cfg, inputs)
    if state is None:
        print(f"{out} is finished: this very corpus was prepared before")
        return
    try:
        if not (out / "tokenizer.json").exists():
            tokenizer = make_tokenizer(cfg, inputs)
            write_json(out / "progress.json", state)  # from here on out_dir is ours
            tokenizer.save(out / "tokenizer.json")
        tokenizer = Tokenizer.load(out / "tokenizer.json")
        rate = write(cfg, inputs, state, tokenizer)
    except KeyboardInterrupt:
        raise UserError(f"stopped; what {out} has so far is kept, run again to go on") from None
    finish(cfg, state, tokenizer)
    speed = f"{rate / 1e6:.1f} MB/s with {cfg.workers} processes, reading and writing included"
    print(f"{out} is ready: {speed}; tiktoken alone in one: {plain_speed(out, state, tokenizer) / 1e6:.1f} MB/s")


if __name__ == "__main__":
    run_main(main, command_line(PrepareConfig, __doc__))
