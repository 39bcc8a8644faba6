"""How many answers a model gets right, token for token, as greedy decoding would give them.

Greedy decoding gives the expected answer if and only if every one of its tokens is the most likely one after those
before it, so one forward pass is enough. All ranks run it together. Must not know media, FSDP or how the model was
trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fullshard.contracts.data import IGNORE
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import nn


class RightAnswers(Evaluation):
    """`answers`: the share of answers of the validation data that are right from the first to the last token."""

    numbers: ClassVar[Numbers | None] = {"answers": "max"}
    needs_held_out: ClassVar[bool] = True
    usual_objective: ClassVar[str] = ""
    """For the message about one that predicts no tokens."""

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        if not hasattr(objective, "likeliest"):
            raise RecipeError(
                f"evaluate.parts: {self.kind()} needs an objective that predicts tokens, found objective.kind = "
                f"{objective.kind()}. Use objective: {self.usual_objective}, or leave {self.kind()} out."
            )
        return self.numbers

    @no_grad
    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        from fullshard.dist.upload import to_device

        found = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        with inputs.bar(inputs.num_batches) as bar:
            for batch in inputs.batches():
                there = to_device(batch, inputs.device)
                predicted = inputs.objective.likeliest(inputs.model, there)  # type: ignore[attr-defined]
                found += right_answers(predicted, there["labels"])
                bar.advance()
        right, total = inputs.sum_over_ranks(found).tolist()
        return Findings({"answers": right / max(total, 1.0)})


def right_answers(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(answers that are right, answers): an answer is a run of positions that are learned."""
    import torch

    learned = labels != IGNORE
    begins = learned & ~torch.nn.functional.pad(learned, (1, 0))[:, :-1]
    # Answers are numbered over all rows; number 0 collects what is not learned.
    number = torch.where(learned, begins.reshape(-1).cumsum(0).reshape(labels.shape), 0)
    wrong = number[learned & (predicted != labels)].unique().numel()
    total = int(begins.sum())
    return torch.tensor([total - wrong, total], dtype=torch.float64, device=labels.device)


__all__ = ["RightAnswers", "right_answers"]
