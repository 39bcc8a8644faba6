"""Matrix products in fp32 on a CPU by oneDNN, where torch's own library uses half of the CPU.

torch multiplies fp32 matrices with MKL, which takes its AVX2 path on CPUs that are not Intel's, also on those with
AVX-512: oneDNN, which torch brings as well, is about twice as fast there, in the same precision. Must not know models
or losses.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@functools.cache
def is_faster() -> bool:
    """By the CPU alone, so that all runs on one machine agree."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    facts = Path("/proc/cpuinfo")
    vendor = facts.read_text(encoding="utf-8", errors="replace")[:500] if facts.exists() else ""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in vendor


def are_plain(*tensors: torch.Tensor) -> bool:
    """In fp32 on a CPU."""
    return all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T + bias`, without a gradient; `a` may have more dimensions. No view, so that a model may change it."""
    flat: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a.reshape(-1, a.shape[-1]), b, bias, "none", [], "")
    return torch.ops.aten._unsafe_view(flat, (*a.shape[:-1], len(b)))  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(inputs, weight)
        return product(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if needs_inputs else None,
            product(flat.T, inputs.reshape(-1, inputs.shape[-1]).T) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )


class Linear(nn.Linear):
    """A linear layer that multiplies with oneDNN wherever that fits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not are_plain(input, self.weight) or not input.numel():
            return F.linear(input, self.weight, self.bias)
        found: torch.Tensor = _Linear.apply(input, self.weight, self.bias)
        return found


def use_in(module: nn.Module, *, compute: torch.dtype) -> str:
    """Lets the linear layers of a module on a CPU use oneDNN, if that is faster here; returns words for the header."""
    faster = compute == torch.float32 and is_faster()
    layers = [part for part in module.modules() if type(part) is nn.Linear] if faster else []
    for layer in layers:
        layer.__class__ = Linear
    return "; linear layers by oneDNN" if layers else ""
