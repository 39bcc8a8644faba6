"""Runs the stages of a recipe one after the other: which of them, from which checkpoint, and what is skipped.

How a stage is run is handed in: on ranks that are started for it, or as a rank. Every rank decides from the same files,
which nobody writes between two stages. Must not know commands, nor how ranks are started.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.checkpoint import folder as files
from fullshard.config.part import did_you_mean
from fullshard.dist import env
from fullshard.errors import CheckpointError, RecipeError
from fullshard.formatting.plural import counted
from fullshard.recipe import Recipe
from fullshard.stages.place import Place
from fullshard.stages.pointers import point
from fullshard.stages.standing import Standing, has_other_start, require_start, standing

RunStage = Callable[["Stage", str], None]
"""Runs a stage with this value of `--resume`; raises if it fails or is stopped."""
CommandFor = Callable[[str], str]
"""The command that trains one stage, for messages."""


@dataclass(frozen=True)
class Stage:
    """A stage: its complete recipe, and its place in the run."""

    recipe: Recipe
    place: Place


def stages_of(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe, with the steps that are done before each as far as that is known."""
    found: list[Stage] = []
    before = 0
    every = recipe.stages or []
    for number, each in enumerate(every, 1):
        later = tuple(str(folder) for next_one in every[number:] for folder in _folders(next_one))
        found.append(Stage(each, Place(recipe.name, each.name, number, len(every), before, later)))
        left = standing(each)
        before += left.step if left else 0
    return found


def _folders(recipe: Recipe) -> list[Path]:
    return list(dict.fromkeys((recipe.folder, recipe.checkpoints)))


def named(recipe: Recipe, name: str | None) -> Stage:
    """One stage by its name, or by its number: 2 or stage2."""
    found = stages_of(recipe)
    names = [stage.place.name for stage in found]
    if name in names:
        return found[names.index(name)]
    number = re.fullmatch(r"(?:stage)?(\d+)", str(name))
    if number and 0 < int(number[1]) <= len(names):
        return found[int(number[1]) - 1]
    near = did_you_mean(str(name), names)
    raise RecipeError(f"--stage {name}: there is no such stage{near}. Stages: {', '.join(names)}.")


def train_in_turn(
    recipe: Recipe,
    run: RunStage,
    *,
    resume: str,
    only: str | None,
    command: CommandFor,
    say: Callable[[str], None],
    anyway: bool = False,
) -> list[str]:
    """Trains the stages that are not finished, or `only` one; returns the names of those that were trained. `anyway`
    continues a stage whose start has been trained again since."""
    stages, trained = list(recipe.stages or []), list[str]()
    chosen = [named(recipe, only)] if only else stages_of(recipe)
    for stage, how in zip(chosen, _resumes(chosen, resume), strict=True):
        stage = replace(stage, place=replace(stage.place, before=_before(stages, stage)))
        with _pointed(recipe, say), _unchanged_environment():
            if only or how != "auto" or not _is_done(stage, stages, say=say):
                require_start(stage.recipe, stages, command=command)
                if how != "never" and has_other_start(stage.recipe, left := standing(stage.recipe), stages):
                    _say_other_start(stage, left, say=say, anyway=anyway)
                run(stage, how)
                trained.append(stage.place.name)
    return trained


def _before(stages: Sequence[Recipe], stage: Stage) -> int:
    found = [standing(each) for each in stages[: stage.place.number - 1]]
    return sum(left.step for left in found if left)


def _resumes(chosen: Sequence[Stage], resume: str) -> list[str]:
    """`--resume` of each stage. Starting over starts the first one over and moves the others aside; a path belongs to
    the stage whose folder it is in."""
    if resume in ("auto", "never") or len(chosen) == 1:
        return [resume, *("auto" for _ in chosen[1:])]
    for index, stage in enumerate(chosen):
        if any(str(files.place(resume)).startswith(f"{folder}/") for folder in _folders(stage.recipe)):
            return ["auto" if i != index else resume for i in range(len(chosen))]
    names = ", ".join(stage.place.name for stage in chosen)
    raise RecipeError(f"--resume {resume}: this checkpoint is in no stage of the run. Say which one: --stage {names}.")


def _is_done(stage: Stage, stages: Sequence[Recipe], *, say: Callable[[str], None]) -> bool:
    """Whether a stage is finished and stays as it is; says so."""
    left, place = standing(stage.recipe), stage.place
    if left is None or not left.finished:
        return False
    begun = next((later.name for later in stages[place.number :] if standing(later)), None)
    if left.changed and not begun:
        return False  # the run says what has changed, continues it or refuses
    say(f"Stage {place.number} of {place.of}: {place.name} is finished ({counted(left.step, 'step')}).")
    if left.changed:
        say(
            f"warning: its recipe has changed since, which has no effect, because {begun} has started from it: "
            f"{'; '.join(left.changed)}. To train it again: --stage {place.name} --resume never, which moves it and "
            "the stages after it aside."
        )
    if has_other_start(stage.recipe, left, stages):
        say(
            f"warning: {_earlier(stage)} has been trained again since, and {place.name} comes from what it was before. "
            f"To train it again from there: --stage {place.name} --resume never, which moves it and the stages after "
            "it aside."
        )
    return True


def _say_other_start(stage: Stage, left: Standing | None, *, say: Callable[[str], None], anyway: bool) -> None:
    """Refuses to continue a stage whose start is another checkpoint now, or says so if the user wants it anyway."""
    step, name = left.step if left else 0, stage.place.name
    found = f"{name} is at step {step}, and {_earlier(stage)}, which it started from, has been trained again since"
    if not anyway:
        raise CheckpointError(
            f"{found}: its weights have changed. Start {name} over from them with --stage {name} --resume never, "
            f"which moves it and the stages after it aside, or continue it as it is with --resume-anyway."
        )
    say(f"warning: {found}. It continues anyway, from what it was before.")


def _earlier(stage: Stage) -> str:
    """The stage that a stage starts from, or the checkpoint."""
    return str(stage.recipe.start.source).rpartition("/")[2] if stage.recipe.start else ""


@contextlib.contextmanager
def _pointed(recipe: Recipe, say: Callable[[str], None]) -> Iterator[None]:
    """Points the run at the last stage that has a checkpoint, however a stage ends; rank 0 does it."""
    try:
        yield
    finally:
        if env.detect(os.environ).rank == 0:
            try:
                trained = (each for each in reversed(recipe.stages or []) if files.pointed(each.checkpoints, "last"))
                if latest := next(trained, None):
                    point(recipe.folder, latest)
            except CheckpointError as error:  # of a store: what the stage has saved is there
                say(f"warning: model, best and last of {recipe.name} could not be updated: {error}")


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """A stage in this process sets variables of its rank, which the next one, on other ranks, must not find."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
