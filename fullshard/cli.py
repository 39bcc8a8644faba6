"""The command line: reads the words, calls the library, turns errors into messages and exit codes.

A user's mistake prints without a traceback and ends with exit code 2. Must not import torch before a command needs it,
and must not know how anything is done.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup

from fullshard.commands import recipes
from fullshard.commands.explain import explain
from fullshard.commands.options import json_alone
from fullshard.commands.other_tools import refuse_foreign
from fullshard.commands.verify import verify
from fullshard.config import families
from fullshard.errors import FullshardError, RecipeError, SetupError
from fullshard.evaluate.command import evaluate
from fullshard.explain import crash
from fullshard.explain.error_file import hand_over
from fullshard.export.command import export
from fullshard.generate.command import generate

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Ranks
    from fullshard.dist.env import Launch
    from fullshard.recipe import Topology
    from fullshard.recipes.read import Reading


class Commands(TyperGroup):
    """The commands; a FullshardError of any of them prints without a traceback. So does the end of a rank that
    only lost another: its launcher says what happened to that one, and the traceback is in the crash folder."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """An argument's name says what it takes; typer would add `<str>` and `<list[str]>` to the help."""
        command = super().get_command(ctx, cmd_name)
        for parameter in getattr(command, "params", ()):
            if isinstance(parameter, TyperArgument):
                setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_foreign(args, self.commands)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, FullshardError) and not crash.lost_a_rank(error):
                tell(error)
                raise typer.Exit(error.exit_code) from None
            if not crash.is_told_elsewhere(error):
                raise
            typer.echo(f"Rank {os.environ.get('RANK', '0')} lost another rank.", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    name="fullshard",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Train models with PyTorch FSDP: one recipe, one command, from a laptop to many nodes.",
)

_SHARED = ("--devices", "--gpus", "--nodes", "--node-rank", "--master", "--preset", "--output")
OPTIONS = {
    "train": (*_SHARED, "--resume", "--resume-anyway", "--dry-run"),
    "check": (*_SHARED, "--resume", "--resume-anyway", "--quick", "--units", "--json"),
    "prove": ("--devices", "--gpus", "--preset", "--output", "--cases", "--keep", "--json"),
}


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


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.", autocompletion=recipes.complete_recipe
    ),
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over those of the recipe.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "--num-processes",
        metavar="N|0,1|auto",
        help="Ranks on this node: a number, GPU ids, or auto for every GPU.",
    ),
]
Gpus = Annotated[str | None, typer.Option(metavar="0,1", help="The GPUs to use, by id: 0,1, or just 2.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", "--num-nodes", min=1, metavar="N", help="How many machines take part.")
]
NodeRank = Annotated[int | None, typer.Option(metavar="N", help="The number of this machine, from 0.")]
Master = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Where the nodes meet: the address of node 0 and a free port."),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Settings under those of the recipe.", autocompletion=recipes.complete_preset),
]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="The folder that holds run folders; a URL for a remote store.")
]
ResumeAnyway = Annotated[
    bool, typer.Option("--resume-anyway", help="Go on although the recipe has changed in a way that matters.")
]


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

    Exit codes: 0 done; 2 a mistake in the recipe, the data or the set-up; 3 stopped by a numerical guard; 75 preempted
    after a save, run the same command again to go on.
    """
    given = {"--devices": devices, "--gpus": gpus, "--nodes": nodes, "--output": output, "--preset": preset}
    reading = _read("train", recipe, settings, given | {"--node-rank": node_rank, "--master": master})
    launch = _launch(node_rank=node_rank, master=master)
    from fullshard import run

    if launch.launcher != "none" and not dry_run:
        raise typer.Exit(run.join(reading, resume=resume, anyway=resume_anyway))
    ranks = _ranks(reading.recipe.topology, launch, node_rank=node_rank, master=master)
    if not dry_run:
        raise typer.Exit(run.train(reading, resume=resume, ranks=ranks, anyway=resume_anyway))
    if launch.rank == 0:
        typer.echo(run.describe(reading, ranks=ranks))


@app.command(context_settings={"ignore_unknown_options": True})
def check(
    recipe: RecipeName,
    settings: Settings = None,
    devices: Devices = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    preset: Preset = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|never|PATH", help="As for train: say what it goes on from and what has changed."),
    ] = None,
    resume_anyway: ResumeAnyway = False,
    output: Output = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Look only: start no ranks, and skip the trial of the model.")
    ] = False,
    units: Annotated[bool, typer.Option("--units", help="Print every FSDP unit with its dtypes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    trial_in: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check everything that RECIPE needs before it costs GPU time.

    Looks at the environment, the recipe, the model and the data; then starts the ranks, takes the longest batch
    forward and backward on each, and writes and reads a checkpoint in the real place. Everything is cleaned up.
    Takes the settings and options of `fullshard train`, and ends with the exact command to run.

    Exit codes: 0 the setup is correct; 2 it is not, and every problem is listed.
    """
    from fullshard.check import command

    options = command.CheckOptions(quick, units, as_json, resume=resume, resume_anyway=resume_anyway)
    given = {"--devices": devices, "--gpus": gpus, "--nodes": nodes, "--output": output, "--preset": preset}
    given |= {"--node-rank": node_rank, "--master": master, "--resume": resume}
    try:
        with json_alone(options.as_json):
            reading = _read("check", recipe, settings, given)
            again = reading.typed.again() if reading.typed else ""
            options = replace(options, command=f"{again} --resume-anyway" if resume_anyway else again)
        launch = _launch(node_rank=node_rank, master=master)
        if trial_in is not None:
            raise typer.Exit(command.trial_rank(reading, trial_in))
    except FullshardError as mistake:
        raise typer.Exit(command.refused(mistake, options)) from None
    ranks: Ranks | SetupError
    try:
        ranks = _ranks(reading.recipe.topology, launch, node_rank=node_rank, master=master)
    except SetupError as mistake:
        ranks = mistake
    if launch.launcher != "none" and not isinstance(ranks, SetupError):
        raise typer.Exit(command.check_as_rank(reading, ranks, options, rank=launch.rank))
    raise typer.Exit(command.check(reading, ranks, options))


