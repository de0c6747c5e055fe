"""The texts that prepare.py makes tokens of: finding the files, reading them item by item, documents of an item.

docs/data.md says what each source reads, which domains it has, and what is left out.

Read next: prepare.py. No torch here: its worker processes import this file.
"""

import ast
import contextlib
import hashlib
import io
import itertools
import json
import re
import sys
import sysconfig
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from oldconfig import UserError, need

PIECE_BYTES = 2**16  # of a .txt file that make a document
SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
VENDORED = {"_vendor", "_vendored"}
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


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
