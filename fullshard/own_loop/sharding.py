"""`fullshard.shard`: any module sharded over the ranks by the engine's own code, for a training loop of your own.

Must not know losses, data, optimizers beyond refusing one that came too early, or checkpoints.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fullshard.config.part import decode
from fullshard.contracts.world import World
from fullshard.dist import gradients as reduced
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.precision import ResolvedPrecision, check_word, resolve_precision
from fullshard.dist.shard import ShardPlan, fsdp_modules
from fullshard.dist.shard import shard as shard_module
from fullshard.dist.wrap import WrapPlan, find_blocks
from fullshard.errors import RecipeError, SetupError
from fullshard.kernels.float8 import Float8
from fullshard.own_loop.arguments import require_norm, require_wrap, whole_number
from fullshard.own_loop.ranks import init, require_joined
from fullshard.own_loop.values import OwnModule, values_of
from fullshard.recipe import Sharding

logger = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)
Wrapped = str | type[nn.Module] | int | Sequence[str | type[nn.Module]]
WHERE = "fullshard.shard"


def shard(
    model: Module,
    *,
    strategy: Literal["auto", "full", "grad_op", "hybrid", "none"] = "auto",
    precision: str = "fp32",
    wrap: Wrapped | None = None,
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
    compile: bool = False,
    cpu_offload: bool = False,
    forward_prefetch: bool = False,
    gradients: Literal["mean", "sum"] = "mean",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    seed: int = 0,
) -> Module:
    """Shards a module over the ranks, in place, and returns it. Build the optimizer afterwards.

    The keywords mean what they mean in a recipe's `sharding` and `precision`. Trained parameters are stored in fp32
    (`bf16-pure`: bf16), frozen ones as they are. `wrap` names what becomes a unit: classes, a number of parameters, or
    "whole"; by default the repeated blocks, found by structure. `gradients` are averaged over ranks, as in DDP and
    FSDP, or summed, for a loss that you have divided by a count over all ranks. Rank 0's values win if the ranks'
    differ; parameters on the meta device get fresh ones, from `seed`."""
    asked = decode(
        Sharding,
        {
            "strategy": strategy,
            "activation_checkpointing": activation_checkpointing,
            "compile": compile,
            "cpu_offload": cpu_offload,
            "forward_prefetch": forward_prefetch,
        },
        where=WHERE,
    )
    if gradients not in ("mean", "sum"):
        raise RecipeError(f"{WHERE}: gradients = {gradients!r}; allowed: mean, sum.")
    require_wrap(wrap)
    seed = whole_number(seed, f"{WHERE}: seed", least=0)
    require_shardable(model)
    world = init(device=device)
    values = values_of(model)
    plan = _plan(model, asked, world, _precision(precision, world), wrap)
    to_meta(model)
    family, mesh = OwnModule(), make_mesh(plan.layout, world)
    units = shard_module(model, plan, mesh, family=family, weights=values, device=world.device, seed=seed)
    for unit in fsdp_modules(model) if world.size > 1 and gradients == "mean" else ():
        unit.set_gradient_divide_factor(cast(float, None))  # FSDP's own: the number of ranks
    logger.info("%s units (%s), %s, gradients %s", len(units), plan.wrap.reason, plan.layout.describe(), gradients)
    return model


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
    require_norm(max_norm)
    require_sharded(model, "clip_grad_norm")
    holder: Any = SimpleNamespace(param_groups=[{"params": list(model.parameters())}])
    return reduced.clip_global_norm(cast(torch.optim.Optimizer, holder), ceiling=max_norm, scaled=True)


def _precision(word: str, world: World) -> ResolvedPrecision:
    try:
        return resolve_precision(check_word(word), world.device)
    except ValueError as error:
        raise RecipeError(f"{WHERE}: precision = {word!r}: {error}.") from None


def _plan(
    model: nn.Module, asked: Sharding, world: World, precision: ResolvedPrecision, wrap: Wrapped | None
) -> ShardPlan:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    return ShardPlan(
        wrap=_units(model, wrap),
        layout=choose_layout(asked.strategy, world, state_bytes=16 * trained + 4 * frozen),
        compute=precision.compute,
        storage=precision.storage,
        float8=Float8.of(precision.word),
        activation_checkpointing=asked.activation_checkpointing,
        compile=bool(asked.compile),
        cpu_offload=asked.cpu_offload,
        forward_prefetch=asked.forward_prefetch,
    )


def _units(model: nn.Module, wrap: Wrapped | None) -> WrapPlan:
    """What becomes a unit. Without a wish and without repeated blocks, the whole model is one."""
    try:
        if wrap is None:
            try:
                return find_blocks(model)
            except RecipeError:
                return find_blocks(model, whole=True)
        if wrap == "whole":
            return find_blocks(model, whole=True)
        if isinstance(wrap, int):
            return find_blocks(model, min_params=wrap)
        named = [wrap] if isinstance(wrap, str | type) else list(wrap)
        return find_blocks(model, classes=[each if isinstance(each, str) else each.__name__ for each in named])
    except RecipeError as error:
        text = str(error).replace("sharding.wrap.whole: true", 'wrap="whole"').replace("sharding.wrap.", "")
        text = text.replace(" Candidates: .", ' Leave it out, or use wrap="whole".')
        raise RecipeError(f"{WHERE}: wrap = {wrap!r}: {text.replace('sharding.wrap', 'wrap')}") from None


def require_shardable(model: nn.Module) -> None:
    """Raises for what cannot be sharded, in words that say what to do."""
    if not isinstance(model, nn.Module):
        raise SetupError(f"fullshard.shard takes an nn.Module, found {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise SetupError("The model is wrapped in DistributedDataParallel, which sharding replaces. Give model.module.")
    if hasattr(model, "_orig_mod"):
        raise SetupError(
            "The model is compiled as a whole, and cannot be cut. Give the model itself, with compile=True."
        )
    if fsdp_modules(model):
        raise SetupError("The model is sharded already.")
    named = dict(model.named_parameters())
    if not named:
        raise SetupError(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise SetupError(
                f"{name} has no shape yet: {type(model).__name__} has lazy modules. Run one batch through the model "
                "first, on every rank, and then shard it."
            )
        if not parameter.is_floating_point():
            raise SetupError(f"{name} is stored as {parameter.dtype}: only floating-point parameters can be sharded.")
    if early := _optimizer_of(model):
        raise SetupError(
            f"{early} was built before fullshard.shard, which replaces the parameters that it holds: it would never "
            "move a weight. Shard first, then build it: model = fullshard.shard(model); optimizer = "
            f"{early}(model.parameters(), ...)."
        )


def _optimizer_of(model: nn.Module) -> str | None:
    """The class of an optimizer that holds parameters of the model."""
    held = {id(parameter) for parameter in model.parameters()}
    for _ in range(2):
        found = [
            type(thing).__name__
            for thing in gc.get_objects()
            if issubclass(type(thing), torch.optim.Optimizer)
            and any(id(p) in held for group in getattr(thing, "param_groups", ()) for p in group["params"])
        ]
        if not found:
            return None
        gc.collect()  # one that nobody refers to any more does no harm
    return found[0]


def require_sharded(model: nn.Module, caller: str) -> None:
    """Raises if the model is not sharded, or its ranks are no longer connected."""
    if not isinstance(model, nn.Module) or not fsdp_modules(model):
        raise SetupError(
            f"fullshard.{caller}: the model is not sharded. Call model = fullshard.shard(model) first, then build the "
            "optimizer; one process without a launcher is enough."
        )
    require_joined()


def to_meta(model: nn.Module) -> None:
    """Empties the parameters, whose values are kept elsewhere; a tied one stays one object."""
    empty: dict[int, nn.Parameter] = {}
    held = list(model.parameters())  # so that no id is used twice
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in empty:
                    shape = torch.empty_like(parameter, device="meta")
                    empty[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
                module._parameters[key] = empty[id(parameter)]
    del held
