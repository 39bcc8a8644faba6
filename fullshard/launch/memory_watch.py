"""Watches host memory during a run, so that a rank that the kernel killed for lack of memory is reported as such.

The kernel kills silently and frees the memory at once: only earlier readings show the reason. A launcher watches in a
thread; a single rank starts a small process that outlives it. Must not import torch.
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
"""From this share of memory in use a moment before, a kill was most likely for lack of it: the rest may have gone in a
blink. The greater share applies if the kernel counts its kills and did not count this one: others kill for lack of
memory too."""
_ADVICE = (
    "Use fewer data.workers, checkpoint.asynchronous: false (saving in the background keeps a copy of the state in "
    "host memory), no sharding.cpu_offload, fewer ranks per node, or ask for more memory for the job."
)


class MemoryWatch:
    """Recent readings of host memory."""

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
        """The reason for SIGKILL, to follow "was ended by SIGKILL: "."""
        if reason := self.out_of_memory():
            return f"{reason}: {self._in_use()}. {_ADVICE}"
        if self._counted() is None:
            return f"killed by the system, often for lack of memory ({self._in_use()}), or by a scheduler"
        return f"killed from outside, by a person or a scheduler, and not for lack of memory ({self._in_use()})"

    def out_of_memory(self) -> str | None:
        """How certain it is that the kernel killed a process for lack of memory; None if that is unlikely."""
        if counted := self._counted():
            return "killed by the kernel, out of host memory"
        full = _FULL if counted is None else _FULLER
        return "killed by the kernel, most likely out of host memory" if self._share() >= full else None

    def _counted(self) -> int | None:
        """The kernel's kills for lack of memory since this watch began; None where they are not counted."""
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
    """A watch in a thread of this process, which starts the ranks and outlives them."""
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
    """A small process that says how this one was killed; for a rank without a launcher of ours."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(rank)]
    try:
        # In its own session: signals to this process group are not meant for it.
        witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # the run continues without one
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            witness.communicate(b"bye")


def bear_witness(process: int, rank: int) -> str | None:
    """Waits for the end of the process that started this one; the message if memory was the reason. Other ends are
    reported by the shell or the process itself."""
    watch = MemoryWatch()
    while os.getppid() == process:
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            if os.read(sys.stdin.fileno(), 3):
                return None
            break  # the pipe is closed
        watch.look()
    return (
        f"Rank {rank} (process {process}) was ended by SIGKILL: {watch.why_killed()}" if watch.out_of_memory() else None
    )


if __name__ == "__main__":
    words = bear_witness(int(sys.argv[1]), int(sys.argv[2]))
    if words is not None:
        sys.stderr.write(f"{words}\n")
