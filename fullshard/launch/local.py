"""Starts the ranks of this machine with torchrun's elastic agent, waits for them, and prints how the run ended.

A single node uses a port that the system picks, so two runs never clash; several nodes meet at HOST:PORT. Signals are
passed on to the ranks, so that they can save and end by themselves. Must not know recipes; imports torch only to start
ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.contracts.launcher import STARTED_BY, Launcher, Ranks
from fullshard.errors import EXIT_PREEMPTED, SetupError, first_line
from fullshard.explain.ended import why_killed
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER, handed_over
from fullshard.explain.host_memory import MemoryWatch, watched
from fullshard.faults.end import End, Failure
from fullshard.launch import signals
from fullshard.launch.addresses import is_local, split_address
from fullshard.launch.rendezvous import Facts, Meeting, facts

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Local(Launcher):
    """Processes on this machine: one per GPU, or the requested number on a CPU."""

    def start(self, command: Sequence[str], ranks: Ranks) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        with (
            _environment(variables(ranks, os.environ)),
            _quiet(),
            signals.temporary_folder() as folder,
            _signals_passed_on() as received,
            watched() as memory,
        ):
            try:
                # Keep it until the end: on node 0 this store is where the ranks and agents of all nodes meet.
                _store = _meet(ranks) if ranks.nodes > 1 else None
                elastic_launch(_config(ranks, str(folder)), command[0])(*command[1:])
            except ChildFailedError as error:
                return _ended(error.failures, received, memory)
            except DistError as error:
                _print(
                    f"Lost the connection to the other nodes, which met at {ranks.master} (torch: "
                    f"{first_line(error)}). One of them has ended, or the network failed: see their output."
                )
                return 1
        return 0


def variables(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks need besides the agent's."""
    # The agent only handles the signal named here; `_signals_passed_on` handles all others.
    changed = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", STARTED_BY: str(os.getpid()), REPORTED_BY_LAUNCHER: "1"}
    if "OMP_NUM_THREADS" not in environ:
        changed["OMP_NUM_THREADS"] = str(max(1, num_cores() // ranks.per_node))
    if ranks.device_ids is not None:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if visible and max(ranks.device_ids) >= len(visible):
            raise SetupError(
                f"topology.devices = {list(ranks.device_ids)}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves GPUs 0 "
                f"to {len(visible) - 1}, renumbered. Choose from these, or unset CUDA_VISIBLE_DEVICES."
            )
        changed["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in ranks.device_ids)
    return changed


def _meet(ranks: Ranks) -> Store:
    """Waits for the other nodes and returns the store where they met."""
    if ranks.master is None:
        raise SetupError(f"{ranks.nodes} nodes need a place to meet. Give --master HOST:PORT on every node.")
    host, port = split_address(ranks.master)
    meeting = Meeting(
        "node",
        ranks.node_rank,
        ranks.nodes,
        ranks.master,
        ranks.timeout_s,
        prefix="fullshard-nodes",
        advice=f"Run the same command on every node, with --node-rank 0 to {ranks.nodes - 1} and the address of node 0 "
        "as --master, and let firewalls pass the port.",
        claim="--node-rank",
    )
    mine = facts(options={"--nodes": ranks.nodes, "--devices": ranks.per_node})
    serve = ranks.node_rank == 0
    store = meeting.connect(host, port, serve=serve)
    if serve and not is_local(host):
        _check_elsewhere(meeting, host, port, mine)
    meeting.gather(store, mine)
    return store


def _check_elsewhere(meeting: Meeting, host: str, port: int, mine: Facts) -> None:
    """Node 0 does not have the master's address: it is behind a forwarded port, or there is a second node 0."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        store = meeting.connect(host, port, serve=False)
        if store.check(["member-0"]):
            raise meeting.refuse_double(store, mine)
        return
    _print(f"{host} is not an address of this machine, but the other nodes look for node 0 there. Check --master.")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _config(ranks: Ranks, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if ranks.nodes > 1:
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
    return LaunchConfig(
        min_nodes=ranks.nodes,
        max_nodes=ranks.nodes,
        nproc_per_node=ranks.per_node,
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **meeting,
    )


def _ended(failures: Mapping[int, ProcessFailure], received: _Received, memory: MemoryWatch) -> int:
    """Reports how a run with failed ranks ended; returns its exit code."""
    end = End({rank: _seen(failure) for rank, failure in failures.items()})
    if received.first is not None and end.follows(received.first, at_once=received.at_once):
        return _stopped(received.first, at_once=received.at_once)
    for line in end.report(killed=why_killed(memory.before_the_end())):
        _print(line)
    return end.exit_code


def _seen(failure: ProcessFailure) -> Failure:
    words = handed_over(failure.error_file_data)
    return Failure(failure.exitcode, failure.pid, failure.timestamp, words)


def _stopped(number: int, *, at_once: bool) -> int:
    """A signal ended the ranks before they could react: they were not listening yet, or were killed at once."""
    if not signals.in_command() or number not in signals.STOP_SIGNALS:
        _print(f"Stopped by {signals.name_of(number)}.")
        return 128 + number
    _print(f"{signals.AT_ONCE}." if at_once else signals.unsaved(number))
    return EXIT_PREEMPTED


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the agent's log lines and warnings off the console: `_ended` reports what matters."""
    import torch.distributed.launcher.api  # noqa: F401  makes the loggers

    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    enabled = [logger for logger in loggers if not logger.disabled]
    for logger in enabled:
        logger.disabled = True
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger in enabled:
            logger.disabled = False


@dataclass
class _Received:
    """The signals that the launcher has passed on."""

    first: int | None = None
    at: float = math.inf
    at_once: bool = False


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[_Received]:
    """Passes signals on to the ranks. A second Ctrl-C, or another signal a while after the first, kills them."""
    received, others = _Received(), set(_children())

    def pass_on(number: int) -> None:
        started = [pid for pid in _children() if pid not in others]
        if not started:
            if signals.in_command():
                signals.nothing_to_save(number)
            raise SystemExit(128 + number)
        again = number == signal.SIGINT and received.first == number
        received.at_once |= again or time.monotonic() - received.at > signals.ECHO_S
        received.first, received.at = received.first or number, min(received.at, time.monotonic())
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if received.at_once else number)

    numbers = (*signals.STOP_SIGNALS, signal.SIGHUP)
    with signals.heard_by(pass_on, numbers, in_thread=signals.in_command()):
        yield received


def _children() -> list[int]:
    import psutil  # type: ignore[import-untyped]

    return [child.pid for child in psutil.Process().children()]


__all__ = ["Local"]
