"""The contract of a sink: where numbers go besides `metrics.jsonl`.

Sinks exist on rank 0 only. One that cannot open stops the run; one that fails later warns once and is dropped.
Must not call collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fullshard.config.part import Part


class OpenSink:
    """A sink that is open for one run."""

    def write(self, record: dict[str, Any]) -> None:
        """One record of metrics.jsonl: `kind` (train | validation | event), `step`, and numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Flushes what is left."""


class Sink(Part):
    """A place for a run's numbers."""

    folder: ClassVar[str] = "fullshard.sinks"
    required: ClassVar[tuple[str, ...]] = ("open",)

    def packages(self) -> Mapping[str, str]:
        """Optional packages that it imports with these settings, each with what `pip install` calls it."""
        return {}

    def viewer(self, folder: Path) -> str | None:
        """The command that shows the curves of the run in `folder`, or None."""
        return None

    def notes(self) -> list[str]:
        """What the user should know about these settings before the run."""
        return []

    def open(self, folder: Path, *, name: str, recipe: dict[str, Any]) -> OpenSink:
        """Opens the sink for the run in `folder`."""
        raise NotImplementedError
