"""Host memory: total, available, used by processes; and a watch that keeps recent readings.

The kernel kills a process silently, and its memory is free at once: only earlier readings show why. A launcher watches
in a thread; a single rank starts a small process that outlives it. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from fullshard.explain.ended import HostMemory, how, out_of_memory, why_killed

_UNLIMITED = 2**60
"""Control groups of version 1 write a number beyond this for "no limit"."""
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file", "memory.events")
"""Where a control group keeps its limit, its usage, its page cache and its count of kills."""
_EVERY_S, _SEEN_S = 0.2, 10.0


def memory_left(root: Path = Path("/")) -> int:
    """Bytes of host memory still available: on the machine, or in the control groups of this process."""
    return min([_of_machine(root, "MemAvailable"), *(left for left, _ in _of_groups(root))])


def memory_total(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process and its neighbours may use together."""
    return min([_of_machine(root, "MemTotal"), *(limit for _, limit in _of_groups(root))])


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel killed for lack of memory, here and in our control groups; None: not counted."""
    counters = [root / "proc/vmstat", *(folder / names[3] for folder, names in _group_folders(root))]
    found = [kills for path in counters if (kills := _number(path, r"^oom_kill (\d+)")) is not None]
    return sum(found) if found else None


def peak_of_family(root: Path = Path("/")) -> int | None:
    """Peak bytes of this process plus what its children hold now; pages that a forked child shares with its parent
    count once. None if the system does not say."""
    own = _number(root / "proc/self/status", r"^VmHWM:\s+(\d+) kB")
    return None if own is None else own * 1024 + sum(map(_private, _descendants(root)))


def _descendants(root: Path) -> Iterator[Path]:
    waiting = [root / "proc/self"]
    while waiting:
        for tasks in waiting.pop().glob("task/*/children"):
            with contextlib.suppress(OSError):
                for pid in tasks.read_text().split():
                    waiting.append(root / "proc" / pid)
                    yield waiting[-1]


def _private(process: Path) -> int:
    """Bytes that a process shares with no other; 0 if it has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        text = (process / "smaps_rollup").read_text()
        return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))
    return 0


def _of_machine(root: Path, name: str) -> int:
    found = _number(root / "proc/meminfo", rf"^{name}:\s+(\d+) kB")
    if found is not None:
        return found * 1024
    import psutil  # type: ignore[import-untyped]

    memory = psutil.virtual_memory()
    return int(memory.total if name == "MemTotal" else memory.available)


def _number(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _group_folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """The memory control groups around this process, of either version, with the names of their files."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        # Inside a container the path may be the host's, and the group itself is at the top.
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            yield folder, _VERSION_1 if controllers else _VERSION_2


def _of_groups(root: Path) -> Iterator[tuple[int, int]]:
    """What each control group has left, and its limit. Page cache counts as free, because the kernel drops it."""
    for folder, (limit_file, usage_file, cache_key, _) in _group_folders(root):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limit, usage = (int((folder / name).read_text()) for name in (limit_file, usage_file))
            cache = _number(folder / "memory.stat", rf"^{cache_key} (\d+)") or 0
            if limit < _UNLIMITED:
                yield max(limit - usage + cache, 0), limit


class MemoryWatch:
    """Recent readings of host memory."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._kills = root, oom_kills(root)
        self._seen: deque[tuple[float, int, int]] = deque()
        self.look()

    def look(self) -> None:
        """Records how much memory is in use."""
        with contextlib.suppress(OSError, ValueError):
            now, total = time.monotonic(), memory_total(self._root)
            self._seen.append((now, total - memory_left(self._root), total))
            while self._seen[0][0] < now - _SEEN_S:
                self._seen.popleft()

    def before_the_end(self) -> HostMemory:
        """The highest recent reading, and how many processes the kernel has killed since this watch began."""
        kills = oom_kills(self._root)
        counted = None if kills is None or self._kills is None else kills - self._kills
        seen = tuple(self._seen)  # a copy: the thread keeps adding readings
        _, used, total = max(seen, key=lambda reading: reading[1], default=(0.0, None, 1))
        return HostMemory(used, total, counted)


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
def reported_if_killed(rank: int) -> Iterator[None]:
    """For a rank without our launcher: starts a small process that reports if this one is killed for lack of memory."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(rank)]
    try:
        # In its own session: signals to this process group are not meant for it.
        witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # the run continues without it
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            witness.communicate(b"bye")


def watch_parent(process: int, rank: int) -> str | None:
    """Waits until the process that started this one ends; returns a message if it ran out of memory."""
    watch = MemoryWatch()
    while os.getppid() == process:
        if select.select([sys.stdin], [], [], _EVERY_S)[0]:
            if os.read(sys.stdin.fileno(), 3):
                return None
            break  # the pipe is closed
        watch.look()
    memory = watch.before_the_end()
    if not out_of_memory(memory):
        return None
    return f"Rank {rank} (process {process}) {how(-signal.SIGKILL, killed=why_killed(memory))}."


if __name__ == "__main__":
    if message := watch_parent(int(sys.argv[1]), int(sys.argv[2])):
        sys.stderr.write(f"{message}\n")
