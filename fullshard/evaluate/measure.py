"""The evaluations of a recipe on stored weights: the numbers that training would find at that step.

Everything is built as for training, without an optimizer. Must not know options or how anything is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.contracts.ema import PREFIX
from fullshard.contracts.evaluation import Findings, refuse_same_name
from fullshard.contracts.model import Weights
from fullshard.contracts.world import World
from fullshard.dist import env
from fullshard.dist.precision import resolve_precision
from fullshard.errors import SetupError
from fullshard.evaluate.source import EvaluationTarget
from fullshard.export.source import Values, trained_as
from fullshard.kernels.float8 import without
from fullshard.log.console import Console
from fullshard.setup.inputs import RunInputs
from fullshard.setup.loaders import evaluation_inputs, loaders, num_workers, proven
from fullshard.setup.run_inputs import build_module, prepare_inputs
from fullshard.setup.sharded_model import frozen_models, sharded_model


def measure(
    target: EvaluationTarget,
    weights: str | None,
    *,
    console: Console,
    meet: Callable[[], World],
    announce: Callable[[RunInputs, World], None],
) -> Findings:
    """Runs every evaluation of the recipe. `weights`: ema or model; None: those that training looks at."""
    recipe = target.reading.recipe
    inputs = prepare_inputs(recipe, world_size=env.detect(os.environ).world, console=console)
    if inputs.data.validation is None and all(part.needs_held_out for part in recipe.evaluate.parts):
        raise SetupError(f"{target.name}: its recipe has no validation data. Give some: --data FILE.")
    # Opened before the ranks meet: weights that cannot be read are found in seconds.
    passes = list(_passes(target, inputs, weights))
    world = meet()
    announce(inputs, world)
    found = Findings()
    while passes:
        prefix, module, values = passes.pop(0)
        _run(target, inputs, world, module, values, prefix, console, found)
    if not (found.numbers or found.texts):
        raise SetupError(
            f"{target.name}: nothing was measured. Name evaluations (evaluate.parts=[loss]), or give validation data: "
            "--data FILE."
        )
    return found


def _passes(
    target: EvaluationTarget, inputs: RunInputs, weights: str | None
) -> Iterator[tuple[str, nn.Module, Weights | None]]:
    """What is evaluated: a prefix for its numbers, a module, and its values; None: the model's own."""
    recipe = target.reading.recipe
    if target.checkpoint is None:
        yield "", inputs.module, None
        return
    looked_at: list[tuple[str, str | None]] = [("", weights)]
    if weights is None and recipe.ema is not None:
        looked_at = [("", recipe.ema.evaluate)]
        if recipe.ema.evaluate == "both":
            looked_at = [("", "model"), (PREFIX, "ema")]
    for number, (prefix, which) in enumerate(looked_at):
        module = inputs.module if number == 0 else build_module(recipe, inputs.processor)
        trained = trained_as(target.checkpoint, recipe.model, inputs.processor, module, weights=which)
        yield prefix, module, Values(trained)


def _run(
    target: EvaluationTarget,
    inputs: RunInputs,
    world: World,
    module: nn.Module,
    values: Weights | None,
    prefix: str,
    console: Console,
    found: Findings,
) -> None:
    recipe = target.reading.recipe
    precision = resolve_precision(without(recipe.precision), world.device)
    model = sharded_model(recipe, module, world, precision, say=console.note, values=values)
    train, validation = loaders(recipe, inputs, world, num_workers(recipe, world), inputs.plan.per_device)
    aux = frozen_models(recipe, inputs, world, precision)
    proven(recipe, model, train, world, aux)

    def show(*images: Any, **settings: Any) -> Path:
        """Keeps no pictures: an evaluation writes nothing into the run folder."""
        return Path("no picture is written outside training")

    evaluating = evaluation_inputs(recipe, inputs, model.module, aux, validation, world, console, show)
    model.module.eval()
    owners: dict[str, str] = {}
    for part in recipe.evaluate.parts:
        of_part = part.run(evaluating)
        refuse_same_name(owners, f"evaluate.parts: {part.kind()}", of_part.numbers)
        found.numbers.update({f"{prefix}{name}": value for name, value in of_part.numbers.items()})
        found.texts.extend(of_part.texts)
