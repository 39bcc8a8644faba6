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
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import folder as files
from fullshard.dist import reduce
from fullshard.dist.shard import reshard
from fullshard.errors import CheckpointError


def save(
    run: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, Any],
    device: torch.device,
) -> tuple[Path, float]:
    """Writes and publishes `checkpoint-STEP` on all ranks; returns it and the seconds it took. A failure is fatal."""
    begun = time.monotonic()
    target = files.unfinished(run, step)
    is_main = torch.distributed.get_rank() == 0
    if is_main:
        _together(lambda: files.tidy(run, keep=None), device, "cannot clean up")
        _together(lambda: target.mkdir(parents=True), device, "cannot be created")
    else:
        _together(lambda: None, device, "cannot clean up")
        _together(lambda: None, device, "cannot be created")
    state = {**_named("model", model_tensors(model)), **_named("optimizer", optimizer_tensors(model, optimizer))}
    _together(lambda: dcp.save(state, checkpoint_id=target, no_dist=False), device, "cannot be written")
    mine = sorted(p.name for p in target.glob(f"__{torch.distributed.get_rank()}_*"))
    if is_main:
        mine.append(".metadata")
        files.write_json(target / files.STATE, facts)
        mine.append(files.STATE)
    described: dict[str, Any] = {}
    for part in reduce.gather_objects(files.describe_files(target, mine)):
        described |= part

    def finish() -> None:
        if is_main:
            files.write_json(target / files.MANIFEST, {"step": step, "files": described, "tensors": _tree(state)})
            files.point(run, "last", files.publish(run, step))

    _together(finish, device, "cannot be published")
    return run / files.name_of(step), time.monotonic() - begun


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads every tensor back into its place; a name missing on either side is an error that lists it."""
    reshard(model)
    materialise_state(optimizer)
    state = {**_named("model", model_tensors(model)), **_named("optimizer", optimizer_tensors(model, optimizer))}
    stored = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    missing, unexpected = sorted(set(state) - stored), sorted(stored - set(state))
    if missing or unexpected:
        raise CheckpointError(
            f"{path} does not fit this run: {len(missing)} tensors are missing in it (first: {missing[:1]}), "
            f"{len(unexpected)} are not known here (first: {unexpected[:1]}). Resume with the model, LoRA and "
            "optimizer settings it was saved with, or start over with --resume never."
        )
    dcp.load(state, checkpoint_id=path)


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


def _together(act: Callable[[], Any], device: torch.device, problem: str) -> None:
    """Runs `act` and makes every rank fail when one does: a save that is not whole must stop the run."""
    failure: Exception | None = None
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    if reduce.any_rank(failure is not None, device):
        rank = torch.distributed.get_rank()
        why = f"rank {rank}: {failure}" if failure else "another rank failed; its message says why"
        raise CheckpointError(f"The checkpoint {problem} ({why}). Check disk space and permissions.") from failure
