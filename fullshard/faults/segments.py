"""How torch takes the memory of a GPU: in segments that grow, so that little of it is reserved and unused.

torch's own default, segments of fixed sizes, leaves gaps that no later tensor fits into. Must not know what the memory
is for.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first one that is set, when it first allocates on a GPU."""


def grow_segments(environ: MutableMapping[str, str]) -> None:
    """For this process and those that it starts; what the user has set stays."""
    if not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"


__all__ = ["VARIABLES", "grow_segments"]
