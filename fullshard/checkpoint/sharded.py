"""The `sharded` format: every rank writes its own slices as DCP files.

Which rank writes what is the same in every save of a run, so it is planned once: planning would hold up the thread that
feeds the device. Must not know what the tensors are, nor when a save is complete.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.dcp_files import Writer
from fullshard.checkpoint.tensors import Tensors, flat
from fullshard.dist.all_or_fail import together
from fullshard.dist.gather import gather_to_main, scatter_from_main


class OneByOne(DefaultSavePlanner):
    """Copies one tensor at a time to the host in each writing thread. DCP would hold all tensors of a file, which in a
    synchronous save is a copy of the whole state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
    """Writes the slices of one run, save after save."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._form: list[Any] = []
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        """The metadata of the whole checkpoint, on rank 0."""

    def write(self, folder: Path, tensors: Tensors, *, group: Any) -> dict[str, str]:
        """Writes this rank's slices; returns the checksums of its files. Every rank fails if one does."""
        problem = f"{folder} cannot be written"
        writer = Writer(folder, threads=self._threads)
        if self._plan is None or self._form != _form(tensors):
            self.agree(tensors, problem, group=group)
        results: list[WriteResult] = []

        def put() -> None:
            assert self._plan is not None
            planner = OneByOne(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(dict(tensors), is_coordinator=_is_main())
            plan = planner.finish_plan(writer.prepare_local_plan(self._plan))
            results.extend(writer.write_data(plan, planner).wait())

        together(put, problem, group=group)
        written = gather_to_main(results, group=group)

        def finish() -> None:
            if _is_main():
                assert self._metadata is not None
                writer.finish(self._metadata, written)

        together(finish, problem, group=group)
        return writer.digests

    def agree(self, tensors: Tensors, problem: str, *, group: Any) -> None:
        """Plans which rank writes what, for tensors of this form; before the first save if the form is known."""
        planner = DefaultSavePlanner()
        local: list[SavePlan] = []

        def plan_mine() -> None:
            planner.set_up_planner(dict(tensors), is_coordinator=_is_main())
            local.append(planner.create_local_plan())

        together(plan_mine, problem, group=group)
        shares = gather_to_main(local[0], group=group)

        def plan_all() -> None:
            if _is_main():
                planned, self._metadata = planner.create_global_plan(shares)
                shares[:] = Writer(Path(), threads=1).prepare_global_plan(planned)

        together(plan_all, problem, group=group)
        self._plan, self._form = scatter_from_main(shares, group=group), _form(tensors)


def _form(tensors: Tensors) -> list[Any]:
    """All that a plan depends on; the same on every rank."""
    return [
        (name, t.dtype, t.shape, t._spec.placements if isinstance(t, DTensor) else None) for name, t in tensors.items()
    ]


def _is_main() -> bool:
    return torch.distributed.get_rank() == 0
