"""What must not be rounded to half precision: routers, modules that the model lists to keep in fp32, and timesteps.

FSDP casts a unit's parameters together and its inputs at its boundary. So modules that compute in fp32 become their own
units, and exact inputs are not cast. Must not know any model class, ranks or losses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

EXACT_INPUTS = ("timestep", "timesteps", "t", "sigma", "sigmas")
"""Arguments of a forward that are never cast: bf16 has only 507 values for the integers 0 to 999."""


def exact_modules(module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the outermost modules that compute in fp32 in any precision; and names of single parameters that the
    model lists as well, but that are cast because others in their module are."""
    listed = _listed(module)
    found: list[str] = []
    for name, part in module.named_modules():
        if not name or within(name, found) or not _can_be_unit(part):
            continue
        if _is_router(module, name, part) or {key for key, _ in part.named_parameters(prefix=name)} <= listed:
            found.append(name)
    return found, sorted(name for name in listed if not within(name, found))


def timed_modules(module: nn.Module, blocks: Collection[str]) -> list[str]:
    """Modules outside the blocks that an exact input passes through: the parts of a module whose forward takes one. As
    separate units they cast their inputs, so a sinusoid computed in fp32 meets weights of the compute dtype."""
    found: list[str] = []
    for name in _behind_exact(module):
        holds_block = any(block.startswith(f"{name}.") for block in blocks)
        if not holds_block and not within(name, [*blocks, *found]):
            found.append(name)
    return found


def timed_in_blocks(module: nn.Module, blocks: Collection[str], units: Collection[str]) -> list[str]:
    """The same within the blocks: these are not units, as the block has gathered their parameters."""
    return [name for name in _behind_exact(module) if name not in units and within(name, blocks)]


def _behind_exact(module: nn.Module) -> list[str]:
    """Each part of a module whose forward takes an exact input, unless it takes one itself."""
    found = []
    for name, part in module.named_modules():
        if exact_inputs(part):
            parts = ((f"{name}.{key}" if name else key, child) for key, child in part.named_children())
            found += [path for path, child in parts if _can_be_unit(child) and not exact_inputs(child)]
    return found


def within(name: str, units: Collection[str]) -> bool:
    """Whether a module is one of the units, or part of one."""
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def exact_inputs(part: nn.Module) -> list[str]:
    """The exact inputs of a module's forward, by argument name."""
    return [name for name in inspect.signature(part.forward).parameters if name in EXACT_INPUTS]


def cast_inputs(unit: nn.Module, compute: torch.dtype) -> None:
    """Casts the floating-point inputs of a unit as FSDP would, except the exact ones."""
    names = list(inspect.signature(unit.forward).parameters)

    def to_compute(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(compute) if tensor.is_floating_point() else tensor

    def cast(name: str, value: Any) -> Any:
        return value if name in EXACT_INPUTS else tree_map_only(torch.Tensor, to_compute, value)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = names[: len(args)] + [""] * (len(args) - len(names))
        return (
            tuple(cast(name, value) for name, value in zip(placed, args, strict=True)),
            {name: cast(name, value) for name, value in kwargs.items()},
        )

    unit.register_forward_pre_hook(before, with_kwargs=True)


def _listed(module: nn.Module) -> set[str]:
    """Parameters in the keep-in-fp32 lists of the model, or of a model inside it."""
    found: set[str] = set()
    for prefix, part in module.named_modules():
        lists = (getattr(part, f"_keep_in_fp32_modules{kind}", None) or () for kind in ("", "_strict"))
        for name in (name for names in lists for name in names):
            pattern = re.compile(rf"(^|\.){re.escape(name)}($|\.)")
            own = (key for key, _ in part.named_parameters(prefix=prefix))
            found.update(key for key in own if pattern.search(key.removeprefix(f"{prefix}.")))
    return found


def _is_router(module: nn.Module, name: str, part: nn.Module) -> bool:
    """By its class, or by its position: a gate beside experts."""
    parent, _, key = name.rpartition(".")
    beside_experts = key in ("gate", "router") and hasattr(module.get_submodule(parent), "experts")
    return beside_experts or re.search("Router|Gating$", type(part).__name__) is not None


def _can_be_unit(part: nn.Module) -> bool:
    """It has parameters, and a forward that gathers them."""
    return not isinstance(part, (nn.ModuleList, nn.ModuleDict)) and next(part.parameters(), None) is not None
