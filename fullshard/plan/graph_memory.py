"""The most memory that a compiled graph needs while it runs, by a model of what the compiler does.

Matrix products, attention and convolutions write their results to memory; everything between them is fused, so that a
value exists only if such an operation or the caller reads it. Inputs that belong to the graph are freed after their
last use. Must not know blocks, models or recipes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

APART = ("mm", "bmm", "convolution", "attn", "attention", "scaled_dot", "embedding", "sort", "index", "scatter", "topk")
"""Words in the names of operations that are not fused."""


def peak(graph: fx.GraphModule, *, freed: Collection[int]) -> int:
    """Bytes at the fullest moment, without inputs, except those at the places in `freed`, which count until they are
    used up."""
    nodes = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    held = _own_memory(nodes, freed)
    last = {node: max(_reads(node, held, place), default=place[node]) for node in held}
    now = most = sum(held[node] for node in held if node.op == "placeholder")
    ends: dict[int, int] = {}
    for node in held:
        ends[last[node]] = ends.get(last[node], 0) + held[node]
    for index, node in enumerate(nodes):
        if node in held and node.op != "placeholder":
            now += held[node]
        most = max(most, now)
        now -= ends.get(index, 0)
    return most


def _own_memory(nodes: list[Any], freed: Collection[int]) -> dict[Any, int]:
    """Bytes of every node that has memory of its own."""
    output, held = nodes[-1], dict[Any, int]()
    returned = {node for node in tree_leaves(output.args) if isinstance(node, fx.Node)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs):
        if index in freed:
            held[node] = _bytes(node)
    for node in nodes:
        if node.op == "call_function" and not _is_view(node) and (_apart(node) or _needed(node, returned)):
            held[node] = _bytes(node)
    return held


def _needed(node: Any, returned: set[Any]) -> bool:
    """Whether the caller or an operation that is not fused reads a fused value, directly or through views."""
    if node in returned:
        return True
    return any(_needed(user, returned) if _is_view(user) else _apart(user) for user in node.users)


def _reads(node: Any, held: dict[Any, int], place: dict[Any, int], seen: set[Any] | None = None) -> set[int]:
    """Where a value is read: by operations with memory of their own, also through fused ones; or returned."""
    seen, found = set() if seen is None else seen, set()
    for user in node.users:
        if user in seen:
            continue
        seen.add(user)
        found.add(place[user])
        if user not in held and user.op != "output":
            found |= _reads(user, held, place, seen)
    return found


def _apart(node: Any) -> bool:
    """Kernels of our own are called, too: no compiler looks into them."""
    name = str(node.target)
    return node.op == "call_function" and (name.startswith("fullshard.") or any(word in name for word in APART))


def _is_view(node: Any) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return node.op == "call_function" and "getitem" in str(node.target)
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    parts = [part for source in sources for part in tree_leaves(source) if isinstance(part, torch.Tensor)]
    return any(value.untyped_storage()._cdata == part.untyped_storage()._cdata for part in parts)


def _bytes(node: Any) -> int:
    parts = [part for part in tree_leaves(node.meta.get("val")) if isinstance(part, torch.Tensor)]
    sizes = [part.numel() * part.element_size() for part in parts]
    return sum(size for size in sizes if isinstance(size, int))  # the state of a random generator has no fixed size
