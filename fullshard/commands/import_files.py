"""`fullshard import`: files of other trainers as one recipe. Must not know any of the trainers, nor change a file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import RecipeError

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="A training file, a launcher's file, or both.")]
To = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="RECIPE", help="Write the recipe here; by default print it.")
]


def import_(files: Files, output: To = None) -> None:
    """Translate files of other trainers into a recipe.

    FILE is a file of accelerate, the Hugging Face Trainer, axolotl, torchtune, LLaMA-Factory, torchtitan, Lightning or
    DeepSpeed, or a plain training YAML. Every key is shown with what it is here: kept, renamed, without effect, or
    refused, and why. FILE itself is never changed, and RECIPE is never overwritten.
    """
    from fullshard.dialects import merged_files, report

    found = merged_files.read(files)
    for done in found.translations:
        typer.echo(report.table(done) + "\n", err=output is None)
    values = merged_files.checked(found, _decode)
    text = report.recipe_text(found.translations, values)
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


def _decode(values: dict[str, object]) -> None:
    """Raises for what a recipe cannot be; what is still missing may be given later."""
    from fullshard.recipes.read import read

    read(values)
