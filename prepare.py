"""Text to tokens: read documents, train or load a tokenizer, write one uint16 file per domain and split.

    python prepare.py pysource --tokens=8e6                      # Python code and docstrings of this environment
    python prepare.py pysource --packages=torch,numpy            # only these packages
    python prepare.py slimpajama --input_dir=/data/SlimPajama --tokenizer_file=tokenizer.json
    python prepare.py slimpajama --hub_id=DKYoon/SlimPajama-6B --tokens=5e9
    python prepare.py files --input_dir=texts                    # .txt, .jsonl, .parquet, .gz, …, recursively

Stop it at any time, even with kill -9: the same command continues, with the same result, byte for byte. That works
because each batch of documents becomes a file of its own in out_dir/parts, which is either complete or absent. We join
the parts in order. A restart reads those that exist, instead of encoding their text again. They are deleted at the
end, so until then the folder takes up to twice the disk space of the result (80 GB for 20B tokens).

Read next: texts.py (what we read), tokenizer.py, data.py (the layout of the result, and its reader).
"""

import contextlib
import functools
import gc
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from common.cores import cores
from common.data import MANIFEST, load_manifest, plain_sum
from common.files import hold, read_record, reading, sha256, write_atomic, write_record, writing
from common.report import heard, progress
from common.texts import find_inputs, raw_items, sizes_of, to_documents
from common.tokenizer import EOT, PATTERN, Tokenizer, make_spec, read_vocabulary, vocabulary_file
from configurator import UserError, check_fields, need, run, setting

PART = "prepare.py's part"
SETTINGS = "prepare.py's settings"
BATCH_BYTES = 2**20  # of text that a worker gets at a time. What is held out depends on it if --tokens ends the work
CONTENT_BYTES = 2**32  # of input that we read a second time to tell whether it is the same: 4 GiB
MAY_DIFFER = ("out_dir", "input_dir", "workers")  # settings that a continued run may change
ON_HUB = {"gpt2": "openai-community/gpt2", "neox": "EleutherAI/gpt-neox-20b"}
# Table 2 of the paper, https://arxiv.org/abs/2410.17897
PAPER_MIXTURE = dict(CommonCrawl=0.5, C4=0.2, Github=0.1, Book=0.05, ArXiv=0.05, Wikipedia=0.05, StackExchange=0.05)


