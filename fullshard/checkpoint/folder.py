"""The run folder's checkpoints as files: names, pointers, retention, what is published and what is not.

A checkpoint is written under a hidden name and published by one rename; `best` and `last` are links, never copies.
Must not know what a checkpoint holds, nor import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

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
    replace(unfinished(run, step), target)
    return target


def begin_export(run: Path) -> Path:
    """Where the exported model is written before it takes its place, empty."""
    hidden = run / ".unfinished-model"
    if hidden.exists():
        shutil.rmtree(hidden)
    return hidden


def replace(finished: Path, target: Path) -> None:
    """Gives a finished folder its name; one that had it is deleted only afterwards."""
    old = target.with_name(f".unfinished-old-{target.name}")
    if target.exists():
        os.replace(target, old)
    os.replace(finished, target)
    if old.exists():
        shutil.rmtree(old)


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
    """The checkpoint to go on from: `auto` the one saved last, `never` none, else the one that is named."""
    if resume == "never":
        return None
    if resume == "auto":
        # Not the highest step: after `--resume` of an earlier checkpoint that one belongs to a life that was given up.
        last = pointed(run, "last")
        return last if last in published(run) else next(reversed(published(run)), None)
    named = Path(resume)
    if not (named / MANIFEST).exists():
        known = ", ".join(str(p) for p in published(named.parent)) or "none"
        what = "not a finished checkpoint (it has no manifest.json)" if named.exists() else "no such folder"
        raise CheckpointError(f"--resume {resume}: {what}. Checkpoints beside it: {known}.")
    return named.resolve()


def check(checkpoint: Path) -> None:
    """Every file of the manifest is there, with its size; checksums are left to whoever asks for a full check."""
    described = json.loads((checkpoint / MANIFEST).read_text())["files"]
    for name, entry in described.items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).exists() else None
        if found != entry["size_bytes"]:
            size = "missing" if found is None else f"{found:,} bytes long"
            raise CheckpointError(
                f"{checkpoint / name} is {size}, and was written with {entry['size_bytes']:,} bytes: the checkpoint is "
                "damaged. Resume from another one: --resume RUN/checkpoint-STEP."
            )


def claim(run: Path) -> IO[str]:
    """Takes the run folder for this process until the file returned is closed, or the process ends in whatever way.

    The lock lies beside the folder, because the folder may be moved aside. It is a record lock, and not one of
    `filelock`: loader processes that are forked must not keep it when this one was killed. A file system without locks
    raises OSError with ENOLCK, ENOSYS or EOPNOTSUPP."""
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
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its text
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
    return file


def set_aside(run: Path) -> Path | None:
    """Moves an earlier run folder out of the way, so that starting over loses nothing."""
    if not run.exists() or not any(run.iterdir()):
        return None
    number = 1
    while (aside := run.with_name(f"{run.name}.old-{number}")).exists():
        number += 1
    os.replace(run, aside)
    return aside
