"""Saving during training: tensors are copied to host memory, and a thread writes them from there.

At most one save is under way. The copy overlaps with the next forward and backward pass; the update that would change
the tensors waits for it. Must not know files, formats or when to save.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from fullshard.checkpoint.tensors import Tensors, flat
from fullshard.checkpoint.write import Snapshot, Written
from fullshard.contracts.world import World
from fullshard.dist import reduce
from fullshard.dist.values import local
from fullshard.explain.host_memory import memory_left
from fullshard.formatting.readable import size as readable_size

SPARE = 0.1
"""Share of the available host memory that staging leaves free."""
_ALIGNED = 64
_PIECE = 2**29
"""Memory is pinned in pieces of about this size, so that the driver is never blocked for long. No tensor spans two of
them: a copy must not cross from one registration into another."""
_SWITCH_S = 2e-4
"""How long the writing thread may hold the interpreter. With Python's 5 ms the thread that feeds the device, which
releases the interpreter in every operation, would wait that long each time."""


def sizes_of(tensors: Tensors) -> dict[str, int]:
    """The bytes of this rank's slices, each plain tensor by its name."""
    return {name: part.nbytes for whole in tensors for name, part in flat(whole, local(tensors[whole])).items()}


def shortage(num_bytes: int, world: World, *, group: Any = None) -> str | None:
    """Why copies of `num_bytes` per rank do not fit into the host memory of a node; the same answer on all ranks."""
    needed: dict[int, int] = {}
    available: dict[int, int] = {}
    mine = world.rank // world.local_size, num_bytes, memory_left()
    for node, each, left in reduce.gather_objects(mine, group=group):
        needed[node] = needed.get(node, 0) + each
        available[node] = min(available.get(node, left), left)
    short = [(needed[node], available[node]) for node in needed if needed[node] > (1 - SPARE) * available[node]]
    if not short:
        return None
    total, left = map(readable_size, max(short))
    return f"Saving in the background needs {total} of host memory on a node, but {left} are available"


class Region:
    """Memory for tensors of these sizes: one mapping per rank, pinned for a GPU, allocated by `open`.

    Linux copies pinned pages at a fork, once per child: a data worker would cost as much memory as the whole copy. So
    the mapping is excluded from forks before its first page is touched; a child that touched it would crash."""

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
                begun = end = end + -end % mmap.PAGESIZE
            self._places[name] = end, size
            end += size + -(end + size) % _ALIGNED
        self._pieces.append((begun, end - begun))
        self.num_bytes = end

    def open(self, device: torch.device) -> None:
        """Allocates the memory, which takes seconds if it is pinned. A failure leaves nothing behind."""
        memory = mmap.mmap(-1, max(self.num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # large pages are pinned much faster
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(getattr(mmap, advice))
        self._memory = memory
        if self._pinned:
            try:
                torch.cuda.set_device(device)  # a new thread would initialise the first GPU
                address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
                for start, length in self._pieces:
                    self._pin(address + start, length)
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


class Background:
    """One thread that writes snapshots, and the host memory that they are copied to."""

    def __init__(self, *, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._future: Future[Written] | None = None
        self._region = Region(sizes, pinned=device.type == "cuda")
        self.num_bytes = self._region.num_bytes
        self._opening: Future[None] | None = None
        self._rooms: Tensors = {}
        """Where each tensor goes in that memory; the same in every save."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._buffers: Tensors = {}

    @property
    def reserved(self) -> bool:
        return self._opening is not None

    def reserve(self) -> None:
        """Takes host memory for a copy, in the thread: pinning takes seconds, and training need not wait."""
        self._opening = self._thread.submit(self._region.open, self._device)

    def shortage(self) -> str | None:
        """Why the memory could not be allocated; waits until that is known."""
        assert self._opening is not None, "the memory was not requested"
        error = self._opening.exception()
        return f"{type(error).__name__}: {error}" if error is not None else None

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], Written]) -> None:
        """Copies the snapshot and starts to write it; the previous save must be settled."""
        assert self._future is None, "one save at a time"
        staged = self._stage(snapshot)
        copied = self._copied

        def run() -> Written:
            if copied is not None:
                torch.cuda.set_device(self._device)  # a new thread would start on the first GPU
                copied.synchronize()
            return write(staged)

        self._future = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        return self._future is not None

    @property
    def failed(self) -> bool:
        """Whether the save under way failed; `settle` raises the error."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def finished(self) -> Written | None:
        """The save under way if it has succeeded; does not wait."""
        if self._future is None or not self._future.done() or self.failed:
            return None
        return self.settle()

    def settle(self) -> Written | None:
        """Waits for the save under way; raises what went wrong with it."""
        future, self._future = self._future, None
        return future.result() if future is not None else None

    def close(self) -> None:
        """Ends the thread after the save under way, and frees the memory."""
        self._thread.shutdown()
        self._rooms = {}
        self._region.close()

    @torch.no_grad()
    def _stage(self, snapshot: Snapshot) -> Snapshot:
        if self._stream is None:
            return replace(snapshot, tensors=self._copies(snapshot.tensors))
        # Buffers change in the next forward pass, which does not wait: they are small, so they are cloned.
        self._buffers = {
            name: tensor.clone()
            for name, tensor in snapshot.tensors.items()
            if name.startswith("model/") and not isinstance(tensor, DTensor)
        }
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged = replace(snapshot, tensors=self._copies(snapshot.tensors | self._buffers))
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def _copies(self, tensors: Tensors) -> Tensors:
        """Starts the copies to the host. This must be quick: the device may be idle meanwhile."""
        copies: Tensors = {}
        for name, whole in tensors.items():
            mine = local(whole)
            if is_traceable_wrapper_subclass(mine):  # 8-bit state: copy its parts
                room = transform_subclass(mine, lambda part, tensor, name=name: self._copy(f"{name}.{part}", tensor))
            else:
                room = self._copy(name, mine)
            copies[name] = DTensor(room, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else room
        return copies

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if (room := self._rooms.get(name)) is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = self._region.room(name, tensor)
            if room is None:  # not known when the memory was allocated
                return tensor.to("cpu", copy=True)
            self._rooms[name] = room
        return room.copy_(tensor, non_blocking=True)

    def finish_copy(self) -> None:
        """Call it before an update, which must not overtake the copy of what it changes."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
