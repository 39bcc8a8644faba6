"""How a freshly built module is to be spread over the ranks. No rank needs to have met another for it.

Must not know weights, losses or the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fullshard.dist.mesh import choose_layout
from fullshard.dist.precision import ResolvedPrecision
from fullshard.dist.shard import ShardPlan
from fullshard.dist.world import World
from fullshard.dist.wrap import find_blocks
from fullshard.errors import RecipeError
from fullshard.recipe import Recipe


def sync_batchnorm(module: nn.Module, world: World, *, say: Callable[[str], None]) -> nn.Module:
    """Shares batch-norm statistics over ranks."""
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        say("sharding.sync_batchnorm has no effect: the model has no batch norm.")
        return module
    if world.device.type != "cuda" and world.size > 1:
        raise RecipeError(
            "sharding.sync_batchnorm = true needs GPUs: torch shares batch-norm statistics only there. Set it to false."
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module) if world.size > 1 else module


def check_model(recipe: Recipe, module: nn.Module) -> None:
    """There is something to train, and positions for the longest sample."""
    if not any(p.requires_grad for p in module.parameters()):
        names = [name for name, _ in module.named_parameters()]
        raise RecipeError(
            f"The model has no trainable parameter: model.freeze leaves none of its {len(names)} parameters to train. "
            f"Freeze less; names look like: {', '.join(names[:3])} ... {names[-1] if names else ''}."
        )
    longest = recipe.model.longest(module)
    if longest is not None and recipe.data.sequence_length > longest:
        raise RecipeError(
            f"data.sequence_length = {recipe.data.sequence_length}, and the model has {longest} positions. Shorten it, "
            f"or give the model more: model.overrides.max_position_embeddings={recipe.data.sequence_length}."
        )


def state_bytes(recipe: Recipe, module: nn.Module) -> int:
    """Parameters, gradients, Adam's moments and the average, in fp32."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters()) - trained
    return (20 if recipe.ema else 16) * trained + 4 * frozen


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
        activation_checkpointing=sharding.activation_checkpointing,
        compile=world.device.type == "cuda" if sharding.compile is None else sharding.compile,
        cpu_offload=sharding.cpu_offload,
        forward_prefetch=sharding.forward_prefetch,
    )
