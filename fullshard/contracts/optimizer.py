"""The contract of an optimizer, the rule for which parameters decay, and parameter groups by name pattern.

A parameter belongs to the first group with a pattern that matches its name. Must not know losses, schedules or how
parameters are sharded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from fullshard.config.part import Part, Section, did_you_mean
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    import torch
    from torch import nn


class Group(Section):
    """Parameters with their own settings."""

    match: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
    """Patterns over parameter names, such as `model.embed*`; * matches anything."""
    lr: float | None = Field(None, gt=0)
    """The base learning rate, which the schedule multiplies as well; null: optimizer.lr."""
    weight_decay: float | None = Field(None, ge=0)
    """Decay of its matrices; null: optimizer.weight_decay."""
    freeze: bool = False
    """Do not train these parameters."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activation checkpointing of blocks that are entirely in the group; null: sharding.activation_checkpointing."""

    def holds(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)

    def describe(self) -> str:
        """Its settings, for the run summary."""
        found = ["frozen"] if self.freeze else []
        found += [f"lr {self.lr:g}"] if self.lr is not None and not self.freeze else []
        found += [f"weight decay {self.weight_decay:g}"] if self.weight_decay is not None and not self.freeze else []
        found += [f"recompute {self.recompute}"] if self.recompute is not None else []
        return ", ".join(found) or "the same settings"


class Optimizer(Part):
    """How gradients become updates."""

    folder: ClassVar[str] = "fullshard.optim"
    default_kind: ClassVar[str | None] = "adamw"
    required: ClassVar[tuple[str, ...]] = ("open",)
    largest_lr: ClassVar[float] = 1.0
    """The check warns about a higher learning rate."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Optional packages that it imports, each with what `pip install` calls it."""
    compiles: ClassVar[bool] = False
    """Whether its update is compiled, which takes a C++ compiler, and Triton on a GPU."""
    saves_full: ClassVar[bool] = True
    """Whether its state can be gathered into one file: `checkpoint.format: full`."""

    lr: float = Field(3e-4, gt=0)
    """The base learning rate; the schedule multiplies it."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices; vectors (norms, biases) never decay."""
    clip: float | None = Field(1.0, gt=0)
    """Clip the global gradient norm to this value; null: no clipping."""

    by_name: list[Group] | None = Field(None, alias="groups")
    """Parameters by name pattern, with their own learning rate, decay, freezing or recomputation."""

    def with_groups(self, groups: list[Group]) -> Self:
        """The same optimizer with more groups, after its own."""
        return self.model_copy(update={"by_name": [*(self.by_name or []), *groups]}) if groups else self

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The live optimizer over the trainable parameters."""
        raise NotImplementedError

    def state_bytes(self, parameter_bytes: int) -> int:
        """Bytes of state for one trained number of `parameter_bytes`; two moments unless the optimizer overrides it."""
        return 2 * parameter_bytes

    def unquantised(self) -> Optimizer:
        """The same optimizer with state in the parameters' dtype: its updates do not depend on the sharding."""
        return self

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """The trained parameters as torch's groups: those of the recipe's groups apart, and in each the matrices, which
        decay, apart from the vectors. By name and shape, so it is the same for any sharding."""
        trainable, groups = [(name, p) for name, p in named_parameters if p.requires_grad], self.by_name or []
        taken = group_of(groups, [name for name, _ in trainable])
        found: list[dict[str, Any]] = []
        for index, group in [(None, None), *enumerate(groups)]:  # those without a group first
            members = [p for name, p in trainable if taken.get(name) == index]
            own = {"lr": group.lr, "initial_lr": group.lr} if group and group.lr is not None else {}
            decay = group.weight_decay if group and group.weight_decay is not None else self.weight_decay
            found.append({"params": [p for p in members if p.dim() >= 2], "weight_decay": decay, **own})
            found.append({"params": [p for p in members if p.dim() < 2], "weight_decay": 0.0, **own})
        return [group for group in found if group["params"]]

    def freeze(self, module: nn.Module) -> None:
        """Freezes the parameters of groups that say so; raises for a pattern that matches nothing."""
        parameters = dict(module.named_parameters())
        groups = self.by_name or []
        _check_groups(groups, list(parameters))
        for name, index in group_of(groups, parameters).items():
            if groups[index].freeze:
                parameters[name].requires_grad_(False)


def group_of(groups: Sequence[Group], names: Iterable[str]) -> dict[str, int]:
    """The index of the group of each parameter that has one."""
    found = {name: next((i for i, group in enumerate(groups) if group.holds(name)), None) for name in names}
    return {name: index for name, index in found.items() if index is not None}


def matching_names(pattern: str, names: Sequence[str], *, where: str, noun: str = "parameter") -> list[str]:
    """The names that a pattern matches; raises if there is no match."""
    if matching := fnmatch.filter(names, pattern):
        return matching
    near, some = did_you_mean(pattern.strip("*"), names), ", ".join([*names[:3], "..."])
    raise RecipeError(f"{where} matches no {noun}{near}. Names look like: {some}; * matches anything.")


def _check_groups(groups: Sequence[Group], names: Sequence[str]) -> None:
    """Raises for a pattern that matches no parameter, or only those of groups before it."""
    taken = group_of(groups, names)
    for index, group in enumerate(groups):
        for pattern in group.match:
            where = f"optimizer.groups[{index}].match: {pattern!r}"
            matching = matching_names(pattern, names, where=where)
            if all(taken[name] < index for name in matching):
                raise RecipeError(
                    f"{where} matches only parameters of earlier groups, such as {matching[0]}. A parameter belongs to "
                    "the first group that matches it: put the narrower pattern first."
                )


def recompute_by_block(groups: Sequence[Group], blocks: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """How to recompute each block that is entirely in one group; `blocks` has the names of its parameters."""
    found: dict[str, str] = {}
    for index, group in enumerate(groups):
        if group.recompute is None:
            continue
        held = [block for block, names in blocks.items() if set(group_of(groups, names).values()) == {index}]
        held = [block for block in held if all(group.holds(name) for name in blocks[block])]
        if not held:
            raise RecipeError(
                f"optimizer.groups[{index}].recompute = {group.recompute}: no block is entirely in the group. Blocks "
                f"are {', '.join(list(blocks)[:3]) or 'not found in this model'}; match all of their parameters, as in "
                f"match: {next(iter(blocks), 'model.layers.0')}.*"
            )
        found |= dict.fromkeys(held, group.recompute)
    return found


def describe_groups(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """A line for each group."""
    members = list(group_of(groups, names).values())
    return [
        f"{', '.join(group.match)}: {counted(members.count(index), 'parameter')}, {group.describe()}"
        for index, group in enumerate(groups)
    ]
