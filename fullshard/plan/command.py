"""`fullshard plan`: memory and time of a run before it starts, on any number of GPUs that need not exist.

Must not import torch before it is called, nor know how anything is predicted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands import recipe_arguments as options
from fullshard.commands.options import json_alone
from fullshard.errors import EXIT_DONE, EXIT_NUMERICAL

if TYPE_CHECKING:
    from fullshard.plan.hardware import Gpu
    from fullshard.plan.predict import Place, Planner, Prediction
    from fullshard.plan.remedies import Remedy
    from fullshard.recipe import Recipe

IN_A_NODE = 8
"""GPUs of a node, if there are several nodes and the recipe does not say."""


@options.takes_recipe(without=("gpus", "node_rank", "master", "restarts", "output"))
def plan(
    asked: options.RecipeArguments,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|GiB", help="The GPU: h100, h200, a100-80, l40s, 4090, ... or its memory."),
    ] = None,
    network: Annotated[
        float | None, typer.Option(metavar="GBIT", help="Network of one GPU to other nodes, in Gbit/s.")
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="PER_GPU_HOUR", help="Shows what it costs.")] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also a table over 1 to 4,096 ranks with each strategy.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="First measure a block of each kind and the head, on this machine."),
    ] = False,
    fit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe that fits, if this one does not.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture of a step as SVG.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict memory and time of RECIPE, without a GPU and without weights.

    Shows what a rank holds and needs, the peak and when it is reached, whether that fits, and how long a step takes.
    If it does not fit: what to change, the cheapest first. Takes the settings of `fullshard train`.

    Exit codes: 0 it fits, or --fit wrote a recipe that does; 2 a mistake in the recipe or the setup; 3 it does not fit.
    """
    with json_alone(as_json):
        reading = asked.read()
        device = _gpu(reading.recipe, gpu, network)
        _refuse(device, price, scaling=scaling)
        if measure:
            _refuse_another(reading.recipe, gpu, device)
        place = _place(reading.recipe, device)
    shown: dict[str, Any] = {"price": price, "scaling": scaling, "fit": fit, "svg": svg, "as_json": as_json}
    raise typer.Exit(_plan(reading.recipe, place, measure=measure, **shown))


def _plan(recipe: Recipe, place: Place, *, measure: bool, scaling: bool, as_json: bool, **asked: Any) -> int:
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.plan import report
    from fullshard.plan.picture import PLAIN
    from fullshard.plan.predict import Planner
    from fullshard.plan.scaling import scaling as over_ranks
    from fullshard.plan.speed import step_time

    planner = Planner()
    with json_alone(as_json), libraries.route(Console(silent=True)):
        found = planner.predict(recipe, place)
        if measure:
            found = _measured(planner, recipe, found)
        time = step_time(found)
        tried, chosen = _help(planner, found)
        rows = over_ranks(planner, recipe, place.gpu) if scaling and place.gpu else []
    written = _write(found, chosen, fit=asked["fit"], svg=asked["svg"])
    if as_json:
        typer.echo(json.dumps(report.data(found, time, tried, chosen, rows)))
    else:
        plain = not (sys.stdout.encoding or "").lower().startswith("utf")
        for line in report.text(found, time, steps=recipe.duration.steps, price=asked["price"]):
            typer.echo(line.translate(PLAIN) if plain else line)
        for line in (*(report.advice(tried, chosen) if tried else ()), *(report.scaling_table(rows) if rows else ())):
            typer.echo(line)
        for line in written:
            typer.echo(line)
    fits = found.room is None or found.room >= 0 or (asked["fit"] is not None and chosen is not None)
    return EXIT_DONE if fits else EXIT_NUMERICAL


def _measured(planner: Planner, recipe: Recipe, found: Prediction) -> Prediction:
    """The prediction from numbers that are measured now."""
    import torch

    from fullshard.plan.speed import modelled

    devices = recipe.topology.devices
    first = int(devices[0]) if isinstance(devices, list) else 0
    device = torch.device("cuda", first) if found.place.gpu else torch.device("cpu")
    planner.measure(found, device, modelled=modelled(found))
    return planner.predict(recipe, found.place)


def _help(planner: Planner, found: Prediction) -> tuple[list[Remedy], Remedy | None]:
    """What to change if it does not fit."""
    from fullshard.plan.remedies import fitting, remedies

    if found.room is None or found.room >= 0:
        return [], None
    tried = remedies(planner, found)
    return tried, fitting(planner, found, tried)


def _write(found: Prediction, chosen: Remedy | None, *, fit: Path | None, svg: Path | None) -> list[str]:
    """Writes the files that were asked for; says where they are."""
    from fullshard.config.part import plain
    from fullshard.formatting.yaml_text import render
    from fullshard.plan.picture import as_svg

    said = []
    gpu = found.place.gpu
    if svg is not None:
        svg.write_text(
            as_svg(found.moments, gpu.memory if gpu else None, title=f"Memory of a rank: {found.recipe.name}")
        )
        said.append(f"Picture: {svg}")
    if fit is not None and chosen is not None:
        head = f"# {found.recipe.name} with {chosen.change}, so that it fits on {gpu.name if gpu else 'a CPU'}.\n"
        fit.write_text(head + render(plain(chosen.found.recipe)), encoding="utf-8")
        said.append(f"Recipe that fits: {fit}")
    elif fit is not None:
        said.append(
            f"{fit} is not written: " + ("the recipe fits as it is." if (found.room or 0) >= 0 else "nothing fits.")
        )
    return said


def _gpu(recipe: Recipe, name: str | None, network: float | None) -> Gpu | None:
    """The GPU that was named, or the one in this machine; None: CPU ranks."""
    from fullshard.plan.hardware import gpu_here, gpu_named, with_network

    found = gpu_here(recipe.topology.device) if name is None else gpu_named(name)
    return None if found is None else with_network(found, network)


def _refuse(gpu: Gpu | None, price: float | None, *, scaling: bool) -> None:
    """Raises for what cannot be answered."""
    from fullshard.errors import SetupError
    from fullshard.plan.hardware import GPUS

    if price is not None and not 0 <= price < float("inf"):
        raise SetupError(f"--price {price:g}: give what one GPU costs per hour, 0 or more.")
    if scaling and (gpu is None or gpu.flops is None):
        where = f"the speed of {gpu.name} is not known" if gpu else "this machine has no GPU"
        raise SetupError(f"--scaling needs a GPU whose speed is known, and {where}. Add --gpu {'|'.join(GPUS)}.")


def _refuse_another(recipe: Recipe, name: str | None, gpu: Gpu | None) -> None:
    """Raises if another GPU than that of this machine is to be measured."""
    from fullshard.errors import SetupError
    from fullshard.plan.hardware import gpu_here

    here = gpu_here(recipe.topology.device)
    if name is not None and gpu is not None and (here is None or here.name != gpu.name):
        has = f"has {here.name}" if here else "has no GPU" if recipe.topology.device != "cpu" else "is to use its CPU"
        raise SetupError(
            f"--gpu {name} with --measure: only this machine can be measured, and it {has}. Leave out one of the two."
        )


def _place(recipe: Recipe, gpu: Gpu | None) -> Place:
    from fullshard.plan.predict import Place

    topology = recipe.topology
    devices = topology.devices
    if devices == "auto":
        per_node = IN_A_NODE if gpu and topology.nodes > 1 else 1
    else:
        per_node = len(devices) if isinstance(devices, list) else int(devices)
    return Place(per_node, topology.nodes, gpu)
