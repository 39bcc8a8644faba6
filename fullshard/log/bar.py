"""A progress bar as one line of text, and the pace behind it.

`Training:  45%|████▌     | 281/625 [01:10<01:26, 4.04it/s, loss=0.1234]`
Must not know terminals, files or where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fullshard.formatting import readable

Clock = Callable[[], float]


class Pace:
    """Seconds per step, measured in this process: the first step is warm-up and left out, pauses between steps count.

    There is no estimate before the second step is done.
    """

    def __init__(self, total: int, *, clock: Clock, done: int = 0) -> None:
        self.total, self.done = total, done
        self._clock = clock
        self._measured = -1
        self._began = self._first = self._last = clock()

    def step(self) -> None:
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
        return "?" if self.left is None else readable.duration(self.left)


def line(
    label: str, pace: Pace, *, loss_name: str, loss: float | None, width: int, drawn: int = 40, ascii: bool = False
) -> str:
    """The bar in one line of at most `width` columns; of the bar itself `drawn` or fewer are shown."""
    share = min(pace.done / pace.total, 1.0) if pace.total else 1.0
    # A bar of one step has no second step to measure; once it is full, its elapsed time is used.
    seconds = pace.seconds_per_step or (pace.elapsed / pace.done if 0 < pace.total <= pace.done else None)
    shown = "" if loss is None else f", {loss_name}={readable.loss(loss)}"
    head = f"{label}: {int(100 * share):3d}%"
    counts = f"{pace.done:>{len(str(pace.total))}}/{pace.total}"
    tail = f" {counts} [{readable.duration(pace.elapsed)}<{pace.left_text()}, {readable.rate(seconds)}{shown}]"
    room = width - len(head) - len(tail) - 2
    return f"{head}|{_drawn(share, min(room, drawn), ascii)}|{tail}" if room >= 4 else f"{head}{tail}"


def _drawn(share: float, width: int, ascii: bool) -> str:
    if ascii:
        return ("#" * int(share * width)).ljust(width)
    full, eighths = divmod(int(share * width * 8), 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()).ljust(width)


def step_line(
    record: Mapping[str, Any], run: Pace | None, speeds: Mapping[str, str], *, width: int | None = None
) -> str:
    """One logged step in fixed columns: step, loss, lr, norm, speeds, memory, GPU, MFU, data wait, padding, time left.

    `speeds` are the quantities that are shown per second, each with its short name. With a `width` the last columns are
    dropped as needed, and the time left, which the bar shows, is always dropped."""
    step, total = record["step"], run.total if run else None
    parts = [f"step {step:>{len(str(total))}}/{total}" if total else f"step {step:>6}"]
    parts.append(f"loss {_fixed(record['loss'], readable.loss(record['loss'])):>7}")
    parts.append(f"lr {record['lr']:.2e}")
    if (norm := record.get("grad_norm")) is not None:
        parts.append(f"norm {_fixed(norm, f'{norm:.3f}'):>7}")
    parts += [f"{text:>{columns}}" for text, columns in _speed(record, speeds)]
    wait = record.get("data_wait")
    parts.append(f"data wait {'-' if wait is None else format(wait, '.1%'):>5}")
    if (padding := record.get("padding")) is not None:
        parts.append(f"padding {padding:4.0%}")
    if run is not None and width is None:
        parts.append(f"run ends in {run.left_text()}")
    while width is not None and len(parts) > 2 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def _fixed(value: float, text: str) -> str:
    """The text of a number, or a short form if it would break the columns."""
    return text if len(text) <= 7 else f"{value:.1e}"


def status_line(record: Mapping[str, Any], run: Pace, speeds: Mapping[str, str]) -> str:
    """The run as a whole, for the line under a moving bar; the bar shows the loss."""
    parts = [f"run {run.done}/{run.total}, ends in {run.left_text()}"]
    if record:
        parts.append(f"lr {record['lr']:.2e}")
        parts += [text for text, _ in _speed(record, speeds)]
    return " · ".join(parts)


def _speed(record: Mapping[str, Any], speeds: Mapping[str, str]) -> list[tuple[str, int]]:
    rates = {short: record.get(f"{name}_per_second") for name, short in speeds.items()}
    parts = [("-" if rate is None else f"{readable.short(rate)} {short}/s", 11) for short, rate in rates.items()]
    if record.get("memory_gib") is not None:
        parts.append((f"{record['memory_gib']:.1f} GiB", 9))
    if record.get("host_memory_gib") not in (None, record.get("memory_gib")):  # on a CPU both are the same
        parts.append((f"host {record['host_memory_gib']:.1f} GiB", 14))
    if record.get("gpu_utilisation") is not None:
        parts.append((f"GPU {record['gpu_utilisation']:.0%}", 8))
    if record.get("mfu") is not None:
        parts.append((f"MFU {record['mfu']:.1%}", 9))
    return parts
