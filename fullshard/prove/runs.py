"""Makes the runs of a plan: starts ranks, kills them, restarts them; keeps their output.

Must not know how runs are compared.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint import folder as files
from fullshard.errors import EXIT_PREEMPTED, FullshardError
from fullshard.log.metrics import FILE, read
from fullshard.prove.cases import STEPS, Case
from fullshard.prove.compare import Steps, steps_of
from fullshard.recipes.read import Reading, hand_on

RECIPE, RESUME = "recipe.yaml", "resume"
Start = Callable[[Case, Path], int]
"""Starts the ranks of a case and waits for them; their output goes into the folder. Returns the exit code."""
_LINES = 12
"""How many of the last lines of a failed run are shown."""


class RunFailed(FullshardError):
    """A run of the proof failed; the message has its last lines."""


class Stopped(FullshardError):
    """A signal from the user or the cluster stopped the proof."""


@dataclass
class Runs:
    """Makes the runs."""

    folder: Path
    start: Start
    watch: Callable[[str], AbstractContextManager[None]]
    """Shows what is being done, and then how long it took."""
    keep: bool = False
    number: int = 0

    def make(self, case: Case, what: str) -> None:
        """Runs a case to its last step; raises RunFailed if it does not get there."""
        code, outputs = self._start(what, case)
        if code or max(taken(case).numbers, default=0) < STEPS:
            raise _failed(case, f"ended with exit code {code}, before step {STEPS} was saved", code, outputs)

    def kill(self, case: Case, step: int, what: str) -> int:
        """Runs a case until it is killed after a step; returns the step of its last checkpoint."""
        code, outputs = self._start(what, case.killed_after(step))
        if not (case.folder / f"killed-{step}").exists():
            how = f"ended with exit code {code} before" if code else "had no checkpoint to resume from at"
            raise _failed(case, f"{how} step {step}", code, outputs)
        return max(int(path.name.rpartition("-")[2]) for path in files.published(case.folder))

    def remove(self, case: Case) -> None:
        """Deletes a run once it has been compared, unless the user keeps it."""
        if not self.keep:
            shutil.rmtree(case.folder, ignore_errors=True)

    def _start(self, what: str, case: Case) -> tuple[int, Path]:
        self.number += 1
        outputs = self.folder / f"start-{self.number}"
        outputs.mkdir()
        with self.watch(what):
            code = self.start(case, outputs)
        if code == EXIT_PREEMPTED or code >= 128:
            stopped = Stopped(f"Stopped by a signal, in the middle of: {what}.")
            stopped.exit_code = code
            raise stopped
        return code, outputs


def start_ranks(reading: Reading) -> Start:
    """Starts ranks with the recipe's own launcher."""

    def start(case: Case, outputs: Path) -> int:
        hand_on(Reading(case.recipe, reading.name, reading.source), outputs / RECIPE)
        (outputs / RESUME).write_text(case.resume, encoding="utf-8")
        command = [sys.executable, "-m", "fullshard", "prove", str(outputs), "--as-rank"]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # what the launcher prints; ranks write to their own files
                return case.recipe.topology.launcher.start(command, case.ranks)
        finally:
            (outputs / "launcher.txt").write_text(said.getvalue(), encoding="utf-8")

    return start


def taken(case: Case, *, first: int = 1, last: int | None = None) -> Steps:
    """What a run logged of its steps, from `first` up to `last`."""
    path = case.folder / FILE
    return steps_of(read(path) if path.exists() else [], first=first, last=last)


def _failed(case: Case, how: str, code: int, outputs: Path) -> RunFailed:
    """The last lines of the rank that failed; of several, the first with an error."""
    said = [(path, path.read_text(encoding="utf-8", errors="replace")) for path in sorted(outputs.glob("*.txt"))]
    candidates = [(path, text) for path, text in said if "Error" in text] or [(p, t) for p, t in said if t.strip()]
    lines = [line for line in candidates[0][1].splitlines() if line.strip()][-_LINES:] if candidates else ["(nothing)"]
    text = "\n".join(f"    {line}" for line in lines)
    failed = RunFailed(f"The run `{case.title}` {how}. Its last lines:\n{text}")
    failed.exit_code = code or 1
    return failed
