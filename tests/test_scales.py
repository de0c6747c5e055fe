"""paper.runs and the runs of figures: settings, scales, seeds, names."""

import dataclasses
import math

import pytest
from conftest import ROOT

from describe import count_parameters
from oldconfig import load_settings
from paper import reproduce
from paper.figures import FIGURES, PAPER
from paper.found import Found
from paper.reproduce import ReproduceConfig
from paper.runs import INSPECTED, ONE_RATE, SCALES, Job, train_settings, units_in_words
from train import TrainConfig

N = {"2M": 1_623_856, "82M": 81_901_056, "180M": 179_874_048, "320M": 331_064_320, "468M": 467_921_920}
N_SV = {"2M": 1_623_088, "82M": 80_066_048, "180M": 173_385_984, "468M": 443_804_672}
LENGTHS = (512, 2048, 8192, 32000, 64000)


def asked(*words):
    return load_settings(ReproduceConfig, list(map(str, words)))


def jobs_at(scale):
    """The runs of `all`, or of the only figure of a scale, as they are there."""
    units = SCALES[scale]
    names = units.figures or [name for name in PAPER if name not in units.without]
    return list(dict.fromkeys(units.here(job) for name in names for job in FIGURES[name].at(units).jobs))


here = SCALES["cpu"].here
JOBS = jobs_at("cpu")  # all runs of the paper's figures


def test_default_job_is_the_papers_recipe():
    """train.py's defaults are Table 4; only how often it is evaluated, logged and saved may differ."""
    assert dataclasses.astuple(SCALES["paper"].here(Job())) == ("vanilla", "82M", 2048, 6e-4, 120, "llama", "")
    values = train_settings(Job(), SCALES["paper"], 42, "x")
    mine, default = (dataclasses.asdict(TrainConfig(**of)) for of in (values, {}))
    assert {k for k in default if mine[k] != default[k]} <= {"out_dir", "eval_every", "log_every", "keep", "save_every"}
    assert mine["max_steps"] % mine["eval_every"] == 0 == mine["max_steps"] % mine["save_every"]


def test_paper_scale_is_tables_3_and_4():
    scale = SCALES["paper"]
    for length, batch, each in ((512, 4096, 128), (2048, 1024, 32), (8192, 256, 8), (32000, 64, 2), (64000, 32, 1)):
        cfg = TrainConfig(**train_settings(Job(length=length), scale, 42, "x"))
        assert (cfg.block_size, cfg.batch_tokens, cfg.micro_batch) == (length, batch * length, each)
        assert cfg.split_batch(8) == (each, 4) and cfg.max_steps == 10_000
    for size, shape in {"2M": (4, 2, 16), "82M": (8, 8, 512), "180M": (12, 12, 768), "468M": (24, 16, 1024)}.items():
        for mode, total in (("vanilla", N[size]), ("svformer", N_SV[size])):
            cfg = TrainConfig(**train_settings(Job(mode, size), scale, 42, "x"))
            assert (cfg.n_layer, cfg.n_head, cfg.n_embd) == shape
            assert count_parameters(cfg.model_config(50277)) == total
    middle = TrainConfig(**train_settings(Job(size="320M"), scale, 42, "x"))
    assert count_parameters(middle.model_config(50277)) == N["320M"]
    gpt2 = TrainConfig(**train_settings(Job(arch="gpt2"), scale, 42, "x"))
    assert count_parameters(gpt2.model_config(50277)) == 77_752_320  # the paper's 78M
    big = TrainConfig(**train_settings(Job(size="468M"), scale, 42, "x"))
    assert big.eval_every * big.batch_tokens == 2_097_152_000  # every 2B tokens, Figure 6


@pytest.mark.parametrize("name", SCALES)
def test_every_run_of_every_figure_is_valid(name):
    scale, every = SCALES[name], jobs_at(name)
    for job in every:
        values = train_settings(job, scale, 7, f"out/{job.name}")
        cfg = TrainConfig(**values)
        assert cfg.split_batch(max(1, scale.gpus))[0] == cfg.micro_batch
        assert cfg.value_mode.name == job.mode and cfg.arch == job.arch and cfg.seed == 7
        assert cfg.block_size == scale.lengths[job.length][0] and 1 <= cfg.warmup_steps < cfg.max_steps
        assert cfg.save_every <= cfg.max_steps / 2  # a kill costs half of a run at most
    assert len({job.name for job in every}) == len(every)
    assert len({str(train_settings(job, scale, 7, "same")) for job in every}) == len(every)
    tokens = {length: block * batch for length, (block, batch, _) in scale.lengths.items()}
    assert max(tokens.values()) / min(tokens.values()) < 1.03 and scale.steps >= 10 * scale.window
    expected = {"gpu": LENGTHS[1:2], "night": LENGTHS[:4]}
    assert tuple(tokens) == expected.get(name, LENGTHS)


