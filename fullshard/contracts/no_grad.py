"""`torch.no_grad()` for methods of parts.

Must not import torch before a decorated method is called, because reading a recipe imports parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def no_grad(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function without gradients, as a decorator."""

    @functools.wraps(function)
    def without_gradients(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        import torch

        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradients
