"""`batch.per_device: auto`: the largest micro-batch that fits, found by trial before step 1, the same on every rank.

A trial runs the longest rows of the data forward and backward on every rank and has the optimizer create its state;
afterwards weights, gradients, buffers and random numbers are as before. Must not know recipes, models or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fullshard.faults import micro_batch
from fullshard.faults.micro_batch import USUAL, Size
from fullshard.faults.out_of_memory import Stop, allocate_state
from fullshard.faults.replay import Passes, Together, free
from fullshard.faults.segments import give_back
from fullshard.formatting.plural import counted


@dataclass
class Tried(Exception):  # noqa: N818
    """A trial is over; every rank raises it."""

    rank: int
    """That ran out of memory, from 1; 0: none did."""


@dataclass(kw_only=True)
class Trying(Stop):
    """In place of what a run does if a rank runs out of memory: passes that are void in any case."""

    together: Together
    tiny: Any
    """A micro-batch of one row."""
    last: bool
    """There is no smaller one."""
    optimizer: torch.optim.Optimizer

    def passes(self, passes: Passes, batches: Sequence[Any]) -> list[Any]:
        tiny = [self.tiny] * len(batches)
        after = partial(allocate_state, self.optimizer)
        raise Tried(self.together.run(passes, batches, lambda: tiny, last=self.last, then=after)[1])


@dataclass(frozen=True)
class Trial:
    """The run as far as it is built."""

    learner: Any
    """What a step trains: its `optimizer`, `device` and `memory`."""
    train: Callable[..., Any]
    """One step."""
    load: Callable[[int], Any]
    """The loader of the training data, and others."""
    inputs: Any
    """The `data`, and the `plan` of the steps."""
    report: Any

    def in_force(self, asked: Size, guard: dict[str, Any]) -> int:
        """Rows in a micro-batch: what a checkpoint remembers, what the recipe says, or what a trial finds."""
        share = self.inputs.plan.global_size // self.inputs.plan.world
        found = micro_batch.remembered(guard, asked=asked, share=share)
        if found is None:
            found = self._largest(share) if asked == "auto" else asked
        give_back(self.learner.device)
        if found != asked:
            micro_batch.remember(guard, found, asked=asked)
        return found

    def _largest(self, share: int) -> int:
        """The largest micro-batch that fits and divides a rank's share of a step. On a CPU at most the usual one."""
        device: torch.device = self.learner.device
        on_gpu = device.type == "cuda"
        sizes = micro_batch.sizes(share, None if on_gpu else min(USUAL, share))
        tried: dict[int, bool] = {}

        def fits(size: int) -> bool:
            tried[size] = self._fits(size, passes=min(share // size, 2))
            return tried[size]

        with torch.random.fork_rng([device] if on_gpu else []):
            found = bisect(sizes, fits, first=first_guess(sizes, on_gpu=on_gpu))
        free()
        too_large = min((size for size, fitted in tried.items() if not fitted), default=None)
        others = "all rows that a rank has in a step" if on_gpu else f"at most {USUAL} on a CPU, if they fit"
        others = f"{too_large} do not fit" if too_large else others
        self.report.console.note(
            f"batch.per_device = auto is {counted(found, 'row')}: {others} ({counted(len(tried), 'trial')})."
        )
        return found

    def _fits(self, size: int, *, passes: int) -> bool:
        """Whether every rank can run such micro-batches; two of them, so that gradients of an earlier one are there."""
        batch_of, lengths = self.load(1)[0].batch_of, self.inputs.data.train.lengths
        trying = Trying(
            together=self.learner.memory.together,
            tiny=batch_of(longest(lengths, 1)),
            last=size == 1,
            optimizer=self.learner.optimizer,
        )
        try:
            self.train(replace(self.learner, memory=trying), [batch_of(longest(lengths, size))] * passes, lr_factor=0.0)
        except Tried as tried:
            return tried.rank == 0
        raise AssertionError


def first_guess(sizes: Sequence[int], *, on_gpu: bool) -> int:
    """The place in `sizes` to try first. A prediction of memory may enter here; a wrong one costs a few trials."""
    return len(sizes) // 2 if on_gpu else len(sizes) - 1


def bisect(sizes: Sequence[int], fits: Callable[[int], bool], *, first: int) -> int:
    """The largest of these sizes that fits. The smallest one fits, or `fits` raises."""
    low, high, at = 0, len(sizes), first
    while low < high:
        if fits(sizes[at]):
            low = at + 1
        else:
            high = at
        at = (low + high) // 2
    return sizes[low - 1]


def longest(lengths: np.ndarray, size: int) -> np.ndarray:
    """The indices of the longest rows, as many as a micro-batch has; -1 where there are no more."""
    found = np.argsort(-lengths, kind="stable")[:size]
    return np.concatenate([found, np.full(size - len(found), -1)]).astype(np.int64)


__all__ = ["Trial", "bisect", "first_guess", "longest"]
