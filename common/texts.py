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
import math
import re
import sys
import sysconfig
import tokenize
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.files import reading
from common.report import some
from configurator import UserError, need

PIECE = 2**16  # characters of a .txt file that make a document
SMALL = 2**24  # bytes; of a smaller domain we count the characters, to hold out the right part
FORMATS = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
SLIMPAJAMA = (".jsonl", ".jsonl.zst", ".parquet")  # what copies of it consist of
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # pyarrow's names
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # before UTF-16's, with which they begin
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# A user's own splits: c4-validation.00000-of-00008.json.gz, train-clean-100/. Where nothing is called train, such words
# may mean anything, and only val.txt, test/ and their like count.
SPLIT = re.compile(r"(?:^|[-_./])(train|val|dev|eval|test)(?:ing|id|idation|uation)?(?=[-_./])", re.IGNORECASE)
ALONE = re.compile(r"(?:^|/)(val|test)(?:id|idation)?(?=/|\.[^/]*$)", re.IGNORECASE)
SPLITS = {"train": "train", "val": "val", "dev": "val", "eval": "val", "test": "test"}
OWN_DOMAIN = ("torch", "sympy", "numpy", "networkx", "pandas", "matplotlib")
LEFT_OUT = {"_vendor", "_vendored"}
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
FILE = "a text file", "get it again"  # what it should be, and what helps
ON_HUB = "a reachable data set", "run again, or pass --input_dir=<folder with a copy>"


class Input(NamedTuple):
    """A file to read, or a split of a data set on the hub."""

    name: str  # the same on every machine, with / between folders
    size: int  # bytes, 0 if unknown
    split: str  # train or val
    domain: str | None  # None: each document names its own
    path: Path | None  # None: on the hub
    piece: int = PIECE  # characters of a .txt file that make a document
    keeps_lines: bool = False  # up to the length of a piece, because pieces are short

    @property
    def is_txt(self):
        return format_of(self.name)[0] == ".txt"


def python_files(packages):
    """Yield the Inputs of pysource, without copies (Placement.add says why): the standard library, then the installed
    packages, or those in `packages` only."""
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
            raise UserError(f"{path} is a broken link; fix or remove it")
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() not in (here, *above):
            yield from files_below(path, (*above, here))


def format_of(name):
    """(format, packing) of a file by its name: (".jsonl", ".zst"). Neither has to be one that we read."""
    suffixes = Path(name.lower()).suffixes
    packing = suffixes.pop() if suffixes and suffixes[-1] in PACKINGS else ""
    return suffixes[-1] if suffixes else "", packing


def why_left_out(path, cfg):
    """Why we do not read a file, or "". A .json file may be about data, as dataset_infos.json is."""
    suffix, packing = format_of(path.name)
    is_read = suffix in FORMATS if cfg.source == "files" else suffix + packing in SLIMPAJAMA
    if not is_read or (suffix == ".parquet" and packing):  # .parquet is compressed inside
        return suffix + packing or "without a suffix"
    if suffix == ".json":
        with reading(path, *FILE), unpacked(path) as file:
            beginning = file.peek().replace(b"\0", b"")  # UTF-16 has zeros
        # its features may name our column, too, but not with a text
        has_text = re.search(rb'"%s"\s*:\s*["n]' % re.escape(cfg.text_field.encode()), beginning)
        return "" if has_text else f".json without {cfg.text_field!r}"
    return ""


def text_files(cfg):
    """The Inputs of `files`, or of slimpajama from a folder. Prints what is left out."""
    root, out = Path(cfg.input_dir), Path(cfg.out_dir).resolve()
    if not root.exists():
        raise UserError(f"{root} does not exist; --input_dir takes a folder or a file")
    if out in (root.resolve(), *root.resolve().parents):
        raise UserError(f"{root} is in --out_dir, where only prepare.py's own files may be; set another --out_dir")
    base, all_paths = (root, files_below(root)) if root.is_dir() else (root.parent, [root])
    paths = {path.relative_to(base).as_posix(): path for path in all_paths}
    # below out_dir is what an earlier run made
    reasons = {n: why_left_out(path, cfg) for n, path in paths.items() if out not in path.resolve().parents}
    found = [SPLIT.search(name) for name, why in reasons.items() if not why]
    pattern = SPLIT if any(match and match[1].lower() == "train" for match in found) else ALONE
    inputs, left_out = [], defaultdict(list)
    for name, why in reasons.items():
        match = pattern.search(name)
        split = SPLITS[match[1].lower()] if match and root.is_dir() else "train"
        if split == "test":
            why = why or "in a test split"
        if cfg.source == "slimpajama" and not match:
            why = why or "in no split"
        if why:
            left_out[why].append(name)
            continue
        # a split is no domain: train/web/a.txt and web/train.txt are both of web
        folders = [folder for folder in name.split("/")[:-1] if not pattern.search(f"{folder}/")]
        domain = folders[0] if folders and cfg.domains == "folders" else "text"
        own_domain = domain if cfg.source == "files" else None
        inputs.append(Input(name, paths[name].stat().st_size, split, own_domain, paths[name]))
    for what, names in left_out.items():
        print(f"left out: {some(names)} ({len(names)} {what})")
    return inputs


