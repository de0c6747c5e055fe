"""Where prepare.py's documents come from: installed Python code, files of texts, SlimPajama on disk or on the hub.

`find_inputs` lists what there is to read, `raw_items` reads it in the main process, and `to_documents` turns a raw item
into text in a worker. cfg is a PrepareConfig. Read next: tokenizer.py.
"""

import ast
import hashlib
import io
import json
import re
import sys
import sysconfig
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from common.files import reading
from configurator import UserError, need

PIECE_BYTES = 2**16  # of a .txt file that make a document
SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
LEFT_OUT = {"_vendor", "_vendored"}
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
REMEDY = "get it again; for a data set on the hub run again, or pass --input_dir=<folder with a copy>"


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
    # Empty files are left out as well.
    seen = {hashlib.sha256(b"").digest()}
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
    """All Inputs, in an order that the seed shuffles, so that any beginning is a fair sample. UserError if there is no
    train text."""
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

    # The order of hashes does not depend on a library's shuffle. Names may have bytes that are not UTF-8.
    names = {source: f"{cfg.seed}/{source.name}".encode("utf-8", "surrogateescape") for source in inputs}
    return sorted(inputs, key=lambda source: hashlib.sha256(names[source]).digest())


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
            # A piece ends with a line.
            while lines := file.readlines(PIECE_BYTES):
                yield b"".join(lines)
    elif source.name.endswith(".zst"):
        # pyarrow notices a file that was cut short; the package zstandard takes it for whole.
        with need("pyarrow").input_stream(source.path, compression="zstd") as stream:
            yield from io.BufferedReader(stream, 2**17)
    else:
        with open(source.path, "rb") as file:
            yield from file


def raw_items(source, cfg):
    """Yield (number, raw item, its rough size in bytes) of an Input."""
    with reading(source.path or source.name, "a text file, or a data set within reach", REMEDY):
        for number, raw in enumerate(read_input(source, cfg)):
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

    # Where a docstring can be, and in the order of the text.
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    documented.sort(key=lambda node: node.body[0].lineno)

    # We cut lines of bytes, because ast counts columns in bytes, and from the end, so that earlier numbers stay right.
    lines = source.encode().splitlines(keepends=True)
    for node in reversed(documented):
        doc = node.body[0]
        first, last = doc.lineno - 1, doc.end_lineno - 1
        before, after = lines[first][: doc.col_offset], lines[last][doc.end_col_offset :]
        # A function that is only a docstring needs a statement in its place.
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


def to_documents(source, number, raw, cfg):
    """The documents [(domain, text)] of a raw item. Raises UserError if we cannot read it."""
    if isinstance(raw, Path):
        return python_documents(raw, source.domain)
    place = f"{source.path or source.name}, {'line' if '.jsonl' in source.name else 'item'} {number + 1}"
    what = f"UTF-8, or JSON with a text in {cfg.text_field!r} (see --text_field), in SlimPajama with its set in 'meta',"
    with reading(place, what, f"repair it, delete {cfg.out_dir} and start over"):
        if source.name.endswith(".txt"):
            return [(source.domain, raw.decode("utf-8-sig"))]
        if isinstance(raw, bytes):
            if not raw.strip():
                return []
            raw = json.loads(raw)
        domain = source.domain or raw["meta"]["redpajama_set_name"].removeprefix("RedPajama")
        # JSON may hold half a surrogate pair, which is no text: it becomes U+FFFD.
        text = raw[cfg.text_field].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return [(domain, text)] if text else []
