"""One signature for every denoiser: noisy images, times, labels and texts in, a prediction of the same shape out.

`bind` gives a module the method `denoise`, and attributes that say what it takes. Must not know losses, noise or ranks.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from fullshard.families.diffusion.denoiser.architectures import FLUX, PACKED, PIXART
from fullshard.families.diffusion.denoiser.batch_inputs import Text
from fullshard.families.diffusion.denoiser.forward_calls import CALLS, prepare, text_for, text_widths


def bind(module: nn.Module, *, classes: int | None, guidance: float = 3.5, fresh: bool = False) -> None:
    """Adds the method and its attributes. `guidance`: the input of a guidance-distilled model; `fresh`: the model
    starts from scratch."""
    bound: Any = module
    # Sharding renames the class.
    bound.class_name = type(module).__name__
    bound.num_classes, bound.null_label = classes, classes
    bound.text_width, bound.pooled_width = text_widths(bound.class_name, bound.config)
    # The pipelines of the others pass no mask: their models attend to the padding too.
    bound.takes_mask = bound.class_name == PIXART
    bound.image_channels = bound.config.in_channels // (PACKED**2 if bound.class_name == FLUX else 1)
    bound.told_guidance, bound.is_fresh = guidance, fresh
    bound.is_told_guidance = bound.class_name == FLUX and bool(bound.config.guidance_embeds)
    prepare(bound)
    bound.denoise = types.MethodType(denoise, module)


def denoise(
    module: Any,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    labels: torch.Tensor | None = None,
    text: Text | None = None,
) -> torch.Tensor:
    """fp32 (B, C, H, W). Without labels a conditional model gets the null label, without texts a placeholder."""
    found = CALLS[module.class_name](module, noisy, timesteps, labels, text_for(module, text, noisy))
    # Models that also predict a variance append it. A copy: FSDP hooks the output, and views would lose the hook.
    predicted: torch.Tensor = found[:, : noisy.shape[1]].float().clone()
    return predicted
