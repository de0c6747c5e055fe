"""Text to tokens: read documents, train or load a tokenizer, write one uint16 file per domain and split.

    python prepare.py pysource --tokens=8e6                      # Python code and docstrings of this environment
    python prepare.py pysource --packages=torch,numpy            # of the packages only these
    python prepare.py slimpajama --input_dir=/data/SlimPajama --tokenizer_file=tokenizer.json
    python prepare.py slimpajama --hub_id=DKYoon/SlimPajama-6B --tokens=5e9
    python prepare.py files --input_dir=texts                    # .txt, .jsonl, .jsonl.zst, .parquet, recursively

`pysource` needs no network. docs/data.md says what each source reads, and which domains it has.
Stop it at any time, even with kill -9: the same command goes on, and the result is the same to the byte.

Read next: data.py for the layout of the result and its reader.
"""

import ast
import base64
import contextlib
import functools
import gc
import hashlib
import io
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
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from oldconfig import UserError, check_ranges, command_line, need, run_main, setting

SAVE_SECONDS = 4  # of work that a kill can lose
BATCH_BYTES = 2**20  # of raw text that a worker gets at a time
MAY_DIFFER = ("out_dir", "input_dir", "skip_bad", "workers")  # settings that a run that goes on may change
PAPER_MIXTURE = dict(CommonCrawl=0.5, C4=0.2, Github=0.1, Book=0.05, ArXiv=0.05, Wikipedia=0.05, StackExchange=0.05)
# GPT-2's pattern with another end: it has `\s+(?!\S)|\s+` there. Ours matches the same up to 99,999 characters; the
# regex engine's stack overflows in a million characters of whitespace.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
PATTERN = WORDS + r"|(?:\s(?!\S)){1,99999}|\s"

PIECE_BYTES = 2**16  # of a .txt file that make a document
SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
VENDORED = {"_vendor", "_vendored"}
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass
class PrepareConfig:
    source: Literal["pysource", "slimpajama", "files"] = setting(
        "pysource", "what to read", group="Input and output", positional=True
    )
    out_dir: str = setting("", "where the result goes; data/<source> if empty")
    input_dir: str = setting("", "folder to read: of texts for files, in SlimPajama's layout for slimpajama")
    packages: tuple[str, ...] = setting((), "for pysource: of installed packages only these, by name; empty = all")
    text_field: str = setting("text", "column of .jsonl and .parquet files that holds the text")
    hub_id: str = setting("cerebras/SlimPajama-627B", "data set on the hub, for slimpajama without input_dir")
    revision: str = setting("", "commit of the hub's data set; give one to be able to get the same data again")
    tokenizer: str = setting(
        "", "bpe:<vocabulary size>, gpt2 or neox; if empty bpe:4096, or neox for slimpajama", group="Tokenizer"
    )
    tokenizer_file: str = setting("", "neox: a tokenizer.json; gpt2: a folder with encoder.json")
    bpe_bytes: int = setting(16_000_000, "bytes of train text that bpe is trained on", least=0)
    tokens: int | None = setting(
        None, "train tokens over all domains, 0 for all there is; 20e9 for slimpajama", least=0, group="Amounts"
    )
    val_tokens: int = setting(0, "validation tokens per domain, 0 for all there is", least=0)
    val_fraction: float = setting(
        0.05, "share of documents held out (one in round(1 / share)) if the source has no validation split", 0, 0.5
    )
    mixture: dict[str, float] = setting(
        {}, "domain: weight; splits `tokens`, drops other domains; if empty the shares of the text"
    )
    seed: int = setting(0, "orders the input files", group="Work")
    skip_bad: bool = setting(False, "count unreadable documents instead of stopping at the first")
    workers: int = setting(0, "processes, 0 for one per core", least=0)

    def __post_init__(self):
        check_ranges(self)
        is_slimpajama = self.source == "slimpajama"
        self.out_dir = self.out_dir or f"data/{self.source}"
        if self.workers == 0:  # Windows and macOS do not say which cores this process may use
            self.workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if not self.tokenizer:
            self.tokenizer = "neox" if is_slimpajama else "bpe:4096"
        if self.tokens is None:
            self.tokens = 20 * 10**9 if is_slimpajama else 0
        if not self.mixture and is_slimpajama:
            self.mixture = PAPER_MIXTURE
        total = sum(self.mixture.values())
        if not (total < math.inf and all(weight > 0 for weight in self.mixture.values())):
            raise ValueError(f"mixture takes weights above 0, not {self.mixture}")
        self.mixture = {domain: weight / total for domain, weight in self.mixture.items()}
        if not re.fullmatch(r"bpe:\d+|gpt2|neox", self.tokenizer):
            raise ValueError(f"unknown tokenizer {self.tokenizer!r}; there are bpe:<vocabulary size>, gpt2 and neox")
        if self.tokenizer.startswith("bpe:") and not 257 <= int(self.tokenizer[4:]) <= 2**16:
            raise ValueError(f"{self.tokenizer}: a vocabulary has 257 (bytes, end-of-text) to 65,536 (uint16) tokens")
        if self.packages and self.source != "pysource":
            raise ValueError(f"only pysource reads packages; leave out --packages with {self.source}")
        if self.input_dir and self.source == "pysource":
            raise ValueError("pysource reads installed packages; to read --input_dir, name files or slimpajama first")
        if self.tokenizer_file and self.tokenizer.startswith("bpe:"):
            raise ValueError(f"{self.tokenizer} is trained here; with --tokenizer_file set --tokenizer=gpt2 or neox")
        if self.source == "files" and not self.input_dir:
            raise ValueError("files needs --input_dir=<folder with .txt, .jsonl, .jsonl.zst or .parquet files>")


