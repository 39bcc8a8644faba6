"""Objectives and optimizers for runs with bad steps: a loss that is NaN or far too high on one rank, an update that is
left out by hand, and data that comes late on one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.contracts.objective import Batch, Terms
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.optim.adamw import AdamW
from fullshard.optim.muon import Muon


class Bad(CausalLM):
    """The usual loss, multiplied by `factor` for micro-batches with one of these samples: on the rank that has it."""

    samples: list[int]
    factor: str = "nan"
    """As text: in a recipe a number is finite."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        found = set(batch["sample_ids"].tolist()) & set(self.samples)
        return Terms(terms.loss_sum * float(self.factor), terms.metrics) if found else terms


class LeavesOut(AdamW):
    """AdamW that does nothing in some steps, counted from 0."""

    steps: list[int]

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return _leaving_out(super().open(named_parameters), self.steps)


class MuonLeavesOut(Muon):
    """The same for Muon."""

    steps: list[int]

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return _leaving_out(super().open(named_parameters), self.steps)


def _leaving_out(optimizer: Any, steps: list[int]) -> torch.optim.Optimizer:
    """The same optimizer with another `step`, so that everything around it stays the same."""
    step, calls = optimizer.step, iter(range(10**6))
    optimizer.step = lambda: None if next(calls) in steps else step()
    return optimizer  # type: ignore[no-any-return]


def train_with_late_data(settings: dict[str, Any], *, late: int, seconds: float) -> list[dict[str, Any]]:
    """One rank of a run whose rank `late` waits for each micro-batch: up to a second where a busy machine takes long
    to compute a step."""
    from fullshard.data import loader
    from tests.small import train

    made, last = loader._Batches.__getitem__, time.monotonic()

    def slowly(self: Any, turn: Any) -> Any:
        nonlocal last
        if int(os.environ["RANK"]) == late:
            time.sleep(max(seconds, min(3 * (time.monotonic() - last), 1.0)))
        batch = made(self, turn)
        last = time.monotonic()
        return batch

    loader._Batches.__getitem__ = slowly  # type: ignore[method-assign]
    try:
        return train(settings)
    finally:
        loader._Batches.__getitem__ = made  # type: ignore[method-assign]
