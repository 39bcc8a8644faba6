"""What the image encoder does with its settings: reads records into samples, and makes micro-batches of them.

The frozen VAE and text encoders are open only while data is encoded. Must not know source files, ranks, noise or what
is predicted.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.contracts.data import Collator, Encoded, Features, OpenEncoder, Record, Records, Store
from fullshard.data.records import digest
from fullshard.errors import DataError
from fullshard.families.diffusion import captions
from fullshard.families.diffusion.file_stamps import stamped
from fullshard.families.diffusion.labels import label_of
from fullshard.families.diffusion.pipeline_parts import release_memory
from fullshard.families.diffusion.shape_words import RESIZE, by, in_words, remedy
from fullshard.families.diffusion.vae.latents import decode
from fullshard.families.diffusion.vae_at_encoding import CODE, FrozenVae, fingerprints
from fullshard.formatting.plural import counted
from fullshard.images.arrays import Picture, floats
from fullshard.images.reading import UNREADABLE, Unreadable, place, quiet

if TYPE_CHECKING:
    from fullshard.families.diffusion.encoders.image import Images

_MOST_THREADS = 8
_DIGITS = 9
"""Digits of measured numbers: the report shows exactly what is used, and it is equal on every kind of processor."""
Form = tuple[tuple[int, ...], bool]
"""The shape of a sample, and whether it is a latent."""


class OpenImages(OpenEncoder):
    """Reads images, and runs the frozen VAE and text encoders."""

    settings: Images

    def __init__(self, settings: Images, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        self._form: Form | None = None
        """Of data.train once it is encoded; until then of the first sample."""
        self._vae = None if settings.vae is None else FrozenVae(settings.vae)
        self._texts = settings.stack

    def encode(self, record: Record) -> Encoded:
        return self.encode_many([record])[0]

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        if not records:
            return []
        with quiet(), ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(records))) as pool:
            looked = list(pool.map(self._look, records))
        made = iter(self._samples([pair for pair in zip(records, looked, strict=True) if pair[1] is not None]))
        return [Encoded(dropped=[UNREADABLE]) if picture is None else next(made) for picture in looked]

    def _samples(self, found: Sequence[tuple[Record, Any]]) -> list[Encoded]:
        if not found:
            return []
        records, pictures = [record for record, _ in found], [picture for _, picture in found]
        mapping, classes = self.settings.column_mapping, self.settings.classes
        labels = [label_of(record, mapped=mapping.get("label"), classes=classes) for record in records]
        sources = [picture.fingerprint() for picture in pictures]
        written = [captions.caption(record, mapping.get("text")) for record in records if self._texts]
        # Last: a mistake in a record is found before a model runs.
        if self._vae is not None:
            pictures = self._vae.latents(pictures)
        texts = captions.features_of(written, self._texts) if self._texts else [({}, False)] * len(records)
        return [
            Encoded([{**self._features(picture, label, source), **text}], truncated=is_cut)
            for picture, label, source, (text, is_cut) in zip(pictures, labels, sources, texts, strict=True)
        ]

    def _look(self, record: Record) -> Picture | None:
        """None if the image cannot be read and the record is skipped."""
        try:
            return self.settings.read(record)
        except Unreadable:
            if self.settings.unreadable == "error":
                raise
            return None

    def _features(self, picture: Picture, label: int, source: int) -> Features:
        form = picture.values.shape, picture.is_latent
        self._form = self._form or form
        if form != self._form:
            raise DataError(
                f"{picture.name} is {in_words(*form)}, but the first sample is {in_words(*self._form)}, and all "
                f"need one shape. {remedy(form, self._form) if self.settings.vae is None else RESIZE}"
            )
        # With a leading axis, so that the store checks the shape and counts one entry per sample.
        features = {"image": picture.values[None], "label": np.array([label], dtype=np.int64)}
        features["source"] = np.array([source], dtype=np.int64)
        if self.settings.is_measured:
            values = floats(picture.values).astype(np.float64)
            features["moments"] = np.array([[values.mean(), values.var()]])
        return features

    def shared_features(self) -> Features:
        return captions.empty_features(self._texts) if self._texts is not None else {}

    def close(self) -> None:
        if self._vae is not None or self._texts is not None:
            self._vae = self._texts = None
            release_memory()

    def collator(self, store: Store) -> ImageCollator:
        found = ImageCollator(self.settings, store)
        self._form = found.form
        return found

    def external_fingerprint(self, records: Records) -> str:
        """The fingerprint of the files that records name, by path, size and time, and of all weights of the frozen
        models.

        If the first record contains its image, so do all others; checking each would read all of them."""
        weights = list(fingerprints(self.settings.vae, self.settings.stack).values())
        paths = (self.settings.path_of(records[index]) for index in range(len(records)))
        files = stamped(paths, place("", self.settings.root).absolute())
        return "".join([*weights, *(map(digest, CODE) if weights else ()), files])

    def identity(self, store: Store) -> dict[str, str]:
        sources = hashlib.blake2b(store.flat("source").tobytes(), digest_size=16).hexdigest() if len(store) else ""
        weights = fingerprints(self.settings.vae, self.settings.stack)
        return {
            "content of the images of data.train": sources,
            **{f"content of data.encode.{name}": found for name, found in weights.items()},
        }


class ImageCollator(Collator):
    """Scales images by the settings, or by what was measured over the training data.

    Every sample is stored with its mean and variance, so measured numbers are exact and equal on all ranks."""

    settings: Images

    def __init__(self, settings: Images, store: Store | None = None) -> None:
        """Without `store` it knows no shape, and nothing can be measured."""
        super().__init__(settings)
        self.form: Form | None = None
        self.scaling = _scaling(settings, store)
        """The mean and the scale in use: a batch holds (value - mean) * scale."""
        self._empty: Features = {}
        self._vae: Any = None
        self._keeps_vae = False
        if store is not None:
            images = store.flat("image")
            self.form = images.shape[1:], images.dtype == np.float32
            self._empty = store.shared
            self.notes = _notes(settings, store, self.form, self.scaling)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Channels, height and width of a sample, if the data is known."""
        return self.form[0] if self.form else None

    @property
    def gives_latents(self) -> bool:
        """Whether the data consists of latents and there is no VAE to decode them."""
        return self.settings.vae is None and self.form is not None and self.form[1]

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """`images` fp32 (B, C, H, W), scaled; `label` int64 (B,), -1 without one; texts with data.encode.text."""
        import torch

        wanted = self.shape or samples[0]["image"].shape[1:]
        for sample in samples:
            # Validation data may have been encoded in another run, with other training data.
            if (shape := sample["image"].shape[1:]) != wanted:
                raise DataError(
                    f"a sample of {by(shape)} (channels x height x width) cannot be in one run with samples of "
                    f"{by(wanted)}. Give data.train and data.validation one shape."
                )
        mean, scale = self.scaling
        images = floats(np.concatenate([sample["image"] for sample in samples]))
        if (mean, scale) != (0.0, 1.0):
            images = (images - np.float32(mean)) * np.float32(scale)
        labels = np.concatenate([sample["label"] for sample in samples])
        texts: dict[str, Any] = {}
        if (stack := self.settings.stack) is not None:
            texts = captions.collate(samples, length=stack.length)
            texts |= captions.collate_empty(self._empty, length=stack.length)
        return {"images": torch.from_numpy(images), "label": torch.from_numpy(labels), **texts}

    def augment(self, batch: dict[str, Any], draws: np.ndarray) -> dict[str, Any]:
        if not self.settings.flip:
            return batch
        import torch

        from fullshard.families.diffusion.keyed_noise import FLIP, uniform

        flipped = uniform(torch.tensor(draws), FLIP) < 0.5
        images = batch["images"]
        return {**batch, "images": torch.where(flipped[:, None, None, None], images.flip(-1), images)}

    @contextmanager
    def vae_kept_open(self) -> Iterator[None]:
        """Within it `decode` loads the VAE once; it is freed at the end."""
        self._keeps_vae = True
        try:
            yield
        finally:
            self._vae, self._keeps_vae = None, False
            release_memory()

    def decode(self, values: Any) -> Any:
        mean, scale = self.scaling
        values = values / scale + mean
        if self.settings.vae is None:
            return values
        vae = self._vae or self.settings.vae.open(values.device)
        self._vae = vae if self._keeps_vae else None
        return decode(vae, values)


