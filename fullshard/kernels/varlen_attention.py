"""Attention over packed rows with flash kernels: each document attends to itself only, and no mask is ever built.

Registered with Transformers under NAME, so any model that uses its attention interface can run it. CUDA, bf16 or fp16.
Must not know models, batches or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.attention.varlen import varlen_attn

NAME = "fullshard_varlen"

# Before 2.12 torch accepted fewer key heads than query heads; later versions need a flag for that.
_GQA_IS_ASKED_FOR = "enable_gqa" in inspect.signature(varlen_attn).parameters


def register(name: str = NAME) -> str:
    """Registers the kernel with Transformers; returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention_of(_attend))
    return name


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    settings: dict[str, Any] = {"scale": scale, "window_size": window}
    if _GQA_IS_ASKED_FOR:
        settings["enable_gqa"] = True
    return cast(torch.Tensor, varlen_attn(q, k, v, bounds, bounds, longest, longest, **settings))


def attention_of(kernel: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Transformers' attention, computed by a kernel over packed documents. The kernel takes (tokens, heads, width), the
    bounds of the documents, the longest of them, a scale, and how many positions before and after each are seen."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: Any = None,
        is_causal: bool | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """(batch, heads, length, width) in, (batch, length, heads, width) out."""
        batch, heads, length, width = query.shape
        q, k, v = (t.transpose(1, 2).reshape(batch * length, t.shape[1], width) for t in (query, key, value))
        before = sliding_window - 1 if sliding_window else -1
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        assert cu_seq_lens_q is not None, "packed rows come with the bounds of their documents"
        longest = length if max_length_q is None else int(max_length_q)
        window = (before, 0 if causal else before)
        out = kernel(q, k, v, cu_seq_lens_q.to(torch.int32), longest, scale=scaling, window=window)
        return out.reshape(batch, length, heads, width), None

    return attend
