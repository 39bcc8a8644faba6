"""The command line: reads the words, calls the library, turns errors into messages and exit codes.

A user's mistake prints without a traceback and ends with exit code 2. Must not import torch before a command needs it,
and must not know how anything is done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fullshard import builtin
from fullshard.errors import FullshardError, RecipeError, SetupError

if TYPE_CHECKING:
    from fullshard.dist.env import Launch
    from fullshard.launch.base import Ranks
    from fullshard.recipe import Topology


class Commands(TyperGroup):
    """The commands; a FullshardError of any of them is told, not traced."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FullshardError as error:
            tell(error)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    cls=Commands,
    name="fullshard",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Train models with PyTorch FSDP: one recipe, one command, from a laptop to many nodes.",
)
recipes = typer.Typer(invoke_without_command=True, rich_markup_mode=None, help="List, show and copy what is built in.")
app.add_typer(recipes, name="recipes")

OPTIONS = ("--devices", "--gpus", "--nodes", "--node-rank", "--master", "--preset", "--resume", "--output", "--dry-run")


def main() -> None:
    """The `fullshard` command."""
    # As under `python -m`: `kind: my_parts.Thing` finds my_parts.py in the current folder.
    sys.path.insert(0, os.getcwd())
    _follow_launcher()
    app(prog_name="fullshard")


def _follow_launcher() -> None:
    """A rank that fullshard has started ends with its launcher; processes that the rank starts are its own matter."""
    from fullshard.launch.base import STARTED_BY
    from fullshard.signals import end_with

    if launcher := os.environ.pop(STARTED_BY, None):
        end_with(int(launcher))


def tell(error: FullshardError) -> None:
    """Prints a user's mistake, once: ranks beyond 0 hand theirs to the launcher, which prints it if it was first."""
    rank, handover = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if handover:
        # The form that torchrun's agent reads.
        note = {"message": str(error), "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        Path(handover).write_text(json.dumps({"message": note}), encoding="utf-8")
    if rank == "0" or not handover:
        where = f"rank {rank}: " if rank != "0" else ""
        typer.echo(f"Error: {where}{error}", err=True)


def _complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    files = [(str(path), "") for path in sorted(Path().glob(f"{incomplete}*")) if path.suffix in (".yaml", ".yml")]
    return [*_described(builtin.recipes(), incomplete), *files]


def _complete_preset(incomplete: str) -> list[tuple[str, str]]:
    return _described(builtin.presets(), incomplete)


def _described(known: dict[str, Path], incomplete: str) -> list[tuple[str, str]]:
    return [(name, builtin.sentence(path)) for name, path in known.items() if name.startswith(incomplete)]


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
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.", autocompletion=_complete_recipe
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over those of the recipe.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "--num-processes",
            metavar="N|0,1|auto",
            help="Ranks on this node: a number, GPU ids, or auto for every GPU.",
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="0,1", help="GPU ids, also a single one.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "--num-nodes", min=1, metavar="N", help="How many machines take part.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(metavar="N", help="Which of them this one is, from 0.")] = None,
    master: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the nodes meet: the address of node 0 and a free port."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Settings under those of the recipe.", autocompletion=_complete_preset),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(metavar="auto|never|PATH", help="Go on from the last checkpoint, start over, or go on from PATH."),
    ] = "auto",
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder that holds run folders.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every value in force and the step arithmetic; start nothing.")
    ] = False,
) -> None:
    """Train what RECIPE describes.

    Settings follow the recipe: optimizer.lr=3e-4 or --optimizer.lr 3e-4, log.sinks=[wandb], --sharding.cpu-offload or
    --no-sharding.cpu-offload. Hyphens and underscores are the same. --fp16 and --bf16 are short for precision=fp16 and
    precision=bf16. The command line wins over the recipe, the recipe over the preset, the preset over the defaults.

    fullshard starts the ranks itself. Under torchrun, accelerate launch or srun it joins the ranks that are there.

    Exit codes: 0 done; 2 a mistake in the recipe, the data or the set-up; 3 stopped by a numerical guard; 75 preempted
    after a save, run the same command again to go on.
    """
    from fullshard.read import read

    chosen = {
        "--devices": ("topology.devices", devices),
        "--gpus": ("topology.devices", _ids(gpus)),
        "--nodes": ("topology.nodes", nodes),
        "--output": ("output", output),
    }
    reading = read(recipe, *_overrides(recipe, settings or [], chosen), preset=preset)
    launch = _launch(node_rank=node_rank, master=master)
    from fullshard import run

    if launch.launcher != "none" and not dry_run:
        raise typer.Exit(run.join(reading, resume=resume))
    ranks = _ranks(reading.recipe.topology, launch, node_rank=node_rank or 0, master=master)
    if not dry_run:
        raise typer.Exit(run.train(reading, resume=resume, ranks=ranks))
    if launch.rank == 0:
        typer.echo(run.describe(reading, ranks=ranks))


