"""Temporarily gives small values to weights that start at zero. Must not know why."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullshard.dist import reduce
from fullshard.dist.shard import reshard
from fullshard.dist.values import local


@contextmanager
def nonzero_weights(module: nn.Module) -> Iterator[None]:
    """Inside, parameters that are all zero, so that their layer has no effect at first, have small random values. No
    copy is needed: at the end they are zero again."""
    reshard(module)
    named = [(name, local(p.detach())) for name, p in module.named_parameters()]
    filled = reduce.max_over_ranks([int(values.any()) for _, values in named], named[0][1].device)
    zero = [pair for pair, has_values in zip(named, filled, strict=True) if not has_values]
    for name, values in zero:
        # Seeded by name: replicas of a slice on several ranks get the same values.
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values.copy_(torch.randn(values.shape, generator=draw) * 0.02)
    try:
        yield
    finally:
        reshard(module)
        for _, values in zero:
            values.zero_()
