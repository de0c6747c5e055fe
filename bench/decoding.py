"""Greedy decoding after prompts of random tokens: tokens/s, bytes of the KV cache. Ours against transformers' generate.

python -m bench.decoding --shape=82M --batch=1,8 --peers=dynamic,static
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

import bench
from common.ranks import clock, only_process
from configurator import run, setting
from sample import generate

PEERS = {"dynamic": f"{bench.LLAMA}, dynamic", "static": f"{bench.LLAMA}, static"}
KV_GIB = 10  # memory for keys and values, to say how many rows fit


@dataclass(frozen=True)
class DecodingConfig(bench.BenchConfig):
    """The sides are all combinations of modes and compile, and the peers."""

    peers: tuple[Literal[*PEERS], ...] = setting((), "caches of transformers' generate")
    batch: tuple[int, ...] = setting((1, 8), "rows", least=1, group="Work")
    prompt: tuple[int, ...] = setting((32,), "tokens of each prompt", least=1)
    new: int = setting(128, "tokens to add to each", least=2)


def measure(cfg, case, device, results):
    """Let all sides continue the same prompts. case: {"shape", "dtype", "batch", "prompt", "new"}."""
    torch.compiler.reset()
    peers = [PEERS[peer] for peer in cfg.peers]
    sides = [*itertools.product(cfg.modes, cfg.compile), *((peer, "off") for peer in peers)]
    texts = []  # what the sides with vanilla's weights say

    def start(row):
        model = bench.new_model(row["name"], row["shape"], row["prompt"] + row["new"], device)
        model = model.eval().to(getattr(torch, row["dtype"]))
        prompts, _ = bench.random_batch(row["shape"], row["batch"], row["prompt"], device)
        decode = decode_llama if row["name"] in peers else decode_ours
        text, row["warm_up_s"] = decode(model, prompts, row)  # it compiles
        row["seconds"] = {"prefill": [], "decode": []}
        if row["name"] in ("vanilla", *peers):
            texts.append(text)
            row["same_text"] = (text == texts[0]).double().mean().item()  # share of the new tokens

        # The text does not change from turn to turn, so we keep the seconds alone.
        def turn():
            _, seconds = decode(model, prompts, row)
            for part, found in row["seconds"].items():
                found.append(seconds[part])

        return turn

    bench.race([{**case, "name": name, "compile": compile} for name, compile in sides], start, cfg.rounds, results)


def decode_ours(model, prompts, row):
    """(new tokens (B, new), seconds {"prefill", "decode"}); compiling is not counted. prompts: (B, T)."""
    rows, cache, seconds = generate(model, prompts.tolist(), row["new"], temperature=0, compile=row["compile"] == "on")
    row["kv_bytes"] = cache.nbytes
    return torch.tensor(rows), seconds


@torch.inference_mode()
def decode_llama(model, prompts, row):
    """The same. The prefill ends with the first new token."""
    stamps = [clock(prompts.device)]

    def stamp(ids, scores, **kw):  # transformers calls it after each new token, and stops the rows that are True
        if len(stamps) == 1:
            stamps.append(clock(ids.device))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    # No text ends early, so all sides make the same number of tokens.
    model.generation_config.eos_token_id = None
    how = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    if row["name"] == PEERS["static"]:
        how["cache_implementation"] = "static"
    ids = model.generate(prompts, max_new_tokens=row["new"], stopping_criteria=[stamp], **how)  # (B, T + new)
    decoded = clock(prompts.device) - stamps[1]
    return ids[:, prompts.size(1) :].cpu(), {"prefill": stamps[1] - stamps[0], "decode": decoded}


def seconds_of(row, part="decode"):
    """Seconds in each round so far, or in the warm-up before there are any."""
    return row["seconds"][part] or [row["warm_up_s"][part]]


def derive(rows):
    bench.compare(rows, ("shape", "dtype", "batch", "prompt"), seconds_of)
    for row in rows:
        row["prefill_tokens_per_s"] = row["batch"] * row["prompt"] / statistics.median(seconds_of(row, "prefill"))
        row["tokens_per_s"] = row["batch"] * (row["new"] - 1) / statistics.median(seconds_of(row))
        if "kv_bytes" in row:
            row["batch_that_fits"] = int(KV_GIB * 2**30 // (row["kv_bytes"] / row["batch"]))


def decoding_table(rows):
    """Markdown of decoded tokens/s with their ratios (median, least–greatest of a round), and of the KV cache."""
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "dtype": row["dtype"], "batch x prompt": f"{row['batch']} x {row['prompt']:,}"}
        line["side"] = f"{row['name']}, compiled" if row["compile"] == "on" else row["name"]
        line["tokens/s"] = row.get("error") or f"{row['tokens_per_s']:,.0f}"
        line["to vanilla"] = bench.spread(row["to_vanilla"]) if "to_vanilla" in row else ""
        for key in (key for key in row if key.startswith(f"to {bench.LLAMA}")):
            line[key] = bench.spread(row[key].get("decode", row[key]))  # older files have the prefill's ratio too
        if "batch_that_fits" in row:
            line["KV bytes per row"] = f"{row['kv_bytes'] // row['batch']:,}"
            line["rows that fit"] = f"{row['batch_that_fits']:,}"
        lines.append(line)
    return bench.table(lines, left=4)


def main(cfg: DecodingConfig):
    torch._dynamo.config.recompile_limit = 1000  # one step function, many models
    device = only_process(cfg.device).device
    results = bench.Results("decode", cfg.out_file, derive)
    for shape, dtype, prompt, batch in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
        case = {"shape": shape, "dtype": dtype, "batch": batch, "prompt": prompt, "new": cfg.new}
        measure(cfg, case, device, results)
    print(f"{decoding_table(results.rows)}\nwrote {results.path}")


if __name__ == "__main__":
    run(main, __doc__)
