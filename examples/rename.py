"""Python text whose names are replaced, to see what a model gains by copying them (results/PLAN.md, experiment B).

    python prepare.py pysource --tokenizer=bpe:2048 --out_dir=data/night
    python -m examples.rename data/night texts
    python prepare.py files --input_dir=texts/each --tokenizer_file=data/night --out_dir=data/each

The second command writes the code of a data folder three times. In texts/own the names stay. In texts/each every
occurrence of a name becomes a name that is drawn anew, so that names can't be copied. In texts/same a name becomes
another one throughout its file, so that they can. All have the same documents, in the same order and the same splits.

A new name is drawn with the frequency that it has in the corpus, among names of as many tokens. Keywords, builtins,
names like __init__, self and cls stay, and so do comments and strings, f-strings included. Attributes of imported
modules don't, because they can be copied like any other name. We leave out docstrings, which are a domain of their own,
and what Python can't parse.
"""

import ast
import builtins
import io
import itertools
import json
import keyword
import random
import sys
import tokenize
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data import load_manifest
from common.files import read_record, write_text
from common.report import progress
from common.tokenizer import Tokenizer
from configurator import UserError, check_fields, run, setting
from prepare import SETTINGS

PROSE = "prose"  # prepare.py's domain of docstrings
SOFT_KEYWORDS = {"_", "case", "match", "type"}  # keyword.softkwlist grows from Python to Python, and so do builtins
NEW = {"PythonFinalizationError", "_IncompleteInputError"}  # since 3.13
KEPT = {*keyword.kwlist, *SOFT_KEYWORDS, *dir(builtins), "self", "cls"} - NEW
# tokens of f-strings since 3.12, and of t-strings since 3.14
STARTS, ENDS = ({getattr(tokenize, f"{kind}STRING_{end}", None) for kind in "FT"} for end in ("START", "END"))
DRAWS = 100  # for a name that the file does not have yet, before we take the most frequent one


@dataclass
class RenameConfig:
    folders: tuple[str, ...] = setting((), "data of prepare.py pysource, and a new folder for texts", positional=True)
    seed: int = setting(0, "random seed for the new names", least=0)

    def __post_init__(self):
        check_fields(self)
        if len(self.folders) != 2:
            raise UserError("name the data and a new folder: `python -m examples.rename data/night texts`")


def is_kept(name):
    return name in KEPT or (name.startswith("__") and name.endswith("__"))


def pieces_of(text):
    """[text, name, text, name, …, text]: a Python text cut around the names that are to be replaced; joined they are
    the text again. None if Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    starts = [0, *itertools.accumulate(map(len, io.StringIO(text)))]  # of each line
    pieces, end, depth = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # inside an f-string? Before 3.12 it was a single token
        if token.type in STARTS:
            depth += 1
        if token.type in ENDS:
            depth -= 1
        if token.type == tokenize.NAME and depth == 0 and not is_kept(token.string):
            start = starts[token.start[0] - 1] + token.start[1]
            pieces += [sys.intern(text[end:start]), sys.intern(token.string)]
            end = start + len(token.string)
    return [*pieces, text[end:]]


class Names:
    """The names of a corpus, by their length in tokens. counts: {name: occurrences}; lengths: {name: tokens}."""

    def __init__(self, counts, lengths):
        self.lengths, self.alike = lengths, defaultdict(list)  # {tokens: names, the most frequent first}
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            self.alike[lengths[name]].append(name)
        # how often each of them and those before it occur together
        self.sums = {n: list(itertools.accumulate(counts[name] for name in names)) for n, names in self.alike.items()}

    def draw(self, rng, name):
        """A name of as many tokens as `name`, with the frequency that it has among those. It may be `name` itself."""
        n = self.lengths[name]
        return rng.choices(self.alike[n], cum_weights=self.sums[n])[0]

    def draw_each(self, rng, names):
        """A new name for each occurrence."""
        return [self.draw(rng, name) for name in names]

    def draw_same(self, rng, names):
        """A new name for each name: different names stay different."""
        new, taken = {}, set()
        for name in dict.fromkeys(names):
            drawn = (self.draw(rng, name) for _ in range(DRAWS))
            # there is always one left: the names of the file are among those of the corpus
            candidates = itertools.chain(drawn, self.alike[self.lengths[name]])
            new[name] = next(one for one in candidates if one not in taken)
            taken.add(new[name])
        return [new[name] for name in names]


def documents(path, tokenizer):
    """The texts of a token file."""
    ids = np.fromfile(path, "<u2")
    ends = np.flatnonzero(ids == tokenizer.end)
    return [tokenizer.decode(document[:-1]) for document in np.split(ids, ends + 1)[:-1]]


def main(cfg: RenameConfig):
    data_dir, out = map(Path, cfg.folders)
    manifest, tokenizer = load_manifest(data_dir), Tokenizer.load(data_dir / "tokenizer.json")
    if read_record(data_dir / "settings.json", SETTINGS)["source"] != "pysource":
        raise UserError(f"{data_dir} is not data of `prepare.py pysource`, so there are no names to replace")
    if out.exists():
        raise UserError(f"{out} exists; name a new folder, because prepare.py would also read what is there")

    # cut every document around its names, and count them
    cut, n_left_out, counts = {}, 0, Counter()
    files = [(split, d, about) for split, of in manifest["splits"].items() for d, about in of.items() if d != PROSE]
    with progress("reading", sum(about["documents"] for *_, about in files), "doc") as bar:
        for split, domain, about in files:
            cut[split, domain] = []
            for text in documents(data_dir / about["file"], tokenizer):
                pieces = pieces_of(text)
                if pieces:
                    cut[split, domain].append(pieces)
                    counts.update(pieces[1::2])
                else:
                    n_left_out += 1
                bar.update()

    # write them with their own names, and with new ones
    names, n_documents = (
        Names(counts, {name: len(tokenizer.encode(name)) for name in counts}),
        sum(map(len, cut.values())),
    )
    hows = {"own": lambda rng, old: old, "each": names.draw_each, "same": names.draw_same}
    with progress("writing", len(hows) * n_documents, "doc") as bar:
        for (how, draw), ((split, domain), texts) in itertools.product(hows.items(), cut.items()):
            lines = []
            for i, pieces in enumerate(texts):
                new = list(pieces)
                new[1::2] = draw(random.Random(f"{cfg.seed}/{split}/{domain}/{i}"), pieces[1::2])
                lines.append(json.dumps({"text": "".join(new)}) + "\n")
                bar.update()
            write_text(out / how / domain / f"{split}.jsonl", "".join(lines))
    print(f"{n_documents:,} documents, {counts.total():,} occurrences of {len(counts):,} names")
    print(f"left out: {n_left_out} that Python cannot parse, and docstrings")


if __name__ == "__main__":
    run(main, __doc__)
