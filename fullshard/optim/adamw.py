"""AdamW, fused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from fullshard.contracts.optimizer import Optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Optimizer):
    """Adam with decoupled weight decay; states have the dtype of the parameters, by default fp32."""

    largest_lr: ClassVar[float] = 0.1  # a step changes each weight by about lr, and most weights are below 0.1

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        import torch

        groups = self.groups(named_parameters)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


__all__ = ["AdamW"]
