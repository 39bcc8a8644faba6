"""Samples of tokens and images: what is stored of each, and their micro-batches.

A sample keeps its images as paths or bytes; they are decoded and made into pixels for each micro-batch, by the loader's
workers. Must not know conversations, files of records or ranks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.contracts.data import IGNORE, Collator, Encoder, Features, Quantity, Store
from fullshard.errors import DataError
from fullshard.formatting.plural import counted
from fullshard.images.reading import Picture, read_again
from fullshard.multimodal.combine import combine
from fullshard.multimodal.media_chat import TooLong
from fullshard.text.tokens import collate_tokens

MEDIA = "media."
"""The prefix of a batch's keys that go to the model as they are."""
ORIGIN = "fullshard: origin"
"""The text in a PNG that says where its picture is from."""


def image_sample(tokens: Features, pictures: Sequence[Picture], processor: Any, *, length: int) -> Features:
    """The features of one sample: its tokens, cut to `length` after the last image, and its images."""
    ids = tokens["input_ids"]
    places = np.flatnonzero(ids == processor.image_token_id)
    if len(places) and places[-1] >= length:
        raise TooLong(
            f"{counted(len(pictures), 'image')} and the text before the last of them take "
            f"{counted(int(places[-1]) + 1, 'token')}, but data.sequence_length = {length:,}. Raise it, give fewer or "
            "smaller images (model.max_pixels), or set data.encode.too_long = skip to leave such records out."
        )
    positions = processor.positions(ids, [picture.size for picture in pictures])
    kept = {"input_ids": ids[:length], "labels": tokens["labels"][:length], "mrope": positions[:length]}
    if "token_type_ids" in tokens:
        kept["token_type_ids"] = tokens["token_type_ids"][:length]
    elif processor.takes_suffix:
        raise DataError(
            f"{type(processor.whole).__name__} takes one question and one answer. Set data.encode.kind: image_chat, or "
            "use another model."
        )
    elif processor.takes_types:
        kept["token_type_ids"] = (ids == processor.image_token_id).astype(np.int8)[:length]
    return {
        **kept,
        "image_tokens": np.array([len(places)], dtype=np.int32),
        "image_counts": np.array([len(pictures)], dtype=np.int32),
        "image_sizes": np.array([len(picture.data) for picture in pictures], dtype=np.int64),
        "image_files": np.array([picture.is_file for picture in pictures], dtype=bool),
        "image_data": np.frombuffer(b"".join(picture.data for picture in pictures), dtype=np.uint8),
    }


def image_quantities(store: Store) -> list[Quantity]:
    """Samples, images, and the tokens of images, by which the cost of the towers is reckoned."""
    return [
        Quantity("samples", "smp", np.ones(len(store))),
        Quantity("images", "img", store.sizes("image_sizes")),
        Quantity("image_tokens", "", store.flat("image_tokens")),
    ]


