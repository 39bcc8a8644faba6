"""Follows the verdicts on the steps of a run: counts skipped updates, asks for a rollback, or stops the run.

Every rank reads the same numbers, so every rank does the same. What is counted is in `Progress.guard`, so that a
checkpoint keeps it and a resumed run goes on as one that never stopped. Must not know how anything is judged, saved or
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from fullshard.contracts.progress import Progress
from fullshard.errors import NumericalError
from fullshard.faults.guard import Guard
from fullshard.formatting.plural import counted

LEFT_OUT = "left_out.jsonl"
"""In the run folder: the samples of each step that a rollback leaves out."""


@dataclass
class GoBack(Exception):  # noqa: N818
    """Asks the loop to go back to a checkpoint; every rank raises it in the same step."""

    step: int
    """The bad step."""
    what: str


def kept_windows(start: int, left_out: Collection[int]) -> Iterator[int]:
    """The numbers of the windows of data from step `start` on; a window that is left out is no step."""
    return islice((number for number in count() if number not in left_out), start, None)


@dataclass
class Watch:
    """What one run has left out so far, and what it does about the next bad step."""

    settings: Guard
    progress: Progress
    folder: Path
    is_main: bool
    warn: Callable[[str], None]
    event: Callable[..., None]
    """Writes an event to metrics.jsonl."""
    log_sample_ids: bool
    recent: Callable[[], list[float]]
    """The losses that the next step is compared with."""
    recall: Callable[[Sequence[float]], None]
    """Puts those of a checkpoint in their place."""
    saves: Any
    """The saves of the run."""
    collectives: Any
    """`sum_over_ranks` and `gather_objects`."""
    _last: tuple[int, Any, Any] | None = field(default=None, init=False)
    """The last step: its number, its window and its result."""
    _heeded: bool = field(default=True, init=False)
    """Its verdict was followed."""

    @property
    def left_out(self) -> frozenset[int]:
        """The windows of data that rollbacks have removed."""
        return frozenset(self.progress.guard.get("left_out", ()))

    def until_done(self, train: Callable[[], str]) -> str:
        """Trains; if a step asks for it, goes back to a checkpoint and trains again. Returns why training ended."""
        while True:
            try:
                stopped = train()
                self.heed()
                return stopped
            except GoBack as bad:
                self._go_back(bad)

    def trained(self, window: Any, result: Any) -> None:
        """A step was launched, and its verdict will come."""
        if self.log_sample_ids:
            self.event("samples", self.progress.step, sample_ids=self._ids(window))
        self._last, self._heeded = (self.progress.step, window, result), False

    def heed(self) -> list[bool]:
        """Follows the verdict on the last step, once; returns which flags were raised. The host waits for that step."""
        if self._last is None:
            return [False] * 4
        step, _, result = self._last
        *flags, not_finite, deviation, norm = result.flags.read()
        if not self._heeded:
            self._heeded = True
            if not_finite or deviation:
                loss = float(self.collectives.sum_over_ranks(result.loss.clone()))
                self._bad(step, deviation=deviation, loss=loss, norm=norm)
            elif self._count("in_a_row"):
                self.progress.guard["in_a_row"] = 0
        return [number > 0 for number in flags]

    def counts(self, scaler: Any) -> dict[str, float]:
        """For a logged step: the loss scale, steps without an update, rollbacks; what cannot be is left out."""
        found = {"skipped_steps": self._count("skipped") + self._overflows, "rollbacks": self._count("rollbacks")}
        policies = {self.settings.not_finite, self.settings.spike}
        shown = {"skipped_steps": scaler or policies & {"skip", "rollback"}, "rollbacks": "rollback" in policies}
        numbers: dict[str, float] = {name: number for name, number in found.items() if number or shown[name]}
        return {"loss_scale": scaler.get_scale(), **numbers} if scaler else numbers

    @property
    def _overflows(self) -> int:
        """Steps that the loss scaler skipped in fp16."""
        return self.progress.step - self.progress.schedule_step

    def summary(self) -> list[tuple[str, str]]:
        """For the end of a run."""
        steps, overflows = self.progress.step, self._overflows
        skipped, rollbacks = self._count("skipped"), self._count("rollbacks")
        rows = {
            f"{overflows:,} of {steps:,} steps overflowed in fp16 and did not update the weights": overflows,
            f"{skipped:,} of {steps:,} steps had NaN, Inf or a spike, and the guard left out their update": skipped,
        }
        found = [("skipped", line) for line, number in rows.items() if number]
        back = f"{counted(rollbacks, 'time')}; the samples that were left out are in {self.folder / LEFT_OUT}"
        return [*found, ("rolled back", back)] if rollbacks else found

    def remember(self) -> None:
        """Call before a save."""
        if self.settings.spike:
            self.progress.guard["losses"] = self.recent()

    def _bad(self, step: int, *, deviation: float, loss: float, norm: float) -> None:
        """A step that was left out. Raises if the run must stop or go back."""
        cause, policy = "not_finite", self.settings.not_finite
        what = f"At step {step} the loss is {loss:.6g} and the gradient norm {norm:.6g}; both must be finite."
        if deviation:
            cause, policy = "spike", self.settings.spike or "stop"
            above = f"{deviation:.3g} robust deviations above the median of the last {self.settings.window:,}"
            what = f"At step {step} the loss is {loss:.6g}, {above}."
        if policy == "stop":
            raise NumericalError(f"{what} {_advice(cause)}{_SKIPPING[cause]}")
        # A save in the background may still be under way; going back waits for it.
        saved = self.saves.step >= 0 or self.saves.saver.newest_checkpoint is not None
        if policy == "rollback" and saved:
            raise GoBack(step, what)
        without = " There is no checkpoint to go back to yet." if policy == "rollback" else ""
        self._skip(step, what + without, cause=cause, loss=loss, grad_norm=norm)

    def _skip(self, step: int, what: str, *, cause: str, **numbers: float) -> None:
        guard, limit = self.progress.guard, self.settings.limit
        guard["in_a_row"] = in_a_row = self._count("in_a_row") + 1
        guard["skipped"] = self._count("skipped") + 1
        if in_a_row > limit:
            raise NumericalError(
                f"{what} {counted(in_a_row, 'update')} in a row would be skipped, and guard.limit = {limit} allows "
                f"{limit}: the weights do not recover. {_advice(cause)}"
            )
        self.event("skipped", step, cause=cause, **numbers)
        self.warn(f"{what} The update is skipped ({in_a_row} in a row, {limit} allowed).")

    def _go_back(self, bad: GoBack) -> None:
        """Back to the newest checkpoint; the samples of the bad step are left out from then on."""
        assert self._last is not None
        guard, window = self.progress.guard, self._last[1]
        self._last = None
        sample_ids = sorted(self._ids(window))
        self.saves.settle()
        vars(self.progress).update(vars(self.saves.saver.restore_newest()))
        self.saves.step, meters = self.progress.step, self.saves.report.meters
        meters.samples, meters.tokens = self.progress.samples, self.progress.tokens
        now, at = self.progress.guard, self.progress.step
        times = guard["times"] + 1 if guard.get("back_at") == at else 1
        now |= {"rollbacks": guard.get("rollbacks", 0) + 1, "back_at": at, "times": times}
        now["left_out"] = sorted({*guard.get("left_out", ()), window.step})
        self.recall(now.get("losses", ()))
        if times > self.settings.limit:
            raise NumericalError(
                f"{bad.what} It would be rollback {times} to step {at}, and guard.limit = {self.settings.limit} allows "
                f"{self.settings.limit}: leaving out samples does not help. {_advice('not_finite')}"
            )
        self._write({"step": bad.step, "window": window.step, "sample_ids": sample_ids})
        # At the step of the checkpoint, so that a run resumed from there keeps it.
        self.event("rollback", at, bad_step=bad.step, cause=bad.what, sample_ids=sample_ids)
        self.warn(
            f"{bad.what} Back to step {at}; from now on the {counted(len(sample_ids), 'sample')} of that step are left "
            f"out ({LEFT_OUT})."
        )

    def _ids(self, window: Any) -> list[int]:
        return [i for part in self.collectives.gather_objects(window.sample_ids()) for i in part]

    def _count(self, name: str) -> int:
        return int(self.progress.guard.get(name, 0))

    def _write(self, record: dict[str, Any]) -> None:
        path = self.folder / LEFT_OUT
        if self.is_main:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            others = [line for line in lines if json.loads(line)["window"] != record["window"]]  # rolled back again
            path.write_text("".join(f"{line}\n" for line in [*others, json.dumps(record)]), encoding="utf-8")


def _advice(cause: str) -> str:
    if cause == "spike":
        return "Lower optimizer.lr or optimizer.clip."
    return "Lower optimizer.lr, lengthen schedule.warmup, or look at the samples of that step (log.sample_ids)."


_SKIPPING = {
    "spike": " Or continue without that step: guard.spike: skip or rollback.",
    "not_finite": " Or continue without that step: guard.not_finite: skip.",
}


__all__ = ["LEFT_OUT", "GoBack", "Watch", "kept_windows"]
