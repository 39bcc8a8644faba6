"""From the recipe to the saves of a run: where to resume, where checkpoints go, and whether training waits for them.

Must not know how anything is written.
"""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.write import Sharded, Target
from fullshard.config.part import plain
from fullshard.contracts.world import World
from fullshard.control.saves import Saves
from fullshard.control.triggers import Due, NextSave
from fullshard.dist import reduce
from fullshard.errors import RecipeError
from fullshard.log.console import Console
from fullshard.log.report import Report
from fullshard.proofs.same_run import require_equal_values
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import effective_best
from fullshard.setup.sharded_model import ShardedModel
from fullshard.stages.take_over import keep_start, take_over
from fullshard.step import Learner

TIMEOUT_S = 1800.0
"""How long ranks wait for each other in a save, at least: a slow disk must not stop a run."""


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
    settings, best = recipe.checkpoint, effective_best(recipe, inputs) is not None
    saver = _saver(recipe, inputs, world, model, learner, report.console)
    if checkpoint is not None:
        saver.restore(checkpoint)
        keep_start(saver, checkpoint)
    elif recipe.start:
        report.console.note(take_over(recipe, saver))
    require_equal_values(model.module)
    saver.save_in_background(settings.asynchronous)
    due = Due(settings.every_steps, settings.every_epochs, settings.every_minutes)
    validations = Due(recipe.evaluate.every_steps, recipe.evaluate.every_epochs)
    next_save = NextSave(
        due=[due, validations] if best else [due],
        at_end=settings.at_end or best,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        num_bytes=saver.background.num_bytes if saver.background else 0,
    )
    return Saves(saver, due, next_save, settings.at_end, report)


def _saver(
    recipe: Recipe, inputs: RunInputs, world: World, model: ShardedModel, learner: Learner, console: Console
) -> Saver:
    full = recipe.checkpoint.format == "full"
    if full and not recipe.optimizer.saves_full:
        raise RecipeError(
            f"checkpoint.format = full cannot hold the state of optimizer.kind = {recipe.optimizer.kind()}, which is "
            "quantised slice by slice. Use checkpoint.format: sharded, or optimizer.kind: adamw."
        )
    # A GPU's host has more cores than the one that feeds it.
    sharded = None if full else Sharded(threads=4 if world.device.type == "cuda" else 1)
    patience_s = recipe.topology.timeout_s / 10
    return Saver(
        folder=recipe.folder,
        target=Target(recipe.checkpoints, recipe.checkpoint.keep, sharded, patience_s, console.warn),
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
