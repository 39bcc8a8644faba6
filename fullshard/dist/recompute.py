"""Activation checkpointing of blocks: which activations are kept, which are computed again.

Non-reentrant, and without wrapper modules, so parameter names stay what they were. Must not know models or FSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = ("_scaled_dot_product", "flex_attention", "_varlen_attn", "packed_attention")
"""Attention is the dearest thing to compute twice: its result is kept in `selective`."""


def apply(blocks: Sequence[nn.Module], mode: str) -> None:
    """`full` keeps only each block's inputs; `selective` also keeps attention and every second matrix product."""
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = lambda: create_selective_checkpoint_contexts(_selective_policy())
    for block in blocks:
        block.forward = _recomputed(block.forward, settings)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    # A function of its own: of a functools.partial torch.compile captures nothing, without a word. With the block's own
    # signature: which inputs must stay exact is found by their names.
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **settings, **kwargs)

    return recomputed


def _selective_policy() -> Any:
    # Forward and recompute each count for themselves, so that they decide alike.
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
    """How much of a block is computed again. A block with units of its own cannot be `selective`: torch counts what is
    run in the block, and FSDP gathers in the backward pass by other operations than in the forward pass."""
    holds_units = any(unit.startswith(f"{block}.") for unit in units)
    return "full" if asked == "selective" and holds_units else asked
