"""The composition root: recipe → parts, on all ranks together. Whatever is "auto" is resolved here.

The one file that sees everything. Must not loop, log metrics or compute losses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fullshard.contracts.ema import evaluations
from fullshard.contracts.progress import Progress
from fullshard.control.triggers import Due
from fullshard.dist import values
from fullshard.dist.average import Average
from fullshard.dist.gradients import FirstUpdate
from fullshard.dist.precision import ResolvedPrecision, resolve_precision
from fullshard.dist.shard import ShardPlan
from fullshard.dist.world import World, peak_of
from fullshard.log.console import Console
from fullshard.log.image_grids import Gallery
from fullshard.log.meters import Meters
from fullshard.loop import Parts
from fullshard.recipe import Recipe
from fullshard.setup.auxiliary_models import frozen_models
from fullshard.setup.loaders import evaluation_inputs, loaders, num_workers, proven
from fullshard.setup.run_inputs import RunInputs, effective_best
from fullshard.setup.run_summary import Built
from fullshard.setup.saving import go_background, make_saver, saves_to_come
from fullshard.setup.sharded_model import sharded_model


def build(
    recipe: Recipe,
    inputs: RunInputs,
    world: World,
    *,
    checkpoint: Path | None,
    progress: Progress,
    console: Console,
    write: Callable[[dict[str, Any]], None],
) -> Built:
    """Makes the sharded model, its optimizer and everything around them; loads the checkpoint to go on from."""
    precision = resolve_precision(recipe.precision, world.device)
    if line := precision.switched():
        console.note(line)
    model = sharded_model(recipe, inputs.module, world, precision, say=console.note)
    optimizer = recipe.optimizer.open(model.module.named_parameters())
    scaler = torch.amp.GradScaler(world.device.type) if precision.scaler else None
    average = Average(model.module, optimizer, recipe.ema, progress) if recipe.ema else None
    places: dict[str, Any] = {
        "module": model.module,
        "left_out": model.left_out,
        "optimizer": optimizer,
        "average": average,
    }
    saver = make_saver(recipe, inputs, world, **places, scaler=scaler, console=console)
    if checkpoint is not None:
        saver.restore(checkpoint)
    values.agree(model.module)
    go_background(saver, recipe.checkpoint.asynchronous)
    FirstUpdate(model.module, optimizer, say=console.note)
    workers = num_workers(recipe, world)
    train, validation = loaders(recipe, inputs, world, workers=workers)
    aux = frozen_models(recipe, inputs, world, precision)
    proofs = proven(recipe, model, train, world, aux)
    speed = model.flops_per_token, peak_of(world.device)
    gallery = Gallery(recipe.folder, progress, write, inputs.data.encoder)
    parts = Parts(
        model=model.module,
        objective=recipe.objective,
        aux=aux,
        optimizer=optimizer,
        scaler=scaler,
        schedule=recipe.schedule,
        base_lr=recipe.optimizer.lr,
        clip=recipe.optimizer.clip,
        windows=train.windows,
        steps_per_epoch=inputs.plan.steps_per_epoch,
        total_steps=inputs.plan.total_steps,
        epochs=inputs.plan.epochs,
        evaluations=evaluations(recipe.evaluate.parts, average),
        evaluation_inputs=evaluation_inputs(recipe, inputs, model.module, aux, validation, world, console, gallery),
        evaluate_due=Due(recipe.evaluate.every_steps, recipe.evaluate.every_epochs, at_start=recipe.evaluate.at_start),
        save_due=Due(recipe.checkpoint.every_steps, recipe.checkpoint.every_epochs, recipe.checkpoint.every_minutes),
        save_at_end=recipe.checkpoint.at_end,
        approach=saves_to_come(recipe, inputs, saver),
        log_every=recipe.log.every_steps,
        log_sample_ids=recipe.log.sample_ids,
        best=effective_best(recipe, inputs),
        patience=recipe.evaluate.patience,
        saver=saver,
        write=write,
        console=console,
        meters=Meters.going_on(progress, *speed, ranks=world.size, unit=inputs.data.encoder.unit),
        progress=progress,
        device=world.device,
        rank=world.rank,
        seed=recipe.seed,
        workers=workers,
        folder=recipe.folder,
    )
    resolved = _resolved(recipe, inputs, parts, model.plan, precision)
    return Built(parts, model, precision, saver, proofs, resolved)


def _resolved(recipe: Recipe, inputs: RunInputs, parts: Parts, plan: ShardPlan, precision: ResolvedPrecision) -> Recipe:
    """The recipe with every "auto" replaced by what it came to."""
    sharding = {"strategy": plan.layout.strategy, "compile": plan.compile}
    world = parts.saver.world
    checkpoint: dict[str, Any] = {"asynchronous": parts.saver.background is not None}
    if recipe.checkpoint.best and parts.best:
        checkpoint["best"] = recipe.checkpoint.best.model_copy(update={"mode": parts.best.mode})
    topology = {"device": world.device.type, "backend": world.backend, "devices": world.local_size}
    return recipe.model_copy(
        update={
            "precision": precision.word,
            "sharding": recipe.sharding.model_copy(update=sharding),
            "data": recipe.data.model_copy(update={"encode": inputs.data.encoder, "workers": parts.workers}),
            "topology": recipe.topology.model_copy(update=topology),
            "checkpoint": recipe.checkpoint.model_copy(update=checkpoint),
        }
    )
