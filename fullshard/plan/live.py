"""Counts the memory of fake tensors while they live: what an eager forward or backward pass would allocate.

Must not know models, recipes or ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Inside, every new storage counts from its first tensor until it is freed. Those of `known` tensors never do."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = {key(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return found

    def start_again(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.now

    def _count(self, tensor: torch.Tensor) -> None:
        storage, name = tensor.untyped_storage(), key(tensor)
        if name in self._seen:
            return
        self._seen.add(name)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, name, size)

    def _freed(self, name: int, size: int) -> None:
        self.now -= size
        self._seen.discard(name)


def key(tensor: torch.Tensor) -> int:
    """The same for all tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their memory, each storage once."""
    return sum({key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
