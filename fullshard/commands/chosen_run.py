"""A run as the source of weights: which of its checkpoints, and the recipe that it was trained with.

Must not know what is done with them, nor import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.config.part import plain
from fullshard.errors import CheckpointError, SetupError
from fullshard.recipes.read import Reading, read

RESOLVED = "recipe.resolved.yaml"
MODEL = "model"
_LATEST = ("latest", "last")


@dataclass(frozen=True)
class Chosen:
    """A run, and which of its weights."""

    run: Path
    """The run folder."""
    checkpoint: Path | None
    """None: the model that the run has exported."""
    reading: Reading
    """The run's recipe, for the ranks of this machine."""

    @property
    def weights(self) -> Path:
        return self.checkpoint or self.run / MODEL

    @property
    def name(self) -> str:
        """The name of the weights, for use in a file name."""
        return str(files.step_of(self.checkpoint)) if self.checkpoint else MODEL


Here = Callable[[dict[str, Any], Path | None], Reading]
"""Turns a run's recipe and the chosen checkpoint into the recipe for the ranks of this machine."""


def choose(run: str, which: str | None, *, here: Here, best_first: bool = False) -> Chosen:
    """The run that a path names, and its checkpoint: a step, `best` or `latest`; None: the latest (with
    `best_first` the best, if there is one), or the exported model of a run without checkpoints."""
    place = files.place(run)
    with paths.reaching(place):
        checkpoint = _checkpoint(place, run, which, best_first=best_first)
        named = checkpoint is not None and not paths.exists(place / RESOLVED)
        folder = checkpoint.parent if checkpoint is not None and named else place
        recipe = _recipe(folder, checkpoint)
    return Chosen(folder, checkpoint, here(recipe, checkpoint))


def is_run(text: str) -> bool:
    """Whether a path is a run or one of its checkpoints, by its content."""
    place = files.place(text)
    with paths.reaching(place):
        marks = (files.MANIFEST, RESOLVED)
        return any(paths.exists(place / mark) for mark in marks) or bool(files.candidates(place))


def _checkpoint(place: Path, run: str, which: str | None, *, best_first: bool) -> Path | None:
    if paths.exists(place / files.MANIFEST) or place.name in ("best", *_LATEST):
        if which is not None:
            raise SetupError(f"RUN = {run} is a checkpoint already. Leave --checkpoint {which} out, or name the run.")
        return files.named(run)
    resolved = place / RESOLVED
    among = files.candidates(place)
    if not among and not paths.exists(resolved):
        what = f"it has no {RESOLVED} and no checkpoint" if paths.exists(place) else "there is no such folder"
        raise CheckpointError(
            f"RUN = {run} is not a run: {what}. Name a folder that fullshard train wrote: OUTPUT/NAME."
        )
    if kept := place if among else _elsewhere(resolved):
        if which is None and best_first and (best := files.pointed(kept, "best")):
            return best
        return _among(kept, which)
    _require_exported(place, run, which)
    return None


def _elsewhere(resolved: Path) -> Path | None:
    """The remote store with the run's checkpoints, if it has any there."""
    recipe = read(resolved).recipe
    return recipe.checkpoints if recipe.checkpoint.store and files.candidates(recipe.checkpoints) else None


def _among(place: Path, which: str | None) -> Path:
    if which is None or which in _LATEST:
        return files.candidates(place)[0]
    known = ", ".join(str(files.step_of(path)) for path in files.published(place))
    found = files.pointed(place, "best") if which == "best" else None
    if which.isdecimal() and paths.exists(place / files.name_of(int(which)) / files.MANIFEST):
        found = place / files.name_of(int(which))
    if found is None:
        what = "no best one was chosen" if which == "best" else "there is no such checkpoint"
        raise CheckpointError(f"--checkpoint {which}: {what} in {place}. Give latest, best, or a step: {known}.")
    return found


def _require_exported(place: Path, run: str, which: str | None) -> None:
    if which is not None or not (place / MODEL / "config.json").is_file():
        wanted = f"--checkpoint {which}: " if which is not None else ""
        rest = "" if which is None else f" Without --checkpoint, its {MODEL}/ is used, if it has one."
        raise CheckpointError(
            f"{wanted}RUN = {run} has no checkpoint{'' if which else f' and no {MODEL}/'}. Train it first, with "
            f"checkpoint.at_end: true.{rest}"
        )


def _recipe(place: Path, checkpoint: Path | None) -> dict[str, Any]:
    stored = files.read_state(checkpoint).get("recipe") if checkpoint else None
    if isinstance(stored, Mapping):
        return dict(stored)
    if not (place / RESOLVED).is_file():
        raise CheckpointError(
            f"{checkpoint} does not hold a recipe. If fullshard.save wrote it, read it with fullshard.load. If an "
            "older fullshard did, name the run folder instead."
        )
    return plain(read(place / RESOLVED).recipe)


def on_this_machine(*, devices: str, nodes: int) -> Here:
    """The recipe on the given devices, which need not be those that it was trained on."""

    def here(recipe: dict[str, Any], checkpoint: Path | None) -> Reading:
        topology = {key: value for key, value in recipe.get("topology", {}).items() if key in ("timeout_s", "launcher")}
        sharding = {**recipe.get("sharding", {}), "strategy": "auto"}
        return read({**recipe, "topology": {**topology, "devices": devices, "nodes": nodes}, "sharding": sharding})

    return here
