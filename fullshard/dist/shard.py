"""Spreads one model over the ranks. The order is fixed here and nowhere else:

    activation checkpointing → compile per block → fully_shard per block, then root → materialise → values → proof

Edits (LoRA, frozen parts, resized embedding) come before, in the family. Must not know any model class or loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from fullshard.dist import outputs, recompute, values
from fullshard.dist.mesh import Layout
from fullshard.dist.wrap import WrapPlan, tied_groups, unit_parameters
from fullshard.models.base import Family, Weights
from fullshard.objectives.base import Batch


@dataclass(frozen=True)
class ShardPlan:
    """How to spread the model; all of it decided before."""

    wrap: WrapPlan
    layout: Layout
    compute: torch.dtype
    activation_checkpointing: str = "none"
    compile: bool = False
    cpu_offload: bool = False
    forward_prefetch: bool = False


@dataclass(frozen=True)
class Unit:
    """One FSDP unit, as it is."""

    name: str
    class_name: str
    parameters: int
    trainable: int
    storage: list[str]
    compute: str
    reduce: str
    tied: list[list[str]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"trainable_fraction": self.trainable / max(self.parameters, 1)}


def shard(
    module: nn.Module,
    plan: ShardPlan,
    mesh: DeviceMesh,
    *,
    family: Family,
    weights: Weights | None,
    device: torch.device,
    seed: int,
) -> list[Unit]:
    """Turns a module with meta parameters into a sharded one with values, in place; returns its units."""
    ties = tied_groups(module)
    _store(module, family)
    units = unit_parameters(module, plan.wrap)
    template = copy.deepcopy(module)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    blocks = [module.get_submodule(name) for name in plan.wrap.blocks]
    recompute.apply(blocks, plan.activation_checkpointing)
    if plan.compile:
        for block in blocks:
            block.compile()
    outputs.make_own(blocks)
    _fully_shard(module, plan, mesh, device=device, methods=family.forward_methods)
    resident = torch.device("cpu") if plan.cpu_offload else device
    values.materialise(module, ties, parameters_on=resident, buffers_on=device)
    values.fill(module, template, units, ties, family=family, weights=weights, draw_on=device, seed=seed)
    values.prove(module, trainable)
    return _describe(module, units, plan, ties)


def _store(module: nn.Module, family: Family) -> None:
    """Gives every meta parameter the dtype it is kept in; a tied parameter stays one object. FSDP cannot slice a
    scalar: it becomes a vector of one."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        dtype = family.storage_dtype(name, parameter)
        data = parameter.data.to(dtype)
        replaced[parameter] = nn.Parameter(data.reshape(data.shape or (1,)), requires_grad=parameter.requires_grad)
    for submodule in module.modules():
        for key, parameter_or_none in submodule._parameters.items():
            if parameter_or_none is not None:
                submodule._parameters[key] = replaced[parameter_or_none]


def _fully_shard(
    module: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, device: torch.device, methods: Sequence[str]
) -> None:
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    settings: dict[str, Any] = {
        "mesh": mesh,
        # Also for fp32: a frozen base that is kept in bf16 would else compute in bf16, whatever the header says.
        "mp_policy": MixedPrecisionPolicy(param_dtype=plan.compute, reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    reshard = plan.layout.reshard_after_forward
    for name in [*plan.wrap.blocks, *plan.wrap.separate]:
        fully_shard(module.get_submodule(name), reshard_after_forward=reshard, **settings)
    # The root holds the head: gathered for the loss, needed again at once in the backward pass.
    fully_shard(module, reshard_after_forward=False, **settings)
    for method in methods:
        register_fsdp_forward_method(module, method)
    for unit in fsdp_modules(module):
        if mesh.size() > 1:
            # Gradients are sums: the loss is already divided by the global count. The forced sum is what gloo can do.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    if plan.forward_prefetch:
        blocks = [cast(FSDPModule, module.get_submodule(name)) for name in plan.wrap.blocks]
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Gives gathered parameters back, as after a forward pass that no backward pass follows."""
    for unit in fsdp_modules(module):
        unit.reshard()


def one_by_one(module: nn.Module, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Micro-batches of one step. Gradients are reduced into their slices after each, so accumulation costs no full-size
    gradient; replicas are added up once, after the last."""
    root = cast(FSDPModule, module)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        root.set_is_last_backward(last)
        root.set_requires_all_reduce(last)
        yield batch


def _describe(module: nn.Module, units: dict[str, list[str]], plan: ShardPlan, ties: list[list[str]]) -> list[Unit]:
    parameters = dict(module.named_parameters())
    described = []
    for name, members in units.items():
        held = [parameters[member] for member in members]
        if held:
            described.append(
                Unit(
                    name=name or "(root)",
                    class_name=type(module.get_submodule(name)).__name__.removeprefix("FSDP"),
                    parameters=sum(p.numel() for p in held),
                    trainable=sum(p.numel() for p in held if p.requires_grad),
                    storage=sorted({str(p.dtype).removeprefix("torch.") for p in held}),
                    compute=str(plan.compute).removeprefix("torch."),
                    reduce="float32",
                    tied=[group for group in ties if set(group) & set(members)],
                )
            )
    return described
