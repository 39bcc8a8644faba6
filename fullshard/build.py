"""The composition root: recipe → parts, on all ranks together. Whatever is "auto" is resolved here.

The one file that sees everything. Must not loop, log metrics or compute losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.contracts.progress import Progress
from fullshard.dist.world import World
from fullshard.log.report import Report
from fullshard.loop import Parts
from fullshard.recipe import Recipe
from fullshard.setup.auxiliary_models import frozen_models
from fullshard.setup.built import Built
from fullshard.setup.learner import make_learner
from fullshard.setup.loaders import loaders, num_workers, proven
from fullshard.setup.run_inputs import RunInputs
from fullshard.setup.saving import make_saves
from fullshard.setup.sharded_model import ShardedModel, precision_in_force, sharded_model
from fullshard.setup.validating import make_validation


def build(
    recipe: Recipe, inputs: RunInputs, world: World, *, checkpoint: Path | None, progress: Progress, report: Report
) -> Built:
    """Makes the sharded model, its optimizer and everything around them; loads the checkpoint to resume from."""
    say = report.console.note
    precision = precision_in_force(recipe, world, say=say)
    model = sharded_model(recipe, inputs.module, world, precision, say=say)
    aux = frozen_models(recipe, inputs, world, precision)
    learner = make_learner(recipe, model, aux, world, progress, say=say)
    saves = make_saves(recipe, inputs, world, model, learner, report, checkpoint=checkpoint)
    workers = num_workers(recipe, world)
    train, held_out = loaders(recipe, inputs, world, workers=workers)
    proofs = proven(recipe, model, train, world, aux)
    unit = inputs.data.encoder.settings.unit
    report.measure(progress, flops_per_token=model.flops_per_token, unit=unit, workers=workers)
    parts = Parts(
        learner=learner,
        schedule=recipe.schedule,
        lr=recipe.optimizer.lr,
        windows=train.windows,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        validation=make_validation(recipe, inputs, learner, held_out, world, progress, report),
        saves=saves,
        report=report,
        log_every=recipe.log.every_steps,
        log_sample_ids=recipe.log.sample_ids,
        progress=progress,
        rank=world.rank,
        seed=recipe.seed,
        folder=recipe.folder,
    )
    return Built(parts, model, proofs, workers, _resolved(recipe, inputs, world, model, parts, workers))


def _resolved(
    recipe: Recipe, inputs: RunInputs, world: World, model: ShardedModel, parts: Parts, workers: int
) -> Recipe:
    """The recipe with every "auto" replaced by what it became."""
    checkpoint: dict[str, Any] = {"asynchronous": parts.saves.saver.background is not None}
    if recipe.checkpoint.best and parts.validation.best:
        checkpoint["best"] = recipe.checkpoint.best.model_copy(update={"mode": parts.validation.best.mode})
    sections: dict[str, dict[str, Any]] = {
        "sharding": {"strategy": model.plan.layout.strategy, "compile": model.plan.compile},
        "data": {"encode": inputs.data.encoder.settings, "workers": workers},
        "topology": {"device": world.device.type, "backend": world.backend, "devices": world.local_size},
        "checkpoint": checkpoint,
    }
    resolved = {name: getattr(recipe, name).model_copy(update=changes) for name, changes in sections.items()}
    return recipe.model_copy(update={"precision": model.precision.word, **resolved})
