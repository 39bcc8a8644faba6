"""A constant learning rate."""

from __future__ import annotations

from fullshard.contracts.schedule import Schedule


class Constant(Schedule):
    """A constant rate after warm-up."""

    def after_warmup(self, step: int, total: int) -> float:
        return 1.0


__all__ = ["Constant"]
