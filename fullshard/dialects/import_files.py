"""`fullshard import`: files of other trainers as one recipe.

Must not know the recipe, which the command line checks, nor change a file of the user.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from fullshard.dialects import merged_files, report
from fullshard.errors import RecipeError

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="A training file, a launcher's file, or both.")]
To = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="RECIPE", help="Write the recipe here; by default print it.")
]


def run(files: Sequence[str], output: Path | None, *, check: Callable[[dict[str, Any]], Any]) -> None:
    """Prints what each key is here, and prints or writes the recipe. An existing file is not overwritten."""
    found = merged_files.read(files)
    for done in found.translations:
        columns = _columns(sys.stderr if output is None else sys.stdout)
        typer.echo(report.table(done, columns=columns) + "\n", err=output is None)
    text = report.recipe_text(found.translations, merged_files.checked(found, check))
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{output} exists and will not be overwritten. Name another file.") from None
    except OSError as error:
        raise RecipeError(f"{output} cannot be written: {error.strerror}. Name another file.") from None
    typer.echo(merged_files.next_step(found, shlex.quote(str(output))))


def _columns(stream: TextIO) -> int:
    """The width of a terminal; 0 for a file, whose lines may be long."""
    return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
