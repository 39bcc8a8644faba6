"""The arguments of `fullshard check`. Must not know what is checked, nor import torch before a check starts."""

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


@options.takes_recipe()
def check(
    asked: options.RecipeArguments,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|never|PATH", help="As for train: show what it would continue from and what has changed."
        ),
    ] = None,
    resume_anyway: options.ResumeAnyway = False,
    quick: Annotated[bool, typer.Option("--quick", help="Start no ranks, and skip the trial of the model.")] = False,
    units: Annotated[bool, typer.Option("--units", help="Print every FSDP unit with its dtypes.")] = False,
    sample: Annotated[int | None, typer.Option(metavar="N", help="Print sample N token by token, and exit.")] = None,
    as_json: options.AsJson = False,
    trial_in: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check everything that RECIPE needs before it costs GPU time.

    Looks at the environment, the recipe, the model and the data; then starts the ranks, runs the longest batch
    forward and backward on each, and writes and reads a checkpoint where training would. Cleans up afterwards.
    Takes the settings and options of `fullshard train`, and ends with the exact command to run.

    Exit codes: 0 the setup is correct; 2 it is not, and every problem is listed.
    """
    from fullshard.check import command

    asked = replace(asked, resume=resume)
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
        ranks = asked.ranks(reading.recipe.topology, launch, wait=False)
    except SetupError as mistake:
        ranks = mistake
    launched = launch.launcher != "none" and not isinstance(ranks, SetupError)
    raise typer.Exit(command.check(reading, ranks, how, rank=launch.rank if launched else None))
