"""What the vision tower and the projector cost for each token that stands for a part of an image.

The tower's forward pass does 2 operations per parameter and patch, the projector's 2 per parameter and image token; the
backward pass adds what is trained. Attention between patches is left out: it differs from model to model, and the
MFU is then too low rather than too high. Must not know model names, devices or ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fullshard.multimodal.towers import PROJECTOR, tower_of


def patches_per_token(module: nn.Module, processor: Any) -> float:
    """How many patches of the vision tower become one image token, on an image of a usual size."""
    from PIL import Image

    image = Image.new("RGB", (672, 504))
    text = processor.image_texts([image.size])[0]
    tokens = processor.tokenizer(text, add_special_tokens=False)["input_ids"].count(processor.image_token_id)
    model: Any = module
    towers = [module.get_submodule(name) for name in model.towers.get("vision", [])]
    first = next((p for tower in towers for p in tower.modules() if isinstance(p, (nn.Conv2d, nn.Conv3d))), None)
    if first is None:
        return 1.0
    values = int(processor.features([image])["pixel_values"].numel())
    return values / int(first.weight[0].numel()) / int(tokens)


def flops_per_image_token(
    module: nn.Module, names: Collection[str], *, patches: float, adapted: Collection[str]
) -> float:
    """The cost of these parameters in one training step: forward 2, backward 4 if they are trained, and 2 for passing a
    gradient on to adapters."""
    model: Any = module
    passes_on = any(name in adapted for name in names)
    cost = 0.0
    for name in names:
        parameter = module.get_parameter(name)
        each = 6.0 if parameter.requires_grad else 4.0 if passes_on else 2.0
        cost += each * parameter.numel() * (1.0 if tower_of(name, model.towers) == PROJECTOR else patches)
    return cost


__all__ = ["flops_per_image_token", "patches_per_token"]
