"""Images of a finished run, on all ranks together: loads its model and samples.

Must not know the command line, image files, or how a run is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from fullshard.commands.chosen_run import Chosen
from fullshard.contracts.data import Collator, Encoder
from fullshard.contracts.model import Family, Weights
from fullshard.contracts.world import World
from fullshard.data.prepare import prepare
from fullshard.dist.gather import gather_rows
from fullshard.dist.mesh import make_mesh
from fullshard.dist.precision import ResolvedPrecision, resolve_precision
from fullshard.dist.shard import shard
from fullshard.errors import CheckpointError, DataError, NumericalError, SetupError
from fullshard.export.source import Values, open_trained
from fullshard.families.diffusion.denoiser.batch_inputs import Text, texts_of
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.sampling.conditioning import guidance_of, kept_open, takes_texts
from fullshard.families.diffusion.sampling.image_batches import SamplerSettings, collected, make_images
from fullshard.kernels.float8 import without
from fullshard.log.console import Console
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import cache_folder, encoder_of
from fullshard.setup.sharded_model import open_frozen, shard_plan

MOST_ROWS = 10
"""Classes that are shown if none are named."""
_TEXTS_AT_ONCE = 8
_NO_TOKENIZER = cast(RunInputs, SimpleNamespace(processor=None))
"""Of the run's inputs, frozen models use only the tokenizer."""


@dataclass(frozen=True)
class SampleOptions:
    """What to make."""

    classes: tuple[int, ...] | None
    per_class: int
    sampler: SamplerSettings
    batch_size: int
    weights: str | None
    """`ema` or `model`; None: averaged weights if there are any."""
    texts: tuple[str, ...] = ()
    """A row for each, if the model takes texts."""


@dataclass(frozen=True)
class Loaded:
    """The model on meta, where its values come from, and how its data was scaled."""

    module: nn.Module
    family: Family
    weights: Weights
    encoder: Any
    """The settings its data was encoded with."""
    collator: Collator
    """Undoes the scaling of its data."""
    shape: tuple[int, ...] | None
    """The shape of the model's output; None: as in its config."""
    is_latent: bool
    """Whether the output stays latent because there is no VAE."""
    sampler: SamplerSettings
    """With the guidance in force."""


def load(chosen: Chosen, options: SampleOptions, console: Console) -> Loaded:
    """Everything that can be done before the ranks are connected."""
    recipe = chosen.reading.recipe
    if not hasattr(recipe.objective, "slope"):
        raise SetupError(
            f"RUN = {chosen.run} is not a diffusion run: its objective is {recipe.objective.kind()}. fullshard sample "
            "works with runs of flow_matching or ddpm."
        )
    module, family, weights = _trained(chosen, options) if chosen.checkpoint else _exported(chosen, options)
    recipe.objective.extend(module)
    encoder = encoder_of(recipe)
    assert encoder is not None, "an objective that makes images names its encoder"
    _check(module, encoder, options, chosen)
    # An exported model has a path even if it was trained from scratch.
    cast(Any, module).is_fresh = getattr(recipe.model, "path", None) is None
    asked = options.sampler.guidance
    guidance = guidance_of(module, recipe.objective, asked, usual=2.0, where="--guidance")
    sampler = replace(options.sampler, guidance=guidance)
    shape = _shape(module, recipe.objective, encoder, None)
    if getattr(encoder, "is_measured", False) or shape == ():
        collator = _measure(chosen, encoder, console)
        shape = shape or _shape(module, recipe.objective, encoder, getattr(collator, "shape", None))
    else:
        collator = ImageCollator(encoder) if isinstance(encoder, Images) else Collator(encoder)
    return Loaded(module, family, weights, encoder, collator, shape, _is_latent(module, recipe, encoder), sampler)


