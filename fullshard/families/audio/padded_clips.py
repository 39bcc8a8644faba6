"""Clips of different lengths in one batch: the padding of the shorter ones is not attended to.

The tower of Phi-4-multimodal in Transformers adds its mask of yes and no to the attention scores, so padding counts
almost as much as sound. Must not know losses or ranks.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn


def ignore_padding(tower: nn.Module) -> None:
    """Lets a tower that adds its mask to the scores add what makes padding vanish."""
    own: Any = tower
    if hasattr(own, "forward_embeddings") and hasattr(own, "calculate_hs_mask"):
        own.forward_embeddings = types.MethodType(_forward_embeddings, tower)
        own.calculate_hs_mask = types.MethodType(_calculate_hs_mask, tower)


def _forward_embeddings(tower: Any, hidden_states: torch.Tensor, masks: torch.Tensor | None) -> tuple[Any, ...]:
    hidden, seen, masks = type(tower).forward_embeddings(tower, hidden_states, masks)
    return hidden, _to_add(seen, hidden.dtype), masks


def _calculate_hs_mask(tower: Any, hidden_states: torch.Tensor, device: Any, mask: torch.Tensor | None) -> torch.Tensor:
    return _to_add(type(tower).calculate_hs_mask(tower, hidden_states, device, mask), hidden_states.dtype)


def _to_add(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for what is seen. Half of the smallest number for the rest: a bias comes on top, and it must stay finite, or a
    chunk that is all padding would give NaN."""
    nothing = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return nothing.masked_fill(~seen, torch.finfo(dtype).min / 2)


__all__ = ["ignore_padding"]