if __name__ == "__main__":  # before the other imports, so that a typo is answered at once
    SETTINGS = command_line(PrepareConfig, __doc__)

import numpy as np

from data import COUNT, EOT, MANIFEST, TOKEN_FILE, Tokenizer, byte_letters, check_vocabulary
from oldfiles import hold, read_json, read_record, sha256, write_record, writing
from report import progress

# ------------------------------------------------------------------------------- texts: files, items, documents


class Input(NamedTuple):
    """A file to read, or a split of a data set on the hub."""

    name: str  # the same on every machine, with / between folders
    size: int  # bytes, 0 if unknown
    split: str  # train or val
    domain: str | None  # None: each document names its own
    path: Path | None  # None: on the hub


def python_files(packages):
    """Yield the Inputs of pysource, without duplicates: the standard library, then the installed packages, of which
    only those named in `packages` if there are names."""
    roots = {Path(sysconfig.get_path("stdlib")): "stdlib"}
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages"):
            roots[folder] = "packages"
    seen = {hashlib.sha256(b"").digest()}  # empty files are left out as well
    for root, domain in roots.items():
        left_out = VENDORED | NOT_STDLIB if domain == "stdlib" else VENDORED
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if left_out.intersection(parts) or not path.is_file() or path.stat().st_size > 1_000_000:
                continue
            if packages and domain == "packages" and parts[0] not in packages:
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                own_domain = parts[0] if parts[0] in OWN_DOMAIN else domain
                yield Input("/".join(parts), len(content), "train", own_domain, path)


def text_files(cfg):
    """Yield the Inputs of `files`, or of slimpajama from a folder."""
    root = Path(cfg.input_dir)
    paths = sorted(root.rglob("*"))
    if root.is_file():
        paths = [root]
        root = root.parent
    for path in paths:
        name = path.relative_to(root).as_posix()
        if not name.endswith(SUFFIXES) or path.name.startswith(".") or not path.is_file():
            continue
        size = path.stat().st_size
        if cfg.source == "files":
            domain = name.split("/")[0] if "/" in name else "text"
            yield Input(name, size, "train", domain, path)
        elif folder := re.search(r"(?:^|/)(train|val)", name):
            yield Input(name, size, folder[1], None, path)


