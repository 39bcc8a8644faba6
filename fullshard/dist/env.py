"""What started this process: torchrun, accelerate launch, SLURM or nothing; and whether its variables can be right.

Everything is checked before the first collective: after it a wrong variable is a silent hang.
Must not import torch, and must not know models or data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from fullshard.dist.ranks import check_devices, probe_port, resolve_host
from fullshard.dist.slurm import expand_hosts, tasks_per_node
from fullshard.errors import SetupError
from fullshard.formatting.plural import counted

_TORCHRUN = "torchrun --nproc-per-node 8 -m fullshard train RECIPE"


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
            f"{there} and let fullshard start the ranks, or start them with {_TORCHRUN}."
        )
    if _slurm_tasks(environ) > 1:
        return _slurm_launch(environ)
    # `accelerate launch --num_processes 1` sets no rank; it has still decided that there is one process.
    return Launch("accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "none")


def export(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that torch.distributed reads, also under SLURM."""
    if launch.launcher != "none":
        environ.update(launch.variables())


def check(
    launch: Launch,
    environ: Mapping[str, str],
    *,
    num_gpus: int,
    wanted_device: str = "auto",
    nodes: int = 1,
    backend: str = "auto",
) -> None:
    """Raises SetupError for a launch that would hang or train on the wrong devices.

    `wanted_device`, `nodes` and `backend` are what the recipe says."""
    if launch.launcher == "none":
        return
    if launch.world < 1 or not 0 <= launch.rank < launch.world:
        raise SetupError(
            f"RANK={launch.rank} does not exist among WORLD_SIZE={launch.world} ranks, which are numbered from 0. "
            f"Unset RANK and WORLD_SIZE and let fullshard start the ranks, or use {_TORCHRUN}."
        )
    if launch.launcher != "slurm" and launch.world > 1:
        _check_by_hand(launch, environ, nodes)
    _check_numbers(launch)
    if launch.world > 1:
        _check_address(launch, environ)
    # Under SLURM each task may see its own GPU only; then all tasks see one.
    own_gpu = launch.launcher == "slurm" and num_gpus == 1
    if not own_gpu:
        check_devices(launch.local_world, num_gpus=num_gpus, wanted_device=wanted_device, backend=backend)
    idle = num_gpus - 1 if wanted_device != "cpu" else 0
    if launch.launcher == "slurm" and launch.local_world == 1 and launch.num_nodes > 1 and idle > 0:
        raise SetupError(
            f"SLURM started one task on each of {launch.num_nodes} nodes, and this node has {num_gpus} GPUs: {idle} of "
            f"them would stay idle. Use srun --ntasks-per-node={num_gpus}; if one per node is meant, show it one: "
            "--gpus-per-task=1."
        )


