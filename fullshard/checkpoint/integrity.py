"""Whether a checkpoint is what was written: every file exists, with the size and checksum in the manifest.

Reads bytes only, so a malicious checkpoint can do no harm here. Must not know what the files hold, nor import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.formatting.plural import counted

BLOCK = 2**22
THREADS = 4
UNREAD = "cannot be checked"
"""Part of the message for an unreadable file, which in a remote store need not mean damage."""


def checksum(path: Path) -> str:
    """The sha256 of a file."""
    digest, room = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb") as file:
        while count := file.readinto(room):  # type: ignore[attr-defined]
            digest.update(room[:count])
    return digest.hexdigest()


def describe(folder: Path, digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, for the manifest; checksums are of what was written, not of what is on disk."""
    return {name: {"size_bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}


def problems(
    folder: Path,
    described: dict[str, dict[str, Any]],
    *,
    checksums: bool = True,
    done: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the described files, one line each; `done` is called with the number of bytes checked."""

    def look(item: tuple[str, dict[str, Any]]) -> str | None:
        if not _is_inside(item[0]):  # a device file elsewhere would be read forever
            return f"{folder / files.MANIFEST} lists {item[0]!r}, outside the checkpoint: do not use it"
        found = _problem(folder / item[0], item[1], checksums=checksums)
        if done is not None:
            done(int(item[1]["size_bytes"]))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        return [line for line in pool.map(look, sorted(described.items())) if line]


def _problem(path: Path, entry: dict[str, Any], *, checksums: bool) -> str | None:
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


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "://" not in name


def share(described: dict[str, Any], *, rank: int, world: int) -> dict[str, Any]:
    """The files that this rank checks, about equal in bytes over ranks."""
    by_size = sorted(described, key=lambda name: -int(described[name]["size_bytes"]))
    return {name: described[name] for name in by_size[rank::world]}


def unlisted(folder: Path, described: Iterable[str]) -> list[str]:
    """Files that the manifest does not list."""
    known = {*described, files.MANIFEST}
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in known)