def find_inputs(cfg):
    """All Inputs: validation first, then in an order that the seed shuffles, so that any beginning is a fair sample.
    UserError if there is no train text."""
    if cfg.source == "slimpajama" and not cfg.input_dir:
        name = f"{cfg.hub_id}@{cfg.revision}"
        return [Input(f"{name}/validation", 0, "val", None, None), Input(f"{name}/train", 0, "train", None, None)]
    inputs = list(python_files(cfg.packages) if cfg.source == "pysource" else text_files(cfg))
    installed = {source.name.split("/")[0] for source in inputs if source.domain != "stdlib"}
    for package in cfg.packages:
        if package not in installed:
            raise UserError(f"no package {package!r} is installed; --packages takes names of folders in site-packages")
    if not any(source.split == "train" for source in inputs):
        layout = "train/ and validation/ folders with " if cfg.source == "slimpajama" else ""
        raise UserError(f"no texts in {cfg.input_dir}: there should be {layout}files {', '.join(SUFFIXES)}")

    def order(source):
        name = f"{cfg.seed}/{source.name}".encode("utf-8", "surrogateescape")
        return source.split == "train", hashlib.sha256(name).digest()

    return sorted(inputs, key=order)


@contextlib.contextmanager
def explained(action, remedy):
    """Turn any error into one sentence: what reaches the network or decodes files raises anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"cannot {action} ({why}); {remedy}") from None


def open_file(source):
    """An Input's file, open for reading bytes. Through pyarrow, because zstandard takes a file cut short for whole."""
    if not source.name.endswith(".zst"):
        return open(source.path, "rb")
    return io.BufferedReader(need("pyarrow").input_stream(source.path, compression="zstd"), 2**17)


def read_input(source, cfg):
    """Yield the raw items of an Input: a path (.py), rows (dict), JSON lines or pieces of text (bytes)."""
    columns = [cfg.text_field]
    if source.domain is None:
        columns.append("meta")
    if source.path is None:
        split = "validation" if source.split == "val" else "train"
        data = need("datasets").load_dataset(cfg.hub_id, split=split, streaming=True, revision=cfg.revision or None)
        for row in data:
            yield {column: row.get(column) for column in columns}
    elif source.name.endswith(".py"):
        yield source.path
    elif source.name.endswith(".parquet"):
        file = need("pyarrow.parquet").ParquetFile(source.path)
        if cfg.text_field not in file.schema_arrow.names:
            there = ", ".join(file.schema_arrow.names)
            raise UserError(f"{source.name} has no column {cfg.text_field!r}; set --text_field to one of {there}")
        for group in file.iter_batches(64, columns=columns):
            yield from group.to_pylist()
    else:
        with open_file(source) as file:
            if source.name.endswith(".txt"):
                while lines := file.readlines(PIECE_BYTES):  # a piece ends with a line
                    yield b"".join(lines)
            else:
                yield from file


def raw_items(source, cfg, skip):
    """Yield (number, raw item, its rough size in bytes) of an Input from item number `skip` on; raises UserError if it
    cannot be read."""
    remedy = "get it again, or remove it and start over"
    if source.path is None:
        remedy = "run again to go on, or download the data and pass --input_dir=<folder>"
    with explained(f"read {source.path or source.name}", remedy):
        for number, raw in enumerate(itertools.islice(read_input(source, cfg), skip, None), skip):
            text = raw.get(cfg.text_field) if isinstance(raw, dict) else raw
            yield number, raw, len(text) if isinstance(text, (str, bytes)) else source.size


def split_docstrings(source):
    """(code without its docstrings, the docstrings) of Python source; (source, "") if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    documented.sort(key=lambda node: node.body[0].lineno)
    lines = source.encode().splitlines(keepends=True)  # as bytes, because ast counts columns in bytes
    for node in reversed(documented):  # from the end, so that the numbers of the lines before stay right
        doc = node.body[0]
        first, last = doc.lineno - 1, doc.end_lineno - 1
        before = lines[first][: doc.col_offset]
        after = lines[last][doc.end_col_offset :]
        is_only_statement = len(node.body) == 1 and not isinstance(node, ast.Module)
        if is_only_statement or (before + after).strip():
            lines[first : last + 1] = [before + b"..." + after]
        else:
            del lines[first : last + 1]
    prose = "\n\n".join(ast.get_docstring(node) for node in documented)
    return b"".join(lines).decode(), prose


def python_documents(path, domain):
    """[(domain, code), ("prose", docstrings)] of a Python file, without empty ones; [] if it cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            code, prose = split_docstrings(file.read())
    except (SyntaxError, UnicodeDecodeError, LookupError):  # an unknown encoding, or another one than the file says
        return []
    return [(name, text) for name, text in ((domain, code), ("prose", prose)) if text.strip()]


