"""The ranks of a run: started already by torchrun, accelerate launch or SLURM, or still to be started.

The variables of these launchers are read here, without scontrol, which most containers lack. Must not
import torch (the caller counts the GPUs), and must not know models or data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from fullshard.contracts.launcher import Ranks, Topology
from fullshard.dialects.slurm_lists import expand_hosts, tasks_per_node
from fullshard.errors import SetupError
from fullshard.formatting.plural import counted
from fullshard.launch.addresses import is_local, probe_port, resolve_host, split_address

TORCHRUN = "torchrun --nproc-per-node 8 -m fullshard train RECIPE"


@dataclass(frozen=True)
class Launch:
    """This process as its launcher describes it."""

    launcher: Literal["torchrun", "accelerate", "slurm", "none"]
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None

    def variables(self) -> dict[str, str]:
        """The variables that torch.distributed reads."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in found.items() if value is not None}


def detect(environ: Mapping[str, str]) -> Launch:
    """Reads the launcher's variables; `none` if this process starts the ranks itself."""
    rank, world = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
    if rank is not None and world is not None:
        return _torch_launch(environ, rank, world)
    if (rank or 0) > 0 or (world or 1) > 1:
        there, missing = ("RANK", "WORLD_SIZE") if world is None else ("WORLD_SIZE", "RANK")
        raise SetupError(
            f"{there}={environ[there]} is set, {missing} is not: this is half of a launcher's environment. Unset "
            f"{there} and let fullshard start the ranks, or start them with {TORCHRUN}."
        )
    if _slurm_tasks(environ) > 1:
        return _slurm_launch(environ)
    # `accelerate launch --num_processes 1` sets no rank; it has still decided that there is one process.
    return Launch("accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "none")


def export(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that torch.distributed reads, also under SLURM."""
    if launch.launcher != "none":
        environ.update(launch.variables())


def _torch_launch(environ: Mapping[str, str], rank: int, world: int) -> Launch:
    per_node = _whole(environ, "LOCAL_WORLD_SIZE") or 1
    node_rank, num_nodes = _whole(environ, "GROUP_RANK"), _whole(environ, "GROUP_WORLD_SIZE")
    # Ray sets ACCELERATE_TORCH_DEVICE, without accelerate.
    by_accelerate = any(name.startswith("ACCELERATE_") for name in environ.keys() - {"ACCELERATE_TORCH_DEVICE"})
    return Launch(
        "accelerate" if by_accelerate else "torchrun",
        rank=rank,
        world=world,
        local_rank=_whole(environ, "LOCAL_RANK") or 0,
        local_world=per_node,
        node_rank=rank // per_node if node_rank is None else node_rank,
        num_nodes=max(1, world // per_node) if num_nodes is None else num_nodes,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_whole(environ, "MASTER_PORT"),
    )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of this job step; 1 in a batch script or a shell of salloc, which is one process in a larger allocation."""
    if "SLURM_PROCID" not in environ or "SLURM_LOCALID" not in environ:
        return 1
    # Without the step's variables only a task beyond the first proves that srun started several.
    several = _whole(environ, "SLURM_NTASKS") if _whole(environ, "SLURM_PROCID") else None
    return _whole(environ, "SLURM_STEP_NUM_TASKS") or several or 1


def _slurm_launch(environ: Mapping[str, str]) -> Launch:
    def first(*names: str) -> str:
        return next((environ[name] for name in names if environ.get(name)), "")

    world = _slurm_tasks(environ)
    hosts = expand_hosts(first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "localhost")
    num_nodes = _whole(environ, "SLURM_STEP_NUM_NODES") or _whole(environ, "SLURM_NNODES") or len(hosts)
    node_rank = _whole(environ, "SLURM_NODEID") or 0
    per_node = tasks_per_node(first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    job, step = _whole(environ, "SLURM_JOB_ID") or 0, _whole(environ, "SLURM_STEP_ID") or 0
    return Launch(
        "slurm",
        rank=_whole(environ, "SLURM_PROCID") or 0,
        world=world,
        local_rank=_whole(environ, "SLURM_LOCALID") or 0,
        local_world=per_node[node_rank] if node_rank < len(per_node) else max(1, world // num_nodes),
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or hosts[0],
        # Every task computes the same port, below the range from which systems pick free ports.
        master_port=_whole(environ, "MASTER_PORT") or 10_000 + (31 * job + step) % 20_000,
    )


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text} is not a whole number. Unset it, or let torchrun or SLURM set it.")
    return int(text)


def ranks_for(topology: Topology, *, num_gpus: int, node_rank: int | None = None, master: str | None = None) -> Ranks:
    """The ranks to start on this node."""
    device, devices = topology.device, topology.devices
    node_rank = check_nodes(nodes=topology.nodes, node_rank=node_rank, master=master)
    on_cpu = device == "cpu" or (device == "auto" and num_gpus == 0)
    ids = tuple(devices) if isinstance(devices, list) else None
    if ids is not None and on_cpu:
        raise SetupError(
            f"topology.devices = {devices} names GPUs, but this run is on the CPU"
            f"{'' if device == 'cpu' else ': torch sees no GPU here'}. Give a process count: --devices {len(ids)}."
        )
    automatic = 1 if on_cpu else num_gpus
    per_node = len(ids) if ids is not None else devices if isinstance(devices, int) else automatic
    check_devices(per_node, device, num_gpus=num_gpus, backend=topology.backend)
    if ids and max(ids) >= num_gpus:
        raise SetupError(
            f"topology.devices = {devices}: this node has no GPU {max(ids)}; its GPUs are numbered 0 to "
            f"{num_gpus - 1}. Choose from these."
        )
    own = not on_cpu and topology.backend != "gloo"
    return Ranks(per_node, topology.nodes, node_rank, master, ids, timeout_s=topology.timeout_s, own_gpus=own)


def check_devices(per_node: int, wanted: str, *, num_gpus: int, backend: str = "auto") -> None:
    """Raises SetupError if a node has too few GPUs for its ranks; ranks can share one only over gloo."""
    if wanted == "cuda" and num_gpus == 0:
        raise SetupError(
            "topology.device = cuda, but torch sees no GPU here. Use topology.device=cpu, or check the driver, "
            "CUDA_VISIBLE_DEVICES and that this torch is a CUDA build."
        )
    if wanted != "cpu" and num_gpus and per_node > num_gpus and backend != "gloo":
        raise SetupError(
            f"{per_node} ranks on this node, but torch sees {counted(num_gpus, 'GPU')} here, and NCCL needs one GPU "
            f"per rank. Use --devices {num_gpus}, more nodes, or topology.device=cpu."
        )


def check_nodes(*, nodes: int, node_rank: int | None, master: str | None) -> int:
    """The number of this node, for ranks that fullshard starts. Raises SetupError if nodes cannot find each other."""
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise SetupError(
            f"--node-rank {node_rank} does not exist: {counted(nodes, 'node')} {'is' if nodes == 1 else 'are'} "
            f"numbered 0{f' to {nodes - 1}' if nodes > 1 else ''}. Check --nodes and --node-rank."
        )
    if nodes == 1:
        return 0
    if master is None:
        raise SetupError(
            f"--nodes {nodes} needs a place where the nodes meet. On every node run the same command with --nodes "
            f"{nodes} --node-rank 0 (then 1, ...) --master HOST:PORT, where HOST is the address of node 0, such as "
            "10.0.0.1:29500."
        )
    host, port = split_address(master)
    resolve_host(host, f"--master {master}")
    if node_rank is None and not is_local(host):
        others = "1" if nodes == 2 else f"1 to {nodes - 1}, another on each node"
        raise SetupError(
            f"--nodes {nodes} --master {master}: --node-rank is missing, and {host} is not an address of this machine, "
            f"so this is not node 0. Give --node-rank {others}."
        )
    if not node_rank:
        probe_port(port, f"--master {master}")
    return node_rank or 0
