"""The console: what rank 0 shows of a run, and the same in log.txt with time and rank.

On a terminal bars move in place; elsewhere there are plain lines and no control characters. A silent console (every
other rank) has the same methods and shows nothing; its warnings and errors still reach log.txt.
Must not know torch, the recipe or how numbers are made.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as Screen
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fullshard.contracts.progress import Steps
from fullshard.formatting import readable
from fullshard.log import bar as bars
from fullshard.log.bar import Clock, Pace

FILE_WIDTH = 100
"""Columns of what is laid out for a file."""
QUIET_S = 30.0
"""Without a terminal a bar prints a line after this time without other output."""
NOTEBOOK, REDRAW_S = "FULLSHARD_NOTEBOOK", 0.25
"""With this variable a bar is redrawn after a carriage return, which is all that a notebook understands."""


class Console:
    """Prints a run's lines. Texts are plain: markup is not interpreted."""

    def __init__(self, *, silent: bool = False, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self.silent, self.clock = silent, clock
        self.on_terminal = not silent and is_terminal(stream or sys.stdout)
        self.in_notebook = not (silent or self.on_terminal) and NOTEBOOK in os.environ
        self._drawn = 0
        """Columns of the bar that a notebook shows in its last line."""
        self._screen = open_screen(stream, on_terminal=self.on_terminal)
        self._live: Live | None = None
        self._bars: list[Bar] = []
        self._run: Pace | None = None
        self._record: Mapping[str, Any] = {}
        self.speeds: Mapping[str, str] = {}
        """Quantities that a logged step shows per second, each with its short name."""
        self._log: TextIO | None = None
        self._rank, self._debug = 0, False
        self._early: list[str] = []
        """Lines for log.txt before it is open."""
        self._cautions: list[str] = []
        """Warnings for the header."""
        _mute_children(self)

    def open_log(self, path: Path, *, rank: int = 0, debug: bool = False) -> None:
        """Opens log.txt, or appends to it; earlier lines are written first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rank, self._debug = rank, debug
        # One short write per line in append mode: lines of several ranks are not interleaved.
        self._log = path.open("a", encoding="utf-8", buffering=1)
        for text in self._early:
            self._write_down(text)
        self._early.clear()

    def close(self) -> None:
        """Removes bars and closes log.txt."""
        for open_bar in reversed(self._bars):
            self._close_bar(open_bar)
        for text in self._cautions:
            self.warn(text)
        self._cautions.clear()
        self._log, log = None, self._log
        try:
            if log is not None:
                log.close()
        except OSError as error:
            self._lost_log(error)

    def say(self, text: str = "") -> None:
        self._emit(text)

    def whole(self, text: str) -> None:
        """A line that is never wrapped, so that it can be copied."""
        self._emit(text, whole=True)

    def note(self, text: str) -> None:
        """Something secondary."""
        self._emit(text, style="dim")

    def warn(self, text: str) -> None:
        """Printed by rank 0; logged by every rank."""
        self._emit(f"warning: {text}", style="yellow", every_rank=True)

    def warn_in_header(self, text: str) -> None:
        """A warning for the header, or printed at the end if no header follows. Other ranks log it."""
        if self.silent:
            self.warn(text)
        else:
            self._cautions.append(text)

    def library(self, origin: str, text: str, *, shown: bool = True) -> None:
        """A library's message; logged by every rank, and printed if `shown`."""
        if shown:
            self._emit(f"{origin}: {text}", style="dim", every_rank=True)
        else:
            self._write_down(readable.plain(f"{origin}: {text}"))

    def debug(self, text: str) -> None:
        """Written to log.txt only, and only with log.debug."""
        if self._debug:
            self._write_down(readable.plain(text))

    def header(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """The facts of the run in two columns; pending warnings come last."""
        self._emit(title, style="bold")
        self._table([*rows, *(("warning", text) for text in self._cautions)])
        self._cautions.clear()
        self._emit("")

    def parameter_summary(self, *, total: int, trainable: int, frozen: int) -> None:
        share = f", {trainable / total:.2%} of total" if frozen and total else ""
        self._emit("FSDP parameter summary:", style="bold")
        self._emit(f"  Total: {readable.count(total)}")
        self._emit(f"  Trainable: {readable.count(trainable)}{share}")
        self._emit(f"  Frozen: {readable.count(frozen)}")

    def run_begin(self, total_steps: int, *, done: int = 0) -> None:
        """Training starts at step `done`; from here on the run's time left is measured."""
        self._run = Pace(total_steps, clock=self.clock, done=done)

    def epoch_begin(self, epoch: int, epochs: float, lr: float, *, steps: Steps | None = None) -> None:
        """Epochs are counted from 1; `steps` says which of its steps are run."""
        part = f" ({steps.text()})" if steps and not steps.whole else ""
        self._emit("")
        self._emit(f"Started Training on: {epoch} / {epochs:g} epoch{part}", style="bold")
        self._emit(f"Current LR: {lr:.6e}")

    def training_bar(self, total_steps: int, *, done: int = 0) -> Bar:
        """The bar of one epoch, with the time left of the epoch and of the run."""
        return Bar(self, "Training", "loss", Pace(total_steps, clock=self.clock, done=done), run=self._run)

    def validation_bar(self, total: int) -> Bar:
        return Bar(self, "Validation", "val_loss", Pace(total, clock=self.clock))

    def epoch_end(
        self,
        epoch: int,
        *,
        seconds: float,
        train_loss: float,
        val_loss: float | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Only an epoch that ran to its last step is called completed. No seconds: it ended in an earlier run."""
        part = f": {steps.text()}" if steps and not steps.whole else ""
        ended = "completed" if steps is None or steps.end == steps.of else "is not complete"
        self._emit(f"Epoch {epoch} {ended}{part}" + (f" in {seconds:.2f} seconds" if seconds else ""))
        self._emit(f"Average Train Loss: {train_loss:.6f}")
        if val_loss is not None:
            self._emit(f"Average Val Loss: {readable.precise(val_loss)}")

    def validated(self, numbers: Mapping[str, float]) -> None:
        """What a validation found besides the loss, which the last lines of an epoch have."""
        if found := [f"{name} {readable.number(value)}" for name, value in numbers.items() if name != "loss"]:
            self._emit(f"Validation: {', '.join(found)}")

    def new_best(self, value: float, metric: str = "loss") -> None:
        self._emit(f">>>>>> New Best Val {readable.title(metric)}: {readable.precise(value)}", style="green")

    def first_value(self, value: float, metric: str = "loss") -> None:
        """The first validation of a run, which later ones are compared with."""
        self._emit(f"First Val {readable.title(metric)}: {readable.precise(value)} (the baseline)")

    def saved(self, path: Path, *, seconds: float, size_bytes: int) -> None:
        self._emit(f"Saved {path} ({readable.size(size_bytes)}) in {seconds:.1f} s", style="dim", whole=True)

    def finished(self, seconds: float, rows: Sequence[tuple[str, str]] = ()) -> None:
        """The end: how long it took, and where to find things."""
        self._emit("")
        self._emit("Training complete!", style="bold green")
        self._table([("time", readable.duration(seconds)), *rows])

    def next_steps(self, steps: Sequence[str]) -> None:
        self._emit("")
        self._emit("Next:", style="bold")
        for number, text in enumerate(steps, 1):
            self._emit(f"  {number}. {text}", whole=True)

    def _table(self, rows: Sequence[tuple[str, str]]) -> None:
        width = min(self._screen.width, 120) if self.on_terminal else FILE_WIDTH
        for left, right in readable.columns(rows, width=width):
            self._show(Text.assemble((left, "yellow" if left.strip() == "warning" else "dim"), right))
        for left, right in readable.columns(rows, width=FILE_WIDTH):
            if not self.silent:
                self._write_down(left + right)

    def _emit(self, text: str, *, style: str = "", every_rank: bool = False, whole: bool = False) -> None:
        text = readable.plain(text)
        self._show(Text(text, style=style), whole=whole)
        if every_rank or not self.silent:
            self._write_down(text)

    def _show(self, text: Text | str, *, whole: bool = False) -> None:
        if not self.silent:
            self._draw("")
            # Files are never wrapped. On a terminal prose wraps between words, `whole` lines do not.
            self._screen.print(text, soft_wrap=whole or not self.on_terminal)

    def _draw(self, line: str) -> None:
        """Redraws the last line of a notebook; the next text takes its place."""
        if self.in_notebook and (line or self._drawn):
            self._screen.file.write(f"\r{line.ljust(self._drawn)}" + ("" if line else "\r"))
            self._screen.file.flush()
            self._drawn = len(line)

    def _write_down(self, text: str) -> None:
        if self._log is None:
            self._early.append(text)
            return
        stamp = f"{datetime.now():%Y-%m-%d %H:%M:%S} rank {self._rank}  "
        try:
            self._log.write("".join(f"{stamp}{line}".rstrip() + "\n" for line in text.split("\n")))
        except OSError as error:
            # A full disk must not hide the run's own message about it.
            log, self._log = self._log, None
            with contextlib.suppress(OSError):
                log.close()
            self._lost_log(error)

    def _lost_log(self, error: OSError) -> None:
        self._show(Text(f"warning: log.txt cannot be written ({error.strerror}); it ends here.", style="yellow"))

    def _open_bar(self, new: Bar) -> None:
        self._bars.append(new)
        if self.on_terminal and self._live is None:
            self._live = Live(get_renderable=self._in_place, console=self._screen, transient=True, refresh_per_second=4)
            self._live.start()

    def _close_bar(self, old: Bar) -> None:
        if old not in self._bars:
            return
        self._bars.remove(old)
        if self._live is not None and not self._bars:
            self._live.stop()
            self._live = None
        self._show(Text(old.line(self._screen.width) if self.on_terminal else old.file_line()))
        if not self.silent:
            self._write_down(old.file_line())

    def _in_place(self) -> Group:
        width = self._screen.width
        lines: list[Text] = []
        for open_bar in list(self._bars):
            lines.append(Text(open_bar.line(width), no_wrap=True, overflow="crop"))
            if status := open_bar.status():
                lines.append(Text(status, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


class Bar:
    """A bar while it is open (`with console.training_bar(625) as bar`); its last state stays as a line."""

    def __init__(self, console: Console, label: str, loss_name: str, pace: Pace, *, run: Pace | None = None) -> None:
        self._console, self._label, self._loss_name = console, label, loss_name
        self._pace, self._run = pace, run
        self._loss: float | None = None
        self._shown_at = -1e9

    def __enter__(self) -> Bar:
        self._shown_at = self._console.clock()
        self._console._open_bar(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._console._close_bar(self)

    def advance(self, loss: float | None = None) -> None:
        """One step (or validation batch) is done; without a loss the last one stays visible."""
        self._loss = self._loss if loss is None else loss
        self._pace.step()
        if self._run is not None:
            self._run.step()
        console, now = self._console, self._console.clock()
        quiet, shown = (REDRAW_S, console._draw) if console.in_notebook else (QUIET_S, console._show)
        if not console.on_terminal and now - self._shown_at >= quiet and self._pace.done < self._pace.total:
            self._shown_at = now
            shown(self.file_line())

    def log(self, record: Mapping[str, Any]) -> None:
        """A logged step: a line in log.txt and on the screen, on a terminal above the bar and no wider than it is."""
        console = self._console
        console._record = record
        if not console.in_notebook:
            self._shown_at = console.clock()
            width = console._screen.width if console.on_terminal else None
            console._show(bars.step_line(record, self._run, console.speeds, width=width))
        if not console.silent:
            console._write_down(bars.step_line(record, self._run, console.speeds))

    def line(self, width: int, *, drawn: int = 40) -> str:
        """The bar as it is now, and the step of the run if the bar counts only a part of it."""
        ascii, run = not self._console._screen.encoding.lower().startswith("utf"), self._run
        note = f" run {run.done}/{run.total}" if run and run.total != self._pace.total else ""
        shown: dict[str, Any] = {"loss_name": self._loss_name, "loss": self._loss, "ascii": ascii}
        return bars.line(self._label, self._pace, width=width - len(note), drawn=drawn, **shown) + note

    def file_line(self) -> str:
        """The bar as it is now, for a file."""
        return self.line(FILE_WIDTH, drawn=10)

    def status(self) -> str:
        """The line under the bar: the run as a whole and the last logged step."""
        console = self._console
        return bars.status_line(console._record, self._run, console.speeds) if self._run else ""


def is_terminal(stream: TextIO) -> bool:
    """Whether lines can be redrawn in place: not in a file, whatever FORCE_COLOR says, nor after `!` in a notebook."""
    jupyter = "JPY_PARENT_PID" in os.environ  # of its kernels
    return stream.isatty() and not jupyter and os.environ.get("TERM") not in (None, "dumb", "unknown")


def open_screen(stream: TextIO | None, *, on_terminal: bool) -> Screen:
    """A screen on `stream`, or on the current stdout."""
    out = stream or sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        # A character that the stream cannot encode must not stop a run.
        out.reconfigure(errors="replace")
    return Screen(
        file=stream,
        force_terminal=on_terminal and out.isatty(),
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _mute_children(console: Console) -> None:
    """A forked data worker must not draw bars, nor wait for a lock that the drawing thread held at the fork."""
    reference = weakref.ref(console)

    def in_child() -> None:
        if (inherited := reference()) is not None:
            inherited.silent, inherited.on_terminal, inherited._live = True, False, None
            sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
            sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    os.register_at_fork(after_in_child=in_child)
