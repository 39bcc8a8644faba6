"""Images or latents with optional classes and texts: one sample per record, all of one shape.

Files are read once, when the data is encoded; then a frozen VAE and text encoders also run, or texts become tokens.
Must not know source files, ranks, noise or what is predicted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from fullshard.config.part import did_you_mean
from fullshard.contracts.data import Encoder, Quantity, Record, Store
from fullshard.data.records import MAPPING, keys_found
from fullshard.errors import DataError
from fullshard.families.diffusion import captions
from fullshard.families.diffusion.denoiser.input_shape import require_shape
from fullshard.families.diffusion.image_samples import OpenImages
from fullshard.families.diffusion.text.encoder_stack import Join, NoText, Texts, TextStack
from fullshard.families.diffusion.vae.latents import Latents
from fullshard.images.arrays import Picture, read
from fullshard.images.reading import given, is_empty

_COLUMNS = ("latent_vector_path", "path", "image")
"""Columns of an image or latent; the first that holds something is read."""


class Images(Encoder):
    """Images or latents, and their classes, for diffusion models.

    Pixels are scaled to -1 to 1, latents are not; then `mean` is subtracted and `scale` multiplied."""

    length_feature: ClassVar[str] = "image"
    needs_training_data: ClassVar[bool] = True

    column_mapping: dict[str, str] = {}
    """Your columns for image, label and text. Default: label, and the first that holds something of latent_vector_path,
    path or image, and of text, caption or prompt."""
    root: Path | None = None
    """Where relative paths start; null: the current folder."""
    size: int | None = Field(None, ge=1)
    """Resize the shorter side to this many pixels, then crop the centre square; null: off."""
    channels: Literal[1, 3] | None = None
    """1: convert to grey; 3: convert to colour; null: as stored, without transparency."""
    mean: float | Literal["measure"] = 0.0
    """Subtracted from every value; measure: the mean of all values of data.train."""
    scale: Annotated[float, Field(gt=0)] | Literal["measure"] = 1.0
    """Then every value is multiplied by this; measure: 1 / the standard deviation of all values of data.train."""
    flip: bool = False
    """Mirror a random half of the images, drawn again in each epoch."""
    unreadable: Literal["error", "skip"] = "error"
    """What to do if an image is missing or damaged, found when the data is encoded: stop, or skip and count its
    record."""
    classes: int | None = Field(None, ge=1)
    """The number of classes: each record needs a label from 0 to one less; null: any label from 0 on, or none."""
    vae: Latents | None = None
    """Encode images to latents with this VAE, once; null: off."""
    text: list[Texts] | Texts | None = None
    """Encode texts with this text encoder, or several; null: texts are not read."""
    join: Join = "flux"
    """How several are combined. flux: states of the last, and the one vector of a whole text from the first that gives
    one. sdxl: states of CLIP encoders side by side. sd3: the same, followed by the tokens of the last, T5."""
    no_text: NoText | None = None
    """What replaces a text that objective.label_drop drops, and what guidance compares with. encoded: the encoders'
    output for an empty text; zeros; null: as in their pipeline, which is zeros for sdxl, unless its
    force_zeros_for_empty_prompt is false, and encoded for all others."""

    @field_validator("column_mapping")
    @classmethod
    def _known(cls, mapping: dict[str, str]) -> dict[str, str]:
        known = ["image", "label", "text"]
        for name in mapping:
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a part of an image record{did_you_mean(name, known)}. Known: {', '.join(known)}"
                )
        taken: dict[str, str] = {}
        for name, column in sorted(mapping.items()):
            if (before := taken.setdefault(column, name)) != name:
                raise ValueError(f"{column!r} is mapped to both {before!r} and {name!r}")
        return mapping

    @model_validator(mode="after")
    def _fits(self) -> Images:
        if self.vae is not None and self.flip:
            raise ValueError(
                "data.encode.flip = true flips images, but data.encode.vae stores their latents: a flipped latent is "
                "not the latent of the flipped image. Leave flip out, or use objective.vae, which encodes in every step"
            )
        if self.text == []:
            raise ValueError("data.encode.text = [] names no text encoder. Name one, or leave it out")
        if self.stack is not None:
            self.stack.check()
        elif self.join != "flux" or self.no_text is not None:
            key = f"join = {self.join}" if self.join != "flux" else f"no_text = {self.no_text}"
            raise ValueError(f"data.encode.{key} is for text encoders: name them in data.encode.text")
        return self

    @property
    def stack(self) -> TextStack | None:
        """The text encoders; None if texts are not read."""
        if self.text is None:
            return None
        texts = self.text if isinstance(self.text, list) else [self.text]
        return TextStack(texts, self.join, no_text=self.no_text)

    def frozen(self) -> dict[str, Any]:
        return self.stack.families() if self.stack is not None and self.stack.is_live else {}

    @property
    def is_measured(self) -> bool:
        """Whether the mean or the scale comes from the data."""
        return "measure" in (self.mean, self.scale)

    def open(self, processor: Any, *, length: int) -> OpenImages:
        return OpenImages(self, processor, length=length)

    def quantities(self, store: Store) -> list[Quantity]:
        return [Quantity("images", "img", store.lengths)]

    def check_model(self, module: Any) -> None:
        captions.check_model(self.stack, module)
        if self.vae is not None and self.size is not None:
            # The size is known now; the VAE may work for hours.
            shape = self.vae.shape_of(self.size)
            require_shape(module, shape, what="latents by data.encode.vae", scale=self.size // shape[1])

    def columns_read(self, record: Record) -> list[str]:
        text = captions.column_of(record, None) if self.text else None
        found = {"image": self.column_of(record), **({"text": text} if text else {})}
        said = [f"{name} from {column}" for name, column in found.items() if name not in (column, *self.column_mapping)]
        return [f"columns: {'; '.join(said)} (by the keys of the first record)"] if said else []

    def read(self, record: Record) -> Picture:
        """The image or latent of a record."""
        column = self.column_of(record)
        picture = read(_value(record[column], column), column, root=self.root, size=self.size, channels=self.channels)
        if self.flip and picture.is_latent:
            raise DataError(
                f"{picture.name} is a latent, but data.encode.flip = true is for images: a flipped latent is not the "
                "latent of the flipped image. Leave flip out, and add records with the latents of flipped images."
            )
        return picture

    def _columns(self, record: Record) -> list[str]:
        """The columns of an image or latent that hold something."""
        taken = [column for name, column in self.column_mapping.items() if name != "image"]
        return [name for name in self._accepted if name not in taken and not is_empty(record.get(name))]

    @property
    def _accepted(self) -> tuple[str, ...]:
        mapped = self.column_mapping.get("image")
        return (mapped,) if mapped else _COLUMNS

    def column_of(self, record: Record) -> str:
        """The column of the image or latent."""
        columns = self._columns(record)
        if not columns:
            raise DataError(
                f"no image or latent in the record. {keys_found(record)} Accepted for it: {', '.join(self._accepted)}. "
                f"Give it a path, the bytes of a file or an array, or name another column with {MAPPING} = "
                "{image: COLUMN}."
            )
        return columns[0]

    def path_of(self, record: Record) -> str | None:
        """The file that a record names."""
        try:
            value = next((_value(record[column], column) for column in self._columns(record)), None)
        except DataError:
            return None  # encoding raises it, with the location
        return value if isinstance(value, str) else None


def _value(value: Any, column: str) -> Any:
    """A path as str, bytes, an image or an array."""
    if isinstance(value, (np.ndarray, list)):
        return value
    found = given(str(value) if isinstance(value, os.PathLike) else value, column)
    return found.value if found else None


__all__ = ["Images"]
