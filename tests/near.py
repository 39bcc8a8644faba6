"""Compares floating-point results of different computations, relative to the largest number compared.

One number near zero in a tensor carries the rounding of the large ones around it, so neither an absolute tolerance nor
one relative to each number means the same on every processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FP32 = 1e-5
"""Some tens of fp32 operations in another order: kernels differ with the processor's instructions and its threads."""


def apart(found: Any, expected: Any) -> float:
    """The largest difference, in units of the largest expected number."""
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    difference = (found.double() - expected.double()).abs().max()
    largest = expected.double().abs().max()
    if difference == 0:
        return 0.0
    return float(difference / largest)


def assert_near(found: Any, expected: Any, within: float = FP32, *, what: str = "") -> None:
    """Fails where two tensors, or mappings of tensors, lie further apart than `within`. NaN is near nothing."""
    if isinstance(expected, Mapping):
        assert set(found) == set(expected)
        for name in expected:
            assert_near(found[name], expected[name], within, what=f"{what} {name}".strip())
        return
    far = apart(found, expected)
    assert far <= within, f"{what or 'tensors'}: {far:.2e} apart relative to the largest number, allowed {within:.0e}"
