"""AdamW, fused where torch can."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import nn

from fullshard.optim.base import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay; states in fp32."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = self.groups(named_parameters)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


__all__ = ["AdamW"]
