"""What build.py hands over: the parts of a run, and the facts that the run summary states. Must not decide anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.contracts.world import World
from fullshard.loop import Parts
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.sharded_model import ShardedModel


@dataclass(frozen=True)
class Built:
    """A run that is ready for its first step."""

    parts: Parts
    model: ShardedModel
    proofs: list[str]
    """What was proven before the first step."""
    workers: int
    """Loader processes of each rank."""
    resolved: Recipe
    """The recipe with every "auto" replaced by what it became."""


def resolved(
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
    changed = {name: getattr(recipe, name).model_copy(update=changes) for name, changes in sections.items()}
    return recipe.model_copy(update={"precision": model.precision.word, **changed})
