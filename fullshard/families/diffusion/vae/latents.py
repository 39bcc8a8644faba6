"""Latents of images, made once when data is prepared: the settings of data.encode.vae, and the VAE while it is needed.

Must not know records, stores, losses or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.config.part import Section
from fullshard.errors import RecipeError

if TYPE_CHECKING:
    import torch

WHERE = "data.encode.vae.path"
_PIXELS = {"cpu": 2**18, "cuda": 2**22}
"""Pixels that go through the VAE at once: on a GPU 16 images of 512 x 512, about 16 GiB for a usual VAE."""


class Latents(Section):
    """A frozen VAE that encodes images to latents."""

    path: str
    """A folder or hub name: of an AutoencoderKL of diffusers, or of a pipeline that has one."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def folder(self) -> Path:
        from fullshard.families.diffusion.pipeline_parts import part_folder

        return part_folder(self.path, "vae", revision=self.revision, where=WHERE)

    def files(self) -> list[Path]:
        """The files that decide the latents, besides the images."""
        from fullshard.families.diffusion.pipeline_parts import content

        return content(self.folder())

    def settings(self) -> dict[str, Any]:
        from fullshard.families.diffusion.vae.autoencoder_kl import read_settings

        return read_settings(self.folder(), where=WHERE)

    def factor(self) -> int:
        """Pixels per side that become one latent pixel."""
        from fullshard.families.diffusion.vae.autoencoder_kl import factor

        return factor(self.settings())

    def shape_of(self, size: int) -> tuple[int, int, int]:
        """The latent shape of a square image."""
        from fullshard.families.diffusion.vae.autoencoder_kl import latent_shape

        settings = self.settings()
        try:
            return latent_shape(settings, (settings["in_channels"], size, size))
        except ValueError as error:
            raise RecipeError(f"data.encode.size = {size}: an image {error}.") from None

    def open(self, device: torch.device | None = None) -> Any:
        """The VAE itself, on this process's device."""
        from fullshard.families.diffusion import pipeline_parts
        from fullshard.families.diffusion.vae import autoencoder_kl

        return autoencoder_kl.load(self.folder(), device=device or pipeline_parts.device(), where=WHERE)


def decode(opened: Any, latents: torch.Tensor) -> torch.Tensor:
    """Images of latents, a few at a time."""
    import torch

    with torch.no_grad():
        return torch.cat([opened.decode_latents(some) for some in latents.split(8)])


def encode(opened: Any, images: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Latents of images (C, H, W) from -1 to 1, fp32, in order; those of one shape go through the VAE together."""
    import torch

    device = next(opened.parameters()).device
    for shape, group in groupby(images, key=lambda image: image.shape):
        alike = list(group)
        at_once = max(_PIXELS[device.type] // (shape[1] * shape[2]), 1)
        for start in range(0, len(alike), at_once):
            values = torch.from_numpy(np.stack(alike[start : start + at_once])).to(device)
            with torch.no_grad():
                yield from opened.encode_images(values).cpu().numpy()


def as_strips(latents: torch.Tensor) -> torch.Tensor:
    """Latents (N, C, H, W) as grey pictures (N, 1, H, C * W): channels side by side, each scaled to -1 to 1 by its
    minimum and maximum over all latents."""
    values = latents.float()
    least, most = values.amin((0, 2, 3), keepdim=True), values.amax((0, 2, 3), keepdim=True)
    grey = 2 * (values - least) / (most - least).clamp(min=1e-12) - 1
    count, channels, height, width = grey.shape
    return grey.permute(0, 2, 1, 3).reshape(count, 1, height, channels * width)
