"""Runs as a table of plain text, the recipes' differences last. Must not know where its facts come from."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fullshard.formatting import readable
from fullshard.formatting.yaml_text import shown
from fullshard.runs.folder import Run

_HEAD = ("run", "state", "steps", "best", "loss", "time")
_RIGHT = ("steps", "loss", "time")
_NARROWEST = 30
"""Columns that differences get at least; if fewer are left they go under the row."""
MOST = 6
"""Differences that are shown for a run, without those that are null; `--json` has all."""


def table(runs: Sequence[tuple[str, Run, dict[str, Any]]], *, width: int) -> list[str]:
    """Lines of at most `width` columns; each run comes with its name and its differences from the others."""
    rows = [_HEAD, *(_cells(name, run) for name, run, _ in runs)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_HEAD))]
    lines = []
    for number, row in enumerate(rows):
        cells = [_aligned(cell, widths[index], index) for index, cell in enumerate(row)]
        different = "differs" if number == 0 else _different(runs[number - 1][2])
        any_different = any(found for _, _, found in runs)
        lines += _beside("  ".join(cells), different if any_different else "", width)
        if number:
            lines += [f"    {problem}" for problem in runs[number - 1][1].problems]
    return lines


def _cells(name: str, run: Run) -> tuple[str, ...]:
    steps = f"{run.step:,}" if run.steps is None else f"{run.step:,}/{run.steps:,}"
    state = f"{run.state} ({run.why})" if run.why else run.state
    loss = "-" if run.loss is None else readable.loss(run.loss)
    time = "-" if run.seconds is None else readable.duration(run.seconds)
    return readable.plain(name).replace("\n", " "), state, steps, _best(run), loss, time


def _best(run: Run) -> str:
    if run.best is None:
        return "-"
    metric = (run.best_by or "").rpartition(" ")[2]
    at = "" if run.best_step is None else f" at {run.best_step:,}"
    return f"{readable.plain(metric)} {readable.number(run.best)}{at}".strip()


def _aligned(cell: str, width: int, index: int) -> str:
    return cell.rjust(width) if _HEAD[index] in _RIGHT else cell.ljust(width)


def _different(found: dict[str, Any]) -> str:
    pairs = [f"{key}={shown(value)}" for key, value in found.items() if value is not None]
    more = f"and {len(pairs) - MOST} more" if len(pairs) > MOST else ""
    return readable.plain(" ".join([*pairs[:MOST], *([more] if more else [])])).replace("\n", " ")


def _beside(row: str, different: str, width: int) -> list[str]:
    """The row with its differences in a last column, or under it if the terminal is narrow."""
    if not different:
        return [row.rstrip()]
    room = width - len(row) - 2
    if room < _NARROWEST:
        return [
            row.rstrip(),
            *textwrap.wrap(different, max(width - 4, 20), initial_indent="    ", subsequent_indent="    "),
        ]
    pieces = textwrap.wrap(different, room, break_on_hyphens=False)
    return [f"{row if number == 0 else ' ' * len(row)}  {piece}" for number, piece in enumerate(pieces)]
