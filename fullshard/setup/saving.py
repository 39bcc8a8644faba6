"""From the recipe to a saver: where checkpoints go, what they leave out, whether they are written in the background.

Must not know how anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.background import Background
from fullshard.checkpoint.host_capacity import shortage
from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.sharded import Sharded
from fullshard.checkpoint.staging import sizes_of
from fullshard.checkpoint.tensors import all_tensors, materialise_state
from fullshard.checkpoint.write import Target
from fullshard.config.part import plain
from fullshard.contracts.model import Weights
from fullshard.control.next_save import Approach
from fullshard.control.triggers import Due
from fullshard.dist import reduce
from fullshard.dist.average import Average
from fullshard.dist.world import World
from fullshard.errors import RecipeError, SetupError
from fullshard.log.console import Console
from fullshard.recipe import Recipe
from fullshard.setup.run_inputs import RunInputs, effective_best

TIMEOUT_S = 1800.0
"""How long ranks wait at least for each other in a save: a slow disk is no reason to stop a run."""


def frozen_in(recipe: Recipe, module: nn.Module, weights: Weights | None) -> frozenset[str]:
    """Frozen parameters that can be read again from the model's own folder; a checkpoint they came from may go."""
    stored = weights.names() if weights and recipe.model.stored_in() is not None else set()
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad and name in stored)


def make_saver(
    recipe: Recipe,
    inputs: RunInputs,
    world: World,
    *,
    module: nn.Module,
    left_out: frozenset[str],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    average: Average | None,
    console: Console,
) -> Saver:
    """A saver without a background: that comes with `go_background`, when the optimizer's state is known."""
    if recipe.checkpoint.format == "full" and not recipe.optimizer.saves_full:
        raise RecipeError(
            f"checkpoint.format = full cannot hold the state of optimizer.kind = {recipe.optimizer.kind()}, which is "
            "quantised slice by slice. Use checkpoint.format: sharded, or optimizer.kind: adamw."
        )
    # A GPU's host has cores to spare beside the one that feeds it.
    sharded = Sharded(threads=4 if world.device.type == "cuda" else 1)
    target = Target(recipe.checkpoints, recipe.checkpoint.keep, None if recipe.checkpoint.format == "full" else sharded)
    return Saver(
        folder=recipe.folder,
        target=target,
        export_best=recipe.checkpoint.export == "best",
        model=module,
        optimizer=optimizer,
        scaler=scaler,
        facts={"identity": inputs.identity, "recipe": plain(recipe), "data": inputs.content},
        left_out=left_out,
        family=recipe.model,
        processor=inputs.processor,
        world=world,
        console=console,
        average=average,
        group=reduce.host_group(max(TIMEOUT_S, recipe.topology.timeout_s)),
    )


def go_background(saver: Saver, wanted: bool | None) -> None:
    """Lets the saver write in the background where that is wanted and host memory allows; all ranks decide alike."""
    world = saver.world
    if wanted is False or (wanted is None and world.device.type != "cuda"):
        return
    to_come = _state_to_come(saver)
    background = Background(saver.optimizer, device=world.device, sizes=sizes_of(to_come))
    if short := shortage(background.num_bytes, world):
        background.close()
        if wanted:
            raise SetupError(
                f"checkpoint.asynchronous = true: {short}. Set it to false, use more nodes, or free memory."
            )
        saver.console.warn(f"{short}: training waits for every save.")
        return
    saver.background = background
    saver.prepare(to_come)


def saves_to_come(recipe: Recipe, inputs: RunInputs, saver: Saver) -> Approach:
    """When the recipe may ask for a save: by its own rules, and where a validation may find the best model yet."""
    checkpoint, evaluate, plan = recipe.checkpoint, recipe.evaluate, inputs.plan
    due = [Due(checkpoint.every_steps, checkpoint.every_epochs, checkpoint.every_minutes)]
    judged = effective_best(recipe, inputs) is not None
    if judged:
        due.append(Due(evaluate.every_steps, evaluate.every_epochs))
    return Approach(
        due=due,
        at_end=checkpoint.at_end or judged,
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.total_steps,
        num_bytes=saver.background.num_bytes if saver.background else 0,
    )


def _state_to_come(saver: Saver) -> dict[str, Any]:
    """The tensors of a save, also before the optimizer has made its state: that is made, seen, and let go again."""
    fresh = not saver.optimizer.state
    if fresh:
        materialise_state(saver.optimizer)
    tensors = all_tensors(saver.model, saver.optimizer, left_out=saver.left_out)
    if fresh:
        saver.optimizer.state.clear()
    return tensors
