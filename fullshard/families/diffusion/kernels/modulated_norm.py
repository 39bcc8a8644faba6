"""Layer norm with a scale and shift per sample, in one pass over memory; also with the gated sum before it.

    modulated_norm: x                     -> x, norm(x) * (1 + scale) + shift
    gated_norm:     x + gate * branch = y -> y, norm(y) * (1 + scale) + shift

Both also return the input of the norm: the residual continues from there, and its gradient is added in the same pass.
The gradients of gate, scale, shift and of the branch's bias are sums over tokens; torch.compile needs a pass for each,
here they are by-products. Tensors are (B, tokens, width), vectors (B, width), a bias (width,). Triton, so CUDA;
CPU tests run it interpreted. Must not know models.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TOKENS = 64
"""Tokens of a sample per program of the backward pass, which sums up the gradients of gate and scale."""


def modulated_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and its norm."""
    kept, normed = _Norm.apply(x, None, None, scale, shift, None, eps)
    return kept, normed


def gated_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + gate * branch, and its norm. `bias` is already added to the branch, without a gradient: its gradient is
    computed here."""
    total, normed = _Norm.apply(x, branch, gate, scale, shift, bias, eps)
    return total, normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, branch: Any, gate: Any, scale: Any, shift: Any, bias: Any, eps: float) -> Any:
        total, normed, moments = _norm(x, branch, gate, scale, shift, eps)
        ctx.save_for_backward(x if branch is None else total, branch, gate, scale, moments)
        return x if branch is None else total, normed

    @staticmethod
    def backward(ctx: Any, d_total: Any, d_normed: Any) -> Any:  # type: ignore[override]
        total, branch, gate, scale, moments = ctx.saved_tensors
        each = min(TOKENS, total.shape[1])
        dx, d_branch, sums = _norm_backward(total, branch, gate, scale, moments, d_total, d_normed, each)
        d_scale, d_shift, *others = sums.sum(1).unbind(1)
        d_scale, d_shift = d_scale.to(scale.dtype), d_shift.to(scale.dtype)
        if branch is None:
            return dx, None, None, d_scale, d_shift, None, None
        d_gate, d_all = others
        d_bias = (d_all * gate).sum(0).to(gate.dtype) if ctx.needs_input_grad[5] else None
        return dx, d_branch, d_gate.to(gate.dtype), d_scale, d_shift, d_bias, None


@torch.library.custom_op("fullshard::modulated_norm", mutates_args=())
def _norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum (empty without a branch), normed, and (2, B, tokens) fp32: mean and reciprocal deviation."""
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    batch, tokens, width = x.shape
    total = x.new_empty(0) if branch is None else x.new_empty(x.shape)
    normed, moments = x.new_empty(x.shape), x.new_empty(2, batch, tokens, dtype=torch.float32)
    first, rest = _split(width)
    _forward[(batch * tokens,)](
        *(x, branch, gate, scale, shift, total, normed, moments, batch * tokens, tokens),
        *(gate.stride(0) if gate is not None else 0, scale.stride(0), shift.stride(0), eps),
        **{"WIDTH": width, "FIRST": first, "REST": rest, "GATED": branch is not None, "num_warps": 2},
    )
    return total, normed, moments


@_norm.register_fake
def _(x: Any, branch: Any, gate: Any, scale: Any, shift: Any, eps: Any) -> Any:
    total = x.new_empty(0) if branch is None else x.new_empty(x.shape)
    return total, x.new_empty(x.shape), x.new_empty(2, *x.shape[:2], dtype=torch.float32)


