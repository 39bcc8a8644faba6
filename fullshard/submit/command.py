"""`fullshard submit`: reads and checks a recipe, writes the files of a job beside the run, and hands it to an engine.

Nothing is written before the recipe, the options, the model and the data are found to be in order. Must not know any
engine, nor import torch before it is called.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.commands import recipe_arguments as options
from fullshard.errors import RecipeError, SetupError
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import Reading
    from fullshard.submit.engine import Engine, Job, Request


def _help_on(name: str | None) -> None:
    if name is not None:
        from fullshard.submit.options import describe, engine_class

        typer.echo(describe(engine_class(name)))
        raise typer.Exit


@options.takes_recipe(without=("gpus", "node_rank", "master"))
def submit(
    asked: options.RecipeArguments,
    on: Annotated[
        str,
        typer.Option("--on", metavar="ENGINE", help="What runs the job: slurm, kubernetes, ray, or your own class."),
    ],
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Open the data and build the empty model here, before submitting."),
    ] = True,
    help_on: Annotated[
        str | None,
        typer.Option(
            "--help-on", metavar="ENGINE", callback=_help_on, is_eager=True, help="Print the options of an engine."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files of the job; write and submit nothing.")
    ] = False,
) -> None:
    """Train what RECIPE describes on a cluster.

    Reads and checks the recipe, writes the files of the job to submit-1 in the run folder, submits it, and says how to
    look at it and how to cancel it. --nodes and --devices are the machines and the ranks on each. Options of the
    engine (--help-on slurm prints them) and settings of the recipe follow: --time 4:00:00 optimizer.lr=3e-4.

    Exit codes: 0 submitted; 2 a mistake in the recipe, the data, the options or the setup, and nothing is submitted.
    """
    from fullshard.submit.options import engine_class, option_names, passed_names, take

    kind = engine_class(on, taken=asked.options)
    engine, settings = take(kind, asked.settings or [])
    names, also = (*asked.options, *option_names(kind)), tuple(passed_names(kind))
    reading = replace(asked, settings=settings, options=names, also=also).read()
    folder = _next_folder(reading.recipe)
    request = _request(reading, folder, stage=asked.stage, restarts=not engine.restarts_ranks)
    job = engine.job(request)
    stages = _stages(reading.recipe, asked.stage)
    for each in stages:
        _check_batch(each, engine)
    if check and engine.sees_our_files:
        _check(stages[0])
    if dry_run:
        _print(job, request)
    else:
        _submit(engine, job, request, on=on)


def _next_folder(recipe: Recipe) -> Path:
    """The folder of this job, numbered: a job that still waits keeps its own files."""
    taken = [int(path.name.partition("-")[2]) for path in recipe.folder.glob("submit-*") if path.name[7:].isdigit()]
    return (recipe.folder / f"submit-{max(taken, default=0) + 1}").absolute()


def _request(reading: Reading, folder: Path, *, stage: str | None, restarts: bool) -> Request:
    """The job; `restarts`: whether its ranks read `topology.restarts`."""
    from fullshard.recipes.read import hand_on
    from fullshard.submit.engine import Request

    with tempfile.TemporaryDirectory(prefix="fullshard-") as name:
        merged = Path(name) / "recipe.yaml"
        hand_on(reading if restarts else replace(reading, recipe=_without_restarts(reading.recipe)), merged)
        return Request(reading, folder, merged.read_text(encoding="utf-8"), stage=stage)


def _without_restarts(recipe: Recipe) -> Recipe:
    topology = recipe.topology.model_copy(update={"restarts": None})
    stages = [_without_restarts(each) for each in recipe.stages] if recipe.stages else recipe.stages
    return recipe.model_copy(update={"topology": topology, "stages": stages})


def _stages(recipe: Recipe, stage: str | None) -> list[Recipe]:
    """What the job trains: the stages of a recipe, or the one that was asked for, or the recipe itself."""
    from fullshard.stages.in_turn import named, stages_of

    if not recipe.stages:
        return [recipe]
    return [named(recipe, stage).recipe] if stage else [each.recipe for each in stages_of(recipe)]


def _check_batch(recipe: Recipe, engine: Engine) -> None:
    """Raises if a step cannot be split evenly over the ranks of the job. Where their number is not known, every node
    has at least one."""
    from fullshard.setup.step_plan import plan_steps

    known = engine.worlds(recipe.topology)
    for world in known or [recipe.topology.nodes]:
        try:
            plan_steps(recipe.batch, recipe.duration, num_rows=1, world=world)
        except RecipeError as error:
            case = f"The job may start with {counted(world, 'rank')}. " if len(known) > 1 else ""
            case = case if known else f"{counted(world, 'node')} with one rank each, or more. "
            raise RecipeError(f"{case}{error}") from None


def _check(recipe: Recipe) -> None:
    """Opens the data, fetches the model and builds it empty: mistakes show now, not after hours in a queue. Of
    several stages only the first: the others start from weights that do not exist yet."""
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.setup.run_inputs import OpenSources, build_module, find_best, find_processor

    with libraries.route(Console(silent=True)):
        sources = OpenSources(recipe)
        module = build_module(recipe, find_processor(recipe, sources))
        find_best(recipe, module)


def _print(job: Job, request: Request) -> None:
    """The files as they would be written. What is said about them goes to standard error, so that they can be piped."""
    for name, text in job.files.items():
        typer.echo(f"{request.folder / name}:", err=True)
        typer.echo(text, nl=not text.endswith("\n"))
    typer.echo(f"Nothing is written or submitted. Without --dry-run: {shlex.join(job.submit)}", err=True)


def _submit(engine: Engine, job: Job, request: Request, *, on: str) -> None:
    files = {"recipe.yaml": request.recipe_text, **job.files}
    _write(request.folder, files)
    try:
        done = engine.submit(job, request.folder)
    except SetupError as error:
        raise SetupError(f"{error}\nThe job files are in {request.folder}.") from None
    typer.echo(f"fullshard: {request.reading.recipe.name} on {on}")
    rows = {"wrote": "\n".join(str(_short(request.folder / name)) for name in files)}
    rows |= {"submitted": f"job {done.id}, with {shlex.join(job.submit)}", **done.commands}
    width = max(map(len, rows)) + 2
    for label, text in rows.items():
        for place, line in enumerate(text.splitlines()):
            typer.echo(f"  {'' if place else label:<{width}}{line}")


def _short(path: Path) -> Path:
    """Relative to the current folder, if it is below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"{folder} cannot be written ({error.strerror or error}). Choose a folder that you may write to, and that "
            "every node sees: --output DIR."
        ) from None