def in_pieces(inputs, val_fraction):
    """Choose each domain's piece size so that the part that we hold out is a whole number of pieces: else a small
    domain would hold out much more than val_fraction, or all of it. We count characters, as they are read. Bytes would
    be off by a factor of three: a Chinese character takes three, and compressed text a third of its own."""
    pieces, small, sizes, texts = {}, set(), sizes_of(inputs), defaultdict(list)
    for source in inputs:
        if source.is_txt and sizes[source.domain] < SMALL:
            texts[source.domain].append(lengths(source))
    for domain, found in texts.items():
        held_out = val_fraction * sum(characters for characters, _ in found)
        if held_out >= 1:
            pieces[domain] = int(held_out / math.ceil(held_out / PIECE))
        if sum(n_bytes for _, n_bytes in found) < PIECE:
            small.add(domain)
    return [s._replace(piece=pieces.get(s.domain, PIECE), keeps_lines=s.domain in small) for s in inputs]


def lengths(source):
    """(characters, bytes in UTF-8) of a .txt file."""
    characters = n_bytes = 0
    with reading(source.path, *FILE), opened(source) as (text, _):
        while part := text.read(2**20):
            characters += len(part)
            n_bytes += len(part.encode("utf-8", "surrogateescape"))
    return characters, n_bytes


def cut(text, size, keeps_lines):
    """Yield a text stream in pieces of `size` characters and what is left of their last line. If more than `size`
    characters of that line are left, we cut inside it: after `size` characters or, with keeps_lines, after twice as
    many."""
    rest = ""
    while piece := rest + text.read(size - len(rest)):
        line = text.readline(size)
        is_whole = keeps_lines or len(line) < size or line.endswith(("\n", "\r"))
        yield piece + line if is_whole else piece
        rest = "" if is_whole else line


def sizes_of(inputs):
    """{domain: bytes of its train files}"""
    sizes = defaultdict(int)
    for source in inputs:
        if source.split == "train":
            sizes[source.domain] += source.size
    return sizes


def find_inputs(cfg):
    """(all Inputs, the share of documents to hold out): cfg's, but 0 where the input has a validation split. Inputs are
    in an order that the seed shuffles, so any beginning is a fair sample. UserError without text to train on or to hold
    out."""
    if cfg.source == "pysource":
        inputs = list(python_files(cfg.packages))
    elif cfg.input_dir:
        inputs = text_files(cfg)
    else:
        name = f"{cfg.hub_id}@{cfg.revision}"
        inputs = [Input(f"{name}/validation", 0, "val", None, None), Input(f"{name}/train", 0, "train", None, None)]
    installed = {source.name.split("/")[0] for source in inputs if source.domain != "stdlib"}
    for package in cfg.packages:
        if package not in installed:
            raise UserError(f"no package {package!r} is installed; --packages takes names of folders in site-packages")
    if not any(source.split == "train" for source in inputs):
        which = f"files {', '.join(FORMATS)}, all but .parquet also compressed ({', '.join(PACKINGS)})"
        if cfg.source == "slimpajama":
            which = f"train/ and validation/ folders with files {', '.join(SLIMPAJAMA)}"
        raise UserError(f"no training text in {cfg.input_dir}: there should be {which}")
    # A source with a validation split of its own keeps it.
    held_out = [source.name for source in inputs if source.split == "val"]
    if held_out:
        print(f"held out: {some(held_out)}, the input's own validation split, and nothing else")
    elif cfg.val_fraction == 0:
        raise UserError("train.py needs validation text: set --val_fraction above 0, or add validation files")
    if inputs[0].domain:  # SlimPajama's documents name their own
        there = [*sizes_of(inputs), *(["prose"] if cfg.source == "pysource" else [])]  # prose: docstrings
        for domain in cfg.mixture.keys() - set(there):
            raise UserError(f"mixture names domain {domain!r}, but the input has {', '.join(there)}")
    if cfg.source == "files":
        val_domains = {source.domain for source in inputs if source.split == "val"}
        if held_out and not val_domains & sizes_of(inputs).keys():
            where = f"from {', '.join(sorted(val_domains))}, and the training text from {', '.join(sizes_of(inputs))}"
            raise UserError(f"the validation text is {where}; --domains=one puts it all into one domain")
        if not held_out:
            inputs = in_pieces(inputs, cfg.val_fraction)

    # The order of hashes does not depend on a library's shuffle. Names may have bytes that are not UTF-8.
    names = {source: f"{cfg.seed}/{source.name}".encode("utf-8", "surrogateescape") for source in inputs}
    inputs = sorted(inputs, key=lambda source: hashlib.sha256(names[source]).digest())
    return inputs, 0.0 if held_out else cfg.val_fraction