def _ids(gpus: str | None) -> str | None:
    return None if gpus is None else f"[{gpus.strip('[]')}]"


def _overrides(recipe: str, words: list[str], chosen: dict[str, tuple[str, Any]]) -> list[str]:
    """The options and the settings of the command line as one list; the same key twice is an error."""
    from fullshard.recipe import Recipe
    from fullshard.words import key_of, to_overrides

    if recipe.startswith("-"):
        raise RecipeError(f"{recipe} stands where the recipe is expected. Write: fullshard train RECIPE {recipe} ...")
    given = {option: (key, value) for option, (key, value) in chosen.items() if value is not None}
    settings = to_overrides(words, sections=list(Recipe.model_fields), options=OPTIONS)
    said: dict[str, str] = {}
    for key, text in [(k, f"{option} {v}") for option, (k, v) in given.items()] + [(key_of(s), s) for s in settings]:
        if said.setdefault(key, text) != text:
            raise RecipeError(f"{said[key]} and {text} on the command line both set {key}. Give one of them.")
    # Quoted, so that a folder called 1e3 stays a name; the recipe decides what devices mean.
    options = [f"{key}={json.dumps(str(value)) if key == 'output' else value}" for key, value in given.values()]
    return [*options, *settings]


def _launch(*, node_rank: int | None, master: str | None) -> Launch:
    """Who started this process. Node options and a launcher exclude each other."""
    from fullshard.dist.env import Launch, detect

    launch = detect(os.environ)
    if launch.launcher == "none" or (node_rank is None and master is None):
        return launch
    if launch.launcher == "slurm" or "LOCAL_RANK" in os.environ:
        raise SetupError(
            f"--node-rank and --master are for runs that fullshard starts itself; this process was started by "
            f"{launch.launcher} as rank {launch.rank} of {launch.world}. Leave these options out."
        )
    # A cluster's RANK and WORLD_SIZE that count nodes: the options say what is meant.
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return Launch("none")


def _ranks(topology: Topology, launch: Launch, *, node_rank: int, master: str | None) -> Ranks:
    from fullshard.launch.base import Ranks

    if launch.launcher != "none":
        return Ranks(launch.local_world, launch.num_nodes, launch.node_rank, timeout_s=topology.timeout_s)
    if topology.nodes > 1:
        # Node 0 often leaves before the others; torch's C++ would print a stack for it. Read when torch is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from fullshard.run import ranks_of

    return ranks_of(topology, node_rank=node_rank, master=master)


@recipes.callback()
def _recipes(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_recipes()


@recipes.command("list")
def list_recipes() -> None:
    """List the built-in recipes."""
    _list(builtin.recipes())
    typer.echo("\nTrain one:    fullshard train NAME\nRead one:     fullshard recipes show NAME")
    typer.echo("Change one:   fullshard recipes copy NAME")


@recipes.command("show")
def show_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a built-in recipe.", autocompletion=_complete_recipe)
    ],
) -> None:
    """Print a built-in recipe."""
    typer.echo(_built_in(name).read_text(encoding="utf-8"), nl=False)


@recipes.command("copy")
def copy_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a built-in recipe.", autocompletion=_complete_recipe)
    ],
    to: Annotated[
        Path | None, typer.Argument(metavar="TO", help="A file or folder; ./NAME.yaml when left out.")
    ] = None,
) -> None:
    """Copy a built-in recipe to a file of your own. An existing file is never written over."""
    source = _built_in(name)
    target = to or Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target} exists and is not written over. Name another file.") from None
    except OSError as error:
        raise RecipeError(f"{target} cannot be written: {error.strerror}. Name another file.") from None
    typer.echo(f"Copied to {target}. Train it with: fullshard train {target}")


@recipes.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for completion and checks in an editor."""
    from fullshard.schema import schema

    typer.echo(json.dumps(schema(), indent=2))


@app.command()
def presets() -> None:
    """List the built-in presets."""
    _list(builtin.presets())
    typer.echo("\nUse one:   fullshard train RECIPE --preset NAME")


def _built_in(name: str) -> Path:
    known = builtin.recipes()
    if name not in known:
        from fullshard.part import did_you_mean

        raise RecipeError(
            f"{name!r} is not a built-in recipe{did_you_mean(name, list(known))}. Built in: {', '.join(known)}."
        )
    return known[name]


def _list(known: dict[str, Path]) -> None:
    width = max(map(len, known), default=0)
    for name, path in known.items():
        typer.echo(f"{name:<{width}}  {builtin.sentence(path)}")
