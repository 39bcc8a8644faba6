"""One rank alone: FSDP's passes over memory that nobody else needs are left out, to the same bits.

A unit's parameters are cast into the place where they compute all together: FSDP launches two small kernels for every
parameter, a cast into new memory and a copy from there, more than a thousand in each step of a model of some hundred
parameters. With one rank nothing is reduced, so gradients stay in place. The casts take FSDP's own
objects by names that torch does not promise; where torch has renamed one, FSDP's own way remains. Must not know what is
computed.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

try:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError:  # another torch
    FSDPParam, ShardedState, alloc_storage, FSDPParamGroup = object, None, None, None  # type: ignore[misc, assignment]

logger = logging.getLogger(__name__)

_NAMES = (
    (FSDPParamGroup, ("wait_for_unshard",)),
    (FSDPParam, ("all_gather_inputs",)),
)


def save_passes(units: Sequence[Any]) -> None:
    """Changes units of a model that one rank holds whole."""
    cast_together(units)
    reduce_in_place(units)


def cast_together(units: Iterable[Any]) -> None:
    """Changes how units get their parameters, from the second time on."""
    if any(not hasattr(owner, name) for owner, names in _NAMES for name in names):
        logger.info("this torch keeps its sharded parameters another way; each is cast on its own")
        return
    for unit in units:
        state = unit._get_fsdp_state()
        group = state._fsdp_param_group
        if group is not None:
            group.wait_for_unshard = types.MethodType(_wait_for_unshard, group)
            for parameter in group.fsdp_params:
                parameter.__class__ = _Cast


def reduce_in_place(units: Iterable[Any]) -> None:
    """The output of a reduction over one rank aliases its input, so FSDP's copy is free."""
    for unit in units:
        unit.set_custom_reduce_scatter(_InPlace())


class _InPlace:
    """In place of FSDP's reduce-scatter, which asks for memory first for what goes in, then for what comes out."""

    def __init__(self) -> None:
        # Not held here: where a backward pass broke off between the two, the next one must begin anew.
        self._place: Callable[[], torch.Tensor | None] = lambda: None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        place, self._place = self._place(), lambda: None
        if place is None:
            place = torch.empty(*size, dtype=dtype, device=device)
            self._place = weakref.ref(place)
        elif place.is_cuda:
            # In the stream of reductions: a further micro-batch's gradient is read there, and freed before it was.
            place.record_stream(torch.cuda.current_stream(device))
        return place

    def __call__(self, **_: Any) -> None:
        """Called by a torch that reduces over one rank as over many."""


class _Cast(FSDPParam):  # type: ignore[misc, valid-type]
    """A parameter that may already lie where it computes."""

    is_there = False

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        # FSDP copies these to the outputs, and a tensor onto itself costs nothing.
        return self.all_gather_outputs if self.is_there else super().all_gather_inputs


def _wait_for_unshard(group: Any) -> None:
    parameters = group.fsdp_params
    ready = bool(group._all_gather_result) and all(_can_be_cast(parameter) for parameter in parameters)
    if ready:
        _cast(parameters)
    _say(parameters, is_there=ready)
    try:
        FSDPParamGroup.wait_for_unshard(group)
    finally:
        _say(parameters, is_there=False)


def _say(parameters: Iterable[Any], *, is_there: bool) -> None:
    for parameter in parameters:
        parameter.is_there = is_there


def _can_be_cast(parameter: Any) -> bool:
    """There is a place for it, which there is not the first time, and it is a plain tensor."""
    plain = not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return plain and len(parameter.all_gather_outputs) == 1 and parameter.sharded_state == ShardedState.SHARDED


@torch.no_grad()
def _cast(parameters: list[Any]) -> None:
    places = [parameter.all_gather_outputs[0] for parameter in parameters]
    for place in places:
        alloc_storage(place)
    # As FSDP does: autograd must not take new values for a change of what it has saved.
    with torch.autograd._unsafe_preserve_version_counter(tuple(places)):
        torch._foreach_copy_(places, [parameter._sharded_param_data for parameter in parameters])
