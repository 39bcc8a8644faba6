"""The `full` format: whole tensors in one safetensors file for the model and one for the optimizer.

Slices are sent to rank 0 one tensor at a time, through host memory: no GPU holds a second slice, no host a second
tensor.
Must not know what the tensors are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.dcp_files import Hashed
from fullshard.checkpoint.reader import CheckpointTensors
from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry
from fullshard.checkpoint.tensors import Tensors, local
from fullshard.dist.values import rows_of, slices
from fullshard.errors import CheckpointError

SECTIONS = ("model", "optimizer")


def write_full(folder: Path, tensors: Tensors, *, group: Any) -> dict[str, str]:
    """Writes both files on rank 0, with slices from all ranks; returns their checksums there."""
    digests = {}
    for section in SECTIONS:
        part = {n.removeprefix(f"{section}/"): t for n, t in tensors.items() if n.startswith(f"{section}/")}
        if other := [name for name, tensor in part.items() if type(local(tensor)) is not torch.Tensor]:
            raise CheckpointError(
                f"checkpoint.format = full cannot hold {section}/{other[0]}, which is quantised by slices; use sharded"
            )
        if torch.distributed.get_rank() == 0:
            digests[f"{section}.safetensors"] = _write(folder / f"{section}.safetensors", part, group)
        else:
            for tensor in part.values():
                _to_main(tensor, group)
    return digests


def _write(path: Path, tensors: Tensors, group: Any) -> str:
    entries = {name: TensorEntry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    arriving = {name: _pieces(tensor, group) for name, tensor in tensors.items()}
    try:
        with path.open("wb") as file:
            hashed = Hashed(file)
            with SafetensorsStream(cast(Any, hashed), entries=entries) as stream:
                for name, pieces in arriving.items():
                    stream.add_rows(name, entries[name], pieces)
            os.fsync(hashed.fileno())
        return hashed.hexdigest()
    finally:
        for pieces in arriving.values():  # after an error the other ranks still send: receive before raising
            for _ in pieces:
                pass


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


def _to_main(tensor: torch.Tensor, group: Any) -> None:
    """Sends this rank's slice, unless rank 0 has the same."""
    if isinstance(tensor, DTensor):
        rows = dict(slices(tensor))
        if rows.get(torch.distributed.get_rank()):
            torch.distributed.send(tensor.to_local().detach().cpu().contiguous(), dst=0, group=group)


def read_full(stored: CheckpointTensors, tensors: Tensors) -> None:
    """Reads this rank's rows of every tensor into their place."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(stored.read(name, *rows_of(tensor)))
        else:
            tensor.copy_(stored.whole(name))
