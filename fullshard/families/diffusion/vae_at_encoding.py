"""The frozen VAE that images go through when data is encoded: opened at the first use, freed with this.

Must not know records, stores or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.data.records import combine, digest
from fullshard.errors import DataError
from fullshard.families.diffusion.text.encoder_stack import TextStack
from fullshard.families.diffusion.vae.latents import Latents, encode
from fullshard.images.arrays import Picture, floats

CODE = tuple(
    Path(__file__).parent / name
    for name in ("vae/latents.py", "vae/autoencoder_kl.py", "text/encoder_model.py", "text/encoder_stack.py")
)
"""Source files that decide the result; an encoder's own folder is fingerprinted without listing it here."""


class FrozenVae:
    """The VAE of data.encode.vae."""

    def __init__(self, settings: Latents) -> None:
        self._settings = settings

    @cached_property
    def _vae(self) -> Any:
        return self._settings.open()

    def latents(self, pictures: Sequence[Picture]) -> list[Picture]:
        """The latents of images; grey images become RGB if the VAE takes RGB."""
        coloured = [self._checked(picture) for picture in pictures]
        values = encode(self._vae, [floats(picture.values) for picture in coloured])
        found = [Picture(picture.name, latent) for picture, latent in zip(pictures, values, strict=True)]
        for picture in found:
            if not np.isfinite(picture.values).all():
                raise DataError(
                    f"{picture.name} becomes a latent with NaN or infinite values. Check the weights of "
                    "data.encode.vae, or remove the record."
                )
        return found

    def _checked(self, picture: Picture) -> Picture:
        from fullshard.families.diffusion.vae.autoencoder_kl import latent_shape

        if picture.is_latent:
            raise DataError(
                f"{picture.name} is a latent, but data.encode.vae encodes images. Leave data.encode.vae out, "
                "or give images."
            )
        if len(picture.values) == 1 and self._vae.config.in_channels == 3:
            picture = Picture(picture.name, np.repeat(picture.values, 3, axis=0))
        try:
            latent_shape(self._vae.config, picture.values.shape)
        except ValueError as error:
            raise DataError(f"{picture.name} {error}, or remove the record.") from None
        return picture


def fingerprints(vae: Latents | None, stack: TextStack | None) -> dict[str, str]:
    """A fingerprint of each frozen model, including every weight."""
    parts: dict[str, Any] = {"vae": vae} if vae is not None else {}
    parts |= {f"text[{index}]": text for index, text in enumerate(stack.texts if stack else [])}
    return {name: combine(*map(digest, part.files())) for name, part in parts.items()}
