"""Settings of every stage: a dataclass's defaults, then config files and flags from left to right, each one checked.

    python train.py config/size_82m.py config/resformer.py --seed=1 --compile false

A config file is plain Python: its top-level names are settings (`learning_rate = 3e-4`). Names that start with an
underscore, modules, functions and classes are ignored. The file is executed, so only use files that you trust.
Settings stored in checkpoints are JSON and are never executed.

This file imports nothing heavy, so a script can check its settings before it loads torch.
"""

import ast
import contextlib
import dataclasses
import difflib
import errno
import importlib
import math
import os
import reprlib
import runpy
import sys
import types
import typing

from configurator import UserError

_WORDS = {"true": True, "on": True, "false": False, "off": False, "none": None}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, over quota, over the file size limit


def require(ok, message):
    """Raise ValueError with `message` unless `ok`."""
    if not ok:
        raise ValueError(message)


def setting(default, help, least=None, most=None, group=None, positional=False):
    """A dataclass field that is a setting.

    help: its line in --help. least, most: its range, both ends included.
    group: the heading in --help of this setting and of those after it. positional: takes the words without a `--`.
    """
    metadata = {"help": help, "least": least, "most": most, "group": group, "positional": positional}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(config):
    """Raise ValueError if a number in a dataclass of settings is outside its range, infinite or NaN."""
    for f in dataclasses.fields(config):
        least, most = f.metadata.get("least"), f.metadata.get("most")
        values = getattr(config, f.name)
        if not isinstance(values, tuple):
            values = (values,)
        for value in values:
            if value is None:
                continue
            if least is not None and not least <= value < math.inf:
                raise ValueError(f"{f.name}={value} must be at least {least}")
            if most is not None and value > most:
                raise ValueError(f"{f.name}={value} must be at most {most}")


