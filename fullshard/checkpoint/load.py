"""Reads a checkpoint back into a run, on all ranks, and proves that it is what was saved.

Tensors are matched by name, strictly in both directions; the optimizer's step count and norms must be those saved.
Must not know files beyond the checkpoint's own, recipes or losses.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.dcp_files import Reader
from fullshard.checkpoint.reader import CheckpointTensors, is_full, open_tensors
from fullshard.checkpoint.tensors import Tensors, all_tensors, counts, materialise_state, model_tensors, squares
from fullshard.checkpoint.write import norms
from fullshard.dist.agreement import all_or_fail
from fullshard.dist.average import KEY as EMA
from fullshard.dist.average import Average
from fullshard.dist.shard import reshard
from fullshard.dist.values import local, rows_of
from fullshard.errors import CheckpointError
from fullshard.formatting.plural import counted

_OTHER_SETTINGS = (
    "Resume with the model, LoRA, optimizer and ema settings it was saved with, or start over with --resume never."
)
_OTHER_CHECKPOINT = "Resume from another one: --resume RUN/checkpoint-STEP."


def load(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Weights and optimizer state; a name missing on either side is an error that lists it."""
    reshard(model)
    materialise_state(optimizer)
    if average:
        average.materialise()
    state = all_tensors(model, optimizer)
    for name, tensor in state.items():
        if name.startswith("optimizer/") and name.endswith("/step") and not tensor.dim():
            tensor.fill_(-1)  # no save has this value, so state that was not read is found
    _read(path, state, left_out=left_out)
    _prove(path, state)


def load_weights(path: Path, *, model: nn.Module, left_out: Collection[str] = (), average: Tensors) -> None:
    """The model's tensors alone, and those of its average, by parameter name."""
    reshard(model)
    state = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    state |= {f"optimizer/{name}/{EMA}": tensor for name, tensor in average.items()}
    _read(path, state, left_out=left_out, weights_only=True)


def _read(path: Path, state: Tensors, *, left_out: Collection[str], weights_only: bool = False) -> None:
    with all_or_fail(f"{path} cannot be read", advice=_OTHER_CHECKPOINT):
        stored = open_tensors(path)
    shapes = {name: entry.shape for name, entry in stored.entries.items()}
    if weights_only:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith("model/") or name in state}
    with all_or_fail(f"{path} does not fit this run", advice=_OTHER_SETTINGS):
        _check_fit(shapes, state, left_out={f"model/{name}" for name in left_out})
    read_into({name: tensor for name, tensor in state.items() if name in shapes}, path, stored)


def read_into(wanted: Tensors, path: Path, stored: CheckpointTensors) -> None:
    """Fills tensors with the stored values of the same names; each rank reads its own slices."""
    with all_or_fail(f"{path} cannot be read", advice=_OTHER_CHECKPOINT):
        if is_full(path):
            for name, tensor in wanted.items():
                rows = stored.read(name, *rows_of(tensor)) if isinstance(tensor, DTensor) else stored.whole(name)
                local(tensor).copy_(rows)
        else:
            dcp.load(dict(wanted), storage_reader=Reader(path))


def _check_fit(shapes: dict[str, tuple[int, ...]], state: Tensors, *, left_out: set[str]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in state.items()}
    other = [name for name in own if shapes.get(name, own[name]) != own[name]]
    found = {
        "missing from it": sorted(own.keys() - shapes.keys() - left_out),
        "not part of this run": sorted(shapes.keys() - own.keys()),
        "of another shape": [f"{name} {list(shapes[name])} (this run has {list(own[name])})" for name in other],
    }
    if wrong := [f"{counted(len(names), 'tensor')} {what}, first {names[0]}" for what, names in found.items() if names]:
        raise CheckpointError("; ".join(wrong))


def _prove(path: Path, state: Tensors) -> None:
    """Proves that the optimizer's state is the saved one: with a reset one, training would silently get worse."""
    saved: dict[str, Any] = files.read_state(path).get("optimizer") or {}
    steps, read = counts(state), norms({kind: float(share) for kind, share in squares(state).items()})
    # 8-bit state is quantised again if it is cut into other slices.
    near = 1e-2 if any(type(local(tensor)) is not torch.Tensor for tensor in state.values()) else 1e-6
    with all_or_fail(f"{path}: the optimizer's state is not what was saved", advice=_OTHER_CHECKPOINT):
        if saved.get("steps") != steps:
            raise CheckpointError(f"step counts {saved.get('steps')} were saved, {steps} were read")
        for kind, norm in read.items():
            before = saved.get("norms", {}).get(kind)
            if before is None or not math.isclose(before, norm, rel_tol=near):
                raise CheckpointError(f"a norm of {before} was saved for {kind}, {norm} was read")
