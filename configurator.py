"""Settings: a dataclass's defaults, then config files and flags from left to right.

    python train.py config/size_82m.py config/resformer.py --seed=1 --compile=false

A config file is plain Python, and its top-level names are settings, as in nanoGPT: only use files that you trust. A
typo, a wrong type or a number out of range ends with one sentence instead of training the wrong model.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import os
import re
import runpy
import sys
import types
import typing

WORDS = {"true": "True", "on": "True", "false": "False", "off": "False", "none": "None"}
UNIONS = (typing.Union, types.UnionType)


class UserError(ValueError):
    """Bad input. The message is the one sentence that the user sees, and the exit code is 2."""


def setting(default, help, least=None, most=None, group=None, positional=False, files_with=None):
    """A dataclass field with its line in --help and its range, both ends included.

    group: a heading in --help, above this setting. positional: it takes the words without a `--`. files_with: it also
    takes the config files that assign this name.
    """
    metadata = {"help": help, "least": least, "most": most, "group": group}
    metadata |= {"positional": positional, "files_with": files_with}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Settings that may name a file or folder, besides those ending in _dir and _file.
PATHS = ("run", "runs", "modes", "words", "init_from", "resume", "public", "corpus")
# Settings of nanoGPT whose names do not lead to ours, and what they are here.
NANOGPT = {
    "batch_size": "set micro_batch, and batch_tokens for a whole step over all ranks", "dataset": "set data_dir",
    "gradient_accumulation_steps": "it follows from batch_tokens and micro_batch", "lr_decay_iters": "set max_steps",
    "min_lr": "set final_lr_ratio, a share of learning_rate", "decay_lr": "set final_lr_ratio=1 for no decay",
    "max_iters": "set max_steps", "eval_interval": "set eval_every", "eval_iters": "set eval_tokens",
    "log_interval": "set log_every", "wandb_log": "set log=wandb", "wandb_project": "export WANDB_PROJECT=…",
    "always_save_checkpoint": "set save_every", "start": "set prompt", "eval_only": "run eval.py --task=loss",
    "backend": "it follows from device", "wandb_run_name": "it is the last part of out_dir",
    "bias": "set arch=gpt2, which has biases", "dropout": "no model has any", "init_from=resume": "set resume=auto",
    "init_from=scratch": "leave it out", "init_from=gpt2": "no weights of GPT-2 can be read",
}  # fmt: skip

types_of = functools.cache(typing.get_type_hints)  # {setting: its type} of a dataclass


def type_name(hint):
    """A type as --help and errors show it: `int`; `'sdpa' or 'eager'`; `a tuple of str`; `bool or None`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return f"a tuple of {type_name(args[0])}"
    if origin is dict:
        return "a dict such as {'text': 0.5}"
    if args:
        return " or ".join(repr(arg) if origin is typing.Literal else type_name(arg) for arg in args)
    return "None" if hint is type(None) else hint.__name__