@dataclass
class PrepareConfig:
    source: Literal["pysource", "slimpajama", "files"] = setting("pysource", "what to read", positional=True)
    out_dir: str = setting("", "where the result goes; empty = data/<source>", group="Input and output")
    input_dir: str = setting("", "folder to read: any texts for files, SlimPajama's layout for slimpajama")
    packages: tuple[str, ...] = setting((), "for pysource: read only these installed packages; empty = all")
    text_field: str = setting("text", "column of JSON and .parquet files that holds the text")
    domains: Literal["folders", "one"] = setting("folders", "for files: a domain per top-level folder, or one for all")
    hub_id: str = setting("cerebras/SlimPajama-627B", "data set on the hub, for slimpajama without input_dir")
    revision: str = setting("", "commit of the hub's data set; it pins the data, so you can get it again")
    tokenizer: str = setting("", "bpe:<size>, gpt2 or neox; empty = bpe:4096 (neox for slimpajama)", group="Tokenizer")
    tokenizer_file: str = setting("", "a vocabulary to reuse: a data folder, run, export, or file of gpt2 or neox")
    bpe_bytes: int = setting(16_000_000, "bytes of train text that bpe is trained on", least=1)
    tokens: int | None = setting(None, "to train on; 0 = all; none = all (slimpajama: 20e9)", least=0, group="Amounts")
    val_tokens: int = setting(0, "validation tokens per domain; 0 = all there are", least=0)
    val_fraction: float = setting(0.05, "share of documents held out, if there is no validation split", 0, 0.5)
    mixture: dict[str, float] = setting(
        {}, "weight per domain; others are dropped; empty = the text's shares (the paper's for slimpajama)"
    )
    seed: int = setting(0, "random seed for the order of the input files", group="Work")
    workers: int = setting(0, "processes; 0 = one per core", least=0)

    def __post_init__(self):
        check_fields(self)

        # What is left open depends on the source: SlimPajama is prepared as in the paper.
        is_slimpajama = self.source == "slimpajama"
        self.out_dir = self.out_dir or f"data/{self.source}"
        if self.tokenizer_file:
            self.tokenizer_file = str(vocabulary_file(self.tokenizer_file))
        else:
            self.tokenizer = self.tokenizer or ("neox" if is_slimpajama else "bpe:4096")
        if self.tokens is None:
            self.tokens = 20 * 10**9 if is_slimpajama else 0
        if not self.mixture and is_slimpajama:
            self.mixture = PAPER_MIXTURE
        if self.workers == 0:
            self.workers = cores()
        if not all(weight > 0 for weight in self.mixture.values()):
            raise UserError(f"mixture takes weights above 0, not {self.mixture}")
        total = plain_sum(self.mixture.values())
        if total == math.inf:
            remedy = "only their ratios count, so use smaller ones"
            raise UserError(f"the mixture's weights add up to infinity; {remedy}")
        self.mixture = {domain: weight / total for domain, weight in self.mixture.items()}

        # Words that would do nothing, or something other than they seem to say, are refused.
        size = re.fullmatch(r"bpe:(\d+)", self.tokenizer)
        if self.tokenizer not in ("", *ON_HUB) and not (size and 257 <= int(size[1]) <= 2**16):
            sizes = "with a size from 257 (bytes, end-of-text) to 65,536 (ids are uint16)"
            those = f"gpt2, neox or bpe:<size> {sizes}; for a file use --tokenizer_file"
            raise UserError(f"unknown tokenizer {self.tokenizer!r}; choose {those}")
        if self.input_dir and self.source == "pysource":
            raise UserError("pysource reads installed packages; to read --input_dir, begin with files or slimpajama")
        is_hub, is_bpe = is_slimpajama and not self.input_dir, self.tokenizer.startswith("bpe:")
        for name, is_read, place in (
            ("packages", self.source == "pysource", "pysource"),
            ("domains", self.source == "files", "files"),
            ("text_field", self.source != "pysource", "files and slimpajama"),
            ("hub_id", is_hub, "slimpajama without --input_dir"),
            ("revision", is_hub, "slimpajama without --input_dir"),
            ("bpe_bytes", is_bpe, "--tokenizer=bpe:<size>"),
        ):
            if not is_read and getattr(self, name) != self.__dataclass_fields__[name].default:
                raise UserError(f"--{name} is for {place}, so here it would do nothing; leave it out")
        if self.source == "files" and not self.input_dir:
            raise UserError("files needs --input_dir=<a file of text, or a folder of them>")


# --------------------------------------------------------------------------------------------------------- tokenizers


def train_texts(pool, cfg, inputs):
    """Yield the first bpe_bytes of the text that will be train text."""
    # Nothing is placed yet: this Placement only counts, so that it holds out what the later one will hold out.
    placement = Placement(cfg, inputs)
    train = [source for source in inputs if source.split == "train"]
    if cfg.source != "files":
        yield from first_texts(pool, cfg, placement, train, cfg.bpe_bytes)
        return
    # Each domain gives its share: else one large file could be all that the vocabulary knows.
    for domain, share in placement.shares.items():
        of_domain = [source for source in train if source.domain == domain]
        yield from first_texts(pool, cfg, placement, of_domain, cfg.bpe_bytes * share)


def first_texts(pool, cfg, placement, inputs, most):
    """Yield the first `most` bytes of the text of these inputs that is not held out."""
    n_bytes = 0
    batches = read_batches(cfg, inputs, lambda: n_bytes >= most)
    for items in in_workers(pool, cfg, read_batch, ((batch,) for batch in batches)):
        for docs in items:
            if placement.is_held_out(docs):
                continue
            for _, text in docs:
                if n_bytes < most:
                    n_bytes += len(text.encode())
                    yield text


