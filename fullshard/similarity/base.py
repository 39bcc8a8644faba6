"""The contract of a loss over embeddings: which of them should be close, and by how much.

A loss sees the embeddings of the whole step, over all ranks, and sums over this rank's own samples; the caller divides
by the number of samples over all ranks. Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fullshard.config.part import Part

if TYPE_CHECKING:
    import torch

NegativeScope = Literal["shared", "in_batch", "own"]
"""What a query is compared with, besides its own positive: all positives and all hard negatives of the step; all
positives and its own hard negatives; its own hard negatives."""


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
    """(samples, max negatives, width); the middle axis may be 0."""
    has_negative: torch.Tensor
    """(samples, max negatives): which of them exist."""
    real: torch.Tensor
    """(samples): false for a filler sample, which is neither a query nor a candidate."""
    own: slice
    """This rank's samples."""
    labels: torch.Tensor
    """(samples), fp64: a class, or a similarity; NaN without a label."""
    positive_keys: torch.Tensor
    """(samples): equal for equal texts, so that a query's own positive elsewhere in the batch is not a negative."""
    negative_keys: torch.Tensor
    """(samples, max negatives)"""
    query_keys: torch.Tensor | None = None
    """(samples): equal for equal queries, whose positives are not negatives of each other."""
    scalars: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of `SimilarityLoss.learned`, each a 0-d tensor."""
    query_tokens: torch.Tensor | None = None
    positive_tokens: torch.Tensor | None = None
    negative_tokens: torch.Tensor | None = None
    """Which tokens are real, if embeddings are token-level."""
    teacher_queries: torch.Tensor | None = None
    teacher_positives: torch.Tensor | None = None
    teacher_negatives: torch.Tensor | None = None
    """The teacher's embeddings of the same texts, in its own width; never narrowed."""

    def narrowed(self, width: int) -> Embedded:
        """The first `width` dimensions of each embedding."""
        parts = {name: getattr(self, name)[..., :width] for name in ("queries", "positives", "negatives")}
        return replace(self, **parts)


class SimilarityLoss(Part):
    """How embeddings are compared and trained."""

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
        """Whether samples of a step are compared with each other, so that a step of one sample trains nothing."""
        return True

    def learned(self) -> dict[str, float]:
        """Scalars that are trained with the model, and their initial values."""
        return {}

    def loss(self, embedded: Embedded) -> torch.Tensor:
        """The sum of the loss over this rank's own real samples. The sum over ranks, divided by the number of samples,
        is the same for any number of ranks."""
        raise NotImplementedError
