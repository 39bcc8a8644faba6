"""Makes the outputs of a block independent tensors, never views.

FSDP hooks the backward gathering of a block's parameters to the block's outputs, and an in-place operation on a view
drops hooks: gradients would be silently wrong. Must not know models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def make_own(blocks: Sequence[nn.Module]) -> None:
    """Copies outputs that are views; call it before `fully_shard`, whose hook must come after this one."""
    # FSDP's own hook breaks the compiled graph in the same place.
    hook = torch.compiler.disable(_copy_views)
    for block in blocks:
        block.register_forward_hook(hook)


def _copy_views(block: nn.Module, inputs: Any, output: Any) -> Any:
    return tree_map_only(torch.Tensor, _own, output) if torch.is_grad_enabled() else output


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._base is not None and tensor.requires_grad else tensor
