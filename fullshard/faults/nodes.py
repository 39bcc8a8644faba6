"""The launchers of all nodes, which show each other that they are alive, and tell each other how their ranks ended.

One thread talks to the store on node 0: where the network is cut, its calls do not return, and the launcher must still
end. A second one watches what the first one hears. Must not know how nodes meet, nor what follows from an end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from fullshard.errors import EXIT_NUMERICAL, EXIT_PREEMPTED, EXIT_USER

_EVERY_S, _LINGER_S = 0.3, 5.0
_SILENT_S = 10.0
"""A node that has not been heard of for so long is gone."""
_ALONE_S = 10.0
"""Ranks that have lost those of another node may take so long to notice it and to write their crash folder."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of one node ended."""

    node: int
    host: str
    code: int
    rank: int | None = None
    """The rank to blame."""
    why: str = ""
    """What happened, to follow "rank 1 ", or "node 1 " for a node that is lost."""
    step: int | None = None
    """The step that the rank was in; None: it had not come to the first one."""
    victim: bool = False
    """Its ranks only lost others."""
    stopped: bool = False
    """By a signal to its launcher."""
    lost: bool = False
    """The node itself does not answer."""
    devices: int = 1
    """Ranks that it can start next time."""

    @property
    def is_final(self) -> bool:
        """Whether the code has a meaning that no restart changes."""
        return self.stopped or self.code in (EXIT_USER, EXIT_NUMERICAL, EXIT_PREEMPTED)


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


@dataclass
class _Round:
    """One attempt, as the thread sees it."""

    number: int
    mine: Ended | None = None
    ends: dict[int, Ended] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    """Nodes that know how all others ended."""
    told: bool = False
    """The others can read how this node ended, and that it knows of all others."""
    alone_since: float | None = None
    stopped_here: bool = False


class Nodes:
    """The nodes as the launcher of one of them sees them. `stop` kills the ranks of this node."""

    def __init__(
        self,
        store: Store,
        me: int,
        members: Sequence[Mapping[str, Any]],
        *,
        timeout_s: float,
        stop: Callable[[], None],
    ) -> None:
        self._store, self._me, self._members, self._timeout_s, self._stop = store, me, members, timeout_s, stop
        store.set_timeout(timedelta(seconds=timeout_s))  # the nodes left it what remained of their time to meet
        now = time.monotonic()
        self._others = [node for node in range(len(members)) if node != me]
        self._heard: dict[int, tuple[bytes, float]] = {node: (b"", now) for node in self._others}
        self._answered = now
        self._round = _Round(0)
        self._closed = threading.Event()
        for target in (self._talk, self._watch):
            threading.Thread(target=target, name="nodes", daemon=True).start()

    def begin(self, attempt: int) -> None:
        """A new attempt: ends of the one before no longer count."""
        self._round = _Round(attempt)

    @property
    def stopped_here(self) -> bool:
        """Whether the ranks of this node were killed, because those of another had failed."""
        return self._round.stopped_here

    def close(self) -> None:
        self._closed.set()

    def exchange(self, mine: Ended) -> list[Ended]:
        """How the ranks of every node ended, once all have said so or are lost."""
        this, begun = self._round, time.monotonic()
        this.mine = mine
        while missing := [node for node in self._others if node not in this.ends]:
            late = time.monotonic() - begun > self._timeout_s + _ALONE_S
            if late or all(self.silence(node) > _SILENT_S for node in missing):
                break
            time.sleep(0.05)
        ends = {self._me: mine, **this.ends, **{node: self._lost(node) for node in missing}}
        # The store ends with node 0, which therefore waits a moment until the others have read.
        deadline = time.monotonic() + _LINGER_S
        while self._me == 0 and set(self._others) - {*missing} - this.read and time.monotonic() < deadline:
            time.sleep(0.05)
        # The others wait until node 0 can read of them: it would take a launcher that ends too soon for a lost node.
        while self._me and not missing and not this.told and self.silence(0) < _SILENT_S:
            time.sleep(0.05)
        return [ends[node] for node in sorted(ends)]

    def silence(self, node: int) -> float:
        """Seconds since a node was last heard of. All talk through node 0."""
        heard = self._answered if node == 0 else self._heard[node][1]
        return time.monotonic() - heard

    def _lost(self, node: int) -> Ended:
        seconds = self.silence(node)
        why = (
            f"has not answered for {seconds:.0f} s: it has ended, or the network between the nodes is cut"
            if seconds > _SILENT_S
            else "has not ended its ranks in time"
        )
        return Ended(node, str(self._members[node]["host"]), 1, why=why, lost=True)

    def _talk(self) -> None:
        beat = 0
        while not self._closed.wait(_EVERY_S):
            beat += 1
            try:
                self._turn(self._round, str(beat))
            except Exception:
                # Node 0 is gone, or an answer was cut short. The launcher sees that nothing is heard any more.
                return
            self._answered = time.monotonic()

    def _turn(self, this: _Round, beat: str) -> None:
        store, number = self._store, this.number
        store.set(f"alive-{self._me}", beat)
        if this.mine is not None:
            store.set(f"end-{number}-{self._me}", json.dumps(asdict(this.mine)))
        for node in self._others:
            if store.check([f"alive-{node}"]) and (heard := store.get(f"alive-{node}")) != self._heard[node][0]:
                self._heard[node] = (heard, time.monotonic())
            if node not in this.ends and store.check([key := f"end-{number}-{node}"]):
                this.ends[node] = Ended(**json.loads(store.get(key)))
            if store.check([f"read-{number}-{node}"]):
                this.read.add(node)
        if this.mine is not None and len(this.ends) == len(self._others):
            store.set(f"read-{number}-{self._me}", "yes")
            this.told = True

    def _watch(self) -> None:
        """Ends the ranks of this node if those of another have failed, or if it is gone. They cannot continue, and some
        would wait for it much longer than `topology.timeout_s`: a save may take half an hour."""
        while not self._closed.wait(_EVERY_S):
            this, now = self._round, time.monotonic()
            # Ranks that a signal stopped have saved together with ours.
            failed = any(end.code not in (0, EXIT_PREEMPTED) and not end.stopped for end in this.ends.copy().values())
            if this.mine is not None or not (failed or max(map(self.silence, self._others)) > self._timeout_s):
                this.alone_since = None
                continue
            this.alone_since = this.alone_since or now
            if now - this.alone_since > _ALONE_S:
                this.stopped_here, this.alone_since = True, now
                self._stop()