def to_documents(source, raw, cfg):
    """The documents [(domain, text)] of a raw item; raises ValueError that says what is wrong with it."""
    if isinstance(raw, Path):
        return python_documents(raw, source.domain)
    if source.name.endswith(".txt"):
        return [(source.domain, raw.decode("utf-8-sig"))]
    if isinstance(raw, bytes):
        if not raw.strip():
            return []
        raw = json.loads(raw)
    if not isinstance(raw, dict):
        raise ValueError("it is no JSON object")
    text = raw.get(cfg.text_field)
    if not isinstance(text, str):
        raise ValueError(f"no text in field {cfg.text_field!r}, only {list(raw)}; name another with --text_field")
    domain = source.domain
    if domain is None:
        try:
            domain = raw["meta"]["redpajama_set_name"].removeprefix("RedPajama")
        except (KeyError, TypeError, AttributeError):
            raise ValueError("no meta.redpajama_set_name as in SlimPajama; for other texts use `files`") from None
    return [(domain, text)] if text else []


# ----------------------------------------------------------------------- batches: read in one process, encoded in all


def read_batches(cfg, inputs, position, is_done):
    """Yield batches (split, position after it, [(Input, item number, raw item)]) from `position` = [input, item] on.

    is_done(split): whether the split has enough tokens. Reading runs ahead of writing, so a few batches are read and
    dropped.
    """

    def items_of(split):
        for i in range(position[0], len(inputs)):
            if inputs[i].split == split:
                skip = position[1] if i == position[0] else 0
                for number, raw, size in raw_items(inputs[i], cfg, skip):
                    yield i, number, raw, size

    for split in ("val", "train"):
        batch, batch_size = [], 0
        for i, number, raw, size in items_of(split):
            if is_done(split):
                break
            batch.append((inputs[i], number, raw))
            batch_size += size
            after = [i, number + 1]
            if batch_size >= BATCH_BYTES:
                yield split, after, batch
                batch, batch_size = [], 0
        if batch:
            yield split, after, batch


def start_worker(cfg, spec):
    """Prepare a worker process. What it keeps is global: a pool's initializer has no other place for it."""
    global _cfg, _tokenizer
    _cfg = cfg
    _tokenizer = Tokenizer(spec) if spec else None
    gc.disable()  # a syntax tree has no cycles, and looking for them takes as long as parsing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process

    def end_with_parent():  # a worker waits for work forever if the main process was killed
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def encode_batch(batch):
    """What a worker makes of a batch: for each item a list of (domain, ids, bytes of text), or the message that says
    why it cannot be read. ids: uint16 array, or without a tokenizer the text. Domains outside the mixture are left out.
    """
    results = []
    for source, number, raw in batch:
        try:
            docs = to_documents(source, raw, _cfg)
        except (ValueError, RecursionError) as e:
            kind = "line" if ".jsonl" in source.name else "item"
            results.append(f"{source.path or source.name}, {kind} {number + 1}: {e}")
            continue
        encoded = []
        for domain, text in docs:
            if _cfg.mixture and domain not in _cfg.mixture:
                continue
            # JSON may hold half a surrogate pair, which is no text: it becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = _tokenizer.encode_document(text) if _tokenizer else text
            encoded.append((domain, ids, len(text.encode())))
        results.append(encoded)
    return results


