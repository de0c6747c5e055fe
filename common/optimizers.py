"""What an optimizer keeps, for checkpoints: AdamW's moments, or the state of another one that you put in its place.

We read and fill an optimizer's own dicts. torch.distributed.checkpoint would first let a new optimizer take a step with
gradients of zero, to see what it keeps. In that step some count, or decay the weights.
"""

import json
from collections import defaultdict

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from common.ranks import whole
from common.runs import differences
from configurator import UserError

PLAIN = (int, float, str, type(None))  # what we save besides tensors; a bool is an int
# values of groups that we do not save: train.py's settings, and how torch computes a step
OPEN = {"params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable"}


def described(model, optimizer):
    """{"class", "params": their names by group, "groups": the other values that we save of each, all but tuples, which
    are settings}. Raises UserError for what a checkpoint cannot hold: an inner optimizer's own state, and groups or
    states with other things than the model's parameters and plain values."""
    about = {"class": type(optimizer).__name__, "params": [], "groups": []}
    inner = [value for value in tree_leaves(vars(optimizer)) if isinstance(value, torch.optim.Optimizer)]
    if any(one.state is not optimizer.state for one in inner):
        raise UserError(f"{about['class']} has an optimizer inside with a state of its own; let both share one `state`")
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not {*parameters, *optimizer.state} <= names.keys():
        raise UserError(f"{about['class']} has parameters, or a state of something, that the model does not have")
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in OPEN and not isinstance(value, tuple)}
        if not all(isinstance(leaf, PLAIN) for leaf in tree_leaves(values)):
            remedy = "make it a number, or keep it in its `state`"
            raise UserError(f"{about['class']} has a tensor or another object in a group; {remedy}")
        about["params"].append([names[parameter] for parameter in group["params"]])
        about["groups"].append(values)
    return about


def optimizer_state(model, optimizer, is_main):
    """(text, {"key/parameter": tensor}) of what an optimizer keeps. All ranks call this, because they gather what is
    divided; the main one gets the tensors. Raises UserError for what a checkpoint cannot hold.

    text: JSON of what `described` returns, and of the state's "numbers", {"key/parameter": what is no tensor}.
    """
    about = described(model, optimizer) | {"numbers": {}}
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{key}/{names[parameter]}"
            # beside a divided parameter, a tensor that is not divided may be another one on each rank
            is_local = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
            if isinstance(value, PLAIN):
                about["numbers"][place] = value
            elif torch.is_tensor(value) and (value.ndim == 0 or not is_local):
                gathered = whole(value)
                if is_main:
                    tensors[place] = gathered.cpu().contiguous()
            else:
                what = f"{about['class']} keeps a {type(value).__name__} as {place}"
                holds = "tensors (of a sharded parameter DTensors), numbers, text and None"
                raise UserError(f"{what}; a checkpoint can hold {holds}")
    # not as a part of a record, which may not hold infinite numbers: some optimizers have them
    return json.dumps(about), tensors


def restore_optimizer(path, model, optimizer, text, tensors):
    """Put what `optimizer_state` has found into a new optimizer. Returns a note of the values of groups that this has
    changed, or "". Raises UserError for another optimizer. text: None in older checkpoints, which are AdamW's."""
    now = described(model, optimizer)
    made = json.loads(text) if text else now | {"class": "AdamW", "numbers": {}}
    if (made["class"], made["params"]) != (now["class"], now["params"]):
        what = f"{path} was trained with {made['class']}; this run's {now['class']} is another optimizer, or has other"
        remedy = f"use the same, or start a new run from these weights with --init_from={path}"
        raise UserError(f"{what} parameters in its groups; {remedy}")
    states = defaultdict(dict)  # {parameter: {key: value}}
    for place, value in (tensors | made["numbers"]).items():
        key, _, name = place.rpartition("/")
        states[name][key] = value
    # in place, because optimizers that are used as one share groups and state
    for group, names, values in zip(optimizer.param_groups, made["params"], made["groups"], strict=True):
        group.update(values)
        for parameter, name in zip(group["params"], names, strict=True):
            for key, value in states[name].items():
                optimizer.state[parameter][key] = placed(key, value, parameter, group)
    changed = [words for pair in zip(made["groups"], now["groups"], strict=True) for words in differences(*pair)]
    return f"note: the optimizer goes on with {', '.join(dict.fromkeys(changed))}" if changed else ""


def placed(key, value, parameter, group):
    """A value of an optimizer's state where its parameter is: on its device, and divided among the ranks as it is."""
    # a count of steps stays on the CPU, unless a kernel reads it; torch's load_state_dict has the same rule
    if not torch.is_tensor(value) or (key == "step" and not group.get("fused") and not group.get("capturable")):
        return value
    if isinstance(parameter, DTensor) and value.ndim > 0:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
