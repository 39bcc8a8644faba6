"""Rectified flow: the model predicts the velocity of the straight path from an image to noise, which a sampler follows
back.

Must not know data sources, optimizers, FSDP or samplers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from fullshard.contracts.objective import Batch, Terms
from fullshard.families.diffusion.denoiser.batch_inputs import Text, denoised, inputs_of, sum_of_means
from fullshard.families.diffusion.denoiser.checks import check_denoiser, last_times
from fullshard.families.diffusion.keyed_noise import NOISE, TIME, normal, uniform
from fullshard.families.diffusion.objectives.base import Denoising

if TYPE_CHECKING:
    import torch
    from torch import nn

RESOLUTION = 1000
"""The number of times from 0 to 1 that a model must tell apart, where its times are not whole numbers."""


class FlowMatching(Denoising):
    """The image is at time 0 and noise at time 1; the model predicts noise minus image at any time between."""

    time: Literal["uniform", "logit_normal"] = "uniform"
    """How times are drawn. logit_normal: the sigmoid of a normal number, so that most are in the middle."""
    logit_mean: float = 0.0
    """The mean of that normal number: above 0, more times near noise."""
    logit_std: float = Field(1.0, gt=0)
    """Its standard deviation."""
    compare: Literal["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"] = Field("mse_loss", alias="loss")
    """How prediction and target are compared: a loss of torch.nn.functional, by its name."""
    timestep_scale: float = Field(1000.0, gt=0)
    """The model gets the time, 0 to 1, multiplied by this."""
    integer_time: bool = False
    """Give the model whole numbers, from 0 to timestep_scale - 1; the image still has the exact time."""

    @model_validator(mode="after")
    def _fits(self) -> FlowMatching:
        if self.time == "uniform" and (self.logit_mean, self.logit_std) != (0.0, 1.0):
            raise ValueError(
                f"logit_mean = {self.logit_mean:g} and logit_std = {self.logit_std:g} say how times are drawn with "
                "time: logit_normal, but time is uniform. Set time: logit_normal, or leave both out"
            )
        if self.integer_time and (self.timestep_scale < 2 or self.timestep_scale % 1):
            raise ValueError(
                f"integer_time counts from 0 to timestep_scale - 1, but timestep_scale = {self.timestep_scale:g}. Give "
                "a whole number of at least 2, such as 1000"
            )
        return self

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        import torch.nn.functional as F

        seen = inputs_of(model, batch, label_drop=self.label_drop, aux=aux)
        images = seen.images
        noise = normal(batch["draws"], images.shape[1:], NOISE)
        times = self.times(batch["draws"])
        share = times.reshape(-1, *(1,) * (images.dim() - 1))
        noisy = (1 - share) * images + share * noise
        found = denoised(model, noisy, self.timesteps(times), seen.labels, seen.text)
        return Terms(sum_of_means(getattr(F, self.compare)(found.float(), noise - images, reduction="none"), batch))

    def times(self, draws: torch.Tensor) -> torch.Tensor:
        """(B,) fp32 from 0 to 1: each sample's time."""
        import torch

        if self.time == "uniform":
            return uniform(draws, TIME)
        return torch.sigmoid(self.logit_mean + self.logit_std * normal(draws, (), TIME))

    def timesteps(self, times: torch.Tensor) -> torch.Tensor:
        """Times as the model gets them: fp32, or int64 with `integer_time`. Never lower precision: bf16 has only 507
        values for the whole numbers to 999."""
        scaled = times.float() * self.timestep_scale
        return scaled.long().clamp(max=int(self.timestep_scale) - 1) if self.integer_time else scaled

    def levels(self, steps: int) -> list[float]:
        """Times from noise to an image."""
        return [1 - step / steps for step in range(steps + 1)]

    def start(self, noise: torch.Tensor) -> torch.Tensor:
        """The sampler's first state."""
        return noise

    def coordinate(self, level: float) -> float:
        """The coordinate of the ODE: time."""
        return level

    def slope(
        self, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, text: Text | None = None
    ) -> torch.Tensor:
        """The derivative of the state along the coordinate."""
        import torch

        times = torch.full((len(state),), level, device=state.device)
        return denoised(model, state, self.timesteps(times), labels, text)

    def check(self, model: nn.Module, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """The prediction has the image's shape, and the model can tell neighbouring times apart."""
        times = last_times(int(self.timestep_scale) if self.integer_time else RESOLUTION, batch["images"].device)
        return check_denoiser(model, batch, self.timesteps(times), compute=compute, vae=self.vae)


__all__ = ["FlowMatching"]
