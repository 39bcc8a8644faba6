"""Tries again what another system refuses for a while, such as a store that is gone for half a minute.

Every rank counts the same tries, and looks at no clock of its own. Must not know what is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import TypeVar

from fullshard.errors import FullshardError

T = TypeVar("T")
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def patiently(act: Callable[[], T], *, for_s: float, say: Callable[[str], None]) -> T:
    """What `act` returns. Its error, the same on every rank, is raised after waits of `for_s` together."""
    for wait_s in (_WAITS_S[i] for i, _ in enumerate(takewhile(lambda total: total <= for_s, accumulate(_WAITS_S)))):
        try:
            return act()
        except FullshardError as error:
            say(f"{error} Trying again in {wait_s:g} s.")
            time.sleep(wait_s)
    return act()
