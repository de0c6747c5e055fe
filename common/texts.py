"""Where prepare.py's documents come from: installed Python code, files of texts, SlimPajama on disk or on the hub.

`find_inputs` lists what there is to read, `raw_items` reads it in the main process, and `to_documents` turns a raw item
into text in a worker. cfg is a PrepareConfig. Read next: tokenizer.py.
"""

import ast
import codecs
import contextlib
import hashlib
import io
import json
import re
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from common.files import reading
from configurator import UserError, need

PIECE = 2**16  # characters of a .txt file that make a document
FORMATS = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
SLIMPAJAMA = (".jsonl", ".jsonl.zst", ".parquet")  # what copies of it consist of
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # pyarrow's names
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # before UTF-16's, with which they begin
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# A split is a folder of such a name, or a file whose name begins with it: train/…, validation-00000-of-00001.parquet.
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
SPLITS |= {"eval": "val", "test": "test"}
SPLIT = re.compile(rf"(?:^|/)({'|'.join(SPLITS)})(?=/|[-_.][^/]*$)", re.IGNORECASE)
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
    piece: int = PIECE  # characters of a .txt file that make a document


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


def files_below(folder, above=()):
    """Yield the files below a folder. We follow links, but not back up, and leave out what is hidden."""
    here = folder.resolve()
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__MACOSX":
            continue
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to nothing; repair or remove it")
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in (here, *above):
            yield from files_below(path, (*above, here))


def format_of(name):
    """(format, packing) of a file by its name: (".jsonl", ".zst"). Neither has to be one that we read."""
    suffixes = Path(name.lower()).suffixes
    packing = suffixes.pop() if suffixes and suffixes[-1] in PACKINGS else ""
    return suffixes[-1] if suffixes else "", packing


def text_files(cfg):
    """Yield the Inputs of `files`, or of slimpajama from a folder, and say what is left out."""
    root = Path(cfg.input_dir)
    if not root.exists():
        raise UserError(f"there is no {root}; --input_dir takes a folder or a file")
    if root.is_file():
        yield Input(root.name, root.stat().st_size, "train", "text", root)
        return
    left_out = Counter()
    for path in files_below(root):
        name = path.relative_to(root).as_posix()
        found, (suffix, packing) = SPLIT.search(name), format_of(name)
        split = SPLITS[found[1].lower()] if found else "train"
        # a split is no domain: train/web/a.txt and web/train.txt are both of web
        folders = [folder for folder in name.split("/")[:-1] if folder.lower() not in SPLITS]
        domain = folders[0] if folders and cfg.domains == "folders" else "text"
        is_read = suffix in FORMATS if cfg.source == "files" else suffix + packing in SLIMPAJAMA
        if not is_read:
            left_out[suffix + packing or "without a suffix"] += 1
        elif split == "test":
            left_out["of a test split"] += 1
        elif cfg.source == "files":
            yield Input(name, path.stat().st_size, split, domain, path)
        elif found:
            yield Input(name, path.stat().st_size, split, None, path)
    if left_out:
        print("files left out:", ", ".join(f"{n} {what}" for what, n in left_out.most_common()))


def by_size(inputs, cfg):
    """The Inputs of `files` with the pieces that their domain's size asks for. Sets cfg.mixture, for --tokens."""
    sizes = Counter()
    for source in inputs:
        sizes[source.domain] += source.size * (source.split == "train")
    # Else a few large files of one domain could be all that --tokens takes.
    if cfg.tokens and not cfg.mixture and len(sizes) > 1:
        cfg.mixture = {domain: size / sizes.total() for domain, size in sorted(sizes.items())}
    # Else the piece of a small domain that we hold out would be much more than val_fraction, or all of it.
    wanted = {domain: int(size * cfg.val_fraction) for domain, size in sizes.items()}
    return [s._replace(piece=wanted[s.domain]) if 0 < wanted[s.domain] < PIECE / 2 else s for s in inputs]


def find_inputs(cfg):
    """All Inputs, in an order that the seed shuffles, so that any beginning is a fair sample. We set what the
    input decides in cfg: val_fraction and mixture. UserError if there is no train text, or nothing to hold out."""
    if cfg.source == "pysource":
        inputs = list(python_files(cfg.packages))
    elif cfg.input_dir:
        inputs = list(text_files(cfg))
    else:
        name = f"{cfg.hub_id}@{cfg.revision}"
        inputs = [Input(f"{name}/validation", 0, "val", None, None), Input(f"{name}/train", 0, "train", None, None)]
    installed = {source.name.split("/")[0] for source in inputs if source.domain != "stdlib"}
    for package in cfg.packages:
        if package not in installed:
            raise UserError(f"no package {package!r} is installed; --packages takes names of folders in site-packages")
    if not any(source.split == "train" for source in inputs):
        layout = "train/ and validation/ folders with " if cfg.source == "slimpajama" else ""
        which = f"{layout}files {', '.join(FORMATS)}, plain or packed as {', '.join(PACKINGS)}"
        raise UserError(f"no train text in {cfg.input_dir}: there should be {which}")
    # A source with a validation split of its own keeps it.
    if any(source.split == "val" for source in inputs):
        print("held out: the input's own validation split, and nothing else")
        cfg.val_fraction = 0.0
    elif cfg.val_fraction == 0:
        raise UserError("train.py needs validation text: set --val_fraction above 0, or bring validation files")
    if cfg.source == "files":
        inputs = by_size(inputs, cfg)

    # The order of hashes does not depend on a library's shuffle. Names may have bytes that are not UTF-8.
    names = {source: f"{cfg.seed}/{source.name}".encode("utf-8", "surrogateescape") for source in inputs}
    return sorted(inputs, key=lambda source: hashlib.sha256(names[source]).digest())


