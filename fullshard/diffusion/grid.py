"""Many images at once: shared out over the ranks, made in batches, every forward pass on all ranks together.

Who the ranks are and how they exchange rows is told. Must not know files, recipes, FSDP or what images are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.diffusion.sampler import Method, sample

FILLER = -1
"""The number of an image that only keeps a rank in step."""
_AT_ONCE = 8
"""So many latents become images together."""


@dataclass(frozen=True)
class Way:
    """How images are made from noise."""

    steps: int
    method: Method
    guidance: float
    seed: int


def image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of what the model makes."""
    size = model.config.sample_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    # Flux counts the pixels of a patch as channels.
    return int(getattr(model, "image_channels", model.config.in_channels)), int(height), int(width)


def shares(count: int, *, batch: int, ranks: int, rank: int) -> list[torch.Tensor]:
    """The numbers from 0 to `count` - 1 that are this rank's, batch by batch. Every rank has equally many batches and
    numbers; where there are too few, the last are FILLER."""
    each = -(-count // ranks)
    numbers = torch.arange(rank, rank + ranks * each, ranks)
    return list(torch.where(numbers < count, numbers, FILLER).split(batch))


def make_images(
    objective: Any,
    model: Any,
    labels: torch.Tensor,
    way: Way,
    *,
    batch: int,
    place: tuple[int, int],
    device: torch.device,
    vae: Any = None,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of the images, one for each label: their numbers (FILLER for one to be left out), and the
    images, scaled as the data that the model, or the VAE before it, was given. `place` is how many ranks there are, and
    which this is."""
    ranks, rank = place
    for numbers in shares(len(labels), batch=batch, ranks=ranks, rank=rank):
        drawn = torch.where(numbers == FILLER, len(labels) - 1, numbers)
        # A compiled block would be compiled anew for this batch.
        with torch.compiler.set_stance("force_eager"):
            images = sample(
                _Watched(objective, tick),
                model,
                labels[drawn].to(device) if model.num_classes is not None else None,
                drawn.to(device),
                shape=image_shape(model),
                seed=way.seed,
                steps=way.steps,
                guidance=way.guidance,
                method=way.method,
            )
            images = _decoded(images, vae)
        yield numbers, images


@torch.no_grad()
def _decoded(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """What a VAE that is spread over the ranks makes of latents; all ranks come here equally often."""
    return images if vae is None else torch.cat([vae.decode_latents(some) for some in images.split(_AT_ONCE)])


def pixels(images: torch.Tensor) -> torch.Tensor:
    """Images with values from -1 to 1, as what looks at images takes them: fp32 from 0 to 1."""
    return (images.float().clamp(-1, 1) + 1) / 2


class _Watched:
    """An objective that says when a sampler comes to its next level."""

    def __init__(self, objective: Any, tick: Callable[[], None]) -> None:
        self._objective, self._tick = objective, tick
        self._level: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def slope(self, model: Any, state: torch.Tensor, level: float, *others: Any, **more: Any) -> Any:
        found = self._objective.slope(model, state, level, *others, **more)
        if level != self._level:
            self._level = level
            self._tick()
        return found


__all__ = ["FILLER", "Way", "image_shape", "make_images", "pixels", "shares"]
