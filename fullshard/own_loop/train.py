"""`fullshard.train`: a recipe trained from Python, in a script, under a launcher or in a notebook.

Where the ranks are this process, the model stays alive after the run. Must not know how a run works.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.part import plain
from fullshard.contracts.caller import Caller
from fullshard.dialects import engine_nodes
from fullshard.dist import env
from fullshard.errors import EXIT_DONE, EXIT_PREEMPTED, FullshardError, RecipeError, SetupError
from fullshard.launch import signals
from fullshard.own_loop.arguments import require_settings
from fullshard.own_loop.notebook import shown_in_notebook
from fullshard.own_loop.result import Result, of
from fullshard.own_loop.staged import train_stages
from fullshard.recipe import Recipe
from fullshard.recipes.read import Reading, read
from fullshard.run import execute, read_result
from fullshard.run import train as start
from fullshard.setup import on_ranks
from fullshard.submit import ray_worker

if TYPE_CHECKING:
    from torch import nn


def train_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *overrides: str,
    preset: str | Sequence[str] = (),
    stage: str | None = None,
    resume: str | Path = "auto",
    resume_anyway: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Trains a recipe, and returns its progress, best checkpoint, metrics and model.

    `recipe` is what `fullshard.read` returns or takes: a YAML path, a built-in name or a mapping, with settings such as
    "optimizer.lr=3e-4" on top. Starts the ranks that the recipe asks for, unless this process is one of them already.
    A run that was stopped continues where it was saved; `resume` is what `--resume` takes. A recipe with stages gives
    the result of the last one, with those of all in `stages`, by name; `stage` trains one, by name or number.

    A program that has initialised torch.distributed is joined, and its process group is left as it was. `stop` is asked
    once per step in each such process, and in one without other ranks: if it returns True, all ranks save and stop. In
    a worker of Ray Train, numbers and checkpoints are reported to Ray."""
    require_settings(overrides, resume=resume, resume_anyway=resume_anyway)
    resume = str(resume)
    reading = _reading(recipe, overrides, preset)
    if reading.recipe.stages:

        def train(each: Reading, how: str) -> Result:
            return _train(each, resume=how, anyway=resume_anyway, stop=stop)

        return train_stages(reading, train, resume=resume, only=stage, anyway=resume_anyway)
    if stage is not None:
        raise RecipeError(f"stage = {stage!r}: {reading.source} has no stages. Leave it out.")
    return _train(reading, resume=resume, anyway=resume_anyway, stop=stop)


def _train(reading: Reading, *, resume: str, anyway: bool, stop: Callable[[], bool] | None) -> Result:
    """Trains a recipe, or one stage, on the ranks that it asks for."""
    from fullshard.own_loop.ranks import NCCL, numbered_by_group, restored

    topology, asked = reading.recipe.topology, stop or bool
    with signals.in_library(), shown_in_notebook(), restored(*NCCL), numbered_by_group(reading.recipe) as connected:
        if connected:
            return _in_this_process(reading, resume=resume, anyway=anyway, connected=True, stop=asked)
        number, place = engine_nodes.meeting(
            os.environ, nodes=topology.nodes, chosen=True, timeout_s=topology.timeout_s
        )
        ranks = on_ranks.ranks_of(topology, node_rank=number, master=place)
        if env.detect(os.environ).world > 1 or ranks.per_node * ranks.nodes == 1:
            return _in_this_process(reading, resume=resume, anyway=anyway, connected=False, stop=asked)
        if stop is not None:
            raise SetupError(
                f"stop = {stop!r} cannot be asked: this call starts {ranks.per_node * ranks.nodes} processes of its "
                "own. Start this program on each rank (torchrun), or send SIGTERM to it, which saves and stops the run."
            )
        try:
            code = start(reading, resume=resume, ranks=ranks, anyway=anyway)
        except SystemExit as end:  # a signal before the ranks were there
            if end.code != _INTERRUPTED:
                raise
            code = _INTERRUPTED
    folder = reading.recipe.folder
    if code == _INTERRUPTED:
        raise KeyboardInterrupt(
            "Stopped before the run could save, or by a second Ctrl-C: what is in the folder of the run stays as it "
            "is. The same call starts it again, from its last checkpoint if there is one."
        )
    if code not in (EXIT_DONE, EXIT_PREEMPTED):
        raise FullshardError(f"The run in {folder} failed with exit code {code}; see the messages of its ranks above.")
    return of(read_result(folder), reading.recipe)


_INTERRUPTED = 128 + signal.SIGINT


def _reading(recipe: Any, overrides: tuple[str, ...], preset: str | Sequence[str]) -> Reading:
    """The recipe, without a command line to repeat: a hint to run it again is a line of Python."""
    if isinstance(recipe, Recipe):
        if not overrides and not preset:
            return Reading(recipe, "", "a recipe in Python")
        if recipe.stages:
            raise RecipeError(
                "Settings of a recipe with stages go to fullshard.read, which reads each stage with them."
            )
        recipe = plain(recipe)
    if not isinstance(recipe, str | Path | Mapping) or recipe == "":
        raise RecipeError(
            f"fullshard.train takes a recipe, found {recipe!r}. Give a path, a built-in name, a mapping, or what "
            "fullshard.read returns."
        )
    return replace(read(recipe, *overrides, preset=preset), name="", typed=None)


def _in_this_process(
    reading: Reading, *, resume: str, anyway: bool, connected: bool, stop: Callable[[], bool]
) -> Result:
    """One rank of the run. With several, the process group stays: the sharded model needs it. One that the program made
    is left to it."""
    from fullshard.dist import reduce
    from fullshard.own_loop.ranks import stay_joined

    kept: list[nn.Module] = []

    def keep(module: nn.Module) -> None:
        kept.append(module)
        if reduce.place()[0] > 1 and not connected:
            stay_joined()

    caller = Caller(keep, stop_asked=stop)
    if ray_worker.in_worker():
        ray_worker.refuse_lost_folder(reading.recipe)
        with ray_worker.reported(reading.recipe, caller) as with_ray:
            again = ray_worker.resume_after_restart(resume)
            ended = execute(reading, resume=again, anyway=anyway, caller=with_ray)
    else:
        ended = execute(reading, resume=resume, anyway=anyway, caller=caller)
    return of(ended, reading.recipe, module=kept[0] if kept else None)
