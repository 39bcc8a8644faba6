"""Joins the media tensors of several samples into one batch. Must not know what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def combine(samples: Sequence[Mapping[str, Any]], *, along: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Concatenates each tensor along its dimension in `along`; the other dimensions are padded with zeros."""
    import torch

    names = list(dict.fromkeys(name for sample in samples for name in sample))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = [torch.as_tensor(sample[name]) for sample in samples if name in sample]
        dim = along.get(name, 0)
        sizes = [max(t.shape[d] for t in tensors) for d in range(tensors[0].ndim)]
        found[name] = torch.cat([_padded(t, sizes, keep=dim) for t in tensors], dim=dim)
    return found


def _padded(tensor: torch.Tensor, sizes: Sequence[int], *, keep: int) -> torch.Tensor:
    wanted = [tensor.shape[d] if d == keep else size for d, size in enumerate(sizes)]
    if list(tensor.shape) == wanted:
        return tensor
    whole = tensor.new_zeros(wanted)
    whole[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return whole


__all__ = ["combine"]
