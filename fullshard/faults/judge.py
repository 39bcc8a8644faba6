"""Judges a step on the device, before its update: NaN, Inf or a loss spike. The host does not wait for the verdict.

The gradient norm is the same on every rank, and so is a loss that was summed over them: every rank comes to the same
verdict. Must not know collectives, the loop or what follows from a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fullshard.errors import NumericalError
from fullshard.faults.guard import Guard

MAD_TO_DEVIATION = 1.4826
"""The standard deviation of normally distributed numbers, by the median of their distances from the median."""

SMALLEST_SCALE = 1.0
"""A loss scale below this means that gradients overflow even without scaling."""


class Verdict:
    """What was found in one step; tensors on the device."""

    def __init__(self, not_finite: torch.Tensor, deviation: torch.Tensor, norm: torch.Tensor) -> None:
        self.bad = (not_finite | (deviation > 0)).float()
        """1: the update is left out."""
        self.numbers = torch.stack([not_finite.float(), deviation.float(), norm.float()])
        """Whether something is NaN or Inf; how far above the median a spike is, else 0; the gradient norm."""

    def whole(self, pair: torch.Tensor) -> torch.Tensor:
        """A (sum, count) pair, or zeros: a step that is left out enters no average."""
        return torch.where(self.bad > 0, torch.zeros_like(pair), pair)


class Judge:
    """The recent losses of a run, and the verdicts on its steps."""

    def __init__(
        self, settings: Guard, losses: Sequence[float], *, device: torch.device, model: nn.Module | None = None
    ) -> None:
        self.settings = settings
        norms = [module for module in model.modules() if isinstance(module, _NormBase)] if model else []
        self._statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._before: list[torch.Tensor] = []
        self.losses = torch.full((settings.window,), torch.nan, dtype=torch.float64, device=device)
        """Of the last steps that were not left out, the newest last; NaN where there is none yet."""
        self.recall(losses)

    def recall(self, losses: Sequence[float]) -> None:
        """Starts from the losses that a checkpoint has."""
        kept = list(losses)[-self.settings.window :]
        padded = [float("nan")] * (self.settings.window - len(kept)) + kept
        self.losses.copy_(torch.tensor(padded, dtype=torch.float64))

    def recent(self) -> list[float]:
        """The losses to keep in a checkpoint; the host waits. None if nothing looks for spikes."""
        return [loss for loss in self.losses.tolist() if loss == loss] if self.settings.spike else []

    def begin(self) -> None:
        """Call before the forward pass, which changes the running statistics of batch norms."""
        self._before = [buffer.clone() for buffer in self._statistics]

    @torch.no_grad()
    def judge(self, norm: torch.Tensor, loss: Callable[[], torch.Tensor], *, scaled: bool) -> Verdict:
        """`loss` gives the loss of the step over all ranks, which costs a collective, so it is only called if needed.

        With a `scaled` loss an infinite norm is an overflow, which is the scaler's business."""
        device = self.losses.device
        norm, none = norm.to(device), torch.zeros((), dtype=torch.float64, device=device)
        value = loss() if scaled or self.settings.spike else none
        not_finite = ~value.isfinite() | (~norm.isfinite() & (not scaled))
        deviation = self._deviation(value, not_finite) if self.settings.spike else none
        verdict = Verdict(not_finite, deviation, norm)
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(torch.where(verdict.bad.to(buffer.device) > 0, before, buffer))
        return verdict

    def forgives(self, verdict: Verdict) -> bool:
        """Whether the step is left out and the run goes on, or stops for another reason; the host waits."""
        not_finite, deviation, _ = verdict.numbers.tolist()
        return bool(deviation) or (bool(not_finite) and self.settings.not_finite != "stop")

    def _deviation(self, loss: torch.Tensor, not_finite: torch.Tensor) -> torch.Tensor:
        """How far the loss is above the median, in robust deviations; 0 if that is not a spike."""
        losses, median = self.losses, self.losses.median()
        spread = MAD_TO_DEVIATION * (losses - median).abs().median()
        far = (loss - median) / spread.clamp(min=1e-6 * median.abs().clamp(min=1e-6))
        spike = losses.isfinite().all() & (far > self.settings.threshold) & ~not_finite
        kept = torch.cat([losses[1:], loss.reshape(1).double()])
        self.losses = torch.where(not_finite | spike, losses, kept)
        return torch.where(spike, far, torch.zeros_like(far))


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The same loss; if it is NaN or Inf, so is its gradient, and then the gradient norm of every rank."""
    return loss * (1 + 0 * loss.detach())


def update(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """`optimizer.step()`, which leaves weights and state as they are if the verdict is bad.

    torch's fused updates and our own look at `found_inf` on the device. Any other optimizer makes the host wait for one
    number, as torch's loss scaler does."""
    own: Any = optimizer
    if skips_on_device(optimizer):
        own.found_inf = verdict.bad
        try:
            optimizer.step()
        finally:
            del own.found_inf
    elif not bool(verdict.bad):
        optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update leaves everything as it is if `found_inf` is 1."""
    fused = type(optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    supported = fused and getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(getattr(optimizer, "skips_on_device", supported))


def overflow(scale: float, names: Sequence[str]) -> NumericalError:
    """Every rank raises this in the same step: the scale follows from an overflow that they agreed on. `names` are the
    parameters whose gradient is not finite."""
    return NumericalError(
        f"The loss scale fell to {scale:g} after repeated overflows (allowed: at least {SMALLEST_SCALE:g}): in fp16 "
        f"the gradients of {len(names)} parameters are not finite even without scaling, first {', '.join(names[:3])}. "
        "Use precision: bf16 if the GPU has it, or fp32; else lower optimizer.lr or lengthen schedule.warmup."
    )


__all__ = ["SMALLEST_SCALE", "Judge", "Verdict", "overflow", "poisoned", "skips_on_device", "update"]
