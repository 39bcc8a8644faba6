"""Objectives that fail on one rank, for runs that the command starts."""

from __future__ import annotations

import os

import torch
from torch import nn

from fullshard.contracts.objective import Batch, Terms
from fullshard.families.language.objectives.causal_lm import CausalLM


class MixedDtypes(CausalLM):
    """Multiplies fp16 by fp32 on rank 1, in its third backward pass."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        if torch.is_grad_enabled() and os.environ["RANK"] == "1":
            calls.append(1)
            if len(calls) == 3:
                nn.functional.linear(torch.ones(2, 3, dtype=torch.float16), torch.ones(4, 3))
        return terms


class NotANumber(CausalLM):
    """Gives a loss that is not a number, on every rank."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        return Terms(terms.loss_sum * float("nan"), terms.metrics) if torch.is_grad_enabled() else terms


calls: list[int] = []
