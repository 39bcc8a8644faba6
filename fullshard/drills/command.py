"""`fullshard prove`, and its `--faults`: breaks short runs of a recipe, one fault after another, and reports how each
recovers.

Must not import torch before it is called, nor know what a fault does or how a proof is made.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.commands import recipe_arguments as options
from fullshard.commands.options import json_alone
from fullshard.errors import EXIT_DONE, EXIT_NUMERICAL, RecipeError
from fullshard.formatting.plural import counted
from fullshard.prove import command as proofs

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Ranks
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import Reading


@options.takes_recipe(without=options.NODES)
def prove(
    asked: options.RecipeArguments,
    faults: Annotated[bool, typer.Option("--faults", help="Break the runs instead, one fault after another.")] = False,
    cases: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Only some of resume,world,split,strategy; with --faults, some faults."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of the runs, and say where they are.")] = False,
    as_json: options.AsJson = False,
    as_rank: Annotated[bool, typer.Option("--as-rank", hidden=True)] = False,
) -> None:
    """Prove that RECIPE resumes exactly, in a few short runs of it.

    Runs the recipe for six steps: straight; killed (SIGKILL), resumed, killed again and resumed again; with other
    micro-batches; on another number of ranks; with another sharding strategy. Compares the samples, losses and gradient
    norms of every step, and the weights at the end: bit by bit after a resume, within rounding in the others. Names the
    first step and the tensor that differ. Needs disk space for a few checkpoints, and frees it afterwards.

    With --faults: a rank is killed, stopped, raises, hangs or runs out of memory, in the data, the forward or backward
    pass, a save or an evaluation, and more. Each run must explain the fault, recover, and equal a run without faults.

    Exit codes: 0 no drift; 2 a mistake in the recipe, the data or the setup; 3 drift, or no recovery.
    """
    if as_rank:
        raise typer.Exit(proofs.run_one(Path(asked.recipe)))
    with json_alone(as_json):
        reading = asked.read()
    proofs.refuse_launcher(asked.launch().launcher)
    if faults:
        raise typer.Exit(run_drills(reading, cases, keep=keep, as_json=as_json))
    refuse_faults(cases)
    raise typer.Exit(proofs.run_proofs(asked, reading, cases, keep=keep, as_json=as_json))


def refuse_faults(cases: str | None) -> None:
    """The names of faults, where --faults is missing."""
    from fullshard.drills.kinds import DRILLS

    names = {drill.name for drill in DRILLS} & {name.strip() for name in (cases or "").split(",")}
    if names:
        raise RecipeError(f"--cases {cases}: {min(names)} is a fault. Add --faults to run it.")


def run_drills(reading: Reading, chosen: str | None, *, keep: bool, as_json: bool) -> int:
    """Runs the drills; returns the exit code: 0 if the run recovers from all, 3 if not."""
    from fullshard.drills import kinds
    from fullshard.drills.drill import Drills
    from fullshard.drills.report import Report

    drills, report = kinds.chosen(chosen), Report(as_json=as_json)
    ranks = _at_least_two(proofs.own_ranks(reading.recipe.topology))
    with proofs.folder_for(reading.recipe, keep=keep) as folder:
        with json_alone(as_json), report.working("Reading the data and building the model ..."):
            recipe, notes = _shrunk(reading.recipe, ranks, folder)
        title = f"Breaking {reading.recipe.name}: {counted(len(drills), 'fault')}, each in a run of {kinds.STEPS} steps"
        report.opening(f"{title} on {counted(ranks.per_node, 'rank')}", notes)
        runs, outcomes = Drills(recipe, folder, ranks.per_node), []
        with report.working("a run without faults ..."):
            runs.straight()
        for drill in drills:
            with report.working(f"{drill.title} ..."):
                outcomes.append(runs.run(drill))
            report.ended(outcomes[-1])
        report.end(outcomes, facts={"folder": str(folder)} if keep else {})
    return EXIT_NUMERICAL if any(outcome.problem for outcome in outcomes) else EXIT_DONE


def _at_least_two(ranks: Ranks) -> Ranks:
    """A single rank has no other that could notice its fault."""
    return ranks if ranks.per_node > 1 else replace(ranks, per_node=2)


def _shrunk(recipe: Recipe, ranks: Ranks, folder: Path) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as a run of a few steps on these ranks, and what differs from the real one."""
    from fullshard.prove import cases

    inputs = proofs.inputs_of(recipe, ranks)
    place = replace(proofs.place_of(recipe, ranks, inputs), folder=folder)
    plan = cases.plan(recipe, place, inputs, cases=("resume",))
    short = plan.straight.recipe
    if place.device == "cuda" and ranks.per_node > place.num_gpus:
        short = short.model_copy(update={"topology": short.topology.model_copy(update={"backend": "gloo"})})
    return uncompiled(short), (*plan.notes, *(["Without compilation."] if place.device == "cuda" else []))


def uncompiled(recipe: Recipe) -> Recipe:
    """A fault in the forward pass is a hook of a module, which a compiled block does not call."""
    return recipe.model_copy(update={"sharding": recipe.sharding.model_copy(update={"compile": False})})