def type_name(hint):
    """A type hint as --help and errors show it: `int`, `'sdpa' or 'eager'`, `true or false`, `tuple of str`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple:
        return f"tuple of {type_name(args[0])}"
    if origin is typing.Annotated:
        return f"{type_name(args[0])} from {args[1][0]} to {args[1][1]}"
    if origin is dict or isinstance(hint, dict):
        return "object"
    words = {type(None): "none", bool: "true or false"}
    return words.get(hint) or getattr(origin or hint, "__name__", str(hint))


def convert(value, hint, where):
    """`value` as a `hint`; raises UserError that begins with `where`, the place of the value.

    hint: a type, also Literal, A | B, tuple[A, ...], dict[K, V]; Annotated[int, (least, most)]; a dataclass, made of a
    dict; or a schema {field: hint} of a dict that may have more fields. 5e3 is an int, 5.5 and '5' are not. Numbers are
    finite.
    """
    # each branch returns, or falls through to the error at the end
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            if dataclasses.is_dataclass(arg) and isinstance(value, dict):
                return convert(value, arg, where)  # whose error says more than that nothing fits
            with contextlib.suppress(UserError):
                return convert(value, arg, where)
    elif origin is typing.Annotated:
        number, (least, most) = convert(value, args[0], where), args[1]
        if least <= number <= most:
            return number
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(convert(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            return {convert(k, args[0], where): convert(v, args[1], f"{where}.{k}") for k, v in value.items()}
    elif isinstance(value, dict) and (isinstance(hint, dict) or dataclasses.is_dataclass(hint)):
        return convert_object(value, hint, where)
    elif hint in (int, float):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            if hint is float:
                return float(value)
            if abs(value) < 2**63 and int(value) == value:
                return int(value)
    elif hint is str:
        if isinstance(value, str) and "\0" not in value:  # no name of a file can hold it
            return value
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise UserError(f"{where} takes {type_name(hint)}, not {reprlib.repr(value)}")


def convert_object(values, hint, where):
    """A dict by a schema, or as a dataclass, which has no other fields; see `convert`."""
    if isinstance(hint, dict):
        missing = hint.keys() - values.keys()
        if missing:
            raise UserError(f"{where} lacks the field {min(missing)!r}")
        return values | {name: convert(values[name], hint[name], f"{where}.{name}") for name in hint}
    hints = typing.get_type_hints(hint)
    unknown = values.keys() - hints.keys()
    if unknown:
        raise UserError(f"{where} has an unknown field {min(unknown)!r}")
    try:
        return hint(**{name: convert(value, hints[name], f"{where}.{name}") for name, value in values.items()})
    except ValueError as e:
        raise UserError(str(e) if isinstance(e, UserError) else f"{where}: {e}") from None


def parse(text, hint):
    """The value of a flag's text for type `hint`: text where a str fits, else a Python literal."""
    hints = (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hints = typing.get_args(hint)
    word = text.lower()
    if word in _WORDS and type(_WORDS[word]) in hints:
        return _WORDS[word]
    if str in hints or any(typing.get_origin(h) is typing.Literal for h in hints):
        return text
    takes_tuple = any(typing.get_origin(h) is tuple for h in hints)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return tuple(text.split(",")) if takes_tuple else text  # --domains=a,b is a tuple of names
    if takes_tuple and isinstance(value, (int, float)):
        return (value,)  # --batch=8 is a tuple of one
    return value


def check(hints, key, value, where):
    """`value` in the type of setting `key`; raises UserError with the place that set it and the type it takes."""
    if key not in hints:
        near = difflib.get_close_matches(key, hints, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists all settings"
        raise UserError(f"{where}: unknown setting {key!r}; {hint}")
    if len(where) > 80:
        where = f"{where[:80]}…"
    return convert(value, hints[key], f"{where}: {key}")


def from_file(path, known=()):
    """The settings that a config file assigns, as a dict; raises UserError if the file is missing or fails.
    Names in `known` count whatever they are: `value_mode = ValueMode`, without brackets, is a mistake."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such config file")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as e:  # a config file is a user's code: whatever it raises is about the file
        raise UserError(f"{path}: {type(e).__name__}: {e}") from None
    found = {}
    for name, value in names.items():
        is_setting = name[0] != "_" and not isinstance(value, (types.ModuleType, type)) and not callable(value)
        if is_setting or name in known:
            found[name] = value
    return found


def show_help(cls, usage):
    hints = typing.get_type_hints(cls)
    print(usage.strip())
    print("\nSettings, as --name=value or `name = value` in a config file (default, type, meaning):")
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        if f.metadata.get("group"):
            print(f"\n{f.metadata['group']}")
        print(f"  --{f.name}={default!r}  ({type_name(hints[f.name])})")
        if f.metadata.get("help"):
            print(f"        {f.metadata['help']}")
    sys.exit(0)


def read_flag(word, following, hints):
    """(setting, value) of a flag. Its value may be the first of the following words, which is then taken out."""
    key, equals, text = word[2:].partition("=")
    key = key.replace("-", "_")
    takes_next = following and not following[0].startswith("--")
    if hints.get(key) is bool:
        takes_next = takes_next and following[0].lower() in _WORDS
    if key in hints and not equals:
        if not takes_next:
            return key, check(hints, key, True, word)
        text = following.pop(0)
        word = f"{word} {text}"
    return key, check(hints, key, parse(text, hints.get(key, str)), word)


def load_settings(cls, words, usage="", ignore_unknown_in_files=False):
    """An instance of dataclass `cls`: its defaults, changed by config files and flags from left to right.

    words: what follows the script's name: `--key=value`, `--key value`, `--flag` (true). A word that ends in .py is a
    config file. Other words go to the positional setting, all of them if it is a tuple.
    Raises UserError for unknown names, wrong types, and whatever `cls.__post_init__` rejects with a ValueError.
    """
    hints, values, words = typing.get_type_hints(cls), {}, list(words)
    positional = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("positional")), None)
    takes_many = positional and typing.get_origin(hints[positional]) is tuple
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            show_help(cls, usage)
        elif word.startswith("--"):
            key, value = read_flag(word, words, hints)
            values[key] = value
        elif word.endswith(".py"):
            for key, value in from_file(word, hints).items():
                if key in hints or not ignore_unknown_in_files:
                    values[key] = check(hints, key, value, word)
        elif takes_many:
            values[positional] = (*values.get(positional, ()), word)
        elif positional and positional not in values:
            values[positional] = check(hints, positional, word, word)
        else:
            raise UserError(f"unexpected word {word!r}; settings are --key=value, config files end in .py, see --help")
    try:
        return cls(**values)
    except ValueError as e:
        raise UserError(str(e)) from None


def command_line(cls, usage):
    """The settings of a script from its command line. A mistake ends the script with one sentence and exit code 2.

    A script calls this before it imports torch, so that a typo is answered at once.
    """
    try:
        return load_settings(cls, sys.argv[1:], usage)
    except UserError as e:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)  # under torchrun all ranks read the same words: rank 0 says it for all
        say_error(e)
    except BrokenPipeError:
        end_of_pipe()


def need(module, package=""):
    """Import an optional package; raises UserError that says how to get it. package: its name for pip, if another."""
    name = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as e:
        is_missing = isinstance(e, ModuleNotFoundError) and (e.name or name).split(".")[0] == name
        if is_missing:
            raise UserError(f"the package {module} is not installed; run `pip install {package or name}`") from None
        raise UserError(f"the package {name} is installed, but cannot be imported: {e}") from None


def first_line(error):
    """The first line of an error's message, or "?" if it has none."""
    return (str(error).strip() or "?").splitlines()[0]


def say_error(message):
    """Print one line on stderr and exit with code 2. Under torchrun the line names the rank, unless it is rank 0."""
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"rank {rank}: "
    text = " ".join(str(message).split())  # one line, whatever a user's value has in it
    print(f"{prefix}error: {text}", file=sys.stderr, flush=True)
    sys.exit(2)


def end_of_pipe():
    """Exit without a traceback where nobody reads the output any more, as in `--help | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def run_main(main, *args):
    """Call `main(*args)` as a script does: bad input, a full disk or an unusable path end with one sentence."""
    try:
        main(*args)
    except UserError as e:
        say_error(e)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        end_of_pipe()
    except OSError as e:
        remedy = "; free some space and run it again" if e.errno in _DISK_FULL else ""
        say_error(f"{e.filename or 'a file'} cannot be read or written: {e.strerror or e}{remedy}")
