"""Value modes as data: names, plans, and what is rejected."""

import dataclasses
import json
import math
import re

import pytest
from conftest import config

import value_modes
from value_modes import VALUE_MODES, ModelConfig, Residual, ValueMode, get_mode, pick_layers, plan_layers


def mode_of(*residuals, **kw):
    return ValueMode(tuple(residuals), **kw)


def sources(cfg, index=0):
    """What residual `index` reads in each layer."""
    found = []
    for layer in plan_layers(cfg):
        mine = [mix.sources for mix in layer.mixes if mix.index == index]
        found.append(mine[0] if mine else ())
    return found


NAMED = "resformer_lambda_0.2 resformer_lambda_5 neutreno_0.6 resformer_neutreno_0.4 identity_0.5 resformer_sparse_2 "
NAMED += "resformer_lambda_1e-05 resformer_lambda_1e16 resformer_lambda_-0.5 neutreno_0.123456789"


def test_names_lead_to_modes_and_back():
    for name in [*VALUE_MODES, *NAMED.split()]:
        assert get_mode(name).name == name and get_mode(dataclasses.replace(get_mode(name))).name == name


def test_a_mode_has_the_name_that_its_user_gave():
    mine = ValueMode((Residual(lam=(1.0, 2.0)),), name="mine")  # equals resformer_lambda
    assert ModelConfig(value_mode=mine).value_mode.name == "mine"
    assert ModelConfig(value_mode=ValueMode((Residual(lam=(1.0, 2.0)),))).value_mode.name == "resformer_lambda"
    assert mine == get_mode("resformer_lambda")  # the name says nothing of what it computes
    with pytest.raises(ValueError, match="name='resformer' already means another mode"):
        ModelConfig(value_mode=dataclasses.replace(mine, name="resformer"))
    with pytest.raises(ValueError, match="name='resformer_lambda_0.5' already means another mode"):
        ModelConfig(value_mode=dataclasses.replace(mine, name="resformer_lambda_0.5"))
    with pytest.raises(ValueError, match="use letters, digits"):
        ValueMode(name="a/b")


def test_a_row_of_the_table_keeps_its_name(monkeypatch):
    """A user's row that equals another one is still called by its own name."""
    row = ValueMode((Residual(lam=(1.0, 2.0)),))
    monkeypatch.setitem(value_modes.VALUE_MODES, "mine", dataclasses.replace(row, name="mine"))
    assert ModelConfig(value_mode="mine").value_mode.name == "mine"


def test_a_source_may_be_a_layers_number():
    cfg = config(ValueMode((Residual(source=1),)))
    assert sources(cfg) == [(), (), (1,), (1,)]
    with pytest.raises(ValueError, match="only 0..3"):
        config(ValueMode((Residual(source=4),)))
    with pytest.raises(ValueError, match="does nothing in layer 3"):
        config(ValueMode((Residual(source=3),)))
    with pytest.raises(ValueError, match="source=-1"):
        Residual(source=-1)


def test_other_spellings_of_a_number():
    assert get_mode("resformer_lambda_0.50").name == "resformer_lambda_0.5"
    assert get_mode("resformer_lambda_1000000").name == "resformer_lambda_1000000"
    assert get_mode("resformer_lambda_2.0").name == "resformer_lambda"


def test_lists_become_tuples():
    """A mode written with lists is the one that a checkpoint gives back."""
    mode = ValueMode([Residual(lam=[1, 0.7], layers=[1, -1])], share_k=[0, 2], dense=[1, 1])
    assert mode == ValueMode((Residual(lam=(1.0, 0.7), layers=(1, -1)),), share_k=(0, 2), dense=(1, 1))
    assert ValueMode(**json.loads(json.dumps(dataclasses.asdict(mode)))) == mode


def test_pairs_of_borrowed_tensors_are_read_once():
    """Scores of layers that share q and k are the same scores: they count once, and not at all in those layers."""
    cfg = config(mode_of(Residual(of="probs", source="all"), share_q="every 2", share_k="every 2"))
    assert sources(cfg) == [(), (), (0,), ()]
    cfg = config(mode_of(Residual(map="cross", source="all"), share_k="every 2", share_v="every 2"))
    assert sources(cfg) == [(), (), (0,), ()]
    cfg = config(mode_of(Residual(map="cross"), share_k="every 2"))  # layers 1 and 3 have values of their own
    assert sources(cfg) == [(), (0,), (0,), (0,)]
    cfg = config(mode_of(Residual(map="cross"), share_k="lower half", share_v="lower half", borrow_v="first"))
    assert sources(cfg) == [(), (0,), (), ()]  # layers 2 and 3 own neither, though no lower layer reads the same two


