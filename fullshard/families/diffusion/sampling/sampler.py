"""The sampler: solves the ODE from noise to images with Euler's or Heun's method.

The objective gives the first state, the coordinate of the ODE and its slope. Noise follows from a seed and an image's
number, so an image does not depend on what else is in its batch. Must not know model classes or ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fullshard.contracts.no_grad import no_grad
from fullshard.data.order import FIXED, draws
from fullshard.families.diffusion.denoiser.batch_inputs import Text
from fullshard.families.diffusion.keyed_noise import NOISE, normal

if TYPE_CHECKING:
    import torch

Method = Literal["euler", "heun"]


@no_grad
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
    empty: Text | None = None,
) -> torch.Tensor:
    """(images, *shape) fp32, one per number. `guidance`: classifier-free guidance scale; 1 runs the model once. `empty`
    is the empty text, with one row."""
    import torch

    keys = torch.from_numpy(draws(numbers.cpu().numpy(), seed=seed, stream=FIXED)).to(numbers.device)
    state: torch.Tensor = objective.start(normal(keys, shape, NOISE))
    levels = objective.levels(steps)
    given = labels, text, empty
    for level, following in zip(levels, levels[1:], strict=False):
        width = objective.coordinate(following) - objective.coordinate(level)
        slope = _slope(objective, model, state, level, given, guidance)
        ahead = state + width * slope
        if method == "heun" and following != levels[-1]:  # the model has no prediction at the last level
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
    import torch

    labels, text, empty = given
    if guidance == 1 or (labels is None and text is None):
        return _of_model(objective, model, state, level, labels, text)
    if labels is not None:
        labels = torch.cat([labels, torch.full_like(labels, model.null_label)])
    if text is not None:
        assert empty is not None, "guidance compares with the empty text"
        text = {name: torch.cat([part, empty[name].expand_as(part)]) for name, part in text.items()}
    both = _of_model(objective, model, torch.cat([state, state]), level, labels, text)
    conditioned, free = torch.chunk(both, 2)
    return free + guidance * (conditioned - free)


def _of_model(
    objective: Any, model: Any, state: torch.Tensor, level: float, labels: torch.Tensor | None, text: Text | None
) -> torch.Tensor:
    found: torch.Tensor = objective.slope(model, state, level, labels, **({} if text is None else {"text": text}))
    return found
