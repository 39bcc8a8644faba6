"""The time of one step: operations at the rate that a GPU reaches, bytes at the rate of its links, and what of the
communication is not hidden behind computing.

Constants are measured where they say so, and tabulated otherwise: a prediction of time is good to about 20 %. Must not
know how memory is predicted or how anything is shown.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fullshard.plan.hardware import Gpu
from fullshard.plan.predict import Prediction

BEST_SHARE, HALF_WIDTH = 0.70, 560.0
"""The share of its peak that a GPU reaches is BEST_SHARE · w / (w + HALF_WIDTH) for matrices of width w. Fitted to one
H200: 53 % of 989 TFLOP/s with width 2,048 (1.7B), 48 % with 1,152 (DiT-XL/2), 62 to 65 % with 4,096 (8B)."""
EAGER = 0.65
"""Without compilation, of the compiled speed: 27.5k against 42.6k tokens/s, 1.7B on an H200."""
ADAPTERS = 0.87
"""With low-rank adapters, whose matrix products are small: 8B on an H200."""
LINK = 0.75
"""The share of a link's bandwidth that large collectives reach."""
IN_NODE_S, BETWEEN_NODES_S, START_S = 1.5e-6, 5e-6, 10e-6
"""Latency of one hop of a ring within a node and between nodes, and of starting a collective."""
UNIT_S = 1e-3
"""The least time of a unit in one micro-batch: the host must start its kernels, gathers and reductions."""
HOST_UPDATE = 60e9
"""Bytes per second that a node's CPU updates in offloaded state."""
DISK = 2e9
"""Bytes per second that one node writes of a checkpoint."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of all ranks, and what follows from it."""

    compute: float
    update: float
    exposed: float
    """Communication that computing does not hide."""
    sent: float
    """All communication, hidden or not."""
    offload: float
    tokens: int
    """Tokens (or texts, or images) of all ranks in one step."""
    mfu: float
    save: float
    """Writing one checkpoint."""
    limit: str
    """What most of the exposed time waits for: latency, network or links within a node."""

    @property
    def total(self) -> float:
        return self.compute + self.update + self.exposed + self.offload

    @property
    def rate(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.total


def step_time(found: Prediction) -> StepTime | None:
    """The time of a step; None for CPU ranks and GPUs whose rates are not known."""
    gpu = found.place.gpu
    if gpu is None or gpu.flops is None:
        return None
    counted, _ = found.flops
    once = max(_computing(found), UNIT_S * len(found.units))
    compute = once * found.accumulate
    sent, exposed, limit = _communication(found, once, gpu)
    tokens = found.work.learned * found.accumulate * found.place.world
    update, offload = _update(found, gpu)
    total = compute + update + exposed + offload
    mfu = tokens * counted / total / (gpu.flops * found.place.world)
    save = found.checkpoint / (DISK * found.place.nodes)
    return StepTime(compute, update, exposed, sent, offload, tokens, mfu, save, limit)


def modelled(found: Prediction) -> float | None:
    """Seconds of computing one micro-batch, from its operations alone; None if the rates are not known."""
    gpu = found.place.gpu
    if gpu is None or gpu.flops is None:
        return None
    return found.work.computed * found.flops[1] / (gpu.flops * _share(found))


def _computing(found: Prediction) -> float:
    """The same as measured; corrected by what was measured, for other settings of the recipe."""
    known = found.measured
    if known is not None and known.holds(found.recipe, found.plan):
        return known.seconds(found.work)
    return (modelled(found) or 0.0) * (known.ratio() if known else 1.0)


def _share(found: Prediction) -> float:
    """The share of the peak that matrix products of this model reach."""
    blocks = set(found.plan.wrap.blocks)
    wide = [min(t.rows, t.width) for unit in found.units if unit.name in blocks for t in unit.tensors if t.dims > 1]
    width = statistics.quantiles(wide, n=10)[-1] if len(wide) > 1 else 1024.0
    share = BEST_SHARE * width / (width + HALF_WIDTH)
    adapted = any(not tensor.trained for unit in found.units for tensor in unit.tensors)
    return share * (1.0 if found.plan.compile else EAGER) * (ADAPTERS if adapted else 1.0)


def _update(found: Prediction, gpu: Gpu) -> tuple[float, float]:
    """Seconds of the update, and those that offloading adds: two copies over PCIe, and an update by the CPU."""
    held = found.held
    touched = 2 * held.parameters + held.gradients + 2 * held.optimizer + 2 * held.ema
    if not found.plan.cpu_offload:
        return touched / gpu.memory_rate, 0.0
    copies = (2 * held.parameters + held.gradients) * found.accumulate / gpu.host_rate
    return 0.0, copies + touched * found.place.per_node / HOST_UPDATE


def _communication(found: Prediction, once: float, gpu: Gpu) -> tuple[float, float, str]:
    """(sent, exposed, limit) of one step. Units are gathered and reduced one by one while others compute."""
    place, layout, micro = found.place, found.plan.layout, found.accumulate
    links = _Links(gpu, place.per_node)
    units = len(found.units)
    gather = sum(links.gather(unit.gathered(layout.shards), layout.shards) for unit in found.units)
    reduce = sum(links.gather(unit.reduced(layout.shards), layout.shards) for unit in found.units if unit.trained)
    replicas = 0.0
    if layout.replicas > 1:
        local = sum(4 * t.chunk(layout.shards) for unit in found.units for t in unit.trained)
        across = layout.replicas if layout.shards > 1 else place.world
        replicas = links.all_reduce(local, across, apart=layout.shards > 1)
    kept = not layout.reshard_after_forward
    forward, backward = once / 3, once * 2 / 3
    exposed = sent = 0.0
    for index in range(micro):
        ahead = 0.0 if kept and index else gather
        again = 0.0 if kept else gather
        over = replicas if index == micro - 1 else 0.0
        sent += ahead + again + reduce + over
        exposed += max(ahead - forward, 0.0) + max(again + reduce + over - backward, 0.0)
        # The first gather and the last reduction have nothing to hide behind.
        exposed += (ahead + reduce + over) / max(units, 1)
    return sent, exposed, links.limit(found.units[0].gathered(layout.shards), layout.shards, layout.replicas)


@dataclass(frozen=True)
class _Links:
    """Collectives over the links of a node and between nodes."""

    gpu: Gpu
    per_node: int

    def gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has `size` bytes, of which each had its share; a reduce-scatter takes as long."""
        if ranks == 1:
            return 0.0
        return max(self._by_link(size, ranks)) + self._latency(ranks)

    def all_reduce(self, size: float, ranks: int, *, apart: bool) -> float:
        """`apart`: each of the ranks is on another node."""
        if apart:
            return 2 * size / (self.gpu.network_rate * LINK) + 2 * ranks * BETWEEN_NODES_S + START_S
        return 2 * self.gather(size, ranks)

    def _by_link(self, size: float, ranks: int) -> tuple[float, float]:
        """Seconds on the links of a node, and on the network, where every GPU of a node brings its share."""
        share = size * (ranks - 1) / ranks
        network = share / (self.gpu.network_rate * LINK * self.per_node) if ranks > self.per_node else 0.0
        return share / (self.gpu.node_rate * LINK), network

    def _latency(self, ranks: int) -> float:
        nodes = max(ranks // self.per_node, 1)
        return START_S + (ranks - nodes) * IN_NODE_S + (nodes - 1) * BETWEEN_NODES_S

    def limit(self, size: float, shards: int, replicas: int) -> str:
        """What a collective over one unit waits for."""
        if shards == 1:
            return "all-reduce over the network" if replicas > self.per_node else "all-reduce within the node"
        inside, network = self._by_link(size, shards)
        if self._latency(shards) > max(inside, network):
            return "latency of the ring"
        if replicas > 1:
            return "all-reduce between nodes"
        return "network" if network > inside else "links within the node"