def make_tokenizer(pool, cfg, inputs):
    """The Tokenizer that cfg.tokenizer names, loaded or trained."""
    path = cfg.tokenizer_file
    if cfg.tokenizer in ON_HUB and not path:
        remedy = "run again, or pass --tokenizer_file=<its tokenizer.json>"
        with reading(f"{cfg.tokenizer}'s vocabulary", "a reachable file", remedy):
            path = need("huggingface_hub").hf_hub_download(ON_HUB[cfg.tokenizer], "tokenizer.json")
    if path:
        tokenizer = read_vocabulary(path)
        if cfg.tokenizer not in ("", tokenizer.name):
            remedy = "leave out --tokenizer to use it, or --tokenizer_file to get the right one"
            raise UserError(f"{path} is the vocabulary {tokenizer.name}, not {cfg.tokenizer}; {remedy}")
        return tokenizer

    # The last id is for end-of-text, so rustbpe trains one token less.
    n_vocab = int(cfg.tokenizer.removeprefix("bpe:"))
    bpe = need("rustbpe").Tokenizer()
    print(f"training {cfg.tokenizer} on at most {cfg.bpe_bytes:,} bytes of text", flush=True)
    bpe.train_from_iterator(train_texts(pool, cfg, inputs), n_vocab - 1, pattern=PATTERN)
    ranks = [(bytes(b), i) for b, i in sorted(bpe.get_mergeable_ranks(), key=lambda rank: rank[1])]
    if len(ranks) + 1 < n_vocab:
        print(f"note: the text is too short for a vocabulary of {n_vocab:,}; the vocabulary has {len(ranks) + 1:,}")
    return Tokenizer(make_spec(cfg.tokenizer, PATTERN, ranks, {EOT: len(ranks)}))


# ------------------------------------------------------------------- batches: read in this process, encoded in workers


def read_batches(cfg, inputs, is_done):
    """Yield batches of the inputs, [(Input, item number, raw item)], each with BATCH_BYTES of text.

    is_done(): whether there are enough tokens. Results come in while we read, so we ask before each item.
    """
    batch, size = [], 0
    for source in inputs:
        for number, raw, n_bytes in raw_items(source, cfg):
            if is_done():
                return
            batch.append((source, number, raw))
            size += n_bytes
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def start_worker():
    # A syntax tree has no cycles, and looking for them takes as long as parsing.
    gc.disable()
    # Ctrl-C is for the main process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # A worker waits for work forever if the main process was killed.
    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@contextlib.contextmanager
def processes(cfg):
    """cfg.workers processes, for `in_workers`. Ctrl-C stops them, whatever the main process is doing."""
    # A forked process would inherit locks that threads of the main process hold, so we start fresh ones.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cfg.workers, context, start_worker) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            heard("stopping; finished parts are kept, and the same command continues")
            pool.shutdown(cancel_futures=True)
            raise
        except BrokenProcessPool:
            raise UserError("a worker died, perhaps for lack of memory; run again with fewer --workers") from None


def in_workers(pool, cfg, function, calls):
    """Yield function(cfg, *call) of each call, in order, computed by a pool of processes. They get a round of calls at
    a time, so that memory does not grow with the input."""
    while some := list(itertools.islice(calls, 4 * cfg.workers)):
        # map takes a list for each parameter
        yield from pool.map(functools.partial(function, cfg), *zip(*some, strict=True))


def read_batch(cfg, batch):
    """The documents of a batch: a list [(domain, text), …] for each item that has some of the mixture's domains."""
    items = []
    for item in batch:
        docs = [doc for doc in to_documents(*item, cfg) if not cfg.mixture or doc[0] in cfg.mixture]
        if docs:
            items.append(docs)
    return items


load_tokenizer = functools.cache(Tokenizer.load)  # once in each worker


