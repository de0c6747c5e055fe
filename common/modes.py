"""A mode as a user names it, and what we say of it. No torch here, so that plot.py starts fast."""

from configurator import UserError, read_config
from value_modes import TABLE, ValueMode, get_mode, row_and_number


def read_mode(word):
    """The ValueMode of a word: a name, or a config file that sets value_mode and nothing else."""
    values = read_config(word) if word.endswith(".py") else {"value_mode": word}
    if not isinstance(value := values.pop("value_mode", None), str | ValueMode):
        raise UserError(f"{word}: value_mode takes a name or a ValueMode, not {value!r:.80}")
    mode = get_mode(value)
    if values:
        remedy = "give settings to all modes, as flags or in another file; name helpers _so"
        raise UserError(f"{word} sets {', '.join(values)} besides its mode; {remedy}")
    return mode


def equation_of(mode):
    """(the equation of a mode, where it is from); what we say instead where the table has no row of its name."""
    row, number = row_and_number(mode.name)
    other = f"{row} with the weight {number}" if number else "a mode of your own"
    _, equation, source = TABLE.get(mode.name, (mode, other, ""))
    return equation, source


def beside_the_plan(mode):
    """`name = value` of each field that differs from vanilla's, of those that no LayerPlan has."""
    names = ("kv_group", "values", "heads_from_layer_0", "output", "cut_first", "dense")
    return [f"{name} = {getattr(mode, name)}" for name in names if getattr(mode, name) != getattr(ValueMode(), name)]
