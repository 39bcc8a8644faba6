"""How fast the ranks exchange data: one timed collective. Must not know what it is for."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from fullshard.dist import reduce
from fullshard.dist.gather import gather_tensor

ROUNDS = 3


def all_gather_speed(device: torch.device, *, num_bytes: int) -> float:
    """Bytes per second that the slowest rank receives in an all-gather of `num_bytes`; the best of a few.

    An all-gather, because FSDP sends most of its bytes that way."""
    world = dist.get_world_size()
    share = torch.zeros(max(num_bytes // world, 1), dtype=torch.uint8, device=device)
    whole = torch.empty(share.numel() * world, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first one opens connections
        reduce.barrier(device)
        begun = time.perf_counter()
        gather_tensor(whole, share)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest = max(reduce.gather_objects(time.perf_counter() - begun))
        best = min(best, slowest)
    return share.numel() * (world - 1) / best
