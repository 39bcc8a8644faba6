"""x + gate * branch, with all gradients in one pass over memory, including that of a bias in the branch.

Tensors are (B, tokens, width), the gate is (B, width), the bias (width,). The sum itself is plain torch, which
torch.compile fuses into one pass. Triton, so CUDA; CPU tests run it interpreted. Must not know models.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 128
"""Columns per program."""
TILE, TILES = 4, 16
"""Tokens per tile, and tiles per program, which sums up the gradients of gate and bias."""


def gated_sum(
    x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`bias` is already added to the branch, without a gradient: its gradient is computed here."""
    total: torch.Tensor = _Sum.apply(x, branch, gate, bias)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, branch: Any, gate: Any, bias: Any) -> Any:
        ctx.save_for_backward(branch, gate)
        return x + gate[:, None] * branch

    @staticmethod
    def backward(ctx: Any, d_total: Any) -> Any:  # type: ignore[override]
        branch, gate = ctx.saved_tensors
        each = TILE * min(TILES, -(-branch.shape[1] // TILE))
        d_branch, sums = _gated_sum_backward(d_total, branch, gate, each)
        d_gate, d_all = sums.sum(1).unbind(1)
        d_bias = (d_all * gate).sum(0).to(gate.dtype) if ctx.needs_input_grad[3] else None
        return d_total, d_branch, d_gate.to(gate.dtype), d_bias


@torch.library.custom_op("fullshard::gated_sum_backward", mutates_args=())
def _gated_sum_backward(
    d_total: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the branch, and (B, parts, 2, width) fp32, of `each` tokens in turn: the gate's gradient and the
    sum of d_total."""
    d_total, branch = d_total.contiguous(), branch.contiguous()
    batch, tokens, width = branch.shape
    d_branch, parts = branch.new_empty(branch.shape), -(-tokens // each)
    sums = branch.new_empty(batch, parts, 2, width, dtype=torch.float32)
    _backward[(parts, -(-width // COLUMNS), batch)](
        *(d_total, branch, gate, d_branch, sums, tokens, gate.stride(0)),
        **{"WIDTH": width, "TILE": TILE, "TILES": each // TILE, "COLUMNS": COLUMNS, "num_warps": 1},
    )
    return d_branch, sums


@_gated_sum_backward.register_fake
def _(d_total: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, width = branch.shape
    return branch.new_empty(branch.shape), branch.new_empty(batch, -(-tokens // each), 2, width, dtype=torch.float32)


@triton.jit
def _backward(
    d_total, branch, gate, d_branch, sums, tokens, gate_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of some tokens of one sample."""
    part, sample = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(gate + sample * gate_stride + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    of_gate, of_all = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    # Stages prefetch the next tile while this one is computed.
    for tile in tl.range(TILES, num_stages=2):
        rows = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        at = (sample * tokens + rows[:, None]) * WIDTH + cols[None, :]
        inside = (rows[:, None] < tokens) & (cols[None, :] < WIDTH)
        gradient = tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        of_gate += gradient * tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        of_all += gradient
        tl.store(d_branch + at, (gradient * g[None, :]).to(d_branch.dtype.element_ty), mask=inside)
    total = sums + (sample * tl.num_programs(0) + part) * 2 * WIDTH + cols
    tl.store(total, tl.sum(of_gate, 0), mask=cols < WIDTH)
    tl.store(total + WIDTH, tl.sum(of_all, 0), mask=cols < WIDTH)
