"""`fullshard verify`: whether checkpoints are complete and unchanged, file by file.

Must not import torch before it needs it, nor change anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.errors import EXIT_USER, CheckpointError
from fullshard.formatting.readable import size


def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, best or last, or a run folder for all of its checkpoints; also as a URL.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")] = False,
) -> None:
    """Check that a checkpoint is complete and unchanged.

    Reads all files, compares sizes and checksums with the manifest, and the stored tensors with its list. Changes
    nothing.

    Exit codes: 0 every checkpoint is intact; 2 one is damaged, and every damaged file is named.
    """
    place = files.place(checkpoint)
    inside = files.published(place) if place.name not in ("best", "last") else []
    found = {path: problems(path, quiet=as_json) for path in inside or [files.named(checkpoint)]}
    if as_json:
        report = [{"checkpoint": str(path), "whole": not lines, "problems": lines} for path, lines in found.items()]
        typer.echo(json.dumps({"whole": not any(found.values()), "checkpoints": report}, indent=1))
    else:
        for path, lines in found.items():
            typer.echo("\n".join(_verdict(path, lines)))
    raise typer.Exit(EXIT_USER if any(found.values()) else 0)


def _verdict(path: Path, lines: list[str]) -> list[str]:
    if lines:
        if files.NEWER in lines[0]:
            return [f"✗ {path} cannot be verified", f"    {lines[0]}"]
        return [f"✗ {path} is DAMAGED", *(f"    {line}" for line in lines)]
    described = files.read_manifest(path)
    total = sum(int(entry["size_bytes"]) for entry in described["files"].values())
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    extra = sorted(present - {*described["files"], files.MANIFEST})
    counted = f"{len(described['files'])} files, {size(total)}, {len(described['tensors']):,} tensors"
    unlisted = [f"    not part of it: {', '.join(extra)}"] if extra else []
    return [f"✓ {path} is intact: {counted}, every checksum matches", *unlisted]


def problems(checkpoint: Path, *, quiet: bool = True) -> list[str]:
    """What is wrong with a checkpoint, with a bar for the bytes that are read."""
    try:
        described = files.read_manifest(checkpoint)["files"]
    except CheckpointError:
        described = {}  # integrity.problems reports it
    with _progress(described, checkpoint, quiet=quiet) as done:
        return integrity.problems(checkpoint, done=done)


@contextlib.contextmanager
def _progress(described: dict[str, Any], checkpoint: Path, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; takes the number of bytes read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    screen = Console(stderr=True)
    total = sum(int(entry["size_bytes"]) for entry in described.values())
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task(f"Reading {checkpoint.name}", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
