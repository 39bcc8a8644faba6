"""Many images at once: shared out over the ranks, made in batches, every forward pass on all ranks together.

Who the ranks are and how they exchange rows is told. Must not know files, recipes, FSDP or what images are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.families.diffusion.denoiser.batch_inputs import Text
from fullshard.families.diffusion.sampling.sampler import Method, sample

Shape = tuple[int, int, int]
"""Channels, height and width."""
FILLER = -1
"""The number of an image that only keeps a rank in step."""
_AT_ONCE = 8
"""So many latents become images together."""


@dataclass(frozen=True)
class Way:
    """How images are made from noise."""

    steps: int
    method: Method
    guidance: float | None
    """How much a label or a text counts; None: not settled yet."""
    seed: int


def image_shape(model: Any) -> Shape:
    """Channels, height and width of what the model makes."""
    size = model.config.sample_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return int(model.image_channels), int(height), int(width)


def shares(count: int, *, batch: int, ranks: int, rank: int) -> list[torch.Tensor]:
    """The numbers from 0 to `count` - 1 that are this rank's, batch by batch. Every rank has equally many batches and
    numbers; where there are too few, the last are FILLER."""
    each = -(-count // ranks)
    numbers = torch.arange(rank, rank + ranks * each, ranks)
    return list(torch.where(numbers < count, numbers, FILLER).split(batch))


def make_images(
    objective: Any,
    model: Any,
    rows: torch.Tensor,
    way: Way,
    *,
    batch: int,
    place: tuple[int, int],
    device: torch.device,
    text: Text | None = None,
    none: Text | None = None,
    shape: Sequence[int] | None = None,
    vae: Any = None,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of the images, one for each of `rows`, which are labels, or with `text` the numbers of texts
    (`none` is the one that means none): the images' numbers (FILLER for one to be left out), and the images, scaled as
    the data that the model, or the VAE before it, was given. `place` is how many ranks there are, and which this is."""
    ranks, rank = place
    for numbers in shares(len(rows), batch=batch, ranks=ranks, rank=rank):
        chosen = rows[torch.where(numbers == FILLER, len(rows) - 1, numbers)].to(device)
        given = None if text is None else {name: part[chosen] for name, part in text.items()}
        yield (
            numbers,
            make_batch(
                objective,
                model,
                chosen,
                numbers.to(device),
                way,
                text=given,
                none=none,
                shape=shape,
                vae=vae,
                tick=tick,
            ),
        )


def make_batch(
    objective: Any,
    model: Any,
    labels: torch.Tensor,
    numbers: torch.Tensor,
    way: Way,
    *,
    text: Text | None = None,
    none: Text | None = None,
    shape: Sequence[int] | None = None,
    vae: Any = None,
    tick: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """An image for each number, by its label, or by its text where there is one; all ranks come here equally often.
    `shape` is that of what the model makes, where its configuration does not say."""
    is_labelled = text is None and model.num_classes is not None
    # A compiled block would be compiled anew for this batch.
    with torch.compiler.set_stance("force_eager"):
        images = sample(
            _Watched(objective, tick),
            model,
            labels if is_labelled else None,
            numbers.clamp(min=0),
            shape=image_shape(model) if shape is None else tuple(shape),
            seed=way.seed,
            steps=way.steps,
            guidance=1.0 if way.guidance is None else way.guidance,
            method=way.method,
            text=text,
            none=none,
        )
        return _decoded(images, vae)


@torch.no_grad()
def _decoded(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """What a VAE that is spread over the ranks makes of latents."""
    return images if vae is None else torch.cat([vae.decode_latents(some) for some in images.split(_AT_ONCE)])


def collected(
    made: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    gather: Callable[[torch.Tensor], torch.Tensor],
    keep: bool,
    shown: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
) -> torch.Tensor | None:
    """What all ranks have made, in order; None where it is not to be kept. `gather` puts the rows of all ranks
    together, and `shown` is applied to them."""
    found: dict[int, torch.Tensor] = {}
    for numbers, images in made:
        all_numbers, everyone = gather(numbers.to(images.device)), gather(images)
        if keep:
            there = all_numbers != FILLER
            found |= zip(all_numbers[there].tolist(), shown(everyone[there]), strict=True)
    return torch.stack([found[number] for number in sorted(found)]) if keep else None


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


__all__ = [
    "FILLER",
    "Shape",
    "Way",
    "collected",
    "image_shape",
    "make_batch",
    "make_images",
    "pixels",
    "shares",
]