def _shape(module: Any, objective: Any, encoder: Any, found: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of the model's output; None if its config says it, and () if only the data does. Text-conditioned
    models take many sizes: theirs is that of the data, `found`."""
    if not takes_texts(module):
        return None
    if found is None and encoder.size is not None and (settings := _vae(objective, encoder)) is not None:
        from fullshard.families.diffusion.vae.autoencoder_kl import latent_shape

        return latent_shape(settings, (settings["in_channels"], encoder.size, encoder.size))
    if found is None and encoder.size is not None:
        return module.image_channels, encoder.size, encoder.size
    if found is None:
        return None if getattr(module.config, "sample_size", None) else ()
    live = objective.frozen().get("vae")
    return found if live is None else tuple(live.latent_shape(found))


def _is_latent(module: Any, recipe: Any, encoder: Any) -> bool:
    """By the model's channels; if an image could have as many, by the first record, if the data is still there."""
    if "vae" in recipe.objective.frozen() or getattr(encoder, "vae", None) is not None:
        return False
    if module.image_channels not in (1, 3) or not isinstance(encoder, Images):
        return module.image_channels not in (1, 3)
    try:
        return encoder.read(recipe.data.train.open()[0]).is_latent
    except (DataError, OSError):
        return False


def _vae(objective: Any, encoder: Any) -> Any:
    """The settings of the VAE, live or at encoding; None without one."""
    live = objective.frozen().get("vae")
    if live is not None:
        from fullshard.families.diffusion.vae.autoencoder_kl import read_settings

        return read_settings(live.stored_in(), where="objective.vae.path")
    return None if encoder.vae is None else encoder.vae.settings()


def _trained(chosen: Chosen, options: SampleOptions) -> tuple[nn.Module, Family, Weights]:
    assert chosen.checkpoint is not None
    trained = open_trained(chosen.checkpoint, base=None, trust_remote_code=False, weights=options.weights)
    return trained.module, trained.family, Values(trained)


def _exported(chosen: Chosen, options: SampleOptions) -> tuple[nn.Module, Family, Weights]:
    family = chosen.reading.recipe.model
    if options.weights is not None or getattr(family, "lora", None):
        problem = f"--weights {options.weights} needs a checkpoint" if options.weights else "adapters need a checkpoint"
        raise CheckpointError(f"RUN = {chosen.run}: {problem}, but the run has only an exported model.")
    changed: dict[str, Any] = {"path": str(chosen.weights), "architecture": None, "size": None, "overrides": {}}
    family = family.model_copy(update=changed)
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None, "a folder has weights"
    return module, family, weights


def _check(module: Any, encoder: Any, options: SampleOptions, chosen: Chosen) -> None:
    """Raises SetupError for classes or texts that the model does not take."""
    if takes_texts(module):
        _check_texts(encoder, options, chosen)
    elif options.texts:
        raise SetupError(f"--texts: RUN = {chosen.run} has a model that takes no texts. Use --classes, or neither.")
    for label in options.classes or ():
        if not 0 <= label < (module.num_classes or 0):
            allowed = f"it has the classes 0 to {module.num_classes - 1}" if module.num_classes else "it has no classes"
            raise SetupError(
                f"--classes {','.join(map(str, options.classes or ()))}: {label} is not a class of the model, "
                f"{allowed}. {'Choose from these' if module.num_classes else 'Leave --classes out'}."
            )


def _check_texts(encoder: Any, options: SampleOptions, chosen: Chosen) -> None:
    if getattr(encoder, "stack", None) is None:
        raise SetupError(
            f"RUN = {chosen.run}: its model is text-conditioned, but the recipe names no text encoder "
            "(data.encode.text). Use the exported model with a pipeline of diffusers."
        )
    if options.classes is not None:
        raise SetupError(f"--classes: RUN = {chosen.run} has a text-conditioned model. Use --texts.")
    if not options.texts:
        raise SetupError(
            f"RUN = {chosen.run}: its model is text-conditioned: give at least one text, --texts "
            "'a small house' --texts 'a tree', or a file with one text per line: --texts FILE.txt."
        )


def _measure(chosen: Chosen, encoder: Encoder, console: Console) -> Collator:
    """Measures the scaling of the data again; the encoded data is usually still in the cache."""
    recipe = chosen.reading.recipe
    try:
        return prepare(
            train=recipe.data.train.open(),
            validation=None,
            encode=encoder,
            processor=None,
            length=recipe.data.sequence_length,
            pack=recipe.data.pack,
            holdout=0.0,
            seed=recipe.seed,
            cache=cache_folder(recipe),
            say=console.note,
        ).collator
    except DataError as error:
        error.add_note("The scaling of the images, or their size, comes from data.train.")
        raise


def classes_of(module: Any, options: SampleOptions) -> tuple[int, ...] | None:
    """The classes to show; None if the model has none."""
    if module.num_classes is None:
        return None
    return options.classes if options.classes is not None else tuple(range(min(module.num_classes, MOST_ROWS)))


def make(
    loaded: Loaded, chosen: Chosen, options: SampleOptions, world: World, watch: Callable[[int], Any]
) -> torch.Tensor | None:
    """(rows x per_class, C, H, W) with values from -1 to 1, or latents, on rank 0; None elsewhere. `watch` opens a
    progress bar over a number of steps."""
    recipe = chosen.reading.recipe
    precision = resolve_precision(without(recipe.precision), world.device)
    # Before the model is loaded, so that the text encoders are freed again.
    text, empty = _texts(loaded, chosen, options, world, precision) if options.texts else (None, None)
    module, aux = _sharded(loaded, chosen, world), {}
    if families := recipe.objective.frozen():
        aux = open_frozen(families, recipe, _NO_TOKENIZER, world, precision)
    rows = tuple(range(len(options.texts))) or classes_of(module, options) or (0,)
    labels = torch.tensor(rows).repeat_interleave(options.per_class)
    each = -(-len(labels) // world.size)
    with kept_open(loaded.collator), watch(-(-each // options.batch_size) * options.sampler.steps) as bar:
        made = make_images(
            recipe.objective,
            module,
            labels,
            loaded.sampler,
            batch=options.batch_size,
            place=(world.size, world.rank),
            device=world.device,
            text=text,
            empty=empty,
            shape=loaded.shape,
            vae=aux.get("vae"),
            tick=bar.advance,
        )
        found = collected(
            made,
            gather=gather_rows,
            keep=world.is_main,
            shown=lambda images: loaded.collator.decode(images).float().cpu(),
        )
    return _finite(found, chosen) if found is not None else None


def _texts(
    loaded: Loaded, chosen: Chosen, options: SampleOptions, world: World, precision: ResolvedPrecision
) -> tuple[Text, Text]:
    """The texts and the empty text, encoded by the run's text encoders, which are sharded over the ranks."""
    stack = loaded.encoder.stack
    encoders = open_frozen(stack.families(), chosen.reading.recipe, _NO_TOKENIZER, world, precision)
    tokens, empty = torch.from_numpy(stack.tokens(options.texts).ids).to(world.device), stack.empty_tokens()
    more = {} if empty is None else {"empty_tokens": torch.from_numpy(empty).to(world.device)}
    parts = [texts_of(loaded.module, {"text_tokens": some, **more}, encoders) for some in tokens.split(_TEXTS_AT_ONCE)]
    return {name: torch.cat([text[name] for text, _ in parts]) for name in parts[0][0]}, parts[0][1]


def _sharded(loaded: Loaded, chosen: Chosen, world: World) -> nn.Module:
    """The model on the ranks, with its weights."""
    recipe, module = chosen.reading.recipe, loaded.module
    precision = resolve_precision(without(recipe.precision), world.device)
    recipe = recipe.model_copy(update={"model": loaded.family})
    plan = replace(shard_plan(recipe, module, world, precision), activation_checkpointing="none", compile=False)
    loaded.family.choose_kernels(module, device=world.device.type, compute=precision.compute, packed=False)
    mesh, seed = make_mesh(plan.layout, world), recipe.seed
    shard(module, plan, mesh, family=loaded.family, weights=loaded.weights, device=world.device, seed=seed)
    return module.eval()


def _finite(images: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
        raise NumericalError(
            f"{chosen.weights}: {broken} of {len(images)} images hold NaN or Inf. Use an earlier "
            "checkpoint, less --guidance, or more --steps."
        )
    return images


@contextmanager
def no_bar(steps: int) -> Iterator[Any]:
    """A progress bar that shows nothing."""
    yield SimpleNamespace(advance=lambda: None)
