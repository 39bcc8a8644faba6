"""The settings of low-rank adapters, for every family that trains them.

Must not know modules, files or ranks.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fullshard.config.part import Section

PRESETS: dict[str, dict[str, Any]] = {
    "paper_r64": {"r": 64, "alpha": 128, "dropout": 0.05},
    "pretrained_r320": {"r": 320, "alpha": 640, "dropout": 0.01},
}
"""Settings by name, as published for Phi-4-multimodal: a fine-tune of speech, and its own speech adapter."""


class Lora(Section):
    """Low-rank adapters (peft); the base model is frozen."""

    preset: Literal["paper_r64", "pretrained_r320"] | None = None
    """Rank, alpha and dropout by name: paper_r64 (64, 128, 0.05) or pretrained_r320 (320, 640, 0.01). Other keys win
    over it."""
    r: int = Field(16, ge=1)
    """The rank of each adapter."""
    alpha: float = Field(32, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer but the head), names of layers, or one regular expression."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        # An unknown name is left for the key's own check, which lists the known ones.
        preset = PRESETS.get(str(values.get("preset"))) if isinstance(values, dict) else None
        return {**preset, **values} if preset else values

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        if isinstance(value, str):
            return {"preset": value}
        return {"r": value} if isinstance(value, int) and not isinstance(value, bool) else value
