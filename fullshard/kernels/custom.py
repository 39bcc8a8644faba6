"""Where kernels of our own run. While `traced` is set they take tensors without memory too: a plan sees what they keep.

Must not know the kernels, nor who traces them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

traced = False


def runs(x: torch.Tensor) -> bool:
    """Kernels need CUDA and half precision; with TRITON_INTERPRET=1 they run anywhere, for tests."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return (half and (x.is_cuda or traced)) or os.environ.get("TRITON_INTERPRET") == "1"


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Inside, tensors of a CPU count as those of a GPU."""
    global traced
    traced = True
    try:
        yield
    finally:
        traced = False
