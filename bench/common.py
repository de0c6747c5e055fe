"""What all benchmarks share: turns, ratios, the Llama peer, and the file of results. Read next: training.py."""

import platform
import re
import statistics
from importlib import metadata
from pathlib import Path

import torch

import hf
from configurator import UserError
from files import write_json
from runtime import Distributed, clock, environment

PEER_PACKAGES = ("transformers", "lm-eval", "x-transformers", "tiktoken")


def only_process(device):
    """The Distributed of a benchmark; raises UserError under torchrun."""
    world = Distributed(device)
    if world.size > 1:
        raise UserError("a benchmark runs in one process; start it without torchrun")
    return world


def timed(function, device):
    """Seconds that a function takes."""
    start = clock(device)
    function()
    return clock(device) - start


def in_turn(sides, rounds, device):
    """Call each function of sides = {key: function} once a round, in an order that turns around from round to round.
    Returns {key: seconds of each round}, {key: result of each round}. torch.utils.benchmark cannot alternate."""
    seconds = {key: [] for key in sides}
    results = {key: [] for key in sides}
    order = list(sides)
    for _ in range(rounds):
        for key in order:
            start = clock(device)
            results[key].append(sides[key]())
            seconds[key].append(clock(device) - start)
        order.reverse()
    return seconds, results


def ratio(seconds, side, other):
    """How many times as fast `side` is as `other`: median, least and greatest of the rounds."""
    ratios = [b / a for a, b in zip(seconds[side], seconds[other], strict=True)]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def spread(found):
    """A ratio as text: its median (least–greatest)."""
    return f"{found['ratio']:.2f} ({found['least']:.2f}–{found['greatest']:.2f})"


def as_llama(model, eot=0):
    """transformers' LlamaForCausalLM with the weights of a vanilla model of ours. Raises ImportError without it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = model.cfg
    if cfg.arch != "llama" or cfg.value_mode.name != "vanilla":
        raise UserError("the peer is transformers' Llama; give a vanilla run of arch=llama")
    config = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.n_hidden,
        num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head,
        max_position_embeddings=cfg.block_size,
        rms_norm_eps=cfg.norm_eps,
        rope_theta=cfg.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    peer = LlamaForCausalLM(config).to(model.head.weight)
    weights = {name: parameter[rows].detach() for name, parameter, rows in hf.hf_parts(model)}
    missing, extra = peer.load_state_dict(weights, strict=False)
    assert not extra and all("rotary" in name for name in missing), (missing, extra)
    return peer.eval()


def machine_name(device):
    """What computes here, for a file's name: the GPU, or the processor and the number of threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")  # Linux; platform.processor() is empty there
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
        processor = found[1] if found else platform.processor() or platform.machine()
        name = f"{processor} x{torch.get_num_threads()}"
    name = re.sub(r"\((R|TM)\)|CPU|Processor", "", name)
    return re.sub(r"\W+", "_", name).strip("_").lower()


def write_results(what, result, device, out_file=""):
    """Write {what, machine, versions, command, …, result's own keys} to out_file, or to the file that is named after
    what was measured and the machine."""
    name = machine_name(device)
    path = out_file or f"results/bench_{what}_{name}.json"
    installed = {package.name.replace("_", "-"): package.version for package in metadata.distributions()}
    versions = {package: installed.get(package) for package in PEER_PACKAGES}
    write_json(path, {"what": what, "processor": name, **environment(), **versions, **result})
    print(f"wrote {path}")
