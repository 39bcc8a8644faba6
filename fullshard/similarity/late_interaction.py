"""Late interaction, as in ColBERT: queries and documents are compared token by token, then as in InfoNCE.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch


class LateInteraction(SimilarityLoss):
    """Cross-entropy of the query's own positive among all positives and hard negatives of the step. The score of a
    document is the sum, over the query's tokens, of the cosine of the document's nearest token."""

    tokens: ClassVar[bool] = True

    temperature: float = Field(0.05, gt=0)
    """Scores are divided by it; without `normalise_by_length` about 1 is usual."""
    normalise_by_length: bool = True
    """Divide a score by the number of the query's tokens, so that long queries do not count more."""
    block: int = Field(64, ge=1)
    """Queries and documents compared at a time: memory grows with its square, time hardly changes."""
    mask_labels: bool = True
    """Another sample's positive is not a negative if both samples have the same label."""
    mask_equal: bool = True
    """A text equal to the query's own positive is not a negative."""

    def loss(self, embedded: Embedded) -> torch.Tensor:
        import torch

        from fullshard.similarity.candidates import Candidates, cross_entropy, present
        from fullshard.similarity.row_blocks import sum_over_rows

        step = present(embedded)
        candidates = Candidates(step, mask_labels=self.mask_labels, mask_equal=self.mask_equal)
        queries, query_tokens = _real(step.queries, step.query_tokens)
        documents, document_tokens = _documents(step)

        def term(rows: slice, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            blocks = zip(documents.split(self.block), document_tokens.split(self.block), strict=True)
            scores = [_score(queries[rows], query_tokens[rows], some, tokens) for some, tokens in blocks]
            scaled = torch.cat(scores, 1) / self.temperature
            if self.normalise_by_length:
                scaled = scaled / query_tokens[rows].sum(1, keepdim=True).clamp(min=1)
            return cross_entropy(scaled, candidates.targets(rows), candidates.left_out(rows))

        return sum_over_rows(term, step.own, [queries, documents], block=self.block)


def _real(embeddings: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised tokens, zeros for padding; and the mask."""
    import torch

    from fullshard.similarity.candidates import unit

    assert tokens is not None, "embeddings are token-level"
    return unit(torch.where(tokens[..., None], embeddings, 0.0)), tokens


def _documents(step: Embedded) -> tuple[torch.Tensor, torch.Tensor]:
    """All positives, then all hard negatives, padded to the longest."""
    import torch
    import torch.nn.functional as F

    assert step.negative_tokens is not None, "embeddings are token-level"
    negatives = _real(step.negatives[step.has_negative], step.negative_tokens[step.has_negative])
    both = [_real(step.positives, step.positive_tokens), negatives]
    most = max(tokens.shape[1] for _, tokens in both)
    embeddings = torch.cat([F.pad(e, (0, 0, 0, most - e.shape[1])) for e, _ in both])
    return embeddings, torch.cat([F.pad(tokens, (0, most - tokens.shape[1])) for _, tokens in both])


def _score(
    queries: torch.Tensor, query_tokens: torch.Tensor, documents: torch.Tensor, document_tokens: torch.Tensor
) -> torch.Tensor:
    """(queries, documents): the sum of the best cosines, not yet divided by the number of the query's tokens."""
    import torch

    cosines = torch.einsum("qtw,dsw->qdts", queries, documents)
    # The fill value is below any cosine. For the backward pass `max` keeps only indices; `amax` would keep all cosines.
    best = cosines.masked_fill(~document_tokens[None, :, None], -2.0).max(-1).values
    return torch.where(query_tokens[:, None], best, 0.0).sum(-1)


__all__ = ["LateInteraction"]
