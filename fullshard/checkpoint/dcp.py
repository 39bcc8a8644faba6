"""Sharded checkpoints with DCP: all ranks write their slices, one rename publishes them, any world size reads them.

Everything is stored by parameter name, strict both ways. Must not know losses, recipes or what the facts mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import folder as files
from fullshard.dist import reduce
from fullshard.dist.shard import reshard
from fullshard.errors import CheckpointError


def save(
    run: Path, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> tuple[Path, float]:
    """Writes and publishes `checkpoint-STEP` on all ranks; returns it and the seconds it took. A failure is fatal."""
    begun = time.monotonic()
    target, rank = files.unfinished(run, step), torch.distributed.get_rank()
    state = {**_named("model", model_tensors(model)), **_named("optimizer", optimizer_tensors(model, optimizer))}
    described: dict[str, Any] = {}

    def begin() -> None:
        if rank == 0:
            files.tidy(run, keep=None)
            target.mkdir(parents=True)

    def describe() -> None:
        names = sorted(p.name for p in target.glob(f"__{rank}_*"))
        if rank == 0:
            files.write_json(target / files.STATE, facts)
            names += [".metadata", files.STATE]
        described.update(files.describe_files(target, names))

    def finish() -> None:
        if rank == 0:
            files.write_json(target / files.MANIFEST, {"step": step, "files": described, "tensors": _tree(state)})
            files.point(run, "last", files.publish(run, step))

    together(begin, f"{target} cannot be created")
    together(lambda: dcp.save(state, checkpoint_id=target), f"{target} cannot be written")
    together(describe, f"{target} cannot be described")
    for part in reduce.gather_objects(dict(described)):
        described |= part
    together(finish, f"{target} cannot be published")
    return run / files.name_of(step), time.monotonic() - begun


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads every tensor back into its place; a name missing on either side is an error that lists it."""
    reshard(model)
    materialise_state(optimizer)
    state = {**_named("model", model_tensors(model)), **_named("optimizer", optimizer_tensors(model, optimizer))}
    together(lambda: _check_fit(path, state), f"{path} does not fit this run", advice=_OTHER_SETTINGS)
    together(lambda: dcp.load(state, checkpoint_id=path), f"{path} cannot be read", advice=_OTHER_CHECKPOINT)


def load_weights(path: Path, *, model: nn.Module) -> None:
    """Reads the model's tensors alone."""
    reshard(model)
    state = _named("model", model_tensors(model))
    together(lambda: dcp.load(state, checkpoint_id=path), f"{path} cannot be read", advice=_OTHER_CHECKPOINT)


_SPACE = "Check disk space and permissions; the checkpoints before it are whole."
_OTHER_SETTINGS = (
    "Resume with the model, LoRA and optimizer settings it was saved with, or start over with --resume never."
)
_OTHER_CHECKPOINT = "Resume from another one: --resume RUN/checkpoint-STEP."


def _check_fit(path: Path, state: dict[str, torch.Tensor]) -> None:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    missing, unexpected = sorted(set(state) - set(shapes)), sorted(set(shapes) - set(state))
    other = [name for name in state if name in shapes and shapes[name] != tuple(state[name].shape)]
    found = []
    if missing:
        found.append(f"{len(missing)} tensors are missing in it, first {missing[0]}")
    if unexpected:
        found.append(f"{len(unexpected)} in it are not known here, first {unexpected[0]}")
    if other:
        shape = f"{list(shapes[other[0]])} in it, {list(state[other[0]].shape)} here"
        found.append(f"{len(other)} have another shape, first {other[0]} {shape}")
    if found:
        raise CheckpointError("; ".join(found))


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (a tied one once) and persistent buffers, by name."""
    reshard(model)
    parameters: dict[str, torch.Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: t for name, t in model.state_dict().items() if name not in aliases}
    return parameters | buffers


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }


@torch.no_grad()
def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Lets a lazy optimizer make its state, without moving a weight, so that there is a place to load into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _named(section: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}


def _tree(state: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "sharded": isinstance(t, DTensor)}
        for name, t in state.items()
    }


def together(act: Callable[[], Any], problem: str, *, advice: str = _SPACE) -> None:
    """Runs `act` and makes every rank fail, for the same reason, when one does."""
    reason = None
    try:
        act()
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must hear of it
        reason = _reason(error)
    reasons = [found for found in dict.fromkeys(reduce.gather_objects(reason)) if found]
    if reasons:
        raise CheckpointError(f"{problem} ({'; '.join(reasons)}). {advice}")


def _reason(error: BaseException) -> str:
    """What went wrong and on which rank; DCP packs the errors of all ranks into one."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_words(failed)}" for rank, (failed, _) in sorted(error.failures.items()))
    if isinstance(error, CheckpointError):
        return str(error)
    return f"rank {torch.distributed.get_rank()}: {_words(error)}"


def _words(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return (
        said[0] if isinstance(error, OSError) and said else f"{type(error).__name__}: {said[0] if said else 'no text'}"
    )
