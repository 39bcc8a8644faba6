"""Saving while training goes on: tensors are copied to host memory, and a thread writes them from there.

At most one save is under way. The copy overlaps with the next forward and backward pass; the update that would change
the tensors waits for it. Must not know files, formats, ranks or when to save.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.tensors import Tensors
from fullshard.checkpoint.write import Snapshot, Written
from fullshard.dist.values import local

_ALIGNED = 64
_SWITCH_S = 2e-4
"""How long the thread that writes may keep the interpreter to itself. With Python's 5 ms the thread that feeds the
device, which lets go of the interpreter in every operation, would wait that long each time to have it back."""


class Background:
    """One thread that writes snapshots, and the host memory that they are copied to."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._future: Future[Written] | None = None
        self._memory: torch.Tensor | None = None
        self._rooms: Tensors = {}
        """The places of the tensors in that memory, which are the same in every save."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._aside: Tensors = {}
        optimizer.register_step_pre_hook(lambda *_: self._let_copy_end())

    def reserve(self, num_bytes: int) -> None:
        """Takes host memory for that many bytes; done before the first step, for pinning takes seconds."""
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            # Not pin_memory=True: torch's allocator rounds up to a power of two.
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], Written]) -> None:
        """Copies the snapshot and has it written; the save before must be settled."""
        assert self._future is None, "one save at a time"
        staged = self._stage(snapshot)
        copied = self._copied

        def run() -> Written:
            if copied is not None:
                torch.cuda.set_device(self._device)  # a new thread would wake the first GPU
                copied.synchronize()
            return write(staged)

        self._future = self._thread.submit(run)

    @property
    def busy(self) -> bool:
        return self._future is not None

    @property
    def failed(self) -> bool:
        """The save under way has ended in an error, which `settle` raises."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def finished(self) -> Written | None:
        """The save under way, once it has ended well; asking takes no time."""
        if self._future is None or not self._future.done() or self.failed:
            return None
        return self.settle()

    def settle(self) -> Written | None:
        """Waits for the save under way; raises what went wrong with it."""
        future, self._future = self._future, None
        return future.result() if future is not None else None

    def close(self) -> None:
        """Ends the thread, after the save under way, and gives the memory back."""
        self._thread.shutdown()
        if self._memory is not None and self._device.type == "cuda":
            # Pages that stay registered fail whoever is given them next.
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._memory.data_ptr()))
        self._memory, self._rooms = None, {}

    @torch.no_grad()
    def _stage(self, snapshot: Snapshot) -> Snapshot:
        if self._memory is None:
            self.reserve(staging_bytes(snapshot.tensors))
        if self._stream is None:
            return replace(snapshot, tensors=self._copies(snapshot.tensors))
        # Buffers change in the next forward pass, not in the update that waits: they are small, and copied aside.
        self._aside = {n: t.clone() for n, t in snapshot.tensors.items() if n.startswith("model/") and not _slices(t)}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged = replace(snapshot, tensors=self._copies(snapshot.tensors | self._aside))
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def _copies(self, tensors: Tensors) -> Tensors:
        """Copies on their way to the host. Issuing them must be quick: the device may have nothing to do meanwhile."""
        slices = {name: local(tensor) for name, tensor in tensors.items()}
        if self._rooms.keys() != {name for name, mine in slices.items() if type(mine) is torch.Tensor}:
            self._rooms = self._make_rooms(slices)
        copies: Tensors = {}
        for name, mine in slices.items():
            if name in self._rooms:
                room = self._rooms[name].copy_(mine, non_blocking=True)
            else:  # 8-bit state: a tensor of its own kind
                room = mine.to("cpu", copy=True)
            whole = tensors[name]
            copies[name] = DTensor(room, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else room
        return copies

    def _make_rooms(self, slices: Tensors) -> Tensors:
        assert self._memory is not None
        rooms, start, memory = {}, 0, self._memory.numpy()
        for name, mine in slices.items():
            if type(mine) is not torch.Tensor:
                continue
            if not mine.numel():
                rooms[name] = torch.empty_like(mine, device="cpu")
                continue
            # Not a view: DCP copies a tensor once more that is only a part of its storage.
            room = torch.frombuffer(memory, dtype=mine.dtype, count=mine.numel(), offset=start)
            rooms[name] = room.view(mine.shape)
            start += _rounded(mine.nbytes)
        return rooms

    def _let_copy_end(self) -> None:
        """Before an update: it must not overtake the copy of what it changes."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def staging_bytes(tensors: Tensors) -> int:
    """Host memory that a copy of this rank's slices takes."""
    return sum(_rounded(local(tensor).nbytes) for tensor in tensors.values())


def _rounded(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNED) * _ALIGNED


def _slices(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)
