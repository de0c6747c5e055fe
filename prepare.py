"""Text to tokens: read documents, train or load a tokenizer, write one uint16 file per domain and split.

    python prepare.py pysource --tokens=8e6                      # Python code and docstrings of this environment
    python prepare.py pysource --packages=torch,numpy            # of the packages only these
    python prepare.py slimpajama --input_dir=/data/SlimPajama --tokenizer_file=tokenizer.json
    python prepare.py slimpajama --hub_id=DKYoon/SlimPajama-6B --tokens=5e9
    python prepare.py files --input_dir=texts                    # .txt, .jsonl, .jsonl.zst, .parquet, recursively

Stop it at any time, even with kill -9: the same command goes on, and the result is the same to the byte. That works
because each batch of documents becomes a file of its own in out_dir/parts, which is either complete or absent. We join
the parts in order. A new start reads those that exist, instead of encoding their text again. They are deleted at the
end, so until then the folder takes up to twice the disk space of the result (80 GB for 20B tokens).

Read next: tokenizer.py, and data.py for the layout of the result and its reader.
"""

import ast
import contextlib
import gc
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import tokenize
import warnings
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from common.data import MANIFEST
from common.files import hold, read_record, reading, record_line, sha256, unsealed, write_atomic, write_record, writing
from common.report import progress
from common.tokenizer import EOT, PATTERN, Tokenizer, gpt2_spec, make_spec, neox_spec
from configurator import UserError, check_fields, need, run, setting

PART, PART_NAME = "prepare.py's part", "{:06}-{:09}"  # the name is the place in the input where it starts
SETTINGS = "prepare.py's settings"
BATCH_BYTES = 2**20  # of text that a worker gets at a time. What is held out depends on it where --tokens ends the work
MAY_DIFFER = ("out_dir", "input_dir", "skip_bad", "workers")  # settings that a run that goes on may change
PIECE_BYTES = 2**16  # of a .txt file that make a document
SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
LEFT_OUT = {"_vendor", "_vendored"}
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# Table 2 of the paper, https://arxiv.org/abs/2410.17897
PAPER_MIXTURE = dict(CommonCrawl=0.5, C4=0.2, Github=0.1, Book=0.05, ArXiv=0.05, Wikipedia=0.05, StackExchange=0.05)


@dataclass
class PrepareConfig:
    source: Literal["pysource", "slimpajama", "files"] = setting(
        "pysource", "what to read", group="Input and output", positional=True
    )
    out_dir: str = setting("", "where the result goes; data/<source> if empty")
    input_dir: str = setting("", "folder to read: texts for files, SlimPajama's layout for slimpajama")
    packages: tuple[str, ...] = setting((), "for pysource: read only these installed packages; empty = all")
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
    seed: int = setting(0, "random seed for the order of the input files", group="Work")
    skip_bad: bool = setting(False, "count unreadable documents instead of stopping at the first")
    workers: int = setting(0, "processes, 0 for one per core", least=0)

    def __post_init__(self):
        check_fields(self)
        is_slimpajama = self.source == "slimpajama"
        self.out_dir = self.out_dir or f"data/{self.source}"
        self.tokenizer = self.tokenizer or ("neox" if is_slimpajama else "bpe:4096")
        if self.tokens is None:
            self.tokens = 20 * 10**9 if is_slimpajama else 0
        if not self.mixture and is_slimpajama:
            self.mixture = PAPER_MIXTURE
        if self.workers == 0:  # Windows and macOS do not say which cores this process may use
            self.workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if not all(weight > 0 for weight in self.mixture.values()):
            raise UserError(f"mixture takes weights above 0, not {self.mixture}")
        total = sum(self.mixture.values())
        self.mixture = {domain: weight / total for domain, weight in self.mixture.items()}
        if not re.fullmatch(r"bpe:\d+|gpt2|neox", self.tokenizer):
            raise UserError(f"unknown tokenizer {self.tokenizer!r}; there are bpe:<vocabulary size>, gpt2 and neox")
        if self.tokenizer.startswith("bpe:") and not 257 <= int(self.tokenizer[4:]) <= 2**16:
            raise UserError(f"{self.tokenizer}: a vocabulary has 257 (bytes, end-of-text) to 65,536 (uint16) tokens")
        if self.tokenizer_file and self.tokenizer.startswith("bpe:"):
            raise UserError(f"{self.tokenizer} is trained here; with --tokenizer_file set --tokenizer=gpt2 or neox")
        if self.packages and self.source != "pysource":
            raise UserError(f"only pysource reads packages; leave out --packages with {self.source}")
        if self.input_dir and self.source == "pysource":
            raise UserError("pysource reads installed packages; to read --input_dir, name files or slimpajama first")
        if self.source == "files" and not self.input_dir:
            raise UserError("files needs --input_dir=<folder with .txt, .jsonl, .jsonl.zst or .parquet files>")


