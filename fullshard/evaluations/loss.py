"""The objective's own loss and metrics on the validation data: exact sum over exact count, every sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective

if TYPE_CHECKING:
    import torch
    from torch import nn


class Loss(Evaluation):
    """Validation loss, and what the objective measures beside it."""

    needs_held_out: ClassVar[bool] = True

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        return objective.gives()

    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        from fullshard.dist.upload import to_device
        from fullshard.step import count_terms, sum_terms

        if inputs.num_batches == 0:
            return Findings()
        sums: dict[str, torch.Tensor] = {}
        weights: dict[str, float] = {}
        with torch.no_grad(), inputs.bar(inputs.num_batches) as bar:
            for done, batch in enumerate(inputs.batches(), start=1):
                counts = count_terms(inputs.objective, [batch])
                terms = inputs.objective.loss(inputs.model, to_device(batch, inputs.device), inputs.aux)
                for name, pair in sum_terms([terms], counts, inputs.device).items():
                    sums[name] = sums[name] + pair if name in sums else pair
                weights = {name: term.weight for name, term in terms.named.items()}
                if done < inputs.num_batches:
                    bar.advance(_loss(_averages(sums), weights))
            numbers = _averages({name: inputs.sum_over_ranks(sums[name]) for name in sorted(sums)})
            numbers["loss"] = _loss(numbers, weights)
            # Meanwhile the bar shows the average of this rank; it ends with that of all ranks.
            bar.advance(numbers["loss"])
        return Findings(numbers | inputs.objective.derived(numbers))


def _averages(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of (sum, count) pairs."""
    return {name: total / max(count, 1) for name, (total, count) in ((n, pair.tolist()) for n, pair in sums.items())}


def _loss(averages: dict[str, float], weights: dict[str, float]) -> float:
    """Of one term its average; of several the weighted sum of theirs."""
    return sum(weight * averages[name] for name, weight in weights.items()) if weights else averages["loss"]


__all__ = ["Loss"]
