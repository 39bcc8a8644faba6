"""What one rank really holds after a step, by kind; sent to the rank pool by name. Nothing here knows the plan."""

from __future__ import annotations

from typing import Any

import torch

from fullshard import build
from fullshard.contracts.progress import Progress
from fullshard.dist.shard import fsdp_modules
from fullshard.dist.values import local
from fullshard.log.report import Report
from fullshard.recipes.read import read
from fullshard.setup.rank_of_run import as_rank
from fullshard.step import train_step


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of their storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def after_a_step(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind on this rank: gradients just before the update, the rest after it."""
    reading = read(settings)
    with as_rank(reading, silent=True) as (inputs, world, console):
        report = Report(console, lambda record: None, world)
        built = build.build(reading.recipe, inputs, world, checkpoint=None, progress=Progress(), report=report)
        learner, found = built.parts.learner, dict[str, Any]()

        def gradients() -> None:
            found["gradients"] = nbytes([local(p.grad) for p in learner.model.parameters() if p.grad is not None])

        window = next(built.parts.windows(0, ()))
        train_step(learner, window.batches, lr_factor=1.0, before_update=gradients)
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_modules(learner.model)]
        members = [p for group in groups if group is not None for p in group.fsdp_params]
        found["parameters"] = nbytes([p._sharded_param_data for p in members])
        states = learner.optimizer.state.values()
        found["ema"] = nbytes([local(state["ema"]) for state in states if "ema" in state])
        found["optimizer"] = sum(nbytes([local(t)]) for s in states for name, t in s.items() if name != "ema")
        found["gathered"] = _gathered(learner.model)
        found["buffers"] = nbytes(list(learner.model.buffers()))
    return found


def _gathered(model: torch.nn.Module) -> list[int]:
    """The bytes of each unit while it is gathered, in no order."""
    found = []
    for unit in fsdp_modules(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            unit.unshard()
            found.append(nbytes([tensor for p in group.fsdp_params for tensor in p.all_gather_outputs]))
            unit.reshard()
    return sorted(found)
