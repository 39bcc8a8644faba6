"""What `--resume` means after a restart: the run continues, also if it was to start over or from a named checkpoint.

The attempt that carries it out leaves a mark in the run folder; one that ended before has not. Must not know how a
checkpoint is chosen or read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from fullshard.faults.restarts import START

_MARK = ".start.json"

Last = Callable[[], Path | None]
"""The checkpoint that the run saved last."""


def resume(asked: str, folder: Path, last: Last) -> str:
    """The `--resume` of this attempt. A path holds until the run has saved a checkpoint of its own."""
    start = _start()
    if asked == "auto" or start is None:
        return asked
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
        if mark["start"] == start and (asked == "never" or mark["last"] != _stamp(last())):
            return "auto"
    return asked


def mark(asked: str, folder: Path, last: Last) -> None:
    """Notes that what `--resume` asks for is done: an earlier run was moved aside, or a checkpoint was named."""
    start = _start()
    if asked != "auto" and start is not None:
        content = json.dumps({"start": start, "last": _stamp(last())})
        new = folder / f"{_MARK}.new"
        new.write_text(content + "\n", encoding="utf-8")
        new.replace(folder / _MARK)


def _start() -> str | None:
    """What all attempts of one start share. torchrun's id need not be its own, but its agent is the same process."""
    if own := os.environ.get(START):
        return own
    agent = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{agent}-{os.getppid()}" if agent is not None else None


def _stamp(last: Path | None) -> str:
    """A checkpoint by its content: a step that is saved again is another one."""
    return f"{last.name} {hashlib.sha256((last / 'manifest.json').read_bytes()).hexdigest()}" if last else ""
