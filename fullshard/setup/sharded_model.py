"""From the recipe to the model spread over the ranks, with the weights it starts from.

Must not know optimizers, data or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from fullshard.contracts.model import Weights
from fullshard.contracts.parameter_groups import recompute_by_block
from fullshard.dist.mesh import make_mesh
from fullshard.dist.precision import ResolvedPrecision, resolve_precision
from fullshard.dist.shard import ShardPlan, Unit, shard
from fullshard.dist.world import World
from fullshard.recipe import Recipe
from fullshard.setup.shard_plan import shard_plan, sync_batchnorm


@dataclass(frozen=True)
class ShardedModel:
    """The model as it is spread over the ranks."""

    module: nn.Module
    precision: ResolvedPrecision
    plan: ShardPlan
    units: list[Unit]
    kernels: str
    flops_per_token: float
    left_out: frozenset[str]


def precision_in_force(recipe: Recipe, world: World, *, say: Callable[[str], None]) -> ResolvedPrecision:
    """What the recipe's word means on this device; notes what it switches on."""
    precision = resolve_precision(recipe.precision, world.device)
    if line := precision.switched():
        say(line)
    return precision


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
    plan = _with_groups(recipe, module, shard_plan(recipe, module, world, precision))
    kernels = recipe.model.choose_kernels(
        module, device=world.device.type, compute=precision.compute, packed=recipe.data.pack
    )
    flops = recipe.model.flops_per_token(module, length=recipe.data.sequence_length)
    weights = values or recipe.model.weights(module)
    units = shard(
        module,
        plan,
        make_mesh(plan.layout, world),
        family=recipe.model,
        weights=weights,
        device=world.device,
        seed=recipe.seed,
    )
    return ShardedModel(module, precision, plan, units, kernels, flops, _frozen_in(recipe, module, weights))


def _with_groups(recipe: Recipe, module: nn.Module, plan: ShardPlan) -> ShardPlan:
    """The plan with the recomputation that parameter groups ask for."""
    blocks = {
        name: [f"{name}.{n}" for n, _ in module.get_submodule(name).named_parameters()] for name in plan.wrap.blocks
    }
    return replace(plan, recompute=recompute_by_block(recipe.optimizer.by_name or [], blocks))


def _frozen_in(recipe: Recipe, module: nn.Module, weights: Weights | None) -> frozenset[str]:
    """Frozen parameters that can be read again from the model's own folder; a checkpoint they came from may go."""
    stored = weights.names() if weights and recipe.model.stored_in() is not None else set()
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad and name in stored)


__all__ = ["ShardedModel", "precision_in_force", "sharded_model"]
