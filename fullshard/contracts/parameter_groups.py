"""Parameter groups by name pattern: a learning rate, weight decay, freezing and recomputation of their own.

A parameter belongs to the first group with a pattern that matches its name. Must not know optimizers or sharding.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fullshard.config.part import Section, did_you_mean
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted


class Group(Section):
    """Parameters that share settings of their own."""

    match: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
    """Patterns over parameter names, such as `model.embed*`; * matches anything."""
    lr: float | None = Field(None, gt=0)
    """The base learning rate, which the schedule multiplies as well; null: optimizer.lr."""
    weight_decay: float | None = Field(None, ge=0)
    """Decay of its matrices; null: optimizer.weight_decay."""
    freeze: bool = False
    """Do not train these parameters."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activation checkpointing of the blocks that the group holds whole; null: sharding.activation_checkpointing."""

    def holds(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)

    def describe(self) -> str:
        """Its settings, for the run summary."""
        found = ["frozen"] if self.freeze else []
        found += [f"lr {self.lr:g}"] if self.lr is not None and not self.freeze else []
        found += [f"weight decay {self.weight_decay:g}"] if self.weight_decay is not None and not self.freeze else []
        found += [f"recompute {self.recompute}"] if self.recompute is not None else []
        return ", ".join(found) or "no settings of its own"


def assign(groups: Sequence[Group], names: Iterable[str]) -> dict[str, int]:
    """The index of the group of each parameter that has one."""
    found = {name: next((i for i, group in enumerate(groups) if group.holds(name)), None) for name in names}
    return {name: index for name, index in found.items() if index is not None}


def check(groups: Sequence[Group], names: Sequence[str]) -> None:
    """Raises for a pattern that matches no parameter, or only those of groups before it."""
    taken = assign(groups, names)
    for index, group in enumerate(groups):
        for pattern in group.match:
            matching = fnmatch.filter(names, pattern)
            where = f"optimizer.groups[{index}].match: {pattern!r}"
            if not matching:
                raise RecipeError(
                    f"{where} matches none of the {counted(len(names), 'parameter')}"
                    f"{did_you_mean(pattern.strip('*'), names)}. Names look like: {', '.join(names[:3])} ... "
                    f"{names[-1]}; * matches anything."
                )
            if all(taken[name] < index for name in matching):
                raise RecipeError(
                    f"{where} matches only parameters of earlier groups, such as {matching[0]}. A parameter belongs to "
                    "the first group that matches it: put the narrower pattern first."
                )


def recompute_by_block(groups: Sequence[Group], blocks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """How to recompute each block, given with the names of its parameters, that a group holds whole."""
    found: dict[str, str] = {}
    for index, group in enumerate(groups):
        if group.recompute is None:
            continue
        held = [block for block, names in blocks.items() if set(assign(groups, names).values()) == {index}]
        held = [block for block in held if all(group.holds(name) for name in blocks[block])]
        if not held:
            raise RecipeError(
                f"optimizer.groups[{index}].recompute = {group.recompute}: no block is in the group as a whole. Blocks "
                f"are {', '.join(list(blocks)[:3]) or 'not found in this model'}; match all of their parameters, as in "
                f"match: {next(iter(blocks), 'model.layers.0')}.*"
            )
        found |= dict.fromkeys(held, group.recompute)
    return found


def describe(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """A line for each group."""
    members = list(assign(groups, names).values())
    return [
        f"{', '.join(group.match)}: {counted(members.count(index), 'parameter')}, {group.describe()}"
        for index, group in enumerate(groups)
    ]


def split(groups: Sequence[Group], named: Sequence[tuple[str, Any]]) -> list[tuple[Group | None, list[Any]]]:
    """The parameters without a group, then those of each group, all in the order given."""
    taken = assign(groups, [name for name, _ in named])
    found: list[tuple[Group | None, list[Any]]] = [(None, [p for name, p in named if name not in taken])]
    return found + [(group, [p for name, p in named if taken.get(name) == index]) for index, group in enumerate(groups)]
