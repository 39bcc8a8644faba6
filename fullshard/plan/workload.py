"""One micro-batch without data: the largest that a recipe allows, as the model's own inputs, and the pass over it.

Which inputs a model takes follows from what it offers (tokens, texts or images), not from its family. Must not know
ranks, memory or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.config.part import plain
from fullshard.faults.micro_batch import usual
from fullshard.recipe import Recipe

DOCUMENTS = 64
"""Documents in a packed micro-batch; only the table of their bounds depends on it."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens in a row; 1 for images."""
    noun: str
    run: Callable[[nn.Module], Any] | None
    """The forward pass up to the loss, on fake tensors; None: it is not known how to run this model without data."""
    note: str = ""
    whole: int = 0
    """Rows of the micro-batch, of which `rows` are in memory at a time; 0: all of them."""

    @property
    def tokens(self) -> int:
        """In memory at a time."""
        return self.rows * self.length

    @property
    def computed(self) -> float:
        """Tokens (or images) that a micro-batch computes; in several chunks the forward pass runs twice."""
        whole = self.whole or self.rows
        return whole * self.length * (4 / 3 if whole > self.rows else 1.0)

    @property
    def learned(self) -> int:
        """Tokens (or images) that a micro-batch learns from."""
        return (self.whole or self.rows) * self.length


def workload(recipe: Recipe, module: nn.Module) -> Workload:
    """The micro-batch of this recipe."""
    rows, length, model = usual(recipe.batch.per_device), recipe.data.sequence_length, recipe.objective
    offers: Any = module
    if hasattr(offers, "denoise"):
        return Workload(rows, 1, "image", lambda m: _denoised(m, rows))
    if "tokens" in model.needs and hasattr(offers, "embed"):
        texts = _texts_at_once(recipe)
        note = f"every text has {length:,} tokens, the most that data.sequence_length allows"
        return Workload(texts, length, "token", lambda m: _embedded(m, texts, length), note, whole=2 * rows)
    if {"input_ids", "labels"} <= set(model.needs):
        note = "" if recipe.data.pack else f"every row has {length:,} tokens, the most that data.sequence_length allows"
        return Workload(rows, length, "token", lambda m: recipe.objective.loss(m, _tokens(rows, length), {}), note)
    note = f"objective.kind = {model.kind()}: activations cannot be predicted without data, and are left out"
    return Workload(rows, length, "sample", None, note)


def _texts_at_once(recipe: Recipe) -> int:
    """Texts whose activations exist together: a chunk of the cache, or a query and a positive for every row."""
    cache = plain(recipe.objective).get("cache")
    both = 2 * usual(recipe.batch.per_device)
    if cache is None:
        return both
    most = cache.get("chunk") or max((cache.get("tokens") or 0) // recipe.data.sequence_length, 1)
    return min(both, int(most))


def _tokens(rows: int, length: int) -> dict[str, Any]:
    whole = torch.zeros(rows, length, dtype=torch.int64)
    bounds = torch.zeros(DOCUMENTS + 1, dtype=torch.int32)
    return {"input_ids": whole, "position_ids": whole.clone(), "labels": whole.clone(), "bounds": bounds}


def _embedded(module: Any, texts: int, length: int) -> Any:
    whole = torch.zeros(texts, length, dtype=torch.int64)
    vectors, _ = module.embed(
        input_ids=whole,
        positions=whole.clone(),
        real=torch.ones(texts, length, dtype=torch.bool),
        places=torch.zeros(texts * length, dtype=torch.int64),
        lengths=torch.zeros(texts, dtype=torch.int64),
        bounds=torch.zeros(texts + 1, dtype=torch.int32),
        packed=False,
    )
    return vectors @ vectors.T


def _denoised(module: Any, rows: int) -> Any:
    size = getattr(module.config, "sample_size", None) or 32
    sides = (size, size) if isinstance(size, int) else tuple(size)
    images = torch.zeros(rows, module.image_channels, *sides)
    found = module.denoise(images, torch.zeros(rows))
    return (found.float() - images).square().mean()