# ------------------------------------------------------------------------------------------------ inputs and documents


class Input(NamedTuple):
    """A file to read, or a split of a data set on the hub."""

    name: str  # the same on every machine, with / between folders
    size: int  # bytes, 0 if unknown
    split: str  # train or val
    domain: str | None  # None: each document names its own
    path: Path | None  # None: on the hub


def python_files(packages):
    """Yield the Inputs of pysource: the standard library, then the installed packages, or those in `packages` only.

    Duplicates are left out, because a copy in both splits would make the validation loss wrong.
    """
    roots = {Path(sysconfig.get_path("stdlib")): "stdlib"}
    roots |= {Path(folder): "packages" for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))}
    seen = {hashlib.sha256(b"").digest()}  # empty files are left out as well
    for root, domain in roots.items():
        left_out = LEFT_OUT | NOT_STDLIB if domain == "stdlib" else LEFT_OUT
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            # Files over 1 MB are generated tables.
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
        paths, root = [root], root.parent
    for path in paths:
        name = path.relative_to(root).as_posix()
        if not name.endswith(SUFFIXES) or path.name.startswith(".") or not path.is_file():
            continue
        size = path.stat().st_size
        if cfg.source == "files":
            yield Input(name, size, "train", name.split("/")[0] if "/" in name else "text", path)
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
    """Turn any error into one sentence, because what reaches the network or decodes files raises anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"cannot {action} ({why}); {remedy}") from None


def read_input(source, cfg):
    """Yield the raw items of an Input: a path (.py), rows (dict), JSON lines or pieces of text (bytes)."""
    if source.path is None:
        split = "validation" if source.split == "val" else "train"
        load = need("datasets").load_dataset
        yield from load(cfg.hub_id, split=split, streaming=True, revision=cfg.revision or None)
    elif source.name.endswith(".py"):
        yield source.path
    elif source.name.endswith(".parquet"):
        for rows in need("pyarrow.parquet").ParquetFile(source.path).iter_batches(64):
            yield from rows.to_pylist()
    elif source.name.endswith(".txt"):
        with open(source.path, "rb") as file:
            while lines := file.readlines(PIECE_BYTES):  # a piece ends with a line
                yield b"".join(lines)
    elif source.name.endswith(".zst"):
        # pyarrow notices a file that was cut short; the package zstandard takes it for whole.
        with need("pyarrow").input_stream(source.path, compression="zstd") as stream:
            yield from io.BufferedReader(stream, 2**17)
    else:
        with open(source.path, "rb") as file:
            yield from file


def raw_items(source, cfg, skip):
    """Yield (number, raw item, its rough size in bytes) of an Input from item number `skip` on."""
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
    # We cut lines of bytes, because ast counts columns in bytes, and from the end, so that earlier numbers stay right.
    lines = source.encode().splitlines(keepends=True)
    for node in reversed(documented):
        doc = node.body[0]
        first, last = doc.lineno - 1, doc.end_lineno - 1
        before, after = lines[first][: doc.col_offset], lines[last][doc.end_col_offset :]
        is_only_statement = len(node.body) == 1 and not isinstance(node, ast.Module)
        is_alone = not (before + after).strip()
        lines[first : last + 1] = [] if is_alone and not is_only_statement else [before + b"..." + after]
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
    """The documents [(domain, text)] of a raw item. Raises ValueError that says what is wrong with it."""
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
    text, domain = raw.get(cfg.text_field), source.domain
    if not isinstance(text, str):
        raise ValueError(f"no text in field {cfg.text_field!r}, only {list(raw)}; name another with --text_field")
    if domain is None:
        try:
            domain = raw["meta"]["redpajama_set_name"].removeprefix("RedPajama")
        except (KeyError, TypeError, AttributeError):
            raise ValueError("no meta.redpajama_set_name as in SlimPajama; for other texts use `files`") from None
    # JSON may hold half a surrogate pair, which is no text: it becomes U+FFFD.
    return [(domain, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))] if text else []


# --------------------------------------------------------------------------------------------------------- tokenizers


def train_texts(cfg, inputs):
    """Yield the first bpe_bytes of the text that will be train text."""
    placement, n_bytes = Placement(cfg), 0
    train = [source for source in inputs if source.split == "train"]
    batches = read_batches(cfg, train, (0, 0), lambda split: n_bytes >= cfg.bpe_bytes)
    for items, bad in in_workers(cfg, None, read_batch, ((batch[-1],) for batch in batches)):
        placement.skip(bad)
        for docs in items:
            if placement.is_held_out(docs):
                continue
            for _, text in docs:
                if n_bytes < cfg.bpe_bytes:
                    n_bytes += len(text.encode())
                    yield text


def make_tokenizer(cfg, inputs):
    """The Tokenizer that cfg.tokenizer names, loaded or trained."""
    path = cfg.tokenizer_file
    if cfg.tokenizer == "neox":
        if not path:
            with explained("download neox", "pass --tokenizer_file=<GPT-NeoX's tokenizer.json>"):
                path = need("huggingface_hub").hf_hub_download("EleutherAI/gpt-neox-20b", "tokenizer.json")
        return Tokenizer(neox_spec(path))
    if cfg.tokenizer == "gpt2":
        if path:
            return Tokenizer(gpt2_spec(path))
        with explained("download gpt2", "pass --tokenizer_file=<a folder with encoder.json>"):
            ranks = list(need("tiktoken_ext.openai_public").gpt2()["mergeable_ranks"].items())
        return Tokenizer(make_spec("gpt2", PATTERN, ranks, {EOT: len(ranks)}))
    n_vocab = int(cfg.tokenizer.removeprefix("bpe:"))
    bpe = need("rustbpe").Tokenizer()
    print(f"training {cfg.tokenizer} on at most {cfg.bpe_bytes:,} bytes of text", flush=True)
    bpe.train_from_iterator(train_texts(cfg, inputs), n_vocab - 1, pattern=PATTERN)
    ranks = [(bytes(b), i) for b, i in sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])]
    if len(ranks) + 1 < n_vocab:
        print(f"note: so little text gives a vocabulary of {len(ranks) + 1:,} instead of {n_vocab:,}")
    return Tokenizer(make_spec(cfg.tokenizer, PATTERN, ranks, {EOT: len(ranks)}))


# ------------------------------------------------------------------- batches: read in this process, encoded in workers


def read_batches(cfg, inputs, start, is_done):
    """Yield batches (start, after, split, [(Input, item number, raw item)]) of BATCH_BYTES. start and after are places
    in the input, (input, item). Each batch starts where the one before has ended.

    is_done(split): whether the split has enough tokens. We ask it while results come in, so reading stops soon after.
    """
    first, skip = start
    for split in ("val", "train"):
        batch, size = [], 0
        for i in range(first, len(inputs)):
            if inputs[i].split != split or is_done(split):
                continue
            for number, raw, n_bytes in raw_items(inputs[i], cfg, skip if i == first else 0):
                if is_done(split):
                    break
                batch.append((inputs[i], number, raw))
                size += n_bytes
                after = (i, number + 1)
                if size >= BATCH_BYTES:
                    yield start, after, split, batch
                    start, batch, size = after, [], 0
        if batch:
            yield start, after, split, batch
            start = after


def start_worker(cfg, spec):
    """Prepare a worker process. What it keeps is global, because a pool's initializer has no other place for it."""
    global _cfg, _tokenizer
    _cfg = cfg
    _tokenizer = Tokenizer(spec) if spec else None
    gc.disable()  # a syntax tree has no cycles, and looking for them takes as long as parsing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process

    def end_with_parent():  # a worker waits for work forever if the main process was killed
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def in_workers(cfg, spec, function, calls):
    """Yield function(*call) of each call, in order, computed by cfg.workers processes. Few are in memory at a time.

    spec: of the workers' tokenizer, or None.
    """
    waiting = deque()
    with ProcessPoolExecutor(cfg.workers, multiprocessing.get_context("spawn"), start_worker, (cfg, spec)) as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(function, *call))
                if len(waiting) > 2 * cfg.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a worker died, perhaps for lack of memory; run again with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def read_batch(batch):
    """The documents [(domain, text)] of each readable item of a batch, and what is wrong with the other items."""
    items, bad = [], []
    for source, number, raw in batch:
        try:
            docs = to_documents(source, raw, _cfg)
        except (ValueError, RecursionError) as e:
            kind = "line" if ".jsonl" in source.name else "item"
            bad.append(f"{source.path or source.name}, {kind} {number + 1}: {e}")
            continue
        docs = [(domain, text) for domain, text in docs if not _cfg.mixture or domain in _cfg.mixture]
        if docs:
            items.append(docs)
    return items, bad


