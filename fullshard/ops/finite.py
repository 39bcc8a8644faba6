"""Refuses numbers that are none, with what the dtype has to do with it. Must not know models or losses."""

from __future__ import annotations

import torch

from fullshard.errors import NumericalError


def finite(logits: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """The logits of a first batch as they are; NumericalError where they overflow or hold NaN."""
    if bool(logits.isfinite().all()):
        return logits
    dtype = str(compute).removeprefix("torch.")
    low = f"Values beyond {torch.finfo(compute).max:.3g} do not fit into it. " if compute.itemsize < 4 else ""
    other = "fp32" if compute == torch.bfloat16 else "bf16 or fp32"
    advice = f"Use precision: {other}; if that gives the same, the weights are broken" if low else "Use other weights"
    raise NumericalError(
        f"Before the first step the logits of the model are not finite (computed in {dtype}). {low}{advice}."
    )


__all__ = ["finite"]
