"""Files that are there whole or not at all: atomic writes, JSON, JSON lines, safetensors, checksums.

No torch and no numpy here: prepare.py's worker processes import this file.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from configurator import UserError


def write_atomic(path, write):
    """Write file `path` whole or not at all: `write(temporary path)`, fsync, rename over `path`, fsync the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    try:
        write(temporary)
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        umask = os.umask(0)  # mkstemp makes files private; give this one the mode any other new file gets
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_text(path, text):
    """`text` as a UTF-8 file, written atomically. Half surrogate pairs, which UTF-8 does not have, are escaped."""
    encoded = text.encode("utf-8", "backslashreplace")
    write_atomic(path, lambda temporary: Path(temporary).write_bytes(encoded))


def write_json(path, value):
    """`value` as an indented JSON file, written atomically. Raises ValueError on NaN and infinity."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path, what, keys=()):
    """The value in JSON file `path`. With `keys`, it must be an object that has them.
    Raises UserError, naming `what` the file should be, if it is missing, not JSON, or lacks a key."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; it should be {what}") from None
    except (ValueError, RecursionError, OSError) as e:
        raise UserError(f"{path} is not {what}: {e}") from None
    if keys and not (isinstance(value, dict) and value.keys() >= set(keys)):
        raise UserError(f"{path} is not {what}: it lacks {', '.join(keys)}")
    return value


def read_records(path):
    """The records of a JSON-lines file, such as metrics.jsonl. A last line that was cut off in writing is left out.
    Raises UserError if another line is not JSON."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as e:
        raise UserError(f"{path} is damaged ({e}); repair it or move it away") from None


def sha256(path):
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


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
