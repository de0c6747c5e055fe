"""Preparing text and loading batches, against the usual ways."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import configurator
import prepare
import reading
from bench.common import LONG, SHAPES, in_turn, ratio, spread
from configurator import UserError
from data import EOT, Corpus, Tokenizer
from describe import flops_per_token
from files import write_json
from value_modes import ModelConfig


def texts_of(cfg):
    """Yield the documents of cfg.text as prepare.py reads them, or those of the standard library's Python sources."""
    if cfg.text and not Path(cfg.text).exists():
        raise UserError(f"no file or folder {cfg.text}; --text is where the texts are")
    about = prepare.PrepareConfig("files" if cfg.text else "pysource", input_dir=cfg.text)
    library = itertools.takewhile(lambda place: place.domain == "stdlib", reading.python_files())
    for place in reading.text_files(about) if cfg.text else library:
        for number, raw, _ in reading.raw_items(place, about, 0):
            try:
                found = reading.to_documents(place, raw, about)
            except ValueError as e:
                raise UserError(f"{place.path}, item {number + 1}: {e}") from None
            yield from (text.encode(errors="replace").decode() for _, text in found)  # half surrogate pairs become ?


def write_texts(texts, path, size):
    """A .jsonl of documents, over and over up to `size` bytes of text; returns how many documents and bytes it has."""
    documents = written = 0
    with open(path, "w", encoding="utf-8") as f:
        for text in itertools.cycle(texts):
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents, written = documents + 1, written + len(text.encode())
            if written >= size:
                break
    return documents, written


def resident(pid):
    """{process: the most bytes it ever held in memory}, of a process and its children; {} where there is no /proc."""
    found, family = {}, [pid]
    with contextlib.suppress(OSError):  # it ends while we look
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            family += children.read_text().split()
        for process in family:
            if peak := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text()):
                found[int(process)] = 1024 * int(peak[1])
    return found


