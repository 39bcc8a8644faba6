"""Random numbers that depend only on a key: the same on any device, for any split of a batch, in any order.

Hashes a sample's draw, the stream and each element's index, so there is no generator to save for a resume. Must not
know what the numbers are for, beyond a stream for each use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TIME, NOISE, LABEL_DROP, FLIP = range(4)
"""Streams, one for each use, so that a sample's numbers for different uses are independent."""

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""The step from one element's state to the next, as in splitmix64; written as the int64 of the same bits."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""The multipliers of splitmix64's finalizer."""
RADIUS_BITS, ANGLE_BITS = 40, 24
"""How the 64 bits of a hash are split. The radius has more, enough for 7.5 standard deviations."""


def uniform(draws: torch.Tensor, stream: int) -> torch.Tensor:
    """(B,) fp32 in the open interval (0, 1), from int64 draws (B,)."""
    # 23 bits plus a half: with 24 bits the largest value would round to 1 in fp32.
    return (_shifted(_keys(draws, stream), 41).float() + 0.5) * 2.0**-23


def normal(draws: torch.Tensor, shape: Sequence[int], stream: int) -> torch.Tensor:
    """(B, *shape) fp32 of mean 0 and variance 1, from int64 draws (B,)."""
    import torch

    size = math.prod(shape)
    places = torch.arange(1, (size + 1) // 2 + 1, device=draws.device)  # two numbers from each hash
    bits = _mixed(_keys(draws, stream)[:, None] + places * GOLDEN)
    # Box-Muller in fp64: the last digit of a logarithm depends on the device, and on a CPU on the index in the tensor.
    # After rounding to fp32 that affects one number in hundreds of millions.
    radius = _shifted(bits, 64 - RADIUS_BITS).double().add_(0.5).mul_(2.0**-RADIUS_BITS).log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_(2**ANGLE_BITS - 1).double().mul_(2 * math.pi * 2.0**-ANGLE_BITS)
    both = torch.cat([(angle.cos() * radius).float(), (angle.sin() * radius).float()], dim=1)
    return both[:, :size].reshape(len(draws), *shape)


def _keys(draws: torch.Tensor, stream: int) -> torch.Tensor:
    """(B,) int64. Draws are hashed before the stream is added, so that nearby draws do not collide."""
    return _mixed(_mixed(draws) + (stream + 1))


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer: each bit of the state flips each bit of the result half of the time."""
    state = _shifted(state, 30).bitwise_xor_(state).mul_(FIRST)
    state = _shifted(state, 27).bitwise_xor_(state).mul_(SECOND)
    return _shifted(state, 31).bitwise_xor_(state)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical right shift: torch's own is arithmetic."""
    return (state >> bits).bitwise_and_(2 ** (64 - bits) - 1)
