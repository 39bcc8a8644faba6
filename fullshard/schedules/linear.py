"""Linear decay of the learning rate."""

from __future__ import annotations

from pydantic import Field

from fullshard.contracts.schedule import FLOOR_IS_TOP, Schedule


class Linear(Schedule):
    """From the base learning rate to `floor` times that at the end of the run."""

    floor: float = Field(0.0, ge=0, le=1)
    """The factor at the end."""

    def never_falls(self, total: int | None) -> tuple[str, str] | None:
        return FLOOR_IS_TOP if self.floor == 1 else None

    def after_warmup(self, step: int, total: int) -> float:
        return 1.0 - (1.0 - self.floor) * min(step / total, 1.0)


__all__ = ["Linear"]