def encode_batch(start, after, split, batch, full):
    """The part that a batch becomes: what it holds (see `make_parts`), and its token ids, (tokens,) uint16.

    full: domains that need no more text. We do not encode theirs.
    """
    items, bad = read_batch(batch)
    arrays = [np.empty(0, "<u2")]
    for docs in items:
        for i, (domain, text) in enumerate(docs):
            ids = arrays[0] if domain in full else _tokenizer.encode_document(text)
            arrays.append(ids)
            docs[i] = domain, len(ids), len(text.encode())
    about = dict(start=start, after=after, split=split, items=items, bad=bad)
    return about, np.concatenate(arrays)


# --------------------------------------------------------------------------------- parts and their join, in one process


class Placement:
    """Decides where each document goes, and counts what is there.

    A decision depends on the documents before it and on nothing else. So a new start decides the same again, and we
    save no counters.
    """

    def __init__(self, cfg):
        self.cfg = cfg
        self.items = Counter()  # {domain: its train items so far, with those held out}
        self.splits = {"train": {}, "val": {}}  # {split: {domain: its file, tokens, documents and bytes of text}}
        self.skipped = 0  # unreadable documents

    def is_full(self, split, domain):
        """Whether a domain's budget in a split is reached; without a mixture all domains share that of train."""
        tokens = {name: about["tokens"] for name, about in self.splits[split].items()}
        if split == "train" and not self.cfg.mixture:
            return 0 < self.cfg.tokens <= sum(tokens.values())  # 0 tokens: all there is
        budget = self.cfg.val_tokens if split == "val" else self.cfg.tokens * self.cfg.mixture[domain]
        return 0 < budget <= tokens.get(domain, 0)

    def is_done(self, split):
        """Whether no document of a split is needed any more."""
        if self.cfg.mixture:
            return all(self.is_full(split, domain) for domain in self.cfg.mixture)
        return split == "train" and self.is_full(split, None)

    def full(self, split):
        """The domains whose documents in a split of the input are not needed any more, not even to be held out."""
        splits = {split, "val"} if self.cfg.val_fraction > 0 else {split}
        return [domain for domain in self.cfg.mixture if all(self.is_full(s, domain) for s in splits)]

    def skip(self, bad):
        """Count unreadable items, or raise UserError for the first."""
        if bad and not self.cfg.skip_bad:
            restart = f"repair it, delete {self.cfg.out_dir} and start over"
            raise UserError(f"{bad[0]}; run again with --skip_bad to go on without it, or {restart}")
        self.skipped += len(bad)

    def is_held_out(self, docs):
        """Whether a train item is for validation: the second of its domain, then one in 1 / val_fraction. A domain's
        only item is for training."""
        domain = docs[0][0]
        self.items[domain] += 1
        return self.cfg.val_fraction > 0 and (self.items[domain] - 2) % round(1 / self.cfg.val_fraction) == 0

    def place(self, split, docs):
        """Yield the file that each document of an item goes to, or None if its budget is reached. Documents held out go
        to val until its budget is reached, then to `split`. docs: [(domain, tokens, bytes of text)]."""
        held_out = split == "train" and self.is_held_out(docs)
        for domain, tokens, n_bytes in docs:
            to = "val" if held_out and not self.is_full("val", domain) else split
            if self.is_full(to, domain):
                yield None
                continue
            new = dict(file=f"{to}/{domain}.bin", tokens=0, documents=0, bytes=0)
            about = self.splits[to].setdefault(domain, new)
            about["tokens"] += tokens
            about["documents"] += 1
            about["bytes"] += n_bytes
            yield about["file"]


