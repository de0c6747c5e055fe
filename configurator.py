"""Settings: a dataclass's defaults, then config files and flags from left to right.

    python train.py config/size_82m.py config/resformer.py --seed=1 --compile=false

A config file is plain Python, and its top-level names are settings. That is nanoGPT's idea, with one difference: a
typo, a wrong type or a number out of range ends with one sentence instead of training the wrong model. Python code
can do anything, so only use config files that you trust.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import os
import reprlib
import runpy
import sys
import types
import typing

WORDS = {"true": True, "on": True, "false": False, "off": False, "none": None}


class UserError(ValueError):
    """Bad input. The message is the one sentence that the user sees, and the exit code is 2."""


def setting(default, help, least=None, most=None, group=None, positional=False):
    """A dataclass field with its line in --help and its range, both ends included.

    group: a heading in --help, above this setting. positional: it takes the words without a `--`.
    """
    metadata = {"help": help, "least": least, "most": most, "group": group, "positional": positional}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


types_of = functools.cache(typing.get_type_hints)  # {setting: its type} of a dataclass


def type_name(hint):
    """A type as --help and errors show it: int, Literal['sdpa', 'eager'], tuple[str, ...], bool | None."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def cast(value, hint):
    """`value` as a `hint`, or TypeError. 5e3 is an int, True is not; a list makes a tuple, a dict a dataclass."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            with contextlib.suppress(TypeError):
                return cast(value, arg)
    elif origin is typing.Literal:
        if any(type(value) is type(arg) and value == arg for arg in args):
            return value
    elif origin is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(cast(v, args[0]) for v in value)
    elif origin is dict:
        if isinstance(value, dict):
            return {cast(k, args[0]): cast(v, args[1]) for k, v in value.items()}
    elif hint is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif hint is int:
        if type(value) in (int, float) and abs(value) < 2**63 and int(value) == value:
            return int(value)
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return hint(**value)
    elif isinstance(value, hint):
        return value
    raise TypeError


def check(cls, name, value, where=""):
    """`value` in the type and range of setting `name`. where: who set it, for the sentence."""
    hints = types_of(cls)
    where = f"{where[:80]}: " if where else ""
    if name not in hints:
        near = difflib.get_close_matches(name, hints, 1, 0.5)
        raise UserError(f"{where}unknown setting {name!r}; {f'did you mean {near[0]!r}?' if near else 'see --help'}")
    try:
        value = cast(value, hints[name])
    except TypeError:
        raise UserError(f"{where}{name} takes {type_name(hints[name])}, not {reprlib.repr(value)}") from None
    metadata = cls.__dataclass_fields__[name].metadata
    least, most = metadata.get("least"), metadata.get("most")
    for number in value if isinstance(value, tuple) else (value,):
        if least is not None and number is not None and number < least:
            raise UserError(f"{where}{name}={number} must be at least {least}")
        if most is not None and number is not None and number > most:
            raise UserError(f"{where}{name}={number} must be at most {most}")
    return value


def check_fields(config):
    """Bring each field of a settings dataclass into its type, and check its range. For `__post_init__`."""
    for name in types_of(type(config)):
        object.__setattr__(config, name, check(type(config), name, getattr(config, name)))


def parse(text, hint):
    """The value of a flag's text: 1e-3, true, (0, 4), {'C4': 0.5}, or a,b for a tuple; where text fits, the text."""
    hints = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    is_tuple = any(typing.get_origin(h) is tuple for h in hints)
    if str in hints or any(typing.get_origin(h) is typing.Literal for h in hints):
        return text
    word = text.lower()
    if word in WORDS and type(WORDS[word]) in hints:  # bench's --compile=on is the name of a way, not true
        return WORDS[word]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return tuple(text.split(",")) if is_tuple else text
    return (value,) if is_tuple and not isinstance(value, tuple) else value


def read_config(path, hints):
    """The settings that a config file assigns, {name: value}. Modules, functions, classes and _names are none."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such config file")
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as e:  # it is the user's code, so it may raise anything
        raise UserError(f"{path}: {type(e).__name__}: {e}") from None
    is_code = (types.ModuleType, type, types.FunctionType)
    return {k: v for k, v in found.items() if k in hints or not (k[0] == "_" or isinstance(v, is_code))}


def show_help(cls, usage):
    print(usage.strip() + "\n\nSettings, as --name=value or `name = value` in a config file (default, type, meaning):")
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        print(f"\n{f.metadata['group']}\n" if f.metadata.get("group") else "", end="")
        print(f"  --{f.name}={default!r}  ({type_name(types_of(cls)[f.name])})\n        {f.metadata.get('help', '')}")
    sys.exit(0)


def load_settings(cls, words, usage="", skip_unknown=False):
    """A `cls` of the words behind a script's name: --key=value, --key value, --flag, config.py, or what the positional
    setting takes. skip_unknown: config files may name settings of another script."""
    hints, values, words = types_of(cls), {}, list(words)
    positional = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("positional")), None)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            show_help(cls, usage)
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if not equals:  # the value is the next word, or true
                takes_next = words and not words[0].startswith("--") and name in hints
                if hints.get(name) in (bool, bool | None):
                    takes_next = takes_next and words[0].lower() in WORDS
                text = words.pop(0) if takes_next else "true"
            values[name] = check(cls, name, parse(text, hints.get(name, str)), word)
        elif word.endswith(".py"):
            for name, value in read_config(word, hints).items():
                if name in hints or not skip_unknown:
                    values[name] = check(cls, name, value, word)
        elif positional and typing.get_origin(hints[positional]) is tuple:
            values[positional] = (*values.get(positional, ()), word)
        elif positional and positional not in values:
            values[positional] = check(cls, positional, word, word)
        else:
            raise UserError(f"unexpected word {word!r}; settings are --key=value, config files end in .py, see --help")
    return cls(**values)


def need(module, package=""):
    """Import an optional package, or say how to get it. package: its name for pip, if that is another."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = package or module.split(".")[0]
        raise UserError(f"{module} cannot be imported ({e}); run `pip install {package}`") from None


def run(main, usage, skip_unknown=False):
    """Call a script's `main(cfg)` with the settings of the command line. Bad input ends with one sentence on stderr and
    exit code 2. Under torchrun each rank that fails says which one it is."""
    try:
        return main(load_settings(typing.get_type_hints(main)["cfg"], sys.argv[1:], usage, skip_unknown))
    except UserError as e:
        message = e
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads the output any more, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:  # a full disk, a folder without permission
        message = f"{e.filename or 'a file'} cannot be read or written: {e.strerror or e}"
    rank = os.environ.get("RANK", "0")
    print("" if rank == "0" else f"rank {rank}: ", "error: ", " ".join(str(message).split()), sep="", file=sys.stderr)
    sys.exit(2)
