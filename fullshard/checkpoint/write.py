"""Writes one checkpoint on all ranks: tensors, facts, a check of what was written, and only then publishes it.

Tensors have one of two formats: `sharded`, where every rank writes its slices as DCP files, or `full`, with one
safetensors file for the model and one for the optimizer. A save in the background brings host tensors and its own
process group; nothing else differs. Must not know losses, recipes or what the tensors and facts mean.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, paths
from fullshard.checkpoint.dcp_files import Hashed, Writer
from fullshard.checkpoint.reader import SECTIONS
from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry
from fullshard.checkpoint.tensors import Tensors, counts, flat, tree
from fullshard.dist import reduce
from fullshard.dist.agreement import all_or_fail
from fullshard.dist.gather import gather_to_main, scatter_from_main
from fullshard.dist.values import local, slices
from fullshard.errors import CheckpointError
from fullshard.faults.patience import patiently


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
    patience_s: float = 0.0
    """How long to wait for a remote store that fails."""
    warn: Callable[[str], None] = print


@dataclass(frozen=True)
class Written:
    """A published checkpoint; `lost_s` went before, as the store was gone."""

    path: Path
    seconds: float
    size_bytes: int
    lost_s: float = 0.0


def write(snapshot: Snapshot, target: Target, *, group: Any = None) -> Written:
    """Writes, checks and publishes `checkpoint-STEP`. A failure is fatal, but for a remote store that comes back."""
    wait_s = target.patience_s if paths.is_remote(target.run) else 0.0
    return patiently(lambda lost_s: _write(snapshot, target, lost_s, group=group), for_s=wait_s, say=target.warn)


def _write(snapshot: Snapshot, target: Target, lost_s: float, *, group: Any) -> Written:
    begun, main = time.monotonic(), _is_main()
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
    return Written(target.run / files.name_of(snapshot.step), time.monotonic() - begun, size, lost_s)


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


class OneByOne(DefaultSavePlanner):
    """Copies one tensor at a time to the host in each writing thread. DCP would hold all tensors of a file, which in a
    synchronous save is a copy of the whole state."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._written = threading.local()

    def resolve_data(self, write_item: WriteItem) -> Any:
        for part in getattr(self._written, "parts", ()):  # DCP asks for the next tensor when the last one is written
            part.untyped_storage().resize_(0)
        self._written.parts = []
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            data = data.detach()
            # A tensor subclass that is already on the host may return itself as its copy.
            part = type(data) is torch.Tensor and data.untyped_storage().nbytes() != data.nbytes
            if data.device.type != "cpu" or part:
                data = data.to("cpu", copy=True)
                self._written.parts = list(flat("", data).values())
        return data


class Sharded:
    """Writes the slices of a run. Who writes what is planned once: planning would hold up the training thread."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._form: list[Any] = []
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        """The metadata of the whole checkpoint, on rank 0."""

    def write(self, folder: Path, tensors: Tensors, *, group: Any) -> dict[str, str]:
        """Writes this rank's slices; returns the checksums of its files. Every rank fails if one does."""
        problem, writer = f"{folder} cannot be written", Writer(folder, threads=self._threads)
        if self._plan is None or self._form != _form(tensors):
            self.agree(tensors, problem, group=group)
        with all_or_fail(problem, group=group):
            assert self._plan is not None
            planner = OneByOne()
            planner.set_up_planner(dict(tensors), is_coordinator=_is_main())
            plan = planner.finish_plan(writer.prepare_local_plan(self._plan))
            results = writer.write_data(plan, planner).wait()
        written = gather_to_main(results, group=group)
        with all_or_fail(problem, group=group):
            if _is_main():
                assert self._metadata is not None
                writer.finish(self._metadata, written)
        return writer.digests

    def agree(self, tensors: Tensors, problem: str, *, group: Any) -> None:
        """Plans which rank writes what, for tensors of this form; before the first save if the form is known."""
        planner = DefaultSavePlanner()
        with all_or_fail(problem, group=group):
            planner.set_up_planner(dict(tensors), is_coordinator=_is_main())
            mine = planner.create_local_plan()
        plans = gather_to_main(mine, group=group)
        with all_or_fail(problem, group=group):
            if _is_main():
                plans, self._metadata = planner.create_global_plan(plans)
                plans = Writer(Path(), threads=1).prepare_global_plan(plans)
        self._plan, self._form = scatter_from_main(plans, group=group), _form(tensors)


def _form(tensors: Tensors) -> list[Any]:
    """All that a plan depends on; the same on every rank."""
    return [
        (name, t.dtype, t.shape, t._spec.placements if isinstance(t, DTensor) else None) for name, t in tensors.items()
    ]


def _is_main() -> bool:
    return torch.distributed.get_rank() == 0


def write_full(folder: Path, tensors: Tensors, *, group: Any) -> dict[str, str]:
    """Writes both files on rank 0, and returns their checksums there; every rank fails if one does. Slices arrive one
    tensor at a time, through host memory: no GPU holds a second slice, no host a second tensor."""
    digests = {}
    with all_or_fail(f"{folder} cannot be written", group=group):
        for section in SECTIONS:
            prefix, path = f"{section}/", folder / f"{section}.safetensors"
            part = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            if other := [name for name, tensor in part.items() if type(local(tensor)) is not torch.Tensor]:
                held = f"{prefix}{other[0]}, which is quantised by slices"
                raise CheckpointError(f"checkpoint.format = full cannot hold {held}; use sharded")
            if _is_main():
                digests[path.name] = _write_file(path, part, group)
            else:
                for tensor in part.values():
                    # Not if rank 0 has the same slice.
                    if isinstance(tensor, DTensor) and dict(slices(tensor)).get(torch.distributed.get_rank()):
                        torch.distributed.send(tensor.to_local().detach().cpu().contiguous(), dst=0, group=group)
    return digests


def _write_file(path: Path, tensors: Tensors, group: Any) -> str:
    entries = {name: TensorEntry.of(tensor) for name, tensor in tensors.items()}
    arriving = {name: _pieces(tensor, group) for name, tensor in tensors.items()}
    try:
        with path.open("wb") as file:
            hashed = Hashed(file)
            with SafetensorsStream(cast(Any, hashed), entries=entries) as stream:
                for name, pieces in arriving.items():
                    stream.add_rows(name, entries[name], pieces)
            os.fsync(hashed.fileno())
        return hashed.sha256.hexdigest()
    finally:
        for pieces in arriving.values():  # after an error the other ranks still send: receive before raising
            deque(pieces, maxlen=0)


def _pieces(tensor: torch.Tensor, group: Any) -> Iterator[torch.Tensor]:
    """The slices of all ranks in order, on rank 0, one at a time."""
    if not isinstance(tensor, DTensor):
        yield tensor.detach().cpu()
        return
    mine = tensor.to_local().detach().cpu()
    for rank, rows in slices(tensor):
        if rank == 0:
            yield mine
        elif rows:
            received = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
            torch.distributed.recv(received, src=rank, group=group)
            yield received
