"""The one switch of this package: FULLSHARD_FAST=1. Without it, nothing here changes what a run does.

Must not import torch.
"""

from __future__ import annotations

import functools
import os

VARIABLE = "FULLSHARD_FAST"


@functools.cache
def is_on() -> bool:
    """Read once in a process; ranks inherit it from the command."""
    return os.environ.get(VARIABLE) == "1"
