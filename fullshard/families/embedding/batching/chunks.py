"""The texts of one step, and the chunks of them that go through the model together; a text may have an image in it.

Everything about lengths is done on the host, from numbers that the loader leaves there. Must not know losses or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fullshard.dist.upload import upload
from fullshard.families.embedding.batching.row_layout import PADDING, lay_out
from fullshard.text.document_bounds import document_bounds


@dataclass(frozen=True)
class Texts:
    """All texts of a rank's micro-batches; sample by sample: query, positive, negatives."""

    tokens: torch.Tensor
    lengths: np.ndarray
    """(texts)"""
    per_sample: np.ndarray
    """(samples): texts of each."""
    per_batch: list[int]
    """Texts of each micro-batch."""
    keys: torch.Tensor
    """(texts)"""
    labels: torch.Tensor
    """(samples)"""
    real: torch.Tensor
    """(samples)"""
    images: np.ndarray | None = None
    """(texts): images of each; None where the model takes none."""
    pixels: Sequence[torch.Tensor] = ()
    """Patches of each image, on the host: a chunk takes its own along."""
    grids: np.ndarray | None = None
    """(images, 3)"""

    @staticmethod
    def of(batches: Sequence[dict[str, Any]]) -> Texts:
        def joined(name: str) -> Any:
            return torch.cat([batch[name] for batch in batches])

        return Texts(
            tokens=joined("tokens"),
            lengths=np.concatenate([batch["lengths"] for batch in batches]),
            per_sample=np.concatenate([batch["texts"] for batch in batches]),
            per_batch=[int(batch["texts"].sum()) for batch in batches],
            keys=joined("keys"),
            labels=joined("label"),
            real=joined("sample_ids") >= 0,
            images=np.concatenate([batch["images"] for batch in batches]) if "images" in batches[0] else None,
            pixels=[pixels for batch in batches for pixels in batch.get("pixels", ())],
            grids=np.concatenate([batch["grids"] for batch in batches]) if "grids" in batches[0] else None,
        )

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def firsts(self) -> np.ndarray:
        """(samples): the place of each query among the texts."""
        return np.asarray(np.cumsum(self.per_sample) - self.per_sample)


@dataclass(frozen=True)
class Images:
    """What a model takes of images."""

    token: int
    """The token whose places the patches take."""
    merge: int
    """Patches to a side of the square that becomes one token."""
    numbers: int
    """Of one patch."""


@dataclass(frozen=True)
class Chunk:
    """Some texts, by their places among all; `filler`: only to keep step with other ranks."""

    texts: np.ndarray
    filler: bool = False
    sees: bool = False
    """The part of the model that sees images runs, here or on another rank, and so on all of them."""


def cut(texts: Texts, *, size: int | None, tokens: int | None) -> list[Chunk]:
    """Texts of like length together, so many or so many tokens to a chunk, those with images first; without either
    number, the micro-batches."""
    if size is None and tokens is None:
        ends = np.cumsum(texts.per_batch)
        return [Chunk(np.arange(end - count, end)) for count, end in zip(texts.per_batch, ends, strict=True)]
    order = np.argsort(-texts.lengths, kind="stable")
    if texts.images is None:
        return _cut(texts, order, size=size, tokens=tokens)
    kinds = [order[texts.images[order] > 0], order[texts.images[order] == 0]]
    return [chunk for kind in kinds if len(kind) for chunk in _cut(texts, kind, size=size, tokens=tokens)]


def _cut(texts: Texts, order: np.ndarray, *, size: int | None, tokens: int | None) -> list[Chunk]:
    if size is not None:
        return [Chunk(order[start : start + size]) for start in range(0, len(order), size)]
    assert tokens is not None
    chunks, start = [], 0
    for at, total in enumerate(np.cumsum(texts.lengths[order])):
        before = int(texts.lengths[order[:start]].sum())
        if at > start and total - before > tokens:
            chunks.append(Chunk(order[start:at]))
            start = at
    return [*chunks, Chunk(order[start:])]


def fill_up(chunks: list[Chunk], count: int) -> list[Chunk]:
    """As many chunks as the rank that has most: the others run a text once more, and forget it."""
    return chunks + [Chunk(chunks[-1].texts[-1:], filler=True)] * (count - len(chunks))


