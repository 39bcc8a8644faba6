"""Triton's kernels on the CPU, by its interpreter. Which way kernels run is settled when Triton is imported, so they
run in a process that was told before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

CLOSE = 1e-5
"""Of the largest value, in fp32: sums in another order."""


@contextmanager
def interpreter() -> Iterator[Executor]:
    """A process in which Triton interprets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_tell) as pool:
        yield pool


def _tell() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.manual_seed(0)
    torch.set_num_threads(1)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-3))


def compare(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Results and all gradients, for random gradients of the results."""
    for tensor in inputs:
        tensor.requires_grad_()
    found, expected = _tuple(ours(*inputs)), _tuple(plain(*inputs))
    weights = [torch.randn_like(each) for each in expected]
    gradients = [torch.autograd.grad(results, inputs, weights) for results in (found, expected)]
    assert [far(a, b) for a, b in zip(found, expected, strict=True)] <= [CLOSE] * len(found)
    apart = [far(a, b) for a, b in zip(*gradients, strict=True)]
    assert max(apart) < CLOSE, apart


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
