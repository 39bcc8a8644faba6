"""Ends a rank whose launcher is gone, even if it hangs: it first has a moment to save by itself.

Must not know how a rank saves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time

from fullshard.errors import EXIT_PREEMPTED

EVERY_S, GRACE_S = 0.5, 6.0
"""How often a rank looks for its launcher, and how long it may take to save without it."""


def end_soon_after(starter: int, *, grace_s: float = GRACE_S) -> None:
    """Watches the process that started this one, in a thread. When it has ended, this one and its children end too."""
    if os.getppid() == starter:
        said = threading.Event()
        threading.Thread(target=_follow, args=(starter, grace_s, said), name="orphan", daemon=True).start()
        atexit.register(_explain, starter, said)  # a rank may save and end before the thread looks


def _explain(starter: int, said: threading.Event) -> None:
    """Says once that the launcher is gone, if it is."""
    if os.getppid() == starter or said.is_set():
        return
    said.set()
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"The launcher (process {starter}) is gone. The ranks save, if they can, and end.\n".encode())


def _follow(starter: int, grace_s: float, said: threading.Event) -> None:
    while os.getppid() == starter:
        time.sleep(EVERY_S)
    _explain(starter, said)
    time.sleep(grace_s)
    with contextlib.suppress(Exception):
        import psutil  # type: ignore[import-untyped]

        for child in psutil.Process().children(recursive=True):
            child.send_signal(signal.SIGKILL)
    os._exit(EXIT_PREEMPTED)