def encode_batches(cfg, spec, batches):
    """Yield (split, position, `encode_batch`'s results) of each batch, in order. Few batches are in memory at a time.
    spec: of the tokenizer, or None."""
    waiting = deque()
    with ProcessPoolExecutor(cfg.workers, multiprocessing.get_context("spawn"), start_worker, (cfg, spec)) as pool:
        try:
            for split, position, batch in batches:
                waiting.append((split, position, pool.submit(encode_batch, batch)))
                if len(waiting) > 2 * cfg.workers:
                    split, position, future = waiting.popleft()
                    yield split, position, future.result()
            for split, position, future in waiting:
                yield split, position, future.result()
        except BrokenProcessPool:
            raise UserError("a worker died, perhaps for lack of memory; run again with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def readable_items(cfg, results, state):
    """Yield the documents of each item that can be read. The others raise UserError, or with --skip_bad are counted in
    state["skipped"]."""
    for item in results:
        if isinstance(item, str):
            if not cfg.skip_bad:
                restart = f"repair it, delete {cfg.out_dir} and start over"
                raise UserError(f"{item}; run again with --skip_bad to go on without it, or {restart}")
            state["skipped"] += 1
        elif item:
            yield item


def is_held_out(cfg, seen, docs):
    """Whether an item is for validation: the second of its domain, then one in 1 / val_fraction. A domain's only item
    is for training. Counts it in `seen`."""
    domain = docs[0][0]
    seen[domain] = seen.get(domain, 0) + 1
    return cfg.val_fraction > 0 and (seen[domain] - 2) % round(1 / cfg.val_fraction) == 0


# --------------------------------------------------------------------------------------------------------- tokenizers


def tokenizer_spec(name, pattern, ranks, special, normalize=None):
    """What data.Tokenizer takes; raises UserError if ids do not fit uint16, are ambiguous, or some bytes have none.
    ranks: [(bytes, id)], merges in order."""
    n_vocab = 1 + max(i for _, i in [*ranks, *special.items()])
    if n_vocab > 2**16:
        raise UserError(f"{name} has {n_vocab:,} entries, but ids are uint16: a vocabulary has at most 65,536")
    ranks = [[base64.b64encode(b).decode(), i] for b, i in ranks]
    spec = dict(name=name, pattern=pattern, ranks=ranks, special=special, normalize=normalize, n_vocab=n_vocab)
    try:
        check_vocabulary(spec)
    except ValueError as e:
        raise UserError(f"{name} is not a vocabulary that we can use: {e}; pass another --tokenizer_file") from None
    return spec


def vocabulary_bytes(vocab, path):
    """A byte-level vocabulary {token: id} -> [(bytes, id)] by rising id. path: its file, for the UserError."""
    letters = {letter: b for b, letter in byte_letters().items()}
    for token, i in vocab.items():
        if not isinstance(i, int) or not letters.keys() >= set(token):
            wrong = f"{path} is no byte-level vocabulary: its token {token!r} has letters of no byte, or no id"
            raise UserError(f"{wrong}; pass another --tokenizer_file")
    by_id = sorted(vocab.items(), key=lambda item: item[1])
    return [(bytes(letters[c] for c in token), i) for token, i in by_id]


def neox_spec(path):
    """Spec of a GPT-NeoX style tokenizer.json, whose added tokens are special ones and runs of 2 to n spaces."""
    about = read_json(path, "a tokenizer.json")
    try:
        vocab, before, normalizer = about["model"]["vocab"], about["pre_tokenizer"], about["normalizer"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in about["model"]["merges"]]
        merged = [vocab["".join(merge)] for merge in merges]
        special = {token["content"]: token["id"] for token in about["added_tokens"] if token["special"]}
        runs = sorted((token["content"], token["id"]) for token in about["added_tokens"] if not token["special"])
        is_known = (
            before["type"] == "ByteLevel"
            and not before["add_prefix_space"]
            and normalizer in (None, {"type": "NFC"})
            and EOT in special
            and [run for run, _ in runs] == [" " * n for n in range(2, len(runs) + 2)]
            and merged == sorted(merged)  # tiktoken merges the pair with the lowest id first
        )
    except (KeyError, TypeError):
        is_known = False
    if not is_known:
        raise UserError(f"{path} is not a tokenizer.json like GPT-NeoX's; pass that with --tokenizer_file")
    ranks = vocabulary_bytes({token: i for token, i in vocab.items() if token not in special}, path)
    # Text has to be cut at the runs before anything else. So the pattern starts with runs of spaces, and other
    # whitespace ends where a run begins. tiktoken looks up a whole piece before it merges: it finds the added token,
    # which, listed last, hides the vocabulary's own entry for that run.
    pattern = PATTERN
    if runs:
        pattern = f" {{2,{len(runs) + 1}}}|" + WORDS + r"|(?:(?!  )\s(?!\S)){1,99999}|\s"
    ranks += [(run.encode(), i) for run, i in runs]
    return tokenizer_spec("neox", pattern, ranks, special, "NFC" if normalizer else None)


def gpt2_spec(folder):
    """Spec of GPT-2's tokenizer, from a folder with OpenAI's encoder.json; "" = from the network."""
    if folder:
        path = Path(folder, "encoder.json")
        vocab = read_json(path, "OpenAI's vocabulary", {EOT: int})
        del vocab[EOT]
        ranks = vocabulary_bytes(vocab, path)
    else:
        with explained("download gpt2", "pass --tokenizer_file=<a folder with encoder.json>"):
            ranks = list(need("tiktoken_ext.openai_public").gpt2()["mergeable_ranks"].items())
    return tokenizer_spec("gpt2", PATTERN, ranks, {EOT: len(ranks)})


def train_texts(cfg, inputs):
    """Yield the first bpe_bytes of the text that will be train text."""
    counts = {"bytes": 0, "skipped": 0}
    seen = {}
    train = [source for source in inputs if source.split == "train"]
    batches = read_batches(cfg, train, [0, 0], lambda split: counts["bytes"] >= cfg.bpe_bytes)
    for _, _, results in encode_batches(cfg, None, batches):
        for docs in readable_items(cfg, results, counts):
            if is_held_out(cfg, seen, docs):
                continue
            for _, text, size in docs:
                if counts["bytes"] < cfg.bpe_bytes:
                    counts["bytes"] += size
                    yield text


def make_tokenizer(cfg, inputs):
    """The Tokenizer that cfg.tokenizer names, loaded or trained."""
    need("tiktoken")
    if cfg.tokenizer == "gpt2":
        return Tokenizer(gpt2_spec(cfg.tokenizer_file))
    if cfg.tokenizer == "neox":
        path = cfg.tokenizer_file
        if not path:
            with explained("download neox", "pass --tokenizer_file=<GPT-NeoX's tokenizer.json>"):
                path = need("huggingface_hub").hf_hub_download("EleutherAI/gpt-neox-20b", "tokenizer.json")
        return Tokenizer(neox_spec(path))
    n_vocab = int(cfg.tokenizer.removeprefix("bpe:"))
    bpe = need("rustbpe").Tokenizer()
    print(f"training {cfg.tokenizer} on at most {cfg.bpe_bytes:,} bytes of text", flush=True)
    bpe.train_from_iterator(train_texts(cfg, inputs), n_vocab - 1, pattern=PATTERN)
    ranks = [(bytes(b), i) for b, i in sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])]
    if len(ranks) + 1 < n_vocab:
        print(f"note: so little text gives a vocabulary of {len(ranks) + 1:,} instead of {n_vocab:,}")
    return Tokenizer(tokenizer_spec(cfg.tokenizer, PATTERN, ranks, {EOT: len(ranks)}))


