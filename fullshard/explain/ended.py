"""How one process ended, in words: from its exit code, and from the memory of its host if it was killed.

Runs in a small process beside a rank too, so it imports little. Must not read the host's memory itself.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from fullshard.formatting.readable import size

_FULL, _FULLER = 0.75, 0.9
"""If at least this share of memory was in use a moment before, a kill was most likely for lack of it: the rest may have
filled up in between. The greater share applies if the kernel counts its kills and did not count this one: other
programs kill for lack of memory too."""
_ADVICE = (
    "Use fewer data.workers, checkpoint.asynchronous: false (saving in the background keeps a copy of the state in "
    "host memory), no sharding.cpu_offload, fewer ranks per node, or ask for more memory for the job."
)


@dataclass(frozen=True)
class HostMemory:
    """The host's memory in the moments before a process ended."""

    used: int | None
    """At its peak, in bytes; None if unknown."""
    total: int
    kills: int | None
    """Processes that the kernel killed for lack of memory; None if it does not count them."""

    def __str__(self) -> str:
        if self.used is None:
            return "its use is unknown"
        return f"{size(self.used)} of {size(self.total)} were in use a moment before"


def out_of_memory(memory: HostMemory) -> str | None:
    """How certain it is that the kernel killed a process for lack of memory; None if that is unlikely."""
    if memory.kills:
        return "killed by the kernel, out of host memory"
    full = (memory.used or 0) >= (_FULL if memory.kills is None else _FULLER) * memory.total
    return "killed by the kernel, most likely out of host memory" if full else None


def why_killed(memory: HostMemory) -> str:
    """The reason for SIGKILL, to follow "was ended by SIGKILL: "."""
    if reason := out_of_memory(memory):
        return f"{reason}: {memory}. {_ADVICE}"
    if memory.kills is None:
        return f"killed by the system, often for lack of memory ({memory}), or by a scheduler"
    return f"killed from outside, by a person or a scheduler, and not for lack of memory ({memory})"


def how(code: int, *, traced: bool = False, victim: bool = False, killed: str = "killed by the system") -> str:
    """What happened to a process, to follow "Rank 1 (process 77) ". `traced`: it printed a traceback; `victim`: it only
    lost another rank."""
    if victim:
        return "lost the connection to another rank, and no rank of this node ended before it"
    if code >= 0:
        return f"ended with exit code {code}{'; its traceback is above' if traced else ''}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = {
        "SIGKILL": f": {killed.rstrip('.')}",
        "SIGSEGV": ": it crashed in native code",
        "SIGABRT": ": native code aborted; its message is above",
        "SIGBUS": ": it ran out of shared memory, or a mapped file became shorter",
        "SIGTERM": ": something outside the run ended it",
    }
    return f"was ended by {name}{meaning.get(name, '')}"
