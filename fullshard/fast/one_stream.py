"""On one GPU gradients are kept on the stream that computes, not on FSDP's stream for reductions.

torch's memory belongs to the stream that it was taken on: gradients of another stream never reuse what activations have
freed, so a GPU reserved up to the size of all gradients more than a step needs. One rank reduces nothing, so there is
nothing to overlap. It uses private names of FSDP; if torch has renamed one, nothing changes. Must not know recipes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.dist.shard import fsdp_modules


def use_one_stream(module: nn.Module) -> None:
    """For a sharded model that has not run yet: FSDP makes its streams in the first forward pass."""
    for unit in fsdp_modules(module):
        shared: Any = getattr(unit._get_fsdp_state(), "_comm_ctx", None)
        if hasattr(shared, "lazy_init"):
            shared.lazy_init = partial(_begin, shared, shared.lazy_init)


def _begin(shared: Any, begin: Any, device: torch.device) -> None:
    begin(device)
    if hasattr(shared, "reduce_scatter_stream"):
        shared.reduce_scatter_stream = shared.device_handle.current_stream()
