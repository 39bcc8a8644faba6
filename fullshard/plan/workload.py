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
    run: Callable[[nn.Module, Any], torch.Tensor] | None
    """The forward pass over a batch up to the loss; None: it is not known how to run this model without data."""
    batch: Callable[[int, int], Any] = lambda rows, length: None
    """The batch, of so many rows of a length: on a CPU, with values that a model accepts."""
    note: str = ""
    whole: int = 0
    """Rows of the micro-batch, of which `rows` are in memory at a time; 0: all of them."""

    def over(self, module: nn.Module) -> Any:
        """The forward pass over the whole of it."""
        assert self.run is not None
        return self.run(module, self.batch(self.rows, self.length))

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
        return Workload(rows, 1, "image", _denoised, lambda rows, _: _noisy(offers, rows))
    words = recipe.model.embedding_rows(module) or 1
    if "tokens" in model.needs and hasattr(offers, "embed"):
        texts = _texts_at_once(recipe)
        note = f"every text has {length:,} tokens, the most that data.sequence_length allows"
        return Workload(texts, length, "token", _embedded, lambda n, wide: _texts(n, wide, words), note, whole=2 * rows)
    if {"input_ids", "labels"} <= set(model.needs):
        note = "" if recipe.data.pack else f"every row has {length:,} tokens, the most that data.sequence_length allows"
        return Workload(
            rows,
            length,
            "token",
            lambda m, batch: model.loss(m, batch, {}).loss_sum,
            lambda n, wide: _tokens(n, wide, words),
            note,
        )
    note = f"objective.kind = {model.kind()}: activations cannot be predicted without data, and are left out"
    return Workload(rows, length, "sample", None, note=note)


def _texts_at_once(recipe: Recipe) -> int:
    """Texts whose activations exist together: a chunk of the cache, or a query and a positive for every row."""
    cache = plain(recipe.objective).get("cache")
    both = 2 * usual(recipe.batch.per_device)
    if cache is None:
        return both
    most = cache.get("chunk") or max((cache.get("tokens") or 0) // recipe.data.sequence_length, 1)
    return min(both, int(most))


def _tokens(rows: int, length: int, words: int) -> dict[str, Any]:
    """Each row is one document."""
    ids = _ids(rows, length, words)
    bounds = _bounds(rows, length, max(rows, DOCUMENTS))
    return {"input_ids": ids, "position_ids": _positions(rows, length), "labels": ids.clone(), "bounds": bounds}


def _texts(texts: int, length: int, words: int) -> dict[str, Any]:
    return {
        "input_ids": _ids(texts, length, words),
        "positions": _positions(texts, length),
        "real": torch.ones(texts, length, dtype=torch.bool),
        "places": torch.arange(texts * length),
        "lengths": torch.full((texts,), length, dtype=torch.int64),
        "bounds": _bounds(texts, length, texts),
    }


def _ids(rows: int, length: int, words: int) -> torch.Tensor:
    # Different ones: the gradient of an embedding is slow where all tokens are the same.
    return (torch.arange(rows * length) % words).reshape(rows, length)


def _positions(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).repeat(rows, 1)


def _bounds(rows: int, length: int, entries: int) -> torch.Tensor:
    """Where documents begin and end, padded with the total."""
    return (torch.arange(entries + 1).clamp(max=rows) * length).to(torch.int32)


def _embedded(module: Any, batch: Any) -> torch.Tensor:
    vectors, _ = module.embed(**batch, packed=False)
    found: torch.Tensor = vectors @ vectors.T
    return found


def _noisy(module: Any, rows: int) -> dict[str, Any]:
    size = getattr(module.config, "sample_size", None) or 32
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return {"images": torch.rand(rows, module.image_channels, *sides), "times": torch.zeros(rows)}


def _denoised(module: Any, batch: Any) -> torch.Tensor:
    images: torch.Tensor = batch["images"]
    found: torch.Tensor = module.denoise(images, batch["times"])
    return (found.float() - images).square().mean()
