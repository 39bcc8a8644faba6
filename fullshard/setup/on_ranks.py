"""What every command on ranks needs: how many there are, and being one of them.

Must not know models, data or what the ranks do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fullshard.contracts.launcher import Ranks, Topology
from fullshard.dist import env
from fullshard.proofs import launch as proofs

if TYPE_CHECKING:
    from fullshard.contracts.world import World
    from fullshard.dist.env import Launch
    from fullshard.log.console import Console


def ranks_of(topology: Topology, *, node_rank: int | None = None, master: str | None = None) -> Ranks:
    """How many ranks a topology means on this machine."""
    num_gpus = 0
    if topology.device != "cpu":
        import torch

        num_gpus = torch.cuda.device_count()
    return env.ranks_for(topology, num_gpus=num_gpus, node_rank=node_rank, master=master)


def check_launch(launch: Launch, topology: Topology) -> None:
    """Raises if the launcher's variables contradict each other, the topology or this machine."""
    import torch

    from fullshard.dist.world import choose_device_type, has_group

    gpus = torch.cuda.device_count() if choose_device_type(topology.device) == "cuda" else 0
    proofs.check_launch(launch, topology, os.environ, num_gpus=gpus, connected=has_group())


@contextlib.contextmanager
def as_rank(topology: Topology, *, silent: bool = False) -> Iterator[tuple[Console, Callable[[], World]]]:
    """This process as one rank, with its environment checked. Yields a console, and a function that connects the ranks,
    to be called when everything that one rank does alone is done."""
    from fullshard.dist import world as worlds
    from fullshard.kernels.amx import avoid_broken_amx
    from fullshard.log import libraries
    from fullshard.log.console import Console

    launch = env.detect(os.environ)
    check_launch(launch, topology)
    env.export(launch)
    if worlds.choose_device_type(topology.device) == "cpu":
        avoid_broken_amx()
    console = Console(silent=silent or launch.rank != 0)

    def meet() -> World:
        return worlds.join(device=topology.device, backend=topology.backend, timeout_s=topology.timeout_s)

    try:
        with libraries.route(console):
            yield console, meet
    finally:
        console.close()
        worlds.leave()
