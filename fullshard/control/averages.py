"""Sums and counts of the loss and each metric: summed over all ranks and added to the run's progress.

Must not know when they are read, nor what the names mean.
"""

from __future__ import annotations

import torch

from fullshard.contracts.progress import Progress
from fullshard.dist import reduce


def flush(pending: dict[str, torch.Tensor], progress: Progress) -> None:
    """Adds sums that are still on the device to those of the epoch and those not logged yet; the host waits here."""
    names = sorted(pending)
    if not names:
        return
    pairs = reduce.sum_over_ranks(torch.stack([pending[name] for name in names])).tolist()
    pending.clear()
    for name, (total, count) in zip(names, pairs, strict=True):
        for sums in (progress.epoch_sums, progress.unlogged):
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + total, before[1] + count]


def average(pair: list[float]) -> float:
    return pair[0] / max(pair[1], 1)
