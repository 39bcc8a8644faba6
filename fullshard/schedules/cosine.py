"""Cosine decay of the learning rate."""

from __future__ import annotations

import math

from fullshard.schedules.linear import Linear


class Cosine(Linear):
    """From the base learning rate to `floor` times that at the end of the run."""

    def after_warmup(self, step: int, total: int) -> float:
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * min(step / total, 1.0)))


__all__ = ["Cosine"]