# ------------------------------------------------------------------------------------------- writing, in one process


PROGRESS = {  # see MANIFEST
    **{name: MANIFEST[name] for name in ("settings", "inputs", "skipped")},
    "position": tuple[COUNT, ...],  # input and item to go on from
    "seen": dict[str, COUNT],  # domain -> its train items so far, with those held out
    "splits": dict.fromkeys(("train", "val"), dict[str, TOKEN_FILE]),
}


def kept_settings(cfg):
    """Those that the data depends on, as they are read back from JSON."""
    settings = {name: value for name, value in asdict(cfg).items() if name not in MAY_DIFFER}
    return json.loads(json.dumps(settings))


def open_output(cfg, inputs):
    """The state of the work in out_dir: new, as a killed run left it (see PROGRESS), or the manifest if the work is
    finished. UserError if out_dir holds anything else."""
    out = Path(cfg.out_dir)
    settings, defaults = kept_settings(cfg), kept_settings(PrepareConfig())
    listing = hashlib.sha256(json.dumps([[source.name, source.size] for source in inputs]).encode()).hexdigest()
    for path, schema in ((out / "manifest.json", MANIFEST), (out / "progress.json", PROGRESS)):
        if not path.exists():
            continue
        state = read_record(path, "a file that prepare.py wrote", schema)
        before = defaults | state["settings"]  # an older version may not have had every setting
        differ = [f"{k} {before[k]!r} there, {v!r} now" for k, v in settings.items() if before[k] != v]
        if state["inputs"] != listing:
            differ.append("other input files")
        if differ:
            way_out = "choose another --out_dir, or delete that folder"
            raise UserError(f"{out} holds other data ({'; '.join(differ)}); {way_out}")
        return state
    if (out / "tokenizer.json").exists() or (out / "train").exists():
        raise UserError(f"{out} holds files that prepare.py did not write; choose another --out_dir, or delete them")
    return dict(settings=settings, inputs=listing, position=[0, 0], skipped=0, seen={}, splits=dict(train={}, val={}))


