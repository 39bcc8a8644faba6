"""Shows a proof: a line for each run as it ends, then a table and the verdict; or one JSON object.

Must not know how anything is found out.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fullshard.check.report import Screen
from fullshard.formatting.plural import counted
from fullshard.prove.compare import Outcome
from fullshard.prove.proof import NEAR, Verdict

_COLOURS = {"exact": "green", "equal": "green", "DRIFT": "bold red", "not run": "bold red", "left out": "yellow"}

_ALLOWED = (
    "Tolerances: a resumed run must be bitwise equal, optimizer included. In the other cases, where sums "
    "round in a different order: "
    f"{NEAR.losses:.0e} in losses ({10 * NEAR.losses:.0e} from step 4 on), {NEAR.norms:.0e} in gradient norms, "
    f"{NEAR.updates:.0e} of the last updates in each weight tensor, {NEAR.moments:.0e} in its momentum."
)


class Report(Screen):
    """The output of a proof."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(quiet=as_json, narrowest=60)

    @contextlib.contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Shows a status line while the body runs, then how long it took."""
        begun = time.monotonic()
        with self.working(f"{what} ..."):
            yield
        seconds = f"{time.monotonic() - begun:6.1f} s"
        lines = textwrap.wrap(what, self._width - len(seconds) - 4, break_on_hyphens=False)
        self._show(Text.assemble("  ", (seconds, "dim"), f"  {lines[0]}"))
        for line in lines[1:]:
            self._show(Text(" " * (len(seconds) + 4) + line))

    def end(self, verdicts: Sequence[Verdict], *, facts: dict[str, Any]) -> None:
        """The table and the verdict."""
        drifting = [verdict for verdict in verdicts if verdict.word in ("DRIFT", "not run")]
        if self._quiet:
            cases = [_as_dict(verdict) for verdict in verdicts]
            sys.stdout.write(json.dumps({"equal": not drifting, **facts, "cases": cases}, indent=1) + "\n")
            return
        self._show(Text(""))
        self._screen.print(_table(verdicts), soft_wrap=False, width=self._width)
        self._show(Text(""))
        self._wrapped(_ALLOWED, indent="  ", style="dim")
        self._verdict(verdicts, drifting)
        if "folder" in facts:
            self._show(Text(f"  The runs are kept in {facts['folder']}"))

    def _verdict(self, verdicts: Sequence[Verdict], drifting: Sequence[Verdict]) -> None:
        left_out = [verdict for verdict in verdicts if verdict.left_out]
        if drifting:
            self._show(Text(f"\n{counted(len(drifting), 'case')} of {len(verdicts)} not proven", style="bold red"))
            for verdict in drifting:
                self._show(Text(f"  {verdict.title}", style="bold"))
                for line in verdict.drifts:
                    self._wrapped(line, indent="    ")
                for line in (verdict.failure or "").splitlines():
                    self._show(Text(f"    {line}"))
        elif any(verdict.name == "resume" for verdict in verdicts):
            self._show(Text("\nResume is EXACT", style="bold green"))
        else:
            self._show(Text("\nNo drift", style="bold green"))
        for verdict in left_out:
            self._wrapped(f"Left out: {verdict.title}: {verdict.left_out}.", indent="  ", style="yellow")


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False, header_style="bold")
    table.add_column("  case", overflow="fold")
    for name in ("samples", "losses", "weights", "verdict"):
        table.add_column(name, no_wrap=True)
    for verdict in verdicts:
        looks = [_cell(look) for look in (verdict.samples, verdict.numbers, verdict.tensors)]
        table.add_row(Text(f"  {verdict.title}"), *looks, Text(verdict.word, style=_COLOURS[verdict.word]))
    return table


def _cell(look: Outcome | None) -> Text:
    return Text("-", style="dim") if look is None else Text(look.word, style="red" if look.drift else "")


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    looks = {"samples": verdict.samples, "losses": verdict.numbers, "weights": verdict.tensors}
    return {
        "case": verdict.name,
        "title": verdict.title,
        "verdict": verdict.word.lower(),
        **{name: None if look is None else _look(look) for name, look in looks.items()},
        "remark": verdict.remark if verdict.drifts else None,
        "failure": verdict.failure,
        "left_out": verdict.left_out,
    }


def _look(look: Outcome) -> dict[str, Any]:
    apart = look.worst if math.isfinite(look.worst) else None
    return {"equal": look.drift is None, "apart": apart, "step": look.step, "tensor": look.tensor, "drift": look.drift}
