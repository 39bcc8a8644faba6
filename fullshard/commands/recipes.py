"""The commands for what is built in: list, show and copy recipes, list and show presets, print the schema.

Must not know what a recipe means, nor import torch.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fullshard.config import families
from fullshard.dialects import presets as named
from fullshard.errors import RecipeError

recipes = typer.Typer(invoke_without_command=True, rich_markup_mode=None, help="List, show and copy built-in recipes.")


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    files = [(str(path), "") for path in sorted(Path().glob(f"{incomplete}*")) if path.suffix in (".yaml", ".yml")]
    return [*_described(families.recipes(), incomplete), *files]


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    return _described(named.known(), incomplete)


def _described(known: dict[str, Path], incomplete: str) -> list[tuple[str, str]]:
    return [(name, sentence(path)) for name, path in known.items() if name.startswith(incomplete)]


@recipes.callback()
def _recipes(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_recipes()


@recipes.command("list")
def list_recipes() -> None:
    """List the built-in recipes."""
    _list(families.recipes())
    typer.echo("\nTrain one:    fullshard train NAME\nRead one:     fullshard recipes show NAME")
    typer.echo("Change one:   fullshard recipes copy NAME")


@recipes.command("show")
def show_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a built-in recipe.", autocompletion=complete_recipe)
    ],
) -> None:
    """Print a built-in recipe."""
    typer.echo(_built_in(name).read_text(encoding="utf-8"), nl=False)


@recipes.command("copy")
def copy_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a built-in recipe.", autocompletion=complete_recipe)
    ],
    to: Annotated[Path | None, typer.Argument(metavar="TO", help="A file or folder; ./NAME.yaml by default.")] = None,
) -> None:
    """Copy a built-in recipe to your own file. An existing file is never overwritten."""
    source = _built_in(name)
    target = to or Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target} exists and will not be overwritten. Name another file.") from None
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}. Name another file.") from None
    typer.echo(f"Copied to {target}. Train it with: fullshard train {shlex.quote(str(target))}")


@recipes.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from fullshard.commands.schema import schema
    from fullshard.recipe import Recipe

    typer.echo(json.dumps(schema(Recipe), indent=2))


def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this preset.", autocompletion=complete_preset)
    ] = None,
) -> None:
    """List the presets, built-in ones and those of the folder presets/ here; or print one."""
    if name is not None:
        typer.echo(named.path_of(name).read_text(encoding="utf-8"), nl=False)
        return
    known = named.known()
    own = {name: path for name, path in known.items() if not named.is_built_in(path)}
    _list({name: path for name, path in known.items() if name not in own})
    if own:
        typer.echo("\nYours, in presets/:")
        _list(own)
    typer.echo("\nUse one:   fullshard train RECIPE --preset NAME, or presets: NAME in the recipe")
    typer.echo("Read one:  fullshard presets NAME")


def _built_in(name: str) -> Path:
    known = families.recipes()
    if name not in known:
        from fullshard.config.part import did_you_mean

        raise RecipeError(
            f"{name!r} is not a built-in recipe{did_you_mean(name, list(known))}. Built in: {', '.join(known)}."
        )
    return known[name]


def _list(known: dict[str, Path]) -> None:
    width = max(map(len, known), default=0)
    for name, path in known.items():
        typer.echo(f"{name:<{width}}  {sentence(path)}")


def sentence(path: Path) -> str:
    """What a built-in file is for: the first sentence of its opening comment."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.strip() == "#":
            break
        words.append(line.lstrip("# ").rstrip())
    text = " ".join(words)
    return text.split(". ")[0].rstrip(".") + "." if text else ""