def test_a_number_behind_a_name_is_the_weight_of_the_sources():
    assert get_mode("resformer_lambda_0.2").residuals == (Residual(lam=(1.0, 0.2)),)
    assert get_mode("resformer_neutreno_0.4").residuals == (Residual(), Residual(map="delta", lam=(1.0, 0.4)))
    two = ValueMode((Residual(lam=(1.0, 0.5)), Residual(map="delta", lam=(1.0, 0.2))))
    assert [r.lam for r in two.with_lam(0.9).residuals] == [(1.0, 0.5), (1.0, 0.9)]  # the last
    assert get_mode(ValueMode((Residual(lam=(0.7, 0.3)),))).name.startswith("custom_")
    one, other = (ValueMode((Residual(lam=(0.7, x)),)) for x in (0.3, 0.4))
    assert get_mode(one).name != get_mode(other).name  # two models of a user's own are not seeds of one


@pytest.mark.parametrize(
    "spec,layers",
    [
        ("-3:", [5, 6, 7]),
        ("::-2", [1, 3, 5, 7]),
        ("2:4", [2, 3]),
        ((0, 0.5, -1), [0, 4, 7]),
        ((0, 0.375, 0.625, -1), [0, 3, 5, 7]),
        ((3, 1, 1), [1, 3]),
    ],
)
def test_layers_are_picked(spec, layers):
    assert pick_layers(spec, 8) == layers


@pytest.mark.parametrize(
    "tables,order", [("each", [0, 1, 2, 3, 4, 5]), ("mirror", [0, 1, 2, 2, 1, 0]), ("cycle", [0, 1, 2, 0, 1, 2])]
)
def test_layers_share_token_tables(tables, order):
    cfg = config(mode_of(Residual(source="token", tables=tables)), n_layer=6)
    assert sources(cfg) == [(f"table {t}",) for t in order]


def test_unmixed_sources_are_their_owners():
    """The values of a layer that borrows are another's: each is counted once."""
    cfg = config(mode_of(Residual(source="all"), Residual(source="prev"), share_v=(0, 2, 3)))
    assert sources(cfg) == [(), (), (0,), (0, 2)] and sources(cfg, 1) == [(), (), (0,), (2,)]


