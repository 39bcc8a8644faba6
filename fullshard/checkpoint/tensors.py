"""The tensors of a checkpoint by parameter name, and a few numbers that prove after a load that they are the same.

Must not know files, formats or recipes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.checkpoint.tensor_files import TensorEntry
from fullshard.dist.shard import reshard
from fullshard.dist.values import local, plain

Tensors = dict[str, torch.Tensor]


def model_tensors(model: nn.Module, *, left_out: Collection[str] = ()) -> Tensors:
    """Parameters (a tied one once) and persistent buffers, by name."""
    reshard(model)
    parameters: Tensors = {name: plain(p.detach()) for name, p in model.named_parameters() if name not in left_out}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: t for name, t in model.state_dict().items() if name not in aliases}
    return parameters | buffers


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }


def all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, *, left_out: Collection[str] = ()) -> Tensors:
    """Everything, under `model/` and `optimizer/`."""
    return {
        **{f"model/{name}": tensor for name, tensor in model_tensors(model, left_out=left_out).items()},
        **{f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(model, optimizer).items()},
    }


@torch.no_grad()
def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Lets a lazy optimizer create its state without moving a weight, so that it can be loaded into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def flat(name: str, tensor: torch.Tensor) -> Tensors:
    """The plain tensors that a tensor consists of: itself, or the parts of a subclass such as 8-bit state."""
    if not is_traceable_wrapper_subclass(tensor):
        return {name: tensor}
    return {f"{name}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}


@torch.no_grad()
def squares(tensors: Tensors) -> Tensors:
    """This rank's share of the squared norm of each kind of optimizer state (`exp_avg`, ...), in fp64."""
    kinds: dict[str, tuple[list[torch.Tensor], list[int]]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/") and tensor.dim() and tensor.is_floating_point():
            slices, copies = kinds.setdefault(name.rpartition("/")[2], ([], []))
            value = local(tensor)
            # 8-bit state is a tensor subclass without a norm.
            slices.append(value if type(value) is torch.Tensor else value.dequantize())
            copies.append(_copies(tensor))
    return {kind: _sum_of_squares(slices, copies) for kind, (slices, copies) in kinds.items()}


def _sum_of_squares(slices: list[torch.Tensor], copies: list[int]) -> torch.Tensor:
    # One call for all: the device idles while the host prepares a save.
    norms = torch.stack(torch._foreach_norm(slices, 2.0, dtype=torch.float64))
    return (norms.square() / torch.tensor(copies, dtype=torch.float64).to(norms.device, non_blocking=True)).sum()


def _copies(tensor: torch.Tensor) -> int:
    """How many ranks hold the same slice."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_world_size()
    replicated = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    return math.prod(tensor.device_mesh.size(axis) for axis in replicated)


def counts(tensors: Tensors) -> list[float]:
    """The lowest and highest step count in an optimizer's state; empty if it keeps none."""
    steps = [float(t) for name, t in tensors.items() if name.startswith("optimizer/") and name.endswith("/step")]
    return [min(steps), max(steps)] if steps else []


def tree(tensors: Mapping[str, torch.Tensor | TensorEntry]) -> dict[str, dict[str, Any]]:
    """Shape and dtype by name, for the manifest."""
    return {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in tensors.items()}
