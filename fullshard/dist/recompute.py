"""Activation checkpointing of blocks: which activations are kept, which are recomputed.

Non-reentrant, and without wrapper modules, so parameter names do not change. Must not know models or FSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = ("_scaled_dot_product", "flex_attention", "_varlen_attn", "packed_attention")
"""Attention is the most expensive thing to recompute: `selective` keeps its result."""


def apply(block: nn.Module, mode: str) -> None:
    """`full` keeps only the block's inputs; `selective` also keeps attention and every second matrix product."""
    if mode == "none":
        return
    forward, settings = block.forward, dict[str, Any](use_reentrant=False)
    if mode == "selective":
        settings["context_fn"] = lambda: create_selective_checkpoint_contexts(_selective_policy())

    # A real function: torch.compile silently captures nothing of a functools.partial. With the block's own signature:
    # exact inputs are found by name.
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **settings, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


def _selective_policy() -> Any:
    # Forward and recompute count separately, so that both make the same decisions.
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        else:
            keep = any(name in str(op) for name in KEPT)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def of_block(block: str, asked: str, units: Collection[str]) -> str:
    """How much of a block is recomputed. A block that contains units cannot be `selective`: torch counts operations in
    the block, and FSDP gathers with different ones in the backward pass."""
    holds_units = any(unit.startswith(f"{block}.") for unit in units)
    return "full" if asked == "selective" and holds_units else asked
