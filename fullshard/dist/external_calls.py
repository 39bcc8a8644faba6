"""Finds parts of a block that are called from outside the block, by watching one forward pass on meta tensors.

A block's parameters are gathered while it runs. A part that is called at another time would see sharded parameters, so
it becomes its own unit. Must not know any model class, torch.distributed or how units are sharded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def reached_from_outside(
    module: nn.Module, blocks: Collection[str], rehearse: Callable[[nn.Module], None]
) -> list[str]:
    """Names of the outermost parts within blocks that are called while their block is not running.

    `rehearse` runs one forward pass of a copy on the meta device. If it cannot, nothing is found, and the first real
    forward pass will fail."""
    watched = copy.deepcopy(module).to("meta")
    owners = {name: block for name, _ in watched.named_modules() for block in blocks if name.startswith(f"{block}.")}
    running: list[str] = []
    found: dict[str, None] = {}

    def enter(name: str) -> Callable[..., None]:
        def before(part: nn.Module, *_: Any) -> None:
            owner = owners.get(name)
            outside = owner is not None and owner not in running and next(part.parameters(), None) is not None
            if outside and not any(name.startswith(f"{outer}.") for outer in found):
                found[name] = None
            running.append(name)

        return before

    def leave(*_: Any) -> None:
        running.pop()

    for name, part in watched.named_modules():
        part.register_forward_pre_hook(enter(name))
        part.register_forward_hook(leave, always_call=True)
    try:
        rehearse(watched)
    except Exception as error:  # a model that reads values cannot run on meta
        logger.info(
            "parts called from outside their block could not be found, the forward pass on meta failed: %s", error
        )
        return []
    return list(found)