def make_part(cfg, path, split, batch, full):
    """What a part holds, see `make_parts`. We encode the batch only if no earlier run has written this part.

    full: domains that need no more text. We do not encode theirs.
    """
    if not path.exists():
        tokenizer = load_tokenizer(Path(cfg.out_dir, "tokenizer.json"))
        items, arrays = read_batch(cfg, batch), [np.empty(0, "<u2")]
        # The texts become ids, and numbers take their place in the items.
        for docs in items:
            for i, (domain, text) in enumerate(docs):
                ids = arrays[0] if domain in full else tokenizer.encode_document(text)
                arrays.append(ids)
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                docs[i] = domain, len(ids), len(text.encode()), digest
        # An .npz file has a checksum of all that it holds.
        content = io.BytesIO()
        np.savez(content, name=path.name, about=json.dumps([split, items]), ids=np.concatenate(arrays))
        write_atomic(path, lambda temporary: temporary.write_bytes(content.getbuffer()))
    with reading(path, PART, "delete it: the same command makes it again"), np.load(path) as part:
        if part["name"].item() != path.name:
            raise ValueError(f"it is {part['name']}")
        return *json.loads(part["about"].item()), part["ids"]


# --------------------------------------------------------------------------------- parts and their join, in one process


class Placement:
    """Puts each document into its token file, and counts what is there.

    Where a document goes depends on the documents before it and on nothing else. So a new start decides just the same,
    and we save no counters.
    """

    def __init__(self, cfg, inputs):
        self.cfg = cfg
        # How --tokens is divided. In `files` each domain has its share of the bytes on disk.
        self.shares = cfg.mixture
        if cfg.source == "files" and not cfg.mixture:
            sizes = sizes_of(inputs)
            self.shares = {domain: size / max(1, sum(sizes.values())) for domain, size in sizes.items()}
        self.items = Counter()  # {domain: its train items so far, including those held out}
        self.first, self.n_copies = {}, 0  # {digest of a document: its split}, and how many copies we left out
        self.splits = {"val": {}, "train": {}}  # {split: {domain: its file, tokens, documents and bytes of text}}

    def is_full(self, split, domain):
        """Whether a domain's budget in a split is reached; without shares all domains share that of train."""
        files = self.splits[split]
        if split == "train" and not self.shares:
            return 0 < self.cfg.tokens <= sum(file["tokens"] for file in files.values())  # 0 tokens: all there is
        budget = self.cfg.val_tokens if split == "val" else self.cfg.tokens * self.shares[domain]
        return domain in files and 0 < budget <= files[domain]["tokens"]

    def is_done(self, split):
        """Whether no document of a split is needed any more."""
        if self.shares:
            return all(self.is_full(split, domain) for domain in self.shares)
        return split == "train" and self.is_full(split, None)

    def full(self, split):
        """The domains whose documents in a split of the input are not needed any more, not even to be held out."""
        splits = {split, "val"} if self.cfg.val_fraction > 0 else {split}
        return [domain for domain in self.shares if all(self.is_full(s, domain) for s in splits)]

    def is_held_out(self, docs):
        """Whether a train item is for validation: the second of its domain, then one in 1 / val_fraction. A domain's
        only item is for training."""
        domain = docs[0][0]
        # The number of held-out items is i x fraction, rounded up, but a float's last bit is ignored.
        i, share = self.items[domain] - 1, self.cfg.val_fraction
        self.items[domain] += 1
        return i >= 0 and math.ceil(round((i + 1) * share, 9)) > math.ceil(round(i * share, 9))

    def usable(self):
        """The domains with what train.py needs of each: train text, and a validation token with its target."""
        val = self.splits["val"]
        return [domain for domain in sorted(self.splits["train"]) if domain in val and val[domain]["tokens"] > 1]

    def add(self, split, items, ids):
        """Append the documents of a part to the token files of train and val, until a file's budget is reached."""
        # Decide for each document, and collect what goes to the same file.
        found, start = defaultdict(bytearray), 0
        for docs in items:
            held_out = split == "train" and self.is_held_out(docs)
            for domain, tokens, n_bytes, digest in docs:
                # What is held out when val has enough is for training.
                to = "val" if held_out and not self.is_full("val", domain) else split
                # A copy in both splits would make the validation loss wrong. The other sources have next to none.
                first = self.first.setdefault(digest, to) if self.cfg.source == "files" else to
                if (first, to) == ("val", "train"):
                    self.n_copies += 1
                elif not self.is_full(first, domain):
                    new = dict(file=f"{first}/{domain}.bin", tokens=0, documents=0, bytes=0)
                    about = self.splits[first].setdefault(domain, new)
                    about["tokens"] += tokens
                    about["documents"] += 1
                    about["bytes"] += n_bytes
                    found[about["file"]] += ids[start : start + tokens].tobytes()
                start += tokens

        # A kill may cut this short. Then the next start joins all parts again.
        for file, content in found.items():
            path = Path(self.cfg.out_dir, file)
            path.parent.mkdir(exist_ok=True)
            with writing(path), open(path, "ab") as f:
                f.write(content)


