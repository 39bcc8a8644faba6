"""Full self-attention within each sample, on packed queries, keys and values.

    (B, tokens, 3, heads, width) -> (B, tokens, heads, width)

One product makes queries, keys and values, and since their gradients are packed too, one product takes them back. Made
for rows of a few hundred tokens and widths such as 72, which libraries pad to 128: here a width is a power of two plus
a remainder of at least 16. The gradient of the scores (tokens x tokens per head) goes through memory: for such rows
that is faster than computing it twice. bf16 and fp16; products add up in fp32. Triton, so CUDA; CPU tests run it
interpreted. Must not know models.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

FORWARD = {"OWN": 64, "OTHER": 64, "num_warps": 4, "num_stages": 2}
KEYS = {"OWN": 64, "OTHER": 32, "num_warps": 4, "num_stages": 3}
QUERIES = {"OWN": 64, "OTHER": 64, "num_warps": 4, "num_stages": 2}
"""Per kernel: tokens of a program, and tokens that it compares them with at a time; chosen by measurement."""
LN_2 = tl.constexpr(math.log(2))
"""Scores are kept in base 2; their gradients are in base e."""


def packed_attention(qkv: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention without a mask, scaled by the square root of the width. `bias` (3 * heads * width,) is already added to
    qkv, without a gradient: its gradient is computed here."""
    out: torch.Tensor = _attend(qkv, bias)[0]
    return out


