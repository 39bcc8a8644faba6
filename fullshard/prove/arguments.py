"""The arguments of `fullshard prove`. Must not know how anything is proven, nor import torch before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.commands import recipe_arguments as options
from fullshard.commands.options import json_alone


def prove(
    recipe: options.RecipeName,
    settings: options.Settings = None,
    devices: options.Devices = None,
    gpus: options.Gpus = None,
    preset: options.Preset = None,
    output: options.Output = None,
    cases: Annotated[
        str | None, typer.Option(metavar="LIST", help="Some of resume,world,split,strategy instead of all.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of the runs, and say where they are.")] = False,
    as_json: options.AsJson = False,
    as_rank: Annotated[bool, typer.Option("--as-rank", hidden=True)] = False,
) -> None:
    """Prove that RECIPE resumes exactly, in a few short runs of it.

    Runs the recipe for six steps: straight; killed (SIGKILL), resumed, killed again and resumed again; in other
    micro-batches; on another number of ranks; with another sharding strategy. Compares the samples, losses and gradient
    norms of every step, and the weights at the end: bit by bit where resumed, within rounding in the others. Names the
    first step and the tensor that differ. Needs disk space for a few checkpoints, and frees it afterwards.

    Exit codes: 0 no drift; 2 a mistake in the recipe, the data or the setup; 3 drift.
    """
    from fullshard.prove import command

    if as_rank:
        from fullshard.prove.rank import run_one

        raise typer.Exit(run_one(Path(recipe)))
    asked = options.RecipeArguments("prove", recipe, settings, devices, gpus, output=output, preset=preset)
    with json_alone(as_json):
        reading = asked.read()
    command.refuse_launcher(asked.launch().launcher)
    how = command.ProveOptions(cases, keep, as_json)
    raise typer.Exit(command.prove(reading, command.own_ranks(reading.recipe.topology), how))
