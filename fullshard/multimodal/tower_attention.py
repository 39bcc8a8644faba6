"""One attention call for all images of a tower that separates them by bounds (`cu_seqlens`).

Without it Transformers calls the kernel once for each image or window. CUDA, bf16 or fp16. Must not know model names,
batches or ranks.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from fullshard.kernels.varlen_attention import register

NAME = "fullshard_flash_varlen"
"""Transformers passes bounds to a kernel with "flash" in its name."""


def use_bounds(tower: nn.Module) -> bool:
    """Switches a tower that has bounds to one call for all of its images. Returns whether it has."""
    if not any("cu_seqlens" in signature(part.forward).parameters for part in tower.modules()):
        return False
    name = register(NAME)
    for part in tower.modules():
        if (config := getattr(part, "config", None)) is not None:
            config._attn_implementation_internal = name

    def without(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Drops the decoder's bounds, which Transformers passes to every part."""
        return arguments, {key: value for key, value in named.items() if not key.startswith("cu_seq_lens")}

    tower.register_forward_pre_hook(without, with_kwargs=True)
    return True


__all__ = ["use_bounds"]
