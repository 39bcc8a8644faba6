"""Fresh values for one FSDP unit at a time, exactly as the model's own initialisation gives them.

Must not know ranks, files or model names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

_FLAG = "_is_hf_initialized"


@torch.no_grad()
def initialise_subtree(unit: nn.Module, *, root: nn.Module) -> None:
    """Initialises the real tensors under `unit`, children before parents; tensors on meta are left for their own unit.

    The rules of its ancestors run as well, because some architectures set a child's values in the parent's rule;
    tensors outside the unit are protected from them.
    """
    from transformers import initialization

    path = _path_to(unit, root=root)
    owners = _owners(path)
    with _only(unit, root=root) as shielded, initialization.guard_torch_init_functions():
        _initialise(unit, owners[-1], shielded, _shared(root))
        for module, owner in zip(reversed(path[:-1]), reversed(owners[:-1]), strict=True):
            owner(module)


def _initialise(
    module: nn.Module, owner: Callable[[nn.Module], None], shielded: list[torch.Tensor], shared: set[int]
) -> None:
    adapters = _adapter_children(module)
    for name, child in module.named_children():
        if name not in adapters:
            _initialise(child, _owner(child) or owner, shielded, shared)
    if adapters:
        _reset_adapters(module)
        return
    if hasattr(module, "set_first_values"):  # not Transformers' own
        if not any(p.is_meta for p in module.parameters()):
            cast(Any, module).set_first_values()
        return
    owner(module)
    # A tied tensor takes the rule of the first module that holds it (the input embedding, with its zero padding row).
    for parameter in module.parameters(recurse=False):
        if id(parameter) in shared:
            _shield(parameter, shielded)


def _owner(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """The initialisation rule of a (sub-)model; plain modules follow the model that contains them."""
    from transformers import PreTrainedModel

    return module._init_weights if isinstance(module, PreTrainedModel) else None


def _owners(path: list[nn.Module]) -> list[Callable[[nn.Module], None]]:
    owners: list[Callable[[nn.Module], None]] = []
    for module in path:
        owners.append(_owner(module) or (owners[-1] if owners else lambda _: None))
    return owners


def _adapter_children(module: nn.Module) -> set[str]:
    """Names of the children that peft added to a layer."""
    # If peft was not imported there are no adapters, and importing it would print warnings.
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None or not isinstance(module, tuners.BaseTunerLayer):
        return set()
    return {name for name, _ in module.named_children() if name != "base_layer"}


def _reset_adapters(module: Any) -> None:
    for adapter in module.active_adapters:
        names = [n for n, _ in module.named_parameters() if n.startswith("lora_") and f".{adapter}" in n]
        if names and not any(module.get_parameter(n).is_meta for n in names):
            module.reset_lora_parameters(adapter, init_lora_weights=True)


def _path_to(unit: nn.Module, *, root: nn.Module) -> list[nn.Module]:
    """The modules from the root down to the unit."""
    name = next(name for name, module in root.named_modules() if module is unit)
    path = [root]
    for step in name.split(".") if name else []:
        path.append(path[-1].get_submodule(step))
    return path


def _shared(root: nn.Module) -> set[int]:
    counts: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return {key for key, count in counts.items() if count > 1}


@contextmanager
def _only(unit: nn.Module, *, root: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Shields every tensor outside the unit with the flag that Transformers' initialisers respect."""
    inside = {id(t) for t in (*unit.parameters(), *unit.buffers())}
    shielded: list[torch.Tensor] = []
    for module in root.modules():
        # With the same flag on a module, Transformers would skip the module.
        module.__dict__.pop(_FLAG, None)
    for tensor in (*root.parameters(), *root.buffers()):
        if id(tensor) not in inside:
            _shield(tensor, shielded)
        elif hasattr(tensor, _FLAG):
            delattr(tensor, _FLAG)
    try:
        yield shielded
    finally:
        for tensor in shielded:
            if hasattr(tensor, _FLAG):
                delattr(tensor, _FLAG)


def _shield(tensor: torch.Tensor, shielded: list[torch.Tensor]) -> None:
    setattr(tensor, _FLAG, True)
    shielded.append(tensor)
