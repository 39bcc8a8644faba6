"""`fullshard train --on-finish report`: the page of a run, written when it ends, also when it failed.

Only one process writes it: the launcher, or rank 0. A page that cannot be written is a warning, never the end of a run.
Must not know how a run is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fullshard.commands.options import one_of
from fullshard.errors import one_line

OnFinish = Annotated[
    str | None,
    typer.Option(
        "--on-finish", metavar="report", help="Write RUN/report.html when the run ends, also if it fails: report."
    ),
]


@contextlib.contextmanager
def at_the_end(asked: str | None, folder: Path, *, writes: bool) -> Iterator[None]:
    """Writes the page of the run in `folder` when the block ends, if that was asked for and this process `writes`."""
    one_of("--on-finish", asked, (None, "report"))
    try:
        yield
    finally:
        if asked and writes and folder.is_dir():
            try:
                _write(folder)
            except Exception as error:  # the run has ended as it has, whatever happens here
                typer.echo(f"warning: --on-finish report: no page was written ({one_line(error)}).", err=True)


def _write(folder: Path) -> None:
    from fullshard.report.command import NAME, write
    from fullshard.report.folders import find
    from fullshard.report.page import page

    write(folder / NAME, page(find([str(folder)])))
    typer.echo(f"Report: {folder / NAME}")
