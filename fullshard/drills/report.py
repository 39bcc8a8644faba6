"""Shows fault drills: a line for each as it ends, then the verdict; or one JSON object.

Must not know how they are run.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fullshard.check.report import Screen
from fullshard.drills.drill import Outcome
from fullshard.drills.kinds import NOT_TRIED
from fullshard.formatting.plural import counted

_INDENT = " " * 12
_EQUAL = "losses and weights equal those of a run without faults, bit by bit"


class Report(Screen):
    """The output of the drills."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(quiet=as_json, narrowest=60)

    def ended(self, outcome: Outcome) -> None:
        """One drill: what happened, how the run explained it, and how it went on."""
        word, colour = ("recovered", "green") if outcome.problem is None else ("FAILED", "bold red")
        self._show(
            Text.assemble("  ", (f"{outcome.seconds:6.1f} s", "dim"), "  ", (word, colour), f"  {outcome.drill.title}")
        )
        if outcome.explained:
            said = textwrap.shorten(outcome.explained, 2 * self._width, placeholder=" ...")
            self._wrapped(f"it says: {said}", indent=_INDENT, style="dim")
        self._wrapped(outcome.problem or how(outcome), indent=_INDENT, style="" if outcome.problem else "dim")

    def end(self, outcomes: Sequence[Outcome], *, facts: dict[str, Any]) -> None:
        """The verdict."""
        failed = [outcome for outcome in outcomes if outcome.problem]
        if self._quiet:
            drills = [_as_dict(outcome) for outcome in outcomes]
            report = {"recovered": not failed, **facts, "drills": drills, "note": NOT_TRIED}
            sys.stdout.write(json.dumps(report, indent=1) + "\n")
            return
        self._screen.print(_table(outcomes))
        if failed:
            text = f"\n{counted(len(failed), 'fault')} of {len(outcomes)}: no exact recovery"
            self._show(Text(text, style="bold red"))
        else:
            self._show(Text(f"\nThe run recovers from {counted(len(outcomes), 'kind')} of faults", style="bold green"))
        self._wrapped(NOT_TRIED, indent="  ", style="dim")
        if "folder" in facts:
            self._show(Text(f"  The runs and their output are kept in {facts['folder']}"))


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False, header_style="bold", title=" ")
    for name in ("  fault", "resumed from", "weights", "verdict"):
        table.add_column(name, overflow="fold", no_wrap=name == "verdict")
    for each in outcomes:
        word, colour = ("recovered", "green") if each.problem is None else ("FAILED", "bold red")
        steps = ", ".join(f"step {step}" for step in each.resumed_from) or "-"
        equal = "finite" if each.drill.recovery == "skip" else "bitwise"
        weights = Text("-" if each.problem else equal)
        table.add_row(Text(f"  {each.drill.title}"), Text(steps), weights, Text(word, style=colour))
    return table


def how(outcome: Outcome) -> str:
    """How a run went on after its faults."""
    if outcome.drill.recovery == "skip":
        return "went on without that update; the weights are finite"
    if outcome.drill.recovery == "retry":
        return f"tried the save again; {_EQUAL}"
    steps = " and ".join(f"step {step}" for step in outcome.resumed_from)
    by = "run again" if outcome.drill.recovery == "rerun" else "restarted"
    return f"{by} from {steps}; {_EQUAL}"


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "drill": outcome.drill.name,
        "title": outcome.drill.title,
        "recovery": outcome.drill.recovery,
        "exit_codes": outcome.codes,
        "resumed_from": outcome.resumed_from,
        "explained": outcome.explained,
        "seconds": round(outcome.seconds, 1),
        "problem": outcome.problem,
    }
