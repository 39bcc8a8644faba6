"""The engine's proofs of one architecture, in this process alone: built and sharded as a run would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def proofs_of(
    architecture: str,
    compute: torch.dtype,
    *,
    packed: bool,
    overrides: dict[str, Any] | None = None,
    objective: Any = None,
    change: Any = None,
) -> list[str]:
    """What is proven of a fresh model in size tiny; `change` is given the sharded module first."""
    from fullshard.contracts.data import Collator
    from fullshard.data.loader import Loader
    from fullshard.dist.mesh import choose_layout, make_mesh
    from fullshard.dist.shard import ShardPlan, shard
    from fullshard.dist.world import join
    from fullshard.dist.wrap import find_blocks
    from fullshard.families.language.encoders.text import Text
    from fullshard.families.language.models.hf import Hf
    from fullshard.families.language.objectives.causal_lm import CausalLM
    from fullshard.proofs.before_step_one import Probe, prove

    world = join(device="cpu", backend="gloo", timeout_s=60)
    family = Hf(architecture=architecture, size="tiny", overrides=overrides or {})
    module = family.build(processor=None)
    layout = choose_layout("full", world, state_bytes=0)
    plan = ShardPlan(find_blocks(module), layout, compute)
    shard(module, plan, make_mesh(layout, world), family=family, weights=None, device=world.device, seed=0)
    if change is not None:
        change(module)
    ids = np.random.default_rng(0).integers(3, 97, 48).astype(np.int32)
    loader = Loader(
        [{"input_ids": ids, "labels": np.append(ids[1:], -100).astype(np.int32)}], Collator(Text()), per_device=1
    )
    probe = Probe(objective or CausalLM(), module, {}, compute, world.device, loader.collate)
    return prove(probe, loader.long_sample, packed=packed, longest=64)
