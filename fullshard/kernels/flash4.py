"""Attention over packed rows by FlashAttention-4, a wheel for Hopper and newer: `model.attention: flash_attention_4`.

Its forward and backward pass are two operators of torch, so that a compiled block stays one graph and activation
checkpointing can keep the result. Where the wheel cannot run, `lacking` says why and another kernel computes the same.
Must not know models, batches or ranks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fullshard.kernels.varlen_attention import attention_of

NAME = "fullshard_fa4"
"""Without the word flash, by which Transformers knows kernels that it loads itself."""
WORD = "flash_attention_4"
"""The value of `model.attention`."""
PACKAGE = "flash-attn-4"
CAPABILITY = (9, 0)
HEAD_DIMS = range(8, 257, 8)
"""What the kernels for Hopper take."""
_FORWARD = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "return_lse")
_BACKWARD = ("q", "k", "v", "out", "dout", "lse", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_WINDOW = ("window_size_left", "window_size_right")


def lacking(*, capability: tuple[int, int] | None, head_dim: int | None) -> str | None:
    """Why the wheel's kernels cannot run on a GPU (None: a CPU) with heads of this width; None if they can."""
    if capability is None or capability < CAPABILITY:
        found = "no GPU" if capability is None else f"{capability[0]}.{capability[1]}"
        return f"it needs a GPU of compute capability 9.0, found {found}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"heads of width {head_dim}, and it takes multiples of 8 up to 256"
    return missing()


def missing() -> str | None:
    """Why the wheel cannot be used here, whatever the GPU; None if it can."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return f"the package {PACKAGE} is not installed; pip install 'fullshard[gpu]'"
    try:
        forward, backward = _functions()
    except Exception as error:  # its compiler fails to load in many ways
        return f"{PACKAGE} {installed} cannot be imported: {type(error).__name__}: {str(error).splitlines()[:1]}"
    for function, names in ((forward, (*_FORWARD, *_WINDOW)), (backward, (*_BACKWARD, *_WINDOW))):
        if unknown := sorted(set(names) - set(inspect.signature(function).parameters)):
            return f"{PACKAGE} {installed} has changed: {function.__name__} takes no {', '.join(unknown)}"
    return None


@functools.cache
def _functions() -> tuple[Any, Any]:
    """The wheel's forward and backward pass: its public function is not an operator, and breaks a compiled graph."""
    found = importlib.import_module("flash_attn.cute.interface")
    warnings.filterwarnings("ignore", message=".*aux_data.*")
    return found._flash_attn_fwd, found._flash_attn_bwd


def register() -> str:
    """Registers the kernel with Transformers; returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_of(attend))
    return NAME


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    *,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """(tokens, heads, width), documents one after the other. `window`: positions before and after; -1 for all."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _attention(q.contiguous(), k.contiguous(), v.contiguous(), bounds, longest, scale, *window)[0]
    return out


def _settings(bounds: torch.Tensor, longest: int, scale: float, before: int, after: int) -> dict[str, Any]:
    # The wheel's own word for "nothing after" is causal; None is no limit.
    left, right = (None if size < 0 else size for size in (before, after))
    causal = after == 0
    return {
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal and left is None else right,
    }


@torch.library.custom_op("fullshard::flash4_packed_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    before: int,
    after: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithm of each row's sum of exponentials."""
    out, lse = _functions()[0](q, k, v, return_lse=True, **_settings(bounds, longest, scale, before, after))[:2]
    return out, lse


@_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    before: int,
    after: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("fullshard::flash4_packed_attention_backward", mutates_args=())
def _gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    before: int,
    after: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings = _settings(bounds, longest, scale, before, after)
    dq, dk, dv = _functions()[1](q, k, v, out, gradient.contiguous(), lse, **settings)[:3]
    return dq, dk, dv


@_gradients.register_fake
def _(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    before: int,
    after: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, bounds, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, bounds = ctx.saved_tensors
    return (*_gradients(gradient, q, k, v, out, lse, bounds, *ctx.settings), None, None, None, None, None)


_attention.register_autograd(_backward, setup_context=_keep)
