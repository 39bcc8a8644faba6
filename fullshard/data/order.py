"""The global order of samples, and each rank's share of one step: pure functions.

The order depends on (seed, epoch) alone, so a run can stop anywhere and go on with any number of ranks.
Must not know what a sample holds.
"""

from __future__ import annotations

import numpy as np

FILLER = -1
"""The index of a place in a micro-batch that no sample is left for."""


HOLDOUT, MIXTURE = 2**63, 2**63 + 1
"""Streams of draws beside the epochs, which are numbered from 0."""


def generator(seed: int, *, stream: int) -> np.random.Generator:
    """Randomness that depends on its two numbers alone."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))


def permutation(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The sample indices of one epoch, in order."""
    if not shuffle:
        return np.arange(num_samples)
    return generator(seed, stream=epoch).permutation(num_samples)


def rank_slices(window: np.ndarray, *, per_device: int, rank: int, world: int) -> list[np.ndarray]:
    """This rank's micro-batches of one step.

    Every rank gets the same number of micro-batches, and every micro-batch `per_device` places, so that shapes never
    change; neighbours in the window go to neighbouring ranks, which shares a partial window out evenly.
    """
    size = per_device * world
    num_batches = -(-len(window) // size)
    places = np.full(num_batches * size, FILLER, dtype=np.int64)
    places[: len(window)] = window
    return list(places.reshape(num_batches, per_device, world)[:, :, rank])
