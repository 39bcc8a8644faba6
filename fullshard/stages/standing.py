"""How far a stage is, from the checkpoints in its folder, and what of its recipe has changed since.

Must not import torch, start anything or change a file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.config.part import flat, plain
from fullshard.errors import CheckpointError
from fullshard.formatting.yaml_text import shown
from fullshard.recipe import Recipe, unset
from fullshard.stages.start import checkpoint_of, place_of

_MATTERS = ("seed", "model.", "objective.", "data.", "batch.", "duration.", "optimizer.", "schedule.", "ema", "start.")
_HARMLESS = ("data.workers", "data.cache", "model.attention", "model.trust_remote_code", "batch.per_device")


@dataclass(frozen=True)
class Standing:
    """What a stage has left on the disk."""

    step: int
    finished: bool
    """Its last step is saved, and its model exported."""
    changed: list[str]
    """Settings that decide what it trains and are not those that it was trained with."""


def standing(recipe: Recipe) -> Standing | None:
    """How far the stage is; None if it has no checkpoint."""
    place = recipe.checkpoints
    with paths.reaching(place):
        among = files.candidates(place)
        if not among:
            return None
        state, exported = files.read_state(among[0]), paths.is_exported(place)
    progress: dict[str, Any] = state.get("progress") or {}
    done = bool(progress.get("finished")) and (exported or not recipe.checkpoint.at_end)
    return Standing(int(progress.get("step", 0)), done, _changes(state.get("recipe") or {}, plain(recipe)))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    then, here = flat(before), flat(now)
    harmless = (*_HARMLESS, *unset(then, here))
    return [
        f"{key}: {shown(then.get(key))} then, {shown(here.get(key))} now"
        for key in dict.fromkeys((*here, *then))
        if key.startswith(_MATTERS) and not key.startswith(harmless) and then.get(key) != here.get(key)
    ]


def require_start(recipe: Recipe, stages: list[Recipe], *, command: Callable[[str], str]) -> None:
    """Raises if the earlier stage that this one starts from is missing or not finished; `command` trains a stage."""
    start = recipe.start
    earlier = next((each for each in stages if start and place_of(each) == start.source), None)
    if start is None or earlier is None:
        return
    found = standing(earlier)
    if found is None or not found.finished:
        what = f"is at step {found.step} and not finished" if found else "has no checkpoint"
        raise CheckpointError(
            f"{recipe.name} starts from {earlier.name}, and {earlier.checkpoints} {what}. Train it first: "
            f"{command(earlier.name)}"
        )
    if start.weights == "best":
        try:
            files.named(checkpoint_of(start))
        except CheckpointError:
            raise CheckpointError(
                f"{recipe.name} starts from the best checkpoint of {earlier.name} (start.weights = best), and "
                f"{earlier.checkpoints} has none: no validation chose one. Give it validation data, or use "
                f"stages.{recipe.name}.start.weights=last."
            ) from None


def point(run: Path, stage: Recipe) -> None:
    """Points `model`, `best` and `last` of the run at those of a stage; a run in a remote store has none."""
    if files.is_remote(stage.checkpoints):
        return
    for name in ("model", "best", "last"):
        target, link = stage.folder / name, run / name
        if target.exists() and (link.is_symlink() or not link.exists()):
            inside = target.resolve().relative_to(stage.folder.resolve())
            temporary = run / f".{name}.{socket.gethostname()}-{os.getpid()}"  # two nodes may do the same
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path(stage.name) / inside)
            os.replace(temporary, link)
