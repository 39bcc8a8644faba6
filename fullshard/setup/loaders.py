"""The loaders of a run, the proofs on their first batches, and the inputs of its evaluations.

Must not know the loop, optimizers or checkpoints.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.contracts.evaluation import EvaluationInputs
from fullshard.contracts.world import World
from fullshard.data.loader import Loader
from fullshard.dist import reduce
from fullshard.dist.shard import reshard
from fullshard.images.grids import Gallery
from fullshard.log.console import Console
from fullshard.proofs.before_step_one import Probe, prove
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.sharded_model import ShardedModel
from fullshard.step import to_device


def num_workers(recipe: Recipe, world: World) -> int:
    """Loader processes of each rank."""
    return recipe.data.workers if recipe.data.workers is not None else (2 if world.device.type == "cuda" else 0)


def loaders(recipe: Recipe, inputs: RunInputs, world: World, *, workers: int) -> tuple[Loader, Loader | None]:
    """For the training data, and for the validation data if there is any."""

    def loader(samples: Any, per_device: int, global_size: int, shuffle: bool, **more: Any) -> Loader:
        return Loader(
            samples,
            inputs.data.collator,
            seed=recipe.seed,
            shuffle=shuffle,
            per_device=per_device,
            global_size=global_size,
            rank=world.rank,
            world=world.size,
            workers=workers,
            pin_memory=world.device.type == "cuda",
            **more,
        )

    data, plan = inputs.data, inputs.plan
    train = loader(data.train, plan.per_device, plan.global_size, recipe.data.shuffle, quantities=data.quantities)
    if inputs.data.validation is None:
        return train, None
    each = inputs.validation_per_device
    return train, loader(inputs.data.validation, each, each * world.size, False)


def proven(recipe: Recipe, model: ShardedModel, train: Loader, world: World, aux: dict[str, nn.Module]) -> list[str]:
    """Proves the model with this objective on the first batch: the engine's proofs, then the objective's."""
    packed, compute = recipe.data.pack, model.plan.compute
    probe = Probe(recipe.objective, model.module, aux, compute, world.device, train.collate)
    lines = prove(probe, train.long_sample, packed=packed, longest=recipe.data.sequence_length)
    batch = to_device(train.first_batch(), world.device)
    lines += recipe.objective.check(model.module, batch, packed=packed, compute=compute)
    reshard(model.module)
    return lines


def evaluation_inputs(
    recipe: Recipe,
    inputs: RunInputs,
    module: nn.Module,
    aux: dict[str, nn.Module],
    validation: Loader | None,
    world: World,
    console: Console,
    gallery: Gallery,
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
        show=gallery.show,
        encoder=inputs.data.encoder,
        collator=inputs.data.collator,
    )


__all__ = ["evaluation_inputs", "loaders", "num_workers", "proven"]
