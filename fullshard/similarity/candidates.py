"""Which texts of a step each query is compared with, and their scores.

Filler samples and missing negatives are removed before anything is computed, so their embeddings reach neither a loss
nor a gradient. Must not know losses, models or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from fullshard.similarity.base import Embedded, NegativeScope

LOWEST = torch.finfo(torch.float32).min
"""The score of excluded texts; finite, because a row of infinities would give NaN gradients."""


def present(embedded: Embedded) -> Embedded:
    """The step without filler samples, and with zeros for missing negatives."""
    real = embedded.real.cpu()
    start, stop, _ = embedded.own.indices(len(real))
    first, number = int(real[:start].sum()), int(real[start:stop].sum())
    if not real.all():
        keep = real.nonzero()[:, 0].to(embedded.real.device)
        values = {field.name: getattr(embedded, field.name) for field in fields(embedded)}
        kept: dict[str, Any] = {name: value[keep] for name, value in values.items() if isinstance(value, torch.Tensor)}
        embedded = replace(embedded, **kept)
    there = embedded.has_negative
    negatives = torch.where(_widened(there, embedded.negatives), embedded.negatives, 0.0)
    return replace(embedded, negatives=negatives, own=slice(first, first + number))


def _widened(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(mask.shape + (1,) * (like.dim() - mask.dim()))


@dataclass(frozen=True)
class Candidates:
    """The columns of a score matrix with one row per query: positives first, so that a query's own is easy to find,
    then hard negatives."""

    step: Embedded
    """The result of `present`."""
    scope: NegativeScope = "shared"
    mask_labels: bool = False
    """Whether the positive of another sample with the same label is left out."""
    mask_equal: bool = False
    """Whether a text equal to the query's own positive, or the positive of an equal query, is left out."""

    @property
    def columns(self) -> int:
        """How many candidates a query has."""
        own = self.step.has_negative.shape[1]
        if self.scope == "own":
            return 1 + own
        return len(self.step.real) + (own if self.scope == "in_batch" else int(self.step.has_negative.sum()))

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, positives and hard negatives, normalised; hard negatives are flattened if all queries share them."""
        negatives = self.step.negatives
        if self.scope == "shared":
            negatives = negatives[self.step.has_negative]
        return unit(self.step.queries), unit(self.step.positives), unit(negatives)

    def cosines(
        self, rows: slice, queries: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor
    ) -> torch.Tensor:
        """(rows, columns), from the result of `embeddings`."""
        queries = queries[rows]
        own_only = self.scope == "own"
        near = (queries * positives[rows]).sum(-1, keepdim=True) if own_only else queries @ positives.T
        if self.scope == "shared":
            return torch.cat([near, queries @ negatives.T], 1)
        return torch.cat([near, torch.einsum("qw,qnw->qn", queries, negatives[rows])], 1)

    def targets(self, rows: slice) -> torch.Tensor:
        """The column of each query's own positive."""
        numbers = torch.arange(rows.start, rows.stop, device=self.step.real.device)
        return torch.zeros_like(numbers) if self.scope == "own" else numbers

    def left_out(self, rows: slice) -> torch.Tensor:
        """(rows, columns): candidates that are not negatives of the query; never its own positive."""
        if self.scope == "own":
            positives = torch.zeros(rows.stop - rows.start, 1, dtype=torch.bool, device=self.step.real.device)
        else:
            positives = self.same(rows)
        return torch.cat([positives, self._equal_negatives(rows)], 1)

    def same(self, rows: slice) -> torch.Tensor:
        """(rows, samples): other samples that match these by label, an equal positive or an equal query."""
        keys, labels = self.step.positive_keys, self.step.labels
        same = torch.zeros(rows.stop - rows.start, len(keys), dtype=torch.bool, device=keys.device)
        if self.mask_equal:
            same |= keys[rows, None] == keys[None]
            if (asked := self.step.query_keys) is not None:
                same |= asked[rows, None] == asked[None]
        if self.mask_labels:
            same |= labels[rows, None] == labels[None]  # a missing label is NaN, which equals nothing
        same.diagonal(rows.start).fill_(False)
        return same

    def _equal_negatives(self, rows: slice) -> torch.Tensor:
        """Hard negatives have no label: those of a sample with the query's label stay negatives."""
        there, keys, wanted = self.step.has_negative, self.step.negative_keys, self.step.positive_keys[rows, None]
        if self.scope == "shared":
            return (keys[there][None] == wanted) & self.mask_equal
        return ~there[rows] | ((keys[rows] == wanted) & self.mask_equal)


def unit(embeddings: torch.Tensor) -> torch.Tensor:
    """Unit vectors in fp32."""
    return F.normalize(embeddings.float(), dim=-1)


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """The sum over rows of the cross-entropy of the target among what is not excluded."""
    return F.cross_entropy(scores.masked_fill(left_out, LOWEST), targets, reduction="sum")


__all__ = ["LOWEST", "Candidates", "cross_entropy", "present", "unit"]
