"""How many rows a micro-batch has, as numbers: what `auto` starts from, what is smaller, what a checkpoint remembers.

The rows of a step never change, so only numbers that divide a rank's share of a step are possible. Must not know torch,
ranks beyond their number, or why a micro-batch is too large.
"""

from __future__ import annotations

from typing import Any, Literal

from fullshard.contracts.objective import Objective
from fullshard.errors import RecipeError

Size = int | Literal["auto"]

USUAL = 8
"""Rows of a micro-batch if nothing is known: the default of a recipe, and the most that `auto` chooses on a CPU, where
too much memory is no error but swapping, or the end of the process."""
_KEPT = "per_device"


def at_most(share: int, limit: int) -> int:
    """The largest micro-batch of at most `limit` rows that divides a rank's share of a step."""
    return max(number for number in range(1, max(min(share, limit), 1) + 1) if share % number == 0)


def sizes(share: int, limit: int | None = None) -> list[int]:
    """Every micro-batch that divides the share, up to `limit`."""
    return [number for number in range(1, (limit or share) + 1) if share % number == 0]


def usual(size: Size, share: int | None = None) -> int:
    """The number in a recipe; for `auto`, what it is before anything is tried."""
    if size != "auto":
        return size
    return at_most(share, USUAL) if share else 1


def remember(guard: dict[str, Any], size: int, *, asked: Size) -> None:
    """For a checkpoint: the recipe asked for one number, and another is in force."""
    guard[_KEPT] = {"asked": asked, "in_force": size}


def remembered(guard: dict[str, Any], *, asked: Size, share: int) -> int | None:
    """What a checkpoint says, if the recipe still asks for the same; on other ranks the share may be another one."""
    kept = guard.get(_KEPT)
    return at_most(share, kept["in_force"]) if kept and kept["asked"] == asked else None


def described(batch: Any, size: int | None = None) -> list[str]:
    """What a section asks for beyond the default; `size`: what `auto` became."""
    tried = f"batch.per_device = auto is {size}" if size else "batch.per_device = auto is tried before step 1"
    lines = [tried] if batch.per_device == "auto" else []
    split = "if a rank runs out of memory, all repeat the step, and go on, in micro-batches of half the rows"
    return [*lines, split] if batch.on_oom == "split" else lines


def refuse(recipe: Any) -> None:
    """Raises if the recipe asks for what cannot be done safely."""
    batch, objective = recipe.batch, recipe.objective
    asked = "batch.per_device: auto" if batch.per_device == "auto" else "batch.on_oom: split"
    if batch.per_device == "auto" and batch.global_size is None:
        raise RecipeError(
            "batch.per_device = auto needs batch.global: the rows of a step must not depend on what fits. "
            "Give batch.global."
        )
    if batch.per_device != "auto" and batch.on_oom != "split":
        return
    if type(objective).backward is not Objective.backward:
        raise RecipeError(
            f"{asked} cannot be used with objective.kind = {objective.kind()}, whose passes depend on each other over "
            "the micro-batches and ranks of a step: a rank that runs out of memory cannot repeat its own alone. "
            "Give batch.per_device a number, and leave out batch.on_oom."
        )
    if recipe.sharding.sync_batchnorm:
        raise RecipeError(
            f"{asked} cannot be used with sharding.sync_batchnorm = true: its statistics depend on the micro-batch, so "
            "a smaller one would change the losses. Give batch.per_device a number, and leave out batch.on_oom."
        )


__all__ = ["USUAL", "Size", "at_most", "described", "refuse", "remember", "remembered", "sizes", "usual"]