def test_config_file_of_scale_night():
    """A run with the config file has the settings of a run at the scale, so on its data the same numbers."""
    mine = TrainConfig(**train_settings(Job("cla2"), SCALES["night"], 1, "x"))
    file = load_settings(TrainConfig, [str(ROOT / "config/night.py"), "--value_mode=cla2", "--seed=1", "--out_dir=x"])
    free = ("save_every", "log_every", "keep", "compile", "device", "data_dir")
    mine, file = ({k: v for k, v in dataclasses.asdict(of).items() if k not in free} for of in (mine, file))
    assert mine == file


def test_seeds():
    for scale in ("cpu", "paper"):
        assert {asked("all", f"--scale={scale}").seeds_of(job) for job in JOBS} == {(42,)}
    two = asked("fig4", "tab5", "--seeds=2", "--out_dir=o")
    assert {two.seeds_of(job) for job in JOBS} == {(42, 1)}
    plans = {str(plan.folder): plan for plan in reproduce.make_plans(two, {})}
    assert len(plans) == 2 * 2 * 3 and {plan.values["seed"] for plan in plans.values()} == {42, 1}
    assert list(plans)[:3] == ["o/82M-2048-vanilla-42", "o/82M-2048-vanilla-1", "o/180M-2048-vanilla-42"]
    assert [name for name, plan in plans.items() if plan.analyse] == list(plans)[:2]
    assert not any(plan.score for plan in plans.values())


def test_what_a_scale_decides():
    """At scale night: each mode's own rate, the rate that all have, the model that is inspected, a run that differs in
    one setting, attention of long blocks."""
    night = dataclasses.replace(SCALES["night"], tuned={("82M", "gqa2"): 2e-4, ("2M", "gqa2"): 1e-3})
    assert night.here(Job("gqa2", "180M")).lr == 2e-4 and night.here(Job("gqa2", "2M")).lr == 1e-3
    assert night.here(Job("gqa2")).lr == 2e-4 and night.here(Job("gqa2", lr=1e-4)).lr == 1e-4
    assert night.here(Job("gqa2").baseline).lr == 3e-4  # vanilla's
    assert night.here(Job("gqa2", lr=ONE_RATE)).lr == night.here(Job("gqa2", lr=ONE_RATE).baseline).lr == 1.5e-4
    assert SCALES["cpu"].here(Job("gqa2", lr=ONE_RATE)) == SCALES["cpu"].here(Job("gqa2"))
    attn = {length: train_settings(Job(length=length), night, 42, "x")["attn"] for length in night.lengths}
    assert attn == {512: "eager", 2048: "eager", 8192: "eager", 32000: "sdpa"}
    found = Found("out", night, lambda job: (42,))
    assert found.rate_in_words(Job("gqa2")) == ", rate 0.002" and not found.rate_in_words(Job("cla2"))
    values = train_settings(Job("gqa2", INSPECTED), night, 42, "x")
    assert (values["bos"], values["n_embd"], values["learning_rate"]) == (True, 128, 2e-3)
    job = Job(change="weight_decay=0.3,batch_tokens=4096")
    values = train_settings(job, night, 42, "x")
    assert (values["weight_decay"], values["batch_tokens"]) == (0.3, 4096)
    assert job.name == "82M-2048-vanilla-weight_decay0.3-batch_tokens4096"
    cfg = asked("all", "--scale=night")
    three = (Job(), Job("svformer"), Job("cross"), Job("resformer", "468M"))
    three += Job("svformer", "468M"), Job("gqa2", INSPECTED), Job("resformer", lr=6e-4), Job("svformer", lr=3e-4)
    assert {len(cfg.seeds_of(job)) for job in three} == {3}
    one = (
        Job("gqa2"),
        Job("resformer", lr=1.5e-4),
        Job("cross", lr=6e-4),
        Job("svformer", "180M"),
        Job("gqa2", "2M"),
        Job(length=512),
        Job(length=512, lr=ONE_RATE),
        job,
    )
    assert {len(cfg.seeds_of(job)) for job in one} == {1}


def test_the_control_is_no_claim_of_the_paper():
    """Of the figure of v5's variants: it is shown with its numbers, but gets no verdict."""
    bounds = {claim.what: (claim.above, claim.below) for claim in FIGURES["v5"].claims if "scaled" in claim.what}
    none = (-math.inf, math.inf)
    assert bounds == dict.fromkeys(
        ["resformer_lambda − scaled, validation loss", "scaled − vanilla, validation loss"], none
    )


def test_units_in_words():
    said = units_in_words(SCALES["night"])
    assert "6 layers, 4 heads, width 128 for 82M" in said and "128 for 2,048" in said and "100 for 120" in said
    assert (
        "In place of its learning rates: 10 times as much; the usual one is 0.003, of svformer at 82M 0.006, " in said
    )
    assert "of resformer at 2M 0.006, " in said and "of svformer at 468M 0.003, " in said
    assert said.endswith("of resformer_lambda at 468M 0.0015. A run has 6,000 steps.")
