"""Matryoshka: which prefixes of an embedding are trained as embeddings too. Must not know losses or models."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from fullshard.config.part import Section
from fullshard.formatting.plural import counted

SMALLEST_DIM = 64
"""Where halving stops when no dimensions are named."""


class Matryoshka(Section):
    """Embeddings whose prefixes are embeddings too."""

    dims: list[int] | None = Field(None, min_length=1)
    """Dimensions of the prefixes; null: all, a half, a quarter, ... down to 64."""
    weights: list[float] | None = None
    """The loss weight of each; null: 1."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        return {"dims": value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _as_many(self) -> Matryoshka:
        if self.dims is not None and (min(self.dims) < 1 or len(set(self.dims)) != len(self.dims)):
            raise ValueError(f"matryoshka.dims = {self.dims}: each must be at least 1 and occur once")
        if self.weights is not None and len(self.weights) != len(self.dims or ()):
            entries = counted(len(self.weights), "entry")
            raise ValueError(f"matryoshka.weights has {entries} and dims {len(self.dims or ())}")
        return self

    def of(self, width: int) -> list[tuple[int, float]]:
        """(dimension, weight) for embeddings of this width."""
        dims = self.dims or [width]
        while self.dims is None and dims[-1] // 2 >= SMALLEST_DIM:
            dims.append(dims[-1] // 2)
        return list(zip(dims, self.weights or [1.0] * len(dims), strict=True))
