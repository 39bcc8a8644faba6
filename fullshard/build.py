"""The composition root: recipe → parts, on all ranks together. Whatever is "auto" is decided by now.

The one file that sees everything. Must not loop, log metrics or compute losses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.faults.fit import Trial
from fullshard.faults.parts import stragglers, watch
from fullshard.log.report import Report
from fullshard.loop import Parts
from fullshard.profile.verdict import Tuning
from fullshard.recipe import Recipe
from fullshard.setup.built import Built, make_learner
from fullshard.setup.inputs import RunInputs
from fullshard.setup.loaders import loaders, make_validation, num_workers, proven
from fullshard.setup.saving import make_saves
from fullshard.step import train_step


def build(
    recipe: Recipe, inputs: RunInputs, world: World, *, checkpoint: Path | None, progress: Progress, report: Report
) -> Built:
    """Makes the sharded model, its optimizer and everything around them; loads the checkpoint to resume from."""
    model, learner = make_learner(recipe, inputs, world, progress, report=report)
    saves = make_saves(recipe, inputs, world, model, learner, report, checkpoint=checkpoint)
    workers = num_workers(recipe, world)
    load = partial(loaders, recipe, inputs, world, workers)
    size = Trial(learner, train_step, load, inputs, report).in_force(recipe.batch.per_device, progress.guard)
    train, held_out = load(size)
    proofs = proven(recipe, model, train, world, learner.aux)
    quantities, ids = inputs.data.quantities, recipe.log.sample_ids
    tuning = Tuning.of(world, model, workers=workers)
    report.measure(progress, flops=model.flops, quantities=quantities, tuning=tuning)
    parts = Parts(
        learner=learner,
        lr=recipe.optimizer.lr,
        lr_factor=recipe.schedule.factor,
        windows=learner.memory.windows(load, size),
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        validation=make_validation(recipe, inputs, learner, held_out, world, progress, report),
        saves=saves,
        report=report,
        log_every=recipe.log.every_steps,
        progress=progress,
        watch=watch(recipe.guard, learner.guard, saves, progress, recipe.folder, sample_ids=ids, collectives=reduce),
        stragglers=stragglers(learner.optimizer, world, report, reduce),
        rank=world.rank,
        seed=recipe.seed,
        folder=recipe.folder,
    )
    return Built(parts, model, inputs.plan.of(size), proofs, workers)
