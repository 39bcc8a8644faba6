"""The contract of an optimizer, and the rule which parameter decays.

Must not know losses, schedules or how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.config.part import Part

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
        """Two groups: matrices decay, vectors do not. The split is by shape, so it is the same for any sharding."""
        trainable = [(n, p) for n, p in named_parameters if p.requires_grad]
        decay = [p for _, p in trainable if p.dim() >= 2]
        rest = [p for _, p in trainable if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]
