"""An optimizer update on plain slices: the state stays DTensors, without DTensor's dispatch for every operation.

Must not know recipes or losses.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard.dist.values import local


def on_slices(optimizer: torch.optim.Optimizer) -> None:
    """From now on a fused update of torch's own on a CPU gets this rank's slices; again changes nothing."""
    own: Any = optimizer
    if type(optimizer) is not torch.optim.AdamW or "_init_group" in vars(own) or not hasattr(own, "_init_group"):
        return
    if any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
        return
    lists_of = own._init_group

    def slices_of(group: Any, *lists: list[Any]) -> Any:
        found = lists_of(group, *lists)
        for each in lists:
            each[:] = [local(tensor) for tensor in each]
        return found

    own._init_group = slices_of
