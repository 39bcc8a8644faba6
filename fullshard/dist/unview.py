"""What a block returns is a tensor of its own, never a view of another one.

FSDP hangs the gathering of a block's parameters for the backward pass on the block's outputs, and an in-place operation
on a view drops what hangs there: gradients would be wrong without a word. Must not know models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def make_own(blocks: Sequence[nn.Module]) -> None:
    """Copies outputs that are views; to be called before `fully_shard`, whose hook must come after this one."""
    # FSDP's own hook leaves the compiled part at the same place.
    hook = torch.compiler.disable(_copy_views)
    for block in blocks:
        block.register_forward_hook(hook)


def _copy_views(block: nn.Module, inputs: Any, output: Any) -> Any:
    return tree_map_only(torch.Tensor, _own, output) if torch.is_grad_enabled() else output


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._base is not None and tensor.requires_grad else tensor
