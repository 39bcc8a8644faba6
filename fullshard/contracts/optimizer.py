"""The contract of an optimizer, and the rule which parameter decays.

Must not know losses, schedules or how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    lr: float = Field(3e-4, gt=0)
    """The base learning rate; the schedule multiplies it."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices; vectors (norms, biases) never decay."""
    clip: float | None = Field(1.0, gt=0)
    """Ceiling of the global gradient norm; null leaves gradients as they are."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The live optimizer over the trainable parameters."""
        raise NotImplementedError

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Two groups: matrices decay, vectors do not. The split is by shape, so it is the same for any sharding."""
        trainable = [(n, p) for n, p in named_parameters if p.requires_grad]
        decay = [p for _, p in trainable if p.dim() >= 2]
        rest = [p for _, p in trainable if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]
