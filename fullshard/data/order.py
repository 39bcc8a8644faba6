"""The global order of samples, and each rank's share of a step: pure functions.

The order depends on (seed, epoch) alone, so a run can stop anywhere and resume with any number of ranks. Must not know
what a sample holds.
"""

from __future__ import annotations

import numpy as np

FILLER = -1
"""The index of a place in a micro-batch that has no sample."""

HOLDOUT, MIXTURE, FIXED = 2**63, 2**63 + 1, 2**63 + 2
"""Random streams besides those of the epochs, which are numbered from 0."""


def generator(seed: int, *, stream: int) -> np.random.Generator:
    """A generator that depends only on these two numbers."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))


def permutation(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
    """The sample indices of one epoch, in order."""
    if not shuffle:
        return np.arange(num_samples)
    return generator(seed, stream=epoch).permutation(num_samples)


def draws(samples: np.ndarray, *, seed: int, stream: int) -> np.ndarray:
    """A random key (int64) for each sample, from seed, stream and sample alone. The hash, splitmix64, is bijective."""
    base = generator(seed, stream=stream).integers(2**64, dtype=np.uint64)
    mixed = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + base
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


def micro_batches(window: np.ndarray, *, per_device: int, world: int) -> np.ndarray:
    """(micro-batches, places, ranks): the rows of one step.

    Every rank gets the same number of micro-batches, each with `per_device` places, so shapes never change. Neighbours
    in the window go to neighbouring ranks, which divides a partial window evenly.
    """
    size = per_device * world
    num_batches = -(-len(window) // size)
    places = np.full(num_batches * size, FILLER, dtype=np.int64)
    places[: len(window)] = window
    return places.reshape(num_batches, per_device, world)


def rank_slices(window: np.ndarray, *, per_device: int, rank: int, world: int) -> list[np.ndarray]:
    """This rank's micro-batches of one step."""
    return list(micro_batches(window, per_device=per_device, world=world)[:, :, rank])
