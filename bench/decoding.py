"""Greedy decoding after a prompt of random tokens, ours and transformers' generate: tokens/s, bytes of the KV cache.

    python -m bench.decoding --shape=82M --batch=1,8 --peers=dynamic,static
    python -m bench.decoding results/bench_decode_*_{sweep,cla}.json --figure=results/decode.png     draws the results

Read before: training.py. Read next: scoring.py.
"""

from dataclasses import dataclass
from typing import Literal

from bench import LLAMA, SHAPES, Dtype, Shape, Switch, check_modes
from configurator import UserError, check_ranges, command_line, run_main, setting


@dataclass(frozen=True)
class DecodingConfig:
    """Every setting of this benchmark."""

    files: tuple[str, ...] = setting((), "results to draw, instead of measuring", positional=True)
    figure: str = setting("decode.png", "the drawing")
    shape: tuple[Shape, ...] = setting(("tiny",), "of the models: tiny (the demo's), 82M, 180M, 468M", group="Sides")
    modes: tuple[str, ...] = setting(("vanilla", "resformer", "svformer"), "value modes, vanilla first")
    dtype: tuple[Dtype, ...] = setting(("float32",), "of weights and cache")
    compile: tuple[Switch, ...] = setting(("off", "on"), "sample.py's --compile: off, on, or both")
    peers: tuple[Literal["dynamic", "static"], ...] = setting((), "caches of transformers' generate")
    batch: tuple[int, ...] = setting((1, 8), "rows", least=1, group="Work")
    prompt: tuple[int, ...] = setting((32,), "tokens of each prompt", least=1)
    new: int = setting(128, "tokens to add to each", least=2)
    kv_gib: float = setting(10.0, "memory for keys and values, to say how many rows fit", least=0)
    rounds: int = setting(3, "times that each side runs", least=1)
    device: str = setting("auto", "auto, cpu, cuda, cuda:1")
    out_file: str = setting("", "JSON to write; empty = results/bench_decode_<machine>.json")

    def __post_init__(self):
        check_ranges(self)
        check_modes(self.modes)


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(DecodingConfig, __doc__)

import itertools
import statistics
import sys
from typing import NamedTuple

import torch

from bench.common import in_turn, only_process, ratio, spread, timed, write_results
from describe import count_parameters
from files import read_json
from hf import to_llama
from looks import COLORS, DASHES, page, style_of
from model import GPT
from report import markdown
from runtime import clock
from sample import generate
from value_modes import ModelConfig, kv_floats_per_token


def our_decoder(model, prompts, new, side):
    """A function that continues prompts (lists of ids) by `new` tokens each. It returns the new ids of each row, the
    bytes of the cache, and seconds: {"prefill", "decode"}; compiling is not counted."""

    def decode():
        rows, cache, seconds = generate(model, prompts, new, temperature=0, compile=side.compile == "on")
        return rows, cache.nbytes, seconds

    return decode


def peers_decoder(peer, prompts, new, side):
    """The same with transformers' generate. Its prefill is timed as that of one token."""
    idx = torch.tensor(prompts, device=peer.device)  # (B, T)
    peer.generation_config.eos_token_id = None
    how = {"attention_mask": torch.ones_like(idx), "do_sample": False, "pad_token_id": 0}
    if side.peer == "static":
        how["cache_implementation"] = "static"

    @torch.inference_mode()
    def new_ids(n):
        return peer.generate(idx, max_new_tokens=n, **how)[:, idx.size(1) :].tolist()

    def decode():
        prefill = timed(lambda: new_ids(1), peer.device)
        start = clock(peer.device)
        rows = new_ids(new)
        return rows, None, {"prefill": prefill, "decode": clock(peer.device) - start - prefill}

    return decode


class Decoder(NamedTuple):
    """Who decodes: a value mode of ours, compiled or not, or transformers' Llama with a kind of cache."""

    mode: str = "vanilla"
    compile: str = "off"
    peer: str = ""

    @property
    def name(self):
        return f"{LLAMA}, {self.peer}" if self.peer else self.mode


