"""Starts the ranks of this machine with torchrun's elastic agent, waits for them, and prints how the run ended.

A single node uses a port that the system picks, so two runs never clash; several nodes meet at HOST:PORT. Ranks that
failed may be started again: a new agent, with new addresses. Signals are passed on to the ranks, so that they can save
and end by themselves. Must not know recipes; imports torch only to start ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.contracts.launcher import STARTED_BY, Launcher, Ranks
from fullshard.errors import EXIT_PREEMPTED, SetupError, first_line
from fullshard.explain.ended import out_of_memory, why_killed
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER, handed_over
from fullshard.explain.host_memory import MemoryWatch, watched
from fullshard.faults import attempts, early_quit, gpus
from fullshard.faults.end import End, Failure
from fullshard.faults.nodes import Ended
from fullshard.faults.run_before import awaited_its_end
from fullshard.faults.steps import step_of
from fullshard.launch import signals
from fullshard.launch.addresses import is_local, split_address
from fullshard.launch.rendezvous import Facts, Meeting, facts

if TYPE_CHECKING:
    from torch.distributed import Store


class Local(Launcher):
    """Processes on this machine: one per GPU, or the requested number on a CPU."""

    def start(self, command: Sequence[str], ranks: Ranks) -> int:
        before, stores = dict(os.environ), list[Any]()
        with _environment(), _quiet(), signals.temporary_folder() as folder, _signals_passed_on() as received:

            def attempt(ranks: Ranks, place: Path, name: str, stopped: Callable[[], bool]) -> Ended:
                os.environ.update(variables(ranks, before))
                return _attempt(command, ranks, place, name, received, stopped=stopped)

            meet = functools.partial(_meet, stores)
            return attempts.run(ranks, attempt, meet=meet, ranks_left=self.ranks_left, folder=folder, say=_print)

    def ranks_left(self, ranks: Ranks) -> Ranks:
        """Those that this node could start now: a GPU may have failed."""
        return gpus.ranks_left(ranks) if ranks.own_gpus else ranks


def _attempt(
    command: Sequence[str], ranks: Ranks, place: Path, name: str, received: _Received, *, stopped: Callable[[], bool]
) -> Ended:
    """Starts the ranks of this node, and waits until they have ended."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    ended = Ended(ranks.node_rank, socket.gethostname(), 0)
    with watched() as memory:
        try:
            elastic_launch(_config(ranks, str(place), name), command[0])(*command[1:])
            return ended
        except DistError as error:
            _print(f"Lost the connection to the other nodes, which met at {ranks.master} (torch: {first_line(error)}).")
            return replace(ended, code=1, victim=True, why="lost the connection to the other nodes")
        except ChildFailedError as error:
            failures = ((rank, each, handed_over(each.error_file_data)) for rank, each in error.failures.items())
            end = End({rank: Failure(each.exitcode, each.pid, each.timestamp, said) for rank, each, said in failures})
        if stopped():
            return replace(ended, code=1, victim=True, why="was stopped, because ranks of another node had failed")
        code, why = _code(end, received, memory), end.why(out_of_memory(memory.before_the_end()))
    step, by_signal = step_of(place, end.cause), received.first is not None
    return replace(ended, code=code, rank=end.cause, why=why, step=step, victim=end.only_victims, stopped=by_signal)


def variables(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks need besides the agent's."""
    # The agent only handles the signal named here; `_signals_passed_on` handles all others.
    changed = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGXCPU", STARTED_BY: str(os.getpid()), REPORTED_BY_LAUNCHER: "1"}
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


def _meet(stores: list[Any], ranks: Ranks, attempt: int, own: Facts) -> tuple[Store, list[Facts]]:
    """Waits for the other nodes; returns another connection to the store where they met, and what each of them said.

    `stores` are kept until the run ends: on node 0 they are where the ranks and agents of all nodes meet."""
    if ranks.master is None:
        raise SetupError(f"{ranks.nodes} nodes need a place to meet. Give --master HOST:PORT on every node.")
    host, port = split_address(ranks.master)
    me, size, prefix = ranks.node_rank, ranks.nodes, f"fullshard-nodes-{attempt}"
    advice = (
        f"Run the same command on every node, with --node-rank 0 to {size - 1} and the address of node 0 as --master, "
        "and open the port in any firewall."
    )
    meeting = Meeting("node", me, size, ranks.master, ranks.timeout_s, prefix, advice=advice, claim="--node-rank")
    most = ranks.restarts.most if ranks.restarts else 0
    mine = facts(options={"--nodes": size, "--devices": ranks.per_node, "--restarts": most}, **own)
    store = meeting.connect(host, port, serve=me == 0)
    if me == 0 and not attempt and not is_local(host):
        _check_elsewhere(meeting, host, port, mine)
    # A connection of its own: where the network is cut, its calls do not return.
    talk = replace(meeting, prefix="fullshard-talk").connect(host, port, serve=False)
    if awaited_its_end(meeting, store, talk):
        return _meet(stores, ranks, attempt, own)
    stores.append(store)
    return talk, meeting.gather(store, mine)


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


def _config(ranks: Ranks, folder: str, run_id: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if ranks.nodes > 1:
        meeting: dict[str, Any] = {
            "rdzv_backend": "static",
            "rdzv_endpoint": ranks.master,
            "rdzv_configs": {"rank": ranks.node_rank, "timeout": ranks.timeout_s},
        }
    else:
        meeting = {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",
            "rdzv_configs": {"timeout": ranks.timeout_s},
            "local_addr": "127.0.0.1",  # the host's own name may not resolve in a container
        }
    return LaunchConfig(
        min_nodes=ranks.nodes,
        max_nodes=ranks.nodes,
        nproc_per_node=ranks.per_node,
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGXCPU",
        run_id=run_id,  # names the keys of the store: no attempt sees the addresses of another
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **meeting,
    )


def _code(end: End, received: _Received, memory: MemoryWatch) -> int:
    """Reports how ranks of this node failed; returns their exit code."""
    if received.first is not None and end.follows(received.first, at_once=received.at_once):
        return _stopped(received.first, at_once=received.at_once)
    for line in end.report(killed=why_killed(memory.before_the_end())):
        _print(line)
    return end.exit_code


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
def _environment() -> Iterator[None]:
    """Restores the variables that every attempt sets for its ranks."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the agent's log lines and warnings off the console: `_code` reports what matters."""
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
        if number == signal.SIGQUIT:
            early_quit.pass_on(started)
            return
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

    numbers = (*signals.STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
    with signals.heard_by(pass_on, numbers, in_thread=signals.in_command()):
        yield received


def _children() -> list[int]:
    import psutil  # type: ignore[import-untyped]

    return [child.pid for child in psutil.Process().children()]


__all__ = ["Local"]
