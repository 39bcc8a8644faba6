"""A rank that ran out of memory goes on taking part in what the other ranks do, so that none of them waits for it.

FSDP gathers and reduces in the same order on every rank, whatever the number of rows. So the rank that failed frees its
memory and repeats the passes of the step from the start, with one row in place of each micro-batch. Of the collectives
in them it leaves out those that it has already had; with the rest it answers the other ranks, with its own parameters.
When all are through, they agree that the try is void. Must not know what follows from that.
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import SetupError
from fullshard.faults.aborted_pass import abort_pass
from fullshard.formatting.plural import counted

GATHERS = ("all_gather_into_tensor", "all_gather_single")
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
_WATCHED = (*GATHERS, *SCATTERS, "all_reduce")
"""What FSDP calls, under the names of every torch that is supported."""

Passes = Callable[[Sequence[Any]], list[Any]]
"""Forward and backward over micro-batches; gradients are left on the parameters."""


@dataclass
class Together:
    """Passes that all ranks run together, and that end on all of them if one runs out of memory."""

    modules: Sequence[nn.Module]
    """The model, and frozen ones that its passes use; each is sharded."""
    collectives: Any
    """`max_over_ranks`, `place` and torch's own collectives, as `dist`."""
    group: Any
    """All ranks, over the host: its agreement does not wait for a device."""
    _groups: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        meshes = {p.device_mesh for m in self.modules for p in m.parameters() if isinstance(p, DTensor)}
        found = [group for mesh in meshes for group in mesh.get_all_groups()]
        self._groups = list(dict.fromkeys([*found, self.collectives.dist.group.WORLD]))

    def run(
        self,
        passes: Passes,
        batches: Sequence[Any],
        tiny: Callable[[], Sequence[Any]],
        *,
        last: bool,
        then: Callable[[], None] | None = None,
    ) -> tuple[list[Any], int]:
        """What the passes return, and 0. If a rank ran out of memory: nothing, and its number from 1; then gradients
        and buffers are as before on every rank. `tiny` gives as many micro-batches, of one row each. With `last` the
        error is raised. With `then`, which waits for no other rank, the passes are a trial: void in any case."""
        before = [(buffer, buffer.clone()) for module in self.modules for buffer in module.buffers()]
        found, failed = self._try(passes, batches, last=last, then=then)
        if failed is not None:
            self._clean()
            free()
            self._answer(failed, passes, tiny)
        world, place = self.collectives.place()
        mine = 0 if failed is None else place + 1
        rank = self.collectives.max_over_ranks([mine], torch.device("cpu"), self.group)[0] if world > 1 else mine
        if rank or then:
            found = []
            self._clean()
            for buffer, value in before:
                buffer.copy_(value)
        return found, rank

    def _try(
        self, passes: Passes, batches: Sequence[Any], *, last: bool, then: Callable[[], None] | None
    ) -> tuple[list[Any], Counter[Any] | None]:
        """What the passes return; if they failed, the number of collectives on each group that this rank has had."""
        for module in self.modules:
            _reshard(module)  # so that every rank, and every repetition, gathers the same
        begun = self._sent()
        with _watched(self.collectives.dist, self._groups) as had:
            try:
                found = passes(batches)
                if then:
                    then()
                self._check(begun, had)
                return found, None
            except torch.OutOfMemoryError as error:
                if last:
                    raise
                _forget(error)
        self._check(begun, had)
        return [], had

    def _answer(self, had: Counter[Any], passes: Passes, tiny: Callable[[], Sequence[Any]]) -> None:
        """Takes part in the collectives that the other ranks still wait for."""
        if self.collectives.place()[0] > 1:
            with _watched(self.collectives.dist, self._groups, leave_out=had):
                passes(tiny())

    def _sent(self) -> dict[Any, int]:
        """The number of collectives on each group so far, as its backend counts them."""
        return {group: group._get_sequence_number_for_group() for group in self._groups}

    def _check(self, begun: dict[Any, int], had: Counter[Any]) -> None:
        """Raises if some collective was overlooked: this rank could not repeat it."""
        own = sum(number - begun[group] - had[group] for group, number in self._sent().items())
        if own:
            raise SetupError(
                "batch.on_oom: split and batch.per_device: auto cannot be used with this model or objective, which has "
                f"{counted(own, 'collective')} of its own in a step, beside the {had.total()} of FSDP: a rank without "
                "memory could not answer the others. Use a number for batch.per_device, and no batch.on_oom."
            )

    def _clean(self) -> None:
        """Leaves no gradient, and nothing gathered."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)  # of gathered parameters
            abort_pass(module)
            module.zero_grad(set_to_none=True)  # of their slices


def free() -> None:
    """Gives memory back that nothing refers to."""
    gc.collect()
    torch.cuda.empty_cache()


def _forget(error: BaseException) -> None:
    """Drops the tensors that the failed passes held, when the device is done with them."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__  # type: ignore[assignment]


def _reshard(module: nn.Module) -> None:
    for unit in module.modules():
        if hasattr(unit, "_get_fsdp_state"):
            unit.reshard()  # type: ignore[operator]


@contextmanager
def _watched(dist: Any, groups: Sequence[Any], *, leave_out: Counter[Any] | None = None) -> Iterator[Counter[Any]]:
    """Counts torch's collectives on these groups, and leaves out the first ones of each."""
    had: Counter[Any] = Counter()
    left: Counter[Any] = Counter(leave_out)
    originals = {name: getattr(dist, name) for name in _WATCHED if hasattr(dist, name)}

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def collective(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            group = dist.group.WORLD if given.get("group") is None else given["group"]
            if left[group] > 0:
                left[group] -= 1
                return _alone(name, list(given.values())[:2], group, asynchronous=bool(given.get("async_op")))
            result = original(*args, **kwargs)
            if group in groups:
                had[group] += 1
            return result

        return collective

    try:
        for name, original in originals.items():
            setattr(dist, name, watch(name, original))
        yield had
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    if left.total():
        raise RuntimeError(
            "A rank that ran out of memory repeated its passes with fewer collectives than before, so ranks no longer "
            "agree on where they are. Use a smaller batch.per_device."
        )


def _alone(name: str, tensors: list[Any], group: Any, *, asynchronous: bool) -> Any:
    """What a collective gives if every rank had sent what this one sends: the values only serve to go on."""
    if name in GATHERS:
        output, given = tensors
        own = given.clone()  # FSDP's input is a part of the output
        for part in output.view(group.size(), -1):
            part.copy_(own.view(-1))
    elif name in SCATTERS:
        output, given = tensors
        output.view(-1).copy_(given.view(group.size(), -1)[group.rank()])
    return _Done() if asynchronous else None


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


__all__ = ["Passes", "Together", "free"]
