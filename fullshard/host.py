"""How much memory this host has left. Only reads; must not know what it is for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNLIMITED = 2**60
"""Control groups of the first version write a number beyond this for "no limit"."""


def memory_left(root: Path = Path("/")) -> int:
    """Bytes of host memory that can still be had: what the machine has free, or what a control group leaves of it."""
    lines = (root / "proc/meminfo").read_text() if (root / "proc/meminfo").exists() else ""
    free = re.search(r"MemAvailable:\s+(\d+) kB", lines)
    if free is None:
        psutil: Any = importlib.import_module("psutil")
        return int(psutil.virtual_memory().available)
    return min([int(free[1]) * 1024, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """What each memory control group around this process leaves; page cache counts as free, as it is given back."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        # Inside a container the path may be the host's, and the group itself stands at the top.
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            if (left := _left(folder, *names)) is not None:
                yield left


def _left(folder: Path, limit_file: str, usage_file: str, cache: str) -> int | None:
    try:
        limit = int((folder / limit_file).read_text())
        usage = int((folder / usage_file).read_text())
        found = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(limit - usage + (int(found[1]) if found else 0), 0) if limit < _UNLIMITED else None
