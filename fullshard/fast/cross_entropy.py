"""Cross-entropy of a linear head with its gradient in few passes over memory, which is what counts where nothing fuses
them: in fp32 on a CPU, for a loss that needs a gradient.

Must not know models or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fullshard.contracts.data import IGNORE
from fullshard.fast import onednn, switch

Lengths = Callable[[int, int, int], int]
"""From the numbers of tokens, of dimensions and of classes to the tokens of a chunk."""
_LOST_DIGITS = 1e-30
"""A probability below this has lost digits; its logarithm is taken another way."""


def serves(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    if not switch.is_on() or not torch.is_grad_enabled():
        return False
    return onednn.are_plain(hidden, weight) and (hidden.requires_grad or weight.requires_grad)


def of_head(
    hidden: Any, weight: Any, bias: Any, targets: Any, scale: float, softcap: float | None, chunk_length: Lengths
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of losses, 0), in chunks of as many tokens as `chunk_length` says."""
    length = chunk_length(hidden.shape[0], hidden.shape[1], len(weight))
    loss, correct = _OfHead.apply(hidden, weight, bias, targets, scale, softcap, length)
    return loss, correct


class _OfHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, scale: Any, softcap: Any, length: int
    ) -> Any:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        times = onednn.product if onednn.is_faster() else F.linear
        loss = torch.zeros(())
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Any = torch.zeros_like(weight) if needs_weight and not len(hidden) else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for start in range(0, len(hidden), length):
            part, target = hidden[start : start + length], targets[start : start + length]
            chunk_loss, grad_logits = with_gradient(times(part, weight, bias), target, scale, softcap)
            loss += chunk_loss
            if grad_hidden is not None:
                grad_hidden[start : start + length] = times(grad_logits, weight.T)
            if needs_weight:
                found = times(grad_logits.T, part.T)
                grad_weight = found if grad_weight is None else grad_weight.add_(found)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        correct = torch.zeros(())
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grads = [None if grad is None else grad.mul_(grad_outputs[0]) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None)


def with_gradient(logits: Any, targets: Any, scale: float, softcap: float | None) -> tuple[Any, Any]:
    """The sum of losses, and its gradient by the logits; rows whose target is IGNORE count as zero."""
    shaped, slope = _shape(logits, scale, softcap)
    counted, safe = targets != IGNORE, targets.clamp(min=0)[:, None]
    gradient = torch.softmax(shaped, -1)
    picked = gradient.gather(-1, safe)[:, 0]
    small = bool((picked < _LOST_DIGITS).any())
    log = torch.log_softmax(shaped, -1).gather(-1, safe)[:, 0] if small else picked.log()
    loss = torch.where(counted, log, 0.0).sum().neg()
    gradient.scatter_add_(-1, safe, gradient.new_full((), -1.0).expand_as(safe))
    if scale != 1.0 or softcap is not None:
        gradient.mul_(slope)
    if not bool(counted.all()):
        gradient.mul_(counted[:, None])
    return loss, gradient


def _shape(logits: Any, scale: float, softcap: float | None) -> tuple[Any, Any]:
    """Logits after scale and soft cap, and their slope."""
    shaped = logits if scale == 1.0 else logits * scale
    if softcap is None:
        return shaped, scale
    ratio = torch.tanh(shaped / softcap)
    return softcap * ratio, (1 - ratio * ratio) * scale
