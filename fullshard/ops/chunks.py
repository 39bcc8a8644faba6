"""The texts of one step, and the chunks of them that go through the model together.

Everything about lengths is done on the host, from numbers that the loader leaves there. Must not know losses or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fullshard.ops.document_bounds import document_bounds
from fullshard.ops.layout import PADDING, lay_out


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
        )

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def firsts(self) -> np.ndarray:
        """(samples): the place of each query among the texts."""
        return np.asarray(np.cumsum(self.per_sample) - self.per_sample)


@dataclass(frozen=True)
class Chunk:
    """Some texts, by their places among all; `filler`: only to keep step with other ranks."""

    texts: np.ndarray
    filler: bool = False


def cut(texts: Texts, *, size: int | None, tokens: int | None) -> list[Chunk]:
    """Texts of like length together, so many or so many tokens to a chunk; without either, the micro-batches."""
    if size is None and tokens is None:
        ends = np.cumsum(texts.per_batch)
        return [Chunk(np.arange(end - count, end)) for count, end in zip(texts.per_batch, ends, strict=True)]
    order = np.argsort(-texts.lengths, kind="stable")
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


def inputs(texts: Texts, chunk: Chunk, *, packed: bool, pad: int) -> dict[str, Any]:
    """What `embed` takes, on the device."""
    lengths = texts.lengths[chunk.texts]
    layout = lay_out(lengths, packed=packed)
    starts = (np.cumsum(texts.lengths) - texts.lengths)[chunk.texts]
    token = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    index = there(np.where(layout.source == PADDING, PADDING, token[layout.source]), texts.device)
    real = index != PADDING
    return {
        "input_ids": torch.where(real, texts.tokens[index.clamp(min=0)], pad),
        "positions": there(layout.positions, texts.device),
        "real": real,
        "places": there(layout.places, texts.device),
        "lengths": there(lengths, texts.device),
        "bounds": document_bounds(torch.from_numpy(layout.positions)).to(texts.device, non_blocking=True),
        "packed": packed,
    }


def crowded(texts: Texts, *, most: int) -> Texts:
    """The longest of the first `most` texts, and half of each of them: wherever texts have more than one token, some of
    these share a row."""
    lengths, starts = texts.lengths[:most], (np.cumsum(texts.lengths) - texts.lengths)[:most]
    longest = int(lengths.argmax())
    lengths = np.append(np.maximum(lengths // 2, 1), lengths[longest])
    first = np.append(starts, starts[longest]) - (np.cumsum(lengths) - lengths)
    index = there(np.repeat(first, lengths) + np.arange(int(lengths.sum())), texts.device)
    return replace(texts, tokens=texts.tokens[index], lengths=lengths)


def there(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def spread(vectors: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """(texts, longest, width) from the vectors of all tokens, text by text; zero where a text has ended."""
    text = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    within = torch.arange(len(vectors), device=lengths.device) - (lengths.cumsum(0) - lengths)[text]
    room = vectors.new_zeros(len(lengths) * longest, vectors.shape[-1])
    return room.index_copy(0, text * longest + within, vectors).view(len(lengths), longest, -1)
