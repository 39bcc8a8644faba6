"""The evaluations of a recipe on weights that are there: the numbers that training would find at that step.

Everything is put together as for training, without an optimizer. Must not know options or how anything is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.contracts.ema import PREFIX
from fullshard.contracts.model import Weights
from fullshard.contracts.progress import Progress
from fullshard.dist import env
from fullshard.dist.precision import resolve_precision
from fullshard.dist.world import World
from fullshard.errors import SetupError
from fullshard.evaluate.source import Subject
from fullshard.export.source import Values, trained_as
from fullshard.log.console import Console
from fullshard.log.image_grids import Gallery
from fullshard.setup.auxiliary_models import frozen_models
from fullshard.setup.loaders import evaluation_inputs, loaders, num_workers, proven
from fullshard.setup.run_inputs import RunInputs, build_module, prepare_inputs
from fullshard.setup.sharded_model import sharded_model


@dataclass
class Found:
    """The same on every rank."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)


def measure(
    subject: Subject,
    weights: str | None,
    *,
    console: Console,
    meet: Callable[[], World],
    announce: Callable[[RunInputs, World], None],
) -> Found:
    """Runs every evaluation of the recipe. `weights`: ema or model; None: those that training looks at."""
    recipe = subject.reading.recipe
    inputs = prepare_inputs(recipe, world_size=env.detect(os.environ).world, console=console)
    if inputs.data.validation is None and all(part.needs_held_out for part in recipe.evaluate.parts):
        raise SetupError(f"{subject.name}: its recipe has no validation data. Give some: --data FILE.")
    # Opened before the ranks meet: weights that cannot be read are found in seconds.
    passes = list(_passes(subject, inputs, weights))
    world = meet()
    announce(inputs, world)
    found = Found()
    while passes:
        prefix, module, values = passes.pop(0)
        _run(subject, inputs, world, module, values, prefix, console, found)
    if not (found.numbers or found.texts):
        raise SetupError(
            f"{subject.name}: nothing was measured. Name evaluations (evaluate.parts=[loss]), or give validation data: "
            "--data FILE."
        )
    return found


def _passes(
    subject: Subject, inputs: RunInputs, weights: str | None
) -> Iterator[tuple[str, nn.Module, Weights | None]]:
    """What is looked at: a prefix for its numbers, a module, and its values; None: the model's own."""
    recipe = subject.reading.recipe
    if subject.checkpoint is None:
        yield "", inputs.module, None
        return
    looked_at: list[tuple[str, str | None]] = [("", weights)]
    if weights is None and recipe.ema is not None:
        looked_at = [("", recipe.ema.evaluate)]
        if recipe.ema.evaluate == "both":
            looked_at = [("", "model"), (PREFIX, "ema")]
    for number, (prefix, which) in enumerate(looked_at):
        module = inputs.module if number == 0 else build_module(recipe, inputs.processor)
        trained = trained_as(subject.checkpoint, recipe.model, inputs.processor, module, weights=which)
        yield prefix, module, Values(trained)


def _run(
    subject: Subject,
    inputs: RunInputs,
    world: World,
    module: nn.Module,
    values: Weights | None,
    prefix: str,
    console: Console,
    found: Found,
) -> None:
    recipe = subject.reading.recipe
    precision = resolve_precision(recipe.precision, world.device)
    model = sharded_model(recipe, module, world, precision, say=console.note, values=values)
    train, validation = loaders(recipe, inputs, world, workers=num_workers(recipe, world))
    aux = frozen_models(recipe, inputs, world, precision)
    proven(recipe, model, train, world, aux)
    gallery = _Unshown(recipe.folder, Progress(step=subject.step or 0), _forget, inputs.data.encoder)
    evaluating = evaluation_inputs(recipe, inputs, model.module, aux, validation, world, console, gallery)
    model.module.eval()
    for part in recipe.evaluate.parts:
        of_part = part.run(evaluating)
        found.numbers |= {f"{prefix}{name}": value for name, value in of_part.numbers.items()}
        found.texts += of_part.texts


class _Unshown(Gallery):
    """Pictures are those of training: an evaluation writes nothing into the run folder."""

    def show(self, name: str, images: Any, *, columns: int) -> Any:
        return self.folder / f"{name} (not kept)"


def _forget(record: dict[str, Any]) -> None:
    pass


__all__ = ["Found", "measure"]
