"""One rank: skips FSDP's passes over memory that only matter with several ranks; results are bitwise the same.

All parameters of a unit are cast in one call: FSDP launches two small kernels for every parameter, a cast into new
memory and a copy from there, more than a thousand per step for a model of some hundred parameters. With one rank
nothing is reduced, so gradients stay in place. The casts use private names of FSDP; if torch has renamed one, they are
skipped. Must not know what is computed.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError:  # another torch
    FSDPParam, ShardedState, alloc_storage, FSDPParamGroup = object, None, None, None  # type: ignore[misc, assignment]

logger = logging.getLogger(__name__)

_NAMES = ((FSDPParamGroup, "wait_for_unshard"), (FSDPParam, "all_gather_inputs"))


def save_passes(units: Sequence[Any]) -> None:
    """For the units of a model on one rank: reduces in place, and casts a unit's parameters in one call."""
    known = all(hasattr(owner, name) for owner, name in _NAMES)
    if not known:
        logger.info("this torch has other private names in FSDP; parameters are cast one by one")
    for unit in units:
        unit.set_custom_reduce_scatter(_InPlace())
        group = unit._get_fsdp_state()._fsdp_param_group if known else None
        if group is not None:
            group.wait_for_unshard = types.MethodType(_wait_for_unshard, group)
            for parameter in group.fsdp_params:
                parameter.__class__ = _Cast


class _InPlace:
    """Replaces FSDP's reduce-scatter, which allocates first its input, then its output: over one rank the output may
    alias the input, so that FSDP's copy is free."""

    def __init__(self) -> None:
        # A weak reference: if a backward pass fails between the two, the next one must start afresh.
        self._place: Callable[[], torch.Tensor | None] = lambda: None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        place, self._place = self._place(), lambda: None
        if place is None:
            place = torch.empty(*size, dtype=dtype, device=device)
            self._place = weakref.ref(place)
        elif place.is_cuda:
            # The reduction stream reads it: without this, a later micro-batch's gradient would be freed too early.
            place.record_stream(torch.cuda.current_stream(device))
        return place

    def __call__(self, **_: Any) -> None:
        """For a torch that also reduces over one rank: does nothing."""


class _Cast(FSDPParam):  # type: ignore[misc, valid-type]
    """A parameter that may have been cast already."""

    is_cast = False

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        # FSDP copies these to the outputs, and a tensor onto itself costs nothing.
        return self.all_gather_outputs if self.is_cast else super().all_gather_inputs


def _wait_for_unshard(group: Any) -> None:
    parameters = group.fsdp_params
    ready = bool(group._all_gather_result) and all(_can_be_cast(parameter) for parameter in parameters)
    if ready:
        _cast(parameters)
    for parameter in parameters:
        parameter.is_cast = ready
    try:
        FSDPParamGroup.wait_for_unshard(group)
    finally:
        for parameter in parameters:
            parameter.is_cast = False


def _can_be_cast(parameter: Any) -> bool:
    """It is a plain tensor, and its memory exists: the first time it does not."""
    plain = not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return plain and len(parameter.all_gather_outputs) == 1 and parameter.sharded_state == ShardedState.SHARDED


@torch.no_grad()
def _cast(parameters: list[Any]) -> None:
    places = [parameter.all_gather_outputs[0] for parameter in parameters]
    for place in places:
        alloc_storage(place)
    # As in FSDP: for autograd, this must not count as a change of saved tensors.
    with torch.autograd._unsafe_preserve_version_counter(tuple(places)):
        torch._foreach_copy_(places, [parameter._sharded_param_data for parameter in parameters])
