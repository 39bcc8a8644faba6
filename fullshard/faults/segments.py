"""How torch takes the memory of a GPU: in segments that grow, so that little of it is reserved and unused.

torch's own default, segments of fixed sizes, leaves gaps that no later tensor fits into. What lives as long as the run
should be taken before the first step: state that is created after it lies between activations. Must not know models.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first one that is set, when it first allocates on a GPU."""


def grow_segments(environ: MutableMapping[str, str]) -> None:
    """For this process and those that it starts; what the user has set stays."""
    if not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"


def begin_with_state(optimizer: torch.optim.Optimizer) -> None:
    """After an update that moved nothing: keeps the state if the first real update would create the same, zeros, and
    drops any other."""
    if type(optimizer) is not torch.optim.AdamW:
        optimizer.state.clear()
        return
    for state in optimizer.state.values():
        for key in state.keys() - {"step", "exp_avg", "exp_avg_sq"}:
            del state[key]  # an average begins with the weights of the first update
        state["step"].zero_()


def give_back(device: torch.device) -> None:
    """Segments that only the start needed, such as gradients of that update."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


__all__ = ["VARIABLES", "begin_with_state", "give_back", "grow_segments"]
