"""From the recipe to the saves of a run: where to resume, where checkpoints go, and whether training waits for them.

Must not know how anything is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.checkpoint.background import Background
from fullshard.checkpoint.host_capacity import shortage
from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.sharded import Sharded
from fullshard.checkpoint.staging import sizes_of
from fullshard.checkpoint.tensors import all_tensors, materialise_state
from fullshard.checkpoint.write import Target
from fullshard.config.part import plain
from fullshard.control.next_save import Approach
from fullshard.control.saves import Saves
from fullshard.control.triggers import Due
from fullshard.dist import reduce, values
from fullshard.dist.world import World
from fullshard.errors import RecipeError, SetupError
from fullshard.log.console import Console
from fullshard.log.report import Report
from fullshard.recipe import Recipe
from fullshard.setup.run_inputs import RunInputs, effective_best
from fullshard.setup.sharded_model import ShardedModel
from fullshard.step import Learner

TIMEOUT_S = 1800.0
"""How long ranks wait for each other in a save, at least: a slow disk is no reason to stop a run."""


def make_saves(
    recipe: Recipe,
    inputs: RunInputs,
    world: World,
    model: ShardedModel,
    learner: Learner,
    report: Report,
    *,
    checkpoint: Path | None,
) -> Saves:
    """Loads the checkpoint to resume from, and makes what saves the run from there on."""
    settings = recipe.checkpoint
    saver = _saver(recipe, inputs, world, model, learner, report.console)
    if checkpoint is not None:
        saver.restore(checkpoint)
    values.agree(model.module)
    _go_background(saver, settings.asynchronous)
    due = Due(settings.every_steps, settings.every_epochs, settings.every_minutes)
    return Saves(saver, due, _approach(recipe, inputs, saver, due), settings.at_end, report)


def _saver(
    recipe: Recipe, inputs: RunInputs, world: World, model: ShardedModel, learner: Learner, console: Console
) -> Saver:
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
        model=learner.model,
        optimizer=learner.optimizer,
        scaler=learner.scaler,
        facts={"identity": inputs.identity, "recipe": plain(recipe), "data": inputs.content},
        left_out=model.left_out,
        family=recipe.model,
        processor=inputs.processor,
        world=world,
        console=console,
        average=learner.average,
        group=reduce.host_group(max(TIMEOUT_S, recipe.topology.timeout_s)),
    )


def _go_background(saver: Saver, wanted: bool | None) -> None:
    """Lets the saver write in the background if that is wanted and host memory allows; all ranks decide alike."""
    world = saver.world
    if wanted is False or (wanted is None and world.device.type != "cuda"):
        return
    to_come = _state_to_come(saver)
    background = Background(device=world.device, sizes=sizes_of(to_come))
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


def _approach(recipe: Recipe, inputs: RunInputs, saver: Saver, due: Due) -> Approach:
    """When the recipe may ask for a save: by its own intervals, and where a validation may find the best model yet."""
    evaluate, judged = recipe.evaluate, effective_best(recipe, inputs) is not None
    return Approach(
        due=[due, Due(evaluate.every_steps, evaluate.every_epochs)] if judged else [due],
        at_end=recipe.checkpoint.at_end or judged,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        num_bytes=saver.background.num_bytes if saver.background else 0,
    )


def _state_to_come(saver: Saver) -> dict[str, Any]:
    """The tensors of a save, also before the optimizer has made its state: that is made, seen, and let go again."""
    fresh = not saver.optimizer.state
    if fresh:
        materialise_state(saver.optimizer)
        if saver.average:
            saver.average.materialise()
    tensors = all_tensors(saver.model, saver.optimizer, left_out=saver.left_out)
    if fresh:
        saver.optimizer.state.clear()
    return tensors
