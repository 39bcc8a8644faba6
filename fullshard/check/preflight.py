"""The cheap part of a check, which `train` runs by itself before its ranks meet: seconds, no forward, no collective.

Must not know how a run is started or shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fullshard.arithmetic import StepPlan
from fullshard.check import environment, room, settings, stored
from fullshard.check.findings import Finding
from fullshard.check.machine import Machine, inspect
from fullshard.errors import SetupError
from fullshard.ground import Ground
from fullshard.hf.stored import files_of
from fullshard.launch.base import Ranks
from fullshard.recipe import Recipe


def before_ranks_meet(recipe: Recipe, ground: Ground, ranks: Ranks, *, warn: Callable[[str], None]) -> None:
    """Raises what would stop the run later, all of it at once; warns of the rest."""
    found = list(cheap(recipe, ground, ranks))
    for finding in found:
        if finding.level == "warning":
            warn(f"{finding.check}: {finding.sentence()}")
    if errors := [f"{finding.check}: {finding.sentence()}" for finding in found if finding.level == "error"]:
        raise SetupError("\n".join(errors))


def cheap(recipe: Recipe, ground: Ground, ranks: Ranks) -> Iterator[Finding]:
    """Environment, stored weights as files, room on disk and in memory."""
    machine = inspect(links=False)
    yield from environment.look(recipe, ranks, machine=machine)
    yield from settings.prompts(recipe, ground)
    if (folder := recipe.model.stored_in()) is not None:
        yield from stored.look_at_files(files_of(folder))
    yield from space(recipe, ranks, machine=machine, module=ground.module, plan=ground.plan)


def space(
    recipe: Recipe, ranks: Ranks, *, machine: Machine, module: nn.Module, plan: StepPlan | None
) -> Iterator[Finding]:
    """Room on the disk and in memory for a model of this size."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in module.parameters())
    sizes = {"parameters": parameters, "trainable": trainable, "weight_bytes": room.weight_bytes(recipe, module)}
    yield from room.disk(recipe, plan=plan, **sizes)
    yield from room.memory(recipe, ranks, machine=machine, **sizes)
