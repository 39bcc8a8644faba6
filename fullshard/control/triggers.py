"""When something is due; the loop asks. Must not know what follows from the answer."""

from __future__ import annotations

from dataclasses import dataclass


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
