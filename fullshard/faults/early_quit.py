"""SIGQUIT before a rank can say where it is: while a run starts, it must not end by it.

From the watchdog on, a handler in C writes stacks (stacks.py). Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_STARTING = "The run is still starting: its ranks say where they are once they build the model. It goes on."


def heed() -> None:
    """For the first line of a command."""
    if hasattr(signal, "SIGQUIT"):  # not on Windows
        signal.signal(signal.SIGQUIT, _say)


def pass_on(processes: Iterable[int]) -> None:
    """SIGQUIT to the ranks, so that they say where they are. One that does not listen yet would end by it."""
    listening = [process for process in processes if _listens(process)]
    for process in listening:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGQUIT)
    if not listening:
        _say()


def _listens(process: int) -> bool:
    """Whether a process handles SIGQUIT, as the kernel says; where it says nothing, it is taken to."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & 1 << signal.SIGQUIT - 1)
    return True


def _say(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{_STARTING}\n".encode())