IMPOSSIBLE = [
    (lambda: ModelConfig(n_layer=1, value_mode="resformer"), "does nothing in layer 0"),
    (lambda: ValueMode(dense=(1,)), "(dilation, period)"),
    (lambda: ValueMode(dense=1), "dense takes tuple[int, ...] | None"),
    (lambda: ValueMode(kv_group=2.5), "kv_group takes int"),
    (lambda: ValueMode(share_k=1.5), "share_k takes"),
    (lambda: ValueMode(values="keys", share_k="every 2"), "values='keys' needs share_k"),
    (lambda: ValueMode((Residual(),), heads_from_layer_0=0.5), "heads_from_layer_0 divides the value heads"),
    (lambda: ValueMode(share_v="first", heads_from_layer_0=0.5), "heads_from_layer_0 divides the value heads"),
    (lambda: ValueMode(name=".."), "begin with a letter or digit"),
    (lambda: ValueMode(share_v="first", output="exclusive"), "output='exclusive' takes out a layer's own values"),
    (
        lambda: config("skipv1", n_kv_head=1),
        "heads_from_layer_0=0.5 of 1 value heads: a whole number of them, and not all",
    ),
    (
        lambda: config(ValueMode(heads_from_layer_0=1.0)),
        "heads_from_layer_0=1.0 of 8 value heads: a whole number of them, and not all",
    ),
    (lambda: ValueMode(("resformer",)), "residuals takes tuple"),
    (lambda: Residual(lam=("1", "2")), "lam takes"),
    (lambda: Residual(lam=(1.0, math.nan)), "lam takes tuple[float, ...]"),
    (lambda: Residual(layers="3"), "is not a slice of layers"),
    (lambda: Residual(layers="::0"), "is not a slice of layers"),
    (lambda: Residual(tables="mirror"), "is for source='token'"),
    (lambda: Residual(learn="lerp", lam=(5.0, 0.3)), "must sum to 1"),
    (lambda: ModelConfig(value_mode="resformer_plus_2"), "resformer_plus does not take a number"),
    (lambda: ModelConfig(n_embd=24, value_mode="vanilla"), "RoPE rotates pairs, so it must be even"),
    (lambda: ModelConfig(n_embd=510), "n_embd=510"),
    (lambda: ModelConfig(n_kv_head=3), "n_kv_head=3"),
    (lambda: ModelConfig(n_layer=0), "n_layer=0"),
    (lambda: ModelConfig(n_hidden=-1), "n_hidden=-1"),
    (lambda: ModelConfig(arch="gpt3"), "arch takes Literal['llama', 'gpt2']"),
    (lambda: ModelConfig(arch="gpt2", rope_scaling=(8.0, 1.0, 4.0, 32.0)), "gpt2 learns its positions"),
    (lambda: ModelConfig(rope_scaling=(8.0, 1.0, 4.0)), "all positive"),
    (lambda: ModelConfig(rope_scaling=(0.0, 1.0, 4.0, 32.0)), "all positive"),
    (lambda: ModelConfig(rope_scaling=(8.0, 4.0, 4.0, 32.0)), "low < high"),
    (lambda: ModelConfig(value_mode="resfromer"), "did you mean 'resformer'"),
    (lambda: ModelConfig(value_mode="resformer_0.5"), "resformer does not take a number"),
    (lambda: ModelConfig(n_head=16, n_embd=96, value_mode=ValueMode(kv_group=3)), "n_head=16 is not a multiple"),
    (lambda: ModelConfig(n_kv_head=4, value_mode="gqa4"), "value_mode makes it 2"),
    (lambda: ValueMode(kv_group=-1), "kv_group=-1"),
    (lambda: ModelConfig(n_layer=4, value_mode=ValueMode(share_v=(0, 7))), "only 0..3"),
    (lambda: ModelConfig(n_layer=4, value_mode=ValueMode((Residual(layers=(-5, 2)),))), "only 0..3"),
    (lambda: ModelConfig(n_layer=4, value_mode=ValueMode((Residual(layers=(1.5,)),))), "only 0..3"),
    (lambda: ModelConfig(n_layer=4, value_mode=ValueMode((Residual(source="token", layers=(-0.1,)),))), "only 0..3"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(source=5, layers="1:3"),))), "does nothing in layer 2"),
    (lambda: ValueMode(share_v=(1, 2)), "begin with 0"),
    (lambda: ValueMode(share_v=()), "begin with 0"),
    (lambda: ValueMode(share_v=-2), "share_v takes"),
    (lambda: ValueMode(dense=(0, 1)), "at least 1"),
    (lambda: Residual(map="dleta"), "map takes Literal['own', 'identity', 'delta', 'cross']"),
    (lambda: Residual(source="second"), "source takes"),
    (lambda: Residual(lam=2.0), "lam takes tuple[float, ...] | None"),
    (lambda: Residual(lam=(1.0, 2.0, 3.0)), "two weights"),
    (lambda: Residual(layers=3), "layers takes str | tuple"),
    (lambda: Residual(of="k", map="delta"), "of must be 'v'"),
    (lambda: Residual(of="hidden", map="identity"), "of must be 'v'"),
    (lambda: Residual(of="k", source="token"), "of must be 'v'"),
    (lambda: Residual(source="token", map="cross"), "no keys"),
    (lambda: Residual(map="cross", lam=(1.0, 1.0)), "leave out lam and learn"),
    (lambda: Residual(map="cross", learn="scalar"), "leave out lam and learn"),
    (lambda: Residual(source="all", learn="softmax"), "not source='all'"),
    (lambda: Residual(of="q", learn="head"), "a weight per token"),
    (lambda: Residual(map="identity", learn="sigmoid"), "a weight per token"),
    (lambda: Residual(learn="head", lam=(1.0, 1.0)), "lam stays None"),
    (lambda: ValueMode((Residual(map="cross"), Residual(of="scores"))), "use one of them"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(),), share_v="first")), "does nothing in layer 7"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(layers="8:"),))), "its layers are none of 0..7"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(of="k"),), share_k="first")), "does nothing in layer 7"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(layers=(0, 1)),))), "does nothing in layer 0"),
    (lambda: ModelConfig(value_mode=ValueMode((Residual(layers=(3,)),), share_v="every 2")), "does nothing in layer 3"),
    (lambda: config(ValueMode(share_q="first", share_k="first", share_v="first")), "layer 1 would own none"),
]


@pytest.mark.parametrize("make,says", IMPOSSIBLE, ids=[says for _, says in IMPOSSIBLE])
def test_impossible_models_are_refused(make, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make()