def run_prepare(about, tokenizer):
    """Run prepare.py with settings `about` as its users do, from where it has its tokenizer; returns the sum of its
    processes' peak memory, in bytes: no less than they held at any time."""
    out, peaks = Path(about.out_dir), {}
    shutil.rmtree(out, ignore_errors=True)
    write_json(out / "progress.json", prepare.open_output(about, reading.find_inputs(about)))
    tokenizer.save(out / "tokenizer.json")
    names = ("input_dir", "out_dir", "tokenizer", "tokenizer_file", "val_fraction", "workers")
    command = [sys.executable, prepare.__file__, about.source, *(f"--{name}={getattr(about, name)}" for name in names)]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said) as process:
            while process.poll() is None:
                peaks |= resident(process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        said.seek(0)
        if process.returncode:
            raise UserError(f"prepare.py failed: {said.read().strip().splitlines()[-1].removeprefix('error: ')}")
    return sum(peaks.values())


def with_tiktoken(text, tokenizer, out):
    """One document after the other in one process: the loop that one would write without prepare.py."""
    with open(text, "rb") as lines, open(out, "wb") as f:
        for line in lines:
            np.array([*tokenizer.encode(json.loads(line)["text"]), tokenizer.eot], "<u2").tofile(f)


def with_datasets(data, tokenizer, out, workers):
    """What nanoGPT's prepare.py does: Dataset.map, then a memmap that is filled from the result, piece after piece."""

    def encode(batch):
        ids = [[*tokenizer.encode(text), tokenizer.eot] for text in batch["text"]]
        return {"ids": ids, "len": [len(i) for i in ids]}

    done = data.map(encode, batched=True, remove_columns=["text"], num_proc=workers, load_from_cache_file=False)
    ids, at, pieces = np.memmap(out, "<u2", "w+", shape=(sum(done["len"]),)), 0, min(1024, len(done))
    for i in range(pieces):
        piece = np.concatenate(done.shard(pieces, i, contiguous=True).with_format("numpy")[:]["ids"])
        ids[at : at + len(piece)] = piece
        at += len(piece)
    ids.flush()


def metered(sides):
    """The same functions, and {name: processor seconds of each call}, those of processes that it started included."""
    spent = {name: [] for name in sides}

    def turn(name):
        before = sum(os.times()[:4])
        result = sides[name]()
        spent[name].append(sum(os.times()[:4]) - before)
        return result

    return {name: functools.partial(turn, name) for name in sides}, spent


def beginning(text, size):
    """The first documents of a .jsonl, `size` bytes of text or a little more."""
    found = []
    with open(text, "rb") as lines:
        while size > 0 and (line := next(lines, None)):
            found.append(json.loads(line)["text"])
            size -= len(found[-1].encode())
    return found


def prepare_sides(about, tokenizer, folder):
    """{name: (function, the token file it writes, or None where it returns the ids of `part`)} and part: texts."""
    text, workers, datasets = Path(about.input_dir) / "text.jsonl", about.workers, configurator.need("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_json(str(text), cache_dir=str(folder / "cache"))  # to Arrow, before its turn
    plain, mapped = folder / "plain.bin", folder / "mapped.bin"
    sides = {
        "prepare.py": (lambda: run_prepare(about, tokenizer), Path(about.out_dir) / "train/text.bin"),
        "tiktoken": (lambda: with_tiktoken(text, tokenizer, plain), plain),
        "datasets.map": (lambda: with_datasets(data, tokenizer, mapped, workers), mapped),
    }
    if about.tokenizer != "neox":
        return sides, []
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread
    part, peer = beginning(text, 1e7), configurator.need("tokenizers").Tokenizer.from_file(about.tokenizer_file)
    sides["tokenizers"] = lambda: [e.ids for e in peer.encode_batch_fast(part, add_special_tokens=False)], None
    return sides, part


def race(cfg, about, tokenizer, size, folder):
    """Rows {side, processes, bytes (of text), tokens, seconds, processor_seconds, faster: prepare.py than it, per core
    where it is tokenizers} and prepare.py's peak memory in bytes. Raises UserError if the sides' ids differ."""
    sides, part = prepare_sides(about, tokenizer, folder)
    turns, spent = metered({name: side for name, (side, _) in sides.items()})
    seconds, found = in_turn(turns, cfg.rounds, torch.device("cpu"))
    ours, rows = np.fromfile(sides["prepare.py"][1], "<u2"), []
    for name, (_, file) in sides.items():
        ids = np.fromfile(file, "<u2") if file else np.concatenate([[*ids, tokenizer.eot] for ids in found[name]])
        if not np.array_equal(ids, ours if file else ours[: len(ids)]):
            raise UserError(f"{name} makes other ids of the text than prepare.py: nothing to compare")
        processes = about.workers if name in ("prepare.py", "datasets.map") else 1
        row = {"side": name, "processes": processes, "tokens": len(ids), "seconds": seconds[name]}
        row |= {"bytes": size if file else sum(len(text.encode()) for text in part), "processor_seconds": spent[name]}
        scale = 1 if file else size / row["bytes"] / about.workers  # to as much text, on as many cores
        costs = {"prepare.py": seconds["prepare.py"]} | {name: [scale * s for s in seconds[name]]}
        rows.append(row | {"faster": ratio(costs, "prepare.py", name)})
    return rows, found["prepare.py"]


def prepare_table(rows):
    """What race found, as a table."""
    print("| side | processes | MB/s | tokens/s | processor s/100 MB | prepare.py's speed to its |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        took = statistics.median(row["seconds"])
        cells = [row["side"], row["processes"], f"{row['bytes'] / took / 1e6:,.1f}", f"{row['tokens'] / took:,.0f}"]
        cells += [f"{1e8 * statistics.median(row['processor_seconds']) / row['bytes']:,.1f}"]
        cells += [spread(row["faster"]) + " per core" * (row["side"] == "tokenizers")]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def flatness(cfg, about, tokenizer, size, folder):
    """Yield {bytes (of text), seconds, peak_bytes} of prepare.py on each input of cfg.memory_megabytes: one file under
    many names, so that only what is made of it takes space."""
    for megabytes in cfg.memory_megabytes:
        many, n = folder / f"{megabytes}", math.ceil(1e6 * megabytes / size)
        many.mkdir()
        for i in range(n):
            os.link(Path(about.input_dir) / "text.jsonl", many / f"{i}.jsonl")
        start = time.perf_counter()
        peak = run_prepare(dataclasses.replace(about, input_dir=str(many)), tokenizer)
        yield {"bytes": n * size, "seconds": time.perf_counter() - start, "peak_bytes": peak}


def bench_prepare(cfg, world):
    """Tokens per second from a .jsonl file to a token file: prepare.py as its users start it, against plain tiktoken,
    datasets.map in as many processes and, for neox, the tokenizers package; and prepare.py's memory on long inputs."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        folder, memory = Path(folder), []
        (folder / "text").mkdir()
        documents, size = write_texts(texts_of(cfg), folder / "text" / "text.jsonl", 1e6 * (cfg.megabytes or 300))
        if not documents:
            raise UserError(f"no text in {cfg.text}: there should be files {', '.join(reading.SUFFIXES)}")
        about = cfg.preparation(input_dir=str(folder / "text"), out_dir=str(folder / "ours"))
        tokenizer = prepare.make_tokenizer(about, reading.find_inputs(about))
        rows, peak = race(cfg, about, tokenizer, size, folder)
        prepare_table(rows)
        first = {"bytes": size, "seconds": statistics.median(rows[0]["seconds"]), "peak_bytes": peak}
        print("\n| text, MB | prepare.py, s | peak memory of its processes, MB |\n|---:|---:|---:|")
        for row in itertools.chain([first], flatness(cfg, about, tokenizer, size, folder)):
            memory.append(row)
            print(f"| {row['bytes'] / 1e6:,.0f} | {row['seconds']:,.1f} | {row['peak_bytes'] / 1e6:,.0f} |", flush=True)
    about = {"text": cfg.text or "the standard library's", "tokenizer": tokenizer.name, "documents": documents}
    return about | {"rows": rows, "memory": memory}


def token_files(folder, sizes, block_size, fill):
    """A data folder, of a byte vocabulary and {domain: train tokens}, that Corpus takes with verify=False; fill(path,
    tokens) makes a token file."""
    ranks, splits = [(bytes([i]), i) for i in range(256)], {"train": {}, "val": {}}
    tokenizer = Tokenizer(prepare.tokenizer_spec("bytes", "(?s:.)", ranks, {EOT: 256}))
    for domain, size in sizes.items():
        for split, tokens in (("train", size), ("val", block_size + 1)):
            path = folder / split / f"{domain}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            fill(path, tokens)
            splits[split][domain] = {"file": f"{split}/{domain}.bin", "tokens": tokens, "sha256": ""}
    tokenizer.save(folder / "tokenizer.json")
    mixture = {domain: size / sum(sizes.values()) for domain, size in sizes.items()}
    about = {"name": tokenizer.name, "hash": tokenizer.hash}
    write_json(folder / "manifest.json", {"tokenizer": about, "mixture": mixture, "splits": splits})


def random_tokens(path, tokens):
    np.random.default_rng(tokens).integers(0, 256, tokens, np.uint16).astype("<u2").tofile(path)


def no_tokens(path, tokens):
    """A file of that size which takes no space, where the file system can do that."""
    path.touch()
    os.truncate(path, 2 * tokens)


def nano_batch(path, rows, block_size, rng):
    """A batch as nanoGPT's get_batch makes it, from one file: opened anew, a tensor per row, stacked."""
    ids = np.memmap(path, "<u2", "r")
    starts = rng.integers(len(ids) - block_size, size=rows)
    cut = [torch.from_numpy(ids[i : i + block_size + 1].astype(np.int64)) for i in starts]
    return torch.stack([row[:-1] for row in cut]), torch.stack([row[1:] for row in cut])


def load_sides(corpus):
    """{what: (function, sequences it loads)}: 16 steps of 1,024 sequences (the paper's), asked for as train.py does, 32
    at a time, in order going on from round to round; random ones are of the first epoch."""
    T, rng, size, following = corpus.block_size, np.random.default_rng(0), 1024, itertools.count()
    epoch = max(1, sum(corpus.windows("train", domain) for domain in corpus.domains) // size)
    files = [corpus.dir / corpus.manifest["splits"]["train"][domain]["file"] for domain in corpus.domains]

    def load(steps, rows):
        for step in map(int, steps):
            for first in range(0, rows, 32):
                corpus.batch(step, size, first, first + 32)

    def nano():
        for i in range(16 * size // 32):
            nano_batch(files[i % len(files)], 32, T, rng)

    return {
        "steps in order": (lambda: load(itertools.islice(following, 16), size), 16 * size),
        "random steps": (lambda: load(rng.integers(epoch, size=16), size), 16 * size),
        "random steps, one rank of 8": (lambda: load(rng.integers(epoch, size=16), size // 8), 2 * size),
        "nanoGPT's way": (nano, 16 * size),
    }


def first_batch(folder, block_size):
    """A Corpus, and {open_seconds, first_seconds (from then to the first batch), order_bytes (of its windows),
    peak_bytes (the most that it held until then, 0 where there is no /proc)}."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = sum(resident(os.getpid()).values()), time.perf_counter()
    corpus = Corpus(folder, block_size, verify=False)
    opened = time.perf_counter()
    corpus.batch(0, 32)
    found = {"open_seconds": opened - start, "first_seconds": time.perf_counter() - opened}
    found["order_bytes"] = 8 * sum(corpus.windows("train", domain) for domain in corpus.domains)
    return corpus, found | {"peak_bytes": sum(resident(os.getpid()).values()) - before}


def load_rows(what, corpus, need, rounds):
    """Print and return the rows of one data folder: {data, side, tokens_per_second, of_need: how many times `need`,
    faster: than nanoGPT's way, seconds}."""
    sides, rows = load_sides(corpus), []
    seconds, _ = in_turn({name: side for name, (side, _) in sides.items()}, rounds, torch.device("cpu"))
    costs = {name: [s / sides[name][1] / corpus.block_size for s in times] for name, times in seconds.items()}
    for name, times in costs.items():
        rate, faster = 1 / statistics.median(times), ratio(costs, name, "nanoGPT's way")
        row = {"data": what, "side": name, "tokens_per_second": rate, "of_need": rate / need, "faster": faster}
        rows.append(row | {"seconds": seconds[name]})
        needs = f"{rate / need:,.0f} | {rate / need / 8:,.0f}"
        print(f"| {what} | {name} | {rate:,.0f} | {needs} | {spread(faster)} |", flush=True)
    return rows


def bench_load(cfg, world):
    """Tokens per second of Corpus.batch in one process, against nanoGPT's way and what the paper's 82M model takes at
    40 % of the peak of one A100, and of eight; and what 20B tokens cost before their first batch."""
    T = cfg.block_size or 2048
    need = 0.4 * 312e12 / flops_per_token(ModelConfig(block_size=2048, **SHAPES["82M"]))
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        made, long = Path(folder) / "made", Path(folder) / "long"
        size = int(1e6 * (cfg.megabytes or 1000) / 2 / 100)
        if not cfg.data_dir:
            token_files(made, {f"domain{i}": size for i in range(100)}, T, random_tokens)
        token_files(long, {d: int(LONG * share) for d, share in prepare.PAPER_MIXTURE.items()}, T, no_tokens)
        print("| data | side | tokens/s | of one A100's need | of eight's | of nanoGPT's way |")
        print("|---|---|---:|---:|---:|---:|")
        what = cfg.data_dir or f"100 domains, {200 * size / 1e6:,.0f} MB in memory"
        rows = load_rows(what, Corpus(cfg.data_dir or made, T, verify=False), need, cfg.rounds)
        corpus, first = first_batch(long, T)
        rows += load_rows(f"7 domains, {LONG / 1e9:,.0f}B tokens not in memory", corpus, need, cfg.rounds)
    took = f"opened in {first['open_seconds']:.2f} s, order drawn in {first['first_seconds']:.2f} s"
    held = f"{first['order_bytes'] / 1e6:,.0f} MB, at most {first['peak_bytes'] / 1e6:,.0f} MB on the way"
    print(f"\nThe first batch of {LONG / 1e9:,.0f}B tokens: {took}; the order takes {held}")
    return {"block_size": T, "need": need, "rows": rows, "first": first}
