"""The objective's own loss and metrics on the validation data: exact sum over exact count, every sample once."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective


class Loss(Evaluation):
    """Validation loss, and what the objective measures beside it."""

    needs_held_out: ClassVar[bool] = True

    def gives(self, objective: Objective, model: nn.Module) -> Numbers | None:
        return objective.gives()

    def run(self, inputs: EvaluationInputs) -> Findings:
        from fullshard.step import sum_terms, to_device

        if inputs.num_batches == 0:
            return Findings()
        sums: dict[str, torch.Tensor] = {}
        with torch.no_grad(), inputs.bar(inputs.num_batches) as bar:
            for done, batch in enumerate(inputs.batches(), start=1):
                count = inputs.objective.count(batch)
                terms = inputs.objective.loss(inputs.model, to_device(batch, inputs.device), inputs.aux)
                for name, pair in sum_terms([terms], count, inputs.device).items():
                    sums[name] = sums[name] + pair if name in sums else pair
                if done < inputs.num_batches:
                    bar.advance(float(sums["loss"][0] / sums["loss"][1].clamp(min=1)))
            numbers = {}
            for name in sorted(sums):
                total, count_all = inputs.sum_over_ranks(sums[name]).tolist()
                numbers[name] = total / max(count_all, 1)
            # On its way the bar shows this rank's own average; it ends with that of all ranks.
            bar.advance(numbers["loss"])
        return Findings(numbers | inputs.objective.derived(numbers))


__all__ = ["Loss"]
