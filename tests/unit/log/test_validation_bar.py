"""The bar of a validation ends with the number that the validation reports."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from fullshard.contracts.evaluation import EvaluationInputs
from fullshard.contracts.objective import Batch, Objective, Terms
from fullshard.evaluations.loss import Loss
from fullshard.log.console import Console


class Given(Objective):
    def count(self, batch: Batch) -> int:
        return int(batch["count"])

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        return Terms(torch.tensor(float(batch["sum"])))


def test_the_bar_ends_with_the_average_over_all_ranks() -> None:
    out = io.StringIO()
    shown: list[float] = []
    console = Console(stream=out)

    def bar(total: int) -> Any:
        made = console.validation_bar(total)
        advance = made.advance

        def noted(loss: float | None = None) -> None:
            assert loss is not None
            shown.append(loss)
            advance(loss)

        made.advance = noted  # type: ignore[method-assign]
        return made

    found = Loss().run(
        EvaluationInputs(
            model=nn.Identity(),
            objective=Given(),
            aux={},
            batches=lambda: [{"sum": 4.0, "count": 2}, {"sum": 8.0, "count": 2}],
            num_batches=2,
            processor=None,
            # The other rank has a sum of 24 over 4 terms.
            sum_over_ranks=lambda pair: pair + torch.tensor([24.0, 4.0], dtype=torch.float64),
            device=torch.device("cpu"),
            bar=bar,
            show=print,
        )
    )
    assert found.numbers["loss"] == 36 / 8
    assert shown == [2.0, 4.5]
    assert "2/2" in out.getvalue()
    assert "val_loss=4.5000" in out.getvalue()