def _torch_launch(environ: Mapping[str, str], rank: int, world: int) -> Launch:
    local_rank, local_world = _whole(environ, "LOCAL_RANK"), _whole(environ, "LOCAL_WORLD_SIZE")
    per_node = local_world or 1
    node_rank, num_nodes = _whole(environ, "GROUP_RANK"), _whole(environ, "GROUP_WORLD_SIZE")
    by_accelerate = any(name.startswith("ACCELERATE_") for name in environ)
    return Launch(
        "accelerate" if by_accelerate else "torchrun",
        rank=rank,
        world=world,
        local_rank=local_rank or 0,
        local_world=per_node,
        node_rank=rank // per_node if node_rank is None else node_rank,
        num_nodes=max(1, world // per_node) if num_nodes is None else num_nodes,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_whole(environ, "MASTER_PORT"),
    )


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of this job step; 1 in a batch script or a shell of salloc: one process in a larger allocation."""
    if "SLURM_PROCID" not in environ or "SLURM_LOCALID" not in environ:
        return 1
    tasks = _whole(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is not None:
        return tasks
    # Without the step's variables only a task beyond the first proves that srun started several.
    return (_whole(environ, "SLURM_NTASKS") or 1) if _whole(environ, "SLURM_PROCID") else 1


def _slurm_launch(environ: Mapping[str, str]) -> Launch:
    world = _slurm_tasks(environ)
    hosts = expand_hosts(_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "localhost")
    num_nodes = _whole(environ, "SLURM_STEP_NUM_NODES") or _whole(environ, "SLURM_NNODES") or len(hosts)
    node_rank = _whole(environ, "SLURM_NODEID") or 0
    per_node = tasks_per_node(_first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
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
        # Every task computes the same port; below the range from which systems hand out ports by themselves.
        master_port=_whole(environ, "MASTER_PORT") or 10_000 + (31 * job + step) % 20_000,
    )


def _check_by_hand(launch: Launch, environ: Mapping[str, str], nodes: int) -> None:
    """Variables set by hand: RANK used as the node number, or one process instead of several."""
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if not environ.get(name)]
    if not missing:
        return
    said = f"RANK={launch.rank} and WORLD_SIZE={launch.world} are set, {' and '.join(missing)} not"
    by_itself = (
        f"Unset RANK, WORLD_SIZE and LOCAL_RANK and run on every node: fullshard train RECIPE --devices GPUS_PER_NODE "
        f"--nodes {max(nodes, 2)} --node-rank THIS_NODE --master HOST:PORT; or use {_TORCHRUN}."
    )
    local_rank = _whole(environ, "LOCAL_RANK")
    if (nodes > 1 and launch.rank < nodes < launch.world) or (local_rank is not None and local_rank > launch.rank):
        raise SetupError(
            f"{said}: RANK looks like the number of this node. RANK is the number of the process among all "
            f"{launch.world}, and the node has its own: --node-rank. {by_itself}"
        )
    raise SetupError(
        f"{said}: this was set by hand, and starts one process per node instead of {launch.world} in all. The run "
        f"would wait forever for the others. {by_itself}"
    )


def _check_numbers(launch: Launch) -> None:
    slurm = launch.launcher == "slurm"
    if not 0 <= launch.local_rank < launch.local_world:
        raise SetupError(
            f"LOCAL_RANK={launch.local_rank} does not exist among the LOCAL_WORLD_SIZE={launch.local_world} ranks of "
            f"this node. Let {_TORCHRUN} set them."
        )
    if launch.num_nodes * launch.local_world != launch.world:
        raise SetupError(
            f"WORLD_SIZE={launch.world} is not {counted(launch.num_nodes, 'node')} x {launch.local_world} ranks: the "
            f"nodes run different numbers of processes. Start the same number on each "
            f"({'--ntasks-per-node' if slurm else '--nproc-per-node'})."
        )
    expected = launch.node_rank * launch.local_world + launch.local_rank
    if launch.rank != expected:
        order = "Use srun --distribution=block." if slurm else f"Let {_TORCHRUN} set them."
        node = " RANK looks like the number of this node." if launch.rank == launch.node_rank else ""
        raise SetupError(
            f"RANK={launch.rank} does not fit: rank {launch.local_rank} of node {launch.node_rank} with "
            f"{launch.local_world} ranks per node must be RANK={expected}.{node} {order}"
        )


def _check_address(launch: Launch, environ: Mapping[str, str]) -> None:
    missing = [n for n, v in (("MASTER_ADDR", launch.master_addr), ("MASTER_PORT", launch.master_port)) if v is None]
    if missing:
        raise SetupError(
            f"{' and '.join(missing)} not set: {launch.world} ranks do not know where to meet. Set MASTER_ADDR to the "
            f"address of node 0 and MASTER_PORT to a free port on every node, or use {_TORCHRUN}."
        )
    assert launch.master_addr is not None
    assert launch.master_port is not None
    resolve_host(launch.master_addr, f"MASTER_ADDR={launch.master_addr}")
    # torchrun's agent already listens there, for its ranks; otherwise rank 0 is about to.
    if launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        probe_port(launch.master_port, f"MASTER_PORT={launch.master_port}")


def _whole(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text):
        raise SetupError(f"{name}={text} is not a whole number. Unset it, or let torchrun or SLURM set it.")
    return int(text)


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
