"""Gradients on sharded parameters: when ranks reduce them, their norm, clipping, and which are missing or not finite.

Must not know losses, models or the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.dist import reduce
from fullshard.dist.values import local

STAYS_GATHERED = "stays_gathered"
"""Set on a sharded model whose parameters stay gathered from forward to backward."""
_LAST_SYNC = "last_sync"
"""Set on a sharded model: the last settings of its units, since setting hundreds of modules takes milliseconds."""


def one_by_one(module: nn.Module, batches: Sequence[Any], *, reduce_once: bool = False) -> Iterator[Any]:
    """Micro-batches of one step. Gradients are reduced into their slices after each, so accumulation costs no full-size
    gradient; replicas are added up once, after the last. `reduce_once` also reduces slices once: for many small ones.
    Parameters that stay gathered from forward to backward stay so for the whole step."""
    root = cast(FSDPModule, module)
    stay = getattr(module, STAYS_GATHERED, False)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        sync = last, last or not reduce_once, last or not stay
        if getattr(module, _LAST_SYNC, None) != sync:
            setattr(module, _LAST_SYNC, sync)
            root.set_is_last_backward(sync[0])
            root.set_requires_all_reduce(sync[0])
            root.set_requires_gradient_sync(sync[1])
            root.set_reshard_after_backward(sync[2])
        yield batch


@torch.no_grad()
def clip_global_norm(optimizer: torch.optim.Optimizer, *, ceiling: float | None, scaled: bool) -> torch.Tensor:
    """The norm of the whole gradient, for every strategy; scales gradients down to `ceiling`. No host sync.

    Sums squares of local slices over the shard axis only: replicas hold equal copies and must not be counted twice.
    Local slices avoid DTensor's dispatch, which is slow on hundreds of parameters. torch's own fused updates divide the
    gradients themselves, which saves a pass over them; other optimizers may ignore `grad_scale`, and with `scaled`
    losses it belongs to the scaler."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter.grad, DTensor):
            by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter.grad.to_local())
    squares = []
    for mesh, grads in by_mesh.items():
        square = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).square().sum()
        squares.append(reduce.sum_over_ranks(square, mesh.get_group("dp_shard")))
    # The proof of the first update reports missing gradients.
    norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    if ceiling is not None:
        # A NaN norm leaves gradients as they are, so that the error can name the parameters.
        factor = (ceiling / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        own = type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
        if own and getattr(optimizer, "_step_supports_amp_scaling", False) and not scaled:
            optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
        else:
            for grads in by_mesh.values():
                torch._foreach_mul_(grads, factor)
    return norm


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite on some rank, in the order of the model."""
    mine = {name for name, p in model.named_parameters() if p.grad is not None and bool(inspect(p.grad)[1])}
    found = set[str]().union(*reduce.gather_objects(mine))
    return [name for name, _ in model.named_parameters() if name in found]


def inspect(gradient: torch.Tensor | None) -> torch.Tensor:
    """Whether this rank's slice of a gradient is missing, not finite, nonzero."""
    if gradient is None:
        return torch.tensor([True, False, False])
    broken, moving = ~local(gradient).isfinite().all(), local(gradient).any()
    return torch.stack([torch.zeros_like(broken), broken, moving]).cpu()
