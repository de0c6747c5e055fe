"""Atomic writes, JSON, records with checksums, locks: what is written is there whole or not at all.

A record is a JSON object of a schema (see configurator.convert) with a checksum of itself. No torch and no numpy here:
prepare.py's worker processes import this file.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from oldconfig import UserError, convert

OBJECT = {}  # the schema of any JSON object


def write_atomic(path, write):
    """Write file `path` whole or not at all: `write(temporary path)`, fsync, rename over `path`, fsync the folder. The
    next write of this file replaces what a killed process has left of it."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path):
            write(temporary)
            with open(temporary, "rb+") as f:
                os.fsync(f.fileno())
        umask = os.umask(0)  # safetensors makes files private; give this one the mode any other new file gets
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


@contextlib.contextmanager
def writing(path):
    """Surrounds every write to a file; puts its name into errors that have none, such as a full disk's."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or path
        raise


def append(file, text):
    """Add text to an open file. Raises UserError if the file is no longer at its path, where others look for it."""
    with writing(file.name):
        file.write(text)
        file.flush()
    if not (os.path.exists(file.name) and os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))):
        raise UserError(f"{file.name} was removed or replaced while it was written to; start again")


@contextlib.contextmanager
def hold(folder, name=".lock", seconds=0):
    """Hold a folder, so that no other process can hold it too. Waits `seconds` for the process that holds it now, then
    raises UserError, which names it.

    A process of this machine that is dead holds nothing. Whether one of another machine is dead cannot be told here.
    """
    from filelock import SoftFileLock, Timeout

    path = Path(folder, name)  # the process and its machine
    is_new = not path.parent.exists()
    try:
        with SoftFileLock(path, timeout=seconds):
            yield
    except Timeout:
        pid, host = [*path.read_text(errors="replace").split(), "?", "?"][:2]
        holder = f"{folder} is in use by process {pid} on {host}"
        raise UserError(f"{holder}; wait for its end, or remove {path} if there is no such process") from None
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # only if nothing was written


def write_text(path, text):
    """`text` as a UTF-8 file, written atomically. Half surrogate pairs, which UTF-8 does not have, are escaped."""
    encoded = text.encode("utf-8", "backslashreplace")
    write_atomic(path, lambda temporary: Path(temporary).write_bytes(encoded))


def write_json(path, value):
    """`value` as an indented JSON file, written atomically. Raises ValueError on NaN and infinity."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def parse_object(text, schema, where):
    """The object in JSON text, by a schema. Raises UserError that begins with `where`."""
    try:
        return convert(json.loads(text), schema, where)
    except (ValueError, RecursionError) as e:
        raise UserError(str(e) if isinstance(e, UserError) else f"{where} is not JSON: {e}") from None


def read_json(path, what, schema=OBJECT):
    """The object in JSON file `path`, by a schema. Raises UserError, which names `what` the file should be, if it is
    missing, not JSON, or not of the schema."""
    try:
        return parse_object(Path(path).read_bytes(), schema, path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; it should be {what}") from None
    except UserError as e:
        raise UserError(f"{e}; the file should be {what}") from None


def read_records(path, schema=OBJECT):
    """The objects in a JSON-lines file, such as metrics.jsonl, each by a schema. A last line without its end was cut
    while it was written and is left out. Raises UserError, with the line, if another one is damaged."""
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    return [parse_object(line, schema, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def sealed(record):
    """A dict with the checksum of its content, whatever the order of its keys."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True)
    return content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(record, where):
    """A dict from `sealed` without its checksum. Raises UserError if it was altered since."""
    if record != sealed(record):
        raise UserError(f"{where} was altered: it does not match its checksum; copy it again, or make it again")
    return {key: value for key, value in record.items() if key != "sha256"}


def read_record(path, what, schema):
    """The record in a file, by a schema of all its fields. Raises UserError, with the field, if it is damaged."""
    record = unsealed(read_json(path, what), path)
    unknown = record.keys() - schema.keys()
    if unknown:
        raise UserError(f"{path} has an unknown field {min(unknown)!r}; it should be {what}")
    return convert(record, schema, path)


def write_record(path, record):
    """A dict as a JSON file with its checksum, written atomically."""
    write_json(path, sealed(record))


def sha256(path):
    """Hex digest of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def writing_tensors(path):
    """Surrounds the writing of safetensors; turns that package's error, such as a full disk's, into a UserError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as e:
        raise UserError(f"cannot write {path}: {e}; free some space, what was there before is intact") from None


def read_tensors(path, reader):
    """`reader(open safetensors file)`; raises UserError if the file is missing, cut short or of another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            return reader(f)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is truncated or not a safetensors file ({e})") from None
