"""The place of a stage in its run: which one it is, and how many steps came before it.

Travels with the recipe of the stage to its ranks. Must not know recipes, files or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.formatting.plural import counted


@dataclass(frozen=True)
class Place:
    """One stage of a run."""

    run: str
    """The name of the run."""
    name: str
    number: int
    """From 1."""
    of: int
    before: int = 0
    """Steps of the stages before it."""
    later: tuple[str, ...] = ()
    """Folders of the stages after it, which starting this one over moves aside as well."""

    @property
    def title(self) -> str:
        before = f" (after {counted(self.before, 'step')})" if self.before else ""
        return f"{self.run}, stage {self.number} of {self.of}: {self.name}{before}"

    @property
    def label(self) -> str:
        """A name for a tracker that shows runs of many folders."""
        return f"{self.run}-{self.name}"

    @property
    def is_last(self) -> bool:
        return self.number == self.of

    def marked(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record of metrics.jsonl with the stage, and the step counted over all stages."""
        step = record.get("step")
        total = {"total_step": self.before + step} if isinstance(step, int) else {}
        return {**record, "stage": self.name, **total}

    def settings(self, changes: Sequence[str]) -> tuple[str, ...]:
        """Settings of this stage as the command line of the run has them; the name is that of the run."""
        return tuple(change if change.startswith("name=") else f"stages.{self.name}.{change}" for change in changes)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "later": list(self.later)}

    @classmethod
    def read(cls, values: Mapping[str, Any] | None) -> Place | None:
        """The place that `plain` wrote."""
        return cls(**{**values, "later": tuple(values["later"])}) if values else None
