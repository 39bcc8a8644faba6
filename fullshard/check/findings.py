"""The findings of a check: ok, warning or error, each with where it is, what is allowed, and what to do.

Must not know what is checked, nor import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fullshard.errors import FullshardError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    level: Level
    check: str
    """What was checked, in one to three words: `disk space`."""
    text: str
    """What was found; for a warning or an error, also where, and what is allowed."""
    remedy: str = ""
    """What to do about it; never empty for a warning or an error."""

    def sentence(self) -> str:
        """The finding in one line."""
        return f"{self.text} {self.remedy}".strip()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(check: str, text: str) -> Finding:
    return Finding("ok", check, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding("warning", check, text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    return Finding("error", check, text, remedy)


def of(check: str, mistake: FullshardError) -> Finding:
    """An error that another part of the package raised; its last sentence says what to do."""
    return Finding("error", check, str(mistake))


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of one check; an error it raises is a finding too, so that later checks still run."""
    try:
        yield from look()
    except FullshardError as mistake:
        yield of(check, mistake)
