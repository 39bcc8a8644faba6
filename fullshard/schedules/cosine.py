"""Cosine decay of the learning rate."""

from __future__ import annotations

import math

from pydantic import Field

from fullshard.contracts.schedule import FLOOR_IS_TOP, Schedule


class Cosine(Schedule):
    """From the base learning rate to `floor` times that at the end of the run."""

    floor: float = Field(0.0, ge=0, le=1)
    """The factor at the end."""

    def never_falls(self, total: int | None) -> tuple[str, str] | None:
        return FLOOR_IS_TOP if self.floor == 1 else None

    def after_warmup(self, step: int, total: int) -> float:
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * min(step / total, 1.0)))


__all__ = ["Cosine"]
