"""Proofs about gradients: that the first update is one, and which parameters overflow.

`FirstUpdate` watches the optimizer's first update that moves weights, and goes. Its verdict is the same on all ranks.
Must not know losses, models or the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.dist import reduce
from fullshard.errors import NumericalError, SetupError
from fullshard.formatting.plural import counted

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FirstUpdate:
    """After step 1 every trained parameter has a finite gradient, not all are zero, and weights have changed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, say: Callable[[str], None]) -> None:
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._say = say
        self._found: torch.Tensor | None = None
        self._sums = torch.empty(0)
        # Around the update itself: a step that the loss scaler skips is none, and is not looked at.
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is called even so, and leaves the weights alone by itself.
        overflow = getattr(optimizer, "found_inf", None)
        if (overflow is not None and float(overflow) > 0) or not any(float(g["lr"]) for g in optimizer.param_groups):
            return
        self._found = torch.stack([_look(p.grad) for _, p in self._trained]).cpu()
        self._sums = checksums([p for _, p in self._trained])

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._found is None:
            return
        for hook in self._hooks:
            hook.remove()
        changed = (checksums([p for _, p in self._trained]) != self._sums)[:, None]
        # A small parameter lies on one rank only, so what is true of a part of it is true of the whole.
        everywhere = torch.stack(reduce.gather_objects(torch.cat([self._found, changed], dim=1))).any(dim=0)
        missing, broken, moving, moved = everywhere.unbind(dim=1)
        lrs = sorted({float(group["lr"]) for group in optimizer.param_groups})
        self._judge(self._named(missing), self._named(broken), self._named(moving), self._named(moved), lrs)

    def _named(self, flags: torch.Tensor) -> list[str]:
        return [name for (name, _), flag in zip(self._trained, flags.tolist(), strict=True) if flag]

    def _judge(
        self, missing: list[str], broken: list[str], moving: list[str], moved: list[str], lrs: list[float]
    ) -> None:
        of = f"of {counted(len(self._trained), 'trained parameter')}"
        if broken:
            raise NumericalError(
                f"At the first update {len(broken)} {of} have a gradient that is not finite: {_some(broken)}. "
                "Look for records with extreme values, lower optimizer.lr, or try precision: fp32."
            )
        if missing:
            raise SetupError(
                f"At the first update {len(missing)} {of} have no gradient: {_some(missing)}. The loss does not depend "
                f"on them, and they would never learn. Freeze them: model.freeze: [{', '.join(missing[:3])}], or check "
                "that the model runs them."
            )
        if not moving:
            raise NumericalError(
                f"At the first update the gradient of every one {of} is zero: nothing would be learned. Check that the "
                "labels are not all masked, and that what is trained (model.lora, model.freeze) has a part in the loss."
            )
        if not moved:
            raise NumericalError(
                f"The first update changed not one {of}: with a learning rate of {lrs[-1]:g} every change is smaller "
                "than the last digit of the weights. Raise optimizer.lr, shorten schedule.warmup, or leave "
                "precision: bf16-pure."
            )
        still = len(set(moving) - set(moved))
        lost = f"; {still} have a gradient and did not change, the update is below their last digit" if still else ""
        self._say(
            f"First update proven: the gradients {of} are finite, {len(moving)} are not zero, {len(moved)} "
            f"parameters changed{lost}."
        )


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite on some rank, in the order of the model."""
    mine = {name for name, p in model.named_parameters() if p.grad is not None and bool(_look(p.grad)[1])}
    found = {name for names in reduce.gather_objects(mine) for name in names}
    return [name for name, _ in model.named_parameters() if name in found]


def _look(gradient: torch.Tensor | None) -> torch.Tensor:
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
