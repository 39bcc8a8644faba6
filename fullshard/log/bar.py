"""A progress bar as one line of text, and the pace behind it.

`Training:  45%|████▌     | 281/625 [01:10<01:26, 4.04it/s, loss=0.1234]`
Must not know terminals, files or where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable

from fullshard.log import words

Clock = Callable[[], float]


class Pace:
    """Seconds per step, measured in this process: the first step is warm-up and left out, pauses between steps count.

    Nothing is promised before the second step is done.
    """

    def __init__(self, total: int, *, clock: Clock, done: int = 0) -> None:
        self.total, self.done = total, done
        self._clock = clock
        self._measured = -1
        self._began = self._first = self._last = clock()

    def step(self) -> None:
        """One more step is done."""
        self.done += 1
        self._measured += 1
        self._last = self._clock()
        if self._measured == 0:
            self._first = self._last

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def seconds_per_step(self) -> float | None:
        return (self._last - self._first) / self._measured if self._measured > 0 else None

    @property
    def left(self) -> float | None:
        """Seconds until `total`, at the pace so far."""
        if self.done >= self.total:
            return 0.0
        return None if self.seconds_per_step is None else (self.total - self.done) * self.seconds_per_step

    def left_text(self) -> str:
        return "?" if self.left is None else words.duration(self.left)


def line(label: str, pace: Pace, *, loss_name: str, loss: float | None, width: int, ascii_only: bool = False) -> str:
    """The bar in one line of at most `width` columns; the drawn part goes first when there is no room."""
    share = min(pace.done / pace.total, 1.0) if pace.total else 1.0
    # A bar of one step has no second step to measure; once it is full, its own time is the truth.
    seconds = pace.seconds_per_step or (pace.elapsed / pace.done if 0 < pace.total <= pace.done else None)
    shown = "" if loss is None else f", {loss_name}={words.loss(loss)}"
    head = f"{label}: {int(100 * share):3d}%"
    counts = f"{pace.done:>{len(str(pace.total))}}/{pace.total}"
    tail = f" {counts} [{words.duration(pace.elapsed)}<{pace.left_text()}, {words.rate(seconds)}{shown}]"
    room = width - len(head) - len(tail) - 2
    return f"{head}|{_drawn(share, min(room, 40), ascii_only)}|{tail}" if room >= 4 else f"{head}{tail}"


def _drawn(share: float, width: int, ascii_only: bool) -> str:
    if ascii_only:
        return ("#" * int(share * width)).ljust(width)
    full, eighths = divmod(int(share * width * 8), 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()).ljust(width)
