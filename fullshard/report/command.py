"""`fullshard report`: one page about runs, written to a file or served on this machine.

Must not know what is on the page, nor import torch unless checksums are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import SetupError
from fullshard.formatting import readable

NAME = "report.html"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN [RUN ...]", help="Run folders, or their names in runs/; several are compared."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Where to write the page. Default: RUN/report.html; report.html for several."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte of the checkpoints and compare checksums.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page at an address of this machine, and follow runs that go on.")
    ] = False,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="With --serve; 0 is any free port.")] = 0,
) -> None:
    """Write one page about a run: how it ended, curves, settings, events, samples, checkpoints.

    The page is one HTML file that needs no network. Several runs are drawn on top of each other, with what differs.
    """
    from fullshard.report.folders import find
    from fullshard.report.page import page

    found = find(runs)
    if serve:
        if output is not None:
            raise SetupError("--serve writes no file: leave --output out, or leave --serve out.")
        from fullshard.report.serve import serve_until_interrupted

        serve_until_interrupted(found, port=port, say=typer.echo)
        return
    target = Path(output).expanduser() if output else (found[0].folder / NAME if len(runs) == 1 else Path(NAME))
    if len(runs) == 1 and output is None and len(found) > 1:  # a run with stages
        target = found[0].folder.parent / NAME
    size = write(target, page(found, verify=verify))
    typer.echo(f"Wrote {target} ({readable.size(size)}). Open it in a browser.")


def write(target: Path, text: str) -> int:
    """Writes the page; a reader sees the old or the new one. Returns its size in bytes."""
    hidden = target.with_name(f".{target.name}.new")
    try:
        hidden.write_text(text, encoding="utf-8")
        hidden.replace(target)
    except OSError as error:
        raise SetupError(
            f"--output {target} cannot be written ({error.strerror}). Name a file in a folder that exists."
        ) from None
    return target.stat().st_size
