"""The contract of an optimizer, and the rule which parameter decays.

Must not know losses, schedules or how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.config.part import Part
from fullshard.contracts.parameter_groups import Group, assign, check, split

if TYPE_CHECKING:
    import torch
    from torch import nn


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
    """Ceiling of the global gradient norm; null leaves gradients as they are."""

    by_name: list[Group] | None = Field(None, alias="groups")
    """Parameters by name pattern, with a learning rate, decay, freezing or recomputation of their own."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The live optimizer over the trainable parameters."""
        raise NotImplementedError

    def state_bytes(self, parameter_bytes: int) -> int:
        """Bytes of state for one trained number of `parameter_bytes`; two moments unless the optimizer says better."""
        return 2 * parameter_bytes

    def unquantised(self) -> Optimizer:
        """The same optimizer with its state in the parameters' own dtype, so that its updates do not depend on how
        parameters are sharded."""
        return self

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """The trained parameters as torch's groups: those of the recipe's groups apart, and in each the matrices, which
        decay, apart from the vectors. By name and shape, so it is the same for any sharding."""
        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        found: list[dict[str, Any]] = []
        for group, members in split(self.by_name or [], trainable):
            own = {"lr": group.lr, "initial_lr": group.lr} if group and group.lr is not None else {}
            decay = group.weight_decay if group and group.weight_decay is not None else self.weight_decay
            found.append({"params": [p for p in members if p.dim() >= 2], "weight_decay": decay, **own})
            found.append({"params": [p for p in members if p.dim() < 2], "weight_decay": 0.0, **own})
        return [group for group in found if group["params"]]

    def freeze(self, module: nn.Module) -> None:
        """Freezes the parameters of groups that say so; raises for a pattern that matches nothing."""
        parameters = dict(module.named_parameters())
        groups = self.by_name or []
        check(groups, list(parameters))
        for name, index in assign(groups, parameters).items():
            if groups[index].freeze:
                parameters[name].requires_grad_(False)