class Case(NamedTuple):
    """What all sides of a comparison have in common."""

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int


def decoders(cfg, case, device):
    """({Decoder: its decoder}, {mode: our model}, the prompts)."""
    size = (case.batch, case.prompt)
    prompts = torch.randint(SHAPES[case.shape]["vocab_size"], size, generator=torch.Generator().manual_seed(0)).tolist()
    turns, models = {}, {}
    for mode in cfg.modes:
        config = ModelConfig(**SHAPES[case.shape], block_size=case.prompt + case.new, value_mode=mode)
        models[mode] = GPT(config).eval().to(device, getattr(torch, case.dtype))
        for side in [Decoder(mode, switch) for switch in cfg.compile]:
            turns[side] = our_decoder(models[mode], prompts, case.new, side)
    for side in [Decoder(peer=kind) for kind in cfg.peers]:
        turns[side] = peers_decoder(to_llama(models["vanilla"]), prompts, case.new, side)
    return turns, models, prompts


def same_text(model, prompts, ours, theirs):
    """Whether two sides' greedy tokens agree, up to a place where the model gives both of them the same logit."""
    for ids, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            continue
        at = next(i for i in range(len(a)) if a[i] != b[i])
        with torch.inference_mode():
            idx = torch.tensor([ids + a[:at]], device=model.head.weight.device)
            logits = model.head(model.hidden(idx)[0, -1])
        if not (logits[a[at]] - logits[b[at]]).abs() < 1e-4:
            return False
    return True


def check_sides(case, turns, models, prompts):
    """Run each side once, which also warms it. Raises UserError if one of ours took other bytes for its cache than the
    plan says, or if in fp32 vanilla's text, compiled or by a peer, is another."""
    found = {side: decode() for side, decode in turns.items()}
    expected = next(iter(found.values()))[0]
    for side, (text, cache_bytes, _) in found.items():
        if not side.peer:
            planned = case.batch * (case.prompt + case.new - 1) * token_bytes(models[side.mode].cfg, case)
            if cache_bytes != planned:
                raise UserError(f"{side.name}: the cache took {cache_bytes:,} bytes, but {planned:,} were planned")
        if case.dtype == "float32" and side.mode == "vanilla":
            if not same_text(models["vanilla"], prompts, expected, text):
                raise UserError(f"{side.name}, compile={side.compile}: another text with vanilla's weights in fp32")


def token_bytes(config, case):
    """Bytes of keys and values that a model stores for each token."""
    return kv_floats_per_token(config) * getattr(torch, case.dtype).itemsize


def time_case(cfg, case, device, copy_rate):
    """The rows of one case, one for each side."""
    turns, models, prompts = decoders(cfg, case, device)
    check_sides(case, turns, models, prompts)
    _, results = in_turn(turns, cfg.rounds, device)
    seconds = {"prefill": {}, "decode": {}}  # {part: {Decoder: seconds of each round}}
    for side, rounds in results.items():
        for part in seconds:
            seconds[part][side] = [parts[part] for _, _, parts in rounds]
    rows = []
    for side in turns:
        row = {**case._asdict(), "name": side.name, "compile": side.compile}
        row["seconds"] = {part: seconds[part][side] for part in seconds}
        row["prefill_tokens_per_s"] = case.batch * case.prompt / statistics.median(seconds["prefill"][side])
        row["tokens_per_s"] = case.batch * (case.new - 1) / statistics.median(seconds["decode"][side])
        reference = Decoder(compile=cfg.compile[0] if side.peer else side.compile)
        row["to_vanilla"] = ratio(seconds["decode"], side, reference)
        for peer in [Decoder(peer=kind) for kind in cfg.peers]:
            row[f"to {peer.name}"] = {part: ratio(seconds[part], side, peer) for part in seconds}
        if not side.peer:
            add_memory(row, cfg, case, models[side.mode].cfg, copy_rate)
        rows.append(row)
    return rows


