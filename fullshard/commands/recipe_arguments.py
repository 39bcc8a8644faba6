"""The arguments of `train`, `check` and `prove`: their options, and the recipe and ranks that they name.

Must not know what is done with them, nor import torch before ranks are counted.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from fullshard.commands.recipes import complete_preset, complete_recipe
from fullshard.dialects.command_line import option_names, recipe_and_rest
from fullshard.errors import RecipeError, SetupError

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Ranks, Topology
    from fullshard.dist.env import Launch
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import Reading

_KEYS = {
    "--devices": "topology.devices",
    "--gpus": "topology.devices",
    "--nodes": "topology.nodes",
    "--restarts": "topology.restarts",
    "--output": "output",
}


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.", autocompletion=complete_recipe
    ),
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the recipe.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "--num-processes",
        metavar="N|0,1|auto",
        help="Ranks on this node: a number, GPU ids, or auto for every GPU.",
    ),
]
Gpus = Annotated[str | None, typer.Option("--gpus", metavar="0,1", help="The GPUs to use, by id: 0,1, or just 2.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", "--num-nodes", min=1, metavar="N", help="How many machines take part.")
]
NodeRank = Annotated[int | None, typer.Option("--node-rank", metavar="N", help="The number of this machine, from 0.")]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="HOST:PORT", help="Where the nodes meet: the address of node 0 and a free port."),
]
RestartCount = Annotated[
    int | None,
    typer.Option(
        "--restarts", "--max-restarts", min=0, metavar="N", help="How often failed ranks start again by themselves."
    ),
]
Preset = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        *option_names("--preset"),
        metavar="NAME",
        help="Settings that the recipe overrides; can be repeated, later ones win.",
        autocompletion=complete_preset,
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config-file", metavar="FILE", help="A file of accelerate or DeepSpeed, for ranks and sharding."),
]
Output = Annotated[
    str | None,
    typer.Option("--output", metavar="DIR", help="The folder that holds run folders; a URL for a remote store."),
]
StageName = Annotated[
    str | None, typer.Option("--stage", metavar="NAME", help="Only this stage of a recipe with stages.")
]
ResumeAnyway = Annotated[
    bool, typer.Option("--resume-anyway", help="Continue although the recipe has changed in a way that matters.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]


@dataclass(frozen=True)
class RecipeArguments:
    """A recipe on the command line, with the settings and options that follow it."""

    recipe: RecipeName
    settings: Settings = None
    devices: Devices = None
    gpus: Gpus = None
    nodes: Nodes = None
    node_rank: NodeRank = None
    master: Master = None
    restarts: RestartCount = None
    preset: Preset = None
    config_file: ConfigFile = None
    output: Output = None
    stage: StageName = None
    resume: str | None = None
    """The value of --resume, for a command that prints how to train."""
    command: str = "train"
    options: tuple[str, ...] = ()
    """The names of all options of the command, for messages."""
    also: tuple[str, ...] = ()
    """Names of options that are not listed in messages, but may be meant by a typo."""
    pick: Callable[[Any], Any] = lambda reading: reading
    """The reading of one stage, from that of the whole recipe."""
    proven: Callable[[Path], Any] = lambda folder: None
    """Gets the folder of a proof's straight run before it is removed: the next stage starts from it."""

    def read(self) -> Reading:
        """The recipe with the settings and options on top."""
        from fullshard.dialects.command_line import read_words
        from fullshard.recipe import Recipe
        from fullshard.recipes.read import Typed, read

        if self.recipe.startswith("-"):
            wanted = f"fullshard {self.command} RECIPE {self.recipe} ..."
            raise RecipeError(f"The recipe must come before {self.recipe}. Write: {wanted}")
        given, under = self._given(), self.preset or []
        sections = list(Recipe.model_fields)
        words = read_words(self.settings or [], sections=sections, options=self.options, also=self.also)
        settings, notes = words.settings, (*words.notes, *words.overridden())
        chosen = [*given.items(), *(("--preset", name) for name in under)]
        own = [word for option, value in chosen for word in (option, value)]
        typed = Typed((*_starter(), "train", self.recipe, *own), tuple(settings))
        overrides = _overrides(settings, given)
        given_as = read(self.recipe, *overrides, preset=under, typed=typed, notes=notes, launch_file=self.config_file)
        picked: Reading = self.pick(given_as)
        return picked

    def _given(self) -> dict[str, str]:
        names = ("devices", "gpus", "nodes", "output", "config_file", "node_rank", "master", "restarts", "stage")
        found = {f"--{name.replace('_', '-')}": getattr(self, name) for name in (*names, "resume")}
        return {option: str(value) for option, value in found.items() if value is not None}

    def launch(self) -> Launch:
        """Who started this process. Node options and a launcher exclude each other."""
        from fullshard.dialects.engine_nodes import nodes_of
        from fullshard.dist.env import Launch, detect

        launch = detect(os.environ)
        engine = nodes_of(os.environ) if launch.launcher == "torchrun" else None
        if launch.launcher == "none" or (self.node_rank is None and self.master is None and engine is None):
            return launch
        if launch.launcher == "slurm" or "LOCAL_RANK" in os.environ:
            raise SetupError(
                f"--node-rank and --master are for runs that fullshard starts itself; this process was started by "
                f"{launch.launcher} as rank {launch.rank} of {launch.world}. Leave these options out."
            )
        # A cluster's RANK and WORLD_SIZE that count nodes: the options, or its other variables, say what is meant.
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return Launch("none")

    def ranks(self, topology: Topology, launch: Launch, *, wait: bool = True) -> Ranks:
        """The ranks of the launcher, or those that fullshard is to start on this node. Without `wait` the nodes of an
        engine are only counted: node 0 may not have a name yet."""
        from fullshard.contracts.launcher import Ranks
        from fullshard.dialects.files import meeting
        from fullshard.setup.on_ranks import ranks_of

        if launch.launcher != "none":
            return Ranks(launch.local_world, launch.num_nodes, launch.node_rank, timeout_s=topology.timeout_s)
        chosen = self.nodes is not None or any("topology.nodes" in word for word in self.settings or [])
        timeout_s = topology.timeout_s if wait else None
        number, place = meeting(self.config_file, nodes=topology.nodes, chosen=chosen, timeout_s=timeout_s)
        if not wait and place and (self.config_file, self.node_rank, self.master) == (None, None, None):
            return replace(ranks_of(topology.model_copy(update={"nodes": 1})), nodes=topology.nodes)
        mine = number if self.node_rank is None else self.node_rank
        return ranks_of(topology, node_rank=mine, master=self.master or place)