def is_full(cfg, state, split, domain):
    """Whether a domain's budget of a split is reached; without a mixture all domains share that of train."""
    tokens = {name: about["tokens"] for name, about in state["splits"][split].items()}
    if split == "train" and not cfg.mixture:
        return 0 < cfg.tokens <= sum(tokens.values())  # 0 tokens: all there is
    budget = cfg.val_tokens if split == "val" else cfg.tokens * cfg.mixture[domain]
    return 0 < budget <= tokens.get(domain, 0)


def is_split_done(cfg, state, split):
    """Whether no document of a split is needed any more."""
    if cfg.mixture:
        return all(is_full(cfg, state, split, domain) for domain in cfg.mixture)
    return split == "train" and is_full(cfg, state, split, None)


def place_documents(cfg, state, pending, split, docs, held_out):
    """Add an item's documents to `pending` {(split, domain): [ids]} and to the counts, unless their budget is reached.
    Those held out go to val until its budget is reached, then to `split`."""
    for domain, ids, size in docs:
        to = split
        if held_out and not is_full(cfg, state, "val", domain):
            to = "val"
        if is_full(cfg, state, to, domain):
            continue
        new = dict(file=f"{to}/{domain}.bin", tokens=0, documents=0, bytes=0)
        about = state["splits"][to].setdefault(domain, new)
        about["tokens"] += len(ids)
        about["documents"] += 1
        about["bytes"] += size
        pending[to, domain].append(ids)


def append_tokens(path, start, ids):
    """Write ids at token `start` of a token file, through to the disk. A killed run may have written the same there.
    Raises UserError if the file has lost what was written before."""
    path.parent.mkdir(exist_ok=True)
    with writing(path), open(path, "r+b" if start else "wb") as file:
        if file.seek(0, os.SEEK_END) < 2 * start:
            raise UserError(f"{path} was cut since prepare.py stopped; delete {path.parent.parent} and start over")
        file.seek(2 * start)
        file.write(ids.tobytes())
        file.flush()
        os.fsync(file.fileno())


def save_state(out, state, pending):
    """Write the pending ids, then record how far we are: a kill loses only what came since.

    Documents that a killed run wrote and did not record come again, to the same place, because their order is fixed.
    """
    for (split, domain), arrays in pending.items():
        about = state["splits"][split][domain]
        ids = np.concatenate(arrays)
        append_tokens(out / about["file"], about["tokens"] - len(ids), ids)
    pending.clear()
    write_record(out / "progress.json", state)