def add_memory(row, cfg, case, config, copy_rate):
    """Add to a row of ours what it stores and reads. A step reads each weight that multiplies, and the keys and values
    stored so far: each tensor once if a layer's that others use too stays in a cache of the processor ("least"), else
    once in each layer ("most")."""
    size = getattr(torch, case.dtype).itemsize
    stored = token_bytes(config, case)
    used = 2 * config.n_layer * config.n_kv_head * config.head_dim * size
    weights = count_parameters(config)[1] * size
    tokens = case.batch * (case.prompt + case.new / 2)  # in the middle of the text
    reads = {"least": weights + tokens * stored, "most": weights + tokens * used}
    steps_per_s = row["tokens_per_s"] / case.batch
    bytes_per_row = (case.prompt + case.new - 1) * stored  # the last new token is not stored
    row["kv_bytes"] = case.batch * bytes_per_row
    row["bytes_per_step"] = reads
    row["of_copy_rate"] = {way: n * steps_per_s / copy_rate for way, n in reads.items()}
    row["batch_that_fits"] = int(cfg.kv_gib * 2**30 // bytes_per_row)


def measure_copy_rate(device, megabytes=256):
    """Bytes per second that a copy reads and writes: the best of five, which is what memory can do."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def decoding_table(rows):
    """Markdown of decoded tokens/s with their ratios (median, least–greatest of a round), and of the KV cache."""
    to_peers = list(dict.fromkeys(key for row in rows for key in row if key.startswith("to " + LLAMA)))
    header = ["shape", "dtype", "batch x prompt", "side", "tokens/s", "to vanilla", *to_peers]
    header += ["of the copy rate", "KV bytes per row", "rows that fit"]
    lines = []
    for row in rows:
        side = f"{row['name']}, compiled" if row["compile"] == "on" else row["name"]
        cells = [row["shape"], row["dtype"], f"{row['batch']} x {row['prompt']:,}", side, f"{row['tokens_per_s']:,.0f}"]
        cells.append(spread(row["to_vanilla"]))
        cells += [spread(row[key]["decode"]) for key in to_peers]
        if "kv_bytes" in row:
            share = row["of_copy_rate"]
            cells.append(f"{share['least']:.0%}–{share['most']:.0%}")
            cells += [f"{row['kv_bytes'] // row['batch']:,}", f"{row['batch_that_fits']:,}"]
        else:
            cells += ["", "", ""]
        lines.append(cells)
    return markdown(header, lines, left=4)


# ---- the figure


def read_cases(files):
    """{title: {mode: {(batch, context): row}}} of our models. Measured twice, the last file counts."""
    cases = {}
    for file in files:
        for row in read_json(file, "a file of bench.decoding", keys=("copy_bytes_per_s", "rows"))["rows"]:
            if "kv_bytes" not in row:
                continue  # a peer's
            title = f"{row['shape']}, {row['dtype']}"
            if row["compile"] == "on":
                title += ", compiled"
            modes = cases.setdefault(title, {})
            modes.setdefault(row["name"], {})[row["batch"], row["prompt"] + row["new"]] = row
    return cases


def distinct_styles(modes):
    """{mode: its style}. A mode whose colour another one has already gets the next free colour and dash."""
    styles = {mode: style_of(mode) for mode in modes}
    free = [color for color in COLORS if color not in [style["color"] for style in styles.values()]]
    taken = set()
    for style in styles.values():
        if style["color"] in taken and free:
            style["color"] = free.pop(0)
            style["linestyle"] = DASHES[COLORS.index(style["color"]) % len(DASHES)]
        taken.add(style["color"])
    return styles


def speed_panel(ax, modes, styles, axis, fixed):
    """Tokens/s over the batch (axis 0) or the context (axis 1) of the rows whose other number is `fixed`: medians, and
    lines from the slowest to the fastest round. Modes stand side by side, so that none hides another."""
    places = set()
    for i, (mode, rows) in enumerate(modes.items()):
        x, y, below, above = [], [], [], []
        for key, row in sorted(rows.items()):
            if key[1 - axis] == fixed:
                speeds = [row["batch"] * (row["new"] - 1) / s for s in row["seconds"]["decode"]]
                x.append(key[axis] * 1.03 ** (i - len(modes) / 2))
                y.append(row["tokens_per_s"])
                below.append(row["tokens_per_s"] - min(speeds))
                above.append(max(speeds) - row["tokens_per_s"])
                places.add(key[axis])
        ax.errorbar(x, y, (below, above), label=mode, elinewidth=0.7, **styles[mode])
    names = ("rows in the batch", "tokens of context")
    ax.set(xscale="log", yscale="log", xlabel=names[axis], ylabel=f"tokens/s with {fixed:,} {names[1 - axis]}")
    ax.set_xticks(sorted(places), [f"{place:,}" for place in sorted(places)])
    ax.set_xticks([], minor=True)
    ax.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_minor_formatter("")


def rows_panel(ax, modes, styles, context, kv_gib):
    """A bar for each mode: how many rows of the longest context have their keys and values in kv_gib of memory."""
    for i, (mode, rows) in enumerate(modes.items()):
        fits = next(row["batch_that_fits"] for (_, length), row in rows.items() if length == context)
        ax.barh(i, fits, color=styles[mode]["color"], alpha=0.6)
        ax.text(fits, i, f" {fits:,}", va="center")
    ax.set_yticks(range(len(modes)), list(modes))
    ax.set(xlabel=f"rows of {context:,} tokens whose KV cache fits into {kv_gib:g} GiB")
    ax.invert_yaxis()
    ax.margins(x=0.12)


def draw_decoding(files, figure):
    """For each shape, dtype and compile three panels: tokens/s over the context at the largest batch, over the batch at
    the longest context, and the rows of that context whose keys and values fit into memory."""
    cases = read_cases(files)
    if not cases:
        raise UserError(f"there is no model of ours in {', '.join(files)}")
    kv_gib = read_json(files[0], "a file of bench.decoding")["kv_gib"]
    with page(figure, (12.5, 3.8 * len(cases))) as paper:
        for axes, (title, modes) in zip(paper.subplots(len(cases), 3, squeeze=False), cases.items(), strict=True):
            keys = [key for rows in modes.values() for key in rows]
            largest_batch = max(batch for batch, _ in keys)
            longest_context = max(context for _, context in keys)
            styles = distinct_styles(modes)
            speed_panel(axes[0], modes, styles, 1, largest_batch)
            speed_panel(axes[1], modes, styles, 0, longest_context)
            rows_panel(axes[2], modes, styles, longest_context, kv_gib)
            axes[0].set_title(title, loc="left", fontsize=9)
            axes[0].legend(handlelength=3.5, fontsize=7)


def main(cfg: DecodingConfig):
    if cfg.files:
        return draw_decoding(cfg.files, cfg.figure)
    device = only_process(cfg.device).device
    copy_rate = measure_copy_rate(device)
    print(f"a copy reads and writes {copy_rate / 1e9:,.1f} GB/s\n")
    rows = []
    for shape, dtype, prompt, batch in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
        print(f"{shape}, {dtype}, {batch} x {prompt:,} + {cfg.new}", file=sys.stderr, flush=True)
        with torch._dynamo.config.patch(recompile_limit=1000):  # one step function, many models
            rows += time_case(cfg, Case(shape, dtype, batch, prompt, cfg.new), device, copy_rate)
        torch.compiler.reset()
    print(decoding_table(rows))
    write_results("decode", {"copy_bytes_per_s": copy_rate, "kv_gib": cfg.kv_gib, "rows": rows}, device, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