NODES = ("nodes", "node_rank", "master")
"""The arguments of a run on several nodes."""


def takes_recipe(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares the arguments of RecipeArguments, except those in `without`, and passes them to the command as one."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        shared, (_, *own) = (
            inspect.signature(f, eval_str=True).parameters.values() for f in (RecipeArguments, command)
        )
        names = [p.name for p in shared if hasattr(p.annotation, "__metadata__") and p.name not in without]
        declared = [p.replace(kind=p.KEYWORD_ONLY) for p in (*shared, *own) if p.name in names or p in own]
        infos = {p.name: p.annotation.__metadata__[0] for p in declared}
        shown = {name: info for name, info in infos.items() if isinstance(info, OptionInfo) and not info.hidden}
        # Inside Annotated, typer takes the first name of an option for its default.
        options = tuple(
            str(info.default) if info.default is not ... else f"--{name.replace('_', '-')}"
            for name, info in shown.items()
        )

        @functools.wraps(command)
        def run(**given: Any) -> None:
            from fullshard.stages.commands import run_stages

            values = {name: given.pop(name) for name in names}
            values["recipe"], values["settings"] = recipe_and_rest(values["recipe"], values["settings"] or [])
            asked = RecipeArguments(**values, command=command.__name__, options=options)
            if not run_stages(asked, command, given, processor_of=_processor_of):
                command(asked, **given)

        run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in declared}
        return run

    return declare


def _processor_of(recipe: Recipe) -> Any:
    from fullshard.setup.run_inputs import OpenSources, find_processor

    return find_processor(recipe, OpenSources(recipe))


def _starter() -> tuple[str, ...]:
    """The command that starts the same number of ranks; `...` replaces a launcher's options for several nodes."""
    from fullshard.dialects.launch_variables import asked_for
    from fullshard.dist.env import detect

    launch = detect(os.environ)
    if launch.launcher == "none":
        return ("fullshard",)
    if launch.launcher == "slurm":
        return ("srun", "fullshard")
    if launch.num_nodes > 1:
        return ("torchrun", "...", "-m", "fullshard")
    count = max(launch.local_world, asked_for() or 0 if launch.launcher == "accelerate" else 0)
    return ("torchrun", "--standalone", "--nproc-per-node", str(count), "-m", "fullshard")


def _overrides(settings: list[str], options: dict[str, str]) -> list[str]:
    """The options and the settings of the command line as one list; the same key twice is an error."""
    from fullshard.recipes.read import key_of

    given = {option: (_KEYS[option], value) for option, value in options.items() if option in _KEYS}
    if any(key_of(setting) == _KEYS["--gpus"] for setting in settings):
        given.pop("--gpus", None)  # a flag of other scripts, which gives way to a setting in our words
    if "--gpus" in given:
        given["--gpus"] = (_KEYS["--gpus"], f"[{options['--gpus'].strip('[]')}]")
    said: dict[str, str] = {}
    for key, text in [(k, f"{option} {v}") for option, (k, v) in given.items()] + [(key_of(s), s) for s in settings]:
        if said.setdefault(key, text) != text:
            raise RecipeError(f"{said[key]} and {text} on the command line both set {key}. Give one of them.")
    # Quoted, so that a folder called 1e3 stays a name; the recipe parses devices.
    own = [f"{key}={json.dumps(value) if key == 'output' else value}" for key, value in given.values()]
    return [*own, *settings]
