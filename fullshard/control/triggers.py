"""When something is due, and when a save is near, so that the host memory for it is taken in time and not before.

The loop asks. Must not know what follows from the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SOON_STEPS = 3
"""Ranks read a flag one step later: with fewer steps to go, the save would come first."""
AHEAD_S, BYTES_PER_S = 30.0, 1e9
"""How long before a save its memory is taken at least, and how fast a slow host pins memory."""


@dataclass(frozen=True)
class Due:
    """When something happens: at intervals of steps, epochs or minutes, or never."""

    every_steps: int | None
    every_epochs: int | None
    every_minutes: float | None = None
    at_start: bool = False

    def after_step(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def after_epoch(self, epoch: int) -> bool:
        return self.every_epochs is not None and epoch % self.every_epochs == 0

    def after_seconds(self, seconds: float) -> bool:
        return self.every_minutes is not None and seconds >= 60 * self.every_minutes

    def steps_left(self, step: int, *, steps_per_epoch: int) -> int | None:
        """Steps until it is due again, by steps and epochs; None for never."""
        periods = [self.every_steps, self.every_epochs and self.every_epochs * steps_per_epoch]
        return min((period - step % period for period in periods if period), default=None)


@dataclass
class NextSave:
    """When the next save may come: by steps, the same on all ranks, and by the clock of rank 0."""

    due: Sequence[Due]
    """Saves, and validations that may find the best model yet."""
    at_end: bool
    steps_per_epoch: int
    total_steps: int
    num_bytes: int
    """Host memory that a save needs."""
    clock: Callable[[], float] = time.monotonic
    _asked: list[tuple[int, float]] = field(default_factory=list, init=False)
    """The first two steps after which `near` was called, and when; the very first step is slower than the others."""

    def soon(self, step: int) -> bool:
        """Whether a save may come within a few steps; the same on every rank."""
        left = self._steps_left(step)
        return left is not None and left <= SOON_STEPS

    def near(self, step: int, *, since_save_s: float) -> bool:
        """Whether a save may come before its memory could be taken, at the pace so far."""
        now, ahead = self.clock(), AHEAD_S + self.num_bytes / BYTES_PER_S
        if len(self._asked) < 2:
            self._asked.append((step, now))
        begun, at = self._asked[-1]
        left = self._steps_left(step)
        by_steps = left is not None and step > begun and left * (now - at) / (step - begun) <= ahead
        by_clock = any(due.after_seconds(since_save_s + ahead) for due in self.due)
        return self.soon(step) or by_steps or by_clock

    def _steps_left(self, step: int) -> int | None:
        left = [due.steps_left(step, steps_per_epoch=self.steps_per_epoch) for due in self.due]
        left += [self.total_steps - step] if self.at_end else []
        return min((steps for steps in left if steps is not None), default=None)
