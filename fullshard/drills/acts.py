"""What a fault does to the process it happens in. Must not know where or when it happens."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

_LONG_S = 3600


class DrillError(RuntimeError):
    """Stands for a bug in somebody's code."""


def killed(_: Any) -> None:
    """As the system's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(_: Any) -> None:
    """The process is there, and does nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def exception(_: Any) -> None:
    raise DrillError("This error is part of a fault drill.")


def exits(_: Any) -> None:
    """Without a word, as some C++ libraries do."""
    os._exit(7)


def out_of_memory(_: Any) -> None:
    """The system refuses more memory, as in a container with a limit; a GPU refuses it by itself."""
    import torch

    if torch.cuda.is_available():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        torch.ones(1 << 30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def hangs(_: Any) -> None:
    """In Python: other threads of the process go on."""
    time.sleep(_LONG_S)


def hangs_holding_the_gil(_: Any) -> None:
    """In C, as a badly written extension does: no other thread of the process goes on."""
    ctypes.PyDLL(None).sleep(_LONG_S)


def not_a_number(gradient: Any) -> Any:
    return gradient * float("nan")


def other_collective(inputs: Any) -> None:
    """Calls a collective that no other rank calls."""
    import torch

    inputs.sum_over_ranks(torch.zeros(3, device=inputs.device))


def disk_full(_: Any) -> None:
    """No file may grow any more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def store_gone(_: Any) -> None:
    """The store of checkpoints, a folder by its URL, refuses two files of this rank, and is back then."""
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    usual, gone = LocalFileSystem._open, OSError("The store is gone. This error is part of a fault drill.")

    def refuses_once(*_: Any, **__: Any) -> None:
        LocalFileSystem._open = usual
        raise gone

    LocalFileSystem._open = refuses_once
    raise gone


def worker_killed(_: Any) -> None:
    """Kills one of the processes that read data for this rank."""
    import psutil  # type: ignore[import-untyped]

    for child in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(child.cmdline()):
            child.kill()
            return


ACTS: dict[str, Callable[[Any], Any]] = {
    "killed": killed,
    "stopped": stopped,
    "exception": exception,
    "exits": exits,
    "out_of_memory": out_of_memory,
    "hangs": hangs,
    "hangs_holding_the_gil": hangs_holding_the_gil,
    "not_a_number": not_a_number,
    "other_collective": other_collective,
    "disk_full": disk_full,
    "store_gone": store_gone,
    "worker_killed": worker_killed,
}
