"""A range of steps within an epoch, and its text. Must not know where the text goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Steps:
    """The steps after `begin` up to `end`, of `of` steps in the epoch."""

    begin: int
    end: int
    of: int

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == self.of

    def text(self) -> str:
        """`10 of its 241 steps`, or `steps 11 to 20 of 241` if the run did the first ones before."""
        if self.begin == 0:
            return f"{self.end:,} of its {self.of:,} steps"
        return f"steps {self.begin + 1:,} to {self.end:,} of {self.of:,}"
