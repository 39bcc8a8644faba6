"""The learning rate falls on a straight line."""

from __future__ import annotations

from fullshard.schedules.base import Schedule


class Linear(Schedule):
    """From the base rate to `floor` of it at the end of the run."""

    floor: float = 0.0
    """The factor at the end."""

    def after_warmup(self, step: int, total: int) -> float:
        return 1.0 - (1.0 - self.floor) * min(step / total, 1.0)


__all__ = ["Linear"]