def make_parts(pool, cfg, inputs, placement):
    """Yield all parts in order. A part is what a batch becomes: its split, its items [[(domain, tokens, bytes of
    text, digest), …], …], and their token ids, (tokens,) uint16. Its file is named after its split and number."""

    def calls():
        for split in placement.splits:
            of_split = [source for source in inputs if source.split == split]
            batches = read_batches(cfg, of_split, functools.partial(placement.is_done, split))
            for number, batch in enumerate(batches):
                yield Path(cfg.out_dir, "parts", f"{split}-{number:09}"), split, batch, placement.full(split)

    return in_workers(pool, cfg, make_part, calls())


def write_corpus(pool, cfg, inputs):
    """Make the token files. Returns the Placement, which says what they hold."""
    placement = Placement(cfg, inputs)
    # What a stopped run has joined is joined again. Only files: the folders may be links to another disk.
    for split in placement.splits:
        for file in Path(cfg.out_dir, split).glob("*.bin"):
            file.unlink()
    with progress("prepare", cfg.tokens or math.inf, "tok") as bar:
        for split, items, ids in make_parts(pool, cfg, inputs, placement):
            # The workers were given more than is needed, because we did not know yet how many tokens it would be.
            if not placement.is_done(split):
                placement.add(split, items, ids)
                bar.update(len(ids))
    return placement


def check_output(cfg, inputs):
    """What the data depends on: the settings, the input, and how we cut it into batches. Raises UserError if out_dir
    holds other data, whole or in parts."""
    out = Path(cfg.out_dir)
    settings = {name: value for name, value in asdict(cfg).items() if name not in MAY_DIFFER}
    if cfg.tokenizer_file:
        settings["tokenizer_file"] = read_vocabulary(cfg.tokenizer_file).hash[:16]
    # Files that are quick to read are known by their content, so that a copy will do; others by their times.
    listing, is_small = [], sum(source.size for source in inputs) <= CONTENT_BYTES
    for source in inputs:
        stamp = source.path and (sha256(source.path) if is_small else source.path.stat().st_mtime_ns)
        listing.append([source.name, source.size, stamp])
    listing = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
    settings |= {"input files": listing, "bytes in a batch": BATCH_BYTES}
    settings = json.loads(json.dumps(settings))  # as a file has them: lists in place of tuples

    remedy = "choose another --out_dir, or delete that folder"
    if (out / "settings.json").exists():
        before = read_record(out / "settings.json", SETTINGS)
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            differ = [f"{name} {before.get(name)!r} there, {settings[name]!r} now" for name in changed]
            raise UserError(f"{out} holds different data ({'; '.join(differ)}); {remedy}")
    # In somebody else's folder we would delete or replace these.
    elif any((out / name).exists() for name in ("train", "val", "parts", "tokenizer.json", "manifest.json")):
        raise UserError(f"{out} holds files that prepare.py did not write; {remedy}")
    return settings


