"""This process as one rank of a run: checks the environment, prepares the inputs, connects the ranks, compares them.

Must not build the model on its device, nor know what the rank does next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

from fullshard.config.part import plain
from fullshard.contracts.world import World
from fullshard.dialects import launch_variables
from fullshard.dist import env
from fullshard.dist.env import Launch
from fullshard.dist.precision import resolve_precision
from fullshard.errors import FullshardError
from fullshard.faults.restarts import unused
from fullshard.log.console import Console
from fullshard.proofs import same_run
from fullshard.proofs.same_run import Subject
from fullshard.recipe import Recipe
from fullshard.recipes.read import Reading
from fullshard.setup import on_ranks
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import prepare_inputs

Preflight = Callable[[RunInputs, Launch, Console], None]
"""What is checked on one rank of each node before ranks meet; raises what would stop the run later."""


@contextlib.contextmanager
def as_rank(
    reading: Reading,
    *,
    silent: bool = False,
    preflight: Preflight | None = None,
    options: Mapping[str, str] | None = None,
) -> Iterator[tuple[RunInputs, World, Console]]:
    """One rank of a run. All ranks compare what they must have in common, the command's `options` included. Without a
    `preflight` the caller checks and compares."""
    recipe, launch = reading.recipe, env.detect(os.environ)
    with on_ranks.as_rank(recipe.topology, silent=silent) as (console, meet):
        foreign = launch_variables.notes(launch.world) if launch.launcher == "accelerate" else []
        for line in [*reading.overridden, *foreign, *unused(recipe.topology.restarts)]:
            console.note(line)
        inputs = prepare_inputs(recipe, world_size=launch.world, console=console)
        if preflight is not None and launch.local_rank == 0:
            preflight(inputs, launch, console)
        world = meet()
        if preflight is not None and world.size > 1:
            same_run.require(compared(recipe, inputs, world, options or {}))
        yield inputs, world, console


def compared(recipe: Recipe, inputs: RunInputs, world: World, options: Mapping[str, str]) -> list[Subject]:
    """What this rank must have in common with all others."""
    try:
        precision = resolve_precision(recipe.precision, world.device).word
    except FullshardError as error:  # if all ranks have it, building the model raises it again
        precision = str(error)
    realised = {"the device": world.device.type, "the resolved precision": precision, **options}
    return same_run.subjects(
        plain(recipe),
        realised=realised,
        module=inputs.module,
        config=recipe.model.config_of(inputs.module),
        data=inputs.data,
        identity=inputs.identity,
        processor=inputs.processor,
    )
