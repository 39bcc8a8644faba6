"""This process among the ranks of a program with its own loop. Must not know models."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from typing import Literal

import torch

from fullshard.config.part import decode
from fullshard.contracts.launcher import Topology
from fullshard.contracts.world import World
from fullshard.dist import env, reduce
from fullshard.dist import world as worlds
from fullshard.errors import SetupError
from fullshard.kernels.amx import avoid_broken_amx
from fullshard.recipe import Recipe
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
        require_backend(device, backend)
        return _of_the_program(device, timeout_s)
    launch = env.detect(os.environ)
    check_launch(launch, topology)
    env.export(launch)
    if worlds.choose_device_type(device) == "cpu":
        avoid_broken_amx()
    world = worlds.join(device=device, backend=backend, timeout_s=timeout_s)
    stay_joined()
    return world


def require_backend(device: str, backend: str, *, on_host: bool = False) -> None:
    """Raises unless the program's own process group can reduce tensors on the device, and those `on_host`."""
    place = worlds.choose_device_type(device)
    needed = {place: backend if backend != "auto" else "nccl" if place == "cuda" else "gloo"}
    config = str(torch.distributed.get_backend_config())
    found = dict(pair.split(":") for pair in config.split(","))
    if on_host:
        needed.setdefault("cpu", "gloo")
    for kind, wanted in needed.items():
        if found.get(kind) != wanted:
            raise SetupError(
                f"This program's process group has the backend {config}, and this run on {place} needs {wanted} for "
                f'{kind} tensors. Use init_process_group("{worlds.BOTH}"), in Ray TorchConfig(backend="{worlds.BOTH}")'
                ", or change topology.device or topology.backend."
            )


@contextlib.contextmanager
def numbered_by_group(recipe: Recipe) -> Iterator[bool]:
    """Inside, RANK, WORLD_SIZE, ... are what the program's own process group says, whoever made it and however. Gives
    whether there is one; raises if it does not fit the recipe."""
    if not worlds.has_group():
        yield False
        return
    require_backend(recipe.topology.device, recipe.topology.backend, on_host=recipe.sharding.cpu_offload)
    size, rank = reduce.place()
    numbers = {"RANK": rank, "WORLD_SIZE": size} | _on_this_node(size, rank)
    with restored(*_VARIABLES):
        os.environ.update({name: str(number) for name, number in numbers.items()})
        yield True


@contextlib.contextmanager
def restored(*names: str) -> Iterator[None]:
    """Afterwards these variables are as they were."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
NCCL = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
"""What `log.debug` sets. Ranks that a later call starts would write to the files of this rank."""


def _on_this_node(size: int, rank: int) -> dict[str, int]:
    """This rank among those of its node: by the launcher's variables, or by the names of the hosts."""
    said = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")] == [str(rank), str(size)]
    if said and os.environ.get("LOCAL_RANK") and os.environ.get("LOCAL_WORLD_SIZE"):
        return {}
    hosts = reduce.gather_objects(socket.gethostname())
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    place = {"LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here)}
    return place | {"GROUP_RANK": nodes.index(hosts[rank]), "GROUP_WORLD_SIZE": len(nodes)}


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
