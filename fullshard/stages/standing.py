"""How far a stage is, from the checkpoints in its folder, and what has changed since: its recipe, or its start.

Must not import torch, start anything or change a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, paths
from fullshard.checkpoint.settings import Start
from fullshard.config.part import flat, plain
from fullshard.errors import CheckpointError
from fullshard.formatting.yaml_text import shown
from fullshard.recipe import Recipe, unset
from fullshard.stages.start import checkpoint_of, place_of

_MATTERS = ("seed", "model.", "objective.", "data.", "batch.", "duration.", "optimizer.", "schedule.", "ema", "start.")
START = "start"
"""The part of a checkpoint's state.json that says what its run started from."""
_HARMLESS = ("data.workers", "data.cache", "model.attention", "model.trust_remote_code", "batch.per_device")


@dataclass(frozen=True)
class Standing:
    """What a stage has left on the disk."""

    step: int
    finished: bool
    """Its last step is saved, and its model exported."""
    changed: list[str]
    """Settings that decide what it trains and are not those that it was trained with."""
    start: str | None = None
    """The identity of the checkpoint that it started from; None if it is not recorded."""


def standing(recipe: Recipe) -> Standing | None:
    """How far the stage is; None if it has no checkpoint."""
    place = recipe.checkpoints
    with paths.reaching(place):
        among = files.candidates(place)
        if not among:
            return None
        state, exported = _newest_state(among), paths.is_exported(place)
    progress: dict[str, Any] = state.get("progress") or {}
    done = bool(progress.get("finished")) and (exported or not recipe.checkpoint.at_end)
    changed = _changes(state.get("recipe") or {}, plain(recipe)) if state else []
    return Standing(int(progress.get("step", 0)), done, changed, (state.get(START) or {}).get("identity"))


def _newest_state(among: list[Path]) -> dict[str, Any]:
    """The facts of the newest checkpoint that can be read; what to do about a damaged one is decided by the run."""
    for checkpoint in among:
        try:
            return files.read_state(checkpoint)
        except files.NewerCheckpointError:
            raise
        except CheckpointError:
            continue
    return {}


def identity_of(checkpoint: Path) -> str:
    """What the tensors of a checkpoint are, in a few characters: the same for the same bits on as many ranks."""
    listed = files.read_manifest(checkpoint)["files"]
    tensors = sorted(entry["sha256"] for name, entry in listed.items() if name.endswith((".distcp", ".safetensors")))
    return hashlib.sha256("".join(tensors).encode()).hexdigest()[:16]


def has_other_start(recipe: Recipe, left: Standing | None, stages: Sequence[Recipe]) -> bool:
    """Whether the checkpoint that a stage started from is now another one: the earlier stage was trained again. A run
    that is not one of the `stages` may go on by itself."""
    if recipe.start is None or left is None or left.start is None:
        return False
    if not any(place_of(each) == recipe.start.source for each in stages):
        return False
    try:
        return identity_of(files.named(checkpoint_of(recipe.start))) != left.start
    except CheckpointError:
        return False  # it is gone, which `require_start` reports where it matters


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
    _require_whole(start, recipe.name, earlier.name)


def _require_whole(start: Start, name: str, earlier: str) -> None:
    """Raises if the checkpoint to start from is missing or cut off, before anything is moved or started."""
    try:
        checkpoint = files.named(checkpoint_of(start))
    except CheckpointError:
        if start.weights != "best":
            raise
        raise CheckpointError(
            f"{name} starts from the best checkpoint of {earlier} (start.weights = best), and {start.source} has none: "
            f"no validation chose one. Give it validation data, or use stages.{name}.start.weights=last."
        ) from None
    with paths.reaching(checkpoint):
        described = files.read_manifest(checkpoint)["files"]
        if found := integrity.file_problems(checkpoint, described, checksums=False):
            raise CheckpointError(
                f"{name} starts from {checkpoint}, which is damaged: {found[0]}. Train it again: --stage {earlier} "
                "--resume never."
            )
