"""Advice to a run that waits for data. Must not know how time is measured, nor import torch."""

from __future__ import annotations

ADVICE_STEPS = 10
"""The advice about data wait needs this many measured steps."""


class DataWait:
    """The steps of a run since the last advice."""

    def __init__(self) -> None:
        self._heard = (0, 0.0, 0.0)
        """Measured steps since the last advice, their seconds, and the seconds of waiting for data."""
        self._windows_quiet: int | None = None

    def add(self, steps: int, *, seconds: float, waited: float) -> None:
        """Counts the steps of a window."""
        heard = self._heard
        self._heard = (heard[0] + steps, heard[1] + seconds, heard[2] + waited)

    def advice(self, *, workers: int | None = None, every: int = 50) -> str | None:
        """A line if data wait is above 5 % over at least `ADVICE_STEPS` measured steps, once per `every` windows."""
        if self._windows_quiet is not None:
            self._windows_quiet += 1
        steps, seconds, waited = self._heard
        if steps < ADVICE_STEPS:
            return None
        # Rounded as it is printed, so that the line never contradicts itself.
        share = round(waited / seconds, 3)
        self._heard = (0, 0.0, 0.0)
        if share <= 0.05 or (self._windows_quiet is not None and self._windows_quiet < every):
            return None
        self._windows_quiet = 0
        now = "" if workers is None else f" (now {workers})"
        return (
            f"{100 * share:.3g}% of the step time is spent waiting for data, more than 5%: the device is idle. "
            f"Raise data.workers{now}, or put the data on a faster disk."
        )


__all__ = ["ADVICE_STEPS", "DataWait"]
