"""Breaks one rank of a run, once, in a place of a step: the part that a fault drill adds to a recipe.

An evaluation can do this, as it is called on every rank after every step: it arms the fault, which then waits for its
place in the next step. A file in the run folder says that it has happened, so that a restarted run is left alone.
Must not know what the run is compared with, nor how it recovers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import PrivateAttr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.drills import acts
from fullshard.log.meters import Meters
from fullshard.log.metrics import FILE, last_step

if TYPE_CHECKING:
    from torch import nn

Where = Literal["start", "data", "forward", "backward", "update", "save", "evaluate"]


class Fault(Evaluation):
    """One fault of one rank."""

    what: str
    """What happens; a function of acts.py."""
    where: Where
    """Where it happens. `start`: before the ranks meet, in a run that has been restarted."""
    after: int
    """In the step after this one; of `save` and `evaluate`, after this one."""
    rank: int
    of: str
    """The run folder."""
    name: str
    """Tells the faults of a run apart."""
    _armed: bool = PrivateAttr(False)

    @property
    def mark(self) -> Path:
        """The file that says that it has happened."""
        return Path(self.of) / f"fault-{self.name}"

    def check(self, objective: Any, model: nn.Module, held_out: Any) -> None:
        if self.where == "start" and self._mine and any(Path(self.of).glob("fault-*")):
            self._act()

    def run(self, inputs: EvaluationInputs) -> Findings:
        # Rank 0 has logged the step before it gets here; another rank may look too early.
        done = torch.tensor(float(last_step(Path(self.of) / FILE) or 0) * (_rank() == 0), device=inputs.device)
        due = int(inputs.sum_over_ranks(done)) >= self.after
        if due and not self._armed and self._mine and not self.mark.exists():
            self._armed = True
            if self.where == "evaluate":
                self._act(inputs)
            elif self.where != "start":
                _PLACES[self.where](self._act)
        return Findings()

    @property
    def _mine(self) -> bool:
        return _rank() == self.rank

    def _act(self, seen: Any = None) -> Any:
        """Does it once. Gives what the place hands over, as it is unless the fault changes it."""
        if self.mark.exists():
            return seen
        self.mark.touch()
        return acts.ACTS[self.what](seen)


def _rank() -> int:
    return int(os.environ.get("RANK", "-1"))


def _in_data(act: Callable[..., Any]) -> None:
    """While the step waits for its batch."""
    usual = Meters.phase

    def phase(meters: Meters, name: str) -> AbstractContextManager[None]:
        if name == "data":
            act()
        return usual(meters, name)

    Meters.phase = phase  # type: ignore[assignment, method-assign]


def _in_forward(act: Callable[..., Any]) -> None:
    def before(module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            act()

    register_module_forward_pre_hook(before)


def _in_backward(act: Callable[..., Any]) -> None:
    """At a gradient that reaches the output of some module."""

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(act)
                return

    register_module_forward_hook(after)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _in_update(act: Callable[..., Any]) -> None:
    register_optimizer_step_pre_hook(lambda *_: act())


def _in_save(act: Callable[..., Any]) -> None:
    """When this rank opens a file of the checkpoint; in a store it writes the file in its place."""

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, writes = str(arguments[0]), "w" in str(arguments[1])
            if ".unfinished-checkpoint-" in path or (writes and "/checkpoint-" in path):
                act()

    sys.addaudithook(opened)


_PLACES = {"data": _in_data, "forward": _in_forward, "backward": _in_backward, "update": _in_update, "save": _in_save}
