"""What a run does if a rank runs out of memory in mid-run: stop (the default), or go on with smaller micro-batches.

The rows of a step stay the same, so the mathematics do. Every rank comes to the same decision. Must not know models,
recipes or files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch

from fullshard.contracts.progress import Progress
from fullshard.faults import micro_batch
from fullshard.faults.judge import Verdict, skips_on_device, update
from fullshard.faults.micro_batch import Size
from fullshard.faults.replay import Passes, Together, free
from fullshard.formatting.plural import counted

T = TypeVar("T")
Windows = Callable[[int, Collection[int]], Iterator[Any]]
"""The micro-batches of each step, from a step on, without windows that are left out."""


@dataclass
class TooLarge(Exception):  # noqa: N818
    """Asks for the step again, in smaller micro-batches; every rank raises it in the same step."""

    rank: int
    """That ran out of memory."""


@dataclass
class Stop:
    """The run ends with the error, and its explanation."""

    together: Together | None = None
    """Passes of all ranks, if something is tried."""

    def step(self, act: Callable[[], T]) -> T:
        """Runs one step."""
        return act()

    def passes(self, passes: Passes, batches: Sequence[Any]) -> list[Any]:
        """Runs the forward and backward passes of a step."""
        return passes(batches)

    def update(self, act: Callable[[], T], optimizer: torch.optim.Optimizer) -> T:
        """Runs the optimizer's update."""
        return act()

    def windows(self, loader: Callable[[int], Any], size: int) -> Windows:
        """The steps of the run; `loader` gives that of the training data, and others, for a number of rows."""
        found: Windows = loader(size)[0].windows
        return found


@dataclass(kw_only=True)
class Split(Stop):
    """The step is repeated in smaller micro-batches on all ranks, and so is every later one."""

    together: Together
    progress: Progress
    asked: Size
    """`batch.per_device` of the recipe."""
    share: int
    """Rows of one rank in a step."""
    warn: Callable[[str], None]
    event: Callable[..., None]
    """Writes an event to metrics.jsonl."""
    size: int = field(default=0, init=False)
    """Rows in a micro-batch."""
    _open: Callable[[int], Any] = field(default=lambda size: None, init=False)
    _loader: Any = field(default=None, init=False)
    _at: tuple[int, Collection[int]] = field(default=(0, ()), init=False)
    """The step to run, and the windows of data that are left out."""
    _repeat: bool = field(default=False, init=False)
    _prepared: bool = field(default=False, init=False)

    def windows(self, loader: Callable[[int], Any], size: int) -> Windows:
        self.size, self._open, self._loader = size, loader, loader(size)[0]
        return self._windows

    def _windows(self, start: int, left_out: Collection[int]) -> Iterator[Any]:
        if self.size != self.asked:  # also after a rollback, which goes back to what a checkpoint remembers
            micro_batch.remember(self.progress.guard, self.size, asked=self.asked)
        stream = self._loader.windows(start, left_out)
        while True:
            self._at = (start, left_out)
            yield next(stream)
            if self._repeat:
                self._repeat, stream = False, self._loader.windows(start, left_out)
            else:
                start += 1

    def step(self, act: Callable[[], T]) -> T:
        while True:
            try:
                return act()
            except TooLarge as too_large:
                self._split(too_large.rank)

    def passes(self, passes: Passes, batches: Sequence[Any]) -> list[Any]:
        found, rank = self.together.run(passes, batches, lambda: self._tiny(len(batches)), last=self.size == 1)
        if rank:
            raise TooLarge(rank - 1)
        return found

    def _tiny(self, count: int) -> list[Any]:
        """The micro-batches of this step, each with its first row alone; it runs the same towers."""
        turns = islice(self._loader.turns(*self._at), count)
        return [self._loader.batch_of(places[:1], media) for _, places, media in turns]

    def _split(self, rank: int) -> None:
        before, self.size = self.size, micro_batch.at_most(self.share, self.size // 2)
        self._repeat, self._loader = True, self._open(self.size)[0]
        micro_batch.remember(self.progress.guard, self.size, asked=self.asked)
        step = self.progress.step + 1
        self.event("out_of_memory", self.progress.step, rank=rank, per_device=self.size, before=before)
        self.warn(
            f"Rank {rank} ran out of memory at step {step}. From this step on, a micro-batch has "
            f"{counted(self.size, 'row')} instead of {before}, and a rank adds up {self.share // self.size} of them. "
            "The rows of a step, and so the losses, stay the same."
        )

    def update(self, act: Callable[[], T], optimizer: torch.optim.Optimizer) -> T:
        """Its state is allocated by an update that changes nothing, and can therefore be repeated."""
        if not self._prepared:
            self._prepared = True
            try:
                allocate_state(optimizer)
            except torch.OutOfMemoryError:
                pass
            else:
                return _explained(act)
            free()
            _explained(lambda: allocate_state(optimizer))
        return _explained(act)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state, by an update that is left out on the device. Not for one that cannot leave
    out an update, nor for one whose update waits for other ranks."""
    if skips_on_device(optimizer) and not getattr(optimizer, "gathers", False):
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        nothing = torch.zeros((), device=device)
        update(optimizer, Verdict(nothing == 0, nothing, nothing))


def _explained(act: Callable[[], T]) -> T:
    try:
        return act()
    except torch.OutOfMemoryError as error:
        error.add_note(
            "This was in the optimizer's update, which needs as much memory with smaller micro-batches, and which is "
            "not repeated, since a part of it may be done. Use sharding.strategy: full, more ranks, optimizer.kind: "
            "adamw_8bit or sharding.cpu_offload: true, and resume from the last checkpoint."
        )
        raise


__all__ = ["Split", "Stop", "TooLarge", "allocate_state"]
