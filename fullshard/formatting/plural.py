"""A number with its noun: `1 step`, `2,500 records`, `1.5 epochs`, `3 batches`.

The only place that makes plurals. Must not know what is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def counted(number: float, noun: str) -> str:
    """`1 record`, `2,500 records`; the last word of `noun` takes the plural."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.4g}" if number < 1000 else f"{number:,.0f}"
    return f"{shown} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """The noun as it follows a number."""
    if number == 1:
        return noun
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if re.search(r"(s|x|tch|sh)$", noun) else f"{noun}s"


def were(number: int) -> str:
    return "was" if number == 1 else "were"


def join_words(words: Iterable[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    *rest, final = words
    return f"{', '.join(rest)} {last} {final}" if rest else final
