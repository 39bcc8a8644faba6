"""Distillation: the student's similarities follow those of a frozen teacher, plus a loss on the data itself.

Must not know models, texts, ranks, caches or Matryoshka dimensions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from fullshard.similarity.base import Embedded, SimilarityLoss
from fullshard.similarity.infonce import InfoNCE

if TYPE_CHECKING:
    import torch


class Distillation(SimilarityLoss):
    """alpha * (the distance of the student's similarities of a query to all texts of the step from the teacher's)
    + (1 - alpha) * `task`."""

    needs_teacher: ClassVar[bool] = True

    divergence: Literal["kl", "mse"] = "kl"
    """kl: between the probabilities that the similarities give the texts; mse: the mean square of the differences."""
    temperature: float = Field(0.05, gt=0)
    """Cosines of both are divided by it before they become probabilities (kl only). There is no factor of its square,
    so at equal temperatures `alpha` weighs gradients of equal size."""
    alpha: float = Field(0.5, gt=0, le=1)
    """The weight of the distillation; `task` has the rest."""
    task: SimilarityLoss = InfoNCE()
    """The loss on the data itself, by default infonce with its own temperature."""

    @field_validator("task")
    @classmethod
    def _plain(cls, task: SimilarityLoss) -> SimilarityLoss:
        if task.tokens or task.needs_teacher:
            raise ValueError(f"{task.kind()} cannot be combined with distillation; use a loss over pooled embeddings")
        return task

    def requires_negatives(self) -> bool:
        return self.alpha < 1 and self.task.requires_negatives()

    @property
    def needs_labels(self) -> bool:
        return self.alpha < 1 and self.task.needs_labels

    def learned(self) -> dict[str, float]:
        return self.task.learned() if self.alpha < 1 else {}

    def loss(self, embedded: Embedded) -> torch.Tensor:
        total = self.alpha * self._distilled(embedded)
        return total + (1 - self.alpha) * self.task.loss(embedded) if self.alpha < 1 else total

    def _distilled(self, embedded: Embedded) -> torch.Tensor:
        import torch.nn.functional as F

        from fullshard.similarity.candidates import Candidates, present
        from fullshard.similarity.row_blocks import rows_of, sum_over_rows

        step = present(embedded)
        candidates, teacher = Candidates(step), Candidates(_by_teacher(step))
        fixed = teacher.embeddings()

        def term(rows: slice, *embeddings: torch.Tensor) -> torch.Tensor:
            student, wanted = candidates.cosines(rows, *embeddings), teacher.cosines(rows, *fixed)
            if self.divergence == "mse":
                return (student - wanted).square().mean(1).sum()
            log_student, log_wanted = (F.log_softmax(c / self.temperature, 1) for c in (student, wanted))
            return F.kl_div(log_student, log_wanted, reduction="sum", log_target=True)

        return sum_over_rows(term, step.own, candidates.embeddings(), block=rows_of(candidates.columns))


def _by_teacher(step: Embedded) -> Embedded:
    queries, positives, negatives = step.teacher_queries, step.teacher_positives, step.teacher_negatives
    assert queries is not None, "there is a teacher"
    assert positives is not None, "there is a teacher"
    assert negatives is not None, "there is a teacher"
    return replace(step, queries=queries.detach(), positives=positives.detach(), negatives=negatives.detach())


__all__ = ["Distillation"]
