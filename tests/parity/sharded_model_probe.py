"""What a rank sees of a sharded model while it trains, gathered by two parts of our own: an optimizer that looks at the
parameters and at every gradient, and an evaluation that looks at the model when training is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.optim.adamw import AdamW
from tests.small import train

PROMPT = list(range(3, 39, 3))
SEEN: dict[str, Any] = {}
FROZEN: dict[str, torch.Tensor] = {}


class LookingAdamW(AdamW):
    """AdamW that notes how parameters are kept, and which of them ever have a gradient."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = dict(named_parameters)
        SEEN.update(
            gradients=set(),
            trainable={n for n, p in parameters.items() if p.requires_grad},
            dtypes={n: str(local(p).dtype).removeprefix("torch.") for n, p in parameters.items()},
            sizes={n: (local(p).numel(), p.numel()) for n, p in parameters.items()},
        )
        FROZEN.update({n: local(p).clone() for n, p in parameters.items() if not p.requires_grad})
        optimizer = super().open(parameters.items())

        def look(*_: Any) -> None:
            SEEN["gradients"] |= {n for n, p in parameters.items() if p.grad is not None}

        optimizer.register_step_pre_hook(look)
        return optimizer


class Look(Evaluation):
    """Which frozen values moved, and the logits of a prompt."""

    only_at_end: bool = True

    @torch.no_grad()
    def run(self, inputs: EvaluationInputs) -> Findings:
        parameters = dict(inputs.model.named_parameters())
        SEEN["moved"] = [n for n, before in FROZEN.items() if not torch.equal(local(parameters[n]), before)]
        positions = torch.arange(len(PROMPT))[None]
        SEEN["logits"] = inputs.model(input_ids=torch.tensor([PROMPT]), position_ids=positions).logits
        return Findings()


def local(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def train_and_look(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank of a run, and what it saw. Sent to the rank pool by name."""
    SEEN.clear()
    FROZEN.clear()
    return {"records": train(settings), **SEEN}
