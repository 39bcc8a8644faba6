"""A model sharded as in a run, in a given precision, and what tests read from it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, Unit, shard
from fullshard.dist.world import join
from fullshard.dist.wrap import find_blocks

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
half = pytest.mark.parametrize("compute", HALVES.values(), ids=HALVES)


def spread(
    settings: dict[str, Any],
    compute: torch.dtype,
    *,
    recompute: str = "none",
    storage: torch.dtype = torch.float32,
    strategy: str = "full",
) -> tuple[Any, ShardPlan, list[Unit]]:
    """A model as a run spreads it over its ranks."""
    world = join(device="cpu", backend="gloo", timeout_s=60)
    family = decode(Family, settings, where="model")
    module = family.build(processor=None)
    layout = choose_layout(strategy, world, state_bytes=0)
    wrap = find_blocks(module, hints=family.blocks(module))
    plan = ShardPlan(wrap, layout, compute, storage, activation_checkpointing=recompute)
    units = shard(
        module,
        plan,
        make_mesh(layout, world),
        family=family,
        weights=family.weights(module),
        device=world.device,
        seed=0,
    )
    return module, plan, units


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in module.named_parameters() if isinstance(p, DTensor)}


def tokens(count: int = 512) -> torch.Tensor:
    return torch.randint(3, 99, (2, count // 2), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))


def dtypes_of(tree: Any) -> tuple[str, ...]:
    found = torch.utils._pytree.tree_leaves(tree)
    return tuple(str(leaf.dtype).removeprefix("torch.") for leaf in found if isinstance(leaf, torch.Tensor))
