"""What build.py puts together: what a step trains, and the run that is ready for its first step.

Must not know data, checkpoints or the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist.average import Average
from fullshard.dist.precision import resolve_precision
from fullshard.faults.judge import Judge
from fullshard.loop import Parts
from fullshard.proofs.first_update import FirstUpdate
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.sharded_model import ShardedModel, frozen_models, sharded_model
from fullshard.step import Learner


@dataclass(frozen=True)
class Built:
    """A run that is ready for its first step."""

    parts: Parts
    model: ShardedModel
    proofs: list[str]
    """What was proven before the first step."""
    workers: int


def make_learner(
    recipe: Recipe, inputs: RunInputs, world: World, progress: Progress, *, say: Callable[[str], None]
) -> tuple[ShardedModel, Learner]:
    """The sharded model and what a step trains with. `say` gets what was decided, and what the first update proved."""
    precision = resolve_precision(recipe.precision, world.device)
    if line := precision.switched():
        say(line)
    model = sharded_model(recipe, inputs.module, world, precision, say=say)
    aux = frozen_models(recipe, inputs, world, precision)
    settings = recipe.optimizer.with_groups(recipe.model.groups(model.module))
    optimizer = settings.open(model.module.named_parameters())
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", recipe.optimizer.lr)
    return model, Learner(
        model=model.module,
        objective=recipe.objective,
        aux=aux,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(world.device.type) if precision.scaler else None,
        clip=recipe.optimizer.clip,
        first_update=FirstUpdate(model.module, optimizer, say=say, resting=recipe.model.resting(model.module)),
        guard=Judge(recipe.guard, progress.guard.get("losses", ()), device=world.device, model=model.module),
        average=Average(model.module, optimizer, recipe.ema, progress) if recipe.ema else None,
        device=world.device,
    )
