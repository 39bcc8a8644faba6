"""Reads a checkpoint back into a run, on all ranks, and proves that it is what was saved.

Every tensor by its name, strict both ways; the optimizer's step count and norms must come out as they went in.
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

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.dcp_files import Reader
from fullshard.checkpoint.full import read_full
from fullshard.checkpoint.reader import CheckpointTensors, Full, open_tensors
from fullshard.checkpoint.tensors import Tensors, all_tensors, counts, materialise_state, model_tensors, squares
from fullshard.checkpoint.write import norms
from fullshard.dist.all_or_fail import together
from fullshard.dist.average import KEY as EMA
from fullshard.dist.average import Average
from fullshard.dist.shard import reshard
from fullshard.dist.values import local
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
    # Filled with what no save would leave, so that state which was not read shows.
    state = all_tensors(model, optimizer)
    _spoil(state)
    _read(path, state, left_out=[f"model/{name}" for name in left_out])
    _prove(path, state)


def load_weights(path: Path, *, model: nn.Module, left_out: Collection[str] = (), average: Tensors) -> None:
    """The model's tensors alone, and those of its average, by parameter name."""
    reshard(model)
    state = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    state |= {f"optimizer/{name}/{EMA}": tensor for name, tensor in average.items()}
    _read(path, state, left_out=[f"model/{name}" for name in left_out], weights_only=True)


def _spoil(state: Tensors) -> None:
    for name, tensor in state.items():
        if name.startswith("optimizer/") and name.endswith("/step") and not tensor.dim():
            tensor.fill_(-1)


def _read(path: Path, state: Tensors, *, left_out: Collection[str], weights_only: bool = False) -> None:
    opened: list[CheckpointTensors] = []
    wanted: Tensors = {}

    def fit() -> None:
        shapes = {name: opened[0].shape(name) for name in opened[0].names()}
        if weights_only:
            shapes = {name: shape for name, shape in shapes.items() if name.startswith("model/") or name in state}
        _check_fit(shapes, state, left_out=left_out)
        wanted.update({name: tensor for name, tensor in state.items() if name in shapes})

    def read() -> None:
        if isinstance(opened[0], Full):
            read_full(opened[0], wanted)
        else:
            dcp.load(dict(wanted), storage_reader=Reader(path))

    together(lambda: opened.append(open_tensors(path)), f"{path} cannot be read", advice=_OTHER_CHECKPOINT)
    together(fit, f"{path} does not fit this run", advice=_OTHER_SETTINGS)
    together(read, f"{path} cannot be read", advice=_OTHER_CHECKPOINT)


def _check_fit(shapes: dict[str, tuple[int, ...]], state: Tensors, *, left_out: Collection[str]) -> None:
    missing, unexpected = sorted(set(state) - set(shapes) - set(left_out)), sorted(set(shapes) - set(state))
    other = [name for name in state if name in shapes and shapes[name] != tuple(state[name].shape)]
    found = []
    if missing:
        found.append(f"{counted(len(missing), 'tensor')} {_be(missing)} missing in it, first {missing[0]}")
    if unexpected:
        found.append(f"{len(unexpected)} in it {_be(unexpected)} not known here, first {unexpected[0]}")
    if other:
        shape = f"{list(shapes[other[0]])} in it, {list(state[other[0]].shape)} here"
        found.append(f"{len(other)} {_be(other)} of another shape, first {other[0]} {shape}")
    if found:
        raise CheckpointError("; ".join(found))


def _be(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _prove(path: Path, state: Tensors) -> None:
    """The optimizer's state is the one that was saved: a state that was silently reset would train on, worse."""
    saved: dict[str, Any] = files.read_state(path).get("optimizer") or {}
    shares = squares(state)
    steps, read = counts(state), norms(list(shares), [float(share) for share in shares.values()])
    # 8-bit state is quantised anew where its slices are cut in another way.
    near = 1e-2 if any(type(local(tensor)) is not torch.Tensor for tensor in state.values()) else 1e-6

    def compare() -> None:
        if saved.get("steps") != steps:
            raise CheckpointError(f"step counts {saved.get('steps')} were saved, {steps} were read")
        for kind, norm in read.items():
            before = saved.get("norms", {}).get(kind)
            if before is None or not math.isclose(before, norm, rel_tol=near):
                raise CheckpointError(f"a norm of {before} was saved for {kind}, {norm} was read")

    together(compare, f"{path}: the optimizer's state is not what was saved", advice=_OTHER_CHECKPOINT)
