"""The loaders of a run, the proofs on their first batches, and the validations: what is evaluated, when, and which
number decides the best model.

Must not know optimizers, checkpoints or how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.contracts.ema import evaluations
from fullshard.contracts.evaluation import EvaluationInputs
from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.control.triggers import Due
from fullshard.data.loader import Loader
from fullshard.dist import reduce
from fullshard.dist.upload import to_device
from fullshard.faults.aborted_pass import abort_pass
from fullshard.images.grids import Gallery
from fullshard.log.console import Console
from fullshard.log.report import Report
from fullshard.loop import Validation
from fullshard.multimodal.balance import balanced
from fullshard.proofs.before_step_one import Probe, prove
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import effective_best
from fullshard.setup.sharded_model import ShardedModel
from fullshard.step import Learner


def num_workers(recipe: Recipe, world: World) -> int:
    """Loader processes of each rank."""
    return recipe.data.workers if recipe.data.workers is not None else (2 if world.device.type == "cuda" else 0)


def loaders(recipe: Recipe, inputs: RunInputs, world: World, workers: int, size: int) -> tuple[Loader, Loader | None]:
    """The loaders of the training data and of the validation data; None: without validation data."""
    data, plan = inputs.data, inputs.plan.of(size)

    def loader(samples: Any, **more: Any) -> Loader:
        return Loader(
            samples,
            data.collator,
            seed=recipe.seed,
            rank=world.rank,
            world=world.size,
            workers=workers,
            pin_memory=world.device.type == "cuda",
            **more,
        )

    train = loader(
        data.train,
        per_device=plan.per_device,
        global_size=plan.global_size,
        shuffle=recipe.data.shuffle,
        quantities=data.quantities,
        **balanced(recipe.data.balance, data, per_device=plan.per_device, world=plan.world),
    )
    if data.validation is None:
        return train, None
    return train, loader(data.validation, per_device=inputs.validation_per_device)


def proven(recipe: Recipe, model: ShardedModel, train: Loader, world: World, aux: dict[str, nn.Module]) -> list[str]:
    """Proves the model with this objective on the first batch: the engine's proofs, then the objective's."""
    packed, compute = recipe.data.pack and train.packed, model.plan.compute
    probe = Probe(recipe.objective, model.module, aux, compute, world.device, train.collate)
    lines = prove(probe, train.long_sample, packed=packed, longest=recipe.data.sequence_length)
    batch = to_device(train.first_batch(), world.device)
    lines += recipe.objective.check(model.module, batch, packed=packed, compute=compute)
    abort_pass(model.module)  # a proof may have ended a pass with an error
    return lines


def make_validation(
    recipe: Recipe,
    inputs: RunInputs,
    learner: Learner,
    held_out: Loader | None,
    world: World,
    progress: Progress,
    report: Report,
) -> Validation:
    """`held_out` loads the validation data."""
    settings, show = recipe.evaluate, Gallery(recipe.folder, progress, report.write).show
    return Validation(
        evaluations=evaluations(settings.parts, learner.average),
        inputs=evaluation_inputs(recipe, inputs, learner.model, learner.aux, held_out, world, report.console, show),
        due=Due(settings.every_steps, settings.every_epochs, at_start=settings.at_start),
        best=effective_best(recipe, inputs),
        patience=settings.patience,
        own_code=any("." in part.kind() for part in settings.parts),
    )


def evaluation_inputs(
    recipe: Recipe,
    inputs: RunInputs,
    module: nn.Module,
    aux: dict[str, nn.Module],
    validation: Loader | None,
    world: World,
    console: Console,
    show: Callable[..., Any],
) -> EvaluationInputs:
    """What the evaluations of this run may use."""
    return EvaluationInputs(
        model=module,
        objective=recipe.objective,
        aux=aux,
        batches=validation.once if validation else (lambda: iter(())),
        num_batches=validation.num_batches if validation else 0,
        processor=inputs.processor,
        sum_over_ranks=reduce.sum_over_ranks,
        device=world.device,
        bar=console.validation_bar,
        show=show,
        encoder=inputs.data.encoder,
        collator=inputs.data.collator,
        held_out=inputs.data.validation_from,
        family=recipe.model,
    )
