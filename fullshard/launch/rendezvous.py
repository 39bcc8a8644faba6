"""Where the members of a run meet: nodes before they start ranks, ranks before they connect to each other.

Each registers in a store and waits for the others. It says which ones are missing, which came twice, and which were
started with other options. One timeout covers the whole wait. Must not know models, data or what the members do
afterwards."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fullshard.errors import SetupError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

Facts = dict[str, Any]
"""What a member registers: `host`, `process`, `options` that must be equal everywhere, and more."""
_LOOK_S = 0.2
_LINGER_S = 3.0


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
    advice: str = ""
    """What to do when a member does not arrive."""
    claim: str | None = None
    """The option whose value must be unique, such as --node-rank; None: not checked."""
    first_line_s: float = 5.0
    silent: bool = False
    begun: float = field(default_factory=time.monotonic)
    _said_at: float = 0.0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(self.timeout_s - self.waited_s, 1.0))

    def connect(self, host: str, port: int, *, serve: bool) -> TCPStore:
        """The store at the meeting point. The server opens it; the others wait until it is open."""
        from torch.distributed import TCPStore

        if not serve:
            self._await_server(host, port)
        return TCPStore(host, port, is_master=serve, timeout=self.left, wait_for_workers=False, multi_tenant=serve)

    def gather(self, store: Store, facts: Facts) -> list[Facts]:
        """What every member registered, in order, once all have arrived."""
        if self.claim and store.add(f"claims-{self.me}", 1) > 1:
            raise self.refuse_double(store, facts)
        store.set(f"member-{self.me}", json.dumps(facts))
        for _ in self._waiting(store):
            if store.check(["member-0"]):
                self._compare(store, json.loads(store.get("member-0")), facts)
            missing = [other for other in range(self.size) if not store.check([f"member-{other}"])]
            if not missing:
                break
            self._wait_for(missing)
        return [json.loads(store.get(f"member-{other}")) for other in range(self.size)]

    def refuse_double(self, store: Store, facts: Facts) -> SetupError:
        """The error for a member number that is taken."""
        first = _whose(json.loads(store.get(f"member-{self.me}")))
        problem = (
            f"Two {self.noun}s claim {self.claim} {self.me}: {first}, and {_whose(facts)}. Give every {self.noun} its "
            f"own number, 0 to {self.size - 1}."
        )
        store.set("problem", problem)
        return SetupError(problem)

    def _waiting(self, store: Store) -> Iterator[None]:
        """Polls until the caller stops; raises the problem that any member has found."""
        while True:
            if store.check(["problem"]):
                self._let_all_hear(store)
                raise SetupError(store.get("problem").decode())
            yield
            time.sleep(_LOOK_S)

    def _await_server(self, host: str, port: int) -> None:
        while True:
            try:
                socket.create_connection((host, port), timeout=min(self.left.total_seconds(), 5.0)).close()
                return
            except OSError as error:
                self._wait_for([0], reason=f": {error.strerror or error}")
            time.sleep(_LOOK_S)

    def _wait_for(self, missing: list[int], reason: str = "") -> None:
        """Says which members are missing, each time after twice as long; raises when the time is over."""
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        who = f"{self.noun}{'s' if len(missing) > 1 else ''} {names} of {self.size}"
        if self.waited_s > self.timeout_s:
            raise SetupError(
                f"{self.noun.capitalize()} {self.me} waited topology.timeout_s = {self.timeout_s:g} s at {self.where} "
                f"for {who}{reason}. {self.advice}"
            )
        if self.waited_s > max(2 * self._said_at, self.first_line_s):
            line = f"Waiting for {who} at {self.where} ({self.waited_s:.0f} s of {self.timeout_s:g} s){reason}."
            self._say(line if self._said_at else f"{line} {self.advice}")
            self._said_at = self.waited_s

    def _say(self, line: str) -> None:
        if not self.silent:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def _compare(self, store: Store, first: Facts, mine: Facts) -> None:
        for option, value in first["options"].items():
            if (own := mine["options"].get(option)) != value:
                problem = (
                    f"The {self.noun}s disagree: {self.noun} 0 ({_whose(first)}) was started with {option} {value}, "
                    f"{self.noun} {self.me} ({_whose(mine)}) with {option} {own}. Give every {self.noun} the same."
                )
                store.set("problem", problem)
                store.add("told", 1)
                raise SetupError(problem)

    def _let_all_hear(self, store: Store) -> None:
        """The store goes away with the member that serves it; so that one waits a moment for the others."""
        store.add("told", 1)
        deadline = time.monotonic() + _LINGER_S
        while self.me == 0 and time.monotonic() < deadline:
            present = sum(1 for other in range(self.size) if store.check([f"member-{other}"]))
            if store.add("told", 0) >= present:
                break
            time.sleep(_LOOK_S)


def facts(*, options: Mapping[str, Any], **more: Any) -> Facts:
    """What a member says of itself."""
    return {"host": socket.gethostname(), "process": os.getpid(), "options": dict(options), **more}


def _whose(facts: Facts) -> str:
    return f"host {facts['host']}, process {facts['process']}"


def is_local(host: str) -> bool:
    """Whether an address belongs to this machine: only then can a socket be bound to it."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False
