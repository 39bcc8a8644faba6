"""This process among the ranks: its number, its device, how it joins and leaves.

Must not know models, data or what the ranks are for.
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from fullshard.contracts.world import World
from fullshard.dist.env import check_devices
from fullshard.explain.host_memory import peak_of_family
from fullshard.faults.segments import grow_segments
from fullshard.faults.watchdog import GRACE_S
from fullshard.launch.addresses import address_towards, choose_interface
from fullshard.launch.rendezvous import Meeting, facts

BOTH = "cpu:gloo,cuda:nccl"
"""The backends of a group on GPUs."""
stays = False
"""Whether the process group outlives the run: the calling program made it, or goes on with the sharded model."""


def choose_device_type(wanted: str) -> str:
    """`auto` means CUDA if there is a GPU; an explicit choice that is not available is an error."""
    num_gpus = torch.cuda.device_count()
    check_devices(1, wanted, num_gpus=num_gpus)
    return "cuda" if num_gpus and wanted != "cpu" else "cpu"


def join(*, device: str, backend: str, timeout_s: float) -> World:
    """Joins the process group that RANK, WORLD_SIZE, ... describe; a single process needs no variables."""
    global stays
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    place = torch.device(choose_device_type(device))
    if place.type == "cuda":
        # LOCAL_RANK, never RANK: on the second node RANK is beyond the last GPU. The remainder is for ranks that share
        # a GPU over gloo, and for SLURM tasks that each see one GPU; `proofs/launch.py` refuses too many ranks.
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        grow_segments(os.environ)
        torch.cuda.set_device(place)
    if backend == "auto":
        backend = "nccl" if place.type == "cuda" else "gloo"
    # A gloo group beside NCCL carries host tensors: offloaded gradients are clipped there.
    backends = BOTH if backend == "nccl" else "gloo"
    stays = has_group()
    if not stays:
        _meet(backends, rank, size, local_rank, timeout_s)
    return World(rank, size, local_rank, local_size, place, backend, timeout_s)


def has_group() -> bool:
    """Whether the calling program has connected its ranks already."""
    return dist.is_available() and dist.is_initialized()


def _meet(backends: str, rank: int, size: int, local_rank: int, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s + GRACE_S)
    if size == 1:  # whatever MASTER_ADDR says
        dist.init_process_group(backends, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = "-".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    meeting = Meeting(
        "rank",
        rank,
        size,
        f"{host}:{port}",
        timeout_s,
        prefix=f"fullshard-{start}",
        advice="Check that every node runs the same command and that no rank has stopped.",
        first_line_s=15.0,
        silent=local_rank != 0,
    )
    # torchrun's agent holds the store for its ranks; otherwise rank 0 does.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = meeting.connect(host, port, serve=rank == 0 and not by_agent)
    found = meeting.gather(store, facts(options={}, address=address_towards(host)))
    choose_interface(host, [each["address"] for each in found], say=local_rank == 0)
    # Gloo waits five times its timeout for a connection; all ranks are here, so the rest of the time is enough.
    dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=meeting.left / 5)
    _set_pg_timeout(timeout)
    store.set_timeout(timeout)


def leave(*, at_exit: bool = False) -> None:
    """Leaves the process group, unless it outlives the run; safe to call twice."""
    if dist.is_initialized() and (at_exit or not stays):
        dist.destroy_process_group()


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peaks(device: torch.device) -> dict[str, int]:
    """Peak bytes on the device, and on the host by this rank and its children. On a CPU that is the same memory."""
    host = peak_of_family() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"memory": peak_memory(device) if device.type == "cuda" else host, "host_memory": host}