class ImageCollator(Collator):
    """Pads tokens, and decodes and processes the images of each micro-batch."""

    media_feature: str | None = "image_sizes"

    def __init__(self, settings: Encoder, processor: Any, *, root: Path | None, length: int) -> None:
        super().__init__(settings)
        self._processor, self._root, self._length = processor, root, length

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        import torch

        batch = collate_tokens(samples, length=length)
        rows, width = batch["input_ids"].shape
        if samples[0]["mrope"].shape[1]:
            # Padding goes on counting, as in `position_ids`.
            positions = batch["position_ids"][..., None].repeat(1, 1, 3)
            for row, sample in enumerate(samples):
                positions[row, : len(sample["mrope"])] = torch.from_numpy(sample["mrope"].astype(np.int64))
            batch[f"{MEDIA}mrope"] = positions
        if "token_type_ids" in samples[0]:
            types = torch.full((rows, width), self._processor.text_type, dtype=torch.long)
            for row, sample in enumerate(samples):
                found = sample["token_type_ids"].astype(np.int64)
                types[row, : len(found)] = torch.from_numpy(found)
            batch[f"{MEDIA}token_type_ids"] = types
        images = [self._processor.features(found) for sample in samples for found in self._by_document(sample)]
        if images:
            batch |= {f"{MEDIA}{name}": value for name, value in combine(images, along=self._along).items()}
        return batch

    def blank(self, sample: Features) -> Features:
        # Without images: a rank with nothing but fillers must not run a tower that no other rank runs.
        return super().blank(self.without_media(sample))

    def touching(self, samples: Sequence[Features]) -> Sequence[Features]:
        """The samples; if no sample has an image, also a row with one that adds nothing to the loss."""
        return samples if any(sample["image_counts"].sum() for sample in samples) else [*samples, self._blank_image]

    def without_media(self, sample: Features) -> Features:
        text = sample["input_ids"] != self._processor.image_token_id
        text[-1] |= not text.any()  # a row has at least one token
        size = len(text)
        kept = {name: array[text] if len(array) == size else array for name, array in sample.items()}
        none = {name: sample[name][:0] for name in ("image_sizes", "image_files", "image_data")}
        none |= {name: np.zeros(1, dtype=np.int32) for name in ("image_counts", "image_tokens")}
        kept["labels"] = np.where(kept["labels"] == self._processor.image_token_id, IGNORE, kept["labels"])
        kept["mrope"] = np.repeat(np.arange(len(kept["input_ids"]), dtype=np.int32)[:, None], kept["mrope"].shape[1], 1)
        return {**kept, **none}

    @cached_property
    def _along(self) -> dict[str, int]:
        """Along which dimension images are joined: a processor that puts a sample's images behind a dimension of one
        joins them along the next."""
        from PIL import Image

        two = self._processor.features([Image.new("RGB", (32, 32))] * 2)
        return {name: 1 for name, value in two.items() if value.ndim > 3 and len(value) == 1}

    @cached_property
    def _blank_image(self) -> Features:
        """A sample with the smallest image, of which nothing is learned."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (32, 32)).save(file, format="PNG")
        picture = Picture(file.getvalue(), False, 0, (32, 32))
        text = self._processor.image_texts([picture.size])[0]
        ids = np.array(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        labels = np.full(len(ids), IGNORE, dtype=np.int32)
        tokens: Features = {"input_ids": ids, "labels": labels}
        if self._processor.takes_suffix:
            tokens["token_type_ids"] = np.zeros(len(ids), dtype=np.int8)
        return image_sample(tokens, [picture], self._processor, length=self._length)

    def _by_document(self, sample: Features) -> list[list[Any]]:
        """The decoded images of each document in a row that has some."""
        read = [read_again(one, is_file=is_file, root=self._root)[2] for one, is_file in stored_images(sample)]
        found, at = [], 0
        for count in map(int, sample["image_counts"]):
            found.append([image.convert("RGB") for image in read[at : at + count]])
            at += count
        return [images for images in found if images]


def stored_images(sample: Features) -> list[tuple[bytes, bool]]:
    """The images of a sample: a path or the bytes of a file, and whether it is a path."""
    ends = np.cumsum(sample["image_sizes"])
    data = [
        sample["image_data"][end - size : end].tobytes() for end, size in zip(ends, sample["image_sizes"], strict=True)
    ]
    return list(zip(data, map(bool, sample["image_files"]), strict=True))


def image_spans(ids: np.ndarray, sizes: Sequence[tuple[int, int]], processor: Any) -> list[tuple[int, int]]:
    """The first token of each image, and the token after its last; sizes are (width, height). Raises if the image
    tokens are not those that the model expects for such images."""
    texts = processor.image_texts(sizes) if sizes else []
    image, tokenizer = processor.image_token_id, processor.tokenizer
    expected = [np.flatnonzero(np.array(tokenizer(t, add_special_tokens=False)["input_ids"]) == image) for t in texts]
    places, total = np.flatnonzero(ids == image), sum(map(len, expected))
    again = "Tokenise again with the processor of this model, or give the images that belong to the tokens."
    if len(places) != total:
        raise DataError(
            f"'input_ids' has {counted(len(places), 'image token')}, but the model needs {total:,} for "
            f"{counted(len(sizes), 'image')}. {again}"
        )
    found, at = list[tuple[int, int]](), 0
    for number, (offsets, (width, height)) in enumerate(zip(expected, sizes, strict=True)):
        mine = places[at : at + len(offsets)]
        if (mine - mine[0] != offsets - offsets[0]).any():
            raise DataError(
                f"'input_ids' does not have the image tokens of images[{number}] ({width}x{height}) together. {again}"
            )
        found.append((int(mine[0]), int(mine[-1]) + 1))
        at += len(offsets)
    return found


def image_passages(sample: Features, processor: Any, *, root: Path | None, noun: str) -> list[tuple[str, int, int]]:
    """Each image of a sample for a person to read: `[image 64x48 from cat.png]`, its first token and the token after
    its last."""
    stored = stored_images(sample)
    images = [read_again(data, is_file=is_file, root=root)[2] for data, is_file in stored]
    spans = image_spans(sample["input_ids"], [image.size for image in images], processor)
    found = []
    for (data, is_file), image, span in zip(stored, images, spans, strict=True):
        content = f"{counted(len(data), 'byte')} in the record"
        origin = data.decode() if is_file else image.info.get(ORIGIN, content)
        found.append((f"[{noun} {image.width}x{image.height} from {origin}]", *span))
    return found


__all__ = [
    "MEDIA",
    "ORIGIN",
    "ImageCollator",
    "image_passages",
    "image_quantities",
    "image_sample",
    "image_spans",
    "stored_images",
]
