"""Depthwise convolutions of a tower in fp16 with torch's own kernel.

In fp16, and only there, torch hands depthwise convolutions to cuDNN, which plans each new shape on the host. Clips and
images change their shapes in every step, so a step waits for plans longer than it computes. In bf16 torch uses its own
kernel, which adds up in fp32 as cuDNN does. Must not know towers, batches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def use_own_kernel(module: nn.Module, *, device: str, compute: torch.dtype) -> int:
    """Switches the depthwise convolutions of a model that computes in fp16 on a GPU; returns how many."""
    if device != "cuda" or compute != torch.float16:
        return 0
    found = [part for part in module.modules() if type(part) in _OWN and _is_depthwise(part)]
    for part in found:
        part.__class__ = _OWN[type(part)]
    return len(found)


def _is_depthwise(part: nn.Module) -> bool:
    assert isinstance(part, (nn.Conv1d, nn.Conv2d))
    plain = part.padding_mode == "zeros" and not isinstance(part.padding, str)
    return plain and part.groups > 1 and part.groups == part.in_channels


class _Conv1d(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolve(self, input, weight, bias)


class _Conv2d(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolve(self, input, weight, bias)


_OWN: dict[type, type] = {nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d}


def _convolve(part: nn.Conv1d | nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # torch.nn types the padding of a convolution as text too; `_is_depthwise` has left those out.
    padding = [int(size) for size in part.padding]
    found: Tensor = _forward(input, weight, bias, list(part.stride), padding, list(part.dilation), part.groups)
    return found


@torch.library.custom_op("fullshard::depthwise_convolution", mutates_args=())
def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        return torch.convolution(input, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


@_forward.register_fake
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return torch.convolution(input, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


@torch.library.custom_op("fullshard::depthwise_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.backends.cudnn.flags(enabled=False):
        found = torch.ops.aten.convolution_backward(
            grad,
            input,
            weight,
            [weight.shape[0]],
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            needed,
        )
    input_grad, weight_grad, bias_grad = (
        each if each is not None and each.numel() else grad.new_empty(0) for each in found
    )
    return input_grad, weight_grad, bias_grad


@_backward.register_fake
def _(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, weight.shape, weight.shape[:1])
    sizes = [shape if asked else (0,) for shape, asked in zip(shapes, needed, strict=True)]
    return grad.new_empty(sizes[0]), grad.new_empty(sizes[1]), grad.new_empty(sizes[2])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    input, weight, _, *settings = inputs
    ctx.save_for_backward(input, weight)  # type: ignore[arg-type]
    ctx.settings = settings  # type: ignore[attr-defined]


def _derive(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
    saved, settings = ctx.saved_tensors, ctx.settings  # type: ignore[attr-defined]
    found = _backward(grad.contiguous(), *saved, *settings, needed)
    return (*(each if asked else None for each, asked in zip(found, needed, strict=True)), None, None, None, None)


_forward.register_autograd(_derive, setup_context=_keep)
