"""Whether the hosts of a run have enough memory for a copy of its state. Must not know what is copied or why."""

from __future__ import annotations

from typing import Any

from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.formatting.readable import size
from fullshard.launch.host_memory import memory_left

SPARE = 0.1
"""Share of the available host memory that staging leaves free."""


def shortage(num_bytes: int, world: World, *, group: Any = None) -> str | None:
    """Why a copy does not fit; `num_bytes` is what each rank needs. The same answer on all ranks."""
    per_node: dict[int, list[int]] = {}
    for node, each, left in reduce.gather_objects(
        (world.rank // world.local_size, num_bytes, memory_left()), group=group
    ):
        total, least = per_node.get(node, [0, left])
        per_node[node] = [total + each, min(least, left)]
    short = [(total, left) for total, left in per_node.values() if total > (1 - SPARE) * left]
    if not short:
        return None
    total, left = max(short)
    return f"Saving in the background needs {size(total)} of host memory on a node, and {size(left)} are available"
