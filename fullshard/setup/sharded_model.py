"""From the recipe to models sharded over the ranks, with their weights: the one that is trained, and frozen ones beside
it, such as a teacher or a text encoder.

Must not know optimizers, losses, data or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from fullshard.contracts.model import Family, Weights
from fullshard.contracts.optimizer import recompute_by_block
from fullshard.contracts.world import World
from fullshard.data.store import processor_fingerprint
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.precision import ResolvedPrecision, resolve_precision
from fullshard.dist.shard import ShardPlan, Unit, shard
from fullshard.dist.wrap import find_blocks
from fullshard.errors import RecipeError
from fullshard.fast import run as fast
from fullshard.kernels.float8 import Float8
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import cache_folder, encoder_of


@dataclass(frozen=True)
class ShardedModel:
    """The model as it is sharded over the ranks."""

    module: nn.Module
    precision: ResolvedPrecision
    plan: ShardPlan
    units: list[Unit]
    kernels: str
    flops: tuple[float, dict[str, float]]
    """Per token, and per unit of other quantities."""
    left_out: frozenset[str]


def sharded_model(
    recipe: Recipe,
    module: nn.Module,
    world: World,
    precision: ResolvedPrecision,
    *,
    say: Callable[[str], None],
    values: Weights | None = None,
) -> ShardedModel:
    """Shards the empty module, with the weights that the recipe starts from, or with those of a checkpoint."""
    if recipe.sharding.sync_batchnorm:
        module = sync_batchnorm(module, world, say=say)
    plan = with_groups(recipe, module, shard_plan(recipe, module, world, precision))
    family, device = recipe.model, world.device
    kernels = family.choose_kernels(module, device=device.type, compute=precision.compute, packed=recipe.data.pack)
    flops = family.flops_per_token(module, length=recipe.data.sequence_length), family.media_flops(module)
    weights = values or family.weights(module)
    mesh = make_mesh(plan.layout, world)
    units = shard(module, plan, mesh, family=family, weights=weights, device=device, seed=recipe.seed)
    plan = fast.prepare(module, plan, mesh, device)
    # Frozen parameters that can be read again from the model's own folder; a checkpoint they came from may go.
    stored = weights.names() if weights and family.stored_in() is not None else set()
    left_out = frozenset(name for name, p in module.named_parameters() if not p.requires_grad and name in stored)
    return ShardedModel(module, precision, plan, units, kernels, flops, left_out)


def shard_plan(recipe: Recipe, module: nn.Module, world: World, precision: ResolvedPrecision) -> ShardPlan:
    """Which modules become units, on which mesh, in which dtypes."""
    sharding, asked = recipe.sharding, recipe.sharding.wrap
    wrap = find_blocks(
        module,
        classes=asked.classes if asked else None,
        min_params=asked.min_params if asked else None,
        whole=asked.whole if asked else False,
        hints=recipe.model.blocks(module),
        rehearse=recipe.model.rehearse,
    )
    layout = choose_layout(sharding.strategy, world, state_bytes=state_bytes(recipe, module))
    return ShardPlan(
        wrap=wrap,
        layout=layout,
        compute=precision.compute,
        storage=precision.storage,
        float8=Float8.of(precision.word),
        activation_checkpointing=sharding.activation_checkpointing,
        compile=world.device.type == "cuda" if sharding.compile is None else sharding.compile,
        cpu_offload=sharding.cpu_offload,
        forward_prefetch=sharding.forward_prefetch,
    )


def state_bytes(recipe: Recipe, module: nn.Module) -> int:
    """Parameters, gradients, Adam's moments and the average, in fp32."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters()) - trained
    return (20 if recipe.ema else 16) * trained + 4 * frozen


def sync_batchnorm(module: nn.Module, world: World, *, say: Callable[[str], None]) -> nn.Module:
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        say("sharding.sync_batchnorm has no effect: the model has no batch norm.")
        return module
    if world.device.type != "cuda" and world.size > 1:
        raise RecipeError(
            "sharding.sync_batchnorm = true needs GPUs: torch shares batch-norm statistics only there. Set it to false."
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module) if world.size > 1 else module


def with_groups(recipe: Recipe, module: nn.Module, plan: ShardPlan) -> ShardPlan:
    """The plan with the recomputation that parameter groups ask for."""
    blocks = {
        name: [f"{name}.{n}" for n, _ in module.get_submodule(name).named_parameters()] for name in plan.wrap.blocks
    }
    return replace(
        plan, recompute=recompute_by_block([*(recipe.optimizer.by_name or []), *recipe.model.groups(module)], blocks)
    )


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
    plan = shard_plan(other, module, world, precision)
    plan = replace(plan, float8=None, activation_checkpointing="none", compile=False)
    # A frozen model may need its own precision, such as a VAE that overflows in fp16.
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
