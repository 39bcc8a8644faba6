"""The values that a module has before it is sharded: each rank keeps its own rows of them.

If the ranks' modules differ, rank 0's values are taken, as DDP does; other ranks may leave theirs on meta. What is on
meta on rank 0 gets fresh values. Must not know FSDP or files.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from fullshard.contracts.model import Family
from fullshard.dist import reduce
from fullshard.dist.agreement import differences, some
from fullshard.dist.values import checksums
from fullshard.errors import SetupError


class OwnModule(Family):
    """A module that the user has built, as a family of its own."""

    def build(self, *, processor: Any) -> nn.Module:
        raise AssertionError("the module exists already")

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype  # a frozen parameter stays as it is

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        """Fresh values for what is on meta: by Transformers' rules, or by each module's `reset_parameters`."""
        if hasattr(root, "_init_weights"):
            from fullshard.hf.weights.initialise import initialise_subtree

            initialise_subtree(unit, root=root)
            return
        for module in unit.modules():
            own = list(module.parameters(recurse=False))
            if own and hasattr(module, "reset_parameters") and not any(p.is_meta for p in own):
                cast(Any, module).reset_parameters()


class Values:
    """Tensors by name, each whole on this rank."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return _rows(self._tensors[name].detach().cpu(), start, stop)


class ValuesOfMain(Values):
    """The same, with the values of rank 0 on every rank. Every rank reads in the same order."""

    _last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            mine = self._tensors[name].detach().cpu() if reduce.place()[1] == 0 else None
            self._last = name, reduce.from_main(mine)
        return _rows(self._last[1], start, stop)


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop] if tensor.dim() else tensor


def values_of(module: nn.Module) -> Values:
    """The module's values; those of rank 0 if the ranks differ."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    _require_same_shapes(parameters)
    buffers = dict(module.named_buffers())
    if lost := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise SetupError(
            f"The buffer {lost[0]} is on the meta device, and fullshard.shard cannot know its values. Put only "
            "parameters there: accelerate.init_empty_weights() does."
        )
    mine = {name: _checksum(tensor) for name, tensor in (parameters | buffers).items()}
    others = reduce.gather_objects(mine)
    real: list[str] = [name for name in parameters if others[0][name] is not None]
    if all(other == mine for other in others):
        return Values({name: parameters[name] for name in real})
    changed = [name for name in buffers if any(other[name] != mine[name] for other in others)]
    # Every rank must agree on which buffers to read.
    changed = sorted(set[str]().union(*reduce.gather_objects(changed)))
    return ValuesOfMain({name: (parameters | buffers)[name] for name in [*real, *changed]})


def _checksum(tensor: torch.Tensor) -> int | None:
    if tensor.is_meta:
        return None
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.int8)
    return int(checksums([tensor.contiguous()])[0]) if tensor.numel() else 0


def _require_same_shapes(parameters: dict[str, torch.Tensor]) -> None:
    facts = {name: f"{list(p.shape)}, {'trained' if p.requires_grad else 'frozen'}" for name, p in parameters.items()}
    if found := differences(facts):
        raise SetupError(f"The ranks have built different models: {some(found)}. Build the same one on every rank.")
