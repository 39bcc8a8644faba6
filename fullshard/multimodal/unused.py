"""Parameters of a tower that the model never uses, such as a vision encoder's pooling head, or its last layers if the
model takes the states of an earlier one. They get no gradient. Must not know model names or ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def unused(module: nn.Module, inputs: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Which of these parameters the image features do not depend on, found by one pass on the meta device; empty if the
    model cannot run there."""
    model: Any = module
    parameters = {name: module.get_parameter(name) for name in names}
    trained = {name: p.requires_grad for name, p in parameters.items()}
    empty = {k: v.to("meta") if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            found = model.base_model.get_image_features(**empty)
        reached = {id(p) for tensor in _tensors(found) for p in _leaves(tensor)}
    except Exception:
        # A model that branches on values cannot run without them. The proof of the first update finds what is missed.
        return []
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(trained[name])
    return [name for name, p in parameters.items() if id(p) not in reached] if reached else []


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _tensors(each)
    elif hasattr(found, "pooler_output"):
        # Transformers keeps the projected features there.
        yield from _tensors(found.pooler_output)


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parameters that a tensor was computed from."""
    todo, seen = [tensor.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [before for before, _ in node.next_functions]


__all__ = ["unused"]
