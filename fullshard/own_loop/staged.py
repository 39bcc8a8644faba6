"""`fullshard.train` of a recipe with stages: each in turn, and the result of the last one with those of all others.

Must not know how a stage is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fullshard.errors import RecipeError
from fullshard.own_loop.result import Result, of
from fullshard.recipes.read import Reading
from fullshard.run import read_result
from fullshard.stages.in_turn import Stage, named, train_in_turn


@dataclass(frozen=True)
class StagedResult(Result):
    """The result of the last stage, with `stages`, the result of every stage by its name."""

    stages: dict[str, Result] = field(default_factory=dict)


class _Stopped(Exception):
    """A signal stopped a stage, so the ones after it do not run."""


def train_stages(
    reading: Reading,
    train: Callable[[Reading, str], Result],
    *,
    resume: str,
    only: str | None = None,
    anyway: bool = False,
) -> StagedResult:
    """Trains the stages of a recipe, or `only` one; `train` runs one of them with a value of `--resume`."""
    found: dict[str, Result] = {}

    def run(stage: Stage, how: str) -> None:
        notes = tuple(reading.notes.get(stage.place.name, ()))
        result = train(replace(reading, recipe=stage.recipe, place=stage.place, overridden=notes), how)
        # The model of a stage that is over would take the memory of the next one's.
        found[stage.place.name] = result if stage.place.is_last else replace(result, _module=None)
        if result.stopped == "signal":
            raise _Stopped

    def command(name: str) -> str:
        return f"fullshard.train(recipe) trains {name} first."

    try:
        only = named(reading.recipe, only).place.name if only is not None else None
    except RecipeError as error:
        raise RecipeError(str(error).replace("--stage ", "stage = ")) from None
    stages = [named(reading.recipe, only).recipe] if only else reading.recipe.stages or []
    try:
        train_in_turn(reading.recipe, run, resume=resume, only=only, command=command, say=print, anyway=anyway)
    except _Stopped:
        stages = stages[: [stage.name for stage in stages].index(list(found)[-1]) + 1]
    every = {stage.name: found.get(stage.name) or of(read_result(stage.folder), stage) for stage in stages}
    return StagedResult(**vars(list(every.values())[-1]), stages=every)
