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
from fullshard.checkpoint.full import write_full
from fullshard.checkpoint.sharded import Sharded
from fullshard.checkpoint.tensors import Tensors, counts, tree
from fullshard.dist import reduce
from fullshard.dist.all_or_fail import together
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """The state of one step, to be saved."""

    step: int
    tensors: Tensors
    kinds: list[str]
    squares: reduce.HostCopy
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
    digests: dict[str, str] = {}

    def begin() -> None:
        if main:
            files.begin(target.run, snapshot.step)

    together(begin, f"{hidden} cannot be created", group=group)
    facts = snapshot.facts | {"optimizer": _evidence(snapshot, group)}

    if target.sharded is not None:
        digests.update(target.sharded.write(hidden, snapshot.tensors, group=group))

    def put() -> None:
        if target.sharded is None:
            digests.update(write_full(hidden, snapshot.tensors, group=group))
        if main:
            digests.update(_put_facts(hidden, facts, snapshot.processor))

    together(put, f"{hidden} cannot be written", group=group)
    described: dict[str, dict[str, Any]] = {}

    def look() -> None:
        described.update(integrity.describe(hidden, digests))
        if found := integrity.problems(hidden, described):
            raise CheckpointError(f"the storage does not return what was written: {'; '.join(found)}")

    together(look, f"{hidden} is not what was written", group=group)
    for part in reduce.gather_objects(dict(described), group=group):
        described |= part

    def finish() -> None:
        if main:
            epoch = snapshot.facts.get("progress", {}).get("epoch")
            manifest = {"step": snapshot.step, "epoch": epoch, "format": "sharded" if target.sharded else "full"}
            _publish(target, snapshot, manifest | {"files": described, "tensors": tree(snapshot.tensors)})

    together(finish, f"{hidden} cannot be published", group=group)
    size = sum(int(entry["size_bytes"]) for entry in described.values())
    return Written(target.run / files.name_of(snapshot.step), time.monotonic() - begun, size)


def _evidence(snapshot: Snapshot, group: Any) -> dict[str, Any]:
    """Step counts and norms of the optimizer's state, to be compared after a load."""
    return {
        "steps": counts(snapshot.tensors),
        "norms": norms(snapshot.kinds, snapshot.squares.read(), group=group),
    }


def norms(kinds: list[str], squares: list[float], *, group: Any = None) -> dict[str, float]:
    """The norm of each kind of optimizer state over all ranks, from every rank's share of its square."""
    shares = reduce.gather_objects(squares, group=group)
    return {kind: sum(share[index] for share in shares) ** 0.5 for index, kind in enumerate(kinds)}


def _put_facts(hidden: Path, facts: dict[str, Any], processor: dict[str, bytes]) -> dict[str, str]:
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
