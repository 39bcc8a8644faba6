"""From strategy and ranks to a device mesh, with the rule for `auto`.

Axes: `dp_replicate` (copies) and `dp_shard` (slices). Must not know models or data.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fullshard.contracts.world import World
from fullshard.faults.watchdog import GRACE_S


@dataclass(frozen=True)
class Layout:
    """A resolved strategy: how many replicas, how many shards each, and why."""

    strategy: str
    replicas: int
    shards: int
    reason: str

    @property
    def reshard_after_forward(self) -> bool:
        return self.strategy in ("full", "hybrid")

    def describe(self) -> str:
        return f"{self.strategy}: {self.replicas} x {self.shards} (replicate x shard); {self.reason}"


def choose_layout(strategy: str, world: World, *, state_bytes: int, memory: int | None = None) -> Layout:
    """Resolves the strategy. `auto`, by this rule: on a CPU `full`; else, with s = bytes of parameters, gradients and
    optimizer state and m = `memory` of one GPU: several nodes and s / ranks-per-node < 0.4 m → `hybrid`; one node and
    s < 0.4 m → `grad_op`; one rank and s < 0.1 m → `grad_op`; otherwise `full`."""
    if strategy == "auto":
        return _auto_layout(world, state_bytes, memory)
    if strategy == "hybrid":
        if world.num_nodes == 1:
            return Layout("hybrid", 1, world.size, "one node, so hybrid is the same as full")
        return Layout("hybrid", world.num_nodes, world.local_size, "sharded within a node, replicated across nodes")
    if strategy == "none":
        return Layout("none", world.size, 1, "every rank holds the whole model, as in data-parallel replication")
    reason = "parameters stay gathered from forward to backward" if strategy == "grad_op" else "everything is sharded"
    return Layout(strategy, 1, world.size, reason if world.size > 1 else "one rank, so nothing is sharded")


def _auto_layout(world: World, state_bytes: int, memory: int | None) -> Layout:
    if memory is None and not (world.device.type == "cuda" and torch.cuda.is_available()):  # a check without a GPU
        return Layout("full", 1, world.size, "auto: one rank" if world.size == 1 else "auto: CPU ranks")
    memory = memory or torch.cuda.get_device_properties(world.device).total_memory
    gib = f"{state_bytes / 2**30:.1f} GiB of state, {memory / 2**30:.0f} GiB per GPU"
    if world.size == 1:
        # Nothing is sent; the gathered copy in the compute dtype is an eighth of the state.
        strategy = "grad_op" if state_bytes < 0.1 * memory else "full"
        return Layout(strategy, 1, 1, f"auto: one rank ({gib})")
    if world.num_nodes > 1 and state_bytes / world.local_size < 0.4 * memory:
        return Layout("hybrid", world.num_nodes, world.local_size, f"auto: a node holds a copy ({gib})")
    if world.num_nodes == 1 and state_bytes < 0.4 * memory:
        return Layout("grad_op", 1, world.size, f"auto: memory is ample ({gib})")
    return Layout("full", 1, world.size, f"auto: saves the most memory ({gib})")


def make_mesh(layout: Layout, world: World) -> DeviceMesh:
    """One axis for a single replica, two for several."""
    if layout.replicas == 1 and layout.strategy != "none":
        return init_device_mesh(world.device.type, (layout.shards,), mesh_dim_names=("dp_shard",))
    shape = (layout.replicas, layout.shards)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for group in mesh.get_all_groups():  # torch's default timeouts are up to half an hour
        _set_pg_timeout(timedelta(seconds=world.timeout_s + GRACE_S), group)
    return mesh
