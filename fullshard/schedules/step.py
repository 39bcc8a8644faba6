"""The learning rate drops by a factor at regular intervals."""

from __future__ import annotations

from pydantic import Field

from fullshard.contracts.schedule import Schedule
from fullshard.formatting.plural import counted


class Step(Schedule):
    """Multiplies the rate by `gamma` every `step_size` optimizer steps."""

    step_size: int = Field(100, ge=1)
    """Optimizer steps between two drops."""
    gamma: float = Field(0.5, gt=0, le=1)
    """The factor of each drop."""

    def never_falls(self, total: int | None) -> tuple[str, str] | None:
        if total is None or self.step_size < total:
            return None
        return (
            f"schedule.step_size = {self.step_size:,}, and the run has {counted(total, 'step')}: the learning rate "
            "never falls.",
            f"Use schedule.step_size = {max(total // 3, 1):,}, or schedule: constant.",
        )

    def after_warmup(self, step: int, total: int) -> float:
        return self.gamma ** (step // self.step_size)


__all__ = ["Step"]
