"""CoSENT: cosines of pairs are trained to rank as their labels do, independent of the labels' scale.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch


class CoSENT(SimilarityLoss):
    """log(1 + the sum, over every two samples of the step with different labels, of exp(scale * (the cosine of the
    lower one - the cosine of the higher one))). One number for the whole step."""

    scale: float = Field(20.0, gt=0)
    """Cosines are multiplied by it."""

    @property
    def needs_labels(self) -> bool:
        return True

    def loss(self, embedded: Embedded) -> torch.Tensor:
        import torch

        from fullshard.similarity.candidates import LOWEST, present, unit

        step = present(embedded)
        cosines = (unit(step.queries) * unit(step.positives)).sum(-1)
        labels, order = step.labels.sort()
        scores = self.scale * cosines[order]
        # For each sample, over all with a higher label at once: they start where equal labels end. Sums run backwards
        # from the end, so no matrix of all pairs is needed.
        higher = torch.cat([(-scores.flip(0)).logcumsumexp(0).flip(0), scores.new_full((1,), LOWEST)])
        wrong = scores + higher[torch.searchsorted(labels, labels, right=True)]
        total = torch.cat([wrong.new_zeros(1), wrong]).logsumexp(0)
        # Every rank computes the whole loss, and counts it once per own sample.
        return len(step.queries[step.own]) * total


__all__ = ["CoSENT"]
