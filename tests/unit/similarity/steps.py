"""Steps of embeddings for the tests of losses: uneven negatives, fillers, labels, keys, a teacher, token-level ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullshard.config.part import decode
from fullshard.similarity.base import Embedded, SimilarityLoss

WIDTH = 12
TEACHER_WIDTH = 7
TOKENS = {"query": 5, "positive": 6, "negative": 4}
EMBEDDINGS = ("queries", "positives", "negatives")
SETTINGS: dict[str, dict[str, Any]] = {"in_batch_hard": {"top_k": 3}, "late_interaction": {"block": 3}}
"""What a small step needs for a loss to do all it can."""


def part(kind: str, **settings: Any) -> SimilarityLoss:
    return decode(SimilarityLoss, {"kind": kind, **SETTINGS.get(kind, {}), **settings}, where="loss")


def step(
    loss: SimilarityLoss | None = None, *, negatives: Sequence[int] = (2,) * 8, fillers: int = 0, seed: int = 0
) -> Embedded:
    """One sample for each number of negatives, then fillers; NaN wherever there is nothing."""
    generator = torch.Generator().manual_seed(seed)
    samples, most = len(negatives) + fillers, max(negatives)
    tokens = loss is not None and loss.tokens

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def embedding(side: str, *shape: int) -> torch.Tensor:
        return normal(*shape, *((TOKENS[side],) if tokens else ()), WIDTH)

    def real_tokens(side: str, *shape: int) -> torch.Tensor | None:
        lengths = torch.randint(1, TOKENS[side] + 1, shape, generator=generator)
        return torch.arange(TOKENS[side]) < lengths[..., None] if tokens else None

    counts = torch.tensor([*negatives, *[0] * fillers])
    has_negative = torch.arange(most) < counts[:, None]
    real = torch.arange(samples) < len(negatives)
    made = Embedded(
        queries=embedding("query", samples),
        positives=embedding("positive", samples),
        negatives=embedding("negative", samples, most),
        has_negative=has_negative,
        real=real,
        own=slice(0, samples),
        labels=torch.arange(samples, dtype=torch.float64),
        positive_keys=torch.arange(samples),
        negative_keys=torch.arange(1000, 1000 + samples * most).reshape(samples, most),
        scalars={name: torch.tensor(value) for name, value in loss.learned().items()} if loss else {},
        query_tokens=real_tokens("query", samples),
        positive_tokens=real_tokens("positive", samples),
        negative_tokens=real_tokens("negative", samples, most),
        teacher_queries=normal(samples, TEACHER_WIDTH),
        teacher_positives=normal(samples, TEACHER_WIDTH),
        teacher_negatives=normal(samples, most, TEACHER_WIDTH),
    )
    return leaves(_without_sense(made))


def _without_sense(made: Embedded) -> Embedded:
    """NaN for fillers, absent negatives and absent tokens."""
    there = made.has_negative & made.real[:, None]

    def only(value: torch.Tensor | None, mask: torch.Tensor, tokens: torch.Tensor | None = None) -> Any:
        if value is None:
            return None
        mask = mask if tokens is None else mask[..., None] & tokens
        return torch.where(mask[..., None], value, math.nan)

    return replace(
        made,
        queries=only(made.queries, made.real, made.query_tokens),
        positives=only(made.positives, made.real, made.positive_tokens),
        negatives=only(made.negatives, there, made.negative_tokens),
        teacher_queries=only(made.teacher_queries, made.real),
        teacher_positives=only(made.teacher_positives, made.real),
        teacher_negatives=only(made.teacher_negatives, there),
    )


def confusable(embedded: Embedded) -> Embedded:
    """Some samples with equal labels or none, equal positives, and hard negatives equal to positives."""
    labels, positives, negatives = (
        each.clone() for each in (embedded.labels, embedded.positive_keys, embedded.negative_keys)
    )
    labels[1], labels[4], labels[5] = 0, math.nan, math.nan
    positives[5] = positives[2]
    negatives[0, 0], negatives[3, 1] = positives[2], positives[3]
    return replace(embedded, labels=labels, positive_keys=positives, negative_keys=negatives)


def leaves(embedded: Embedded, dtype: torch.dtype = torch.float32) -> Embedded:
    """Its own copy of everything that is trained."""
    parts: dict[str, Any] = {
        name: getattr(embedded, name).detach().to(dtype).requires_grad_(True) for name in EMBEDDINGS
    }
    scalars = {name: value.detach().to(dtype).requires_grad_(True) for name, value in embedded.scalars.items()}
    return replace(embedded, **parts, scalars=scalars)


def with_gradients(
    loss: Callable[[Embedded], torch.Tensor], embedded: Embedded, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The loss, and its gradient for everything that is trained, by name."""
    fresh = leaves(embedded, dtype)
    value = loss(fresh)
    value.backward()
    trained = {name: getattr(fresh, name) for name in EMBEDDINGS} | dict(fresh.scalars)
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in trained.items()}
    return {"loss": value.detach(), **found}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Every number within 1e-6 of the largest of its kind: all gradients of embeddings are of one kind."""
    assert found.keys() == wanted.keys()
    largest = max(float(wanted[name].abs().max()) for name in EMBEDDINGS if wanted[name].numel())
    for name, value in wanted.items():
        if value.numel():
            apart = float((found[name].double() - value.double()).abs().max())
            at_most = largest if name in EMBEDDINGS else float(value.abs())
            assert apart <= 1e-6 * at_most, f"{name}: {apart:.2e} apart, {at_most:.2e} at most"
