"""Denoising diffusion: the model learns the noise in an image, or the velocity, at one of many amounts of noise.

Timesteps and noise follow from each sample's draw, so the loss is the same for any number of ranks and any split.
Must not know data sources, optimizers, FSDP or samplers.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from fullshard.contracts.model import Family
from fullshard.contracts.objective import Batch, Numbers, Objective, Terms
from fullshard.families.diffusion.denoiser.batch_inputs import (
    Betas,
    Prediction,
    Text,
    alphas_cumprod,
    denoised,
    given,
    min_snr_weights,
    noised,
    sum_of_means,
    velocity,
)
from fullshard.families.diffusion.denoiser.checks import (
    check_denoiser,
    check_samples,
    last_times,
    require_denoiser,
    require_share,
    require_vae,
)
from fullshard.families.diffusion.keyed_noise import NOISE, TIME, normal, uniform


class DDPM(Objective):
    """The squared error of what the model predicts from a noisy image."""

    needs: ClassVar[tuple[str, ...]] = ("images", "label", "draws")
    encoder: ClassVar[str | None] = "image"
    numbers: ClassVar[Numbers | None] = {"loss": "min"}

    prediction: Prediction = "epsilon"
    """What the model predicts. epsilon: the noise; v: the velocity, of use also where little of the image is left."""
    betas: Betas = "linear"
    """How fast noise comes in: linear from 0.0001 to 0.02, or cosine (squaredcos_cap_v2 of diffusers)."""
    num_timesteps: int = Field(1000, ge=2)
    """How many noise levels there are; the model is told the level, from 0."""
    min_snr: float | None = Field(None, gt=0)
    """Weigh timesteps down whose ratio of signal to noise is above this, so that easy ones do not lead; 5 is usual."""
    label_drop: float | None = None
    """The share of labels, or texts, replaced by what means none, for guidance without a classifier; null: 0.1 where
    the model takes texts, or has a label that means none."""
    vae: Family | None = None
    """A frozen VAE (kind: autoencoder): images become latents in every step; null: the data is taken as it is."""

    @model_validator(mode="after")
    def _parts_fit(self) -> DDPM:
        require_share(self.label_drop)
        require_vae(self.vae)
        return self

    def extend(self, module: nn.Module) -> None:
        require_denoiser(module, kind=self.kind(), label_drop=self.label_drop)

    def frozen(self) -> dict[str, Any]:
        return {"vae": self.vae} if self.vae is not None else {}

    def check_data(self, stored: Any, *, module: nn.Module, samples_per_step: int) -> None:
        check_samples(module, stored, vae=self.vae)

    def count(self, batch: Batch) -> int:
        return int((batch["sample_ids"] >= 0).sum())

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        seen = given(model, batch, label_drop=self.label_drop, aux=aux)
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
        """The timesteps from noise to an image, so many of them, and -1 for the image itself."""
        return [float(round(self.num_timesteps * (1 - step / steps)) - 1) for step in range(steps + 1)]

    def start(self, noise: torch.Tensor) -> torch.Tensor:
        """Where the way begins: states are images and their noise, divided by the image's share."""
        return noise / math.sqrt(self._kept(self.num_timesteps - 1))

    def coordinate(self, level: float) -> float:
        """What the way runs along: noise for each part of image, along which the slope is the noise itself."""
        kept = self._kept(level)
        return math.sqrt((1 - kept) / kept)

    def slope(
        self, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, text: Text | None = None
    ) -> torch.Tensor:
        """How the state changes with the coordinate."""
        kept = self._kept(level)
        noisy = state * math.sqrt(kept)
        timesteps = torch.full((len(state),), int(level), device=state.device)
        found = denoised(model, noisy, timesteps, labels, text)
        return found if self.prediction == "epsilon" else math.sqrt(kept) * found + math.sqrt(1 - kept) * noisy

    def _kept(self, level: float) -> float:
        """The image's share of the variance."""
        if level < 0:
            return 1.0
        return float(alphas_cumprod(self.betas, self.num_timesteps, torch.device("cpu"))[int(level)])

    def check(self, model: nn.Module, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """The prediction has the image's shape, and timesteps that lie side by side reach the model apart."""
        timesteps = self.timesteps(last_times(self.num_timesteps, batch["images"].device))
        return check_denoiser(model, batch, timesteps, compute=compute, vae=self.vae)


__all__ = ["DDPM"]
