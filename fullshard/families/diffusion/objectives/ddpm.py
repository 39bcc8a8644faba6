"""Denoising diffusion (DDPM): the model predicts the noise in an image, or the velocity, at one of many timesteps.

Must not know data sources, optimizers, FSDP or samplers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fullshard.contracts.objective import Batch, Terms
from fullshard.families.diffusion.denoiser.batch_inputs import Text, denoised, inputs_of, sum_of_means
from fullshard.families.diffusion.denoiser.checks import check_denoiser, last_times
from fullshard.families.diffusion.keyed_noise import NOISE, TIME, normal, uniform
from fullshard.families.diffusion.objectives.base import Denoising
from fullshard.families.diffusion.objectives.noise_schedule import (
    Betas,
    Prediction,
    alphas_cumprod,
    min_snr_weights,
    noised,
    velocity,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


class DDPM(Denoising):
    """The squared error of what the model predicts from a noisy image."""

    prediction: Prediction = "epsilon"
    """What the model predicts. epsilon: the noise; v: the velocity, useful also where little of the image is left."""
    betas: Betas = "linear"
    """The noise schedule: linear from 0.0001 to 0.02, or cosine (squaredcos_cap_v2 of diffusers)."""
    num_timesteps: int = Field(1000, ge=2)
    """How many noise levels there are; the model gets the level, from 0."""
    min_snr: float | None = Field(None, gt=0)
    """Min-SNR weighting: weigh timesteps down whose signal-to-noise ratio is above this; 5 is usual."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        import torch.nn.functional as F

        seen = inputs_of(model, batch, label_drop=self.label_drop, aux=aux)
        images = seen.images
        noise = normal(batch["draws"], images.shape[1:], NOISE)
        timesteps = self.timesteps(uniform(batch["draws"], TIME))
        kept = alphas_cumprod(self.betas, self.num_timesteps, images.device)[timesteps]
        found = denoised(model, noised(images, noise, kept), timesteps, seen.labels, seen.text)
        target = noise if self.prediction == "epsilon" else velocity(images, noise, kept)
        apart = F.mse_loss(found.float(), target, reduction="none").flatten(1)
        if self.min_snr is not None:
            apart = apart * min_snr_weights(kept, self.min_snr, self.prediction)[:, None]
        return Terms(sum_of_means(apart, batch))

    def timesteps(self, times: torch.Tensor) -> torch.Tensor:
        """(B,) int64: the timesteps that times from 0 to 1 fall into."""
        return (times * self.num_timesteps).long().clamp(max=self.num_timesteps - 1)

    def levels(self, steps: int) -> list[float]:
        """`steps` timesteps from noise to an image, and -1 for the image itself."""
        return [float(round(self.num_timesteps * (1 - step / steps)) - 1) for step in range(steps + 1)]

    def start(self, noise: torch.Tensor) -> torch.Tensor:
        """The sampler's first state: states are noisy images divided by the square root of the image's share."""
        return noise / math.sqrt(self._kept(self.num_timesteps - 1))

    def coordinate(self, level: float) -> float:
        """The coordinate of the ODE: noise per part of image, along which the slope is the noise itself."""
        kept = self._kept(level)
        return math.sqrt((1 - kept) / kept)

    def slope(
        self, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, text: Text | None = None
    ) -> torch.Tensor:
        """The derivative of the state along the coordinate."""
        import torch

        kept = self._kept(level)
        noisy = state * math.sqrt(kept)
        timesteps = torch.full((len(state),), int(level), device=state.device)
        found = denoised(model, noisy, timesteps, labels, text)
        return found if self.prediction == "epsilon" else math.sqrt(kept) * found + math.sqrt(1 - kept) * noisy

    def _kept(self, level: float) -> float:
        """The image's share of the variance."""
        import torch

        if level < 0:
            return 1.0
        return float(alphas_cumprod(self.betas, self.num_timesteps, torch.device("cpu"))[int(level)])

    def check(self, model: nn.Module, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """The prediction has the image's shape, and the model can tell neighbouring timesteps apart."""
        timesteps = self.timesteps(last_times(self.num_timesteps, batch["images"].device))
        return check_denoiser(model, batch, timesteps, compute=compute, vae=self.vae)


__all__ = ["DDPM"]
