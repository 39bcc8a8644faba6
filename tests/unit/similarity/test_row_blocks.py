"""Sums in blocks of rows against the same sum at once, and what stays alive of it."""

from __future__ import annotations

import weakref

import pytest
import torch

from fullshard.similarity.row_blocks import rows_of, sum_over_rows


def scores(rows: slice, left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (scale * left[rows] @ right.T).logsumexp(1).sum()


def made() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(9, 4), torch.randn(5, 4), torch.tensor(2.0)]


@pytest.mark.parametrize("rows", [slice(0, 9), slice(2, 7), slice(3, 3)])
@pytest.mark.parametrize("block", [1, 2, 4, 100])
def test_blocks_add_up_to_the_whole(rows: slice, block: int) -> None:
    ours, theirs = ([tensor.requires_grad_() for tensor in made()] for _ in range(2))
    (3 * sum_over_rows(scores, rows, ours, block=block)).backward()
    (3 * scores(rows, *theirs)).backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)


def test_only_what_is_trained_gets_a_gradient() -> None:
    left, right, scale = made()
    right.requires_grad_()
    sum_over_rows(scores, slice(0, 9), [left, right, scale], block=2).backward()
    assert right.grad is not None
    assert left.grad is None
    assert not sum_over_rows(scores, slice(0, 9), made(), block=2).requires_grad
    with torch.no_grad():
        assert not sum_over_rows(scores, slice(0, 9), [left, right, scale], block=2).requires_grad


class Kept:
    """A tensor that a backward pass will need."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_one_block_is_in_memory_at_a_time() -> None:
    """Before each block, nothing is kept for the gradient of those before it."""
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()
    before, after = [], []

    def keep(tensor: torch.Tensor) -> Kept:
        made = Kept(tensor)
        kept.add(made)
        return made

    def term(rows: slice, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        before.append(len(kept))
        total = (left[rows] @ right.T).exp().sum()
        after.append(len(kept))
        return total

    inputs = [torch.randn(8, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda made: made.tensor):
        total = sum_over_rows(term, slice(0, 8), inputs, block=2)
    assert before == [0, 0, 0, 0]
    assert min(after) > 0
    total.backward()
    assert len(before) == 4, "nothing is computed again"


def test_a_block_has_at_least_one_row() -> None:
    assert rows_of(2**40) == 1
    assert rows_of(0) > 1
    assert rows_of(2**20) == 32
