"""The nodes of a job as its engine describes them to each node: Kubeflow Trainer, SkyPilot and dstack.

They start one command on every node and leave the ranks to it. Where the recipe leaves nodes and devices open, these
variables fill them in, and the nodes meet where the engine says. Must not import torch, nor start anything.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.dialects.rows import Dialect, Settings, nested
from fullshard.dialects.translate import Translation
from fullshard.errors import AbsentError, SetupError
from fullshard.formatting.plural import counted

PORT = 29500
"""Where the nodes meet if the engine names no port."""


@dataclass(frozen=True)
class EngineNodes:
    """What an engine says about the job and this node."""

    engine: str
    nodes: int
    settings: Settings
    """Recipe keys that follow."""
    counted_by: str
    """The variable with the number of nodes, and its value."""
    node_rank: int = 0
    host: str | None = None
    port: int = PORT

    @property
    def master(self) -> str | None:
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host
        return f"{host}:{self.port}" if host else None


class FromEngine(Translation):
    """Settings from an engine: the recipe may choose otherwise, and a contradiction is found when the nodes meet."""

    def layers(self, left_out: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        return nested(self.settings), {}


def nodes_of(environ: Mapping[str, str]) -> EngineNodes | None:
    """The nodes of the engine that started this process; None without an engine, or if a launcher started the ranks."""
    if "LOCAL_RANK" in environ:
        return None
    return _kubeflow(environ) or _skypilot(environ) or _dstack(environ)


def settings(environ: Mapping[str, str]) -> FromEngine | None:
    """What the engine decides, in our words."""
    found = nodes_of(environ)
    if found is None or not found.settings:
        return None
    return FromEngine(Dialect(found.engine, found.engine, (), launches=True), found.engine, (), found.settings)


def meeting(
    environ: Mapping[str, str], *, nodes: int, chosen: bool = False, timeout_s: float
) -> tuple[int | None, str | None]:
    """The number of this node and HOST:PORT of node 0, once the host is known. With nodes `chosen` on the command line
    that are not the engine's, its variables have no effect."""
    found = nodes_of(environ)
    if found is None or (chosen and nodes != found.nodes):
        return None, None
    if nodes != found.nodes:
        raise SetupError(
            f"topology.nodes = {nodes} in the recipe, but {found.engine} started {counted(found.nodes, 'node')} "
            f"({found.counted_by}). Remove topology.nodes from the recipe, or ask {found.engine} for "
            f"{counted(nodes, 'node')}. --nodes on the command line wins over both."
        )
    if found.host is None:
        return None, None
    _wait_for_name(found.host, timeout_s=timeout_s)
    return found.node_rank, found.master


def _wait_for_name(host: str, *, timeout_s: float) -> None:
    """In a cluster a name is known only when node 0 has an address, which may be after the other nodes have started."""
    begun, said = time.monotonic(), False
    while not _resolves(host):
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise AbsentError(
                f"The name of node 0, {host}, was not known here within topology.timeout_s = {timeout_s:g} s. See "
                "whether node 0 has started."
            )
        if waited > 5 and not said:
            sys.stderr.write(f"Waiting for node 0: its name {host} is not known here yet.\n")
            said = True
        time.sleep(0.2)


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _kubeflow(environ: Mapping[str, str]) -> EngineNodes | None:
    """PET_*: torchrun's own options as variables, which Kubeflow Trainer sets on every node."""
    if not any(environ.get(name) for name in ("PET_NNODES", "PET_NPROC_PER_NODE")):
        return None
    names = _Names("Kubernetes", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    return names.read(environ, _processes(environ.get("PET_NPROC_PER_NODE", "").strip()))


def _skypilot(environ: Mapping[str, str]) -> EngineNodes | None:
    if not environ.get("SKYPILOT_NODE_IPS"):
        return None
    names = _Names("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    return names.read(environ, _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE"))


def _dstack(environ: Mapping[str, str]) -> EngineNodes | None:
    if not environ.get("DSTACK_NODES_NUM"):
        return None
    names = _Names("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP")
    return names.read(environ, _gpus(environ, "DSTACK_GPUS_PER_NODE"))


@dataclass(frozen=True)
class _Names:
    """The variables of an engine."""

    engine: str
    nodes: str
    node_rank: str
    host: str
    """An address, or those of all nodes, of which the first is that of node 0."""
    port: str = "MASTER_PORT"

    def read(self, environ: Mapping[str, str], ranks: Settings) -> EngineNodes:
        hosts = environ.get(self.host, "").split()
        nodes = _whole(environ, self.nodes) or max(1, len(hosts))
        if nodes == 1:
            return EngineNodes(self.engine, 1, ranks, f"{self.nodes}=1")
        node_rank, counted_by = _whole(environ, self.node_rank), f"{self.nodes}={nodes}"
        missing = [name for name, value in ((self.node_rank, node_rank), (self.host, hosts or None)) if value is None]
        if missing:
            raise SetupError(
                f"{counted_by} is set, {' and '.join(missing)} not: this is a part of what {self.engine} sets on a "
                f"node. Unset {self.nodes} to train on this node alone."
            )
        if len(hosts) not in (1, nodes):
            raise SetupError(
                f"{counted_by}, but {self.host} has {counted(len(hosts), 'address')}. Let {self.engine} set both."
            )
        port = _whole(environ, self.port) or PORT
        return EngineNodes(
            self.engine, nodes, {**ranks, "topology.nodes": nodes}, counted_by, node_rank or 0, hosts[0], port
        )


def _gpus(environ: Mapping[str, str], name: str) -> Settings:
    """A rank for each GPU that the engine has reserved on a node; none reserved leaves it to the recipe."""
    number = _whole(environ, name)
    return {"topology.device": "cuda", "topology.devices": number} if number else {}


def _processes(text: str) -> Settings:
    """PET_NPROC_PER_NODE as torchrun reads it: a number, or `gpu`, `cpu` or `auto`."""
    if text in ("auto", "gpu", ""):
        return {"topology.device": "cuda"} if text == "gpu" else {}
    if text == "cpu":
        return {"topology.device": "cpu", "topology.devices": len(os.sched_getaffinity(0))}
    if not text.isdigit() or not int(text):
        raise SetupError(f"PET_NPROC_PER_NODE={text} is not a number of ranks, auto, gpu or cpu. Correct or unset it.")
    return {"topology.devices": int(text)}


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if ":" in text:
        raise SetupError(
            f"{name}={text} is a range: fullshard trains on a fixed number of nodes, and resumes on any other. Ask for "
            "one number."
        )
    if not text.isdigit():
        raise SetupError(f"{name}={text} is not a whole number. Correct or unset it.")
    return int(text)
