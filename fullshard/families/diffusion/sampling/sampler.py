"""Images from noise: walks the way that an objective describes, step by step, with Euler's or Heun's method.

The objective says where the way begins, which coordinate it runs along and how steep it is. Noise follows from a seed
and an image's number, so the same image comes out whatever is drawn beside it. Must not know models' classes or ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fullshard.data.order import FIXED, draws
from fullshard.families.diffusion.denoiser.batch_inputs import Text
from fullshard.families.diffusion.keyed_noise import NOISE, normal

Method = Literal["euler", "heun"]


@torch.no_grad()
def sample(
    objective: Any,
    model: Any,
    labels: torch.Tensor | None,
    numbers: torch.Tensor,
    *,
    shape: tuple[int, ...],
    seed: int,
    steps: int,
    guidance: float,
    method: Method,
    text: Text | None = None,
    none: Text | None = None,
) -> torch.Tensor:
    """(images, *shape) fp32, one for each number. `guidance` 1 asks the model once; more, what the label and the text
    change counts so many times. `none` is the text that means none, with one row."""
    keys = torch.from_numpy(draws(numbers.cpu().numpy(), seed=seed, stream=FIXED)).to(numbers.device)
    state: torch.Tensor = objective.start(normal(keys, shape, NOISE))
    levels = objective.levels(steps)
    given = labels, text, none
    for level, following in zip(levels, levels[1:], strict=False):
        width = objective.coordinate(following) - objective.coordinate(level)
        slope = _slope(objective, model, state, level, given, guidance)
        ahead = state + width * slope
        if method == "heun" and following != levels[-1]:  # at the end of the way the model has nothing to say
            slope = (slope + _slope(objective, model, ahead, following, given, guidance)) / 2
            ahead = state + width * slope
        state = ahead
    return state


def _slope(
    objective: Any,
    model: Any,
    state: torch.Tensor,
    level: float,
    given: tuple[torch.Tensor | None, Text | None, Text | None],
    guidance: float,
) -> torch.Tensor:
    labels, text, none = given
    if guidance == 1 or (labels is None and text is None):
        return _asked(objective, model, state, level, labels, text)
    if labels is not None:
        labels = torch.cat([labels, torch.full_like(labels, model.null_label)])
    if text is not None:
        assert none is not None, "guidance compares with the text that means none"
        text = {name: torch.cat([part, none[name].expand_as(part)]) for name, part in text.items()}
    both = _asked(objective, model, torch.cat([state, state]), level, labels, text)
    conditioned, free = torch.chunk(both, 2)
    return free + guidance * (conditioned - free)


def _asked(
    objective: Any, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, text: Text | None
) -> torch.Tensor:
    found: torch.Tensor = objective.slope(model, state, level, labels, **({} if text is None else {"text": text}))
    return found
