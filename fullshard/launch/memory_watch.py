"""Watches host memory during a run, so that a rank the kernel killed for lack of memory is reported as such.

The kernel kills without a word, and frees the memory at once: only what was seen before says how it came. A launcher
looks in a thread; a rank that is alone has a small process beside it, which outlives it. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from fullshard.formatting.readable import size
from fullshard.launch import host_memory

_EVERY_S, _SEEN_S = 0.2, 10.0
_FULL, _FULLER = 0.75, 0.9
"""Shares of the memory in use, seen a moment before, from which on a kill is most likely for want of it: what took the
rest may have come within a blink. The greater one where the kernel counts its kills, and this was none of them: others
kill for want of memory too."""
_ADVICE = (
    "Use fewer data.workers, checkpoint.asynchronous: false (saving in the background keeps a copy of the state in "
    "host memory), no sharding.cpu_offload, fewer ranks per node, or ask for more memory for the job."
)


class MemoryWatch:
    """What host memory has been like lately."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._kills = root, host_memory.oom_kills(root)
        self._seen: deque[tuple[float, int, int]] = deque()
        self.look()

    def look(self) -> None:
        """Notes how much memory is in use."""
        with contextlib.suppress(OSError, ValueError):
            now, total = time.monotonic(), host_memory.memory_total(self._root)
            self._seen.append((now, total - host_memory.memory_left(self._root), total))
            while self._seen[0][0] < now - _SEEN_S:
                self._seen.popleft()

    def why_killed(self) -> str:
        """What SIGKILL came from, in words that go on from "was ended by SIGKILL: "."""
        if reason := self.out_of_memory():
            return f"{reason}: {self._in_use()}. {_ADVICE}"
        if self._counted() is None:
            return f"killed by the system, often for want of memory ({self._in_use()}), or by a scheduler"
        return f"killed from outside, by a person or a scheduler, and not for want of memory ({self._in_use()})"

    def out_of_memory(self) -> str | None:
        """How sure it is that the kernel killed a process for want of memory; None where that is not likely."""
        if counted := self._counted():
            return "killed by the kernel, out of host memory"
        full = _FULL if counted is None else _FULLER
        return "killed by the kernel, most likely out of host memory" if self._share() >= full else None

    def _counted(self) -> int | None:
        """The kernel's kills for want of memory since this watch began; None where nobody counts them."""
        kills = host_memory.oom_kills(self._root)
        return None if kills is None or self._kills is None else kills - self._kills

    def _share(self) -> float:
        return max((used / total for _, used, total in self._seen), default=0.0)

    def _in_use(self) -> str:
        if not self._seen:
            return "its use is not known here"
        _, used, total = max(self._seen, key=lambda seen: seen[1])
        return f"{size(used)} of {size(total)} were in use a moment before"


@contextlib.contextmanager
def watched() -> Iterator[MemoryWatch]:
    """A watch that looks in a thread of this process, which starts the ranks and outlives them."""
    watch, ended = MemoryWatch(), threading.Event()

    def follow() -> None:
        while not ended.wait(_EVERY_S):
            watch.look()

    thread = threading.Thread(target=follow, name="host-memory", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def told_by_a_witness(rank: int) -> Iterator[None]:
    """A small process beside this one, which says how this one was killed; for a rank that has no launcher of ours."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(rank)]
    try:
        # Of its own session: what is sent to this one's process group is not meant for it.
        witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # no process can be started: the run goes on without one
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            witness.communicate(b"bye")


def bear_witness(process: int, rank: int) -> str | None:
    """Waits for the end of the process that started this one; what to say of it where memory was the reason. It may
    also have crashed, or been told to end at once: of that the shell or the process itself has spoken."""
    watch = MemoryWatch()
    while os.getppid() == process:
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            if os.read(sys.stdin.fileno(), 3):
                return None
            break  # the pipe is closed, without a word
        watch.look()
    return (
        f"Rank {rank} (process {process}) was ended by SIGKILL: {watch.why_killed()}" if watch.out_of_memory() else None
    )


if __name__ == "__main__":
    words = bear_witness(int(sys.argv[1]), int(sys.argv[2]))
    if words is not None:
        sys.stderr.write(f"{words}\n")