@app.command(context_settings={"ignore_unknown_options": True})
def prove(
    recipe: RecipeName,
    settings: Settings = None,
    devices: Devices = None,
    gpus: Gpus = None,
    preset: Preset = None,
    output: Output = None,
    cases: Annotated[
        str | None, typer.Option(metavar="LIST", help="Some of resume,world,split,strategy instead of all.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of the runs, and say where they are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
    as_rank: Annotated[bool, typer.Option("--as-rank", hidden=True)] = False,
) -> None:
    """Prove that RECIPE resumes exactly, in a few short runs of it.

    Runs the recipe for six steps: straight; killed (SIGKILL), resumed, killed again and resumed again; in other
    micro-batches; on another number of ranks; with another sharding strategy. Compares the samples, losses and gradient
    norms of every step, and the weights at the end: bit by bit where resumed, within rounding in the others. Names the
    first step and the tensor that differ. Needs disk space for a few checkpoints, and frees it afterwards.

    Exit codes: 0 no drift; 2 a mistake in the recipe, the data or the set-up; 3 drift.
    """
    from fullshard.prove import command

    if as_rank:
        from fullshard.prove.rank import run_one

        raise typer.Exit(run_one(Path(recipe)))
    with json_alone(as_json):
        given = {"--devices": devices, "--gpus": gpus, "--output": output, "--preset": preset}
        reading = _read("prove", recipe, settings, given)
    command.refuse_launcher(_launch(node_rank=None, master=None).launcher)
    options = command.ProveOptions(cases, keep, as_json)
    raise typer.Exit(command.prove(reading, command.own_ranks(reading.recipe.topology), options))


def _read(command: str, recipe: str, words: list[str] | None, options: dict[str, Any]) -> Reading:
    """The recipe with the settings in `words` and the options that were given."""
    from fullshard.config.arguments import Typed, to_overrides
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import read

    if recipe.startswith("-"):
        raise RecipeError(
            f"{recipe} stands where the recipe is expected. Write: fullshard {command} RECIPE {recipe} ..."
        )
    given = {option: str(value) for option, value in options.items() if value is not None}
    settings = to_overrides(words or [], sections=list(Recipe.model_fields), options=OPTIONS[command])
    own = [word for option, value in given.items() for word in (option, value)]
    typed = Typed((*_starter(), "train", recipe, *own), tuple(settings))
    return read(recipe, *_overrides(settings, given), preset=given.get("--preset"), typed=typed)


def _starter() -> tuple[str, ...]:
    """What starts as many ranks as there are now. The nodes of a launcher are its own matter."""
    from fullshard.dist.env import detect

    launch = detect(os.environ)
    if launch.launcher == "none":
        return ("fullshard",)
    if launch.launcher == "slurm" or launch.num_nodes > 1:
        return ("srun", "fullshard") if launch.launcher == "slurm" else ("torchrun", "...", "-m", "fullshard")
    return ("torchrun", "--standalone", "--nproc-per-node", str(launch.local_world), "-m", "fullshard")


_KEYS = {
    "--devices": "topology.devices",
    "--gpus": "topology.devices",
    "--nodes": "topology.nodes",
    "--output": "output",
}


def _overrides(settings: list[str], options: dict[str, str]) -> list[str]:
    """The options and the settings of the command line as one list; the same key twice is an error."""
    from fullshard.config.arguments import key_of

    given = {option: (_KEYS[option], value) for option, value in options.items() if option in _KEYS}
    if "--gpus" in given:
        given["--gpus"] = (_KEYS["--gpus"], f"[{options['--gpus'].strip('[]')}]")
    said: dict[str, str] = {}
    for key, text in [(k, f"{option} {v}") for option, (k, v) in given.items()] + [(key_of(s), s) for s in settings]:
        if said.setdefault(key, text) != text:
            raise RecipeError(f"{said[key]} and {text} on the command line both set {key}. Give one of them.")
    # Quoted, so that a folder called 1e3 stays a name; the recipe decides what devices mean.
    own = [f"{key}={json.dumps(value) if key == 'output' else value}" for key, value in given.values()]
    return [*own, *settings]


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


def _ranks(topology: Topology, launch: Launch, *, node_rank: int | None, master: str | None) -> Ranks:
    from fullshard.contracts.launcher import Ranks

    if launch.launcher != "none":
        return Ranks(launch.local_world, launch.num_nodes, launch.node_rank, timeout_s=topology.timeout_s)
    from fullshard.setup.on_ranks import ranks_of

    return ranks_of(topology, node_rank=node_rank, master=master)


def _of_families() -> Iterator[Callable[..., Any]]:
    """The commands that families bring: `commands/sample.py` has a function `sample`."""
    for package in families.folders("commands"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            yield getattr(importlib.import_module(f"{package}.{module.name}"), module.name)


for _plain in (verify, export, generate):
    app.command()(_plain)
for _of_family in _of_families():
    app.command()(_of_family)
for _free in (explain, evaluate):
    app.command(context_settings={"ignore_unknown_options": True})(_free)
app.add_typer(recipes.recipes, name="recipes")
app.command()(recipes.presets)