def cast(value, hint):
    """`value` as a `hint`, or TypeError. 5e3 is an int, True is not; a list makes a tuple, a dict a dataclass."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        for arg in args:
            with contextlib.suppress(TypeError):
                return cast(value, arg)
    if origin is typing.Literal and isinstance(value, str) and value in args:
        return value
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(cast(v, args[0]) for v in value)
    if origin is dict and isinstance(value, dict):
        return {cast(k, args[0]): cast(v, args[1]) for k, v in value.items()}
    if hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if hint is int and type(value) in (int, float) and abs(value) < 2**63 and int(value) == value:
        return int(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return hint(**value)
    if origin is None and hint not in (int, float) and isinstance(value, hint):
        return value
    raise TypeError


def in_words(value):
    """What a user gave, as text, shortened if it is long. A config file may make objects that have no repr."""
    try:
        said = repr(value)
    except Exception:  # it is the user's code
        return f"an object of class {type(value).__name__}"
    return said if len(said) < 80 else f"{said[:60]}…"


def expanded(value):
    """A path, or a tuple of paths, without ~: a shell leaves --out_dir=~/x as it is, and we would make a folder "~"."""
    if isinstance(value, (tuple, list)):
        return tuple(map(expanded, value))
    return os.path.expanduser(value) if isinstance(value, str) else value


def check_fields(config):
    """Convert each field of a settings dataclass to its type, and check its range. For `__post_init__`."""
    for name, hint in types_of(type(config)).items():
        value, metadata = getattr(config, name), config.__dataclass_fields__[name].metadata
        if name.endswith(("_dir", "_file")) or name in PATHS:
            value = expanded(value)
        try:
            value = cast(value, hint)
        except TypeError:
            said = in_words(value)
            is_alone = "a tuple" in type_name(hint) and not isinstance(value, (tuple, list))
            comma = "; a comma makes a tuple, as in (x,)" * is_alone
            raise UserError(f"{name} takes {type_name(hint)}, not {said}{comma}") from None
        least, most = metadata.get("least"), metadata.get("most")
        for number in value if isinstance(value, tuple) else (value,):
            if least is not None and number is not None and number < least:
                raise UserError(f"{name}={number} must be at least {least}")
            if most is not None and number is not None and number > most:
                raise UserError(f"{name}={number} must be at most {most}")
        object.__setattr__(config, name, value)


def parse(text, hint):
    """The value of a flag's text: 1e-3, true, (0, 4), {'C4': 0.5}, or a,b for a tuple; where text fits, the text."""
    origin = typing.get_origin(hint)
    if hint is str or origin is typing.Literal or (origin in UNIONS and str in typing.get_args(hint)):
        return text
    try:
        value = ast.literal_eval(WORDS.get(text.lower(), text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return tuple(text.split(",")) if origin is tuple else text
    return (value,) if origin is tuple and not isinstance(value, tuple) else value


def read_config(path):
    """The settings that a config file assigns, {name: value}. Modules, functions, classes and _names do not count."""
    if not os.path.isfile(path):
        raise UserError(f"there is no config file {path}")
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as e:  # it is the user's code, so it may raise anything
        why = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise UserError(f"{path}: {why}{e}") from None
    is_code = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
    return {name: value for name, value in found.items() if name[0] != "_" and not isinstance(value, is_code)}


def show_help(cls, usage):
    print(usage.strip() + "\n\nSettings, as --name=value or `name = value` in a config file (default, type, meaning):")
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        print(f"\n{f.metadata['group']}\n" if f.metadata["group"] else "", end="")
        print(f"  --{f.name}={default!r}  ({type_name(types_of(cls)[f.name])})\n        {f.metadata['help']}")
    sys.exit(0)


def load_settings(cls, words, usage="", skip_unknown=False):
    """A `cls` from the words after a script's name: --key=value, --key value, --flag, config.py, or what the positional
    setting takes. skip_unknown: config files may name settings of another script."""
    hints, values, flags, others, words = types_of(cls), {}, set(), [], list(words)
    positional = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("positional")), None)
    files_with = positional and cls.__dataclass_fields__[positional].metadata["files_with"]
    takes_many = positional and typing.get_origin(hints[positional]) is tuple
    while words:
        word = words.pop(0)
        is_file = word.endswith(".py") and not word.startswith("--")
        found = read_config(expanded(word)) if is_file else {}
        if word in ("-h", "--help"):
            show_help(cls, usage)
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            if not equals:  # a flag is true, any other setting takes the next word
                is_flag = hints.get(name) in (bool, bool | None)
                if name in hints and not is_flag and (not words or words[0].startswith("--")):
                    raise UserError(f"--{name} needs a value: {cls.__dataclass_fields__[name].metadata['help']}")
                text = "true" if is_flag or not words else words.pop(0)
            if name in flags and name.endswith("_dir"):  # of two folders we would read the last
                raise UserError(f"--{name} is given twice; it takes one folder")
            flags.add(name)
            values[name] = parse(text, hints.get(name, str))
        elif is_file and files_with not in found:  # one that assigns files_with goes to the positional setting
            near = {name for name in found if name in NANOGPT or difflib.get_close_matches(name, hints, 1, 0.85)}
            if (files_with or skip_unknown) and not near:
                raise UserError(f"{word} sets none of this script's settings, such as {files_with or 'value_mode'}")
            values |= {name: found[name] for name in found if name in near or not skip_unknown}
        elif takes_many or (positional and not others):
            others.append(word)
            values[positional] = tuple(others) if takes_many else word
        else:
            raise UserError(f"unexpected word {word!r}; settings are --key=value, config files end in .py; see --help")
    for name, value in values.items():
        theirs = f"{name}={value}" if name in hints and isinstance(value, str) else name.replace("-", "_")
        ours = re.match(r"set (\w+)", NANOGPT.get(theirs, ""))
        is_theirs = theirs in NANOGPT and (not ours or ours[1] in hints)  # this script may lack our counterpart
        if is_theirs and not (name in hints and os.path.exists(value)):  # a run may be called gpt2
            raise UserError(f"{theirs} is a nanoGPT setting; here, {NANOGPT[theirs]}")
        if name not in hints:
            initials = [hint for hint in hints if name == "".join(word[0] for word in hint.split("_"))]  # lr
            near = [f" (did you mean {one!r}?)" for one in initials or difflib.get_close_matches(name, hints, 1)]
            raise UserError(f"unknown setting {name!r}{''.join(near[:1])}; see --help")
    return cls(**values)


def need(module, package=""):
    """Import an optional package, or say how to get it. package: its name for pip, if it differs."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = package or module.split(".")[0]
        raise UserError(f"{module} cannot be imported ({e}); run `pip install {package}`") from None


def run(main, usage, skip_unknown=False):
    """Call a script's `main(cfg)` with the settings of the command line. Bad input ends with one sentence on stderr and
    exit code 2. Under torchrun each rank that fails says which one it is."""
    if hasattr(sys.stdout, "reconfigure"):  # text that the terminal cannot show must not end the work
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cls = typing.get_type_hints(main)["cfg"]
        return main(load_settings(cls, sys.argv[1:], usage or "", skip_unknown))  # python -OO has no docstrings
    except UserError as e:
        message = e
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads the output any more, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FileExistsError, NotADirectoryError) as e:
        message = f"{e.filename}: there is a file or a broken link where a folder should be; name another folder"
    except OSError as e:  # a full disk, a folder without permission
        message = f"{e.filename or 'a file'} cannot be read or written: {e.strerror or e}"
    rank = os.environ.get("RANK", "0")
    print("" if rank == "0" else f"rank {rank}: ", "error: ", " ".join(str(message).split()), sep="", file=sys.stderr)
    sys.exit(2)
