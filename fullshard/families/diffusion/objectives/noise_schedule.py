"""The noise schedule of DDPM, as diffusers' DDPMScheduler has it, and what follows from it for a noisy image.

`kept` is alphas_cumprod at a sample's timestep: the image's share of the variance. Must not know models or ranks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Betas = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "v"]


@functools.cache
def alphas_cumprod(betas: Betas, num_timesteps: int, device: torch.device) -> torch.Tensor:
    """(num_timesteps,) fp32, for diffusers' linear and squaredcos_cap_v2 betas."""
    import torch

    if betas == "linear":
        each = torch.linspace(1e-4, 0.02, num_timesteps, dtype=torch.float32)
    else:

        def left(share: float) -> float:
            return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

        ends = [left(step / num_timesteps) for step in range(num_timesteps + 1)]
        steps = zip(ends, ends[1:], strict=False)
        each = torch.tensor([min(1 - after / before, 0.999) for before, after in steps], dtype=torch.float32)
    return (1 - each).cumprod(0).to(device)


def noised(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return _per_sample(kept.sqrt(), images) * images + _per_sample((1 - kept).sqrt(), images) * noise


def velocity(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The target of v-prediction."""
    return _per_sample(kept.sqrt(), images) * noise - _per_sample((1 - kept).sqrt(), images) * images


def min_snr_weights(kept: torch.Tensor, gamma: float, prediction: Prediction) -> torch.Tensor:
    """(B,) loss weights: as an error of the image, no sample counts more than `gamma`."""
    snr = kept / (1 - kept)
    return snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1)


def _per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.dim() - 1))
