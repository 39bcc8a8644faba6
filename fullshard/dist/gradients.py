"""Gradients on sharded parameters: their norm over all ranks, clipping, and which of them are missing or not finite.

Must not know losses, models or the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.dist import reduce

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def clip_global_norm(optimizer: torch.optim.Optimizer, *, ceiling: float | None, scaled: bool) -> torch.Tensor:
    """The norm of the whole gradient, on every strategy; scales gradients down to `ceiling`. No host sync.

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
        squares.append(reduce.sum_over_shards(square, mesh))
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
    found = {name for names in reduce.gather_objects(mine) for name in names}
    return [name for name, _ in model.named_parameters() if name in found]


def inspect(gradient: torch.Tensor | None) -> torch.Tensor:
    """Whether a gradient is missing, not finite, not zero; of this rank's part."""
    if gradient is None:
        return torch.tensor([True, False, False])
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    broken, moving = ~local.isfinite().all(), local.any()
    return torch.stack([torch.zeros_like(broken), broken, moving]).cpu()


def checksums(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of each parameter's bits as integers: changes when a bit does, and needs no copy of the weights."""
    sums = []
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sums.append(local.detach().view(_WORDS[local.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).cpu()
