"""Shows findings: section by section as they are found, or as one JSON object.

`fullshard prove` prints on the same `Screen`. Must not know what is checked.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.text import Text

from fullshard.check.findings import Finding, Level
from fullshard.formatting.plural import counted
from fullshard.log.console import FILE_WIDTH, is_terminal, open_screen

_MARKS: dict[Level, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warning": ("!", "!!", "yellow"),
    "error": ("✗", "XX", "red"),
}
_LABEL = 16


class Screen:
    """Standard output as wide as the terminal; prints nothing when `quiet`."""

    def __init__(self, *, quiet: bool, narrowest: int) -> None:
        self._quiet, self._on_terminal = quiet, is_terminal(sys.stdout)
        self._screen = open_screen(None, on_terminal=self._on_terminal)
        columns = shutil.get_terminal_size().columns if self._on_terminal else FILE_WIDTH
        self._width = max(min(columns, 120), narrowest)

    def working(self, what: str) -> AbstractContextManager[object]:
        """Shows a status line while the body runs."""
        shown = self._on_terminal and not self._quiet
        return self._screen.status(what) if shown else contextlib.nullcontext()

    def opening(self, title: str, notes: Sequence[str]) -> None:
        """What will be run, and what differs from the recipe."""
        self._show(Text(f"\n{title}", style="bold"))
        for note in notes:
            self._wrapped(note, indent="  ", style="dim")
        self._show(Text(""))

    def _wrapped(self, text: str, *, indent: str, style: str = "") -> None:
        for line in textwrap.wrap(text, self._width - len(indent), break_on_hyphens=False, break_long_words=False):
            self._show(Text(indent + line, style=style))

    def _show(self, text: Text) -> None:
        if not self._quiet:
            self._screen.print(text, soft_wrap=True)


class Report(Screen):
    """The findings so far."""

    def __init__(self, *, as_json: bool, silent: bool = False) -> None:
        super().__init__(quiet=as_json or silent, narrowest=50)
        self.found: list[tuple[str, Finding]] = []
        self._as_json, self._silent = as_json, silent
        self._plain = not (sys.stdout.encoding or "").lower().startswith("utf")

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for _, finding in self.found)

    def section(self, title: str, findings: Iterable[Finding]) -> None:
        """Shows a section, each line as it is found; no heading without a line."""
        for finding in findings:
            if any(finding.level == "error" and finding.text == other.text for _, other in self.found):
                continue  # two checks may find the same error
            if title.lower() not in {section for section, _ in self.found}:
                self._show(Text(f"\n{title}", style="bold"))
            self.found.append((title.lower(), finding))
            self._line(finding)

    def text(self, text: str) -> None:
        self._show(Text(text))

    def end(self, command: str, *, tried: bool, extra: dict[str, Any]) -> None:
        """The verdict, and the exact command to run."""
        count = {level: sum(f.level == level for _, f in self.found) for level in _MARKS}
        if self._as_json and not self._silent:
            found = [{"section": section, **finding.as_dict()} for section, finding in self.found]
            report = {"correct": not self.failed, "tried": tried, "command": command, "findings": found, **extra}
            sys.stdout.write(json.dumps(report, indent=1) + "\n")
            return
        warnings = f", {counted(count['warning'], 'warning')}" if count["warning"] else ""
        if self.failed:
            problems = counted(count["error"], "problem")
            self._show(
                Text(f"\n{problems}{warnings}. Nothing was trained, and no files were left behind.", style="bold red")
            )
            return
        untried = "" if tried else "; --quick skipped the trial of the model"
        self._show(Text(f"\nSetup is CORRECT{warnings}{untried}", style="bold green"))
        for dtypes in (finding.text for _, finding in self.found if finding.check == "dtypes"):
            self._show(Text(f"Model dtype: {dtypes}"))
        self._show(Text("Ready to train with:"))
        self._show(Text(f"  {command}"))

    def _line(self, finding: Finding) -> None:
        mark, ascii_mark, colour = _MARKS[finding.level]
        indent = " " * (4 + _LABEL)
        lines = textwrap.wrap(finding.text, self._width - len(indent), break_on_hyphens=False) or [""]
        label = f"{finding.check:<{_LABEL}}"
        self._show(Text.assemble("  ", (ascii_mark if self._plain else mark, colour), f" {label}", lines[0]))
        for line in lines[1:]:
            self._show(Text(indent + line))
        self._wrapped(finding.remedy, indent=indent, style="dim")
