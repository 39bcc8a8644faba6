"""The words for logits that are NaN or Inf, with what the dtype has to do with it. Must not know models or losses."""

from __future__ import annotations

import torch

from fullshard.errors import NumericalError


def not_finite(compute: torch.dtype) -> NumericalError:
    """The error for logits of a first batch that overflow or hold NaN."""
    dtype = str(compute).removeprefix("torch.")
    low = f"Values beyond {torch.finfo(compute).max:.3g} do not fit into it. " if compute.itemsize < 4 else ""
    other = "fp32" if compute == torch.bfloat16 else "bf16 or fp32"
    advice = f"Use precision: {other}; if that gives the same, the weights are broken" if low else "Use other weights"
    return NumericalError(
        f"Before the first step the logits of the model are not finite (computed in {dtype}). {low}{advice}."
    )


__all__ = ["not_finite"]
