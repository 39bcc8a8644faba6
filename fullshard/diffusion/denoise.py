"""One call for every denoiser: noisy images, times and labels in, a prediction of the images' shape out.

`bind` gives a module the method `denoise` and says which label means none. Must not know losses, noise or ranks.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import nn


def bind(module: nn.Module, *, classes: int | None) -> None:
    """The method and the labels. The model's own label drop, which draws from this rank's generator, is turned off."""
    bound: Any = module
    bound.num_classes, bound.null_label = classes, classes
    bound.takes_labels = "class_labels" in inspect.signature(bound.forward).parameters
    bound.denoise = types.MethodType(denoise, module)
    for part in module.modules():
        if type(part).__name__ == "LabelEmbedding":
            part.dropout_prob = 0.0  # type: ignore[assignment]


def denoise(
    module: Any, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 (B, C, H, W). Without labels a conditional model gets the one that means none."""
    given: dict[str, Any] = {}
    if module.num_classes is not None:
        given["class_labels"] = torch.full_like(timesteps, module.null_label).long() if labels is None else labels
    elif module.takes_labels and hasattr(module, "transformer_blocks"):  # a DiT has a table even for one class
        given["class_labels"] = torch.zeros_like(timesteps).long()
    found: torch.Tensor = module.forward(noisy, timesteps, **given).sample
    # Models that also predict a variance have it behind. A copy: FSDP watches what it gives out, and views get lost.
    return found[:, : noisy.shape[1]].float().clone()
