"""Decoding token by token, against transformers' generate."""

import itertools
import statistics

import torch

from bench.common import LLAMA, SHAPES, as_llama, clock, in_turn, ratio, spread, timed, versions
from configurator import UserError
from describe import count_parameters
from model import GPT
from sample import generate
from value_modes import ModelConfig, kv_floats_per_token


def copy_rate(device, megabytes=256):
    """Bytes per second that a copy reads and writes: the best of five, which is what memory can do."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def our_decoder(model, ids, new, compiled):
    """A function that continues each of ids -> ids of the new tokens, bytes of the cache, seconds by part."""

    def decode():
        rows, cache, seconds = generate(model, ids, new, temperature=0, compile=compiled)
        return rows, cache.nbytes, seconds

    return decode


def peers_decoder(peer, ids, new, device, **how):
    """The same with transformers' generate. Its prefill is timed as that of one token."""
    idx = torch.tensor(ids, device=device)  # (B, T)
    peer.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(n):
        about = dict(attention_mask=torch.ones_like(idx), do_sample=False, pad_token_id=0, max_new_tokens=n)
        return peer.generate(idx, **about, **how)[:, idx.size(1) :]

    def decode():
        prefill, start = timed(lambda: run(1), device), clock(device)
        rows = run(new)
        return rows.tolist(), None, {"prefill": prefill, "decode": clock(device) - start - prefill}

    return decode


def decoders(cfg, shape, dtype, B, T, device):
    """{(name, compile): (a decoder, its model's ModelConfig or None)}, our vanilla model, and the prompts, B of T."""
    ids = torch.randint(SHAPES[shape]["vocab_size"], (B, T), generator=torch.Generator().manual_seed(0)).tolist()
    sides, vanilla = {}, None
    for mode in cfg.modes:
        model = GPT(ModelConfig(**SHAPES[shape], block_size=T + cfg.new, value_mode=mode)).eval()
        model = model.to(device, getattr(torch, dtype))
        vanilla = vanilla or model
        for how in cfg.compile:
            sides[mode, how] = our_decoder(model, ids, cfg.new, how == "on"), model.cfg
    if cfg.peers:
        for kind in ("dynamic", "static"):
            how = {"cache_implementation": "static"} if kind == "static" else {}
            sides[f"{LLAMA}, {kind}", "off"] = peers_decoder(as_llama(vanilla), ids, cfg.new, device, **how), None
    return sides, vanilla, ids


