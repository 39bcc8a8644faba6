"""The run folder's checkpoints as files: names, pointers, retention, what is published and what is not.

A checkpoint is written under a hidden name and published by one rename; `best` and `last` are links, never copies.
Must not know what a checkpoint holds, nor import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError

STATE = "state.json"
MANIFEST = "manifest.json"


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def unfinished(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return run / f".unfinished-{name_of(step)}"


def published(run: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    found = [p for p in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and (p / MANIFEST).exists()]
    return sorted(found, key=lambda p: int(p.name.rpartition("-")[2]))


def publish(run: Path, step: int) -> Path:
    """Makes an unfinished checkpoint visible, in one rename."""
    target = run / name_of(step)
    if target.exists():
        shutil.rmtree(target)
    os.replace(unfinished(run, step), target)
    return target


def point(run: Path, pointer: str, target: Path) -> None:
    """Lets `best` or `last` name a checkpoint; readers see the old or the new one, never none."""
    temporary = run / f".{pointer}.new"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, run / pointer)


def pointed(run: Path, pointer: str) -> Path | None:
    """What a pointer names, if that exists."""
    link = run / pointer
    return run / os.readlink(link) if link.is_symlink() and link.exists() else None


def tidy(run: Path, *, keep: int | None) -> list[Path]:
    """Removes what an interrupted save left, and the oldest checkpoints beyond `keep`; never `best` or `last`."""
    for leftover in run.glob(".unfinished-*"):
        shutil.rmtree(leftover)
    protected = {pointed(run, "best"), pointed(run, "last")}
    checkpoints = published(run)
    surplus = checkpoints[: max(len(checkpoints) - keep, 0)] if keep else []
    removed = [path for path in surplus if path not in protected]
    for path in removed:
        shutil.rmtree(path)
    return removed


def describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, for the manifest."""
    described = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described[name] = {"size_bytes": (folder / name).stat().st_size, "sha256": digest}
    return described


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The facts beside the tensors."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a fullshard checkpoint: {STATE} cannot be read ({error}). "
            "Name a folder like RUN/checkpoint-100, or start over with --resume never."
        ) from error
    return state


def find(run: Path, resume: str) -> Path | None:
    """The checkpoint to go on from: `auto` the newest of this run, `never` none, else the one that is named."""
    if resume == "never":
        return None
    if resume == "auto":
        return published(run)[-1] if published(run) else None
    named = Path(resume)
    if not named.exists():
        known = ", ".join(str(p) for p in published(named.parent)) or "none"
        raise CheckpointError(f"--resume {resume}: there is no such folder. Checkpoints beside it: {known}.")
    return named.resolve()


def set_aside(run: Path) -> Path | None:
    """Moves an earlier run folder out of the way, so that starting over loses nothing."""
    if not run.exists() or not any(run.iterdir()):
        return None
    number = 1
    while (aside := run.with_name(f"{run.name}.old-{number}")).exists():
        number += 1
    os.replace(run, aside)
    return aside
