"""`model`, `best` and `last` of a run with stages: those of the stage that trained last.

Links in a local folder. A store has no links: `best` and `last` are small files there, and `model` is a copy.
Must not decide which stage that is.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.errors import CheckpointError
from fullshard.recipe import Recipe
from fullshard.stages.standing import identity_of

_POINTERS = ("best", "last")
_RESOLVED = "recipe.resolved.yaml"
_MODEL_OF = ".model-of"
"""The file of a store that says which stage's model its copy is."""


def point(run: Path, stage: Recipe) -> None:
    """Points the run at what a stage has left so far, on this machine and in its store."""
    remote = files.is_remote(stage.checkpoints)
    # The resolved recipe says where the checkpoints are.
    for name in (paths.MODEL, *_POINTERS, *([_RESOLVED] if remote else [])):
        target, link = stage.folder / name, run / name
        if not target.exists() and link.is_symlink():
            link.unlink()  # that of an earlier stage, which is not what the run has come to
        elif target.exists() and (link.is_symlink() or not link.exists()):
            temporary = run / f".{name}.{socket.gethostname()}-{os.getpid()}"  # two nodes may do the same
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path(stage.name) / name)
            os.replace(temporary, link)
    if remote:
        with paths.reaching(stage.checkpoints):
            _point_in_store(stage.checkpoints)


def _point_in_store(stage: Path) -> None:
    run, last = stage.parent, files.pointed(stage, "last")
    for name in _POINTERS:
        if files.pointed(stage, name) is None:
            paths.remove(run / name)
        elif not _says(run / name, f"{stage.name}/{name}"):
            paths.put_text(run / name, f"{stage.name}/{name}")
    if last is None or not paths.is_exported(stage):
        return
    try:
        whose = f"{stage.name} {identity_of(last)}"
    except CheckpointError:
        return  # damaged: the run says so
    if not _says(run / _MODEL_OF, whose):
        paths.remove(run / paths.MODEL)
        paths.copy(stage / paths.MODEL, run / paths.MODEL, last=files.MANIFEST)
        paths.put_text(run / _MODEL_OF, whose)


def _says(file: Path, text: str) -> bool:
    return paths.exists(file) and file.read_text().strip() == text
