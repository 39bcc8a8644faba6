"""The checkpoints of a run folder as files: names, pointers, retention, publication.

A local checkpoint is written under a hidden name and published by one rename; a remote one (fsspec, as UPath) is
written in place and published by its manifest, which comes last. `best` and `last` are pointers, never copies.
Must not know what a checkpoint holds, nor import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from fullshard.checkpoint import paths
from fullshard.checkpoint.paths import is_remote, place
from fullshard.errors import CheckpointError

STATE = "state.json"
MANIFEST = "manifest.json"
PROCESSOR = "processor"
VERSION = 1
"""The format version that is written, and the newest that is read. A checkpoint without a version has version 1.
Raise it with every change that an older fullshard would misread."""
NEWER = "of the checkpoint format, and this fullshard"
"""Part of the message for a checkpoint that a newer fullshard wrote, which is not damaged."""
_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"
_OLD = f"{_UNFINISHED}old-"
_ANOTHER = "Name another one: --resume RUN/checkpoint-STEP."


class NewerCheckpointError(CheckpointError):
    """A checkpoint in a format that only a newer fullshard reads."""


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def published(run: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    numbered = [path for path in _inside(run) if _NAME.fullmatch(path.name)]
    return sorted((path for path in numbered if paths.exists(path / MANIFEST)), key=step_of)


def _inside(run: Path) -> list[Path]:
    """The contents of a folder; empty if it does not exist or is a file. Raises if a store cannot be reached."""
    with paths.reaching(run):
        return list(run.iterdir()) if paths.exists(run) and not run.is_file() else []


def unfinished(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it is published."""
    return run / name_of(step) if is_remote(run) else run / f"{_UNFINISHED}{name_of(step)}"


def begin(run: Path, step: int) -> Path:
    """An empty folder for a checkpoint, after removing what an interrupted save left."""
    tidy(run, keep=None)
    target = unfinished(run, step)
    if is_remote(run) and paths.exists(target / MANIFEST):
        # The same step again, perhaps the only checkpoint: keep a copy until the new one is published.
        paths.copy(target, run / f"{_OLD}{target.name}", last=MANIFEST)
        _remove(target)
    paths.make(target)
    return target


def publish(run: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Makes an unfinished checkpoint visible by one rename; a remote one by its manifest."""
    hidden, target = unfinished(run, step), run / name_of(step)
    write_json(hidden / MANIFEST, {"version": VERSION, "fullshard": _own_version(), **manifest})
    if is_remote(run):
        paths.remove(run / f"{_OLD}{target.name}")
    else:
        _sync(hidden)
        replace(hidden, target)
        _sync(run)
    return target


def _sync(folder: Path) -> None:
    """Makes the names in a folder survive a power loss; DCP does the same for the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def begin_export(run: Path) -> Path:
    """The folder in which the exported model is written first; it does not exist yet."""
    hidden = run / f"{_UNFINISHED}model"
    paths.remove(hidden)
    return hidden


def replace(finished: Path, target: Path) -> None:
    """Gives a finished folder its name; an older folder of that name is deleted only afterwards."""
    old = target.with_name(f"{_OLD}{target.name}")
    if target.exists():
        os.replace(target, old)
    os.replace(finished, target)
    paths.remove(old)


def point(run: Path, pointer: str, target: Path) -> None:
    """Points `best` or `last` at a checkpoint; readers always see the old or the new one."""
    if is_remote(run):
        paths.put_text(run / pointer, target.name)
        return
    temporary = run / f".{pointer}.new"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, run / pointer)


def pointed(run: Path, pointer: str) -> Path | None:
    """The checkpoint that a pointer names, if it exists."""
    link = run / pointer
    if is_remote(run):
        with paths.reaching(run):
            name = link.read_text().strip() if paths.exists(link) else ""
    else:
        name = os.readlink(link) if link.is_symlink() else ""
    if stage := re.fullmatch(r"([^/]+)/(best|last)", name):
        return pointed(run / stage[1], stage[2])
    target = run / name if _NAME.fullmatch(name.rpartition("/")[2]) else None
    return target if target is not None and paths.exists(target) else None


def point_best(run: Path, step: int | None) -> None:
    """Points `best` at the checkpoint of `step`, if it does not yet: a kill may have come before the pointer moved."""
    if step is not None and paths.exists((target := run / name_of(step)) / MANIFEST) and pointed(run, "best") != target:
        point(run, "best", target)


def tidy(run: Path, *, keep: int | None) -> None:
    """Removes what an interrupted save left, and the oldest checkpoints beyond `keep`; never `best` or `last`."""
    recover(run)
    for path in _inside(run):
        half = is_remote(run) and _NAME.fullmatch(path.name) and not paths.exists(path / MANIFEST)
        if half or path.name.startswith(_UNFINISHED):
            paths.remove(path)
    if keep:
        pointers = pointed(run, "best"), pointed(run, "last")
        for path in published(run)[:-keep]:
            if path not in pointers:
                _remove(path)


def recover(run: Path) -> None:
    """Restores the checkpoint that an interrupted save of the same step had moved aside."""
    for old in [path for path in _inside(run) if path.name.startswith(_OLD)]:
        target = run / old.name.removeprefix(_OLD)
        if not is_remote(run):
            if not target.exists():
                os.replace(old, target)
        elif paths.exists(old / MANIFEST) and not paths.exists(target / MANIFEST):
            paths.remove(target)
            paths.copy(old, target, last=MANIFEST)


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint in an order that never leaves half of one looking complete."""
    if is_remote(checkpoint):
        if paths.exists(checkpoint / MANIFEST):
            (checkpoint / MANIFEST).unlink()
        paths.remove(checkpoint)
    else:
        paths.remove(checkpoint.replace(checkpoint.with_name(f"{_UNFINISHED}removed-{checkpoint.name}")))


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if is_remote(path):
        paths.put_text(path, text)
        return
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _own_version() -> str:
    try:
        return metadata.version("fullshard")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "of an unknown version"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The facts of a checkpoint: everything that is not a tensor."""
    state = _read_json(checkpoint, STATE)
    if paths.exists(checkpoint / MANIFEST):
        _require_known(checkpoint, _read_json(checkpoint, MANIFEST))
    return state


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint consists of."""
    manifest, path = _read_json(checkpoint, MANIFEST), checkpoint / MANIFEST
    _require_known(checkpoint, manifest)
    described = manifest.get("files")
    if not isinstance(described, dict) or not described:
        raise CheckpointError(f"{path} lists no files: the checkpoint is damaged. {_ANOTHER}")
    for name, entry in described.items():
        size, digest = (entry.get("size_bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            wrong = f"describes {name} as {entry!r}, without a size and a checksum"
            raise CheckpointError(f"{path} {wrong}: the checkpoint is damaged. {_ANOTHER}")
    return manifest


def _read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    with paths.reaching(checkpoint):
        try:
            content = json.loads((checkpoint / name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{checkpoint} is not a fullshard checkpoint: {name} cannot be read ({error}). "
                "Name a folder like RUN/checkpoint-100, or start over with --resume never."
            ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{checkpoint / name} is not a JSON object: the checkpoint is damaged. {_ANOTHER}")
    return content


def _require_known(checkpoint: Path, manifest: dict[str, Any]) -> None:
    version = manifest.get("version", 1)
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{checkpoint / MANIFEST} says version = {version!r}, and versions are whole numbers from 1 on: the "
            f"checkpoint is damaged. {_ANOTHER}"
        )
    if version > VERSION:
        raise NewerCheckpointError(
            f"{checkpoint} was written by fullshard {manifest.get('fullshard', 'of an unknown version')} in version "
            f"{version} {NEWER} ({_own_version()}) reads versions up to {VERSION}. Update it: "
            "pip install --upgrade fullshard."
        )


def candidates(run: Path) -> list[Path]:
    """The checkpoints to resume from; the one saved last comes first.

    That need not be the highest step: after `--resume` of an earlier checkpoint, higher ones are abandoned."""
    last, newest_first = pointed(run, "last"), published(run)[::-1]
    if last is None or last not in newest_first:
        return newest_first or ([last] if last else [])  # that of a run's last stage is in the stage's folder
    return sorted(newest_first, key=lambda path: (path != last, step_of(path) > step_of(last)))


def named(path: str | Path) -> Path:
    """The finished checkpoint at a path or URL: its folder, a pointer to it, or a run folder's last one."""
    found = place(path)
    with paths.reaching(found):
        is_pointer = found.name in ("best", "last")
        if is_remote(found) and is_pointer:
            found = pointed(found.parent, found.name) or found
        if paths.exists(found / MANIFEST):
            return found if is_remote(found) else found.resolve()
        if not is_pointer and (inside := candidates(found)):
            return inside[0]
        known = ", ".join(str(p) for p in published(found.parent)) or "none"
        what = "not a finished checkpoint (it has no manifest.json)" if paths.exists(found) else "no such folder"
    raise CheckpointError(f"{path}: {what}. Checkpoints in {found.parent}: {known}.")


def claim(run: Path) -> IO[str]:
    """Locks the run folder for this process until the returned file is closed or the process ends.

    The lock file is beside the folder, because the folder may be moved aside. It is a record lock, not `filelock`:
    forked loader processes must not keep it when this process is killed. A file system without locks raises OSError
    with ENOLCK, ENOSYS or EOPNOTSUPP."""
    file = run.with_name(f".{run.name}.lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with file:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise CheckpointError(f"{run} is in use by {holder}. Wait for it, stop it, or choose another name.") from None
    with contextlib.suppress(OSError):  # full disk: the lock holds without its text
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
    return file


def set_aside(run: Path) -> Path | None:
    """Moves an earlier run folder out of the way, so that starting over loses nothing."""
    if not any(_inside(run)):
        return None
    numbered = (run.with_name(f"{run.name}.old-{number}") for number in itertools.count(1))
    aside = next(path for path in numbered if not paths.exists(path))
    paths.move(run, aside, last=MANIFEST)
    return aside