def have_images(texts: Texts, chunks: Sequence[Chunk]) -> list[bool]:
    """Which chunks bring images."""
    images = texts.images if texts.images is not None else np.zeros_like(texts.lengths)
    return [bool(images[chunk.texts].any()) for chunk in chunks]


def see(chunks: Sequence[Chunk], seen: Sequence[bool]) -> list[Chunk]:
    """The chunks as all ranks run them, where `seen` says which of them bring images on any rank."""
    # The first, whose backward pass comes last and has ranks exchange gradients, must reach all that any has reached.
    seen = [any(seen), *seen[1:]]
    return [replace(chunk, sees=here) for chunk, here in zip(chunks, seen, strict=True)]


def inputs(texts: Texts, chunk: Chunk, *, packed: bool, pad: int, images: Images | None = None) -> dict[str, Any]:
    """What `embed` takes, on the device. Where images are seen and this rank has none, a text more: a blank image."""
    lengths = texts.lengths[chunk.texts]
    starts = (np.cumsum(texts.lengths) - texts.lengths)[chunk.texts]
    tokens, [mine] = texts.tokens, have_images(texts, [chunk])
    if chunk.sees and not mine:
        assert images is not None
        lengths, starts = np.append(lengths, 1), np.append(starts, len(tokens))
        tokens = torch.cat([tokens, tokens.new_tensor([images.token])])
    layout = lay_out(lengths, packed=packed and not chunk.sees)
    token = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    index = there(np.where(layout.source == PADDING, PADDING, token[layout.source]), texts.device)
    real = index != PADDING
    found = {
        "input_ids": torch.where(real, tokens[index.clamp(min=0)], pad),
        "positions": there(layout.positions, texts.device),
        "real": real,
        "places": there(layout.places, texts.device),
        "lengths": there(lengths, texts.device),
        "bounds": upload(document_bounds(torch.from_numpy(layout.positions)), texts.device),
        "packed": packed and not chunk.sees,
    }
    return {**found, **_image_inputs(texts, chunk, images)} if chunk.sees and images is not None else found


def _image_inputs(texts: Texts, chunk: Chunk, images: Images) -> dict[str, torch.Tensor]:
    assert texts.images is not None
    assert texts.grids is not None
    firsts, counts = np.cumsum(texts.images) - texts.images, texts.images[chunk.texts]
    chosen = [first + at for first, count in zip(firsts[chunk.texts], counts, strict=True) for at in range(count)]
    pixels = torch.zeros(images.merge**2, images.numbers)
    grids = np.array([[1, images.merge, images.merge]])
    if chosen:
        pixels, grids = torch.cat([texts.pixels[image] for image in chosen]), texts.grids[chosen]
    return {"pixels": upload(pixels, texts.device), "grids": there(grids, texts.device)}


def crowded(texts: Texts, *, most: int, images: Images | None = None) -> Texts:
    """The longest of the first `most` texts, and half of each of them: wherever texts have more than one token, some of
    these share a row. Without images, whose places another token takes."""
    lengths, starts = texts.lengths[:most], (np.cumsum(texts.lengths) - texts.lengths)[:most]
    longest = int(lengths.argmax())
    lengths = np.append(np.maximum(lengths // 2, 1), lengths[longest])
    first = np.append(starts, starts[longest]) - (np.cumsum(lengths) - lengths)
    index = there(np.repeat(first, lengths) + np.arange(int(lengths.sum())), texts.device)
    tokens = texts.tokens[index]
    if images is not None:
        tokens = torch.where(tokens == images.token, texts.tokens[0], tokens)
    return replace(texts, tokens=tokens, lengths=lengths, images=None, pixels=(), grids=None)


def there(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device."""
    return upload(torch.from_numpy(np.ascontiguousarray(array)), device)


def spread(vectors: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """(texts, longest, width) from the vectors of all tokens, text by text; zero where a text has ended."""
    text = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=len(vectors))
    within = torch.arange(len(vectors), device=lengths.device) - (lengths.cumsum(0) - lengths)[text]
    room = vectors.new_zeros(len(lengths) * longest, vectors.shape[-1])
    return room.index_copy(0, text * longest + within, vectors).view(len(lengths), longest, -1)
