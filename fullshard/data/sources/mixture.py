"""Records from several sources, each with a percentage.

The mixture depends on the seed alone: it is the same on every rank and in every epoch. Must not know tokens or ranks.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from fullshard.config.part import Section
from fullshard.contracts.data import Record, Records, Source
from fullshard.data.order import MIXTURE, generator
from fullshard.data.records import Joined, combine, origins
from fullshard.formatting.plural import counted


class MixturePart(Section):
    """One source of a mixture."""

    source: Source
    """A path, or a source with its settings."""
    percent: float = Field(gt=0, le=100)
    """Its share of the records."""


class Mixture(Source):
    """Several sources mixed by percentage; a small one is repeated, a large one subsampled."""

    parts: list[MixturePart] = Field(min_length=1)
    """The sources and their shares, which add up to 100."""
    samples: int | None = Field(None, ge=1)
    """Records in the mixture; null: as many as all sources have together."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides which records of a large source are taken, and the order."""

    @model_validator(mode="after")
    def _whole(self) -> Mixture:
        total = sum(part.percent for part in self.parts)
        if abs(total - 100) > 0.01:
            raise ValueError(f"the percentages add up to {total:g}, but must add up to 100")
        return self

    def open(self) -> Records:
        opened = [part.source.open() for part in self.parts]
        total = self.samples or sum(len(records) for records in opened)
        counts = shares([part.percent for part in self.parts], total=total)
        rng = generator(self.seed, stream=MIXTURE)
        starts = np.cumsum([0, *(len(records) for records in opened)])
        drawn = [start + _draw(len(records), n, rng) for start, records, n in zip(starts, opened, counts, strict=False)]
        order = np.concatenate(drawn)[rng.permutation(total)]
        settings = f"{self.seed} {total} {[part.percent for part in self.parts]}"
        notes = [
            f"mixture: {part.percent:g} % = {counted(count, 'record')} from source {number}, "
            + (f"repeated {count / len(records):.3g} times" if count >= len(records) else "subsampled")
            + f" ({count:,} of {len(records):,})"
            for number, (part, records, count) in enumerate(zip(self.parts, opened, counts, strict=True), start=1)
        ]
        return _Mixed(opened, order, settings=settings, notes=notes)


def shares(percents: list[float], *, total: int) -> list[int]:
    """Integers in proportion to `percents` that add up to `total`; the largest remainders are rounded up."""
    exact = np.array(percents) / sum(percents) * total
    counts = np.floor(exact).astype(np.int64)
    late = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[late] += 1
    return [int(count) for count in counts]


def _draw(available: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Every record equally often; the remainder is drawn at random."""
    passes, rest = divmod(count, available)
    return np.concatenate([np.tile(np.arange(available), passes), np.sort(rng.permutation(available)[:rest])])


class _Mixed:
    """Records of joined sources in another order, which may repeat some."""

    def __init__(self, parts: list[Records], order: np.ndarray, *, settings: str, notes: list[str]) -> None:
        self.parts, self._joined, self._order, self._settings = parts, Joined(parts), order, settings
        self.notes = notes + [note for part in parts for note in getattr(part, "notes", [])]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Record:
        return self._joined[int(self._order[index])]

    def where(self, index: int) -> str:
        return self._joined.where(int(self._order[index]))

    def fingerprint(self) -> str:
        return combine("mixture", self._settings, *(part.fingerprint() for part in self.parts))

    def origins(self) -> np.ndarray:
        """The stored record behind each index, so that a repeated one is never both trained and validated on."""
        ids = [origins(part) for part in self.parts]
        starts = np.cumsum([0, *(int(each.max()) + 1 for each in ids)])
        stored = np.concatenate([start + each for start, each in zip(starts, ids, strict=False)])
        return np.asarray(stored[self._order])


__all__ = ["Mixture", "MixturePart"]
