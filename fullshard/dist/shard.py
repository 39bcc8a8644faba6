"""Spreads one model over the ranks. The order is fixed here and nowhere else:

    activation checkpointing → compile per block → fully_shard per block, then root → materialise → values → proof

Edits (LoRA, frozen parts, resized embedding) come before, in the family. Must not know any model class or loss.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

from fullshard.contracts.model import Family, Weights
from fullshard.dist import keep_in_fp32, recompute, single_rank, unview, values
from fullshard.dist.gradient_sync import STAY
from fullshard.dist.mesh import Layout
from fullshard.dist.wrap import WrapPlan, tied_groups, unit_parameters


@dataclass(frozen=True)
class ShardPlan:
    """How to spread the model; all of it decided before."""

    wrap: WrapPlan
    layout: Layout
    compute: torch.dtype
    storage: torch.dtype = torch.float32
    """What trained parameters are kept in; those of units that compute in fp32 are kept in fp32 as well."""
    activation_checkpointing: str = "none"
    recompute: Mapping[str, str] = field(default_factory=dict)
    """Blocks with activation checkpointing of their own, by name."""
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
    storage = store(module, plan, family)
    # Fresh values are drawn per block: what is drawn must not depend on what computes in fp32.
    drawn = unit_parameters(module, WrapPlan(plan.wrap.blocks, plan.wrap.separate))
    template = copy.deepcopy(module)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    blocks = [module.get_submodule(name) for name in plan.wrap.blocks]
    for name, block in zip(plan.wrap.blocks, blocks, strict=True):
        asked = plan.recompute.get(name, plan.activation_checkpointing)
        recompute.apply([block], recompute.of_block(name, asked, plan.wrap.units))
    if plan.compile:
        for block in blocks:
            block.compile()
    unview.make_own([module, *map(module.get_submodule, plan.wrap.units)])
    _fully_shard(module, plan, mesh, device=device, methods=family.forward_methods)
    resident = torch.device("cpu") if plan.cpu_offload else device
    values.materialise(module, ties, parameters_on=resident, buffers_on=device)
    values.fill(module, template, drawn, ties, family=family, weights=weights, draw_on=device, seed=seed)
    values.prove(module, trainable, storage)
    return describe(module, plan, ties)


def store(module: nn.Module, plan: ShardPlan, family: Family) -> dict[str, torch.dtype]:
    """Gives every meta parameter the dtype it is kept in, and says which; a tied parameter stays one object. FSDP
    cannot slice a scalar: it becomes a vector of one."""
    storage: dict[str, torch.dtype] = {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        in_fp32 = any(name.startswith(f"{unit}.") for unit in plan.wrap.exact)
        trained = torch.float32 if in_fp32 else plan.storage
        storage[name] = trained if parameter.requires_grad else family.storage_dtype(name, parameter)
        data = parameter.data.to(storage[name])
        replaced[parameter] = nn.Parameter(data.reshape(data.shape or (1,)), requires_grad=parameter.requires_grad)
    for submodule in module.modules():
        for key, parameter_or_none in submodule._parameters.items():
            if parameter_or_none is not None:
                submodule._parameters[key] = replaced[parameter_or_none]
    return storage


def _fully_shard(
    module: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, device: torch.device, methods: Sequence[str]
) -> None:
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    reshard = plan.layout.reshard_after_forward
    for name in keep_in_fp32.timed_in_blocks(module, plan.wrap.blocks, plan.wrap.units):
        keep_in_fp32.cast_inputs(module.get_submodule(name), plan.compute)
    # The innermost first: a unit takes the parameters below it that no other has taken. The root holds the head:
    # gathered for the loss, needed again at once in the backward pass.
    for name in [*sorted(plan.wrap.units, key=lambda name: -name.count(".")), ""]:
        part = module.get_submodule(name)
        policy = _policy(plan, name, part)
        if not policy.cast_forward_inputs:
            keep_in_fp32.cast_inputs(part, plan.compute)
        fully_shard(
            part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard and name != ""
        )
    if mesh.size() == 1 and not plan.cpu_offload:
        single_rank.save_passes(fsdp_modules(module))
    setattr(module, STAY, not reshard)
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


def _policy(plan: ShardPlan, name: str, unit: nn.Module) -> MixedPrecisionPolicy:
    """The one place where dtypes meet; there is no autocast on top."""
    if name in plan.wrap.exact:
        return MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=plan.compute)
    # The dtype also for fp32: a frozen base that is kept in bf16 would else compute in bf16, whatever the header says.
    # What leaves the model is fp32, so that no loss meets a half-precision prediction with an fp32 target.
    output = torch.float32 if name == "" else None
    return MixedPrecisionPolicy(
        plan.compute, torch.float32, output, cast_forward_inputs=not keep_in_fp32.exact_inputs(unit)
    )


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Gives gathered parameters back, as after a forward pass that no backward pass follows."""
    for unit in fsdp_modules(module):
        unit.reshard()


def describe(module: nn.Module, plan: ShardPlan, ties: list[list[str]]) -> list[Unit]:
    """The units of a module, sharded or still on meta with its storage dtypes."""
    parameters = dict(module.named_parameters())
    described = []
    for name, members in unit_parameters(module, plan.wrap).items():
        held = [parameters[member] for member in members]
        if held:
            described.append(
                Unit(
                    name=name or "(root)",
                    class_name=type(module.get_submodule(name)).__name__.removeprefix("FSDP"),
                    parameters=sum(p.numel() for p in held),
                    trainable=sum(p.numel() for p in held if p.requires_grad),
                    storage=sorted({str(p.dtype).removeprefix("torch.") for p in held}),
                    compute="float32" if name in plan.wrap.exact else str(plan.compute).removeprefix("torch."),
                    reduce="float32",
                    tied=[group for group in ties if set(group) & set(members)],
                )
            )
    return described
