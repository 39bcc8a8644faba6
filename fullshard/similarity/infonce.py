"""InfoNCE, also known as multiple negatives ranking: each query finds its positive among the texts of the step.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from fullshard.similarity.base import Embedded, NegativeScope, SimilarityLoss

if TYPE_CHECKING:
    import torch


LARGEST_SCALE = 100.0
"""The limit of a learned scale; beyond it, a few hard samples dominate the gradient."""


class InfoNCE(SimilarityLoss):
    """Cross-entropy of the query's own positive among all its candidates, by cosine over temperature."""

    temperature: float = Field(0.05, gt=0)
    """Cosines are divided by it; the lower, the more the hardest negatives count. The initial value, if learned."""
    learn_temperature: bool = False
    """Train the temperature with the model; it stays at or above 0.01."""
    negatives: NegativeScope = "shared"
    """What a query is compared with besides its own positive. shared: the positives and hard negatives of all samples
    of the step; in_batch: the positives of all samples and its own hard negatives; own: its own hard negatives only,
    which every record must then have."""
    bidirectional: bool = False
    """Each positive also searches for its query among all queries; the loss is the mean of both directions."""
    mask_labels: bool = True
    """Another sample's positive is not a negative if both samples have the same label."""
    mask_equal: bool = True
    """A text equal to the query's own positive is not a negative."""

    @model_validator(mode="after")
    def _directions(self) -> InfoNCE:
        if self.bidirectional and self.negatives == "own":
            raise ValueError(
                "bidirectional compares a positive with the queries of other samples, and negatives: own compares no "
                "samples with each other. Use negatives: in_batch, or bidirectional: false"
            )
        return self

    def requires_negatives(self) -> bool:
        return self.negatives == "own"

    @property
    def in_batch(self) -> bool:
        return self.negatives != "own"

    def learned(self) -> dict[str, float]:
        return {"log_scale": math.log(1 / self.temperature)} if self.learn_temperature else {}

    def loss(self, embedded: Embedded) -> torch.Tensor:
        from fullshard.similarity.candidates import Candidates, cross_entropy, present
        from fullshard.similarity.row_blocks import rows_of, sum_over_rows

        step = present(embedded)
        candidates = Candidates(step, self.negatives, mask_labels=self.mask_labels, mask_equal=self.mask_equal)

        def term(
            rows: slice, queries: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor, scale: torch.Tensor
        ) -> torch.Tensor:
            scores = scale * candidates.cosines(rows, queries, positives, negatives)
            found = cross_entropy(scores, candidates.targets(rows), candidates.left_out(rows))
            if not self.bidirectional:
                return found
            back = scale * (positives[rows] @ queries.T)
            return (found + cross_entropy(back, candidates.targets(rows), candidates.same(rows))) / 2

        inputs = [*candidates.embeddings(), self._scale(embedded)]
        return sum_over_rows(term, step.own, inputs, block=rows_of(candidates.columns))

    def _scale(self, embedded: Embedded) -> torch.Tensor:
        import torch

        if not self.learn_temperature:
            return torch.full((), 1 / self.temperature, device=embedded.queries.device)
        scale = embedded.scalars["log_scale"].float().exp()
        # The gradient passes through the limit; otherwise a scale beyond it could never return.
        return scale + (scale.clamp(max=LARGEST_SCALE) - scale).detach()


__all__ = ["InfoNCE"]
