"""Host memory that a save is copied to: one mapping per rank, kept out of forked processes, pinned for a GPU.

Linux copies pinned pages at a fork, once per child: a data worker would cost as much memory as the whole copy. So the
mapping is excluded from forks before its first page is touched; a child that touched it would crash.
Must not know what is saved, ranks or when.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch

from fullshard.checkpoint.tensors import Tensors, flat
from fullshard.dist.values import local

_ALIGNED = 64
_PIECE = 2**29
"""Memory is pinned in pieces of about this size, so that the driver is never blocked for long. No tensor spans two of
them: a copy must not cross from one registration into another."""


def sizes_of(tensors: Tensors) -> dict[str, int]:
    """The bytes of this rank's slices, each plain tensor by its name."""
    return {name: part.nbytes for whole in tensors for name, part in flat(whole, local(tensors[whole])).items()}


class Region:
    """Memory for tensors of these sizes, allocated by `open`."""

    def __init__(self, sizes: Mapping[str, int], *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: mmap.mmap | None = None
        self._registered: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._pieces: list[tuple[int, int]] = []
        begun = end = 0
        for name, size in sizes.items():
            if end - begun >= _PIECE:
                self._pieces.append((begun, end - begun))
                begun = end = _up(end, mmap.PAGESIZE)
            self._places[name] = end, size
            end = _up(end + size, _ALIGNED)
        self._pieces.append((begun, end - begun))
        self.num_bytes = end

    def open(self, device: torch.device) -> None:
        """Allocates the memory, which takes seconds if it is pinned. A failure leaves nothing behind."""
        memory = mmap.mmap(-1, max(self.num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # large pages are pinned much faster
            with contextlib.suppress(OSError):
                if hasattr(mmap, advice):
                    memory.madvise(getattr(mmap, advice))
        self._memory = memory
        if self._pinned:
            try:
                torch.cuda.set_device(device)  # a new thread would initialise the first GPU
                for start, length in self._pieces:
                    self._pin(self._address() + start, length)
            except BaseException:
                self.close()
                raise

    def _pin(self, address: int, length: int) -> None:
        if length:
            # Touch pages first: the driver would fault in each one under its lock, and block the training thread.
            ctypes.memset(address, 0, length)
            # Not torch's pin_memory: it rounds up to a power of two.
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(address, length, 0))
            self._registered.append(address)

    def room(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """The memory of a tensor; None if it was unknown when the memory was allocated."""
        start, size = self._places.get(name, (0, -1))
        if self._memory is None or size != like.nbytes:
            return None
        if not like.numel():
            return torch.empty_like(like, device="cpu")
        # Not a view: DCP copies tensors that are only part of their storage.
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

    def close(self) -> None:
        """Frees the memory, once the last tensor in it is gone."""
        for address in self._registered:
            # Pages that stay registered break their next user.
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(address))
        self._registered, self._memory = [], None

    def _address(self) -> int:
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()


def _up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
