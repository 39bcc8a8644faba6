"""A frozen VAE of diffusers beside a denoiser, for objective.vae. Never trained.

Must not know objectives, ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fullshard.contracts.model import Family, Weights

if TYPE_CHECKING:
    from torch import nn

WHERE = "objective.vae.path"


class Autoencoder(Family):
    """An AutoencoderKL."""

    loader: ClassVar[str | None] = "diffusers.AutoencoderKL.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("encode_images", "decode_latents")

    path: str
    """A folder or hub name: of a VAE, or of a pipeline that has one."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """The precision it computes in, independent of the trained model: many VAEs overflow in fp16."""

    def compute_precision(self) -> str:
        return self.precision

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        self.stored_in()

    def stored_in(self) -> Path:
        from fullshard.families.diffusion.pipeline_parts import part_folder

        return part_folder(self.path, "vae", revision=self.revision, where=WHERE)

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.families.diffusion.vae.autoencoder_kl import empty, read_settings

        return empty(read_settings(self.stored_in(), where=WHERE))

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.families.diffusion.vae.autoencoder_kl import vae_weights

        return vae_weights(self.stored_in(), module, where=WHERE)

    def latent_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The latents' shape for images of (C, H, W); see `autoencoder_kl.latent_shape`."""
        from fullshard.families.diffusion.vae.autoencoder_kl import latent_shape, read_settings

        return latent_shape(read_settings(self.stored_in(), where=WHERE), shape)

    def rehearse(self, module: nn.Module) -> None:
        import torch

        from fullshard.families.diffusion.vae.autoencoder_kl import factor

        model: Any = module
        side = 2 * factor(model.config)
        latents = model.encode_images(torch.empty(1, model.config.in_channels, side, side, device="meta"))
        model.decode_latents(latents)


__all__ = ["Autoencoder"]
