"""A stage before the stage that it starts from has run: the same recipe with that stage's structure and tokenizer, and
new weights. That is enough to check it, to prove it and to count its steps.

Must not train anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.errors import CheckpointError
from fullshard.recipe import Recipe
from fullshard.stages.standing import require_start

ProcessorOf = Callable[[Recipe], Any]
"""Makes the tokenizer or processor of a recipe; None if it has none."""


def stand_ins(stages: Sequence[Recipe], folder: Path, *, processor_of: ProcessorOf) -> list[Recipe]:
    """The recipes to check instead: those whose start exists are the same objects. Tokenizers go into `folder`."""
    found: dict[str, Recipe] = {}
    for stage in stages:
        found[stage.name] = stage if _can_start(stage, list(stages)) else _alone(stage, found, folder, processor_of)
    return list(found.values())


def _can_start(stage: Recipe, stages: list[Recipe]) -> bool:
    try:
        require_start(stage, stages, command=str)
    except CheckpointError:
        return False
    return True


def _alone(stage: Recipe, before: dict[str, Recipe], folder: Path, processor_of: ProcessorOf) -> Recipe:
    """The stage without its start. A tokenizer that an earlier stage trains is made here, from that stage's data."""
    model, start = plain(stage.model), stage.start
    source = str(start.source) if start else ""
    tokenizer = (model.get("tokenizer") or {}).get("path")
    changes: dict[str, Any] = {"from": None} if "from" in model else {}
    if tokenizer and str(tokenizer).startswith((f"{source}/", f"{stage.output}/")):
        earlier = before[source.rpartition("/")[2]]
        own = (plain(earlier.model).get("tokenizer") or {}).get("path")
        changes["tokenizer"] = {"path": own or _saved(earlier, folder, processor_of)}
    family = decode(Family, {**model, **changes}, where="model")
    return stage.model_copy(update={"model": family, "start": None})


def _saved(recipe: Recipe, folder: Path, processor_of: ProcessorOf) -> str:
    target = folder / recipe.name
    if not target.exists():
        processor_of(recipe).save_pretrained(target)
    return str(target)
