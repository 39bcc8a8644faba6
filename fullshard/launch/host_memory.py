"""Host memory: total, available, and used by processes. Only reads; must not know what it is for."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNLIMITED = 2**60
"""Control groups of the first version write a number beyond this for "no limit"."""


def memory_left(root: Path = Path("/")) -> int:
    """Bytes of host memory still available: what the machine has free, or what a control group leaves of it."""
    free = _meminfo(root, "MemAvailable")
    if free is None:
        psutil: Any = importlib.import_module("psutil")
        return int(psutil.virtual_memory().available)
    return min([free, *(left for left, _ in _groups(root))])


def memory_total(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process and its neighbours may use together."""
    total = _meminfo(root, "MemTotal")
    if total is None:
        psutil: Any = importlib.import_module("psutil")
        return int(psutil.virtual_memory().total)
    return min([total, *(limit for _, limit in _groups(root))])


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for lack of memory, here and in the control groups of this process; None
    where they are not counted."""
    counted = [root / "proc/vmstat"]
    for folder, names in _group_folders(root):
        counted.append(folder / names.kills)
    found = [_number(path, r"^oom_kill (\d+)") for path in counted]
    numbers = [number for number in found if number is not None]
    return sum(numbers) if numbers else None


def peak_of_family(root: Path = Path("/")) -> int | None:
    """The most bytes that this process has held, and what its children hold beside it: pages that a forked child shares
    with its parent count once. None where the system does not say."""
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
    """Bytes that a process shares with no other."""
    try:
        text = (process / "smaps_rollup").read_text()
    except OSError:  # it has ended, or belongs to another user
        return 0
    return 1024 * sum(int(size) for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def _meminfo(root: Path, name: str) -> int | None:
    found = _number(root / "proc/meminfo", rf"^{name}:\s+(\d+) kB")
    return None if found is None else found * 1024


def _number(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


@dataclass(frozen=True)
class _Names:
    """The files of a memory control group."""

    limit: str
    usage: str
    cache: str
    kills: str


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_SECOND = _Names("memory.max", "memory.current", "inactive_file", "memory.events")


def _group_folders(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The memory control groups around this process, of either version."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        # Inside a container the path may be the host's, and the group itself is at the top.
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            yield folder, _FIRST if controllers else _SECOND


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """What each memory control group has left, and its limit; page cache counts as free, because the kernel drops
    it."""
    for folder, names in _group_folders(root):
        try:
            limit = int((folder / names.limit).read_text())
            usage = int((folder / names.usage).read_text())
            cache = _number(folder / "memory.stat", rf"^{names.cache} (\d+)") or 0
        except (OSError, ValueError):  # no such group, or "max"
            continue
        if limit < _UNLIMITED:
            yield max(limit - usage + cache, 0), limit
