"""From the recipe to a saver: where checkpoints go, what they leave out, whether they are written in the background.

Must not know how anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.background import Background, staging_bytes
from fullshard.checkpoint.saver import Saver
from fullshard.checkpoint.sharded import Sharded
from fullshard.checkpoint.tensors import all_tensors, materialise_state
from fullshard.checkpoint.write import Target
from fullshard.dist import reduce
from fullshard.dist.average import Average
from fullshard.dist.world import World
from fullshard.errors import RecipeError, SetupError
from fullshard.ground import Ground
from fullshard.host import memory_left
from fullshard.log.console import Console
from fullshard.log.words import size
from fullshard.models.base import Weights
from fullshard.part import plain
from fullshard.recipe import Recipe

TIMEOUT_S = 1800.0
"""How long ranks wait at least for each other in a save: a slow disk is no reason to stop a run."""
SPARE = 0.1
"""Share of the host memory left that staging leaves alone."""


def frozen_in(recipe: Recipe, module: nn.Module, weights: Weights | None) -> frozenset[str]:
    """Frozen parameters that can be read again from the model's own folder; a checkpoint they came from may go."""
    stored = weights.names() if weights and recipe.model.stored_in() is not None else set()
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad and name in stored)


def make_saver(
    recipe: Recipe,
    ground: Ground,
    world: World,
    *,
    module: nn.Module,
    left_out: frozenset[str],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    average: Average | None,
    console: Console,
) -> Saver:
    """A saver without a background: that comes with `go_background`, when the optimizer's state is known."""
    if recipe.checkpoint.format == "full" and recipe.optimizer.kind() == "adamw_8bit":
        raise RecipeError(
            "checkpoint.format = full cannot hold the state of optimizer.kind = adamw_8bit, which is quantised slice "
            "by slice. Use checkpoint.format: sharded, or optimizer.kind: adamw."
        )
    # A GPU's host has cores to spare beside the one that feeds it.
    sharded = Sharded(threads=4 if world.device.type == "cuda" else 1)
    target = Target(recipe.checkpoints, recipe.checkpoint.keep, None if recipe.checkpoint.format == "full" else sharded)
    return Saver(
        folder=recipe.folder,
        target=target,
        export_best=recipe.checkpoint.export == "best",
        model=module,
        optimizer=optimizer,
        scaler=scaler,
        facts={"identity": ground.identity, "recipe": plain(recipe)},
        left_out=left_out,
        family=recipe.model,
        processor=ground.processor,
        world=world,
        console=console,
        average=average,
        group=reduce.host_group(max(TIMEOUT_S, recipe.topology.timeout_s)),
    )


def go_background(saver: Saver, wanted: bool | None) -> None:
    """Lets the saver write in the background where that is wanted and host memory allows; all ranks decide alike."""
    world = saver.world
    if wanted is False or (wanted is None and world.device.type != "cuda"):
        return
    to_come = _state_to_come(saver)
    need = staging_bytes(to_come)
    per_node: dict[int, list[int]] = {}
    for node, each, left in reduce.gather_objects((world.rank // world.local_size, need, memory_left())):
        total, least = per_node.get(node, [0, left])
        per_node[node] = [total + each, min(least, left)]
    short = [(total, left) for total, left in per_node.values() if total > (1 - SPARE) * left]
    if short:
        total, left = max(short)
        text = f"Saving in the background needs {size(total)} of host memory on a node, and {size(left)} are left there"
        if wanted:
            raise SetupError(
                f"checkpoint.asynchronous = true: {text}. Set it to false, use more nodes, or free memory."
            )
        saver.console.warn(f"{text}: training waits for every save.")
        return
    saver.background = Background(saver.optimizer, device=world.device)
    # Before the first step: pinning takes seconds.
    saver.background.reserve(need)
    saver.prepare(to_come)


def _state_to_come(saver: Saver) -> dict[str, Any]:
    """The tensors of a save, also before the optimizer has made its state: that is made, seen, and let go again."""
    fresh = not saver.optimizer.state
    if fresh:
        materialise_state(saver.optimizer)
    tensors = all_tensors(saver.model, saver.optimizer, left_out=saver.left_out)
    if fresh:
        saver.optimizer.state.clear()
    return tensors
