"""Small fp32 models on a CPU: parameters are whole for all passes of a step, and FSDP's hooks rest.

FSDP gathers and reduces unit by unit, which hides communication behind the work of a GPU. On a CPU that work is small,
and the hooks, copies and collectives cost more than they save. Here one collective gathers all parameters before a
step and one adds up all gradients after it; one rank needs neither, nor a copy: its parameters alias its slices.
Outside a step (evaluation, checkpoints) FSDP does everything. Must not know losses, optimizers or the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fullshard.dist.gather import exchange, gather_tensor
from fullshard.dist.shard import ShardPlan, _copy_views, fsdp_modules
from fullshard.fast.memory import keep_freed_memory
from fullshard.launch import signals

WHOLE = "whole_in_a_step"
"""Set on a sharded model that can be whole for a step."""
MOST_BYTES = 2**28
"""Of the parameters, if there are several ranks: each then holds all parameters and gradients."""


def within_step(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Around all forward and backward passes of one step. Leaves every gradient in its slice."""
    return getattr(module, WHOLE, None) or contextlib.nullcontext()


def prepare(module: nn.Module, plan: ShardPlan, mesh: Any, device: torch.device) -> None:
    """Lets `within_step` do its work, if this model fits."""
    parameters = list(module.parameters())
    plain = device.type == "cpu" and mesh.ndim == 1 and not plan.compile and not plan.cpu_offload
    asked = plan.layout.reshard_after_forward and not plan.layout.reason.startswith("auto")
    small = not asked and sum(4 * p.numel() for p in parameters) <= MOST_BYTES
    exact = {plan.compute, *(p.dtype for p in parameters)} == {torch.float32}
    if not (plain and exact and (small or mesh.size() == 1)):
        return
    found = _Whole(module, mesh, fsdp_modules(module))
    if all([found.quieten(unit) for unit in fsdp_modules(module)]):
        setattr(module, WHOLE, found)
    if signals.in_command():  # a process that is not ours keeps its settings
        keep_freed_memory()


def described(module: nn.Module) -> str:
    """For the header: what `within_step` does, empty if nothing."""
    found = getattr(module, WHOLE, None)
    if found is None:
        return ""
    return "; whole within a step" if found.ranks == 1 else "; gathered and reduced once in a step"


