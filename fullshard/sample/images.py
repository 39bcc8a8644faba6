"""Images from a trained model, on all ranks together: loads what a run has left, and walks from noise to images.

Must not know options, files of images, or how a run is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from fullshard.data.base import Encoder
from fullshard.data.prepare import prepare
from fullshard.diffusion.grid import FILLER, Way, image_shape, make_images
from fullshard.dist import reduce
from fullshard.dist.mesh import make_mesh
from fullshard.dist.shard import shard
from fullshard.dist.world import World
from fullshard.errors import CheckpointError, DataError, NumericalError, SetupError
from fullshard.export.source import Trained, open_trained
from fullshard.frozen import frozen_models
from fullshard.ground import Ground, cache_folder, encoder_of
from fullshard.log.console import Console
from fullshard.models.base import Family, Weights
from fullshard.placement import shard_plan
from fullshard.precision import resolve_precision
from fullshard.sample.source import Chosen

MOST_ROWS = 10
"""So many classes are shown where none are named."""


@dataclass(frozen=True)
class Wish:
    """What to make."""

    classes: tuple[int, ...] | None
    per_class: int
    way: Way
    batch_size: int
    weights: str | None
    """`ema` or `model`; None: averaged weights where there are any."""


@dataclass(frozen=True)
class Loaded:
    """The model with its edits, still on meta, where its values come from, and how its data was scaled."""

    module: nn.Module
    family: Family
    weights: Weights
    encoder: Encoder


def load(chosen: Chosen, wish: Wish, console: Console) -> Loaded:
    """Everything that can be found out before the ranks meet."""
    recipe = chosen.reading.recipe
    if not hasattr(recipe.objective, "slope"):
        raise SetupError(
            f"RUN = {chosen.run} is no diffusion run: its objective is {recipe.objective.kind()}. fullshard sample "
            "makes images, with runs of flow_matching or ddpm."
        )
    module, family, weights = _trained(chosen, wish) if chosen.checkpoint else _exported(chosen, wish)
    recipe.objective.extend(module)
    encoder = encoder_of(recipe)
    assert encoder is not None, "an objective that makes images names its encoder"
    _check(module, recipe.objective, encoder, wish, chosen)
    if getattr(encoder, "is_measured", False):
        _measure(chosen, encoder, console)
    return Loaded(module, family, weights, encoder)


def _trained(chosen: Chosen, wish: Wish) -> tuple[nn.Module, Family, Weights]:
    assert chosen.checkpoint is not None
    trained = open_trained(chosen.checkpoint, base=None, trust_remote_code=False, weights=wish.weights)
    return trained.module, trained.family, _Values(trained)


def _exported(chosen: Chosen, wish: Wish) -> tuple[nn.Module, Family, Weights]:
    family = chosen.reading.recipe.model
    if wish.weights is not None or getattr(family, "lora", None):
        problem = f"--weights {wish.weights} needs a checkpoint" if wish.weights else "adapters need a checkpoint"
        raise CheckpointError(f"RUN = {chosen.run}: {problem}, and the run has none. It has an exported model only.")
    changed: dict[str, Any] = {"path": str(chosen.weights), "architecture": None, "size": None, "overrides": {}}
    family = family.model_copy(update=changed)
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None, "a folder has weights"
    return module, family, weights


class _Values:
    """The tensors of a checkpoint, and of the frozen base that it leaves out, by rows."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._stored = trained, trained.stored.names()
        self._names = self._stored | (trained.base.names() if trained.base is not None else set())
        for name, _ in trained.module.named_parameters():
            if name not in self._names:
                next(trained.tensors([name]))  # raises, in words

    def names(self) -> set[str]:
        return self._names

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._stored:
            return self._trained.stored.read(name, start, stop)
        _, tensor = next(self._trained.tensors([name]))  # whole, so that it can be proven
        return tensor[start:stop] if tensor.dim() else tensor


def _check(module: Any, objective: Any, encoder: Any, wish: Wish, chosen: Chosen) -> None:
    """What the model can be asked for."""
    if getattr(module, "text_width", None) is not None:
        raise SetupError(
            f"RUN = {chosen.run}: its model is conditioned on texts, and fullshard sample asks by class. Use the "
            "exported model with a pipeline of diffusers."
        )
    for label in wish.classes or ():
        if not 0 <= label < (module.num_classes or 0):
            allowed = f"it has the classes 0 to {module.num_classes - 1}" if module.num_classes else "it has no classes"
            raise SetupError(
                f"--classes {','.join(map(str, wish.classes or ()))}: {label} is no class of the model, {allowed}. "
                f"{'Choose from these' if module.num_classes else 'Leave --classes out'}."
            )
    channels = image_shape(module)[0]
    if channels not in (1, 3) and "vae" not in objective.frozen() and getattr(encoder, "vae", None) is None:
        raise SetupError(
            f"RUN = {chosen.run}: its model makes latents of {channels} channels, and the recipe names no VAE that "
            "makes images of them (data.encode.vae, objective.vae). Use the exported model in a pipeline of diffusers."
        )