@contextlib.contextmanager
def unpacked(path):
    """A file as a stream of the bytes that were packed into it."""
    _, packing = format_of(path.name)
    if packing:
        # pyarrow notices a file that was cut short; the package zstandard takes it for whole.
        with need("pyarrow").input_stream(path, compression=PACKINGS[packing]) as stream:
            yield io.BufferedReader(stream, 2**17)
    else:
        with open(path, "rb") as file:
            yield file


def read_text(source):
    """Yield the raw items of a file of text or JSON: pieces of .txt, lines or the items of one array."""
    is_txt = format_of(source.name)[0] == ".txt"
    with unpacked(source.path) as file:
        head = file.peek(4)
        encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), "utf-8-sig")
        is_array = head.decode(encoding, "ignore").lstrip().startswith("[")
        # Bytes that are no text become half surrogate pairs, which a worker refuses with the line's number.
        ends = "" if is_txt else "\n"  # of lines: in .txt also those of an old Mac
        text = io.TextIOWrapper(file, encoding, "surrogateescape", ends)
        if is_txt:
            # A piece ends with a line. Where none ends for as long again, we cut.
            while piece := text.read(source.piece) + text.readline(source.piece):
                yield piece
        elif is_array:
            yield from json.load(text)
        else:
            yield from text


def read_input(source, cfg):
    """Yield the raw items of an Input: a path (.py), rows (dict), lines of JSON or pieces of text (str)."""
    if source.path is None:
        split = "validation" if source.split == "val" else "train"
        load = need("datasets").load_dataset
        yield from load(cfg.hub_id, split=split, streaming=True, revision=cfg.revision or None)
        return
    if source.name.endswith(".py"):
        yield source.path
        return
    with open(source.path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise UserError(f"{source.path} is a pointer of Git LFS, not the file; run `git lfs pull` where it is from")
    if format_of(source.name)[0] == ".parquet":
        for rows in need("pyarrow.parquet").ParquetFile(source.path).iter_batches(64):
            yield from rows.to_pylist()
    else:
        yield from read_text(source)


def raw_items(source, cfg):
    """Yield (number, raw item, its rough size in bytes) of an Input."""
    with reading(source.path or source.name, "a text file, or a data set within reach", REMEDY):
        for number, raw in enumerate(read_input(source, cfg)):
            if isinstance(raw, Path):
                size = source.size
            elif isinstance(raw, str):
                size = len(raw.encode("utf-8", "surrogateescape"))
            else:
                size = len(str(raw.get(cfg.text_field)))
            yield number, raw, size


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
    is_txt = format_of(source.name)[0] == ".txt"
    place = f"{source.path or source.name}, {'line' if isinstance(raw, str) and not is_txt else 'item'} {number + 1}"
    is_set_in = "" if source.domain else " and its set in 'meta'"
    what = "UTF-8" if is_txt else f"UTF-8 JSON with a text in {cfg.text_field!r} (see --text_field){is_set_in}"
    remedy = f"repair it, or convert it as with `iconv -f WINDOWS-1252 -t UTF-8`, delete {cfg.out_dir} and start over"
    with reading(place, what, remedy):
        if isinstance(raw, str):
            raw.encode()  # fails for bytes that were no text
        if is_txt:
            if "\0" in raw:
                raise ValueError("it has zero bytes, as UTF-16LE without a mark has")
            return [(source.domain, raw)]
        if isinstance(raw, str):
            if not raw.strip():
                return []
            raw = json.loads(raw)
        domain = source.domain or raw["meta"]["redpajama_set_name"].removeprefix("RedPajama")
        text = raw[cfg.text_field]
        if isinstance(text, bytes):  # a binary column
            text = text.decode()
        if text in (None, ""):
            return []
        if not isinstance(text, str):
            raise TypeError(f"{cfg.text_field!r} is of type {type(text).__name__}")
        # JSON may hold half a surrogate pair, which is no text: it becomes U+FFFD.
        return [(domain, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))]