def _scaling(settings: Images, store: Store | None) -> tuple[float, float]:
    if not settings.is_measured:
        return float(settings.mean), float(settings.scale)
    assert store is not None, "measured numbers need the encoded data"
    means, variances = store.flat("moments").T
    # All samples are equally large.
    deviation = math.sqrt(variances.mean() + means.var())
    if settings.scale == "measure" and not deviation:
        raise DataError(
            f"data.encode.scale = measure: all values of data.train are {means[0]:g}, so there is no spread to "
            "measure. Check the data, or give a number."
        )
    mean = _rounded(means.mean()) if settings.mean == "measure" else settings.mean
    scale = _rounded(1 / deviation) if settings.scale == "measure" else settings.scale
    return float(mean), float(scale)


def _notes(settings: Images, store: Store, form: Form, scaling: tuple[float, float]) -> list[str]:
    shape, is_latent = form
    values = "as they are" if is_latent else "pixels from -1 to 1"
    values = values if settings.vae is None else "by data.encode.vae"
    lines = [f"{'latents' if is_latent else 'images'}: {by(shape)}, {values}"]
    if (stack := settings.stack) is not None:
        how = "encoded in every step" if stack.is_live else f"states of {store.flat('text_states').shape[1]}"
        meant = "the encoders' output for an empty text" if stack.no_text == "encoded" else "zeros"
        lines += [f"texts: at most {counted(stack.length, 'token')}, {how}", f"no text: {meant}"]
    if settings.is_measured:
        of = counted(len(store), "sample")
        lines.append(f"scaling: mean = {scaling[0]!r}, scale = {scaling[1]!r} (measured over {of} of data.train)")
    return lines


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
