"""From the recipe to what a step trains: the sharded model with its objective, optimizer, loss scale and average.

Must not know data, checkpoints or the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fullshard.contracts.progress import Progress
from fullshard.dist.average import Average
from fullshard.dist.first_update import FirstUpdate
from fullshard.dist.world import World
from fullshard.recipe import Recipe
from fullshard.setup.sharded_model import ShardedModel
from fullshard.step import Learner


def make_learner(
    recipe: Recipe,
    model: ShardedModel,
    aux: dict[str, nn.Module],
    world: World,
    progress: Progress,
    *,
    say: Callable[[str], None],
) -> Learner:
    """`say` tells what the first update proved."""
    optimizer = recipe.optimizer.open(model.module.named_parameters())
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", recipe.optimizer.lr)
    return Learner(
        model=model.module,
        objective=recipe.objective,
        aux=aux,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(world.device.type) if model.precision.scaler else None,
        clip=recipe.optimizer.clip,
        first_update=FirstUpdate(model.module, optimizer, say=say),
        average=Average(model.module, optimizer, recipe.ema, progress) if recipe.ema else None,
        device=world.device,
    )


__all__ = ["make_learner"]
