"""The moving average of the trained weights: each rank averages its own slices, after each update in `train_step`.

It is kept as optimizer state, under the key `ema`, so that it is saved, resharded, loaded and proven like Adam's
moments. Must not know losses, evaluations or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullshard.contracts.ema import Ema
from fullshard.contracts.progress import Progress
from fullshard.dist.shard import reshard
from fullshard.dist.values import local, plain

KEY = "ema"
"""The name of the average in the optimizer's state."""


class Average:
    """The average of what one optimizer trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Ema, progress: Progress) -> None:
        self.settings = settings
        self._model, self._optimizer, self._progress = model, optimizer, progress

    def tensors(self) -> dict[str, torch.Tensor]:
        """By parameter name; empty before the first update."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return {names[p]: self._optimizer.state[p][KEY] for p in self._averaged()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with averaged weights; the trained ones take the memory of freed gradients."""
        reshard(self._model)
        parameters = [local(p.detach()) for p in self._averaged()]
        averages = [local(self._optimizer.state[p][KEY]) for p in self._averaged()]
        trained = [p.clone() for p in parameters]
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)
        try:
            yield
        finally:
            reshard(self._model)
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)

    @torch.no_grad()
    def update(self, left_out: torch.Tensor) -> None:
        """Moves the average towards the weights, after an update of them; not if that was left out (1)."""
        self.materialise()
        weight = 1 - self.settings.decay_at(self._progress.schedule_step + 1)
        parameters = self._averaged()
        averages = [local(self._optimizer.state[p][KEY]) for p in parameters]
        weights = [weight * (1 - left_out.to(average.device)) for average in averages[:1]] * len(averages)
        torch._foreach_lerp_(averages, [local(p.detach()).float() for p in parameters], weights)

    @torch.no_grad()
    def materialise(self) -> None:
        """Creates the state, after the optimizer has created its own: Adam takes any state for its own."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                if KEY not in state:
                    state[KEY] = plain(parameter.detach()).float().clone()

    def _averaged(self) -> list[nn.Parameter]:
        state = self._optimizer.state
        return [p for group in self._optimizer.param_groups for p in group["params"] if KEY in state.get(p, {})]