@torch.library.custom_op("fullshard::modulated_norm_backward", mutates_args=())
def _norm_backward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    moments: torch.Tensor,
    d_total: torch.Tensor,
    d_normed: torch.Tensor,
    each: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x and of the branch (empty without one), and (B, parts, 2 or 4, width) fp32, of `each` tokens in
    turn: those of scale and shift, and with a branch that of its gate and the sum of x's."""
    x, branch = x.contiguous(), None if branch is None else branch.contiguous()
    d_total, d_normed = d_total.contiguous(), d_normed.contiguous()
    batch, tokens, width = x.shape
    d_branch = x.new_empty(0) if branch is None else x.new_empty(x.shape)
    vectors = 2 if branch is None else 4
    dx, sums = x.new_empty(x.shape), x.new_empty(batch, -(-tokens // each), vectors, width, dtype=torch.float32)
    first, rest = _split(width)
    _backward[(sums.shape[1], batch)](
        *(x, branch, gate, scale, moments, d_total, d_normed, dx, d_branch, sums, batch * tokens, tokens),
        *(gate.stride(0) if gate is not None else 0, scale.stride(0)),
        **{"WIDTH": width, "FIRST": first, "REST": rest, "GATED": branch is not None, "TOKENS": each},
        num_warps=1 if branch is None else 2,
    )
    return dx, d_branch, sums


@_norm_backward.register_fake
def _(x: Any, branch: Any, gate: Any, scale: Any, moments: Any, d_total: Any, d_normed: Any, each: int) -> Any:
    d_branch = x.new_empty(0) if branch is None else x.new_empty(x.shape)
    vectors = 2 if branch is None else 4
    batch, tokens, width = x.shape
    sums = x.new_empty(batch, -(-tokens // each), vectors, width, dtype=torch.float32)
    return x.new_empty(x.shape), d_branch, sums


def _split(width: int) -> tuple[int, int]:
    """Triton's blocks are powers of two: 1,152 is 1,024 and 128, not 2,048."""
    first = 1 << (width - 1).bit_length() - 1
    return first, 1 << (width - first - 1).bit_length()


@triton.jit
def _read(pointer, cols, WIDTH):
    return tl.load(pointer + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, cols, WIDTH, value):
    tl.store(pointer + cols, value.to(pointer.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def _fold(value_a, value_b, FIRST: tl.constexpr, REST: tl.constexpr):
    """Both blocks added up to the size of the smaller one, within threads: warps wait for each other only once."""
    return tl.sum(tl.reshape(value_a, [REST, FIRST // REST]), 1) + value_b


@triton.jit
def _add(one, two, other_one, other_two):
    return one + other_one, two + other_two


@triton.jit
def _forward(
    x, branch, gate, scale, shift, total, normed, moments, num_rows, tokens, gate_stride, scale_stride, shift_stride,
    eps, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One token, with its values in two blocks, a and b."""
    row = tl.program_id(0).to(tl.int64)
    sample, at = row // tokens, row * WIDTH
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    x_a, x_b = _read(x + at, a, WIDTH), _read(x + at, b, WIDTH)
    if GATED:
        g = gate + sample * gate_stride
        x_a += _read(g, a, WIDTH) * _read(branch + at, a, WIDTH)
        x_b += _read(g, b, WIDTH) * _read(branch + at, b, WIDTH)
        _write(total + at, a, WIDTH, x_a)
        _write(total + at, b, WIDTH, x_b)
    mean = tl.sum(_fold(x_a, x_b, FIRST, REST)) / WIDTH
    x_a, x_b = x_a - mean, tl.where(b < WIDTH, x_b - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(_fold(x_a * x_a, x_b * x_b, FIRST, REST)) / WIDTH + eps)
    k, s = scale + sample * scale_stride, shift + sample * shift_stride
    _write(normed + at, a, WIDTH, x_a * rstd * (1.0 + _read(k, a, WIDTH)) + _read(s, a, WIDTH))
    _write(normed + at, b, WIDTH, x_b * rstd * (1.0 + _read(k, b, WIDTH)) + _read(s, b, WIDTH))
    tl.store(moments + row, mean)
    tl.store(moments + num_rows + row, rstd)


@triton.jit
def _backward(
    x, branch, gate, scale, moments, d_total, d_normed, dx, d_branch, sums, num_rows, tokens, gate_stride, scale_stride,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one sample, one after the other."""
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    k = scale + sample * scale_stride
    k_a, k_b = 1.0 + _read(k, a, WIDTH), 1.0 + _read(k, b, WIDTH)
    scale_a, scale_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    shift_a, shift_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    gate_a, gate_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    all_a, all_b = tl.zeros([FIRST], tl.float32), tl.zeros([REST], tl.float32)
    if GATED:
        g = gate + sample * gate_stride
        g_a, g_b = _read(g, a, WIDTH), _read(g, b, WIDTH)
    # Stages prefetch the next token while this one is computed.
    for token in tl.range(TOKENS, num_stages=3):
        token += part * TOKENS
        row = sample * tokens + token
        at = row * WIDTH
        # Nothing is read or written beyond the sample's last token.
        end = tl.where(token < tokens, WIDTH, 0)
        x_a, x_b = _read(x + at, a, end), _read(x + at, b, end)
        d_a, d_b = _read(d_normed + at, a, end), _read(d_normed + at, b, end)
        r_a, r_b = _read(d_total + at, a, end), _read(d_total + at, b, end)
        if GATED:
            y_a, y_b = _read(branch + at, a, end), _read(branch + at, b, end)
        mean = tl.load(moments + row, mask=token < tokens, other=0.0)
        rstd = tl.load(moments + num_rows + row, mask=token < tokens, other=0.0)
        x_a, x_b = (x_a - mean) * rstd, tl.where(b < WIDTH, (x_b - mean) * rstd, 0.0)
        scale_a += d_a * x_a
        scale_b += d_b * x_b
        shift_a += d_a
        shift_b += d_b
        d_a, d_b = d_a * k_a, d_b * k_b
        folded = _fold(d_a, d_b, FIRST, REST), _fold(d_a * x_a, d_b * x_b, FIRST, REST)
        one, two = tl.reduce(folded, 0, _add)
        one, two = one / WIDTH, two / WIDTH
        d_a, d_b = r_a + rstd * (d_a - one - x_a * two), r_b + rstd * (d_b - one - x_b * two)
        _write(dx + at, a, end, d_a)
        _write(dx + at, b, end, d_b)
        if GATED:
            _write(d_branch + at, a, end, d_a * g_a)
            _write(d_branch + at, b, end, d_b * g_b)
            gate_a += d_a * y_a
            gate_b += d_b * y_b
            all_a += d_a
            all_b += d_b
    out = sums + (sample * tl.num_programs(0) + part) * (4 if GATED else 2) * WIDTH
    _write(out, a, WIDTH, scale_a)
    _write(out, b, WIDTH, scale_b)
    _write(out + WIDTH, a, WIDTH, shift_a)
    _write(out + WIDTH, b, WIDTH, shift_b)
    if GATED:
        _write(out + 2 * WIDTH, a, WIDTH, gate_a)
        _write(out + 2 * WIDTH, b, WIDTH, gate_b)
        _write(out + 3 * WIDTH, a, WIDTH, all_a)
        _write(out + 3 * WIDTH, b, WIDTH, all_b)
