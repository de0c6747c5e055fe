"""Greedy decoding after a prompt of random tokens, ours and transformers' generate: tokens/s, bytes of the KV cache.

    python -m bench.decoding --shape=82M --batch=1,8 --peers=dynamic,static

Read before: training.py.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench import LLAMA, SHAPES, BenchConfig
from oldconfig import UserError, command_line, run_main, setting


@dataclass(frozen=True)
class DecodingConfig(BenchConfig):
    """Every setting of this benchmark."""

    peers: tuple[Literal["dynamic", "static"], ...] = setting((), "caches of transformers' generate")
    batch: tuple[int, ...] = setting((1, 8), "rows", least=1, group="Work")
    prompt: tuple[int, ...] = setting((32,), "tokens of each prompt", least=1)
    new: int = setting(128, "tokens to add to each", least=2)
    kv_gib: float = setting(10.0, "memory for keys and values, to say how many rows fit", least=0)


if __name__ == "__main__":  # before torch is imported, so that a typo is answered at once
    SETTINGS = command_line(DecodingConfig, __doc__)

import functools
import itertools
import statistics
import sys

import torch

from bench.common import failure_in, lines_table, measured, order_of_round, ratio, spread
from hf import to_llama
from model import GPT
from runtime import clock, only_process
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
    """The same with transformers' generate and its dynamic or static cache. Its prefill ends with the first new token,
    its cache is not measured."""
    idx = torch.tensor(prompts, device=peer.device)  # (B, T)
    peer.generation_config.eos_token_id = None
    how = {"attention_mask": torch.ones_like(idx), "do_sample": False, "pad_token_id": 0}
    if kind == "static":
        how["cache_implementation"] = "static"

    @torch.inference_mode()
    def decode():
        stamps = []

        def stamp(ids, scores, **kw):  # called after each new token; stops no row
            if not stamps:
                stamps.append(clock(peer.device))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        began = clock(peer.device)
        rows = peer.generate(idx, max_new_tokens=new, stopping_criteria=[stamp], **how)[:, idx.size(1) :].tolist()
        return rows, None, {"prefill": stamps[0] - began, "decode": clock(peer.device) - stamps[0]}

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
    same = {side: text for side, text in texts.items() if side.name == "vanilla" or side.is_peer}
    for side, text in same.items():
        if not same_text(model, prompts, next(iter(same.values())), text):
            raise UserError(f"{side.name}, compile={side.compile}: another text with vanilla's weights in fp32")


def time_case(cfg, case, device, keep):
    """The rows of one case, one for each side. keep(rows) is called after each round. A side that fails is a row."""
    print(", ".join(map(str, case)), file=sys.stderr, flush=True)
    torch.compiler.reset()
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
    rows = {side: {**case._asdict(), "name": side.name, "compile": side.compile} for side in turns}
    results = {side: [] for side in turns}
    for n in range(cfg.rounds + 1):
        for side in order_of_round(results, n):
            with failure_in(rows[side]):
                results[side].append(turns[side]())
        results = {side: rounds for side, rounds in results.items() if "error" not in rows[side]}
        keep(case_rows(cfg, case, rows, results))
        if n == 0:  # it compiled, so it does not count once there are others
            if case.dtype == "float32":
                check_texts({side: rounds[0][0] for side, rounds in results.items()}, models["vanilla"], prompts)
            results = {side: [] for side in results}
    return list(rows.values())


def case_rows(cfg, case, rows, results):
    """The rows of {Decoder: row}, with what follows from results: {Decoder: what it returned in each round}."""
    seconds = {}  # {part: {Decoder: seconds of each round}}
    for part in ("prefill", "decode"):
        seconds[part] = {side: [times[part] for _, _, times in rounds] for side, rounds in results.items()}
    for side, rounds in results.items():
        row = rows[side]
        row["seconds"] = {part: seconds[part][side] for part in seconds}
        row["prefill_tokens_per_s"] = case.batch * case.prompt / statistics.median(seconds["prefill"][side])
        row["tokens_per_s"] = case.batch * (case.new - 1) / statistics.median(seconds["decode"][side])
        vanilla = Decoder("vanilla", cfg.compile[0] if side.is_peer else side.compile)
        if vanilla in results:
            row["to_vanilla"] = ratio(seconds["decode"], side, vanilla)
        for peer in results:
            if peer.is_peer:
                row[f"to {peer.name}"] = {part: ratio(seconds[part], side, peer) for part in seconds}
        if not side.is_peer:
            row["kv_bytes"] = rounds[0][1]
            row["batch_that_fits"] = int(cfg.kv_gib * 2**30 // (row["kv_bytes"] / case.batch))
    return list(rows.values())


def decoding_table(rows):
    """Markdown of decoded tokens/s with their ratios (median, least–greatest of a round), and of the KV cache."""
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "dtype": row["dtype"], "batch x prompt": f"{row['batch']} x {row['prompt']:,}"}
        line["side"] = f"{row['name']}, compiled" if row["compile"] == "on" else row["name"]
        line["tokens/s"] = row.get("error") or f"{row['tokens_per_s']:,.0f}"
        line["to vanilla"] = spread(row["to_vanilla"]) if "to_vanilla" in row else ""
        line.update({key: spread(row[key]["decode"]) for key in row if key.startswith(f"to {LLAMA}")})
        if "kv_bytes" in row:
            line["KV bytes per row"] = f"{row['kv_bytes'] // row['batch']:,}"
            line["rows that fit"] = f"{row['batch_that_fits']:,}"
        lines.append(line)
    return lines_table(lines, left=4)


def main(cfg: DecodingConfig):
    device = only_process(cfg.device).device
    cases = []
    for shape, dtype, prompt, batch in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
        cases.append(functools.partial(time_case, cfg, Case(shape, dtype, batch, prompt, cfg.new), device))
    torch._dynamo.config.recompile_limit = 1000  # one step function, many models
    measured("decode", cases, decoding_table, cfg.out_file, kv_gib=cfg.kv_gib)


if __name__ == "__main__":
    run_main(main, SETTINGS)
