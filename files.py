"""Files that are whole or not there: atomic writes, JSON, checksums."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from configurator import UserError


def write_atomic(path, write):
    """Make file `path` whole or not at all: `write(temporary path)`, fsync, rename over `path`, fsync the folder."""
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


def write_json(path, value):
    """`value` as an indented JSON file, written atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def read_json(path, what):
    """The value in JSON file `path`; raises UserError, naming `what` it should be, if it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; it should be {what}") from None
    except (ValueError, OSError) as e:
        raise UserError(f"{path} is not {what}: {e}") from None


def sha256(path):
    """Hex digest of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def read_tensors(path, reader):
    """reader(open safetensors file); raises UserError if the file is missing, cut short or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            return reader(f)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is truncated or not a safetensors file ({e})") from None
