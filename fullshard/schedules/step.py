"""The learning rate falls by a factor every so many steps."""

from __future__ import annotations

from pydantic import Field

from fullshard.contracts.schedule import Schedule


class Step(Schedule):
    """Multiplies the rate by `gamma` every `step_size` optimizer steps."""

    step_size: int = Field(100, ge=1)
    """Optimizer steps between two falls."""
    gamma: float = Field(0.5, gt=0, le=1)
    """The factor of each fall."""

    def after_warmup(self, step: int, total: int) -> float:
        return self.gamma ** (step // self.step_size)


__all__ = ["Step"]
