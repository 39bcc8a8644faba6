"""Whether a checkpoint is complete and unchanged: a known format, every file with the size and checksum in the
manifest, every tensor as listed.

`train`, `check` and `verify` all use this one definition. Files are read as bytes, so that a malicious checkpoint can
do no harm. Must not import torch before it needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.errors import CheckpointError
from fullshard.formatting.plural import counted

THREADS = 4
UNREAD = "cannot be checked"
"""Part of the message for an unreadable file, which in a remote store need not mean damage."""


def problems(
    checkpoint: Path,
    *,
    checksums: bool = True,
    rank: int = 0,
    world: int = 1,
    done: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with a checkpoint, one line each. Every rank checks a share of the bytes, and rank 0 also the
    tensors. `done` is called with the number of bytes checked."""
    try:
        manifest = files.read_manifest(checkpoint)
        mine = share(manifest["files"], rank=rank, world=world)
        found = file_problems(checkpoint, mine, checksums=checksums, done=done)
        return found or (_tensor_problems(checkpoint, manifest["tensors"]) if rank == 0 else [])
    except files.NewerCheckpointError as error:
        return [str(error)]
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{checkpoint / files.MANIFEST} cannot be used ({error})"]


def share(described: dict[str, Any], *, rank: int, world: int) -> dict[str, Any]:
    """The files that this rank checks, about equal in bytes over ranks."""
    by_size = sorted(described, key=lambda name: -int(described[name]["size_bytes"]))
    return {name: described[name] for name in by_size[rank::world]}


def file_problems(
    folder: Path,
    described: dict[str, dict[str, Any]],
    *,
    checksums: bool = True,
    done: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the described files, one line each."""

    def look(item: tuple[str, dict[str, Any]]) -> str | None:
        name, entry = item
        path = PurePosixPath(name)
        # A device file elsewhere would be read forever.
        if not path.parts or path.is_absolute() or ".." in path.parts or "://" in name:
            return f"{folder / files.MANIFEST} lists {name!r}, outside the checkpoint: do not use it"
        found = _file_problem(folder / name, entry, checksums=checksums)
        if done is not None:
            done(int(entry["size_bytes"]))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        return [line for line in pool.map(look, sorted(described.items())) if line]


def _file_problem(path: Path, entry: dict[str, Any], *, checksums: bool) -> str | None:
    try:
        if not paths.exists(path):
            return f"{path} is missing"
        if not paths.is_remote(path) and not path.is_file():
            return f"{path} is not a regular file"
        found, written = path.stat().st_size, entry["size_bytes"]
        if found != written:
            return f"{path} is {counted(found, 'byte')} long, but was written with {written:,}"
        if checksums and checksum(path) != entry["sha256"]:
            return f"{path} was changed: the checksum of its {found:,} bytes differs from what was written"
    except Exception as error:  # whatever a store's library raises
        return f"{path} {UNREAD} ({type(error).__name__}: {error})"
    return None


def _tensor_problems(checkpoint: Path, listed: dict[str, Any]) -> list[str]:
    """Tensors that the files hold differently from what the manifest lists."""
    from fullshard.checkpoint.reader import open_tensors
    from fullshard.checkpoint.tensors import tree

    try:
        stored = tree(open_tensors(checkpoint).entries)
    except Exception as error:  # whatever the library raises for an unreadable file
        return [str(error) or type(error).__name__]
    other = [name for name in sorted(stored.keys() | listed.keys()) if stored.get(name) != listed.get(name)]
    return [f"{name}: listed as {listed.get(name)}, stored as {stored.get(name)}" for name in other]


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(folder: Path, digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, for the manifest; checksums are of what was written, not of what is on disk."""
    return {name: {"size_bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
