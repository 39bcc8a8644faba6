"""When a run saves, and what its ranks must agree on for that.

Must not know how anything is saved, nor what a validation found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fullshard.checkpoint.saver import Saver
from fullshard.contracts.progress import Progress
from fullshard.control.triggers import Due, NextSave
from fullshard.log.report import Report


@dataclass
class Saves:
    """The saves of one run: by steps, epochs and minutes, at the end, and whenever the loop asks."""

    saver: Saver
    due: Due
    next_save: NextSave
    at_end: bool
    report: Report
    asked: Callable[[], bool] = bool
    """Whether somebody asks for a save now."""
    step: int = field(default=-1, init=False)
    """The step of the last save of this process."""
    _at: float = field(default_factory=time.monotonic, init=False)
    _overdue: bool = field(default=False, init=False)
    """The minutes between two saves have passed, by the clock of rank 0."""

    def begin(self, step: int) -> None:
        """Takes host memory immediately if the first save comes soon."""
        if self.next_save.soon(step):
            self.saver.reserve_memory()

    def flags(self, step: int) -> tuple[bool, bool, bool]:
        """Requests to all ranks: fail since a save failed, save since it is time, take memory since a save is near."""
        self.saver.report()
        main, since_save = self.saver.world.is_main, time.monotonic() - self._at
        overdue = self.asked() or (main and self.due.after_seconds(since_save))
        near = main and self.next_save.near(step, since_save_s=since_save)
        return self.saver.failed, overdue, near

    def follow(self, step: int, *, failed: bool, overdue: bool, near: bool) -> None:
        """Does what the ranks agreed on in the step before."""
        # A save since then has answered the flag.
        self._overdue = overdue and self.step < step - 1
        if failed:
            self.saver.settle()
        if near:
            self.saver.reserve_memory()

    def due_after(self, step: int, epoch: int | None = None) -> bool:
        """Whether the recipe asks for a save after this step, or after this epoch if one ends with it."""
        by_epoch = epoch is not None and self.due.after_epoch(epoch)
        return by_epoch or self.due.after_step(step) or self._overdue

    def save(self, progress: Progress, *, best: bool = False) -> None:
        """Saves now, or starts a save in the background."""
        begun, progress.seconds = time.monotonic(), self.report.meters.seconds
        with self.report.phase("save"):
            self.saver.save(progress, best)
        self.step, self._at, self._overdue = progress.step, time.monotonic(), False
        self.report.event("saved", progress.step, stall_seconds=round(self._at - begun, 4))

    def settle(self) -> None:
        """Waits for a save in the background, and raises its error."""
        with self.report.phase("save"):
            self.saver.settle()

    def export(self, progress: Progress) -> str:
        """Writes `model/` and says what it holds."""
        if not self.at_end:
            return "not exported (checkpoint.at_end = false)"
        with self.report.phase("save"):
            return self.saver.export(progress)
