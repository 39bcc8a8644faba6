"""The moving average of the trained weights: each rank averages its own slices, after every update.

It is kept as optimizer state, under the key `ema`, so that it is saved, resharded, loaded and proven like Adam's
moments. Must not know losses, evaluations or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.contracts.ema import Ema
from fullshard.contracts.progress import Progress
from fullshard.dist.shard import reshard
from fullshard.dist.values import local

KEY = "ema"
"""The name of the average in the optimizer's state."""


class Average:
    """Follows one optimizer's updates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Ema, progress: Progress) -> None:
        self.settings = settings
        self._model, self._optimizer, self._progress = model, optimizer, progress
        optimizer.register_step_post_hook(self._update)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By parameter name; empty before the first update."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return {names[p]: self._optimizer.state[p][KEY] for p in self._averaged()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with averaged weights; the trained ones wait in the memory that gradients have left."""
        reshard(self._model)
        parameters = [local(p.detach()) for p in self._averaged()]
        averages = [local(self._optimizer.state[p][KEY]) for p in self._averaged()]
        trained = [p.clone() for p in parameters]
        _copy(parameters, averages)
        try:
            yield
        finally:
            reshard(self._model)
            _copy(parameters, trained)

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is called also for a step that overflowed, which is no update.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and float(overflow) > 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if KEY not in optimizer.state[parameter]:  # not before the update: Adam takes any state for its own
                optimizer.state[parameter][KEY] = parameter.detach().float().clone()
        weight = 1 - self.settings.decay_at(self._progress.schedule_step + 1)
        averages = [local(optimizer.state[p][KEY]) for p in parameters]
        torch._foreach_lerp_(averages, [local(p.detach()).float() for p in parameters], weight)

    def _averaged(self) -> list[nn.Parameter]:
        state = self._optimizer.state
        return [p for group in self._optimizer.param_groups for p in group["params"] if KEY in state.get(p, {})]


@torch.no_grad()
def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
