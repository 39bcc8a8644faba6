"""Norms that compute their statistics in half precision, found by running one of each class in both precisions.

Must not know model classes, recipes or ranks.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

ROWS = 64
_ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Half the distance between two neighbours, relative to them."""
_OFFSET, _SPREAD = 40.0, 30.0


@dataclass(frozen=True)
class LowNorm:
    """A norm class that is less accurate than its inputs."""

    class_name: str
    where: str
    """The name of one module of that class."""
    apart: float
    """The distance between its output and the fp32 output, relative to the latter."""
    allowed: float


def low_precision_norms(module: nn.Module, *, compute: torch.dtype = torch.bfloat16) -> list[LowNorm]:
    """Norm classes of the module whose mean or mean square is computed in `compute`.

    One module of each class and width is run on the same inputs in `compute` and in fp32. Rounding inputs and outputs
    moves each entry independently; a rounded mean moves whole rows, which is what is measured. Norms that take
    more than one tensor are skipped.
    """
    if compute not in _ROUNDING:
        return []
    found: dict[str, LowNorm] = {}
    tried: set[tuple[type[nn.Module], tuple[int, ...]]] = set()
    for name, part in module.named_modules():
        shapes = tuple(n for p in part.parameters() for n in p.shape)
        key = (type(part), shapes)
        if "Norm" not in type(part).__name__ or key in tried or next(part.children(), None) is not None:
            continue
        tried.add(key)
        low = _try(part, name, compute)
        if low is not None:
            found.setdefault(low.class_name, low)
    return list(found.values())


@torch.no_grad()
def _try(part: nn.Module, name: str, compute: torch.dtype) -> LowNorm | None:
    widths = {p.shape[-1] for p in part.parameters() if p.dim() == 1}
    if len(widths) != 1 or isinstance(part, nn.modules.batchnorm._BatchNorm):
        return None
    generator = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(part).to_empty(device="cpu").to(torch.float32).eval()
    for parameter in exact.parameters():
        parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator)).copy_(parameter.to(compute))
    noise = _SPREAD * torch.randn(ROWS, widths.pop(), generator=generator)
    rounded = copy.deepcopy(exact).to(compute)
    # The error of every entry even with fp32 statistics: the output is rounded, usually twice.
    once = _ROUNDING[compute]
    worst: LowNorm | None = None
    for inputs in (noise, noise + _OFFSET * _SPREAD):
        inputs = inputs.to(compute)
        try:
            low, high = rounded(inputs).float(), exact(inputs.float()).float()
        except Exception:
            # It does not take a single tensor of its width: skip it.
            return None
        if low.shape != high.shape or low.shape != inputs.shape:
            return None
        apart, allowed = _rows_apart(low, high), once * max(0.35, 4.5 / math.sqrt(inputs.shape[-1]))
        if not apart <= allowed and (worst is None or not apart <= worst.apart):
            worst = LowNorm(type(part).__name__, name, apart, allowed)
    return worst


def _rows_apart(low: torch.Tensor, high: torch.Tensor) -> float:
    """By how much whole rows are scaled or shifted, relative; the rounding of single entries averages out."""
    width = high.square().mean(-1).sqrt().clamp(min=1e-12)
    scale = (low * high).sum(-1) / (high * high).sum(-1) - 1.0
    shift = (low - high).mean(-1) / width
    return float(torch.maximum(scale.square().mean().sqrt(), shift.square().mean().sqrt()))
