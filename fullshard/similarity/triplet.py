"""Triplet loss: each positive is closer to its query than its hard negatives, by a margin.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch


class Triplet(SimilarityLoss):
    """How much the margin is violated, averaged over the sample's own hard negatives."""

    margin: float = Field(0.2, gt=0)
    """How much farther than the positive a negative must be."""
    distance: Literal["cosine", "euclidean"] = "cosine"
    """cosine: one minus the cosine, from 0 to 2; euclidean: of the embeddings without normalisation."""

    def requires_negatives(self) -> bool:
        return True

    @property
    def in_batch(self) -> bool:
        return False

    def loss(self, embedded: Embedded) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        from fullshard.similarity.candidates import present

        step = present(embedded)
        queries, positives = step.queries[step.own], step.positives[step.own]
        negatives, there = step.negatives[step.own], step.has_negative[step.own]
        near = self._apart(queries, positives)[:, None]
        missed = F.relu(near - self._apart(queries[:, None], negatives) + self.margin)
        return (torch.where(there, missed, 0.0).sum(1) / there.sum(1).clamp(min=1)).sum()

    def _apart(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        import torch.nn.functional as F

        from fullshard.similarity.candidates import unit

        if self.distance == "euclidean":
            return F.pairwise_distance(left.float(), right.float())
        return 1 - (unit(left) * unit(right)).sum(-1)


__all__ = ["Triplet"]
