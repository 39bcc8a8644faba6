"""Where the members of a run meet: nodes before they start ranks, ranks before they connect to each other.

Each registers in a store and waits for the others. It reports which are missing, which registered twice, and which were
started with different options. One timeout covers the whole wait. Must not know models, data or what the members do
afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fullshard.errors import AbsentError, SetupError

if TYPE_CHECKING:
    from torch.distributed import Store

Facts = dict[str, Any]
"""What a member registers: `host`, `process`, `options` that must be the same everywhere, and more."""
_EVERY_S, _LINGER_S = 0.2, 10.0


@dataclass
class Meeting:
    """One member's wait for the others."""

    noun: str
    """node or rank."""
    me: int
    size: int
    where: str
    """HOST:PORT, as the user knows it."""
    timeout_s: float
    prefix: str
    """Of this meeting's keys in the store."""
    advice: str = ""
    """What to do when a member does not arrive."""
    claim: str | None = None
    """The option whose value must be unique, such as --node-rank; None: not checked."""
    first_line_s: float = 5.0
    silent: bool = False
    begun: float = field(default_factory=time.monotonic)
    said_at: float = 0.0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.timeout_s - self.waited_s, 1.0))

    def connect(self, host: str, port: int, *, serve: bool) -> Store:
        """The store at the meeting point. The server opens it; the others wait until it is open."""
        from torch.distributed import PrefixStore, TCPStore

        if not serve:
            self._await_server(host, port)
        store = TCPStore(host, port, is_master=serve, timeout=self.left, wait_for_workers=False, multi_tenant=serve)
        return PrefixStore(self.prefix, store)

    def gather(self, store: Store, facts: Facts) -> list[Facts]:
        """What every member registered, in order, once all have arrived."""
        if self.claim and store.add(f"claims-{self.me}", 1) > 1:
            raise self.refuse_double(store, facts)
        store.set(f"member-{self.me}", json.dumps(facts))
        present: dict[int, Facts] = {}
        while True:
            missing = [other for other in range(self.size) if other not in present]
            present |= {
                other: json.loads(store.get(key)) for other in missing if store.check([key := f"member-{other}"])
            }
            if problem := self._difference(present):
                store.set("problem", problem)
            if store.check(["problem"]):  # that any member has found
                self._let_all_read(store)
                raise SetupError(store.get("problem").decode())
            if len(present) == self.size:
                return [present[other] for other in range(self.size)]
            self.wait_for([other for other in missing if other not in present])
            time.sleep(_EVERY_S)

    def refuse_double(self, store: Store, facts: Facts) -> SetupError:
        """The error for a member number that is taken."""
        first = _whose(json.loads(store.get(f"member-{self.me}")))
        problem = (
            f"Two {self.noun}s claim {self.claim} {self.me}: {first}, and {_whose(facts)}. Give every {self.noun} its "
            f"own number, 0 to {self.size - 1}."
        )
        store.set("problem", problem)
        return SetupError(problem)

    def _await_server(self, host: str, port: int) -> None:
        while True:
            try:
                socket.create_connection((host, port), timeout=min(self.left.total_seconds(), 5.0)).close()
                return
            except OSError as error:
                self.wait_for([0], reason=f": {error.strerror or error}")
            time.sleep(_EVERY_S)

    def wait_for(self, missing: list[int], reason: str = "") -> None:
        """Reports which members are missing, at doubling intervals; raises when the time is over."""
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        who = f"{self.noun}{'s' if len(missing) > 1 else ''} {names} of {self.size}"
        if self.waited_s > self.timeout_s:
            raise AbsentError(
                f"{self.noun.capitalize()} {self.me} waited topology.timeout_s = {self.timeout_s:g} s at {self.where} "
                f"for {who}{reason}. {self.advice}"
            )
        if self.waited_s > max(2 * self.said_at, self.first_line_s):
            line = f"Waiting for {who} at {self.where} ({self.waited_s:.0f} s of {self.timeout_s:g} s){reason}."
            if not self.silent:
                sys.stderr.write(f"{line}\n" if self.said_at else f"{line} {self.advice}\n")
            self.said_at = self.waited_s

    def _difference(self, present: Mapping[int, Facts]) -> str | None:
        """What members disagree on. Every member compares all that are present: the last one to arrive may complete the
        meeting before another has found the problem."""
        first = present.get(0, {"options": {}})
        for other, facts in sorted(present.items()):
            for option, value in first["options"].items():
                if (own := facts["options"].get(option)) != value:
                    return (
                        f"The {self.noun}s disagree: {self.noun} 0 ({_whose(first)}) was started with {option} "
                        f"{value}, {self.noun} {other} ({_whose(facts)}) with {option} {own}. Give every {self.noun} "
                        "the same."
                    )
        return None

    def _let_all_read(self, store: Store) -> None:
        """The store ends with the member that serves it, which therefore waits a moment until the others have read."""
        store.add("readers", 1)
        deadline = time.monotonic() + _LINGER_S
        while self.me == 0 and time.monotonic() < deadline:
            present = sum(1 for other in range(self.size) if store.check([f"member-{other}"]))
            if store.add("readers", 0) >= present:
                break
            time.sleep(_EVERY_S)


def facts(*, options: Mapping[str, Any], **more: Any) -> Facts:
    """What this member registers."""
    return {"host": socket.gethostname(), "process": os.getpid(), "options": dict(options), **more}


def _whose(facts: Facts) -> str:
    return f"host {facts['host']}, process {facts['process']}"
