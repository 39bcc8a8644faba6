"""Tries again what another system refuses for a while, such as a store that is gone for half a minute, and says why a
run has waited.

Every rank counts the same tries: a clock only tells how long they took. Must not know what is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import TypeVar

from fullshard.errors import FullshardError

T = TypeVar("T")
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def patiently(act: Callable[[float], T], *, for_s: float, say: Callable[[str], None]) -> T:
    """What `act` returns; it gets the seconds that were lost so far. Its error, the same on every rank, is raised after
    waits of `for_s` together."""
    begun, lost_s = time.monotonic(), 0.0
    for wait_s in (_WAITS_S[i] for i, _ in enumerate(takewhile(lambda total: total <= for_s, accumulate(_WAITS_S)))):
        try:
            return act(lost_s)
        except FullshardError as error:
            say(f"{error} Trying again in {wait_s:g} s.")
            time.sleep(wait_s)
            lost_s = time.monotonic() - begun
    return act(lost_s)


def tell_wait(waited_s: float, lost_s: float, *, for_next: bool, say: Callable[[str], None]) -> None:
    """Says why training waited for a save. One that has to be over `for_next` one was slow, or the store was gone; that
    the end of a run waits for its last one is no news."""
    if waited_s > 1 and lost_s:
        say(f"Training waited {waited_s:.1f} s for the previous save, which lost {lost_s:.0f} s as the store was gone.")
    elif waited_s > 1 and for_next:
        say(f"Training waited {waited_s:.1f} s for the previous save: save less often.")