def _measure(chosen: Chosen, encoder: Encoder, console: Console) -> None:
    """Measures again what scaled the data: the encoded data is in the cache, unless it was cleared."""
    recipe = chosen.reading.recipe
    try:
        prepare(
            train=recipe.data.train,
            validation=None,
            encode=encoder,
            processor=None,
            length=recipe.data.sequence_length,
            pack=recipe.data.pack,
            holdout=0.0,
            seed=recipe.seed,
            cache=cache_folder(recipe),
            say=console.note,
        )
    except DataError as error:
        error.add_note("data.encode measures its scaling over data.train, and it is taken off the images again.")
        raise


def classes_of(module: Any, wish: Wish) -> tuple[int, ...] | None:
    """A row for each; None where the model has no classes."""
    if module.num_classes is None:
        return None
    return wish.classes if wish.classes is not None else tuple(range(min(module.num_classes, MOST_ROWS)))


def make(loaded: Loaded, chosen: Chosen, wish: Wish, world: World, watch: Callable[[int], Any]) -> torch.Tensor | None:
    """(rows x per_class, C, H, W) with values from -1 to 1, on rank 0; None elsewhere. `watch` opens a bar over so many
    steps."""
    recipe = chosen.reading.recipe
    precision = resolve_precision(recipe.precision, world.device)
    module, aux = _spread(loaded, chosen, world), {}
    if recipe.objective.frozen():
        # Of the ground they look at the tokenizer alone.
        aux = frozen_models(recipe, cast(Ground, SimpleNamespace(processor=None)), world, precision)
    rows = classes_of(module, wish) or (0,)
    labels = torch.tensor(rows).repeat_interleave(wish.per_class)
    each = -(-len(labels) // world.size)
    found: dict[int, torch.Tensor] = {}
    with watch(-(-each // wish.batch_size) * wish.way.steps) as bar:
        for numbers, images in make_images(
            recipe.objective,
            module,
            labels,
            wish.way,
            batch=wish.batch_size,
            place=(world.size, world.rank),
            device=world.device,
            vae=aux.get("vae"),
            tick=bar.advance,
        ):
            all_numbers, all_images = reduce.gather_rows(numbers.to(world.device)), reduce.gather_rows(images)
            if world.is_main:
                shown = loaded.encoder.shown(all_images[all_numbers != FILLER]).float().cpu()
                found |= zip(_real(all_numbers), shown, strict=True)
    return _finished(found, chosen) if world.is_main else None


def _real(numbers: torch.Tensor) -> Sequence[int]:
    return [int(number) for number in numbers if number != FILLER]


def _spread(loaded: Loaded, chosen: Chosen, world: World) -> nn.Module:
    """The model on the ranks, with its values."""
    recipe, module = chosen.reading.recipe, loaded.module
    precision = resolve_precision(recipe.precision, world.device)
    recipe = recipe.model_copy(update={"model": loaded.family})
    plan = replace(shard_plan(recipe, module, world, precision), activation_checkpointing="none", compile=False)
    loaded.family.choose_kernels(module, device=world.device.type, compute=precision.compute, packed=False)
    mesh, seed = make_mesh(plan.layout, world), recipe.seed
    shard(module, plan, mesh, family=loaded.family, weights=loaded.weights, device=world.device, seed=seed)
    return module.eval()


def _finished(found: dict[int, torch.Tensor], chosen: Chosen) -> torch.Tensor:
    images = torch.stack([found[number] for number in sorted(found)])
    if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
        raise NumericalError(
            f"{chosen.weights}: {broken} of {len(images)} images hold values that are no numbers. Use an earlier "
            "checkpoint, less --guidance, or more --steps."
        )
    return images


@contextmanager
def no_bar(steps: int) -> Iterator[Any]:
    """For whoever does not watch."""
    yield SimpleNamespace(advance=lambda: None)


__all__ = ["Loaded", "Wish", "classes_of", "load", "make", "no_bar"]
