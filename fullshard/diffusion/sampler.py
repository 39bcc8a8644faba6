"""Images from noise: walks the way that an objective describes, step by step, with Euler's or Heun's method.

The objective says where the way begins, which coordinate it runs along and how steep it is. Noise follows from a seed
and an image's number, so the same image comes out whatever is drawn beside it. Must not know models' classes or ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fullshard.data.order import FIXED, draws
from fullshard.ops.keyed_noise import NOISE, normal

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
) -> torch.Tensor:
    """(images, *shape) fp32, one for each number. `guidance` 1 asks the model once; more, what the label changes counts
    so many times."""
    keys = torch.from_numpy(draws(numbers.cpu().numpy(), seed=seed, stream=FIXED)).to(numbers.device)
    state: torch.Tensor = objective.start(normal(keys, shape, NOISE))
    levels = objective.levels(steps)
    for level, following in zip(levels, levels[1:], strict=False):
        width = objective.coordinate(following) - objective.coordinate(level)
        slope = _slope(objective, model, state, level, labels, guidance)
        ahead = state + width * slope
        if method == "heun" and following != levels[-1]:  # at the end of the way the model has nothing to say
            slope = (slope + _slope(objective, model, ahead, following, labels, guidance)) / 2
            ahead = state + width * slope
        state = ahead
    return state


def _slope(
    objective: Any, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, guidance: float
) -> torch.Tensor:
    if labels is None or guidance == 1:
        found: torch.Tensor = objective.slope(model, state, level, labels)
        return found
    both = objective.slope(
        model, torch.cat([state, state]), level, torch.cat([labels, torch.full_like(labels, model.null_label)])
    )
    with_label, without = torch.chunk(both, 2)
    return without + guidance * (with_label - without)