@torch.library.custom_op("fullshard::packed_attention", mutates_args=())
def _attend(qkv: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and for the backward pass (B, heads, tokens) fp32: log-sum-exp in base 2."""
    qkv = qkv.contiguous()
    batch, tokens, _, heads, width = qkv.shape
    out, logs = qkv.new_empty(batch, tokens, heads, width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    _forward[_grid(qkv, FORWARD)](qkv, out, logs, _factor(width), **_sizes(qkv), **FORWARD)
    return out, logs


@torch.library.custom_op("fullshard::packed_attention_backward", mutates_args=())
def _attend_backward(
    d_out: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of queries, keys and values, side by side; and (parts, 2, heads, width) fp32, of `each` tokens in
    turn: the sum of that of queries, and of d_out."""
    qkv, out, d_out = qkv.contiguous(), out.contiguous(), d_out.contiguous()
    d_qkv, products = torch.empty_like(qkv), torch.empty_like(logs)
    batch, tokens, _, heads, width = qkv.shape
    factor, sizes, options = _factor(width), _sizes(qkv), QUERIES | {"OWN": each}
    grid, d_scores = _grid(qkv, options), qkv.new_empty(batch, heads, tokens, tokens)
    sums = qkv.new_empty(batch * grid[0], 2, heads, width, dtype=torch.float32)
    _multiply[grid](out, d_out, products, sums, **sizes, OWN=each, num_warps=2)
    _backward_keys[_grid(qkv, KEYS)](qkv, d_out, logs, products, d_qkv, d_scores, factor, **sizes, **KEYS)
    _backward_queries[grid](qkv, d_scores, d_qkv, sums, factor, **sizes, **options)
    return d_qkv, sums


@_attend.register_fake
def _(qkv: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, _, heads, width = qkv.shape
    return qkv.new_empty(batch, tokens, heads, width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    d_out: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, _, heads, width = qkv.shape
    return qkv.new_empty(qkv.shape), qkv.new_empty(batch * -(-tokens // each), 2, heads, width, dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], *output)


def _backward(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    d_qkv, sums = _attend_backward(d_out, *ctx.saved_tensors, QUERIES["OWN"])
    if not ctx.needs_input_grad[1]:
        return d_qkv, None
    # Zero for keys: softmax is shift-invariant. For values it is the gradient of the results, since the weights of a
    # query add up to one.
    of_queries, of_values = sums.sum(0).to(d_qkv.dtype)
    return d_qkv, torch.cat([of_queries, torch.zeros_like(of_queries), of_values]).flatten()


_attend.register_autograd(_backward, setup_context=_save)


def _grid(qkv: torch.Tensor, options: dict[str, int]) -> tuple[int, int, int]:
    batch, tokens, _, heads, _ = qkv.shape
    return -(-tokens // options["OWN"]), heads, batch


def _sizes(qkv: torch.Tensor) -> dict[str, int]:
    _, tokens, _, heads, width = qkv.shape
    first = max(16, 1 << (width - 1).bit_length() - 1)
    rest = max(16, 1 << max(width - first - 1, 0).bit_length())
    return {"TOKENS": tokens, "HEADS": heads, "WIDTH": width, "FIRST": first, "REST": rest}


def _factor(width: int) -> float:
    """The scale of scores in base 2."""
    return math.log2(math.e) / math.sqrt(width)


@triton.jit
def _read(pointer, rows, stride, a, b, TOKENS, WIDTH):
    """Vectors of some tokens, each in two blocks of columns, a and b."""
    at, there = pointer + rows[:, None] * stride, rows[:, None] < TOKENS
    value_a = tl.load(at + a[None, :], mask=there & (a[None, :] < WIDTH), other=0.0)
    return value_a, tl.load(at + b[None, :], mask=there & (b[None, :] < WIDTH), other=0.0)


@triton.jit
def _write(pointer, rows, stride, a, b, TOKENS, WIDTH, value_a, value_b):
    at, there = pointer + rows[:, None] * stride, rows[:, None] < TOKENS
    tl.store(at + a[None, :], value_a.to(pointer.dtype.element_ty), mask=there & (a[None, :] < WIDTH))
    tl.store(at + b[None, :], value_b.to(pointer.dtype.element_ty), mask=there & (b[None, :] < WIDTH))


@triton.jit
def _sum_up(pointer, a, b, WIDTH, value_a, value_b):
    """Sums over tokens; missing tokens are zero."""
    tl.store(pointer + a, tl.sum(value_a, 0), mask=a < WIDTH)
    tl.store(pointer + b, tl.sum(value_b, 0), mask=b < WIDTH)


@triton.jit
def _forward(
    qkv, out, logs, factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Some queries of a head against all of its keys."""
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ALL: tl.constexpr = HEADS * WIDTH
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    q = qkv + sample * TOKENS * 3 * ALL + head * WIDTH
    rows = tl.program_id(0) * OWN + tl.arange(0, OWN)
    q_a, q_b = _read(q, rows, 3 * ALL, a, b, TOKENS, WIDTH)
    highest, total = tl.full([OWN], -float("inf"), tl.float32), tl.zeros([OWN], tl.float32)
    out_a, out_b = tl.zeros([OWN, FIRST], tl.float32), tl.zeros([OWN, REST], tl.float32)
    for begin in range(0, TOKENS, OTHER):
        keys = begin + tl.arange(0, OTHER)
        k_a, k_b = _read(q + ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH)
        v_a, v_b = _read(q + 2 * ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH)
        scores = tl.dot(q_b, tl.trans(k_b), tl.dot(q_a, tl.trans(k_a))) * factor
        if TOKENS % OTHER:
            scores = tl.where((keys < TOKENS)[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares, left = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * left + tl.sum(shares, 1)
        shares = shares.to(v_a.dtype)
        out_a, out_b = tl.dot(shares, v_a, out_a * left[:, None]), tl.dot(shares, v_b, out_b * left[:, None])
        highest = higher
    o = out + sample * TOKENS * ALL + head * WIDTH
    _write(o, rows, ALL, a, b, TOKENS, WIDTH, out_a / total[:, None], out_b / total[:, None])
    tl.store(logs + (sample * HEADS + head) * TOKENS + rows, highest + tl.log2(total), mask=rows < TOKENS)


@triton.jit
def _multiply(
    out, d_out, products, sums,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """The products of results and their gradients, for some tokens; and the sum of these gradients."""
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ALL: tl.constexpr = HEADS * WIDTH
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    rows, at = tl.program_id(0) * OWN + tl.arange(0, OWN), sample * TOKENS * ALL + head * WIDTH
    d_a, d_b = _read(d_out + at, rows, ALL, a, b, TOKENS, WIDTH)
    o_a, o_b = _read(out + at, rows, ALL, a, b, TOKENS, WIDTH)
    product = tl.sum(o_a.to(tl.float32) * d_a, 1) + tl.sum(o_b.to(tl.float32) * d_b, 1)
    tl.store(products + (sample * HEADS + head) * TOKENS + rows, product, mask=rows < TOKENS)
    total = sums + (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * ALL + ALL + head * WIDTH
    _sum_up(total, a, b, WIDTH, d_a.to(tl.float32), d_b.to(tl.float32))


@triton.jit
def _backward_keys(
    qkv, d_out, logs, products, d_qkv, d_scores, factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Some keys and values against all queries; stores the gradient of the scores for the query kernel."""
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ALL: tl.constexpr = HEADS * WIDTH
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    q, at = qkv + sample * TOKENS * 3 * ALL + head * WIDTH, sample * TOKENS * ALL + head * WIDTH
    keys = tl.program_id(0) * OWN + tl.arange(0, OWN)
    k_a, k_b = _read(q + ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH)
    v_a, v_b = _read(q + 2 * ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH)
    dk_a, dk_b = tl.zeros([OWN, FIRST], tl.float32), tl.zeros([OWN, REST], tl.float32)
    dv_a, dv_b = tl.zeros([OWN, FIRST], tl.float32), tl.zeros([OWN, REST], tl.float32)
    lines = (sample * HEADS + head) * TOKENS
    for begin in range(0, TOKENS, OTHER):
        rows = begin + tl.arange(0, OTHER)
        q_a, q_b = _read(q, rows, 3 * ALL, a, b, TOKENS, WIDTH)
        d_a, d_b = _read(d_out + at, rows, ALL, a, b, TOKENS, WIDTH)
        # A missing query and its gradient are zero, so they add nothing.
        log = tl.load(logs + lines + rows, mask=rows < TOKENS, other=0.0)
        product = tl.load(products + lines + rows, mask=rows < TOKENS, other=0.0)
        scores = tl.dot(k_b, tl.trans(q_b), tl.dot(k_a, tl.trans(q_a))) * factor
        shares = tl.exp2(scores - log[None, :])
        if TOKENS % OWN:
            shares = tl.where((keys < TOKENS)[:, None], shares, 0.0)
        narrow = shares.to(q_a.dtype)
        dv_a, dv_b = tl.dot(narrow, d_a, dv_a), tl.dot(narrow, d_b, dv_b)
        d_shares = tl.dot(v_b, tl.trans(d_b), tl.dot(v_a, tl.trans(d_a)))
        gradient = (shares * (d_shares - product[None, :])).to(q_a.dtype)
        dk_a, dk_b = tl.dot(gradient, q_a, dk_a), tl.dot(gradient, q_b, dk_b)
        place = d_scores + (lines + keys[:, None]) * TOKENS + rows[None, :]
        tl.store(place, gradient, mask=(keys[:, None] < TOKENS) & (rows[None, :] < TOKENS))
    dk_a, dk_b = dk_a * (factor * LN_2), dk_b * (factor * LN_2)
    d_k = d_qkv + sample * TOKENS * 3 * ALL + ALL + head * WIDTH
    _write(d_k, keys, 3 * ALL, a, b, TOKENS, WIDTH, dk_a, dk_b)
    _write(d_k + ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH, dv_a, dv_b)


@triton.jit
def _backward_queries(
    qkv, d_scores, d_qkv, sums, factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Some queries: the gradients of their scores times all keys."""
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ALL: tl.constexpr = HEADS * WIDTH
    a, b = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    at = sample * TOKENS * 3 * ALL + head * WIDTH
    rows = tl.program_id(0) * OWN + tl.arange(0, OWN)
    dq_a, dq_b = tl.zeros([OWN, FIRST], tl.float32), tl.zeros([OWN, REST], tl.float32)
    lines = (sample * HEADS + head) * TOKENS
    for begin in range(0, TOKENS, OTHER):
        keys = begin + tl.arange(0, OTHER)
        k_a, k_b = _read(qkv + at + ALL, keys, 3 * ALL, a, b, TOKENS, WIDTH)
        place = d_scores + (lines + keys[:, None]) * TOKENS + rows[None, :]
        gradient = tl.load(place, mask=(keys[:, None] < TOKENS) & (rows[None, :] < TOKENS), other=0.0)
        dq_a, dq_b = tl.dot(tl.trans(gradient), k_a, dq_a), tl.dot(tl.trans(gradient), k_b, dq_b)
    dq_a, dq_b = dq_a * (factor * LN_2), dq_b * (factor * LN_2)
    _write(d_qkv + at, rows, 3 * ALL, a, b, TOKENS, WIDTH, dq_a, dq_b)
    total = sums + (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * ALL + head * WIDTH
    _sum_up(total, a, b, WIDTH, dq_a, dq_b)
