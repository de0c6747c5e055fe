"""Settings of every stage: a dataclass's defaults, then config files and flags in the order given, each one checked.

    python train.py config/size_82m.py config/resformer.py --seed=1 --compile false

A config file is plain Python: its top-level names are settings (`learning_rate = 3e-4`); names that start with an
underscore, modules, functions and classes are not. It is run, so treat it as code: only use files that you trust.
Settings stored in checkpoints are JSON and are never run.
"""

import ast
import dataclasses
import difflib
import errno
import importlib
import os
import runpy
import sys
import types
import typing

_WORDS = {"true": True, "on": True, "false": False, "off": False, "none": None}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, over quota, over the file size limit


class UserError(ValueError):
    """Bad input: the message is the one sentence that the user sees, and the exit code is 2."""


def setting(default, help):
    """A dataclass field with a default and the line that --help shows for it."""
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def type_name(hint):
    """A type hint as --help and errors show it: `int`, `'sdpa' or 'eager'`, `true or false`, `tuple of str`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple:
        return f"tuple of {type_name(args[0])}"
    words = {type(None): "none", bool: "true or false"}
    return words.get(hint) or getattr(origin or hint, "__name__", str(hint))


def convert(value, hint):
    """`value` as a `hint`; raises TypeError. Exact conversions only: 5e3 is an int, 5.5 and '5' are not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            try:
                return convert(value, arg)
            except TypeError:
                pass
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(convert(v, args[0]) for v in value)
    elif hint is int:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 2**63:
            if int(value) == value:
                return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, origin or hint):
        return value
    raise TypeError


def parse(text, hint):
    """The value of a flag's text for type `hint`: it stays text where a str fits, else it is a Python literal."""
    hints = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if (word := text.lower()) in _WORDS and type(_WORDS[word]) in hints:
        return _WORDS[word]
    if str in hints or any(typing.get_origin(h) is typing.Literal for h in hints):
        return text
    several = any(typing.get_origin(h) is tuple for h in hints)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return tuple(text.split(",")) if several else text  # --domains=a,b is what people type for a tuple of names
    return (value,) if several and isinstance(value, (int, float)) else value  # --batch=8 for a tuple of one


def check(hints, key, value, where):
    """`value` in the type of setting `key`; raises UserError that names `where` it was set and what would be right."""
    if key not in hints:
        near = difflib.get_close_matches(key, hints, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists all settings"
        raise UserError(f"{where}: unknown setting {key!r}; {hint}")
    try:
        return convert(value, hints[key])
    except TypeError:
        raise UserError(f"{where}: {key} takes {type_name(hints[key])}, not {value!r}") from None


def from_file(path, known=()):
    """The settings that a config file assigns, as a dict; raises UserError if the file is missing or fails.
    Names in `known` count whatever they are: `value_mode = ValueMode`, without brackets, is a mistake."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such config file")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as e:  # a config file is a user's code: whatever it raises is about the file
        raise UserError(f"{path}: {type(e).__name__}: {e}") from None
    return {
        k: v
        for k, v in names.items()
        if k in known or k[0] != "_" and not isinstance(v, (types.ModuleType, type)) and not callable(v)
    }


def show_help(cls, usage):
    hints = typing.get_type_hints(cls)
    print(usage.strip(), "\n\nSettings (name=default, type, meaning):")
    for f in dataclasses.fields(cls):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        print(f"  --{f.name}={default!r}  ({type_name(hints[f.name])})\n        {f.metadata.get('help', '')}")
    sys.exit(0)


def load(cls, argv=None, positional=None, usage="", skip=()):
    """An instance of dataclass `cls`: its defaults, changed by config files and flags, left to right.

    argv: the words after the script's name. `--key=value`, `--key value`, `--flag` (true); a word that ends in .py is a
    config file; with `positional`, the name of a field, any other word goes there (appended if the field is a tuple).
    skip: settings that config files may hold for another script.
    Raises UserError for unknown names, wrong types, and whatever `cls.__post_init__` refuses with a ValueError.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    hints, values = typing.get_type_hints(cls), {}
    many = positional and typing.get_origin(hints[positional]) is tuple
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            show_help(cls, usage)
        if word.startswith("--"):
            key, eq, text = word[2:].partition("=")
            key = key.replace("-", "_")
            if key not in hints or eq:
                values[key] = check(hints, key, parse(text, hints.get(key, str)), word)
            elif words and not words[0].startswith("--") and (hints[key] is not bool or words[0].lower() in _WORDS):
                text = words.pop(0)
                values[key] = check(hints, key, parse(text, hints[key]), f"{word} {text}")
            else:
                values[key] = check(hints, key, True, word)
        elif word.endswith(".py"):
            for key, value in from_file(word, hints).items():
                if key in hints or key not in skip:
                    values[key] = check(hints, key, value, word)
        elif positional and (many or positional not in values):
            values[positional] = values.get(positional, ()) + (word,) if many else check(hints, positional, word, word)
        else:
            raise UserError(f"unexpected word {word!r}; settings are --key=value, config files end in .py, see --help")
    try:
        return cls(**values)
    except ValueError as e:
        raise UserError(str(e)) from None


def need(module):
    """Import an optional package; raises UserError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"the package {module} is not installed; run `pip install {module.split('.')[0]}`") from None


def say_error(message):
    """One line on stderr, exit code 2. Under torchrun each rank speaks for itself: the cause may be its node or GPU."""
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: " * (rank != "0") + f"error: {message}", file=sys.stderr)
    sys.exit(2)


def run(main):
    """Call `main()` as a script does: bad input, a full disk or a path that does not serve end with a sentence."""
    try:
        main()
    except UserError as e:
        say_error(e)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        remedy = "; free some space and run it again" if e.errno in _FULL else ""
        say_error(f"{e.filename or 'a file'} cannot be read or written: {e.strerror}{remedy}")
