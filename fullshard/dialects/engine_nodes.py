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

    def agrees(self, other: EngineNodes) -> bool:
        """Whether two engines say the same about this node, as far as both say it."""
        shared = self.settings.keys() & other.settings.keys()
        mine, theirs = ((each.nodes, each.node_rank, each.host) for each in (self, other))
        return mine == theirs and all(self.settings[key] == other.settings[key] for key in shared)

    def __str__(self) -> str:
        host = f", node 0 at {self.host}" if self.host else ""
        ranks = f", {devices} ranks" if (devices := self.settings.get("topology.devices")) else ""
        return f"{self.counted_by}, this is node {self.node_rank}{host}{ranks}"

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
    found = [nodes for read in (_kubeflow, _skypilot, _dstack) if (nodes := read(environ))]
    for one, other in zip(found, found[1:], strict=False):
        if not one.agrees(other):
            unset = " or ".join(f"{each.counted_by.partition('_')[0]}_*" for each in (one, other))
            raise SetupError(
                f"{one.engine} and {other.engine} both describe this node, and differ: {one} against {other}. Unset "
                f"the variables of the one that did not start it: {unset}."
            )
    return found[0] if found else None


def settings(environ: Mapping[str, str]) -> FromEngine | None:
    """What the engine decides, in our words."""
    found = nodes_of(environ)
    if found is None or not found.settings:
        return None
    return FromEngine(Dialect(found.engine, found.engine, (), launches=True), found.engine, (), found.settings)


def meeting(
    environ: Mapping[str, str], *, nodes: int, chosen: bool = False, timeout_s: float | None
) -> tuple[int | None, str | None]:
    """The number of this node and HOST:PORT of node 0, once the host is known; without a timeout at once. With nodes
    `chosen` on the command line that are not the engine's, its variables have no effect."""
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
    if timeout_s is not None:
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
    """PET_*: torchrun's own options as variables, which Kubeflow Trainer sets on every node. One alone may be meant:
    torchrun's default is one node."""
    names = _Names("Kubernetes", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", alone=True)
    if not environ.get("PET_NPROC_PER_NODE") and not names.any_of(environ):
        return None
    return names.read(environ, _processes(environ.get("PET_NPROC_PER_NODE", "").strip()))


def _skypilot(environ: Mapping[str, str]) -> EngineNodes | None:
    names = _Names("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", every_host=True)
    return names.read(environ, _gpus(environ, "SKYPILOT_NUM_GPUS_PER_NODE")) if names.any_of(environ) else None


def _dstack(environ: Mapping[str, str]) -> EngineNodes | None:
    names = _Names("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP")
    return names.read(environ, _gpus(environ, "DSTACK_GPUS_PER_NODE")) if names.any_of(environ) else None


@dataclass(frozen=True)
class _Names:
    """The variables of an engine."""

    engine: str
    nodes: str
    node_rank: str
    host: str
    port: str = "MASTER_PORT"
    every_host: bool = False
    """Whether `host` has the addresses of all nodes, that of node 0 first, or only that of node 0."""
    alone: bool = False
    """Whether one node is meant if `nodes` is not set."""

    def any_of(self, environ: Mapping[str, str]) -> bool:
        return any(environ.get(name, "").strip() for name in (self.nodes, self.node_rank, self.host))

    def read(self, environ: Mapping[str, str], ranks: Settings) -> EngineNodes:
        hosts, node_rank = environ.get(self.host, "").split(), _whole(environ, self.node_rank)
        nodes = self._nodes(environ, hosts)
        counted_by = f"{self.nodes}={nodes}"
        if node_rank is not None and node_rank >= nodes:
            numbers = f"0 to {nodes - 1}" if nodes > 1 else "0"
            raise SetupError(
                f"{self.node_rank}={node_rank}, but {counted_by}: nodes have the numbers {numbers}. Let {self.engine} "
                "set both."
            )
        if self.every_host and hosts and len(hosts) != nodes:
            raise SetupError(
                f"{counted_by}, but {self.host} has {counted(len(hosts), 'address')}. Let {self.engine} set both."
            )
        if nodes == 1:
            return EngineNodes(self.engine, 1, ranks, counted_by)
        missing = [name for name, value in ((self.node_rank, node_rank), (self.host, hosts or None)) if value is None]
        if missing:
            raise self._incomplete(counted_by, missing)
        port = _whole(environ, self.port)
        if port is not None and not 0 < port < 65536:
            raise SetupError(f"{self.port}={port} is not a port: 1 to 65535. Correct or unset it.")
        return EngineNodes(
            self.engine, nodes, {**ranks, "topology.nodes": nodes}, counted_by, node_rank or 0, hosts[0], port or PORT
        )

    def _nodes(self, environ: Mapping[str, str], hosts: Sequence[str]) -> int:
        nodes = _whole(environ, self.nodes)
        if nodes == 0:
            raise SetupError(f"{self.nodes}=0 is not a number of nodes: 1 or more. Correct or unset it.")
        if nodes is not None:
            return nodes
        if (self.every_host and hosts) or self.alone:
            return max(1, len(hosts)) if self.every_host else 1
        given = next(name for name in (self.host, self.node_rank) if environ.get(name, "").strip())
        raise self._incomplete(f"{given}={environ[given].strip()}", [self.nodes])

    def _incomplete(self, given: str, missing: Sequence[str]) -> SetupError:
        """A half of what an engine sets would train on one node where several are meant."""
        are, every = ("is", "both") if len(missing) == 1 else ("are", "all three")
        return SetupError(
            f"{given} is set but {' and '.join(missing)} {are} not; {self.engine} sets {every}. To train on this node "
            f"alone, unset {given.partition('=')[0]}."
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
