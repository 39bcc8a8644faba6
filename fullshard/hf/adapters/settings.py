"""The settings of low-rank adapters, for every family that trains them.

Must not know modules, files or ranks.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fullshard.config.part import Section


class Lora(Section):
    """Low-rank adapters (peft); the base model is frozen."""

    r: int = Field(16, ge=1)
    """The rank of each adapter."""
    alpha: float = Field(32, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer but the head), names of layers, or one regular expression."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        return {"r": value} if isinstance(value, int) and not isinstance(value, bool) else value
