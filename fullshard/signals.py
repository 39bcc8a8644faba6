"""Stop signals as a wish that the loop reads at the end of a step; a second one ends the process at once.

But for Ctrl-C, signals may come twice for one wish: schedulers signal every process of a job, and the launcher passes
its own on. So a second one counts when it comes later than that takes.

A process that was started for another one can end with it. Must not know ranks or what is done about the wish.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_S = 2.0
"""Signals within so many seconds of the first one are the same wish."""
_PR_SET_PDEATHSIG = 1


def end_with(starter: int) -> None:
    """Asks for SIGTERM when the process that started this one ends, even by SIGKILL; Linux only, nothing elsewhere.

    Until somebody listens, Ctrl-C ends this process at once: a KeyboardInterrupt would wait for native code to return,
    and what it then prints is of no use beside the word of the starter."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        try:
            os.kill(starter, 0)
        except ProcessLookupError:  # it ended before we asked
            signal.raise_signal(signal.SIGTERM)


class StopSignals:
    """Listens while it is entered. Outside the main thread it hears nothing: whoever runs us there handles signals."""

    def __init__(self) -> None:
        self.heard: str | None = None
        self._heard_at = 0.0
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.heard is not None and (number == signal.SIGINT or time.monotonic() - self._heard_at > ECHO_S):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.heard is None:
            self._heard_at = time.monotonic()
        self.heard = signal.Signals(number).name
