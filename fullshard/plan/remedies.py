"""What to change if a run does not fit: every change that helps, with its memory and time, the cheapest first.

Changes that keep the mathematics (recomputing, smaller micro-batches of the same step, sharding more) come before those
that change it (8-bit states, adapters). Sharding gradients only (grad_op) and replicating keep whole parameters, so
they are never advised for memory. Must not know how memory and time are predicted, or how advice is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fullshard.config.part import plain
from fullshard.errors import FullshardError
from fullshard.optim.adamw import AdamW
from fullshard.plan.predict import Planner, Prediction
from fullshard.plan.speed import StepTime, step_time
from fullshard.recipe import Recipe
from fullshard.recipes.read import read_recipe

MOST = 48
"""Combinations that are tried."""
ABSENT = "absent"
"""Of a setting that a part does not have."""


@dataclass(frozen=True)
class Change:
    """Settings that take less memory."""

    settings: Mapping[str, Any]
    same: bool
    """Whether the run computes the same."""

    def __str__(self) -> str:
        return " ".join(f"{key}={_word(value)}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Remedy:
    """A change with what it is predicted to bring."""

    change: Change
    found: Prediction
    time: StepTime | None

    @property
    def fits(self) -> bool:
        return self.found.room is not None and self.found.room >= 0

    @property
    def cost(self) -> tuple[bool, float, int]:
        """Sorts remedies: the same mathematics first, then time per token, then the number of changes."""
        seconds = self.time.total / self.time.tokens if self.time else 0.0
        return not self.change.same, seconds, len(self.change.settings)


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys changed, checked like any other."""
    values: dict[str, Any] = plain(recipe)
    for key, value in settings.items():
        *sections, last = key.split(".")
        part = values
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    return read_recipe(values)


def single_changes(found: Prediction) -> list[Change]:
    """Every single change that may help."""
    axes = _axes(found)
    return [change for axis in axes for change in axis if change.settings]


def remedies(planner: Planner, found: Prediction) -> list[Remedy]:
    """Single changes, the cheapest first."""
    tried = [remedy for change in single_changes(found) if (remedy := _try(planner, found, change))]
    return sorted((r for r in tried if r.found.needed < found.needed), key=lambda remedy: remedy.cost)


def fitting(planner: Planner, found: Prediction, tried: list[Remedy]) -> Remedy | None:
    """The cheapest change that fits: one, or several together."""
    fits = [remedy for remedy in tried if remedy.fits]
    same = [remedy for remedy in fits if remedy.change.same]
    if same:
        return same[0]
    tries = (_try(planner, found, change) for change in _combined(found))
    combined = next((remedy for remedy in tries if remedy and remedy.fits), None)
    return min([*([combined] if combined else []), *fits], key=lambda remedy: remedy.cost, default=None)


def _try(planner: Planner, found: Prediction, change: Change) -> Remedy | None:
    try:
        changed = planner.predict(with_settings(found.recipe, change.settings), found.place)
    except FullshardError:  # a change that this model or recipe does not allow
        return None
    return Remedy(change, changed, step_time(changed))


def _axes(found: Prediction) -> list[list[Change]]:
    """By kind of change, the weakest first; each axis begins with no change."""
    recipe, none = found.recipe, Change({}, same=True)
    sharding, place = recipe.sharding, found.place
    modes = ["none", "selective", "full"]
    later = modes[modes.index(sharding.activation_checkpointing) + 1 :]
    axes = [
        [none, *(Change({"sharding.activation_checkpointing": mode}, same=True) for mode in later)],
        [none, *_smaller(found)],
    ]
    if place.world > 1 and found.plan.layout.strategy != "full":
        axes.append([none, Change({"sharding.strategy": "full"}, same=True)])
    if chunks := list(_chunks(found)):
        axes.append([none, *chunks])
    if not sharding.cpu_offload:
        axes.append([none, Change({"sharding.cpu_offload": True}, same=True)])
    # With less state, `auto` would keep parameters gathered.
    keep = {"sharding.strategy": "full"} if place.world > 1 and sharding.strategy == "auto" else {}
    if type(recipe.optimizer) is AdamW:
        axes.append([none, Change({"optimizer.kind": "adamw_8bit", **keep}, same=False)])
    if plain(recipe.model).get("lora", ABSENT) is None:
        axes.append([none, Change({"model.lora": {"r": 16}, **keep}, same=False)])
    return axes


def _smaller(found: Prediction) -> Iterator[Change]:
    """Smaller micro-batches, and more of them: the step stays the same. Half of it, and the least."""
    batch = found.recipe.batch
    halves = [batch.per_device // 2**times for times in range(1, 20) if batch.per_device % 2**times == 0]
    for rows in dict.fromkeys([*halves[:1], *halves[-1:]]):
        more = {"batch.per_device": rows}
        if batch.global_size is None:
            more["batch.accumulate"] = found.accumulate * batch.per_device // rows
        yield Change(more, same=True)


def _chunks(found: Prediction) -> Iterator[Change]:
    """Fewer texts in memory at a time, for an objective that can compute a step in chunks."""
    texts = found.work.rows
    if "cache" in plain(found.recipe.objective):
        for chunk in sorted({max(texts // 2, 1), max(texts // 8, 1)} - {texts}, reverse=True):
            yield Change({"objective.cache": {"chunk": chunk}}, same=True)


def _combined(found: Prediction) -> list[Change]:
    """Several changes together, the cheapest first."""
    changes = []
    for choice in product(*_axes(found)):
        settings = {key: value for change in choice for key, value in change.settings.items()}
        if sum(bool(change.settings) for change in choice) > 1:
            changes.append(Change(settings, same=all(change.same for change in choice)))
    return sorted(changes, key=_price)[:MOST]


def _price(change: Change) -> tuple[bool, float]:
    """A rough order of combinations, before any is predicted."""
    settings = change.settings
    cost = {"full": 0.33, "selective": 0.12}.get(settings.get("sharding.activation_checkpointing", ""), 0.0)
    cost += 3.0 if "sharding.cpu_offload" in settings else 0.0
    cost += 0.02 if "batch.per_device" in settings else 0.0
    cost += 0.33 if "objective.cache" in settings else 0.0
    return not change.same, cost


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_word(item)}" for key, item in value.items()) + "}"
    return str(value)
