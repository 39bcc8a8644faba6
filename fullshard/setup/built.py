"""What build.py puts together: what a step trains, and the run that is ready for its first step.

Must not know data, checkpoints or the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.dist.average import Average
from fullshard.dist.precision import resolve_precision
from fullshard.faults.judge import Judge
from fullshard.faults.parts import memory
from fullshard.log.report import Report
from fullshard.loop import Parts
from fullshard.proofs.first_update import FirstUpdate
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.sharded_model import ShardedModel, frozen_models, sharded_model
from fullshard.setup.step_plan import StepPlan
from fullshard.step import Learner


@dataclass(frozen=True)
class Built:
    """A run that is ready for its first step."""

    parts: Parts
    model: ShardedModel
    plan: StepPlan
    proofs: list[str]
    """What was proven before the first step."""
    workers: int


def make_learner(
    recipe: Recipe, inputs: RunInputs, world: World, progress: Progress, *, report: Report
) -> tuple[ShardedModel, Learner]:
    """The sharded model and what a step trains with. `report` says what was decided and what an update proved."""
    precision, say = resolve_precision(recipe.precision, world.device), report.console.note
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
        memory=memory(recipe.batch, [model.module, *aux.values()], inputs.plan, progress, report, reduce),
        device=world.device,
    )
