"""Losses and gradients against those of sentence-transformers, on the same embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
from sentence_transformers.multi_vector_encoder.scoring.colbert import colbert_scores, mean_colbert_scores
from sentence_transformers.sentence_transformer import losses
from torch import nn

from fullshard.similarity.base import Embedded
from tests.unit.similarity.steps import WIDTH, assert_close, leaves, part, step, with_gradients

LABELS = torch.tensor([0.0, 0.5, 1.0, 0.5, 0.2, 1.0, 0.7, 0.1])


class Given(nn.Module):
    """Stands for a model whose embeddings are known."""

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        if task is None:
            return {"sentence_embedding": features["given"]}
        return {"token_embeddings": F.normalize(features["given"], dim=-1), "attention_mask": features["tokens"]}

    def get_embedding_dimension(self) -> int:
        return WIDTH


def reference(
    make: Callable[[Any], nn.Module], labels: torch.Tensor | None = None
) -> Callable[[Embedded], torch.Tensor]:
    """Their loss of our step; a mean over samples there, a sum here."""

    def loss(embedded: Embedded) -> torch.Tensor:
        columns = [embedded.queries, embedded.positives, *embedded.negatives.unbind(1)]
        found: torch.Tensor = make(Given())([{"given": column} for column in columns], labels)
        return found * len(embedded.queries)

    return loss


def pairs_only(embedded: Embedded) -> Embedded:
    return leaves(
        replace(
            embedded,
            negatives=embedded.negatives[:, :0],
            has_negative=embedded.has_negative[:, :0],
            negative_keys=embedded.negative_keys[:, :0],
        )
    )


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.05, 0.02, 1.0])
def test_infonce_is_multiple_negatives_ranking(negatives: int, temperature: float) -> None:
    embedded = step(negatives=(max(negatives, 1),) * 8)
    embedded = embedded if negatives else pairs_only(embedded)
    theirs = reference(lambda model: losses.MultipleNegativesRankingLoss(model, scale=1 / temperature))
    ours = with_gradients(part("infonce", temperature=temperature).loss, embedded)
    assert_close(ours, with_gradients(theirs, embedded))


@pytest.mark.parametrize("negatives", [0, 2])
def test_bidirectional_infonce_is_symmetric_ranking(negatives: int) -> None:
    embedded = step() if negatives else pairs_only(step())
    both: Any = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = reference(lambda model: losses.MultipleNegativesRankingLoss(model, scale=20.0, **both))
    assert_close(with_gradients(part("infonce", bidirectional=True).loss, embedded), with_gradients(theirs, embedded))


@pytest.mark.parametrize("scale", [20.0, 5.0])
def test_cosent_equals_sentence_transformers(scale: float) -> None:
    embedded = replace(pairs_only(step()), labels=LABELS.double())
    theirs = reference(lambda model: losses.CoSENTLoss(model, scale=scale), LABELS)
    assert_close(with_gradients(part("cosent", scale=scale).loss, embedded), with_gradients(theirs, embedded))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_triplet_equals_theirs_and_with_more_negatives_their_mean(distance: str) -> None:
    metric = getattr(losses.triplet.TripletDistanceMetric, distance.upper())
    embedded, margin = step(negatives=(3,) * 8), {"cosine": 0.2, "euclidean": 1.5}[distance]

    def theirs(embedded: Embedded) -> torch.Tensor:
        one = reference(lambda model: losses.TripletLoss(model, distance_metric=metric, triplet_margin=margin))
        each = [one(replace(embedded, negatives=embedded.negatives[:, n : n + 1])) for n in range(3)]
        return torch.stack(each).mean()

    loss = part("triplet", distance=distance, margin=margin)
    assert_close(with_gradients(loss.loss, embedded), with_gradients(theirs, embedded))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("infonce", lambda model: losses.MultipleNegativesRankingLoss(model, scale=20.0)),
        ("cosent", lambda model: losses.CoSENTLoss(model, scale=20.0)),
        (
            "triplet",
            lambda model: losses.TripletLoss(
                model, distance_metric=losses.triplet.TripletDistanceMetric.COSINE, triplet_margin=0.2
            ),
        ),
    ],
)
def test_narrowed_steps_are_matryoshka(kind: str, make: Callable[[Any], nn.Module]) -> None:
    embedded = step(negatives=(1,) * 8)
    if kind == "cosent":
        embedded = replace(pairs_only(embedded), labels=LABELS.double())
    dims, weights = [WIDTH, 6, 3], [1.0, 0.5, 2.0]
    theirs = reference(lambda model: losses.MatryoshkaLoss(model, make(model), dims, weights), LABELS)

    def ours(embedded: Embedded) -> torch.Tensor:
        each = zip(dims, weights, strict=True)
        return torch.stack([weight * part(kind).loss(embedded.narrowed(dim)) for dim, weight in each]).sum()

    assert_close(with_gradients(ours, embedded), with_gradients(theirs, embedded))


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("normalised", [True, False])
def test_late_interaction_is_their_multi_vector_ranking(normalised: bool, block: int) -> None:
    loss = part("late_interaction", normalise_by_length=normalised, block=block, temperature=0.5)
    embedded = step(loss)

    def theirs(embedded: Embedded) -> torch.Tensor:
        sides = [(embedded.queries, embedded.query_tokens), (embedded.positives, embedded.positive_tokens)]
        assert embedded.negative_tokens is not None
        sides += zip(embedded.negatives.unbind(1), embedded.negative_tokens.unbind(1), strict=True)
        features = [{"given": e.nan_to_num(), "tokens": tokens, "task": "any"} for e, tokens in sides]
        score = mean_colbert_scores if normalised else colbert_scores
        found: torch.Tensor = MultiVectorMultipleNegativesRankingLoss(Given(), scale=2.0, similarity_fct=score)(
            features
        )
        return found * len(embedded.queries)

    assert_close(with_gradients(loss.loss, embedded), with_gradients(theirs, embedded))


def test_distillation_of_one_query_is_their_divergence_without_the_square_of_the_temperature() -> None:
    embedded = step(negatives=(4,))
    assert embedded.teacher_queries is not None
    assert embedded.teacher_positives is not None
    assert embedded.teacher_negatives is not None
    texts = torch.cat([embedded.teacher_positives, embedded.teacher_negatives[0]])
    scores = F.cosine_similarity(embedded.teacher_queries, texts)[None]
    pairwise = F.cosine_similarity
    theirs = reference(lambda m: losses.DistillKLDivLoss(m, similarity_fct=pairwise, temperature=0.2), scores)
    ours = with_gradients(part("distillation", alpha=1, temperature=0.2).loss, embedded)
    assert_close(ours, with_gradients(lambda e: theirs(e) / 0.2**2, embedded))
