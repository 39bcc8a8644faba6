"""The arguments of `fullshard check`. Must not know what is checked, nor import torch before it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.commands import recipe_arguments as options
from fullshard.commands.options import json_alone
from fullshard.errors import FullshardError, SetupError

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Ranks


def check(
    recipe: options.RecipeName,
    settings: options.Settings = None,
    devices: options.Devices = None,
    gpus: options.Gpus = None,
    nodes: options.Nodes = None,
    node_rank: options.NodeRank = None,
    master: options.Master = None,
    preset: options.Preset = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|never|PATH", help="As for train: say what it continues from and what has changed."),
    ] = None,
    resume_anyway: options.ResumeAnyway = False,
    output: options.Output = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look only: start no ranks, and skip the trial of the model.")
    ] = False,
    units: Annotated[bool, typer.Option("--units", help="Print every FSDP unit with its dtypes.")] = False,
    sample: Annotated[int | None, typer.Option(metavar="N", help="Print sample N token by token, and exit.")] = None,
    as_json: options.AsJson = False,
    trial_in: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check everything that RECIPE needs before it costs GPU time.

    Looks at the environment, the recipe, the model and the data; then starts the ranks, takes the longest batch
    forward and backward on each, and writes and reads a checkpoint in the real place. Everything is cleaned up.
    Takes the settings and options of `fullshard train`, and ends with the exact command to run.

    Exit codes: 0 the setup is correct; 2 it is not, and every problem is listed.
    """
    from fullshard.check import command

    asked = options.RecipeArguments(
        "check", recipe, settings, devices, gpus, nodes, output, preset, node_rank, master, resume
    )
    how = command.CheckOptions(quick, units, as_json, resume=resume, resume_anyway=resume_anyway)
    try:
        with json_alone(how.as_json):
            reading = asked.read()
            again = reading.typed.again() if reading.typed else ""
            how = replace(how, command=f"{again} --resume-anyway" if resume_anyway else again)
        launch = asked.launch()
        if trial_in is not None:
            raise typer.Exit(command.trial_rank(reading, trial_in))
        if sample is not None:
            raise typer.Exit(command.show_sample(reading, sample, as_json=as_json))
    except FullshardError as mistake:
        raise typer.Exit(command.refused(mistake, how)) from None
    ranks: Ranks | SetupError
    try:
        ranks = asked.ranks(reading.recipe.topology, launch)
    except SetupError as mistake:
        ranks = mistake
    launched = launch.launcher != "none" and not isinstance(ranks, SetupError)
    raise typer.Exit(command.check(reading, ranks, how, rank=launch.rank if launched else None))
