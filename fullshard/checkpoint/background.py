"""Saving during training: tensors are copied to host memory, and a thread writes them from there.

At most one save is under way. The copy overlaps with the next forward and backward pass; the update that would change
the tensors waits for it. Must not know files, formats, ranks or when to save.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.staging import Region
from fullshard.checkpoint.tensors import Tensors, flat, rebuilt
from fullshard.checkpoint.write import Snapshot, Written
from fullshard.dist.values import local

_SWITCH_S = 2e-4
"""How long the writing thread may hold the interpreter. With Python's 5 ms the thread that feeds the device, which
releases the interpreter in every operation, would wait that long each time."""


class Background:
    """One thread that writes snapshots, and the host memory that they are copied to."""

    def __init__(self, *, device: torch.device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._future: Future[Written] | None = None
        self._region = Region(sizes, pinned=device.type == "cuda")
        self._opening: Future[None] | None = None
        self._rooms: Tensors = {}
        """Where each tensor goes in that memory; the same in every save."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._aside: Tensors = {}

    @property
    def num_bytes(self) -> int:
        """Host memory that a copy takes."""
        return self._region.num_bytes

    @property
    def reserved(self) -> bool:
        """Whether the memory was requested."""
        return self._opening is not None

    def reserve(self) -> None:
        """Takes host memory for a copy, in the thread: pinning takes seconds, and training need not wait."""
        if self._opening is None:
            self._opening = self._thread.submit(self._region.open, self._device)

    def shortage(self) -> str | None:
        """Why the memory could not be taken; waits for the attempt to end."""
        assert self._opening is not None, "the memory was not requested"
        error = self._opening.exception()
        return f"{type(error).__name__}: {error}" if error is not None else None

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], Written]) -> None:
        """Copies the snapshot and has it written; the save before must be settled."""
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
        """The save under way, once it has succeeded; does not wait."""
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
        self._aside = {n: t.clone() for n, t in snapshot.tensors.items() if n.startswith("model/") and not _slices(t)}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged = replace(snapshot, tensors=self._copies(snapshot.tensors | self._aside))
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def _copies(self, tensors: Tensors) -> Tensors:
        """Starts the copies to the host. This must be quick: the device may be idle meanwhile."""
        copies: Tensors = {}
        for name, whole in tensors.items():
            mine = local(whole)
            parts = {part: self._copy(part, tensor) for part, tensor in flat(name, mine).items()}
            room = rebuilt(name, mine, parts)
            copies[name] = DTensor(room, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else room
        return copies

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if (room := self._rooms.get(name)) is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = self._region.room(name, tensor)
            if room is None:  # not known when the memory was taken
                return tensor.to("cpu", copy=True)
            self._rooms[name] = room
        return room.copy_(tensor, non_blocking=True)

    def finish_copy(self) -> None:
        """Before an update: it must not overtake the copy of what it changes."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def _slices(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)
