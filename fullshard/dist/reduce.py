"""The collectives: every sum and agreement over ranks, in one file.

Every rank calls these in the same order; a decision (stop, save, best) is always one reduced number. Must not know what
is reduced.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


_copy_stream = functools.cache(torch.cuda.Stream)


class HostCopy:
    """Numbers that are copied to the host while the device computes on; reading them waits only for the copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            # Not in the compute stream, where everything after it would wait for the copies of a save.
            stream = _copy_stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            tensor.record_stream(stream)

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._host]


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank when it is true on one."""
    return bool(max_over_ranks([int(flag)], device)[0])


def place() -> tuple[int, int]:
    """The number of ranks, and which one this is."""
    return dist.get_world_size(), dist.get_rank()


def max_over_ranks(numbers: list[int], device: torch.device, group: Any = None) -> list[int]:
    """The largest of each number over all ranks."""
    if dist.get_world_size() == 1:
        return numbers
    tensor = torch.tensor(numbers, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in tensor.tolist()]


def from_main(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def gather_objects(value: Any, *, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def host_group(timeout_s: float) -> Any:
    """A group of all ranks over gloo for a second thread, whose collectives must not mix with those of training."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
