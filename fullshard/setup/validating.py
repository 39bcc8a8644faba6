"""From the recipe to the validations of a run: what is evaluated, when, and which number decides the best model.

Must not know how anything is measured.
"""

from __future__ import annotations

from fullshard.contracts.ema import evaluations
from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.control.triggers import Due
from fullshard.data.loader import Loader
from fullshard.images.grids import Gallery
from fullshard.log.report import Report
from fullshard.loop import Validation
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.loaders import evaluation_inputs
from fullshard.setup.run_inputs import effective_best
from fullshard.step import Learner


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
    settings = recipe.evaluate
    gallery = Gallery(recipe.folder, progress, report.write)
    return Validation(
        evaluations=evaluations(settings.parts, learner.average),
        inputs=evaluation_inputs(recipe, inputs, learner.model, learner.aux, held_out, world, report.console, gallery),
        due=Due(settings.every_steps, settings.every_epochs, at_start=settings.at_start),
        best=effective_best(recipe, inputs),
        patience=settings.patience,
        own_code=any("." in part.kind() for part in settings.parts),
    )


__all__ = ["make_validation"]