@contextlib.contextmanager
def unpacked(path):
    """A file as a stream of its bytes, decompressed."""
    _, packing = format_of(path.name)
    if packing:
        if not path.stat().st_size:
            raise ValueError("it is empty, as after a failed download")
        # pyarrow notices a file that was cut short; the package zstandard takes it for whole.
        with need("pyarrow").input_stream(path, compression=PACKINGS[packing]) as stream:
            yield io.BufferedReader(stream, 2**17)
    else:
        with open(path, "rb", 2**17) as file:
            yield file


@contextlib.contextmanager
def opened(source):
    """(a file's text as a stream, whether it is a JSON array). UTF-16 and UTF-32 are known by their marks."""
    with unpacked(source.path) as file:
        head = file.peek(4)
        encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), "utf-8-sig")
        is_array = head.decode(encoding, "ignore").lstrip().startswith("[")
        # Bytes that are not text become lone surrogates, which a worker refuses with the line's number.
        ends = "" if source.is_txt else "\n"  # of lines; in .txt an old Mac's count too
        yield io.TextIOWrapper(file, encoding, "surrogateescape", ends), is_array


def read_text(source):
    """Yield the raw items of a file of text or JSON: pieces of .txt, lines or the items of one array."""
    with opened(source) as (text, is_array):
        if source.is_txt:
            yield from cut(text, source.piece, source.keeps_lines)
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
            raise UserError(f"{source.path} is a Git LFS pointer, not the file; run `git lfs pull` where it came from")
    if format_of(source.name)[0] == ".parquet":
        file = need("pyarrow.parquet").ParquetFile(source.path)
        # If our column is missing we read all columns, so that an error can name them.
        columns = [name for name in (cfg.text_field, "meta") if cfg.text_field in file.schema_arrow.names]
        for rows in file.iter_batches(64, columns=columns or None):
            yield from rows.to_pylist()
    else:
        yield from read_text(source)


def raw_items(source, cfg):
    """Yield (number, raw item, its rough size in bytes) of an Input."""
    with reading(source.path or source.name, *(FILE if source.path else ON_HUB)):
        for number, raw in enumerate(read_input(source, cfg)):
            if isinstance(raw, Path):
                size = source.size
            elif isinstance(raw, str):
                size = len(raw.encode("utf-8", "surrogateescape"))
            else:  # what is not an object is refused later, with its number
                text = str(raw.get(cfg.text_field)) if isinstance(raw, dict) else ""
                size = len(text.encode("utf-8", "surrogatepass"))
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
        # A function or class that is only a docstring needs a statement in its place.
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
    except (SyntaxError, UnicodeDecodeError, LookupError):  # an unknown encoding, or not the one that the file names
        return []
    return [(name, text) for name, text in ((domain, code), ("prose", prose)) if text.strip()]


def to_documents(source, number, raw, cfg):
    """The documents [(domain, text)] of a raw item. Raises UserError if we cannot read it."""
    if isinstance(raw, Path):
        return python_documents(raw, source.domain)
    is_line = isinstance(raw, str) and not source.is_txt
    place = f"{source.path or source.name}, {'line' if is_line else 'item'} {number + 1}"
    again = f"delete {cfg.out_dir} and start over"
    if isinstance(raw, str):
        with reading(place, "UTF-8", f"convert it (perhaps with `iconv -f WINDOWS-1252 -t UTF-8`), then {again}"):
            raw.encode()  # fails for bytes that were no text
            if source.is_txt and "\0" in raw:
                raise ValueError("it contains NUL bytes, like UTF-16LE without a byte-order mark")
    if source.is_txt:
        return [(source.domain, raw)]
    what = f"an object with text in {cfg.text_field!r}{'' if source.domain else ' and its set in meta'}"
    with reading(place, what, f"repair it or set --text_field, then {again}"):
        if is_line:
            raw = raw.strip("\ufeff \r\n\t")  # files that were joined have marks in the middle
            if not raw:
                return []
            raw = json.loads(raw)
        if cfg.text_field not in raw:
            raise ValueError(f"its fields are {', '.join(map(str, raw))}")
        domain = source.domain or raw["meta"]["redpajama_set_name"].removeprefix("RedPajama")
        text = raw[cfg.text_field]
        if isinstance(text, bytes):  # a binary column
            text = text.decode()
        if text in (None, ""):
            return []
        if not isinstance(text, str):
            raise TypeError(f"{cfg.text_field!r} is of type {type(text).__name__}")
        # JSON may hold a lone surrogate, which is not text: it becomes U+FFFD.
        return [(domain, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))]
