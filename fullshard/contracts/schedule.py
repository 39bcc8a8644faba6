"""The contract of a learning-rate schedule: a pure function from optimizer step to a factor of the base rate.

Steps are optimizer steps, whatever the world size or the accumulation. Must not import torch.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import field_validator

from fullshard.config.part import Part

FLOOR_IS_TOP = (
    "schedule.floor = 1: the learning rate never falls.",
    "Use a share of optimizer.lr below 1, such as 0.1, or schedule: constant.",
)


class Schedule(Part):
    """How the learning rate moves over the run."""

    folder: ClassVar[str] = "fullshard.schedules"
    default_kind: ClassVar[str | None] = "cosine"
    required: ClassVar[tuple[str, ...]] = ("after_warmup or factor",)

    warmup: int | float = 0
    """Linear warm-up: a whole number is steps, a fraction below 1 a share of the run. Step n of N has n/N of the rate,
    so the first step already trains. Transformers starts at 0 and stays one step behind during warm-up."""

    @field_validator("warmup", mode="before")
    @classmethod
    def _warmup_in_range(cls, value: Any) -> Any:
        try:
            number = float("" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < math.inf or (number > 1 and number != int(number)):
            raise ValueError("warm-up is a number of steps (0, 100) or a share of the run (0.03)")
        return int(number) if number >= 1 or number == 0 else number

    def warmup_steps(self, total: int) -> int:
        return self.warmup if isinstance(self.warmup, int) else round(self.warmup * total)

    def factor(self, step: int, total: int) -> float:
        """The factor at optimizer step `step` (counted from 0) of `total`."""
        warmup = self.warmup_steps(total)
        if step < warmup:
            return (step + 1) / warmup
        return self.after_warmup(step - warmup, max(total - warmup, 1))

    def never_falls(self, total: int | None) -> tuple[str, str] | None:
        """Why the rate never falls in `total` steps (None: not known yet), and what to do; None if it does."""
        return None

    def after_warmup(self, step: int, total: int) -> float:
        """The factor `step` steps after warm-up, of `total` such steps."""
        raise NotImplementedError
