"""Scalars that are trained with a model, such as a temperature.

They are part of the sharded module, so that they are trained, saved and resumed like everything else; the export leaves
them out. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fullshard.dist.upload import upload

NAME = "learned_by_objective"
"""The attribute of the module that holds them."""


class Scalars(nn.Module):
    """Scalars by name. The parameter is the distance from the first value, so that half precision does not round the
    value."""

    def __init__(self, first: Mapping[str, float]) -> None:
        super().__init__()
        self.first = dict(first)
        self.moved = nn.Parameter(torch.empty(len(first), device="meta"))

    def forward(self) -> torch.Tensor:
        first = torch.tensor(list(self.first.values()), dtype=torch.float32)
        return upload(first, self.moved.device) + self.moved.float()

    def set_first_values(self) -> None:
        """Call it when a family initialises modules that are not its own."""
        nn.init.zeros_(self.moved)


def is_scalar(name: str) -> bool:
    """Whether a parameter is one of these scalars."""
    return name.startswith(f"{NAME}.")
