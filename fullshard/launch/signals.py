"""Stop signals, handled from the first line of the command.

Before the first step there is nothing to save: a signal ends the process with a message and exit code 75. The loop
reads it at the end of a step. A launcher passes it on to its ranks. A second signal ends the process at once. Except
for Ctrl-C, one request may arrive twice: schedulers signal every process of a job, and the launcher passes its own on.
So a second signal counts only after a moment.

A thread handles signals beside the main thread, which may be in native code for minutes (a rendezvous, a compilation, a
collective): Python runs handlers only between two of its own instructions. Must not import torch, and must not know
what is saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from fullshard.errors import EXIT_PREEMPTED
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER, hand_over
from fullshard.faults import early_quit
from fullshard.faults.orphans import end_soon_after

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
ECHO_S = 2.0
"""Signals within this time of the first one are the same request."""
AT_ONCE = "Stopped at once by a second signal: steps after the last checkpoint are lost"
_PR_SET_PDEATHSIG = 1


def end_with(starter: int) -> None:
    """Has the system send SIGTERM when the process that started this one ends, even by SIGKILL; only on Linux.

    Before `listen`, Ctrl-C ends this process at once: a KeyboardInterrupt would wait for native code to return, and
    its traceback is useless beside the launcher's message."""
    if not _listener.command:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        try:
            os.kill(starter, 0)
        except ProcessLookupError:  # it ended before we asked
            signal.raise_signal(signal.SIGTERM)
    end_soon_after(starter)


@contextlib.contextmanager
def heard_by(
    act: Callable[[int], None], numbers: tuple[signal.Signals, ...] = STOP_SIGNALS, *, in_thread: bool = True
) -> Iterator[None]:
    """Signals go to `act`, in a separate thread or in the main thread, whichever comes first; only in the main thread
    if `act` may raise. Does nothing outside the main thread: the program that called us handles signals there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, handlers = (_listener.act, _listener.in_thread), {number: signal.getsignal(number) for number in numbers}
    _listener.act, _listener.in_thread = act, in_thread
    _listener.open()
    _set(dict.fromkeys(numbers, _listener.on_signal))
    try:
        yield
    finally:
        _set(handlers)
        _listener.act, _listener.in_thread = before


def listen() -> None:
    """For the first line of a command: until the loop takes over, a signal ends it with a message and exit code 75."""
    _listener.command, _listener.act = True, nothing_to_save
    _listener.open()
    early_quit.heed()
    _set(dict.fromkeys(STOP_SIGNALS, _listener.on_signal))


def in_library() -> contextlib.AbstractContextManager[None]:
    """The same inside a user's program, which keeps the signals that it handles itself, and Ctrl-C."""
    main = threading.current_thread() is threading.main_thread()
    free = [n for n in STOP_SIGNALS if main and n != signal.SIGINT and signal.getsignal(n) is signal.SIG_DFL]
    return heard_by(nothing_to_save, tuple(free)) if free else contextlib.nullcontext()


def in_command() -> bool:
    """Whether this process is `fullshard train`, whose exit code 75 has a meaning."""
    return _listener.command


def nothing_to_save(number: int) -> NoReturn:
    """Ends a run that has not reached its first step."""
    leave(unsaved(number))


def unsaved(number: int) -> str:
    return f"Stopped by {name_of(number)} before the first step: nothing to save. Run the same command again."


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def leave(line: str) -> NoReturn:
    """Ends this process, and those that it started, at once and with the exit code of a preempted run."""
    handed = hand_over(line)
    rank = os.environ.get("RANK", "0")
    if REPORTED_BY_LAUNCHER not in os.environ and (rank == "0" or not handed):
        _write(line if rank == "0" else f"rank {rank}: {line}")
    with contextlib.suppress(Exception):
        import psutil  # type: ignore[import-untyped]

        for child in psutil.Process().children(recursive=True):
            child.terminate()
    for folder in _listener.folders:
        shutil.rmtree(folder, ignore_errors=True)
    # Flush what was printed before, unless its reader has stopped reading.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(timeout=2)
    os._exit(EXIT_PREEMPTED)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed when the process ends, also by a signal."""
    with tempfile.TemporaryDirectory(prefix="fullshard-") as name:
        _listener.folders.append(name)
        try:
            yield Path(name)
        finally:
            _listener.folders.remove(name)


class StopSignals:
    """Inside, the first signal is a request and a second one ends the process. In the command's own process this lasts
    beyond the loop, so that what follows may finish."""

    def __init__(self) -> None:
        self.heard: str | None = None
        self._heard_at = 0.0
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> StopSignals:
        if _listener.command:
            _listener.act = self._on_signal
        else:
            # A process of its own, such as a notebook's, hears signals where a second Ctrl-C may raise.
            self._listening.enter_context(heard_by(self._on_signal, in_thread="RANK" in os.environ))
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.heard is None:
            self.heard, self._heard_at = name, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                _write(f"{name_of(number)}: saving after the step in progress. A second signal stops at once.")
        elif name == self.heard == "SIGINT" and not _listener.command and "RANK" not in os.environ:
            raise KeyboardInterrupt(f"{AT_ONCE}.")
        elif name == self.heard == "SIGINT" or time.monotonic() - self._heard_at > ECHO_S:
            leave(f"{AT_ONCE}.")


def _write(line: str) -> None:
    """Bypasses Python's files, whose locks another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


class _Listener:
    """Hears each signal in two places, a thread and the main thread's handler, and acts on it once."""

    def __init__(self) -> None:
        self.act: Callable[[int], None] | None = None
        self.in_thread = True
        self.command = False
        self.folders: list[str] = []
        self._pipe: tuple[int, int] | None = None
        self._fork = threading.local()
        self._lock = threading.RLock()
        self._heard = {"handler": Counter[int](), "thread": Counter[int]()}
        self._acted = Counter[int]()

    def open(self) -> None:
        """Starts listening; again after another library has taken over the wake-up file descriptor."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            threading.Thread(target=self._wait, args=(self._pipe[0],), daemon=True, name="stop-signals").start()
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def on_signal(self, number: int, _: object) -> None:
        self._hear("handler", number)

    def before_fork(self) -> None:
        self._fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._fork.mask)

    def in_child(self) -> None:
        """A forked process handles its own signals, and never wakes the thread of its parent."""
        mask = self._fork.mask
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            mine = [number for number in STOP_SIGNALS if signal.getsignal(number) == self.on_signal]
            _set(dict.fromkeys(mine, signal.SIG_DFL))
            self.__init__()  # type: ignore[misc]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _wait(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                self._hear("thread", number)

    def _hear(self, where: str, number: int) -> None:
        # The thread is woken by every signal that Python handles.
        if signal.getsignal(number) != self.on_signal or (where == "thread" and not self.in_thread):
            return
        with self._lock:
            heard = self._heard[where]
            heard[number] += 1
            if heard[number] > self._acted[number]:
                self._acted[number] = heard[number]
                if self.act is not None:
                    self.act(number)


def _set(handlers: Mapping[signal.Signals, object]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
        if handler == _listener.on_signal:
            signal.siginterrupt(number, False)  # system calls of native code must not fail


_listener = _Listener()
os.register_at_fork(
    before=_listener.before_fork, after_in_parent=_listener.in_parent, after_in_child=_listener.in_child
)
