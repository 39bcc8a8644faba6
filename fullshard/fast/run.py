"""Where a run takes the faster ways: when its model is sharded, and around the passes of a step.

With the switch off, a CPU runs as it does without this package. Must not know recipes or losses.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.dist.shard import ShardPlan
from fullshard.fast import onednn, switch, whole
from fullshard.fast.local_update import on_slices
from fullshard.fast.one_stream import use_one_stream


def prepare(module: nn.Module, plan: ShardPlan, mesh: Any, device: torch.device) -> ShardPlan:
    """The plan; what is done faster stands behind the reason for its layout, so the header names it."""
    if device.type != "cpu" and mesh.size() == 1:
        use_one_stream(module)
    if not switch.is_on() or device.type != "cpu":
        return plan
    whole.prepare(module, plan, mesh, device)
    words = whole.described(module) + onednn.use_in(module, compute=plan.compute)
    return replace(plan, layout=replace(plan.layout, reason=plan.layout.reason + words))


def within_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[Any]:
    """Around all forward and backward passes of one step, before its update."""
    if not switch.is_on():
        return contextlib.nullcontext()
    on_slices(optimizer)
    return whole.within_step(module)
