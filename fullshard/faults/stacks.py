"""Python stacks of a process, written by a signal handler in C, so that they come even while native code holds the GIL.

SIGQUIT makes a rank, or a process that it forked, such as a loader worker, append the stacks of all its threads to a
file of its own. Must not import torch, and must not know what a stack means.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One call: innermost first in a stack."""

    file: str
    line: int
    name: str


class Stacks:
    """The file of this process, and the signal that makes it write there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path, self._rank, self._process = folder / f"rank-{rank}.stacks.txt", rank, os.getpid()
        for old in folder.glob(f"rank-{rank}.*.txt"):
            old.unlink(missing_ok=True)
        self.file: IO[bytes] = self.path.open("ab", buffering=0)
        self._listen()

    def _listen(self) -> None:
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGQUIT, file=self.file, all_threads=True)

    def in_child(self) -> None:
        """A process forked from a rank gets a file of its own."""
        with contextlib.suppress(OSError):
            inherited = self.file
            self.path = self.path.with_name(f"rank-{self._rank}.worker-{os.getpid()}.txt")
            self.file = self.path.open("ab", buffering=0)
            self._listen()
            inherited.close()

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def dump(self) -> None:
        faulthandler.dump_traceback(self.file, all_threads=True)

    def close(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(AttributeError):
                faulthandler.unregister(signal.SIGQUIT)
            self.file.close()


open_stacks: Stacks | None = None
"""Those of this process, while it is a rank that is watched."""


def _in_child() -> None:
    if open_stacks is not None:
        open_stacks.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def parse(text: str) -> dict[str, list[Frame]]:
    """The latest stack of each thread, innermost call first, by the thread's number in hexadecimal."""
    found: dict[str, list[Frame]] = {}
    stack: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stack = found[thread[1]] = []
        elif frame := _FRAME.match(line):
            stack.append(Frame(frame[1], int(frame[2]), frame[3]))
    return {f"{int(thread, 16):#x}": stack for thread, stack in found.items()}


def of_main(text: str) -> list[Frame]:
    """The stack of the main thread, which is written last."""
    found = list(parse(text).values())
    return found[-1] if found else []
