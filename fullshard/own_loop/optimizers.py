"""An optimizer as a checkpoint of your own loop describes it: its groups, their settings, and numbers of its state.

Tensors of its state are saved with the model's. Must not know files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import CheckpointError, SetupError
from fullshard.formatting.plural import counted
from fullshard.own_loop import extras


def require_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises if the optimizer holds other parameters than the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if other := [parameter for parameter in held if id(parameter) not in own]:
        kind = type(optimizer).__name__
        which = "The parameters" if len(other) == len(held) else f"{len(other)} of {len(held)} parameters"
        raise SetupError(
            f"{which} of this {kind} are not the model's: it was built before fullshard.shard, which replaces "
            f"parameters, or for another model. Shard first, then build it: {kind}(model.parameters(), ...)."
        )


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The class, the groups with their settings and names of parameters, and what of the state is not a tensor."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {
            "names": [names[parameter] for parameter in group["params"]],
            "settings": {key: extras.encode(value, key) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    numbers = {
        f"{names[parameter]}/{key}": extras.encode(value, key)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def require_groups(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Raises if the optimizer was saved with other groups of parameters."""
    names, saved = {parameter: name for name, parameter in model.named_parameters()}, facts["groups"]
    own = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if [set(group) for group in own] != [set(group["names"]) for group in saved]:
        sizes = [" + ".join(str(len(group)) for group in each) for each in ([g["names"] for g in saved], own)]
        raise CheckpointError(
            f"{path} was saved with {counted(len(saved), 'parameter group')} of an optimizer ({sizes[0]} parameters), "
            f"this {type(optimizer).__name__} has {len(own)} ({sizes[1]}). Build it with the same groups."
        )


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    """Sets the groups' settings, such as the learning rate, and the numbers of the state."""
    parameters = dict(model.named_parameters())
    for group, before in zip(optimizer.param_groups, facts["groups"], strict=True):
        for key, value in before["settings"].items():
            decoded = extras.decode(value)
            if isinstance(group.get(key), torch.Tensor) and isinstance(decoded, torch.Tensor):
                group[key].copy_(decoded)  # a compiled update keeps its rate in this tensor
            else:
                group[key] = decoded
    for place, value in facts["numbers"].items():
        name, _, key = place.rpartition("/")
        optimizer.state[parameters[name]][key] = extras.decode(value)
