"""Greedy decoding after a prompt of random tokens, ours and transformers' generate: tokens/s, bytes of the KV cache.

    python -m bench.decoding --shape=82M --batch=1,8 --peers=dynamic,static
    python -m bench.decoding results/bench_decode_*_{sweep,cla}.json --figure=results/decode.png     draws the results

Read before: training.py. Read next: scoring.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench import LLAMA, SHAPES, ModelBenchConfig
from configurator import UserError, command_line, run_main, setting


@dataclass(frozen=True)
class DecodingConfig(ModelBenchConfig):
    """Every setting of this benchmark."""

    files: tuple[str, ...] = setting((), "results to draw, instead of measuring", positional=True)
    figure: str = setting("decode.png", "the drawing")
    peers: tuple[Literal["dynamic", "static"], ...] = setting((), "caches of transformers' generate")
    batch: tuple[int, ...] = setting((1, 8), "rows", least=1, group="Work")
    prompt: tuple[int, ...] = setting((32,), "tokens of each prompt", least=1)
    new: int = setting(128, "tokens to add to each", least=2)
    kv_gib: float = setting(10.0, "memory for keys and values, to say how many rows fit", least=0)


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(DecodingConfig, __doc__)

import itertools
import statistics
import sys

import torch

from bench.common import in_turn, lines_table, ratio, spread, timed, write_results
from files import read_json
from hf import to_llama
from model import GPT
from plot import page, style_of
from runtime import only_process
from sample import generate
from value_modes import ModelConfig


class Case(NamedTuple):
    """What all sides of a comparison have in common."""

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int


class Decoder(NamedTuple):
    """Who decodes: a value mode of ours, compiled or not, or transformers' Llama with a kind of cache."""

    name: str
    compile: str = "off"

    @property
    def is_peer(self):
        return self.name.startswith(LLAMA)


def our_decoder(model, prompts, new, compiled):
    """A function that continues prompts (lists of ids) by `new` tokens each. It returns the new ids of each row, the
    bytes of the cache, and seconds: {"prefill", "decode"}; compiling is not counted."""

    def decode():
        rows, cache, seconds = generate(model, prompts, new, temperature=0, compile=compiled)
        return rows, cache.nbytes, seconds

    return decode


def peers_decoder(peer, prompts, new, kind):
    """The same with transformers' generate and its dynamic or static cache. Its prefill is timed as that of one token,
    its cache is not measured."""
    idx = torch.tensor(prompts, device=peer.device)  # (B, T)
    peer.generation_config.eos_token_id = None
    how = {"attention_mask": torch.ones_like(idx), "do_sample": False, "pad_token_id": 0}
    if kind == "static":
        how["cache_implementation"] = "static"

    @torch.inference_mode()
    def new_ids(n):
        return peer.generate(idx, max_new_tokens=n, **how)[:, idx.size(1) :].tolist()

    def decode():
        prefill, _ = timed(lambda: new_ids(1), peer.device)
        both, rows = timed(lambda: new_ids(new), peer.device)
        return rows, None, {"prefill": prefill, "decode": both - prefill}

    return decode


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


def check_texts(texts, model, prompts):
    """Raise UserError if a side with vanilla's weights, compiled or a peer, makes another text than the first.
    texts: {Decoder: the new ids of each row}."""
    expected = next(iter(texts.values()))
    for side, text in texts.items():
        if (side.name == "vanilla" or side.is_peer) and not same_text(model, prompts, expected, text):
            raise UserError(f"{side.name}, compile={side.compile}: another text with vanilla's weights in fp32")


def time_case(cfg, case, device):
    """The rows of one case, one for each side."""
    size = (case.batch, case.prompt)
    prompts = torch.randint(SHAPES[case.shape]["vocab_size"], size, generator=torch.Generator().manual_seed(0)).tolist()
    models, turns = {}, {}
    for mode in cfg.modes:
        config = ModelConfig(**SHAPES[case.shape], block_size=case.prompt + case.new, value_mode=mode)
        models[mode] = GPT(config).eval().to(device, getattr(torch, case.dtype))
        for switch in cfg.compile:
            turns[Decoder(mode, switch)] = our_decoder(models[mode], prompts, case.new, switch == "on")
    for kind in cfg.peers:
        turns[Decoder(f"{LLAMA}, {kind}")] = peers_decoder(to_llama(models["vanilla"]), prompts, case.new, kind)
    _, warm = in_turn(turns, 1, device)
    if case.dtype == "float32":
        check_texts({side: rounds[0][0] for side, rounds in warm.items()}, models["vanilla"], prompts)
    _, results = in_turn(turns, cfg.rounds, device)
    return case_rows(cfg, case, results)