def read_part(path):
    """(what a part holds, its token ids). A part is a line, which is a record, and then the ids."""
    with reading(path, PART):
        line, content = path.read_bytes().split(b"\n", 1)
        about = unsealed(PART, json.loads(line))
        if path.name != PART_NAME.format(*about["start"]):
            raise ValueError(f"it is the part {PART_NAME.format(*about['start'])}")
        if hashlib.sha256(content).hexdigest() != about["sha256"]:
            raise ValueError("its token ids were altered")
        return about, np.frombuffer(content, "<u2")


def write_part(path, about, ids):
    content = ids.tobytes()
    line = record_line(PART, about | {"sha256": hashlib.sha256(content).hexdigest()})
    write_atomic(path, lambda temporary: temporary.write_bytes(line.encode() + content))


def make_parts(cfg, inputs, tokenizer, placement):
    """Yield all parts in order, each as (what it holds, its token ids): those that exist are read, the others made.

    A part holds the split, the places in the input where it starts and ends, its items [[(domain, tokens, bytes of
    text), …], …], and what is wrong with unreadable ones. Its name is its start, so each part leads to the next one.
    """

    def path_of(start):
        return Path(cfg.out_dir, "parts", PART_NAME.format(*start))

    start = (0, 0)
    while path_of(start).exists():
        about, ids = read_part(path_of(start))
        yield about, ids
        start = about["after"]
    batches = read_batches(cfg, inputs, start, placement.is_done)
    calls = ((*batch, placement.full(batch[2])) for batch in batches)
    for about, ids in in_workers(cfg, tokenizer.spec, encode_batch, calls):
        write_part(path_of(about["start"]), about, ids)
        yield about, ids


