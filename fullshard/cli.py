"""The command line: parses arguments, calls the library, turns errors into messages and exit codes.

A user's mistake prints without a traceback and ends with exit code 2. Must not import torch before a command needs it,
and must not know how anything is done.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command

from fullshard.check.arguments import check
from fullshard.commands import recipes
from fullshard.commands.dry_run import describe
from fullshard.commands.explain import explain
from fullshard.commands.other_tools import refuse_foreign
from fullshard.commands.recipe_arguments import (
    Devices,
    Gpus,
    Master,
    NodeRank,
    Nodes,
    Output,
    Preset,
    RecipeArguments,
    RecipeName,
    ResumeAnyway,
    Settings,
)
from fullshard.commands.verify import verify
from fullshard.config import families
from fullshard.errors import FullshardError, SetupError
from fullshard.evaluate.command import evaluate
from fullshard.explain import crash
from fullshard.explain.error_file import hand_over
from fullshard.export.command import export
from fullshard.generate.command import generate
from fullshard.prove.arguments import prove


class Commands(TyperGroup):
    """The commands, those of families included; these are imported only where one of them is asked for."""

    _has_all = False

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_those_of_families()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_those_of_families()
        command = super().get_command(ctx, cmd_name)
        for parameter in getattr(command, "params", ()):
            # An argument's name says what it takes; typer would add `<str>` and `<list[str]>` to the help.
            if isinstance(parameter, TyperArgument):
                setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010
        return command

    def _add_those_of_families(self) -> None:
        """`commands/sample.py` of a family has a function `sample`."""
        if self._has_all:
            return
        for name, module in families.commands().items():
            if name in self.commands:
                raise SetupError(f"{module} brings a command that fullshard has itself: {name}. Rename the file.")
            self.add_command(_command(getattr(importlib.import_module(module), name)), name)
        self._has_all = True

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_foreign(args, self.list_commands(ctx) if args and args[0] not in self.commands else self.commands)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **more: Any) -> Any:
        """Prints a FullshardError without a traceback. The same for a rank that only lost another one: its launcher
        says what happened to that one, and the traceback is in the crash folder."""
        try:
            return super().main(*args, **more)
        except Exception as error:
            if isinstance(error, FullshardError) and not crash.lost_a_rank(error):
                tell(error)
                sys.exit(error.exit_code)
            if not crash.is_told_elsewhere(error):
                raise
            typer.echo(f"Rank {os.environ.get('RANK', '0')} lost another rank.", err=True)
            sys.exit(1)


def _command(function: Callable[..., Any]) -> Any:
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(context_settings={"help_option_names": ["--help", "-h"]})(function)
    return get_command(single)


app = typer.Typer(
    cls=Commands,
    name="fullshard",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Train models with PyTorch FSDP: one recipe, one command, from a laptop to many nodes.",
)


def main() -> None:
    """The `fullshard` command."""
    # As under `python -m`: `kind: my_parts.Thing` finds my_parts.py in the current folder.
    sys.path.insert(0, os.getcwd())
    # Read when torch is imported: its C++ would print warnings past every logger, and a stack when a node leaves first.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _follow_launcher()
    app(prog_name="fullshard")


def _follow_launcher() -> None:
    """A rank that fullshard has started ends with its launcher; processes that the rank starts are its own matter."""
    from fullshard.contracts.launcher import STARTED_BY
    from fullshard.launch.signals import end_with

    if launcher := os.environ.pop(STARTED_BY, None):
        end_with(int(launcher))


def tell(error: FullshardError) -> None:
    """Prints a user's mistake, once: ranks beyond 0 hand theirs to the launcher, which prints it if it was first."""
    rank, handed = os.environ.get("RANK", "0"), hand_over(str(error))
    if rank == "0" or not handed:
        where = f"rank {rank}: " if rank != "0" else ""
        typer.echo("\n".join([f"Error: {where}{error}", *getattr(error, "__notes__", [])]), err=True)


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
def _whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    recipe: RecipeName,
    settings: Settings = None,
    devices: Devices = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    preset: Preset = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH", help="Continue from the last checkpoint, start over, or continue from PATH."
        ),
    ] = "auto",
    resume_anyway: ResumeAnyway = False,
    output: Output = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every value in force and the step arithmetic; start nothing.")
    ] = False,
) -> None:
    """Train what RECIPE describes.

    Settings follow the recipe: optimizer.lr=3e-4 or --optimizer.lr 3e-4, log.sinks=[wandb], --sharding.cpu-offload or
    --no-sharding.cpu-offload. Hyphens and underscores are the same. --fp16 and --bf16 are short for precision=fp16 and
    precision=bf16. The command line wins over the recipe, the recipe over the preset, the preset over the defaults.

    fullshard starts the ranks itself. Under torchrun, accelerate launch or srun it joins the ranks that are there.

    Exit codes: 0 done; 2 a mistake in the recipe, the data or the setup; 3 stopped by a numerical guard; 75 preempted
    after a save, run the same command again to continue.
    """
    asked = RecipeArguments("train", recipe, settings, devices, gpus, nodes, output, preset, node_rank, master)
    reading, launch = asked.read(), asked.launch()
    from fullshard import run

    if launch.launcher != "none" and not dry_run:
        raise typer.Exit(run.join(reading, resume=resume, anyway=resume_anyway))
    ranks = asked.ranks(reading.recipe.topology, launch)
    if not dry_run:
        raise typer.Exit(run.train(reading, resume=resume, ranks=ranks, anyway=resume_anyway))
    if launch.rank == 0:
        typer.echo(describe(reading, ranks=ranks))


for _function in (check, prove, verify, export, generate, explain, evaluate):
    _takes_settings = _function not in (verify, export, generate)
    app.command(context_settings={"ignore_unknown_options": True} if _takes_settings else None)(_function)
app.add_typer(recipes.recipes, name="recipes")
app.command()(recipes.presets)
