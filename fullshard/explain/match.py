"""Which known errors a text contains, and which of them to read first.

One rule gives the order: cause, general cause, consequence, remark; among equals the one that comes first in the text.
Must not know where the text comes from or how the answer is shown, nor import torch."""

from __future__ import annotations

import re
import traceback
import typing
from dataclasses import dataclass

from fullshard.explain.record import KnownError, Role, entries
from fullshard.formatting.readable import plain

_ORDER = typing.get_args(Role)
_SHOWN = 160


@dataclass(frozen=True)
class Match:
    """A known error found in a text."""

    entry: KnownError
    found: str
    """The words that matched."""
    position: int
    """Where they begin."""


def explain(text: str) -> list[Match]:
    """The known errors in a text (a message, a traceback, a whole log), the one to read first in front."""
    # A terminal or a mail client breaks lines anywhere.
    flat = re.sub(r"\s+", " ", plain(text.replace("\r", "\n")))
    found = [match for entry in entries() if (match := _find(entry, flat)) is not None]
    return sorted(found, key=lambda match: (_ORDER.index(match.entry.role), match.position))


def explain_exception(error: BaseException) -> list[Match]:
    """The known errors in an exception, its causes and its traceback."""
    return explain("".join(traceback.format_exception(error)))


def _find(entry: KnownError, text: str) -> Match | None:
    hits = [hit for pattern in entry.patterns if (hit := re.search(pattern, text))]
    if not hits:
        return None
    first = min(hits, key=re.Match.start)
    words = first.group()
    return Match(entry, words if len(words) <= _SHOWN else words[:_SHOWN] + " ...", first.start())
