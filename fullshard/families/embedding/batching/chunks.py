"""The texts of one step, and the chunks that go through the model together; a text may contain images.

Lengths stay on the host, where the loader leaves them. Must not know losses or ranks.
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
    """All texts of a rank's micro-batches, sample by sample: query, positive, negatives."""

    tokens: torch.Tensor
    lengths: np.ndarray
    """(texts)"""
    per_sample: np.ndarray
    """(samples): texts per sample."""
    per_batch: list[int]
    """Texts per micro-batch."""
    keys: torch.Tensor
    """(texts)"""
    labels: torch.Tensor
    """(samples)"""
    real: torch.Tensor
    """(samples)"""
    images: np.ndarray | None = None
    """(texts): images per text; None if the model takes no images."""
    pixels: Sequence[torch.Tensor] = ()
    """Patches of each image, on the host until their chunk runs."""
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
        """(samples): the index of each query among the texts."""
        return np.asarray(np.cumsum(self.per_sample) - self.per_sample)


@dataclass(frozen=True)
class Images:
    """How a model takes images."""

    token: int
    """The token that patches replace."""
    merge: int
    """Side length, in patches, of the square that becomes one token."""
    numbers: int
    """Values per patch."""


@dataclass(frozen=True)
class Chunk:
    """Some texts, by their places among all; `filler`: only to keep step with other ranks."""

    texts: np.ndarray
    filler: bool = False
    sees: bool = False
    """The part of the model that sees images runs, here or on another rank, and so on all of them."""


def cut(texts: Texts, *, size: int | None, tokens: int | None) -> list[Chunk]:
    """Chunks of texts of similar length, with at most `size` texts or `tokens` tokens, those with images first; without
    either limit, the micro-batches."""
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
    """`count` chunks, as many as on the rank that has most: the last text is run again, and its result ignored."""
    return chunks + [Chunk(chunks[-1].texts[-1:], filler=True)] * (count - len(chunks))


def have_images(texts: Texts, chunks: Sequence[Chunk]) -> list[bool]:
    """Which chunks have images."""
    images = texts.images if texts.images is not None else np.zeros_like(texts.lengths)
    return [bool(images[chunk.texts].any()) for chunk in chunks]


def see(chunks: Sequence[Chunk], seen: Sequence[bool]) -> list[Chunk]:
    """The chunks as all ranks run them; `seen` says which have images on any rank."""
    # The backward pass of the first chunk comes last and reduces gradients: it must reach every parameter that any did.
    seen = [any(seen), *seen[1:]]
    return [replace(chunk, sees=here) for chunk, here in zip(chunks, seen, strict=True)]


def inputs(texts: Texts, chunk: Chunk, *, packed: bool, pad: int, images: Images | None = None) -> dict[str, Any]:
    """The arguments of `embed`, on the device. If other ranks have images and this one has none, a blank image is added
    as one more text."""
    lengths = texts.lengths[chunk.texts]
    starts = (np.cumsum(texts.lengths) - texts.lengths)[chunk.texts]
    tokens, [mine] = texts.tokens, have_images(texts, [chunk])
    if chunk.sees and not mine:
        assert images is not None
        lengths, starts = np.append(lengths, 1), np.append(starts, len(tokens))
        tokens = torch.cat([tokens, tokens.new_tensor([images.token])])
    layout = lay_out(lengths, packed=packed and not chunk.sees)
    token = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    index = on_device(np.where(layout.source == PADDING, PADDING, token[layout.source]), texts.device)
    real = index != PADDING
    found = {
        "input_ids": torch.where(real, tokens[index.clamp(min=0)], pad),
        "positions": on_device(layout.positions, texts.device),
        "real": real,
        "places": on_device(layout.places, texts.device),
        "lengths": on_device(lengths, texts.device),
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
    return {"pixels": upload(pixels, texts.device), "grids": on_device(grids, texts.device)}


def crowded(texts: Texts, *, most: int, images: Images | None = None) -> Texts:
    """Halves of the first `most` texts, and the longest of them whole: if texts have more than one token, some of these
    share a row. Image tokens are replaced by another token."""
    lengths, starts = texts.lengths[:most], (np.cumsum(texts.lengths) - texts.lengths)[:most]
    longest = int(lengths.argmax())
    lengths = np.append(np.maximum(lengths // 2, 1), lengths[longest])
    first = np.append(starts, starts[longest]) - (np.cumsum(lengths) - lengths)
    index = on_device(np.repeat(first, lengths) + np.arange(int(lengths.sum())), texts.device)
    tokens = texts.tokens[index]
    if images is not None:
        tokens = torch.where(tokens == images.token, texts.tokens[0], tokens)
    return replace(texts, tokens=tokens, lengths=lengths, images=None, pixels=(), grids=None)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device."""
    return upload(torch.from_numpy(np.ascontiguousarray(array)), device)


def by_text(vectors: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """(texts, longest, width) from the vectors of all tokens; zero beyond the end of a text."""
    text = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=len(vectors))
    within = torch.arange(len(vectors), device=lengths.device) - (lengths.cumsum(0) - lengths)[text]
    room = vectors.new_zeros(len(lengths) * longest, vectors.shape[-1])
    return room.index_copy(0, text * longest + within, vectors).view(len(lengths), longest, -1)
