"""This process among the ranks of a program with its own loop. Must not know models."""

from __future__ import annotations

import atexit
import gc
import os
import time
from typing import Literal

import torch

from fullshard.config.part import decode
from fullshard.contracts.launcher import Topology
from fullshard.contracts.world import World
from fullshard.dist import env, reduce
from fullshard.dist import world as worlds
from fullshard.dist.precision import avoid_broken_amx
from fullshard.errors import SetupError
from fullshard.setup.on_ranks import check_launch

NOT_JOINED = (
    "The ranks are not connected: call fullshard.shard(model) first, or fullshard.init(), and keep the process group "
    "open until the last save."
)


def init(
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    backend: Literal["auto", "nccl", "gloo"] = "auto",
    timeout_s: float = 600.0,
) -> World:
    """Connects the ranks that torchrun, accelerate or SLURM started; without a launcher there is one rank. Returns
    `rank`, `size`, `device` and `is_main`. `shard` does it as well, so call this only to know them earlier."""
    asked = {"device": device, "backend": backend, "timeout_s": timeout_s}
    topology = decode(Topology, asked, where="fullshard.init")
    device, backend = topology.device, topology.backend  # a synonym, such as gpu, is ours now
    if device == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            'device = "cuda", but torch sees no GPU here. Use device="cpu", or check the driver, CUDA_VISIBLE_DEVICES '
            "and that this torch is a CUDA build."
        )
    if torch.distributed.is_initialized():
        return _of_the_program(device, timeout_s)
    launch = env.detect(os.environ)
    check_launch(launch, topology)
    env.export(launch)
    if worlds.choose_device_type(device) == "cpu":
        avoid_broken_amx()
    world = worlds.join(device=device, backend=backend, timeout_s=timeout_s)
    stay_joined()
    return world


def stay_joined() -> None:
    """Keeps the process group until the program ends."""
    worlds.stays = True
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    """Leaves the ranks. A thread of gloo that still holds a tensor when Python ends would abort the process, so what
    refers to the group is freed first, and the threads get a moment to run."""
    if torch.distributed.is_initialized() and reduce.place()[0] > 1:
        worlds.leave(at_exit=True)
        gc.collect()
        time.sleep(0.2)


def _of_the_program(device: str, timeout_s: float) -> World:
    """The ranks of a process group that exists already, made by `init` or by the program."""
    size, rank = reduce.place()
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    place = torch.device(worlds.choose_device_type(device))
    if place.type == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    return World(rank, size, local_rank, local_size, place, torch.distributed.get_backend(), timeout_s)


def require_joined() -> None:
    if not torch.distributed.is_initialized():
        raise SetupError(NOT_JOINED)
