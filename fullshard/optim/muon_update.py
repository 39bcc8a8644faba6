"""Muon on sharded parameters: matrices get an orthogonalised update, which needs the whole matrix; the rest use AdamW.

Each rank keeps momentum for its own slices only. Matrices are gathered one by one, in the same order on all ranks, and
freed after their update. The arithmetic is torch's. Must not know parameter names or losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

from fullshard.dist.values import local, rows_of, whole

if TYPE_CHECKING:
    from fullshard.optim.muon import Muon

BUFFER = "momentum_buffer"
"""The name of the state that torch's Muon keeps."""


class SlicedMuon(torch.optim.Optimizer):
    """The first groups hold matrices, the others are for AdamW; they share one state."""

    skips_on_device = True
    """An update is left out if `found_inf` is 1, as by torch's fused optimizers."""
    found_inf: torch.Tensor | None = None
    gathers = True  # its step waits for other ranks

    def __init__(self, settings: Muon, matrices: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
        super().__init__([*matrices, *others], {"lr": settings.lr})
        self._settings, self._matrices = settings, len(matrices)
        self._adamw: torch.optim.AdamW | None = None
        if others:
            # The same group objects, so that both see the same learning rate.
            groups = self.param_groups[self._matrices :]
            self._adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "the loss is computed before the step"
        if self._adamw is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        for group in self.param_groups[: self._matrices]:
            rate = float(group["lr"]) * group["factor"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, rate, decay=rate * group["weight_decay"])
        return None

    def _update(self, parameter: nn.Parameter, rate: float, *, decay: float) -> None:
        settings, state, gradient = self._settings, self.state[parameter], parameter.grad
        assert gradient is not None
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(gradient)
        buffer = local(state[BUFFER]).lerp(local(gradient), 1 - settings.momentum)
        ahead = local(gradient).lerp(buffer, settings.momentum) if settings.nesterov else buffer
        step = self._orthogonal(parameter, ahead)
        moved = (local(parameter) * (1 - decay)).add_(step, alpha=-_adjust_lr(rate, settings.adjust, parameter.shape))
        for place, value in ((local(state[BUFFER]), buffer), (local(parameter), moved)):
            place.copy_(
                value if self.found_inf is None else torch.where(self.found_inf.to(place.device) > 0, place, value)
            )

    def _orthogonal(self, parameter: nn.Parameter, ahead: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the orthogonal matrix nearest to the whole of `ahead`."""
        sliced, rows, device = ahead, slice(None), ahead.device
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            as_one = DTensor.from_local(
                ahead, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            rows = slice(*rows_of(parameter))
            # Offloaded slices are on the host; the product runs on the device.
            sliced = whole(as_one).to(mesh.device_type)
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        found = _zeropower_via_newtonschulz(sliced, coefficients, self._settings.iterations, EPS)
        return found[rows].to(device)


__all__ = ["SlicedMuon"]
