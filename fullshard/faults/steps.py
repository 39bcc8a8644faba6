"""The step that each rank is in, in a small file that outlives the rank: one that was killed cannot say it itself.

Must not know what a step does.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FOLDER = "FULLSHARD_STEPS"
"""The variable with the launcher's folder for these files; without it nothing is noted."""
_WIDTH = 12
_open: dict[str, int] = {}


def begin(step: int) -> None:
    """Notes that this rank begins the step after `step` steps. Not synced: the launcher reads it on this host."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    with contextlib.suppress(OSError):
        if folder not in _open:
            name = os.path.join(folder, f"rank-{os.environ.get('RANK', '0')}")
            _open[folder] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(_open[folder], f"{step + 1:{_WIDTH}d}".encode(), 0)


def step_of(folder: Path, rank: int) -> int | None:
    """The step that a rank was in; None if it has not come to its first one."""
    try:
        return int((folder / f"rank-{rank}").read_text())
    except (OSError, ValueError):
        return None
