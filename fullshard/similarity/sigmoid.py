"""Sigmoid loss, as in SigLIP: a binary classification of each pair of query and text.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch


class Sigmoid(SimilarityLoss):
    """The binary cross-entropy of sigmoid(scale * cosine + bias), summed over a query's own positive, the positives of
    all other samples and its own hard negatives."""

    log_scale: float = Field(2.6592, le=math.log(100))
    """The logarithm of the scale; 2.6592 is a scale of 14.3. The initial value, if learned."""
    bias: float = -10.0
    """Offsets that negatives far outnumber positives. The initial value, if learned."""
    learn: bool = True
    """Train scale and bias with the model."""
    mask_labels: bool = True
    """Another sample's positive is not a negative if both samples have the same label."""
    mask_equal: bool = True
    """A text equal to the query's own positive is not a negative."""

    def learned(self) -> dict[str, float]:
        return {"log_scale": self.log_scale, "bias": self.bias} if self.learn else {}

    def loss(self, embedded: Embedded) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        from fullshard.similarity.candidates import Candidates, present
        from fullshard.similarity.row_blocks import rows_of, sum_over_rows

        step = present(embedded)
        candidates = Candidates(step, "in_batch", mask_labels=self.mask_labels, mask_equal=self.mask_equal)

        def term(rows: slice, *inputs: torch.Tensor) -> torch.Tensor:
            *embeddings, log_scale, bias = inputs
            logits = log_scale.exp() * candidates.cosines(rows, *embeddings) + bias
            right = F.one_hot(candidates.targets(rows), candidates.columns).bool()
            terms = F.softplus(torch.where(right, -logits, logits))
            return terms.masked_fill(candidates.left_out(rows), 0.0).sum()

        inputs = [*candidates.embeddings(), *self._scalars(embedded)]
        return sum_over_rows(term, step.own, inputs, block=rows_of(candidates.columns))

    def _scalars(self, embedded: Embedded) -> list[torch.Tensor]:
        import torch

        if self.learn:
            return [embedded.scalars[name].float() for name in ("log_scale", "bias")]
        return [torch.full((), value, device=embedded.queries.device) for value in (self.log_scale, self.bias)]


__all__ = ["Sigmoid"]
