"""Which value modes are refused: one sentence for each combination of settings that nothing computes.

model.py computes all else that a Residual or a ValueMode can say. value_modes.py calls these when it makes either.
"""

import re

from configurator import UserError


# fmt: off
def problems_of_residual(r):
    """[(whether it is wrong, the sentence that says so)]"""
    number = r"(-?[1-9]\d*|0(\.\d+)?)?"
    is_slice = not isinstance(r.layers, str) or re.fullmatch(rf"{number}:{number}(:|:-?[1-9]\d*)?", r.layers)
    is_number, is_token, learns = isinstance(r.source, int), r.source == "token", f"learn={r.learn!r}"
    is_v, is_eq7, is_plain = r.of == "v", r.of == "v" and r.map == "own", r.lam is None and r.learn == "fixed"
    of_many = r.learn in ("fixed", "scalar", "sources")
    return [
        (r.lam and len(r.lam) != 2, f"lam={r.lam} must be two weights, (own, sources together), or None for the mean"),
        (is_number and r.source < 0, f"source={r.source} must be a layer's number, counted from 0"),
        (not is_slice, f"layers={r.layers!r} is not a slice of layers, such as '-3:', '0.5:' or '::2'"),
        (r.map != "own" and not is_v, f"map={r.map!r} is for values: of must be 'v', not {r.of!r}"),
        (is_token and (not is_v or r.map == "cross"), "a token table has only values: of must be 'v', map not 'cross'"),
        (r.map != "delta" and r.subtract != "mixed", f"subtract={r.subtract!r} is only for map='delta'"),
        (not is_token and r.tables != "each", f"tables={r.tables!r} is only for source='token'"),
        (r.map == "cross" and not is_plain, "the softmax sets the weights of map='cross': leave out lam and learn"),
        (r.source == "all" and not of_many, f"{learns} weighs one source against the layer's own, but 'all' is many"),
        (r.is_gated and not is_eq7, f"{learns} computes a weight per token, and only works with of='v' and map='own'"),
        (r.learn == "head" and r.lam, "learn='head' divides 1 between own and source, so lam must be None"),
        (r.learn == "softmax" and r.lam, "learn='softmax' gets its start from slope, so lam must be None"),
        (r.learn != "softmax" and r.slope, f"slope={r.slope} is only for learn='softmax'"),
        (r.learn == "lerp" and r.lam and abs(sum(r.lam) - 1) > 1e-6, f"learn='lerp': lam={r.lam} must sum to 1"),
    ]


def problems_of_mode(m):
    shares = (m.share_q, m.share_k, m.share_v)
    owns_v, has_keys, takes_v = m.share_v == "each", m.values == "keys", m.heads_from_layer_0 > 0
    of, cross = {r.of for r in m.residuals}, any(r.map == "cross" for r in m.residuals)
    starts_at_0 = all(share[:1] == (0,) for share in shares if isinstance(share, tuple))
    is_pair = m.dense is None or (len(m.dense) == 2 and min(m.dense) >= 1)
    return [
        (not starts_at_0, f"share={shares}: the owning layers must begin with 0, as in (0, 4, 7)"),
        (has_keys and not (owns_v and m.share_k == "each"), "values='keys' needs share_k='each' and share_v='each'"),
        (takes_v and ("v" in of or has_keys or not owns_v),
         "heads_from_layer_0 divides value heads: share_v must be 'each', values 'projected', and no residual of='v'"),
        (m.borrow_v != "nearest" and m.share_v == "each", f"borrow_v={m.borrow_v!r}: share_v='each' borrows nothing"),
        (cross and "scores" in of, "map='cross' and of='scores' both replace the softmax's input: use one of them"),
        (not is_pair, f"dense={m.dense} must be (dilation, period), both at least 1, or None"),
        (not re.fullmatch(r"(\w[\w.+-]*)?", m.name),
         f"name={m.name!r} names folders too: begin with a letter or digit, and only use letters, digits and _ . + -"),
    ]
# fmt: on


def refuse(problems):
    """Raise UserError with the first of [(is_wrong, message)] that is wrong."""
    for is_wrong, message in problems:
        if is_wrong:
            raise UserError(message)
