"""Ends every process of an attempt before the next one starts: ranks, and what they have started.

A rank that was killed leaves its data workers behind, which belong to no parent any more. All have the attempt's id in
their environment. Must not know what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

_NAME = "TORCHELASTIC_RUN_ID"
_GRACE_S, _EVERY_S, _PATIENCE_S = 3.0, 0.05, 30.0
"""How long leftovers may take to end by themselves: a tracker's process may still send its last lines."""


def end_all(run_id: str, *, grace_s: float = _GRACE_S) -> None:
    """Returns when no process of the attempt is left."""
    patience = time.monotonic() + grace_s
    while of_attempt(run_id):
        now = time.monotonic()
        if now > patience:
            kill(run_id)
        if now > patience + _PATIENCE_S:
            return  # in the kernel, on a device or a file system that does not answer
        time.sleep(_EVERY_S)


def kill(run_id: str) -> None:
    """Kills every process of the attempt."""
    for process in of_attempt(run_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def of_attempt(run_id: str) -> list[int]:
    """The processes that have this id, other than this one."""
    import psutil  # type: ignore[import-untyped]

    found = []
    for process in psutil.process_iter(["pid"]):
        with contextlib.suppress(psutil.Error, OSError):
            has_it = process.pid != os.getpid() and process.environ().get(_NAME) == run_id
            if has_it and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
