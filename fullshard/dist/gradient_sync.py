"""The micro-batches of one step, in turn, and what ranks exchange after each backward pass.

Must not know what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

STAY = "stays_gathered"
"""Set on a sharded model whose parameters stay gathered from forward to backward."""


_TURN = "turn_set"
"""Set on a sharded model: the last settings of its units, since setting hundreds of modules takes milliseconds."""


def one_by_one(module: nn.Module, batches: Sequence[Any], *, reduce_once: bool = False) -> Iterator[Any]:
    """Micro-batches of one step. Gradients are reduced into their slices after each, so accumulation costs no full-size
    gradient; replicas are added up once, after the last. With `reduce_once` slices are, too: for many small ones.
    Parameters that stay gathered from forward to backward stay so for the whole step."""
    root = cast(FSDPModule, module)
    stay = getattr(module, STAY, False)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        turn = last, last or not reduce_once, last or not stay
        if getattr(module, _TURN, None) != turn:
            setattr(module, _TURN, turn)
            root.set_is_last_backward(turn[0])
            root.set_requires_all_reduce(turn[0])
            root.set_requires_gradient_sync(turn[1])
            root.set_reshard_after_backward(turn[2])
        yield batch
