"""Shards one model over the ranks. The order is fixed here and nowhere else:

    float8 → recomputation → compile per block → fully_shard per block, then root → allocate → set values → proof

Edits (LoRA, frozen parts, resized embedding) come before, in the family. Must not know any model class or loss.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from fullshard.contracts.model import Family, Weights
from fullshard.dist import keep_in_fp32, recompute, single_rank, values
from fullshard.dist.gradients import STAYS_GATHERED
from fullshard.dist.mesh import Layout
from fullshard.dist.wrap import WrapPlan, tied_groups, unit_parameters
from fullshard.kernels.float8 import Float8


@dataclass(frozen=True)
class ShardPlan:
    """How to shard the model; everything is decided."""

    wrap: WrapPlan
    layout: Layout
    compute: torch.dtype
    storage: torch.dtype = torch.float32
    """Of trained parameters; those of units that compute in fp32 are stored in fp32."""
    float8: Float8 | None = None
    activation_checkpointing: str = "none"
    recompute: Mapping[str, str] = field(default_factory=dict)
    """Blocks whose activation checkpointing differs, by name."""
    compile: bool = False
    cpu_offload: bool = False
    forward_prefetch: bool = False


@dataclass(frozen=True)
class Unit:
    """One FSDP unit, as units.json lists it."""

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
    """Turns a module on meta into a sharded one with values, in place; returns its units."""
    ties = tied_groups(module)
    storage = store(module, plan, family)
    # Fresh values are drawn per block: they must not depend on what computes in fp32.
    drawn = unit_parameters(module, WrapPlan(plan.wrap.blocks, plan.wrap.separate))
    template = copy.deepcopy(module)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    if plan.float8:
        plan.float8.convert(module, plan.wrap.blocks, plan.wrap.exact)
    for name in plan.wrap.blocks:
        block = module.get_submodule(name)
        asked = plan.recompute.get(name, plan.activation_checkpointing)
        recompute.apply(block, recompute.of_block(name, asked, plan.wrap.units))
        if plan.compile:
            block.compile()
    hook = torch.compiler.disable(_copy_views)  # FSDP's own hook, which must come after, breaks the graph as well
    for unit in (module, *map(module.get_submodule, plan.wrap.units)):
        unit.register_forward_hook(hook)
    _fully_shard(module, plan, mesh, device=device, methods=family.forward_methods)
    resident = torch.device("cpu") if plan.cpu_offload else device
    values.materialise(module, ties, parameters_on=resident, buffers_on=device)
    values.fill(module, template, drawn, ties, family=family, weights=weights, draw_on=device, seed=seed)
    values.prove(module, trainable, storage)
    return describe(module, plan, ties)


def store(module: nn.Module, plan: ShardPlan, family: Family) -> dict[str, torch.dtype]:
    """Casts every meta parameter to its storage dtype, and returns the dtypes; a tied parameter stays one object. FSDP
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


def _copy_views(_: nn.Module, inputs: Any, output: Any) -> Any:
    """FSDP gathers a unit's parameters for the backward pass in a hook on its outputs, and an in-place operation on a
    view drops hooks: gradients would be silently wrong."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor._base is not None and tensor.requires_grad else tensor

    return tree_map_only(torch.Tensor, copied, output) if torch.is_grad_enabled() else output


def _fully_shard(
    module: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, device: torch.device, methods: Sequence[str]
) -> None:
    offload = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.cpu_offload else fsdp.OffloadPolicy()
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
        kept = reshard and name != ""
        fsdp.fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=kept)
    units = fsdp_modules(module)
    if mesh.size() == 1 and not plan.cpu_offload:
        single_rank.save_passes(units)
    for unit in units if mesh.size() > 1 else ():
        # Gradients are sums: the loss is already divided by the global count. The forced sum is what gloo can do.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    setattr(module, STAYS_GATHERED, not reshard)
    for method in methods:
        fsdp.register_fsdp_forward_method(module, method)
    if plan.forward_prefetch:
        blocks = [cast(FSDPModule, module.get_submodule(name)) for name in plan.wrap.blocks]
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])


def _policy(plan: ShardPlan, name: str, unit: nn.Module) -> MixedPrecisionPolicy:
    """All dtypes of a unit; there is no autocast on top."""
    if name in plan.wrap.exact:
        return MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=plan.compute)
    # Also for fp32: otherwise a frozen base that is stored in bf16 would compute in bf16, whatever the header says.
    # What leaves the model is fp32, so that no loss meets a half-precision prediction with an fp32 target.
    output, cast = torch.float32 if name == "" else None, not keep_in_fp32.exact_inputs(unit)
    return MixedPrecisionPolicy(plan.compute, torch.float32, output, cast_forward_inputs=cast)


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Frees gathered parameters, as after a forward pass without a backward pass."""
    for unit in fsdp_modules(module):
        unit.reshard()


def describe(module: nn.Module, plan: ShardPlan, ties: list[list[str]]) -> list[Unit]:
    """The units of a module, sharded or still on meta with its storage dtypes."""
    parameters = dict(module.named_parameters())
    return [
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
        for name, members in unit_parameters(module, plan.wrap).items()
        if (held := [parameters[member] for member in members])
    ]
