"""Memory that a step frees stays with the process, for the next step.

glibc returns large blocks to the kernel at once, and a step of a small model frees and takes all of its activations
again: up to a fifth of its time went into page faults. Must not know what the memory is for.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK, MOST_KEPT = 2**25, 2**28
"""Larger blocks go back to the kernel when they are freed, and so does what is free beyond `MOST_KEPT` bytes."""


def keep_freed_memory() -> bool:
    """For this process, which must be the command's own; False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
