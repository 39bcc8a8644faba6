"""The user's feature extractor as a module that torchmetrics accepts. Must not know files or ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Extractor(nn.Module):
    """Features as rows of fp32; it also takes zero images."""

    def __init__(self, callback: Any, num_features: int) -> None:
        super().__init__()
        self.callback, self.num_features = callback, num_features
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not len(images):
            return torch.zeros((0, self.num_features), device=images.device)
        found: torch.Tensor = self.callback(images)
        return found.flatten(1).float()
