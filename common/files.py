"""Files: written atomically, sealed with a checksum, read inside `reading`, and folders that one process holds.

A record is a dict that we write as JSON, with its kind ("prepare.py's manifest") and a checksum of itself. Because of
the checksum nobody has to look at its fields one by one: a record is what we wrote, or it is refused.
"""

import contextlib
import hashlib
import json
import os
import textwrap
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from configurator import UserError


@contextlib.contextmanager
def reading(path, what, remedy="copy it again, or make it again"):
    """Wraps everything that reads a file and uses its content: whatever fails there becomes one sentence.

    what: what the file should be, such as "prepare.py's manifest".
    """
    try:
        yield
    except (UserError, AssertionError):
        raise
    # Each library that parses for us has its own errors.
    except Exception as e:
        # without errno it may be a library's own, for the network; safetensors' has none either, but says this
        is_missing = isinstance(e, (FileNotFoundError, NotADirectoryError)) and (e.errno or "No such file" in str(e))
        if is_missing:
            raise UserError(f"{path} is missing ({what}); {remedy}") from None
        why = textwrap.shorten(f"{type(e).__name__}: {e}", 200, placeholder=" …")
        raise UserError(f"{path} is damaged or not {what} ({why}); {remedy}") from e


@contextlib.contextmanager
def writing(path):
    """Wraps every write. A full disk's error names no file, so we put the file's name into it."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    except SafetensorError as e:
        raise UserError(f"{path} cannot be written: {e}; free some space; what was there before is intact") from e


def write_atomic(path, write):
    """Write a file by `write(temporary path)`. The file is either complete or absent, even after kill -9."""
    path = Path(path)
    if path.exists() and not path.is_file():  # as root, a rename would even replace /dev/null
        raise UserError(f"{path} is not a file that can be replaced; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # a kill may leave it; the next write replaces it
    try:
        with writing(path):
            temporary.unlink(missing_ok=True)
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # safetensors makes files that nobody else may read
            # First the bytes reach the disk, then the name: a power cut leaves the old file or the new one.
            with open(temporary, "rb+") as f:
                os.fsync(f.fileno())
            os.replace(temporary, path)
    finally:  # half a checkpoint would keep a full disk full
        temporary.unlink(missing_ok=True)


def write_text(path, text):
    """Write text as UTF-8. Lone surrogates, which UTF-8 does not have, are escaped."""
    write_atomic(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "backslashreplace")))


def write_json(path, value):
    """Write JSON. What we read back is a record, with a seal: see `write_record`. NaN raises ValueError."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path):
    """Hex digest of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sealed(kind, record):
    """The record with its kind and checksum."""
    content = {"kind": kind, **record}
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()[:16]}


def unsealed(kind, found):
    """The record in what `sealed` made. Raises ValueError if it was altered, or is of another kind."""
    record = {key: value for key, value in found.items() if key not in ("kind", "seal")}
    if found["kind"] != kind:
        raise ValueError(f"it is {found['kind']}")
    if found != sealed(kind, record):
        raise ValueError("it was altered: its checksum does not match")
    return record


def write_record(path, kind, record):
    write_json(path, sealed(kind, record))


def read_record(path, kind):
    """The record in a file. Raises UserError if it is missing, altered or of another kind."""
    with reading(path, kind):
        return unsealed(kind, json.loads(Path(path).read_bytes()))


def record_line(kind, record):
    """A record as one line of a JSON-lines file."""
    return json.dumps(sealed(kind, record)) + "\n"


def read_record_lines(path, kind):
    """The records in a JSON-lines file. A kill may cut the last line: without its end we leave it out."""
    with reading(path, kind):
        lines = Path(path).read_bytes().split(b"\n")[:-1]
        return [unsealed(kind, json.loads(line)) for line in lines]


@contextlib.contextmanager
def hold(folder, name=".lock", seconds=0):
    """One process at a time writes into a folder. The system releases the lock when the process ends."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(Path(folder, name), timeout=seconds):
            yield
    except Timeout:
        remedy = "wait until it has finished, or choose another folder"
        raise UserError(f"another process is writing into {folder}; {remedy}") from None
