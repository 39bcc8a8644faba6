"""The command line: parses arguments, calls the library, turns errors into messages and exit codes.

A user's mistake prints without a traceback and ends with exit code 2. Must not import torch before a command needs it,
and must not know how anything is done.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from fullshard.autopsy.command import autopsy
from fullshard.check.arguments import check
from fullshard.commands import recipe_arguments as options
from fullshard.commands import recipes
from fullshard.commands.dry_run import describe
from fullshard.commands.explain import explain
from fullshard.commands.group import Commands
from fullshard.commands.verify import verify
from fullshard.dialects import import_files
from fullshard.dialects.command_line import option_names
from fullshard.drills.command import prove
from fullshard.evaluate.command import evaluate
from fullshard.export.command import export
from fullshard.fast import first_line
from fullshard.generate.command import generate
from fullshard.plan.command import plan
from fullshard.profile.option import WithProfile, passed_on
from fullshard.report.command import report
from fullshard.report.on_finish import OnFinish, at_the_end
from fullshard.runs.command import runs
from fullshard.submit.command import submit

app = typer.Typer(
    cls=Commands,
    name="fullshard",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["--help", "-h"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
    help="Train models with PyTorch FSDP2: one recipe, one command, from a laptop to many nodes.",
)


def main() -> None:
    """The `fullshard` command."""
    # As under `python -m`: `kind: my_parts.Thing` finds my_parts.py in the current folder.
    sys.path.insert(0, os.getcwd())
    # Set before torch is imported: its C++ code prints warnings past every logger, and a stack if a node leaves first.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _follow_launcher()
    app(prog_name="fullshard")


def _follow_launcher() -> None:
    """A rank that fullshard started ends with its launcher; the rank itself ends the processes it starts."""
    from fullshard.contracts.launcher import STARTED_BY
    from fullshard.launch.signals import end_with

    if launcher := os.environ.pop(STARTED_BY, None):
        end_with(int(launcher))


def _version(asked: bool) -> None:
    if asked:
        versions = []
        for package in ("fullshard", "torch"):
            try:
                versions.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                versions.append(f"{package} (not installed)")
        typer.echo(", ".join(versions))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def _aliases(asked: bool) -> None:
    if asked:
        from fullshard.dialects.report import aliases

        typer.echo(aliases())
        raise typer.Exit


@app.command(cls=WithProfile, context_settings={"ignore_unknown_options": True})
@options.takes_recipe()
def train(
    asked: options.RecipeArguments,
    resume: Annotated[
        str,
        typer.Option(
            *("--resume", *option_names("--resume")),
            metavar="auto|never|PATH",
            help="Continue from the last checkpoint, start over, or continue from PATH.",
        ),
    ] = "auto",
    resume_anyway: options.ResumeAnyway = False,
    on_finish: OnFinish = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every value in force and the step arithmetic; start nothing.")
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option("--profile", min=1, metavar="[STEPS]", help="Show where the time of 5, or STEPS, steps goes."),
    ] = None,
    help_aliases: Annotated[
        bool,
        typer.Option("--help-aliases", callback=_aliases, is_eager=True, help="Print the flags of other trainers."),
    ] = False,
) -> None:
    """Train what RECIPE describes.

    Settings follow the recipe: optimizer.lr=3e-4 or --optimizer.lr 3e-4, log.sinks=[wandb], --sharding.cpu-offload or
    --no-sharding.cpu-offload. Hyphens and underscores are the same. --fp16 and --bf16 are short for precision=fp16 and
    precision=bf16. The command line wins over the recipe, the recipe over the preset, the preset over the defaults.

    fullshard starts the ranks itself. Under torchrun, accelerate launch or srun it joins the ranks that they started.

    Exit codes: 0 done; 2 a mistake in the recipe, the data or the setup; 3 stopped by a numerical guard; 75 preempted
    after a save, run the same command again to continue.
    """
    reading, launch = asked.read(), asked.launch()
    first_line.say(reading.recipe, silent=dry_run or launch.rank != 0)
    from fullshard import run

    resume = {"true": "auto", "false": "never"}.get(resume.lower(), resume)  # --resume-from-checkpoint True
    finish = functools.partial(at_the_end, on_finish, reading.recipe.folder)
    if launch.launcher != "none" and not dry_run:
        with passed_on(profile), finish(writes=launch.rank == 0):
            raise typer.Exit(run.join(reading, resume=resume, anyway=resume_anyway))
    ranks = asked.ranks(reading.recipe.topology, launch, wait=not dry_run)
    if not dry_run:
        with passed_on(profile), finish(writes=ranks.node_rank == 0):
            raise typer.Exit(run.train(reading, resume=resume, ranks=ranks, anyway=resume_anyway))
    if launch.rank == 0:
        typer.echo(describe(reading, ranks=ranks))


@app.command("import")
def _import(files: import_files.Files, output: import_files.To = None) -> None:
    """Translate files of other trainers into a recipe.

    FILE belongs to accelerate, the Hugging Face Trainer, axolotl, torchtune, LLaMA-Factory, torchtitan, Lightning or
    DeepSpeed, or is a plain training YAML. Every key is shown with what it is here. FILE itself is never changed.
    """
    from fullshard.recipes.read import read

    import_files.run(files, output, check=read)


for _function in (check, plan, prove, submit, verify, export, generate, explain, evaluate, autopsy, runs, report):
    _takes_settings = _function not in (verify, export, generate, autopsy, runs, report)
    app.command(context_settings={"ignore_unknown_options": True} if _takes_settings else None)(_function)
app.add_typer(recipes.recipes, name="recipes")
app.command()(recipes.presets)
