"""Stop signals as a wish that the loop reads at the end of a step; a second Ctrl-C ends the process at once.

Other signals may come twice for one wish: schedulers signal every process of a job, and the launcher passes its own on.

Must not know ranks or what is done about the wish.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Listens while it is entered. Outside the main thread it hears nothing: whoever runs us there handles signals."""

    def __init__(self) -> None:
        self.heard: str | None = None
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.heard is not None and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.heard = signal.Signals(number).name
