"""Whether a checkpoint is complete: a known format, every file as described, every tensor as listed.

`train`, `check` and `verify` all use this one definition. Must not import torch before it needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.errors import CheckpointError


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
        mine = integrity.share(manifest["files"], rank=rank, world=world)
        found = integrity.problems(checkpoint, mine, checksums=checksums, done=done)
        return found or (_other_tensors(checkpoint, manifest) if rank == 0 else [])
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        newer = isinstance(error, files.NewerCheckpointError)
        return [str(error) if newer else f"{checkpoint / files.MANIFEST} cannot be used ({error})"]


def _other_tensors(checkpoint: Path, manifest: dict[str, Any]) -> list[str]:
    """Tensors that the files hold differently from what the manifest lists."""
    from fullshard.checkpoint.reader import described, open_tensors

    try:
        stored = described(open_tensors(checkpoint))
    except Exception as error:  # whatever the library raises for an unreadable file
        return [str(error) or type(error).__name__]
    listed = manifest["tensors"]
    other = [name for name in sorted(stored.keys() | listed.keys()) if stored.get(name) != listed.get(name)]
    return [f"{name}: listed as {listed.get(name)}, stored as {stored.get(name)}" for name in other]
