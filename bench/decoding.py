"""Greedy decoding after prompts of random tokens: tokens/s, bytes of the KV cache. Ours against transformers' generate.

python -m bench.decoding --shape=82M --batch=8 --peers=dynamic,static
"""

import statistics
from dataclasses import dataclass
from typing import Literal

import torch

import bench
from common.ranks import clock, only_process
from configurator import run, setting
from sample import generate

PEERS = {"dynamic": f"{bench.LLAMA}, dynamic", "static": f"{bench.LLAMA}, static"}


@dataclass(frozen=True)
class DecodingConfig(bench.BenchConfig):
    """The sides are the modes and the peers, which continue the same prompts."""

    peers: tuple[Literal[*PEERS], ...] = setting((), "caches of transformers' generate")
    batch: int = setting(1, "rows in the batch", least=1, group="Work")
    prompt: int = setting(32, "tokens of each prompt", least=1)
    new: int = setting(128, "tokens to add to each", least=3)


def decode_ours(model, prompts, row):
    """(new tokens (B, new), seconds {"prefill", "decode"}); compiling is not counted. prompts: (B, T)."""
    rows, cache, seconds = generate(model, prompts.tolist(), row["new"], temperature=0, compile=row["compile"] == "on")
    row["kv_bytes"] = cache.nbytes
    # generate times its first step apart, because that one compiles; here it counts like each of the others
    steps = row["new"] - 1
    seconds["decode"] *= steps / (steps - 1)
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


def derive(row):
    row["tokens_per_s"] = row["batch"] * (row["new"] - 1) / statistics.median(row["seconds"])


def decoding_table(rows):
    """Markdown of decoded tokens/s with their ratios (median, least–greatest of a round), and of the KV cache."""
    lines = []
    for row in rows:
        line = {"shape": row["shape"], "dtype": row["dtype"], "batch x prompt": f"{row['batch']} x {row['prompt']:,}"}
        line["side"] = f"{row['name']}, compiled" if row["compile"] == "on" else row["name"]
        line["tokens/s"] = row.get("error") or f"{row['tokens_per_s']:,.0f}"
        line["vs vanilla"] = bench.spread(row["to_vanilla"]) if "to_vanilla" in row else ""
        for key in row:
            if key.startswith(f"to {bench.LLAMA}"):
                line[f"vs {key.removeprefix('to ')}"] = bench.spread(row[key])
        if "kv_bytes" in row:
            line["KV bytes per row"] = f"{row['kv_bytes'] // row['batch']:,}"
        lines.append(line)
    return bench.table(lines, left=4)


def main(cfg: DecodingConfig):
    torch._dynamo.config.recompile_limit = 1000  # one step function, many models
    device = only_process(cfg.device).device
    peers = [PEERS[peer] for peer in cfg.peers]
    rows = bench.new_rows(cfg, peers)
    for row in rows:
        row.update(batch=cfg.batch, prompt=cfg.prompt, new=cfg.new, prefill_s=[])
        if row["name"] in peers:
            row["compile"] = "off"
    texts = []  # what the sides with vanilla's weights say

    def start(row):
        model = bench.new_model(row["name"], cfg.shape, cfg.prompt + cfg.new, device)
        model = model.eval().to(getattr(torch, cfg.dtype))
        prompts, _ = bench.random_batch(cfg.shape, cfg.batch, cfg.prompt, device)
        decode = decode_llama if row["name"] in peers else decode_ours
        text, row["warm_up_s"] = decode(model, prompts, row)  # it compiles
        if row["name"] in ("vanilla", *peers):
            texts.append(text)
            row["same_text"] = (text == texts[0]).double().mean().item()  # share of the new tokens

        # The text does not change from turn to turn, so we keep the seconds alone.
        def turn():
            _, seconds = decode(model, prompts, row)
            row["prefill_s"].append(seconds["prefill"])
            row["seconds"].append(seconds["decode"])

        return turn

    bench.race("decode", cfg, rows, start, derive)
    print(decoding_table(rows))


if __name__ == "__main__":
    run(main, __doc__)
