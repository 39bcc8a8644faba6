"""Where the time of a run went, by phase. Must not judge it."""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.log.meters import PHASES
from fullshard.report.folders import Run


def phases(run: Run) -> dict[str, float]:
    """Seconds by phase over all logged windows; the first step, which may compile, is not in them."""
    found = dict.fromkeys(PHASES, 0.0)
    for record in run.of_kind("train"):
        spent = record.get("time")
        for name, seconds in spent.items() if isinstance(spent, dict) else ():
            if isinstance(seconds, (int, float)):
                found[str(name)] = found.get(str(name), 0.0) + seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each phase as a share of all."""
    total = sum(seconds.values())
    return {name: spent / total for name, spent in seconds.items()} if total else {}
