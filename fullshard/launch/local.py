"""Starts the ranks of this machine with torchrun's elastic agent, waits, and says in a line which rank failed and how.

One node meets on a port that the system picks, so two runs never clash; several nodes meet at HOST:PORT. A signal is
passed on to the ranks, so that they can save and end by themselves. Must not know recipes; torch only once ranks start.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from fullshard import crash
from fullshard.errors import EXIT_NUMERICAL, EXIT_PREEMPTED, EXIT_USER, SetupError
from fullshard.launch.base import STARTED_BY, Launcher, Ranks
from fullshard.signals import ECHO_S

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_SAID_BY_THE_RANK = (EXIT_USER, EXIT_NUMERICAL, EXIT_PREEMPTED)
"""Exit codes after which the rank itself has told what happened."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Local(Launcher):
    """Processes on this machine, one per GPU (or as many as asked for on a CPU)."""

    def start(self, command: Sequence[str], ranks: Ranks) -> int:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        with (
            _environment(variables(ranks, os.environ)),
            _quiet(),
            tempfile.TemporaryDirectory(prefix="fullshard-") as folder,
            _signals_passed_on() as received,
        ):
            try:
                elastic_launch(_config(ranks, folder), command[0])(*command[1:])
            except ChildFailedError as error:
                return _ended(error.failures, received)
            except Exception as error:
                raise _not_met(error, ranks) or error from error
        return 0


def variables(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks' environment needs beside the variables of the agent."""
    # The agent only handles the signal named here; all others stay with `_signals_passed_on`.
    changed = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", STARTED_BY: str(os.getpid())}
    changed[crash.TOLD_BY_LAUNCHER] = "1"
    if "OMP_NUM_THREADS" not in environ:
        changed["OMP_NUM_THREADS"] = str(max(1, _num_cores() // ranks.per_node))
    if ranks.device_ids is not None:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if visible and max(ranks.device_ids) >= len(visible):
            raise SetupError(
                f"topology.devices = {list(ranks.device_ids)}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves GPUs 0 "
                f"to {len(visible) - 1}, counted anew. Choose from these, or unset CUDA_VISIBLE_DEVICES."
            )
        changed["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in ranks.device_ids)
    return changed


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _config(ranks: Ranks, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if ranks.nodes > 1:
        if ranks.master is None:
            raise SetupError(f"{ranks.nodes} nodes need a place to meet. Give --master HOST:PORT on every node.")
        meeting: dict[str, Any] = {
            "rdzv_backend": "static",
            "rdzv_endpoint": ranks.master,
            "rdzv_configs": {"rank": ranks.node_rank, "timeout": ranks.timeout_s},
            "run_id": "fullshard",  # the same on every node: it names the keys of the shared store
        }
    else:
        meeting = {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",
            "rdzv_configs": {"timeout": ranks.timeout_s},
            "run_id": uuid.uuid4().hex,
            "local_addr": "127.0.0.1",  # the host's own name may not resolve in a container
        }
    settings: dict[str, Any] = {
        "min_nodes": ranks.nodes,
        "max_nodes": ranks.nodes,
        "nproc_per_node": ranks.per_node,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "signals_to_handle": "SIGQUIT",
        "logs_specs": DefaultLogsSpecs(log_dir=folder),
        **meeting,
    }
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


def _ended(failures: Mapping[int, ProcessFailure], received: list[int]) -> int:
    """The exit code of a run in which ranks failed; says which one was first, unless the rank has said it itself."""
    rank, failure = _first(failures)
    code = failure.exitcode
    if code in _SAID_BY_THE_RANK:
        message = _message(failure)
        if rank != 0 and message and message != _message(failures.get(0)):
            _say(f"Error: rank {rank}: {message}")
        return code
    if received:
        name = signal.Signals(received[0]).name
        _say(f"Stopped by {'Ctrl-C' if name == 'SIGINT' else name}.")
        return 128 + received[0]
    said = {number: crash.handed_over(each.error_file_data) for number, each in failures.items()}
    if code > 0:  # one that was killed says nothing, and is the cause
        rank = crash.culprit(said, otherwise=rank)
    line = f"Rank {rank} (process {failures[rank].pid}) {_how(failures[rank].exitcode)}. The other ranks were stopped."
    _say(line)
    if words := crash.closing(said, rank=rank, line=line):
        _say(words)
    return 1


def _message(failure: ProcessFailure | None) -> str | None:
    """What a rank handed over before it ended; rank 0 has printed its own."""
    note = failure.error_file_data.get("message") if failure is not None else None
    return note.get("message") if isinstance(note, dict) else None


def _first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first.

    The agent lists ranks in the order it saw them end, those it ended itself last. It looks ten times a second, and a
    rank that lost its peers can come before the one that they lost: so a rank that was killed, or that said why it
    stopped, goes first among those that ended within two seconds. Later ones were ended by the agent."""
    start = min(failure.timestamp for failure in failures.values())
    near = [(rank, failure) for rank, failure in failures.items() if failure.timestamp <= start + 2]

    def order(code: int) -> int:
        if code < 0 and code != -signal.SIGTERM:
            return 0
        return 1 if code in (EXIT_USER, EXIT_NUMERICAL) else 2

    return min(near, key=lambda item: order(item[1].exitcode))  # of equals the one seen first


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}; its traceback is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    meaning = {
        "SIGKILL": ": killed by the system, most often because the machine ran out of memory",
        "SIGSEGV": ": it crashed in native code",
        "SIGABRT": ": native code gave up; its message is above",
        "SIGBUS": ": it ran out of shared memory, or a mapped file became shorter",
        "SIGTERM": ": something outside the run ended it",
    }
    return f"was ended by {name}{meaning.get(name, '')}"


def _not_met(error: Exception, ranks: Ranks) -> SetupError | None:
    """Several nodes that did not find each other, in words; None for an error of another kind."""
    from torch.distributed import DistError

    if ranks.nodes == 1 or not isinstance(error, (DistError, TimeoutError)):
        return None
    return SetupError(
        f"The {ranks.nodes} nodes did not meet at {ranks.master} within {ranks.timeout_s:.0f} s (this is node "
        f"{ranks.node_rank}; torch says: {str(error).splitlines()[0]}). Start the same command on every node, with "
        f"--node-rank 0 to {ranks.nodes - 1} and the address of node 0 as --master, and let firewalls pass the port."
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the agent's own log lines and warnings off the console: `_ended` says what matters."""
    import torch.distributed.launcher.api  # noqa: F401  makes the loggers

    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """Hands signals to the ranks instead of ending them from here; a second Ctrl-C, or another signal a while after the
    first, ends them at once."""
    received: list[int] = []
    first_at = math.inf
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    others = set(_children())

    def pass_on(number: int, frame: FrameType | None) -> None:
        started = [pid for pid in _children() if pid not in others]
        if not started:
            raise SystemExit(128 + number)
        nonlocal first_at
        impatient = (number == signal.SIGINT and number in received) or time.monotonic() - first_at > ECHO_S
        first_at = min(first_at, time.monotonic())
        received.append(number)
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if impatient else number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    import psutil  # type: ignore[import-untyped]

    return [child.pid for child in psutil.Process().children()]


__all__ = ["Local"]
