"""InfoNCE over only the hardest negatives of the step: easy ones teach little and hide the others.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch


class InBatchHard(SimilarityLoss):
    """Cross-entropy of the query's own positive among itself and the `top_k` nearest other texts of the step."""

    temperature: float = Field(0.05, gt=0)
    """Cosines are divided by it."""
    top_k: int = Field(16, ge=1)
    """How many of the other positives and hard negatives of the step a query is compared with."""
    mask_labels: bool = True
    """Another sample's positive is not a negative if both samples have the same label."""
    mask_equal: bool = True
    """A text equal to the query's own positive is not a negative."""

    def loss(self, embedded: Embedded) -> torch.Tensor:
        import torch

        from fullshard.similarity.candidates import LOWEST, Candidates, cross_entropy, present
        from fullshard.similarity.row_blocks import rows_of, sum_over_rows

        step = present(embedded)
        candidates = Candidates(step, mask_labels=self.mask_labels, mask_equal=self.mask_equal)

        def term(rows: slice, *embeddings: torch.Tensor) -> torch.Tensor:
            scores = candidates.cosines(rows, *embeddings) / self.temperature
            own, left_out = candidates.targets(rows)[:, None], candidates.left_out(rows)
            others = scores.masked_fill(left_out.scatter(1, own, True), LOWEST)
            hardest = others.topk(min(self.top_k, others.shape[1]), sorted=False).values
            chosen = torch.cat([scores.gather(1, own), hardest], 1)
            # If fewer than `top_k` are left, the rest already has the lowest score.
            return cross_entropy(chosen, torch.zeros_like(own[:, 0]), torch.zeros_like(chosen, dtype=torch.bool))

        return sum_over_rows(term, step.own, candidates.embeddings(), block=rows_of(candidates.columns))


__all__ = ["InBatchHard"]
