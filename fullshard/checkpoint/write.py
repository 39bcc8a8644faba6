"""Writes one checkpoint on all ranks: tensors, facts, a check of what was written, and only then publishes it.

The same for a synchronous save and for one in the background, which brings host tensors and its own process group.
Must not know losses, recipes or what the facts mean.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, paths
from fullshard.checkpoint.all_or_fail import all_or_fail
from fullshard.checkpoint.formats import Sharded, write_full
from fullshard.checkpoint.tensors import Tensors, counts, tree
from fullshard.dist import reduce
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """The state of one step, to be saved."""

    step: int
    tensors: Tensors
    squares: dict[str, reduce.HostCopy]
    """This rank's share of the squared norm of each kind of optimizer state."""
    facts: dict[str, Any]
    processor: dict[str, bytes]
    """The files of the tokenizer, on rank 0."""
    best: bool


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and in which format."""

    run: Path
    keep: int | None
    sharded: Sharded | None
    """None for the `full` format."""


@dataclass(frozen=True)
class Written:
    """A published checkpoint."""

    path: Path
    seconds: float
    size_bytes: int


def write(snapshot: Snapshot, target: Target, *, group: Any = None) -> Written:
    """Writes, checks and publishes `checkpoint-STEP`, moves the pointers, deletes old ones. A failure is fatal."""
    begun, main = time.monotonic(), torch.distributed.get_rank() == 0
    hidden = files.unfinished(target.run, snapshot.step)
    with all_or_fail(f"{hidden} cannot be created", group=group):
        if main:
            files.begin(target.run, snapshot.step)
    squares = {kind: share.read()[0] for kind, share in snapshot.squares.items()}
    evidence = {"steps": counts(snapshot.tensors), "norms": norms(squares, group=group)}
    put = target.sharded.write if target.sharded else write_full
    digests = put(hidden, snapshot.tensors, group=group)
    with all_or_fail(f"{hidden} cannot be written", group=group):
        if main:
            digests |= _write_facts(hidden, snapshot.facts | {"optimizer": evidence}, snapshot.processor)
    with all_or_fail(f"{hidden} is not what was written", group=group):
        described = integrity.describe(hidden, digests)
        if found := integrity.file_problems(hidden, described):
            raise CheckpointError(f"the storage does not return what was written: {'; '.join(found)}")
    described = {name: entry for part in reduce.gather_objects(described, group=group) for name, entry in part.items()}
    with all_or_fail(f"{hidden} cannot be published", group=group):
        if main:
            epoch = snapshot.facts.get("progress", {}).get("epoch")
            manifest = {"step": snapshot.step, "epoch": epoch, "format": "sharded" if target.sharded else "full"}
            _publish(target, snapshot, manifest | {"files": described, "tensors": tree(snapshot.tensors)})
    size = sum(int(entry["size_bytes"]) for entry in described.values())
    return Written(target.run / files.name_of(snapshot.step), time.monotonic() - begun, size)


def norms(squares: dict[str, float], *, group: Any = None) -> dict[str, float]:
    """The norm of each kind of optimizer state over all ranks, from every rank's share of its square."""
    shares = reduce.gather_objects(squares, group=group)
    return {kind: sum(share[kind] for share in shares) ** 0.5 for kind in squares}


def _write_facts(hidden: Path, facts: dict[str, Any], processor: dict[str, bytes]) -> dict[str, str]:
    """Writes state.json and the tokenizer's files; returns their checksums."""
    files.write_json(hidden / files.STATE, facts)
    digests = {files.STATE: integrity.checksum(hidden / files.STATE)}
    for name, content in processor.items():
        path = hidden / files.PROCESSOR / name
        paths.make(path.parent)
        path.write_bytes(content)
        digests[f"{files.PROCESSOR}/{name}"] = hashlib.sha256(content).hexdigest()
    return digests


def _publish(target: Target, snapshot: Snapshot, manifest: dict[str, Any]) -> None:
    path = files.publish(target.run, snapshot.step, manifest)
    files.point(target.run, "last", path)
    best = snapshot.step if snapshot.best else snapshot.facts.get("progress", {}).get("best_step")
    files.point_best(target.run, best)
    files.tidy(target.run, keep=target.keep)