def write_corpus(cfg, inputs, state, tokenizer):
    """Do the work that `state` says is left."""
    out = Path(cfg.out_dir)
    pending = defaultdict(list)
    saved = time.monotonic()
    is_done = functools.partial(is_split_done, cfg, state)
    batches = read_batches(cfg, inputs, state["position"], is_done)
    with progress("prepare", cfg.tokens or math.inf, "tok") as bar:
        for split, position, results in encode_batches(cfg, tokenizer.spec, batches):
            if not is_done(split):  # otherwise this was read ahead
                for docs in readable_items(cfg, results, state):
                    held_out = split == "train" and is_held_out(cfg, state["seen"], docs)
                    place_documents(cfg, state, pending, split, docs, held_out)
            state["position"] = position
            tokens = sum(about["tokens"] for domains in state["splits"].values() for about in domains.values())
            bar.update(tokens - bar.n)
            if time.monotonic() - saved > SAVE_SECONDS:
                save_state(out, state, pending)
                saved = time.monotonic()
    save_state(out, state, pending)


def print_result(cfg, state):
    """Say what was written, and what may surprise."""
    train, val = state["splits"]["train"], state["splits"]["val"]
    for about in [*train.values(), *val.values()]:
        size = f"{about['tokens']:,} tokens, {about['documents']:,} documents, {about['bytes']:,} bytes of text"
        print(f"{about['file']}: {size}")
    for domain, weight in cfg.mixture.items():
        if domain not in train:
            print(f"note: no text of domain {domain}; the mixture goes without it")
        elif cfg.tokens and not is_full(cfg, state, "train", domain):
            print(f"note: the input ended before {domain}'s {cfg.tokens * weight:,.0f} tokens")
    for domain in sorted(train.keys() - val.keys()):
        how = "set --val_fraction above 0" if cfg.val_fraction == 0 else "give it more than one item of text"
        print(f"note: no validation text of domain {domain}, without which train.py does not start; {how}")
    if state["skipped"]:
        print(f"note: {state['skipped']} unreadable documents were left out")


def write_manifest(cfg, state, tokenizer):
    """Describe what was written. The manifest comes last, because it says that everything is there."""
    out = Path(cfg.out_dir)
    train = state["splits"]["train"]
    if not train:
        of_mixture = f" of {', '.join(cfg.mixture)}" if cfg.mixture else ""
        raise UserError(
            f"the input has no train text{of_mixture}; {state['skipped']} unreadable documents were left out"
        )
    for split in state["splits"].values():
        for about in split.values():
            about["sha256"] = sha256(out / about["file"])
    weights = {domain: weight for domain, weight in cfg.mixture.items() if domain in train}
    if not weights:
        weights = {domain: about["tokens"] for domain, about in sorted(train.items())}
    total = sum(weights.values())
    manifest = {
        "format": 1,
        "source": cfg.source,
        "seed": cfg.seed,
        "tokenizer": dict(name=tokenizer.name, hash=tokenizer.hash, n_vocab=tokenizer.n_vocab, eot=tokenizer.eot),
        "mixture": {domain: weight / total for domain, weight in weights.items()},
    }
    for key in ("settings", "inputs", "skipped", "splits"):
        manifest[key] = state[key]
    write_record(out / "manifest.json", manifest)
    (out / "progress.json").unlink(missing_ok=True)


def main(cfg: PrepareConfig):
    inputs = find_inputs(cfg)
    with hold(cfg.out_dir):
        make_corpus(cfg, inputs)


def make_corpus(cfg, inputs):
    """Make the data folder, or the rest of it."""
    out = Path(cfg.out_dir)
    if any(source.split == "val" for source in inputs):
        cfg.val_fraction = 0.0  # the source has a validation split of its own
    state = open_output(cfg, inputs)
    if (out / "manifest.json").exists():
        print(f"{out} is complete already; there is nothing to do")
        return
    if not (out / "tokenizer.json").exists():
        tokenizer = make_tokenizer(cfg, inputs)
        write_record(out / "progress.json", state)  # from here on out_dir is ours
        tokenizer.save(out / "tokenizer.json")
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    try:
        write_corpus(cfg, inputs, state, tokenizer)
    except KeyboardInterrupt:
        raise UserError(f"stopped; what {out} has so far is kept, the same command continues") from None
    write_manifest(cfg, state, tokenizer)
    print_result(cfg, state)
    print(f"{out} is ready")


if __name__ == "__main__":
    run_main(main, SETTINGS)