def join(out, placement, part, ids):
    """Add a part's documents to the token files. Returns how many tokens were added."""
    found, start = defaultdict(list), 0
    for docs in part["items"]:
        for (_, n, _), file in zip(docs, placement.place(part["split"], docs), strict=True):
            found[file].append(ids[start : start + n])
            start += n
    found.pop(None, None)
    for file, arrays in found.items():
        (out / file).parent.mkdir(exist_ok=True)
        with writing(out / file), open(out / file, "ab") as f:
            f.write(np.concatenate(arrays))
    return sum(len(ids) for arrays in found.values() for ids in arrays)


def write_corpus(cfg, inputs, tokenizer):
    """Make the token files. Returns the Placement, which says what they hold."""
    out, placement = Path(cfg.out_dir), Placement(cfg)
    # A join that was stopped begins again.
    for split in placement.splits:
        shutil.rmtree(out / split, ignore_errors=True)
    with progress("prepare", cfg.tokens or math.inf, "tok") as bar:
        for part, ids in make_parts(cfg, inputs, tokenizer, placement):
            if not placement.is_done(part["split"]):  # otherwise it was read ahead
                placement.skip(part["bad"])
                bar.update(join(out, placement, part, ids))
    return placement


def check_output(cfg, inputs):
    """What the data depends on: the settings, and a hash of the input's names and sizes. Raises UserError if out_dir
    holds anything else than this data, whole or in parts."""
    out = Path(cfg.out_dir)
    settings = {name: value for name, value in asdict(cfg).items() if name not in MAY_DIFFER}
    listing = json.dumps([[source.name, source.size] for source in inputs])
    settings["input files"] = hashlib.sha256(listing.encode()).hexdigest()[:16]
    settings = json.loads(json.dumps(settings))  # as a file has them: lists in place of tuples
    for path, kind in ((out / "manifest.json", MANIFEST), (out / "parts/settings.json", SETTINGS)):
        if path.exists():
            with reading(path, kind):
                pairs = {name: (read_record(path, kind)["settings"][name], settings[name]) for name in settings}
            differ = [f"{name} {before!r} there, {now!r} now" for name, (before, now) in pairs.items() if before != now]
            if differ:
                way_out = "choose another --out_dir, or delete that folder"
                raise UserError(f"{out} holds other data ({'; '.join(differ)}); {way_out}")
            return settings
    if (out / "tokenizer.json").exists() or (out / "train").exists():
        raise UserError(f"{out} holds files that prepare.py did not write; choose another --out_dir, or delete them")
    return settings