def case_rows(cfg, case, results):
    """results: {Decoder: what it returned in each round}."""
    seconds = {}  # {part: {Decoder: seconds of each round}}
    for part in ("prefill", "decode"):
        seconds[part] = {side: [times[part] for _, _, times in rounds] for side, rounds in results.items()}
    rows = []
    for side, rounds in results.items():
        row = {**case._asdict(), "name": side.name, "compile": side.compile}
        row["seconds"] = {part: seconds[part][side] for part in seconds}
        row["prefill_tokens_per_s"] = case.batch * case.prompt / statistics.median(seconds["prefill"][side])
        row["tokens_per_s"] = case.batch * (case.new - 1) / statistics.median(seconds["decode"][side])
        vanilla = Decoder("vanilla", cfg.compile[0] if side.is_peer else side.compile)
        row["to_vanilla"] = ratio(seconds["decode"], side, vanilla)
        for peer in results:
            if peer.is_peer:
                row[f"to {peer.name}"] = {part: ratio(seconds[part], side, peer) for part in seconds}
        if not side.is_peer:
            row["kv_bytes"] = rounds[0][1]
            row["batch_that_fits"] = int(cfg.kv_gib * 2**30 // (row["kv_bytes"] / case.batch))
        rows.append(row)
    return rows


def decoding_table(rows):
    """Markdown of decoded tokens/s with their ratios (median, least–greatest of a round), and of the KV cache."""
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "dtype": row["dtype"], "batch x prompt": f"{row['batch']} x {row['prompt']:,}"}
        line["side"] = f"{row['name']}, compiled" if row["compile"] == "on" else row["name"]
        line["tokens/s"] = f"{row['tokens_per_s']:,.0f}"
        line["to vanilla"] = spread(row["to_vanilla"])
        line.update({key: spread(row[key]["decode"]) for key in row if key.startswith(f"to {LLAMA}")})
        if "kv_bytes" in row:
            line["KV bytes per row"] = f"{row['kv_bytes'] // row['batch']:,}"
            line["rows that fit"] = f"{row['batch_that_fits']:,}"
        lines.append(line)
    return lines_table(lines, left=4)


# ---- the figure


def our_rows(files):
    """The rows of our models, by title and mode: {title: {mode: [row]}}. Measured twice, the last file counts."""
    found = {}
    for file in files:
        for row in read_json(file, "a file of bench.decoding", {"rows": list})["rows"]:
            if "kv_bytes" in row:
                title = f"{row['shape']}, {row['dtype']}, compile {row['compile']}"
                modes = found.setdefault(title, {})
                modes.setdefault(row["name"], {})[row["batch"], row["prompt"]] = row
    return {title: {mode: list(rows.values()) for mode, rows in modes.items()} for title, modes in found.items()}


def speed_panel(ax, modes, key, other, fixed):
    """Tokens/s over row[key], one of "batch" and "prompt", of the rows whose other one is `fixed`: medians, and lines
    from the slowest to the fastest round. Modes stand side by side, so that none hides another."""
    for i, (mode, rows) in enumerate(modes.items()):
        rows = sorted((row for row in rows if row[other] == fixed), key=lambda row: row[key])
        places = [row[key] for row in rows]
        speeds = [[row["batch"] * (row["new"] - 1) / s for s in row["seconds"]["decode"]] for row in rows]
        medians = [row["tokens_per_s"] for row in rows]
        below = [median - min(speed) for median, speed in zip(medians, speeds, strict=True)]
        above = [max(speed) - median for median, speed in zip(medians, speeds, strict=True)]
        x = [place * 1.03 ** (i - len(modes) / 2) for place in places]
        ax.errorbar(x, medians, (below, above), label=mode, elinewidth=0.7, **style_of(mode))
    names = {"batch": "rows in the batch", "prompt": "tokens of prompt"}
    ax.set(xscale="log", ylim=(0, None), xlabel=names[key], ylabel=f"tokens/s with {fixed:,} {names[other]}")
    ax.set_xticks(places, [f"{place:,}" for place in places])
    ax.set_xticks([], minor=True)


def rows_panel(ax, modes, prompt):
    """A bar for each mode: how many rows of the longest prompt have their keys and values in memory."""
    for mode, rows in modes.items():
        fits = next(row["batch_that_fits"] for row in rows if row["prompt"] == prompt)
        ax.bar_label(ax.barh(mode, fits, color=style_of(mode)["color"], alpha=0.6), fmt="{:,.0f}", padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.12)


def draw_decoding(files, figure):
    """For each shape, dtype and compile three panels: tokens/s over the prompt at the largest batch, over the batch at
    the longest prompt, and the rows of that prompt whose keys and values fit into memory."""
    found = our_rows(files)
    if not found:
        raise UserError(f"there is no model of ours in {', '.join(files)}")
    kv_gib = read_json(files[0], "a file of bench.decoding")["kv_gib"]
    with page(figure, (12.5, 3.8 * len(found))) as fig:
        for axes, (title, modes) in zip(fig.subplots(len(found), 3, squeeze=False), found.items(), strict=True):
            batch = max(row["batch"] for rows in modes.values() for row in rows)
            prompt = max(row["prompt"] for rows in modes.values() for row in rows)
            speed_panel(axes[0], modes, "prompt", "batch", batch)
            speed_panel(axes[1], modes, "batch", "prompt", prompt)
            rows_panel(axes[2], modes, prompt)
            axes[2].set_xlabel(f"rows after {prompt:,} tokens that fit into {kv_gib:g} GiB")
            axes[0].set_title(title, loc="left", fontsize=9)
            axes[0].legend()


def main(cfg: DecodingConfig):
    if cfg.files:
        return draw_decoding(cfg.files, cfg.figure)
    device = only_process(cfg.device).device
    rows = []
    for shape, dtype, prompt, batch in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
        print(f"{shape}, {dtype}, {batch} x {prompt:,} + {cfg.new}", file=sys.stderr, flush=True)
        with torch._dynamo.config.patch(recompile_limit=1000):  # one step function, many models
            rows += time_case(cfg, Case(shape, dtype, batch, prompt, cfg.new), device)
        torch.compiler.reset()
    print(decoding_table(rows))
    write_results("decode", {"kv_gib": cfg.kv_gib, "rows": rows}, device, cfg.out_file)


if __name__ == "__main__":
    run_main(main, SETTINGS)
