"""Progress: how far a run is, which a checkpoint restores with the weights. Must not know who reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """Counts since the first step of the run, over all ranks."""

    step: int = 0
    """Optimizer steps done; also the data cursor, since the order is a function of (seed, epoch)."""
    epoch: int = 0
    """Epochs completed."""
    samples: int = 0
    """Rows; without packing a row is a sample."""
    tokens: int = 0
    schedule_step: int = 0
    """Steps that moved the weights: an overflow under fp16 moves the data on, not the schedule."""
    best: float | None = None
    best_step: int | None = None
    best_by: str | None = None
    """The mode and metric of `best`, such as `min loss`."""
    first: float | None = None
    """Its first value, the baseline for later ones."""
    previous: float | None = None
    """The value of the last validation."""
    only_worse: int = 0
    """Validations since the first, each worse than the one before it; -1: one of them was not."""
    validations_without_gain: int = 0
    seconds: float = 0.0
    """Training time over all runs of this folder."""
    finished: bool = False
    settled: bool = True
    """False: a signal came before a validation or save that was due; the resumed run begins with it."""
    epoch_sums: dict[str, list[float]] = field(default_factory=dict)
    """Loss sum and count of the epoch so far, so that its average survives a resume."""
    unlogged: dict[str, list[float]] = field(default_factory=dict)
    """The same since the last logged step."""
    guard: dict[str, Any] = field(default_factory=dict)
    """What the guard has skipped and left out so far (fullshard/faults/watch.py)."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def result(self, folder: Path, *, validation: dict[str, float], stopped: str) -> Result:
        """The result of a run that got this far."""
        counts = {key: value for key, value in vars(self).items() if key in Result.__dataclass_fields__}
        return Result(folder=str(folder), validation=validation, stopped=stopped, **counts)


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


@dataclass(frozen=True)
class Result:
    """How far a run got, and why it ended."""

    folder: str
    step: int
    best: float | None
    best_step: int | None
    validation: dict[str, float]
    """The last validation numbers."""
    stopped: str
    """Why the run ended: done, patience or signal."""
    seconds: float
    epoch: int = 0
    """Epochs completed."""
    samples: int = 0
    tokens: int = 0
    best_by: str | None = None
    """The mode and metric of `best`, such as `min loss`."""
    adapted: bool = False
    """Adapters were trained and exported, not a whole model."""
