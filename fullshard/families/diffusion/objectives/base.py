"""What the denoising objectives share: labels and texts dropped for guidance, the frozen VAE, and checks of the data.

Noise and times follow from each sample's draw, so the loss is the same for any number of ranks and any split into
micro-batches. Must not know data sources, optimizers, FSDP or samplers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from fullshard.contracts.model import Family
from fullshard.contracts.objective import Batch, Numbers, Objective
from fullshard.families.diffusion.denoiser.checks import check_samples, require_denoiser, require_share, require_vae

if TYPE_CHECKING:
    from torch import nn


class Denoising(Objective):
    """An objective that a denoiser is trained by and images are sampled with."""

    needs: ClassVar[tuple[str, ...]] = ("images", "label", "draws")
    encoder: ClassVar[str | None] = "image"
    numbers: ClassVar[Numbers | None] = {"loss": "min"}

    label_drop: float | None = None
    """The share of labels, or texts, dropped for classifier-free guidance; null: 0.1 where the model takes texts, or
    has a label for "no class"."""
    vae: Family | None = None
    """A frozen VAE (kind: autoencoder) that encodes images to latents in every step; null: train on the data as is."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
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
