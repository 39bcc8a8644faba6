"""The ranks that a launcher started fit together, shown before the first collective: after it a wrong variable is a
silent hang. Must not know models or data.
"""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.contracts.launcher import Topology
from fullshard.dist.env import TORCHRUN, Launch, check_devices
from fullshard.errors import SetupError
from fullshard.formatting.plural import counted
from fullshard.launch.addresses import probe_port, resolve_host


def check_launch(
    launch: Launch, topology: Topology, environ: Mapping[str, str], *, num_gpus: int, connected: bool = False
) -> None:
    """Raises SetupError for a launch that would hang or train on the wrong devices. Ranks that the calling program has
    `connected` need no address."""
    if launch.launcher == "none":
        return
    if launch.world < 1 or not 0 <= launch.rank < launch.world:
        raise SetupError(
            f"RANK={launch.rank} does not exist among WORLD_SIZE={launch.world} ranks, which are numbered from 0. "
            f"Unset RANK and WORLD_SIZE and let fullshard start the ranks, or use {TORCHRUN}."
        )
    if launch.launcher != "slurm" and launch.world > 1 and not connected:
        _check_by_hand(launch, environ, topology.nodes)
    _check_numbers(launch)
    if launch.world > 1 and not connected:
        _check_address(launch, environ)
    # Under SLURM each task may see its own GPU only; then all tasks see one.
    if launch.launcher != "slurm" or num_gpus != 1:
        check_devices(launch.local_world, topology.device, num_gpus=num_gpus, backend=topology.backend)
    idle = num_gpus - 1 if topology.device != "cpu" else 0
    if launch.launcher == "slurm" and launch.local_world == 1 and launch.num_nodes > 1 and idle > 0:
        raise SetupError(
            f"SLURM started one task on each of {launch.num_nodes} nodes, and this node has {num_gpus} GPUs: {idle} of "
            f"them would stay idle. Use srun --ntasks-per-node={num_gpus}; if you want one per node, show it one GPU: "
            "--gpus-per-task=1."
        )


def _check_by_hand(launch: Launch, environ: Mapping[str, str], nodes: int) -> None:
    """Variables set by hand: RANK used as the node number, or one process instead of several."""
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if not environ.get(name)]
    if not missing:
        return
    found = f"RANK={launch.rank} and WORLD_SIZE={launch.world} are set, {' and '.join(missing)} not"
    remedy = (
        f"Unset RANK, WORLD_SIZE and LOCAL_RANK and run on every node: fullshard train RECIPE --devices GPUS_PER_NODE "
        f"--nodes {max(nodes, 2)} --node-rank THIS_NODE --master HOST:PORT; or use {TORCHRUN}."
    )
    if (nodes > 1 and launch.rank < nodes < launch.world) or launch.local_rank > launch.rank:
        raise SetupError(
            f"{found}: RANK looks like the number of this node. RANK is the number of the process among all "
            f"{launch.world}, and the node has its own: --node-rank. {remedy}"
        )
    raise SetupError(
        f"{found}: this was set by hand, and starts one process per node instead of {launch.world} in all. The run "
        f"would wait forever for the others. {remedy}"
    )


def _check_numbers(launch: Launch) -> None:
    slurm = launch.launcher == "slurm"
    if not 0 <= launch.local_rank < launch.local_world:
        raise SetupError(
            f"LOCAL_RANK={launch.local_rank} does not exist among the LOCAL_WORLD_SIZE={launch.local_world} ranks of "
            f"this node. Let {TORCHRUN} set them."
        )
    if launch.num_nodes * launch.local_world != launch.world:
        raise SetupError(
            f"WORLD_SIZE={launch.world} is not {counted(launch.num_nodes, 'node')} x {launch.local_world} ranks: the "
            f"nodes run different numbers of processes. Start the same number on each "
            f"({'--ntasks-per-node' if slurm else '--nproc-per-node'})."
        )
    expected = launch.node_rank * launch.local_world + launch.local_rank
    if launch.rank != expected:
        order = "Use srun --distribution=block." if slurm else f"Let {TORCHRUN} set them."
        node = " RANK looks like the number of this node." if launch.rank == launch.node_rank else ""
        raise SetupError(
            f"RANK={launch.rank} does not fit: rank {launch.local_rank} of node {launch.node_rank} with "
            f"{launch.local_world} ranks per node must be RANK={expected}.{node} {order}"
        )


def _check_address(launch: Launch, environ: Mapping[str, str]) -> None:
    if launch.master_addr is None or launch.master_port is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in launch.variables()]
        raise SetupError(
            f"{' and '.join(missing)} not set: {launch.world} ranks do not know where to meet. Set MASTER_ADDR to the "
            f"address of node 0 and MASTER_PORT to a free port on every node, or use {TORCHRUN}."
        )
    resolve_host(launch.master_addr, f"MASTER_ADDR={launch.master_addr}")
    # torchrun's agent already listens there, for its ranks; otherwise rank 0 is about to.
    if launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        probe_port(launch.master_port, f"MASTER_PORT={launch.master_port}")


__all__ = ["check_launch"]
