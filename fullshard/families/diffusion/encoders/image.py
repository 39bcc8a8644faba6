"""Images or latents, each perhaps with a class or a text: one sample for each record, all of one shape.

Files are read once, when the data is encoded; so are images and texts by a frozen VAE and text encoders, or texts
become tokens. Must not know files of records, ranks, noise or what is predicted.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr, field_validator, model_validator

from fullshard.config.part import did_you_mean
from fullshard.contracts.data import Encoder, Features, Record, Records
from fullshard.data.columns import MAPPING, is_empty
from fullshard.data.records import digest, keys_found
from fullshard.errors import DataError
from fullshard.families.diffusion import captions
from fullshard.families.diffusion.denoiser.input_shape import require_shape
from fullshard.families.diffusion.file_stamps import stamped
from fullshard.families.diffusion.labels import label_of
from fullshard.families.diffusion.pipeline_parts import give_back
from fullshard.families.diffusion.shape_words import RESIZE, by, in_words, remedy
from fullshard.families.diffusion.text.encoder_stack import Join, NoText, Texts, TextStack
from fullshard.families.diffusion.vae.latents import Latents
from fullshard.families.diffusion.vae_at_encoding import CODE, Frozen, fingerprints
from fullshard.formatting.plural import counted
from fullshard.images.arrays import Picture, floats, read
from fullshard.images.reading import Unreadable, given, place, quiet

if TYPE_CHECKING:
    from fullshard.data.store import Store

_COLUMNS = ("latent_vector_path", "path", "image")
"""Where an image or a latent is looked for: the first column that holds something."""
_MOST_THREADS = 8
_DIGITS = 9
"""Measured numbers are rounded to so many, so that those in the report are those in use, on every kind of processor."""


class Images(Encoder):
    """Images or latents, and their classes, for diffusion models.

    Pixels become numbers from -1 to 1, latents stay as they are; then the mean is taken off and the scale put on."""

    unit: ClassVar[str] = "images"

    column_mapping: dict[str, str] = {}
    """Which column of a record is its image (or latent), its label or its text, where it has another name than label,
    than latent_vector_path, path or image, or than text, caption or prompt, of which the first that holds something is
    taken."""
    root: Path | None = None
    """Where relative paths begin; null: in the current folder."""
    size: int | None = Field(None, ge=1)
    """Resize the shorter side to this many pixels, then crop the centre square; null: off."""
    channels: Literal[1, 3] | None = None
    """1: all images become grey; 3: all become coloured; null: as they are stored, without transparency."""
    mean: float | Literal["measure"] = 0.0
    """Subtracted from every value; measure: the mean of all values of data.train."""
    scale: Annotated[float, Field(gt=0)] | Literal["measure"] = 1.0
    """Then every value is multiplied by this; measure: 1 / the standard deviation of all values of data.train."""
    flip: bool = False
    """Mirror about half of the images, drawn anew in each epoch."""
    unreadable: Literal["error", "skip"] = "error"
    """What an image that is not there or is damaged does: stop, or leave its record out and be counted. Found when the
    data is encoded, and kept with it in data.cache."""
    classes: int | None = Field(None, ge=1)
    """How many classes there are: each record needs a label from 0 to one less; null: any label from 0 on, or none."""
    vae: Latents | None = None
    """Images become latents, once, by this VAE; null: they stay images."""
    text: list[Texts] | Texts | None = None
    """Texts become states by this text encoder, or by several; null: texts are not read."""
    join: Join = "flux"
    """How several go together. flux: states of the last, and the one vector of a whole text from the first that gives
    one. sdxl: states of CLIP encoders side by side. sd3: the same, and behind them the tokens of the last, T5."""

    no_text: NoText | None = None
    """What stands for a text that objective.label_drop drops, and for what guidance compares with. encoded: what the
    encoders make of an empty text; zeros; null: as their pipeline does, which is zeros for sdxl, unless its
    force_zeros_for_empty_prompt is false, and encoded for all others."""

    _form: tuple[tuple[int, ...], bool] | None = PrivateAttr(None)
    """The shape that all samples must have, and whether they are latents: as data.train, or the first encoded here."""
    _scaling: tuple[float, float] | None = PrivateAttr(None)
    """Mean and scale, where they are measured."""
    _told: list[str] = PrivateAttr(default_factory=list)
    _opened: Frozen | None = PrivateAttr(None)
    """The VAE, as long as data is encoded."""
    _empty: Features = PrivateAttr(default_factory=dict)
    """What means no text, by the data that was encoded."""
    _reading: TextStack | None = PrivateAttr(None)
    """The text encoders and their tokenizers, as long."""

    @field_validator("column_mapping")
    @classmethod
    def _known(cls, mapping: dict[str, str]) -> dict[str, str]:
        known = ["image", "label", "text"]
        for name in mapping:
            if name not in known:
                raise ValueError(
                    f"{name!r} is nothing a record of images has{did_you_mean(name, known)}. Known: {', '.join(known)}"
                )
        taken: dict[str, str] = {}
        for name, column in sorted(mapping.items()):
            if (before := taken.setdefault(column, name)) != name:
                raise ValueError(f"{column!r} is taken for {before!r} and for {name!r}")
        return mapping

    @model_validator(mode="after")
    def _fits(self) -> Images:
        if self.vae is not None and self.flip:
            raise ValueError(
                "data.encode.flip = true flips images, and data.encode.vae stores their latents: a flipped latent is "
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
        """The text encoders; None where texts are not read."""
        if self.text is None:
            return None
        texts = self.text if isinstance(self.text, list) else [self.text]
        return TextStack(texts, self.join, no_text=self.no_text)

    def frozen(self) -> dict[str, Any]:
        return self.stack.families() if self.stack is not None and self.stack.is_live else {}

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Channels, height and width of a sample; None before data.train is encoded, or any other data."""
        return self._form[0] if self._form else None

    @property
    def shows_latents(self) -> bool:
        """Whether what the model makes stays latents, for want of a VAE, as far as the data is known."""
        return self.vae is None and self._form is not None and self._form[1]

    def gives_latent(self, record: Record) -> bool:
        """The same, by one record."""
        return self.vae is None and self._read(record).is_latent

    @property
    def is_measured(self) -> bool:
        """Whether a number of the scaling comes from the data."""
        return "measure" in (self.mean, self.scale)

    @property
    def scaling(self) -> tuple[float, float]:
        """The mean and the scale in use: a batch holds (value - mean) * scale."""
        if not self.is_measured:
            return float(self.mean), float(self.scale)
        assert self._scaling is not None, "measured numbers need the encoded data: settle comes first"
        return self._scaling

    def shown(self, images: Any) -> Any:
        mean, scale = self.scaling
        images = images / scale + mean
        return images if self.vae is None else self.vae.decode(images)

    def encode(self, record: Record, processor: Any, *, length: int) -> Sequence[Features]:
        return self.encode_many([record], processor, length=length)[0]

    def encode_many(self, records: Sequence[Record], processor: Any, *, length: int) -> list[Sequence[Features]]:
        if not records:
            return []
        with quiet(), ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(records))) as pool:
            looked = list(pool.map(self._look, records))
        made = iter(self._samples([pair for pair in zip(records, looked, strict=True) if pair[1] is not None]))
        return [[{"unreadable": np.array([True])}] if picture is None else [next(made)] for picture in looked]

    def _samples(self, found: Sequence[tuple[Record, Any]]) -> list[Features]:
        """What becomes of records and their pictures."""
        if not found:
            return []
        records, pictures = [record for record, _ in found], [picture for _, picture in found]
        labels = [label_of(record, mapped=self.column_mapping.get("label"), classes=self.classes) for record in records]
        sources = [picture.fingerprint() for picture in pictures]
        written = [captions.caption(record, self.column_mapping.get("text")) for record in records if self.text]
        # Last, and all together: a mistake in a record is found before anything heavy runs.
        if self.vae is not None:
            self._opened = self._opened or Frozen(self.vae)
            pictures = self._opened.latents(pictures)
        self._reading = self._reading or self.stack
        texts = captions.features_of(written, self._reading) if self._reading else [{}] * len(records)
        samples = zip(pictures, labels, sources, texts, strict=True)
        return [{**self._features(picture, label, source), **text} for picture, label, source, text in samples]

    def check_model(self, module: Any) -> None:
        captions.check_model(self.stack, module)
        if self.vae is not None and self.size is not None:
            # Known without an image, and before a VAE works for hours.
            shape = self.vae.shape_of(self.size)
            require_shape(module, shape, what="latents by data.encode.vae", scale=self.size // shape[1])

    def common(self) -> Features:
        return captions.empty_features(self._reading) if self._reading is not None else {}

    def close(self) -> None:
        if self._opened is not None or self._reading is not None:
            self._opened = self._reading = None
            give_back()

    def _look(self, record: Record) -> Picture | None:
        """None where the image cannot be read, and the record is to be left out."""
        try:
            return self._read(record)
        except Unreadable:
            if self.unreadable == "error":
                raise
            return None

    def _read(self, record: Record) -> Picture:
        column = self._column(record)
        picture = read(_value(record[column], column), column, root=self.root, size=self.size, channels=self.channels)
        if self.flip and picture.is_latent:
            raise DataError(
                f"{picture.name} is a latent, but data.encode.flip = true is for images: a flipped latent is not the "
                "latent of the flipped image. Leave flip out, and add records with the latents of flipped images."
            )
        return picture

    def _features(self, picture: Picture, label: int, source: int) -> Features:
        form = picture.values.shape, picture.is_latent
        self._form = self._form or form
        if form != self._form:
            raise DataError(
                f"{picture.name} is {in_words(*form)}, but the first sample is {in_words(*self._form)}, and all "
                f"need one shape. {remedy(form, self._form) if self.vae is None else RESIZE}"
            )
        # With an axis before it, so that the store holds each to the shape of the first, and counts one for each.
        features = {"image": picture.values[None], "label": np.array([label], dtype=np.int64)}
        features["source"] = np.array([source], dtype=np.int64)
        if self.is_measured:
            values = floats(picture.values).astype(np.float64)
            features["moments"] = np.array([[values.mean(), values.var()]])
        return features

    def _columns(self, record: Record) -> list[str]:
        """The columns that can hold the image or latent, and do."""
        taken = [column for name, column in self.column_mapping.items() if name != "image"]
        return [name for name in self._accepted if name not in taken and not is_empty(record.get(name))]

    @property
    def _accepted(self) -> tuple[str, ...]:
        mapped = self.column_mapping.get("image")
        return (mapped,) if mapped else _COLUMNS

    def _column(self, record: Record) -> str:
        columns = self._columns(record)
        if not columns:
            raise DataError(
                f"no image or latent in the record. {keys_found(record)} Accepted for it: {', '.join(self._accepted)}. "
                f"Give it a path, the bytes of a file or an array, or name another column with {MAPPING} = "
                "{image: COLUMN}."
            )
        return columns[0]

    def settle(self, store: Store) -> None:
        """Takes from the encoded training data what no single record tells: its shape, and the measured numbers.

        Exact, and the same on every rank: each sample's mean and variance were stored with it."""
        if not len(store):
            return
        images = store.flat("image")
        self._form = shape, is_latent = images.shape[1:], images.dtype == np.float32
        values = "as they are" if is_latent else "pixels from -1 to 1"
        values = values if self.vae is None else "by data.encode.vae"
        self._told = [f"{'latents' if is_latent else 'images'}: {by(shape)}, {values}"]
        if (stack := self.stack) is not None:
            how = "encoded in every step" if stack.is_live else f"states of {store.flat('text_states').shape[1]}"
            self._told.append(f"texts: at most {counted(stack.length, 'token')}, {how}")
            meant = "what the encoders make of an empty one" if stack.no_text == "encoded" else "zeros"
            self._told.append(f"no text: {meant}")
            self._empty = store.common
        if self.is_measured:
            means, variances = store.flat("moments").T
            # All samples are equally large.
            deviation = math.sqrt(variances.mean() + means.var())
            if self.scale == "measure" and not deviation:
                raise DataError(
                    f"data.encode.scale = measure: all values of data.train are {means[0]:g}, so there is no spread to "
                    "measure. Look at the data, or give a number."
                )
            mean = _rounded(means.mean()) if self.mean == "measure" else self.mean
            scale = _rounded(1 / deviation) if self.scale == "measure" else self.scale
            self._scaling = float(mean), float(scale)
            of = counted(len(store), "sample")
            self._told.append(f"scaling: mean = {mean!r}, scale = {scale!r} (measured over {of} of data.train)")

    def outside(self, records: Records) -> str:
        """A fingerprint of the files that records name: of their places, sizes and times; and of the VAE and text
        encoders, with every weight.

        Where the first record holds its image itself, all are taken to; a look into each would read all of them."""
        weights = list(fingerprints(self.vae, self.stack).values())
        paths = (self._path(records[index]) for index in range(len(records)))
        files = stamped(paths, place("", self.root).absolute())
        return "".join([*weights, *(map(digest, CODE) if weights else ()), files])

    def identity(self, store: Store) -> dict[str, str]:
        sources = hashlib.blake2b(store.flat("source").tobytes(), digest_size=16).hexdigest() if len(store) else ""
        weights = {f"content of data.encode.{n}": found for n, found in fingerprints(self.vae, self.stack).items()}
        return {"content of the images of data.train": sources, **weights}

    def _path(self, record: Record) -> str | None:
        """The file that a record names."""
        try:
            value = next((_value(record[column], column) for column in self._columns(record)), None)
        except DataError:
            return None  # told with its place when it is encoded
        return value if isinstance(value, str) else None

    def notes(self, processor: Any) -> list[str]:
        return list(self._told)

    def reads(self, record: Record) -> list[str]:
        text = captions.column_of(record, None) if self.text else None
        found = {"image": self._column(record), **({"text": text} if text else {})}
        said = [f"{name} from {column}" for name, column in found.items() if name not in (column, *self.column_mapping)]
        return [f"columns: {'; '.join(said)} (by the keys of the first record)"] if said else []

    def augment(self, batch: dict[str, Any], draws: np.ndarray) -> dict[str, Any]:
        """Flips the images whose draw says so."""
        if not self.flip:
            return batch
        import torch

        from fullshard.families.diffusion.keyed_noise import FLIP, uniform

        flipped = uniform(torch.tensor(draws), FLIP) < 0.5
        images = batch["images"]
        return {**batch, "images": torch.where(flipped[:, None, None, None], images.flip(-1), images)}

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """`images` fp32 (B, C, H, W), scaled, `label` int64 (B,), -1 for none, and texts where data.encode.text is."""
        import torch

        shapes = [sample["image"].shape[1:] for sample in samples]
        wanted = self._form[0] if self._form else shapes[0]
        for shape in shapes:
            # Where the validation data was encoded in another run, beside other training data.
            if shape != wanted:
                raise DataError(
                    f"a sample of {by(shape)} (channels x height x width) cannot be in one run with others of "
                    f"{by(wanted)}. Give data.train and data.validation one shape."
                )
        mean, scale = self.scaling
        images = floats(np.concatenate([sample["image"] for sample in samples]))
        if (mean, scale) != (0.0, 1.0):
            images = (images - np.float32(mean)) * np.float32(scale)
        labels = np.concatenate([sample["label"] for sample in samples])
        texts: dict[str, Any] = {}
        if (stack := self.stack) is not None:
            texts = captions.collate(samples, length=stack.length)
            texts |= captions.collate_empty(self._empty, length=stack.length)
        return {"images": torch.from_numpy(images), "label": torch.from_numpy(labels), **texts}


def _value(value: Any, column: str) -> Any:
    """What a column holds: a path as str, bytes, an image or an array."""
    if isinstance(value, (np.ndarray, list)):
        return value
    found = given(str(value) if isinstance(value, os.PathLike) else value, column)
    return found.value if found else None


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


__all__ = ["Images"]
