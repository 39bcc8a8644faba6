"""Many images at once: shared out over the ranks, made in batches, every forward pass on all ranks together.

The caller says which rank this is and how ranks exchange rows. Must not know files, recipes or FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.contracts.no_grad import no_grad
from fullshard.families.diffusion.denoiser.batch_inputs import Text
from fullshard.families.diffusion.sampling.sampler import Method, sample

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int, int]
"""Channels, height and width."""
FILLER = -1
"""The number of an image that only keeps a rank in step."""
_DECODED_AT_ONCE = 8


@dataclass(frozen=True)
class SamplerSettings:
    """How images are made from noise."""

    steps: int
    method: Method
    guidance: float | None
    """The weight of a label or text; None: not resolved yet."""
    seed: int


def image_shape(model: Any) -> Shape:
    """The shape of what the model makes, by its config."""
    size = model.config.sample_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return int(model.image_channels), int(height), int(width)


def shares(count: int, *, batch: int, ranks: int, rank: int) -> list[torch.Tensor]:
    """This rank's numbers from 0 to `count` - 1, in batches. Every rank has the same number of batches and numbers;
    FILLER makes up the difference."""
    import torch

    each = -(-count // ranks)
    numbers = torch.arange(rank, rank + ranks * each, ranks)
    return list(torch.where(numbers < count, numbers, FILLER).split(batch))


def make_images(
    objective: Any,
    model: Any,
    rows: torch.Tensor,
    sampler: SamplerSettings,
    *,
    batch: int,
    place: tuple[int, int],
    device: torch.device,
    text: Text | None = None,
    **more: Any,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of one image per entry of `rows`: numbers (or FILLER) and images, batch by batch. `rows` are
    labels, or indices into `text`; `place` is (number of ranks, this rank); `more` goes to `make_batch`."""
    import torch

    ranks, rank = place
    for numbers in shares(len(rows), batch=batch, ranks=ranks, rank=rank):
        chosen = rows[torch.where(numbers == FILLER, len(rows) - 1, numbers)].to(device)
        some = None if text is None else {name: part[chosen] for name, part in text.items()}
        yield numbers, make_batch(objective, model, chosen, numbers.to(device), sampler, text=some, **more)


def make_batch(
    objective: Any,
    model: Any,
    labels: torch.Tensor,
    numbers: torch.Tensor,
    sampler: SamplerSettings,
    *,
    text: Text | None = None,
    empty: Text | None = None,
    shape: Sequence[int] | None = None,
    vae: Any = None,
    tick: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """One image per number, scaled like the training data (of the VAE, if there is one); every rank must call this
    equally often. Conditioned on `text`, with `empty` as the empty text, else on `labels`. `shape`: of the model's
    output, if its config does not say."""
    import torch

    is_labelled = text is None and model.num_classes is not None
    # A compiled block would be recompiled for this batch size.
    with torch.compiler.set_stance("force_eager"):
        images = sample(
            _Watched(objective, tick),
            model,
            labels if is_labelled else None,
            numbers.clamp(min=0),
            shape=image_shape(model) if shape is None else tuple(shape),
            seed=sampler.seed,
            steps=sampler.steps,
            guidance=1.0 if sampler.guidance is None else sampler.guidance,
            method=sampler.method,
            text=text,
            empty=empty,
        )
        return _decoded(images, vae)


@no_grad
def _decoded(images: torch.Tensor, vae: Any) -> torch.Tensor:
    import torch

    return images if vae is None else torch.cat([vae.decode_latents(some) for some in images.split(_DECODED_AT_ONCE)])


def collected(
    made: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    gather: Callable[[torch.Tensor], torch.Tensor],
    keep: bool,
    shown: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
) -> torch.Tensor | None:
    """The images of all ranks, in order, with `shown` applied; None unless `keep`. `gather` concatenates the rows of
    all ranks."""
    import torch

    found: dict[int, torch.Tensor] = {}
    for numbers, images in made:
        all_numbers, everyone = gather(numbers.to(images.device)), gather(images)
        if keep:
            there = all_numbers != FILLER
            found |= zip(all_numbers[there].tolist(), shown(everyone[there]), strict=True)
    return torch.stack([found[number] for number in sorted(found)]) if keep else None


class _Watched:
    """An objective that calls `tick` when the sampler reaches its next level."""

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