def write_manifest(cfg, placement, tokenizer):
    """Describe what was written. The manifest comes last, because it says that everything is there."""
    out, train, usable = Path(cfg.out_dir), placement.splits["train"], placement.usable()
    if not usable:
        few = "too few different documents in a domain to hold any out for validation (see --domains)"
        if cfg.val_fraction == 0:  # the input has a validation split of its own
            few = "a validation split without text"
        of = f" of {', '.join(cfg.mixture)}" if cfg.mixture else ""
        raise UserError(f"the input has {few if train else 'no training text'}{of}")
    for files in placement.splits.values():
        for file in files.values():
            file["sha256"] = sha256(out / file["file"])
    # Domains without text leave the mixture; without a mixture we train on what is there, as it is.
    weights = cfg.mixture or {domain: train[domain]["tokens"] for domain in usable}
    weights = {domain: weight for domain, weight in weights.items() if domain in usable}
    total = plain_sum(weights.values())
    manifest = {
        "tokenizer": dict(name=tokenizer.name, hash=tokenizer.hash, n_vocab=tokenizer.n_vocab),
        "mixture": {domain: weight / total for domain, weight in weights.items()},
        "splits": placement.splits,
    }
    write_record(out / "manifest.json", MANIFEST, manifest)


def print_result(cfg, placement):
    """Print a summary, and where the input had too little."""
    for files in placement.splits.values():
        for file in files.values():
            size = f"{file['tokens']:,} tokens, {file['documents']:,} documents, {file['bytes']:,} bytes of text"
            print(f"{file['file']}: {size}")
    if placement.n_copies:
        print(f"note: {placement.n_copies:,} documents were left out of train, because they are in val too")
    train, val = placement.splits["train"], placement.splits["val"]
    if cfg.tokens and len(placement.shares) > 1 and not cfg.mixture:
        print("note: --tokens was split by the sizes of the domains' files; --mixture splits it differently")
    if cfg.tokens and not placement.shares and not placement.is_full("train", None):
        print(f"note: the input ended before {cfg.tokens:,} tokens")
    for domain in {**placement.shares, **train, **val}:
        if domain not in placement.usable():
            what = "validation" if domain in train else "training"
            print(f"note: no {what} text for domain {domain}, so the mixture leaves it out")
            continue
        n_train, n_val = train[domain]["tokens"], val[domain]["tokens"]
        share = n_val / (n_train + n_val)
        if share > 2 * cfg.val_fraction > 0 and cfg.tokens == 0:
            print(f"note: {share:.0%} of {domain} is held out: it has few documents, or their lengths differ a lot")
        if n_train <= 2048:
            print(f"note: {domain} is short: train.py needs a --block_size of at most {n_train - 1} for it")
        if placement.shares and cfg.tokens and not placement.is_full("train", domain):
            print(f"note: the input ended before {domain}'s {cfg.tokens * placement.shares[domain]:,.0f} tokens")
        if cfg.val_tokens and not placement.is_full("val", domain):
            print(f"note: {domain} has only {n_val:,} of the {cfg.val_tokens:,} validation tokens asked for")
    print(f"{cfg.out_dir} is ready")


def main(cfg: PrepareConfig):
    out = Path(cfg.out_dir)
    inputs, cfg.val_fraction = find_inputs(cfg)
    with hold(out):
        settings = check_output(cfg, inputs)
        if (out / "manifest.json").exists():
            # neither may be damaged
            load_manifest(out, verify=False)
            Tokenizer.load(out / "tokenizer.json")
            print(f"{out} is already complete; there is nothing to do")
        else:
            with processes(cfg) as pool:
                # settings.json comes after the tokenizer is made: if that fails, other settings may be tried.
                if not (out / "tokenizer.json").exists():
                    tokenizer = make_tokenizer(pool, cfg, inputs)
                    write_record(out / "settings.json", SETTINGS, settings)
                    tokenizer.save(out / "tokenizer.json")
                tokenizer = Tokenizer.load(out / "tokenizer.json")
                print(f"writing {out}; stop at any time; the same command continues", flush=True)
                placement = write_corpus(pool, cfg, inputs)
            write_manifest(cfg, placement, tokenizer)
            print_result(cfg, placement)
        shutil.rmtree(out / "parts", ignore_errors=True)


if __name__ == "__main__":
    run(main, __doc__)
