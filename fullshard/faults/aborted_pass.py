"""Brings FSDP back to where a forward pass can begin, after an exception ended one in the middle.

From torch 2.13 on FSDP does this itself. For older versions the same is written out here, on its internal state: what
is in flight is waited for and dropped, and every unit is sharded again. Must not know why the pass ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def abort_pass(root: nn.Module) -> None:
    """Gradients of the pass are lost. `root`: the module that was sharded last."""
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    if state._is_root is None:
        return  # it has never run
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()  # type: ignore[operator]
    else:
        reset(state)


def reset(state: Any) -> None:
    """What `reset_iter_state` does, for torch 2.11 and 2.12."""
    stream, sent = state._device_handle.current_stream(), state._comm_ctx
    _wait(stream, [sent.all_gather_state])
    sent.all_gather_state = None
    if hasattr(sent, "reduce_scatter_states"):
        _wait(stream, sent.reduce_scatter_states)
        sent.reduce_scatter_states.clear()
    else:
        _wait(stream, [sent.reduce_scatter_state])
        sent.reduce_scatter_state = None
    sent.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        for group in _groups(each):
            _reset_group(group, stream)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _groups(state: Any) -> list[Any]:
    """Torch before 2.12 has at most one group of parameters in a unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset_group(group: Any, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        if gathered.all_gather_event is not None:
            stream.wait_event(gathered.all_gather_event)
        if hasattr(gathered.all_gather_work, "wait"):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    if group._post_reduce_event is not None:
        stream.wait_event(group._post_reduce_event)
        group._post_reduce_event = None
    _wait(stream, [group._all_reduce_state])
    group._all_reduce_state = None
    group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def _wait(stream: Any, pending: Iterable[Any]) -> None:
    """For collectives whose buffers are still in use."""
    for each in pending:
        if each is not None and each.event is not None:
            stream.wait_event(each.event)


__all__ = ["abort_pass", "reset"]
