"""Where the documents of packed rows begin and end, as attention kernels take it.

Separate from those kernels, whose import loads torch's compiler: reading a recipe must not.
Must not know models, batches or ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BOUNDS_MULTIPLE = 16
"""Bounds are padded to a multiple of this many entries, so that compiled code sees few shapes; not more, because
the kernels start blocks for every entry."""


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Cumulative document lengths of the flattened rows, from positions that restart at 0 with each document.

    Padded with the total: documents of length 0, which the kernels skip."""
    import torch

    flat = position_ids.reshape(-1)
    starts = torch.nonzero(flat == 0).reshape(-1)
    padded = -(-(len(starts) + 1) // BOUNDS_MULTIPLE) * BOUNDS_MULTIPLE
    bounds = torch.full((padded,), len(flat), dtype=torch.int32)
    bounds[: len(starts)] = starts.to(torch.int32)
    return bounds
