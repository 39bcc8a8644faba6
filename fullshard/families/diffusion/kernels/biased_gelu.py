"""GELU with a bias, and both gradients in one pass over memory: torch.compile needs two.

As a sigmoid, (1 + tanh(x)) / 2 = sigmoid(2x): on a GPU tanh takes longer than the memory access. Rows of (N, width).
Triton, so CUDA; CPU tests run it interpreted. Must not know models.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 256
"""Columns per program, which has four warps."""
TILE, TILES = 8, 32
"""Rows per tile of the backward pass, and tiles per program, which sums up the gradient of the bias."""


def biased_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x + bias), in its tanh form."""
    out: torch.Tensor = _gelu(x, bias)
    return out


@torch.library.custom_op("fullshard::biased_gelu", mutates_args=())
def _gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    width, out = x.shape[-1], x.new_empty(x.shape)
    rows = x.numel() // width
    _forward[(-(-rows // TILE), -(-width // COLUMNS))](
        x, bias.contiguous(), out, rows, width, TILE=TILE, COLUMNS=COLUMNS, num_warps=4
    )
    return out


@torch.library.custom_op("fullshard::biased_gelu_backward", mutates_args=())
def _gelu_backward(
    d_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, and in fp32 that of the bias, by parts of `each` rows."""
    d_out, x = d_out.contiguous(), x.contiguous()
    width, dx = x.shape[-1], x.new_empty(x.shape)
    rows = x.numel() // width
    sums = x.new_empty(-(-rows // each), width, dtype=torch.float32)
    _backward[(sums.shape[0], -(-width // COLUMNS))](
        *(d_out, x, bias.contiguous(), dx, sums, rows, width),
        **{"TILE": TILE, "TILES": each // TILE, "COLUMNS": COLUMNS, "num_warps": 4},
    )
    return dx, sums


@_gelu.register_fake
def _(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@_gelu_backward.register_fake
def _(d_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(-(-rows // each), width, dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, bias = ctx.saved_tensors
    rows = x.numel() // x.shape[-1]
    dx, sums = _gelu_backward(d_out, x, bias, TILE * min(TILES, -(-rows // TILE)))
    return dx, sums.sum(0).to(bias.dtype)


_gelu.register_autograd(_gradients, setup_context=_save)


@triton.jit
def _share(x, square):
    """The factor of x in GELU: sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)), with a power of two."""
    return 1.0 / (1.0 + tl.exp2(x * (-0.1029432395800235 * square - 2.302208198144325)))


@triton.jit
def _forward(x, bias, out, num_rows, width, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = rows[:, None] * width + cols[None, :], (rows[:, None] < num_rows) & (cols[None, :] < width)
    b = tl.load(bias + cols, mask=cols < width, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b[None, :]
    tl.store(out + at, (value * _share(value, value * value)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_out, x, bias, dx, sums, num_rows, width, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr
):
    part = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + cols, mask=cols < width, other=0.0).to(tl.float32)
    # Summed over rows only at the end: inside the loop, warps would wait for each other every time.
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    # Stages prefetch the next tile while this one is computed.
    for tile in tl.range(TILES, num_stages=3):
        rows = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        at, inside = rows[:, None] * width + cols[None, :], (rows[:, None] < num_rows) & (cols[None, :] < width)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        square = value * value
        share = _share(value, square)
        # The derivative of the exponent: 2 * sqrt(2 / pi) * (x + 3 * 0.044715 * x^3).
        slope = share + (share - share * share) * value * (0.21406444881780073 * square + 1.5957691216057308)
        gradient = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
        total += gradient
    tl.store(sums + part * width + cols, tl.sum(total, 0), mask=cols < width)
