"""One call of the attention kernel for all images of a tower that tells them apart by bounds.

Without it Transformers calls the kernel once for each image or window of such a tower. CUDA, bf16 or fp16. Must not
know model names, batches or ranks.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from fullshard.hf.architecture.varlen_attention import register

NAME = "fullshard_flash_varlen"
"""Transformers takes a name with "flash" in it for a kernel that handles bounds."""


def use_bounds(tower: nn.Module) -> bool:
    """Switches a tower to one call for all of its images, if it brings bounds; says whether it does."""
    if not any("cu_seqlens" in signature(part.forward).parameters for part in tower.modules()):
        return False
    name = register(NAME)
    for part in tower.modules():
        if (config := getattr(part, "config", None)) is not None:
            config._attn_implementation_internal = name

    def without(module: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The decoder's bounds, which Transformers hands to every part, are not the tower's."""
        return arguments, {key: value for key, value in named.items() if not key.startswith("cu_seq_lens")}

    tower.register_forward_pre_hook(without, with_kwargs=True)
    return True


__all__ = ["use_bounds"]