class _Whole:
    """The whole parameters of one model. They take the place of the slices within a step."""

    def __init__(self, module: nn.Module, mesh: Any, units: Sequence[Any]) -> None:
        self.inside = False
        self._module, self._mesh, self._units, self.ranks = module, mesh, units, mesh.size()
        self._sharded: list[DTensor] = []
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Of every parameter name: the module's dictionary, the key, the slice and the whole."""

    def quieten(self, unit: Any) -> bool:
        """Wraps the hooks of a unit; False if this torch keeps them elsewhere."""
        state = unit._get_fsdp_state()
        before: Any = getattr(state, "_pre_forward", None)
        after: Any = getattr(state, "_post_forward", None)
        if before is None or after is None:
            return False
        is_root, seen = unit is self._module, 0

        def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.inside:
                return before(module, args, kwargs)
            return tree_map_only(torch.Tensor, _in_fp32, (args, kwargs)) if is_root else (args, kwargs)

        def resting(hook: Any) -> Any:
            return lambda module, args, output: output if self.inside else hook(module, args, output)

        for key, hook in unit._forward_pre_hooks.items():
            if hook == before:
                unit._forward_pre_hooks[key], seen = pre, seen + 1
        for key, hook in unit._forward_hooks.items():
            if hook == after or getattr(hook, "__wrapped__", None) is _copy_views:
                unit._forward_hooks[key], seen = resting(hook), seen + (hook == after)
        # Methods other than `forward` call these.
        state._pre_forward, state._post_forward = pre, resting(after)
        return seen == 2

    def __enter__(self) -> None:
        for unit in self._units:
            unit.reshard()
        if any(owner[key] is not part for owner, key, part, _ in self._places) or not self._is_current():
            self._build()
        self._gather()
        for owner, key, _, whole in self._places:
            owner[key] = whole
        self.inside = True

    def __exit__(self, failed: Any, *_: Any) -> None:
        self.inside = False
        for owner, key, part, _ in self._places:
            owner[key] = part
        if failed is None:
            self._reduce()
        for whole in self._wholes:
            whole.grad = None

    def _is_current(self) -> bool:
        """One rank's parameters still share the memory of its slices."""
        pairs = zip(self._sharded, self._wholes, strict=True) if self._sharded and self.ranks == 1 else ()
        return bool(self._sharded) and all(part._local_tensor.data_ptr() == whole.data_ptr() for part, whole in pairs)

    @torch.no_grad()
    def _build(self) -> None:
        names: Any = [(name, p) for name, p in self._module.named_parameters(remove_duplicate=False)]
        self._sharded = list({id(p): p for _, p in names}.values())
        ranks, at = self.ranks, 0
        sizes = [-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in self._sharded]
        total = sum(sizes)
        self._mine, self._gathered = torch.zeros(total), torch.empty(ranks, total)
        # Beside the gradients, each rank says which it has.
        self._sent, self._received = torch.zeros(2, ranks, total + len(sizes)).unbind()
        self._reduced = torch.zeros(total + len(sizes))
        self._slices, self._wholes, self._rows, self._grads = [], [], [], []
        self._pieces: list[list[torch.Tensor]] = []
        for part, size in zip(self._sharded, sizes, strict=True):
            local, rest = part.to_local(), part.shape[1:]
            rows = torch.empty(0) if ranks == 1 else torch.empty(ranks, size)
            whole = local if ranks == 1 else rows.view(-1, *rest)[: part.shape[0]]
            self._wholes.append(nn.Parameter(whole, requires_grad=part.requires_grad))
            self._rows.append(rows)
            self._slices.append(self._mine[at : at + local.numel()].view(local.shape))
            ends = [min(size * (rank + 1), part.numel()) - min(size * rank, part.numel()) for rank in range(ranks)]
            self._pieces.append([self._sent[rank, at : at + end] for rank, end in enumerate(ends)])
            grad = self._reduced[at : at + local.numel()].view(local.shape)
            layout: Any = {"shape": part.shape, "stride": part.stride(), "run_check": False}
            self._grads.append(DTensor.from_local(grad, self._mesh, part.placements, **layout))
            at += size
        self._from = list(self._gathered.split(sizes, dim=1))
        by_id = {id(part): whole for part, whole in zip(self._sharded, self._wholes, strict=True)}
        owners = [(self._module.get_submodule(name.rpartition(".")[0])._parameters, name, p) for name, p in names]
        self._places = [(owner, name.rpartition(".")[2], p, by_id[id(p)]) for owner, name, p in owners]

    @torch.no_grad()
    def _gather(self) -> None:
        if self.ranks > 1:
            torch._foreach_copy_(self._slices, [part.to_local() for part in self._sharded])
            gather_tensor(self._gathered.view(-1), self._mine, group=self._mesh.get_group())
            torch._foreach_copy_(self._rows, self._from)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Adds up the gradients over ranks, each into its slice; a parameter that no rank has used gets none."""
        grads = [whole.grad for whole in self._wholes]
        if self.ranks == 1:
            for part, sliced, grad in zip(self._sharded, self._grads, grads, strict=True):
                if grad is not None:
                    sliced._local_tensor = grad
                    part.grad = sliced
            return
        used = [(pieces, grad) for pieces, grad in zip(self._pieces, grads, strict=True) if grad is not None]
        sources = [grad.reshape(-1).split([len(piece) for piece in pieces]) for pieces, grad in used]
        if used:  # a rank may have no gradient at all
            torch._foreach_copy_([p for pieces, _ in used for p in pieces], [s for source in sources for s in source])
        for pieces, grad in zip(self._pieces, grads, strict=True):
            if grad is None:
                torch._foreach_zero_(pieces)
        self._sent[:, -len(grads) :] = torch.tensor([float(grad is not None) for grad in grads])
        exchange(self._received.view(-1), self._sent.view(-1), group=self._mesh.get_group())
        torch.sum(self._received, 0, out=self._reduced)
        some = self._reduced[-len(grads) :].tolist()
        for part, sliced, count in zip(self._sharded, self._grads, some, strict=True):
            if count:
                part.grad = sliced


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP casts inputs."""
    return tensor.float() if tensor.is_floating_point() else tensor
