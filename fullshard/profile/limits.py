"""Says once what limits a run: with the first logged step after the ranks have compared their phases.

Must not know how phases are measured, nor what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fullshard.profile.verdict import Phases, Tuning, verdict


class Limits:
    """Waits for the phases, then for the MFU that is logged with them."""

    def __init__(self, tuning: Tuning, say: Callable[[str], None], event: Callable[..., None]) -> None:
        self.tuning, self._say, self._event = tuning, say, event
        self._phases: Phases | None = None

    def measured(self, ranks: Sequence[Mapping[str, float]], **facts: Any) -> None:
        """Takes what all ranks measured in their first steps after warm-up."""
        self._phases = Phases.of(ranks, **facts)

    def say(self, record: Mapping[str, Any]) -> None:
        """Says what limits the run, if it was measured since the last logged step."""
        phases, self._phases = self._phases, None
        if phases is not None:
            found = verdict(phases, self.tuning, mfu=record.get("mfu"))
            self._say(found.line)
            self._event("limit", record["step"], **found.facts(phases))
