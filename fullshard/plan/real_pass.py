"""A real forward and backward pass of one part of a model: its seconds, and on a GPU its bytes.

Must not know models, recipes or ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullshard.plan.live import nbytes
from fullshard.plan.measured import Pass

WARM_UP, REPEATS = 3, 5
"""Passes before measuring, the first of which compiles; and passes whose median counts."""


def real_pass(
    device: torch.device,
    tokens: int,
    leaves: Sequence[torch.Tensor],
    forward: Callable[[bool], list[torch.Tensor]],
    *,
    hands_on: bool = False,
) -> Pass:
    """Runs `forward(timed)` and its backward pass to the leaves. `hands_on`: its outputs are not what it keeps."""
    marks = []
    for _ in range(WARM_UP + REPEATS):
        start, outputs, middle = _mark(device), forward(True), _mark(device)
        _backward(outputs)
        marks.append((start, middle, _mark(device)))
        _forget(leaves)
        del outputs
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spans = [(_between(*mark[:2]), _between(*mark[1:])) for mark in marks[WARM_UP:]]
    found = Pass(tokens, *map(statistics.median, zip(*spans, strict=True)))
    if device.type != "cuda":
        return found
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = forward(False)
    held = torch.cuda.memory_allocated(device) - before
    most = torch.cuda.max_memory_allocated(device) - before
    own = nbytes(outputs) if hands_on else 0
    torch.cuda.reset_peak_memory_stats(device)
    _backward(outputs)
    backward = torch.cuda.max_memory_allocated(device) - before - held
    _forget(leaves)
    return replace(found, kept=max(held - own, 0), forward_needs=most, backward_needs=max(backward, 0))


def _backward(outputs: list[torch.Tensor]) -> None:
    """The backward pass of every output that has one, from gradients that take memory as real ones do."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(roots, [root.detach().clone() for root in roots])


def _forget(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _mark(device: torch.device) -> Any:
    """A point in time. On a GPU an event: passes follow each other as in a run, and the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1000)
