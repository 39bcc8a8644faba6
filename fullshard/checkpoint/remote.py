"""Copies of a run folder's other files in a remote store, so that nothing is lost with the machine.

Must not know what the files are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint import paths
from fullshard.checkpoint.paths import is_remote

TEXTS = ("recipe.resolved.yaml", "metrics.jsonl", "log.txt", "units.json")
MODEL, _WHOLE = "model", ".model-is-whole"


def upload_model(folder: Path, run: Path) -> None:
    """Copies the exported model to the store, replacing an older one. A marker file says that the copy is complete."""
    target: Any = run / MODEL
    paths.remove(run / _WHOLE)
    paths.remove(target)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        copy = target / path.relative_to(folder).as_posix()
        paths.make(copy.parent)
        target.fs.put_file(str(path), copy.path)
    paths.put_text(run / _WHOLE, "")


def is_exported(run: Path) -> bool:
    """Whether the store has the run's complete model."""
    return paths.exists(run / MODEL) and (not is_remote(run) or paths.exists(run / _WHOLE))


def send_texts(run: Path, target: Path, *, warn: Callable[[str], None]) -> None:
    """Copies log files; if that fails, the run continues and the next save tries again."""
    if not is_remote(target):
        return
    for name in TEXTS:
        try:
            if (run / name).is_file():
                (target / name).write_bytes((run / name).read_bytes())
        except Exception as error:  # whatever the store's library raises
            warn(f"{name} could not be copied to {target} ({paths.words(error)}): for now it is only in {run}.")


def fetch_texts(run: Path, target: Path) -> None:
    """Fetches the log files of a run on another machine. A local file that starts with the store's copy is newer, and
    stays."""
    for name in TEXTS if is_remote(target) else ():
        if paths.exists(target / name):
            copy, own = (target / name).read_bytes(), run / name
            if not (own.exists() and own.read_bytes().startswith(copy)):
                own.write_bytes(copy)
