"""Numbers and tables for people: counts, durations, sizes, rates, two aligned columns.

Pure functions from numbers to text. Must not know where the text goes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text without escape sequences and control characters, which models and libraries may emit."""
    return _CONTROL.sub("", text)


def count(number: int) -> str:
    """`8,192,000,000 (8.19B)`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number:,} ({number / size:.2f}{unit})"
    return f"{number:,}"


def short(number: float) -> str:
    """`45.0k`: three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{2 if number < 10 * size else 1 if number < 100 * size else 0}f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == 0 else f"{number:.2f}"


def duration(seconds: float) -> str:
    """`02:34`, `3:45:00` or `2d 03:45:00`."""
    minutes, s = divmod(int(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}:{m:02d}:{s:02d}"
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m:02d}:{s:02d}"


def size(num_bytes: float) -> str:
    """`1.2 GiB`."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def rate(seconds_per_step: float | None) -> str:
    """`4.04it/s`, or `15.32s/it` if slower than one per second; `?it/s` before the first measurement."""
    if not seconds_per_step:
        return "?it/s"
    return f"{seconds_per_step:.2f}s/it" if seconds_per_step > 1 else f"{1 / seconds_per_step:.2f}it/s"


def loss(value: float) -> str:
    """Four decimals, or scientific notation if the value is too small for them."""
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


LARGEST = 5e34
"""Just below e^80, where perplexity is cut off."""
_TOO_LARGE = f"> {LARGEST:.0e}".replace("e+", "e")


def number(value: float) -> str:
    """A validation number: `0.1234`, `2.1`, `456,809`, and `> 5e34` for what is too large to mean anything."""
    if value > LARGEST:
        return _TOO_LARGE
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.5g}"


def precise(value: float) -> str:
    """The same with six decimals."""
    return _TOO_LARGE if value > LARGEST else f"{value:.6f}"


def title(metric: str) -> str:
    """`Token Accuracy` for token_accuracy."""
    return metric.replace("_", " ").title()


def columns(rows: Sequence[tuple[str, str]], *, width: int) -> list[tuple[str, str]]:
    """Two aligned columns as (left, right) pieces of lines; long values are wrapped."""
    left = max((len(key) for key, _ in rows), default=0) + 2
    lines: list[tuple[str, str]] = []
    for key, value in rows:
        room = max(width - left - 2, 20)
        wrapped = [
            piece
            for line in plain(value).splitlines()
            for piece in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
        ] or [""]
        lines += [(f"  {key if i == 0 else '':<{left}}", piece) for i, piece in enumerate(wrapped)]
    return lines