def write_manifest(cfg, settings, placement, tokenizer):
    """Describe what was written. The manifest comes last, because it says that everything is there."""
    out, train = Path(cfg.out_dir), placement.splits["train"]
    if not train:
        of_mixture = f" of {', '.join(cfg.mixture)}" if cfg.mixture else ""
        skipped = f"{placement.skipped} unreadable documents were left out"
        raise UserError(f"the input has no train text{of_mixture}; {skipped}")
    for files in placement.splits.values():
        for file in files.values():
            with open(out / file["file"], "rb+") as f:
                os.fsync(f.fileno())
            file["sha256"] = sha256(out / file["file"])
    weights = {domain: weight for domain, weight in cfg.mixture.items() if domain in train}
    weights = weights or {domain: file["tokens"] for domain, file in sorted(train.items())}
    total = sum(weights.values())
    manifest = {
        "settings": settings,
        "tokenizer": dict(name=tokenizer.name, hash=tokenizer.hash, n_vocab=tokenizer.n_vocab, eot=tokenizer.eot),
        "mixture": {domain: weight / total for domain, weight in weights.items()},
        "skipped": placement.skipped,
        "splits": placement.splits,
    }
    write_record(out / "manifest.json", MANIFEST, manifest)


def print_result(cfg, placement):
    """Say what was written, and what may surprise."""
    train, val = placement.splits["train"], placement.splits["val"]
    for file in [*train.values(), *val.values()]:
        size = f"{file['tokens']:,} tokens, {file['documents']:,} documents, {file['bytes']:,} bytes of text"
        print(f"{file['file']}: {size}")
    for domain, weight in cfg.mixture.items():
        if domain not in train:
            print(f"note: no text of domain {domain}; the mixture goes without it")
        elif cfg.tokens and not placement.is_full("train", domain):
            print(f"note: the input ended before {domain}'s {cfg.tokens * weight:,.0f} tokens")
    for domain in sorted(train.keys() - val.keys()):
        how = "set --val_fraction above 0" if cfg.val_fraction == 0 else "give it more than one item of text"
        print(f"note: no validation text of domain {domain}, without which train.py does not start; {how}")
    if placement.skipped:
        print(f"note: {placement.skipped} unreadable documents were left out")
    print(f"{cfg.out_dir} is ready")


def main(cfg: PrepareConfig):
    out, inputs = Path(cfg.out_dir), find_inputs(cfg)
    if any(source.split == "val" for source in inputs):
        cfg.val_fraction = 0.0  # the source has a validation split of its own
    with hold(out):
        settings = check_output(cfg, inputs)
        if (out / "manifest.json").exists():
            print(f"{out} is complete already; there is nothing to do")
        else:
            if not (out / "tokenizer.json").exists():
                tokenizer = make_tokenizer(cfg, inputs)
                write_record(out / "parts/settings.json", SETTINGS, {"settings": settings})
                tokenizer.save(out / "tokenizer.json")
            tokenizer = Tokenizer.load(out / "tokenizer.json")
            print(f"writing {out}; stop at any time, the same command goes on", flush=True)
            placement = write_corpus(cfg, inputs, tokenizer)
            write_manifest(cfg, settings, placement, tokenizer)
            print_result(cfg, placement)
        shutil.rmtree(out / "parts", ignore_errors=True)


if __name__ == "__main__":
    run(main, __doc__)
