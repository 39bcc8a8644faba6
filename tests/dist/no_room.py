"""Runs in which one rank runs out of memory: the error is raised on purpose, by hooks on a block of a small model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Batch, Terms
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.families.vision.objectives.vision_lm import VisionLM
from fullshard.optim.adamw import AdamW


def no_room(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (on purpose).")


class Tight(CausalLM):
    """The usual loss, on a rank without room for more than `fits` rows in a micro-batch with one of these samples."""

    samples: list[int]
    fits: int
    where: str = "forward"
    """start: before anything is gathered; forward or backward: in a block; recompute: in the backward pass."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        prepare(self, model, batch)
        return super().loss(model, batch, aux)


class TightVision(VisionLM):
    """The same for pictures."""

    samples: list[int]
    fits: int
    where: str = "forward"

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        prepare(self, model, batch)
        return super().loss(model, batch, aux)


class Taught(Tight):
    """Weighs the loss by what a frozen model says, which is sharded as well."""

    teacher: str

    def frozen(self) -> dict[str, Any]:
        return {"teacher": decode(Family, {"path": self.teacher}, where="objective.teacher")}

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        if not torch.is_grad_enabled():  # proofs look at single positions
            return terms
        with torch.no_grad():
            weight = aux["teacher"](input_ids=batch["input_ids"]).logits.square().mean()
        return Terms(terms.loss_sum * (1 + weight), terms.metrics)


def prepare(objective: Any, model: nn.Module, batch: Batch) -> None:
    """Lets this pass fail, if the rank has too many rows."""
    while _hooks:
        _hooks.pop().remove()
    ids = [number for number in batch["sample_ids"].tolist() if number >= 0]
    if torch.is_grad_enabled() and len(ids) > objective.fits and set(ids) & set(objective.samples):
        if objective.where == "start":
            no_room()
        parts = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
        _hooks.append(_failing(parts[-2], objective.where))


class Gathering(CausalLM):
    """Asks the other ranks in every pass, in a way of its own."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        from torch.distributed.distributed_c10d import all_reduce

        all_reduce(torch.ones(1))
        return super().loss(model, batch, aux)


class Normed(Tight):
    """Counts in a buffer of the model what it has seen, as a batch norm does."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        if not hasattr(model, "seen"):
            model.register_buffer("seen", torch.zeros(()), persistent=False)
        if torch.is_grad_enabled():
            model.seen += batch["input_ids"].sum()
        terms = super().loss(model, batch, aux)
        return Terms(terms.loss_sum, {**terms.metrics, "mean": (model.seen.clone(), torch.ones(()))})


_hooks: list[Any] = []
"""Of the last pass; the recomputation in its backward pass calls them again."""


def _failing(module: nn.Module, where: str) -> Any:
    calls: list[int] = []

    def in_backward(module: nn.Module, given: tuple[torch.Tensor]) -> None:
        given[0].register_hook(no_room)

    def in_forward(*_: Any) -> None:
        calls.append(1)
        if len(calls) == (2 if where == "recompute" else 1):
            no_room()

    return module.register_forward_pre_hook(in_backward if where == "backward" else in_forward)


class TightUpdate(AdamW):
    """AdamW whose update finds no room on one rank, at some calls."""

    calls: list[int]
    rank: int = 0

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer, calls = super().open(named_parameters), iter(range(10**6))

        def check(*_: Any) -> None:
            if next(calls) in self.calls and os.environ.get("RANK", "0") == str(self.rank):
                no_room()

        optimizer.register_step_pre_hook(check)
        return optimizer
