"""The contract of a loss over embeddings: which of them should lie near each other, and by how much.

A loss sees the embeddings of the whole step, over all ranks, and answers for this rank's own samples; whoever calls it
divides by the number of samples over all ranks. Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from fullshard.config.part import Part

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Embedded:
    """The embeddings of one step, over all ranks, in the same order on each; fp32.

    With token-level embeddings (`SimilarityLoss.tokens`) every embedding has one more axis, tokens, before the last,
    and the masks say which tokens are real.
    """

    queries: torch.Tensor
    """(samples, width)"""
    positives: torch.Tensor
    """(samples, width)"""
    negatives: torch.Tensor
    """(samples, most negatives of a sample, width); the middle axis may be 0."""
    has_negative: torch.Tensor
    """(samples, most negatives of a sample): which of them are there."""
    real: torch.Tensor
    """(samples): false for a sample that only fills the batch; it is no query and nobody's candidate."""
    own: slice
    """This rank's samples."""
    labels: torch.Tensor
    """(samples), fp64: a class, or a similarity; NaN where a record has none."""
    positive_keys: torch.Tensor
    """(samples): equal for equal texts, so that a query's own positive elsewhere in the batch is no negative."""
    negative_keys: torch.Tensor
    """(samples, most negatives of a sample)"""
    query_keys: torch.Tensor | None = None
    """(samples): equal for equal queries, whose positives are no negatives of each other."""
    scalars: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of `SimilarityLoss.learned`, each of no dimension."""
    query_tokens: torch.Tensor | None = None
    positive_tokens: torch.Tensor | None = None
    negative_tokens: torch.Tensor | None = None
    """Which tokens are real, where embeddings are token-level."""
    teacher_queries: torch.Tensor | None = None
    teacher_positives: torch.Tensor | None = None
    teacher_negatives: torch.Tensor | None = None
    """The same texts by the teacher of `SimilarityLoss.needs_teacher`, in its own width; never narrowed."""

    def narrowed(self, width: int) -> Embedded:
        """The first `width` numbers of each embedding."""
        parts = {name: getattr(self, name)[..., :width] for name in ("queries", "positives", "negatives")}
        return replace(self, **parts)


class SimilarityLoss(Part):
    """What embeddings are trained for."""

    folder: ClassVar[str] = "fullshard.similarity"
    default_kind: ClassVar[str | None] = "infonce"
    required: ClassVar[tuple[str, ...]] = ("loss",)
    tokens: ClassVar[bool] = False
    """Whether it compares tokens, not pooled embeddings."""
    needs_teacher: ClassVar[bool] = False
    """Whether it compares with the embeddings of a frozen teacher."""

    def requires_negatives(self) -> bool:
        """Whether every record must have at least one negative."""
        return False

    @property
    def needs_labels(self) -> bool:
        """Whether every record must have a label."""
        return False

    @property
    def in_batch(self) -> bool:
        """Whether the samples of a step are compared with each other, so that a step of one sample teaches nothing."""
        return True

    def learned(self) -> dict[str, float]:
        """Numbers that are trained with the model, and their first values."""
        return {}

    def loss(self, embedded: Embedded) -> torch.Tensor:
        """The sum of the loss over this rank's own real samples; over all ranks and divided by their number, the loss
        is the same for any number of ranks."""
        raise NotImplementedError
