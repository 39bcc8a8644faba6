"""The recipe's `guard` section: what a run does about steps with NaN, Inf or a loss spike.

Must not know torch, ranks or how a step is judged.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fullshard.config.part import Section
from fullshard.formatting.plural import counted

Policy = Literal["stop", "skip", "rollback"]


class Guard(Section):
    """What to do about a step with NaN, Inf or a loss spike. Such a step never changes the weights."""

    not_finite: Policy = "stop"
    """If the loss or the gradient norm is NaN or Inf. stop: end the run with exit code 3; skip: go on without this
    update; rollback: go back to the newest checkpoint and leave out the samples of the step."""
    spike: Policy | None = None
    """The same for a step whose loss is far above the recent ones; null: do not look for spikes."""
    threshold: float = Field(8.0, gt=0)
    """How far a spike is above the median of the recent losses, in robust standard deviations (1.4826 x MAD)."""
    window: int = Field(100, ge=8)
    """How many recent losses a loss is compared with. Until there are as many, nothing is a spike."""
    limit: int = Field(5, ge=1)
    """Steps skipped in a row, or rollbacks to the same checkpoint, that are allowed; one more stops the run."""

    def unused(self) -> list[str]:
        """A line for each key that is set but has no effect."""
        defaults = {key: type(self).model_fields[key].get_default() for key in ("threshold", "window")}
        changed = [key for key, usual in defaults.items() if getattr(self, key) != usual and self.spike is None]
        return [f"guard.{key} has no effect: guard.spike is null, so nothing looks for spikes." for key in changed]

    def describe(self) -> str:
        """The policy in one line."""
        spikes = ""
        if self.spike:
            spikes = f"; {self.spike} on a loss {self.threshold:g} robust deviations above the last {self.window:,}"
        bounded = {self.not_finite, self.spike} & {"skip", "rollback"}
        limit = f"; stop after {counted(self.limit, 'time')} in a row" if bounded else ""
        return f"{self.not_finite} on NaN or Inf in the loss or the gradient norm{spikes}{limit}"


__all__ = ["Guard", "Policy"]
