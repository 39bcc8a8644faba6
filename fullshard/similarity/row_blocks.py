"""A sum over rows, block by block: the memory of one block is freed before the next one starts.

Gradients are computed with the sum, so nothing is kept for or computed again in the backward pass: a matrix of scores
of tens of thousands of samples never exists as a whole. Must not know losses or embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

ENTRIES = 2**25
"""The maximum number of scores at a time; a loss holds a handful of such tensors (128 MiB each in fp32)."""

Term = Callable[..., torch.Tensor]
"""(rows as a slice, the inputs) -> the sum over these rows."""


def rows_of(columns: int) -> int:
    """How many rows of this many columns fit into a block."""
    return max(ENTRIES // max(columns, 1), 1)


def sum_over_rows(term: Term, rows: slice, inputs: Sequence[torch.Tensor], *, block: int) -> torch.Tensor:
    """The sum of `term(some rows, *inputs)` over all `rows`, at most `block` of them at a time.

    `term` may depend on other tensors, but gradients reach `inputs` only."""
    if rows.stop - rows.start <= block:
        return term(rows, *inputs)
    if not torch.is_grad_enabled():
        # Inside, `needs_input_grad` is set by requires_grad, even under no_grad.
        inputs = [tensor.detach() for tensor in inputs]
    total: torch.Tensor = _SumOverRows.apply(term, rows, block, *inputs)
    return total


class _SumOverRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Term, rows: slice, block: int, *inputs: torch.Tensor) -> torch.Tensor:
        needs = ctx.needs_input_grad[3:]
        inside = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs, strict=True)]
        learned = [tensor for tensor in inside if tensor.requires_grad]
        grads = [torch.zeros_like(tensor) for tensor in learned]
        total: torch.Tensor | None = None
        for start in range(rows.start, rows.stop, block):
            with torch.set_grad_enabled(bool(learned)):
                part = term(slice(start, min(start + block, rows.stop)), *inside)
            if learned:
                for grad, new in zip(grads, torch.autograd.grad(part, learned, allow_unused=True), strict=True):
                    if new is not None:
                        grad += new
            total = part.detach() if total is None else total + part.detach()
        assert total is not None, "there is more than one block"
        ctx.needs = needs
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        grads = iter(ctx.saved_tensors)
        return None, None, None, *(next(grads) * factor if need else None for need in ctx.needs)


__all__ = ["rows_of", "sum_over_rows"]