def same_text(model, prompts, ours, theirs):
    """Whether two sides' greedy tokens agree, up to a place where the model gives both of them the same logit."""
    for ids, a, b in zip(prompts, ours, theirs, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            with torch.inference_mode():
                idx = torch.tensor([ids + a[:at]], device=model.head.weight.device)
                logits = model.head(model.hidden(idx)[0, -1])
            if not (logits[a[at]] - logits[b[at]]).abs() < 1e-4:
                return False
    return True


def decode_rows(cfg, shape, dtype, B, T, device, copies):
    """The rows of one shape, dtype, batch and length of prompt. Raises UserError if a cache took other bytes than the
    plan says, or if in fp32 vanilla's text, compiled or by a peer, is another."""
    sides, vanilla, prompts = decoders(cfg, shape, dtype, B, T, device)
    found, first = {side: run() for side, (run, _) in sides.items()}, ("vanilla", cfg.compile[0])
    for (name, how), (text, _, _) in found.items():
        if dtype == "float32" and name not in cfg.modes[1:] and not same_text(vanilla, prompts, found[first][0], text):
            raise UserError(f"{name}, compile={how}: another text than ours in fp32 with the same weights")
    seconds = {part: {side: [] for side in sides} for part in ("prefill", "decode", "both")}
    for i in range(cfg.rounds):
        order = list(sides)[:: 1 if i % 2 == 0 else -1]
        for side, (_, _, took) in in_turn({side: sides[side][0] for side in order}, 1, device)[1].items():
            for part in seconds:
                seconds[part][side].append(took[part] if part in took else took["prefill"] + took["decode"])
    rows = []
    for side, (_, config) in sides.items():
        about = {"shape": shape, "dtype": dtype, "batch": B, "prompt": T, "new": cfg.new}
        row = about | {"name": side[0], "compile": side[1], "seconds": {part: seconds[part][side] for part in seconds}}
        row["prefill_tokens_per_s"] = B * T / statistics.median(seconds["prefill"][side])
        row["tokens_per_s"] = B * (cfg.new - 1) / statistics.median(seconds["decode"][side])
        row["to_vanilla"] = ratio(seconds["decode"], side, ("vanilla", side[1]) if config else first)
        for peer in (peer for peer in sides if sides[peer][1] is None):
            row[f"to {peer[0]}"] = {part: ratio(seconds[part], side, peer) for part in ("decode", "both")}
        rows.append(row | (memory_of(cfg, config, row, found[side][1], copies) if config else {}))
    return rows


def memory_of(cfg, config, row, allocated, copies):
    """What a row of ours stores and reads. A step reads each weight that multiplies, and the keys and values stored so
    far: once if a layer's that others use too stay in a cache of the processor ("least"), else once in each layer."""
    size = torch.finfo(getattr(torch, row["dtype"])).bits // 8
    length, each = row["prompt"] + cfg.new - 1, kv_floats_per_token(config) * size
    if allocated != row["batch"] * length * each:
        raise UserError(f"{row['name']}: the cache took {allocated:,} bytes, {row['batch'] * length * each:,} planned")
    middle = row["prompt"] + cfg.new / 2
    weights, every = count_parameters(config)[1] * size, 2 * config.n_layer * config.n_kv_head * config.head_dim * size
    reads = {"least": weights + row["batch"] * middle * each, "most": weights + row["batch"] * middle * every}
    per_s = row["tokens_per_s"] / row["batch"]
    return {
        "kv_bytes": allocated,
        "bytes_per_step": reads,
        "of_copy_rate": {name: n * per_s / copies for name, n in reads.items()},
        "batch_that_fits": int(cfg.kv_gib * 2**30 // (length * each)),
    }


def show_decoding(rows):
    """The table of what decode_rows found."""
    for row in rows:
        cells = [row["shape"], row["dtype"], f"{row['batch']}", f"{row['prompt']:,}", row["name"], row["compile"]]
        cells += [f"{row['prefill_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}", spread(row["to_vanilla"])]
        cells += [spread(value["decode"]) for key, value in row.items() if key.startswith(f"to {LLAMA}")]
        if share := row.get("of_copy_rate"):
            cells += [f"{share['least']:.0%}–{share['most']:.0%}"]
            cells += [f"{row[key]:,}" for key in ("kv_bytes", "batch_that_fits")]
        else:
            cells += [""] * 3
        print("| " + " | ".join(cells) + " |", flush=True)


def bench_decode(cfg, world):
    """Tokens per second of greedy decoding from a prompt of random tokens, random weights, no end of text."""
    if cfg.peers and not versions("transformers")["transformers"]:
        raise UserError("the peer is missing: pip install -r requirements-peers.txt")
    copies, rows = copy_rate(world.device), []
    print(f"a copy reads and writes {copies / 1e9:,.1f} GB/s\n")
    heads = ["shape", "dtype", "batch", "prompt", "side", "compile"]
    heads += ["prefill tokens/s", "decode tokens/s", "decode to vanilla"]
    heads += [f"decode to {LLAMA}, {kind}" for kind in ("dynamic", "static") if cfg.peers]
    heads += ["of copy rate", "KV bytes", f"rows in {cfg.kv_gib:g} GiB"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * 6 + "---:|" * (len(heads) - 6))
    with torch._dynamo.config.patch(recompile_limit=1000):  # one step function, many models
        for shape, dtype, T, B in itertools.product(cfg.shape, cfg.dtype, cfg.prompt, cfg.batch):
            try:
                found = decode_rows(cfg, shape, dtype, B, T, world.device, copies)
            except torch.cuda.OutOfMemoryError:
                print(f"| {shape} | {dtype} | {B} | {T:,} | does not fit |" + " |" * (len(heads) - 5), flush=True)
                continue
            finally:
                torch.compiler.reset()
            show_decoding(found)
            rows += found
    return {"copy_bytes_per_s": copies, "kv_gib": cfg.kv_gib, "rows": rows}
