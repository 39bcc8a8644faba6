"""`fullshard runs`: the runs of a folder in one table. Must not import torch, nor change a run."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import SetupError

_FILE_WIDTH = 200
"""Columns if the output is not a terminal."""


def runs(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of run folders, or one run folder.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """List the runs in FOLDER: state, steps, best, last loss, time, and which settings differ between them.

    A run is finished, running, saved after a signal (run its command again to continue), stopped (before step 1, or by
    a numerical guard) or died. The one that wrote a number last comes last. --json also has what could not be read.
    """
    from fullshard.runs.differences import differences
    from fullshard.runs.folder import find, read_run
    from fullshard.runs.table import table

    place = Path(folder).expanduser()
    if not place.is_dir():
        raise SetupError(
            f"{folder}: there is no such folder. Give the folder that holds the runs (`output` of a recipe)."
        )
    paths = find(place)
    if not paths:
        raise SetupError(f"{folder} holds no run. Give the folder that holds the runs (`output` of a recipe).")
    with ThreadPoolExecutor() as pool:  # a network file system answers many questions at once
        found = sorted(pool.map(read_run, paths), key=lambda run: (run.updated, str(run.folder)))
    apart = differences([run.recipe for run in found])
    names = [str(run.folder.relative_to(place)) if run.folder != place else place.resolve().name for run in found]
    if as_json:
        rows = [_plain(name, run, each) for name, run, each in zip(names, found, apart, strict=True)]
        typer.echo(json.dumps({"folder": str(place), "runs": rows}, indent=1, default=str))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_WIDTH
    typer.echo("\n".join(table(list(zip(names, found, apart, strict=True)), width=width)))


def _plain(name: str, run: Any, different: dict[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in vars(run).items() if key != "recipe"}
    return {"name": name, **values, "folder": str(run.folder), "differs": different}
