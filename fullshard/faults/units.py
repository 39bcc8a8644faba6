"""Notes which FSDP unit each all-gather and reduce-scatter belongs to, when it is issued.

FSDP2 keeps one object per unit that issues its collectives; calling it also notes the unit, which costs one or two
microseconds. Must not change what a collective does, nor wait for one.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fullshard.faults import beat

_COMMS = (("_all_gather_comm", 1), ("_reduce_scatter_comm", 2))


def note(module: Any) -> None:
    """From now on, the heartbeat of this process names the units of this sharded model."""
    if beat.current is None:
        return
    names: list[str] = []
    for name, part in module.named_modules():
        groups = _groups(part)
        for group in groups:
            for attribute, act in _COMMS:
                if (comm := getattr(group, attribute, None)) is not None:
                    _noted(comm, len(names), act)
        if groups:
            names.append(name or "(root)")
    beat.current.describe(units=names)


def _groups(part: Any) -> list[Any]:
    """The parameter groups of an FSDP unit; none for any other module, or a torch that keeps them elsewhere."""
    if not hasattr(part, "_get_fsdp_state"):
        return []
    state = part._get_fsdp_state()
    with contextlib.suppress(AttributeError):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def _noted(comm: Any, unit: int, act: int) -> None:
    # A subclass, because FSDP asks what kind of object this is.
    kind = type(comm)
    before = kind.__mro__[1] if getattr(kind, "noted_by_fullshard", False) else kind

    def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
        if beat.current is not None:
            beat.current.collective(unit, act)
        return before.__call__(self, *args, **kwargs)

    with contextlib.suppress(TypeError):  # a kind with a layout of its own keeps its name
        comm.__class__ = type(kind.__name__, (before,), {"__call__": issue, "noted_by_fullshard": True})
