"""Frozen models beside the one that is trained, such as a teacher or a text encoder: sharded like any model.

Must not know what they are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fullshard.contracts.model import Family
from fullshard.data.store import processor_fingerprint
from fullshard.dist.mesh import make_mesh
from fullshard.dist.precision import ResolvedPrecision, resolve_precision
from fullshard.dist.shard import shard
from fullshard.dist.world import World
from fullshard.errors import RecipeError
from fullshard.recipe import Recipe
from fullshard.setup.run_inputs import RunInputs, cache_folder, encoder_of
from fullshard.setup.shard_plan import shard_plan


def frozen_models(
    recipe: Recipe, inputs: RunInputs, world: World, precision: ResolvedPrecision
) -> dict[str, nn.Module]:
    """The models that objective and encoder use in every step, with stored weights."""
    encoder = encoder_of(recipe)
    families = recipe.objective.frozen() | (encoder.frozen() if encoder else {})
    return open_frozen(families, recipe, inputs, world, precision)


def open_frozen(
    families: Mapping[str, Family], recipe: Recipe, inputs: RunInputs, world: World, precision: ResolvedPrecision
) -> dict[str, nn.Module]:
    """Frozen models by name, sharded as the run's own."""
    return {name: _frozen(recipe, inputs, world, precision, name, family) for name, family in families.items()}


def _frozen(
    recipe: Recipe, inputs: RunInputs, world: World, precision: ResolvedPrecision, name: str, family: Family
) -> nn.Module:
    family.prepare((), cache=cache_folder(recipe))
    _check_tokens(recipe, inputs, name, family)
    module = family.build(processor=None)
    module.requires_grad_(False)
    weights = family.weights(module)
    if weights is None:
        raise RecipeError(f"objective.{name}: it is never trained, so it needs weights to start from: give its path.")
    other = recipe.model_copy(update={"model": family})
    plan = replace(shard_plan(other, module, world, precision), activation_checkpointing="none", compile=False)
    # A frozen model may ask for a precision of its own, such as a VAE that overflows in fp16.
    if own := family.compute_precision():
        plan = replace(plan, compute=resolve_precision(own, world.device).compute)
    family.choose_kernels(module, device=world.device.type, compute=precision.compute, packed=False)
    mesh = make_mesh(plan.layout, world)
    shard(module, plan, mesh, family=family, weights=weights, device=world.device, seed=recipe.seed)
    return module.eval()


def _check_tokens(recipe: Recipe, inputs: RunInputs, name: str, family: Family) -> None:
    """Both models read the same tokens, so these must mean the same to both."""
    theirs = family.processor(cache=cache_folder(recipe))
    if theirs is not None and inputs.processor is not None:
        theirs.prompts = getattr(inputs.processor, "prompts", {})
        if processor_fingerprint(theirs) != processor_fingerprint(inputs.processor):
            raise RecipeError(
                f"objective.{name}: its tokenizer is not that of model.path, and both must read the same tokens. "
                f"Choose a {name} with the same tokenizer."
            )
