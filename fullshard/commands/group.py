"""The commands as one group: those of families included, errors as messages and exit codes.

A user's mistake prints without a traceback and ends with exit code 2. Must not know any command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command

from fullshard.config import families
from fullshard.errors import FullshardError, SetupError
from fullshard.explain import crash
from fullshard.explain.error_file import hand_over

_TRAIN, _GENERATE = "fullshard train RECIPE", "fullshard generate RUN --prompt TEXT"
ELSEWHERE = {
    "merge": "fullshard export RUN OUT --as merged",
    "convert": "fullshard export RUN OUT",
    "save": "fullshard export RUN OUT",
    **dict.fromkeys(("eval", "test", "validate", "benchmark"), "fullshard evaluate RUN"),
    **dict.fromkeys(("finetune", "fine-tune", "sft", "fit", "run", "pretrain", "launch"), _TRAIN),
    "resume": f"{_TRAIN}, which continues from the last checkpoint",
    **dict.fromkeys(("infer", "inference", "chat", "predict", "complete"), _GENERATE),
    **dict.fromkeys(("doctor", "preflight", "env"), "fullshard check RECIPE"),
}
"""Commands of other tools, and the fullshard command that does the same."""


class Commands(TyperGroup):
    """The commands, including those of families, which are imported only when one of them is needed."""

    _has_all = False

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_family_commands()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_family_commands()
        command = super().get_command(ctx, cmd_name)
        for parameter in getattr(command, "params", ()):
            # An argument's name says what it takes; typer would add `<str>` and `<list[str]>` to the help.
            if isinstance(parameter, TyperArgument):
                setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010
        return command

    def _add_family_commands(self) -> None:
        """`commands/sample.py` of a family has a function `sample`."""
        if self._has_all:
            return
        for name, module in families.commands().items():
            if name in self.commands:
                raise SetupError(f"{module} defines the command {name}, which fullshard already has. Rename the file.")
            self.add_command(_command(getattr(importlib.import_module(module), name)), name)
        self._has_all = True

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        _refuse_foreign(args, self.list_commands(ctx) if args and args[0] not in self.commands else self.commands)
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **more: Any) -> Any:
        """Prints a FullshardError without a traceback. The same for a rank that only lost a peer: its launcher
        says what happened to the peer, and the traceback is in the crash folder."""
        try:
            return super().main(*args, **more)
        except Exception as error:
            if isinstance(error, FullshardError) and not crash.lost_a_rank(error):
                print_error(error)
                sys.exit(error.exit_code)
            if not crash.is_reported_elsewhere(error):
                raise
            typer.echo(f"Rank {os.environ.get('RANK', '0')} lost another rank.", err=True)
            sys.exit(1)


def _command(function: Callable[..., Any]) -> Any:
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(context_settings={"help_option_names": ["--help", "-h"]})(function)
    return get_command(single)


def print_error(error: FullshardError) -> None:
    """Prints a user's mistake, once: ranks beyond 0 hand theirs to the launcher, which prints it if it was first."""
    rank, handed = os.environ.get("RANK", "0"), hand_over(str(error))
    if rank == "0" or not handed:
        where = f"rank {rank}: " if rank != "0" else ""
        typer.echo("\n".join([f"Error: {where}{error}", *getattr(error, "__notes__", [])]), err=True)


def _refuse_foreign(words: Sequence[str], known: Container[str]) -> None:
    """Rejects a command of another tool, and names the one to use."""
    if words and words[0] not in known and (meant := ELSEWHERE.get(words[0].lower())):
        raise SetupError(f"there is no command {words[0]!r}. Use: {meant}")
