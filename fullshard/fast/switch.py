"""The one switch of this package: with FULLSHARD_FAST=0, a CPU runs as it does without this package.

Must not import torch.
"""

from __future__ import annotations

import functools
import os

VARIABLE = "FULLSHARD_FAST"


@functools.cache
def is_on() -> bool:
    """Read once in a process; ranks inherit it from the command."""
    return os.environ.get(VARIABLE) != "0"
