"""Behind `fullshard prove`: prepares the inputs, plans the runs, makes them in a temporary folder, and reports on them.

Must not import torch before it is called, nor know how a run is made or compared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.commands.options import json_alone
from fullshard.errors import EXIT_DONE, EXIT_NUMERICAL, EXIT_USER, SetupError
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    from fullshard.commands.recipe_arguments import RecipeArguments
    from fullshard.contracts.launcher import Ranks, Topology
    from fullshard.prove.cases import Place
    from fullshard.recipe import Recipe
    from fullshard.recipes.read import Reading
    from fullshard.setup.inputs import RunInputs


def run_proofs(asked: RecipeArguments, reading: Reading, chosen: str | None, *, keep: bool, as_json: bool) -> int:
    """Proves a recipe; returns the exit code: 0 no drift, 3 drift, 2 if a run failed."""
    from fullshard.prove import cases, proof
    from fullshard.prove.report import Report
    from fullshard.prove.runs import Runs, start_ranks

    names, ranks, report = cases.check_names(chosen), own_ranks(reading.recipe.topology), Report(as_json=as_json)
    with json_alone(as_json), report.working("Reading the data and building the model ..."):
        inputs = inputs_of(reading.recipe, ranks)
        place = place_of(reading.recipe, ranks, inputs)
    with folder_for(reading.recipe, keep=keep) as folder:
        with json_alone(as_json):
            plan = cases.plan(reading.recipe, replace(place, folder=folder), inputs, cases=names)
        each = counted(plan.samples_per_step, inputs.plan.noun)
        title = f"Proving {reading.recipe.name}: {cases.STEPS} steps of {each}"
        report.opening(f"{title} on {counted(ranks.per_node, 'rank')}, {place.device}", plan.notes)
        verdicts = proof.prove(plan, Runs(folder, start_ranks(reading), report.watch, keep=keep))
        facts = {"steps": cases.STEPS, "samples_per_step": plan.samples_per_step, "notes": list(plan.notes)}
        asked.proven(plan.straight.folder)
        report.end(verdicts, facts=facts | ({"folder": str(folder)} if keep else {}))
    words = {verdict.word for verdict in verdicts}
    return EXIT_NUMERICAL if "DRIFT" in words else EXIT_USER if "not run" in words else EXIT_DONE


def refuse_launcher(launcher: str) -> None:
    """Refuses to run under a launcher: the runs need ranks that can be killed and restarted."""
    if launcher != "none":
        raise SetupError(
            f"fullshard prove starts, kills and restarts ranks by itself, and this process is a rank of {launcher}. "
            "Run it as one plain process: fullshard prove RECIPE."
        )


def own_ranks(topology: Topology) -> Ranks:
    """The recipe's ranks on this machine; proofs run on one node."""
    from fullshard.setup.on_ranks import ranks_of

    return ranks_of(topology.model_copy(update={"nodes": 1}))


def inputs_of(recipe: Recipe, ranks: Ranks) -> RunInputs:
    """The data and the empty model: errors in them show before any rank starts, and the ranks find the cache."""
    from fullshard.log import libraries
    from fullshard.log.console import Console
    from fullshard.setup.run_inputs import prepare_inputs

    console = Console(silent=True)
    with libraries.route(console):
        return prepare_inputs(recipe, world_size=ranks.per_node * recipe.topology.nodes, console=console)


def place_of(recipe: Recipe, ranks: Ranks, inputs: RunInputs) -> Place:
    import torch

    from fullshard.contracts.world import World
    from fullshard.dist.mesh import choose_layout
    from fullshard.dist.precision import resolve_precision
    from fullshard.dist.world import choose_device_type
    from fullshard.prove.cases import Place
    from fullshard.setup.sharded_model import state_bytes

    device = torch.device(choose_device_type(recipe.topology.device))
    world = World(0, ranks.per_node, 0, ranks.per_node, device, recipe.topology.backend)
    state = state_bytes(recipe, inputs.module)
    return Place(
        folder=recipe.output,
        ranks=ranks,
        device=device.type,
        num_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        half=resolve_precision(recipe.precision, device).compute != torch.float32,
        strategy=choose_layout(recipe.sharding.strategy, world, state_bytes=state).strategy,
    )


@contextlib.contextmanager
def folder_for(recipe: Recipe, *, keep: bool) -> Iterator[Path]:
    """A folder for the runs, on the disk of the real one; removed at the end, with parents that it created."""
    output = Path(tempfile.gettempdir()) if "://" in str(recipe.output) else recipe.output.absolute()
    made = [path for path in (output, *output.parents) if not path.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".prove-{recipe.name}-", dir=output))
    except OSError as error:
        raise SetupError(
            f"output = {str(recipe.output)!r}: a folder cannot be created there ({error.strerror or error}). Choose a "
            "folder that you may write to: output=DIR, or --output DIR."
        ) from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()


def run_one(folder: Path) -> int:
    """Runs the recipe in the folder as one rank; returns its exit code."""
    _redirect_output(folder / f"rank-{os.environ.get('RANK', '0')}.txt")
    import torch

    from fullshard import run
    from fullshard.prove.runs import RECIPE, RESUME
    from fullshard.recipes.read import read

    if torch.cuda.is_available():
        # Otherwise some kernels sum in a different order every time, and no two runs are bitwise equal.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return run.join(read(folder / RECIPE), resume=(folder / RESUME).read_text(encoding="utf-8"))


def _redirect_output(path: Path) -> None:
    """Redirects stdout and stderr of this process, and of every process it starts, to a file."""
    with path.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
