"""A node that comes back before the run that it was part of has ended: node 0 of that run may still save.

The store of that run tells a node that was replaced from two nodes with one number: there the launcher of every node
shows that it is alive. Must not know how nodes meet.
"""

from __future__ import annotations

import time
from typing import Protocol

from fullshard.faults.nodes import Store

_EVERY_S = 0.2
_ALIVE = 3
"""So many different signs of life are somebody's who is alive: the last one of a launcher that ends may come late."""


class Meeting(Protocol):
    """What is used of a wait for the others."""

    me: int
    size: int
    begun: float
    said_at: float
    first_line_s: float
    advice: str

    def wait_for(self, missing: list[int], reason: str = "") -> None: ...


def awaited_its_end(meeting: Meeting, store: Store, talk: Store) -> bool:
    """Whether there was a run here whose own node `me` has gone, and which has ended since. False: the number is free,
    or somebody who is alive has it. `store` is where the nodes met, and `talk` where they show that they are alive."""
    try:
        # Before all have met nobody shows that he is alive: there a number that is taken is refused.
        if not store.check([f"claims-{meeting.me}", *(f"member-{node}" for node in range(meeting.size))]):
            return False
        meeting.begun, meeting.said_at, meeting.first_line_s = time.monotonic(), 0.0, 2.0
        meeting.advice = "Its node 0 ends when it has saved. If it hangs, end it there, or choose another port."
        seen = {_alive(talk, meeting.me)}
        while len(seen) < _ALIVE:
            meeting.wait_for([0], reason=": the run before still ends there")
            time.sleep(_EVERY_S)
            seen.add(_alive(talk, meeting.me))
        return False
    except RuntimeError:  # of torch's store: it has ended, with node 0
        return True


def _alive(talk: Store, me: int) -> bytes | None:
    """The sign of life that the launcher with this number gave last."""
    return talk.get(key) if talk.check([key := f"alive-{me}"]) else None
